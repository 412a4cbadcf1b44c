"""Sparse EP against stochastic variational inference, and how its passes grow.

    python doc/benchmarks/sparse_gpc.py --data FOLDER     odd against even digits from mnist.npz
    python doc/benchmarks/sparse_gpc.py                   the same digits from OpenML
    python doc/benchmarks/sparse_gpc.py --quick           a synthetic set of 5000 rows

Draws held-out log loss against CPU seconds for EP and, where GPyTorch is installed, its SVGP with
Adam and with natural gradients: same kernel, same first inducing points, same batches, double
precision. A fit of EP is made for each number of epochs, since its steps fall with the epochs to
come; after each the others go on until they have had twice its time. EP and natural gradients also
take larger batches, EP with larger steps then. Then times of a pass for growing n and m, and their
share of the rate of a plain matrix product.
"""

from common import arguments, cpu, figure, log_loss, save, table

import importlib.util
import pathlib
import warnings

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import fetch_openml, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier

BATCH = 200
# Larger batches, and the rate of EP's steps with them.
LARGE_BATCH, LARGE_RATE = 1000, 0.03
# First amplitude of the kernel: images that are told apart well ask for a large one.
AMPLITUDE = 10.0
# Draws of the latent functions in predictions of SVGP for several classes.
TEST_SAMPLES = 200


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


def first_points(X, m):
    """Return m centres of a few steps of k-means, where every method starts.

    From random rows: on digits a quarter of the time of k-means++, squared distances .6 % larger.
    """
    rows = np.random.default_rng(0).choice(len(X), min(len(X), 20_000), replace=False)
    centres = KMeans(m, init="random", n_init=1, max_iter=10, random_state=0)
    return centres.fit(X[rows]).cluster_centers_


def outcome(method, epochs, seconds, proba, y):
    """Return a row of the table."""
    return {
        "method": method,
        "epochs": epochs,
        "CPU s": seconds,
        "log loss": log_loss(proba, y),
        "error": float(np.mean(proba.argmax(1) != y)),
    }


def ep_row(problem, points, epochs, batch=BATCH, rate=0.01):
    """Fit sparse EP and return its row."""
    X, y, X_new, y_new = problem
    model = EPGaussianProcessClassifier(
        start_kernel(X, AMPLITUDE),
        method="sparse",
        inducing_points=points,
        batch_size=batch,
        learning_rate=rate,
        learn_inducing=True,
        max_iter=epochs,
        max_sweeps=4,
        random_state=0,
    )
    _, seconds = cpu(lambda: model.fit(X, y))
    return outcome(_named("EP", batch), epochs, seconds, model.predict_proba(X_new), y_new)


def _named(method, batch):
    """Return the name of a method with batches of a size of their own."""
    return method if batch == BATCH else f"{method}, batches of {batch}"


class SVGP:
    """GPyTorch's stochastic variational classifier, trained an epoch at a time.

    Of more than two classes with one latent function each, under one kernel, and softmax. `lengths`
    are those that it starts from, by default one a column.
    """

    def __init__(
        self, problem, points, natural, batch=BATCH, amplitude=AMPLITUDE, n_classes=2, lengths=None
    ):
        import gpytorch
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        self.name = _named("SVGP, natural gradients" if natural else "SVGP, Adam", batch)
        self.batch = batch
        self.torch, self.gpytorch, self.y_new = torch, gpytorch, problem[3]
        self.X, self.y, self.X_new = (torch.as_tensor(a, dtype=torch.float64) for a in problem[:3])
        if lengths is None:
            lengths = start_kernel(problem[0], amplitude).k2.length_scale
        many = n_classes > 2
        self.model = variational_model(points, lengths, amplitude, natural, n_classes * many)
        self.likelihood = gpytorch.likelihoods.BernoulliLikelihood()
        if many:
            likelihood = gpytorch.likelihoods.SoftmaxLikelihood
            self.likelihood = likelihood(num_classes=n_classes, mixing_weights=False)
            self.y = self.y.long()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, len(self.X))
        variational = self.model.variational_parameters()
        self.rules = [torch.optim.Adam(self.model.hyperparameters(), lr=0.01)]
        if natural:
            self.rules.append(gpytorch.optim.NGD(variational, num_data=len(self.X), lr=0.1))
        else:
            self.rules.append(torch.optim.Adam(variational, lr=0.01))
        self.epochs, self.seconds = 0, 0.0

    def fit(self, seen):
        """Train until `seen(predict_proba)`, called after each step, raises StopIteration."""
        try:
            while True:
                self._epoch(seen)
        except StopIteration:
            return self

    def predict_proba(self, X_new):
        """Return the probabilities of both classes."""
        self.model.eval()
        with self.torch.no_grad(), self.gpytorch.settings.num_likelihood_samples(TEST_SAMPLES):
            rows = self.torch.as_tensor(X_new, dtype=self.torch.float64).split(1000)
            p = [self.likelihood(self.model(a)).probs for a in rows]
        self.model.train()
        if p[0].ndim == 3:  # samples of the latent functions, rows, classes
            return self.torch.cat([of_rows.mean(0) for of_rows in p]).numpy()
        p = self.torch.cat(p).numpy()
        return np.column_stack([1 - p, p])

    def _epoch(self, seen=lambda predict_proba: None):
        self.model.train()
        for batch in self.torch.randperm(len(self.X)).split(self.batch):
            seen(self.predict_proba)
            for rule in self.rules:
                rule.zero_grad()
            (-self.bound(self.model(self.X[batch]), self.y[batch])).backward()
            for rule in self.rules:
                rule.step()

    def rows_until(self, seconds):
        """Train until so many CPU seconds are spent; return a row an epoch."""
        rows = []
        while self.seconds < seconds:
            self.seconds += cpu(self._epoch)[1]
            self.epochs += 1
            proba = self.predict_proba(self.X_new)
            rows.append(outcome(self.name, self.epochs, self.seconds, proba, self.y_new))
        return rows


def variational_model(points, lengths, amplitude, natural, n_latent=0):
    """Return the GPyTorch model of kernel and points that EP starts from, points learned.

    Of several classes with so many latent functions, of which kernel and points are the same.
    """
    import gpytorch
    import torch

    variational = gpytorch.variational
    family = (
        variational.NaturalVariationalDistribution
        if natural
        else variational.CholeskyVariationalDistribution
    )

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            Z = torch.as_tensor(points)
            several = dict(batch_shape=torch.Size([n_latent])) if n_latent else {}
            strategy = variational.VariationalStrategy(self, Z, family(len(Z), **several))
            if n_latent:
                independent = variational.IndependentMultitaskVariationalStrategy
                strategy = independent(strategy, num_tasks=n_latent)
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.RBFKernel(ard_num_dims=len(lengths))
            base.lengthscale = torch.as_tensor(lengths)
            self.covar_module = gpytorch.kernels.ScaleKernel(base)
            self.covar_module.outputscale = amplitude

        def forward(self, x):
            normal = gpytorch.distributions.MultivariateNormal
            return normal(self.mean_module(x), self.covar_module(x))

    return Model()


def curves_of(problem, m, epochs, many_epochs):
    """Return the rows of all methods, which take turns."""
    points = first_points(problem[0], m)
    peers, large, rows = [], [], []
    if all(importlib.util.find_spec(name) for name in ("torch", "gpytorch")):
        peers = [SVGP(problem, points, natural) for natural in (False, True)]
        large = [SVGP(problem, points, True, LARGE_BATCH)]
    for n_epochs in epochs:
        rows += _turn(ep_row(problem, points, n_epochs), peers)
    for n_epochs in many_epochs:
        rows += _turn(ep_row(problem, points, n_epochs, LARGE_BATCH, LARGE_RATE), large)
    return sorted(rows, key=lambda row: row["method"])


def _turn(own, peers):
    """Return the row of EP and those of peers that go on until they have had twice its time."""
    return [own, *(row for peer in peers for row in peer.rows_until(2 * own["CPU s"]))]


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
    repeats = 3 if n < 1_000_000 else 1
    gemm, times = [], []
    for _ in range(repeats):
        gemm.append(gemm_seconds(n, m))
        times.append((fit(6) - fit(2)) / 4)
    seconds, product = float(np.median(times)), float(np.median(gemm))
    return {
        "n": n,
        "m": m,
        "CPU s a pass": seconds,
        "us a row": 1e6 * seconds / n,
        "share, 5 m^2 flops a row": 2.5 * product / seconds,
        "share, 3 m^2 flops a row": 1.5 * product / seconds,
    }


def draw(args, curves, passes):
    """Draw log loss against time and the growth of a pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for name in dict.fromkeys(row["method"] for row in curves):
        own = [row for row in curves if row["method"] == name]
        left.plot([r["CPU s"] for r in own], [r["log loss"] for r in own], "o-", label=name)
    left.set(xlabel="CPU seconds of training", ylabel="held-out log loss", xlim=(0, None))
    left.legend(fontsize=7, loc="upper right")
    for m in dict.fromkeys(row["m"] for row in passes):
        own = [row for row in passes if row["m"] == m]
        if len(own) > 1:
            seconds = [r["CPU s a pass"] for r in own]
            middle.loglog([r["n"] for r in own], seconds, "o-", label=f"m = {m}")
    middle.set(xlabel="rows", ylabel="CPU seconds of a pass")
    middle.legend()
    n = passes[0]["n"]
    own = [row for row in passes if row["n"] == n]
    sizes, seconds = np.array([r["m"] for r in own]), [r["us a row"] for r in own]
    right.plot(sizes, seconds, "o-", label=f"n = {n}")
    products = [r["us a row"] * r["share, 5 m^2 flops a row"] for r in own]
    right.plot(sizes, products, "k--", label="5 m$^2$ flops a row by plain products")
    right.set(xlabel="inducing points", ylabel="CPU microseconds a row of a pass")
    right.set_ylim(0, 1.3 * max(seconds))
    right.legend()
    figure(args, "sparse_gpc", fig)


def main():
    args = arguments(__doc__.split("\n")[0])
    warnings.simplefilter("ignore", ConvergenceWarning)
    problem = synthetic(5000) if args.quick else digits(args.data)
    if args.quick:
        curves = curves_of(problem, 50, (1, 2, 4), (2,))
    else:
        curves = curves_of(problem, 200, (1, 2, 3, 5), (4, 8, 24))
    table(curves, ["method", "epochs", "CPU s", "log loss", "error"])
    sizes = [(10_000, 50), (10_000, 100), (10_000, 200), (100_000, 50)]
    if not args.quick:
        sizes += [(10_000, 400), (100_000, 200), (1_000_000, 50)]
    passes = [pass_row(n, m) for n, m in sorted(sizes, key=lambda s: (s[1], s[0]))]
    table(passes, list(passes[0]))
    save(args, "sparse_gpc", curves + passes)
    draw(args, curves, passes)


if __name__ == "__main__":
    main()
