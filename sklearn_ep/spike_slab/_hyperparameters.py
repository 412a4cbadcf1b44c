"""Hyperparameters of the spike-and-slab regressor: what is free, where it starts, how it moves.

They are h = (log noise, log slab variance, logit of the prior inclusion), in working units.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, log_expit, logit

__all__ = ["Space", "completed_curvature", "em_target", "energy_gradient"]

# Least noise, of the variance of y: the evidence of d > n may rise towards interpolation. Halved or
# doubled: no evidence changes on the sets of doc/benchmarks/spike_slab_constants.py.
NOISE_FLOOR = 1e-6
SLAB_RANGE = (1e-6, 1e3)  # of var(y) / mean square of X: a bound, not reached by any of those sets
# Prior inclusion of the dense start. Halved: no change, 1.1 times the sweeps. At .9: -.06 nats a
# set, .88.
DENSE = 0.5


@dataclass
class Space:
    """Which hyperparameters are free, their values and bounds."""

    value: np.ndarray
    free: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, model, total, noise=None, slab=None, inclusion=None):
        """Return the space of a problem whose y has variance one; None marks a free parameter."""
        d = model.X.shape[1]
        size = model.mean_square(total) or 1.0
        p = inclusion or min(0.5, max(1.0 / d, min(0.1 * total, 10.0) / d))
        edge = 0.1 / d if d > 1 else 0.01
        given = [noise, slab, None if inclusion is None else inclusion / (1 - inclusion)]
        start = [0.1, 1.0 / (p * d * size), p / (1 - p)]
        value = np.log([b if a is None else a for a, b in zip(given, start, strict=True)])
        low = [np.log(NOISE_FLOOR), np.log(SLAB_RANGE[0] / size), logit(edge)]
        high = [np.log(2.0), np.log(SLAB_RANGE[1] / size), logit(1 - edge)]
        free = np.array([a is None for a in given])
        return cls(value, free, np.array(low), np.array(high))

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


def _statistics(state):
    """Expected squared error, squared slab coefficients, included features and indicators."""
    q, factor, t = state.marginals, state.problem.factor, state.matched_tilted
    # one indicator a group: its members agree, so each counts its share
    share = factor.per_indicator(t.inclusion).sum()
    second = t.inclusion @ (t.slab_var + t.slab_mean**2)
    return q.squared_error + q.trace, second, t.inclusion.sum(), share


def energy_gradient(state, h):
    """Return the derivative of the energy in the hyperparameters at a fixed point."""
    squares, second, features, indicators = _statistics(state)
    p = state.problem
    noise = 0.5 * (p.n_rows - squares / p.noise)
    slab = 0.5 * (features - second / p.factor.slab_variance)
    expected = p.factor.n_indicators(len(state.mean)) * expit(h[2])
    return np.array([noise, slab, expected - indicators])


def em_target(state):
    """Return the maximiser of the expected log density of data and coefficients at a state."""
    squares, second, features, indicators = _statistics(state)
    p = state.problem
    share = (indicators + 1.0) / (p.factor.n_indicators(len(state.mean)) + 2.0)
    tiny = np.finfo(float).tiny
    noise = np.log(max(squares / max(p.n_rows, tiny), tiny))
    slab = np.log(max(second, tiny) / max(features, tiny))
    return np.array([noise, slab, logit(np.clip(share, tiny, 1 - 1e-16))])


def completed_curvature(state, h):
    """Return what EM divides the gradient by: the information of the completed data."""
    p = expit(h[2])
    m = state.problem.factor.n_indicators(len(state.mean))
    features = state.matched.inclusion.sum()
    return np.array([0.5 * state.problem.n_rows, 0.5 * features, m * p * (1 - p)])
