"""Simulated data of the experiments behind the estimators, with the truth returned."""

import numpy as np
from sklearn.utils import check_random_state

from ._base import check_number

__all__ = ["make_spike_slab_regression"]


def make_spike_slab_regression(
    n_samples=60,
    n_features=200,
    *,
    n_informative=8,
    noise=0.1,
    slab_std=1.0,
    correlation=0.0,
    intercept=0.0,
    random_state=None,
):
    """Draw a sparse linear regression: compressed sensing with Gaussian measurements.

    Parameters
    ----------
    n_samples : int, default=60
        Rows.
    n_features : int, default=200
        Columns, standard normal each.
    n_informative : int, default=8
        Coefficients that are not zero, at random places, drawn from N(0, slab_std^2).
    noise : float, default=0.1
        Standard deviation of the noise.
    slab_std : float, default=1.0
        Standard deviation of the coefficients that are not zero.
    correlation : float, default=0.0
        Correlation of neighbouring columns, in (-1, 1): column j has correlation
        ``correlation**k`` with column j + k.
    intercept : float, default=0.0
        Added to y.
    random_state : int, RandomState instance or None, default=None
        Seed.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
        Rows.
    y : ndarray of shape (n_samples,)
        Responses.
    coef : ndarray of shape (n_features,)
        True coefficients.

    References
    ----------
    .. [1] J. M. Hernandez-Lobato and D. Hernandez-Lobato, "Convergent expectation propagation in
       linear models with spike-and-slab priors", arXiv:1112.2289, 2011, section 4.

    Examples
    --------
    >>> from sklearn_ep.datasets import make_spike_slab_regression
    >>> X, y, coef = make_spike_slab_regression(20, 50, n_informative=3, random_state=0)
    >>> X.shape, int((coef != 0).sum())
    ((20, 50), 3)
    """
    check_number("n_samples", n_samples, 1, integer=True)
    check_number("n_features", n_features, 1, integer=True)
    check_number("n_informative", n_informative, 0, n_features, integer=True)
    check_number("noise", noise, 0)
    check_number("slab_std", slab_std, 0, boundaries="neither")
    check_number("correlation", correlation, -1, 1, boundaries="neither")
    rng = check_random_state(random_state)
    X = rng.standard_normal((n_samples, n_features))
    for j in range(1, n_features if correlation else 0):
        X[:, j] = correlation * X[:, j - 1] + np.sqrt(1 - correlation**2) * X[:, j]
    coef = np.zeros(n_features)
    places = rng.choice(n_features, n_informative, replace=False)
    coef[places] = slab_std * rng.standard_normal(n_informative)
    y = X @ coef + intercept + noise * rng.standard_normal(n_samples)
    return X, y, coef
