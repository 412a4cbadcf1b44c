"""One binary problem of Gaussian-process classification whose labels may be wrong."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import expit, logit

from ._engine.double_loop_gp import DoubleLoop
from ._engine.factors import LabelErrorStep
from ._engine.gaussian import ImproperPosterior
from ._engine.kernels import contract_diagonal
from ._engine.ladder import Rung, climb
from ._engine.learning import EvidencePoint, maximise_evidence
from ._engine.loop import iterate
from ._engine.posteriors.dense_gp import DenseGPPosterior, KernelGP
from ._engine.posteriors.inducing_gp import InducingGP
from ._engine.posteriors.inducing_values import InducingPrior, SparseGPPosterior
from ._engine.posteriors.latent_noise import LatentNoise
from ._engine.rules import Power, Relaxed
from ._engine.sites import Sites, cavity
from ._engine.whole import WholeEP
from ._gp_base import DenseProblem, WithKernel, fit_of_sites

__all__ = ["RATE_BOUNDS", "LabelErrorProblem", "fit_label_errors"]

RATE_BOUNDS = (1e-4, 0.45)
# Sites are refined to this residual, with this mixing, while hyperparameters move; and relative
# changes of the evidence below `ftol`, or what a line search still finds after five evaluations,
# are within the error of that.
_LEARNING_SITES = dict(tol=5e-2, damping=0.8)
_LEARNING = dict(ftol=3e-4, first_step=1.0, max_line_search=5)
# Damping and power of the fallbacks, in the order in which they are tried.
_SMALL_DAMPING = 0.25
_SAFE_POWER = 0.5
_POWER_DAMPING = 0.9
# Weak priors of learning. Few rows with wrong labels leave amplitude, length scale and rate nearly
# free: without priors a wiggly function without errors often explains them best.
_LOG_AMPLITUDE = (np.log(4.0), 1.0)
_LENGTH_SPREAD = 0.4
_RATE_COUNTS = (3.0, 9.0)


def log_rate_prior(rate):
    """Return the log density of the rate of wrong labels and its derivative in logit(rate)."""
    a, b = _RATE_COUNTS[0] - 1.0, _RATE_COUNTS[1] - 1.0
    return a * np.log(rate) + b * np.log1p(-rate), a * (1.0 - rate) - b * rate


def log_length_prior(log_length, centre):
    """Return the log density of a length scale, log-Cauchy around a centre, and its derivative.

    Heavy tails: a smooth function is preferred where the rows do not tell, and given up without
    resistance where they do.
    """
    z = (log_length - np.log(centre)) / _LENGTH_SPREAD
    return -np.log1p(z**2), -2.0 * z / (1.0 + z**2) / _LENGTH_SPREAD


@dataclass
class LabelErrorProblem(DenseProblem):
    """A dense problem with label errors: sites on g = f + noise.

    `rates` holds the rate of wrong labels at which each binary problem starts; `learn_rate` tells
    to learn it. `rule` is that of learning, `penalty` finite if relaxed sites come after it.
    `length_centre` centres the prior of the length scale of the default kernel, its last parameter;
    None for other kernels, of which nothing is known. With `inducing_points` the structure is the
    sparse one.
    """

    noise: float
    rates: list
    learn_rate: bool
    penalty: float
    cost: str
    freeze_after: int
    length_centre: float | None
    inducing_points: np.ndarray | None
    jitter: float

    @property
    def sites_on_rows(self):
        """Whether prior times sites is the posterior of the latent values of the rows."""
        return self.inducing_points is None

    def structure(self, kernel):
        """Return the structure of f at a kernel."""
        if self.inducing_points is None:
            return KernelGP(kernel, self.X)
        return InducingGP(kernel, self.X, self.inducing_points, self.jitter)

    def kernel_slope(self, structure, state):
        """Return d log evidence / d theta at a fixed point of the sites."""
        if self.inducing_points is None:
            return structure.evidence_gradient(state.latent)
        return structure.evidence_gradient(state.latent, state.noise_slope)

    def ep(self, kernel, sign, rate=None, rule=None):
        """Return the fixed-point map of a rule at a kernel and a rate of wrong labels."""
        structure = LatentNoise(self.structure(kernel), self.noise, self.weight)
        return WholeEP(structure, LabelErrorStep(rate), sign, self.weight, rule or self.rule)

    def rungs(self, kernel, sign, rate, tol):
        """Return the ladder of `climb`: the rule, less damping, a power, the double loop."""
        ep = self.ep(kernel, sign, rate)
        relaxed = np.isfinite(self.penalty)

        def run(rule, damping, accelerate, x, max_iter, monitor):
            own = WholeEP(ep.structure, ep.factor, ep.y, ep.weight, rule())
            return own.solve(
                x,
                tol=tol,
                max_iter=max_iter,
                damping=damping,
                accelerate=accelerate,
                monitor=monitor,
            )

        def descend(x, max_iter, monitor):
            exponent = getattr(self.rule, "exponent", 1.0)
            evaluate = DoubleLoop(ep, exponent).evaluate
            return iterate(evaluate, x, max_iter=max_iter, tol=tol, monitor=monitor)

        def own_rule():
            if relaxed:
                return Relaxed(self.penalty, self.cost, self.freeze_after)
            return self.rule

        if isinstance(self.rule, Power):
            # a fraction of the factor is damping of its own: more of it only makes it slow
            large = max(_POWER_DAMPING, self.damping)
            return [
                Rung("power", partial(run, own_rule, self.damping, True)),
                Rung(f"power, damping {large:g}", partial(run, own_rule, large, False), 0.6),
                Rung("double loop", descend),
            ]
        name = "relaxed" if relaxed else "ep"
        small = min(_SMALL_DAMPING, 0.5 * self.damping)
        safe = partial(Power, _SAFE_POWER)
        return [
            Rung(name, partial(run, own_rule, self.damping, True)),
            Rung(f"{name}, damping {small:g}", partial(run, own_rule, small, False)),
            Rung(f"power {_SAFE_POWER:g}", partial(run, safe, _POWER_DAMPING, False)),
            Rung("double loop", descend),
        ]

    def log_prior(self, kernel, rate):
        """Return the log prior density of what is learned and its gradient."""
        variances = kernel.diag(self.X)
        share = self.weight / (self.weight @ variances)
        centre, spread = _LOG_AMPLITUDE
        away = np.log(self.weight @ variances / self.weight.sum() / self.noise) - centre
        value, gradient = -0.5 * (away / spread) ** 2, np.zeros(0)
        if self.learn:
            gradient = -away / spread**2 * contract_diagonal(kernel, self.X, share)
            if self.length_centre is not None:
                more, slope = log_length_prior(np.log(kernel.k2.length_scale), self.length_centre)
                value += more
                gradient[-1] += slope
        if self.learn_rate:
            more, slope = log_rate_prior(rate)
            value, gradient = value + more, np.append(gradient, slope)
        return value, gradient

    def evidence(self, sign, x, tol, rate=None):
        """Return theta -> `EvidencePoint` of the log evidence at a fixed rate of wrong labels."""
        evaluate = self._evidence(sign, x, tol, self.damping)

        def at_rate(theta):
            point, _ = evaluate(self.kernel.clone_with_theta(theta), rate)
            return point

        return at_rate

    def objective(self, sign, x, kernel, rate):
        """Return the function that learning maximises, of (theta, logit rate)."""
        evaluate = self._evidence(sign, x, **_LEARNING_SITES)
        n_kernel = kernel.n_dims if self.learn else 0

        def at(parameters):
            now = self.kernel.clone_with_theta(parameters[:n_kernel]) if n_kernel else kernel
            e = float(expit(parameters[n_kernel])) if self.learn_rate else rate
            point, rate_slope = evaluate(now, e, gradient=n_kernel > 0)
            log_prior, prior_gradient = self.log_prior(now, e)
            gradient = point.gradient
            if self.learn_rate:
                gradient = np.append(gradient, rate_slope)
            return point._replace(gradient=gradient + prior_gradient, log_prior=log_prior)

        return at

    def _evidence(self, sign, x, tol, damping):
        """Return (kernel, rate) -> (`EvidencePoint`, slope in logit rate) with warm sites."""
        warm = [x]

        def evaluate(kernel, rate, gradient=True):
            ep = self.ep(kernel, sign, rate)

            def solve(start):
                return ep.solve(
                    start,
                    tol=tol,
                    max_iter=self.max_sweeps,
                    damping=damping,
                    accelerate=True,
                )

            try:
                result = solve(warm[0])
            except ImproperPosterior:  # the last sites are no start for this kernel
                result = solve(np.zeros_like(x))
            warm[0] = result.x
            state, _ = result.evaluation.payload
            slope = np.empty(0)
            if gradient:
                slope = self.kernel_slope(ep.structure.structure, state)
            point = EvidencePoint(
                result.evaluation.record["log_evidence"],
                slope,
                result.evaluation.residual,
                (kernel, state, rate, result.x),
            )
            return point, self._rate_slope(ep, Sites(*result.x), state)

        return evaluate

    def _rate_slope(self, ep, sites, state):
        """Return d log evidence / d logit(rate): expected minus assumed number of wrong labels."""
        exponent = getattr(self.rule, "exponent", 1.0)
        cav = cavity(sites, state.mean, state.var, exponent)
        wrong = ep.factor.powered(exponent).wrong_proba(ep.y, cav.mean, cav.var)
        return self.weight @ (wrong - ep.factor.rate)

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        kernel, state = payload[:2]
        if self.inducing_points is None:
            return DenseGPPosterior(kernel, self.X, state.latent)
        prior = InducingPrior(kernel, self.inducing_points, self.jitter)
        return SparseGPPosterior(prior, state.latent.posterior)


def learn_hyperparameters(problem, sign, monitor, k):
    """Return (kernel, rate, sites, history, whether a callback ended it), as problem k asks.

    The sites are those of learning at these values.
    """
    kernel, rate = problem.kernel.clone_with_theta(problem.starts[k]), problem.rates[k]
    learn_kernel = problem.learn and kernel.n_dims > 0
    if not (learn_kernel or problem.learn_rate):
        return kernel, rate, problem.sites[k], {}, False
    theta = kernel.theta if learn_kernel else np.empty(0)
    bounds = kernel.bounds if learn_kernel else np.empty((0, 2))
    starts = problem.restarts if learn_kernel else []
    if problem.learn_rate:
        theta = np.append(theta, logit(rate))
        bounds = np.vstack([bounds, logit(RATE_BOUNDS)])
        starts = [np.append(s, logit(rate)) for s in starts]
    learned = maximise_evidence(
        problem.objective(sign, problem.sites[k], kernel, rate),
        theta,
        bounds,
        max_iter=problem.max_iter,
        starts=starts,
        monitor=monitor,
        **_LEARNING,
    )
    kernel, _, rate, sites = learned.point.payload
    return kernel, rate, sites, learned.history, learned.stopped


def fit_label_errors(problem, sign, monitor, k):
    """Learn what is asked for, converge the sites, and return the `BinaryFit` of problem k."""
    kernel, rate, sites, history, stopped = learn_hyperparameters(problem, sign, monitor, k)
    # a search that was ended early still ends at converged sites, in sweeps that nobody counts
    ended = stopped or len(history.get("residual", [])) >= problem.max_iter
    watch = None if monitor is None or ended else WithKernel(monitor, kernel)
    rungs = problem.rungs(kernel, sign, rate, problem.tol)
    result, path = climb(rungs, sites, problem.max_iter, watch)
    if not ended:
        history = {n: np.concatenate([history.get(n, []), v]) for n, v in result.history.items()}
    state, update = result.evaluation.payload
    cav = cavity(Sites(*result.x), state.mean, state.var)
    factor = LabelErrorStep(rate)
    relaxation = np.zeros(len(sign)) if update.relaxation is None else update.relaxation
    return fit_of_sites(
        problem.posterior((kernel, state)),
        history,
        result,
        kernel,
        factor,
        relaxation=relaxation,
        wrong_proba=factor.wrong_proba(sign, cav.mean, cav.var),
        rate=rate,
        path=path,
    )
