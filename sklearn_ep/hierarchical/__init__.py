"""Multilevel logistic regression by expectation propagation over partitions."""

from ._classifier import HierarchicalEPLogistic

__all__ = ["HierarchicalEPLogistic"]

# pickles and documentation name a class where users import it from
HierarchicalEPLogistic.__module__ = "sklearn_ep"
