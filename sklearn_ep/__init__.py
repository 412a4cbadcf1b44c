"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

from .gaussian_process import EPGaussianProcessClassifier
from .spike_slab import SpikeSlabRegressor

__version__ = "0.1.0"

__all__ = ["EPGaussianProcessClassifier", "SpikeSlabRegressor", "__version__"]
