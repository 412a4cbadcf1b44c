"""ConvexVariationalLogistic as one posterior, for tests that are about that posterior."""

from sklearn_ep import ConvexVariationalLogistic

__all__ = ["plain_logistic"]


def plain_logistic(prior_variance=1.0, **kwargs):
    """Return the estimator without calibration and averages: a learned scale is at its mode."""
    plain = dict(calibration=None, hyperparameters="mode")
    return ConvexVariationalLogistic(prior_variance, **plain | kwargs)
