"""Fitted estimators survive pickle, joblib and skops, and say which version wrote them."""

import io
import pickle

import joblib
import numpy as np
import pytest
from sklearn.base import is_classifier
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)

ESTIMATORS = [
    EPGaussianProcessClassifier(2.0 * RBF(1.0), optimizer=None),
    EPGaussianProcessClassifier(
        2.0 * RBF(1.0), method="sparse", n_inducing=8, optimizer=None, random_state=0
    ),
    RelaxedEPClassifier(2.0 * RBF(1.0), optimizer=None, label_noise=0.1),
    SpikeSlabRegressor(),
    ConvexVariationalLogistic(),
    HierarchicalEPLogistic(),
]
every = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)


def fitted(estimator):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 3))
    z = X[:, 0] + 0.5 * rng.normal(size=50)
    return X, estimator.fit(X, (z > 0).astype(int) if is_classifier(estimator) else z)


def answer(estimator, X):
    return estimator.predict_proba(X) if is_classifier(estimator) else estimator.predict(X)


@every
def test_pickle_and_joblib(estimator):
    X, est = fitted(estimator)
    file = io.BytesIO()
    joblib.dump(est, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(est)), joblib.load(file)):
        np.testing.assert_array_equal(answer(again, X), answer(est, X))
        assert again.get_params().keys() == est.get_params().keys()


@every
def test_a_pickle_of_another_version_warns(estimator):
    state = fitted(estimator)[1].__getstate__()
    state["_sklearn_ep_version"] = "0.0.1"
    with pytest.warns(UserWarning, match=r"saved by sklearn-ep 0\.0\.1"):
        type(estimator)().__setstate__(state)


@every
def test_skops_asks_trust_for_this_package_and_kernels_only(estimator):
    skops = pytest.importorskip("skops.io")
    X, est = fitted(estimator)
    blob = skops.dumps(est)
    kinds = skops.get_untrusted_types(data=blob)
    ours = "sklearn_ep.", "sklearn.gaussian_process.kernels."
    assert kinds and all(kind.startswith(ours) for kind in kinds)
    again = skops.loads(blob, trusted=kinds)
    np.testing.assert_array_equal(answer(again, X), answer(est, X))
