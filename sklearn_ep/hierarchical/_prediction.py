"""Rows to predict, with their groups: what the public methods of the classifier call."""

import warnings

import numpy as np
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from .._estimator.checks import check_choice, checked_weights
from ._factor_prediction import new_factor_rows, shared_levels
from ._factors import FactorColumns
from ._groups import in_memory, label_list, look_up, separated
from .partitions.mixture import NEW_GROUP
from .partitions.parts import design_of

__all__ = ["GroupsForgotten", "all_known", "new_rows", "row_pairs", "rows_again", "split_intercept"]


class GroupsForgotten:
    """Says once a fit that rows to predict came without the groups that the fit had beside X.

    Having said so is no part of what was learned: a pickle of the estimator does not know it.
    """

    def __init__(self):
        self.told = False

    def __reduce__(self):
        return type(self), ()

    def warn(self, est):
        """Warn at the first call."""
        if self.told:
            return
        self.told = True
        warnings.warn(
            f"{type(est).__name__} was fitted with groups beside X and predicts without: every row "
            "is taken as one of a new group. Give groups=..., or make them a column of X named by "
            "group_column; if new groups are meant, kind='population', or None as the label of "
            "every row, says so.",
            UserWarning,
            stacklevel=4,
        )


def new_rows(est, X, groups=None, kind="conditional"):
    """Return checked (shared design, local design, codes of groups) of rows to predict.

    Of a model with factors, designs are a list and codes (n, F).

    The estimator is fitted, or has what it needs for predictions in the middle of a fit:
    `_posteriors`, `_columns`, `_forgotten` and `group_labels_`; X, groups and kind as in `predict`.
    """
    check_is_fitted(est)
    check_choice("kind", kind, ("conditional", "population"))
    X, groups = in_memory(X), in_memory(groups)
    if isinstance(est._columns, FactorColumns):
        return new_factor_rows(est, X, groups, kind)
    columns, labels = est._columns, None
    if columns.group is None:
        X = validate_data(est, X, reset=False, dtype=np.float64)
        labels = None if groups is None else label_list(groups, len(X))
        if labels is not None and not columns.has_groups:
            raise ValueError("groups were given, but the model was fitted without groups.")
        if labels is None and columns.has_groups and kind == "conditional":
            est._forgotten.warn(est)
    else:
        if groups is not None:
            raise ValueError("groups= was given although group_column names a column of X.")
        validate_data(est, X, reset=False, skip_check_array=True)
        X, labels = separated(X, columns.group)
        X = check_array(X, dtype=np.float64, ensure_min_features=0)
    if labels is None or kind == "population":
        code = np.full(len(X), NEW_GROUP)
    else:
        code = look_up(labels, est.group_labels_)
    return *design_of(X, columns), code


def row_pairs(est, X1, X2, groups1, groups2):
    """Return two sets of rows to predict and whether two rows share their group, (n1, n2).

    Of a model with factors that is (F, n1, n2).
    """
    X1, X2, groups1, groups2 = map(in_memory, (X1, X2, groups1, groups2))
    first = new_rows(est, X1, groups1)
    if isinstance(est._columns, FactorColumns):
        second = first if X2 is None else new_rows(est, X2, groups2)
        pairs = (groups1, groups2) if not est._columns.taken else (X1, X2)
        return first, second, shared_levels(est, first, second, pairs)
    if X2 is None:
        same = np.equal.outer(first[2], first[2])
        missing = first[2] == NEW_GROUP
        same[np.ix_(missing, missing)] = np.eye(missing.sum(), dtype=bool)
        return first, first, same
    second = new_rows(est, X2, groups2)
    code1, code2, n_groups = first[2], second[2], len(est.group_labels_)
    same = np.equal.outer(code1, code2) & (code1 >= 0)[:, None]
    unseen1, unseen2 = code1 >= n_groups, code2 >= n_groups
    if unseen1.any() and unseen2.any():  # each set numbers unseen labels on its own
        labels1, labels2 = _labels_of(est, X1, groups1), _labels_of(est, X2, groups2)
        for i in np.flatnonzero(unseen1):
            same[i, unseen2] = [labels1[i] == labels2[j] for j in np.flatnonzero(unseen2)]
    return first, second, same


def _labels_of(est, X, groups):
    if est._columns.group is None:
        return label_list(groups, len(X))
    return separated(X, est._columns.group)[1]


def rows_again(est, rows):
    """Return (design, local, code, sign, weight) of training rows that are given again."""
    design, local, code = new_rows(est, rows.X, rows.groups)
    y, weight = column_or_1d(rows.y), checked_weights(rows.sample_weight, design)
    check_consistent_length(design, y)
    sign = np.where(y == est.classes_[1], 1.0, -1.0)
    kept = weight > 0
    own = [w[kept] for w in local] if isinstance(local, list) else local[kept]
    return design[kept], own, code[kept], sign[kept], weight[kept]


def all_known(est, code):
    """Say whether all rows are of named groups, of named levels of each factor."""
    several = isinstance(est._columns, FactorColumns)
    n_named = [len(known) for known in est._levels] if several else len(est.group_labels_)
    return bool(np.all((code >= 0) & (code < n_named)))


def split_intercept(beta, columns):
    """Return (coefficients, intercept) of vectors (..., D)."""
    if columns.fit_intercept:
        return beta[..., :-1], beta[..., -1]
    return beta, np.zeros(beta.shape[:-1])
