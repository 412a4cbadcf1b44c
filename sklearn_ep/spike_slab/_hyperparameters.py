"""Hyperparameters of the spike-and-slab regressor: what is free, where it starts, how it moves.

They are h = (log noise, log slab variance, logit of the prior inclusion), in working units. Nodes
of an average have coordinates phi (T,) for what is free, with the log of the ratio of slab variance
times mean square of X to the noise in the place of the slab variance.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import betaln, expit, log_expit, logit, logsumexp, softmax

# Least noise, of the variance of y: the evidence of d > n may rise towards interpolation. Halved or
# doubled: no evidence changes on the sets of doc/benchmarks/spike_slab_constants.py.
NOISE_FLOOR = 1e-6
SLAB_RANGE = (1e-6, 1e3)  # of var(y) / mean square of X: a bound, not reached by any of those sets
# Prior inclusion of the dense start. Halved: no change, 1.1 times the sweeps. At .9: -.06 nats a
# set, .88.
DENSE = 0.5

# Least and largest ratio r, and odds of the inclusion times d. The prior has a mass of .0006 and of
# at most .002 beyond, and the evidence is flat there or small.
RATIO_RANGE = (1e-3, 1e8)
LEAST_ODDS = 1e-3
_N_EXPECTED = 16  # expected numbers of columns, evenly in the log, that stand for all


@dataclass
class Space:
    """Which hyperparameters are free, their values and bounds; `size` is the mean square of X."""

    value: np.ndarray
    free: np.ndarray
    low: np.ndarray
    high: np.ndarray
    size: float

    @classmethod
    def of(cls, model, total, noise, slab, inclusion, unit=1.0):
        """Return the space of a problem whose y has variance one; a word marks a free parameter.

        Variances that are given are in so much smaller units.
        """
        X, free = model.X, np.array([isinstance(v, str) for v in (noise, slab, inclusion)])
        d = X.shape[1]
        size = np.einsum("ij,ij->", X, X) / (total * d) or 1.0  # for rows with repetition counted
        p = min(0.5, max(1.0 / d, min(0.1 * total, 10.0) / d)) if free[2] else inclusion
        edge = 0.1 / d if d > 1 else 0.01
        noise = 0.1 if free[0] else noise / unit
        slab = 1.0 / (p * d * size) if free[1] else slab / unit
        value = np.log([noise, slab, p / (1 - p)])
        low = [np.log(NOISE_FLOOR), np.log(SLAB_RANGE[0] / size), logit(edge)]
        high = [np.log(2.0), np.log(SLAB_RANGE[1] / size), logit(1 - edge)]
        return cls(value, free, np.array(low), np.array(high), size)

    def at_noise(self, fraction):
        """Return the start whose noise is this share of the variance of y."""
        h = self.value.copy()
        if self.free[0]:
            h[0] = np.log(fraction)
            if self.free[1]:
                h[1] += np.log1p(-fraction)
        return h

    def dense(self):
        """Return the space whose start expects the same signal from half of all features."""
        h = self.value.copy()
        h[2] = logit(DENSE)
        if self.free[1]:
            h[1] += log_expit(self.value[2]) - np.log(DENSE)
        return replace(self, value=h)

    def moved(self, h, target):
        """Take the free entries of the target, within their bounds."""
        return np.where(self.free, np.clip(target, self.low, self.high), h)

    def phi(self, h):
        """Return the coordinates phi (T,) at h."""
        return np.array([h[0], h[1] + np.log(self.size) - h[0], h[2]])[self.free]

    def h(self, phi):
        """Return h (3,) at phi."""
        h = self.value.copy()
        h[self.free] = phi
        if self.free[1]:
            h[1] += h[0] - np.log(self.size)
        return h

    def slope(self, gradient):
        """Return the derivative in phi from that in h."""
        noise, slab, inclusion = gradient
        if self.free[1]:
            noise = noise + slab  # the ratio is kept
        return np.array([noise, slab, inclusion])[self.free]

    def bounds(self, n_indicators):
        """Return the least and largest phi, shape (T, 2)."""
        odds = np.log(LEAST_ODDS / n_indicators)
        low = [self.low[0], np.log(RATIO_RANGE[0]), odds]
        high = [self.high[0], np.log(RATIO_RANGE[1]), -odds]
        return np.column_stack([low, high])[self.free]


@dataclass(frozen=True)
class HyperPrior:
    """Prior density of h: flat in the log noise, Beta(1, `misses`) for the inclusion.

    Where models are drawn it is instead one of some equally probable `inclusions` (N,).
    The ratio r of slab variance times mean square `size` of X to the noise has the density
    r^(a - 1) (1 + r)^(-a - b) / B(a, b) of `shape` (a, b); flat in its log for `size` None.
    (1, 1/2) is the hyper-g/n prior with a = 3 of Liang et al. (2008), of (1, 1) the shrinkage
    r / (1 + r) is uniform. Only what is free has a density; the inclusion's may stay as a constant.
    The default is for learning a mode: uniform for the inclusion, flat otherwise.
    """

    misses: float = 1.0
    size: float | None = None
    inclusion: bool = True
    shape: tuple[float, float] = (1.0, 0.5)
    inclusions: Any = None

    @classmethod
    def of_integral(cls, space, n_indicators):
        """Return the prior for integration, proper in all that the data may say nothing of.

        About the root of all indicators are expected to be in: with a uniform prior many tiny
        coefficients explain noise as well as none do, and what stands out drowns among them.
        """
        misses = max(1.0, np.sqrt(n_indicators))
        return cls(misses, space.size if space.free[1] else None, bool(space.free[2]))

    @classmethod
    def of_correlated(cls, space, d, n_independent):
        """Return the prior for d columns that are worth as many independent ones.

        The number that is expected to be in is log-uniform between one and those, and integrated:
        its median is their root, and copies of a column change nothing. Given it, columns are in
        independently of each other. Of 200 replicates on genotypes inclusions sum to 1.01 of the
        effects, to 1.06 with a Beta inclusion and a half-Cauchy root of r, at log losses of 13.2
        and 13.3 (`doc/benchmarks/fine_mapping.py`).
        """
        place = (np.arange(_N_EXPECTED) + 0.5) / _N_EXPECTED
        size = space.size if space.free[1] else None
        return cls(1.0, size, bool(space.free[2]), (1.0, 1.0), n_independent**place / d)

    def log_density_of_sizes(self, d):
        """Return the log probabilities (d + 1,) of a model of each number of columns."""
        k = np.arange(d + 1)
        if self.inclusions is None:
            return betaln(1.0 + k, self.misses + d - k) - betaln(1.0, self.misses)
        return logsumexp(self._log_density_of_models(k, d), axis=0) - np.log(len(self.inclusions))

    def _log_density_of_models(self, size, d):
        """Log probabilities (N, S) of a model of so many columns given each of the inclusions."""
        p = self.inclusions[:, None]
        return size * np.log(p) + (d - size) * np.log1p(-p)

    def inclusions_given(self, size, d, rng):
        """Return means and drawn logits (S,) of the inclusion, given how many columns are in."""
        share = softmax(self._log_density_of_models(size, d), axis=0)
        place = np.sum(np.cumsum(share, axis=0)[:-1] < rng.random(len(size)), axis=0)
        return self.inclusions @ share, logit(self.inclusions)[place]

    def _log_ratio(self, h):
        assert self.size is not None
        return h[1] + np.log(self.size) - h[0]

    def log_density(self, h):
        """Return the log density at h."""
        total = 0.0
        if self.inclusion:
            odds = log_expit(h[2]) + self.misses * log_expit(-h[2])
            total = float(odds + np.log(self.misses))
        return total + float(self.log_density_of_ratio(h[1] - h[0]))

    def log_density_of_ratio(self, log_ratio):
        """Return the log density of the log of slab variance to noise (...), zero where flat."""
        if self.size is None:
            return 0.0 * log_ratio
        (a, b), x = self.shape, log_ratio + np.log(self.size)
        return a * x - (a + b) * np.logaddexp(0.0, x) - betaln(a, b)

    def slope(self, h):
        """Return the derivative of the log density in h."""
        out = np.zeros(3)
        if self.inclusion:
            out[2] = 1 - (1 + self.misses) * expit(h[2])
        if self.size is not None:
            pull = self.shape[0] - sum(self.shape) * expit(self._log_ratio(h))
            out[0], out[1] = -pull, pull
        return out

    def counts(self, h):
        """Return what the prior of the ratio adds to the counts of rows and of features in EM."""
        if self.size is None:
            return 0.0, 0.0
        more = 2 * self.shape[1] - 2 * sum(self.shape) * expit(-self._log_ratio(h))
        return -more, more


def em_target(state, h, prior):
    """Return the maximiser of the expected log density of data, coefficients and h at a state.

    The pull of the prior on the ratio of slab to noise is taken at h.
    """
    squares, second, features, indicators = state.slab_statistics
    p = state.problem
    share = (indicators + 1.0) / (p.factor.n_indicators(len(state.mean)) + 1.0 + prior.misses)
    tiny = np.finfo(float).tiny
    rows, more = prior.counts(h)
    noise = np.log(max(squares / max(p.n_rows + rows, tiny), tiny))
    # where hardly a feature is in, the prior alone would send the slab to its bound in one step
    features += max(more, -0.5 * features)
    slab = np.log(max(second, tiny) / max(features, tiny))
    return np.array([noise, slab, logit(np.clip(share, tiny, 1 - 1e-16))])


def completed_curvature(state, h):
    """Return what EM divides the gradient by: the information of the completed data."""
    p = expit(h[2])
    m = state.problem.factor.n_indicators(len(state.mean))
    features = state.matched.inclusion.sum()
    return np.array([0.5 * state.problem.n_rows, 0.5 * features, m * p * (1 - p)])
