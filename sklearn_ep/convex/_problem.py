"""Checked parameters and data of a convex variational fit, and the fit of a binary problem."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import check_random_state, compute_class_weight

from .._engine.super_gaussian import LogisticSites
from .._estimator.checks import LARGEST_IN_UNITS, check_column_scales
from .._estimator.fitting import BinaryFit
from ._lanczos import log_determinant, rademacher
from ._outer_loop import OuterLoop
from ._parameters import LARGEST_EXACT, is_flat, make_prior, prior_mode
from ._posterior import WeightPosterior
from ._sampled import SAMPLED_TOL, SampledLoop, is_large
from ._sampled_rows import SampledRows
from ._systems import Design, DualSystem, IterativeSystem, PrimalSystem
from ._variances import (
    ExactVariances,
    LanczosVariances,
    MonteCarloVariances,
    Probes,
)

__all__ = ["ConvexProblem", "class_weights", "fit_problem", "make_problem"]

SYSTEMS = {"primal": PrimalSystem, "dual": DualSystem, "cg": IterativeSystem}


@dataclass
class ConvexProblem:
    """Everything a binary problem needs besides its labels; sent to workers as it is.

    `last` holds for each binary problem the weights and state of an earlier fit, or None; only a
    fit of the same `shape` may begin there.
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

    @property
    def sizes(self):
        """Rows of the one part that is in memory."""
        return [len(self.weight)]

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
    if problem.variance == "calibrated":
        return _fit_calibrated(problem, sign, monitor, k)
    loop = problem.loop(sign)
    limits = dict(tol=problem.tol, max_iter=problem.max_iter, damping=problem.damping)
    result = loop.solve(loop.start(problem.last[k]), monitor=monitor, **limits)
    step = result.evaluation.payload
    u, estimate, posterior = step.inner.u, step.estimate, problem.posterior(step)
    log_evidence, evidence_std = problem.evidence(loop, step)
    attributes = dict(
        site_precision=step.inner.site.precision,
        marginal_variance=estimate.training,
        scale=problem.prior.spread(step.scale),
        dof=step.dof,
        n_products=loop.design.n_products,
        n_newton=loop.n_newton,
        n_passes=0,
        evidence_std=evidence_std,
        last=(u, result.x),
    )
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


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
    attributes = dict(
        site_precision=rows.penalty(loop.point, loop.anchors).precision,
        marginal_variance=rows.variances(loop.anchors),
        scale=prior.spread(step.scale),
        dof=dof,
        n_products=loop.n_products,
        n_newton=loop.n_newton,
        n_passes=0,
        evidence_std=error,
        last=loop.state(),
    )
    system = IterativeSystem(design, step.prior.precision, attributes["site_precision"], step.data)
    posterior = WeightPosterior(step.u, design.intercept, system, step.predictor)
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def make_problem(estimator, training):
    """Choose matrices, prior, solver and variances for checked training data."""
    check_column_scales(estimator, training.X, LARGEST_IN_UNITS)
    q, d = training.X.shape
    weight = training.weight * class_weights(estimator, training)
    variance, solver, exact_solver = _methods(estimator, q, d)
    design = Design(training.X, bool(estimator.fit_intercept))
    n = design.shape[1]
    rng = check_random_state(estimator.random_state)
    sampled = variance in ("calibrated", "monte_carlo")
    probes = Probes(design, weight, estimator.n_variance_samples, rng) if sampled else None
    n_problems = 1 if len(estimator.classes_) == 2 else len(estimator.classes_)
    shape = (q, n, n_problems, variance, prior_mode(estimator))
    passed = ("bound", "inner_tol", "max_inner_iter", "tol", "max_iter", "damping")
    return ConvexProblem(
        design=design,
        weight=weight,
        prior=make_prior(estimator, d),
        solver=solver,
        exact_solver=exact_solver,
        variance=variance,
        probes=probes,
        direction=rng.standard_normal(n) if variance == "lanczos" else None,
        evidence_probes=_evidence_probes(estimator, variance, n, rng),
        n_samples=estimator.n_variance_samples,
        last=_warm(estimator, shape, n_problems),
        shape=shape,
        **{name: getattr(estimator, name) for name in passed},
    )


def _evidence_probes(estimator, variance, n, rng):
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
