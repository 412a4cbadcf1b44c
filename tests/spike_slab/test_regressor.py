"""SpikeSlabRegressor: enumeration, fixed points, equivalences, learning, hostile data."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from oracles import oracle
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SelectFromModel
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel
from sklearn.linear_model import LassoCV

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.datasets import make_spike_slab_regression
from sklearn_ep.inspection import InclusionDisplay
from sklearn_ep.spike_slab import _learning as model_evidence

ORACLE = oracle("spike_slab")
PROBLEMS = ORACLE["problems"]
EXACT = [p for p in PROBLEMS if p["name"] in ("one_feature", "orthogonal_columns")]


def fixed(noise, slab, inclusion, **kw):
    given = dict(noise_variance=noise, slab_variance=slab, prior_inclusion=inclusion)
    plain = dict(fit_intercept=False, standardize=False, tol=1e-8, max_iter=1000)
    plain["hyperparameters"] = "mode"  # EP, however correlated the columns are
    return SpikeSlabRegressor(**{**given, **plain, **kw})


def of_problem(p, **kw):
    reg = fixed(p["noise_variance"], p["slab_variance"], p["prior_inclusion"], **kw)
    return reg.fit(np.array(p["X"]), np.array(p["y"]))


def enumerate_models(X, y, noise, slab, inclusion, groups):
    """Exact mean, variance, inclusion and log evidence over all subsets of the groups."""
    k = groups.max() + 1
    parts = []
    for i in range(2**k):
        bits = (i >> np.arange(k)) & 1
        z = bits[groups].astype(float)
        cov = slab * (X * z) @ X.T + noise * np.eye(len(y))
        a, V = np.linalg.solve(cov, y), np.linalg.solve(np.linalg.cholesky(cov), X * z)
        m = slab * z * (X.T @ a)
        prior = bits @ np.full(k, np.log(inclusion)) + (1 - bits) @ np.full(k, np.log1p(-inclusion))
        fit = -0.5 * (len(y) * np.log(2 * np.pi) + y @ a + np.linalg.slogdet(cov)[1])
        parts.append((prior + fit, m, slab * z - slab**2 * (V * V).sum(0) + m * m, z))
    lw, mean, second, on = (np.array(v) for v in zip(*parts, strict=True))
    w = np.exp(lw - logsumexp(lw))
    m = w @ mean
    return m, w @ second - m * m, w @ on, logsumexp(lw)


def small(rng, n=30, d=12, noise=0.3):
    scale = np.exp(0.5 * rng.normal(size=d))
    X = rng.normal(size=(n, d)) * scale + rng.normal(size=d)
    w = np.zeros(d)
    w[:4] = np.array([1.5, -1.0, 2.0, -1.5]) / scale[:4]
    return X, X @ w + noise * rng.normal(size=n) + 2.0


# ---------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("p", EXACT, ids=lambda p: p["name"])
@pytest.mark.parametrize("algorithm", ["auto", "convergent"])
def test_exact_where_ep_is_exact(p, algorithm):
    reg, truth = of_problem(p, algorithm=algorithm, tol=1e-10), p["exact"]
    np.testing.assert_allclose(reg.coef_, truth["mean"], atol=1e-9)
    np.testing.assert_allclose(reg.coef_std_**2, truth["variance"], atol=1e-9)
    np.testing.assert_allclose(reg.inclusion_proba_, truth["inclusion"], atol=1e-9)
    assert reg.log_evidence_ == pytest.approx(truth["log_evidence"], abs=1e-9)


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p["name"])
@pytest.mark.parametrize("algorithm", ["auto", "convergent"])
def test_ends_at_a_known_fixed_point(p, algorithm):
    reg = of_problem(p, algorithm=algorithm)
    assert reg.converged_
    assert reg.history_["objective"][-1] == pytest.approx(-reg.log_evidence_, abs=1e-8)
    near = [
        np.abs(reg.coef_ - f["mean"]).max() + abs(reg.log_evidence_ - f["log_evidence"])
        for f in p["fixed_points"]
    ]
    # a fixed point of larger evidence than the listed ones is as good
    assert min(near) < 1e-5 or reg.log_evidence_ > max(f["log_evidence"] for f in p["fixed_points"])
    if algorithm == "convergent":
        assert np.diff(reg.history_["objective"]).max(initial=0) <= 1e-9


def test_grouped_orthogonal_columns_are_exact():
    rng = np.random.default_rng(0)
    X = np.linalg.qr(rng.normal(size=(14, 9)))[0] * 3 * np.exp(0.3 * rng.normal(size=9))
    groups = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
    y = X @ (rng.normal(size=9) * np.array([1, 0, 0, 1])[groups]) + 0.5 * rng.normal(size=14)
    reg = fixed(0.25, 1.0, 0.4, tol=1e-10).fit(X, y, groups=np.array(list("abcd"))[groups])
    mean, var, on, log_evidence = enumerate_models(X, y, 0.25, 1.0, 0.4, groups)
    np.testing.assert_allclose(reg.coef_, mean, atol=1e-9)
    np.testing.assert_allclose(reg.coef_std_**2, var, atol=1e-9)
    np.testing.assert_allclose(reg.inclusion_proba_, on, atol=1e-9)
    assert reg.log_evidence_ == pytest.approx(log_evidence, abs=1e-9)


def test_several_fixed_points_are_reported_and_mixed():
    p = next(p for p in PROBLEMS if p["name"] == "hard_small_n_701")
    one, many = of_problem(p), of_problem(p, n_init=4, random_state=0)
    assert many.log_evidence_ >= one.log_evidence_ - 1e-6
    assert many.n_fixed_points_ == len(many.fixed_point_log_evidences_) > 1
    assert np.all(np.diff(many.fixed_point_log_evidences_) <= 0)
    assert many.fixed_point_log_evidences_[0] == pytest.approx(many.log_evidence_, abs=1e-6)
    X = np.array(p["X"])
    mean, std = many.predict(X, return_std=True, mixture=True)
    assert np.abs(mean - many.predict(X)).max() > 1e-6
    assert np.all(std > 0)
    same = of_problem(p, n_init=4, random_state=0, n_jobs=2)
    np.testing.assert_array_equal(same.coef_, many.coef_)


@pytest.mark.parametrize(
    "seed", [0, 7, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 7))]
)
def test_converges_on_the_published_protocol(seed):
    """d = 25, n = 10, unit rows, noise sd .005: most published EP runs fail here."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=25) * (rng.random(25) < 0.2)
    X = rng.normal(size=(10, 25))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = X @ w + 0.005 * rng.normal(size=10)
    for algorithm in ("auto", "convergent"):
        reg = fixed(0.005**2, 1.0, 0.2, algorithm=algorithm, tol=1e-4, max_iter=200).fit(X, y)
        assert reg.converged_
        assert reg.n_iter_ == len(reg.history_["residual"]) == len(reg.history_["objective"])


# ---------------------------------------------------------------------------- equivalences


def assert_same(a, b, tol, perm=slice(None)):
    scale = np.abs(a.coef_).max()
    assert np.abs(a.coef_[perm] - b.coef_).max() <= tol * scale
    assert np.abs(a.coef_std_[perm] - b.coef_std_).max() <= tol * a.coef_std_.max()
    assert np.abs(a.inclusion_proba_[perm] - b.inclusion_proba_).max() <= tol
    assert abs(a.log_evidence_ - b.log_evidence_) <= tol * (1 + abs(a.log_evidence_))


def nightly(value):
    """Return a value of a parameter that is left to the nightly job."""
    return pytest.param(value, marks=pytest.mark.slow)


WEAK = {
    "weak": lambda: make_spike_slab_regression(
        50, 150, n_informative=5, noise=2.0, intercept=1.0, random_state=3
    ),
    "weak, correlated": lambda: make_spike_slab_regression(
        60, 100, n_informative=6, noise=1.5, correlation=0.9, random_state=4
    ),
    "null": lambda: make_spike_slab_regression(16, 20, n_informative=0, noise=1.0, random_state=5),
    "n > d": lambda: make_spike_slab_regression(80, 30, noise=2.0, random_state=6),
}


@pytest.mark.parametrize("name", [nightly("weak"), nightly("weak, correlated"), "null", "n > d"])
def test_learned_fits_do_not_depend_on_order(name):
    X, y, _ = WEAK[name]()
    base = SpikeSlabRegressor().fit(X, y)
    rng = np.random.default_rng(0)
    for _ in range(2 if name.startswith("weak") else 1):
        rows, columns = rng.permutation(len(y)), rng.permutation(X.shape[1])
        other = SpikeSlabRegressor().fit(X[np.ix_(rows, columns)], y[rows])
        assert_same(base, other, 1e-3, columns)


@pytest.mark.parametrize("name", [nightly("weak"), "n > d"])
def test_learned_weights_are_repetition(name):
    X, y, _ = WEAK[name]()
    w = np.random.default_rng(1).integers(0, 4, len(y))
    # repeated rows of wide data leave no noise to integrate over
    how = "mode" if name == "weak" else "integrate"
    a = SpikeSlabRegressor(hyperparameters=how).fit(np.repeat(X, w, 0), np.repeat(y, w))
    b = SpikeSlabRegressor(hyperparameters=how).fit(X, y, sample_weight=w)
    assert_same(a, b, 1e-3)


@pytest.mark.parametrize("shape", [(30, 12), (30, 50)])
def test_units_of_data_change_units_of_the_answer_only(shape):
    rng = np.random.default_rng(2)
    X, y = small(rng, *shape)
    a = SpikeSlabRegressor().fit(X, y)
    b = SpikeSlabRegressor().fit(X * 3.0 + 5.0, 1000 * y - 70)
    np.testing.assert_allclose(b.coef_ * 3 / 1000, a.coef_, atol=1e-6)
    assert b.noise_variance_ == pytest.approx(a.noise_variance_ * 1e6, rel=1e-6)
    shift = (shape[0] - 1) * np.log(1000)
    assert b.log_evidence_ + shift == pytest.approx(a.log_evidence_, abs=1e-6)


def test_cholesky_side_equals_woodbury_side():
    """Columns of zeros turn a problem into one with more columns than rows."""
    rng = np.random.default_rng(3)
    X, y = small(rng)
    a = fixed(0.09, 0.8, 0.3).fit(X, y)
    b = fixed(0.09, 0.8, 0.3).fit(np.c_[X, np.zeros((30, 25))], y)
    np.testing.assert_allclose(b.coef_[:12], a.coef_, atol=1e-7)
    np.testing.assert_allclose(b.coef_std_[:12], a.coef_std_, atol=1e-7)
    assert b.log_evidence_ == pytest.approx(a.log_evidence_, abs=1e-7)
    np.testing.assert_allclose(b.inclusion_proba_[12:], 0.3)


def test_intercept_has_a_flat_prior():
    rng = np.random.default_rng(4)
    X, y = small(rng)
    n = len(y)
    contrasts = np.linalg.qr(np.c_[np.ones(n), rng.normal(size=(n, n - 1))])[0][:, 1:].T
    a = fixed(0.09, 0.8, 0.3, fit_intercept=True).fit(X, y)
    b = fixed(0.09, 0.8, 0.3).fit(contrasts @ X, contrasts @ y)
    np.testing.assert_allclose(a.coef_, b.coef_, atol=1e-8)
    assert a.log_evidence_ == pytest.approx(b.log_evidence_, abs=1e-7)
    D = rng.normal(size=(5, 12))
    _, std = a.predict(D, return_std=True)
    gap = D - X.mean(0)
    var = np.einsum("ij,jk,ik->i", gap, b.covariance(np.arange(12)), gap)
    np.testing.assert_allclose(std, np.sqrt(0.09 * (1 + 1 / n) + var), rtol=1e-7)


def test_warm_start_is_quick_and_the_same():
    X, y = small(np.random.default_rng(5))
    reg = fixed(0.09, 0.8, 0.3, warm_start=True).fit(X, y)
    first, coef = reg.n_iter_, reg.coef_.copy()
    reg.fit(X, y)
    assert reg.n_iter_ <= max(2, first // 4)
    np.testing.assert_allclose(reg.coef_, coef, atol=1e-7)
    learned = SpikeSlabRegressor(warm_start=True).fit(X, y)
    before = learned.log_evidence_
    assert learned.fit(X, y).log_evidence_ == pytest.approx(before, abs=1e-4)
    assert learned.fit(X[:, :7], y).coef_.shape == (7,)


# ---------------------------------------------------------------------------- prediction


@pytest.mark.parametrize(
    ("shape", "exact_zeros"),
    [((40, 12), False), ((14, 25), False), pytest.param((40, 8), True, marks=pytest.mark.slow)],
)
def test_samples_covariances_and_predictions_agree(shape, exact_zeros):
    """With zeros, too, draws have the moments of Q where EP is good."""
    rng = np.random.default_rng(6)
    X, y = small(rng, *shape)
    reg = SpikeSlabRegressor().fit(X, y)
    d = shape[1]
    w = reg.sample_posterior(20_000, random_state=0, exact_zeros=exact_zeros)
    assert w.shape == (20_000, d + 1)
    assert np.abs((w[:, :d].mean(0) - reg.coef_) / reg.coef_std_).max() < 0.03
    T = rng.normal(size=(15, d))
    mean, std = reg.predict(T, return_std=True)
    latent = w[:, :d] @ T.T + w[:, d:]
    noise = reg.hyper_weights_ @ np.exp(reg.hyper_nodes_[:, 0])
    np.testing.assert_allclose(np.sqrt(latent.var(0) + noise), std, rtol=0.03)
    cov = reg.latent_covariance(T)
    np.testing.assert_allclose(np.diag(cov) + noise, std**2, rtol=1e-9)
    np.testing.assert_allclose(reg.latent_covariance(T[:3], T), cov[:3], rtol=1e-9, atol=1e-12)
    full = reg.covariance(np.arange(d))
    np.testing.assert_allclose(np.sqrt(np.diag(full)), reg.coef_std_, rtol=1e-6)
    mask = np.arange(d) % 2 == 0
    np.testing.assert_allclose(reg.covariance(mask), full[np.ix_(mask, mask)], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(60, 8), nightly((20, 40))])
def test_summary_and_intervals_are_quantiles_of_draws(shape):
    X, y = small(np.random.default_rng(18), *shape)
    reg = SpikeSlabRegressor().fit(X, y)
    table, d = reg.summary(level=0.8), shape[1]
    ends = np.column_stack([table.coefficients["lower"], table.coefficients["upper"]])
    draws, close = reg.sample_posterior(20_000, 0, exact_zeros=True), 0.015 if d < 10 else 0.03
    for end, level in zip(ends.T, (0.1, 0.9), strict=True):
        assert np.all(np.mean(draws < end, axis=0) < level + close)
        assert np.all(np.mean(draws <= end, axis=0) > level - close)
    np.testing.assert_array_equal(reg.coef_interval(0.8), ends[:-1])
    assert list(table.coefficients["name"][[0, d - 1, d]]) == ["x0", f"x{d - 1}", "intercept"]
    np.testing.assert_array_equal(
        table.coefficients["inclusion"], np.r_[reg.inclusion_proba_, np.nan]
    )
    assert table.figures["noise sd"] == np.sqrt(reg.noise_variance_)
    assert table.figures["log evidence"] == reg.log_evidence_
    assert str(table).startswith("SpikeSlabRegressor: converged")
    with pytest.raises(ValueError, match="level"):
        reg.summary(level=0.0)


def test_summary_names_columns_and_has_no_row_for_an_intercept_that_was_not_fitted():
    pd = pytest.importorskip("pandas")
    X, y = small(np.random.default_rng(18), 30, 4)
    reg = SpikeSlabRegressor(fit_intercept=False).fit(pd.DataFrame(X, columns=list("abcd")), y)
    frame = reg.summary().to_frame()
    assert list(frame.index) == list("abcd") and list(frame)[-1] == "inclusion"


@pytest.mark.slow
def test_intervals_of_responses_and_coefficients_cover():
    rng = np.random.default_rng(19)
    responses, coefficients = [], []
    for _ in range(40):
        X, coef = rng.normal(size=(80, 6)), rng.normal(size=6) * (np.arange(6) < 3)
        reg = SpikeSlabRegressor().fit(X[:50], X[:50] @ coef + 0.5 * rng.normal(size=50))
        new = X[50:] @ coef + 0.5 * rng.normal(size=30)
        low, high = reg.predict_interval(X[50:], level=0.8).T
        responses.append(np.mean((low < new) & (new < high)))
        low, high = reg.coef_interval(0.8)[:3].T
        coefficients.extend((low < coef[:3]) & (coef[:3] < high))
    assert abs(np.mean(responses) - 0.8) < 0.04
    assert abs(np.mean(coefficients) - 0.8) < 0.11  # three standard errors of 120 coefficients


# ---------------------------------------------------------------------------- sparse matrices


PLAIN = dict(standardize=False, fit_intercept=False)


@pytest.mark.parametrize("kind", [sp.csc_matrix, nightly(sp.csr_array)])
@pytest.mark.parametrize(
    ("shape", "kw"),
    [
        ((60, 8), {}),
        ((14, 24), PLAIN),
        pytest.param((60, 8), PLAIN, marks=pytest.mark.slow),
        pytest.param((20, 40), {}, marks=pytest.mark.slow),
    ],
)
def test_sparse_rows_give_the_dense_answer(kind, shape, kw):
    rng = np.random.default_rng(20)
    X = rng.normal(size=shape) * (rng.random(shape) < 0.3)
    y = 2.0 * X[:, 0] - X[:, 1] + 0.3 * rng.normal(size=len(X)) + 1.0
    weight = rng.integers(0, 3, size=len(X))
    # repeated rows of wide data leave no noise to integrate over
    kw = kw | dict(hyperparameters="mode" if len(X) < X.shape[1] else "auto")
    rows = kind(X)
    data = rows.data.copy()
    dense, sparse = (SpikeSlabRegressor(copy_X=c, **kw) for c in (True, False))
    dense.fit(X, y, sample_weight=weight)
    sparse.fit(rows, y, sample_weight=weight)
    np.testing.assert_array_equal(rows.data, data)
    close = dict(rtol=1e-9, atol=1e-9)
    for a, b in zip(dense.predict(X, True), sparse.predict(rows, True), strict=True):
        np.testing.assert_allclose(a, b, **close)
    for args in ((X,), (X[:5], X[5:9])):
        mixed = [kind(a) for a in args]
        cov = sparse.latent_covariance(*mixed)
        np.testing.assert_allclose(dense.latent_covariance(*args), cov, **close)
    np.testing.assert_allclose(dense.inclusion_proba_, sparse.inclusion_proba_, **close)
    assert dense.log_evidence_ == pytest.approx(sparse.log_evidence_, rel=1e-9)
    np.testing.assert_allclose(
        dense.predict_interval(X[:6], 0.5), sparse.predict_interval(rows[:6], 0.5), **close
    )


def test_many_sparse_rows_are_predicted_in_blocks():
    rng = np.random.default_rng(20)
    X = rng.normal(size=(60, 40)) * (rng.random((60, 40)) < 0.3)
    reg = fixed(0.09, 0.8, 0.3, tol=1e-3).fit(X, X[:, 0] + 0.3 * rng.normal(size=60))
    n_copies = 1 + 2**25 // X.nbytes  # dense, they are three blocks
    many = sp.vstack([sp.csr_matrix(X)] * n_copies, format="csr")
    np.testing.assert_allclose(reg.predict(many), np.tile(reg.predict(X), n_copies), rtol=1e-9)


def test_finds_the_support_better_than_lasso():
    X, y, coef = make_spike_slab_regression(60, 200, n_informative=8, random_state=0)
    reg = SpikeSlabRegressor().fit(X, y)
    lasso = LassoCV(cv=5).fit(X, y)
    assert np.linalg.norm(reg.coef_ - coef) < 0.5 * np.linalg.norm(lasso.coef_ - coef)
    wrong = reg.get_support() != (np.abs(coef) > 0.1)
    assert wrong.sum() <= 1
    assert reg.expected_model_size_ == pytest.approx(reg.inclusion_proba_.sum())
    picked = SelectFromModel(reg, importance_getter="inclusion_proba_", threshold=0.5, prefit=True)
    assert picked.transform(X).shape[1] == reg.get_support().sum()


def test_learned_inclusion_is_the_rule_of_succession():
    X, y, _ = make_spike_slab_regression(60, 40, n_informative=5, random_state=1)
    reg = SpikeSlabRegressor(hyperparameters="mode").fit(X, y)
    assert reg.prior_inclusion_ == pytest.approx((reg.expected_model_size_ + 1) / 42, rel=5e-3)


@pytest.mark.parametrize("inclusion", [0.02, 0.99])
def test_slab_and_noise_are_learned_with_a_given_inclusion(inclusion):
    """A dense prior must find ridge regression and not interpolate: 20 weak columns in 150."""
    X, y, _ = make_spike_slab_regression(
        250, 150, n_informative=20, noise=1.0, correlation=0.5, random_state=2
    )
    reg = SpikeSlabRegressor(prior_inclusion=inclusion, hyperparameters="mode")
    reg.fit(X[:100], y[:100])
    assert 0.3 < reg.noise_variance_ < 3.0
    error = np.mean((reg.predict(X[100:]) - y[100:]) ** 2)
    assert error < 0.5 * y[100:].var()


@pytest.mark.filterwarnings("ignore:.*chains over models have not mixed")
@pytest.mark.slow
def test_wide_data_of_many_weak_effects_give_honest_predictions():
    """35 rows, 1000 correlated columns: the largest EP evidence is that of an overconfident fit.

    Chains over models do not tell the columns apart, and say so; predictions do not need that.
    """
    loss = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        F = rng.normal(size=(335, 30))
        X = F @ rng.normal(size=(30, 1000)) + 0.3 * rng.normal(size=(335, 1000))
        y = F @ rng.normal(size=30) / np.sqrt(30) + 0.3 * rng.normal(size=335)
        # the exact posterior of a dense model, noise and signal learned from the exact evidence
        dense = GaussianProcessRegressor(
            DotProduct(0.1, "fixed") * ConstantKernel(1e-3) + WhiteKernel(0.1), normalize_y=True
        )
        pair = []
        for reg in (SpikeSlabRegressor(), dense):
            mean, std = reg.fit(X[:35], y[:35]).predict(X[35:], return_std=True)
            pair.append(-norm.logpdf(y[35:], mean, std).mean())
        loss.append(pair)
    ours, reference = np.mean(loss, axis=0)
    assert ours < reference + 0.05


@pytest.mark.parametrize(
    ("seed", "d"), [(3, 500), *(pytest.param(s, 2000, marks=pytest.mark.slow) for s in (3, 11))]
)
def test_noise_is_not_learned_away_on_wide_sparse_data(seed, d):
    """50 rows, many columns, 4 in: the largest EP evidence is at a tenth of the true noise."""
    rng = np.random.default_rng(seed)
    X, coef = rng.normal(size=(350, d)), np.zeros(d)
    values = rng.normal(size=4) + np.sign(rng.normal(size=4))
    coef[rng.choice(d, 4, replace=False)] = values
    y = X @ coef + 0.5 * rng.normal(size=350)
    reg = SpikeSlabRegressor().fit(X[:50], y[:50])
    assert 0.12 < reg.noise_variance_ < 0.5
    mean, std = reg.predict(X[50:], return_std=True)
    covered = np.mean(np.abs(y[50:] - mean) < 1.645 * std)
    assert 0.78 < covered < 0.98


def test_attributes_say_how_the_hyperparameters_were_learned(monkeypatch):
    many = model_evidence._LEARNING._replace(search_all=1000)  # entries; 20,000 take longer
    monkeypatch.setattr(model_evidence, "_LEARNING", many)
    X, y, _ = make_spike_slab_regression(24, 45, n_informative=3, noise=0.3, random_state=13)
    given = dict(noise_variance=0.1, slab_variance=1.0, prior_inclusion=0.1)
    assert SpikeSlabRegressor(**given).fit(X, y).search_used_ == "none"
    assert SpikeSlabRegressor().fit(X, y).search_used_ == "best"
    reg = SpikeSlabRegressor(warm_start=True).fit(X[:, :8], y)
    assert reg.search_used_ == "all" and not reg.dense_start_used_
    assert reg.fit(X[:, :8], y).search_used_ == "warm"
    X, y, _ = make_spike_slab_regression(12, 60, n_informative=6, random_state=3)
    assert SpikeSlabRegressor(hyperparameters="mode").fit(X, y).dense_start_used_


def test_random_state_reaches_the_models_that_check_the_evidence(monkeypatch):
    X, y = small(np.random.default_rng(16), 20, 4)
    seeds, sample = [], model_evidence.sampled_log_evidence

    def spied(state, seed, n_models):
        seeds.append(seed)
        return sample(state, seed, n_models)

    monkeypatch.setattr(model_evidence, "sampled_log_evidence", spied)
    used = []
    for random_state in (None, None, 0, 0, 1):
        seeds.clear()
        SpikeSlabRegressor(random_state=random_state).fit(X, y)
        assert seeds and len(set(seeds)) == 1
        used.append(seeds[0])
    assert used[0] == used[1] and used[2] == used[3] and len(set(used)) == 3


def test_groups_help_on_grouped_data():
    rng = np.random.default_rng(7)
    groups = np.arange(60) // 5
    coef = rng.normal(size=60) * np.isin(groups, [2, 9])
    X = rng.normal(size=(30, 60))
    y = X @ coef + 0.2 * rng.normal(size=30)
    plain, grouped = SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(X, y, groups=groups)
    error = [np.linalg.norm(r.coef_ - coef) for r in (plain, grouped)]
    assert error[1] < 0.7 * error[0]
    np.testing.assert_array_equal(grouped.get_support(), coef != 0)


# ---------------------------------------------------------------------------- hostile data


def hostile(rng):
    X, y = small(rng)
    constant = X.copy()
    constant[:, 3] = 7.0
    outlier = y.copy()
    outlier[0] = 1e8
    return {
        "constant column": (constant, y),
        "all columns constant": (np.ones((30, 3)), y),
        "duplicates": (np.c_[X, X[:, :4], -X[:, :2]], y),
        "rank two": (rng.normal(size=(30, 2)) @ rng.normal(size=(2, 8)), y),
        "column scales": (X * np.exp(np.linspace(-30, 30, 12)), y),
        "large y": (X, y * 1e12),
        "small y": (X, y * 1e-12),
        "constant y": (X, np.full(30, 3.0)),
        "zero y": (X, np.zeros(30)),
        "no noise": (X, X[:, 0] * 2.0),
        "outlier": (X, outlier),
        "two rows": (X[:2], y[:2]),
        "one column": (X[:, :1], y),
        "wide": (rng.normal(size=(8, 50)), rng.normal(size=8)),
        "far from zero": (X + 1e6, y),
        "heavy tails": (rng.standard_cauchy((30, 12)), rng.standard_cauchy(30)),
    }


# chains, which those of correlated columns are asked, too, and units, which have a test
NIGHTLY = ("duplicates", "column scales", "large y", "small y", "constant y", "far from zero")


@pytest.mark.parametrize(
    "name", [nightly(n) if n in NIGHTLY else n for n in hostile(np.random.default_rng(8))]
)
def test_hostile_data_give_finite_fits(name):
    X, y = hostile(np.random.default_rng(8))[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reg = SpikeSlabRegressor().fit(X, y)
    mean, std = reg.predict(X, return_std=True)
    for value in (reg.coef_, reg.coef_std_, reg.intercept_, mean, std, reg.log_evidence_):
        assert np.all(np.isfinite(value))
    assert np.all(std > 0)
    assert np.all((reg.inclusion_proba_ >= 0) & (reg.inclusion_proba_ <= 1))


def test_duplicates_get_the_same_answer():
    X, y = small(np.random.default_rng(9))
    a = fixed(0.09, 0.8, 0.3, fit_intercept=True).fit(X, y)
    b = fixed(0.09, 0.8, 0.3, fit_intercept=True).fit(np.c_[X, X[:, :1]], y)
    assert b.coef_[0] == pytest.approx(b.coef_[-1], abs=1e-6)
    assert np.abs(a.coef_[1:] - b.coef_[1:-1]).max() < 0.1


def test_unconverged_fit_warns_once_and_is_usable():
    X, y = small(np.random.default_rng(10))
    with pytest.warns(ConvergenceWarning, match="max_iter") as said:
        reg = fixed(0.09, 0.8, 0.3, max_iter=2, tol=1e-12).fit(X, y)
    assert len(said) == 1
    assert not reg.converged_
    assert reg.stop_reason_ == "max_iter"
    assert reg.n_iter_ == 2
    assert np.all(np.isfinite(reg.predict(X)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_variance", -1.0),
        ("noise_variance", np.inf),
        ("slab_variance", 0.0),
        ("prior_inclusion", 1.5),
        ("prior_inclusion", "none"),
        ("hyperparameters", "average"),
        ("algorithm", "nope"),
        ("damping", 0.0),
        ("n_init", 0),
        ("noise_starts", ()),
        ("noise_starts", (2.0,)),
    ],
)
def test_bad_parameters_are_named(name, value):
    X, y = small(np.random.default_rng(11))
    with pytest.raises(ValueError, match=name):
        SpikeSlabRegressor(**{name: value}).fit(X, y)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("size", [1e307, 1e160, 1e154, 1e-160, 1e-300])
def test_scales_whose_squares_leave_double_precision_are_named(standardize, size):
    X, y = small(np.random.default_rng(16))
    reg = SpikeSlabRegressor(standardize=standardize)
    with pytest.raises(ValueError, match="X has .* column 3.*scale the columns"):
        reg.fit(X * np.where(np.arange(12) == 3, size, 1.0), y)
    with pytest.raises(ValueError, match="y has .*scale y"):
        reg.fit(X, y * size)
    assert not vars(reg).keys() & {"n_features_in_", "coef_"}


@pytest.mark.parametrize("size", [1e138, 1e-138])
def test_the_largest_and_smallest_scales_give_the_same_answer(size):
    X, y = small(np.random.default_rng(16))
    a, b = SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(X * size, y)
    for one, two in zip(a.predict(X, True), b.predict(X * size, True), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9)


@pytest.mark.parametrize(
    "y", [["a", "b"], ["1", "2"], np.array(["a", 1.0], dtype=object), np.array([0, 1], "M8[D]")]
)
def test_responses_that_are_no_numbers_are_named(y):
    with pytest.raises(ValueError, match="y must hold numbers"):
        SpikeSlabRegressor().fit(np.eye(2), y)


def test_objects_that_are_numbers_are_responses():
    X, y = small(np.random.default_rng(16))
    a, b = SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(X, y.astype(object))
    np.testing.assert_array_equal(a.coef_, b.coef_)


def test_one_row_is_refused():
    with pytest.raises(ValueError, match="1 sample.*minimum of 2 is required"):
        SpikeSlabRegressor().fit([[1.0, 2.0]], [1.0])
    with pytest.raises(ValueError, match="at most one row"):
        SpikeSlabRegressor().fit(np.eye(2), [1.0, 2.0], sample_weight=[1.0, 0.0])


def test_where_ep_at_falling_noise_is_lost_the_descent_at_falling_noise_is_not():
    rng = np.random.default_rng(194)
    X = rng.normal(size=(12, 60))
    coef = rng.normal(size=60) * (rng.random(60) < 0.1)
    y = X @ coef + 0.01 * rng.normal(size=12)
    given = dict(noise_variance=1e-4, slab_variance=1.0, prior_inclusion=0.1)
    reg = SpikeSlabRegressor(hyperparameters="mode", **given).fit(X, y)
    assert reg.converged_ and reg.n_iter_ < 200
    assert reg.log_evidence_ > -12.7


def one_by_one(X, y, noise, slab, inclusion, damping):
    """Return the sites (2, d) after a sweep of EP from those of the prior, by inverses."""
    d = X.shape[1]
    b, pi = np.zeros(d), np.full(d, 1 / (inclusion * slab))
    for k in range(d):
        V = np.linalg.inv(X.T @ X / noise + np.diag(pi))
        mean, var = V[k] @ (X.T @ y / noise + b), V[k, k]
        precision, shift = 1 / var - pi[k], mean / var - b[k]
        centre, left = shift / precision, 1 / precision
        on = inclusion * norm.pdf(centre, scale=np.sqrt(slab + left))
        on /= on + (1 - inclusion) * norm.pdf(centre, scale=np.sqrt(left))
        slab_var = 1 / (precision + 1 / slab)
        first, second = on * slab_var * shift, on * (slab_var + (slab_var * shift) ** 2)
        site = max(1 / (second - first**2) - precision, 1e-8 / slab)
        target = np.array([first * (site + precision) - shift, site])
        b[k], pi[k] = [b[k], pi[k]] + damping * (target - [b[k], pi[k]])
    return np.stack([b, pi])


@pytest.mark.parametrize("shape", [(30, 6), (6, 15)])
@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_a_sequential_sweep_is_that_of_a_naive_loop(shape, damping):
    rng = np.random.default_rng(1)
    X = rng.normal(size=shape)
    y = X @ (rng.normal(size=shape[1]) * (rng.random(shape[1]) < 0.3)) + 0.3 * rng.normal(
        size=shape[0]
    )
    given = (0.1, 1.0, 0.3)
    settings = dict(fit_intercept=False, standardize=False, max_iter=1, damping=damping)
    reg = fixed(*given, algorithm="sequential", **settings)
    with pytest.warns(ConvergenceWarning):
        reg.fit(X, y)
    expected = one_by_one(X, y, *given, damping)
    np.testing.assert_allclose(
        [reg.site_shift_, reg.site_precision_], expected, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("shape", [(40, 8), (20, 30)])
def test_one_column_after_another_leads_to_the_same_fixed_point(shape):
    X, y, _ = make_spike_slab_regression(*shape, n_informative=3, random_state=0)
    settings = dict(tol=1e-8, max_iter=2000)
    parallel, sequential = (
        fixed(0.1, 1.0, 0.2, algorithm=algorithm, **settings).fit(X, y)
        for algorithm in ("ep", "sequential")
    )
    assert sequential.converged_ and parallel.converged_
    np.testing.assert_allclose(sequential.coef_, parallel.coef_, atol=1e-6)
    assert abs(sequential.log_evidence_ - parallel.log_evidence_) < 1e-5
    learned = SpikeSlabRegressor(algorithm="sequential").fit(X, y)
    np.testing.assert_allclose(learned.coef_, SpikeSlabRegressor().fit(X, y).coef_, atol=2e-3)
    with pytest.raises(ValueError, match="algorithm.*groups"):
        learned.fit(X, y, groups=np.arange(shape[1]) // 2)


@pytest.mark.parametrize("algorithm", ["convergent", "double_loop"])
def test_damping_without_damped_steps_is_said_once(algorithm):
    X, y = small(np.random.default_rng(17), 30, 5)
    given = dict(noise_variance=0.09, slab_variance=0.8, prior_inclusion=0.3)
    reg = SpikeSlabRegressor(algorithm=algorithm, damping=0.7, tol=1e-2, **given)
    with pytest.warns(UserWarning, match=f"damping=0.7 .*'{algorithm}'") as said:
        reg.fit(X, y)
    assert len(said) == 1
    coef = reg.coef_
    np.testing.assert_array_equal(reg.set_params(damping=0.5).fit(X, y).coef_, coef)
    reg.set_params(algorithm="ep", damping=0.7).fit(X, y)  # warnings are errors here


def test_bad_arguments_leave_the_fit_alone():
    X, y = small(np.random.default_rng(12))
    reg = SpikeSlabRegressor().fit(X, y)
    coef = reg.coef_.copy()
    with pytest.raises(ValueError, match="groups"):
        reg.fit(X, y, groups=[0, 1])
    with pytest.raises(ValueError, match="sample_weight"):
        reg.fit(X, y, sample_weight=np.full(30, 0.01))
    np.testing.assert_array_equal(reg.coef_, coef)


def test_copies_pickles_and_leaves_data_alone():
    X, y = small(np.random.default_rng(13), 10, 14)
    X0 = X.copy()
    given = dict(noise_variance=0.09, slab_variance=0.8, prior_inclusion=0.3)
    reg = SpikeSlabRegressor(**given).fit(X, y)
    np.testing.assert_array_equal(X, X0)
    back = pickle.loads(pickle.dumps(reg))
    for a, b in zip(reg.predict(X, return_std=True), back.predict(X, return_std=True), strict=True):
        np.testing.assert_array_equal(a, b)
    assert clone(reg).get_params() == reg.get_params()
    other = clone(reg).set_params(copy_X=False).fit(X, y)
    np.testing.assert_allclose(other.coef_, reg.coef_, rtol=1e-10)


@pytest.mark.parametrize("algorithm", ["ep", "convergent", "double_loop"])
def test_every_algorithm_learns(algorithm):
    X, y = small(np.random.default_rng(14), 40, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reg = SpikeSlabRegressor(algorithm=algorithm, max_iter=40).fit(X, y)
    base = SpikeSlabRegressor().fit(X, y)
    assert reg.algorithm_used_ == algorithm
    np.testing.assert_allclose(reg.coef_, base.coef_, atol=0.02)


def test_inclusion_display():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    X, y = small(np.random.default_rng(15))
    reg = SpikeSlabRegressor().fit(X, y)
    display = InclusionDisplay.from_estimator(reg)
    assert len(display.ax_) == 2
    figure, ax = plt.subplots()
    assert display.plot(ax=ax) is display
    assert display.figure_ is figure
    plt.close("all")


@pytest.mark.parametrize("shape", [(60, 20), (30, 50)])
def test_moments_and_slab_follow_from_the_sites(shape):
    X, y, _ = make_spike_slab_regression(*shape, n_informative=4, random_state=0)
    reg = SpikeSlabRegressor(hyperparameters="mode", tol=1e-8).fit(3.0 * X + 1.0, y)
    sd = 3.0 * X.std(0)
    rows, target = (X - X.mean(0)) / X.std(0), y - y.mean()
    cov = np.linalg.inv(rows.T @ rows / reg.noise_variance_ + np.diag(reg.site_precision_))
    mean = cov @ (rows.T @ target / reg.noise_variance_ + reg.site_shift_)
    np.testing.assert_allclose(reg.coef_ * sd, mean, atol=1e-8)
    np.testing.assert_allclose(reg.coef_std_ * sd, np.sqrt(np.diag(cov)), rtol=1e-7)
    second = np.sum((reg.coef_ * sd) ** 2 + (reg.coef_std_ * sd) ** 2)
    np.testing.assert_allclose(reg.slab_variance_, second / reg.expected_model_size_, rtol=5e-3)
