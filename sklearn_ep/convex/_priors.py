"""Priors of the coefficients: what the loops of this room ask of them.

The scale that may be learned is one factor for all features, or one for each of several named
groups of them; an intercept, the last coefficient, keeps its own prior. Where the scale is averaged
over, it has a prior itself, a `PredictorPrior`.
"""

import copy
from typing import NamedTuple

import numpy as np

from .._engine.super_gaussian import Penalty
from ._parameters import check_positive, given_variance, learns_scale
from ._sites import LaplaceSite, SuperGaussianSite
from ._systems import TINY

__all__ = [
    "GROUP_SHARE",
    "SCALE_RANGE",
    "CarriedPrior",
    "GaussianPrior",
    "PredictorPrior",
    "PriorTerms",
    "SitePrior",
    "in_log_scales",
    "make_prior",
    "prior_variances",
]

SCALE_RANGE = (1e-6, 1e6)  # of the factor of a prior variance, or of a scale, in learning
# A change by 2 % of the variance of a group counts like the default tolerance of variances: it is
# small in the posterior, and groups without effect drift to zero slowly.
GROUP_SHARE = 0.05


class PriorTerms(NamedTuple):
    """What a prior adds to the natural parameters of a posterior N(u, A^-1), and to its bound.

    precision, (n,) or (n, n), and shift (n,) are those of the Gaussian that stands for it, slope
    (n,) is the gradient of the expected loss in u, `loss` that loss.
    """

    precision: np.ndarray
    shift: np.ndarray
    slope: np.ndarray
    loss: float


def in_log_scales(prior, logs):
    """Return the scale of a prior by the logs of what is learned of it."""
    if not prior.learn:
        return prior.start_scale
    return np.exp(logs) if np.ndim(prior.start_scale) else float(np.exp(logs[0]))


def _site_terms(prior, u, scale, root):
    """Return the `PriorTerms` of independent coefficients; the covariance is root' root."""
    m, variances = prior.n_sites, np.einsum("ij,ij->j", root, root)
    p = prior.penalty(u, variances[:m], scale)
    loss = float(np.sum(p.value)) + 0.5 * float(p.precision[m:] @ variances[m:])
    return PriorTerms(p.precision, p.precision * u - p.slope, p.slope, loss)


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


def _known(prior, phi):
    """Return the same prior with its log scale given."""
    new = copy.copy(prior)
    new.start_scale, new.learn = float(np.exp(phi)), False
    return new


class GaussianPrior:
    """Independent N(0, scale * variance_j) coefficients; an infinite variance is a flat prior.

    `groups` (n_features,) numbers the group of each of the first `n_features` coefficients, each of
    which has a scale of its own; None gives all of them one. `learn` asks for scales by evidence.
    """

    n_sites = 0
    rate = 0.5  # of the prior sd of a predictor in the scale, which multiplies variances

    def __init__(self, variance, n_features, learn, groups=None):
        self.scale_share = 1.0 if groups is None else GROUP_SHARE
        self.variance, self.n_features, self.learn = variance, n_features, learn
        self.groups = groups
        self.start_scale = 1.0 if groups is None else np.ones(groups.max() + 1)

    def spread(self, scale):
        """Return the scale of each feature, or the one of all of them."""
        return scale if self.groups is None else scale[self.groups]

    def precision(self, scale):
        """Return the prior precisions."""
        precision = 1.0 / self.variance
        precision[: self.n_features] /= self.spread(scale)
        return precision

    start_precision = precision
    terms = _site_terms
    known = _known

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
        return GaussianPrior(variance, self.n_features, self.learn)

    def penalty(self, u, variances, scale):
        """Return the `Penalty` of weights u."""
        precision = self.precision(scale)
        slope = precision * u
        return Penalty(0.5 * slope * u, slope, precision, precision)

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty; flat priors add nothing."""
        precision = self.precision(scale)
        return 0.5 * float(np.sum(np.log(precision[precision > 0])))

    def new_scale(self, u, penalty, scale, predictor, dof):
        """Return MacKay's update of the scale: |u|^2 over the effective number of parameters."""
        if self.groups is None:
            size, dof = self._size_and_dof(u, penalty, predictor, dof)
            return size / max(dof, TINY)
        # of a group parameters are counted by their own variances
        d = self.n_features
        u, precision = u[:d], penalty.precision[:d]
        size = np.bincount(self.groups, u * u * precision)
        dof = np.bincount(self.groups, 1.0 - precision * predictor.coefficient_variance()[:d])
        return scale * np.clip(size / np.maximum(dof, TINY), 1e-3, 1e3)

    def evidence_slope(self, u, penalty, scale, predictor, dof):
        """Return the derivative of the bound in the log of the one scale, at its optimum."""
        size, dof = self._size_and_dof(u, penalty, predictor, dof)
        return 0.5 * (size / scale - dof)

    def update(self, slope, own_slope, dof):
        """Return the step in the log scale that MacKay's update is with a prior of the scale.

        `slope` is that of the bound, `own_slope` that of the prior; one more is added to both
        sides, so that neither is ever negative.
        """
        return np.log((2.0 * slope + dof + 1.0) / (dof + 1.0 - 2.0 * own_slope))

    def _size_and_dof(self, u, penalty, predictor, dof):
        """Return |u|^2 over the prior variances at a scale of one, and the dof of features."""
        d = self.n_features
        if len(u) > d:
            dof -= 1.0 - penalty.precision[d] * predictor.coefficient_variance()[d]
        return float(np.sum(u[:d] ** 2 / self.variance[:d])), dof


class SitePrior:
    """Independent coefficients with a super-Gaussian site each, and a Gaussian intercept.

    Of `variance` (n,) only that of an intercept is used. A scale b makes the site t(s / b), and is
    learned from 1 on, so that `site` itself says where learning starts.
    """

    start_scale, groups, scale_share = 1.0, None, 1.0
    rate = 1.0  # of the prior sd of a predictor in the scale

    def __init__(self, site, variance, n_features, learn):
        self.site, self.variance, self.n_features, self.learn = site, variance, n_features, learn
        self.n_sites = n_features

    def spread(self, scale):
        """Return the scale of each feature: one for all of them."""
        return scale

    terms = _site_terms
    known = _known

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
        precision = 1.0 / self.variance[d:]
        slope = precision * u[d:]
        rest = Penalty(0.5 * slope * u[d:], slope, precision, precision)
        return Penalty(*(np.concatenate(pair) for pair in zip(sites, rest, strict=True)))

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty."""
        precision = 1.0 / self.variance[self.n_features :]
        gaussian = 0.5 * float(np.sum(np.log(precision[precision > 0])))
        own = self.site.log_normaliser() + 0.5 * np.log(2.0 * np.pi) - np.log(scale)
        return gaussian + self.n_features * float(own)

    def new_scale(self, u, penalty, scale, predictor, dof):
        """Return the scale at which the bound is stationary, by one fixed-point step.

        The derivative of the expected loss in log scale is minus the sum of u f' + z pi, which the
        normaliser asks to be one a coefficient.
        """
        variances = predictor.coefficient_variance()[: self.n_features]
        return self.moved_scale(scale, u, variances, penalty)

    def moved_scale(self, scale, u, variances, penalty):
        """Return the same from the variances of the coefficients."""
        slopes = self._loss_slopes(u, penalty, variances)
        return float(scale * (slopes / self.n_features) ** (1.0 / self.site.growth))

    def evidence_slope(self, u, penalty, scale, predictor, dof):
        """Return the derivative of the bound in the log scale, at its optimum."""
        variances = predictor.coefficient_variance()[: self.n_features]
        return float(self._loss_slopes(u, penalty, variances)) - self.n_features

    def update(self, slope, own_slope, dof):
        """Return the step in the log scale that `new_scale` is with a prior of the scale."""
        d = self.n_features
        return np.log((slope + d + 1.0) / (d + 1.0 - own_slope)) / self.site.growth

    def _loss_slopes(self, u, penalty, variances):
        """Return minus the derivative of the expected loss in the log scale."""
        d = self.n_features
        return np.sum(u[:d] * penalty.slope[:d] + variances * penalty.precision[:d])


class CarriedPrior:
    """The Gaussian N(mean, precision^-1) that a stream carries from batch to batch."""

    n_sites, learn, groups, start_scale = 0, False, None, 1.0

    def __init__(self, mean, precision, log_det):
        self.mean, self.matrix, self.log_det = mean, precision, log_det

    def start_precision(self, scale):
        """Return the precision (n, n)."""
        return self.matrix

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its expected loss."""
        return 0.5 * self.log_det

    def terms(self, u, scale, root):
        """Return the `PriorTerms` of a posterior whose covariance is root' root."""
        slope = self.matrix @ (u - self.mean)
        loss = 0.5 * (u - self.mean) @ slope
        loss += 0.5 * np.einsum("ij,ij->", root @ self.matrix, root)
        return PriorTerms(self.matrix, self.matrix @ self.mean, slope, float(loss))


def _checked_prior_variance(prior_variance, d):
    """Return the prior variances as an array that broadcasts to (d,)."""
    if np.ndim(prior_variance) == 0:
        check_positive("prior_variance", prior_variance, finite=True)
        return np.asarray(prior_variance, dtype=float)
    variance = np.asarray(prior_variance, dtype=float)
    if variance.shape != (d,):
        raise ValueError(
            f"prior_variance must be a number or have shape ({d},), got {variance.shape}."
        )
    if not np.all((variance > 0) & np.isfinite(variance)):
        raise ValueError("prior_variance must be positive and finite for every feature.")
    return variance


def _checked_groups(groups, d):
    """Return the number of the group of each of d features, or None."""
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (d,):
        raise ValueError(f"prior_groups must have one label for each of {d} features.")
    return np.unique(labels, return_inverse=True)[1]


def prior_variances(estimator, d, variance):
    """Return the prior variances of d features, given in `variance`, and of the intercept."""
    tail = [estimator.intercept_prior_variance] * bool(estimator.fit_intercept)
    return np.append(np.broadcast_to(_checked_prior_variance(variance, d), d), tail)


def make_prior(estimator, d):
    """Return the prior of d features and the intercept, if there is one."""
    variance = prior_variances(estimator, d, given_variance(estimator))
    groups = _checked_groups(estimator.prior_groups, d)
    learn = learns_scale(estimator)
    if isinstance(estimator.prior, SuperGaussianSite):
        return SitePrior(estimator.prior, variance, d, learn)
    if estimator.prior == "gaussian":
        return GaussianPrior(variance, d, learn, groups if learn else None)
    scale = 1.0 if learn else estimator.laplace_scale
    return SitePrior(LaplaceSite(scale, estimator.bound), variance, d, learn)
