"""Expectation propagation between partitions: Gaussian messages about the shared parameters.

Each partition k holds a site N(phi; site_k) in natural parameters: messages are a `Natural` of
precisions (K, P, P) and shifts (K, P). A sweep gives every partition
its cavity, receives the moments of its tilted distribution, and steps to the messages that would
reproduce them. Site precisions need not be positive definite and are never forced to be; only the
cavities and the whole have to be proper, and the step is bounded by exactly that.

A fixed point with proper cavities need not exist: two halves of few groups may each need an
indefinite message that the prior cannot make up for. The steps then shrink towards the border of
the proper set, no damping or order of updates helps, and the scales have to be found from all parts
together.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.linalg import eigh

from ..._engine import gaussian
from ..._engine.loop import SILENT, Anderson, Evaluation, Trace, iterate


def pack(messages):
    """Return messages as one array (..., P, P + 1), the state of the loop."""
    return np.concatenate([messages.precision, messages.shift[..., None]], axis=-1)


def unpack(x):
    """Return the messages of a state."""
    return gaussian.Natural(x[..., :-1], x[..., -1])


def total_of(prior, messages):
    """Return the product of prior and messages."""
    return gaussian.Natural(
        prior.precision + messages.precision.sum(0), prior.shift + messages.shift.sum(0)
    )


def is_proper(prior, precision, with_cavities=True):
    """Say whether site precisions (K, P, P) leave the whole, and every cavity, proper."""
    total = prior.precision + precision.sum(0)
    try:
        gaussian.checked_cholesky(total)
        for site in precision if with_cavities else ():
            gaussian.checked_cholesky(total - site)
    except gaussian.ImproperPosterior:
        return False
    return True


def step_limit(total, messages, change):
    """Return the step along `change` at which a cavity or the whole stops being proper.

    total is the product of prior and messages, change (K, P, P) that of the precisions. Infinite
    where no step leaves the proper set. Exact: -1 over the smallest generalised eigenvalue of what
    each cavity is changed by. O(K P^3).
    """
    whole, limit = change.sum(0), np.inf
    own = zip(change, messages.precision, strict=True)
    cavities = [(whole - delta, total.precision - site) for delta, site in own]
    for by, of in [(whole, total.precision), *cavities]:
        lowest = eigh(by, of, eigvals_only=True, subset_by_index=[0, 0])[0]
        if lowest < 0:
            limit = min(limit, -1.0 / lowest)
    return limit


def _residual(total, change):
    """Return the undamped change of the global posterior in its sd, to first order, and the sd.

    First order, because the undamped step may leave the proper set while the damped one does not.
    """
    lower = gaussian.checked_cholesky(total.precision)
    cov = gaussian.inverse_from_cholesky(lower)
    mean = cov @ total.shift
    sd = np.sqrt(np.diagonal(cov))
    shifted = cov @ (change.shift.sum(0) - change.precision.sum(0) @ mean)
    spread = 0.5 * np.einsum("ij,jk,ki->i", cov, change.precision.sum(0), cov) / sd**2
    return float(max(np.max(np.abs(shifted) / sd), np.max(np.abs(spread)))), sd


def cavities_of(total, messages):
    """Return what is left of the product of prior and messages without each of the latter."""
    return [gaussian.over(total, gaussian.Natural(*site)) for site in zip(*messages, strict=True)]


def log_evidence(prior, total, messages, log_z):
    """Return the EP approximation of log p(y) for tilted normalisers log Z of the sites (K,)."""
    whole = gaussian.log_partition(total)
    terms = map(gaussian.log_partition, cavities_of(total, messages))
    return float(whole - gaussian.log_partition(prior) + sum(log_z) + sum(t - whole for t in terms))


def _new_message(cavity, site):
    """Return the message that reproduces the tilted moments, or None where they are no Gaussian."""
    if not (np.all(np.isfinite(site.moments.cov)) and np.isfinite(site.log_z)):
        return None
    try:
        matched = gaussian.natural(site.moments)
    except gaussian.ImproperPosterior:
        return None
    precision, shift = gaussian.over(matched, cavity)
    # an asymmetry of rounding grows fortyfold a sweep: one triangle is read, both are subtracted
    return 0.5 * (precision + precision.T), shift


class Sweeps:
    """The iteration of `propagate`; counts what it skipped, cut, and cut short in a row.

    Of its monitor it is one itself, which asks to stop at the border of the proper set.
    """

    def __init__(self, tilted, prior, stream, damping, monitor):
        self.begin, self.monitor = monitor.begin, monitor
        self.tilted, self.prior, self.stream, self.damping = tilted, prior, stream, damping
        self.n_skipped = self.n_cut = self.n_short = 0

    def evaluate(self, x):
        """Return the `Evaluation` of a sweep from messages."""
        messages, prior = unpack(x), self.prior
        total = total_of(prior, messages)
        gaussian.checked_cholesky(total.precision)
        if self.stream is None:
            cavities = cavities_of(total, messages)
            sites = self.tilted(cavities)
            updates = [_new_message(c, s) for c, s in zip(cavities, sites, strict=True)]
        else:
            sites, updates = _as_they_come(self.stream, prior, messages, self.damping)
        target = x.copy()
        for k, update in enumerate(updates):
            if update is not None:
                target[k, :, :-1], target[k, :, -1] = update
        skipped = sum(update is None for update in updates)
        self.n_skipped += skipped
        evidence = log_evidence(prior, total, messages, [s.log_z for s in sites])
        residual, sd = _residual(total, unpack(target - x))
        return Evaluation(
            target,
            max(residual, 1.0) if skipped else residual,  # no answer is no agreement
            metric=np.column_stack([np.outer(sd, sd), sd]),  # entries of any units, made alike
            record={"log_evidence": evidence, "n_skipped": float(skipped)},
            payload=messages,
        )

    def repair(self, proposal, x, target):
        """Return the proposal, or where the way to it has to end for the cavities to be proper."""
        messages, change = unpack(x), unpack(proposal - x)
        if is_proper(self.prior, messages.precision + change.precision / 0.9):
            self.n_short = 0
            return proposal
        self.n_cut += 1
        limit = step_limit(total_of(self.prior, messages), messages, change.precision)
        step = min(1.0, 0.9 * limit)
        self.n_short = self.n_short + 1 if step < 0.1 else 0
        return x + step * (proposal - x)

    def end(self, record, payload):
        """Pass it on, and ask to stop after three short steps in a row."""
        return self.monitor.end(record, payload) or self.n_short >= 3


def propagate(
    tilted,
    prior,
    start,
    *,
    max_iter,
    tol,
    damping=1.0,
    stream=None,
    accelerate=True,
    monitor=SILENT,
):
    """Find the fixed point of the site messages.

    tilted maps the list of cavities to the tilted sites, objects with `log_z` and `moments`; start
    must leave the whole and all cavities proper; max_iter, tol, damping and monitor are as in
    `iterate`, and the residual is the change of posterior means and log sds by an undamped sweep,
    in posterior sd.

    `stream(cavity_of)` yields (k, cavity, tilted site) for every partition, where the cavity is
    what `cavity_of(k)` said when the work on k began. If given, each answer is used as it comes,
    and partitions begun later see it.

    Returns the `Result`, with messages for payload and the history of all sweeps, and how many
    messages were left as they were and steps cut.
    """
    trace = Trace(monitor)
    sweeps = Sweeps(tilted, prior, stream, damping, trace)
    result = iterate(
        sweeps.evaluate,
        pack(start),
        max_iter=max_iter,
        tol=tol,
        damping=damping,
        acceleration=Anderson(2, damping) if accelerate and stream is None else None,
        give_up_after=max_iter,
        repair=sweeps.repair,
        monitor=sweeps,
    )
    spent = trace.n_iter == max_iter
    at_border = result.reason == "asked" and not trace.asked
    if at_border:
        result = replace(result, reason="max_iter" if spent else "stuck")
    return result, (sweeps.n_skipped, sweeps.n_cut)


def _as_they_come(stream, prior, messages, damping):
    """Use each answer as it comes; return tilted sites and undamped messages, in part order.

    A step is bounded like that of a sweep: no cavity may become improper on the way. Work under way
    on a part has its own cavity, so its message does not depend on what arrived in between.
    """
    now = messages

    def cavity_of(k):
        return gaussian.over(total_of(prior, now), gaussian.Natural(now.precision[k], now.shift[k]))

    answers: dict[int, Any] = {}
    for k, cavity, site in stream(cavity_of):
        update = _new_message(cavity, site)
        answers[k] = site, update
        if update is not None:
            now = _after_one(prior, now, k, update, damping)
    order = range(len(messages.shift))
    return [answers[k][0] for k in order], [answers[k][1] for k in order]


def _after_one(prior, messages, k, update, step):
    """Return the messages after a step of site k towards its update, no longer than is proper."""
    target = gaussian.Natural(messages.precision.copy(), messages.shift.copy())
    target.precision[k], target.shift[k] = update
    change = target.precision - messages.precision
    if not is_proper(prior, messages.precision + step / 0.9 * change):
        step = min(step, 0.9 * step_limit(total_of(prior, messages), messages, change))
    pairs = zip(messages, target, strict=True)
    return gaussian.Natural(*(old + step * (new - old) for old, new in pairs))
