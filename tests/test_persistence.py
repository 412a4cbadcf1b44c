"""Fitted estimators survive pickle, joblib and skops, and say which version wrote them."""

import functools
import importlib
import io
import pickle
import pickletools

import joblib
import numpy as np
import pytest
from sklearn.base import is_classifier
from sklearn.gaussian_process.kernels import RBF

import sklearn_ep
from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep import __version__ as VERSION

ESTIMATORS = [
    EPGaussianProcessClassifier(2.0 * RBF(1.0), optimizer=None),
    EPGaussianProcessClassifier(
        2.0 * RBF(1.0), method="sparse", n_inducing=8, optimizer=None, random_state=0
    ),
    RelaxedEPClassifier(2.0 * RBF(1.0), optimizer=None, label_noise=0.1),
    SpikeSlabRegressor(prior_inclusion=0.3),
    SpikeSlabClassifier(slab_variance=1.0),
    ConvexVariationalLogistic(),
    ConvexVariationalRegressor(),
    HierarchicalEPLogistic(),
    BayesianStackingClassifier(random_state=0),
]
every = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)


@functools.cache
def fitted(estimator):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(36, 3))
    z = X[:, 0] + 0.5 * rng.normal(size=36)
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


def public_names(last):
    """Names at the top and of kernels, with what stands before the last part of each."""
    top = {f"sklearn_ep{last}{name}" for name in sklearn_ep.__all__}
    return top | {f"sklearn_ep.kernels{last}{name}" for name in sklearn_ep.kernels.__all__}


@every
def test_skops_asks_trust_for_public_names_only(estimator):
    skops = pytest.importorskip("skops.io")
    X, est = fitted(estimator)
    blob = skops.dumps(est)
    kinds = set(skops.get_untrusted_types(data=blob))
    ours = {kind for kind in kinds if kind.startswith("sklearn_ep")}
    assert f"sklearn_ep.{type(est).__name__}" in ours
    assert ours <= public_names(".")
    assert all(kind.startswith("sklearn.gaussian_process.kernels.") for kind in kinds - ours)
    again = skops.loads(blob, trusted=sorted(kinds))
    np.testing.assert_array_equal(answer(again, X), answer(est, X))


@every
def test_a_pickle_names_public_classes_only(estimator):
    _, est = fitted(estimator)
    named = set()
    for opcode, text, _ in pickletools.genops(pickle.dumps(est, protocol=0)):
        if opcode.name == "GLOBAL" and text.startswith("sklearn_ep"):
            named.add(text)
    assert f"sklearn_ep {type(est).__name__}" in named
    assert named <= public_names(" ")


def test_a_pickle_of_version_0_1_says_what_to_do():
    """Those name private modules that are no more."""
    old = b"csklearn_ep._dense_posterior\nDensePosterior\n."
    with pytest.raises(ModuleNotFoundError, match=rf"sklearn-ep {VERSION}.*sklearn-ep 0\.1"):
        pickle.loads(old)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("sklearn_ep.nowhere")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "sklearn_ep._engine.likelihoods:nothing",
        "sklearn_ep._engine.partition:load_part",
        "sklearn_ep._engine.partition:Parallel",
        "sklearn_ep._estimator.checks:ClassifierMixin",
        "sklearn_ep.hierarchical._parts:Any",
    ],
)
def test_states_are_built_of_our_own_classes_only(name):
    state = {"__sklearn_ep__": name, "called": True, "args": [], "state": None}
    with pytest.raises(ValueError, match="saved estimator names"):
        EPGaussianProcessClassifier().__setstate__(
            {"_posteriors": [state], "_sklearn_ep_version": VERSION}
        )


@pytest.mark.parametrize("model", [EPGaussianProcessClassifier, RelaxedEPClassifier])
def test_a_pickled_average_of_processes_holds_no_matrix_of_rows_by_rows(model):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3))
    est = model().fit(X, X[:, 0] + 0.5 * rng.normal(size=120) > 0)
    assert len(est.hyper_weights_) > 1
    assert len(pickle.dumps(est)) < 8 * len(X) ** 2
    est.predict_proba(X)
    saved = pickle.dumps(est)  # what a prediction has made is not kept either
    assert len(saved) < 8 * len(X) ** 2
    loaded = pickle.loads(saved)
    np.testing.assert_array_equal(loaded.predict_proba(X), est.predict_proba(X))
    np.testing.assert_array_equal(loaded.latent_covariance(X[:9]), est.latent_covariance(X[:9]))


def test_what_is_shared_stays_shared():
    rows = np.arange(6.0)[:, None]
    est = EPGaussianProcessClassifier(optimizer=None).fit(rows, rows[:, 0] > 2)
    (shared,) = est.latent_links()
    est.one, est.many, est.other = shared, [shared, (shared,)], {"d": 1}
    again = pickle.loads(pickle.dumps(est))
    assert type(again.one) is type(shared) and again.one is not shared
    assert again.one is again.many[0] is again.many[1][0]
    assert again.other == {"d": 1}
