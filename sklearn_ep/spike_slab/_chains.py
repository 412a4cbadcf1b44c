"""Draws of models by Markov chains, coefficients integrated out: for correlated columns.

Given the model, which columns are in, everything is Gaussian, and the evidence of a model is known
up to the noise, which integrates out as well, and the ratio of slab variance to noise. A step takes
a column that is in out of the model, or none, and draws what goes in, one of all columns or none,
given the others: so a signal moves between copies in one step, and between correlated columns as
between the columns of a single effect (Wang et al. 2020), with the others drawn and not averaged.
What the step knows of all columns is kept: inclusion is the mean of these probabilities.

Many chains go side by side, from different models. Rounds grow twofold and only the last one
counts, so that half of all steps are thrown away. How far the chains differ is the error.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaln, gammaln
from sklearn.utils import gen_batches

from ._correlation import association
from ._hyperparameters import NOISE_FLOOR

_RATIOS = 1e-6, 1e8  # of slab variance to noise; the prior has a mass of .0007 beyond


class _Lengths(NamedTuple):
    """How long chains go, and how many side by side."""

    entries: int = 2**14  # columns of all chains together: of fewer numpy's calls cost more
    chains: tuple = (8, 32)
    first: int = 100  # steps of the first round
    work: float = 1e8  # of all steps: columns of all chains times (1 + k / 4)^2 with k in
    step: float = 3e4  # of this a step is at least
    patience: int = 4  # times that, where chains do not agree
    rounds: tuple = (3, 7)
    all_models: int = 12  # columns of which all models are looked at
    spacing: float = 0.25  # of log ratios then: a tenth of what a single column tells of its own
    ratio_every: int = 4  # steps: the ratio moves slowly and alone
    start: int = 10  # most columns that a chain starts with, all of them different
    error: float = 0.005  # largest standard error of an inclusion at which chains end
    doubtful: float = 0.05  # that of a warning
    kept: int = 8192  # models
    kept_entries: int = 2**21  # of their covariances
    dense: int = 50  # columns: a step costs the square of what is in, and sums of many are Gaussian
    batch: int = 256  # models that are solved at a time
    stored: int = 2**24  # entries of products of columns
    single_rows: float = 1e5  # rows for which logs in single precision will do


_LENGTHS = _Lengths()


class _Products:
    """Rows of X'X, made when asked for; number d stands for no column, with products zero.

    Those of the first columns, as many as there are rows, are made at once.
    """

    def __init__(self, X):
        self._X, (n, d) = X, X.shape
        self._most = max(_LENGTHS.stored // (d + 1), 2 * _LENGTHS.batch)
        self.squares = np.append(np.einsum("ij,ij->j", X, X), 0.0)
        self._forget()
        self._places(np.arange(min(n, d, self._most)))

    def _forget(self):
        d = self._X.shape[1]
        self._place, self._n = np.full(d + 1, -1), 1
        self._place[d] = 0
        self._rows = np.zeros((64, d + 1))

    def _places(self, columns):
        new = np.unique(columns[self._place[columns] < 0])
        if self._n + len(new) > self._most:
            self._forget()
            new = np.setdiff1d(columns, [self._X.shape[1]])
        last = self._n + len(new)
        if last > len(self._rows):
            more = np.zeros((max(len(self._rows), len(new)), self._rows.shape[1]))
            self._rows = np.concatenate([self._rows, more])
        if len(new):
            self._rows[self._n : last, :-1] = self._X[:, new].T @ self._X
            self._place[new] = np.arange(self._n, last)
            self._n = last
        return self._place[columns]

    def with_all(self, columns):
        """Products (..., d + 1) of columns (...) with all."""
        places = self._places(columns)
        return self._rows[places]

    def within(self, columns):
        """Products (M, K, K) of columns (M, K) with each other."""
        places = self._places(columns)
        return self._rows[places[:, :, None], columns[:, None, :]]


class Given(NamedTuple):
    """What data say given models (M, K): log |C|, y'C^-1 y, x'C^-1 x and x'C^-1 y (M, d + 1).

    C is the covariance of the responses in units of the noise; `root` (M, K, K) and `mean` give the
    coefficients in the same units, of covariance root'root.
    """

    log_det: np.ndarray
    square: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    norm: Any = None
    pull: Any = None


@dataclass
class ModelLaw:
    """Posterior of models and ratio of slab variance to noise, in working units.

    `prior` is that of hyperparameters, of which `space` says what is free. Models (M, K) are
    numbers of columns, d in the place of none. Columns are in the `order` of how well they go with
    the response, so that draws do not depend on theirs in X.
    """

    problem: Any
    space: Any
    prior: Any

    def __post_init__(self):
        model, n = self.problem.model, self.problem.n_rows
        self.d, self.n_rows = model.X.shape[1], n
        self.order = np.argsort(-association(model), kind="stable")
        self.products = _Products(np.asfortranarray(model.X[:, self.order]))
        self.Xy = np.append(model.Xy[self.order], 0.0)
        self._free_noise, self._free_slab, self._free_inclusion = self.space.free
        floor = NOISE_FLOOR * n if self._free_noise else 0.0  # a perfect fit is no better than that
        self.least = model.rest + floor
        self.total = model.y @ model.y + self.least

    @cached_property
    def log_prior(self):
        """Log prior probability of a model of k columns, k = 0, ..., d, and -inf for one more."""
        k = np.arange(self.d + 1)
        if self._free_inclusion:
            b = self.prior.misses
            value = betaln(1.0 + k, b + self.d - k) - betaln(1.0, b)
        else:
            logit = self.space.value[2]
            value = k * logit - self.d * np.logaddexp(0.0, logit)
        return np.append(value, -np.inf)

    @cached_property
    def bounds(self) -> Any:
        """Least and largest log ratio; None where it is given."""
        if not (self._free_noise or self._free_slab):
            return None
        if self._free_slab:
            return np.log(_RATIOS) - np.log(self.space.size)
        return self.space.value[1] - np.array([self.space.high[0], self.space.low[0]])

    def in_order_of_X(self, values):
        """Return values (d,) of columns in the order of X."""
        out = np.empty_like(values)
        out[self.order] = values
        return out

    def log_noise(self, log_ratio):
        """Log noise at a log ratio, where noise or slab are given."""
        noise, slab, _ = self.space.value
        return slab - log_ratio if self._free_noise else noise + 0.0 * log_ratio

    def log_fit(self, log_ratio, log_det, square):
        """Log density of the responses, without constants that no hyperparameter is in."""
        if self._free_noise and self._free_slab:
            return -0.5 * (log_det + self.n_rows * np.log(square))
        log_noise = self.log_noise(log_ratio)
        return -0.5 * (log_det + self.n_rows * log_noise + square * np.exp(-log_noise))

    def given(self, models, log_ratio, others=True):
        """Return `Given` models; O(K^2 d) each, with `others` what it says of all columns."""
        A, places = self.products.within(models), np.arange(models.shape[1])
        inside = models < self.d
        A[:, places, places] += np.where(inside, np.exp(-log_ratio)[:, None], 1.0)
        lower = np.linalg.cholesky(A)
        root = np.linalg.inv(lower)
        half = np.einsum("mij,mj->mi", root, self.Xy[models])
        log_det = 2 * np.log(lower[:, places, places]).sum(axis=1) + inside.sum(axis=1) * log_ratio
        square = np.maximum(self.total - np.einsum("mi,mi->m", half, half), self.least)
        mean = np.einsum("mji,mj->mi", root, half)
        if not others:
            return Given(log_det, square, mean, root)
        image = root @ self.products.with_all(models)
        norm = np.maximum(self.products.squares - np.einsum("mij,mij->mj", image, image), 0.0)
        pull = self.Xy - (half[:, None, :] @ image)[:, 0]
        return Given(log_det, square, mean, root, norm, pull)

    def gains(self, given, log_ratio):
        """Return what each column adds to the log fit of models (M, d + 1).

        In single precision, where it is fast and good to 1e-5, for up to some thousand rows.
        """
        pivot = given.norm
        pivot *= np.exp(log_ratio)[:, None]
        pivot += 1.0
        fall = given.pull
        fall *= fall
        fall /= pivot
        fall *= (np.exp(log_ratio) / given.square)[:, None]  # share of the square
        single = np.float32 if self.n_rows < _LENGTHS.single_rows else np.float64
        gain = np.log(pivot, dtype=single, casting="same_kind")
        if self._free_noise and self._free_slab:
            least = (self.least / given.square)[:, None]
            left = np.maximum(1.0 - fall, least)
            gain += single(self.n_rows) * np.log(left, dtype=single, casting="same_kind")
        else:
            gain -= fall * (given.square * np.exp(-self.log_noise(log_ratio)))[:, None]
        gain *= single(-0.5)
        return gain

    def along_ratios(self, models, log_ratio):
        """Log density (M, T) of models at log ratios (M, T), and of the log ratios."""
        value, basis = np.linalg.eigh(self.products.within(models))
        pull = np.einsum("mij,mi->mj", basis, self.Xy[models]) ** 2
        ratio = np.exp(log_ratio)[:, :, None]
        scale = 1.0 + ratio * np.maximum(value, 0.0)[:, None, :]
        square = self.total - (ratio * pull[:, None, :] / scale).sum(axis=2)
        log_det = np.log(scale).sum(axis=2)
        fit = self.log_fit(log_ratio, log_det, np.maximum(square, self.least))
        return fit + self.prior.log_density_of_ratio(log_ratio)


class KeptModels(NamedTuple):
    """Different models (S, K) with their log ratios and weights (S,)."""

    models: np.ndarray
    log_ratio: np.ndarray
    weight: np.ndarray


@dataclass
class ModelDraws:
    """Draws: models (M, K), log ratios and weights (M,) of each step, inclusion by chain (M, d).

    `log_density` is the mean log density of models and responses, constants left out.
    """

    models: list
    log_ratio: list
    weight: list
    by_chain: np.ndarray
    log_density: float

    @cached_property
    def kept(self):
        """Draws that predict: equal ones are one, and of many only every so many stays."""
        models, log_ratio, weight = self._distinct(1)
        most = min(_LENGTHS.kept, _LENGTHS.kept_entries // models.shape[1] ** 2)
        if len(models) > most:
            drawn = sum(len(m) for m in self.models)
            models, log_ratio, weight = self._distinct(-(-drawn // most))
        return KeptModels(models, log_ratio, weight / weight.sum())

    def _distinct(self, step):
        """Return the different models, log ratios and weights of every so many steps."""
        d, parts = self.by_chain.shape[1], self.models[::step]
        every = np.full((sum(map(len, parts)), max(m.shape[1] for m in parts)), d)
        ends = np.cumsum([len(m) for m in parts])
        for end, part in zip(ends, parts, strict=True):
            every[end - len(part) : end, : part.shape[1]] = part
        every.sort(axis=1)
        every = every[:, : max(1, int((every < d).any(axis=0).sum()))]
        joined = np.column_stack([every, np.concatenate(self.log_ratio[::step])])
        distinct, place = np.unique(joined, axis=0, return_inverse=True)
        weight = np.bincount(np.ravel(place), np.concatenate(self.weight[::step]))
        return distinct[:, :-1].astype(int), distinct[:, -1], weight

    @property
    def inclusion(self):
        """Inclusion (d,) of all chains."""
        return np.minimum(self.by_chain.mean(axis=0), 1.0)

    @property
    def errors(self):
        """Standard errors (d,) of the inclusions, from chain to chain."""
        return self.by_chain.std(axis=0, ddof=1) / np.sqrt(len(self.by_chain))

    @property
    def error(self):
        """Largest standard error of an inclusion."""
        return float(self.errors.max())

    @property
    def effective_number(self):
        """Least effective number of draws, of the columns in doubt."""
        p = self.inclusion
        spread = p * (1 - p)
        doubt = spread >= _LENGTHS.doubtful
        square = np.maximum(self.errors[doubt] ** 2, np.finfo(float).tiny)
        return float(np.min(spread[doubt] / square, initial=np.inf))


class ModelChains:
    """Markov chains over models, side by side."""

    def __init__(self, law, rng):
        d, n = law.d, len(law.problem.model.X)
        self.law, self.rng = law, rng
        n_chains = int(np.clip(_LENGTHS.entries // d, *_LENGTHS.chains))
        self.size = np.arange(n_chains) % (min(d, n, _LENGTHS.start) + 1)
        self.models = np.full((n_chains, self.size.max() + 1), d)
        for model, size in zip(self.models, self.size, strict=True):
            model[:size] = rng.choice(d, size, replace=False)
        self.log_ratio = np.full(n_chains, law.space.value[1] - law.space.value[0])
        self._chain = np.arange(n_chains)

    def _take_out(self):
        """Take a column out of some models: of k columns one is with probability k / (k + 2)."""
        u = self.rng.random((2, len(self.size)))
        some = np.flatnonzero(u[0] < self.size / (self.size + 2.0))
        own = (u[1, some] * self.size[some]).astype(int)
        self.size[some] -= 1
        last = self.size[some]
        self.models[some, own] = self.models[some, last]
        self.models[some, last] = self.law.d

    def _put_in(self):
        """Put a column, or none, into each model; return probabilities (M, d + 1) and mean fit.

        What goes in is weighted by how often a step takes it out again, against how often it takes
        none out, so that the posterior is kept.
        """
        law, size = self.law, self.size
        widest = int(size.max())
        if widest + 1 > self.models.shape[1]:
            self.models = np.pad(self.models, ((0, 0), (0, 4)), constant_values=law.d)
        others = self.models[:, : max(widest, 1)].copy()
        given = law.given(others, self.log_ratio)
        fit = law.log_fit(self.log_ratio, given.log_det, given.square)
        gain = law.gains(given, self.log_ratio)
        more = law.log_prior[size + 1] - law.log_prior[size] + np.log((size + 2.0) / (size + 3) / 2)
        gain[:, :-1] += more[:, None]
        rows, places = np.nonzero(others < law.d)
        inside = rows, others[rows, places]
        gain[inside] = -np.inf
        density = np.mean(fit + law.log_prior[size])
        gain -= gain.max(axis=1, keepdims=True)
        share = np.exp(gain, out=gain)
        new = self._drawn(share)
        share /= share.sum(axis=1, keepdims=True)
        share[inside] = 1.0
        self.models[self._chain, size] = new
        self.size = size + (new < law.d)
        return share, density

    def _drawn(self, weight):
        """Draw a place in each row of weights."""
        total = np.cumsum(weight, axis=1)
        level = self.rng.random(len(weight)) * total[:, -1]
        return np.minimum((total <= level[:, None]).sum(axis=1), weight.shape[1] - 1)

    def _move_ratio(self):
        """Draw the log ratio of each chain from the points of a lattice of random width on it."""
        low, high = self.law.bounds
        width = self.rng.uniform(0.3, 0.6, len(self.size))
        first = low + (self.log_ratio - low) % width
        points = first[:, None] + width[:, None] * np.arange(int((high - low) / 0.3) + 1)
        models = self.models[:, : max(int(self.size.max()), 1)]
        value = self.law.along_ratios(models, np.minimum(points, high))
        value[points > high] = -np.inf
        value -= value.max(axis=1, keepdims=True)
        self.log_ratio = points[self._chain, self._drawn(np.exp(value))]

    @property
    def work(self):
        """Work of a step."""
        entries = len(self.size) * self.law.d * (1.0 + self.size.max() / 4.0) ** 2
        return max(entries, _LENGTHS.step)

    def round(self, n_steps):
        """Go some steps; return the `ModelDraws`."""
        total, density, models, ratios = 0.0, 0.0, [], []
        for k in range(n_steps):
            self._take_out()
            share, fit = self._put_in()
            total, density = total + share[:, :-1], density + fit / n_steps
            if self.law.bounds is not None and k % _LENGTHS.ratio_every == 0:
                self._move_ratio()
            models.append(self.models.copy())
            ratios.append(self.log_ratio)
        weight = [np.ones(len(ratios[0]))] * n_steps
        return ModelDraws(models, ratios, weight, total / n_steps, density)


def sample_models(law, seed, max_rounds, told):
    """Return the last `ModelDraws`, or None where models are dense.

    `told` hears of each round and may end the chains. Of few columns all models are looked at.
    """
    if law.d <= _LENGTHS.all_models:
        draws = all_models(law)
        told(draws)
        return draws
    chains, work = ModelChains(law, np.random.default_rng(seed)), 0.0
    for k in range(min(max_rounds, _LENGTHS.rounds[1])):
        draws = chains.round(_LENGTHS.first * 2**k)
        if draws.inclusion.sum() > max(_LENGTHS.dense, law.d / 2):
            return None
        work += len(draws.models) * chains.work
        most = _LENGTHS.work * (1 if mixed(draws) else _LENGTHS.patience)
        done = draws.error < _LENGTHS.error
        # the next round costs twice as much
        if told(draws) or done or (k + 1 >= _LENGTHS.rounds[0] and 3 * work > most):
            break
    return draws


def all_models(law):
    """Return `ModelDraws` of all models of few columns at points of the log ratio."""
    models = np.arange(2**law.d)[:, None] >> np.arange(law.d) & 1
    models = np.sort(np.where(models == 1, np.arange(law.d), law.d), axis=1)
    if law.bounds is None:
        ratio = np.full(1, law.space.value[1] - law.space.value[0])
    else:
        low, high = law.bounds
        ratio = np.arange(low, high, _LENGTHS.spacing)
    density = np.concatenate([
        law.along_ratios(m, np.broadcast_to(ratio, (len(m), len(ratio))))
        for m in np.array_split(models, -(-len(models) // _LENGTHS.batch))
    ])  # fmt: skip
    on = models < law.d
    density += law.log_prior[on.sum(axis=1)][:, None]
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    inclusion = np.bincount(models.ravel(), np.repeat(weight.sum(axis=1), law.d))[: law.d]
    level = float(np.sum(weight * density))
    if weight.size > _LENGTHS.kept:  # evenly, as many as are kept
        place = (np.arange(_LENGTHS.kept) + 0.5) / _LENGTHS.kept
        chosen = np.minimum(np.searchsorted(np.cumsum(weight), place), weight.size - 1)
        weight = np.bincount(chosen, minlength=weight.size).reshape(weight.shape)
    model, point = np.nonzero(weight)
    by_chain = np.stack([inclusion, inclusion])  # without error
    return ModelDraws([models[model]], [ratio[point]], [weight[model, point]], by_chain, level)


def mixed(draws):
    """Say whether the chains agree."""
    return draws.error < _LENGTHS.doubtful


def log_evidence(law, draws):
    """Log p(y) by the model that is drawn most often: its evidence by its posterior probability.

    Its error is that of the log of a frequency.
    """
    models, place = np.unique(draws.kept.models, axis=0, return_inverse=True)
    share = np.bincount(np.ravel(place), draws.kept.weight)
    top = int(np.argmax(share))
    model, n = models[top : top + 1], law.n_rows
    constant = law.log_prior[np.count_nonzero(model < law.d)] - np.log(share[top])
    constant -= law.problem.constant
    if law.bounds is None:
        log_ratio = draws.kept.log_ratio[:1]
        given = law.given(model, log_ratio, others=False)
        value = float(law.log_fit(log_ratio, given.log_det, given.square)[0])
        return value + constant - 0.5 * n * np.log(2 * np.pi)
    low, high = law.bounds
    points = np.linspace(low, high, 500)
    density = law.along_ratios(model, points[None])[0]
    top_value = density.max()
    mass = np.trapezoid(np.exp(density - top_value), points)
    value = float(top_value + np.log(mass) + constant)
    if law.space.free[:2].all():
        return value + float(gammaln(0.5 * n)) - 0.5 * n * np.log(np.pi)
    return value - 0.5 * n * np.log(2 * np.pi)


def solved(law, models, log_ratio):
    """Return square (S,), mean (S, K) and root (S, K, K) of models, some at a time."""
    parts = [
        law.given(models[b], log_ratio[b], others=False)
        for b in gen_batches(len(models), _LENGTHS.batch)
    ]
    return tuple(np.concatenate([getattr(p, f) for p in parts]) for f in ("square", "mean", "root"))
