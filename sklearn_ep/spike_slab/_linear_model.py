"""Gaussian linear model y = X w + noise times one Gaussian site on each coefficient.

Q(w) has precision A = X'X / s2 + diag(pi) and shift X'y / s2 + b. Sites may be negative as long
as A is positive definite. With no more columns than rows A itself is factorised; with more, A
is never formed: C = s2 I + X diag(1 / p0) X' with floored precisions p0, and a second, small
correction puts the sites below the floor back.
"""

from functools import cached_property
from typing import Any

import numpy as np

from .._engine import gaussian

# Correlation from which EP's inclusions are off: on 120 sets of 10 columns, against enumeration,
# the largest error is above .02 for one set in fifteen at .4 to .8, for two in five beyond.
_CORRELATED = 0.7
# Probability that independent columns of as many rows are as correlated by chance, at most.
_CHANCE = 0.01
# Columns looked at, those that go with the response: others carry no inclusion.
_ASSOCIATED = 64
LEAST_DIRECT = 1e-10  # of the floor; 1 / precision below it exhausts double precision
# A block of scaled columns: large enough for BLAS, small next to a large X. Halved: 1.04 times the
# CPU of a posterior at 100 x 40,000; doubled: .89, for twice the memory.
BLOCK_BYTES = 2**24


class LinearModel:
    """Rows and columns of a linear regression; `marginals` adds noise and sites.

    X (n, d) and y (n,) are as they enter the model: centred, scaled, rows times the root of their
    weight. More rows than columns are replaced once by the d + 1 rows of a QR factorisation,
    O(n d^2): nothing below depends on n any more, and the residual needs no difference of large
    numbers. Rows that are not to be met again need not be `reduced`.
    """

    def __init__(self, X, y, reduced=True):
        self.rest = 0.0
        if reduced and X.shape[0] > X.shape[1] + 1:
            r: Any = np.linalg.qr(np.column_stack([X, y]), mode="r")
            X, y, self.rest = r[:-1, :-1], r[:-1, -1], r[-1, -1] ** 2
        self.X, self.y = X, y
        self.Xy = X.T @ y
        self.dense = X.shape[1] <= X.shape[0]
        self.gram = X.T @ X if self.dense else None

    @cached_property
    def _sizes(self):
        """Lengths of the columns, 1 where they are zero."""
        size = np.sqrt(np.einsum("ij,ij->j", self.X, self.X))
        return np.where(size > 0, size, 1.0)

    @property
    def association(self):
        """How well each column goes with the response."""
        return np.abs(self.Xy) / self._sizes

    def correlations(self, first, second=slice(None)):
        """Return absolute correlations of some columns with others."""
        X, size = self.X, self._sizes
        return np.abs((X[:, first] / size[first]).T @ (X[:, second] / size[second]))

    def is_correlated(self, n_rows):
        """Say whether a column that goes with the response is correlated with another; O(n d).

        The number of different rows tells what correlation there is by chance.
        """
        top = np.argsort(-self.association, kind="stable")[:_ASSOCIATED]
        found = self.correlations(top)
        found[np.arange(len(top)), top] = 0.0
        share = (_CHANCE / len(self.Xy) ** 2) ** (2.0 / max(n_rows - 2.0, 1.0))
        return bool(found.max() > max(_CORRELATED, np.sqrt(1.0 - share)))

    def n_independent(self, n_rows):
        """Return how many independent columns have as large a sum of squared correlations.

        What independent columns of as many rows have by chance is taken off. O(r^2 d), r rows.
        """
        unit, d = self.X / self._sizes, len(self.Xy)
        squares = np.sum((unit @ unit.T) ** 2) - d * (d - 1) / n_rows
        return float(np.clip(d**2 / max(squares, d), 1.0, d))

    def marginals(self, precision, shift, noise, floor=0.0):
        """Return the posterior for given sites and noise variance.

        With many columns sites of precision below `floor` are put in by the second step. Raises
        ImproperPosterior if the posterior precision is not positive definite. O(d^3), or O(n^2 d)
        with memory for one block of columns and a row (d,) for each of these sites.
        """
        kind = DenseMarginals if self.dense else LowRankMarginals
        return kind(self, precision, shift, noise, floor)


class DenseMarginals:
    """Posterior through the Cholesky factor of the d x d precision; its covariance is root'root."""

    def __init__(self, model, precision, shift, noise, floor):
        A = model.gram / noise
        gaussian.add_to_diagonal(A, precision)
        self.root = gaussian.checked_cholesky(A)
        self.log_det = 2 * np.log(np.diagonal(self.root)).sum()
        gaussian.invert_triangular(self.root)
        self.mean = self.root.T @ (self.root @ (shift + model.Xy / noise))
        self.var = np.einsum("ij,ij->j", self.root, self.root)
        self.residual = model.y - model.X @ self.mean
        self.squared_error = self.residual @ self.residual + model.rest
        self.trace = max(noise * (len(shift) - precision @ self.var), 0.0)
        self.noise, self.data_term = noise, model.y @ self.residual + model.rest

    def block(self, index):
        """Posterior covariance of some coefficients, O(d k^2)."""
        part = self.root[:, index]
        return part.T @ part

    def covariance(self, A, B=None):
        """A Sigma B' for rows of A and B, or its diagonal for B None."""
        left = self.root @ A.T
        return np.einsum("ij,ij->j", left, left) if B is None else left.T @ (self.root @ B.T)

    def times(self, A):
        """Rows of A times the covariance, O(d^2) each."""
        return (A @ self.root.T) @ self.root

    def draw(self, n_samples, rng):
        """Return draws (n_samples, d) of the coefficients, O(d^2) each."""
        return self.mean + rng.standard_normal((n_samples, len(self.mean))) @ self.root


def _floored(precision, floor, n):
    """Return the sites for the second step, at most n, and the precisions of the first one.

    The second step is a matrix of low sites squared, so that no more than n may enter. That loses
    nothing: X has rank n, hence more than n sites that are not positive leave a direction without
    curvature, and the larger ones among positive sites can be put in directly.
    """
    low = np.flatnonzero(precision < floor)
    if low.size > n:
        highest = np.partition(precision[low], n)[n]
        if highest < LEAST_DIRECT * floor:
            raise gaussian.ImproperPosterior("more coefficients without a proper prior than rows")
        floor = highest
        low = np.flatnonzero(precision < floor)
    return low, np.maximum(precision, floor)


class LowRankMarginals:
    """Posterior through the n x n matrix C and a correction for small and negative sites.

    The covariance is S0 + gain'gain: S0 that of the floored sites, by C, and gain a row for each
    low site, of which there are few.
    """

    def __init__(self, model, precision, shift, noise, floor):
        self._X, self.noise = model.X, noise
        low, floored = _floored(precision, floor, len(model.X))
        self._scale = scale = 1.0 / floored
        C = np.diag(np.full(len(model.X), noise))
        for _, part in self._scaled_columns():
            C += part @ part.T
        self._root = gaussian.checked_cholesky(C)
        self.log_det = np.log(floored).sum() + 2 * np.log(np.diagonal(self._root)).sum()
        self.log_det -= len(C) * np.log(noise)
        gaussian.invert_triangular(self._root)
        prior_mean = scale * shift
        gap = model.y - model.X @ prior_mean
        dual = self._root.T @ (self._root @ gap)
        self.mean = prior_mean + scale * (model.X.T @ dual)
        along = self._correct(low, floored[low] - precision[low])
        self.mean += along @ self._gain
        self.var = self._variances()
        if not np.all(self.var > 0):
            raise gaussian.ImproperPosterior("rounding errors exceed a posterior variance")
        self.residual = noise * dual - along @ self._image
        self.squared_error = self.residual @ self.residual + model.rest
        self.data_term = model.y @ self.residual + model.rest

    def _scaled_columns(self):
        """Yield (index, columns of X times the roots of their prior variances)."""
        root = np.sqrt(self._scale)
        for block in gaussian.row_blocks(len(root), 8 * len(self._X), BLOCK_BYTES):
            yield block, self._X[:, block] * root[block]

    def _correct(self, low, lack):
        """Second step: subtract `lack` from the floored precisions of the low sites.

        Makes the gain and its image under X. Returns what times the gain is the step of the mean.
        """
        half = self._root @ (self._X[:, low] * self._scale[low])
        dual = half.T @ self._root
        cov = -(dual @ self._X) * self._scale  # of the low columns and all, before this step
        cov[np.arange(len(low)), low] += self._scale[low]
        lower = gaussian.checked_cholesky(np.diag(1.0 / lack) - cov[:, low])
        self.log_det += np.log(lack).sum() + 2 * np.log(np.diagonal(lower)).sum()
        self._gain = gaussian.triangular_solve(lower, cov)
        # X times the columns of S0 is s2 C^-1 X[:, low] scale, without rounding errors of S0
        self._image = gaussian.triangular_solve(lower, self.noise * dual)
        return gaussian.triangular_solve(lower, self.mean[low])

    def _variances(self):
        reduction = np.empty(len(self._scale))
        for index, part in self._scaled_columns():
            half = gaussian.lower_times(self._root, part)
            reduction[index] = np.einsum("ij,ij->j", half, half)
        return self._scale * (1.0 - reduction) + np.einsum("ij,ij->j", self._gain, self._gain)

    @cached_property
    def trace(self):
        """Trace of X Sigma X' for all columns."""
        root, image = self._root, self._image
        first = self.noise * (len(root) - self.noise * np.einsum("ij,ij->", root, root))
        return first + np.einsum("ij,ij->", image, image)

    def left_of_noise(self, direction, share):
        """Return the diagonal of P (1 - X Sigma X' / noise) P, P = 1 - share direction direction'.

        O(n^2), and O(n k) where k sites are low.
        """
        root, image = np.sqrt(self.noise) * self._root, self._image / np.sqrt(self.noise)
        root -= np.outer(root @ direction, share * direction)
        image -= np.outer(image @ direction, share * direction)
        return np.einsum("ij,ij->j", root, root) - np.einsum("ij,ij->j", image, image)

    def block(self, index):
        """Posterior covariance of some coefficients, O(n^2 k + n k^2)."""
        half = gaussian.lower_times(self._root, self._X[:, index] * self._scale[index])
        gain = self._gain[:, index]
        cov = gain.T @ gain - half.T @ half
        gaussian.add_to_diagonal(cov, self._scale[index])
        return cov

    def _images(self, A):
        """Scaled rows of A with their two images, for covariances."""
        scaled = A * self._scale
        return scaled, self._root @ (self._X @ scaled.T), self._gain @ A.T

    def covariance(self, A, B=None):
        """A Sigma B' for rows of A and B, or its diagonal for B None; O(n d) a row."""
        scaled, half, gain = self._images(A)
        if B is None:
            prior = np.einsum("ij,ij->i", scaled, A)
            var = prior - np.einsum("ij,ij->j", half, half) + np.einsum("ij,ij->j", gain, gain)
            return gaussian.positive_variance(var, prior)
        _, half_b, gain_b = self._images(B)
        return scaled @ B.T - half.T @ half_b + gain.T @ gain_b

    def times(self, A):
        """Rows of A times the covariance, O(n d) each."""
        scaled, half, gain = self._images(A)
        return scaled - self._scale * ((self._root.T @ half).T @ self._X) + gain.T @ self._gain

    def draw(self, n_samples, rng):
        """Return draws (n_samples, d), O(n d) each (Bhattacharya et al. 2016).

        What the second step adds to the covariance is drawn apart from the first.
        """
        n, d = self._X.shape
        u = rng.standard_normal((n_samples, d)) * np.sqrt(self._scale)
        e = rng.standard_normal((n_samples, n)) * np.sqrt(self.noise)
        dual = self._root.T @ (self._root @ (e - u @ self._X.T).T)
        first = self.mean + u + self._scale * (dual.T @ self._X)
        return first + rng.standard_normal((n_samples, len(self._gain))) @ self._gain
