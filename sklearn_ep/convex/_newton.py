"""Newton's method for a convex penalty of a linear predictor: the inner loop of the double loop."""

from typing import NamedTuple

import numpy as np

from .._engine.super_gaussian import Penalty

__all__ = ["Inner", "minimise"]

_SUFFICIENT = 1e-4


class Inner(NamedTuple):
    """A point of the inner problem: weights u (n,) and predictors s = B u (q,).

    `prior` and `site` are the penalties of the weights and of the rows, with their derivatives,
    `value` the penalised loss, `n_newton` the steps that led here.
    """

    u: np.ndarray
    s: np.ndarray
    prior: Penalty
    site: Penalty
    value: float
    n_newton: int


def _point(penalties, u, s, n_newton):
    prior, site = penalties(u, s)
    return Inner(u, s, prior, site, float(np.sum(prior.value) + np.sum(site.value)), n_newton)


def _search(penalties, point, d, Bd, slope, slack):
    """Backtrack from the full step to a sufficient decrease; None where rounding hides any."""
    step = 1.0
    for _ in range(40):
        new = _point(penalties, point.u + step * d, point.s + step * Bd, point.n_newton + 1)
        if new.value <= point.value + _SUFFICIENT * step * slope + slack:
            return new
        step *= 0.5
    return None


def minimise(penalties, transpose, direction, u, s, *, scale, tol, max_iter):
    """Minimise a penalty of the weights u plus one of the predictors s = B u, from u and s.

    `penalties(u, s)` gives both, `transpose(v)` is B' v, and `direction(point, gradient, rtol)` is
    (d, B d) with H d = -gradient to a relative residual of `rtol`, H the Hessian at the point. Ends
    once the norm of the gradient is below tol * scale.

    Inexact Newton with the forcing term min(0.1, sqrt(|g| / scale)) and Armijo backtracking, which
    costs no products because B d is known. When the expected decrease is below the resolution of
    the objective one last full step is taken: it is within rounding of the minimum.
    """
    point = _point(penalties, u, s, 0)
    for _ in range(max_iter):
        gradient = point.prior.slope + transpose(point.site.slope)
        # of Python floats: beyond their range the ratio is infinite, and says what it should
        size = float(np.linalg.norm(gradient)) / float(scale)
        if size <= tol:
            break
        d, Bd = direction(point, gradient, min(0.1, np.sqrt(size)))
        slope = float(gradient @ d)
        resolution = np.finfo(float).eps * (1.0 + abs(point.value))
        if -slope <= 64.0 * resolution:
            return _point(penalties, point.u + d, point.s + Bd, point.n_newton + 1)
        new = _search(penalties, point, d, Bd, slope, 8.0 * resolution)
        if new is None:
            break
        point = new
    return point
