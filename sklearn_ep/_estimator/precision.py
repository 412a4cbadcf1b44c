"""Predictions in single precision where the rows are, as scikit-learn's linear models give them."""

import functools

import numpy as np

__all__ = ["in_precision_of_rows", "is_single"]


def is_single(X):
    """Return whether rows, an array, sparse matrix or table, are in single precision throughout."""
    try:
        kinds = list(X.dtypes)
    except (AttributeError, TypeError):
        kinds = [getattr(X, "dtype", None)]
    return bool(kinds) and all(kind == np.float32 for kind in kinds)


def in_precision_of_rows(predict):
    """Let a method answer in ``float32`` where its rows and those of the fit were.

    The fit leaves what it saw in ``estimator._fitted_single``. All is computed in double precision
    and rounded at the end.
    """

    @functools.wraps(predict)
    def wrapper(self, X, *args, **kwargs):
        found = predict(self, X, *args, **kwargs)
        if not (getattr(self, "_fitted_single", False) and is_single(X)):
            return found
        if isinstance(found, tuple):
            return tuple(values.astype(np.float32) for values in found)
        return found.astype(np.float32)

    return wrapper
