"""Checked parameters and data of a spike-and-slab fit."""

import inspect
import numbers
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils import check_random_state

from .._estimator.averaged import check_hyperparameters
from .._estimator.checks import (
    LARGEST_ENTRY,
    LARGEST_IN_UNITS,
    check_choice,
    check_column_scales,
    check_column_sizes,
    check_common,
    check_number,
    check_number_or_auto,
    column_sizes,
    is_part_list,
    is_single,
    validate_training,
)
from .._estimator.row_parts import RowStatistics
from ._correlation import different_rows, is_correlated
from ._energy import EPEnergy
from ._hyperparameters import HyperPrior, Space
from ._prior import SpikeSlab
from ._runs import RunSettings
from ._units import (
    Standardisation,
    standardise,
    standardise_statistics,
    statistics_of_user_parts,
)

ACCEPT_SPARSE = ("csr", "csc")
# Without random_state the models that check the evidence are drawn by this seed: they only decide
# between starts, and equal fits are to be equal.
DEFAULT_SEED = 0
# Entries of the working rows up to which hyperparameters="auto" integrates: some 30 posteriors of
# as many columns beside X, and as many fits, are dear beyond.
LARGEST_INTEGRATED = 10_000_000


@dataclass
class SpikeSlabPlan:
    """Everything a fit needs.

    `problem` has the data in working units, at the hyperparameters that are given or where learning
    starts; `space` says which are free, `prior` what is known of those, and `integrates` whether
    they are averaged over; `by_chains` says that models are to be drawn, as columns are correlated.
    The number `n_different` of rows tells what correlation there is by chance. `warm` are
    hyperparameters and sites of the last fit, or None. There is one of `start_seeds` for each start
    at the final hyperparameters; `evidence_seed` draws models, single ones that check the evidence
    or those of chains; `single` says that the rows are in single precision.
    """

    units: Standardisation
    problem: EPEnergy
    space: Space
    prior: HyperPrior
    integrates: bool
    by_chains: bool
    n_different: int
    settings: RunSettings
    noise_starts: list
    warm: Any
    start_seeds: np.ndarray
    evidence_seed: int
    n_jobs: Any
    single: bool


def check_parameters(estimator):
    """Raise an error that names the parameter unless all of them are usable."""
    check_common(estimator)
    check_hyperparameters(estimator.hyperparameters)
    check_choice("algorithm", estimator.algorithm, ["auto", "ep", "convergent", "double_loop"])
    check_number("n_init", estimator.n_init, 1, integer=True)
    for name, high in (("noise_variance", None), ("slab_variance", None), ("prior_inclusion", 1)):
        check_number_or_auto(name, getattr(estimator, name), 0, high)
    starts = estimator.noise_starts
    if isinstance(starts, str | numbers.Number) or len(starts) == 0:
        raise ValueError(f"noise_starts must be a sequence, got {starts!r}.")
    for fraction in starts:
        check_number("noise_starts", fraction, 0, 1, boundaries="neither")


def make_plan(estimator, X, y, sample_weight, groups):
    """Check parameters and data of a fit and return its `SpikeSlabPlan`."""
    check_parameters(estimator)
    units, model, n_different = _data(estimator, X, y, sample_weight)
    d = estimator.n_features_in_
    groups = _checked_groups(groups, d)
    _warn_of_damping(estimator)
    unit = units.y_scale**2
    given = estimator.noise_variance, estimator.slab_variance, estimator.prior_inclusion
    pairs = zip(given, (unit, unit, 1.0), strict=True)
    space = Space.of(model, units.total, *(None if isinstance(v, str) else v / u for v, u in pairs))
    h, constant = space.value, units.n_rows * np.log(units.y_scale)
    factor = SpikeSlab(np.exp(h[1]), h[2], groups)
    rng, largest = check_random_state(estimator.random_state), np.iinfo(np.int32).max
    start_seeds = rng.randint(largest, size=estimator.n_init)
    how = estimator.hyperparameters
    integrates = how == "integrate" or (how == "auto" and model.X.size <= LARGEST_INTEGRATED)
    plain = integrates and estimator.algorithm == "auto" and groups is None
    integrates = integrates and bool(space.free.any())
    prior = (
        HyperPrior.of_integral(space, factor.n_indicators(d))
        if integrates
        else HyperPrior.of_mode()
    )
    settings = (estimator.algorithm, estimator.damping, estimator.max_iter, estimator.tol)
    return SpikeSlabPlan(
        units=units,
        problem=EPEnergy(model, factor, np.exp(h[0]), units.n_rows, constant),
        space=space,
        prior=prior,
        integrates=integrates,
        by_chains=plain and is_correlated(model, n_different),
        n_different=n_different,
        settings=RunSettings(*settings),
        noise_starts=list(estimator.noise_starts),
        warm=_warm(estimator, units, d, groups),
        start_seeds=start_seeds,
        evidence_seed=DEFAULT_SEED if estimator.random_state is None else rng.randint(largest),
        n_jobs=estimator.n_jobs,
        single=is_single(X),
    )


def _data(estimator, X, y, sample_weight):
    """Return (Standardisation, LinearModel, number of different rows) of checked rows.

    Of rows that are not in memory all count as different.
    """
    intercept, standardize = estimator.fit_intercept, estimator.standardize
    if isinstance(X, RowStatistics) or is_part_list(X, y):
        stats = _statistics(estimator, X, sample_weight)
        n_different = stats.n_rows
        units, model = standardise_statistics(stats, intercept, standardize)
    else:
        training = _rows(estimator, X, y, sample_weight)
        n_different = different_rows(training.X)
        # what is made dense is nobody else's
        owned = not estimator.copy_X or sp.issparse(training.X)
        owned = owned or not np.may_share_memory(training.X, X)
        units, model = standardise(training, intercept, standardize, owned)
    # columns that kept a size of their own
    limits = LARGEST_IN_UNITS, 1.0 / LARGEST_IN_UNITS
    check_column_sizes(estimator, column_sizes(model.X), *limits)
    return units, model, n_different


def _statistics(estimator, X, sample_weight):
    """Return the checked `RowStatistics` that are given, or those of partitions."""
    if isinstance(X, RowStatistics):
        _check_scale_of(np.linalg.norm(X.root[:, -1:], axis=0) / np.sqrt(X.n_rows))
        estimator.n_features_in_ = len(X.mean) - 1
        vars(estimator).pop("feature_names_in_", None)
        return X
    if sample_weight is not None:
        raise ValueError("sample_weight is for rows in memory: give repeated rows instead.")
    return statistics_of_user_parts(estimator, X, _check_scale_of)


def _rows(estimator, X, y, sample_weight):
    """Return the checked training data of rows in memory."""
    training = validate_training(
        estimator, X, y, sample_weight, ensure_min_samples=2, accept_sparse=ACCEPT_SPARSE
    )
    check_column_scales(estimator, training.X)
    _check_scale_of(training.y)
    if estimator.fit_intercept and training.weight.sum() <= 1:
        raise ValueError("sample_weight adds up to at most one row, which only fits an intercept.")
    return training


def _check_scale_of(y):
    """Raise a ValueError that names y where its squares would over- or underflow."""
    size = np.abs(y).max()
    if size > LARGEST_ENTRY or 0 < size < 1.0 / LARGEST_ENTRY:
        raise ValueError(
            f"y has a largest absolute value of {size:.3g}, whose square overflows double "
            f"precision: scale y to between {1.0 / LARGEST_ENTRY:g} and {LARGEST_ENTRY:g}."
        )


def _warn_of_damping(estimator):
    """Warn where the user sets `damping` for an algorithm that takes no damped steps."""
    default = inspect.signature(type(estimator)).parameters["damping"].default
    if estimator.algorithm in ("convergent", "double_loop") and estimator.damping != default:
        warnings.warn(
            f"damping={estimator.damping!r} has no effect on the steps of "
            f"algorithm={estimator.algorithm!r}; it is for sweeps of EP, which "
            'algorithm="auto" and "ep" take.',
            UserWarning,
            stacklevel=2,
        )


def _checked_groups(groups, d):
    """Number of the group of each feature, or None; a ValueError names the argument."""
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (d,):
        raise ValueError(f"groups must have one label for each of {d} features: {labels.shape}.")
    return np.unique(labels, return_inverse=True)[1]


def _warm(estimator, units, d, groups):
    """Hyperparameters and sites of the last fit's mode in the units of this one, or None."""
    shape = getattr(estimator, "_warm_shape", None)
    if not estimator.warm_start or shape != (d, groups is None):
        return None
    unit = units.y_scale
    h = estimator._warm_h - np.array([2 * np.log(unit), 2 * np.log(unit), 0.0])
    return h, np.stack([estimator.site_shift_ * unit, estimator.site_precision_ * unit**2])
