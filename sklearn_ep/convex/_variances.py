"""Marginal variances diag(B A^-1 B') where no factorisation is affordable.

Every estimator returns a `VarianceEstimate`: the variances of the training rows, and a predictor
that gives those of new rows (each row by itself) and of the coefficients.
"""

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import eigh_tridiagonal, norm

from .._engine.gaussian import ImproperPosterior
from ._systems import row_blocks, weighted_inner, weighted_row_sums

__all__ = [
    "ExactVariances",
    "LanczosVariances",
    "LowRankVariance",
    "MonteCarloVariances",
    "Probes",
    "ScaledJacobi",
    "VarianceEstimate",
    "coefficient_variances",
    "leave_one_out",
    "start_variances",
    "towards_samples",
]

# Relative residual of the solves behind sampled variances: far below their sampling error.
_SAMPLE_RTOL = 0.03
# Steps of Lanczos for each sample that the other estimators would draw: about equal products.
_LANCZOS_STEPS = 16
# Site precision and inflation of the Jacobi variances that a fit starts from.
_START_PRECISION, _START_INFLATION = 0.15, 1.2
_TINY = 1e-300


class VarianceEstimate(NamedTuple):
    """Variances of the training rows and what predicts those of new rows."""

    training: np.ndarray
    predictor: Any


class ExactVariances:
    """Variances by the factorisation that solves the Newton systems too."""

    exact = True

    def estimate(self, design, system, diagonal, precision):
        """Return the `VarianceEstimate`; O(q n^2) primal, O(q^3) dual."""
        return VarianceEstimate(np.maximum(system.training_variance(design), _TINY), system)


class Probes:
    """Random right-hand sides with covariance A, the same at every outer step.

    Noise belongs to distinct rows and is shared by the copies of one, so that a weight equals
    repeated rows and the order of the rows does not matter. Rows are told apart by their product
    with one random vector. `weight` (q,) counts the copies of each row.
    """

    def __init__(self, design, weight, n_samples, rng):
        q, n = design.shape
        self.n_samples = n_samples
        self.of_coefficients = rng.standard_normal((n, n_samples))
        key = design.dot(rng.standard_normal(n))
        order = np.argsort(key, kind="stable")
        new = np.diff(key[order], prepend=-np.inf) > 1e-12 * np.max(np.abs(key), initial=1.0)
        group = np.empty(q, dtype=np.intp)
        group[order] = np.cumsum(new) - 1
        noise = rng.standard_normal((int(new.sum()), n_samples))
        total = np.bincount(group, weights=weight)
        self.of_rows = (weight / np.sqrt(total[group]))[:, None] * noise[group]

    def right(self, design, diagonal, copy_precision):
        """Return D^1/2 E1 + B' pi^1/2 E2, columns of N(0, A)."""
        right = np.sqrt(diagonal)[:, None] * self.of_coefficients
        right += design.tdot(np.sqrt(copy_precision)[:, None] * self.of_rows)
        return right


class _Sampled:
    """What the estimators by perturbed samples share: draws of N(0, A^-1), warm-started."""

    exact = False

    def __init__(self, probes, weight):
        self.probes, self.weight = probes, weight
        self._last = None

    def _draw(self, design, system, diagonal, precision):
        """Return U (n, k) and B U (q, k) with columns of N(0, A^-1)."""
        right = self.probes.right(design, diagonal, precision / self.weight)
        self._last = system.solve_with_product(design, right, rtol=_SAMPLE_RTOL, start=self._last)
        return self._last


class MonteCarloVariances(_Sampled):
    """Mean squares of samples of N(0, A^-1): unbiased, relative error sqrt(2 / k)."""

    def estimate(self, design, system, diagonal, precision):
        """Return the `VarianceEstimate`."""
        U, BU = self._draw(design, system, diagonal, precision)
        training = np.mean(BU**2, axis=1)
        predictor = LowRankVariance(U / np.sqrt(self.probes.n_samples))
        return VarianceEstimate(np.maximum(training, _TINY), predictor)


class LowRankVariance:
    """Variances under the covariance F F'."""

    def __init__(self, factor):
        self.factor = factor

    def row_variance(self, B):
        """Return diag(B F F' B')."""
        out = np.empty(B.shape[0])
        for rows in row_blocks(B.shape[0], self.factor.shape[1]):
            out[rows] = np.einsum("ij,ij->i", *2 * [B[rows] @ self.factor])
        return np.maximum(out, _TINY)

    def coefficient_variance(self):
        """Return diag(F F')."""
        return np.maximum(np.einsum("ij,ij->i", self.factor, self.factor), _TINY)


def leave_one_out(B, variances, copy_precision):
    """Return j_i = sum_l b_il^2 / (A_ll - pi_i b_il^2): Jacobi variances without the row's share.

    `variances` (n,) is 1 / diag(A), `copy_precision` (q,) the pi_i of one copy of each row. In the
    precision of a sparse B.
    """
    out = np.empty(B.shape[0])
    width = B.nnz // max(B.shape[0], 1) + 1 if sp.issparse(B) else B.shape[1]
    if sp.issparse(B):
        variances, copy_precision = (x.astype(B.dtype) for x in (variances, copy_precision))
    for rows in row_blocks(B.shape[0], 8 * width):
        if sp.issparse(B):
            ends = B.indptr[rows.start : rows.stop + 1]
            own = slice(ends[0], ends[-1])
            share = B.data[own] ** 2
            share *= variances[B.indices[own]]
            rest = np.repeat(copy_precision[rows], np.diff(ends))
            rest *= share
            share /= np.subtract(1.0, rest, out=rest)
            block = type(B)(
                (share, B.indices[own], ends - ends[0]), shape=(len(ends) - 1, len(variances))
            )
            out[rows] = np.asarray(block.sum(axis=1)).ravel()
        else:
            block = B[rows]
            share = block * block * variances
            out[rows] = np.sum(share / (1.0 - copy_precision[rows][:, None] * share), axis=1)
    return out


def start_variances(design, diagonal, weight):
    """Return variances of rows and coefficients to start from, from Jacobi with constant sites."""
    precision = np.full(design.shape[0], _START_PRECISION)
    variances = 1.0 / (diagonal + design.squares_tdot(precision * weight))
    j = _START_INFLATION * leave_one_out(design.B, variances, precision)
    return np.maximum(j / (1.0 + precision * j), _TINY), variances


def coefficient_variances(U, diagonal, data):
    """Return the variances of coefficients from draws U (n, k) and diag(A) = diagonal + data.

    Draws are taken as spread about 1 / (D_j + t data_j), t the share that suits them all.
    """
    sampled = np.mean(U**2, axis=1)
    variances = 1.0 / (diagonal + _share(sampled, diagonal, data) * data)
    equal = np.full(len(data), 1.0 / len(data))
    return np.maximum(towards_samples(variances, sampled, equal, U.shape[1]), _TINY)


def towards_samples(z, sampled, weight, n_samples):
    """Move estimates z towards sampled variances by the share of the spread that is not noise."""
    ratio = sampled / z
    noise = 2.0 / n_samples
    spread = max((float(weight @ (ratio - weight @ ratio) ** 2) - noise) / (1.0 + noise), 0.0)
    shrink = spread / (spread + (1.0 + spread) * noise)
    return z * (1.0 + shrink * (ratio - 1.0))


def _share(sampled, diagonal, data):
    """Return t with mean of sampled_j (D_j + t data_j) = 1, t in [0, 1].

    t = 1 is Jacobi, which is never above the variances; t = 0 is the prior, never below.
    """
    seen = (data > 0) & (diagonal > 0)
    if not np.any(seen):
        return 1.0
    t = (1.0 - np.mean(sampled[seen] * diagonal[seen])) / np.mean(sampled[seen] * data[seen])
    return float(min(max(t, 0.0), 1.0))


class ScaledJacobi:
    """Variances of new rows sum_l x_l^2 v_l, plus the exact share of an intercept.

    It is a Gaussian as well, that of independent features given the intercept, which stands for the
    posterior where rows are not at hand.

    The v (n,) are scaled so that rows are right in the mean, 0 for an intercept; `coefficients` are
    the variances of those of features given the intercept, and `column` (n,), or None, is the
    column of A^-1 that belongs to it.
    """

    def __init__(self, variances, coefficients, column):
        self.variances, self.coefficients, self.column = variances, coefficients, column

    def row_variance(self, B):
        """Return the variances of rows."""
        out = weighted_row_sums(B, self.variances)
        if self.column is not None:
            out = out + (B @ self.column) ** 2 / self.column[-1]
        return np.maximum(out, _TINY)

    def coefficient_variance(self):
        """Return the variances of the coefficients."""
        if self.column is None:
            return self.coefficients
        return np.append(self.coefficients, 0.0) + self.column**2 / self.column[-1]

    def solve(self, right):
        """Return the product of the covariance with a vector."""
        out = self.variances * right
        if self.column is not None:
            out = out + self.column * ((self.column @ right) / self.column[-1])
        return out

    def covariance(self, B1, B2):
        """Return the covariance of two sets of rows."""
        out = weighted_inner(B1, self.variances, B2)
        if self.column is not None:
            out = out + np.outer(B1 @ self.column, B2 @ self.column) / self.column[-1]
        return out

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) of the coefficients about their mean."""
        out = np.sqrt(self.variances) * rng.standard_normal((n_samples, len(self.variances)))
        if self.column is not None:
            scale = rng.standard_normal(n_samples) / np.sqrt(self.column[-1])
            out += np.outer(scale, self.column)
        return out


class LanczosVariances:
    """Variances of the space that Lanczos' method finds (the published choice): from below.

    `start` (n,) is the first direction, the number of steps 16 times `n_samples`.

    Lanczos' method converges to the largest eigenvalues of A, the directions of LEAST posterior
    variance. Where most of the variance is in the many directions near the prior, as in text, a
    few per cent of it are found, and with variances near zero the method becomes the posterior
    mode.
    """

    exact = False

    def __init__(self, start, n_samples):
        self.start, self.n_steps = start, _LANCZOS_STEPS * n_samples

    def estimate(self, design, system, diagonal, precision):
        """Return the `VarianceEstimate`; two products a step and O(n steps) memory."""
        Q, alpha, beta = self._tridiagonal(design, diagonal, precision)
        values, vectors = eigh_tridiagonal(alpha, beta)
        if not values[0] > 0:
            raise ImproperPosterior("a direction of the posterior is lost to rounding")
        predictor = LowRankVariance(Q.T @ (vectors / np.sqrt(values)))
        return VarianceEstimate(predictor.row_variance(design.B), predictor)

    def _tridiagonal(self, design, diagonal, precision):
        """Return the orthonormal directions (steps, n) and the tridiagonal matrix."""
        q = self.start / np.linalg.norm(self.start)
        steps = min(self.n_steps, len(q))
        Q, alpha, beta = np.empty((steps, len(q))), [], []
        for k in range(steps):
            Q[k] = q
            image = diagonal * q + design.tdot(precision * design.dot(q))
            alpha.append(float(q @ image))
            basis = Q[: k + 1]
            for _ in range(2):  # twice is enough for orthogonality to rounding
                image -= basis.T @ (basis @ image)
            length = float(norm(image, check_finite=False))  # squares may overflow
            if length <= 1e-12 * max(alpha):
                break
            beta.append(length)
            q = image / length
        return Q[: len(alpha)], np.array(alpha), np.array(beta[: len(alpha) - 1])
