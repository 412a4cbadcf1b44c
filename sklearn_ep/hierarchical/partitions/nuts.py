"""Tilted distribution of a partition by the No-U-Turn sampler of the optional package nutpie.

The sampler sees the shared parameters, in coordinates where the tilted distribution that EP finds
is standard normal, and the group effects in units of their prior. Its draws are kept while the
cavity stays near the one they were made for: a fit by fresh draws at every sweep would have no
fixed point to stop at.
"""

import warnings
from typing import NamedTuple

import numpy as np
from scipy.special import expit, log_expit, logsumexp

from ..._engine.gaussian import Moments, Natural, checked_cholesky
from .. import _log_cholesky as log_cholesky
from .importance import draws_of, log_density, log_factor, marginal_log_likelihood, normalised
from .theta_nodes import SiteState, TiltedSite, tilted_by_nodes

__all__ = ["ChainState", "joint_log_density", "load_sampler", "tilted_by_nuts"]

_TUNE = 400  # draws by which the sampler adapts; the coordinates are nearly right already
_COORDINATE_TOL = 1e-2  # of the inner EP, which only has to give coordinates


class ChainState(NamedTuple):
    """What a partition keeps between sweeps.

    nodes is the state of the EP engine that makes the coordinates; site is the number of the
    partition and n_fresh how often it has drawn, which with the seed make its random stream; the
    draws phi (S, P) are from the tilted distribution under `cavity`, whose log mass is log_z; the
    last three are None before the first draws.
    """

    nodes: SiteState
    site: int
    n_fresh: int = 0
    cavity: Natural | None = None
    phi: np.ndarray | None = None
    log_z: float = 0.0


def load_sampler():
    """Return (sample, from_pyfunc) of nutpie, or raise an ImportError if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # news of a package that nutpie imports
            from nutpie import sample
            from nutpie.compiled_pyfunc import from_pyfunc
    except ImportError as error:
        raise ImportError(
            "engine='nuts' needs the package nutpie; install it with "
            "pip install 'sklearn-ep[nuts]', or choose another engine."
        ) from error
    return sample, from_pyfunc


def joint_log_density(rows, cavity, phi, u, q):
    """Return log likelihood + cavity + prior of the effects, with its gradients, up to a constant.

    That is (value, slope (P,) in phi, slope (J, q) in u), where u (J, q) are the effects in units
    of their prior, u_j ~ N(0, I).
    """
    d = rows.X.shape[1]
    lower = log_cholesky.factor(phi[d:], q)
    z, group = rows.X @ phi[:d], rows.group
    if q:
        z = z + np.sum((rows.local @ lower) * u[group], axis=1)
    pull = cavity.precision @ phi
    value = rows.weight @ log_expit(rows.sign * z)
    value += phi @ (cavity.shift - 0.5 * pull) - 0.5 * np.sum(u**2)
    residual = rows.weight * rows.sign * expit(-rows.sign * z)
    slope = cavity.shift - pull
    slope[:d] += rows.X.T @ residual
    slope_u = -u
    if q:
        turned = residual[:, None] * rows.local
        slope[d:] += np.einsum("tab,ab->t", log_cholesky.tangent(phi[d:], q), turned.T @ u[group])
        slope_u = np.add.reduceat(turned @ lower, rows.starts, axis=0) - u
    return float(value), slope, slope_u


def _chain(rows, cavity, coordinates, q, n_draws, seed):
    """Return draws (n_draws, P) of phi from the tilted distribution, of one chain."""
    sample, from_pyfunc = load_sampler()
    mean, lower = coordinates.mean, checked_cholesky(coordinates.cov)
    p, n_groups = len(mean), len(rows.starts)
    size = p + n_groups * q

    def log_prob(x):
        # far steps of the adaptation may overflow; the sampler turns back from such points
        with np.errstate(over="ignore", invalid="ignore"):
            phi, u = mean + lower @ x[:p], x[p:].reshape(n_groups, q)
            value, slope, slope_u = joint_log_density(rows, cavity, phi, u, q)
            return value, np.concatenate([lower.T @ slope, slope_u.ravel()])

    model = from_pyfunc(
        size,
        lambda: log_prob,
        lambda *_: lambda x: {"x": np.array(x[:p])},
        [np.dtype("float64")],
        [(p,)],
        ["x"],
        make_initial_point_fn=lambda s: np.random.default_rng(s).standard_normal(size),
    )
    silent = dict(save_warmup=False, progress_bar=False)
    trace = sample(model, draws=n_draws, tune=_TUNE, chains=1, cores=1, seed=seed, **silent)
    return mean + trace.posterior["x"].values[0] @ lower.T


def _weighted_moments(phi, weight):
    mean = weight @ phi
    apart = np.sqrt(weight)[:, None] * (phi - mean)
    return Moments(mean, apart.T @ apart / (1.0 - weight @ weight))


def _log_mass(rows, cavity, moments, q, n_draws, rng):
    """Return log Z by importance sampling from the Gaussian that the chain found."""
    phi = draws_of(moments, n_draws, rng)
    log_weight = marginal_log_likelihood(rows, phi, q) + log_factor(cavity, phi)
    return float(logsumexp(log_weight - log_density(phi, moments)) - np.log(n_draws))


def _fresh(rows, cavity, state, q, settings):
    """Return the state with draws made for this cavity."""
    site = tilted_by_nodes(rows, cavity, state.nodes, q=q, tol=_COORDINATE_TOL)
    stream = np.random.SeedSequence([settings.seed, state.site, state.n_fresh])
    seed = int(stream.generate_state(1)[0])
    phi = _chain(rows, cavity, site.moments, q, settings.n_draws, seed)
    found = _weighted_moments(phi, np.full(len(phi), 1.0 / len(phi)))
    log_z = _log_mass(rows, cavity, found, q, settings.n_draws, np.random.default_rng(stream))
    return ChainState(site.state, state.site, state.n_fresh + 1, cavity, phi, log_z)


def tilted_by_nuts(rows, cavity, state, *, q, settings):
    """Return the tilted distribution of one partition under a cavity.

    Called as `tilted_by_importance`, with a `ChainState`.

    Notes
    -----
    Draws made for an earlier cavity are weighted by the new one over the old one, until too few
    stay effective. The covariance is the one whose inverse is an unbiased precision: the inverse of
    a plain sample covariance of s draws is too large by (s - 1) / (s - P - 2), relative to the
    whole precision and not to the share of the site, and sites add that up. Draws of a chain depend
    on each other, those of log scales most (one in four counts); the factor takes them as they are.
    """
    log_weight = np.zeros(settings.n_draws)
    if state.phi is not None:
        log_weight = log_factor(cavity, state.phi) - log_factor(state.cavity, state.phi)
    if state.phi is None or normalised(log_weight)[1] <= settings.min_share:
        state = _fresh(rows, cavity, state, q, settings)
        log_weight = np.zeros(settings.n_draws)
    weight, share = normalised(log_weight)
    tilted = _weighted_moments(state.phi, weight)
    n_effective, p = share * len(weight), len(tilted.mean)
    if n_effective < 2 * (p + 2):  # fewer effective draws than make a covariance
        return TiltedSite(state.log_z, Moments(tilted.mean, np.full((p, p), np.nan)), state)
    unbiased = (n_effective - 1.0) / (n_effective - p - 2.0)
    log_z = state.log_z + float(logsumexp(log_weight) - np.log(len(log_weight)))
    return TiltedSite(log_z, Moments(tilted.mean, unbiased * tilted.cov), state)
