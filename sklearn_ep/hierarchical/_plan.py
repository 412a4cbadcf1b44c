"""Plan of a hierarchical fit: checked parameters and data, and which rows go to which partition."""

import inspect
import numbers
from typing import NamedTuple

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from .._engine.gaussian import Natural
from .._engine.partition import Part
from .._estimator.averaged import check_hyperparameters
from .._estimator.checks import check_choice, check_common, check_number, validate_training
from . import _log_cholesky as log_cholesky
from ._checkpoint import digest
from ._groups import (
    balance,
    check_labels_at,
    column_position,
    group_keys,
    in_memory,
    label_list,
    number_groups,
    separated,
    spread_by_content,
)
from .partitions.arrow import arrow_rows
from .partitions.nuts import load_sampler
from .partitions.parts import Columns, PartSpec, describe, design_of

__all__ = [
    "Plan",
    "Settings",
    "check_binary",
    "check_parameters",
    "check_parts",
    "plan_parts",
    "plan_rows",
    "prior_sd",
    "remarks_on_groups",
    "remarks_on_parameters",
    "wanted_rule",
]

_AUTO_SITES = 8  # few large partitions: as accurate as many small ones and several times faster
# Total weight that makes one more partition worth while: with groups; without, where a partition is
# only a block of rows; and for engines that draw, whose noise adds up over partitions.
_WEIGHT_A_SITE = {"groups": 100, "rows": 1000, "draws": 5000}


class Settings(NamedTuple):
    """Parameters of the estimator that the fit itself uses.

    `engine` is the one that runs; `whole` says that nothing asks for partitions; `theta` is how
    theta is treated at the end if it can be: by a "grid", a "gaussian", or at its "mode"; power is
    the share of a row's likelihood that is matched.
    """

    engine: str
    whole: bool
    theta: str
    schedule: str
    damping: float
    max_iter: int
    tol: float
    n_draws: int
    seed: int
    power: float


class GroupedProblem(NamedTuple):
    """What is fitted: the model's sizes and prior, and how parts relate to the groups.

    spec tells workers how to read raw parts, None for prepared ones; where[k] numbers the groups of
    part k, in the order the worker sees them; n_named of them have labels; prior is that of phi,
    theta_prior the means and sds (T,) of its theta part.
    """

    spec: PartSpec | None
    where: list[np.ndarray]
    n_named: int
    n_rows: int
    d: int
    q: int
    prior: Natural
    theta_prior: tuple[np.ndarray, np.ndarray]


class PlannedRows(NamedTuple):
    """Rows in memory: designs, class indices, weights, groups, and which rows each part has."""

    shared: np.ndarray
    local: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    code: np.ndarray
    members: list[np.ndarray]

    def parts(self, sign):
        """Return the parts for labels in {-1, +1}."""
        arrays = self.shared, sign, self.weight, self.local, self.code
        return [Part(*arrow_rows(*(a[m] for a in arrays))[0]) for m in self.members]


class Plan(NamedTuple):
    """What a fit needs to know.

    rows are the data in memory, None for raw parts, which are read where they are; site numbers the
    site of each named group, of each row where there are no groups; labels (J,) are those of the
    groups; group_size and one_class (J,) the rows of each group and whether they are all of one
    class, empty where not known; fingerprint is the hash of data and partition, empty without a
    checkpoint.
    """

    problem: GroupedProblem
    settings: Settings
    columns: Columns
    rows: PlannedRows | None
    site: np.ndarray
    labels: np.ndarray
    group_size: np.ndarray
    one_class: np.ndarray
    fingerprint: str


def check_parameters(est):
    """Raise an error that names the first parameter of the estimator that is not usable."""
    check_common(est)
    check_hyperparameters(est.hyperparameters)
    check_choice("engine", est.engine, ["auto", "ep", "messages", "laplace", "importance", "nuts"])
    check_number("power", est.power, 0, 1, boundaries="right")
    if est.power != 1 and est.engine in ("laplace", "importance", "nuts"):
        raise ValueError(
            f"power={est.power!r} takes engine='ep' or 'messages': engine={est.engine!r} has no "
            "sites of rows."
        )
    if est.engine == "nuts":
        load_sampler()
    check_choice("schedule", est.schedule, ["parallel", "serial", "asynchronous"])
    check_number("n_draws", est.n_draws, 10, integer=True)
    if isinstance(est.n_partitions, str):
        check_choice("n_partitions", est.n_partitions, ["auto"])
    else:
        check_number("n_partitions", est.n_partitions, 1, integer=True)
    if isinstance(est.prior_scale, numbers.Real):
        check_number("prior_scale", est.prior_scale, 0, boundaries="neither")
    by_factor = isinstance(est.tau_prior, dict)
    for prior in est.tau_prior.values() if by_factor else [est.tau_prior]:
        if np.ndim(prior) != 1 or len(prior) != 2:
            raise ValueError(f"tau_prior must be (mean, sd) of log tau, got {prior!r}.")
        check_number("mean of tau_prior", prior[0])
        check_number("sd of tau_prior", prior[1], 0, boundaries="neither")
    if by_factor and not isinstance(est.group_column, list):
        raise ValueError("tau_prior may be a dict where group_column is a list of factors.")


def remarks_on_parameters(est, has_groups):
    """Return a sentence on each parameter that is not at its default and does nothing."""
    engine = "ep" if est.engine == "auto" else est.engine
    draws = engine in ("importance", "nuts")
    idle = {
        "schedule": (engine == "laplace", "which climbs to the mode of all sites together"),
        "n_draws": (not draws, "which does not draw"),
        "refine": (draws or engine == "messages", "which goes without a grid in any case"),
        "hyperparameters": (
            draws and est.hyperparameters == "mode",
            "whose draws are of theta too",
        ),
    }
    found = [
        f"{name}={getattr(est, name)!r} does nothing with engine={est.engine!r}, {reason}; leave "
        "it at its default."
        for name, (does_nothing, reason) in idle.items()
        if does_nothing and not _at_default(est, name)
    ]
    if not has_groups and not _at_default(est, "tau_prior"):
        found.append(
            "tau_prior was given, but no groups: this is logistic regression without group "
            "effects. Name their column by group_column, or give fit(X, y, groups=...)."
        )
    return found


def _at_default(est, name):
    default, value = inspect.signature(type(est)).parameters[name].default, getattr(est, name)
    return tuple(value) == default if isinstance(default, tuple) else value == default


def prior_sd(est, width):
    """Return the prior sds of the shared coefficients, the intercept last."""
    scale = np.asarray(est.prior_scale, dtype=float)
    if scale.ndim == 0:
        return np.full(width + est.fit_intercept, float(scale))
    if scale.shape != (width,) or not np.all(scale > 0) or not np.all(np.isfinite(scale)):
        raise ValueError(
            f"prior_scale must be a positive number or {width} of them, got {scale!r}."
        )
    return np.r_[scale, 2.5] if est.fit_intercept else scale


def _columns(est, X, group, has_groups):
    """Return the `Columns`, `random_slopes` found by name or index."""
    if isinstance(est.random_slopes, dict):
        raise ValueError("random_slopes may be a dict where group_column is a list of factors.")
    if est.random_slopes is None or len(est.random_slopes) == 0:
        return Columns(group, (), est.fit_intercept, has_groups)
    if not has_groups:
        raise ValueError("random_slopes needs groups: give group_column or groups.")
    names = [est.random_slopes] if isinstance(est.random_slopes, str) else est.random_slopes
    found = [column_position(c, X, est.n_features_in_, "random_slopes") for c in names]
    if len(set(found)) < len(found) or group in found:
        raise ValueError(
            f"random_slopes={est.random_slopes!r} repeats a column or names the group column."
        )
    slopes = tuple(c - (group is not None and c > group) for c in found)
    return Columns(group, slopes, est.fit_intercept, has_groups)


def _problem(est, columns, spec, where, n_named, n_rows):
    """Return the `GroupedProblem` with its prior."""
    q = 1 + len(columns.slopes) if columns.has_groups else 0
    mean = np.zeros(log_cholesky.n_coordinates(q))
    mean[log_cholesky.diagonal_positions(q)] = est.tau_prior[0]
    sd = np.full(len(mean), float(est.tau_prior[1]))
    beta_sd = prior_sd(est, est.n_features_in_ - (columns.group is not None))
    d, phi_mean, phi_sd = len(beta_sd), np.r_[np.zeros(len(beta_sd)), mean], np.r_[beta_sd, sd]
    prior = Natural(np.diag(1.0 / phi_sd**2), phi_mean / phi_sd**2)
    return GroupedProblem(spec, where, n_named, n_rows, d, q, prior, (mean, sd))


def wanted_rule(est):
    """Return what the estimator asks for at the end of theta: "grid", "gaussian" or "mode"."""
    if est.hyperparameters == "mode":
        return "mode"
    return "grid" if est.refine else "gaussian"


def _settings(est):
    engine = "ep" if est.engine == "auto" else est.engine
    seed = 0
    if engine in ("importance", "nuts"):
        seed = check_random_state(est.random_state).randint(2**31)
    steps = est.schedule, float(est.damping), int(est.max_iter), float(est.tol)
    power = float(est.power)
    whole = (
        engine == "ep"
        and wanted_rule(est) != "gaussian"
        and est.n_partitions == "auto"
        and est.schedule == "parallel"
        and est.damping == 1
    )
    return Settings(engine, whole, wanted_rule(est), *steps, int(est.n_draws), seed, power)


def plan_rows(est, X, y, groups, sample_weight, previous, with_digest):
    """Check data in memory, set the estimator's attributes of the data, and return the `Plan`.

    est is the `HierarchicalEPLogistic`; X, y, groups and sample_weight are as in its `fit`;
    previous is the state of an earlier fit or None: groups stay in their sites, new ones share a
    site of their own.
    """
    given = map(in_memory, (X, y, groups, sample_weight))
    training, labels, columns = _checked_rows(est, *given)
    y, weight = training.y, training.weight
    size, one_class = np.empty(0, dtype=int), np.empty(0, dtype=bool)
    if labels is None:
        table, code = np.empty(0), np.zeros(len(y), dtype=int)
        n_sites = _n_sites(est, weight.sum(), None)
        site = row_site = spread_by_content(training.X, y, weight, n_sites)
        group_site = np.empty(0, dtype=int)
    else:
        table, code = number_groups(labels)
        size, ones = np.bincount(code), np.bincount(code, weights=y)
        one_class = (ones == 0) | (ones == size)
        group_site = _place_groups(est, table, np.bincount(code, weights=weight), previous)
        row_site, site = group_site[code], group_site[: len(table)]
    members = [np.flatnonzero(row_site == k) for k in np.unique(row_site)]
    where = [np.flatnonzero(group_site == k) for k in np.unique(row_site)]
    shared, local = design_of(training.X, columns)
    rows = PlannedRows(shared, local, y, weight, code, members)
    fingerprint = digest(training.X, y, weight, code, row_site) if with_digest else ""
    problem = _problem(est, columns, None, where, len(table), len(y))
    return Plan(problem, _settings(est), columns, rows, site, table, size, one_class, fingerprint)


def _checked_rows(est, X, y, groups, sample_weight):
    """Check the data; return (Training, group labels of the rows in use or None, Columns)."""
    if est.group_column is not None and groups is not None:
        raise ValueError("give group_column or groups, not both.")
    labels: list | None = None
    position = None
    if est.group_column is None:
        training = validate_training(est, X, y, sample_weight)
        if groups is not None:
            labels = label_list(groups, len(training.kept))
    else:
        validate_data(est, X, skip_check_array=True)
        position = column_position(est.group_column, X, est.n_features_in_, "group_column")
        design, labels = separated(X, position)
        if isinstance(est.group_column, numbers.Integral):
            check_labels_at(est.group_column, labels)
        fewest = 0 if est.fit_intercept else 1
        training = validate_training(est, design, y, sample_weight, ensure_min_features=fewest)
        validate_data(est, X, skip_check_array=True)
    if labels is not None:
        check_binary(est)
        labels = [g for g, kept in zip(labels, training.kept, strict=True) if kept]
    return training, labels, _columns(est, X, position, labels is not None)


def check_binary(est):
    if len(est.classes_) > 2:
        raise ValueError(
            f"group effects need a binary target, y has {len(est.classes_)} classes; wrap "
            "the estimator in sklearn.multiclass.OneVsRestClassifier with group_column."
        )


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
    if previous is not None and len(load) == len(table):
        known = dict(zip(previous["group_keys"].tolist(), previous["partition"], strict=True))
        fixed = np.array([known.get(key, -1) for key in group_keys(table)], dtype=int)
        n_sites = len(previous["site_shift"])
        if np.any(fixed >= 0) and est.n_partitions in ("auto", n_sites):
            fixed[fixed < 0] = n_sites
            return fixed
    return balance(load, _n_sites(est, load.sum(), len(load)))


def check_parts(est, parts):
    """Raise a ValueError where a list can be no list of partitions."""
    if len(parts) == 0:
        raise ValueError("the list of partitions is empty: X has 0 samples and there is no y.")
    if any(isinstance(p, list | np.ndarray) or np.isscalar(p) for p in parts):
        raise ValueError("y is None, but X is no list of partitions such as (X, y) pairs.")
    given = est.group_column if isinstance(est.group_column, list) else [est.group_column]
    columns = [c for f in given for c in (f if isinstance(f, tuple) else (f,))]
    if any(isinstance(column, str) for column in columns):
        raise ValueError(
            f"group_column={est.group_column!r}: give the index of the column for partitions."
        )


def plan_parts(est, run, with_digest):
    """Ask raw partitions what they hold, set the estimator's attributes of it, return the `Plan`.

    run is the `PartMap` over the raw parts.
    """
    told = run(describe, [None] * len(run.parts), est.group_column, with_digest)
    columns = _described_columns(est, told)
    spec = PartSpec(columns, est.classes_[1])
    n_rows = [d.n_rows for d in told]
    if columns.has_groups:
        site, where, table = _groups_of_parts(told)
    else:
        site, table = np.repeat(np.arange(len(told)), n_rows), np.empty(0)
        where = [np.empty(0, int) for _ in told]
    problem = _problem(est, columns, spec, where, len(table), sum(n_rows))
    unknown = np.empty(0, dtype=int), np.empty(0, dtype=bool)
    fingerprint = digest(np.array([d.digest for d in told]))
    return Plan(problem, _settings(est), columns, None, site, table, *unknown, fingerprint)


def _described_columns(est, told):
    """Check what partitions say against each other; set the attributes that follow from it."""
    widths = [t.width for t in told]
    if len(set(widths)) > 1:
        raise ValueError(f"partitions differ in their number of features: {widths}.")
    est.classes_ = np.unique(np.concatenate([t.classes for t in told]))
    if len(est.classes_) < 2:
        raise ValueError("a list of partitions needs at least two classes, got 1 class.")
    est.n_features_in_ = widths[0]
    vars(est).pop("feature_names_in_", None)
    if est.group_column is None:
        return _columns(est, None, None, False)
    check_binary(est)
    position = column_position(est.group_column, None, est.n_features_in_, "group_column")
    return _columns(est, None, position, True)


def _groups_of_parts(told):
    """Return the site of each named group, the groups of each part, and the labels."""
    table, code = number_groups([label for d in told for label in d.labels.tolist()])
    sizes = [len(d.labels) for d in told]
    if len(table) < sum(sizes):
        raise ValueError(
            "a group has rows in more than one partition; give whole groups to a partition."
        )
    site = np.empty(len(table), dtype=int)
    site[code] = np.repeat(np.arange(len(told)), sizes)
    unnamed = np.cumsum([len(table)] + [d.n_groups - len(d.labels) for d in told])
    named = np.split(code, np.cumsum(sizes)[:-1])
    bounds = zip(named, unnamed[:-1], unnamed[1:], strict=True)
    return site, [np.r_[own, np.arange(a, b)] for own, a, b in bounds], table


def remarks_on_groups(plan, tau, engine, whole):
    """Return sentences on groups of which the engine, or the data, are known to say little.

    whole says that small groups had sites of their own.
    """
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
    if whole or engine in ("importance", "nuts") or median >= 5 or (tau <= 4 and share <= 0.5):
        return ()
    return (
        f"groups have {median:g} rows in the median, {share:.0%} of them of one class, and the "
        f"median of tau is {tau:.2g}. Expectation propagation is inaccurate there: group effects "
        "are far from Gaussian, and tau is underestimated. With n_partitions='auto' and the other "
        "parameters at their defaults small groups are integrated exactly; or compare with "
        "engine='importance'.",
    )
