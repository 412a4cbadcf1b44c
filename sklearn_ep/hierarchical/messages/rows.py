"""Variances of rows without a factorisation: precisions sent along rows between the factors.

Each row connects one level of each factor. Were the graph of rows and levels a tree, the messages
of belief propagation would give exact variances; sparse crossed data are nearly one. What comes out
is the cavity of each row, the variance of its predictor without its own site, always positive.

What a row keeps, its site and its messages, is no function of the level values of one moment, but
it is one of all that went before: `RowState` changes by steps alone, each of which says in values
of levels what every row is to do. Whoever has the rows and the steps has the state.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..._engine.likelihoods import Logit
from ..._engine.rules import rule_of_power
from ..._engine.sites import Sites

__all__ = [
    "Back",
    "Linearise",
    "Mark",
    "Resume",
    "RowState",
    "Send",
    "Start",
    "Update",
    "first_state",
    "known_precision",
    "message_sums",
    "row_evidence",
    "row_mismatch",
    "row_precision",
    "row_sites",
    "updated_sites",
]

_START = 0.7  # share of a site's precision that its first messages carry
_BLOCK = 1 << 16  # rows whose moments are in the cache at once
_AGAIN = 8  # local iterations that find the rows' part of a stored state, of Newton's order


class RowState(NamedTuple):
    """What the rows keep.

    sites; messages, for each factor the precision (n,) that a row sends to its level, None where
    the finest factor of a chain gets that of the whole chain; cavity (n,), the variance of a row by
    its levels without its own site; precision (n,) of the sites, copies
    counted, in the linear system at hand; mismatch, the largest of the last update; marked, a state
    to go back to.
    """

    sites: Any
    messages: list[Any]
    cavity: Any = None
    precision: Any = None
    mismatch: float = np.inf
    marked: Any = None


def first_state(rows, sites=None, leaves=None):
    """Return the `RowState` to start from, with weak sites that lean to the labels if none.

    leaves are the factors that rows send messages to, None for all.
    """
    if sites is None:
        sites = Sites(np.full(len(rows.sign), 0.15), 0.5 * rows.sign)
    leaves = range(len(rows.codes)) if leaves is None else leaves
    first = _START * sites.precision
    return RowState(sites, [first if f in leaves else None for f in range(len(rows.codes))])


def _inverse_cavities(rows, messages, totals):
    """Return for each factor the variance (n,) of each row's level, or chain, without the row."""
    triples = zip(totals, rows.codes, messages, strict=True)
    return [None if m is None else 1.0 / (total[code] - m) for total, code, m in triples]


def _total(variances):
    """Return the sum (n,) of variances over the factors that have them."""
    return sum(v for v in variances if v is not None)


def _sent(t, variances):
    """Return the messages of rows with sites of precision t and these variances of levels."""
    total = _total(variances)
    return [None if v is None else t / (1.0 + t * (total - v)) for v in variances]


class Start(NamedTuple):
    """Step: start from sites of rows, those of each part, None for weak ones.

    leaves are the factors that get messages.
    """

    parts: list[Sites] | None
    leaves: list[int]

    def of_part(self, k):
        """Return the step as part k needs it."""
        return self if self.parts is None else Start([self.parts[k]], self.leaves)

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        return first_state(rows, None if self.parts is None else self.parts[0], self.leaves)


class Send(NamedTuple):
    """Step: send messages at total precisions (L_f,) of the levels, None for those without."""

    totals: list[Any]

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        variances = _inverse_cavities(rows, state.messages, self.totals)
        return state._replace(messages=_sent(state.sites.precision, variances))


class Linearise(NamedTuple):
    """Step: take cavities, at total precisions (L_f,) of the levels, and sites as they now are."""

    totals: list[Any]

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        cavity = _total(_inverse_cavities(rows, state.messages, self.totals))
        return state._replace(cavity=cavity, precision=rows.weight * state.sites.precision)


class Update(NamedTuple):
    """Step: match the tilted moments at means, an `Effects`.

    root (D, D) is R, where R'R is the covariance of the dense columns; power the share of a row's
    likelihood that is matched.
    """

    root: np.ndarray
    mean: Any
    power: float

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        turned = rows.X @ self.root.T
        cavity_var = state.cavity + np.einsum("nd,nd->n", turned, turned)
        predictor = rows.predictor(self.mean)
        sites, mismatch = updated_sites(rows, state.sites, predictor, cavity_var, self.power)
        return state._replace(sites=sites, mismatch=mismatch)


class Resume(NamedTuple):
    """Step: find the rows' part of a stored fixed point from what it says of levels.

    Given the levels a row has one unknown site, and its update is a step of Newton's method for it.
    prior are precisions (L_f,) of the levels, below which no cavity is; the others as in `Update`.
    """

    totals: list[Any]
    prior: list[Any]
    root: np.ndarray
    mean: Any
    power: float

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        leaves = [f for f, total in enumerate(self.totals) if total is not None]
        state = first_state(rows, leaves=leaves)
        levels = list(zip(self.totals, self.prior, rows.codes, strict=True))
        turned, predictor = rows.X @ self.root.T, rows.predictor(self.mean)
        dense = np.einsum("nd,nd->n", turned, turned)
        for _ in range(_AGAIN):
            pairs = zip(levels, state.messages, strict=True)
            variances = [
                None if m is None else 1.0 / np.maximum(a[c] - m, b[c]) for (a, b, c), m in pairs
            ]
            args = state.sites, predictor, dense + _total(variances), self.power
            sites, _ = updated_sites(rows, *args)
            state = RowState(sites, _sent(sites.precision, variances))
        return state


class Mark(NamedTuple):
    """Step: remember the state."""

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        return state._replace(marked=state)


class Back(NamedTuple):
    """Step: go back to the state that was remembered."""

    def advance(self, rows, state):
        """Return the next `RowState` of rows."""
        return state.marked._replace(marked=state.marked)


def message_sums(held, state):
    """Return the sums [(L_f,)] of messages over the levels of each factor that gets them."""
    rows, messages = held.rows, enumerate(state.messages)
    return [None if m is None else rows.sums(f, rows.weight * m) for f, m in messages]


def known_precision(held, state):
    """Return X' V^-1 X (D, D) with the variance V of rows whose effects are integrated out."""
    rows, t = held.rows, state.sites.precision
    known = rows.weight * t / (1.0 + t * state.cavity)
    return rows.X.T @ (known[:, None] * rows.X)


def row_evidence(held, state, root, mean, power):
    """Return the sum of the rows' terms of the log evidence; parameters as for `Update`."""
    rows, rule, total = held.rows, partial(rule_of_power(power), Logit()), 0.0
    predictor = rows.predictor(mean)
    for start in range(0, len(predictor), _BLOCK):
        some = slice(start, start + _BLOCK)
        sites = Sites(state.sites.precision[some], state.sites.shift[some])
        turned = rows.X[some] @ root.T
        cavity = state.cavity[some] + np.einsum("nd,nd->n", turned, turned)
        var = cavity / (1.0 + sites.precision * cavity)
        total += rows.weight[some] @ rule(rows.sign[some], sites, predictor[some], var).log_term
    return float(total)


def row_mismatch(held, state):
    """Return the largest distance of tilted from current moments in the last update."""
    return state.mismatch


def row_precision(held, state):
    """Return the precisions (n,) of the rows in the linear system."""
    return state.precision


def row_sites(held, state):
    """Return the sites of the rows."""
    return state.sites


def updated_sites(rows, sites, mean, cavity_var, power=1.0):
    """Return (new sites, largest distance of tilted from current moments in sds).

    mean (n,) are the predictor's, under all sites; power is the share of a row's likelihood that is
    matched. Rows are taken in blocks.
    """
    factor = Logit() if power == 1.0 else Logit().powered(power)
    new = Sites(np.empty_like(mean), np.empty_like(mean))
    worst = 0.0
    for start in range(0, len(mean), _BLOCK):
        some = slice(start, start + _BLOCK)
        t, nu, m, c = sites.precision[some], sites.shift[some], mean[some], cavity_var[some]
        if power != 1.0:  # the cavity keeps the rest of the site
            c = c / (1.0 + (1.0 - power) * t * c)
        grown = 1.0 + power * t * c  # cavity over posterior variance
        centre = m * grown - power * c * nu
        _, g, h = factor.tilted(rows.sign[some], centre, c)
        left = 1.0 - c * h
        share = left if power == 1.0 else power * left
        new.precision[some], new.shift[some] = h / share, (g + centre * h) / share
        shifted = np.abs(centre + c * g - m) * np.sqrt(grown / c)
        worst = max(worst, float(np.max(shifted)), float(np.max(np.abs(left * grown - 1.0))))
    return new, worst
