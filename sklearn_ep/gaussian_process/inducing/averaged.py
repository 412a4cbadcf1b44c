"""Average over variance and length of a kernel; inducing points stay where the mode put them."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from joblib import parallel_config

from ..._engine.hyper import (
    Node,
    average_of,
    integrate,
    log_mixture,
    mixture_covariance,
    sample_about,
)
from ..._engine.loop import StepsOfPhase
from ..._estimator.averaged import AveragedPosterior
from .._averaging_plan import SEVERAL_ROWS
from .._evidence import curvature_at_node, node_at_mode
from .._kernel_nodes import settled
from .._kernel_scales import KernelScales, learned_coordinates
from .._kernels import with_theta
from .ep import InducingEP
from .hyperparameters import Hyperparameters
from .learning import stored_gradient
from .passes import PassModel
from .values import InducingGPPosterior

__all__ = ["AveragedInducing", "average_over_kernel", "mixed_nodes"]

# Residual and sweeps of the sites of a node, which start close to their fixed point.
_NODE_TOL, _NODE_SWEEPS = 1e-2, 40


class InducingNode(NamedTuple):
    """What a node keeps: kernel parameters (p,), sites of each partition, model of the passes."""

    theta: np.ndarray
    sites: list[np.ndarray]
    model: PassModel


@dataclass
class InducingNodes:
    """Nodes in the phi of `scales`, of all binary problems under one kernel.

    `plan` is an `InducingPlan`, `hyper` are the kernel parameters with the inducing points that are
    kept, `sites` those to start from where there is no neighbour.
    """

    plan: Any
    ep: InducingEP
    hyper: Hyperparameters
    scales: KernelScales
    sites: list[np.ndarray]

    def evaluate(self, phi, near, slopes=True):
        """Return the `Node` at phi (T,), or None where EP has no fixed point.

        Without `slopes` it has no gradient, which is worth two passes.
        """
        theta = self.scales.theta(phi)
        prior = self.hyper.prior(theta)

        def solve(sites, share):
            # sites of a neighbour are still wanted: the loop works on a copy
            state = self.ep.restate(prior, [s.copy() for s in sites])
            steps = self.plan.solver(_NODE_TOL, _NODE_SWEEPS)
            steps["damping"] *= share
            return self.ep.solve(state, **steps).result

        empty = [np.zeros_like(s) for s in self.sites]
        result = settled(solve, self.sites if near is None else near.payload.sites, empty)
        if result is None:
            return None
        model = result.evaluation.payload
        sites = [s.copy() for s in self.ep.unpack(result.x, prior).sites]
        log_prior, of_prior = self.plan.averaging.log_density(phi)
        gradient = np.full(len(phi), np.nan)
        if slopes:
            slope = stored_gradient(self.ep, self.hyper, model, sites)
            gradient = self.scales.slopes(slope) + of_prior
        found, value = InducingNode(theta, sites, model), result.evaluation.record["log_evidence"]
        return Node(phi, value, log_prior, gradient, result.residual, found)

    def told(self, node):
        """Return the payload of an iteration: the model of the passes."""
        return (node.payload.model,)


def average_over_kernel(plan, ep, state, monitor):
    """Return the `Average` about the kernel of a state, None where EP has no fixed point there.

    The payload of its nodes are `InducingNode`s. The evidence is that of all binary problems.
    """
    kernel = state.prior.kernel
    scales = KernelScales.at(plan.kernel, kernel.theta)
    nodes = InducingNodes(plan, ep, plan.kernel_alone(state.prior.Z), scales, state.sites)
    evaluate, bounds = nodes.evaluate, scales.bounds
    with monitor.phase("integration over hyperparameters") as told:
        search = dict(max_iter=plan.max_iter, monitor=StepsOfPhase(told))
        found = node_at_mode(evaluate, scales.phi(kernel.theta), bounds, nodes.told, **search)
    if found is None:
        return None
    mode, end = found
    if end.reason == "asked":
        return average_of([mode], np.array([mode.objective]))
    # workers have the partitions, whose pool is open: nodes come one after another
    with parallel_config(backend="sequential"):
        if sum(ep.sizes) <= SEVERAL_ROWS:
            return integrate(evaluate, mode, bounds, monitor=monitor)
        curvature, _ = curvature_at_node(evaluate, mode, bounds)
        without_slopes = partial(evaluate, slopes=False)
        return sample_about(without_slopes, mode, bounds, curvature, monitor=monitor)


class AveragedInducing(AveragedPosterior):
    """Mixture of the posteriors through the same inducing points under several kernels."""

    @property
    def inducing_mean(self):
        """Posterior mean of the inducing values (m,)."""
        return self.weight @ np.array([p.inducing_mean for p in self.posteriors])

    @property
    def inducing_cov(self):
        """Posterior covariance of the inducing values (m, m), by the law of total covariance."""
        mean = np.array([p.inducing_mean for p in self.posteriors])
        cov = np.array([p.inducing_cov for p in self.posteriors])
        return mixture_covariance(self.weight, cov, mean, mean)


def mixed_nodes(plan, ep, average, state, model):
    """Return posteriors and kernel of a mixture of nodes, leave-one-out logs (n,), and attributes.

    The first two as fields of a `GPFit`. `state` and `model` are those of the heaviest node,
    refined.
    """
    own = [n.payload for n in average.nodes]
    heaviest = int(np.argmax(average.weight))
    own[heaviest] = InducingNode(own[heaviest].theta, state.sites, model)
    theta = np.array([n.theta for n in own])
    posteriors = [
        AveragedInducing(
            [InducingGPPosterior(n.model.prior, n.model.posteriors[c], plan.factor) for n in own],
            average.weight,
        )
        for c in range(plan.n_problems)
    ]
    loo = log_mixture(average.weight, np.array([ep.leave_one_out(n.model, n.sites) for n in own]))
    kernel = with_theta(plan.kernel, average.weight @ theta)
    names, _, anisotropy = learned_coordinates(kernel)
    attributes = dict(
        average=average._replace(nodes=[n._replace(payload=None) for n in average.nodes]),
        anisotropy=np.full(len(own), anisotropy),
        theta=theta,
        names=names,
    )
    return dict(posteriors=posteriors, kernel=kernel), loo, attributes
