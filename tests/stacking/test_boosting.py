"""The boosted part of a stack: left-out probabilities, weights as repeated rows, its thresholds."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier

from sklearn_ep import BayesianStackingClassifier

SMALL = BayesianStackingClassifier().fit([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1])
CrossFittedBoosting = type(SMALL.named_estimators_["boosting"])


def data(n=400, n_classes=2, seed=0):
    return make_classification(n, 6, n_informative=4, n_classes=n_classes, random_state=seed)


def log_loss(model, X, y):
    return -np.mean(model.predict_log_proba(X)[np.arange(len(y)), y])


@pytest.mark.parametrize("n_classes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_left_out_probabilities_foretell_those_of_new_rows_or_are_too_low(n_classes):
    foretold, found = [], []
    for seed in range(4):
        X, y = data(1400, n_classes, seed)
        model = CrossFittedBoosting(0).fit(X[:400], y[:400])
        foretold.append(-np.mean(np.log(model.loo_proba_)))
        found.append(log_loss(model, X[400:], y[400:]))
    error = np.std(np.subtract(foretold, found), ddof=1) / 2.0
    # a member has two thirds of the rows, and there are three for a new row
    assert -2.0 * error < np.mean(foretold) - np.mean(found) < 0.12


def test_a_label_does_not_tell_its_own_probability():
    X, y = data()
    model = CrossFittedBoosting(0).fit(X, y)
    for i in (3, 50):
        other = y.copy()
        other[i] = 1 - y[i]
        again = CrossFittedBoosting(0).fit(X, other)
        assert abs(model.loo_proba_[i] + again.loo_proba_[i] - 1.0) < 0.3


def test_neither_order_nor_units_of_rows_matter_and_weights_are_repeated_rows():
    X, y = data(200)
    rng = np.random.default_rng(0)
    order, count = rng.permutation(len(y)), rng.integers(0, 4, len(y))
    model = CrossFittedBoosting(0).fit(X, y)
    again = CrossFittedBoosting(0).fit(8.0 * X[order], y[order])
    assert_allclose(again.predict_proba(8.0 * X), model.predict_proba(X), rtol=1e-12)
    assert_allclose(again.loo_proba_, model.loo_proba_[order], rtol=1e-12)
    weighed = CrossFittedBoosting(0).fit(X, y, count)
    repeated = CrossFittedBoosting(0).fit(np.repeat(X, count, axis=0), np.repeat(y, count))
    assert_allclose(weighed.predict_proba(X), repeated.predict_proba(X), rtol=1e-9)
    assert_array_equal(np.isnan(weighed.loo_proba_), count == 0)


def test_splits_are_by_ranks_and_predictions_in_the_units_of_columns():
    X, y = data()
    model = CrossFittedBoosting(0).fit(X, y)
    long_tails = CrossFittedBoosting(0).fit(np.exp(4.0 * X), y)
    assert_allclose(long_tails.predict_proba(np.exp(4.0 * X)), model.predict_proba(X), rtol=1e-9)
    assert_array_equal(long_tails.loo_proba_, model.loo_proba_)


@pytest.mark.parametrize("n_classes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_as_good_as_the_boosting_of_scikit_learn(n_classes):
    own, peer = [], []
    for seed in range(3):
        X, y = data(1400, n_classes, seed)
        model = HistGradientBoostingClassifier(max_leaf_nodes=8, random_state=0)
        proba = np.clip(model.fit(X[:400], y[:400]).predict_proba(X[400:]), 1e-6, 1.0)
        peer.append(-np.mean(np.log(proba[np.arange(1000), y[400:]])))
        own.append(log_loss(CrossFittedBoosting(0).fit(X[:400], y[:400]), X[400:], y[400:]))
    assert np.mean(own) < np.mean(peer)


def test_labels_that_columns_do_not_tell_leave_the_shares_of_the_classes():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(400, 3)), rng.uniform(size=400) < 0.25
    model = CrossFittedBoosting(0).fit(X, y)
    assert log_loss(model, rng.normal(size=(400, 3)), (rng.uniform(size=400) < 0.25) + 0) < 0.62
    constant = CrossFittedBoosting(0).fit(np.ones((40, 2)), np.arange(40) % 4 == 0)
    assert_allclose(constant.predict_proba(np.ones((1, 2)))[0, 1], 0.25, atol=0.05)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e18])
def test_few_rows_and_weights_of_any_size(scale):
    X = np.array([[0.0], [1.0], [2.0]])
    model = CrossFittedBoosting(0).fit(X, ["a", "b", "b"], scale * np.array([1.0, 2.0, 0.5]))
    assert np.all(np.isfinite(model.loo_proba_)) and np.all(model.loo_proba_ > 0)
    proba = model.predict_proba([[-1e300], [1e300]])
    assert np.all(np.isfinite(proba))
    assert_allclose(proba.sum(axis=1), 1.0)


def test_rows_written_several_times_do_not_tell_of_themselves():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    often = CrossFittedBoosting(0).fit(X, y, np.full(200, 9.0))
    assert np.mean(np.log(often.loo_proba_)) < -0.68


def test_many_rows_and_one_class_in_a_hundred():
    X, y = make_classification(6000, 8, n_informative=5, weights=[0.99], random_state=1, flip_y=0.0)
    model = CrossFittedBoosting(0).fit(X[:4500], y[:4500])
    rare = np.mean(y[:4500])
    flat = -np.mean(np.log(np.where(y[4500:] == 1, rare, 1.0 - rare)))
    assert log_loss(model, X[4500:], y[4500:]) < 0.9 * flat
