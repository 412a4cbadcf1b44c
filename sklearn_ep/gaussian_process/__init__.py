"""Gaussian-process classification: dense or through inducing points."""

from ._classifier import EPGaussianProcessClassifier
from ._relaxed import RelaxedEPClassifier

__all__ = ["EPGaussianProcessClassifier", "RelaxedEPClassifier"]
