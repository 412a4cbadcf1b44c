"""The fit of a planned model: start, sweeps, and the posterior at the end."""

from functools import partial
from typing import Any

import numpy as np
from scipy.stats import multivariate_normal, norm

from ..._engine.gaussian import Moments
from ..._engine.loop import SILENT, unheard
from ..._engine.partition import PartMap
from ..._estimator.fitting import BinaryFit, FitMonitor, fit_one_versus_rest
from .._checkpoint import digest, load_checkpoint, save_checkpoint, state_of
from .._prediction import GroupsForgotten
from ..exact.whole import fit_whole
from .arrow import LocalEffects, no_effects
from .importance import DrawState, ImportanceSettings, tilted_by_importance
from .messages import (
    Messages,
    check_precise,
    is_proper,
    posterior_moments,
    propagate,
    total_of,
)
from .mixture import GroupedMixture
from .mode import find_mode, laplace_messages
from .nuts import ChainState, tilted_by_nuts
from .parts import drawing_worker, mode_worker, nodes_worker, tilted_worker
from .theta_grid import (
    ThetaMarginal,
    conditional_nodes,
    conditional_start,
    even_grid,
    gaussian_nodes,
    join_nodes,
    prior_of_beta,
    product_grid,
)
from .theta_nodes import SiteState, middle_sites, tilted_over_theta

__all__ = ["fit_plan", "theta_rule"]

_MODE_TOL = 0.1  # sd: the messages at the mode contain one more Newton step anyway
_NODE_ROWS = 3_000_000  # row sites held at once for nodes of the grid
_MAX_INNER = 30
_MOST_ON_GRID = 3  # coordinates of theta that a product grid can afford: 5^3 nodes
# engines that draw, their first state, and the share of effective draws below which they draw again
_DRAWING = {
    "importance": (tilted_by_importance, DrawState, 0.3),
    "nuts": (tilted_by_nuts, ChainState, 0.5),
}


def fit_plan(estimator, plan, run, data, previous=None, checkpoint=None):
    """Return the `BinaryFit` of each problem of a plan, watched by the estimator's callbacks.

    run is the `PartMap` over raw parts, None for rows in memory; data are X and y as the caller
    gave them, for callbacks; previous is the state of an earlier fit to go on from; checkpoint the
    file for the state after each iteration. Of the estimator, which has `classes_`, nothing is
    changed.
    """
    classes = estimator.classes_
    several = len(classes) > 2
    if several and checkpoint is not None:
        raise ValueError("checkpoint needs two classes; y has more.")

    known = {"_columns": plan.columns, "group_labels_": plan.labels}
    known["_forgotten"] = GroupsForgotten()

    def so_far(posterior):
        return {"_posteriors": [posterior()], **known}

    most = len(classes) if several else plan.settings.max_iter
    X, y = data
    monitor = FitMonitor(estimator, X, y, most, so_far)
    if run is None:
        jobs = None if several else estimator.n_jobs
        fit_binary = partial(_fit_rows, plan, jobs, previous, checkpoint)
        fits = fit_one_versus_rest(fit_binary, plan.rows.y, len(classes), estimator.n_jobs, monitor)
    elif several:
        fits = _fit_classes(plan, run, classes, previous, monitor)
    else:
        fits = [_fit_binary(plan, run, previous, checkpoint, monitor, 0)]
    if len(fits) == 1:
        fits = [monitor.completed_fit(fits[0], **known)]
    monitor.finish()
    return fits


def _fit_rows(plan, n_jobs, previous, checkpoint, sign, monitor, k):
    """Return the `BinaryFit` of rows in memory with labels in {-1, +1}, problem k."""
    if plan.settings.whole and plan.problem.q == 1 and checkpoint is None:
        before = _start_of(plan.problem, previous, k)
        return fit_whole(
            plan, sign, monitor, None if before is None else _theta_of(plan.problem, before)
        )
    parts = plan.rows.parts(sign)
    with PartMap(parts, n_jobs, plan.settings.schedule == "asynchronous") as run:
        return _fit_binary(plan, run, previous, checkpoint, monitor, k)


def _theta_of(problem, messages):
    """Return the moments of theta in the Gaussian posterior of phi."""
    whole, d = posterior_moments(problem.prior, messages), problem.d
    return Moments(whole.mean[d:], whole.cov[d:, d:])


def _fit_classes(plan, run, classes, previous, monitor):
    """Fit one class after the other to raw parts; what runs in parallel is the parts."""
    fits = []
    for k, label in enumerate(classes):
        spec = plan.problem.spec._replace(positive=label)
        own = plan._replace(problem=plan.problem._replace(spec=spec))
        monitor.begin("class")
        fits.append(_fit_binary(own, run, previous, None, SILENT, k))
        monitor.end({"residual": fits[k].history["residual"][-1]}, None)
    return fits


def _fit_binary(plan, run, previous, checkpoint, monitor, k):
    """Run one binary fit from where it can start, saving on the way where asked to."""
    save, start = None, _start_of(plan.problem, previous, k)
    if checkpoint is not None:
        power = [] if plan.settings.power == 1.0 else [np.array(plan.settings.power)]
        model = digest(*plan.problem.prior, plan.site, plan.columns.slopes, *power)
        saved = load_checkpoint(checkpoint, plan.fingerprint + model)
        if saved is not None:
            start = Messages(saved["site_precision"], saved["site_shift"])
        save = partial(_save, plan, checkpoint, plan.fingerprint + model)
    return GroupedFit(run, plan.problem, plan.settings).fit(start, monitor, save)


def _save(plan, checkpoint, fingerprint, messages):
    state = state_of(messages, plan.problem.prior, plan.site, plan.labels)
    save_checkpoint(checkpoint, state, fingerprint)


def _start_of(problem, previous, k):
    """Return the messages of an earlier fit where they suit this one, else None."""
    if previous is None:
        return None
    precision, shift = previous["site_precision"], previous["site_shift"]
    if precision.ndim == 4:
        if k >= len(precision):
            return None
        precision, shift = precision[k], shift[k]
    n_sites, size = len(problem.where), problem.d + len(problem.theta_prior[0])
    if shift.shape[1] != size or n_sites < len(shift) or n_sites > len(shift) + 1:
        return None
    if n_sites > len(shift):
        precision = np.concatenate([precision, np.zeros((1, size, size))])
        shift = np.concatenate([shift, np.zeros((1, size))])
    return Messages(precision, shift) if is_proper(problem.prior, precision) else None


def theta_rule(problem, settings):
    """Return how theta is treated at the end, "none" without groups."""
    if problem.q == 0:
        return "none"
    # a grid of EP would undo what the engines that draw correct
    if settings.engine in _DRAWING:
        return "gaussian"
    too_many = settings.theta == "grid" and len(problem.theta_prior[0]) > _MOST_ON_GRID
    return "gaussian" if too_many else settings.theta


class MessageMonitor:
    """Monitor that saves the messages so far, and tells another what predicts by them.

    `messages_of` maps a payload to messages, of which `save` is told; what the other `monitor` is
    told is a function without arguments that returns the posterior so far.
    """

    def __init__(self, monitor, posterior, save, messages_of):
        self.monitor, self.posterior = monitor, posterior
        self.save, self.messages_of = save, messages_of

    def begin(self, name="iteration"):
        self.monitor.begin(name)

    def end(self, record, payload):
        if self.save is not None:
            self.save(self.messages_of(payload))
        return self.monitor.end(record, lambda: self.posterior(self.messages_of(payload))[0])


class GroupedFit:
    """A fit of a `GroupedProblem` by `Settings` over the parts that `run`, a `PartMap`, maps."""

    def __init__(self, run, problem, settings):
        self.run, self.problem, self.settings = run, problem, settings
        self.states: list[Any] = [None] * len(run.parts)
        self.inner_tol = 0.1 * settings.tol  # looser, and sweeps are spent on inner noise
        self.inner = dict(tol=self.inner_tol, max_passes=_MAX_INNER, power=settings.power)

    def find_mode(self, tol, max_iter, damping=1.0, monitor=SILENT):
        """Return the mode of the marginal posterior, started at the prior mean."""
        p, modes = self.problem, [None] * len(self.run.parts)

        def evaluate(phi):
            terms = self.run(mode_worker, modes, p.spec, phi, p.q)
            modes[:] = [t.modes for t in terms]
            return terms

        phi = np.r_[np.zeros(p.d), p.theta_prior[0]]
        options = dict(tol=tol, max_iter=max_iter, damping=damping, monitor=monitor)
        return find_mode(evaluate, p.prior, phi, p.d, **options)

    def _theta_moments(self, messages):
        return _theta_of(self.problem, messages)

    def prepare(self, messages):
        """Place the nodes, or the first draws, of every site by the posterior so far."""
        place = SiteState(None, *self._theta_moments(messages))
        self.states = [place] * len(self.run.parts)
        if self.settings.engine in _DRAWING:
            first = _DRAWING[self.settings.engine][1]
            self.states = [first(place, k) for k in range(len(self.run.parts))]

    def _shared(self):
        s, p = self.settings, self.problem
        if s.engine in _DRAWING:
            tilted, _, share = _DRAWING[s.engine]
            settings = ImportanceSettings(s.n_draws, share, s.seed)
            return drawing_worker, (p.spec, p.q, tilted, settings)
        return tilted_worker, (p.spec, p.q, self.inner)

    def tilted(self, cavities):
        """Return the tilted sites of all parts."""
        worker, shared = self._shared()
        sites = self.run(worker, list(zip(cavities, self.states, strict=True)), *shared)
        self.states = [s.state for s in sites]
        return sites

    def stream(self, cavity_of):
        """Yield (k, cavity, tilted site) of the parts, in turn or as they are ready."""
        worker, shared = self._shared()
        used = {}

        def message_of(k):
            used[k] = cavity_of(k)
            return used[k], self.states[k]

        if self.settings.schedule == "serial":
            order = range(len(self.run.parts))
            answers = ((k, self.run.one(k, worker, message_of(k), *shared)) for k in order)
        else:
            answers = self.run.as_completed(worker, message_of, *shared)
        for k, site in answers:
            self.states[k] = site.state
            yield k, used[k], site

    def as_one(self, messages):
        """Return what gives the tilted site of all parts as one, and starts at messages."""
        prior, state = self.problem.prior, SiteState(None, *self._theta_moments(messages))

        def solve(theta, *_):
            return self._evaluate_nodes(messages, theta)

        def tilted():
            nonlocal state
            site = tilted_over_theta(solve, prior, state)
            state = site.state
            return site

        return tilted

    def fit(self, start, monitor, save):
        """Run to the fixed point and return a `BinaryFit`.

        start are the messages to go on from, None to start at the mode; `monitor` is told of each
        iteration, with what returns the posterior so far; `save`, if not None, of the messages
        after each.
        """
        s, prior = self.settings, self.problem.prior
        if s.engine == "laplace":
            at_mode = partial(laplace_messages, prior=prior, with_cavities=False)
            watch = MessageMonitor(monitor, self.posterior, save, at_mode)
            mode = self.find_mode(s.tol, s.max_iter, s.damping, watch)
            return self._outcome(
                monitor, at_mode(mode), mode.history, mode.reason, mode.log_evidence
            )
        if start is None:
            start = laplace_messages(self.find_mode(_MODE_TOL, 50), prior)
        check_precise(total_of(prior, start).precision)
        self.prepare(start)
        watch = MessageMonitor(monitor, self.posterior, save, lambda messages: messages)
        draws = s.engine in _DRAWING
        stream = None if s.schedule == "parallel" else self.stream
        as_one = None if draws else self.as_one
        options = dict(max_iter=s.max_iter, tol=s.tol, damping=s.damping, accelerate=not draws)
        run = propagate(
            self.tilted, prior, start, stream=stream, as_one=as_one, monitor=watch, **options
        )
        result, evidence = run.result, run.result.evaluation.record["log_evidence"]
        found, counts = result.evaluation.payload, (run.n_skipped, run.n_cut)
        return self._outcome(monitor, found, result.history, result.reason, evidence, *counts)

    def _answers(self, theta, messages):
        """Return what the parts say of beta at nodes in theta, under their cavities."""
        p = self.problem
        return self.run(nodes_worker, messages, p.spec, theta, p.q, self.inner)

    def _evaluate_nodes(self, messages, theta, told=unheard):
        """Return the posterior given theta at nodes, in blocks that fit the memory."""
        p, block = self.problem, max(1, _NODE_ROWS // self.problem.n_rows)
        places = [s.nodes if isinstance(s, DrawState | ChainState) else s for s in self.states]
        warm = [None if place is None else place.sites for place in places]
        parts = []
        for k in range(0, len(theta), block):
            some = theta[k : k + block]
            sites = [None if w is None else middle_sites(w, len(some)) for w in warm]
            start, prior = conditional_start(messages, some, p.d), prior_of_beta(p.prior, p.d)
            solve = partial(self._answers, some)
            parts.append(conditional_nodes(solve, some, prior, start, sites, tol=self.inner_tol))
            told({"nodes": len(some), "log_evidence": float(np.max(parts[-1].log_z))})
        return join_nodes(parts)

    def posterior(self, messages, monitor=SILENT):
        """Return (posterior, log evidence or None) for messages; None keeps that of the sweeps."""
        rule, p = theta_rule(self.problem, self.settings), self.problem
        if rule == "grid":
            with monitor.phase("integration over theta") as told:
                return self._on_grid(messages, told)
        if rule == "mode":
            nodes = self._evaluate_nodes(messages, self._theta_moments(messages).mean[None])
            return self._mixture(nodes, np.ones(1)), float(nodes.log_z[0])
        theta, log_weight, (mean, root) = gaussian_nodes(total_of(p.prior, messages), p.d)
        weight = np.exp(log_weight)
        if p.q == 0:
            local, flat = no_effects(1, p.d), np.zeros(len(theta))
            prior = prior_of_beta(p.prior, p.d)
            return GroupedMixture(weight, theta, mean, root, local, None, flat, prior), None
        gaussian = self._theta_moments(messages)
        local = self._assemble(self._evaluate_nodes(messages, theta).local)
        marginal = ThetaMarginal(theta, weight, gaussian) if theta.shape[1] == 1 else None
        log_mass = multivariate_normal.logpdf(theta, *gaussian).reshape(-1)
        log_mass -= norm.logpdf(theta, *p.theta_prior).sum(1)
        more = marginal, log_mass, prior_of_beta(p.prior, p.d)
        return GroupedMixture(weight, theta, mean, root, local, *more), None

    def _on_grid(self, messages, told):
        """Return posterior and log evidence by a grid in theta, with EP for the rest."""
        (centre, cov), prior = self._theta_moments(messages), self.problem.theta_prior
        evaluate, marginal = partial(self._evaluate_nodes, messages, told=told), None
        if len(centre) == 1:
            grid = even_grid(evaluate, centre[0], np.sqrt(cov[0, 0]), (prior[0][0], prior[1][0]))
            marginal = ThetaMarginal(grid.nodes.theta[:, 0], grid.weight)
        else:
            grid = product_grid(evaluate, centre, cov, prior)
        return self._mixture(grid.nodes, grid.weight, marginal), grid.log_evidence

    def _mixture(self, nodes, weight, marginal=None):
        """Return the posterior that weighs nodes (M,)."""
        local, prior = (
            self._assemble(nodes.local),
            prior_of_beta(self.problem.prior, self.problem.d),
        )
        place = nodes.theta, nodes.mean, nodes.root, local
        return GroupedMixture(weight, *place, marginal, nodes.log_z, prior)

    def _assemble(self, blocks):
        """Put the effects of the parts in the order of the group labels; drop unnamed groups."""
        order = np.argsort(np.concatenate(self.problem.where), kind="stable")
        named = order[: self.problem.n_named]
        whole = (np.concatenate(arrays, axis=1) for arrays in zip(*blocks, strict=True))
        return LocalEffects(*(array[:, named] for array in whole))

    def _outcome(self, monitor, messages, history, reason, log_evidence, n_skipped=0, n_cut=0):
        check_precise(total_of(self.problem.prior, messages).precision)
        posterior, refined = self.posterior(messages, monitor)
        evidence, prior = log_evidence if refined is None else refined, self.problem.prior
        more = dict(messages=messages, prior=prior, n_skipped=n_skipped, n_cut=n_cut)
        return BinaryFit(posterior, history, reason, evidence, more)
