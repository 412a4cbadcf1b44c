"""Partitioned EP: start, sweeps between the sites of parts, and the posterior at the end."""

from functools import partial
from typing import Any

import numpy as np
from scipy.stats import multivariate_normal

from ..._engine.gaussian import Moments, Natural, check_precise, moments, natural
from ..._engine.hyper import Average, Axes, Node, normal_distribution
from ..._engine.loop import SILENT
from ..._engine.partition import PartMap
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .. import _scales
from .._exact import GivenScales, as_messages, fit_model
from .._layout import EffectPlaces, LocalPart
from .._parts import parts_in_memory, state_of
from .._posterior import GroupPosterior, of_sites, shared
from . import part
from .draws import ImportanceSettings, tilted_by_importance, tilted_by_nuts
from .messages import find_mode, is_proper, laplace_messages, propagate, total_of, unpack

# Coordinates that messages between parts carry: with three varying coefficients, six of them, the
# few nodes of a part made messages that converged on one data set of three.
_MOST_IN_MESSAGES = 3
# engines that draw, and the share of effective draws below which they draw again
_DRAWS = {"importance": (tilted_by_importance, 0.3), "nuts": (tilted_by_nuts, 0.5)}


def fit_in_memory(plan, sign, monitor, previous, save):
    """Return the `BinaryFit` of a `Plan` with rows in memory and labels in {-1, +1}.

    Other parameters as for `fit_parts`.
    """
    unordered = plan.settings.schedule == "asynchronous"
    with PartMap(parts_in_memory(plan, sign), plan.settings.n_jobs, unordered) as run:
        return fit_parts(plan, run, monitor, previous, save)


def fit_parts(plan, run, monitor, previous, save):
    """Return the `BinaryFit` of a `Plan` of at most one factor over the parts that run maps.

    run is a `PartMap`; previous is the state of an earlier fit to go on from, or None; `save`, if
    not None, is called with the state after each iteration.
    """
    keep = save and (lambda found: save(state_of(plan, *found)))
    return GroupedFit(plan, PartAnswers(plan, run)).fit(_start_of(plan, previous), monitor, keep)


def _start_of(plan, previous):
    """Return the messages of an earlier fit where they suit this one, else None."""
    if previous is None or "site_shift" not in previous:
        return None
    precision, shift, prior = previous["site_precision"], previous["site_shift"], plan.prior()
    new, size = len(plan.parts.where) - len(shift), len(prior.shift)
    if shift.shape[1:] != (size,) or new not in (0, 1):
        return None
    precision = np.concatenate([precision, np.zeros((new, size, size))])
    shift = np.concatenate([shift, np.zeros((new, size))])
    return Natural(precision, shift) if is_proper(prior, precision) else None


class PartAnswers:
    """What the parts say, which go on from where they were when they were last asked."""

    def __init__(self, plan, run):
        self.plan, self.run, self.q = plan, run, sum(plan.n_effects)
        self.reader = plan.parts.reader
        self.states: list[Any] = [None] * len(run.parts)
        self.inner_tol = 0.1 * plan.settings.tol  # looser, and sweeps are spent on inner noise
        self.inner = dict(tol=self.inner_tol, max_passes=30, power=plan.settings.power)
        tilted: Any = part.tilted_by_nodes
        options = dict(self.inner, q=self.q)
        if plan.engine in _DRAWS:
            tilted, share = _DRAWS[plan.engine]
            draws = ImportanceSettings(800, share, plan.settings.seed)
            options = dict(q=self.q, settings=draws)
        self.shared = self.reader, tilted, options

    def terms(self, phi):
        """Return the `SiteTerms` of all parts at phi."""
        messages = [(phi, self.q)] * len(self.states)
        return self.run(part.part_worker, messages, self.reader, part.marginal_terms, {})

    def prepare(self, theta):
        """Place the nodes, or the first draws, of every site by the moments of theta so far."""
        self.states = [part.SiteState(None, theta, k) for k in range(len(self.states))]

    def tilted(self, cavities):
        """Return the tilted sites of all parts."""
        messages = list(zip(cavities, self.states, strict=True))
        sites = self.run(part.part_worker, messages, *self.shared)
        self.states = [s.state for s in sites]
        return sites

    def stream(self, cavity_of):
        """Yield (k, cavity, tilted site) of the parts, in turn or as they are ready."""
        used = {}

        def message_of(k):
            used[k] = cavity_of(k)
            return used[k], self.states[k]

        answers = self.run.as_completed(part.part_worker, message_of, *self.shared)
        if self.plan.settings.schedule == "serial":
            order, one = range(len(self.states)), self.run.one
            answers = ((k, one(k, part.part_worker, message_of(k), *self.shared)) for k in order)
        for k, site in answers:
            self.states[k] = site.state
            yield k, used[k], site

    def given_theta(self, theta, cavities, sites):
        """Return what the parts say of beta at theta, under their cavities, from row sites."""
        scale, pairs = _scales.factor(theta[None], self.q), zip(cavities, sites, strict=True)
        messages = [(scale, c.precision[None], c.shift[None], own) for c, own in pairs]
        return self.run(part.part_worker, messages, self.reader, part.conditional_ep, self.inner)


class PartsGivenTheta:
    """The model as a function of theta, for the search of nodes.

    answers(theta, cavities, sites) gives for each part, by its cavity of beta and its row sites, a
    `GivenScales` at the one node theta.
    """

    def __init__(self, answers, plan):
        self.answers, self.where, self.theta_prior = answers, plan.parts.where, plan.theta_prior
        self.n_effects, self.n_levels = plan.n_effects, plan.n_levels
        precision, named = plan.beta_sd**-2.0, [len(known) for known in plan.levels]
        self.prior = Natural(np.diag(precision), np.zeros(len(precision)))
        # effects of the named groups, in the order of their labels
        sizes = self.n_effects, named, named, 0 if named else None
        self.places = EffectPlaces(precision, *sizes, np.arange(sum(named)))

    def posterior(self, average):
        """Return the `GroupPosterior` of an average over theta."""
        return GroupPosterior(average, self.places)

    def flops(self):
        """Return 0: what parts are for is not to be measured by one core."""
        return 0.0

    def first(self, theta, messages, row_sites, tol):
        """Return the `Node` at theta, from messages about phi, and the sites of rows of parts."""
        theta, (precision, shift), d = np.asarray(theta, float), messages, len(self.prior.shift)
        # what Gaussian messages about (beta, theta) imply of beta given theta
        start = Natural(precision[:, :d, :d], shift[:, :d] - theta @ precision[:, d:, :d])
        rows = [None if s is None else part.middle_sites(s, 1) for s in row_sites]
        return self.evaluate(theta, (rows, start), tol)

    def evaluate(self, theta, sites, tol, max_rounds=30):
        """Return the `Node` at theta, with `GivenScales`, started at the sites of another.

        Those are row sites of each part and messages about beta. Messages of later rounds are
        positive semi-definite, so that their cavities stay proper.
        """
        k, d = len(self.where), len(self.prior.shift)
        none = [None] * k, Natural(np.zeros((k, d, d)), np.zeros((k, d)))
        rows, start = none if sites is None else sites
        if not is_proper(self.prior, start.precision):  # a Laplace approximation has no cavities
            start = none[1]
        parts: list[Any] = []

        def tilted(cavities):
            nonlocal parts, rows
            parts = self.answers(theta, cavities, rows)
            rows = [p.sites for p in parts]
            moments = [Moments(p.mean[0], p.root[0].T @ p.root[0]) for p in parts]
            pairs = zip(parts, moments, strict=True)
            return [part.TiltedSite(p.log_z[0], m, None) for p, m in pairs]

        options = dict(max_iter=max_rounds - 1, tol=tol, accelerate=False)
        found = propagate(tilted, self.prior, start, **options)[0]
        total, evidence = total_of(self.prior, found.evaluation.payload), found.evaluation.record
        root, mean, _ = part.half_partition(*(a[None] for a in total))
        local = self._assembled([p.local for p in parts])
        known = local, evidence["log_evidence"], (rows, unpack(found.onwards))
        node = GivenScales(mean[0], root[0], *known)
        told = node.log_z, self._slope(theta, node), found.residual, node
        return Node.under(self.theta_prior, theta, *told)

    def _assembled(self, blocks):
        """Return the `LocalPart` of the named groups, in the order of their labels."""
        order = np.argsort(np.concatenate([own[0] for own in self.where]), kind="stable")
        named = order[: len(self.places.order)]
        joined = (np.concatenate(a, axis=1)[0] for a in zip(*blocks, strict=True))
        return LocalPart.of_columns(*(a[named] for a in joined))

    def _slope(self, theta, node):
        """Return the derivatives (T,) of the log evidence; of unnamed groups those of the named."""
        n = len(node.local.offset)
        moment = node.local.second_moment(node.mean, node.local.explained(node.root))
        return _scales.slope(theta, self.n_effects, [self.n_levels[0] / max(n, 1) * moment])


class GroupedFit:
    """A fit of a `Plan` of at most one factor over the parts behind `PartAnswers`."""

    def __init__(self, plan, answers):
        self.plan, self.answers, self.settings = plan, answers, plan.settings
        self.prior, self.d, self.draws = plan.prior(), len(plan.beta_sd), plan.engine in _DRAWS
        self.model = PartsGivenTheta(answers.given_theta, plan)
        self.rule = self.settings.theta
        if not plan.n_effects:
            self.rule = "none"
        elif self.draws or self.rule == "star":  # nodes of EP would undo what draws correct
            self.rule = "gaussian"
        elif self.rule == "grid" and not _scales.affords_lattice(self.model):
            self.rule = "star"

    def _theta_moments(self, messages):
        """Return the moments of theta in the Gaussian posterior of phi."""
        whole, d = moments(total_of(self.prior, messages)), self.d
        return Moments(whole.mean[d:], whole.cov[d:, d:])

    def fit(self, start, monitor, save):
        """Run to the fixed point and return a `BinaryFit`.

        start are the messages to go on from, None to start at the mode; `monitor` is told of each
        iteration, with what returns the posterior so far; `save`, if not None, of the messages
        after each.
        """
        s, prior, answers = self.settings, self.prior, self.answers
        prior_mean = np.r_[np.zeros(self.d), self.plan.theta_prior.mean]
        climb: Any = partial(find_mode, answers.terms, prior, prior_mean, self.d)
        if self.plan.engine == "laplace":
            at_mode = partial(laplace_messages, prior=prior, with_cavities=False)
            watch = self._watch(monitor, save, at_mode)
            limits = dict(tol=s.tol, max_iter=s.max_iter, damping=s.damping)
            mode, trace, *ended = climb(**limits, monitor=watch)
            return self._outcome(monitor, at_mode(mode), trace.history, *ended)
        if self.plan.engine == "ep" and len(self.plan.theta_prior.mean) > _MOST_IN_MESSAGES:
            return self._by_nodes(start, monitor, save)
        if start is None:
            # the messages at the mode contain one more Newton step anyway
            start = laplace_messages(climb(tol=0.1, max_iter=50)[0], prior)
        check_precise(total_of(prior, start).precision)
        answers.prepare(self._theta_moments(start))
        watch = self._watch(monitor, save, lambda messages: messages)
        stream = None if s.schedule == "parallel" else answers.stream
        options = dict(max_iter=s.max_iter, tol=s.tol, damping=s.damping, stream=stream)
        result, counts = propagate(
            answers.tilted, prior, start, monitor=watch, accelerate=not self.draws, **options
        )
        found = result.evaluation.payload
        if result.reason == "stuck" and self.plan.n_effects and not self.draws:
            return self._by_nodes(found, monitor, save, result.history, counts)
        evidence = result.evaluation.record["log_evidence"]
        return self._outcome(monitor, found, result.history, result.reason, evidence, counts)

    def _by_nodes(self, start, monitor, save, before=None, counts=(0, 0)):
        """Return the `BinaryFit` by sites about beta alone, at nodes in theta.

        For covariances whose coordinates the messages of parts do not carry, and where messages
        have no fixed point; start are messages to go on from, or None, before the history of the
        sweeps that led there.
        """
        s, before = self.settings, {"residual": ()} if before is None else before
        theta, cov = self.plan.theta_prior.mean, None
        if start is not None:
            theta, cov = self._theta_moments(start)

        n_sites = len(self.plan.parts.where)

        def messages_at(node):
            phi = self.model.posterior(Average.alone(node)).phi_moments()
            return shared(natural(phi), self.prior, n_sites)

        keep = save and (lambda node: save(messages_at(node)))
        n_spent = len(before["residual"])
        fit, _ = fit_model(self.model, s, monitor, (theta, None), keep, cov, n_spent)
        fit = as_messages(fit, self.prior, n_sites, counts)
        history = {name: np.append(before.get(name, ()), fit.history[name]) for name in fit.history}
        return fit._replace(history=history)

    def _watch(self, monitor, save, messages_of):
        """Return the monitor of iterations whose payloads `messages_of` maps to messages."""
        keep = save and (lambda payload: save(messages_of(payload)))
        return PosteriorMonitor(monitor, lambda p: self.posterior(messages_of(p))[0], keep)

    def posterior(self, messages, monitor=SILENT):
        """Return (posterior, log evidence or None) for messages; None keeps the sweeps'."""
        if self.rule == "none":
            total = total_of(self.prior, messages)
            root, mean, _ = part.half_partition(total.precision[None], total.shift[None])
            sizes = (0, 1, 1), (0, 1), (0, 1, self.d)
            none = LocalPart.of_columns(*map(np.zeros, sizes))
            found = GivenScales(mean[0], root[0], none, 0.0)
            alone = Average.alone(Node(np.zeros(0), 0.0, 0.0, np.zeros(0), 0.0, found))
            return self.model.posterior(alone), None
        model, tol = self.model, self.answers.inner_tol
        mean, cov = self._theta_moments(messages)
        axes = Axes(mean, np.linalg.cholesky(cov))
        warm = [None if state is None else state.sites for state in self.answers.states]
        if self.rule == "gaussian":
            x, log_weight = part.rule_of_effects(cov)
            # of which only the effects given beta are kept: they need no inner tolerance
            points, tol = mean + x @ axes.root.T, self.settings.tol
            nodes = [model.first(theta, messages, warm, tol) for theta in points]
            told = nodes, np.exp(log_weight), total_of(self.prior, messages), axes
            return self.model.posterior(self._normal(*told)), None
        first = model.first(mean, messages, warm, tol)
        if self.rule == "mode":
            return self.model.posterior(Average.alone(first)), float(first.log_evidence)
        with monitor.phase("integration over theta") as told:
            if self.rule == "grid":
                average = _scales.lattice_about(model, axes, first, tol, told)
            else:
                average = _scales.star_at(model, first, cov, tol, told)
        return self.model.posterior(average), average.log_evidence

    def _normal(self, nodes, weight, total, axes):
        """Return the `Average` whose theta and beta are as a normal distribution has them.

        total is that of phi; the effects given these are those of the nodes.
        """
        d, theta = self.d, np.array([node.phi for node in nodes])
        shift = total.shift[:d] - theta @ total.precision[d:, :d]
        root, mean, _ = part.half_partition(total.precision[None, :d, :d], shift)
        gaussian, found = Moments(axes.centre, axes.root @ axes.root.T), []
        log_mass = multivariate_normal.logpdf(theta, *gaussian).reshape(-1)
        for node, own, mass in zip(nodes, mean, log_mass, strict=True):
            mass = mass - self.plan.theta_prior.log_density(node.phi)
            payload = node.payload._replace(mean=own, root=root[0], log_z=mass)
            found.append(node._replace(log_evidence=mass, log_prior=0.0, payload=payload))
        smooth = normal_distribution(*gaussian)
        return Average(found, weight, np.nan, smooth=smooth, axes=axes)

    def _outcome(self, monitor, messages, history, reason, log_evidence, counts=(0, 0)):
        total = total_of(self.prior, messages)
        check_precise(total.precision)
        posterior, refined = self.posterior(messages, monitor)
        evidence = log_evidence if refined is None else refined
        more = dict(theta_rule=self.rule) | of_sites(messages, moments(total), *counts)
        return BinaryFit(posterior, history, reason, evidence, more)
