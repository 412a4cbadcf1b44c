"""What fixed points of EP predict, in the units of the user: one of them, or a weighted average."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from .._engine.averaging import (
    draw_mixture,
    mixture_covariance,
    mixture_moments,
    mixture_quantiles,
)
from .._estimator.summary import interval_of
from ._units import Standardisation

__all__ = ["CoefficientMixture", "CoefficientPosterior"]


@dataclass
class CoefficientPosterior:
    """Gaussian posterior of the coefficients at one fixed point.

    The `marginals` (DenseMarginals or LowRankMarginals) are in working units, the variances `noise`
    and `slab` in those of the user; `inclusion` (d,) are the posterior probabilities of the
    coefficients not to be zero, `prior_inclusion` the one before.
    """

    units: Standardisation
    marginals: Any
    noise: float
    slab: float
    prior_inclusion: float
    inclusion: np.ndarray

    @classmethod
    def of(cls, units, state):
        """Return the posterior of an `EnergyState` at a fixed point."""
        factor, unit = state.problem.factor, units.y_scale**2
        noise, slab = float(state.problem.noise * unit), float(factor.slab_variance * unit)
        prior_inclusion, inclusion = float(expit(factor.logit)), state.matched.inclusion
        return cls(units, state.marginals, noise, slab, prior_inclusion, inclusion)

    @property
    def intercept_variance(self):
        """Variance of the intercept given the coefficients."""
        return self.units.intercept_variance(self.noise)

    def latent_covariance(self, first, second):
        """Return the covariance (n1, n2) of the noise-free responses at rows in working units."""
        return self.units.y_scale**2 * self.marginals.covariance(first, second) + (
            self.intercept_variance
        )

    def response_variance(self, rows):
        """Return the variances (n,) of new responses at rows in working units."""
        spread = self.units.y_scale**2 * self.marginals.covariance(rows)
        return spread + self.noise + self.intercept_variance

    def draw(self, n_samples, rng):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        coef = self.units.to_coef(self.marginals.draw(n_samples, rng))
        if not self.units.fit_intercept:
            return coef
        sd = np.sqrt(self.intercept_variance)
        intercept = self.units.intercept(coef) + sd * rng.standard_normal(n_samples)
        return np.column_stack([coef, intercept])


@dataclass
class CoefficientMixture:
    """Posteriors of the same data with weights (M,) that sum to one; one of weight one as well."""

    parts: list[CoefficientPosterior]
    weight: np.ndarray

    @property
    def units(self):
        """The way from working units to those of the user."""
        return self.parts[0].units

    @property
    def _means(self):
        return np.stack([p.marginals.mean for p in self.parts])

    @property
    def _variances(self):
        return np.stack([p.marginals.var for p in self.parts])

    def coef_moments(self):
        """Return means and standard deviations (d,) of the coefficients."""
        mean, var = mixture_moments(self.weight, self._means, self._variances)
        return self.units.to_coef(mean), self.units.to_coef(np.sqrt(var))

    def inclusion(self):
        """Return the probabilities (d,) that coefficients are not zero."""
        total = self.weight @ np.stack([p.inclusion for p in self.parts])
        return np.minimum(total, 1.0)  # rounding

    def hyperparameters(self):
        """Return the fitted attributes of variances, by means of logs, and of the inclusion."""
        return {
            "noise_variance_": _geometric_mean(self.weight, [p.noise for p in self.parts]),
            "slab_variance_": _geometric_mean(self.weight, [p.slab for p in self.parts]),
            "prior_inclusion_": float(self.weight @ [p.prior_inclusion for p in self.parts]),
        }

    def _responses(self, rows):
        """Mean responses (M, n) of the parts at rows in working units."""
        units = self.units
        return np.stack([units.y_offset + units.y_scale * (rows @ m) for m in self._means])

    def predictive(self, X, with_variance):
        """Return mean and variance (n,), or None, of new responses."""
        rows = self.units.rows(X)
        means = self._responses(rows)
        if not with_variance:
            return self.weight @ means, None
        variances = np.stack([p.response_variance(rows) for p in self.parts])
        return mixture_moments(self.weight, means, variances)

    def predictive_interval(self, X, level):
        """Return central intervals (n, 2) of new responses."""
        rows = self.units.rows(X)
        variances = np.stack([p.response_variance(rows) for p in self.parts])
        return _interval(self.weight, self._responses(rows), np.sqrt(variances), level)

    def coef_interval(self, level):
        """Return central intervals (d, 2) of the coefficients."""
        coef = self.units.to_coef
        return _interval(self.weight, coef(self._means), coef(np.sqrt(self._variances)), level)

    def _intercepts(self):
        """Return means and standard deviations (M,) of the intercept, the response at zero."""
        origin = self.units.rows(np.zeros((1, self._means.shape[1])))
        var = [p.latent_covariance(origin, origin)[0, 0] for p in self.parts]
        return self._responses(origin)[:, 0], np.sqrt(var)

    def intercept_std(self):
        """Return the standard deviation of the intercept."""
        mean, std = self._intercepts()
        return float(np.sqrt(mixture_moments(self.weight, mean, std**2)[1]))

    def intercept_interval(self, level):
        """Return the central interval (2,) of the intercept."""
        mean, std = self._intercepts()
        return _interval(self.weight, mean[:, None], std[:, None], level)[0]

    def latent_covariance(self, A, B):
        """Return the covariance (n1, n2) of the noise-free responses at rows of the user."""
        first = self.units.rows(A)
        second = first if B is A else self.units.rows(B)
        cov = np.stack([p.latent_covariance(first, second) for p in self.parts])
        left = self._responses(first)
        right = left if B is A else self._responses(second)
        return mixture_covariance(self.weight, cov, left, right)

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        unit = self.units.to_coef(np.ones(self._means.shape[1]))[index]
        cov = np.stack([p.marginals.block(index) for p in self.parts])
        mean = self._means[:, index]
        return mixture_covariance(self.weight, cov, mean, mean) * np.outer(unit, unit)

    def draw(self, n_samples, rng):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        if len(self.parts) == 1:
            return self.parts[0].draw(n_samples, rng)
        return draw_mixture(
            self.weight, lambda m, size: self.parts[m].draw(size, rng), n_samples, rng
        )


def _interval(weight, mean, std, level):
    """Return central intervals (D, 2) of mixtures of normals, mean and std of shape (M, D)."""
    if len(weight) == 1:
        return interval_of(mean[0], std[0], level)
    return mixture_quantiles(weight, mean, std, [0.5 - 0.5 * level, 0.5 + 0.5 * level]).T


def _geometric_mean(weight, values):
    """Return the weighted geometric mean, exact where all values agree."""
    return float(values[0] * np.exp(weight @ np.log(np.divide(values, values[0]))))
