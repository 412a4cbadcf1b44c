"""Finite data that break careless numerics, and the settings they are thrown at."""

import re
import warnings
from decimal import Decimal

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, Matern

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)

KERNELS = [None, 1.0 * RBF(1.0), 1e4 * RBF(1.0), 10.0 * Matern([1.0], nu=1.5), 1.0 * RBF(1e4)]


def settings(rng):
    """Return a random estimator with quick settings."""
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    damping = pick(0.3, 0.7, 1.0)
    kernel = pick(*KERNELS)
    kind = rng.integers(7)
    if kind == 0:
        return EPGaussianProcessClassifier(
            kernel, method="dense", likelihood=pick("probit", "logit"), damping=damping,
            optimizer=pick(None, None, "auto"), max_iter=5, acceleration=pick("anderson", None),
        )  # fmt: skip
    if kind == 1:
        return EPGaussianProcessClassifier(
            kernel, method="sparse", n_inducing=5, max_iter=4, max_sweeps=20, damping=damping,
            optimizer=pick(None, "adam"), batch_size=pick(None, 7), random_state=0,
            site_memory=pick("scalars", "average"), likelihood=pick("probit", "logit"),
        )  # fmt: skip
    if kind == 2:
        return RelaxedEPClassifier(
            kernel, method="dense", rule=pick("relaxed", "ep", "power"), optimizer=None,
            label_noise=pick(0.0, 0.05, 0.4), damping=damping, max_iter=20,
        )  # fmt: skip
    if kind == 3:
        return SpikeSlabRegressor(
            algorithm=pick("auto", "ep", "convergent"), standardize=pick(True, False),
            noise_variance=pick("auto", 0.1), fit_intercept=pick(True, False), max_iter=30,
            damping=damping,
        )  # fmt: skip
    if kind == 4:
        return ConvexVariationalLogistic(
            pick(1.0, 1e4), bound=pick("kl", "local"), prior=pick("gaussian", "laplace"),
            variance=pick("auto", "calibrated", "monte_carlo"), solver=pick("auto", "cg"),
            fit_intercept=pick(True, False), random_state=0, damping=damping,
        )  # fmt: skip
    if kind == 5:
        return HierarchicalEPLogistic(n_partitions=pick("auto", 2), max_iter=8, damping=damping)
    return HierarchicalEPLogistic(
        engine=pick("ep", "ep", "laplace"), refine=pick(True, False), max_iter=8, damping=damping
    )


def sparse_classifier(rng):
    """Return a random sparse classifier."""
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    return SpikeSlabClassifier(
        slab_variance=pick("auto", 1.0, 1e4), prior_inclusion=pick("auto", 0.1),
        standardize=pick(True, False), fit_intercept=pick(True, False),
        damping=pick(0.3, 0.7, 1.0), max_iter=30,
    )  # fmt: skip


def data(rng, grouped):
    """Return X, y as numbers, weights or None, groups or None."""
    n, d = int(rng.integers(2, 30)), int(rng.integers(1, 7))
    X = rng.normal(size=(n, d))
    if rng.random() < 0.4:
        X *= 10.0 ** rng.integers(-8, 9, size=d)
    if rng.random() < 0.2:
        X[:, rng.integers(d)] = rng.choice([0.0, 1.0, 1e8])
    if d > 1 and rng.random() < 0.2:
        X[:, 0] = X[:, 1]
    if rng.random() < 0.2:
        X[rng.integers(n, size=n // 2)] = X[0]
    if rng.random() < 0.1:
        X[rng.integers(n)] *= 1e6
    z = X[:, 0] / (np.abs(X[:, 0]).max() + 1e-300)
    if rng.random() < 0.7:
        z = z + rng.normal(size=n)
    weight = None
    if rng.random() < 0.3:
        weight = rng.choice([0.0, 0.3, 1.0, 2.0, 1e6], size=n)
    groups = rng.integers(max(1, n // 3), size=n) if grouped else None
    return X, z, weight, groups


def stretched(X, rng):
    """Return X with columns of scales from 1e-160 to 1e160 and origins of up to 1e8 of them."""
    d = X.shape[1]
    scale = 10.0 ** rng.uniform(-160, 160, size=d if rng.random() < 0.5 else 1)
    origin = rng.choice([0.0, 1.0], size=d) * 10.0 ** rng.uniform(0, 8, size=d)
    unit = rng.choice([0.0, 1.0])  # the origin in units of the data, or of nothing
    return X * scale + origin * scale**unit


def canonical(X):
    """Return X in units in which nothing can be lost: from its first row on, near one."""
    moved = X - X[0]
    size = np.abs(moved).max()
    return np.ldexp(moved, -int(np.frexp(size)[1])) if 0 < size < np.inf else moved


def blind_to_units(est, X, weight):
    """Return whether a fit must not depend on one unit of all columns and on their origins.

    Not where columns vary by less than rounding of another origin leaves, nor where their squares
    vanish in the unit of another, nor where the evidence of rows with huge weights has many maxima.
    """
    vary, size = np.ptp(X, axis=0), np.abs(X).max(axis=0)
    if np.any((vary > 0) & (vary < np.maximum(1e-9 * size, 1e-140 * vary.max()))):
        return False
    if getattr(est, "optimizer", None) is not None and weight is not None and weight.max() > 1e3:
        return False
    if isinstance(est, SpikeSlabRegressor | SpikeSlabClassifier):
        return est.standardize and est.fit_intercept
    return isinstance(est, EPGaussianProcessClassifier | RelaxedEPClassifier) and not est.kernel


def names_an_argument(error):
    """Return whether a ValueError says of which argument it is."""
    return re.search(r"\b(X|y|sample_weight|groups)\b", str(error)) is not None


def attempt(seed, stretch=False, make=settings):
    """Fit one random case of what `make` returns; return None, or what was wrong with it.

    A ValueError with a message is an answer; any other exception, a RuntimeWarning, or a number
    that is not finite is a fault. With `stretch` scales and origins go to the ends of double
    precision; then an error has to name the argument, a fit that has converged has to have a
    residual below `tol`, and one that cannot depend on units has to be that of small numbers.
    """
    rng = np.random.default_rng(seed)
    est = make(rng)
    grouped = isinstance(est, HierarchicalEPLogistic) and rng.random() < 0.6
    X, z, weight, groups = data(rng, grouped)
    if stretch:
        X = stretched(X, rng)
    y = (z > np.median(z)).astype(int) if is_classifier(est) else z * 10.0 ** rng.integers(-6, 7)
    extra = {} if groups is None else {"groups": groups}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)
        try:
            est.fit(X, y, sample_weight=weight, **extra)
            new = X if stretch else np.vstack([X, 1e3 * X])
            if is_classifier(est):
                mean, var = est.latent_mean_and_variance(new)
                seen = [mean, var, est.predict_log_proba(new), est.log_evidence_]
                if not np.all(var >= 0):
                    return f"seed {seed}: {est}: negative variance"
            else:
                seen = [*est.predict(new, return_std=True), est.inclusion_proba_, est.log_evidence_]
            if stretch and est.converged_ and not est.history_["residual"][-1] < est.tol:
                return f"seed {seed}: {est}: converged at {est.history_['residual'][-1]}"
            if stretch and blind_to_units(est, X, weight):
                small = clone(est).fit(canonical(X), y, sample_weight=weight)
                known = seen[:2] if is_classifier(est) else seen[:1]
                own = small.predict(canonical(X)) if not is_classifier(est) \
                    else small.latent_mean_and_variance(canonical(X))  # fmt: skip
                off = np.max(np.abs(np.array(known) - own)) / (np.abs(own).max() + 1e-300)
                if small.converged_ and est.converged_ and off > 0.01:
                    return f"seed {seed}: {est}: off by {off:.2g} from the fit in other units"
        except ValueError as error:
            clear = names_an_argument(error) if stretch else len(str(error)) > 10
            return None if clear and not isinstance(error, np.linalg.LinAlgError) \
                else f"seed {seed}: {est}: {error!r}"  # fmt: skip
        except Exception as error:  # noqa: BLE001
            return f"seed {seed}: {est}: {error!r}"
    stochastic = getattr(est, "variance", None) in ("calibrated", "monte_carlo", "lanczos")
    for values in seen[:-1] if stochastic else seen:
        if not np.all(np.isfinite(values)):
            return f"seed {seed}: {est}: not finite"
    return None


LABELS = [
    int, str, float, lambda k: k + 2**53, lambda k: f"{k}\0", lambda k: (k, "a"), Decimal,
    lambda k: None if k == 0 else k, lambda k: float("nan") if k == 0 else k / 3,
]  # fmt: skip


def crossed_case(rng, pick):
    """Return an estimator, rows with two factors, y, and the rows with other names of levels."""
    n = int(rng.integers(8, 61))
    codes = np.column_stack([rng.integers(0, rng.integers(1, n + 1), n) for _ in range(2)])
    if rng.random() < 0.3:
        codes[:, 1] = codes[:, 0] // 3  # nested
    X = rng.normal(size=(n, 2)) * 10.0 ** pick(0, 0, 3)
    X[0] *= 10.0 ** pick(0, 0, 4)
    z = np.sign(X[:, 0]) + sum(pick(0.3, 3.0) * rng.normal(size=n)[c] for c in codes.T)
    est = HierarchicalEPLogistic(
        [0, 1], hyperparameters="mode", engine=pick("ep", "messages"), power=pick(1.0, 0.5)
    )
    named = []
    for kinds in rng.choice(len(LABELS), (2, 2)):
        table = np.empty((n, 4), dtype=object)
        table[:, 2:] = X
        for f, kind in enumerate(kinds):
            table[:, f] = [LABELS[kind](int(c)) for c in codes[:, f]]
        named.append(table)
    return est, named, z + rng.logistic(size=n)


def classes_case(rng, pick):
    """Return an estimator, the same rows in two units, and a response for two to five classes."""
    n, d = int(rng.integers(30, 80)), int(rng.integers(1, 5))
    X = rng.normal(size=(n, d)) + rng.normal(size=d)
    z = np.digitize(X[:, 0] + 0.5 * rng.normal(size=n), np.linspace(-1, 1, pick(1, 2, 4)))
    est = ConvexVariationalLogistic(
        variance=pick("auto", "exact", "calibrated"), n_partitions=pick(None, None, 2),
        hyperparameters=pick("auto", "mode"), multi_class=pick("auto", "one_vs_rest"),
        random_state=0,
    )  # fmt: skip
    if est.n_partitions and est.hyperparameters == "auto":
        est.set_params(hyperparameters="mode")
    return est, [X, X * 10.0 ** rng.integers(-8, 9)], z


def attempt_kind(seed):
    """Fit one random case of labels, powers, crossed factors or units; None, or what was wrong."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    crossed = bool(rng.random() < 0.5)
    if crossed:
        est, both, z = crossed_case(rng, pick)
        y = (z > np.median(z)).astype(int)
    else:
        est, both, y = classes_case(rng, pick)
    if len(np.unique(y)) < 2:
        return None
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)
        try:
            for X in both:
                fit = clone(est).fit(X, y)
                found.append((fit.predict_proba(X), fit.converged_))
        except ValueError as error:
            return None if names_an_argument(error) else f"seed {seed}: {est}: {error!r}"
        except Exception as error:  # noqa: BLE001
            return f"seed {seed}: {est}: {error!r}"
    if not all(np.all(np.isfinite(proba)) for proba, _ in found):
        return f"seed {seed}: {est}: not finite"
    off = np.abs(found[0][0] - found[1][0]).max()
    if not crossed and all(converged for _, converged in found) and off > 0.02:
        return f"seed {seed}: {est}: probabilities move by {off:.2g} with the unit"
    return None
