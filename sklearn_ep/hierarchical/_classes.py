"""Several classes jointly, with effects of groups: rows, priors, and the posterior.

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

from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax

from .._engine import class_sites, class_structures
from .._engine.gaussian import Moments, checked_cholesky
from .._engine.hyper import Node
from .._engine.noisy_argmax import QUICK_SOFTMAX, SOFTMAX
from .._engine.sites import Sites
from . import _scales
from ._layout import EffectPlaces, RowsToPredict
from ._posterior import EffectsMixture, between

_MOST_LATENT = 400_000  # rows times classes: a pass takes some seconds


def why_not_joint(n_classes, X, designs, n_levels, power):
    """Return what keeps rows from a fit of all classes jointly, "" where nothing does.

    Parameters
    ----------
    n_classes : int
    X : ndarray of shape (n, D)
        Shared columns.
    designs : list of ndarray of shape (n, q_f)
        Columns whose coefficients vary by the levels of each factor.
    n_levels : list of int
    power : float
        Share of a row's likelihood that is matched.

    Returns
    -------
    str
        The end of a sentence.
    """
    if power != 1.0:
        return f"power={power:g}; it takes power=1"
    columns = X.shape[1] + sum(w.shape[1] * n for w, n in zip(designs, n_levels, strict=True))
    if n_classes * columns > class_structures.MOST_WEIGHTS:
        return (
            f"{n_classes} classes have {n_classes * columns} coefficients and effects; the limit "
            f"is {class_structures.MOST_WEIGHTS}"
        )
    if n_classes * len(X) > _MOST_LATENT:
        return f"{len(X)} rows times {n_classes} classes are more than {_MOST_LATENT}"
    return ""


_ROW_FLOPS = 3000  # of the integrals of a row and class, next to those of the model of two classes
# Shares of a step with acceleration and without, as for coefficients of classes without groups.
_MIXING, _PLAIN_DAMPING = 0.7, 0.2


class ClassNode(NamedTuple):
    """What is kept of a node: its `Sites`, alone in a tuple.

    The posterior of the weights follows from the sites, and has (K q)^2 numbers: it is made again
    for the few nodes that matter.
    """

    sites: tuple[Sites]


class ClassesModel:
    """Rows and priors of a plan, as a function of theta.

    Parameters
    ----------
    plan : Plan
        Of its fields: rows X (n, D) with the intercept last, class indices y (n,), weight (n,),
        designs (n, q_f) and codes (n,) of each factor, n_levels, and levels, the named ones, the
        first; priors beta_sd (D,) and theta_prior.
    """

    def __init__(self, plan):
        codes = np.reshape(plan.codes, (len(plan.codes), len(plan.X))).T
        self.rows = RowsToPredict(plan.X, plan.designs, codes)
        self.y, self.weight, self.theta_prior = plan.y, plan.weight, plan.theta_prior
        self.n_classes = int(np.max(plan.y)) + 1
        self.n_effects, self.n_levels = [w.shape[1] for w in plan.designs], list(plan.n_levels)
        sizes = self.n_effects, self.n_levels, [len(known) for known in plan.levels]
        self.places = EffectPlaces(plan.beta_sd**-2.0, *sizes, None, np.zeros(0, dtype=int))
        # of the weights of a class the effects of each factor
        self.spans = list(self.places.shared_spans().values())
        self.prior = self.places.prior

    def flops(self):
        """Return about how many operations a pass takes."""
        n, d, K, e = len(self.y), self.places.n_dense, self.n_classes, sum(self.n_effects)
        return _ROW_FLOPS * n * K + n * K**2 * (d + e) ** 2 + (K * len(self.prior)) ** 3

    def first_sites(self):
        """Return sites (n, K) that say nothing."""
        return (Sites(*class_sites.empty_sites(self.y, self.n_classes)),)

    def structure(self, theta):
        """Return the `ClassWeights` of coefficients and whitened effects at theta."""
        columns = self.columns(self.rows, _scales.factors(theta, self.n_effects))
        return class_structures.ClassWeights(columns, self.prior)

    def columns(self, rows, scales):
        """Return the `SharedRows` of the weights of a class for rows of the fit.

        scales are the Cholesky factors (q_f, q_f) of the covariances of the effects.
        """
        return self.places._replace(n_named=self.n_levels).seen(rows, scales)[0]

    def weights_at(self, node):
        """Return the `WeightsAt` of a `Node`."""
        precision, shift = (self.weight[:, None] * part for part in node.payload.sites[0])
        state = self.structure(node.phi).posterior(precision, shift)
        scales = _scales.factors(node.phi, self.n_effects)
        return WeightsAt(state.coef, state.spread, scales, node.log_evidence, self)

    def posterior(self, average):
        """Return the `ClassMixture` of an average over theta."""
        return ClassMixture(self, average)

    def evaluate(self, theta, sites, tol, max_passes=_scales.MOST_PASSES):
        """Return the `Node` at theta, with a `ClassNode`, started at the sites of another.

        One pass costs O(n K^2 (D + E)^2 + (K q)^3) and n K integrals, for E effects a row.
        """
        ep = class_sites.JointEP(self.structure(theta), QUICK_SOFTMAX, self.y, self.weight)
        limits = dict(tol=tol, max_iter=max_passes, damping=_PLAIN_DAMPING, mixing=_MIXING)
        result = ep.solve(np.stack(sites[0]), accelerate=True, **limits)
        log_z = result.evaluation.record["log_evidence"]
        slope = self._slope(theta, result.evaluation.payload[0])
        found = ClassNode((Sites(*result.onwards),))
        return Node.under(self.theta_prior, theta, log_z, slope, result.residual, found)

    def _slope(self, theta, state):
        """Return the gradient (T,) of the log evidence.

        It is the explicit one, of the prior of the effects under their posterior: exact at a fixed
        point for two classes, and close to it for more, whose sites are a curved family.
        """
        moments = []
        for own, q in zip(self.spans, self.n_effects, strict=True):
            mean = state.coef[:, own].reshape(-1, q)
            moment = mean.T @ mean - len(mean) * np.eye(q)
            moments.append(moment + level_covariances(state.spread, own, q).sum((0, 1)))
        return _scales.slope(theta, self.n_effects, moments)


def level_covariances(spread, own, q):
    """Return the covariances (K, L, q, q) of whitened effects in the slice `own` of the weights.

    spread (K, S, K, S) is the covariance of all weights, of which levels have q effects each.
    """
    size = len(spread), (own.stop - own.start) // q, q
    return np.einsum("kjakjb->kjab", spread[:, own, :, own].reshape(size + size))


class WeightsAt(NamedTuple):
    """Posterior of the weights at a node.

    coef (K, q) are the means and spread (K, q, K, q) the covariance; scales are the Cholesky
    factors (q_f, q_f) of the covariances of the effects; log_z is the log evidence given theta.
    """

    coef: np.ndarray
    spread: np.ndarray
    scales: list[np.ndarray]
    log_z: float
    model: ClassesModel

    def draw(self, n_samples, rng):
        """Return draws (S, K, q) of the weights and their log densities, up to a constant."""
        size = self.coef.size
        lower = checked_cholesky(self.spread.reshape(size, size))
        white = rng.standard_normal((n_samples, size))
        weights = self.coef + (white @ lower.T).reshape(n_samples, *self.coef.shape)
        log_density = -0.5 * np.sum(white**2, axis=1) - np.sum(np.log(np.diagonal(lower)))
        return weights, log_density

    def beta(self):
        """Return means and sds (K, D) of the coefficients."""
        d = self.model.places.n_dense
        return self.coef[:, :d], np.sqrt(np.einsum("cqcq->cq", self.spread)[:, :d])

    def effects(self):
        """Return (means, variances), both (K, L_f, q_f), of the effects of each factor."""
        out = []
        for own, lower in zip(self.model.spans, self.scales, strict=True):
            cov = level_covariances(self.spread, own, len(lower))
            mean = self.coef[:, own].reshape(*cov.shape[:3]) @ lower.T
            out.append((mean, np.einsum("ab,kjbc,ac->kja", lower, cov, lower)))
        return out

    def draw_effects(self, n_samples, rng):
        """Return draws of coefficients (S, K, D), and of effects (S, K, L_f, q_f) by factor."""
        weights, out = self.draw(n_samples, rng)[0], []
        for own, lower in zip(self.model.spans, self.scales, strict=True):
            white = weights[..., own]
            out.append(white.reshape(*white.shape[:2], -1, len(lower)) @ lower.T)
        return weights[..., : self.model.places.n_dense], *out

    def _columns(self, rows):
        """Return the `SharedRows` of rows to predict, and what they have of unseen levels."""
        places = self.model.places
        return places.seen(rows, self.scales)[0], rows.unseen(places.n_named, self.scales)

    def at_rows(self, rows):
        """Return means (n, K) and covariances (n, K, K) of the linear predictors."""
        known, unseen = self._columns(rows)
        cov = class_structures.class_covariances(self.spread, known)
        for own in unseen:
            np.einsum("ncc->nc", cov)[:] += np.sum(own**2, axis=1, keepdims=True)
        return known @ self.coef.T, cov

    def between(self, one, two, same):
        """Return covariances (K, n1, n2), and the means (K, n) of both sets of rows."""
        (rows, own1), (others, own2) = self._columns(one), self._columns(two)
        spreads = (self.spread[c, :, c] for c in range(len(self.coef)))
        cov = np.array([(others @ (rows @ spread).T).T for spread in spreads])
        for alike, a, b in zip(same, own1, own2, strict=True):
            cov += alike * (a @ b.T)
        return cov, (rows @ self.coef.T).T, (others @ self.coef.T).T


class ClassMixture(EffectsMixture):
    """Mixture over nodes of normal distributions of the weights of all classes.

    Weights of a class are its D coefficients, then the whitened effects of all levels. Nodes that
    weigh next to nothing are left out.

    Parameters
    ----------
    model : ClassesModel
    average : Average
        Over theta; the payloads of its nodes are `ClassNode`.
    """

    factor = SOFTMAX

    def __init__(self, model, average):
        average = average.heavy()  # a node has (K q)^2 numbers
        self.model, self.n_classes = model, model.n_classes
        nodes = [model.weights_at(node) for node in average.nodes]
        super().__init__(average, model.n_effects, model.places.n_named, nodes)

    def beta_moments(self):
        """Return means (K, D) and covariance (K, D, K, D) of the coefficients."""
        d, weight = self.model.places.n_dense, self.average.weight
        points = np.array([node.coef[:, :d] for node in self.nodes])
        mean, cov = between(weight, points.reshape(len(points), -1))
        spreads = np.array([node.spread[:, :d, :, :d] for node in self.nodes])
        within = np.tensordot(weight, spreads, 1)
        return Moments(mean.reshape(points.shape[1:]), within + cov.reshape(within.shape))

    def _log_weight(self, node, rows, y, weight, n_samples, rng):
        known = self.model.columns(RowsToPredict(*rows), node.scales)
        weights, log_density = node.draw(n_samples, rng)
        eta = known @ weights.reshape(-1, weights.shape[2]).T
        log_p = log_softmax(eta.reshape(len(y), n_samples, -1), axis=2)
        log_joint = weight @ log_p[np.arange(len(y)), :, y]
        log_joint -= 0.5 * np.sum(weights**2, axis=1) @ self.model.prior
        log_joint += 0.5 * self.n_classes * np.sum(np.log(self.model.prior))
        return log_joint - log_density - node.log_z
