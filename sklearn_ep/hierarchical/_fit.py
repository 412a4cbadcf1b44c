"""From a plan to fits: the engine of each problem, and the attributes that they leave."""

from functools import partial

import numpy as np
from sklearn.utils import Bunch

from .._estimator import fitting
from .._estimator.checks import count_problems
from . import _plan, _scales
from ._exact import fit_exact
from ._factors import split_intercept
from ._parts import load_checkpoint, save_checkpoint, state_of
from ._posterior import moments_by_class
from .messages.fit import fit_by_messages
from .partitions.fit import fit_in_memory, fit_parts
from .partitions.trust import fit_adaptively

_LEVELS = 0.05, 0.5, 0.95  # of the medians and the intervals of tau


def fit_plan(estimator, plan, run, data, previous=None, checkpoint=None):
    """Return the `BinaryFit` of each problem of a plan.

    run is the `PartMap` over raw parts, None for rows in memory; data are X and y as the caller
    gave them, for callbacks; previous is the state of an earlier fit to go on from; checkpoint the
    file for the state after each iteration. Of the estimator, which has `classes_`, nothing is
    changed.
    """
    classes, save = estimator.classes_, None
    n_problems = count_problems(estimator, plan.joint)
    if checkpoint is not None:
        if n_problems > 1:
            raise ValueError("checkpoint needs two classes; y has more.")
        saved = load_checkpoint(checkpoint, plan.fingerprint)
        previous = previous if saved is None else saved
        save = partial(save_checkpoint, checkpoint, plan.fingerprint)
    fit = partial(_fit_problem, run, save, previous, classes[-n_problems:])
    most = plan.settings.max_iter
    return fitting.fit_problems(estimator, plan, fit, plan.y, most, data, plan.joint)


def _fit_problem(run, save, previous, positives, plan, sign, monitor, k):
    """Return the `BinaryFit` of problem k, whose label +1 is positives[k].

    run is as in `fit_plan`; sign are the labels in {-1, +1} of rows in memory, or the class indices
    where classes are fitted jointly.
    """
    if plan.engine == "messages":
        return fit_by_messages(plan, sign, run, monitor, previous, save)
    if plan.parts is None:
        return fit_exact(plan, sign, monitor, previous, save)
    mine = previous if len(positives) == 1 else None
    if run is not None:
        reader = plan.parts.reader._replace(positive=positives[k])
        plan = plan._replace(parts=plan.parts._replace(reader=reader))
        return fit_parts(plan, run, monitor, mine, save)
    if len(positives) > 1:  # the problems are shared out, not their parts
        plan = plan._replace(settings=Bunch(**plan.settings | {"n_jobs": None}))
    adaptive = plan.settings.n_partitions == "adaptive"
    fit_one = fit_adaptively if adaptive else fit_in_memory
    return fit_one(plan, sign, monitor, mine, save)


def store_fit(estimator, plan, fits):
    """Set the attributes of a fit, lists over factors if a list of them was given."""
    posteriors, columns = [f.posterior for f in fits], plan.columns
    beta = moments_by_class(posteriors)
    coef, intercept = split_intercept(np.stack([m.mean for m in beta]), columns)
    sd = np.stack([np.sqrt(np.diagonal(m.cov)) for m in beta])
    out = fitting.run_attributes(fits) | dict(coef_=coef, intercept_=intercept)
    cov = fitting.one_or_stack([m.cov for m in beta])
    out |= dict(coef_std_=split_intercept(sd, columns)[0], coef_cov_=cov)
    out |= _of_scales(columns, posteriors, fits[0].attributes["theta_rule"])
    effects = plan.levels, *posteriors[0].group_effects()
    none = np.empty(0), np.empty((0, 0)), np.empty((0, 0))
    names = "group_labels_", "group_effects_", "group_effects_std_"
    for name, values, empty in zip(names, effects, none, strict=True):
        out[name] = list(values) if columns.listed else (*values, empty)[0]
    out |= _of_sites(plan, fits)
    remarks = [r for f in fits for r in f.attributes.get("remarks", ())]
    out["_remarks"] = (*_plan.remarks_on_plan(plan, out["tau_"]), *remarks)
    fitting.replace_fitted(estimator, out | {"engine_": plan.engine, "_posteriors": posteriors})


def _of_scales(columns, posteriors, rule):
    quantiles = _scales.quantiles(posteriors[0].average, posteriors[0].n_effects, _LEVELS)
    used = "mode" if rule in ("mode", "none") else "integrate"
    nodes = [p.average.phi for p in posteriors]
    weights = [p.average.weight for p in posteriors]
    pairs = enumerate(columns.factors)
    numbered = [(f"_{f}", n) for f, c in pairs for n in _scales.names(1 + len(c.slopes))]
    names = [n + (f if columns.listed else "") for f, n in numbered]
    out = fitting.hyper_attributes(nodes, weights, names, used)
    return out | {"theta_rule_": rule, "tau_": quantiles[1], "tau_interval_": quantiles[[0, 2]].T}


def _of_sites(plan, fits):
    """Return the attributes of sites: those of parts where the model has at most one factor."""
    own = [f.attributes for f in fits]
    sites, counts = (own[0].get(name, ()) for name in ("sites", "counts"))
    out = {name: fitting.one_or_stack([a["sites"][name] for a in own]) for name in sites}
    out |= {name: sum(a["counts"][name] for a in own) for name in counts}
    if "state" not in own[0]:
        plan = plan._replace(parts=own[0].get("parts", plan.parts))
        state = state_of(plan, out["site_precision_"], out["site_shift_"])
        return out | {"partition_": plan.parts.site, "_state": state}
    if sites:  # all rows are one
        out["partition_"] = np.zeros(len(plan.levels[0]), dtype=int)
    return out | {"_state": own[0]["state"]}
