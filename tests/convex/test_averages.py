"""Averages over the scale of the prior, and calibration by leave-one-out."""

import collections
import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from joblib import parallel_config
from oracles import oracle
from plain_logistic import log_half_cauchy, plain_logistic
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logsumexp
from scipy.stats import multivariate_normal, multivariate_t, norm
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.convex._calibration import calibrated_labels
from sklearn_ep.sites import LaplaceSite, StudentTSite

ORACLE = oracle("linear_average")
# expectations under a standard normal by the trapezoidal rule, to rounding for any slope used here
Cavities = collections.namedtuple("Cavities", ["mean", "var"])
NODES = np.linspace(-8.0, 8.0, 401)
WEIGHTS = norm.pdf(NODES) / norm.pdf(NODES).sum()


def make(n=120, d=6, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    return X, (rng.random(n) < expit(scale * X @ rng.standard_normal(d))).astype(int)


def fit(X, y, **kw):
    return ConvexVariationalLogistic(**kw).fit(X, y)


# ---------------------------------------------------------------------------- mode


@pytest.mark.parametrize("d", [1, 3, 10, 40])
def test_mode_of_columns_that_tell_nothing_is_no_variance_at_all(d):
    X = np.random.default_rng(0).standard_normal((30, d))
    X, y = np.vstack([X, X]), np.repeat([0, 1], 30)  # each row has both labels
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = fit(X, y, hyperparameters="mode")
    np.testing.assert_allclose(model.predict_proba(X)[:, 1], 0.5, atol=0.01)


# ---------------------------------------------------------------------------- average


@pytest.mark.parametrize("k", range(len(ORACLE["average"])))
def test_average_is_that_of_quadrature(k):
    q = ORACLE["average"][k]
    e = fit(np.array(q["X"]), np.array(q["y"]), fit_intercept=False, calibration=None)
    assert e.hyperparameters_used_ == "integrate" and e.hyper_names_ == ("log_prior_variance",)
    assert np.max(np.abs(e.coef_[0] - q["mean"]) / q["sd"]) < 0.02
    ratio = e.coef_std_[0] / q["sd"]
    assert 0.94 < ratio.min() and ratio.max() < 1.01  # the bound at each node is a little narrow
    mean = e.hyper_weights_ @ e.hyper_nodes_[:, 0]
    sd = np.sqrt(e.hyper_weights_ @ (e.hyper_nodes_[:, 0] - mean) ** 2)
    assert abs(mean - q["hyper_mean"]) < 0.05 * q["hyper_sd"]
    assert 0.93 < sd / q["hyper_sd"] < 1.05
    assert e.log_evidence_ == pytest.approx(q["log_z"], abs=0.05)
    assert e.prior_variance_ == pytest.approx(np.exp(mean))


def nodes_one_by_one(e, X, y, **kw):
    """Fits at the prior variances of the nodes."""
    kw = dict(tol=1e-8, inner_tol=1e-9, max_iter=100) | kw
    return [plain_logistic(np.exp(phi), **kw).fit(X, y) for phi in e.hyper_nodes_[:, 0]]


def test_everything_is_the_mixture_of_fits_at_the_nodes():
    X, y = make()
    new = np.random.default_rng(1).standard_normal((7, 6))
    e = fit(X, y, calibration=None)
    parts, w = nodes_one_by_one(e, X, y), e.hyper_weights_
    assert len(w) > 3 and w.sum() == pytest.approx(1.0)
    means = np.array([p.coef_[0] for p in parts])
    close = dict(rtol=2e-3, atol=3e-4)
    np.testing.assert_allclose(e.coef_[0], w @ means, **close)
    variance = w @ np.array([p.coef_std_[0] ** 2 for p in parts]) + w @ (means - w @ means) ** 2
    np.testing.assert_allclose(e.coef_std_[0] ** 2, variance, **close)
    np.testing.assert_allclose(e.intercept_, w @ np.array([p.intercept_ for p in parts]), **close)
    proba = np.tensordot(w, np.array([p.predict_proba(new) for p in parts]), 1)
    np.testing.assert_allclose(e.predict_proba(new), proba, atol=1e-4)
    latent = np.array([p.decision_function(new) for p in parts])
    cov = np.tensordot(w, np.array([p.latent_covariance(new) for p in parts]), 1)
    cov += (w * (latent - w @ latent).T) @ (latent - w @ latent)
    np.testing.assert_allclose(e.latent_covariance(new), cov, **close)
    mean, var = e.latent_mean_and_variance(new)
    np.testing.assert_allclose(mean, w @ latent, **close)
    np.testing.assert_allclose(var, np.diag(e.latent_covariance(new)), rtol=1e-9)
    np.testing.assert_allclose(e.decision_function(new), mean, rtol=1e-12)
    np.testing.assert_allclose(e.marginal_variance_, e.latent_mean_and_variance(X)[1], rtol=2e-2)


def evidence_of_ep(e, X, y):
    """Return what EP says of the evidence at the sites of a fit, from natural parameters alone."""
    B, tau = np.column_stack([X, np.ones(len(X))]), e.site_precision_
    prior = np.append(np.full(X.shape[1], 1.0 / e.prior_variance_), 0.01)
    A = np.diag(prior) + B.T * tau @ B
    C, u = np.linalg.inv(A), np.append(e.coef_[0], e.intercept_)
    s, v = B @ u, np.einsum("ij,jk,ik->i", B, C, B)
    sign = np.where(y, 1.0, -1.0)
    pull = sign * (expit(-sign[:, None] * (s[:, None] + np.sqrt(v)[:, None] * NODES)) @ WEIGHTS)
    left_v = 1.0 / (1.0 / v - tau)
    left_m = left_v * (s / v - (tau * s + pull))
    z = expit(sign[:, None] * (left_m[:, None] + np.sqrt(left_v)[:, None] * NODES)) @ WEIGHTS
    whole = 0.5 * (u @ A @ u - np.linalg.slogdet(A)[1] + np.sum(np.log(prior)))
    rows = 0.5 * (s**2 / v + np.log(v) - left_m**2 / left_v - np.log(left_v))
    return whole + np.sum(np.log(z) - rows)


@pytest.mark.parametrize("case", ["clear", "separable"])
def test_nodes_weigh_by_the_evidence_of_ep_at_the_sites_of_the_bound(case):
    X, y = make() if case == "clear" else make(40, 4, seed=1, scale=20.0)
    e = fit(X, y, calibration=None)
    parts, w = nodes_one_by_one(e, X, y), e.hyper_weights_
    prior = log_half_cauchy(e.hyper_nodes_[:, 0], X)
    bound = np.array([p.log_evidence_ for p in parts])
    ep = np.array([evidence_of_ep(p, X, y) for p in parts])
    assert np.all(ep > bound)
    if case == "separable":
        assert np.ptp(ep - bound) > 0.3
    mass = ep + prior
    # what is foretold beyond goes to the outermost nodes
    phi = e.hyper_nodes_[:, 0]
    inner = (phi > phi.min()) & (phi < phi.max())
    assert inner.sum() > 2
    np.testing.assert_allclose(
        np.log(w[inner] / w.max()), (mass - mass[np.argmax(w)])[inner], atol=0.01
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_evidence_of_ep_is_nearer_to_the_truth_than_the_bound(seed):
    X, y = make(60, 6, seed=seed, scale=4.0)
    B, sign = np.column_stack([X, np.ones(60)]), np.where(y, 1.0, -1.0)
    rng = np.random.default_rng(seed)
    for phi in (1.0, 3.0):
        e = plain_logistic(np.exp(phi), tol=1e-6, inner_tol=1e-7, max_iter=100).fit(X, y)
        prior = multivariate_normal(cov=np.diag([np.exp(phi)] * 6 + [100.0]))
        u = np.append(e.coef_[0], e.intercept_)
        drawn = e._posteriors[0].nodes[0].system.covariance(np.eye(7), np.eye(7))
        student = multivariate_t(u, 1.3 * drawn, df=5, seed=rng)
        draws = student.rvs(40_000)
        log_w = -np.sum(np.logaddexp(0.0, -sign * (draws @ B.T)), axis=1)
        log_w += prior.logpdf(draws) - student.logpdf(draws)
        truth = logsumexp(log_w) - np.log(len(draws))
        share = (evidence_of_ep(e, X, y) - e.log_evidence_) / (truth - e.log_evidence_)
        assert 0.3 < share < 1.1


@pytest.mark.parametrize("copies", [0.5, 1.0, 3.0])
def test_weights_of_nodes_are_nearer_to_the_truth_than_the_bound(copies):
    """One coefficient, by quadrature."""
    x, weight = np.linspace(-1.0, 1.0, 12), np.full(12, copies)
    y = (x > 0).astype(int)
    y[5], y[7] = 1, 0
    e = ConvexVariationalLogistic(fit_intercept=False, calibration=None)
    e.fit(x[:, None], y, weight)
    order = np.argsort(e.hyper_nodes_[:, 0])[1:-1]  # the outer ones have what is foretold beyond
    inner = e.hyper_nodes_[order, 0]
    u = np.sinh(np.linspace(-12.0, 12.0, 20_001))
    log_lik = -copies * np.sum(np.logaddexp(0.0, -np.outer(np.where(y, x, -x), u)), axis=0)
    exact, bound, prior = np.empty((3, len(inner)))
    for k, phi in enumerate(inner):
        density = np.exp(log_lik) * norm.pdf(u, scale=np.exp(0.5 * phi))
        exact[k], prior[k] = np.log(np.trapezoid(density, u)), log_half_cauchy(phi, x[:, None])
        one = plain_logistic(np.exp(phi), fit_intercept=False, tol=1e-6, inner_tol=1e-7)
        bound[k] = one.fit(x[:, None], y, weight).log_evidence_
    ours = np.log(e.hyper_weights_[order]) - prior
    assert np.std(ours - exact) < np.std(bound - exact)


def test_draws_intervals_and_summary_are_of_the_mixture():
    X, y = make(40, 5, seed=2)
    e = fit(X, y)
    draws = e.sample_posterior(40_000, random_state=0)
    assert draws.shape == (40_000, 6)
    np.testing.assert_allclose(draws[:, :5].mean(0), e.coef_[0], atol=0.02)
    np.testing.assert_allclose(draws[:, :5].std(0), e.coef_std_[0], rtol=0.02)
    interval = e.coef_interval(0.9)
    assert interval.shape == (1, 5, 2)
    ends = np.quantile(draws, [0.05, 0.95], axis=0).T
    table = e.summary(0.9).coefficients
    assert np.max(np.abs(interval[0] - ends[:5]) / e.coef_std_[0][:, None]) < 0.04
    np.testing.assert_array_equal(
        np.column_stack([table["lower"], table["upper"]])[:5], interval[0]
    )
    # not the intervals of a normal distribution: the mixture has longer tails
    normal = e.coef_[0][:, None] + norm.ppf([0.0005, 0.9995]) * e.coef_std_[0][:, None]
    assert np.all(np.abs(e.coef_interval(0.999)[0] - normal).max(axis=1) > 0.02 * e.coef_std_[0])
    proba = e.sample_proba(X[:8], 8000, random_state=0)
    np.testing.assert_allclose(proba.mean(0), e.predict_proba(X[:8]), atol=0.015)


@pytest.mark.parametrize(
    "kind",
    ["gaussian", "kl", "local", ""],
)
def test_scales_are_learned_where_the_bound_is_flat(kind):
    X, y = make(60, 4, seed=3)
    settings = {
        "gaussian": lambda s: dict(prior_variance=0.7 * s),
        "kl": lambda s: dict(prior=LaplaceSite(0.6 * s, "kl")),
        "local": lambda s: dict(prior=LaplaceSite(0.6 * s, "local")),
        "": lambda s: dict(prior=StudentTSite(3.0, 0.6 * s)),
    }[kind]
    tight = dict(tol=1e-8, inner_tol=1e-11, max_iter=500)
    learned = plain_logistic(learn_prior=True, **settings(1.0), **tight).fit(X, y)
    given = plain_logistic(**settings(1.0), **tight).fit(X, y)
    scale = learned.prior_variance_ / given.prior_variance_
    scale = scale if kind == "gaussian" else np.sqrt(scale)
    low, top, high = (
        plain_logistic(**settings(scale * np.exp(h)), **tight).fit(X, y).log_evidence_
        for h in (-0.05, 0.0, 0.05)
    )
    assert learned.log_evidence_ == pytest.approx(top, abs=1e-6)
    # the bound's own quadrature is good to 1e-5
    assert (high - low) / 0.1 == pytest.approx(0.0, abs=2e-3)
    assert max(high, low) < top
    phi = np.linspace(-200, 200, 40_001)  # the density that averages have besides
    assert np.trapezoid(np.exp(log_half_cauchy(phi, X)), phi) == pytest.approx(1.0, abs=1e-6)


def test_mode_is_the_top_of_bound_times_prior():
    X, y = make(80, 5, seed=4)
    e = fit(X, y, tol=1e-8, inner_tol=1e-9, max_iter=200)
    step = np.diff(np.sort(e.hyper_nodes_[:, 0]))
    np.testing.assert_allclose(step, step[0], rtol=1e-9)  # a lattice
    mode = e.hyper_nodes_[np.argmax(e.hyper_weights_), 0]

    def density(phi):
        one = plain_logistic(np.exp(phi), tol=1e-8, inner_tol=1e-9, max_iter=100).fit(X, y)
        return one.log_evidence_ + log_half_cauchy(phi, X)

    assert density(mode) > max(density(mode - 0.1), density(mode + 0.1))


def test_other_priors_and_groups_are_averaged_too():
    X, y = make(60, 6, seed=5)
    laplace = fit(X, y, prior="laplace", laplace_scale="learn")
    assert laplace.hyper_names_ == ("log_laplace_scale",) and len(laplace.hyper_weights_) > 3
    centre = laplace.hyper_weights_ @ laplace.hyper_nodes_[:, 0]
    assert laplace.laplace_scale_ == pytest.approx(np.exp(centre))
    assert laplace.prior_variance_ == pytest.approx(2 * laplace.laplace_scale_**2)
    site = fit(X, y, prior=StudentTSite(4.0, 0.5), learn_prior=True)
    assert site.hyper_names_ == ("log_prior_scale",) and len(site.hyper_weights_) > 3
    kw = dict(prior_groups=[0, 0, 0, 1, 1, 1])
    groups, mode = (fit(X, y, hyperparameters=how, **kw) for how in ("integrate", "mode"))
    assert groups.hyper_nodes_.shape[1] == 1 and len(groups.hyper_weights_) > 3
    ratio = groups.prior_variance_ / mode.prior_variance_
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
    log_mean = np.mean(np.log(groups.prior_variance_))
    assert groups.hyper_weights_ @ groups.hyper_nodes_[:, 0] == pytest.approx(log_mean)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_evidence_of_groups_is_that_of_a_common_factor(seed):
    """By grids of both coefficients and of the log variances; proportions count as known."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((100, 2))
    y = (X @ [1.0, 1.0] + rng.logistic(size=100) > 0).astype(int)
    kw = dict(prior_groups=[0, 1], fit_intercept=False, tol=1e-6, max_iter=200)
    mode, est = (fit(X, y, hyperparameters=how, **kw) for how in ("mode", "integrate"))
    grid, step = np.linspace(-4, 6, 101, retstep=True)
    u = np.stack(np.meshgrid(grid, grid, indexing="ij")).reshape(2, -1)
    log_lik = log_expit((2 * y - 1)[:, None] * (X @ u)).sum(axis=0)

    def evidence(variance):
        log_prior = norm.logpdf(u, scale=np.sqrt(variance)[:, None]).sum(axis=0)
        return logsumexp(log_lik + log_prior) + 2 * np.log(step)

    # at the mode it is the bound alone, which is a little below
    gap = evidence(mode.prior_variance_) - mode.log_evidence_
    assert 0.0 < gap < 0.01
    phi, width = np.linspace(-5, 9, 29, retstep=True)
    proportion, unit = mode.prior_variance_, mode.prior_variance_ @ X.var(axis=0) / X.var(0).sum()
    each = [evidence(np.exp(p) * proportion) + log_half_cauchy(p + np.log(unit), X) for p in phi]
    assert est.log_evidence_ == pytest.approx(logsumexp(each) + np.log(width), abs=0.05)
    # with a prior of each group and proportions integrated out it is lower
    phi, width = np.linspace(-7, 9, 17, retstep=True)
    own = [log_half_cauchy(phi, X[:, [j]]) for j in range(2)]
    both = [
        evidence(np.exp([p, q])) + own[0][i] + own[1][j]
        for i, p in enumerate(phi)
        for j, q in enumerate(phi)
    ]
    assert est.log_evidence_ - logsumexp(both) - 2 * np.log(width) == pytest.approx(0.5, abs=0.15)


def test_what_is_given_is_kept_and_names_what_ran():
    X, y = make(60, 4, seed=6)
    given = fit(X, y, prior_variance=2.0, hyperparameters="integrate")
    assert given.hyper_nodes_.shape == (1, 0) and given.hyper_names_ == ()
    assert given.hyperparameters_used_ == "mode" and given.prior_variance_ == 2.0
    np.testing.assert_array_equal(given.coef_, plain_logistic(2.0).fit(X, y).coef_)
    np.testing.assert_array_equal(
        given.sample_posterior(3, random_state=0),
        plain_logistic(2.0).fit(X, y).sample_posterior(3, random_state=0),
    )
    local = fit(X, y, bound="local")
    assert local.prior_variance_ == 1.0 and local.hyper_nodes_.shape == (1, 0)
    learned = fit(X, y, learn_prior=True, prior_variance=3.0)
    assert len(learned.hyper_weights_) > 1
    np.testing.assert_allclose(learned.predict_proba(X), fit(X, y).predict_proba(X), atol=1e-3)
    mode = fit(X, y, hyperparameters="mode")
    assert mode.hyper_nodes_[:, 0] == pytest.approx(np.log(mode.prior_variance_))
    np.testing.assert_array_equal(mode.hyper_weights_, [1.0])
    for kw in (dict(variance="calibrated"), dict(variance="monte_carlo")):
        assert fit(X, y, random_state=0, **kw).hyperparameters_used_ == "mode"
        with pytest.raises(ValueError, match="hyperparameters='integrate'.*variance"):
            fit(X, y, hyperparameters="integrate", **kw)
    rows = ConvexVariationalLogistic(hyperparameters="integrate")
    with pytest.raises(ValueError, match="hyperparameters='integrate'.*partitions"):
        rows.fit([(X, y)])
    with pytest.raises(ValueError, match="hyperparameters='integrate'.*partial_fit"):
        rows.partial_fit(X, y)
    assert ConvexVariationalLogistic().fit([(X, y)]).hyperparameters_used_ == "mode"
    assert ConvexVariationalLogistic().partial_fit(X, y).prior_variance_ == 1.0


def test_auto_takes_the_cheaper_way_to_variances():
    rng = np.random.default_rng(0)
    rough = dict(max_iter=1, tol=1e9, random_state=0)
    few = fit(*sparse_rows(rng, 300, 5000), **rough)
    assert (few.variance_method_, few.hyperparameters_used_) == ("exact", "integrate")


@pytest.mark.slow
def test_auto_takes_the_cheaper_way_to_variances_of_more_rows():
    rng = np.random.default_rng(0)
    rough = dict(max_iter=1, tol=1e9, random_state=0)
    some = sparse_rows(rng, 450, 5000)
    assert fit(*some, **rough).variance_method_ == "calibrated"
    assert fit(*some, prior_variance=1.0, **rough).variance_method_ == "exact"  # of one scale
    texts, y = sparse_rows(rng, 700, 5000)
    many = fit(texts, y, **rough)
    assert (many.variance_method_, many.hyperparameters_used_) == ("calibrated", "mode")
    asked = fit(texts, y, hyperparameters="integrate", **rough)
    assert (asked.variance_method_, asked.hyperparameters_used_) == ("exact", "integrate")
    dense = rng.standard_normal((700, 600))  # whose products are dear
    big = fit(dense, (dense[:, 0] > 0).astype(int), **rough)
    assert (big.variance_method_, big.hyperparameters_used_) == ("exact", "integrate")


def sparse_rows(rng, n, d):
    X = sp.random_array((n, d), density=20 / d, format="csr", rng=rng)
    return X, np.arange(n) % 2


@pytest.mark.filterwarnings("ignore:.*StandardScaler:UserWarning")
def test_units_and_weights_and_order_do_not_matter():
    X, y = make(70, 5, seed=7)
    e = fit(X, y)
    scale = np.array([1e-4, 0.1, 1.0, 30.0, 1e4])
    other = fit(X * scale, y, prior_variance=1.0 / scale**2, learn_prior=True)
    np.testing.assert_allclose(other.predict_proba(X * scale), e.predict_proba(X), atol=1e-6)
    assert other.log_evidence_ == pytest.approx(e.log_evidence_, abs=1e-6)
    tiny = fit(X * 1e-7, y)  # next to an intercept, whose prior keeps its units
    np.testing.assert_allclose(tiny.predict_proba(X * 1e-7), e.predict_proba(X), atol=3e-4)
    copies = np.random.default_rng(1).integers(0, 4, 70)
    order = np.random.default_rng(2).permutation(copies.sum())
    a = ConvexVariationalLogistic().fit(X, y, copies)
    b = fit(np.repeat(X, copies, 0)[order], np.repeat(y, copies)[order])
    np.testing.assert_allclose(a.hyper_nodes_, b.hyper_nodes_, atol=1e-8)
    np.testing.assert_allclose(a.hyper_weights_, b.hyper_weights_, atol=1e-7)
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-8)
    assert a.slope_ == pytest.approx(b.slope_, abs=1e-7)
    np.testing.assert_allclose(np.repeat(a.loo_proba_, copies)[order], b.loo_proba_, atol=1e-7)
    assert np.all(np.isnan(a.loo_proba_) == (copies == 0))


def test_sparse_dual_and_jobs_give_the_same():
    X, y = make(30, 60, seed=8)
    X[np.abs(X) < 1.0] = 0.0
    a = fit(X, y)
    assert a.solver_ == "dual" and a.hyperparameters_used_ == "integrate"
    for other in (fit(sp.csr_matrix(X), y), fit(X, y, solver="primal")):
        np.testing.assert_allclose(other.predict_proba(X), a.predict_proba(X), atol=1e-6)
        np.testing.assert_allclose(other.coef_std_, a.coef_std_, rtol=1e-5)
    with parallel_config(backend="threading"):
        two = fit(X, y, n_jobs=2)
    np.testing.assert_array_equal(two.hyper_nodes_, a.hyper_nodes_)
    np.testing.assert_array_equal(two.coef_, a.coef_)
    np.testing.assert_array_equal(two.predict_proba(X), a.predict_proba(X))


def test_condition_on_weighs_nodes_by_what_they_foretold():
    X, y = make(48, 4, seed=9)
    e = fit(X[:40], y[:40])
    new = e.condition_on(X[40:], y[40:])
    sign = 1.0 if y[40] == 1 else -1.0
    latent = [node.latent(X[40:41]) for node in e._posteriors[0].nodes]
    p = np.array([expit(sign * (m + np.sqrt(v) * NODES)) @ WEIGHTS for m, v in latent])
    first = e.condition_on(X[40:41], y[40:41])
    w = e.hyper_weights_ * p
    # the bound's own quadrature is good to 1e-5
    np.testing.assert_allclose(first.hyper_weights_, w / w.sum(), rtol=1e-5)
    assert first.log_evidence_ == pytest.approx(e.log_evidence_ + np.log(w.sum()), abs=1e-5)
    one = e
    for i in range(40, 48):
        one = one.condition_on(X[[i]], y[[i]])
    np.testing.assert_allclose(one.hyper_weights_, new.hyper_weights_, rtol=1e-9)
    np.testing.assert_allclose(one.predict_proba(X), new.predict_proba(X), rtol=1e-9)
    assert (new.slope_, new.temper_) == (e.slope_, e.temper_)
    full = fit(X, y, calibration=None)
    assert new.log_evidence_ == pytest.approx(full.log_evidence_, abs=0.1)
    assert np.max(np.abs(new.coef_ - full.coef_) / full.coef_std_) < 0.1
    assert np.max(np.abs(new.coef_std_ / full.coef_std_ - 1)) < 0.06


def test_several_classes_diagnosis_warm_start_and_pickles():
    X, y = make(90, 3, seed=10)
    three = y + (X[:, 0] > 1)
    e = fit(X, three, multi_class="one_vs_rest")
    assert len(e.hyper_nodes_) == len(e.hyper_weights_) == 3
    assert all(w.sum() == pytest.approx(1.0) for w in e.hyper_weights_)
    assert e.slope_.shape == e.temper_.shape == (3,) and e.loo_proba_.shape == (3, 90)
    one = fit(X, three == 0)
    np.testing.assert_array_equal(one.hyper_nodes_, e.hyper_nodes_[0])
    np.testing.assert_array_equal(one.coef_[0], -np.array(e.coef_[0]) * -1)
    text = str(one.diagnose(X=X, y=three == 0))
    assert "averaged over nodes" in text and "Pareto" in text
    assert "averaged" not in str(plain_logistic().fit(X, y).diagnose())
    mode = fit(X, y, hyperparameters="mode")
    average = fit(X, y)
    size = len(pickle.dumps(average)) / (len(average.hyper_weights_) * len(pickle.dumps(mode)))
    assert size < 1.0
    loaded = pickle.loads(pickle.dumps(average))
    np.testing.assert_array_equal(loaded.predict_proba(X), average.predict_proba(X))
    warm = ConvexVariationalLogistic(warm_start=True).fit(X, y)
    first = warm.n_iter_
    warm.fit(X, y)
    assert warm.n_iter_ <= first
    np.testing.assert_allclose(warm.coef_, average.coef_, atol=2e-3)


def test_a_warm_start_goes_on_from_columns_that_did_not_vary():
    X, y = make(30, 2, seed=17)
    e = ConvexVariationalLogistic(warm_start=True)
    for data in (X, np.ones((30, 2)), X):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            e.fit(data, y)
    np.testing.assert_allclose(e.predict_proba(X), fit(X, y).predict_proba(X), atol=2e-3)


@pytest.mark.slow
def test_intervals_cover_where_those_at_the_mode_do_not():
    rng = np.random.default_rng(11)
    inside = {"integrate": [], "mode": []}
    for _ in range(40):
        X, w = rng.standard_normal((60, 10)), rng.standard_normal(10) * np.sqrt(0.2)
        y = (rng.random(60) < expit(X @ w)).astype(int)
        for how, found in inside.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # a mode at zero is far away
                e = fit(X, y, hyperparameters=how, fit_intercept=False)
            low, high = e.coef_interval()[0].T
            found.extend((low < w) & (w < high))
    share = {how: np.mean(found) for how, found in inside.items()}
    assert abs(share["integrate"] - 0.9) < 0.05  # three standard errors of 400 coefficients
    assert share["integrate"] > share["mode"]


# ---------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("k", range(len(ORACLE["left_out"])))
def test_left_out_probabilities_are_those_of_importance_sampling(k):
    q = ORACLE["left_out"][k]
    X, y = np.array(q["X"]), np.array(q["y"])
    e = plain_logistic(
        q["prior_variance"], intercept_prior_variance=q["intercept_prior_variance"]
    ).fit(X, y)
    gap = np.abs(e.loo_proba_ - q["loo_proba"])
    assert gap.max() < 0.012 and gap.mean() < 0.003


@pytest.mark.parametrize("bound", ["kl", "local"])
@pytest.mark.parametrize("solver", ["primal", "dual"])
def test_cavities_are_fits_without_the_site_of_the_row(bound, solver):
    X, y = make(40, 3, seed=12)
    e = plain_logistic(2.0, bound=bound, solver=solver, tol=1e-9, inner_tol=1e-10, max_iter=200)
    e.fit(X, y)
    B = np.column_stack([X, np.ones(40)])
    tau, prior = e.site_precision_, np.diag([0.5, 0.5, 0.5, 0.01])
    A = prior + B.T * tau @ B
    u = np.append(e.coef_[0], e.intercept_)
    sign = np.where(y, 1.0, -1.0)
    s, v = e.latent_mean_and_variance(X)
    if bound == "kl":
        pull = sign * (expit(-sign[:, None] * (s[:, None] + np.sqrt(v)[:, None] * NODES)) @ WEIGHTS)
    else:
        pull = 0.5 * sign - tau * s
    for i in range(40):
        left = A - tau[i] * np.outer(B[i], B[i])
        shift = A @ u - B[i] * (tau[i] * s[i] + pull[i])
        np.testing.assert_allclose(e.loo_mean_[i], B[i] @ np.linalg.solve(left, shift), atol=2e-5)
        var = B[i] @ np.linalg.solve(left, B[i])
        np.testing.assert_allclose(e.loo_variance_[i], var, rtol=1e-5)


def log_prior(slope, temper):
    """Of slope and temper: normal ones of their logs, of a temper below one Cauchy's."""
    of_temper = 0.5 * np.log(temper) ** 2
    if temper < 1:
        of_temper = np.log1p((np.log(temper) / 0.4) ** 2)
    return -0.5 * (np.log(slope) / 0.3) ** 2 - of_temper


def objective(sign, weight, mean, var, slope, temper, every=1):
    """What slope and temper are to maximise; each fourth node is enough for sds below ten."""
    m, sd = slope * mean, slope * np.sqrt(temper * var)
    p = expit(sign[:, None] * (m[:, None] + sd[:, None] * NODES[::every])) @ WEIGHTS[::every]
    p /= WEIGHTS[::every].sum()
    return weight @ np.log(p) + log_prior(slope, temper)


def test_slope_and_temper_of_many_rows_are_where_exact_integrals_find_them():
    rng = np.random.default_rng(3)
    n = 10_000
    mean, var = rng.normal(size=n) * 2.0, rng.uniform(0.5, 6.0, n)
    sign = np.where(rng.random(n) < expit(0.8 * mean / np.sqrt(1.0 + 0.3 * var)), 1.0, -1.0)
    out = calibrated_labels(sign, np.ones(n), np.ones(1), [Cavities(mean, var)])
    at = np.log(out.scale)

    def density(theta):
        return objective(sign, np.ones(n), mean, var, *np.exp(theta), every=4)

    best = minimize(lambda theta: -density(theta), at, options=dict(gtol=1e-2))
    assert abs(out.scale[0] - 1.0) > 0.02 and -best.fun - density(at) < 2e-3


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 4, *(pytest.param(s, marks=pytest.mark.slow) for s in (3, 5))]
)
def test_slope_and_temper_are_where_brute_force_finds_them(seed):
    rng = np.random.default_rng(seed)
    n = [3, 10, 40, 40, 80, 80][seed]
    mean, var = 3 * rng.standard_normal(n), rng.gamma(2.0, [0.1, 1, 3][seed % 3], n)
    truth = rng.random(n) < expit(mean * rng.choice([0.3, 1.0, 2.0]))
    sign, weight = np.where(truth, 1.0, -1.0), rng.integers(1, 4, n).astype(float)
    out = calibrated_labels(sign, weight, np.ones(1), [Cavities(mean, var)])
    grid = [
        objective(sign, weight, mean, var, a, t)
        for a in np.exp(np.linspace(-1.5, 1.5, 31))
        for t in np.exp(np.linspace(-3, 3, 31))
    ]
    found = objective(sign, weight, mean, var, out.scale[0], out.scale[1])
    assert found >= max(grid) - 1e-4
    a, t = out.scale
    p = expit(sign[:, None] * a * (mean[:, None] + np.sqrt(t * var)[:, None] * NODES))
    np.testing.assert_allclose(np.exp(out.log_proba), p @ WEIGHTS, atol=1e-5)
    none = calibrated_labels(sign, weight, np.ones(1), [Cavities(mean, var)], None)
    assert tuple(none.scale) == (1.0, 1.0)


def test_average_is_calibrated_as_the_mixture_without_the_row():
    rng = np.random.default_rng(3)
    means, variances = 2 * rng.standard_normal((2, 50)), rng.gamma(2.0, 0.5, (2, 50))
    sign, w = np.where(rng.random(50) < 0.6, 1.0, -1.0), np.array([0.3, 0.7])
    nodes = [Cavities(*pair) for pair in zip(means, variances, strict=True)]
    out = calibrated_labels(sign, np.ones(50), w, nodes)

    def proba(a, t, share, centre):
        m = a * (centre + np.sqrt(t) * (means - centre))
        z = sign[:, None] * (m[..., None] + a * np.sqrt(t * variances)[..., None] * NODES)
        return np.sum(share * (expit(z) @ WEIGHTS), axis=0)

    each = expit(sign[:, None] * (means[..., None] + np.sqrt(variances)[..., None] * NODES))
    share = w[:, None] / (each @ WEIGHTS)
    share = share / share.sum(axis=0)
    centre = np.sum(share * means, axis=0)
    np.testing.assert_allclose(out.mean, centre, rtol=1e-6)
    total = np.sum(share * (variances + (means - centre) ** 2), axis=0)
    np.testing.assert_allclose(out.var, total, rtol=1e-6)
    own = proba(out.scale[0], out.scale[1], share, centre)
    np.testing.assert_allclose(np.exp(out.log_proba), own, rtol=1e-6)

    def density(a, t):
        return np.sum(np.log(proba(a, t, share, centre))) + log_prior(a, t)

    top = density(out.scale[0], out.scale[1])
    for a, t in ((1.02, 1.0), (0.98, 1.0), (1.0, 1.05), (1.0, 0.95), (1.02, 1.05), (0.98, 1.05)):
        assert density(out.scale[0] * a, out.scale[1] * t) < top


def test_left_out_probabilities_of_an_average_are_those_of_fits_without_the_row():
    X, y = make(40, 3, seed=16)
    e = fit(X, y, calibration=None)
    own = []
    for i in range(0, 40, 4):
        rest = np.arange(40) != i
        own.append(fit(X[rest], y[rest], calibration=None).predict_proba(X[[i]])[0, y[i]])
    gap = np.abs(e.loo_proba_[::4] - own)
    assert gap.max() < 0.025 and gap.mean() < 0.006


def test_weights_of_many_magnitudes_have_a_slope_and_a_temper():
    mean = np.array([-3e3, 2e3, -1e3, 40.0, 1e-3, 2.0])
    var, weight = np.array([5e3, 9e3, 7e3, 1e3, 1e3, 1e2]), 10.0 ** np.array([6, 6, 6, 0, 0, 0])
    for sign in (np.ones(6), np.array([-1.0, 1.0, -1.0, -1.0, 1.0, 1.0])):
        out = calibrated_labels(sign, weight, np.ones(1), [Cavities(mean, var)])
        assert np.isfinite(out.scale[0]) and np.isfinite(out.scale[1])


def test_rows_without_a_proper_cavity_leave_the_sum():
    rng = np.random.default_rng(0)
    mean, var = rng.standard_normal(30), rng.gamma(2.0, 1.0, 30)
    sign = np.where(rng.random(30) < 0.7, 1.0, -1.0)
    bad = np.append(mean, np.nan), np.append(var, np.nan)
    a = calibrated_labels(sign, np.ones(30), np.ones(1), [Cavities(mean, var)])
    b = calibrated_labels(np.append(sign, 1.0), np.ones(31), np.ones(1), [Cavities(*bad)])
    assert tuple(a.scale) == tuple(b.scale)
    assert np.isnan(b.log_proba[-1]) and np.all(np.isfinite(b.log_proba[:-1]))


@pytest.mark.parametrize("variance", ["exact", "calibrated", "monte_carlo"])
def test_only_predictions_have_slope_and_temper(variance):
    X, y = make(150, 8, seed=13)
    kw = dict(variance=variance, random_state=0)
    plain, e = fit(X, y, calibration=None, **kw), fit(X, y, **kw)
    assert e.slope_ != 1.0 and e.temper_ != 1.0 and (plain.slope_, plain.temper_) == (1.0, 1.0)
    for name in ("coef_", "coef_std_", "intercept_", "log_evidence_", "loo_mean_", "hyper_nodes_"):
        np.testing.assert_array_equal(getattr(e, name), getattr(plain, name))
    draws = [c.sample_posterior(5, random_state=0) for c in (e, plain)]
    np.testing.assert_array_equal(*draws)
    np.testing.assert_array_equal(e.coef_interval(), plain.coef_interval())
    (m, v), (m0, v0) = (c.latent_mean_and_variance(X) for c in (e, plain))
    np.testing.assert_allclose(m, e.slope_ * m0, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(v, e.slope_**2 * e.temper_ * v0, rtol=1e-9)
    np.testing.assert_allclose(e.decision_function(X), m, rtol=1e-10, atol=1e-12)
    cov, cov0 = (c.latent_covariance(X[:5], X[5:9]) for c in (e, plain))
    np.testing.assert_allclose(cov, e.slope_**2 * e.temper_ * cov0, rtol=1e-9, atol=1e-12)
    proba = e.sample_proba(X[:6], 4000, random_state=0).mean(0)
    np.testing.assert_allclose(proba, e.predict_proba(X[:6]), atol=0.03)
    if len(e.hyper_weights_) == 1:
        p = expit(m[:, None] + np.sqrt(v)[:, None] * NODES) @ WEIGHTS
        np.testing.assert_allclose(e.predict_proba(X)[:, 1], p, atol=1e-6)


def test_calibration_does_little_where_the_model_is_right():
    rng = np.random.default_rng(14)
    lost = []
    for _ in range(6):
        X, w = rng.standard_normal((1200, 12)), 0.8 * rng.standard_normal(12)
        y = (rng.random(1200) < expit(X @ w)).astype(int)
        pair = [fit(X[:200], y[:200], calibration=how) for how in ("loo", None)]
        log_p = [e.predict_log_proba(X[200:])[np.arange(1000), y[200:]] for e in pair]
        lost.append(np.mean(log_p[1] - log_p[0]))
    assert np.mean(lost) < 0.003


# ---------------------------------------------------------------------------- hostile data


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hostile_data_give_finite_averages(weighted):
    rng = np.random.default_rng(15)
    X = rng.standard_normal((40, 3))
    y = (X[:, 0] > 0).astype(int)
    zero = np.vstack([X, np.zeros((10, 3))])
    cases = [
        (X * 1e3, y, {}),
        (X * 1e-6, y, {}),
        (np.hstack([X, X, np.ones((40, 1)), np.zeros((40, 1))]), y, {}),
        (sp.csr_matrix(zero), np.r_[y, np.arange(10) % 2], dict(fit_intercept=False)),
        (np.ones((12, 2)), np.arange(12) % 2, {}),
        (np.zeros((12, 2)), np.arange(12) % 2, {}),
        (np.array([[1.0], [-1.0]]), np.array([0, 1]), {}),
        (X[:6], np.arange(6) % 2, {}),
        (rng.standard_normal((20, 120)), np.arange(20) % 2, {}),
        (X, y, dict(intercept_prior_variance=np.inf)),
        (X, y, dict(class_weight={0: 0.01, 1: 30.0})),
    ]
    for data, labels, kw in cases:
        weight = 10.0 ** rng.uniform(-3, 3, len(labels)) if weighted else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            e = ConvexVariationalLogistic(**kw).fit(data, labels, weight)
        for part in (
            e.coef_, e.coef_std_, e.intercept_, e.predict_log_proba(data), e.slope_, e.temper_,
            e.hyper_nodes_, e.loo_proba_, e.coef_interval(),
        ):  # fmt: skip
            assert np.all(np.isfinite(part))
        assert np.all(e.coef_std_ > 0)


@pytest.mark.parametrize(
    ("kw", "word"),
    [
        (dict(prior_variance="auto"), "prior_variance"),
        (dict(calibration="platt"), "calibration"),
        (dict(hyperparameters="average"), "hyperparameters"),
    ],
)
def test_bad_words_are_named(kw, word):
    X, y = make(40, 2)
    with pytest.raises(ValueError, match=word):
        fit(X, y, **kw)
