"""Monotone descent of the EP energy: Newton steps with a Levenberg parameter.

The Hessian of the energy in the moments is F^-1 + Fh^-1 - Fs^-1, with F the covariance of (w,
-w^2/2) under the Gaussian Q, Fh that of the tilted distributions and Fs that of the marginals of Q.
Coordinates whose inclusion is undecided or whose gradient is large are stepped jointly, the others
by their own 2 x 2 blocks, which is the step of regular EP. A Levenberg parameter alpha leads from
the Newton step (0) to the natural gradient (infinity), a descent direction at any sites.
"""

import numpy as np
from scipy.linalg import lapack

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior, checked_cholesky, cholesky_solve
from .._engine.loop import SILENT, Evaluation, Result, Trace, reason_to_end

__all__ = ["Descent", "descend"]

DESCENT_NEEDS = ("matched", "tilted", "fisher_parts", "fisher_block", "total", "spread")

# Halved or doubled, none of these changes an evidence of doc/benchmarks/spike_slab_constants.py, or
# the sweeps by more than the figure given.

# Inclusion variance plus scaled gradient from which a coordinate joins the block: 1 %.
UNDECIDED = 1e-3
# Levenberg parameter at which a step is lost in rounding: 0 %.
LARGEST_ALPHA = 1e8
STEP_SHARES = (1.0, 0.5)
# Rise of the energy that is rounding, relative to 1 + |G|: 0 %.
ROUNDING = 1e-11


def _apply(blocks, x):
    """Product of 2 x 2 symmetric blocks with vectors of shape (2, d)."""
    a, b, c = blocks
    return np.stack([a * x[0] + b * x[1], b * x[0] + c * x[1]])


def _solve_separate(share, slab, gaussian, x):
    """Product of (share * Fisher of slab + Fisher of gaussian)^-1 with vectors of shape (2, d).

    Both are pairs (mean, var), their Fisher matrices the covariances of (w, -w^2/2). In coordinates
    centred at the mean of the Gaussian the determinant is a sum of positive terms: a mean of many
    standard deviations cancels nothing.
    """
    (mu, s), (m, v) = slab, gaussian
    away = mu - m
    a = v + share * s
    b = -share * s * away
    spread = 0.5 * (v * v + share * s * s)
    c = spread + share * s * away * away
    det = a * spread + share * s * v * away * away
    y = x[1] + m * x[0]
    top, low = (c * x[0] - b * y) / det, (a * y - b * x[0]) / det
    return np.stack([top + m * low, low])


class Descent:
    """One state after another, each of no larger energy.

    At most `max_block` coordinates are stepped jointly, O(max_block^3) besides a sweep. Larger
    blocks cost more than they save: far from the end their Newton steps are mostly rejected.
    """

    def __init__(self, max_block=50):
        self.max_block = max_block
        self.alpha = 0.0

    def step(self, state):
        """Return (next state, True), or (the same state, False): it is stationary to rounding."""
        tries = 0
        index = self._undecided(state)
        while self.alpha < LARGEST_ALPHA:
            move = self._direction(state, index)
            # in a curved valley a shorter Newton step does better than one turned to the gradient
            for share in () if move is None else STEP_SHARES:
                new = self._accepted(state, share * move)
                if new is not None:
                    if tries == 0:
                        self.alpha = self.alpha / 4 if self.alpha > 0.01 else 0.0
                    return new, True
                tries += 1
            self.alpha = max(4 * self.alpha, 0.05)
            tries += 1
        self.alpha = 0.0
        return state, False

    def _undecided(self, state):
        on, g = state.matched.inclusion, state.gradient
        weight = on * (1 - on) + np.abs(g[1]) * state.var + np.abs(g[0]) * np.sqrt(state.var)
        factor = state.problem.factor
        weight = factor.spread(factor.total(weight))  # the members of a group join together
        index = np.flatnonzero(weight > UNDECIDED)
        if len(index) > self.max_block:
            index = np.sort(index[np.argsort(-weight[index], kind="stable")[: self.max_block]])
        return index

    def _direction(self, state, index):
        """Step of all sites, or None where the block system gives no descent."""
        factor, g, tilted = state.problem.factor, state.gradient, state.matched_tilted
        move = self._separate_step(factor, tilted, (state.mean, state.var), g)
        if not index.size:
            return move
        cov, mean = state.marginals.block(index), state.mean[index]
        cross = -cov * mean
        square = cov * (0.5 * cov + np.outer(mean, mean))
        fisher = np.block([[cov, cross], [cross.T, square]])
        m, v = mean[:, None], state.var[index][:, None]
        marginal = v, -m * v, v * (0.5 * v + m * m)
        joint = factor.fisher_block(tilted, index)
        part = self._joint_step(joint, fisher, marginal, np.concatenate(g[:, index]))
        if part is None:
            return None
        move[:, index] = part.reshape(2, -1)
        return move

    def _separate_step(self, factor, tilted, marginal, g):
        """-(alpha Fh + Fs)^-1 Fh g, by blocks and one rank for each indicator."""
        blocks, e, c = factor.fisher_parts(tilted)

        def along(x):
            return c * factor.spread(factor.total(e[0] * x[0] + e[1] * x[1]))

        def inverse(x):
            slab = tilted.slab_mean, tilted.slab_var
            return _solve_separate(self.alpha * tilted.inclusion, slab, marginal, x)

        image = inverse(_apply(blocks, g) + e * along(g))
        if self.alpha > 0:
            lift = inverse(e)
            image -= lift * (self.alpha * along(image) / (1.0 + self.alpha * along(lift)))
        return -image

    def _joint_step(self, joint, fisher, marginal, gap):
        """-[(1 + alpha) I + (joint^-1 - marginal^-1 / (1 + alpha)) fisher]^-1 gap, if downhill."""
        try:
            lower = checked_cholesky(joint)
        except ImproperPosterior:
            return None
        k = len(gap) // 2
        a, b, c = marginal
        det = 0.5 * a**3 * (1 + self.alpha)  # a c - b^2 of a Gaussian, without the cancellation
        top, low = fisher[:k], fisher[k:]
        system = cholesky_solve(lower, fisher)
        system -= np.concatenate([(c * top - b * low) / det, (a * low - b * top) / det])
        system[np.diag_indices(2 * k)] += 1 + self.alpha
        _, _, part, singular = lapack.dgesv(system, -gap)
        downhill = not singular and np.all(np.isfinite(part)) and gap @ (fisher @ part) < 0
        return part if downhill else None

    def _accepted(self, state, move):
        """The state after the step if its energy is low enough, else None."""
        try:
            new = state.problem.at(state.sites + move, state)
            if not (np.all(new.var > 0) and np.all(np.isfinite(new.mean))):
                return None
        except ImproperPosterior:
            return None
        second = new.var + new.mean**2 - state.var - state.mean**2
        predicted = state.gradient[0] @ (new.mean - state.mean) - 0.5 * state.gradient[1] @ second
        bound = state.energy + 1e-4 * min(predicted, 0.0) + ROUNDING * (1 + abs(state.energy))
        return new if new.energy <= bound else None


def descend(state, *, max_iter, tol, monitor=SILENT, max_block=50, least_gain=0.0):
    """Descend from a state until its residual is below `tol`; return the loop's kind of Result.

    The energy in the history never rises but by rounding. The descent is stuck where it cannot be
    lowered, or where three steps in a row lower it by less than `least_gain` each.
    """
    require("factor", state.problem.factor, DESCENT_NEEDS, "the descent")
    descent, trace, reason, idle = Descent(max_block), Trace(monitor), None, 0
    while reason is None:
        trace.begin()
        settled, moved = state.residual < tol, True
        if not settled:
            energy = state.energy
            state, moved = descent.step(state)
            idle = idle + 1 if energy - state.energy < least_gain else 0
        trace.end(state.record, state)
        below, stuck = state.residual < tol, not moved or idle == 3
        reason = reason_to_end(trace, below, settled, stuck, max_iter)
    evaluation = Evaluation(state.target, state.residual, record=state.record, payload=state)
    return Result(state.sites, evaluation, trace.n_iter, reason, trace.history)
