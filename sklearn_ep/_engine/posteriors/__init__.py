"""Posterior structures: how all sites together give marginals and evidence."""
