"""Rows as partitions, and inducing points chosen from them."""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sklearn.cluster import KMeans

from ..._engine.gaussian import libraries, row_blocks
from ..._engine.partition import load_part
from ..._engine.rows import minibatches, row_keys, taken_copies
from ..._estimator.checks import checked_array, warn_of_spreads
from ..._estimator.row_parts import check_alike, names_of_part, read_part, set_columns
from ..._estimator.tables import names_of
from .._base import check_scale, inducing_count, weighted_mean
from .._kernels import column_lengths
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

    def standardised(self, X):
        """Return rows with centred columns of unit spread, 0 where a column is constant."""
        return (X - self.origin - self.centre) / np.where(self.spread > 0, self.spread, np.inf)


def standard_keys(X, units, seed, y=None):
    """Return `row_keys` (n,) of rows (and labels) that are the same in any units of the columns."""
    keys = np.empty(len(X), dtype=np.uint64)
    for rows in row_blocks(len(X), X.shape[1], 2**17):
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
    labels: np.ndarray
    names: Any
    candidates: Any = None
    candidate_weight: Any = None

    @property
    def spread(self):
        """Root of the total variance of the rows."""
        return float(np.sqrt(self.var.sum()))


def dense_copies(weight):
    """Return weights as a contiguous array.

    Those that are all one are a view of a single number until they are sent to a worker; products
    with them would add up in another order here than there.
    """
    return np.ascontiguousarray(weight)


def describe_part(part, _):
    """Return the `PartDescription` of a partition, or raise a ValueError if it is not usable."""
    kinds = np.float64, np.float32
    X, y, weight = read_part(part, None, True, accept_sparse=False, dtype=kinds)
    total = float(weight.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        # a copy: a view would keep the partition in memory
        origin, centre, spread = np.array(X[0], dtype=np.float64), *np.zeros((2, X.shape[1]))
        for rows in row_blocks(len(X), X.shape[1], 2**17):
            centre += dense_copies(weight[rows]) @ (X[rows] - origin)
        centre /= total
        for rows in row_blocks(len(X), X.shape[1], 2**17):
            spread += dense_copies(weight[rows]) @ (X[rows] - origin - centre) ** 2
    names = names_of_part(part)
    return PartDescription(len(y), X.shape[1], names, np.unique(y), total, origin, centre, spread)


def read_rows(part, classes):
    """Return X, class indices and weights of a partition.

    A partition of two arrays holds labels, which are looked up in `classes`; one of three holds
    class indices and weights.
    """
    arrays = load_part(part)
    if len(arrays) == 3:
        return arrays
    X, y = np.asarray(arrays[0]), np.asarray(arrays[1])
    return X, np.searchsorted(classes, y), np.ones(len(X))


def labels_and_copies(run, data):
    """Return the class indices and copies (n,) of all rows of an open map, part after part."""
    pairs = zip(*run(_told_of_part, data.sizes, data.classes), strict=True)
    return [np.concatenate(each) for each in pairs]


def _told_of_part(part, _, classes):
    _, y, weight = read_rows(part, classes)
    return np.asarray(y, dtype=np.intp), dense_copies(weight)


def copies_left_out_of_parts(run, data):
    """Return for each partition how many copies (n_k,) go with each row that is left out."""
    seeds = [0] * len(data.sizes)
    keys = np.concatenate(run(keys_of_part, seeds, data.classes, data.units, False))
    place = np.unique(keys, return_inverse=True)[1]
    copies = taken_copies(place, *labels_and_copies(run, data))
    return np.split(copies, np.cumsum(data.sizes)[:-1])


def keys_of_part(part, seed, classes, units, with_labels=True):
    """Return the keys (n_k,) of the rows of a partition, of equal rows and labels or rows alone."""
    X, y, _ = read_rows(part, classes)
    return standard_keys(X, units, seed, y if with_labels else None)


def batches_of_part(part, keys, classes, share):
    """Return the minibatches of a partition, arrays of row numbers, in the order of its keys.

    Each has a share of its copies, the same in all partitions.
    """
    weight = read_rows(part, classes)[2]
    return list(minibatches(keys, weight, max(1.0, share * weight.sum())))


def smallest_keys(part, seed, classes, units, count):
    """Return the `count` smallest distinct keys of the rows of a partition."""
    return np.unique(keys_of_part(part, seed, classes, units, False))[:count]


def rows_of_part(part, seed, classes, units, largest):
    """Return X, class indices and weights of the rows with keys up to `largest`, if not None."""
    X, y, weight = read_rows(part, classes)
    chosen: Any = slice(None)
    if largest is not None:
        chosen = np.flatnonzero(standard_keys(X, units, seed) <= largest)
    return np.asarray(X[chosen], dtype=np.float64), y[chosen], weight[chosen]


def rows_up_to(run, data, seed, largest):
    """Return X, class indices and weights of all rows with keys up to `largest`, if not None.

    They are chosen by content alone: not by their order, nor by partitions.
    """
    pieces = run(rows_of_part, [seed] * len(data.sizes), data.classes, data.units, largest)
    # those of one partition without a second copy
    return [p[0] if len(p) == 1 else np.concatenate(p) for p in zip(*pieces, strict=True)]


def key_of_rank(run, data, seed, count):
    """Return the key up to which there are `count` distinct rows in all partitions."""
    found = run(smallest_keys, [seed] * len(data.sizes), data.classes, data.units, count)
    return np.unique(np.concatenate(found))[:count][-1]


def candidate_rows(run, data, seed, count):
    """Return `count` distinct rows of all partitions, with their copies, and weights.

    They are those of the smallest keys, so that no more than these rows travel.
    """
    if count == 0:
        return np.empty((0, len(data.var))), np.empty(0)
    largest = key_of_rank(run, data, seed, count) if sum(data.sizes) > count else None
    rows, _, weight = rows_up_to(run, data, seed, largest)
    order = _content_order(rows, data.units, seed)
    return rows[order], weight[order]


def distinct_rows(run, data, count, seed):
    """Return about `count` distinct rows with class indices and numbers of copies, in their order.

    That of their keys: neither choice nor order depends on whether copies are written out. The last
    array says which of them each row is that was looked at.
    """
    X, y, weight = rows_up_to(run, data, seed, key_of_rank(run, data, seed, count))
    keys = standard_keys(X, data.units, seed)
    order = np.lexsort((y, keys))
    new = np.diff(keys[order]).astype(bool) | np.diff(y[order]).astype(bool)
    first = np.append(True, new)
    place = (np.cumsum(first) - 1)[np.argsort(order)]
    copies, chosen = np.bincount(place, weight), order[first]
    # rows of one content with several labels stay together
    within = keys[chosen] <= keys[chosen[: count + 1][-1]] - (len(chosen) > count)
    return X[chosen[within]], y[chosen[within]], copies[within], place


def describe(run, own, seed, n_candidates):
    """Return the `PartitionedRows` of the partitions of an open `PartMap`.

    Raises a ValueError if a partition is not usable, has another number of features than the
    first, or if the scale of the columns is beyond double precision.
    """
    parts = run(describe_part, range(len(run.parts)))
    check_alike([(p.n_features, p.names) for p in parts])
    weight = sum(p.weight for p in parts)
    with np.errstate(over="ignore", invalid="ignore"):
        origin = parts[0].origin
        centres = [p.origin - origin + p.centre for p in parts]
        centre = weighted_mean(np.stack(centres), np.array([p.weight for p in parts]))
        pairs = zip(parts, centres, strict=True)
        spread = sum(p.spread + p.weight * (c - centre) ** 2 for p, c in pairs)
    total_variance = float(np.sum(spread / weight))
    check_scale(total_variance, varies=False)
    labels = np.unique(np.concatenate([p.labels for p in parts]))
    data = PartitionedRows(
        parts=run.parts,
        sizes=[p.n_rows for p in parts],
        classes=None if own else labels,
        weight=weight,
        units=Units.of_moments(origin, centre, spread / weight),
        var=spread / weight,
        labels=labels,
        names=parts[0].names,
    )
    data.candidates, data.candidate_weight = candidate_rows(run, data, seed, n_candidates)
    check_scale(total_variance, varies=np.any(data.candidates != data.candidates[:1]))
    return data


def described(estimator, run, kept, seed):
    """Return the `PartitionedRows` of an open map and the rows that they keep of the caller's.

    `kept` is None for partitions of the user, from which labels and columns are learned.
    """
    # the choice of inducing points looks at no rows if they are given
    n_candidates = LIMITS.k_means if estimator.inducing_points is None else 0
    data = describe(run, kept is not None, seed, n_candidates)
    if kept is not None:
        return data, kept
    if len(data.labels) < 2:
        raise ValueError(f"y has only one class, {data.labels[0]!r}; a classifier needs two.")
    estimator.classes_ = data.labels
    set_columns(estimator, [(len(data.var), data.names)])
    if estimator.kernel is None and len(data.candidates):
        warn_of_spreads(estimator, data.candidates)
    return data, np.ones(sum(data.sizes), dtype=bool)


def check_part_list(estimator):
    """Raise a ValueError where parameters do not go with a list of partitions."""
    if estimator.method not in ("auto", "sparse"):
        raise ValueError(f"method={estimator.method!r} does not take a list of partitions as X.")
    if estimator.class_weight is not None:
        raise ValueError("class_weight must be None for a list of partitions.")


def choose_inducing_points(rows, weight, n_inducing, seed, kernel=None):
    """Return up to `n_inducing` points (m, d) by a few steps of k-means from random rows.

    Rows and start are chosen by content and distances are measured in the lengths of a kernel, or
    in units of the spread of each column, so that the answer depends neither on the order of the
    rows, nor on whether copies are written out, nor on the units of the columns.
    """
    units = Units.of_rows(rows, weight)
    distinct = np.unique(row_keys(rows, seed), return_index=True)[1]
    first = distinct[_content_order(rows[distinct], units, seed)]
    if len(first) <= n_inducing:
        return rows[first]
    lengths = None if kernel is None else column_lengths(kernel, rows.shape[1])
    if lengths is not None:
        longest = np.max(units.spread / lengths)  # by which no square over- or underflows
        units = units._replace(spread=np.where(units.spread > 0, longest * lengths, 0.0))
    standard = units.standardised(rows)
    if standard.size > LIMITS.k_means_single:
        standard = standard.astype(np.float32)
    # one thread: the order in which threads add up would change the last digits
    with libraries().limit(limits=1, user_api="openmp"):
        start = standard[first[:n_inducing]]
        centres = KMeans(n_inducing, init=start, n_init=1, max_iter=10, random_state=seed)
        centres.fit(standard, sample_weight=weight)
    return units.origin + units.centre + units.spread * centres.cluster_centers_


def first_points(estimator, rows, weight, seed, kernel=None, told=True, m=None):
    """Return the inducing points (m, d) that were given, or chosen from the rows.

    Distances are in the lengths of the kernel. A UserWarning may be `told` where n_inducing asks
    for other ones.
    """
    given = estimator.inducing_points
    if given is None:
        Z = choose_inducing_points(rows, weight, m or inducing_count(estimator), seed, kernel)
    else:
        given = _in_columns_of_fit(estimator, given)
        what = f"an array or table of shape (m, {rows.shape[1]})"
        Z = checked_array("inducing_points", given, what).copy()
        if Z.shape[1] != rows.shape[1]:
            raise ValueError(
                f"inducing_points has {Z.shape[1]} columns, but X has {rows.shape[1]} features."
            )
    if told:
        _warn_fewer_inducing(estimator, Z)
    return Z


def _in_columns_of_fit(estimator, given):
    """Return given points with indicators for categories, after a look at the names of a frame."""
    names, known = names_of(given), getattr(estimator, "feature_names_in_", None)
    if names is None or known is None:
        return given
    if names != list(known):
        raise ValueError(f"inducing_points has columns {names}, but X has {list(known)}.")
    return given if estimator._coder is None else estimator._coder.transform(given)


def _warn_fewer_inducing(estimator, Z):
    """Warn where `n_inducing` asks for other inducing points than the ones (m, d) in use."""
    asked, given = estimator.n_inducing, estimator.inducing_points is not None
    if asked is None or (len(Z) == asked if given else len(Z) >= asked):
        return
    why, number = f"there are {len(Z)} distinct rows to choose from", "fewer"
    if given:
        why, number = "inducing_points are given", "their number"
    message = f"n_inducing={asked} does nothing, because {why}: all {len(Z)} of them are used; "
    message += f"leave n_inducing out, or set it to {number}."
    warnings.warn(message, UserWarning, stacklevel=3)
