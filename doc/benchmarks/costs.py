"""CPU seconds of a fit at defaults against rows and columns, beside scikit-learn's models.

    python doc/benchmarks/costs.py            to 100,000 rows and 10,000 columns, six minutes
    python doc/benchmarks/costs.py --quick    to 1,000 rows and 500 columns
    python doc/benchmarks/costs.py --steps    on either side of each change of method, with log loss

Rows of ten columns, columns of 300 rows, and sparse texts of 20,000 words.

A curve ends where the next fit would take longer than a minute if time grew with the size. Writes
costs.json, costs.png and the table of the page "What it costs" (costs.inc).
"""

from common import alternate, arguments, cpu, figure, log_loss, save

import functools
import pathlib

import numpy as np
import scipy.sparse as sp
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LassoCV, LogisticRegression
from sklearn.preprocessing import normalize

import sklearn_ep

ROWS, AT_COLUMNS = (100, 300, 1000, 2000, 3000, 10_000, 30_000, 100_000), 10
COLUMNS, AT_ROWS = (5, 20, 100, 500, 2000, 10_000), 300
TEXTS, WORDS = (300, 1000, 4000, 16_000), 20_000
# what a panel goes along: its sizes, of which so many with --quick, what is fixed, and its models
PANELS = {
    "rows": (ROWS, 3, f"{AT_COLUMNS} columns", None),
    "columns": (COLUMNS, 4, f"{AT_ROWS} rows", None),
    "texts": (
        TEXTS, 2, f"{WORDS:,} words, sparse", ("ConvexVariationalLogistic", "LogisticRegression"),
    ),
}  # fmt: skip
LONGEST = 60.0  # CPU seconds


def data(n, d):
    """Return X, labels of a bent boundary, numbers of five columns, and groups of twenty rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    f = 1.5 * X[:, 0] + np.sin(2.0 * X[:, 1]) + X[:, 2] * X[:, 3]
    y = rng.random(n) < 1.0 / (1.0 + np.exp(-2.0 * f))
    z = X[:, :5] @ np.array([2.0, -1.5, 1.0, 1.0, -0.5]) + 0.5 * rng.normal(size=n)
    return X, y.astype(int), z, rng.permutation(np.arange(n) // 20)


def texts(n):
    """Return sparse counts of words in n texts of two topics, scaled to unit length, and topics."""
    rng = np.random.default_rng(0)
    y, share = rng.integers(2, size=n), 1.0 / np.arange(1, WORDS + 1)
    own = np.where(rng.random((2, WORDS)) < 0.05, np.exp(rng.normal(size=(2, WORDS))), 1.0)
    rows, words = [], []
    for topic in range(2):
        p = share * own[topic]
        lengths = 8 + rng.poisson(40, size=np.count_nonzero(y == topic))
        rows.append(np.repeat(np.flatnonzero(y == topic), lengths))
        words.append(rng.choice(WORDS, size=lengths.sum(), p=p / p.sum()))
    rows, words = np.concatenate(rows), np.concatenate(words)
    counts = sp.csr_array((np.ones(len(rows)), (rows, words)), shape=(n, WORDS))
    return normalize(counts), y, None, None


def laplace(d):
    """scikit-learn's Gaussian process with the start of ours, learned."""
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(3.0 * d**0.5, (1e-2, 1e4))
    return GaussianProcessClassifier(kernel)


# name -> call(X, y, z, groups) that fits, and whether it is one of ours
MODELS = {
    "EPGaussianProcessClassifier": (
        lambda X, y, z, g: sklearn_ep.EPGaussianProcessClassifier(random_state=0).fit(X, y), True,
    ),
    "EPGaussianProcessClassifier, mode": (
        lambda X, y, z, g: sklearn_ep.EPGaussianProcessClassifier(
            hyperparameters="mode", random_state=0
        ).fit(X, y), True,
    ),
    "RelaxedEPClassifier": (
        lambda X, y, z, g: sklearn_ep.RelaxedEPClassifier(random_state=0).fit(X, y), True,
    ),
    "SpikeSlabRegressor": (
        lambda X, y, z, g: sklearn_ep.SpikeSlabRegressor(random_state=0).fit(X, z), True,
    ),
    "ConvexVariationalLogistic": (
        lambda X, y, z, g: sklearn_ep.ConvexVariationalLogistic(random_state=0).fit(X, y), True,
    ),
    "HierarchicalEPLogistic": (
        lambda X, y, z, g: sklearn_ep.HierarchicalEPLogistic(random_state=0).fit(X, y, groups=g),
        True,
    ),
    "GaussianProcessClassifier": (lambda X, y, z, g: laplace(X.shape[1]).fit(X, y), False),
    "LogisticRegression": (lambda X, y, z, g: LogisticRegression(max_iter=1000).fit(X, y), False),
    "HistGradientBoosting": (
        lambda X, y, z, g: HistGradientBoostingClassifier(random_state=0).fit(X, y), False,
    ),
    "LassoCV": (lambda X, y, z, g: LassoCV(random_state=0).fit(X, z), False),
}  # fmt: skip
COLORS = {
    "EPGaussianProcessClassifier": "C0", "EPGaussianProcessClassifier, mode": "C9",
    "RelaxedEPClassifier": "C1", "SpikeSlabRegressor": "C2", "ConvexVariationalLogistic": "C3",
    "HierarchicalEPLogistic": "C4", "GaussianProcessClassifier": "0.2",
    "LogisticRegression": "0.45", "HistGradientBoosting": "0.6", "LassoCV": "0.75",
}  # fmt: skip


def course(against, sizes, names, repeats):
    """Return the rows of one panel: its models in turns at each size, as long as they are quick."""
    rows, last = [], {name: (None, 0.0) for name in names}
    for size in sizes:
        if against == "texts":
            given = texts(size)
        else:
            given = data(*((size, AT_COLUMNS) if against == "rows" else (AT_ROWS, size)))
        calls = {}
        for name in names:
            smaller, seconds = last[name]
            growth = 1.0 if smaller is None else size / smaller
            if smaller is not None and seconds * growth > LONGEST:
                continue
            calls[name] = functools.partial(MODELS[name][0], *given)
        last = {name: (size, np.inf) for name in names}
        for name, (_, seconds) in alternate(calls, repeats).items():
            rows.append({"against": against, "size": size, "model": name, "CPU s": seconds})
            last[name] = (size, seconds)
    return rows


def courses(rows, against):
    """Return what is measured along a panel: {model: {size: CPU s}}."""
    found = {}
    for r in rows:
        if r["against"] == against:
            found.setdefault(r["model"], {})[r["size"]] = r["CPU s"]
    return found


# sizes on either side of a change of method of the Gaussian processes: estimator, classes, columns
# and share of labels by chance with the numbers of rows
STEPS = {
    ("EPGaussianProcessClassifier", 2, 20, 0.05): (299, 300, 1000, 1001, 2000, 2001, 9999, 10_000),
    ("EPGaussianProcessClassifier", 5, 10, 0.05): (149, 150, 299, 300, 1000, 1001, 2000, 2001),
    ("EPGaussianProcessClassifier", 4, 30, 0.3): (1000, 1001, 2000),
    ("RelaxedEPClassifier", 2, 10, 0.2): (149, 150, 299, 300, 1000, 1001, 2000, 2001),
}


def steps():
    """Print CPU seconds and log loss of fits to the first rows of generated tables."""
    for (name, n_classes, d, flip), sizes in STEPS.items():
        shape = dict(n_classes=n_classes, n_clusters_per_class=3 if n_classes == 2 else 1)
        shape |= dict(n_informative=10, n_redundant=0, class_sep=0.8, flip_y=flip, random_state=0)
        X, y = make_classification(sizes[-1] + 2000, d, **shape)
        X, tested = (X - X.mean(0)) / X.std(0), slice(sizes[-1], None)
        for n in sizes:
            clf, seconds = cpu(functools.partial(getattr(sklearn_ep, name)().fit, X[:n], y[:n]))
            loss = log_loss(clf.predict_proba(X[tested]), y[tested])
            print(f"{name}, {n_classes} classes, {n} rows: {seconds:.2f} s, {loss:.4f}", flush=True)


def draw(args, rows):
    """Draw both panels."""
    import matplotlib.pyplot as plt

    size = dict(figsize=(13, 5.2), sharey=True, layout="constrained")
    fig, axes = plt.subplots(1, len(PANELS), **size)
    for ax, (against, (_, _, fixed, _)) in zip(axes, PANELS.items(), strict=True):
        for name, at in courses(rows, against).items():
            style = dict(ls="-" if MODELS[name][1] else "--", color=COLORS[name], label=name)
            ax.loglog(list(at), list(at.values()), marker="o", ms=3, **style)
        ax.set(xlabel=f"{against} ({fixed})")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("CPU seconds of a fit at defaults")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure(args, "costs", fig)


def write_include(path, rows):
    """Write a table for each panel as reStructuredText, models down and sizes across."""
    lines = []
    for against, (_, _, fixed, _) in PANELS.items():
        found = courses(rows, against)
        sizes = sorted({size for at in found.values() for size in at})
        lines += [f"CPU seconds against {against}, {fixed}:", "", ".. list-table::"]
        lines += ["   :header-rows: 1", "", "   * - model", *(f"     - {s:,}" for s in sizes)]
        for name, at in found.items():
            cells = [f"{at[s]:.2g}" if s in at else "" for s in sizes]
            lines += [f"   * - {name}", *(f"     - {cell}".rstrip() for cell in cells)]
        lines.append("")
    path.write_text("\n".join(lines).rstrip() + "\n")


def main():
    told = "CPU and log loss on either side of each change of method, and nothing else"
    args = arguments(__doc__.splitlines()[0], ("--steps", dict(action="store_true", help=told)))
    if args.steps:
        return steps()
    for fit, _ in MODELS.values():  # first fits import what they need
        fit(*data(50, 5))
    rows = []
    for against, (sizes, quick, _, names) in PANELS.items():
        rows += course(against, sizes[:quick] if args.quick else sizes, names or tuple(MODELS), 1)
    save(args, "costs", rows)
    draw(args, rows)
    write_include(pathlib.Path(args.out) / "costs.inc", rows)


if __name__ == "__main__":
    main()
