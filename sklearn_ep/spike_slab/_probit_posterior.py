"""What a sparse classifier predicts: posteriors at nodes of hyperparameters, and their mixture."""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from .._engine.hyper import mixture_moments, mixture_quantiles
from .._estimator.averaged import AveragedPosterior
from ._posterior import CoefficientMixture, CoefficientPosterior, TiltedMarginals
from ._probit import PROBIT
from ._sequential_draws import SequentialDraws
from ._units import Standardisation, dense_blocks, dense_rows


@dataclass
class ProbitPosterior:
    """Latent values at one fixed point, by the `CoefficientPosterior` of its row sites.

    The units of that have the intercept, which is normal given the coefficients.
    """

    factor = PROBIT  # link of the latent value to the label

    part: CoefficientPosterior

    @classmethod
    def of(cls, offset, scale, state):
        """Return the posterior of a `ProbitState` of columns that were moved and scaled."""
        factor, t, intercept = state.problem.factor, state.tilted, state.intercept
        at = state.marginals, state.columns, state.columns, t.inclusion
        draws = SequentialDraws(state.model, factor, 1.0, *at)
        tilted = TiltedMarginals(t.inclusion, t.slab_mean, np.sqrt(t.slab_var))
        fitted = state.problem.fit_intercept
        total = 1.0 / intercept.variance if fitted else 1.0
        centre = offset + scale * intercept.centre
        units = Standardisation(centre, scale, intercept.base, 1.0, total, total, fitted)
        slab, prior_inclusion = float(factor.slab_variance), float(expit(factor.logit))
        return cls(CoefficientPosterior(units, tilted, draws, 1.0, slab, prior_inclusion))

    def rows(self, X):
        """Return dense rows as the coefficients meet them: their distance to the centre."""
        return self.part.units.rows(dense_rows(X))

    @property
    def _intercept_variance(self):
        return self.part.units.intercept_variance(1.0)

    def latent(self, X):
        """Return mean and variance (n,) of the latent values at rows."""
        pairs = [self._latent(self.rows(block)) for block in dense_blocks(X)]
        mean, var = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return mean, var

    def _latent(self, rows):
        q = self.part.marginals
        return self.part.units.response(rows @ q.mean), q.covariance(
            rows
        ) + self._intercept_variance

    def covariance(self, X1, X2):
        """Return the covariance (n1, n2) of the latent values."""
        between = self.part.marginals.covariance(self.rows(X1), self.rows(X2))
        return between + self._intercept_variance

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n) of the latent values."""
        free = np.sqrt(self._intercept_variance) * rng.standard_normal((n_samples, 1))
        signal = self.part.marginals.draw(n_samples, rng) @ self.rows(X).T
        return self.part.units.response(signal) + free


class ProbitMixture(AveragedPosterior):
    """Mixture of the posteriors at nodes, with weight (M,)."""

    @property
    def coefficients(self):
        """The mixture of the coefficients."""
        return CoefficientMixture([p.part for p in self.posteriors], self.weight)

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        return self.coefficients.block(index)

    def intercept(self, level=None):
        """Return mean and standard deviation of the intercept, or its central interval (2,)."""
        origin = np.zeros((1, len(self.posteriors[0].part.units.scale)))
        mean, var = self.moments(origin)
        if level is None:
            mean, var = mixture_moments(self.weight, mean, var)
            return float(mean[0]), float(np.sqrt(var[0]))
        ends = [0.5 - 0.5 * level, 0.5 + 0.5 * level]
        return mixture_quantiles(self.weight, mean, np.sqrt(var), ends)[:, 0]
