"""Checked parameters and data of a convex variational fit, and the fit of a binary problem."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_random_state, compute_class_weight

from .._engine.hyper import mixture_moments
from .._engine.loop import SILENT
from .._engine.super_gaussian import LogisticSites
from .._estimator.checks import LARGEST_IN_UNITS, check_column_scales
from .._estimator.fitting import BinaryFit
from ._calibration import calibrated, cavities
from ._copies import find_copies
from ._lanczos import log_determinant, rademacher
from ._nodes import (
    average_over_scale,
    in_units,
    mode_of_scale,
    node_fit,
    scale_nodes,
    single_node,
)
from ._outer_loop import OuterLoop
from ._parameters import (
    LARGEST_EXACT,
    LONGER_LEARNING,
    is_flat,
    make_prior,
    prior_mode,
    refuse_integration,
)
from ._posterior import WeightPosterior, mixed_weights
from ._sampled import SAMPLED_TOL, SampledLoop, is_large
from ._sampled_rows import SampledRows
from ._systems import Design, DualSystem, IterativeSystem, PrimalSystem
from ._variances import (
    ExactVariances,
    LanczosVariances,
    MonteCarloVariances,
    Probes,
)

__all__ = ["ConvexProblem", "class_weights", "evidence_probes", "fit_problem", "make_problem"]

SYSTEMS = {"primal": PrimalSystem, "dual": DualSystem, "cg": IterativeSystem}
# Larger side of the matrix that is factorised up to which "auto" averages over the scale of the
# prior: the more coefficients have learned it, the less it leaves open.
LARGEST_AVERAGED = 1000


@dataclass
class ConvexProblem:
    """Everything a binary problem needs besides its labels; sent to workers as it is.

    `last` holds for each binary problem the weights and state of an earlier fit, or None; only a
    fit of the same `shape` may begin there. `column_variances` are those of X where the scale of
    the prior is averaged over, else None; `n_jobs` are the nodes of one problem to work on at once.
    `copies` are those among the rows that were given, or None where all are kept apart.
    """

    design: Design
    weight: np.ndarray
    prior: Any
    bound: str
    solver: str
    exact_solver: str
    variance: str
    probes: Any
    direction: Any
    evidence_probes: Any
    n_samples: int
    inner_tol: float
    max_inner_iter: int
    tol: float
    max_iter: int
    damping: float
    last: list
    shape: tuple
    calibration: str | None
    column_variances: Any
    n_jobs: int | None
    copies: Any

    @property
    def sizes(self):
        """Rows of the one part that is in memory."""
        return [len(self.weight if self.copies is None else self.copies.group)]

    def variance_estimator(self):
        """Return the estimator of marginal variances of one binary problem."""
        if self.variance == "exact":
            return ExactVariances()
        if self.variance == "lanczos":
            return LanczosVariances(self.direction, self.n_samples)
        return MonteCarloVariances(self.probes, self.weight)

    def loop(self, sign):
        """Return the `OuterLoop` for labels in {-1, +1}."""
        design, variances = self.design.counting(), self.variance_estimator()
        sites = LogisticSites(sign, self.weight, self.bound)
        newton = SYSTEMS[self.solver]
        exact = SYSTEMS[self.exact_solver] if self.variance == "exact" else newton
        limits = self.inner_tol, self.max_inner_iter
        return OuterLoop(design, sites, self.weight, self.prior, newton, exact, variances, *limits)

    def solve(self, loop, last=None, damping=None, monitor=SILENT):
        """Run an outer loop from the weights and state of an earlier one; return its result."""
        limits = dict(tol=self.tol, max_iter=self.max_iter, damping=damping or self.damping)
        return loop.solve(loop.start(last), monitor=monitor, **limits)

    def evidence(self, loop, step):
        """Return the bound on the log evidence and its standard error."""
        if np.any(np.isinf(self.prior.variance)):
            return np.nan, 0.0
        if hasattr(step.system, "log_det"):
            return loop.bound(step, step.system.log_det), 0.0
        if self.evidence_probes is None:
            return np.nan, 0.0
        system = step.system
        probes = self.evidence_probes
        log_det, error = log_determinant(system.times, system.preconditioner, probes)
        return loop.bound(step, log_det), 0.5 * error

    def posterior(self, step):
        """Return what predicts as if the outer loop ended with this step."""
        if self.variance == "calibrated":
            predictor = step.predictor
            return WeightPosterior(step.u, self.design.intercept, predictor, predictor)
        predictor = step.estimate.predictor
        return WeightPosterior(step.inner.u, self.design.intercept, step.system, predictor)


def fit_problem(problem, sign, monitor, k):
    """Fit binary problem k and return its `BinaryFit`."""
    if problem.copies is None:
        return _fit_rows(problem, sign, monitor, k)
    fit = _fit_rows(problem, sign[problem.copies.first], monitor, k)
    return fit._replace(attributes=problem.copies.of_rows(fit.attributes))


def _fit_rows(problem, sign, monitor, k):
    """Fit binary problem k to the rows that the problem keeps apart."""
    if problem.variance == "calibrated":
        return _fit_calibrated(problem, sign, monitor, k)
    whole, last = problem, problem.last[k]
    averaged = last is not None and len(last) == 3  # whether the scale is apart from the state
    nodes, start = scale_nodes(problem, sign, last if averaged else None)
    mode = None if nodes is None else mode_of_scale(nodes, start, monitor)
    if mode is not None:
        problem, last = nodes.at(float(mode.phi[0])), mode.payload.last
    elif averaged:
        last = None
    loop = problem.loop(sign)
    result = problem.solve(loop, last, monitor=monitor)
    step = result.evaluation.payload
    log_evidence, evidence_std = problem.evidence(loop, step)
    last = step.inner.u, result.x
    if mode is None:
        average = single_node(problem.prior, step.scale, log_evidence)
        fits, scale = [node_fit(problem, step)], problem.prior.spread(step.scale)
    else:
        last = *last, float(mode.phi[0])
        average = average_over_scale(nodes, last[-1], result, monitor)
        fits, scale = [n.payload for n in average.nodes], nodes.mean_scale(average, whole.prior)
        average = in_units(average, nodes.prior)
        if np.isfinite(log_evidence):
            log_evidence = average.log_evidence
    attributes = dict(
        **_of_rows(problem, sign, fits, average.weight),
        scale=scale,
        n_products=loop.design.n_products,
        n_newton=loop.n_newton,
        n_passes=0,
        evidence_std=evidence_std,
        last=last,
        average=average,
    )
    left_out, posteriors = attributes["left_out"], [f.posterior for f in fits]
    posterior = mixed_weights(posteriors, average.weight, left_out.slope, left_out.temper)
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def _of_rows(problem, sign, fits, weight):
    """Return what is known of training rows from the `NodeFit` of each node, and the dof."""
    left = [f.cavities for f in fits]
    means, variances = (np.array([getattr(f, name) for f in fits]) for name in ("mean", "var"))
    moments = None
    if fits[0].moments is not None:
        moments = np.stack([f.moments for f in fits], axis=1)
    return dict(
        site_precision=fits[int(np.argmax(weight))].precision,
        marginal_variance=mixture_moments(weight, means, variances)[1],
        dof=float(weight @ np.array([f.dof for f in fits])),
        left_out=calibrated(sign, problem.weight, weight, left, problem.calibration, moments),
    )


def _fit_calibrated(problem, sign, monitor, k):
    """Fit binary problem k by visits to its rows, which are all in one part."""
    design, prior = problem.design, problem.prior
    sites = LogisticSites(sign, problem.weight, problem.bound)
    single = is_large(design.B.size)
    rows = SampledRows(design.B, sites, lambda columns: problem.probes.of_rows[:, columns], single)

    def run(worker, point, extra, anchors):
        return worker(rows, 0, None, point, extra, *anchors)

    loop = SampledLoop(
        run, prior, float(problem.weight.sum()), problem.probes.of_coefficients, design.intercept,
        SAMPLED_TOL * problem.inner_tol, problem.max_inner_iter, single,
    )  # fmt: skip
    limits = dict(tol=problem.tol, max_iter=problem.max_iter, damping=problem.damping)
    result = loop.solve(monitor=monitor, last=problem.last[k], **limits)
    step = result.evaluation.payload
    log_evidence, error, dof = loop.finish(step, problem.evidence_probes)
    site, variances = rows.penalty(loop.point, loop.anchors), rows.variances(loop.anchors)
    mean, weight = rows.predictors(loop.point), problem.weight
    left = cavities(mean, variances, site.slope, site.precision, weight)
    average = single_node(prior, step.scale, log_evidence)
    left_out = calibrated(sign, weight, average.weight, [left], problem.calibration)
    attributes = dict(
        site_precision=site.precision,
        marginal_variance=variances,
        scale=prior.spread(step.scale),
        dof=dof,
        n_products=loop.n_products,
        n_newton=loop.n_newton,
        n_passes=0,
        evidence_std=error,
        last=loop.state(),
        average=average,
        left_out=left_out,
    )
    system = IterativeSystem(design, step.prior.precision, attributes["site_precision"], step.data)
    posterior = WeightPosterior(step.u, design.intercept, system, step.predictor)
    posterior = mixed_weights([posterior], average.weight, left_out.slope, left_out.temper)
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def make_problem(estimator, training):
    """Choose matrices, prior, solver and variances for checked training data."""
    check_column_scales(estimator, training.X, LARGEST_IN_UNITS)
    q, d = training.X.shape
    weight = training.weight * class_weights(estimator, training)
    variance, solver, exact_solver = _methods(estimator, q, d)
    X, copies = training.X, None
    if variance != "exact":
        copies = find_copies(X, training.y, weight)
        X, weight = X[copies.first], copies.weight
    design = Design(X, bool(estimator.fit_intercept))
    q, n = design.shape
    rng = check_random_state(estimator.random_state)
    sampled = variance in ("calibrated", "monte_carlo")
    probes = Probes(design, weight, estimator.n_variance_samples, rng) if sampled else None
    n_problems = 1 if len(estimator.classes_) == 2 else len(estimator.classes_)
    prior = make_prior(estimator, d)
    column_variances = None
    if _is_averaged(estimator, variance, prior, min(n, q) if exact_solver == "dual" else n):
        column_variances = weighted_variances(X, weight)
    shape = (q, n, n_problems, variance, prior_mode(estimator), column_variances is None)
    passed = ("bound", "inner_tol", "max_inner_iter", "tol", "damping")
    longer = LONGER_LEARNING if prior.learn and variance != "exact" else 1
    return ConvexProblem(
        design=design,
        weight=weight,
        prior=prior,
        solver=solver,
        exact_solver=exact_solver,
        variance=variance,
        probes=probes,
        direction=rng.standard_normal(n) if variance == "lanczos" else None,
        evidence_probes=evidence_probes(estimator, variance, n, rng),
        n_samples=estimator.n_variance_samples,
        last=_warm(estimator, shape, n_problems),
        shape=shape,
        max_iter=longer * estimator.max_iter,
        calibration=estimator.calibration,
        column_variances=column_variances,
        n_jobs=estimator.n_jobs if n_problems == 1 else None,
        copies=copies,
        **{name: getattr(estimator, name) for name in passed},
    )


def _is_averaged(estimator, variance, prior, size):
    """Return whether the scale of the prior is averaged over, or raise a ValueError.

    `size` is that of the matrix that is factorised at every step.
    """
    if not prior.learn or estimator.hyperparameters == "mode":
        return False
    if variance != "exact":
        refuse_integration(estimator, f"variance={variance!r}, whose evidence is sampled")
        return False
    return estimator.hyperparameters == "integrate" or size <= LARGEST_AVERAGED


def weighted_variances(X, weight):
    """Return the variances (d,) of the columns of X, rows weighted; dense or CSR/CSC."""
    total = weight.sum()
    mean = np.asarray(X.T @ weight).ravel() / total
    if sp.issparse(X):
        squares = np.asarray(X.multiply(X).T @ weight).ravel() / total
        return np.maximum(squares - mean**2, 0.0)
    return np.einsum("ij,ij,i->j", X - mean, X - mean, weight) / total


def evidence_probes(estimator, variance, n, rng):
    """Return the probes of the log determinant, or None where none are wanted."""
    if variance == "exact" or estimator.n_evidence_probes == 0:
        return None
    return rademacher(n, estimator.n_evidence_probes, rng)


def class_weights(estimator, training):
    """Return the weight (q,) of each row's class."""
    y = estimator.classes_[training.y]
    weights = compute_class_weight(
        estimator.class_weight, classes=estimator.classes_, y=y, sample_weight=training.weight
    )
    if not np.all(weights > 0):
        raise ValueError(f"class_weight must be positive, got {estimator.class_weight!r}.")
    return weights[training.y]


def _methods(estimator, q, d):
    """Return (variance method, solver, solver of exact variances) for q rows, d columns."""
    # far from zero a heavy-tailed prior has next to no precision, and the dual form divides by it
    primal = is_flat(estimator) or estimator.prior != "gaussian" or d <= q
    variance = estimator.variance
    if variance == "auto":
        variance = "exact" if (d if primal else q) <= LARGEST_EXACT else "calibrated"
    exact_solver = "primal" if primal else "dual"
    if estimator.solver != "auto":
        if estimator.solver != "cg":
            exact_solver = estimator.solver
        return variance, estimator.solver, exact_solver
    return variance, exact_solver if variance == "exact" else "cg", exact_solver


def _warm(estimator, shape, n_problems):
    """Return the last weights and state of each binary problem where they fit, else None."""
    last, last_shape = getattr(estimator, "_warm_state", (None, None))
    return last if estimator.warm_start and shape == last_shape else [None] * n_problems
