"""Scalar factors: one class says what a likelihood or prior does to a one-dimensional Gaussian."""

from .base import Factor, Tilted
from .likelihoods import LIKELIHOODS, LabelNoise, Logit, Probit, normal_hazard
from .step import LabelErrorStep

__all__ = [
    "LIKELIHOODS",
    "Factor",
    "LabelErrorStep",
    "LabelNoise",
    "Logit",
    "Probit",
    "Tilted",
    "normal_hazard",
]
