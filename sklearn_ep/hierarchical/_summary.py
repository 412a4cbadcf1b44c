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
from ._prediction import is_joint, moments_by_class

__all__ = ["intervals", "summarise", "what_was_averaged"]


def intervals(posteriors, level):
    """Return central intervals (K, D, 2) of the coefficients, the intercept last."""
    check_number("level", level, 0, 1, boundaries="neither")
    ends = 0.5 - 0.5 * level, 0.5 + 0.5 * level
    found = [np.moveaxis(p.beta_quantiles(ends), 0, -1) for p in posteriors]
    return found[0] if is_joint(posteriors) else np.stack(found)


def summarise(est, level):
    """Return the `Summary` of a fitted `HierarchicalEPLogistic`."""
    interval, columns = intervals(est._posteriors, level), est._columns
    names = [name for k, name in enumerate(column_names(est)) if k not in columns.taken]
    own = names_by_class(est, [*names, "intercept"] if columns.fit_intercept else names)
    beta = moments_by_class(est._posteriors)
    mean = np.concatenate([m.mean for m in beta])
    sd = np.concatenate([np.sqrt(np.diagonal(m.cov)) for m in beta])
    lower, upper = interval.reshape(-1, 2).T
    coefficients = coefficient_columns(own, mean, sd, level, lower=lower, upper=upper)
    factors = _factors(est)
    n_levels = [n for _, _, n in factors]
    figures = {"rows": est._n_rows, "groups": n_levels[0] if len(n_levels) == 1 else n_levels}
    figures["groups"] = figures["groups"] if n_levels else 0
    figures |= {"log evidence": est.log_evidence_, "engine": est.engine_}
    figures |= {"scales": what_was_averaged(est)} if factors else {}
    return Summary(title_of(est), level, coefficients, _scales(est, names, level), figures)


def what_was_averaged(est):
    """Return in words what the posterior of the scales is made of."""
    rule, weight = est.theta_rule_, est._posteriors[0].weight
    if rule == "mode":
        return "kept at their mode"
    if len(weight) == 1:
        return "a normal distribution of their logarithms"
    kind = {"grid": "a lattice", "star": "a star about their mode"}.get(rule, "a quadrature rule")
    return f"{len(weight)} nodes of {kind}, {1.0 / np.sum(weight**2):.1f} of them effective"


def _factors(est):
    """Return (name, positions of slopes, number of named levels) of each factor."""
    pairs = zip(est._columns.factors, est._levels, strict=True)
    return [(f.name, f.slopes, len(known)) for f, known in pairs]


def _scales(est, names, level):
    """Return the table of the standard deviations of the group effects, empty without groups."""
    factors = _factors(est)
    if not factors:
        return {}
    ends = 0.5 - 0.5 * level, 0.5 + 0.5 * level
    lower, upper = est._posteriors[0].scale_quantiles(ends)
    rows = [
        (factor, effect, n)
        for factor, slopes, n in factors
        for effect in ["intercept", *(names[k] for k in slopes)]
    ]
    factor, effect, n_levels = zip(*rows, strict=True)
    texts = [":".join(map(str, f)) if isinstance(f, tuple) else str(f) for f in factor]
    several = len(factors) > 1
    name = [f"{f}: {e}" for f, e in zip(texts, effect, strict=True)] if several else effect
    columns = dict(name=name, factor=texts, effect=effect)
    table = {key: np.array(values, dtype=object) for key, values in columns.items()}
    return table | dict(tau=est.tau_, lower=lower, upper=upper, n_levels=np.array(n_levels))
