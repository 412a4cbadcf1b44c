"""Sites for small groups: the group's effect is integrated exactly, not by a Gaussian.

A group of k rows has latent values eta_i + tau u, where eta is Gaussian and u ~ N(0, 1) is the
effect in units of its scale. One site on eta in R^k takes the place of k sites of rows: its tilted
moments are sums over nodes in u, and given u the rows are taken in one after the other by
assumed-density filtering. Where groups have a handful of rows and tau is large, u is far from
normal and sites of rows would be wrong.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from .._engine.gaussian import ImproperPosterior, Moments, row_blocks
from .._engine.quadrature import gauss_legendre_panels, logistic_moments
from .._engine.sites import Sites

LARGEST_GROUP = 8  # rows up to which the filter costs less than it gives
_REACH = 7.0  # nodes in u lie within this many prior sds
_STEP = 0.5  # between nodes; 1.7 / tau where that is less: the poles of the logistic are pi / tau
_POLES = 1.7  # from the real line, and the trapezoidal rule is then exact to 1e-5
_LARGE = 50.0  # tau from which nodes gather where labels are in doubt
_GRADED = np.array([-20.0, -8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0, 20.0])  # ends of panels there
_BLOCK = 300_000  # doubles of a temporary: some of the cache


class TiltedGroups(NamedTuple):
    """Tilted distributions of G groups under their cavities.

    log_z (G,) with its gradient (G, k) and Hessian (G, k, k) in the cavity mean, its slope (G,) in
    log tau; mean and variance (G,) of u; weight (G, k) such that Cov(u, eta) = weight' V_c.
    """

    log_z: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    slope: np.ndarray
    effect_mean: np.ndarray
    effect_var: np.ndarray
    weight: np.ndarray


def cavities(sites, mean, cov):
    """Return the `Moments` of marginals of eta, and matrices A (G, k, k) such that V_c = A V.

    There is no inverse of V: rows of a group that are equal make it singular.
    """
    left = np.eye(mean.shape[1]) - cov @ sites.precision
    both = np.concatenate([(mean - np.matvec(cov, sites.shift))[..., None], cov], axis=2)
    solved = _solved(left, both)
    wide = solved[..., 1:]
    found = Moments(solved[..., 0], 0.5 * (wide + wide.swapaxes(1, 2)))
    return found, np.linalg.inv(left)


def _solved(left, right):
    """Solve a system a group; sites that leave a singular one leave no proper posterior."""
    try:
        return np.linalg.solve(left, right)
    except np.linalg.LinAlgError as error:
        raise ImproperPosterior("the covariances of a group are singular") from error


def new_sites(tilted, wide):
    """Return the undamped `Sites` of groups for `Moments`: precision (G, k, k), shift (G, k)."""
    mean, cov = wide
    k = mean.shape[1]
    pull = tilted.gradient - np.matvec(tilted.hessian, mean)
    right = np.concatenate([-tilted.hessian, pull[..., None]], axis=2)
    solved = _solved(np.eye(k) + tilted.hessian @ cov, right)
    precision = solved[..., :k]
    return Sites(0.5 * (precision + precision.swapaxes(1, 2)), solved[..., k])


def log_site_masses(sites, wide):
    """Return log of the integrals (G,) of cavity times site."""
    mean, cov = wide
    pull = sites.shift - np.matvec(sites.precision, mean)
    left = np.eye(mean.shape[1]) + cov @ sites.precision
    moved = _solved(left, np.matvec(cov, pull)[..., None])[..., 0]
    mass = 0.5 * np.sum(pull * moved, 1) - 0.5 * np.linalg.slogdet(left)[1]
    return mass + np.sum((sites.shift - 0.5 * np.matvec(sites.precision, mean)) * mean, 1)


def tilted_groups(sign, wide, tau):
    """Return the `TiltedGroups` of labels (G, k) in {-1, +1} for `Moments` and a scale tau.

    O(G k^3) operations for each of some 29 nodes, of 8 tau nodes for tau above 3.4, and of at most
    75 + 45 k for tau above 50, where those are fewer and exact to 1e-3.
    """
    mean, cov = wide
    if sign.shape[1] == 1:
        return _single_rows(sign, mean, cov, tau)
    rule = _even_rule(tau) if tau <= _LARGE else _panel_rule(mean, cov, tau)
    blocks, width = [], rule[0].shape[1] * sign.shape[1] ** 2
    for some in row_blocks(len(sign), width, _BLOCK):
        u, log_weight = (a if len(a) == 1 else a[some] for a in rule)  # one may be that of all
        blocks.append(_filtered(sign[some], mean[some], cov[some], tau, u, log_weight))
    return TiltedGroups(*map(np.concatenate, zip(*blocks, strict=True)))


def _even_rule(tau):
    """Return nodes u (1, U) and log weights of the trapezoidal rule for N(0, 1), all groups."""
    half = int(np.ceil(_REACH / min(_STEP, _POLES / tau)))
    u = np.linspace(-_REACH, _REACH, 2 * half + 1)
    log_weight = -0.5 * u**2
    return u[None], (log_weight - np.log(np.exp(log_weight).sum()))[None]


def _panel_rule(mean, cov, tau):
    """Return nodes u (G, U) and log weights of panels that are short where a label is in doubt.

    With a large scale that is a small part of the range: about 1 / tau around u = -mean / tau, for
    each row of the group.
    """
    width = np.sqrt(1.0 + np.einsum("gkk->gk", cov)) / tau
    near = (-mean / tau)[:, :, None] + width[:, :, None] * _GRADED
    even = np.broadcast_to(np.arange(-_REACH, _REACH + 1.0), (len(mean), int(2 * _REACH) + 1))
    ends = np.hstack([even, np.clip(near, -_REACH, _REACH).reshape(len(mean), -1)])
    u, weight = gauss_legendre_panels(np.sort(ends, axis=1), 5)
    with np.errstate(divide="ignore"):
        log_weight = np.log(weight) - 0.5 * u**2
    return u, log_weight - logsumexp(log_weight, axis=1, keepdims=True)


def _single_rows(sign, mean, cov, tau):
    """Groups of one row: eta + tau u is normal, and all is in closed form."""
    log_z, g, h = logistic_moments((sign * mean)[:, 0], cov[:, 0, 0] + tau**2)
    g = g * sign[:, 0]
    found = g[:, None], -h[:, None, None], tau**2 * (g**2 - h), tau * g
    return TiltedGroups(log_z, *found, 1.0 - tau**2 * h, -tau * h[:, None])


def _filtered(sign, mean, cov, tau, u, log_weight):
    """Take in the rows of each group one after the other at each node in u, and sum over nodes.

    u and log_weight are (n, U), or (1, U) for all groups.

    The posterior of eta given u is kept as mean + V gamma and V - V Gamma V, where gamma = sum g_i
    r_i and Gamma = sum h_i r_i r_i' over the rows i so far; r_i = e_i - Gamma V e_i has no entry
    beyond i.
    """
    n, k = sign.shape
    V = np.ascontiguousarray(cov.transpose(1, 2, 0))[..., None]
    size = u.shape[1]
    r = np.zeros((k, k, n, size))
    g, h = np.empty((2, k, n, size))
    log_z = np.zeros((n, size))
    for i in range(k):
        along = np.einsum("lmgu,mgv->lgu", r[:i, :i], V[:i, i])
        m = mean[:, i, None] + tau * u + np.einsum("lgu,lgu->gu", g[:i], along)
        kept = V[i, i] - np.einsum("lgu,lgu->gu", h[:i], along**2)
        v = np.maximum(kept, np.finfo(float).eps * V[i, i])  # rounding, for rows that are equal
        s = sign[:, i, None]
        row_z, row_g, h[i] = logistic_moments(s * m, v, rough=True)
        log_z += row_z
        g[i] = s * row_g
        r[i, :i] = -np.einsum("lgu,lmgu->mgu", h[:i] * along, r[:i, :i])
        r[i, i] = 1.0
    log_z += log_weight
    top = log_z.max(1, keepdims=True)
    w = np.exp(log_z - top)
    total = w.sum(1, keepdims=True)
    w /= total
    gamma = np.einsum("lgu,lmgu->mgu", g, r)
    wr = np.sqrt(h * w)[:, None] * r
    mean_gamma = np.einsum("gu,mgu->gm", w, gamma)
    apart = gamma - mean_gamma.T[..., None]
    spread = np.einsum("lgu,mgu->glm", w * apart, apart)
    hessian = spread - np.einsum("algu,amgu->glm", wr, wr)
    effect = np.sum(w * u, axis=1)
    var = np.sum(w * (u - effect[:, None]) ** 2, axis=1)
    weight = np.einsum("gu,mgu->gm", w * u, apart)
    slope = tau * np.sum(w * u * gamma.sum(0), 1)
    log_z = (top + np.log(total))[:, 0]
    return log_z, mean_gamma, hessian, slope, effect, var, weight
