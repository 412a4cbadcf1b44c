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
import scipy.sparse as sp
from scipy.special import expit, ndtr, ndtri
from sklearn.utils import gen_batches

from .._engine.hyper import draw_mixture, mixture_moments, mixture_quantiles
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

    def draw(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        drawn_from = self.draws if exact_zeros else self.marginals
        coef = self.units.to_coef(drawn_from.draw(n_samples, rng))
        return self.units.with_intercept(coef, self.noise, rng)


class SparseMixture:
    """Posteriors of coefficients with weights (M,) that sum to one: what all such mixtures share.

    A mixture has `units`, `weight`, `means` (M, d) in working units, `inclusion` (d,), and the
    `noise`, `slab` (M,) and `prior_inclusion` (M,) of its parts, variances in units of the user.
    """

    rows_at_a_time = 512
    units: Any
    weight: np.ndarray
    means: Any
    noise: np.ndarray
    slab: np.ndarray
    prior_inclusion: np.ndarray
    # means and variances (d,), what `tilted_quantiles` wants of some columns, mean covariance
    _moments: Any
    _tilted: Any
    _block: Any

    def coef_moments(self):
        """Return means and standard deviations (d,) of the coefficients."""
        mean, var = self._moments()
        return self.units.to_coef(mean), self.units.to_coef(np.sqrt(var))

    def hyperparameters(self):
        """Return the fitted attributes of variances, by means of logs, and of the inclusion."""
        return {
            "noise_variance_": _geometric_mean(self.weight, self.noise),
            "slab_variance_": _geometric_mean(self.weight, self.slab),
            "prior_inclusion_": float(self.weight @ self.prior_inclusion),
        }

    def coef_interval(self, level):
        """Return central intervals (d, 2) of the coefficients, [0, 0] where they are surely out."""
        ends, tail = np.zeros((2, self.means.shape[1])), 0.5 - 0.5 * level
        columns, tilted = self._tilted(tail)
        ends[:, columns] = tilted_quantiles(self.weight, tilted, [tail, 1.0 - tail])
        return self.units.to_coef(ends).T

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        unit, mean = self.units.to_coef(np.ones(self.means.shape[1]))[index], self.means[:, index]
        if sp.issparse(mean):
            mean = mean.toarray()
        return self.covariance(self._block(index), mean, mean) * np.outer(unit, unit)

    def covariance(self, within, left, right):
        """Return the covariance (n1, n2) of what has means (M, .) and this one within parts."""
        apart, other = left - self.weight @ left, right - self.weight @ right
        return within + (self.weight * apart.T) @ other

    @property
    def intercept_variances(self):
        """Variances (M,) of the intercept given the coefficients."""
        return self.units.intercept_variance(self.noise) + np.zeros_like(self.noise)

    @property
    def responses(self):
        """What the coefficients say of responses at rows."""
        return ResponseMixture(self)


@dataclass
class CoefficientMixture(SparseMixture):
    """Fixed points of EP on the same data with weights (M,); one of weight one as well."""

    parts: list[CoefficientPosterior]
    weight: np.ndarray

    def __post_init__(self):
        self.units = self.parts[0].units
        self.noise, self.slab, self.prior_inclusion = (
            np.array([getattr(p, name) for p in self.parts])
            for name in ("noise", "slab", "prior_inclusion")
        )

    def _stacked(self, of_one):
        return np.stack([of_one(p) for p in self.parts])

    def _mean(self, of_one):
        return sum(w * of_one(p) for w, p in zip(self.weight, self.parts, strict=True))

    @property
    def means(self):
        """Means (M, d) of the coefficients, in working units."""
        return self._stacked(lambda p: p.marginals.mean)

    @property
    def inclusion(self):
        """Probabilities (d,) that coefficients are not zero."""
        total = self.weight @ self._stacked(lambda p: p.tilted.inclusion)
        return np.minimum(total, 1.0)  # rounding

    def _moments(self):
        return mixture_moments(self.weight, self.means, self._stacked(lambda p: p.marginals.var))

    def _tilted(self, tail):
        parts = [p.tilted for p in self.parts]
        return slice(None), TiltedMarginals(*map(np.stack, zip(*parts, strict=True)))

    def _block(self, index):
        return self._mean(lambda p: p.marginals.block(index))

    def within(self, first, second=None):
        """Return the mean covariance (n1, n2) or variance (n,) of the parts at rows."""
        return self._mean(lambda p: p.marginals.covariance(first, second))

    def draw(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        return draw_mixture(
            self.weight, lambda m, size: self.parts[m].draw(size, rng, exact_zeros), n_samples, rng
        )

    def candidates(self):
        """Return columns (u,), which are in what model (S, u), weights, absolute correlations."""
        draws = self.draw(N_DRAWS, np.random.RandomState(0), exact_zeros=True)
        on = draws[:, : self.means.shape[1]] != 0
        columns = np.flatnonzero(on.any(axis=0))
        among = correlations(self.parts[0].draws.model, columns, columns)
        return columns, on[:, columns], np.full(N_DRAWS, 1.0 / N_DRAWS), among

    def signals(self, rows, rng):
        """Draw noise-free responses (S, n) at rows, of the parts (S,), by their weights."""
        counts = np.diff(np.rint(np.cumsum([0.0, *self.weight]) * N_DRAWS).astype(int))
        step, out = max(1, BLOCK_BYTES // (8 * rows.shape[1])), []
        for part, count in zip(self.parts, counts, strict=True):
            for batch in gen_batches(int(count), step):
                out.append(part.draws.draw(batch.stop - batch.start, rng) @ rows.T)
        return np.repeat(np.arange(len(counts)), counts), np.concatenate(out)


@dataclass
class ResponseMixture:
    """A `SparseMixture` at rows of the user, of which the one at zero is the intercept."""

    mixture: Any

    @property
    def _extra(self):
        """Variances (M,) of noise and intercept in new responses."""
        return self.mixture.noise + self.mixture.intercept_variances

    def predictive(self, X, with_variance):
        """Return mean and variance (n,), or None, of new responses."""
        mixture, rows = self.mixture, self.mixture.units.rows(X)
        if not with_variance:
            return mixture.units.response(rows @ (mixture.weight @ mixture.means)), None
        return self._moments(rows, self._extra)

    def _moments(self, rows, extra):
        """Mean and variance (n,) at rows in working units, `extra` (M,) added."""
        mixture, parts = self.mixture, []
        for batch in gen_batches(len(rows), mixture.rows_at_a_time):
            at = mixture.means @ rows[batch].T
            parts.append(mixture_moments(mixture.weight, at, mixture.within(rows[batch])))
        mean, var = (np.concatenate(p) for p in zip(*parts, strict=True))
        unit = mixture.units.y_scale**2
        return mixture.units.response(mean), unit * var + mixture.weight @ extra

    def predictive_interval(self, X, level):
        """Return central intervals (n, 2) of new responses."""
        blocks = [self.mixture.units.rows(X[b]) for b in gen_batches(X.shape[0], ROWS)]
        return np.concatenate([self._interval(rows, level, self._extra) for rows in blocks])

    def _interval(self, rows, level, extra):
        """Return central intervals (n, 2) of responses with variances `extra` (M,) added.

        Their shape is that of draws, their mean and variance those of the mixture. Draws have a
        seed of their own, so that an interval is a function of the fit.
        """
        mean, var = self._moments(rows, extra)
        rng = np.random.RandomState(0)
        part, signal = self.mixture.signals(rows, rng)
        sd = np.sqrt(extra[part]) / self.mixture.units.y_scale
        # normal draws that fill their distribution evenly
        place = (rng.permutation(N_NOISE * len(part)) + 0.5) / (N_NOISE * len(part))
        noise = sd[:, None] * ndtri(place).reshape(N_NOISE, -1, 1)
        sums = (signal + noise).reshape(-1, len(rows))
        ends = np.quantile(sums, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0)
        spread = sums.std(axis=0)
        ends = (ends - sums.mean(axis=0)) / np.where(spread > 0, spread, 1.0)  # a row may be zero
        return (mean + np.sqrt(var) * ends).T

    def latent_covariance(self, A, B):
        """Return the covariance (n1, n2) of the noise-free responses at rows of the user."""
        mixture = self.mixture
        first, second = (mixture.units.rows(rows) for rows in (A, B))
        left, right = (mixture.means @ rows.T for rows in (first, second))
        cov = mixture.covariance(mixture.within(first, second), left, right)
        return mixture.units.y_scale**2 * cov + mixture.weight @ mixture.intercept_variances

    def _origin(self):
        return self.mixture.units.rows(np.zeros((1, self.mixture.means.shape[1])))

    def intercept_std(self):
        """Return the standard deviation of the intercept, the response at zero."""
        extra = self.mixture.intercept_variances
        return float(np.sqrt(self._moments(self._origin(), extra)[1][0]))

    def intercept_interval(self, level):
        """Return the central interval (2,) of the intercept."""
        return self._interval(self._origin(), level, self.mixture.intercept_variances)[0]


def _geometric_mean(weight, values):
    """Return the weighted geometric mean, exact where all values agree."""
    return float(values[0] * np.exp(weight @ np.log(values / values[0])))
