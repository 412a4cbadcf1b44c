"""The double loop with sampled variances, by visits to rows in partitions or in memory.

Per column the driver holds the coefficients u, the random numbers E1, and the chain of anchors that
the variances of rows are functions of; per row it holds nothing. An outer step solves for a few
draws of N(0, A^-1) at the present sites, calibrates with them the variances that the diagonal of A
gives, and ends with Newton's method at the new ones.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import ImproperPosterior
from .._engine.loop import Anderson, Evaluation, Result, Trace, reason_to_end
from .._engine.partition import add_up
from ._lanczos import log_determinant
from ._priors import GROUP_SHARE, SCALE_RANGE
from ._sampled_rows import (
    Anchor,
    Candidate,
    Point,
    advance_sums,
    calibration_sums,
    diagonal_sums,
    dof_sums,
    line_sums,
    product_sums,
    right_sums,
)
from ._systems import conjugate_gradients
from ._variances import ScaledJacobi, coefficient_variances

__all__ = ["SAMPLED_TOL", "SampledLoop", "SampledStep", "is_large", "summed"]

_TINY = 1e-300
# Inflation of Jacobi's variances at the start.
_INFLATION = 1.2
# Relative gradients at which Newton ends: in the cheap first round, after whose variances are
# formed anew without samples, and at those.
_ROUND_TOL, _FIRST_TOL = 0.1, 1e-2
# Relative residuals of the solves for samples: in the first outer step, and later.
_SAMPLE_RTOL = (0.1, 0.01)
# Of the user's `inner_tol`, at later variances: their own errors are larger.
SAMPLED_TOL = 10.0
_INTERCEPT_RTOL = 1e-3
# Samples, and samples times coefficients, that the level of the variances needs, which is one
# number for all rows; of so many rows two. Where the spread of the ratios over rows is larger than
# the limit, rows need samples of their own: two tell it to .01 or .02 of so many rows, and where it
# is below .03 eight of its own are of no use to a row.
_FEW_SAMPLES, _FEW_DRAWN, _MANY_ROWS = 4, 2000, 25_000
_SPREAD_FOR_MORE, _SPREAD_FOR_MORE_OF_TWO, _SPREAD_FOR_SHRINKING = 0.01, 0.03, 0.005
_SUFFICIENT = 1e-4  # decrease in Newton's line search


# Entries of all rows from which products are in single precision: smaller data are in the caches.
_LARGE = 2**21


def is_large(n_entries):
    """Return whether products with so many entries are worth single precision."""
    return n_entries > _LARGE


class SampledStep(NamedTuple):
    """State after an outer step, what predicts from it, and the diagonal `data` of B' Pi B."""

    u: np.ndarray
    predictor: ScaledJacobi
    data: np.ndarray
    scale: Any
    prior: Any
    own: Any
    value: float


@dataclass
class SampledLoop:
    """One binary problem.

    `run(worker, point, extra, anchors)` returns the sum of what the parts answer; `prior` is one of
    `_priors`, `weight` the total weight of the rows, `noise` (n, k) the random numbers E1 of the
    columns, whose last one is an intercept if `intercept`; `single` asks for messages in single
    precision. Gradients are measured in units of that of the rows at u = 0.
    """

    run: Any
    prior: Any
    weight: float
    noise: np.ndarray
    intercept: bool
    inner_tol: float
    max_inner_iter: int
    single: bool
    n_newton: int = field(default=0, init=False)
    n_visits: int = field(default=0, init=False)
    n_products: int = field(default=0, init=False)

    def __post_init__(self):
        n = len(self.noise)
        self._tags = itertools.count()
        self.point = Point(next(self._tags), np.zeros(n))
        self.anchors: list[Anchor] = []
        self.scale: Any = self.prior.start_scale
        self.own: Any = None
        self._learning = Anderson(depth=2, mixing=1.0, max_change=2.0)
        self._samples: Any = None
        self._column: Any = None
        self._kind = np.float32 if self.single else np.float64
        self.size = 1.0

    # ------------------------------------------------------------------ visits

    def _visit(self, worker, extra=None, point=None, products=0):
        self.n_visits += 1
        self.n_products += products
        return self.run(worker, self.point if point is None else point, extra, self.anchors)

    def _diagonal(self):
        """Return the diagonal of B' Pi B."""
        return self._visit(diagonal_sums, products=1).total

    def _images(self, diagonal, curvature):
        """Return the map V -> A V for columns, with curvatures or precisions of the sites."""

        def times(V):
            columns = V[:, 0] if V.shape[1] == 1 else V
            extra = (columns.astype(self._kind), curvature)
            out = self._visit(product_sums, extra, products=2 * V.shape[1]).total
            return diagonal[:, None] * V + out.reshape(V.shape)

        return times

    def _line(self, u):
        """Return a `Point`, the penalised loss there, its gradient, and the prior's penalty."""
        point = Point(next(self._tags), u)
        sums = self._visit(line_sums, point=point, products=2)
        prior = self.prior.penalty(u, self.own, self.scale)
        return point, sums.value + float(np.sum(prior.value)), sums.slope + prior.slope, prior

    # ------------------------------------------------------------------ inner loop

    def minimise(self, tol, data, line):
        """Move u to the minimum at the present variances, by inexact Newton steps.

        `data` (n,) is the diagonal of B' Pi B, near enough for the preconditioner; `line` is that
        at u. Returns value and penalty of the prior at the end.
        """
        point, value, gradient, prior = line
        self.point = point
        for _ in range(self.max_inner_iter):
            size = float(np.linalg.norm(gradient)) / self.size
            if size <= tol:
                break
            self.n_newton += 1
            d = np.zeros((len(gradient), 1))
            right = -gradient[:, None]
            scale = (prior.curvature + data)[:, None]
            rtol = max(min(0.1, np.sqrt(size)), 0.3 * tol / size)
            times = self._images(prior.curvature, curvature=True)
            conjugate_gradients(times, scale, right, d, right.copy(), rtol)
            new = self._search(point.u, value, d[:, 0], float(gradient @ d[:, 0]))
            if new is None:
                break
            self.point = point = new[0]
            _, value, gradient, prior = new
        return value, prior

    def _search(self, u, value, d, slope):
        """Backtrack from the full step to a sufficient decrease; None where rounding hides any."""
        slack = 8.0 * np.finfo(float).eps * (1.0 + abs(value))
        step = 1.0
        for _ in range(40):
            new = self._line(u + step * d)
            if new[1] <= value + _SUFFICIENT * step * slope + slack:
                return new
            step *= 0.5
        return None

    # ------------------------------------------------------------------ variances

    def _begin(self, last):
        """First variances: from the diagonal alone, at no sites and after a cheap round."""
        if last is not None:
            u, self.scale, self.size = last
            self.point = Point(next(self._tags), u)
        diagonal = self.prior.start_precision(self.scale)
        data = self._diagonal()
        self.own = (1.0 / (diagonal + data))[: self.prior.n_sites]
        for tol in (_ROUND_TOL, _FIRST_TOL):
            if self.anchors:
                data = self._diagonal()
            variances = 1.0 / (diagonal + data)
            candidate = Candidate(next(self._tags), variances, None, None)
            self.anchors = [*self.anchors, Anchor(candidate, self.point.u, _INFLATION, 0.0)]
            line = self._line(self.point.u)
            if last is None and len(self.anchors) == 1:  # at zero, where the prior has no slope
                self.size = max(float(np.linalg.norm(line[2])), np.finfo(float).tiny)
            _, prior = self.minimise(tol, data, line)
            diagonal = prior.precision

    def _draws(self, diagonal, data, right, rtol):
        """Return draws (n, k) of N(0, A^-1), with u'A u scaled to its mean, and the column.

        `right` (n, k) has covariance A. Draws continue from those of the outer step before; the
        column of A^-1 that belongs to an intercept is solved for beside them, None without one.
        """
        n, k = right.shape
        scale, tolerances = (diagonal + data)[:, None], np.full(k, rtol)
        x = np.zeros((n, k))
        if self._samples is not None:
            x[:, : self._samples.shape[1]] = self._samples[:, :k]
        if self.intercept:
            unit = np.zeros((n, 1))
            unit[-1] = 1.0
            column = np.zeros((n, 1)) if self._column is None else self._column[:, None]
            right, x = np.hstack([right, unit]), np.hstack([x, column])
            tolerances = np.append(tolerances, _INTERCEPT_RTOL)
        times = self._images(diagonal, curvature=False)
        r = right - times(x) if self._samples is not None else right.copy()
        conjugate_gradients(times, scale, right, x, r, tolerances)
        self._samples = x[:, :k].copy()
        energy = np.einsum("ij,ij->j", x, right - r)[:k]
        U = self._samples * np.sqrt(n / np.maximum(energy, _TINY))
        if not self.intercept:
            return U, None
        self._column = x[:, k].copy()
        # given the intercept: draws without what goes with it
        U = U - np.outer(self._column, U[-1] / self._column[-1])
        U[-1] = 0.0
        return U, self._column

    def advance(self, first, damping):
        """Go on to the next anchor; return it with what the rows say after it."""
        prior = self.prior.penalty(self.point.u, self.own, self.scale)
        diagonal, most = prior.precision, self.noise.shape[1]
        right = np.empty((len(diagonal), 0))
        least = _FEW_SAMPLES if self.weight < _MANY_ROWS else 2
        few = min(max(least, _FEW_DRAWN // len(diagonal)), most)
        for k in dict.fromkeys((few, most)):
            columns = slice(right.shape[1], k)
            data, more = self._visit(right_sums, columns, products=1 + k - columns.start)
            more += np.sqrt(diagonal)[:, None] * self.noise[:, columns]
            right = np.hstack([right, more])
            U, column = self._draws(diagonal, data, right, _SAMPLE_RTOL[0 if first else 1])
            variances = 1.0 / (diagonal + data)
            if column is not None:
                variances[-1] = 0.0
            candidate = Candidate(next(self._tags), variances, U, column)
            sums = self._visit(calibration_sums, candidate, products=k)
            level, spread = _level_and_spread(sums, k)
            if spread < (_SPREAD_FOR_MORE if k > 2 else _SPREAD_FOR_MORE_OF_TWO):
                break
        noise = 2.0 / k
        shrink = spread / (spread + (1.0 + spread) * noise)
        if spread < _SPREAD_FOR_SHRINKING:
            shrink = 0.0
        self.anchors = [*self.anchors, Anchor(candidate, self.point.u, level, shrink, damping)]
        features = slice(None, None if column is None else -1)
        coefficients = coefficient_variances(U[features], diagonal[features], data[features])
        predictor = ScaledJacobi(level * variances, coefficients, column)
        return predictor, data, self._visit(advance_sums, products=2)

    # ------------------------------------------------------------------ outer loop

    def solve(self, *, tol, max_iter, damping, monitor, last=None):
        """Iterate to the fixed point and return the loop's kind of Result.

        The residual is the mean square change of a log variance. `last` is the state of an earlier
        fit to start from: coefficients, scale of the prior, and the unit of gradients.
        """
        trace, reason = Trace(monitor), None
        self._begin(last)
        while reason is None:
            trace.begin()
            with np.errstate(over="ignore", invalid="ignore"):  # the residual tells
                predictor, data, sums = self.advance(trace.n_iter == 0, damping)
            residual = sums.change / self.weight
            moved = self._new_prior(predictor, sums.dof)
            prior = self.prior.penalty(self.point.u, self.own, self.scale)
            line = (
                self.point,
                sums.value + float(np.sum(prior.value)),
                sums.slope + prior.slope,
                prior,
            )
            value, prior = self.minimise(self.inner_tol, data, line)
            residual = max(residual, moved)
            if not np.isfinite(residual):
                raise ImproperPosterior("variances are beyond the range of double precision")
            step = SampledStep(self.point.u, predictor, data, self.scale, prior, self.own, value)
            trace.end({"residual": residual}, step)
            reason = reason_to_end(trace, residual < tol, False, False, max_iter)
        evaluation = Evaluation(self.point.u, residual, payload=step)
        return Result(self.point.u, evaluation, trace.n_iter, reason, trace.history)

    def state(self):
        """Return what a later fit can start from."""
        return self.point.u, self.scale, self.size

    def _new_prior(self, predictor, dof):
        """Renew what the prior depends on; return its change as a residual.

        The scale is the one thing that moves slowly, and is accelerated.
        """
        m, u = self.prior.n_sites, self.point.u
        before = self.own
        if m:
            self.own = predictor.coefficient_variance()[:m]
        moved = float(np.mean(np.log(self.own / before) ** 2)) if m else 0.0
        if not self.prior.learn:
            return moved
        penalty = self.prior.penalty(u, self.own, self.scale)
        new = np.clip(self.prior.new_scale(u, penalty, self.scale, predictor, dof), *SCALE_RANGE)
        x, target = np.log(np.atleast_1d(self.scale)), np.log(np.atleast_1d(new))
        change = float(np.max(np.abs(target - x)))
        x = self._learning(x, Evaluation(target, change))
        self.scale = np.clip(np.exp(x if np.ndim(new) else x[0]), *SCALE_RANGE)
        return max(moved, GROUP_SHARE * change)

    def finish(self, step, probes):
        """Return the bound on the log evidence, its standard error, and pi' z, at the end.

        `probes` (n, p) are those of the log determinant; without any the bound is nan. Variances
        need not be right to first order: the bound is stationary in them.
        """
        dof = float(self._visit(dof_sums).total)
        if probes is None or np.any(np.isinf(self.prior.variance)):
            return np.nan, 0.0, dof
        diagonal = step.prior.precision
        times = self._images(diagonal, curvature=False)
        log_det, error = log_determinant(times, diagonal + step.data, probes)
        m = self.prior.n_sites
        explained = dof + (float(diagonal[:m] @ step.own) if m else 0.0)
        bound = 0.5 * (explained - log_det) + self.prior.log_normaliser(step.scale) - step.value
        return bound, 0.5 * error, dof


def _level_and_spread(sums, k):
    """Return the level c of the variances and the spread of sampled over calibrated ones.

    The ratio of a row is a / c + b, whose mean c makes one; the share of its variance over rows
    that k samples do not explain is the spread.
    """
    if not sums.weight > 0:
        return 1.0, 0.0
    a, b = sums.a / sums.weight, sums.b / sums.weight
    level = a / max(1.0 - b, 0.01)
    if not level > 0:
        return 1.0, 0.0
    mean = a / level + b
    second = (sums.aa / level**2 + 2.0 * sums.ab / level + sums.bb) / sums.weight
    noise = 2.0 / k
    return level, max((second - mean**2 - noise) / (1.0 + noise), 0.0)


def summed(run, spec):
    """Return the visits of a `PartMap`: what all parts answer, added up."""

    def visit(worker, point, extra, anchors):
        parts = range(len(run.parts))
        return add_up(run(worker, parts, spec, point, extra, *anchors))

    return visit
