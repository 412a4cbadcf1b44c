"""Searches for the mode of hyperparameters.

`minimise_where_finite` is scipy's L-BFGS-B for functions that have no value at some points;
`ascend` a few Newton steps for a log density whose every value is dear, from near its maximum with
a curvature that is about known. `search_mode` goes by the first, `search_from_rows` by the second
from the mode of some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from ..gaussian import eigen_curvature, learned_curvature
from ..loop import SILENT, FitWatch, Monitor, Reason, StepsOfPhase

if TYPE_CHECKING:
    from .nodes import Evaluate, Node, Nodes


# How often one search may be cut short at a point without a value, the relative length at which it
# gives up, and by how much its next first step is shorter than the one that led there.
_MOST_CUTS, _SHORTEST, _SHORTER = 50, 1e-12, 0.25
# Successive evaluations without a gain that counts after which a search ends, near the top or by
# inexact gradients: it would start again and again from points that differ by noise.
PATIENCE = 8
# What the status of scipy's search means; any other is a line search that found nothing better.
_REASONS: dict[int, Reason] = {0: "converged", 1: "max_iter"}


class Accuracy(NamedTuple):
    """Where a search ends, and how it steps.

    `ftol` and `gtol` are those of L-BFGS-B. `first_step` is the most that the first step is long:
    L-BFGS-B itself takes the whole gradient where all parameters are bounded, which may be far too
    long, and lead past the mode to a lower one. `max_line_search` bounds the evaluations of one
    line search. Of values that differ by less than the share `tie` the first one is kept, so that
    the choice does not hang on rounding errors.

    Relative changes of the evidence below 1e-6 are within the error of EP run to a residual of
    1e-3. Where evaluations are noisy, or the gradient is not exact, a longer line search finds
    nothing either. `gain` is what a search from near the mode may leave in nats; the default is
    about a thirtieth of a posterior sd.
    """

    ftol: float = 1e-6
    gtol: float = 1e-3
    first_step: float = 1.0
    max_line_search: int = 20
    gain: float = 5e-4
    exact_gradient: bool = True
    tie: float = 1e-10


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
    evaluations in turn that together gain no more than `negligible`. scipy's search is in units of
    a first step, and `known` its first point with value and gradient; `worst` is the worst value.
    """

    gradient: Any = None
    payload: Any = None
    failed: Any = None
    known: Any = None
    unit = 1.0
    worst = -np.inf

    def __init__(
        self,
        objective: Objective,
        x: np.ndarray,
        bounds: np.ndarray,
        accuracy: Accuracy,
        negligible: float,
        ended: Callable[[Any], bool] | None,
    ) -> None:
        self.objective, self.bounds, self.accuracy = objective, bounds, accuracy
        self.first_step, self.negligible, self.ended = accuracy.first_step, negligible, ended
        self.patience = np.inf if accuracy.exact_gradient else PATIENCE
        self.x, self.value = np.clip(x, *bounds.T), np.inf
        self.start, self.moved = self.x, np.zeros(len(x))
        self.reason: Reason | None = None
        self.n_steps, self.n_cut, self.no_better = 0, 0, False
        self._level, self._n_level = np.inf, 0

    def at(self, scaled: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient at a point in units, and keep the point if it is the best."""
        # only the start is taken from memory: a search judges noisy values by how they differ
        if self.known is not None and np.array_equal(scaled, self.known[0]):
            return self.known[1:]
        x = scaled * self.unit
        value, gradient, payload = self.objective(x)
        if not (np.isfinite(value) and np.all(np.isfinite(gradient))):
            self.failed = x.copy()
            raise _NoValue
        self.worst = max(self.worst, value)
        # what is rounding error has no sign: at a bound it would decide which parameters are free
        noise = self.accuracy.tie * (1.0 + abs(value))
        gradient = np.where(np.abs(gradient) < noise, 0.0, gradient)
        if value < self.value - noise:
            self.x, self.value, self.gradient, self.payload = x.copy(), value, gradient, payload
        if self.value < self._level - self.negligible:
            self._level, self._n_level = self.value, 0
        else:
            self._n_level += 1
        if self._n_level >= self.patience:
            raise _NothingBetter
        return value, gradient * self.unit

    def begin(self) -> None:
        """Begin a search of scipy's at the best point, with a first step of a length."""
        self.start, self.unit = self.x, 1.0
        norm = np.linalg.norm(self.gradient)
        if norm > 0:
            self.unit = float(np.sqrt(min(1.0, float(self.first_step / norm))))
        self.known = self.x / self.unit, self.value, self.gradient * self.unit

    def end(self, status: int) -> None:
        """Take notice of the status with which scipy's search ended."""
        self.no_better = self.reason is None and status not in _REASONS
        self.reason = self.reason or _REASONS.get(status, "stuck")

    def stepped(self, intermediate_result: Any) -> None:
        """Take notice of a step, and end where somebody asks to."""
        self.n_steps += 1
        self.moved, self.start = np.abs(self.x - self.start), self.x
        if self.ended is not None and self.ended(self):
            self.reason = "asked"
            raise StopIteration

    def cut_short(self, max_iter: int) -> None:
        """Make the next first step shorter than the one that led to no value."""
        self.n_cut += 1
        length = _SHORTER * float(np.linalg.norm(self.failed - self.x))
        # without a box L-BFGS-B starts with a step as long as the unit
        boxed = np.all(np.isfinite(self.bounds))
        self.first_step = length if boxed else float(np.linalg.norm(self.gradient)) * length**2
        if self.n_steps >= max_iter:
            self.reason = "max_iter"
        elif self.n_cut > _MOST_CUTS or length <= _SHORTEST * (1.0 + np.linalg.norm(self.x)):
            self.reason = "stuck"

    def outcome(self) -> Search:
        """Return the `Search`; one that found nothing better has converged if little is left."""
        projected = np.abs(np.clip(self.x - self.gradient, *self.bounds.T) - self.x)
        reason = self.reason or "stuck"
        if self.no_better:
            enough = max(self.accuracy.ftol * max(abs(self.value), 1.0), self.negligible)
            found_all = projected @ self.moved <= enough or not self.accuracy.exact_gradient
            flat = self.worst - self.value <= enough
            reason = "converged" if flat or (self.n_steps and found_all) else "stuck"
        left = float(np.max(projected, initial=0.0))
        return Search(self.x, self.value, self.payload, reason, self.n_steps, left, self.n_cut)


def minimise_where_finite(
    objective: Objective,
    x: np.ndarray,
    bounds: np.ndarray,
    accuracy: Accuracy,
    *,
    max_iter: int,
    negligible: float = 0.0,
    ended: Callable[[Any], bool] | None = None,
) -> Search | None:
    """Minimise by L-BFGS-B a function that has no value at some points.

    scipy's line search interpolates between values: at an infinite one it gives up and reports
    convergence. So a search that meets one ends there, and another starts from the best point so
    far, with a first step of a quarter of the length of the one that led too far.

    `objective` maps x (p,) to (value, gradient, payload); a value or gradient that is not finite
    means none, and None is returned where the first point has none. `bounds` is (p, 2), `max_iter`
    counts accepted steps. `ended` is told of the best point after each step, as an object with `x`,
    `value` and `payload`; the search ends where it returns True.

    It has converged where a step lowers the value by less than the share `ftol` of the `Accuracy`,
    or at `gtol` for the largest entry of the projected gradient. Where a line search finds nothing
    better, "little" is what `ftol` asks or `negligible`, in units of the value. The search has then
    converged if all values were within little of the best. After a step it has also converged if
    another one as long would gain little by the gradient, or if the gradient is not exact.
    """
    search = _BoxSearch(objective, x, bounds, accuracy, negligible, ended)
    while search.reason is None:
        try:
            if search.known is None:
                search.at(search.x)
            search.begin()
            limits = dict(maxiter=max_iter - search.n_steps, maxls=accuracy.max_line_search)
            options = limits | dict(ftol=accuracy.ftol, gtol=accuracy.gtol * search.unit)
            own: Any = dict(bounds=bounds / search.unit, callback=search.stepped, options=options)
            x = search.known[0]
            search.end(minimize(search.at, x, jac=True, method="L-BFGS-B", **own).status)
        except _NothingBetter:
            search.reason, search.no_better = "stuck", True
        except _NoValue:
            if search.gradient is None:
                return None
            search.cut_short(max_iter)
    return search.outcome()


class LearningEnd(NamedTuple):
    """Why learning ended, after how many steps, and the largest entry of the gradient left there.

    The gradient is that of the evidence with its prior in the coordinates of the search, without
    what only points out of the bounds; curvature is about minus the Hessian there, None where the
    search does not know it.
    """

    reason: Reason
    n_steps: int
    gradient: float
    curvature: np.ndarray | None = None


# Where nothing is learned.
KEPT = LearningEnd("converged", 0, 0.0)


# Log density that a step may lose and still be taken: the error of inexact values.
_LEVEL = 1e-3
# Longest step in a coordinate. Share of a step that is left where it led down, and factor by which
# the next may be longer where it led up. Steps down in succession after which the search is stuck.
_LONGEST, _SHARE, _LONGER, _MOST_FAILURES = 2.0, 0.3, 2.0, 6


def ascend(
    evaluate: Evaluate,
    x: np.ndarray,
    bounds: np.ndarray,
    curvature: np.ndarray,
    *,
    gain: float,
    max_iter: int,
    near: Node | None = None,
    lacking: np.ndarray | None = None,
    patience: int = PATIENCE,
    longest: float = _LONGEST,
    ended: Callable[[Node], bool] | None = None,
) -> tuple[Node, LearningEnd] | None:
    """Maximise a log density from near its maximum by a few quasi-Newton steps.

    Returns the `Node` where it ended, and how, or None if the first point has no value. `evaluate`
    gives the node at x (p,) from the best one so far, at first `near`, which may be of another
    density. `curvature` (p, p), positive definite, is about the negative Hessian, and corrected by
    BFGS on the way. The search has converged where the quadratic model promises less than `gain` by
    a further step, in units of the value, or where `patience` successive evaluations gain nothing.
    `ended` is told of each node that a step led to and stops the search by returning True.
    Coordinates at a bound (p, 2) that want to leave it stay; the first step is no longer than
    `longest` in any of them, and after each that is taken the next may be twice as long.

    Gradients may have an error that changes slowly: `lacking` (p,) is about what has to be added to
    them, None for exact ones. The rise of the value over a step corrects `lacking` along that step.
    After a step that led down the next is at most half as long.
    """
    start = evaluate(x, near)
    if start is None or not _finite(start):
        return None
    climb = _AscentState(start, x, bounds, curvature, lacking, longest)
    reason: Reason | None = None
    while reason is None:
        step, promised = climb.newton_step()
        if promised <= gain:
            reason = "converged"
            break
        trial = climb.trial(step)
        if climb.moved_to(trial, evaluate(trial, climb.best)) and ended and ended(climb.node):
            reason = "asked"
        else:
            reason = climb.why_end(max_iter, patience)
    ends = np.clip(climb.x + climb.gradient, bounds[:, 0], bounds[:, 1])
    left = float(np.max(np.abs(ends - climb.x), initial=0.0))
    return climb.node, LearningEnd(reason, climb.n_steps, left, climb.curvature)


def _finite(node: Node) -> bool:
    return bool(np.isfinite(node.objective) and np.all(np.isfinite(node.gradient)))


class _AscentState:
    """State of `ascend`: where it is, the curvature there, and how far steps may reach.

    `gradient` is that of `node` with what it lacks, `best` the highest node of all that were tried.
    `n_failed` counts steps in turn that led down, `n_level` evaluations without a gain.
    """

    def __init__(
        self,
        start: Node,
        x: np.ndarray,
        bounds: np.ndarray,
        curvature: np.ndarray,
        lacking: np.ndarray | None,
        longest: float,
    ) -> None:
        self.bounds, self.longest = bounds, longest
        self.curvature, self.exact = curvature, lacking is None
        self.lack = np.zeros_like(x) if lacking is None else lacking
        self.x, self.node, self.best = x, start, start
        self.gradient, self.top = start.gradient + self.lack, start.objective
        self.share, self.reach = 1.0, 1.0
        self.n_steps, self.n_failed, self.n_level = 0, 0, 0

    def newton_step(self) -> tuple[np.ndarray, float]:
        """Return the step of the coordinates that are free, and the gain it promises."""
        low, high = self.bounds.T
        down, up = self.gradient < 0, self.gradient > 0
        free = np.flatnonzero(~(((self.x <= low) & down) | ((self.x >= high) & up)))
        step = np.zeros_like(self.x)
        step[free] = np.linalg.solve(self.curvature[np.ix_(free, free)], self.gradient[free])
        promised = 0.5 * float(step @ self.gradient)
        return step / max(1.0, float(np.max(np.abs(step))) / self.longest), promised

    def trial(self, step: np.ndarray) -> np.ndarray:
        """Return where a share of a step leads."""
        return np.clip(self.x + self.share * step, self.bounds[:, 0], self.bounds[:, 1])

    def moved_to(self, trial: np.ndarray, node: Node | None) -> bool:
        """Take a step unless it leads down, or to no node; learn from where it leads in any case.

        Returns whether it was taken.
        """
        self.n_level += 1
        if node is not None and node.objective > self.best.objective:
            self.best = node
        if node is None or not _finite(node):
            self.share *= _SHARE
            self.n_failed += 1
            return False
        gradient = self._learned(trial - self.x, node)
        if node.objective < self.node.objective - _LEVEL:
            if self.exact:
                self.share *= _SHARE
            else:  # the gradient was corrected, and gives another step, but half as long at most
                self.longest = 0.5 * float(np.max(np.abs(trial - self.x)))
            self.n_failed += 1
            self.reach = self.share
            return False
        self.x, self.node, self.gradient = trial, node, gradient
        self.share = self.reach = min(1.0, _LONGER * self.reach)
        self.longest = min(_LONGEST, _LONGER * self.longest)
        self.n_failed, self.n_steps = 0, self.n_steps + 1
        return True

    def why_end(self, max_iter: int, patience: int) -> Reason | None:
        """Return why a further step is not worth its while, None where it is."""
        if self.n_failed > _MOST_FAILURES:
            return "stuck"
        if self.n_steps >= max_iter and not self.n_failed:
            return "max_iter"
        return "converged" if self.n_level >= patience else None

    def _learned(self, moved: np.ndarray, node: Node) -> np.ndarray:
        """Correct the curvature, and gradients that lack something; return that at a node."""
        gradient = node.gradient + self.lack
        self.curvature = learned_curvature(self.curvature, moved, self.gradient - gradient)
        if not self.exact:
            mean, rise = 0.5 * (self.gradient + gradient), node.objective - self.node.objective
            more = _missed(self.curvature, moved, rise, mean)
            self.lack, self.gradient, gradient = (
                a + more for a in (self.lack, self.gradient, gradient)
            )
        if node.objective > self.top + _LEVEL:
            self.top, self.n_level = node.objective, 0
        return gradient


def _missed(
    curvature: np.ndarray, moved: np.ndarray, rise: float, gradient: np.ndarray
) -> np.ndarray:
    """Return the least that gradients lack, by the curvature, where the value rises so much.

    `gradient` is the mean of those at both ends of the step.
    """
    along = curvature @ moved
    return (rise - gradient @ moved) / (along @ moved) * along


# For a mode that only says where nodes lie: a search from anywhere, and one from near it.
_ROUGH = Accuracy(2.2204460492503131e-09, 0.1, 1.0, 6, exact_gradient=False, tie=0.0)
TO_THE_MODE = Accuracy(1e-4, 0.1, 1.0, 6, 0.05, False)
# Gain in nats, one per cent of the posterior density, below which a search that finds no better
# step has converged. Where values are coarser than that: 61 searches on generated sets of 90 and
# 350 rows are the same with 0 and with .1.
_NEGLIGIBLE = 0.01


class NegativeDensity:
    """The negative of a log density, each `Node` from the best so far, at first from `near`.

    A point without node has the value infinity.
    """

    def __init__(self, evaluate: Evaluate, near: Node | None = None) -> None:
        self.evaluate, self.best = evaluate, near

    def __call__(self, phi: np.ndarray) -> tuple[float, np.ndarray, Node | None]:
        """Return value, gradient and node at phi (T,)."""
        node = self.evaluate(phi, self.best)
        if node is None:
            return np.inf, np.full(len(phi), np.nan), None
        if self.best is None or node.objective > self.best.objective:
            self.best = node
        return -node.objective, -node.gradient, node


def told(monitor: Monitor, node: Node) -> bool:
    """Tell a monitor of the node that a step led to; return whether to stop."""
    monitor.begin("learning step")
    record = {"residual": node.residual, "log_evidence": node.log_evidence}
    return monitor.end(record, node.payload)


def find_mode(
    evaluate: Evaluate, phi: np.ndarray, bounds: np.ndarray, near: Node | None = None
) -> Node | None:
    """Return the `Node` at the mode, by L-BFGS-B from phi (T,) within bounds (T, 2).

    None where there is no posterior at phi. Each evaluation starts from the best node so far.
    """
    found = search_mode(evaluate, phi, bounds, _ROUGH, max_iter=25, near=near)
    return None if found is None else found[0]


def search_mode(
    evaluate: Evaluate,
    phi: np.ndarray,
    bounds: np.ndarray,
    accuracy: Accuracy,
    *,
    max_iter: int,
    starts: Sequence[np.ndarray] = (),
    monitor: Monitor = SILENT,
    near: Node | None = None,
) -> tuple[Node, LearningEnd] | None:
    """Return the same from phi (T,), or from the best of several starts, and how it ended.

    Steps to points without node, or whose value or gradient is not finite, are cut short. Each of
    the further `starts` is run unwatched, then the best is polished as the run of `monitor`, one
    iteration a step, which it may stop.
    """
    if not len(phi):
        node = evaluate(phi, near)
        return node and (node, KEPT)
    objective = NegativeDensity(evaluate, near)
    limits: Any = dict(accuracy=accuracy, max_iter=max_iter, negligible=_NEGLIGIBLE)
    run: Any = partial(minimise_where_finite, objective, bounds=bounds, **limits)
    runs = filter(None, map(run, (phi, *starts) if len(starts) else ()))
    first = min(runs, key=lambda r: r.value, default=None)
    found = run(first.x if first else phi, ended=lambda best: told(monitor, best.payload))
    if found is None:
        return None
    # a run without a step left nothing to polish: then the end is that of the run before
    reason = found.reason if found.n_steps or not first else first.reason
    return found.payload, LearningEnd(reason, found.n_steps, found.gradient)


def search_from_rows(
    nodes: Nodes,
    rows: np.ndarray,
    share: float,
    phi: np.ndarray,
    accuracy: Accuracy,
    *,
    max_iter: int,
    starts: Sequence[np.ndarray] = (),
    monitor: Monitor = SILENT,
    watch: FitWatch = SILENT,
    exact_gradient: bool = True,
    patient: float = np.inf,
) -> tuple[Nodes, Node, LearningEnd] | None:
    """Return the same, after the `Nodes` it is of, from the mode of some rows.

    `rows` are a `share` of all. A few steps with all rows follow, each of which costs 1 / share^3
    times as much. Their curvature starts as that of some of the rows, by differences of gradients,
    over the share. With gradients that are not exact the search ends after about 2 `patient`
    successive failures, or at the first one where `patient` is below one.
    """
    ends: dict[str, Any] = dict(ftol=max(1e-4, accuracy.ftol), gtol=max(1e-2, accuracy.gtol))
    if not exact_gradient:
        ends |= dict(ftol=1e-3, max_line_search=2)
    of_rows, bounds = nodes.of_rows(rows).evaluate, nodes.space.bounds
    with watch.phase("some rows first") as steps:
        own: Any = dict(max_iter=max_iter, starts=starts, monitor=StepsOfPhase(steps))
        found = search_mode(of_rows, phi, bounds, accuracy._replace(**ends), **own)
    last: Any = dict(max_iter=max_iter, monitor=monitor)
    if found is None:  # EP may settle on all rows where it does not on some
        found = search_mode(nodes.evaluate, phi, bounds, accuracy, starts=starts, **last)
        return found and (nodes, *found)
    below, near = found[0], None
    curvature, lacking = curvature_at(of_rows, below, bounds, 0.1 if exact_gradient else 0.2)
    nodes = nodes.from_rows(rows, below)
    ended = partial(told, monitor)
    limits: dict[str, Any] = dict(gain=accuracy.gain, max_iter=max_iter, ended=ended)
    if not exact_gradient and patient >= 1.0:
        tries = int(min(PATIENCE, np.ceil(2.0 * patient)))
        limits |= dict(gain=max(0.1, accuracy.gain), lacking=lacking / share, patience=tries)
    elif not exact_gradient:
        # gradients that are not exact are off by as much as a longer first step promises. Steps
        # grow as long as they lead up, for some rows may end at the bound of the variance, far from
        # the mode of all. What gradients lack grows as the evidence: both come from rows in doubt
        near = nodes.evaluate(below.phi, None)
        start = np.nan if near is None else near.log_evidence
        growth = np.clip(start / below.log_evidence, 1.0, 1.0 / share)
        limits |= dict(patience=1, longest=0.5, lacking=lacking * growth, near=near)
    top = ascend(nodes.evaluate, below.phi, bounds, curvature / share, **limits)
    if top is not None and top[1].reason != "stuck":
        return nodes, *top
    # where the mode of some is no place for all, the search begins anew
    found = search_mode(nodes.evaluate, below.phi, bounds, accuracy, **last)
    found = found or search_mode(nodes.evaluate, phi, bounds, accuracy, starts=starts, **last)
    return found and (nodes, *found)


def curvature_at(
    evaluate: Evaluate, node: Node, bounds: np.ndarray, difference: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Return the negative Hessian (T, T) at a node and what gradients lack (T,), by differences.

    Directions that are nearly flat count as known to a few units.
    """
    steps = np.where(node.phi + difference <= bounds[:, 1], difference, -difference)
    beside = [evaluate(node.phi + row, node) for row in np.diag(steps)]
    gradients = [np.full(len(steps), np.nan) if n is None else n.gradient for n in beside]
    rises = np.array([np.nan if n is None else n.objective - node.objective for n in beside])
    hessian = [(node.gradient - g) / h for g, h in zip(gradients, steps, strict=True)]
    hessian = np.nan_to_num(np.array(hessian), posinf=0.0, neginf=0.0)
    values, vectors = eigen_curvature(hessian, 0.05)
    lacking = rises / steps - 0.5 * (np.diagonal(gradients) + node.gradient)
    return (vectors * values) @ vectors.T, np.nan_to_num(lacking)
