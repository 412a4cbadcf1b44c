"""The published convergent EP: a double loop on the saddle of the EP energy, for reference.

Hernandez-Lobato and Hernandez-Lobato (2011). The inner loop maximises a concave function of the
sites at fixed marginals, the outer one moves the marginals to the moments of the maximum. Sites and
cavities are kept above a small positive precision, so that the energy is bounded below, by n/2
log(2 pi noise) - d/2 log 2; a site that wants to be negative rests on its bound, where the energy
is stationary under the constraint though no fixed point of EP is there.
"""

from typing import Any

import numpy as np

from .._engine.contracts import require
from .._engine.gaussian import add_to_diagonal, checked_cholesky, cholesky_solve
from .._engine.loop import SILENT, Anderson, Evaluation, iterate
from ._energy import ROUNDING, SMALLEST_SITE, gaussian_fisher

# Newton steps of one inner solve, four to eight as a rule.
NEWTON_STEPS = 40
_AT_BOUND = 1.0 + 1e-6  # times a bound, rounding left out: a site up to there rests on it


class _Saddle:
    """Energy as a function of the sites at fixed natural parameters of the marginals."""

    def __init__(self, problem):
        self.problem = problem
        self.least = SMALLEST_SITE / problem.factor.slab_variance

    def value(self, sites, marginal):
        """Return (energy, gradient, state, tilted); the cavity is `marginal` less `sites`."""
        p = self.problem
        state = p.at(sites)
        q, t = state.marginals, p.factor.tilted(*(marginal - sites))
        data = 0.5 * p.n_rows * np.log(2 * np.pi * p.noise) + 0.5 * q.data_term / p.noise
        own = 0.5 * np.sum(marginal[0] ** 2 / marginal[1] - np.log(marginal[1]))
        energy = p.constant + data - 0.5 * sites[0] @ q.mean + 0.5 * q.log_det - t.log_z.sum() + own
        gap = q.var + q.mean**2 - t.var - t.mean**2
        return energy, np.stack([t.mean - q.mean, 0.5 * gap]), state, t

    def free(self, sites, gradient, marginal):
        """Return which site parameters (2, d) are not held by their bounds."""
        low = (sites[1] <= _AT_BOUND * self.least) & (gradient[1] < 0)
        high = (marginal[1] - sites[1] <= _AT_BOUND * self.least) & (gradient[1] > 0)
        return np.stack([np.ones_like(low), ~(low | high)])

    def maximise(self, sites, marginal):
        """Solve the inner problem from `sites`, by projected Newton steps uphill."""
        sites = self._within_bounds(sites, marginal)
        energy, gradient, state, tilted = self.value(sites, marginal)
        for _ in range(NEWTON_STEPS):
            free = self.free(sites, gradient, marginal)
            moves = self._newton_step(gradient, free, state, tilted)
            if 0 <= np.sum(gradient * moves[0]) < ROUNDING * (1 + abs(energy)):
                break
            for new in self._candidates(sites, moves, marginal):
                found = self.value(new, marginal)
                rise = np.sum(gradient * (new - sites))
                enough = energy + 1e-4 * rise - ROUNDING * (1 + abs(energy))
                if rise >= 0 and found[0] >= enough:
                    break
            else:
                break
            sites, (energy, gradient, state, tilted) = new, found
        return sites

    def _within_bounds(self, sites, marginal):
        return np.stack([sites[0], np.clip(sites[1], self.least, marginal[1] - self.least)])

    def _candidates(self, sites, moves, marginal):
        """Yield sites to try: shares of the Newton step bent at the bounds, then of the gradient.

        The first fixes many bounds at once but may lead downhill, the other never does.
        """
        for move, n_shares in zip(moves, (8, 30), strict=True):
            for share in 0.5 ** np.arange(n_shares):
                yield self._within_bounds(sites + share * move, marginal)

    def _newton_step(self, gradient, free, state, tilted):
        """Return the steps by the sum of both Fisher matrices and by its diagonal.

        Both are zero for parameters that are not free.
        """
        every = np.arange(len(state.mean))
        fisher = gaussian_fisher(state, every) + self.problem.factor.fisher_block(tilted, every)
        index, move = np.flatnonzero(free.ravel()), np.zeros(free.size)
        uphill = gradient * free / np.diagonal(fisher).reshape(2, -1)
        size = 1.0 / np.sqrt(np.diagonal(fisher)[index])
        part = size[:, None] * fisher[np.ix_(index, index)] * size
        add_to_diagonal(part, 1e-12)
        right = size * gradient.ravel()[index]
        move[index] = size * cholesky_solve(checked_cholesky(part), right)
        return move.reshape(2, -1), uphill


def double_loop(state, *, max_iter, tol, monitor=SILENT):
    """Run the double loop from a state with positive sites; return the loop's kind of Result.

    `max_iter` counts outer steps. The residual is that of the constrained problem, in slab standard
    deviations: what an outer step moves, and the mismatch of means and, where no bound is active,
    of second moments. Every step lowers the energy by at least "fall", its guarantee: accelerated
    steps that lower it by less are replaced by the published one. As the energy is bounded below,
    the smallest of the first T falls is at most the height above the bound over T.
    """
    require("factor", state.problem.factor, ["tilted", "fisher_block"], "the double loop")
    saddle = _Saddle(state.problem)
    sites, unit = state.sites, 1.0 / np.sqrt(state.problem.factor.slab_variance)

    def evaluate(x):
        nonlocal sites
        marginal = _natural(x, saddle)
        sites = saddle.maximise(sites, marginal)
        energy, gradient, at, tilted = saddle.value(sites, marginal)
        second = np.maximum(at.var + at.mean**2, tilted.var + tilted.mean**2)
        target = np.stack([at.mean, np.log(second - at.mean**2)])
        new = _natural(target, saddle)
        target[1] = -np.log(new[1])
        free = saddle.free(sites, gradient, marginal)
        spread = np.where(free[1], np.abs(np.sqrt(tilted.var) - np.sqrt(at.var)), 0.0)
        moved = np.abs(target[0] - x[0]), np.abs(np.exp(0.5 * target[1]) - np.exp(0.5 * x[1]))
        residual = unit * np.max([*moved, np.abs(tilted.mean - at.mean), spread])
        fall = _guaranteed_fall(marginal, new, at.mean, second)
        record = {"objective": energy, "fall": fall, "at_bound": float(np.sum(~free[1]))}
        return Evaluation(target, float(residual), record=record, payload=at)

    def accept(current, candidate):
        before = current.record["objective"]
        enough = before - current.record["fall"] + ROUNDING * (1 + abs(before))
        return candidate.record["objective"] <= enough

    start = np.stack([state.mean, np.log(state.var)])
    limits = dict(max_iter=max_iter, tol=tol, monitor=monitor, give_up_after=max_iter)
    steps: Any = dict(acceleration=Anderson(depth=8, mixing=1.0, max_change=3.0))
    result = iterate(evaluate, start, accept=accept, fallback_damping=1.0, **steps, **limits)
    result.x = result.evaluation.payload.sites
    return result


def _natural(x, saddle):
    """Natural parameters of marginals of means and log variances x, precisions above the bound."""
    precision = np.maximum(np.exp(-x[1]), 3 * saddle.least)
    return np.stack([x[0] * precision, precision])


def _guaranteed_fall(marginal, new, mean, second):
    """What the outer step takes off its linear majoriser of the energy at the least."""

    def majoriser(v):
        own = 0.5 * (v[0] ** 2 / v[1] - np.log(v[1]))
        return np.sum(own - mean * v[0] + 0.5 * second * v[1])

    return float(max(majoriser(marginal) - majoriser(new), 0.0))
