"""Average over variance and length of a kernel; inducing points stay where the mode put them."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from joblib import parallel_config

from ..._engine.hyper import (
    average_of,
    integrate,
    log_mixture,
    mixture_covariance,
    sample_about,
)
from ..._engine.loop import StepsOfPhase
from ..._estimator.averaged import AveragedPosterior
from .._base import attributes_of_nodes
from .._hyperparameters import (
    TO_THE_MODE,
    KernelScales,
    Nodes,
    curvature_at,
    find_mode,
    learned_coordinates,
    settled,
)
from .._kernels import with_theta
from .._limits import LIMITS
from .ep import InducingEP
from .hyperparameters import Hyperparameters
from .learning import stored_gradient
from .passes import PassModel
from .values import InducingGPPosterior


class InducingNode(NamedTuple):
    """What a node keeps: kernel parameters (p,), sites of each partition, model of the passes.

    For the others see `Nodes`.
    """

    theta: np.ndarray
    sites: list[np.ndarray]
    model: PassModel
    log_evidence: float
    residual: float
    slope: np.ndarray | None = None
    s: float = 0.0


@dataclass
class InducingProblem:
    """EP of all binary problems under one kernel, at any parameters of it.

    `plan` is an `InducingPlan`, `hyper` are the kernel parameters with the inducing points that are
    kept, `sites` those to start from where there is no neighbour.
    """

    plan: Any
    ep: InducingEP
    hyper: Hyperparameters
    sites: list[np.ndarray]

    def at(self, theta, near, slopes=True, squares=None):
        """Return the `InducingNode` at kernel parameters (p,), or None where EP has no fixed point.

        From what a neighbour keeps. The gradient is worth two passes.
        """
        prior = self.hyper.prior(theta)

        def solve(sites, share):
            # sites of a neighbour are still wanted: the loop works on a copy
            state = self.ep.restate(prior, [s.copy() for s in sites])
            steps = self.plan.solver(tol=1e-2, max_iter=40)
            steps["damping"] *= share
            return self.ep.solve(state, **steps).result

        empty = [np.zeros_like(s) for s in self.sites]
        result = settled(solve, self.sites if near is None else near.sites, empty)
        if result is None:
            return None
        model = result.evaluation.payload
        sites = [s.copy() for s in self.ep.unpack(result.x, prior).sites]
        figures = result.evaluation.record["log_evidence"], result.residual
        slope = stored_gradient(self.ep, self.hyper, model, sites) if slopes else None
        return InducingNode(theta, sites, model, *figures, slope)


def average_over_kernel(plan, ep, state, monitor):
    """Return the `Average` about the kernel of a state, None where EP has no fixed point there.

    The payload of its nodes are `InducingNode`s. The evidence is that of all binary problems.
    """
    theta = state.prior.kernel.theta
    _, _, apart = learned_coordinates(state.prior.kernel)
    space = KernelScales.at(plan.kernel, theta, plan.averaging, apart)
    problem = InducingProblem(plan, ep, plan.kernel_alone(state.prior.Z), state.sites)
    evaluate, bounds = Nodes(problem, space).evaluate, space.bounds
    with monitor.phase("integration over hyperparameters") as told:
        search: dict[str, Any] = dict(accuracy=TO_THE_MODE, monitor=StepsOfPhase(told))
        found = find_mode(evaluate, space.phi(theta), bounds, max_iter=plan.max_iter, **search)
    if found is None:
        return None
    mode, end = found
    if end.reason == "asked":
        return average_of([mode], np.array([mode.objective]))
    # workers have the partitions, whose pool is open: nodes come one after another
    with parallel_config(backend="sequential"):
        if sum(ep.sizes) <= LIMITS.several:
            return integrate(evaluate, mode, bounds, monitor=monitor)
        curvature, _ = curvature_at(evaluate, mode, bounds)
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
    own[heaviest] = own[heaviest]._replace(sites=state.sites, model=model)
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
    attributes = attributes_of_nodes(average, theta, learned_coordinates(kernel)[0])
    return dict(posteriors=posteriors, kernel=kernel), loo, attributes
