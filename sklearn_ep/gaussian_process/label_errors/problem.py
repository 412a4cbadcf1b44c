"""One binary problem of Gaussian-process classification whose labels may be wrong."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit
from sklearn.gaussian_process.kernels import Kernel

from ..._engine.contracts import WholeEP
from ..._engine.gaussian import ImproperPosterior
from ..._engine.hyper import NormalPrior
from ..._engine.likelihoods import LabelNoise
from ..._engine.loop import Trace, iterate
from ..._engine.rules import Power
from ..._engine.sites import Sites, cavity
from .._base import (
    column_spread,
    evidence_of_problems,
    fit_of_sites,
    left_out_signs,
    watch_of_sweeps,
)
from .._dense_gp import DenseGPPosterior, KernelGP
from .._hyperparameters import (
    KEPT,
    Accuracy,
    Nodes,
    ValueWithGradient,
    find_mode,
    or_refuse,
)
from .._kernels import contract_diagonal, with_theta
from ..inducing.values import InducingGP, InducingGPPosterior, InducingPrior
from .ladder import MarginalDoubleLoop, Rung, climb
from .noise import LatentNoise
from .relaxed_rule import Relaxed
from .step import LabelErrorStep

RATE_BOUNDS = (1e-4, 0.45)
# Relative changes of the evidence below that, or what a line search still finds after five
# evaluations, are within the error of sites in passing.
_LEARNING = Accuracy(ftol=3e-4, first_step=1.0, max_line_search=5)
# Counts of the prior of the rate. Few rows with wrong labels leave amplitude, length scale and rate
# nearly free: without priors a wiggly function without errors often explains them best.
RATE_COUNTS = (3.0, 9.0)
# Ends of learning that leave iterations for sweeps: both share one budget.
ENDS_BEFORE_SWEEPS = ("converged", "stuck")


def log_rate_prior(rate):
    """Return the log density of the rate of wrong labels and its derivative in logit(rate)."""
    a, b = RATE_COUNTS[0] - 1.0, RATE_COUNTS[1] - 1.0
    return a * np.log(rate) + b * np.log1p(-rate), a * (1.0 - rate) - b * rate


def log_length_prior(log_length, centre, spread=0.4):
    """Return the log density of a length scale, log-Cauchy around a centre, and its derivative.

    Heavy tails: a smooth function is preferred where the rows do not tell, and given up without
    resistance where they do.
    """
    z = (log_length - np.log(centre)) / spread
    return -np.log1p(z**2), -2.0 * z / (1.0 + z**2) / spread


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


class ErrorNode(NamedTuple):
    """What a node keeps; the first two are the payload of an iteration.

    Setting, state of the posterior or model of the passes, sites; for the others see `Nodes`.
    """

    setting: Setting
    state: Any
    sites: Any
    log_evidence: float
    residual: float
    slope: Slopes | None = None
    s: float = 0.0
    result: Any = None


class Coordinates:
    """The space of all that is learned: theta, logit of the rate, moves of inducing points.

    `first` is the `Setting` where learning starts, and what is kept of it; `unit` (d,) the length
    of a move of size one in each column, None where the inducing points are kept; `log_prior_of`
    maps kernel and rate to the log prior density with its slopes.
    """

    s = 0.0

    def __init__(self, first, learn_kernel, learn_rate, unit, log_prior_of):
        self.first, self.unit, self.log_prior_of = first, unit, log_prior_of
        self.n_theta = first.kernel.n_dims if learn_kernel else 0
        self.n_rate = int(learn_rate)
        self.n_moves = 0 if unit is None else first.points.size

    def start(self, theta):
        """Return the vector of the first setting with other kernel parameters."""
        rate = np.full(self.n_rate, logit(self.first.rate) if self.n_rate else 0.0)
        return np.concatenate([theta[: self.n_theta], rate, np.zeros(self.n_moves)])

    @property
    def bounds(self):
        """Bounds (p, 2) of the vector; none for inducing points."""
        theta = self.first.kernel.bounds if self.n_theta else np.empty((0, 2))
        free = np.full((self.n_moves, 2), [-np.inf, np.inf])
        rate = np.tile(logit(RATE_BOUNDS), (self.n_rate, 1))
        return np.vstack([theta, rate, free])

    def point(self, vector):
        """Return the `Setting` of a vector."""
        kernel, rate, points = self.first
        theta, logit_rate, moves = np.split(vector, [self.n_theta, self.n_theta + self.n_rate])
        if self.n_theta:
            kernel = with_theta(kernel, theta)
        if self.n_rate:
            rate = float(expit(logit_rate[0]))
        if self.n_moves:
            points = points + moves.reshape(points.shape) * self.unit
        return Setting(kernel, rate, points)

    def slopes(self, slope):
        """Return the gradient in the vector from `Slopes`."""
        moves = (slope.points * self.unit).ravel() if self.n_moves else np.empty(0)
        rate = np.full(self.n_rate, slope.rate)
        return np.concatenate([slope.theta[: self.n_theta], rate, moves])

    def log_prior(self, vector):
        """Return the log prior density of a vector and its gradient."""
        kernel, rate, points = self.point(vector)
        value, theta, of_rate = self.log_prior_of(kernel, rate)
        return value, self.slopes(Slopes(theta, of_rate, np.zeros(np.shape(points))))


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
    n_jobs: int | None


@dataclass
class LabelErrorPlan(ValueWithGradient):
    """Everything the binary problems need besides their signs; sent to workers as it is.

    Sites are on g = f + noise. `y` holds class indices; `settings` and `sites`
    have one entry a binary problem, where it starts. `learn`, `learn_rate` and `move_points` say
    whether kernel, rates of wrong labels and inducing points are learned.
    `rule` is that of learning, `penalty` finite if relaxed sites come after it. `length_centre`
    centres the prior of the length scale of the default kernel, its last parameter; None for other
    kernels, of which nothing is known. `averaging` is None where the mode is used. `X`, `y` and
    `weight` are None where the rows are in partitions.
    """

    kernel: Kernel
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
    penalty: float
    cost: str
    freeze_after: int
    length_centre: float | None
    move_points: bool
    jitter: float
    X: Any = None
    y: Any = None
    weight: Any = None
    averaging: ErrorAveraging | None = None

    def slopes(self, structure, state):
        """Return d log evidence / d theta and / d Z at a fixed point of the sites."""
        if isinstance(structure, KernelGP):
            return structure.evidence_gradient(state.latent), 0.0
        return structure.evidence_gradient(state.latent, state.noise_slope, self.move_points)

    def ep(self, setting, sign, squares=None, single=False):
        """Return the fixed-point map of the rule of learning at a setting.

        `squares` are the squared distances (n, n) of the rows in lengths, where they are known;
        see `KernelGP`.
        """
        latent: Any
        if setting.points is None:
            latent = KernelGP(setting.kernel, self.X, squares, single)
        else:
            latent = InducingGP(setting.kernel, self.X, setting.points, self.jitter)
        structure = LatentNoise(latent, self.noise, self.weight)
        return WholeEP(structure, LabelErrorStep(setting.rate), sign, self.weight, self.rule)

    def rungs(self, setting, sign, tol):
        """Return the ladder of `climb`: the rule, less damping, a power, the double loop."""
        ep = self.ep(setting, sign)

        def run(rule, damping, accelerate, x, max_iter, monitor):
            own = WholeEP(ep.structure, ep.factor, ep.y, ep.weight, rule)
            steps = dict(damping=damping, accelerate=accelerate, monitor=monitor)
            return own.solve(x, tol=tol, max_iter=max_iter, **steps)

        def descend(x, max_iter, monitor):
            evaluate = MarginalDoubleLoop(ep, self.rule.exponent).evaluate
            return iterate(evaluate, x, max_iter=max_iter, tol=tol, monitor=monitor)

        return [*self.rungs_by(run), Rung("double loop", descend)]

    def rungs_by(self, run):
        """Return the rungs that are a rule, by `run(rule, damping, accelerate, x, ...)`."""
        relaxed = np.isfinite(self.penalty)

        def rung(name, rule, damping, accelerate, share=0.3):
            return Rung(name, lambda *run_args: run(rule(), damping, accelerate, *run_args), share)

        def own_rule():
            return Relaxed(self.penalty, self.cost, self.freeze_after) if relaxed else self.rule

        if isinstance(self.rule, Power):
            # a fraction of the factor is damping of its own: more of it only makes it slow
            large = max(0.9, self.damping)
            return [
                rung("power", own_rule, self.damping, True),
                rung(f"power, damping {large:g}", own_rule, large, False, 0.6),
            ]
        name = "relaxed" if relaxed else "ep"
        small = min(0.25, 0.5 * self.damping)
        return [
            rung(name, own_rule, self.damping, True),
            rung(f"{name}, damping {small:g}", own_rule, small, False),
            rung("power 0.5", partial(Power, 0.5), 0.9, False),
        ]

    def log_prior(self, kernel, rate):
        """Return the log prior density of what is learned, its slopes in theta and logit rate."""
        variances = kernel.diag(self.X)
        share = self.weight / (self.weight @ variances)
        log_slope = contract_diagonal(kernel, self.X, share) if self.learn else 0.0
        mean = self.weight @ variances / self.weight.sum()
        return self.log_prior_at(kernel, rate, mean, log_slope)

    def log_prior_at(self, kernel, rate, mean_variance, log_slope):
        """Return the same from the mean prior variance and the slope (p,) of its log."""
        away, spread = np.log(mean_variance / self.noise / 4.0), 1.0
        value, slope = -0.5 * (away / spread) ** 2, np.zeros(0)
        if self.learn:
            slope = -away / spread**2 * log_slope
            if self.length_centre is not None:
                more, steep = log_length_prior(np.log(kernel.k2.length_scale), self.length_centre)
                value += more
                slope[-1] += steep
        if not self.learn_rate:
            return value, slope, 0.0
        more, rate_slope = log_rate_prior(rate)
        return value + more, slope, rate_slope

    def value_and_gradient(self, theta, fit, n_jobs):
        """Return log evidence at theta, EP run from the sites of the fit, and its gradient.

        Rates of wrong labels and inducing points are those of the fit.
        """

        def at(k, sign, x, part):
            setting = fit.runs[k].attributes["setting"]
            problem = ErrorProblem(replace(self, learn=True), sign, x, self.tol, self.damping)
            found = problem.at(setting._replace(kernel=with_theta(self.kernel, part)), None)
            return found.log_evidence, found.slope.theta

        return evidence_of_problems(at, self.y, theta, fit)

    @property
    def response_share(self):
        """Share of a factor that its site matches, None where sites are not those of EP."""
        return 1.0 if self.rule.exponent == 1 and not np.isfinite(self.penalty) else None

    def latent_sites(self, fit):
        """Return the sites (precision, shift) on the latent values of the rows, problem 0."""
        return fit.sites[0] / (1.0 + self.noise * fit.sites[0][0])

    def part(self, rows):
        """Return the plan of some of the rows."""
        return replace(self, X=self.X[rows], y=self.y[rows], weight=self.weight[rows])

    def node(self, setting, ep, result, slopes=True):
        """Return the `ErrorNode` of a `Result` of the rule of learning, maybe without `slopes`."""
        (state, _), slope, towards = result.evaluation.payload, np.empty(0), 0.0
        figures = result.evaluation.record["log_evidence"], result.residual
        if not slopes:
            return ErrorNode(setting, state, result.x, *figures, result=result)
        if self.learn or self.move_points:
            slope, towards = self.slopes(ep.structure.structure, state)
        rate = self.rate_slope(ep, Sites(*result.x), state) if self.learn_rate else 0.0
        told = Slopes(slope, rate, towards)
        return ErrorNode(setting, state, result.x, *figures, told, result=result)

    def rate_slope(self, ep, sites, state):
        """Return d log evidence / d logit(rate): expected minus assumed number of wrong labels."""
        cav = cavity(sites, state.mean, state.var, self.rule.exponent)
        factor = ep.factor.powered(self.rule.exponent)
        wrong = factor.wrong_proba(ep.y, cav.mean, cav.var)
        return self.weight @ (wrong - ep.factor.rate)

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        setting, state = payload[:2]
        factor = LabelNoise(setting.rate, self.noise)
        if setting.points is None:
            return DenseGPPosterior(setting.kernel, self.X, state.latent, factor)
        prior = InducingPrior(setting.kernel, setting.points, self.jitter)
        return InducingGPPosterior(prior, state.latent.posterior, factor)


@dataclass
class ErrorProblem:
    """EP of the labels of one problem while its setting moves, from the sites of the last point.

    In passing sites are refined to a residual whose error of the evidence learning leaves.
    """

    plan: LabelErrorPlan
    sign: np.ndarray
    x: np.ndarray
    tol: float = 5e-2
    damping: float = 0.8

    def at(self, setting, near, slopes=True, squares=None):
        """Return the `ErrorNode` at a setting, None where it has no posterior."""
        plan = self.plan
        options = dict(tol=self.tol, max_iter=plan.max_iter, damping=self.damping, accelerate=True)
        try:
            ep = plan.ep(setting, self.sign)
            try:
                result = ep.solve(self.x, **options)
            except ImproperPosterior:  # the last sites are no start for this kernel
                result = ep.solve(np.zeros_like(self.x), **options)
        except ImproperPosterior:  # such as inducing points that have met
            return None
        self.x = result.x
        return plan.node(setting, ep, result)


def learn_hyperparameters(plan, sign, trace, k):
    """Return (setting, sites of EP there, `LearningEnd`) of problem k."""
    unit = column_spread(plan.X, plan.weight) if plan.move_points else None
    problem = ErrorProblem(plan, sign, plan.sites[k])
    found = learn_setting(plan, k, unit, problem, plan.log_prior, trace)
    return found or (plan.settings[k], plan.sites[k], KEPT)


def learn_setting(plan, k, unit, problem, log_prior, trace):
    """Return (setting, sites of EP there, `LearningEnd`) of problem k, None if nothing is learned.

    `unit` (d,) is the spread of the columns where inducing points are moved; `log_prior` is that of
    `Coordinates`.
    """
    first = plan.settings[k]
    space = Coordinates(first, plan.learn, plan.learn_rate, unit, log_prior)
    start = space.start(first.kernel.theta)
    if not len(start):
        return None
    found = find_mode(
        Nodes(problem, space).evaluate,
        start,
        space.bounds,
        max_iter=plan.max_iter,
        starts=[space.start(s) for s in plan.restarts if space.n_theta],
        monitor=trace,
        accuracy=_LEARNING,
    )
    mode, end = or_refuse(found)
    return mode.payload.setting, mode.payload.sites, end


def wrong_proba(factor, sign, result):
    """Return the probability (n,) that labels are wrong, given all other rows."""
    state = result.evaluation.payload[0]
    cav = cavity(Sites(*result.x), state.mean, state.var)
    return factor.wrong_proba(sign, cav.mean, cav.var)


def fit_label_errors(plan, sign, monitor, k):
    """Learn what is asked for, converge the sites, and return the `BinaryFit` of problem k."""
    trace = Trace(monitor)
    setting, sites, end = learn_hyperparameters(plan, sign, trace, k)
    watch = watch_of_sweeps(trace, end, setting, ends=ENDS_BEFORE_SWEEPS)
    result, path = climb(plan.rungs(setting, sign, plan.tol), sites, plan.max_iter, watch)
    state, update = result.evaluation.payload
    factor = LabelErrorStep(setting.rate)
    more = dict(
        label_noise=setting.rate,
        no_errors_proba=0.0,
        relaxation=np.zeros(len(sign)) if update.relaxation is None else update.relaxation,
        wrong_proba=wrong_proba(factor, sign, result),
        setting=setting,
        path=path,
    )
    left_out = left_out_signs(factor, result)
    run = trace, end, result, setting.kernel, left_out, setting.points
    return fit_of_sites(plan.posterior((setting, state)), *run, **more)
