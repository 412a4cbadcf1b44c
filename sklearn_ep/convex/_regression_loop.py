"""The loop of a linear regression whose prior is super-Gaussian in s = C u.

The double loop of the logistic model with the sides exchanged: an inner loop in u at fixed
variances z of s, an outer one in log z, the noise variance and the scale of the prior. X and C need
not be matrices.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.ndimage import uniform_filter1d
from scipy.sparse.linalg import LinearOperator

from .._engine import gaussian
from .._engine.loop import Anderson, Evaluation, iterate
from . import _systems
from ._double_loop import not_lower
from ._parameters import SitePrior, in_log_scales, log_scales


class Measured(NamedTuple):
    """Numbers of the loop, and what was seen with others."""

    exact: int = 2000  # coefficients for which "auto" factorises a matrix at every step
    # n^2 d up to which that is done for more columns, too: 200 rows of 2500 have a log density of
    # -2.67 (-2.78 by samples) in three times the time, 500 of 4000 -2.24 (-2.46) in 13 CPU s for 4
    products: int = 10**9
    # Rows for a column up to which that is a matrix of the rows: 100 rows of 1900 columns take 1.1
    # CPU s in place of 50, 400 of 1000 take 1.9 in place of 2.5, and 700 of 1000 gain nothing.
    dual: float = 0.5
    # Relative residuals of the solves for the mean and for samples. The mean needs it: at 1e-2 it
    # is more than a posterior deviation off where A is badly conditioned, as in images.
    mean_rtol: float = 1e-5
    sample_rtol: float = 1e-2
    # steps of the inner loop: with samples, whose noise is larger than what is left, and at most
    sampled_steps: int = 3
    exact_steps: int = 30
    window: int = 128  # neighbours of a row whose sampled variance is smoothed
    # A noise variance is learned within this range, in units of the mean square of y. Its prior
    # counts as a hundredth of a row whose squared residual is a millionth: it stops the fall of the
    # noise where there are more columns than rows and the bound rises for ever, and else changes
    # little.
    least_noise: float = 1e-10
    most_noise: float = 1e2
    known_rows: float = 0.01
    rows_for_noise: int = 20  # rows whose columns others share that tell the noise of new ones
    # of X: beyond, rows are many for the noise of new ones, and a dense copy takes 256 MB
    entries_for_noise: int = 2**25
    known_noise: float = 1e-6


BY = Measured()


def is_operator(A):
    """Return whether A is known by its products only."""
    return isinstance(A, LinearOperator)


class StackedDesign:
    """The rows of X above those of C (the identity for None), that counts products with X.

    `squares` (d,) are the sums of squares of the columns of X, None where these are not known.
    """

    def __init__(self, X, C, squares):
        self.X, self.C, self.squares = X, C, squares
        self.n_rows, n = X.shape
        self.n_sites = n if C is None else C.shape[0]
        self.shape = (self.n_rows + self.n_sites, n)
        self.n_products = 0

    def dot(self, u):
        """Return [X u; C u] for a vector or a matrix of columns."""
        self.n_products += 1 if u.ndim == 1 else u.shape[1]
        return np.concatenate([self.X @ u, u if self.C is None else self.C @ u])

    def tdot(self, v):
        """Return X' v1 + C' v2 for a vector or a matrix of columns."""
        self.n_products += 1 if v.ndim == 1 else v.shape[1]
        above, below = v[: self.n_rows], v[self.n_rows :]
        return self.X.T @ above + (below if self.C is None else self.C.T @ below)

    def diagonal(self, weight, signs):
        """Return the diagonal of B' diag(weight) B; for operators its mean, by probes of signs."""
        if self.squares is None or is_operator(self.C):
            product = self.dot(signs)
            mean = float(np.mean(weight @ product**2)) / self.shape[1]
            return np.full(self.shape[1], mean)
        below = weight[self.n_rows :]
        below = below if self.C is None else _systems.squared(self.C).T @ below
        return weight[0] * self.squares + below

    @cached_property
    def inner(self):
        """X' X, of a matrix."""
        return self.X.T @ self.X

    @cached_property
    def few_rows(self):
        """The `Design` of rows that are so few that a matrix of them is factorised, or None."""
        few = self.C is None and self.n_rows <= BY.dual * self.shape[1]
        return _systems.Design(self.X, False) if few else None

    def gram(self, weight):
        """Return B' diag(weight) B as a matrix (n, n); rows of X weigh the same."""
        A, below = weight[0] * self.inner, weight[self.n_rows :]
        if self.C is None:
            gaussian.add_to_diagonal(A, below)
            return A
        return A + gaussian.weighted_gram(self.C, below)


class RegressionStep(NamedTuple):
    """One evaluation of the outer map: the mean at given variances, and the posterior it implies.

    `variances` gives those of rows and coefficients, `objective` is the bound, nan where it is not
    computed; `weight` is that of the rows of [X; C] in A, `dof` the effective number of parameters.
    """

    u: np.ndarray
    variances: Any
    system: Any
    noise: float
    scale: float
    weight: np.ndarray
    dof: float
    loss: float
    objective: float


@dataclass
class RegressionLoop:
    """The fixed-point map of a regression.

    `prior` is the `SitePrior` of the rows of C, whose scale is learned if it says so; `noise` is
    the noise variance, or None to learn it; `normals` (n + m, k), `signs` and `probes` (d, 8) are
    the random numbers of a fit, None with exact variances; `log_det_C` is that of a square C.
    `total` is the weight of all rows, and `n_free` the same less one where a flat intercept was
    integrated out.
    """

    design: StackedDesign
    y: np.ndarray
    prior: SitePrior
    noise: float | None
    tol: float
    total: float
    n_free: float
    log_det_C: float = 0.0
    normals: Any = None
    signs: Any = None
    probes: Any = None

    def __post_init__(self):
        self.u = np.zeros(self.design.shape[1])
        self.Xy = self.design.X.T @ self.y
        self.size = float(self.y @ self.y) / self.total or 1.0  # any unit does where y is zero
        self._last: Any = None
        self._orders: list[np.ndarray] = []

    def draw(self, n_samples, rng):
        """Draw the random numbers of a fit with sampled variances."""
        d = self.design.shape[1]
        self.signs = _systems.rademacher(d, 8, rng)
        self.normals = rng.standard_normal((self.design.shape[0], n_samples))
        self.probes = _systems.rademacher(d, 8, rng)

    @property
    def exact(self):
        """Whether variances are exact."""
        return self.normals is None

    def start(self):
        """Return the state to start from: variances of the size that y asks of coefficients."""
        scale = self.prior.start_scale
        width = max(scale**2 / self.prior.site.start_precision(), _asked(self))
        log_z = np.full(self.design.n_sites, np.log(width))
        noise = [np.log(0.1 * self.size)] if self.noise is None else []
        return np.concatenate([log_z, noise, log_scales(self.prior, scale)])

    def _unpack(self, x):
        m = self.design.n_sites
        noise = float(np.exp(x[m])) if self.noise is None else self.noise
        return np.exp(x[:m]), noise, in_log_scales(self.prior, x[m:])

    def _system(self, noise, precision):
        """Return the system of A, and the weight of each row of [X; C] in it."""
        weight = np.concatenate([np.full(self.design.n_rows, 1.0 / noise), precision])
        if self.exact and self.design.few_rows is not None:
            of_rows = weight[: self.design.n_rows]
            return _systems.DualSystem(self.design.few_rows, precision, of_rows), weight
        if self.exact:
            return _systems.PrimalSystem(self.design.gram(weight)), weight
        data = self.design.diagonal(weight, self.signs)
        return _systems.IterativeSystem(self.design, np.zeros(len(data)), weight, data), weight

    def _mean(self, z, noise, scale):
        """Improve u at fixed variances by weighted least squares, each a step of descent."""
        n = self.design.n_rows
        Bu = self.design.dot(self.u)
        for _ in range(BY.exact_steps if self.exact else BY.sampled_steps):
            s = Bu[n:]
            f = self.prior.penalty(s, z, scale)
            # the local bound's precision majorises the curvature of the site's own loss
            local = (
                self.prior.site.precision(np.maximum(z + s * s, _systems.TINY) / scale**2)
                / scale**2
            )
            pi = np.maximum(f.precision, local)
            u, weight = self._least(pi * s - f.slope, noise, pi)
            new = self.design.dot(u)
            moved = float(weight @ (new - Bu) ** 2)
            self.u, Bu = u, new
            if moved <= (1e-3 * min(self.tol, 1e-2)) ** 2 * len(u):
                break
        return Bu

    def _least(self, below, noise, precision):
        """Return the coefficients of least squares for sites of the prior, and their weights.

        The sites are N(below / precision, 1 / precision) of the rows of C.
        """
        system, weight = self._system(noise, precision)
        if isinstance(system, _systems.DualSystem):
            centres = below / precision
            return centres + system.solve_rows(self.y - self.design.X @ centres), weight
        right = self.Xy / noise
        right = right + (below if self.design.C is None else self.design.C.T @ below)
        return system.solve(right, *(() if self.exact else (BY.mean_rtol, self.u))), weight

    def evaluate(self, x):
        """Map log variances to their `Evaluation`; the payload is a `RegressionStep`."""
        n, m = self.design.n_rows, self.design.n_sites
        z, noise, scale = self._unpack(x)
        Bu = self._mean(z, noise, scale)
        f = self.prior.penalty(Bu[n:], z, scale)
        system, weight = self._system(noise, f.precision)
        variances, new, trace = self._variances(system, weight, f.precision)
        site = self.prior.penalty(Bu[n:], new, scale)
        error = float(np.sum((self.y - Bu[:n]) ** 2))
        target, change = [np.log(new)], np.log(new) - x[:m]
        if self.noise is None:
            target.append([np.log(self._new_noise(error, trace, noise))])
        if self.prior.learn:
            slope = self.prior.loss_slope(Bu[n:], site, new) / m
            new_scale = self.prior.clipped(float(scale * slope ** (1.0 / self.prior.growth)))
            target.append(log_scales(self.prior, new_scale))
        whole = np.concatenate(target)
        if not np.all(np.isfinite(whole)):
            raise gaussian.ImproperPosterior("variances are beyond the range of double precision")
        rest = float(np.max(np.abs(whole[m:] - x[m:]), initial=0.0))
        size = float(np.max(np.abs(change)) if self.exact else np.mean(change**2))
        loss = 0.5 * (error + trace) / noise + float(np.sum(site.value))
        loss += 0.5 * self.n_free * np.log(2.0 * np.pi * noise)
        objective = self.bound(scale, loss, system.log_det) if self.exact else np.nan
        about = system, noise, scale, weight, trace / noise, loss, objective
        step = RegressionStep(self.u.copy(), variances, *about)
        record = {"objective": objective} if self.exact else {}
        residual = max(size, rest if self.exact else rest**2)
        return Evaluation(whole, residual, 1.0, record, step)

    def _new_noise(self, error, trace, noise):
        """Return the noise variance at which the bound is stationary, by one fixed-point step.

        MacKay's is the faster by far where there are more columns than rows, but divides by what
        samples would make too uncertain: the rows less the effective number of parameters.
        """
        known = BY.known_rows * BY.known_noise * self.size
        if self.exact:
            left = max(self.n_free - trace / noise, 0.0)
            new = (error + known) / (left + BY.known_rows)
        else:
            new = (error + trace + known) / (self.n_free + BY.known_rows)
        return np.clip(new, BY.least_noise * self.size, BY.most_noise * self.size)

    def bound(self, scale, loss, log_det):
        """Return the bound on the log evidence; nan where the prior has no known normaliser."""
        d, m = self.design.shape[1], self.design.n_sites
        if m != d:
            return float("nan")
        normaliser = self.prior.log_normaliser(scale) + self.log_det_C
        return float(normaliser + 0.5 * d - 0.5 * log_det - loss)

    def _variances(self, system, weight, precision):
        """Return variances of anything, those of the sites, and the trace of X A^-1 X'."""
        n = self.design.n_rows
        if self.exact:
            C = self.design.C
            own = system.coefficient_variance() if C is None else system.row_variance(C)
            # X A^-1 X' / noise has the trace d less that of the sites
            dof = max(len(self.u) - float(precision @ own), 0.0)
            return system, np.maximum(own, _systems.TINY), dof / weight[0]
        right = self.design.tdot(np.sqrt(weight)[:, None] * self.normals)
        U = self._last = system.solve(right, BY.sample_rtol, self._last)
        BU = self.design.dot(U)
        # u' A u of a sample has mean d: scaling to it takes out what unfinished solves lack
        energy = weight @ BU**2
        level = np.sqrt(len(U) / np.maximum(energy, _systems.TINY))
        k = U.shape[1]
        U, BU = U * (level / np.sqrt(k)), BU * (level / np.sqrt(k))
        sampled = np.sum(BU[n:] ** 2, axis=1)
        # later rows keep their neighbours: a row whose variance grows would go on to neighbours of
        # larger ones, and the loop would never end
        if len(self._orders) < 4:
            self._orders.append(np.argsort(precision, kind="stable"))
        smooth = _smoothed(sampled, self._orders[-1], k)
        return _systems.HalfCovariance(U.T), smooth, float(np.sum(BU[:n] ** 2))


def _asked(loop):
    """Return the variance that coefficients need for predictors of the size of y, 0 if any."""
    design = loop.design
    if design.squares is not None:
        total = float(design.squares.sum())
    else:
        total = float(np.mean(np.sum(design.dot(loop.signs)[: design.n_rows] ** 2, axis=0)))
    return loop.total * loop.size / total if total > 0 else 0.0


def scale_from_data(loop):
    """Return the scale at which the site is as wide as y asks: the same fit in any unit of y.

    Columns of a matrix count alike, whatever their units: from too small a start the loop may come
    to rest at an optimum where all but the largest columns are shrunk away.
    """
    asked = _asked(loop)
    if not (loop.prior.learn and asked > 0):
        return 1.0
    squares = loop.design.squares
    if squares is not None:
        mean = np.mean(np.log(squares[squares > 1e-12 * squares.max()]))
        asked = loop.total * loop.size / (len(squares) * np.exp(mean))
    return float(np.sqrt(asked * loop.prior.site.start_precision()))


def _smoothed(sampled, order, n_samples):
    """Draw sampled variances towards those of neighbours by the share of noise.

    `order` sorts the rows so that neighbours have like precisions; the window slides along it.
    """
    r = np.maximum(sampled[order], _systems.TINY)
    mean = uniform_filter1d(r, BY.window, mode="nearest")
    ratio = r / mean
    squares, means = (uniform_filter1d(x, BY.window, mode="nearest") for x in (ratio**2, ratio))
    out = np.empty(len(r))
    shrink = _systems.share_of_spread(squares - means**2, n_samples)
    out[order] = mean * (1.0 + shrink * (ratio - 1.0))
    return np.maximum(out, _systems.TINY)


def solve(loop, max_iter, monitor):
    """Iterate a loop to its fixed point.

    Returns the `Result` of the loop and the bound with its standard error.
    """
    limits: Any = dict(max_iter=max_iter, tol=loop.tol, monitor=monitor)
    if loop.exact:
        # with more columns than rows the noise falls by steps that are smallest half-way, which
        # acceleration takes for the end: 40 sets of 50 x 120 take 21 steps for 61 where it may
        # not lower the bound
        limits["acceleration"] = Anderson(depth=5, mixing=1.0, max_change=3.0)
        limits["accept"] = not_lower
    result = iterate(loop.evaluate, loop.start(), **limits)
    step = result.evaluation.payload
    if loop.exact or loop.design.n_sites != loop.design.shape[1]:
        return result, step.objective, 0.0
    of_system = step.system.times, step.system.preconditioner
    log_det, error = _systems.log_determinant(*of_system, loop.probes)
    return result, loop.bound(step.scale, step.loss, log_det), 0.5 * error
