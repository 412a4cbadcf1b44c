"""One BLAS thread in fits and predictions, and the number of before given back."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.datasets import make_classification
from threadpoolctl import threadpool_info, threadpool_limits

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep._engine.gaussian import one_blas_thread
from sklearn_ep.active_learning import scores


def blas_threads(info=None):
    info = threadpool_info() if info is None else info
    return {own["num_threads"] for own in info if own["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def three_threads():
    with threadpool_limits(3, user_api="blas"):
        yield


def test_the_threads_are_given_back():
    with one_blas_thread():
        with one_blas_thread():
            assert blas_threads() == {1}
        assert blas_threads() == {1}
    assert blas_threads() == {3}


def test_the_threads_are_given_back_after_an_error():
    with pytest.raises(ValueError, match="NaN"):
        EPGaussianProcessClassifier().fit([[np.nan], [1.0]], [0, 1])
    assert blas_threads() == {3}


def test_public_methods_have_one_thread():
    class Own(EPGaussianProcessClassifier):
        def answer(self):
            return blas_threads()

    assert Own().answer() == {1}
    assert blas_threads() == {3}


X, Y = make_classification(200, 12, n_informative=5, random_state=0)
MODELS = {
    "points": EPGaussianProcessClassifier(method="sparse", n_inducing=40, random_state=0),
    "label errors": RelaxedEPClassifier(random_state=0),
    "sparse regression": SpikeSlabRegressor(random_state=0),
    "linear": ConvexVariationalLogistic(random_state=0),
    "groups": HierarchicalEPLogistic(random_state=0),
    "stack": BayesianStackingClassifier(random_state=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_the_threads(name):
    model = MODELS[name]
    ask = model.predict if name == "sparse regression" else model.predict_proba
    groups = {"groups": np.arange(200) % 7} if name == "groups" else {}
    threads, found = (1, 3), []
    for number in threads:
        with threadpool_limits(number, user_api="blas"):
            model.fit(X, Y, **groups)
            found.append(ask(X, **groups))
    assert_array_equal(*found)


def test_scores_do_not_depend_on_the_threads():
    model, found = EPGaussianProcessClassifier(random_state=0).fit(X, Y), []
    for number in (1, 3):
        with threadpool_limits(number, user_api="blas"):
            found.append(scores(model, X, strategy="information_gain"))
    assert_array_equal(*found)
