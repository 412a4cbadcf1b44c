"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

from .gaussian_process import EPGaussianProcessClassifier
from .relaxed import RelaxedEPClassifier

__version__ = "0.1.0"

__all__ = ["EPGaussianProcessClassifier", "RelaxedEPClassifier", "__version__"]
