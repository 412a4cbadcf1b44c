"""Parts: which rows are in which, how a worker reads raw ones; and checkpoints of a fit.

A checkpoint is plain arrays, written whole or not at all, and tied to its data.
"""

import os
import tempfile
import zipfile
from typing import Any, NamedTuple

import joblib
import numpy as np

from .._engine.partition import Part, load_part
from .._engine.rows import row_keys
from .._estimator.checks import ColumnRanges
from .._estimator.row_parts import checked_arrays, naming_part
from .._estimator.tables import array_of, names_of, objects
from . import _factors

STATE = "site_precision", "site_shift", "prior_precision", "prior_shift", "partition", "group_keys"


def state_of(plan, precision, shift):
    """Return the arrays, named as in `STATE`, of messages of parts from which a fit can go on."""
    labels = plan.levels[0] if plan.levels else np.empty(0)
    values = precision, shift, *plan.prior(), plan.parts.site, _factors.group_keys(labels)
    return dict(zip(STATE, values, strict=True))


def checked_state(state):
    """Return the arrays of a state, of one factor or of several, or raise a ValueError."""
    names = state if "theta" in state else STATE  # several factors: sites at the mode of theta
    if missing := [name for name in names if name not in state]:
        raise ValueError(f"state lacks {missing}.")
    return {name: np.array(state[name]) for name in names}


def digest(*values):
    """Return a hash (hex) of plain values, and of the contents and shapes of arrays."""
    like = [np.ascontiguousarray(v) if isinstance(v, np.ndarray) else v for v in values]
    return joblib.hash(like, coerce_mmap=True)


def _file_beside(path):
    """Return handle and name of a new file beside another, for this process alone."""
    folder, name = os.path.split(os.path.abspath(path))
    return tempfile.mkstemp(".partial", f"{name}.", folder)


def save_checkpoint(path, fingerprint, state):
    """Write a state so that a reader sees the old file or the new one, never a part of it.

    Each writer has a file of its own beside the target, which nobody else can read or has put
    there; a process that is killed while it writes leaves it behind.
    """
    handle, unfinished = _file_beside(path)
    try:
        with open(handle, "wb") as file:
            np.savez(file, fingerprint=np.array(fingerprint), **state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        os.remove(unfinished)
        raise


def check_checkpoint(path):
    """Raise a ValueError that names the checkpoint where no file can be written there."""
    try:
        if os.path.isdir(os.path.abspath(path)):
            raise IsADirectoryError("it is a folder")
        handle, unfinished = _file_beside(path)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"checkpoint={path!r} cannot be written ({error}): it must name a file in a folder "
            "that exists and is writable."
        ) from error
    os.close(handle)
    os.remove(unfinished)


def load_checkpoint(path, fingerprint):
    """Return the state in a checkpoint, or None where there is no file.

    A ValueError says that the file is no checkpoint, or belongs to other data or to another model:
    it is neither used nor overwritten.
    """
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            state = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"checkpoint={os.fspath(path)!r} cannot be read as a checkpoint."
        ) from error
    if str(state.pop("fingerprint", "")) != fingerprint:
        raise ValueError(
            f"checkpoint={os.fspath(path)!r} belongs to other data or to another model; "
            "remove it or give another path."
        )
    return state


def checked_part(arrays, columns):
    """Return (X without labels, y, weight, labels of each factor) of a raw part, checked."""
    with naming_part():
        table = array_of(arrays[0])
        labels = [_factors.labels_of(table, f) for f in columns.factors]
        X = _factors.take_labels(table, columns.taken)
        least = int(not columns.fit_intercept or not columns.taken)
        own = X, *arrays[1:]
        X, y, weight = checked_arrays(own, True, False, weighted=True, n_columns=least)
    kept = weight > 0
    return X[kept], y[kept], weight[kept], [own[kept] for own in labels]


class RawRows(NamedTuple):
    """How a worker reads the arrays (X, y[, weight]) of a raw part; label +1 is `positive`."""

    columns: Any
    positive: Any

    def __call__(self, arrays):
        """Return shared design, signs, weights, and designs and codes of each factor."""
        X, y, weight, labels = checked_part(arrays, self.columns)
        codes = [_factors.numbered_levels(own)[1] for own in labels]
        shared, designs = _factors.design_of_factors(X, self.columns)
        return shared, np.where(y == self.positive, 1.0, -1.0), weight, designs, codes


def parts_in_memory(plan, sign):
    """Return the parts of rows in memory with labels in {-1, +1}, for `read_rows`."""
    out = []
    for own in plan.parts.members:
        codes = [np.unique(code[own], return_inverse=True)[1] for code in plan.codes]
        designs = [w[own] for w in plan.designs]
        out.append(Part(plan.X[own], sign[own], plan.weight[own], designs, codes))
    return out


def read_rows(part, reader):
    """Return what `RawRows` returns, of a part by the driver, or by a reader of raw ones."""
    arrays = load_part(part)
    return arrays if reader is None else reader(arrays)


def shape_of(part, message):
    """Return (number of columns, their names or None) of a raw part (worker)."""
    X = array_of(load_part(part)[0])
    return X.shape[1], names_of(X)


class PartLevels(NamedTuple):
    """What the driver has to know of a raw part: named labels and rows of all levels by factor.

    pure (J,) tells which groups have rows of one class; of one factor, whose groups are whole.
    """

    n_rows: int
    classes: np.ndarray
    columns: ColumnRanges
    labels: list[Any]
    sizes: list[np.ndarray]
    digest: str
    pure: np.ndarray | None


def describe_part(part, message, columns, with_digest):
    """Return the `PartLevels` of a raw part (worker)."""
    arrays = load_part(part)
    for factor in columns.factors:
        _factors.check_measured(array_of(arrays[0]), factor)
    X, y, weight, labels = checked_part(arrays, columns)
    pairs = [_factors.numbered_levels(own) for own in labels]
    known, codes = [k for k, _ in pairs], [c for _, c in pairs]
    text = np.asarray(y).astype(str)
    content = digest(X, text, weight, *codes) if with_digest else ""
    ranges, n_rows, classes = ColumnRanges.of_rows(X), [np.bincount(c) for c in codes], np.unique(y)
    pure = are_pure(codes[0], y == classes[-1]) if len(codes) == 1 else None
    return PartLevels(len(y), classes, ranges, list(known), n_rows, content, pure)


def are_pure(code, second):
    """Return which groups (J,) have rows of one class; second (n,) marks rows of the second one."""
    ones = np.bincount(code, weights=second)
    return (ones == 0) | (ones == np.bincount(code))


def join_levels(told):
    """Return (named levels, rows of all levels, levels of each part) over the parts' `PartLevels`.

    The levels of part k of factor f are numbers where[k][f], in the order the worker sees them.
    """
    levels, sizes, where = [], [], []
    for f in range(len(told[0].labels)):
        each, every = [t.sizes[f] for t in told], []
        for t in told:  # those without a name come last
            named = np.asarray(t.labels[f]).tolist()
            every += named + [None] * (len(t.sizes[f]) - len(named))
        known, code = _factors.numbered_levels(objects(every))
        levels.append(known)
        sizes.append(np.bincount(code, weights=np.concatenate(each)))
        where.append(np.split(code, np.cumsum([len(size) for size in each])[:-1]))
    return levels, sizes, [[own[k] for own in where] for k in range(len(told))]


# Few large partitions are as accurate as many small ones and several times faster; 50 are those of
# the paper, to begin with where they are merged as it proposes.
_MOST_SITES: dict[Any, int] = {"auto": 8, "adaptive": 50}
# Total weight that makes one more partition worth while: with groups; without, where a partition is
# only a block of rows; and for engines that draw, whose noise adds up over partitions.
_WEIGHT_A_SITE = {"groups": 100, "rows": 1000, "draws": 5000}


class Parts(NamedTuple):
    """How rows become parts.

    where[k][f] numbers the levels of factor f in part k, in the order a worker sees them; reader is
    the `RawRows` of raw parts; members are the rows of each part in memory. Where parts have sites
    of their own, site numbers that of each named group, of each row where there are no groups.
    """

    where: list[list[np.ndarray]]
    reader: Any = None
    members: Any = None
    site: Any = None


def parts_of_members(members, codes, site=None):
    """Return the `Parts` of rows in memory, members and codes being those of parts and factors."""
    where = [[np.flatnonzero(np.bincount(code[own])) for code in codes] for own in members]
    return Parts(where, None, members, site)


def place_rows(est, draws, training, levels, codes, previous):
    """Return the `Parts`, each with a site, of rows in memory.

    draws says whether the engine draws; levels (the named ones) and codes are of each factor, of
    which there is at most one; previous is the state of an earlier fit or None: groups stay in
    their sites, new ones share a site of their own.
    """
    weight = training.weight
    if not levels:
        n_sites = _n_sites(est, draws, weight.sum(), None)
        row_site = site = spread_by_content(training.X, training.y, weight, n_sites)
    else:
        load = np.bincount(codes[0], weights=weight)
        group_site = _place_groups(est, draws, levels[0], load, previous)
        row_site, site = group_site[codes[0]], group_site[: len(levels[0])]
    members = [np.flatnonzero(row_site == k) for k in np.unique(row_site)]
    return parts_of_members(members, codes, site)


def sites_of_raw(n_rows, levels, n_levels, where):
    """Return the site of each named group, or of each row, where each raw part is one.

    levels (the named ones), n_levels and where[k], the numbers of those in part k, are of each
    factor, of which there is at most one.
    """
    if not levels:
        return np.repeat(np.arange(len(n_rows)), n_rows)
    code, sizes = np.concatenate([own[0] for own in where]), [len(own[0]) for own in where]
    if len(code) > n_levels[0]:
        raise ValueError(
            "a group has rows in more than one partition; give whole groups to a partition."
        )
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(code)][: len(levels[0])]


def _n_sites(est, draws, total_weight, n_groups):
    wanted = est.n_partitions
    if wanted in _MOST_SITES:
        kind = "rows" if n_groups is None else "groups"
        kind = "draws" if draws and wanted == "auto" else kind
        least = 2 if kind == "groups" else 1
        wanted = min(_MOST_SITES[wanted], max(least, int(total_weight // _WEIGHT_A_SITE[kind])))
    return wanted if n_groups is None else min(wanted, n_groups)


def _place_groups(est, draws, table, load, previous):
    """Return the site of each group; those of an earlier fit stay where they are."""
    if previous is not None and "group_keys" in previous and len(load) == len(table):
        known = dict(zip(previous["group_keys"].tolist(), previous["partition"], strict=True))
        fixed = np.array([known.get(key, -1) for key in _factors.group_keys(table)], dtype=int)
        n_sites = len(previous["site_shift"])
        if np.any(fixed >= 0) and est.n_partitions in (*_MOST_SITES, n_sites):
            fixed[fixed < 0] = n_sites
            # sites whose groups are all gone are no more
            return np.unique(fixed, return_inverse=True)[1]
    return balance(load, _n_sites(est, draws, load.sum(), len(load)))


def balance(load, n_sites):
    """Return the site (J,) of groups of `load` rows: the heaviest first, to the least loaded."""
    site, total = np.empty(len(load), dtype=int), np.zeros(n_sites)
    for j in np.argsort(-load, kind="stable"):
        site[j] = np.argmin(total)
        total[site[j]] += load[j]
    return site


def spread_by_content(X, y, weight, n_sites):
    """Return the site (n,) of rows without groups, spread by what they contain.

    Equal rows meet in one site and the order of rows does not matter, so that repeated rows,
    weights and permutations give one partition. Sites are numbered without gaps, and are fewer than
    `n_sites` where rows are few.
    """
    _, content = np.unique(row_keys(X, 0, y), return_inverse=True)
    load = np.bincount(content, weights=weight)
    middle = np.cumsum(load) - 0.5 * load
    share = np.minimum((n_sites * middle / load.sum()).astype(int), n_sites - 1)
    return np.unique(share[content], return_inverse=True)[1]
