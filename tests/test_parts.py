"""Partitions in every form that users have them, for all estimators that take them."""

import functools

import joblib
import numpy as np
import pytest
from sklearn.base import is_regressor

from sklearn_ep import (
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)

pd = pytest.importorskip("pandas")

ESTIMATORS = [
    EPGaussianProcessClassifier(n_inducing=6, optimizer=None, random_state=0),
    RelaxedEPClassifier(n_inducing=6, optimizer=None, random_state=0, label_noise=0.1),
    SpikeSlabRegressor(noise_variance=0.1, slab_variance=1.0, prior_inclusion=0.5),
    ConvexVariationalLogistic(hyperparameters="mode"),
    ConvexVariationalRegressor(),
    HierarchicalEPLogistic(tol=0.1),
]
every = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
NAMES = ["height", "weight", "age"]


def frames(estimator, n=45):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3))
    y = X[:, 0] + 0.3 * rng.normal(size=n)
    y = y if is_regressor(estimator) else (y > 0).astype(int)
    return [(pd.DataFrame(X[i::3], columns=NAMES), y[i::3]) for i in range(3)]


def arrays(parts):
    return [(X.to_numpy(), y) for X, y in parts]


def prediction(estimator, X):
    return estimator.predict(X) if is_regressor(estimator) else estimator.predict_proba(X)


@every
def test_names_of_tables_are_kept_and_compared(estimator):
    parts = frames(estimator)
    plain, named = estimator.fit(arrays(parts)), None
    assert not hasattr(plain, "feature_names_in_")
    answer = prediction(plain, parts[0][0].to_numpy())
    named = estimator.fit(parts)
    assert named.feature_names_in_.tolist() == NAMES
    np.testing.assert_array_equal(prediction(named, parts[0][0]), answer)
    with pytest.raises(ValueError, match="feature names"):
        prediction(named, parts[0][0][NAMES[::-1]])
    parts[2] = parts[2][0][NAMES[::-1]], parts[2][1]
    with pytest.raises(ValueError, match="partition 2 differs.*names"):
        estimator.fit(parts)


@every
def test_names_of_files_are_told_to_need_a_loader(estimator):
    with pytest.raises(ValueError, match=r"functools\.partial\(load, name\)"):
        estimator.fit(["first.npz", "second.npz"])


@every
@pytest.mark.parametrize("loaded", [None, {"X": 1, "y": 2}])
def test_a_loader_that_gives_no_pair_is_named(estimator, loaded):
    with pytest.raises(ValueError, match="a partition must be .X, y. or load such a pair"):
        estimator.fit([lambda: loaded])


class CountedRows(np.ndarray):
    """Rows that count how often they are made ready to be sent."""

    n_sent = 0

    def __reduce_ex__(self, protocol):
        CountedRows.n_sent += 1
        return np.array(self).__reduce_ex__(protocol)


@pytest.mark.parametrize("kind", ["arrays", "frames"])
def test_rows_are_sent_to_a_cluster_once(kind, dask_workers):
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(2000, 3)) for _ in range(2)]
    labels = [(X[:, 0] + rng.normal(size=2000) > 0).astype(int) for X in rows]
    if kind == "arrays":
        parts = [(X.view(CountedRows), y) for X, y in zip(rows, labels, strict=True)]
    else:
        parts = [(pd.DataFrame(X), y.view(CountedRows)) for X, y in zip(rows, labels, strict=True)]
    CountedRows.n_sent = 0
    with joblib.parallel_config(backend="dask"):
        est = ConvexVariationalLogistic(hyperparameters="mode").fit(parts)
    assert est.n_passes_ > 5 and CountedRows.n_sent <= 4  # a part, in two stages at most


@every
def test_delayed_values_are_partitions(estimator):
    dask = pytest.importorskip("dask")
    parts = arrays(frames(estimator))
    answer = prediction(estimator.fit(parts), parts[0][0])
    later = [dask.delayed(functools.partial(tuple, part))() for part in parts]
    np.testing.assert_array_equal(prediction(estimator.fit(later), parts[0][0]), answer)
