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
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, ndtr

from .._engine.averaging import mixture_quantiles
from ._energy import LOW_SITE
from ._linear_model import LinearModel

__all__ = ["SequentialDraws", "TiltedMarginals", "tilted_quantiles"]

# Share of the columns that are expected to be in that is drawn at once, those of least inclusion
# first, until there are no more columns than rows.
SHARE = 0.125


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
        mean = np.tile(q.mean, (n_samples, 1))
        for block in self._blocks:
            own = np.searchsorted(rest, block)
            out[:, block] = self._drawn(block, mean[:, own], q.var[own], rng)
            fitted = fitted + out[:, block] @ X[:, block].T
            rest = np.delete(rest, own)
            model = LinearModel(X[:, rest], self.model.y)
            floor = LOW_SITE / self.factor.slab_variance
            q = model.marginals(self.sites[1, rest], self.sites[0, rest], self.noise, floor)
            mean = q.mean - q.times((fitted @ X[:, rest]) / self.noise)
        out[:, rest] = self._one_by_one(rest, mean, q.root, rng)
        return out

    @cached_property
    def _blocks(self):
        """Columns that are drawn at once, of whole groups, in turn; as many as rows are left."""
        d, n = len(self.inclusion), len(self.model.X)
        groups = np.arange(d) if self.factor.groups is None else self.factor.groups
        size = np.bincount(groups)
        expected = np.bincount(groups, self.inclusion)
        order = np.argsort(expected / size, kind="stable")
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(size)[:-1])
        blocks, left = [], d
        while not self.model.dense and left > n:
            total = np.cumsum(expected[order])
            few = np.searchsorted(total, SHARE * total[-1], side="right")
            enough = np.searchsorted(np.cumsum(size[order]), left - n) + 1
            now, order = np.split(order, [int(np.clip(few, 1, enough))])
            blocks.append(np.sort(np.concatenate([members[g] for g in now])))
            left -= len(blocks[-1])
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

    def _is_in(self, score, rng):
        """Draw indicators (S, ...) by what speaks for each."""
        return rng.uniform(size=score.shape) < expit(self.factor.logit + score)

    def _drawn(self, index, mean, var, rng):
        """Draw coefficients of whole groups without regard to each other."""
        slab_mean, slab_var, score = self._slabs(index, mean, var)
        if self.factor.groups is None:
            on = self._is_in(score, rng)
        else:
            codes = np.unique(self.factor.groups[index], return_inverse=True)[1]
            of_group = sp.csr_array((np.ones(len(codes)), (np.arange(len(codes)), codes)))
            on = self._is_in(score @ of_group, rng)[:, codes]
        return np.where(on, slab_mean + np.sqrt(slab_var) * rng.standard_normal(on.shape), 0.0)

    def _one_by_one(self, index, mean, root, rng):
        """Draw coefficients one after the other, the last first, root'root their covariance."""
        out, move, known = np.empty_like(mean), np.zeros_like(mean), {}
        groups = None if self.factor.groups is None else self.factor.groups[index]
        for j in range(len(index) - 1, -1, -1):
            centre = mean[:, j] + move[:, j + 1 :] @ root[j + 1 :, j]
            sd = root[j, j]
            slab_mean, slab_var, score = self._slabs(index[j], centre, sd**2)
            if groups is None:
                on = self._is_in(score, rng)
            else:
                if groups[j] not in known:
                    own = np.flatnonzero(groups == groups[j])
                    centres = mean[:, own] + move[:, j + 1 :] @ root[j + 1 :, own]
                    var = np.sum(root[: j + 1, own] ** 2, axis=0)
                    total = self._slabs(index[own], centres, var)[2].sum(axis=1)
                    known[groups[j]] = self._is_in(total, rng)
                on = known[groups[j]]
            normal = slab_mean + np.sqrt(slab_var) * rng.standard_normal(len(mean))
            out[:, j] = np.where(on, normal, 0.0)
            move[:, j] = (out[:, j] - centre) / sd
        return out
