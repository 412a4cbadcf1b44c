"""How sure predictions of several classes are: rows that are left out choose their variances."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits, load_wine
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import train_test_split

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep.gaussian_process._limits import LIMITS


def of_the_model(seed, n=150, n_classes=4):
    """Rows whose classes are the largest of noisy draws of a process."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2.0, 2.0, (n, 2))
    K = 4.0 * RBF(1.0)(X) + 1e-8 * np.eye(n)
    f = np.linalg.cholesky(K) @ rng.standard_normal((n, n_classes))
    return X, np.argmax(f + rng.standard_normal(f.shape), axis=1)


def fit(X, y, weight=None, **settings):
    return EPGaussianProcessClassifier(random_state=0, **settings).fit(X, y, weight)


def log_loss(est, X, y):
    return -np.mean(est.predict_log_proba(X)[np.arange(len(y)), np.searchsorted(est.classes_, y)])


@pytest.fixture
def few_rows_are_many(monkeypatch):
    """Some rows tell the kernel, and all go through inducing points, from 81 on."""
    monkeypatch.setattr(LIMITS, "averaged", 80)


def test_weights_are_repeated_rows():
    X, y = of_the_model(0, 60)
    count = np.random.default_rng(1).integers(0, 3, len(y))
    settings: dict = dict(hyperparameters="mode", kernel=RBF(1.0))
    weighed = fit(X, y, count, **settings)
    repeated = fit(np.repeat(X, count, 0), np.repeat(y, count), **settings)
    assert weighed.variance_temper_ == pytest.approx(repeated.variance_temper_, rel=1e-3)


@pytest.mark.parametrize("n_seeds", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_little_is_lost_where_labels_come_from_the_model(n_seeds):
    losses = []
    for seed in range(n_seeds):
        X, y = of_the_model(seed, 500)
        est = fit(X[:100], y[:100])
        assert 0.7 < est.variance_temper_ <= 1.0
        tempered = log_loss(est, X[100:], y[100:])
        est.variance_temper_ = None
        losses.append(tempered - log_loss(est, X[100:], y[100:]))
    assert np.mean(losses) < 0.001


@pytest.mark.parametrize(
    ("load", "n"), [pytest.param(load_digits, 150, marks=pytest.mark.slow), (load_wine, 100)]
)
def test_it_is_far_below_one_where_classes_are_clean_and_predictions_gain(load, n):
    X, y = load(return_X_y=True)
    A, B, a, b = train_test_split(X, y, train_size=n, random_state=0, stratify=y)
    scale = A.std(0) + 1e-9
    tempered = fit(A / scale, a)
    plain = fit(A / scale, a, multi_class="joint")
    assert tempered.variance_temper_ < 0.7 and plain.variance_temper_ is None
    assert 1.0 - log_loss(tempered, B / scale, b) / log_loss(plain, B / scale, b) > 0.1


def test_draws_and_intervals_are_those_of_the_predictions():
    X, y = of_the_model(3, 30, 3)
    est = fit(X, y)
    new = of_the_model(4, 4)[0]
    draws = est.sample_proba(new, 60_000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), est.predict_proba(new), atol=0.02)
    ends = np.moveaxis(np.quantile(draws, [0.05, 0.95], axis=0), 0, -1)
    np.testing.assert_allclose(ends, est.predict_proba_interval(new), atol=0.04)


@pytest.mark.slow
def test_it_is_what_refits_without_a_row_ask_for():
    """The most certain gain: the top of a parabola through the best of a grid."""
    X, y = load_wine(return_X_y=True)
    X, y = ((X - X.mean(0)) / X.std(0))[::5], y[::5]
    est = fit(X, y, kernel=RBF(3.0), hyperparameters="mode", tol=1e-6)
    log_temper, rows = np.arange(-16, 1) / 8.0, np.arange(len(y))
    log_p = np.empty((len(log_temper), len(y)))
    for i in rows:
        one = clone(est).set_params(kernel=est.kernel_, optimizer=None).fit(X, y, rows != i)
        for k, temper in enumerate(np.exp(log_temper)):
            one.variance_temper_ = temper
            log_p[k, i] = one.predict_log_proba(X[[i]])[0, y[i]]
    gain = log_p - log_p[-1]
    error = np.sqrt(len(y)) * gain.std(axis=1)
    density = gain.sum(1) - 2.0 * error - 0.5 * log_temper**2
    near = np.argmax(density) + np.arange(-1, 2)
    bend, slope, _ = np.polyfit(log_temper[near], density[near], 2)
    best = -0.5 * slope / bend
    assert np.log(est.variance_temper_) == pytest.approx(best, abs=0.06)
    assert est.variance_temper_ < 0.9


def test_left_out_rows_have_the_probabilities_that_it_gives():
    """A row that is left out is predicted as a new one, by the temper of all others and its own."""
    X, y = of_the_model(5, 40)
    settings: dict = dict(kernel=RBF(1.0), hyperparameters="mode", tol=1e-6)
    est = fit(X, y, **settings)
    for i in (0, 7, 21):
        weight = np.arange(len(y)) != i
        one = clone(est).set_params(kernel=est.kernel_, optimizer=None).fit(X, y, weight)
        one.variance_temper_ = est.variance_temper_
        proba = one.predict_proba(X[[i]])[0, np.searchsorted(one.classes_, y[i])]
        assert est.loo_proba_[i] == pytest.approx(proba, abs=0.02)


def test_only_learned_kernels_of_several_joint_classes_have_one():
    X, y = of_the_model(6, 30)
    assert fit(X, y, kernel=RBF(1.0), optimizer=None).variance_temper_ is None
    assert fit(X, y, multi_class="one_vs_rest", hyperparameters="mode").variance_temper_ is None
    assert fit(X, y == 0).variance_temper_ is None


def test_partitions_are_the_rows_together(few_rows_are_many):
    X, y = of_the_model(7, 90, 3)
    order = np.argsort(X[:, 0])
    X, y = X[order], y[order]
    settings: dict = dict(inducing_points=X[::6], learn_inducing=False, max_iter=60, tol=1e-6)
    whole = fit([(X, y)], None, **settings)
    parts = fit([(X[:35], y[:35]), (X[35:], y[35:])], None, **settings)
    assert whole.method_ == "sparse" and whole.multi_class_ == "joint"
    assert whole.variance_temper_ is not None
    assert parts.variance_temper_ == pytest.approx(whole.variance_temper_, rel=0.02)
    np.testing.assert_allclose(parts.loo_proba_, whole.loo_proba_, atol=0.01)


def test_points_that_are_the_rows_have_the_temper_of_dense_sites(monkeypatch):
    monkeypatch.setattr(LIMITS, "averaged", 50)
    X, y = load_wine(return_X_y=True)
    X, y = ((X - X.mean(0)) / X.std(0))[::3], y[::3]
    points = fit(X, y, inducing_points=X, learn_inducing=False, tol=1e-5, jitter=1e-9)
    assert points.method_ == "sparse" and points.multi_class_ == "joint"
    monkeypatch.setattr("sklearn_ep.gaussian_process._base.takes_temper", lambda estimator: True)
    dense = fit(X, y, kernel=points.kernel_, optimizer=None, method="dense", tol=1e-5)
    assert points.variance_temper_ < 0.95
    assert points.variance_temper_ == pytest.approx(dense.variance_temper_, rel=0.01)
    np.testing.assert_allclose(points.loo_proba_, dense.loo_proba_, atol=0.005)
