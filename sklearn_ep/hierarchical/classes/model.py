"""The model of several classes with factors, as a function of the scales of the effects.

Each class has its own coefficients and effects::

    eta_ic = x_i' beta_c + sum_f w_fi' a_fc[g_f(i)],       y_i ~ softmax(eta_i),

with a_fc ~ N(0, S_f) at every level. S_f is the same for all classes, so that theta has the
coordinates of the model of two classes.
"""

from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from ..._engine.class_sites import JointEP, empty_sites
from ..._engine.class_weights import ClassWeights
from ..._engine.hyper import Node
from ..._engine.noisy_argmax import QUICK_SOFTMAX
from .. import _log_cholesky as log_cholesky
from .rows import EffectLayout

__all__ = ["ClassNode", "ClassesModel", "level_covariances"]

_MOST_PASSES = 60  # at one theta
_ROW_FLOPS = 3000  # of the integrals of a row and class, next to those of the model of two classes
# Shares of a step with acceleration and without, as for coefficients of classes without groups.
_MIXING, _PLAIN_DAMPING = 0.7, 0.2


class ClassNode(NamedTuple):
    """What is kept of a node: its sites (2, n, K), and the log evidence given theta.

    The posterior of the weights follows from the sites, and has (K q)^2 numbers: it is made again
    for the few nodes that matter.
    """

    sites: np.ndarray
    log_z: float


class ClassesModel(NamedTuple):
    """Rows and priors.

    Attributes
    ----------
    layout : EffectLayout
    y : ndarray of shape (n,)
        Class indices.
    weight : ndarray of shape (n,)
        Copies of each row.
    n_classes : int
    n_effects, n_levels : list of int
        Varying coefficients and levels of each factor.
    beta_precision : ndarray of shape (D,)
        Prior precisions of the coefficients of each class.
    theta_mean, theta_sd : ndarray of shape (T,)
        Normal prior of theta, factor by factor.
    """

    layout: EffectLayout
    y: np.ndarray
    weight: np.ndarray
    n_classes: int
    n_effects: list[int]
    n_levels: list[int]
    beta_precision: np.ndarray
    theta_mean: np.ndarray
    theta_sd: np.ndarray

    def spans(self):
        """Return the slice of theta that belongs to each factor."""
        return log_cholesky.spans(self.n_effects)

    def effect_spans(self):
        """Return the slice of the weights of a class that belongs to the effects of each factor."""
        sizes = [q * n for q, n in zip(self.n_effects, self.n_levels, strict=True)]
        ends = len(self.beta_precision) + np.cumsum([0, *sizes])
        return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def flops(self):
        """Return about how many operations a pass takes."""
        (n, e), d, K = self.layout.at.shape, len(self.beta_precision), self.n_classes
        size = K * (d + self.layout.width)
        return _ROW_FLOPS * n * K + n * K**2 * (d + e) ** 2 + size**3

    def factors_of(self, theta):
        """Return the Cholesky factor (q_f, q_f) of the covariance of each factor's effects."""
        return log_cholesky.factors(theta, self.n_effects)

    def first_sites(self):
        """Return sites (2, n, K) that say nothing."""
        return empty_sites(self.y, self.n_classes)

    def prior(self):
        """Return the prior precisions (q,) of the weights of each class."""
        return np.r_[self.beta_precision, np.ones(self.layout.width)]

    def structure(self, theta):
        """Return the `ClassWeights` of coefficients and whitened effects at theta."""
        return ClassWeights(self.layout.whitened(self.factors_of(theta)), self.prior())

    def posterior(self, theta, sites):
        """Return means (K, q) and covariance (K, q, K, q) of the weights for sites (2, n, K)."""
        copies = self.weight[:, None]
        state = self.structure(theta).posterior(copies * sites[0], copies * sites[1])
        return state.coef, state.spread

    def evaluate(self, theta, sites, tol, max_passes=_MOST_PASSES):
        """Return the `Node` at theta, with a `ClassNode`, started at sites (2, n, K).

        One pass costs O(n K^2 (D + E)^2 + (K q)^3) and n K integrals, for E effects a row.
        """
        ep = JointEP(self.structure(theta), QUICK_SOFTMAX, self.y, self.weight)
        limits = dict(tol=tol, max_iter=max_passes, damping=_PLAIN_DAMPING, mixing=_MIXING)
        result = ep.solve(sites, accelerate=True, **limits)
        log_z = result.evaluation.record["log_evidence"]
        log_prior = float(np.sum(norm.logpdf(theta, self.theta_mean, self.theta_sd)))
        gradient = self._gradient(theta, result.evaluation.payload[0])
        found = ClassNode(result.onwards, log_z)
        return Node(theta, log_z, log_prior, gradient, result.residual, found)

    def _gradient(self, theta, state):
        """Return the gradient (T,) of the log density of theta.

        It is the explicit one, of the prior of the effects under their posterior: exact at a fixed
        point for two classes, and close to it for more, whose sites are a curved family.
        """
        out = (self.theta_mean - theta) / self.theta_sd**2
        for f, (span, own) in enumerate(zip(self.spans(), self.effect_spans(), strict=True)):
            q, n = self.n_effects[f], self.n_levels[f]
            mean = state.coef[:, own].reshape(-1, q)
            moment = mean.T @ mean - self.n_classes * n * np.eye(q)
            moment += level_covariances(state.spread, own, q).sum((0, 1))
            out[span] += log_cholesky.slope(theta[span], q, moment)
        return out


def level_covariances(spread, own, q):
    """Return the covariances (K, L, q, q) of whitened effects in the slice `own` of the weights.

    spread (K, S, K, S) is the covariance of all weights, of which levels have q effects each.
    """
    return np.array([_level_blocks(spread[c, own, c, own], q) for c in range(len(spread))])


def _level_blocks(cov, q):
    """Return the blocks (L, q, q) on the diagonal of cov (L q, L q)."""
    blocks = cov.reshape(len(cov) // q, q, len(cov) // q, q)
    return np.einsum("japb->jpab", blocks)[np.arange(len(blocks)), np.arange(len(blocks))]
