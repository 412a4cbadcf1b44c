"""A problem of Gaussian-process classification whose labels may be wrong: plan, nodes."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import betainc, betaln, expit, log_expit, logit
from sklearn.gaussian_process.kernels import Kernel

from ..._engine.contracts import WholeEP
from ..._engine.gaussian import ImproperPosterior
from ..._engine.hyper import NormalPrior
from ..._engine.likelihoods import LabelNoise
from ..._engine.rules import Power
from ..._engine.sites import Sites, cavity
from .. import _base as base
from .. import _hyperparameters as spaces
from .._dense_gp import DenseGPPosterior, KernelGP
from .._kernels import contract_diagonal, with_theta
from .._limits import LIMITS
from ..inducing.values import InducingGP, InducingGPPosterior, InducingPrior
from .double_loop import MarginalDoubleLoop
from .rules import LabelErrorStep, LatentNoise, Relaxed, SequentialEP

RATE_BOUNDS = (1e-4, 0.45)
# Counts of the prior of the rate. Few rows with wrong labels leave amplitude, length scale and rate
# nearly free: without priors a wiggly function without errors often explains them best.
RATE_COUNTS = (3.0, 9.0)


def log_rate_density(x, counts):
    """Return the log density of the logit of a rate that is Beta of these counts, and its slope.

    The rate is within the bounds of learning.
    """
    a, b = counts
    total = betaln(a, b) + np.log(betainc(a, b, RATE_BOUNDS[1]))
    return a * x + (a + b) * log_expit(-x) - total, a - (a + b) * expit(x)


class Setting(NamedTuple):
    """What learning may move: kernel, rate of wrong labels, inducing points (None: all rows)."""

    kernel: Any
    rate: float
    points: Any


class Slopes(NamedTuple):
    """Gradient of a log evidence in theta (p,), the logit of the rate and the points (m, d)."""

    theta: np.ndarray
    rate: float
    points: Any


@dataclass(frozen=True)
class WeakScales(spaces.ThetaSpace):
    """All parameters of a kernel under the weak priors of a mode.

    The mean variance at `rows` with copies `weight` is log-normal about four times the noise;
    several lengths have a `density_of_ratios`, as rows with wrong labels would set them far apart.
    The last parameter is the log length of the default kernel, log-Cauchy about that of `length`,
    which is None for other kernels: a smooth function is preferred where the rows do not tell, and
    given up without resistance where they do.
    """

    rows: Any
    weight: np.ndarray
    noise: float
    length: float | None

    def log_prior(self, theta):
        """Return the log prior density of theta, but for a constant, and its gradient."""
        kernel = with_theta(self.kernel, theta)
        total = self.weight @ kernel.diag(self.rows)
        away = np.log(total / self.weight.sum() / self.noise / 4.0)
        value = -0.5 * away**2
        slope = -away * contract_diagonal(kernel, self.rows, self.weight / total)
        of_ratios, steep = spaces.density_of_ratios(self.kernel, theta)
        value, slope = value + of_ratios, slope + steep
        if self.length is None:
            return value, slope
        spread = 0.4
        z = (theta[-1] - np.log(self.length)) / spread
        slope[-1] -= 2.0 * z / (1.0 + z**2) / spread
        return value - np.log1p(z**2), slope


@dataclass(frozen=True)
class ErrorSpace:
    """What is learned of the kernel, the logit of the rate, and moves of inducing points.

    `first` is a `Setting` with what is kept; `kernel` the space of the kernel, None for one that is
    kept; `rate_counts` are those of the Beta prior of the rate, None for a rate that is kept;
    `unit` (d,) is the length of a move of size one in each column, None for points that stay.
    """

    first: Setting
    kernel: WeakScales | spaces.KernelScales | None
    rate_counts: tuple[float, float] | None
    unit: np.ndarray | None = None

    @cached_property
    def s(self):
        """Spread of the log lengths, infinite where they are those that learning found."""
        return spaces.learned_coordinates(self.first.kernel)[2]

    @property
    def names(self):
        """What phi consists of, where kernels are averaged over."""
        scales: Any = self.kernel
        names = () if scales is None else scales.names
        return (*names, "logit_label_noise") if self.rate_counts else names

    @property
    def _n_moves(self):
        return 0 if self.unit is None else self.first.points.size

    def _parts(self, phi):
        """Return what phi says of the kernel, the rate and the inducing points."""
        end = len(phi) - self._n_moves
        return np.split(phi, [end - (self.rate_counts is not None), end])

    def start(self, theta):
        """Return the phi (T,) of the first setting with other kernel parameters."""
        of_kernel = [] if self.kernel is None else self.kernel.phi(theta)
        rate = [logit(self.first.rate)] if self.rate_counts else []
        return np.concatenate([of_kernel, rate, np.zeros(self._n_moves)])

    @property
    def bounds(self):
        """Bounds (T, 2) of phi; none for inducing points."""
        of_kernel = np.empty((0, 2)) if self.kernel is None else self.kernel.bounds
        rate = np.tile(logit(RATE_BOUNDS), (int(self.rate_counts is not None), 1))
        return np.vstack([of_kernel, rate, np.full((self._n_moves, 2), [-np.inf, np.inf])])

    def point(self, phi):
        """Return the `Setting` at phi."""
        kernel, rate, points = self.first
        of_kernel, logit_rate, moves = self._parts(phi)
        if self.kernel is not None:
            kernel = with_theta(kernel, self.kernel.point(of_kernel))
        if len(logit_rate):
            rate = float(expit(logit_rate[0]))
        if len(moves):
            points = points + moves.reshape(points.shape) * self.unit
        return Setting(kernel, rate, points)

    def slopes(self, slope):
        """Return the gradient in phi from `Slopes`."""
        of_kernel = [] if self.kernel is None else self.kernel.slopes(slope.theta)
        rate = [slope.rate] if self.rate_counts else []
        moves = [] if self.unit is None else (slope.points * self.unit).ravel()
        return np.concatenate([of_kernel, rate, moves])

    def log_prior(self, phi):
        """Return the log prior density of phi, flat in moves, and its gradient."""
        of_kernel, logit_rate, moves = self._parts(phi)
        value, slope = (0.0, []) if self.kernel is None else self.kernel.log_prior(of_kernel)
        if self.rate_counts is not None:
            more, steep = log_rate_density(logit_rate[0], self.rate_counts)
            value, slope = value + more, np.append(slope, steep)
        return value, np.append(slope, np.zeros(len(moves)))


class ErrorAveraging(NamedTuple):
    """How to average over kernel and rate.

    `prior` is that of the kernel, `rate_counts` those of the Beta prior of the rate, `no_errors`
    the prior mass at no label errors; then the kernel is `plain_kernel` (None: the same) under
    `plain_prior`.
    """

    prior: NormalPrior | None
    rate_counts: tuple[float, float]
    no_errors: float
    plain_kernel: Kernel | None
    plain_prior: NormalPrior | None
    n_jobs: int


class Rung(NamedTuple):
    """One way to the fixed point: name, rule of the sites (None: the double loop), and steps.

    Accelerated ones, or sweeps whose sites change `in_turn`.
    """

    name: str
    rule: Any
    damping: float = 1.0
    accelerate: bool = False
    in_turn: bool = False


class BinaryLabels:
    """Labels in {-1, +1} of one latent function; sites (2, n) are on g = f + noise."""

    damping = 1.0  # of sites that a search passes: they start close to their fixed points
    joint, exact_gradient = False, True

    def empty_sites(self, y):
        """Return sites that say nothing."""
        return np.zeros((2, len(y)))

    def ep(self, plan, setting, sign, passing=False):
        """Return the fixed-point map at a setting, in single precision for many on the way."""
        latent: Any
        if setting.points is None:
            averages = plan.averaging is not None
            single = passing and averages and base.single_holds(plan.weight)
            latent = KernelGP(setting.kernel, plan.coordinates, single)
        else:
            latent = InducingGP(setting.kernel, plan.X, setting.points, plan.jitter)
        structure = LatentNoise(latent, plan.noise, plan.weight)
        return WholeEP(structure, LabelErrorStep(setting.rate), sign, plan.weight, plan.rule)

    def solver(self, ep, rule, mixing):
        """Return what maps sites to the `Result` of a rule, with so much mixing of whole steps."""
        return WholeEP(ep.structure, ep.factor, ep.y, ep.weight, rule).solve

    def slopes(self, plan, ep, result):
        """Return the gradient in theta and points, and how probably each label is wrong (n,)."""
        structure, theta, towards = ep.structure.structure, np.empty(0), 0.0
        (state, update), exponent = result.evaluation.payload, plan.rule.exponent
        if isinstance(structure, InducingGP):
            moved = plan.unit is not None
            theta, towards = structure.evidence_gradient(state.latent, state.noise_slope, moved)
        elif plan.learn:
            theta = structure.evidence_gradient(state.latent)
        cav = cavity(Sites(*result.x), state.mean, state.var, update.removed)
        return theta, towards, ep.factor.powered(exponent).wrong_proba(ep.y, cav.mean, cav.var)

    def left_out(self, plan, setting, sign, copies, result):
        """Return what the others say of rows of so many copies, and which labels are wrong."""
        factor, cav = LabelErrorStep(setting.rate), result.evaluation.payload[0].left_out(copies)
        wrong = factor.wrong_proba(sign, cav.mean, cav.var)
        return base.log_sides(factor, cav.mean, cav.var), wrong

    def posterior(self, plan, setting, state):
        """Return what predicts."""
        factor = LabelNoise(setting.rate, plan.noise)
        if setting.points is None:
            return DenseGPPosterior(setting.kernel, plan.X, state.latent, factor)
        prior = InducingPrior(setting.kernel, setting.points, plan.jitter)
        return InducingGPPosterior(prior, state.latent.posterior, factor)

    def rungs(self, plan):
        """Return the ladder of `climb`: the rule, less damping, and what then always ends.

        That is the double loop. For many rows, and over partitions, nothing does, and sites of
        power EP have to do where the rule is another one.
        """
        few = plan.y is not None and len(plan.y) <= LIMITS.double_loop
        last = [Rung("double loop", None)] if few else []
        name, rules, slow = "ep", [plan.rule, plan.rule], min(0.25, 0.5 * plan.damping)
        if isinstance(plan.rule, Power):
            # a fraction of the factor is damping of its own: more of it only makes it slow
            name, slow = "power", max(0.9, plan.damping)
        elif not few:
            last = [Rung("power 0.5", Power(0.5), 0.9)]
        if plan.relaxed is not None:
            name, rules = "relaxed", [Relaxed(*plan.relaxed), Relaxed(*plan.relaxed)]
        if plan.in_turn:
            first = Rung(f"{name}, sequential", rules[0], plan.damping, in_turn=True)
        else:
            first = Rung(name, rules[0], plan.damping, accelerate=True)
        return [first, Rung(f"{name}, damping {slow:g}", rules[1], slow), *last]


@dataclass
class LabelErrorPlan:
    """Everything the problems need besides their labels; sent to workers as it is.

    `labels` say what a row is of: `BinaryLabels`, or all classes jointly. `y` holds class indices;
    `settings` and `sites` have one entry a problem, where it starts. `learn` and `learn_rate` say
    whether kernel and rates of wrong labels are learned, `unit` (d,) is the spread of the columns
    where inducing points are moved, else None. `rule` is that of learning; `relaxed` are the
    arguments of the `Relaxed` rule that comes after it, None for the same rule. `length_centre`
    centres the prior of the length scale of the default kernel; None for other kernels, of which
    nothing is known. `in_turn` says whether sweeps after learning change one row after another.
    `averaging` is None where the mode is used. `coordinates` are the rows X, or others of fewer
    columns with the same covariances. All of them, `y` and `weight` are None where the rows are in
    partitions.
    """

    kernel: Kernel
    labels: Any
    rule: Any
    learn: bool
    restarts: Any
    settings: list[Setting]
    sites: list
    tol: float
    max_iter: int
    damping: float
    noise: float
    learn_rate: bool
    relaxed: tuple[Any, ...] | None
    length_centre: float | None
    unit: np.ndarray | None
    jitter: float
    in_turn: bool
    X: Any = None
    coordinates: Any = None
    y: Any = None
    weight: Any = None
    averaging: ErrorAveraging | None = None

    def space_of_mode(self, first):
        """Return the `ErrorSpace` of all that is learned, from a first setting."""
        counts = (RATE_COUNTS[0] - 1.0, RATE_COUNTS[1] - 1.0)  # those of the rate's own density
        scales = None
        if self.learn:
            seen = self.X, self.weight
            if first.points is not None:
                seen = first.points, np.ones(len(first.points))
            scales = WeakScales(first.kernel, *seen, self.noise, self.length_centre)
        return ErrorSpace(first, scales, counts if self.learn_rate else None, self.unit)

    def space_of_average(self, first):
        """Return the `ErrorSpace` that is averaged over; ratios of lengths and points stay."""
        averaging: Any = self.averaging
        scales, counts = None, averaging.rate_counts if self.learn_rate else None
        if self.learn:
            scales = spaces.KernelScales.at(first.kernel, first.kernel.theta, averaging.prior)
        return ErrorSpace(first, scales, counts)

    def value_and_gradient(self, theta, fit, n_jobs, slopes):
        """Return log evidence at theta, EP run from the sites of the fit, and its gradient.

        Rates of wrong labels and inducing points are those of the fit.
        """
        own = replace(self, learn=True)
        steps = dict(max_iter=self.max_iter, damping=self.damping, accelerate=True)

        def at(k, y, x, part, slopes, residual=np.inf):
            setting = fit.runs[k].attributes["setting"]
            setting = setting._replace(kernel=with_theta(self.kernel, part))
            ep, tol = self.labels.ep(self, setting, y), min(residual, self.tol)
            solve = partial(self.labels.solver(ep, self.rule, self.damping), tol=tol, **steps)
            try:
                result = solve(x)
            except ImproperPosterior:  # these sites are no start for this kernel
                result = solve(self.labels.empty_sites(y))
            node = own.node(setting, ep, result, slopes)
            return node.log_evidence, node.slope.theta if slopes else None

        return base.evidence_at(at, self.y, theta, fit, slopes, self.labels.exact_gradient)

    @property
    def response_share(self):
        """Share of a factor that its site matches, None where sites are not those of EP."""
        return 1.0 if self.rule.exponent == 1 and self.relaxed is None else None

    def latent_sites(self, fit):
        """Return the sites (precision, shift) on the latent values of the rows, problem 0."""
        return fit.sites[0] / (1.0 + self.noise * fit.sites[0][0])

    def node(self, setting, ep, result, slopes=True):
        """Return the `EPNode` of a `Result` of the rule of learning, maybe without `slopes`."""
        state, told = result.evaluation.payload[0], None
        if slopes:
            theta, towards, wrong = self.labels.slopes(self, ep, result)
            # of the rate: the expected minus the assumed number of wrong labels
            told = Slopes(theta, self.weight @ (wrong - setting.rate), towards)
        return spaces.EPNode(setting, state, result, told)

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        return self.labels.posterior(self, *payload[:2])


@dataclass
class ErrorProblem:
    """EP of the labels y of one problem at any setting, from the sites of a neighbour.

    `x` are sites to start from where there is no neighbour. In passing sites are refined to a
    residual whose error of the evidence learning leaves. Some of the rows need no inducing points.
    """

    plan: LabelErrorPlan
    y: np.ndarray
    x: np.ndarray
    through_points: bool = True
    tol: ClassVar[float] = 2e-2

    def at(self, setting, near, slopes=True):
        """Return the `EPNode` at a setting, or None where EP has no fixed point."""
        if not self.through_points:
            setting = setting._replace(points=None)
        labels = self.plan.labels
        ep = labels.ep(self.plan, setting, self.y, passing=True)
        solve = labels.solver(ep, self.plan.rule, labels.damping)
        tol = spaces.tol_of_nodes(self.tol, self.plan.weight.sum())
        solve = partial(solve, tol=tol, max_iter=40, accelerate=True)
        x = self.x if near is None else near.result.x
        result = spaces.settled(solve, x, labels.empty_sites(self.y), labels.damping)
        return None if result is None else self.plan.node(setting, ep, result, slopes)

    def of_rows(self, rows):
        """Return the problem of some of the rows."""
        return ErrorProblem(base.part_of(self.plan, rows), self.y[rows], self.x[:, rows], False)

    def from_rows(self, rows, node):
        """Return the problem whose sites start at those of a `Node` of some rows, others empty."""
        x = self.plan.labels.empty_sites(self.y)
        x[:, rows] = node.payload.result.x
        return replace(self, x=x)

    def by_rung(self, setting, rung, x, **limits):
        """Return the `Result` of a `Rung` at a setting from sites x."""
        plan = self.plan
        ep = plan.labels.ep(plan, setting, self.y)
        if rung.rule is None:
            return MarginalDoubleLoop(ep, plan.rule.exponent).solve(x, **limits)
        solve = plan.labels.solver(ep, rung.rule, rung.damping)
        if rung.in_turn:
            solve = SequentialEP(ep, rung.rule, rung.damping).solve
        return solve(x, damping=rung.damping, accelerate=rung.accelerate, **limits)

    def told(self, setting, result):
        """Return posterior, `Result`, and what is told of the rows, of a rung."""
        posteriors, _, told = self.parts([(setting, result)], np.ones(1))
        return posteriors[0], result, told | dict(relaxation=self.relaxation(result))

    def parts(self, pairs, weight):
        """Return posteriors and weight of pairs of a setting and its `Result`, and the mixture.

        The last tells what leaving each row out says of its label.
        """
        # of labels that a kernel separates one side may take all weight, to the last digit
        pairs = [pair for pair, w in zip(pairs, weight, strict=True) if w > 0]
        weight, plan = weight[weight > 0], self.plan
        rows = self.y, base.copies_left_out(plan.X, self.y, plan.weight)
        each = [plan.labels.left_out(plan, s, *rows, r) for s, r in pairs]
        told, wrong = zip(*each, strict=True)
        posteriors = [plan.posterior((s, r.evaluation.payload[0])) for s, r in pairs]
        logs = base.mixed_logs(weight, np.array(told), rows)
        return posteriors, weight, dict(loo_log=logs, wrong_proba=weight @ wrong)

    def relaxation(self, result):
        """Return the relaxation (n,) of each row at the end of a run, 0 by other rules."""
        relaxation = getattr(result.evaluation.payload[1], "relaxation", None)
        return np.zeros(len(self.y)) if relaxation is None else relaxation
