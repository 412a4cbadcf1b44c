"""Gaussian posterior of a linear regression whose prior is super-Gaussian in s = C u.

y = X u + noise, and the sites of the prior sit on the rows of C. The posterior is N(u, A^-1) with A
= X'X / noise + C' Pi C, found by the loop of `_regression_loop`. X and C need not be matrices.

Exact variances see no more of the rows than weight, means and a root of their scatter, which has as
many rows as columns at most: rows in partitions, or of a stream, leave as much behind.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cho_solve
from scipy.sparse.linalg import aslinearoperator
from scipy.special import stdtrit
from sklearn.utils import check_random_state

from .._engine import gaussian
from .._engine.partition import PartMap
from .._engine.rows import find_copies
from .._engine.sites import one_copy
from .._estimator import row_parts
from .._estimator.checks import LARGEST_IN_UNITS, checked_array
from . import _systems
from ._calibration import noise_temper
from ._parameters import SitePrior
from ._regression_loop import BY, RegressionLoop, StackedDesign, is_operator, scale_from_data
from ._sites import LaplaceSite


class Rows(NamedTuple):
    """Rows X (n, d), dense, CSR or an operator, with responses and weights (n,)."""

    X: Any
    y: np.ndarray
    weight: np.ndarray

    def about(self, centre):
        """Return dense rows about a `Centre`."""
        X = self.X.toarray() if sp.issparse(self.X) else self.X
        return Rows(X - centre.columns, self.y - centre.response, self.weight)


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
    rows: Rows | None
    statistics: row_parts.RowStatistics | None

    def posterior(self, step, calibrated=False):
        """Return what predicts from a `RegressionStep`."""
        loop, temper, freedom = self.loop, 1.0, np.inf
        if loop.noise is None:
            temper, told = self._temper(step) if calibrated else (1.0, 0.0)
            freedom = max(loop.n_free - step.dof, told, 1.0)
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
        if not learned or rows is None or np.prod(rows.X.shape) > BY.entries_for_noise:
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
        proper = var < BY.most_noise * loop.size / np.finfo(float).eps
        gap = gap + np.bincount(row, apart * centres[lone], minlength=n)
        var = var - np.bincount(row, apart**2 / precision[lone], minlength=n)
        shared = proper & (np.bincount(row, minlength=n) == 0)
        told = shared if np.sum(weight[shared]) >= BY.rows_for_noise else proper
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
    if n > d + BY.exact // 2:
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
        few = sum(f.n_entries for f in facts) <= BY.entries_for_noise
        if exact and not (few and C is None and isinstance(estimator.noise_variance, str)):
            return None, row_parts.statistics_of_parts(run, facts)
        if not few:
            raise ValueError(
                f"partitions of more than {BY.entries_for_noise} entries need exact variances: "
                f"up to {BY.exact} columns, few rows, or variance='exact'."
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
    operator, flat = rows is not None and is_operator(rows.X), estimator.fit_intercept
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
        prior.start_scale = scale_from_data(loop)
    centre = centre if flat else Centre(np.zeros(d), 0.0, np.inf)
    return RegressionPlan(loop, centre, rows, statistics)


def _site_prior(estimator, n_sites, d):
    """Return the `SitePrior` of an estimator; its scale is learned for a square C only."""
    given, learn = estimator.prior is not None, estimator.learn_prior
    learn = n_sites == d and not given if isinstance(learn, str) else bool(learn)
    site = estimator.prior if given else LaplaceSite(1.0, bound="kl")
    return SitePrior(site, np.empty(n_sites), n_sites, learn)


def _merged_copies(rows):
    """Return `Rows` with copies as one: weights and repeated rows are one problem to the bit."""
    if is_operator(rows.X):
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
    if not is_operator(X):
        of_each = _systems.weighted_variances(X, weight) * total
        squares = of_each if flat else _systems.squared(X).T @ weight
    if flat:
        X, y = _systems.about(X, centre.columns), y - centre.response
    if not np.all(weight == 1.0):
        y, diagonal = root * y, sp.diags_array(root)
        X = (aslinearoperator(diagonal) if is_operator(X) else diagonal) @ X
    return StackedDesign(X, C, squares), y, centre


def _prior_operator(C, d, learn):
    """Return C, dense, CSR or an operator, or None, and the log determinant of a square one."""
    if C is None:
        return None, 0.0
    if not is_operator(C):
        what = f"a matrix, sparse or not, or an operator, of {d} columns"
        C = checked_array("prior_operator", C, what, accept_sparse="csr")
    if C.shape[1] != d:
        raise ValueError(f"prior_operator has {C.shape[1]} columns, X has {d}.")
    square = C.shape[0] == d
    if learn is True and not square:
        raise ValueError(
            "learn_prior=True needs a prior_operator that is None or square: the normaliser of "
            "the prior is not known otherwise."
        )
    if not square or is_operator(C) or d > BY.exact:
        return C, np.nan if square else 0.0
    return C, float(np.linalg.slogdet(C.toarray() if sp.issparse(C) else C)[1])


def takes_exact(estimator, n, d, matrix=True):
    """Return whether a matrix of n rows or d columns is factorised at every step.

    X may be an operator, which is no `matrix`.
    """
    matrices = matrix and not is_operator(estimator.prior_operator)
    if estimator.variance == "exact" and not matrices:
        raise ValueError(
            "variance='exact' needs X and prior_operator as matrices; take 'monte_carlo'."
        )
    if estimator.variance == "auto":
        few = estimator.prior_operator is None and n <= BY.dual * d and n**2 * d <= BY.products
        return matrices and (d <= BY.exact or few)
    return estimator.variance == "exact"
