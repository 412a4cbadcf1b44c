"""Scalar factors: one class says what a likelihood or prior does to a one-dimensional Gaussian."""
