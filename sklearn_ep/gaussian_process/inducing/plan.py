"""From the parameters of an estimator and its data to plans of fits through inducing points."""

from dataclasses import replace

import numpy as np

from ..._engine.loop import SILENT
from ..._engine.rules import rule_of_power
from ..._estimator.checks import Training
from ..._estimator.row_parts import set_columns
from .._base import (
    check_input_gradient,
    check_kernel,
    column_spread,
    draw_seed,
)
from .._dense import fit_dense, plan_dense
from .._hyperparameters import kernel_prior, kernel_settings, random_starts, wants_average
from .._kernels import column_lengths, has_input_gradient, with_own_lengths, with_theta
from .._limits import LIMITS
from .fit import InducingPlan, InducingRun
from .learning import STEP_RULES, distinct_rows
from .rows import PartitionedRows, describe, first_points, inducing_count, n_candidate_rows
from .stream import StreamPlan, start_stream


def _optimizer(estimator, factor):
    """Return the optimizer in use; only log-concave factors stay proper between passes."""
    if estimator.optimizer == "auto":
        return "adam" if factor.log_concave else "fmin_l_bfgs_b"
    if estimator.optimizer in STEP_RULES and not factor.log_concave:
        raise ValueError(
            f"optimizer={estimator.optimizer!r} needs a log-concave likelihood; "
            "use 'fmin_l_bfgs_b'."
        )
    return estimator.optimizer


def begins_with_some_rows(estimator, n_rows):
    """Return whether the default kernel of so many rows is first learned with some of them."""
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    binary = len(estimator.classes_) == 2 and estimator.multi_class != "joint"
    by_passes = estimator.batch_size is None and estimator.site_memory == "scalars"
    by_steps = estimator.optimizer in STEP_RULES or estimator.optimizer == "auto"
    wanted = default and binary and by_passes and by_steps and n_rows > LIMITS.averaged
    return wanted and estimator._factor().log_concave


def kernel_of_some_rows(estimator, run, data, monitor):
    """Return the kernel that weighs most in an average over some of the rows.

    None where these are of one class, or where it is not wanted.
    """
    wanted = begins_with_some_rows(estimator, sum(data.sizes))
    if not wanted or estimator._last_fit is not None:
        return None
    X, y, weight = distinct_rows(run, data, LIMITS.first_rows, 0)
    if len(np.unique(y)) < 2:
        return None
    with monitor.phase("some rows first") as told:
        training = Training(X, y, weight, np.ones(len(y), dtype=bool))
        plan = replace(plan_dense(estimator, training, False, False), n_jobs=None)
        fit = fit_dense(plan, np.where(y == 1, 1.0, -1.0), SILENT, 0)
        told({"log_evidence": fit.log_evidence})
    own = fit.attributes
    if "average" not in own:
        return own["kernel"]
    return with_theta(plan.kernel, own["theta"][np.argmax(own["average"].weight)])


def _has_own_lengths(estimator, data, optimizer, begins):
    """Return whether the default kernel gets a length for each column, as in dense fits."""
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    learned = optimizer in STEP_RULES and data.weight > LIMITS.dense
    return (begins or (default and learned)) and 1 < len(data.var) <= LIMITS.lengths


def _moves_inducing(estimator, kernel, many):
    if estimator.optimizer is None:
        return False
    if estimator.learn_inducing == "auto":
        return many and has_input_gradient(kernel)
    if estimator.learn_inducing:
        check_input_gradient(kernel)
    return bool(estimator.learn_inducing)


def described(estimator, run, kept, seed):
    """Return the `PartitionedRows` of an open map and the rows that they keep of the caller's.

    `kept` is None for partitions of the user, from which labels and columns are learned.
    """
    data = describe(run, kept is None, seed, n_candidate_rows(estimator.inducing_points))
    if kept is not None:
        return data, kept
    if len(data.labels) < 2:
        raise ValueError(f"y has only one class, {data.labels[0]!r}; a classifier needs two.")
    estimator.classes_ = data.labels
    set_columns(estimator, [(len(data.var), data.names)])
    return data, np.ones(sum(data.sizes), dtype=bool)


def check_part_list(estimator, sample_weight):
    """Raise a ValueError where parameters do not go with a list of partitions."""
    if sample_weight is not None:
        raise ValueError("sample_weight must be None for a list of partitions.")
    if estimator.method == "dense":
        raise ValueError("method='dense' does not take a list of partitions as X.")
    if estimator.class_weight is not None:
        raise ValueError("class_weight must be None for a list of partitions.")


def plan_inducing(estimator, data: PartitionedRows, factor, seed, known=None):
    """Return the `InducingPlan` for rows in partitions, from the last fit where that is wanted.

    `known` is the kernel of some of the rows, None where it is not known.
    """
    begun, n_rows = known is not None, sum(data.sizes)
    begins = begins_with_some_rows(estimator, n_rows)
    kernel = known if begun else estimator._initial_kernel(float(data.var.sum()))
    lengths = column_lengths(kernel, len(data.var))
    m = inducing_count(estimator, n_rows if begins else None)
    Z = first_points(estimator, data.candidates, data.candidate_weight, seed, lengths, m=m)
    check_kernel(kernel, kernel(Z, Z))
    optimizer = _optimizer(estimator, factor)
    own_lengths = _has_own_lengths(estimator, data, optimizer, begins)
    if own_lengths and not begun:
        kernel = with_own_lengths(kernel, len(data.var))
    n_restarts = estimator.n_restarts_optimizer if optimizer == "fmin_l_bfgs_b" else 0
    plan = InducingPlan(
        data=data,
        kernel=kernel,
        begun=begun,
        inducing_points=Z,
        factor=factor,
        rule=rule_of_power(estimator.power),
        n_problems=estimator._n_problems,
        optimizer=optimizer,
        learn_inducing=_moves_inducing(estimator, kernel, begins or data.weight >= LIMITS.dense),
        restarts=random_starts(kernel.bounds, n_restarts, np.random.RandomState(seed)),
        sites=None,
        batch_size=estimator.batch_size,
        learning_rate=estimator.learning_rate,
        averaged=estimator.site_memory == "average",
        flat=estimator.hyperparameters == "mode"
        or (data.weight > LIMITS.prior_of_lengths and not own_lengths),
        averaging=_averaging(estimator, kernel, data, factor),
        damping=estimator.damping,
        accelerate=estimator.acceleration is not None,
        max_iter=estimator.max_iter,
        max_sweeps=estimator.max_sweeps,
        tol=estimator.tol,
        jitter=estimator.jitter,
        seed=seed,
    )
    _start_from(plan, estimator._last_fit, estimator.inducing_points is None)
    return plan


def _averaging(estimator, kernel, data, factor):
    """Return the `NormalPrior` of an average over variance and length, None for the mode."""
    checks = {
        "site_memory='average'": estimator.site_memory == "average",
        "optimizer=None": estimator.optimizer is None,
        **kernel_settings(kernel),
    }
    excluding = [setting for setting, excludes in checks.items() if excludes]
    if not wants_average(estimator, sum(data.sizes), excluding, sharp=True):
        return None
    return kernel_prior(kernel, factor, float(np.sqrt(data.var.sum())) or 1.0)


def _start_from(plan, last, move_points):
    """Let a plan start from the last `GPFit` where that had the same shape."""
    if last is None or last.sites is None or plan.averaged:
        return
    if not isinstance(last.runs[0], InducingRun) or last.kernel.n_dims != plan.kernel.n_dims:
        return
    if last.sites.shape != (plan.n_problems, 2, sum(plan.data.sizes)):
        return
    plan.sites, plan.kernel = last.sites, plan.kernel.clone_with_theta(last.kernel.theta)
    if last.inducing_points.shape == plan.inducing_points.shape and move_points:
        plan.inducing_points = last.inducing_points


def plan_stream(estimator, factor):
    """Return the `StreamPlan` of the next call."""
    if estimator._needs_all_rows:
        raise ValueError(
            "partial_fit goes through inducing points, which need rows of numbers and an optimizer "
            "that takes steps: give a kernel of vectors, and optimizer='auto' or None."
        )
    optimizer = _optimizer(estimator, factor)
    if optimizer == "fmin_l_bfgs_b":
        optimizer = "adam"
    return StreamPlan(
        factor=factor,
        rule=rule_of_power(estimator.power),
        step_rule=None if optimizer is None else STEP_RULES[optimizer],
        learning_rate=estimator.learning_rate,
        batch_size=estimator.batch_size,
        n_inducing=inducing_count(estimator) if estimator.inducing_points is None else 0,
        jitter=estimator.jitter,
        solver=dict(
            tol=estimator.tol,
            max_iter=min(estimator.max_sweeps, estimator.max_iter),
            damping=estimator.damping,
            accelerate=estimator.acceleration is not None,
        ),
    )


def new_stream(estimator, X, weight):
    """Return the stream before any row, with kernel and inducing points after its first rows."""
    kernel = estimator._initial_kernel(float(np.sum(column_spread(X, weight) ** 2)))
    seed = draw_seed(estimator.random_state)
    lengths = column_lengths(kernel, X.shape[1])
    Z = first_points(estimator, X, weight, seed, lengths, told=False)
    check_kernel(kernel, kernel(Z, Z))
    return start_stream(kernel, Z, estimator.jitter, estimator._n_problems, seed)
