"""Fit with every factor large: sites of rows by messages, scales by the gradient of the evidence.

Means solve a sparse linear system, variances come from messages along rows, and the scales are a
root of the derivative of the log evidence, which costs nothing at a fixed point of the sites. Their
uncertainty is added to that of everything else by differences of fits at scales nearby.
"""

from typing import NamedTuple

import numpy as np

from ..._engine.loop import Reason, Trace, reason_to_end
from ..._engine.search import eigen_curvature
from ..._engine.sites import Sites
from ..._estimator.fitting import BinaryFit
from .messages_posterior import MessagesPosterior, ScaleUncertainty
from .monitor import PosteriorMonitor
from .row_messages import (
    RowState,
    cavity_variances,
    first_state,
    level_precisions,
    updated_sites,
)
from .schur import Effects, FactorRows, SchurSystem, pair_numbers

__all__ = ["fit_by_messages"]

_FIRST_TOL = 0.03  # of the sites, far from the scales
_SITES, _STEPS = 0.2, 0.3  # shares of tol that sites, and a step of the scales, have to meet
_NEAR = 10.0  # times tol: a step after which the coupling is looked at once more
_LONGEST = 0.7  # step of a log scale
_APART = 0.1  # log scales of the fits whose differences give their uncertainty
_LEAST_PASSES = 4  # of those fits
_MOST_PASSES = 30
_LEAST_CURVATURE = 0.3  # in units of the prior's


class Solved(NamedTuple):
    """Fixed point of the sites at one theta (F,), or what `n_passes` passes made of it.

    mean are `Effects`, system the `SchurSystem` of the last pass, precisions (L_f,) those of the
    levels by messages, mismatch the largest distance of tilted from current moments.
    """

    theta: np.ndarray
    state: RowState
    mean: Effects
    system: SchurSystem
    precisions: list[np.ndarray]
    mismatch: float


class Coupling(NamedTuple):
    """How effects go along with the coefficients: covariance (D, D), and C_f (L_f, D).

    An effect is C_f beta and something independent of beta.
    """

    cov: np.ndarray
    lines: list[np.ndarray]

    def variances(self, precisions):
        """Return the variances (L_f,) of the effects of each factor."""
        pairs = zip(precisions, self.lines, strict=True)
        return [1.0 / p + np.einsum("ld,de,le->l", c, self.cov, c) for p, c in pairs]


class MessagesModel:
    """Rows, priors, and what stays the same over all passes."""

    def __init__(self, plan, sign):
        self.rows = FactorRows(plan.X, sign, plan.weight, plan.codes, plan.n_levels)
        self.beta_precision = plan.beta_sd**-2.0
        self.theta_mean, self.theta_sd = plan.theta_mean, plan.theta_sd
        self.levels = np.array(plan.n_levels, dtype=float)
        self.big = int(np.argmax(self.levels))
        self.pairs = pair_numbers(self.rows, self.big)
        self.solved_all = True

    def prior(self, theta):
        """Return the prior precisions as `Effects`."""
        levels = [
            np.full(int(n), np.exp(-2.0 * t)) for n, t in zip(self.levels, theta, strict=True)
        ]
        return Effects(self.beta_precision, levels)

    def solve(self, theta, state, mean, tol, least=1):
        """Run passes until sites are within tol and return `Solved`."""
        prior, rows, n_passes, worst = self.prior(theta), self.rows, 0, np.inf
        while n_passes < least or (worst >= tol and n_passes < _MOST_PASSES):
            sites = state.sites
            cavity_var, messages = cavity_variances(rows, state, prior)
            precision = rows.weight * sites.precision
            system = SchurSystem(rows, self.big, self.pairs, precision, prior)
            mean = system.solve(rows.collect(rows.weight * sites.shift), mean)
            self.note(system)
            new, worst = updated_sites(rows, sites, rows.predictor(mean), cavity_var)
            state, n_passes = RowState(new, messages), n_passes + 1
        precisions = level_precisions(rows, state.messages, prior.levels)
        return Solved(theta, state, mean, system, precisions, worst)

    def note(self, system):
        """Keep whether all linear systems were solved."""
        self.solved_all &= system.converged

    def coupling(self, solved):
        """Return the `Coupling` by one solve for each dense column."""
        d = len(self.beta_precision)
        none = [np.zeros(int(n)) for n in self.levels]
        columns = [solved.system.solve(Effects(row, none)) for row in np.eye(d)]
        self.note(solved.system)
        cov = np.array([c.beta for c in columns]).reshape(d, d)
        cov = 0.5 * (cov + cov.T)
        inverse = np.linalg.inv(cov)
        cross = [np.column_stack([c.levels[f] for c in columns]) for f in range(len(self.levels))]
        return Coupling(cov, [a @ inverse for a in cross])

    def gradient(self, solved, coupling):
        """Return d log evidence / d theta (F,), prior included."""
        second = [
            np.sum(a**2 + v)
            for a, v in zip(solved.mean.levels, coupling.variances(solved.precisions), strict=True)
        ]
        out = np.array(second) * np.exp(-2.0 * solved.theta) - self.levels
        return out - (solved.theta - self.theta_mean) / self.theta_sd**2


def fit_by_messages(plan, sign, monitor, previous):
    """Return the `BinaryFit` of a `CrossedPlan` by messages along rows."""
    model = MessagesModel(plan, sign)
    n_named = [len(known) for known in plan.levels]

    def so_far(found):
        solved, coupling = found
        return _posterior(model, solved, coupling, None, n_named)

    watch, start = PosteriorMonitor(monitor, so_far), _start(model, previous)
    search = find_scales(model, start, plan.tol, plan.max_iter, watch)
    solved, coupling = search.solved, search.coupling
    known, spread = plan.theta == "mode", None
    if not known:
        spread = _uncertainty(model, solved, coupling, 0.1 * _SITES * plan.tol)
    posterior = _posterior(model, solved, coupling, spread, n_named)
    reason, remark = search.reason, ""
    if not model.solved_all:
        reason, remark = "stuck", "a linear system was not solved in 200 steps"
    sites = solved.state.sites
    state = dict(theta=solved.theta, row_precision=sites.precision, row_shift=sites.shift)
    more = dict(theta_rule="mode" if known else "gaussian", state=state, complete=True)
    return BinaryFit(posterior, search.trace.history, reason, np.nan, more, remark)


class ScaleSearch(NamedTuple):
    """Where the gradient in the scales vanishes, history of the search, and why it ended."""

    solved: Solved
    coupling: Coupling
    trace: Trace
    reason: Reason


def find_scales(model, start, tol, max_iter, monitor):
    """Return the `ScaleSearch` by Broyden's method on the gradient of the log evidence.

    start is (theta, `RowState`). The fixed point tau^2 = mean(a^2 + v) has the same root and crawls
    to it. Sites are tightened as the steps in theta get shorter; how effects go along with the
    coefficients is looked at first, and again near the end.
    """
    trace, fine = Trace(monitor), _SITES * tol
    (theta, state), mean, last = start, None, None
    inverse, step = np.diag(1.0 / model.levels), np.full(len(theta), np.inf)
    looks, site_tol = 0, max(_FIRST_TOL, fine)
    while True:
        trace.begin()
        solved = model.solve(theta, state, mean, site_tol)
        state, mean = solved.state, solved.mean
        if looks == 0 or (looks == 1 and np.max(np.abs(step)) < _NEAR * tol):
            coupling, looks = model.coupling(solved), looks + 1
        gradient = model.gradient(solved, coupling)
        if last is not None:
            inverse = _broyden(inverse, step, last - gradient)
        last, step = gradient, inverse @ gradient
        far = float(np.max(np.abs(step)))
        step = step / max(1.0, far / _LONGEST)
        trace.end({"residual": max(far, solved.mismatch)}, (solved, coupling))
        below = far < _STEPS * tol and solved.mismatch < fine
        reason = reason_to_end(trace, below, True, False, max_iter)
        if reason is not None:
            return ScaleSearch(solved, coupling, trace, reason)
        site_tol, theta = float(np.clip(0.1 * far, fine, site_tol)), theta + step


def _start(model, previous):
    """Return (theta, `RowState`) of an earlier fit where they suit this one."""
    theta, sites = model.theta_mean, None
    if previous is not None and np.shape(previous.get("theta")) == theta.shape:
        theta, n = previous["theta"], len(model.rows.sign)
        if np.shape(previous.get("row_precision")) == (n,):
            sites = Sites(previous["row_precision"], previous["row_shift"])
    return theta, first_state(model.rows, sites)


def _broyden(inverse, step, lost):
    """Return the inverse derivative of the negative gradient after a step and what it lost."""
    moved = inverse @ lost
    scale = step @ moved
    if abs(scale) < 1e-12 * np.linalg.norm(step) * np.linalg.norm(moved) or scale == 0:
        return inverse
    return inverse + np.outer(step - moved, step @ inverse) / scale


def _uncertainty(model, solved, coupling, tol):
    """Return the `ScaleUncertainty` by a fit at each log scale moved a little."""
    moves, gradient = [], model.gradient(solved, coupling)
    curvature = np.empty((len(solved.theta), len(solved.theta)))
    for f in range(len(solved.theta)):
        theta = solved.theta + _APART * (np.arange(len(solved.theta)) == f)
        near = model.solve(theta, solved.state, solved.mean, tol, least=_LEAST_PASSES)
        curvature[f] = (gradient - model.gradient(near, coupling)) / _APART
        change = near.mean.plus(solved.mean, -1.0)
        moves.append(Effects(change.beta / _APART, [a / _APART for a in change.levels]))
    least = _LEAST_CURVATURE / np.max(model.theta_sd) ** 2
    values, vectors = eigen_curvature(curvature, least)
    return ScaleUncertainty((vectors / values) @ vectors.T, moves)


def _posterior(model, solved, coupling, spread, n_named):
    """Return the `MessagesPosterior`; without spread the scales count as known."""
    if spread is None:
        f = len(solved.theta)
        none = Effects(0.0 * solved.mean.beta, [0.0 * a for a in solved.mean.levels])
        spread = ScaleUncertainty(np.zeros((f, f)), [none] * f)
    return MessagesPosterior(
        solved.theta,
        solved.mean,
        [1.0 / p for p in solved.precisions],
        coupling.cov,
        coupling.lines,
        spread,
        solved.system,
        n_named,
    )
