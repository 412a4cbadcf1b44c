"""Average over there being no wrong labels at all: the plain classifier's, and its odds."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from ..._engine.hyper import Average, Spacing, average_of, integrate
from ..._engine.likelihoods import LabelNoise
from ..._engine.loop import Trace
from ..._engine.rules import MomentMatching
from .._averaged_fit import alone, average_about, mode_of_kernels
from .._averaging_plan import Averaging
from .._dense_plan import BinaryModel, DensePlan
from .._evidence import node_at_mode
from .._kernel_nodes import EPAtKernels
from .._kernel_scales import KernelScales
from .._kernels import with_theta
from .nodes import ErrorNodes
from .problem import Setting
from .step import LabelErrorStep

__all__ = ["WithoutErrors", "without_errors"]

# Mixing of the sites at nodes.
_PLAIN_DAMPING = 0.7
# Step, depth and most nodes of the lattice through inducing points, in the main the neighbours of
# the mode.
_PLAIN_SPACING = Spacing(2.0, 3.5, 9)
# Shares of the posterior below which no label errors at all are left out, and are the mode alone.
_LEAST_SHARE, _SMALL_SHARE = 1e-3, 0.02


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
