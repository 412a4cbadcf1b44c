"""Tilted distributions of a part by draws: importance sampling and NUTS.

Importance sampling computes the log likelihood of a part once at draws from a Gaussian; later
sweeps only weight the same draws for the new cavity. What EP takes for Gaussian, the group effects
among them, is integrated by quadrature here. The No-U-Turn sampler of the optional package nutpie
sees the shared parameters, in coordinates where the tilted distribution that EP finds is standard
normal, and the group effects in units of their prior. Its draws are kept while the cavity stays
near the one they were made for: a fit by fresh draws at every sweep would have no fixed point to
stop at.
"""

import warnings
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import expit, log_expit, logsumexp

from ..._engine import gaussian
from ..._engine.quadrature import gauss_legendre_panels
from .. import _scales
from . import part

_BLOCK = 1_000_000  # row values held at once
_GRADED = np.array([0.0, 1, 2.2, 3.6, 5.2, 7.5, 11, 16, 24, 36, 54, 81, 120, 180, 270, 1e9])


class ImportanceSettings(NamedTuple):
    """Draws in a site, share of effective draws below which fresh ones are made, and the seed."""

    n_draws: int
    min_share: float
    seed: int


def marginal_log_likelihood(rows, phi, q):
    """Return the log likelihood of the rows at draws phi (S, P), group effects integrated out.

    One effect a group is integrated by panels that are safe for any group scale, O(200 S n); more
    of them by adaptive Gauss-Hermite quadrature.
    """
    blocks = gaussian.row_blocks(len(phi), len(rows.sign), _BLOCK)
    return np.concatenate([_log_likelihood(rows, phi[some], q) for some in blocks])


def _log_likelihood(rows, phi, q):
    d = rows.X.shape[1]
    offset = phi[:, :d] @ rows.X.T
    design = np.einsum("nq,sqp->snp", rows.local, _scales.factor(phi[:, d:], q))
    start = np.zeros((len(phi), len(rows.starts), q))
    modes, lower = part.effect_modes(rows, offset, design, start)
    group, total = rows.group, np.full(start.shape[:2], -np.inf)
    sides = _panels(modes, lower) if q == 1 else [_adaptive(modes, lower)]
    for side in sides:
        for u, log_weight in side:
            z = offset + np.einsum("snq,snq->sn", design, u[:, group])
            density = np.add.reduceat(rows.weight * log_expit(rows.sign * z), rows.starts, axis=1)
            term = density - 0.5 * np.sum(u**2, 2) + log_weight
            total = np.logaddexp(total, term)
            if q == 1 and np.all(term < total - 30.0):
                break  # log-concave: nothing is left further out
    return (total - 0.5 * q * np.log(2.0 * np.pi)).sum(1)


def _adaptive(modes, lower):
    """Yield nodes (S, J, q) and log weights (S, J) of adaptive Gauss-Hermite quadrature.

    By the second rule, where there is more than one: with the first, five nodes of each of two
    effects, the log evidence of thirty groups was off by .10 nats at a scale of 2 and by 1.0 at 8,
    with nine by .002 and .2.
    """
    q = modes.shape[2]
    x, log_rule = part.effect_rules(q)[:2][-1]
    k = np.arange(q)
    log_scale = 0.5 * q * np.log(2.0 * np.pi) - np.log(lower[..., k, k]).sum(-1)
    for node, log_w in zip(x, log_rule, strict=True):
        step = gaussian.backward(lower, np.broadcast_to(node[:, None], (*modes.shape, 1)))[..., 0]
        yield modes + step, log_scale + log_w + 0.5 * node @ node


def _panels(modes, lower):
    """Return two sequences, one a side, of nodes (S, J, 1) and log weights (S, J), going outwards.

    The density of an effect is log-concave with a curvature of at least one, so it has nothing
    beyond nine prior sd of its mode. Gauss-Legendre panels grow with the distance from the mode:
    what is narrow is there, and on the flat side of a group of one class the density is smooth.
    """
    reach = np.minimum(_GRADED / lower[..., 0], 9.0)
    nodes, weights = gauss_legendre_panels(reach, 8)
    with np.errstate(divide="ignore"):  # panels beyond the reach are empty
        log_weights = np.log(weights)
    return [
        [(modes + side * nodes[..., k, None], log_weights[..., k]) for k in range(nodes.shape[2])]
        for side in (-1.0, 1.0)
    ]


def draws_of(proposal, n_draws, rng):
    """Return antithetic draws (S, P) of a Gaussian."""
    half = rng.standard_normal(((n_draws + 1) // 2, len(proposal.mean)))
    lower = gaussian.checked_cholesky(proposal.cov)
    return proposal.mean + np.vstack([half, -half])[:n_draws] @ lower.T


def tilted_by_importance(rows, cavity, state, *, q, settings, rounds=6):
    """Return the `TiltedSite` of one partition under a cavity, a proper factor of (beta, theta).

    state is its `SiteState`, settings the `ImportanceSettings`, q the number of coefficients that
    vary by group, rounds how often to draw at most.

    Draws come from the tilted moments that EP finds, which importance weights then correct, and are
    kept while enough of them stay effective; then more are drawn. A site that still has fewer than
    two draws a parameter answers with a covariance of nan, which leaves its message as it is.
    Proposals adapted by tempered weights were no better: on 40 sets 37 fits converged in place of
    35, with as many iterations and a fifth more of the CPU.

    Split normal distributions, with a scale to each side of the mode along each axis, were no
    better: on five sets of 8 to 40 small groups their effective shares were .83, .65, .69, .38 and
    .67, of the moments of EP .90, .65, .51, .68 and .83, of the Laplace approximation .78, .40,
    .38, .30 and .61.

    In coordinates where the proposal is standard normal, moments are those of the proposal plus
    weighted averages minus the same share of unweighted ones. Without that control variate the
    noise of an inverse covariance, relative to the whole precision, adds up over sites and the fit
    collapses.
    """
    for attempt in range(rounds):
        if state.phi is None:
            site = part.tilted_by_nodes(rows, cavity, state, q=q, tol=1e-3)
            rng = np.random.default_rng([settings.seed, state.number, state.n_fresh])
            # Twice as many after the first: the noise of draws that do not serve for long would go
            # on as that of all messages which a new set moves, 8.3 iterations for 7.5 on eight sets
            # of 6 to 8 groups. Further doublings moved nothing on sixteen sets.
            n_draws = (2 if state.n_fresh else 1) * settings.n_draws
            phi = draws_of(site.moments, n_draws, rng)
            base = part.log_factor(gaussian.natural(site.moments), phi)
            base -= marginal_log_likelihood(rows, phi, q)
            drawn = dict(n_fresh=state.n_fresh + 1, proposal=site.moments, phi=phi, base=base)
            state = site.state._replace(**drawn)
        log_weight = part.log_factor(cavity, state.phi) - state.base
        weight, share = normalised(log_weight)
        # as many effective ones as fresh draws have to be
        enough = share * len(weight) > settings.min_share * settings.n_draws
        if enough or attempt == rounds - 1:
            break
        state = state._replace(phi=None)
    tilted = _controlled_moments(state, weight, share)
    return _weighed(state, log_weight, tilted, 2 * len(tilted.mean))


def _weighed(state, log_weight, tilted, least):
    """Return the `TiltedSite` with a covariance of nan where effective draws are fewer than least.

    That many make a covariance.
    """
    n = len(log_weight)
    if normalised(log_weight)[1] * n < least:
        tilted = gaussian.Moments(tilted.mean, np.full_like(tilted.cov, np.nan))
    log_z = state.log_z + float(logsumexp(log_weight) - np.log(n))
    return part.TiltedSite(log_z, tilted, state)


def normalised(log_weight):
    """Return weights that sum to one and the share of effective draws."""
    weight = np.exp(log_weight - logsumexp(log_weight))
    return weight, 1.0 / (len(weight) * np.sum(weight**2))


def _controlled_moments(state, weight, share):
    """Return tilted moments with the control variate of the same draws."""
    lower = gaussian.checked_cholesky(state.proposal.cov)
    white = solve_triangular(lower, (state.phi - state.proposal.mean).T, lower=True).T
    control = share / len(white)
    mean = (weight - control) @ white
    second = (white * (weight - control)[:, None]).T @ white + share * np.eye(white.shape[1])
    cov = second - np.outer(mean, mean)
    return gaussian.Moments(state.proposal.mean + lower @ mean, lower @ cov @ lower.T)


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
    lower = _scales.factor(phi[d:], q)
    group = rows.group
    z = rows.X @ phi[:d] + np.sum((rows.local @ lower) * u[group], axis=1)
    pull = cavity.precision @ phi
    value = rows.weight @ log_expit(rows.sign * z)
    value += phi @ (cavity.shift - 0.5 * pull) - 0.5 * np.sum(u**2)
    residual = rows.weight * rows.sign * expit(-rows.sign * z)
    slope = cavity.shift - pull
    slope[:d] += rows.X.T @ residual
    turned = residual[:, None] * rows.local
    slope[d:] += np.einsum("tab,ab->t", _scales.tangent(phi[d:], q), turned.T @ u[group])
    return float(value), slope, np.add.reduceat(turned @ lower, rows.starts, axis=0) - u


def _chain(rows, cavity, coordinates, q, n_draws, seed):
    """Return draws (n_draws, P) of phi from the tilted distribution, of one chain, and scores.

    Scores are slopes without the cavity, as `_moments_by_scores` needs them.
    """
    sample, from_pyfunc = load_sampler()
    mean, lower = coordinates.mean, gaussian.checked_cholesky(coordinates.cov)
    p, n_groups = len(mean), len(rows.starts)
    size = p + n_groups * q

    def slopes(x):
        phi, u = mean + lower @ x[:p], x[p:].reshape(n_groups, q)
        value, slope, slope_u = joint_log_density(rows, cavity, phi, u, q)
        return value, np.concatenate([lower.T @ slope, slope_u.ravel()])

    def log_prob(x):
        # far steps of the adaptation may overflow; the sampler turns back from such points
        with np.errstate(over="ignore", invalid="ignore"):
            return slopes(x)

    model = from_pyfunc(
        size,
        lambda: log_prob,
        lambda *_: lambda x: {"x": np.array(x)},
        [np.dtype("float64")],
        [(size,)],
        ["x"],
        make_initial_point_fn=lambda s: np.random.default_rng(s).standard_normal(size),
    )
    # 400 draws to adapt by: the coordinates are nearly right already
    silent = dict(save_warmup=False, progress_bar=False)
    trace = sample(model, draws=n_draws, tune=400, chains=1, cores=1, seed=seed, **silent)
    x = trace.posterior["x"].values[0]
    phi, slope = mean + x[:, :p] @ lower.T, np.array([slopes(own)[1] for own in x])
    score = slope[:, :p] + slope[:, p:] @ _effects_along(slopes, rows, coordinates, lower, q)
    return phi, solve_triangular(lower, score.T, lower=True, trans=1).T - _slope_of(cavity, phi)


def _effects_along(slopes, rows, coordinates, lower, q):
    """Return how the modes (J q,) of the effects go along with white coordinates, (J q, P)."""
    d, p, step = rows.X.shape[1], len(lower), 1e-4
    phi = coordinates.mean
    design = rows.local @ _scales.factor(phi[d:], q)
    modes, own = part.effect_modes(rows, rows.X @ phi[:d], design, np.zeros((len(rows.starts), q)))
    steps = step * np.eye(p, p + modes.size)[:, None] * np.array([[1.0], [-1.0]])
    places = np.r_[np.zeros(p), modes.ravel()] + steps
    ends = np.array([[slopes(x)[1][p:] for x in pair] for pair in places])
    change = (ends[:, 0] - ends[:, 1]).reshape(p, *modes.shape) / (2.0 * step)
    along = gaussian.backward(own, gaussian.forward(own, np.moveaxis(change, 0, -1)))
    return along.reshape(-1, p)


def _slope_of(cavity, phi):
    """Return the slopes (S, P) of the log of a cavity at draws."""
    return cavity.shift - phi @ cavity.precision


def _moments_by_scores(state, weight, cavity):
    """Return tilted moments under a cavity by weights (S,) of the draws of a chain.

    With white x = L^-1 (phi - m) and scores g, E g = 0 and E x g' = -I whatever the distribution
    (integration by parts), so that x + g has the mean of x, and its covariance with x is that of x
    less I. Both hardly vary where the distribution is nearly N(m, L L'), the one EP finds: what a
    plain covariance is off, relative to the whole precision, adds up over sites. Scores are those
    along a line on which the effects move with phi, which is as right and varies less.
    """
    mean, lower = state.proposal.mean, gaussian.checked_cholesky(state.proposal.cov)
    white = solve_triangular(lower, (state.phi - mean).T, lower=True).T
    steady = white + (state.score + _slope_of(cavity, state.phi)) @ lower
    centre = weight @ steady
    across = (weight[:, None] * (white - centre)).T @ (steady - centre)
    cov = np.eye(len(centre)) + 0.5 * (across + across.T)
    return gaussian.Moments(mean + lower @ centre, lower @ cov @ lower.T)


def _fresh(rows, cavity, state, q, settings):
    """Return the state with draws made for this cavity."""
    site = part.tilted_by_nodes(rows, cavity, state, q=q, tol=1e-2)
    stream = np.random.SeedSequence([settings.seed, state.number, state.n_fresh])
    seed = int(stream.generate_state(1)[0])
    phi, score = _chain(rows, cavity, site.moments, q, settings.n_draws, seed)
    drawn = dict(n_fresh=state.n_fresh + 1, proposal=site.moments, phi=phi, score=score)
    new = site.state._replace(base=part.log_factor(cavity, phi), log_z=0.0, **drawn)
    found = _moments_by_scores(new, np.full(len(phi), 1.0 / len(phi)), cavity)
    # log Z by importance sampling from the Gaussian that the chain found
    phi = draws_of(found, settings.n_draws, np.random.default_rng(stream))
    log_weight = marginal_log_likelihood(rows, phi, q) + part.log_factor(cavity, phi)
    log_weight -= part.log_factor(gaussian.natural(found), phi)
    return new._replace(log_z=float(logsumexp(log_weight) - np.log(settings.n_draws)))


def tilted_by_nuts(rows, cavity, state, *, q, settings):
    """Return the tilted distribution of one partition under a cavity.

    Called as `tilted_by_importance`.

    Notes
    -----
    Draws made for an earlier cavity are weighted by the new one over the old one, until too few
    stay effective.
    """
    log_weight = None if state.phi is None else part.log_factor(cavity, state.phi) - state.base
    if log_weight is None or normalised(log_weight)[1] <= settings.min_share:
        state = _fresh(rows, cavity, state, q, settings)
        log_weight = np.zeros(settings.n_draws)
    tilted = _moments_by_scores(state, normalised(log_weight)[0], cavity)
    return _weighed(state, log_weight, tilted, 2 * (state.phi.shape[1] + 2))
