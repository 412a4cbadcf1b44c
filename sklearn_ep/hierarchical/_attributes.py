"""What a fit becomes: the public attributes of the estimator, and what its methods need."""

from types import SimpleNamespace

import numpy as np

from .._estimator.averaged import hyper_attributes
from .._estimator.fitting import one_or_stack, run_attributes
from . import _log_cholesky as log_cholesky
from ._checkpoint import state_of
from ._factor_plan import remarks_on_factors
from ._factors import FactorColumns
from ._plan import remarks_on_groups
from ._prediction import GroupsForgotten, split_intercept
from .partitions.fit import theta_rule
from .partitions.messages import Messages, posterior_moments

__all__ = ["attributes_of_factors", "attributes_of_groups"]

_LEVELS = 0.05, 0.5, 0.95  # of the medians and the intervals of tau


def _common(columns, posteriors, rule):
    """Return the attributes that every fit has."""
    beta = [p.beta_moments() for p in posteriors]
    sd = np.stack([np.sqrt(np.diagonal(m.cov)) for m in beta])
    out = {"coef_std_": split_intercept(sd, columns)[0]}
    mean = np.stack([m.mean for m in beta])
    out["coef_"], out["intercept_"] = split_intercept(mean, columns)
    out["coef_cov_"] = one_or_stack([m.cov for m in beta])
    quantiles = np.empty((3, 0))
    if columns.has_groups:
        quantiles = posteriors[0].scale_quantiles(_LEVELS)
    out["tau_"], out["tau_interval_"] = quantiles[1], quantiles[[0, 2]].T
    nodes = [SimpleNamespace(phi=p.theta, weight=p.weight) for p in posteriors]
    used = "mode" if rule in ("mode", "none") else "integrate"
    out |= hyper_attributes(nodes, _names_of_theta(columns), used) | {"theta_rule_": rule}
    return out | {"_forgotten": GroupsForgotten(), "_columns": columns, "_posteriors": posteriors}


def _names_of_theta(columns):
    """Return the names of the coordinates of theta, numbered by factor where there are several."""
    if not columns.has_groups:
        return ()
    if not isinstance(columns, FactorColumns):
        return log_cholesky.names(1 + len(columns.slopes))
    pairs = enumerate(columns.factors)
    names = [(f"_{f}", n) for f, c in pairs for n in log_cholesky.names(1 + len(c.slopes))]
    return tuple(n + (f if columns.listed else "") for f, n in names)


def attributes_of_groups(plan, fits):
    """Return the attributes of a fit with one factor, or without any."""
    messages, priors = ([f.attributes[name] for f in fits] for name in ("messages", "prior"))
    phi = [posterior_moments(*pair) for pair in zip(priors, messages, strict=True)]
    rule = theta_rule(plan.problem, plan.settings)
    out = _common(plan.columns, [f.posterior for f in fits], rule) | run_attributes(fits)
    out["site_precision_"] = one_or_stack([m.precision for m in messages])
    out["site_shift_"] = one_or_stack([m.shift for m in messages])
    out["phi_mean_"] = one_or_stack([m.mean for m in phi])
    out["phi_cov_"] = one_or_stack([m.cov for m in phi])
    out["group_labels_"], out["partition_"] = plan.labels, plan.site
    out["group_effects_"], out["group_effects_std_"] = fits[0].posterior.group_effects()
    out["engine_"] = plan.settings.engine
    out["n_skipped_"] = sum(f.attributes["n_skipped"] for f in fits)
    out["n_cut_steps_"] = sum(f.attributes["n_cut"] for f in fits)
    out["_remarks"] = ()
    if plan.columns.has_groups:
        tau = float(np.max(out["tau_"]))
        whole = fits[0].attributes.get("exact_groups", False)
        out["_remarks"] = remarks_on_groups(plan, tau, out["engine_"], whole)
    found = Messages(out["site_precision_"], out["site_shift_"])
    out["_state"] = state_of(found, priors[0], plan.site, plan.labels)
    out["_n_rows"] = plan.problem.n_rows
    return out


def attributes_of_factors(plan, fit):
    """Return the attributes of a fit with factors, lists over these if a list was given."""
    rule = fit.attributes["theta_rule"]
    out = _common(plan.columns, [fit.posterior], rule) | run_attributes([fit])
    effects = plan.levels, *fit.posterior.group_effects()
    names = "group_labels_", "group_effects_", "group_effects_std_"
    out |= {
        name: list(values) if plan.columns.listed else values[0]
        for name, values in zip(names, effects, strict=True)
    }
    out["_state"] = fit.attributes["state"]
    out["engine_"], out["_levels"], out["_n_rows"] = plan.engine, plan.levels, plan.n_rows
    out["_remarks"] = remarks_on_factors(plan, out["tau_"])
    if not fit.attributes["complete"]:
        out["_remarks"] += ("the grid in the scales was stopped at 400 nodes.",)
    return out
