"""What a sparse classifier predicts: posteriors at nodes of hyperparameters, and their mixture."""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from .._engine.hyper import draw_mixture, mixture_covariance, mixture_moments, mixture_quantiles
from .._estimator.averaged import AveragedPosterior
from ._posterior import TiltedMarginals, tilted_quantiles
from ._probit import PROBIT, Intercept
from ._sequential_draws import SequentialDraws
from ._units import dense_blocks, dense_rows


@dataclass
class ProbitPosterior:
    """Posterior at one fixed point, of coefficients (w - offset) / scale of the user's columns."""

    factor = PROBIT  # link of the latent value to the label

    offset: np.ndarray
    scale: np.ndarray
    intercept: Intercept
    fit_intercept: bool
    tilted: TiltedMarginals
    draws: SequentialDraws
    slab: float
    prior_inclusion: float

    @classmethod
    def of(cls, offset, scale, state):
        """Return the posterior of a `ProbitState` of columns that were moved and scaled."""
        factor, t = state.problem.factor, state.tilted
        at = state.marginals, state.columns, state.columns, t.inclusion
        draws = SequentialDraws(state.model, factor, 1.0, *at)
        tilted = TiltedMarginals(t.inclusion, t.slab_mean, np.sqrt(t.slab_var))
        return cls(
            offset, scale, state.intercept, state.problem.fit_intercept, tilted, draws,
            float(factor.slab_variance), float(expit(factor.logit)),
        )  # fmt: skip

    @property
    def marginals(self):
        """Gaussian posterior of the coefficients of working columns."""
        return self.draws.marginals

    def rows(self, X):
        """Return dense rows as the coefficients meet them: their distance to the centre."""
        return (dense_rows(X) - self.offset) / self.scale - self.intercept.centre

    def latent(self, X):
        """Return mean and variance (n,) of the latent values at rows."""
        pairs = [self._latent(self.rows(block)) for block in dense_blocks(X)]
        mean, var = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return mean, var

    def _latent(self, rows):
        spread = self.marginals.covariance(rows) + self.intercept.variance
        return self.intercept.base + rows @ self.marginals.mean, spread

    def covariance(self, X1, X2):
        """Return the covariance (n1, n2) of the latent values."""
        between = self.marginals.covariance(self.rows(X1), self.rows(X2))
        return between + self.intercept.variance

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n) of the latent values."""
        free = np.sqrt(self.intercept.variance) * rng.standard_normal((n_samples, 1))
        return self.marginals.draw(n_samples, rng) @ self.rows(X).T + self.intercept.base + free

    def sample(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        w = (self.draws if exact_zeros else self.marginals).draw(n_samples, rng)
        if not self.fit_intercept:
            return w / self.scale
        free = np.sqrt(self.intercept.variance) * rng.standard_normal(n_samples)
        origin = self.rows(np.zeros((1, w.shape[1])))[0]
        return np.column_stack([w / self.scale, self.intercept.base + w @ origin + free])


class ProbitMixture(AveragedPosterior):
    """Mixture of the posteriors at nodes, with weight (M,), of coefficients as well."""

    @property
    def _scale(self):
        return self.posteriors[0].scale

    def _stacked(self, of_one):
        return np.stack([of_one(p) for p in self.posteriors])

    @property
    def _means(self):
        return self._stacked(lambda p: p.marginals.mean)

    def coefficients(self):
        """Return means and standard deviations (d,)."""
        variances = self._stacked(lambda p: p.marginals.var)
        mean, var = mixture_moments(self.weight, self._means, variances)
        return mean / self._scale, np.sqrt(var) / self._scale

    def intercept(self, level=None):
        """Return mean and standard deviation of the intercept, or its central interval (2,)."""
        origin = np.zeros((1, len(self._scale)))
        mean, var = self._of_nodes(origin)
        if level is None:
            mean, var = mixture_moments(self.weight, mean, var)
            return float(mean[0]), float(np.sqrt(var[0]))
        return mixture_quantiles(self.weight, mean, np.sqrt(var), _ends(level))[:, 0]

    def inclusion(self):
        """Return the probabilities (d,) that coefficients are not zero."""
        return np.minimum(self.weight @ self._stacked(lambda p: p.tilted.inclusion), 1.0)

    def hyperparameters(self):
        """Return the fitted attributes of the slab variance, by its log, and the inclusion."""
        log_slab = self.weight @ np.log([p.slab for p in self.posteriors])
        inclusion = float(self.weight @ [p.prior_inclusion for p in self.posteriors])
        return {"slab_variance_": float(np.exp(log_slab)), "prior_inclusion_": inclusion}

    def coef_interval(self, level):
        """Return central intervals (d, 2), [0, 0] where a column is surely out."""
        parts = [p.tilted for p in self.posteriors]
        tilted = TiltedMarginals(*map(np.stack, zip(*parts, strict=True)))
        return (tilted_quantiles(self.weight, tilted, _ends(level)) / self._scale).T

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        cov, mean = self._stacked(lambda p: p.marginals.block(index)), self._means[:, index]
        unit = self._scale[index]
        return mixture_covariance(self.weight, cov, mean, mean) / np.outer(unit, unit)

    def sample(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, each from one node, an intercept last if any."""
        return draw_mixture(
            self.weight, lambda m, n: self.posteriors[m].sample(n, rng, exact_zeros), n_samples, rng
        )


def _ends(level):
    return [0.5 - 0.5 * level, 0.5 + 0.5 * level]
