"""Peers of EP through inducing points: generalised FITC, and stochastic variational inference.

Both take the same start, squared exponential kernel with a length for each column, and L-BFGS-B.
FITC (Naish-Guzman and Holden, 2007) has no maintained package: it is written out here, apart from
the package that it is compared with. Variational inference is that of GPyTorch.
"""

import importlib.util
import time

import numpy as np
from common import log_loss
from scipy.linalg.lapack import dtrtri
from scipy.optimize import minimize
from scipy.special import log_ndtr, ndtr

HAS_GPYTORCH = all(importlib.util.find_spec(name) for name in ("torch", "gpytorch"))
JITTER = 1e-6


def inverse_of(lower):
    """Return the inverse of a lower triangular matrix, whose products are faster than solves."""
    inverse, info = dtrtri(lower, lower=1)
    if info:
        raise np.linalg.LinAlgError("a triangular factor is singular")
    return inverse


class Curve:
    """Held-out log loss and error against CPU seconds of training; the time of testing is not in.

    Tests a fit when a tenth more time has passed than at the last test. Training ends by
    StopIteration, as `scipy.optimize.minimize` understands it, once `until` seconds have passed.
    """

    def __init__(self, X_new, y_new, until=np.inf):
        self.X_new, self.y_new, self.until = X_new, y_new, until
        self.points, self.began = [], time.process_time()

    def __call__(self, predict_proba):
        now = time.process_time()
        seconds = now - self.began
        over = seconds > self.until
        if over or not self.points or seconds > 1.1 * self.points[-1][0]:
            proba = predict_proba(self.X_new)
            wrong = float(np.mean(proba.argmax(1) != self.y_new))
            self.points.append((seconds, log_loss(proba, self.y_new), wrong))
        self.began += time.process_time() - now
        if over:
            raise StopIteration


class Kernel:
    """Squared exponential with a log variance, log lengths, and inducing points, in one vector."""

    def __init__(self, vector, n_columns):
        self.variance = np.exp(vector[0])
        self.lengths = np.exp(vector[1 : 1 + n_columns])
        self.Z = vector[1 + n_columns :].reshape(-1, n_columns)

    def to(self, X):
        """Return the covariances of the inducing points with the rows of X."""
        A, B = self.Z / self.lengths, X / self.lengths
        square = (A**2).sum(1)[:, None] + (B**2).sum(1) - 2.0 * A @ B.T
        return self.variance * np.exp(-0.5 * np.maximum(square, 0.0))

    def chain(self, X, weights):
        """Return derivatives by log variance, log lengths and Z, of derivatives times values."""
        A, B = self.Z / self.lengths, X / self.lengths
        rows, columns, cross = weights.sum(1), weights.sum(0), weights @ B
        lengths = rows @ A**2 + columns @ B**2 - 2.0 * np.sum(A * cross, axis=0)
        points = (cross - rows[:, None] * A) / self.lengths
        return rows.sum(), lengths, points


class GFITC:
    """EP under the FITC prior of all rows; its evidence is learned from at fixed points of EP."""

    def __init__(self, X, y, points, lengths, variance=1.0):
        self.X, self.signs = X, 2.0 * y - 1.0
        self.start = np.concatenate([[np.log(variance)], np.log(lengths), np.ravel(points)])
        self.precision, self.shift = np.full(len(y), 0.1), 0.1 * self.signs

    def prior(self, vector):
        """Set the kernel, the whitening of the points, and what FITC has of each row."""
        self.kernel = Kernel(vector, self.X.shape[1])
        own = self.kernel.to(self.kernel.Z)
        own[np.diag_indices_from(own)] += JITTER * self.kernel.variance
        self.own, self.cross = own, self.kernel.to(self.X)
        self.whiten = inverse_of(np.linalg.cholesky(own))
        self.V = self.whiten @ self.cross
        self.rest = np.maximum(self.kernel.variance - (self.V**2).sum(0), 0.0)

    def posterior(self):
        """Set mean and variance of each latent value under the present sites."""
        self.shrink = 1.0 / (1.0 + self.rest * self.precision)
        self.scaled = self.precision * self.shrink
        inner = np.eye(len(self.V)) + (self.V * self.scaled) @ self.V.T
        self.inner = inverse_of(np.linalg.cholesky(inner))
        self.W = self.inner @ self.V
        self.var = self.shrink * (self.rest + self.shrink * (self.W**2).sum(0))
        own = self.W.T @ (self.W @ (self.shrink * self.shift))
        self.mean = self.shrink * (self.rest * self.shift + own)

    def cavities(self):
        """Return precision and mean of the cavities, and z of the probit at them."""
        precision = 1.0 / self.var - self.precision
        mean = (self.mean / self.var - self.shift) / precision
        return precision, mean, self.signs * mean / np.sqrt(1.0 + 1.0 / precision)

    def converge(self, tol=1e-4, damping=0.8, max_sweeps=100):
        """Sweep over all sites in parallel until none moves by `tol` posterior deviations."""
        for _ in range(max_sweeps):
            self.posterior()
            cavity, mean, z = self.cavities()
            root = np.sqrt(1.0 + 1.0 / cavity)
            ratio = np.exp(-0.5 * z**2 - log_ndtr(z)) / np.sqrt(2.0 * np.pi)
            slope, curvature = self.signs * ratio / root, ratio * (z + ratio) / root**2
            precision = cavity * curvature / (cavity - curvature)
            shift = precision * (mean + slope / curvature)
            by_precision, by_shift = precision - self.precision, shift - self.shift
            self.precision = self.precision + damping * by_precision
            self.shift = self.shift + damping * by_shift
            moved = np.abs(by_shift - by_precision * self.mean) * np.sqrt(self.var)
            if max(moved.max(), np.max(np.abs(by_precision) * self.var)) < tol:
                break
        self.posterior()

    def evidence(self):
        """Return EP's log evidence."""
        cavity, mean, z = self.cavities()
        whole = 0.5 * self.shift @ self.mean + np.log(np.diag(self.inner)).sum()
        whole += 0.5 * np.log(self.shrink).sum()
        local = mean**2 * cavity - np.log(cavity) - self.mean**2 / self.var - np.log(self.var)
        return whole + np.sum(log_ndtr(z) + 0.5 * local)

    def gradient(self):
        """Return the derivative of the log evidence, with the sites held, by the vector."""
        B = self.whiten.T @ self.V
        alpha = self.shift - self.precision * self.mean
        scaled = self.W * self.scaled
        diagonal = 0.5 * (alpha**2 - self.scaled + (scaled**2).sum(0))
        BP = B * self.scaled - (B @ scaled.T) @ scaled
        BH = 0.5 * (np.outer(B @ alpha, alpha) - BP) - B * diagonal
        by_cross, by_own = 2.0 * BH, -BH @ B.T
        cross = self.kernel.chain(self.X, by_cross * self.cross)
        own = self.kernel.chain(self.kernel.Z, by_own * self.own)
        variance = cross[0] + own[0] + self.kernel.variance * diagonal.sum()
        return np.concatenate([[variance], cross[1] + own[1], (cross[2] + 2.0 * own[2]).ravel()])

    def loss(self, vector):
        """Return the negative log evidence and its gradient at a fixed point of EP."""
        self.prior(vector)
        self.converge()
        return -self.evidence(), -self.gradient()

    def predict_proba(self, X_new):
        """Return the probabilities of both classes."""
        V = self.whiten @ self.kernel.to(X_new)
        outer = self.inner @ V
        own = self.inner.T @ (self.W @ (self.shift * self.shrink))
        var = self.kernel.variance - (V**2).sum(0) + (outer**2).sum(0)
        p = ndtr(own @ V / np.sqrt(1.0 + var))
        return np.column_stack([1.0 - p, p])

    def fit(self, max_iter=250, seen=None):
        """Learn kernel and points by L-BFGS-B, and call `seen(predict_proba)` at each step."""
        span = [(np.log(1e-3), np.log(1e3))] + [
            (log + np.log(1e-2), log + np.log(1e3)) for log in self.start[1 : 1 + self.X.shape[1]]
        ]
        bounds = span + [(None, None)] * (len(self.start) - len(span))
        shown = None if seen is None else lambda _: seen(self.predict_proba)
        options = dict(maxiter=max_iter, maxfun=2 * max_iter)
        found = minimize(
            self.loss, self.start, jac=True, method="L-BFGS-B", bounds=bounds,
            callback=shown, options=options,
        )  # fmt: skip
        self.loss(found.x)
        return self


class SVI:
    """GPyTorch's variational classifier, all rows at once and L-BFGS-B over all that it has."""

    def __init__(self, X, y, points, lengths, variance=1.0):
        import gpytorch
        import torch
        from sparse_gpc import variational_model

        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        self.torch = torch
        self.X, self.y = torch.as_tensor(X), torch.as_tensor(y, dtype=torch.float64)
        self.model = variational_model(points, lengths, variance, natural=False)
        self.likelihood = gpytorch.likelihoods.BernoulliLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, len(X))
        self.parameters = list(self.model.parameters())

    def loss(self, vector):
        """Return the negative bound on the log evidence and its gradient."""
        convert = self.torch.nn.utils
        convert.vector_to_parameters(self.torch.as_tensor(vector), self.parameters)
        self.model.train()
        self.model.zero_grad()
        loss = -len(self.X) * self.bound(self.model(self.X), self.y)
        loss.backward()
        gradient = convert.parameters_to_vector([p.grad for p in self.parameters])
        return loss.item(), gradient.numpy()

    def predict_proba(self, X_new):
        """Return the probabilities of both classes."""
        self.model.eval()
        with self.torch.no_grad():
            p = self.likelihood(self.model(self.torch.as_tensor(X_new))).probs.numpy()
        return np.column_stack([1.0 - p, p])

    def fit(self, max_iter=250, seen=None):
        """Maximise the bound, and call `seen(predict_proba)` at each step."""
        self.model.train()
        self.model(self.X)  # the first call sets the variational distribution to the prior
        start = self.torch.nn.utils.parameters_to_vector(self.parameters).detach().numpy().copy()
        shown = None if seen is None else lambda _: seen(self.predict_proba)
        options = dict(maxiter=max_iter, maxfun=2 * max_iter)
        found = minimize(
            self.loss, start, jac=True, method="L-BFGS-B", callback=shown, options=options
        )
        self.loss(found.x)
        return self
