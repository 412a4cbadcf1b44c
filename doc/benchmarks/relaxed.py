"""Wrong labels: relaxed EP, EP and power EP against classifiers that trust every label.

    python doc/benchmarks/relaxed.py                       generated data, 20 splits
    python doc/benchmarks/relaxed.py --data FOLDER         also the sets found there
    python doc/benchmarks/relaxed.py --quick               3 splits

A set at a time, error and log loss where the training labels are exchanged with the probability in
the column "flips" and the test labels are clean; what Qi and Guo (2012) measured is on the page of
the papers (`paper_items/relaxed.py`). Further tables: how well each method ranks the wrong labels,
the learned rate and the sweeps; the effect of the penalty of relaxation at the learned kernel and
rate; and of averaging predictions over rates by their evidence. Figures are means over splits with
standard errors.
"""

import pathlib
import warnings

from common import arguments, figure, log_loss, save, table

import numpy as np
from scipy.special import logsumexp
from scipy.stats import beta
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

from sklearn_ep import RelaxedEPClassifier
from sklearn_ep.datasets import make_noisy_labels_classification

SETS = ["heart", "haberman", "pima532", "diabetis", "spambase"]
MOST_ROWS = 250
FLIPS = (0.0, 0.1, 0.2, 0.3)
PENALTIES = (0.02, 0.05, 0.1, 0.2, 0.5)
RATES = (0.02, 0.08, 0.15, 0.22, 0.3, 0.38)


def generated(split, flip):
    """200 rows of the generated mixture and 2000 clean ones."""
    X, y, _, flipped = make_noisy_labels_classification(
        200, flip=flip, return_flipped=True, random_state=split
    )
    X_new, _, y_new = make_noisy_labels_classification(2000, flip=0.0, random_state=10**6)
    return X, y, X_new, y_new, flipped


def loaded(data, split, flip):
    """A random half of a set for training, at most 320 rows, the rest with clean labels."""
    X, y = np.asarray(data["X"], float), (np.asarray(data["y"]) > 0).astype(int)
    order = np.random.RandomState(split).permutation(len(y))
    n = min(len(y) // 2, MOST_ROWS)
    train, test = order[:n], order[n:][:1000]
    centre, scale = X[train].mean(0), X[train].std(0) + 1e-9
    flipped = np.random.RandomState(1000 + split).rand(n) < flip
    y_train = np.where(flipped, 1 - y[train], y[train])
    return (X[train] - centre) / scale, y_train, (X[test] - centre) / scale, y[test], flipped


def problems(args):
    """Return {name: (split, flip) -> data}."""
    found = {"generated": generated}
    for name in SETS if args.data else []:
        path = pathlib.Path(args.data) / f"{name}.npz"
        if path.exists():
            data = dict(np.load(path, allow_pickle=False))
            found[name] = lambda split, flip, data=data: loaded(data, split, flip)
    return found


def peers(d):
    """Return {name: estimator} of the classifiers that trust every label, and of cleanlab."""
    gpc = GaussianProcessClassifier(ConstantKernel(1.0) * RBF(np.sqrt(d)))
    grid = {"C": [0.1, 1.0, 10.0, 100.0], "gamma": [0.1 / d, 0.3 / d, 1.0 / d]}
    found = {
        "Laplace GPC": gpc,
        "SVC": GridSearchCV(SVC(), grid, cv=3),
        "logistic": LogisticRegressionCV(
            Cs=10, l1_ratios=(0.0,), use_legacy_attributes=False, scoring="neg_log_loss"
        ),
    }
    try:
        from cleanlab.classification import CleanLearning
    except ImportError:
        return found
    return {**found, "cleanlab(GPC)": CleanLearning(gpc)}


def ours():
    """Return {name: estimator} of the three rules, and of the first with a linear kernel."""
    found = {rule: RelaxedEPClassifier(rule=rule) for rule in ("relaxed", "ep", "power")}
    linear = ConstantKernel(0.1, (1e-4, 10.0)) * DotProduct(1.0, "fixed")
    return {**found, "relaxed, linear": RelaxedEPClassifier(linear)}


def mean_and_error(values):
    """Return 'mean +- standard error'."""
    values = np.asarray(values, float)
    return f"{values.mean():.4f} +- {values.std(ddof=1) / np.sqrt(len(values)):.4f}"


def one_split(X, y, X_new, y_new, flipped):
    """Fit everything; return {name: dict of figures}."""
    out = {}
    for name, model in {**ours(), **peers(X.shape[1])}.items():
        model.fit(X, y)
        row = dict(error=np.mean(model.predict(X_new) != y_new))
        if hasattr(model, "predict_proba"):
            row["log_loss"] = log_loss(model.predict_proba(X_new), y_new)
        if hasattr(model, "get_label_issues") and flipped.any():
            row["auc"] = roc_auc_score(flipped, -model.get_label_issues()["label_quality"])
        if hasattr(model, "noise_proba_"):
            row.update(rate=model.label_noise_, sweeps=model.n_sweeps_, done=model.converged_)
            if flipped.any():
                row["auc"] = roc_auc_score(flipped, model.noise_proba_)
        out[name] = row
    return out


def measure(name, make, flip, n_splits):
    """Return one row of figures a method, over splits."""
    splits = [one_split(*make(k, flip)) for k in range(n_splits)]
    rows = []
    for method in splits[0]:
        row = {"data": name, "flips": flip, "method": method}
        for figure_name in splits[0][method]:
            row[figure_name] = mean_and_error([s[method][figure_name] for s in splits])
        rows.append(row)
    return rows


def penalties(name, make, n_splits):
    """Effect of the penalty at the kernel and rate that EP learned, 20 % of the labels flipped."""
    differences: dict[float, list] = {c: [] for c in PENALTIES}
    relaxed: dict[float, list] = {c: [] for c in PENALTIES}
    for k in range(n_splits):
        X, y, X_new, y_new, _ = make(k, 0.2)
        ep = RelaxedEPClassifier(rule="ep").fit(X, y)
        for c in PENALTIES:
            clf = RelaxedEPClassifier(
                ep.kernel_, relaxation=c, label_noise=ep.label_noise_, optimizer=None
            ).fit(X, y)
            change = np.mean(clf.predict(X_new) != y_new) - np.mean(ep.predict(X_new) != y_new)
            differences[c].append(100 * change)
            relaxed[c].append(np.mean(clf.relaxation_ > 0))
    return [
        dict(
            data=name,
            penalty=c,
            error_over_ep=mean_and_error(differences[c]),
            share_relaxed=mean_and_error(relaxed[c]),
        )
        for c in PENALTIES
    ]


def averaging(name, make, n_splits):
    """Predictions of EP averaged over fixed rates by evidence and prior, against the learned one.

    20 % of the labels flipped; the kernel is learned anew at each rate.
    """
    found = []
    for k in range(n_splits):
        X, y, X_new, y_new, _ = make(k, 0.2)
        learned = RelaxedEPClassifier(rule="ep").fit(X, y)
        fits = [RelaxedEPClassifier(rule="ep", label_noise=e).fit(X, y) for e in RATES]
        log_w = np.array([f.log_evidence_ for f in fits]) + beta(3, 9).logpdf(RATES)
        weights = np.exp(log_w - logsumexp(log_w))
        mean = np.tensordot(weights, [f.predict_proba(X_new) for f in fits], 1)
        one = learned.predict_proba(X_new)
        wrong = [100 * np.mean(p.argmax(axis=1) != y_new) for p in (mean, one)]
        loss = log_loss(mean, y_new) - log_loss(one, y_new)
        found.append((wrong[0] - wrong[1], loss, 1.0 / np.sum(weights**2)))
    columns = ("error_over_learned", "log_loss_over_learned", "rates_that_count")
    return [
        {"data": name, **dict(zip(columns, map(mean_and_error, np.transpose(found)), strict=True))}
    ]


def draw(args, rows):
    """Log loss against the rate of wrong labels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["data"] for r in rows))
    fig, axes = plt.subplots(
        1, len(names), figsize=(3.2 * len(names), 3.6), squeeze=False, layout="constrained"
    )
    for ax, name in zip(axes[0], names, strict=True):
        for method in ("relaxed", "ep", "power", "Laplace GPC", "cleanlab(GPC)"):
            mine = [r for r in rows if r["data"] == name and r["method"] == method]
            loss = [float(r["log_loss"].split(" ")[0]) for r in mine]
            if mine:
                style = "s--" if method == "ep" else "o-"
                ax.plot([r["flips"] for r in mine], loss, style, label=method)
        ax.set(title=name, xlabel="share of wrong labels", ylabel="log loss, clean labels")
    handles = axes[0, 0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=len(handles[0]))
    figure(args, "relaxed", fig)


def main():
    args = arguments(__doc__.split("\n")[0])
    warnings.simplefilter("ignore", ConvergenceWarning)
    n_splits = 3 if args.quick else 20
    rows, effects = [], []
    for name, make in problems(args).items():
        for flip in FLIPS:
            rows += measure(name, make, flip, n_splits)
        effects += penalties(name, make, n_splits)
        means = averaging(name, make, n_splits)
        print(f"\n{name}\n", flush=True)
        mine = [r for r in rows if r["data"] == name]
        table(mine, ["flips", "method", "error", "log_loss"])
        table(
            [r for r in mine if "rate" in r or "auc" in r],
            ["flips", "method", "auc", "rate", "sweeps", "done"],
        )
        table(
            [r for r in effects if r["data"] == name and "penalty" in r],
            ["penalty", "error_over_ep", "share_relaxed"],
        )
        table(means, list(means[0])[1:])
        effects += means
        save(args, "relaxed", rows + effects)
    draw(args, rows)


if __name__ == "__main__":
    main()
