"""ConvexVariationalRegressor on tables: noise, scale of the prior and intercept learned."""

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import minimize_scalar
from scipy.sparse.linalg import aslinearoperator
from scipy.special import logsumexp
from scipy.stats import laplace, norm
from scipy.stats import t as student_t
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.linear_model import BayesianRidge, LassoCV
from sklearn.model_selection import train_test_split

from sklearn_ep import ConvexVariationalRegressor
from sklearn_ep.sites import LaplaceSite, StudentTSite


def table(name):
    if name == "diabetes":
        return load_diabetes(return_X_y=True)
    if name == "wine":  # columns in their own units, from tenths to hundreds
        X = load_wine().data
        return X[:, 1:], X[:, 0]
    X = load_breast_cancer().data
    return ((X - X.mean(0)) / X.std(0))[:, 4:], X[:, 0]


def small(n=40, d=4, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) + 2.0
    return X, X @ np.r_[1.5, -1.0, np.zeros(d - 2)] + 7.0 + 0.5 * rng.standard_normal(n)


@pytest.mark.filterwarnings("ignore:.*StandardScaler:UserWarning")
@pytest.mark.parametrize("name", ["diabetes", "wine", "breast cancer"])
def test_defaults_are_level_with_what_people_use(name):
    X, y = table(name)
    errors, losses = [], []
    for seed in range(3):
        A, B, a, b = train_test_split(X, y, test_size=0.3, random_state=seed)
        est = ConvexVariationalRegressor().fit(A, a)
        assert est.converged_
        ridge, lasso = BayesianRidge().fit(A, a), LassoCV(max_iter=20_000).fit(A, a)
        errors.append([np.sqrt(np.mean((b - m.predict(B)) ** 2)) for m in (est, ridge, lasso)])
        losses.append(
            [-norm.logpdf(b, *m.predict(B, return_std=True)).mean() for m in (est, ridge)]
        )
    ours, *peers = np.mean(errors, axis=0)
    assert ours < 1.01 * min(peers)
    ours, ridge = np.mean(losses, axis=0)
    assert ours < ridge + 0.01


@pytest.mark.parametrize("c", [1e-6, 1e5])
def test_answers_go_with_the_units(c):
    X, y = small()
    a = ConvexVariationalRegressor().fit(X, y)
    b = ConvexVariationalRegressor().fit(X, c * y)
    np.testing.assert_allclose(b.coef_, c * a.coef_, rtol=1e-6, atol=1e-9 * c)
    np.testing.assert_allclose(b.coef_std_, c * a.coef_std_, rtol=1e-6)
    assert b.noise_variance_ == pytest.approx(c**2 * a.noise_variance_)
    assert b.log_evidence_ == pytest.approx(a.log_evidence_ - (len(y) - 1) * np.log(c))
    wide = ConvexVariationalRegressor().fit(X * c, y)
    np.testing.assert_allclose(wide.predict(X * c), a.predict(X), rtol=1e-6)
    moved = ConvexVariationalRegressor().fit(X - 3.0, y + 11.0)
    np.testing.assert_allclose(moved.coef_, a.coef_, rtol=1e-6, atol=1e-9)
    assert moved.log_evidence_ == pytest.approx(a.log_evidence_)


def test_the_intercept_is_one_with_a_flat_prior():
    X, y = small()
    kw = dict(noise_variance=0.3, tol=1e-9, max_iter=500)
    est = ConvexVariationalRegressor(StudentTSite(1e8, 0.7), fit_intercept=True, **kw).fit(X, y)
    B = np.c_[X, np.ones(len(X))]
    A = B.T @ B / 0.3 + np.diag([1 / 0.49] * 4 + [0.0])
    cov = np.linalg.inv(A)
    np.testing.assert_allclose(np.r_[est.coef_, est.intercept_], cov @ B.T @ y / 0.3, atol=1e-5)
    new = np.random.default_rng(1).standard_normal((5, 4))
    N = np.c_[new, np.ones(5)]
    mean, std = est.predict(new, return_std=True)
    np.testing.assert_allclose(mean, N @ cov @ B.T @ y / 0.3, atol=1e-5)
    np.testing.assert_allclose(std**2, np.einsum("ij,jk,ik->i", N, cov, N) + 0.3, rtol=1e-6)
    last = est.summary().coefficients
    assert last["name"][-1] == "intercept"
    assert last["sd"][-1] == pytest.approx(np.sqrt(cov[4, 4]), rel=1e-6)
    assert est.coef_interval().shape == (4, 2)
    # the old default: y as measured
    plain = ConvexVariationalRegressor(StudentTSite(1e8, 0.7), **kw).fit(X, y)
    assert plain.intercept_ == 0.0 and "intercept" not in plain.summary().coefficients["name"]


def test_sparse_rows_and_operators_have_the_same_intercept():
    X, y = small(60, 6)
    X = np.where(np.abs(X) < 1.5, 0.0, X)
    dense = ConvexVariationalRegressor().fit(X, y)
    sparse = ConvexVariationalRegressor().fit(sp.csc_matrix(X), y)
    np.testing.assert_allclose(sparse.coef_, dense.coef_, rtol=1e-7)
    for got, want in zip(
        sparse.predict(sp.csr_matrix(X), return_std=True),
        dense.predict(X, return_std=True),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-8)
    assert sparse.log_evidence_ == pytest.approx(dense.log_evidence_)
    kw = dict(fit_intercept=True, n_variance_samples=128, random_state=0)
    for Z in (sp.csr_matrix(X), aslinearoperator(X)):
        est = ConvexVariationalRegressor(variance="monte_carlo", **kw).fit(Z, y)
        assert np.max(np.abs(est.coef_ - dense.coef_) / dense.coef_std_) < 0.3
        assert abs(np.log(est.noise_variance_ / dense.noise_variance_)) < 0.2
        assert est.intercept_ == pytest.approx(dense.intercept_, abs=0.3)
    assert ConvexVariationalRegressor(random_state=0).fit(aslinearoperator(X), y).intercept_ == 0.0


def test_learned_noise_and_scale_are_where_the_bound_is_flat():
    X, y = small(60, 8)
    kw = dict(fit_intercept=True, tol=1e-10, max_iter=500)
    est = ConvexVariationalRegressor(tol=1e-9, max_iter=500).fit(X, y)

    def at(noise, scale):
        return ConvexVariationalRegressor(LaplaceSite(scale, "kl"), noise_variance=noise, **kw).fit(
            X, y
        )

    def bound(log_noise, log_scale):
        return at(np.exp(log_noise), np.exp(log_scale)).log_evidence_

    here, h = (np.log(est.noise_variance_), np.log(est.prior_scale_)), 1e-4
    by_noise = (bound(here[0] + h, here[1]) - bound(here[0] - h, here[1])) / (2 * h)
    by_scale = (bound(here[0], here[1] + h) - bound(here[0], here[1] - h)) / (2 * h)
    assert abs(by_noise) < 0.006  # the prior of the noise counts as a hundredth of a row
    assert abs(by_scale) < 1e-5
    # away from there the derivative in log noise is that of the expected log likelihood
    one = at(0.5, 0.8)
    variance = one.predict(X, return_std=True)[1] ** 2 - 0.5 - 0.5 / len(y)
    squares = np.sum((y - one.predict(X)) ** 2) + np.sum(variance)
    step = (bound(np.log(0.5) + h, np.log(0.8)) - bound(np.log(0.5) - h, np.log(0.8))) / (2 * h)
    assert step == pytest.approx(squares / (2 * 0.5) - (len(y) - 1) / 2, abs=1e-4)


def test_the_bound_is_just_below_the_evidence():
    rng = np.random.default_rng(2)
    X = rng.standard_normal((12, 2))
    y = X @ [0.4, 0.0] + 0.6 * rng.standard_normal(12)
    est = ConvexVariationalRegressor(
        LaplaceSite(0.3, "kl"), noise_variance=0.4, tol=1e-9, max_iter=500
    ).fit(X, y)
    grid, step = np.linspace(-3, 3, 401, retstep=True)
    u = np.stack(np.meshgrid(grid, grid, indexing="ij")).reshape(2, -1)
    log_joint = laplace.logpdf(u, scale=0.3).sum(0)
    log_joint += norm.logpdf(y[:, None], X @ u, np.sqrt(0.4)).sum(0)
    evidence = logsumexp(log_joint) + 2 * np.log(step)
    weight = np.exp(log_joint - logsumexp(log_joint))
    mean, sd = u @ weight, np.sqrt((u**2) @ weight - (u @ weight) ** 2)
    assert evidence - 0.1 < est.log_evidence_ < evidence - 1e-4
    assert np.max(np.abs(est.coef_ - mean) / sd) < 0.05
    assert np.max(np.abs(np.log(est.coef_std_ / sd))) < 0.1


def test_acceleration_does_not_turn_back_the_fall_of_the_noise():
    # steps of the noise are smallest half-way to its floor, which is no fixed point: where
    # acceleration went there, 61 iterations were taken in the mean
    taken = []
    for seed in range(7):
        rng = np.random.default_rng(seed)
        X = rng.standard_normal((50, 120)) + 3.0
        y = X[:, :3] @ np.r_[3.0, -2.0, 1.0] + rng.standard_normal(50)
        est = ConvexVariationalRegressor(max_iter=300).fit(X, y)
        assert est.converged_
        taken.append(est.n_iter_)
    assert np.median(taken) < 20


def test_more_columns_than_rows_and_hostile_tables():
    rng = np.random.default_rng(1)
    X = rng.standard_normal((50, 120)) + 3.0
    y = X[:, :3] @ np.r_[3.0, -2.0, 1.0] + rng.standard_normal(50)
    est = ConvexVariationalRegressor().fit(X, y)
    assert est.converged_ and est.noise_variance_ > 1e-7 * y.var()
    assert np.all(np.abs(est.coef_[:3]) > 0.3)
    for X, y in (
        (np.zeros((5, 2)), np.arange(5.0)),
        (np.ones((5, 2)), np.arange(5.0)),
        (rng.standard_normal((5, 2)), np.full(5, 3.0)),
        (rng.standard_normal((2, 3)), np.array([1.0, 2.0])),
        (np.array([[2.0]]), np.array([1.0])),
        (np.c_[np.arange(9.0), np.arange(9.0)], np.arange(9.0)),
    ):
        est = ConvexVariationalRegressor(max_iter=200).fit(X, y)
        mean, std = est.predict(X, return_std=True)
        assert np.all(np.isfinite([mean, std])) and np.all(np.isfinite(est.coef_std_))
    with pytest.raises(ValueError, match="fit_intercept"):
        ConvexVariationalRegressor(fit_intercept="yes").fit(X, y)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_noise_that_columns_of_one_row_take_up_is_expected_of_new_rows(shared, kind):
    rng = np.random.default_rng(0)
    Z, noise, n = rng.standard_normal((300, 5)), 0.4 * rng.standard_normal(300), 150
    names = rng.integers(140, size=300) if shared else np.arange(300)
    y = Z @ rng.standard_normal(5) + noise
    X = kind(np.hstack([Z, names[:, None] == np.unique(names[:n])]).astype(float))
    est = ConvexVariationalRegressor().fit(X[:n], y[:n])
    mean, std = est.predict(X[n:], return_std=True)
    loss = -norm.logpdf(y[n:], mean, std).mean()
    assert loss < -norm.logpdf(noise[n:], 0.0, 0.4).mean() + 0.2
    assert est.temper_ > (1.0 if shared else 2.0)


@pytest.mark.parametrize("n, n_lone", [(60, 30), (40, 25), (1200, 20)])
@pytest.mark.parametrize("flat", [1, 0])
def test_the_noise_of_new_rows_is_what_fits_without_each_row_tell(n, n_lone, flat):
    rng = np.random.default_rng(1)
    Z = rng.standard_normal((n, 5))
    y = Z[:, 0] + 0.5 * rng.standard_t(3, size=n) + 3.0 * flat
    X = np.hstack([Z, 2.0 * np.eye(n)[:, :n_lone]])
    prior = StudentTSite(1e8, 0.7)  # whose sites do not move where a row is left out
    est = ConvexVariationalRegressor(prior, fit_intercept=bool(flat), tol=1e-8, max_iter=500).fit(
        X, y
    )
    noise, columns = est.noise_variance_, X.shape[1]
    B = np.hstack([X, np.ones((n, flat))])
    A = B.T @ B / noise + np.diag(np.r_[np.full(columns, 1 / 0.49), np.zeros(flat)])
    rows = np.arange(n_lone, n) if n - n_lone >= 20 else np.arange(n)
    gap, var = np.empty(len(rows)), np.empty(len(rows))
    for k, i in enumerate(rows):
        cov = np.linalg.inv(A - np.outer(B[i], B[i]) / noise)
        b = np.r_[Z[i], np.zeros(n_lone), np.ones(flat)]  # new rows have no column of their own
        gap[k] = y[i] - b @ cov @ (B.T @ y - B[i] * y[i]) / noise
        var[k] = b @ cov @ b

    def loss(log_temper):
        spread = np.sqrt(var + noise * np.exp(log_temper))
        prior = 0.5 * log_temper**2 if log_temper > 0 else np.log1p((log_temper / 0.4) ** 2)
        return prior - norm.logpdf(gap, scale=spread).sum()

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded").x
    assert np.log(est.temper_) == pytest.approx(best, abs=0.003) and abs(best) > 0.003
    std = est.predict(np.zeros((1, columns)), return_std=True)[1]
    assert std[0] ** 2 == pytest.approx(est.temper_ * noise + flat * np.linalg.inv(A)[-1, -1])


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # noise is lost
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
def test_a_column_for_each_row_hides_no_noise_beside_columns_of_groups(seed):
    """146 rows, 216 columns: six numbers, thirty groups, and a name that each row has alone."""
    rng = np.random.RandomState(seed)
    X = np.zeros((400, 216))
    X[:, :6] = np.exp(rng.randn(400, 6)) if seed % 2 else rng.randn(400, 6)
    often = 1.0 / np.arange(1, 31)
    group = rng.choice(30, 400, p=often / often.sum())
    X[np.arange(400), 6 + group] = 1.0
    X[np.arange(180), 36 + np.arange(180)] = 1.0
    y = X[:, :4] @ [2.0, 1.5, 1.0, 0.5] + 0.5 * rng.randn(30)[group] + 0.3 * rng.randn(400)
    est, lasso = ConvexVariationalRegressor().fit(X[:146], y[:146]), LassoCV()
    mean, std = est.predict(X[146:], return_std=True)
    plain = lasso.fit(X[:146], y[:146]).predict(X)
    left = np.sqrt(np.mean((y[:146] - plain[:146]) ** 2))
    of_lasso = norm.logpdf(y[146:], plain[146:], left).mean()
    assert norm.logpdf(y[146:], mean, std).mean() > of_lasso - 0.1
    assert np.mean(np.abs(y[146:] - mean) < 1.645 * std) > 0.8


def test_intervals_of_few_rows_are_those_of_student():
    """Under a wide prior they are least squares' with the t distribution; else nearly at level."""
    X, y = small(20, 4)
    est = ConvexVariationalRegressor(StudentTSite(1e6, 1e4)).fit(X, y)
    A = np.column_stack([X, np.ones(20)])
    coef, rest = np.linalg.lstsq(A, y)[:2]
    new = np.column_stack([np.random.RandomState(1).randn(5, 4), np.ones(5)])
    leverage = np.sum(new @ np.linalg.inv(A.T @ A) * new, axis=1)
    half = student_t.ppf(0.95, 15) * np.sqrt(rest[0] / 15 * (1.0 + leverage))
    expected = np.column_stack([new @ coef - half, new @ coef + half])
    np.testing.assert_allclose(est.predict_interval(new[:, :4], 0.9), expected, rtol=2e-3)
    inside = []
    for seed in range(40):
        rng = np.random.RandomState(seed)
        X, coef = rng.randn(420, 8), 0.5 * rng.standard_t(3, 8)
        y = X @ coef + rng.randn(420)
        est = ConvexVariationalRegressor().fit(X[:20], y[:20])
        low, high = est.predict_interval(X[20:], 0.9).T
        inside.append(np.mean((low < y[20:]) & (y[20:] < high)))
    assert abs(np.mean(inside) - 0.9) < 0.02  # normal intervals .87
