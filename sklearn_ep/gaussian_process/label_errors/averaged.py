"""Average over the kernel and the rate of wrong labels, and over there being none.

Without wrong labels the problem is the same at a rate of zero, under a prior of its own.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import betainc, betaln, expit, log_expit, logit

from ..._engine.hyper import Average, Spacing, average_of, integrate, sample_about
from ..._engine.loop import SILENT, Trace
from ..._estimator.averaged import AveragedPosterior
from .._base import (
    attributes_of_nodes,
    fit_of_sites,
    left_out_signs,
    mixed_logs,
    third_of_rows,
    watch_of_sweeps,
)
from .._hyperparameters import (
    TO_THE_MODE,
    KernelScales,
    Nodes,
    curvature_at,
    find_mode,
    find_mode_from_rows,
    learned_coordinates,
    settled,
)
from .._kernels import with_theta
from .._limits import LIMITS
from ..inducing.values import AveragedInducing
from .ladder import climb
from .problem import (
    RATE_BOUNDS,
    Setting,
    fit_label_errors,
    learn_hyperparameters,
    wrong_proba,
)
from .step import LabelErrorStep

# Step, depth and most nodes of the lattice in kernel and rate, and in the kernel alone, in the main
# the neighbours of the mode: on ten splits with and without wrong labels the log loss is that of a
# finer one within .001. With many rows they are ever fewer, to a depth of the neighbours alone.
_SPACING, _PLAIN_SPACING, _ENDS = Spacing(2.0, 3.5, 20), Spacing(2.0, 3.5, 9), 0.5


def log_rate_density(x, counts):
    """Return the log density of the logit of a rate that is Beta of these counts, and its slope.

    The rate is within the bounds of learning.
    """
    a, b = counts
    total = betaln(a, b) + np.log(betainc(a, b, RATE_BOUNDS[1]))
    return a * x + (a + b) * log_expit(-x) - total, a - (a + b) * expit(x)


@dataclass(frozen=True)
class ErrorSpace:
    """The phi of a kernel and the logit of the rate of wrong labels, as far as learned.

    `first` is a `Setting` with what is kept; `scales` are None for a kernel that is kept, and
    `rate_counts`, those of the Beta prior of the rate, for a rate that is.
    """

    first: Setting
    scales: KernelScales | None
    rate_counts: tuple[float, float] | None

    @cached_property
    def s(self):
        """Spread of the log lengths, infinite where they are those that learning found."""
        return learned_coordinates(self.first.kernel)[2]

    @property
    def names(self):
        """What phi consists of."""
        names = () if self.scales is None else self.scales.names
        return (*names, "logit_label_noise") if self.rate_counts else names

    @property
    def bounds(self):
        """Bounds (T, 2) of phi."""
        rate = np.tile(logit(RATE_BOUNDS), (int(self.rate_counts is not None), 1))
        return rate if self.scales is None else np.vstack([self.scales.bounds, rate])

    @property
    def start(self):
        """The phi (T,) of the first setting."""
        rate = [logit(self.first.rate)] if self.rate_counts else []
        if self.scales is None:
            return np.array(rate)
        return np.append(self.scales.phi(self.first.kernel.theta), rate)

    def _of_kernel(self, phi):
        return phi[: len(phi) - 1] if self.rate_counts else phi

    def point(self, phi):
        """Return the `Setting` at phi."""
        kernel, rate, points = self.first
        if self.scales is not None:
            kernel = with_theta(kernel, self.scales.point(self._of_kernel(phi)))
        return Setting(kernel, float(expit(phi[-1])) if self.rate_counts else rate, points)

    def slopes(self, slope):
        """Return the gradient in phi from `Slopes`."""
        kernel = np.empty(0) if self.scales is None else self.scales.slopes(slope.theta)
        return np.append(kernel, slope.rate) if self.rate_counts else kernel

    def log_prior(self, phi):
        """Return the log prior density of phi and its gradient."""
        value, slope = 0.0, np.empty(0)
        if self.scales is not None:
            value, slope = self.scales.log_prior(self._of_kernel(phi))
        if self.rate_counts is None:
            return value, slope
        more, steep = log_rate_density(phi[-1], self.rate_counts)
        return value + more, np.append(slope, steep)


@dataclass
class NodeProblem:
    """EP of the labels of one problem at any setting, from the sites of a neighbour.

    `plan` is a `LabelErrorPlan`, `x` are sites to start from where there is no neighbour.
    """

    plan: Any
    sign: np.ndarray
    x: np.ndarray
    tol: ClassVar[float] = 2e-2

    def at(self, setting, near, slopes=True):
        """Return the `ErrorNode` at a setting, or None where EP has no fixed point."""
        single = len(self.sign) >= LIMITS.thirds_errors
        ep = self.plan.ep(setting, self.sign, single)

        def solve(start, share):
            # sites start close to their fixed points
            return ep.solve(start, tol=self.tol, max_iter=40, damping=share, accelerate=True)

        x = self.x if near is None else near.sites
        result = settled(solve, x, np.zeros_like(self.x))
        return None if result is None else self.plan.node(setting, ep, result, slopes)

    def of_rows(self, rows):
        """Return the problem of some of the rows."""
        return NodeProblem(self.plan.part(rows), self.sign[rows], self.x[:, rows])

    def from_rows(self, rows, node):
        """Return the problem whose sites start at those of a `Node` of some rows, others empty."""
        x = np.zeros_like(self.x)
        x[:, rows] = node.payload.sites
        return replace(self, x=x)


def fit_averaged_errors(plan, sign, monitor, k):
    """Average over the kernel and the rate of problem k, and return its `BinaryFit`."""
    trace, first = Trace(monitor), plan.settings[k]
    if plan.move_points or (plan.learn and len(_scales(first).lengths) > 1):
        # ratios of lengths, and places of inducing points, are those that learning finds
        first = learn_hyperparameters(plan, sign, Trace(), k)[0]
    scales = _scales(first, plan.averaging.prior) if plan.learn else None
    counts = plan.averaging.rate_counts if plan.learn_rate else None
    nodes = Nodes(NodeProblem(plan, sign, plan.sites[k]), ErrorSpace(first, scales, counts))
    rows = _some_rows(plan, sign, k)
    found = _mode(nodes, rows, trace)
    if found is None:
        return fit_label_errors(plan, sign, monitor, k)
    mode, end, curvature = found
    if end.reason == "asked":
        lattice, without = average_of([mode], np.array([mode.log_evidence])), _NONE
    else:
        # of iterations that ran out none is left that a phase could lead to
        watch = SILENT if end.reason == "max_iter" else monitor
        lattice = _average_about(nodes, mode, curvature, watch, {3: _SPACING})
        without = without_errors(nodes, rows, lattice, watch)
    return _mixed(nodes, lattice, without, trace, end)


def _some_rows(plan, sign, k):
    """Return a third of the rows; None for few rows, warm starts, objects and inducing points."""
    few = len(sign) < LIMITS.thirds_errors or plan.settings[k].points is not None
    if few or np.any(plan.sites[k]) or not np.issubdtype(plan.X.dtype, np.number):
        return None
    return third_of_rows(plan.X, sign, plan.weight)


def _scales(setting, prior=None):
    """Return the `KernelScales` at a setting."""
    return KernelScales.at(setting.kernel, setting.kernel.theta, prior)


def _mode(nodes, rows, monitor=SILENT):
    """Return the mode, how its search ended and the curvature there, None of few rows, or None.

    A search of all rows starts from the mode of some `rows`, whose curvature is in proportion.
    """
    space, plan = nodes.space, nodes.problem.plan
    search = dict(accuracy=TO_THE_MODE, max_iter=plan.max_iter, monitor=monitor)
    if rows is None or not len(space.start):
        found = find_mode(nodes.evaluate, space.start, space.bounds, **search)
        return found and (*found, None)
    # nodes about it are weighed: a posterior sd away it does as well
    search["accuracy"] = TO_THE_MODE._replace(gain=0.5)
    small = Nodes(nodes.problem.of_rows(rows), space).evaluate
    share = float(plan.weight[rows].sum() / plan.weight.sum())

    def evaluate_from(node):
        return Nodes(nodes.problem.from_rows(rows, node), space).evaluate

    args = evaluate_from, small, share, space.start, space.bounds
    found = find_mode_from_rows(*args, **search)
    if found is None:
        return None
    near = small(found[0].phi, None)
    curvature = None if near is None else curvature_at(small, near, space.bounds)[0] / share
    return *found, curvature


def _average_about(nodes, mode, curvature, monitor, short):
    """Return the `Average` about a mode: of few rows over a lattice, of many over nodes about it.

    Of one coordinate a lattice is as cheap. One of as many as `short` has is that `Spacing`.
    """
    about, workers = (mode, nodes.space.bounds), nodes.problem.plan.averaging.n_jobs
    n_rows, spacing = len(nodes.problem.sign), short.get(len(mode.phi))
    if len(mode.phi) < 2 or n_rows <= LIMITS.lattice_errors[1] or curvature is None:
        if spacing is not None:
            depth = np.interp(n_rows, LIMITS.lattice_errors, (spacing.depth, _ENDS))
            spacing = spacing._replace(depth=float(depth))
        return integrate(nodes.evaluate, *about, workers, monitor, spacing)
    evaluate = partial(nodes.evaluate, slopes=False)
    return sample_about(evaluate, *about, curvature, workers, monitor)


class WithoutErrors(NamedTuple):
    """Average of a model without label errors, None where it has no share, and its log odds."""

    average: Average | None
    log_odds: float


_NONE = WithoutErrors(None, -np.inf)


def without_errors(nodes, rows, lattice, monitor):
    """Return the `WithoutErrors`: the average over nodes whose rate is zero, and its odds."""
    plan, space = nodes.problem.plan, nodes.space
    if not (plan.learn_rate and plan.averaging.no_errors):
        return _NONE
    odds = logit(plan.averaging.no_errors) - lattice.log_evidence
    theta, scales = lattice.heaviest.payload.setting.kernel.theta, space.scales
    kernel = plan.averaging.plain_kernel or space.first.kernel
    if scales is not None:
        scales = replace(scales, kernel=kernel, both=plan.averaging.plain_prior)
    first = Setting(with_theta(kernel, theta), 0.0, space.first.points)
    problem = replace(nodes.problem, x=np.zeros_like(nodes.problem.x))
    plain = Nodes(problem, ErrorSpace(first, scales, None))
    found = _mode(plain, rows)
    if found is None:
        return _NONE
    mode, average = found[0], average_of([found[0]], np.array([found[0].objective]))
    if scales is not None:
        # where its share is small it is the mode alone, with the volume of kernels with errors
        phi = lattice.phi[:, : len(scales.names)]
        cov = np.atleast_2d(np.cov(phi.T, aweights=lattice.weight, ddof=0))
        log_mass = mode.objective + 0.5 * np.linalg.slogdet(2.0 * np.pi * cov)[1]
        share = expit(odds + log_mass)
        if share < 1e-3:
            return _NONE
        average = average_of([mode], np.array([log_mass]))
        if share >= 0.02:
            about = plain, mode, np.linalg.inv(cov), monitor
            average = _average_about(*about, {2: _PLAIN_SPACING})
    return WithoutErrors(average, float(odds + average.log_evidence))


class Parts(NamedTuple):
    """Parts of a mixture: settings, `Result`s, predicting posteriors, and factors of the sites."""

    settings: list[Setting]
    results: list
    posteriors: list
    factors: list

    @classmethod
    def of(cls, plan, nodes, results):
        """Return the parts that the settings of nodes and results of EP there make."""
        settings = [node.payload.setting for node in nodes]
        states = [r.evaluation.payload[0] for r in results]
        posteriors = [plan.posterior(pair) for pair in zip(settings, states, strict=True)]
        return cls(settings, results, posteriors, [LabelErrorStep(s.rate) for s in settings])

    def left_out(self):
        """Return what leaving each row out says of its label, part by part."""
        return list(map(left_out_signs, self.factors, self.results))


def _mixed(nodes, lattice, without, trace, end):
    """Return the `BinaryFit` of nodes with label errors, and of nodes without them."""
    plan, sign, heaviest = nodes.problem.plan, nodes.problem.sign, lattice.heaviest
    share, setting = float(expit(without.log_odds)), heaviest.payload.setting
    # sites and relaxation of the estimator are those of the heaviest node, refined by its own rule
    watch = watch_of_sweeps(trace, end, setting)
    rungs = plan.rungs(setting, sign, plan.tol)
    result, path = climb(rungs, heaviest.payload.sites, plan.max_iter, watch)
    results = [result if n is heaviest else n.payload.result for n in lattice.nodes]
    own = Parts.of(plan, lattice.nodes, results)
    posteriors, left_out, weight = own.posteriors, own.left_out(), lattice.weight
    if without.average is not None:
        clean = without.average.nodes
        others = Parts.of(plan, clean, [n.payload.result for n in clean])
        posteriors, left_out = posteriors + others.posteriors, left_out + others.left_out()
        weight = np.concatenate([(1.0 - share) * weight, share * without.average.weight])
    wrong = [wrong_proba(f, sign, r) for f, r in zip(own.factors, own.results, strict=True)]
    theta = np.array([s.kernel.theta for s in own.settings])
    update = result.evaluation.payload[1]
    more = attributes_of_nodes(lattice, theta, nodes.space.names) | dict(
        no_errors_proba=share,
        label_noise=(1.0 - share) * float(lattice.weight @ [s.rate for s in own.settings]),
        relaxation=np.zeros(len(sign)) if update.relaxation is None else update.relaxation,
        wrong_proba=(1.0 - share) * (lattice.weight @ np.array(wrong)),
        setting=setting,
        path=path,
        posterior_of_sites=own.posteriors[int(np.argmax(lattice.weight))],
    )
    # of labels that a kernel separates one side may take all weight, to the last digit
    heavy = np.flatnonzero(weight > 0)
    mixture = AveragedPosterior if setting.points is None else AveragedInducing
    posterior = mixture([posteriors[i] for i in heavy], weight[heavy])
    mixed = mixed_logs(weight[heavy], [left_out[i] for i in heavy])
    mean = with_theta(plan.kernel, lattice.weight @ theta)
    fit = fit_of_sites(posterior, trace, end, result, mean, mixed, setting.points, **more)
    if end.reason == "asked":
        return fit
    log_evidence = lattice.log_evidence
    if plan.learn_rate:
        prior = plan.averaging.no_errors
        log_evidence += np.log1p(-prior) + np.logaddexp(0.0, without.log_odds)
    return fit._replace(log_evidence=float(log_evidence))
