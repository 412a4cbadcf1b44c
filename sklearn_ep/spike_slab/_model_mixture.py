"""What draws of models predict, in the units of the user: a mixture of normals with zeros."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, gammaincinv

from ._correlation import correlations
from ._posterior import N_DRAWS, SparseMixture, TiltedMarginals
from ._units import Standardisation

# Inclusion from which a column may be in a credible set: less adds nothing to any level.
CANDIDATE = 1e-3
_NOISES = 2000  # draws of the noise, about, for models by their weights


@dataclass
class ModelMixture(SparseMixture):
    """Normal posteriors of the coefficients given models (S, K), with weights (S,).

    A model is a row of numbers of columns, d in the place of none; `mean` (S, K) and `root`, of
    covariance root'root, are those of its coefficients in working units. `nodes` (S, 3) are logs of
    `noise` and `slab` variance in the units of the user, and the logit of `prior_inclusion`.
    `inclusion` (d,) knows more than the models that are kept. `columns` may be in a credible set,
    with absolute `correlation` among them.
    """

    rows_at_a_time = 64  # each is held for every model

    units: Standardisation
    weight: np.ndarray
    models: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    nodes: np.ndarray
    noise: np.ndarray
    slab: np.ndarray
    prior_inclusion: np.ndarray
    inclusion: np.ndarray
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

    def _moments(self):
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
        rows = np.zeros((len(index), len(self.inclusion)))
        rows[np.arange(len(index)), index] = 1.0
        return self.within(rows, rows)

    def within(self, first, second=None):
        """Return the mean covariance (n1, n2) or variance (n,) given models at rows."""
        left, each = self._roots @ first.T, self._each
        return each @ left**2 if second is None else (left.T * each) @ (self._roots @ second.T)

    def _coefficients(self, chosen, rng):
        """Draw coefficients (len(chosen), d) of models, sparse, in working units."""
        free = rng.standard_normal((len(chosen), self.models.shape[1]))
        values = self.mean[chosen] + np.einsum("sij,si->sj", self.root[chosen], free)
        return self._spread_out(values, chosen)

    def draw(self, n_samples, rng, exact_zeros):
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
        again, weight, level = _repeated(weight, rng)
        square, mean, root = square[again], mean[again], root[again]
        models, log_ratio = models[again], log_ratio[again]
        log_noise = np.log(0.5 * square / gammaincinv(0.5 * law.n_rows, level))
    logit, inside = np.full(len(square), law.space.value[2]), models < d
    if law.space.free[2]:
        size = inside.sum(axis=1)
        p, q = rng.standard_gamma(1.0 + size), rng.standard_gamma(law.prior.misses + d - size)
        logit = np.log(p) - np.log(q)
    root = np.exp(0.5 * log_noise)[:, None, None] * root
    inclusion = draws.inclusion[np.argsort(law.order)]
    columns = np.flatnonzero(inclusion > CANDIDATE)
    log_noise = log_noise + 2 * np.log(units.y_scale)
    nodes = np.column_stack([log_noise, log_noise + log_ratio, logit])
    return ModelMixture(
        units, weight, np.append(law.order, d)[models], mean * inside, root * inside[:, None, :],
        nodes, np.exp(nodes[:, 0]), np.exp(nodes[:, 1]), expit(logit),
        inclusion, columns, correlations(law.problem.model, columns, columns),
    )  # fmt: skip


def _repeated(weight, rng):
    """Return places of models, heavy ones several times, weights and levels of a draw for each.

    The levels of one model are spread evenly over (0, 1).
    """
    times = np.maximum(1, np.rint(_NOISES * weight).astype(int))
    again = np.repeat(np.arange(len(weight)), times)
    turn = np.arange(len(again)) - np.repeat(np.cumsum(times) - times, times)
    return again, (weight / times)[again], (turn + rng.random(len(again))) / times[again]
