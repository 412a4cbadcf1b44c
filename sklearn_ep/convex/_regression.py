"""Gaussian posterior of a linear regression whose prior is super-Gaussian in s = C u.

y = X u + noise, and the sites of the prior sit on the rows of C. The posterior is N(u, A^-1) with A
= X'X / noise + C' Pi C, found by the double loop of the logistic model with the sides exchanged: an
inner loop in u at fixed variances z of s, an outer one in log z. X and C need not be matrices.

Exact variances see no more of the rows than weight, means and a root of their scatter, which has as
many rows as columns at most: rows in partitions, or of a stream, leave as much behind.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cho_solve
from scipy.ndimage import uniform_filter1d
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from scipy.special import stdtrit
from sklearn.utils import check_array, check_random_state

from .._engine import gaussian
from .._engine.loop import Anderson, Evaluation, iterate
from .._engine.partition import PartMap
from .._engine.rows import find_copies
from .._engine.sites import one_copy
from .._estimator import row_parts
from .._estimator.checks import LARGEST_IN_UNITS
from . import _systems
from ._calibration import noise_temper
from ._double_loop import not_lower
from ._parameters import SitePrior, in_log_scales, log_scales
from ._sites import LaplaceSite
from ._systems import TINY


class _Measured(NamedTuple):
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


_BY = _Measured()


def _is_operator(A):
    return isinstance(A, LinearOperator)


class Rows(NamedTuple):
    """Rows X (n, d), dense, CSR or an operator, with responses and weights (n,)."""

    X: Any
    y: np.ndarray
    weight: np.ndarray

    def about(self, centre):
        """Return dense rows about a `Centre`."""
        X = self.X.toarray() if sp.issparse(self.X) else self.X
        return Rows(X - centre.columns, self.y - centre.response, self.weight)


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
        if self.squares is None or _is_operator(self.C):
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
        few = self.C is None and self.n_rows <= _BY.dual * self.shape[1]
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
        for _ in range(_BY.exact_steps if self.exact else _BY.sampled_steps):
            s = Bu[n:]
            f = self.prior.penalty(s, z, scale)
            # the local bound's precision majorises the curvature of the site's own loss
            local = self.prior.site.precision(np.maximum(z + s * s, TINY) / scale**2) / scale**2
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
        return system.solve(right, *(() if self.exact else (_BY.mean_rtol, self.u))), weight

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
        known = _BY.known_rows * _BY.known_noise * self.size
        if self.exact:
            left = max(self.n_free - trace / noise, 0.0)
            new = (error + known) / (left + _BY.known_rows)
        else:
            new = (error + trace + known) / (self.n_free + _BY.known_rows)
        return np.clip(new, _BY.least_noise * self.size, _BY.most_noise * self.size)

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
            return system, np.maximum(own, TINY), dof / weight[0]
        right = self.design.tdot(np.sqrt(weight)[:, None] * self.normals)
        U = self._last = system.solve(right, _BY.sample_rtol, self._last)
        BU = self.design.dot(U)
        # u' A u of a sample has mean d: scaling to it takes out what unfinished solves lack
        energy = weight @ BU**2
        level = np.sqrt(len(U) / np.maximum(energy, TINY))
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


def _scale_from_data(loop):
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
    r = np.maximum(sampled[order], TINY)
    mean = uniform_filter1d(r, _BY.window, mode="nearest")
    ratio = r / mean
    squares, means = (uniform_filter1d(x, _BY.window, mode="nearest") for x in (ratio**2, ratio))
    out = np.empty(len(r))
    shrink = _systems.share_of_spread(squares - means**2, n_samples)
    out[order] = mean * (1.0 + shrink * (ratio - 1.0))
    return np.maximum(out, TINY)


class Centre(NamedTuple):
    """Means of the columns (d,) and of y over rows: a flat intercept makes the line go there.

    Without an intercept the line goes through zero, as through a mean of infinite weight.
    """

    columns: np.ndarray
    response: float
    weight: float

    @property
    def flat(self):
        """Whether there is an intercept."""
        return self.weight < np.inf


@dataclass
class RegressionPosterior:
    """Coefficients with a mean (d,) and a covariance, and an intercept if the centre says so.

    The covariance is a `HalfCovariance`, or of few rows with many columns the `DualSystem`. Given
    the coefficients u the intercept is that of the centre less columns' u, with variance noise /
    weight. `exact` tells exact variances from sampled ones. Of new responses the noise variance is
    `temper` times as large, and learned from so many rows as `freedom` says, infinitely many where
    it is given; `share` (in [0, 1]) of the variance of the mean goes with it.
    """

    mean: np.ndarray
    spread: Any
    noise: float
    exact: bool
    centre: Centre
    temper: float = 1.0
    freedom: float = np.inf
    share: float = 1.0

    @property
    def intercept(self):
        """Mean of the intercept, 0 if there is none."""
        return float(self.centre.response - self.centre.columns @ self.mean)

    def latent_mean(self, X):
        """Return means (n,) of noise-free responses."""
        return X @ self.mean + self.intercept

    def _about_centre(self, X):
        """Return rows of a matrix or an operator about the centre, as the covariance takes them."""
        return self.spread.rows_about(X, self.centre.columns)

    def predict(self, X):
        """Return mean and variance (n,) of noise-free responses."""
        var = np.empty(X.shape[0])
        for rows in gaussian.row_blocks(X.shape[0], len(self.mean)):
            var[rows] = self.spread.row_variance(self._about_centre(X[rows]))
        return self.latent_mean(X), var + self.noise / self.centre.weight

    def interval(self, X, level):
        """Return central intervals (n, 2) of new responses, by Student's t.

        Its degrees of freedom are those of the noise, and more where part of the variance does not
        depend on that (Welch 1947).
        """
        mean, var = self.predict(X)
        noise = self.temper * self.noise
        total = var + noise
        freedom = self.freedom * (total / (self.share * var + noise)) ** 2
        half = stdtrit(np.minimum(freedom, 1e10), 0.5 + 0.5 * level) * np.sqrt(total)
        return np.stack([mean - half, mean + half], axis=-1)

    def latent_covariance(self, X1, X2):
        """Return the covariance (n1, n2) of noise-free responses at rows."""
        cov = self.spread.covariance(*map(self._about_centre, (X1, X2)))
        return cov + self.noise / self.centre.weight


@dataclass
class RegressionPlan:
    """Everything that a fit needs besides the fixed-point map.

    `rows` are those in memory, copies as one, or None; `statistics` those of rows with exact
    variances, or None.
    """

    loop: RegressionLoop
    centre: Centre
    max_iter: int
    rows: Rows | None
    statistics: row_parts.RowStatistics | None

    def posterior(self, step, calibrated=False):
        """Return what predicts from a `RegressionStep`."""
        loop, temper, freedom = self.loop, 1.0, np.inf
        if loop.noise is None:
            freedom = max(loop.n_free - step.dof, 1.0)
            temper, told = self._temper(step) if calibrated else (1.0, 0.0)
            freedom = max(freedom, told)
        about = step.noise, loop.exact, self.centre, temper, freedom, step.dof / len(step.u)
        return RegressionPosterior(step.u, step.variances, *about)

    def _temper(self, step):
        """Return the factor of a learned noise variance that leave-one-out predictions ask for.

        And the weight of the rows that told it, zero where it is one.

        A column that varies in one row alone takes up the noise of that row, which new rows have
        without it. Rows with such columns are left out, where enough others tell the noise;
        otherwise all rows are predicted without these columns. Without such columns the learned
        noise is what leaving rows out asks for: the two conditions are the same.
        """
        loop, rows, flat = self.loop, self.rows, self.centre.flat
        learned = loop.exact and loop.design.C is None
        if not learned or rows is None or np.prod(rows.X.shape) > _BY.entries_for_noise:
            return 1.0, 0.0
        rows = rows.about(self.centre)
        weight, n = rows.weight, len(rows.y)
        lone, row, apart = _lone_columns(rows, flat)
        if not np.any(lone):
            return 1.0, 0.0
        precision = step.weight[loop.design.n_rows :]
        own = loop.prior.penalty(step.u, step.variances.coefficient_variance(), step.scale)
        centres = step.u - own.slope / precision  # means of the sites of the coefficients
        try:
            gap, var = _left_out(rows, step, centres, precision, flat)
        except gaussian.ImproperPosterior:  # noise is lost beside what the prior allows
            return 1.0, 0.0  # rows tell nothing
        # without digits where only the row itself predicts it
        proper = var < _BY.most_noise * loop.size / np.finfo(float).eps
        if not np.any(proper):
            return 1.0, 0.0
        gap = gap + np.bincount(row, apart * centres[lone], minlength=n)
        var = var - np.bincount(row, apart**2 / precision[lone], minlength=n)
        shared = proper & (np.bincount(row, minlength=n) == 0)
        told = shared if np.sum(weight[shared]) >= _BY.rows_for_noise else proper
        of_rows = gap[told], np.maximum(var[told], 0.0), step.noise, weight[told]
        return noise_temper(*of_rows), float(weight[told].sum())


def _lone_columns(rows, flat):
    """Return which columns vary in one row alone, bool (d,), these rows, and how far they are out.

    With `flat` columns are deviations from their means. A row of several copies is not alone.
    """
    X, _, weight = rows
    squares, j = X * X, np.arange(X.shape[1])
    row, sums = np.argmax(squares, axis=0), weight @ squares
    own = one_copy(weight)[row]
    varies = 1.0 - flat * own / weight.sum()  # share of a deviation that is left about the mean
    lone = (sums > 0) & (own * squares[row, j] >= (1.0 - 1e-9) * varies * sums)
    return lone, row[lone], X[row, j][lone] / varies[lone]


def _left_out(rows, step, centres, precision, flat):
    """Return y minus its mean given the other rows, and the variance of that.

    One copy of each row is taken out, of a weight below one all. The sites of the coefficients are
    N(centres, 1 / precision); `flat` tells of an intercept. By a matrix of rows, O(n^2 d + n^3),
    well conditioned however small the noise is, or where they are many O(n d^2).
    """
    (X, y, weight), noise = rows, step.noise
    n, d = X.shape
    if n > d + _BY.exact // 2:
        var = step.system.row_variance(X) + flat * noise / weight.sum()
        left = np.maximum(1.0 - one_copy(weight) * var / noise, np.finfo(float).eps)
        return (y - X @ step.u) / left, var / left
    own, copy = noise / weight, one_copy(weight) / weight
    K = (X / precision) @ X.T
    gaussian.add_to_diagonal(K, own)
    inverse = cho_solve((gaussian.checked_cholesky(K), True), np.eye(len(y)))
    if flat:
        ones = inverse.sum(axis=0)
        inverse -= np.outer(ones, ones) / ones.sum()
    free = own * np.diagonal(inverse)  # share of a row's variance that is its own noise
    # zero where an intercept fits one row alone
    left = np.maximum(1.0 - copy + copy * free, 1e-100)
    return own * (inverse @ (y - X @ centres)) / left, own * (1.0 - free) / left


def rows_of_parts(estimator, parts):
    """Return the `Rows` of a user's partitions, or None, and their `RowStatistics` without.

    They are brought together where single rows are asked for: for sampled variances, and for the
    noise of new responses. Of more than 2**25 entries that is not done.
    """
    with PartMap(parts, prefer="threads") as run:
        numbers = range(len(run.parts))
        facts = run(row_parts.facts_of_part, numbers, False)
        row_parts.check_facts(estimator, facts, LARGEST_IN_UNITS)
        C, d = estimator.prior_operator, facts[0].n_features
        exact = takes_exact(estimator, sum(f.n_rows for f in facts), d)
        few = sum(f.n_entries for f in facts) <= _BY.entries_for_noise
        if exact and not (few and C is None and isinstance(estimator.noise_variance, str)):
            return None, row_parts.statistics_of_parts(run, facts)
        if not few:
            raise ValueError(
                f"partitions of more than {_BY.entries_for_noise} entries need exact variances: "
                f"up to {_BY.exact} columns, few rows, or variance='exact'."
            )
        parts, y, weight = zip(*run(row_parts.read_part, numbers, False), strict=True)
        sparse = any(map(sp.issparse, parts))
        X = sp.vstack(parts, format="csr") if sparse else np.concatenate(parts)
        return Rows(X, np.concatenate(y), np.concatenate(weight)), None


def plan_regression(estimator, rows, statistics=None):
    """Return the `RegressionPlan` of checked parameters and `Rows`, or `RowStatistics` alone."""
    rows = None if rows is None else _merged_copies(rows)
    d = len(statistics.mean) - 1 if rows is None else rows.X.shape[1]
    C, log_det_C = _prior_operator(estimator.prior_operator, d, estimator.learn_prior)
    noise = None if estimator.noise_variance == "auto" else float(estimator.noise_variance)
    operator, flat = rows is not None and _is_operator(rows.X), estimator.fit_intercept
    if isinstance(flat, str):  # where y = X u + noise is not the measurement in full
        flat = not any((noise is not None, C is not None, operator))
    exact = rows is None or takes_exact(estimator, rows.X.shape[0], d, not operator)
    if exact and statistics is None:
        statistics = row_parts.statistics_of_rows(*rows)
    design, y, centre = _design_of(rows, statistics, C, flat)
    prior = _site_prior(estimator, design.n_sites, d)
    n_free = max(centre.weight - bool(flat), 0.0)
    loop = RegressionLoop(design, y, prior, noise, estimator.tol, centre.weight, n_free, log_det_C)
    if not exact:
        loop.draw(estimator.n_variance_samples, check_random_state(estimator.random_state))
    if estimator.prior is None:
        prior.start_scale = _scale_from_data(loop)
    centre = centre if flat else Centre(np.zeros(d), 0.0, np.inf)
    return RegressionPlan(loop, centre, estimator.max_iter, rows, statistics)


def _site_prior(estimator, n_sites, d):
    """Return the `SitePrior` of an estimator; its scale is learned for a square C only."""
    given, learn = estimator.prior is not None, estimator.learn_prior
    learn = n_sites == d and not given if isinstance(learn, str) else bool(learn)
    site = estimator.prior if given else LaplaceSite(1.0, bound="kl")
    return SitePrior(site, np.empty(n_sites), n_sites, learn)


def _merged_copies(rows):
    """Return `Rows` with copies as one: weights and repeated rows are one problem to the bit."""
    if _is_operator(rows.X):
        return rows
    copies = find_copies(rows.X, rows.weight, rows.y)
    return Rows(rows.X[copies.first], rows.y[copies.first], copies.weight)


def _design_of(rows, statistics, C, flat):
    """Return the `StackedDesign` of rows, their responses, and the `Centre`.

    With exact variances that of a root of their scatter. Otherwise rows and responses are
    multiplied by the roots of the weights, and about their means with `flat`.
    """
    if statistics is not None:
        root, mean = statistics.root if flat else statistics.about_zero(), statistics.mean
        centre, X = Centre(mean[:-1], float(mean[-1]), statistics.weight), root[:, :-1]
        return StackedDesign(X, C, np.sum(X * X, axis=0)), root[:, -1], centre
    (X, y, weight), squares = rows, None
    root, total = np.sqrt(weight), float(weight.sum())
    centre = Centre(np.asarray(X.T @ weight) / total, float(weight @ y) / total, total)
    if not _is_operator(X):
        of_each = _systems.weighted_variances(X, weight) * total
        squares = of_each if flat else _systems.squared(X).T @ weight
    if flat:
        X, y = _systems.about(X, centre.columns), y - centre.response
    if not np.all(weight == 1.0):
        y, diagonal = root * y, sp.diags_array(root)
        X = (aslinearoperator(diagonal) if _is_operator(X) else diagonal) @ X
    return StackedDesign(X, C, squares), y, centre


def _prior_operator(C, d, learn):
    """Return C, dense, CSR or an operator, or None, and the log determinant of a square one."""
    if C is None:
        return None, 0.0
    if not _is_operator(C):
        C = check_array(C, dtype=np.float64, accept_sparse="csr", input_name="prior_operator")
    if C.shape[1] != d:
        raise ValueError(f"prior_operator has {C.shape[1]} columns, X has {d}.")
    square = C.shape[0] == d
    if learn is True and not square:
        raise ValueError(
            "learn_prior=True needs a prior_operator that is None or square: the normaliser of "
            "the prior is not known otherwise."
        )
    if not square or _is_operator(C) or d > _BY.exact:
        return C, np.nan if square else 0.0
    return C, float(np.linalg.slogdet(C.toarray() if sp.issparse(C) else C)[1])


def takes_exact(estimator, n, d, matrix=True):
    """Return whether a matrix of n rows or d columns is factorised at every step.

    X may be an operator, which is no `matrix`.
    """
    matrices = matrix and not _is_operator(estimator.prior_operator)
    if estimator.variance == "exact" and not matrices:
        raise ValueError(
            "variance='exact' needs X and prior_operator as matrices; take 'monte_carlo'."
        )
    if estimator.variance == "auto":
        few = estimator.prior_operator is None and n <= _BY.dual * d and n**2 * d <= _BY.products
        return matrices and (d <= _BY.exact or few)
    return estimator.variance == "exact"


def fit_regression(plan, monitor):
    """Run the loop of a plan, watched by the monitor.

    Returns the result of the loop and the bound with its standard error.
    """
    loop = plan.loop
    limits: Any = dict(max_iter=plan.max_iter, tol=loop.tol, monitor=monitor)
    if loop.exact:
        # with more columns than rows the noise falls by steps that are smallest half-way, which
        # acceleration takes for the end: 40 sets of 50 x 120 take 21 steps for 61 where it may not
        # lower the bound
        limits["acceleration"] = Anderson(depth=5, mixing=1.0, max_change=3.0)
        limits["accept"] = not_lower
    result = iterate(loop.evaluate, loop.start(), **limits)
    step = result.evaluation.payload
    if loop.exact or loop.design.n_sites != loop.design.shape[1]:
        return result, step.objective, 0.0
    system = step.system
    log_det, error = _systems.log_determinant(system.times, system.preconditioner, loop.probes)
    return result, loop.bound(step.scale, step.loss, log_det), 0.5 * error
