"""Streams of rows into a sparse Gaussian process: each row is seen once."""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .._engine.partition import Part, PartMap
from .._engine.row_order import minibatches, row_keys
from ._rows import choose_inducing_points
from .inducing.ep import SparseEP, SparseState
from .inducing.learning import Hyperparameters
from .inducing.values import InducingPrior, rebase

__all__ = ["StreamSettings", "absorb", "start_stream", "stream_of_fit"]

# Kernel parameters take one step for so many rows of a stream.
_ROWS_A_STEP = 10


@dataclass
class StreamPosterior:
    """Posterior after the rows so far, kept between calls.

    Attributes
    ----------
    prior : InducingPrior
    gram, shift : ndarray of shape (C, m, m), (C, m)
        Sums of all sites under the prior.
    log_terms : float
        Sum of the terms of the rows in the log evidence, each as of the time it was seen.
    weight : float
        Rows seen.
    seed : int
    rule : object or None
        Step rule of the kernel parameters with its memory.
    """

    prior: InducingPrior
    gram: np.ndarray
    shift: np.ndarray
    log_terms: float
    weight: float
    seed: int
    rule: Any = None


@dataclass
class StreamSettings:
    """Parameters of the estimator that a stream obeys; `n_inducing` is 0 where points are fixed."""

    factor: Any
    rule: Any
    step_rule: Any
    learning_rate: float
    batch_size: int | None
    n_inducing: int
    jitter: float
    averaged: bool
    solver: dict[str, Any]


class StreamOutcome(NamedTuple):
    """What one call adds: the stream, its model, history, and the sites (C, 2, n) of its rows."""

    stream: StreamPosterior
    model: Any
    history: dict[str, np.ndarray]
    converged: bool
    log_evidence: float
    sites: np.ndarray
    loo: np.ndarray


def start_stream(kernel, Z, jitter, n_problems, seed):
    """Return the stream before any row."""
    prior, m = InducingPrior(kernel, Z, jitter), len(Z)
    gram, shift = np.zeros((n_problems, m, m)), np.zeros((n_problems, m))
    return StreamPosterior(prior, gram, shift, 0.0, 0.0, seed)


def stream_of_fit(problem, fit):
    """Return the stream that continues a fit."""
    state = fit.state
    log_terms = fit.log_evidence - sum(p.log_evidence for p in state.posteriors())
    return StreamPosterior(
        state.prior, state.gram, state.shift, log_terms, problem.data.weight, problem.seed
    )


def absorb(stream, X, y, settings):
    """Take in rows with class indices, batch by batch; return the `StreamOutcome`."""
    ones = np.ones(len(X))
    batches = [np.arange(len(X))]
    if settings.batch_size is not None:
        keys = row_keys(X, stream.seed, y)
        batches = [np.sort(b) for b in minibatches(keys, ones, settings.batch_size)]
    sites, loo = np.empty((len(stream.gram), 2, len(X))), np.empty(len(X))
    histories, converged = [], True
    for rows in batches:
        stream = _grown(stream, X[rows], settings)
        stream, model, result, own, log_p = _absorb_batch(stream, X[rows], y[rows], settings)
        sites[:, :, rows], loo[rows] = own, log_p
        histories.append(result.history)
        converged = converged and result.converged
    log_evidence = stream.log_terms + sum(p.log_evidence for p in model.posteriors)
    history = {k: np.concatenate([h[k] for h in histories]) for k in histories[0]}
    return StreamOutcome(stream, model, history, converged, float(log_evidence), sites, loo)


def _absorb_batch(stream, X, y, settings):
    """Let a batch move the kernel, then run EP on its rows with the stream as their prior."""
    weight = stream.weight + len(X)
    with PartMap([Part(X, y, np.ones(len(X)))]) as run:
        ep = SparseEP(
            run,
            [len(X)],
            None,
            len(stream.gram),
            settings.factor,
            settings.rule,
            base=(stream.gram, stream.shift),
        )
        state, rule = ep.zero(stream.prior), stream.rule
        if settings.step_rule is not None and stream.prior.kernel.n_dims:
            # a copy: the stream before this call has to stay whole in case the call fails later
            rule = deepcopy(rule or settings.step_rule(settings.learning_rate))
            state = _moved_kernel(ep, state, rule, weight / len(X), settings)
        solution = ep.solve(state, **settings.solver)
        state, model, result = solution.state, solution.model, solution.result
        _, log_p = ep.collect(state.prior, state.sites, model)
    value = result.evaluation.record["log_evidence"]
    stream = replace(
        stream,
        prior=state.prior,
        gram=state.gram.copy(),
        shift=state.shift.copy(),
        log_terms=stream.log_terms + value - model.log_evidence,
        weight=weight,
        rule=rule,
    )
    return stream, model, result, state.sites[0], log_p


def _moved_kernel(ep, state, rule, scale, settings):
    """Alternate passes over a batch with steps of the kernel; return the state they end in.

    The gradient takes the batch for all `scale` times as many rows so far. As many steps as if the
    rows had come a few at a time, so that what is learned does not hang on how a stream is cut.
    """
    kernel, Z = state.prior.kernel, state.prior.Z
    hyper = Hyperparameters(kernel, Z, np.ones(Z.shape[1]), settings.jitter, True, False, True)
    vector = hyper.start
    for k in range(-(-ep.sizes[0] // _ROWS_A_STEP)):
        model = ep.model(state)
        share = settings.solver["damping"] if k else 1.0
        sums, each, _ = ep.one_pass(model, state.sites, step=share, gradient="fresh")
        scaled = sums._replace(theta=scale * sums.theta, inner=scale * sums.inner)
        vector = hyper.clip(vector + rule.step(hyper.gradient(model, scaled, fresh=True)))
        prior = hyper.prior(vector)
        ep.base = rebase(ep.base[0], ep.base[1], state.prior, prior)
        gram, shift = rebase(sums.gram, sums.shift, state.prior, prior)
        state = SparseState(prior, gram, shift, [r.sites for r in each])
    return state


def _grown(stream, X, settings):
    """Add inducing points out of new rows while there are fewer than wanted.

    Sites of older rows do not depend on the added points, so the sums are padded with zeros.
    """
    old, m = stream.prior, len(stream.prior.Z)
    if m >= settings.n_inducing:
        return stream
    keys, known = row_keys(X, stream.seed), row_keys(old.Z, stream.seed)
    fresh = X[~np.isin(keys, known)]
    if len(fresh) == 0:
        return stream
    count = settings.n_inducing - m
    added = choose_inducing_points(fresh, np.ones(len(fresh)), count, stream.seed)
    prior = InducingPrior(old.kernel, np.vstack([old.Z, added]), settings.jitter)
    T = old.inverse @ prior.lower[:m, :m]
    grow = (0, len(added))
    return replace(
        stream,
        prior=prior,
        gram=np.pad(T.T @ stream.gram @ T, ((0, 0), grow, grow)),
        shift=np.pad(stream.shift @ T, ((0, 0), grow)),
    )
