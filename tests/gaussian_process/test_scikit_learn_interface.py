"""What scikit-learn's classifier takes is taken: optimizers, kernels of objects, thetas, bounds."""

import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import (
    RBF,
    CompoundKernel,
    ConstantKernel,
    GenericKernelMixin,
    Hyperparameter,
    Kernel,
    StationaryKernelMixin,
)

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier

BOTH = [EPGaussianProcessClassifier, RelaxedEPClassifier]
DENSE = dict(method="dense", tol=1e-6)


def toy(n=30, n_classes=2):
    rng = np.random.RandomState(0)
    X = rng.randn(n, 2)
    return X, np.digitize(X[:, 0] + 0.5 * rng.randn(n), [-0.3, 0.5][: n_classes - 1])


class SharedLetters(StationaryKernelMixin, GenericKernelMixin, Kernel):
    """exp(-(letters that only one of two words has) / length)."""

    def __init__(self, length=2.0, length_bounds=(0.1, 100.0)):
        self.length, self.length_bounds = length, length_bounds

    @property
    def hyperparameter_length(self):
        return Hyperparameter("length", "numeric", self.length_bounds)

    def __call__(self, X, Y=None, eval_gradient=False):
        D = np.array([[float(len(set(a) ^ set(b))) for b in (X if Y is None else Y)] for a in X])
        K = np.exp(-D / self.length)
        return (K, (K * D / self.length)[:, :, None]) if eval_gradient else K

    def diag(self, X):
        return np.ones(len(X))


class Tree:
    """An object that is no array of anything."""

    def __init__(self, letters):
        self.letters = letters

    def __iter__(self):
        return iter(self.letters)


WORDS = ["a", "ab", "abc", "bc", "xyz", "xz", "yz", "axyz", "abx", "zzy"]
HAS_Z = np.array(["z" in word for word in WORDS])


@pytest.mark.filterwarnings("ignore:The optimal value")
@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("optimizer", [None, "fmin_l_bfgs_b"])
def test_kernels_of_objects_take_rows_as_they_are(make, optimizer):
    kernel = ConstantKernel(2.0, "fixed") * SharedLetters()
    est = make(kernel, optimizer=optimizer, tol=1e-6)
    rows = np.array(WORDS), [Tree(word) for word in WORDS], [list(f"{word:4}") for word in WORDS]
    proba = clone(est).fit(WORDS, HAS_Z).predict_proba(WORDS)
    for X in rows[:2]:
        np.testing.assert_allclose(clone(est).fit(X, HAS_Z).predict_proba(X), proba, atol=1e-12)
    assert clone(est).fit(rows[2], HAS_Z).predict_proba(rows[2][:3]).shape == (3, 2)
    fitted = clone(est).fit(WORDS, HAS_Z, sample_weight=np.r_[2.0, np.ones(9)])
    again = clone(est).fit([WORDS[0], *WORDS], np.r_[HAS_Z[:1], HAS_Z])
    np.testing.assert_allclose(
        fitted.predict_proba(WORDS), again.predict_proba(WORDS), atol=1e-5 if optimizer else 1e-7
    )
    assert fitted.predict(["zzz", "b"]).tolist() == [True, False]
    assert fitted.latent_covariance(["xz"], WORDS).shape == (1, 10)
    assert fitted.sample_proba(["xz", "b"]).shape == (10, 2, 2)
    assert fitted.diagnose(X=WORDS, y=HAS_Z, sample_weight=np.r_[2.0, np.ones(9)]).converged


def test_kernels_of_objects_are_refused_where_numbers_are_needed():
    est = EPGaussianProcessClassifier(SharedLetters(), optimizer=None)
    points = dict(method="sparse"), dict(batch_size=5), dict(inducing_points=[[0.0]])
    for setting in points:
        with pytest.raises(ValueError, match="inducing points take rows of numbers"):
            clone(est).set_params(**setting).fit(WORDS, HAS_Z)
    with pytest.raises(ValueError, match="inducing points take rows of numbers"):
        RelaxedEPClassifier(SharedLetters(), n_inducing=3).fit(WORDS, HAS_Z)
    for X in (None, csr_array(np.eye(10))):
        with pytest.raises(ValueError, match="X must be a sequence"):
            clone(est).fit(X, HAS_Z)
    with pytest.raises(ValueError, match="partial_fit .* rows of numbers"):
        est.partial_fit(WORDS, HAS_Z, classes=[False, True])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        est.fit(WORDS, HAS_Z[:4])


@pytest.mark.filterwarnings("ignore:The optimal value")
def test_an_optimizer_of_the_user_is_called_as_by_scikit_learn():
    X, y = toy()
    kernel, starts = 1.0 * RBF(1.0), []

    def by_simplex(obj_func, initial_theta, bounds):
        value, gradient = obj_func(initial_theta)
        assert value == obj_func(initial_theta, eval_gradient=False)
        assert gradient.shape == initial_theta.shape and bounds.shape == (2, 2)
        starts.append(initial_theta)
        found = minimize(
            obj_func, initial_theta, args=(False,), bounds=bounds, method="Nelder-Mead"
        )
        return found.x, found.fun

    known = EPGaussianProcessClassifier(kernel, hyperparameters="mode", **DENSE).fit(X, y)
    own = EPGaussianProcessClassifier(kernel, optimizer=by_simplex, n_restarts_optimizer=1, **DENSE)
    own.fit(X, y)
    np.testing.assert_allclose(own.log_evidence_, known.log_evidence_, atol=1e-4)
    assert len(starts) == 2 and own.converged_
    np.testing.assert_array_equal(starts[0], kernel.theta)
    own.set_params(optimizer=lambda f, theta, bounds: (theta, f(theta)[0]))
    own.set_params(multi_class="one_vs_rest").fit(*toy(n_classes=3))
    assert len(own.kernel_.kernels) == 3
    own.set_params(multi_class="joint").fit(*toy(n_classes=3))
    assert own.kernel_.n_dims == 2


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda f, t, b: None,
        lambda f, t, b: t,
        lambda f, t, b: (t[:1], 0.0),
        lambda f, t, b: (t * np.nan, 0.0),
        lambda f, t, b: (t, np.inf),
    ],
)
def test_an_optimizer_that_returns_something_else_is_named(optimizer):
    X, y = toy()
    est = EPGaussianProcessClassifier(1.0 * RBF(1.0), optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer must return"):
        est.fit(X, y)


def test_where_an_optimizer_of_the_user_has_no_place():
    X, y = toy()
    est = EPGaussianProcessClassifier(optimizer=lambda f, t, b: (t, f(t)[0]))
    for setting in (dict(method="sparse"), dict(batch_size=10), dict(inducing_points=X[:3])):
        with pytest.raises(ValueError, match="callable optimizer belongs to method='dense'"):
            clone(est).set_params(**setting).fit(X, y)
    with pytest.raises(ValueError, match="partial_fit"):
        est.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match="optimizer must be one of"):
        RelaxedEPClassifier(optimizer=print).fit(X, y)


@pytest.mark.parametrize("make", BOTH)
def test_one_theta_for_the_kernels_of_all_classes(make):
    X, y = toy(n_classes=3)
    est = make(1.0 * RBF(1.0), optimizer=None, multi_class="one_vs_rest", **DENSE).fit(X, y)
    one = np.log([2.0, 1.5])
    value, gradient = est.log_marginal_likelihood(one, eval_gradient=True)
    whole, each = est.log_marginal_likelihood(np.tile(one, 3), eval_gradient=True)
    assert value == whole
    np.testing.assert_allclose(gradient, each.reshape(3, 2).sum(axis=0))
    with pytest.raises(ValueError, match="theta has shape"):
        est.log_marginal_likelihood(np.zeros(4))


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("n_classes", [2, 3])
def test_theta_may_be_left_in_the_kernel(make, n_classes):
    X, y = toy(n_classes=n_classes)
    est = make(1.0 * RBF(1.0), optimizer=None, **DENSE).fit(X, y)
    at_fit = est.log_marginal_likelihood(eval_gradient=True)[0]
    proba, theta = est.predict_proba(X), np.log([2.0, 1.5])
    value = est.log_marginal_likelihood(theta)
    np.testing.assert_array_equal(est.kernel_.theta, 0.0)
    assert est.log_marginal_likelihood(theta, clone_kernel=False) == value
    np.testing.assert_allclose(est.kernel_.theta, np.tile(theta, len(est.kernel_.theta) // 2))
    np.testing.assert_array_equal(est.predict_proba(X), proba)
    assert est.log_marginal_likelihood(eval_gradient=True)[0] == at_fit


@pytest.mark.parametrize("make", BOTH)
def test_a_compound_kernel_is_refused_by_name(make):
    X, y = toy(n_classes=3)
    for kernel in (CompoundKernel([RBF(1.0)] * 3), CompoundKernel([RBF(1.0)])):
        with pytest.raises(ValueError, match="kernel cannot be a CompoundKernel"):
            make(kernel).fit(X, y)


@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_learning_that_ends_at_a_bound_is_told_of_given_kernels(method):
    X, y = toy()

    def told(kernel, optimizer="fmin_l_bfgs_b"):
        how = dict(method=method, optimizer=optimizer, hyperparameters="mode")
        est = EPGaussianProcessClassifier(kernel, **how)
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            est.fit(X, y)
        assert all(issubclass(w.category, ConvergenceWarning) for w in record)
        return [str(w.message) for w in record]

    narrow = ConstantKernel(1.0, (0.99, 1.01)) * RBF([1.0, 1.0], (1e-3, 1e-2))
    messages = told(narrow)
    assert len(messages) == 2 and all("close to the specified upper" in m for m in messages)
    assert sum("dimension 1 of parameter k2__length_scale" in m for m in messages) == 1
    assert told(narrow, optimizer=None) == []
    assert len(told(ConstantKernel(1.0, "fixed") * RBF(1e-2, (1e-3, 1e-2)))) == 1
    assert told(None) == []
    assert told(1.0 * RBF(1.0)) == []
