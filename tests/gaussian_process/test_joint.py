"""Several classes with one joint posterior, dense and through inducing points."""

import warnings

import numpy as np
import pytest
from oracles import oracle, written_out
from sklearn.base import clone
from sklearn.datasets import load_wine, make_classification
from sklearn.gaussian_process.kernels import RBF, CompoundKernel, ConstantKernel
from sklearn.preprocessing import StandardScaler

from sklearn_ep import EPGaussianProcessClassifier

PROBLEMS = oracle("multiclass")["problems"]


def fixed(kernel, tol=1e-9, **kwargs):
    settings = dict(optimizer=None, max_iter=500, max_sweeps=500, random_state=0, method="dense")
    return EPGaussianProcessClassifier(kernel, tol=tol, **{**settings, **kwargs})


def toy(n, n_classes, seed):
    rng = np.random.RandomState(seed)
    X, centres = rng.randn(n, 2), 1.3 * rng.randn(n_classes, 2)
    y = np.argmin(((X[:, None] - centres) ** 2).sum(2) + 0.7 * rng.gumbel(size=(n, n_classes)), 1)
    y[:n_classes] = np.arange(n_classes)
    return X, y


KERNEL = ConstantKernel(3.0) * RBF(1.2)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p['n_classes']}-{p['likelihood']}")
def test_the_fixed_point_and_the_exact_posterior(problem):
    kernel = ConstantKernel(problem["kernel"]["variance"]) * RBF(problem["kernel"]["lengthscale"])
    X, y = np.array(problem["X"]), np.array(problem["y"])
    est = fixed(kernel, likelihood=problem["likelihood"], jitter=problem["jitter"])
    est.set_params(multi_class="joint").fit(X, y)
    proba, ep, exact = est.predict_proba(problem["X_test"]), problem["ep"], problem["exact"]
    close = (1e-5, 1e-6, 1e-5) if problem["likelihood"] == "probit" else (0.02, 3e-3, 3e-3)
    assert est.log_evidence_ == pytest.approx(ep["log_evidence"], abs=close[0])
    np.testing.assert_allclose(proba, ep["proba"], atol=close[1])
    if "loo_proba" in ep:
        np.testing.assert_allclose(est.loo_proba_, ep["loo_proba"], atol=close[2])
    beyond = np.abs(proba - exact["proba"]) - 4 * np.array(exact["proba_se"])
    assert beyond.max() < (0.04 if problem["kernel"]["variance"] > 10 else 0.02)
    assert abs(est.log_evidence_ - exact["log_evidence"]) - 4 * exact["log_evidence_se"] < 0.25


@pytest.mark.parametrize("method", ["dense", "sparse"])
@pytest.mark.parametrize("likelihood", ["probit"])
def test_two_classes_are_the_binary_classifier(method, likelihood):
    X, y = toy(40, 2, 1)
    new = 2 * np.random.RandomState(2).randn(30, 2)
    points = dict(inducing_points=X[:12], learn_inducing=False) if method == "sparse" else {}
    settings = dict(method=method, likelihood=likelihood, **points)
    binary = fixed(KERNEL, **settings).fit(X, y)
    joint = fixed(KERNEL, multi_class="joint", **settings).fit(X, y)
    for name in ("predict_proba", "decision_function"):
        got, want = getattr(joint, name)(new), getattr(binary, name)(new)
        np.testing.assert_allclose(got, want, atol=1e-7)
    assert joint.log_evidence_ == pytest.approx(binary.log_evidence_, abs=1e-5)
    moments = joint.latent_mean_and_variance(new), binary.latent_mean_and_variance(new)
    for got, want in zip(*moments, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    covariances = joint.latent_covariance(new[:4], new), binary.latent_covariance(new[:4], new)
    np.testing.assert_allclose(*covariances, atol=1e-6)
    theta = binary.kernel_.theta + 0.1
    values = [e.log_marginal_likelihood(theta, eval_gradient=True) for e in (joint, binary)]
    np.testing.assert_allclose(values[0][1], values[1][1], atol=1e-4)


def test_auto_leaves_two_classes_as_they_are_and_joins_more():
    X, y = toy(45, 3, 3)
    assert fixed(KERNEL).fit(X, y).multi_class_ == "joint"
    assert isinstance(fixed(KERNEL, multi_class="one_vs_rest").fit(X, y).kernel_, CompoundKernel)
    two = y < 2
    auto, old = (fixed(KERNEL, multi_class=m).fit(X[two], y[two]) for m in ("auto", "one_vs_rest"))
    np.testing.assert_array_equal(auto.predict_proba(X), old.predict_proba(X))


def test_names_of_classes_order_of_rows_and_weights():
    X, y = toy(30, 4, 3)
    new = 2 * np.random.RandomState(4).randn(20, 2)
    est = fixed(KERNEL).fit(X, y)
    proba, order = est.predict_proba(new), np.array([2, 0, 3, 1])
    renamed = fixed(KERNEL).fit(X, order[y])
    np.testing.assert_allclose(renamed.predict_proba(new)[:, order], proba, atol=1e-9)
    rows = np.random.RandomState(5).permutation(30)
    np.testing.assert_allclose(
        fixed(KERNEL).fit(X[rows], y[rows]).predict_proba(new), proba, atol=1e-9
    )
    weight = np.random.RandomState(6).randint(0, 4, 30)
    weight[:4] = 1
    weighted = fixed(KERNEL).fit(X, y, sample_weight=weight)
    repeated = fixed(KERNEL).fit(written_out(X, weight), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.predict_proba(new), repeated.predict_proba(new), atol=1e-9)
    assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, abs=1e-8)
    assert weighted.site_precision_.shape == (4, 30)
    assert np.all(weighted.site_precision_[:, weight == 0] == 0)


def test_latent_values_sum_to_nothing_and_draws_average_to_the_prediction():
    X, y = toy(30, 4, 3)
    new = 2 * np.random.RandomState(4).randn(4, 2)
    for points in ({}, dict(method="sparse", inducing_points=X[:10], learn_inducing=False)):
        est = fixed(KERNEL, **points).fit(X, y)
        mean, var = est.latent_mean_and_variance(new)
        np.testing.assert_allclose(mean.sum(1), 0.0, atol=1e-6)
        cov = est.latent_covariance(new)
        np.testing.assert_allclose(np.einsum("cii->ic", cov), var, rtol=1e-6)
        draws = est.sample_proba(new, n_samples=2000, random_state=0)
        np.testing.assert_allclose(draws.mean(0), est.predict_proba(new), atol=0.03)
        np.testing.assert_allclose(draws.sum(2), 1.0)


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_gradients_are_differences_of_evidences(points, n_classes):
    X, y = toy(10, n_classes, 7)
    given = dict(method="sparse", inducing_points=X[:5], learn_inducing=False) if points else {}
    exact = fixed(KERNEL, multi_class="joint", **given).fit(X, y)
    tol = 1e-9 if n_classes == 2 else 1e-3
    rough = fixed(KERNEL, multi_class="joint", tol=tol, **given).fit(X, y)
    value, step = exact.log_marginal_likelihood, 1e-3
    for theta in (exact.kernel_.theta, exact.kernel_.theta + [4.0, -0.5]):
        slopes = [(value(theta + step * e) - value(theta - step * e)) / 2e-3 for e in np.eye(2)]
        gradient = rough.log_marginal_likelihood(theta, eval_gradient=True)[1]
        np.testing.assert_allclose(gradient, slopes, rtol=1e-3, atol=1e-3)


def test_learning_ends_near_the_top_without_a_warning():
    X, y = toy(80, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        est = EPGaussianProcessClassifier(random_state=0, hyperparameters="mode").fit(X, y)
    assert est.converged_ and est.kernel_.n_dims == 2
    theta = est.kernel_.theta
    around = [
        est.log_marginal_likelihood(np.clip(theta + s * e, *est.kernel_.bounds.T))
        for e in np.eye(2)
        for s in (0.25, -0.25)
    ]
    assert max(around) - est.log_evidence_ < 0.1


def test_left_out_probabilities_are_those_of_refits():
    X, y = toy(40, 3, 10)
    est, refitted = fixed(KERNEL).fit(X, y), []
    for i in range(0, 40, 8):
        one = fixed(KERNEL, tol=1e-6).fit(np.delete(X, i, 0), np.delete(y, i))
        refitted.append(one.predict_proba(X[i : i + 1])[0, y[i]])
    off = np.abs(est.loo_proba_[::8] - refitted)
    assert off.mean() < 0.015 and off.max() < 0.08


@pytest.mark.parametrize("amplitude", [1.0, pytest.param(100.0, marks=pytest.mark.slow), 1000.0])
def test_wide_priors_converge(amplitude):
    X, y = toy(90, 4, 11)
    for labels in (y, np.digitize(X[:, 0], [-0.7, 0.0, 0.7])):
        est = fixed(ConstantKernel(amplitude) * RBF(1.0), tol=1e-6, max_sweeps=80).fit(X, labels)
        assert est.converged_ and np.isfinite(est.log_evidence_)


@pytest.mark.parametrize("likelihood", ["logit", "probit"])
def test_rows_of_weight_below_one_settle(likelihood):
    X, y = load_wine(return_X_y=True)
    X, rows = StandardScaler().fit_transform(X), np.random.default_rng(0).permutation(178)[:90]
    weight = np.random.default_rng(0).exponential(size=90) + 0.05
    model = EPGaussianProcessClassifier(likelihood=likelihood, hyperparameters="mode")
    assert model.fit(X[rows], y[rows], sample_weight=weight).converged_


def test_rows_of_conflicting_labels_and_far_rows_are_even():
    X, _ = toy(10, 3, 15)
    rows, y = np.repeat(X, 3, 0), np.tile([0, 1, 2], 10)
    est = fixed(ConstantKernel(1e3) * RBF(1.0), tol=1e-4).fit(rows, y)
    np.testing.assert_allclose(est.predict_proba(rows), 1 / 3, atol=1e-6)
    np.testing.assert_allclose(est.predict_proba(rows + 1e4), 1 / 3, atol=1e-6)


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
def test_all_rows_as_inducing_points_are_the_dense_fit(likelihood):
    X, y = toy(40, 3, 12)
    dense = fixed(KERNEL, likelihood=likelihood).fit(X, y)
    points = dict(
        method="sparse", likelihood=likelihood, inducing_points=X, learn_inducing=False, jitter=1e-9
    )
    through = fixed(KERNEL, **points).fit(X, y)
    assert through.method_ == "sparse" and through.inducing_mean_.shape == (3, 40)
    assert through.log_evidence_ == pytest.approx(dense.log_evidence_, abs=1e-7)
    np.testing.assert_allclose(through.predict_proba(X), dense.predict_proba(X), atol=1e-7)
    np.testing.assert_allclose(through.loo_proba_, dense.loo_proba_, atol=1e-7)
    np.testing.assert_allclose(through.site_precision_, dense.site_precision_, atol=1e-7)


def test_a_warm_start_goes_on_from_the_sites():
    X, y = toy(45, 3, 3)
    est = fixed(KERNEL, warm_start=True).fit(X, y)
    first, proba = est.n_sweeps_, est.predict_proba(X)
    assert est.fit(X, y).n_sweeps_ <= 2 < first
    np.testing.assert_allclose(est.predict_proba(X), proba, atol=1e-9)


def test_diagnose_weighs_draws_of_all_classes():
    X, y = toy(40, 3, 3)
    check = fixed(ConstantKernel(1.0) * RBF(2.0)).fit(X, y).diagnose(n_draws=500)
    assert check.ess_share > 0.3


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (dict(site_memory="average", optimizer="auto"), "site_memory"),
        (dict(power=0.5), "power"),
        (dict(n_inducing=1400, method="sparse"), "4000 classes times inducing points"),
    ],
)
def test_settings_that_exclude_a_joint_posterior_are_named(setting, name):
    X, y = toy(45, 3, 3)
    est = fixed(KERNEL, **{"n_inducing": 10, "multi_class": "joint", "method": "auto", **setting})
    with pytest.raises(ValueError, match=name):
        est.fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clone(est).set_params(multi_class="auto", max_iter=2).fit(X, y)
    with pytest.raises(ValueError, match="multi_class"):
        est.set_params(multi_class="softmax").fit(X, y)


@pytest.mark.slow
def test_a_search_that_begins_with_some_rows_ends_at_the_mode_of_all():
    """Six classes with 300 rows: a search that ends at the first step down is twelve nats lower."""
    X, y = make_classification(
        500, 12, n_informative=6, n_redundant=2, n_classes=6, n_clusters_per_class=1,
        class_sep=1.2, random_state=5,
    )  # fmt: skip
    rows = np.random.RandomState(0).permutation(500)[:300]
    X, y = StandardScaler().fit_transform(X[rows]), y[rows]
    fits = [
        EPGaussianProcessClassifier(kernel, hyperparameters="mode", random_state=0).fit(X, y)
        for kernel in (1.0 * RBF(10.0), 36.0 * RBF(4.8))
    ]
    assert abs(fits[0].log_evidence_ - fits[1].log_evidence_) < 1.0
