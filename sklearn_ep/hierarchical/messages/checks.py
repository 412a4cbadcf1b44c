"""Variances by messages held against draws and solves, and the log evidence of a fit.

Messages along rows leave out loops between chains of factors. A solve is a draw: a few dozen give
the variances of a factor in sum, with a standard error of sqrt(2 / (draws x levels)), and of a
small factor a solve for each level gives them exactly. Conjugate gradients find the log determinant
of the system on their way.
"""

from typing import NamedTuple

import numpy as np

from .rows import row_evidence
from .schur import right_side

__all__ = ["VarianceCheck", "check_variances", "log_evidence", "remarks_on_variances", "verdict"]

_SEED = 20  # of the draws, so that the same fit gives the same answer
_SMALL = 50  # levels of factors whose variances are solved for one by one
_NOISE = 0.2  # sd of a log scale that draws of its effects' variances may put it off
_LEAST, _MOST = 2, 30  # draws
_BUDGET = 0.12  # of a fit's work, that draws may take
_ERRORS = 2.0  # standard errors that a difference has to be beyond to be told of
_SURE = 3.0  # and to be corrected, which does more harm than good where there is none
_AGREE = 0.05  # difference of variances that is none
# Difference of variances that the fit tells of: with 12 % on 160 rows of 30 x 6 levels the exact
# engine has sds of effects 14 % wider.
_REMARKED = 0.1
_SHIFT = 0.1  # sd that a log scale has to be off to be found anew: a tenth is not seen in intervals


class VarianceCheck(NamedTuple):
    """Exact over messages' variances of each factor in sum, with error; what it does to the scales.

    shift (F,) is what log scales found with other shares are off, in sds; log_det is that of the
    posterior precision, with the standard error log_det_std.
    """

    share: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    log_det: float
    log_det_std: float

    @property
    def matters(self):
        """Whether (F,) the scales are to be found anew with these shares."""
        return (np.abs(self.shift) > _SHIFT) & self._beyond(_SURE)

    @property
    def remarked(self):
        """Whether (F,) a user has to know."""
        return (np.abs(self.share - 1.0) > _REMARKED) & self._beyond(_ERRORS)

    def _beyond(self, n_errors):
        return np.abs(self.share - 1.0) > n_errors * self.error


def check_variances(model, solved, coupling):
    """Return the `VarianceCheck` of a `MessagesModel` whose rows are in the state of the system."""
    system, levels = solved.system, model.levels
    totals = np.array([np.sum(v) for v in coupling.variances(solved.tree.own)])
    tau2 = np.exp(2.0 * solved.theta)
    if system.direct:
        found = Sums(system.variance_sums(), 0.0 * levels, 0.0, 0.0)
    else:
        found = _by_solves(system, levels, totals / (levels * tau2), model.n_steps)
        model.note(system)
    share = found.variance / totals
    known = 1.0 - np.minimum(found.variance / (levels * tau2), 1.0)
    curvature = 2.0 * levels * known**2 + model.theta_sd**-2.0
    shift = (share - model.shares) * totals / tau2 / np.sqrt(curvature)
    log_det = system.log_det() + found.trace
    return VarianceCheck(share, found.error / totals, shift, log_det, found.trace_std)


class Sums(NamedTuple):
    """Variances (F,) summed over levels, their errors (F,); trace of log K, and its error."""

    variance: np.ndarray
    error: np.ndarray
    trace: float
    trace_std: float


def _by_solves(system, levels, unknown, n_steps):
    """Return the `Sums` of factors with these numbers of levels.

    unknown (F,) is the share of the prior's variance that is left, n_steps the work so far.
    """
    rng, squares, traces = np.random.default_rng(_SEED), [], []

    def draw():
        squares.append([np.sum(a**2) for a in system.draw(rng).levels])
        traces.append(system.path.traces())

    draw()
    affordable = _BUDGET * n_steps / max(len(system.path.steps), 1)
    small = levels <= min(_SMALL, affordable)
    odds = np.max((unknown / np.maximum(1.0 - unknown, 1e-3))[~small], initial=0.0)
    for _ in range(1, int(np.clip(min((odds / _NOISE) ** 2, affordable), _LEAST, _MOST))):
        draw()
    s, variance, trace = len(squares), np.mean(squares, axis=0), np.mean(traces, axis=0)
    # effects that go together are fewer than their number: what draws differ by says so
    error = np.maximum(variance * np.sqrt(2.0 / levels), np.std(squares, axis=0, ddof=1))
    for f in np.flatnonzero(small):
        variance[f], error[f] = _solved_for(system, f), 0.0
    spread = np.sqrt(2.0 * max(trace[1], 0.0) / s)
    return Sums(variance, error / np.sqrt(s), float(trace[0]), float(spread))


def _solved_for(system, f):
    """Return the sum of the variances of the effects of a factor, by a solve for each."""
    total = 0.0
    for j in range(len(system.prior.levels[f])):
        unit = system.prior.plus(system.prior, -1.0)
        unit.levels[f][j] = 1.0
        total += system.solve(unit).levels[f][j]
    return total


def log_evidence(model, solved, check, scale_cov):
    """Return the log evidence: of EP at the scales, times what their Gaussian, if any, covers.

    Its error by variances of rows is of second order; that of the determinant is half of what
    `check` says.
    """
    rows, prior, theta = model.rows, model.prior(solved.theta), solved.theta
    pulled = rows.ask(right_side).dot(solved.mean)
    log_prior = sum(np.sum(np.log(p)) for p in (prior.beta, *prior.levels))
    out = 0.5 * (pulled + log_prior - check.log_det)
    out += rows.ask(row_evidence, solved.root, solved.mean, model.power)
    if scale_cov is not None:
        apart = (theta - model.theta_mean) / model.theta_sd
        out -= np.sum(0.5 * apart**2 + np.log(model.theta_sd))
        out += 0.5 * np.linalg.slogdet(scale_cov)[1]
    return float(out)


def verdict(share, error, name):
    """Return in words what the variances of a factor by messages are, exact ones over them."""
    if abs(share - 1.0) <= max(_AGREE, _ERRORS * error):
        return "agree"
    size = f"{100 * abs(1.0 - 1.0 / share):.0f} % too {'small' if share > 1.0 else 'large'}"
    return f"{size}: do not trust the interval of the scale of {name!r}"


def remarks_on_variances(check, corrected, names):
    """Return sentences on factors whose variances messages do not give.

    corrected (F,) says whose scales were found with exact ones in their place.
    """
    out = []
    for f in np.flatnonzero(check.remarked):
        size = 100 * abs(1.0 - 1.0 / check.share[f])
        side = "small" if check.share[f] > 1.0 else "large"
        out.append(
            f"factor {names[f]!r}: messages along rows make the variances of its effects "
            f"{size:.0f} % too {side}, because its levels and those of other factors go together "
            "(factors that are almost nested, or few levels that meet all others); "
            + ("its scale was found with corrected ones." if corrected[f] else "its scale stands.")
        )
    return tuple(out)
