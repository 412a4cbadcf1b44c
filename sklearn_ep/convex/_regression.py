"""Gaussian posterior of a linear regression whose prior is super-Gaussian in s = C u.

y = X u + noise, and the sites of the prior sit on the rows of C. The posterior is N(u, A^-1) with A
= X'X / noise + C' Pi C, found by the double loop of the logistic model with the sides exchanged: an
inner loop in u at fixed variances z of s, an outer one in log z. X and C need not be matrices.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .._engine.gaussian import ImproperPosterior
from .._engine.loop import SILENT, Anderson, Evaluation, iterate
from .._engine.super_gaussian import Penalty
from ._priors import SCALE_RANGE
from ._systems import TINY, IterativeSystem, PrimalSystem, squared
from ._variances import LowRankVariance, log_determinant

__all__ = ["RegressionLoop", "RegressionStep", "StackedDesign"]

# Relative residuals of the solves for the mean and for samples. The mean needs it: at 1e-2 it is
# more than a posterior deviation off where A is badly conditioned, as in images.
_MEAN_RTOL, _SAMPLE_RTOL = 1e-5, 1e-2
# Steps of the inner loop: with samples, whose noise is larger than what is left, and at most.
_SAMPLED_STEPS, _MOST_STEPS = 3, 30
# Rows of like precision over which a sampled variance is compared to its neighbours.
_NEIGHBOURS = 128
# Outer steps after which rows keep their neighbours: a row whose variance grows would go on to
# neighbours of larger ones, and the loop never come to rest.
_ORDERS = 4
_TRACE_PROBES = 8
# A noise variance is learned within this range, in units of the mean square of y. Its prior counts
# as a hundredth of a row whose squared residual is a millionth: it stops the fall of the noise
# where there are more columns than rows and the bound rises for ever, and else changes little.
_NOISE_RANGE = (1e-10, 1e2)
_KNOWN_ROWS, _KNOWN_NOISE = 0.01, 1e-6


def _is_matrix(A):
    return sp.issparse(A) or isinstance(A, np.ndarray)


class StackedDesign:
    """The rows of X above those of C (the identity for None), that counts products with X.

    `offset` (d,), or None, is taken off each row of X, which thereby may stay sparse or an
    operator; it is the mean of the rows, and their weights are all the same.
    """

    def __init__(self, X, C, offset=None):
        self.X, self.C, self.offset = X, C, offset
        self.n_rows, n = X.shape
        self.n_sites = n if C is None else C.shape[0]
        self.shape = (self.n_rows + self.n_sites, n)
        self.n_products = 0

    @property
    def matrices(self):
        """Whether entries of both parts are there to be looked at."""
        return _is_matrix(self.X) and (self.C is None or _is_matrix(self.C))

    def dot(self, u):
        """Return [X u; C u] for a vector or a matrix of columns."""
        self.n_products += 1 if u.ndim == 1 else u.shape[1]
        above = self.X @ u
        if self.offset is not None:
            above = above - self.offset @ u
        return np.concatenate([above, u if self.C is None else self.C @ u])

    def tdot(self, v):
        """Return X' v1 + C' v2 for a vector or a matrix of columns."""
        self.n_products += 1 if v.ndim == 1 else v.shape[1]
        above, below = v[: self.n_rows], v[self.n_rows :]
        product = self.X.T @ above
        if self.offset is not None:
            product = product - np.multiply.outer(self.offset, above.sum(axis=0))
        return product + (below if self.C is None else self.C.T @ below)

    def squares(self):
        """Return sums (d,) of squares of the columns of X, which is a matrix."""
        total = np.asarray(squared(self.X).sum(axis=0)).ravel()
        return total if self.offset is None else total - self.n_rows * self.offset**2

    def diagonal(self, weight, signs):
        """Return the diagonal of B' diag(weight) B; for operators its mean, by probes of signs."""
        if not self.matrices:
            product = self.dot(signs)
            mean = float(np.mean(weight @ product**2)) / self.shape[1]
            return np.full(self.shape[1], mean)
        above, below = weight[: self.n_rows], weight[self.n_rows :]
        own = below if self.C is None else squared(self.C).T @ below
        data = squared(self.X).T @ above
        return (data if self.offset is None else data - above.sum() * self.offset**2) + own

    def gram(self, weight):
        """Return B' diag(weight) B as a matrix (n, n)."""
        above, below = weight[: self.n_rows], weight[self.n_rows :]
        A = _weighted(self.X, above)
        if self.offset is not None:
            A -= above.sum() * np.outer(self.offset, self.offset)
        if self.C is None:
            A[np.diag_indices_from(A)] += below
            return A
        return A + _weighted(self.C, below)


def _weighted(A, weight):
    """Return A' diag(weight) A, dense."""
    if sp.issparse(A):
        return np.asarray((A.T @ A.multiply(weight[:, None])).todense())
    return A.T @ (weight[:, None] * A)


class RegressionStep(NamedTuple):
    """One evaluation of the outer map: the mean at given variances, and the posterior it implies.

    `variances` gives those of rows and coefficients, `objective` is the bound, nan where it is not
    computed; `weight` is that of the rows of [X; C] in A.
    """

    u: np.ndarray
    variances: Any
    system: Any
    noise: float
    scale: float
    weight: np.ndarray
    loss: float
    objective: float


@dataclass
class RegressionLoop:
    """The fixed-point map of a regression.

    `noise` is the noise variance, or None to learn it; `learn` asks for the scale of the site;
    `noise_rows` (n, k), `noise_sites` (m, k) and `signs` (d, 8) are the random numbers of a fit,
    None with exact variances; `log_det_C` is that of a square C. `n_free` is the number of rows,
    less one where a flat intercept was integrated out.
    """

    design: StackedDesign
    y: np.ndarray
    site: Any
    noise: float | None
    learn: bool
    tol: float
    noise_rows: Any = None
    noise_sites: Any = None
    signs: Any = None
    log_det_C: float = 0.0
    n_free: int = 0

    def __post_init__(self):
        self.u, self.start_scale = np.zeros(self.design.shape[1]), 1.0
        self.Xy = self.design.X.T @ self.y
        self.size = float(np.mean(self.y**2)) or 1.0  # any unit does where y is zero
        self._last: Any = None
        self._orders: list[np.ndarray] = []

    @property
    def exact(self):
        """Whether variances are exact."""
        return self.noise_rows is None

    def asked(self):
        """Return the variance that coefficients need for predictors of the size of y, 0 if any."""
        n = self.design.n_rows
        if _is_matrix(self.design.X):
            total = float(self.design.squares().sum())
        else:
            total = float(np.mean(np.sum(self.design.dot(self.signs)[:n] ** 2, axis=0)))
        return n * self.size / total if total > 0 else 0.0

    def scale_from_data(self):
        """Start the scale where the site is as wide as y asks: the same fit in any unit of y.

        Columns of a matrix count alike, whatever their units: from too small a start the loop may
        come to rest at an optimum where all but the largest columns are shrunk away.
        """
        asked = self.asked()
        if _is_matrix(self.design.X) and asked > 0:
            squares = self.design.squares()
            mean = np.mean(np.log(squares[squares > 1e-12 * squares.max()]))
            asked = self.design.n_rows * self.size / (len(squares) * np.exp(mean))
        if asked > 0:
            self.start_scale = float(np.sqrt(asked * self.site.start_precision()))

    def start(self):
        """Return the state to start from: variances of the size that y asks of coefficients."""
        width = max(self.start_scale**2 / self.site.start_precision(), self.asked())
        log_z = np.full(self.design.n_sites, np.log(width))
        noise = [np.log(0.1 * self.size)] if self.noise is None else []
        return np.concatenate([log_z, noise, [np.log(self.start_scale)] if self.learn else []])

    def _unpack(self, x):
        m, noise, scale = self.design.n_sites, self.noise, 1.0
        if noise is None:
            noise = float(np.exp(x[m]))
        if self.learn:
            scale = float(np.exp(x[-1]))
        return np.exp(x[:m]), noise, scale

    def _penalty(self, s, z, scale):
        f = self.site.penalty(s / scale, z / scale**2)
        return Penalty(f[0], f[1] / scale, f[2] / scale**2, f[3] / scale**2)

    def _weights(self, noise, precision):
        return np.concatenate([np.full(self.design.n_rows, 1.0 / noise), precision])

    def _system(self, weight):
        if self.exact:
            return PrimalSystem.of(self.design.gram(weight))
        data = self.design.diagonal(weight, self.signs)
        return IterativeSystem(self.design, np.zeros(len(data)), weight, data)

    def _mean(self, z, noise, scale):
        """Improve u at fixed variances by weighted least squares, each a step of descent."""
        n = self.design.n_rows
        Bu = self.design.dot(self.u)
        for _ in range(_MOST_STEPS if self.exact else _SAMPLED_STEPS):
            s = Bu[n:]
            f = self._penalty(s, z, scale)
            # the local bound's precision majorises the curvature of the site's own loss
            local = self.site.precision(np.maximum(z + s * s, TINY) / scale**2) / scale**2
            pi = np.maximum(f.precision, local)
            below = pi * s - f.slope
            right = self.Xy / noise
            right = right + (below if self.design.C is None else self.design.C.T @ below)
            weight = self._weights(noise, pi)
            system = self._system(weight)
            start = None if self.exact else (self.u, Bu)
            u, new = system.solve_with_product(self.design, right, rtol=_MEAN_RTOL, start=start)
            moved = float(weight @ (new - Bu) ** 2)
            self.u, Bu = u, new
            if moved <= (1e-3 * min(self.tol, 1e-2)) ** 2 * len(u):
                break
        return Bu

    def evaluate(self, x):
        """Map log variances to their `Evaluation`; the payload is a `RegressionStep`."""
        n, m = self.design.n_rows, self.design.n_sites
        z, noise, scale = self._unpack(x)
        Bu = self._mean(z, noise, scale)
        f = self._penalty(Bu[n:], z, scale)
        weight = self._weights(noise, f.precision)
        system = self._system(weight)
        variances, new, trace = self._variances(system, weight, f.precision)
        site = self._penalty(Bu[n:], new, scale)
        error = float(np.sum((self.y - Bu[:n]) ** 2))
        target, change = [np.log(new)], np.log(new) - x[:m]
        if self.noise is None:
            target.append([np.log(self._new_noise(error, trace, noise))])
        if self.learn:
            target.append([np.log(self._new_scale(Bu[n:], new, site, scale))])
        whole = np.concatenate(target)
        if not np.all(np.isfinite(whole)):
            raise ImproperPosterior("variances are beyond the range of double precision")
        rest = float(np.max(np.abs(whole[m:] - x[m:]), initial=0.0))
        size = float(np.max(np.abs(change)) if self.exact else np.mean(change**2))
        loss = 0.5 * (error + trace) / noise + float(np.sum(site.value))
        loss += 0.5 * self.n_free * np.log(2.0 * np.pi * noise)
        step = RegressionStep(self.u.copy(), variances, system, noise, scale, weight, loss, np.nan)
        record = {}
        if self.exact:
            step = step._replace(objective=self.bound(step, system.log_det))
            record["objective"] = step.objective
        residual = max(size, rest if self.exact else rest**2)
        return Evaluation(whole, residual, 1.0, record, step)

    def _new_noise(self, error, trace, noise):
        """Return the noise variance at which the bound is stationary, by one fixed-point step.

        MacKay's is the faster by far where there are more columns than rows, but divides by what
        samples would make too uncertain: the rows less the effective number of parameters.
        """
        known = _KNOWN_ROWS * _KNOWN_NOISE * self.size
        if self.exact:
            left = max(self.n_free - trace / noise, 0.0)
            new = (error + known) / (left + _KNOWN_ROWS)
        else:
            new = (error + trace + known) / (self.n_free + _KNOWN_ROWS)
        return np.clip(new, *(np.array(_NOISE_RANGE) * self.size))

    def _new_scale(self, s, z, f, scale):
        """Return the scale at which the bound is stationary, as `SitePrior` does."""
        mean = float(np.mean(s * f.slope + z * f.precision))
        low, high = (self.start_scale * end for end in SCALE_RANGE)
        return np.clip(scale * mean ** (1.0 / self.site.growth), low, high)

    def bound(self, step, log_det):
        """Return the bound on the log evidence; nan where the prior has no known normaliser."""
        d, m = self.design.shape[1], self.design.n_sites
        if m != d:
            return float("nan")
        normaliser = m * (self.site.log_normaliser() - np.log(step.scale)) + self.log_det_C
        return float(normaliser + 0.5 * d * (1.0 + np.log(2.0 * np.pi)) - 0.5 * log_det - step.loss)

    def _variances(self, system, weight, precision):
        """Return variances of anything, those of the sites, and the trace of X A^-1 X'."""
        n = self.design.n_rows
        if self.exact:
            C = self.design.C
            own = system.coefficient_variance() if C is None else system.row_variance(C)
            # X A^-1 X' / noise has the trace d less that of the sites
            dof = max(len(self.u) - float(precision @ own), 0.0)
            return system, np.maximum(own, TINY), dof / weight[0]
        noise = np.sqrt(weight)[:, None] * np.concatenate([self.noise_rows, self.noise_sites])
        right = self.design.tdot(noise)
        self._last = system.solve_with_product(
            self.design, right, rtol=_SAMPLE_RTOL, start=self._last
        )
        U, BU = self._last
        # u' A u of a sample has mean d: scaling to it takes out what unfinished solves lack
        energy = weight @ BU**2
        level = np.sqrt(len(U) / np.maximum(energy, TINY))
        k = U.shape[1]
        U, BU = U * (level / np.sqrt(k)), BU * (level / np.sqrt(k))
        sampled = np.sum(BU[n:] ** 2, axis=1)
        if len(self._orders) < _ORDERS:
            self._orders.append(np.argsort(precision, kind="stable"))
        smooth = _smoothed(sampled, self._orders[-1], k)
        return LowRankVariance(U), smooth, float(np.sum(BU[:n] ** 2))

    def solve(self, x, *, max_iter, monitor=SILENT):
        """Iterate from state x; see `loop.iterate` for the result."""
        limits: Any = dict(max_iter=max_iter, tol=self.tol, monitor=monitor)
        if self.exact:
            limits["acceleration"] = Anderson(depth=5, mixing=1.0, max_change=3.0)
        return iterate(self.evaluate, x, **limits)

    def sampled_bound(self, step, probes):
        """Return the bound and its standard error with a log determinant by probes (d, p)."""
        system = step.system
        log_det, error = log_determinant(system.times, system.preconditioner, probes)
        return self.bound(step, log_det), 0.5 * error


def _smoothed(sampled, order, n_samples):
    """Draw sampled variances towards those of neighbours by the share of noise.

    `order` sorts the rows so that neighbours have like precisions; the window slides along it.
    """
    r = np.maximum(sampled[order], TINY)
    mean = _sliding_mean(r)
    ratio = r / mean
    noise = 2.0 / n_samples
    spread = _sliding_mean(ratio**2) - _sliding_mean(ratio) ** 2
    spread = np.maximum((spread - noise) / (1.0 + noise), 0.0)
    shrink = spread / (spread + (1.0 + spread) * noise)
    out = np.empty(len(r))
    out[order] = mean * (1.0 + shrink * (ratio - 1.0))
    return np.maximum(out, TINY)


def _sliding_mean(values):
    """Return means over windows of `_NEIGHBOURS` values about each one, shorter at the ends."""
    half = _NEIGHBOURS // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half, len(values))
    return (sums[high] - sums[low]) / (high - low)
