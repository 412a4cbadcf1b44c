"""Labels that may be wrong, through inducing points, over partitions of the rows.

The problem of `problem` in the passes of `inducing`: nothing but sums leaves a partition, besides
what the estimator tells of each row at the end.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..._engine.gaussian import ImproperPosterior, row_blocks
from ..._engine.likelihoods import LabelNoise
from ..._engine.loop import Trace
from ..._engine.partition import PartMap
from ..._engine.sites import Sites, copy_cavity, one_copy
from .._base import evidence_at, log_sides
from .._hyperparameters import EPNode
from .._kernels import with_theta
from ..inducing import ep as passes
from ..inducing.rows import PartitionedRows, copies_left_out_of_parts, dense_copies, read_rows
from ..inducing.values import InducingGPPosterior, InducingPrior, block_rows
from .fit import fit_of_mode
from .problem import LabelErrorPlan, Slopes
from .rules import LabelErrorStep, OfNoise, Relaxed, noisy_cavity, noisy_marginals, through_noise


class RowLabels(NamedTuple):
    """What is told of each row of a problem, besides its `sites` on g (2, n) as a fit tells it."""

    sites: np.ndarray
    loo_log: np.ndarray
    wrong_proba: np.ndarray
    relaxation: np.ndarray

    @classmethod
    def joined(cls, pieces):
        """Return what is told of pieces of the rows as one."""
        return cls(*(np.concatenate(p, axis=-1) for p in zip(*pieces, strict=True)))


def project_part(part, sites, prior, noise, classes):
    """Return sites (1, 2, n) on t from sites (2, n) on g of a partition."""
    X = read_rows(part, classes)[0]
    found = np.empty((1, *sites.shape))
    for rows in row_blocks(len(X), most=block_rows(len(prior.Z))):
        extra_var = prior.whiten(X[rows])[1]
        found[0, :, rows] = through_noise(Sites(*sites[:, rows]), noise + extra_var)
    return found


def rate_slope_of_part(part, sites, model, classes):
    """Return the expected minus the assumed number of wrong labels in a partition."""
    _, _, weight = read_rows(part, classes)
    labels = model.labels
    if isinstance(labels, passes.BinaryProblems):
        message = weight, sites, None
        wrong = row_labels(part, message, model, classes, labels.rule.exponent).wrong_proba
    else:
        told = one_copy(weight), sites
        wrong = labels.factor.wrong_proba(passes.leave_one_out_part(part, told, model, classes))
    return float(dense_copies(weight) @ (wrong - labels.factor.rate))


def row_labels(part, message, model, classes, fraction=None):
    """Return the `RowLabels` of a partition, under cavities that lack a fraction of the site.

    None leaves rows out. `message` are the copies (n,) of each row that then go, the sites on t and
    what the rule keeps of the rows, or None.
    """
    X, y, _ = read_rows(part, classes)
    memory, labels, pieces = message[-1], model.labels, []
    rule, factor = labels.rule, labels.factor
    if fraction is not None:
        factor = factor.powered(fraction)
    for _, seen, _ in model.blocks(passes.PassRows(X, y, *message)):
        mean, var, _ = model.posteriors[0].marginals(seen.W)
        noise, sign = rule.noise + seen.extra_var, labels.signs(seen.y, 0)
        on_t, of_f = Sites(*seen.sites[0]), (mean, var)
        own = through_noise(on_t, -noise)
        mean, var, _ = noisy_marginals(own, noise, *of_f)
        if fraction is None:
            cav = noisy_cavity(on_t, *of_f, seen.weight, noise)
        else:
            cav = copy_cavity(own, mean, var, seen.weight, fraction)
        sides = log_sides(factor, cav.mean, cav.var)
        wrong, relaxation = factor.wrong_proba(sign, cav.mean, cav.var), np.zeros(len(sign))
        if memory is not None:
            resumed = rule.rule.resumed(seen.memory)
            relaxation = resumed(factor, sign, own, mean, var, weight=seen.weight).relaxation
        pieces.append(RowLabels(np.array(own), sides, wrong, relaxation))
    return RowLabels.joined(pieces)


@dataclass
class PartedErrors:
    """A `LabelErrorPlan` without rows, and the rows in partitions."""

    plan: LabelErrorPlan
    data: PartitionedRows

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        setting, model = payload[:2]
        if self.plan.labels.joint:
            return model.labels.predictors(model.prior, model.posteriors)[0]
        factor = LabelNoise(setting.rate, self.plan.noise)
        return InducingGPPosterior(model.prior, model.posteriors[0], factor)

    def opened(self, run, k, **how):
        """Return the `PartedErrorProblem` k over an open map, at the sites of the plan."""
        setting, sites = self.plan.settings[k], self.plan.sites[k]
        ends = np.cumsum(self.data.sizes)[:-1]
        if self.plan.labels.joint:
            x = np.split(sites.transpose(2, 0, 1), ends, axis=2)
        elif not np.any(sites):
            x = [np.zeros((1, 2, n)) for n in self.data.sizes]
        else:
            prior = InducingPrior(setting.kernel, setting.points, self.plan.jitter)
            messages = np.split(sites, ends, axis=1)
            x = run(project_part, messages, prior, self.plan.noise, self.data.classes)
        return PartedErrorProblem(self, run, k, x, **how)

    def value_and_gradient(self, theta, fit, n_jobs, slopes):
        """Return log evidence at theta, EP run from the sites of the fit, and its gradient.

        Rates of wrong labels and inducing points are those of the fit.
        """
        own = [f.attributes["setting"] for f in fit.runs]
        plan = replace(self.plan, sites=list(fit.sites), settings=own, learn=True)
        errors = replace(self, plan=plan)
        with PartMap(self.data.parts, n_jobs) as run:

            def at(k, _, x, part, slopes, residual=np.inf):
                how = dict(tol=min(residual, plan.tol), damping=plan.damping)
                setting = own[k]._replace(kernel=with_theta(plan.kernel, part))
                node = errors.opened(run, k, **how).at(setting, None)
                return node.log_evidence, node.slope.theta

            signs = np.zeros(fit.sites.shape[2])  # the partitions have the labels
            return evidence_at(at, signs, theta, fit, slopes, plan.labels.exact_gradient)


@dataclass
class PartedErrorProblem:
    """EP of problem k over an open map while its setting moves, from the last sites x on t.

    Changes of sites on t are small in the standard deviations of t where the noise is large: the
    tolerance has to be the smaller for it. `last` is EP of the last rung.
    """

    errors: PartedErrors
    run: Any
    k: int
    x: Any
    tol: float = 5e-3
    damping: float = 0.8
    last: Any = None

    def __post_init__(self):
        self.plan, self.data = self.errors.plan, self.errors.data

    def _ep(self, rate, rule):
        """Return EP over the partitions at a rate of wrong labels."""
        memory, of_rows = None, (self.run, self.data.sizes, self.data.classes)
        if self.plan.labels.joint:
            return passes.InducingEP(*of_rows, self.plan.labels.passes(rate, self.plan.noise))
        if isinstance(rule, Relaxed):
            memory = [np.zeros((2, n)) for n in self.data.sizes]
        positive = 1 if len(self.plan.settings) == 1 else self.k
        rule = OfNoise(rule, self.plan.noise)
        labels = passes.BinaryProblems(LabelErrorStep(rate), rule, positive=positive)
        return passes.InducingEP(*of_rows, labels, memory=memory)

    def _solved(self, setting, sites, rule, **options):
        """Return EP of a rule at a setting, with its `Result`, state and model, from sites on t."""
        ep = self._ep(setting.rate, rule)
        prior = InducingPrior(setting.kernel, setting.points, self.plan.jitter)
        try:
            return ep, *ep.solve(ep.restate(prior, sites), **options)
        except ImproperPosterior:  # the last sites are no start for this kernel
            return ep, *ep.solve(ep.zero(prior), **options)

    def at(self, setting, near, slopes=True):
        """Return the `EPNode` at a setting, None where it has no posterior."""
        plan = self.plan
        options = dict(tol=self.tol, max_iter=plan.max_iter, damping=self.damping, accelerate=True)
        try:
            ep, result, state, model = self._solved(setting, self.x, plan.rule, **options)
        except ImproperPosterior:  # such as inducing points that have met
            return None
        self.x, moves = state.sites, plan.unit is not None
        slope, towards, rate_slope = np.empty(0), 0.0, 0.0
        if plan.learn or moves:
            sums = ep.one_pass(model, self.x, gradient="stored", inputs=moves)[0]
            slope, towards = passes.evidence_gradient(model, sums, False, moves)
        if plan.learn_rate:
            rate_slope = sum(self.run(rate_slope_of_part, self.x, model, self.data.classes))
        told = Slopes(slope, rate_slope, towards)
        return EPNode(setting, model, replace(result, x=self.x), told)

    def by_rung(self, setting, rung, x, **limits):
        """Return the `Result` of a `Rung` at a setting from sites x."""
        how = limits | dict(damping=rung.damping, accelerate=rung.accelerate)
        self.last, result, state, _ = self._solved(setting, x, rung.rule, **how)
        return replace(result, x=state.sites)

    def told(self, setting, result):
        """Return posterior, `Result` with sites on g, and what is told of the rows, of a rung."""
        model, copies = result.evaluation.payload, copies_left_out_of_parts(self.run, self.data)
        tell = _told_of_classes if self.plan.labels.joint else _told_of_signs
        sites, told = tell(self.last, model, result.x, copies)
        return self.errors.posterior((setting, model)), replace(result, x=sites), told


def fit_parted_errors(run, errors, _, monitor, k):
    """Learn what is asked for, converge the sites, and return the `BinaryFit` of problem k."""
    return fit_of_mode(errors.opened(run, k), errors.plan.settings[k], None, Trace(monitor))


def _told_of_signs(ep, model, x, copies):
    """Return sites on g (2, n), and what is told of each row of a binary problem, from sites x."""
    messages = list(zip(copies, x, ep.memory or [None] * len(x), strict=True))
    told = RowLabels.joined(ep.run(row_labels, messages, model, ep.classes))._asdict()
    return told.pop("sites"), told


def _told_of_classes(ep, model, x, copies):
    """Return sites (2, n, K), and the same of all classes jointly."""
    told = ep.leave_one_out(model, x, copies)
    sites = np.concatenate(x, axis=-1).transpose(1, 2, 0)
    wrong = model.labels.factor.wrong_proba(told)
    return sites, dict(wrong_proba=wrong, relaxation=np.zeros(len(told)), loo_log=told[None])
