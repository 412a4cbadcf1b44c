"""Which rows of a model of at most one factor are in which site."""

import heapq
from typing import Any, NamedTuple

import numpy as np

from ..._engine.row_order import row_keys
from .._factors import group_keys

__all__ = ["Placement", "balance", "place_raw", "place_rows", "spread_by_content"]

_AUTO_SITES = 8  # few large partitions: as accurate as many small ones and several times faster
# Total weight that makes one more partition worth while: with groups; without, where a partition is
# only a block of rows; and for engines that draw, whose noise adds up over partitions.
_WEIGHT_A_SITE = {"groups": 100, "rows": 1000, "draws": 5000}


class Placement(NamedTuple):
    """Sites of a fit.

    site numbers the site of each named group, of each row where there are no groups; members are
    the rows of each site, row_site (n,) the site of each row, both None for raw parts; where[k]
    numbers the groups of site k, in the order a worker sees them; spec tells workers how to read
    raw parts, None for prepared ones.
    """

    site: np.ndarray
    members: Any
    row_site: Any
    where: list[np.ndarray]
    spec: Any


def place_rows(est, training, groups, previous):
    """Return the `Placement` of rows in memory.

    groups are (labels, codes) of the factor, None without; previous is the state of an earlier fit
    or None: groups stay in their sites, new ones share a site of their own.
    """
    weight = training.weight
    if groups is None:
        n_sites = _n_sites(est, weight.sum(), None)
        row_site = site = spread_by_content(training.X, training.y, weight, n_sites)
        group_site = np.empty(0, dtype=int)
    else:
        table, code = groups
        group_site = _place_groups(est, table, np.bincount(code, weights=weight), previous)
        row_site, site = group_site[code], group_site[: len(table)]
    members = [np.flatnonzero(row_site == k) for k in np.unique(row_site)]
    where = [np.flatnonzero(group_site == k) for k in np.unique(row_site)]
    return Placement(site, members, row_site, where, None)


def place_raw(n_rows, levels, numbers, spec):
    """Return the `Placement` of raw parts, each of which is a site."""
    if not levels:
        none = [np.empty(0, int) for _ in n_rows]
        return Placement(np.repeat(np.arange(len(n_rows)), n_rows), None, None, none, spec)
    where = [own[0] for own in numbers.where]
    if sum(map(len, where)) > numbers.n_levels[0]:
        raise ValueError(
            "a group has rows in more than one partition; give whole groups to a partition."
        )
    site = np.empty(numbers.n_levels[0], dtype=int)
    for k, own in enumerate(where):
        site[own] = k
    return Placement(site[: len(levels[0])], None, None, where, spec)


def _n_sites(est, total_weight, n_groups):
    wanted = est.n_partitions
    if wanted == "auto":
        kind = "rows" if n_groups is None else "groups"
        kind = "draws" if est.engine in ("importance", "nuts") else kind
        least = 2 if kind == "groups" else 1
        wanted = min(_AUTO_SITES, max(least, int(total_weight // _WEIGHT_A_SITE[kind])))
    return wanted if n_groups is None else min(wanted, n_groups)


def _place_groups(est, table, load, previous):
    """Return the site of each group; those of an earlier fit stay where they are."""
    if previous is not None and "group_keys" in previous and len(load) == len(table):
        known = dict(zip(previous["group_keys"].tolist(), previous["partition"], strict=True))
        fixed = np.array([known.get(key, -1) for key in group_keys(table)], dtype=int)
        n_sites = len(previous["site_shift"])
        if np.any(fixed >= 0) and est.n_partitions in ("auto", n_sites):
            fixed[fixed < 0] = n_sites
            return fixed
    return balance(load, _n_sites(est, load.sum(), len(load)))


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
