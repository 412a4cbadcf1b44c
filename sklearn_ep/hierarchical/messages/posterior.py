"""Posterior of coefficients and many effects, and its variances held against draws and solves.

It is Gaussian, with the scales' uncertainty added. Messages along rows leave out loops between
chains of factors. A solve is a draw: a few dozen give the variances of a factor in sum, with a
standard error of sqrt(2 / (draws x levels)): large of a small factor, whose scale needs them least.
Conjugate gradients find the log determinant of the system on their way.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag

from ..._engine.gaussian import Moments
from ..._engine.hyper import normal_distribution
from .._posterior import EffectsMixture
from .rows import Tree, row_evidence
from .schur import Effects, right_side


class ScaleUncertainty(NamedTuple):
    """Covariance (F, F) of the log scales, and what a unit of each moves, as `Effects`."""

    cov: np.ndarray
    moves: list[Effects]


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


class LevelsNode(NamedTuple):
    """Gaussian posterior that is known by levels, not as a matrix, with the scales' uncertainty.

    mean are `Effects`; tree is the `Tree` of the effects given the coefficients and the log scales,
    coupling the `Coupling` to all these (D + F,); moves (F, D) are what a unit of each log scale
    moves the coefficients. Effects of different chains of factors are independent given
    coefficients and scales, which leaves out a share of their covariance of order one over the
    rows of a level.
    """

    mean: Effects
    tree: Tree
    coupling: Coupling
    moves: np.ndarray
    n_named: list[int]

    def _columns(self, X):
        """Return columns (n, D + F): those of the coefficients, and of the log scales by them."""
        return np.hstack([X, X @ self.moves.T])

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of the coefficients."""
        columns = self._columns(np.eye(len(self.mean.beta)))
        return Moments(self.mean.beta, columns @ self.coupling.cov @ columns.T)

    def beta(self):
        """Return means and sds (D,) of the coefficients."""
        mean, cov = self.beta_moments()
        return mean, np.sqrt(np.diagonal(cov))

    def effects(self):
        """Return (means, variances), both (L_f, 1), of the effects of each factor."""
        pairs = zip(self.mean.levels, self.coupling.variances(self.tree.own), strict=True)
        return [(mean[:, None], var[:, None]) for mean, var in pairs]

    def _seen(self, rows):
        """Return means, columns (n, D + F) with the effects' lines, and codes.

        codes (n, F) are -1 for levels outside the named ones, which are new.
        """
        codes = np.where(rows.codes < self.n_named, np.maximum(rows.codes, -1), -1)
        mean, columns = rows.X @ self.mean.beta, self._columns(rows.X)
        for f, code in enumerate(codes.T):
            known = code >= 0
            at = code[known]
            mean[known] += self.mean.levels[f][at]
            columns[known] += self.coupling.lines[f][at]
        return mean, columns, codes

    def at_rows(self, rows):
        """Return means and variances (n,) of the linear predictor."""
        mean, columns, codes = self._seen(rows)
        own, _ = self.tree.of_rows(codes)
        var = own[:, self.tree.chains.leaves].sum(1)
        return mean, var + np.einsum("nd,de,ne->n", columns, self.coupling.cov, columns)

    def between(self, rows, others, same):
        """Return the covariance (n1, n2) of the linear predictor of two sets of rows, and means."""
        (mean1, one, codes1), (mean2, two, codes2) = self._seen(rows), self._seen(others)
        own = self.tree.covariance(codes1, codes2, same)
        return own + one @ self.coupling.cov @ two.T, mean1, mean2

    def draw_by_levels(self, rng):
        """Return a draw, about zero, from what is known of levels given the scales."""
        cov, lines = self.coupling
        d = len(self.mean.beta)
        beta = rng.multivariate_normal(np.zeros(d), cov[:d, :d], method="cholesky")
        pairs = zip(self.tree.draw(rng), lines, strict=True)
        return Effects(beta, [c[:, :d] @ beta + drawn for drawn, c in pairs])


class MessagesPosterior(EffectsMixture):
    """One `LevelsNode`, and the `SchurSystem` that draws, None where the rows are elsewhere.

    Draws without a system leave out what the node does. check is the `VarianceCheck` of the fit.
    """

    def __init__(self, solved, coupling, spread, system, n_named, check):
        self.system, self.check = system, check
        moves, levels = zip(*spread.moves, strict=True)
        each = zip(coupling.lines, zip(*levels, strict=True), strict=True)
        lines = [np.column_stack([own, *of_factor]) for own, of_factor in each]
        coupling = Coupling(block_diag(coupling.cov, spread.cov), lines)
        node = LevelsNode(solved.mean, solved.tree, coupling, np.array(moves), n_named)
        theta, smooth = solved.theta[None], normal_distribution(solved.theta, spread.cov)
        alone = SimpleNamespace(phi=theta, weight=np.ones(1), smooth=smooth)
        super().__init__(alone, [1] * len(solved.theta), n_named, [node])

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of the coefficients."""
        return self.nodes[0].beta_moments()

    def draw_parameters(self, n_samples, rng):
        """Return joint draws: coefficients (S, D), effects, theta, and scales (S, 1, 1)."""
        (node,) = self.nodes
        draw = node.draw_by_levels if self.system is None else self.system.draw
        f, d = node.moves.shape
        noise = rng.multivariate_normal(np.zeros(f), node.coupling.cov[d:, d:], n_samples)
        drawn = [draw(rng) for _ in range(n_samples)]
        beta = node.mean.beta + np.array([w.beta for w in drawn]) + noise @ node.moves
        effects = []
        for k, n in enumerate(self.n_named):
            around = node.mean.levels[k] + noise @ node.coupling.lines[k][:, d:].T
            levels = np.array([w.levels[k][:n] for w in drawn])
            effects.append((levels + around[:, :n])[..., None])
        theta = self.average.phi + noise
        return beta, effects, theta, list(np.exp(theta.T)[..., None, None])


class CheckLimits(NamedTuple):
    """What a check of variances may cost, and what follows of it."""

    noise: float = 0.2  # sd of a log scale that draws of its effects' variances may put it off
    most: int = 30  # draws
    budget: float = 0.12  # of a fit's work, that draws may take
    told: float = 2.0  # standard errors that a difference has to be beyond to be told of
    sure: float = 3.0  # and to be corrected, which does more harm than good where there is none
    agree: float = 0.05  # difference of variances that is none
    # Difference that the fit tells of: with 12 % on 160 rows of 30 x 6 levels the exact engine has
    # sds of effects 14 % wider.
    remarked: float = 0.1
    shift: float = 0.1  # sd that a log scale has to be off to be found anew: not seen in intervals


LIMITS = CheckLimits()


class VarianceCheck(NamedTuple):
    """Exact over messages' variances of each factor in sum, with error; what it does to the scales.

    shift (F,) is what log scales found with other shares are off, in sds; log_det is that of the
    posterior precision.
    """

    share: np.ndarray
    error: np.ndarray
    shift: np.ndarray
    log_det: float

    @property
    def matters(self):
        """Whether (F,) the scales are to be found anew with these shares."""
        return (np.abs(self.shift) > LIMITS.shift) & self._beyond(LIMITS.sure)

    @property
    def remarked(self):
        """Whether (F,) a user has to know."""
        return (np.abs(self.share - 1.0) > LIMITS.remarked) & self._beyond(LIMITS.told)

    def _beyond(self, n_errors):
        return np.abs(self.share - 1.0) > n_errors * self.error


def check_variances(model, solved, coupling):
    """Return the `VarianceCheck` of a `MessagesModel` whose rows are in the state of the system."""
    system, levels = solved.system, model.levels
    totals = np.array([np.sum(v) for v in coupling.variances(solved.tree.own)])
    tau2 = np.exp(2.0 * solved.theta)
    if system.direct:
        variance, error, trace = system.variance_sums(), 0.0 * levels, 0.0
    else:
        variance, error, trace = _by_solves(system, levels, totals / (levels * tau2), model.n_steps)
        model.solved_all &= system.converged
    share = variance / totals
    known = 1.0 - np.minimum(variance / (levels * tau2), 1.0)
    curvature = 2.0 * levels * known**2 + model.theta_prior.sd**-2.0
    shift = (share - model.shares) * totals / tau2 / np.sqrt(curvature)
    return VarianceCheck(share, error / totals, shift, system.log_det() + trace)


def _by_solves(system, levels, unknown, n_steps):
    """Return variances (F,) summed over levels, their errors (F,), and the trace of log K.

    unknown (F,) is the share of the prior's variance that is left, n_steps the work so far.
    """
    # the same fit gives the same answer
    rng, squares, traces = np.random.default_rng(20), [], []

    def draw():
        squares.append([np.sum(a**2) for a in system.draw(rng).levels])
        traces.append(system.path.trace())

    draw()
    affordable = LIMITS.budget * n_steps / max(len(system.path.steps), 1)
    odds = np.max(unknown / np.maximum(1.0 - unknown, 1e-3))
    for _ in range(1, int(np.clip(min((odds / LIMITS.noise) ** 2, affordable), 2, LIMITS.most))):
        draw()
    variance = np.mean(squares, axis=0)
    # effects that go together are fewer than their number: what draws differ by says so
    error = np.maximum(variance * np.sqrt(2.0 / levels), np.std(squares, axis=0, ddof=1))
    return variance, error / np.sqrt(len(squares)), float(np.mean(traces))


def log_evidence(model, solved, check):
    """Return the log evidence of EP at the scales: its error by variances is of second order."""
    rows, prior = model.rows, model.prior(solved.theta)
    pulled = rows.ask(right_side).dot(solved.mean)
    log_prior = sum(np.sum(np.log(p)) for p in (prior.beta, *prior.levels))
    out = 0.5 * (pulled + log_prior - check.log_det)
    out += rows.ask(row_evidence, solved.root, solved.mean, model.power)
    return float(out)


def log_integral(prior, theta, cov):
    """Return the log of Laplace's integral over the scales, for an evidence of one at theta."""
    volume = 0.5 * len(theta) * np.log(2.0 * np.pi) + 0.5 * np.linalg.slogdet(cov)[1]
    return float(prior.log_density(theta) + volume)


def remarks_on_agreement(check, names):
    """Return a sentence for each factor on its variances by messages and by draws or solves."""
    triples = zip(check.share, check.error, names, strict=True)
    return [
        f"Factor {name!r}, variances by messages and by draws: {verdict(share, error, name)}."
        for share, error, name in triples
    ]


def verdict(share, error, name):
    """Return in words what the variances of a factor by messages are, exact ones over them."""
    if abs(share - 1.0) <= max(LIMITS.agree, LIMITS.told * error):
        return "agree"
    return f"{_off(share)}: do not trust the interval of the scale of {name!r}"


def _off(share):
    return f"{100 * abs(1.0 - 1.0 / share):.0f} % too {'small' if share > 1.0 else 'large'}"


def remarks_on_variances(check, corrected, names):
    """Return sentences on factors whose variances messages do not give.

    corrected (F,) says whose scales were found with exact ones in their place.
    """
    return [
        f"factor {names[f]!r}: messages along rows make the variances of its effects "
        f"{_off(check.share[f])}, because its levels and those of other factors go together "
        "(factors that are almost nested, or few levels that meet all others); its scale "
        + ("was found with corrected ones." if corrected[f] else "stands.")
        for f in np.flatnonzero(check.remarked)
    ]
