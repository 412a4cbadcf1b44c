"""Covariances of group effects as S = L L' with L in log-Cholesky coordinates.

theta lists the lower triangle of L row by row, its diagonal as logarithms, so that every theta is a
proper covariance and one varying coefficient has theta = log tau.
"""

import numpy as np

__all__ = ["diagonal_positions", "factor", "n_coordinates", "names", "tangent"]


def n_coordinates(q):
    """Return the number of coordinates of a q x q covariance."""
    return q * (q + 1) // 2


def diagonal_positions(q):
    """Return where in theta the logarithms of the diagonal are."""
    return np.array([k * (k + 3) // 2 for k in range(q)], dtype=int)


def names(q):
    """Return the names (q (q + 1) / 2,) of the coordinates."""
    if q == 1:
        return ("log_tau",)
    pairs = zip(*np.tril_indices(q), strict=True)
    return tuple(f"{'log_' if i == j else ''}cholesky_{i}{j}" for i, j in pairs)


def factor(theta, q):
    """Return L (..., q, q) for theta (..., q (q + 1) / 2)."""
    theta = np.asarray(theta, dtype=float)
    lower = np.zeros((*theta.shape[:-1], q, q))
    rows, cols = np.tril_indices(q)
    lower[..., rows, cols] = theta
    k = np.arange(q)
    lower[..., k, k] = np.exp(lower[..., k, k])
    return lower


def tangent(theta, q):
    """Return dL / dtheta_t, (T, q, q); second derivatives equal it on the diagonal, else vanish."""
    lower = factor(theta, q)
    rows, cols = np.tril_indices(q)
    out = np.zeros((len(rows), q, q))
    out[np.arange(len(rows)), rows, cols] = np.where(rows == cols, lower[rows, cols], 1.0)
    return out
