"""Power EP: rows matched by a share of their likelihood, against slow code and its limits."""

import functools

import numpy as np
import pytest
from scipy.special import expit, log_expit, log_ndtr
from sklearn.model_selection import GridSearchCV

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep._engine.likelihoods import Logit
from sklearn_ep._engine.rules import MomentMatching, Power
from sklearn_ep._engine.sites import Sites
from sklearn_ep.hierarchical.partitions import part

GRID = np.linspace(-1.0, 1.0, 6001)


def by_sums(u, sign, mean, var):
    """log Z, mean and variance of sigma(s f)^u N(f; mean, var) on a fine grid."""
    f = mean + 14.0 * np.sqrt(var) * GRID
    log_density = u * log_expit(sign * f) - 0.5 * (f - mean) ** 2 / var
    density = np.exp(log_density - log_density.max())
    total = density.sum()
    log_z = log_density.max() + np.log(total * (f[1] - f[0])) - 0.5 * np.log(2 * np.pi * var)
    centre = f @ density / total
    return log_z, centre, (f - centre) ** 2 @ density / total


def tilted(u, sign, mean, var):
    """log Z of the power, gradient and negative curvature, by the rule on rows without sites."""
    rule = MomentMatching() if u == 1.0 else Power(u)
    found = rule(Logit(), sign, Sites.zero(len(mean)), mean, var)
    g = u * found.gradient
    return u * found.log_term, g, g**2 - 2.0 * u * found.noise_slope


@pytest.mark.parametrize("u", [1.0, 0.5, 1e-3])
@pytest.mark.parametrize("var", [1e-4, 0.3, 4.0, 50.0, 300.0, 1e4])
def test_powers_of_the_logit_against_sums(u, var):
    mean, sign = np.array([-12.0, -1.0, 0.2, 7.0]), np.array([1.0, 1.0, -1.0, -1.0])
    log_z, g, h = tilted(u, sign, mean, np.full(4, var))
    for i in range(4):
        exact = by_sums(u, sign[i], mean[i], var)
        assert log_z[i] == pytest.approx(exact[0], rel=1e-8, abs=1e-10)
        assert mean[i] + var * g[i] == pytest.approx(exact[1], abs=1e-7 * np.sqrt(var))
        assert var - var**2 * h[i] == pytest.approx(exact[2], rel=1e-6)


@pytest.mark.parametrize("u", [0.9, 0.5])
def test_powers_of_the_logit_under_wide_gaussians(u):
    """Far out the factor is exp(u f) below zero and 1 above it, whatever is in between."""
    mean, sd = np.array([-1e9, -3e7, 0.0, 2e7]), 1e8
    log_z, g, h = tilted(u, 1.0, mean, np.full(4, sd**2))
    a = -mean / sd  # below zero exp(u f) leaves a boundary layer of width 1 / u
    np.testing.assert_allclose(log_z, log_ndtr(-a), atol=1e-6)
    hazard = np.exp(-0.5 * a**2 - log_ndtr(-a)) / np.sqrt(2.0 * np.pi)
    np.testing.assert_allclose(g * sd, hazard, rtol=1e-5)
    np.testing.assert_allclose(h * sd**2, hazard * (hazard - a), rtol=1e-5)


def test_a_row_far_out_takes_no_longer_than_others():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = X[:, 0] + rng.logistic(size=60) > 0
    X[0] *= 1e6
    group = rng.integers(8, size=60)
    clf = HierarchicalEPLogistic(power=0.5, hyperparameters="mode").fit(X, y, group)
    assert np.all(np.isfinite(clf.predict_proba(X, group)))


def problem(seed=0):
    """Rows with a varying intercept, their dense design, and the prior of (beta, u)."""
    rng = np.random.default_rng(seed)
    X, group = rng.normal(size=(24, 2)), np.sort(rng.integers(0, 4, 24))
    sign = np.where(rng.uniform(size=24) < expit(X @ [1.5, -1] + group - 1.5), 1.0, -1.0)
    rows = part.arrow_rows(X, sign, np.ones(24), np.ones((24, 1)), group)
    design = np.hstack([rows.X, 1.3 * np.eye(4)[rows.group]])
    return rows, design, np.diag([0.5, 0.5, 1.0, 1.0, 1.0, 1.0])


def fit_at(rows, power):
    args = np.full((1, 1, 1), 1.3), 0.5 * np.eye(2)[None], np.zeros((1, 2)), None
    return part.conditional_ep(rows, *args, tol=1e-11, max_passes=500, power=power)


def test_the_fixed_point_is_that_of_one_row_after_the_other():
    """Serial updates with full matrices and sums on grids; the evidence by its definition."""
    u, (rows, design, prior) = 0.5, problem()
    t, nu = np.zeros(24), np.zeros(24)
    for _ in range(40):
        log_evidence = 0.0
        for i, a in enumerate(design):
            cov = np.linalg.inv(prior + design.T @ (t[:, None] * design))
            m, v = a @ cov @ design.T @ nu, a @ cov @ a
            cav_var = 1.0 / (1.0 / v - u * t[i])
            cav_mean = cav_var * (m / v - u * nu[i])
            log_z, mean, var = by_sums(u, rows.sign[i], cav_mean, cav_var)
            t[i], nu[i] = (1 / var - 1 / cav_var) / u, (mean / var - cav_mean / cav_var) / u
            # log of tilted mass over that of the site to the power u, under the cavity
            mass = 0.5 * (mean**2 / var - cav_mean**2 / cav_var + np.log(var / cav_var))
            log_evidence += (log_z - mass) / u
    cov = np.linalg.inv(prior + design.T @ (t[:, None] * design))
    mean = cov @ design.T @ nu
    log_evidence += 0.5 * (mean @ design.T @ nu + np.linalg.slogdet(cov @ prior)[1])
    found = fit_at(rows, u)
    np.testing.assert_allclose(found.mean[0], mean[:2], atol=1e-6)
    np.testing.assert_allclose(found.root[0].T @ found.root[0], cov[:2, :2], atol=1e-6)
    assert found.log_z[0] == pytest.approx(log_evidence, abs=1e-6)


def test_towards_zero_it_is_variational_bayes():
    """The Gaussian of least divergence from the posterior, and its bound of the evidence."""
    rows, design, prior = problem()
    signed, x = rows.sign[:, None] * design, GRID[::10] * 10
    weight = np.exp(-0.5 * x**2) / np.exp(-0.5 * x**2).sum()
    mean, cov = np.zeros(6), np.linalg.inv(prior)
    for _ in range(200):
        z = (signed @ mean)[:, None] + np.sqrt(np.sum(signed @ cov * signed, 1))[:, None] * x
        slope, curvature = expit(-z) @ weight, (expit(z) * expit(-z)) @ weight
        cov = np.linalg.inv(prior + signed.T @ (curvature[:, None] * signed))
        mean = mean + cov @ (signed.T @ slope - prior @ mean)
    bound = np.sum(log_expit(z) @ weight) - 0.5 * mean @ prior @ mean
    bound += 0.5 * (6 - np.trace(prior @ cov) + np.linalg.slogdet(prior @ cov)[1])
    found, half, ep = (fit_at(rows, power) for power in (1e-5, 0.5, 1.0))
    np.testing.assert_allclose(found.mean[0], mean[:2], atol=1e-5)
    np.testing.assert_allclose(found.root[0].T @ found.root[0], cov[:2, :2], atol=1e-5)
    assert found.log_z[0] == pytest.approx(bound, abs=1e-5)
    assert found.log_z[0] < half.log_z[0] < ep.log_z[0]
    sds = [np.sqrt(np.diagonal(f.root[0].T @ f.root[0])) for f in (found, half, ep)]
    assert np.all(sds[0] < sds[1]) and np.all(sds[1] < sds[2])


@functools.cache
def data():
    rng = np.random.default_rng(1)
    person, item = rng.integers(30, size=900), rng.integers(12, size=900)
    X = rng.normal(size=(900, 2))
    z = X @ [1.0, -1.0] + rng.normal(size=30)[person] + 0.8 * rng.normal(size=12)[item]
    return np.column_stack([X, person, item]), (rng.uniform(size=900) < expit(z)).astype(int)


def test_all_ways_to_fit_agree_at_one_power():
    """And in how the evidence changes from another: each alone is near that of any power."""
    Z, y = data()

    def fits(power):
        make = functools.partial(HierarchicalEPLogistic, power=power, hyperparameters="mode")
        whole, parts = (make(2, n_partitions=k).fit(Z[:, :3], y) for k in (1, 3))
        return whole, parts, *(make([2, 3], engine=e).fit(Z, y) for e in ("ep", "messages"))

    small, large = fits(0.3), fits(0.9)
    whole, parts, ep, messages = small
    for a, b, share in ((whole, parts, 0.01), (ep, messages, 0.05)):
        assert np.max(np.abs(a.coef_ - b.coef_) / a.coef_std_) < share
        np.testing.assert_allclose(b.coef_std_, a.coef_std_, rtol=share)
        np.testing.assert_allclose(np.log(b.tau_), np.log(a.tau_), atol=share)
    assert whole.log_evidence_ == pytest.approx(parts.log_evidence_, abs=0.05)
    of_whole, of_parts, of_ep, of_messages = (
        a.log_evidence_ - b.log_evidence_ for a, b in zip(small, large, strict=True)
    )
    assert max(of_whole, of_ep) < -5e-4
    assert of_parts == pytest.approx(of_whole, rel=0.2)
    assert of_messages == pytest.approx(of_ep, rel=0.2)


def test_the_power_can_be_searched_and_keeps_sites_of_rows():
    Z, y = data()
    search = GridSearchCV(
        HierarchicalEPLogistic(2, hyperparameters="mode", tol=1.0),
        {"power": [0.5, 1.0]},
        scoring="neg_log_loss",
        cv=2,
    ).fit(Z[:100, [0, 1, 3]], y[:100])
    assert search.best_params_["power"] in (0.5, 1.0)
    rng = np.random.default_rng(0)  # groups of three rows: integrated exactly by EP alone
    g, X = np.repeat(np.arange(60), 3), rng.normal(size=(180, 1))
    y = (rng.uniform(size=180) < expit(X[:, 0] + 2.5 * rng.normal(size=60)[g])).astype(int)
    mode = dict(hyperparameters="mode")
    exact = HierarchicalEPLogistic(**mode).fit(X, y, groups=g)
    with pytest.warns(UserWarning, match="tau is underestimated"):
        rows = HierarchicalEPLogistic(power=0.01, **mode).fit(X, y, groups=g)
    assert rows.tau_[0] < exact.tau_[0]
