"""Mixtures over nodes: what their weighted parts add up to."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

_HALVINGS = 60  # of the interval in which a quantile is: to the last digit


def mixture_moments(
    weight: np.ndarray, mean: np.ndarray, var: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance (...) of mixtures, by sums of squares.

    weight (M,) sums to one; mean and var (M, ...) are those of the parts.
    """
    centre = np.tensordot(weight, mean, 1)
    return centre, np.tensordot(weight, var + (mean - centre) ** 2, 1)


def mixture_covariance(
    weight: np.ndarray, cov: Iterable[np.ndarray], left: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """Return the covariance (..., n1, n2) of a mixture with weight (M,).

    cov (M, ..., n1, n2) are those of the parts, left (M, ..., n1) and right (M, ..., n2) the means
    of both sides.
    """
    apart, other = (side - np.tensordot(weight, side, 1) for side in (left, right))
    # one after another: together they may be many and large
    total = (weight * np.moveaxis(apart, 0, -1)) @ np.moveaxis(other, 0, -2)
    for share, part in zip(weight, cov, strict=True):
        total += share * part
    return total


def log_mixture(weight: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """Return log sum_m weight_m exp(log_p_m) of log probabilities (M, ...)."""
    log_weight = np.log(weight).reshape(-1, *[1] * (log_p.ndim - 1))
    return np.logaddexp.reduce(log_weight + log_p, axis=0)


def mixture_quantiles(
    weight: np.ndarray, mean: np.ndarray, sd: np.ndarray, levels: Any
) -> np.ndarray:
    """Return quantiles (len(levels), D) of mixtures of normals, by bisection.

    weight (M,), or (M, D) where it differs, sums to one; mean and sd (M, D) are those of the
    normals. Levels are (L,), or (L, D) likewise.
    """
    level = np.asarray(levels)
    level = level[:, None] if level.ndim == 1 else level
    weight = np.broadcast_to(weight.reshape(len(weight), -1), mean.shape)
    # a quantile of a mixture is between those of its parts
    ends = mean + sd * ndtri(level)[:, None]
    low, high = ends.min(axis=1), ends.max(axis=1)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        parts = ndtr((middle[:, None] - mean) / sd)
        below = np.einsum("lmd,md->ld", parts, weight)
        low, high = np.where(below < level, middle, low), np.where(below < level, high, middle)
    return 0.5 * (low + high)


def draw_mixture(
    weight: np.ndarray,
    draw_of: Callable[[int, int], np.ndarray],
    n_samples: int,
    rng: np.random.RandomState,
) -> np.ndarray:
    """Return joint draws (n_samples, ...) of a mixture with weight (M,), in random order.

    draw_of(m, n) returns n draws of part m.
    """
    if len(weight) == 1:
        return draw_of(0, n_samples)
    counts = rng.multinomial(n_samples, weight)
    draws = np.concatenate([draw_of(int(m), int(counts[m])) for m in np.flatnonzero(counts)])
    return draws[rng.permutation(n_samples)]
