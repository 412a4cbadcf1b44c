"""Partitions of grouped rows: which rows are in which, and what a worker does with one."""

import heapq
from typing import Any, NamedTuple

import numpy as np

from ..._engine.partition import load_part
from ..._engine.row_order import row_keys
from .._factors import group_keys
from .arrow import ArrowRows, arrow_rows, of_one_factor

_AUTO_SITES = 8  # few large partitions: as accurate as many small ones and several times faster
# Total weight that makes one more partition worth while: with groups; without, where a partition is
# only a block of rows; and for engines that draw, whose noise adds up over partitions.
_WEIGHT_A_SITE = {"groups": 100, "rows": 1000, "draws": 5000}


class Placement(NamedTuple):
    """Sites of a fit.

    site numbers the site of each named group, of each row where there are no groups; where[k]
    numbers the groups of site k, in the order a worker sees them; reader is the `RawRows` of raw
    parts; members are the rows of each site in memory.
    """

    site: np.ndarray
    where: list[np.ndarray]
    reader: Any
    members: Any = None


def place_rows(est, draws, training, levels, codes, previous):
    """Return the `Placement` of rows in memory.

    draws says whether the engine draws; levels (the named ones) and codes are of each factor, of
    which there is at most one; previous is the state of an earlier fit or None: groups stay in
    their sites, new ones share a site of their own.
    """
    weight = training.weight
    if not levels:
        n_sites = _n_sites(est, draws, weight.sum(), None)
        row_site = site = spread_by_content(training.X, training.y, weight, n_sites)
        group_site = np.empty(0, dtype=int)
    else:
        load = np.bincount(codes[0], weights=weight)
        group_site = _place_groups(est, draws, levels[0], load, previous)
        row_site, site = group_site[codes[0]], group_site[: len(levels[0])]
    members = [np.flatnonzero(row_site == k) for k in np.unique(row_site)]
    where = [np.flatnonzero(group_site == k) for k in np.unique(row_site)]
    return Placement(site, where, None, members)


def place_raw(n_rows, levels, n_levels, where, reader):
    """Return the `Placement` of raw parts, each of which is a site.

    levels (the named ones), n_levels and where[k], the numbers of those in part k, are of each
    factor, of which there is at most one.
    """
    if not levels:
        none = [np.empty(0, int) for _ in n_rows]
        return Placement(np.repeat(np.arange(len(n_rows)), n_rows), none, reader)
    groups = [own[0] for own in where]
    if sum(map(len, groups)) > n_levels[0]:
        raise ValueError(
            "a group has rows in more than one partition; give whole groups to a partition."
        )
    site = np.empty(n_levels[0], dtype=int)
    for k, own in enumerate(groups):
        site[own] = k
    return Placement(site[: len(levels[0])], groups, reader)


def _n_sites(est, draws, total_weight, n_groups):
    wanted = est.n_partitions
    if wanted == "auto":
        kind = "rows" if n_groups is None else "groups"
        kind = "draws" if draws else kind
        least = 2 if kind == "groups" else 1
        wanted = min(_AUTO_SITES, max(least, int(total_weight // _WEIGHT_A_SITE[kind])))
    return wanted if n_groups is None else min(wanted, n_groups)


def _place_groups(est, draws, table, load, previous):
    """Return the site of each group; those of an earlier fit stay where they are."""
    if previous is not None and "group_keys" in previous and len(load) == len(table):
        known = dict(zip(previous["group_keys"].tolist(), previous["partition"], strict=True))
        fixed = np.array([known.get(key, -1) for key in group_keys(table)], dtype=int)
        n_sites = len(previous["site_shift"])
        if np.any(fixed >= 0) and est.n_partitions in ("auto", n_sites):
            fixed[fixed < 0] = n_sites
            return fixed
    return balance(load, _n_sites(est, draws, load.sum(), len(load)))


def balance(load, n_sites):
    """Return the site (J,) of groups of `load` rows: the heaviest first, to the least loaded."""
    site = np.empty(len(load), dtype=int)
    heap = [(0.0, k) for k in range(n_sites)]
    for j in np.argsort(-load, kind="stable"):
        total, k = heap[0]
        site[j] = k
        heapq.heapreplace(heap, (total + float(load[j]), k))
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


def read_rows(part, reader):
    """Return the rows of a partition, prepared by the driver or raw."""
    arrays = load_part(part)
    if reader is None:
        return ArrowRows(*arrays)
    X, sign, weight, designs, codes = reader(arrays)
    return arrow_rows(X, sign, weight, *of_one_factor(len(X), designs, codes))[0]


def part_worker(part, message, reader, function, options):
    """Return function(rows, *message, **options) of a partition."""
    return function(read_rows(part, reader), *message, **options)
