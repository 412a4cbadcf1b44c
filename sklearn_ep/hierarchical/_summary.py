"""Intervals of what was learned, and the tables of a fitted hierarchical model."""

import numpy as np

from .._estimator.checks import check_number
from .._estimator.summary import (
    Summary,
    coefficient_columns,
    column_names,
    names_by_class,
    title_of,
)

__all__ = ["intervals", "summarise"]


def intervals(posteriors, level):
    """Return central intervals (K, D, 2) of the coefficients, the intercept last."""
    check_number("level", level, 0, 1, boundaries="neither")
    ends = 0.5 - 0.5 * level, 0.5 + 0.5 * level
    return np.stack([p.beta_quantiles(ends).T for p in posteriors])


def summarise(est, level):
    """Return the `Summary` of a fitted `HierarchicalEPLogistic`."""
    interval, columns = intervals(est._posteriors, level), est._columns
    names = [name for k, name in enumerate(column_names(est)) if k != columns.group]
    own = names_by_class(est, [*names, "intercept"] if columns.fit_intercept else names)
    beta = [p.beta_moments() for p in est._posteriors]
    mean = np.concatenate([m.mean for m in beta])
    sd = np.concatenate([np.sqrt(np.diagonal(m.cov)) for m in beta])
    lower, upper = interval.reshape(-1, 2).T
    coefficients = coefficient_columns(own, mean, sd, level, lower=lower, upper=upper)
    figures = {"rows": est._n_rows, "groups": len(est.group_labels_)}
    figures |= {"log evidence": est.log_evidence_, "engine": est.engine_}
    return Summary(title_of(est), level, coefficients, _scales(est, names, level), figures)


def _scales(est, names, level):
    """Return the table of the standard deviations of the group effects, empty without groups."""
    if not est._columns.has_groups:
        return {}
    ends = 0.5 - 0.5 * level, 0.5 + 0.5 * level
    lower, upper = est._posteriors[0].scale_quantiles(ends)
    varying = ["intercept", *(names[k] for k in est._columns.slopes)]
    n_levels = np.full(len(varying), len(est.group_labels_))
    table = dict(name=np.array(varying, dtype=object), tau=est.tau_)
    return table | dict(lower=lower, upper=upper, n_levels=n_levels)
