"""Convex variational inference (Nickisch and Seeger, 2009)."""

TITLE = "Convex variational inference (Nickisch and Seeger, 2009)"
ABOUT = """
"""
ITEMS = []
