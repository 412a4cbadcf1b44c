"""Posterior of a partitioned model given theta, and of all of it where theta is normal.

Given theta the shared coefficients get a partitioned EP of their own, so that what is Gaussian is
only beta and the effects given theta. The search, the nodes and the smooth distribution of theta
are those of every other engine.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

from ..._engine.gaussian import Natural, log_partition, over
from ..._engine.hyper import Node
from ..._engine.loop import Evaluation, iterate
from ..._engine.quadrature import gauss_hermite
from .. import _log_cholesky as log_cholesky
from ..exact.given_scales import LocalPart
from ..exact.layout import GroupColumns
from .arrow import half_partition, stacked_cholesky
from .messages import Messages, pack, total_of, unpack
from .theta_nodes import middle_sites, node_rule

__all__ = ["PartsGivenTheta", "PartsNode", "gaussian_nodes", "no_groups"]

_MOST_ROUNDS = 30
_WIDE = 0.1  # sd of a log scale from which the posterior given it bends: seven nodes, not five


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

    answers(theta, messages) maps nodes (1, T) and, for each part, (precision (1, D, D), shift (1,
    D), row sites) to a list of `ConditionalPosterior`. problem is the `GroupedProblem`, messages
    those of its sites about phi, row_sites the sites of rows that parts started from, or None.
    """

    def __init__(self, answers, problem, messages, row_sites, tol):
        self.answers, self.problem, self.messages = answers, problem, messages
        self.row_sites, self.tol = row_sites, tol
        self.theta_mean, self.theta_sd = problem.theta_prior
        self.prior = prior_of_beta(problem.prior, problem.d)

    def flops(self):
        """Return 0: what parts are for is not to be measured by one core."""
        return 0.0

    def nothing(self, n_parts):
        """Return the sites of parts that have said nothing yet."""
        d = self.problem.d
        return [None] * n_parts, np.zeros((n_parts, 1, d, d + 1))

    def spans(self):
        """Return the slice of theta that belongs to the one factor."""
        return log_cholesky.spans([self.problem.q])

    @property
    def n_levels(self):
        """Number of groups."""
        return [self.problem.n_groups]

    def first(self, theta):
        """Return the `Node` at theta, from the messages about phi."""
        theta = np.asarray(theta, dtype=float)
        start = conditional_start(self.messages, theta[None], self.problem.d)
        rows = [None if s is None else middle_sites(s, 1) for s in self.row_sites]
        return self.evaluate(theta, (rows, pack(start)), self.tol)

    def evaluate(self, theta, sites, tol, max_rounds=_MOST_ROUNDS):
        """Return the `Node` at theta, with a `PartsNode`, started at the sites of another."""
        solve = partial(self.answers, theta[None])
        (found, local), residual = conditional_node(
            solve, self.prior, *sites, tol=tol, max_rounds=max_rounds
        )
        node = found._replace(local=self._assembled(local))
        log_prior = float(np.sum(norm.logpdf(theta, self.theta_mean, self.theta_sd)))
        gradient = (self.theta_mean - theta) / self.theta_sd**2 + self._slope(theta, node)
        return Node(theta, node.log_z, log_prior, gradient, residual, node)

    def _assembled(self, blocks):
        """Return the `LocalPart` of the named groups, in the order of their labels."""
        order = np.argsort(np.concatenate(self.problem.where), kind="stable")
        named = order[: self.problem.n_named]
        lower, gain, offset = (
            np.concatenate(a, axis=1)[0][named] for a in zip(*blocks, strict=True)
        )
        none = np.zeros((gain.shape[1], 0)), np.zeros(0, int), np.zeros(0, int), 0
        return LocalPart(lower, offset, GroupColumns(gain, *none))

    def _slope(self, theta, node):
        """Return the derivatives (T,) of the log evidence; of unnamed groups those of the named."""
        q, (lower, offset, gain) = self.problem.q, node.local
        if not q or not len(offset):
            return np.zeros(len(theta))
        mean = offset - gain.dot(node.mean)
        turned = gain.dense @ node.root.T
        inverse = np.linalg.inv(lower)
        cov = turned @ turned.swapaxes(1, 2) + inverse.swapaxes(1, 2) @ inverse
        moment = (cov + mean[:, :, None] * mean[:, None]).mean(0) - np.eye(q)
        return log_cholesky.slope(theta, q, self.problem.n_groups * moment)


def no_groups(d):
    """Return the `LocalPart` of a model without groups, for d coefficients."""
    none = np.zeros((0, 0)), np.zeros(0, int), np.zeros(0, int), 0
    return LocalPart(
        np.zeros((0, 0, 0)), np.zeros((0, 0)), GroupColumns(np.zeros((0, 0, d)), *none)
    )


def conditional_node(solve, prior, sites, x, *, tol, max_rounds):
    """Run partitioned EP over beta; return ((`PartsNode`, effects of each part), residual).

    solve maps a list of (precision (1, D, D), shift (1, D), sites), one a part, to a list of
    `ConditionalPosterior`; prior is that of beta; sites are the row sites of each part, x the
    packed messages (K, 1, D, D + 1) to start from, whose whole and cavities must be proper.
    Messages of later rounds are positive semi-definite, so properness is kept. It stops once no
    mean moves by more than tol sd, and no sd by a share of tol.
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
        node = PartsNode(mean[0], root[0], None, float(log_z[0]), (sites, target))
        return Evaluation(target, residual, payload=(node, [p.local for p in parts]))

    found = iterate(evaluate, x, max_iter=max_rounds - 1, tol=tol)
    return found.evaluation.payload, found.evaluation.residual


def gaussian_nodes(posterior, d):
    """Return nodes, weights and the posterior of beta given them for a Gaussian in phi.

    posterior is that of phi = (beta, theta), d the length of beta. The nodes theta (M, T) and
    weights (M,) are of the quadrature rule for the marginal Gaussian of theta; of beta given each
    node it is (mean (M, D), root (D, D)).
    """
    whole = half_partition(stacked_cholesky(posterior.precision[None]), posterior.shift[None])
    root, mean = whole[0][0], whole[1][0]
    cov = root[:, d:].T @ root[:, d:]
    x, log_weight = _prediction_rule(cov)
    theta = mean[d:] + x @ np.linalg.cholesky(cov).T if len(cov) else x
    shift = posterior.shift[:d] - theta @ posterior.precision[d:, :d]
    lower = np.broadcast_to(np.linalg.cholesky(posterior.precision[:d, :d]), (len(theta), d, d))
    beta = half_partition(lower, shift)
    return theta, np.exp(log_weight), (beta[1], beta[0][0])


def _prediction_rule(cov):
    t = len(cov)
    if t == 1 and cov[0, 0] > _WIDE**2:
        x, w = gauss_hermite(7)
        return x[:, None], np.log(w)
    return node_rule(t)


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
