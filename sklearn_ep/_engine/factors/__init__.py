"""Scalar factors: one class says what a likelihood or prior does to a one-dimensional Gaussian."""

from .base import Factor, Tilted
from .likelihoods import LIKELIHOODS, LabelNoise, Logit, Probit, normal_hazard
from .step import LabelErrorStep
from .super_gaussian import BOUNDS, LaplaceSites, LogisticSites, local_site_precision

__all__ = [
    "BOUNDS",
    "LIKELIHOODS",
    "Factor",
    "LabelErrorStep",
    "LabelNoise",
    "LaplaceSites",
    "LogisticSites",
    "Logit",
    "Probit",
    "Tilted",
    "local_site_precision",
    "normal_hazard",
]
