"""Which rows of a model of several factors go to which part, and what raw parts hold.

Levels of any factor may have rows in several parts: the driver numbers the levels of all parts, a
part knows its own.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.partition import Part, load_part, split_rows
from .._checkpoint import digest
from .._factors import check_measured, labels_of, numbered_levels, take_labels
from ..partitions.parts import checked_rows, raw_arrays
from .rows_in_parts import LevelNumbers, Prepared
from .schur import FactorRows

__all__ = [
    "FactorParts",
    "RawFactors",
    "describe_factors",
    "join_levels",
    "parts_of_rows",
    "width_of",
]


class FactorParts(NamedTuple):
    """How rows become parts.

    numbers are the `LevelNumbers`; read makes `FactorRows` of the arrays of a part; members, for
    rows in memory, has the rows of each part, None for raw parts; fingerprint, with a checkpoint,
    tells data and model from others.
    """

    numbers: LevelNumbers
    read: Any
    members: list[Any] | None
    fingerprint: str

    def prepared(self, plan, sign):
        """Return the parts of a plan with rows in memory, for labels in {-1, +1}."""
        out = []
        for k, own in enumerate(self.members or []):
            codes = [code[own] for code in plan.codes]
            n_levels = plan.n_levels
            if self.numbers.where[k][0] is not None:
                own_levels = zip(self.numbers.where[k], codes, strict=True)
                codes = [np.searchsorted(at, code) for at, code in own_levels]
                n_levels = [len(at) for at in self.numbers.where[k]]
            rows = plan.X[own], sign[own], plan.weight[own]
            out.append(Part(*rows, np.array(n_levels), *codes))
        return out


def parts_of_rows(codes, n_levels, n_parts, fingerprint):
    """Return the `FactorParts` of rows in memory.

    Rows are taken in the order of the largest factor, so that few of its levels are in two parts.
    """
    whole: list[Any] = [slice(None)]
    if n_parts == 1:
        numbers = LevelNumbers([[None] * len(codes)], n_levels)
        return FactorParts(numbers, Prepared(), whole, fingerprint)
    order = np.argsort(codes[int(np.argmax(n_levels))], kind="stable")
    members = [order[rows] for rows in split_rows(len(order), n_parts)]
    where = [[np.unique(code[own]) for code in codes] for own in members]
    return FactorParts(LevelNumbers(where, n_levels), Prepared(), members, fingerprint)


class RawFactors(NamedTuple):
    """How a worker reads a raw part (X, y[, weight]); label +1 is `positive`."""

    columns: Any
    positive: Any

    def __call__(self, arrays):
        """Return the `FactorRows` of a part."""
        X, y, weight, labels = _checked(arrays, self.columns)
        codes = [numbered_levels(own)[1] for own in labels]
        if self.columns.fit_intercept:
            X = np.hstack([X, np.ones((len(X), 1))])
        sign = np.where(y == self.positive, 1.0, -1.0)
        return FactorRows(X, sign, weight, codes, [int(c.max()) + 1 for c in codes])


def _checked(arrays, columns):
    """Return (X without labels, y, weight, labels of each factor) of a raw part, checked."""
    table, y, weight = raw_arrays(arrays)
    labels = [labels_of(table, f) for f in columns.factors]
    X, y, weight, kept = checked_rows(take_labels(table, columns.taken), y, weight)
    if not kept.all():
        labels = [_kept(own, kept) for own in labels]
    return X, y, weight, labels


def _kept(labels, kept):
    if isinstance(labels, np.ndarray):
        return labels[kept]
    return [g for g, k in zip(labels, kept, strict=True) if k]


def width_of(part, message):
    """Return the number of columns of a raw part (worker)."""
    return raw_arrays(load_part(part))[0].shape[1]


class PartLevels(NamedTuple):
    """What the driver has to know of a raw part: named labels and rows of all levels by factor."""

    n_rows: int
    classes: np.ndarray
    labels: list[Any]
    sizes: list[np.ndarray]
    digest: str


def describe_factors(part, message, columns, with_digest):
    """Return the `PartLevels` of a raw part (worker)."""
    arrays = load_part(part)
    table = raw_arrays(arrays)[0]
    for factor in columns.factors:
        check_measured(table, factor)
    X, y, weight, labels = _checked(arrays, columns)
    pairs = [numbered_levels(own) for own in labels]
    known, codes = zip(*pairs, strict=True)
    text = np.asarray(y).astype(str)
    content = digest(X, text, weight, *codes) if with_digest else ""
    return PartLevels(len(y), np.unique(y), list(known), [np.bincount(c) for c in codes], content)


def join_levels(told):
    """Return (named levels, rows of all levels, `LevelNumbers`) over the parts' `PartLevels`."""
    levels, sizes = [], []
    where: list[list[Any]] = [[] for _ in told]
    for f in range(len(told[0].labels)):
        every = [np.asarray(t.labels[f]) for t in told]
        known, code = numbered_levels(_joined(every))
        ends = np.cumsum([len(own) for own in every])
        free = len(known)
        for k, (own, t) in enumerate(zip(np.split(code, ends[:-1]), told, strict=True)):
            unnamed = len(t.sizes[f]) - len(own)
            where[k].append(np.r_[own, np.arange(free, free + unnamed)])
            free += unnamed
        total = np.zeros(free)
        for at, t in zip(where, told, strict=True):
            total[at[f]] += t.sizes[f]
        levels.append(known)
        sizes.append(total)
    return levels, sizes, LevelNumbers(where, [len(s) for s in sizes])


def _joined(labels):
    """Return the labels of all parts as an array of numbers, or as a list."""
    if all(own.dtype.kind in "iuf" for own in labels):
        return np.concatenate(labels)
    return [g for own in labels for g in own.tolist()]
