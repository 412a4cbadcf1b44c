"""Searches for a maximum: from nowhere, and from near it with a curvature that is about known.

`minimise_where_finite` is scipy's L-BFGS-B for functions that have no value at some points;
`ascend` a few Newton steps for a log density whose every value is dear.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from ..loop import Reason

__all__ = ["Search", "Summit", "ascend", "minimise_where_finite"]

# How often one search may be cut short at a point without a value, the relative length at which it
# gives up, and by how much its next first step is shorter than the one that led there.
_MOST_CUTS, _SHORTEST, _SHORTER = 50, 1e-12, 0.25
# Evaluations in turn without a gain that counts, after which a search near the top or by inexact
# gradients ends: it would begin again and again from points that differ by the noise.
_PATIENCE = 8
# What the status of scipy's search means; any other is a line search that found nothing better.
_REASONS: dict[int, Reason] = {0: "converged", 1: "max_iter"}


# Maps x (p,) to value, gradient (p,) and what goes with the point.
Objective = Callable[[np.ndarray], tuple[float, np.ndarray, Any]]


class _NoValue(Exception):
    """Raised at a trial point that has no value, to get out of scipy's search."""


class _NothingBetter(Exception):
    """Raised where a search has gone on for long without a gain, to get out of scipy's search."""


class _Remembered:
    """An objective -> (value, gradient, payload) that keeps its best point and stops at infinity.

    `x`, `value`, `gradient` and `payload` are those of the best point; `failed` is the last point
    without a value. With `patience` it also stops after so many evaluations in turn that together
    gain no more than `negligible`.
    """

    x: Any = None
    gradient: Any = None
    payload: Any = None
    failed: Any = None

    def __init__(
        self, objective: Objective, tie: float, negligible: float, patience: float = np.inf
    ) -> None:
        self.objective, self.tie, self.value = objective, tie, np.inf
        self.negligible, self.patience = negligible, patience
        self._level, self._n_level = np.inf, 0

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, payload = self.objective(x)
        if not (np.isfinite(value) and np.all(np.isfinite(gradient))):
            self.failed = x.copy()
            raise _NoValue
        # what is rounding error has no sign: at a bound it would decide which parameters are free
        noise = self.tie * (1.0 + abs(value))
        gradient = np.where(np.abs(gradient) < noise, 0.0, gradient)
        if value < self.value - noise:
            self.x, self.value, self.gradient, self.payload = x.copy(), value, gradient, payload
        if self.value < self._level - self.negligible:
            self._level, self._n_level = self.value, 0
        else:
            self._n_level += 1
        if self._n_level >= self.patience:
            raise _NothingBetter
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
    objective: Objective,
    x: np.ndarray,
    bounds: np.ndarray,
    *,
    max_iter: int,
    ftol: float = 2.2204460492503131e-09,
    gtol: float = 1e-5,
    first_step: float | None = None,
    negligible: float = 0.0,
    tie: float = 0.0,
    ended: Callable[[Any], bool] | None = None,
    max_line_search: int = 20,
    max_evaluations: int = 15000,
    exact_gradient: bool = True,
) -> Search | None:
    """Minimise by L-BFGS-B a function that has no value at some points.

    scipy's line search interpolates between values: at an infinite one it gives up and reports
    convergence. So a search that meets one ends there, and another starts from the best point so
    far, with a first step of a quarter of the length of the one that led too far.

    `objective` maps x (p,) to (value, gradient, payload); a value or gradient that is not finite
    means none, and None is returned where the first point has none. `bounds` is (p, 2), `max_iter`
    counts accepted steps, `max_line_search` the evaluations of one line search, `max_evaluations`
    those between two points without a value. `ended` is told of the best point after each step, as
    an object with `x`, `value` and `payload`; the search ends where it returns True.

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
    patience = np.inf if exact_gradient else _PATIENCE
    best = _Remembered(objective, tie, negligible, patience)
    n_steps, n_cut, no_better = 0, 0, False
    reason: Reason | None = None
    moved = np.zeros(len(x))
    x, boxed = np.clip(x, bounds[:, 0], bounds[:, 1]), np.all(np.isfinite(bounds))

    def step(intermediate_result: Any) -> None:
        nonlocal n_steps, reason, moved, x
        n_steps += 1
        moved, x = np.abs(best.x - x), best.x
        if ended is not None and ended(best):
            reason = "asked"
            raise StopIteration

    while reason is None:
        try:
            limits = dict(maxiter=max_iter - n_steps, maxfun=max_evaluations, ftol=ftol, gtol=gtol)
            limits["maxls"] = max_line_search
            status = _lbfgsb(best, x, bounds, first_step, step, limits)
            no_better = reason is None and status not in _REASONS
            reason = reason or _REASONS.get(status, "stuck")
        except _NothingBetter:
            reason, no_better = "stuck", True
        except _NoValue:
            if best.x is None:
                return None
            x, n_cut = best.x, n_cut + 1
            length = _SHORTER * float(np.linalg.norm(best.failed - x))
            # without a box L-BFGS-B starts with a step as long as the unit of `_lbfgsb`
            first_step = length if boxed else float(np.linalg.norm(best.gradient)) * length**2
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


def _lbfgsb(
    best: _Remembered,
    x: np.ndarray,
    bounds: np.ndarray,
    first_step: float | None,
    step: Callable[[Any], None],
    options: dict[str, Any],
) -> int:
    """Run scipy's search with a first step of a length, by the unit of x, and return its status."""
    again = best.x is not None and np.array_equal(x, best.x)
    # only the start is taken from memory: a search judges noisy values by how they differ
    value, gradient = (best.value, best.gradient) if again else best(x)
    norm, unit = np.linalg.norm(gradient), 1.0
    if first_step is not None and norm > 0:
        unit = float(np.sqrt(min(1.0, float(first_step / norm))))
    first = x / unit

    def scaled(t: np.ndarray) -> tuple[float, np.ndarray]:
        v, g = (value, gradient) if np.array_equal(t, first) else best(t * unit)
        return v, g * unit

    options = {**options, "gtol": options["gtol"] * unit}
    search = dict(method="L-BFGS-B", bounds=bounds / unit, callback=step, options=options)
    return minimize(scaled, first, jac=True, **search).status


class Summit(NamedTuple):
    """Outcome of `ascend`: the best point, why it ended, its steps, the gain still in reach.

    `gradient` is the largest entry of what does not only point out of the bounds.
    """

    x: np.ndarray
    payload: Any
    reason: Reason
    n_steps: int
    gradient: float
    gain: float


# Log density that a step may lose and be taken: what inexact values are off by.
_LEVEL = 1e-3
# Longest step in a coordinate, what is left of one that led down, how the next one may be longer
# again, and how often that happens in turn before there is nothing to find.
_LONGEST, _SHARE, _LONGER, _MOST_FAILURES = 2.0, 0.3, 2.0, 6


def ascend(
    objective: Objective,
    x: np.ndarray,
    bounds: np.ndarray,
    curvature: np.ndarray,
    *,
    gain: float,
    max_iter: int,
    lacking: np.ndarray | None = None,
    patience: int = _PATIENCE,
    longest: float = _LONGEST,
    ended: Callable[[Any], bool] | None = None,
) -> Summit | None:
    """Maximise a log density from near its maximum by a few quasi-Newton steps.

    `objective` maps x (p,) to (value, gradient, payload), without value where not finite; None is
    returned if the first point has none. `curvature` (p, p), positive definite, is about the
    negative Hessian, and corrected by BFGS on the way. It has converged where the quadratic model
    promises less than `gain` by a further step: in units of the value, and so of the posterior,
    that the gradient alone does not know; or where `patience` evaluations in turn gain nothing.
    `ended` is told of each accepted point by its payload and stops the search by returning True.
    Coordinates at a bound (p, 2) that want to leave it stay; no step is longer than `longest` in
    any of them.

    Gradients may be off by what changes slowly: `lacking` (p,) is about what has to be added to
    them, None for exact ones. How the value rises on a step corrects it along that step.
    """
    exact, lack = lacking is None, np.zeros_like(x) if lacking is None else lacking
    value, gradient, payload = objective(x)
    gradient = gradient + lack
    if not (np.isfinite(value) and np.all(np.isfinite(gradient))):
        return None
    share, reach, n_steps, n_failed, n_level, top = 1.0, 1.0, 0, 0, 0, value
    reason: Reason | None = None
    while True:
        step, promised = _newton_step(x, gradient, bounds, curvature, longest)
        if reason is None and promised <= gain:
            reason = "converged"
        if reason is not None:
            break
        trial = np.clip(x + share * step, bounds[:, 0], bounds[:, 1])
        new_value, new_gradient, new_payload = objective(trial)
        new_gradient = new_gradient + lack
        finite = np.isfinite(new_value) and np.all(np.isfinite(new_gradient))
        n_level += 1
        if finite:
            moved = trial - x
            curvature = _corrected(curvature, moved, gradient - new_gradient)
            if not exact:
                more = _missed(curvature, moved, new_value - value, 0.5 * (gradient + new_gradient))
                lack, gradient, new_gradient = lack + more, gradient + more, new_gradient + more
            if new_value > top + _LEVEL:
                top, n_level = new_value, 0
        if not finite or new_value < value - _LEVEL:
            # a gradient that was corrected gives another step
            share, n_failed = share if finite and not exact else _SHARE * share, n_failed + 1
            reach = share if finite else reach
            reason = "stuck" if n_failed > _MOST_FAILURES else None
        else:
            x, value, gradient, payload = trial, new_value, new_gradient, new_payload
            share = reach = min(1.0, _LONGER * reach)
            n_failed, n_steps = 0, n_steps + 1
            if ended is not None and ended(payload):
                reason = "asked"
            elif n_steps >= max_iter:
                reason = "max_iter"
        if reason is None and n_level >= patience:
            reason = "converged"
    left = float(np.max(np.abs(np.clip(x + gradient, bounds[:, 0], bounds[:, 1]) - x), initial=0.0))
    return Summit(x, payload, reason, n_steps, left, float(promised))


def _newton_step(
    x: np.ndarray, gradient: np.ndarray, bounds: np.ndarray, curvature: np.ndarray, longest: float
) -> tuple[np.ndarray, float]:
    """Return the step of the coordinates that are free, and the gain it promises."""
    held = ((x <= bounds[:, 0]) & (gradient < 0)) | ((x >= bounds[:, 1]) & (gradient > 0))
    free = np.flatnonzero(~held)
    step = np.zeros_like(x)
    if not len(free):
        return step, 0.0
    step[free] = np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
    promised = 0.5 * float(step @ gradient)
    return step / max(1.0, float(np.max(np.abs(step))) / longest), promised


def _corrected(curvature: np.ndarray, moved: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Return the curvature after a step that made the gradient lose so much (BFGS)."""
    along = curvature @ moved
    if moved @ lost <= 1e-3 * (moved @ along):
        return curvature
    out = curvature - np.outer(along, along) / (moved @ along)
    return out + np.outer(lost, lost) / (moved @ lost)


def _missed(
    curvature: np.ndarray, moved: np.ndarray, rise: float, gradient: np.ndarray
) -> np.ndarray:
    """Return the least that gradients lack, by the curvature, where the value rises so much.

    `gradient` is the mean of those at both ends of the step.
    """
    along = curvature @ moved
    return (rise - gradient @ moved) / (along @ moved) * along
