"""What sites leave of dense posteriors: variances by linear response, evidence by pairs of rows.

The sites answer a push b on the latent values, prior times exp(b' f), so that means do not move by
the covariance S of the approximation times b. Their derivative in b is a covariance that corrects
it (Opper and Winther, "Variational linear response", 2003). With R the correlations, v the
variances, w copies of each row, g and k skewness and excess kurtosis of the tilted distributions,
and F = sqrt(w) R^2 sqrt(w) - 1 with squares entry by entry, moments that match before and after
give

    H = sqrt(w) g [F (1 + (g^2 - k) F / 2)^-1] g sqrt(w) / 2,    dm / db = S + S N S,

where N = v^-1/2 (1 - H R)^-1 H v^-1/2.

The evidence is that of the approximation times the mean, under it, of the product of all ratios of
tilted distribution to marginal. The ratios have mean one, and their logs first differ from those of
the product by pairs of rows, of which third and fourth cumulants count most (Opper, Paquet and
Winther, 2013): with a the skewness times w and b the excess kurtosis times w,

    sum over pairs of copies of  a a' R^3 / 6 + b b' R^4 / 24.
"""

import warnings
from typing import Any

import numpy as np
from scipy.special import logsumexp

from .._engine import gaussian
from .._engine.sites import Cavity, Sites, copy_cavity
from .._estimator.fitting import signs_of
from ._dense_gp import DenseGPPosterior

# Step of differences in standard deviations of the cavity: means then respond as those of sites
# found anew do, to 1e-4, with all likelihoods.
_STEP = 0.03


def tilted_shape(factor: Any, y: Any, cav: Cavity) -> tuple[np.ndarray, np.ndarray]:
    """Return skewness and excess kurtosis (n,) of factor times cavity, by differences."""
    step = _STEP * np.sqrt(cav.var)
    below, own, above = (factor.tilted(y, cav.mean + s, cav.var)[2] for s in (-step, 0.0, step))
    var = cav.var * (1.0 - cav.var * own)
    third = -(cav.var**3) * (above - below) / (2.0 * step)
    fourth = -(cav.var**4) * (above - 2.0 * own + below) / step**2
    return third / var**1.5, fourth / var**2


def response(
    cov: np.ndarray, weight: np.ndarray, skewness: np.ndarray, excess: np.ndarray
) -> np.ndarray:
    """Return N (n, n): the covariance of values x grows by cov(x, rows) N cov(rows, x).

    Parameters
    ----------
    cov : ndarray of shape (n, n)
        Covariance of the latent values of the rows under the approximation.
    weight : ndarray of shape (n,)
        Copies of each row, over the share of a factor that its site matches.
    skewness, excess : ndarray of shape (n,)
        Of the tilted distributions of the rows.

    Raises
    ------
    ImproperPosterior
        If the response is no covariance: a fixed point that is not stable.
    """
    sd, root = np.sqrt(np.diagonal(cov)), np.sqrt(weight)
    R, eye = cov / np.outer(sd, sd), np.eye(len(cov))
    F = np.outer(root, root) * R**2 - eye
    F = np.linalg.solve((eye + 0.5 * (skewness**2 - excess)[:, None] * F).T, F)
    H = 0.5 * np.outer(root * skewness, root * skewness) * F
    half = gaussian.covariance_root(R)
    moved = H @ half
    left = -half.T @ moved
    gaussian.add_to_diagonal(left, 1.0)
    N = H + moved @ gaussian.cholesky_solve(gaussian.checked_cholesky(left), moved.T)
    return 0.5 * (N + N.T) / np.outer(sd, sd)


def evidence_of_pairs(
    cov: np.ndarray, weight: np.ndarray, skewness: np.ndarray, excess: np.ndarray
) -> float:
    """Return what pairs of copies of rows add to the log evidence; arguments as of `response`."""
    sd, total = np.sqrt(np.diagonal(cov)), 0.0
    R = cov / np.outer(sd, sd)
    for order, cumulant, share in ((3, skewness, 6.0), (4, excess, 24.0)):
        copies = weight * cumulant
        total += 0.5 / share * (copies @ R**order @ copies - copies @ cumulant)
    return total


def check_responds(estimator, option):
    """Raise a ValueError unless the fit has sites of expectation propagation on its rows."""
    plan, posteriors = estimator._plan, estimator._posteriors
    of_rows = all(isinstance(p, DenseGPPosterior) for _, p in _parts(posteriors[0]))
    if not of_rows or plan is None:
        raise ValueError(
            f"{option}=True needs a dense fit of two classes or one class against the rest: give "
            "method='dense', multi_class='one_vs_rest'."
        )
    if plan.response_share is None:
        raise ValueError(
            f"{option}=True needs the fixed point of expectation propagation: give rule='ep'."
        )


def site_problems(estimator):
    """Return posterior, and signs, copies and exponent of the rows, of each problem of a fit."""
    plan, posteriors = estimator._plan, estimator._posteriors
    n, more = len(posteriors), (plan.weight, plan.response_share)
    return [(p, (signs_of(plan.y, k, n), *more)) for k, p in enumerate(posteriors)]


def corrections(estimator):
    """Return that of the log evidence and, relative and largest, that of a row's latent sd."""
    check_responds(estimator, "correct")
    evidence, most, X = 0.0, 0.0, estimator._plan.X
    for posterior, args in site_problems(estimator):
        shares, parts = zip(*_parts(posterior), strict=True)
        each = [evidence_of_pairs(*_shape_of_rows(part, *args)) for part in parts]
        evidence += float(logsumexp(each, b=shares))  # of an average, that of its mixture
        grown = np.sqrt(1.0 + added_variance(posterior, X, *args) / posterior.latent(X)[1])
        most = max(most, float(np.max(np.abs(grown - 1.0))))
    return evidence, most


def _parts(posterior):
    """Return pairs of weight and posterior: of the nodes of an average, or the one."""
    if hasattr(posterior, "posteriors"):
        return list(zip(posterior.weight, posterior.posteriors, strict=True))
    return [(1.0, posterior)]


def added_variance(posterior, X, y, weight, exponent):
    """Return what the response of sites adds to the variances (n_new,) at rows X.

    y and `weight` are labels in {-1, +1} and copies of the training rows, `exponent` is the share
    of a factor that its site matches. O(n^3) a node, and O(n^2) a row. A node of an average whose
    fixed point is not stable adds nothing, with a warning.
    """
    added, kept = np.zeros(len(X)), 0.0
    for share, part in _parts(posterior):
        try:
            moves = response(*_shape_of_rows(part, y, weight, exponent))
        except gaussian.ImproperPosterior:
            kept += share
            continue
        for rows in gaussian.row_blocks(len(X), most=part.block_rows):
            cov = part.covariance(X[rows], part.X)
            added[rows] += share * np.einsum("ij,ij->i", cov @ moves, cov)
    if kept:
        warnings.warn(
            f"EP has no stable fixed point at nodes with a share of {kept:.2g}; their variances "
            "stay as they are.",
            UserWarning,
            stacklevel=4,
        )
    return added


def _shape_of_rows(posterior, y, weight, exponent):
    """Return covariance, copies, skewness and excess kurtosis of the training rows."""
    cov = posterior.covariance(posterior.X, posterior.X)
    mean = posterior.kernel(posterior.X) @ posterior.alpha
    sites = Sites(*posterior.sites() / weight)
    cav = copy_cavity(sites, mean, np.diagonal(cov), weight, exponent)
    factor = posterior.factor if exponent == 1 else posterior.factor.powered(exponent)
    return cov, weight / exponent, *tilted_shape(factor, y, cav)
