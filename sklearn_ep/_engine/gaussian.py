"""Gaussians: algebra in natural parameters, and the tail of one without cancellation.

A Gaussian factor exp(shift' x - x' precision x / 2) is a pair of arrays, so that products and
quotients of factors are sums and differences. Whether a factor is a proper density is decided here,
by a Cholesky factorisation and nowhere else.

BLAS has one thread meanwhile: the wheels of numpy and scipy bring an OpenBLAS each, whose threads
wait for work on the same cores. With two threads on two cores eight of nine fits took 1.5 to 4.8
times as long as with one; only a dense fit of 6000 rows took .73 of the time
(doc/benchmarks/threads.py). The last bits of a product depend on the threads as well, so that
workers, who have fewer, would answer otherwise than one process does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import blas, cho_solve, cholesky, lapack
from scipy.special import erfcx
from threadpoolctl import ThreadpoolController

# Below this product of site precision and prior variance the difference 1 - (B^-1)_ii has lost the
# digits that the direct formula keeps.
WEAK_SITE = 1e-4
# Smallest eigenvalue of a precision of unit diagonal whose answers are right to some 1e-3.
_LEAST_EIGENVALUE = 1e3 * np.finfo(float).eps


# Rows up to which LAPACK inverts a triangular factor at once.
_LAPACK_ROWS = 64


@cache
def libraries() -> ThreadpoolController:
    """Return the numerical libraries that are loaded, which takes 12 ms to find out."""
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS have one thread in a context or a decorated function, and afterwards its own."""
    with libraries().limit(limits=1, user_api="blas"):
        yield


class ImproperPosterior(ArithmeticError):
    """The sites leave no proper Gaussian posterior: the step that led here has to be shortened."""


class Natural(NamedTuple):
    """Gaussian factor exp(shift' x - x' precision x / 2), not necessarily proper.

    precision has shape (d, d), shift has shape (d,).
    """

    precision: np.ndarray
    shift: np.ndarray


class Moments(NamedTuple):
    """Mean (d,) and covariance (d, d) of a proper Gaussian."""

    mean: np.ndarray
    cov: np.ndarray


def times(a: Natural, b: Natural) -> Natural:
    """Return the product of two factors."""
    return Natural(a.precision + b.precision, a.shift + b.shift)


def over(a: Natural, b: Natural) -> Natural:
    """Return the quotient of two factors: what is left of `a` once `b` is removed (a cavity)."""
    return Natural(a.precision - b.precision, a.shift - b.shift)


def add_to_diagonal(matrix: np.ndarray, value: Any) -> None:
    """Add a number, or one for each entry, to the diagonal of a square matrix, in place."""
    np.einsum("ii->i", matrix)[...] += value


def row_blocks(n_rows: int, width: int = 1, most: int = 2_000_000) -> list[slice]:
    """Return slices of rows whose dense blocks of `width` columns have at most so many numbers.

    As scikit-learn's `gen_batches`, which takes 60 microseconds a call to check its parameters.
    """
    starts = range(0, n_rows, max(1, most // max(width, 1)))
    return list(map(slice, starts, (*starts[1:], n_rows)))


def checked_cholesky(matrix: np.ndarray, overwrite: bool = False) -> np.ndarray:
    """Return the lower Cholesky factor, or raise `ImproperPosterior` where there is none.

    In the memory of the matrix, if that may be overwritten and has the order of LAPACK.
    """
    factorise = lapack.spotrf if matrix.dtype == np.float32 else lapack.dpotrf
    lower, info = factorise(matrix, lower=1, clean=1, overwrite_a=overwrite)
    if info != 0:
        raise ImproperPosterior("the posterior precision is not positive definite")
    return lower


# Small problems spend more time in the checks of scipy.linalg than in LAPACK: these two skip them.


def cholesky_solve(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return A^-1 right for the lower Cholesky factor of A and a vector or matrix."""
    if not right.size:
        return right
    return lapack.dpotrs(lower, right, lower=1)[0]


def triangular_solve(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return lower^-1 right for a matrix on the right."""
    if not right.size:
        return right
    return lapack.dtrtrs(lower, right, lower=1)[0]


def jittered_cholesky(
    matrix: np.ndarray, jitter: float, largest: float = 0.001
) -> tuple[np.ndarray, float]:
    """Return (lower factor, jitter used) of a covariance matrix with a relative jitter.

    The diagonal is multiplied by 1 + jitter; where the factorisation fails the jitter grows
    tenfold, up to `largest`. The jitter in use is returned, so that the rescue can be reported.

    Raises
    ------
    ImproperPosterior
        If the matrix is not positive definite even with the largest jitter.
    """
    diagonal = np.diagonal(matrix)
    used = jitter
    while True:
        trial = matrix.copy()
        np.fill_diagonal(trial, diagonal * (1.0 + used))
        try:
            return cholesky(trial, lower=True, check_finite=False), used
        except np.linalg.LinAlgError as error:
            used = max(10.0 * used, 1e-12)
            if used > largest:
                raise ImproperPosterior(
                    f"the covariance is not positive definite with a relative jitter of {largest:g}"
                ) from error


def positive_variance(var: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Keep variances that rounding made non-positive at the rounding level of the prior variance.

    A posterior variance is positive in exact arithmetic; where prior minus explained variance
    cancels, the nearest defensible value is the unit roundoff times the prior.
    """
    return np.maximum(var, np.finfo(float).eps * prior)


def triangular_inverse(lower: np.ndarray) -> np.ndarray:
    """Return the inverse of a lower triangular matrix (n^3 / 3 flops, half of a general solve)."""
    inverse = lower.copy(order="F")
    invert_triangular(inverse)
    return inverse


def triangular_inverses(lower: np.ndarray) -> np.ndarray:
    """Return the inverses of many small lower triangular matrices (M, n, n).

    From 20 rows on in a third of the time of general inverses.
    """
    out = np.empty(lower.shape)
    for one, inverse in zip(lower, out, strict=True):
        upper, info = lapack.dtrtri(one.T)
        if info != 0:
            raise ImproperPosterior("a triangular factor is singular")
        inverse[:] = upper.T
    return out


def invert_triangular(lower: np.ndarray) -> None:
    """Invert a lower triangular matrix in its own memory.

    By halves, whose products run at nearly the full rate: from 100 rows on in half the time of
    LAPACK's own.
    """
    single = lower.dtype == np.float32
    invert, product = (lapack.strtri, blas.strmm) if single else (lapack.dtrtri, blas.dtrmm)
    blocks = [(0, len(lower))] if len(lower) else []
    for start, stop in blocks:  # which grow on the way
        if stop - start > _LAPACK_ROWS:
            middle = start + (stop - start) // 2
            blocks += [(start, middle), (middle, stop)]
    for start, stop in reversed(blocks):
        block, half = lower[start:stop, start:stop], (stop - start) // 2
        if stop - start <= _LAPACK_ROWS:
            block[:], info = invert(block, lower=1)
            if info != 0:
                raise ImproperPosterior("a triangular factor is singular")
        else:
            below = product(-1.0, block[:half, :half], block[half:, :half], side=1, lower=1)
            own = block[half:, half:]
            block[half:, :half] = product(1.0, own, below, lower=1, overwrite_b=1)


def inverse_factor(matrix: np.ndarray) -> np.ndarray:
    """Return the inverse of the lower Cholesky factor of a matrix, in the memory of the matrix.

    Half the log determinant is minus the sum of the logs of its diagonal. The two steps as one
    recursion by halves take the same time: .95 to 1.1 of it with 60 to 2000 rows on one core.
    """
    lower = checked_cholesky(matrix, overwrite=True)
    invert_triangular(lower)
    return lower


def lower_times(lower: np.ndarray, block: np.ndarray, trans: bool = False) -> np.ndarray:
    """Return lower @ block, or lower' @ block, in the memory of `block` whatever its order.

    A triangular product has half the flops of a general one at nearly the same rate; with the
    inverse of a factor it takes under half the time of solving with the factor.
    """
    if not block.size:
        return block
    product = blas.dtrmm if block.dtype == np.float64 else blas.strmm
    if block.flags.f_contiguous:
        return product(1.0, lower, block, lower=1, trans_a=trans, overwrite_b=1)
    return product(1.0, lower, block.T, side=1, lower=1, trans_a=not trans, overwrite_b=1).T


def inverse_from_cholesky(lower: np.ndarray) -> np.ndarray:
    """Return the symmetric inverse of the matrix whose lower Cholesky factor is given."""
    return inverse_from_triangular(triangular_inverse(lower))


def inverse_from_triangular(inverse: np.ndarray) -> np.ndarray:
    """Return the same from the inverse of the lower Cholesky factor (n^3 / 3 flops)."""
    return mirrored(triangular_gram(inverse.copy(order="F")))


def triangular_gram(lower: np.ndarray) -> np.ndarray:
    """Return the lower half of lower' lower, zeros above it, in the memory of a triangle."""
    if not len(lower):
        return lower
    square = lapack.slauum if lower.dtype == np.float32 else lapack.dlauum
    return square(lower, lower=1, overwrite_c=1)[0]


def mirrored(lower: np.ndarray) -> np.ndarray:
    """Return a symmetric matrix from its lower half, zeros above it, in the memory of that half.

    A block at a time, in a third of the time of the whole.
    """
    for start in range(0, len(lower), 128):
        rows, below = slice(start, start + 128), slice(start + 128, None)
        own = lower[rows, rows]
        own += own.T
        np.einsum("ii->i", own)[...] *= 0.5
        lower[rows, below] = lower[below, rows].T
    return lower


def moments(factor: Natural) -> Moments:
    """Return mean and covariance of a proper factor; raise `ImproperPosterior` otherwise."""
    lower = checked_cholesky(factor.precision)
    mean = cho_solve((lower, True), factor.shift, check_finite=False)
    return Moments(mean, inverse_from_cholesky(lower))


def natural(m: Moments) -> Natural:
    """Return the natural parameters of a Gaussian given by mean and covariance."""
    lower = checked_cholesky(m.cov)
    precision = inverse_from_cholesky(lower)
    return Natural(precision, precision @ m.mean)


def log_partition(factor: Natural) -> float:
    """Return log of the integral of a factor, without the d log(2 pi) / 2 that cancels everywhere.

    This is shift' precision^-1 shift / 2 - log|precision| / 2.
    """
    lower = checked_cholesky(factor.precision)
    half = cho_solve((lower, True), factor.shift, check_finite=False)
    return 0.5 * factor.shift @ half - np.sum(np.log(np.diagonal(lower)))


def explained_variances(
    K: np.ndarray, precision: np.ndarray, root: np.ndarray, inverse: np.ndarray
) -> np.ndarray:
    """Return diag((K^-1 + diag(precision))^-1) without K^-1, for precisions that are not negative.

    `precision` and `root` (n,) are those of the sites and their square roots, `inverse` (n, n) is
    that of the lower Cholesky factor of I + root K root.
    """
    var = np.diagonal(K).astype(np.float64)
    strong = precision * var >= WEAK_SITE
    norms = np.einsum("ij,ij->j", inverse, inverse)
    var[strong] = (1.0 - norms[strong]) / precision[strong]
    weak = np.flatnonzero(~strong)
    if len(weak):
        halves = lower_times(inverse, root.astype(K.dtype)[:, None] * K[:, weak])
        var[weak] -= np.einsum("ij,ij->j", halves, halves)
    return var


def check_precise(precision: np.ndarray) -> None:
    """Raise an `ImproperPosterior` where rounding of a posterior precision hides what it says.

    Columns that cancel each other, as two with the same large offset do, leave information below
    the rounding error of the precision; the answer would be noise. The units of columns do not
    matter.
    """
    scale = 1.0 / np.sqrt(np.diagonal(precision))
    if np.linalg.eigvalsh(scale[:, None] * precision * scale)[0] < _LEAST_EIGENVALUE:
        raise ImproperPosterior("the posterior precision is singular to double precision")


def forward(lower: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Solve lower x = rhs for stacks of small triangles: lower (..., q, q), rhs (..., q, k)."""
    out = np.empty(np.broadcast_shapes(lower.shape[:-2], rhs.shape[:-2]) + rhs.shape[-2:])
    for a in range(lower.shape[-1]):
        rest = rhs[..., a, :]
        for b in range(a):
            rest = rest - lower[..., a, b, None] * out[..., b, :]
        out[..., a, :] = rest / lower[..., a, a, None]
    return out


def backward(lower: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Solve lower' x = rhs for stacks of small triangles."""
    turned = lower.swapaxes(-1, -2)[..., ::-1, ::-1]  # in the opposite order lower' is lower, too
    return forward(turned, rhs[..., ::-1, :])[..., ::-1, :]


def eigen_curvature(rows: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues (p,), none below `least`, and eigenvectors of a curvature (p, p).

    rows are those of the negative Hessian by differences of gradients, nearly symmetric; flat or
    indefinite directions count as known to 1 / sqrt(least) units.
    """
    values, vectors = np.linalg.eigh(0.5 * (rows + rows.T))
    return np.maximum(values, least), vectors


class NormalPrior(NamedTuple):
    """Independent normal priors with means and standard deviations (T,): log-normal for scales."""

    mean: np.ndarray
    sd: np.ndarray

    def log_density(self, phi: np.ndarray) -> float:
        """Return the log density."""
        z = (phi - self.mean) / self.sd
        return float(-0.5 * z @ z - np.log(self.sd * np.sqrt(2.0 * np.pi)).sum())

    def slope(self, phi: np.ndarray) -> np.ndarray:
        """Return its gradient (T,)."""
        return (self.mean - phi) / self.sd**2


def learned_curvature(curvature: np.ndarray, moved: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Return the curvature after a step that made the gradient lose so much (BFGS)."""
    along = curvature @ moved
    if moved @ lost <= 1e-3 * (moved @ along):
        return curvature
    out = curvature - np.outer(along, along) / (moved @ along)
    return out + np.outer(lost, lost) / (moved @ lost)


def covariance_root(cov: np.ndarray) -> np.ndarray:
    """Return R (.., p, p) with R R' = cov, which may be singular."""
    values, vectors = np.linalg.eigh(cov)
    # eigenvalues of a singular matrix are zero but for rounding
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]


def root_for_draws(cov: np.ndarray) -> np.ndarray:
    """Return R with R R' = cov but for a relative jitter, in place, that draws do not show.

    Rows of draws may repeat, so that the matrix is singular. It is the difference of a prior and
    what is explained: where these are far larger, rounding leaves no Cholesky factor.
    """
    add_to_diagonal(cov, 1e-10 * (1.0 + np.diagonal(cov).max()))
    try:
        return checked_cholesky(cov)
    except ImproperPosterior:
        return covariance_root(cov)


def with_data(B: Any, data: np.ndarray) -> Any:
    """Return a CSR matrix of other entries without a copy of the structure."""
    return type(B)((data, B.indices, B.indptr), shape=B.shape)


def star_times(d: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return (diag(d) - d d' / sum d) x for d (n, K) and x (n, K) or columns (n, K, k) of them."""
    columns = x.reshape(*d.shape, -1)
    dx = d[:, :, None] * columns
    out = dx - d[:, :, None] * (dx.sum(1) / d.sum(1)[:, None])[:, None]
    return out.reshape(x.shape)


def weighted_gram(B: Any, weight: np.ndarray) -> np.ndarray:
    """Return B' diag(weight) B as a dense matrix (q, q), in single precision if B is."""
    if hasattr(B, "weighted_gram"):
        return B.weighted_gram(weight)
    if not sp.issparse(B):
        # numpy takes half the products of a matrix with its transpose: one for each sign
        kind, minus = np.float32 if B.dtype == np.float32 else np.float64, weight < 0.0
        half = np.sqrt(np.abs(weight)).astype(kind)[:, None] * B
        if not np.any(minus):
            return half.T @ half
        more, less = half[~minus], half[minus]
        return more.T @ more - less.T @ less
    return (B.T @ with_data(B, B.data * np.repeat(weight, np.diff(B.indptr)))).toarray()


def normal_hazard(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return r = N(z) / Phi(z) and r + z, both without cancellation for any finite z.

    Below z = -50 the sum r + z would lose every digit; there its asymptotic series takes over.
    """
    r = np.sqrt(2.0 / np.pi) / erfcx(-z / np.sqrt(2.0))
    above, far = r + z, z < -50.0
    if np.any(far):
        t = np.maximum(-z, 50.0)
        above = np.where(far, (1.0 - 2.0 / t**2 + 10.0 / t**4 - 74.0 / t**6) / t, above)
    return r, above


def least_precision(kind: Any, prior: float) -> float:
    """Return a site precision that says as little as none beside the largest prior variance.

    Covariances are divided by those of sites. Products of lesser ones would leave the range of
    single precision, where a sweep over 1000 rows takes .86 s for .03; a sweep of several classes
    slows down from 2e-11 of the largest variance on. Single precision itself is off by 1e-7.
    """
    return 1e-10 / max(prior, 1.0) if kind == np.float32 else 1e-30


def log_diagonal(lower: np.ndarray) -> float:
    """Return the sum of the logs of the diagonal of a factor, half the log determinant."""
    return np.sum(np.log(np.diagonal(lower)), dtype=np.float64)
