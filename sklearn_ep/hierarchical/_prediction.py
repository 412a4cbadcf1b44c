"""Rows to predict, with their groups: what the public methods of the classifier call."""

from typing import Any

import numpy as np
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from .._engine.gaussian import row_blocks
from .._estimator import tables
from .._estimator.checks import check_choice, checked_weights, validated
from .._estimator.latents import is_joint
from . import _factors
from ._layout import RowsToPredict


def new_rows(est, X, groups=None, kind="conditional"):
    """Return checked `RowsToPredict`.

    The estimator is fitted, or has what it needs for predictions in the middle of a fit:
    `_posteriors`, `_columns`, `_levels`, `_forgotten`; X, groups and kind as in `predict`.
    """
    check_is_fitted(est)
    check_choice("kind", kind, ("conditional", "population"))
    X, groups, columns = tables.in_memory(X), tables.in_memory(groups), est._columns
    X, table = _split(est, X, groups)
    codes = np.full((len(X), len(columns.factors)), -1)
    if kind == "conditional" and table is not None:
        # unseen labels have numbers from the number of levels on, alike for alike
        labels = (_factors.labels_of(table, f) for f in columns.factors)
        codes = np.column_stack(list(map(_factors.codes_among, labels, est._levels)))
    elif kind == "conditional" and columns.factors:
        est._forgotten.warn(est)
    shared, designs = _factors.design_of_factors(X, columns)
    return RowsToPredict(shared, designs, codes)


_BLOCK = 8192  # rows predicted at once


def in_blocks(answer, rows, *args):
    """Return answer(rows, *args), an array or several of these, asked for some rows at a time."""
    found = [answer(rows.take(some), *args) for some in row_blocks(len(rows.X), most=_BLOCK)]
    if isinstance(found[0], tuple):
        return tuple(map(np.concatenate, zip(*found, strict=True)))
    return np.concatenate(found)


def _split(est, X, groups):
    """Return (X without labels, the table of labels or None), checked."""
    columns = est._columns
    if groups is not None and not columns.factors:
        raise ValueError("groups were given, but the model was fitted without groups.")
    if not columns.taken:
        X = validated(est, X, reset=False, dtype=np.float64)
        if groups is None:
            return X, None
        groups = tables.array_of(groups) if tables.is_table(groups) else groups
        table = tables.label_table(groups, len(X))
        if table.shape[1] != len(columns.factors):
            raise ValueError(
                f"groups has {table.shape[1]} columns, the model {len(columns.factors)} factors."
            )
        return X, table
    if groups is not None:
        raise ValueError("groups= was given although group_column names columns of X.")
    table = tables.array_of(X)
    if table.shape[1] == est.n_features_in_ - len(columns.taken):
        raise ValueError(
            f"X has {table.shape[1]} features, but {type(est).__name__} is expecting "
            f"{est.n_features_in_}, group_column={est.group_column!r} among them."
        )
    validate_data(est, X, reset=False, skip_check_array=True)
    X = _factors.take_labels(table, columns.taken)
    tables.check_columns(X)
    return check_array(X, dtype=np.float64, ensure_min_features=0), table


def row_pairs(est, X1, X2, groups1, groups2):
    """Return two sets of rows to predict, and whether two rows share their levels, (F, n1, n2)."""
    X1, X2, groups1, groups2 = map(tables.in_memory, (X1, X2, groups1, groups2))
    first = new_rows(est, X1, groups1)
    second = first if X2 is None else new_rows(est, X2, groups2)
    labelled = (X1, X2) if est._columns.taken else (groups1, groups2)
    codes: Any = first[2].T, second[2].T
    if first is not second and all(table is not None for table in labelled):
        codes = _numbered_together(est, labelled)
    pairs = zip(*codes, strict=True)
    same: Any = [np.equal.outer(a, b) & (a >= 0)[:, None] for a, b in pairs]
    same = np.reshape(same, (len(est._levels), len(first[0]), len(second[0]))).astype(bool)
    return first, second, same | np.eye(len(first[0]), dtype=bool) if first is second else same


def _numbered_together(est, labelled):
    """Return the codes (F, n1) and (F, n2) of rows of two tables, X or labels beside X.

    Each table alone numbers unseen levels on its own.
    """
    if est._columns.taken:
        labelled = [tables.array_of(table) for table in labelled]
    else:
        labelled = [tables.label_table(table, len(table)) for table in labelled]
    labels = ([list(_factors.labels_of(t, f)) for t in labelled] for f in est._columns.factors)
    both = [tables.objects(a + b) for a, b in labels]
    codes = np.array(list(map(_factors.codes_among, both, est._levels)))
    return np.split(codes, [len(labelled[0])], axis=1)


def rows_again(est, rows):
    """Return (design, designs, codes, sign, weight) of training rows that are given again, and "".

    Or None and what is missing for importance weights.
    """
    if rows is None:
        return None, "Give X, y and groups of the training rows for importance weights."
    design, local, code = new_rows(est, rows.X, rows.groups)
    y, weight = column_or_1d(rows.y), checked_weights(rows.sample_weight, design)
    check_consistent_length(design, y)
    if not np.all((code >= 0) & (code < [len(known) for known in est._levels])):
        return None, "Some rows are of no named group of the fit: no importance weights."
    sign = np.where(y == est.classes_[1], 1.0, -1.0)
    if is_joint(est._posteriors):
        sign = np.searchsorted(est.classes_, y)  # of several classes jointly: class indices
    kept = weight > 0
    rows = design[kept], [w[kept] for w in local], code[kept], sign[kept], weight[kept]
    return rows, ""
