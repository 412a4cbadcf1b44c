"""Group labels: where they come from, and how they become numbers."""

import numbers

import numpy as np
from scipy.sparse import issparse
from sklearn.utils.validation import column_or_1d

__all__ = [
    "array_of",
    "check_labels_at",
    "codes_among",
    "column_position",
    "group_keys",
    "in_memory",
    "is_missing",
    "label_array",
    "label_list",
    "look_up",
    "number_groups",
    "numbered_levels",
]


_REMEDY = (
    "where a selector or a transformer comes before the model or around it, pass that column "
    "through a ColumnTransformer with set_output(transform='pandas'), or hand groups to fit by "
    "metadata routing (set_fit_request(groups=True))"
)


def column_position(column, X, n_columns, parameter):
    """Return the position of a column given by name or index, or raise a ValueError naming it."""
    remedy = f": {_REMEDY}" if parameter == "group_column" else ""
    if isinstance(column, numbers.Integral) and not isinstance(column, bool):
        if not -n_columns <= column < n_columns:
            raise ValueError(
                f"{parameter}={column!r} is not a column of X, which has {n_columns}; columns move "
                f"or go missing under selection{remedy}."
            )
        return int(column) % n_columns
    names = list(X.columns) if hasattr(X, "columns") else None
    if names is None:
        raise ValueError(
            f"{parameter}={column!r} is the name of a column, but X has no column names; "
            f"give its index, unless columns were selected{remedy}."
        )
    if column not in names:
        raise ValueError(
            f"{parameter}={column!r} is not among the columns of X: {names}. A selector may have "
            f"dropped it{remedy}."
        )
    return names.index(column)


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
    return X


def check_labels_at(column, labels):
    """Raise a ValueError where the column at an index has measurements in place of labels.

    A selector of columns shifts what is at an index, and a measured column would be taken for
    groups of one row each.
    """
    known = [g for g in labels if not is_missing(g)]
    measured = all(isinstance(g, float) and not g.is_integer() for g in known)
    if measured and len(set(known)) == len(known) > 2:
        raise ValueError(
            f"group_column={column!r} has a number with decimals in every row and no two alike, as "
            f"a measured column: not labels of groups. Columns move under selection: {_REMEDY}."
        )


def label_list(groups, n_rows):
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


def is_missing(label):
    """Say whether a label is None, nan, or the missing value of a table library."""
    if label is None or type(label).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(label, float) and label != label


def number_groups(labels):
    """Return (distinct labels (J,), number (n,) of each row's group) for a list of labels.

    The distinct labels are sorted where they can be compared, otherwise in order of appearance.
    Missing ones stand for a group without a name: their rows get numbers from J on, one each.
    """
    try:
        distinct = list(dict.fromkeys(g for g in labels if not is_missing(g)))
    except TypeError as error:
        raise TypeError("group labels must be hashable") from error
    try:
        distinct.sort()
    except TypeError:
        pass  # labels of several kinds: order of appearance
    code = look_up(labels, distinct)
    unnamed = code < 0
    code[unnamed] = len(distinct) + np.arange(unnamed.sum())
    return label_array(distinct), code


def label_array(labels):
    """Return labels as an array: numbers and strings as such, anything else as objects."""
    kinds = {type(g) for g in labels}
    if kinds <= {int, float} or kinds == {str} or kinds == {bool}:
        return np.array(labels)
    out = np.empty(len(labels), dtype=object)
    out[:] = labels
    return out


def look_up(labels, table):
    """Return codes (n,): the position in the table, -1 for missing, J on for unseen labels."""
    known = {g: k for k, g in enumerate(table.tolist() if isinstance(table, np.ndarray) else table)}
    code = [-1 if is_missing(g) else known.setdefault(g, len(known)) for g in labels]
    return np.array(code, dtype=int)


def group_keys(table):
    """Return the labels as strings that tell them apart, for states that are saved as arrays."""
    return np.array([f"{type(g).__name__}:{g!r}" for g in table.tolist()], dtype=str)


def numbered_levels(labels):
    """Return (distinct labels (L,), code (n,)); rows without label are numbered from L on."""
    if not isinstance(labels, np.ndarray):
        return number_groups(labels)
    missing = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(len(labels), dtype=bool)
    code = np.empty(len(labels), dtype=int)
    table, code[~missing] = np.unique(labels[~missing], return_inverse=True)
    code[missing] = len(table) + np.arange(missing.sum())
    return label_array(table.tolist()), code


def codes_among(labels, known):
    """Return codes (n,) of labels among known ones, as `look_up` does."""
    if not (isinstance(labels, np.ndarray) and known.dtype.kind in "iuf" and len(known)):
        return look_up(labels if isinstance(labels, list) else labels.tolist(), known)
    missing = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(len(labels), dtype=bool)
    place = np.minimum(np.searchsorted(known, labels), len(known) - 1)
    code = np.where(missing, -1, place)
    new = (known[place] != labels) & ~missing
    code[new] = len(known) + np.unique(labels[new], return_inverse=True)[1]
    return code
