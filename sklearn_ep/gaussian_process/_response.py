"""Variances of dense posteriors corrected by the linear response of their sites."""

import warnings

import numpy as np
from sklearn.utils import gen_batches

from .._engine.gaussian import ImproperPosterior
from .._engine.linear_response import response, tilted_shape
from .._engine.sites import Sites, cavity
from ._dense_gp import DenseGPPosterior


def check_responds(estimator):
    """Raise a ValueError unless the fit has sites of expectation propagation on its rows."""
    plan, posteriors = estimator._plan, estimator._posteriors
    of_rows = all(isinstance(p, DenseGPPosterior) for _, p in _parts(posteriors[0]))
    if not of_rows or plan is None:
        raise ValueError(
            "corrected=True needs a dense fit of two classes or one class against the rest: give "
            "method='dense', multi_class='one_vs_rest'."
        )
    if plan.response_share is None:
        raise ValueError(
            "corrected=True needs the fixed point of expectation propagation: give rule='ep'."
        )


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
            moves = _response_of(part, y, weight, exponent)
        except ImproperPosterior:
            kept += share
            continue
        for rows in gen_batches(len(X), part.block_rows):
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


def _response_of(posterior, y, weight, exponent):
    """Return the `response` (n, n) of the training rows of one posterior."""
    cov = posterior.covariance(posterior.X, posterior.X)
    mean = posterior.kernel(posterior.X) @ posterior.alpha
    tau = posterior.precision
    sites = Sites(tau / weight, (posterior.alpha + tau * mean) / weight)
    cav = cavity(sites, mean, np.diagonal(cov), exponent)
    factor = posterior.factor if exponent == 1 else posterior.factor.powered(exponent)
    return response(cov, weight / exponent, *tilted_shape(factor, y, cav))
