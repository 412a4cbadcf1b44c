"""From the plan of a spike-and-slab fit to fitted attributes: by EP at nodes, or by chains.

A node is EP at other hyperparameters than those of the mode, from the state of a neighbour.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax
from sklearn.exceptions import ConvergenceWarning

from .._engine.hyper import Average, Node, Visits, average_of, curvature_at, integrate, star_about
from .._engine.loop import Reason, Trace
from .._estimator.averaged import average_remarks
from .._estimator.fitting import BinaryFit, hyper_attributes, replace_fitted, run_attributes
from ._chains import sample_models
from ._hyperparameters import HyperPrior, Space
from ._learning import EvidenceSearch, overrated
from ._model_law import ModelLaw
from ._posterior import CoefficientMixture, CoefficientPosterior, mixture_of_draws
from ._runs import SHORT, distinct, explore, run, run_start, settled_near

WORTH_A_REMARK = 0.1  # nats
HYPER_NAMES = np.array(["log_noise_variance", "log_slab_variance", "logit_prior_inclusion"])


class _StarLimits(NamedTuple):
    """How a star is laid, and which stars are none.

    Of 33 sets of 30 to 200 rows and more columns 24 have one. There, against some 250 nodes, the
    largest error of an inclusion is .013 in the mean and log losses are .0013 off, after .005 and
    .0006 of a lattice, for 72 posteriors in place of 232. Others pay both: 1,050 after 650.
    """

    difference: float = 0.3  # between gradients that tell the curvature, above the error of theirs
    flattest: float = 0.4  # curvature, as that of lattices; flatter modes have no star
    better: float = 1.0  # nats above the mode: another mode, which a lattice looks for
    most: int = 10  # nodes: one more than four long tails, or a star that was laid anew


_STAR = _StarLimits()


class Settled(NamedTuple):
    """Payload of a node: its state, and the nats by which EP overrates its evidence, if tested."""

    state: Any
    taken_back: float | None = None


@dataclass
class NodeRuns:
    """EP at any hyperparameters; `settle(problem, state)` starts from the state of a neighbour.

    With far more columns than rows and little noise EP overrates the evidence. So what is above
    `top`, the log density of the mode, is held against single models, drawn by `seed`, before it
    can lead the lattice anywhere; what they do not confirm within their error is taken back. Where
    columns are no more than rows they confirmed all of 46 fits to 13 to 1000 rows.
    """

    problem: Any
    space: Space
    prior: HyperPrior
    settle: Callable
    seed: int = 0
    top: float = np.inf

    @property
    def is_wide(self):
        """Whether columns are more than rows, as the likelihood counts these."""
        return self.problem.model.X.shape[1] > self.problem.n_rows

    def node(self, phi, state):
        """Return the `Node` of a state at rest, tested if it is above the top."""
        h = self.space.h(phi)
        slope = self.space.slope(state.evidence_gradient + self.prior.slope(h))
        log_prior = self.prior.log_density(h)
        # an average keeps all nodes, of vectors as long as X has columns
        kept = Settled(state.at_rest())
        node = Node(phi, state.log_evidence, log_prior, slope, state.residual, kept)
        return self.tested(node) if node.objective > self.top else node

    def tested(self, node):
        """Return a node with the evidence that single models confirm, within their error."""
        state, taken_back = node.payload
        if taken_back is not None:
            return node
        taken_back = overrated(state.at_rest(), self.seed) if self.is_wide else 0.0
        if taken_back > 0:  # the gradient of the evidence is not known any more
            slope = self.space.slope(self.prior.slope(self.space.h(node.phi)))
            node = node._replace(gradient=slope, log_evidence=node.log_evidence - taken_back)
        return node._replace(payload=Settled(state, taken_back))

    def evaluate(self, phi, near):
        """Return the `Node` at phi, or None where the sites do not settle."""
        problem = self.problem.with_parameters(self.space.h(phi))
        state = self.settle(problem, None if near is None else near.payload.state)
        return None if state is None else self.node(phi, state)


def _about_mode(runs, mode, bounds, n_jobs, monitor):
    """Return the `Average` over nodes about the mode: a star where columns are more than rows.

    There a posterior is dear. Where the star is not that of about a normal distribution a lattice
    takes its place, as it does for fewer hyperparameters. Rows count as the likelihood has them,
    so that partitions and repeated rows are averaged over as rows in memory and weights are.
    """
    told = n_jobs, monitor
    if not runs.is_wide or len(mode.phi) < 3:
        return integrate(runs.evaluate, mode, bounds, *told)
    curvature = curvature_at(runs.evaluate, mode, bounds, _STAR.difference)[0]
    if np.linalg.eigvalsh(curvature)[0] > _STAR.flattest:
        with monitor.phase("integration over hyperparameters") as heard:
            visits = Visits(runs.evaluate, bounds, heard)
            star = star_about(visits, mode, np.linalg.inv(curvature), _STAR.flattest)
        best = max(node.objective for node in star.nodes)
        if best < mode.objective + _STAR.better and star.n_evaluations <= _STAR.most:
            return star
    return integrate(runs.evaluate, mode, bounds, *told, curvature=curvature)


def _confirmed(runs, average):
    """Return an average of evidences that single models confirm.

    The heaviest node and that of least noise are tested, and all where one of them is overrated.
    """
    quietest = min(average.nodes, key=lambda node: node.payload.state.problem.noise)
    if not any(runs.tested(node).payload.taken_back > 0 for node in (average.heaviest, quietest)):
        return average
    nodes = [runs.tested(node) for node in average.nodes]
    lost = [old.objective - new.objective for old, new in zip(average.nodes, nodes, strict=True)]
    log_mass = average.log_evidence + np.log(average.weight) - lost
    return average_of(nodes, log_mass, average.foretold, average.n_evaluations)


def average_attributes(average, space, used, unit=0.0):
    """Return what an average says of hyperparameters; `unit` (3,) brings h to those of the user."""
    free = space.free
    nodes = np.array([(space.h(p) + unit)[free] for p in average.phi])
    return {
        **hyper_attributes([nodes], [average.weight], HYPER_NAMES[free].tolist(), used),
        "log_evidence_": average.log_evidence,
        "_remarks": average_remarks([average]),
    }


def state_attributes(units, state):
    """Return the fitted attributes that follow from one state at given hyperparameters."""
    mixture = CoefficientMixture([CoefficientPosterior.of(units, state)], np.ones(1))
    return mixture.attributes() | {
        "log_evidence_": state.log_evidence,
        "site_shift_": state.sites[0] / units.y_scale,
        "site_precision_": state.sites[1] / units.y_scale**2,
        "_posteriors": [mixture],
    }


def keep(estimator, found, monitor, single):
    """Keep the attributes that a fit found, its history completed by the monitor."""
    history = monitor.completed(found["history_"], found["log_evidence_"], found)
    monitor.finish()
    found |= {"history_": history, "n_iter_": len(history["residual"]), "_fitted_single": single}
    replace_fitted(estimator, found)


def ep_attributes(plan, monitor):
    """Learn what is free, run the starts, then integrate; the monitor watches the run kept."""
    h, sites = plan.space.value, None if plan.warm is None else plan.warm[1]
    searched, dense, asked = "none", False, False
    if plan.space.free.any():
        with monitor.phase("learning") as told:
            search = EvidenceSearch(plan, told)
            place, searched, dense = search.learn(plan.warm)
        h, sites, asked = place.h, place.state.sites, search.asked
    problem, space = plan.problem.with_parameters(h), plan.space
    best, *others = _points(plan, problem, sites, monitor)
    runs = NodeRuns(problem, space, plan.prior, settled_near, plan.evidence_seed)
    mode = runs.node(space.phi(h), best.state)
    average, used = Average.alone(mode), "mode"
    if plan.integrates and not asked and best.reason != "asked":
        mode = runs.tested(mode)
        runs = replace(runs, top=mode.objective)
        bounds = space.bounds(problem.factor.n_indicators(len(best.state.mean)))
        average = _about_mode(runs, mode, bounds, plan.settings.n_jobs, monitor)
        average, used = _confirmed(runs, average), "integrate"
    units = plan.units
    parts = [CoefficientPosterior.of(units, n.payload.state.at_rest()) for n in average.nodes]
    mixture = CoefficientMixture(parts, average.weight)
    unit = np.array([2 * np.log(units.y_scale)] * 2 + [0.0])
    found = average_attributes(average, space, used, unit)
    evidences = np.array([best.log_evidence, *(p.log_evidence for p in others)])
    return {
        **state_attributes(units, best.state),
        **mixture.attributes(),
        **run_attributes([best]),
        **found,
        "fixed_point_log_evidences_": evidences,
        "n_fixed_points_": len(evidences),
        "algorithm_used_": best.used,
        "search_used_": searched,
        "dense_start_used_": dense,
        "_remarks": found["_remarks"] + _taken_back(average),
        "_warm_shape": (len(best.state.mean), problem.factor.groups is None),
        "_warm_h": h + unit,
        "_posteriors": [mixture, _with_others(units, mixture, evidences, others)],
    }


def _points(plan, problem, sites, monitor):
    """Runs of the starts at final hyperparameters, the best one again for the monitor."""
    settings, seeds = plan.settings, plan.start_seeds
    if len(seeds) > 1:
        runs = explore(problem, settings, seeds, sites=sites)
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


def _taken_back(average):
    """Return what `diagnose` says of evidence that single models did not confirm."""
    nats = logsumexp([node.payload.taken_back or 0.0 for node in average.nodes], b=average.weight)
    if nats <= WORTH_A_REMARK:
        return ()
    return (
        f"Single models did not confirm the evidence of EP: {nats:.1f} nats of it were taken back.",
    )


def _with_others(units, mixture, evidences, others):
    """Return the mixture with the other fixed points at the mode added by their evidences."""
    if not others:
        return mixture
    parts = [*mixture.posteriors, *(CoefficientPosterior.of(units, p.state) for p in others)]
    weight = softmax([*np.log(mixture.weight), *(evidences[1:] - evidences[0])])
    return CoefficientMixture(parts, weight)


# ------------------------------------------------------------------------------------- chains


def _attributes_of_draws(plan, law, draws):
    """Return the fitted attributes that follow from the draws of models so far."""
    mixture = mixture_of_draws(plan.units, law, draws, plan.evidence_seed)
    models, _, weight = draws.kept
    evidence, free = law.log_evidence(models, weight), law.space.free
    nodes, weight, used = mixture.nodes[:, free], mixture.weight, "integrate"
    if not free.any():  # the nodes are equal, and one stands for them
        nodes, weight, used = nodes[:1], np.ones(1), "mode"
    return {
        **mixture.attributes(),
        **hyper_attributes([nodes], [weight], HYPER_NAMES[free].tolist(), used),
        "log_evidence_": evidence,
        "fixed_point_log_evidences_": np.array([evidence]),
        "n_fixed_points_": 1,
        "_posteriors": [mixture, mixture],
    }


def chain_attributes(plan, monitor):
    """Return the fitted attributes of a fit by chains, or None where models are dense.

    The monitor is told of each round; its payload is called where a callback wants to predict.
    """
    d = plan.problem.model.X.shape[1]
    worth = plan.problem.model.n_independent(plan.n_different)
    prior = HyperPrior.of_correlated(plan.space, d, worth)
    law, trace = ModelLaw(plan.problem, plan.space, prior), Trace(monitor)

    def told(draws):
        trace.begin("chains")
        figures = {"residual": draws.error, "objective": -draws.log_density}
        return trace.end(figures, partial(_attributes_of_draws, plan, law, draws))

    draws = sample_models(law, plan.evidence_seed, plan.settings.max_iter, told)
    if draws is None:
        return None
    reason: Reason = "asked" if trace.asked else "converged" if draws.mixed else "max_iter"
    return {
        **run_attributes([BinaryFit(None, trace.history, reason, np.nan, {})]),
        **_attributes_of_draws(plan, law, draws),
        "algorithm_used_": "chains" if draws.error else "enumeration",
        "search_used_": "none",
        "dense_start_used_": False,
        "_remarks": _chain_remarks(draws),
    }


def _chain_remarks(draws):
    if not draws.error:
        return ("Columns are correlated: all models were enumerated.",)
    n_chains, number = len(draws.by_chain), draws.effective_number
    least = "" if np.isinf(number) else f", least effective number {number:.0f}"
    return (
        f"Columns are correlated: models were drawn by {n_chains} chains. Largest standard error "
        f"of an inclusion {draws.error:.2g}{least}.",
    )


def warn_not_mixed(estimator):
    """Warn that the chains of a fit do not agree, or were ended."""
    warnings.warn(
        f"{type(estimator).__name__}: the chains over models have not mixed "
        f"({estimator.stop_reason_}): after {estimator.n_iter_} rounds the largest standard error "
        f"of an inclusion is {estimator.history_['residual'][-1]:.2g}. The fitted model is usable; "
        "credible_sets(), which takes columns together, is more reliable than single inclusions.",
        ConvergenceWarning,
        stacklevel=3,
    )
