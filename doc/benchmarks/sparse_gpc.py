"""Sparse EP against stochastic variational inference, and how its passes grow.

    python doc/benchmarks/sparse_gpc.py --data FOLDER     odd against even digits from mnist.npz
    python doc/benchmarks/sparse_gpc.py                   the same digits from OpenML
    python doc/benchmarks/sparse_gpc.py --quick           a synthetic set of 5000 rows

Draws held-out log loss against CPU seconds for EP and, where GPyTorch is installed, its SVGP with
Adam and with natural gradients: same inducing points, same batches, in one run. Then times of a
pass for growing n and m, and their share of the rate of a plain matrix product.
"""

from common import arguments, cpu, figure, log_loss, save, table

import pathlib
import warnings

import numpy as np
from sklearn.datasets import fetch_openml, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier


def digits(folder):
    """Return (X, y, X_new, y_new) of odd against even digits, pixels in [0, 1]."""
    if folder is not None:
        with np.load(pathlib.Path(folder) / "mnist.npz") as data:
            pair = [(data[f"X_{k}"] / 255.0, data[f"y_{k}"] % 2) for k in ("train", "test")]
        return *pair[0], *pair[1]
    X, y = fetch_openml("mnist_784", return_X_y=True, as_frame=False)
    X, y = X / 255.0, y.astype(int) % 2
    return X[:60000], y[:60000], X[60000:], y[60000:]


def synthetic(n, d=10, seed=0):
    """Return (X, y, X_new, y_new), 2000 held-out rows, 5 % of the labels random."""
    X, y = make_classification(n + 2000, d, n_informative=6, flip_y=0.05, random_state=seed)
    X = (X - X.mean(0)) / X.std(0)
    return X[:n], y[:n], X[n:], y[n:]


def start_kernel(X, amplitude):
    """ARD kernel of a length scale that fits the spread of the columns."""
    scale = float(np.sqrt(X[:2000].var(axis=0).sum()))
    return ConstantKernel(amplitude, (1e-3, 1e3)) * RBF(
        np.full(X.shape[1], scale), (1e-2 * scale, 1e3 * scale)
    )


def ep_curve(problem, m, epochs):
    """Return rows (epochs, CPU seconds, log loss, error) of sparse EP."""
    X, y, X_new, y_new = problem
    rows = []
    for n_epochs in epochs:
        model = EPGaussianProcessClassifier(
            start_kernel(X, 10.0),
            method="sparse",
            n_inducing=m,
            batch_size=200,
            learning_rate=0.01,
            learn_inducing=True,
            max_iter=n_epochs,
            max_sweeps=4,
            random_state=0,
        )
        _, seconds = cpu(lambda model=model: model.fit(X, y))
        proba = model.predict_proba(X_new)
        error = float(np.mean(proba.argmax(1) != y_new))
        rows.append(
            {
                "method": "EP",
                "epochs": n_epochs,
                "CPU s": seconds,
                "log loss": log_loss(proba, y_new),
                "error": error,
            }
        )
        inducing = model.inducing_points_
    return rows, inducing


def svgp_curve(problem, inducing, epochs, natural):
    """Return the same rows for GPyTorch's SVGP, or none where it is not installed."""
    try:
        import gpytorch
        import torch
    except ImportError:
        return []
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    X, y, X_new, y_new = (torch.as_tensor(np.asarray(a, dtype=float)) for a in problem)
    variational = gpytorch.variational
    family = (
        variational.NaturalVariationalDistribution
        if natural
        else variational.CholeskyVariationalDistribution
    )

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            points = torch.as_tensor(inducing)
            strategy = variational.VariationalStrategy(self, points, family(len(points)))
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1])
            base.lengthscale = float(np.sqrt(problem[0][:2000].var(axis=0).sum()))
            self.covar_module = gpytorch.kernels.ScaleKernel(base)
            self.covar_module.outputscale = 10.0

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    model, likelihood = Model(), gpytorch.likelihoods.BernoulliLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, len(X))
    rules = [torch.optim.Adam(model.hyperparameters(), lr=0.01)]
    if natural:
        settings = dict(num_data=len(X), lr=0.1)
        rules.append(gpytorch.optim.NGD(model.variational_parameters(), **settings))
    else:
        rules.append(torch.optim.Adam(model.variational_parameters(), lr=0.01))

    def epoch():
        for batch in torch.randperm(len(X)).split(200):
            for rule in rules:
                rule.zero_grad()
            (-bound(model(X[batch]), y[batch])).backward()
            for rule in rules:
                rule.step()

    rows, seconds = [], 0.0
    for k in range(1, max(epochs) + 1):
        model.train()
        seconds += cpu(epoch)[1]
        model.eval()
        with torch.no_grad():
            p = torch.cat([likelihood(model(part)).probs for part in X_new.split(1000)]).numpy()
        proba, labels = np.column_stack([1 - p, p]), np.asarray(problem[3])
        rows.append(
            {
                "method": "SVGP, natural gradients" if natural else "SVGP, Adam",
                "epochs": k,
                "CPU s": seconds,
                "log loss": log_loss(proba, labels),
                "error": float(np.mean(proba.argmax(1) != labels)),
            }
        )
    return rows


def gemm_seconds(n, m):
    """CPU seconds of one product (n, m) x (m, m)."""
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((min(n, 10_000), m)), rng.standard_normal((m, m))
    times = [cpu(lambda: A @ B)[1] for _ in range(9)]
    return float(np.median(times)) * n / len(A)


def pass_row(n, m, d=8):
    """Time of a pass at fixed kernel, as a difference of two fits, and its share of gemm."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, d))
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + rng.standard_normal(n) > 0).astype(int)

    def fit(sweeps):
        model = EPGaussianProcessClassifier(
            ConstantKernel(3.0) * RBF(np.full(d, 2.0)),
            method="sparse",
            inducing_points=X[:m],
            optimizer=None,
            max_sweeps=sweeps,
            tol=1e-14,
        )
        return cpu(lambda: model.fit(X, y))[1]

    fit(1)
    seconds = float(np.median([fit(6) - fit(2) for _ in range(3)])) / 4
    products = 2.5 * gemm_seconds(n, m)
    return {
        "n": n,
        "m": m,
        "CPU s a pass": seconds,
        "us a row": 1e6 * seconds / n,
        "share of gemm rate": products / seconds,
    }


def draw(args, curves, passes):
    """Draw log loss against time and the growth of a pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for name in dict.fromkeys(row["method"] for row in curves):
        own = [row for row in curves if row["method"] == name]
        left.plot([r["CPU s"] for r in own], [r["log loss"] for r in own], "o-", label=name)
    left.set(xlabel="CPU seconds", ylabel="held-out log loss", xscale="log")
    left.legend()
    for m in dict.fromkeys(row["m"] for row in passes):
        own = [row for row in passes if row["m"] == m]
        right.loglog(
            [r["n"] for r in own], [r["CPU s a pass"] for r in own], "o-", label=f"m = {m}"
        )
    right.set(xlabel="rows", ylabel="CPU seconds of a pass")
    right.legend()
    figure(args, "sparse_gpc", fig)


def main():
    args = arguments(__doc__.split("\n")[0])
    warnings.simplefilter("ignore", ConvergenceWarning)
    problem = synthetic(5000) if args.quick else digits(args.data)
    epochs = (1, 2, 4) if args.quick else (1, 2, 3, 5)
    curves, inducing = ep_curve(problem, 50 if args.quick else 200, epochs)
    for natural in (False, True):
        curves += svgp_curve(problem, inducing, epochs, natural)
    table(curves, ["method", "epochs", "CPU s", "log loss", "error"])
    sizes = [(10_000, 50), (10_000, 200), (100_000, 50)]
    if not args.quick:
        sizes += [(10_000, 400), (100_000, 200), (1_000_000, 50)]
    passes = [pass_row(n, m) for n, m in sorted(sizes, key=lambda s: (s[1], s[0]))]
    table(passes, ["n", "m", "CPU s a pass", "us a row", "share of gemm rate"])
    save(args, "sparse_gpc", curves + passes)
    draw(args, curves, passes)


if __name__ == "__main__":
    main()
