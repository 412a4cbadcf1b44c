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

Sweeps start at the mode of the marginal posterior, local effects integrated out: what the parts say
there are the site messages of Laplace propagation.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..._engine import gaussian
from ..._engine.loop import SILENT, Anderson, Evaluation, Trace, iterate, reason_to_end
from ..._engine.sites import part_way


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


def proper_share(prior, start, change, with_cavities=True):
    """Return the largest of 1, 0.7, 0.49, ... such that site precisions start + share change do.

    They leave the whole, and every cavity, proper; start and change are (K, P, P). A share small
    enough exists where the start is proper, as sites that say nothing are.
    """
    share = 1.0
    while not is_proper(prior, start + share * change, with_cavities):
        share *= 0.7
    return share


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


_MARGIN = 0.9  # share of the way to the border of the proper set that a step may go


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
        change = unpack(proposal - x).precision
        step = proper_share(self.prior, unpack(x).precision, change / _MARGIN)
        self.n_cut += step < 1.0
        self.n_short = self.n_short + 1 if step < 0.1 else 0
        return proposal if step == 1.0 else x + step * (proposal - x)

    def end(self, record, payload):
        """Pass it on, and ask to stop after three short steps in a row."""
        return self.monitor.end(record, payload) or self.n_short >= 3


def propagate(
    tilted, prior, start, max_iter, tol, damping=1.0, stream=None, accelerate=True, monitor=SILENT
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
    limits: Any = dict(max_iter=max_iter, tol=tol, damping=damping, give_up_after=max_iter)
    acceleration = Anderson(2, damping) if accelerate and stream is None else None
    steps: Any = dict(acceleration=acceleration, repair=sweeps.repair, monitor=sweeps)
    result = iterate(sweeps.evaluate, pack(start), **limits, **steps)
    if result.reason == "asked" and not trace.asked:  # at the border of the proper set
        result = replace(result, reason="max_iter" if trace.n_iter == max_iter else "stuck")
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
    change = step / _MARGIN * (target.precision - messages.precision)
    step = step * proper_share(prior, messages.precision, change)
    return part_way(messages, target, step)


class Ascent(NamedTuple):
    """A point of the climb, and the Newton step from it.

    value is the objective, terms what the partitions say, step the next Newton step, gain the
    slope along it, length its length in posterior sd.
    """

    phi: np.ndarray
    terms: list[Any]
    value: float
    step: np.ndarray
    gain: float
    length: float


def _ascent(evaluate, prior, phi, d):
    """Return the `Ascent` at phi: a Newton step made uphill by flipping negative curvatures.

    Curvatures are compared in coordinates scaled by their diagonal, so that units of columns do not
    matter. The whole step is shortened where a log scale would move by more than one.
    """
    terms = evaluate(phi)
    value = sum(t.value for t in terms) - 0.5 * phi @ prior.precision @ phi + prior.shift @ phi
    hessian = prior.precision - sum(t.hessian for t in terms)
    gradient = prior.shift - prior.precision @ phi + sum(t.gradient for t in terms)
    scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(hessian)), 1e-300))
    values, vectors = np.linalg.eigh(hessian * scale * scale[:, None])
    turned = vectors.T @ (scale * gradient)
    step = turned / np.maximum(np.abs(values), 1e-8)
    length = float(np.sqrt(step @ turned))
    step = scale * (vectors @ step)
    step /= max(1.0, np.max(np.abs(step[d:]), initial=0.0))
    return Ascent(phi, terms, float(value), step, step @ gradient, length)


def find_mode(evaluate, prior, phi, d, *, tol, max_iter, damping=1.0, monitor=SILENT):
    """Climb to the mode of the marginal posterior by Newton steps with a line search.

    evaluate maps phi, whose first d entries are coefficients and the rest coordinates of the group
    scales, to a list of `SiteTerms`. It stops once the Newton step is shorter than tol posterior
    sd; damping is the first trial of the line search. The monitor is told of each iteration, with
    the `Ascent` at the point it led to. Returns the last one, and the `Trace`, the `Reason` and the
    log evidence.
    """
    trace, reason, evidence = Trace(monitor), None, 0.0
    here = _ascent(evaluate, prior, phi, d)
    while reason is None:
        trace.begin()
        settled, stuck = here.length < tol, False
        if not settled:
            there = _climbed(evaluate, prior, here, damping, d)
            stuck = there is None
            here = here if there is None else there
        evidence = _laplace_evidence(here.value, here.terms, prior)
        trace.end({"residual": here.length, "log_evidence": evidence}, here)
        reason = reason_to_end(trace, here.length < tol, settled, stuck, max_iter)
    return here, trace, reason, evidence


def _climbed(evaluate, prior, here, damping, d):
    """Return where a line search along the Newton step leads, or None if nothing is gained.

    A point without a value is infinitely low. Within a posterior sd of the mode errors of
    quadrature hide what a step gains: one is taken as well after which the next is at most half
    as long. Where no step is, quadrature and derivatives disagree: nothing is left to gain.
    """
    share = damping
    for _ in range(12):
        try:
            there = _ascent(evaluate, prior, here.phi + share * here.step, d)
            gains = there.value >= here.value + 1e-4 * share * here.gain - 1e-9 * abs(here.value)
            if gains or there.length <= 0.5 * here.length < 0.5:
                return there
        except (FloatingPointError, np.linalg.LinAlgError):
            pass
        share *= 0.4
    return None


def _site_precisions(terms):
    return np.stack([-0.5 * (t.hessian + t.hessian.T) for t in terms])


def _laplace_evidence(value, terms, prior):
    """Return log of the Laplace integral of the posterior; the prior is normalised here.

    Before the mode is reached the posterior may bend the wrong way; the Gaussian is then that of
    `laplace_messages`.
    """
    precision = _site_precisions(terms)
    share = proper_share(prior, 0.0 * precision, precision, with_cavities=False)
    lower = gaussian.checked_cholesky(prior.precision + share * precision.sum(0))
    return float(value - np.sum(np.log(np.diagonal(lower))) - gaussian.log_partition(prior))


def laplace_messages(mode, prior, *, with_cavities=True):
    """Return the messages of the sites at an `Ascent`, that at the mode or one on the way.

    Their product with the prior is the Laplace approximation. Where that is improper, or leaves a
    cavity improper and `with_cavities` asks for those, all messages are weakened by the same share,
    which keeps the mode.
    """
    precision = _site_precisions(mode.terms)
    shift = np.stack([t.gradient for t in mode.terms]) + precision @ mode.phi
    share = proper_share(prior, 0.0 * precision, precision, with_cavities)
    return gaussian.Natural(share * precision, share * shift)
