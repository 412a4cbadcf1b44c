"""How far to trust the sites of parts, and fits that merge parts until they can be trusted.

The tilted distribution of a part has the part's likelihood in place of its site. Where it differs
much from the global Gaussian, the site is no good stand-in, and so is what the other parts are told
(Gelman and others 2014, section 6.2). Section 4.1 begins with many parts, and has fewer where the
approximation is poor.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp
from sklearn.utils import Bunch

from ..._engine.diagnostics import importance_check
from ..._engine.gaussian import Moments
from .._parts import parts_in_memory, parts_of_members
from .draws import draws_of, marginal_log_likelihood, normalised
from .fit import fit_in_memory
from .part import arrow_rows, of_one_factor, rows_of

SITE_NAMES = "site_precision_", "site_shift_", "phi_mean_", "phi_cov_"


class TrustLimits(NamedTuple):
    """When the site of a part misleads, and what helps."""

    poor_kl: float = 0.1  # nats above which a site misleads
    poor_k: float = 0.7  # shape of the weights above which half as many do
    gain: float = 0.5  # share of its divergence that a merger may leave
    good_kl: float = 0.01  # nats below which a part may be two
    large: float = 2.0  # times the mean number of rows


_TRUST = TrustLimits()


class PartTrust(NamedTuple):
    """What is known of one part.

    `divergence` is the Kullback-Leibler divergence, in nats, of its tilted distribution of the
    shared parameters from the global approximation; `pareto_k` the shape of the largest importance
    weights between them, as in `Diagnosis`. `advice` is "merge" with the part `partner`, "no
    Gaussian" where that would not help, since the posterior itself is none, "split", or empty.
    """

    part: int
    n_rows: int
    n_groups: int
    divergence: float
    pareto_k: float
    advice: str = ""
    partner: int | None = None

    def __str__(self):
        text = (
            f"Part {self.part} ({self.n_rows} rows, {self.n_groups} groups): divergence "
            f"{self.divergence:.2g}, Pareto k {self.pareto_k:.2f}"
        )
        more = {
            "merge": f"; its site is a poor stand-in for it: merge it with part {self.partner}",
            "no Gaussian": "; no merger would help: the posterior itself is no Gaussian here",
            "split": "; large and well approximated: split it where that saves time",
        }
        return text + more.get(self.advice, "")


def trust_in_parts(est, rows, n_draws, rng):
    """Return the `PartTrust` of each part of a fit with sites of its own, none otherwise.

    rows are (design, local, code, sign, weight) of the training rows, all of named groups or of
    none.
    """
    design, designs, codes, sign, weight = rows
    arrays = design, sign, weight, *of_one_factor(len(sign), designs, codes.T)
    own = est.partition_[arrays[-1]] if len(designs) else est.partition_
    if len(own) != len(sign):
        return ()  # other rows than those of the fit
    members = (own == k for k in range(len(est.site_shift_)))
    parts = [arrow_rows(*(a[mine] for a in arrays)) for mine in members]
    return trust_of(parts, {name: getattr(est, name) for name in SITE_NAMES}, n_draws, rng)


def trust_of(parts, sites, n_draws, rng):
    """Return the `PartTrust` of parts, `ArrowRows`, by the attributes of a fit about their sites.

    None where the sites are equal shares of one answer. Draws of the global Gaussian serve all
    parts; O(200 S n) for S of them.
    """
    precision, shift, mean, cov = (sites[name] for name in SITE_NAMES)
    if len(precision) > 1 and not np.ptp(precision, axis=0).any():
        return ()
    n_rows = sum(len(part.sign) for part in parts)
    n_draws = min(n_draws, max(200, 4_000_000 // n_rows))
    phi, found = draws_of(Moments(mean, cov), n_draws, rng), []
    log_ratio = np.empty((len(parts), n_draws))
    for k, part in enumerate(parts):
        q = part.local.shape[1]
        log_site = phi @ shift[k] - 0.5 * np.einsum("sp,pr,sr->s", phi, precision[k], phi)
        log_ratio[k] = marginal_log_likelihood(part, phi, q) - log_site
        tail = importance_check(log_ratio[k])[1]
        sizes = len(part.sign), len(part.starts) if q else 0
        found.append(PartTrust(k, *sizes, divergence_of(log_ratio[k]), tail))
    return tuple(_advised(trust, log_ratio, n_rows / len(parts)) for trust in found)


def divergence_of(log_ratio):
    """Return the divergence of a density from another by log ratios (S,) at draws of the other."""
    log_mean = logsumexp(log_ratio) - np.log(len(log_ratio))
    return float(normalised(log_ratio)[0] @ log_ratio - log_mean)


def _advised(trust, log_ratio, mean_size):
    """Return the `PartTrust` with advice.

    What a merger would give is known beforehand: the ratios of two parts multiply.
    """
    k = trust.part
    tail_matters = trust.pareto_k > _TRUST.poor_k and trust.divergence > 0.5 * _TRUST.poor_kl
    if trust.divergence <= _TRUST.poor_kl and not tail_matters:
        large = trust.n_rows > _TRUST.large * mean_size and trust.divergence < _TRUST.good_kl
        return trust._replace(advice="split" if large else "")
    others = [j for j in range(len(log_ratio)) if j != k]
    merged = [divergence_of(log_ratio[k] + log_ratio[j]) for j in others]
    if not others or min(merged) > _TRUST.gain * trust.divergence:
        return trust._replace(advice="no Gaussian")
    return trust._replace(advice="merge", partner=others[int(np.argmin(merged))])


# Draws of the global Gaussian, by which parts are held against it. On 40 sets of six parts they put
# divergences .001 nats off in the median and .004 in 95 of 100 parts, where .1 misleads.
_DRAWS = 400


def fit_adaptively(plan, sign, monitor, previous, save):
    """Return the `BinaryFit` over parts that are merged as long as that is advised, the last one.

    The site of a merged part is the product of both, from which the fit goes on, as long as
    `max_iter` iterations in all allow. Parameters are those of `fit_in_memory`.
    """
    rng, most = np.random.default_rng(plan.settings.seed), plan.settings.max_iter
    history: dict[str, np.ndarray] = {}
    while True:
        fit = fit_in_memory(plan, sign, monitor, previous, save)
        history = {k: np.append(history.get(k, ()), v) for k, v in fit.history.items()}
        left = most - len(history["residual"])
        parts = [rows_of(part) for part in parts_in_memory(plan, sign)]
        joined = merged_numbers(trust_of(parts, fit.attributes["sites"], _DRAWS, rng))
        if fit.reason == "asked" or left < 1 or len(set(joined)) == len(joined):
            known = fit.attributes | dict(parts=plan.parts)
            return fit._replace(history=history, attributes=known)
        plan, previous = merged(plan, fit.attributes["sites"], joined)
        plan = plan._replace(settings=Bunch(**plan.settings | {"max_iter": left}))


def merged_numbers(trusts):
    """Return the new number of each part, with two parts of one number where one advises so.

    A part is in one merger at a time, the worst part first.
    """
    joined, free = np.arange(len(trusts)), set(range(len(trusts)))
    for trust in sorted(trusts, key=lambda t: -t.divergence):
        if trust.advice == "merge" and {trust.part, trust.partner} <= free:
            free -= {trust.part, trust.partner}
            joined[trust.part] = trust.partner
    return np.unique(joined, return_inverse=True)[1]


def merged(plan, sites, joined):
    """Return the plan with parts of new numbers, and the state of messages to go on from."""
    both = [np.flatnonzero(joined == k) for k in range(joined.max() + 1)]
    members = [np.sort(np.concatenate([plan.parts.members[j] for j in own])) for own in both]
    precision, shift = ([sites[name][own].sum(0) for own in both] for name in SITE_NAMES[:2])
    parts = parts_of_members(members, plan.codes, joined[plan.parts.site])
    state = dict(site_precision=np.array(precision), site_shift=np.array(shift))
    return plan._replace(parts=parts), state
