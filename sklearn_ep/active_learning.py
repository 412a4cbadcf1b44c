"""Choosing the rows to label next, from posterior means and variances."""
