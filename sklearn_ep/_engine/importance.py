"""Tilted distribution of a partition by importance sampling with a control variate.

The log likelihood of the partition is computed once at draws from its Gaussian approximation; later
sweeps only weight the same draws for the new cavity. It needs no structure of the likelihood beyond
its value, so it is the engine for checks and for models whose rows are not one-dimensional.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import log_expit, logsumexp

from . import log_cholesky
from .gaussian import Moments, checked_cholesky, log_partition
from .marginal_laplace import effect_modes, effect_rule
from .posteriors.arrow import backward
from .theta_nodes import TiltedSite

__all__ = ["DrawState", "ImportanceSettings", "marginal_log_likelihood", "tilted_by_importance"]


class ImportanceSettings(NamedTuple):
    """Draws in a site, share of effective draws below which fresh ones are made, and the seed."""

    n_draws: int
    min_share: float
    seed: int


class DrawState(NamedTuple):
    """What a partition keeps between sweeps.

    site is the number of the partition and n_fresh how often it has drawn, which with the seed make
    its random stream; proposal is the Gaussian of the draws phi (S, P), whose log likelihood (S,) is
    computed once; both are None where draws are due.
    """

    site: int
    n_fresh: int
    proposal: Moments
    phi: np.ndarray | None = None
    log_likelihood: np.ndarray | None = None


def marginal_log_likelihood(rows, phi, q):
    """Return the log likelihood of the rows at draws phi (S, P), group effects integrated out.

    Adaptive Gauss-Hermite quadrature about the mode of each effect, O(S n) for each node.
    """
    d = rows.X.shape[1]
    offset = phi[:, :d] @ rows.X.T
    if q == 0:
        return log_expit(rows.sign * offset) @ rows.weight
    design = np.einsum("nq,sqp->snp", rows.local, log_cholesky.factor(phi[:, d:], q))
    modes, lower = effect_modes(rows, offset, design, np.zeros((len(phi), len(rows.starts), q)))
    x, log_weight = effect_rule(q)
    group, k = rows.group, np.arange(q)
    terms = []
    for node, log_w in zip(x, log_weight, strict=True):
        u = modes + backward(lower, np.broadcast_to(node[:, None], (*modes.shape, 1)))[..., 0]
        z = offset + np.einsum("snq,snq->sn", design, u[:, group])
        density = np.add.reduceat(rows.weight * log_expit(rows.sign * z), rows.starts, axis=1)
        terms.append(density - 0.5 * np.sum(u**2, 2) + log_w + 0.5 * node @ node)
    total = logsumexp(terms, axis=0) - np.log(lower[..., k, k]).sum(-1)
    return total.sum(1)


def _draws(proposal, n_draws, rng):
    """Return antithetic draws (S, P) of a Gaussian."""
    half = rng.standard_normal(((n_draws + 1) // 2, len(proposal.mean)))
    lower = checked_cholesky(proposal.cov)
    return proposal.mean + np.vstack([half, -half])[:n_draws] @ lower.T


def _log_density(phi, m):
    """Return log N(phi; m) without its constant (2 pi)."""
    lower = checked_cholesky(m.cov)
    white = solve_triangular(lower, (phi - m.mean).T, lower=True)
    return -0.5 * np.sum(white**2, 0) - np.log(np.diagonal(lower)).sum()


def tilted_by_importance(rows, cavity, state, *, q, settings):
    """Return the tilted distribution of one partition under a cavity.

    Parameters
    ----------
    rows : ArrowRows
    cavity : Natural
        Proper factor of (beta, theta).
    state : DrawState
    q : int
    settings : ImportanceSettings

    Returns
    -------
    TiltedSite

    Notes
    -----
    In coordinates where the proposal is standard normal, moments are those of the proposal plus
    weighted averages minus the same share of unweighted ones. Without that control variate the
    noise of an inverse covariance, relative to the whole precision, adds up over sites and the fit
    collapses.
    """
    mass = log_partition(cavity)
    for attempt in range(3):
        if state.phi is None:
            rng = np.random.default_rng([settings.seed, state.site, state.n_fresh])
            phi = _draws(state.proposal, settings.n_draws, rng)
            likelihood = marginal_log_likelihood(rows, phi, q)
            state = state._replace(phi=phi, log_likelihood=likelihood, n_fresh=state.n_fresh + 1)
        log_target = state.log_likelihood + state.phi @ cavity.shift - mass
        log_target -= 0.5 * np.einsum("sp,pr,sr->s", state.phi, cavity.precision, state.phi)
        log_weight = log_target - _log_density(state.phi, state.proposal)
        log_z = logsumexp(log_weight) - np.log(len(log_weight))
        weight = np.exp(log_weight - logsumexp(log_weight))
        share = 1.0 / (len(weight) * np.sum(weight**2))
        tilted = _controlled_moments(state, weight, share)
        if share > settings.min_share or attempt == 2:
            break
        state = state._replace(proposal=tilted, phi=None, log_likelihood=None)
    return TiltedSite(float(log_z), tilted, state)


def _controlled_moments(state, weight, share):
    """Return tilted moments with the control variate of the same draws."""
    lower = checked_cholesky(state.proposal.cov)
    white = solve_triangular(lower, (state.phi - state.proposal.mean).T, lower=True).T
    control = share / len(white)
    mean = (weight - control) @ white
    second = (white * (weight - control)[:, None]).T @ white + share * np.eye(white.shape[1])
    cov = second - np.outer(mean, mean)
    return Moments(state.proposal.mean + lower @ mean, lower @ cov @ lower.T)

