"""More than two classes jointly: the softmax in weight space, by EP with the sites of the engine.

The bounds of the binary problem have a counterpart for several classes whose inner problem
oscillates under wide priors; expectation propagation needs one integral a row and no inner loop.
"""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky

from .._engine.class_weights import MOST_WEIGHTS, ClassWeights, class_covariances
from .._engine.classes import (
    QUICK_SOFTMAX,
    SOFTMAX,
    ClassSites,
    JointEP,
    class_cavities,
    class_log_weights,
    class_update,
    contrast_variances,
    empty_sites,
)
from .._engine.loop import SILENT
from .._estimator.checks import LARGEST_IN_UNITS, check_column_scales, refuse_joint
from .._estimator.fitting import BinaryFit
from .._estimator.summary import interval_of
from ._calibration import Cavities, calibrated_classes
from ._nodes import single_node
from ._parameters import is_flat, make_prior, refuse_integration
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
_LITTLE = 0.3
# Longest step of the search, and distance from which on two evidences tell a slope.
_FURTHEST, _APART = 2.0, 0.3
# The first step is no shorter, and upwards where MacKay's is: where classes are many his slope is
# too low by some nats.
_FIRST = 1.0
_MOST_FACTORS, _PLACE_SWEEPS = 15, 30
# Residual of the sites where the search begins, and where it compares evidences.
_FIRST_TOL, _PLACE_TOL = 0.15, 0.05
_TINY = np.finfo(float).tiny
# Share of a step where acceleration has not settled: with rows of weight 1000 steps of a half go on
# to oscillate after hundreds of sweeps, and smaller ones have not arrived.
_PLAIN_DAMPING = 0.2
# Sweeps in place of one outer step of the binary problem, which costs several Newton steps.
_SWEEPS = 3


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
    calibration: str | None
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
        return JointWeightPosterior(payload[0], self.design.intercept)


class JointWeightPosterior:
    """Posterior of the weights (K, q) of the linear predictors of all classes.

    What it says of predictors has a slope and a temper, what it says of weights never has.
    """

    factor = SOFTMAX

    def __init__(self, state, intercept, slope=1.0, temper=1.0):
        self.mean, self.spread = state.coef, state.spread
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
        cov = self.slope**2 * self.temper * class_covariances(self.spread, B)
        return self.slope * np.asarray(B @ self.mean.T), cov

    def coefficient_variance(self):
        """Return the variances (K, q) of the weights."""
        return np.einsum("cqcq->cq", self.spread)

    def coefficient_interval(self, level):
        """Return central intervals (K, q, 2) of the weights."""
        return interval_of(self.mean, np.sqrt(self.coefficient_variance()), level)

    def covariance(self, X1, X2, c, j):
        """Return the covariance (n1, n2) of the predictors of classes c and j between new rows."""
        B1, B2 = with_ones(X1, self.intercept), with_ones(X2, self.intercept)
        cov = np.asarray((B2 @ (B1 @ self.spread[c, :, j]).T).T)
        return self.slope**2 * self.temper * cov

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

    def predictors(self, X, weights):
        """Return the predictors (n_samples, n_new, K) of draws (K, n_samples, q) of the weights."""
        B = with_ones(X, self.intercept)
        return np.stack([np.asarray((B @ draws.T).T) for draws in weights], axis=2)

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K) of the predictors at new rows."""
        away = self.predictors(X, self.sample(n_samples, rng) - self.mean[:, None])
        return self.latent_mean(X) + self.slope * np.sqrt(self.temper) * away


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
        factor=QUICK_SOFTMAX,
        sites=sites,
        tol=estimator.tol,
        max_iter=_SWEEPS * estimator.max_iter,
        damping=estimator.damping,
        shape=shape,
        calibration=estimator.calibration,
    )


class _Place(NamedTuple):
    """A log factor of the prior variances, the log evidence there, and its slope and MacKay's step.

    The slope is half of the expected squares of the coefficients, in units of their prior
    variances, less their number: right where sites do not move with the prior.
    """

    at: float
    evidence: float
    slope: float
    step: float


def _place(problem, at, result):
    """Return the `_Place` of a result of EP."""
    state, d = result.evaluation.payload[0], problem.prior.n_features
    precision = problem.prior.precision(np.exp(at))[:d]
    coef, var = state.coef[:, :d], np.einsum("cqcq->cq", state.spread)[:, :d]
    squares, known = np.sum(precision * coef**2), coef.size - np.sum(precision * var)
    step = np.log(max(squares, _TINY) / max(known, _TINY))
    evidence = result.evaluation.record["log_evidence"]
    return _Place(at, evidence, 0.5 * float(squares - known), float(step))


def _next_step(here, last, bias):
    """Return the step to where the slope vanishes, and what is added to slopes.

    Sites do move with the prior: `bias`, what their part in the slope was so far, is renewed from
    two evidences far enough from each other. MacKay's step leads on where slopes do not fall.
    """
    if last is None:
        return here.step if abs(here.step) > _FIRST else _FIRST, here.slope, bias
    way = here.at - last.at
    if abs(way) > _APART:
        bias = (here.evidence - last.evidence) / way - 0.5 * (here.slope + last.slope)
    slope, fall = here.slope + bias, (last.slope - here.slope) / way
    return slope / fall if fall > 0 else np.copysign(_FURTHEST, slope), slope, bias


def _learned_factor(problem, y):
    """Return the factor of the prior variances with the largest evidence, and the sites there.

    From a factor where the sites do not settle the search goes half of the way back.
    """
    sites, at, last, bias = problem.sites, 0.0, None, 0.0
    most = min(problem.max_iter, _PLACE_SWEEPS)
    for _ in range(_MOST_FACTORS):
        ep = problem.ep(y, float(np.exp(at)))
        tol = max(problem.tol, _FIRST_TOL if last is None else _PLACE_TOL)
        result = problem.solve(ep, sites, tol, max_iter=most)
        if not result.converged:
            if last is None:
                break
            at = 0.5 * (at + last.at)
            continue
        sites, here = result.x, _place(problem, at, result)
        step, slope, bias = _next_step(here, last, bias)
        new = float(np.clip(at + np.clip(step, -_FURTHEST, _FURTHEST), *_RANGE))
        settled = last is not None and (abs(new - at) < _CLOSE or abs(slope * (new - at)) < _LITTLE)
        last, at = here, new
        if settled or new == here.at:
            break
    return float(np.exp(at)), sites


def fit_joint(problem, y, monitor, k):
    """Learn the prior variance if asked, converge EP, and return the one `BinaryFit`."""
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
        left_out=left_out,
    )
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
