"""The EP energy of a Gaussian likelihood with one non-Gaussian prior factor a coefficient.

At any sites with a proper posterior Q,

    G = E_Q[-log likelihood] + (sum log z + log|A|) / 2 + sum K,

K being the smallest divergence from the prior of a density with the mean and variance of Q. The
three parts are bounded below whatever the signs of the sites; stationary points of G are the fixed
points of EP, and there G = -log evidence.

Its monotone descent takes Newton steps with a Levenberg parameter. The Hessian of the energy in the
moments is F^-1 + Fh^-1 - Fs^-1, with F the covariance of (w, -w^2/2) under the Gaussian Q, Fh that
of the tilted distributions and Fs that of the marginals of Q. Coordinates whose inclusion is
undecided or whose gradient is large are stepped jointly, the others by their own 2 x 2 blocks,
which is the step of regular EP. A Levenberg parameter alpha leads from the Newton step (0) to the
natural gradient (infinity), a descent direction at any sites.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import lapack

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior, checked_cholesky, cholesky_solve
from .._engine.loop import SILENT, Anderson, Evaluation, Result, Trace, iterate, reason_to_end
from .._engine.schedule import JointMarginals, towards

# Both in slab precisions; halved or doubled they change evidences by less than 1e-9.
SMALLEST_SITE = 1e-8  # the least site of regular EP, which allows no sign
LOW_SITE = 1e-2  # sites below enter the posterior by its second step
# Largest variance of a column, in slab variances: one plus slab variance times precision of the
# cavity that matches it is the inverse, of which four digits are left. A fit of 74 rows with three
# of one class reached 4e31, and divided by zero.
_LARGEST_VARIANCE = 1e12


@dataclass
class EPEnergy:
    """A `LinearModel`, a prior factor and a noise variance; `at` evaluates sites.

    The likelihood has `n_rows` rows: the total weight, less one for a flat intercept. `constant` is
    added to the energy, for data in other units than those of the user.
    """

    model: Any
    factor: Any
    noise: float
    n_rows: float
    constant: float = 0.0

    def at(self, sites):
        """Evaluate site shifts and precisions (2, d); ImproperPosterior where none is proper."""
        low = LOW_SITE / self.factor.slab_variance
        marginals = self.model.marginals(sites[1], sites[0], self.noise, low)
        if not np.all(marginals.var <= _LARGEST_VARIANCE * self.factor.slab_variance):
            raise ImproperPosterior("a column has no posterior to double precision")
        return EnergyState(self, sites, marginals)

    def with_parameters(self, h):
        """Return the same data at hyperparameters h: log noise, log slab variance, logit."""
        factor = self.factor.with_parameters(np.exp(h[1]), h[2])
        return replace(self, noise=np.exp(h[0]), factor=factor)


class EnergyState:
    """Sites with all that EP and the descent of its energy want to know; parts made on demand."""

    def __init__(self, problem, sites, marginals):
        self.problem, self.sites, self.marginals = problem, sites, marginals
        self.mean, self.var = marginals.mean, marginals.var

    def at_rest(self):
        """Return the state with its figures, but without vectors that can be made again."""
        state = EnergyState(self.problem, self.sites, self.marginals)
        state.energy, state.residual = self.energy, self.residual
        return state

    @cached_property
    def matched(self):
        """Cavities whose tilted distributions have the mean and variance of Q."""
        return self.problem.factor.matched(self.mean, self.var, self.tilted.inclusion)

    @cached_property
    def energy(self):
        """Value of G, finite at any proper posterior."""
        p, q = self.problem, self.marginals
        fit = p.constant + 0.5 * p.n_rows * np.log(2 * np.pi * p.noise)
        fit += 0.5 * (q.squared_error + q.trace) / p.noise
        return float(fit + 0.5 * (np.log(self.var).sum() + q.log_det) + self.matched.kl.sum())

    @property
    def log_evidence(self):
        """EP approximation of log p(y)."""
        return -self.energy

    @property
    def evidence_gradient(self):
        """Derivative (3,) of the log evidence in the hyperparameters at a fixed point."""
        p, q = self.problem, self.marginals
        noise = 0.5 * ((q.squared_error + q.trace) / p.noise - p.n_rows)
        return np.append(noise, p.factor.slopes(self.matched_tilted))

    @property
    def slab_statistics(self):
        """What hyperparameters are learned from, by the tilted distributions.

        Expected squared error, squared slab coefficients, included features and indicators.
        """
        q, t = self.marginals, self.matched_tilted
        # one indicator a group: its members agree, so each counts its share
        indicators = self.problem.factor.per_indicator(t.inclusion).sum()
        second = t.inclusion @ (t.slab_var + t.slab_mean**2)
        return q.squared_error + q.trace, second, t.inclusion.sum(), indicators

    @cached_property
    def gradient(self):
        """Derivative of G in the moments (mean, -second moment / 2), shape (2, d)."""
        c = self.matched
        linear = self.sites[0] + c.shift - self.mean / self.var
        return np.array([linear, self.sites[1] + c.precision - 1.0 / self.var])

    @cached_property
    def cavity(self):
        """Shift and precision of Q without each site, shape (2, d)."""
        return np.array([self.mean / self.var, 1.0 / self.var]) - self.sites

    @cached_property
    def tilted(self):
        """Tilted moments at the cavity; an improper one is flattened to the last proper one."""
        return tilted_at(self.problem.factor, self.cavity)

    @cached_property
    def matched_tilted(self):
        """Tilted moments at the matched cavities: the mean and variance are those of Q."""
        return self.problem.factor.tilted(self.matched.shift, self.matched.precision)

    @cached_property
    def residual(self):
        """Largest move of mean or sd under an undamped sweep, in slab standard deviations.

        An improper cavity has no undamped update: the residual is then at least 1.
        """
        factor, tilted = self.problem.factor, self.tilted
        sd = np.abs(np.sqrt(tilted.var) - np.sqrt(self.var))
        move = np.maximum(np.abs(tilted.mean - self.mean), sd)
        largest = float(move.max() / np.sqrt(factor.slab_variance))
        return largest if factor.proper(self.cavity[1]).all() else max(largest, 1.0)

    @property
    def record(self):
        """Figures for the history."""
        return {"residual": self.residual, "objective": self.energy}

    @cached_property
    def target(self):
        """Undamped sites of regular EP, see `positive_sites`."""
        return positive_sites(self.problem.factor, self.cavity)


def positive_sites(factor, cavity):
    """Undamped sites of regular EP at cavities (2, d): positive, means matched where that binds."""
    eps = SMALLEST_SITE / factor.slab_variance
    precision = np.maximum(cavity[1], eps)
    t = factor.tilted(cavity[0], precision)
    site = np.maximum(1.0 / t.var - precision, eps)
    return np.array([t.mean * (site + precision) - cavity[0], site])


def tilted_at(factor, cavity):
    """Tilted moments at cavities (2, d); improper ones are flattened to the last proper one."""
    least = (SMALLEST_SITE - 1.0) / factor.slab_variance
    return factor.tilted(cavity[0], np.maximum(cavity[1], least))


def signed_sites(factor, tilted, cavity, sites):
    """Undamped sites of EP of any sign at cavities (2, d); those whose cavity is improper stay."""
    target = np.array([tilted.mean / tilted.var, 1.0 / tilted.var]) - cavity
    return np.where(factor.proper(cavity[1]), target, sites)


def swept_in_turn(state, damping):
    """Return the sites after each has taken a share of its update, one after another.

    Joint covariances are those of at most as many columns as there are rows, after which the
    posterior is found anew. O(n d^2), or O(d^3) for no more columns than rows.
    """
    problem, d, sites = state.problem, len(state.mean), state.sites
    size = max(len(problem.model.X), 1)

    def updated(i, site, mean, var):
        cavity = np.array([mean / var, 1.0 / var]) - site
        return positive_sites(problem.factor, cavity[:, None])[:, 0]

    for first in range(0, d, size):
        index = np.arange(first, min(first + size, d))
        state = problem.at(sites) if first else state
        joint = JointMarginals(state.mean[index], state.marginals.block(index))
        sites = sites.copy()
        sites[:, index] = joint.swept(sites[:, index], updated, lambda i, s: s[::-1], damping)
    return sites


def regular_ep(
    problem, sites, *, max_iter, tol, damping, monitor=SILENT, energies=True, signed=False,
    in_turn=False,
):  # fmt: skip
    """Run EP with positive sites; return the loop's Result, its payload the last state.

    All sites change together, or one after another where they go `in_turn`. Where the fixed point
    wants a negative site the iteration ends elsewhere: the residual, which knows no bound on the
    sites, then stays large. Only next to a fixed point `signed` sites are safe, and acceleration.
    Without `energies`, which cost half a sweep each, none is recorded.
    """
    require("factor", problem.factor, ["tilted", "proper"], "expectation propagation")

    def evaluate(x):
        state = problem.at(x)
        record = {"objective": state.energy} if energies else {}
        if in_turn:
            target = towards(x, swept_in_turn(state, damping), damping)
        elif signed:
            target = signed_sites(problem.factor, state.tilted, state.cavity, x)
        else:
            target = state.target
        return Evaluation(target, state.residual, record=record, payload=state)

    acceleration = Anderson(mixing=damping) if signed else None
    steps = dict(damping=damping, acceleration=acceleration, monitor=monitor)
    return iterate(evaluate, sites, max_iter=max_iter, tol=tol, **steps)


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


def gaussian_fisher(state, index):
    """Covariance (2 k, 2 k) of (w, -w^2/2) of some coefficients under Q."""
    cov, mean = state.marginals.block(index), state.mean[index]
    cross = -cov * mean
    return np.block([[cov, cross], [cross.T, cov * (0.5 * cov + np.outer(mean, mean))]])


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
    return np.array([top + m * low, low])


@dataclass
class Descent:
    """One state after another, each of no larger energy.

    At most `max_block` coordinates are stepped jointly, O(max_block^3) besides a sweep. Larger
    blocks cost more than they save: far from the end their Newton steps are mostly rejected.
    """

    max_block: int
    alpha: float = 0.0

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
        m, v = state.mean[index][:, None], state.var[index][:, None]
        marginal = v, -m * v, v * (0.5 * v + m * m)
        joint, fisher = factor.fisher_block(tilted, index), gaussian_fisher(state, index)
        part = self._joint_step(joint, fisher, marginal, np.concatenate(g[:, index]))
        if part is None:
            return None
        move[:, index] = part.reshape(2, -1)
        return move

    def _separate_step(self, factor, tilted, marginal, g):
        """-(alpha Fh + Fs)^-1 Fh g, by blocks and one rank for each indicator."""
        (b11, b12, b22), e, c = factor.fisher_parts(tilted)

        def along(x):
            return c * factor.spread(factor.total(e[0] * x[0] + e[1] * x[1]))

        def inverse(x):
            slab = tilted.slab_mean, tilted.slab_var
            return _solve_separate(self.alpha * tilted.inclusion, slab, marginal, x)

        own = np.array([b11 * g[0] + b12 * g[1], b12 * g[0] + b22 * g[1]])
        image = inverse(own + e * along(g))
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
            new = state.problem.at(state.sites + move)
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
