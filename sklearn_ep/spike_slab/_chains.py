"""Draws of models by Markov chains, coefficients integrated out: for correlated columns.

A step takes a column that is in out of the model, or none, and draws what goes in, one of all
columns or none, given the others: so a signal moves between copies in one step, and between
correlated columns as between the columns of a single effect (Wang et al. 2020), with the others
drawn and not averaged. What the step knows of all columns is kept: its probabilities and the
columns that stay in say what is in, and so do the probabilities alone, as a column of k is drawn in
one of k + 2 steps. The first way hardly errs for columns that are nearly always in, the second one
for the others, and inclusion is a weighted mean of both: with half of the error on genotypes.

Many chains run in parallel, from different models. The first quarter of their steps, which lead
there, is thrown away. How far the chains differ is the error.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class _Lengths(NamedTuple):
    """How long chains are, and how many run in parallel."""

    entries: int = 2**14  # columns of all chains together: of fewer numpy's calls cost more
    chains: tuple = (8, 32)
    round: int = 200  # steps
    work: float = 6.5e7  # of all steps: columns of all chains times 1 + k / 8 with k in on average
    step: float = 4e4  # of this a step is at least
    patience: int = 4  # times that, where chains do not agree
    agreed: float = 0.02  # error up to which they do: the largest of 200 fits on genotypes was .025
    rounds: tuple = (4, 64)
    all_models: int = 12  # columns of which all models are looked at
    spacing: float = 0.25  # of log ratios then: a tenth of what a single column tells of its own
    ratio_every: int = 4  # steps: the ratio moves slowly and alone
    start: int = 10  # most columns that a chain starts with, all of them different
    error: float = 0.005  # largest standard error of an inclusion at which chains end
    doubtful: float = 0.05  # that of a warning
    search: int = 300  # steps that look for the best model; a thousand find no better one
    kept: int = 8192  # models
    kept_entries: int = 2**21  # of their covariances
    dense: int = 50  # columns: a step costs the square of what is in, and sums of many are Gaussian


_LENGTHS = _Lengths()


class KeptModels(NamedTuple):
    """Different models (S, K) with their log ratios and weights (S,)."""

    models: np.ndarray
    log_ratio: np.ndarray
    weight: np.ndarray


@dataclass
class ModelDraws:
    """Draws: models (M, K), log ratios and weights (M,) of each step.

    `seen` and `drawn` (M, d) are the inclusions of each chain, with the columns that stay in and by
    probabilities of what is drawn alone. `log_density` is the mean log density of models and
    responses, constants left out.
    """

    models: list
    log_ratio: list
    weight: list
    seen: np.ndarray
    drawn: np.ndarray
    log_density: float

    @classmethod
    def joined(cls, rounds):
        """Return the draws of rounds of as many steps."""
        parts: Any = [[getattr(r, f.name) for r in rounds] for f in fields(cls)]
        values: list[Any] = [sum(part, []) for part in parts[:3]]
        return cls(*values, *[np.mean(part, axis=0) for part in parts[3:]])

    @cached_property
    def by_chain(self):
        """Inclusion (M, d) of each chain."""
        share = self.seen.mean(axis=0)
        return share * self.seen + (1.0 - share) * self.drawn

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
        return np.clip(self.by_chain.mean(axis=0), 0.0, 1.0)

    @property
    def errors(self):
        """Standard errors (d,) of the inclusions, from chain to chain."""
        return _between(self.by_chain)

    @property
    def error(self):
        """Largest standard error of an inclusion."""
        return float(self.errors.max())

    @property
    def mixed(self):
        """Whether the chains agree."""
        return self.error < _LENGTHS.doubtful

    @property
    def enough(self):
        """Whether frequencies of columns among the models, which predict, are good as well."""
        return _between(self.seen).max() < _LENGTHS.error

    @property
    def effective_number(self):
        """Least effective number of draws, of the columns in doubt."""
        p = self.inclusion
        spread = p * (1 - p)
        doubt = spread >= _LENGTHS.doubtful
        square = np.maximum(self.errors[doubt] ** 2, np.finfo(float).tiny)
        return float(np.min(spread[doubt] / square, initial=np.inf))


def _between(by_chain):
    """Return the standard errors (d,) of means over chains (M, d)."""
    return by_chain.std(axis=0, ddof=1) / np.sqrt(len(by_chain))


class ModelChains:
    """Markov chains over models, run in parallel."""

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
        """Put a column, or none, into each model.

        Returns probabilities (M, d + 1), the entries of what was in, their number (M,), mean fit.
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
        gain = law.gains(others, given, self.log_ratio)
        more = law.log_prior[size + 1] - law.log_prior[size] + np.log((size + 2.0) / (size + 3) / 2)
        gain[:, :-1] += more[:, None].astype(gain.dtype)
        rows, places = np.nonzero(others < law.d)
        inside = rows, others[rows, places]
        gain[inside] = -np.inf
        density = np.mean(fit + law.log_prior[size])
        gain -= gain.max(axis=1, keepdims=True)
        share = np.exp(gain, out=gain)
        share /= share.sum(axis=1, keepdims=True)
        new = self._drawn(share)
        self.models[self._chain, size] = new
        self.size = size + (new < law.d)
        return share, inside, size, density

    def _drawn(self, weight):
        """Draw a place in each row of weights: a block of places, and one of the block."""
        width = weight.shape[1]
        step = int(np.sqrt(width))
        starts = np.arange(0, width, step)
        first = starts[self._place(np.add.reduceat(weight, starts, axis=1))]
        own = np.minimum(first[:, None] + np.arange(step), width)
        end = np.where(own < width, weight[self._chain[:, None], own % width], 0.0)
        return np.minimum(first + self._place(end), width - 1)

    def _place(self, weight):
        """Draw a place in each row of few weights."""
        total = np.cumsum(weight, axis=1)
        level = self.rng.random(len(weight)) * total[:, -1]
        return (total[:, :-1] <= level[:, None]).sum(axis=1)

    def _move_ratio(self):
        """Draw the log ratio of each chain from the points of a lattice of random width on it."""
        low, high = self.law.bounds
        if low == high:
            return
        width = self.rng.uniform(0.5, 1.0, len(self.size))
        first = low + (self.log_ratio - low) % width
        points = first[:, None] + width[:, None] * np.arange(int((high - low) / 0.5) + 1)
        models = self.models[:, : max(int(self.size.max()), 1)]
        value = self.law.along_ratios(models, np.minimum(points, high))
        value[points > high] = -np.inf
        value -= value.max(axis=1, keepdims=True)
        self.log_ratio = points[self._chain, self._drawn(np.exp(value))]

    @property
    def work(self):
        """Work of a step."""
        entries = len(self.size) * self.law.d * (1.0 + self.size.mean() / 8.0)
        return max(entries, _LENGTHS.step)

    def round(self, n_steps):
        """Go some steps; return the `ModelDraws`."""
        seen, drawn = np.zeros((2, len(self.size), self.law.d + 1), np.float32)
        density, models, ratios = 0.0, [], []
        for k in range(n_steps):
            self._take_out()
            share, inside, size, fit = self._put_in()
            seen += share
            seen[inside] += 1.0
            share *= (size[:, None] + 3).astype(share.dtype)
            drawn += share
            density += fit / n_steps
            if k % _LENGTHS.ratio_every == 0:
                self._move_ratio()
            models.append(self.models.copy())
            ratios.append(self.log_ratio)
        weight = [np.ones(len(ratios[0]))] * n_steps
        means = np.stack([seen, drawn], dtype=float)[:, :, :-1] / n_steps
        return ModelDraws(models, ratios, weight, means[0], means[1], density)


def sample_models(law, seed, max_rounds, told):
    """Return the `ModelDraws`, or None where models are dense.

    `told` hears of each round and may end the chains. Of few columns all models are looked at.
    """
    if law.d <= _LENGTHS.all_models:
        draws = all_models(law)
        told(draws)
        return draws
    chains, rounds, work = ModelChains(law, np.random.default_rng(seed)), list[ModelDraws](), 0.0
    least, most = _LENGTHS.rounds
    while len(rounds) < min(max_rounds, most):
        rounds.append(chains.round(_LENGTHS.round))
        draws = ModelDraws.joined(rounds[(len(rounds) + 2) // 4 :])
        if draws.inclusion.sum() > max(_LENGTHS.dense, law.d / 2):
            return None
        work += _LENGTHS.round * chains.work
        most_work = _LENGTHS.work * (1 if draws.error < _LENGTHS.agreed else _LENGTHS.patience)
        done = draws.enough or work > most_work
        if told(draws) or (done and len(rounds) >= least):
            break
    return draws


def all_models(law):
    """Return `ModelDraws` of all models of few columns at points of the log ratio."""
    models = np.arange(2**law.d)[:, None] >> np.arange(law.d) & 1
    models = np.sort(np.where(models == 1, np.arange(law.d), law.d), axis=1)
    ratio = law.lattice(_LENGTHS.spacing)
    density = law.log_density(models, np.broadcast_to(ratio, (len(models), len(ratio))))
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    inclusion = np.bincount(models.ravel(), np.repeat(weight.sum(axis=1), law.d))[: law.d]
    level = float(np.sum(weight * density))
    if weight.size > _LENGTHS.kept:
        weight = _thinned(weight, _LENGTHS.kept // 4)
    model, point = np.nonzero(weight)
    both = np.stack([inclusion, inclusion])  # without error
    return ModelDraws([models[model]], [ratio[point]], [weight[model, point]], both, both, level)


def _thinned(weight, n_kept):
    """Return weights of which few are left, the heavy ones as they were (Fearnhead, Clifford 2003).

    The others have one weight, and are chosen evenly, so that no light one counts for much.
    """
    flat = np.sort(weight[weight > 0])
    # the least share at which the weights above it, and the sum of those below, make n_kept
    least = flat[np.argmax(np.cumsum(flat) / flat + np.arange(flat.size)[::-1] <= n_kept)]
    light = weight <= least
    order = np.cumsum(np.where(light, weight, 0.0)).reshape(weight.shape) / least + 0.5
    passed = np.floor(order) > np.floor(order - weight / least)
    return np.where(light, passed * least, weight)


def best_model(law, seed):
    """Return columns, log ratio and log noise of the most probable model that chains visit."""
    found = ModelChains(law, np.random.default_rng(seed)).round(_LENGTHS.search).kept
    density = law.log_density(found.models, found.log_ratio[:, None])[:, 0]
    top = slice(int(np.argmax(density)), int(np.argmax(density)) + 1)
    model, log_ratio = found.models[top], found.log_ratio[top]
    square = law.given(model, log_ratio).square[0]
    return np.sort(law.order[model[model < law.d]]), log_ratio[0], np.log(square / law.n_rows)
