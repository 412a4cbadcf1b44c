"""Newton's method for a convex penalty of a linear predictor: the inner loop of the double loop."""

from typing import NamedTuple

import numpy as np

from .._engine.super_gaussian import Penalty

__all__ = ["Inner", "minimise"]

_SUFFICIENT = 1e-4


class Inner(NamedTuple):
    """A point of the inner problem.

    Attributes
    ----------
    u, s : ndarray of shape (n,) and (q,)
        Weights and predictors B u.
    prior, site : Penalty
        Penalties of the weights and of the rows, with their derivatives.
    value : float
        The penalised loss.
    n_newton : int
        Steps that led here.
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
    """Minimise the sum of a penalty of the weights and one of the predictors.

    Parameters
    ----------
    penalties : callable
        `penalties(u, s)` -> the `Penalty` of the weights and of the rows.
    transpose : callable
        v -> B' v.
    direction : callable
        `direction(point, gradient, rtol)` -> (d, B d) with H d = -gradient to a relative residual
        of `rtol`, H the Hessian at the point.
    u, s : ndarray
        Start and its predictors.
    scale : float
        Gradients are measured in units of it.
    tol : float
        Stop once the norm of the gradient is below tol * scale.
    max_iter : int
        Bound on the steps.

    Returns
    -------
    Inner

    Notes
    -----
    Inexact Newton with the forcing term min(0.1, sqrt(|g| / scale)) and Armijo backtracking, which
    costs no products because B d is known. When the expected decrease is below the resolution of
    the objective one last full step is taken: it is within rounding of the minimum.
    """
    point = _point(penalties, u, s, 0)
    for _ in range(max_iter):
        gradient = point.prior.slope + transpose(point.site.slope)
        size = float(np.linalg.norm(gradient)) / scale
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
