"""Raw partitions of rows: what they hold, and how a worker reads and checks them."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_array, column_or_1d

from .._engine.partition import load_part
from .._estimator.checks import checked_weights
from ._checkpoint import digest
from ._factors import check_measured, labels_of, numbered_levels, take_labels
from .messages.rows_in_parts import LevelNumbers

__all__ = ["PartLevels", "checked_part", "describe_part", "join_levels", "shape_of"]


def raw_arrays(arrays):
    """Return (X as a table of two dimensions, y, weight or None) of a raw partition."""
    if len(arrays) not in (2, 3):
        raise ValueError("a partition must be (X, y) or (X, y, sample_weight).")
    X, y = arrays[0], column_or_1d(np.asarray(arrays[1]))
    X = X if hasattr(X, "columns") else np.asarray(X)
    if len(X.shape) != 2:
        raise ValueError(f"X of a partition must be 2D, got {len(X.shape)} dimensions.")
    return X, y, arrays[2] if len(arrays) == 3 else None


def checked_rows(X, y, weight):
    """Return (X, y, weight, whether each row is kept) of a raw partition without its labels."""
    X = check_array(X, dtype=np.float64)
    if len(y) != len(X):
        raise ValueError(f"a partition has {len(X)} samples in X and {len(y)} in y.")
    weight = checked_weights(weight, X)
    kept = weight > 0
    return X[kept], y[kept], weight[kept], kept


def checked_part(arrays, columns):
    """Return (X without labels, y, weight, labels of each factor) of a raw part, checked."""
    table, y, weight = raw_arrays(arrays)
    labels = [labels_of(table, f) for f in columns.factors]
    X, y, weight, kept = checked_rows(take_labels(table, columns.taken), y, weight)
    if not kept.all():
        labels = [_kept(own, kept) for own in labels]
    return X, y, weight, labels


def _kept(labels, kept):
    if isinstance(labels, np.ndarray):
        return labels[kept]
    return [g for g, k in zip(labels, kept, strict=True) if k]


def shape_of(part, message):
    """Return (number of columns, their names or None) of a raw part (worker)."""
    X = raw_arrays(load_part(part))[0]
    return X.shape[1], list(X.columns) if hasattr(X, "columns") else None


class PartLevels(NamedTuple):
    """What the driver has to know of a raw part: named labels and rows of all levels by factor."""

    n_rows: int
    classes: np.ndarray
    labels: list[Any]
    sizes: list[np.ndarray]
    digest: str


def describe_part(part, message, columns, with_digest):
    """Return the `PartLevels` of a raw part (worker)."""
    arrays = load_part(part)
    table = raw_arrays(arrays)[0]
    for factor in columns.factors:
        check_measured(table, factor)
    X, y, weight, labels = checked_part(arrays, columns)
    pairs = [numbered_levels(own) for own in labels]
    known, codes = [k for k, _ in pairs], [c for _, c in pairs]
    text = np.asarray(y).astype(str)
    content = digest(X, text, weight, *codes) if with_digest else ""
    return PartLevels(len(y), np.unique(y), list(known), [np.bincount(c) for c in codes], content)


def join_levels(told):
    """Return (named levels, rows of all levels, `LevelNumbers`) over the parts' `PartLevels`."""
    levels, sizes = [], []
    where: list[list[Any]] = [[] for _ in told]
    for f in range(len(told[0].labels)):
        every = [np.asarray(t.labels[f]) for t in told]
        known, code = numbered_levels(_joined(every))
        ends = np.cumsum([len(own) for own in every])
        free = len(known)
        for k, (own, t) in enumerate(zip(np.split(code, ends[:-1]), told, strict=True)):
            unnamed = len(t.sizes[f]) - len(own)
            where[k].append(np.r_[own, np.arange(free, free + unnamed)])
            free += unnamed
        total = np.zeros(free)
        for at, t in zip(where, told, strict=True):
            total[at[f]] += t.sizes[f]
        levels.append(known)
        sizes.append(total)
    return levels, sizes, LevelNumbers(where, [len(s) for s in sizes])


def _joined(labels):
    """Return the labels of all parts as an array of numbers, or as a list."""
    if all(own.dtype.kind in "iuf" for own in labels):
        return np.concatenate(labels)
    return [g for own in labels for g in own.tolist()]
