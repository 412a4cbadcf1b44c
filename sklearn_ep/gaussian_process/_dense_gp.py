"""Gaussian process with a site on every row: the full covariance matrix, of one or all classes.

Notation of Rasmussen and Williams (2006), chapter 3: with S = sqrt(site precisions) the only matrix
that is factorised is B = I + S K S, whose eigenvalues are at least one; sites of negative precision
need a second, I - d A d of the order of their number, and that it is positive definite is the test
of a proper posterior.
"""

from functools import cached_property, wraps
from typing import Any

import numpy as np
from scipy.linalg import blas

from .._engine import gaussian
from .._engine.class_structures import ClassCovariance, ClassLatents
from ._kernels import SingleCross, StationaryCross, contract, covariances, cross_covariance
from ._limits import LIMITS

_TURNED = 32  # derivatives of a covariance matrix that are transposed at a time, for the memory


def _site_roots(precision, kind, prior):
    """Return roots of site precisions, not negative, of `gaussian.least_precision` at least."""
    return np.sqrt(np.maximum(precision, gaussian.least_precision(kind, prior)))


def _prior_of_sites(block, root):
    """Return B = I + S K S for a block of K and S = diag(root), in the order of LAPACK."""
    root = root.astype(block.dtype, copy=False)
    B = root[:, None] * block
    B *= root
    gaussian.add_to_diagonal(B, 1.0)
    return B.T  # symmetric


def _times(matrix, vector):
    """Return the product of a matrix and a vector in the precision of the matrix, as doubles."""
    return (matrix @ vector.astype(matrix.dtype, copy=False)).astype(np.float64, copy=False)


class DenseState:
    """Posterior of the latent values given all sites, of either sign.

    `precision` (n,) are those of the sites, copies of tied rows counted. `mean` and `var` (n,) are
    the marginals, `alpha` (n,) is K^-1 mean, computed without K^-1.
    `rows` are those whose site precision is not negative, `root` the square roots of these
    precisions and `inverse` that of the Cholesky factor of B for these rows. `added` (m, n) is half
    of what the m negative sites add to variances: a new row with covariances k* has variance
    k** - |C^-1 S k*|^2 + |added k*|^2. `raised` (m, n) is minus added K. `log_evidence` is the log
    of the integral of prior times sites, `extra_var` 0: the sites are on the latent values
    themselves. `added` and `raised` are in double precision, all other matrices in that of K.
    """

    extra_var = 0.0

    def __init__(self, K, precision, shift):
        minus = np.flatnonzero(precision < 0)
        self.rows: Any = np.flatnonzero(precision >= 0) if len(minus) else slice(None)
        self.precision = precision
        tau = precision[self.rows]
        self.root = root = _site_roots(tau, K.dtype, np.diagonal(K).max(initial=0.0))
        block = K[self.rows][:, self.rows] if len(minus) else K
        self.inverse = inverse = gaussian.inverse_factor(_prior_of_sites(block, root))
        self.log_evidence = gaussian.log_diagonal(inverse)
        self.var = np.empty(len(K))
        self.var[self.rows] = gaussian.explained_variances(block, tau, root, inverse)
        self.alpha, pull = shift.copy(), _times(K, shift)
        explained = _times(inverse, root * pull[self.rows])
        self.alpha[self.rows] -= root * _times(inverse.T, explained)
        self.raised = self.added = np.empty((0, len(K)))
        if len(minus):
            self._add_negative(K, minus)
            self.alpha += self.added.T @ (self.added @ pull)
        if self.var.min() < 0:
            raise gaussian.ImproperPosterior("prior and explained variances cancel to below zero")
        self.mean = _times(K, self.alpha)
        self.log_evidence += 0.5 * shift @ self.mean

    def _add_negative(self, K, minus):
        """Add what the sites of rows `minus` leave of variances and evidence; keep both halves.

        With A the covariance under the other sites and d = sqrt(-precision), I - d A d is
        factorised: it is positive definite exactly if the posterior is proper.
        """
        d, root = np.sqrt(-self.precision[minus]), self.root[:, None]
        scaled = root.astype(K.dtype) * K[np.ix_(self.rows, minus)]
        half = gaussian.lower_times(self.inverse, scaled)
        own = K[np.ix_(minus, minus)] - half.T @ half
        A = np.empty((len(minus), len(K)))
        A[:, self.rows] = (gaussian.lower_times(self.inverse, half, trans=True) / root).T
        A[:, minus] = own
        B = -d[:, None] * own * d
        gaussian.add_to_diagonal(B, 1.0)
        inverse = gaussian.checked_cholesky(B.T, overwrite=True)  # symmetric
        gaussian.invert_triangular(inverse)
        self.log_evidence += gaussian.log_diagonal(inverse)
        self.var[minus] = np.diagonal(own)
        self.raised, self.added = gaussian.lower_times(inverse, d[:, None] * A), np.empty_like(A)
        self.var += np.einsum("ij,ij->j", self.raised, self.raised)
        # A is -P K, where P is -1 for the row itself and A times the precision of each other site
        self.added[:, self.rows] = self.raised[:, self.rows] * self.root**2
        self.added[:, minus] = inverse * -d

    def evidence_curvature(self):
        """Return R with d log evidence = sum(R * dK) / 2 at a fixed point of the sites, (n, n).

        All of R is above the diagonal where no site is negative: dK is symmetric.
        """
        if len(self.added):
            return np.outer(self.alpha, self.alpha) - self.inverse_total()
        R = self._explained()
        alpha, add = self.alpha.astype(R.dtype), blas.ssyr if R.itemsize == 4 else blas.dsyr
        R = add(-1.0, alpha, lower=1, a=R, overwrite_a=1)
        R *= -2.0
        np.einsum("ii->i", R)[:] *= 0.5
        return R.T

    def _explained(self):
        """Return the lower half of that inverse, were there no negative sites, zeros above it."""
        return gaussian.triangular_gram(self.inverse * self.root.astype(self.inverse.dtype))

    def inverse_total(self):
        """Return the inverse (n, n) of the prior covariance plus the variances of the sites."""
        explained = gaussian.mirrored(self._explained())
        if not len(self.added):
            return explained
        total = -(self.added.T @ self.added)
        total[np.ix_(self.rows, self.rows)] += explained
        return total


class DenseGP:
    """Structure of a Gaussian process prior with covariance K (n, n) over n latent values.

    A posterior costs 2 n^3 / 3 flops and two arrays of n^2 numbers; with m sites of negative
    precision less for the others and 4 n^2 m more.
    """

    def __init__(self, K):
        self.K = K

    def posterior(self, precision, shift):
        """Return the `DenseState` for site parameters (n,), copies of tied rows counted."""
        return DenseState(self.K, precision, shift)

    def covariance(self, state):
        """Return the posterior covariance (n, n) of the latent values; O(n^3)."""
        half = gaussian.lower_times(state.inverse, state.root[:, None] * self.K[state.rows])
        return self.K - half.T @ half + state.raised.T @ state.raised


class KernelGP(DenseGP):
    """The same for rows X (n, d) under a kernel, with the gradient of the evidence.

    Of a constant times RBF or Matern covariances and their derivatives are made from squared
    distances that are formed once. `single` posteriors are in single precision, for half of the
    time.
    """

    def __init__(self, kernel, X, single=False):
        self.kernel, self.X, self._kept = kernel, X, None
        self._cross = cross_covariance(kernel, X)
        if isinstance(self._cross, StationaryCross):
            if single and self._cross.of_distances and self._cross.is_rbf:
                self._cross = SingleCross(self._cross)
            K, self._kept = self._cross.block(X)
            np.fill_diagonal(K, self._cross.diagonal(X))
        else:
            K = kernel(X)
        super().__init__(K.astype(np.float32, copy=False) if single else K)

    def evidence_gradient(self, state):
        """Return d log evidence / d theta (p,) at a fixed point of the sites."""
        return self.contracted(state.evidence_curvature())

    def contracted(self, R):
        """Return sum(R * dK) / 2 (p,) for the derivatives of the covariance in theta."""
        if self._kept is None:
            return 0.5 * contract(self.kernel, self.X, R)[0]
        return 0.5 * self._cross.contract(self._kept, R, False)[0]

    def expected_curvature(self, state, together=False):
        """Return the expected curvature (p, p) of the log evidence in theta at a fixed point.

        F_kl = tr(B D_k B D_l) / 2 with D_k = dK / dtheta_k and B the inverse of K plus the
        variances of the sites; for a constant times RBF or Matern. O(p n^3), p arrays of n^2
        numbers, of single precision: volumes do not ask for more. `together` takes all lengths as
        one, in two products.
        """
        return self._curvature_of(state.inverse_total(), together, np.float32)

    def _curvature_of(self, B, together, kind):
        """Return tr(B D_k B D_l) / 2 (p, p), by products of a float type."""
        size = np.abs(B).max() or 1.0  # which single precision may not hold
        B = (B / size).astype(kind)
        slopes = self._cross.derivatives(self._kept, kind, together)
        products = np.array([slope @ B for slope in slopes])
        flat, curvature = products.reshape(len(products), -1), np.empty(2 * products.shape[:1])
        for some in gaussian.row_blocks(len(products), most=_TURNED):
            turned = products[some].transpose(0, 2, 1).reshape(-1, flat.shape[1])
            curvature[:, some] = flat @ turned.T
        return 0.5 * size**2 * curvature


class JointGP(ClassLatents, KernelGP):
    """Structure of one Gaussian process prior a class, all with the same kernel over rows X (n, d).

    Its posteriors are those of `ClassLatents`, `single` ones for more rows than a few.
    """

    def __init__(self, kernel, X, single=False):
        KernelGP.__init__(self, kernel, X)
        ClassLatents.__init__(self, self.K, single and len(X) > LIMITS.thirds)

    def evidence_gradient(self, state):
        """Return d log evidence / d theta (p,) at a fixed point of the sites."""
        return self.contracted(state.evidence_curvature())

    def expected_curvature(self, state, together=False):
        """Return the expected curvature (p, p) of the log evidence in theta, as with two classes.

        Blocks between classes are left out, and those of classes count K / (K - 1) times: right
        where all classes are alike, which makes the others 1 / (K - 1) of each.
        """
        K = len(state.spread.explained)
        kind = np.float64 if len(self.X) <= LIMITS.thirds else np.float32
        own = (self._curvature_of(B, together, kind) for B in state.spread.inverse_totals())
        return K / (K - 1.0) * sum(own)


def finite_or_named(method):
    """Make a prediction at rows of X raise a ValueError that names X where it is not finite.

    Some kernels overflow far out, or have no limit there.
    """

    @wraps(method)
    def wrapper(self, *rows):
        with np.errstate(over="ignore", invalid="ignore"):
            result = method(self, *rows)
        if not all(np.all(np.isfinite(r)) for r in (result if type(result) is tuple else [result])):
            raise ValueError(
                "X has rows so far out that double precision cannot carry their covariances: scale "
                "them as those of the fit, or leave them out."
            )
        return result

    return wrapper


class DenseGPPosterior:
    """Predictions from a `DenseState` of training rows X; the factor gives label probabilities.

    Holds no matrix of n x n until it is asked for a variance, and pickles none.
    """

    block_rows = 2000

    def __init__(self, kernel, X, state, factor):
        self.kernel, self.X, self.factor = kernel, X, factor
        self.alpha, self.precision = state.alpha, state.precision
        self.rows, self.added = state.rows, state.added

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "inverse"}

    @property
    def root(self):
        """Square roots of the precisions of sites that are not negative."""
        return _site_roots(self.precision[self.rows], np.float64, 1.0)

    @cached_property
    def inverse(self):
        """Inverse of the Cholesky factor of B of the rows whose sites are not negative.

        Found at first use from what is kept, hence alike before and after a pickle; O(n^3).
        """
        return gaussian.inverse_factor(_prior_of_sites(self.kernel(self.X[self.rows]), self.root))

    def sites(self):
        """Return precisions and shifts (2, n) of the sites of the rows, copies counted."""
        mean = self.kernel(self.X) @ self.alpha
        return np.array([self.precision, self.alpha + self.precision * mean])

    def _halves(self, K_new):
        """Return C^-1 S K* and the half that negative sites add, for K* (n_new, n)."""
        scaled = self.root[:, None] * K_new.T[self.rows]
        return gaussian.lower_times(self.inverse, scaled), self.added @ K_new.T

    @finite_or_named
    def latent_mean(self, X):
        """Return the mean (n_new,) at new rows; O(n) a row, in blocks of rows."""
        blocks = gaussian.row_blocks(len(X), most=self.block_rows)
        parts = [covariances(self.kernel, X[rows], self.X) @ self.alpha for rows in blocks]
        return np.concatenate(parts)

    @finite_or_named
    def latent(self, X):
        """Return mean and variance (n_new,) at new rows; O(n^2) a row, in blocks of rows."""
        mean, var = np.empty(len(X)), self.kernel.diag(X)
        for rows in gaussian.row_blocks(len(X), most=self.block_rows):
            K_new = covariances(self.kernel, X[rows], self.X)
            mean[rows] = K_new @ self.alpha
            half, added = self._halves(K_new)
            var[rows] += np.einsum("ij,ij->j", added, added) - np.einsum("ij,ij->j", half, half)
        return mean, gaussian.positive_variance(var, self.kernel.diag(X))

    @finite_or_named
    def covariance(self, X1, X2):
        """Return the posterior covariance (n1, n2) of the latent values at new rows."""
        K1 = covariances(self.kernel, X1, self.X)
        half1, added1 = half2, added2 = self._halves(K1)
        if X2 is not X1:
            half2, added2 = self._halves(covariances(self.kernel, X2, self.X))
        prior = self.kernel(X1) if X2 is X1 else self.kernel(X1, X2)
        return prior - half1.T @ half2 + added1.T @ added2


class JointGPPosterior:
    """Predictions of all classes from a `ClassLatentState` of training rows X."""

    def __init__(self, kernel, X, state, factor):
        self.kernel, self.X, self.factor = kernel, X, factor
        self.alpha, self.precision = state.alpha, state.precision

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "spread"}

    @cached_property
    def spread(self):
        """The `ClassCovariance` of the sites.

        Found at first use from what is kept, hence alike before and after a pickle; O(K n^3).
        """
        return ClassCovariance(self.kernel(self.X), self.precision)

    @property
    def n_classes(self):
        """Number of classes."""
        return self.alpha.shape[1]

    def latent_mean(self, X):
        """Return means (n_new, K) of the classes at new rows."""
        return covariances(self.kernel, X, self.X) @ self.alpha

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the classes at new rows."""
        k = covariances(self.kernel, self.X, X)
        return k.T @ self.alpha, self.spread.blocks(self.kernel.diag(X), k)

    def covariances_with(self, X2, pairs):
        """Return the map from rows X1 to covariances (P, n1, n2) of pairs of classes with X2."""
        cross, known = (cross_covariance(self.kernel, rows) for rows in (X2, self.X))
        k = covariances(self.kernel, self.X, X2)
        weights = np.array([self.spread.weights_with(k, c, j) for c, j in pairs])
        same = np.equal(*np.transpose(pairs))

        def of_rows(X1):
            cov = known.block(X1)[0] @ weights
            cov[same] += cross.block(X1)[0]
            return cov

        return of_rows

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K) of all classes at new rows.

        Given the offsets the classes are independent; one vector of offsets is common to them.
        """
        k, prior = covariances(self.kernel, self.X, X), self.kernel(X)
        draws = np.empty((n_samples, len(X), self.n_classes))
        shared = rng.standard_normal((n_samples, len(k)))
        for c in range(self.n_classes):
            P, Q = self.spread.halves(c, k)
            root = gaussian.root_for_draws(prior - k.T @ P)
            own = rng.standard_normal((n_samples, len(X))) @ root.T
            draws[:, :, c] = k.T @ self.alpha[:, c] + own + shared @ Q
        return draws
