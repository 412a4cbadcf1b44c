"""More than two classes jointly: the softmax in weight space, by EP with the sites of the engine.

The bounds of the binary problem have a counterpart for several classes whose inner problem
oscillates under wide priors; expectation propagation needs one integral a row and no inner loop.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky
from sklearn.utils import check_random_state

from .._engine.class_sites import (
    ClassSites,
    JointEP,
    class_cavities,
    class_log_weights,
    class_update,
    contrast_variances,
    empty_sites,
)
from .._engine.class_weights import MOST_WEIGHTS, ClassWeights, class_covariances
from .._engine.loop import SILENT
from .._engine.noisy_argmax import QUICK_SOFTMAX, SOFTMAX
from .._estimator.checks import LARGEST_IN_UNITS, check_column_scales, refuse_joint
from .._estimator.fitting import BinaryFit
from .._estimator.summary import interval_of
from ._calibration import Cavities, calibrated_classes
from ._copies import Copies, find_copies
from ._factor_search import FactorAt, best_log_factor
from ._joint_sampled import MIXING, SampledJointProblem, fit_joint_sampled
from ._parameters import is_flat, refuse_integration
from ._priors import make_prior
from ._problem import class_weights, evidence_probes, single_node
from ._systems import Design, with_ones

__all__ = [
    "JointProblem",
    "JointWeightPosterior",
    "fit_joint",
    "joint_log_weights",
    "joint_problem",
    "takes_joint",
]

# Sweeps for one prior variance of the search, and residual of the sites there, fine and rough.
_PLACE_SWEEPS, _PLACE_TOL = 30, (0.05, 0.3)
# Share of a step where acceleration has not settled: with rows of weight 1000 steps of a half go on
# to oscillate after hundreds of sweeps, and smaller ones have not arrived.
_PLAIN_DAMPING = 0.2
# Sweeps in place of one outer step of the binary problem, which costs several Newton steps.
_SWEEPS = 3


@dataclass
class JointProblem:
    """Everything the joint fit needs; `sites` (2, n, K) are those to start from.

    Rows are merged, `copies` says how.
    """

    design: Design
    copies: Copies
    weight: np.ndarray
    prior: Any
    factor: Any
    sites: np.ndarray
    tol: float
    max_iter: int
    damping: float
    shape: tuple
    calibration: str | None
    variance: str = "exact"
    solver: str = "primal"

    @property
    def n_rows(self):
        """Number of all rows that were given."""
        return len(self.copies.group)

    def ep(self, y, factor=1.0):
        """Return the fixed-point map of EP with the variances of the columns times a factor."""
        structure = ClassWeights(self.design.B, self.prior.precision(factor))
        return JointEP(structure, self.factor, y, self.weight)

    def solve(self, ep, sites, tol, monitor=SILENT, **given):
        """Run EP from sites, by limits of the problem unless others are given."""
        damping = min(self.damping, _PLAIN_DAMPING)
        limits = dict(tol=tol, max_iter=self.max_iter, damping=damping, mixing=MIXING)
        return ep.solve(sites, accelerate=True, monitor=monitor, **limits | given)

    def posterior(self, payload):
        """Return what predicts as if the fit ended with this payload."""
        state = payload[0]
        return JointWeightPosterior(state.coef, ClassSpread(state.spread), self.design.intercept)


class ClassSpread:
    """Covariance of the weights of all classes as an array (K, q, K, q)."""

    def __init__(self, array):
        self.array = array

    def variance(self):
        """Return the variances (K, q) of the weights."""
        return np.einsum("cqcq->cq", self.array)

    def rows(self, B):
        """Return the covariances (n, K, K) of the predictors of rows."""
        return class_covariances(self.array, B)

    def between(self, B1, B2, c, j):
        """Return the covariance (n1, n2) of class c at rows and class j at other rows."""
        return np.asarray((B2 @ (B1 @ self.array[c, :, j]).T).T)

    def weights_with(self, B, c, j):
        """Return the covariance (q, n) of the weights of class c with class j at rows."""
        return np.ascontiguousarray(np.asarray(B @ self.array[j, :, c]).T)

    def draw(self, n_samples, rng):
        """Return draws (K, n_samples, q) of the weights about their means."""
        K, q = self.array.shape[:2]
        lower = cholesky(self.array.reshape(K * q, K * q), lower=True)
        draws = rng.standard_normal((n_samples, K * q)) @ lower.T
        return draws.reshape(n_samples, K, q).transpose(1, 0, 2)


class JointWeightPosterior:
    """Posterior of the weights (K, q) of the linear predictors of all classes.

    `spread` is a `ClassSpread`, or offers the same without an array. What the posterior says of
    predictors has a slope and a temper, what it says of weights never has.
    """

    factor = SOFTMAX

    def __init__(self, mean, spread, intercept, slope=1.0, temper=1.0):
        self.mean, self.spread = mean, spread
        self.intercept, self.slope, self.temper = intercept, slope, temper

    @property
    def n_classes(self):
        """Number of classes."""
        return len(self.mean)

    def latent_mean(self, X):
        """Return the means (n_new, K) of the predictors."""
        return self.slope * np.asarray(with_ones(X, self.intercept) @ self.mean.T)

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the predictors at new rows."""
        B = with_ones(X, self.intercept)
        cov = self.slope**2 * self.temper * self.spread.rows(B)
        return self.slope * np.asarray(B @ self.mean.T), cov

    def coefficient_variance(self):
        """Return the variances (K, q) of the weights."""
        return self.spread.variance()

    def coefficient_interval(self, level):
        """Return central intervals (K, q, 2) of the weights."""
        return interval_of(self.mean, np.sqrt(self.coefficient_variance()), level)

    def covariance(self, X1, X2, c, j):
        """Return the covariance (n1, n2) of the predictors of classes c and j between new rows."""
        B1, B2 = with_ones(X1, self.intercept), with_ones(X2, self.intercept)
        return self.slope**2 * self.temper * self.spread.between(B1, B2, c, j)

    def covariance_with(self, X2, c, j):
        """Return the map from rows X1 to `covariance(X1, X2, c, j)`; q n2 numbers are kept."""
        weights = self.spread.weights_with(with_ones(X2, self.intercept), c, j)
        weights *= self.slope**2 * self.temper
        return lambda X1: np.asarray(with_ones(X1, self.intercept) @ weights)

    def joined(self, X, y):
        """Return a new posterior with rows included one after another, and log p of their labels.

        Each row gets the site that matches moments given the rows before it; O((K q)^2 K) a row.
        """
        if not isinstance(self.spread, ClassSpread):
            raise ValueError(
                "condition_on needs the covariance of the coefficients of all classes, which is "
                "not there where variances are sampled: fit with multi_class='one_vs_rest'."
            )
        new, spread, log_prob = copy.copy(self), self.spread.array, 0.0
        B = with_ones(X, self.intercept)
        for b, label in zip(B.toarray() if sp.issparse(B) else B, y, strict=True):
            gain = np.einsum("cqjp,p->cqj", spread, b)
            mean, cov = new.mean @ b, np.einsum("cqj,q->cj", gain, b)
            empty = ClassSites(*empty_sites(label[None], new.n_classes))
            update = class_update(self.factor, label[None], empty, mean[None], cov[None], 0.0)
            d, shift = (a[0] for a in update.sites)
            T = np.diag(d) - np.outer(d, d) / d.sum()
            lessened = np.linalg.solve(
                np.eye(len(d)) + T @ cov, np.column_stack([T, shift - T @ mean])
            )
            new.mean = new.mean + gain @ lessened[:, -1]
            spread = spread - np.einsum("cqj,jk,rsk->cqrs", gain, lessened[:, :-1], gain)
            log_prob += float(update.tilted.log_z[0])
        new.spread = ClassSpread(spread)
        return new, log_prob

    def sample(self, n_samples, rng):
        """Return draws (K, n_samples, q) of the weights."""
        return self.mean[:, None] + self.spread.draw(n_samples, rng)

    def predictors(self, X, weights):
        """Return the predictors (n_samples, n_new, K) of draws (K, n_samples, q) of the weights."""
        B = with_ones(X, self.intercept)
        return np.stack([np.asarray((B @ draws.T).T) for draws in weights], axis=2)

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K) of the predictors at new rows."""
        away = self.predictors(X, self.sample(n_samples, rng) - self.mean[:, None])
        return self.latent_mean(X) + self.slope * np.sqrt(self.temper) * away


def takes_joint(estimator, d):
    """Return how all classes of a fit to d columns get one joint posterior: "exact", "sampled".

    None where they do not. Raises a ValueError where that is asked for and another parameter
    excludes it.
    """
    if len(estimator.classes_) == 2 or estimator.multi_class == "one_vs_rest":
        return None
    size = len(estimator.classes_) * (d + bool(estimator.fit_intercept))
    asked = estimator.multi_class == "joint" and estimator.variance == "calibrated"
    how = "sampled" if size > MOST_WEIGHTS or asked else "exact"
    variances, solvers = ("exact", "primal") if how == "exact" else ("calibrated", "cg")
    excluding = {
        "prior": estimator.prior != "gaussian",
        "bound='local'": estimator.bound == "local",
        f"variance={estimator.variance!r}": estimator.variance not in ("auto", variances),
        f"solver={estimator.solver!r}": estimator.solver not in ("auto", solvers),
        "prior_groups": estimator.prior_groups is not None,
        "intercept_prior_variance=inf": is_flat(estimator),
    }
    found = [name for name, excludes in excluding.items() if excludes]
    for name in found:
        refuse_joint(estimator, name)
    return None if found else how


def joint_problem(estimator, training):
    """Return the `JointProblem` of checked training data, or that with sampled variances."""
    check_column_scales(estimator, training.X, LARGEST_IN_UNITS)
    refuse_integration(estimator, "several classes jointly")
    if takes_joint(estimator, training.X.shape[1]) == "sampled":
        return _sampled_problem(estimator, training)
    weight = training.weight * class_weights(estimator, training)
    copies = find_copies(training.X, training.y, weight)
    design = Design(training.X[copies.first], bool(estimator.fit_intercept))
    n_classes = len(estimator.classes_)
    sites = empty_sites(training.y[copies.first], n_classes)
    shape = (*design.shape, n_classes, "joint", None)
    last, last_shape = getattr(estimator, "_warm_state", ([], None))
    if estimator.warm_start and last_shape == shape:
        sites = last[0]
    return JointProblem(
        design=design,
        copies=copies,
        weight=copies.weight,
        prior=make_prior(estimator, training.X.shape[1]),
        factor=QUICK_SOFTMAX,
        sites=sites,
        tol=estimator.tol,
        max_iter=_SWEEPS * estimator.max_iter,
        damping=estimator.damping,
        shape=shape,
        calibration=estimator.calibration,
    )


def _sampled_problem(estimator, training):
    """Return the `SampledJointProblem` of checked training data."""
    weight = training.weight * class_weights(estimator, training)
    copies = find_copies(training.X, training.y, weight)
    design = Design(training.X[copies.first], bool(estimator.fit_intercept))
    (n, q), K, k = design.shape, len(estimator.classes_), estimator.n_variance_samples
    rng = check_random_state(estimator.random_state)
    prior = make_prior(estimator, training.X.shape[1])
    return SampledJointProblem(
        design=design,
        copies=copies,
        prior=prior,
        of_weights=rng.standard_normal((q * K, k)),
        of_rows=rng.standard_normal((n, K, k)),
        evidence_probes=evidence_probes(estimator, q * K, rng),
        tol=estimator.tol,
        max_iter=estimator.max_iter,
        damping=estimator.damping,
        shape=(n, q, K, "joint sampled", None),
        calibration=estimator.calibration,
        make_posterior=partial(JointWeightPosterior, intercept=design.intercept),
    )


def _learned_factor(problem, y):
    """Return the factor of the prior variances with the largest evidence, and the sites there."""
    found, d = {0.0: problem.sites}, problem.prior.n_features
    most = min(problem.max_iter, _PLACE_SWEEPS)

    def nearest(at):
        return found[min(found, key=lambda other: abs(other - at))]

    def place(at, rough):
        ep = problem.ep(y, float(np.exp(at)))
        tol = max(problem.tol, _PLACE_TOL[rough])
        result = problem.solve(ep, nearest(at), tol, max_iter=most)
        if not result.converged:
            return None
        found[at], state = result.x, result.evaluation.payload[0]
        precision, coef = ep.structure.prior[:d], state.coef[:, :d]
        var = np.einsum("cqcq->cq", state.spread)[:, :d]
        squares, known = np.sum(precision * coef**2), coef.size - np.sum(precision * var)
        return FactorAt.of(at, result.evaluation.record["log_evidence"], squares, known)

    best = best_log_factor(place)
    return float(np.exp(best)), nearest(best)


def fit_joint(problem, y, monitor, k):
    """Learn the prior variance if asked, converge EP, and return the one `BinaryFit`."""
    if isinstance(problem, SampledJointProblem):
        return fit_joint_sampled(problem, y, monitor, k)
    y = y[problem.copies.first]
    factor, sites = _learned_factor(problem, y) if problem.prior.learn else (1.0, problem.sites)
    ep = problem.ep(y, factor)
    result = problem.solve(ep, sites, problem.tol, monitor)
    state, update = result.evaluation.payload
    posterior = problem.posterior((state, update))
    left_out = _left_out(problem, y, result.x, state)
    posterior.slope, posterior.temper = left_out.slope, left_out.temper
    variance = posterior.coefficient_variance()
    evidence = float(result.evaluation.record["log_evidence"])
    attributes = dict(
        marginal_variance=np.einsum("ncc->cn", state.cov),
        scale=factor,
        dof=variance.shape[1] - variance @ ep.structure.prior,
        n_products=0,
        n_newton=0,
        n_passes=0,
        evidence_std=0.0,
        last=result.x,
        average=single_node(problem.prior, factor, evidence),
        left_out=left_out,
    )
    attributes = problem.copies.of_class_rows(attributes, result.x)
    return BinaryFit(posterior, result.history, result.reason, evidence, attributes)


def _left_out(problem, y, sites, state):
    """Return the `LeftOut` of the rows, whose cavities are as far apart as labels can tell."""
    without = class_cavities(ClassSites(*sites), state.mean, state.cov)
    var = np.where(without.proper[:, None], contrast_variances(without.cov), np.nan)
    left = Cavities(without.mean.T, var.T)
    return calibrated_classes(problem.factor, y, problem.weight, left, problem.calibration)


def joint_log_weights(posterior, X, y, weight, sites, n_draws, rng):
    """Return log weights of draws of the weights to the true posterior, given the sites."""
    latent = posterior.predictors(X, posterior.sample(n_draws, rng))
    return class_log_weights(posterior.factor, y, weight, sites, latent)
