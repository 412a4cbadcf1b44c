"""Covariances L L' of effects in log-Cholesky coordinates, entry by entry, for tests."""

from typing import NamedTuple

import numpy as np


class NormalPrior(NamedTuple):
    """Independent normal priors of the coordinates."""

    mean: np.ndarray
    sd: np.ndarray

    def log_density(self, theta):
        z = (theta - self.mean) / self.sd
        return float(np.sum(-0.5 * z**2 - np.log(self.sd) - 0.5 * np.log(2.0 * np.pi)))

    def slope(self, theta):
        return (self.mean - theta) / self.sd**2


def n_coordinates(q):
    return q * (q + 1) // 2


def factor(theta, q):
    """L (..., q, q): the lower triangle row by row, its diagonal as logarithms."""
    theta = np.asarray(theta, dtype=float)
    lower = np.zeros((*theta.shape[:-1], q, q))
    for t, (i, j) in enumerate(zip(*np.tril_indices(q), strict=True)):
        lower[..., i, j] = np.exp(theta[..., t]) if i == j else theta[..., t]
    return lower


def tangent(theta, q):
    """dL / dtheta_t (T, q, q)."""
    out = np.zeros((n_coordinates(q), q, q))
    for t, (i, j) in enumerate(zip(*np.tril_indices(q), strict=True)):
        out[t, i, j] = np.exp(theta[t]) if i == j else 1.0
    return out


def factors(theta, sizes):
    """L of each factor, whose coordinates follow one another."""
    ends = np.cumsum([n_coordinates(q) for q in sizes])[:-1]
    return [factor(own, q) for own, q in zip(np.split(theta, ends, axis=-1), sizes, strict=True)]


def scale_quantiles(average, sizes, levels):
    """Quantiles of the sds of all effects under an average over theta."""

    def sds(theta):
        lowers = factors(theta, sizes)
        return np.concatenate([np.linalg.norm(lower, axis=-1) for lower in lowers], axis=-1)

    return average.smooth.quantiles(levels, sds)
