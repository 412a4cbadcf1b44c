"""Average of the spike-and-slab posterior over its hyperparameters.

Coordinates are phi = (log noise, log r, logit of the inclusion), as far as they are free, where r
is slab variance times mean square of the columns over noise: what the sign of life of a single
column depends on. Unlike noise and slab variance, noise and r are nearly independent given y.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import logsumexp

from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Node, average_of, integrate
from .._engine.loop import Silent
from ._descent import descend
from ._energy import EPEnergy, regular_ep, sites_at
from ._hyperparameters import HyperPrior, Space, energy_gradient
from ._learning import overrated
from ._posterior import CoefficientPosterior
from ._runs import RunSettings, proper_state
from ._units import Standardisation

__all__ = ["NodeCoordinates", "NodeRuns", "integrated"]

# Least and largest ratio r, and odds of the inclusion times d. The prior has a mass of .0006 and of
# at most .002 beyond, and the evidence is flat there or small.
RATIO_RANGE = (1e-3, 1e8)
LEAST_ODDS = 1e-3
# Sweeps of a node from its neighbour's sites, which stop at the second figure, and where the
# residual is the third times the least one. Above the fourth the descent goes on.
SWEEPS_OF_NODE, NODE_TOL, AWAY, SETTLED = 12, 5e-4, 3.0, 5e-3
NODE_DAMPING = 0.8
# Negative sites of a neighbour may leave no posterior here: shares of them that are tried.
WEAKER = (1.0, 0.6, 0.3)
# The descent begins at the neighbour's sites where sweeps never came nearer than the first figure,
# and ends at a residual, or where three steps in a row gain less evidence, in nats, than counts. A
# node that gains more to the end does not count.
LOST, DESCENT_TOL, NODE_GAIN = 0.3, 1e-3, 0.01
NODE_STEPS, NODE_BLOCK = 20, 20


@dataclass(frozen=True)
class NodeCoordinates:
    """The way from h (log noise, log slab, logit) to phi, for what is free, and back."""

    space: Space

    @property
    def _log_size(self):
        return np.log(self.space.size)

    def of(self, h):
        """Return phi (T,) at h."""
        return np.array([h[0], h[1] + self._log_size - h[0], h[2]])[self.space.free]

    def h(self, phi):
        """Return h (3,) at phi."""
        h = self.space.value.copy()
        free = self.space.free
        h[free] = phi
        if free[1]:
            h[1] += h[0] - self._log_size
        return h

    def slope(self, gradient):
        """Return the derivative in phi from that in h."""
        noise, slab, inclusion = gradient
        if self.space.free[1]:
            noise = noise + slab  # r is kept
        return np.array([noise, slab, inclusion])[self.space.free]

    def bounds(self, n_indicators):
        """Return the least and largest phi, shape (T, 2)."""
        odds = np.log(LEAST_ODDS / n_indicators)
        low = [self.space.low[0], np.log(RATIO_RANGE[0]), odds]
        high = [self.space.high[0], np.log(RATIO_RANGE[1]), -odds]
        return np.column_stack([low, high])[self.space.free]


@dataclass
class Settled:
    """Payload of a node: what predicts, and the sites that its neighbours start from.

    `taken_back` are the nats by which EP overrates the evidence, None where that was not tested.
    """

    posterior: CoefficientPosterior
    sites: np.ndarray
    slab_variance: float
    taken_back: float | None = None


@dataclass
class NodeRuns:
    """EP at any hyperparameters, started from the sites of a neighbour.

    With far more columns than rows and little noise EP overrates the evidence. So what is above
    `top`, the log density of the mode, is held against single models, drawn by `seed`, before it
    can lead the lattice anywhere; what they do not confirm within their error is taken back.
    """

    problem: EPEnergy
    units: Standardisation
    coordinates: NodeCoordinates
    prior: HyperPrior
    settings: RunSettings
    seed: int
    top: float = np.inf

    def node(self, h, state):
        """Return the `Node` of a state at rest, tested if it is above the top."""
        slope, log_prior = self.prior.slope(h), self.prior.log_density(h)
        evidence, taken_back = -state.energy, None
        gradient = slope - energy_gradient(state, h)
        if evidence + log_prior > self.top:
            taken_back = overrated(state, self.seed)
            evidence -= taken_back
            if taken_back > 0:
                gradient = slope  # that of the evidence is not known any more
        payload = Settled(
            CoefficientPosterior.of(self.units, state), state.sites,
            state.problem.factor.slab_variance, taken_back,
        )  # fmt: skip
        phi, gradient = self.coordinates.of(h), self.coordinates.slope(gradient)
        return Node(phi, evidence, log_prior, gradient, state.residual, payload)

    def tested(self, node):
        """Return a node with the evidence that single models confirm, within their error."""
        if node.payload.taken_back is not None:
            return node
        problem = self.problem.with_parameters(self.coordinates.h(node.phi))
        taken_back = overrated(problem.at(node.payload.sites), self.seed)
        payload = replace(node.payload, taken_back=taken_back)
        return node._replace(log_evidence=node.log_evidence - taken_back, payload=payload)

    def evaluate(self, phi, near):
        """Return the `Node` at phi, or None where the sites do not settle."""
        h = self.coordinates.h(phi)
        problem = self.problem.with_parameters(h)
        state = self._settled(problem, _first_sites(problem, near.payload))
        return None if state is None else self.node(h, state)

    def _settled(self, problem, sites):
        """State at rest near the sites by sweeps of EP or, where they lead away, by the descent."""
        nearest = _Nearest()
        for share in WEAKER:
            start = np.where(sites[1] < 0, share * sites, sites)
            with suppress(ImproperPosterior):
                regular_ep(
                    problem, start, max_iter=SWEEPS_OF_NODE, tol=NODE_TOL, damping=NODE_DAMPING,
                    energies=False, signed=True, monitor=nearest,
                )  # fmt: skip
            if nearest.state is not None:
                break
        if nearest.residual < SETTLED:
            return nearest.state
        if self.settings.algorithm == "ep":
            return None
        state = proper_state(problem, start) if nearest.residual > LOST else nearest.state
        out = descend(
            state, max_iter=NODE_STEPS, tol=DESCENT_TOL, max_block=NODE_BLOCK, least_gain=NODE_GAIN
        )
        return None if out.reason == "max_iter" else out.evaluation.payload


def _first_sites(problem, near):
    """Sites by which the prior of a problem answers the cavities of a neighbour.

    Cavities are what the data say, and follow the noise; the prior, which changes most from one
    node to the next, needs no posterior to be taken into account.
    """
    q = near.posterior.marginals
    cavity = (np.stack([q.mean / q.var, 1.0 / q.var]) - near.sites) * (q.noise / problem.noise)
    # in slab variances sites change least from one node to the next
    sites = near.sites * (near.slab_variance / problem.factor.slab_variance)
    return sites_at(problem.factor, cavity, sites)


class _Nearest(Silent):
    """Monitor of sweeps: keeps the state of least residual, and stops where it is left behind."""

    def __init__(self):
        self.residual, self.state = np.inf, None

    def end(self, record, payload):
        if record["residual"] < self.residual:
            self.residual, self.state = record["residual"], payload
        return record["residual"] > AWAY * self.residual


def integrated(runs, h, state, n_jobs, monitor):
    """Return the `Average` about the state at the mode h, and the nats taken from its evidence."""
    problem = runs.problem
    bounds = runs.coordinates.bounds(problem.factor.n_indicators(problem.model.X.shape[1]))
    mode = replace(runs, top=-np.inf).node(h, state)
    runs = replace(runs, top=mode.objective)
    average = _tested(runs, integrate(runs.evaluate, mode, bounds, n_jobs, monitor))
    taken_back = [node.payload.taken_back or 0.0 for node in average.nodes]
    return average, float(logsumexp(taken_back, b=average.weight))


def _tested(runs, average):
    """Test the heaviest node and that of least noise, and all where one of them is overrated."""

    def overrates(node):
        return runs.tested(node).payload.taken_back > 0

    if not any(map(overrates, (average.heaviest, min(average.nodes, key=_noise_of)))):
        return average
    nodes = [runs.tested(node) for node in average.nodes]
    lost = [old.objective - new.objective for old, new in zip(average.nodes, nodes, strict=True)]
    log_mass = average.log_evidence + np.log(average.weight) - lost
    return average_of(nodes, log_mass, average.foretold, average.n_evaluations)


def _noise_of(node):
    return node.payload.posterior.noise
