"""Covariances of group effects as S = L L' with L in log-Cholesky coordinates.

theta lists the lower triangle of L row by row, its diagonal as logarithms, so that every theta is a
proper covariance and one varying coefficient has theta = log tau.
"""

import numpy as np

__all__ = [
    "diagonal_positions",
    "factor",
    "factors",
    "n_coordinates",
    "names",
    "scales",
    "slope",
    "spans",
    "tangent",
]


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


def spans(n_effects):
    """Return the slice of theta that belongs to each factor, for q_f effects a level of each."""
    ends = np.cumsum([0, *(n_coordinates(q) for q in n_effects)])
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def factors(theta, n_effects):
    """Return L (..., q_f, q_f) of each factor for theta (..., T)."""
    return [factor(theta[..., s], q) for s, q in zip(spans(n_effects), n_effects, strict=True)]


def scales(theta, n_effects):
    """Return the sds (..., Q) of all effects, factor by factor, for theta (..., T)."""
    if not n_effects:
        return np.zeros(theta.shape)
    parts = [np.sqrt(np.sum(lower**2, axis=-1)) for lower in factors(theta, n_effects)]
    return np.concatenate(parts, axis=-1)


def slope(theta, q, moment):
    """Return the derivatives (T,) of a log evidence in the coordinates of one factor.

    moment (q, q) is the sum over levels of E uu' - I, u being the effects in units of L. At a fixed
    point of the sites there is no other term.
    """
    lower, slopes = factor(theta, q), tangent(theta, q)
    relative = np.linalg.solve(np.broadcast_to(lower, slopes.shape), slopes)
    return np.einsum("tab,ba->t", relative, moment)
