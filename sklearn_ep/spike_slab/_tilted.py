"""Marginals of single coefficients with zeros in them, and their quantiles.

A fixed point of EP describes a coefficient twice, with one mean and variance: by the Gaussian Q of
all coefficients, and by its tilted distribution, prior times cavity, which is zero with positive
probability and normal otherwise. Intervals of a coefficient are those of the tilted distribution.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from .._engine.hyper import mixture_quantiles

__all__ = ["TiltedMarginals", "tilted_quantiles"]


class TiltedMarginals(NamedTuple):
    """Zero with probability 1 - inclusion, else normal; arrays (d,), or (M, d) of M parts."""

    inclusion: np.ndarray
    slab_mean: np.ndarray
    slab_sd: np.ndarray


def tilted_quantiles(weight, tilted, levels):
    """Return quantiles (len(levels), d) of mixtures, weight (M,), of `TiltedMarginals` (M, d)."""
    level = np.asarray(levels)[:, None]
    share = weight[:, None] * tilted.inclusion
    total = share.sum(axis=0)
    below = np.sum(share * ndtr(-tilted.slab_mean / tilted.slab_sd), axis=0)
    out = np.zeros((len(level), len(total)))
    low, high = level < below, 1.0 - level < total - below
    for side, own in ((low, level), (high, level - (1.0 - total))):
        rows, columns = np.nonzero(side)
        if columns.size:
            weights = share[:, columns] / total[columns]
            mean, sd = tilted.slab_mean[:, columns], tilted.slab_sd[:, columns]
            at = np.broadcast_to(own, side.shape)[rows, columns] / total[columns]
            out[rows, columns] = mixture_quantiles(weights, mean, sd, at[None])[0]
    return out
