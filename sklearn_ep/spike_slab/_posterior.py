"""What fixed points of EP predict, in the units of the user: one of them, or a weighted average.

Moments are those of Gaussian posteriors. Quantiles know that coefficients may be zero, and so do
draws where that is asked for; quantiles of responses are brought to the Gaussian mean and variance.

A fixed point describes a coefficient twice, with one mean and variance: by the Gaussian of all
coefficients, and by its tilted distribution, prior times cavity, which is zero with positive
probability and normal otherwise. Intervals of a coefficient are those of the tilted distribution.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtr
from sklearn.utils import gen_batches

from .._engine.hyper import (
    draw_mixture,
    mixture_covariance,
    mixture_moments,
    mixture_quantiles,
)
from ._correlation import correlations
from ._linear_model import BLOCK_BYTES
from ._sequential_draws import SequentialDraws
from ._units import Standardisation


class TiltedMarginals(NamedTuple):
    """Zero with probability 1 - inclusion, else normal; arrays (d,), or (M, d) of M parts."""

    inclusion: np.ndarray
    slab_mean: np.ndarray
    slab_sd: np.ndarray


def tilted_quantiles(weight, tilted, levels):
    """Return quantiles (len(levels), d) of mixtures, weight (M,), of `TiltedMarginals` (M, d)."""
    level = np.asarray(levels)[:, None]
    share = weight[:, None] * tilted.inclusion
    total = share.sum(axis=0)
    below = np.sum(share * ndtr(-tilted.slab_mean / tilted.slab_sd), axis=0)
    out = np.zeros((len(level), len(total)))
    low, high = level < below, 1.0 - level < total - below
    for side, own in ((low, level), (high, level - (1.0 - total))):
        rows, columns = np.nonzero(side)
        if columns.size:
            weights = share[:, columns] / total[columns]
            mean, sd = tilted.slab_mean[:, columns], tilted.slab_sd[:, columns]
            at = np.broadcast_to(own, side.shape)[rows, columns] / total[columns]
            out[rows, columns] = mixture_quantiles(weights, mean, sd, at[None])[0]
    return out


# Draws that tell the quantiles of responses, of the noise for each of them, and rows at a time.
N_DRAWS, N_NOISE, ROWS = 1000, 4, 512


@dataclass
class CoefficientPosterior:
    """Posterior of the coefficients at one fixed point.

    `tilted` marginals and `draws` are in working units, as the Gaussian `marginals` are, the
    variances `noise` and `slab` in those of the user; `prior_inclusion` is the probability of a
    coefficient not to be zero before the data.
    """

    units: Standardisation
    tilted: TiltedMarginals
    draws: SequentialDraws
    noise: float
    slab: float
    prior_inclusion: float

    @classmethod
    def of(cls, units, state):
        """Return the posterior of an `EnergyState` at a fixed point."""
        factor, unit = state.problem.factor, units.y_scale**2
        noise, slab = float(state.problem.noise * unit), float(factor.slab_variance * unit)
        slabs = state.matched_tilted
        sd = np.sqrt(slabs.slab_var)
        tilted = TiltedMarginals(state.matched.inclusion, slabs.slab_mean, sd)
        p, cavity = state.problem, np.stack([state.matched.shift, state.matched.precision])
        own = np.stack([state.mean, np.ones_like(state.mean)]) / state.var - cavity
        at = state.marginals, state.sites, own, state.matched.inclusion
        draws = SequentialDraws(p.model, p.factor, p.noise, *at)
        return cls(units, tilted, draws, noise, slab, float(expit(factor.logit)))

    @property
    def marginals(self) -> Any:
        """Gaussian posterior in working units: DenseMarginals or LowRankMarginals."""
        return self.draws.marginals

    @property
    def inclusion(self):
        """Probabilities (d,) of the coefficients not to be zero."""
        return self.tilted.inclusion

    @property
    def intercept_variance(self):
        """Variance of the intercept given the coefficients."""
        return self.units.intercept_variance(self.noise)

    def latent_covariance(self, first, second):
        """Return the covariance (n1, n2) of the noise-free responses at rows in working units."""
        return self.units.y_scale**2 * self.marginals.covariance(first, second) + (
            self.intercept_variance
        )

    def draw(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        drawn_from = self.draws if exact_zeros else self.marginals
        coef = self.units.to_coef(drawn_from.draw(n_samples, rng))
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
    def means(self):
        """Means (M, d) of the coefficients, in working units."""
        return np.stack([p.marginals.mean for p in self.parts])

    @property
    def _variances(self):
        return np.stack([p.marginals.var for p in self.parts])

    def coef_moments(self):
        """Return means and standard deviations (d,) of the coefficients."""
        mean, var = mixture_moments(self.weight, self.means, self._variances)
        return self.units.to_coef(mean), self.units.to_coef(np.sqrt(var))

    def inclusion(self):
        """Return the probabilities (d,) that coefficients are not zero."""
        total = self.weight @ np.stack([p.inclusion for p in self.parts])
        return np.minimum(total, 1.0)  # rounding

    def hyperparameters(self):
        """Return the fitted attributes of variances, by means of logs, and of the inclusion."""
        return {
            "noise_variance_": geometric_mean(self.weight, [p.noise for p in self.parts]),
            "slab_variance_": geometric_mean(self.weight, [p.slab for p in self.parts]),
            "prior_inclusion_": float(self.weight @ [p.prior_inclusion for p in self.parts]),
        }

    def coef_interval(self, level):
        """Return central intervals (d, 2) of the coefficients, [0, 0] where they are surely out."""
        parts = [p.tilted for p in self.parts]
        tilted = TiltedMarginals(*map(np.stack, zip(*parts, strict=True)))
        ends = tilted_quantiles(self.weight, tilted, [0.5 - 0.5 * level, 0.5 + 0.5 * level])
        return self.units.to_coef(ends).T

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        unit = self.units.to_coef(np.ones(self.means.shape[1]))[index]
        cov = np.stack([p.marginals.block(index) for p in self.parts])
        mean = self.means[:, index]
        return mixture_covariance(self.weight, cov, mean, mean) * np.outer(unit, unit)

    def draw(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        if len(self.parts) == 1:
            return self.parts[0].draw(n_samples, rng, exact_zeros)
        return draw_mixture(
            self.weight, lambda m, size: self.parts[m].draw(size, rng, exact_zeros), n_samples, rng
        )

    @property
    def responses(self):
        """What the coefficients say of responses at rows."""
        return ResponseMixture(self)

    def candidates(self):
        """Return columns (u,), which are in what model (S, u), weights, absolute correlations."""
        draws = self.draw(N_DRAWS, np.random.RandomState(0), exact_zeros=True)
        on = draws[:, : self.means.shape[1]] != 0
        columns = np.flatnonzero(on.any(axis=0))
        among = correlations(self.parts[0].draws.model, columns, columns)
        return columns, on[:, columns], np.full(N_DRAWS, 1.0 / N_DRAWS), among

    # ------------------------------------------------------------------------ responses at rows

    @property
    def intercept_variances(self):
        """Variances (M,) of the intercept given the coefficients."""
        return np.array([p.intercept_variance for p in self.parts])

    @property
    def extra(self):
        """Variances (M,) of noise and intercept in new responses."""
        return np.array([p.noise for p in self.parts]) + self.intercept_variances

    def at(self, rows):
        """Mean responses (M, n) of the parts at rows in working units."""
        units = self.units
        return np.stack([units.y_offset + units.y_scale * (rows @ m) for m in self.means])

    def mean_at(self, rows):
        """Mean responses (n,) at rows in working units."""
        return self.weight @ self.at(rows)

    def moments_at(self, rows, extra):
        """Mean and variance (n,) of responses at rows, those of the parts with `extra` (M,)."""
        spread = np.stack([p.marginals.covariance(rows) for p in self.parts])
        variances = self.units.y_scale**2 * spread + extra[:, None]
        return mixture_moments(self.weight, self.at(rows), variances)

    def covariance_at(self, first, second):
        """Covariance (n1, n2) of the noise-free responses at rows in working units."""
        cov = np.stack([p.latent_covariance(first, second) for p in self.parts])
        left = self.at(first)
        right = left if second is first else self.at(second)
        return mixture_covariance(self.weight, cov, left, right)

    def sums_at(self, rows, extra):
        """Draws (S, n) of responses at rows, in working units, with noise of variances (M,).

        They have a seed of their own, and the share of each part is its weight, so that an interval
        is a function of the fit.
        """
        rng = np.random.RandomState(0)
        counts = np.diff(np.rint(np.cumsum([0.0, *self.weight]) * N_DRAWS).astype(int))
        step, sd = max(1, BLOCK_BYTES // (8 * rows.shape[1])), np.sqrt(extra) / self.units.y_scale
        sums = []
        for part, own_sd, count in zip(self.parts, sd, counts, strict=True):
            for batch in gen_batches(int(count), step):
                size = batch.stop - batch.start
                signal = part.draws.draw(size, rng) @ rows.T
                noise = own_sd * rng.standard_normal((N_NOISE, size, 1))
                sums.append((signal + noise).reshape(-1, rows.shape[0]))
        return np.concatenate(sums)


@dataclass
class ResponseMixture:
    """A mixture of coefficients at rows of the user, of which the one at zero is the intercept."""

    mixture: Any

    def predictive(self, X, with_variance):
        """Return mean and variance (n,), or None, of new responses."""
        rows = self.mixture.units.rows(X)
        if not with_variance:
            return self.mixture.mean_at(rows), None
        return self.mixture.moments_at(rows, self.mixture.extra)

    def predictive_interval(self, X, level):
        """Return central intervals (n, 2) of new responses."""
        blocks = [self.mixture.units.rows(X[b]) for b in gen_batches(X.shape[0], ROWS)]
        return np.concatenate([self._interval(rows, level, self.mixture.extra) for rows in blocks])

    def _interval(self, rows, level, extra):
        """Return central intervals (n, 2) of responses with variances `extra` (M,) added.

        Their shape is that of draws, their mean and variance those of the mixture.
        """
        mean, var = self.mixture.moments_at(rows, extra)
        sums = self.mixture.sums_at(rows, extra)
        ends = np.quantile(sums, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0)
        spread = sums.std(axis=0)
        ends = (ends - sums.mean(axis=0)) / np.where(spread > 0, spread, 1.0)  # a row may be zero
        return (mean + np.sqrt(var) * ends).T

    def latent_covariance(self, A, B):
        """Return the covariance (n1, n2) of the noise-free responses at rows of the user."""
        first = self.mixture.units.rows(A)
        return self.mixture.covariance_at(first, first if B is A else self.mixture.units.rows(B))

    def _origin(self):
        return self.mixture.units.rows(np.zeros((1, self.mixture.means.shape[1])))

    def intercept_std(self):
        """Return the standard deviation of the intercept, the response at zero."""
        extra = self.mixture.intercept_variances
        return float(np.sqrt(self.mixture.moments_at(self._origin(), extra)[1][0]))

    def intercept_interval(self, level):
        """Return the central interval (2,) of the intercept."""
        return self._interval(self._origin(), level, self.mixture.intercept_variances)[0]


def geometric_mean(weight, values):
    """Return the weighted geometric mean, exact where all values agree."""
    return float(values[0] * np.exp(weight @ np.log(np.divide(values, values[0]))))
