"""Multilevel logistic regression by expectation propagation over partitions."""

from ._classifier import HierarchicalEPLogistic

__all__ = ["HierarchicalEPLogistic"]
