"""ConvexVariationalRegressor and the sites: against optimisers, Gibbs sampling and each other."""

import numpy as np
import pytest
import scipy.sparse as sp
from oracles import oracle
from plain_logistic import plain_logistic
from scipy.integrate import quad
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from scipy.stats import t as student
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import ConvexVariationalRegressor
from sklearn_ep.sites import HorseshoeSite, LaplaceSite, StudentTSite, SuperGaussianSite

ORACLE = oracle("linear_scale")
X, Y, NOISE = (np.array(ORACLE["regression"][k]) for k in ("X", "y", "noise"))
TIGHT = dict(noise_variance=float(NOISE), variance="exact", tol=1e-9, max_iter=500)
SITES = [
    LaplaceSite(0.7),
    LaplaceSite(0.7, bound="kl"),
    StudentTSite(3.0, 0.5),
    StudentTSite(1.0, 2.0),
    HorseshoeSite(0.3),
]
every_site = pytest.mark.parametrize("site", SITES, ids=repr)


class Mine(SuperGaussianSite):
    """Student's t again, by its two formulas alone."""

    def __init__(self, df, scale):
        self.df, self.v = df, df * scale**2

    def loss(self, x):
        return 0.5 * (self.df + 1) * np.log1p(x / self.v)

    def precision(self, x):
        return (self.df + 1) / (self.v + x)


def site_of(p, bound="local"):
    return (
        StudentTSite(p["df"], p["scale"])
        if p["kind"] == "student_t"
        else LaplaceSite(p["scale"], bound)
    )


@every_site
def test_a_site_is_a_density_with_its_supporting_precision(site):
    def density(s):
        return np.exp(-site.loss(np.array([s * s]))[0] + site.log_normaliser())

    total = 2 * (quad(density, 0, 1, limit=200)[0] + quad(density, 1, np.inf, limit=200)[0])
    assert total == pytest.approx(1.0, abs=1e-6)
    assert SuperGaussianSite.log_normaliser(site) == pytest.approx(site.log_normaliser(), abs=1e-5)
    x = np.geomspace(1e-4, 1e4, 40)
    h = 1e-6 * x
    slope = (site.loss(x + h) - site.loss(x - h)) / (2 * h)
    np.testing.assert_allclose(site.precision(x), 2 * slope, rtol=1e-6)
    # concave in the square: the tangent supports the density from below
    assert np.all(np.diff(site.precision(x)) < 0)
    width = 1 / SuperGaussianSite.start_precision(site)
    assert width * site.precision(np.array([width]))[0] == pytest.approx(1.0)


def test_student_sites_are_scipy_s():
    s = np.linspace(-5, 5, 11)
    for df, scale in ((1.0, 2.0), (4.5, 0.3), (1e7, 1.0)):
        site = StudentTSite(df, scale)
        got = site.log_normaliser() - site.loss(s * s)
        np.testing.assert_allclose(got, student.logpdf(s, df, scale=scale), atol=1e-6)


@every_site
def test_penalties_are_tangent(site):
    rng = np.random.default_rng(0)
    s, z = 2 * rng.standard_normal(30), np.exp(rng.uniform(-2, 2, 30))
    h = 1e-5
    up, down, here = (site.penalty(s + d, z) for d in (h, -h, 0.0))
    np.testing.assert_allclose((up[0] - down[0]) / (2 * h), here[1], atol=1e-7)
    assert np.all(here[2] >= (up[1] - down[1]) / (2 * h) - 1e-6)


@pytest.mark.parametrize("p", ORACLE["sites"], ids=lambda p: p["kind"])
def test_local_optimum_and_gibbs(p):
    est = ConvexVariationalRegressor(site_of(p), **TIGHT).fit(X, Y)
    assert est.converged_
    assert np.max(np.abs(est.coef_ - p["local_mean"]) / p["local_sd"]) < 1e-4
    assert np.max(np.abs(np.log(est.coef_std_ / p["local_sd"]))) < 1e-4
    gap = (est.coef_ - p["gibbs_mean"]) / p["gibbs_sd"]
    assert np.sqrt(np.mean(gap**2)) < 0.05
    assert np.all(np.diff(est.history_["objective"]) > -1e-6)
    if p["kind"] == "student_t":
        mine = ConvexVariationalRegressor(Mine(p["df"], p["scale"]), **TIGHT).fit(X, Y)
        np.testing.assert_allclose(mine.coef_, est.coef_, atol=1e-9)
        assert mine.log_evidence_ == pytest.approx(est.log_evidence_, abs=1e-3)
    else:
        kl = ConvexVariationalRegressor(site_of(p, "kl"), **TIGHT).fit(X, Y)
        assert kl.log_evidence_ > est.log_evidence_
        ratio = np.mean(np.log(kl.coef_std_ / p["gibbs_sd"]))
        assert abs(ratio) < 0.01 < abs(np.mean(np.log(est.coef_std_ / p["gibbs_sd"])))


def test_many_degrees_of_freedom_are_bayesian_linear_regression():
    est = ConvexVariationalRegressor(StudentTSite(1e8, 0.7), **TIGHT).fit(X, Y)
    A = X.T @ X / NOISE + np.eye(X.shape[1]) / 0.49
    np.testing.assert_allclose(est.coef_, np.linalg.solve(A, X.T @ Y / NOISE), atol=1e-6)
    np.testing.assert_allclose(est.coef_std_**2, np.diag(np.linalg.inv(A)), rtol=1e-6)
    K = NOISE * np.eye(len(Y)) + 0.49 * X @ X.T
    evidence = -0.5 * (Y @ np.linalg.solve(K, Y) + np.linalg.slogdet(2 * np.pi * K)[1])
    assert est.log_evidence_ == pytest.approx(evidence, abs=1e-4)
    mean, std = est.predict(X[:5], return_std=True)
    variance = np.einsum("ij,jk,ik->i", X[:5], np.linalg.inv(A), X[:5]) + NOISE
    np.testing.assert_allclose(std**2, variance, rtol=1e-6)
    draws = est.sample_posterior(20_000, random_state=0)
    np.testing.assert_allclose(draws.std(axis=0), est.coef_std_, rtol=0.05)
    sampled = ConvexVariationalRegressor(
        StudentTSite(1e8, 0.7), noise_variance=float(NOISE), variance="monte_carlo", random_state=0
    ).fit(X, Y)
    assert abs(sampled.log_evidence_ - evidence) < 4 * sampled.log_evidence_std_ + 0.1


def test_a_square_prior_operator_changes_variables():
    rng = np.random.default_rng(0)
    C = np.eye(30) + 0.1 * rng.standard_normal((30, 30))
    # s = C u: regression on X C^-1 with a prior on s itself
    a = ConvexVariationalRegressor(LaplaceSite(0.3), prior_operator=C, **TIGHT).fit(X, Y)
    b = ConvexVariationalRegressor(LaplaceSite(0.3), **TIGHT).fit(X @ np.linalg.inv(C), Y)
    np.testing.assert_allclose(C @ a.coef_, b.coef_, atol=1e-6)
    gap = a.log_evidence_ - b.log_evidence_
    assert gap == pytest.approx(0.0, abs=1e-6)
    sparse = ConvexVariationalRegressor(
        LaplaceSite(0.3), prior_operator=sp.csr_matrix(C), **TIGHT
    ).fit(sp.csr_matrix(X), Y)
    np.testing.assert_allclose(sparse.coef_, a.coef_, atol=1e-8)


def test_operators_samples_and_matrices_agree():
    kw = dict(noise_variance=float(NOISE), n_variance_samples=64, random_state=0)
    site = LaplaceSite(0.2, bound="kl")
    exact = ConvexVariationalRegressor(site, **TIGHT).fit(X, Y)
    matrix = ConvexVariationalRegressor(site, variance="monte_carlo", **kw).fit(X, Y)
    operator = ConvexVariationalRegressor(site, **kw).fit(aslinearoperator(X), Y)
    assert operator.variance_method_ == "monte_carlo" and operator.n_mvm_ > 100
    for est in (matrix, operator):
        assert est.converged_
        assert np.sqrt(np.mean(((est.coef_ - exact.coef_) / exact.coef_std_) ** 2)) < 0.1
        assert np.sqrt(np.mean((est.coef_std_**2 / exact.coef_std_**2 - 1) ** 2)) < 0.35
        assert abs(est.log_evidence_ - exact.log_evidence_) < 4 * est.log_evidence_std_ + 2
    D = sp.diags_array([np.ones(29), -np.ones(29)], offsets=[0, 1], shape=(29, 30)).tocsr()
    over = sp.vstack([sp.eye_array(30), D]).tocsr()
    seen = ConvexVariationalRegressor(site, prior_operator=over, **kw).fit(aslinearoperator(X), Y)
    assert np.isnan(seen.log_evidence_) and np.all(np.isfinite(seen.coef_std_))
    mean, std = operator.predict(X[:3], return_std=True)
    assert mean.shape == std.shape == operator.predict_interval(X[:3]).shape[:1]


def test_noise_and_scale_are_learned():
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((400, 100))
    u = rng.laplace(scale=0.5, size=100)
    y = Z @ u + 0.6 * rng.standard_normal(400)
    for variance in ("exact", "monte_carlo"):
        est = ConvexVariationalRegressor(
            LaplaceSite(3.0, "kl"),
            noise_variance="auto",
            learn_prior=True,
            variance=variance,
            random_state=0,
        ).fit(Z, y)
        assert est.converged_
        assert abs(np.log(est.noise_variance_ / 0.36)) < 0.25
        assert abs(np.log(3.0 * est.prior_scale_ / np.mean(np.abs(u)))) < 0.25
    # the scale that was found is the best one
    kw = dict(noise_variance=0.36, variance="exact", tol=1e-8, max_iter=200)
    learned = ConvexVariationalRegressor(LaplaceSite(1.0, "kl"), learn_prior=True, **kw).fit(Z, y)
    for factor in (0.8, 1.25):
        site = LaplaceSite(factor * learned.prior_scale_, "kl")
        other = ConvexVariationalRegressor(site, **kw).fit(Z, y)
        assert other.log_evidence_ < learned.log_evidence_


def test_heavy_tails_shrink_small_coefficients_only():
    est = ConvexVariationalRegressor(
        HorseshoeSite(0.05), max_iter=200, **dict(noise_variance=float(NOISE), variance="exact")
    ).fit(X, Y)
    ridge = ConvexVariationalRegressor(StudentTSite(1e7, 1.0), **TIGHT).fit(X, Y)
    assert np.abs(est.coef_[4:]).mean() < 0.3 * np.abs(ridge.coef_[4:]).mean()
    assert np.all(np.abs(est.coef_[:3]) > 0.5)


def test_summary_and_intervals():
    est = ConvexVariationalRegressor(StudentTSite(), **TIGHT).fit(X, Y)
    table = est.summary(0.8)
    np.testing.assert_array_equal(table.coefficients["lower"], est.coef_interval(0.8)[:, 0])
    assert "x29" in str(table) and table.figures["log evidence"] == est.log_evidence_


def test_sites_are_priors_of_the_classifier():
    rng = np.random.default_rng(4)
    Z = rng.standard_normal((120, 8))
    y = (rng.random(120) < 1 / (1 + np.exp(Z[:, 1] - Z[:, 0]))).astype(int)
    kw = dict(variance="exact", tol=1e-8, inner_tol=1e-10, max_iter=300)
    CVL = plain_logistic
    for bound in ("local", "kl"):
        named = CVL(prior="laplace", laplace_scale=0.5, bound=bound, **kw).fit(Z, y)
        site = CVL(prior=LaplaceSite(0.5, bound), bound=bound, **kw).fit(Z, y)
        np.testing.assert_allclose(site.coef_, named.coef_, atol=1e-10)
        assert site.log_evidence_ == pytest.approx(named.log_evidence_)
    wide = CVL(prior=StudentTSite(1e7, 1.0), **kw).fit(Z, y)
    gaussian = CVL(1.0, **kw).fit(Z, y)
    np.testing.assert_allclose(wide.coef_, gaussian.coef_, atol=1e-6)
    assert wide.log_evidence_ == pytest.approx(gaussian.log_evidence_, abs=1e-5)
    learned = CVL(prior=StudentTSite(4.0, 3.0), learn_prior=True, **kw).fit(Z, y)
    scale = 3.0 * np.sqrt(learned.prior_variance_) / 3.0
    for factor in (0.8, 1.25):
        other = CVL(prior=StudentTSite(4.0, factor * scale), **kw).fit(Z, y)
        assert other.log_evidence_ < learned.log_evidence_
    shrunk = CVL(prior=HorseshoeSite(0.05), **kw).fit(Z, y)
    assert np.abs(shrunk.coef_[0, 2:]).mean() < 0.2 * np.abs(gaussian.coef_[0, 2:]).mean()


def test_what_is_refused():
    CVR = ConvexVariationalRegressor
    operator = aslinearoperator(X)
    for est, data, words in (
        (CVR(prior=object()), X, "prior"),
        (CVR(noise_variance=-1.0), X, "noise_variance"),
        (CVR(variance="exact"), operator, "variance='exact'"),
        (CVR(prior_operator=np.eye(4)), X, "prior_operator"),
        (CVR(prior_operator=np.ones((3, 30)), learn_prior=True), X, "prior_operator"),
        (CVR(n_variance_samples=0), X, "n_variance_samples"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            est.fit(data, Y)
    for data in (X, operator):
        with pytest.raises(ValueError, match="rows"):
            CVR().fit(data, Y[:-1])
    with pytest.raises(ValueError, match="scale"):
        LaplaceSite(-1.0)
    with pytest.raises(ValueError, match="bound"):
        LaplaceSite(1.0, bound="other")
    with pytest.raises(TypeError, match="must define"):
        CVR(SuperGaussianSite()).fit(X, Y)
    sampled = CVR(random_state=0).fit(operator, Y)
    with pytest.raises(ValueError, match="exact"):
        sampled.sample_posterior()
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        CVR(max_iter=1).fit(X, Y)
    bad = LinearOperator((60, 30), matvec=lambda v: X @ v, rmatvec=lambda v: X.T @ v)
    assert CVR(random_state=0).fit(bad, Y).n_features_in_ == 30


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_covariances_at_rows_are_those_of_draws_and_predictions(fit_intercept):
    est = ConvexVariationalRegressor(LaplaceSite(0.3), fit_intercept=fit_intercept, **TIGHT)
    est.fit(X, Y)
    few, other = X[:4], X[10:13]
    covariance = est.latent_covariance(np.vstack([few, other]))
    np.testing.assert_allclose(covariance[:4, 4:], est.latent_covariance(few, other), rtol=1e-12)
    sparse = est.latent_covariance(sp.csr_matrix(few), aslinearoperator(other))
    np.testing.assert_allclose(covariance[:4, 4:], sparse, atol=1e-12)
    _, std = est.predict(few, return_std=True)
    noise = est.noise_variance_ * est.temper_
    np.testing.assert_allclose(np.diag(covariance)[:4] + noise, std**2, rtol=1e-10)
    with pytest.raises(ValueError, match="X has 3 columns"):
        est.latent_covariance(aslinearoperator(X[:, :3]))


def test_information_of_a_block_is_that_of_its_rows_one_after_another():
    # of a Gaussian posterior: each row conditions the covariance that the next one meets
    est = ConvexVariationalRegressor(LaplaceSite(0.3), **TIGHT).fit(X, Y)
    C, told = est.latent_covariance(X[:5]), 0.0
    for i in range(5):
        told += 0.5 * np.log1p(C[i, i] / NOISE)
        C = C - np.outer(C[i], C[i]) / (C[i, i] + NOISE)
    np.testing.assert_allclose(est.information_gain(X[:5]), told, rtol=1e-10)
    np.testing.assert_allclose(est.information_gain(aslinearoperator(X[:5])), told, rtol=1e-10)
