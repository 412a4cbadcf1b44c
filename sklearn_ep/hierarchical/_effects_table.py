"""The effects of groups as a table: one row an effect, with names, intervals and rows."""

import numpy as np
from sklearn.utils.validation import check_is_fitted

from .._estimator.summary import column_names, interval_of
from ._summary import _factors

__all__ = ["effects_frame", "effects_table"]

_NUMBERS = "mean", "sd", "lower", "upper"


def effects_table(est, level):
    """Return the effects of groups of a fitted `HierarchicalEPLogistic`, one row an effect.

    Parameters
    ----------
    est : HierarchicalEPLogistic
        Fitted.
    level : float
        Probability of the intervals, between zero and one.

    Returns
    -------
    table : dict of str to ndarray
        Arrays of one length, in the order of factors, within a factor of its effects, and within
        an effect of `group_labels_`:

        - "class": the class label, with more than two classes only;
        - "factor": name or index of the column as text, those of a combination joined by a colon,
          and "groups" for labels beside X;
        - "level": label of the group, a tuple for combinations;
        - "effect": "intercept", or the name of the column whose slope varies;
        - "mean", "sd": posterior mean and standard deviation;
        - "lower", "upper": ends of the central interval of the normal distribution with these;
        - "rows": training rows of the level, -1 where the fit did not keep their number.

        All are empty after a fit without groups.

    Raises
    ------
    ValueError
        If `level` is no probability between zero and one.
    """
    check_is_fitted(est)
    names = [n for k, n in enumerate(column_names(est)) if k not in est._columns.taken]
    several = len(est.classes_) > 2
    parts = [_empty(several)]
    for factor, labels, mean, sd, rows in zip(_factors(est), *_by_factor(est), strict=True):
        name, slopes, _ = factor
        effects = ["intercept", *(names[k] for k in slopes)]
        by_class = zip(est.classes_, mean, sd, strict=True) if several else [(None, mean, sd)]
        for label, center, spread in by_class:
            own = _part(_text(name), effects, level, labels, center, spread, rows)
            parts.append(own | ({"class": np.full(len(own["mean"]), label)} if several else {}))
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def effects_frame(est, level=0.9):
    """Return `effects_table` as a data frame where pandas is installed, else as it is.

    Parameters
    ----------
    est : HierarchicalEPLogistic
        Fitted.
    level : float, default=0.9
        Probability of the intervals.

    Returns
    -------
    frame : pandas.DataFrame or dict of str to ndarray
        One row an effect.
    """
    table = effects_table(est, level)
    try:
        import pandas as pd
    except ImportError:
        return table
    return pd.DataFrame(table)


def _empty(several):
    """Return a table without rows, which gives the columns their types."""
    names = [*(["class"] if several else []), "factor", "level", "effect"]
    words = {key: np.empty(0, dtype=object) for key in names}
    return words | {key: np.empty(0) for key in _NUMBERS} | {"rows": np.empty(0, dtype=int)}


def _part(factor, effects, level, labels, mean, sd, rows):
    """Return the table of one factor; mean and sd are (levels, effects)."""
    n, q = mean.shape
    known = np.empty(n, dtype=object)
    known[:] = labels.tolist()  # a tuple stays one label
    words = dict(factor=[factor] * (n * q), effect=np.repeat(effects, n).tolist())
    table = {key: np.array(values, dtype=object) for key, values in words.items()}
    mean, sd = mean.T.ravel(), sd.T.ravel()
    numbers = mean, sd, *interval_of(mean, sd, level).T
    table |= {"level": np.tile(known, q), "rows": np.tile(rows, q)}
    return table | dict(zip(_NUMBERS, numbers, strict=True))


def _by_factor(est):
    """Return labels, means, sds and rows of the levels, each a list over factors."""
    values = [est.group_labels_, est.group_effects_, est.group_effects_std_]
    if not est._columns.has_groups:
        return [[]] * 4
    if not isinstance(est.group_labels_, list):
        values = [[value] for value in values]
    return *values, _rows_of(est, values[0])


def _rows_of(est, labels):
    """Return the numbers of training rows of the named levels of each factor."""
    rows = getattr(est, "_level_rows", None)
    if rows is None:  # of a state that was written before rows were counted
        return [np.full(len(known), -1) for known in labels]
    # levels without a label come after the named ones, and have no row in the table
    pairs = zip(rows, labels, strict=True)
    return [np.asarray(n)[: len(known)].astype(int) for n, known in pairs]


def _text(name):
    return ":".join(map(str, name)) if isinstance(name, tuple) else str(name)
