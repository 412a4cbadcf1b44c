"""How far to trust an approximate posterior: importance weights against the true one.

Draws come from the approximation. Because prior times sites is the approximation, the weight of a
draw is the product over rows of likelihood over site, and the prior cancels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import genpareto

from .likelihoods import Factor


def site_log_weights(
    factor: Factor,
    y: Any,
    weight: np.ndarray,
    precision: np.ndarray,
    shift: np.ndarray,
    latent: np.ndarray,
) -> np.ndarray:
    """Return log(likelihood / sites) of latent draws (s, n), each shape (s,), up to a constant."""
    log_site = latent * shift - 0.5 * precision * latent**2
    return (factor.log_prob(y, latent) - log_site) @ weight


def weight_space_log_weights(
    factor: Factor,
    y: Any,
    weight: np.ndarray,
    precision: np.ndarray,
    prior_precision: np.ndarray,
    mean: np.ndarray,
    draws: np.ndarray,
    latent: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return log(true joint / Gaussian posterior) of draws of a linear model, up to a constant.

    Parameters
    ----------
    factor : Factor
    y, weight, precision : ndarray of shape (n,)
        Labels, copies of the rows, and precisions of their sites.
    prior_precision, mean : ndarray of shape (d,)
        Of the weights; the posterior precision is diag(prior_precision) + B' diag(precision) B.
    draws : ndarray of shape (s, d)
        Draws of the weights from that posterior.
    latent : callable
        Maps weights (.., d) to linear predictors (.., n).
    """
    moved = draws - mean
    log_joint = factor.log_prob(y, latent(draws)) @ weight - 0.5 * draws**2 @ prior_precision
    log_q = -0.5 * (moved**2 @ prior_precision + latent(moved) ** 2 @ precision)
    return log_joint - log_q


def importance_check(log_weights: np.ndarray) -> tuple[float, float]:
    """Return the effective share of draws with log weights (s,), s at least 25, and Pareto's k.

    k is the shape of the largest min(s / 5, 3 sqrt(s)) weights, as Vehtari et al. (2024) advise:
    below 0.5 is good, above 0.7 the approximation misses part of the posterior.
    """
    s = len(log_weights)
    weights = np.exp(log_weights - log_weights.max())
    ess = weights.sum() ** 2 / (weights @ weights)
    ordered = np.sort(weights)
    size = int(min(0.2 * s, 3 * np.sqrt(s)))
    tail = ordered[-size:] - ordered[-size - 1]
    if tail[-1] <= 1e-12:
        # equal weights: the approximation is exact, and there is no tail to fit
        return float(ess / s), -np.inf
    return float(ess / s), float(genpareto.fit(tail[tail > 0], floc=0)[0])
