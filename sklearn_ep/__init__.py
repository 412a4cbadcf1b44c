"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

from . import active_learning, datasets, sites
from .convex import ConvexVariationalLogistic, ConvexVariationalRegressor
from .gaussian_process import EPGaussianProcessClassifier, RelaxedEPClassifier
from .hierarchical import HierarchicalEPLogistic
from .spike_slab import SpikeSlabRegressor

__version__ = "0.2.0"

__all__ = [
    "ConvexVariationalLogistic",
    "ConvexVariationalRegressor",
    "EPGaussianProcessClassifier",
    "HierarchicalEPLogistic",
    "RelaxedEPClassifier",
    "SpikeSlabRegressor",
    "__version__",
    "active_learning",
    "datasets",
    "sites",
]

# What is saved, and what documentation links to, names a class where users import it from.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
