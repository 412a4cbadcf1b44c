"""Spaces of hyperparameters, nodes of a problem in them, and the search for the mode.

A space maps coordinates phi (T,) to the `point` where a problem is evaluated, and the gradient
there back to phi; it has `names`, `bounds` (T, 2), the `log_prior` of phi with its gradient, and
the spread `s` that the log lengths have about their mean. A problem does nothing but run EP at a
point: `at(point, near, slopes)` from what a neighbour keeps gives what a node keeps, or None.

Of a constant times RBF or Matern, which has one variance and one length scale a column, averages
run over the logs of the variance and of the geometric mean of the lengths.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from .._engine.gaussian import ImproperPosterior, eigen_curvature
from .._engine.hyper import PATIENCE, Evaluate, Node, NormalPrior, ascend, minimise_where_finite
from .._engine.likelihoods import PROBIT_SLOPE
from .._engine.loop import SILENT, FitWatch, Monitor, Reason, StepsOfPhase
from ._kernels import (
    constant_and_stationary,
    n_lengths,
)
from ._limits import LIMITS

_NAMES = ("log_variance", "log_length_scale")


def scale_prior(factor, root_variance, variance_spread, length_spread=1.0):
    """Return the `NormalPrior` for a link and for columns of a root of the total variance.

    Log-normal, and of no data set in particular: a latent function may be flat or sure of itself,
    and is about as smooth as the rows are wide. The median of the variance is four times the noise
    of the link; a link whose noise is not known counts as a probit.
    """
    slope = getattr(factor, "logistic_slope", None) or PROBIT_SLOPE
    centre = np.log([4.0 * (PROBIT_SLOPE / slope) ** 2, root_variance])
    return NormalPrior(centre, np.array([variance_spread, length_spread]))


def kernel_prior(kernel, factor, root_variance, joint=False):
    """Return the `NormalPrior` of variance and length for a kernel, a link and the columns.

    With a length for each column the variance is as free again, where wide classes that a few
    columns separate are common (log loss of crabs .099 after .110, of thyroid .070 after .073).
    Of classes that are fitted jointly both are nearly flat: the evidence knows them, and near the
    modes of separable classes variances are in the hundreds.
    """
    if joint:
        return scale_prior(factor, root_variance, 6.0, 2.0)
    several = len(KernelScales.at(kernel, kernel.theta).lengths) > 1
    return scale_prior(factor, root_variance, 2.0 if several else 1.5)


def wants_average(estimator, n_rows, excluding, sharp=False):
    """Return whether a fit averages over hyperparameters.

    `excluding` are the settings of the estimator that leave only the mode; a UserWarning names
    them where the average was asked for. Where the evidence is `sharp`, it has to be.
    """
    if estimator.hyperparameters == "mode":
        return False
    if excluding and estimator.hyperparameters == "integrate":
        warnings.warn(
            "hyperparameters='integrate' does nothing with " + " and ".join(excluding) + ": the "
            "mode is used.",
            UserWarning,
            stacklevel=4,
        )
    if excluding or estimator.hyperparameters == "integrate":
        return not excluding
    return n_rows <= LIMITS.averaged and not sharp


def n_length_scales(kernel):
    """Return the number of lengths of a constant times a stationary kernel, 0 of others."""
    split = constant_and_stationary(kernel)
    return 0 if split is None else len(np.atleast_1d(split[1].length_scale))


def kernel_settings(kernel):
    """Return settings of a kernel -> whether they leave only the mode."""
    lengths = n_length_scales(kernel)
    return {
        f"kernel={kernel}": lengths == 0,
        "a kernel without free parameters": kernel.n_dims == 0,
        f"more than {LIMITS.lengths} length scales": lengths > LIMITS.lengths,
    }


@dataclass(frozen=True)
class ThetaSpace:
    """All parameters of a kernel, as in ``kernel.theta``, under a flat prior."""

    kernel: Kernel
    s = 0.0

    @property
    def bounds(self):
        """Bounds (p, 2)."""
        return np.reshape(self.kernel.bounds, (-1, 2))

    def point(self, theta):
        """Return theta itself, as coordinates and as kernel parameters."""
        return theta

    phi = slopes = point

    def log_prior(self, theta):
        """Return a flat log density and its gradient."""
        return 0.0, 0.0


@dataclass(frozen=True)
class KernelScales:
    """The log variance and the log geometric mean of the lengths of a kernel, as a vector phi.

    What the kernel keeps fixed is not in phi, whose length T is at most two. `ratios` are the logs
    of the free lengths less their mean, `s` the spread of their prior; `both` is the `NormalPrior`
    of variance and length, None for a flat one.
    """

    kernel: Kernel
    ratios: np.ndarray
    both: NormalPrior | None = None
    s: float = 0.0

    @classmethod
    def at(cls, kernel, theta, *more):
        """Return the scales that keep the ratios of the lengths at kernel parameters (p,)."""
        lengths = theta[_places(kernel)[1]]
        return cls(kernel, lengths - lengths.mean() if len(lengths) else lengths, *more)

    @cached_property
    def variance(self):
        """Where the variance is in theta, at most one place."""
        return _places(self.kernel)[0]

    @cached_property
    def lengths(self):
        """Where the lengths are in theta."""
        return _places(self.kernel)[1]

    @property
    def kept(self):
        """Which of variance and length phi has, as indices."""
        return [i for i, places in enumerate((self.variance, self.lengths)) if len(places)]

    @property
    def names(self):
        """What phi consists of."""
        return tuple(_NAMES[i] for i in self.kept)

    def phi(self, theta):
        """Return the vector (T,) of kernel parameters (p,)."""
        mean = [theta[self.lengths].mean()] if len(self.lengths) else []
        return np.append(theta[self.variance], mean)

    def point(self, phi):
        """Return the kernel parameters (p,) of a vector."""
        theta = np.empty(len(self.variance) + len(self.lengths))
        theta[self.variance] = phi[: len(self.variance)]
        if len(self.lengths):
            theta[self.lengths] = phi[-1] + self.ratios
        return theta

    def slopes(self, gradient):
        """Return the gradient (T,) in phi of what has a gradient (p,) in theta."""
        total = [gradient[self.lengths].sum()] if len(self.lengths) else []
        return np.append(gradient[self.variance], total)

    @cached_property
    def bounds(self):
        """Bounds (T, 2) of phi, within which every parameter of the kernel is within its own."""
        bounds = np.reshape(self.kernel.bounds, (-1, 2))
        rows = list(bounds[self.variance])
        if len(self.lengths):
            low, high = (bounds[self.lengths] - self.ratios[:, None]).T
            rows.append(np.array([low.max(), high.min()]))
        return np.reshape(rows, (-1, 2))

    @cached_property
    def prior(self):
        """The part of the `NormalPrior` that is of phi."""
        both: Any = self.both
        return NormalPrior(both.mean[self.kept], both.sd[self.kept])

    def log_prior(self, phi):
        """Return the log prior density of phi and its gradient."""
        if self.both is None:
            return 0.0, 0.0
        return self.prior.log_density(phi), self.prior.slope(phi)


@dataclass(frozen=True)
class LengthSpace(ThetaSpace):
    """All parameters theta (p,) of a kernel with free lengths, their deviations N(0, s^2).

    Variance and mean length have the prior of `scales`.
    """

    scales: KernelScales
    s: float = 0.0

    def log_prior(self, theta):
        """Return the log prior of theta, less its constant for the deviations, and its slope."""
        scales, lengths = self.scales, self.scales.lengths
        away = theta[lengths] - theta[lengths].mean()
        value, of_phi = scales.log_prior(scales.phi(theta))
        slope = np.empty(len(theta))
        slope[scales.variance] = of_phi[:-1]
        slope[lengths] = of_phi[-1] / len(lengths) - away / self.s**2
        return value - 0.5 * away @ away / self.s**2, slope

    def prior_precision(self):
        """Return the prior precision (p, p) of theta."""
        scales, n = self.scales, len(self.scales.lengths)
        *of_variance, of_length = scales.prior.sd**-2.0
        total = np.zeros((len(scales.variance) + n,) * 2)
        total[scales.variance, scales.variance] = of_variance
        deviations = (np.eye(n) - 1.0 / n) / self.s**2
        total[np.ix_(scales.lengths, scales.lengths)] = deviations + of_length / n**2
        return total


def learned_coordinates(kernel):
    """Return names, coordinates (T,) and anisotropy of a learned kernel, for one node.

    Variance and mean length where there are these, otherwise all its parameters in logs. Several
    lengths that were learned without a prior have an infinite spread.
    """
    if constant_and_stationary(kernel) is None:
        free = [h for h in kernel.hyperparameters if not h.fixed]
        names = (f"log_{h.name}" for h in free for _ in range(h.n_elements))
        return tuple(names), kernel.theta, np.nan
    scales = KernelScales.at(kernel, kernel.theta)
    spread = np.inf if len(scales.lengths) > 1 else 0.0
    return scales.names, scales.phi(kernel.theta), spread


def _places(kernel):
    """Return the indices in theta of the variance and of the lengths."""
    split: Any = constant_and_stationary(kernel)
    constant, part, constant_first = split
    fixed = constant is None or constant.hyperparameter_constant_value.fixed
    variance, lengths = np.arange(0 if fixed else 1), np.arange(n_lengths(part))
    if constant_first:
        return variance, lengths + len(variance)
    return variance + len(lengths), lengths


def central_differences(value, theta, step=0.01):
    """Return the gradient (p,) of a function at theta, whose values are good to some 1e-6."""
    moves = step * np.eye(len(theta))
    return np.array([value(theta + m) - value(theta - m) for m in moves]) / (2.0 * step)


def settled(solve, x, empty):
    """Return the `Result` of EP from sites x, or None where sites do not settle on a posterior.

    `solve(x, share=1.0)` runs EP with a share of the damping. Where that fails, another run starts
    from `empty` sites, which say nothing, with half the damping.
    """
    for start, share in ((x, 1.0), (empty, 0.5)):
        try:
            result = solve(start, share=share)
        except ImproperPosterior:
            continue
        # the evidence of sites that have not settled means nothing and may be thousands of nats
        # off; labels are discrete: a log probability of them above zero is none
        if result.residual < 5e-2 and result.evaluation.record["log_evidence"] <= 0:
            return result
    return None


@dataclass(frozen=True)
class Nodes:
    """Nodes of a problem in a space of its hyperparameters.

    What a node keeps, its payload, has `log_evidence` and `residual` of EP, the gradient `slope` of
    the log evidence at the point, None where nobody asked, and `s`, the spread of the log lengths.
    """

    problem: Any
    space: Any

    def evaluate(self, phi, near, slopes=True):
        """Return the `Node` at phi (T,), or None where EP has no fixed point.

        Without `slopes` it has no gradient.
        """
        space, kept = self.space, None if near is None else near.payload
        found = self.problem.at(space.point(phi), kept, slopes)
        if found is None:
            return None
        log_prior, of_prior = space.log_prior(phi)
        gradient = np.full(len(phi), np.nan)
        if slopes:
            gradient = space.slopes(found.slope) + of_prior
        figures = found.log_evidence, log_prior, gradient, found.residual
        return Node(phi, *figures, found._replace(s=space.s))


# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3


class Accuracy(NamedTuple):
    """Where a search ends, and how it steps; see `minimise_where_finite`.

    Relative changes of the evidence below 1e-6 are within the error of EP run to a residual of
    1e-3, and where evaluations are noisy, more of them in a line search cannot help. Where the
    gradient is not exact, nor can what a line search does not find. `gain` is what a search from
    near the mode may leave in nats, at first a thirtieth of a posterior sd.
    """

    ftol: float = 1e-6
    gtol: float = 1e-3
    first_step: float | None = None
    max_line_search: int = 20
    gain: float = 5e-4
    exact_gradient: bool = True

    @property
    def of_search(self):
        """Keywords of `minimise_where_finite`."""
        own = self._asdict()
        del own["gain"]
        return own


# Of a mode that predicts, and of one that only says where nodes lie.
LEARNING = Accuracy()
TO_THE_MODE = Accuracy(1e-4, 0.1, 1.0, 6, 0.05, False)
# Of several classes, where the gradient is itself off by tenths of a nat and more.
JOINT_ACCURACY = Accuracy(2e-6, 1e-2, 1.0, 6, 0.4, False)


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


class EvidenceClimb:
    """A log density as the searches want it: from the best node so far, told of its steps.

    A point without node has the value minus infinity. The payload of a node is that of an
    iteration. `sign` is -1 for a search that goes down; the first node starts from one that is
    `near`, maybe of another density.
    """

    def __init__(self, evaluate: Evaluate, monitor: Monitor, sign=1.0, near=None):
        self.evaluate, self.monitor, self.sign, self.near = evaluate, monitor, sign, near
        self.best: Node | None = None

    def __call__(self, phi):
        """Return value, gradient and node at phi (T,)."""
        node = self.evaluate(phi, self.best or self.near)
        if node is None:
            return -self.sign * np.inf, np.full(len(phi), np.nan), None
        if self.best is None or node.objective > self.best.objective:
            self.best = node
        return self.sign * node.objective, self.sign * node.gradient, node

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
        return node and (node, KEPT)
    climb = EvidenceClimb(evaluate, monitor, sign=-1.0)
    if optimizer is not None:
        return _by_function(optimizer, climb, phi, bounds, starts)
    run: Any = partial(
        minimise_where_finite,
        climb,
        bounds=bounds,
        max_iter=max_iter,
        negligible=0.01,  # a gain that is not missed if no better step is found: odds of 1 %
        tie=1e-10,
        **accuracy.of_search,
    )
    runs = filter(None, map(run, (phi, *starts) if len(starts) else ()))
    first = min(runs, key=lambda r: r.value, default=None)
    found = run(first.x if first else phi, ended=lambda best: climb.told(best.payload))
    if found is None:
        return None
    # a run without a step left nothing to polish: then the end is that of the run before
    reason = found.reason if found.n_steps or not first else first.reason
    return found.payload, LearningEnd(reason, found.n_steps, found.gradient)


def or_refuse(found):
    """Return what a search found, or raise a ValueError where it had nowhere to start from."""
    if found is None:
        raise ValueError(
            "the evidence of X is not finite at the initial kernel, or EP does not settle there: "
            "change the parameters of the kernel, or lower damping."
        )
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
    watch: FitWatch = SILENT,
    accuracy=LEARNING,
    exact_gradient=True,
    patient=np.inf,
):
    """Return the same from the mode of a share of the rows, for many rows: a few steps are left.

    `evaluate_from` takes the `Node` there and gives the evidence of all rows, of which each step
    costs 1 / share^3 times as much. Their curvature is about that of some of the rows, by
    differences of gradients, over the share. Gradients that are not exact lead on as long as a
    search finds a gain, or fails to so often as it is `patient`, if more than once.
    """
    options: dict[str, Any] = dict(max_iter=max_iter)
    ends: dict[str, Any] = dict(ftol=max(1e-4, accuracy.ftol), gtol=max(1e-2, accuracy.gtol))
    if not exact_gradient:
        ends |= dict(ftol=1e-3, max_line_search=2)
    coarse = accuracy._replace(**ends)
    with watch.phase("some rows first") as told:
        own = options | dict(starts=starts, accuracy=coarse, monitor=StepsOfPhase(told))
        found = find_mode(of_rows, phi, bounds, **own)
    if found is None:
        return None
    below = found[0]
    difference = 0.1 if exact_gradient else 0.2
    curvature, lacking = curvature_at(of_rows, below, bounds, difference)
    climb = EvidenceClimb(evaluate_from(below), monitor)
    limits: dict[str, Any] = dict(gain=accuracy.gain, max_iter=max_iter, ended=climb.told)
    if not exact_gradient and patient >= 1.0:
        tries = int(min(PATIENCE, np.ceil(2.0 * patient)))
        limits |= dict(gain=0.1, lacking=lacking / share, patience=tries)
    elif not exact_gradient:
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
        value, gradient, _ = climb(np.array(theta, dtype=np.float64, ndmin=1))
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
