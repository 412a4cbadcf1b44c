"""Rows to predict, with the levels of their factors."""

import numpy as np
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from ._factor_plan import design_of_factors
from ._factors import codes_of, columns_beside, labels_of, take_labels
from ._groups import array_of, in_memory

__all__ = ["new_factor_rows", "shared_levels"]


def new_factor_rows(est, X, groups, kind):
    """Return (shared design, designs, codes (n, F)) of checked rows to predict.

    The estimator is fitted, or has what it needs for predictions in the middle of a fit:
    `_posteriors`, `_columns`, `_levels`, `_forgotten`; the rest as in `predict`.
    """
    columns = est._columns
    if not columns.taken:
        X = validate_data(est, X, reset=False, dtype=np.float64)
        table = None if groups is None else _beside(columns, groups, len(X))
        if table is None and kind == "conditional":
            est._forgotten.warn(est)
    else:
        if groups is not None:
            raise ValueError("groups= was given although group_column names columns of X.")
        validate_data(est, X, reset=False, skip_check_array=True)
        table = array_of(X)
        X = check_array(take_labels(table, columns.taken), dtype=np.float64, ensure_min_features=0)
    codes = np.full((len(X), len(columns.factors)), -1)
    if table is not None and kind == "conditional":
        codes = codes_of(table, columns.factors, est._levels)
    return *design_of_factors(X, columns), codes


def _beside(columns, groups, n_rows):
    if np.ndim(groups) == 1:
        groups = np.array(groups, dtype=object)[:, None]
    table = columns_beside(array_of(groups), n_rows)
    if table.shape[1] != len(columns.factors):
        raise ValueError(
            f"groups has {table.shape[1]} columns, the model {len(columns.factors)} factors."
        )
    return table


def shared_levels(est, first, second, tables):
    """Return (F, n1, n2): whether rows of two sets share their level of each factor.

    first and second are what `new_factor_rows` returned for the tables of labels, X or groups;
    each numbers unseen levels on its own, so those are compared by their labels.
    """
    out = []
    for f, factor in enumerate(est._columns.factors):
        n, (a, b) = len(est._levels[f]), (first[2][:, f], second[2][:, f])
        same = np.equal.outer(a, b) & (a >= 0)[:, None]
        if first is second:
            np.fill_diagonal(same, True)
        else:
            new_a, new_b = np.flatnonzero(a >= n), np.flatnonzero(b >= n)
            if len(new_a) and len(new_b):
                own, other = (list(labels_of(in_memory(t), factor)) for t in tables)
                same[np.ix_(new_a, new_b)] = [[own[i] == other[j] for j in new_b] for i in new_a]
        out.append(same)
    return np.array(out)
