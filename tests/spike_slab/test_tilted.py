"""Quantiles and joint draws of a posterior with zeros: against enumeration, and by simulation."""

import numpy as np
import pytest
from scipy.special import logsumexp, ndtr

from sklearn_ep import SpikeSlabRegressor

NOISE, SLAB, INCLUSION = 0.5, 1.0, 0.25


def fitted(X, y, groups=None, noise=NOISE, inclusion=INCLUSION, tol=1e-8):
    given = dict(noise_variance=noise, slab_variance=SLAB, prior_inclusion=inclusion)
    reg = SpikeSlabRegressor(**given, fit_intercept=False, standardize=False, tol=tol)
    return reg.fit(X, y, groups=groups)


def exact(X, y, groups, noise=NOISE):
    """Weights (2^G,), supports, means and covariances of all models of groups."""
    d, k = X.shape[1], groups.max() + 1
    parts = []
    for i in range(2**k):
        bits = (i >> np.arange(k)) & 1
        on = np.flatnonzero(bits[groups])
        cov = SLAB * X[:, on] @ X[:, on].T + noise * np.eye(len(y))
        back = np.linalg.solve(cov, np.column_stack([X[:, on], y]))
        mean, spread = np.zeros(d), np.zeros((d, d))
        mean[on] = SLAB * X[:, on].T @ back[:, -1]
        own = SLAB * np.eye(len(on)) - SLAB**2 * X[:, on].T @ back[:, :-1]
        spread[np.ix_(on, on)] = own
        prior = bits.sum() * np.log(INCLUSION) + (k - bits.sum()) * np.log1p(-INCLUSION)
        fit = -0.5 * (y @ back[:, -1] + np.linalg.slogdet(cov)[1])
        parts.append((prior + fit, bits, mean, spread))
    lw, bits, mean, spread = (np.array(v) for v in zip(*parts, strict=True))
    return np.exp(lw - logsumexp(lw)), bits, mean, spread


def moments(weight, mean, spread):
    """Mean and covariance of a mixture of normals."""
    centre = weight @ mean
    apart = mean - centre
    return centre, np.einsum("m,mij->ij", weight, spread) + (weight * apart.T) @ apart


def data(rng, n, d, correlation):
    mix = np.linalg.cholesky(correlation + (1 - correlation) * np.eye(d))
    X, new = rng.normal(size=(n, d)) @ mix.T, rng.normal(size=(20, d)) @ mix.T
    w = np.where(rng.random(d) < INCLUSION, rng.normal(size=d), 0.0)
    return X, X @ w + np.sqrt(NOISE) * rng.normal(size=n), new


# ---------------------------------------------------------------------------- single coefficients


@pytest.mark.parametrize("signal", [0.0, 0.3, 0.6, 1.0, 2.0, -1.0])
def test_intervals_invert_the_distribution_of_all_nodes_and_stop_at_the_spike(signal):
    """One column with a slab variance that is averaged over: EP is exact at each node."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=20)
    given = dict(noise_variance=NOISE, prior_inclusion=INCLUSION, tol=1e-10)
    reg = SpikeSlabRegressor(**given, fit_intercept=False, standardize=False)
    y = signal * x + np.sqrt(NOISE) * rng.normal(size=20)
    reg.fit(x[:, None], y)
    slab = np.exp(reg.hyper_nodes_[:, 0])
    var = 1.0 / (x @ x / NOISE + 1.0 / slab)
    mean = var * (x @ y) / NOISE
    odds = INCLUSION / (1 - INCLUSION) * np.sqrt(var / slab) * np.exp(0.5 * mean**2 / var)
    on = odds / (1 + odds)
    assert len(slab) > 3 and reg.inclusion_proba_[0] == pytest.approx(reg.hyper_weights_ @ on)

    def below(q, at_zero):
        slabs = on * ndtr((q - mean) / np.sqrt(var)) + (1 - on) * (q > 0 or (q == 0 and at_zero))
        return reg.hyper_weights_ @ slabs

    for level in (0.01, 0.3, 0.5, 0.9, 0.998):
        for q, p in zip(
            reg.coef_interval(level)[0], (0.5 - level / 2, 0.5 + level / 2), strict=True
        ):
            if q == 0:
                assert below(0.0, False) <= p <= below(0.0, True)
            else:
                assert below(q, True) == pytest.approx(p, rel=1e-6)


def test_one_column_is_exact():
    """EP is exact: its draws and intervals are those of the true posterior."""
    X, y = np.ones((4, 1)), np.array([0.2, 1.0, 0.9, 0.4])
    reg = fitted(X, y)
    w, _, mean, spread = exact(X, y, np.zeros(1, dtype=int))
    draws = reg.sample_posterior(40_000, random_state=0, exact_zeros=True)[:, 0]
    assert abs(np.mean(draws == 0) - w[0]) < 0.01
    for q in (0.1, 0.5, 0.9):
        truth = w[1] * ndtr((q - mean[1, 0]) / np.sqrt(spread[1, 0, 0])) + w[0]
        assert abs(np.mean(draws < q) - truth) < 0.01
    for level in (0.3, 0.5, 0.9, 0.99):
        (low, high), sd = reg.coef_interval(level)[0], np.sqrt(spread[1, 0, 0])
        tails = w[1] * ndtr((low - mean[1, 0]) / sd), w[1] * ndtr((mean[1, 0] - high) / sd)
        for end, tail in zip((low, high), tails, strict=True):
            rest = w[0] * (end == 0)  # an end at zero shares the mass that is there
            assert tail <= 0.5 - 0.5 * level + 1e-8 and tail + rest >= 0.5 - 0.5 * level - 1e-8


def test_columns_surely_out_have_the_interval_zero():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(80, 10))
    reg = fitted(X, 3 * X[:, 0] + 0.1 * rng.normal(size=80), noise=0.01, inclusion=0.1)
    interval, table = reg.coef_interval(0.9), reg.summary(0.9).coefficients
    out = reg.inclusion_proba_ < 0.05
    np.testing.assert_array_equal(interval[out], 0.0)
    np.testing.assert_array_equal(table["lower"][out], 0.0)
    assert out.sum() > 5 and interval[0, 0] < 3.0 < interval[0, 1]
    draws = reg.sample_posterior(2000, random_state=0, exact_zeros=True)
    share = np.mean(draws[:, :10] != 0, axis=0)
    np.testing.assert_allclose(share, reg.inclusion_proba_, atol=0.03)


# ---------------------------------------------------------------------------- joint draws


@pytest.mark.parametrize(
    ("n", "d", "correlation"),
    [
        (12, 8, 0.7),
        (6, 9, 0.7),
        pytest.param(12, 8, 0.0, marks=pytest.mark.slow),
        pytest.param(6, 9, 0.0, marks=pytest.mark.slow),
    ],
)
def test_draws_and_intervals_agree_with_enumeration(n, d, correlation):
    gaps, ends, pairs = [], [], []
    for seed in range(2):
        X, y, new = data(np.random.default_rng(seed), n, d, correlation)
        reg = fitted(X, y)
        w, bits, mean, spread = exact(X, y, np.arange(d))
        centre, sd = mean @ new.T, np.sqrt(np.einsum("id,mde,ie->mi", new, spread, new) + NOISE)
        draws = reg.sample_posterior(4000, random_state=0, exact_zeros=True)
        for level in (0.5, 0.9):
            low, high = (w @ ndtr((q - centre) / sd) for q in reg.predict_interval(new, level).T)
            ends.append(np.abs(high - low - level).mean())
        sums = draws @ new.T
        for q in np.quantile(centre, [0.25, 0.5, 0.75], axis=0):
            truth = w @ ndtr((q - centre) / sd)
            gaps.append(np.abs(ndtr((q - sums) / np.sqrt(NOISE)).mean(axis=0) - truth).mean())
        on = (draws != 0).astype(float)
        pairs.append(np.abs(on.T @ on / len(on) - (w * bits.T) @ bits).mean())
    assert np.mean(ends) < 0.02 and np.mean(gaps) < 0.03 and np.mean(pairs) < 0.03


def test_copies_of_a_column_are_never_all_out():
    """Each is out in half of the posterior; what is drawn first leaves the signal to the others.

    In random order none is in more often than the others.
    """
    rng = np.random.default_rng(3)
    x = rng.normal(size=30)
    X, y = np.column_stack([x, x, x]), 1.5 * x + 0.3 * rng.normal(size=30)
    reg = fitted(X, y, noise=0.09)
    draws = reg.sample_posterior(20_000, random_state=0, exact_zeros=True)
    assert reg.inclusion_proba_.max() < 0.5 and np.all((draws != 0).any(axis=1))
    assert np.ptp(np.mean(draws != 0, axis=0)) < 0.06
    assert draws.sum(axis=1).std() == pytest.approx(0.3 / np.linalg.norm(x), rel=0.15)


@pytest.mark.parametrize("n", [12, 5])
def test_columns_of_a_group_are_zero_together(n):
    groups = np.array([0, 1, 2, 0, 1, 2, 0, 3, 3])
    X, y, new = data(np.random.default_rng(4), n, 9, 0.3)
    reg, (w, bits, mean, spread) = fitted(X, y, groups), exact(X, y, groups)
    draws = reg.sample_posterior(20_000, random_state=0, exact_zeros=True)
    on = draws != 0
    for g in range(4):
        own = on[:, groups == g]
        np.testing.assert_array_equal(own, own[:, :1] & np.ones_like(own))
    np.testing.assert_allclose(on.mean(axis=0), reg.inclusion_proba_, atol=0.03)
    np.testing.assert_allclose(on.mean(axis=0), (w @ bits)[groups], atol=0.04)
    centre, cov = moments(w, mean, spread)
    assert np.all(np.abs(draws.mean(axis=0) - centre) < 0.1 * np.sqrt(np.diag(cov)))


def test_a_group_of_more_columns_than_rows_is_drawn_jointly():
    """Alone its draws are those of the true posterior, where EP itself is in doubt of the group."""
    groups = np.zeros(24, dtype=int)
    X, y, _ = data(np.random.default_rng(0), 6, 24, 0.3)
    reg, (w, _, mean, spread) = fitted(X, y, groups), exact(X, y, groups)
    draws = reg.sample_posterior(20_000, random_state=0, exact_zeros=True)
    centre, cov = moments(w, mean, spread)
    assert w[1] > 0.999 and reg.inclusion_proba_[0] < 0.9 and np.all(draws != 0)
    assert np.all(np.abs(draws.mean(axis=0) - centre) < 0.03 * np.sqrt(np.diag(cov)))
    np.testing.assert_allclose(np.cov(draws.T), cov, atol=0.03 * cov.max())


def test_groups_of_more_columns_than_rows_agree_with_enumeration():
    groups = np.r_[np.zeros(24, dtype=int), 1, 2, 3, 4]
    ratios, gaps = [], []
    for seed in range(8):
        X, y, _ = data(np.random.default_rng(seed), 6, 28, 0.3)
        reg, (w, bits, mean, spread) = fitted(X, y, groups, tol=1e-3), exact(X, y, groups)
        draws = reg.sample_posterior(4000, random_state=0, exact_zeros=True)
        sd = np.sqrt(np.einsum("id,de,ie->i", X, moments(w, mean, spread)[1], X))
        ratios.append((draws @ X.T).std(axis=0) / sd)
        gaps.append(np.abs(np.mean(draws != 0, axis=0) - (w @ bits)[groups])[23:])
    assert np.max(ratios) < 1.25 and np.min(ratios) > 0.9 and abs(np.mean(ratios) - 1) < 0.05
    assert np.mean(gaps) < 0.06


@pytest.mark.slow
def test_intervals_of_sums_cover():
    """Half of the true sums are in their central half; in draws from normals it is .59."""
    inside = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        X, new = rng.normal(size=(60, 15)), rng.normal(size=(20, 15))
        w = np.where(rng.random(15) < 0.2, rng.normal(size=15), 0.0)
        reg = fitted(X, X @ w + rng.normal(size=60), noise=1.0, inclusion=0.2)
        draws = reg.sample_posterior(300, random_state=seed, exact_zeros=True) @ new.T
        low, high = np.quantile(draws, [0.25, 0.75], axis=0)
        inside.append(np.mean((low < new @ w) & (new @ w < high)))
    assert abs(np.mean(inside) - 0.5) < 0.045


def test_the_same_seed_gives_the_same_draws_and_intervals_need_none():
    X, y, new = data(np.random.default_rng(5), 8, 14, 0.3)
    reg = fitted(X, y)
    new = new[:8]
    a, b = (reg.sample_posterior(20, random_state=1, exact_zeros=True) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(reg.predict_interval(new), reg.predict_interval(new))
    parts = [reg.predict_interval(new[:3]), reg.predict_interval(new[3:])]
    np.testing.assert_allclose(np.concatenate(parts), reg.predict_interval(new), rtol=1e-12)
