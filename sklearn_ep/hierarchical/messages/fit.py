"""Fit with every factor large: sites of rows by messages, scales by the gradient of the evidence.

Means solve a sparse linear system, variances come from messages along rows, and the scales are a
root of the derivative of the log evidence, which costs nothing at a fixed point of the sites. Their
uncertainty is added to that of everything else by differences of fits at scales nearby.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from joblib import parallel_config

from ..._engine import gaussian
from ..._engine.loop import Trace, reason_to_end
from ..._engine.partition import PartMap
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .._parts import parts_in_memory
from . import posterior as posteriors
from . import rows as steps
from .parts import LevelNumbers, LoggedRows
from .schur import Effects, SchurSystem, right_side

_SITES, _STEPS = 0.2, 0.3  # shares of tol that sites, and a step of the scales, have to meet
_NEAR = 10.0  # times tol: a short step, and what the scales may move until the next look
_PASS = 20  # steps of a solve that the rest of a pass takes as long as, on a million rows
# Levels p in the dense block of a pass: p^3 against rows times factors, where its Cholesky factor
# takes as long as 20 steps without it; InstEval, p 1142, needs 1 step in place of 25 to 56. Without
# nested factors 8 steps do: 1000 of 100,000 rows in the block then take twice as long.
_DENSE_WORK, _MOST_NESTED, _MOST_CROSSED = 1e4, 1500, 500


class Solved(NamedTuple):
    """Fixed point of the sites at one theta (F,), or what `n_passes` passes made of it.

    mean are `Effects`, system the `SchurSystem` of the last pass, tree the `Tree` of the levels by
    messages, root (D, D) is R with the covariance R'R of the dense columns, mismatch the largest
    distance of tilted from current moments.
    """

    theta: np.ndarray
    mean: Effects
    system: SchurSystem
    tree: steps.Tree
    root: np.ndarray
    mismatch: float


class MessagesModel:
    """Rows, priors, and what stays the same over all passes.

    shares (F,) are exact variances of effects over those by messages, 1 until they are known;
    n_steps is the work of all passes in steps of a solve.
    """

    def __init__(self, rows, plan):
        self.rows = rows
        self.beta_precision = plan.beta_sd**-2.0
        self.theta_prior = plan.theta_prior
        self.levels = np.array(plan.n_levels, dtype=float)
        self.power, self.chains = plan.settings.power, steps.find_chains(rows, plan.n_levels)
        self.shares = np.ones(len(plan.n_levels))
        self.solved_all, self.n_steps = True, 0
        most = _MOST_CROSSED if len(self.chains.leaves) == len(self.levels) else _MOST_NESTED
        self.most_dense = min(most, (_DENSE_WORK * plan.n_rows * len(self.levels)) ** (1 / 3))

    def prior(self, theta):
        """Return the prior precisions as `Effects`."""
        pairs = zip(self.levels, np.exp(-2.0 * theta), strict=True)
        return Effects(self.beta_precision, [np.full(int(n), value) for n, value in pairs])

    def tree(self, theta):
        """Return the `Tree` of the levels by the messages that rows now send."""
        return self.chains.walk(np.exp(2.0 * theta), self.rows.ask(steps.message_sums))

    def send(self, theta, tree):
        """Have rows send messages once and return the `Tree` after that."""
        self.rows.step(steps.send, self.chains.at_leaves(tree.whole))
        return self.tree(theta)

    def solve(self, theta, mean, tol, least=1, most=30):
        """Run passes until sites are within tol and return `Solved`."""
        tree, n_passes, worst = self.tree(theta), 0, np.inf
        while n_passes < least or (worst >= tol and n_passes < most):
            for _ in range(3):  # they go on from those of the last pass
                tree = self.send(theta, tree)
            solved = self.linearised(theta, tree, mean, self.most_dense)
            mean = solved.mean
            self.rows.step(steps.update, solved.root, mean, self.power)
            worst, n_passes = max(self.rows.each(steps.of_state, "mismatch")), n_passes + 1
        return solved._replace(mismatch=worst)

    def linearised(self, theta, tree, mean, most):
        """Return `Solved` for the sites as they are, without a mismatch.

        mean is a first guess; most of the levels may be in the dense block of the system.
        """
        rows = self.rows
        rows.step(steps.linearise, self.chains.at_leaves(tree.whole))
        precision = rows.ask(steps.known_precision)
        gaussian.add_to_diagonal(precision, self.beta_precision)
        lower = gaussian.checked_cholesky(0.5 * (precision + precision.T))
        root = gaussian.triangular_inverse(lower)
        system = SchurSystem(rows, int(np.argmax(self.levels)), self.prior(theta), most)
        mean = system.solve(rows.ask(right_side), mean)
        self.solved_all &= system.converged
        self.n_steps += _PASS + len(system.path.steps)
        return Solved(theta, mean, system, tree, root, np.inf)

    def settled(self, solved):
        """Return `Solved` for the sites that it has led to, one update ahead of its own."""
        tree = self.send(solved.theta, solved.tree)
        found = self.linearised(solved.theta, tree, solved.mean, _MOST_NESTED)
        return found._replace(mismatch=solved.mismatch)

    def coupling(self, solved):
        """Return the `Coupling` by the posterior's covariances with each dense column."""
        d, columns = len(self.beta_precision), solved.system.columns()
        self.solved_all &= solved.system.converged
        cov = np.array([c.beta for c in columns]).reshape(d, d)
        cov = 0.5 * (cov + cov.T)
        inverse = np.linalg.inv(cov)
        cross = [np.column_stack([c.levels[f] for c in columns]) for f in range(len(self.levels))]
        return posteriors.Coupling(cov, [a @ inverse for a in cross])

    def gradient(self, solved, coupling):
        """Return d log evidence / d theta (F,), prior included."""
        squares = np.array([np.sum(a**2) for a in solved.mean.levels])
        variances = np.array([np.sum(v) for v in coupling.variances(solved.tree.own)])
        out = (squares + self.shares * variances) * np.exp(-2.0 * solved.theta) - self.levels
        return out + self.theta_prior.slope(solved.theta)


def fit_by_messages(plan, sign, run, monitor, previous, save):
    """Return the `BinaryFit` of a `Plan` by messages along rows.

    run is the `PartMap` over raw parts, None for rows in memory, whose labels are sign; previous is
    the state to go on from, or None; `save`, if not None, is called with that of each step in the
    scales.
    """
    with ExitStack() as stack:
        if run is None:
            parts = parts_in_memory(plan, sign)
            if len(parts) == 1:  # nothing to share out: its questions would cost more by workers
                stack.enter_context(parallel_config("sequential"))
            run = stack.enter_context(PartMap(parts, plan.settings.n_jobs, prefer="threads"))
        numbers, big = LevelNumbers(plan.parts.where, plan.n_levels), int(np.argmax(plan.n_levels))
        rows = LoggedRows(run, numbers, plan.parts.reader, big)
        return _fit_rows(plan, rows, monitor, previous, save)


def _fit_rows(plan, rows, monitor, previous, save):
    """Return the `BinaryFit` of `LoggedRows`."""
    model = MessagesModel(rows, plan)
    posterior_of: Any = partial(_posterior, plan, model)
    keep = save and (lambda found: save(state_of_levels(found[0])))
    watch = PosteriorMonitor(monitor, lambda found: posterior_of(*found, None, None), keep)
    start, trace = _start(plan, model, previous), Trace(watch)
    solved, coupling, reason, check, corrected = find_right_scales(
        model, start, plan.settings.tol, plan.settings.max_iter, trace
    )
    known, state = plan.settings.theta == "mode", state_of_levels(solved)
    evidence, spread = posteriors.log_evidence(model, solved, check), None
    if not known:
        spread = _uncertainty(model, solved, coupling, 0.1 * _SITES * plan.settings.tol)
        evidence += posteriors.log_integral(model.theta_prior, solved.theta, spread.cov)
    posterior = posterior_of(solved, coupling, spread, check)
    settled, remark = reason == "converged", ""
    if not model.solved_all:
        reason, remark = "stuck", "a linear system was not solved in 200 steps"
    names = [factor.name for factor in plan.columns.factors]
    told = posteriors.remarks_on_variances(check, corrected, names) if settled else ()
    more = dict(theta_rule="mode" if known else "gaussian", state=state, remarks=told)
    return BinaryFit(posterior, trace.history, reason, evidence, more, remark)


def state_of_levels(solved):
    """Return the arrays, values of levels and coefficients, from which a fit can go on."""
    return dict(theta=solved.theta, mean=np.concatenate([solved.mean.beta, *solved.mean.levels]))


def find_right_scales(model, start, tol, max_iter, trace):
    """Return what `find_scales` does, its `VarianceCheck`, whether (F,) scales were corrected.

    Where variances by messages would put a scale off, it is found again with the right ones' share
    in them, which moves with the scales, and the search changes little: up to three times.
    """
    corrected = np.zeros(len(model.levels), dtype=bool)
    for left in range(3, -1, -1):
        solved, coupling, reason = find_scales(model, start, tol, max_iter, trace)
        solved = model.settled(solved)
        check = posteriors.check_variances(model, solved, coupling)
        again = reason == "converged" and left and check.matters.any()
        if again and trace.n_iter >= max_iter:  # what was found is no root of the right gradient
            again, reason = False, "max_iter"
        if not again:
            break
        corrected |= check.matters
        model.shares = np.where(corrected, check.share, model.shares)
        start = solved.theta, solved.mean
    return solved, coupling, reason, check, corrected


def find_scales(model, start, tol, max_iter, trace):
    """Return (`Solved`, `Coupling`, `Reason`) by BFGS on the gradient of the log evidence.

    start is (theta, `Effects` or None), the rows being where they start; trace goes on. The fixed
    point tau^2 = mean(a^2 + v) has the same root and crawls to it. Sites are tightened as the steps
    in theta, of at most .7, get shorter, and tight from the start where an earlier fit has been;
    how effects go along with the coefficients is looked at
    first, and again where steps are short and the scales have moved since.
    A gradient that has moved because of such a look says nothing of the curvature.
    """
    (theta, mean), last, fine = start, None, _SITES * tol
    curvature, step = np.diag(model.levels), np.full(len(theta), np.inf)
    looked, site_tol = np.full(len(theta), np.inf), max(0.03 * (mean is None), fine)
    while True:
        trace.begin()
        solved = model.solve(theta, mean, site_tol)
        mean = solved.mean
        away, same = np.max(np.abs(theta - looked)) >= _NEAR * tol, last is not None
        if away and (last is None or np.max(np.abs(step)) < _NEAR * tol):
            coupling, looked, away, same = model.coupling(solved), theta, False, False
        gradient = model.gradient(solved, coupling)
        if same:
            curvature = gaussian.learned_curvature(curvature, step, last - gradient)
        last, step = gradient, np.linalg.solve(curvature, gradient)
        far = float(np.max(np.abs(step)))
        step = step / max(1.0, far / 0.7)
        trace.end({"residual": max(far, solved.mismatch)}, (solved, coupling))
        below = far < _STEPS * tol and solved.mismatch < fine and not away
        reason = reason_to_end(trace, below, True, False, max_iter)
        if reason is not None:
            return solved, coupling, reason
        site_tol, theta = float(np.clip(0.1 * far, fine, site_tol)), theta + step


def _start(plan, model, previous):
    """Have the rows start at weak sites; return (theta, `Effects` or None) of an earlier fit.

    The scales are kept where there are as many, the values of levels where they suit.
    """
    model.rows.step(steps.start, tuple(model.chains.leaves))
    previous, d = {} if previous is None else previous, len(model.beta_precision)
    if np.shape(previous.get("theta")) != model.theta_prior.mean.shape:
        return model.theta_prior.mean, None
    ends, mean = d + np.cumsum([0, *plan.n_levels]), previous.get("mean")
    if np.shape(mean) != (ends[-1],):
        return previous["theta"], None
    beta, *levels = np.split(mean, ends[:-1])
    return previous["theta"], Effects(beta, levels)


def _uncertainty(model, solved, coupling, tol, apart=0.1):
    """Return the `ScaleUncertainty` by a fit at each log scale moved by a little, `apart`."""
    moves, gradient = [], model.gradient(solved, coupling)
    curvature = np.empty((len(solved.theta), len(solved.theta)))
    for f in range(len(solved.theta)):
        theta = solved.theta + apart * (np.arange(len(solved.theta)) == f)
        near = model.solve(theta, solved.mean, tol, least=4)
        curvature[f] = (gradient - model.gradient(near, coupling)) / apart
        change = near.mean.plus(solved.mean, -1.0)
        moves.append(Effects(change.beta / apart, [a / apart for a in change.levels]))
    least = 0.3 / np.max(model.theta_prior.sd) ** 2  # of the prior's curvature
    values, vectors = gaussian.eigen_curvature(curvature, least)
    return posteriors.ScaleUncertainty((vectors / values) @ vectors.T, moves)


def _posterior(plan, model, solved, coupling, spread, check):
    """Return the `MessagesPosterior`; without spread the scales count as known.

    It draws by linear systems where the rows are in memory, the model's own being in that state.
    """
    if spread is None:
        f = len(solved.theta)
        none = Effects(0.0 * solved.mean.beta, [0.0 * a for a in solved.mean.levels])
        spread = posteriors.ScaleUncertainty(np.zeros((f, f)), [none] * f)
    system = None if plan.X is None else solved.system.at(model.rows.held())
    n_named = [len(known) for known in plan.levels]
    return posteriors.MessagesPosterior(solved, coupling, spread, system, n_named, check)
