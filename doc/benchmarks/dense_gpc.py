"""Dense EP against scikit-learn's Laplace classifier (and GPy's EP where installed).

    python doc/benchmarks/dense_gpc.py            n = 250 to 4000
    python doc/benchmarks/dense_gpc.py --quick    n = 250 to 1000

Same kernel, same start, same rows; isotropic and ARD length scales. Prints held-out log loss, error
and the ratio of CPU times, and draws how the times grow.
"""

from common import alternate, arguments, figure, log_loss, save, table

import numpy as np
from sklearn.datasets import make_classification
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier


def problem(n, seed=0):
    """n training rows and 2000 held-out rows of ten columns, 5 % of the labels random."""
    X, y = make_classification(n + 2000, 10, n_informative=6, flip_y=0.05, random_state=seed)
    X = (X - X[:n].mean(0)) / X[:n].std(0)
    return X[:n], y[:n], X[n:], y[n:]


def start(ard):
    """The common start: amplitude 1, length scale sqrt(10), wide bounds."""
    scale = np.full(10, 10**0.5) if ard else 10**0.5
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF(scale, (3e-2, 3e3))


def gpy_ep(X, y, ard):
    """Return a fit of GPy's EP classifier as a callable, or None without GPy."""
    try:
        import GPy
    except ImportError:
        return None

    def fit():
        kernel = GPy.kern.RBF(X.shape[1], lengthscale=10**0.5, ARD=ard)
        model = GPy.models.GPClassification(X, y[:, None], kernel=kernel)
        model.optimize(max_iters=150)
        return model

    return fit


def measure(n, ard):
    """Fit every peer on the same rows in turns; one row of the table."""
    X, y, X_new, y_new = problem(n)
    calls = {
        "EP": lambda: EPGaussianProcessClassifier(start(ard), method="dense").fit(X, y),
        "Laplace": lambda: GaussianProcessClassifier(start(ard)).fit(X, y),
    }
    peer = gpy_ep(X, y, ard) if n <= 1000 else None
    if peer is not None:
        calls["GPy EP"] = peer
    timed = alternate(calls, repeats=3 if n <= 500 else 1)
    row = dict(n=n, kernel="ARD" if ard else "isotropic")
    for name, (model, seconds) in timed.items():
        if name == "GPy EP":
            positive = model.predict(X_new)[0][:, 0]
            proba = np.column_stack([1 - positive, positive])
        else:
            proba = model.predict_proba(X_new)
        row[f"log loss {name}"] = log_loss(proba, y_new)
        row[f"error {name}"] = float(np.mean(proba.argmax(1) != y_new))
        row[f"CPU s {name}"] = seconds
        row[f"CPU EP / {name}"] = timed["EP"][1] / seconds
    return row


def main():
    args = arguments(__doc__.splitlines()[0])
    sizes = [250, 500, 1000] if args.quick else [250, 500, 1000, 2000, 4000]
    # the peer's (n, n, p) array of derivatives bounds what ARD can be compared on
    largest_ard = 500 if args.quick else 1000
    rows = [measure(n, ard) for ard in (False, True) for n in sizes if not ard or n <= largest_ard]
    names = [n for n in ("EP", "Laplace", "GPy EP") if any(f"log loss {n}" in r for r in rows)]
    columns = ["n", "kernel", *(f"log loss {n}" for n in names), *(f"error {n}" for n in names)]
    table(rows, [*columns, *(f"CPU EP / {n}" for n in names[1:])])
    save(args, "dense_gpc", rows)
    draw(args, rows, names)


def draw(args, rows, names):
    """CPU seconds against n, isotropic and ARD side by side."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for ax, kind in zip(axes, ("isotropic", "ARD"), strict=True):
        part = [r for r in rows if r["kernel"] == kind]
        for name in names:
            points = [(r["n"], r[f"CPU s {name}"]) for r in part if f"CPU s {name}" in r]
            ax.loglog(*zip(*points, strict=True), marker="o", label=name)
        sizes = [r["n"] for r in part]
        ax.set_xticks(sizes, sizes)
        ax.minorticks_off()
        ax.set(title=f"{kind} length scale", xlabel="rows", ylabel="CPU seconds of a fit")
        ax.legend()
    figure(args, "dense_gpc", fig)


if __name__ == "__main__":
    main()
