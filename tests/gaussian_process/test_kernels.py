"""Kernels of structure: derivatives, equivalences, and fits with them."""

import itertools
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep.gaussian_process._kernels import contract, contract_diagonal, cross_covariance
from sklearn_ep.kernels import AdditiveRBF, GroupedRBF

GROUPS = [0, 0, 1, 2, 1]
KERNELS = [
    2.0 * GroupedRBF([1.0, 2.0, 0.7], groups=GROUPS),
    GroupedRBF(1.5, groups=GROUPS) * 2.0,
    2.0 * GroupedRBF([1.0, 2.0, 0.7, 1.1, 3.0]),
    2.0 * AdditiveRBF([1.0, 2.0, 0.7], groups=GROUPS),
    AdditiveRBF([1.0, 2.0, 0.7, 1.1, 3.0], product_share=0.0),
    2.0 * AdditiveRBF(2.0, groups=GROUPS, product_share=0.2),
    2.0 * AdditiveRBF([1.0, 2.0, 0.7], "fixed", GROUPS),
    2.0 * GroupedRBF([1.0, 2.0, 0.7], groups=GROUPS, intercept=0.5),
    AdditiveRBF([1.0, 2.0, 0.7], groups=GROUPS, intercept=2.0) * 2.0,
]
every = pytest.mark.parametrize("kernel", KERNELS, ids=str)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(9, 5)), rng.normal(size=(4, 5)), rng


def differences(value, x, step=1e-5):
    """Derivatives of value(x) in the entries of x, along the last axes."""
    slopes = np.array(
        [
            (value(x + e.reshape(x.shape)) - value(x - e.reshape(x.shape))) / (2 * step)
            for e in step * np.eye(x.size)
        ]
    )
    return slopes


@every
def test_gradients_against_differences(kernel, rows):
    X, Z, rng = rows
    K, tensor = kernel(X, eval_gradient=True)
    of_theta = differences(lambda t: kernel.clone_with_theta(t)(X), kernel.theta)
    assert_allclose(np.moveaxis(tensor, 2, 0), of_theta.reshape(-1, 9, 9), atol=1e-8)
    G, g = rng.normal(size=(9, 9)), rng.normal(size=9)
    assert_allclose(contract(kernel, X, G)[0], np.tensordot(G, tensor, 2), atol=1e-12)
    assert_allclose(contract_diagonal(kernel, X, g), np.einsum("i,iij->j", g, tensor), atol=1e-12)
    G = rng.normal(size=(9, 4))
    of_theta, of_inputs = contract(kernel, X, G, Z, inputs=True)
    value = lambda t: np.sum(G * kernel.clone_with_theta(t)(X, Z))  # noqa: E731
    assert_allclose(of_theta, differences(value, kernel.theta).ravel(), atol=1e-8)
    moved = differences(lambda z: np.sum(G * kernel(X, z)), Z)
    assert_allclose(of_inputs.ravel(), moved, atol=1e-8)
    assert kernel.n_dims == len(kernel.theta) == len(kernel.bounds)


@every
def test_derivatives_of_an_average(kernel, rows):
    X = rows[0]
    cross = cross_covariance(kernel, X)
    K, kept = cross.block(X)
    assert_allclose(K, kernel(X), atol=1e-14)
    tensor = kernel(X, eval_gradient=True)[1]
    assert_allclose(np.stack(list(cross.derivatives(kept, float)), 2), tensor, atol=1e-12)
    together = np.stack(list(cross.derivatives(kept, float, True)), 2)
    assert_allclose(together.sum(axis=2), tensor.sum(axis=2), atol=1e-12)


@every
def test_interface_of_scikit_learn(kernel, rows):
    X, Z, _ = rows
    K = kernel(X)
    assert np.linalg.eigvalsh(K)[0] > 0 and np.array_equal(K, K.T)
    assert_allclose(kernel.diag(X), np.diagonal(K), rtol=1e-14)
    assert_allclose(kernel(X, Z), kernel(np.vstack([X, Z]))[:9, 9:], atol=1e-14)
    for copy in (clone(kernel), pickle.loads(pickle.dumps(kernel))):
        assert copy == kernel and copy is not kernel
        assert_allclose(copy(X), K, rtol=0)
    assert kernel.is_stationary()
    assert b"_structured" not in pickle.dumps(kernel)


def test_one_column_a_group_is_an_rbf(rows):
    X, Z, _ = rows
    lengths = [1.0, 2.0, 0.7, 1.1, 3.0]
    for kernel in (GroupedRBF(lengths), AdditiveRBF(lengths, product_share=1.0)):
        assert_allclose(kernel(X, Z), RBF(lengths)(X, Z), atol=1e-14)


@pytest.mark.parametrize("settings", [{}, dict(method="sparse"), dict(hyperparameters="mode")])
def test_an_intercept_is_a_constant_kernel(settings, rows):
    X, Z, _ = rows
    for kind in (GroupedRBF, AdditiveRBF):
        kernel = 1.3 * kind([1.0, 2.0, 0.7], groups=GROUPS, intercept=2.0)
        as_sum = 1.3 * kind([1.0, 2.0, 0.7], groups=GROUPS) + ConstantKernel(2.6)
        assert_allclose(kernel(X, Z), as_sum(X, Z), rtol=1e-14)
        own, other = (
            EPGaussianProcessClassifier(k, optimizer=None, tol=1e-8, random_state=0, **settings)
            for k in (kernel, as_sum)
        )
        y = X[:, 0] > 0
        assert_allclose(own.fit(X, y).predict_proba(Z), other.fit(X, y).predict_proba(Z), atol=1e-6)
        assert_allclose(own.log_evidence_, other.log_evidence_, atol=1e-6)


def test_an_additive_kernel_is_a_mean_over_columns(rows):
    X, Z, _ = rows
    lengths = np.array([1.0, 2.0, 0.7, 1.1, 3.0])
    of_columns = [RBF(s / np.sqrt(5))(X[:, [k]], Z[:, [k]]) for k, s in enumerate(lengths)]
    expected = 0.7 * np.mean(of_columns, axis=0) + 0.3 * RBF(lengths)(X, Z)
    assert_allclose(AdditiveRBF(lengths, product_share=0.3)(X, Z), expected, atol=1e-14)


def test_indicators_of_a_category_share_a_length_as_in_a_hamming_distance():
    levels = np.random.default_rng(1).integers(0, 4, size=(30, 3))
    indicators = np.hstack([np.eye(4)[column] for column in levels.T])
    lengths = np.array([0.5, 1.0, 3.0])
    differ = levels[:, None] != levels[None]
    hamming = np.exp(-np.sum(differ / lengths**2, axis=2))
    assert_allclose(GroupedRBF(lengths, groups=np.repeat(range(3), 4))(indicators), hamming)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (GroupedRBF(groups=[0, 1]), "groups has shape"),
        (GroupedRBF(groups=[0, 0, 0, 2, 2]), "without a gap"),
        (GroupedRBF([1.0, 2.0], groups=GROUPS), "2 entries for 3 groups"),
        (AdditiveRBF(product_share=1.5), "product_share"),
        (GroupedRBF(intercept=-1.0), "intercept"),
    ],
)
def test_refusals(kernel, message, rows):
    with pytest.raises(ValueError, match=message):
        kernel(rows[0])
    with pytest.raises(ValueError, match="Y is None"):
        GroupedRBF()(rows[0], rows[1], eval_gradient=True)


def additive_rows(n, rng):
    """Rows of two categories and three numbers, of which one of each counts; one-hot."""
    levels, numbers = rng.integers(0, 4, size=(n, 2)), rng.normal(size=(n, 3))
    f = np.array([2.0, -2.0, 2.0, -2.0])[levels[:, 0]] + 2.0 * np.sin(2.0 * numbers[:, 0])
    X = np.hstack([np.eye(4)[levels[:, 0]], np.eye(4)[levels[:, 1]], numbers])
    return X, (f + rng.normal(size=n) > 0).astype(int)


@pytest.mark.parametrize("kind", [GroupedRBF, pytest.param(AdditiveRBF, marks=pytest.mark.slow)])
def test_fits_by_all_methods(kind):
    rng = np.random.default_rng(2)
    X, y = additive_rows(150, rng)
    groups = np.repeat(range(5), [4, 4, 1, 1, 1])
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * kind(np.full(5, 5.0), groups=groups)
    new, labels = additive_rows(500, rng)
    for parameters in (
        dict(),
        dict(method="sparse", n_inducing=45, learn_inducing=True),
        dict(method="sparse", n_inducing=45, optimizer="fmin_l_bfgs_b"),
    ):
        model = EPGaussianProcessClassifier(kernel, random_state=0, **parameters).fit(X, y)
        proba = model.predict_proba(new)[np.arange(500), labels]
        assert -np.mean(np.log(proba)) < 0.5, parameters
        found = model.kernel_.k2
        assert type(found) is kind and found.length_scale[[0, 2]].max() < np.min(
            found.length_scale[[1, 3, 4]]
        )
    assert model.hyperparameters_used_ == "mode"


def test_groups_of_one_column_are_the_default_kernel():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(80, 3))
    y = (X[:, 0] > 0).astype(int)
    fits = [
        EPGaussianProcessClassifier(2.0 * kind(np.full(3, 2.0))).fit(X, y)
        for kind in (RBF, GroupedRBF)
    ]
    assert_allclose(fits[0].predict_proba(X), fits[1].predict_proba(X), atol=1e-6)
    assert fits[1].hyperparameters_used_ == "integrate"


def in_more_columns(X, n_columns, rng):
    """Return rows of the same distances and products in more columns."""
    return X @ np.linalg.qr(rng.normal(size=(n_columns, X.shape[1])))[0].T


WIDE = [
    2.0 * RBF(1.5) + 0.3 * DotProduct(0.5),
    Matern(1.2, nu=1.5) * 2.0 + WhiteKernel(0.1),
    (2.0 * GroupedRBF(1.5, intercept=0.5)) ** 2.0,
    RationalQuadratic(1.5),
]


MODELS = [EPGaussianProcessClassifier, RelaxedEPClassifier]


@pytest.mark.parametrize(
    ("kernel", "model", "n_classes"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (k > 0 and case[1:] != (MODELS[0], 2)))
        for k, kernel in enumerate(WIDE)
        for case in itertools.product([kernel], MODELS, [2, 3])
    ],
)
def test_more_columns_than_rows_of_the_same_distances(kernel, model, n_classes):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(60, 4))
    wide, y = in_more_columns(X, 90, rng), np.digitize(X[:40, 0], [-0.5, 0.5][: n_classes - 1])
    few = model(kernel, optimizer=None, random_state=0).fit(X[:40], y)
    many = model(kernel, optimizer=None, random_state=0).fit(wide[:40], y)
    assert many.n_features_in_ == 90
    assert_allclose(many.predict_proba(wide), few.predict_proba(X), rtol=1e-7)
    assert_allclose(many.loo_proba_, few.loo_proba_, rtol=1e-7)
    if model is EPGaussianProcessClassifier:
        evidence = [m.log_marginal_likelihood(kernel.theta, True) for m in (few, many)]
        for of_few, of_many in zip(*evidence, strict=True):
            assert_allclose(of_many, of_few, rtol=1e-5, atol=1e-6)


def test_more_columns_than_rows_with_lengths_of_their_own():
    rng = np.random.default_rng(1)
    X, lengths = rng.normal(size=(30, 4)), np.geomspace(0.5, 4.0, 40)
    wide, y = np.hstack([X, np.zeros((30, 36))]), X[:, 0] > 0
    for kind in (RBF, GroupedRBF):
        few = EPGaussianProcessClassifier(kind(lengths[:4]), optimizer=None).fit(X, y)
        many = EPGaussianProcessClassifier(kind(lengths), optimizer=None).fit(wide, y)
        assert_allclose(many.predict_proba(wide), few.predict_proba(X), rtol=1e-9)
    groups = np.arange(40) // 4
    few = EPGaussianProcessClassifier(GroupedRBF(2.0), optimizer=None).fit(X, y)
    many = EPGaussianProcessClassifier(GroupedRBF(2.0, groups=groups), optimizer=None).fit(wide, y)
    assert_allclose(many.predict_proba(wide), few.predict_proba(X), rtol=1e-9)


def test_averages_of_more_columns_than_rows():
    rng = np.random.default_rng(2)
    X = rng.normal(size=(80, 4))
    wide, y = in_more_columns(X, 700, rng), X[:50, 0] > 0
    kernel = 1.0 * RBF(2.0)
    few = EPGaussianProcessClassifier(kernel, random_state=0).fit(X[:50], y)
    many = EPGaussianProcessClassifier(kernel, random_state=0).fit(wide[:50], y)
    assert many.log_marginal_likelihood_value_ == pytest.approx(
        few.log_marginal_likelihood_value_, abs=1e-4
    )
    assert_allclose(many.predict_proba(wide), few.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("model", [EPGaussianProcessClassifier, RelaxedEPClassifier])
def test_a_far_origin_changes_nothing_of_more_columns_than_rows(model):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(20, 30))
    y, far = X[:, 0] > 0, 1e-14 * X
    X[:, :2] = 0.0
    far[:, :2] = 1e3, 7.7  # constant columns, large beside what varies
    near, moved = (
        model(RBF(length), optimizer=None).fit(rows, y) for length, rows in ((4.0, X), (4e-14, far))
    )
    assert_allclose(moved.loo_proba_, near.loo_proba_, rtol=1e-6)
    assert_allclose(moved.predict_proba(far), near.predict_proba(X), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*half the range of a column:UserWarning")
@pytest.mark.parametrize(
    ("model", "n_classes"),
    [
        (EPGaussianProcessClassifier(method="sparse", n_inducing=20, random_state=0), 2),
        (EPGaussianProcessClassifier(method="sparse", n_inducing=20, multi_class="joint"), 3),
        (EPGaussianProcessClassifier(method="dense", optimizer=None), 3),
    ],
)
def test_draws_where_prior_variances_are_far_above_those_of_the_posterior(model, n_classes):
    """Linear functions of a column in the hundreds: rounding leaves no Cholesky factor."""
    rng = np.random.default_rng(0)
    X = np.column_stack([5.0 * rng.integers(1, 160, 47), rng.normal(size=47)])
    y = rng.integers(n_classes, size=47)
    fit = clone(model).set_params(kernel=1.0 * DotProduct(1.0), random_state=0).fit(X, y)
    mean = fit.sample_proba(X, 1000, random_state=0).mean(axis=0)
    np.testing.assert_allclose(mean, fit.predict_proba(X), atol=0.08)


@pytest.mark.filterwarnings("ignore:.*half the range of a column:UserWarning")
@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_classes_settle_where_prior_variances_are_1e5_times_those_of_the_posterior(seed):
    rng = np.random.default_rng(seed)
    X = np.column_stack([5.0 * rng.integers(1, 160, 47), rng.normal(size=47)])
    y = rng.integers(3, size=47)
    kw = dict(kernel=1.0 * DotProduct(1.0), method="dense", optimizer=None, multi_class="joint")
    # without a step of refinement rounding keeps residuals at .01 to .05
    fit = EPGaussianProcessClassifier(tol=1e-4, **kw).fit(X, y)
    assert fit.history_["residual"][-1] < 1e-4 and fit.n_iter_ < 30
