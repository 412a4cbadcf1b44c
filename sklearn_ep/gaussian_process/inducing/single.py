"""Covariances with inducing points in single precision, for the passes of learning."""

import numpy as np

from .._kernels import StationaryCross

__all__ = ["SingleCross", "rows_times", "times_rows"]

# Squared norms, in lengths, up to which single precision knows distances to a hundred thousandth.
_LARGEST_NORM = 100.0


def rows_times(W, v):
    """Return diag(v) W in the float type of W."""
    return v.astype(W.dtype, copy=False)[:, None] * W


def times_rows(v, W):
    """Return v W (m,) in the float type of W."""
    return v.astype(W.dtype, copy=False) @ W


class SingleCross(StationaryCross):
    """The covariances of a `StationaryCross` with blocks of rows in single precision.

    Blocks whose distances that does not carry stay as they are. Rows are centred before they are
    rounded: columns may lie far from zero.
    """

    def __init__(self, cross):
        vars(self).update(vars(cross))  # what is known of the points is not made twice
        self.moderate = self.B_norms.max() < _LARGEST_NORM
        if self.moderate:  # others may be beyond the range of single precision
            self.rounded = self.B.astype(np.float32)
            self.factor = -2.0 * np.ascontiguousarray(self.rounded.T)
            self.rounded_norms = self.B_norms.astype(np.float32)

    def block(self, X):
        """Return the covariances (n, m) with Z and what `contract` wants back."""
        A = (X - self.centre) / self.scale
        norms = np.einsum("ij,ij->i", A, A)
        if not (self.moderate and norms.max(initial=0.0) < _LARGEST_NORM):
            return super().block(X)
        A = A.astype(np.float32)
        D = A @ self.factor
        D += norms.astype(np.float32)[:, None]
        D += self.rounded_norms
        K, slope = self.of_squares(np.maximum(D, 0.0, out=D))
        return K, (A, K, slope)

    def rounded_block(self, kept):
        """Return what `block` kept of the points, in single precision where that carries it."""
        if not self.moderate:
            return kept
        _, K, slope = kept
        own = K.astype(np.float32)
        return self.rounded, own, own if slope is K else slope.astype(np.float32)

    def _moments(self, P, A):
        if A.dtype != np.float32:
            return super()._moments(P, A)
        P, B = P.astype(np.float32, copy=False), self.rounded
        rows, cols = P @ np.ones(len(B), np.float32), np.ones(len(P), np.float32) @ P
        towards = P.T @ A
        pulls = towards - cols[:, None] * B
        return rows @ A**2 - np.einsum("ij,ij->j", B, towards + pulls), pulls
