"""Posterior with zeros in it: quantiles of single coefficients, and joint draws.

A fixed point of EP describes a coefficient twice, with one mean and variance: by the Gaussian Q of
all coefficients, and by its tilted distribution, prior times cavity, which is zero with positive
probability and normal otherwise. Intervals of a coefficient are those of the tilted distribution.

Draws take one coefficient after the other: Q given the coefficients drawn so far, without the site
of the next one, is its cavity, and it is drawn from prior times cavity. The chain rule makes this a
joint distribution, whose only approximation is that the sites of coefficients to come stay those of
EP. So what earlier coefficients leave of a signal is taken by later ones, and sums of coefficients
have the spread that the data give them. A map of draws from Q to these marginals, one coefficient
at a time, would widen sums of correlated columns: with zeros there is less correlation to be had.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtr

from .._engine.averaging import mixture_quantiles
from ._energy import LOW_SITE
from ._linear_model import LinearModel

__all__ = ["SequentialDraws", "TiltedMarginals", "tilted_quantiles"]

# Share of the columns that are expected to be in that is drawn at once, those of least inclusion
# first, until there are no more columns than rows.
SHARE = 0.125
# Columns of less inclusion are out in every draw: their cavities are differences of natural
# parameters over a hundred million times as large, of which rounding leaves too little.
LEAST_INCLUSION = 1e-8


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


def _columns(values, index):
    return values[:, index]


@dataclass
class SequentialDraws:
    """Draws of the coefficients at an `EnergyState`, in working units.

    `sites` (2, d) are those of Q; `own` (2, d) those that are taken out of Q for a coefficient, so
    that its tilted distribution has the moments of Q. At a fixed point both are the same.
    """

    model: Any
    factor: Any
    noise: float
    marginals: Any
    sites: np.ndarray
    own: np.ndarray
    inclusion: np.ndarray

    @classmethod
    def of(cls, state):
        """Return the draws of a state."""
        p, cavity = state.problem, np.stack([state.matched.shift, state.matched.precision])
        own = np.stack([state.mean, np.ones_like(state.mean)]) / state.var - cavity
        inclusion = state.matched.inclusion
        return cls(p.model, p.factor, p.noise, state.marginals, state.sites, own, inclusion)

    def draw(self, n_samples, rng):
        """Return draws (n_samples, d): O(d^2) each, or O(n d) and a few posteriors for d > n."""
        out, rest = np.zeros((n_samples, len(self.inclusion))), np.arange(len(self.inclusion))
        q, X, fitted = self.marginals, self.model.X, 0.0
        known: dict[int, np.ndarray] = {}
        mean = np.tile(q.mean, (n_samples, 1))
        for block in self._blocks:
            own = np.searchsorted(rest, block)
            slab_mean, slab_var, score = self._slabs(rest, mean, q.var)
            on = self._is_in(own, rest, partial(_columns, score), known, rng)
            noise = np.sqrt(slab_var[own]) * rng.standard_normal(on.shape)
            out[:, block] = np.where(on, slab_mean[:, own] + noise, 0.0)
            fitted = fitted + out[:, block] @ X[:, block].T
            rest = np.delete(rest, own)
            model = LinearModel(X[:, rest], self.model.y)
            floor = LOW_SITE / self.factor.slab_variance
            q = model.marginals(self.sites[1, rest], self.sites[0, rest], self.noise, floor)
            mean = q.mean - q.times((fitted @ X[:, rest]) / self.noise)
        out[:, rest] = self._one_by_one(rest, mean, q.root, known, rng)
        return out

    @cached_property
    def _blocks(self):
        """Columns that are drawn at once, in turn, until as many as rows are left."""
        factor, blocks, most = self.factor, [], len(self.model.X)
        order = np.argsort(factor.spread(factor.per_indicator(self.inclusion)), kind="stable")
        while not self.model.dense and len(order) > most:
            total = np.cumsum(self.inclusion[order])
            few = np.searchsorted(total, SHARE * total[-1], side="right")
            now, order = np.split(order, [int(np.clip(few, 1, len(order) - most))])
            blocks.append(np.sort(now))
        return blocks

    def _slabs(self, index, mean, var):
        """Slab mean (S, b) and variance (b,) of coefficients, and what speaks for them (S, b).

        A variance given others is at most that without: a cavity precision at least the matched.
        """
        v = self.factor.slab_variance
        least = self._least_precision[index]
        scale = 1.0 + v * np.maximum(1.0 / var - self.own[1, index], least)
        shift = mean / var - self.own[0, index]
        slab_var = v / scale
        slab_mean = slab_var * shift
        return slab_mean, slab_var, 0.5 * (shift * slab_mean - np.log(scale))

    @cached_property
    def _least_precision(self):
        return 1.0 / self.marginals.var - self.own[1]

    def _is_in(self, own, rest, score_of, known, rng):
        """Draw whether the columns at places `own` of `rest` are in, (S, len(own)).

        `score_of` tells what speaks for columns at some places. An indicator is drawn with the
        first column of its group, by what speaks for all of them, and `known` from then on.
        """

        def drawn(score):
            return rng.uniform(size=score.shape) < expit(self.factor.logit + score)

        may_be = self.inclusion[rest[own]] > LEAST_INCLUSION
        if self.factor.groups is None:
            return drawn(score_of(own)) & may_be
        groups = self.factor.groups[rest]
        for g in np.unique(groups[own]):
            if g not in known:
                known[g] = drawn(score_of(np.flatnonzero(groups == g)).sum(axis=1))
        return np.column_stack([known[g] for g in groups[own]]) & may_be

    def _one_by_one(self, index, mean, root, known, rng):
        """Draw coefficients one after the other, the last first, root'root their covariance."""
        out, move = np.empty_like(mean), np.zeros_like(mean)
        for j in reversed(range(len(index))):
            out[:, j], centre = self._next(j, index, mean, move, root, known, rng)
            move[:, j] = (out[:, j] - centre) / root[j, j]
        return out

    def _next(self, j, index, mean, move, root, known, rng):
        """Draw the coefficient at place j given the later ones, and return it with its mean."""

        def given_later(among):
            centre = mean[:, among] + move[:, j + 1 :] @ root[j + 1 :, among]
            return centre, np.sum(root[: j + 1, among] ** 2, axis=0)

        own = np.array([j])
        centre, var = given_later(own)
        slab_mean, slab_var, score = self._slabs(index[own], centre, var)

        def score_of(among):
            return score if len(among) == 1 else self._slabs(index[among], *given_later(among))[2]

        on = self._is_in(own, index, score_of, known, rng)
        normal = slab_mean + np.sqrt(slab_var) * rng.standard_normal(on.shape)
        return np.where(on, normal, 0.0)[:, 0], centre[:, 0]
