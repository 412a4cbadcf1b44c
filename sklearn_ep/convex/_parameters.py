"""Checked parameters of the convex variational logistic regression, and the prior they describe."""

from typing import NamedTuple

import numpy as np

from .._engine.class_weights import MOST_WEIGHTS
from .._engine.super_gaussian import BOUNDS
from .._estimator.averaged import check_hyperparameters
from .._estimator.checks import check_choice, check_common, check_number, refuse_joint
from ._sites import SuperGaussianSite

__all__ = [
    "SIZES",
    "Limits",
    "check_parameters",
    "check_positive",
    "given_variance",
    "is_flat",
    "learns_scale",
    "prior_mode",
    "refuse_integration",
    "scale_name",
    "takes_joint",
]


class Sizes(NamedTuple):
    """Sizes from which on another way is taken."""

    exact: int = 4000  # largest matrix that "auto" factorises: some 10 s a step
    # Larger side of it up to which the scale of the prior is averaged over: the more coefficients
    # have learned it, the less it leaves open.
    averaged: int = 1000
    # Outer steps in place of one where a scale is learned from sampled variances: each new scale
    # brings errors of its own into them, and the two settle slowly together.
    longer_learning: int = 3
    double_precision: int = 2**21  # entries up to which products are: smaller data are in caches
    # A natural-gradient step is one visit, and much less than an outer step of the double loop,
    # which is what `max_iter` counts.
    visits_a_step: int = 3
    stream: int = 2000  # coefficients of a stream whose precision matrix is kept


SIZES = Sizes()


class Limits(NamedTuple):
    """How far loops go: the outer one, and Newton's in it."""

    tol: float
    max_iter: int
    damping: float
    inner_tol: float
    max_inner_iter: int

    @classmethod
    def of(cls, estimator, longer=1):
        """Return those of an estimator with so many times the iterations."""
        limits = cls(*(getattr(estimator, name) for name in cls._fields))
        return limits._replace(max_iter=longer * limits.max_iter)

    @property
    def outer(self):
        """Those of the outer loop."""
        return dict(tol=self.tol, max_iter=self.max_iter, damping=self.damping)


SOLVERS = ("auto", "primal", "dual", "cg")
VARIANCES = ("auto", "exact", "calibrated", "monte_carlo", "lanczos")


def check_parameters(estimator):
    """Raise an error that names the parameter unless all of them are usable."""
    check_common(estimator)
    check_choice("bound", estimator.bound, BOUNDS)
    if not isinstance(estimator.prior, SuperGaussianSite):
        check_choice("prior", estimator.prior, ["gaussian", "laplace"])
    check_choice("variance", estimator.variance, VARIANCES)
    check_choice("solver", estimator.solver, SOLVERS)
    check_choice("multi_class", estimator.multi_class, ["auto", "joint", "one_vs_rest"])
    check_choice("calibration", estimator.calibration, ["loo", None])
    check_hyperparameters(estimator.hyperparameters)
    if isinstance(estimator.prior_variance, str):
        check_choice("prior_variance", estimator.prior_variance, ["learn"])
    for name in ("learn_prior", "fit_intercept"):
        check_choice(name, getattr(estimator, name), [True, False])
    check_positive("intercept_prior_variance", estimator.intercept_prior_variance)
    scale = estimator.laplace_scale
    if not (isinstance(scale, str) and scale == "learn"):
        check_positive("laplace_scale", scale, finite=True)
    check_number("inner_tol", estimator.inner_tol, 0, boundaries="neither")
    check_number("n_variance_samples", estimator.n_variance_samples, 1, integer=True)
    check_number("max_inner_iter", estimator.max_inner_iter, 1, integer=True)
    check_number("n_evidence_probes", estimator.n_evidence_probes, 0, integer=True)
    if estimator.n_evidence_probes == 1:
        raise ValueError("n_evidence_probes must be 0 or at least 2, of which there is an error.")
    check_number("forgetting", estimator.forgetting, 0, 1, boundaries="right")
    check_number("stream_rank", estimator.stream_rank, 0, integer=True, optional=True)
    check_number("n_partitions", estimator.n_partitions, 1, integer=True, optional=True)
    _check_learning(estimator)
    if estimator.solver == "dual" and is_flat(estimator):
        raise ValueError(
            'solver="dual" needs a finite intercept_prior_variance; 1e4 differs from a '
            "flat prior by some 1e-5 in the estimates."
        )


def _check_learning(estimator):
    """Raise a ValueError where the prior cannot be learned as asked."""
    if estimator.learn_prior and isinstance(estimator.prior, str) and estimator.prior == "laplace":
        raise ValueError(
            "learn_prior=True is for the Gaussian prior; learn the scale of a Laplace prior "
            'by laplace_scale="learn".'
        )
    if estimator.prior_groups is not None and estimator.prior != "gaussian":
        raise ValueError("prior_groups are for the Gaussian prior.")
    if estimator.learn_prior and estimator.prior == "gaussian" and estimator.bound == "local":
        raise ValueError(
            'learn_prior=True needs bound="kl": the local bound is so much looser for wide '
            "priors that its maximum shrinks the coefficients far too much."
        )


def _is_gaussian(estimator):
    return isinstance(estimator.prior, str) and estimator.prior == "gaussian"


def learns_scale(estimator):
    """Whether the scale of the prior is learned.

    With the local bound a variance that is not given stays at one.
    """
    if isinstance(estimator.prior, str) and estimator.prior == "laplace":
        return isinstance(estimator.laplace_scale, str)
    left_open = _is_gaussian(estimator) and isinstance(estimator.prior_variance, str)
    return bool(estimator.learn_prior) or (left_open and estimator.bound == "kl")


def given_variance(estimator):
    """Return the prior variances that were given, or the one where learning starts."""
    return 1.0 if isinstance(estimator.prior_variance, str) else estimator.prior_variance


def scale_name(estimator):
    """Return the name of the coordinate that an average over the scale of the prior has."""
    if _is_gaussian(estimator):
        return "log_prior_variance"
    return "log_laplace_scale" if isinstance(estimator.prior, str) else "log_prior_scale"


def refuse_integration(estimator, setting):
    """Raise a ValueError where integration is asked for and a setting excludes it."""
    if estimator.hyperparameters == "integrate":
        raise ValueError(
            f"hyperparameters='integrate' does not go with {setting}: use hyperparameters='auto', "
            "which takes the mode there."
        )


def is_flat(estimator):
    """Whether there is an intercept with a flat prior."""
    return bool(estimator.fit_intercept) and np.isinf(estimator.intercept_prior_variance)


def check_positive(name, value, finite=False):
    """Raise unless the parameter is a positive number."""
    check_number(name, value, 0, boundaries="neither")
    if finite and np.isinf(value):
        raise ValueError(f"{name} must be finite.")


def prior_mode(estimator):
    """Return what of the prior a warm start has to agree in."""
    return repr((estimator.prior, learns_scale(estimator), estimator.laplace_scale))


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
