"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

from .gaussian_process import EPGaussianProcessClassifier
from .relaxed import RelaxedEPClassifier
from .spike_slab import SpikeSlabRegressor

__version__ = "0.1.0"

__all__ = [
    "EPGaussianProcessClassifier",
    "RelaxedEPClassifier",
    "SpikeSlabRegressor",
    "__version__",
]
