"""ConvexVariationalLogistic against oracles, equivalences and hostile data."""

import copy
import functools
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from joblib import parallel_config
from oracles import oracle
from plain_logistic import plain_logistic
from scipy.special import expit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.datasets import make_sparse_logistic

ORACLE = oracle("convex_variational")
TIGHT = dict(tol=1e-9, inner_tol=1e-11, max_iter=300, max_inner_iter=200)
PROBLEMS = ORACLE["posteriors"]["problems"]
SLOW = pytest.mark.slow


def make(q=80, n=6, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((q, n))
    y = (rng.random(q) < expit(scale * X @ rng.standard_normal(n))).astype(int)
    return X, y


def fit(X, y, *args, sample_weight=None, **kw):
    return plain_logistic(*args, **kw).fit(X, y, sample_weight)


def assert_same(a, b, X=None, tol=1e-7):
    """Two fits agree in posterior standard deviations."""
    assert np.max(np.abs(a.coef_ - b.coef_) / a.coef_std_) < tol
    assert np.max(np.abs(np.log(a.coef_std_ / b.coef_std_))) < tol
    assert np.max(np.abs(a.intercept_ - b.intercept_)) < tol
    if X is not None:
        assert np.max(np.abs(a.predict_proba(X) - b.predict_proba(X))) < tol


# ---------------------------------------------------------------------------- truth


@pytest.mark.parametrize("bound", ["local", "kl"])
@pytest.mark.parametrize("k", range(len(PROBLEMS)))
def test_posterior_and_evidence_match_independent_optimisers(k, bound):
    p, post = PROBLEMS[k], ORACLE["posteriors"]
    B, y, w = np.array(p["B"]), np.array(p["y"]), np.array(p["weight"])
    kw = dict(bound=bound, fit_intercept=False, sample_weight=w, **TIGHT)
    e = fit(B, y, p["prior_variance"], **kw)
    truth, kl = p[bound], bound == "kl"
    assert e.converged_
    assert e.log_evidence_ == pytest.approx(
        truth["logZ_bound"], abs=3e-6 * w.sum() + 2e-5 if kl else post["tol_bound"]
    )
    tol = post["tol_kl_mean"] if kl else post["tol_mean"]
    np.testing.assert_allclose(e.coef_[0], truth["mean"], atol=tol)
    cov = e.latent_covariance(np.eye(p["n"]))
    np.testing.assert_allclose(e.coef_std_[0] ** 2, np.diag(cov), rtol=1e-10)
    if "cov" in truth:
        np.testing.assert_allclose(cov, truth["cov"], atol=tol)
    if not kl:
        np.testing.assert_allclose(e.site_precision_, truth["inv_gamma"], atol=post["tol_cov"])
        np.testing.assert_allclose(e.marginal_variance_, truth["z"], rtol=post["tol_cov"])


@pytest.mark.parametrize("k", range(len(PROBLEMS)))
def test_local_bound_is_below_kl_bound_is_below_the_evidence(k):
    p = PROBLEMS[k]
    kw = dict(fit_intercept=False, sample_weight=np.array(p["weight"]))
    local, kl = (
        fit(np.array(p["B"]), np.array(p["y"]), p["prior_variance"], bound=b, **kw).log_evidence_
        for b in ("local", "kl")
    )
    slack = 3e-6 * np.sum(p["weight"]) + 2e-5
    assert local <= kl + slack
    assert kl <= p["exact"]["logZ"] + slack + ORACLE["posteriors"]["tol_exact"]


@pytest.mark.parametrize("bound", ["local", "kl"])
def test_bound_does_not_fall_and_anderson_is_fast(bound):
    rng = np.random.default_rng(3)
    X = rng.standard_normal((20, 40))
    y = (rng.random(20) < 0.5).astype(int)
    kw = dict(bound=bound, fit_intercept=False, tol=1e-6, max_iter=200)
    e = fit(X, y, 100.0, **kw)
    objective = e.history_["objective"]
    assert e.converged_ and e.n_iter_ <= 18
    assert np.all(np.diff(objective) >= -1e-8 * np.abs(objective[-1]))
    assert e.log_evidence_ == objective[-1]


def test_kl_optimum_is_stationary():
    X, y = make(400, 10)
    e = fit(X, y, 2.0, **TIGHT)
    B = np.column_stack([X, np.ones(400)])
    P = np.append(np.full(10, 0.5), 0.01)
    cov = np.linalg.inv(np.diag(P) + B.T * e.site_precision_ @ B)
    u = np.append(e.coef_[0], e.intercept_)
    s, z = B @ u, np.einsum("ij,jk,ik->i", B, cov, B)
    nodes, w = np.polynomial.hermite_e.hermegauss(100)
    f = s[:, None] + np.sqrt(z)[:, None] * nodes
    w = w / w.sum()
    gradient = P * u + B.T @ (expit(f) @ w - y)
    assert np.max(np.abs(np.linalg.cholesky(cov).T @ gradient)) < 1e-5
    np.testing.assert_allclose(e.site_precision_, (expit(f) * expit(-f)) @ w, atol=1e-5)
    np.testing.assert_allclose(e.marginal_variance_, z, rtol=1e-9)
    assert e.effective_dof_ == pytest.approx(11 - P @ np.diag(cov), rel=1e-8)


def test_small_variances_give_the_posterior_mode():
    X, y = make(3000, 3)
    e = fit(X, y, 1.0, **TIGHT)
    mode = LogisticRegression(C=1.0, tol=1e-10).fit(X, y)
    assert np.max(np.abs(e.coef_ - mode.coef_) / e.coef_std_) < 0.05


def test_learnt_prior_is_where_the_evidence_is_largest():
    X, y = make(200, 20, seed=1)
    kw = dict(fit_intercept=False, tol=1e-7, max_iter=200)
    e = fit(X, y, learn_prior=True, **kw)
    v = e.prior_variance_
    assert v == pytest.approx(np.sum(e.coef_**2) / e.effective_dof_, rel=1e-4)
    around = [fit(X, y, v * g, **kw).log_evidence_ for g in (0.9, 1.0, 1.1)]
    assert around[1] >= max(around) - 1e-6
    assert around[1] == pytest.approx(e.log_evidence_, abs=1e-5)


def test_learnt_prior_leaves_the_intercept_alone_and_scales_arrays():
    X, y = make(300, 5, seed=2)
    kw = dict(learn_prior=True, tol=1e-7, max_iter=100)
    a = fit(X, y, **kw)
    b = fit(X * np.arange(1, 6), y, 3.0 / np.arange(1, 6) ** 2, **kw)
    np.testing.assert_allclose(a.prior_variance_, b.prior_variance_ * np.arange(1, 6) ** 2, 1e-4)
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X * np.arange(1, 6)), atol=1e-5)
    assert a.intercept_prior_variance == 100.0


@pytest.mark.parametrize("bound", ["local", "kl"])
def test_learnt_laplace_scale_is_where_the_bound_is_largest(bound):
    X, y = make(100, 8, seed=3)
    kw = dict(prior="laplace", bound=bound, tol=1e-7, max_iter=300)
    e = fit(X, y, laplace_scale="learn", **kw)
    b = e.laplace_scale_
    around = [fit(X, y, laplace_scale=b * g, **kw).log_evidence_ for g in (0.9, 1.0, 1.1)]
    assert around[1] >= max(around) - 1e-6
    assert e.prior_variance_ == pytest.approx(2 * b**2)


def test_laplace_prior_in_one_dimension_against_a_grid():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((30, 1))
    y = (rng.random(30) < expit(x[:, 0])).astype(int)
    t = np.linspace(-8, 8, 20001)
    log_p = -np.logaddexp(0, -np.outer(t, x[:, 0] * (2 * y - 1))).sum(1) - np.abs(t) - np.log(2)
    p = np.exp(log_p)
    evidence = np.log(p.sum() * (t[1] - t[0]))
    p /= p.sum()
    sd = np.sqrt(p @ t**2 - (p @ t) ** 2)
    kw = dict(prior="laplace", fit_intercept=False, tol=1e-7, max_iter=300)
    kl, local = fit(x, y, **kw), fit(x, y, bound="local", **kw)
    assert local.log_evidence_ <= kl.log_evidence_ <= evidence
    assert evidence - kl.log_evidence_ < 0.05
    assert kl.coef_[0, 0] == pytest.approx(p @ t, abs=0.1 * sd)
    assert 0.87 < kl.coef_std_[0, 0] / sd < 1.02


# ---------------------------------------------------------------------------- equivalences


@pytest.mark.parametrize("shape", [(80, 12), (30, 70)])
@pytest.mark.parametrize("solver", ["primal", "dual", "cg"])
def test_solvers_and_kinds_of_input_agree(shape, solver):
    X, y = make(*shape, seed=5)
    X[np.random.default_rng(0).random(X.shape) < 0.5] = 0
    a = fit(X, y, 2.0, **TIGHT)
    # other kinds become the second
    others = (sp.csc_matrix, sp.csr_array) if solver == "primal" and shape[0] > shape[1] else ()
    for kind in (np.asarray, sp.csr_matrix, *others):
        b = fit(kind(X), y, 2.0, solver=solver, **TIGHT)
        assert_same(a, b, tol=1e-6)
        np.testing.assert_allclose(b.predict_proba(kind(X)), a.predict_proba(X), atol=1e-6)
        assert b.log_evidence_ == pytest.approx(a.log_evidence_, abs=1e-7)


@pytest.mark.parametrize("variance", ["exact", "calibrated", "monte_carlo", "lanczos"])
@pytest.mark.parametrize("bound", ["local", "kl"])
def test_weights_are_repetitions_in_any_order(variance, bound):
    X, y = make(60, 5, seed=6)
    copies = np.random.default_rng(1).integers(0, 4, 60)
    order = np.random.default_rng(2).permutation(copies.sum())
    kw = dict(bound=bound, variance=variance, random_state=0)
    a = fit(X, y, sample_weight=copies.astype(float), **kw)
    b = fit(np.repeat(X, copies, 0)[order], np.repeat(y, copies)[order], **kw)
    assert a.n_iter_ == b.n_iter_
    assert_same(a, b, X)
    assert np.all(a.site_precision_[copies == 0] == 0)
    assert np.all(np.isnan(a.marginal_variance_) == (copies == 0))


@pytest.mark.filterwarnings("ignore:.*StandardScaler:UserWarning")
def test_labels_scales_and_class_weights():
    X, y = make(80, 6, seed=7)
    a = fit(X, y, 2.0, **TIGHT)
    flipped = fit(X, np.array(["yes", "no"])[y], 2.0, **TIGHT)
    np.testing.assert_allclose(flipped.coef_, -a.coef_, atol=1e-9)
    assert set(flipped.predict(X)) <= {"yes", "no"}
    scale = np.array([1e-3, 0.5, 1.0, 2.0, 30.0, 1e3])
    b = fit(X * scale, y, 2.0 / scale**2, **TIGHT)
    np.testing.assert_allclose(b.predict_proba(X * scale), a.predict_proba(X), atol=1e-8)
    assert b.log_evidence_ == pytest.approx(a.log_evidence_, abs=1e-6)
    c = fit(X, y, 2.0, class_weight={0: 1.0, 1: 2.5}, **TIGHT)
    assert_same(c, fit(X, y, 2.0, sample_weight=np.where(y, 2.5, 1.0), **TIGHT), X)


def test_several_classes_are_one_versus_rest_with_shared_probes():
    X, _ = make(120, 4, seed=8)
    y = np.array(["a", "b", "c"])[np.argmax(X[:, :3], axis=1)]
    kw = dict(variance="calibrated", random_state=0)
    e = fit(X, y, **kw)
    each = [fit(X, y == k, **kw) for k in "abc"]
    mean, var = e.latent_mean_and_variance(X)
    assert e.coef_.shape == e.coef_std_.shape == (3, 4) and e.intercept_.shape == (3,)
    for k, binary in enumerate(each):
        m, v = binary.latent_mean_and_variance(X)
        np.testing.assert_allclose(mean[:, k], m, rtol=1e-12)
        np.testing.assert_allclose(var[:, k], v, rtol=1e-12)
    p = np.stack([b.predict_proba(X)[:, 1] for b in each], 1)
    np.testing.assert_allclose(e.predict_proba(X), p / p.sum(1, keepdims=True), rtol=1e-9)
    with parallel_config(backend="threading"):
        two = plain_logistic(n_jobs=2, **kw).fit(X, y)
    np.testing.assert_array_equal(two.coef_, e.coef_)


def test_flat_intercept_is_the_limit_of_a_wide_one():
    X, y = make(100, 3, seed=9)
    flat = fit(X, y, intercept_prior_variance=np.inf, **TIGHT)
    wide = fit(X, y, intercept_prior_variance=1e7, **TIGHT)
    assert_same(flat, wide, X, tol=1e-5)
    assert np.isnan(flat.log_evidence_) and np.isfinite(wide.log_evidence_)
    assert_same(flat, fit(X, y, intercept_prior_variance=np.inf, solver="cg", **TIGHT), tol=1e-6)


def test_warm_start_continues():
    X, y = make(80, 10, seed=10)
    e = plain_logistic(warm_start=True, tol=1e-7).fit(X, y)
    first, coef = e.n_iter_, e.coef_
    e.fit(X, y)
    assert e.n_iter_ < first
    np.testing.assert_allclose(e.coef_, coef, atol=1e-6)


@pytest.mark.parametrize("prior", ["gaussian", "laplace"])
@pytest.mark.parametrize("d", [10, 90])
def test_warm_start_at_other_rows_ends_where_a_cold_one_does_but_sooner(d, prior):
    X, y = make(90, d, seed=10)
    kw = dict(prior=prior, tol=1e-7, max_iter=200)
    e, steps = plain_logistic(warm_start=True, **kw).fit(X[:70], y[:70]), []
    for rows in (slice(75), slice(5, 60), slice(90)):
        warm, cold = e.fit(X[rows], y[rows]), fit(X[rows], y[rows], **kw)
        steps.append((warm.n_newton_iter_, cold.n_newton_iter_))
        np.testing.assert_allclose(warm.coef_, cold.coef_, atol=1e-6)
        np.testing.assert_allclose(warm.marginal_variance_, cold.marginal_variance_, rtol=1e-6)
    of_warm, of_cold = np.sum(steps, axis=0)
    # variances alone, without the weights, save less
    assert of_warm <= of_cold - 2 * len(steps)


@pytest.mark.parametrize(
    "kw", [dict(hyperparameters="mode"), {}, dict(prior="laplace"), dict(n_partitions=2)]
)
@pytest.mark.parametrize(
    "unit", [*(pytest.param(u, marks=SLOW) for u in (1e-100, 1e-3, 1e3)), 1e-2, 1e6]
)
def test_warm_start_in_other_units_ends_where_a_cold_one_does(unit, kw):
    X, y = make(80, 5, seed=3)
    warm = ConvexVariationalLogistic(warm_start=True, **kw).fit(X, y)
    for n in (80, 60):
        cold = ConvexVariationalLogistic(**kw).fit(unit * X[:n], y[:n]).predict_proba(unit * X)
        warm.fit(X, y).fit(unit * X[:n], y[:n])
        np.testing.assert_allclose(warm.predict_proba(unit * X), cold, atol=1e-3)


# ---------------------------------------------------------------------------- predictions


def test_predictions_against_dense_algebra_and_draws():
    X, y = make(60, 4, seed=11)
    e = fit(X, y, 4.0)
    B = np.column_stack([X, np.ones(60)])
    P = np.append(np.full(4, 0.25), 0.01)
    cov = np.linalg.inv(np.diag(P) + B.T * e.site_precision_ @ B)
    mean, var = e.latent_mean_and_variance(X)
    np.testing.assert_allclose(var, np.einsum("ij,jk,ik->i", B, cov, B), rtol=1e-10)
    np.testing.assert_allclose(e.latent_covariance(X[:5], X[5:9]), B[:5] @ cov @ B[5:9].T)
    np.testing.assert_allclose(e.decision_function(X), mean)
    draws = e.sample_posterior(20_000, random_state=0)
    assert draws.shape == (20_000, 5)
    np.testing.assert_allclose(np.cov(draws.T), cov, atol=0.02)
    np.testing.assert_allclose(draws.mean(0), np.append(e.coef_[0], e.intercept_), atol=0.02)
    proba = e.sample_proba(X[:10], 4000, random_state=1)
    np.testing.assert_allclose(proba.mean(0), e.predict_proba(X[:10]), atol=0.02)
    x = np.random.default_rng(0).standard_normal((3000, 1))
    one = fit(x, (np.random.default_rng(1).random(3000) < expit(2 * x[:, 0])).astype(int))
    far = one.predict_log_proba([[1e3], [-1e3], [1e6]])
    assert np.all(np.isfinite(far)) and far.min() < -50


@pytest.mark.parametrize("variance", ["calibrated", "monte_carlo", "lanczos"])
def test_a_prediction_depends_on_its_row_alone(variance):
    X, y, _ = make_sparse_logistic(300, 500, random_state=0)
    e = fit(X, y, 4.0, variance=variance, random_state=0)
    together = e.predict_proba(X[:30])
    alone = np.vstack([e.predict_proba(X[[i]]) for i in range(30)])
    np.testing.assert_allclose(together, alone, atol=1e-12)
    assert e.variance_method_ == variance
    assert np.isfinite(e.log_evidence_) and e.log_evidence_std_ > 0
    without = fit(X, y, 4.0, variance=variance, random_state=0, n_evidence_probes=0)
    assert np.isnan(without.log_evidence_) and without.log_evidence_std_ == 0.0
    np.testing.assert_array_equal(without.coef_, e.coef_)
    assert "objective" not in e.history_


def test_calibrated_variances_are_those_of_new_rows():
    X = sp.random(600, 3000, density=0.01, random_state=0, format="csr")
    new = sp.random(100, 3000, density=0.01, random_state=1, format="csr")
    rng = np.random.default_rng(0)
    y = X @ rng.normal(size=3000) + 0.5 * rng.logistic(size=600) > 0
    known = dict(prior_variance=1.0, calibration=None, random_state=0)
    exact = ConvexVariationalLogistic(variance="exact", **known).fit(X, y)
    found = ConvexVariationalLogistic(variance="calibrated", **known).fit(X, y)
    (_, of_new), (_, of_seen) = (found.latent_mean_and_variance(rows) for rows in (new, X[:100]))
    np.testing.assert_allclose(of_new, exact.latent_mean_and_variance(new)[1], rtol=0.08)
    seen = exact.latent_mean_and_variance(X[:100])[1]
    np.testing.assert_allclose(np.diag(found.latent_covariance(X[:100])), seen, rtol=0.03)
    assert np.all(of_seen > 1.1 * seen)  # a training row counts as a new one


def test_calibrated_fit_is_close_to_exact_and_its_draws_and_covariances_are_of_its_posterior():
    X, y, _ = make_sparse_logistic(800, 400, random_state=1)
    X, new, y = X[:600], X[600:], y[:600]
    a = fit(X, y, 4.0, variance="calibrated", random_state=0, n_evidence_probes=0)
    b = fit(X, y, 4.0)
    assert np.sqrt(np.mean((a.marginal_variance_ / b.marginal_variance_ - 1) ** 2)) < 0.05
    variances = [e.latent_mean_and_variance(new)[1] for e in (a, b)]
    assert np.sqrt(np.mean((variances[0] / variances[1] - 1) ** 2)) < 0.08
    assert np.sqrt(np.mean((a.predict_proba(new) - b.predict_proba(new)) ** 2)) < 2e-3
    assert np.sqrt(np.mean((a.coef_std_ / b.coef_std_ - 1) ** 2)) < 0.1
    cov = a.latent_covariance(new[:6], new[6:9])
    np.testing.assert_allclose(cov, b.latent_covariance(new[:6], new[6:9]), atol=0.05)
    draws = a.sample_posterior(200, random_state=0)
    np.testing.assert_allclose(draws.std(0)[:400].mean(), b.coef_std_.mean(), rtol=0.05)
    assert a.n_mvm_ < 400


def test_condition_on_follows_the_published_block_updates():
    b = ORACLE["block_updates"]
    B, C = np.array(b["B"]), np.array(b["candidates"])
    e = fit(B, np.array(b["y"]), b["prior_variance"], bound="local", fit_intercept=False, **TIGHT)
    for step in b["steps"]:
        e = e.condition_on(C[step["candidate"]][None], [step["label"]])
        mean, var = e.latent_mean_and_variance(C)
        np.testing.assert_allclose(mean, step["mu_candidates"], atol=1e-7)
        np.testing.assert_allclose(var, step["rho_candidates"], atol=1e-8)
        np.testing.assert_allclose(e.latent_mean_and_variance(B)[1], step["rho_model"], atol=1e-8)


def test_condition_on_is_the_same_with_every_solver():
    X, y = make(60, 8, seed=18)
    a, b, c = (
        fit(X[:50], y[:50], solver=s, **TIGHT).condition_on(X[50:], y[50:])
        for s in ("primal", "dual", "cg")
    )
    assert_same(a, b, X, tol=1e-6)
    assert_same(a, c, X, tol=1e-6)


@pytest.mark.parametrize("solver", ["primal", "cg"])
def test_condition_on_is_near_a_refit_and_consistent(solver):
    X, y = make(420, 8, seed=12)
    a = fit(X[:400], y[:400], solver=solver, **TIGHT)
    before = (a.coef_.copy(), a.coef_std_.copy(), a.log_evidence_, a.predict_proba(X))
    e, full = a.condition_on(X[400:], y[400:]), fit(X, y, **TIGHT)
    for old, now in zip(
        before, (a.coef_, a.coef_std_, a.log_evidence_, a.predict_proba(X)), strict=True
    ):
        np.testing.assert_array_equal(old, now)
    assert np.max(np.abs(e.coef_ - full.coef_) / full.coef_std_) < 0.05
    assert np.max(np.abs(e.coef_std_ / full.coef_std_ - 1)) < 0.03
    assert e.log_evidence_ == pytest.approx(full.log_evidence_, abs=0.05)
    one = a
    for i in range(400, 420):
        one = one.condition_on(X[[i]], y[[i]])
    assert_same(one, e, X)
    cov = e.latent_covariance(X[:5])
    np.testing.assert_allclose(np.diag(cov), e.latent_mean_and_variance(X[:5])[1], rtol=1e-9)
    draws = e.sample_posterior(20_000, random_state=0)[:, :8]
    np.testing.assert_allclose(draws.std(0), e.coef_std_[0], rtol=0.05)
    np.testing.assert_allclose(draws.mean(0), e.coef_[0], atol=0.02)


def test_condition_on_with_sampled_variances_and_several_classes():
    X, y, _ = make_sparse_logistic(160, 250, random_state=2)
    y = y + (X[:, 0].toarray().ravel() > 0.2)
    e = fit(X[:140], y[:140], variance="calibrated", random_state=0)
    new = e.condition_on(X[140:], y[140:])
    m0, v0 = e.latent_mean_and_variance(X)
    m1, v1 = new.latent_mean_and_variance(X)
    assert np.all(v1 > 0) and np.all(v1 <= v0 * (1 + 1e-12)) and np.any(v1 < 0.95 * v0)
    assert np.all(np.isfinite(m1)) and not np.allclose(m0, m1)


# ---------------------------------------------------------------------------- hostile data


@pytest.mark.parametrize(
    ("prior", "bound", "variance"),
    [
        *(("gaussian", "kl", v) for v in ("exact", "calibrated", "monte_carlo", "lanczos")),
        ("laplace", "kl", "exact"),
        ("gaussian", "local", "exact"),
        *(
            pytest.param(prior, bound, v, marks=SLOW)
            for prior, bound in (("laplace", "kl"), ("gaussian", "local"), ("laplace", "local"))
            for v in ("calibrated", "monte_carlo", "lanczos")
        ),
        pytest.param("laplace", "local", "exact", marks=SLOW),
    ],
)
def test_hostile_data_give_finite_fits_without_numpy_warnings(variance, bound, prior):
    rng = np.random.default_rng(13)
    X = rng.standard_normal((40, 3))
    y = (X[:, 0] > 0).astype(int)
    zero = np.vstack([X, np.zeros((10, 3))])
    y_zero = np.r_[y, np.arange(10) % 2]
    cases = [
        (X * 1e3, y, {}),
        (X * 1e-6, y, {}),
        (sp.csr_matrix(zero), y_zero, {}),
        (sp.csr_matrix(zero), y_zero, dict(fit_intercept=False)),
        (np.hstack([X, X, np.ones((40, 1)), np.zeros((40, 1))]), y, {}),
        (np.array([[1.0], [-1.0]]), np.array([0, 1]), {}),
    ]
    for data, labels, kw in cases:
        e = plain_logistic(1e3, bound=bound, prior=prior, variance=variance, random_state=0, **kw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            e.fit(data, labels)
        for part in (e.coef_, e.coef_std_, e.intercept_, e.predict_log_proba(data)):
            assert np.all(np.isfinite(part))
        assert np.all(e.coef_std_ > 0)


@functools.cache
def small_fit():
    X, y = make(40, 4, seed=15)
    return X, y, ConvexVariationalLogistic().fit(X, y)


@pytest.mark.parametrize("variance", ["exact", "calibrated", "monte_carlo", "lanczos"])
@pytest.mark.parametrize("size", [1e307, 1e160, 1e154, 1e-160, 1e-300])
def test_columns_whose_squares_leave_double_precision_are_named(variance, size):
    X, y = make(40, 3, seed=20)
    scale = np.array([1.0, 1.0, size])
    for data in (X * scale, sp.csr_matrix(X * scale), sp.csc_matrix(X * scale)):
        e = ConvexVariationalLogistic(variance=variance, random_state=0)
        with pytest.raises(ValueError, match="X has .* column 2.*scale the columns"):
            e.fit(data, y)
        assert "classes_" not in vars(e)


@pytest.mark.parametrize("size", [1e-12, 1e-20, 1e-50, 1e-100, 1e-138])
@pytest.mark.parametrize("seed", [0, 1])
def test_calibrated_variances_of_tiny_columns_are_those_of_the_prior(size, seed):
    """Next to the intercept their share is below rounding, and must not come from rounding."""
    X, y = make(60, 5, seed=seed)
    kw = dict(variance="calibrated", n_variance_samples=500, random_state=0)
    e = fit(X * size, y, **kw)
    # rows that are large again have the variance of the prior and of the intercept
    variance = e.latent_mean_and_variance(np.eye(5))[1]
    exact = fit(X * size, y).latent_mean_and_variance(np.eye(5))[1]
    np.testing.assert_allclose(variance, exact, rtol=0.05)
    np.testing.assert_allclose(e.coef_std_, 1.0, rtol=0.01)


@pytest.mark.parametrize("variance", ["exact", "calibrated", "monte_carlo", "lanczos"])
@pytest.mark.parametrize("size", [1e100, 1e138])
def test_huge_columns_give_finite_fits_or_say_what_to_do(variance, size):
    X, y = make(60, 4, seed=21)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            e = fit(X * size, y, variance=variance, random_state=0)
        except ValueError as error:
            assert "columns of X" in str(error)
        else:
            assert np.all(np.isfinite(e.latent_mean_and_variance(X * size)))


@pytest.mark.parametrize("variance", ["exact", "calibrated"])
def test_summary_and_intervals_are_quantiles_of_draws(variance):
    X, y = make(120, 4, seed=22)
    e = fit(X + 1.0, y, variance=variance, random_state=1)
    # a sampled variance has a relative error of its own
    share, n_draws = (0.03, 40_000) if variance == "exact" else (0.25, 4000)
    draws = e.sample_posterior(n_draws, random_state=1)
    table = e.summary(level=0.8)
    assert list(table.coefficients["name"]) == ["x0", "x1", "x2", "x3", "intercept"]
    ends = np.column_stack([table.coefficients["lower"], table.coefficients["upper"]])
    sd = table.coefficients["sd"]
    assert np.all(np.abs(ends - np.quantile(draws, [0.1, 0.9], axis=0).T) < share * sd[:, None])
    np.testing.assert_array_equal(e.coef_interval(0.8)[0], ends[:-1])
    assert table.figures["rows"] == 120 and table.figures["log evidence"] is e.log_evidence_
    assert "ConvexVariationalLogistic: converged" in str(table) and "80%" in str(table)


def test_summary_of_named_columns_without_intercept_and_of_several_classes():
    pd = pytest.importorskip("pandas")
    X, y = make(90, 2, seed=23)
    X = pd.DataFrame(X, columns=["a", "b"])
    frame = fit(X, y, fit_intercept=False).summary().to_frame()
    assert list(frame.index) == ["a", "b"] and list(frame) == ["mean", "sd", "lower", "upper"]
    e = fit(X, y + (X["a"] > 1))
    table = e.summary().coefficients
    assert (
        list(table["name"][:3]) == ["0: a", "0: b", "1: a"] and table["name"][-1][3:] == "intercept"
    )
    np.testing.assert_array_equal(table["mean"], np.r_[e.coef_.ravel(), e.intercept_])
    assert e.coef_interval().shape == (3, 2, 2)
    with pytest.raises(ValueError, match="level"):
        e.summary(level=1.0)
    with pytest.raises(NotFittedError):
        ConvexVariationalLogistic().summary()


def test_intervals_cover_coefficients_drawn_from_the_prior():
    rng = np.random.default_rng(24)
    covered = []
    for _ in range(60):
        X, coef = rng.normal(size=(150, 5)), rng.normal(size=5)
        y = rng.random(150) < expit(X @ coef)
        low, high = fit(X, y).coef_interval(0.8)[0].T
        covered.extend((low < coef) & (coef < high))
    assert abs(np.mean(covered) - 0.8) < 0.07  # three standard errors of 300 coefficients


def test_labels_are_shown_as_plain_values():
    X, y = make(40, 4, seed=16)
    with pytest.raises(ValueError, match=r"only one class, 0\.0;"):
        fit(X, np.zeros(40))
    with pytest.raises(ValueError, match="only one class, 'a';"):
        fit(X, np.full(40, "a"))
    with pytest.raises(ValueError, match="only one class, 1;"):
        fit(X[:1], [1])
    with pytest.raises(ValueError, match=r"not seen in fit: \[7\]"):
        fit(X, y).condition_on(X[:2], [0, 7])


def test_extreme_weights():
    X, y = make(60, 4, seed=14)
    weight = 10.0 ** np.random.default_rng(0).uniform(-6, 6, 60)
    for variance in ("exact", "calibrated"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            e = fit(X, y, sample_weight=weight, variance=variance, random_state=0)
        assert np.all(np.isfinite(e.coef_std_)) and np.all(np.isfinite(e.predict_proba(X)))


@pytest.mark.parametrize(
    ("kw", "word"),
    [
        (dict(prior_variance=0.0), "prior_variance"),
        (dict(prior_variance=np.ones(3)), "prior_variance"),
        (dict(prior_variance=np.inf), "prior_variance"),
        (dict(prior_variance=[1.0, 1.0, 0.0, 1.0]), "prior_variance .*every feature"),
        (dict(prior_groups=[0, 1]), "prior_groups .*4 features"),
        (dict(prior_groups=[0, 0, 1, 1], prior="laplace"), "prior_groups"),
        (dict(n_evidence_probes=1), "n_evidence_probes"),
        (dict(n_partitions=2, variance="lanczos"), "variance='lanczos'"),
        (dict(n_partitions=2, solver="dual"), "solver='dual'"),
        (dict(bound="em"), "bound"),
        (dict(prior="student"), "prior"),
        (dict(laplace_scale=-1.0, prior="laplace"), "laplace_scale"),
        (dict(variance="some"), "variance"),
        (dict(solver="lu"), "solver"),
        (dict(n_variance_samples=0), "n_variance_samples"),
        (dict(inner_tol=0.0), "inner_tol"),
        (dict(max_inner_iter=0), "max_inner_iter"),
        (dict(intercept_prior_variance=-1.0), "intercept_prior_variance"),
        (dict(solver="dual", intercept_prior_variance=np.inf), "intercept_prior_variance"),
        (dict(learn_prior=True, bound="local"), "learn_prior.*kl"),
        (dict(learn_prior=True, prior="laplace"), "learn_prior.*laplace_scale"),
        (dict(class_weight="some"), "class_weight"),
        (dict(class_weight={0: 0.0, 1: 1.0}), "class_weight"),
    ],
)
def test_bad_parameters_are_named_and_leave_the_fit_alone(kw, word):
    X, y, fitted = small_fit()
    e = copy.deepcopy(fitted)
    before = e.predict_proba(X)
    e.set_params(**kw)
    with pytest.raises(ValueError, match=word):
        e.fit(X, y)
    np.testing.assert_array_equal(e.predict_proba(X), before)


def test_condition_on_refuses_unknown_labels():
    X, y = make(40, 4, seed=16)
    with pytest.raises(ValueError, match="label"):
        fit(X, y).condition_on(X[:2], [0, 7])


def test_attributes_say_what_ran():
    X, y = make(60, 4, seed=19)
    assert (fit(X, y).solver_, fit(X, y).variance_method_) == ("primal", "exact")
    assert fit(X[:20], y[:20]).solver_ == "primal" and fit(X[:6], [0, 1] * 3).solver_ == "primal"
    assert fit(X[:5], [0, 1, 0, 1, 1]).solver_ == "dual"  # each step has all rows in the primal
    assert fit(sp.csr_array(X[:5]), [0, 1, 0, 1, 1]).solver_ == "primal"
    assert fit(X[:3], [0, 1, 0]).solver_ == "dual"
    assert fit(X[:3], [0, 1, 0], prior="laplace").solver_ == "primal"
    sampled = fit(X, y, variance="calibrated", random_state=0)
    assert (sampled.solver_, sampled.variance_method_) == ("cg", "calibrated")
    assert fit(X, y, solver="dual").solver_ == "dual"


def test_one_warning_when_not_converged():
    X, y = make(60, 4, seed=17)
    with pytest.warns(ConvergenceWarning, match="max_iter") as said:
        e = fit(X, y, 100.0, max_iter=1, tol=1e-12)
    assert len(said) == 1 and not e.converged_ and e.n_iter_ == 1
    assert e.stop_reason_ == "max_iter"
    assert np.all(np.isfinite(e.predict_proba(X)))


def test_diagnose_weighs_draws_to_the_true_posterior():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 4))
    y = (X[:, 0] + rng.logistic(size=150) > 0).astype(int)
    kl, local = (plain_logistic(4.0, bound=b).fit(X, y) for b in ("kl", "local"))
    good, narrow = (e.diagnose(4000, X=X, y=y) for e in (kl, local))
    assert good.pareto_k < 0.7 and good.ess_share > 0.97 > narrow.ess_share
    assert kl.diagnose().pareto_k is None and "fixed point" in str(kl.diagnose())


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    ("kind", "variance"),
    [
        (np.asarray, "calibrated"),
        *((sp.csr_matrix, v) for v in ("monte_carlo", "lanczos")),
        pytest.param(sp.csr_matrix, "calibrated", marks=SLOW),
        *(pytest.param(np.asarray, v, marks=SLOW) for v in ("monte_carlo", "lanczos")),
    ],
)
def test_weights_are_repeated_rows_to_the_last_bit_where_variances_are_sampled(variance, kind):
    """Learning a scale from sampled variances would turn rounding into visible differences."""
    rng = np.random.default_rng(0)
    X, y = rng.random((15, 30)), rng.integers(0, 3, 15)
    X[8], y[8] = X[3], (y[3] + 1) % 3  # one row with two labels
    copies, order = rng.integers(0, 4, 15), rng.permutation(15)
    copies[3] = copies[8] = 2
    kw = dict(variance=variance, random_state=0)
    a = ConvexVariationalLogistic(**kw).fit(kind(X[order]), y[order], sample_weight=copies[order])
    b = ConvexVariationalLogistic(**kw).fit(kind(np.repeat(X, copies, 0)), np.repeat(y, copies))
    np.testing.assert_array_equal(a.coef_, b.coef_)
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))
    first = np.cumsum(copies) - copies
    seen = copies > 0
    back = np.argsort(order)[seen]
    for name in ("marginal_variance_", "loo_mean_", "loo_proba_"):
        np.testing.assert_array_equal(getattr(a, name)[:, back], getattr(b, name)[:, first[seen]])
    total = b.site_precision_[:, first[seen]] * copies[seen]
    np.testing.assert_allclose(a.site_precision_[:, back], total, rtol=1e-12)


@pytest.mark.parametrize("kw", [{}, dict(n_partitions=2), dict(variance="calibrated")])
def test_more_classes_than_iterations_are_fitted_one_against_the_rest(kw):
    X = np.random.default_rng(0).standard_normal((28, 2))
    est = fit(X, np.arange(28) % 7, multi_class="one_vs_rest", max_iter=2, tol=0.9, **kw)
    assert est.coef_.shape == (7, 2)


def test_one_against_the_rest_decides_as_it_predicts():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(60, 4)), rng.integers(0, 4, 60)
    e = ConvexVariationalLogistic(multi_class="one_vs_rest").fit(X, y)
    new = rng.normal(size=(500, 4))
    decision, proba = e.decision_function(new), e.predict_proba(new)
    np.testing.assert_array_equal(np.argsort(decision, 1), np.argsort(proba, 1))
    odds = 1 / (1 + np.exp(-decision))
    np.testing.assert_allclose(odds / odds.sum(1, keepdims=True), proba, rtol=1e-9)
    means, _ = e.latent_mean_and_variance(new)
    assert np.any(means.argmax(1) != decision.argmax(1))


def test_sparse_rows_of_any_form_are_the_dense_ones():
    rng = np.random.default_rng(0)
    X, y = make(40, 5, seed=1)
    e = fit(X, y)
    unsorted = sp.csr_matrix((rng.normal(size=6), [4, 1, 1, 0, 3, 3], [0, 3, 3, 6]), shape=(3, 5))
    some = sp.random(30, 5, 0.3, format="csr", random_state=0)
    for rows in (some, unsorted, (3 * some).astype(int), sp.csr_array(some), some.tocsc()):
        np.testing.assert_allclose(
            e.latent_mean_and_variance(rows), e.latent_mean_and_variance(rows.toarray()), rtol=1e-12
        )
    labels = np.arange(30) % 2
    np.testing.assert_allclose(
        fit(some, labels).coef_, fit(some.toarray(), labels).coef_, rtol=1e-9
    )
    assert unsorted.nnz == 6


def weak_words(n, d, length=20):
    """Texts of n rows with rarities of d words, in each of which is little of the label."""
    rng = np.random.RandomState(0)
    often = 1.0 / np.arange(1, d + 1)
    words = rng.choice(d, size=(n, length), p=often / often.sum())
    ends = np.arange(n + 1) * length
    counts = sp.csr_matrix((np.ones(n * length), words.ravel(), ends), shape=(n, d))
    counts.sum_duplicates()
    counts.data = 1.0 + np.log(counts.data)
    rarity = np.log(n / np.maximum((counts > 0).sum(axis=0).A1, 1))
    X = normalize(counts @ sp.diags(rarity))
    coef = 0.9 * rng.randn(d)
    return X, rng.rand(n) < expit(X @ coef)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW)])
def test_the_scale_learned_from_sampled_variances_is_at_its_fixed_point(seed):
    """Draws change from step to step; the learned scale has to settle all the same."""
    X, y = weak_words(2000, 3000)
    est = ConvexVariationalLogistic(variance="calibrated", random_state=seed, calibration=None)
    est.fit(X[:1000], y[:1000])
    tight = clone(est).set_params(tol=1e-6, max_iter=200).fit(X[:1000], y[:1000])
    assert est.converged_ and tight.converged_
    assert abs(np.log(est.prior_variance_ / tight.prior_variance_)) < 0.05
    (mean, var), (at_tight, _) = (e.latent_mean_and_variance(X[1000:]) for e in (est, tight))
    assert np.max(np.abs(mean - at_tight) / np.sqrt(var)) < 0.05


def test_the_level_of_sampled_variances_on_text_is_within_a_per_cent():
    """Signs of rows tell it: sums of squares of eight draws are 3 % off."""
    X, y = weak_words(500, 3000)
    kw = dict(prior_variance=10.0, calibration=None, n_evidence_probes=0)
    exact = ConvexVariationalLogistic(**kw, variance="exact").fit(X, y).marginal_variance_
    levels = []
    for seed in range(6):
        est = ConvexVariationalLogistic(**kw, variance="calibrated", random_state=seed).fit(X, y)
        levels.append(np.mean(np.log(est.marginal_variance_ / exact)))
    assert np.sqrt(np.mean(np.square(levels))) < 0.012


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_entries_that_are_stored_in_two_parts_are_added_up(fit_intercept):
    X, y = make(40, 5)
    A = sp.csr_matrix(X * (np.abs(X) > 0.5))
    halves = np.repeat(A.data, 2) * np.tile([0.3, 0.7], A.nnz)
    twice = sp.csr_matrix((halves, np.repeat(A.indices, 2), 2 * A.indptr), A.shape)
    a, b = (ConvexVariationalLogistic(fit_intercept=fit_intercept).fit(B, y) for B in (A, twice))
    np.testing.assert_allclose(b.coef_, a.coef_, rtol=1e-8)
    np.testing.assert_allclose(b.coef_std_, a.coef_std_, rtol=1e-8)
