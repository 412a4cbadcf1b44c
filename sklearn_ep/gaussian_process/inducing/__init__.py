"""Gaussian processes through inducing points: passes over rows, EP, learning."""
