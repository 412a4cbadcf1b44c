"""Posterior of the weights u of a linear predictor s = B u, for many rows, many columns, or both.

The posterior precision is A = diag(D) + B' diag(pi) B: D from the prior (with the sites of a
Laplace prior in it), pi from the sites of the rows. Systems answer the same questions:
`PrimalSystem` factorises A (n x n), `DualSystem` the q x q matrix of the rows, and
`IterativeSystem` multiplies with B only. `LowRankSystem` is for a posterior that is kept as a
diagonal plus a matrix of low rank.
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
        self.sparse, self.intercept = sp.issparse(X), intercept
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

    def kernel(self, variances):
        """Return B diag(variances) B' (q, q), which is there while the prior stays the same."""
        if self._kernel is None or not np.array_equal(self._kernel[0], variances):
            self._kernel = variances, weighted_inner(self.B, variances, self.B)
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


def weighted_row_sums(B, variances):
    """Return diag(B diag(variances) B') for a dense or CSR matrix."""
    return squared(B) @ variances


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


class PrimalSystem:
    """A by its Cholesky factor, from `diagonal` D and `weight` pi. O(q n^2 + n^3)."""

    def __init__(self, design, diagonal, weight):
        A = design.gram(weight)
        A[np.diag_indices_from(A)] += diagonal
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

    @cached_property
    def half(self):
        """L^-1 of A = L L', made when it is needed."""
        return triangular_inverse(self.lower)

    def solve(self, right):
        """Return A^-1 right."""
        return cho_solve((self.lower, True), right, check_finite=False)

    def solve_with_product(self, design, right, rtol, start):
        """Return (x, B x) with A x = right; `rtol` and `start` are for systems that iterate."""
        x = self.solve(right)
        return x, design.dot(x)

    def training_variance(self, design):
        """Return diag(B A^-1 B') of the training rows."""
        return self.row_variance(design.B)

    def row_variance(self, B):
        """Return diag(B A^-1 B') of any rows."""
        out, half = np.empty(B.shape[0]), self.half.T
        for rows in row_blocks(B.shape[0], len(half)):
            block = B[rows] @ half
            out[rows] = np.einsum("ij,ij->i", block, block)
        return out

    def coefficient_variance(self):
        """Return diag(A^-1)."""
        return np.einsum("ij,ij->j", self.half, self.half)

    def squared_shrinkage(self, diagonal):
        """Return |I - A^-1 D|^2, the sum of squared shrinkage factors under a prior D. O(n^3)."""
        root = np.sqrt(diagonal)
        rest = root[:, None] * inverse_from_triangular(self.half.copy(order="F")) * root
        return len(rest) - 2.0 * float(np.trace(rest)) + float(np.sum(rest**2))

    def covariance(self, B1, B2):
        """Return B1 A^-1 B2'."""
        first = B1 @ self.half.T
        return first @ (first if B2 is B1 else B2 @ self.half.T).T

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) from N(0, A^-1)."""
        return rng.standard_normal((n_samples, len(self.half))) @ self.half


class DualSystem:
    """A by the q x q matrix M = I + W B D^-1 B' W, W = diag(sqrt(pi)). O(q^2 n + q^3), D > 0."""

    def __init__(self, design, diagonal, weight):
        self.design, self.prior_variance, self.weight = design, 1.0 / diagonal, weight
        self.root = np.sqrt(weight)
        self.K = design.kernel(self.prior_variance)
        M = self.root[:, None] * self.K * self.root
        M[np.diag_indices_from(M)] += 1.0
        self.lower = checked_cholesky(M)

    @property
    def log_det(self):
        """Log |A| = log |M| + log |D|."""
        return 2.0 * np.sum(np.log(np.diagonal(self.lower))) - np.sum(np.log(self.prior_variance))

    @property
    def precision(self):
        """A itself, n x n."""
        return np.diag(1.0 / self.prior_variance) + self.design.gram(self.weight)

    def solve(self, right):
        """Return A^-1 right by the matrix inversion lemma."""
        single = right.ndim == 1
        root = self.root if single else self.root[:, None]
        scale = self.prior_variance if single else self.prior_variance[:, None]
        prior = scale * right
        inner = cho_solve((self.lower, True), root * self.design.dot(prior), check_finite=False)
        return prior - scale * self.design.tdot(root * inner)

    def training_variance(self, design):
        """Return diag(B A^-1 B') of the training rows."""
        half = triangular_inverse(self.lower)
        var, *_ = explained_variances(self.K, self.weight, self.root, half)
        return positive_variance(var, np.diagonal(self.K))

    def squared_shrinkage(self, diagonal):
        """Return |I - M^-1|^2, the sum of squared shrinkage factors. O(q^3)."""
        rest = inverse_from_cholesky(self.lower.copy(order="F"))
        return len(rest) - 2.0 * float(np.trace(rest)) + float(np.sum(rest**2))

    def _explained(self, B):
        """Return L^-1 W B D^-1 C' for rows C."""
        cross = self.root[:, None] * weighted_inner(self.design.B, self.prior_variance, B)
        return solve_triangular(self.lower, cross, lower=True, check_finite=False)

    def row_variance(self, B):
        """Return diag(C A^-1 C') of any rows C."""
        prior = weighted_row_sums(B, self.prior_variance)
        out = np.empty(B.shape[0])
        for rows in row_blocks(B.shape[0], len(self.K)):
            half = self._explained(B[rows])
            out[rows] = prior[rows] - np.einsum("ij,ij->j", half, half)
        return positive_variance(out, prior)

    def coefficient_variance(self):
        """Return diag(A^-1); for CSR rows O(nnz q) instead of O(n q^2)."""
        inner = inverse_from_cholesky(self.lower.copy(order="F"))
        inner *= self.root[:, None]
        inner *= self.root
        B = self.design.B
        out = np.empty(B.shape[1])
        columns = B.tocsc() if self.design.sparse else B
        for cols in row_blocks(B.shape[1], B.shape[0]):
            block = columns[:, cols]
            if self.design.sparse:
                product = (block.T @ inner).T
                out[cols] = np.asarray(block.multiply(product).sum(axis=0)).ravel()
            else:
                out[cols] = np.einsum("ij,ij->j", block, inner @ block)
        prior = self.prior_variance
        return positive_variance(prior - prior**2 * out, prior)

    def covariance(self, B1, B2):
        """Return B1 A^-1 B2'."""
        first = self._explained(B1)
        second = first if B2 is B1 else self._explained(B2)
        return weighted_inner(B1, self.prior_variance, B2) - first.T @ second

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) from N(0, A^-1)."""
        return _perturbed(self, 1.0 / self.prior_variance, n_samples, rng)


def _perturbed(system, diagonal, n_samples, rng):
    """Draws of N(0, A^-1) by perturbed right-hand sides (Papandreou and Yuille 2011)."""
    q, n = system.design.shape
    right = np.sqrt(diagonal)[:, None] * rng.standard_normal((n, n_samples))
    noise = np.sqrt(system.weight)[:, None] * rng.standard_normal((q, n_samples))
    return system.solve(right + system.design.tdot(noise)).T


class LowRankSystem:
    """A = diag(D) + F F' with F (n, r); everything costs O(n r)."""

    def __init__(self, diagonal, factor):
        self.diagonal, self.factor = diagonal, factor
        scaled = factor / diagonal[:, None]
        inner = factor.T @ scaled
        inner[np.diag_indices_from(inner)] += 1.0
        self.lower = checked_cholesky(inner) if inner.size else inner
        self.half = triangular_inverse(self.lower) @ scaled.T

    @property
    def log_det(self):
        """Log |A|."""
        inner = 2.0 * np.sum(np.log(np.diagonal(self.lower)))
        return float(np.sum(np.log(self.diagonal)) + inner)

    @property
    def precision(self):
        """A itself, n x n."""
        return np.diag(self.diagonal) + self.factor @ self.factor.T

    def times(self, x):
        """Return A x for a vector."""
        return self.diagonal * x + self.factor @ (self.factor.T @ x)

    def solve(self, right):
        """Return A^-1 right."""
        scale = self.diagonal if right.ndim == 1 else self.diagonal[:, None]
        return right / scale - self.half.T @ (self.half @ right)

    def row_variance(self, B):
        """Return diag(B A^-1 B') of any rows."""
        prior = weighted_row_sums(B, 1.0 / self.diagonal)
        product = B @ self.half.T
        return positive_variance(prior - np.einsum("ij,ij->i", product, product), prior)

    def coefficient_variance(self):
        """Return diag(A^-1)."""
        prior = 1.0 / self.diagonal
        return positive_variance(prior - np.einsum("ij,ij->j", self.half, self.half), prior)

    def covariance(self, B1, B2):
        """Return B1 A^-1 B2'."""
        prior = weighted_inner(B1, 1.0 / self.diagonal, B2)
        return prior - (B1 @ self.half.T) @ (B2 @ self.half.T).T

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) from N(0, A^-1)."""
        n, r = self.factor.shape
        right = np.sqrt(self.diagonal)[:, None] * rng.standard_normal((n, n_samples))
        right += self.factor @ rng.standard_normal((r, n_samples))
        return self.solve(right).T


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
        return self.solve_with_product(self.design, right, rtol)[0]

    def solve_with_product(self, design, right, rtol, start=None):
        """Return (x, B x), A x = right, from a `start` of the same form.

        Stops early where the residual does not fall any more to working precision.
        """
        single = right.ndim == 1
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
