"""Generators of the experiments in the papers, with the truth returned."""

import numpy as np
from scipy.special import expit
from sklearn.utils import check_random_state

__all__ = ["make_hierarchical_logistic"]


def make_hierarchical_logistic(
    n_groups=50, n_per_group=50, n_features=50, *, tau=2.0, coef_scale=1.0, random_state=None
):
    """Generate a binary response with a random intercept in each group.

    Log odds are x' beta + a_g with standard normal x, beta ~ N(0, coef_scale^2) and
    a_g ~ N(0, tau^2). The defaults are the size of the first simulated experiment of [1]_;
    ``n_groups=1000`` is that of the second.

    Parameters
    ----------
    n_groups : int, default=50
        Number of groups J.
    n_per_group : int, default=50
        Rows in each group.
    n_features : int, default=50
        Number of columns D.
    tau : float, default=2.0
        Standard deviation of the group effects.
    coef_scale : float, default=1.0
        Standard deviation of the coefficients.
    random_state : int, RandomState instance or None, default=None
        Seed.

    Returns
    -------
    X : ndarray of shape (J * n_per_group, D)
        Columns.
    y : ndarray of shape (J * n_per_group,)
        Labels 0 and 1.
    groups : ndarray of shape (J * n_per_group,)
        Number of the group of each row.
    coef : ndarray of shape (D,)
        True coefficients.
    group_effects : ndarray of shape (J,)
        True group effects.

    References
    ----------
    .. [1] A. Gelman et al., "Expectation propagation as a way of life", arXiv:1412.4869, first
       version, 2014, section 5.

    Examples
    --------
    >>> from sklearn_ep.datasets import make_hierarchical_logistic
    >>> X, y, groups, coef, effects = make_hierarchical_logistic(8, 10, 3, random_state=0)
    >>> X.shape, coef.shape, effects.shape
    ((80, 3), (3,), (8,))
    """
    rng = check_random_state(random_state)
    groups = np.repeat(np.arange(n_groups), n_per_group)
    X = rng.standard_normal((len(groups), n_features))
    coef = coef_scale * rng.standard_normal(n_features)
    group_effects = tau * rng.standard_normal(n_groups)
    y = (rng.uniform(size=len(groups)) < expit(X @ coef + group_effects[groups])).astype(int)
    return X, y, groups, coef, group_effects
