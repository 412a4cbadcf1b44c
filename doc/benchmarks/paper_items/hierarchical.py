"""Hierarchical EP (Gelman and others, 2014)."""

TITLE = "Hierarchical EP (Gelman and others, 2014)"
ABOUT = """
"""
ITEMS = []
