"""Plan of a hierarchical fit: which rows and groups go to which partition, and what they hold."""

from typing import Any, NamedTuple

import numpy as np

from .._engine.partition import Part
from ._arrow import arrow_rows
from ._checkpoint import digest
from ._groups import balance, group_keys, number_groups, spread_by_content
from ._parts import PartSpec, design_of

__all__ = ["Plan", "plan_parts", "plan_rows", "remarks_on_groups"]

_AUTO_SITES = 8  # few large partitions: as accurate as many small ones and several times faster
# Total weight that makes one more partition worth while: with groups; without, where a partition is
# only a block of rows; and for engines that draw, whose noise adds up over partitions.
_WEIGHT_A_SITE = {"groups": 100, "rows": 1000, "draws": 5000}


class Plan(NamedTuple):
    """Rows or raw parts, spread over sites.

    Attributes
    ----------
    make_parts : callable
        Maps labels in {-1, +1} to the parts (in-memory data), or returns the raw parts.
    spec : PartSpec or None
        How workers read raw parts.
    site : ndarray
        Site of each named group; of each row where there are no groups.
    where : list of ndarray
        Numbers of the groups of each part, in the order the worker sees them.
    labels : ndarray of shape (J,)
    n_rows : int
    width : int
        Columns of the design without intercept.
    group_size, one_class : ndarray
        Rows of each group, and whether they are all of one class; empty where not known.
    fingerprint : str
        Hash of data and partition.
    """

    make_parts: Any
    spec: PartSpec | None
    site: np.ndarray
    where: list[np.ndarray]
    labels: np.ndarray
    n_rows: int
    width: int
    group_size: np.ndarray
    one_class: np.ndarray
    fingerprint: str


def _n_sites(n_partitions, total_weight, n_groups, engine):
    if n_partitions == "auto":
        kind = (
            "draws"
            if engine in ("importance", "nuts")
            else "rows"
            if n_groups is None
            else "groups"
        )
        least = 2 if kind == "groups" else 1
        wanted = min(_AUTO_SITES, max(least, int(total_weight // _WEIGHT_A_SITE[kind])))
    else:
        wanted = n_partitions
    return wanted if n_groups is None else min(wanted, n_groups)


def plan_rows(training, labels, slopes, fit_intercept, sizing, previous, with_digest):
    """Return the `Plan` of data in memory.

    Parameters
    ----------
    training : Training
    labels : list or None
        Group labels of the rows that are used.
    slopes : tuple of int
    fit_intercept : bool
    sizing : tuple
        `n_partitions` and `engine` of the estimator.
    previous : dict or None
        State of an earlier fit: groups stay in their sites, new ones share a site of their own.
    with_digest : bool
    """
    X, y, weight = training.X, training.y, training.weight
    shared, local = design_of(X, slopes, fit_intercept, labels is not None)
    size, one_class = np.empty(0, dtype=int), np.empty(0, dtype=bool)
    if labels is None:
        table, code = np.empty(0), np.zeros(len(y), dtype=int)
        site = row_site = spread_by_content(
            X, y, weight, _n_sites(sizing[0], weight.sum(), None, sizing[1])
        )
        group_site = np.empty(0, dtype=int)
    else:
        table, code = number_groups(labels)
        size = np.bincount(code)
        ones = np.bincount(code, weights=y)
        one_class = (ones == 0) | (ones == size)
        group_site = _place_groups(table, np.bincount(code, weights=weight), sizing, previous)
        row_site, site = group_site[code], group_site[: len(table)]
    members = [np.flatnonzero(row_site == k) for k in np.unique(row_site)]
    where = [np.flatnonzero(group_site == k) for k in np.unique(row_site)]

    def make_parts(sign):
        return [
            Part(*arrow_rows(shared[m], sign[m], weight[m], local[m], code[m])[0]) for m in members
        ]

    fingerprint = digest(X, y, weight, code, row_site) if with_digest else ""
    return Plan(
        make_parts, None, site, where, table, len(y), X.shape[1], size, one_class, fingerprint
    )


def _place_groups(table, load, sizing, previous):
    """Return the site of each group; those of an earlier fit stay where they are."""
    if previous is not None and len(load) == len(table):
        known = dict(zip(previous["group_keys"].tolist(), previous["partition"], strict=True))
        fixed = np.array([known.get(key, -1) for key in group_keys(table)], dtype=int)
        n_sites = len(previous["site_shift"])
        if np.any(fixed >= 0) and sizing[0] in ("auto", n_sites):
            fixed[fixed < 0] = n_sites
            return fixed
    return balance(load, _n_sites(sizing[0], load.sum(), len(load), sizing[1]))


def plan_parts(parts, told, spec):
    """Return the `Plan` of raw partitions.

    Parameters
    ----------
    parts : list
    told : list of Description
        What the workers said of the parts.
    spec : PartSpec
    """
    n_rows = [d.n_rows for d in told]
    if spec.group_column is None:
        site, where = np.repeat(np.arange(len(parts)), n_rows), [np.empty(0, int) for _ in parts]
        table, width = np.empty(0), spec.width
    else:
        table, code = number_groups([label for d in told for label in d.labels.tolist()])
        sizes = [len(d.labels) for d in told]
        if len(table) < sum(sizes):
            raise ValueError(
                "a group has rows in more than one partition; give whole groups to a partition."
            )
        site, width = np.empty(len(table), dtype=int), spec.width - 1
        site[code] = np.repeat(np.arange(len(parts)), sizes)
        unnamed = np.cumsum([len(table)] + [d.n_groups - len(d.labels) for d in told])
        named = np.split(code, np.cumsum(sizes)[:-1])
        where = [
            np.r_[own, np.arange(*ends)]
            for own, ends in zip(named, zip(unnamed[:-1], unnamed[1:], strict=True), strict=True)
        ]
    fingerprint = digest(np.array([d.digest for d in told]))
    return Plan(
        lambda sign: parts,
        spec,
        site,
        where,
        table,
        sum(n_rows),
        width,
        np.empty(0, dtype=int),
        np.empty(0, dtype=bool),
        fingerprint,
    )


def remarks_on_groups(plan, tau, engine):
    """Return sentences on groups of which the engine, or the data, are known to say little."""
    if len(plan.labels) == 1:
        return (
            "there is one group, so the data say nothing about the group scale tau; its posterior "
            "is the prior.",
        )
    if len(plan.group_size) == 0:
        return ()
    if plan.group_size.max() == 1:
        return (
            "every group has one row, so the data say next to nothing about the group scale tau.",
        )
    median, share = np.median(plan.group_size), np.mean(plan.one_class)
    if engine in ("importance", "nuts") or median >= 5 or (tau <= 4 and share <= 0.5):
        return ()
    return (
        f"groups have {median:g} rows in the median, {share:.0%} of them of one class, and the "
        f"median of tau is {tau:.2g}. Expectation propagation is inaccurate there: group effects "
        "are far from Gaussian, and tau is underestimated. Compare with engine='importance' or "
        "'nuts'.",
    )
