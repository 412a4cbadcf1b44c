"""What a fit predicts, in the units of the user: a weighted average of posteriors.

The parts are fixed points of EP, or models that were drawn. Moments are those of Gaussian
posteriors. Quantiles know that coefficients may be zero, and so do draws where that is asked for;
quantiles of responses are brought to the Gaussian mean and variance.

A fixed point describes a coefficient twice, with one mean and variance: by the Gaussian of all
coefficients, and by its tilted distribution, prior times cavity, which is zero with positive
probability and normal otherwise. Intervals of a coefficient are those of the tilted distribution.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, gammaincinv, ndtr, ndtri

from .._engine.gaussian import row_blocks
from .._engine.hyper import draw_mixture, mixture_moments, mixture_quantiles
from .._estimator.averaged import AveragedPosterior
from .._estimator.summary import ends_of
from ._linear_model import BLOCK_BYTES
from ._plan import Standardisation, dense_blocks, dense_rows
from ._sequential_draws import SequentialDraws


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
# Inclusion from which a column may be in a credible set: less adds nothing to any level.
CANDIDATE = 1e-3
_NOISES = 2000  # draws of the noise, about, for models by their weights


@dataclass
class CoefficientPosterior:
    """Posterior of the coefficients at one fixed point.

    `tilted` marginals and `draws` are in working units, as the Gaussian `marginals` are, the
    variances `noise` and `slab` in those of the user; `prior_inclusion` is the probability of a
    coefficient not to be zero before the data. `factor` is the link from responses to labels, for
    those who have labels.
    """

    units: Standardisation
    tilted: TiltedMarginals
    draws: SequentialDraws
    noise: float
    slab: float
    prior_inclusion: float
    factor: Any = None

    @classmethod
    def of(cls, units, state, link=None):
        """Return the posterior of an `EnergyState` at a fixed point, with its link."""
        p, cavity, tilted = state.problem, state.matched, state.matched_tilted
        on, prior, unit = cavity.inclusion, p.factor, units.y_scale**2
        own = np.stack([state.mean, np.ones_like(state.mean)]) / state.var
        own -= np.stack([cavity.shift, cavity.precision])
        draws = SequentialDraws(p.model, prior, p.noise, state.marginals, state.sites, own, on)
        slabs = TiltedMarginals(on, tilted.slab_mean, np.sqrt(tilted.slab_var))
        noise, slab = float(p.noise * unit), float(prior.slab_variance * unit)
        return cls(units, slabs, draws, noise, slab, float(expit(prior.logit)), link)

    @property
    def marginals(self) -> Any:
        """Gaussian posterior in working units: DenseMarginals or LowRankMarginals."""
        return self.draws.marginals

    def coefficients(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""
        drawn_from = self.draws if exact_zeros else self.marginals
        coef = self.units.to_coef(drawn_from.draw(n_samples, rng))
        return self.units.with_intercept(coef, self.noise, rng)

    # The responses at rows as a latent function, in units of the working response.

    def latent(self, X):
        """Return mean and variance (n,) at rows."""
        pairs, q = [], self.marginals
        for rows in map(self.units.rows, dense_blocks(X)):
            pairs.append((rows @ q.mean, q.covariance(rows)))
        mean, var = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return self.units.response(mean), var + self.units.intercept_variance(self.noise)

    def covariance(self, X1, X2):
        """Return the covariance (n1, n2) between rows."""
        first, second = (self.units.rows(dense_rows(X)) for X in (X1, X2))
        of_intercept = self.units.intercept_variance(self.noise)
        return self.marginals.covariance(first, second) + of_intercept

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n) at rows."""
        sd = np.sqrt(self.units.intercept_variance(self.noise))
        free = sd * rng.standard_normal((n_samples, 1))
        signal = self.marginals.draw(n_samples, rng) @ self.units.rows(dense_rows(X)).T
        return self.units.response(signal) + free


@dataclass(eq=False)
class SparseMixture:
    """Posteriors of coefficients with weights (M,) that sum to one: what all such mixtures share.

    A mixture has `units`, `weight`, `means` (M, d) in working units, `inclusion` (d,), and the
    `noise`, `slab` (M,) and `prior_inclusion` (M,) of its parts, variances in units of the user.
    """

    rows_at_a_time = 512
    units: Any
    weight: np.ndarray
    noise: np.ndarray
    slab: np.ndarray
    prior_inclusion: np.ndarray
    inclusion: np.ndarray
    means: ClassVar[Any]
    # means and variances (d,), what `tilted_quantiles` wants of some columns, mean covariance of
    # coefficients and at rows, draws of responses
    _coef_moments: ClassVar[Any]
    _tilted: ClassVar[Any]
    _block: ClassVar[Any]
    within: ClassVar[Any]
    signals: ClassVar[Any]

    def attributes(self):
        """Return the fitted attributes that are moments, of variances by means of logs."""
        mean, var = self._coef_moments()
        coef, inclusion = self.units.to_coef(mean), self.inclusion
        return {
            "coef_": coef,
            "coef_std_": self.units.to_coef(np.sqrt(var)),
            "intercept_": float(self.units.intercept(coef)),
            "inclusion_proba_": inclusion,
            "expected_model_size_": float(inclusion.sum()),
            "noise_variance_": _geometric_mean(self.weight, self.noise),
            "slab_variance_": _geometric_mean(self.weight, self.slab),
            "prior_inclusion_": float(self.weight @ self.prior_inclusion),
        }

    def coef_interval(self, level):
        """Return central intervals (d, 2) of the coefficients, [0, 0] where they are surely out."""
        ends, levels = np.zeros((2, self.means.shape[1])), ends_of(level)
        columns, tilted = self._tilted(levels[0])
        ends[:, columns] = tilted_quantiles(self.weight, tilted, levels)
        return self.units.to_coef(ends).T

    def block(self, index):
        """Return the covariance (k, k) of some coefficients."""
        unit = self.units.to_coef(np.ones(self.means.shape[1]))[index]
        mean = dense_rows(self.means[:, index])
        return self._total(self._block(index), mean, mean) * np.outer(unit, unit)

    def _total(self, within, left, right):
        """Return the covariance (n1, n2) of what has means (M, .) and this one within parts."""
        apart, other = left - self.weight @ left, right - self.weight @ right
        return within + (self.weight * apart.T) @ other

    # Responses at rows of the user, of which the one at zero is the intercept.

    @property
    def _of_intercept(self):
        """Variances (M,) of the intercept given the coefficients."""
        return self.units.intercept_variance(self.noise) + np.zeros_like(self.noise)

    def predictive(self, X, with_variance):
        """Return mean and variance (n,), or None, of new responses."""
        if with_variance:
            return self._moments_at(X, self.noise + self._of_intercept)
        mean = self.weight @ self.means
        parts = [self.units.rows(rows) @ mean for rows in dense_blocks(X)]
        return self.units.response(np.concatenate(parts)), None

    def _moments_at(self, X, extra):
        """Mean and variance (n,) at rows, `extra` (M,) added."""
        parts = []
        for rows in map(self.units.rows, dense_blocks(X, self.rows_at_a_time)):
            parts.append(mixture_moments(self.weight, self.means @ rows.T, self.within(rows)))
        mean, var = (np.concatenate(p) for p in zip(*parts, strict=True))
        return self.units.response(mean), self.units.y_scale**2 * var + self.weight @ extra

    def predictive_interval(self, X, level):
        """Return central intervals (n, 2) of new responses."""
        extra = self.noise + self._of_intercept
        blocks = dense_blocks(X, ROWS)
        return np.concatenate([self._interval(rows, level, extra) for rows in blocks])

    def _interval(self, X, level, extra):
        """Return central intervals (n, 2) of responses with variances `extra` (M,) added.

        Their shape is that of draws, their mean and variance those of the mixture. Draws have a
        seed of their own, so that an interval is a function of the fit.
        """
        mean, var = self._moments_at(X, extra)
        rng = np.random.RandomState(0)
        part, signal = self.signals(self.units.rows(X), rng)
        sd = np.sqrt(extra[part]) / self.units.y_scale
        # normal draws that fill their distribution evenly
        place = (rng.permutation(N_NOISE * len(part)) + 0.5) / (N_NOISE * len(part))
        noise = sd[:, None] * ndtri(place).reshape(N_NOISE, -1, 1)
        sums = (signal + noise).reshape(-1, len(X))
        ends = np.quantile(sums, ends_of(level), axis=0)
        spread = sums.std(axis=0)
        ends = (ends - sums.mean(axis=0)) / np.where(spread > 0, spread, 1.0)  # a row may be zero
        return (mean + np.sqrt(var) * ends).T

    def response_covariance(self, A, B):
        """Return the covariance (n1, n2) of the noise-free responses at rows."""
        first, second = (self.units.rows(dense_rows(rows)) for rows in (A, B))
        left, right = (self.means @ rows.T for rows in (first, second))
        cov = self._total(self.within(first, second), left, right)
        return self.units.y_scale**2 * cov + self.weight @ self._of_intercept

    def intercept(self, level):
        """Return standard deviation and central interval (2,) of the intercept."""
        origin, extra = np.zeros((1, self.means.shape[1])), self._of_intercept
        sd = float(np.sqrt(self._moments_at(origin, extra)[1][0]))
        return sd, self._interval(origin, level, extra)[0]


class CoefficientMixture(SparseMixture, AveragedPosterior):
    """Fixed points of EP with weights (M,); one of weight one as well.

    For coefficients they share their units. As a latent function each has units of its own.
    """

    def __init__(self, posteriors: list[CoefficientPosterior], weight: np.ndarray):
        AveragedPosterior.__init__(self, posteriors, weight)
        of_each = ((p.noise, p.slab, p.prior_inclusion) for p in posteriors)
        noise, slab, prior = map(np.array, zip(*of_each, strict=True))
        inclusion = np.minimum(self._mean(lambda p: p.tilted.inclusion), 1.0)  # rounding
        SparseMixture.__init__(self, posteriors[0].units, weight, noise, slab, prior, inclusion)

    def _mean(self, of_one):
        return sum(w * of_one(p) for w, p in zip(self.weight, self.posteriors, strict=True))

    @property
    def means(self):
        """Means (M, d) of the coefficients, in working units."""
        return np.stack([p.marginals.mean for p in self.posteriors])

    def _coef_moments(self):
        variances = np.stack([p.marginals.var for p in self.posteriors])
        return mixture_moments(self.weight, self.means, variances)

    def _tilted(self, tail):
        parts = [p.tilted for p in self.posteriors]
        return slice(None), TiltedMarginals(*map(np.stack, zip(*parts, strict=True)))

    def _block(self, index):
        return self._mean(lambda p: p.marginals.block(index))

    def within(self, first, second=None):
        """Return the mean covariance (n1, n2) or variance (n,) of the parts at rows."""
        return self._mean(lambda p: p.marginals.covariance(first, second))

    def coefficients(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, an intercept in the last column if there is one."""

        def of_part(m, size):
            return self.posteriors[m].coefficients(size, rng, exact_zeros)

        return draw_mixture(self.weight, of_part, n_samples, rng)

    def candidates(self):
        """Return columns (u,), which are in what model (S, u), weights, absolute correlations."""
        draws = self.coefficients(N_DRAWS, np.random.RandomState(0), exact_zeros=True)
        on = draws[:, : self.means.shape[1]] != 0
        columns = np.flatnonzero(on.any(axis=0))
        among = self.posteriors[0].draws.model.correlations(columns, columns)
        return columns, on[:, columns], np.full(N_DRAWS, 1.0 / N_DRAWS), among

    def counts(self, n_draws):
        """Return how many of some draws are those of each part, by their weights."""
        return np.diff(np.rint(np.cumsum([0.0, *self.weight]) * n_draws).astype(int))

    def signals(self, rows, rng):
        """Draw noise-free responses (S, n) at rows, of the parts (S,), by their weights."""
        counts = self.counts(N_DRAWS)
        step, out = max(1, BLOCK_BYTES // (8 * rows.shape[1])), []
        for part, count in zip(self.posteriors, counts, strict=True):
            for batch in row_blocks(int(count), most=step):
                out.append(part.draws.draw(batch.stop - batch.start, rng) @ rows.T)
        return np.repeat(np.arange(len(counts)), counts), np.concatenate(out)


@dataclass
class ModelMixture(SparseMixture):
    """Normal posteriors of the coefficients given models (S, K), with weights (S,).

    A model is a row of numbers of columns, d in the place of none; `mean` (S, K) and `root`, of
    covariance root'root, are those of its coefficients in working units. `nodes` (S, 3) are logs of
    `noise` and `slab` variance in the units of the user, and the logit of the prior inclusion, of
    which `prior_inclusion` is the mean given the model.
    `inclusion` (d,) knows more than the models that are kept. `columns` may be in a credible set,
    with absolute `correlation` among them.
    """

    rows_at_a_time = 64  # each is held for every model

    models: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    nodes: np.ndarray
    columns: np.ndarray
    correlation: np.ndarray

    @cached_property
    def means(self):
        """Means (S, d) of the coefficients as a sparse matrix."""
        return self._spread_out(self.mean, np.arange(len(self.mean)))

    @cached_property
    def _roots(self):
        """Rows (S K, d) whose squares, summed by model, are the covariances."""
        width = self.models.shape[1]
        models = np.repeat(np.arange(len(self.models)), width)
        return self._spread_out(self.root.reshape(-1, width), models)

    @property
    def _each(self):
        """Weights (S K,) of the roots."""
        return np.repeat(self.weight, self.models.shape[1])

    def _spread_out(self, values, chosen):
        """Return values (R, K) in the columns of chosen models (R,), sparse."""
        models, d = self.models[chosen], len(self.inclusion)
        rows, places = np.nonzero(models < d)
        at = rows, models[rows, places]
        return sp.csr_array((values[rows, places], at), (len(values), d))

    def candidates(self):
        """Return columns (u,), which are in what model (S, u), weights, absolute correlations."""
        place = np.full(len(self.inclusion) + 1, len(self.columns))
        place[self.columns] = np.arange(len(self.columns))
        out = np.zeros((len(self.models), len(self.columns) + 1), dtype=bool)
        np.put_along_axis(out, place[self.models], True, axis=1)
        return self.columns, out[:, :-1], self.weight, self.correlation

    def _coef_moments(self):
        mean = self.weight @ self.means
        second = self.weight @ self.means.power(2) + self._each @ self._roots.power(2)
        return mean, np.maximum(second - mean**2, 0.0)

    def _tilted(self, tail):
        d = len(self.inclusion)
        share = np.bincount(self.models.ravel(), self._each, minlength=d + 1)[:d]
        doubt = np.flatnonzero(share > tail)  # the others are zero at both ends
        roots = self._roots[:, doubt].toarray().reshape(*self.models.shape, len(doubt))
        sd = np.sqrt(np.sum(roots**2, axis=1))
        means = self.means[:, doubt].toarray()
        return doubt, TiltedMarginals(sd > 0, means, np.where(sd > 0, sd, 1.0))

    def _block(self, index):
        roots = self._roots[:, index].toarray()
        return (roots.T * self._each) @ roots

    def within(self, first, second=None):
        """Return the mean covariance (n1, n2) or variance (n,) given models at rows."""
        left, each = self._roots @ first.T, self._each
        return each @ left**2 if second is None else (left.T * each) @ (self._roots @ second.T)

    def _coefficients(self, chosen, rng):
        """Draw coefficients (len(chosen), d) of models, sparse, in working units."""
        free = rng.standard_normal((len(chosen), self.models.shape[1]))
        values = self.mean[chosen] + np.einsum("sij,si->sj", self.root[chosen], free)
        return self._spread_out(values, chosen)

    def coefficients(self, n_samples, rng, exact_zeros):
        """Return draws of the coefficients, zeros exact, an intercept last if there is one."""
        chosen = rng.choice(len(self.weight), n_samples, p=self.weight)
        coef = self.units.to_coef(self._coefficients(chosen, rng).toarray())
        return self.units.with_intercept(coef, self.noise[chosen], rng)

    def signals(self, rows, rng):
        """Draw noise-free responses (S, n) at rows, of the models (S,), by their weights."""
        place = (np.arange(N_DRAWS) + 0.5) / N_DRAWS
        chosen = np.minimum(np.searchsorted(np.cumsum(self.weight), place), len(self.weight) - 1)
        return chosen, self._coefficients(chosen, rng) @ rows.T


def mixture_of_draws(units, law, draws, seed):
    """Return the `ModelMixture` of `ModelDraws`; noise and inclusion are drawn given models."""
    rng, d, (models, log_ratio, weight) = np.random.default_rng(seed), law.d, draws.kept
    square, mean, root = law.solved(models, log_ratio)
    log_noise = law.log_noise(log_ratio)
    if law.space.free[:2].all():
        # heavy models several times, for each of which levels of draws are spread over (0, 1)
        times = np.maximum(1, np.rint(_NOISES * weight).astype(int))
        again = np.repeat(np.arange(len(weight)), times)
        turn = np.arange(len(again)) - np.repeat(np.cumsum(times) - times, times)
        weight, level = (weight / times)[again], (turn + rng.random(len(again))) / times[again]
        square, mean, root = square[again], mean[again], root[again]
        models, log_ratio = models[again], log_ratio[again]
        log_noise = np.log(0.5 * square / gammaincinv(0.5 * law.n_rows, level))
    logit, inside = np.full(len(square), law.space.value[2]), models < d
    expected = expit(logit)
    if law.space.free[2]:
        expected, logit = law.prior.inclusions_given(inside.sum(axis=1), d, rng)
    root = np.exp(0.5 * log_noise)[:, None, None] * root
    inclusion = draws.inclusion[np.argsort(law.order)]
    columns = np.flatnonzero(inclusion > CANDIDATE)
    log_noise = log_noise + 2 * np.log(units.y_scale)
    nodes = np.column_stack([log_noise, log_noise + log_ratio, logit])
    models, correlation = np.append(law.order, d)[models], law.problem.model.correlations
    given = models, mean * inside, root * inside[:, None, :], nodes
    told = weight, np.exp(nodes[:, 0]), np.exp(nodes[:, 1]), expected, inclusion
    return ModelMixture(units, *told, *given, columns, correlation(columns, columns))


def _geometric_mean(weight, values):
    """Return the weighted geometric mean, exact where all values agree."""
    return float(values[0] * np.exp(weight @ np.log(values / values[0])))
