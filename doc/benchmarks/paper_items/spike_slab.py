"""Convergent EP for spike and slab (Hernandez-Lobato and Hernandez-Lobato, 2011)."""

TITLE = "Convergent EP for spike and slab (Hernandez-Lobato and Hernandez-Lobato, 2011)"
ABOUT = """
"""
ITEMS = []
