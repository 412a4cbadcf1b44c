"""From checked parameters and data of a user to the working problem of a spike-and-slab fit."""

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from joblib import effective_n_jobs
from sklearn.utils import check_array, check_random_state

from .._engine.gaussian import row_blocks
from .._engine.partition import PartMap
from .._engine.rows import find_copies
from .._estimator import checks, row_parts
from ._energy import EPEnergy
from ._hyperparameters import HyperPrior, Space
from ._linear_model import BLOCK_BYTES, LinearModel
from ._prior import SpikeSlab
from ._runs import RunSettings

# Least eigenvalue of products with unit diagonal, by rounding; below it they are those of no rows.
_LEAST_EIGENVALUE = -1e-8
# Without random_state the models that check the evidence are drawn by this seed: they only decide
# between starts, and equal fits are to be equal.
DEFAULT_SEED = 0
# Entries of the working rows up to which hyperparameters="auto" integrates: some 30 posteriors of
# as many columns beside X, and as many fits, are dear beyond.
LARGEST_INTEGRATED = 10_000_000


@dataclass
class Standardisation:
    """A regression in working units: columns of unit scale, y of unit variance.

    A working column is (x - offset) / scale, and y likewise. `total` is the total weight, the
    number of rows with repetition; `n_rows` in the likelihood are one less with an intercept, which
    has a flat prior.
    """

    offset: np.ndarray
    scale: np.ndarray
    y_offset: float
    y_scale: float
    total: float
    n_rows: float
    fit_intercept: bool

    def rows(self, X):
        """Bring new rows to working units."""
        return (X - self.offset) / self.scale

    def to_coef(self, w):
        """Bring working coefficients (..., d) to the units of the user."""
        return w * (self.y_scale / self.scale)

    def response(self, signal):
        """Bring working responses, offset left out, to the units of the user."""
        return self.y_offset + self.y_scale * signal

    def intercept(self, coef):
        """Return the intercept (...) that belongs to coefficients (..., d) of the user."""
        return self.y_offset - coef @ self.offset

    def with_intercept(self, coef, noise, rng):
        """Return draws of coefficients (S, d) of the user, an intercept drawn last if there is one.

        `noise` is its variance in the units of the user, (S,) or one for all draws.
        """
        if not self.fit_intercept:
            return coef
        sd = np.sqrt(self.intercept_variance(noise))
        return np.column_stack([coef, self.intercept(coef) + sd * rng.standard_normal(len(coef))])

    def intercept_variance(self, noise):
        """Variance of the mean of y given the coefficients, for noise in the user's units."""
        return noise / self.total if self.fit_intercept else 0.0


def dense_rows(X):
    """Return rows as a dense array: a sparse matrix has no zeros left once it is centred."""
    return X.toarray(order="C") if sp.issparse(X) else X


def dense_blocks(X, most=BLOCK_BYTES):
    """Yield the rows as dense arrays, about BLOCK_BYTES and at most so many rows at a time."""
    for rows in row_blocks(X.shape[0], max(8 * X.shape[1], BLOCK_BYTES // most), BLOCK_BYTES):
        yield dense_rows(X[rows])


@dataclass
class SpikeSlabPlan:
    """Everything a fit needs.

    `problem` has the data in working units, at the hyperparameters that are given or where learning
    starts; `space` says which are free, `prior` what is known of those, and `integrates` whether
    they are averaged over; `by_chains` says that models are to be drawn, as columns are correlated.
    The number `n_different` of rows tells what correlation there is by chance. `settings` say
    how runs go. `warm` are hyperparameters and sites of the last fit, or None.
    There is one of `start_seeds` for each start at the final hyperparameters; `evidence_seed` draws
    models, single ones that check the evidence or those of chains.
    """

    units: Standardisation
    problem: EPEnergy
    space: Space
    prior: HyperPrior
    integrates: bool
    by_chains: bool
    n_different: int
    settings: RunSettings
    warm: Any
    start_seeds: np.ndarray
    evidence_seed: int


def check_parameters(estimator):
    """Raise an error that names the parameter unless all of them are usable."""
    checks.check_common(estimator)
    checks.check_hyperparameters(estimator.hyperparameters)
    algorithms = ["auto", "ep", "sequential", "convergent", "double_loop"]
    checks.check_choice("algorithm", estimator.algorithm, algorithms)
    checks.check_number("n_init", estimator.n_init, 1, integer=True)
    for name, high in (("noise_variance", None), ("slab_variance", None), ("prior_inclusion", 1)):
        checks.check_number_or_auto(name, getattr(estimator, name), 0, high)
    starts = estimator.noise_starts
    checks.check_sequence("noise_starts", starts, "a sequence of numbers between 0 and 1")
    if len(starts) == 0:
        raise ValueError("noise_starts must have an entry.")
    for fraction in starts:
        checks.check_number("noise_starts", fraction, 0, 1, boundaries="neither")


def make_plan(estimator, X, y, sample_weight, groups):
    """Check parameters and data of a fit and return its `SpikeSlabPlan`."""
    check_parameters(estimator)
    units, model, n_different = _data(estimator, X, y, sample_weight)
    d = estimator.n_features_in_
    groups = checks.group_numbers("groups", groups, d)
    if groups is not None and estimator.algorithm == "sequential":
        raise ValueError('algorithm="sequential" changes one column at a time: leave out groups.')
    _warn_of_sweeps(estimator)
    given = estimator.noise_variance, estimator.slab_variance, estimator.prior_inclusion
    space = Space.of(model, units.total, *given, units.y_scale**2)
    h, constant = space.value, units.n_rows * np.log(units.y_scale)
    factor = SpikeSlab(np.exp(h[1]), h[2], groups)
    rng, largest = check_random_state(estimator.random_state), np.iinfo(np.int32).max
    start_seeds = rng.randint(largest, size=estimator.n_init)
    how = estimator.hyperparameters
    integrates = how == "integrate" or (how == "auto" and model.X.size <= LARGEST_INTEGRATED)
    plain = integrates and estimator.algorithm == "auto" and groups is None
    integrates = integrates and bool(space.free.any())
    prior = HyperPrior.of_integral(space, factor.n_indicators(d)) if integrates else HyperPrior()
    settings = RunSettings(*(getattr(estimator, name) for name in RunSettings._fields))
    return SpikeSlabPlan(
        units=units,
        problem=EPEnergy(model, factor, np.exp(h[0]), units.n_rows, constant),
        space=space,
        prior=prior,
        integrates=integrates,
        by_chains=plain and model.is_correlated(n_different),
        n_different=n_different,
        settings=settings._replace(n_jobs=effective_n_jobs(estimator.n_jobs)),
        warm=_warm(estimator, units, d, groups),
        start_seeds=start_seeds,
        evidence_seed=DEFAULT_SEED if estimator.random_state is None else rng.randint(largest),
    )


def _data(estimator, X, y, sample_weight):
    """Return (Standardisation, LinearModel, number of different rows) of checked rows.

    Of rows that are not in memory all count as different.
    """
    intercept, plain = estimator.fit_intercept, None
    if isinstance(X, row_parts.RowStatistics):
        _check_scale_of(np.linalg.norm(X.root[:, -1:], axis=0) / np.sqrt(X.n_rows))
        estimator.n_features_in_ = len(X.mean) - 1
        vars(estimator).pop("feature_names_in_", None)
        stats, n_different = X, X.n_rows
    elif checks.is_unweighted_part_list(X, y, sample_weight):
        stats = _statistics_of_user_parts(estimator, X)
        n_different = stats.n_rows
    else:
        training = checked_rows(estimator, X, y, sample_weight)
        _check_scale_of(training.y)
        if intercept and training.weight.sum() <= 1:
            raise ValueError(
                "sample_weight adds up to at most one row, which only fits an intercept."
            )
        rows = training.X
        n_different = len(find_copies(rows, training.weight).first)
        stats = row_parts.statistics_of_rows(rows, training.y, training.weight)
        if not intercept and not (sp.issparse(rows) and rows.shape[0] > 2 * rows.shape[1]):
            # taking means off and back costs digits
            plain = np.column_stack([dense_rows(rows), training.y])
            plain *= np.sqrt(training.weight)[:, None]
    units, model = _standardised(stats, intercept, estimator.standardize, plain)
    check_working_columns(estimator, model.X)
    return units, model, n_different


def check_working_columns(estimator, X):
    """Raise a ValueError where columns X (n, d) kept a size of their own that is out of range."""
    limits = checks.LARGEST_IN_UNITS, 1.0 / checks.LARGEST_IN_UNITS
    checks.check_column_sizes(estimator, checks.ColumnRanges.of_rows(X).sizes, *limits)


def _statistics_of_user_parts(estimator, parts):
    """Return the `RowStatistics` of a user's partitions, in part order."""
    with PartMap(parts, estimator.n_jobs, prefer="threads") as run:
        facts = run(row_parts.facts_of_part, range(len(run.parts)), False)
        row_parts.check_facts(estimator, facts)
        _check_scale_of(np.concatenate([f.labels for f in facts]))
        n = sum(f.n_rows for f in facts)
        if n < 2:
            raise ValueError(
                f"all partitions together have n_samples={n}, a minimum of 2 is needed."
            )
        return row_parts.statistics_of_parts(run, facts)


def checked_rows(estimator, X, y, sample_weight):
    """Return the checked training data of rows in memory, of either estimator."""
    training = checks.validate_training(
        estimator, X, y, sample_weight, ensure_min_samples=2, accept_sparse=estimator._accept_sparse
    )
    checks.check_column_scales(estimator, training.X)
    if not estimator.standardize:
        checks.warn_of_spreads(estimator, training.X)
    return training


def _check_scale_of(y):
    """Raise a ValueError that names y where its squares would over- or underflow."""
    size, largest = np.abs(y).max(), checks.LARGEST_ENTRY
    if size > largest or 0 < size < 1.0 / largest:
        raise ValueError(
            f"y has a largest absolute value of {size:.3g}, whose square overflows double "
            f"precision: scale y to between {1.0 / largest:g} and {largest:g}."
        )


def _warn_of_sweeps(estimator):
    """Warn where the user sets what only sweeps of EP look at for an algorithm without them."""
    default = inspect.signature(type(estimator)).parameters["damping"].default
    if estimator.algorithm in ("convergent", "double_loop") and estimator.damping != default:
        warnings.warn(
            f"damping={estimator.damping!r} has no effect on the steps of "
            f"algorithm={estimator.algorithm!r}; it is for sweeps of EP, which "
            'algorithm="auto", "ep" and "sequential" take.',
            UserWarning,
            stacklevel=2,
        )


def _warm(estimator, units, d, groups):
    """Hyperparameters and sites of the last fit's mode in the units of this one, or None."""
    shape = getattr(estimator, "_warm_shape", None)
    if not estimator.warm_start or shape != (d, groups is None):
        return None
    unit = units.y_scale
    h = estimator._warm_h - np.array([2 * np.log(unit), 2 * np.log(unit), 0.0])
    return h, np.stack([estimator.site_shift_ * unit, estimator.site_precision_ * unit**2])


def _standardised(stats, fit_intercept, standardize, plain=None):
    """Return (Standardisation, LinearModel) of rows, of which these are the statistics.

    Without an intercept `plain` rows [X y], if they are known, take the place of the statistics.
    """
    total, mean, root = stats.weight, stats.mean, stats.root
    rounding = 10 * np.finfo(float).eps * np.sqrt(stats.n_rows)
    sd = np.sqrt(np.einsum("ij,ij->j", root[:, :-1], root[:, :-1]) / total)
    sd[sd <= rounding * np.abs(mean[:-1])] = 0.0
    if fit_intercept:
        root[:, :-1][:, sd == 0] = 0.0
    else:
        root = stats.about_zero() if plain is None else plain
        mean = np.zeros_like(mean)
    scale = np.where(sd > 0, sd, 1.0) if standardize else np.ones(len(sd))
    y_scale = float(np.linalg.norm(root[:, -1]) / np.sqrt(total))
    if y_scale <= rounding * abs(mean[-1]):
        y_scale, root[:, -1] = 1.0, 0.0
    root[:, :-1] /= scale
    root[:, -1] /= y_scale
    rows, y_mean = total - 1 if fit_intercept else total, float(mean[-1])
    units = Standardisation(mean[:-1], scale, y_mean, y_scale, total, rows, fit_intercept)
    return units, LinearModel(root[:, :-1], root[:, -1])


def statistics_of_products(XtX, Xty, yty, n_samples, X_mean=None, y_mean=0.0):
    """Return the `RowStatistics` of rows of which sums of products and means are known.

    A ValueError names what cannot be that of any rows.
    """
    checks.check_number("n_samples", n_samples, 2, integer=True)
    XtX = check_array(XtX, dtype=np.float64, input_name="XtX")
    d = XtX.shape[1]
    known = {"Xty": (Xty, (d,)), "yty": (yty, ()), "y_mean": (y_mean, ())}
    known["X_mean"] = (np.zeros(d) if X_mean is None else X_mean), (d,)
    for name, (value, shape) in known.items():
        if np.shape(value) != shape or not np.all(np.isfinite(value)):
            raise ValueError(f"{name} must be finite and of shape {shape}, got {np.shape(value)}.")
    size = np.sqrt(np.abs(np.diagonal(XtX)))
    if len(XtX) != d or np.any(np.abs(XtX - XtX.T) > 1e-8 * np.outer(size, size)):
        raise ValueError("XtX must be a symmetric matrix.")
    products = np.block([[XtX, np.reshape(Xty, (d, 1))], [np.reshape(Xty, (1, d)), yty]])
    mean = np.append(known["X_mean"][0], y_mean).astype(float)
    scatter = products - n_samples * np.outer(mean, mean)
    values, directions = row_parts.axes_of(scatter)
    if values[0] < _LEAST_EIGENVALUE or np.any(np.diagonal(scatter) < 0):
        raise ValueError("XtX, Xty, yty and the means of no rows: not positive semidefinite.")
    held = values > 10 * len(values) * np.finfo(float).eps
    root = np.sqrt(values[held])[:, None] * directions[held]
    return row_parts.RowStatistics(int(n_samples), float(n_samples), mean, root)
