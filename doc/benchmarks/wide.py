"""A length for each of many columns, against one length for all of them and against boosting.

    python doc/benchmarks/wide.py [--quick] [--data FOLDER] [--only SET ...]

Nine sets of 150 to 500 columns, two classes, at most 300 training and 2000 test rows, three splits,
columns standardised by the training rows: nucleotides one-hot, genes and words of largest
variance, products of columns, columns of noise beside those of a set, and generated rows of which
ten columns matter. Log losses are means over splits. CPU is that of the default fit over the fit
with one length, alternating, the median over splits.
"""

import warnings

import numpy as np
from arena import load, tuned
from common import alternate, arguments, save, table
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.preprocessing import OneHotEncoder, PolynomialFeatures, StandardScaler

from sklearn_ep import EPGaussianProcessClassifier

MOST_TRAINED, MOST_TESTED = 300, 2000
QUICK = ("generated, 150 columns", "breast cancer, products")


def generated(n_columns):
    """Return rows of which ten columns matter."""
    return make_classification(
        1500, n_columns, n_informative=10, n_redundant=0, n_clusters_per_class=3, random_state=0
    )


def products(X):
    """Return the columns and their products."""
    return PolynomialFeatures(2, interaction_only=True, include_bias=False).fit_transform(X)


def with_noise(X, n_columns=100):
    """Return X with columns of noise behind its own."""
    return np.hstack([X, np.random.default_rng(0).normal(size=(len(X), n_columns))])


def most_varying(X, n_columns=300):
    """Return the columns of largest variance."""
    dense = X.toarray() if hasattr(X, "toarray") else X
    return dense[:, np.sort(np.argsort(-dense.var(axis=0))[:n_columns])]


def breast_cancer():
    """Return the columns of the breast cancer data and their products."""
    X, y = load_breast_cancer(return_X_y=True)
    return products(X), y


# what is made of the X and y of a set of the arena
FROM_FOLDER = {
    "splice, one-hot": ("splice", lambda X, y: (OneHotEncoder().fit_transform(X).toarray(), y)),
    "spambase and noise": ("spambase", lambda X, y: (with_noise(X), y)),
    "ionosphere and noise": ("ionosphere", lambda X, y: (with_noise(X, 150), y)),
    "waveform, products": ("waveform", lambda X, y: (products(X), y)),
    "colon, 300 genes": ("colon", lambda X, y: (most_varying(X), y)),
    "news, 300 words": ("rcv1_small", lambda X, y: (most_varying(X), y)),
}
MADE = {
    "generated, 150 columns": lambda: generated(150),
    "generated, 500 columns": lambda: generated(500),
    "breast cancer, products": breast_cancer,
}


def sets(args):
    """Yield name, X and y of those sets that are there."""
    for name in args.only or (QUICK if args.quick else [*MADE, *FROM_FOLDER]):
        if name in MADE:
            yield name, *MADE[name]()
            continue
        source, change = FROM_FOLDER[name]
        data = load(source, args.data)
        if data is None:
            print(f"{name} is left out: it is read from --data")
        else:
            yield name, *change(*data)


def one_split(X, y, train, test):
    """Return ({model: log loss}, CPU of the default over that of one length)."""
    X = X[:, X[train].std(axis=0) > 0]
    scaler = StandardScaler().fit(X[train])
    X_train, X_test = scaler.transform(X[train]), scaler.transform(X[test])
    one_length = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(np.sqrt(X.shape[1]), (1e-2, 1e4))
    boosting = HistGradientBoostingClassifier(random_state=0)
    models = {
        "a length for each": EPGaussianProcessClassifier(random_state=0),
        "one length": EPGaussianProcessClassifier(one_length, random_state=0),
        "boosting, tuned": tuned(
            boosting, {"learning_rate": [0.03, 0.1], "max_leaf_nodes": [4, 31]}
        ),
        "LogisticRegressionCV": LogisticRegressionCV(
            scoring="neg_log_loss", max_iter=2000, l1_ratios=(0.0,), use_legacy_attributes=False
        ),
    }
    fits = alternate({k: lambda m=m: m.fit(X_train, y[train]) for k, m in models.items()}, 1)
    losses = {k: log_loss(y[test], fit.predict_proba(X_test)) for k, (fit, _) in fits.items()}
    return losses, fits["a length for each"][1] / fits["one length"][1]


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--only", dict(nargs="*", default=None, help="names of sets")),
    )
    warnings.simplefilter("ignore")
    rows = []
    for name, X, y in sets(args):
        n_train = min(int(0.7 * len(y)), MOST_TRAINED)
        n_test = min(len(y) - n_train, MOST_TESTED)
        cut = StratifiedShuffleSplit(3, train_size=n_train, test_size=n_test, random_state=7)
        found = [one_split(X, y, *part) for part in cut.split(X, y)]
        means = {k: float(np.mean([losses[k] for losses, _ in found])) for k in found[0][0]}
        cost = float(np.median([ratio for _, ratio in found]))
        place = {"set": name, "rows": n_train, "columns": X.shape[1]}
        rows.append(place | means | {"CPU over one length": cost})
        table(rows[-1:], list(rows[-1]))
    mean = {k: float(np.mean([row[k] for row in rows])) for k in list(rows[0])[3:]}
    rows.append({"set": "mean", "rows": "", "columns": ""} | mean)
    table(rows, list(rows[0]))
    save(args, "wide", rows)


if __name__ == "__main__":
    main()
