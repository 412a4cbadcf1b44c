"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

from . import active_learning, datasets
from .convex import ConvexVariationalLogistic
from .gaussian_process import EPGaussianProcessClassifier
from .relaxed import RelaxedEPClassifier
from .spike_slab import SpikeSlabRegressor

__version__ = "0.1.0"

__all__ = [
    "ConvexVariationalLogistic",
    "EPGaussianProcessClassifier",
    "RelaxedEPClassifier",
    "SpikeSlabRegressor",
    "__version__",
    "active_learning",
    "datasets",
]
