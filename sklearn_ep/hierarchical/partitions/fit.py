"""Partitioned EP: start, sweeps between the sites of parts, and the posterior at the end."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import multivariate_normal, norm

from ..._engine.gaussian import Moments, Natural, check_precise, natural
from ..._engine.loop import SILENT
from ..._engine.partition import Part, PartMap
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .._checkpoint import digest, load_checkpoint, save_checkpoint, state_of
from .._posterior import EffectPlaces, GroupPosterior
from .._scales import (
    Axes,
    ScaleGrid,
    explore,
    grid_of_one,
    grow_grid,
    lay_star,
    normal_scales,
)
from .arrow import arrow_rows
from .given_theta import PartsGivenTheta, PartsNode, gaussian_nodes, no_groups
from .importance import DrawState, ImportanceSettings, tilted_by_importance
from .messages import (
    Messages,
    is_proper,
    posterior_moments,
    propagate,
    shared,
    total_of,
)
from .mode import find_mode, laplace_messages
from .nuts import ChainState, tilted_by_nuts
from .parts import PartSpec, drawing_worker, mode_worker, nodes_worker, tilted_worker
from .theta_nodes import SiteState

__all__ = ["fit_parts"]

_DRAWS = 800  # of an engine that draws, in each part
_MODE_TOL = 0.1  # sd: the messages at the mode contain one more Newton step anyway
_MAX_INNER = 30
_MOST_ON_GRID = 2  # coordinates of theta of a lattice; a star beyond
# Coordinates that messages between parts carry: with three varying coefficients, six of them, the
# few nodes of a part made messages that converged on one data set of three.
_MOST_IN_MESSAGES = 3
# engines that draw, their first state, and the share of effective draws below which they draw again
_DRAWING = {
    "importance": (tilted_by_importance, DrawState, 0.3),
    "nuts": (tilted_by_nuts, ChainState, 0.5),
}


class GroupedProblem(NamedTuple):
    """What is fitted: the model's sizes and prior, and how parts relate to the groups.

    spec tells workers how to read raw parts, None for prepared ones; where[k] numbers the groups of
    part k, in the order the worker sees them; n_named of n_groups have labels; prior is that of
    phi, theta_prior the means and sds (T,) of its theta part.
    """

    spec: PartSpec | None
    where: list[np.ndarray]
    n_named: int
    n_groups: int
    d: int
    q: int
    prior: Natural
    theta_prior: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, plan, positive):
        """Return the problem of a plan whose label +1 is `positive`."""
        spec, d = plan.placement.spec, len(plan.beta_sd)
        spec = None if spec is None else spec._replace(positive=positive)
        n_named, n_groups, q = 0, 0, 0
        if plan.columns.has_groups:
            n_named, n_groups, q = len(plan.levels[0]), plan.n_levels[0], plan.n_effects[0]
        prior, theta = plan.prior(), (plan.theta_mean, plan.theta_sd)
        return cls(spec, plan.placement.where, n_named, n_groups, d, q, prior, theta)


def fit_parts(plan, sign, monitor, previous, checkpoint, run, positive, k, n_jobs):
    """Return the `BinaryFit` of problem k of a `Plan` of at most one factor.

    run is the `PartMap` over raw parts, whose label +1 is `positive`; None for rows in memory with
    labels sign in {-1, +1}. previous is the state of an earlier fit to go on from, or None;
    checkpoint the file for the state after each iteration, or None.
    """
    problem = GroupedProblem.of(plan, positive)
    if run is not None:
        return _fit_problem(plan, problem, run, previous, checkpoint, monitor, k)
    with PartMap(_parts(plan, sign), n_jobs, plan.settings.schedule == "asynchronous") as run:
        return _fit_problem(plan, problem, run, previous, checkpoint, monitor, k)


def _parts(plan, sign):
    """Return the parts of rows in memory."""
    n = len(sign)
    local = plan.designs[0] if plan.designs else np.empty((n, 0))
    code = plan.codes[0] if plan.codes else np.zeros(n, dtype=int)
    arrays = plan.X, sign, plan.weight, local, code
    return [Part(*arrow_rows(*(a[m] for a in arrays))[0]) for m in plan.placement.members]


def _fit_problem(plan, problem, run, previous, checkpoint, monitor, k):
    """Run one binary fit from where it can start, saving on the way where asked to."""
    save, start = None, _start_of(problem, previous, k)
    if checkpoint is not None:
        fingerprint = plan.fingerprint + digest(plan.placement.site)
        saved = load_checkpoint(checkpoint, fingerprint)
        if saved is not None:
            start = Messages(saved["site_precision"], saved["site_shift"])
        save = partial(_save, plan, checkpoint, fingerprint)
    return GroupedFit(run, problem, plan.settings, plan.engine).fit(start, monitor, save)


def _save(plan, checkpoint, fingerprint, messages):
    labels = plan.levels[0] if plan.levels else np.empty(0)
    state = state_of(messages, plan.prior(), plan.placement.site, labels)
    save_checkpoint(checkpoint, state, fingerprint)


def _start_of(problem, previous, k):
    """Return the messages of an earlier fit where they suit this one, else None."""
    if previous is None or "site_shift" not in previous:
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


def theta_rule(problem, engine, wanted):
    """Return how theta is treated at the end, "none" without groups."""
    if problem.q == 0:
        return "none"
    # nodes of EP would undo what the engines that draw correct
    if engine in _DRAWING or wanted == "star":
        return "gaussian"
    if wanted == "grid" and len(problem.theta_prior[0]) > _MOST_ON_GRID:
        return "star"
    return wanted


class GroupedFit:
    """A fit of a `GroupedProblem` by `Settings` over the parts that `run`, a `PartMap`, maps."""

    def __init__(self, run, problem, settings, engine):
        self.run, self.problem, self.settings, self.engine = run, problem, settings, engine
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
        """Return the moments of theta in the Gaussian posterior of phi."""
        whole, d = posterior_moments(self.problem.prior, messages), self.problem.d
        return Moments(whole.mean[d:], whole.cov[d:, d:])

    def prepare(self, messages):
        """Place the nodes, or the first draws, of every site by the posterior so far."""
        place = SiteState(None, *self._theta_moments(messages))
        self.states = [place] * len(self.run.parts)
        if self.engine in _DRAWING:
            first = _DRAWING[self.engine][1]
            self.states = [first(place, k) for k in range(len(self.run.parts))]

    def _shared(self):
        s, p = self.settings, self.problem
        if self.engine in _DRAWING:
            tilted, _, share = _DRAWING[self.engine]
            settings = ImportanceSettings(_DRAWS, share, s.seed)
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

    def fit(self, start, monitor, save):
        """Run to the fixed point and return a `BinaryFit`.

        start are the messages to go on from, None to start at the mode; `monitor` is told of each
        iteration, with what returns the posterior so far; `save`, if not None, of the messages
        after each.
        """
        s, p, prior = self.settings, self.problem, self.problem.prior
        if self.engine == "laplace":
            at_mode = partial(laplace_messages, prior=prior, with_cavities=False)
            watch = self._watch(monitor, save, at_mode)
            mode = self.find_mode(s.tol, s.max_iter, s.damping, watch)
            return self._outcome(
                monitor, at_mode(mode), mode.history, mode.reason, mode.log_evidence
            )
        if self.engine == "ep" and len(p.theta_prior[0]) > _MOST_IN_MESSAGES:
            return self._by_nodes(start, monitor, save)
        if start is None:
            start = laplace_messages(self.find_mode(_MODE_TOL, 50), prior)
        check_precise(total_of(prior, start).precision)
        self.prepare(start)
        watch = self._watch(monitor, save, lambda messages: messages)
        draws = self.engine in _DRAWING
        stream = None if s.schedule == "parallel" else self.stream
        options = dict(max_iter=s.max_iter, tol=s.tol, damping=s.damping, accelerate=not draws)
        run = propagate(self.tilted, prior, start, stream=stream, monitor=watch, **options)
        result, counts = run.result, (run.n_skipped, run.n_cut)
        found = result.evaluation.payload
        if result.reason == "stuck" and p.q and not draws:
            return self._by_nodes(found, monitor, save, result.history, counts)
        evidence = result.evaluation.record["log_evidence"]
        return self._outcome(monitor, found, result.history, result.reason, evidence, *counts)

    def _by_nodes(self, start, monitor, save, before=None, counts=(0, 0)):
        """Return the `BinaryFit` by sites about beta alone, at nodes in theta.

        For covariances whose coordinates the messages of parts do not carry, and where messages
        have no fixed point; start are messages to go on from, or None, before the history of the
        sweeps that led there.
        """
        s, p, k = self.settings, self.problem, len(self.run.parts)
        theta, cov = p.theta_prior[0], None
        if start is not None:
            theta, cov = self._theta_moments(start)
        self.states = [None] * k
        model = self._given_theta(start)
        left = s.max_iter - (0 if before is None else len(before["residual"]))

        def posterior(node):
            return self._posterior(grid_of_one(node), [node.payload])

        def messages_of(found):
            return shared(natural(found.phi_moments()), p.prior, k)

        keep = None if save is None else lambda node: save(messages_of(posterior(node)))
        watch = PosteriorMonitor(monitor, posterior, keep)
        first = (theta, model.nothing(k))
        found = explore(model, first, s.tol, left, s.theta, watch, cov)
        whole = self._posterior(found.grid, [n.payload for n in found.nodes])
        messages = messages_of(whole)
        check_precise(total_of(p.prior, messages).precision)
        history = dict(found.trace.history, n_skipped=np.zeros(found.trace.n_iter))
        if before is not None:
            history = {name: np.append(before[name], history[name]) for name in history}
        more = dict(messages=messages, prior=p.prior, n_skipped=counts[0], n_cut=counts[1])
        more["theta_rule"] = found.rule
        evidence = found.grid.log_evidence
        return BinaryFit(whole, history, found.reason, evidence, more, found.remark)

    def _watch(self, monitor, save, messages_of):
        """Return the monitor of iterations whose payloads `messages_of` maps to messages."""

        def posterior(payload):
            return self.posterior(messages_of(payload))[0]

        keep = None if save is None else lambda payload: save(messages_of(payload))
        return PosteriorMonitor(monitor, posterior, keep)

    def _answers(self, theta, messages):
        """Return what the parts say of beta at nodes in theta, under their cavities."""
        p = self.problem
        return self.run(nodes_worker, messages, p.spec, theta, p.q, self.inner)

    def _given_theta(self, messages):
        """Return the `PartsGivenTheta` that starts from messages."""
        places = [s.nodes if isinstance(s, DrawState | ChainState) else s for s in self.states]
        warm = [None if place is None else place.sites for place in places]
        return PartsGivenTheta(self._answers, self.problem, messages, warm, self.inner_tol)

    def posterior(self, messages, monitor=SILENT):
        """Return (posterior, log evidence or None) for messages; None keeps the sweeps'."""
        rule = theta_rule(self.problem, self.engine, self.settings.theta)
        if rule in ("gaussian", "none"):
            return self._normal(messages, rule), None
        model, (mean, cov) = self._given_theta(messages), self._theta_moments(messages)
        if rule == "mode":
            node = model.first(mean)
            return self._posterior(grid_of_one(node), [node.payload]), float(node.log_evidence)
        with monitor.phase("integration over theta") as told:
            first, tol = model.first(mean), self.inner_tol
            if rule == "grid":
                axes = Axes(mean, np.linalg.cholesky(cov))
                grid, nodes = grow_grid(model, axes, first, tol, told)
            else:
                grid, nodes = lay_star(model, first, cov, tol, told)
        return self._posterior(grid, [n.payload for n in nodes]), grid.log_evidence

    def _normal(self, messages, rule):
        """Return the posterior whose theta and beta are as the normal distribution has them."""
        p = self.problem
        theta, weight, (means, root) = gaussian_nodes(total_of(p.prior, messages), p.d)
        gaussian, model = self._theta_moments(messages), self._given_theta(messages)
        if not p.q:
            grid = ScaleGrid(
                theta, weight, np.zeros(1), Axes(*gaussian), normal_scales(*gaussian), np.nan
            )
            return self._posterior(grid, [PartsNode(means[0], root, no_groups(p.d), 0.0, None)])
        nodes = [model.first(t).payload for t in theta]
        log_mass = multivariate_normal.logpdf(theta, *gaussian).reshape(-1)
        log_mass -= norm.logpdf(theta, *p.theta_prior).sum(1)
        triples = zip(nodes, means, log_mass, strict=True)
        founds = [node._replace(mean=mean, root=root, log_z=mass) for node, mean, mass in triples]
        axes = Axes(gaussian.mean, np.linalg.cholesky(gaussian.cov))
        grid = ScaleGrid(theta, weight, log_mass, axes, normal_scales(*gaussian), np.nan)
        return self._posterior(grid, founds)

    def _posterior(self, grid, founds):
        """Return the `GroupPosterior` of the posteriors at nodes."""
        p = self.problem
        one = [p.n_named] if p.q else []
        places = EffectPlaces(
            beta_precision=np.diagonal(p.prior.precision)[: p.d],
            n_effects=[p.q] if p.q else [],
            n_levels=one,
            n_named=one,
            local=0 if p.q else None,
            order=np.arange(p.n_named),
        )
        return GroupPosterior(grid, founds, places)

    def _outcome(self, monitor, messages, history, reason, log_evidence, n_skipped=0, n_cut=0):
        check_precise(total_of(self.problem.prior, messages).precision)
        posterior, refined = self.posterior(messages, monitor)
        evidence, prior = log_evidence if refined is None else refined, self.problem.prior
        more = dict(messages=messages, prior=prior, n_skipped=n_skipped, n_cut=n_cut)
        more["theta_rule"] = theta_rule(self.problem, self.engine, self.settings.theta)
        return BinaryFit(posterior, history, reason, evidence, more)
