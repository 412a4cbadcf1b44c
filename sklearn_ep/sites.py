"""Priors of coefficients as small classes: super-Gaussian sites t(s) = exp(-loss(s^2)).

For `ConvexVariationalLogistic` (``prior=``) and `ConvexVariationalRegressor`. A prior of one's own
is a subclass of `SuperGaussianSite` with two formulas.
"""

from .convex._sites import HorseshoeSite, LaplaceSite, StudentTSite, SuperGaussianSite

__all__ = ["HorseshoeSite", "LaplaceSite", "StudentTSite", "SuperGaussianSite"]
