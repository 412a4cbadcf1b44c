"""Fits to sums of products are those to the rows."""

import numpy as np
import pytest
import scipy.sparse as sp

from sklearn_ep import SpikeSlabRegressor


def data(n=80, d=12, offset=2.0):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d)) * np.linspace(0.5, 3, d) + offset
    return X, X[:, 0] - 2 * X[:, 3] + rng.normal(size=n) + 1.0


def products(X, y, means=True):
    given = dict(X_mean=X.mean(0), y_mean=y.mean()) if means else {}
    return (X.T @ X, X.T @ y, y @ y, len(y)), given


@pytest.mark.parametrize(
    "shape, settings",
    [
        ((80, 12), {}),
        ((50, 6), dict(fit_intercept=False, standardize=False)),
        ((80, 12), dict(hyperparameters="mode")),
        ((20, 30), dict(noise_variance=1.0, slab_variance=1.0, prior_inclusion=0.2)),
    ],
)
def test_products_and_means_are_the_rows(shape, settings):
    X, y = data(*shape)
    rows = SpikeSlabRegressor(**settings, tol=1e-9).fit(X, y)
    sums, means = products(X, y)
    known = SpikeSlabRegressor(**settings, tol=1e-9).fit_statistics(*sums, **means)
    for name in ("coef_", "coef_std_", "inclusion_proba_", "intercept_", "log_evidence_"):
        np.testing.assert_allclose(getattr(known, name), getattr(rows, name), atol=1e-8, rtol=1e-8)
    for mine, theirs in zip(
        *(m.predict(X[:5], return_std=True) for m in (known, rows)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-8)


def test_centred_columns_need_no_means():
    X, y = data()
    X, y = X - X.mean(0), y - y.mean()
    rows = SpikeSlabRegressor().fit(X, y)
    known = SpikeSlabRegressor().fit_statistics(*products(X, y)[0])
    np.testing.assert_allclose(known.coef_, rows.coef_, atol=1e-8)
    np.testing.assert_allclose(known.inclusion_proba_, rows.inclusion_proba_, atol=1e-8)


def test_what_is_of_no_rows_is_refused_by_name():
    (XtX, Xty, yty, n), means = products(*data())
    fit = SpikeSlabRegressor().fit_statistics
    skew = XtX.copy()
    skew[0, 1] += 1.0
    for wrong, message in [
        ((skew, Xty, yty, n), "XtX must be a symmetric"),
        ((XtX[:, :-1], Xty[:-1], yty, n), "X_mean|XtX"),
        ((XtX, Xty[:-1], yty, n), "Xty must be"),
        ((XtX, Xty, np.nan, n), "yty must be"),
        ((XtX, Xty, 0.5 * yty, n), "positive semidefinite"),
        ((XtX, Xty, yty, 1), "n_samples"),
        ((np.where(np.eye(12), np.nan, XtX), Xty, yty, n), "XtX contains NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(*wrong, **means)
    with pytest.raises(ValueError, match="positive semidefinite"):
        fit(XtX, Xty, yty, 2 * n, **means)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_genotypes_in_parts_are_the_rows(form):
    rng = np.random.default_rng(1)
    X = rng.binomial(2, 0.3, size=(120, 10)).astype(np.int8)
    y = X[:, 2] - X[:, 7] + rng.normal(size=120)
    rows = SpikeSlabRegressor(tol=1e-9).fit(X.astype(float), y)
    # int8 becomes float64 one part at a time
    parts = SpikeSlabRegressor(tol=1e-9).fit(
        [(form(X[i : i + 40]), y[i : i + 40]) for i in (0, 40, 80)]
    )
    np.testing.assert_allclose(parts.coef_, rows.coef_, atol=1e-8)
    np.testing.assert_allclose(parts.inclusion_proba_, rows.inclusion_proba_, atol=1e-8)
