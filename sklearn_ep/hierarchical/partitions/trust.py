"""How far to trust each part of a fit: its tilted distribution against the global Gaussian.

The tilted distribution of a part has the part's likelihood in place of its site. Where the two
differ much the site is no good stand-in, and so is what the other parts are told (Gelman and
others 2014, section 6.2).
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from ..._engine.diagnostics import importance_check
from ..._engine.gaussian import Moments
from .arrow import arrow_rows
from .importance import draws_of, marginal_log_likelihood, normalised

__all__ = ["PartTrust", "trust_in_parts"]

_POOR_KL = 0.1  # nats above which a site misleads
_POOR_K = 0.7  # shape of the weights above which half as many do
_GAIN = 0.5  # share of its divergence that a merger may leave
_GOOD_KL = 0.01  # nats below which a part may be two
_LARGE = 2.0  # times the mean number of rows
_VALUES = 4_000_000  # draws times rows
_FEWEST_DRAWS = 200


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
    none. Draws of the global Gaussian serve all parts; O(200 S n) for S of them.
    """
    design, designs, codes, sign, weight = rows
    local = designs[0] if designs else np.empty((len(sign), 0))
    code = codes[:, 0] if designs else np.zeros(len(sign), dtype=int)
    precision, shift = est.site_precision_, est.site_shift_
    shared = len(precision) > 1 and not np.ptp(precision, axis=0).any()
    own = est.partition_[code] if local.shape[1] else est.partition_
    if shared or len(own) != len(sign):
        return ()  # equal shares of one answer, or other rows than those of the fit
    n_draws = min(n_draws, max(_FEWEST_DRAWS, _VALUES // len(sign)))
    phi = draws_of(Moments(est.phi_mean_, est.phi_cov_), n_draws, rng)
    log_ratio, found = np.empty((len(precision), n_draws)), []
    for k in range(len(precision)):
        mine = own == k
        part = arrow_rows(*(a[mine] for a in (design, sign, weight, local, code)))[0]
        log_site = phi @ shift[k] - 0.5 * np.einsum("sp,pr,sr->s", phi, precision[k], phi)
        log_ratio[k] = marginal_log_likelihood(part, phi, local.shape[1]) - log_site
        tail = importance_check(log_ratio[k]).pareto_k
        sizes = len(part.sign), len(part.starts)
        found.append(PartTrust(k, *sizes, divergence_of(log_ratio[k]), tail))
    mean_size = len(sign) / len(precision)
    return tuple(_advised(trust, log_ratio, mean_size) for trust in found)


def divergence_of(log_ratio):
    """Return the divergence of a density from another by log ratios (S,) at draws of the other."""
    log_mean = logsumexp(log_ratio) - np.log(len(log_ratio))
    return float(normalised(log_ratio)[0] @ log_ratio - log_mean)


def _advised(trust, log_ratio, mean_size):
    """Return the `PartTrust` with advice.

    What a merger would give is known beforehand: the ratios of two parts multiply.
    """
    k = trust.part
    tail_matters = trust.pareto_k > _POOR_K and trust.divergence > 0.5 * _POOR_KL
    if trust.divergence <= _POOR_KL and not tail_matters:
        large = trust.n_rows > _LARGE * mean_size and trust.divergence < _GOOD_KL
        return trust._replace(advice="split" if large else "")
    others = [j for j in range(len(log_ratio)) if j != k]
    merged = [divergence_of(log_ratio[k] + log_ratio[j]) for j in others]
    if not others or min(merged) > _GAIN * trust.divergence:
        return trust._replace(advice="no Gaussian")
    return trust._replace(advice="merge", partner=others[int(np.argmin(merged))])
