"""Expectation propagation between partitions: Gaussian messages about the shared parameters.

Each partition k holds a site N(phi; site_k) in natural parameters. A sweep gives every partition
its cavity, receives the moments of its tilted distribution, and steps to the messages that would
reproduce them. Site precisions need not be positive definite and are never forced to be; only the
cavities and the whole have to be proper, and the step is bounded by exactly that.

A fixed point with proper cavities need not exist: two halves of few groups may each need an
indefinite message that the prior cannot make up for. The steps then shrink towards the border of
the proper set, no damping or order of updates helps, and the parts have to be taken as one site,
whose cavity is the prior.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import eigh

from .._engine.gaussian import (
    ImproperPosterior,
    Natural,
    checked_cholesky,
    inverse_from_cholesky,
    log_partition,
    moments,
    natural,
    over,
)
from .._engine.loop import Anderson, Evaluation, iterate

__all__ = ["Messages", "SweepPayload", "pack", "propagate", "shared", "step_limit", "unpack"]

_SHORT = 0.1  # share of a step; shorter ones in so many sweeps running end at the border
_SHORT_STEPS = 3


class Messages(NamedTuple):
    """Site messages: precision (K, P, P) and shift (K, P)."""

    precision: np.ndarray
    shift: np.ndarray


class SweepPayload(NamedTuple):
    """State of a sweep: messages, their product with the prior, the tilted sites, skipped ones."""

    messages: Messages
    total: Natural
    tilted: list[Any]
    n_skipped: int


class Propagation(NamedTuple):
    """Outcome of `propagate`.

    `result` is that of the loop, `n_cut` the number of steps that were cut, and `as_one` tells that
    the parts had to be taken as one site.
    """

    result: Any
    n_cut: int
    as_one: bool


class _Watch:
    """Monitor that asks to stop at the border of the proper set; passes all on to another."""

    def __init__(self, monitor):
        self.monitor, self.n_short, self.asked = monitor, 0, False

    def begin(self):
        if self.monitor is not None:
            self.monitor.begin()

    def end(self, record, payload):
        if self.monitor is not None:
            self.asked = bool(self.monitor.end(record, payload))
        return self.asked or self.n_short >= _SHORT_STEPS


def pack(messages):
    """Return messages as one array (K, P, P + 1), the state of the loop."""
    return np.concatenate([messages.precision, messages.shift[..., None]], axis=2)


def unpack(x):
    """Return the messages of a state."""
    return Messages(x[..., :-1], x[..., -1])


def total_of(prior, messages):
    """Return the product of prior and messages."""
    return Natural(prior.precision + messages.precision.sum(0), prior.shift + messages.shift.sum(0))


def shared(total, prior, n_sites):
    """Return equal messages whose product with the prior is the total; their cavities are proper.

    Parameters
    ----------
    total, prior : Natural
    n_sites : int

    Returns
    -------
    Messages
    """
    precision, shift = over(total, prior)
    precision = 0.5 * (precision + precision.T)
    return Messages(
        *(np.repeat(part[None] / n_sites, n_sites, axis=0) for part in (precision, shift))
    )


def _stays_proper(total, messages, change, step):
    """Say whether the whole and all cavities are proper after a step along the change."""
    moved = total.precision + step * change.sum(0)
    try:
        checked_cholesky(moved)
        for site, delta in zip(messages.precision, change, strict=True):
            checked_cholesky(moved - site - step * delta)
    except ImproperPosterior:
        return False
    return True


def step_limit(total, messages, change):
    """Return the step along `change` at which a cavity or the whole stops being proper.

    Parameters
    ----------
    total : Natural
        Product of prior and messages.
    messages : Messages
    change : ndarray of shape (K, P, P)
        Proposed change of the precisions.

    Returns
    -------
    limit : float
        Infinite where no step leaves the proper set. Exact: -1 over the smallest generalised
        eigenvalue of what each cavity is changed by. O(K P^3).
    """
    whole, limit = change.sum(0), np.inf
    pairs = [(whole, total.precision)]
    pairs += [
        (whole - delta, total.precision - site)
        for delta, site in zip(change, messages.precision, strict=True)
    ]
    for by, of in pairs:
        lowest = eigh(by, of, eigvals_only=True, subset_by_index=[0, 0])[0]
        if lowest < 0:
            limit = min(limit, -1.0 / lowest)
    return limit


def _residual(total, change):
    """Return the undamped change of the global posterior in its sd, to first order, and the sd.

    First order, because the undamped step may leave the proper set while the damped one does not.
    """
    lower = checked_cholesky(total.precision)
    cov = inverse_from_cholesky(lower)
    mean = cov @ total.shift
    sd = np.sqrt(np.diagonal(cov))
    shifted = cov @ (change.shift.sum(0) - change.precision.sum(0) @ mean)
    spread = 0.5 * np.einsum("ij,jk,ki->i", cov, change.precision.sum(0), cov) / sd**2
    return float(max(np.max(np.abs(shifted) / sd), np.max(np.abs(spread)))), sd


def log_evidence(prior, total, messages, log_z):
    """Return the EP approximation of log p(y) for tilted normalisers log Z of the sites (K,)."""
    whole = log_partition(total)
    terms = [
        z + log_partition(over(total, Natural(*site))) - whole
        for z, site in zip(log_z, zip(*messages, strict=True), strict=True)
    ]
    return float(whole - log_partition(prior) + sum(terms))


def _new_message(cavity, site):
    """Return the message that reproduces the tilted moments, or None where they are no Gaussian."""
    if not (np.all(np.isfinite(site.moments.cov)) and np.isfinite(site.log_z)):
        return None
    try:
        matched = natural(site.moments)
    except ImproperPosterior:
        return None
    precision, shift = over(matched, cavity)
    # an asymmetry of rounding grows fortyfold a sweep: one triangle is read, both are subtracted
    return 0.5 * (precision + precision.T), shift


def propagate(
    tilted: Callable[[list[Natural]], list[Any]],
    prior: Natural,
    start: Messages,
    *,
    max_iter: int,
    tol: float,
    damping: float = 1.0,
    stream: Callable[[Callable[[int], Natural]], Iterable[Any]] | None = None,
    as_one: Callable[[Messages], Callable[[], Any]] | None = None,
    accelerate: bool = True,
    monitor: Any = None,
) -> Propagation:
    """Find the fixed point of the site messages.

    Parameters
    ----------
    tilted : callable
        Maps the list of cavities to the tilted sites: objects with `log_z` and `moments`.
    prior : Natural
    start : Messages
        Must leave the whole and all cavities proper.
    max_iter, tol, damping, monitor
        As in `iterate`; the residual is the change of posterior means and log sds by an undamped
        sweep, in posterior sd.
    stream : callable or None, default=None
        `stream(cavity_of)` yields (k, cavity, tilted site) for every partition, where the cavity is
        what `cavity_of(k)` said when the work on k began. If given, each answer is used as it
        comes, and partitions begun later see it.
    as_one : callable or None, default=None
        `as_one(messages)` returns a function without arguments that gives the tilted site of all
        partitions together under the prior. Used where the messages have no fixed point with
        proper cavities; they then are equal shares of what is found.

    Returns
    -------
    Propagation
    """
    n_cut, watch = 0, _Watch(monitor)

    def evaluate(x):
        messages = unpack(x)
        total = total_of(prior, messages)
        checked_cholesky(total.precision)
        if stream is None:
            cavities = [over(total, Natural(*s)) for s in zip(*messages, strict=True)]
            sites = tilted(cavities)
            updates = [_new_message(c, s) for c, s in zip(cavities, sites, strict=True)]
        else:
            sites, updates = _as_they_come(stream, total, messages, damping)
        target, skipped = x.copy(), 0
        for k, update in enumerate(updates):
            if update is None:
                skipped += 1
            else:
                target[k, :, :-1], target[k, :, -1] = update
        change = unpack(target - x)
        evidence = log_evidence(prior, total, messages, [s.log_z for s in sites])
        residual, sd = _residual(total, change)
        return Evaluation(
            target,
            max(residual, 1.0) if skipped else residual,  # no answer is no agreement
            metric=np.column_stack([np.outer(sd, sd), sd]),  # entries of any units, made alike
            record={"log_evidence": evidence, "n_skipped": float(skipped)},
            payload=SweepPayload(messages, total, sites, skipped),
        )

    def repair(proposal, x, target):
        nonlocal n_cut
        messages, change = unpack(x), unpack(proposal - x)
        total = total_of(prior, messages)
        if _stays_proper(total, messages, change.precision, 1.0 / 0.9):
            watch.n_short = 0
            return proposal
        n_cut += 1
        step = min(1.0, 0.9 * step_limit(total, messages, change.precision))
        watch.n_short = watch.n_short + 1 if step < _SHORT else 0
        return x + step * (proposal - x)

    result = iterate(
        evaluate,
        pack(start),
        max_iter=max_iter,
        tol=tol,
        damping=damping,
        acceleration=Anderson(2, damping) if accelerate and stream is None else None,
        give_up_after=max_iter,
        repair=repair,
        monitor=watch,
    )
    if as_one is None or result.converged or watch.asked or result.n_iter == max_iter:
        return Propagation(result, n_cut, False)
    left = max_iter - result.n_iter
    whole = _whole(as_one, prior, result.evaluation.payload.messages, left, tol, monitor)
    whole.history = {k: np.append(v, whole.history[k]) for k, v in result.history.items()}
    whole.n_iter += result.n_iter
    return Propagation(whole, n_cut, True)


def _whole(as_one, prior, messages, max_iter, tol, monitor):
    """Return the `Result` of the loop over a single site; its state is equal shares of that."""
    n_sites = len(messages.shift)
    start = shared(total_of(prior, messages), prior, n_sites)
    tilted = as_one(start)

    def evaluate(x):
        site, now = tilted(), unpack(x)
        total = total_of(prior, now)
        target = pack(shared(natural(site.moments), prior, n_sites))
        return Evaluation(
            target,
            _residual(total, unpack(target - x))[0],
            record={"log_evidence": site.log_z, "n_skipped": 0.0},
            payload=SweepPayload(now, total, [site], 0),
        )

    return iterate(evaluate, pack(start), max_iter=max_iter, tol=tol, monitor=monitor)


def _as_they_come(stream, total, messages, damping):
    """Use each answer as it comes; return tilted sites and undamped messages, in part order.

    A step is bounded like that of a sweep: no cavity may become improper on the way. Work under way
    on a part has its own cavity, so its message does not depend on what arrived in between.
    """
    now = total, Messages(messages.precision.copy(), messages.shift.copy())

    def cavity_of(k):
        whole, sites = now
        return over(whole, Natural(sites.precision[k], sites.shift[k]))

    answers: dict[int, Any] = {}
    for k, cavity, site in stream(cavity_of):
        update = _new_message(cavity, site)
        answers[k] = site, update
        if update is not None:
            now = _after_one(*now, k, update, damping)
    order = range(len(messages.shift))
    return [answers[k][0] for k in order], [answers[k][1] for k in order]


def _after_one(total, messages, k, update, damping):
    """Return the whole and the messages after a step of site k towards its update."""
    change = np.zeros_like(messages.precision)
    change[k] = update[0] - messages.precision[k]
    step = damping
    if not _stays_proper(total, messages, change, step / 0.9):
        step = min(step, 0.9 * step_limit(total, messages, change))
    shift_change = step * (update[1] - messages.shift[k])
    precision, shift = messages.precision.copy(), messages.shift.copy()
    precision[k] += step * change[k]
    shift[k] += shift_change
    whole = Natural(total.precision + step * change[k], total.shift + shift_change)
    return whole, Messages(precision, shift)


def posterior_moments(prior, messages):
    """Return mean and covariance of the product of prior and messages."""
    return moments(total_of(prior, messages))
