"""Plan of a fit with factors: checked parameters and data, levels as numbers, engine."""

from typing import Any, NamedTuple

import numpy as np
from sklearn.utils.validation import validate_data

from ..._estimator.checks import validate_training
from .. import _log_cholesky as log_cholesky
from .._groups import array_of, in_memory
from .._plan import check_binary, prior_sd, wanted_rule
from .factors import (
    FactorColumns,
    check_measured,
    columns_beside,
    factor_columns,
    labels_of,
    numbered_levels,
    take_labels,
)
from .layout import local_factor

__all__ = [
    "CrossedPlan",
    "check_several",
    "design_of_factors",
    "plan_factors",
    "remarks_on_factors",
]

_MOST_SHARED = 500  # effects of all factors but the local one up to which "auto" is "ep"
_LARGEST_SHARED = 2000  # beyond, a Cholesky factor at each node of the grid takes too long
_ONE_FACTOR = {"n_partitions": "auto", "schedule": "parallel"}


class CrossedPlan(NamedTuple):
    """What a fit needs to know.

    X (n, D) are the shared columns, the intercept last; designs (n, q_f), codes (n,), levels (named
    ones) and n_levels (rows without label counted) are of each factor; y are class indices;
    beta_sd (D,), theta_mean and theta_sd (T,) the priors.
    """

    columns: FactorColumns
    engine: str
    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    designs: list[np.ndarray]
    codes: list[np.ndarray]
    levels: list[np.ndarray]
    n_levels: list[int]
    beta_sd: np.ndarray
    theta_mean: np.ndarray
    theta_sd: np.ndarray
    tol: float
    max_iter: int
    theta: str

    @property
    def n_effects(self):
        """Number of varying coefficients of each factor."""
        return [w.shape[1] for w in self.designs]

    @property
    def local(self):
        """Number of the local factor."""
        return local_factor(self.n_effects, self.n_levels)


def check_several(est, has_groups, raw, checkpoint):
    """Raise a ValueError that names what a model of factors cannot do."""
    if not has_groups:
        raise ValueError("engine='messages' needs groups: give group_column or groups.")
    if raw:
        raise ValueError(
            "a list of partitions takes one factor, given without a list, and an engine other than "
            "'messages'."
        )
    if checkpoint is not None:
        raise ValueError(
            "checkpoint takes one factor, given without a list, and an engine other than "
            "'messages'."
        )


def plan_factors(est, X, y, groups, sample_weight):
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
    n_levels = [int(c.max()) + 1 for c in codes]
    shared, designs = design_of_factors(training.X, columns)
    engine = _engine_of(est, columns, n_levels)
    theta_mean, theta_sd = _theta_prior(est, columns)
    return CrossedPlan(
        columns,
        engine,
        shared,
        training.y,
        training.weight,
        designs,
        codes,
        levels,
        n_levels,
        prior_sd(est, training.X.shape[1]),
        theta_mean,
        theta_sd,
        tol=float(est.tol),
        max_iter=int(est.max_iter),
        theta=wanted_rule(est),
    )


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


def _engine_of(est, columns, n_levels):
    """Return "ep" or "messages", or raise a ValueError naming what does not go with several."""
    if est.engine not in ("auto", "ep", "messages"):
        raise ValueError(
            f"engine={est.engine!r} takes one factor, given without a list; with a list it must be "
            "'ep', 'messages' or 'auto'."
        )
    for name, default in _ONE_FACTOR.items():
        if getattr(est, name) != default:
            raise ValueError(
                f"{name}={getattr(est, name)!r} takes one factor, given without a list, and an "
                "engine other than 'messages'."
            )
    slopes = any(f.slopes for f in columns.factors)
    if est.engine == "messages" and slopes:
        raise ValueError("engine='messages' takes no random_slopes; give engine='ep'.")
    n_effects = [1 + len(f.slopes) for f in columns.factors]
    sizes = np.array(n_effects) * n_levels
    shared = int(sizes.sum() - sizes.max())
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
    for k, (factor, code, n) in enumerate(
        zip(plan.columns.factors, plan.codes, plan.n_levels, strict=True)
    ):
        size = np.bincount(code)
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
        for other in range(k):
            if _same_partition(code, plan.codes[other]):
                name = plan.columns.factors[other].name
                found.append(
                    f"factors {name!r} and {factor.name!r} have the same groups of rows: only the "
                    "sum of their variances is known."
                )
    return tuple(found)


def _same_partition(a, b):
    n = len(np.unique(a))
    return n == len(np.unique(b)) and n == len(np.unique(a * (b.max() + 1) + b))
