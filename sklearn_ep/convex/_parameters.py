"""Checked parameters of the classifier, and the priors of coefficients that they describe.

The scale of a prior that may be learned is one factor for all features, or one for each of several
named groups of them; an intercept, the last coefficient, keeps its own prior. Where the scale is
averaged over, it has a prior itself, a `PredictorPrior`.
"""

import copy
import warnings
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .._engine.class_structures import MOST_WEIGHTS
from .._engine.rows import find_copies
from .._estimator import checks
from ._sites import BOUNDS, SITES, LaplaceSite, Penalty, SuperGaussianSite
from ._systems import TINY


class Sizes(NamedTuple):
    """Sizes from which on another way is taken."""

    exact: int = 4000  # largest matrix that "auto" factorises: some 10 s a step
    # Outer steps in place of one where a scale is learned from sampled variances: each new scale
    # brings errors of its own into them, and the two settle slowly together.
    longer_learning: int = 3
    double_precision: int = 2**21  # entries up to which products are: smaller data are in caches
    # A natural-gradient step is one visit, and much less than an outer step of the double loop,
    # which is what `max_iter` counts.
    visits_a_step: int = 3
    # Multiplications of a sweep up to which several classes jointly have exact variances, and with
    # them `condition_on`. On 26 tables of 500 rows these take 71 CPU s and sampled ones 80; the
    # mean log losses are .432 and .429.
    joint: float = 1e10
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


VARIANCES = ("auto", "exact", "calibrated", "monte_carlo", "lanczos")


def check_parameters(estimator):
    """Raise an error that names the parameter unless all of them are usable."""
    checks.check_common(estimator)
    checks.check_choice("bound", estimator.bound, BOUNDS)
    if not isinstance(estimator.prior, SuperGaussianSite):
        checks.check_choice("prior", estimator.prior, ["gaussian", "laplace"], SITES)
    checks.check_choice("variance", estimator.variance, VARIANCES)
    checks.check_choice("solver", estimator.solver, ["auto", "primal", "dual", "cg"])
    checks.check_choice("multi_class", estimator.multi_class, ["auto", "joint", "one_vs_rest"])
    checks.check_choice("calibration", estimator.calibration, ["loo", None])
    checks.check_hyperparameters(estimator.hyperparameters)
    if isinstance(estimator.prior_variance, str):
        checks.check_choice(
            "prior_variance", estimator.prior_variance, ["learn"], "a number, or one a column"
        )
    checks.check_choice("learn_prior", estimator.learn_prior, [True, False])
    checks.check_positive("intercept_prior_variance", estimator.intercept_prior_variance)
    scale = estimator.laplace_scale
    if isinstance(scale, str):
        checks.check_choice("laplace_scale", scale, ["learn"], "a number")
    else:
        checks.check_positive("laplace_scale", scale, finite=True)
    checks.check_number("inner_tol", estimator.inner_tol, 0, boundaries="neither")
    checks.check_number("n_variance_samples", estimator.n_variance_samples, 1, integer=True)
    checks.check_number("max_inner_iter", estimator.max_inner_iter, 1, integer=True)
    checks.check_number("n_evidence_probes", estimator.n_evidence_probes, 0, integer=True)
    if estimator.n_evidence_probes == 1:
        raise ValueError("n_evidence_probes must be 0, or at least 2 to state a standard error.")
    checks.check_number("forgetting", estimator.forgetting, 0, 1, boundaries="right")
    checks.check_number("stream_rank", estimator.stream_rank, 0, integer=True, optional=True)
    checks.check_number("n_partitions", estimator.n_partitions, 1, integer=True, optional=True)
    _check_learning(estimator)
    if estimator.solver == "dual" and is_flat(estimator):
        raise ValueError(
            'solver="dual" needs a finite intercept_prior_variance; 1e4 differs from a '
            "flat prior by some 1e-5 in the estimates."
        )


def _check_learning(estimator):
    """Raise a ValueError where the prior cannot be learned as asked."""
    if estimator.learn_prior and estimator.prior == "laplace":
        raise ValueError(
            "learn_prior=True is for the Gaussian prior; learn the scale of a Laplace prior "
            'by laplace_scale="learn".'
        )
    if estimator.prior_groups is not None and estimator.prior != "gaussian":
        raise ValueError("prior_groups are for the Gaussian prior.")
    if estimator.learn_prior and estimator.prior == "gaussian" and estimator.bound == "local":
        raise ValueError(
            'learn_prior=True needs bound="kl": the local bound is loose for wide priors, '
            "so that its maximum shrinks the coefficients far too much."
        )


def learns_scale(estimator):
    """Whether the scale of the prior is learned.

    With the local bound a variance that is not given stays at one.
    """
    if estimator.prior == "laplace":
        return isinstance(estimator.laplace_scale, str)
    left_open = estimator.prior == "gaussian" and isinstance(estimator.prior_variance, str)
    return bool(estimator.learn_prior) or (left_open and estimator.bound == "kl")


def given_variance(estimator):
    """Return the prior variances that were given, or the one where learning starts."""
    return 1.0 if isinstance(estimator.prior_variance, str) else estimator.prior_variance


def scale_name(estimator):
    """Return the name of the coordinate that an average over the scale of the prior has."""
    if estimator.prior == "gaussian":
        return "log_prior_variance"
    return "log_laplace_scale" if isinstance(estimator.prior, str) else "log_prior_scale"


def refuse_integration(estimator, setting):
    """Raise a ValueError where integration is asked for and a setting excludes it."""
    if estimator.hyperparameters == "integrate":
        raise ValueError(
            f"hyperparameters='integrate' cannot be combined with {setting}: use "
            "hyperparameters='auto', which takes the mode there."
        )


def is_flat(estimator):
    """Whether there is an intercept with a flat prior."""
    return bool(estimator.fit_intercept) and np.isinf(estimator.intercept_prior_variance)


# Rows times squared classes, each a number of eight bytes in several matrices, up to which "auto"
# fits classes jointly: 400 classes with 800 rows would take 6 GB. Below, a joint fit of 2,000 rows
# takes 2.3, 7.4 and 18 CPU s for 5, 10 and 20 classes, and one against the rest .4, .5 and 1.1: its
# log losses are higher by .09, .21 and .33.
MOST_PAIRS = 2**25


def _is_apart(estimator, n_rows):
    """Say whether there are two classes, or each is fitted against the rest.

    Warns where that is because "auto" has too many rows and classes for a joint posterior.
    """
    n_classes = len(estimator.classes_)
    if n_classes == 2 or estimator.multi_class == "one_vs_rest":
        return True
    if estimator.multi_class == "joint" or n_rows * n_classes**2 <= MOST_PAIRS:
        return False
    warnings.warn(
        f"{type(estimator).__name__}: {n_classes} classes of {n_rows} rows are fitted one against "
        f"the rest: together they would take {n_rows * n_classes**2 * 8 / 2**30:.1f} GiB and more. "
        "Give multi_class='joint' to fit them jointly, or 'one_vs_rest' to silence this warning.",
        UserWarning,
        stacklevel=4,
    )
    return True


def _joint_solver(estimator, X, y):
    """Return how all classes of rows X, of class indices y, get one posterior.

    By a matrix of the coefficients, "primal", or of the rows, "dual", whichever is cheaper, or by
    products, "cg", with sampled variances. The latter also for text of many words: there exact
    variances take three to fifteen times as long, for a mean log loss of 1.042 of nine sets of 200
    to 800 documents (1.063; by the bound, which samples go by, exact ones have 1.057).
    """
    n = len(find_copies(X, np.ones(X.shape[0]), y).first)  # as if copies were weights
    K, q = len(estimator.classes_), X.shape[1] + bool(estimator.fit_intercept)
    # multiplications of a sweep
    costs = dict(primal=n * q**2 * K * (K + 1) + (K * q) ** 3, dual=3 * n**3 * (K + 1))
    few = K * q <= MOST_WEIGHTS
    wide = few or not sp.issparse(X) or estimator.variance == "exact"
    possible = dict(primal=few, dual=wide and n <= SIZES.exact)
    asked = [estimator.solver] if estimator.solver in costs else costs
    solver = min((s for s in asked if possible[s]), key=costs.__getitem__, default="cg")
    sampled = estimator.multi_class == "joint" and estimator.variance == "calibrated"
    most = SIZES.joint if estimator.variance == "auto" else np.inf
    return "cg" if sampled or costs.get(solver, np.inf) > most else solver


def takes_joint(estimator, X, y):
    """Return the solver of a fit to rows X of classes y with one posterior of all classes.

    None where they do not have one. Raises a ValueError where that is asked for and another
    parameter excludes it.
    """
    if _is_apart(estimator, X.shape[0]):
        return None
    solver = _joint_solver(estimator, X, y)
    variances = "calibrated" if solver == "cg" else "exact"
    excluding = {
        "prior": estimator.prior != "gaussian",
        "bound='local'": estimator.bound == "local",
        f"variance={estimator.variance!r}": estimator.variance not in ("auto", variances),
        f"solver={estimator.solver!r}": estimator.solver not in ("auto", solver),
        "prior_groups": estimator.prior_groups is not None,
        "intercept_prior_variance=inf": is_flat(estimator),
    }
    found = [name for name, excludes in excluding.items() if excludes]
    for name in found:
        checks.refuse_joint(estimator, name)
    return None if found else solver


# Of the factor of a prior variance, or of a scale, in learning, in units of where it starts.
SCALE_RANGE = (1e-6, 1e6)
# A change by 2 % of a prior variance counts like the default tolerance of variances: it is small in
# the posterior, and groups without effect drift to zero slowly.
SCALE_SHARE = 0.05


def log_scales(prior, scale):
    """Return the logs of what is learned of the scale of a prior."""
    return np.log(np.atleast_1d(scale)) if prior.learn else np.empty(0)


def in_log_scales(prior, logs):
    """Return the scale of a prior by these logs, which may begin with others."""
    if not prior.learn:
        return prior.start_scale
    return np.exp(logs) if np.ndim(prior.start_scale) else float(np.exp(logs[-1]))


class PredictorPrior(NamedTuple):
    """Half-Cauchy prior of the prior sd t of the linear predictor, as a density of phi.

    phi is the log of the scale of the prior of the coefficients, log t = log_unit + rate phi. Free
    of units, and proper: evidence alone does not fall as phi goes to minus infinity.
    """

    log_unit: float
    rate: float
    median: float = 2.5  # of t; Gelman et al. (2008) take the same for a column of unit size

    def _log_ratio(self, phi):
        return self.log_unit + self.rate * phi - np.log(self.median)

    def log_density(self, phi):
        """Return the log density of phi."""
        u = self._log_ratio(phi)
        return float(np.log(2.0 * self.rate / np.pi) - np.logaddexp(u, -u))

    def slope(self, phi):
        """Return the derivative of the log density in phi."""
        return -self.rate * float(np.tanh(self._log_ratio(phi)))

    def curvature(self, phi):
        """Return minus the second derivative of the log density in phi."""
        return self.rate**2 - self.slope(phi) ** 2

    @classmethod
    def of(cls, prior, column_variances):
        """Return that of a prior of the coefficients for columns of variances (n_features,) of X.

        None where no column varies, so that the scale does not matter.
        """
        total = float(prior.unit_variances() @ column_variances)
        return cls(0.5 * np.log(total), prior.rate) if 0 < total < np.inf else None

    def centre(self):
        """Return phi at the median of t."""
        return (np.log(self.median) - self.log_unit) / self.rate

    def bounds(self):
        """Return the range (2,) of phi, the same in any units of the columns."""
        return self.centre() + np.array([-14.0, 14.0])


class LearnedScale:
    """What priors have in common whose scale may be learned.

    It starts at the median of the `PredictorPrior` `of_scale`, so that it does not matter in which
    units the columns are.
    """

    learn = False
    evidence_slope: Any
    effective_dof: Any
    n_features: int
    rate: float
    n_sites = 0
    growth = 1.0  # a scale of which the loss has so many powers needs so much shorter steps
    of_scale: PredictorPrior | None = None
    start_scale: Any = 1.0
    groups = None

    def for_columns(self, column_variances):
        """Return the prior for columns of variances (n_features,), where its scale is learned."""
        self.column_variances = column_variances
        self.of_scale = PredictorPrior.of(self, column_variances)
        if self.of_scale is not None:
            self.start_scale = float(np.exp(self.of_scale.centre()))
        return self

    def new_scale(self, u, penalty, scale, predictor, dof, of_scale=None):
        """Return the scale after a fixed-point step to the largest bound, times a prior if any.

        Scales of groups have none.
        """
        slope = self.evidence_slope(u, penalty, scale, predictor, dof)
        alone = of_scale is None or self.groups is not None
        own_slope = 0.0 if alone else of_scale.slope(np.log(scale))
        # One more on both sides: neither is ever negative. Those of groups are not, and come to
        # rest with less where columns tell nothing; with one, sampled fits take a seventh more.
        count = self.n_sites or self.effective_dof(penalty, predictor, dof)
        count = count + (1.0 if self.groups is None else 0.03)
        ratio = (slope / self.rate + count) / (count - own_slope / self.rate)
        return self.clipped(scale * ratio ** (1.0 / self.growth))

    def newton_scale(self, u, penalty, scale, predictor, dof):
        """Return the scales after a step by about the information of their logs, at most e^2.

        For normal coefficients that is Fisher's, in proportion to the sum of squared shrinkage
        factors, where MacKay's step has the sum of the factors and one more. For sites it is the
        sum of the factors, in place of one a coefficient. Where columns tell nothing the bound
        rises all the way to a scale of zero, with a slope that vanishes with the scale: there each
        step is the longest one. Of groups, what they tell of each other counts as their own.
        """
        slope = self.evidence_slope(u, penalty, scale, predictor, dof)
        if self.n_sites:
            known = dof - self._of_intercept(penalty, predictor)
        else:
            known = predictor.squared_shrinkage(penalty.precision, self.groups)
            if self.groups is None:
                known -= self._of_intercept(penalty, predictor) ** 2
        information = np.maximum(self.rate * self.growth * known, 0.5 * np.abs(slope))
        return self.clipped(scale * np.exp(slope / np.maximum(information, TINY)))

    def _of_intercept(self, penalty, predictor):
        """Return the share of an intercept in the effective number of parameters."""
        n, d = len(penalty.precision), self.n_features
        if n == d:
            return 0.0
        return 1.0 - penalty.precision[d] * predictor.row_variance(np.eye(1, n, d))[0]

    def spread(self, scale):
        """Return the scale of each feature, or the one of all of them."""
        return scale if self.groups is None else scale[self.groups]

    def clipped(self, scale):
        """Return a learned scale within its range."""
        return np.clip(scale, *(self.start_scale * end for end in SCALE_RANGE))

    def known(self, phi):
        """Return the same prior with its log scale given."""
        new = copy.copy(self)
        new.start_scale, new.learn = float(np.exp(phi)), False
        return new


def _gaussian_penalty(u, precision):
    """Return the `Penalty` of weights u under N(0, 1 / precision)."""
    slope = precision * u
    return Penalty(0.5 * slope * u, slope, precision, precision)


def _log_peak(precision):
    """Return half the log determinant of precisions, of which flat ones count as one."""
    return 0.5 * float(np.sum(np.log(precision[precision > 0])))


class GaussianPrior(LearnedScale):
    """Independent N(0, scale * variance_j) coefficients; an infinite variance is a flat prior.

    `groups` (n_features,) numbers the group of each of the first `n_features` coefficients, each of
    which has a scale of its own; None gives all of them one. `learn` asks for scales by evidence.
    """

    rate = 0.5  # of the prior sd of a predictor in the scale, which multiplies variances

    def __init__(self, variance, n_features, learn, groups=None):
        self.variance, self.n_features, self.learn = variance, n_features, learn
        self.groups = groups
        if groups is not None:
            self.start_scale = np.ones(groups.max() + 1)

    def for_columns(self, column_variances):
        """Return the prior for columns of variances (n_features,); groups start in their units."""
        super().for_columns(column_variances)
        if self.groups is not None and self.of_scale is not None:
            own = np.bincount(self.groups, self.unit_variances() * column_variances)
            equal = np.exp(2.0 * self.of_scale.log_unit) / len(own)
            share = np.where(own > 0, equal / np.where(own > 0, own, 1.0), 1.0)
            self.start_scale = self.start_scale * share
        return self

    def precision(self, scale):
        """Return the prior precisions."""
        precision = 1.0 / self.variance
        precision[: self.n_features] /= self.spread(scale)
        return precision

    start_precision = precision

    def unit_variances(self):
        """Return the prior variances (n_features,) at a scale of one."""
        return self.variance[: self.n_features]

    def in_units(self, phi):
        """Return log scales as the mean log prior variance of the features."""
        return np.array([np.mean(np.log(self.unit_variances()) + phi)])

    def in_proportion(self, scale):
        """Return the prior with one scale of all features, in the proportions of the given ones."""
        variance = self.variance.copy()
        variance[: self.n_features] *= self.spread(scale)
        same = GaussianPrior(variance, self.n_features, self.learn)
        return same.for_columns(self.column_variances)

    def penalty(self, u, variances, scale):
        """Return the `Penalty` of weights u."""
        return _gaussian_penalty(u, self.precision(scale))

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty; flat priors add nothing."""
        return _log_peak(self.precision(scale))

    def effective_dof(self, penalty, predictor, dof):
        """Return the effective number of parameters, of groups counted by their own variances."""
        if self.groups is None:
            return dof
        shrunk = (penalty.precision * predictor.coefficient_variance())[: self.n_features]
        # sampled variances may add up to more than the prior's
        return np.maximum(np.bincount(self.groups, 1.0 - shrunk), 0.0)

    def evidence_slope(self, u, penalty, scale, predictor, dof):
        """Return the derivative of the bound in the log of the scales, at its optimum."""
        d, dof = self.n_features, self.effective_dof(penalty, predictor, dof)
        sizes = u[:d] ** 2 / self.variance[:d]
        if self.groups is not None:
            return 0.5 * (np.bincount(self.groups, sizes) / scale - dof)
        return 0.5 * (float(np.sum(sizes)) / scale - dof + self._of_intercept(penalty, predictor))


class SitePrior(LearnedScale):
    """Independent coefficients with a super-Gaussian site each, and a Gaussian intercept.

    Of `variance` (n,) only that of an intercept is used. A scale b makes the site t(s / b), and is
    learned from 1 on, so that `site` itself says where learning starts.
    """

    rate = 1.0  # of the prior sd of a predictor in the scale

    def __init__(self, site, variance, n_features, learn):
        self.site, self.variance, self.n_features, self.learn = site, variance, n_features, learn
        self.n_sites, self.growth = n_features, site.growth

    def unit_variances(self):
        """Return variances (n_features,) of about the width of the sites at a scale of one."""
        return np.full(self.n_features, 1.0 / self.site.start_precision())

    def in_units(self, phi):
        """Return log scales as they are."""
        return phi

    def start_precision(self, scale):
        """Return the precisions of a Gaussian prior of about the same width."""
        precision = 1.0 / self.variance
        precision[: self.n_features] = self.site.start_precision() / scale**2
        return precision

    def penalty(self, u, variances, scale):
        """Return the `Penalty` of weights u whose own variances are given."""
        d = self.n_features
        own = self.site.penalty(u[:d] / scale, variances / scale**2)
        sites = (own[0], own[1] / scale, own[2] / scale**2, own[3] / scale**2)
        rest = _gaussian_penalty(u[d:], 1.0 / self.variance[d:])
        return Penalty(*(np.concatenate(pair) for pair in zip(sites, rest, strict=True)))

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty."""
        own = self.site.log_normaliser() + 0.5 * np.log(2.0 * np.pi) - np.log(scale)
        return _log_peak(1.0 / self.variance[self.n_features :]) + self.n_features * float(own)

    def evidence_slope(self, u, penalty, scale, predictor, dof):
        """Return the derivative of the bound in the log scale, at its optimum."""
        variances = predictor.coefficient_variance()[: self.n_features]
        return self.loss_slope(u, penalty, variances) - self.n_features

    def loss_slope(self, u, penalty, variances):
        """Return minus the derivative of the expected loss in the log scale.

        That is the sum of u f' + z pi, which the normaliser asks to be one a coefficient.
        """
        d = self.n_features
        return float(np.sum(u[:d] * penalty.slope[:d] + variances * penalty.precision[:d]))


class CarriedPrior(LearnedScale):
    """The Gaussian with a mean and a system that a stream carries from batch to batch."""

    def __init__(self, mean, system):
        self.mean, self.system = mean, system

    def start_precision(self, scale):
        """Return the diagonal of the precision."""
        return self.system.diagonal()

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty."""
        return 0.5 * self.system.log_det

    def penalty(self, u, variances, scale):
        """Return the `Penalty` of weights u, with one value; the system is the precision."""
        slope = self.system.times(u - self.mean)
        return Penalty(0.5 * (u - self.mean) @ slope, slope, self.system, self.system)


def prior_variances(estimator, d, variance):
    """Return the prior variances of d features, given in `variance`, and of the intercept."""
    if np.ndim(variance) == 0:
        checks.check_positive("prior_variance", variance, finite=True)
    else:
        how: Any = dict(ensure_2d=False, allow_nd=True, ensure_all_finite=False)
        what = f"a number or one for each of {d} columns"
        variance = checks.checked_array("prior_variance", variance, what, **how)
    variance = np.asarray(variance, dtype=float)
    if variance.shape not in ((), (d,)):
        raise ValueError(
            f"prior_variance must be a number or have shape ({d},), got {variance.shape}."
        )
    if not np.all((variance > 0) & np.isfinite(variance)):
        raise ValueError("prior_variance must be positive and finite for every feature.")
    tail = [estimator.intercept_prior_variance] * bool(estimator.fit_intercept)
    return np.append(np.broadcast_to(variance, d), tail)


def make_prior(estimator, d, column_variances):
    """Return the prior of d features and the intercept, if there is one.

    `column_variances()` are those (d,) of the features, asked for where a scale is learned.
    """
    variance = prior_variances(estimator, d, given_variance(estimator))
    groups = checks.group_numbers("prior_groups", estimator.prior_groups, d)
    learn, site = learns_scale(estimator), estimator.prior
    if site == "laplace":
        site = LaplaceSite(1.0 if learn else estimator.laplace_scale, estimator.bound)
    if site == "gaussian":
        prior: LearnedScale = GaussianPrior(variance, d, learn, groups if learn else None)
    else:
        prior = SitePrior(site, variance, d, learn)
    return prior.for_columns(column_variances()) if learn else prior
