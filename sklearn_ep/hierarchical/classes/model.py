"""The model of several classes with factors, as a function of the scales of the effects.

Each class has its own coefficients and effects::

    eta_ic = x_i' beta_c + sum_f w_fi' a_fc[g_f(i)],       y_i ~ softmax(eta_i),

with a_fc ~ N(0, S_f) at every level. S_f is the same for all classes, so that theta has the
coordinates of the model of two classes.

The effects a = L u of a level have whitened effects u ~ N(0, I), so that theta is in the rows and
the prior is the same at every theta. A row has D dense entries and a few more, one for each effect
it has in each factor::

        coefficients     factor 1         factor 2
    row [  x_1 .. x_D | . . w'L . . . | . w'L . . . . . ]
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator

from ..._engine.class_sites import ClassWeights, JointEP, empty_sites
from ..._engine.hyper import Node, NormalPrior
from ..._engine.noisy_argmax import QUICK_SOFTMAX
from .. import _scales
from ..exact.layout import SharedRows, shared_entries


class EffectRows(LinearOperator):
    """Rows (n, q) as an operator that knows its few entries beyond the dense columns.

    Parameters
    ----------
    X : ndarray of shape (n, D)
    at : ndarray of shape (n, E)
        Columns of the entries, counted from the end of the dense ones.
    value : ndarray of shape (n, E)
    width : int
        Number of columns beyond the dense ones.
    """

    def __init__(self, X, at, value, width):
        super().__init__(np.float64, (len(X), X.shape[1] + width))
        self.entries, self.width = SharedRows(X, at, value), width
        ends = np.arange(len(X) + 1) * at.shape[1]
        self.beyond = csr_array((value.ravel(), at.ravel(), ends), shape=(len(X), width))

    def _matmat(self, weights):
        d = self.entries.X.shape[1]
        return self.entries.X @ weights[:d] + self.beyond @ weights[d:]

    def _rmatmat(self, pull):
        return np.vstack([self.entries.X.T @ pull, self.beyond.T @ pull])

    @cached_property
    def _products(self):
        """Places (n, E E) of the products of entries in a (width, width) matrix, their values."""
        _, at, value = self.entries
        places = at[:, :, None] * self.width + at[:, None, :]
        values = value[:, :, None] * value[:, None, :]
        return places.ravel(), values.reshape(len(value), -1)

    def weighted_gram(self, weight):
        """Return the rows' weighted sum of squares (q, q) for weights (n,) of any sign."""
        X, d, width = self.entries.X, self.entries.X.shape[1], self.width
        out, weighted = np.empty((d + width, d + width)), weight[:, None] * X
        out[:d, :d] = X.T @ weighted
        out[d:, :d] = self.beyond.T @ weighted
        out[:d, d:] = out[d:, :d].T
        places, values = self._products
        mass = (weight[:, None] * values).ravel()
        out[d:, d:] = np.bincount(places, mass, minlength=width**2).reshape(width, width)
        return out

    def quadratic(self, matrix):
        """Return z' matrix z (n,) of each row z for any matrix (q, q)."""
        return self.entries.variances(0.5 * (matrix + matrix.T))


class EffectLayout(NamedTuple):
    """Where the effects of rows are, whatever the scales.

    X (n, D) are the dense columns, designs (n, q_f) those of each factor, at (n, E) the columns of
    the effects among all `width`; known (n, F) says whose level has effects in the model.
    """

    X: np.ndarray
    designs: list[np.ndarray]
    at: np.ndarray
    known: np.ndarray
    width: int

    def take(self, rows):
        """Return some of the rows."""
        designs = [w[rows] for w in self.designs]
        return EffectLayout(self.X[rows], designs, self.at[rows], self.known[rows], self.width)

    def whitened(self, lowers):
        """Return the `EffectRows` for Cholesky factors (q_f, q_f) of the effects' covariances."""
        values: list[Any] = [np.zeros((len(self.X), 0))]
        for f, design in enumerate(self.own(lowers)):
            values.append(np.where(self.known[:, f, None], design, 0.0))
        return EffectRows(self.X, self.at, np.hstack(values), self.width)

    def own(self, lowers):
        """Return the designs (n, q_f) of the whitened effects of each factor."""
        return [w @ lower for w, lower in zip(self.designs, lowers, strict=True)]

    def unseen(self, lowers):
        """Return the designs (n, q_f) of whitened effects of levels that are not known, else zero.

        One for each factor.
        """
        pairs = zip(self.known.T, self.own(lowers), strict=True)
        return [np.where(known[:, None], 0.0, w) for known, w in pairs]


def lay_out_effects(X, designs, codes, n_levels, n_named=None):
    """Return the `EffectLayout` of rows.

    Parameters
    ----------
    X : ndarray of shape (n, D)
    designs : list of ndarray of shape (n, q_f)
    codes : ndarray of shape (n, F)
        Levels as numbers.
    n_levels : list of int
        Levels of each factor that have effects.
    n_named : list of int or None, default=None
        Levels that rows to predict can have, the first ones; None for all. Other codes mean a level
        that is not known.
    """
    n_named = n_levels if n_named is None else n_named
    codes = np.asarray(codes).reshape(len(X), len(n_levels))
    known = (codes >= 0) & (codes < np.array(n_named, dtype=int))
    levels = np.where(known, codes, 0).T
    at, _ = shared_entries(len(X), designs, levels, n_levels)
    width = sum(n * w.shape[1] for n, w in zip(n_levels, designs, strict=True))
    return EffectLayout(X, list(designs), at, known, width)


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
    theta_prior : NormalPrior
        Normal prior of theta, factor by factor.
    """

    layout: EffectLayout
    y: np.ndarray
    weight: np.ndarray
    n_classes: int
    n_effects: list[int]
    n_levels: list[int]
    beta_precision: np.ndarray
    theta_prior: NormalPrior

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

    def first_sites(self):
        """Return sites (2, n, K) that say nothing."""
        return empty_sites(self.y, self.n_classes)

    def prior(self):
        """Return the prior precisions (q,) of the weights of each class."""
        return np.r_[self.beta_precision, np.ones(self.layout.width)]

    def structure(self, theta):
        """Return the `ClassWeights` of coefficients and whitened effects at theta."""
        return ClassWeights(
            self.layout.whitened(_scales.factors(theta, self.n_effects)), self.prior()
        )

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
        slope = self._slope(theta, result.evaluation.payload[0])
        found = ClassNode(result.onwards, log_z)
        return Node.under(self.theta_prior, theta, log_z, slope, result.residual, found)

    def _slope(self, theta, state):
        """Return the gradient (T,) of the log evidence.

        It is the explicit one, of the prior of the effects under their posterior: exact at a fixed
        point for two classes, and close to it for more, whose sites are a curved family.
        """
        out = np.zeros_like(theta)
        spans = zip(_scales.spans(self.n_effects), self.effect_spans(), strict=True)
        for f, (span, own) in enumerate(spans):
            q, n = self.n_effects[f], self.n_levels[f]
            mean = state.coef[:, own].reshape(-1, q)
            moment = mean.T @ mean - self.n_classes * n * np.eye(q)
            moment += level_covariances(state.spread, own, q).sum((0, 1))
            out[span] += _scales.slope(theta[span], q, moment)
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
