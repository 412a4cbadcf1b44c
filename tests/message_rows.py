"""Rows of messages for tests: as dense matrices, and spread over parts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from sklearn_ep.hierarchical.messages import parts


def dense_design(rows):
    one_hot = [np.eye(n)[code] for code, n in zip(rows.codes, rows.n_levels, strict=True)]
    return np.hstack([rows.X, *one_hot])


def flat(effects):
    return np.concatenate([effects.beta, *effects.levels])


def in_parts(rows, precision, n_parts):
    """The rows spread over parts at random, each with numbers of its own for its levels."""
    if n_parts == 1:
        numbers = parts.LevelNumbers([[np.arange(n) for n in rows.n_levels]], rows.n_levels)
        state = SimpleNamespace(precision=precision)
        return parts.HeldRows([(rows, state)], numbers)
    part = np.random.default_rng(0).integers(n_parts, size=len(rows.sign))
    pairs, where = [], []
    for own in (part == k for k in range(n_parts)):
        both = [np.unique(code[own], return_inverse=True) for code in rows.codes]
        where.append([at for at, _ in both])
        arrays = dict(X=rows.X[own], sign=rows.sign[own], weight=rows.weight[own])
        sizes = [len(at) for at, _ in both]
        local = replace(rows, **arrays, codes=[code for _, code in both], n_levels=sizes)
        pairs.append((local, SimpleNamespace(precision=precision[own])))
    return parts.HeldRows(pairs, parts.LevelNumbers(where, rows.n_levels))
