"""A fit that fails, is interrupted or loses its disk leaves everything as it was."""

import copy
import functools
import inspect
import os
import pickle
import signal
import stat
import warnings

import joblib
import numpy as np
import pytest
import scipy.sparse as sp
from joblib.externals.loky.process_executor import TerminatedWorkerError
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
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
from sklearn_ep._engine.likelihoods import Probit

sklearn_callback = pytest.importorskip("sklearn.callback")

ESTIMATORS = [
    EPGaussianProcessClassifier(method="dense", optimizer=None),
    EPGaussianProcessClassifier(method="sparse", n_inducing=10, optimizer=None, random_state=0),
    RelaxedEPClassifier(optimizer=None, label_noise=0.1),
    SpikeSlabRegressor(noise_variance=0.1, slab_variance=1.0, prior_inclusion=0.5),
    SpikeSlabClassifier(slab_variance=1.0, prior_inclusion=0.5, damping=0.5),
    ConvexVariationalLogistic(hyperparameters="mode"),
    ConvexVariationalRegressor(),
    HierarchicalEPLogistic(n_partitions=2),
]
every = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)


def data(n=60):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3))
    return X, (X[:, 0] + rng.normal(size=n) > 0).astype(int)


class RaiseAt:
    """A callback that raises in the middle of a fit."""

    def __init__(self, error, at=2):
        self.error, self.at, self.seen = error, at, 0

    def setup(self, estimator, context):
        self.seen = 0

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        self.seen += context.parent is not None
        if self.seen == self.at:
            raise self.error

    def on_fit_task_end(self, estimator, context):
        return False


@every
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")], ids=repr)
def test_an_interrupted_fit_leaves_the_last_one(estimator, error):
    X, y = data()
    est = clone(estimator).set_params(tol=1e-9, max_iter=60)
    if hasattr(est, "damping"):
        est.set_params(damping=0.5)
    est.fit(X, y)
    before, prediction = dict(vars(est)), est.predict(X)
    est.set_callbacks(RaiseAt(error))
    with pytest.raises(type(error)):
        est.fit(2 * X[:40], 1 - y[:40])
    est.set_callbacks()
    after = vars(est)
    assert after.keys() == before.keys() and all(after[k] is before[k] for k in before)
    np.testing.assert_array_equal(est.predict(X), prediction)


@every
def test_an_interrupted_first_fit_leaves_an_unfitted_estimator(estimator):
    X, y = data()
    est = clone(estimator).set_callbacks(RaiseAt(KeyboardInterrupt(), at=1))
    with pytest.raises(KeyboardInterrupt):
        est.fit(X, y)
    with pytest.raises(NotFittedError):
        est.predict(X)


def grouped():
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(8), 15)
    X = rng.normal(size=(120, 2))
    y = (X[:, 0] + rng.normal(size=8)[groups] + rng.logistic(size=120) > 0).astype(int)
    return X, y, groups


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    X, y, groups = grouped()
    path = tmp_path / "state.npz"
    est = HierarchicalEPLogistic(n_partitions=2).fit(X, y, groups, checkpoint=path)
    old = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    again = clone(est)
    with pytest.raises(OSError, match="No space"):
        again.fit(X, y, groups, checkpoint=path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["state.npz"]
    with pytest.raises(NotFittedError):
        again.predict(X)


def save_often(path):
    """Fit by many short steps, each of which is saved; going on from what the other has saved."""
    X, y, groups = grouped()
    slow = HierarchicalEPLogistic(n_partitions=2, damping=0.2, tol=1e-12, max_iter=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return slow.fit(X, y, groups, checkpoint=path).coef_


@pytest.mark.slow
def test_checkpoints_of_two_processes_do_not_meet(tmp_path):
    """The file is always one of those that were written, and nobody but its owner reads it."""
    path = tmp_path / "state.npz"
    for planted in ("state.npz.partial", "elsewhere"):
        (tmp_path / planted).write_text("of somebody else")
    with joblib.parallel_config(backend="loky"):
        found = joblib.Parallel(2)(joblib.delayed(save_often)(path) for _ in range(2))
    np.testing.assert_allclose(*found, atol=0.05)
    np.testing.assert_allclose(save_often(path), found[0], atol=0.05)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "state.npz.partial").read_text() == "of somebody else"
    assert len(os.listdir(tmp_path)) == 3


def test_a_checkpoint_without_a_folder_is_named_before_work(tmp_path):
    X, y, groups = grouped()
    for path in (tmp_path / "missing" / "state.npz", tmp_path, "", tmp_path / (250 * "n"), 3):
        with pytest.raises(ValueError, match="checkpoint=.*cannot be written"):
            HierarchicalEPLogistic().fit(X, y[:-1], groups, checkpoint=path)


@pytest.mark.parametrize("content", [b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_a_corrupt_checkpoint_is_named_and_never_unpickled(tmp_path, content):
    X, y, groups = grouped()
    path = tmp_path / "state.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="checkpoint"):
        HierarchicalEPLogistic(n_partitions=2).fit(X, y, groups, checkpoint=path)


def test_a_checkpoint_with_pickled_objects_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.kill, (os.getpid(), signal.SIGKILL))

    X, y, groups = grouped()
    path = tmp_path / "state.npz"
    np.savez(path, site_precision=np.array([Bomb()], dtype=object))
    with pytest.raises(ValueError, match="checkpoint"):
        HierarchicalEPLogistic(n_partitions=2).fit(X, y, groups, checkpoint=path)


def load_or_die(X, y, main):
    """Load a part in the main process; kill the process that loads it anywhere else."""
    if os.getpid() != main:
        os.kill(os.getpid(), signal.SIGKILL)
    return X, y


# in less time the map over workers is asked the same, in the tests of the engine
@pytest.mark.slow
@pytest.mark.parametrize("k", [1, -1], ids=["sparse GP", "hierarchical"])
# joblib's own resource tracker may warn of the files that the dead worker held
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_killed_worker_ends_the_fit_with_an_error(k):
    X, y = data()
    est = clone(ESTIMATORS[k]).fit(X, y)
    prediction = est.predict_proba(X)
    est.set_params(n_jobs=2)
    parts = [functools.partial(load_or_die, X[i::2], y[i::2], os.getpid()) for i in range(2)]
    with (
        joblib.parallel_config(backend="loky"),
        pytest.raises(TerminatedWorkerError, match="fewer jobs"),
    ):
        est.fit(parts)
    est.set_params(n_jobs=None)
    np.testing.assert_array_equal(est.predict_proba(X), prediction)
    np.testing.assert_allclose(est.fit(X, y).predict_proba(X), prediction, atol=1e-9)


class CopyAt(RaiseAt):
    """A callback that copies and pickles the estimator in the middle of a fit."""

    def __init__(self, at=1):
        super().__init__(None, at)

    def on_fit_task_begin(self, estimator, context):
        self.seen += context.parent is not None
        if self.seen == self.at:
            callbacks = vars(estimator).pop("_skl_callbacks", None)
            self.copies = copy.copy(estimator), pickle.loads(pickle.dumps(estimator))
            if callbacks is not None:
                estimator._skl_callbacks = callbacks


@every
@pytest.mark.parametrize("again", [False, True])
def test_what_is_copied_in_the_middle_of_a_fit_is_not_fitted(estimator, again):
    X, y = data()
    est, watch = clone(estimator), CopyAt()
    if again:
        est.fit(X[:40, :2], y[:40])
    est.set_callbacks(watch).fit(X, y)
    for taken in watch.copies:
        with pytest.raises(NotFittedError):
            taken.predict(X)
    assert est.predict(X).shape == y.shape


@every
def test_every_fit_says_why_it_ended(estimator):
    X, y = data()
    est = clone(estimator).fit(X, y)
    assert est.converged_ and est.stop_reason_ == "converged"
    assert est.history_["residual"][-1] < est.tol
    with pytest.warns(ConvergenceWarning, match="iterations ran out.*max_iter"):
        short = clone(estimator).set_params(max_iter=1, tol=1e-9).fit(X, y)
    assert not short.converged_ and short.stop_reason_ == "max_iter"
    watch = StopAt(2)
    with pytest.warns(ConvergenceWarning, match="a callback asked to stop"):
        asked = clone(estimator).set_params(tol=1e-12).set_callbacks(watch).fit(X, y)
    assert not asked.converged_ and asked.stop_reason_ == "asked" and asked.n_iter_ == 2


class StopAt(RaiseAt):
    """A callback that asks to stop after some iterations."""

    def __init__(self, at):
        super().__init__(None, at)

    def on_fit_task_begin(self, estimator, context):
        self.seen += context.parent is not None

    def on_fit_task_end(self, estimator, context):
        return context.parent is not None and self.seen == self.at


@every
def test_diagnose_is_called_alike_and_refuses_labels_it_has_not_seen(estimator):
    X, y = data()
    est = clone(estimator).fit(X, y)
    expected = inspect.signature(ESTIMATORS[0].diagnose)
    assert inspect.signature(est.diagnose) == expected
    found = est.diagnose(50, 0, X=X, y=y)
    assert found.converged and "fixed point" in str(found)
    if hasattr(est, "classes_"):
        with pytest.raises(ValueError, match="not seen in fit"):
            est.diagnose(X=X, y=y + 1)
    with pytest.raises(ValueError, match="without X"):
        est.diagnose(y=y)
    with pytest.raises(ValueError, match="n_draws"):
        est.diagnose(3)


class Peek(RaiseAt):
    """A callback that predicts by the model so far at the end of every iteration."""

    def __init__(self, X):
        super().__init__(None)
        self.X, self.predicted = X, []

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context, *, fitted_estimator):
        if context.parent is not None:
            self.predicted.append(fitted_estimator.predict(self.X))
            proba = getattr(fitted_estimator, "predict_proba", fitted_estimator.predict)(self.X)
            assert np.all(np.isfinite(proba))
        return False


@every
def test_the_model_so_far_predicts_after_every_iteration(estimator):
    X, y = data()
    peek = Peek(X)
    est = clone(estimator).set_params(tol=1e-8).set_callbacks(peek).fit(X, y)
    assert len(peek.predicted) == est.n_iter_
    np.testing.assert_allclose(peek.predicted[-1], est.predict(X), atol=1e-10)


FLAGS = {"verbose": "verbose must be", "fit_intercept": "fit_intercept must be"}


@every
def test_flags_of_the_wrong_type_are_named_before_work(estimator):
    X, y = data()
    for name in FLAGS.keys() & estimator.get_params():
        for value in (np.array([1, 2]), "x", None):
            est = clone(estimator).set_params(**{name: value})
            with pytest.raises((TypeError, ValueError), match=FLAGS[name]):
                est.fit(X, y)
            assert not hasattr(est, "n_features_in_")


EXPORTED = [getattr(sklearn_ep, name) for name in sklearn_ep.__all__]
PUBLIC = [kind for kind in EXPORTED if inspect.isclass(kind)]
WRONG = {"text": "text", "nan": np.nan, "mixed list": [1, "text"], "object": object()}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_no_parameter_takes_what_is_right_for_none(kind, name):
    X, y = data(12)
    for parameter in inspect.signature(kind).parameters:
        est = kind(**{parameter: WRONG[name]})
        by_groups = kind is HierarchicalEPLogistic and parameter != "group_column"
        with pytest.raises((TypeError, ValueError), match=parameter) as told:
            est.fit(X, y, **({"groups": np.arange(12) % 3} if by_groups else {}))
        assert any(word in str(told.value) for word in ("must", "give", "Expected")), told.value


@pytest.mark.parametrize(
    "estimator",
    [
        EPGaussianProcessClassifier(inducing_points=3),
        EPGaussianProcessClassifier(inducing_points=[1.0, 2.0]),
        EPGaussianProcessClassifier(jitter=np.inf),
        EPGaussianProcessClassifier(copy_X_train=1),
        RelaxedEPClassifier(latent_noise=np.inf),
        SpikeSlabRegressor(noise_starts=None),
        SpikeSlabRegressor(random_state=-1),
        ConvexVariationalLogistic(class_weight=[1.0, 2.0]),
        ConvexVariationalRegressor(prior_operator=3),
        HierarchicalEPLogistic(refine=0),
        BayesianStackingClassifier(estimators=3),
        BayesianStackingClassifier(cv=1),
        BayesianStackingClassifier(cv=[]),
        BayesianStackingClassifier(cv=[(1, 2)]),
        BayesianStackingClassifier(verbose="text"),
    ],
    ids=repr,
)
def test_values_of_the_wrong_kind_are_named(estimator):
    X, y = data(12)
    (parameter,) = (
        name
        for name, value in inspect.signature(type(estimator)).parameters.items()
        if repr(getattr(estimator, name)) != repr(value.default)
    )
    with pytest.raises((TypeError, ValueError), match=f"^{parameter}"):
        estimator.fit(X, y)


WEIGHTED = [e for e in ESTIMATORS if "sample_weight" in inspect.signature(e.fit).parameters]


@pytest.mark.parametrize("estimator", WEIGHTED, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("far", "near", "match"),
    [
        (1j, 1.0, "sample_weight must hold real"),
        (1e200, 1.0, "sample_weight goes from"),
        (1e300, 1e300, "sample_weight goes from"),
    ],
)
def test_weights_that_cannot_be_are_named(estimator, far, near, match):
    X, y = data()
    with pytest.raises(ValueError, match=match):
        clone(estimator).fit(X, y, sample_weight=np.where(y > 0, far, near))


@pytest.mark.parametrize(
    "estimator", [EPGaussianProcessClassifier(), BayesianStackingClassifier(random_state=0)]
)
def test_weights_of_sum_one_are_told_once(estimator):
    X, y = data()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        clone(estimator).fit(X, y, sample_weight=np.full(len(y), 1.0 / len(y)))
    told = [str(w.message) for w in told if "sample_weight" in str(w.message)]
    assert len(told) == 1 and told[0].startswith(type(estimator).__name__)
    assert f"multiply them by {len(y)}" in told[0]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("error", [FloatingPointError, np.linalg.LinAlgError])
def test_a_numerical_failure_names_the_data_only_where_they_explain_it(by_name, error):
    class Failing(Probit):
        def tilted(self, y, mean, var):
            raise error("overflow")

    clf = EPGaussianProcessClassifier(RBF(1.0), likelihood=Failing(), optimizer=None)
    X, y = data()
    even, far = np.ones(len(X)), np.where(y > 0, 1.0, 1e9)
    for rows, weight, match in (
        (X, None, "so that the model is to blame"),
        (X, even, "so that the model is to blame"),
        (X, far, "sample_weight differs by a factor of a million"),
        (X * [1.0, 1e8, 1.0], None, "columns of X are very large, differ in size"),
        (X + 1e9, even, "far from zero for their spread: standardise"),
        (np.vstack([np.full(3, 1e7), X[1:]]), None, "a million times as large as half of the"),
    ):
        with pytest.raises(ValueError, match=f"Classifier: overflow.*{match}"):
            if by_name:
                clf.fit(X=rows, y=y, sample_weight=weight)
            else:
                clf.fit(rows, y, weight)


WAYS = {
    "rows": lambda est, X, y: est.fit(X, y),
    "partitions": lambda est, X, y: est.fit([(X[::2], y[::2]), (X[1::2], y[1::2])]),
    "a stream": lambda est, X, y: est.partial_fit(X, y, **STREAMED.get(type(est), {})),
}
STREAMED = {
    model: {"classes": [0, 1]} for model in (EPGaussianProcessClassifier, ConvexVariationalLogistic)
}


def ways_of(estimator):
    """Return the ways to give an estimator its rows."""
    dense = getattr(estimator, "method", "sparse") in ("dense", "auto")
    parted = not isinstance(estimator, SpikeSlabClassifier) and not dense
    streamed = hasattr(estimator, "partial_fit") and not dense
    return ["rows", *["partitions"] * parted, *["a stream"] * streamed]


@pytest.mark.parametrize(
    ("estimator", "way"),
    [(e, way) for e in ESTIMATORS for way in ways_of(e)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_column_in_another_unit_is_named(estimator, way):
    """Models whose prior is in the unit of the columns say which column is far from the others."""
    X, y = data()
    X, est, standard = X * [1.0, 1e6, 1.0], clone(estimator), hasattr(estimator, "standardize")
    if standard:
        clone(estimator).fit(X, y)  # warnings are errors
        est.set_params(standardize=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        WAYS[way](est, X, y)
    told = [str(w.message) for w in told if "StandardScaler" in str(w.message)]
    assert len(told) == (way == "rows" or not standard)
    for message in told:
        assert "column 1 is farthest" in message and type(estimator).__name__ in message


@pytest.mark.parametrize(
    "estimator, words",
    [
        (ConvexVariationalLogistic(prior_variance="auto"), "prior_variance must be 'learn' or a n"),
        (
            ConvexVariationalLogistic(prior="horseshoe"),
            "prior must be .*HorseshoeSite of sklearn_ep",
        ),
        (ConvexVariationalLogistic(laplace_scale="auto"), "laplace_scale must be 'learn' or a num"),
        (ConvexVariationalRegressor(prior="horseshoe"), "prior must be .*HorseshoeSite of sklearn"),
        (ConvexVariationalRegressor(noise_variance="learn"), "noise_variance must be 'auto' or a"),
        (SpikeSlabRegressor(slab_variance="learn"), "slab_variance must be 'auto' or a number"),
        (SpikeSlabRegressor(noise_variance=None), "noise_variance must be 'auto' or a number"),
        (RelaxedEPClassifier(label_noise="auto"), "label_noise must be 'learn' or a number"),
        (
            HierarchicalEPLogistic(n_partitions="all"),
            "n_partitions must be 'auto', 'adaptive' or a number",
        ),
        (HierarchicalEPLogistic(prior_scale="auto"), "prior_scale must be a positive number or 3"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_errors_of_parameters_name_all_that_is_allowed(estimator, words):
    X, y = data()
    with pytest.raises((ValueError, TypeError), match=words):
        estimator.fit(X, y)


def test_the_range_of_a_sparse_column_has_a_zero_only_where_it_has_one():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(40, 2)) + [5000.0, 1.0], np.arange(40) % 2
    for kind in (np.asarray, sp.csr_array, sp.csc_array):
        ConvexVariationalLogistic(1.0).fit(kind(X), y)  # a warning would be an error
    X[0, 0] = 0.0
    for kind in (np.asarray, sp.csr_array, sp.csc_array):
        with pytest.warns(UserWarning, match="half the range"):
            ConvexVariationalLogistic(1.0).fit(kind(X), y)
