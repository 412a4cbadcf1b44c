"""Grouping factors: how they are named, which columns they are, and which nest in others."""

import numbers
from typing import Any, NamedTuple

import numpy as np

from ._labels import (
    check_labels_at,
    codes_among,
    column_position,
    is_missing,
    label_list,
)

__all__ = [
    "FactorColumns",
    "GroupingFactor",
    "any_nested",
    "check_measured",
    "codes_of",
    "design_of_factors",
    "factor_columns",
    "label_table",
    "labels_of",
    "take_labels",
]

_NESTED = 0.9  # share of rows from which messages along rows miss how two factors depend


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
        return bool(self.factors)


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


def label_table(groups, n_rows):
    """Return labels beside X as a table, or raise a ValueError naming `groups`.

    Those of one factor become a column of objects.
    """
    if np.ndim(groups) == 2 and not isinstance(groups, list | tuple) and groups.shape[1] != 1:
        if len(groups) != n_rows:
            raise ValueError(
                f"groups has {len(groups)} rows of labels, but X has {n_rows} samples."
            )
        return groups
    if np.ndim(groups) == 2 and hasattr(groups, "iloc"):
        groups = groups.iloc[:, 0]
    table = np.empty((n_rows, 1), dtype=object)
    table[:, 0] = label_list(groups, n_rows)
    return table


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


def codes_of(table, factors, levels):
    """Return codes (n, F) of rows to predict among the known levels of each factor.

    -1 is a missing label; unseen ones have numbers from the number of levels on, alike for alike.
    """
    pairs = zip(factors, levels, strict=True)
    return np.column_stack([codes_among(labels_of(table, f), known) for f, known in pairs])


def any_nested(codes):
    """Say whether the levels of a factor have all their rows in one level of another, or nearly."""
    return any(
        _nested_share(a, b) > _NESTED
        for a in codes
        for b in codes
        if a is not b and a.max() > b.max()
    )


def _nested_share(fine, coarse):
    """Return the share of rows that are in the commonest coarse level of their fine level."""
    pairs, counts = np.unique(fine * (coarse.max() + 1) + coarse, return_counts=True)
    most = np.zeros(fine.max() + 1)
    np.maximum.at(most, pairs // (coarse.max() + 1), counts)
    return most.sum() / len(fine)


def design_of_factors(X, columns):
    """Return (shared design with the intercept last, design (n, q_f) of each factor's effects)."""
    ones = np.ones((len(X), 1))
    designs = [np.hstack([ones, X[:, list(f.slopes)]]) for f in columns.factors]
    return (np.hstack([X, ones]) if columns.fit_intercept else X), designs


def factor_columns(est, X, groups):
    """Return the `FactorColumns` of an estimator, or raise a ValueError naming the parameter.

    X or groups is the table with the labels; n_features_in_ of the estimator is known.
    """
    if est.group_column is None and groups is None:
        if est.random_slopes is not None and len(est.random_slopes):
            raise ValueError("random_slopes needs groups: give group_column or groups.")
        return FactorColumns((), (), est.fit_intercept, False)
    listed = isinstance(est.group_column, list) or (groups is not None and groups.shape[1] > 1)
    if groups is not None:
        named = hasattr(groups, "columns")
        n = groups.shape[1] if np.ndim(groups) == 2 else 1
        names = [c for c in groups.columns] if named else list(range(n))
        names = names if listed else ["groups"]
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
