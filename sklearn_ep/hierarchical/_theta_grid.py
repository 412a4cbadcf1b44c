"""Posterior of all parameters as a mixture over nodes in the group scales.

At each node theta_m the shared coefficients get their own partitioned EP, so that what is Gaussian
is only beta and the effects given theta. The mixture has the posterior of theta as it is, with the
long left tail that few or small groups leave, and every later quantity is a sum over its nodes.
"""

from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import logsumexp
from scipy.stats import norm

from .._engine.gaussian import Natural, log_partition
from .._engine.quadrature import gauss_hermite
from .._engine.sites import Sites
from ._arrow import LocalEffects, half_partition, stacked_cholesky
from ._theta_nodes import node_rule

__all__ = [
    "ConditionalNodes",
    "GridSearch",
    "ThetaMarginal",
    "conditional_nodes",
    "even_grid",
    "gaussian_nodes",
    "join_nodes",
]

_STEP = 0.6  # sd between nodes: the trapezoidal rule of a Gaussian is then exact to 1e-20
_REACH = 6  # nodes on each side of the centre before the tails are looked at
_DEPTH = 8.0  # log weight below the largest at which a tail ends
_MOST = 61  # nodes at most, prior tails included


class ConditionalNodes(NamedTuple):
    """Posterior given theta at each of M nodes.

    theta (M, T); log_z (M,) the evidence given theta; mean (M, D) and root (M, D, D) those of beta;
    local one `LocalEffects` a partition; sites the row sites of each partition.
    """

    theta: np.ndarray
    log_z: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    local: list[LocalEffects]
    sites: list[Sites]


def join_nodes(parts):
    """Return blocks of nodes as one."""
    local = [
        LocalEffects(*(np.concatenate(a) for a in zip(*blocks, strict=True)))
        for blocks in zip(*(p.local for p in parts), strict=True)
    ]
    return ConditionalNodes(
        np.concatenate([p.theta for p in parts]),
        np.concatenate([p.log_z for p in parts]),
        np.concatenate([p.mean for p in parts]),
        np.concatenate([p.root for p in parts]),
        local,
        parts[-1].sites,
    )


def conditional_nodes(solve, theta, prior, messages, sites, *, tol, max_rounds=30):
    """Run partitioned EP over beta at each node.

    Parameters
    ----------
    solve : callable
        Maps a list of (precision (M, D, D), shift (M, D), sites), one a partition, to a list of
        `ConditionalPosterior`.
    theta : ndarray of shape (M, T)
    prior : Natural
        Prior of beta.
    messages : tuple of ndarray
        Precision (K, M, D, D) and shift (K, M, D) to start from; the whole and the cavities must be
        proper. Messages of later rounds are positive semi-definite, so properness is kept.
    sites : list of Sites
    tol : float
        Stop once no mean moves by more than tol sd, and no sd by a share of tol.
    max_rounds : int, default=30

    Returns
    -------
    ConditionalNodes
    """
    precision, shift = messages
    total = prior.precision + precision.sum(0), prior.shift + shift.sum(0)
    root, mean, mass = half_partition(stacked_cholesky(total[0]), total[1])
    for _ in range(max_rounds):
        cavities = [(total[0] - p, total[1] - s) for p, s in zip(precision, shift, strict=True)]
        parts = solve([(*c, s) for c, s in zip(cavities, sites, strict=True)])
        sites = [p.sites for p in parts]
        precision = np.stack([p.precision - c[0] for p, c in zip(parts, cavities, strict=True)])
        shift = np.stack([p.shift - c[1] for p, c in zip(parts, cavities, strict=True)])
        log_z = mass - log_partition(prior)
        for part, cavity in zip(parts, cavities, strict=True):
            log_z = log_z + part.log_z + half_partition(stacked_cholesky(cavity[0]), cavity[1])[2]
            log_z = log_z - mass
        total = prior.precision + precision.sum(0), prior.shift + shift.sum(0)
        old_mean, old_var = mean, np.sum(root**2, axis=1)
        root, mean, mass = half_partition(stacked_cholesky(total[0]), total[1])
        var = np.sum(root**2, axis=1)
        moved = np.max(np.abs(mean - old_mean) / np.sqrt(var))
        if max(moved, 0.5 * np.max(np.abs(np.log(var / old_var)))) < tol:
            break
    return ConditionalNodes(theta, log_z, mean, root, [p.local for p in parts], sites)


def gaussian_nodes(posterior, d):
    """Return nodes, log weights and the posterior of beta given them for a Gaussian in phi.

    Parameters
    ----------
    posterior : Natural
        Of phi = (beta, theta).
    d : int
        Length of beta.

    Returns
    -------
    theta : ndarray of shape (M, T)
    log_weight : ndarray of shape (M,)
        Of the quadrature rule for the marginal Gaussian of theta.
    beta : tuple of ndarray
        mean (M, D) and root (M, D, D) of beta given each node.
    """
    whole = half_partition(stacked_cholesky(posterior.precision[None]), posterior.shift[None])
    root, mean = whole[0][0], whole[1][0]
    cov = root[:, d:].T @ root[:, d:]
    x, log_weight = _prediction_rule(cov)
    theta = mean[d:] + x @ np.linalg.cholesky(cov).T if len(cov) else x
    shift = posterior.shift[:d] - theta @ posterior.precision[d:, :d]
    lower = np.broadcast_to(np.linalg.cholesky(posterior.precision[:d, :d]), (len(theta), d, d))
    beta = half_partition(lower, shift)
    return theta, log_weight, (beta[1], beta[0])


def _prediction_rule(cov):
    t = len(cov)
    if t == 1 and cov[0, 0] > 0.01:
        x, w = gauss_hermite(7)
        return x[:, None], np.log(w)
    return node_rule(t)


class GridSearch(NamedTuple):
    """Nodes of a grid with their normalised weights and the evidence they add up to."""

    nodes: ConditionalNodes
    weight: np.ndarray
    log_evidence: float
    step: float


def even_grid(evaluate, centre, sd, prior):
    """Return an even grid in a single theta, extended until both tails are spent.

    Parameters
    ----------
    evaluate : callable
        Maps theta (M, 1) to `ConditionalNodes`.
    centre, sd : float
        Where the first nodes are placed.
    prior : tuple of float
        Mean and sd of the normal prior of theta.

    Returns
    -------
    GridSearch
    """
    step = _STEP * sd
    nodes = evaluate(centre + step * np.arange(-_REACH, _REACH + 1)[:, None])
    while True:
        log_weight = nodes.log_z + norm.logpdf(nodes.theta[:, 0], *prior)
        floor = log_weight.max() - _DEPTH
        low, high = log_weight[0] > floor, log_weight[-1] > floor
        if not (low or high) or len(log_weight) >= _MOST:
            break
        if low:
            more = nodes.theta[0, 0] + step * np.arange(-3, 0)[:, None]
            nodes = join_nodes([evaluate(more), nodes])
        if high:
            more = nodes.theta[-1, 0] + step * np.arange(1, 4)[:, None]
            nodes = join_nodes([nodes, evaluate(more)])
    log_evidence = float(logsumexp(log_weight) + np.log(step))
    return GridSearch(nodes, np.exp(log_weight + np.log(step) - log_evidence), log_evidence, step)


def product_grid(evaluate, centre, cov, prior, n=5):
    """Return a product Gauss-Hermite grid about a Gaussian, weighted by the evidence at each node.

    Parameters
    ----------
    evaluate : callable
        Maps theta (M, T) to `ConditionalNodes`.
    centre, cov : ndarray of shape (T,) and (T, T)
    prior : tuple of ndarray
        Means and sds of the independent normal priors of theta.
    n : int, default=5
        Nodes in each direction.

    Returns
    -------
    GridSearch
    """
    x, w = gauss_hermite(n)
    t = len(centre)
    mesh = np.stack(np.meshgrid(*[x] * t, indexing="ij"), -1).reshape(-1, t)
    log_rule = np.stack(np.meshgrid(*[np.log(w)] * t, indexing="ij"), -1).reshape(-1, t).sum(1)
    lower = np.linalg.cholesky(cov)
    nodes = evaluate(centre + mesh @ lower.T)
    log_proposal = norm.logpdf(mesh).sum(1) - np.log(np.diagonal(lower)).sum()
    log_weight = log_rule - log_proposal + nodes.log_z + norm.logpdf(nodes.theta, *prior).sum(1)
    log_evidence = float(logsumexp(log_weight))
    return GridSearch(nodes, np.exp(log_weight - log_evidence), log_evidence, np.nan)


class ThetaMarginal:
    """Distribution of a single theta known at nodes, or Gaussian.

    Parameters
    ----------
    theta, weight : ndarray of shape (M,)
        Nodes and weights that sum to one.
    gaussian : Moments or None
        If given, theta is this Gaussian and the nodes are those of a quadrature rule for it;
        otherwise the nodes are an even grid and the log density is interpolated.
    """

    def __init__(self, theta, weight, gaussian=None):
        self.gaussian = gaussian
        self.edges = np.r_[0.0, np.cumsum(weight)[:-1], 1.0]
        if gaussian is None:
            self.mesh = np.linspace(theta[0], theta[-1], 40 * len(theta))
            log_density = CubicSpline(theta, np.log(np.maximum(weight, 1e-300)))(self.mesh)
            cdf = np.cumsum(np.exp(log_density))
            self.cdf = cdf / cdf[-1]

    def quantile(self, p):
        """Return quantiles of theta."""
        if self.gaussian is not None:
            mean, cov = self.gaussian
            return norm.ppf(p, mean[0], np.sqrt(cov[0, 0]))
        return np.interp(p, self.cdf, self.mesh)

    def draw(self, node, rng):
        """Return draws of theta within the cells of the nodes drawn: in phase with them."""
        u = self.edges[node] + rng.uniform(size=len(node)) * (
            self.edges[node + 1] - self.edges[node]
        )
        return self.quantile(np.clip(u, 1e-12, 1.0 - 1e-12))


def conditional_start(messages, theta, d):
    """Return the messages about beta that Gaussian messages about (beta, theta) imply at nodes.

    precision (K, M, D, D) and shift (K, M, D).
    """
    k, m = len(messages.shift), len(theta)
    precision = np.broadcast_to(messages.precision[:, None, :d, :d], (k, m, d, d))
    shift = messages.shift[:, None, :d] - theta @ messages.precision[:, d:, :d]
    return precision, shift


def prior_of_beta(prior, d):
    """Return the prior of beta out of one that is independent of theta."""
    return Natural(prior.precision[:d, :d], prior.shift[:d])
