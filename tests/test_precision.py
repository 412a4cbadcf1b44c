"""Predictions of linear models in the precision of the rows, as scikit-learn's own give them."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import BayesianRidge, LogisticRegression

from sklearn_ep import (
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    SpikeSlabRegressor,
)

PEERS = [
    (ConvexVariationalLogistic(1.0), LogisticRegression()),
    (SpikeSlabRegressor(hyperparameters="mode"), BayesianRidge()),
    (ConvexVariationalRegressor(), BayesianRidge()),
]
METHODS = {"predict_proba", "predict_log_proba", "decision_function", "predict"}


def rows(n_classes=2):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    score = X[:, 0] + 0.5 * rng.normal(size=60)
    return X, np.digitize(score, [-0.5, 0.5][: n_classes - 1])


@pytest.mark.parametrize(("ours", "theirs"), PEERS)
@pytest.mark.parametrize("fitted", [np.float32, np.float64])
@pytest.mark.parametrize("asked", [np.float32, np.float64])
def test_predictions_have_the_precision_that_scikit_learn_gives(ours, theirs, fitted, asked):
    X, y = rows()
    labels = y if hasattr(ours, "predict_proba") else y.astype(fitted)
    ours.fit(X.astype(fitted), labels)
    theirs.fit(X.astype(fitted), labels)
    for name in METHODS & set(dir(ours)) & set(dir(theirs)):
        found, wanted = (getattr(e, name)(X.astype(asked)) for e in (ours, theirs))
        assert found.dtype == wanted.dtype, name
    if not hasattr(ours, "predict_proba"):
        mean, std = ours.predict(X.astype(asked), return_std=True)
        assert mean.dtype == std.dtype == ours.predict(X.astype(asked)).dtype


@pytest.mark.parametrize("n_classes", [2, 3])
def test_single_precision_is_rounding_at_the_end(n_classes):
    X, y = rows(n_classes)
    single = X.astype(np.float32)
    low = ConvexVariationalLogistic(1.0).fit(single, y)
    high = ConvexVariationalLogistic(1.0).fit(single.astype(float), y)
    for name in METHODS:
        found, wanted = (getattr(e, name)(single) for e in (low, high))
        np.testing.assert_array_equal(found, wanted.astype(found.dtype))


def test_responses_in_single_precision_are_fitted_in_double_precision():
    X, y = rows()
    y = (0.1 * y).astype(np.float32)
    low, high = (SpikeSlabRegressor(hyperparameters="mode").fit(X, t) for t in (y, y.astype(float)))
    np.testing.assert_array_equal(low.coef_, high.coef_)


def test_tables_and_sparse_rows_have_a_precision_too():
    pd = pytest.importorskip("pandas")
    X, y = rows()
    for single, double in (
        (pd.DataFrame(X.astype(np.float32)), pd.DataFrame(X)),
        (sp.csr_matrix(X.astype(np.float32)), sp.csr_matrix(X)),
    ):
        est = ConvexVariationalLogistic(1.0).fit(single, y)
        assert est.predict_proba(single).dtype == np.float32
        assert est.predict_proba(double).dtype == np.float64
    mixed = pd.DataFrame(X).astype({0: np.float32})
    assert ConvexVariationalLogistic(1.0).fit(mixed, y).predict_proba(mixed).dtype == np.float64


def test_a_gaussian_process_answers_in_double_precision_as_its_peer():
    X, y = rows()
    X = X.astype(np.float32)
    est = EPGaussianProcessClassifier(optimizer=None).fit(X, y)
    assert est.predict_proba(X).dtype == np.float64
