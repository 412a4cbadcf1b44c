"""Rows as partitions, and inducing points chosen from them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sklearn.cluster import KMeans
from sklearn.utils import check_array, check_consistent_length, column_or_1d, gen_batches
from sklearn.utils.multiclass import check_classification_targets
from threadpoolctl import threadpool_limits

from ..._engine.partition import Part, load_part, split_rows
from ..._engine.row_order import row_keys

__all__ = [
    "PartitionedRows",
    "array_parts",
    "checked_parts",
    "choose_inducing_points",
    "describe",
    "is_part_list",
    "n_candidate_rows",
]

# k-means only looks at this many rows: more move the centres by less than learning does.
_KMEANS_ROWS = 20_000
_KMEANS_ITERATIONS = 10


class PartDescription(NamedTuple):
    """What the driver needs to know of a partition: counts, labels, moments, smallest row keys."""

    n_rows: int
    n_features: int
    labels: np.ndarray
    weight: float
    mean: np.ndarray
    spread: np.ndarray
    keys: np.ndarray


@dataclass
class PartitionedRows:
    """Partitions with what is known of them.

    `classes` is None where the partitions hold class indices and weights themselves. `mean` and
    `var` are those of the columns; `candidates` a random subset of rows with its weights.
    """

    parts: list
    sizes: list[int]
    classes: Any
    weight: float
    mean: np.ndarray
    var: np.ndarray
    candidates: np.ndarray
    candidate_weight: np.ndarray
    labels: np.ndarray


def is_part_list(X, y):
    """Return whether `fit(X, y)` was given a list of partitions in place of arrays."""
    if y is not None or not isinstance(X, list | tuple) or len(X) == 0:
        return False
    return all(isinstance(p, Part | tuple) or callable(p) or hasattr(p, "result") for p in X)


def array_parts(training, n_partitions):
    """Return partitions of a `Training` in memory or mapped: views, made once.

    Class indices take one byte where they fit, weights that are all one no memory.
    """
    X, y, weight = training.X, training.y, training.weight
    if y.max() <= np.iinfo(np.int8).max:
        y = y.astype(np.int8)
    if np.all(weight == 1.0):
        weight = np.broadcast_to(1.0, weight.shape)
    return [Part(X[s], y[s], weight[s]) for s in split_rows(len(y), n_partitions or 1)]


def _checked_rows(part):
    """Return X, y and weights of a partition that came from the user, or raise a ValueError."""
    arrays = load_part(part)
    if len(arrays) != 2:
        raise ValueError(f"a partition must be a pair (X, y), got {len(arrays)} objects.")
    X = check_array(arrays[0], dtype=(np.float64, np.float32), input_name="X")
    y = column_or_1d(arrays[1], warn=True)
    check_consistent_length(X, y)
    check_classification_targets(y)
    return X, y, np.ones(len(y))


def describe_part(part, checks, seed, n_candidates):
    """Return the `PartDescription` of a partition, checked first if it came from the user."""
    X, y, weight = _checked_rows(part) if checks else load_part(part)
    total = float(weight.sum())
    mean, spread = weight @ X / total, np.zeros(X.shape[1])
    for rows in gen_batches(len(X), max(1, 2**17 // X.shape[1])):
        spread += weight[rows] @ (X[rows] - mean) ** 2
    keys = np.unique(row_keys(X, seed))[:n_candidates] if n_candidates else np.empty(0)
    return PartDescription(len(y), X.shape[1], np.unique(y), total, mean, spread, keys.copy())


def rows_up_to(part, checks, seed, largest):
    """Return the rows of a partition with keys up to `largest`, and their weights."""
    arrays = _checked_rows(part) if checks else load_part(part)
    chosen = np.flatnonzero(row_keys(arrays[0], seed) <= largest)
    return np.asarray(arrays[0][chosen], dtype=np.float64), arrays[2][chosen]


def candidate_rows(run, checks, seed, keys, count, d):
    """Return `count` distinct rows of all partitions, with their copies, and weights.

    They are those of the smallest keys, so that no more than these rows travel.
    """
    if count == 0:
        return np.empty((0, d)), np.empty(0)
    largest = np.unique(keys)[:count][-1]
    pieces = run(rows_up_to, [checks] * len(run.parts), seed, largest)
    rows, weight = (np.concatenate(p) for p in zip(*pieces, strict=True))
    order = np.argsort(row_keys(rows, seed), kind="stable")
    return rows[order], weight[order]


def describe(run, checks, seed, n_candidates):
    """Return the `PartitionedRows` of the partitions of an open `PartMap`.

    Raises a ValueError if a partition is not usable or has another number of features than the
    first.
    """
    parts = run(describe_part, [checks] * len(run.parts), seed, n_candidates)
    d = parts[0].n_features
    for k, p in enumerate(parts):
        if p.n_features != d:
            raise ValueError(f"partition {k} has {p.n_features} features, the first has {d}.")
    weight = sum(p.weight for p in parts)
    mean = sum(p.weight * p.mean for p in parts) / weight
    spread = sum(p.spread + p.weight * (p.mean - mean) ** 2 for p in parts)
    keys = np.concatenate([p.keys for p in parts])
    rows, copies = candidate_rows(run, checks, seed, keys, n_candidates, d)
    labels = np.unique(np.concatenate([p.labels for p in parts]))
    return PartitionedRows(
        parts=run.parts,
        sizes=[p.n_rows for p in parts],
        classes=labels if checks else None,
        weight=weight,
        mean=mean,
        var=spread / weight,
        candidates=rows,
        candidate_weight=copies,
        labels=labels,
    )


def checked_parts(parts):
    """Return the user's partitions as the map takes them."""
    return [Part(*p) if isinstance(p, tuple) else p for p in parts]


def choose_inducing_points(rows, weight, n_inducing, seed):
    """Return up to `n_inducing` points (m, d) by a few steps of k-means from random rows.

    Rows and start are chosen by content, so that the answer depends neither on the order of the
    rows nor on whether copies are written out.
    """
    keys = row_keys(rows, seed)
    first = np.unique(keys, return_index=True)[1]
    if len(first) <= n_inducing:
        return rows[first]
    start = rows[first[:n_inducing]]
    # one thread: the order in which threads add up would change the last digits
    with threadpool_limits(limits=1, user_api="openmp"):
        centres = KMeans(
            n_inducing, init=start, n_init=1, max_iter=_KMEANS_ITERATIONS, random_state=seed
        )
        return centres.fit(rows, sample_weight=weight).cluster_centers_


def n_candidate_rows(inducing_points):
    """Return how many rows the choice of inducing points looks at: none if they are given."""
    return _KMEANS_ROWS if inducing_points is None else 0
