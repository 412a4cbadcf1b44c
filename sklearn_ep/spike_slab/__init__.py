"""Sparse linear regression with a spike-and-slab prior."""

from ._regressor import SpikeSlabRegressor

__all__ = ["SpikeSlabRegressor"]
