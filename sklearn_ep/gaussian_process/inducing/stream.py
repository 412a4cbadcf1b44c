"""Streams of rows through inducing points: each row is seen once."""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..._engine.loop import SILENT, worst_reason
from ..._engine.partition import Part, PartMap
from ..._engine.rows import minibatches, row_keys, taken_copies
from ..._estimator.checks import draw_seed
from ..._estimator.row_parts import CheckedRows
from .. import _base as base
from .._limits import LIMITS
from .ep import InducingEP, PassState
from .fit import PassRun, checked_optimizer, gp_fit, kernels_of_some_rows, labels_of
from .learning import STEP_RULES, Hyperparameters
from .rows import Units, choose_inducing_points, describe, first_points, standard_keys
from .values import InducingPrior, grown, rebase


class StreamSteps(NamedTuple):
    """How often kernel parameters take a step.

    One for so many rows of a stream, each a pass over the block of about so many rows that it
    belongs to, whose length bounds the passes over a row, whatever the length of a batch. Once the
    stream has seen some thousands, its kernel hardly moves any more, and steps become rarer as the
    rows behind them grow: at 30,000 rows a log loss of .446 either way. Copies of one row stay in
    one block, however many: so many passes over it are enough.
    """

    rows: int = 10
    few_seen: int = 1000
    # of a kernel that an average over the first rows has told: nine streams take .66 of the time
    # that they take with 1000, and their log loss is .005 lower in the mean (.016 lower on 20
    # columns, .009 higher on spambase); one that starts untold needs its steps (.41, .48 with 30)
    few_told: int = 100
    block: int = 200
    least: int = 2
    most: int = 40

    def rows_a_step(self, seen):
        """Return the number of rows that have a step, after those that were seen."""
        return self.rows * max(1.0, seen / self.few_seen)

    def of_block(self, own, seen):
        """Return the number of steps for a block of so many copies after those that were seen."""
        return int(np.clip(np.ceil(own / self.rows_a_step(seen)), self.least, self.most))

    def block_after(self, seen):
        """Return the rows of a block after those that were seen."""
        return max(self.block, self.least * self.rows_a_step(seen))


STEPS = StreamSteps()


@dataclass
class StreamPosterior:
    """Posterior after the rows so far, kept between calls.

    gram (P, q, q) and shift (P, q) are the sums of all sites under the prior, `log_terms` is that
    of the terms of the rows in the log evidence, each as of the time it was seen, and `weight` the
    rows seen, of these `classes`. `rule` is the step rule of the kernel parameters with its memory,
    or None, `steps` how often it is asked. `first` are the rows so far while there are too few to
    learn a length for each column from them.
    """

    prior: InducingPrior
    gram: np.ndarray
    shift: np.ndarray
    log_terms: float
    weight: float
    seed: int
    rule: Any = None
    first: Part | None = None
    steps: StreamSteps = STEPS
    classes: frozenset[int] = frozenset()


@dataclass
class StreamPlan:
    """What the estimator decides for a stream; `n_inducing` is 0 where points are fixed."""

    labels: Any
    step_rule: Any
    batch_size: int | None
    n_inducing: int
    jitter: float
    sweeps: dict[str, Any]


def check_stream(estimator):
    """Raise a ValueError where parameters do not go with a stream."""
    if estimator._needs_all_rows:
        raise ValueError(
            "partial_fit goes through inducing points, which need rows of numbers and an optimizer "
            "that takes steps: give a kernel of vectors, and optimizer='auto' or None."
        )


def plan_stream(estimator, joint):
    """Return the `StreamPlan` of the next call, of all classes jointly or of binary problems."""
    labels, sweeps = labels_of(estimator, joint), base.sweeps_of(estimator)
    optimizer = checked_optimizer(estimator, labels.factor)
    of_steps = STEP_RULES.get(optimizer, STEP_RULES["adam"])
    return StreamPlan(
        labels=labels,
        step_rule=optimizer and of_steps(estimator.learning_rate),
        batch_size=estimator.batch_size,
        n_inducing=base.inducing_count(estimator) if estimator.inducing_points is None else 0,
        jitter=estimator.jitter,
        sweeps=sweeps | dict(max_iter=min(sweeps["max_iter"], estimator.max_iter)),
    )


def new_stream(estimator, rows, labels, known=None):
    """Return the stream before any of its first `rows`, with kernel and inducing points from them.

    `known` is the kernel of some of them, None where it is not known.
    """
    X, _, weight = rows.arrays
    total_variance = float(np.sum(base.column_spread(X, weight) ** 2))
    kernel = known or base.initial_kernel(estimator, total_variance)
    seed = draw_seed(estimator.random_state)
    Z = first_points(estimator, X, weight, seed, kernel, told=False)
    base.check_kernel(kernel, kernel(Z, Z))
    P, q = labels.n_posteriors, labels.n_latents * len(Z)
    prior = InducingPrior(kernel, Z, estimator.jitter)
    empty = np.zeros((P, q, q)), np.zeros((P, q))
    steps = STEPS if known is None else STEPS._replace(few_seen=STEPS.few_told)
    return StreamPosterior(prior, *empty, 0.0, 0.0, seed, steps=steps)


def fit_stream(estimator, plan, X, y, forgetting):
    """Return the `GPFit` after new rows with class indices, the older ones counted as a share.

    After a dense fit its rows are taken in again, and so are those of a young stream once they
    suffice to learn a length for each column.
    """
    last = getattr(estimator, "_fitted", None)
    before = None if last is None else last.runs[0]
    rows = Part(X, y, estimator._class_weighted(y, np.ones(len(X))))
    stream = _stream_before(estimator, before)
    so_far = _rows_so_far(estimator, before, rows, forgetting)
    known = _kernel_of(estimator, so_far)
    if stream is None or known is not None:
        stream, last, rows = new_stream(estimator, so_far, plan.labels, known), None, so_far
    young = known is None and _waits(estimator, so_far)
    # sites of older rows are taken to a power, and the prior of the process stays: what is
    # forgotten goes back to it. A share of one changes no bit
    names = "gram", "shift", "log_terms", "weight"
    older = {name: forgetting * getattr(stream, name) for name in names}
    stream = replace(stream, first=so_far if young else None, **older)
    run, sites, loo_proba = absorb(stream, rows, plan)
    if estimator.site_memory == "average":
        return gp_fit(run)
    if last is not None and last.sites is not None:
        seen = np.stack([estimator.site_precision_, estimator.site_shift_], axis=-2)
        seen = forgetting * seen.reshape(len(sites), 2, -1)
        sites = np.concatenate([seen, sites], axis=2)
        loo_proba = np.concatenate([estimator.loo_proba_, loo_proba])
    return gp_fit(run, sites, loo_proba)


def _stream_before(estimator, before):
    """Return the stream that new rows continue, None where there is none yet."""
    if not isinstance(before, PassRun):
        return None
    if before.stream is not None:
        return before.stream
    state: Any = before.state
    # that of an average is an integral, what the passes told last is of this state
    log_terms = before.history["log_evidence"][-1] - before.model.log_evidence
    sums = state.prior, state.gram, state.shift
    plan, classes = estimator._plan, frozenset(range(len(estimator.classes_)))
    return StreamPosterior(*sums, log_terms, plan.data.weight, plan.seed, classes=classes)


def _rows_so_far(estimator, before, rows, forgetting):
    """Return the `Part` of all rows with the new ones, None where older ones are no more known."""
    if before is None:
        return rows
    if isinstance(before, PassRun):
        older = before.stream and before.stream.first
    else:
        plan, fit = estimator._plan, estimator._fitted
        older = Part(fit.of_rows(plan.X.T).T, fit.of_rows(plan.y), fit.shared(plan.weight))
    if older is None:
        return None
    (X, y, weight), new = older.arrays, rows.arrays
    return Part(*map(np.concatenate, zip((X, y, forgetting * weight), new, strict=True)))


def _waits(estimator, rows):
    """Return whether rows so far, None for unknown, are too few and with more will be enough."""
    few = rows is not None and len(rows.arrays[1]) <= LIMITS.averaged
    return few and base.takes_some_rows(estimator, np.inf)


def _kernel_of(estimator, rows):
    """Return the kernel that `fit` begins with for so many rows.

    None for few or unknown rows, and for those of one class.
    """
    y = () if rows is None else rows.arrays[1]
    if rows is None or np.ptp(y) == 0 or not base.takes_some_rows(estimator, len(y)):
        return None
    with PartMap([CheckedRows(*rows.arrays)]) as run:
        known = kernels_of_some_rows(estimator, run, describe(run, True, 0, 0), SILENT, False)
    return known and known.kernel


def absorb(stream, rows, plan):
    """Take in a `Part` of rows with class indices and copies, batch by batch.

    Return the `PassRun`, and sites (C, 2, n) and leave-one-out probabilities (n,) of its own rows.
    """
    X, y, weight = rows.arrays
    batches = [np.arange(len(X))]
    if plan.batch_size is not None:
        keys = standard_keys(X, Units.of_rows(X, weight), stream.seed, y)
        batches = [np.sort(b) for b in minibatches(keys, weight, plan.batch_size)]
    sites, loo = np.empty((plan.labels.n_sites, 2, len(X))), np.empty(len(X))
    results: list[Any] = []
    for own in batches:
        part = Part(X[own], y[own], weight[own])
        stream = _grown(stream, X[own], weight[own], plan)
        stream, model, result, sites[:, :, own], loo[own] = _absorb_batch(stream, part, plan)
        results.append(result)
    names = results[0].history
    history = {k: np.concatenate([r.history[k] for r in results]) for k in names}
    told = history, worst_reason([r.reason for r in results]), len(history["residual"])
    log_evidence = float(stream.log_terms + model.log_evidence)
    return PassRun(None, model, *told, log_evidence, stream=stream), sites, np.exp(loo)


def _absorb_batch(stream, part, plan):
    """Let a batch move the kernel, then run EP on all its rows with the stream as their prior."""
    X, y, weight = part.arrays
    with PartMap([part]) as run:
        ep = _batch_ep(run, len(X), stream, plan)
        state, rule = ep.zero(stream.prior), stream.rule
        classes = stream.classes.union(y.tolist())
        # the evidence of rows of one class is the highest where the function is infinite
        if plan.step_rule is not None and stream.prior.kernel.n_dims and len(classes) > 1:
            # a copy: the stream before this call has to stay whole in case the call fails later
            rule = deepcopy(rule or plan.step_rule)
            prior, sites = _learn_from_batch(stream, X, y, weight, rule, plan)
            ep.base = rebase(stream.gram, stream.shift, stream.prior, prior)
            state = ep.restate(prior, [sites])
        result, state, model = ep.solve(state, **plan.sweeps)
        place = np.unique(row_keys(X, stream.seed), return_inverse=True)[1]
        copies = taken_copies(place, y, weight)
        log_p = ep.leave_one_out(model, state.sites, [copies])
    value = result.evaluation.record["log_evidence"]
    sums = dict(prior=state.prior, gram=state.gram.copy(), shift=state.shift.copy())
    log_terms = stream.log_terms + value - model.log_evidence
    seen = stream.weight + float(weight.sum())
    told = dict(log_terms=log_terms, weight=seen, rule=rule, classes=classes)
    stream = replace(stream, **told, **sums)
    return stream, model, result, state.sites[0], log_p


def _batch_ep(run, n_rows, stream, plan):
    """Return EP over the rows of an open map, with the sums of the stream beside theirs."""
    return InducingEP(run, [n_rows], None, plan.labels, base=(stream.gram, stream.shift))


def _learn_from_batch(stream, X, y, weight, rule, plan):
    """Move the kernel along a batch; return the prior and the sites (C, 2, n) of its rows so far.

    The rows come block by block, each with the blocks before it as part of the stream, so that the
    passes over a row do not grow with the batch and what is learned does not hang on how a stream
    is cut.
    """
    sites = np.empty((plan.labels.n_sites, 2, len(X)))
    keys = standard_keys(X, Units.of_rows(X, weight), stream.seed, y)
    for rows in minibatches(keys, weight, stream.steps.block_after(stream.weight)):
        rows = np.sort(rows)
        own = float(weight[rows].sum())
        with PartMap([Part(X[rows], y[rows], weight[rows])]) as run:
            ep = _batch_ep(run, len(rows), stream, plan)
            state = _moved_kernel(ep, stream, own, rule, plan)
        sites[:, :, rows] = state.sites[0]
        sums = dict(prior=state.prior, gram=state.gram, shift=state.shift)
        stream = replace(stream, weight=stream.weight + own, **sums)
    return stream.prior, sites


def _moved_kernel(ep, stream, own, rule, plan):
    """Alternate passes over a block with steps of the kernel; return the state they end in.

    The gradient takes the block, of `own` copies, for all so far with those of the stream.
    """
    state, seen = ep.zero(stream.prior), stream.weight
    kernel, Z = state.prior.kernel, state.prior.Z
    hyper = Hyperparameters(kernel, Z, np.ones(Z.shape[1]), plan.jitter, True, False, True)
    vector, scale = hyper.start, (seen + own) / own
    for k in range(stream.steps.of_block(own, seen)):
        model = ep.model(state)
        share = plan.sweeps["damping"] if k else 1.0
        sums, each, _ = ep.one_pass(model, state.sites, step=share, gradient="fresh")
        gradient = hyper.gradient(model, sums.scaled(scale), fresh=True)
        vector = hyper.clip(vector + rule.step(gradient))
        prior = hyper.prior(vector)
        ep.base = rebase(ep.base[0], ep.base[1], state.prior, prior)
        gram, shift = rebase(sums.gram, sums.shift, state.prior, prior)
        state = PassState(prior, gram, shift, [r.sites for r in each])
    return state


def _grown(stream, X, weight, plan):
    """Add inducing points out of new rows while there are fewer than wanted.

    Sites of older rows do not depend on the added points, so the sums are padded with zeros.
    """
    old, m = stream.prior, len(stream.prior.Z)
    if m >= plan.n_inducing:
        return stream
    keys, known = row_keys(X, stream.seed), row_keys(old.Z, stream.seed)
    fresh = ~np.isin(keys, known)
    if not np.any(fresh):
        return stream
    wanted = plan.n_inducing - m
    added = choose_inducing_points(X[fresh], weight[fresh], wanted, stream.seed, old.kernel)
    prior = InducingPrior(old.kernel, np.vstack([old.Z, added]), plan.jitter)
    gram, shift = grown(stream.gram, stream.shift, old, prior)
    return replace(stream, prior=prior, gram=gram, shift=shift)
