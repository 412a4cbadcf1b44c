"""The spike-and-slab prior as an EP factor on each coefficient.

A coefficient is zero with probability 1 - p and N(0, v) with probability p. Its cavity is
exp(c1 w - c2 w^2 / 2) with c2 > -1/v: a cavity of negative precision is legal as long as its
product with the slab can be normalised. Features of one group share one inclusion indicator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, log_expit, logit

MAX_NEWTON = 200  # bisection alone halves any bracket to rounding in fewer


class TiltedSpikeSlab(NamedTuple):
    """Moments of prior times cavity, one entry a feature; ``log_z`` one entry an indicator."""

    mean: np.ndarray
    var: np.ndarray
    inclusion: np.ndarray
    slab_mean: np.ndarray
    slab_var: np.ndarray
    log_z: np.ndarray


class MatchedCavity(NamedTuple):
    """The cavity whose tilted moments are given; ``kl`` has one entry an indicator.

    That is the smallest divergence from the prior of any density with these moments.
    """

    shift: np.ndarray
    precision: np.ndarray
    inclusion: np.ndarray
    kl: np.ndarray


class SpikeSlab:
    """Spike-and-slab factor with slab variance ``slab_variance`` and logit inclusion ``logit``.

    ``groups`` gives the number of each feature's indicator (0, 1, ...); None: one each.
    """

    def __init__(self, slab_variance: float, logit: float, groups: np.ndarray | None = None):
        self.slab_variance = float(slab_variance)
        self.logit = float(logit)
        self.groups = groups

    def with_parameters(self, slab_variance: float, logit: float) -> SpikeSlab:
        """Return the factor of the same groups with other parameters."""
        return SpikeSlab(slab_variance, logit, self.groups)

    @property
    def precision(self) -> float:
        """That of a coefficient a priori."""
        return float(1.0 / (expit(self.logit) * self.slab_variance))

    def total(self, x: np.ndarray) -> np.ndarray:
        """Return the sum over the features of each indicator."""
        return x if self.groups is None else np.bincount(self.groups, x)

    def spread(self, x: np.ndarray) -> np.ndarray:
        """Return the value of each feature's indicator."""
        return x if self.groups is None else x[self.groups]

    def members(self, indicators: np.ndarray) -> np.ndarray:
        """Return the features that some indicators switch on."""
        if self.groups is None:
            return indicators
        return np.flatnonzero(np.isin(self.groups, indicators))

    def n_indicators(self, n_features: int) -> int:
        """Return the number of indicators."""
        return n_features if self.groups is None else int(self.groups.max()) + 1

    def per_indicator(self, inclusion: np.ndarray) -> np.ndarray:
        """Return the inclusion probability of each indicator from that of each feature."""
        if self.groups is None:
            return inclusion
        return self.total(inclusion) / np.bincount(self.groups)

    def proper(self, precision: np.ndarray) -> np.ndarray:
        """Say which cavity precisions leave a normalisable product with the slab."""
        return 1.0 + self.slab_variance * precision > 0

    def log_density(self, w: np.ndarray) -> np.ndarray:
        """Log density (S,) of coefficients (S, d) with indicators of their own."""
        normal = -0.5 * (w * w / self.slab_variance + np.log(2 * np.pi * self.slab_variance))
        on = log_expit(self.logit) + normal
        return np.where(w != 0, on, log_expit(-self.logit)).sum(axis=1)

    def tilted(self, shift: np.ndarray, precision: np.ndarray) -> TiltedSpikeSlab:
        """Moments of the prior times the cavity; free of 1 / precision, so zero is harmless."""
        scale = 1.0 + self.slab_variance * precision
        slab_var = self.slab_variance / scale
        slab_mean = slab_var * shift
        score = self.total(0.5 * (shift * slab_mean - np.log(scale)))
        r = self.logit + score
        on, off = self.spread(expit(r)), self.spread(expit(-r))
        mean, var = on * slab_mean, on * (slab_var + off * slab_mean**2)
        log_z = log_expit(-self.logit) - log_expit(-r)
        return TiltedSpikeSlab(mean, var, on, slab_mean, slab_var, log_z)

    def slopes(self, t: TiltedSpikeSlab) -> np.ndarray:
        """Return the derivatives (2,) of EP's log evidence in log slab variance and logit."""
        second = t.inclusion @ (t.slab_var + t.slab_mean**2) / self.slab_variance
        on = self.per_indicator(t.inclusion)
        slab, inclusion = 0.5 * (second - t.inclusion.sum()), len(on) * expit(self.logit)
        return np.array([slab, on.sum() - inclusion])

    def matched(
        self, mean: np.ndarray, var: np.ndarray, inclusion: np.ndarray | float = np.nan
    ) -> MatchedCavity:
        """Inverse of ``tilted``: the unique cavity with tilted moments ``mean`` and ``var``.

        It is near where the `inclusion` of each feature, if any, is about that of the cavity.

        One increasing equation in the inclusion probability of each indicator. It is solved in
        u with rho = low + (1 - low) sigmoid(u), where low is the largest mean^2 / E w^2 of the
        indicator: neither rho - low nor 1 - rho then suffers from cancellation.
        """
        return _InverseMap(self, mean, var).solve(inclusion)

    def fisher_parts(
        self, t: TiltedSpikeSlab
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
        """Return (blocks, e, c): the joint covariance of (w, -w^2/2) is blocks + sum c e e'.

        The blocks, entries 11, 12, 22 for each feature, are the part of the slab; the sum over the
        indicators is that of not knowing them, e having shape (2, d) and c one entry a feature.
        """
        on, mu, s = t.inclusion, t.slab_mean, t.slab_var
        blocks = (on * s, -on * s * mu, on * s * (0.5 * s + mu * mu))
        return blocks, np.stack([mu, -0.5 * (s + mu * mu)]), on * (1 - on)

    def fisher_block(self, t: TiltedSpikeSlab, index: np.ndarray) -> np.ndarray:
        """Joint covariance of (w, -w^2/2) of some features; groups couple their members."""
        blocks, e, c = self.fisher_parts(t)
        k, e, c = len(index), e[:, index], c[index]
        own = np.arange(k) if self.groups is None else self.groups[index]
        full, each = np.zeros((2, k, 2, k)), np.arange(k)
        b11, b12, b22 = (b[index] for b in blocks)
        full[:, each, :, each] = np.transpose([[b11, b12], [b12, b22]])
        full += (c * e)[:, :, None, None] * (own[:, None] == own)[:, None] * e
        return full.reshape(2 * k, 2 * k)


class _InverseMap:
    """The equation h(u) = 0 of every indicator and its solution by safeguarded Newton."""

    def __init__(self, factor: SpikeSlab, mean: np.ndarray, var: np.ndarray):
        self.factor, self.mean, self.var = factor, mean, var
        self.second = var + mean * mean
        self.ratio = self.second / var
        share = mean * mean / self.second
        lead: Any = slice(None)
        if factor.groups is not None:  # the feature of largest share in each group
            order = np.lexsort((share, factor.groups))
            lead = order[np.r_[np.flatnonzero(np.diff(factor.groups[order])), len(order) - 1]]
        self.lead, self.low, self.room = lead, share[lead], (var / self.second)[lead]
        self.log_room = np.log(self.room)
        self.excess = (factor.spread(self.low) - share) * self.ratio
        self.size = factor.total(np.ones_like(var))
        self.half = 0.5 * mean * mean / var
        self.strength = factor.total(self.half)
        log_scale = 0.5 * (np.log(factor.slab_variance) - np.log(var))
        self.base = factor.total(log_scale) - self.log_room - factor.logit

    def _value(self, u: np.ndarray, pick: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return h and its derivative at some of the indicators; `pick` selects them."""
        # one exponential and one logarithm serve all sigmoids
        small = np.exp(-np.abs(u))
        on = np.where(u > 0, 1.0, small) / (1.0 + small)
        off = np.where(u > 0, small, 1.0) / (1.0 + small)
        rest = np.maximum(u, 0.0) + np.log1p(small)  # -log sigmoid(-u)
        total, taken = self.factor.total, self.room[pick] * on
        rho, more = self.low[pick] + taken, 1.0 + self.size[pick]
        # (E w^2 rho - mean^2) / var of every feature, written without the cancellation
        own = self.factor.spread(taken) * self.ratio[pick]
        gap = self.excess[pick] + own
        pull = self.half[pick] / gap
        h = more * np.log(rho) + rest + self.base[pick] - total(0.5 * np.log(gap) + pull)
        return h, on + off * (more * taken / rho + total((pull - 0.5) * own / gap))

    def solve(self, inclusion: np.ndarray | float) -> MatchedCavity:
        """Return the `MatchedCavity`, from where the inclusion of each feature has these odds."""
        k, base = self.strength, self.base
        # bounds of the root, which must grow with the signal: fixed ones are passed in practice
        low = -2 * (np.abs(base) + np.log1p(k) + 60)
        high = k + np.abs(base) + 50 + np.maximum(k - base, 0)
        on = np.broadcast_to(inclusion, self.mean.shape)[self.lead]
        u = logit((on - self.low) / self.room)  # 4.2 evaluations in place of 5.4
        u = np.where(np.isfinite(u), u, np.where(k > base, k - base, (k - base) / 1.5))
        todo: Any = slice(None)
        for _ in range(MAX_NEWTON):
            now = u[todo]
            # far left of the root h may be -inf: its sign is right and the step is bisected
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                h, slope = self._value(now, todo)
                new = now - h / slope
            right = h > 0
            high[todo] = np.where(right, now, high[todo])
            low[todo] = np.where(right, low[todo], now)
            inside = (new >= low[todo]) & (new <= high[todo])
            if not inside.all():
                new = np.where(inside, new, 0.5 * (low[todo] + high[todo]))
            # the error after a Newton step is about the square of the step, and a bisection is as
            # long as the bracket that is left, for `now` is one of its ends
            left = np.abs(new - now) > 3e-8 + 1e-12 * np.abs(new)
            u[todo] = new
            if not left.any():
                break
            # a gather costs as much as an evaluation: not before half of them have converged
            if self.factor.groups is None and 2 * np.count_nonzero(left) < len(left):
                todo = np.arange(len(u))[todo][left]
        return self._cavity(u)

    def _cavity(self, u: np.ndarray) -> MatchedCavity:
        factor = self.factor
        taken = self.room * expit(u)
        on = factor.spread(self.low + taken)
        t = self.excess * self.var + factor.spread(taken) * self.second
        shift, precision = self.mean * on / t, on * on / t - 1.0 / factor.slab_variance
        log_z = log_expit(-factor.logit) - self.log_room - log_expit(-u)
        kl = factor.total(shift * self.mean - 0.5 * precision * self.second) - log_z
        return MatchedCavity(shift, precision, np.minimum(on, 1.0), kl)  # rounding
