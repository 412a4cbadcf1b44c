"""Rows of a pool: taking them, checking their numbers, ordering them by scores."""

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_random_state

from .._estimator.checks import check_number
from .._estimator.tables import rows_at


def rows_of(X):
    """Return X so that rows can be taken by index: CSR if sparse, tables and arrays as they are."""
    if sp.issparse(X):
        return X.tocsr()
    return X if hasattr(X, "shape") else np.asarray(X)


def reference_rows(X, X_reference, n_reference, random_state):
    """Return the reference rows: given ones, or a sample of the pool."""
    if X_reference is not None:
        X_reference = rows_of(X_reference)
        if X_reference.shape[1:] != X.shape[1:]:
            raise ValueError(
                f"X_reference has rows of shape {X_reference.shape[1:]}, the pool of {X.shape[1:]}."
            )
        return X_reference
    check_number("n_reference", n_reference, 1, integer=True)
    n = X.shape[0]
    if n <= n_reference:
        return X
    if random_state is None:
        return rows_at(X, np.linspace(0, n - 1, n_reference).round().astype(int))
    rng = check_random_state(random_state)
    return rows_at(X, np.sort(rng.choice(n, n_reference, replace=False)))


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
