"""More than two classes: joint posteriors, one against the rest, and peers at their defaults.

    python doc/benchmarks/classes.py [--quick] [--data FOLDER]

Log loss, error, calibration error (mean over ten equal bins of confidence) and CPU seconds, means
over splits; all models fitted in turn on each split. `image` is taken from the folder where its
labels have more than two classes.
"""

import functools
import warnings

import numpy as np
from common import arguments, cpu, log_loss, save, table
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import (
    load_digits,
    load_iris,
    load_wine,
    make_classification,
    make_multilabel_classification,
)
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.svm import SVC

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier


def rings(n, rng):
    """Four rings: classes that enclose each other, with noisy edges."""
    X = 1.5 * rng.normal(size=(n, 2))
    return X, np.digitize(np.hypot(*X.T) + 0.25 * rng.normal(size=n), [1.0, 1.8, 2.6])


def waves(n, rng):
    """Breiman's waveforms: three classes of noisy mixtures of two of three bumps."""
    t = np.arange(1, 22)
    bumps = np.maximum(6 - np.abs(t - np.array([[11], [15], [7]])), 0)
    y, u = rng.integers(0, 3, n), rng.random((n, 1))
    first, second = np.array([[0, 1], [0, 2], [1, 2]])[y].T
    return u * bumps[first] + (1 - u) * bumps[second] + rng.normal(size=(n, 21)), y


def text(n, rng):
    """Counts of 3,000 words under five topics that share most of them."""
    X, many = make_multilabel_classification(
        n, 3000, n_classes=5, n_labels=1, length=60, allow_unlabeled=False, random_state=0
    )
    single = many.sum(1) == 1
    return np.log1p(X[single]), many[single].argmax(1)


def sets(quick):
    """Yield (name, X, y, number of splits, rows to train on)."""
    rng = np.random.default_rng(1)
    yield "iris", *load_iris(return_X_y=True), 10, 90
    yield "wine", *load_wine(return_X_y=True), 10, 107
    yield "rings", *rings(450, rng), 5, 270
    yield "waves", *waves(450, rng), 5, 270
    six = make_classification(
        500, 12, n_informative=6, n_redundant=2, n_classes=6, n_clusters_per_class=1,
        class_sep=1.2, random_state=5,
    )  # fmt: skip
    yield "six", *six, 5, 300
    yield "digits", *load_digits(return_X_y=True), 1, 400 if quick else 1257
    yield "topics", *text(2000, rng), 1, 600


def start(X):
    """Smooth isotropic kernel, the same for all Gaussian processes but those at their defaults."""
    scale = 3.0 * np.sqrt(X.var(0).sum())
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF(scale, (1e-2 * scale, 1e3 * scale))


def models(X, wide):
    """Models by name; no Gaussian process of scikit-learn where it would take minutes."""
    kernel = start(X)
    named = {
        "GP joint": EPGaussianProcessClassifier(kernel, random_state=0),
        "GP one vs rest": EPGaussianProcessClassifier(
            kernel, multi_class="one_vs_rest", random_state=0
        ),
        "GP, lengths by column": EPGaussianProcessClassifier(random_state=0),
        "linear joint": ConvexVariationalLogistic(learn_prior=True, random_state=0),
        "linear one vs rest": ConvexVariationalLogistic(
            learn_prior=True, multi_class="one_vs_rest", random_state=0
        ),
        "LogisticRegression": LogisticRegression(max_iter=2000),
        "LogisticRegressionCV": LogisticRegressionCV(
            max_iter=2000, scoring="neg_log_loss", l1_ratios=(0.0,), use_legacy_attributes=False
        ),
        "gradient boosting": HistGradientBoostingClassifier(random_state=0),
        "calibrated SVC": CalibratedClassifierCV(SVC()),
    }
    if not wide:
        named["GPC of scikit-learn"] = GaussianProcessClassifier(kernel)
    return named


def calibration_error(proba, y):
    """Mean absolute difference of confidence and accuracy over ten bins, weighted by rows."""
    confidence, right = proba.max(1), proba.argmax(1) == y
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [abs(np.sum(confidence[bins == b] - right[bins == b])) for b in range(10)]
    return float(np.sum(gaps) / len(y))


def main():
    args, rows = arguments(__doc__), []
    for name, X, y, n_splits, n_train in sets(args.quick):
        found = {}
        for split in range(1 if args.quick else n_splits):
            order = np.random.default_rng(split).permutation(len(y))
            train, test = order[:n_train], order[n_train:]
            spread = X[train].std(0)
            Z = (X - X[train].mean(0)) / np.where(spread > 0, spread, 1.0)
            for label, model in models(Z[train], n_train > 500).items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call = functools.partial(model.fit, Z[train], y[train])
                    fitted, seconds = cpu(call)
                    proba = fitted.predict_proba(Z[test])
                error = float(np.mean(proba.argmax(1) != y[test]))
                gap = calibration_error(proba, y[test])
                found.setdefault(label, []).append((log_loss(proba, y[test]), error, gap, seconds))
        for label, values in found.items():
            means = np.mean(values, axis=0)
            columns = ("log loss", "error", "calibration error", "CPU s")
            rows.append(dict(set=name, model=label, **dict(zip(columns, means, strict=True))))
        table(rows[-len(found) :], list(rows[-1]))
    save(args, "classes", rows)


if __name__ == "__main__":
    main()
