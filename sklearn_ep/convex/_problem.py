"""Checked parameters and data of a convex variational fit, and the fit of a binary problem."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import check_random_state, compute_class_weight

from .._engine.super_gaussian import BOUNDS, LogisticSites
from .._estimator.checks import (
    check_choice,
    check_column_scales,
    check_common,
    check_number,
)
from .._estimator.fitting import BinaryFit
from ._outer_loop import GaussianPrior, LaplacePrior, OuterLoop
from ._posterior import WeightPosterior
from ._systems import Design, DualSystem, IterativeSystem, PrimalSystem
from ._variances import (
    CalibratedVariances,
    ExactVariances,
    LanczosVariances,
    MonteCarloVariances,
    Probes,
)

__all__ = ["ConvexProblem", "check_parameters", "fit_problem", "make_problem"]

# Largest matrix that "auto" factorises at every step.
LARGEST_EXACT = 4000
SYSTEMS = {"primal": PrimalSystem, "dual": DualSystem, "cg": IterativeSystem}
VARIANCES = ("auto", "exact", "calibrated", "monte_carlo", "lanczos")


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
    n_samples: int
    inner_tol: float
    max_inner_iter: int
    tol: float
    max_iter: int
    damping: float
    last: list
    shape: tuple

    def variance_estimator(self):
        """Return the estimator of marginal variances of one binary problem."""
        if self.variance == "exact":
            return ExactVariances()
        if self.variance == "lanczos":
            return LanczosVariances(self.direction, self.n_samples)
        kind = CalibratedVariances if self.variance == "calibrated" else MonteCarloVariances
        return kind(self.probes, self.weight)

    def loop(self, sign):
        """Return the `OuterLoop` for labels in {-1, +1}."""
        design, variances = self.design.counting(), self.variance_estimator()
        sites = LogisticSites(sign, self.weight, self.bound)
        newton = SYSTEMS[self.solver]
        exact = SYSTEMS[self.exact_solver] if self.variance == "exact" else newton
        limits = self.inner_tol, self.max_inner_iter
        return OuterLoop(design, sites, self.weight, self.prior, newton, exact, variances, *limits)

    def posterior(self, step):
        """Return what predicts as if the outer loop ended with this step."""
        predictor = step.estimate.predictor
        return WeightPosterior(step.inner.u, self.design.intercept, step.system, predictor)


def fit_problem(problem, sign, monitor, k):
    """Fit binary problem k and return its `BinaryFit`."""
    loop = problem.loop(sign)
    limits = dict(tol=problem.tol, max_iter=problem.max_iter, damping=problem.damping)
    result = loop.solve(loop.start(problem.last[k]), monitor=monitor, **limits)
    step = result.evaluation.payload
    u, estimate, posterior = step.inner.u, step.estimate, problem.posterior(step)
    flat = np.any(np.isinf(problem.prior.variance))
    log_evidence = np.nan if flat else step.objective
    attributes = dict(
        site_precision=step.inner.site.precision,
        marginal_variance=estimate.training,
        scale=step.scale,
        dof=step.dof,
        n_products=loop.design.n_products,
        n_newton=loop.n_newton,
        last=(u, result.x),
    )
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def make_problem(estimator, training):
    """Choose matrices, prior, solver and variances for checked training data."""
    check_column_scales(estimator, training.X)
    q, d = training.X.shape
    weight = training.weight * _class_weights(estimator, training)
    prior_variance = _checked_prior_variance(estimator.prior_variance, d)
    tail = [estimator.intercept_prior_variance] * bool(estimator.fit_intercept)
    variance, solver, exact_solver = _methods(estimator, q, d)
    design = Design(training.X, bool(estimator.fit_intercept))
    n = design.shape[1]
    rng = check_random_state(estimator.random_state)
    sampled = variance in ("calibrated", "monte_carlo")
    probes = Probes(design, weight, estimator.n_variance_samples, rng) if sampled else None
    n_problems = 1 if len(estimator.classes_) == 2 else len(estimator.classes_)
    prior_mode = (estimator.prior, estimator.learn_prior, estimator.laplace_scale)
    shape = (q, n, n_problems, variance, repr(prior_mode))
    passed = ("bound", "inner_tol", "max_inner_iter", "tol", "max_iter", "damping")
    return ConvexProblem(
        design=design,
        weight=weight,
        prior=_prior(estimator, np.append(np.broadcast_to(prior_variance, d), tail), d),
        solver=solver,
        exact_solver=exact_solver,
        variance=variance,
        probes=probes,
        direction=rng.standard_normal(n) if variance == "lanczos" else None,
        n_samples=estimator.n_variance_samples,
        last=_warm(estimator, shape, n_problems),
        shape=shape,
        **{name: getattr(estimator, name) for name in passed},
    )


def check_parameters(estimator):
    """Raise an error that names the parameter unless all of them are usable."""
    check_common(estimator)
    check_choice("bound", estimator.bound, BOUNDS)
    check_choice("prior", estimator.prior, ["gaussian", "laplace"])
    check_choice("variance", estimator.variance, VARIANCES)
    check_choice("solver", estimator.solver, ["auto", *SYSTEMS])
    for name in ("learn_prior", "fit_intercept"):
        check_choice(name, getattr(estimator, name), [True, False])
    _check_positive("intercept_prior_variance", estimator.intercept_prior_variance)
    scale = estimator.laplace_scale
    if not (isinstance(scale, str) and scale == "learn"):
        _check_positive("laplace_scale", scale, finite=True)
    check_number("inner_tol", estimator.inner_tol, 0, boundaries="neither")
    check_number("n_variance_samples", estimator.n_variance_samples, 1, integer=True)
    check_number("max_inner_iter", estimator.max_inner_iter, 1, integer=True)
    if estimator.learn_prior and estimator.prior == "laplace":
        raise ValueError(
            "learn_prior=True is for the Gaussian prior; learn the scale of a Laplace prior "
            'by laplace_scale="learn".'
        )
    if estimator.learn_prior and estimator.bound == "local":
        raise ValueError(
            'learn_prior=True needs bound="kl": the local bound is so much looser for wide '
            "priors that its maximum shrinks the coefficients far too much."
        )
    if estimator.solver == "dual" and _is_flat(estimator):
        raise ValueError(
            'solver="dual" needs a finite intercept_prior_variance; 1e4 differs from a '
            "flat prior by some 1e-5 in the estimates."
        )


def _is_flat(estimator):
    """Whether there is an intercept with a flat prior."""
    return bool(estimator.fit_intercept) and np.isinf(estimator.intercept_prior_variance)


def _check_positive(name, value, finite=False):
    """Raise unless the parameter is a positive number."""
    check_number(name, value, 0, boundaries="neither")
    if finite and np.isinf(value):
        raise ValueError(f"{name} must be finite.")


def _class_weights(estimator, training):
    """Return the weight (q,) of each row's class."""
    y = estimator.classes_[training.y]
    weights = compute_class_weight(
        estimator.class_weight, classes=estimator.classes_, y=y, sample_weight=training.weight
    )
    if not np.all(weights > 0):
        raise ValueError(f"class_weight must be positive, got {estimator.class_weight!r}.")
    return weights[training.y]


def _checked_prior_variance(prior_variance, d):
    """Return the prior variances as an array that broadcasts to (d,)."""
    if np.ndim(prior_variance) == 0:
        _check_positive("prior_variance", prior_variance, finite=True)
        return np.asarray(prior_variance, dtype=float)
    variance = np.asarray(prior_variance, dtype=float)
    if variance.shape != (d,):
        raise ValueError(
            f"prior_variance must be a number or have shape ({d},), got {variance.shape}."
        )
    if not np.all((variance > 0) & np.isfinite(variance)):
        raise ValueError("prior_variance must be positive and finite for every feature.")
    return variance


def _methods(estimator, q, d):
    """Return (variance method, solver, solver of exact variances) for q rows, d columns."""
    # far from zero a Laplace prior has next to no precision, and the dual form divides by it
    primal = _is_flat(estimator) or estimator.prior == "laplace" or d <= q
    variance = estimator.variance
    if variance == "auto":
        variance = "exact" if (d if primal else q) <= LARGEST_EXACT else "calibrated"
    exact_solver = "primal" if primal else "dual"
    if estimator.solver != "auto":
        if estimator.solver != "cg":
            exact_solver = estimator.solver
        return variance, estimator.solver, exact_solver
    return variance, exact_solver if variance == "exact" else "cg", exact_solver


def _prior(estimator, variance, d):
    if estimator.prior == "gaussian":
        return GaussianPrior(variance, d, bool(estimator.learn_prior))
    learn = isinstance(estimator.laplace_scale, str)
    scale = 1.0 if learn else estimator.laplace_scale
    return LaplacePrior(variance, d, learn, scale, estimator.bound)


def _warm(estimator, shape, n_problems):
    """Return the last weights and state of each binary problem where they fit, else None."""
    last, last_shape = getattr(estimator, "_warm_state", (None, None))
    return last if estimator.warm_start and shape == last_shape else [None] * n_problems
