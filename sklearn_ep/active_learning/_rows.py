"""Rows of a pool: taking them, checking their numbers, ordering them; a fixed design of them."""

import numpy as np
import scipy.sparse as sp
from sklearn.metrics import euclidean_distances
from sklearn.utils import check_array

from .._estimator.categories import CategoryCoder, category_columns
from .._estimator.tables import rows_at


def rows_of(X):
    """Return X so that rows can be taken by index: CSR if sparse, tables and arrays as they are."""
    if sp.issparse(X):
        return X.tocsr()
    return X if hasattr(X, "shape") else np.asarray(X)


def allowed_rows(n, candidates, exclude):
    """Return the sorted indices that may be chosen."""
    allowed = np.ones(n, dtype=bool)
    if candidates is not None:
        allowed[:] = False
        allowed[row_numbers("candidates", candidates, n)] = True
    if exclude is not None:
        allowed[row_numbers("exclude", exclude, n)] = False
    return np.flatnonzero(allowed)


def row_numbers(name, values, n):
    """Return checked row numbers, from themselves or from a mask of n rows."""
    index = np.asarray(values)
    if index.dtype == bool:
        if index.shape != (n,):
            raise ValueError(f"{name} is a mask of shape {index.shape}, for a pool of {n} rows.")
        return np.flatnonzero(index)
    if index.size and (index.ndim != 1 or index.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a one-dimensional array of row numbers.")
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"{name} has row numbers outside 0 to {n - 1}.")
    return index.astype(np.intp)


def best_first(values, count):
    """Return the places of so many scores, largest first; differences at rounding level are ties.

    Of ties the lowest place comes first.
    """
    finite = np.isfinite(values)
    scale = np.max(np.abs(values), initial=0.0, where=finite)
    keys = -(np.round(values / scale, 14) if scale > 0 else values)
    last = np.partition(keys, count - 1)[count - 1]
    near = np.flatnonzero(~(keys > last))  # scores that are no number, which come last, as well
    return near[np.argsort(keys[near], kind="stable")[:count]]


# Rows of the pool that a design looks at, for two matrices of so many squared numbers.
MOST_ROWS = 2000
# Differences of sums of distances that are rounding.
_ROUNDING = 1e-12


def design_rows(X, labelled, candidates, n_rows):
    """Return the candidates (n_rows,) that stand for the pool best, and what each adds.

    They are about its medoids, as the first phase of a search finds these [1]_: each lowers most
    the mean distance of a row of the pool to the nearest row that is labelled or chosen. On
    fifteen pools exchanges lower it by another .1 %. No label enters. Columns of larger scale count
    for more: standardise them first. O(MOST_ROWS^2) memory, the same rows for sparse and dense X.

    Parameters
    ----------
    X : ndarray, CSR matrix or table of shape (n, d)
    labelled, candidates : ndarray of int
        Rows that have a label, and rows that may be chosen.
    n_rows : int
        At most the number of candidates; ties go to the lowest index.

    Returns
    -------
    chosen : ndarray of int of shape (n_rows,)
        Those that lower the mean distance most come first.
    gain : ndarray of shape (n_rows,)
        Fall of the mean distance, in units of the largest one in the pool.

    Raises
    ------
    ValueError
        If X is not finite and numeric.

    References
    ----------
    .. [1] L. Kaufman and P. J. Rousseeuw, "Finding groups in data", Wiley, 1990, chapter 2.
    """
    # evenly spaced candidates stand for the pool, so that the choice needs no random numbers
    count = max(n_rows, min(len(candidates), MOST_ROWS - min(len(labelled), MOST_ROWS // 2)))
    seen = candidates[np.linspace(0, len(candidates) - 1, count).round().astype(int)]
    known = labelled[: MOST_ROWS // 2]
    distances = _distances(rows_at(X, np.concatenate([known, seen])))
    chosen, gains = _greedy(distances, len(known), n_rows)
    return seen[np.array(chosen) - len(known)], np.array(gains)


def _distances(rows):
    """Return the matrix of distances of rows, by inner products, in units of the largest."""
    if len(rows.shape) == 1:
        raise ValueError(
            "X_pool is one column, of texts for instance, between which there are no distances for "
            "a design of the first rows: transform it to numbers beforehand, or choose the first "
            "ten rows yourself."
        )
    if category_columns(rows):
        rows = CategoryCoder().fit_transform(rows)
    X = check_array(rows, accept_sparse="csr", dtype=np.float64, input_name="X")
    size = np.abs(X).max()
    X = X / size if size > 0 else X  # no square over- or underflows
    X = X if sp.issparse(X) else X - X.mean(axis=0)
    distances = euclidean_distances(X)
    longest = distances.max()
    return distances / longest if longest > 0 else distances


def _greedy(distances, n_known, n_rows):
    """Return rows that lower the mean distance to the nearest row most, and by how much each does.

    The first n_known rows are chosen already.
    """
    near = distances[:, :n_known].min(axis=1, initial=1.0)
    free, chosen, gains = np.arange(n_known, len(distances)), [], []
    for _ in range(n_rows):
        left = np.minimum(distances[:, free], near[:, None]).mean(axis=0)
        # the first of those that differ by rounding
        best = free[np.argmax(left <= left.min() + _ROUNDING * left.max())]
        gains.append(near.mean() - np.minimum(near, distances[:, best]).mean())
        near = np.minimum(near, distances[:, best])
        free = free[free != best]
        chosen.append(best)
    return chosen, gains
