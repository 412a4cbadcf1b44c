"""Relaxed EP (Qi and Guo, 2012)."""

TITLE = "Relaxed EP (Qi and Guo, 2012)"
ABOUT = """
"""
ITEMS = []
