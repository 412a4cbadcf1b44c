"""Learning on some of the rows first ends where learning on all of them does."""

import tracemalloc
import weakref
from functools import partial

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.class_sites import JointEP
from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep.gaussian_process._limits import LIMITS
from sklearn_ep.kernels import GroupedRBF

# weights make labels look less noisy than they are, and the amplitude then ends at its bound
pytestmark = pytest.mark.filterwarnings("ignore:The optimal value")


@pytest.fixture(scope="module")
def data():
    X, y = make_classification(330, 4, n_informative=4, n_redundant=0, flip_y=0.1, random_state=1)
    return (X - X.mean(0)) / X.std(0), y


def fit(X, y, length=2.0, **settings):
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(length, (1e-2, 1e3))
    settings = dict(hyperparameters="mode", method="dense") | settings
    return EPGaussianProcessClassifier(kernel, **settings).fit(X, y)


@pytest.mark.parametrize("length", [2.0, np.full(4, 2.0)])
def test_the_evidence_is_that_of_a_search_on_all_rows(data, length, monkeypatch):
    some = fit(*data, length)
    monkeypatch.setattr(LIMITS, "thirds", np.inf)
    whole = fit(*data, length)
    assert some.converged_ and some.log_evidence_ > whole.log_evidence_ - 0.01
    assert np.max(np.abs(some.predict_proba(data[0]) - whole.predict_proba(data[0]))) < 0.01


@pytest.mark.parametrize(
    ("kind", "n_classes", "how"),
    [
        (EPGaussianProcessClassifier, 2, "auto"),
        # nodes of three classes end where a step gains less than a tenth of a nat
        pytest.param(EPGaussianProcessClassifier, 3, "mode", marks=pytest.mark.slow),
        (RelaxedEPClassifier, 2, "auto"),
        pytest.param(RelaxedEPClassifier, 3, "auto", marks=pytest.mark.slow),
    ],
)
def test_weights_choose_as_repeated_rows_where_these_are_many(kind, n_classes, how):
    """139 rows are fewer than sizes at which a fit changes its way, their 359 copies more."""
    X, y = make_classification(
        170, 4, n_informative=3, n_redundant=0, flip_y=0.1, random_state=0, n_classes=n_classes
    )
    count = np.random.default_rng(0).integers(0, 5, 170)
    model = kind(hyperparameters=how, random_state=0)
    weighed = clone(model).fit(X, y, count)
    repeated = clone(model).fit(np.repeat(X, count, 0), np.repeat(y, count))
    np.testing.assert_allclose(weighed.predict_proba(X), repeated.predict_proba(X), atol=1e-3)


def test_neither_order_nor_units_nor_repetition_change_it(data):
    X, y = data[0][:160], data[1][:160]
    first, order = fit(X, y), np.random.default_rng(0).permutation(len(y))
    moved = fit(X[order], y[order])
    np.testing.assert_allclose(moved.predict_proba(X), first.predict_proba(X), atol=1e-6)
    assert first.n_iter_ == moved.n_iter_
    weight = np.random.default_rng(1).integers(1, 3, size=len(y))
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(2.0, (1e-2, 1e3))
    make = EPGaussianProcessClassifier(kernel, hyperparameters="mode", method="dense")
    weighted = make.fit(X, y, sample_weight=weight).predict_proba(X)
    repeated = make.fit(np.repeat(X, weight, axis=0), np.repeat(y, weight)).predict_proba(X)
    np.testing.assert_allclose(weighted, repeated, atol=1e-5)


def test_a_warm_start_goes_on_from_all_rows(data, capsys):
    est = fit(*data, warm_start=True, verbose=1)
    assert "some rows first" in capsys.readouterr().out
    again = est.fit(*data)
    assert again.converged_ and "some rows first" not in capsys.readouterr().out


@pytest.fixture
def few_are_many(monkeypatch):
    monkeypatch.setattr(LIMITS, "some_passes", 300)
    monkeypatch.setattr(LIMITS, "least_passes", 60)


def passes(X, y, weight=None, **settings):
    settings = dict(method="sparse", n_inducing=20, random_state=0, max_iter=60) | settings
    return EPGaussianProcessClassifier(**settings).fit(X, y, sample_weight=weight)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_passes_begin_with_some_rows_and_are_steps_of_a_phase(
    data, few_are_many, monkeypatch, capsys
):
    some = passes(*data, max_iter=150, verbose=1)
    assert some.n_iter_ < 40
    told = capsys.readouterr().out
    assert told.count("some rows first") == 3
    assert told.count("pass") == some.n_iter_ - some.n_sweeps_
    monkeypatch.setattr(LIMITS, "some_passes", np.inf)
    whole = passes(*data, max_iter=150)
    assert some.log_evidence_ > whole.log_evidence_ - 2.0
    difference = some.predict_proba(data[0]) - whole.predict_proba(data[0])
    assert np.mean(np.abs(difference)) < 0.02


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_neither_order_nor_partitions_nor_repetition_change_passes(data, few_are_many):
    (X, y), few = data, dict(max_iter=20)
    first, order = passes(X, y, **few), np.random.default_rng(0).permutation(len(y))
    first = first.predict_proba(X)
    moved = passes(X[order], y[order], **few).predict_proba(X)
    np.testing.assert_allclose(moved, first, atol=1e-6)
    parts = passes(X, y, n_partitions=3, **few).predict_proba(X)
    np.testing.assert_allclose(parts, first, atol=1e-6)
    weight = np.random.default_rng(1).integers(1, 3, size=len(y))
    weighted = passes(X, y, weight, **few).predict_proba(X)
    repeated = passes(np.repeat(X, weight, axis=0), np.repeat(y, weight), **few).predict_proba(X)
    np.testing.assert_allclose(weighted, repeated, atol=1e-5)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("settings", [{}, dict(batch_size=60, max_iter=5)])
def test_learning_in_single_precision_ends_where_double_does(data, settings, monkeypatch):
    double = passes(*data, **settings)
    monkeypatch.setattr(LIMITS, "single_passes", 0)
    single = passes(*data, **settings)
    assert not np.array_equal(single.kernel_.theta, double.kernel_.theta)
    assert abs(single.log_evidence_ - double.log_evidence_) < 0.5
    difference = single.predict_proba(data[0]) - double.predict_proba(data[0])
    assert np.mean(np.abs(difference)) < 0.005


@pytest.fixture
def few_are_averaged(monkeypatch):
    monkeypatch.setattr(LIMITS, "averaged", 200)
    monkeypatch.setattr(LIMITS, "first_rows", 120)


def default_fit(X, y=None, weight=None, **settings):
    settings = dict(n_inducing=30, random_state=0) | settings
    return EPGaussianProcessClassifier(**settings).fit(X, y, sample_weight=weight)


DENSE = {200: 0.2041, 140: 0.1247}  # log losses of the dense fits of this test and a later one


@pytest.mark.parametrize("n", [pytest.param(200, marks=pytest.mark.slow), 201])
def test_one_row_more_keeps_the_lengths_of_the_columns(few_are_averaged, n):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((700, 4))
    y = (np.sin(2.0 * X[:, 0]) + X[:, 1] + 0.3 * rng.standard_normal(700) > 0).astype(int)
    loss = {}
    for m in (n,) if n == 200 else (n, 300):
        clf = EPGaussianProcessClassifier(random_state=0).fit(X[:m], y[:m])
        loss[m] = -np.mean(np.log(clf.predict_proba(X[300:])[np.arange(400), y[300:]]))
        lengths = clf.kernel_.k2.length_scale
        assert clf.method_ == ("dense" if m == 200 else "sparse")
        assert min(lengths[2:]) > 1.5 * max(lengths[:2])
    if n == 200:
        assert loss[200] == pytest.approx(DENSE[200], abs=1e-3)
    else:
        assert loss[201] < DENSE[200] + 0.01 and loss[300] < loss[201]


def test_lengths_with_all_rows_start_from_those_of_some(monkeypatch):
    """Three rings in two of six columns, where the best common length of all is far too short.

    From the ratios of lengths about it the search ends 11 nats below, at a log loss of .36.
    """
    monkeypatch.setattr(LIMITS, "several", 199)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1200, 6))
    radius = np.linalg.norm(X[:, :2], axis=1)
    noisy = radius + 0.1 * rng.standard_normal(1200)
    y = np.searchsorted(np.quantile(radius, [1 / 3, 2 / 3]), noisy)
    clf = EPGaussianProcessClassifier(random_state=0).fit(X[:200], y[:200])
    loss = -np.mean(np.log(clf.predict_proba(X[300:])[np.arange(900), y[300:]]))
    assert clf.log_evidence_ > -112.0 and loss < 0.34


def test_an_intercept_joins_rows_that_are_far_apart_in_single_precision(monkeypatch):
    """Covariances that are too small for it are those of the intercept, not zero."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((160, 2))
    y = (X[:, 0] + 0.5 * rng.standard_normal(160) > -0.8).astype(int)
    X[80:] += 60.0
    kernel = ConstantKernel(4.0) * GroupedRBF(1.0, intercept=1.0)
    own = EPGaussianProcessClassifier(kernel, hyperparameters="integrate", random_state=0)
    single = own.fit(X, y).log_evidence_
    monkeypatch.setattr(LIMITS, "thirds", 1000)
    assert single == pytest.approx(own.fit(X, y).log_evidence_, abs=0.02)


DENSE_LOSS = 0.8472  # of the next test with 150 rows


@pytest.mark.parametrize("n", [pytest.param(150, marks=pytest.mark.slow), 151])
def test_points_of_several_classes_do_not_fit_noise(n, monkeypatch):
    """Classes are thirds of a number, the rest of its row a noisy mixture of two bumps.

    Along the evidence of EP the log loss is .91 there, more than the dense fit has.
    """
    monkeypatch.setattr(LIMITS, "averaged", 150)
    monkeypatch.setattr(LIMITS, "first_rows", 120)
    rng = np.random.default_rng(0)
    bumps = np.maximum(6.0 - np.abs(np.arange(1, 22) - np.array([[7], [15], [11]])), 0.0)
    k, u = rng.integers(3, size=2000), rng.random(2000)[:, None]
    X = u * bumps[k] + (1.0 - u) * bumps[(k + 1) % 3] + rng.standard_normal((2000, 21))
    X = (X - X.mean(0)) / X.std(0)
    y, X = np.digitize(X[:, 10], np.quantile(X[:, 10], [1 / 3, 2 / 3])), np.delete(X, 10, 1)
    clf = EPGaussianProcessClassifier(random_state=0).fit(X[:n], y[:n])
    loss = -np.mean(np.log(clf.predict_proba(X[400:])[np.arange(1600), y[400:]]))
    if n == 150:
        assert clf.method_ == "dense" and loss == pytest.approx(DENSE_LOSS, abs=1e-3)
    else:
        assert clf.method_ == "sparse" and loss < DENSE_LOSS + 0.02


def test_what_some_rows_tell_depends_on_content_alone(data, few_are_averaged):
    X, y = data[0][:205], data[1][:205]
    first, order = default_fit(X, y).predict_proba(X), np.random.default_rng(0).permutation(len(y))
    # in another unit, too
    moved = default_fit(4.0 * X[order], y[order]).predict_proba(4.0 * X)
    parts = default_fit([(X[order[:100]], y[order[:100]]), (X[order[100:]], y[order[100:]])])
    weight = np.random.default_rng(1).integers(1, 3, size=len(y))
    weighed = default_fit(X, y, weight).predict_proba(X)
    repeated = default_fit(np.repeat(X, weight, axis=0), np.repeat(y, weight)).predict_proba(X)
    for other in (moved, parts.predict_proba(X)):
        np.testing.assert_allclose(other, first, atol=1e-5)
    np.testing.assert_allclose(repeated, weighed, atol=1e-5)


def test_one_label_among_some_rows_leaves_the_kernel_to_the_passes(few_are_averaged):
    X = np.random.default_rng(0).standard_normal((210, 2))
    y = np.zeros(210, dtype=int)
    y[np.argmax(X[:, 0])] = 1
    clf = default_fit(X, y)
    assert clf.method_ == "sparse" and np.all(np.isfinite(clf.predict_proba(X)))


def test_a_warm_start_above_the_average_goes_on(data, few_are_averaged):
    rows = data[0][:220], data[1][:220]
    clf = default_fit(*rows, warm_start=True)
    before = clf.log_evidence_
    assert clf.fit(*rows).method_ == "sparse" and clf.log_evidence_ > before - 0.1


@pytest.mark.parametrize(("unit", "n"), [(1e3, None), (1.0, -10)])
def test_other_units_or_rows_start_as_a_first_fit_does(data, few_are_averaged, unit, n):
    X, y = data[0][:220], data[1][:220]
    warm = default_fit(X, y, warm_start=True).fit(unit * X[:n], y[:n])
    cold = default_fit(unit * X[:n], y[:n])
    np.testing.assert_allclose(warm.predict_proba(unit * X), cold.predict_proba(unit * X))


@pytest.mark.parametrize("n", [pytest.param(140, marks=pytest.mark.slow), 141])
def test_several_classes_learn_apart_and_end_jointly(n, monkeypatch):
    monkeypatch.setattr(LIMITS, "averaged", 140)
    monkeypatch.setattr(LIMITS, "first_rows", 100)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((900, 4))
    y = np.argmax(2.0 * np.c_[np.sin(2.0 * X[:, 0]), X[:, 1], np.zeros(900)], axis=1)
    clf = EPGaussianProcessClassifier(random_state=0).fit(X[:n], y[:n])
    loss = -np.mean(np.log(clf.predict_proba(X[300:])[np.arange(600), y[300:]]))
    assert clf.multi_class_ == "joint" and clf.converged_
    if n == 140:
        assert clf.method_ == "dense" and loss == pytest.approx(DENSE[140], abs=1e-3)
        return
    assert clf.method_ == "sparse" and clf.site_precision_.shape == (3, 141)
    lengths = clf.kernel_.k2.length_scale
    assert min(lengths[2:]) > 1.5 * max(lengths[:2])
    assert loss < DENSE[140] + 0.02
    before = clf.predict_proba(X[300:])
    np.testing.assert_allclose(clf.log_marginal_likelihood(clf.kernel_.theta), clf.log_evidence_)
    again = clf.set_params(warm_start=True).fit(X[:141], y[:141]).predict_proba(X[300:])
    assert np.mean(np.abs(again - before)) < 0.02
    more = clf.partial_fit(X[141:180], y[141:180])
    assert more.multi_class_ == "joint" and np.all(np.isfinite(more.predict_proba(X[300:])))


def few_are_as_many(patch):
    """Half as many rows change what a fit does."""
    for name in ("thirds", "several", "lattice"):
        patch.setattr(LIMITS, name, getattr(LIMITS, name) // 2)


@pytest.fixture
def few_have_thirds(monkeypatch):
    few_are_as_many(monkeypatch)


def clean_classes(apart):
    """Three classes so far apart, and what a fit says of their rows."""
    rng, y = np.random.default_rng(2), np.arange(77) % 3
    X = apart * rng.standard_normal((3, 3))[y] + rng.standard_normal((77, 3))
    return X, y, EPGaussianProcessClassifier().fit(X, y).predict_proba(X)


def test_sites_that_acceleration_does_not_settle_are_settled_without_it(
    few_have_thirds, monkeypatch
):
    X, y, proba = clean_classes(3.0)
    solve = JointEP.solve

    def in_vain(self, x, *, tol, max_iter, accelerate, **settings):
        most = 1 if accelerate and tol > 1e-3 else max_iter
        return solve(self, x, tol=tol, max_iter=most, accelerate=accelerate, **settings)

    monkeypatch.setattr(JointEP, "solve", in_vain)
    model = EPGaussianProcessClassifier().fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X), proba, atol=0.02)


def test_a_mode_of_some_rows_at_which_all_do_not_settle_is_left(few_have_thirds, monkeypatch):
    # farther apart the evidence has a ridge of large variances, along which searches end anywhere
    X, y, proba = clean_classes(2.0)
    solve, n_refused = JointEP.solve, 0

    def refusing(self, x, **settings):
        nonlocal n_refused
        if len(self.y) == len(y) and n_refused < 4:  # twice each for a climb and for a search
            n_refused += 1
            raise ImproperPosterior("refused")
        return solve(self, x, **settings)

    monkeypatch.setattr(JointEP, "solve", refusing)
    model = EPGaussianProcessClassifier().fit(X, y)
    assert n_refused == 4
    np.testing.assert_allclose(model.predict_proba(X), proba, atol=0.05)


@pytest.mark.filterwarnings("ignore:EPGaussianProcessClassifier stopped")  # few steps do here
def test_partitions_that_load_are_in_memory_one_after_the_other(monkeypatch):
    """The first row of each was kept as a view, and with it the whole partition."""
    monkeypatch.setattr(LIMITS, "k_means", 50)  # rows that k-means sees at once
    rng, alive, most = np.random.default_rng(0), [], []

    def load(k):
        X = np.random.default_rng(k).standard_normal((40, 3))
        most.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(X))
        return X, (X[:, 0] + 0.3 * rng.standard_normal(40) > 0).astype(int)

    parts = [partial(load, k) for k in range(12)]
    fit(parts, None, method="sparse", n_inducing=10, max_iter=2, max_sweeps=2, random_state=0)
    assert max(most) <= 2  # names of columns are asked for beside the rows


@pytest.mark.filterwarnings("ignore:EPGaussianProcessClassifier stopped")  # few steps do here
def test_some_rows_are_as_many_as_fit_in_memory(monkeypatch):
    """Half of the rows were copied whatever their size, of a memory map larger than memory too."""
    X = np.random.default_rng(0).standard_normal((24_000, 300))  # 58 MB
    y = (X[:, 0] + X[:, 1] > 0).astype(int)
    how = dict(method="sparse", inducing_points=X[:5], max_iter=4, max_sweeps=2, random_state=0)

    def peak():
        tracemalloc.start()
        try:
            fit(X, y, learn_inducing=False, **how)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    half = peak()
    monkeypatch.setattr(LIMITS, "some_entries", 10_000)
    assert peak() < half - 0.4 * X.nbytes
