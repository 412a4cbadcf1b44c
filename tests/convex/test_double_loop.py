"""Sites of the convex bounds against brute force, and the systems and variances built on them."""

import numpy as np
import pytest
import scipy.sparse as sp
from oracles import oracle
from plain_logistic import NormalPrior, plain_logistic
from sklearn.base import clone

from sklearn_ep.convex._double_loop import DoubleLoop
from sklearn_ep.convex._sites import LogisticSites
from sklearn_ep.convex._systems import (
    Design,
    leave_one_out,
    primal_system,
)
from sklearn_ep.sites import LaplaceSite

ORACLE = oracle("convex_variational")


def logistic(bound, sign=1.0, weight=1.0, n=1):
    return LogisticSites(np.full(n, sign), np.full(n, weight), bound)


@pytest.mark.parametrize("row", [r for r in ORACLE["hstar_bernoulli"]["rows"] if r["tau"] == 1.0])
def test_local_logistic_penalty_is_the_nested_minimum(row):
    site = logistic("local", row["c"], row["weight"])
    value, slope, curvature, precision = (
        a[0] for a in site.penalty(np.array([row["s"]]), np.array([row["z"]]))
    )
    tol = ORACLE["hstar_bernoulli"]["tol"]
    assert value == pytest.approx(row["hstar"], abs=tol)
    assert slope == pytest.approx(row["d1"], abs=tol)
    assert curvature == pytest.approx(row["d2"], abs=tol)
    assert precision == pytest.approx(row["inv_gamma"], abs=tol)


@pytest.mark.parametrize("row", ORACLE["hstar_laplace"]["rows"])
def test_local_laplace_penalty_is_the_nested_minimum(row):
    penalty = LaplaceSite(1 / row["tau"], "local").penalty(
        np.array([row["s"]]), np.array([row["z"]])
    )
    tol = ORACLE["hstar_laplace"]["tol"]
    assert penalty.value[0] == pytest.approx(row["hstar"], abs=tol)
    assert penalty.slope[0] == pytest.approx(row["d1"], abs=tol)
    # curvatures have a floor of 1e-6 rate^2, which keeps the posterior precision invertible
    assert penalty.curvature[0] == pytest.approx(row["d2"], abs=max(tol, 1e-6 * row["tau"] ** 2))


@pytest.mark.parametrize("bound", ["local", "kl"])
@pytest.mark.parametrize("make", ["logistic", "laplace"])
def test_slope_and_curvature_are_derivatives(bound, make):
    rng = np.random.default_rng(0)
    s, z = 3 * rng.standard_normal(50), np.exp(rng.uniform(-3, 4, 50))
    site = logistic(bound, -1.0, 1.7, 50) if make == "logistic" else LaplaceSite(1 / 1.3, bound)
    h = 1e-5
    up, down, here = (site.penalty(s + d, z) for d in (h, -h, 0.0))
    np.testing.assert_allclose((up.value - down.value) / (2 * h), here.slope, atol=1e-8)
    np.testing.assert_allclose((up.slope - down.slope) / (2 * h), here.curvature, atol=1e-5)
    assert np.all(here.curvature > 0) and np.all(here.precision > 0)


def test_kl_penalties_are_gaussian_expectations():
    x, w = np.polynomial.hermite_e.hermegauss(120)
    w = w / w.sum()
    s, z = np.array([-2.0, 0.3, 4.0]), np.array([0.5, 1.0, 2.0])
    nodes = s[:, None] + np.sqrt(z)[:, None] * x
    site = logistic("kl", 1.0, 2.0, 3).penalty(s, z)
    np.testing.assert_allclose(site.value, 2 * np.logaddexp(0, -nodes) @ w, atol=1e-5)
    expit = 1 / (1 + np.exp(-nodes))
    np.testing.assert_allclose(site.precision, 2 * (expit * (1 - expit)) @ w, atol=1e-5)
    draws = s[:, None] + np.sqrt(z)[:, None] * np.random.default_rng(0).standard_normal(400_000)
    laplace = LaplaceSite(1 / 0.7, "kl").penalty(s, z)
    np.testing.assert_allclose(laplace.value, 0.7 * np.abs(draws).mean(1), rtol=5e-3)


def test_local_bound_is_below_kl_bound():
    rng = np.random.default_rng(1)
    s, z = 4 * rng.standard_normal(200), np.exp(rng.uniform(-4, 4, 200))
    for a, b in (
        (logistic("local", n=200), logistic("kl", n=200)),
        (LaplaceSite(1.0, "local"), LaplaceSite(1.0, "kl")),
    ):
        assert np.all(a.penalty(s, z).value >= b.penalty(s, z).value - 3e-6)


@pytest.mark.parametrize("bound", ["local", "kl"])
def test_sites_are_finite_at_extremes(bound):
    s = np.array([0.0, 0.0, 1e-9, 800.0, -800.0, 1e6, -3.0])
    z = np.array([1e-300, 1e8, 1e-12, 1e-300, 1e6, 1.0, 1e-300])
    for site in (logistic(bound, n=7), LaplaceSite(1 / 1.3, bound), LaplaceSite(1e-3, bound)):
        for part in site.penalty(s, z):
            assert np.all(np.isfinite(part))


def test_joining_site_is_the_fixed_point_of_both_bounds():
    rng = np.random.default_rng(2)
    mean, var = 3 * rng.standard_normal(40), np.exp(rng.uniform(-4, 5, 40))
    for bound in ("local", "kl"):
        site = logistic(bound, -1.0, n=40)
        precision, shift = site.joined(mean, var)
        new_var = var / (1 + var * precision)
        new_mean = new_var * (mean / var + shift)
        penalty = site.penalty(new_mean, new_var)
        np.testing.assert_allclose(penalty.precision, precision, rtol=1e-7)
        np.testing.assert_allclose((new_mean - mean) / var + penalty.slope, 0, atol=1e-8)


def test_contact_point_at_extremes():
    mean = np.array([0.0, 0.0, 40.0, -40.0, 0.0, 700.0, -5.0])
    var = np.array([0.0, 1e-14, 1.0, 1e4, 1e8, 0.5, 1e-300])
    precision, _ = logistic("local", n=7).joined(mean, var)
    assert np.all(np.isfinite(precision)) and np.all((precision > 0) & (precision <= 0.25))
    # rows are their own problems, whatever steps others need
    for k in range(7):
        alone, _ = logistic("local", n=1).joined(mean[[k]], var[[k]])
        np.testing.assert_allclose(alone, precision[k], rtol=1e-12)


def test_newton_reaches_rounding_and_takes_hostile_starts():
    rng = np.random.default_rng(3)
    B, sign = rng.standard_normal((60, 5)), np.sign(rng.standard_normal(60))
    site, z, prior = (
        logistic("kl", sign, 1.0, 60),
        np.full(60, 0.5),
        NormalPrior(10.0, 5),
    )
    ends = []
    for start in (np.zeros(5), np.full(5, 30.0)):
        loop = DoubleLoop(Design(B, False), site, prior, primal_system, 1e-6, 60)
        loop.u, loop.s = start, B @ start
        inner = loop.evaluate(np.log(z)).payload.inner
        gradient = 0.1 * inner.u + B.T @ inner.site.slope
        assert np.linalg.norm(gradient) < 1e-11
        ends.append(inner.u)
    np.testing.assert_allclose(*ends, atol=1e-11)


@pytest.fixture(params=["dense", "csr"])
def problem(request):
    rng = np.random.default_rng(4)
    X = rng.standard_normal((30, 12)) * (rng.random((30, 12)) < 0.5)
    design = Design(sp.csr_matrix(X) if request.param == "csr" else X, True)
    diagonal, weight = rng.uniform(0.5, 2, 13), rng.uniform(0.05, 0.25, 30)
    B = np.column_stack([X, np.ones(30)])
    return design, diagonal, weight, B, np.linalg.inv(np.diag(diagonal) + B.T * weight @ B)


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix], ids=["dense", "csr"])
@pytest.mark.parametrize(
    "how", [dict(solver="primal"), dict(solver="dual"), dict(variance="calibrated")], ids=str
)
def test_posteriors_are_those_of_dense_algebra_with_the_sites(kind, how):
    rng = np.random.default_rng(4)
    X = rng.standard_normal((30, 12)) * (rng.random((30, 12)) < 0.5)
    B, d = np.column_stack([X, np.ones(30)]), rng.uniform(0.5, 2, 12)
    fit = plain_logistic(1.0 / d, intercept_prior_variance=0.7, random_state=0, **how)
    fit.fit(kind(X), rng.integers(0, 2, 30))
    cov = np.linalg.inv(np.diag(np.append(d, 1 / 0.7)) + B.T * fit.site_precision_ @ B)
    between = fit.latent_covariance(kind(X[:4]), kind(X[4:9]))
    np.testing.assert_allclose(between, B[:4] @ cov @ B[4:9].T, atol=1e-7)
    draws = fit.sample_posterior(20_000, random_state=6)
    np.testing.assert_allclose(np.cov(draws.T), cov, atol=0.05)
    if "variance" in how:
        return
    z = np.einsum("ij,jk,ik->i", B, cov, B)
    np.testing.assert_allclose(fit.marginal_variance_, z, rtol=1e-9)
    np.testing.assert_allclose(fit.latent_mean_and_variance(kind(X))[1], z, rtol=1e-9)
    np.testing.assert_allclose(fit.coef_std_[0] ** 2, np.diag(cov)[:12], rtol=1e-9)
    assert fit.effective_dof_ == pytest.approx(fit.site_precision_ @ z, rel=1e-9)


def test_columns_of_a_block_are_solved_independently():
    rng = np.random.default_rng(7)
    X, y = rng.standard_normal((30, 12)), rng.integers(0, 2, 30)
    fit = plain_logistic(variance="calibrated", random_state=0).fit(X, y)
    new = rng.standard_normal((4, 12)) * np.array([1.0, 1e-6, 1e6, 0.0])[:, None]
    together = fit.latent_covariance(X, new)
    for k in range(4):
        alone = fit.latent_covariance(X, new[[k]])[:, 0]
        np.testing.assert_allclose(together[:, k], alone, rtol=1e-9)


def test_leave_one_out_removes_one_copy(problem):
    design, diagonal, weight, B, _ = problem
    full = diagonal + (B**2).T @ weight
    expected = [np.sum(b**2 / (full - weight[i] * b**2)) for i, b in enumerate(B)]
    np.testing.assert_allclose(leave_one_out(design.B, 1 / full, weight), expected, rtol=1e-12)
    single = leave_one_out(design.B.astype(np.float32), 1 / full, weight)
    np.testing.assert_allclose(single, expected, rtol=1e-4)


def test_the_double_loop_refuses_a_part_by_what_it_lacks(problem):
    design, prior = problem[0], NormalPrior(1.0, 12)
    for sites, given, message in (
        (object(), prior, "factor object has no `penalty` and no `shift`"),
        (logistic("kl", n=30), object(), "prior object has no `penalty`"),
    ):
        with pytest.raises(TypeError, match=message):
            DoubleLoop(design, sites, given, primal_system)


def text_like(q=800, n=400, seed=0):
    from sklearn_ep.datasets import make_sparse_logistic

    X, y, _ = make_sparse_logistic(q, n, random_state=seed)
    return X, y


def test_variances_of_samples_and_of_lanczos_vectors_on_text():
    X, y = text_like(1200)
    X, new, y = X[:800], X[800:], y[:800]
    kw = dict(random_state=0, tol=1e-1)
    exact = plain_logistic(10.0, variance="exact").fit(X, y)
    z, z_new = exact.marginal_variance_, exact.latent_mean_and_variance(new)[1]
    errors = {}
    for name, k in (("monte_carlo", 8), ("lanczos", 2)):
        fit = plain_logistic(10.0, variance=name, n_variance_samples=k, **kw).fit(X, y)
        errors[name] = np.sqrt(np.mean((fit.marginal_variance_ / z - 1) ** 2))
        error_new = fit.latent_mean_and_variance(new)[1] / z_new - 1
        assert np.sqrt(np.mean(error_new**2)) < 1.0
        if name == "lanczos":  # from below, of the variances at the sites of this very fit
            B = sp.hstack([X, np.ones((800, 1))]).toarray()
            A = np.diag(np.append(np.full(X.shape[1], 0.1), 0.01)) + B.T * fit.site_precision_ @ B
            own = np.einsum("ij,ji->i", B, np.linalg.solve(A, B.T))
            assert np.all(fit.marginal_variance_ <= own * (1 + 1e-2))
    assert 0.2 < errors["monte_carlo"] < 0.7
    assert errors["lanczos"] > 0.5


def test_lanczos_is_exact_with_enough_steps():
    rng = np.random.default_rng(8)
    X, y = rng.standard_normal((30, 12)), rng.integers(0, 2, 30)
    exact = plain_logistic(2.0, tol=1e-8, inner_tol=1e-10, max_iter=100).fit(X, y)
    fit = clone(exact).set_params(variance="lanczos", random_state=0, tol=1e-16, inner_tol=1e-11)
    fit.fit(X, y)
    np.testing.assert_allclose(fit.marginal_variance_, exact.marginal_variance_, rtol=1e-6)
    np.testing.assert_allclose(fit.coef_std_, exact.coef_std_, rtol=1e-6)
    np.testing.assert_allclose(fit.coef_, exact.coef_, atol=1e-6)
