"""Average over the scale of the prior: the nodes of a binary problem, and what they add up to.

The one coordinate phi is the log of a scale of all features. A node is a fit at that scale from the
weights and variances of a neighbour. The bound is stationary at its optimum: at these tolerances it
is right to 1e-4 nats, and coefficients to 1e-3 of their standard deviations.

Nodes lie where the bound says, and weigh by the evidence of expectation propagation at its
optimum. The bound is lower by what the bound of each row by itself lacks, which grows with the
scale, so that weights by the bound would shrink coefficients too much.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Average, Node, average_of, integrate
from .._engine.quadrature import logistic_mixture
from ._calibration import Cavities, cavities, label_moments
from ._posterior import WeightPosterior
from ._priors import PredictorPrior, SlopeSearch

__all__ = [
    "NodeFit",
    "PriorNodes",
    "average_over_scale",
    "given_node",
    "in_units",
    "mode_of_scale",
    "node_fit",
    "scale_nodes",
    "single_node",
]

# Changes of log variances and the relative gradient at which the fit of a node ends, and the
# former from which on a node counts as not settled.
_TOL, _INNER_TOL, _UNSETTLED = 3e-2, 1e-2, 1e-1
# Slope of the log density from which on a node counts as the mode, and nodes to look for it.
_LEVEL, _MOST_PLACES = 0.2, 15


class NodeFit(NamedTuple):
    """What a node is asked for: its posterior, and per row what the mixture needs.

    `last` are the weights and log variances that a neighbour starts from; mean and var (n,) are
    those of the predictors, precision (n,) is that of the sites; `update` is a step of the log
    scale towards its mode; `moments` (3, n) are the `label_moments` of the cavities where known.
    """

    posterior: WeightPosterior
    last: Any
    mean: np.ndarray
    var: np.ndarray
    precision: np.ndarray
    cavities: Cavities
    dof: float
    update: float = 0.0
    moments: Any = None


def node_fit(problem, step):
    """Return the `NodeFit` of a step of the outer loop."""
    inner, var = step.inner, step.estimate.training
    left = cavities(inner.s, var, inner.site.slope, inner.site.precision, problem.weight)
    last = inner.u, np.log(np.concatenate([var, step.own]))
    return NodeFit(
        problem.posterior(step), last, inner.s, var, inner.site.precision, left, step.dof
    )


@dataclass
class PriorNodes:
    """Maps log scales to nodes of one binary problem.

    `prior` is that of the coefficients, with one scale, whose own prior is `of_scale`; `first` are
    the weights and log variances to start from where there is no neighbour, or None.
    """

    problem: Any
    sign: np.ndarray
    prior: Any
    of_scale: PredictorPrior
    first: Any = None

    def at(self, phi, **changes):
        """Return the problem with the log scale given."""
        return replace(self.problem, prior=self.prior.known(phi), **changes)

    def __call__(self, phi, near):
        """Return the `Node` at phi (1,) from a neighbour; None where there is none."""
        problem = self.at(phi[0], tol=_TOL, inner_tol=_INNER_TOL)
        last = self.first if near is None else near.payload.last
        half = 0.5 * problem.damping
        for start, damping in ((last, problem.damping), (None, half)):
            try:
                result = problem.solve(problem.loop(self.sign), start, damping)
            except ImproperPosterior:
                continue
            if result.residual < _UNSETTLED:
                return self.node(phi[0], result)
        return None

    def node(self, phi, result):
        """Return the `Node` of a result of the outer loop at a log scale."""
        step, phi = result.evaluation.payload, float(phi)
        slope = self.prior.evidence_slope(
            step.inner.u, step.prior, float(np.exp(phi)), step.estimate.predictor, step.dof
        )
        own_slope, log_prior = self.of_scale.slope(phi), self.of_scale.log_density(phi)
        gradient = np.array([slope + own_slope])
        update = self.prior.update(slope, own_slope, step.dof)
        fit = node_fit(self.problem, step)._replace(update=update)
        return Node(np.array([phi]), step.objective, log_prior, gradient, result.residual, fit)

    def mean_scale(self, average, given):
        """Return exp of the mean log scale: a number, or for groups one a feature.

        In units of the prior of the coefficients that was `given`.
        """
        centre = float(np.exp(average.weight @ average.phi[:, 0]))
        if given.groups is None:
            return centre
        return centre * self.prior.unit_variances() / given.unit_variances()


def scale_nodes(problem, sign, last):
    """Return the `PriorNodes` of a binary problem, and the log scale where to look for the mode.

    Scales of groups keep the proportions that learning finds. None where there is nothing to
    average over. `last` are weights, variances and log scale of an earlier fit that was averaged,
    or None.
    """
    if problem.column_variances is None:
        return None, None
    prior, first, start = problem.prior, None, 0.0
    if prior.groups is not None:
        result = problem.solve(problem.loop(sign))
        prior = prior.in_proportion(result.evaluation.payload.scale)
    of_scale = PredictorPrior.of(prior, problem.column_variances)
    if of_scale is None:
        return None, None
    if prior.groups is None and problem.prior.groups is None:
        start = of_scale.centre()
        if last is not None:
            *first, start = last
    return PriorNodes(problem, sign, prior, of_scale, first), start


def mode_of_scale(nodes, start, monitor):
    """Return a `Node` near the mode of the log scale, None where there is no posterior."""
    place, best = start, None
    search = SlopeSearch(nodes.of_scale.bounds())
    with monitor.phase("search for the scale of the prior") as told:
        for _ in range(_MOST_PLACES):
            node = nodes(np.array([place]), best)
            if node is None:
                break
            if best is None or node.objective > best.objective:
                best = node
            if told({"log_density": node.objective}) or abs(node.gradient[0]) < _LEVEL:
                break
            place = search(place, node.gradient[0], node.payload.update)
    return best


def average_over_scale(nodes, phi, result, monitor):
    """Return the `Average` about the log scale of a result of the outer loop.

    That alone where a callback asked to stop.
    """
    mode, bounds = nodes.node(phi, result), nodes.of_scale.bounds()[None]
    if result.reason == "asked":
        return Average([mode], np.ones(1), mode.objective)
    average = integrate(nodes, mode, bounds, nodes.problem.n_jobs, monitor)
    # what the bounds of coefficients with sites of their own lack is not known
    return average if nodes.prior.n_sites else _weighed_by_ep(nodes, average)


def _weighed_by_ep(nodes, average):
    """Return an `Average` with the evidence of expectation propagation in place of the bound."""
    fits = [node.payload for node in average.nodes]
    moments = label_moments(nodes.sign, [fit.cavities for fit in fits])
    lacking = _lacking(nodes.sign, nodes.problem.weight, fits, moments[0])
    weighed = [
        node._replace(
            log_evidence=node.log_evidence + more, payload=fit._replace(moments=moments[:, m])
        )
        for m, (node, more, fit) in enumerate(zip(average.nodes, lacking, fits, strict=True))
    ]
    log_mass = np.log(average.weight) + average.log_evidence + lacking
    return average_of(weighed, log_mass, average.foretold, average.n_evaluations)


def _lacking(sign, weight, fits, log_z):
    """Return by how much the bounds of nodes (M,) are below the evidence of EP at their optima.

    The sum over rows of log Z given the cavity, which is `log_z` (M, n), less the bound on that.
    """
    mean, var = (np.array([getattr(fit, name) for fit in fits]) for name in ("mean", "var"))
    left_mean, left_var = (np.array(v) for v in zip(*(fit.cavities for fit in fits), strict=True))
    share = var / left_var
    divergence = 0.5 * (share - 1.0 - np.log(share) + (mean - left_mean) ** 2 / left_var)
    gap = log_z + logistic_mixture(-sign * mean, var)[1] + divergence
    # of part of a copy it is about the square of the part
    return np.where(np.isfinite(gap), gap, 0.0) @ (weight * np.minimum(weight, 1.0))


def in_units(average, prior):
    """Return an `Average` over a prior's scale with coordinates in units of the user, for keeping.

    Without payloads.
    """
    nodes = [n._replace(phi=prior.in_units(n.phi), payload=None) for n in average.nodes]
    return average._replace(nodes=nodes)


def single_node(prior, scale, log_evidence):
    """Return the `Average` of the one node of a fit whose scale is given or at its mode."""
    if not prior.learn:
        return given_node(log_evidence)
    average = given_node(log_evidence)
    phi = np.atleast_1d(prior.in_units(np.log(prior.spread(scale))))
    return average._replace(nodes=[average.nodes[0]._replace(phi=phi)])


def given_node(log_evidence=np.nan):
    """Return the `Average` of the one node, without a coordinate, of a prior that is given."""
    node = Node(np.empty(0), log_evidence, 0.0, np.empty(0), 0.0, None)
    return Average([node], np.ones(1), log_evidence)
