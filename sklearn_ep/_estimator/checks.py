"""Checks of parameters and training data: a clear error before any work.

Predictions are in single precision where the rows are, as scikit-learn's linear models give them.
"""

import functools
import numbers
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state, check_scalar, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.sparsefuncs import min_max_axis
from sklearn.utils.validation import check_is_fitted, validate_data

from .._engine.partition import Part
from .annotations import Method
from .tables import check_columns

# Largest entry of a column, and its inverse the smallest one: sums of squares over any number of
# rows, and their inverses, stay within double precision (1e308) with room for a prior variance.
LARGEST_ENTRY = 1e140
_SMALLEST = 1.0 / LARGEST_ENTRY
# The same for columns that enter a model in their own units, next to priors and noise in others:
# fourth powers of them, times such a ratio, stay within double precision.
LARGEST_IN_UNITS = 1e30
# Largest weight, in units of one and of the smallest, whose square stays within double precision
# beside sums of squares.
_MOST_WEIGHT = 1e60


def validated(estimator, X, *args, **kwargs):
    """Return what `sklearn.utils.validation.validate_data` does, which names no column itself."""
    if hasattr(X, "columns"):
        check_columns(X)
    return validate_data(estimator, X, *args, **kwargs)


def validated_coded(estimator, X, coder, **how):
    """Return rows as numbers, after the indicators of a fitted `CategoryCoder` or without, None.

    Errors name the estimator, and number and names of columns are those of the caller.
    """
    if coder is None:
        return validated(estimator, X, dtype=np.float64, **how)
    validate_data(estimator, X, skip_check_array=True, **how)
    return check_array(coder.transform(X), estimator=estimator, input_name="X")


class CheckedInput(BaseEstimator):
    """Estimator that says whether rows may be sparse, and checks those of a fitted one."""

    _accept_sparse: Any = False

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = bool(self._accept_sparse)
        return tags

    def _check_new(self, X, *y):
        """Check rows to predict, or with labels; `check_is_fitted` comes first everywhere."""
        check_is_fitted(self)
        how: Any = dict(dtype=np.float64, accept_sparse=self._accept_sparse)
        return validated(self, X, *y, reset=False, **how)


def check_number(
    name, value, low=None, high=None, *, integer=False, boundaries="both", optional=False
):
    """Raise a ValueError or TypeError that names the parameter unless it is a number in range.

    `boundaries` says which ends belong to the range, as in `sklearn.utils.check_scalar`; None is
    let through where `optional`.
    """
    if value is None and optional:
        return
    kind = numbers.Integral if integer else numbers.Real
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    check_scalar(value, name, kind, min_val=low, max_val=high, include_boundaries=boundaries)
    if not integer and np.isnan(value):
        raise ValueError(f"{name} must be a number, got nan.")


def check_positive(name, value, finite=False):
    """Raise an error that names the parameter unless it is a positive number."""
    check_number(name, value, 0, boundaries="neither")
    if finite and np.isinf(value):
        raise ValueError(f"{name} must be finite.")


def check_number_or_auto(name, value, low=None, high=None):
    """Raise an error that names the parameter unless it is "auto" or a finite number between."""
    if not isinstance(value, numbers.Real):
        check_choice(name, value, ["auto"], "a number")
        return
    check_number(name, value, low, high, boundaries="neither")
    if not np.isfinite(float(value)):
        raise ValueError(f"{name} must be finite, got {value!r}.")


def check_choice(name, value, choices, other=""):
    """Raise a ValueError that names the parameter unless the value is one of the choices.

    `other` says what it may be besides, which the caller has looked for.
    """
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        allowed = f"{', '.join(map(repr, choices))} or {other}" if other else list(choices)
        which = "" if other else "one of "
        raise ValueError(f"{name} must be {which}{allowed}, got {value!r}.")


def check_seen(classes, y):
    """Raise a ValueError where y has labels that are none of the classes of the fit."""
    unknown = np.setdiff1d(y, classes)
    if len(unknown):
        raise ValueError(f"y has labels that were not seen in fit: {unknown}.")


def check_flag(name, value):
    """Raise a TypeError that names the parameter unless it is a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_sequence(name, value, what):
    """Raise a TypeError that names the parameter, and what it must be, unless it has a length."""
    try:
        n_entries = None if isinstance(value, str) else len(value)
    except TypeError:
        n_entries = None
    if n_entries is None:
        raise TypeError(f"{name} must be {what}, got {value!r}.")


def checked_array(name, value, what, **how):
    """Return an array of numbers, or raise a ValueError that names it and says what it must be.

    Keywords go to `sklearn.utils.check_array`.
    """
    try:
        return check_array(value, dtype=np.float64, input_name=name, **how)
    except (TypeError, ValueError) as error:
        why = str(error).splitlines()[0].rstrip(".:")
        raise ValueError(f"{name} must be {what}: {why}.") from error


def checked_random(random_state):
    """Return the random numbers of `random_state`, or raise a ValueError that names it."""
    try:
        return check_random_state(random_state)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "random_state must be None, an integer from 0 to 2**32 - 1 or a "
            f"numpy.random.RandomState, got {random_state!r}."
        ) from error


def check_hyperparameters(hyperparameters):
    """Raise a ValueError unless `hyperparameters` is one of the three words."""
    check_choice("hyperparameters", hyperparameters, ["auto", "integrate", "mode"])


_FLAGS = ("fit_intercept", "warm_start", "standardize", "copy_X", "copy_X_train", "refine")


def check_common(estimator):
    """Check the parameters that mean the same in every estimator with iterations."""
    for name in _FLAGS:
        if hasattr(estimator, name):
            check_flag(name, getattr(estimator, name))
    check_number("damping", estimator.damping, 0, 1, boundaries="right")
    check_number("max_iter", estimator.max_iter, 1, integer=True)
    check_number("tol", estimator.tol, 0, boundaries="neither")
    class_weight = getattr(estimator, "class_weight", None)
    if not isinstance(class_weight, dict):
        check_choice("class_weight", class_weight, ["balanced", None], "a dict")
    check_running(estimator)


def check_running(estimator):
    """Check `verbose`, `n_jobs` and `random_state`."""
    if not isinstance(estimator.verbose, numbers.Integral | np.bool_):
        raise TypeError(f"verbose must be an integer or a bool, got {estimator.verbose!r}.")
    check_number("n_jobs", estimator.n_jobs, integer=True, optional=True)
    if estimator.n_jobs == 0:
        raise ValueError("n_jobs must not be 0; use None or 1 for one process.")
    checked_random(getattr(estimator, "random_state", None))


class Training(NamedTuple):
    """Checked training data with the rows of weight zero left out.

    `y` is the response, or the class index for classifiers; `kept` marks the rows of the input that
    are used, so that per-row results can be given back in the caller's shape.
    """

    X: Any
    y: np.ndarray
    weight: np.ndarray
    kept: np.ndarray


def group_numbers(name, groups, d):
    """Return the number of the group of each of d features, or None; `name` is the argument."""
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (d,):
        raise ValueError(f"{name} must have one label for each of {d} features: {labels.shape}.")
    return np.unique(labels, return_inverse=True)[1]


def check_column_scales(estimator, X, largest=LARGEST_ENTRY):
    """Raise a ValueError that names the column where squares of X would over- or underflow.

    Return the norm of the largest absolute values of the columns, the size that `same_units`
    compares. Columns of zeros pass; X is dense, CSR or CSC, or its `ColumnRanges`. `largest` is
    `LARGEST_IN_UNITS` for models that do not rescale the columns themselves; these warn of units as
    `warn_of_spreads` does. O(nnz).
    """
    columns = X if isinstance(X, ColumnRanges) else ColumnRanges.of_rows(X)
    check_column_sizes(estimator, columns.sizes, largest)
    if largest == LARGEST_IN_UNITS:
        warn_of_spreads(estimator, columns)
    return float(np.linalg.norm(columns.sizes))


def same_units(before, after):
    """Return whether columns of such sizes may share their units, so that a fit can start warm.

    Hyperparameters learned in other units are a bad start: far from the mode steps are so small
    that a fit ends where it began.
    """
    # linear models in units of .1 to 10 take 13 steps at most for 5; at .01 the prior variance
    # stays where it was
    return 0.1 * before <= after <= 10.0 * before


# Ratio of the spreads of two columns beyond which they can hardly share a unit, and how many
# entries tell a range: of two rows, or of a rare word, it may be small by chance.
_MOST_SPREAD = 1e3
_FEWEST_ENTRIES = 10


class ColumnRanges(NamedTuple):
    """Smallest and largest value (d,) of each column, and how many entries are not zero."""

    low: np.ndarray
    high: np.ndarray
    n_entries: np.ndarray

    @classmethod
    def of_rows(cls, X):
        """Return those of a dense, CSR or CSC X."""
        if not sp.issparse(X):
            return cls(X.min(axis=0), X.max(axis=0), np.full(X.shape[1], X.shape[0]))
        low, high = min_max_axis(X, axis=0)
        return cls(low, high, X.count_nonzero(axis=0))

    @classmethod
    def of_parts(cls, parts):
        """Return those of all rows, from the ranges of parts of them."""
        low, high, n_entries = zip(*parts, strict=True)
        return cls(np.min(low, axis=0), np.max(high, axis=0), np.sum(n_entries, axis=0))

    @property
    def sizes(self):
        """Largest absolute values (d,)."""
        return np.maximum(-self.low, self.high)


class SpreadWarning(UserWarning):
    """Columns that differ so much that they share no unit."""


def warn_of_spreads(estimator, X):
    """Warn, and name a column, where columns of X differ so much that they share no unit.

    Return whether they do. X is dense, CSR or CSC, or its `ColumnRanges`.

    For models whose prior or first length scale is in units of the columns: one column at a scale
    of 1e6 beside others at 1 leaves nothing to learn from these. Few rows tell nothing, nor do
    sparse columns with few entries: their range is chance.
    """
    low, high, n_entries = X if isinstance(X, ColumnRanges) else ColumnRanges.of_rows(X)
    varies = np.flatnonzero((high > low) & (n_entries >= _FEWEST_ENTRIES))
    if len(varies) < 2:
        return False
    spread = 0.5 * high[varies] - 0.5 * low[varies]  # half of it, which does not overflow
    if spread.max() / _MOST_SPREAD <= spread.min():
        return False
    far = np.abs(np.log(spread) - np.median(np.log(spread)))
    j = int(varies[np.argmax(far)])
    warnings.warn(
        f"{type(estimator).__name__}: half the range of a column of X is between "
        f"{spread.min():.3g} and {spread.max():.3g}; column {_column_name(estimator, j)} is "
        "farthest from the others. The prior takes all columns to be in one unit: standardise "
        "them, for instance by a pipeline with StandardScaler.",
        SpreadWarning,
        stacklevel=4,
    )
    return True


def warn_of_narrow_prior(estimator, X, weight, sd):
    """Warn, and name a column, where a prior in units of the columns outweighs all rows.

    For coefficients of a logistic model with prior standard deviation sd: a row adds at most a
    quarter of its squared distance from the mean of the column to the precision of its coefficient.
    """
    with np.errstate(over="ignore"):  # where squares are beyond double precision nothing is narrow
        squares = weight @ (X - np.average(X, axis=0, weights=weight)) ** 2
    varies = np.ptp(X[weight > 0], axis=0) > 0  # squares of one value are those of rounding
    held = np.flatnonzero(varies & (0.25 * squares * sd**2 < 1.0))
    if len(held):
        j = int(held[np.argmin(squares[held])])
        warnings.warn(
            f"{type(estimator).__name__}: prior_scale={sd:g} is in units of the columns, and "
            f"column {_column_name(estimator, j)} is so narrow that it outweighs what all rows say "
            "of the coefficient: standardise the columns, or give prior_scale a value for each.",
            UserWarning,
            stacklevel=4,
        )


# Loss of digits, as a ratio, from which data explain a posterior that is not positive definite.
_DIGITS_LOST = 1e6


def numerical_cause(X, sample_weight):
    """Return a sentence on what of the data may explain a numerical failure, and what to do.

    X and sample_weight are what the user gave, or None.
    """
    try:
        columns = ColumnRanges.of_rows(X if sp.issparse(X) else np.asarray(X, dtype=float))
        weight = np.asarray(1.0 if sample_weight is None else sample_weight, dtype=float)
    except (TypeError, ValueError):  # labels of groups, partitions, operators
        return (
            "The usual cause is that columns of X differ much in size, or are far from zero for "
            "their spread: standardise the columns."
        )
    with np.errstate(over="ignore"):  # a range beyond double precision is out of proportion
        spread, size = columns.high - columns.low, columns.sizes
    typical = np.inf if sp.issparse(X) else np.median(np.abs(X), axis=0)
    if np.any(size > _DIGITS_LOST * np.where(typical > 0, typical, np.inf)):
        return (
            "A column of X has an entry that is a million times as large as half of the others: "
            "look at that row, or take logarithms."
        )
    sizes = size[(size > 0) & (spread > 0)]
    least = np.minimum(np.min(sizes, initial=np.inf), spread[(size > 0) & (spread > 0)])
    if np.any(sizes > _DIGITS_LOST * least) or np.any(sizes > _DIGITS_LOST):
        return (
            "The columns of X are very large, differ in size by a factor of a million, or are that "
            "far from zero for their spread: standardise the columns."
        )
    positive = weight[weight > 0]
    if positive.max() > _DIGITS_LOST * positive.min():
        return (
            "sample_weight differs by a factor of a million and more: bring its entries together."
        )
    return (
        "No column of X and no weight is out of proportion, so that the model is to blame: make "
        "the prior narrower or lower damping, and please report it with the data."
    )


def _column_name(estimator, j):
    """Return the name, or else the index, of the column of X that column j of a fit is of."""
    names, coder = (getattr(estimator, name, None) for name in ("feature_names_in_", "_coder"))
    j = j if coder is None else coder.column_of(j)
    return str(j) if names is None else repr(str(names[j]))


def check_column_sizes(estimator, size, largest=LARGEST_ENTRY, smallest=_SMALLEST):
    """Raise as `check_column_scales` does, for the largest absolute values of the columns."""
    bad = np.flatnonzero((size > largest) | ((size > 0) & (size < smallest)))
    if not bad.size:
        return
    j = int(bad[0])
    raise ValueError(
        f"X has a largest absolute value of {size[j]:.3g} in column {_column_name(estimator, j)}, "
        "whose powers overflow double precision: scale the columns of X to between "
        f"{smallest:g} and {largest:g}, best to unit variance."
    )


def _check_numbers(y):
    """Raise a ValueError that names y where a response is text, dates or other objects."""
    values = np.asarray(y)
    if values.dtype.kind == "O" and y is not None:
        try:
            values = values.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"y must hold numbers: {error}.") from error
    if values.dtype.kind in "USVmM":
        raise ValueError(f"y must hold numbers, got an array of dtype {values.dtype}.")


def checked_weights(sample_weight, X):
    """Return non-negative weights (n,), or raise a ValueError that names them."""
    n = X.shape[0]
    if sample_weight is None:
        return np.ones(n)
    weight = np.asarray(sample_weight)
    if weight.dtype.kind == "c":
        raise ValueError("Complex data not supported: sample_weight must hold real numbers.")
    weight = weight.astype(np.float64, copy=False)
    if weight.ndim == 0:
        weight = np.full(n, float(weight))
    if weight.shape != (n,):
        raise ValueError(f"sample_weight.shape == {weight.shape}, expected {(n,)}!")
    if not np.all(np.isfinite(weight)):
        raise ValueError("sample_weight contains NaN or infinity.")
    if np.any(weight < 0):
        raise ValueError("Negative values in data passed to `sample_weight`.")
    if not np.any(weight > 0):
        raise ValueError("sample_weight is zero for every row: there is nothing to fit.")
    least = np.min(weight, where=weight > 0, initial=np.inf)
    if weight.max() > _MOST_WEIGHT * min(least, 1.0):
        raise ValueError(
            f"sample_weight goes from {least:.3g} to {weight.max():.3g}, too far for double "
            "precision: bring the weights near one, and give rows that hardly count a zero."
        )
    return weight


class FewCopiesWarning(UserWarning):
    """Rows whose weights are so small that they look like shares, not numbers of copies."""


def warn_of_few_copies(estimator, weight):
    """Warn where rows of these weights count as less than a tenth of their number.

    Weights of sum one, as surveys and boosting have them, leave a classifier one label to learn
    from.
    """
    total, n = float(weight.sum()), len(weight)
    if total < 0.1 * n:
        warnings.warn(
            f"{type(estimator).__name__}: {n} rows have a sample_weight of {total:.3g} together. "
            "A weight is a number of copies, so that they count as so many rows beside the prior; "
            f"if it is shares that you mean, multiply them by {n / total:.3g}.",
            FewCopiesWarning,
            stacklevel=4,
        )


def checked_class_weights(estimator, y, weight):
    """Return the weights (K,) of the classes among labels y of so many copies each.

    "balanced" counts copies, so that weights still equal repetition.
    """
    args = dict(classes=estimator.classes_, y=y, sample_weight=weight)
    of_class = compute_class_weight(estimator.class_weight, **args)
    if not np.all(np.isfinite(of_class) & (of_class > 0)):
        raise ValueError(
            f"class_weight must be positive and finite, got {estimator.class_weight!r}; leave out "
            "the rows of a class that should not count."
        )
    return of_class


def validate_training(estimator, X, y, sample_weight=None, dtype=np.float64, **kwargs):
    """Check X, y and weights together; set `classes_` of a classifier; return a `Training`.

    Extra keywords go to `sklearn.utils.validation.validate_data`.
    """
    is_classifier = isinstance(estimator, ClassifierMixin)
    if not is_classifier:
        _check_numbers(y)
    X, y = validated(estimator, X, y, dtype=dtype, y_numeric=not is_classifier, **kwargs)
    if is_classifier:
        check_classification_targets(y)
        classes, y = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            only = classes.tolist()[0]
            raise ValueError(f"y has only one class, {only!r}; a classifier needs two.")
    else:
        y = y.astype(np.float64, copy=False)
    weight = checked_weights(sample_weight, X)
    kept = weight > 0
    if is_classifier:
        if len(np.unique(y[kept])) < len(classes):
            raise ValueError("y has a class whose rows all have sample_weight 0; leave it out.")
        estimator.classes_ = classes
        warn_of_few_copies(estimator, weight[kept])
    if not kept.all():
        X, y = X[kept], y[kept]
    return Training(X, y, weight[kept], kept)


def spread_rows(values, kept, fill=0.0):
    """Give per-row results (..., n_kept) the shape of the caller's rows (..., n)."""
    if kept.all():
        return values
    out = np.full(values.shape[:-1] + kept.shape, fill)
    out[..., kept] = values
    return out


def refuse_joint(estimator, setting):
    """Raise a ValueError where `multi_class` asks for a joint posterior that a setting excludes."""
    if estimator.multi_class == "joint":
        raise ValueError(
            f"multi_class='joint' cannot be combined with {setting}: use multi_class='auto', which "
            "fits one class against the rest there."
        )


def count_problems(estimator, joint=False):
    """Return the number of problems of a classifier: binary ones, or one of all classes jointly."""
    n_classes = len(estimator.classes_)
    return 1 if joint or n_classes == 2 else n_classes


def is_part_list(X: Any, y: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether `fit(X, y)` was given a list of partitions in place of arrays."""
    if y is not None or not isinstance(X, list | tuple) or len(X) == 0:
        return False
    named = next((p for p in X if isinstance(p, str | os.PathLike)), None)
    if named is not None:
        raise ValueError(
            f"{named!r} is the name of a file, not a partition: give functions that load them, as "
            "[functools.partial(load, name) for name in names] with load(name) -> (X, y)."
        )
    return all(isinstance(p, Part | tuple) or callable(p) or hasattr(p, "result") for p in X)


def is_unweighted_part_list(X: Any, y: Any, sample_weight: Any) -> TypeGuard[Sequence[Any]]:
    """Return the same, or raise a ValueError where partitions have weights beside them."""
    parted = is_part_list(X, y)
    if parted and sample_weight is not None:
        raise ValueError("sample_weight is for rows in memory: give repeated rows instead.")
    return parted


def checked_draws(estimator, n_samples, random_state):
    """Check what draws from a fitted estimator are asked for by; return the random numbers."""
    check_is_fitted(estimator)
    check_number("n_samples", n_samples, 1, integer=True)
    return checked_random(random_state)


def draw_seed(random_state):
    """Return a seed out of a random state: workers and later calls draw from it alike."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def is_single(X):
    """Return whether rows, an array, sparse matrix or table, are in single precision throughout."""
    try:
        kinds = list(X.dtypes)
    except (AttributeError, TypeError):
        kinds = [getattr(X, "dtype", None)]
    return bool(kinds) and all(kind == np.float32 for kind in kinds)


def in_precision_of_rows(predict: Method) -> Method:
    """Let a method answer in ``float32`` where its rows and those of the fit were.

    The fit leaves what it saw in ``estimator._fitted_single``. All is computed in double precision
    and rounded at the end.
    """

    @functools.wraps(predict)
    def wrapper(self, X, *args, **kwargs):
        found = predict(self, X, *args, **kwargs)
        if not (getattr(self, "_fitted_single", False) and is_single(X)):
            return found
        if isinstance(found, tuple):
            return tuple(values.astype(np.float32) for values in found)
        return found.astype(np.float32)

    return cast(Method, wrapper)


def check_parts(parts: Any) -> None:
    """Raise a ValueError where a list can be no list of partitions."""
    if len(parts) == 0:
        raise ValueError("the list of partitions is empty: X has 0 samples and there is no y.")
    if not is_part_list(parts, None):
        raise ValueError("y is None, but X is no list of partitions such as (X, y) pairs.")
