"""Expectation propagation between partitions: Gaussian messages about the shared parameters.

Each partition k holds a site N(phi; site_k) in natural parameters. A sweep gives every partition
its cavity, receives the moments of its tilted distribution, and steps to the messages that would
reproduce them. Site precisions need not be positive definite and are never forced to be; only the
cavities and the whole have to be proper, and the step is bounded by exactly that.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import eigh

from .gaussian import (
    ImproperPosterior,
    Natural,
    checked_cholesky,
    inverse_from_cholesky,
    log_partition,
    moments,
    natural,
    over,
)
from .loop import Evaluation, iterate

__all__ = ["Messages", "SweepPayload", "pack", "propagate", "step_limit", "unpack"]


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
    """Outcome of `propagate`: the result of the loop and the number of steps that were cut."""

    result: Any
    n_cut: int


def pack(messages):
    """Return messages as one array (K, P, P + 1), the state of the loop."""
    return np.concatenate([messages.precision, messages.shift[..., None]], axis=2)


def unpack(x):
    """Return the messages of a state."""
    return Messages(x[..., :-1], x[..., -1])


def total_of(prior, messages):
    """Return the product of prior and messages."""
    return Natural(prior.precision + messages.precision.sum(0), prior.shift + messages.shift.sum(0))


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
    """Return the undamped change of the global posterior in its sd, to first order.

    First order, because the undamped step may leave the proper set while the damped one does not.
    """
    lower = checked_cholesky(total.precision)
    cov = inverse_from_cholesky(lower)
    mean = cov @ total.shift
    sd = np.sqrt(np.diagonal(cov))
    shifted = cov @ (change.shift.sum(0) - change.precision.sum(0) @ mean)
    spread = 0.5 * np.einsum("ij,jk,ki->i", cov, change.precision.sum(0), cov) / sd**2
    return float(max(np.max(np.abs(shifted) / sd), np.max(np.abs(spread))))


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
    one: Callable[[int, Natural], Any] | None = None,
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
    one : callable or None, default=None
        `one(k, cavity)` gives the tilted site of partition k alone. If given, partitions are
        updated one after the other, each seeing what the ones before it said.

    Returns
    -------
    Propagation
    """
    n_cut = 0

    def evaluate(x):
        messages = unpack(x)
        total = total_of(prior, messages)
        checked_cholesky(total.precision)
        if one is None:
            cavities = [over(total, Natural(*s)) for s in zip(*messages, strict=True)]
            sites = tilted(cavities)
            updates = [_new_message(c, s) for c, s in zip(cavities, sites, strict=True)]
        else:
            sites, updates = _in_turn(one, total, messages, damping)
        target, skipped = x.copy(), 0
        for k, update in enumerate(updates):
            if update is None:
                skipped += 1
            else:
                target[k, :, :-1], target[k, :, -1] = update
        change = unpack(target - x)
        evidence = log_evidence(prior, total, messages, [s.log_z for s in sites])
        residual = _residual(total, change)
        return Evaluation(
            target,
            max(residual, 1.0) if skipped else residual,  # no answer is no agreement
            record={"log_evidence": evidence, "n_skipped": float(skipped)},
            payload=SweepPayload(messages, total, sites, skipped),
        )

    def repair(proposal, x, target):
        nonlocal n_cut
        messages, change = unpack(x), unpack(proposal - x)
        total = total_of(prior, messages)
        if _stays_proper(total, messages, change.precision, 1.0 / 0.9):
            return proposal
        n_cut += 1
        return x + min(1.0, 0.9 * step_limit(total, messages, change.precision)) * (proposal - x)

    result = iterate(
        evaluate,
        pack(start),
        max_iter=max_iter,
        tol=tol,
        damping=damping,
        repair=repair,
        monitor=monitor,
    )
    return Propagation(result, n_cut)


def _in_turn(one, total, messages, damping):
    """Update the sites one after the other; return tilted sites and the messages reached.

    A step is bounded like that of a sweep: no cavity may become improper on the way.
    """
    precision, shift = messages.precision.copy(), messages.shift.copy()
    sites, updates = [], []
    for k in range(len(precision)):
        cavity = over(total, Natural(precision[k], shift[k]))
        site = one(k, cavity)
        update = _new_message(cavity, site)
        sites.append(site)
        updates.append(update)
        if update is None:
            continue
        change = np.zeros_like(precision)
        change[k] = update[0] - precision[k]
        now = Messages(precision, shift)
        step = damping
        if not _stays_proper(total, now, change, step / 0.9):
            step = min(step, 0.9 * step_limit(total, now, change))
        new = (precision[k] + step * change[k], shift[k] + step * (update[1] - shift[k]))
        total = Natural(total.precision + new[0] - precision[k], total.shift + new[1] - shift[k])
        precision[k], shift[k] = new
    return sites, updates


def posterior_moments(prior, messages):
    """Return mean and covariance of the product of prior and messages."""
    return moments(total_of(prior, messages))
