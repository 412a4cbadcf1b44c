"""Which rows of a model of several factors go to which part, and what raw parts hold.

Levels of any factor may have rows in several parts: the driver numbers the levels of all parts, a
part knows its own.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.partition import Part, split_rows
from .._factors import numbered_levels
from .._raw_parts import checked_part
from .rows_in_parts import LevelNumbers, Prepared
from .schur import FactorRows

__all__ = ["FactorParts", "RawFactors", "parts_of_rows"]


class FactorParts(NamedTuple):
    """How rows become parts.

    numbers are the `LevelNumbers`; read makes `FactorRows` of the arrays of a part; members, for
    rows in memory, has the rows of each part, None for raw parts.
    """

    numbers: LevelNumbers
    read: Any
    members: list[Any] | None

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


def parts_of_rows(codes, n_levels, n_parts):
    """Return the `FactorParts` of rows in memory.

    Rows are taken in the order of the largest factor, so that few of its levels are in two parts.
    """
    whole: list[Any] = [slice(None)]
    if n_parts == 1:
        numbers = LevelNumbers([[None] * len(codes)], n_levels)
        return FactorParts(numbers, Prepared(), whole)
    order = np.argsort(codes[int(np.argmax(n_levels))], kind="stable")
    members = [order[rows] for rows in split_rows(len(order), n_parts)]
    where = [[np.unique(code[own]) for code in codes] for own in members]
    return FactorParts(LevelNumbers(where, n_levels), Prepared(), members)


class RawFactors(NamedTuple):
    """How a worker reads a raw part (X, y[, weight]); label +1 is `positive`."""

    columns: Any
    positive: Any

    def __call__(self, arrays):
        """Return the `FactorRows` of a part."""
        X, y, weight, labels = checked_part(arrays, self.columns)
        codes = [numbered_levels(own)[1] for own in labels]
        if self.columns.fit_intercept:
            X = np.hstack([X, np.ones((len(X), 1))])
        sign = np.where(y == self.positive, 1.0, -1.0)
        return FactorRows(X, sign, weight, codes, [int(c.max()) + 1 for c in codes])
