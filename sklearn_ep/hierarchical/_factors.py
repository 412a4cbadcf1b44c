"""Grouping factors: their columns, and their labels as numbers."""

import numbers
import warnings
from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from .._estimator.tables import columns_at, is_missing, names_of, objects, values_at

_REMEDY = (
    "where a selector or a transformer changes the columns, pass that column through a "
    "ColumnTransformer with set_output(transform='pandas'), or hand groups to fit by metadata "
    "routing (set_fit_request(groups=True))"
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
    names = names_of(X)
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


def label_array(labels):
    """Return labels as an array: numbers and strings as such, anything else as objects.

    Objects are also those that numpy would change: integers beyond 2**53 beside floats, and strings
    that end in NUL.
    """
    kinds = {type(g) for g in labels}
    if kinds <= {int, float} or kinds == {str} or kinds == {bool}:
        table = np.array(labels)
        if table.tolist() == labels:
            return table
    return objects(labels)


def look_up(labels, table):
    """Return codes (n,): the position in the table, -1 for missing, J on for unseen labels."""
    known = {g: k for k, g in enumerate(table.tolist() if isinstance(table, np.ndarray) else table)}
    code = [-1 if is_missing(g) else known.setdefault(g, len(known)) for g in labels]
    return np.array(code, dtype=int)


def group_keys(table):
    """Return the labels as strings that tell them apart, for states that are saved as arrays."""
    return np.array([f"{type(g).__name__}:{g!r}" for g in table.tolist()], dtype=str)


def numbered_levels(labels):
    """Return (distinct labels (L,), code (n,)) of an array of numbers, or of objects.

    They are sorted where they can be compared, otherwise in order of appearance. Rows whose label
    is missing are numbered from L on, one each.
    """
    values = np.unique(labels) if _are_numbers(labels) else labels
    try:
        distinct = list(dict.fromkeys(g for g in values.tolist() if not is_missing(g)))
    except TypeError as error:
        raise TypeError("group labels must be hashable") from error
    with suppress(TypeError):  # labels of several kinds: order of appearance
        distinct.sort()
    code = codes_among(labels, distinct)
    missing = code < 0
    code[missing] = len(distinct) + np.arange(missing.sum())
    return label_array(distinct), code


def codes_among(labels, known):
    """Return codes (n,) of labels among known ones, as `look_up` does."""
    if not _are_numbers(labels):
        return look_up(labels.tolist(), known)
    distinct, where = np.unique(labels, return_inverse=True)
    return look_up(distinct.tolist(), known)[where]


def _are_numbers(labels):
    return labels.dtype.kind in "iuf"


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
    def n_effects(self):
        """Numbers (F,) of coefficients that vary by the levels of each factor."""
        return np.array([1 + len(f.slopes) for f in self.factors], dtype=int)

    @property
    def has_slopes(self):
        """Whether coefficients besides the intercept vary by group."""
        return bool(np.any(self.n_effects > 1))


def take_labels(X, taken):
    """Return X without some of its columns, an array where none is left."""
    left = [k for k in range(X.shape[1]) if k not in taken]
    return columns_at(X, left) if left else np.empty((len(X), 0))


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


def labels_of(table, factor):
    """Return the labels (n,) of a factor; of several columns the combinations, as tuples."""
    columns = [values_at(table, p) for p in factor.positions]
    if len(columns) == 1:
        return columns[0]
    rows = zip(*(c.tolist() for c in columns), strict=True)
    return objects([None if any(map(is_missing, row)) else row for row in rows])


def check_measured(table, factor):
    """Raise a ValueError where a column given by its index has measurements in place of labels.

    A selector of columns shifts what is at an index, and a measured column would be taken for
    groups of one row each.
    """
    names = factor.name if isinstance(factor.name, tuple) else (factor.name,)
    for column, position in zip(names, factor.positions, strict=True):
        values = values_at(table, position)
        if not (isinstance(column, numbers.Integral) and values.dtype.kind == "f"):
            continue
        known = values[~np.isnan(values)]
        if np.all(known != np.round(known)) and len(np.unique(known)) == len(known) > 2:
            raise ValueError(
                f"group_column={column!r} has a number with decimals in every row and no two "
                "alike, as a measured column: not labels of groups. Columns move under selection: "
                f"{_REMEDY}."
            )


def any_nested(codes):
    """Say whether the levels of a factor have all their rows in one level of another, or nearly."""
    ones = np.ones(len(codes[0]))
    for fine, coarse in permutations(codes, 2):
        # rows of each level in its commonest coarse level
        if fine.max() > coarse.max():
            most = csr_array((ones, (fine, coarse))).max(axis=1)
            if most.sum() > _NESTED * len(ones):
                return True
    return False


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
        if _given_slopes(est):
            raise ValueError("random_slopes needs groups: give group_column or groups.")
        return FactorColumns((), (), est.fit_intercept, False)
    listed, taken = isinstance(est.group_column, list), ()
    if groups is None:
        pairs = _named_factors(est, X)
        taken = tuple(sorted(set().union(*(positions for _, positions in pairs))))
    else:
        listed = listed or groups.shape[1] > 1
        pairs = _factors_beside(groups, listed)
    slopes = _slopes(est, X, [name for name, _ in pairs], taken)
    both = zip(pairs, slopes, strict=True)
    factors = [GroupingFactor(name, positions, own) for (name, positions), own in both]
    return FactorColumns(tuple(factors), taken, est.fit_intercept, listed)


def _factors_beside(groups, listed):
    """Return (name, positions in the table) of the factors of labels beside X."""
    names = list(getattr(groups, "columns", range(groups.shape[1]))) if listed else ["groups"]
    return [(name, (k,)) for k, name in enumerate(names)]


def _named_factors(est, X):
    """Return (name, positions in X) of the factors that `group_column` names."""
    given = est.group_column if isinstance(est.group_column, list) else [est.group_column]
    if not given:
        raise ValueError("group_column is an empty list: name at least one factor.")
    pairs = [(name, _positions(name, X, est)) for name in given]
    if len({frozenset(p) for _, p in pairs}) < len(pairs):
        raise ValueError(f"group_column={est.group_column!r} names a factor twice.")
    return pairs


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


def _given_slopes(est):
    """Return `random_slopes` as a dict or a list, a single column as a list of one."""
    given = est.random_slopes
    if given is None or isinstance(given, dict):
        return given or []
    return list(given) if np.ndim(given) else [given]


def _slopes(est, X, names, taken):
    """Return for each factor the positions of its varying coefficients in what is left of X."""
    given = _given_slopes(est)
    if not given:
        return [()] * len(names)
    if not isinstance(given, dict):
        if len(names) > 1:
            raise ValueError(
                f"random_slopes={est.random_slopes!r}: with several factors a dict from a factor, "
                "as written in group_column, to a list of columns."
            )
        given = {names[0]: given}
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ValueError(f"random_slopes has {unknown!r}, which is no factor: {names!r}.")
    return [_slope_positions(est, X, given.get(name, []), taken) for name in names]


def _slope_positions(est, X, own, taken):
    """Return the positions of columns in what is left of X without those that are taken."""
    own = own if np.ndim(own) else [own]
    found = [column_position(c, X, est.n_features_in_, "random_slopes") for c in own]
    if len(set(found)) < len(found) or set(found) & set(taken):
        raise ValueError(
            f"random_slopes={est.random_slopes!r} repeats a column or names a group column."
        )
    return tuple(c - sum(k < c for k in taken) for c in found)


def split_intercept(beta, columns):
    """Return (coefficients, intercept) of vectors (..., D)."""
    if columns.fit_intercept:
        return beta[..., :-1], beta[..., -1]
    return beta, np.zeros(beta.shape[:-1])
