"""The search for the mode of an evidence, with its prior, in the hyperparameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import eigen_curvature
from .._engine.hyper import Evaluate, Node, ascend, minimise_where_finite
from .._engine.loop import SILENT, Monitor, Reason

__all__ = [
    "KEPT",
    "LEARNING_TOL",
    "TO_THE_MODE",
    "Accuracy",
    "LearningEnd",
    "ValueWithGradient",
    "curvature_at",
    "find_mode",
    "find_mode_from_rows",
    "or_refuse",
    "random_starts",
]

# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3


class Accuracy(NamedTuple):
    """Where a search ends, and how it steps; see `minimise_where_finite`.

    Relative changes of the evidence below 1e-6 are within the error of EP run to a residual of
    1e-3, and where evaluations are noisy, more of them in a line search cannot help. `gain` is what
    a search from near the mode may leave in nats, at first a thirtieth of a posterior sd; of a
    `rough` one, so is what a line search does not find.
    """

    ftol: float = 1e-6
    gtol: float = 1e-3
    first_step: float | None = None
    max_line_search: int = 20
    gain: float = 5e-4
    rough: bool = False


# Of a mode that predicts, and of one that only says where nodes lie.
LEARNING = Accuracy()
TO_THE_MODE = Accuracy(1e-4, 0.1, 1.0, 6, 0.05, True)


class ValueWithGradient:
    """Plan that comes to know a log evidence by `value_and_gradient`, and not without it."""

    value_and_gradient: Any

    def log_evidence(self, theta, fit, n_jobs):
        """Return log evidence at theta, EP run from the state of the fit."""
        return self.value_and_gradient(theta, fit, n_jobs)[0]


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


class _Climb:
    """A log density as the searches want it: from the best node so far, told of its steps.

    A point without node has the value minus infinity. The payload of a node is that of an
    iteration.
    """

    def __init__(self, evaluate: Evaluate, monitor: Monitor):
        self.evaluate, self.monitor = evaluate, monitor
        self.best: Node | None = None

    def __call__(self, phi):
        """Return value, gradient and node at phi (T,)."""
        node = self.evaluate(phi, self.best)
        if node is None:
            return -np.inf, np.full(len(phi), np.nan), None
        if self.best is None or node.objective > self.best.objective:
            self.best = node
        return node.objective, node.gradient, node

    def downwards(self, phi):
        """Return the same of minus the log density."""
        value, gradient, node = self(phi)
        return -value, -gradient, node

    def told(self, node):
        """Tell the monitor of the node that a step led to; return whether to stop."""
        self.monitor.begin("learning step")
        record = {"residual": node.residual, "log_evidence": node.log_evidence}
        return self.monitor.end(record, node.payload)


def random_starts(bounds, n_starts, rng):
    """Return starts (n_starts, p) drawn uniformly within finite log bounds."""
    # a kernel without free parameters has bounds of shape (0,)
    bounds = np.reshape(bounds, (-1, 2))
    if n_starts and not np.all(np.isfinite(bounds)):
        raise ValueError("n_restarts_optimizer needs finite bounds of all kernel parameters.")
    return rng.uniform(bounds[:, 0], bounds[:, 1], size=(n_starts, len(bounds)))


def find_mode(
    evaluate: Evaluate,
    phi,
    bounds,
    *,
    max_iter,
    starts=(),
    optimizer=None,
    monitor: Monitor = SILENT,
    accuracy=LEARNING,
) -> tuple[Node, LearningEnd] | None:
    """Return the `Node` at the mode from phi (T,), or from the best of several starts, and the end.

    None where there is no node to start from. Steps to points without node, or whose value or
    gradient is not finite, are cut short. Each of the further `starts` is run unwatched, then the
    best is polished as the run of `monitor`, one iteration a step, which it may stop. An
    `optimizer` is a function of the user that searches instead of L-BFGS-B.
    """
    if not len(phi):
        node = evaluate(phi, None)
        return None if node is None else (node, KEPT)
    climb = _Climb(evaluate, monitor)
    if optimizer is not None:
        return _by_function(optimizer, climb, phi, bounds, starts)

    def run(start, ended=None):
        return minimise_where_finite(
            climb.downwards,
            start,
            bounds,
            max_iter=max_iter,
            ftol=accuracy.ftol,
            gtol=accuracy.gtol,
            first_step=accuracy.first_step,
            negligible=0.01,  # a gain that is not missed if no better step is found: odds of 1 %
            tie=1e-10,
            ended=ended,
            max_line_search=accuracy.max_line_search,
            exact_gradient=not accuracy.rough,
        )

    runs = [run(t) for t in (phi, *starts)] if len(starts) else []
    runs = sorted((r for r in runs if r is not None), key=lambda r: r.value)
    found = run(runs[0].x if runs else phi, lambda best: climb.told(best.payload))
    if found is None:
        return None
    # a run without a step left nothing to polish: then the end is that of the run before
    reason = found.reason if found.n_steps or not runs else runs[0].reason
    return found.payload, LearningEnd(reason, found.n_steps, found.gradient)


def or_refuse(found):
    """Return what a search found, or raise a ValueError where it had nowhere to start from."""
    if found is None:
        raise ValueError("the evidence is not finite at the initial kernel: change its parameters.")
    return found


def find_mode_from_rows(
    evaluate_from: Callable[[Node], Evaluate],
    of_rows: Evaluate,
    share: float,
    phi,
    bounds,
    *,
    max_iter,
    starts=(),
    monitor: Monitor = SILENT,
    accuracy=LEARNING,
    exact_gradient=True,
):
    """Return the same from the mode of a share of the rows, for many rows: a few steps are left.

    `evaluate_from` takes the `Node` there and gives the evidence of all rows, of which each step
    costs 1 / share^3 times as much. Their curvature is about that of some of the rows, by
    differences of gradients, over the share.
    """
    options: dict[str, Any] = dict(max_iter=max_iter)
    ends = dict(ftol=max(1e-4, accuracy.ftol), gtol=max(1e-2, accuracy.gtol))
    coarse = accuracy._replace(**ends)
    found = find_mode(of_rows, phi, bounds, starts=starts, accuracy=coarse, **options)
    if found is None:
        return None
    below = found[0]
    difference = 0.1 if exact_gradient else 0.2
    curvature, lacking = curvature_at(of_rows, below, bounds, difference)
    climb = _Climb(evaluate_from(below), monitor)
    limits: dict[str, Any] = dict(gain=accuracy.gain, max_iter=max_iter, ended=climb.told)
    if not exact_gradient:
        # gradients that are not exact are off by as much as longer steps promise; what they lack
        # grows as the evidence itself: both come from rows in doubt
        start: Any = climb(below.phi)[2]
        growth = np.clip(start.log_evidence / below.log_evidence, 1.0, 1.0 / share)
        limits |= dict(patience=1, longest=0.5, lacking=lacking * growth)
    top = ascend(climb, below.phi, bounds, curvature / share, **limits)
    if top is None or top.reason == "stuck":
        options |= dict(monitor=monitor, accuracy=accuracy)
        return find_mode(climb.evaluate, below.phi, bounds, **options)
    return top.payload, LearningEnd(top.reason, top.n_steps, top.gradient)


def curvature_at(evaluate: Evaluate, node, bounds, difference=0.1):
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


def _by_function(optimizer, climb, phi, bounds, starts):
    """Let a function of the user search, from phi (T,) and further starts.

    It is called as scikit-learn calls it, `optimizer(obj_func, initial_theta, bounds)`, with
    ``obj_func(theta, eval_gradient=True)`` the negative evidence and its gradient, and returns the
    best theta with the value there. What it returns counts as converged, in one iteration.
    """

    def obj_func(theta, eval_gradient=True):
        value, gradient, _ = climb.downwards(np.array(theta, dtype=np.float64, ndmin=1))
        return (value, gradient) if eval_gradient else value

    found = []
    for start in (phi, *starts):
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
    node = or_refuse(climb(min(found, key=lambda pair: pair[0])[1])[2])
    climb.told(node)
    return node, LearningEnd("converged", 1, 0.0)
