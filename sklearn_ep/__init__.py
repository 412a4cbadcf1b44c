"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

from .gaussian_process import EPGaussianProcessClassifier
from .hierarchical import HierarchicalEPLogistic

__version__ = "0.1.0"

__all__ = ["EPGaussianProcessClassifier", "HierarchicalEPLogistic", "__version__"]
