"""Learning kernel parameters and inducing points from the evidence of EP.

Three drivers of one gradient: steps between the passes of EP, steps between minibatches, and
evaluations at the fixed point for a quasi-Newton search.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..._engine.gaussian import ImproperPosterior
from ..._engine.hyper import Node
from ..._engine.loop import Reason, StepsOfPhase, Trace
from ..._engine.partition import Part, PartMap
from ..._engine.row_order import minibatches, other_keys
from .._hyperparameters import LearningEnd
from .._limits import LIMITS
from .ep import InducingEP, PassState, add_sums, largest_change, read_rows
from .hyperparameters import Hyperparameters
from .passes import PassModel, PassRows, PassStep, evaluate_rows
from .rows import smallest_keys, standard_keys
from .values import block_rows, rebase


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
    # shares of the rows, each with the share of max_iter that goes into passes over them, and what
    # is left for all rows: of 20,000 rows of 20 columns log loss .276 in 61 whole passes, .273 in
    # 150
    rungs: tuple = ((0.1, 0.4), (0.25, 0.4), (0.5, 0.27))
    last: float = 0.135


LEARNING = LearningLimits()


class Adam:
    """Adam (Kingma and Ba 2015) with every step clipped to `clip` in each parameter.

    `decay` is that of the running mean and of the running square; the short memory of the square
    follows the quickly falling gradients of an evidence.
    """

    def __init__(self, rate, decay=(0.9, 0.99), clip=1.0):
        self.rate, self.decay, self.clip = rate, decay, clip
        self.n_steps = 0
        self._mean = self._square = np.zeros(())

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        self.n_steps += 1
        b1, b2 = self.decay
        self._mean = b1 * self._mean + (1.0 - b1) * gradient
        self._square = b2 * self._square + (1.0 - b2) * gradient**2
        mean = self._mean / (1.0 - b1**self.n_steps)
        root = np.sqrt(self._square / (1.0 - b2**self.n_steps)) + 1e-8
        return np.clip(self.rate * mean / root, -self.clip, self.clip)


class Adadelta:
    """Adadelta (Zeiler 2012): steps in the units of the past steps, without a rate.

    `rate` only scales the first steps: the past steps start at its square. `decay` is that of the
    running squares, `epsilon` keeps them from vanishing.
    """

    def __init__(self, rate, decay=0.9, epsilon=1e-5):
        self.decay, self.epsilon = decay, epsilon
        self._square = np.zeros(())
        self._moved = np.full((), rate**2)

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        keep = self.decay
        self._square = keep * self._square + (1.0 - keep) * gradient**2
        change = gradient * np.sqrt((self._moved + self.epsilon) / (self._square + self.epsilon))
        self._moved = keep * self._moved + (1.0 - keep) * change**2
        return change


class SignRate:
    """The published rule of this method (Hernandez-Lobato and Hernandez-Lobato 2016, section 5).

    A parameter moves by its own rate, at first `rate`, times the gradient, at most by `clip`; the
    rate grows by 2 % while the sign of the gradient holds and is halved when it changes.
    """

    def __init__(self, rate, clip=1.0):
        self.rate, self.clip = rate, clip
        self._rates = np.full((), rate)
        self._last = np.zeros(())

    def step(self, gradient):
        """Return the change of the parameters for the gradient of what is maximised."""
        held = self._last * gradient
        self._rates = self._rates * np.where(held > 0, 1.02, np.where(held < 0, 0.5, 1.0))
        self._last = gradient
        return np.clip(self._rates * gradient, -self.clip, self.clip)


STEP_RULES = {"adam": Adam, "adadelta": Adadelta, "sign_rate": SignRate}


def learn_by_passes(
    ep,
    hyper,
    vector,
    state,
    rule,
    *,
    weight,
    damping,
    max_iter,
    trace,
    scale=1.0,
    settled=LEARNING.settled,
    kind=np.float64,
    due=None,
):
    """Alternate one damped pass of EP with one step of the hyperparameters.

    Learning starts at `vector`, with the sites of `state`, by a `rule` of `step_rules`, and goes up
    log evidence plus log prior; `weight` counts the copies of all rows. `damping` is the share of
    the site updates; the first pass from empty sites takes them whole. The rule is told `scale`
    times the gradient. At the end of `max_iter`, and from `due` passes on, it has converged if the
    last passes gained less than `settled` nats a row. `kind` is the float type of the passes.
    Returns the state at the learned hyperparameters, their vector and the `LearningEnd`.

    A pass uses the sites of the previous one under the new prior, which are stale by one step; the
    fresh form of the gradient tolerates that. The figures of a pass are those of the state that it
    starts from: of the one it leads to only the next pass knows them.
    """
    reason: Reason | None = None
    values = []
    options = dict(gradient="fresh", inputs=hyper.learn_inputs, kind=kind)
    while reason is None:
        trace.begin("pass")
        model = ep.model(state)
        share = damping if np.any(state.shift) else 1.0
        averaged = state.sites is None
        sums, each, _ = ep.one_pass(model, state.sites, step=1.0 if averaged else share, **options)
        figures = ep.figures(model, sums)
        log_prior, slopes = hyper.log_density(vector)
        values.append(figures["log_evidence"] + log_prior)
        gradient = hyper.gradient(model, sums, fresh=True) + slopes
        left = hyper.clip(vector + gradient) - vector
        vector = hyper.clip(vector + rule.step(scale * gradient))
        prior, gram, shift = hyper.prior(vector), sums.gram, sums.shift
        if averaged:
            gram = state.gram + share * (gram - state.gram)
            shift = state.shift + share * (shift - state.shift)
        gram, shift = rebase(gram, shift, state.prior, prior)
        state = PassState(prior, gram, shift, None if averaged else [r.sites for r in each])
        asked = trace.end(figures, model)
        reason = "asked" if asked else _end_of_passes(values, settled * weight, max_iter, due)
    return state, vector, LearningEnd(reason, trace.n_iter, float(np.max(np.abs(left))))


def _end_of_passes(values, small, max_iter, due=None) -> Reason | None:
    """Return why learning by passes ends, or None: it stalls, or max_iter is used up.

    `values` are log evidence plus log prior so far. At max_iter, or from `due` on, it has converged
    if the last passes gained less than a `small` one.
    """
    before, last = (
        max(values[: -LEARNING.patience] or values[:1]),
        max(values[-LEARNING.patience :]),
    )
    gain = last - before
    if len(values) > LEARNING.patience and gain < LEARNING.stalled * abs(before):
        return "converged"
    if len(values) >= (due or max_iter) and len(values) > LEARNING.patience and gain < small:
        return "converged"
    return "max_iter" if len(values) >= max_iter else None


def rows_of_part(part, message, classes, units, seed, largest):
    """Return X, class indices and weights of the rows of a partition with keys up to `largest`."""
    X, y, weight = read_rows(part, classes)
    chosen = np.flatnonzero(standard_keys(X, units, seed) <= largest)
    return np.asarray(X[chosen], dtype=np.float64), y[chosen], weight[chosen]


def _rows_up_to(run, data, largest, seed):
    """Return the rows of all partitions of an open map that have keys up to `largest`.

    They are chosen by content alone: not by their order, nor by partitions.
    """
    messages = [None] * len(data.sizes)
    pieces = run(rows_of_part, messages, data.classes, data.units, seed, largest)
    return [np.concatenate(p) for p in zip(*pieces, strict=True)]


def _rows(ep, data, share, seed):
    """Return a share of the rows."""
    largest = np.uint64(min(share, 1.0 - 2.0**-53) * 2.0**64)
    return _rows_up_to(ep.run, data, largest, seed)


def distinct_rows(run, data, count, seed):
    """Return about `count` distinct rows with class indices and numbers of copies, in their order.

    That of their keys: neither choice nor order depends on whether copies are written out.
    """
    checks = data.classes is not None
    found = run(smallest_keys, [checks] * len(data.sizes), data.units, seed, count)
    largest = np.unique(np.concatenate([keys for keys, _ in found]))[:count][-1]
    X, y, weight = _rows_up_to(run, data, largest, seed)
    keys = standard_keys(X, data.units, seed)
    order = np.lexsort((y, keys))
    new = np.diff(keys[order]).astype(bool) | np.diff(y[order]).astype(bool)
    first = np.flatnonzero(np.append(True, new))
    copies, chosen = np.add.reduceat(weight[order], first), order[first]
    # rows of one content with several labels stay together
    within = keys[chosen] <= keys[chosen[: count + 1][-1]] - (len(chosen) > count)
    return X[chosen[within]], y[chosen[within]], copies[within]


def _with_sites(ep, model):
    """Return the state of the rows of `ep` with the sites that the posterior of others asks for."""
    return ep.renew(model, [np.zeros((ep.n_problems, 2, n)) for n in ep.sizes])


def learn_on_more_and_more_rows(
    ep, hyper, vector, rule, data, monitor, *, known, seed, damping, max_iter, kind
):
    """Learn by passes over some of the rows, then over more.

    The rule is told gradients of the scale of all rows, and goes on with them. Returns vector and
    state of all rows to go on from, and how many passes over them are due; None where rows are few.
    A kernel that is `known` by some of the rows needs fewer passes, the fewer the larger the share
    of the rows that they see; without any the state is None.
    """
    if not known and (data.weight < LIMITS.some_passes or ep.copies is not None):
        return None
    model, asked = None, False
    for share, of_passes in LEARNING.rungs:
        share = min(1.0, max(share, LIMITS.least_passes / data.weight))
        n_passes = round(of_passes * max_iter * (1.0 - share if known else 1.0))
        X, y, weight = _rows(ep, data, share, seed)
        if asked or not n_passes or len(np.unique(y)) < len(data.labels):
            continue
        with PartMap([Part(X, y, weight)], None) as run, monitor.phase("some rows first") as told:
            small = InducingEP(run, [len(y)], None, ep.n_problems, ep.factor, ep.rule)
            cold = model is None
            state = small.zero(hyper.prior(vector)) if cold else _with_sites(small, model)
            trace = Trace(StepsOfPhase(told))
            options = dict(weight=weight.sum(), damping=damping, trace=trace, kind=kind)
            options |= dict(max_iter=n_passes)
            options |= dict(scale=data.weight / weight.sum())
            state, vector, _ = learn_by_passes(small, hyper, vector, state, rule, **options)
            model, asked = small.model(state), trace.asked
    if model is None and not known:
        return None
    n_passes = max(1, round(LEARNING.last * max_iter))
    return vector, None if model is None else _with_sites(ep, model), n_passes


@dataclass
class Stream:
    """All that travels from one minibatch to the next: hyperparameters with their rule, and sums.

    The sums are those of a `PassState` without sites, which forgets old rows at a rate that falls
    with the steps: a running average can never lose its definiteness, as differences would.
    `average` is the mean of the vectors so far, late ones weighted most.
    """

    vector: np.ndarray
    rule: Any
    state: PassState
    average: np.ndarray
    n_steps: int = 0


@dataclass
class BatchSettings:
    """What the minibatches of a fit share."""

    hyper: Hyperparameters
    factor: Any
    rule: Any
    copies: float | None
    total: float
    size: int
    n_steps: float
    damping: float
    kind: Any


def sums_of_batch(model, X, y, weight, sites, rows, settings):
    """Return the `RowSums` of some rows, with their new sites; `sites` are those of all rows."""
    own = None if sites is None else sites[:, :, rows]
    seen = own is not None and np.any(own)
    how = PassStep(
        step=settings.damping if seen else 1.0,
        gradient="fresh" if settings.hyper.learns else None,
        inputs=settings.hyper.learn_inputs,
        kind=settings.kind,
        block=block_rows(len(model.prior.Z), settings.kind),
    )
    own = PassRows(np.asarray(X[rows], dtype=np.float64), y[rows], weight[rows], own)
    return evaluate_rows(model, own, how)


def model_of_stream(stream, settings):
    """Return what a batch needs to know of the stream so far."""
    posteriors = stream.state.posteriors()
    shared = settings.factor, settings.rule, settings.copies
    return PassModel(stream.state.prior, posteriors, *shared)


def step_of_batch(stream, model, sums, weight, settings):
    """Take the sums of a batch, of so many copies, into the stream and move the hyperparameters.

    Returns the stream, and the residual with the log evidence that is estimated from this batch.
    """
    hyper, state = settings.hyper, stream.state
    scale = settings.total / weight
    forget = min(1.0, max(3.0 / scale, (stream.n_steps + 1.0) ** -0.6))
    gram = state.gram + forget * (scale * sums.gram - state.gram)
    shift = state.shift + forget * (scale * sums.shift - state.shift)
    prior, vector = state.prior, stream.vector
    if hyper.learns:
        scaled = sums._replace(
            theta=scale * sums.theta, inputs=scale * sums.inputs, inner=scale * sums.inner
        )
        gradient = hyper.gradient(model, scaled, fresh=True, kind=settings.kind)
        step = stream.rule.step(gradient + hyper.log_density(vector)[1])
        # long steps first, then ever shorter ones: the noise of the batches averages out
        step *= LEARNING.first_step * max(0.0, 1.0 - stream.n_steps / settings.n_steps)
        vector = hyper.clip(vector + step)
        prior = hyper.prior(vector)
        gram, shift = rebase(gram, shift, state.prior, prior)
    share = (LEARNING.tail + 1.0) / (stream.n_steps + 1.0 + LEARNING.tail)
    average = stream.average + share * (vector - stream.average)
    state = PassState(prior, gram, shift, None)
    moved = Stream(vector, stream.rule, state, average, stream.n_steps + 1)
    return moved, (sums.residual, model.log_evidence + scale * sums.log_term)


def keys_of_part(part, seed, classes, units):
    """Return the keys (n_k,) of the rows of a partition with their labels."""
    X, y, _ = read_rows(part, classes)
    return standard_keys(X, units, seed, y)


def minibatches_of_part(part, message, classes, stream, settings):
    """Go once through a partition; return sites, stream and [(residual, log evidence), ...].

    `message` are the keys of its rows and their sites or None.
    """
    X, y, weight = read_rows(part, classes)
    keys, sites = message
    sites = None if sites is None else sites.copy()
    figures = []
    for rows in minibatches(keys, weight, settings.size):
        model = model_of_stream(stream, settings)
        sums = sums_of_batch(model, X, y, weight, sites, rows, settings)
        stream, told = step_of_batch(stream, model, sums, weight[rows].sum(), settings)
        if sites is not None:
            sites[:, :, rows] = sums.sites
        figures.append(told)
    return sites, stream, figures


def batches_of_part(part, keys, classes, settings):
    """Return the minibatches of a partition, arrays of row numbers, in the order of its keys.

    Each is the share of the partition in a step.
    """
    weight = read_rows(part, classes)[2]
    share = max(1.0, settings.size * weight.sum() / settings.total)
    return list(minibatches(keys, weight, share))


def batch_of_part(part, message, model, classes, settings):
    """Return the `RowSums` of a batch of a partition and its copies, None where there is none.

    `message` is (row numbers, their sites or None), or None.
    """
    if message is None:
        return None
    X, y, weight = read_rows(part, classes)
    rows, sites = message
    batch, copies = (X[rows], y[rows]), weight[rows]
    return sums_of_batch(model, *batch, copies, sites, slice(None), settings), copies.sum()


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


def minibatches_of_rounds(ep, batches, sites, stream, settings):
    """Go once through all partitions, each step a batch that is spread over them.

    The partitions work side by side under the same posterior and kernel, and their sums make the
    step. Arguments and answer are those of `minibatches_of_part`, with a list of sites.
    """
    sites = None if sites is None else [s.copy() for s in sites]
    figures = []
    for each in rounds_of_batches(batches):
        model = model_of_stream(stream, settings)
        messages: list = [None] * len(each)
        here = [k for k, rows in enumerate(each) if rows is not None]
        for k in here:
            messages[k] = each[k], None if sites is None else sites[k][:, :, each[k]]
        answers = ep.run(batch_of_part, messages, model, ep.classes, settings)
        sums, copies = zip(*(answers[k] for k in here), strict=True)
        stream, told = step_of_batch(stream, model, add_sums(sums), sum(copies), settings)
        figures.append(told)
        if sites is not None:
            for k in here:
                sites[k][:, :, each[k]] = answers[k][0].sites
    return sites, stream, figures


def learn_by_minibatches(
    ep,
    hyper,
    vector,
    state,
    rule,
    *,
    total,
    size,
    units,
    rng,
    tol,
    damping,
    max_iter,
    trace,
    kind=np.float64,
):
    """Epochs of minibatches, followed by sums made afresh from stored sites if nothing is learned.

    While hyperparameters move, running sums are better: stored sites are those of other kernels.
    The first arguments and `kind` are those of `learn_by_passes`. `total` is the weight of all
    rows, `size` counts the copies of rows in a batch, `units` are those of the columns, `rng` draws
    the order of each epoch, `damping` is the share of the updates of sites that are not empty, and
    `max_iter` counts epochs; with nothing to learn they end once no update of a batch exceeds
    `tol`. Returns the state at the averaged hyperparameters, with the running sums where it has
    learned, and the `LearningEnd`.

    A batch is spread over all partitions, whoever works on them, so that the answer does not depend
    on workers.
    """
    n_steps = max_iter * max(1.0, total / size)
    settings = BatchSettings(
        hyper, ep.factor, ep.rule, ep.copies, total, size, n_steps, damping, kind
    )
    stream, sites = Stream(vector, rule, state, vector), state.sites
    drawn = np.iinfo(np.int32).max
    seeds = [int(rng.randint(drawn))] * len(ep.sizes)
    of_rows = ep.run(keys_of_part, seeds, ep.classes, units)
    reason: Reason | None = None
    while reason is None:
        trace.begin("epoch")
        seed, before = int(rng.randint(drawn)), stream.state
        keys = [other_keys(k, seed) for k in of_rows]
        sites, stream, figures = _epoch(ep, keys, sites, stream, settings)
        if sites is not None and not hyper.learns:
            stream.state = ep.collect(stream.state.prior, sites)
        residual = max(f[0] for f in figures) if sites is not None else _drift(before, stream.state)
        record = {"residual": residual, "log_evidence": np.mean([f[1] for f in figures])}
        if trace.end(record, ep.model(stream.state) if trace.watched else None):
            reason = "asked"
        elif trace.n_iter >= max_iter or (not hyper.learns and residual < tol):
            # Epochs are a budget that the user chose, over which the steps fall to zero: to have
            # used them up is the end of a schedule, not a failure.
            reason = "converged"
    prior = hyper.prior(stream.average) if hyper.learns else stream.state.prior
    gram, shift = rebase(stream.state.gram, stream.state.shift, stream.state.prior, prior)
    return PassState(prior, gram, shift, sites), LearningEnd(reason, trace.n_iter, 0.0)


def _epoch(ep, keys, sites, stream, settings):
    """Go once through all partitions; return sites, stream and what each step told."""
    if len(ep.sizes) > 1:
        batches = ep.run(batches_of_part, keys, ep.classes, settings)
        return minibatches_of_rounds(ep, batches, sites, stream, settings)
    # where its rows are, steps need not be told to anybody
    message = keys[0], None if sites is None else sites[0]
    own, *rest = ep.run.one(0, minibatches_of_part, message, ep.classes, stream, settings)
    return None if own is None else [own], *rest


def _drift(before, after):
    """Return by how much an epoch moved the posteriors, the residual of an averaged site."""
    gram, shift = rebase(before.gram, before.shift, before.prior, after.prior)
    old = PassState(after.prior, gram, shift, None).posteriors()
    return largest_change(old, after.gram, after.shift)


def stored_gradient(ep, hyper, model, sites):
    """Return the gradient (p,) of the log evidence at a fixed point of the sites; one pass."""
    sums, _, _ = ep.one_pass(model, sites, gradient="stored", inputs=hyper.learn_inputs)
    return hyper.gradient(model, sums, fresh=False)


def evidence_at(ep, hyper, state, **solver):
    """Return the `Evaluate` of vectors, at fixed points that start from the last one.

    The payload is the model. Hyperparameters without a proper prior or posterior have no node.
    """
    last = [state]

    def evaluate(vector, near=None):
        try:
            prior = hyper.prior(vector)
            if last[0].sites is None:
                gram, shift = rebase(last[0].gram, last[0].shift, last[0].prior, prior)
                start = PassState(prior, gram, shift, None)
            else:
                start = ep.restate(prior, last[0].sites)
            solution = ep.solve(start, **solver)
        except ImproperPosterior:
            return None
        last[0], model = solution.state, solution.model
        gradient = stored_gradient(ep, hyper, model, last[0].sites)
        evaluation = solution.result.evaluation
        log_prior, slopes = hyper.log_density(vector)
        figures = evaluation.record["log_evidence"], log_prior, gradient + slopes
        return Node(vector, *figures, evaluation.residual, model)

    return evaluate
