"""Rows of messages for tests: as dense matrices, and spread over parts."""

from types import SimpleNamespace

import numpy as np

from sklearn_ep.hierarchical.messages import parts, schur


def dense_design(rows):
    one_hot = [np.eye(n)[code] for code, n in zip(rows.codes, rows.n_levels, strict=True)]
    return np.hstack([rows.X, *one_hot])


def flat(effects):
    return np.concatenate([effects.beta, *effects.levels])


def in_parts(rows, big, precision, n_parts):
    """The rows spread over parts at random, each with numbers of its own for its levels."""
    if n_parts == 1:
        numbers = parts.LevelNumbers([[np.arange(n) for n in rows.n_levels]], rows.n_levels)
        state = SimpleNamespace(precision=precision)
        return parts.HeldRows([(schur.SystemRows(rows, big), state)], numbers)
    part = np.random.default_rng(0).integers(n_parts, size=len(rows.sign))
    pairs, where = [], []
    for own in (part == k for k in range(n_parts)):
        both = [np.unique(code[own], return_inverse=True) for code in rows.codes]
        where.append([at for at, _ in both])
        arrays = rows.X[own], rows.sign[own], rows.weight[own]
        local = schur.FactorRows(*arrays, [code for _, code in both], [len(at) for at, _ in both])
        state = SimpleNamespace(precision=precision[own])
        pairs.append((schur.SystemRows(local, big), state))
    return parts.HeldRows(pairs, parts.LevelNumbers(where, rows.n_levels))
