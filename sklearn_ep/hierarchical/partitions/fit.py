"""Partitioned EP: start, sweeps between the sites of parts, and the posterior at the end."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import multivariate_normal

from ..._engine.gaussian import Moments, Natural, check_precise, natural
from ..._engine.hyper import Average, Axes, Node, NormalPrior, normal_distribution
from ..._engine.loop import SILENT
from ..._engine.partition import Part
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .._parts import state_of
from .._posterior import GroupPosterior, of_sites
from .._scales import explore, lattice_about, star_at
from ..exact.layout import EffectPlaces
from .arrow import arrow_rows
from .draws import ChainState, DrawState, ImportanceSettings, tilted_by_importance, tilted_by_nuts
from .messages import (
    Messages,
    is_proper,
    posterior_moments,
    propagate,
    shared,
    total_of,
)
from .mode import find_mode, laplace_messages
from .nodes import PartsGivenTheta, PartsNode, SiteState, gaussian_nodes, no_groups
from .parts import drawing_worker, mode_worker, nodes_worker, tilted_worker

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

    where[k] numbers the groups of part k, in the order the worker sees them; n_named of n_groups
    have labels; d and q are the numbers of coefficients, and of those that vary by group; prior is
    that of phi, theta_prior that of its theta part.
    """

    where: list[np.ndarray]
    n_named: int
    n_groups: int
    d: int
    q: int
    prior: Natural
    theta_prior: NormalPrior

    @classmethod
    def of(cls, plan):
        """Return the problem of a plan."""
        sizes = 0, 0, len(plan.beta_sd), 0
        if plan.columns.has_groups:
            sizes = len(plan.levels[0]), plan.n_levels[0], len(plan.beta_sd), plan.n_effects[0]
        return cls(plan.parts.where, *sizes, plan.prior(), plan.theta_prior)


def parts_in_memory(plan, sign):
    """Return the parts of rows in memory with labels in {-1, +1}."""
    n = len(sign)
    local = plan.designs[0] if plan.designs else np.empty((n, 0))
    code = plan.codes[0] if plan.codes else np.zeros(n, dtype=int)
    arrays = plan.X, sign, plan.weight, local, code
    return [Part(*arrow_rows(*(a[m] for a in arrays))[0]) for m in plan.parts.members]


def fit_parts(plan, run, reader, monitor, previous, save):
    """Return the `BinaryFit` of a `Plan` of at most one factor over the parts that run maps.

    run is a `PartMap`, reader the `RawRows` of raw parts, None for those of `parts_in_memory`;
    previous is the state of an earlier fit to go on from, or None; `save`, if not None, is called
    with the state after each iteration.
    """
    problem = GroupedProblem.of(plan)
    answers = PartAnswers(run, reader, problem, plan.settings, plan.engine)
    keep = save and (lambda messages: save(state_of(plan, *messages)))
    return GroupedFit(answers, problem, plan.settings, plan.engine).fit(
        _start_of(problem, previous), monitor, keep
    )


def _start_of(problem, previous):
    """Return the messages of an earlier fit where they suit this one, else None."""
    if previous is None or "site_shift" not in previous:
        return None
    precision, shift = previous["site_precision"], previous["site_shift"]
    new, size = len(problem.where) - len(shift), len(problem.prior.shift)
    if shift.shape[1:] != (size,) or new not in (0, 1):
        return None
    precision = np.concatenate([precision, np.zeros((new, size, size))])
    shift = np.concatenate([shift, np.zeros((new, size))])
    return Messages(precision, shift) if is_proper(problem.prior, precision) else None


def theta_rule(problem, engine, wanted):
    """Return how theta is treated at the end, "none" without groups."""
    if problem.q == 0:
        return "none"
    # nodes of EP would undo what the engines that draw correct
    if engine in _DRAWING or wanted == "star":
        return "gaussian"
    if wanted == "grid" and len(problem.theta_prior.mean) > _MOST_ON_GRID:
        return "star"
    return wanted


class PartAnswers:
    """What the parts say, which go on from where they were when they were last asked."""

    def __init__(self, run, reader, problem, settings, engine):
        self.run, self.reader, self.problem, self.settings = run, reader, problem, settings
        self.states: list[Any] = [None] * len(run.parts)
        self.inner_tol = 0.1 * settings.tol  # looser, and sweeps are spent on inner noise
        self.inner = dict(tol=self.inner_tol, max_passes=30, power=settings.power)
        self.first: Any = None
        self.worker: Any = tilted_worker
        self.shared: Any = reader, problem.q, self.inner
        if engine in _DRAWING:
            tilted, self.first, share = _DRAWING[engine]
            draws = ImportanceSettings(800, share, settings.seed)
            self.worker, self.shared = drawing_worker, (reader, problem.q, tilted, draws)

    def find_mode(self, tol, max_iter, damping=1.0, monitor=SILENT):
        """Return the mode of the marginal posterior, started at the prior mean."""
        p, modes = self.problem, [None] * len(self.states)

        def evaluate(phi):
            terms = self.run(mode_worker, modes, self.reader, phi, p.q)
            modes[:] = [t.modes for t in terms]
            return terms

        phi = np.r_[np.zeros(p.d), p.theta_prior.mean]
        options = dict(tol=tol, max_iter=max_iter, damping=damping, monitor=monitor)
        return find_mode(evaluate, p.prior, phi, p.d, **options)

    def prepare(self, theta):
        """Place the nodes, or the first draws, of every site by the moments of theta so far."""
        place, n = SiteState(None, *theta), len(self.states)
        self.states = [place if self.first is None else self.first(place, k) for k in range(n)]

    def tilted(self, cavities):
        """Return the tilted sites of all parts."""
        messages = list(zip(cavities, self.states, strict=True))
        sites = self.run(self.worker, messages, *self.shared)
        self.states = [s.state for s in sites]
        return sites

    def stream(self, cavity_of):
        """Yield (k, cavity, tilted site) of the parts, in turn or as they are ready."""
        used = {}

        def message_of(k):
            used[k] = cavity_of(k)
            return used[k], self.states[k]

        answers = self.run.as_completed(self.worker, message_of, *self.shared)
        if self.settings.schedule == "serial":
            order = range(len(self.states))
            answers = (
                (k, self.run.one(k, self.worker, message_of(k), *self.shared)) for k in order
            )
        for k, site in answers:
            self.states[k] = site.state
            yield k, used[k], site

    def given_theta(self, theta, messages):
        """Return what the parts say of beta at nodes in theta, under their cavities."""
        return self.run(nodes_worker, messages, self.reader, theta, self.problem.q, self.inner)

    def row_sites(self):
        """Return the sites of the rows of each part at its nodes, None where there are none."""
        places = [s if isinstance(s, SiteState | None) else s.nodes for s in self.states]
        return [None if place is None else place.sites for place in places]


class GroupedFit:
    """A fit of a `GroupedProblem` by `Settings` over the parts behind `PartAnswers`."""

    def __init__(self, answers, problem, settings, engine):
        self.answers, self.problem, self.settings, self.engine = answers, problem, settings, engine
        self.rule = theta_rule(problem, engine, settings.theta)

    def _theta_moments(self, messages):
        """Return the moments of theta in the Gaussian posterior of phi."""
        whole, d = posterior_moments(self.problem.prior, messages), self.problem.d
        return Moments(whole.mean[d:], whole.cov[d:, d:])

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
            mode = self.answers.find_mode(s.tol, s.max_iter, s.damping, watch)
            ended = mode.history, mode.reason, mode.log_evidence
            return self._outcome(monitor, at_mode(mode), *ended)
        if self.engine == "ep" and len(p.theta_prior.mean) > _MOST_IN_MESSAGES:
            return self._by_nodes(start, monitor, save)
        if start is None:
            # the messages at the mode contain one more Newton step anyway
            start = laplace_messages(self.answers.find_mode(0.1, 50), prior)
        check_precise(total_of(prior, start).precision)
        self.answers.prepare(self._theta_moments(start))
        watch = self._watch(monitor, save, lambda messages: messages)
        draws = self.engine in _DRAWING
        stream = None if s.schedule == "parallel" else self.answers.stream
        options = dict(max_iter=s.max_iter, tol=s.tol, damping=s.damping, accelerate=not draws)
        run = propagate(self.answers.tilted, prior, start, stream=stream, monitor=watch, **options)
        result, counts = run.result, (run.n_skipped, run.n_cut)
        found = result.evaluation.payload
        if result.reason == "stuck" and p.q and not draws:
            return self._by_nodes(found, monitor, save, result.history, counts)
        evidence = result.evaluation.record["log_evidence"]
        return self._outcome(monitor, found, result.history, result.reason, evidence, counts)

    def _by_nodes(self, start, monitor, save, before=None, counts=(0, 0)):
        """Return the `BinaryFit` by sites about beta alone, at nodes in theta.

        For covariances whose coordinates the messages of parts do not carry, and where messages
        have no fixed point; start are messages to go on from, or None, before the history of the
        sweeps that led there.
        """
        s, p, k = self.settings, self.problem, len(self.problem.where)
        theta, cov = p.theta_prior.mean, None
        if start is not None:
            theta, cov = self._theta_moments(start)
        model = PartsGivenTheta(self.answers.given_theta, p, start, [None] * k, 0.1 * s.tol)
        left = s.max_iter - (0 if before is None else len(before["residual"]))

        def posterior(node):
            return self._posterior(Average.alone(node))

        def messages_of(found):
            return shared(natural(found.phi_moments()), p.prior, k)

        keep = None if save is None else lambda node: save(messages_of(posterior(node)))
        watch = PosteriorMonitor(monitor, posterior, keep)
        first = (theta, model.nothing(k))
        found = explore(model, first, s.tol, left, s.theta, watch, cov)
        whole = self._posterior(found.average)
        messages = messages_of(whole)
        check_precise(total_of(p.prior, messages).precision)
        history = dict(found.trace.history, n_skipped=np.zeros(found.trace.n_iter))
        if before is not None:
            history = {name: np.append(before[name], history[name]) for name in history}
        more = self._attributes(messages, found.rule, counts)
        evidence = found.average.log_evidence
        return BinaryFit(whole, history, found.reason, evidence, more, found.remark)

    def _attributes(self, messages, rule, counts):
        """Return what the estimator is to know of the sites of parts."""
        phi = posterior_moments(self.problem.prior, messages)
        return dict(theta_rule=rule) | of_sites(messages, phi, *counts)

    def _watch(self, monitor, save, messages_of):
        """Return the monitor of iterations whose payloads `messages_of` maps to messages."""

        def posterior(payload):
            return self.posterior(messages_of(payload))[0]

        keep = None if save is None else lambda payload: save(messages_of(payload))
        return PosteriorMonitor(monitor, posterior, keep)

    def _given_theta(self, messages):
        """Return the `PartsGivenTheta` that starts from messages."""
        warm, tol = self.answers.row_sites(), self.answers.inner_tol
        return PartsGivenTheta(self.answers.given_theta, self.problem, messages, warm, tol)

    def posterior(self, messages, monitor=SILENT):
        """Return (posterior, log evidence or None) for messages; None keeps the sweeps'."""
        if self.rule in ("gaussian", "none"):
            return self._normal(messages), None
        model, (mean, cov) = self._given_theta(messages), self._theta_moments(messages)
        if self.rule == "mode":
            node = model.first(mean)
            return self._posterior(Average.alone(node)), float(node.log_evidence)
        with monitor.phase("integration over theta") as told:
            first, tol = model.first(mean), self.answers.inner_tol
            if self.rule == "grid":
                axes = Axes(mean, np.linalg.cholesky(cov))
                average = lattice_about(model, axes, first, tol, told)
            else:
                average = star_at(model, first, cov, tol, told)
        return self._posterior(average), average.log_evidence

    def _normal(self, messages):
        """Return the posterior whose theta and beta are as the normal distribution has them."""
        p = self.problem
        theta, weight, (means, root) = gaussian_nodes(total_of(p.prior, messages), p.d)
        gaussian, model = self._theta_moments(messages), self._given_theta(messages)
        if p.q:
            found = [model.first(t).payload for t in theta]
            log_mass = multivariate_normal.logpdf(theta, *gaussian).reshape(-1)
            log_mass -= [p.theta_prior.log_density(t) for t in theta]
        else:
            found = [PartsNode(means[0], root, no_groups(p.d), 0.0, None)]
            log_mass = np.zeros(1)
        nodes = [
            Node(t, mass, 0.0, np.zeros_like(t), 0.0, f._replace(mean=mean, root=root, log_z=mass))
            for t, f, mean, mass in zip(theta, found, means, log_mass, strict=True)
        ]
        axes = Axes(gaussian.mean, np.linalg.cholesky(gaussian.cov))
        smooth = normal_distribution(*gaussian)
        return self._posterior(Average(nodes, weight, np.nan, smooth=smooth, axes=axes))

    def _posterior(self, average):
        """Return the `GroupPosterior` of an average over theta."""
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
        return GroupPosterior(average, places)

    def _outcome(self, monitor, messages, history, reason, log_evidence, counts=(0, 0)):
        check_precise(total_of(self.problem.prior, messages).precision)
        posterior, refined = self.posterior(messages, monitor)
        evidence = log_evidence if refined is None else refined
        more = self._attributes(messages, self.rule, counts)
        return BinaryFit(posterior, history, reason, evidence, more)
