"""The forest of a stack: out-of-bag probabilities, weights as repeated rows, and its trees."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import make_classification
from sklearn.ensemble import ExtraTreesClassifier

from sklearn_ep import BayesianStackingClassifier

SMALL = BayesianStackingClassifier().fit([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1])
OutOfBagForest = type(SMALL.named_estimators_["forest"])


def data(n=400, n_classes=2, seed=0):
    return make_classification(n, 6, n_informative=4, n_classes=n_classes, random_state=seed)


def log_loss(model, X, y):
    return -np.mean(model.predict_log_proba(X)[np.arange(len(y)), y])


@pytest.mark.parametrize("n_classes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_out_of_bag_probabilities_foretell_those_of_new_rows(n_classes):
    foretold, found = [], []
    for seed in range(4):
        X, y = data(1400, n_classes, seed)
        forest = OutOfBagForest(0).fit(X[:400], y[:400])
        foretold.append(-np.mean(np.log(forest.loo_proba_)))
        found.append(log_loss(forest, X[400:], y[400:]))
    error = np.std(np.subtract(foretold, found), ddof=1) / 2.0
    assert abs(np.mean(foretold) - np.mean(found)) < max(3.0 * error, 0.02)


def test_a_label_does_not_tell_its_own_probability():
    X, y = data()
    forest = OutOfBagForest(0).fit(X, y)
    for i in (3, 50):
        other = y.copy()
        other[i] = 1 - y[i]
        again = OutOfBagForest(0).fit(X, other)
        assert_allclose(forest.loo_proba_[i] + again.loo_proba_[i], 1.0, atol=0.03)


def test_neither_order_nor_units_of_rows_matter_and_weights_are_repeated_rows():
    X, y = data(200)
    rng = np.random.default_rng(0)
    order, count = rng.permutation(len(y)), rng.integers(0, 4, len(y))
    forest = OutOfBagForest(0).fit(X, y)
    again = OutOfBagForest(0).fit(8.0 * X[order], y[order])
    assert_array_equal(again.predict_proba(8.0 * X), forest.predict_proba(X))
    assert_array_equal(again.loo_proba_, forest.loo_proba_[order])
    weighed = OutOfBagForest(0).fit(X, y, count)
    repeated = OutOfBagForest(0).fit(np.repeat(X, count, axis=0), np.repeat(y, count))
    assert_allclose(weighed.predict_proba(X), repeated.predict_proba(X), rtol=1e-12)
    assert_array_equal(np.isnan(weighed.loo_proba_), count == 0)


def test_it_is_as_good_as_the_forest_of_scikit_learn_and_surer_where_classes_are_apart():
    X, y = data(1400)
    own = OutOfBagForest(0).fit(X[:400], y[:400])
    peer = ExtraTreesClassifier(100, bootstrap=True, max_features=0.5, random_state=0)
    proba = np.clip(peer.fit(X[:400], y[:400]).predict_proba(X[400:]), 0.01, 0.99)
    loss = -np.mean(np.log(proba[np.arange(1000), y[400:]]))
    assert own.slope_ > 1.2
    assert log_loss(own, X[400:], y[400:]) < loss
    assert np.mean(own.predict(X[400:]) == y[400:]) > peer.score(X[400:], y[400:]) - 0.02


def test_labels_that_columns_do_not_tell_leave_the_shares_of_the_classes():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(400, 3)), rng.uniform(size=400) < 0.25
    forest = OutOfBagForest(0).fit(X, y)
    assert forest.slope_ < 1.0
    assert log_loss(forest, rng.normal(size=(400, 3)), (rng.uniform(size=400) < 0.25) + 0) < 0.64
    constant = OutOfBagForest(0).fit(np.ones((40, 2)), np.arange(40) % 4 == 0)
    assert_allclose(constant.predict_proba(np.ones((1, 2)))[0, 1], 0.25, atol=0.05)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e18])
def test_few_rows_and_weights_of_any_size(scale):
    X = np.array([[0.0], [1.0], [2.0]])
    forest = OutOfBagForest(0).fit(X, ["a", "b", "b"], scale * np.array([1.0, 2.0, 0.5]))
    assert np.all(np.isfinite(forest.loo_proba_)) and np.all(forest.loo_proba_ > 0)
    proba = forest.predict_proba([[-1e300], [1e300]])
    assert np.all(np.isfinite(proba))
    assert_allclose(proba.sum(axis=1), 1.0)


def test_many_rows_are_seen_by_a_few_trees_each():
    X, y = data(9000)
    forest = OutOfBagForest(0).fit(X[:8000], y[:8000])
    assert log_loss(forest, X[8000:], y[8000:]) < 0.25
    assert len(forest.trees_.feature) < 100 * 2 * 4300


def test_rows_written_several_times_do_not_tell_of_themselves():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    once, often = (OutOfBagForest(0).fit(X, y, np.full(200, c)) for c in (1.0, 9.0))
    assert np.mean(np.log(once.loo_proba_)) < -0.68
    assert np.mean(np.log(often.loo_proba_)) < -0.68
    both = OutOfBagForest(0).fit(np.vstack([X, X]), np.append(y, 1 - y))
    assert_allclose(both.loo_proba_[:200] + both.loo_proba_[200:], 1.0)
