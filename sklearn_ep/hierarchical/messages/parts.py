"""Rows of several factors in parts: sums over levels travel, never rows.

Levels of any factor may have rows in several parts: the driver numbers the levels of all parts, a
part knows its own only, under numbers of its own. What its rows keep between two questions stays
where the rows are and is a function of the steps so far, which the driver keeps, in values of
levels: a worker that has lost its rows' state, or never had it, is sent the steps it lacks and goes
through them again. What it answers does not depend on that.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.partition import KEPT, split_rows
from .._parts import read_rows
from .rows import RowState, of_state
from .schur import FactorRows


def rows_of_parts(codes, n_levels, n_parts):
    """Return the rows in memory of each part; n_parts is their number, or "auto" for one.

    Rows of several parts are taken in the order of the largest factor, so that few of its levels
    are in two parts.
    """
    if n_parts in ("auto", 1):
        return [slice(None)]
    order = np.argsort(codes[int(np.argmax(n_levels))], kind="stable")
    return [order[rows] for rows in split_rows(len(order), n_parts)]


def rows_of(part, reader, big):
    """Return the `FactorRows` of a part, prepared by the driver or raw."""
    X, sign, weight, _, codes = read_rows(part, reader)
    return FactorRows(X, sign, weight, codes, [int(c.max()) + 1 for c in codes], big)


class Behind(NamedTuple):
    """Answer of a worker that has gone through the first n_steps steps and lacks some."""

    n_steps: int


def work(part, message, token, reader, big, function):
    """Return function(rows, state, *values) of a part, or `Behind`; None for no message.

    A message has the number of the part, of the first of the steps, these, and the values.
    """
    if message is None:
        return None
    k, start, steps, values = message
    rows, state, n_known = KEPT.find(token, k) or (None, None, 0)
    if n_known < start:
        return Behind(n_known)
    rows = rows_of(part, reader, big) if rows is None else rows
    lacking = steps[n_known - start :]
    for step, *of_step in lacking:
        state = step(rows, state, *of_step)
    if lacking or not n_known:
        size = rows.X.size + (5 * len(rows.codes) + 8) * len(rows.X)
        KEPT.keep(token, k, (rows, state, start + len(steps)), size)
    return function(rows, state, *values)


def _add_levels(answers, where, n):
    """Return the sum (..., n) of what parts say of some of n levels of a factor, None of None."""
    if answers[0] is None:
        return None
    total = np.zeros((*answers[0].shape[:-1], n))
    for answer, at in zip(answers, where, strict=True):
        total[..., at] += answer
    return total


class LevelNumbers(NamedTuple):
    """Which levels each part has: where[k][f] (L_kf,); a single part has all in their order."""

    where: list[list[Any]]
    n_levels: list[int]

    def of_part(self, k, value):
        """Return a value, or a tuple of them, with lists over factors at the levels of part k."""
        if hasattr(value, "of_part"):
            return value.of_part(k)
        if isinstance(value, tuple):
            own = (self.of_part(k, v) for v in value)
            return type(value)(*own) if hasattr(value, "_fields") else tuple(own)
        if isinstance(value, list) and len(self.where) > 1:
            pairs = zip(value, self.where[k], strict=True)
            return [None if v is None else v[at] for v, at in pairs]
        return value

    def add(self, answers):
        """Return the sum of the answers of the parts, lists over factors put at their levels."""
        first = answers[0]
        if first is None or len(answers) == 1:
            return first
        if isinstance(first, list):
            sides = zip(*answers, strict=True), zip(*self.where, strict=True), self.n_levels
            return [_add_levels(*of_factor) for of_factor in zip(*sides, strict=True)]
        if isinstance(first, tuple):
            return type(first)(*map(self.add, zip(*answers, strict=True)))
        return sum(answers[1:], start=first)


class LoggedRows:
    """Rows of a fit in parts that `run`, a `PartMap`, maps; reader is that of raw parts."""

    def __init__(self, run, numbers, reader, big):
        self.run, self.numbers, self.reader, self.big = run, numbers, reader, big
        self.steps, self._n_sent = [], 0

    def step(self, function, *values):
        """Have all rows go on to function(rows, state, *values), when they are next asked."""
        self.steps.append((function, *values))

    def each(self, function, *values):
        """Return function(rows, state, *values) of each part."""
        n_parts = len(self.run.parts)
        answers: list[Any] = [Behind(self._n_sent)] * n_parts
        while lacking := [k for k in range(n_parts) if isinstance(answers[k], Behind)]:
            messages: list[Any] = [None] * n_parts
            for k in lacking:
                start = answers[k].n_steps
                steps = [self.numbers.of_part(k, step) for step in self.steps[start:]]
                messages[k] = k, start, steps, self.numbers.of_part(k, values)
            told = self.run(work, messages, self.run.token, self.reader, self.big, function)
            for k in lacking:
                answers[k] = told[k]
        self._n_sent = len(self.steps)
        return answers

    def ask(self, function, *values):
        """Return the sum over parts of function(rows, state, *values)."""
        return self.numbers.add(self.each(function, *values))

    def held(self):
        """Return the `HeldRows` of the parts in the state of the linear system."""
        parts = [rows_of(p, self.reader, self.big) for p in self.run.parts]
        states = [RowState(None, [], precision=t) for t in self.each(of_state, "precision")]
        return HeldRows(list(zip(parts, states, strict=True)), self.numbers)


class HeldRows:
    """Rows in the memory of this process, in one state for good: pairs (`FactorRows`, state)."""

    def __init__(self, pairs, numbers):
        self.pairs, self.numbers = pairs, numbers

    def ask(self, function, *values):
        """Return the sum over parts of function(rows, state, *values)."""
        of_parts = (self.numbers.of_part(k, values) for k in range(len(self.pairs)))
        both = zip(self.pairs, of_parts, strict=True)
        return self.numbers.add([function(*pair, *own) for pair, own in both])
