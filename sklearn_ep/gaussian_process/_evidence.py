"""Maximise an evidence in its hyperparameters with scipy's L-BFGS-B."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from .._engine.loop import SILENT, Monitor, Reason

__all__ = [
    "KEPT",
    "LEARNING_TOL",
    "EvidencePoint",
    "Learned",
    "LearningEnd",
    "Search",
    "maximise_by",
    "maximise_evidence",
    "minimise_where_finite",
    "random_starts",
]

# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3
# Relative difference of evidences below which two points count as equal.
TIE = 1e-10
# Gain of log evidence that is not missed where no better step is found: odds of one per cent.
NEGLIGIBLE = 0.01
# How often one search may be cut short at a point without a value, the relative length at which it
# gives up, and by how much its next first step is shorter than the one that led there.
_MOST_CUTS, _SHORTEST, _SHORTER = 50, 1e-12, 0.25
# What the status of scipy's search means; any other is a line search that found nothing better.
_REASONS: dict[int, Reason] = {0: "converged", 1: "max_iter"}


class EvidencePoint(NamedTuple):
    """Log evidence at hyperparameters theta, its gradient, the EP residual and a payload.

    With a prior on theta, `log_prior` is its log density and `gradient` that of the sum. A point
    without posterior has the value minus infinity.
    """

    value: float
    gradient: np.ndarray
    residual: float
    payload: Any
    log_prior: float = 0.0

    @property
    def objective(self):
        """What the search maximises."""
        return self.value + self.log_prior


class LearningEnd(NamedTuple):
    """Why learning ended, after how many steps, and the largest entry of the gradient left there.

    The gradient is that of the evidence with its prior in the coordinates of the search, without
    what only points out of the bounds.
    """

    reason: Reason
    n_steps: int
    gradient: float

    @property
    def remark(self):
        """What is not as it should be, in words."""
        if self.reason not in ("max_iter", "stuck"):
            return ""
        return (
            f"learning ended after {self.n_steps} steps ({self.reason}), with a gradient of the "
            f"log evidence of {self.gradient:.3g}"
        )


# Where nothing is learned.
KEPT = LearningEnd("converged", 0, 0.0)


class Learned(NamedTuple):
    """Best hyperparameters found, their point, and how the search ended."""

    theta: np.ndarray
    point: EvidencePoint
    end: LearningEnd


def random_starts(bounds, n_starts, rng):
    """Return starts (n_starts, p) drawn uniformly within finite log bounds."""
    # a kernel without free parameters has bounds of shape (0,)
    bounds = np.reshape(bounds, (-1, 2))
    if n_starts and not np.all(np.isfinite(bounds)):
        raise ValueError("n_restarts_optimizer needs finite bounds of all kernel parameters.")
    return rng.uniform(bounds[:, 0], bounds[:, 1], size=(n_starts, len(bounds)))


class _NoValue(Exception):
    """Raised at a trial point that has no value, to get out of scipy's search."""


class _Remembered:
    """An objective -> (value, gradient, payload) that keeps its best point and stops at infinity.

    `x`, `value`, `gradient` and `payload` are those of the best point; `failed` is the last point
    without a value.
    """

    x: Any = None
    gradient: Any = None
    payload: Any = None
    failed: Any = None

    def __init__(self, objective, tie):
        self.objective, self.tie, self.value = objective, tie, np.inf

    def __call__(self, x):
        value, gradient, payload = self.objective(x)
        if not (np.isfinite(value) and np.all(np.isfinite(gradient))):
            self.failed = x.copy()
            raise _NoValue
        # what is rounding error has no sign: at a bound it would decide which parameters are free
        noise = self.tie * (1.0 + abs(value))
        gradient = np.where(np.abs(gradient) < noise, 0.0, gradient)
        if value < self.value - noise:
            self.x, self.value, self.gradient, self.payload = x.copy(), value, gradient, payload
        return value, gradient


class Search(NamedTuple):
    """Outcome of `minimise_where_finite`.

    The best point with its value and payload, why the search ended, its steps, the largest entry
    of the projected gradient, and how often a step was cut short because it led to no value.
    """

    x: np.ndarray
    value: float
    payload: Any
    reason: Reason
    n_steps: int
    gradient: float
    n_cut: int


def minimise_where_finite(
    objective,
    x,
    bounds,
    *,
    max_iter,
    ftol=2.2204460492503131e-09,
    gtol=1e-5,
    first_step=None,
    negligible=0.0,
    tie=0.0,
    ended=None,
    max_line_search=20,
    exact_gradient=True,
) -> Search | None:
    """Minimise by L-BFGS-B a function that has no value at some points.

    scipy's line search interpolates between values: at an infinite one it gives up and reports
    convergence. So a search that meets one ends there, and another starts from the best point so
    far, with a first step of a quarter of the length of the one that led too far.

    `objective` maps x (p,) to (value, gradient, payload); a value or gradient that is not finite
    means none, and None is returned where the first point has none. `bounds` is (p, 2), `max_iter`
    counts accepted steps, `max_line_search` the evaluations of one line search. `ended` is told of
    the best point after each step, as an object with `x`, `value` and `payload`; the search ends
    where it returns True.

    It has converged where a step lowers the value by less than the share `ftol`, or at `gtol` for
    the largest entry of the projected gradient. It has so, too, where a line search finds nothing
    better and a step as long as the last one would by the gradient gain less than `ftol` asks or
    than `negligible`, in units of the value: what is left is beyond the accuracy of the values, or
    of no interest; with a gradient that is not `exact_gradient` so is all that a line search does
    not find. Of values that differ by less than the share `tie` the first one is kept, so
    that the choice does not hang on rounding errors.

    `first_step` is the length of the first step: L-BFGS-B itself takes the whole gradient where all
    parameters are bounded, which may be far too long, and an evaluation wasted.
    """
    best, n_steps, n_cut, no_better = _Remembered(objective, tie), 0, 0, False
    reason: Reason | None = None
    moved = np.zeros(len(x))
    x, boxed = np.clip(x, bounds[:, 0], bounds[:, 1]), np.all(np.isfinite(bounds))

    def step(intermediate_result):
        nonlocal n_steps, reason, moved, x
        n_steps += 1
        moved, x = np.abs(best.x - x), best.x
        if ended is not None and ended(best):
            reason = "asked"
            raise StopIteration

    while reason is None:
        try:
            limits = dict(maxiter=max_iter - n_steps, ftol=ftol, gtol=gtol, maxls=max_line_search)
            status = _lbfgsb(best, x, bounds, first_step, step, limits)
            no_better = reason is None and status not in _REASONS
            reason = reason or _REASONS.get(status, "stuck")
        except _NoValue:
            if best.x is None:
                return None
            x, n_cut = best.x, n_cut + 1
            length = _SHORTER * np.linalg.norm(best.failed - x)
            # without a box L-BFGS-B starts with a step as long as the unit of `_lbfgsb`
            first_step = length if boxed else np.linalg.norm(best.gradient) * length**2
            if n_steps >= max_iter:
                reason = "max_iter"
            elif n_cut > _MOST_CUTS or length <= _SHORTEST * (1.0 + np.linalg.norm(x)):
                reason = "stuck"
    projected = np.abs(np.clip(best.x - best.gradient, bounds[:, 0], bounds[:, 1]) - best.x)
    if no_better:
        enough = max(ftol * max(abs(best.value), 1.0), negligible)
        found_all = projected @ moved <= enough or not exact_gradient
        reason = "converged" if n_steps and found_all else "stuck"
    left = float(np.max(projected, initial=0.0))
    return Search(best.x, best.value, best.payload, reason, n_steps, left, n_cut)


def _lbfgsb(best, x, bounds, first_step, step, options):
    """Run scipy's search with a first step of a length, by the unit of x, and return its status."""
    again = best.x is not None and np.array_equal(x, best.x)
    # only the start is taken from memory: a search judges noisy values by how they differ
    value, gradient = (best.value, best.gradient) if again else best(x)
    norm, unit = np.linalg.norm(gradient), 1.0
    if first_step is not None and norm > 0:
        unit = np.sqrt(min(1.0, first_step / norm))
    first = x / unit

    def scaled(t):
        v, g = (value, gradient) if np.array_equal(t, first) else best(t * unit)
        return v, g * unit

    options = {**options, "gtol": options["gtol"] * unit}
    search = dict(method="L-BFGS-B", bounds=bounds / unit, callback=step, options=options)
    return minimize(scaled, first, jac=True, **search).status


def maximise_evidence(
    evaluate: Callable[[np.ndarray], EvidencePoint],
    theta,
    bounds,
    *,
    max_iter,
    starts=(),
    monitor: Monitor = SILENT,
    ftol=1e-6,
    gtol=1e-3,
    first_step=None,
    max_line_search=20,
    exact_gradient=True,
) -> Learned:
    """Maximise the evidence from `theta` (p,), or from the best of several starts.

    Steps to points whose value or gradient is not finite are cut short. Each of the further
    `starts` is run unwatched, then the best is polished as the run of `monitor`, one iteration a
    step, which it may stop. The other arguments are those of `minimise_where_finite`; relative
    changes of the evidence below 1e-6 are within the error of EP run to a residual of 1e-3, and
    where evaluations are noisy, more of them in a line search cannot help.
    """
    options: dict[str, Any] = dict(max_iter=max_iter, max_line_search=max_line_search)
    options |= dict(ftol=ftol, gtol=gtol, first_step=first_step, negligible=NEGLIGIBLE, tie=TIE)
    options |= dict(exact_gradient=exact_gradient)

    def objective(t):
        point = evaluate(t)
        return -point.objective, -point.gradient, point

    def run(start, ended):
        return minimise_where_finite(objective, start, bounds, ended=ended, **options)

    def told(best):
        monitor.begin("learning step")
        point = best.payload
        record = {"residual": point.residual, "log_evidence": point.value}
        return monitor.end(record, point.payload)

    runs = [run(t, None) for t in (theta, *starts)] if len(starts) else []
    runs = sorted((r for r in runs if r is not None), key=lambda r: r.value)
    found = run(runs[0].x if runs else theta, told)
    if found is None:
        raise ValueError("the evidence is not finite at the initial kernel: change its parameters.")
    # a run without a step left nothing to polish: then the end is that of the run before
    reason = found.reason if found.n_steps or not runs else runs[0].reason
    return Learned(found.x, found.payload, LearningEnd(reason, found.n_steps, found.gradient))


def maximise_by(
    optimizer: Callable,
    evaluate: Callable[[np.ndarray], EvidencePoint],
    theta,
    bounds,
    *,
    starts=(),
    monitor: Monitor = SILENT,
) -> Learned:
    """Let a function of the user maximise the evidence, from `theta` (p,) and further starts.

    It is called as scikit-learn calls it, `optimizer(obj_func, initial_theta, bounds)`, with
    ``obj_func(theta, eval_gradient=True)`` the negative evidence and its gradient, and returns the
    best theta with the value there. What it returns counts as converged, in one iteration.
    """

    def obj_func(theta, eval_gradient=True):
        point = evaluate(np.array(theta, dtype=np.float64, ndmin=1))
        return (-point.objective, -point.gradient) if eval_gradient else -point.objective

    found = []
    for start in (theta, *starts):
        end = optimizer(obj_func, start.copy(), bounds)
        try:
            best, value = np.array(end[0], dtype=np.float64, ndmin=1), float(end[1])
        except (TypeError, ValueError, IndexError):
            best, value = np.empty(0), np.nan
        if best.shape != start.shape or not (np.isfinite(value) and np.all(np.isfinite(best))):
            raise ValueError(
                f"optimizer must return finite theta of shape {start.shape} and the value there, "
                f"got {end!r}."
            )
        found.append((value, best))
    best = min(found, key=lambda pair: pair[0])[1]
    monitor.begin()
    point = evaluate(best)
    monitor.end({"residual": point.residual, "log_evidence": point.value}, point.payload)
    return Learned(best, point, LearningEnd("converged", 1, 0.0))
