"""What draws of models predict, in the units of the user: a mixture of normals with zeros."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, gammaincinv
from sklearn.utils import gen_batches

from ._chains import solved
from ._correlation import correlations
from ._posterior import (
    N_DRAWS,
    N_NOISE,
    ResponseMixture,
    TiltedMarginals,
    geometric_mean,
    tilted_quantiles,
)
from ._units import Standardisation

# Inclusion from which a column may be in a credible set: less adds nothing to any level.
CANDIDATE = 1e-3
_ROWS = 64  # at a time: each is held for every model
_NOISES = 2000  # draws of the noise, about, for models by their weights


@dataclass
class ModelMixture:
    """Normal posteriors of the coefficients given models (S, K), with weights (S,).

    A model is a row of numbers of columns, d in the place of none; `mean` (S, K) and `root`, of
    covariance root'root, are those of its coefficients in working units. `noise` and `slab` (S,)
    are in the units of the user. `inclusion` (d,) knows more than the models that are kept.
    `columns` may be in a credible set, with absolute `correlation` among them.
    """

    units: Standardisation
    weight: np.ndarray
    models: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    noise: np.ndarray
    slab: np.ndarray
    logit: np.ndarray
    on: np.ndarray
    columns: np.ndarray
    correlation: np.ndarray

    @classmethod
    def of(cls, units, law, draws, seed):
        """Return the posterior of `ModelDraws`; noise and prior inclusion are drawn given them."""
        rng, d, (models, log_ratio, weight) = np.random.default_rng(seed), law.d, draws.kept
        square, mean, root = solved(law, models, log_ratio)
        log_noise = law.log_noise(log_ratio)
        if law.space.free[:2].all():
            again, weight, level = _repeated(weight, rng)
            square, mean, root = square[again], mean[again], root[again]
            models, log_ratio = models[again], log_ratio[again]
            log_noise = np.log(0.5 * square / gammaincinv(0.5 * law.n_rows, level))
        logit = np.full(len(square), law.space.value[2])
        if law.space.free[2]:
            size = (models < d).sum(axis=1)
            p, q = rng.standard_gamma(1.0 + size), rng.standard_gamma(law.prior.misses + d - size)
            logit = np.log(p) - np.log(q)
        inside, unit = models < d, units.y_scale**2
        root = np.exp(0.5 * log_noise)[:, None, None] * root
        inclusion = law.in_order_of_X(draws.inclusion)
        columns = np.flatnonzero(inclusion > CANDIDATE)
        models = np.append(law.order, d)[models]
        return cls(
            units, weight, models, mean * inside, root * inside[:, None, :],
            np.exp(log_noise) * unit, np.exp(log_noise + log_ratio) * unit, logit,
            inclusion, columns, correlations(law.problem.model, columns, columns),
        )  # fmt: skip

    @property
    def nodes(self):
        """Hyperparameters (S, 3): logs of noise and slab in the units of the user, and logit."""
        return np.column_stack([np.log(self.noise), np.log(self.slab), self.logit])

    @cached_property
    def means(self):
        """Means (S, d) of the coefficients as a sparse matrix."""
        return self._spread_out(self.mean)

    @cached_property
    def _roots(self):
        """Rows (S K, d) whose squares, summed by model, are the covariances."""
        width = self.models.shape[1]
        return self._spread_out(self.root.reshape(-1, width))

    def _spread_out(self, values):
        """Return values (R, K) in the columns of the models, R a multiple of S."""
        models, d = np.repeat(self.models, len(values) // len(self.models), axis=0), len(self.on)
        rows, places = np.nonzero((models < d) & (values != 0))
        return sp.csr_array((values[rows, places], (rows, models[rows, places])), (len(values), d))

    def inclusion(self):
        """Return the probabilities (d,) that coefficients are not zero."""
        return self.on

    def candidates(self):
        """Return columns (u,), which are in what model (S, u), weights, absolute correlations."""
        place = np.full(len(self.on) + 1, len(self.columns))
        place[self.columns] = np.arange(len(self.columns))
        out = np.zeros((len(self.models), len(self.columns) + 1), dtype=bool)
        np.put_along_axis(out, place[self.models], True, axis=1)
        return self.columns, out[:, :-1], self.weight, self.correlation

    def coef_moments(self):
        """Return means and standard deviations (d,) of the coefficients."""
        mean, roots = self.weight @ self.means, self._roots
        second = self.weight @ self.means.power(2)
        second = second + np.repeat(self.weight, self.models.shape[1]) @ roots.power(2)
        sd = np.sqrt(np.maximum(second - mean**2, 0.0))
        return self.units.to_coef(mean), self.units.to_coef(sd)

    def hyperparameters(self):
        """Return the fitted attributes of variances, by means of logs, and of the inclusion."""
        return {
            "noise_variance_": geometric_mean(self.weight, self.noise),
            "slab_variance_": geometric_mean(self.weight, self.slab),
            "prior_inclusion_": float(self.weight @ expit(self.logit)),
        }

    def coef_interval(self, level):
        """Return central intervals (d, 2) of the coefficients, [0, 0] where they are surely out."""
        ends, tail = np.zeros((2, len(self.on))), 0.5 - 0.5 * level
        each = np.repeat(self.weight, self.models.shape[1])
        share = np.bincount(self.models.ravel(), each, minlength=len(self.on) + 1)[:-1]
        doubt = np.flatnonzero(share > tail)  # the others are zero at both ends
        roots = self._roots[:, doubt].toarray().reshape(*self.models.shape, len(doubt))
        sd = np.sqrt(np.sum(roots**2, axis=1))
        parts = TiltedMarginals(sd > 0, self.means[:, doubt].toarray(), np.where(sd > 0, sd, 1.0))
        ends[:, doubt] = tilted_quantiles(self.weight, parts, [tail, 1.0 - tail])
        return self.units.to_coef(ends).T

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        unit = self.units.to_coef(np.ones(len(self.on)))[index]
        mean, roots = self.means[:, index].toarray(), self._roots[:, index].toarray()
        return self._covariance(mean, mean, roots, roots) * np.outer(unit, unit)

    def _covariance(self, left, right, roots, other):
        """Covariance of what has means (S, .) and roots (S K, .) in both arguments."""
        weight = self.weight
        apart, beside = left - weight @ left, right - weight @ right
        each = np.repeat(weight, self.models.shape[1])
        return (roots.T * each) @ other + (apart.T * weight) @ beside

    def _coefficients(self, chosen, rng):
        """Draw coefficients (len(chosen), d) of models, sparse, in working units."""
        free = rng.standard_normal((len(chosen), self.models.shape[1]))
        values = self.mean[chosen] + np.einsum("sij,si->sj", self.root[chosen], free)
        inside = self.models[chosen] < len(self.on)
        rows, places = np.nonzero(inside)
        at = rows, self.models[chosen][inside]
        return sp.csr_array((values[inside], at), (len(chosen), len(self.on)))

    def draw(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, zeros exact, an intercept last if there is one."""
        chosen = rng.choice(len(self.weight), n_samples, p=self.weight)
        coef = self.units.to_coef(self._coefficients(chosen, rng).toarray())
        if not self.units.fit_intercept:
            return coef
        sd = np.sqrt(self.units.intercept_variance(self.noise[chosen]))
        intercept = self.units.intercept(coef) + sd * rng.standard_normal(n_samples)
        return np.column_stack([coef, intercept])

    # ------------------------------------------------------------------------ responses at rows

    @property
    def responses(self):
        """What the coefficients say of responses at rows."""
        return ResponseMixture(self)

    @property
    def intercept_variances(self):
        """Variances (S,) of the intercept given the coefficients."""
        return self.units.intercept_variance(self.noise) + np.zeros_like(self.noise)

    @property
    def extra(self):
        """Variances (S,) of noise and intercept in new responses."""
        return self.noise + self.intercept_variances

    def mean_at(self, rows):
        """Mean responses (n,) at rows in working units."""
        return self.units.y_offset + self.units.y_scale * (rows @ (self.weight @ self.means))

    def moments_at(self, rows, extra):
        """Mean and variance (n,) of responses at rows, those of the models with `extra` (S,)."""
        mean, centre = self.mean_at(rows), self.weight @ self.means
        var = [self._variances(rows[b], centre) for b in gen_batches(len(rows), _ROWS)]
        own = self.weight @ extra
        return mean, self.units.y_scale**2 * np.concatenate(var) + own

    def _variances(self, rows, centre):
        """Variances (n,) of noise-free responses, in working units."""
        apart = self.means @ rows.T - rows @ centre
        each = np.repeat(self.weight, self.models.shape[1])
        return self.weight @ apart**2 + each @ (self._roots @ rows.T) ** 2

    def covariance_at(self, first, second):
        """Covariance (n1, n2) of the noise-free responses at rows in working units."""
        at = [self.means @ rows.T for rows in (first, second)]
        roots = [self._roots @ rows.T for rows in (first, second)]
        own = self.weight @ self.intercept_variances
        return self.units.y_scale**2 * self._covariance(*at, *roots) + own

    def sums_at(self, rows, extra):
        """Draws (S, n) of responses at rows, in working units, with noise of variances (S,)."""
        rng = np.random.RandomState(0)
        place = (np.arange(N_DRAWS) + 0.5) / N_DRAWS
        chosen = np.minimum(np.searchsorted(np.cumsum(self.weight), place), len(self.weight) - 1)
        signal = self._coefficients(chosen, rng) @ rows.T
        sd = np.sqrt(extra[chosen]) / self.units.y_scale
        noise = sd[:, None] * rng.standard_normal((N_NOISE, N_DRAWS, 1))
        return (signal + noise).reshape(-1, rows.shape[0])


def _repeated(weight, rng):
    """Return places of models, heavy ones several times, weights and levels of a draw for each.

    The levels of one model are spread evenly over (0, 1).
    """
    times = np.maximum(1, np.rint(_NOISES * weight).astype(int))
    again = np.repeat(np.arange(len(weight)), times)
    turn = np.arange(len(again)) - np.repeat(np.cumsum(times) - times, times)
    return again, (weight / times)[again], (turn + rng.random(len(again))) / times[again]
