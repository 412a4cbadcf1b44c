"""Equal rows as one of so many copies, in an order that does not depend on that of the rows.

Where variances are sampled, solves end at a tolerance, and learning turns differences at the level
of rounding into visible ones; so do the sites of several classes. With rows merged and sorted,
weights and repeated rows, in any order, are one problem to the last bit.
"""

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from ._calibration import Cavities

__all__ = ["Copies", "find_copies"]

# Products with one random vector, relative to the largest, from which on rows are surely different.
_SAME = 1e-12


@dataclass
class Copies:
    """Which rows are copies of which.

    first (m,) are the rows that stand for theirs, group (n,) says for each row which of them does,
    weight (m,) is that of all copies and share (n,) that of each row in it.
    """

    first: np.ndarray
    group: np.ndarray
    weight: np.ndarray
    share: np.ndarray

    def of_rows(self, attributes):
        """Return the attributes of a `BinaryFit` to merged rows for all rows."""
        left = attributes["left_out"]
        cavities = Cavities(*(values[..., self.group] for values in left.cavities))
        new = dict(
            site_precision=attributes["site_precision"][..., self.group] * self.share,
            marginal_variance=attributes["marginal_variance"][..., self.group],
            left_out=left._replace(cavities=cavities, log_proba=left.log_proba[self.group]),
        )
        return attributes | new

    def of_class_rows(self, attributes, sites):
        """Return the same of a joint fit, whose sites x (2, m, K) are those of one copy.

        A row gets those of all its copies.
        """
        own = self.weight[self.group] * self.share
        precision, shift = (x.T[:, self.group] * own for x in sites)
        new = self.of_rows(attributes | dict(site_precision=sites[0].T))
        return new | dict(site_precision=precision, site_shift=shift)


def find_copies(X, y, weight):
    """Return the `Copies` among rows X (n, d), dense or CSR, of classes y with weight (n,) each."""
    key = X @ np.random.RandomState(0).standard_normal(X.shape[1])
    order = np.argsort(key, kind="stable")
    apart = np.diff(key[order], prepend=-np.inf) > _SAME * np.max(np.abs(key), initial=1.0)
    near = np.cumsum(apart)
    sort = np.lexsort((y[order], near))
    order, near = order[sort], near[sort]
    new = (np.diff(near, prepend=-1) > 0) | (np.diff(y[order], prepend=-1) != 0)
    doubtful = np.flatnonzero(~new)
    new[doubtful] = _differ(X, order[doubtful], order[doubtful - 1])
    group = np.empty(len(y), dtype=np.intp)
    group[order] = np.cumsum(new) - 1
    total = np.bincount(group, weights=weight)
    return Copies(order[new], group, total, weight / total[group])


def _differ(X, rows, others):
    """Return whether pairs of rows differ at all."""
    if not sp.issparse(X):
        return np.any(X[rows] != X[others], axis=1)
    return np.diff((X[rows] != X[others]).tocsr().indptr) > 0
