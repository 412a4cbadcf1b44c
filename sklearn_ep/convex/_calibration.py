"""Calibration of a linear classifier by leave-one-out: two numbers from the cavities of the rows.

A scale a of the mean (`slope`) and a scale t of the variance (`temper`) turn the posterior N(m, v)
of a predictor into N(a m, a^2 t v). One prior variance for all columns is often wrong where there
are many. How well rows are predicted from the others shows by how much (stacking of cavities, Opper
and Winther 2000; a tempered posterior, Gruenwald 2012).
"""

from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import learned_curvature
from .._engine.hyper import log_weights_without
from .._engine.quadrature import logistic_moments


class _Choices(NamedTuple):
    """Priors of the scales a of the mean and t of the variance, and the accuracy of their maximum.

    Normal priors of log a and of log t above zero keep both near one where rows are few, and where
    labels are separable and any a would do. Below zero, where predictions become surer than the
    posterior, log t has a Cauchy prior: rows that all happen to be predicted well would push it
    without end, and false certainty has an unlimited log loss. Its heavy tails still give way to
    the many rows of a text.
    """

    slope_sd: float = 0.3
    doubt_sd: float = 1.0
    certainty_width: float = 0.4
    close: float = 1e-6  # nats that a further step may gain, ...
    close_classes: float = 1e-3  # ... of several classes, whose integrals are rougher and dearer
    # Where rows are many, or elsewhere, another look at them is not worth so few nats a row.
    close_a_row: float = 1e-8
    many_rows: int = 10_000  # from which rough integrals do for chances, too
    noise_step: float = 1.0  # between logs of noise from which its maximum is looked for


_BY = _Choices()


class Cavities(NamedTuple):
    """Mean and variance (n,) of the predictor of each row without its own label.

    nan where there is no proper one, which takes sampled variances. Of several classes (K, n).
    """

    mean: np.ndarray
    var: np.ndarray


class LeftOut(NamedTuple):
    """Both scales, and `log_proba` (n,) of each row's own label given the other rows.

    Rows in partitions have the two numbers only.
    """

    slope: float
    temper: float
    cavities: Any = None
    log_proba: Any = None


class RowsLeftOut(NamedTuple):
    """Cavities of M nodes with means towards the labels, and their mixture, row by row.

    mean, var and log_share (M, n), whose exponentials add up to one; centre and weight (n,);
    moments (3, M, n) are those of `label_moments`, at scales of one.
    """

    mean: np.ndarray
    var: np.ndarray
    moments: np.ndarray
    log_share: np.ndarray
    centre: np.ndarray
    weight: np.ndarray


def cavities(mean, var, slope, precision, weight):
    """Return the `Cavities` of rows of a variational posterior, one copy of each taken out.

    mean and var (n,) are the marginals of the predictors, slope (n,) that of the expected loss,
    precision (n,) that of the sites, both of all copies; of a weight below one all is taken out.
    """
    copies = np.maximum(weight, 1.0)
    left = 1.0 - precision / copies * var
    proper = left > 0
    v = np.where(proper, var / np.where(proper, left, 1.0), np.nan)
    return Cavities(mean + v * slope / copies, v)


def label_moments(sign, nodes):
    """Return log Z of labels under the `Cavities` of M nodes and its derivatives, each (M, n)."""
    mean, var = _of_nodes(sign, nodes)
    out = np.full((3, *mean.shape), np.nan)
    proper = np.isfinite(var)
    out[:, proper] = logistic_moments(mean[proper], var[proper])
    return out


def _of_nodes(sign, nodes):
    """Return means towards the labels and variances (M, n) of `Cavities` of M nodes."""
    mean, var = (np.array(values) for values in zip(*nodes, strict=True))
    return sign * mean, var


class ScoreSums(NamedTuple):
    """Sums over rows at (log a, log t), from which both scales are found.

    Of the log chances of their labels, the slopes (2,) of these, and the squares (2, 2) of slopes.
    """

    log_proba: float
    slope: np.ndarray
    square: np.ndarray

    @classmethod
    def of(cls, theta, rows):
        """Return the sums over `RowsLeftOut`, by rough integrals: to 1e-6 of a chance."""
        log_proba, slopes = _each(theta, rows, rough=True)
        return cls.over(log_proba, slopes, rows.weight)

    @classmethod
    def over(cls, log_proba, slopes, weight):
        """Return the sums of log chances (n,) and their slopes (2, n)."""
        return cls(float(weight @ log_proba), slopes @ weight, (slopes * weight) @ slopes.T)


class _Scores(NamedTuple):
    """Log density of (log a, log t), its gradient (2,), and the expected curvature (2, 2).

    `log_proba` (n,) are the log chances of the labels where the rows are at hand, else None.
    """

    value: float
    gradient: np.ndarray
    curvature: np.ndarray
    log_proba: Any

    @classmethod
    def at(cls, theta, sums, log_proba=None):
        """Return those of `ScoreSums` at theta."""
        loss, precision = _prior_terms(theta)
        gradient = sums.slope - precision * theta
        return cls(sums.log_proba - loss, gradient, sums.square + np.diag(precision), log_proba)


def _prior_terms(theta):
    """Return minus the log prior of theta, and the precisions (2,) of its tangent Gaussian."""
    log_a, log_t = theta
    loss, precision = 0.5 * (log_t / _BY.doubt_sd) ** 2, _BY.doubt_sd**-2.0
    if log_t < 0:
        square = _BY.certainty_width**2 + log_t**2
        loss, precision = np.log(square / _BY.certainty_width**2), 2.0 / square
    loss += 0.5 * (log_a / _BY.slope_sd) ** 2
    return float(loss), np.array([_BY.slope_sd**-2.0, precision])


def _each(theta, rows, rough):
    """Return log chances (n,) at theta = (log a, log t) and their slopes (2, n)."""
    slope, root = np.exp(theta[0]), np.exp(0.5 * theta[1])
    apart = slope * root * (rows.mean - rows.centre)
    m, v = slope * rows.centre + apart, (slope * root) ** 2 * rows.var
    log_z, gradient, curvature = logistic_moments(m, v, rough) if theta.any() else rows.moments
    by_variance = 0.5 * (gradient**2 - curvature) * v
    each = np.stack([gradient * m + 2.0 * by_variance, 0.5 * gradient * apart + by_variance])
    log_proba = np.logaddexp.reduce(rows.log_share + log_z, axis=0)
    share = np.exp(rows.log_share + log_z - log_proba)
    return log_proba, np.sum(share * each, axis=1)


def calibrated(sign, weight, node_weight, nodes, how):
    """Return the `LeftOut` of rows with labels in {-1, +1} and weight (n,) copies.

    `nodes` are the `Cavities` of nodes with weights (M,). `how` is "loo", or None for scales of
    one. Without a row a node that predicted its label has less weight: p(phi_k | the others) is
    proportional to weight_k / p(y_i | the others, phi_k).
    """
    rows, proper = rows_left_out(sign, weight, node_weight, nodes)
    n, theta = len(rows.centre), np.zeros(2)
    if how == "loo":
        theta = best_of_sums(n, lambda theta: ScoreSums.of(theta, rows), n >= _BY.many_rows)
    log_proba, _ = _each(theta, rows, rough=n >= _BY.many_rows)
    total = np.sum(np.exp(rows.log_share) * (rows.var + (rows.mean - rows.centre) ** 2), axis=0)
    out = np.full((3, len(sign)), np.nan)
    out[:, proper] = sign[proper] * rows.centre, total, log_proba
    slope, temper = np.exp(theta)
    return LeftOut(float(slope), float(temper), Cavities(out[0], out[1]), out[2])


def rows_left_out(sign, weight, node_weight, nodes):
    """Return the `RowsLeftOut` with proper `Cavities` of all nodes, and which rows these are."""
    mean, var = _of_nodes(sign, nodes)
    proper = np.all(np.isfinite(var), axis=0)
    mean, var = mean[:, proper], var[:, proper]
    moments = np.array(logistic_moments(mean, var, rough=mean.shape[1] >= _BY.many_rows))
    log_share = log_weights_without(node_weight, moments[0], weight[proper])
    centre = np.sum(np.exp(log_share) * mean, axis=0)
    return RowsLeftOut(mean, var, moments, log_share, centre, weight[proper]), proper


def best_of_sums(n, sums, blind=True):
    """Return theta = (log a, log t) of highest density, by few looks at the rows.

    `sums(theta)` are the `ScoreSums` of n rows, which may be anywhere.
    """

    def scores(theta):
        return _Scores.at(theta, sums(theta))

    start, close = np.zeros(2), _BY.close_a_row * n if blind else _BY.close
    return _maximum(start, scores(start), scores, close, blind)[0]


def calibrated_classes(factor, y, weight, left, how):
    """Return the `LeftOut` of rows of class y (n,) whose classes have one joint posterior.

    `factor` is that of all classes, `left` the `Cavities` (K, n); `how` as in `calibrated`.
    """
    proper = np.all(np.isfinite(left.var), axis=0)
    mean, var, own = left.mean.T[proper], left.var.T[proper], weight[proper]

    def scores(theta):
        slope = np.exp(theta[0])
        m, v = slope * mean, slope**2 * np.exp(theta[1]) * var
        log_z, slope_m, slope_v = factor.log_z_slopes(y[proper], m, v)
        by_mean, by_variance = np.sum(slope_m * m, axis=1), np.sum(slope_v * v, axis=1)
        slopes = np.stack([by_mean + 2.0 * by_variance, by_variance])
        return _Scores.at(theta, ScoreSums.over(log_z, slopes, own), log_z)

    theta = np.zeros(2)
    at = scores(theta)
    if how == "loo":
        theta, at = _maximum(theta, at, scores, _BY.close_classes)
    log_proba = np.full(len(y), np.nan)
    log_proba[proper] = at.log_proba
    slope, temper = np.exp(theta)
    return LeftOut(float(slope), float(temper), left, log_proba)


def _maximum(theta, at, scores, close=_BY.close, blind=False):
    """Return the maximum and the `_Scores` there, by BFGS from the expected curvature.

    It ends where a step promises no more nats than `close`; a `blind` search takes it without a
    look, and the scores are those before it.
    """
    curvature: Any = at.curvature
    for _ in range(50):
        # weights that differ by many orders of magnitude leave it without a rank of two
        step = np.linalg.lstsq(curvature, at.gradient, rcond=None)[0]
        if 0.5 * step @ at.gradient <= close:
            return (theta + step if blind else theta), at
        step = step * min(1.0, 1.0 / np.max(np.abs(step)))
        new = scores(theta + step)
        while not new.value > at.value:
            step = 0.5 * step
            if np.max(np.abs(step)) < 1e-9:  # rounding hides any gain
                return theta, at
            new = scores(theta + step)
        turned = at.gradient - new.gradient
        theta, at = theta + step, new
        bent = turned @ step > 0
        curvature = learned_curvature(curvature, step, turned) if bent else at.curvature
    return theta, at


def noise_temper(gap, var, noise, weight):
    """Return the factor of a noise variance at which rows are best predicted from the others.

    gap (n,) are responses minus their means given the other rows, var (n,) the variances of these
    means, weight (n,) the copies of each. The prior of the factor is that of the scale of the
    variance of a classifier.

    Errors are taken as normal. Student's t with degrees of freedom chosen in the same way halves
    the held-out loss where columns have heavy tails and y is no line in them (146 x 216, 20 sets:
    1.12 to .49). On the 209 computers whose names are columns it is surer than right: .11 to .26,
    and 90 % intervals cover .81 in place of .91. A scale of `var` beside that of the noise changes
    none of this.
    """

    def scores(theta):
        own = noise * np.exp(theta[1])
        square = gap**2 / (var + own)
        log_proba = -0.5 * (np.log(2.0 * np.pi * (var + own)) + square)
        slopes = np.stack([np.zeros(len(gap)), 0.5 * (square - 1.0) * own / (var + own)])
        return _Scores.at(theta, ScoreSums.over(log_proba, slopes, weight))

    # a noise that is small beside the variances leaves the density flat up to another maximum
    most = max(np.log(np.max(gap**2, initial=noise) / noise), _BY.noise_step)
    each = [(t, scores(t)) for t in np.outer(np.arange(0.0, most, _BY.noise_step), [0.0, 1.0])]
    return float(np.exp(_maximum(*max(each, key=lambda pair: pair[1].value), scores)[0][1]))
