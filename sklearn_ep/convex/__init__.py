"""Bayesian linear models by convex variational bounds: logistic and linear regression."""

from ._classifier import ConvexVariationalLogistic
from ._regressor import ConvexVariationalRegressor

__all__ = ["ConvexVariationalLogistic", "ConvexVariationalRegressor"]
