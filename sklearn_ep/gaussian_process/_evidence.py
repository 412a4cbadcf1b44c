"""Maximise an evidence in its hyperparameters with scipy's L-BFGS-B."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import eigen_curvature
from .._engine.hyper import Evaluate, Node, ascend, minimise_where_finite
from .._engine.loop import SILENT, Monitor, Reason, Silent

__all__ = [
    "INEXACT_DIFFERENCE",
    "KEPT",
    "LEARNING_TOL",
    "TOWARDS_THE_MODE",
    "EvidencePoint",
    "GivesUp",
    "Learned",
    "LearningEnd",
    "climb_from_rows",
    "climb_to_mode",
    "curvature_at_node",
    "maximise_by",
    "maximise_evidence",
    "node_at_mode",
    "random_starts",
    "ValueWithGradient",
]

# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3
# Relative difference of evidences below which two points count as equal.
TIE = 1e-10
# Gain of log evidence that is not missed where no better step is found: odds of one per cent.
NEGLIGIBLE = 0.01
# A mode that only says where nodes lie.
_TO_THE_MODE: dict[str, Any] = dict(
    ftol=1e-4, gtol=0.1, first_step=1.0, max_line_search=6, exact_gradient=False
)
# The same by inexact gradients with some of the rows, which differences of values improve on.
TOWARDS_THE_MODE: dict[str, Any] = dict(ftol=2e-3, max_line_search=2)
# Accuracy of learning on some of the rows, the difference in theta that tells the curvature there,
# the least that counts, and the gain of log evidence on all rows that is left: a thirtieth of a
# posterior sd.
_ROUGH, _DIFFERENCE, _GAIN = dict(ftol=1e-4, gtol=1e-2), 0.1, 5e-4
_FLATTEST = 0.05
# The same of several classes, whose gradients are off by up to twenty nats a unit where latent
# values are large.
_INEXACT_ROUGH = dict(ftol=1e-3, gtol=1e-2, max_line_search=2)
INEXACT_DIFFERENCE, _INEXACT_GAIN, _INEXACT_PATIENCE = 0.2, 0.1, 2
# Longest step to a mode by them: of six classes with 300 rows longer ones fail in turn from where a
# third of the rows have their mode, and twelve nats are left.
_INEXACT_LONGEST = 0.7
# Gain that is left, patience and longest step, where an evaluation takes many seconds: gradients
# are off by as much as longer steps promise. What they lack grows as the evidence itself, as both
# come from rows whose class is in doubt: of digits with 1257 rows 1.6 times from a third of them,
# and three times as much would promise ten nats where the mode is.
_MANY_ROWS, _DEAR = 1000, dict(gain=0.4, patience=1, longest=0.5)
# Changes by sweeps of a log evidence, and nats, by which it has to be below another to be given up.
_CHANGES_BELOW, _NATS_BELOW = 3.0, 1.0
# The same of a mode that only says where nodes lie.
_GAIN_TO_THE_MODE = 0.05


class ValueWithGradient:
    """Plan that comes to know a log evidence by `value_and_gradient`, and not without it."""

    value_and_gradient: Any

    def log_evidence(self, theta, fit, n_jobs):
        """Return log evidence at theta, EP run from the state of the fit."""
        return self.value_and_gradient(theta, fit, n_jobs)[0]


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


class GivesUp(Silent):
    """Monitor of EP at a kernel that stops where the log evidence stays below that of another."""

    def __init__(self, other):
        self.other, self._before = other, -np.inf

    def end(self, record, payload):
        """Return whether the evidence is further below than further sweeps can bring it."""
        value = record["log_evidence"]
        change, self._before = abs(value - self._before), value
        return self.other - value > max(_CHANGES_BELOW * change, _NATS_BELOW)


def random_starts(bounds, n_starts, rng):
    """Return starts (n_starts, p) drawn uniformly within finite log bounds."""
    # a kernel without free parameters has bounds of shape (0,)
    bounds = np.reshape(bounds, (-1, 2))
    if n_starts and not np.all(np.isfinite(bounds)):
        raise ValueError("n_restarts_optimizer needs finite bounds of all kernel parameters.")
    return rng.uniform(bounds[:, 0], bounds[:, 1], size=(n_starts, len(bounds)))


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


def climb_from_rows(
    evaluate_from: Callable[[EvidencePoint], Callable[[np.ndarray], EvidencePoint]],
    of_rows: Callable[..., EvidencePoint],
    share: float,
    n_rows: int,
    theta,
    bounds,
    *,
    max_iter,
    starts=(),
    monitor: Monitor = SILENT,
    **search,
) -> Learned:
    """Maximise the evidence of all rows from where that of some of them has its maximum.

    `of_rows` is the evidence of a `share` of the `n_rows` rows, found to the end where `whole` is
    asked for, `evaluate_from` that of all from
    the point where the first search ends; `search` is what `maximise_evidence` takes there beside
    the accuracy. Its curvature over the share is about that of all rows, and so is what gradients
    lack that are not exact, or less where rows are many: a few steps are left, of which each costs
    1 / share^3 times as much.
    """
    exact = search.get("exact_gradient", True)
    rough = search | dict(max_iter=max_iter, starts=starts) | (_ROUGH if exact else _INEXACT_ROUGH)
    first = maximise_evidence(of_rows, theta, bounds, **rough)
    evaluate = evaluate_from(first.point)
    start = evaluate(first.theta)
    difference = _DIFFERENCE if exact else INEXACT_DIFFERENCE
    curvature, lacking = _curvature(of_rows, first, bounds, difference)

    def objective(t):
        point = start if np.array_equal(t, first.theta) else evaluate(t)
        return point.objective, point.gradient, point

    def told(point):
        monitor.begin("learning step")
        record = {"residual": point.residual, "log_evidence": point.value}
        return monitor.end(record, point.payload)

    options: dict[str, Any] = dict(gain=_GAIN, max_iter=max_iter, ended=told)
    if not exact:
        options |= dict(gain=_INEXACT_GAIN, lacking=lacking / share)
        if n_rows > _MANY_ROWS:
            growth = np.clip(start.value / first.point.value, 1.0, 1.0 / share)
            options |= _DEAR | dict(lacking=lacking * growth)
    found = ascend(objective, first.theta, bounds, curvature / share, **options)
    if found is None or found.reason == "stuck":
        near = search | dict(first_step=_DIFFERENCE, max_iter=max_iter, monitor=monitor)
        return maximise_evidence(evaluate, theta if found is None else found.x, bounds, **near)
    return Learned(found.x, found.payload, LearningEnd(found.reason, found.n_steps, found.gradient))


def _curvature(evaluate, learned, bounds, difference):
    """Return the negative Hessian (p, p) at what was learned, and what gradients lack there (p,).

    By differences of gradients and of values. Directions that are nearly flat count as known to a
    few units.
    """
    top, steps = learned.point, _differences(learned.theta, bounds, difference)
    points = [evaluate(learned.theta + row, whole=True) for row in np.diag(steps)]
    gradients = [point.gradient for point in points]
    values = np.array([point.objective for point in points])
    lacking = _lacking(top.objective, top.gradient, values, gradients, steps)
    return _curvature_of(top.gradient, gradients, steps), lacking


def _differences(x, bounds, size=_DIFFERENCE):
    """Return the steps (p,) of differences at x, backwards where the upper bound is near."""
    return np.where(x + size <= bounds[:, 1], size, -size)


def _curvature_of(gradient, gradients, steps):
    """Return the curvature (p, p) from the gradient at a point and those a step away."""
    hessian = [(gradient - g) / h for g, h in zip(gradients, steps, strict=True)]
    hessian = np.nan_to_num(np.array(hessian), posinf=0.0, neginf=0.0)
    values, vectors = eigen_curvature(hessian, _FLATTEST)
    return (vectors * values) @ vectors.T


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


def node_at_mode(
    evaluate: Evaluate,
    phi: np.ndarray,
    bounds: np.ndarray,
    told: Callable[[Node], tuple],
    *,
    max_iter: int,
    starts=(),
    monitor: Monitor = SILENT,
    **search,
) -> tuple[Node, LearningEnd] | None:
    """Return the `Node` at the mode from phi (T,), and how the search ended.

    None where there is no node at phi. `told` gives the payload of which the monitor is told; the
    other arguments are those of `averaging.find_mode` and of `maximise_evidence`, `search` what
    differs from a coarse one: the mode only says where nodes lie.
    """
    first = evaluate(phi, None)
    if first is None:
        return None
    best: Node = first

    def point(x):
        nonlocal best
        node = first if np.array_equal(x, first.phi) else evaluate(x, best)
        if node is None:
            return EvidencePoint(-np.inf, np.full(len(x), np.nan), np.inf, None)
        if node.objective > best.objective:
            best = node
        payload = (*told(node), node)
        own = node.log_evidence, node.gradient, node.residual
        return EvidencePoint(*own, payload, node.log_prior)

    settings = _TO_THE_MODE | search | dict(max_iter=max_iter, starts=starts)
    learned = maximise_evidence(point, phi, bounds, monitor=monitor, **settings)
    return learned.point.payload[-1], learned.end


def curvature_at_node(
    evaluate: Evaluate, node: Node, bounds: np.ndarray, difference: float = _DIFFERENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return the negative Hessian (T, T) of the log density at a node, and what gradients lack.

    By differences of gradients and of values.
    """
    steps = _differences(node.phi, bounds, difference)
    found = [evaluate(node.phi + row, node) for row in np.diag(steps)]
    gradients = [np.full(len(node.phi), np.nan) if n is None else n.gradient for n in found]
    values = np.array([np.nan if n is None else n.objective for n in found])
    lacking = _lacking(node.objective, node.gradient, values, gradients, steps)
    return _curvature_of(node.gradient, gradients, steps), np.nan_to_num(lacking)


def _lacking(value, gradient, values, gradients, steps):
    """Return what gradients lack (p,), by how the value rises a step away in each coordinate."""
    return (values - value) / steps - 0.5 * (np.diagonal(gradients) + gradient)


def climb_to_mode(
    evaluate: Evaluate,
    phi: np.ndarray,
    bounds: np.ndarray,
    curvature: np.ndarray,
    lacking: np.ndarray | None,
    told: Callable[[Node], tuple],
    max_iter: int,
    monitor: Monitor = SILENT,
) -> tuple[Node, LearningEnd] | None:
    """Return the same as `node_at_mode` from near the mode, where the curvature is about known.

    None where there is no node at phi, or where no further step leads up.
    """
    best: Node | None = None

    def point(x):
        nonlocal best
        node = evaluate(x, best)
        if node is None:
            return -np.inf, np.full(len(x), np.nan), None
        if best is None or node.objective > best.objective:
            best = node
        return node.objective, node.gradient, node

    def ended(node):
        monitor.begin("learning step")
        record = {"residual": node.residual, "log_evidence": node.log_evidence}
        return monitor.end(record, told(node))

    options: dict[str, Any] = dict(gain=_GAIN_TO_THE_MODE, max_iter=max_iter, ended=ended)
    if lacking is not None:
        options |= dict(lacking=lacking, patience=_INEXACT_PATIENCE, longest=_INEXACT_LONGEST)
    found = ascend(point, phi, bounds, curvature, **options)
    if found is None or found.reason == "stuck":
        return None
    return found.payload, LearningEnd(found.reason, found.n_steps, found.gradient)
