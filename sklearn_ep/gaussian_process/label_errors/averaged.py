"""Average over the kernel and the rate of wrong labels, and over there being none."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betainc, betaln, expit, log_expit, logit

from ..._engine.averaging import Average, Node, Spacing, average_of, integrate
from ..._engine.likelihoods import LabelNoise
from ..._engine.loop import SILENT, Trace
from ..._engine.rules import MomentMatching
from ..._engine.sites import Sites
from ..._estimator.averaged import AveragedPosterior
from .._averaged_fit import alone, average_about, mode_of_kernels
from .._averaging_plan import Averaging
from .._dense_fit import fit_of_sites, watch_of_sweeps
from .._dense_plan import BinaryModel, DensePlan
from .._evidence import node_at_mode
from .._fitted import left_out_signs, mixed_logs
from .._kernel_nodes import EPAtKernels, settled
from .._kernel_scales import KernelScales, learned_coordinates
from .._kernels import with_theta
from ..inducing.averaged import AveragedInducing
from .ladder import climb
from .problem import RATE_BOUNDS, Setting, fit_label_errors, learn_hyperparameters, wrong_proba
from .step import LabelErrorStep

__all__ = ["fit_averaged_errors"]

_RATE_NAME = "logit_label_noise"
# Residual, mixing and sweeps of sites at nodes, which start close to their fixed points.
_NODE_TOL = 2e-2
_DAMPING, _PLAIN_DAMPING, _NODE_SWEEPS = 1.0, 0.7, 40
# Step, depth and most nodes of the lattice in kernel and rate, in the main the neighbours of the
# mode: on ten splits with and without wrong labels the log loss is that of a finer one within .001.
_SPACING = Spacing(2.0, 3.5, 20)
# The same without label errors through inducing points.
_PLAIN_SPACING = Spacing(2.0, 3.5, 9)
# Shares of the posterior below which no label errors at all are left out, and are the mode alone.
_LEAST_SHARE, _SMALL_SHARE = 1e-3, 0.02


class ErrorNode(NamedTuple):
    """What a node keeps: kernel and rate of wrong labels, and the `Result` of EP there."""

    setting: Setting
    result: Any


def log_rate_density(x, counts):
    """Return the log density of the logit of a rate that is Beta of these counts, and its slope.

    The rate is within the bounds of learning.
    """
    a, b = counts
    total = betaln(a, b) + np.log(betainc(a, b, RATE_BOUNDS[1]))
    return a * x + (a + b) * log_expit(-x) - total, a - (a + b) * expit(x)


@dataclass
class ErrorNodes:
    """Nodes in the phi of a kernel and the logit of the rate of wrong labels, as far as learned.

    `plan` is a `LabelErrorPlan`, `x` are sites to start from where there is no neighbour; `scales`
    is None for a kernel that is kept. Inducing points are those of the `first` setting.
    """

    plan: Any
    sign: np.ndarray
    x: np.ndarray
    first: Setting
    scales: KernelScales | None
    prior: Any

    @cached_property
    def _unit_squares(self):
        return None if self.scales is None else self.scales.unit_squares(self.plan.X)

    @property
    def names(self):
        """What phi consists of."""
        names = () if self.scales is None else self.scales.names
        return (*names, _RATE_NAME) if self.plan.learn_rate else names

    @property
    def bounds(self):
        """Bounds (T, 2) of phi."""
        rate = np.tile(logit(RATE_BOUNDS), (int(self.plan.learn_rate), 1))
        return rate if self.scales is None else np.vstack([self.scales.bounds, rate])

    def start(self):
        """Return phi (T,) of the first setting."""
        rate = [logit(self.first.rate)] if self.plan.learn_rate else []
        if self.scales is None:
            return np.array(rate)
        return np.append(self.scales.phi(self.first.kernel.theta), rate)

    def setting(self, phi):
        """Return the `Setting` at phi."""
        kernel, rate, points = self.first
        if self.scales is not None:
            kernel = with_theta(kernel, self.scales.theta(phi[: len(self.scales.names)]))
        if self.plan.learn_rate:
            rate = float(expit(phi[-1]))
        return Setting(kernel, rate, points)

    def evaluate(self, phi, near):
        """Return the `Node` at phi (T,), or None where EP has no fixed point."""
        plan, setting = self.plan, self.setting(phi)
        own = slice(0, len(phi) - int(plan.learn_rate))
        squares = None
        if self.scales is not None and setting.points is None:
            squares = self.scales.squares(phi[own], self._unit_squares)
        ep = plan.ep(setting, self.sign, squares)

        def solve(start, share):
            steps = dict(damping=share * _DAMPING, accelerate=True)
            return ep.solve(start, tol=_NODE_TOL, max_iter=_NODE_SWEEPS, **steps)

        result = settled(solve, self.x if near is None else near.payload.result.x)
        if result is None:
            return None
        state, log_prior, gradient = result.evaluation.payload[0], 0.0, []
        if self.scales is not None:
            log_prior, slope = self.prior.log_density(phi[own])
            of_kernel = self.scales.slopes(plan.slopes(ep.structure.structure, state)[0])
            gradient.append(of_kernel + slope)
        if plan.learn_rate:
            more, slope = log_rate_density(phi[-1], plan.averaging.rate_counts)
            log_prior += more
            gradient.append([plan.rate_slope(ep, Sites(*result.x), state) + slope])
        value, found = result.evaluation.record["log_evidence"], ErrorNode(setting, result)
        return Node(phi, value, log_prior, np.concatenate(gradient), result.residual, found)

    def told(self, node):
        """Return the payload of an iteration: setting, and state of the posterior."""
        return node.payload.setting, node.payload.result.evaluation.payload[0]


def fit_averaged_errors(plan, sign, monitor, k):
    """Average over the kernel and the rate of problem k, and return its `BinaryFit`."""
    trace, first = Trace(monitor), plan.first_setting(k)
    scales = KernelScales.at(first.kernel, first.kernel.theta) if plan.learn else None
    if plan.move_points or (scales is not None and len(scales.lengths) > 1):
        # ratios of lengths, and places of inducing points, are those that learning finds
        first = learn_hyperparameters(plan, sign, Trace(), k)[0]
        scales = KernelScales.at(first.kernel, first.kernel.theta) if plan.learn else None
    prior = None if scales is None else scales.prior(plan.averaging.prior)
    nodes = ErrorNodes(plan, sign, plan.sites[k], first, scales, prior)
    limits = dict(max_iter=plan.max_iter, monitor=trace)
    found = node_at_mode(nodes.evaluate, nodes.start(), nodes.bounds, nodes.told, **limits)
    if found is None:
        return fit_label_errors(plan, sign, monitor, k)
    mode, end = found
    if end.reason == "asked":
        lattice = alone(mode)
        clean, log_odds = None, -np.inf
    else:
        # of iterations that ran out none is left that a phase could lead to
        watch = SILENT if end.reason == "max_iter" else monitor
        workers, spacing = plan.averaging.n_jobs, _SPACING if len(mode.phi) == 3 else None
        lattice = integrate(nodes.evaluate, mode, nodes.bounds, workers, watch, spacing)
        clean, log_odds = without_errors(nodes, lattice, watch)
    return _mixed(nodes, lattice, clean, log_odds, trace, end)


class WithoutErrors(NamedTuple):
    """Average of a model without label errors, with the posteriors of its nodes.

    `left_out` are pairs of the factor and the `Result` of each node, for its cavities.
    """

    average: Average
    posteriors: list[Any]
    left_out: list[Any]


def without_errors(nodes, lattice, monitor):
    """Return the `WithoutErrors` and the log odds of there being none, None where it has no share.

    It is the plain classifier's average over the same kernel, under the same prior.
    """
    plan = nodes.plan
    if not (plan.learn_rate and plan.averaging.no_errors):
        return None, -np.inf
    odds = logit(plan.averaging.no_errors) - lattice.log_evidence
    recipe = _plain_average if nodes.first.points is None else _plain_average_through_points
    found = recipe(nodes, lattice, odds, monitor)
    if found is None:
        return None, -np.inf
    return found, float(odds + found.average.log_evidence)


def _plain_average(nodes, lattice, odds, monitor):
    """Return the `WithoutErrors` of all rows, None where it has no share."""
    dense = _plain_plan(nodes)
    ep = EPAtKernels(dense, nodes.sign, np.zeros_like(nodes.x))
    theta = lattice.heaviest.payload.setting.kernel.theta
    if nodes.scales is None:
        node = ep.only_node(theta)
        average = None if node is None else alone(node)
    else:
        found = mode_of_kernels(ep, theta, Trace())
        average = None
        if found is not None:
            plain, mode, _ = found
            average = _worth_its_share(
                nodes, lattice, odds, mode, lambda: average_about(plain, mode, monitor, coarse=True)
            )
    if average is None:
        return None
    own = [n.payload for n in average.nodes]
    states = [n.result.evaluation.payload[0] for n in own]
    kernels = [with_theta(dense.kernel, n.theta) for n in own]
    posteriors = [dense.posterior(pair) for pair in zip(kernels, states, strict=True)]
    return WithoutErrors(average, posteriors, [(dense.model.factor, n.result) for n in own])


def _plain_average_through_points(nodes, lattice, odds, monitor):
    """Return the `WithoutErrors` through the same inducing points: nodes whose rate is zero."""
    plan, kernel = nodes.plan, nodes.plan.averaging.plain_kernel or nodes.first.kernel
    theta = lattice.heaviest.payload.setting.kernel.theta
    first = Setting(with_theta(kernel, theta), 0.0, nodes.first.points)
    scales = prior = None
    if nodes.scales is not None:
        scales = KernelScales(kernel, nodes.scales.ratios)
        prior = scales.prior(plan.averaging.plain_prior)
    plan = replace(plan, learn_rate=False)
    plain = ErrorNodes(plan, nodes.sign, np.zeros_like(nodes.x), first, scales, prior)
    limits = dict(max_iter=plan.max_iter)
    found = node_at_mode(plain.evaluate, plain.start(), plain.bounds, plain.told, **limits)
    if found is None:
        return None
    mode, workers = found[0], plan.averaging.n_jobs
    average = alone(mode)
    if scales is not None:
        about = plain.evaluate, mode, plain.bounds, workers, monitor, _PLAIN_SPACING
        average = _worth_its_share(nodes, lattice, odds, mode, lambda: integrate(*about))
    if average is None:
        return None
    own = [n.payload for n in average.nodes]
    posteriors = [plan.posterior((n.setting, n.result.evaluation.payload[0])) for n in own]
    return WithoutErrors(average, posteriors, [(LabelErrorStep(0.0), n.result) for n in own])


def _worth_its_share(nodes, lattice, odds, mode, average_about_mode):
    """Return the `Average` over kernels without label errors, None where it has no share.

    Where its share is small it is the mode alone, with the volume of the kernels with errors.
    """
    scales = lattice.phi[:, : len(nodes.scales.names)]
    cov = np.atleast_2d(np.cov(scales.T, aweights=lattice.weight, ddof=0))
    log_mass = mode.objective + 0.5 * np.linalg.slogdet(2.0 * np.pi * cov)[1]
    share = expit(odds + log_mass)
    if share < _LEAST_SHARE:
        return None
    if share < _SMALL_SHARE:
        return average_of([mode], np.array([log_mass]))
    return average_about_mode()


def _plain_plan(nodes):
    """Return the `DensePlan` of the same problem for a label that cannot be wrong."""
    plan = nodes.plan
    return DensePlan(
        X=plan.X,
        y=plan.y,
        weight=plan.weight,
        kernel=plan.averaging.plain_kernel or nodes.first.kernel,
        model=BinaryModel(LabelNoise(0.0, plan.noise), MomentMatching()),
        optimizer=None,
        restarts=np.empty((0, 0)),
        starts=[],
        sites=[],
        tol=plan.tol,
        max_iter=plan.max_iter,
        max_sweeps=plan.max_iter,
        damping=_PLAIN_DAMPING,
        accelerate=True,
        averaging=Averaging(plan.averaging.plain_prior, plan.averaging.n_jobs),
    )


def _mixed(nodes, lattice, clean, log_odds, trace, end):
    """Return the `BinaryFit` of nodes with label errors, and of nodes without them."""
    plan, sign, heaviest = nodes.plan, nodes.sign, lattice.heaviest
    share = float(expit(log_odds))
    setting = heaviest.payload.setting
    watch = watch_of_sweeps(trace, end, setting)
    # sites and relaxation of the estimator are those of the heaviest node, refined by its own rule
    rungs = plan.rungs(setting, sign, plan.tol)
    result, path = climb(rungs, heaviest.payload.result.x, plan.max_iter, watch)
    results = [result if n is heaviest else n.payload.result for n in lattice.nodes]
    settings = [n.payload.setting for n in lattice.nodes]
    payloads = [r.evaluation.payload[0] for r in results]
    posteriors = [plan.posterior(pair) for pair in zip(settings, payloads, strict=True)]
    own, weight = posteriors[int(np.argmax(lattice.weight))], lattice.weight
    pairs = [(LabelErrorStep(s.rate), r) for s, r in zip(settings, results, strict=True)]
    wrong = np.array([wrong_proba(factor, sign, r) for factor, r in pairs])
    if clean is not None:
        weight = np.concatenate([(1.0 - share) * weight, share * clean.average.weight])
        posteriors, pairs = posteriors + clean.posteriors, pairs + clean.left_out
    theta = np.array([s.kernel.theta for s in settings])
    update = result.evaluation.payload[1]
    more = dict(
        average=lattice._replace(nodes=[n._replace(payload=None) for n in lattice.nodes]),
        anisotropy=np.full(len(theta), learned_coordinates(setting.kernel)[2]),
        theta=theta,
        names=nodes.names,
        no_errors_proba=share,
        label_noise=(1.0 - share) * float(lattice.weight @ [s.rate for s in settings]),
        relaxation=np.zeros(len(sign)) if update.relaxation is None else update.relaxation,
        wrong_proba=(1.0 - share) * (lattice.weight @ wrong),
        setting=setting,
        path=path,
        posterior_of_sites=own,
    )
    # of labels that a kernel separates one side may take all weight, to the last digit
    heavy = np.flatnonzero(weight > 0)
    left_out = mixed_logs(weight[heavy], [left_out_signs(*pairs[i]) for i in heavy])
    mean = with_theta(plan.kernel, lattice.weight @ theta)
    mixture = AveragedPosterior if setting.points is None else AveragedInducing
    posterior = mixture([posteriors[i] for i in heavy], weight[heavy])
    run = trace, end, result, mean, left_out, setting.points
    fit = fit_of_sites(posterior, *run, **more)
    if end.reason == "asked":
        return fit
    return fit._replace(log_evidence=_log_evidence(nodes, lattice, log_odds))


def _log_evidence(nodes, lattice, log_odds):
    """Return the log evidence of both parts of the mixture."""
    if not nodes.plan.learn_rate:
        return lattice.log_evidence
    prior = nodes.plan.averaging.no_errors
    return float(lattice.log_evidence + np.log1p(-prior) + np.logaddexp(0.0, log_odds))
