"""SpikeSlabRegressor from partitions: the answer of rows in memory, whatever the cut."""

import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone

from sklearn_ep import SpikeSlabRegressor


def make(n=400, d=12, off=0.0, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) + off
    return X, X @ np.where(np.arange(d) < 3, 1.5, 0.0) + 2.0 + rng.standard_normal(n)


def cut(X, y, k):
    ends = np.linspace(0, len(y), k + 1).round().astype(int)
    return [(X[a:b], y[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def assert_same(a, b, tol=1e-8, off=0.0):
    """Of columns about `off`, where the intercept is not multiplied by their distance from zero."""
    sd, centre = a.coef_std_.max(), np.full((1, a.n_features_in_), off)
    assert np.max(np.abs(a.coef_ - b.coef_)) < tol * sd
    assert np.max(np.abs(a.coef_std_ - b.coef_std_)) < tol * sd
    assert abs(a.predict(centre) - b.predict(centre))[0] < 1e-6
    assert np.max(np.abs(a.inclusion_proba_ - b.inclusion_proba_)) < tol
    assert a.log_evidence_ == pytest.approx(b.log_evidence_, rel=tol)


@pytest.mark.parametrize(
    ("k", "off"),
    [
        (1, 0.0),
        (3, 0.0),
        (40, 1e5),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((1, 1e5), (3, 1e5), (40, 0.0))),
    ],
)
def test_parts_are_the_rows_in_memory(k, off):
    X, y = make(off=off)
    assert_same(SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(cut(X, y, k)), off=off)


@pytest.mark.parametrize(
    "kw", [dict(fit_intercept=False), dict(standardize=False), dict(algorithm="ep")]
)
def test_settings_mean_the_same_on_parts(kw):
    X, y = make()
    X[:, 5] = 3.0  # a constant column
    a, b = SpikeSlabRegressor(**kw).fit(X, y), SpikeSlabRegressor(**kw).fit(cut(X, y, 4))
    assert_same(a, b)
    groups = np.arange(12) // 3
    assert_same(a.fit(X, y, groups=groups), b.fit(cut(X, y, 4), groups=groups))


def test_more_columns_than_rows():
    X, y = make(30, 45)
    assert_same(SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(cut(X, y, 4)), 1e-7)


def test_few_wide_rows_are_averaged_over_by_the_same_nodes():
    rng = np.random.default_rng(2)
    X = rng.normal(size=(10, 11)) * (rng.random((10, 11)) < 0.5)
    y = 2.0 * X[:, 0] - X[:, 1] + 0.5 * rng.normal(size=10)
    a, b = SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(cut(X, y, 2))
    assert len(a.hyper_weights_) == len(b.hyper_weights_)
    assert_same(a, b)


def test_sparse_parts_loaders_and_workers():
    X, y = make(300, 10)
    X[np.random.default_rng(1).random(X.shape) < 0.8] = 0.0
    a = SpikeSlabRegressor().fit(X, y)
    parts = cut(sp.csr_matrix(X), y, 3)
    b = SpikeSlabRegressor().fit(parts)
    assert_same(a, b)
    c = clone(b).set_params(n_jobs=2).fit([lambda p=p: p for p in parts])
    np.testing.assert_array_equal(b.coef_, c.coef_)
    assert b.n_features_in_ == 10 and not hasattr(b, "feature_names_in_")


def test_a_sparse_part_need_not_have_full_rank():
    X, y = make(300, 5)
    X[:, 3] = X[:, 2] + X[:, 1]
    X[:, 4] = 0.0
    dense, sparse = (SpikeSlabRegressor().fit(cut(Z, y, 2)) for Z in (X, sp.csr_matrix(X)))
    assert_same(dense, sparse)
    assert_same(SpikeSlabRegressor().fit(X, y), sparse)


@pytest.mark.parametrize("sizes", [(1, 199), (100, 1, 99), (60, 20, 20, 20, 80)])
def test_parts_of_any_sizes_merge_to_the_same(sizes):
    X, y = make(200, 4, off=1e3)
    ends = np.cumsum(sizes)[:-1]
    parts = list(zip(np.split(X, ends), np.split(y, ends), strict=True))
    whole = SpikeSlabRegressor().fit(X, y)
    for some in (parts, parts[::-1]):
        assert_same(whole, SpikeSlabRegressor().fit(some), off=1e3)


def test_what_is_refused():
    X, y = make()
    fitted = SpikeSlabRegressor().fit(X, y)
    before = fitted.coef_
    for parts, words in (
        ([(X, y), (X[:, :3], y)], "partition 1 has 3 features"),
        ([(X, y, y, y)], "partition 0: it must be a pair"),
        ([(X, y, y)], "partition 0: it must be a pair"),
        ([(X, y), (X, y[:-1])], "partition 1: X has 400 rows"),
        ([(X, np.where(y > 0, y, np.nan))], "partition 0: Input y contains NaN"),
        ([(X[:1], y[:1])], "n_samples=1"),
        ([(X * 1e150, y)], "scale the columns"),
    ):
        with pytest.raises(ValueError, match=words):
            fitted.fit(parts)
    with pytest.raises(ValueError, match="sample_weight"):
        fitted.fit([(X, y)], sample_weight=np.ones(400))
    wide = sp.csr_matrix(([1.0], ([0], [0])), shape=(400, 10**6))
    with pytest.raises(ValueError, match="400 rows of 1000000 columns .* of 3.0 GiB"):
        fitted.fit([(wide, y)])
    assert fitted.coef_ is before


def test_tall_sparse_rows_are_fitted_without_a_dense_copy():
    """Genotypes 0, 1, 2 as int8: the answer of dense rows, by products of 8 d^2 bytes."""
    rng = np.random.default_rng(0)
    X = rng.binomial(2, 0.05, size=(10_000, 30)).astype(np.int8)
    y = X[:, 0] - 0.5 * X[:, 7] + rng.normal(size=len(X))
    SpikeSlabRegressor().fit(sp.csr_matrix(X[:100]), y[:100])  # imports what a fit needs
    tracemalloc.start()
    ours = SpikeSlabRegressor().fit(sp.csr_matrix(X), y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    dense = SpikeSlabRegressor().fit(X, y)
    np.testing.assert_allclose(ours.inclusion_proba_, dense.inclusion_proba_, atol=1e-6)
    np.testing.assert_allclose(ours.coef_, dense.coef_, atol=1e-7)
    assert ours.intercept_ == pytest.approx(dense.intercept_, abs=1e-7)
    assert peak < 0.9 * 8 * X.size
