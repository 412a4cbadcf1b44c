"""Partitions of grouped rows: what they hold, how a worker reads them, what it is asked to do."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_array, column_or_1d

from ..._engine.partition import load_part
from ..._estimator.checks import checked_weights
from .. import _log_cholesky as log_cholesky
from .._checkpoint import digest
from .._groups import number_groups, split_column
from .arrow import ArrowRows, arrow_rows, conditional_ep
from .mode import marginal_terms
from .theta_nodes import tilted_by_nodes

__all__ = [
    "Columns",
    "PartSpec",
    "checked_rows",
    "describe",
    "design_of",
    "raw_arrays",
    "read_rows",
]


class Columns(NamedTuple):
    """What the columns of X are to the model.

    `group` is the position of the group column in X, None if it has none; `slopes` are positions of
    varying coefficients in what is left of X.
    """

    group: int | None
    slopes: tuple[int, ...]
    fit_intercept: bool
    has_groups: bool

    @property
    def taken(self):
        """Positions in X of the columns with labels."""
        return () if self.group is None else (self.group,)


class PartSpec(NamedTuple):
    """How the arrays (X, y[, weight]) of a raw partition become rows; label +1 is `positive`."""

    columns: Columns
    positive: Any


class Description(NamedTuple):
    """What the driver has to know of a raw partition before it can plan the fit."""

    n_rows: int
    weight: float
    width: int
    classes: np.ndarray
    labels: np.ndarray
    n_groups: int
    digest: str


def design_of(X, columns):
    """Return (shared design with the intercept last, design of the group effects)."""
    ones, local = np.ones((len(X), 1)), np.empty((len(X), 0))
    if columns.has_groups:
        local = np.hstack([ones, X[:, list(columns.slopes)]])
    return (np.hstack([X, ones]) if columns.fit_intercept else X), local


def raw_arrays(arrays):
    """Return (X as an array of two dimensions, y, weight or None) of a raw partition."""
    if len(arrays) not in (2, 3):
        raise ValueError("a partition must be (X, y) or (X, y, sample_weight).")
    X, y = np.asarray(arrays[0]), column_or_1d(np.asarray(arrays[1]))
    if X.ndim != 2:
        raise ValueError(f"X of a partition must be 2D, got {X.ndim} dimensions.")
    return X, y, arrays[2] if len(arrays) == 3 else None


def checked_rows(X, y, weight):
    """Return (X, y, weight, whether each row is kept) of a raw partition without its labels."""
    X = check_array(X, dtype=np.float64)
    if len(y) != len(X):
        raise ValueError(f"a partition has {len(X)} samples in X and {len(y)} in y.")
    weight = checked_weights(weight, X)
    kept = weight > 0
    return X[kept], y[kept], weight[kept], kept


def _checked(arrays, group_column):
    """Return (X without groups, y, weight, labels or None) of a raw partition, checked."""
    (X, y, weight), labels = raw_arrays(arrays), None
    if group_column is not None:
        X, labels = split_column(X, group_column)
    X, y, weight, kept = checked_rows(X, y, weight)
    if labels is not None:
        labels = [g for g, k in zip(labels, kept, strict=True) if k]
    return X, y, weight, labels


def describe(part, message, group_column, with_digest):
    """Return the `Description` of a raw partition (worker)."""
    arrays = load_part(part)
    width = np.shape(arrays[0])[1] if np.ndim(arrays[0]) == 2 else -1
    if group_column is not None and group_column >= width > 0:
        raise ValueError(f"group_column={group_column} is not a column of X, which has {width}.")
    X, y, weight, labels = _checked(arrays, group_column)
    table, code = number_groups(labels) if labels is not None else (np.empty(0), np.zeros(0, int))
    content = digest(X, np.asarray(y).astype(str), weight, code) if with_digest else ""
    total, n_groups = float(weight.sum()), int(code.max(initial=-1)) + 1
    return Description(len(X), total, width, np.unique(y), table, n_groups, content)


def rows_of(arrays, spec):
    """Return the `ArrowRows` of a raw partition."""
    X, y, weight, labels = _checked(arrays, spec.columns.group)
    code = np.zeros(len(X), int) if labels is None else number_groups(labels)[1]
    shared, local = design_of(X, spec.columns)
    return arrow_rows(shared, np.where(y == spec.positive, 1.0, -1.0), weight, local, code)[0]


def read_rows(part, spec):
    """Return the rows of a partition, prepared by the driver or raw."""
    arrays = load_part(part)
    return ArrowRows(*arrays) if spec is None else rows_of(arrays, spec)


def mode_worker(part, modes, spec, phi, q):
    """Return the `SiteTerms` of a partition."""
    rows = read_rows(part, spec)
    if modes is None:
        modes = np.zeros((len(rows.starts), q))
    return marginal_terms(rows, phi, q, modes)


def tilted_worker(part, message, spec, q, inner):
    """Return the `TiltedSite` of a partition under its cavity by EP; inner are its options."""
    return tilted_by_nodes(read_rows(part, spec), *message, q=q, **inner)


def drawing_worker(part, message, spec, q, tilted, settings):
    """Return the `TiltedSite` of a partition under its cavity by an engine that draws."""
    return tilted(read_rows(part, spec), *message, q=q, settings=settings)


def nodes_worker(part, message, spec, theta, q, inner):
    """Return the `ConditionalPosterior` of a partition at nodes in theta."""
    rows, scale = read_rows(part, spec), log_cholesky.factor(theta, q)
    return conditional_ep(rows, scale, *message, **inner)
