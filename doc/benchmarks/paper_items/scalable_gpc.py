"""Scalable GP classification by EP (Hernandez-Lobato and Hernandez-Lobato, 2016)."""

TITLE = "Scalable GP classification by EP (Hernandez-Lobato and Hernandez-Lobato, 2016)"
ABOUT = """
"""
ITEMS = []
