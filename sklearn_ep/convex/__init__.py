"""Bayesian logistic regression by convex variational bounds."""

from ._classifier import ConvexVariationalLogistic

__all__ = ["ConvexVariationalLogistic"]
