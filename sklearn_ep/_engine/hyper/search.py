"""Searches for a maximum: from nowhere, and from near it with a curvature that is about known.

`minimise_where_finite` is scipy's L-BFGS-B for functions that have no value at some points;
`ascend` a few Newton steps for a log density whose every value is dear.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from ..gaussian import learned_curvature
from ..loop import Reason

# How often one search may be cut short at a point without a value, the relative length at which it
# gives up, and by how much its next first step is shorter than the one that led there.
_MOST_CUTS, _SHORTEST, _SHORTER = 50, 1e-12, 0.25
# Evaluations in turn without a gain that counts, after which a search near the top or by inexact
# gradients ends: it would begin again and again from points that differ by the noise.
PATIENCE = 8
# What the status of scipy's search means; any other is a line search that found nothing better.
_REASONS: dict[int, Reason] = {0: "converged", 1: "max_iter"}


# Maps x (p,) to value, gradient (p,) and what goes with the point.
Objective = Callable[[np.ndarray], tuple[float, np.ndarray, Any]]


class _NoValue(Exception):
    """Raised at a trial point that has no value, to get out of scipy's search."""


class _NothingBetter(Exception):
    """Raised where a search has gone on for long without a gain, to get out of scipy's search."""


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


class _BoxSearch:
    """State of `minimise_where_finite`: the best point so far, and what is known of its steps.

    `x`, `value`, `gradient` and `payload` are those of the best point, `moved` is the last step;
    `failed` is the last point without a value. With `patience` it also ends after so many
    evaluations in turn that together gain no more than `negligible`.
    """

    gradient: Any = None
    payload: Any = None
    failed: Any = None

    def __init__(
        self,
        objective: Objective,
        x: np.ndarray,
        bounds: np.ndarray,
        first_step: float | None,
        tie: float,
        negligible: float,
        patience: float,
        ended: Callable[[Any], bool] | None,
    ) -> None:
        self.objective, self.bounds, self.first_step = objective, bounds, first_step
        self.tie, self.negligible, self.patience, self.ended = tie, negligible, patience, ended
        self.x, self.value = np.clip(x, *bounds.T), np.inf
        self.start, self.moved = self.x, np.zeros(len(x))
        self.reason: Reason | None = None
        self.n_steps, self.n_cut, self.no_better = 0, 0, False
        self._level, self._n_level = np.inf, 0

    def at(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient, and keep the point if it is the best."""
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

    def run(self, limits: dict[str, Any]) -> None:
        """Run scipy's search from the best point, with a first step of a length."""
        # only the start is taken from memory: a search judges noisy values by how they differ
        known = np.isfinite(self.value)
        value, gradient = (self.value, self.gradient) if known else self.at(self.x)
        self.start = self.x
        norm, unit = np.linalg.norm(gradient), 1.0
        if self.first_step is not None and norm > 0:
            unit = float(np.sqrt(min(1.0, float(self.first_step / norm))))
        first = self.x / unit

        def scaled(t: np.ndarray) -> tuple[float, np.ndarray]:
            v, g = (value, gradient) if np.array_equal(t, first) else self.at(t * unit)
            return v, g * unit

        options = limits | dict(gtol=limits["gtol"] * unit)
        search: Any = dict(bounds=self.bounds / unit, callback=self._stepped, options=options)
        status = minimize(scaled, first, jac=True, method="L-BFGS-B", **search).status
        self.no_better = self.reason is None and status not in _REASONS
        self.reason = self.reason or _REASONS.get(status, "stuck")

    def _stepped(self, intermediate_result: Any) -> None:
        self.n_steps += 1
        self.moved, self.start = np.abs(self.x - self.start), self.x
        if self.ended is not None and self.ended(self):
            self.reason = "asked"
            raise StopIteration

    def cut_short(self, max_iter: int) -> None:
        """Make the next first step shorter than the one that led to no value."""
        self.n_cut += 1
        length = _SHORTER * float(np.linalg.norm(self.failed - self.x))
        # without a box L-BFGS-B starts with a step as long as the unit of `run`
        boxed = np.all(np.isfinite(self.bounds))
        self.first_step = length if boxed else float(np.linalg.norm(self.gradient)) * length**2
        if self.n_steps >= max_iter:
            self.reason = "max_iter"
        elif self.n_cut > _MOST_CUTS or length <= _SHORTEST * (1.0 + np.linalg.norm(self.x)):
            self.reason = "stuck"

    def outcome(self, ftol: float, exact_gradient: bool) -> "Search":
        """Return the `Search`; one that found nothing better has converged if little is left."""
        projected = np.abs(np.clip(self.x - self.gradient, *self.bounds.T) - self.x)
        reason = self.reason or "stuck"
        if self.no_better:
            enough = max(ftol * max(abs(self.value), 1.0), self.negligible)
            found_all = projected @ self.moved <= enough or not exact_gradient
            reason = "converged" if self.n_steps and found_all else "stuck"
        left = float(np.max(projected, initial=0.0))
        return Search(self.x, self.value, self.payload, reason, self.n_steps, left, self.n_cut)


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
    exact_gradient: bool = True,
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
    patience = np.inf if exact_gradient else PATIENCE
    search = _BoxSearch(objective, x, bounds, first_step, tie, negligible, patience, ended)
    while search.reason is None:
        limits = dict(maxiter=max_iter - search.n_steps, ftol=ftol, gtol=gtol)
        try:
            search.run(limits | dict(maxls=max_line_search))
        except _NothingBetter:
            search.reason, search.no_better = "stuck", True
        except _NoValue:
            if search.gradient is None:
                return None
            search.cut_short(max_iter)
    return search.outcome(ftol, exact_gradient)


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
    patience: int = PATIENCE,
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
    climb = _AscentState(objective, x, bounds, curvature, lacking, longest)
    if not _finite(climb.value, climb.gradient):
        return None
    reason: Reason | None = None
    while reason is None:
        step, promised = climb.newton_step()
        if promised <= gain:
            reason = "converged"
        elif climb.moved_by(step) and ended is not None and ended(climb.payload):
            reason = "asked"
        else:
            reason = climb.why_end(max_iter, patience)
    ends = np.clip(climb.x + climb.gradient, bounds[:, 0], bounds[:, 1])
    left, promised = float(np.max(np.abs(ends - climb.x), initial=0.0)), climb.newton_step()[1]
    return Summit(climb.x, climb.payload, reason, climb.n_steps, left, float(promised))


def _finite(value: float, gradient: np.ndarray) -> bool:
    return bool(np.isfinite(value) and np.all(np.isfinite(gradient)))


class _AscentState:
    """State of `ascend`: where it is, the curvature there, and how far steps may reach.

    `n_failed` counts steps in turn that led down, `n_level` evaluations without a gain.
    """

    def __init__(
        self,
        objective: Objective,
        x: np.ndarray,
        bounds: np.ndarray,
        curvature: np.ndarray,
        lacking: np.ndarray | None,
        longest: float,
    ) -> None:
        self.objective, self.bounds, self.longest = objective, bounds, longest
        self.curvature, self.exact = curvature, lacking is None
        self.lack = np.zeros_like(x) if lacking is None else lacking
        self.x, (self.value, self.gradient, self.payload) = x, self._at(x)
        self.share, self.reach, self.top = 1.0, 1.0, self.value
        self.n_steps, self.n_failed, self.n_level = 0, 0, 0

    def _at(self, x: np.ndarray) -> tuple[float, np.ndarray, Any]:
        value, gradient, payload = self.objective(x)
        return value, gradient + self.lack, payload

    def newton_step(self) -> tuple[np.ndarray, float]:
        """Return the step of the coordinates that are free, and the gain it promises."""
        low, high = self.bounds.T
        down, up = self.gradient < 0, self.gradient > 0
        free = np.flatnonzero(~(((self.x <= low) & down) | ((self.x >= high) & up)))
        step = np.zeros_like(self.x)
        if not len(free):
            return step, 0.0
        step[free] = np.linalg.solve(self.curvature[np.ix_(free, free)], self.gradient[free])
        promised = 0.5 * float(step @ self.gradient)
        return step / max(1.0, float(np.max(np.abs(step))) / self.longest), promised

    def moved_by(self, step: np.ndarray) -> bool:
        """Take a share of a step unless it leads down; learn from where it leads in any case."""
        trial = np.clip(self.x + self.share * step, self.bounds[:, 0], self.bounds[:, 1])
        value, gradient, payload = self._at(trial)
        finite = _finite(value, gradient)
        self.n_level += 1
        if finite:
            gradient = self._learned(trial - self.x, value, gradient)
        if not finite or value < self.value - _LEVEL:
            # a gradient that was corrected gives another step
            self.share *= 1.0 if finite and not self.exact else _SHARE
            self.reach = self.share if finite else self.reach
            self.n_failed += 1
            return False
        self.x, self.value, self.gradient, self.payload = trial, value, gradient, payload
        self.share = self.reach = min(1.0, _LONGER * self.reach)
        self.n_failed, self.n_steps = 0, self.n_steps + 1
        return True

    def why_end(self, max_iter: int, patience: int) -> Reason | None:
        """Return why a further step is not worth its while, None where it is."""
        if self.n_failed > _MOST_FAILURES:
            return "stuck"
        if self.n_steps >= max_iter and not self.n_failed:
            return "max_iter"
        return "converged" if self.n_level >= patience else None

    def _learned(self, moved: np.ndarray, value: float, gradient: np.ndarray) -> np.ndarray:
        """Correct the curvature, and gradients that lack something; return the one of a trial."""
        self.curvature = learned_curvature(self.curvature, moved, self.gradient - gradient)
        if not self.exact:
            mean, rise = 0.5 * (self.gradient + gradient), value - self.value
            more = _missed(self.curvature, moved, rise, mean)
            self.lack, self.gradient, gradient = (
                a + more for a in (self.lack, self.gradient, gradient)
            )
        if value > self.top + _LEVEL:
            self.top, self.n_level = value, 0
        return gradient


def _missed(
    curvature: np.ndarray, moved: np.ndarray, rise: float, gradient: np.ndarray
) -> np.ndarray:
    """Return the least that gradients lack, by the curvature, where the value rises so much.

    `gradient` is the mean of those at both ends of the step.
    """
    along = curvature @ moved
    return (rise - gradient @ moved) / (along @ moved) * along
