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
from .rows import RowState, row_precision
from .schur import FactorRows, SystemRows


def rows_of_parts(codes, n_levels, n_parts):
    """Return the rows in memory of each part; n_parts is their number, or "auto" for one.

    Rows of several parts are taken in the order of the largest factor, so that few of its levels
    are in two parts.
    """
    if n_parts in ("auto", 1):
        return [slice(None)]
    order = np.argsort(codes[int(np.argmax(n_levels))], kind="stable")
    return [order[rows] for rows in split_rows(len(order), n_parts)]


def rows_of(part, reader):
    """Return the `FactorRows` of a part, prepared by the driver or raw."""
    X, sign, weight, _, codes = read_rows(part, reader)
    return FactorRows(X, sign, weight, codes, [int(c.max()) + 1 for c in codes])


class Behind(NamedTuple):
    """Answer of a worker that has gone through the first n_steps steps and lacks some."""

    n_steps: int


class Kept:
    """Rows of a part in a process, their state, and the number of steps that led to it."""

    def __init__(self, held):
        self.held, self.state, self.n_steps = held, None, 0


def work(part, message, token, reader, big, function):
    """Return function(rows, state, *values) of a part, or `Behind`; None for no message.

    A message has the number of the part, of the first of the steps, these, and the values.
    """
    if message is None:
        return None
    k, start, steps, values = message
    kept = KEPT.find(token, k)
    n_known = 0 if kept is None else kept.n_steps
    if n_known < start:
        return Behind(n_known)
    if kept is None:
        rows = rows_of(part, reader)
        kept = Kept(SystemRows(rows, big))
        KEPT.keep(token, k, kept, rows.X.size + (5 * len(rows.codes) + 8) * len(rows.X))
    for step, *of_step in steps[kept.n_steps - start :]:
        kept.state, kept.n_steps = step(kept.held.rows, kept.state, *of_step), kept.n_steps + 1
    return function(kept.held, kept.state, *values)


def _of_part(value, k, where):
    """Return a value with its lists over factors at the levels of a part."""
    if hasattr(value, "of_part"):
        return value.of_part(k)
    if isinstance(value, list) and where is not None:
        pairs = zip(value, where, strict=True)
        return [None if v is None else v[at] for v, at in pairs]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_of_part(v, k, where) for v in value))
    return value


def _add(answers, where, n_levels):
    """Return the sum of the answers of all parts, lists over factors put at their levels."""
    first = answers[0]
    if isinstance(first, list):
        pairs = zip(zip(*answers, strict=True), zip(*where, strict=True), n_levels, strict=True)
        return [_add_levels(*pair) for pair in pairs]
    if isinstance(first, tuple):
        fields = zip(*answers, strict=True)
        return type(first)(*(_add(list(f), where, n_levels) for f in fields))
    return None if first is None else sum(answers[1:], start=first)


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
        """Return a value, step or tuple of them, as part k needs it."""
        return _of_part(value, k, self.where[k] if len(self.where) > 1 else None)

    def add(self, answers):
        """Return the sum of the answers of the parts, in part order."""
        return _add(answers, self.where, self.n_levels) if len(answers) > 1 else answers[0]


class LoggedRows:
    """Rows of a fit with a token, in parts that `run`, a `PartMap`, maps.

    reader is that of raw parts.
    """

    def __init__(self, run, token, numbers, reader, big):
        self.run, self.numbers, self.reader, self.big = run, numbers, reader, big
        self.token, self.steps = token, []
        self._sent = [0] * len(run.parts)

    def step(self, function, *values):
        """Have all rows go on to function(rows, state, *values), when they are next asked."""
        self.steps.append((function, *values))

    def each(self, function, *values):
        """Return function(rows, state, *values) of each part."""
        answers: list[Any] = [None] * len(self._sent)
        starts, lacking = list(self._sent), list(range(len(self._sent)))
        while lacking:
            messages: list[Any] = [None] * len(starts)
            for k in lacking:
                lacks = self.steps[starts[k] :]
                steps = [tuple(self.numbers.of_part(k, v) for v in step) for step in lacks]
                local = tuple(self.numbers.of_part(k, v) for v in values)
                messages[k] = k, starts[k], steps, local
            told = self.run(work, messages, self.token, self.reader, self.big, function)
            for k in lacking:
                answers[k] = told[k]
            lacking = [k for k in lacking if isinstance(answers[k], Behind)]
            for k in lacking:
                starts[k] = answers[k].n_steps
        self._sent = [len(self.steps)] * len(self._sent)
        return answers

    def ask(self, function, *values):
        """Return the sum over parts of function(rows, state, *values)."""
        return self.numbers.add(self.each(function, *values))

    def held(self):
        """Return the `HeldRows` of the parts in the state of the linear system."""
        parts = [SystemRows(rows_of(p, self.reader), self.big) for p in self.run.parts]
        states = [RowState(None, [], precision=t) for t in self.each(row_precision)]
        return HeldRows(list(zip(parts, states, strict=True)), self.numbers)


class HeldRows:
    """Rows in the memory of this process, in one state for good: pairs (`SystemRows`, state)."""

    def __init__(self, pairs, numbers):
        self.pairs, self.numbers = pairs, numbers

    def ask(self, function, *values):
        """Return the sum over parts of function(rows, state, *values)."""
        answers = [
            function(held, state, *(self.numbers.of_part(k, v) for v in values))
            for k, (held, state) in enumerate(self.pairs)
        ]
        return self.numbers.add(answers)
