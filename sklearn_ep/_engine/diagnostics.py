"""How far to trust an approximate posterior: importance weights against the true one.

Draws come from the approximation. Because prior times sites is the approximation, the weight of a
draw is the product over rows of likelihood over site, and the prior cancels.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp
from scipy.stats import genpareto

__all__ = ["ImportanceCheck", "importance_check", "site_log_weights"]


class ImportanceCheck(NamedTuple):
    """What importance weights say.

    `ess_share` is the effective sample size over the number of draws; `pareto_k` the shape of the
    largest weights, below 0.5 good, above 0.7 the approximation misses part of the posterior
    (Vehtari et al. 2024); `log_mean` the log of the mean weight, the correction of the evidence.
    """

    ess_share: float
    pareto_k: float
    log_mean: float


def site_log_weights(factor, y, weight, precision, shift, latent):
    """Return log(likelihood / sites) of latent draws (s, n), each shape (s,), up to a constant."""
    log_site = latent * shift - 0.5 * precision * latent**2
    return (factor.log_prob(y, latent) - log_site) @ weight


def importance_check(log_weights):
    """Return the `ImportanceCheck` of log weights (s,), s at least 25.

    The tail is the largest min(s / 5, 3 sqrt(s)) weights, as Vehtari et al. advise.
    """
    s = len(log_weights)
    log_mean = float(logsumexp(log_weights) - np.log(s))
    weights = np.exp(log_weights - log_weights.max())
    ess = weights.sum() ** 2 / (weights @ weights)
    ordered = np.sort(weights)
    size = int(min(0.2 * s, 3 * np.sqrt(s)))
    tail = ordered[-size:] - ordered[-size - 1]
    if tail[-1] <= 1e-12:
        # equal weights: the approximation is exact, and there is no tail to fit
        return ImportanceCheck(float(ess / s), -np.inf, log_mean)
    shape = genpareto.fit(tail[tail > 0], floc=0)[0]
    return ImportanceCheck(float(ess / s), float(shape), log_mean)
