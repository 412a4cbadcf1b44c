"""Bayesian estimators for scikit-learn on one engine of expectation propagation."""

__version__ = "0.1.0"

__all__ = ["__version__"]
