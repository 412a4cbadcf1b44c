"""Partitions at nodes in the group scales.

Given theta, the coordinates of the group covariance, a partition is a Gaussian model that
`conditional_ep` handles. Its tilted distribution integrates theta by quadrature, whose nodes each
partition places by its own last tilted distribution. At nodes that all partitions share, the shared
coefficients get a partitioned EP of their own, so that what is Gaussian is only beta and the
effects given theta; the search, the nodes and the smooth distribution are then those of every other
engine.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

from ..._engine import gaussian
from ..._engine.hyper import Node
from ..._engine.quadrature import hermite_product, star_rule
from ..._engine.sites import Sites
from .. import _scales
from .._layout import LocalPart
from .._posterior import between
from .arrow import conditional_ep, half_partition
from .messages import propagate, total_of, unpack

# sd of a log scale below which the posterior given it is nearly linear in it: fewer nodes do
_NARROW = 0.1
_MOST_MOVES = 12  # new placements of the nodes of a part in one sweep


class SiteState(NamedTuple):
    """What a partition keeps between sweeps: a warm start, never part of the answer.

    sites are the row sites (M, n), None before the first sweep; centre (T,) and spread (T, T) place
    the nodes.
    """

    sites: Sites | None
    centre: np.ndarray
    spread: np.ndarray


class TiltedSite(NamedTuple):
    """log Z, moments of (beta, theta), or of beta, and the state for the next sweep."""

    log_z: float
    moments: gaussian.Moments
    state: Any


@lru_cache
def node_rule(t, narrow=False):
    """Return nodes (M, t) and log weights of a rule for N(0, I_t).

    Product Gauss-Hermite up to three dimensions; above, the 2 t + 1 points of a rule that is exact
    for mean and covariance. The last coordinate is the log scale that is known least: it has a long
    left tail and gets five nodes where it is not `narrow`, the others three.
    """
    if t > 3:
        return star_rule(t)
    return hermite_product((3,) * (t - 1) + (3 if narrow else 5,) * (t > 0))


def cavity_of_theta(cavity, d):
    """Return the Natural of theta with beta integrated out, and the precision of beta given it."""
    block = cavity.precision[:d, :d]
    lower = gaussian.checked_cholesky(block)
    cross = solve_triangular(lower, cavity.precision[:d, d:], lower=True)
    half = solve_triangular(lower, cavity.shift[:d], lower=True)
    precision = cavity.precision[d:, d:] - cross.T @ cross
    return gaussian.Natural(precision, cavity.shift[d:] - cross.T @ half), block


def _relocated(placement, moments):
    """Return the new placement and whether the old one missed the tilted distribution of theta.

    Three nodes in a direction see little of a skewed distribution, and where they see it moves with
    them: several coordinates keep a placement that is near enough, and go half-way otherwise.
    """
    lower, _ = gaussian.jittered_cholesky(placement.cov, 0.0)
    shift = solve_triangular(lower, moments.mean - placement.mean, lower=True)
    turned = solve_triangular(lower, solve_triangular(lower, moments.cov, lower=True).T, lower=True)
    values, vectors = np.linalg.eigh(0.5 * (turned + turned.T))
    axes, far = lower @ vectors, np.max(np.abs(shift))
    missed = far > 1.0 or values[0] < 0.2 or values[-1] > 4.0
    if missed or len(shift) == 1:
        return gaussian.Moments(moments.mean, (axes * np.clip(values, 0.1, 4.0)) @ axes.T), missed
    if far < 0.25 and values[0] > 0.7 and values[-1] < 1.4:
        return placement, False
    middle = 0.5 * (placement.mean + moments.mean)
    return gaussian.Moments(middle, (axes * np.sqrt(values)) @ axes.T), False


def _mixture(log_weight, theta, posterior):
    """Return log Z and moments of (beta, theta) for log weights (M,) of the nodes."""
    log_z = logsumexp(log_weight)
    weight = np.exp(log_weight - log_z)
    mean, cov = between(weight, np.hstack([posterior.mean, theta]))
    d = posterior.mean.shape[1]
    roots = (np.sqrt(weight)[:, None, None] * posterior.root).reshape(-1, d)
    cov[:d, :d] += roots.T @ roots
    return float(log_z), gaussian.Moments(mean, cov)


def tilted_by_nodes(rows, cavity, state, *, q, tol, max_passes=20, power=1.0):
    """Return the `TiltedSite` of one partition under a cavity, a proper factor of (beta, theta).

    state is its `SiteState`, q the number of varying coefficients; tol, max_passes and power are
    those of the inner EP. log Z has to be converged at each node: its exponential weighs them.
    """
    options = dict(tol=tol, max_passes=max_passes, power=power)
    placement, sites = gaussian.Moments(state.centre, state.spread), state.sites
    t = len(placement.mean)
    d = len(cavity.shift) - t
    marginal, block = cavity_of_theta(cavity, d)
    mass = gaussian.log_partition(marginal)
    x, log_rule = node_rule(t, bool(np.all(placement.cov[-1:, -1:] < _NARROW**2)))
    for _ in range(_MOST_MOVES):
        lower, _ = gaussian.jittered_cholesky(placement.cov, 0.0)
        theta = placement.mean + x @ lower.T
        shift = cavity.shift[:d] - theta @ cavity.precision[d:, :d]
        if sites is not None and len(sites.precision) != len(theta):
            sites = middle_sites(sites, len(theta))
        scale = _scales.factor(theta, q)
        posterior = conditional_ep(rows, scale, block[None], shift, sites, **options)
        sites = posterior.sites
        log_cavity = theta @ marginal.shift - mass
        log_cavity -= 0.5 * np.einsum("mi,ij,mj->m", theta, marginal.precision, theta)
        log_proposal = -0.5 * np.sum(x**2, 1) - np.sum(np.log(np.diagonal(lower)))
        log_weight = log_rule + log_cavity - log_proposal + posterior.log_z
        log_z, moments = _mixture(log_weight, theta, posterior)
        if t == 0:
            break
        placement, missed = _relocated(
            placement, gaussian.Moments(moments.mean[d:], moments.cov[d:, d:])
        )
        if not missed:
            break
    return TiltedSite(log_z, moments, SiteState(sites, placement.mean, placement.cov))


def middle_sites(sites, m):
    """Give row sites of other nodes to m nodes: those in the middle, which mattered most."""
    middle = len(sites.precision) // 2
    return Sites(*(np.repeat(part[middle][None], m, axis=0) for part in sites))


class PartsNode(NamedTuple):
    """Posterior given theta, as `GivenScales` has it.

    mean (D,) and root (D, D) are those of beta; sites are the row sites of each part and the
    messages about beta, from which a neighbour starts.
    """

    mean: np.ndarray
    root: np.ndarray
    local: Any
    log_z: float
    sites: Any


class PartsGivenTheta:
    """The model as a function of theta, for the search of nodes.

    answers(theta, cavities, sites) gives for each part, by its cavity of beta and its row sites, a
    `ConditionalPosterior` at the one node theta.
    """

    def __init__(self, answers, plan):
        self.answers, self.where, self.theta_prior = answers, plan.parts.where, plan.theta_prior
        self.n_effects, self.n_levels = plan.n_effects, plan.n_levels
        self.n_named = len(plan.levels[0])
        self.prior = gaussian.Natural(np.diag(plan.beta_sd**-2.0), np.zeros(len(plan.beta_sd)))

    def flops(self):
        """Return 0: what parts are for is not to be measured by one core."""
        return 0.0

    def first(self, theta, messages, row_sites, tol):
        """Return the `Node` at theta, from messages about phi, and the sites of rows of parts."""
        theta, (precision, shift), d = np.asarray(theta, float), messages, len(self.prior.shift)
        # what Gaussian messages about (beta, theta) imply of beta given theta
        start = gaussian.Natural(precision[:, :d, :d], shift[:, :d] - theta @ precision[:, d:, :d])
        rows = [None if s is None else middle_sites(s, 1) for s in row_sites]
        return self.evaluate(theta, (rows, start), tol)

    def evaluate(self, theta, sites, tol, max_rounds=30):
        """Return the `Node` at theta, with a `PartsNode`, started at the sites of another.

        Those are row sites and messages about beta. Messages of later rounds are positive
        semi-definite, so that their cavities stay proper.
        """
        k, d = len(self.where), len(self.prior.shift)
        none = [None] * k, gaussian.Natural(np.zeros((k, d, d)), np.zeros((k, d)))
        rows, start = none if sites is None else sites
        parts: list[Any] = []

        def tilted(cavities):
            nonlocal parts, rows
            parts = self.answers(theta, cavities, rows)
            rows = [p.sites for p in parts]
            moments = [gaussian.Moments(p.mean[0], p.root[0].T @ p.root[0]) for p in parts]
            return [TiltedSite(p.log_z[0], m, None) for p, m in zip(parts, moments, strict=True)]

        options = dict(max_iter=max_rounds - 1, tol=tol, accelerate=False)
        found = propagate(tilted, self.prior, start, **options)[0]
        total, evidence = total_of(self.prior, found.evaluation.payload), found.evaluation.record
        root, mean, _ = half_partition(*(a[None] for a in total))
        local = self._assembled([p.local for p in parts])
        known = local, evidence["log_evidence"], (rows, unpack(found.onwards))
        node = PartsNode(mean[0], root[0], *known)
        told = node.log_z, self._slope(theta, node), found.residual, node
        return Node.under(self.theta_prior, theta, *told)

    def _assembled(self, blocks):
        """Return the `LocalPart` of the named groups, in the order of their labels."""
        named = np.argsort(np.concatenate(self.where), kind="stable")[: self.n_named]
        lower, offset, gain = (
            np.concatenate(a, axis=1)[0][named] for a in zip(*blocks, strict=True)
        )
        return LocalPart.of_columns(lower, offset, gain)

    def _slope(self, theta, node):
        """Return the derivatives (T,) of the log evidence; of unnamed groups those of the named."""
        (q,), (n, _) = self.n_effects, node.local.offset.shape
        turned = (node.local.gain @ node.root.T).reshape(n, q, len(node.root))
        moment = node.local.second_moment(node.mean, turned @ turned.swapaxes(1, 2))
        return _scales.slope(theta, q, self.n_levels[0] / max(n, 1) * moment)
