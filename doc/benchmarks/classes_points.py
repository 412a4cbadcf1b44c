"""More than two classes through inducing points: EP beside stochastic variational inference.

    python doc/benchmarks/classes_points.py --data FOLDER     digits of 8 by 8 pixels, and MNIST
    python doc/benchmarks/classes_points.py                   digits of 8 by 8 pixels alone
    python doc/benchmarks/classes_points.py --quick           few rows of them, 20 points

Our joint posterior and one class against the rest, and, where GPyTorch is installed, its SVGP: one
latent function a class, softmax, Adam, batches of 200 (a tenth of the rows where these are fewer).
Steps along natural gradients lost positive definiteness on digits. The number of points, one
kernel with one length for all classes, and the rows are the same for all. SVGP goes on for twice
the CPU seconds of our joint fit, testing not counted; its rows are those of the last epoch
that ended within shares and multiples of these. `epochs` of ours are passes over all rows.
"""

import importlib.util
import pathlib
import warnings

import numpy as np
from common import arguments, cpu, save, table
from sklearn.datasets import load_digits
from sparse_gpc import BATCH, SVGP, first_points, outcome

from sklearn_ep import EPGaussianProcessClassifier

# CPU seconds of SVGP at which it is tested, in those of our joint fit.
STOPS = (0.25, 0.5, 1.0, 2.0)


def small_digits(quick):
    """Return (X, y, X_new, y_new) of digits of 8 by 8 pixels."""
    X, y = load_digits(return_X_y=True)
    order, n = np.random.default_rng(0).permutation(len(y)), 300 if quick else 1257
    return X[order[:n]] / 16, y[order[:n]], X[order[n:]] / 16, y[order[n:]]


def mnist(folder):
    """Return (X, y, X_new, y_new) of MNIST, pixels in [0, 1]."""
    with np.load(pathlib.Path(folder) / "mnist.npz") as data:
        pairs = [(data[f"X_{k}"] / 255.0, data[f"y_{k}"].astype(int)) for k in ("train", "test")]
    return *pairs[0], *pairs[1]


def problems(args):
    """Yield (name, arrays, inducing points, settings of our fits)."""
    few = dict(max_iter=5) if args.quick else dict(max_iter=40)
    digits = small_digits(args.quick)
    yield "digits", digits, 20 if args.quick else 200, dict(learning_rate=0.1, **few)
    if args.data and not args.quick:
        yield "MNIST", mnist(args.data), 200, dict(max_iter=30)


def own_rows(name, arrays, m, settings):
    """Return the rows of our fits, the joint one first."""
    X, y, X_new, y_new = arrays
    rows = []
    for how in ("joint", "one_vs_rest"):
        clf = EPGaussianProcessClassifier(
            method="sparse", n_inducing=m, multi_class=how, random_state=0, **settings
        )
        _, seconds = cpu(lambda c=clf: c.fit(X, y))
        label = f"EP, {how.replace('_', ' ')}"
        row = outcome(label, clf.max_iter, seconds, clf.predict_proba(X_new), y_new)
        rows.append(dict(set=name, **row))
    return rows


def peer_rows(name, arrays, m, seconds):
    """Yield the rows of SVGP in shares and multiples of our CPU seconds."""
    import gpytorch
    import torch

    X = arrays[0]
    points = first_points(X, m)
    scale = float(np.sqrt(X.var(axis=0).sum()))
    batch = min(BATCH, len(X) // 10)
    classes = len(np.unique(arrays[1]))
    peer = SVGP(arrays, points, False, batch, n_classes=classes, lengths=[scale])
    versions = f"GPyTorch {gpytorch.__version__}, torch {torch.__version__}"
    method = f"SVGP, batches of {batch} ({versions})"
    epochs = []
    for share in STOPS:
        epochs += peer.rows_until(share * seconds)
        within = [row for row in epochs if row["CPU s"] <= share * seconds]
        if within:
            yield dict(set=name, **within[-1] | dict(method=method))


def main():
    args, rows = arguments(__doc__.split("\n")[0]), []
    has_peer = all(importlib.util.find_spec(package) for package in ("torch", "gpytorch"))
    warnings.simplefilter("ignore")
    for name, arrays, m, settings in problems(args):
        rows += own_rows(name, arrays, m, settings)
        save(args, "classes_points", rows)
        seconds = rows[-2]["CPU s"]
        for row in peer_rows(name, arrays, m, seconds) if has_peer else ():
            rows.append(row)
            save(args, "classes_points", rows)
    table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
