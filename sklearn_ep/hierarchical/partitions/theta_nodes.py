"""Tilted distribution of a partition: a mixture over nodes in the group scales.

Given theta, the coordinates of the group covariance, the partition is a Gaussian model that
`conditional_ep` handles; theta itself is integrated by quadrature whose nodes each partition places
by its own last tilted distribution.
"""

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

from ..._engine.gaussian import Moments, Natural, checked_cholesky, jittered_cholesky, log_partition
from ..._engine.quadrature import gauss_hermite, star_rule
from ..._engine.sites import Sites
from .. import _log_cholesky as log_cholesky
from .arrow import conditional_ep

__all__ = [
    "SiteState",
    "TiltedSite",
    "middle_sites",
    "node_rule",
    "tilted_by_nodes",
    "tilted_over_theta",
]

_NARROW = 0.1  # sd of a log scale below which the posterior given theta is nearly linear in theta


class SiteState(NamedTuple):
    """What a partition keeps between sweeps: a warm start, never part of the answer.

    sites are the row sites (M, n), None before the first sweep; centre (T,) and spread (T, T) place
    the nodes.
    """

    sites: Sites | None
    centre: np.ndarray
    spread: np.ndarray


class TiltedSite(NamedTuple):
    """log Z, moments of (beta, theta) and the state for the next sweep."""

    log_z: float
    moments: Moments
    state: SiteState


@lru_cache
def node_rule(t, narrow=False):
    """Return nodes (M, t) and log weights of a rule for N(0, I_t).

    Product Gauss-Hermite up to three dimensions; above, the 2 t + 1 points of a rule that is exact
    for mean and covariance. The last coordinate is the log scale that is known least: it has a long
    left tail and gets five nodes where it is not `narrow`, the others three.
    """
    if t > 3:
        return star_rule(t)
    rules = [gauss_hermite(3)] * (t - 1) + [gauss_hermite(3 if narrow else 5)] * (t > 0)
    log_weights = np.array([np.sum(np.log(c)) for c in product(*(w for _, w in rules))])
    return np.array(list(product(*(x for x, _ in rules)))).reshape(len(log_weights), t), log_weights


def cavity_of_theta(cavity, d):
    """Return the Natural of theta with beta integrated out, and the precision of beta given it."""
    block = cavity.precision[:d, :d]
    lower = checked_cholesky(block)
    cross = solve_triangular(lower, cavity.precision[:d, d:], lower=True)
    half = solve_triangular(lower, cavity.shift[:d], lower=True)
    precision = cavity.precision[d:, d:] - cross.T @ cross
    return Natural(precision, cavity.shift[d:] - cross.T @ half), block


def _relocated(placement, moments):
    """Return the new placement and whether the old one missed the tilted distribution of theta.

    Three nodes in a direction see little of a skewed distribution, and where they see it moves with
    them: several coordinates keep a placement that is near enough, and go half-way otherwise.
    """
    lower, _ = jittered_cholesky(placement.cov, 0.0)
    shift = solve_triangular(lower, moments.mean - placement.mean, lower=True)
    turned = solve_triangular(lower, solve_triangular(lower, moments.cov, lower=True).T, lower=True)
    values, vectors = np.linalg.eigh(0.5 * (turned + turned.T))
    axes, far = lower @ vectors, np.max(np.abs(shift))
    missed = far > 1.0 or values[0] < 0.2 or values[-1] > 4.0
    if missed or len(shift) == 1:
        return Moments(moments.mean, (axes * np.clip(values, 0.1, 4.0)) @ axes.T), missed
    if far < 0.25 and values[0] > 0.7 and values[-1] < 1.4:
        return placement, False
    middle = 0.5 * (placement.mean + moments.mean)
    return Moments(middle, (axes * np.sqrt(values)) @ axes.T), False


def _mixture(log_weight, theta, posterior):
    """Return log Z and moments of (beta, theta) for log weights (M,) of the nodes."""
    log_z = logsumexp(log_weight)
    weight = np.exp(log_weight - log_z)
    points = np.hstack([posterior.mean, theta])
    mean = weight @ points
    apart = np.sqrt(weight)[:, None] * (points - mean)
    cov = apart.T @ apart
    d = posterior.mean.shape[1]
    roots = (np.sqrt(weight)[:, None, None] * posterior.root).reshape(-1, d)
    cov[:d, :d] += roots.T @ roots
    return float(log_z), Moments(mean, cov)


def tilted_by_nodes(rows, cavity, state, *, q, tol, max_passes=20, power=1.0):
    """Return the `TiltedSite` of one partition under a cavity, a proper factor of (beta, theta).

    state is its `SiteState`, q the number of varying coefficients; tol, max_passes and power are
    those of the inner EP.
    """

    def solve(theta, block, shift, sites):
        if sites is not None and len(sites.precision) != len(theta):
            sites = middle_sites(sites, len(theta))
        scale = log_cholesky.factor(theta, q)
        options = dict(tol=tol, max_passes=max_passes, power=power)
        return conditional_ep(rows, scale, block[None], shift, sites, **options)

    return tilted_over_theta(solve, cavity, state)


def tilted_over_theta(solve, cavity, state, max_moves=12):
    """Return the `TiltedSite` of rows whose posterior given theta somebody else finds.

    `solve(theta, precision, shift, sites)` maps nodes (M, T), the cavity of beta given them, (D, D)
    and (M, D), and what it called `sites` last time, to an object with `log_z` (M,), `mean` (M, D),
    `root` (M, D, D) and `sites`. log Z has to be converged at each node, because its exponential
    weights the nodes. The cavity is a proper factor of (beta, theta); max_moves bounds the new
    placements of nodes within one call.
    """
    placement, sites = Moments(state.centre, state.spread), state.sites
    t = len(placement.mean)
    d = len(cavity.shift) - t
    marginal, block = cavity_of_theta(cavity, d)
    mass = log_partition(marginal)
    x, log_rule = node_rule(t, bool(np.all(placement.cov[-1:, -1:] < _NARROW**2)))
    for _ in range(max_moves):
        lower, _ = jittered_cholesky(placement.cov, 0.0)
        theta = placement.mean + x @ lower.T
        shift = cavity.shift[:d] - theta @ cavity.precision[d:, :d]
        posterior = solve(theta, block, shift, sites)
        sites = posterior.sites
        log_cavity = theta @ marginal.shift - mass
        log_cavity -= 0.5 * np.einsum("mi,ij,mj->m", theta, marginal.precision, theta)
        log_proposal = -0.5 * np.sum(x**2, 1) - np.sum(np.log(np.diagonal(lower)))
        log_weight = log_rule + log_cavity - log_proposal + posterior.log_z
        log_z, moments = _mixture(log_weight, theta, posterior)
        if t == 0:
            break
        placement, missed = _relocated(placement, Moments(moments.mean[d:], moments.cov[d:, d:]))
        if not missed:
            break
    return TiltedSite(log_z, moments, SiteState(sites, placement.mean, placement.cov))


def middle_sites(sites, m):
    """Give row sites of other nodes to m nodes: those in the middle, which mattered most."""
    middle = len(sites.precision) // 2
    return Sites(*(np.repeat(part[middle][None], m, axis=0) for part in sites))
