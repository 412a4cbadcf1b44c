"""Everything at its defaults on real sets, beside peers that were tuned.

    python doc/benchmarks/arena.py [--quick] [--data FOLDER] [--only SET ...] [--splits 5]

Twenty-six sets with two or several classes, and sets with numbers to predict. Each split is drawn
anew, stratified; columns are standardised by the training rows. Six sets are tables with
categories: ours, boosting, LightGBM and CatBoost take those as they are, the other peers and the
linear model one-hot. Training sizes are those of the collection of Raetsch et al. (2001), at most
500; at most 2000 rows are tested. Peers that have a form which tunes itself are used in it:
LogisticRegressionCV, LassoCV, and grids by three-fold log loss for the support vector machine,
boosting and the forest. LightGBM and CatBoost take part at their defaults where they are installed.
Scores are means over splits; "level" counts the sets on which a model is within .005 or two
standard errors of the best, "above" is the mean log loss above the best, and the mean rank has a
90 % interval by a bootstrap over sets. "Among peers" is without the other models of this package. A
run of some sets or models keeps the stored rows of the others: splits are the same in every run.
"""

import functools
import importlib.util
import pathlib
import warnings

import numpy as np
import pandas as pd
import scipy.sparse as sp
from common import arguments, cpu, figure, save, stored_rows, table
from joblib import Parallel, delayed
from scipy.stats import norm, rankdata
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import BayesianRidge, LassoCV, LogisticRegressionCV
from sklearn.model_selection import GridSearchCV, ShuffleSplit, StratifiedShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, SplineTransformer, StandardScaler
from sklearn.svm import SVC

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)

# training rows: those of the collection where it has the set, at most 500; 0 is 70 % of the rows
FROM_FOLDER = {
    "australian": 0, "banana": 400, "breast_cancer_ljubljana": 200, "breast_wisconsin": 0,
    "colon": 0, "crabs": 0, "diabetis": 468, "flare_solar": 500, "german": 500, "haberman": 0,
    "heart": 170, "image": 500, "ionosphere": 0, "pima532": 200, "prostate_singh": 0, "sonar": 0,
    "spambase": 276, "splice": 500, "thyroid": 140, "titanic": 150, "twonorm": 400, "waveform": 400,
    "rcv1_small": 500,
}  # fmt: skip
FROM_SCIKIT_LEARN = {
    "breast_cancer": load_breast_cancer, "iris": load_iris, "wine": load_wine,
}  # fmt: skip
# columns of codes without an order, or of ranges as the original tables have them
CATEGORIES = {
    "australian": [3, 4, 5, 11], "breast_cancer_ljubljana": range(9),
    "german": [0, 2, 3, 5, 6, 8, 9, 11, 13, 14, 16, 18, 19], "heart": [2, 6, 12],
    "splice": range(60), "titanic": [0],
}  # fmt: skip
NUMBERS = {"diabetes": 0, "eyedata": 0, "radon": 0, "riboflavin": 0}
QUICK = ("heart", "thyroid", "crabs", "iris", "diabetes")
MOST_TRAINED, MOST_TESTED, LEVEL = 500, 2000, 0.005
OURS = (
    "BayesianStackingClassifier", "EPGaussianProcessClassifier", "RelaxedEPClassifier",
    "ConvexVariationalLogistic", "SpikeSlabRegressor", "ConvexVariationalRegressor",
    "additive part of the stack",
)  # fmt: skip


def load(name, folder):
    """Return X and y of a set; None where it would have to come from the folder."""
    if name in FROM_SCIKIT_LEARN:
        return FROM_SCIKIT_LEARN[name](return_X_y=True)
    if name == "diabetes":
        return load_diabetes(return_X_y=True)
    path = None if folder is None else pathlib.Path(folder) / f"{name}.npz"
    if path is None or not path.exists():
        return None
    with np.load(path) as z:
        if "indptr" in z:
            parts = z["data"].astype(float), z["indices"].astype(np.int32), z["indptr"]
            return sp.csr_matrix(parts, shape=tuple(z["shape"])), z["y"]
        X, y = z["X"].astype(float), z["y"]
        if name == "radon":  # counties as indicators
            X = np.hstack([X, np.eye(int(z["group"].max()) + 1)[z["group"]]])
        return np.log(X) if name == "colon" else X, y


def standardised(X, train, test, categories):
    """Return training and test rows, columns that vary in units of the training rows.

    Where some columns are categories both are data frames.
    """
    if sp.issparse(X):
        return X[train], X[test]
    varies = (X[train].std(0) > 0) & ~np.isin(np.arange(X.shape[1]), categories)
    parts = [pd.DataFrame(X[rows][:, varies]) for rows in (train, test)]
    if varies.any():
        scaler = StandardScaler().fit(parts[0])
        parts = [pd.DataFrame(scaler.transform(part)) for part in parts]
    if not len(categories):
        return [part.to_numpy() for part in parts]
    for column in categories:
        kind = pd.CategoricalDtype([f"{v:.3g}" for v in np.unique(X[:, column])])
        for part, rows in zip(parts, (train, test), strict=True):
            part[f"c{column}"] = pd.Series([f"{v:.3g}" for v in X[rows, column]], dtype=kind)
    return [part.rename(columns=str) for part in parts]


def splits(X, y, name, n_splits, categories=()):
    """Yield standardised training and test parts, with named columns as categories."""
    numbers = name in NUMBERS
    asked = 0 if name in FROM_SCIKIT_LEARN or numbers else FROM_FOLDER[name]
    n_train = min(asked or int(0.7 * len(y)), MOST_TRAINED)
    n_test = min(len(y) - n_train, MOST_TESTED)
    kind = ShuffleSplit if numbers else StratifiedShuffleSplit
    for train, test in kind(n_splits, train_size=n_train, test_size=n_test, random_state=7).split(
        X, None if numbers else y
    ):
        if numbers:  # in units of the training rows, as the columns
            y = (y - y[train].mean()) / y[train].std()
        own, new = standardised(X, train, test, categories)
        yield own, y[train], new, y[test]


def tuned(model, grid):
    """Choose settings by three-fold log loss."""
    return GridSearchCV(model, grid, scoring="neg_log_loss", cv=3)


def one_hot(X):
    """Return what codes the categories of a data frame; "passthrough" for other X."""
    if not isinstance(X, pd.DataFrame):
        return "passthrough"
    chosen = make_column_selector(dtype_include="category")
    coder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer((coder, chosen), remainder="passthrough")


def additive():
    """Return the additive part of the stack alone."""
    splines = SplineTransformer(knots="quantile"), StandardScaler()
    return make_pipeline(*splines, ConvexVariationalLogistic(random_state=0))


def installed_peers(X):
    """Return those of the optional peers that are installed."""
    found = {}
    if importlib.util.find_spec("lightgbm"):
        from lightgbm import LGBMClassifier

        found["LightGBM"] = LGBMClassifier(random_state=0, n_jobs=1, verbose=-1)
    if importlib.util.find_spec("catboost"):
        from catboost import CatBoostClassifier

        quiet = dict(verbose=False, allow_writing_files=False, thread_count=1)
        if isinstance(X, pd.DataFrame):
            quiet["cat_features"] = list(X.select_dtypes("category"))
        found["CatBoost"] = CatBoostClassifier(random_state=0, **quiet)
    return found


def classifiers(X):
    """Return classifiers by name; those without sparse input are left out for sparse X."""
    coder = one_hot(X)
    coded = X if coder == "passthrough" else coder.fit_transform(X)
    d = coded.shape[1] if sp.issparse(X) else coded.shape[1] * coded.var()  # total variance
    svm = GridSearchCV(SVC(), {"C": [1, 10, 100], "gamma": [0.1 / d, 0.3 / d, 1.0 / d]}, cv=3)
    forest = RandomForestClassifier(200, random_state=0)
    on_numbers = {
        "ConvexVariationalLogistic": ConvexVariationalLogistic(random_state=0),
        "LogisticRegressionCV": LogisticRegressionCV(
            scoring="neg_log_loss", max_iter=2000, l1_ratios=(0.0,), use_legacy_attributes=False
        ),
        "calibrated SVC": CalibratedClassifierCV(svm, ensemble=False, cv=3),
        "random forest": tuned(forest, {"min_samples_leaf": [1, 5]}),
    }
    if not sp.issparse(X):
        on_numbers["GaussianProcessClassifier"] = GaussianProcessClassifier(1.0 * RBF(np.sqrt(d)))
        if X.shape[1] <= 500:
            on_numbers["additive part of the stack"] = additive()
    found = {"BayesianStackingClassifier": BayesianStackingClassifier(random_state=0)}
    found |= {name: make_pipeline(one_hot(X), model) for name, model in on_numbers.items()}
    if not sp.issparse(X):
        boosting = HistGradientBoostingClassifier(random_state=0)
        grid = {"learning_rate": [0.03, 0.1], "max_leaf_nodes": [4, 31]}
        found |= {
            "EPGaussianProcessClassifier": EPGaussianProcessClassifier(random_state=0),
            "RelaxedEPClassifier": RelaxedEPClassifier(random_state=0, predict_clean=False),
            "gradient boosting": boosting,
            "gradient boosting, tuned": tuned(boosting, grid),
        }
        found |= installed_peers(X)
    return found


def regressors():
    """Return regressors by name."""
    return {
        "SpikeSlabRegressor": SpikeSlabRegressor(),
        "ConvexVariationalRegressor": ConvexVariationalRegressor(),
        "LassoCV": LassoCV(max_iter=10_000),
        "BayesianRidge": BayesianRidge(),
        "random forest": RandomForestRegressor(300, random_state=0),
        "gradient boosting": HistGradientBoostingRegressor(random_state=0),
    }


def calibration_error(proba, right):
    """Mean absolute difference of confidence and accuracy over ten bins, weighted by rows."""
    confidence = proba.max(1)
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [abs(np.sum(confidence[bins == b] - right[bins == b])) for b in range(10)]
    return float(np.sum(gaps) / len(right))


def score_classes(model, train, X, y):
    """Return the figures of a classifier on one split."""
    fitted, seconds = cpu(lambda: model.fit(*train))
    proba = np.clip(fitted.predict_proba(X), 1e-15, 1.0)
    right = fitted.classes_[proba.argmax(1)] == y
    loss = -np.mean(np.log(proba[np.arange(len(y)), np.searchsorted(fitted.classes_, y)]))
    gap = calibration_error(proba, right)
    return {"loss": loss, "error": 1.0 - right.mean(), "calibration": gap, "CPU s": seconds}


def score_numbers(model, train, X, y):
    """Return the figures of a regressor on one split: a normal with the spread it states.

    Those that state none get that of their training residuals by five folds.
    """
    fitted, seconds = cpu(lambda: model.fit(*train))
    try:
        mean, sd = fitted.predict(X, return_std=True)
    except TypeError:
        mean, sd = fitted.predict(X), folded_spread(model, *train)
    loss, error = -norm.logpdf(y, mean, sd).mean(), np.sqrt(np.mean((y - mean) ** 2)) / y.std()
    covered = np.mean(np.abs(y - mean) < norm.ppf(0.95) * sd)
    return {"loss": loss, "error": error, "calibration": abs(covered - 0.9), "CPU s": seconds}


def folded_spread(model, X, y, k=5):
    """Return the root mean square of residuals of rows that were left out."""
    fold = np.random.default_rng(0).permutation(len(y)) % k
    left = [
        y[fold == i] - model.fit(X[fold != i], y[fold != i]).predict(X[fold == i]) for i in range(k)
    ]
    return np.sqrt(np.mean(np.concatenate(left) ** 2))


def run_split(name, asked, part):
    """Return {model: figures} of one split, models in turn; all of them, or those asked for."""
    X, y, X_test, y_test = part
    numbers = name in NUMBERS
    models = regressors() if numbers else classifiers(X)
    models = {label: m for label, m in models.items() if asked is None or label in asked}
    score = score_numbers if numbers else score_classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {label: score(model, (X, y), X_test, y_test) for label, model in models.items()}


def rows_of(name, shape, found, kept):
    """Return one row a model, with means over splits.

    `kept` are stored rows of models that did not run.
    """
    rows = [r for r in kept if r["set"] == name and r["model"] not in found[0]]
    for label in found[0]:
        figures = {k: [f[label][k] for f in found] for k in found[0][label]}
        means = {k: float(np.mean(values)) for k, values in figures.items()}
        place = dict(set=name, rows=shape[0], columns=shape[1], model=label)
        rows.append(place | means | dict(losses=figures["loss"]))
    return ranked(rows)


def ranked(rows):
    """Return the rows of one set with their ranks, and whether they are level with the best."""
    peers = [r for r in rows if r["model"] not in OURS]
    for row, rank in zip(rows, rankdata([r["loss"] for r in rows]), strict=True):
        better = sum(r["loss"] < row["loss"] for r in peers)
        row |= dict(rank=float(rank), level=is_level(row, rows))
        row |= {"rank among peers": 1.0 + better, "level with peers": is_level(row, peers)}
    return rows


def is_level(row, others):
    """Return whether a model is within .005, or two standard errors, of the best of others."""
    best = min(others, key=lambda r: r["loss"])
    own, other, error = row.get("losses", []), best.get("losses", []), 0.0
    if 1 < len(own) == len(other):  # rows of old runs have no losses of splits
        apart = np.subtract(own, other)
        error = apart.std(ddof=1) / np.sqrt(len(apart))
    return bool(row["loss"] - best["loss"] <= max(LEVEL, 2.0 * error))


def summary(rows):
    """Print and return mean rank, sets on which a model is level with the best, and CPU seconds."""
    names = [n for n in dict.fromkeys(r["set"] for r in rows) if n not in NUMBERS]
    best = {n: min(r["loss"] for r in rows if r["set"] == n) for n in names}
    found = []
    for label in dict.fromkeys(r["model"] for r in rows if r["set"] in names):
        own = [r for r in rows if r["model"] == label and r["set"] in names]
        shown = "loss", "rank", "level", "rank among peers", "level with peers"
        means = {k: np.mean([r[k] for r in own]) for k in shown}
        means["above"] = np.mean([r["loss"] - best[r["set"]] for r in own])
        draws = np.random.default_rng(0).choice([r["rank"] for r in own], (2000, len(own)))
        low, high = np.quantile(draws.mean(axis=1), [0.05, 0.95])
        means |= {"rank, 5 %": low, "rank, 95 %": high}
        means["CPU s"] = np.mean([r["CPU s"] for r in own])
        found.append(dict(model=label, sets=len(own), **means))
    found.sort(key=lambda r: r["rank"])
    table(found, list(max(found, key=len)))
    return found


def draw(args, rows, name="arena"):
    """Draw the log loss of each model less that of the best, set by set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [r for r in rows if r["set"] not in NUMBERS]
    names = list(dict.fromkeys(r["set"] for r in shown))
    labels = list(dict.fromkeys(r["model"] for r in shown))
    order = sorted(labels, key=lambda m: np.mean([r["rank"] for r in shown if r["model"] == m]))
    best = {n: min(r["loss"] for r in shown if r["set"] == n) for n in names}
    fig, ax = plt.subplots(figsize=(8, 0.36 * len(order) + 1.2), layout="constrained")
    for i, label in enumerate(order):
        apart = [r["loss"] - best[r["set"]] for r in shown if r["model"] == label]
        ours = label in OURS
        colour = "tab:blue" if ours else "0.55"
        spread = 0.25 * np.linspace(-1, 1, len(apart))
        ax.plot(np.maximum(np.sort(apart), 1e-4), i + spread, "o", color=colour, ms=4, alpha=0.7)
        ax.plot(max(float(np.median(apart)), 1e-4), i, "|", color="black", ms=16, mew=2)
    ax.set(xscale="log", xlabel="log loss above the best model of the set (nats; bar: median)")
    ax.set_yticks(range(len(order)), order)
    ax.invert_yaxis()
    figure(args, name, fig)


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--only", dict(nargs="*", default=None, help="names of sets")),
        ("--models", dict(nargs="*", default=None, help="names of models")),
        ("--splits", dict(type=int, default=5, help="splits of each set")),
        ("--jobs", dict(type=int, default=1, help="splits in parallel")),
    )
    every = QUICK if args.quick else [*FROM_FOLDER, *FROM_SCIKIT_LEARN, *NUMBERS]
    names = args.only or every
    n_splits = min(args.splits, 2) if args.quick else args.splits
    stored = [r for r in stored_rows(args, "arena") if r["set"] in every]
    others = [n for n in every if n not in names]
    rows = [r for n in others for r in ranked([r for r in stored if r["set"] == n])]
    kept = stored if args.models else []
    for name in names:
        data = load(name, args.data)
        if data is None:
            print(f"{name} is left out: it is read from --data")
            continue
        run = functools.partial(run_split, name, args.models)
        parts = splits(*data, name, n_splits, CATEGORIES.get(name, ()))
        found = Parallel(args.jobs)(delayed(run)(part) for part in parts)
        if not found[0]:  # no model of those that were asked for
            rows += [r for r in kept if r["set"] == name]
            continue
        new = rows_of(name, data[0].shape, found, kept)
        rows += new
        table(new, ["set", "model", "loss", "error", "calibration", "CPU s", "rank", "level"])
    rows.sort(key=lambda r: every.index(r["set"]) if r["set"] in every else len(every))
    save(args, "arena", rows + [dict(set="all", **r) for r in summary(rows)])
    draw(args, rows)


if __name__ == "__main__":
    main()
