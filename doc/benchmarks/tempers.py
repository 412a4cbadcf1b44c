"""How sure predictions of several classes are: what a temper's gain has to exceed.

    python doc/benchmarks/tempers.py [--quick]

Each fit chooses the factor of its variances from rows left out, here by several rules: none, the
prior of linear models, and gains less some standard errors. Log losses are those of 1,000 other
rows at most, less that without a temper: means and standard errors over kinds of sets.
"""

import functools
import warnings

import numpy as np
from common import arguments, save, table
from sklearn.datasets import (
    load_digits,
    load_iris,
    load_wine,
    make_blobs,
    make_classification,
    make_gaussian_quantiles,
)
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import train_test_split

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep._engine.left_out import TEMPER, LogPrior, calibrated
from sklearn_ep.gaussian_process import _base

ERRORS = (1.0, 2.0, 3.0)
N = 1400
PROCESSES = ((3, 2, 1), (5, 2, 1), (8, 3, 1), (4, 5, 0.3), (3, 3, 2), (6, 4, 0.1))
# classes, columns, informative ones, separation, share of wrong labels
CLASSES = (
    (3, 10, 4, 1, 0.02),
    (5, 8, 5, 1, 0.02),
    (6, 12, 6, 1.5, 0.0),
    (8, 20, 8, 1, 0.0),
    (4, 30, 5, 0.7, 0.1),
    (10, 16, 10, 1.0, 0.05),
    (3, 60, 10, 1, 0.0),
)


def of_a_process(seed, n_classes, d, noise):
    """Return rows whose classes are the largest of noisy draws of a process."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (N, d))
    root = np.linalg.cholesky(4 * RBF(d**0.5)(X) + 1e-6 * np.eye(N))
    f = root @ rng.standard_normal((N, n_classes))
    return X, np.argmax(f + noise * rng.standard_normal(f.shape), axis=1)


def kinds(seed):
    """Yield (name, X, y)."""
    for own in PROCESSES:
        yield f"process {own}", *of_a_process(seed, *own)
    for own in CLASSES:
        n_classes, d, informative, sep, wrong = own
        shape = dict(n_informative=informative, n_redundant=0, n_classes=n_classes)
        more = dict(n_clusters_per_class=1 if n_classes > 5 else 2, class_sep=sep, flip_y=wrong)
        yield f"classes {own}", *make_classification(N, d, **shape, **more, random_state=seed)
    yield "blobs", *make_blobs(N, 8, centers=5, cluster_std=4.0, random_state=seed)
    shells = dict(n_samples=N, n_features=4, n_classes=4)
    yield "shells", *make_gaussian_quantiles(**shells, random_state=seed)
    for load in (load_iris, load_wine, load_digits):
        yield load.__name__, *load(return_X_y=True)


def rules(rows):
    """Return the tempers that rows left out choose, by rule."""
    told = {"none": 1.0, "prior of linear models": calibrated((TEMPER,), rows).scale[0]}
    for errors in ERRORS:
        name = f"less {errors:g} standard errors"
        told[name] = calibrated((LogPrior(1.0),), rows, errors).scale[0]
    return told


def fitted(X, y):
    """Return a fit and the tempers of its rows."""
    seen = []

    def kept(priors, rows, errors=0.0):
        seen.append(rows)
        return calibrated(priors, rows, errors)

    _base.calibrated = kept
    try:
        est = EPGaussianProcessClassifier(random_state=0).fit(X, y)
    finally:
        _base.calibrated = calibrated
    return est, rules(seen[-1])


def losses(X, y, n, seed):
    """Return the log loss on other rows by rule, of a fit to n rows."""
    A, B, a, b = train_test_split(X, y, train_size=n, random_state=seed, stratify=y)
    scale = functools.partial(np.multiply, 1.0 / (A.std(0) + 1e-9))
    est, tempers = fitted(scale(A - A.mean(0)), a)
    B, b, out = scale(B - A.mean(0))[:1000], b[:1000], {}
    for rule, est.variance_temper_ in tempers.items():
        log_p = est.predict_log_proba(B)
        out[rule] = -np.mean(log_p[np.arange(len(b)), np.searchsorted(est.classes_, b)])
    return out


def main():
    """Fit all kinds at three sizes and tabulate the rules."""
    args, found = arguments(__doc__.splitlines()[0]), {}
    for seed in range(1 if args.quick else 3):
        for name, X, y in kinds(seed):
            for n in (75,) if args.quick else (75, 150, 300) if len(y) > 1000 else (100,):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.setdefault(name, []).append(losses(X, y, n, seed))
    rows = []
    for rule in found[name][0]:
        gap = [[fit[rule] - fit["none"] for fit in fits] for fits in found.values()]
        means, worst = np.array([np.mean(g) for g in gap]), max(map(max, gap))
        row = {"rule": rule, "fits": sum(map(len, gap)), "kinds": len(gap)}
        row |= {"log loss less none": means.mean(), "error": means.std() / len(gap) ** 0.5}
        rows.append(row | {"worst fit": worst})
    table(rows, list(rows[0]))
    save(args, "tempers", rows)


if __name__ == "__main__":
    main()
