"""Draws of models by Markov chains, coefficients integrated out: for correlated columns.

A step takes a column that is in out of the model, or none, and draws what goes in, one of all
columns or none, given the others: so a signal moves between copies in one step, and between
correlated columns as between the columns of a single effect (Wang et al. 2020), with the others
drawn and not averaged. What the step knows of all columns is kept: its probabilities and the
columns that stay in say what is in, and so do the probabilities alone, as it is known how often a
column of k is drawn. The first way hardly errs for columns that are nearly always in, the second
one for the others, and inclusion is a weighted mean of both: with half of the error on genotypes.

Few columns of large effects and many of small ones may explain responses as well. One column at a
time a chain takes thousands of steps from the ones to the others. So several go in or out together,
and the ratio changes with their number: the memory of how many are in is a third as long.

Two columns may also explain what two others do, where one of each says nothing. So one that stays
is exchanged by a Metropolis step in which what goes in is summed over: two columns change at once.

From few columns large models grow for hundreds of steps. So a few pilot chains run first, as long
as their models grow. Then many chains run in parallel, from different models of about as many
columns, or of few where models are small. The first third of their steps is thrown away as burn-in.
How far the chains differ is the error.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln


class _Lengths(NamedTuple):
    """How long chains are, and how many run in parallel."""

    entries: int = 2**15  # columns of all chains together: of half, a step of one costs twice
    chains: tuple = (8, 64)
    round: int = 100  # steps
    work: float = 3.9e7  # of all steps, as `ModelChains.work` counts it
    step: float = 4e4  # of this a step is at least
    patience: int = 3  # times that, where chains do not agree
    agreed: float = 0.01  # error up to which they do: a tenth of the fits is above
    rounds: tuple = (4, 64)
    all_models: int = 12  # columns of which all models are looked at
    spacing: float = 0.25  # of log ratios then: a tenth of what a single column tells of its own
    # steps: of the ratio, and of many columns. Of few columns moves cost more than steps: every 4
    # steps take a fifth more time, for errors as large. Of many, every 8 err more.
    moves_every: tuple = (4, 8)
    exchanges_every: int = 8  # steps: 8 % of the time; each one where chains do not agree
    many: tuple = (1, 2, 4, 8)  # columns that go in or out together: a fifth is accepted
    widths: tuple = (9, 17, 33)  # columns in: models are solved beside those of like width
    start: int = 10  # most columns that chains start with, all of them different
    pilots: tuple = (16, 8)  # how many, and most rounds; 8 pilots err by 3 of 30 columns
    sizes: tuple = (0.5, 1.5)  # times the size of their models, with which other chains start then
    error: float = 0.005  # largest standard error of an inclusion at which chains end
    doubtful: float = 0.05  # that of a warning
    search: int = 300  # steps that look for the best model; a thousand find no better one
    kept: int = 8192  # models
    kept_entries: int = 2**21  # of their covariances
    dense: int = 50  # columns: a step costs the square of what is in, and sums of many are Gaussian


_LENGTHS = _Lengths()


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
        """Draws that predict, different models (S, K) with their log ratios and weights (S,).

        Equal ones are one, and of many a part stays.
        """
        d, parts = self.by_chain.shape[1], self.models
        every = np.full((sum(map(len, parts)), max(m.shape[1] for m in parts)), d)
        ends = np.cumsum([len(m) for m in parts])
        for end, part in zip(ends, parts, strict=True):
            every[end - len(part) : end, : part.shape[1]] = part
        every.sort(axis=1)
        every = every[:, : max(1, int((every < d).any(axis=0).sum()))]
        joined = np.column_stack([every, np.concatenate(self.log_ratio)])
        order = np.lexsort(joined.T[::-1])  # a tenth of the time of a unique one of rows
        joined = joined[order]
        first = np.append(True, (joined[1:] != joined[:-1]).any(axis=1))
        distinct = joined[first]
        weight = np.bincount(np.cumsum(first) - 1, np.concatenate(self.weight)[order])
        most = min(_LENGTHS.kept, _LENGTHS.kept_entries // every.shape[1] ** 2)
        weight = _thinned(weight, most) if len(weight) > most else weight
        stays = weight > 0
        models, log_ratio = distinct[stays, :-1].astype(int), distinct[stays, -1]
        return models, log_ratio, weight[stays] / weight.sum()

    @property
    def inclusion(self):
        """Inclusion (d,) of all chains."""
        return np.clip(self.by_chain.mean(axis=0), 0.0, 1.0)

    @property
    def mean_size(self):
        """Mean number of columns in."""
        return self.inclusion.sum()

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


def _widened(models, width, none):
    """Return models with room for so many columns, `none` in what is added."""
    more = width - models.shape[1]
    return models if more <= 0 else np.pad(models, ((0, 0), (0, more + 3)), constant_values=none)


def _alike(models, size):
    """Return which models have like widths, and these models."""
    width = np.digitize(size, _LENGTHS.widths)
    parts = [np.flatnonzero(width == w) for w in np.unique(width)]
    return [(part, models[part, : max(int(size[part].max()), 1)]) for part in parts]


def _n_chains(d):
    """Number of chains of d columns."""
    return int(np.clip(_LENGTHS.entries // d, *_LENGTHS.chains))


def _few_columns(d):
    """Say whether columns are so few that there are as many chains as there may be."""
    return _n_chains(d) == _LENGTHS.chains[1]


class ModelChains:
    """Markov chains over models, run in parallel."""

    def __init__(self, law, rng, n_chains=None):
        d = law.d
        self.law, self.rng = law, rng
        sizes = np.arange(n_chains or _n_chains(d)) % (_LENGTHS.start + 1)
        self._start(sizes, law.space.value[1] - law.space.value[0])
        # how often one of so many columns goes out; more often, their number hardly moves
        sizes = np.arange(d + 2)
        self._out = np.minimum(sizes / (sizes + 2.0), 0.5)
        # how many columns one that goes in beside k stands for, and its log odds to none: these
        # weigh how often a step takes it out again, against how often it takes none out, so that
        # the posterior is kept
        stands = np.arange(1, d + 2) / self._out[1:]
        self._stands = stands.astype(np.float32)
        self._odds = np.diff(law.log_prior) - np.log(stands * (1 - self._out[:-1]))
        self.exchanges_every = _LENGTHS.exchanges_every
        self._moves_every = _LENGTHS.moves_every[int(_few_columns(d))]
        self._likely = np.full(d, 1.0 / d)

    def _start(self, sizes, log_ratio):
        """Start from random models of such sizes (M,), or as large as rows allow."""
        self.size = np.minimum(sizes, min(self.law.problem.model.X.shape))
        self.models = np.full((len(sizes), self.size.max() + 1), self.law.d)
        for model, size in zip(self.models, self.size, strict=True):
            model[:size] = self.rng.choice(self.law.d, size, replace=False)
        self.log_ratio = np.resize(log_ratio, len(sizes))
        self._chain, self._n_rounds = np.arange(len(sizes)), 0

    @classmethod
    def after_pilots(cls, law, rng):
        """Return chains that start with about as many columns as few pilot chains come to have.

        Which columns is left to chance: those of the pilots would be those of their modes. Where
        models are small, chains start as without pilots. Of many columns there are none: they would
        be half of the chains.
        """
        if not _few_columns(law.d):
            return cls(law, rng)
        n_chains, half = _n_chains(law.d), _LENGTHS.round // 2
        n_pilots, most = _LENGTHS.pilots
        chains = cls(law, rng, n_pilots)
        for _ in range(most):
            before, now = (chains.round(half).mean_size for _ in range(2))
            if now <= max(before, _LENGTHS.start):
                break
        if now <= _LENGTHS.start:
            return cls(law, rng)
        least, largest = _LENGTHS.sizes
        sizes = now * np.linspace(least, largest, n_chains)
        chains._start(np.rint(sizes).astype(int), chains.log_ratio)
        return chains

    def _take_out(self):
        """Take a column out of some models: the last one, as their order is random."""
        some = np.flatnonzero(self.rng.random(len(self.size)) < self._out[self.size])
        self.size[some] -= 1
        self.models[some, self.size[some]] = self.law.d

    def _put_in(self, exchange):
        """Put a column, or none, into each model, of some one column exchanged before.

        Returns probabilities (M, d + 1), the entries of what was in, their number (M,), mean fit.
        """
        d = self.law.d
        share, mass, fit = self._beside(self.models, self.size, self._chain)
        if exchange:
            self._exchange(share, mass, fit)
        size = self.size
        self.models = _widened(self.models, int(size.max()) + 1, d)
        rows, places = np.nonzero(self.models < d)
        inside = rows, self.models[rows, places]
        new = self._drawn(share)
        self.size = size + (new < d)
        # one that goes in changes places with any, so that the order stays random
        place = (self.rng.random(len(size)) * self.size).astype(int)
        self.models[self._chain, size] = self.models[self._chain, place]
        self.models[self._chain, np.where(new < d, place, size)] = new
        return share, inside, size, fit.mean()

    def _beside(self, models, size, chains):
        """Return what `_shares` says of models of some chains, those of like width together."""
        share = np.empty((len(size), self.law.d + 1), np.float32)
        mass, fit = np.empty((2, len(size)))
        for part, others in _alike(models, size):
            given = others, size[part], self.log_ratio[chains[part]]
            share[part], mass[part], fit[part] = self._shares(*given)
        return share, mass, fit

    def _shares(self, others, size, log_ratio):
        """Return the probabilities of what goes into models, and log densities (M,) of these.

        The first density is that of what stays, with what goes in summed over.
        """
        law = self.law
        given = law.given(others, log_ratio)
        gain = law.gains(others, given, log_ratio)
        gain[:, :-1] += self._odds[size, None].astype(gain.dtype)
        rows, places = np.nonzero(others < law.d)
        gain[rows, others[rows, places]] = -np.inf
        top = gain.max(axis=1, keepdims=True)
        gain -= top
        share = np.exp(gain, out=gain)
        total = share.sum(axis=1, keepdims=True)
        share /= total
        fit = law.log_fit(log_ratio, given.log_det, given.square) + law.log_prior[size]
        summed = fit + np.log1p(-self._out[size]) + (top + np.log(total))[:, 0]
        return share, summed, fit

    def _exchange(self, share, mass, fit):
        """Exchange a column that stays, put one in, or take the last one out, by a Metropolis step.

        New ones are drawn as often as they were in so far. What `_beside` said is brought up to
        date.
        """
        size, rng, chain, d = self.size, self.rng, self._chain, self.law.d
        more = rng.choice([-1, 0, 0, 1], len(size))
        self.models = _widened(self.models, int(size.max()) + 1, d)
        place = (rng.random(len(size)) * size).astype(int)
        place = np.where(more == 0, place, np.maximum(size - (more < 0), 0))
        total = np.cumsum(self._likely)
        new = np.searchsorted(total, rng.random(len(size)) * total[-1], side="right")
        new = np.where(more < 0, d, np.minimum(new, d - 1))
        twice = ((new < d)[:, None] & (new[:, None] == self.models)).any(axis=1)
        legal = np.flatnonzero(~twice & ((size > 0) | (more > 0)))
        if len(legal) == 0:
            return
        other, n_other = self.models[legal], (size + more)[legal]
        old, new = self.models[chain, place][legal], new[legal]
        other[np.arange(len(legal)), place[legal]] = new
        changed = self._beside(other, n_other, legal)
        # ways to draw what is new, and what was there; of as many columns each order is as likely
        score = np.append(np.log(self._likely / total[-1]), 0.0)
        gain = changed[1] - mass[legal] + score[old] - score[new]
        gain += gammaln(size[legal] + 1.0) - gammaln(n_other + 1.0)
        moved = gain > -rng.standard_exponential(len(legal))
        to = legal[moved]
        self.models[to], self.size[to] = other[moved], n_other[moved]
        for value, now in zip((share, mass, fit), changed, strict=True):
            value[to] = now[moved]

    def move_many(self):
        """Put several random columns in, or take several out, where a Metropolis step accepts it.

        The ratio changes with the number of columns, so that the signal of all of them is kept.
        """
        law, size, rng = self.law, self.size, self.rng
        n_chains, d = len(size), law.d
        wanted = size + rng.choice(_LENGTHS.many, n_chains) * rng.choice([-1, 1], n_chains)
        new = np.clip(wanted, 0, d)
        width = max(int(size.max()), int(new.max()), 1)
        self.models = _widened(self.models, width, d)
        place, now = np.arange(width), self.models[:, :width]
        other = np.where(place < size[:, None], now, rng.integers(0, d, now.shape))
        other[place >= new[:, None]] = d
        in_order = np.sort(other, axis=1)
        twice = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < d)).any(axis=1)
        low, high = law.bounds
        log_ratio = self.log_ratio + law.space.free[1] * np.log((size + 1) / (new + 1))
        legal = (new == wanted) & ~twice & (log_ratio >= low) & (log_ratio <= high)
        k = np.concatenate([size, new])
        ratios, value = np.concatenate([self.log_ratio, log_ratio]), np.empty(len(k))
        for part, models in _alike(np.concatenate([now, other]), k):
            value[part] = law.log_density_at(models, ratios[part])
        value += k * np.log(d) - gammaln(k + 1.0)  # ways to draw them, and to take them out again
        gain = value[n_chains:] - value[:n_chains]
        moved = legal & (gain > -rng.standard_exponential(n_chains))
        self.models[moved, :width] = other[moved]
        self.size = np.where(moved, new, size)
        self.log_ratio = np.where(moved, log_ratio, self.log_ratio)

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
        value = np.empty(points.shape)
        for part, models in _alike(self.models, self.size):
            value[part] = self.law.along_ratios(models, np.minimum(points[part], high))
        value[points > high] = -np.inf
        value -= value.max(axis=1, keepdims=True)
        self.log_ratio = points[self._chain, self._drawn(np.exp(value))]

    @property
    def work(self):
        """Work of a step: what models say of all columns, and their inverses and eigenvalues."""
        k = self.size.mean()
        one = self.law.d * (1.0 + k / 8.0) + k**2 * (1.5 + k / 50.0)
        return max(len(self.size) * one, _LENGTHS.step)

    def round(self, n_steps):
        """Go some steps; return the `ModelDraws`."""
        seen, drawn = np.zeros((2, len(self.size), self.law.d + 1), np.float32)
        density, models, ratios = 0.0, [], []
        for k in range(n_steps):
            self._take_out()
            share, inside, size, fit = self._put_in(k % self.exchanges_every == 0)
            seen += share
            seen[inside] += 1.0
            share *= self._stands[size, None]
            drawn += share
            density += fit / n_steps
            if k % self._moves_every == 0:
                self.move_many()
                self._move_ratio()
            models.append(self.models.copy())
            ratios.append(self.log_ratio)
        weight = [np.ones(len(ratios[0]))] * n_steps
        means = np.stack([seen, drawn], dtype=float)[:, :, :-1] / n_steps
        self._n_rounds += 1
        now = means[0].mean(axis=0) + 1.0 / self.law.d
        self._likely += (now - self._likely) / self._n_rounds
        return ModelDraws(models, ratios, weight, means[0], means[1], density)


def sample_models(law, seed, max_rounds, told):
    """Return the `ModelDraws`, or None where models are dense.

    `told` hears of each round and may end the chains. Of few columns all models are looked at.
    """
    if law.d <= _LENGTHS.all_models:
        draws = all_models(law)
        told(draws)
        return draws
    chains = ModelChains.after_pilots(law, np.random.default_rng(seed))
    rounds, work = list[ModelDraws](), 0.0
    least, most = _LENGTHS.rounds
    while len(rounds) < min(max_rounds, most):
        rounds.append(chains.round(_LENGTHS.round))
        draws = ModelDraws.joined(rounds[(len(rounds) + 1) // 3 :])
        if draws.mean_size > max(_LENGTHS.dense, law.d / 2):
            return None
        work += _LENGTHS.round * chains.work
        most_work = _LENGTHS.work
        if work > most_work and draws.error > _LENGTHS.agreed:
            chains.exchanges_every, most_work = 1, _LENGTHS.patience * most_work
        # frequencies of columns among the models, which predict, have to be good as well
        done = work > most_work or _between(draws.seen).max() < _LENGTHS.error
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
    weight[weight < np.finfo(float).eps / weight.size] = 0.0  # shares of them would underflow
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
    room = n_kept - np.arange(flat.size)[::-1]  # for those up to each, where heavier ones stay
    share = np.cumsum(flat) / np.maximum(room, 1)
    least = share[np.argmax((room > 0) & (share <= np.append(flat[1:], np.inf)))]
    light = weight <= least
    order = np.cumsum(np.where(light, weight, 0.0)).reshape(weight.shape) / least + 0.5
    passed = np.floor(order) > np.floor(order - weight / least)
    return np.where(light, passed * least, weight)


def best_model(law, seed):
    """Return columns, log ratio and log noise of the most probable model that chains visit."""
    draws = ModelChains(law, np.random.default_rng(seed)).round(_LENGTHS.search)
    models, log_ratio, _ = draws.kept
    top = [int(np.argmax(law.log_density(models, log_ratio[:, None])[:, 0]))]
    model, log_ratio = models[top], log_ratio[top]
    square = law.given(model, log_ratio).square[0]
    return np.sort(law.order[model[model < law.d]]), log_ratio[0], np.log(square / law.n_rows)
