"""Columns of data frames that are categories, coded as indicators of their levels."""

import numbers
from contextlib import suppress

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.validation import check_array, validate_data

from .tables import check_columns, columns_at, is_missing, names_of


def category_columns(X):
    """Return the indices of the columns of a data frame that hold text, categories or bools.

    None for other X, and for frames of numbers and dates alone.
    """
    if not (hasattr(X, "columns") and hasattr(X, "dtypes")):
        return []
    return [j for j, kind in enumerate(X.dtypes) if _is_category(kind)]


def _is_category(kind):
    """Return whether a type of pandas or polars is one of categories."""
    if hasattr(kind, "kind"):
        return kind.kind in "ObUS" and not str(kind).startswith("period")
    return str(kind).startswith(("Categorical", "Enum", "String", "Utf8", "Boolean", "Object"))


def _check_kinds(name, kind, values):
    """Raise a ValueError that names a column unless its known values are categories.

    These are text or numbers throughout, or of one other kind that the frame declares to be one.
    """
    with suppress(TypeError):  # lists, for instance, of which no set is made
        values = set(values)
    kinds = {_kind_of(type(value)): value for value in values if not is_missing(value)}
    if len(kinds) < 2 and (kinds.keys() <= {str, bytes, float} or str(kind).lower() != "object"):
        return
    shown = " and ".join(f"{value!r:.60}" for value in list(kinds.values())[:2])
    raise ValueError(
        f"column {name!r} of X has values such as {shown}: turn them all into text or all into "
        "numbers, dates for instance into days since the first one."
    )


def _kind_of(own):
    """Return the type that stands for one of values that can be put in order."""
    if issubclass(own, numbers.Number | np.bool_):
        return float
    return next((kind for kind in (str, bytes) if issubclass(own, kind)), own)


class CategoryCoder(TransformerMixin, BaseEstimator):
    """Transformer of data frames to the columns that are numbers, and indicators of the others.

    A missing value of a category is a level of its own. Levels that were not seen have an indicator
    in common, which is zero in the rows of the fit: they are as far from every level as two levels
    are from each other.

    Fitted, `groups_` has the index of the column of the frame, counted without gaps, that each
    column of the result is of; numbers come first.
    """

    def fit(self, X, y=None):
        """Learn the levels of the categories of X (n, d)."""
        validate_data(self, X, skip_check_array=True)
        self.columns_ = category_columns(X)
        self.numbers_ = [j for j in range(self.n_features_in_) if j not in self.columns_]
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        self.encoder_ = encoder.fit(self._categories(X))
        sizes = [len(levels) + 1 for levels in encoder.categories_]
        first = np.arange(len(self.numbers_))
        of_categories = np.arange(len(first), self.n_features_in_)
        self.groups_ = np.concatenate([first, np.repeat(of_categories, sizes)])
        return self

    def transform(self, X):
        """Return numbers and indicators (n, p)."""
        validate_data(self, X, reset=False, skip_check_array=True)
        indicators = self.encoder_.transform(self._categories(X))
        stops = np.cumsum([len(levels) for levels in self.encoder_.categories_])
        unseen = 1.0 - np.add.reduceat(indicators, np.append(0, stops[:-1]), axis=1)
        return np.hstack([self._numbers(X), np.insert(indicators, stops, unseen, axis=1)])

    def column_of(self, j):
        """Return the index of the column of the frame that column j of the result is of."""
        return [*self.numbers_, *self.columns_][self.groups_[j]]

    def _categories(self, X):
        """Return the categories (n, c) as objects, None where they are missing."""
        values = np.array(columns_at(X, self.columns_), dtype=object)
        names, kinds = names_of(X), list(X.dtypes)
        for j, column in zip(self.columns_, values.T, strict=True):
            _check_kinds(names[j], kinds[j], column.tolist())
            known = {v: None if is_missing(v) else v for v in set(column.tolist())}
            column[:] = [known[v] for v in column.tolist()]
        return values

    def _numbers(self, X):
        if not self.numbers_:
            return np.empty((len(X), 0))
        own = columns_at(X, self.numbers_)
        check_columns(own)
        return check_array(own, dtype=np.float64, ensure_all_finite=False)  # the model says where
