"""Two classes by few of many columns: spike and slab beside logistic regression with an l1 penalty.

    python doc/benchmarks/spike_slab_classes.py --data FOLDER    tumours of colon and prostate
    python doc/benchmarks/spike_slab_classes.py --quick          generated rows

Seven tenths of the rows train, columns in their units of deviation; random splits, 20 of colon (62
x 2000, logarithms) and 5 of prostate (102 x 6033). Logistic regression takes its penalty from a
path of ten by log loss in five folds. Figures are means over splits. Its columns are those with a
coefficient, those of spike and slab the ones with an inclusion above one half; their "expected"
number is the sum of inclusions. "Above l1" is the difference in log loss with its standard error
over splits, which share rows. "Spike and slab, a tenth" is a fit to the columns of most
inclusion, a tenth as many as the penalty keeps. "CPU / l1" is the median over splits.
"""

import warnings
from functools import partial

import numpy as np
from arena import load
from common import alternate, arguments, cpu, log_loss, save, table
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.preprocessing import StandardScaler

from sklearn_ep import SpikeSlabClassifier

FIGURES = "log loss", "error rate", "columns", "expected"
SETS = {"colon": 20, "prostate_singh": 5}  # splits
OWN, L1, TENTH = "spike and slab", "logistic regression, l1", "spike and slab, a tenth"


def sets(args):
    """Yield name, X, y and number of splits of those sets that are there."""
    if args.quick:
        generated = make_classification(
            80, 300, n_informative=3, n_redundant=0, class_sep=2.0, random_state=0
        )
        yield "generated", *generated, 3
        return
    for name, n_splits in SETS.items():
        data = load(name, args.data)
        if data is None:
            print(f"{name} is left out: it is read from --data")
        else:
            yield name, data[0], np.unique(data[1], return_inverse=True)[1], n_splits


def one_split(X, y, train, test):
    """Return figures of each method: log loss, error, columns, their expected number, CPU."""
    X = X[:, X[train].std(axis=0) > 0]
    scaler = StandardScaler().fit(X[train])
    A, B, label = scaler.transform(X[train]), scaler.transform(X[test]), y[train]
    l1 = LogisticRegressionCV(
        l1_ratios=(1.0,), solver="liblinear", scoring="neg_log_loss", cv=5, max_iter=1000,
        use_legacy_attributes=False,
    )  # fmt: skip
    models = {OWN: SpikeSlabClassifier(), L1: l1}
    fits = alternate({k: lambda m=m: m.fit(A, label) for k, m in models.items()}, 1)
    own, kept = fits[OWN][0], np.flatnonzero(l1.coef_[0])
    few = np.argsort(-own.inclusion_proba_, kind="stable")[: max(1, round(len(kept) / 10))]
    small, seconds = cpu(lambda: SpikeSlabClassifier().fit(A[:, few], label))
    seconds += fits[OWN][1]
    unit = fits[L1][1]
    return {
        OWN: figures(own, B, y[test], own.get_support().sum(), fits[OWN][1] / unit),
        TENTH: figures(small, B[:, few], y[test], len(few), seconds / unit),
        L1: figures(l1, B, y[test], len(kept), 1.0),
    }


def figures(fitted, X, y, n_columns, ratio):
    """Return log loss, error, columns kept and expected, and CPU of a fit."""
    proba = fitted.predict_proba(X)
    expected = getattr(fitted, "expected_model_size_", np.nan)
    return log_loss(proba, y), np.mean(proba.argmax(axis=1) != y), n_columns, expected, ratio


def main():
    """Run all splits of all sets and tabulate."""
    args = arguments(__doc__.splitlines()[0])
    warnings.simplefilter("ignore")
    rows = []
    for name, X, y, n_splits in sets(args):
        cut = StratifiedShuffleSplit(n_splits, train_size=0.7, random_state=7)
        found = [one_split(X, y, *part) for part in cut.split(X, y)]
        scaled = StandardScaler().fit_transform(X[:, X.std(axis=0) > 0])
        _, seconds = cpu(partial(SpikeSlabClassifier().fit, scaled, y))
        place = {"set": f"{name} {X.shape[0]} x {X.shape[1]}", "splits": n_splits}
        for method in found[0]:
            values = np.array([f[method] for f in found], float)
            apart = values[:, 0] - [f[L1][0] for f in found]
            row = place | {"method": method}
            row |= dict(zip(FIGURES, values[:, :-1].mean(axis=0), strict=True))
            row |= {"above l1": apart.mean(), "error of that": apart.std() / np.sqrt(n_splits)}
            row["CPU / l1"] = np.median(values[:, -1])
            row["CPU s, all rows"] = seconds if method == OWN else np.nan
            rows.append(row)
    table(rows, list(rows[0]))
    save(args, "spike_slab_classes", rows)


if __name__ == "__main__":
    main()
