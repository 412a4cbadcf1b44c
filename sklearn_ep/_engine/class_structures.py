"""Joint posteriors of all classes, given the sites of `class_sites` at the rows.

`ClassLatents` is that of latent values at rows with one prior covariance K (n, n) for each class,
as of Gaussian processes, or of linear predictors with few rows for their columns. Given a common
offset of the classes for each row, which the sites leave open, the classes are independent: one
n x n factorisation a class, as for two classes, and one more for the offsets. With D_c the
precisions of class c, E_c = (K + D_c^-1)^-1 and M = chol(sum_c E_c); the softmax has the same
algebra (Rasmussen and Williams 2006, section 3.5).

`ClassWeights` is that of the weights of linear predictors, W classes x columns with Gaussian
priors. The latent values of a row b are W b, and the precision of the weights has the blocks
[c = j] diag(prior) + B' diag([c = j] d_c - d_c d_j / sum d) B. Rows B are dense, CSR, or an
operator (n, q) of their own with `weighted_gram(weight)` for B' diag(weight) B and
`quadratic(matrix)` for b' matrix b of each row.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.linalg import blas
from scipy.sparse.linalg import LinearOperator, gcrotmk

from . import gaussian

# Classes times columns up to which the joint precision matrix is factorised, of 128 MB.
MOST_WEIGHTS = 4000
# Numbers in one temporary block of rows.
_BLOCK = 2_000_000


def _stack(count: int, n: int, kind: Any) -> np.ndarray:
    """Return an array (count, n, n) of a float type, each matrix in the order of LAPACK."""
    return np.empty((count, n, n), kind).transpose(0, 2, 1)


class ClassCovariance:
    """Posterior covariance of all classes at any rows, given the sites of the training rows.

    `explained` (K, n, n) holds the E_c, `level` (n, n) the lower M and `offset` M^-1. For prior
    covariances k (n, m) with the training rows, class c has covariance k** - k'E_c k + Q_c'Q_c and
    covariance Q_c'Q_j with class j, where Q_c = M^-1 E_c k.

    Found for a prior covariance K (n, n), in its precision, and site precisions (n, K). `log_det`
    is half the log determinant of prior covariance times sites plus the identity.
    """

    def __init__(self, K: np.ndarray, precision: np.ndarray) -> None:
        n, n_classes = precision.shape
        least = gaussian.least_precision(K.dtype, np.diagonal(K).max(initial=0.0))
        precision = np.where(np.abs(precision) < least, least, precision)
        self.kind, self.single, self.precision = K.dtype.type, K.dtype == np.float32, precision
        self.explained = _stack(n_classes, n, self.kind)
        self.log_det = -0.5 * np.sum(np.log(precision.sum(1)))
        for E, d in zip(self.explained, precision.T, strict=True):
            self.log_det += _explain(K, d, E)
        level = np.sum(self.explained, axis=0, out=_stack(1, n, self.kind)[0])
        self.level = gaussian.checked_cholesky(level, overwrite=True)
        self.log_det += gaussian.log_diagonal(self.level)
        self.offset = gaussian.triangular_inverse(self.level)

    def weights(self, Ks: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Return K^-1 mean (n, K) for shifts (n, K) of the sites and their product with K."""
        first = self._times_explained(Ks.T)
        level = self.offset.T @ (self.offset @ first.sum(1))
        return shift - first + self._times_explained([level] * len(Ks.T))

    def _times_explained(self, vectors: Any) -> np.ndarray:
        """Return E_c x_c (n, K) of vectors x_c (n,), one a class."""
        vectors = np.asarray(vectors, dtype=self.kind)
        return np.column_stack(list(map(np.dot, self.explained, vectors)))

    def halves(self, c: int, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return E_c k and Q_c for prior covariances k (n, m)."""
        P = self.explained[c] @ k
        return P, gaussian.lower_times(self.offset, P.copy())

    def weights_with(self, k: np.ndarray, c: int, j: int) -> np.ndarray:
        """Return weights (n, m) of the training rows, for prior covariances k (n, m).

        Their product with prior covariances of other rows is the covariance of class c there with
        class j here, but for the prior one where the classes are one.
        """
        P, half = self.halves(j, k)
        weights = self.explained[c] @ gaussian.lower_times(self.offset, half, trans=True)
        return weights - P if c == j else weights

    def blocks(self, prior: np.ndarray, k: np.ndarray, entries: int = 20_000_000) -> np.ndarray:
        """Return the covariances (m, K, K) of rows with prior variances (m,), in blocks of rows.

        A block takes so many `entries` of one kind at once; `k` (n, m) are their prior covariances
        with the training rows.
        """
        C, n = len(self.explained), len(self.offset)
        cov = np.empty((C, C, len(prior)))
        for rows in gaussian.row_blocks(len(prior), C * n, entries):
            halves: list[np.ndarray] = []
            block = k[:, rows]
            for c in range(C):
                P, half = self.halves(c, block)
                halves.append(half)
                for j, other in enumerate(halves):
                    cov[c, j, rows] = cov[j, c, rows] = np.einsum("im,im->m", half, other)
                cov[c, c, rows] += prior[rows] - np.einsum("im,im->m", block, P)
        return np.ascontiguousarray(cov.transpose(2, 0, 1))

    def offset_parts(self) -> Iterator[np.ndarray]:
        """Yield M^-1 E_c of each class, which add up to M', so that the last takes no product."""
        left = self.level.T.copy(order="F")
        for E in self.explained[:-1]:
            part = gaussian.lower_times(self.offset, E.copy(order="F"))
            left -= part
            yield part
        yield left

    def inverse_totals(self) -> Iterator[np.ndarray]:
        """Yield the block (n, n) of each class of the inverse of prior covariance plus sites'."""
        for E, part in zip(self.explained, self.offset_parts(), strict=True):
            yield E - _sum_of_grams([part])

    def own_blocks(self, K: np.ndarray) -> np.ndarray:
        """Return the same as `blocks` for the rows of the sites themselves, of covariance K (n, n).

        With D_c the precisions of class c, E_c K = I - E_c D_c^-1, where each column of E_c has
        the digits of its site however little that says: a product is needed only for the diagonal
        of weak ones, where the difference loses digits.
        """
        n_classes, n = self.precision.T.shape
        halves, prior = _stack(n_classes, n, self.kind), np.diagonal(K)
        own = np.empty((n, n_classes))
        for c, (E, part) in enumerate(zip(self.explained, halves, strict=True)):
            tau = self.precision[:, c].astype(self.kind)
            share = 1.0 / tau
            kept = 1.0 - share * np.diagonal(E)
            weak = np.flatnonzero(np.abs(tau) * prior < 0.1)
            kept[weak] = np.einsum("ij,ij->j", E[:, weak], K[:, weak])
            own[:, c] = share * kept
            np.multiply(E, -share, out=part)
            np.fill_diagonal(part, kept)
            gaussian.lower_times(self.offset, part)
        cov = np.matmul(halves.transpose(2, 0, 1), halves.transpose(2, 1, 0)).astype(np.float64)
        np.einsum("ncc->nc", cov)[:] += own
        return cov


def _explain(K: np.ndarray, precision: np.ndarray, out: np.ndarray) -> float:
    """Write (K + diag(precision)^-1)^-1 into `out`; return log |I + K diag(precision)| / 2."""
    scale = np.sqrt(np.maximum(precision, 0.0)).astype(K.dtype)
    np.multiply(scale[:, None], K, out=out.T)
    out *= scale[:, None]
    gaussian.add_to_diagonal(out, 1.0)
    lower = gaussian.checked_cholesky(out, overwrite=True)
    log_det = gaussian.log_diagonal(lower)
    gaussian.invert_triangular(lower)
    lower *= scale
    gaussian.mirrored(gaussian.triangular_gram(lower))
    return log_det + _explain_less(K, precision, out) if precision.min() < 0 else log_det


def _explain_less(K: np.ndarray, precision: np.ndarray, explained: np.ndarray) -> float:
    """Take what negative precisions lack off E (n, n) of the others; return their log determinant.

    With A the covariance that the others leave of these rows and d = sqrt(-precision), half of it
    is that of I - d A d, which is positive definite if the posterior is proper.
    """
    rows = np.flatnonzero(precision < 0)
    root = np.sqrt(-precision[rows])
    left = -explained @ K[:, rows]
    left[rows, np.arange(len(rows))] += 1.0
    B = -root[:, None] * (K[rows] @ left) * root
    gaussian.add_to_diagonal(B, 1.0)
    lower = gaussian.checked_cholesky(B)
    half = gaussian.triangular_solve(lower, (left * root).T).astype(K.dtype, copy=False)
    explained -= half.T @ half
    return gaussian.log_diagonal(lower)


class ClassLatentState:
    """Posterior of the latent values of all classes given sites d, b (n, K), copies counted.

    `mean` (n, K) and `cov` (n, K, K) are the marginals of the rows; `precision` (n, K) is that of
    the sites, `alpha` (n, K) K^-1 mean, `spread` the `ClassCovariance`; `log_evidence` is the log
    of the integral of prior times sites, `extra_var` 0: the sites are on the latent values
    themselves.

    The covariances are found for `rounded`, which is K (n, n) in single or double precision; the
    mean is that of double precision in either case.
    """

    extra_var = 0.0

    def __init__(
        self, K: np.ndarray, rounded: np.ndarray, precision: np.ndarray, shift: np.ndarray
    ) -> None:
        self.precision = precision
        self.spread = ClassCovariance(rounded, precision)
        self.alpha = self._alpha(K, shift)
        self.mean = K @ self.alpha
        self.cov = self.spread.own_blocks(rounded)
        if self.spread.single and not np.einsum("ncc->nc", self.cov).min() > 0:
            raise gaussian.ImproperPosterior("single precision does not hold the variances")
        self.log_evidence = 0.5 * float(np.sum(shift * self.mean)) - self.spread.log_det

    def _alpha(self, K: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Return K^-1 mean; what rounding leaves of it is solved for once more.

        In double precision by one step of refinement: where prior variances are 1e5 times those of
        the posterior, the mean is off by .1 without. Of single precision it gave three of three
        fits of five, six and eight classes with 600 to 900 rows up that were followed; six fits of
        600 to 1000 rows took 1.1 to 1.7 times as long.
        """
        alpha = self.spread.weights(K @ shift, shift)

        def product(v: np.ndarray) -> np.ndarray:
            """Return what K^-1 mean has to make the shift: its product with I + precision K."""
            return v + gaussian.star_times(self.precision, K @ v)

        if not self.spread.single:
            left = shift - product(alpha)
            return alpha + self.spread.weights(K @ left, left)
        system = _on_arrays(product, shift.shape)
        nearly = _on_arrays(lambda left: self.spread.weights(K @ left, left), shift.shape)
        how = dict(rtol=1e-5, maxiter=3, M=nearly)
        found, n_left = gcrotmk(system, shift.ravel(), alpha.ravel(), **how)
        if n_left or not np.all(np.isfinite(found)):
            raise gaussian.ImproperPosterior("single precision does not hold the posterior mean")
        return found.reshape(shift.shape)

    def evidence_curvature(self) -> np.ndarray:
        """Return R with d log evidence = sum(R * dK) / 2 at a fixed point of the sites, (n, n).

        Exact for two classes. For more the sites are a curved family, and what the evidence owes to
        their moves is left out: of six classes with 300 rows five nats a unit of a log parameter,
        and over twenty at a variance of 1000.
        """
        R = self.alpha @ self.alpha.T
        R -= np.sum(self.spread.explained, axis=0)
        R += _sum_of_grams(self.spread.offset_parts())
        return R


def _on_arrays(function: Any, shape: tuple[int, ...]) -> LinearOperator:
    """Return a linear function of arrays of a shape as an operator on vectors."""
    size = np.prod(shape)
    return LinearOperator((size, size), lambda v: function(v.reshape(shape)).ravel(), dtype=float)


def _sum_of_grams(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sum of A' A, by products of half the flops of general ones.

    The arrays have the order of LAPACK.
    """
    total: Any = 0.0
    for A in arrays:
        product = blas.ssyrk if A.dtype == np.float32 else blas.dsyrk
        total = total + product(1.0, A, trans=1, lower=1)
    return gaussian.mirrored(total)


class ClassLatents:
    """Structure of the latent values of all classes at rows of prior covariance K (n, n).

    A posterior costs 2 n^3 flops a class and 2 K + 3 arrays of n^2 numbers; with `single` most of
    it in single precision, and 3 K + 2 arrays of these. `rounded` is the covariance in the
    precision of the last posterior.
    """

    def __init__(self, K: np.ndarray, single: bool = False) -> None:
        self.K = K
        single = single and np.diagonal(K).max() < 1e9
        self.rounded = K.astype(np.float32) if single else K

    def posterior(self, precision: np.ndarray, shift: np.ndarray) -> ClassLatentState:
        """Return the `ClassLatentState` for sites (n, K), copies of tied rows counted.

        Single precision is given up at this covariance where the mean or a variance does not come
        out of it, as it does in double precision.
        """
        if self.rounded is not self.K:
            try:
                return ClassLatentState(self.K, self.rounded, precision, shift)
            except gaussian.ImproperPosterior:
                pass
        state = ClassLatentState(self.K, self.K, precision, shift)
        self.rounded = self.K
        return state


def class_covariances(spread: np.ndarray, B: Any) -> np.ndarray:
    """Return the covariances (n, K, K) of the latent values of rows B.

    `spread` (K, q, K, q) is the covariance of the weights.
    """
    C, q = spread.shape[:2]
    cov = np.empty((C, C, B.shape[0]))
    whole = hasattr(B, "quadratic")
    for rows in [slice(None)] if whole else gaussian.row_blocks(B.shape[0], q, _BLOCK):
        block = B if whole else B[rows]
        for c in range(C):
            for j in range(c + 1):
                cov[c, j, rows] = cov[j, c, rows] = _quadratic(block, spread[c, :, j])
    return np.ascontiguousarray(cov.transpose(2, 0, 1))


def _quadratic(B: Any, matrix: np.ndarray) -> np.ndarray:
    """Return b' matrix b (n,) of each row b."""
    if hasattr(B, "quadratic"):
        return B.quadratic(matrix)
    product = B @ matrix
    if sp.issparse(B):
        return np.asarray(B.multiply(product).sum(axis=1)).ravel()
    return np.einsum("iq,iq->i", product, B)


class ClassWeightState:
    """Posterior of the weights of all classes given sites d, b (n, K), copies counted.

    `coef` (K, q) are the means, `spread` (K, q, K, q) the covariance and `lower` the L with L L'
    the precision; `mean` (n, K) and `cov` (n, K, K) are the marginals of the rows.
    """

    extra_var = 0.0  # a latent value is a linear function of the weights

    def __init__(self, B: Any, prior: np.ndarray, precision: np.ndarray, shift: np.ndarray) -> None:
        C, q = precision.shape[1], B.shape[1]
        self.precision, self.shift = precision, shift
        share = precision / precision.sum(1, keepdims=True)
        A = np.zeros((C, q, C, q))
        for c in range(C):
            for j in range(c + 1):
                own = precision[:, c] if c == j else 0.0
                A[c, :, j] = gaussian.weighted_gram(B, own - precision[:, c] * share[:, j])
                A[j, :, c] = A[c, :, j].T
        A = A.reshape(C * q, C * q)
        gaussian.add_to_diagonal(A, np.tile(prior, C))
        self.lower = gaussian.checked_cholesky(A)
        self.spread = gaussian.inverse_from_cholesky(self.lower).reshape(C, q, C, q)
        pull = (B.T @ shift).T
        self.coef = (self.spread.reshape(C * q, C * q) @ pull.ravel()).reshape(C, q)
        self.mean = np.asarray(B @ self.coef.T)
        self.cov = class_covariances(self.spread, B)
        self.log_evidence = 0.5 * float(np.sum(pull * self.coef) + C * np.sum(np.log(prior)))
        self.log_evidence -= float(np.sum(np.log(np.diagonal(self.lower))))

    @cached_property
    def inverse(self) -> np.ndarray:
        """Lower L^-1, made when it is needed."""
        return gaussian.triangular_inverse(self.lower)

    def pull(self) -> np.ndarray:
        """Return what the sites pull the latent values of the rows by at the mean, (n, K)."""
        return self.shift - gaussian.star_times(self.precision, self.mean)


class ClassWeights:
    """Structure of the weights of all classes over rows B (n, q).

    `prior` (q,) are the prior precisions, the same for each class. A posterior costs
    n q^2 K (K + 1) multiplications and (K q)^3 / 3, memory 2 (K q)^2 numbers.
    """

    def __init__(self, B: Any, prior: np.ndarray) -> None:
        self.B, self.prior = B, prior

    def posterior(self, precision: np.ndarray, shift: np.ndarray) -> ClassWeightState:
        """Return the `ClassWeightState` for sites (n, K), copies of tied rows counted."""
        return ClassWeightState(self.B, self.prior, precision, shift)
