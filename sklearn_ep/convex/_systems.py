"""Posterior of the weights u of a linear predictor s = B u, for many rows, many columns, or both.

The posterior precision is A = diag(D) + B' diag(pi) B: D from the prior (with the sites of a
Laplace prior in it), pi from the sites of the rows. Systems answer the same questions:
`PrimalSystem` factorises A (n x n), `DualSystem` the q x q matrix of the rows, and
`IterativeSystem` multiplies with B only. A system may be the prior of further rows.

Where no factorisation is affordable draws of the posterior tell the level of variances whose shape
a diagonal gives, and probes the log determinant.
"""

import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cho_solve, eigh_tridiagonal, norm, solve_triangular
from scipy.sparse.linalg import aslinearoperator

from .._engine import gaussian

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

    def kernel(self, prior):
        """Return the prior covariance (q, q) of the rows, kept while the prior stays the same."""
        of_prior = getattr(prior, "variances", prior)
        if self._kernel is None or not np.array_equal(self._kernel[0], of_prior):
            self._kernel = of_prior, prior.covariance(self.B, self.B)
        return self._kernel[1]


def with_ones(X, intercept):
    """Return X with a column of ones if there is an intercept, CSR if it is sparse.

    What is stored twice of a sparse entry is added up, since its square is taken later on.
    """
    if not sp.issparse(X):
        ones = np.ones((X.shape[0], 1))
        return np.hstack([X, ones]) if intercept else np.ascontiguousarray(X)
    B = X.tocsr()
    if not B.has_canonical_format:
        B = B.copy()
        B.sum_duplicates()
    if not intercept:
        return B
    (n, d), ends = B.shape, B.indptr[1:]
    # a ninth of the time of scipy.sparse.hstack for one row, half for 30,000
    data = np.insert(B.data.astype(np.float64, copy=False), ends, 1.0)
    parts = data, np.insert(B.indices, ends, d), B.indptr + np.arange(n + 1, dtype=B.indptr.dtype)
    return type(B)(parts, shape=(n, d + 1))


def squared(B):
    """Return the squares of the entries of a dense or sparse matrix."""
    return gaussian.with_data(B, B.data**2) if sp.issparse(B) else B * B


def about(X, centre):
    """Return rows X about a centre (d,): dense ones at once, which keeps digits, others unmade."""
    if isinstance(X, np.ndarray):
        return X - centre
    ones = aslinearoperator(np.ones((X.shape[0], 1)))
    return aslinearoperator(X) - ones @ aslinearoperator(centre[None])


def dense_about(X, centre):
    """Return the same as a dense matrix."""
    if not isinstance(X, np.ndarray):
        X = X.toarray() if sp.issparse(X) else X @ np.eye(len(centre))
    return X - centre


def surely_positive(variances, squares):
    """Return variances, those zero that are rounding errors of columns of some mean squares."""
    return np.where(variances > 64.0 * np.finfo(float).eps * squares, variances, 0.0)


class ColumnSums(NamedTuple):
    """Total weight of rows, and weighted sums (n,) of the entries of columns and their squares."""

    weight: float
    total: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, B, weight):
        """Return those of rows B (q, n), dense or CSR, with weights (q,)."""
        return cls(float(weight.sum()), B.T @ weight, squared(B).T @ weight)

    @property
    def variances(self):
        """Variances (n,) of the columns, as far as these sums have digits."""
        squares = self.squares / self.weight
        return surely_positive(squares - (self.total / self.weight) ** 2, squares)


def weighted_variances(X, weight):
    """Return the variances (d,) of the columns of X, rows weighted; dense or CSR/CSC."""
    if sp.issparse(X):
        return ColumnSums.of(X, weight).variances
    total = weight.sum()
    mean = X.T @ weight / total
    return surely_positive(np.einsum("ij,ij,i->j", X - mean, X - mean, weight) / total, mean**2)


def weighted_inner(B, variances, C):
    """Return B diag(variances) C' as a dense matrix."""
    wide = gaussian.with_data(B, B.data * variances[B.indices]) if sp.issparse(B) else B * variances
    out = wide @ C.T
    return out.toarray() if sp.issparse(out) else np.asarray(out)


def leave_one_out(B, variances, copy_precision):
    """Return j_i = sum_l b_il^2 / (A_ll - pi_i b_il^2): Jacobi variances without the row's share.

    `variances` (n,) is 1 / diag(A), `copy_precision` (q,) the pi_i of one copy of each row. In the
    precision of B.
    """
    out = np.empty(B.shape[0])
    width = B.nnz // max(B.shape[0], 1) + 1 if sp.issparse(B) else B.shape[1]
    variances, copy_precision = (x.astype(B.dtype) for x in (variances, copy_precision))
    for rows in gaussian.row_blocks(B.shape[0], 8 * width):
        block = squared(B[rows])
        share, own, copy = block, variances, copy_precision[rows][:, None]
        if sp.issparse(B):
            share, own = block.data, variances[block.indices]
            copy = np.repeat(copy_precision[rows], np.diff(block.indptr))
        share *= own
        share /= 1.0 - copy * share
        out[rows] = np.asarray(block.sum(axis=1)).ravel()
    return out


class HalfCovariance:
    """Covariance H'H of the weights by its half H (r, n)."""

    def __init__(self, half):
        self.half = half

    rows_about = staticmethod(about)

    def row_variance(self, B):
        """Return the variances of the predictors of any rows, of an operator in one block."""
        out, half = np.empty(B.shape[0]), self.half.T
        blocks = gaussian.row_blocks(B.shape[0], half.shape[1])
        for rows in blocks:
            block = (B[rows] if len(blocks) > 1 else B) @ half
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
    """A (n, n) by its Cholesky factor. O(n^3)."""

    def __init__(self, A):
        self.lower = gaussian.checked_cholesky(A)

    @property
    def log_det(self):
        """Log |A|."""
        return 2.0 * np.sum(np.log(np.diagonal(self.lower)))

    @cached_property
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
        gaussian.add_to_diagonal(A, more)
        return PrimalSystem(A)

    @cached_property
    def half(self):
        """L^-1 of A = L L', made when it is needed."""
        return gaussian.triangular_inverse(self.lower)

    def solve(self, right):
        """Return A^-1 right."""
        return cho_solve((self.lower, True), right, check_finite=False)

    def training_variance(self, design):
        """Return diag(B A^-1 B') of the training rows."""
        return self.row_variance(design.B)

    def squared_shrinkage(self, diagonal, groups=None):
        """Return |I - A^-1 D|^2, the sum of squared shrinkage factors under a prior D. O(n^3).

        With the `groups` of the first coefficients the sums over each group's rows of the matrix.
        """
        root = np.sqrt(diagonal)
        inverse = gaussian.inverse_from_triangular(self.half)
        squares = _squares_off_identity(root[:, None] * inverse * root)
        return np.sum(squares) if groups is None else np.bincount(groups, squares[: len(groups)])


def _squares_off_identity(matrix):
    """Return the sums of squares of the rows of I - M, which takes the place of M."""
    np.negative(matrix, out=matrix)
    gaussian.add_to_diagonal(matrix, 1.0)
    return np.einsum("ij,ij->i", matrix, matrix)


class DiagonalCovariance:
    """Independent weights with variances (n,)."""

    def __init__(self, variances):
        self.variances = variances

    @property
    def log_det(self):
        """Log determinant of the precision."""
        return -float(np.sum(np.log(self.variances)))

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


def perturbed_draws(system, n_samples, rng):
    """Return draws of N(0, A^-1) by perturbed right-hand sides (Papandreou and Yuille 2011).

    For A = diag(D) + B' diag(pi) B: `prior_precision` D (n,), `design` of B and `weight` pi (q,).
    """
    q, n = system.design.shape
    right = np.sqrt(system.prior_precision)[:, None] * rng.standard_normal((n, n_samples))
    noise = np.sqrt(system.weight)[:, None] * rng.standard_normal((q, n_samples))
    return system.solve(right + system.design.tdot(noise)).T


class DualSystem:
    """A by the q x q matrix M = I + W B P^-1 B' W, W = diag(sqrt(pi)). O(q^2 n + q^3).

    The prior P is its precisions (n,), positive, or a system; then there are no draws.
    """

    def __init__(self, design, prior, weight):
        if isinstance(prior, np.ndarray):
            self.prior_precision, prior = prior, DiagonalCovariance(1.0 / prior)
        self.design, self.prior, self.weight = design, prior, weight
        self.root = np.sqrt(weight)
        self.K = design.kernel(prior)
        M = self.root[:, None] * self.K * self.root
        gaussian.add_to_diagonal(M, 1.0)
        self.lower = gaussian.checked_cholesky(M)

    draw = perturbed_draws
    rows_about = staticmethod(dense_about)  # with others digits cancel beside the prior's

    @property
    def log_det(self):
        """Log |A| = log |M| + log |P|."""
        return 2.0 * np.sum(np.log(np.diagonal(self.lower))) + self.prior.log_det

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
        return prior - self.solve_rows(self.design.dot(prior))

    def solve_rows(self, rows):
        """Return A^-1 B' diag(pi) rows (q,) or (q, k), to all digits however large pi is."""
        inner = cho_solve((self.lower, True), (self.root * rows.T).T, check_finite=False)
        return self.prior.solve(self.design.tdot((self.root * inner.T).T))

    def training_variance(self, design):
        """Return diag(B A^-1 B') of the training rows."""
        half = gaussian.triangular_inverse(self.lower)
        var = gaussian.explained_variances(self.K, self.weight, self.root, half)
        return gaussian.positive_variance(var, np.diagonal(self.K))

    def squared_shrinkage(self, diagonal, groups=None):
        """Return |I - M^-1|^2, the sum of squared shrinkage factors. O(q^3).

        With the `groups` of the first coefficients what each has of it. O(q^2 n).
        """
        if groups is None:
            return np.sum(_squares_off_identity(gaussian.inverse_from_cholesky(self.lower)))
        half = _explained(self, sp.eye_array(len(diagonal), format="csr")) * np.sqrt(diagonal)
        whole = solve_triangular(self.lower, half, lower=True, trans="T", check_finite=False)
        squares = np.einsum("ij,ij->j", half, half) - np.einsum("ij,ij->j", whole, whole)
        return np.bincount(groups, squares[: len(groups)])

    def row_variance(self, B):
        """Return diag(C A^-1 C') of any rows C."""
        prior, out = self.prior.row_variance(B), np.empty(B.shape[0])
        for rows in gaussian.row_blocks(B.shape[0], len(self.K)):
            half = _explained(self, B[rows])
            out[rows] = prior[rows] - np.einsum("ij,ij->j", half, half)
        return gaussian.positive_variance(out, prior)

    def coefficient_variance(self):
        """Return diag(A^-1) under a diagonal prior; for CSR rows O(nnz q) instead of O(n q^2)."""
        # squares keep the digits that an inverse loses where weights are large
        half = HalfCovariance(gaussian.triangular_inverse(self.lower) * self.root)
        columns, prior = self.design.B.T, self.prior.coefficient_variance()
        out = half.row_variance(columns.tocsr() if sp.issparse(columns) else columns)
        return gaussian.positive_variance(prior - prior**2 * out, prior)

    def covariance(self, B1, B2):
        """Return B1 A^-1 B2'."""
        first = _explained(self, B1)
        second = first if B2 is B1 else _explained(self, B2)
        return self.prior.covariance(B1, B2) - first.T @ second


def _explained(system, B):
    """Return L^-1 W B P^-1 C' of a `DualSystem` for rows C."""
    cross = system.root[:, None] * system.prior.covariance(system.design.B, B)
    return solve_triangular(system.lower, cross, lower=True, check_finite=False)


def primal_system(design, prior, weight):
    """Return the `PrimalSystem` of a prior and rows, as the `DualSystem` takes them. O(q n^2)."""
    A = gaussian.weighted_gram(design.B, weight)
    if isinstance(prior, np.ndarray):
        gaussian.add_to_diagonal(A, prior)
    else:
        A += prior.precision if isinstance(prior, PrimalSystem) else prior.times(np.eye(len(A)))
    return PrimalSystem(A)


SYSTEMS = {"primal": primal_system, "dual": DualSystem}


def low_rank_system(diagonal, factor):
    """Return the system of A = diag(D) + F F' with F (n, r): that of r rows."""
    return DualSystem(Design(factor.T, False), diagonal, np.ones(factor.shape[1]))


def conjugate_gradients(times, diagonal, right, rtol, start=None):
    """Return x with A x = right, a vector or columns (n, k), and residuals (n, k), from a start.

    `times(V)` is A V, `diagonal` (n,) the preconditioner, `rtol` the relative residual, in its
    norm, at which a column ends, one number or more. Stops early where the residual does not fall
    any more to working precision. Every column runs its own recursion with its own end, so that an
    answer does not depend on which columns are solved together; only the products are shared.
    """
    b, scale = right.reshape(len(right), -1), diagonal[:, None]
    x = np.zeros_like(b) if start is None else start.reshape(b.shape).copy()
    r = b.copy() if start is None else b - times(x)
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
        residual = r[:, active] - alpha * image
        r[:, active] = residual
        step = residual / scale
        new = np.einsum("ij,ij->j", residual, step)
        p[:, active] = step + (new / rho[active]) * direction
        rho[active] = new
        left = left[new > wanted[active]]
    return x.reshape(right.shape), r


def solve_by_products(system, right, rtol=1e-8, start=None):
    """Return A^-1 right to relative residuals of `rtol`, from a start if there is one.

    A is known by `times(V)`, its products with columns, and a diagonal `preconditioner` (n,).
    """
    return conjugate_gradients(system.times, system.preconditioner, right, rtol, start)[0]


class IterativeSystem:
    """A by conjugate gradients with a diagonal preconditioner. O(nnz) a step and column.

    `data` (n,) is the diagonal of B' diag(pi) B for the preconditioner, possibly of other site
    precisions nearby.
    """

    def __init__(self, design, diagonal, weight, data):
        self.design, self.prior_precision, self.weight = design, diagonal, weight
        self.preconditioner = diagonal + data

    solve, draw = solve_by_products, perturbed_draws

    def times(self, V):
        """Return A V for columns."""
        product = self.weight[:, None] * self.design.dot(V)
        return self.prior_precision[:, None] * V + self.design.tdot(product)


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

    def draw(self, n_samples, rng):
        """Return draws (n_samples, n) of the coefficients about their mean."""
        out = super().draw(n_samples, rng)
        return out + rng.standard_normal((n_samples, len(self.shared))) @ self.shared


def coefficient_variances(sampled, n_draws, diagonal, data):
    """Return the variances of coefficients from those of draws and diag(A) = diagonal + data.

    Draws are taken as spread about 1 / (D_j + t data_j), t the share that suits them all.
    """
    variances = 1.0 / (diagonal + _share(sampled, diagonal, data) * data)
    ratio = sampled / variances
    shrink = share_of_spread(np.var(ratio), n_draws)
    return np.maximum(variances * (1.0 + shrink * (ratio - 1.0)), TINY)


def share_of_spread(variance, n_samples):
    """Return the share in the variance of ratios of sampled variances that is not their noise."""
    noise = 2.0 / n_samples
    spread = np.maximum((variance - noise) / (1.0 + noise), 0.0)
    return spread / (spread + (1.0 + spread) * noise)


def _share(sampled, diagonal, data):
    """Return t with mean of sampled_j (D_j + t data_j) = 1, t in [0, 1].

    t = 1 is Jacobi, which is never above the variances; t = 0 is the prior, never below.
    """
    seen = (data > 0) & (diagonal > 0)
    if not np.any(seen):
        return 1.0
    t = (1.0 - np.mean(sampled[seen] * diagonal[seen])) / np.mean(sampled[seen] * data[seen])
    return float(min(max(t, 0.0), 1.0))


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
        raise gaussian.ImproperPosterior("rounding errors exceed the smallest posterior variance")
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
        # a recursion that has found all of its space goes on as one of the unit matrix, whose
        # logarithm adds nothing
        alpha.append(np.where(q.any(axis=0), np.einsum("ij,ij->j", q, image), 1.0))
        image -= alpha[-1] * q
        length = np.linalg.norm(image, axis=0)
        beta.append(length)
        last, q = q, image / np.where(length > 1e-12, length, np.inf)
    terms = []
    for own, beside in zip(np.transpose(alpha), np.transpose(beta), strict=True):
        values, vectors = _positive_eigen(own, beside[:-1])
        terms.append(n * float(vectors[0] ** 2 @ np.log(values)))
    error = np.std(terms, ddof=1) / np.sqrt(p)
    return float(np.sum(np.log(diagonal)) + np.mean(terms)), float(error)
