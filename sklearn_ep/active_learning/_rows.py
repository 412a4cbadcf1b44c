"""Rows of a pool: taking them, checking their numbers, ordering them; a fixed design of them."""

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky, solve_triangular
from sklearn.utils import check_array

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


def best_first(values):
    """Return the order of scores, largest first; differences at rounding level are ties."""
    finite = np.isfinite(values)
    scale = np.max(np.abs(values), initial=0.0, where=finite)
    rounded = np.round(values / scale, 14) if scale > 0 else values
    return np.argsort(-rounded, kind="stable")


# Rows of the pool that a design looks at, for two matrices of so many squared numbers.
MOST_ROWS = 2000
# Share of the prior variance that a label leaves.
_NOISE = 0.1


def design_rows(X, labelled, candidates, n_rows):
    """Return the candidates (n_rows,) that tell most about the pool, and what each tells.

    A Gaussian process with the kernel exp(-|x - x'|^2 / D), D the mean squared distance of two
    rows, gets one row after another: the one that lowers the mean variance over the pool most,
    given the rows that are labelled already. No label enters. Columns of larger scale count for
    more: standardise them first. O(MOST_ROWS^2) memory, the same rows for sparse and dense X.

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
    gain : ndarray of shape (n_rows,)
        Fall of the mean variance, in units of the prior variance.

    Raises
    ------
    ValueError
        If X is not finite and numeric.
    """
    # evenly spaced candidates stand for the pool, so that the choice needs no random numbers
    count = max(n_rows, min(len(candidates), MOST_ROWS - min(len(labelled), MOST_ROWS // 2)))
    seen = candidates[np.linspace(0, len(candidates) - 1, count).round().astype(int)]
    known = labelled[: MOST_ROWS // 2]
    rows = rows_at(X, np.concatenate([known, seen]))
    K = _kernel(check_array(rows, accept_sparse="csr", dtype=np.float64, input_name="X"))
    if len(known):
        _include_first(K, len(known))
    allowed, chosen, gains = np.arange(len(K)) >= len(known), [], []
    for _ in range(n_rows):
        gain = np.mean(K**2, axis=1) / (np.diagonal(K) + _NOISE)
        # differences at rounding level are ties
        best = np.flatnonzero(allowed & (gain >= gain[allowed].max() * (1.0 - 1e-12)))[0]
        allowed[best] = False
        chosen.append(seen[best - len(known)])
        gains.append(gain[best])
        _include(K, best)
    return np.array(chosen), np.array(gains)


def _kernel(X):
    """Return the covariance matrix of rows; distances come from inner products."""
    products = X @ X.T
    products = np.asarray(products.todense() if hasattr(products, "todense") else products)
    squares = np.diagonal(products)
    distances = np.maximum(squares[:, None] + squares - 2.0 * products, 0.0)
    scale = distances.mean()
    return np.exp(-distances / scale) if scale > 0 else np.ones_like(distances)


def _include_first(K, n):
    """Condition the covariance on labels of the first n rows, in place."""
    noisy = K[:n, :n] + _NOISE * np.eye(n)
    half = solve_triangular(cholesky(noisy, lower=True), K[:n], lower=True)
    K -= half.T @ half


def _include(K, j):
    """Condition the covariance on a label of row j, in place."""
    K -= np.outer(K[:, j], K[j]) / (K[j, j] + _NOISE)
