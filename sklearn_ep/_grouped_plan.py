"""Plan of a hierarchical fit: which rows and groups go to which partition, what is known of them."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from ._checkpoint import digest
from ._engine.partition import Part
from ._engine.posteriors.arrow import arrow_rows
from ._grouped_parts import PartSpec, design_of
from ._groups import balance, group_keys, number_groups, spread_by_content

__all__ = ["Plan", "plan_parts", "plan_rows", "warn_of_hard_groups"]

_AUTO_SITES = 8  # few large partitions: as accurate as many small ones and several times faster
# Total weight that makes one more partition worth while: with groups; without, where a partition is
# only a block of rows; and for importance sampling, whose noise adds up over partitions.
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
        kind = "draws" if engine == "importance" else "rows" if n_groups is None else "groups"
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
    if labels is None:
        table, code, size, one = np.empty(0), np.zeros(len(y), int), np.empty(0), np.empty(0, bool)
        site = spread_by_content(X, y, weight, _n_sites(sizing[0], weight.sum(), None, sizing[1]))
        row_site, n_named, group_site = site, 0, np.zeros(1, int)
    else:
        table, code = number_groups(labels)
        n_named, n_all = len(table), int(code.max()) + 1
        size = np.bincount(code, minlength=n_all)
        high = np.bincount(code, weights=y, minlength=n_all)
        one = (high == 0) | (high == size * y.max())
        load = np.bincount(code, weights=weight, minlength=n_all)
        group_site = _place_groups(table, load, sizing, previous)
        row_site, site = group_site[code], group_site[:n_named]
    members = [np.flatnonzero(row_site == k) for k in range(row_site.max() + 1)]
    where = [
        np.flatnonzero(group_site == k) if labels is not None else np.empty(0, int)
        for k in range(len(members))
    ]

    def make_parts(sign):
        return [
            Part(*arrow_rows(shared[m], sign[m], weight[m], local[m], code[m])[0]) for m in members
        ]

    fingerprint = digest(X, y, weight, code, row_site) if with_digest else ""
    return Plan(make_parts, None, site, where, table, len(y), X.shape[1], size, one, fingerprint)


def _place_groups(table, load, sizing, previous):
    """Return the site of each group; those of an earlier fit stay where they are."""
    fixed = np.full(len(load), -1)
    if previous is not None and len(load) == len(table):
        known = dict(zip(previous["group_keys"].tolist(), previous["partition"], strict=True))
        fixed = np.array([known.get(key, -1) for key in group_keys(table)], dtype=int)
        n_sites = len(previous["site_shift"])
        if np.any(fixed >= 0) and sizing[0] in ("auto", n_sites):
            fixed[fixed < 0] = n_sites
            return fixed
        fixed[:] = -1
    return balance(load, _n_sites(sizing[0], load.sum(), len(load), sizing[1]), fixed)


def plan_parts(parts, descriptions, group_column, slopes, fit_intercept, classes):
    """Return the `Plan` of raw partitions from what their workers said of them."""
    labels = [d.labels for d in descriptions]
    where, start = [], 0
    for d in descriptions:
        named = len(d.labels)
        unnamed = d.n_groups - named if group_column is not None else 0
        where.append((start + np.arange(named), unnamed))
        start += named
    n_named, extra = start, start
    full = []
    for named, unnamed in where:
        full.append(np.r_[named, extra + np.arange(unnamed)].astype(int))
        extra += unnamed
    site = np.concatenate([np.full(len(table), k) for k, table in enumerate(labels)])
    if group_column is None:
        site = np.concatenate([np.full(d.n_rows, k) for k, d in enumerate(descriptions)])
        full, table, order = [np.empty(0, int) for _ in parts], np.empty(0), np.empty(0, int)
    else:
        table, code = number_groups([g for part in labels for g in part.tolist()])
        if len(table) < n_named:
            raise ValueError(
                "a group has rows in more than one partition; give whole groups to a partition."
            )
        order = np.argsort(code)
        site = site[order]
        renumber = np.r_[code, np.arange(n_named, extra)].astype(int)
        full = [renumber[w] for w in full]
    spec = PartSpec(
        descriptions[0].width,
        group_column,
        slopes,
        fit_intercept,
        classes[-1].item() if isinstance(classes[-1], np.generic) else classes[-1],
    )
    width = descriptions[0].width - (group_column is not None)
    fingerprint = "".join(d.digest[:16] for d in descriptions)
    return Plan(
        lambda sign: parts,
        spec,
        site,
        full,
        table,
        sum(d.n_rows for d in descriptions),
        width,
        np.empty(0),
        np.empty(0, bool),
        fingerprint,
    )


def warn_of_hard_groups(name, plan, tau):
    """Warn where expectation propagation, or the data, are known to say little about tau."""
    if len(plan.labels) == 1:
        warnings.warn(
            f"{name}: there is one group, so the data say nothing about the group scale tau; its "
            "posterior is the prior.",
            UserWarning,
            stacklevel=3,
        )
    elif len(plan.group_size) == 0:
        return
    elif plan.group_size.max() == 1:
        warnings.warn(
            f"{name}: every group has one row, so the data say next to nothing about the group "
            "scale tau.",
            UserWarning,
            stacklevel=3,
        )
    elif np.median(plan.group_size) < 5 and (tau > 4 or np.mean(plan.one_class) > 0.5):
        warnings.warn(
            f"{name}: groups have {np.median(plan.group_size):g} rows in the median, "
            f"{np.mean(plan.one_class):.0%} of them of one class, and the median of tau is "
            f"{tau:.2g}. Expectation propagation is inaccurate there: group effects are far from "
            "Gaussian, and tau is underestimated. Compare with engine='importance'.",
            UserWarning,
            stacklevel=3,
        )
