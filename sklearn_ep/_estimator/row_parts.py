"""Partitions of rows: read, checked, and described where the rows are.

What a Gaussian likelihood has to know of rows is their weight, means and a root of their scatter. A
part answers with a triangular factor R of its scatter about its own mean, R'R = sum w (z - m)(z -
m)' for z = [x y], and factors are merged by QR decompositions. X'X of dense rows is never formed:
for columns far from zero it would keep no digit.
"""

import functools
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from .._engine.gaussian import row_blocks
from .._engine.partition import Part, load_part, split_rows
from .checks import LARGEST_ENTRY, ColumnRanges, check_column_scales, checked_weights
from .tables import check_columns, names_of


class CheckedRows(Part):
    """Partition of rows that have been checked: X, y (class indices of a classifier), weights."""


class PartFacts(NamedTuple):
    """What the driver has to know of a partition before a fit.

    `n_entries` are those that are stored, the zeros of a sparse X left out.
    `labels` and `counts` are the classes of a classifier with their total weight, the range of y
    otherwise; `names` of the columns are those of a table.
    """

    n_rows: int
    n_features: int
    n_entries: int
    labels: np.ndarray
    counts: np.ndarray
    columns: ColumnRanges
    names: list[Any] | None


def array_parts(training, n_partitions):
    """Return partitions of the `Training` of a classifier: consecutive rows, views of dense ones.

    Class indices take one byte where they fit, weights that are all one no memory.
    """
    X, y, weight = training.X, training.y, training.weight
    if hasattr(X, "tocsr"):
        X = X.tocsr()
    if y.max() <= np.iinfo(np.int8).max:
        y = y.astype(np.int8)
    if np.all(weight == 1.0):
        weight = np.broadcast_to(1.0, weight.shape)
    return [CheckedRows(X[s], y[s], weight[s]) for s in split_rows(len(y), n_partitions or 1)]


def read_part(part, k, classifier, accept_sparse="csr", dtype=np.float64):
    """Return X (dense or CSR), y and weights of partition k, or raise a ValueError that names it.

    Those of `array_parts` are given back as they are; k is None where the caller does not know it.
    """
    if isinstance(part, CheckedRows):
        return part.arrays
    with naming_part(k):
        return checked_arrays(load_part(part), classifier, accept_sparse, dtype)


@contextmanager
def naming_part(k=None):
    """Name partition k, where its number is known, in what is wrong with it."""
    try:
        yield
    except ValueError as error:
        which = "a partition" if k is None else f"partition {k}"
        raise ValueError(f"{which}: {error}") from error


def checked_arrays(
    arrays, classifier, accept_sparse="csr", dtype=np.float64, weighted=False, n_columns=1
):
    """Return X (dense or CSR), y and weights of raw arrays, which have their own if `weighted`.

    X has at least `n_columns`.
    """
    if len(arrays) != 2 and not (weighted and len(arrays) == 3):
        kind = "(X, y) or (X, y, sample_weight)" if weighted else "a pair (X, y)"
        raise ValueError(f"it must be {kind}, got {len(arrays)} objects.")
    check_columns(arrays[0])
    kinds: dict[str, Any] = dict(dtype=dtype, accept_sparse=accept_sparse)
    X = check_array(arrays[0], ensure_min_features=n_columns, input_name="X", **kinds)
    y = column_or_1d(arrays[1], warn=True)
    if X.shape[0] != len(y):
        raise ValueError(f"X has {X.shape[0]} rows, and y has {len(y)} of them.")
    if classifier:
        check_classification_targets(y)
    else:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    return X, y, checked_weights(arrays[2], X) if len(arrays) == 3 else np.ones(len(y))


def facts_of_part(part, k, classifier):
    """Return the `PartFacts` of partition k, which is checked if it came from the user."""
    X, y, weight = read_part(part, k, classifier)
    if classifier:
        labels, index = np.unique(y, return_inverse=True)
        counts = np.bincount(index, weights=weight, minlength=len(labels))
    else:
        labels, counts = np.array([y.min(), y.max()]), np.array([weight.sum()])
    n_entries = X.nnz if hasattr(X, "nnz") else X.size
    columns = ColumnRanges.of_rows(X)
    return PartFacts(len(y), X.shape[1], n_entries, labels, counts, columns, names_of_part(part))


def names_of_part(part):
    """Return the names of the columns of a partition whose X is a table, None otherwise."""
    if isinstance(part, CheckedRows):
        return None
    return names_of(load_part(part)[0])


def check_alike(shapes):
    """Return (number of columns, names) that all partitions share, or raise a ValueError."""
    width, names = shapes[0]
    for k, (d, others) in enumerate(shapes):
        if d != width:
            raise ValueError(f"partition {k} has {d} features, the first has {width}.")
        if others != names:
            raise ValueError(
                f"partition {k} differs from the first in the names or the order of its columns."
            )
    return width, names


def set_columns(estimator, shapes):
    """Set the attributes of the columns that all parts share, their names where these are strings.

    shapes are (number of columns, their names or None) of each partition.
    """
    width, names = check_alike(shapes)
    estimator.n_features_in_ = width
    vars(estimator).pop("feature_names_in_", None)
    if names is not None and all(isinstance(name, str) for name in names):
        estimator.feature_names_in_ = np.array(names, dtype=object)


def check_facts(estimator, facts, largest=LARGEST_ENTRY, from_user=True):
    """Check the scales of columns, and return their size, as `check_column_scales` does for rows.

    The attributes of the columns, which partitions have to agree on, are set if they are the
    user's: those of rows in memory are set already.
    """
    if from_user:
        set_columns(estimator, [(f.n_features, f.names) for f in facts])
    columns = ColumnRanges.of_parts([f.columns for f in facts])
    return check_column_scales(estimator, columns, largest)


def class_counts(facts):
    """Return the classes of all partitions and their total weights."""
    labels = np.unique(np.concatenate([f.labels for f in facts]))
    counts: Any = np.zeros(len(labels))
    for f in facts:
        counts[np.searchsorted(labels, f.labels)] += f.counts
    return labels, counts


# Numbers of a block of rows that is worked on at a time, 16 MB.
BLOCK = 2**21
_LARGEST_BYTES = 2**31


class RowStatistics(NamedTuple):
    """Number of rows, their weight, weighted mean (d + 1,) of [X y], and root (r, d + 1)."""

    n_rows: int
    weight: float
    mean: np.ndarray
    root: np.ndarray

    def about_zero(self):
        """Return a root (r, d + 1) of the scatter about zero in place of the means."""
        return reduced(np.vstack([self.root, np.sqrt(self.weight) * self.mean]))


def reduced(rows):
    """Return at most d + 1 rows with the same scatter."""
    return np.linalg.qr(rows, mode="r") if rows.shape[0] > rows.shape[1] else rows


def merged(first, second):
    """Return the `RowStatistics` of two sets of rows."""
    weight = first.weight + second.weight
    gap = np.sqrt(first.weight * second.weight / weight) * (second.mean - first.mean)
    root = reduced(np.vstack([first.root, second.root, gap]))
    mean = first.mean + (second.weight / weight) * (second.mean - first.mean)
    return RowStatistics(first.n_rows + second.n_rows, weight, mean, root)


def _of_block(X, y, weight):
    """Return the `RowStatistics` of dense rows, centred twice: the first mean may be off."""
    Z, total = np.column_stack([X, y]), float(weight.sum())
    mean = weight @ Z / total
    Z -= mean
    shift = weight @ Z / total
    Z -= shift
    if not np.all(weight == 1.0):
        Z *= np.sqrt(weight)[:, None]
    return RowStatistics(len(y), total, mean + shift, reduced(Z))


def axes_of(scatter):
    """Return eigenvalues (d,) of a scatter with unit diagonal, and its axes (d, d) in its units."""
    sd = np.sqrt(np.maximum(np.diagonal(scatter), 0.0))
    sd[sd == 0] = 1.0
    values, vectors = np.linalg.eigh(scatter / sd[:, None] / sd)
    return values, vectors.T * sd


def _of_sparse(X, y, weight):
    """Return the `RowStatistics` of many CSR rows by their matrix of products.

    Its root comes from the eigenvalues of the matrix with unit diagonal: it may be singular.
    """
    Z, total = sp.hstack([X, y[:, None]], format="csr"), float(weight.sum())
    mean = np.asarray(Z.T @ weight).ravel() / total
    scatter = (Z.T @ Z.multiply(weight[:, None])).toarray() - total * np.outer(mean, mean)
    values, directions = axes_of(scatter)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * directions
    return RowStatistics(len(y), total, mean, root)


def statistics_of_rows(X, y, weight):
    """Return the `RowStatistics` of rows X (n, d), dense or CSR; O(n d^2) flops for dense ones."""
    d = X.shape[1]
    if sp.issparse(X) and X.shape[0] > 2 * d:
        return _of_sparse(X, y, weight)
    blocks = (
        _of_block(X[rows].toarray() if sp.issparse(X) else X[rows], y[rows], weight[rows])
        for rows in row_blocks(len(y), most=max(2 * d + 2, BLOCK // (d + 1)))
    )
    return functools.reduce(merged, blocks)


def statistics_of_part(part, k):
    """Return the `RowStatistics` of partition k."""
    return statistics_of_rows(*read_part(part, k, classifier=False))


def statistics_of_parts(run, facts):
    """Return the `RowStatistics` of the parts of a `PartMap` with these `PartFacts`, in order."""
    n, d = sum(f.n_rows for f in facts), facts[0].n_features
    size = 8 * min(n, d + 1) * (d + 1)
    if size > _LARGEST_BYTES:
        raise ValueError(
            f"{n} rows of {d} columns reduce to a factor of {size / 2**30:.1f} GiB, more than "
            f"{_LARGEST_BYTES / 2**30:.0f}: leave columns out."
        )
    return functools.reduce(merged, run(statistics_of_part, range(len(run.parts))))
