"""Rows left out: how probable each row is given the others, and scales that make rows probable.

A row is left out with all its copies, be they weights or written out, since of two copies one would
predict the other (`rows.taken_copies`, also for equal rows with several labels). Its sites leave
the posterior, and what remains is the *cavity*. Nodes lose the weight that they have from its
label. A posterior may be surer than it should be, or less sure. How well the others predict each
row shows by how much (leave-one-out from cavities, Opper and Winther 2000; a tempered posterior,
Gruenwald 2012). So a model declares a few *scales* with priors of their logs, which change its
predictions::

    N(m, v) of linear predictors              ->  N(a m, a^2 t v)
    N(m, v) of several classes of a process   ->  N(m, t v)
    log p of trees, log odds of a process     ->  a log p + constant

`best_scales` finds the posterior mode of the scales from a few sums over the rows, which may be on
other machines. `calibrated` does so for rows in memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.special import entr, log_softmax

from .gaussian import learned_curvature
from .hyper import Node, log_weights_without
from .quadrature import logistic_moments

# Gain promised by a step, in nats for each copy of the rows, below which the search ends. Five to
# seven sums over the rows then find scales to 1e-4.
_CLOSE = 1e-8


class LogPrior(NamedTuple):
    """Prior of the log of a scale: normal about zero; below zero Cauchy's, if it has a `width`.

    The heavy tail of the latter gives way to many rows.
    """

    sd: float
    width: float | None = None

    def terms(self, x: float) -> tuple[float, float]:
        """Return minus the log density at x, and the precision of its tangent Gaussian."""
        if self.width is None or x >= 0:
            return 0.5 * (x / self.sd) ** 2, self.sd**-2.0
        square = self.width**2 + x**2
        return float(np.log(square / self.width**2)), 2.0 / square


# Prior of log t, the scale of the variance of a linear predictor. Below zero predictions become
# surer than the posterior, and false certainty has an unlimited log loss. Rows that all happen to
# be predicted well move the scale less against Cauchy's prior than against a normal one, while the
# many rows of a text still move it.
TEMPER = LogPrior(1.0, 0.4)
Priors = tuple[LogPrior, ...]


class ScoredRows(Protocol):
    """Rows that say how probable each is at theta, the logs of scales."""

    @property
    def weight(self) -> np.ndarray:
        """Copies (n,) of the rows."""

    def scores(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log probabilities (n,) of rows that are left out, and their slopes (T, n)."""


class ScoreSums(NamedTuple):
    """Sums over rows at theta: log probabilities, their slopes (T,), squares (T, T) of these."""

    log_proba: float
    slope: np.ndarray
    square: np.ndarray

    @classmethod
    def of(cls, theta: np.ndarray, rows: ScoredRows) -> "ScoreSums":
        """Return the sums over `ScoredRows`."""
        return cls.over(*rows.scores(theta), rows.weight)

    @classmethod
    def over(cls, log_proba: np.ndarray, slopes: np.ndarray, weight: np.ndarray) -> "ScoreSums":
        """Return the sums over rows of log probabilities (n,) and slopes (T, n)."""
        return cls(float(weight @ log_proba), slopes @ weight, (slopes * weight) @ slopes.T)


def doubted_sums(theta: np.ndarray, rows: ScoredRows, errors: float) -> ScoreSums:
    """Return the `ScoreSums` of `ScoredRows` less so many standard errors of their gain.

    The gain is that over scales of one. There its standard error has a kink, and the slope is that
    of the steepest ascent: zero where the error grows faster than the gain.
    """
    log_proba, slopes = rows.scores(theta)
    sums, moved = ScoreSums.over(log_proba, slopes, rows.weight), np.any(theta)
    gain = log_proba - rows.scores(0.0 * theta)[0] if moved else sums.slope @ slopes
    gain = gain - rows.weight @ gain / rows.weight.sum()
    error = np.sqrt(rows.weight @ gain**2)
    slope = sums.slope - errors * (slopes * rows.weight) @ gain / (error or 1.0)
    if moved:
        return ScoreSums(sums.log_proba - errors * error, slope, sums.square)
    return sums._replace(slope=slope * (slope @ sums.slope > 0))


def density_at(priors: Priors, theta: np.ndarray, sums: ScoreSums) -> Node:
    """Return the `Node` at theta (T,), whose payload is the expected curvature (T, T)."""
    terms = [prior.terms(x) for prior, x in zip(priors, theta, strict=True)]
    loss, precision = np.array(terms).T
    gradient, curvature = sums.slope - precision * theta, sums.square + np.diag(precision)
    return Node(theta, sums.log_proba, -float(loss.sum()), gradient, 0.0, curvature)


def best_scales(
    priors: Priors,
    copies: float,
    sums: Callable[[np.ndarray], ScoreSums],
    start: Node | None = None,
) -> np.ndarray:
    """Return theta (T,) at the mode by few looks at the rows, of which there are so many copies.

    By BFGS from the expected curvature at a `Node`, or at scales of one. The last step is taken
    without a look.
    """

    def look(theta: np.ndarray) -> Node:
        return density_at(priors, theta, sums(theta))

    at = look(np.zeros(len(priors))) if start is None else start
    curvature = at.payload
    for _ in range(50):
        # weights that differ by many orders of magnitude leave it without full rank
        step = np.linalg.lstsq(curvature, at.gradient, rcond=None)[0]
        if 0.5 * step @ at.gradient <= _CLOSE * copies:
            return at.phi + step
        step = step * min(1.0, 1.0 / np.max(np.abs(step)))
        new = look(at.phi + step)
        while not new.objective > at.objective:
            step = 0.5 * step
            if np.max(np.abs(step)) < 1e-9:  # rounding hides any gain
                return at.phi
            new = look(at.phi + step)
        curvature, at = learned_curvature(curvature, step, at.gradient - new.gradient), new
    return at.phi


class LeftOut(NamedTuple):
    """Scales (T,), and log probabilities (n,) of labels given the other rows.

    mean and var are those of predictors without their own label. Of rows in partitions there are
    the scales only.
    """

    scale: np.ndarray
    log_proba: Any = None
    mean: Any = np.nan
    var: Any = np.nan


def calibrated(priors: Priors | None, rows: ScoredRows, errors: float = 0.0) -> LeftOut:
    """Return the `LeftOut` of rows at scales with `priors` that they choose, or at one for None.

    What scales gain over one counts less so many standard errors of it over the rows.
    """
    theta = np.zeros(2)
    if priors is not None:
        sums = partial(doubted_sums, errors=errors) if errors else ScoreSums.of
        theta = best_scales(priors, rows.weight.sum(), partial(sums, rows=rows))
    return LeftOut(np.exp(theta), rows.scores(theta)[0])


def scaled(centre: Any, mean: Any, var: Any, slope: float, temper: float) -> tuple[Any, Any]:
    """Return means and variances at scales of the mean and of the variance of a mixture.

    centre is the mean of the mixture whose parts have mean and var.
    """
    return slope * (centre + np.sqrt(temper) * (mean - centre)), slope**2 * temper * var


class CavityRows(NamedTuple):
    """Cavities of rows at M nodes, and their mixture row by row.

    mean and var are (M, n), or (M, n, K) of K classes; `moments` maps such to log Z of the labels
    (M, n) and its slopes in both, and `at_one` is what it says of these. log_share (M, n) are the
    weights of nodes without the row, centre (n,) or (n, K) means of the mixture, weight (n,) the
    copies. theta are the logs of the scales of mean and variance, or of the latter.
    """

    moments: Callable
    mean: np.ndarray
    var: np.ndarray
    at_one: Any
    log_share: np.ndarray
    centre: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(
        cls,
        moments: Callable,
        nodes: Any,
        node_weight: np.ndarray,
        copies: np.ndarray,
        taken: np.ndarray | None = None,
    ) -> "CavityRows":
        """Return those of nodes, pairs of a mean and a variance, with weights (M,).

        `taken` (n,) are those that go with a row, see `taken_copies`; None where it is alone.
        """
        mean, var = (np.array(values) for values in zip(*nodes, strict=True))
        at_one = moments(mean, var)
        log_share = log_weights_without(node_weight, at_one[0], copies if taken is None else taken)
        centre = np.einsum("mn,mn...->n...", np.exp(log_share), mean)
        return cls(moments, mean, var, at_one, log_share, centre, copies)

    def scores(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log probabilities (n,) at theta, and their slopes (T, n)."""
        slope, temper = np.exp((0.0, *theta)[-2:])
        m, v = scaled(self.centre, self.mean, self.var, slope, temper)
        log_z, by_mean, by_var = self.moments(m, v) if np.any(theta) else self.at_one
        by_var = by_var * v
        each = by_mean * m + 2.0 * by_var, 0.5 * by_mean * (m - slope * self.centre) + by_var
        log_joint = self.log_share + log_z
        log_proba = np.logaddexp.reduce(log_joint, axis=0)
        share = np.exp(log_joint - log_proba)
        slopes = np.reshape(each[-len(theta) :], (len(theta), *share.shape, -1))
        return log_proba, np.einsum("mn,tmnk->tn", share, slopes)

    @property
    def variance(self) -> np.ndarray:
        """Variances of the mixture, (n,) or (n, K)."""
        each = self.var + (self.mean - self.centre) ** 2
        return np.einsum("mn,mn...->n...", np.exp(self.log_share), each)


def label_moments(
    sign: np.ndarray, mean: np.ndarray, var: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log Z (M, n) of logistic labels -1 and 1 and its slopes in means and variances."""
    log_z, gradient, curvature = logistic_moments(sign * mean, var)
    return log_z, sign * gradient, 0.5 * (gradient**2 - curvature)


def class_moments(factor: Any, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> list:
    """Return log Z (M, n) of classes y (n,) and its slopes (M, n, K) in means and variances."""
    each = [factor.log_z_slopes(y, *of) for of in zip(mean, var, strict=True)]
    return [np.array(values) for values in zip(*each, strict=True)]


class ClassRows(NamedTuple):
    """Log probabilities (n, K) of all classes where rows are left out, `own` (n,) is that seen."""

    log_p: np.ndarray
    own: np.ndarray
    weight: np.ndarray

    def scores(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log probabilities (n,) of the labels at the log of their slope, and slopes."""
        log_p = log_softmax(np.exp(theta) * self.log_p, axis=1)
        own = log_p[np.arange(len(log_p)), self.own]
        return own, (own + entr(np.exp(log_p)).sum(axis=1))[None]
