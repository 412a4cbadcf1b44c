"""Law of models of a linear regression: which columns are in, coefficients integrated out.

Given the model everything is Gaussian, and the evidence of a model is known up to the noise, which
integrates out as well, and the ratio of slab variance to noise. What enters are products of
columns alone: a model of k columns costs O(k^3), what it says of all columns O(k^2 d).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

from .._engine.gaussian import row_blocks, triangular_inverses
from ._hyperparameters import NOISE_FLOOR

_RATIOS = 1e-6, 1e8  # of slab variance to noise; the prior has a mass of 1e-6 beyond
_FINE = 0.05  # of log ratios: an integral over them to the last digit
_BATCH = 256  # models that are solved at a time
_STORED = 2**24  # entries of products of columns
# Rows, and rows times ratio, up to which gains are had in single precision: within 3e-3.
_SINGLE_ROWS, _SINGLE_RATIO = 1e5, 1e4


class _Products:
    """Products of columns with all, made when asked for and kept as far as memory allows.

    Those of the first columns are made at once, up to four times as many as there are rows. `fast`
    is single precision, or double where columns are out of its range.
    """

    def __init__(self, X):
        n, width = X.shape
        self._X = X
        self.squares = np.einsum("ij,ij->j", X, X)
        self._rows = np.empty((min(width, max(_STORED // width, 2 * _BATCH)), width))
        units = np.log10(self.squares[self.squares > 0])
        # of squares, and of slabs in units of one over them, with room for products of both
        self.fast = np.float32 if np.all(np.abs(units) < 24) else np.float64
        self._fast = np.empty(self._rows.shape, self.fast)
        self._place, self._used = np.full(width, -1), 0
        self._make(np.arange(min(4 * n, len(self._rows))))

    def _make(self, columns):
        """Make the products of columns that are missing; where they find no room others go."""
        if self._used + len(columns) > len(self._rows):
            self._place[:], self._used = -1, 0
        end = self._used + len(columns)
        rows = np.matmul(self._X[:, columns].T, self._X, out=self._rows[self._used : end])
        self._fast[self._used : end] = rows
        self._place[columns], self._used = np.arange(self._used, end), end

    def _places(self, columns):
        places = self._place[columns]
        if places.min() < 0:
            distinct = np.unique(columns)
            missing = distinct[self._place[distinct] < 0]
            # where they have no room beside others, all that is asked for is made again
            fits = self._used + len(missing) <= len(self._rows)
            self._make(missing if fits else distinct)
            places = self._place[columns]
        return places

    def with_all(self, columns, kind):
        """Products (..., d + 1) of columns (...) with all, in the `fast` precision or double."""
        places = self._places(columns)
        return (self._fast if kind is self.fast else self._rows)[places]

    def within(self, columns):
        """Products (M, K, K) of columns (M, K) with each other."""
        return self._rows[self._places(columns)[:, :, None], columns[:, None, :]]


class Given(NamedTuple):
    """What data say given models (M, K): log |C|, y'C^-1 y and the coefficients.

    C is the covariance of the responses in units of the noise; `half` (M, K) and `root` (M, K, K)
    give the coefficients, of mean root'half and covariance root'root in the same units.
    """

    log_det: np.ndarray
    square: np.ndarray
    half: np.ndarray
    root: np.ndarray


@dataclass
class ModelLaw:
    """Posterior of models and ratio of slab variance to noise, in working units.

    `prior` is that of hyperparameters, of which `space` says what is free. Models (M, K) are
    numbers of columns, d in the place of none. Columns are in the `order` of how well they go with
    the response, so that draws do not depend on theirs in X.
    """

    problem: Any
    space: Any
    prior: Any

    def __post_init__(self):
        model, n = self.problem.model, self.problem.n_rows
        self.d, self.n_rows = model.X.shape[1], n
        self.order = np.argsort(-model.association, kind="stable")
        none = np.zeros((len(model.X), 1))
        self.products = _Products(np.asfortranarray(np.hstack([model.X[:, self.order], none])))
        self.Xy = np.append(model.Xy[self.order], 0.0)
        self._free_noise, self._free_slab, self._free_inclusion = self.space.free
        floor = NOISE_FLOOR * n if self._free_noise else 0.0  # a perfect fit is no better than that
        self.least = model.rest + floor
        self.total = model.y @ model.y + self.least

    @cached_property
    def log_prior(self):
        """Log prior probability of a model of k columns, k = 0, ..., d, and -inf for one more."""
        if self._free_inclusion:
            value = self.prior.log_density_of_sizes(self.d)
        else:
            logit = self.space.value[2]
            value = np.arange(self.d + 1) * logit - self.d * np.logaddexp(0.0, logit)
        return np.append(value, -np.inf)

    @cached_property
    def bounds(self):
        """Least and largest log ratio, the same where it is given."""
        noise, slab, _ = self.space.value
        if self._free_slab:
            return np.log(_RATIOS) - np.log(self.space.size)
        if self._free_noise:
            return slab - np.array([self.space.high[0], self.space.low[0]])
        return np.full(2, slab - noise)

    def lattice(self, spacing):
        """Return log ratios of about a spacing from the least to the largest."""
        low, high = self.bounds
        return np.linspace(low, high, 1 + int((high - low) / spacing))

    def log_noise(self, log_ratio):
        """Log noise at a log ratio, where noise or slab are given."""
        noise, slab, _ = self.space.value
        return slab - log_ratio if self._free_noise else noise + 0.0 * log_ratio

    def log_fit(self, log_ratio, log_det, square):
        """Log density of the responses, without constants that no hyperparameter is in."""
        if self._free_noise and self._free_slab:
            return -0.5 * (log_det + self.n_rows * np.log(square))
        log_noise = self.log_noise(log_ratio)
        return -0.5 * (log_det + self.n_rows * log_noise + square * np.exp(-log_noise))

    def _factored(self, models, log_ratio):
        """Return `lower` (M, K, K) of the precision of models, `half`, log |C| and y'C^-1 y.

        The response is one more column of the matrix that is factored.
        """
        width, inside = models.shape[1], models < self.d
        places = np.arange(width)
        A = np.empty((len(models), width + 1, width + 1))
        A[:, :width, :width] = self.products.within(models)
        A[:, places, places] += np.where(inside, np.exp(-log_ratio)[:, None], 1.0)
        A[:, width, :width] = self.Xy[models]
        A[:, width, width] = self.total + self.n_rows
        root = np.linalg.cholesky(A)  # of the lower triangle
        log_det = 2 * np.log(root[:, places, places]).sum(axis=1) + inside.sum(axis=1) * log_ratio
        square = np.maximum(root[:, width, width] ** 2 - self.n_rows, self.least)
        return root[:, :width, :width], root[:, width, :width], log_det, square

    def given(self, models, log_ratio):
        """Return `Given` models; O(K^3) each."""
        lower, half, log_det, square = self._factored(models, log_ratio)
        return Given(log_det, square, half, triangular_inverses(lower))

    def log_density_at(self, models, log_ratio):
        """Log density (M,) of data, models and log ratios (M,); O(K^3) without an inverse."""
        fit = self.log_fit(log_ratio, *self._factored(models, log_ratio)[2:])
        size = np.count_nonzero(models < self.d, axis=1)
        return fit + self.log_prior[size] + self.prior.log_density_of_ratio(log_ratio)

    def solved(self, models, log_ratio):
        """Return square (S,), mean (S, K) and root (S, K, K) of many models."""
        parts = [self.given(models[b], log_ratio[b]) for b in row_blocks(len(models), most=_BATCH)]
        _, square, half, root = (np.concatenate(p) for p in zip(*parts, strict=True))
        return square, np.einsum("mji,mj->mi", root, half), root

    def gains(self, models, given, log_ratio):
        """Return what each column adds to the log fit of models (M, d + 1); O(K^2 d) each.

        In single precision, where it is fast, for up to some thousand rows and no large ratio.
        """
        ratio = np.exp(log_ratio)[:, None]
        single = self.n_rows < min(_SINGLE_ROWS, _SINGLE_RATIO / ratio.max() / self.space.size)
        kind = self.products.fast if single else np.float64
        image = given.root.astype(kind) @ self.products.with_all(models, kind)
        # what a column takes of the square, by x'C^-1 y, and 1 + ratio x'C^-1 x
        fall = self.Xy.astype(kind) - (given.half.astype(kind)[:, None] @ image)[:, 0]
        pivot = self.products.squares.astype(kind) - np.einsum("mij,mij->mj", image, image)
        np.maximum(pivot, 0.0, out=pivot)
        ratio = ratio.astype(kind)
        pivot *= ratio
        pivot += kind(1.0)
        fall *= fall
        fall /= pivot
        fall *= ratio
        gain = np.log(pivot, out=pivot)
        if self._free_noise and self._free_slab:
            square = given.square[:, None]
            fall /= square.astype(kind)
            left = np.maximum(kind(1.0) - fall, (self.least / square).astype(kind))
            gain += kind(self.n_rows) * np.log(left, out=left)
        else:
            gain -= fall * np.exp(-self.log_noise(log_ratio))[:, None].astype(kind)
        gain *= kind(-0.5)
        return gain

    def along_ratios(self, models, log_ratio):
        """Log density (M, T) of models at log ratios (M, T), and of the log ratios."""
        value, basis = np.linalg.eigh(self.products.within(models))
        pull = np.einsum("mij,mi->mj", basis, self.Xy[models]) ** 2
        ratio = np.exp(log_ratio)[:, :, None]
        scale = 1.0 + ratio * np.maximum(value, 0.0)[:, None, :]
        square = self.total - (ratio * pull[:, None, :] / scale).sum(axis=2)
        log_det = np.log(scale).sum(axis=2)
        fit = self.log_fit(log_ratio, log_det, np.maximum(square, self.least))
        return fit + self.prior.log_density_of_ratio(log_ratio)

    def log_density(self, models, log_ratio):
        """Log density (M, T) of the data, of models and of their log ratios (M, T)."""
        size = np.count_nonzero(models < self.d, axis=1)
        return self.along_ratios(models, log_ratio) + self.log_prior[size][:, None]

    def log_evidence(self, models, weight):
        """Log p(y) by the model that is drawn most often: its evidence by its frequency.

        Its error is that of the log of the frequency.
        """
        models, place = np.unique(models, axis=0, return_inverse=True)
        share = np.bincount(np.ravel(place), weight)
        top, ratios = int(np.argmax(share)), self.lattice(_FINE)
        density = self.log_density(models[top : top + 1], ratios[None])
        value = float(logsumexp(density)) - np.log(share[top]) - self.problem.constant
        if len(ratios) > 1:
            value += np.log(ratios[1] - ratios[0])
        if self._free_noise and self._free_slab:
            return value + float(gammaln(0.5 * self.n_rows)) - 0.5 * self.n_rows * np.log(np.pi)
        return value - 0.5 * self.n_rows * np.log(2 * np.pi)
