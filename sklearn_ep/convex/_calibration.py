"""Calibration of a linear classifier by leave-one-out: two numbers from the cavities of the rows.

Slope a and temper t turn the posterior N(m, v) of a predictor into N(a m, a^2 t v). One prior
variance for all columns is often wrong where there are many: what leaving a row out tells of its
label then says by how much (stacking of cavities, Opper and Winther 2000; a tempered posterior,
Gruenwald 2012).
"""

from typing import Any, NamedTuple

import numpy as np

from .._engine.averaging import mixture_moments
from .._engine.quadrature import logistic_moments

__all__ = ["Cavities", "LeftOut", "calibrated", "cavities", "mixed_cavities"]

# Standard deviations of the normal priors of log a and log t: they keep both near one where rows
# are few, and where labels are separable and any slope would do.
_PRIOR_SD = np.array([0.3, 1.0])
_MOST_STEPS, _HALVINGS = 50, 30
_LONGEST = 1.0  # step in log a and log t
_CLOSE = 1e-6  # nats that a further step may gain


class Cavities(NamedTuple):
    """Mean and variance (n,) of the predictor of each row without its own label.

    nan where there is no proper one, which takes sampled variances.
    """

    mean: np.ndarray
    var: np.ndarray


class LeftOut(NamedTuple):
    """Slope and temper, and what the other rows say of each: `log_proba` (n,) of its own label."""

    slope: float
    temper: float
    cavities: Cavities
    log_proba: np.ndarray


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


def mixed_cavities(weight, parts):
    """Return mean and variance of the mixture of the cavities of several nodes."""
    means, variances = (np.array(values) for values in zip(*parts, strict=True))
    return Cavities(*mixture_moments(weight, means, variances))


class _Scores(NamedTuple):
    """Log density of (log a, log t), its gradient (2,), and the expected curvature (2, 2)."""

    value: float
    gradient: np.ndarray
    curvature: np.ndarray
    log_proba: np.ndarray


def _scores(theta, mean, var, weight):
    """Return the `_Scores` at theta = (log a, log t), of rows with means towards their labels."""
    slope, temper = np.exp(theta)
    m, v = slope * mean, slope**2 * temper * var
    log_z, gradient, curvature = logistic_moments(m, v)
    by_variance = 0.5 * (gradient**2 - curvature) * v
    each = np.stack([gradient * m + 2.0 * by_variance, by_variance])
    value = float(weight @ log_z - 0.5 * np.sum((theta / _PRIOR_SD) ** 2))
    total = each @ weight - theta / _PRIOR_SD**2
    return _Scores(value, total, (each * weight) @ each.T + np.diag(_PRIOR_SD**-2.0), log_z)


def calibrated(sign, weight, rows, how):
    """Return the `LeftOut` of rows with labels in {-1, +1} and weight (n,) copies.

    `rows` are their `Cavities`. `how` is "loo", or None for a slope and a temper of one.
    """
    proper = np.isfinite(rows.var)
    data = (sign[proper] * rows.mean[proper], rows.var[proper], weight[proper])
    theta = np.zeros(2)
    at = _scores(theta, *data)
    if how == "loo":
        theta, at = _maximum(theta, at, data)
    log_proba = np.full(len(sign), np.nan)
    log_proba[proper] = at.log_proba
    slope, temper = np.exp(theta)
    return LeftOut(float(slope), float(temper), rows, log_proba)


def _maximum(theta, at, data):
    """Return the maximum and the `_Scores` there, by BFGS from the expected curvature."""
    curvature: Any = at.curvature
    for _ in range(_MOST_STEPS):
        step = np.linalg.solve(curvature, at.gradient)
        if 0.5 * step @ at.gradient <= _CLOSE:
            break
        step *= min(1.0, _LONGEST / np.max(np.abs(step)))
        new = _higher(theta, at, step, data)
        if new is None:
            break
        theta, before, at, step = new[0], at, new[1], new[0] - theta
        turned = before.gradient - at.gradient
        if turned @ step > 0:
            image = curvature @ step
            curvature = curvature - np.outer(image, image) / (step @ image)
            curvature = curvature + np.outer(turned, turned) / (turned @ step)
        else:
            curvature = at.curvature
    return theta, at


def _higher(theta, at, step, data):
    """Return a point along the step with a higher log density; None where rounding hides any."""
    for _ in range(_HALVINGS):
        new = _scores(theta + step, *data)
        if new.value > at.value:
            return theta + step, new
        step = 0.5 * step
    return None
