"""More than two classes jointly: the softmax in weight space, by EP with the sites of the engine.

The bounds of the binary problem have a counterpart for several classes whose inner problem
oscillates under wide priors; expectation propagation needs one integral a row and no inner loop.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky

from .._engine.class_weights import MOST_WEIGHTS, ClassWeights, class_covariances
from .._engine.classes import (
    CLASS_LIKELIHOODS,
    ClassSites,
    JointEP,
    class_log_weights,
    class_update,
    empty_sites,
)
from .._engine.loop import SILENT
from .._estimator.checks import LARGEST_IN_UNITS, check_column_scales, refuse_joint
from .._estimator.fitting import BinaryFit
from .._estimator.summary import interval_of
from ._nodes import single_node
from ._parameters import is_flat, make_prior, refuse_integration
from ._priors import SlopeSearch
from ._problem import class_weights
from ._systems import Design, with_ones

__all__ = [
    "JointProblem",
    "JointWeightPosterior",
    "fit_joint",
    "joint_log_weights",
    "joint_problem",
    "takes_joint",
]

# Range of the log of the factor by which learning multiplies the prior variances, and how closely
# it is found: the evidence is flat to some hundredths of a nat there. Wider priors on separable
# classes change no probability that matters, and cost EP the digits that weights and repeated rows
# have in common.
_RANGE, _CLOSE = (-5.0, 7.0), 0.05
# Or the search ends where a step promises no more than this many nats of evidence in all.
_LITTLE = 0.05
_MOST_FACTORS, _PLACE_SWEEPS = 30, 100
_TINY = np.finfo(float).tiny
# Share of a step where acceleration has not settled: with rows of weight 1000 steps of a half go on
# to oscillate after hundreds of sweeps, and smaller ones have not arrived.
_PLAIN_DAMPING = 0.2
# Sweeps in place of one outer step of the binary problem, which costs several Newton steps.
_SWEEPS = 3
# Residual of the sites while the prior variance moves: a share of its last step, within a range.
_STEP_SHARE, _LEARNING_TOL = 0.2, (1e-2, 0.5)


@dataclass
class JointProblem:
    """Everything the joint fit needs; `sites` (2, n, K) are those to start from."""

    design: Design
    weight: np.ndarray
    prior: Any
    factor: Any
    sites: np.ndarray
    tol: float
    max_iter: int
    damping: float
    shape: tuple
    variance: str = "exact"
    solver: str = "primal"

    @property
    def sizes(self):
        """Rows of the one part that is in memory."""
        return [len(self.weight)]

    def ep(self, y, factor=1.0):
        """Return the fixed-point map of EP with the variances of the columns times a factor."""
        structure = ClassWeights(self.design.B, self.prior.precision(factor))
        return JointEP(structure, self.factor, y, self.weight)

    def solve(self, ep, sites, tol, monitor=SILENT, **given):
        """Run EP from sites, by limits of the problem unless others are given."""
        damping = min(self.damping, _PLAIN_DAMPING)
        limits = dict(tol=tol, max_iter=self.max_iter, damping=damping)
        return ep.solve(sites, accelerate=True, monitor=monitor, **limits | given)

    def posterior(self, payload):
        """Return what predicts as if the fit ended with this payload."""
        return JointWeightPosterior(payload[0], self.design.intercept, self.factor)


class JointWeightPosterior:
    """Posterior of the weights (K, q) of the linear predictors of all classes."""

    def __init__(self, state, intercept, factor):
        self.mean, self.spread = state.coef, state.spread
        self.intercept, self.factor = intercept, factor

    @property
    def n_classes(self):
        """Number of classes."""
        return len(self.mean)

    def latent_mean(self, X):
        """Return the means (n_new, K) of the predictors."""
        return np.asarray(with_ones(X, self.intercept) @ self.mean.T)

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the predictors at new rows."""
        B = with_ones(X, self.intercept)
        return np.asarray(B @ self.mean.T), class_covariances(self.spread, B)

    def coefficient_variance(self):
        """Return the variances (K, q) of the weights."""
        return np.einsum("cqcq->cq", self.spread)

    def coefficient_interval(self, level):
        """Return central intervals (K, q, 2) of the weights."""
        return interval_of(self.mean, np.sqrt(self.coefficient_variance()), level)

    def covariance(self, X1, X2, c, j):
        """Return the covariance (n1, n2) of the predictors of classes c and j between new rows."""
        B1, B2 = with_ones(X1, self.intercept), with_ones(X2, self.intercept)
        return np.asarray((B2 @ (B1 @ self.spread[c, :, j]).T).T)

    def joined(self, X, y):
        """Return a new posterior with rows included one after another, and log p of their labels.

        Each row gets the site that matches moments given the rows before it; O((K q)^2 K) a row.
        """
        new, log_prob = copy.copy(self), 0.0
        B = with_ones(X, self.intercept)
        for b, label in zip(B.toarray() if sp.issparse(B) else B, y, strict=True):
            gain = np.einsum("cqjp,p->cqj", new.spread, b)
            mean, cov = new.mean @ b, np.einsum("cqj,q->cj", gain, b)
            empty = ClassSites(*empty_sites(label[None], new.n_classes))
            update = class_update(self.factor, label[None], empty, mean[None], cov[None], 0.0)
            d, shift = (a[0] for a in update.sites)
            T = np.diag(d) - np.outer(d, d) / d.sum()
            lessened = np.linalg.solve(
                np.eye(len(d)) + T @ cov, np.column_stack([T, shift - T @ mean])
            )
            new.mean = new.mean + gain @ lessened[:, -1]
            new.spread = new.spread - np.einsum("cqj,jk,rsk->cqrs", gain, lessened[:, :-1], gain)
            log_prob += float(update.tilted.log_z[0])
        return new, log_prob

    def sample(self, n_samples, rng):
        """Return draws (K, n_samples, q) of the weights."""
        size = self.mean.size
        lower = cholesky(self.spread.reshape(size, size), lower=True)
        draws = rng.standard_normal((n_samples, size)) @ lower.T
        return (self.mean + draws.reshape(n_samples, *self.mean.shape)).transpose(1, 0, 2)

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K) of the predictors at new rows."""
        B = with_ones(X, self.intercept)
        each = [np.asarray((B @ draws.T).T) for draws in self.sample(n_samples, rng)]
        return np.stack(each, axis=2)


def takes_joint(estimator, d):
    """Return whether all classes of a fit to d columns get one joint posterior.

    Raises a ValueError where that is asked for and another parameter excludes it.
    """
    if len(estimator.classes_) == 2 or estimator.multi_class == "one_vs_rest":
        return False
    size = len(estimator.classes_) * (d + bool(estimator.fit_intercept))
    excluding = {
        "prior": estimator.prior != "gaussian",
        "bound='local'": estimator.bound == "local",
        f"variance={estimator.variance!r}": estimator.variance not in ("auto", "exact"),
        f"solver={estimator.solver!r}": estimator.solver not in ("auto", "primal"),
        "prior_groups": estimator.prior_groups is not None,
        "intercept_prior_variance=inf": is_flat(estimator),
        f"{size} coefficients of all classes, of {MOST_WEIGHTS} at most": size > MOST_WEIGHTS,
    }
    found = [name for name, excludes in excluding.items() if excludes]
    for name in found:
        refuse_joint(estimator, name)
    return not found


def joint_problem(estimator, training):
    """Return the `JointProblem` of checked training data."""
    check_column_scales(estimator, training.X, LARGEST_IN_UNITS)
    refuse_integration(estimator, "several classes jointly")
    design = Design(training.X, bool(estimator.fit_intercept))
    n_classes = len(estimator.classes_)
    sites = empty_sites(training.y, n_classes)
    shape = (*design.shape, n_classes, "joint", None)
    last, last_shape = getattr(estimator, "_warm_state", ([], None))
    if estimator.warm_start and last_shape == shape:
        sites = last[0]
    return JointProblem(
        design=design,
        weight=training.weight * class_weights(estimator, training),
        prior=make_prior(estimator, training.X.shape[1]),
        factor=CLASS_LIKELIHOODS["logit"],
        sites=sites,
        tol=estimator.tol,
        max_iter=_SWEEPS * estimator.max_iter,
        damping=estimator.damping,
        shape=shape,
    )


def _learned_factor(problem, y):
    """Return the factor of the prior variances where the evidence is level, and the sites there.

    Its slope in the log of the factor is half of the expected squares of the coefficients, in units
    of their prior variances, less their number. MacKay's update leads towards the root. The search
    ends at a factor where the sites do not settle: its slope says nothing.
    """
    sites, d = problem.sites, problem.prior.n_features
    place, search, (tight, tol) = 0.0, SlopeSearch(_RANGE), _LEARNING_TOL
    for _ in range(_MOST_FACTORS):
        ep = problem.ep(y, float(np.exp(place)))
        most = min(problem.max_iter, _PLACE_SWEEPS)
        result = problem.solve(ep, sites, max(problem.tol, tol), max_iter=most)
        sites, state = result.x, result.evaluation.payload[0]
        precision, var = ep.structure.prior[:d], np.einsum("cqcq->cq", state.spread)[:, :d]
        squares, known = (
            float(np.sum(precision * state.coef[:, :d] ** 2)),
            float(state.coef[:, :d].size - np.sum(precision * var)),
        )
        slope = 0.5 * (squares - known)
        step = float(np.log(max(squares, _TINY) / max(known, _TINY)))
        before, place = place, search(place, slope, step)
        if not result.converged:
            place = before
            break
        change = abs(place - before)
        near = change < _CLOSE or abs(slope) * change < _LITTLE
        if near and tol == tight:
            break
        tol = tight if near else float(np.clip(_STEP_SHARE * change, *_LEARNING_TOL))
    return float(np.exp(place)), sites


def fit_joint(problem, y, monitor, k):
    """Learn the prior variance if asked, converge EP, and return the one `BinaryFit`."""
    factor, sites = _learned_factor(problem, y) if problem.prior.learn else (1.0, problem.sites)
    ep = problem.ep(y, factor)
    result = problem.solve(ep, sites, problem.tol, monitor)
    state, update = result.evaluation.payload
    posterior = problem.posterior((state, update))
    variance = posterior.coefficient_variance()
    evidence = float(result.evaluation.record["log_evidence"])
    attributes = dict(
        site_precision=result.x[0].T,
        site_shift=result.x[1].T,
        marginal_variance=np.einsum("ncc->cn", state.cov),
        scale=factor,
        dof=variance.shape[1] - variance @ ep.structure.prior,
        n_products=0,
        n_newton=0,
        n_passes=0,
        evidence_std=0.0,
        last=result.x,
        average=single_node(problem.prior, factor, evidence),
    )
    return BinaryFit(posterior, result.history, result.reason, evidence, attributes)


def joint_log_weights(posterior, X, y, weight, sites, n_draws, rng):
    """Return log weights of draws of the weights to the true posterior, given the sites."""
    latent = posterior.draw(X, n_draws, rng)
    return class_log_weights(posterior.factor, y, weight, sites, latent)
