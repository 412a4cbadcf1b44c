"""Sparse linear regression and classification with spike-and-slab priors."""

from ._classifier import SpikeSlabClassifier
from ._regressor import SpikeSlabRegressor

__all__ = ["SpikeSlabClassifier", "SpikeSlabRegressor"]

# pickles and documentation name a class where users import it from
SpikeSlabClassifier.__module__ = SpikeSlabRegressor.__module__ = "sklearn_ep"
