"""Posterior of all parameters as a mixture over nodes in the group scales.

At each node theta_m the shared coefficients get their own partitioned EP, so that what is Gaussian
is only beta and the effects given theta. The mixture has the posterior of theta as it is, with the
long left tail that few or small groups leave, and every later quantity is a sum over its nodes.
"""

from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import logsumexp, ndtri
from scipy.stats import norm, qmc

from ..._engine.gaussian import Natural, log_partition, over
from ..._engine.loop import Evaluation, iterate
from ..._engine.quadrature import gauss_hermite
from ..._engine.sites import Sites
from .arrow import LocalEffects, half_partition, stacked_cholesky
from .messages import Messages, pack, total_of, unpack
from .theta_nodes import node_rule

__all__ = [
    "ConditionalNodes",
    "ThetaMarginal",
    "conditional_nodes",
    "even_grid",
    "gaussian_nodes",
    "join_nodes",
    "smoothed_quantiles",
    "smoothed_theta",
]

_STEP = 0.6  # sd between nodes: the trapezoidal rule of a Gaussian is then exact to 1e-20
_REACH = 6  # nodes on each side of the centre before the tails are looked at
_DEPTH = 8.0  # log weight below the largest at which a tail ends
_LOG2_POINTS = 14  # of the quadrature for quantiles of scales
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
    arrays = zip(*((p.theta, p.log_z, p.mean, p.root) for p in parts), strict=True)
    theta, log_z, mean, root = map(np.concatenate, arrays)
    return ConditionalNodes(theta, log_z, mean, root, local, parts[-1].sites)


def conditional_nodes(solve, theta, prior, messages, sites, *, tol, max_rounds=30):
    """Run partitioned EP over beta at nodes theta (M, T) and return `ConditionalNodes`.

    solve maps a list of (precision (M, D, D), shift (M, D), sites), one a partition, to a list of
    `ConditionalPosterior`; prior is that of beta; sites are the row sites of each partition. It
    stops once no mean moves by more than tol sd, and no sd by a share of tol.

    messages are the precision (K, M, D, D) and shift (K, M, D) to start from; the whole and the
    cavities must be proper. Messages of later rounds are positive semi-definite, so properness is
    kept.
    """

    def solved(factor):
        return half_partition(stacked_cholesky(factor.precision), factor.shift)

    def evaluate(x):
        nonlocal sites
        total = total_of(prior, unpack(x))
        cavities = [over(total, Natural(*site)) for site in zip(*unpack(x), strict=True)]
        parts = solve([(*c, s) for c, s in zip(cavities, sites, strict=True)])
        sites = [p.sites for p in parts]
        answers = list(zip(parts, cavities, strict=True))
        target = np.stack([pack(over(p, c)) for p, c in answers])
        old_root, old_mean, mass = solved(total)
        log_z = mass - log_partition(prior) + sum(p.log_z + solved(c)[2] - mass for p, c in answers)
        root, mean, _ = solved(total_of(prior, unpack(target)))
        old_var, var = np.sum(old_root**2, axis=1), np.sum(root**2, axis=1)
        moved = np.max(np.abs(mean - old_mean) / np.sqrt(var))
        residual = max(moved, 0.5 * np.max(np.abs(np.log(var / old_var))))
        nodes = ConditionalNodes(theta, log_z, mean, root, [p.local for p in parts], sites)
        return Evaluation(target, residual, payload=nodes)

    found = iterate(evaluate, pack(messages), max_iter=max_rounds - 1, tol=tol)
    return found.evaluation.payload


def gaussian_nodes(posterior, d):
    """Return nodes, log weights and the posterior of beta given them for a Gaussian in phi.

    posterior is that of phi = (beta, theta), d the length of beta. The nodes theta (M, T) and log
    weights (M,) are of the quadrature rule for the marginal Gaussian of theta; of beta given each
    node it is (mean (M, D), root (M, D, D)).
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


def even_grid(evaluate, centre, sd, prior):
    """Return the `GridSearch` of an even grid in one theta, extended until both tails are spent.

    evaluate maps theta (M, 1) to `ConditionalNodes`; the first nodes are placed by centre and sd;
    prior is the (mean, sd) of the normal prior of theta.
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
    return GridSearch(nodes, np.exp(log_weight + np.log(step) - log_evidence), log_evidence)


def product_grid(evaluate, centre, cov, prior, n=5):
    """Return the `GridSearch` of a product Gauss-Hermite grid about a Gaussian in theta.

    Its n nodes in each direction are placed by centre (T,) and cov (T, T), and weighted by the
    evidence at each; evaluate maps theta (M, T) to `ConditionalNodes`; prior holds the means and
    the sds of the independent normal priors of theta.
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
    return GridSearch(nodes, np.exp(log_weight - log_evidence), log_evidence)


class ThetaMarginal:
    """Distribution of a single theta known at nodes (M,) with weights that sum to one, or Gaussian.

    With `gaussian`, its `Moments`, the nodes are those of a quadrature rule for it; otherwise they
    are an even grid and the log density is interpolated.
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
        low, high = self.edges[node], self.edges[node + 1]
        u = low + rng.uniform(size=len(node)) * (high - low)
        return self.quantile(np.clip(u, 1e-12, 1.0 - 1e-12))


def smoothed_theta(theta, weight, node, white):
    """Return draws of theta by a kernel that keeps mean and covariance of nodes (Liu, West 2001).

    theta (M, T) and weight (M,) are the nodes, node (S,) those drawn, white (S, T) standard normal.
    """
    mean = weight @ theta
    apart = np.sqrt(weight)[:, None] * (theta - mean)
    values, vectors = np.linalg.eigh(apart.T @ apart)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return mean + 0.9 * (theta[node] - mean) + np.sqrt(1.0 - 0.9**2) * white @ root.T


def smoothed_quantiles(theta, weight, levels, values_of):
    """Return quantiles (len(levels), Q) of functions of theta by `smoothed_theta`.

    values_of maps theta (m, T) to the functions (m, Q). Evenly spread points in
    place of draws: attributes depend on no seed.
    """
    points = qmc.Sobol(1 + theta.shape[1], scramble=False).random_base2(_LOG2_POINTS)
    points += 0.5 / len(points)
    node = np.searchsorted(np.cumsum(weight)[:-1], points[:, 0])
    spread = smoothed_theta(theta, weight, node, ndtri(points[:, 1:]))
    return np.quantile(values_of(spread), levels, axis=0)


def conditional_start(messages, theta, d):
    """Return the messages about beta that Gaussian messages about (beta, theta) imply at nodes.

    precision (K, M, D, D) and shift (K, M, D).
    """
    k, m = len(messages.shift), len(theta)
    precision = np.broadcast_to(messages.precision[:, None, :d, :d], (k, m, d, d))
    shift = messages.shift[:, None, :d] - theta @ messages.precision[:, d:, :d]
    return Messages(precision, shift)


def prior_of_beta(prior, d):
    """Return the prior of beta out of one that is independent of theta."""
    return Natural(prior.precision[:d, :d], prior.shift[:d])
