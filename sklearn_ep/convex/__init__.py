"""Bayesian linear models by convex variational bounds: logistic and linear regression."""

from ._classifier import ConvexVariationalLogistic
from ._regressor import ConvexVariationalRegressor

__all__ = ["ConvexVariationalLogistic", "ConvexVariationalRegressor"]

# pickles and documentation name a class where users import it from
ConvexVariationalLogistic.__module__ = "sklearn_ep"
ConvexVariationalRegressor.__module__ = "sklearn_ep"
