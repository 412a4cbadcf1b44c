"""Variances of rows without a factorisation: precisions sent along rows between the factors.

Each row connects one level of each factor. Were the graph of rows and levels a tree, the messages
of belief propagation would give exact variances; sparse crossed data are nearly one. What comes out
is the cavity of each row, the variance of its predictor without its own site, always positive.
"""

from typing import NamedTuple

import numpy as np

from ..._engine.gaussian import checked_cholesky, triangular_inverse
from ..._engine.likelihoods import Logit
from ..._engine.sites import Sites

__all__ = ["RowState", "cavity_variances", "first_state", "level_precisions", "updated_sites"]

_ROUNDS = 3  # of messages in a pass; they go on from those of the last
_START = 0.7  # share of a site's precision that its first messages carry
_BLOCK = 1 << 16  # rows whose moments are in the cache at once
_LIKELIHOOD = Logit()


class RowState(NamedTuple):
    """Sites of the rows, and for each factor the precision (n,) that a row sends to its level."""

    sites: Sites
    messages: list[np.ndarray]


def first_state(rows, sites=None):
    """Return the `RowState` to start from, with weak sites that lean to the labels if none."""
    if sites is None:
        sites = Sites(np.full(len(rows.sign), 0.15), 0.5 * rows.sign)
    return RowState(sites, [_START * sites.precision for _ in rows.codes])


def level_precisions(rows, messages, prior):
    """Return the precisions (L_f,) of the levels of each factor: prior and all messages."""
    return [
        p + rows.sums(f, rows.weight * m)
        for f, (p, m) in enumerate(zip(prior, messages, strict=True))
    ]


def _inverse_cavities(rows, messages, prior):
    """Return for each factor the variance (n,) of each row's level without the row."""
    totals = level_precisions(rows, messages, prior)
    triples = zip(totals, rows.codes, messages, strict=True)
    return [1.0 / (total[code] - m) for total, code, m in triples]


def cavity_variances(rows, state, prior):
    """Return (cavity variances (n,), the messages that led to them).

    prior is an `Effects` of precisions. The dense columns add x' S x with their posterior
    covariance S given rows whose effects are integrated out.
    """
    t, messages = state.sites.precision, state.messages
    for _ in range(_ROUNDS):
        variances = _inverse_cavities(rows, messages, prior.levels)
        total = sum(variances)
        messages = [t / (1.0 + t * (total - v)) for v in variances]
    total = sum(_inverse_cavities(rows, messages, prior.levels))
    known = rows.weight * t / (1.0 + t * total)
    precision = rows.X.T @ (known[:, None] * rows.X)
    precision[np.diag_indices_from(precision)] += prior.beta
    root = triangular_inverse(checked_cholesky(0.5 * (precision + precision.T)))
    turned = rows.X @ root.T
    return total + np.einsum("nd,nd->n", turned, turned), messages


def updated_sites(rows, sites, mean, cavity_var):
    """Return (new sites, largest distance of tilted from current moments in sds).

    mean (n,) are the predictor's, under all sites. Rows are taken in blocks.
    """
    new = Sites(np.empty_like(mean), np.empty_like(mean))
    worst = 0.0
    for start in range(0, len(mean), _BLOCK):
        some = slice(start, start + _BLOCK)
        t, nu, m, c = sites.precision[some], sites.shift[some], mean[some], cavity_var[some]
        grown = 1.0 + t * c  # cavity over posterior variance
        centre = m * grown - c * nu
        _, g, h = _LIKELIHOOD.tilted(rows.sign[some], centre, c)
        left = 1.0 - c * h
        new.precision[some], new.shift[some] = h / left, (g + centre * h) / left
        shifted = np.abs(centre + c * g - m) * np.sqrt(grown / c)
        worst = max(worst, float(np.max(shifted)), float(np.max(np.abs(left * grown - 1.0))))
    return new, worst
