"""Grouping factors: how they are named, which columns they are, and their levels as numbers."""

import numbers
from typing import Any, NamedTuple

import numpy as np

from ._groups import (
    check_labels_at,
    column_position,
    is_missing,
    label_array,
    look_up,
    number_groups,
)

__all__ = [
    "FactorColumns",
    "GroupingFactor",
    "check_measured",
    "codes_of",
    "columns_beside",
    "factor_columns",
    "has_several",
    "is_table",
    "labels_of",
    "numbered_levels",
    "take_labels",
]


class GroupingFactor(NamedTuple):
    """A factor as the user wrote it, its columns, and its varying coefficients.

    positions are columns of X, or of the labels beside X; slopes are positions of columns in what
    is left of X without any labels.
    """

    name: Any
    positions: tuple[int, ...]
    slopes: tuple[int, ...]


class FactorColumns(NamedTuple):
    """What the columns of X are to a model of factors.

    taken are the positions in X of all labels, none where they came beside it; listed says whether
    the user gave a list, so that attributes of factors are lists.
    """

    factors: tuple[GroupingFactor, ...]
    taken: tuple[int, ...]
    fit_intercept: bool
    listed: bool

    @property
    def has_groups(self):
        """Whether effects of groups are in the model."""
        return True


def is_table(groups):
    """Say whether labels beside X are those of several factors: two columns or more."""
    return np.ndim(groups) == 2 and not isinstance(groups, list | tuple) and groups.shape[1] > 1


def has_several(group_column, groups):
    """Say whether a model has a list of factors, of one or more."""
    return isinstance(group_column, list) or (group_column is None and is_table(groups))


def column_at(X, position):
    """Return a column of an array or a table: numbers as an array, anything else as a list."""
    if not hasattr(X, "columns"):
        column = X[:, position]
    else:
        column = X.iloc[:, position] if hasattr(X, "iloc") else X[:, position]
        if not (isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf"):
            return column.to_list()
        column = column.to_numpy()
    return column if column.dtype.kind in "iuf" else column.tolist()


def take_labels(X, taken):
    """Return X without some of its columns."""
    keep = [k for k in range(X.shape[1]) if k not in taken]
    if hasattr(X, "columns"):
        return X.iloc[:, keep] if hasattr(X, "iloc") else X[:, keep]
    return X[:, keep]


def columns_beside(groups, n_rows):
    """Return labels beside X as a table, or raise a ValueError naming `groups`."""
    if len(groups) != n_rows:
        raise ValueError(f"groups has {len(groups)} rows of labels, but X has {n_rows} samples.")
    return groups


def labels_of(table, factor):
    """Return the labels (n,) of a factor; of several columns the combinations, as tuples."""
    columns = [column_at(table, p) for p in factor.positions]
    if len(columns) == 1:
        return columns[0]
    rows = zip(*(c.tolist() if isinstance(c, np.ndarray) else c for c in columns), strict=True)
    return [None if any(map(is_missing, row)) else row for row in rows]


def check_measured(table, factor):
    """Raise a ValueError where a column given by its index has measurements in place of labels."""
    names = factor.name if isinstance(factor.name, tuple) else (factor.name,)
    for column, position in zip(names, factor.positions, strict=True):
        values = column_at(table, position)
        is_index = isinstance(column, numbers.Integral)
        if is_index and isinstance(values, np.ndarray) and values.dtype.kind == "f":
            if np.all(values != np.round(values)):
                check_labels_at(column, values.tolist())


def numbered_levels(labels):
    """Return (distinct labels (L,), code (n,)); rows without label are numbered from L on."""
    if not isinstance(labels, np.ndarray):
        return number_groups(labels)
    missing = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(len(labels), dtype=bool)
    code = np.empty(len(labels), dtype=int)
    table, code[~missing] = np.unique(labels[~missing], return_inverse=True)
    code[missing] = len(table) + np.arange(missing.sum())
    return label_array(table.tolist()), code


def codes_of(table, factors, levels):
    """Return codes (n, F) of rows to predict among the known levels of each factor.

    -1 is a missing label; unseen ones have numbers from the number of levels on, alike for alike.
    """
    return np.column_stack(
        [_codes(labels_of(table, f), known) for f, known in zip(factors, levels, strict=True)]
    )


def _codes(labels, known):
    if not (isinstance(labels, np.ndarray) and known.dtype.kind in "iuf" and len(known)):
        return look_up(labels if isinstance(labels, list) else labels.tolist(), known)
    missing = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(len(labels), dtype=bool)
    place = np.minimum(np.searchsorted(known, labels), len(known) - 1)
    code = np.where(missing, -1, place)
    new = (known[place] != labels) & ~missing
    code[new] = len(known) + np.unique(labels[new], return_inverse=True)[1]
    return code


def factor_columns(est, X, groups):
    """Return the `FactorColumns` of an estimator, or raise a ValueError naming the parameter.

    X or groups is the table with the labels; n_features_in_ of the estimator is known.
    """
    listed = has_several(est.group_column, groups)
    if groups is not None:
        named = hasattr(groups, "columns")
        n = groups.shape[1] if np.ndim(groups) == 2 else 1
        names = [c for c in groups.columns] if named else list(range(n))
        pairs = [(name, (k,)) for k, name in enumerate(names)]
    else:
        given = est.group_column if listed else [est.group_column]
        if not given:
            raise ValueError("group_column is an empty list: name at least one factor.")
        pairs = [(name, _positions(name, X, est)) for name in given]
        if len({frozenset(p) for _, p in pairs}) < len(pairs):
            raise ValueError(f"group_column={est.group_column!r} names a factor twice.")
    taken = () if groups is not None else tuple(sorted({k for _, p in pairs for k in p}))
    slopes = _slopes(est, X, [name for name, _ in pairs], taken)
    factors = [GroupingFactor(*pair, own) for pair, own in zip(pairs, slopes, strict=True)]
    return FactorColumns(tuple(factors), taken, est.fit_intercept, listed)


def _positions(name, X, est):
    """Return the positions in X of the columns of a factor."""
    if isinstance(name, list):
        raise ValueError(
            f"group_column={est.group_column!r}: a factor of several columns is a tuple of them."
        )
    columns = name if isinstance(name, tuple) else (name,)
    found = tuple(column_position(c, X, est.n_features_in_, "group_column") for c in columns)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"group_column={est.group_column!r} has a column twice in a factor.")
    return found


def _slopes(est, X, names, taken):
    """Return for each factor the positions of its varying coefficients in what is left of X."""
    given = est.random_slopes
    if given is None or len(given) == 0:
        return [()] * len(names)
    if not isinstance(given, dict):
        if len(names) > 1:
            raise ValueError(
                f"random_slopes={given!r}: with several factors a dict from a factor, as written "
                "in group_column, to a list of columns."
            )
        given = {names[0]: given}
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ValueError(f"random_slopes has {unknown!r}, which is no factor: {names!r}.")
    out = []
    for name in names:
        own = given.get(name, [])
        own = [own] if isinstance(own, str | int) else own
        found = [column_position(c, X, est.n_features_in_, "random_slopes") for c in own]
        if len(set(found)) < len(found) or set(found) & set(taken):
            raise ValueError(
                f"random_slopes={est.random_slopes!r} repeats a column or names a group column."
            )
        out.append(tuple(c - sum(k < c for k in taken) for c in found))
    return out
