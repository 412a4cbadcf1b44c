"""Variances and log determinants where no factorisation is affordable.

What predicts the variances of new rows (each row by itself) and of the coefficients: a diagonal
whose level draws of the posterior tell, or a factor of low rank.
"""

import numpy as np
from scipy.linalg import eigh_tridiagonal, norm

from .._engine.gaussian import ImproperPosterior
from ._systems import TINY, DiagonalCovariance


def coefficient_variances(U, diagonal, data):
    """Return the variances of coefficients from draws U (n, k) and diag(A) = diagonal + data.

    Draws are taken as spread about 1 / (D_j + t data_j), t the share that suits them all.
    """
    sampled = np.mean(U**2, axis=1)
    variances = 1.0 / (diagonal + _share(sampled, diagonal, data) * data)
    equal = np.full(len(data), 1.0 / len(data))
    return np.maximum(towards_samples(variances, sampled, equal, U.shape[1]), TINY)


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


class ScaledJacobi(DiagonalCovariance):
    """Variances of new rows sum_l x_l^2 v_l, plus the exact share of an intercept.

    It is a Gaussian as well, that of independent features given the intercept, which stands for the
    posterior where rows are not at hand.

    The v (n,) are scaled so that rows are right in the mean, 0 for an intercept; `coefficients` are
    the variances of those of features given the intercept, and `column` (n,), or None, is the
    column of A^-1 that belongs to it.
    """

    def __init__(self, variances, coefficients, column):
        super().__init__(variances)
        self.coefficients = coefficients
        # rows (0 or 1, n) that make up what goes with the intercept
        self.shared = np.empty((0, len(variances)))
        if column is not None:
            self.shared = column[None] / np.sqrt(column[-1])
            self.coefficients = np.append(coefficients, 0.0) + self.shared[0] ** 2

    def row_variance(self, B):
        """Return the variances of rows."""
        return np.maximum(super().row_variance(B) + np.sum((B @ self.shared.T) ** 2, 1), TINY)

    def coefficient_variance(self):
        """Return the variances of the coefficients."""
        return self.coefficients

    def solve(self, right):
        """Return the product of the covariance with a vector or columns."""
        return super().solve(right) + self.shared.T @ (self.shared @ right)

    def covariance(self, B1, B2):
        """Return the covariance of two sets of rows."""
        return super().covariance(B1, B2) + (B1 @ self.shared.T) @ (B2 @ self.shared.T).T

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) of the coefficients about their mean."""
        out = super().draw(n_samples, rng)
        return out + rng.standard_normal((n_samples, len(self.shared))) @ self.shared


def lanczos_factor(times, start, n_steps):
    """Return F (n, r) with F F' about A^-1: the space that Lanczos' method finds, from below.

    `times` maps columns V to A V, `start` (n,) is the first direction; two products a step and
    O(n steps) memory. This is the published choice of variances. The method converges to the
    largest eigenvalues of A, the directions of LEAST posterior variance. Where most of the variance
    is in the many directions near the prior, as in text, a few per cent of it are found, and with
    variances near zero the fit becomes the posterior mode.
    """
    q = start / np.linalg.norm(start)
    steps = min(n_steps, len(q))
    Q, alpha, beta = np.empty((steps, len(q))), [], []
    for k in range(steps):
        Q[k] = q
        image = times(q[:, None])[:, 0]
        alpha.append(float(q @ image))
        basis = Q[: k + 1]
        for _ in range(2):  # twice is enough for orthogonality to rounding
            image -= basis.T @ (basis @ image)
        length = float(norm(image, check_finite=False))  # squares may overflow
        if length <= 1e-12 * max(alpha):
            break
        beta.append(length)
        q = image / length
    values, vectors = _positive_eigen(alpha, beta[: len(alpha) - 1])
    return Q[: len(alpha)].T @ (vectors / np.sqrt(values))


def _positive_eigen(alpha, beta):
    """Return eigenvalues and eigenvectors of a tridiagonal matrix, which have to be positive."""
    values, vectors = eigh_tridiagonal(np.array(alpha), np.array(beta))
    if not values[0] > 0:
        raise ImproperPosterior("a direction of the posterior is lost to rounding")
    return values, vectors


def rademacher(n, n_probes, rng):
    """Return probes (n, n_probes) of independent signs."""
    return np.where(rng.random_sample((n, n_probes)) < 0.5, -1.0, 1.0)


def log_determinant(product, diagonal, probes, n_steps=12):
    """Return log |A| and its standard error by stochastic Lanczos quadrature.

    Parameters
    ----------
    product : callable
        A V for columns V (n, p).
    diagonal : ndarray of shape (n,)
        Diagonal M of A, or near it: the quadrature is of log (M^-1/2 A M^-1/2).
    probes : ndarray of shape (n, p)
        Independent signs; the same ones at other precisions make differences surer than values.
    n_steps : int, default=12
        Steps for each probe; twice as many change the answer by less than a third of its error.

    Returns
    -------
    value, std : float

    Notes
    -----
    log |A| = sum log M + trace of the logarithm, whose mean over probes a Gauss rule
    gives (Ubaru, Chen and Saad 2017). All probes run as one block, each with its own recursion of
    three terms: so few steps need no reorthogonalisation. O(n p) memory.
    """
    n, p = probes.shape
    half = 1.0 / np.sqrt(diagonal)[:, None]
    q = probes / np.sqrt(n)
    last, length = np.zeros_like(q), np.zeros(p)
    alpha, beta = [], []
    for _ in range(min(n_steps, n)):
        image = half * product(half * q)
        image -= length * last
        alpha.append(np.einsum("ij,ij->j", q, image))
        image -= alpha[-1] * q
        length = np.linalg.norm(image, axis=0)
        beta.append(length)
        # a recursion that has found all of its space goes on from zero, which adds nothing
        last, q = q, image / np.where(length > 1e-12, length, np.inf)
    terms = np.empty(p)
    for j in range(p):
        b = np.array([length[j] for length in beta])
        ends = np.flatnonzero(b <= 1e-12)
        m = len(b) if not len(ends) else int(ends[0]) + 1
        values, vectors = _positive_eigen([a[j] for a in alpha[:m]], b[: m - 1])
        terms[j] = n * float(vectors[0] ** 2 @ np.log(values))
    error = np.std(terms, ddof=1) / np.sqrt(p)
    return float(np.sum(np.log(diagonal)) + np.mean(terms)), float(error)
