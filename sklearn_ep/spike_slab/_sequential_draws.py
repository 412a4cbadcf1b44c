"""Joint draws of the coefficients that are exactly zero where they are out of the model.

They take one coefficient after the other: Q given the coefficients drawn so far, without the site
of the next one, is its cavity, and it is drawn from prior times cavity. The chain rule makes this a
joint distribution, whose only approximation is that the sites of coefficients to come stay those of
EP. So what earlier coefficients leave of a signal is taken by later ones, and sums of coefficients
have the spread that the data give them. A map of draws from Q to these marginals, one coefficient
at a time, would widen sums of correlated columns: with zeros there is less correlation.
Draws depend on the order a little, so that it is random, but for the first columns of many.

A group that is in is normal in all its columns: it is drawn at once from the slab times its joint
cavity. Its indicator has the odds of EP, which knows each column's cavity alone and adds what
speaks for them. With more columns than rows that is off by nats: there the joint cavity tells.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import expit, log_expit

from .._engine.gaussian import checked_cholesky, triangular_inverse
from ._energy import LOW_SITE
from ._linear_model import LinearModel

# Share of the columns that are expected to be in that is drawn at once, those of least inclusion
# first, until there are no more columns than rows.
SHARE = 0.125
# Columns of less inclusion are out in every draw: their cavities are differences of natural
# parameters over a hundred million times as large, of which rounding leaves too little.
LEAST_INCLUSION = 1e-8
# Most orders in which what is left is drawn one after the other, in as many parts of the draws; a
# part has at least a draw for each column, so that a new order costs no more than its draws.
ORDERS = 64


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

    def draw(self, n_samples, rng):
        """Return draws (n_samples, d): O(d^2) each, or O(n d) and a few posteriors for d > n."""
        return self.with_density(n_samples, rng)[0]

    def with_density(self, n_samples, rng, orders=ORDERS):
        """Return draws and their log densities (n_samples,); groups of columns have none."""
        X, rest = self.model.X, np.arange(len(self.inclusion))
        out, fitted = np.zeros((n_samples, len(rest))), np.zeros((n_samples, len(X)))
        density = np.zeros(n_samples)
        q, mean = self.marginals, np.tile(self.marginals.mean, (n_samples, 1))
        for block in _blocks(self.model, self.factor, self.inclusion):
            own = np.searchsorted(rest, block)
            wide = len(block) > len(X) and np.ptp(self._groups[block]) == 0  # one group
            if not wide:
                out[:, block], more = self._at_once(own, rest, q, mean, rng)
                density += more
            rest = np.delete(rest, own)
            q = self._without(rest)
            if wide:
                out[:, block] = self._wide(block, rest, q, fitted, rng)
            fitted += out[:, block] @ X[:, block].T
            mean = self._shifted(q, rest, fitted)
        if not rest.size:
            return out, density
        n_orders = int(np.clip(n_samples // len(rest), 1, orders))
        for batch in np.array_split(np.arange(n_samples), n_orders):
            # columns in random order, those of a group side by side
            turn = rng.permutation(self.factor.n_indicators(len(self.inclusion)))
            index = rest[np.argsort(turn[self._groups[rest]], kind="stable")]
            q = self._without(index)
            mean = self._shifted(q, index, fitted[batch])
            out[np.ix_(batch, index)], more = self._in_turn(index, mean, q.root, rng)
            density[batch] += more
        return out, density

    @cached_property
    def _groups(self):
        """Indicator of each column."""
        return self.factor.spread(np.arange(self.factor.n_indicators(len(self.inclusion))))

    def _without(self, rest):
        """Return Q of some columns, those that are missing zero."""
        model = LinearModel(self.model.X[:, rest], self.model.y)
        floor = LOW_SITE / self.factor.slab_variance
        return model.marginals(self.sites[1, rest], self.sites[0, rest], self.noise, floor)

    def _shifted(self, q, rest, fitted):
        """Means (S, len(rest)) where the missing columns explain `fitted` (S, n)."""
        return q.mean - q.times((fitted @ self.model.X[:, rest]) / self.noise)

    # ------------------------------------------------------------------------ parts of a draw

    def _at_once(self, own, rest, q, mean, rng):
        """Draw indicators at places `own` of `rest`, each given only what is known so far."""
        index, mean, precision = rest[own], mean[:, own], 1.0 / q.var[own]
        if self.factor.groups is None:
            return self._columns(index, mean, precision, rng)
        out = np.zeros_like(mean)
        for g in np.unique(self._groups[index[self.inclusion[index] > LEAST_INCLUSION]]):
            at = np.flatnonzero(self._groups[index] == g)
            back = triangular_inverse(checked_cholesky(q.block(own[at]))).T
            out[:, at], _ = self._group(index[at], mean[:, at], q.var[own[at]], back, rng)
        return out, np.nan

    def _in_turn(self, index, mean, root, rng):
        """Draw indicators one after the other, the last first, root'root their covariance."""
        out, move, density = np.empty_like(mean), np.zeros_like(mean), np.zeros(len(mean))
        ends = [*(np.flatnonzero(np.diff(self._groups[index])) + 1), len(index)]
        for a, b in zip([0, *ends[:-1]][::-1], ends[::-1], strict=True):
            own = slice(a, b)
            centre = mean[:, own] + move[:, b:] @ root[b:, own]
            back = triangular_inverse(root[own, own])
            var = np.sum(root[own, own] ** 2, axis=0)
            out[:, own], more = self._group(index[own], centre, var, back, rng)
            density += more
            move[:, own] = (out[:, own] - centre) @ back
        return out, density

    def _slabs(self, index, mean, precision):
        """Slab mean (S, b) and variance (b,) of columns, and what speaks for each (S, b).

        Q has means (S, b) and precisions (b,). Given other columns a cavity is no flatter than
        without, but for rounding.
        """
        v, least = self.factor.slab_variance, 1.0 / self.marginals.var[index] - self.own[1, index]
        scale = 1.0 + v * np.maximum(precision - self.own[1, index], least)
        shift = mean * precision - self.own[0, index]
        slab_mean = v / scale * shift
        return slab_mean, v / scale, 0.5 * (shift * slab_mean - np.log(scale))

    def _columns(self, index, mean, precision, rng):
        """Draw columns with indicators of their own; return values and log densities (S,)."""
        slab_mean, slab_var, score = self._slabs(index, mean, precision)
        odds = self.factor.logit + score
        on = _drawn_in(odds, self.inclusion[index], rng)
        free = rng.standard_normal(score.shape)
        normal = -0.5 * (free**2 + np.log(2 * np.pi * slab_var))
        density = np.where(on, log_expit(odds) + normal, log_expit(-odds)).sum(axis=1)
        return np.where(on, slab_mean + np.sqrt(slab_var) * free, 0.0), density

    def _group(self, index, mean, var, back, rng):
        """Draw a group where Q has means (S, b), variances (b,) and the precision back back'."""
        if len(index) == 1:
            return self._columns(index, mean, 1.0 / var, rng)
        score = self._slabs(index, mean, 1.0 / var)[2].sum(axis=1)
        precision = back @ back.T
        shift = mean @ precision - self.sites[0, index]
        cavity = np.linalg.eigh(precision - np.diag(self.sites[1, index]))
        return self._along(index, shift, *cavity, rng, score), np.nan

    def _wide(self, index, rest, q, fitted, rng):
        """Draw a group of more columns than rows, in the space of the rows.

        With noise and the columns of `rest` integrated out, responses have an inverse covariance.
        """
        X, own = self.model.X[:, rest], self.model.X[:, index]
        gap = self.model.y - fitted - self._shifted(q, rest, fitted) @ X.T
        inverse = np.eye(len(X)) - q.covariance(X, X) / self.noise
        left, size, right = np.linalg.svd(own, full_matrices=False)
        half = left * size
        value, basis = np.linalg.eigh(half.T @ inverse @ half / self.noise)
        return self._along(index, gap @ own / self.noise, value, right.T @ basis, rng)

    def _along(self, index, shift, value, basis, rng, score=None):
        """Draw a group from prior times cavity: shifts (S, b), precisions along a basis (b, k).

        What speaks for the group is `score` (S,), or all that the cavity says. A cavity of negative
        precision along a direction says nothing of it.
        """
        v = self.factor.slab_variance
        scale = 1.0 + v * np.maximum(value, 0.0)
        size, along = np.sqrt(v / scale), np.where(value > 0, shift @ basis, 0.0)
        if score is None:
            score = 0.5 * (np.sum((size * along) ** 2, axis=1) - np.log(scale).sum())
        on = _drawn_in(self.factor.logit + score[:, None], self.inclusion[index[:1]], rng)
        free = np.sqrt(v) * rng.standard_normal(shift.shape)
        moved = size**2 * along + (size / np.sqrt(v) - 1.0) * (free @ basis)
        return np.where(on, free + moved @ basis.T, 0.0)


def _drawn_in(log_odds, inclusion, rng):
    """Draw which columns are in by log odds (S, b); those of hardly any inclusion (b,) are out."""
    return (rng.uniform(size=log_odds.shape) < expit(log_odds)) & (inclusion > LEAST_INCLUSION)


def _blocks(model, factor, inclusion):
    """Columns that are drawn at once, in turn, until no more than rows are left."""
    most, blocks = len(model.X), list[np.ndarray]()
    if model.dense:
        return blocks
    on = factor.per_indicator(inclusion)
    size = factor.total(np.ones_like(inclusion))
    order = np.argsort(on, kind="stable")
    while size[order].sum() > most:
        wide, left = size[order] > most, np.cumsum(size[order])
        if wide[0]:
            n_now = 1
        else:
            total = np.cumsum((on * size)[order])
            few = np.searchsorted(total, SHARE * total[-1], side="right")
            enough = np.searchsorted(left, left[-1] - most) + 1
            n_now = np.clip(few, 1, min(enough, np.argmax(wide) if wide.any() else len(wide)))
        now, order = np.split(order, [int(n_now)])
        blocks.append(np.sort(factor.members(now)))
    return blocks
