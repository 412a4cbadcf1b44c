"""Time a fit of every estimator at growing sizes, beside a scikit-learn peer.

    python doc/benchmarks/sizes.py            up to tens of thousands of rows
    python doc/benchmarks/sizes.py --quick    the smaller half

Writes sizes.json and the table of the page "Which estimator when" (sizes.inc).
"""

from common import alternate, arguments, save, table

import pathlib
import platform

import numpy as np
from sklearn.datasets import make_classification
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LassoCV, LogisticRegressionCV

import sklearn_ep


def columns_for_gp(n):
    X, y = make_classification(n, 10, n_informative=6, flip_y=0.05, random_state=0)
    return (X - X.mean(0)) / X.std(0), y


def laplace():
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(10**0.5, (3e-2, 3e3))
    return GaussianProcessClassifier(kernel)


def dense_gp(n):
    X, y = columns_for_gp(n)
    ours = sklearn_ep.EPGaussianProcessClassifier(laplace().kernel, method="dense")
    return (
        f"{n} x 10",
        ours,
        (X, y),
        ("GaussianProcessClassifier", laplace() if n <= 2000 else None),
    )


def sparse_gp(n):
    X, y = columns_for_gp(n)
    ours = sklearn_ep.EPGaussianProcessClassifier(method="sparse", n_inducing=100, random_state=0)
    return f"{n} x 10, 100 inducing points", ours, (X, y), (None, None)


def noisy_gp(n):
    X, y = columns_for_gp(n)
    ours = sklearn_ep.RelaxedEPClassifier()
    return f"{n} x 10", ours, (X, y), ("GaussianProcessClassifier", laplace())


def spike_slab(n, d):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    y = X[:, :10] @ rng.normal(size=10) + 0.5 * rng.normal(size=n)
    peer = LassoCV(cv=5, random_state=0)
    return f"{n} x {d}", sklearn_ep.SpikeSlabRegressor(), (X, y), ("LassoCV", peer)


def convex(n, d):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    y = rng.uniform(size=n) < 1 / (1 + np.exp(-X @ rng.normal(size=d) / d**0.5))
    ours = sklearn_ep.ConvexVariationalLogistic(learn_prior=True, random_state=0)
    peer = LogisticRegressionCV(Cs=10, l1_ratios=(0,), use_legacy_attributes=False)
    return f"{n} x {d}", ours, (X, y), ("LogisticRegressionCV", peer)


def hierarchical(n, n_groups):
    rng = np.random.default_rng(0)
    group = np.arange(n) % n_groups
    X = rng.normal(size=(n, 10))
    log_odds = X @ rng.normal(size=10) / 3 + rng.normal(size=n_groups)[group]
    y = rng.uniform(size=n) < 1 / (1 + np.exp(-log_odds))
    ours = sklearn_ep.HierarchicalEPLogistic(group_column=10)
    return f"{n} x 10, {n_groups} groups", ours, (np.column_stack([X, group]), y), (None, None)


CASES = [
    (dense_gp, (250,), (1000,), (2000,)),
    (sparse_gp, (2000,), (10_000,), (50_000,)),
    (noisy_gp, (250,), (500,), (1000,)),
    (spike_slab, (100, 500), (200, 2000), (300, 10_000)),
    (convex, (1000, 50), (10_000, 100), (50_000, 100)),
    (hierarchical, (1000, 50), (4000, 100), (20_000, 400)),
]


def measure(case, size):
    """Fit ours and the peer in turns; one row of the table."""
    label, ours, (X, y), (name, peer) = case(*size)
    calls = {"ours": lambda: ours.fit(X, y)}
    if peer is not None:
        calls["peer"] = lambda: peer.fit(X, y)
    timed = alternate(calls, repeats=1)
    row = {"estimator": type(ours).__name__, "size": label, "CPU s": timed["ours"][1]}
    if peer is not None:
        row |= {"ratio": timed["ours"][1] / timed["peer"][1], "peer": name}
    return row


def write_include(path, rows):
    """Write the table as reStructuredText."""
    lines = [
        f"CPU seconds of one fit on one core ({platform.machine()}), and their ratio to a",
        "scikit-learn estimator fitted to the same data in turns. Ratios travel better than",
        "seconds. Command: ``python doc/benchmarks/sizes.py``.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - estimator",
        "     - rows x columns",
        "     - CPU seconds",
        "     - ratio",
        "     - to",
    ]
    for row in rows:
        ratio = f"{row['ratio']:.2g}" if "ratio" in row else ""
        lines += [
            f"   * - `{row['estimator']}`",
            f"     - {row['size']}",
            f"     - {row['CPU s']:.2g}",
            f"     - {ratio}".rstrip(),
            f"     - {row.get('peer', '')}".rstrip(),
        ]
    path.write_text("\n".join(lines) + "\n")


def main():
    args = arguments(__doc__.splitlines()[0])
    n_sizes = 2 if args.quick else 3
    rows = [measure(case, size) for case, *sizes in CASES for size in sizes[:n_sizes]]
    table(rows, ["estimator", "size", "CPU s", "ratio", "peer"])
    save(args, "sizes", rows)
    write_include(pathlib.Path(args.out) / "sizes.inc", rows)


if __name__ == "__main__":
    main()
