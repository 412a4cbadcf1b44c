"""Posterior of the weights u of a linear predictor s = B u, for many rows, many columns, or both.

The posterior precision is A = diag(D) + B' diag(pi) B: D from the prior (with the sites of a
Laplace prior in it), pi from the sites of the rows. Systems answer the same questions:
`PrimalSystem` factorises A (n x n), `DualSystem` the q x q matrix of the rows, and
`IterativeSystem` multiplies with B only. A system may be the prior of further rows.
"""

import copy
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cho_solve, solve_triangular
from sklearn.utils import gen_batches

from .._engine.class_sites import weighted_gram
from .._engine.gaussian import (
    checked_cholesky,
    explained_variances,
    inverse_from_cholesky,
    inverse_from_triangular,
    positive_variance,
    triangular_inverse,
)

TINY = 1e-300  # least variance: it still has an inverse and a logarithm
# Site precision before anything is known of a row, and inflation of the Jacobi variances there:
# where both end on text, roughly.
START_PRECISION, START_INFLATION = 0.15, 1.2


class Design:
    """The matrix B of rows, ones appended for an intercept, that counts products with it."""

    def __init__(self, X, intercept):
        self.intercept = intercept
        self.B = with_ones(X, intercept)
        self.shape = self.B.shape
        self.n_products = 0
        self._kernel: Any = None

    def counting(self):
        """Return the same matrix with a counter of its own."""
        other = copy.copy(self)
        other.n_products = 0
        return other

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "squares"}

    @cached_property
    def squares(self):
        """B.^2; a sparse one shares its structure with B."""
        return squared(self.B)

    def dot(self, u):
        """Return B u for a vector or a matrix of columns."""
        self.n_products += 1 if u.ndim == 1 else u.shape[1]
        return self.B @ u

    def tdot(self, v):
        """Return B' v for a vector or a matrix of columns."""
        self.n_products += 1 if v.ndim == 1 else v.shape[1]
        return self.B.T @ v

    def squares_tdot(self, x):
        """Return (B.^2)' x."""
        self.n_products += 1
        return self.squares.T @ x

    def start_variances(self, diagonal, weight):
        """Return variances of rows and coefficients by Jacobi's with equal sites of all copies."""
        precision = np.full(self.shape[0], START_PRECISION)
        variances = 1.0 / (diagonal + self.squares_tdot(precision * weight))
        j = START_INFLATION * leave_one_out(self.B, variances, precision)
        return np.maximum(j / (1.0 + precision * j), TINY), variances

    def gram(self, weight):
        """Return B' diag(weight) B as a dense matrix (n, n)."""
        return weighted_gram(self.B, weight)

    def kernel(self, prior):
        """Return the prior covariance (q, q) of the rows, kept while the prior stays the same."""
        of_prior = getattr(prior, "variances", prior)
        if self._kernel is None or not np.array_equal(self._kernel[0], of_prior):
            self._kernel = of_prior, prior.covariance(self.B, self.B)
        return self._kernel[1]


def with_ones(X, intercept):
    """Return X with a column of ones appended, CSR if it is sparse."""
    if sp.issparse(X):
        X = X.tocsr()
        return _sparse_with_ones(X) if intercept else X
    return np.column_stack([X, np.ones(len(X))]) if intercept else np.ascontiguousarray(X)


def _sparse_with_ones(X):
    """Append to each row of a CSR matrix its entry of the last column: `hstack` sorts all again."""
    if not X.has_canonical_format:
        X = X.copy()
        X.sum_duplicates()
    n, q = X.shape
    size = X.nnz + n
    index = np.int32 if max(size, q) < np.iinfo(np.int32).max else np.int64
    indptr = (X.indptr + np.arange(n + 1)).astype(index)
    old = np.ones(size, dtype=bool)
    old[indptr[1:] - 1] = False
    data, indices = np.ones(size, dtype=np.result_type(X, float)), np.full(size, q, dtype=index)
    data[old], indices[old] = X.data, X.indices
    return type(X)((data, indices, indptr), shape=(n, q + 1))


def with_data(B, data):
    """Return a CSR matrix of other entries without a copy of the structure."""
    return type(B)((data, B.indices, B.indptr), shape=B.shape)


def squared(B):
    """Return the squares of the entries of a dense or sparse matrix."""
    return with_data(B, B.data**2) if sp.issparse(B) else B * B


def weighted_inner(B, variances, C):
    """Return B diag(variances) C' as a dense matrix."""
    scaled = with_data(B, B.data * variances[B.indices]) if sp.issparse(B) else B * variances
    out = scaled @ C.T
    return out.toarray() if sp.issparse(out) else np.asarray(out)


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


def row_blocks(n_rows, width, most=2_000_000):
    """Return slices of rows whose dense blocks of `width` columns have at most so many numbers."""
    return gen_batches(n_rows, max(1, most // max(width, 1)))


class HalfCovariance:
    """Covariance H'H of the weights by its half H (r, n)."""

    def __init__(self, half):
        self.half = half

    def row_variance(self, B):
        """Return the variances of the predictors of any rows."""
        out, half = np.empty(B.shape[0]), self.half.T
        for rows in row_blocks(B.shape[0], half.shape[1]):
            block = B[rows] @ half
            out[rows] = np.einsum("ij,ij->i", block, block)
        return out

    def coefficient_variance(self):
        """Return the variances of the weights."""
        return np.einsum("ij,ij->j", self.half, self.half)

    def covariance(self, B1, B2):
        """Return the covariance of the predictors of two sets of rows."""
        first = B1 @ self.half.T
        return first @ (first if B2 is B1 else B2 @ self.half.T).T

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) of the weights about their mean."""
        return rng.standard_normal((n_samples, len(self.half))) @ self.half


class PrimalSystem(HalfCovariance):
    """A by its Cholesky factor, from a prior and `weight` pi. O(q n^2 + n^3).

    The prior is its precisions (n,), or a system.
    """

    def __init__(self, design, prior, weight):
        A, own = design.gram(weight), getattr(prior, "precision", prior)
        if own.ndim == 1:
            A[np.diag_indices_from(A)] += own
        else:
            A += own
        self.lower = checked_cholesky(A)

    @classmethod
    def of(cls, A):
        """Return the system of a precision matrix (n, n) that is there already."""
        system = cls.__new__(cls)
        system.lower = checked_cholesky(A)
        return system

    @property
    def log_det(self):
        """Log |A|."""
        return 2.0 * np.sum(np.log(np.diagonal(self.lower)))

    @property
    def precision(self):
        """A itself."""
        return self.lower @ self.lower.T

    def diagonal(self):
        """Return the diagonal of A."""
        return np.einsum("ij,ij->i", self.lower, self.lower)

    def times(self, right):
        """Return A right."""
        return self.lower @ (self.lower.T @ right)

    def weakened(self, share, more):
        """Return the system of `share` A and further precisions (n,)."""
        A = share * self.precision
        A[np.diag_indices_from(A)] += more
        return PrimalSystem.of(A)

    @cached_property
    def half(self):
        """L^-1 of A = L L', made when it is needed."""
        return triangular_inverse(self.lower)

    def solve(self, right):
        """Return A^-1 right."""
        return cho_solve((self.lower, True), right, check_finite=False)

    def training_variance(self, design):
        """Return diag(B A^-1 B') of the training rows."""
        return self.row_variance(design.B)

    def squared_shrinkage(self, diagonal):
        """Return |I - A^-1 D|^2, the sum of squared shrinkage factors under a prior D. O(n^3)."""
        root = np.sqrt(diagonal)
        inverse = inverse_from_triangular(self.half.copy(order="F"))
        return _squares_off_identity(root[:, None] * inverse * root)


def _squares_off_identity(matrix):
    """Return |I - M|^2 of a symmetric matrix."""
    return len(matrix) - 2.0 * float(np.trace(matrix)) + float(np.sum(matrix**2))


class DiagonalCovariance:
    """Independent weights with variances (n,)."""

    def __init__(self, variances):
        self.variances = variances

    @property
    def log_det(self):
        """Log determinant of the precision."""
        return -float(np.sum(np.log(self.variances)))

    @property
    def precision(self):
        """The precision, n x n."""
        return np.diag(self.diagonal())

    def diagonal(self):
        """Return the diagonal of the precision."""
        return 1.0 / self.variances

    def times(self, right):
        """Return the product of the precision with a vector or columns."""
        return (right.T / self.variances).T

    def weakened(self, share, more):
        """Return that of `share` of the precisions and further ones (n,)."""
        return DiagonalCovariance(1.0 / (share / self.variances + more))

    def solve(self, right):
        """Return the product of the covariance with a vector or columns."""
        return (right.T * self.variances).T

    def row_variance(self, B):
        """Return the variances of the predictors of rows."""
        return squared(B) @ self.variances

    def coefficient_variance(self):
        """Return the variances of the weights."""
        return self.variances

    def covariance(self, B1, B2):
        """Return the covariance of the predictors of two sets of rows."""
        return weighted_inner(B1, self.variances, B2)

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) of the weights about their mean."""
        return np.sqrt(self.variances) * rng.standard_normal((n_samples, len(self.variances)))


class DualSystem:
    """A by the q x q matrix M = I + W B P^-1 B' W, W = diag(sqrt(pi)). O(q^2 n + q^3).

    The prior P is its precisions (n,), positive, or a system.
    """

    def __init__(self, design, prior, weight):
        if isinstance(prior, np.ndarray):
            prior = DiagonalCovariance(1.0 / prior)
        self.design, self.prior, self.weight = design, prior, weight
        self.root = np.sqrt(weight)
        self.K = design.kernel(prior)
        M = self.root[:, None] * self.K * self.root
        M[np.diag_indices_from(M)] += 1.0
        self.lower = checked_cholesky(M)

    @property
    def log_det(self):
        """Log |A| = log |M| + log |P|."""
        return 2.0 * np.sum(np.log(np.diagonal(self.lower))) + self.prior.log_det

    @property
    def precision(self):
        """A itself, n x n."""
        return self.prior.precision + self.design.gram(self.weight)

    def diagonal(self):
        """Return the diagonal of A."""
        return self.prior.diagonal() + self.design.squares_tdot(self.weight)

    def times(self, right):
        """Return A right."""
        rows = (self.weight * self.design.dot(right).T).T
        return self.prior.times(right) + self.design.tdot(rows)

    def weakened(self, share, more):
        """Return the system of `share` A and further precisions (n,)."""
        return DualSystem(self.design, self.prior.weakened(share, more), share * self.weight)

    def solve(self, right):
        """Return A^-1 right by the matrix inversion lemma."""
        prior = self.prior.solve(right)
        rows = (self.root * self.design.dot(prior).T).T
        inner = cho_solve((self.lower, True), rows, check_finite=False)
        return prior - self.prior.solve(self.design.tdot((self.root * inner.T).T))

    def training_variance(self, design):
        """Return diag(B A^-1 B') of the training rows."""
        half = triangular_inverse(self.lower)
        var, *_ = explained_variances(self.K, self.weight, self.root, half)
        return positive_variance(var, np.diagonal(self.K))

    def squared_shrinkage(self, diagonal):
        """Return |I - M^-1|^2, the sum of squared shrinkage factors. O(q^3)."""
        return _squares_off_identity(inverse_from_cholesky(self.lower.copy(order="F")))

    def _explained(self, B):
        """Return L^-1 W B P^-1 C' for rows C."""
        cross = self.root[:, None] * self.prior.covariance(self.design.B, B)
        return solve_triangular(self.lower, cross, lower=True, check_finite=False)

    def row_variance(self, B):
        """Return diag(C A^-1 C') of any rows C."""
        prior, out = self.prior.row_variance(B), np.empty(B.shape[0])
        for rows in row_blocks(B.shape[0], len(self.K)):
            half = self._explained(B[rows])
            out[rows] = prior[rows] - np.einsum("ij,ij->j", half, half)
        return positive_variance(out, prior)

    def coefficient_variance(self):
        """Return diag(A^-1) under a diagonal prior; for CSR rows O(nnz q) instead of O(n q^2)."""
        inner = inverse_from_cholesky(self.lower.copy(order="F"))
        inner *= self.root[:, None]
        inner *= self.root
        B = self.design.B
        out = np.empty(B.shape[1])
        columns = B.tocsc() if sp.issparse(B) else B
        for cols in row_blocks(B.shape[1], B.shape[0]):
            block = columns[:, cols]
            if sp.issparse(B):
                product = (block.T @ inner).T
                out[cols] = np.asarray(block.multiply(product).sum(axis=0)).ravel()
            else:
                out[cols] = np.einsum("ij,ij->j", block, inner @ block)
        prior = self.prior.coefficient_variance()
        return positive_variance(prior - prior**2 * out, prior)

    def covariance(self, B1, B2):
        """Return B1 A^-1 B2'."""
        first = self._explained(B1)
        second = first if B2 is B1 else self._explained(B2)
        return self.prior.covariance(B1, B2) - first.T @ second

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) from N(0, A^-1) under a diagonal prior."""
        return _perturbed(self, self.prior.diagonal(), n_samples, rng)


def _perturbed(system, diagonal, n_samples, rng):
    """Draws of N(0, A^-1) by perturbed right-hand sides (Papandreou and Yuille 2011)."""
    q, n = system.design.shape
    right = np.sqrt(diagonal)[:, None] * rng.standard_normal((n, n_samples))
    noise = np.sqrt(system.weight)[:, None] * rng.standard_normal((q, n_samples))
    return system.solve(right + system.design.tdot(noise)).T


SYSTEMS = {"primal": PrimalSystem, "dual": DualSystem}


def low_rank_system(diagonal, factor):
    """Return the system of A = diag(D) + F F' with F (n, r): that of r rows."""
    return DualSystem(Design(factor.T, False), diagonal, np.ones(factor.shape[1]))


def conjugate_gradients(times, scale, b, x, r, rtol, moved=None):
    """Solve A x = b in each column of x (n, k), in place, from residuals r = b - A x.

    `times(V)` is A V, `scale` (n, 1) the diagonal of the preconditioner, `rtol` the relative
    residual, in its norm, at which a column ends, one number or more; `moved(active, alpha)` is
    told of steps. Every column runs its own recursion with its own end, so that an answer does not
    depend on which columns are solved together; only the products are shared.
    """
    wanted = rtol**2 * np.einsum("ij,ij->j", b, b / scale)
    step = r / scale
    p, rho = step, np.einsum("ij,ij->j", r, step)
    left = np.flatnonzero(rho > wanted)
    for _ in range(10 * len(b) + 100):
        if not len(left):
            break
        active: Any = slice(None) if len(left) == len(rho) else left  # all of them in place
        direction = np.ascontiguousarray(p[:, active])
        image = times(direction)
        alpha = rho[active] / np.einsum("ij,ij->j", direction, image)
        x[:, active] += alpha * direction
        if moved is not None:
            moved(active, alpha)
        residual = r[:, active] - alpha * image
        r[:, active] = residual
        step = residual / scale
        new = np.einsum("ij,ij->j", residual, step)
        p[:, active] = step + (new / rho[active]) * direction
        rho[active] = new
        left = left[new > wanted[active]]


class IterativeSystem:
    """A by conjugate gradients with a diagonal preconditioner. O(nnz) a step and column.

    `data` (n,) is the diagonal of B' diag(pi) B for the preconditioner, possibly of other site
    precisions nearby; None computes it, one product with the squares.
    """

    def __init__(self, design, diagonal, weight, data=None):
        self.design, self.diagonal, self.weight = design, diagonal, weight
        self.data = design.squares_tdot(weight) if data is None else data
        self.preconditioner = diagonal + self.data

    def times(self, V):
        """Return A V for columns."""
        product = self.weight[:, None] * self.design.dot(V)
        return self.diagonal[:, None] * V + self.design.tdot(product)

    def solve(self, right, rtol=1e-8):
        """Return A^-1 right to a relative residual of `rtol` in each column."""
        return self.solve_with_product(right, rtol)[0]

    def solve_with_product(self, right, rtol, start=None):
        """Return (x, B x), A x = right, from a `start` of the same form.

        Stops early where the residual does not fall any more to working precision.
        """
        single, design = right.ndim == 1, self.design
        b = right[:, None] if single else right
        scale = self.preconditioner[:, None]
        x, Bx, r = self._begin(design, b, start)
        follow: dict = {}

        def image(direction):
            follow["product"] = design.dot(direction)
            out = design.tdot(self.weight[:, None] * follow["product"])
            out += self.diagonal[:, None] * direction
            return out

        def moved(active, alpha):
            Bx[:, active] += alpha * follow["product"]

        conjugate_gradients(image, scale, b, x, r, rtol, moved)
        return (x[:, 0], Bx[:, 0]) if single else (x, Bx)

    def _begin(self, design, b, start):
        """Return x, B x and the residual to begin with."""
        if start is None:
            return np.zeros(b.shape), np.zeros((design.shape[0], b.shape[1])), b.copy()
        x, Bx = (np.array(a, dtype=float).reshape(len(a), -1) for a in start)
        r = b - self.diagonal[:, None] * x - design.tdot(self.weight[:, None] * Bx)
        return x, Bx, r

    def covariance(self, B1, B2):
        """Return B1 A^-1 B2' by one solve a row of B2."""
        out = np.empty((B1.shape[0], B2.shape[0]))
        for rows in row_blocks(B2.shape[0], sum(self.design.shape)):
            block = B2[rows].T
            right = block.toarray() if sp.issparse(block) else np.ascontiguousarray(block)
            out[:, rows] = B1 @ self.solve(right)
        return out

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) from N(0, A^-1)."""
        return _perturbed(self, self.diagonal, n_samples, rng)
