"""Loops that visit rows, in partitions or in memory, and hold nothing per row.

`NaturalGradient` has exact variances. Its state is the precision A and the shift h of the posterior
N(u, A^-1), u = A^-1 h. Given what the rows and the prior say at (u, A), an undamped step is

    A+ = P + B' diag(pi) B,   h+ = P m0 + B' diag(pi) B u - B' f',

the natural-gradient step of length one on the bound, whose fixed points are the optima of the
double loop. One visit to the rows a step (Khan and Lin 2017 give the step for conjugate
computations).

`SampledLoop` is the double loop with sampled variances. Per column the driver holds the
coefficients u, the random signs E1, and the chain of anchors that the variances of rows are
functions of. An outer step solves for a few draws of N(0, A^-1) at the present sites, calibrates
with them the variances that the diagonal of A gives, and ends with Newton's method at the new ones.
A draw has two halves, A^-1 B' Pi^1/2 E2 with signs E2 of the rows, and A^-1 D^1/2 E1. Each by
itself tells the degrees of freedom with a far smaller variance than the sum of both: entries that
signs leave out are squares of the diagonal, which on text are most of all squares.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import ImproperPosterior, mirrored
from .._engine.loop import Anderson, Evaluation, Result, Trace, iterate, reason_to_end
from . import _rows, _systems
from ._double_loop import minimise
from ._parameters import SCALE_SHARE, in_log_scales, log_scales


class _Tolerances(NamedTuple):
    """Relative gradients and residuals at which solves end, in the order in which they are."""

    round: float = 0.1  # Newton in the cheap first round, after which variances are formed anew
    first: float = 1e-2  # Newton at those
    share: float = 5.0  # of the user's `inner_tol`, at sampled variances: their errors are larger
    # Samples of the first outer step, and of later ones: on real text .1 leaves new rows .3 off,
    # .01 .15. Those that tell how far to move the scale of the prior, which steps multiply by ten.
    samples: tuple = (0.05, 0.005)
    samples_of_scale: tuple = (0.005, 0.0005)
    intercept: float = 1e-3  # the column of the intercept
    stretch: tuple = (0.25, 3.0, 16.0)  # least, first and largest of a step of the scale


class _Samples(NamedTuple):
    """How many draws the level of the variances, one number for all rows, needs.

    Each takes two systems. Where the spread of the ratios over rows is larger than a limit, rows
    need draws of their own: below it four are of no use to a row.
    """

    few: int = 2  # two tell the level, ...
    few_drawn: int = 1000  # ... or so many draws times coefficients
    # spread, or error of the level, from which all are drawn once the scale of the prior is found
    spread: float = 0.03
    error: float = 0.01
    spread_to_shrink: float = 0.005  # from which rows are drawn towards their own samples


_TOL, _SAMPLES = _Tolerances(), _Samples()


class VisitStep(NamedTuple):
    """State after a step, and what predicts from it.

    With exact variances the bound, with sampled ones the penalised loss and the diagonal `data` of
    B' Pi B, the penalty of the prior, and variances of coefficients with sites.
    """

    mean: np.ndarray
    system: Any
    scale: Any
    dof: float
    objective: float = np.nan
    value: float = np.nan
    data: Any = None
    prior: Any = None
    own: Any = None


class _Line(NamedTuple):
    """A `Point` with the penalised loss, its gradient, pi' z, and the penalty of the prior."""

    at: _rows.Point
    value: float
    gradient: np.ndarray
    dof: float
    prior: Any


class _Position:
    """Where a loop is, which is all that rows have to be told: coefficients, and variances.

    `own` are the variances of coefficients with sites, and `scale` that of the prior. Here is the
    inner problem as well, where `data` (n,) is the diagonal of B' Pi B, or near it.
    """

    def __init__(self, rows, prior, n):
        self.rows, self.prior, self.scale = rows, prior, prior.start_scale
        self.tags = itertools.count()
        self.point, self.own = self.new_point(np.zeros(n)), None
        self.anchors: list[_rows.Anchor] = []
        self.n_products, self.data = 0, np.zeros(n)

    def new_point(self, u):
        """Return the `Point` of coefficients u."""
        return _rows.Point(next(self.tags), u)

    def visit(self, what, extra=None, point=None, products=0):
        """Return the sum of what the rows answer here, or at another point."""
        self.n_products += products
        point = self.point if point is None else point
        return self.rows.visit(what, point, extra, *self.anchors)

    def images(self, diagonal, curvature):
        """Return the map V -> A V for columns, with curvatures or precisions of the sites."""
        kind = np.float32 if self.rows.spec.single else np.float64

        def times(V):
            columns = V[:, 0] if V.shape[1] == 1 else V
            extra = (columns.astype(kind), curvature)
            out = self.visit(_rows.product_sums, extra, products=2 * V.shape[1]).total
            return diagonal[:, None] * V + out.reshape(V.shape)

        return times

    def line(self, u):
        """Return the `_Line` at coefficients u."""
        point = self.new_point(u)
        return self.lined(point, self.visit(_rows.line_sums, point=point, products=2))

    def lined(self, point, sums):
        """Return the `_Line` of a point and what rows say of it."""
        prior = self.penalty(point)
        value = sums.value + float(np.sum(prior.value))
        return _Line(point, value, sums.slope + prior.slope, sums.dof, prior)

    def penalty(self, point):
        """Return that of the prior at a point."""
        return self.prior.penalty(point.u, self.own, self.scale)

    def moved(self, line, d, length):
        """Return the `_Line` along a direction."""
        return self.line(line.at.u + length * d[0])

    def direction(self, line, gradient, rtol):
        """Return the Newton step, by conjugate gradients."""
        self.point, diagonal = line.at, line.prior.curvature
        times = self.images(diagonal, curvature=True)
        d, _ = _systems.conjugate_gradients(times, diagonal + self.data, -gradient, rtol)
        return (d,)


class _Draws:
    """Variances from draws of N(0, A^-1), which go on from those of the outer step before.

    `noise` (n, k) are the random numbers E1 of the columns. Once all of them were wanted they are.
    Each way to variances returns them as rows are told (an `Anchor`) and as they predict, the
    diagonal of B' Pi B, and whether further samples would add nothing.
    """

    def __init__(self, place, noise):
        self.place, self.noise = place, noise
        self._samples: Any = None
        self._diagonal: Any = None  # prior precisions of which they are
        self._column: Any = None
        self._left: Any = None  # squares of residuals, in units of the preconditioner
        self._wanted = 0

    def solved(self, diagonal, data, right, rtol, column_too):
        """Return A^-1 right (n, m) and the column of A^-1 that belongs to an intercept, or None."""
        (n, m), tolerances, start = right.shape, np.full(right.shape[1], rtol), None
        if column_too:
            right = np.hstack([right, np.eye(n, 1, 1 - n)])
            tolerances = np.append(tolerances, _TOL.intercept)
        if self._samples is not None:
            start, k = np.zeros(right.shape), min(m, self._samples.shape[1])
            # a draw of a coefficient that rows tell nothing of goes with its prior deviation
            start[:, :k] = np.sqrt(self._diagonal / diagonal)[:, None] * self._samples[:, :k]
            if column_too:
                start[:, m] = self._column
        times, scale = self.place.images(diagonal, curvature=False), diagonal + data
        x, r = _systems.conjugate_gradients(times, scale, right, tolerances, start)
        self._samples, self._diagonal = x[:, :m].copy(), diagonal
        self._left = r[:, :m] ** 2 / scale[:, None]
        if not column_too:
            return self._samples, None
        self._column = x[:, m].copy()
        # given the intercept: draws without what goes with it
        U = self._samples - np.outer(self._column, self._samples[-1] / self._column[-1])
        U[-1] = 0.0
        return U, self._column

    def right(self, diagonal, first, last):
        """Return the diagonal of B' Pi B and right sides (n, 2 (last - first)) of draws.

        What the noise of rows gives, and what that of columns does, in turns: their sum is N(0, A).
        """
        columns = slice(first, last)
        data, of_rows = self.place.visit(_rows.right_sums, columns, products=1 + last - first)
        of_columns = np.sqrt(diagonal)[:, None] * self.noise[:, columns]
        return data, np.stack([of_rows, of_columns], axis=2).reshape(len(data), -1)

    def calibrated(self, diagonal, rtol, damping, whole):
        """Return variances whose shape is that of the diagonal of A, and whose level draws'.

        First by a few, and if `whole` by all of them where rows differ in the level.
        """
        place, most = self.place, (self.noise.shape[1] + 1) // 2
        right, intercept = np.empty((len(diagonal), 0)), place.rows.spec.intercept
        few = min(max(_SAMPLES.few, _SAMPLES.few_drawn // len(diagonal), self._wanted), most)
        for k in dict.fromkeys((few, most)):
            data, more = self.right(diagonal, right.shape[1] // 2, k)
            right = np.hstack([right, more])
            U, column = self.solved(diagonal, data, right, rtol, intercept)
            variances = 1.0 / (diagonal + data)
            if intercept:
                variances[-1] = 0.0
            candidate = _rows.Candidate(next(place.tags), variances, U, column, k)
            extra = candidate, place.anchors[-1].level
            sums = place.visit(_rows.calibration_sums, extra, products=2 * k)
            features = slice(None, -1 if intercept else None)
            energy = np.einsum("ij,ij->j", self._samples, right) / len(diagonal)
            halves = U[features], diagonal[features], data[features]
            coefficients = _coefficients_of_halves(*halves, energy)
            columns = self._of_columns(*halves[:2], coefficients)
            level, error = _level_and_error(sums, *columns)
            spread, shrink = _spread_and_share(sums, level, k)
            near = spread < _SAMPLES.spread and error < _SAMPLES.error * np.sqrt(k)
            told = near or k == most
            if told or not whole:
                break
            self._wanted = most
        shrink = 0.0 if spread < _SAMPLES.spread_to_shrink else shrink
        predictor = _systems.ScaledJacobi(level * variances, coefficients, column)
        anchor = _rows.Anchor(candidate, place.point.u, level, shrink, damping)
        return anchor, predictor, data, told

    def _of_columns(self, U, diagonal, coefficients):
        """Return what the signs of columns tell of the degrees of freedom, beside the rows.

        That is what rows do not add up, what solves leave, and the squares of what single columns
        have. Where one of the first two is rounding, as beside tiny columns, it is nothing.
        """
        n, k = len(U), U.shape[1] // 2
        left = self.noise[:n, :k] - np.sqrt(diagonal)[:, None] * U[:, 1::2]
        residuals = np.sum(self._left[:n, 1::2])
        rounding = (64.0 * np.finfo(float).eps) ** 2 * n
        beside, rest = (max(float(x) / k - rounding, 0.0) for x in (np.sum(left**2), residuals))
        return beside, rest, float(np.sum((1.0 - diagonal * coefficients) ** 2))

    def monte_carlo(self, diagonal, rtol, damping, _):
        """Return variances by mean squares alone, with a relative error of sqrt(2 / k)."""
        data, halves = self.right(diagonal, 0, self.noise.shape[1])
        right = halves[:, ::2] + halves[:, 1::2]
        U = self.solved(diagonal, data, right, rtol, False)[0]
        # u' A u of a draw has the mean n: scaling to it takes out what unfinished solves lack
        energy = np.einsum("ij,ij->j", U, right)
        U = U * np.sqrt(len(U) / np.maximum(energy, _systems.TINY))
        return self._low_rank(U / np.sqrt(U.shape[1]), diagonal, data, damping)

    def lanczos(self, diagonal, rtol, damping, _):
        """Return variances by 16 k Lanczos vectors, about as many products as k draws take."""
        data = self.place.visit(_rows.diagonal_sums, products=1).total
        times, (_, k) = self.place.images(diagonal, curvature=False), self.noise.shape
        unit = 1.0 / np.sqrt(diagonal + data)[:, None]  # in which directions do not go with columns
        factor = _systems.lanczos_factor(lambda V: unit * times(unit * V), self.noise[:, 0], 16 * k)
        return self._low_rank(unit * factor, diagonal, data, damping)

    def _low_rank(self, factor, diagonal, data, damping):
        candidate = _rows.Candidate(next(self.place.tags), 1.0 / (diagonal + data), factor, None)
        anchor = _rows.Anchor(candidate, self.place.point.u, 1.0, 1.0, damping)
        return anchor, _systems.HalfCovariance(factor.T), data, True


class _ScaleSteps:
    """Fixed-point steps of a log scale, or several, stretched by the secant of the last move.

    Where columns are many a step is a tenth of the way.
    """

    def __init__(self):
        # before the first move: no step, and a way of more than any tolerance
        self.step, self.move, self.stretch = np.nan, 100.0, _TOL.stretch[1]

    def stretched(self, step):
        """Return the move in the place of a step."""
        fallen, (least, _, most) = self.step - step, _TOL.stretch
        told = fallen * self.move > 0  # else there is none, or draws' errors are all of it
        secant = np.clip(np.where(told, self.move, 1.0) / np.where(told, fallen, 1.0), least, most)
        self.stretch = np.where(told, secant, self.stretch)
        self.step, self.move = step, step * self.stretch
        return self.move


@dataclass
class SampledLoop:
    """One binary problem.

    `rows` are `PartedRows`, `prior` is one of `_priors`, `noise` (n, k) the random numbers of the
    columns, whose last one is an intercept if `rows.spec.intercept`; `variance` names the way of
    `_Draws`. Gradients are measured in units of that of the rows at u = 0.
    """

    rows: Any
    prior: Any
    noise: np.ndarray
    inner_tol: float
    max_inner_iter: int
    variance: str = "calibrated"
    n_newton: int = field(default=0, init=False)

    def __post_init__(self):
        self.place = _Position(self.rows, self.prior, len(self.noise))
        self._form = getattr(_Draws(self.place, self.noise), self.variance)
        self._steps, self._stays, self._learning = _ScaleSteps(), False, self.prior.learn
        self.size = 1.0

    def minimise(self, tol, data, line):
        """Move u to the minimum at the present variances, from a `_Line`; return that there.

        `data` (n,) is the diagonal of B' Pi B, near enough for the preconditioner.
        """
        unit, self.place.data = 1.0 / np.sqrt(line.prior.curvature + data), data
        limits = dict(unit=unit, scale=self.size, tol=tol, max_iter=self.max_inner_iter)
        end, n = minimise(self.place, line, **limits)
        self.place.point, self.n_newton = end.at, self.n_newton + n
        return end

    def _begin(self, last):
        """First variances: from the diagonal alone, at no sites and after a cheap round."""
        place = self.place
        if last is not None:
            u, place.scale, self.size = last
            place.point = place.new_point(u)
        diagonal = self.prior.start_precision(place.scale)
        for tol in (_TOL.round, _TOL.first):
            data = place.visit(_rows.diagonal_sums, products=1).total
            if place.own is None:
                place.own = (1.0 / (diagonal + data))[: self.prior.n_sites]
            candidate = _rows.Candidate(next(place.tags), 1.0 / (diagonal + data), None, None)
            anchor = _rows.Anchor(candidate, place.point.u, _systems.START_INFLATION, 0.0)
            place.anchors = [*place.anchors, anchor]
            line = place.line(place.point.u)
            if last is None and len(place.anchors) == 1:  # at zero, where the prior has no slope
                size = np.linalg.norm(line.gradient / np.sqrt(diagonal + data))
                self.size = max(float(size), np.finfo(float).tiny)
            diagonal = self.minimise(tol, data, line).prior.precision

    def _advance(self, rtol, damping):
        """Go on to the next variances and their minimum.

        Return a `VisitStep`, its residual, which is the mean square change of a log variance, and
        whether its samples are all that are wanted.
        """
        place, whole = self.place, not self._learning
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the residual tells
            precision = place.penalty(place.point).precision
            anchor, predictor, data, told = self._form(precision, rtol, damping, whole)
            place.anchors = [*place.anchors, anchor]
            sums = place.visit(_rows.advance_sums, products=2)
        moved = self._new_prior(predictor, sums.dof_before)
        residual = max(sums.change / self.rows.weight, moved)
        tol = _TOL.share * self.inner_tol
        end = self.minimise(tol, data, place.lined(place.point, sums))
        if not np.isfinite(residual):
            raise ImproperPosterior("variances are beyond the range of double precision")
        known = dict(value=end.value, data=data, prior=end.prior, own=place.own)
        return VisitStep(end.at.u, predictor, place.scale, end.dof, **known), residual, told

    def solve(self, *, tol, max_iter, damping, monitor, last=None):
        """Iterate to the fixed point and return the loop's kind of Result.

        `last` is the state of an earlier fit to start from: coefficients, scale of the prior, and
        the unit of gradients.
        """
        trace, reason = Trace(monitor), None
        self._begin(last)
        while reason is None:
            trace.begin()
            first, later = _TOL.samples_of_scale if self._learning else _TOL.samples
            rtol = later if trace.n_iter else first
            step, residual, told = self._advance(rtol, damping)
            trace.end({"residual": residual}, step)
            near = residual < tol
            reason = reason_to_end(trace, near and told, False, False, max_iter)
            self._learning = self._learning and not near
        evaluation = Evaluation(step.mean, residual, payload=step)
        return Result(step.mean, evaluation, trace.n_iter, reason, trace.history)

    def _new_prior(self, predictor, dof):
        """Renew what the prior depends on; return its change as a residual."""
        place, m, moved = self.place, self.prior.n_sites, 0.0
        if m:
            before, place.own = place.own, predictor.coefficient_variance()[:m]
            moved = float(np.mean(np.log(place.own / before) ** 2))
        return max(moved, self._new_scale(predictor, dof)) if self._learning else moved

    def _new_scale(self, predictor, dof):
        """Move the scale of the prior towards the largest bound; return the move as a residual.

        Variances follow a move within two steps, and foretell a shorter way until then. So of two
        steps one stays where it is, and the residual is that of the last move.
        """
        place, steps = self.place, self._steps
        self._stays = not self._stays
        if not self._stays:
            # errors of variances do not settle where the bound has no top, as on separable classes
            at, penalty, prior = place.point, place.penalty(place.point), self.prior
            new = prior.new_scale(at.u, penalty, place.scale, predictor, dof, prior.of_scale)
            step = np.log(new / place.scale)
            place.scale = self.prior.clipped(place.scale * np.exp(steps.stretched(step)))
        return SCALE_SHARE * float(np.max(np.abs(steps.move)))

    def finish(self, step, probes):
        """Return the bound on the log evidence and its standard error at the end.

        `probes` (n, p) are those of the log determinant; without any the bound is nan. Variances
        need not be right to first order: the bound is stationary in them.
        """
        if probes is None or np.any(np.isinf(self.prior.variance)):
            return np.nan, 0.0
        diagonal = step.prior.precision
        times = self.place.images(diagonal, curvature=False)
        log_det, error = _systems.log_determinant(times, diagonal + step.data, probes)
        m = self.prior.n_sites
        explained = step.dof + (float(diagonal[:m] @ step.own) if m else 0.0)
        bound = 0.5 * (explained - log_det) + self.prior.log_normaliser(step.scale) - step.value
        return bound, 0.5 * error


def _coefficients_of_halves(U, diagonal, data, energy):
    """Return the variances of coefficients from U, which are halves of draws, two a draw.

    `energy`, u' A u / n of each half, has a mean of one for a draw, which takes out some noise.
    """
    k = U.shape[1] // 2
    energy = np.repeat(np.maximum(energy.reshape(k, 2).sum(axis=1), _systems.TINY), 2)
    return _systems.coefficient_variances(U**2 @ (1.0 / energy) / k, k, diagonal, data)


def _level_and_error(sums, beside, rest, own):
    """Return the level c of the variances, and its relative error with one draw.

    Signs of rows tell the degrees of freedom, the sum of eigenvalues s, with a variance of the sum
    of s^2 less the squares of single rows. Those of columns do with `own` in place of the latter,
    and with `rest`, which their solves leave: `beside` is the part that rows do not add up. The
    ratio of a row is a / c + b, whose mean over what both say c makes one.
    """
    if not sums.told_a > 0:
        return 1.0, np.inf
    of_rows, of_columns = sums.told, sums.of_columns + beside
    errors = np.maximum(sums.squared - np.array([sums.own, own]), 0.02 * sums.squared)
    errors[1] += rest**2
    share = errors[0] / errors.sum() if errors.sum() > 0 else 1.0  # squares of tiny columns are 0
    more = max(1.0 + share * (of_columns / of_rows - 1.0), 0.1)
    error = np.sqrt(2.0 * share * errors[1]) / sums.dof
    return more * sums.told_a / max(sums.dof - more * sums.told_b, 0.01 * sums.dof), error


def _spread_and_share(sums, level, n_draws):
    """Return the spread of sampled over calibrated variances, and its share in that of the draws.

    Independent draws tell it without their noise; one draw tells nothing.
    """
    if n_draws == 1 or not sums.weight > 0:
        return 0.0, 0.0
    forms = np.array([1.0 / level**2, 2.0 / level, 1.0]) / sums.weight
    square, mean = ((sums.a / level + sums.b) / sums.weight) ** 2, forms @ sums.mean
    apart = (n_draws * mean - forms @ sums.each) / (n_draws - 1)
    spread = max(apart - square, 0.0)
    return spread, spread / (mean - square) if spread > 0 else 0.0


@dataclass(eq=False)
class _WithScales(Anderson):
    """Acceleration of a state that ends with log scales, whose own steps are Newton's.

    Where the bound hardly depends on them, differences tell no more than their sign does: steps of
    one direction became moves by a factor of 1e5 in the other. They go half as far to twice.
    """

    n_scales: int = 0

    def __call__(self, x, evaluation):
        """Propose the next state."""
        step, scales = super().__call__(x, evaluation), slice(len(x) - self.n_scales, None)
        own = self.mixing * (evaluation.target - x)[scales]
        ends = np.sort(np.outer([0.5, 2.0], own), axis=0)
        step[scales] = x[scales] + np.clip((step - x)[scales], *ends)
        return step


@dataclass
class NaturalGradient:
    """The fixed-point map of one binary problem.

    `rows` are `PartedRows`, `prior` is one of `_parameters`.
    """

    rows: Any
    prior: Any

    def __post_init__(self):
        self.n = len(self.prior.variance)
        self._lower = np.tril_indices(self.n)
        self.n_scales = len(log_scales(self.prior, self.prior.start_scale))

    def start(self):
        """Return the state to start from, by one visit at zero."""
        scale, m = self.prior.start_scale, self.prior.n_sites
        sums = self.rows.visit(_rows.site_sums, np.zeros(self.n), None)
        own = self.prior.start_precision(scale)[:m]
        # sites are weaker where their predictors have a variance; halved or doubled, the share
        # costs visits on nine sets, from 300 rows of a9a to separable ones; so do numbers below
        return self._pack(0.4 * sums.gram, -sums.slope, own, np.zeros(m), scale, scale)

    def _pack(self, G, h, precision, shift, scale, new_scale):
        """Return the state of sites: those of the rows, and of the coefficients in their units."""
        own = [precision * scale**2, shift * scale] if self.prior.n_sites else []
        return np.concatenate([G[self._lower], h, *own, log_scales(self.prior, new_scale)])

    def _unpack(self, x):
        """Return what the rows add to precision and shift, what the prior does, and the scale."""
        ends = np.cumsum([len(self._lower[0]), self.n, *[self.prior.n_sites] * 2])
        lower, h, own, own_shift, logs = np.split(x, ends)
        G, shift, scale = (
            np.zeros((self.n, self.n)),
            np.zeros(self.n),
            in_log_scales(self.prior, logs),
        )
        G[self._lower] = lower
        precision = self.prior.start_precision(scale)
        if len(own):
            precision[: len(own)], shift[: len(own)] = own / scale**2, own_shift / scale
        return mirrored(G), h, precision, shift, scale

    def evaluate(self, x):
        """Map a state to its `Evaluation` by one visit; the payload is a `VisitStep`."""
        G, h, precision, shift, scale = self._unpack(x)
        A = G + np.diag(precision)
        system = _systems.PrimalSystem(A)
        root, mean = system.half, system.solve(h + shift)
        sums = self.rows.visit(_rows.site_sums, mean, root)
        m, variances = self.prior.n_sites, system.coefficient_variance()
        prior = self.prior.penalty(mean, variances[:m], scale)
        new_scale, change = scale, 0.0
        if self.prior.learn:
            about = mean, prior, scale, system, sums.dof
            change = np.max(np.abs(np.log(self.prior.new_scale(*about) / scale)))
            new_scale = self.prior.newton_scale(*about)
        step = sums.gram - G + np.diag(prior.precision - precision)
        moved, slope = root @ step @ root.T, root @ (sums.slope + prior.slope)
        residual = float(max(np.max(np.abs(moved)), np.max(np.abs(slope)), change))
        loss = sums.value + np.sum(prior.value) + 0.5 * prior.precision[m:] @ variances[m:]
        objective = 0.5 * (self.n - system.log_det) + self.prior.log_normaliser(scale) - loss
        end = VisitStep(mean, system, scale, sums.dof, float(objective))
        own = prior.precision[:m], (prior.precision * mean - prior.slope)[:m]
        new = self._pack(sums.gram, sums.gram @ mean - sums.slope, *own, scale, new_scale)
        metric = self._metric(np.diagonal(A), scale)
        return Evaluation(new, residual, metric, {"objective": end.objective}, end)

    def _metric(self, diagonal, scale):
        """Weights of Anderson's least squares: entries in posterior units, mirrored ones twice."""
        q, m = 1.0 / np.sqrt(diagonal), self.prior.n_sites
        rows, columns = self._lower
        matrix = np.where(rows == columns, 1.0, np.sqrt(2.0)) * q[rows] * q[columns]
        own = [(q[:m] / scale) ** 2, q[:m] / scale] if m else []
        return np.concatenate([matrix, q, *own, np.full(self.n_scales, np.sqrt(self.n))])

    def solve(self, x, damping, **limits):
        """Iterate from state x; see `loop.iterate` for the result."""
        acceleration = _WithScales(depth=5, mixing=damping, n_scales=self.n_scales)
        steps = dict(damping=damping, acceleration=acceleration)
        return iterate(self.evaluate, x, accept=_no_fall, backtracks=3, **steps, **limits)


def _no_fall(current, candidate):
    """Accept an accelerated step unless it leads away.

    That is where it loses a share of the bound and makes the residual several times larger. Other
    falls are let through: plain steps in their place would cost the memory, and several times the
    visits.
    """
    before, after = current.record["objective"], candidate.record["objective"]
    grown = candidate.residual > 3.0 * current.residual
    return not (grown and after < before - 1e-3 * abs(before))
