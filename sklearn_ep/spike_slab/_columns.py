"""Columns of a linear regression as its posteriors need them: scaled, in blocks, or rounded.

While hyperparameters are learned most columns may be in single precision: the few with the widest
priors, which hold nearly all of what y says, stay in double.
"""

import numpy as np

__all__ = ["BLOCK_BYTES", "DoubleColumns", "RoughColumns", "column_blocks", "worth_rounding"]

# A block of scaled columns: large enough for BLAS, small next to a large X. Halved: 1.04 times the
# CPU of a posterior at 100 x 40,000; doubled: .89, for twice the memory.
BLOCK_BYTES = 2**24
# Entries of X from which single precision saves time; it is for one block, to take little memory.
LEAST_SINGLE = 50_000
# Largest entry, and prior variance, in single precision: their products stay far from its range.
LARGEST_SINGLE = 1e6
# Columns a row from which single precision saves time: as many columns as rows stay in double.
MANY_COLUMNS = 5


def column_blocks(X):
    """Column slices of about BLOCK_BYTES."""
    n, d = X.shape
    step = max(1, BLOCK_BYTES // (8 * n))
    return [slice(a, min(a + step, d)) for a in range(0, d, step)]


def worth_rounding(X):
    """Return whether single precision saves time, takes little memory and holds the entries."""
    few = X.shape[1] < MANY_COLUMNS * X.shape[0]  # the widest are a large part
    if few or not LEAST_SINGLE <= X.size <= BLOCK_BYTES // 8:
        return False
    return max(X.max(), -X.min()) <= LARGEST_SINGLE


class DoubleColumns:
    """The columns of X, in double precision."""

    def __init__(self, X):
        self.X = X

    def at(self, scale, low):
        """Return the columns for prior variances (d,), `low` being those with low sites."""
        return self

    def scaled(self, root):
        """Yield (index, columns times their roots (d,)), which may be written to."""
        for block in column_blocks(self.X):
            yield block, self.X[:, block] * root[block]

    def times(self, v):
        """Return X v."""
        return self.X @ v

    def times_rows(self, u):
        """Return X'u."""
        return self.X.T @ u


class RoughColumns:
    """The columns of X for learning: as many as there are rows in double precision, others not.

    What the sums of the others are wrong by is a ten millionth of them.
    """

    def __init__(self, X):
        self.X, self.rounded = X, X.astype(np.float32)
        self.size = np.einsum("ij,ij->j", X, X)

    def at(self, scale, low):
        """Return the columns for prior variances (d,), those with `low` sites in double."""
        if scale.max() > LARGEST_SINGLE:
            return DoubleColumns(self.X)
        n, d = self.X.shape
        weight = scale * self.size
        weight[low] = np.inf
        wide = np.sort(np.argpartition(weight, d - n)[d - n :])
        return _TwoPrecisions(self.X[:, wide], wide, self.rounded)


class _TwoPrecisions:
    """Columns `wide` of X in double precision, and all of them, `rounded`, in single."""

    def __init__(self, X, wide, rounded):
        self.X, self.wide, self.rounded = X, wide, rounded

    def _others(self, v):
        """Return the numbers (d,) of the columns that are not wide, rounded."""
        out = v.astype(np.float32)
        out[self.wide] = 0.0
        return out

    def scaled(self, root):
        """Yield (index, columns times their roots (d,)), first those in single precision."""
        yield slice(0, len(root)), self.rounded * self._others(root)
        yield self.wide, self.X * root[self.wide]

    def times(self, v):
        """Return X v."""
        return self.rounded @ self._others(v) + self.X @ v[self.wide]

    def times_rows(self, u):
        """Return X'u."""
        out = (self.rounded.T @ u.astype(np.float32)).astype(np.float64)
        out[self.wide] = self.X.T @ u
        return out
