"""ConvexVariationalRegressor: weights, partitions, sparse rows and streams are one regression."""

import warnings

import joblib
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.linalg import aslinearoperator
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import ConvexVariationalRegressor
from sklearn_ep.sites import HorseshoeSite, LaplaceSite, StudentTSite

SETTINGS = {
    "default": {},
    "no intercept": dict(fit_intercept=False),
    "known noise": dict(noise_variance=0.3, fit_intercept=True),
    "wide": dict(prior=StudentTSite(3.0, 0.5), learn_prior=True),
    "sampled": dict(variance="monte_carlo", random_state=0),
}
every = pytest.mark.parametrize("name", SETTINGS)


def data(n=80, d=5, far=0.0, seed=0):
    rng = np.random.default_rng(seed)
    X = np.where(rng.random((n, d)) < 0.5, 0.0, rng.standard_normal((n, d)) + far)
    return X, X @ np.r_[2.0, -1.0, np.zeros(d - 2)] + 1.0 + 0.5 * rng.standard_normal(n)


def make(name):
    return ConvexVariationalRegressor(**SETTINGS[name], max_iter=200)


def check_same(one, other, X, rtol=1e-6):
    for a, b in zip(one.predict(X, True), other.predict(X, True), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol)
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=rtol, atol=rtol * one.coef_std_.max())
    np.testing.assert_allclose(one.coef_std_, other.coef_std_, rtol=rtol)
    assert one.intercept_ == pytest.approx(other.intercept_, rel=rtol, abs=1e-9)
    assert one.noise_variance_ == pytest.approx(other.noise_variance_, rel=rtol)
    assert one.log_evidence_ == pytest.approx(other.log_evidence_, rel=rtol, nan_ok=True)


@every
@pytest.mark.parametrize("n", [80, 12])
def test_integer_weights_are_repeated_rows(name, n):
    X, y = data(n, 5 if n > 20 else 15)
    copies = np.random.default_rng(1).integers(0, 4, size=n)
    weighted = make(name).fit(X, y, sample_weight=copies)
    repeated = make(name).fit(np.repeat(X, copies, axis=0), np.repeat(y, copies))
    check_same(weighted, repeated, X, 1e-6 if n > 20 else 1e-5)  # 12 rows leave next to no noise
    assert weighted.temper_ == pytest.approx(repeated.temper_, rel=1e-5)
    alike = make(name).fit(X, y, sample_weight=np.ones(n))
    check_same(alike, make(name).fit(X, y), X, 1e-12)


def test_weights_below_one_and_of_operators_count_rows():
    X, y = data()
    half = make("default").fit(np.vstack([X, X]), np.r_[y, y], np.full(2 * len(y), 0.5))
    check_same(half, make("default").fit(X, y), X)
    weight = np.random.default_rng(0).uniform(0.2, 3.0, len(y))
    kw = dict(fit_intercept=True, noise_variance=0.3)
    exact = ConvexVariationalRegressor(**kw).fit(X, y, weight)
    for rows in (sp.csr_array(X), aslinearoperator(X)):
        sampled = ConvexVariationalRegressor(
            **kw, variance="monte_carlo", n_variance_samples=256, random_state=0
        ).fit(rows, y, weight)
        assert np.max(np.abs(sampled.coef_ - exact.coef_) / exact.coef_std_) < 0.1
        np.testing.assert_allclose(sampled.coef_std_, exact.coef_std_, rtol=0.1)
        assert sampled.intercept_ == pytest.approx(exact.intercept_, abs=0.05)


@every
def test_partitions_are_the_rows_in_memory(name):
    X, y = data(far=3.0)
    whole = make(name).fit(X, y)
    pieces = np.array_split(np.arange(len(y)), 3)
    for cuts in ([slice(None)], pieces):
        parts = [(X[cut], y[cut]) for cut in cuts]
        check_same(make(name).fit(parts), whole, X)
    mixed = [(sp.csr_matrix(X[cut]) if k else X[cut], y[cut]) for k, cut in enumerate(pieces)]
    two = make(name).fit([lambda part=part: part for part in mixed])
    check_same(two, whole, X)
    with joblib.parallel_config("threading", n_jobs=2):
        again = make(name).fit(mixed)
    np.testing.assert_array_equal(again.coef_, two.coef_)
    assert again.temper_ == two.temper_


@pytest.mark.slow
@every
def test_processes_give_the_bits_of_one(name):
    X, y = data(far=3.0)
    parts = [(X[cut], y[cut]) for cut in np.array_split(np.arange(len(y)), 3)]
    with joblib.parallel_config("loky", n_jobs=2):
        other = make(name).fit(parts)
    one = make(name).fit(parts)
    np.testing.assert_array_equal(other.coef_, one.coef_)
    assert other.temper_ == one.temper_


@every
def test_sparse_rows_are_dense_ones(name):
    X, y = data()
    for kind in (sp.csr_matrix, sp.csc_array):
        check_same(make(name).fit(kind(X), y), make(name).fit(X, y), X, 1e-5)


@pytest.mark.parametrize("name", ["default", "no intercept", "known noise", "wide"])
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_batches_add_up_to_a_fit_of_all_rows(name, kind):
    X, y = data(far=100.0)
    weight = np.random.default_rng(2).uniform(0.5, 2.0, len(y))
    tight = dict(tol=1e-9, max_iter=2000)
    whole = make(name).set_params(**tight).fit(X, y, weight)
    begun = make(name).set_params(**tight).fit(kind(X[:30]), y[:30], weight[:30])
    fresh = make(name).set_params(**tight).partial_fit(kind(X[:30]), y[:30], weight[:30])
    for est in (begun, fresh):
        est.partial_fit(X[30:31], y[30:31], weight[30:31])
        est.partial_fit(kind(X[31:]), y[31:], weight[31:])
        np.testing.assert_allclose(est.coef_, whole.coef_, atol=1e-6)
        np.testing.assert_allclose(est.coef_std_, whole.coef_std_, rtol=1e-5)
        assert est.log_evidence_ == pytest.approx(whole.log_evidence_, abs=1e-5)
        assert est.intercept_ == pytest.approx(whole.intercept_, rel=1e-5, abs=1e-9)
        assert est.temper_ == 1.0


def test_sparse_rows_may_have_a_column_far_from_zero():
    """Its sum of squares about the mean is no rounding error of a difference."""
    X, y = data(n=200)
    column = 1e9 + np.random.default_rng(1).standard_normal(200)
    fit = make("sampled").fit(sp.csr_array(np.column_stack([X, column])), y)
    np.testing.assert_allclose(fit.coef_[:5], make("sampled").fit(X, y).coef_, atol=0.01)


def test_a_prior_operator_goes_with_batches_and_partitions():
    X, y = data(40, 6)
    D = np.diff(np.eye(6), axis=0)
    kw = dict(prior=LaplaceSite(0.3), prior_operator=D, noise_variance=0.25)
    whole = ConvexVariationalRegressor(**kw).fit(X, y)
    check_same(ConvexVariationalRegressor(**kw).fit([(X[:9], y[:9]), (X[9:], y[9:])]), whole, X)
    stream = ConvexVariationalRegressor(**kw).partial_fit(X[:9], y[:9])
    check_same(stream.partial_fit(X[9:], y[9:]), whole, X)


def test_copies_of_small_weights_are_one_row_where_it_is_left_out():
    """A row of weight below one goes as a whole, with whatever copies share its weight."""
    X, y = data(60)
    X = np.hstack([X, np.eye(60)[:, :30]])
    whole = make("default").fit(X, y, np.full(60, 0.5))
    halves = make("default").fit(np.vstack([X, X]), np.r_[y, y], np.full(120, 0.25))
    check_same(whole, halves, X)
    assert whole.temper_ == pytest.approx(halves.temper_, rel=1e-6) and whole.temper_ != 1.0


@pytest.mark.parametrize("n", [60, 1100])
def test_columns_of_one_row_are_weighed_and_parted_like_others(n):
    X, y = data(n)
    X = np.hstack([X, np.eye(n)[:, :30]])
    copies = np.where(np.arange(n) % 3 == 0, 2, 1)
    weighted = make("default").fit(X, y, copies)
    repeated = make("default").fit(np.repeat(X, copies, axis=0), np.repeat(y, copies))
    check_same(weighted, repeated, X)
    assert weighted.temper_ == pytest.approx(repeated.temper_, rel=1e-6) and weighted.temper_ != 1.0
    parts = [(sp.csr_array(X[:20]), y[:20]), (sp.csr_array(X[20:]), y[20:])]
    check_same(make("default").fit(parts), make("default").fit(X, y), X)


def test_what_rows_are_refused():
    X, y = data()
    est = make("default").fit(X, y)
    coef = est.coef_
    for words, call in {
        "negative|Negative": lambda: est.fit(X, y, -np.ones(len(y))),
        "repeated rows": lambda: est.fit([(X, y)], sample_weight=np.ones(len(y))),
        "partition 1 has 4 features": lambda: est.fit([(X, y), (X[:, :4], y)]),
        "partition 0.*NaN": lambda: est.fit([(X, np.full(len(y), np.nan))]),
        "expecting 5 features": lambda: est.partial_fit(X[:, :4], y),
        "functools": lambda: est.fit(["a.npz"]),
        "variance": lambda: est.set_params(variance="monte_carlo").partial_fit(X, y),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
        assert est.coef_ is coef
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        sampled = make("sampled").fit(X, y)
    with pytest.raises(ValueError, match="sampled variances"):
        sampled.set_params(variance="auto").partial_fit(X, y)


@pytest.mark.parametrize("prior", [None, StudentTSite(3.0, 0.1), HorseshoeSite(0.1)])
def test_few_rows_by_a_matrix_of_rows_are_the_same_by_one_of_columns(prior):
    """A prior on C u takes a matrix of the columns, also where C is the identity."""
    X, y = data(30, 80)
    how = dict(noise_variance=0.3, learn_prior=True, max_iter=200, tol=1e-5)
    few = ConvexVariationalRegressor(prior, **how).fit(X, y)
    whole = ConvexVariationalRegressor(prior, prior_operator=np.eye(80), **how).fit(X, y)
    check_same(few, whole, X, 1e-5)
    expected = whole.latent_covariance(X, X[:5])
    for rows in (X, sp.csr_array(X), aslinearoperator(X)):
        np.testing.assert_allclose(few.latent_covariance(rows, X[:5]), expected, atol=1e-6)
    draws = few.sample_posterior(80_000, 0) @ X[:5].T
    scale = np.sqrt(np.diagonal(expected[:5]))
    np.testing.assert_allclose(
        np.cov(draws.T) / np.outer(scale, scale), expected[:5] / np.outer(scale, scale), atol=0.02
    )
