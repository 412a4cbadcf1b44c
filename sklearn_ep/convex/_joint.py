"""More than two classes jointly: the softmax in weight space, by EP with the sites of the engine.

The bounds of the binary problem have a counterpart for several classes whose inner problem
oscillates under wide priors; expectation propagation needs one integral a row and no inner loop.

MacKay's update of the factor of all prior variances is for sites that stay. Those of several
classes move with the prior, which is worth nats a unit of the log factor where rows and classes are
many: the update says where to begin, and then evidences are compared.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_random_state

from .._engine import class_sites
from .._engine.left_out import CavityRows, class_moments
from .._engine.loop import SILENT, Trace, reason_to_end
from .._engine.noisy_argmax import QUICK_SOFTMAX, SOFTMAX
from .._engine.sites import Sites
from .._estimator.fitting import BinaryFit
from ._calibration import rows_at_scales
from ._joint_exact import ClassPredictors, ClassSpread
from ._joint_sampled import MIXING, SampledClassSpread, SampledJoint
from ._parameters import Limits, refuse_integration
from ._posterior import LinearPosterior
from ._problem import Problem, evidence_probes, of_all_rows, rows_and_prior, single_node
from ._systems import rademacher, with_ones


class JointWeightPosterior(LinearPosterior):
    """Posterior of the weights (K, q) of the linear predictors of all classes.

    `spread` is a `ClassSpread`, or offers the same without an array. What the posterior says of
    predictors may be scaled by a calibration, weights never are.
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

    def weight_covariance(self, B, c, j):
        """Return the covariance (q, n_new) of the weights of class c with class j at rows B."""
        return self.slope**2 * self.temper * self.spread.weights_with(B, c, j)

    def covariances_with(self, X2, pairs):
        """Return the map from rows X1 to covariances (P, n1, n2) of pairs of classes with X2."""
        each = [self.covariance_with(X2, c, j) for c, j in pairs]
        return lambda X1: np.array([of_rows(X1) for of_rows in each])

    def joined(self, X, y):
        """Return a new posterior with rows included one after another, and log p of their labels.

        Each row gets the site that matches moments given the rows before it; O((K q)^2 K) a row.
        """
        spread = getattr(self.spread, "array", None)
        if spread is None:
            raise ValueError(
                "condition_on needs the covariance of the coefficients of all classes, which is "
                "not known where variances are sampled: fit with multi_class='one_vs_rest'."
            )
        new, log_prob = copy.copy(self), 0.0
        B = with_ones(X, self.intercept)
        for b, label in zip(B.toarray() if sp.issparse(B) else B, y, strict=True):
            gain = np.einsum("cqjp,p->cqj", spread, b)
            mean, cov = new.mean @ b, np.einsum("cqj,q->cj", gain, b)
            empty = Sites(*class_sites.empty_sites(label[None], new.n_classes))
            row = label[None], empty, mean[None], cov[None]
            update = class_sites.class_update(self.factor, *row, 0.0)
            d, shift = (a[0] for a in update.sites)
            T = np.diag(d) - np.outer(d, d) / d.sum()
            right = np.column_stack([T, shift - T @ mean])
            lessened = np.linalg.solve(np.eye(len(d)) + T @ cov, right)
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


@dataclass
class JointProblem(Problem):
    """The `Problem` of all classes; rows are merged, and only that of exact variances starts warm.

    `noise` are random numbers of the weights (q K, k) and of the rows (n, K, k), and `scale_probes`
    (q K, 2) those of a log determinant: enough for differences, by which scales are compared.
    """

    n_classes: int = 0
    scale_probes: Any = None

    def posterior(self, payload):
        """Return what predicts as if the fit ended with this payload."""
        state, coef = payload[0], payload[0].coef
        if self.variance == "exact":
            return JointWeightPosterior(coef, state.spread, self.intercept)
        spread = SampledClassSpread(state.system, payload[1].level, payload[1].of_weights)
        return JointWeightPosterior(coef.reshape(-1, self.n_classes).T, spread, self.intercept)


def joint_problem(estimator, training, solver):
    """Return the `JointProblem` of checked training data; the solver is that of `takes_joint`."""
    refuse_integration(estimator, "several classes jointly")
    rows, prior = rows_and_prior(estimator, training)
    (n, q), K = rows.design.shape, len(estimator.classes_)
    sampled = solver == "cg"
    # three sweeps for an outer step, which is several of Newton's
    longer, shape = 1 if sampled else 3, (n, q, K, "joint sampled" if sampled else "joint", None)
    how = "calibrated" if sampled else "exact", solver, Limits.of(estimator, longer)
    given = how, len(training.y), shape
    problem = JointProblem.of(estimator, rows, prior, *given)
    problem.n_classes = K
    if sampled:
        k, rng = estimator.n_variance_samples, check_random_state(estimator.random_state)
        problem.noise = rng.standard_normal((q * K, k)), rng.standard_normal((n, K, k))
        problem.scale_probes = rademacher(q * K, 2, rng)
        problem.evidence_probes = evidence_probes(estimator, q * K, rng)
    return problem


def fit_joint(problem, y, monitor, k):
    """Learn the prior variance if asked, converge EP, and return the one `BinaryFit`."""
    y, weight = y[problem.rows.copies.first], problem.rows.weight
    run = _fit_exact if problem.variance == "exact" else _fit_sampled
    payload, x, (history, reason, evidence), told = run(problem, y, monitor)
    state, posterior = payload[0], problem.posterior(payload)
    of_rows = Sites(*x), state.mean, state.cov, 0.0, problem.rows.taken * weight
    mean, var, removed = class_sites.class_left_out(*of_rows)
    proper = removed > 0
    moments, own = partial(class_moments, QUICK_SOFTMAX, y[proper]), (mean[proper], var[proper])
    rows = CavityRows.of(moments, [own], np.ones(1), weight[proper])
    left_out = rows_at_scales(problem.scales, rows, proper)
    posterior.slope, posterior.temper = left_out.scale
    precision, shift = (part.T * weight for part in x)  # x are the sites of one copy
    attributes = told | dict(
        site_precision=precision,
        site_shift=shift,
        marginal_variance=np.einsum("ncc->cn", state.cov),
        average=single_node(problem.prior, told["scale"], evidence),
        left_out=left_out,
    )
    attributes = of_all_rows(problem.rows.copies, attributes)
    return BinaryFit(posterior, history, reason, evidence, attributes)


def _fit_exact(problem, y, monitor):
    """Run EP with the covariance of all weights.

    Returns the last payload and the sites (2, n, K), history, reason and evidence, and attributes.
    """
    limits, weight, d = problem.limits, problem.rows.weight, problem.prior.n_features
    last = problem.lasts[0]
    first = class_sites.empty_sites(y, problem.n_classes) if last is None else last
    # the first sites belong to where the search begins: a fixed place would be in units of X
    of_scale = problem.prior.of_scale
    at = 0.0 if of_scale is None else of_scale.centre()
    found = {at: first}

    def solved(at, sites, tol, monitor=SILENT, max_iter=limits.max_iter):
        prior = problem.prior.precision(float(np.exp(at)))
        structure = ClassPredictors(problem.rows.design, prior, problem.solver == "dual")
        ep = class_sites.JointEP(structure, QUICK_SOFTMAX, y, weight)
        # where acceleration has not settled: with rows of weight 1000 steps of a half go on to
        # oscillate after hundreds of sweeps, and smaller ones have not arrived
        steps = dict(damping=min(limits.damping, 0.2), mixing=MIXING, accelerate=True)
        return prior, ep.solve(sites, tol=tol, max_iter=max_iter, monitor=monitor, **steps)

    def nearest(at):
        return found[min(found, key=lambda other: abs(other - at))]

    def place(at, rough):
        tol = max(limits.tol, 0.3 if rough else 0.05)
        prior, result = solved(at, nearest(at), tol, max_iter=min(limits.max_iter, 30))
        if not result.converged:
            return None
        found[at], state = result.x, result.evaluation.payload[0]
        squares = np.sum(prior[:d] * state.coef[:, :d] ** 2)
        of_intercept = np.einsum("ncc->nc", state.spread.rows(np.eye(len(prior))[d:]))
        known = np.sum(state.dof) - np.sum(1.0 - prior[d:, None] * of_intercept)
        evidence = result.evaluation.record["log_evidence"]
        return FactorAt.of(at, of_scale, evidence, squares, known)

    if of_scale is not None:
        at = best_log_factor(of_scale, place)
    _, result = solved(at, nearest(at), limits.tol, monitor)
    payload, evidence = result.evaluation.payload, result.evaluation.record["log_evidence"]
    told = dict(scale=float(np.exp(at)), dof=payload[0].dof, last=result.x)
    return payload, result.x, (result.history, result.reason, float(evidence)), told


def _fit_sampled(problem, y, monitor):
    """Iterate variances, scale and sites to their fixed point; returns the same."""
    fit, trace, reason = SampledJoint(problem, y), Trace(monitor), None
    d, limits, of_scale = problem.prior.n_features, problem.limits, problem.prior.of_scale

    def place(at, rough):
        spread, prior, coef = fit.near(float(np.exp(at)), rough)
        known = spread.dof - float(np.sum(1.0 - prior[d:] * spread.of_weights[:, d:]))
        squares = float(np.sum(prior[:d, None] * coef[:d] ** 2))
        return FactorAt.of(at, of_scale, fit.value(spread), squares, known)

    if of_scale is not None:
        fit.move_to(float(np.exp(best_log_factor(of_scale, place))))
    while reason is None:
        trace.begin()
        spread, residual = fit.advance()
        payload = fit.state, spread
        trace.end({"residual": residual}, payload)
        reason = reason_to_end(trace, residual < limits.tol, False, False, limits.max_iter)
    evidence, error = fit.evidence()
    told = dict(scale=fit.scale, dof=spread.dof, n_newton=fit.n_sweeps, evidence_std=error)
    return payload, fit.x, (trace.history, reason, evidence), told | dict(last=None)


class _FactorSearch(NamedTuple):
    """Numbers of the search for the factor of the prior variances."""

    little: float = 0.3  # nats: a step that promises no more, ...
    close: float = 0.05  # ... or is so short, ends it
    large: float = 3.0  # promised nats from which on evidences may be rough
    clear: float = 0.2  # MacKay's step downwards that is believed
    shortest: float = 1.0  # step away from what was looked at, ...
    longest: float = 2.0  # ... and longest one
    most: int = 13  # places looked at


_FACTOR = _FactorSearch()


class FactorAt(NamedTuple):
    """A log factor, log evidence times prior there, and MacKay's step of it."""

    at: float
    evidence: float
    step: float

    @classmethod
    def of(cls, at, of_scale, evidence, squares, known):
        """Return the place where coefficients have the sum `squares` in units of their variances.

        `known` is the effective number of them, `of_scale` the `PredictorPrior` of the factor.
        """
        step = np.log((squares + 1.0) / (known + 1.0 - 2.0 * of_scale.slope(at)))
        step = float(np.clip(step, -_FACTOR.longest, _FACTOR.longest))
        return cls(at, evidence + of_scale.log_density(at), step)


def _next(places, bounds):
    """Return the next log factor to look at, and how many nats it promises."""
    places = sorted(places)
    best = int(np.argmax([place.evidence for place in places]))
    top, gain = _top(places, best)
    if 0 < best < len(places) - 1:
        return float(np.clip(top, *bounds)), gain
    # the best is the outermost place. A parabola through three that all rise has its top too early,
    # since the evidence bends less the larger the variance. A concave function gains no more on a
    # further step than by the slope between the last two places
    outwards = -1 if best == 0 else 1
    here, last = places[best], places[best - outwards]
    way = abs(here.at - last.at)
    at = here.at + outwards * float(np.clip(2.0 * way, _FACTOR.shortest, _FACTOR.longest))
    at = float(np.clip(at, *bounds))
    gain = (here.evidence - last.evidence) / way * abs(at - here.at)
    if gain > _FACTOR.little:
        return at, gain
    # the evidence is level between the last two
    return float(np.clip(top, *sorted((here.at, last.at)))), 0.0


def _top(places, best):
    """Return where a parabola through the best place and those beside it is highest, and its gain.

    Where there are two, the best one.
    """
    if len(places) < 3:
        return places[best].at, 0.0
    centre = min(max(best, 1), len(places) - 2)
    middle = places[centre]
    ats, evidences, _ = np.array(places[centre - 1 : centre + 2]).T
    bend, slope, _ = np.polyfit(ats - middle.at, evidences, 2)
    move = -0.5 * slope / bend if bend < 0 else places[best].at - middle.at
    return middle.at + move, 0.5 * slope * move


def best_log_factor(of_scale, place):
    """Return the log factor with the largest evidence times the prior `of_scale`.

    `place(at, rough)` is the `FactorAt` of a log factor, or None where there is none: then half of
    the way back is taken. While `rough`, nats do not matter yet.
    """
    at, bounds, gain = of_scale.centre(), of_scale.bounds(), np.inf
    places: list[FactorAt] = []
    for _ in range(_FACTOR.most):
        here = place(at, gain > _FACTOR.large)
        if here is None:
            if not places:
                break
            at = 0.5 * (at + max(places, key=lambda place: place.evidence).at)
        else:
            places.append(here)
            if len(places) > 1:
                at, gain = _next(places, bounds)
                if gain <= _FACTOR.little:
                    break
            else:
                direction = -1.0 if here.step < -_FACTOR.clear else 1.0
                at += direction * max(abs(here.step), _FACTOR.shortest)
        if min(abs(at - place.at) for place in places) <= _FACTOR.close:
            break
    return at
