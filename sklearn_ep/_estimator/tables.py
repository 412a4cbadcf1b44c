"""Rows, columns and names of tables: of pandas, polars and pyarrow, none of which is imported."""

import numbers
from decimal import Decimal

import numpy as np
from scipy.sparse import issparse
from sklearn.utils import column_or_1d


def names_of(X):
    """Return the list of names of the columns of a table, None of an array."""
    if not hasattr(X, "columns"):
        return None
    # pyarrow has names apart; a pandas table may have a column that is called so
    return list(X.columns if hasattr(X, "iloc") else getattr(X, "column_names", X.columns))


def rows_at(X, index):
    """Return the rows of an array, matrix or table at these places."""
    if hasattr(X, "iloc"):
        return X.iloc[index]
    return X.take(index) if hasattr(X, "column_names") else X[index]


def row_at(X, place):
    """Return one row of an array, matrix or table as one; a list of one takes longer if sparse."""
    if hasattr(X, "column_names") and not hasattr(X, "iloc"):
        return X.slice(place, 1)
    return rows_at(X, slice(place, place + 1))


def columns_at(X, places):
    """Return an array or table with the columns at these places, a list."""
    if hasattr(X, "iloc"):
        return X.iloc[:, places]
    return X.select(places) if hasattr(X, "column_names") else X[:, places]


def values_at(X, place):
    """Return a column of an array or a table: numbers as such, anything else as objects."""
    if hasattr(X, "column_names") and not hasattr(X, "iloc"):
        column = X.column(place)
        values = column.to_numpy()
        return values if values.dtype.kind in "iuf" else objects(column.to_pylist())
    column = X.iloc[:, place] if hasattr(X, "iloc") else X[:, place]
    if hasattr(column, "to_list"):
        if not (hasattr(column.dtype, "kind") and column.dtype.kind in "iuf"):
            return objects(column.to_list())
        column = column.to_numpy()
    return column if column.dtype.kind in "iuf" else objects(column.tolist())


def check_columns(X):
    """Raise a ValueError that names a column of a table whose values are no numbers.

    Arrays, which have no names, and what is not in memory yet pass. Text that spells numbers passes
    as well: it is read as such.
    """
    if not hasattr(X, "columns") or hasattr(X, "__dask_graph__"):
        return
    kinds = list(X.dtypes if hasattr(X, "dtypes") else X.schema.types)
    suspect = {kind for kind in set(kinds) if not _is_number_kind(kind)}
    for place in (j for j, kind in enumerate(kinds) if kind in suspect):
        strange = [value for value in values_at(X, place) if not _is_number(value)]
        if strange:
            shown = next((value for value in strange if not is_missing(value)), strange[0])
            raise ValueError(
                f"column {names_of(X)[place]!r} of X has values that are no numbers, such as "
                f"{shown!r:.60}: code categories by OneHotEncoder, turn dates into days since the "
                "first one, and fill or leave out what is missing."
            )


def _is_number_kind(kind):
    """Return whether a type of pandas, polars or pyarrow is one of numbers or bools."""
    named = str(kind).lower().startswith(("int", "uint", "float", "double", "bool", "decimal"))
    return named or getattr(kind, "kind", "") in tuple("iufb")


def _is_number(value):
    try:
        float(value)
    except (TypeError, ValueError):
        return value is None
    return True


def objects(values):
    """Return a list as an array of its objects, of which a tuple is one."""
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _label_list(groups, n_rows):
    """Return labels as a list of Python objects, or raise a ValueError naming `groups`."""
    if hasattr(groups, "to_list"):
        labels = groups.to_list()
    elif isinstance(groups, list | tuple):
        labels = [g.item() if isinstance(g, np.generic) else g for g in groups]
    else:
        labels = column_or_1d(groups).tolist()
    if len(labels) != n_rows:
        raise ValueError(f"groups has {len(labels)} labels, but X has {n_rows} samples.")
    return labels


def is_table(groups):
    """Say whether labels are an array or a data frame of columns: tuples in a list are labels."""
    return len(getattr(groups, "shape", ())) == 2


def label_table(groups, n_rows):
    """Return labels beside X as a table, or raise a ValueError naming `groups`.

    Those of one factor become a column of objects. A list of lists is a table row by row.
    """
    groups = _table_of_rows(groups)
    if is_table(groups) and groups.shape[1] != 1:
        if len(groups) != n_rows:
            raise ValueError(
                f"groups has {len(groups)} rows of labels, but X has {n_rows} samples."
            )
        return groups
    if is_table(groups) and hasattr(groups, "iloc"):
        groups = groups.iloc[:, 0]
    return objects(_label_list(groups, n_rows))[:, None]


def _table_of_rows(rows):
    """Return a list of lists of labels as an array of objects (n, F), others as they are."""
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)):
        return rows
    if len({len(row) for row in rows}) > 1:
        raise ValueError("groups has rows of different lengths: give every row the same factors.")
    table = np.empty((len(rows), len(rows[0])), dtype=object)
    table[:] = rows
    return table


def is_missing(label):
    """Say whether a label is None, nan of any type, or the missing value of a table library."""
    if type(label) in (int, float, str):  # as most are, at a tenth of the time of what follows
        return label != label
    if label is None or type(label).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(label, Decimal):  # some of whose nan refuse to be compared
        return label.is_nan()
    return isinstance(label, numbers.Number | np.datetime64 | np.timedelta64) and label != label


def in_memory(data):
    """Return what a dask collection stands for, anything else as it is.

    Computed once and before all checks: names of columns are those of the result.
    """
    return data.compute() if hasattr(data, "__dask_graph__") else data


def array_of(X):
    """Return a table as it is, anything else of two dimensions as an array; refuse sparse input."""
    if issparse(X):
        raise TypeError(
            "Sparse data was passed, but dense data is required; use .toarray() to convert."
        )
    if not hasattr(X, "columns") and not isinstance(X, np.ndarray):
        kinds = {type(value) for row in X for value in row}
        X = np.array(X, dtype=object if str in kinds or type(None) in kinds else None)
    if len(X.shape) != 2:
        raise ValueError(f"Expected 2D array, got {len(X.shape)}D array instead.")
    return X


def table_like(X, values):
    """Return values (n, d) as a table of the kind and names of X, as they are where X has none."""
    names = names_of(X)
    if names is None:
        return values
    kind = type(X)
    return getattr(kind, "from_pydict", kind)(dict(zip(names, values.T, strict=True)))
