"""What was learned, as tables: coefficients, scales, and the effects of groups."""

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from .._estimator import summary
from .._estimator.latents import is_joint
from .._estimator.tables import objects
from ._posterior import moments_by_class
from ._scales import quantiles

_CLOSE = 0.5  # effective share of points of a density that is near another


def names_of_shared(est, given=None):
    """Return the names of the columns with shared coefficients, those without groups."""
    names = enumerate(summary.column_names(est, given))
    return [name for k, name in names if k not in est._columns.taken]


def coefficients(est, level):
    """Return means, sds (K, D) and intervals (K, D, 2) of the coefficients, the intercept last."""
    posteriors, ends = est._posteriors, summary.ends_of(level)
    beta = moments_by_class(posteriors)
    found = [np.moveaxis(p.beta_quantiles(ends), 0, -1) for p in posteriors]
    sd = [np.sqrt(np.diagonal(m.cov)) for m in beta]
    interval = found[0] if is_joint(posteriors) else np.stack(found)
    return np.stack([m.mean for m in beta]), np.stack(sd), interval


def figures_of(est):
    """Return what a summary tells besides coefficients and scales."""
    n_levels = [len(known) for known in est._levels]
    groups = n_levels[0] if len(n_levels) == 1 else n_levels or 0
    figures = {"rows": est._n_rows, "groups": groups}
    figures |= {"log evidence": est.log_evidence_, "engine": est.engine_}
    return figures | ({"scales": what_was_averaged(est)} if n_levels else {})


def what_was_averaged(est):
    """Return in words what the posterior of the scales is made of."""
    rule, average = est.theta_rule_, est._posteriors[0].average
    weight = average.weight
    if rule == "mode":
        return "kept at their mode"
    if len(weight) == 1:
        return "a normal distribution of their logarithms"
    share, checked = getattr(average, "agreement", None), ""
    if share is not None:
        words = "close to" if share > _CLOSE else "coarse against"
        checked = (
            f"; the density between them is {words} the evidence (effective share {share:.2f})"
        )
    kind = {"grid": "a grid", "star": "a star about their mode"}.get(rule, "a quadrature rule")
    n = getattr(average, "n_without", 0)
    without = f"; at {n} more values of the scales there was no posterior" if n else ""
    effective = f"{1.0 / np.sum(weight**2):.1f} of them effective"
    return f"{len(weight)} nodes of {kind}, {effective}{checked}{without}"


def _factors(est, names):
    """Return (name, names of its effects, number of named levels) of each factor.

    names are those of the columns with shared coefficients.
    """
    found = []
    for (name, _, slopes), known in zip(est._columns.factors, est._levels, strict=True):
        text = ":".join(map(str, name)) if isinstance(name, tuple) else str(name)
        found.append((text, ["intercept", *(names[k] for k in slopes)], len(known)))
    return found


def scales_of(est, names, level):
    """Return the table of the standard deviations of the group effects, empty without groups."""
    factors = _factors(est, names)
    if not factors:
        return {}
    posterior = est._posteriors[0]
    lower, upper = quantiles(posterior.average, posterior.n_effects, summary.ends_of(level))
    rows = [(factor, effect, n) for factor, effects, n in factors for effect in effects]
    factor, effect, n_levels = zip(*rows, strict=True)
    several = len(factors) > 1
    name = [f"{f}: {e}" for f, e in zip(factor, effect, strict=True)] if several else effect
    columns = dict(name=name, factor=factor, effect=effect)
    table = {key: np.array(values, dtype=object) for key, values in columns.items()}
    return table | dict(tau=est.tau_, lower=lower, upper=upper, n_levels=np.array(n_levels))


def effects_frame(est, level):
    """Return the effects of groups of a fitted `HierarchicalEPLogistic`, one row an effect.

    As a data frame where pandas is installed, else as a dict of arrays.

    Parameters
    ----------
    est : HierarchicalEPLogistic
        Fitted.
    level : float
        Probability of the intervals, between zero and one.

    Returns
    -------
    frame : pandas.DataFrame or dict of str to ndarray
        Columns of one length, in the order of factors, within a factor of its effects, and within
        an effect of `group_labels_`:

        - "class": the class label, with more than two classes only;
        - "factor": name or index of the column as text, those of a combination joined by a colon,
          and "groups" for labels beside X;
        - "level": label of the group, a tuple for combinations;
        - "effect": "intercept", or the name of the column whose slope varies;
        - "mean", "sd": posterior mean and standard deviation;
        - "lower", "upper": ends of the central interval of the normal distribution with these;
        - "rows": training rows of the level.

        All are empty after a fit without groups.

    Raises
    ------
    ValueError
        If `level` is no probability between zero and one.
    """
    check_is_fitted(est)
    words = "class", "factor", "level", "effect"
    kinds: dict[str, Any] = dict.fromkeys(words[len(est.classes_) == 2 :], object)
    kinds |= dict.fromkeys(("mean", "sd", "lower", "upper"), float) | {"rows": int}
    blocks = list(_blocks(est, level))
    table = {
        name: np.concatenate([np.empty(0, kind), *(block[name] for block in blocks)])
        for name, kind in kinds.items()
    }
    try:
        import pandas as pd
    except ImportError:
        return table
    return pd.DataFrame(table)


def _blocks(est, level):
    """Yield the columns of the table of effects for each factor, class and effect."""
    values = [est.group_labels_, est.group_effects_, est.group_effects_std_]
    values = values if est._columns.listed else [[value] for value in values]
    told = zip(_factors(est, names_of_shared(est)), est._level_rows, *values, strict=False)
    for (factor, effects, n), rows, labels, *moments in told:
        known = objects(labels.tolist())
        by_class = (m.reshape(-1, n, len(effects)) for m in moments)
        for label, means, sds in zip(est.classes_, *by_class, strict=False):
            for effect, mean, sd in zip(effects, means.T, sds.T, strict=True):
                lower, upper = summary.interval_of(mean, sd, level).T
                words = {"class": label, "factor": factor, "effect": effect}
                block = {key: np.full(n, word, dtype=object) for key, word in words.items()}
                block |= dict(level=known, mean=mean, sd=sd, lower=lower, upper=upper)
                # levels without a label come after the named ones, and have no row in the table
                yield block | dict(rows=rows[:n].astype(int))
