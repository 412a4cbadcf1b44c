"""What `ConvexVariationalLogistic` does behind its public methods: checks, choices, storage."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils import check_random_state, compute_class_weight

from .._engine.likelihoods import Logit
from .._engine.super_gaussian import BOUNDS, LogisticSites
from .._estimator.base import PosteriorClassifier
from .._estimator.checks import check_choice, check_common, check_number, spread_rows
from .._estimator.fitting import BinaryFit, combine_fits
from ._outer_loop import DoubleLoop, GaussianPrior, LaplacePrior
from ._posterior import WeightPosterior
from ._systems import Design, DualSystem, IterativeSystem, PrimalSystem
from ._variances import (
    CalibratedVariances,
    ExactVariances,
    LanczosVariances,
    MonteCarloVariances,
    Probes,
)

__all__ = ["ConvexBase", "Problem", "check_positive", "fit_problem", "one_or_stack"]

# Largest matrix that "auto" factorises at every step.
LARGEST_EXACT = 4000
SYSTEMS = {"primal": PrimalSystem, "dual": DualSystem, "cg": IterativeSystem}
VARIANCES = ("auto", "exact", "calibrated", "monte_carlo", "lanczos")


@dataclass
class Problem:
    """Everything a binary problem needs besides its labels; sent to workers as it is.

    `last` holds for each binary problem the weights and state of an earlier fit, or None.
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

    def variance_estimator(self):
        """Return the estimator of marginal variances of one binary problem."""
        if self.variance == "exact":
            return ExactVariances()
        if self.variance == "lanczos":
            return LanczosVariances(self.direction, self.n_samples)
        kind = CalibratedVariances if self.variance == "calibrated" else MonteCarloVariances
        return kind(self.probes, self.weight)

    def loop(self, sign):
        """Return the `DoubleLoop` for labels in {-1, +1}."""
        exact = SYSTEMS[self.exact_solver if self.variance == "exact" else self.solver]
        return DoubleLoop(
            self.design.counting(),
            LogisticSites(sign, self.weight, self.bound),
            self.weight,
            self.prior,
            SYSTEMS[self.solver],
            exact,
            self.variance_estimator(),
            self.inner_tol,
            self.max_inner_iter,
        )

    def posterior(self, step):
        """Return the posterior that predicts, from one step of the outer loop."""
        return WeightPosterior(
            step.inner.u, self.design.intercept, step.system, step.estimate.predictor
        )


def fit_problem(problem, sign, monitor, k):
    """Fit binary problem k and return its `BinaryFit`."""
    loop = problem.loop(sign)
    result = loop.solve(
        loop.start(problem.last[k]),
        tol=problem.tol,
        max_iter=problem.max_iter,
        damping=problem.damping,
        monitor=monitor,
    )
    step = result.evaluation.payload
    return BinaryFit(
        problem.posterior(step),
        result.history,
        result.converged,
        step.objective,
        dict(
            site_precision=step.inner.site.precision,
            marginal_variance=step.estimate.training,
            scale=step.scale,
            dof=step.dof,
            n_products=loop.design.n_products,
            n_newton=loop.n_newton,
            last=(step.inner.u, result.x),
        ),
    )


class ConvexBase(PosteriorClassifier):
    """Parameter checks, choice of method, and fitted attributes."""

    _link = Logit()
    _accept_sparse = ("csr", "csc")

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_parameters(self):
        check_common(self)
        check_choice("bound", self.bound, BOUNDS)
        check_choice("prior", self.prior, ["gaussian", "laplace"])
        check_choice("variance", self.variance, VARIANCES)
        check_choice("solver", self.solver, ["auto", *SYSTEMS])
        for name in ("learn_prior", "fit_intercept"):
            check_choice(name, getattr(self, name), [True, False])
        check_positive("intercept_prior_variance", self.intercept_prior_variance)
        if not (isinstance(self.laplace_scale, str) and self.laplace_scale == "learn"):
            check_positive("laplace_scale", self.laplace_scale, finite=True)
        check_number("inner_tol", self.inner_tol, 0, boundaries="neither")
        check_number("n_variance_samples", self.n_variance_samples, 1, integer=True)
        check_number("max_inner_iter", self.max_inner_iter, 1, integer=True)
        self._check_combinations()

    def _check_combinations(self):
        if self.learn_prior and self.prior == "laplace":
            raise ValueError(
                "learn_prior=True is for the Gaussian prior; learn the scale of a Laplace prior "
                'by laplace_scale="learn".'
            )
        if self.learn_prior and self.bound == "local":
            raise ValueError(
                'learn_prior=True needs bound="kl": the local bound is so much looser for wide '
                "priors that its maximum shrinks the coefficients far too much."
            )
        if self.solver == "dual" and self.fit_intercept:
            if np.isinf(self.intercept_prior_variance):
                raise ValueError(
                    'solver="dual" needs a finite intercept_prior_variance; 1e4 differs from a '
                    "flat prior by some 1e-5 in the estimates."
                )

    def _problem(self, training):
        """Choose matrices, prior, solver and variances for checked training data."""
        q, d = training.X.shape
        weight = training.weight * self._class_weights(training)
        prior_variance = self._checked_prior_variance(d)
        tail = [self.intercept_prior_variance] * bool(self.fit_intercept)
        variance, solver, exact_solver = self._methods(q, d)
        design = Design(training.X, bool(self.fit_intercept))
        n = design.shape[1]
        rng = check_random_state(self.random_state)
        sampled = variance in ("calibrated", "monte_carlo")
        probes = Probes(design, weight, self.n_variance_samples, rng) if sampled else None
        n_problems = 1 if len(self.classes_) == 2 else len(self.classes_)
        prior_mode = (self.prior, self.learn_prior, self.laplace_scale)
        self._shape = (q, n, n_problems, variance, repr(prior_mode))
        return Problem(
            design=design,
            weight=weight,
            prior=self._prior(np.append(np.broadcast_to(prior_variance, d), tail), d),
            bound=self.bound,
            solver=solver,
            exact_solver=exact_solver,
            variance=variance,
            probes=probes,
            direction=rng.standard_normal(n) if variance == "lanczos" else None,
            n_samples=self.n_variance_samples,
            inner_tol=self.inner_tol,
            max_inner_iter=self.max_inner_iter,
            tol=self.tol,
            max_iter=self.max_iter,
            damping=self.damping,
            last=self._warm(n_problems),
        )

    def _class_weights(self, training):
        """Return the weight (q,) of each row's class."""
        y = self.classes_[training.y]
        weights = compute_class_weight(
            self.class_weight, classes=self.classes_, y=y, sample_weight=training.weight
        )
        if not np.all(weights > 0):
            raise ValueError(f"class_weight must be positive, got {self.class_weight!r}.")
        return weights[training.y]

    def _checked_prior_variance(self, d):
        """Return the prior variances as an array that broadcasts to (d,)."""
        if np.ndim(self.prior_variance) == 0:
            check_positive("prior_variance", self.prior_variance, finite=True)
            return np.asarray(self.prior_variance, dtype=float)
        variance = np.asarray(self.prior_variance, dtype=float)
        if variance.shape != (d,):
            raise ValueError(
                f"prior_variance must be a number or have shape ({d},), got {variance.shape}."
            )
        if not np.all((variance > 0) & np.isfinite(variance)):
            raise ValueError("prior_variance must be positive and finite for every feature.")
        return variance

    def _methods(self, q, d):
        """Return (variance method, solver, solver of exact variances) for q rows, d columns."""
        flat = bool(self.fit_intercept) and np.isinf(self.intercept_prior_variance)
        # far from zero a Laplace prior has next to no precision, and the dual form divides by it
        primal = flat or self.prior == "laplace" or d <= q
        variance = self.variance
        if variance == "auto":
            variance = "exact" if (d if primal else q) <= LARGEST_EXACT else "calibrated"
        exact_solver = "primal" if primal else "dual"
        if self.solver != "auto":
            if self.solver != "cg":
                exact_solver = self.solver
            return variance, self.solver, exact_solver
        return variance, exact_solver if variance == "exact" else "cg", exact_solver

    def _prior(self, variance, d):
        if self.prior == "gaussian":
            return GaussianPrior(variance, d, bool(self.learn_prior))
        learn = isinstance(self.laplace_scale, str)
        return LaplacePrior(variance, d, learn, 1.0 if learn else self.laplace_scale, self.bound)

    def _warm(self, n_problems):
        """Return the last weights and state of each binary problem where they fit, else None."""
        last, shape = getattr(self, "_warm_state", (None, None))
        return last if self.warm_start and shape == self._shape else [None] * n_problems

    def _store(self, problem, fits, training):
        own = [f.attributes for f in fits]
        self._posteriors = [f.posterior for f in fits]
        self._warm_state = ([a["last"] for a in own], self._shape)
        self.history_, self.n_iter_, self.converged_, self.log_evidence_ = combine_fits(fits)
        if self.fit_intercept and np.isinf(self.intercept_prior_variance):
            self.log_evidence_ = np.nan
        self._store_coefficients()
        self._store_prior(own)
        self.effective_dof_ = one_or_stack([a["dof"] for a in own])
        self.variance_method_ = problem.variance
        self.n_mvm_ = int(sum(a["n_products"] for a in own)) + problem.design.n_products
        self.n_newton_iter_ = int(sum(a["n_newton"] for a in own))
        precision = [a["site_precision"] for a in own]
        self.site_precision_ = spread_rows(one_or_stack(precision), training.kept)
        variance = [a["marginal_variance"] for a in own]
        self.marginal_variance_ = spread_rows(one_or_stack(variance), training.kept, np.nan)

    def _store_coefficients(self):
        """Set the attributes that summarise the posterior of the coefficients."""
        d = self.n_features_in_
        means = np.stack([p.mean for p in self._posteriors])
        variances = np.stack([p.coefficient_variance() for p in self._posteriors])
        self.coef_, self.coef_std_ = means[:, :d], np.sqrt(variances[:, :d])
        self.intercept_ = means[:, d] if means.shape[1] > d else np.zeros(len(means))

    def _store_prior(self, own):
        scale = one_or_stack([a["scale"] for a in own])
        if self.prior == "laplace":
            self.laplace_scale_ = scale
            self.prior_variance_ = 2.0 * scale**2
        elif np.ndim(self.prior_variance) == 0:
            self.prior_variance_ = self.prior_variance * scale
        else:
            self.prior_variance_ = np.multiply.outer(scale, np.asarray(self.prior_variance))


def check_positive(name, value, finite=False):
    """Raise unless the parameter is a positive number."""
    check_number(name, value, 0, boundaries="neither")
    if finite and np.isinf(value):
        raise ValueError(f"{name} must be finite.")


def one_or_stack(values, axis=0):
    """Return the value of the one binary problem, or those of all classes stacked."""
    return values[0] if len(values) == 1 else np.stack(values, axis=axis)
