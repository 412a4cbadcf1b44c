"""Expectation propagation between partitions: sites of whole parts about the shared parameters."""
