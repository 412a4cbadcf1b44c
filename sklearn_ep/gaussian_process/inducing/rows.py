"""Rows as partitions, and inducing points chosen from them."""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sklearn.cluster import KMeans
from sklearn.utils import check_array, gen_batches
from threadpoolctl import threadpool_limits

from ..._engine.partition import Part, load_part, split_rows
from ..._engine.row_order import row_keys
from ..._estimator.row_parts import check_alike, names_of_part, read_part
from .._base import check_scale, weighted_mean
from .._limits import LIMITS

# Standardised rows are rounded to this before they get their keys: far above the rounding of
# another unit, so that keys stay what they are, and far below any distance that matters.
_KEY_GRID = 2.0**-24


class Units(NamedTuple):
    """Centre and spread (d,) of the columns, in which rows are chosen and put in order.

    So neither depends on the units of X. The spread of a constant column is 0. The centre is that
    of differences to a row, the origin: these are exact where columns lie far from zero, while the
    mean itself is rounded to their size.
    """

    origin: np.ndarray
    centre: np.ndarray
    spread: np.ndarray

    @classmethod
    def of_moments(cls, origin, centre, var):
        """Return the units of columns with this centre, from the origin, and variance."""
        spread, mean = np.sqrt(var), origin + centre
        # a column that varies by less than that is constant but for rounding
        return cls(origin, centre, np.where(spread > 1e-12 * np.abs(mean), spread, 0.0))

    @classmethod
    def of_rows(cls, X, weight):
        """Return the units of rows with copies."""
        moved = X - X[0]
        centre = weight @ moved / weight.sum()
        return cls.of_moments(X[0], centre, weight @ (moved - centre) ** 2 / weight.sum())

    @property
    def mean(self):
        """Means (d,) of the columns."""
        return self.origin + self.centre

    def standardised(self, X):
        """Return rows with centred columns of unit spread, 0 where a column is constant."""
        return (X - self.origin - self.centre) / np.where(self.spread > 0, self.spread, np.inf)


def standard_keys(X, units, seed, y=None):
    """Return `row_keys` (n,) of rows (and labels) that are the same in any units of the columns."""
    keys = np.empty(len(X), dtype=np.uint64)
    for rows in gen_batches(len(X), max(1, 2**17 // X.shape[1])):
        grid = np.rint(units.standardised(X[rows]) / _KEY_GRID)
        keys[rows] = row_keys(grid, seed, None if y is None else y[rows])
    return keys


def _content_order(rows, units, seed):
    """Return the random order of rows; those that are apart by less than the grid stay apart."""
    return np.lexsort((row_keys(rows, seed), standard_keys(rows, units, seed)))


class PartDescription(NamedTuple):
    """What the driver needs to know of a partition: counts, labels, moments and names."""

    n_rows: int
    n_features: int
    names: Any
    labels: np.ndarray
    weight: float
    origin: np.ndarray
    centre: np.ndarray
    spread: np.ndarray


@dataclass
class PartitionedRows:
    """Partitions with what is known of them.

    `classes` is None where the partitions hold class indices and weights themselves. `units` and
    `var` are those of the columns, `names` those of tables; `candidates` a random subset of rows
    with its weights.
    """

    parts: list
    sizes: list[int]
    classes: Any
    weight: float
    units: Units
    var: np.ndarray
    candidates: np.ndarray
    candidate_weight: np.ndarray
    labels: np.ndarray
    names: Any


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


def dense_copies(weight):
    """Return weights as a contiguous array.

    Those that are all one are a view of a single number until they are sent to a worker; products
    with them would add up in another order here than there.
    """
    return np.ascontiguousarray(weight)


def _checked_rows(part):
    """Return X, y and weights of a partition that came from the user, or raise a ValueError."""
    return read_part(part, None, True, accept_sparse=False, dtype=(np.float64, np.float32))


def describe_part(part, checks):
    """Return the `PartDescription` of a partition, checked first if it came from the user."""
    X, y, weight = _checked_rows(part) if checks else load_part(part)
    total = float(weight.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        origin, centre, spread = np.asarray(X[0], dtype=np.float64), *np.zeros((2, X.shape[1]))
        for rows in gen_batches(len(X), max(1, 2**17 // X.shape[1])):
            centre += dense_copies(weight[rows]) @ (X[rows] - origin)
        centre /= total
        for rows in gen_batches(len(X), max(1, 2**17 // X.shape[1])):
            spread += dense_copies(weight[rows]) @ (X[rows] - origin - centre) ** 2
    names = names_of_part(part) if checks else None
    return PartDescription(len(y), X.shape[1], names, np.unique(y), total, origin, centre, spread)


def smallest_keys(part, checks, units, seed, count):
    """Return the rows of a partition with its `count` smallest distinct keys: keys, row numbers."""
    X = (_checked_rows(part) if checks else load_part(part))[0]
    keys = standard_keys(X, units, seed)
    largest = np.unique(keys)[:count][-1]
    chosen = np.flatnonzero(keys <= largest)
    return keys[chosen], chosen


def rows_at(part, chosen, checks):
    """Return rows of a partition, all of them for None, and their weights."""
    arrays = _checked_rows(part) if checks else load_part(part)
    chosen = slice(None) if chosen is None else chosen
    return np.asarray(arrays[0][chosen], dtype=np.float64), arrays[2][chosen]


def candidate_rows(run, checks, units, seed, n_rows, count):
    """Return `count` distinct rows of all partitions, with their copies, and weights.

    They are those of the smallest keys, so that no more than these rows travel.
    """
    if count == 0:
        return np.empty((0, len(units.origin))), np.empty(0)
    chosen = [None] * len(run.parts)
    if n_rows > count:
        small = run(smallest_keys, [checks] * len(run.parts), units, seed, count)
        largest = np.unique(np.concatenate([keys for keys, _ in small]))[:count][-1]
        chosen = [rows[keys <= largest] for keys, rows in small]
    pieces = run(rows_at, chosen, checks)
    rows, weight = (np.concatenate(p) for p in zip(*pieces, strict=True))
    order = _content_order(rows, units, seed)
    return rows[order], weight[order]


def describe(run, checks, seed, n_candidates):
    """Return the `PartitionedRows` of the partitions of an open `PartMap`.

    Raises a ValueError if a partition is not usable, has another number of features than the
    first, or if the scale of the columns is beyond double precision.
    """
    parts = run(describe_part, [checks] * len(run.parts))
    check_alike([(p.n_features, p.names) for p in parts])
    weight = sum(p.weight for p in parts)
    with np.errstate(over="ignore", invalid="ignore"):
        origin = parts[0].origin
        centres = [p.origin - origin + p.centre for p in parts]
        centre = weighted_mean(np.stack(centres), np.array([p.weight for p in parts]))
        spread = sum(
            p.spread + p.weight * (c - centre) ** 2 for p, c in zip(parts, centres, strict=True)
        )
    total_variance = float(np.sum(spread / weight))
    check_scale(total_variance, varies=False)
    units = Units.of_moments(origin, centre, spread / weight)
    n_rows = sum(p.n_rows for p in parts)
    rows, copies = candidate_rows(run, checks, units, seed, n_rows, n_candidates)
    check_scale(total_variance, varies=np.any(rows != rows[:1]))
    labels = np.unique(np.concatenate([p.labels for p in parts]))
    return PartitionedRows(
        parts=run.parts,
        sizes=[p.n_rows for p in parts],
        classes=labels if checks else None,
        weight=weight,
        units=units,
        var=spread / weight,
        candidates=rows,
        candidate_weight=copies,
        labels=labels,
        names=parts[0].names,
    )


def checked_parts(parts):
    """Return the user's partitions as the map takes them."""
    return [Part(*p) if isinstance(p, tuple) else p for p in parts]


def choose_inducing_points(rows, weight, n_inducing, seed, lengths=None):
    """Return up to `n_inducing` points (m, d) by a few steps of k-means from random rows.

    Rows and start are chosen by content and distances are measured in `lengths` (d,), those of the
    kernel, or in units of the spread of each column, so that the answer depends neither on the
    order of the rows, nor on whether copies are written out, nor on the units of the columns.
    """
    units = Units.of_rows(rows, weight)
    distinct = np.unique(row_keys(rows, seed), return_index=True)[1]
    first = distinct[_content_order(rows[distinct], units, seed)]
    if len(first) <= n_inducing:
        return rows[first]
    if lengths is not None:
        longest = np.max(units.spread / lengths)  # by which no square over- or underflows
        units = units._replace(spread=np.where(units.spread > 0, longest * lengths, 0.0))
    standard = units.standardised(rows)
    if standard.size > LIMITS.k_means_single:
        standard = standard.astype(np.float32)
    # one thread: the order in which threads add up would change the last digits
    with threadpool_limits(limits=1, user_api="openmp"):
        centres = KMeans(
            n_inducing,
            init=standard[first[:n_inducing]],
            n_init=1,
            max_iter=10,
            random_state=seed,
        )
        centres.fit(standard, sample_weight=weight)
    return units.mean + units.spread * centres.cluster_centers_


def n_candidate_rows(inducing_points):
    """Return how many rows the choice of inducing points looks at: none if they are given."""
    return LIMITS.k_means if inducing_points is None else 0


def inducing_count(estimator, n_rows=None, points=LIMITS.points, many=LIMITS.few_points):
    """Return the number of inducing points that an estimator asks for.

    Of so many rows, None for any number, the default has such a number that rows times its square
    never fall, nor the cost of a pass: between those of `points`, the fewer of `many` rows.
    """
    if estimator.n_inducing is not None:
        return estimator.n_inducing
    few, most = points
    share = 1.0 if n_rows is None else (many / n_rows) ** 0.5
    return round(np.clip(few * share, few, most))


def first_points(estimator, rows, weight, seed, lengths=None, told=True, m=None):
    """Return the inducing points (m, d) that were given, or chosen from the rows.

    `lengths` (d,) are those of the kernel. A UserWarning may be `told` where n_inducing asks for
    other ones.
    """
    given = estimator.inducing_points
    if given is None:
        m = inducing_count(estimator) if m is None else m
        Z = choose_inducing_points(rows, weight, m, seed, lengths)
    else:
        Z = check_array(given, dtype=np.float64, input_name="inducing_points").copy()
        if Z.shape[1] != rows.shape[1]:
            raise ValueError(
                f"inducing_points has {Z.shape[1]} columns, but X has {rows.shape[1]} features."
            )
    if told:
        _warn_fewer_inducing(estimator, Z)
    return Z


def _warn_fewer_inducing(estimator, Z):
    """Warn where `n_inducing` asks for other inducing points than the ones (m, d) in use."""
    asked, given = estimator.n_inducing, estimator.inducing_points is not None
    if asked is None or (len(Z) == asked if given else len(Z) >= asked):
        return
    why = (
        "inducing_points are given" if given else f"there are {len(Z)} distinct rows to choose from"
    )
    message = f"n_inducing={asked} does nothing, because {why}: all {len(Z)} of them are used; "
    message += f"leave n_inducing out, or set it to {'their number' if given else 'fewer'}."
    warnings.warn(message, UserWarning, stacklevel=3)
