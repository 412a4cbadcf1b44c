"""Peak memory of the large fits, against what the method has to hold.

    python doc/benchmarks/memory.py            half a million rows, 40,000 and 100,000 columns
    python doc/benchmarks/memory.py --quick    about a tenth of that

Each fit is a process of its own. What counts is the peak of everything allocated after the data
were there (tracemalloc), in units of what the method must keep: never an array of rows times
inducing points, columns times columns, or groups times columns squared.
"""

from common import arguments, save, table

import json
import subprocess
import sys
import tracemalloc
import warnings

import numpy as np


def sparse_gp(quick):
    """Minibatch EP with 100 inducing points; keeps two scalars a row and blocks of rows."""
    from sklearn.gaussian_process.kernels import RBF

    from sklearn_ep import EPGaussianProcessClassifier

    n, d = (50_000 if quick else 500_000), 8
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, d))
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + rng.standard_normal(n) > 0).astype(int)
    model = EPGaussianProcessClassifier(
        1.0 * RBF(2.0),
        method="sparse",
        n_inducing=100,
        batch_size=200,
        max_iter=1,
        random_state=0,
    )
    return model, (X, y), "X and 10 columns of n", X.nbytes + 80 * n


def convex(quick):
    """Sparse logistic regression; keeps entries and a few vectors."""
    from sklearn_ep import ConvexVariationalLogistic
    from sklearn_ep.datasets import make_sparse_logistic

    n, d = (12_000, 8_000) if quick else (50_000, 40_000)
    X, y, _ = make_sparse_logistic(n, d, n_per_row=70, random_state=0)
    entries = X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
    unit = 8 * (n + d)
    return ConvexVariationalLogistic(random_state=0), (X, y), "X and 8 vectors", entries + 8 * unit


def spike_slab(quick):
    """Sparse regression with far more columns than rows; keeps blocks of columns."""
    from sklearn_ep import SpikeSlabRegressor
    from sklearn_ep.datasets import make_spike_slab_regression

    d = 10_000 if quick else 100_000
    X, y, _ = make_spike_slab_regression(200, d, random_state=0)
    return SpikeSlabRegressor(copy_X=False), (X, y), "X", X.nbytes


def hierarchical(quick):
    """Grouped rows; keeps a column block a group."""
    from sklearn_ep import HierarchicalEPLogistic
    from sklearn_ep.datasets import make_hierarchical_logistic

    n_groups = 100 if quick else 1000
    X, y, groups, *_ = make_hierarchical_logistic(n_groups, 50, 50, random_state=0)
    return HierarchicalEPLogistic(), (X, y, groups), "X", X.nbytes


PATHS = {f.__name__: f for f in (sparse_gp, convex, spike_slab, hierarchical)}


def measure(name, quick):
    """Fit one path in this process and return its row."""
    model, (X, y, *groups), unit, size = PATHS[name](quick)
    extra = {"groups": groups[0]} if groups else {}
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y, **extra)
    peak = tracemalloc.get_traced_memory()[1]
    return {
        "fit": type(model).__name__,
        "rows": X.shape[0],
        "columns": X.shape[1],
        "peak MB": peak / 2**20,
        "unit": unit,
        "peak / unit": peak / size,
    }


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--only", dict(choices=PATHS, help="one fit, in this process, as a line of JSON")),
    )
    if args.only:
        print(json.dumps(measure(args.only, args.quick)))
        return
    rows = []
    for name in PATHS:
        command = [sys.executable, __file__, "--only", name, *(["--quick"] if args.quick else [])]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(out.splitlines()[-1]))
    table(rows, list(rows[0]))
    save(args, "memory", rows)


if __name__ == "__main__":
    main()
