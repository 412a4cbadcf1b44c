"""Sparse linear regression with a spike-and-slab prior."""

from ._regressor import SpikeSlabRegressor

__all__ = ["SpikeSlabRegressor"]

# pickles and documentation name a class where users import it from
SpikeSlabRegressor.__module__ = "sklearn_ep"
