"""Learning kernel parameters and inducing points, as one vector, from the evidence of EP.

Three drivers of one gradient: steps between the passes of EP, steps between minibatches, and
evaluations at the fixed point for a quasi-Newton search.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state

from ..._engine.hyper import LearningEnd
from ..._engine.loop import Reason, StepsOfPhase, Trace
from ..._engine.partition import Part, PartMap
from ..._engine.rows import other_keys
from ..._estimator.checks import draw_seed
from .. import _hyperparameters as spaces
from .._kernels import constant_and_stationary, with_theta
from .._limits import LIMITS
from . import ep as passes
from .rows import batches_of_part, keys_of_part, rows_up_to
from .values import InducingPosterior, InducingPrior, rebase


@dataclass(frozen=True)
class Hyperparameters(spaces.ThetaSpace):
    """What is learned, as one vector: kernel parameters, then inducing points in units of `unit`.

    The kernel parameters are theta itself, within its box of bounds, or for the rules that step in
    every coordinate alike (`decoupled`) the logs of standard deviation and slopes. The evidence of
    smooth functions knows the slopes well and has a long flat ridge in theta, which such rules
    would cross many times. Z (m, d) are the first inducing points, `unit` (d,) is the length of a
    step of size one in each column.

    The prior is flat, or with `lengths_near` `density_of_ratios`, for several lengths of a
    constant times RBF or Matern.
    """

    Z: np.ndarray
    unit: np.ndarray
    jitter: float
    learn_kernel: bool
    learn_inputs: bool
    decoupled: bool = False
    lengths_near: bool = False

    @cached_property
    def n_theta(self):
        """Number of learned kernel parameters."""
        return self.kernel.n_dims if self.learn_kernel else 0

    @cached_property
    def _box(self):
        """Bounds (2, p) of theta; scikit-learn looks them up by name, which takes long."""
        return np.reshape(self.kernel.bounds, (-1, 2))[: self.n_theta].T

    @property
    def learns(self):
        """Whether there is anything to learn."""
        return self.n_theta > 0 or self.learn_inputs

    @cached_property
    def _maps(self):
        """Matrix (p, p) from the kernel part of a vector to theta, and its inverse.

        Decoupled, the log variance is twice the entry `first` of the vector, and log l_k is that
        entry minus entry k, so that l_k = sd / slope_k.
        """
        to_theta, split = np.eye(self.n_theta), constant_and_stationary(self.kernel)
        free = split and split[0] and split[0].n_dims and split[1].n_dims
        if self.decoupled and self.n_theta and free:
            first = 0 if split[2] else self.n_theta - 1
            to_theta *= -1.0
            to_theta[:, first] = 1.0
            to_theta[first, first] = 2.0
        return to_theta, np.linalg.inv(to_theta)

    def theta(self, vector):
        """Return the kernel parameters of a vector."""
        return self._maps[0] @ vector[: self.n_theta]

    @property
    def start(self):
        """Vector of the first kernel and inducing points."""
        moved = np.zeros(self.Z.size if self.learn_inputs else 0)
        return self._joined(self.kernel.theta[: self.n_theta], moved)

    def _joined(self, theta, moved):
        return np.concatenate([self._maps[1] @ np.clip(theta, *self._box), moved])

    @property
    def bounds(self):
        """Bounds (p, 2) of a vector that is not decoupled; none for inducing points."""
        free = np.full((self.Z.size if self.learn_inputs else 0, 2), [-np.inf, np.inf])
        return np.vstack([self._box.T, free])

    def clip(self, vector):
        """Return the vector with its theta moved into the bounds."""
        return self._joined(self.theta(vector), vector[self.n_theta :])

    def prior(self, vector):
        """Return the `InducingPrior` of a vector."""
        kernel, Z = self.kernel, self.Z
        if self.n_theta:
            kernel = with_theta(kernel, self.theta(vector))
        if self.learn_inputs:
            Z = Z + vector[self.n_theta :].reshape(Z.shape) * self.unit
        return InducingPrior(kernel, Z, self.jitter)

    def log_prior(self, vector):
        """Return the log prior at a vector, but for a constant, and its gradient (p,)."""
        gradient = np.zeros(len(vector))
        if not (self.lengths_near and self.n_theta):
            return 0.0, gradient
        value, slope = spaces.density_of_ratios(self.kernel, self.theta(vector))
        gradient[: self.n_theta] = slope @ self._maps[0]
        return value, gradient

    def gradient(self, model, sums, fresh, kind=np.float64):
        """Return the gradient of the log evidence in the vector, from sums of a float type."""
        theta, towards = passes.evidence_gradient(model, sums, fresh, self.learn_inputs, kind)
        pieces = [self._maps[0].T @ theta[: self.n_theta]]
        if self.learn_inputs:
            pieces.append((towards * self.unit).ravel())
        return np.concatenate(pieces)


class LearningLimits(NamedTuple):
    """When learning by passes ends, and how steps are shared out."""

    # it is over once so many passes raise the evidence by less than the share, the noise of moving
    # sites
    patience: int = 15
    stalled: float = 1e-5
    # at the end of max_iter it has converged if they raised it by less than so many nats a row:
    # below that four times the passes changed the held-out log loss by at most .004, above by .02
    settled: float = 0.005
    # the same after passes over some of the rows: twice that, since rows that were not seen before
    # are a part of it
    settled_after: float = 0.01
    # hyperparameters of minibatches are averaged with weights that grow as this power of the step
    # (Shamir and Zhang 2013), which takes the noise of the batches out of the last quarter
    tail: float = 3.0
    # steps of minibatches fall linearly to zero from this multiple of the rate
    first_step: float = 2.0
    # share of the open variance that labels see while points move (power EP); with one, points and
    # kernel fit noise. 45 fits to 1100 to 5000 rows of 17 sets of two classes have a log loss .002
    # lower (.027 lower to .006 higher), with .5 .0004 higher; 28 fits to 1001 to 2500 rows of
    # several classes .017 lower (.12 lower to .011 higher) in .8 of the time
    share: float = 0.8
    # shares of the rows, each with the share of max_iter that goes into passes over them, and what
    # is left for all rows: of 20,000 rows of 20 columns log loss .276 in 61 whole passes, .273 in
    # 150
    rungs: tuple = ((0.1, 0.4), (0.25, 0.4), (0.5, 0.27))
    last: float = 0.135
    # points that follow a dense posterior are near enough where a step gains less than this share
    # of the bound: with 1e-3 the log loss of sonar is .003 higher, 1e-4 takes a fifth more time
    near_dense: float = 3e-4


LEARNING = LearningLimits()


class Adam:
    """Adam (Kingma and Ba 2015) with every step clipped to one in each parameter.

    The running square has a short memory, which follows the quickly falling gradients of an
    evidence.
    """

    def __init__(self, rate):
        self.rate, self.n_steps = rate, 0
        self._mean = self._square = np.zeros(())

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        self.n_steps += 1
        b1, b2 = 0.9, 0.99
        self._mean = b1 * self._mean + (1.0 - b1) * gradient
        self._square = b2 * self._square + (1.0 - b2) * gradient**2
        mean = self._mean / (1.0 - b1**self.n_steps)
        root = np.sqrt(self._square / (1.0 - b2**self.n_steps)) + 1e-8
        return np.clip(self.rate * mean / root, -1.0, 1.0)


class Adadelta:
    """Adadelta (Zeiler 2012): steps in the units of the past steps, without a rate.

    `rate` only scales the first steps: the past steps start at its square.
    """

    def __init__(self, rate):
        self._square = np.zeros(())
        self._moved = np.full((), rate**2)

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        keep, least = 0.9, 1e-5  # of the running squares, which are kept from vanishing
        self._square = keep * self._square + (1.0 - keep) * gradient**2
        change = gradient * np.sqrt((self._moved + least) / (self._square + least))
        self._moved = keep * self._moved + (1.0 - keep) * change**2
        return change


class SignRate:
    """The published rule of this method (Hernandez-Lobato and Hernandez-Lobato 2016, section 5).

    A parameter moves by its own rate, at first `rate`, times the gradient, at most by one; the
    rate grows by 2 % while the sign of the gradient holds and is halved when it changes.
    """

    def __init__(self, rate):
        self._rates = np.full((), rate)
        self._last = np.zeros(())

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        held = self._last * gradient
        self._rates = self._rates * np.where(held > 0, 1.02, np.where(held < 0, 0.5, 1.0))
        self._last = gradient
        return np.clip(self._rates * gradient, -1.0, 1.0)


STEP_RULES = {"adam": Adam, "adadelta": Adadelta, "sign_rate": SignRate}


def learn_by_passes(
    ep, hyper, vector, state, rule, plan, trace, max_iter, weight, due=None, enough=LEARNING.settled
):
    """Alternate one damped pass of EP with one step of the hyperparameters.

    Learning starts at `vector`, with the sites of `state`, by a `rule` of `step_rules`, and goes up
    log evidence plus log prior; `weight` counts the copies of the rows, and the rule is told the
    gradient times those of all rows of the plan over it. The first pass from empty sites takes
    their updates whole, others the share of the plan. At the end of `max_iter`, and from `due`
    passes on, it has converged if the last passes gained less than `enough` nats a row. Returns the
    state at the learned hyperparameters, their vector and the `LearningEnd`.

    A pass uses the sites of the previous one under the new prior, which are stale by one step; the
    fresh form of the gradient tolerates that. The figures of a pass are those of the state that it
    starts from: of the one it leads to only the next pass knows them.
    """
    reason: Reason | None = None
    values = []
    options = dict(gradient="fresh", inputs=hyper.learn_inputs, kind=plan.kind)
    while reason is None:
        trace.begin("pass")
        model = ep.model(state)
        share = plan.sweeps["damping"] if np.any(state.shift) else 1.0
        averaged = state.sites is None
        sums, each, _ = ep.one_pass(model, state.sites, step=1.0 if averaged else share, **options)
        figures = model.figures(sums)
        log_prior, slopes = hyper.log_prior(vector)
        values.append(figures["log_evidence"] + log_prior)
        gradient = hyper.gradient(model, sums, fresh=True) + slopes
        left = hyper.clip(vector + gradient) - vector
        vector = hyper.clip(vector + rule.step(plan.data.weight / weight * gradient))
        prior, gram, shift = hyper.prior(vector), sums.gram, sums.shift
        if averaged:
            gram = state.gram + share * (gram - state.gram)
            shift = state.shift + share * (shift - state.shift)
        gram, shift = rebase(gram, shift, state.prior, prior)
        state = passes.PassState(prior, gram, shift, None if averaged else [r.sites for r in each])
        asked = trace.end(figures, model)
        reason = "asked" if asked else _end_of_passes(values, enough * weight, max_iter, due)
    return state, vector, LearningEnd(reason, trace.n_iter, float(np.max(np.abs(left))))


def _end_of_passes(values, small, max_iter, due=None) -> Reason | None:
    """Return why learning by passes ends, or None: it stalls, or max_iter is used up.

    `values` are log evidence plus log prior so far. At max_iter, or from `due` on, it has converged
    if the last passes gained less than a `small` one.
    """
    before = max(values[: -LEARNING.patience] or values[:1])
    gain = max(values[-LEARNING.patience :]) - before
    if len(values) > LEARNING.patience and gain < LEARNING.stalled * abs(before):
        return "converged"
    if len(values) >= (due or max_iter) and len(values) > LEARNING.patience and gain < small:
        return "converged"
    return "max_iter" if len(values) >= max_iter else None


def _rungs(run, plan):
    """Yield shares of the rows, [X, class indices, weights], each with the number of passes."""
    data = plan.data
    for share, of_passes in LEARNING.rungs:
        share = min(1.0, max(share, LIMITS.least_passes / data.weight))
        share = min(share, LIMITS.some_entries / (sum(data.sizes) * len(data.units.origin)))
        n_passes = round(of_passes * plan.max_iter * (1.0 - share if plan.begun else 1.0))
        largest = np.uint64(min(share, 1.0 - 2.0**-53) * 2.0**64)
        rows = rows_up_to(run, data, plan.seed, largest)
        if n_passes and len(np.unique(rows[1])) == len(data.labels):
            yield rows, n_passes
        del rows  # they may be as large as memory allows


def learn_on_more_and_more_rows(ep, hyper, rule, plan, monitor):
    """Learn by passes over some of the rows, then over more.

    The rule is told gradients of the scale of all rows, and goes on with them. Returns vector and
    state of all rows to go on from, and how many passes over them are due; None where rows are few.
    A kernel that is known by some of the rows needs fewer passes, the fewer the larger the share of
    the rows that they see; without any the state is None.
    """
    many = plan.data.weight >= LIMITS.some_passes and ep.labels.copies is None
    if plan.sites is not None or not (plan.begun or many):
        return None
    model, vector = None, hyper.start
    for rows, n_passes in _rungs(ep.run, plan):
        with PartMap([Part(*rows)], None) as run, monitor.phase("some rows first") as told:
            small = passes.InducingEP(run, [len(rows[1])], None, ep.labels)
            state = small.zero(hyper.prior(vector))
            if model is not None:  # the sites that the posterior of others asks for
                state = small.renew(model, state.sites)
            trace, from_here = Trace(StepsOfPhase(told)), (small, hyper, vector, state, rule, plan)
            state, vector, _ = learn_by_passes(*from_here, trace, n_passes, rows[2].sum())
            model = small.model(state)
        del rows, run, small, from_here  # not beside the next ones
        if trace.asked:
            break
    if model is None and not plan.begun:
        return None
    state = None if model is None else ep.renew(model, ep.empty_sites())
    return vector, state, max(1, round(LEARNING.last * plan.max_iter))


def rounds_of_batches(batches):
    """Return, round by round, the batch of each partition, None where it has none.

    Partitions of fewer batches than others are left out of rounds at even distances.
    """
    n_rounds = max(len(b) for b in batches)
    rounds = [[None] * len(batches) for _ in range(n_rounds)]
    for k, own in enumerate(batches):
        for j, rows in enumerate(own):
            rounds[j * n_rounds // len(own)][k] = rows
    return rounds


class BatchLearning:
    """Minibatches: all that travels from one to the next, hyperparameters and sums of all rows.

    The sums of `state` forget old rows at a rate that falls with the `n_done` steps of `n_steps`: a
    running average can never lose its definiteness, as differences would. `average` is the mean of
    the vectors so far, late ones weighted most. `total` is the weight of all rows, `how` says what
    is done with a batch.
    """

    def __init__(self, ep, hyper, state, rule, plan):
        self.ep, self.hyper, self.rule, self.total = ep, hyper, rule, plan.data.weight
        self.n_steps, self.n_done = plan.max_iter * max(1.0, self.total / plan.batch_size), 0
        # the sites of the epochs are the answer where nothing is learned
        form, kind = ("fresh", plan.kind) if hyper.learns else (None, np.float64)
        self.how = passes.PassStep(plan.sweeps["damping"], form, hyper.learn_inputs, kind)
        self.vector = self.average = hyper.start
        sites = None if state.sites is None else [s.copy() for s in state.sites]
        self.state = replace(state, sites=sites)

    def epoch(self, batches):
        """Go once through all partitions; return the residual and the mean log evidence.

        Each step is a batch that is spread over the partitions, which work side by side under the
        same posterior and kernel, and their sums make the step.
        """
        before, sites = self.state, self.state.sites
        told = [self._round(each, sites) for each in rounds_of_batches(batches)]
        residuals, log_evidence = np.transpose(told)
        residual = _drift(before, self.state) if sites is None else max(residuals)
        if sites is not None and not self.hyper.learns:
            self.state = self.ep.restate(self.state.prior, sites)
        return {"residual": residual, "log_evidence": np.mean(log_evidence)}

    def _round(self, each, sites):
        """Take a step by the batch of each partition, which may be None; keep its new sites."""
        model, messages = self.ep.model(self.state), []
        for k, rows in enumerate(each):
            own = None if sites is None or rows is None else sites[k][:, :, rows]
            messages.append(None if rows is None else (rows, own))
        answers = self.ep.run(passes.batch_of_part, messages, model, self.ep.classes, self.how)
        for k, answer in enumerate(answers):
            if answer is not None and sites is not None:
                sites[k][:, :, each[k]] = answer[0].sites
        sums, copies = zip(*filter(None, answers), strict=True)
        return self._step(model, passes.add_sums(sums), sum(copies))

    def _step(self, model, sums, weight):
        """Take in the sums of so many copies and move the hyperparameters.

        Returns the residual, and the log evidence that is estimated from this batch.
        """
        state, scale = self.state, self.total / weight
        # no faster than once an epoch: when a row's turn comes again its own site is taken out as
        # a whole, and has to be in the sums still
        forget = min(1.0, max(1.0 / scale, (self.n_done + 1.0) ** -0.6))
        gram = state.gram + forget * (scale * sums.gram - state.gram)
        shift = state.shift + forget * (scale * sums.shift - state.shift)
        if self.hyper.learns:
            gradient = self.hyper.gradient(model, sums.scaled(scale), True, self.how.kind)
            step = self.rule.step(gradient + self.hyper.log_prior(self.vector)[1])
            # long steps first, then ever shorter ones: the noise of the batches averages out
            step *= LEARNING.first_step * max(0.0, 1.0 - self.n_done / self.n_steps)
            self.vector = self.hyper.clip(self.vector + step)
            prior = self.hyper.prior(self.vector)
            gram, shift = rebase(gram, shift, state.prior, prior)
            state = replace(state, prior=prior)
        self.state = replace(state, gram=gram, shift=shift)
        share = (LEARNING.tail + 1.0) / (self.n_done + 1.0 + LEARNING.tail)
        self.average = self.average + share * (self.vector - self.average)
        self.n_done += 1
        return sums.residual, model.log_evidence + scale * sums.log_term


def learn_by_minibatches(ep, hyper, state, rule, plan, trace):
    """Epochs of minibatches, followed by sums made afresh from stored sites if nothing is learned.

    While hyperparameters move, running sums are better: stored sites are those of other kernels.
    `rule` is that of `learn_by_passes`. `max_iter` of the plan counts epochs; with nothing to learn
    they end once no update of a batch exceeds `tol`. Returns the state at the averaged
    hyperparameters, with the running sums where it has learned, and the `LearningEnd`.

    A batch is spread over all partitions, whoever works on them, so that the answer does not depend
    on workers.
    """
    rng, share = check_random_state(plan.seed), plan.batch_size / plan.data.weight
    learning = BatchLearning(ep, hyper, state, rule, plan)
    seeds = [draw_seed(rng)] * len(ep.sizes)
    of_rows = ep.run(keys_of_part, seeds, ep.classes, plan.data.units)
    reason: Reason | None = None
    while reason is None:
        trace.begin("epoch")
        seed = draw_seed(rng)
        keys = [other_keys(k, seed) for k in of_rows]
        record = learning.epoch(ep.run(batches_of_part, keys, ep.classes, share))
        settled = not hyper.learns and record["residual"] < plan.sweeps["tol"]
        if trace.end(record, ep.model(learning.state)):
            reason = "asked"
        elif settled or trace.n_iter >= plan.max_iter:
            # Epochs are a budget that the user chose, over which the steps fall to zero: to have
            # used them up is the end of a schedule, not a failure.
            reason = "converged"
    state = learning.state
    prior = hyper.prior(learning.average) if hyper.learns else state.prior
    gram, shift = rebase(state.gram, state.shift, state.prior, prior)
    return passes.PassState(prior, gram, shift, state.sites), LearningEnd(reason, trace.n_iter, 0.0)


def _drift(before, after):
    """Return by how much an epoch moved the posteriors, the residual of an averaged site."""
    gram, shift = rebase(before.gram, before.shift, before.prior, after.prior)
    old = [InducingPosterior(*sums) for sums in zip(gram, shift, strict=True)]
    return passes.largest_change(old, after.gram, after.shift)


class InducingNode(NamedTuple):
    """What a node keeps: parameters (p,), state and model of the passes; the others see `Nodes`."""

    theta: np.ndarray
    state: passes.PassState
    model: passes.PassModel
    log_evidence: float
    residual: float
    slope: np.ndarray | None = None
    s: float = 0.0


@dataclass
class InducingProblem:
    """EP of all problems or classes under one kernel, at any vector of its hyperparameters.

    `state` is that to start from where there is no neighbour, `sweeps` are keywords of
    `InducingEP.solve`.
    """

    ep: passes.InducingEP
    hyper: Hyperparameters
    state: passes.PassState
    sweeps: dict[str, Any]

    def at(self, vector, near, slopes=True):
        """Return the `InducingNode` at a vector, or None where EP has no fixed point.

        From what a neighbour keeps. The gradient is worth two passes.
        """
        prior = self.hyper.prior(vector)

        def solve(state, damping):
            steps = self.sweeps | dict(damping=damping)
            return self.ep.solve(self.ep.moved(state, prior), **steps)[0]

        start, damping = self.state if near is None else near.state, self.sweeps["damping"]
        result = spaces.settled(solve, start, self.ep.zero(prior), damping)
        if result is None:
            return None
        state, model, slope = self.ep.state_of(result), result.evaluation.payload, None
        if slopes:
            options = dict(gradient="stored", inputs=self.hyper.learn_inputs)
            sums = self.ep.one_pass(model, state.sites, **options)[0]
            slope = self.hyper.gradient(model, sums, fresh=False)
        figures = result.evaluation.record["log_evidence"], result.residual
        return InducingNode(vector, state, model, *figures, slope)

    def differences(self, node):
        """Return the slope (p,) of the log evidence at a node, by differences.

        Of evidences at fixed points, which are run from the sites of the node to a small residual.
        """
        steps = self.sweeps | dict(tol=min(self.sweeps["tol"], 1e-6), max_iter=300)
        problem = replace(self, sweeps=steps)

        def value(theta):
            return spaces.or_refuse(problem.at(theta, node, slopes=False)).log_evidence

        return spaces.central_differences(value, node.theta)
