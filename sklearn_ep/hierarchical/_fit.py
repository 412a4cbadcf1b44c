"""The fit of a plan by the engine it names, watched by the estimator's callbacks."""

from functools import partial

from .._estimator.fitting import FitMonitor, fit_each_problem, fit_one_versus_rest
from ._prediction import GroupsForgotten
from .classes.fit import fit_classes
from .exact.fit import fit_exact
from .messages.fit import fit_by_messages
from .partitions.fit import fit_parts

__all__ = ["fit_plan"]


def fit_plan(estimator, plan, run, data, previous=None, checkpoint=None):
    """Return the `BinaryFit` of each problem of a plan.

    run is the `PartMap` over raw parts, None for rows in memory; data are X and y as the caller
    gave them, for callbacks; previous is the state of an earlier fit to go on from; checkpoint the
    file for the state after each iteration. Of the estimator, which has `classes_`, nothing is
    changed.
    """
    classes = estimator.classes_
    several = len(classes) > 2
    if several and not plan.joint and checkpoint is not None:
        raise ValueError("checkpoint needs two classes; y has more.")
    known = {"_columns": plan.columns, "_levels": plan.levels, "_forgotten": GroupsForgotten()}
    X, y = data
    most = len(classes) if several and not plan.joint else plan.max_iter
    monitor = FitMonitor(
        estimator, X, y, most, lambda posterior: {"_posteriors": [posterior()], **known}
    )
    jobs = None if several else estimator.n_jobs
    if plan.joint:
        fits = [fit_classes(plan, monitor, previous, checkpoint)]
    elif run is None:
        fit = partial(_fit_signs, plan, previous, checkpoint, jobs)
        fits = fit_one_versus_rest(fit, plan.y, len(classes), estimator.n_jobs, monitor)
    else:
        fit = partial(_fit_raw, plan, previous, checkpoint, run, classes)
        fits = fit_each_problem(fit, len(classes) if several else 1, monitor)
    if len(fits) == 1:
        fits = [monitor.completed_fit(fits[0], **known)]
    monitor.finish()
    return fits


def _fit_signs(plan, previous, checkpoint, n_jobs, sign, monitor, k):
    """Return the `BinaryFit` of rows in memory with labels in {-1, +1}, problem k."""
    if plan.engine == "messages":
        return fit_by_messages(plan, sign, monitor, previous, None, checkpoint)
    if plan.exact:
        return fit_exact(plan, sign, monitor, previous, checkpoint)
    return fit_parts(plan, sign, monitor, previous, checkpoint, None, None, k, n_jobs)


def _fit_raw(plan, previous, checkpoint, run, classes, monitor, k):
    """Return the `BinaryFit` of raw parts, problem k."""
    if plan.engine == "messages":
        return fit_by_messages(plan, None, monitor, previous, run, checkpoint)
    positive = classes[1] if len(classes) == 2 else classes[k]
    return fit_parts(plan, None, monitor, previous, checkpoint, run, positive, k, None)
