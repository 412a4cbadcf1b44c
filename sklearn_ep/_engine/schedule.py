"""Sweeps of EP that change one site after another, each at the marginals the others have left.

A parallel sweep asks the posterior once for all sites, and may swing to and fro where coordinates
are correlated. A sequential one has no such echo, for some Python at every site.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import blas


class JointMarginals:
    """Means (k,) and covariance (k, k) of coordinates, kept up to date while their sites change."""

    def __init__(self, mean: np.ndarray, cov: np.ndarray) -> None:
        self.mean, self._cov = mean.copy(), np.array(cov, order="F")

    def swept(
        self,
        sites: np.ndarray,
        updated: Callable[[int, np.ndarray, Any, Any], np.ndarray],
        natural: Callable[[int, np.ndarray], Any],
        share: float,
    ) -> np.ndarray:
        """Return sites (2, k) after each has taken a share of its update, one after another.

        `updated(i, site, mean, var)` is the undamped site at a marginal, `natural(i, site)` the
        precision and shift by which a site enters the posterior. A site whose change would leave no
        posterior stays. O(k^3).
        """
        sites = sites.copy()
        for i, own in enumerate(sites.T):
            new = own + share * (updated(i, own, self.mean[i], self._cov[i, i]) - own)
            if self._changed(i, *np.subtract(natural(i, new), natural(i, own))):
                own[:] = new
        return sites

    def _changed(self, i: int, precision: Any, shift: Any) -> bool:
        """Add to the site of a coordinate; return whether that leaves a posterior."""
        ratio = 1.0 + precision * self._cov[i, i]
        # next to improper; of six fits of 100 bare steps none moves between 1e-4 and 1e-12
        if not ratio > 1e-8:
            return False
        row = self._cov[i].copy()
        column = row / ratio
        self.mean += column * (shift - precision * self.mean[i])
        self._cov = blas.dger(-precision, column, row, a=self._cov, overwrite_a=1)
        return True


def towards(x: np.ndarray, swept: np.ndarray, share: float) -> np.ndarray:
    """Return the target of sites x whose damped step, of that share, leads to the swept ones."""
    return x + (swept - x) / share
