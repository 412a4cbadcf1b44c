"""Plan of a fit with factors: checked parameters and data, levels as numbers, engine."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.utils.validation import validate_data

from .._estimator.checks import validate_training
from . import _log_cholesky as log_cholesky
from ._checkpoint import digest
from ._factors import (
    FactorColumns,
    check_measured,
    columns_beside,
    factor_columns,
    labels_of,
    numbered_levels,
    take_labels,
)
from ._groups import array_of, in_memory
from ._plan import check_binary, prior_sd, wanted_rule
from .exact.layout import local_factor
from .messages.parts import (
    FactorParts,
    RawFactors,
    describe_factors,
    join_levels,
    parts_of_rows,
    width_of,
)

__all__ = [
    "CrossedPlan",
    "check_several",
    "design_of_factors",
    "plan_factor_parts",
    "plan_factors",
    "remarks_on_factors",
]

_MOST_SHARED = 500  # effects of all factors but the local one up to which "auto" is "ep"
_LARGEST_SHARED = 2000  # beyond, a Cholesky factor at each node of the grid takes too long


class CrossedPlan(NamedTuple):
    """What a fit needs to know.

    X (n, D) are the shared columns, the intercept last; designs (n, q_f), codes (n,), levels (named
    ones) and n_levels (rows without label counted) are of each factor, sizes (L_f,) the rows of
    each level; y are class indices. Of raw parts X, y, weight, designs and codes are None. beta_sd
    (D,), theta_mean and theta_sd (T,) are the priors; parts are `FactorParts`.
    """

    columns: FactorColumns
    engine: str
    X: Any
    y: Any
    weight: Any
    designs: Any
    codes: Any
    n_rows: int
    levels: list[np.ndarray]
    n_levels: list[int]
    sizes: list[np.ndarray]
    beta_sd: np.ndarray
    theta_mean: np.ndarray
    theta_sd: np.ndarray
    tol: float
    max_iter: int
    theta: str
    power: float
    n_jobs: int | None
    parts: FactorParts

    @property
    def n_effects(self):
        """Number of varying coefficients of each factor."""
        return [1 + len(f.slopes) for f in self.columns.factors]

    @property
    def local(self):
        """Number of the local factor."""
        return local_factor(self.n_effects, self.n_levels)

    @property
    def members(self):
        """Rows of each part, None for raw parts."""
        return self.parts.members


def check_several(est, has_groups):
    """Raise a ValueError that names what a model of factors cannot do."""
    if not has_groups:
        raise ValueError("engine='messages' needs groups: give group_column or groups.")


def plan_factors(est, X, y, groups, sample_weight, with_digest):
    """Check data in memory, set the estimator's attributes of the data, return the `CrossedPlan`.

    est is the `HierarchicalEPLogistic`; X, y, groups and sample_weight as in its `fit`.
    """
    X, y, groups, sample_weight = map(in_memory, (X, y, groups, sample_weight))
    if est.group_column is not None and groups is not None:
        raise ValueError("give group_column or groups, not both.")
    columns, table, training = _checked(est, X, y, groups, sample_weight)
    check_binary(est)
    levels, codes = [], []
    for factor in columns.factors:
        check_measured(table, factor)
        labels = labels_of(table, factor)
        if not training.kept.all():
            labels = _some(labels, training.kept)
        known, code = numbered_levels(labels)
        levels.append(known)
        codes.append(code)
    sizes = [np.bincount(code) for code in codes]
    n_levels = [len(size) for size in sizes]
    shared, designs = design_of_factors(training.X, columns)
    engine = _engine_of(est, columns, n_levels)
    fingerprint = ""
    if with_digest:
        content = digest(training.X, training.y, training.weight, *codes)
        fingerprint = content + _model_digest(est, columns, engine)
    n_parts = 1 if est.n_partitions == "auto" else min(est.n_partitions, len(training.y))
    rows: dict[str, Any] = dict(
        X=shared, y=training.y, weight=training.weight, designs=designs, codes=codes
    )
    found: dict[str, Any] = dict(
        n_rows=len(training.y), levels=levels, n_levels=n_levels, sizes=sizes
    )
    found |= dict(columns=columns, engine=engine)
    found |= dict(parts=parts_of_rows(codes, n_levels, n_parts, fingerprint))
    return CrossedPlan(**rows, **found, **_settings(est, columns, training.X.shape[1]))


def plan_factor_parts(est, run, with_digest):
    """Ask raw parts what they hold, set the estimator's attributes of it, return the `CrossedPlan`.

    run is the `PartMap` over the raw parts.
    """
    none = [None] * len(run.parts)
    widths = run(width_of, none)
    if len(set(widths)) > 1:
        raise ValueError(f"partitions differ in their number of features: {widths}.")
    est.n_features_in_ = width = widths[0]
    vars(est).pop("feature_names_in_", None)
    columns = factor_columns(est, None, None)
    told = run(describe_factors, none, columns, with_digest)
    est.classes_ = np.unique(np.concatenate([t.classes for t in told]))
    if len(est.classes_) < 2:
        raise ValueError("a list of partitions needs at least two classes, got 1 class.")
    check_binary(est)
    levels, sizes, numbers = join_levels(told)
    engine = _engine_of(est, columns, numbers.n_levels, raw=True)
    fingerprint = ""
    if with_digest:
        fingerprint = digest(*(np.array(t.digest) for t in told))
        fingerprint += _model_digest(est, columns, engine)
    read = RawFactors(columns, est.classes_[1])
    parts = FactorParts(numbers, read, None, fingerprint)
    rows: dict[str, Any] = dict(X=None, y=None, weight=None, designs=None, codes=None)
    found: dict[str, Any] = dict(
        n_rows=sum(t.n_rows for t in told), levels=levels, sizes=sizes, parts=parts
    )
    found |= dict(columns=columns, engine=engine, n_levels=numbers.n_levels)
    return CrossedPlan(**rows, **found, **_settings(est, columns, width - len(columns.taken)))


def _settings(est, columns, width) -> dict[str, Any]:
    """Return the fields of a plan that are parameters, for shared columns of this width."""
    theta_mean, theta_sd = _theta_prior(est, columns)
    return dict(
        beta_sd=prior_sd(est, width),
        theta_mean=theta_mean,
        theta_sd=theta_sd,
        tol=float(est.tol),
        max_iter=int(est.max_iter),
        theta=wanted_rule(est),
        power=float(est.power),
        n_jobs=est.n_jobs,
    )


def _model_digest(est, columns, engine):
    """Return a hash of what a checkpoint must have in common with a fit besides the data."""
    means, sds = _theta_prior(est, columns)
    factors = [np.array([*f.positions, -1, *f.slopes]) for f in columns.factors]
    scale = np.append(np.asarray(est.prior_scale, dtype=float), est.power)
    return digest(means, sds, scale, np.array(f"{engine} {columns.fit_intercept}"), *factors)


def _checked(est, X, y, groups, sample_weight):
    """Return (`FactorColumns`, table of labels, `Training`) of checked data."""
    if groups is not None:
        training = validate_training(est, X, y, sample_weight)
        if np.ndim(groups) == 1:
            groups = np.array(groups, dtype=object)[:, None]
        table = columns_beside(groups, len(training.kept))
        return factor_columns(est, X, groups), table, training
    validate_data(est, X, skip_check_array=True)
    X = array_of(X)
    columns = factor_columns(est, X, None)
    fewest = 0 if est.fit_intercept else 1
    design = take_labels(X, columns.taken)
    training = validate_training(est, design, y, sample_weight, ensure_min_features=fewest)
    validate_data(est, X, skip_check_array=True)
    return columns, X, training


def _some(labels, kept):
    if isinstance(labels, np.ndarray):
        return labels[kept]
    return [g for g, k in zip(labels, kept, strict=True) if k]


def design_of_factors(X, columns):
    """Return (shared design with the intercept last, design (n, q_f) of each factor's effects)."""
    ones = np.ones((len(X), 1))
    designs = [np.hstack([ones, X[:, list(f.slopes)]]) for f in columns.factors]
    return (np.hstack([X, ones]) if columns.fit_intercept else X), designs


def _engine_of(est, columns, n_levels, raw=False):
    """Return "ep" or "messages", or raise a ValueError naming what does not go with several.

    raw says that rows are a list of partitions.
    """
    if est.engine not in ("auto", "ep", "messages"):
        raise ValueError(
            f"engine={est.engine!r} takes one factor, given without a list; with a list it must be "
            "'ep', 'messages' or 'auto'."
        )
    if est.schedule != "parallel":
        raise ValueError(
            f"schedule={est.schedule!r} takes one factor, given without a list, and an engine "
            "other than 'messages'."
        )
    slopes = any(f.slopes for f in columns.factors)
    parted = raw or est.n_partitions != "auto"
    if parted and est.engine != "messages" and (slopes or est.engine == "ep"):
        what = "a list of partitions" if raw else f"n_partitions={est.n_partitions!r}"
        raise ValueError(
            f"{what} with several factors takes engine='messages' without random_slopes."
        )
    if est.engine == "messages" and slopes:
        raise ValueError("engine='messages' takes no random_slopes; give engine='ep'.")
    n_effects = [1 + len(f.slopes) for f in columns.factors]
    sizes = np.array(n_effects) * n_levels
    shared = int(sizes.sum() - sizes.max())
    if est.engine == "auto" and parted:
        return "messages"
    if est.engine == "auto":
        return "ep" if shared <= _MOST_SHARED or slopes else "messages"
    if est.engine == "ep" and shared > _LARGEST_SHARED:
        raise ValueError(
            f"engine='ep' with {shared} effects of factors besides the largest one: the limit is "
            f"{_LARGEST_SHARED}; give engine='messages'."
        )
    return est.engine


def _theta_prior(est, columns):
    """Return prior means and sds (T,) of theta, factor by factor."""
    names = [f.name for f in columns.factors]
    given: Any = est.tau_prior
    if isinstance(given, dict):
        unknown = [key for key in given if key not in names]
        if unknown:
            raise ValueError(f"tau_prior has {unknown!r}, which is no factor: {names!r}.")
    means, sds = [], []
    for factor in columns.factors:
        prior = given.get(factor.name, (0.0, 1.5)) if isinstance(given, dict) else given
        q = 1 + len(factor.slopes)
        mean = np.zeros(log_cholesky.n_coordinates(q))
        mean[log_cholesky.diagonal_positions(q)] = prior[0]
        means.append(mean)
        sds.append(np.full(len(mean), float(prior[1])))
    return np.concatenate(means), np.concatenate(sds)


def remarks_on_factors(plan, tau):
    """Return sentences on factors of which the data, or the engine, are known to say little."""
    found = []
    first = np.cumsum([0, *plan.n_effects])
    for k, (factor, size, n) in enumerate(
        zip(plan.columns.factors, plan.sizes, plan.n_levels, strict=True)
    ):
        if n == 1:
            found.append(f"factor {factor.name!r} has one level: its tau is that of the prior.")
        elif n < 5:
            found.append(f"factor {factor.name!r} has {n} levels: its tau rests on its prior.")
        elif size.max() == 1:
            found.append(
                f"every level of factor {factor.name!r} has one row, so the data say next to "
                "nothing about its tau."
            )
        elif plan.engine == "messages" and tau[first[k]] > 2 and np.median(size) < 5:
            found.append(
                f"factor {factor.name!r} has tau {tau[first[k]]:.2g} and {np.median(size):g} rows "
                "a level in the median: engine='messages' then finds tau a few hundredths too "
                "small; compare with engine='ep' where it is not too large."
            )
        for other in range(k if plan.codes is not None else 0):
            if _same_partition(plan.codes[k], plan.codes[other]):
                name = plan.columns.factors[other].name
                found.append(
                    f"factors {name!r} and {factor.name!r} have the same groups of rows: only the "
                    "sum of their variances is known."
                )
    return tuple(found)


def _same_partition(a, b):
    n = len(np.unique(a))
    return n == len(np.unique(b)) and n == len(np.unique(a * (b.max() + 1) + b))
