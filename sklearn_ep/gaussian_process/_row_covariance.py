"""The covariance matrix of the rows and its contracted derivatives, as dense models need both."""

import numpy as np
from scipy.spatial.distance import pdist, squareform

from ._kernels import StationaryCross, contract, cross_covariance, self_covariance

__all__ = ["RowCovariance"]


class RowCovariance:
    """Covariance (n, n) of the latent values of rows, white noise included, and its derivatives.

    A constant times RBF is its own derivative in the squared distances, which are then formed once
    for both.

    Parameters
    ----------
    kernel : sklearn kernel
    X : ndarray of shape (n, d)

    Attributes
    ----------
    K : ndarray of shape (n, n)
    """

    def __init__(self, kernel, X):
        self.kernel, self.X, self._kept = kernel, X, None
        self._cross = cross_covariance(kernel, X)
        if isinstance(self._cross, StationaryCross) and self._cross.is_rbf:
            D = squareform(pdist(self._cross.B, "sqeuclidean"))
            D *= -0.5
            D += np.log(self._cross.amplitude)
            self.K = np.exp(D, out=D)
            self._kept = self._cross.B, self.K, self.K
        else:
            self.K = self_covariance(kernel, X)

    def contract(self, G):
        """Return sum(G * dK/dtheta) (p,)."""
        if not isinstance(self._cross, StationaryCross):
            return contract(self.kernel, self.X, G)
        kept = self._cross.block(self.X)[1] if self._kept is None else self._kept
        return self._cross.contract(kept, G, False)[0]
