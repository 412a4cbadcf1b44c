"""Rows, columns and names of tables: of pandas, polars and pyarrow, none of which is imported."""


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


def columns_at(X, places):
    """Return an array or table with the columns at these places, a list."""
    if hasattr(X, "iloc"):
        return X.iloc[:, places]
    return X.select(places) if hasattr(X, "column_names") else X[:, places]


def column_at(X, place):
    """Return a column of an array or a table: numbers as an array, anything else as a list."""
    if hasattr(X, "column_names") and not hasattr(X, "iloc"):
        column = X.column(place)
        values = column.to_numpy()
        return values if values.dtype.kind in "iuf" else column.to_pylist()
    column = X.iloc[:, place] if hasattr(X, "iloc") else X[:, place]
    if hasattr(column, "to_list"):
        if not (hasattr(column.dtype, "kind") and column.dtype.kind in "iuf"):
            return column.to_list()
        column = column.to_numpy()
    return column if column.dtype.kind in "iuf" else column.tolist()


def table_like(X, values):
    """Return values (n, d) as a table of the kind and names of X, as they are where X has none."""
    names = names_of(X)
    if names is None:
        return values
    kind = type(X)
    return getattr(kind, "from_pydict", kind)(dict(zip(names, values.T, strict=True)))
