"""From the plan of a spike-and-slab fit to the run that is kept, nodes, and fitted attributes.

A node is EP at other hyperparameters than those of the mode, from the sites of a neighbour.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Average, Node, average_of, integrate
from .._engine.loop import Silent
from .._estimator.averaged import average_remarks, hyper_attributes
from .._estimator.fitting import run_attributes
from ._energy import EPEnergy, descend, regular_ep, sites_at
from ._hyperparameters import HyperPrior, NodeCoordinates, energy_gradient
from ._learning import Climb, EvidenceSearch
from ._model_evidence import overrated
from ._posterior import CoefficientMixture, CoefficientPosterior
from ._runs import SHORT, Run, RunSettings, distinct, explore, proper_state, run, run_start
from ._units import Standardisation


class _AtANode(NamedTuple):
    """How the fixed point at a node is found from the sites of a neighbour: first by sweeps.

    The descent goes on where the least residual of these is above `settled`. It begins at the
    neighbour's sites where they never came nearer than `lost`, and ends at a residual of
    `descent_tol`, or where three steps in a row gain less than `gain` nats of evidence. A node that
    gains more to the end does not count.
    """

    sweeps: int = 12
    tol: float = 5e-4
    away: float = 3.0  # times the least residual: sweeps that lead there end
    settled: float = 5e-3
    damping: float = 0.8
    weaker: tuple = (1.0, 0.6, 0.3)  # shares tried of negative sites, which may leave no posterior
    lost: float = 0.3
    descent_tol: float = 1e-3
    gain: float = 0.01
    steps: int = 20
    block: int = 20


_NODE = _AtANode()


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
        for share in _NODE.weaker:
            start = np.where(sites[1] < 0, share * sites, sites)
            with suppress(ImproperPosterior):
                regular_ep(
                    problem, start, max_iter=_NODE.sweeps, tol=_NODE.tol, damping=_NODE.damping,
                    energies=False, signed=True, monitor=nearest,
                )  # fmt: skip
            if nearest.state is not None:
                break
        if nearest.residual < _NODE.settled:
            return nearest.state
        if self.settings.algorithm == "ep":
            return None
        state = proper_state(problem, start) if nearest.residual > _NODE.lost else nearest.state
        out = descend(
            state,
            max_iter=_NODE.steps,
            tol=_NODE.descent_tol,
            max_block=_NODE.block,
            least_gain=_NODE.gain,
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
        return record["residual"] > _NODE.away * self.residual


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


WORTH_A_REMARK = 0.1  # nats
HYPER_NAMES = np.array(["log_noise_variance", "log_slab_variance", "logit_prior_inclusion"])


def state_attributes(units, state):
    """Return the fitted attributes that follow from one state at given hyperparameters."""
    mixture = CoefficientMixture([CoefficientPosterior.of(units, state)], np.ones(1))
    return of_mixture(mixture) | {
        "log_evidence_": -state.energy,
        "site_shift_": state.sites[0] / units.y_scale,
        "site_precision_": state.sites[1] / units.y_scale**2,
        "_posteriors": [mixture],
    }


def of_mixture(mixture):
    """Return the attributes that are moments of the posterior of all parts."""
    coef, coef_std = mixture.coef_moments()
    inclusion = mixture.inclusion
    return {
        "coef_": coef,
        "coef_std_": coef_std,
        "intercept_": float(mixture.units.intercept(coef)),
        "inclusion_proba_": inclusion,
        "expected_model_size_": float(inclusion.sum()),
        **mixture.hyperparameters(),
    }


def fitted_attributes(plan, fit):
    """Return all fitted attributes, what predicts last."""
    (best, *others), average = fit.points, fit.average
    parts = [node.payload.posterior for node in average.nodes]
    mixture = CoefficientMixture(parts, average.weight)
    unit = np.array([2 * np.log(plan.units.y_scale)] * 2 + [0.0])
    coordinates = NodeCoordinates(plan.space)
    free = plan.space.free
    return {
        **state_attributes(plan.units, best.state),
        **of_mixture(mixture),
        **run_attributes([best]),
        "log_evidence_": average.log_evidence,
        "fixed_point_log_evidences_": np.array([p.log_evidence for p in fit.points]),
        "n_fixed_points_": len(fit.points),
        "algorithm_used_": best.used,
        "search_used_": fit.searched,
        "dense_start_used_": fit.dense,
        **hyper_attributes([average], HYPER_NAMES[free].tolist(), fit.used),
        "hyper_nodes_": np.array([(coordinates.h(p) + unit)[free] for p in average.phi]),
        "_remarks": _remarks(fit),
        "_warm_shape": (len(best.state.mean), best.state.problem.factor.groups is None),
        "_warm_h": fit.h + unit,
        "_posteriors": [mixture, _with_others(plan.units, mixture, best, others)],
    }


def _remarks(fit):
    """Return what `diagnose` says of the average over hyperparameters."""
    remarks = average_remarks([fit.average])
    if fit.taken_back > WORTH_A_REMARK:
        remarks += (
            f"Single models did not confirm the evidence of EP: {fit.taken_back:.1f} nats of it "
            "were taken back.",
        )
    return remarks


def _with_others(units, mixture, best, others):
    """Return the mixture with the other fixed points at the mode added by their evidences."""
    if not others:
        return mixture
    parts = [*mixture.parts, *(CoefficientPosterior.of(units, p.state) for p in others)]
    gain = [p.log_evidence - best.log_evidence for p in others]
    return CoefficientMixture(parts, softmax([*np.log(mixture.weight), *gain]))


class SpikeSlabFit(NamedTuple):
    """Runs at the mode h of the hyperparameters, and the average over them about the first run.

    The runs ended at different fixed points, the one that is kept first; `searched` and `dense` say
    how h was learned. `average` has one node where nothing is integrated; `taken_back` are the nats
    of its evidence that single models did not confirm; `used` is "integrate" or "mode".
    """

    points: list[Run]
    h: np.ndarray
    searched: str
    dense: bool
    average: Average
    taken_back: float
    used: str


def fit_plan(plan, monitor):
    """Learn what is free, run the starts, then integrate; the monitor watches the run kept."""
    problem, settings, h = plan.problem, plan.settings, plan.space.value
    sites = None if plan.warm is None else plan.warm[1]
    searched, dense, asked = "none", False, False
    if plan.space.free.any():
        starts, seed = plan.noise_starts, plan.evidence_seed
        with monitor.phase("learning") as told:
            climb = Climb(problem, plan.space, settings, plan.prior, seed, told, plan.integrates)
            learned = EvidenceSearch(climb, starts).learn(plan.warm)
        place, searched, dense = learned.place, learned.searched, learned.dense
        h, sites, asked = place.h, place.state.sites, climb.asked
        problem = problem.with_parameters(h)
    points = _points(plan, problem, sites, monitor)
    coordinates = NodeCoordinates(plan.space)
    runs = NodeRuns(problem, plan.units, coordinates, plan.prior, settings, plan.evidence_seed)
    if not plan.integrates or asked or points[0].reason == "asked":
        mode = runs.node(h, points[0].state)
        alone = Average.alone(mode)
        return SpikeSlabFit(points, h, searched, dense, alone, 0.0, "mode")
    average, taken_back = integrated(runs, h, points[0].state, plan.n_jobs, monitor)
    return SpikeSlabFit(points, h, searched, dense, average, taken_back, "integrate")


def _points(plan, problem, sites, monitor):
    """Runs of the starts at final hyperparameters, the best one again for the monitor."""
    settings, seeds = plan.settings, plan.start_seeds
    if len(seeds) > 1:
        runs = explore(problem, settings, seeds, sites=sites, n_jobs=plan.n_jobs)
        k = max(range(len(runs)), key=lambda k: (runs[k].converged, runs[k].log_evidence))
        best = run_start(problem, settings, k, seeds[k], sites=sites, monitor=monitor)
        return [best, *distinct(runs, problem.factor.slab_variance)[1:]]
    best = run_start(problem, settings, 0, seeds[0], sites=sites, monitor=monitor)
    cut_short = best.reason == "asked" or settings.max_iter <= SHORT
    if sites is None and not (best.converged or cut_short) and settings.algorithm == "auto":
        second = run(problem, settings, start="descent")
        if second.converged or second.log_evidence > best.log_evidence:
            best = second
    return [best]
