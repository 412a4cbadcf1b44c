"""The fit of a plan by the engine it names, and the public attributes that it becomes."""

import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np

from .._estimator.averaged import hyper_attributes
from .._estimator.fitting import (
    FitMonitor,
    fit_each_problem,
    fit_one_versus_rest,
    one_or_stack,
    run_attributes,
)
from . import _log_cholesky as log_cholesky
from ._checkpoint import state_of
from ._factors import split_intercept
from ._plan import remarks_on_plan
from ._posterior import moments_by_class
from .classes.fit import fit_classes
from .exact.fit import fit_exact
from .messages.fit import fit_by_messages
from .partitions.fit import fit_parts
from .partitions.messages import Messages, posterior_moments

__all__ = [
    "attributes_of",
    "fit_plan",
]


class GroupsForgotten:
    """Says once a fit that rows to predict came without the groups that the fit had beside X.

    Having said so is no part of what was learned: a pickle of the estimator does not know it.
    """

    def __init__(self):
        self.told = False

    def __reduce__(self):
        return type(self), ()

    def warn(self, est):
        """Warn at the first call."""
        if self.told:
            return
        self.told = True
        warnings.warn(
            f"{type(est).__name__} was fitted with groups beside X and predicts without: every row "
            "is taken as one of a new group. Give groups=..., or make them a column of X named by "
            "group_column; if new groups are meant, kind='population', or None as the label of "
            "every row, says so.",
            UserWarning,
            stacklevel=4,
        )


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
    most = len(classes) if several and not plan.joint else plan.settings.max_iter
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


_LEVELS = 0.05, 0.5, 0.95  # of the medians and the intervals of tau


def attributes_of(plan, fits):
    """Return the attributes of a fit, lists over factors if a list of them was given."""
    posteriors, columns = [f.posterior for f in fits], plan.columns
    out = _of_coefficients(columns, posteriors) | run_attributes(fits)
    out |= _of_scales(columns, posteriors, fits[0].attributes["theta_rule"])
    effects = plan.levels, *posteriors[0].group_effects()
    none = np.empty(0), np.empty((0, 0)), np.empty((0, 0))
    names = "group_labels_", "group_effects_", "group_effects_std_"
    for name, values, empty in zip(names, effects, none, strict=True):
        out[name] = list(values) if columns.listed else (*values, empty)[0]
    out |= _of_sites(plan, fits)
    remarks = [r for f in fits for r in f.attributes.get("remarks", ())]
    out["_remarks"] = (*remarks_on_plan(plan, out["tau_"]), *remarks)
    out |= {"engine_": plan.engine, "_levels": plan.levels, "_level_rows": plan.sizes}
    out |= {"_n_rows": plan.n_rows, "_forgotten": GroupsForgotten(), "_columns": columns}
    return out | {"_posteriors": posteriors}


def _of_coefficients(columns, posteriors):
    beta = moments_by_class(posteriors)
    mean = np.stack([m.mean for m in beta])
    sd = np.stack([np.sqrt(np.diagonal(m.cov)) for m in beta])
    coef, intercept = split_intercept(mean, columns)
    out = {"coef_": coef, "intercept_": intercept, "coef_std_": split_intercept(sd, columns)[0]}
    return out | {"coef_cov_": one_or_stack([m.cov for m in beta])}


def _of_scales(columns, posteriors, rule):
    quantiles = np.empty((3, 0))
    if columns.has_groups:
        quantiles = posteriors[0].scale_quantiles(_LEVELS)
    nodes = [SimpleNamespace(phi=p.theta, weight=p.weight) for p in posteriors]
    used = "mode" if rule in ("mode", "none") else "integrate"
    out = hyper_attributes(nodes, _names_of_theta(columns), used) | {"theta_rule_": rule}
    return out | {"tau_": quantiles[1], "tau_interval_": quantiles[[0, 2]].T}


def _names_of_theta(columns):
    """Return the names of the coordinates of theta, numbered by factor where there are several."""
    pairs = enumerate(columns.factors)
    names = [(f"_{f}", n) for f, c in pairs for n in log_cholesky.names(1 + len(c.slopes))]
    return tuple(n + (f if columns.listed else "") for f, n in names)


def _of_sites(plan, fits):
    """Return the attributes of sites: those of parts where the model has at most one factor."""
    if plan.placement is None:
        return {"_state": fits[0].attributes["state"]}
    messages, priors = ([f.attributes[name] for f in fits] for name in ("messages", "prior"))
    phi = [posterior_moments(*pair) for pair in zip(priors, messages, strict=True)]
    out = {
        "site_precision_": one_or_stack([m.precision for m in messages]),
        "site_shift_": one_or_stack([m.shift for m in messages]),
        "phi_mean_": one_or_stack([m.mean for m in phi]),
        "phi_cov_": one_or_stack([m.cov for m in phi]),
        "partition_": plan.placement.site,
        "n_skipped_": sum(f.attributes["n_skipped"] for f in fits),
        "n_cut_steps_": sum(f.attributes["n_cut"] for f in fits),
    }
    found = Messages(out["site_precision_"], out["site_shift_"])
    labels = plan.levels[0] if plan.levels else np.empty(0)
    return out | {"_state": state_of(found, priors[0], plan.placement.site, labels)}
