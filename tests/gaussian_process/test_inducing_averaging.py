"""Averages over a kernel through inducing points: exact posteriors, equivalences, streams."""

import copy
import pickle

import joblib
import numpy as np
import pytest
from oracles import oracle
from scipy.stats import norm
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep.gaussian_process._limits import LIMITS

GP = EPGaussianProcessClassifier


def averaged(**settings):
    return GP(method="sparse", hyperparameters="integrate", random_state=0, **settings)


def rows(n, seed=0, n_classes=2):
    """Return rows and labels of a smooth function."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    f = np.sin(1.5 * X[:, 0]) + 0.3 * rng.normal(size=n)
    return X, np.digitize(f, np.quantile(f, np.arange(1, n_classes) / n_classes))


@pytest.mark.parametrize("k", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
def test_all_rows_as_inducing_points_give_the_exact_integral(k):
    """The truth is a grid of both scales with importance sampling of the posterior at each."""
    q = oracle("gp_hyperparameters")["two_scales"][k]
    X, y, new = (np.array(q[name]) for name in ("X", "y", "X_new"))
    clf = averaged(inducing_points=X, learn_inducing=False).fit(X, y)
    np.testing.assert_allclose(clf.predict_proba(new)[:, 1], q["proba"], atol=0.012)
    sd = np.sqrt(clf.latent_mean_and_variance(new)[1])
    np.testing.assert_allclose(sd, q["latent_sd"], rtol=0.1)
    assert clf.log_evidence_ == pytest.approx(q["log_z"], abs=0.05)
    assert clf.hyper_names_ == ("log_variance", "log_length_scale")
    assert clf.hyperparameters_used_ == "integrate"


@pytest.mark.parametrize("n", [90, pytest.param(400, marks=pytest.mark.slow)])
def test_all_rows_as_inducing_points_are_the_dense_average(n):
    X, y = rows(n)
    kernel = ConstantKernel(2.0) * RBF(1.5)
    dense = GP(kernel, method="dense", hyperparameters="integrate").fit(X, y)
    sparse = averaged(kernel=kernel, inducing_points=X, learn_inducing=False).fit(X, y)
    new, _ = rows(50, seed=1)
    np.testing.assert_allclose(sparse.predict_proba(new), dense.predict_proba(new), atol=0.01)
    np.testing.assert_allclose(sparse.loo_proba_, dense.loo_proba_, atol=0.02)
    assert sparse.log_evidence_ == pytest.approx(dense.log_evidence_, abs=0.1)
    np.testing.assert_allclose(sparse.kernel_.theta, dense.kernel_.theta, atol=0.2)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_few_rows_have_the_kernels_of_the_dense_average(monkeypatch):
    """With all rows as inducing points the weights and the answers are the dense ones, too."""
    X, y = rows(105)
    X, new = np.c_[X, X[:, ::-1] ** 2], np.random.default_rng(1).normal(size=(50, 4))
    dense = GP(method="dense").fit(X, y)
    whole = GP(inducing_points=X, jitter=1e-9).fit(X, y)
    np.testing.assert_allclose(whole.hyper_theta_, dense.hyper_theta_, atol=1e-4)
    np.testing.assert_array_equal(whole.hyper_anisotropy_, dense.hyper_anisotropy_)
    np.testing.assert_allclose(whole.loo_proba_, dense.loo_proba_, atol=1e-5)
    few = GP(method="sparse", n_inducing=16, random_state=0)
    assert len(few.fit(X, y).hyper_weights_) > 1
    # whether points stay or move, they follow the dense posterior, the nearer the better they lie
    moved = clone(few).set_params(learn_inducing=True).fit(X, y)
    assert moved.learn_inducing_
    assert np.max(np.abs(moved.inducing_points_ - few.inducing_points_)) > 0.1
    far = {}
    for name, fit in dict(whole=whole, few=few, moved=moved).items():
        np.testing.assert_allclose(fit.hyper_weights_, dense.hyper_weights_, atol=1e-6)
        assert fit.log_evidence_ == pytest.approx(dense.log_evidence_, abs=1e-6)
        assert fit.converged_
        far[name] = np.abs(fit.predict_proba(new) - dense.predict_proba(new)).max()
    assert far["whole"] < 1e-5 and far["moved"] < 0.7 * far["few"] < 0.07
    few.set_params(max_iter=2)  # of passes, which alone are told
    for settings in dict(optimizer="adam"), dict(n_inducing=10), dict(multi_class="joint"):
        assert clone(few).set_params(**settings).fit(X, y).hyperparameters_used_ == "mode"
    monkeypatch.setattr(LIMITS, "averaged_through_points", (104, 100))
    assert few.fit(X, y).hyperparameters_used_ == "mode"


@pytest.mark.parametrize("moved", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_average_of_few_rows_depends_on_their_content_alone(moved):
    X, y = rows(60)
    order, weight = np.random.default_rng(0).permutation(60), np.arange(60) % 3
    few = GP(method="sparse", n_inducing=12, learn_inducing=moved, random_state=0)
    first = few.fit(X, y).predict_proba(X)
    again = copy.deepcopy(few).set_params(warm_start=True)
    fits = {
        "order": clone(few).fit(X[order], y[order]),
        "partitions": clone(few).fit([(X[:40], y[:40]), (X[40:], y[40:])]),
        "warm start": again.fit(X, y),
        "pickle": pickle.loads(pickle.dumps(few)),
    }
    assert len(few.hyper_weights_) > 1
    for name, fit in fits.items():
        np.testing.assert_allclose(fit.predict_proba(X), first, atol=1e-3, err_msg=name)
    repeated = clone(few).fit(np.repeat(X, weight, 0), np.repeat(y, weight)).predict_proba(X)
    weighed = clone(few).fit(X, y, sample_weight=weight).predict_proba(X)
    np.testing.assert_allclose(weighed, repeated, atol=1e-3)
    assert few.log_marginal_likelihood(few.kernel_.theta) <= 0
    more = few.partial_fit(X[:5], y[:5])
    assert np.all(np.isfinite(more.predict_proba(X)))


@pytest.mark.slow
def test_intervals_are_wider_than_at_the_mode_and_cover():
    """Functions drawn from the prior of kernels, seen at few rows."""
    inside = {"mode": [], "integrate": []}
    for seed in range(7):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-2.0, 2.0, (90, 2))
        scale = np.exp(1.5 * rng.normal()) * 4.0
        kernel = ConstantKernel(scale) * RBF(np.sqrt(8.0 / 3.0) * np.exp(rng.normal()))
        f = np.linalg.cholesky(kernel(X) + 1e-8 * scale * np.eye(90)) @ rng.normal(size=90)
        y = f + rng.normal(size=90) > 0
        if len(np.unique(y[:50])) < 2:
            continue
        for how, found in inside.items():
            clf = averaged(n_inducing=25).set_params(hyperparameters=how).fit(X[:50], y[:50])
            draws = clf.sample_proba(X[50:], 200, random_state=0)[:, :, 1]
            below = np.mean(draws < norm.cdf(f[50:]), axis=0)
            found.append(np.mean(np.abs(below - 0.5) < 0.45))
    # over 57 data sets of 60 rows .89 and .76
    assert np.mean(inside["integrate"]) > np.mean(inside["mode"]) + 0.05
    assert np.mean(inside["integrate"]) > 0.8


@pytest.mark.slow
def test_answers_do_not_depend_on_workers_and_hardly_on_partitions():
    X, y = rows(320)
    fits = [
        averaged(n_inducing=8, n_partitions=k, n_jobs=jobs).fit(X, y)
        for k, jobs in ((1, 1), (3, 1), (3, 2))
    ]
    one, three, workers = (clf.predict_proba(X) for clf in fits)
    np.testing.assert_array_equal(three, workers)
    np.testing.assert_allclose(one, three, atol=1e-3)
    parts = averaged(n_inducing=8).fit([(X[i::2], y[i::2]) for i in range(2)])
    assert parts.hyperparameters_used_ == "integrate" and len(parts.hyper_weights_) > 1


def test_inducing_values_are_those_of_the_mixture(monkeypatch):
    monkeypatch.setattr(LIMITS, "several", 149)
    X, y = rows(160)
    clf = averaged(n_inducing=12).fit(X, y)
    mean, var = clf.latent_mean_and_variance(clf.inducing_points_)
    np.testing.assert_allclose(clf.inducing_mean_, mean, atol=1e-3)
    np.testing.assert_allclose(np.diagonal(clf.inducing_cov_), var, rtol=1e-2)
    np.testing.assert_allclose(clf.hyper_weights_.sum(), 1.0)
    again = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(again.predict_proba(X), clf.predict_proba(X))
    assert f"averaged over nodes: {len(clf.hyper_weights_)}" in str(clf.diagnose(n_draws=30))


def test_a_stream_goes_on_from_the_heaviest_node():
    X, y = rows(400)
    first, then = slice(0, 300), slice(300, 400)
    clf = averaged(n_inducing=15).fit(X[first], y[first])
    other = copy.deepcopy(clf).set_params(optimizer=None, hyperparameters="mode")
    heaviest = clf.hyper_theta_[np.argmax(clf.hyper_weights_)]
    kernel = clf.kernel_.clone_with_theta(heaviest)
    with pytest.warns(UserWarning, match="partial_fit"):
        clf.partial_fit(X[then], y[then])
    given = dict(inducing_points=clf.inducing_points_, optimizer=None)
    plain = GP(kernel, method="sparse", random_state=0, **given).fit(X[first], y[first])
    clf = other.partial_fit(X[then], y[then])
    plain.partial_fit(X[then], y[then])
    assert clf.log_evidence_ == pytest.approx(plain.log_evidence_, abs=0.02)
    np.testing.assert_allclose(clf.predict_proba(X), plain.predict_proba(X), atol=1e-3)
    assert clf.hyperparameters_used_ == "mode" and len(clf.hyper_weights_) == 1


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (155, dict(batch_size=50, max_iter=10)),
        (152, dict(learn_inducing=True)),
        pytest.param(225, dict(power=0.5), marks=pytest.mark.slow),
    ],
)
def test_several_classes_share_the_nodes(n, settings, monkeypatch):
    monkeypatch.setattr(LIMITS, "several", 149)
    X, y = rows(n, n_classes=3)
    clf = averaged(n_inducing=12, **settings).fit(X, y)
    assert clf.hyper_nodes_.shape == (len(clf.hyper_weights_), 2) and len(clf.hyper_weights_) > 1
    assert clf.inducing_mean_.shape == (3, 12)
    given = dict(method="sparse", inducing_points=clf.inducing_points_, optimizer=None, tol=1e-4)
    given |= dict(power=settings.get("power", 1.0), multi_class="one_vs_rest")
    kernels = [clf.kernel_.clone_with_theta(theta) for theta in clf.hyper_theta_]
    fits = [GP(kernel, **given).fit(X, y) for kernel in kernels]
    means, variances = zip(*(e.latent_mean_and_variance(X) for e in fits), strict=True)
    mean = np.tensordot(clf.hyper_weights_, means, 1)
    var = np.tensordot(clf.hyper_weights_, np.array(variances) + (means - mean) ** 2, 1)
    own = clf.latent_mean_and_variance(X)
    assert np.max(np.abs(own[0] - mean) / np.sqrt(var)) < 0.02
    np.testing.assert_allclose(own[1], var, rtol=0.02)


def test_averaged_sites_keep_no_rows_to_average_with():
    X, y = rows(60)
    with pytest.warns(UserWarning, match="site_memory='average'"):
        clf = averaged(n_inducing=10, site_memory="average").fit(X, y)
    assert clf.hyperparameters_used_ == "mode"


def test_label_errors_through_all_rows_are_those_of_the_dense_average():
    X, y = rows(90)
    wrong = np.random.default_rng(1).uniform(size=90) < 0.15
    y = np.where(wrong, 1 - y, y)
    settings = dict(hyperparameters="integrate", rule="ep", tol=1e-4)
    dense = RelaxedEPClassifier(method="dense", **settings).fit(X, y)
    sparse = RelaxedEPClassifier(method="sparse", inducing_points=X, **settings).fit(X, y)
    assert sparse.hyperparameters_used_ == "integrate" and sparse.hyper_names_ == dense.hyper_names_
    new, _ = rows(50, seed=2)
    np.testing.assert_allclose(sparse.predict_proba(new), dense.predict_proba(new), atol=0.02)
    np.testing.assert_allclose(sparse.noise_proba_, dense.noise_proba_, atol=0.03)
    assert sparse.label_noise_ == pytest.approx(dense.label_noise_, abs=0.01)
    assert sparse.no_errors_proba_ == pytest.approx(dense.no_errors_proba_, abs=0.05)
    assert sparse.log_evidence_ == pytest.approx(dense.log_evidence_, abs=0.2)
    np.testing.assert_allclose(
        sparse.inducing_mean_, sparse.latent_mean_and_variance(X)[0], atol=1e-3
    )


def test_label_errors_are_found_through_few_points():
    X, y = rows(300)
    wrong = np.random.default_rng(1).uniform(size=300) < 0.15
    with joblib.parallel_config(backend="threading"):
        fits = [
            RelaxedEPClassifier(
                n_inducing=20,
                hyperparameters="integrate",
                learn_inducing=moved,
                n_jobs=jobs,
                random_state=0,
            ).fit(X, np.where(wrong, 1 - y, y))
            for moved, jobs in ((False, 1), (False, 2), (True, 1))
        ]
    np.testing.assert_array_equal(fits[0].predict_proba(X), fits[1].predict_proba(X))
    for clf in fits:
        assert len(clf.hyper_weights_) > 3 and clf.inducing_points_.shape == (20, 2)
        assert np.mean(clf.noise_proba_[wrong]) > np.mean(clf.noise_proba_[~wrong]) + 0.3
        assert abs(clf.label_noise_ - 0.15) < 0.06


@pytest.mark.parametrize(
    ("n", "points"),
    [(161, 130), *(pytest.param(n, 400, marks=pytest.mark.slow) for n in (501, 1001))],
)
def test_label_errors_of_many_rows_go_through_points_without_a_step(n, points, monkeypatch):
    monkeypatch.setattr(LIMITS, "averaged", n - 1)
    assert LIMITS.points_errors[1] == 400
    monkeypatch.setattr(LIMITS, "points_errors", (100, points))
    if n < 300:
        monkeypatch.setattr(LIMITS, "several", 149)
        monkeypatch.setattr(LIMITS, "lattice_errors", (149, 300))
    X, y = rows(n)
    y = np.where(np.random.default_rng(1).uniform(size=n) < 0.15, 1 - y, y)
    through = RelaxedEPClassifier(random_state=0).fit(X, y)
    assert through.method_ == "sparse" and through.hyperparameters_used_ == "integrate"
    assert len(through.inducing_points_) == points and through.converged_
    dense = RelaxedEPClassifier(method="dense", random_state=0).fit(X, y)
    new, _ = rows(200, seed=2)
    np.testing.assert_allclose(through.predict_proba(new), dense.predict_proba(new), atol=0.04)
    assert through.label_noise_ == pytest.approx(dense.label_noise_, abs=0.01)
