"""More than two classes with one joint posterior of the coefficients."""

import pickle
import tracemalloc
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from plain_logistic import log_half_cauchy, plain_logistic
from scipy.special import log_softmax
from sklearn.datasets import load_iris, load_wine, make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep._engine.noisy_argmax import SOFTMAX


def toy(n, n_classes, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X, W = rng.normal(size=(n, d)), 1.5 * rng.normal(size=(n_classes, d))
    y = np.argmax(X @ W.T + rng.gumbel(size=(n, n_classes)), axis=1)
    y[:n_classes] = np.arange(n_classes)
    return X, y


def fit(X, y, sample_weight=None, **kwargs):
    return plain_logistic(**{"tol": 1e-8, "max_iter": 100, **kwargs}).fit(X, y, sample_weight)


def test_the_posterior_is_that_of_long_sampling():
    """Against importance sampling from a wider Gaussian about the mode."""
    X, y = toy(30, 3, d=2, seed=1)
    est = fit(X, y, fit_intercept=False)
    rng = np.random.default_rng(0)
    posterior = est._posteriors[0]
    size = posterior.mean.size
    lower = np.linalg.cholesky(posterior.spread.array.reshape(size, size))
    z = rng.standard_t(8, size=(40_000, size))
    draws = posterior.mean.ravel() + 1.1 * z @ lower.T
    W = draws.reshape(-1, 3, 2)
    log_p = log_softmax(np.einsum("scd,nd->snc", W, X), axis=2)[:, np.arange(30), y].sum(1)
    log_w = log_p - 0.5 * np.sum(draws**2, axis=1)
    log_w += 4.5 * np.sum(np.log1p(z**2 / 8), axis=1)
    w = np.exp(log_w - log_w.max())
    mean = w @ draws / w.sum()
    std = np.sqrt(w @ (draws - mean) ** 2 / w.sum())
    assert np.max(np.abs(est.coef_.ravel() - mean) / std) < 0.05
    # the sites leave out what losers say of each other: some per cent too wide, never too narrow
    ratio = est.coef_std_.ravel() / std
    assert np.all((ratio > 0.99) & (ratio < 1.06))
    new = rng.normal(size=(5, 2))
    exact = np.tensordot(w, np.exp(log_softmax(np.einsum("scd,nd->snc", W, new), axis=2)), 1)
    np.testing.assert_allclose(est.predict_proba(new), exact / w.sum(), atol=5e-3)


def test_sparse_rows_names_of_classes_and_weights():
    X, y = toy(40, 4)
    X[np.abs(X) < 0.5] = 0.0
    est = fit(X, y)
    assert est.coef_.shape == est.coef_std_.shape == (4, 3) and est.intercept_.shape == (4,)
    csr = fit(sp.csr_matrix(X), y)
    np.testing.assert_allclose(csr.coef_, est.coef_, atol=1e-9)
    np.testing.assert_allclose(csr.predict_proba(sp.csr_matrix(X)), est.predict_proba(X), atol=1e-9)
    order = np.array([2, 0, 3, 1])
    renamed = fit(X, order[y])
    np.testing.assert_allclose(renamed.coef_[order], est.coef_, atol=1e-7)
    weight = np.random.default_rng(2).integers(0, 4, 40)
    weight[:4] = 1
    weighted = plain_logistic(tol=1e-8, max_iter=100).fit(X, y, sample_weight=weight)
    repeated = fit(np.repeat(X, weight, 0), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-7)
    assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, abs=1e-7)
    # coefficients of all classes sum to nothing: only contrasts are learned
    np.testing.assert_allclose(est.coef_.sum(0), 0.0, atol=1e-7)


def test_iris_is_better_than_one_against_the_rest_and_its_peer():
    X, y = load_iris(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    train = np.random.default_rng(0).permutation(150) < 90
    joint = plain_logistic(learn_prior=True).fit(X[train], y[train])
    rest = plain_logistic(learn_prior=True, multi_class="one_vs_rest")
    peer = LogisticRegression().fit(X[train], y[train])
    loss = [
        log_loss(y[~train], e.predict_proba(X[~train]))
        for e in (joint, rest.fit(X[train], y[train]), peer)
    ]
    assert loss[0] < loss[1] - 0.05 and loss[0] < loss[2] + 0.03
    assert joint.prior_variance_ > 5.0


def test_the_learned_prior_variance_is_at_the_top_of_evidence_times_prior():
    X, y = toy(50, 3, seed=3)
    est = fit(X, y, learn_prior=True, tol=1e-4)
    tried = [est.prior_variance_ * f for f in (0.7, 1.0, 1.4)]
    evidence = [fit(X, y, prior_variance=v, tol=1e-4).log_evidence_ for v in tried]
    values = [e + log_half_cauchy(np.log(v), X) for e, v in zip(evidence, tried, strict=True)]
    assert values[1] >= max(values) - 0.02
    assert est.log_evidence_ == pytest.approx(evidence[1], abs=1e-3)


@pytest.mark.parametrize("warm", [False, True])
def test_the_search_for_the_prior_variance_does_not_end_where_the_evidence_rises(warm):
    """Of separable classes it rises over five units of the log variance, and bends ever less."""
    X, y = make_blobs(80, 4, centers=4, cluster_std=2.0, random_state=1)
    X = StandardScaler().fit_transform(X)
    est = ConvexVariationalLogistic(calibration=None, warm_start=True).fit(X, y)
    v = (est.fit(X, y) if warm else est).prior_variance_
    higher = ConvexVariationalLogistic(2.0 * v, calibration=None).fit(X, y)
    prior = log_half_cauchy(np.log(2.0 * v), X) - log_half_cauchy(np.log(v), X)
    assert higher.log_evidence_ + prior < est.log_evidence_ + 0.3


def test_the_search_for_the_prior_variance_does_not_depend_on_the_unit_of_the_columns():
    """Each place begins at sites of one that was looked at, the first one without any."""
    X, y = toy(60, 4, d=12, seed=2)
    relative = [
        ConvexVariationalLogistic(calibration=None).fit(c * X, y).prior_variance_ * c**2
        for c in 2.0 ** np.arange(-4, 5)
    ]
    np.testing.assert_allclose(relative, relative[0], rtol=1e-6)


def test_fits_by_weights_below_one_settle():
    """Cavities of such rows come to an edge where less of a site is there than they would lack."""
    X, y = load_wine(return_X_y=True)
    weight = np.random.default_rng(4).exponential(size=len(y)) + 0.05
    model = ConvexVariationalLogistic()
    model.fit(StandardScaler().fit_transform(X), y, sample_weight=weight)
    assert model.converged_ and model.n_iter_ < 30


def test_rows_left_out_calibrate():
    X, y = toy(40, 3, seed=7)
    est = ConvexVariationalLogistic(1.0, tol=1e-6, max_iter=100).fit(X, y)
    plain = fit(X, y, tol=1e-6)
    np.testing.assert_array_equal(est.coef_, plain.coef_)
    one = np.array(
        [
            fit(np.delete(X, i, 0), np.delete(y, i), tol=1e-6).predict_proba(X[i : i + 1])[0, y[i]]
            for i in range(0, 40, 8)
        ]
    )
    np.testing.assert_allclose(plain.loo_proba_[::8], one, atol=0.01)
    assert est.slope_ != 1.0 and (plain.slope_, plain.temper_) == (1.0, 1.0)
    (m, v), (m0, v0) = (e.latent_mean_and_variance(X) for e in (est, plain))
    np.testing.assert_allclose(m, est.slope_ * m0)
    np.testing.assert_allclose(v, est.slope_**2 * est.temper_ * v0)
    np.testing.assert_allclose(est.decision_function(X), m)
    committee = est.sample_proba(X[:6], 4000, random_state=0)
    np.testing.assert_allclose(committee.mean(0), est.predict_proba(X[:6]), atol=0.02)
    assert est.loo_mean_.shape == est.loo_variance_.shape == (3, 40)

    # no other slope and temper foretell labels better, their priors included
    def value(slope, temper):
        var = slope**2 * temper * est.loo_variance_.T
        log_z = SOFTMAX.tilted(y, slope * est.loo_mean_.T, var).log_z.sum()
        doubt, certainty = 0.5 * np.log(temper) ** 2, np.log1p((np.log(temper) / 0.4) ** 2)
        of_temper = doubt if temper > 1 else certainty
        return log_z - 0.5 * (np.log(slope) / 0.3) ** 2 - of_temper

    best = value(est.slope_, est.temper_)
    for da, dt in ((1.1, 1), (0.9, 1), (1, 1.2), (1, 0.8)):
        assert value(da * est.slope_, dt * est.temper_) < best + 2e-3


def test_a_row_is_left_out_with_all_its_copies():
    X, y = toy(40, 3, seed=5)
    weight = np.random.default_rng(5).uniform(0.2, 2.0, 40)
    loo = fit(X, y, sample_weight=weight).loo_proba_
    for i in [*np.argsort(weight)[:2], *np.argsort(weight)[-2:]]:
        without = weight * (np.arange(40) != i)
        proba = fit(X, y, sample_weight=without, tol=1e-4).predict_proba(X[[i]])[0, y[i]]
        assert loo[i] == pytest.approx(proba, abs=0.02), (weight[i], loo[i], proba)


def test_draws_summary_intervals_and_diagnosis():
    X, y = toy(60, 3, seed=4)
    est = fit(X, y, tol=1e-6)
    draws = est.sample_posterior(4000, random_state=0)
    assert draws.shape == (3, 4000, 4)
    np.testing.assert_allclose(draws.mean(1)[:, :3], est.coef_, atol=0.1)
    np.testing.assert_allclose(draws.std(1)[:, :3], est.coef_std_, rtol=0.06)
    committee = est.sample_proba(X[:6], 4000, random_state=0)
    np.testing.assert_allclose(committee.mean(0), est.predict_proba(X[:6]), atol=0.02)
    assert len(est.summary().coefficients["name"]) == 12
    assert est.coef_interval().shape == (3, 3, 2)
    assert est.diagnose(n_draws=2000, X=X, y=y).ess_share > 0.3
    cov = est.latent_covariance(X[:4])
    np.testing.assert_allclose(
        np.einsum("cii->ic", cov), est.latent_mean_and_variance(X[:4])[1], rtol=1e-8
    )


def test_conditioning_on_rows_is_close_to_a_refit():
    X, y = toy(120, 3, seed=5)
    part = fit(X[:110], y[:110])
    coef = part.coef_.copy()
    more, whole = part.condition_on(X[110:], y[110:]), fit(X, y)
    before = np.abs(part.predict_proba(X) - whole.predict_proba(X)).max()
    after = np.abs(more.predict_proba(X) - whole.predict_proba(X)).max()
    assert after < 0.02 and after < 0.5 * before
    assert more.log_evidence_ == pytest.approx(whole.log_evidence_, abs=0.3)
    np.testing.assert_array_equal(part.coef_, coef)


def test_a_warm_start_goes_on_from_the_sites():
    X, y = toy(60, 3, seed=6)
    est = plain_logistic(warm_start=True, tol=1e-6).fit(X, y)
    first, proba = est.n_iter_, est.predict_proba(X)
    assert est.fit(X, y).n_iter_ <= 2 < first
    np.testing.assert_allclose(est.predict_proba(X), proba, atol=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        dict(prior="laplace"),
        dict(bound="local"),
        dict(variance="monte_carlo"),
        dict(solver="cg"),
        dict(prior_groups=[0, 0, 1], learn_prior=True),
        dict(intercept_prior_variance=np.inf),
        dict(n_partitions=2),
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_that_exclude_a_joint_posterior_are_named(setting):
    X, y = toy(60, 3)
    est = plain_logistic(multi_class="joint", random_state=0, **setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        est.fit(X, y)
    if "n_partitions" not in setting:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(est.set_params(multi_class="auto").fit(X, y)._posteriors) == 3


def test_streams_and_two_classes():
    X, y = toy(60, 3)
    est = plain_logistic(multi_class="joint")
    with pytest.raises(ValueError, match="partial_fit"):
        est.partial_fit(X, y)
    with pytest.raises(ValueError, match="multi_class"):
        plain_logistic(multi_class="nested").fit(X, y)
    joint = plain_logistic().fit(X, y)
    with pytest.warns(UserWarning, match="rows are forgotten"):
        joint.partial_fit(X, y)
    fresh = plain_logistic().partial_fit(X, y)
    np.testing.assert_array_equal(joint.coef_, fresh.coef_)
    two = y < 2
    plain = plain_logistic(multi_class="one_vs_rest").fit(X[two], y[two])
    np.testing.assert_array_equal(est.fit(X[two], y[two]).coef_, plain.coef_)


def test_sampled_variances_are_close_to_exact_ones():
    X, y = (a[:150] for a in toy(650, 3, d=100, seed=8))  # of which EP's evidence has a top
    new = np.random.default_rng(1).normal(size=(200, 100))
    for variance in (0.05, "learn"):
        kw = dict(multi_class="joint", random_state=0)
        exact = plain_logistic(variance, **kw).fit(X, y)
        est = plain_logistic(variance, variance="calibrated", **kw).fit(X, y)
        assert est.variance_method_ == "calibrated" and est.multi_class_ == "joint"
        within = abs(np.log(est.prior_variance_ / exact.prior_variance_))
        assert within < 1.0  # the evidence is flat to some tenths of a nat there
        assert abs(est.log_evidence_ - exact.log_evidence_) < 3 * est.log_evidence_std_ + 1
        if variance == "learn":
            continue
        (m, v), (m0, v0) = (e.latent_mean_and_variance(new) for e in (est, exact))
        m0 = m0 - m0.mean(1, keepdims=True)
        assert np.mean(np.abs(m - m.mean(1, keepdims=True) - m0) / np.sqrt(v0)) < 2e-3
        # independent predictors with the same differences of three classes
        cov = exact._posteriors[0].latent(new)[1]
        own = np.einsum("ncc->nc", cov)
        pairs = own[:, :, None] + own[:, None] - 2 * cov
        contrast = pairs.sum(2) - 0.25 * pairs.sum((1, 2))[:, None]
        assert abs(np.mean(v / contrast) - 1) < 0.03
        np.testing.assert_allclose(est.predict_proba(new), exact.predict_proba(new), atol=0.025)
        np.testing.assert_allclose(est.coef_std_, exact.coef_std_, rtol=0.05)
        np.testing.assert_allclose(est.loo_proba_, exact.loo_proba_, atol=0.04)


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix], ids=["dense", "sparse"])
def test_matrices_of_rows_and_of_coefficients_are_one_posterior(kind):
    """Predictors of few rows say all that labels tell of the weights."""
    X, y = toy(30, 3, d=40, seed=3)
    weight = np.random.default_rng(0).integers(1, 4, 30) * 1.0
    a, b = (
        ConvexVariationalLogistic(solver=solver, tol=1e-8, max_iter=100)
        for solver in ("primal", "dual")
    )
    a.fit(kind(X), y, sample_weight=weight), b.fit(kind(X), y, sample_weight=weight)
    assert a.converged_ and b.converged_ and a.variance_method_ == b.variance_method_ == "exact"
    close = dict(rtol=1e-6, atol=1e-6)
    for name in ("coef_", "coef_std_", "log_evidence_", "effective_dof_", "loo_proba_"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), **close)
    new = kind(2.0 * X[:9] + 1.0)
    for method in ("predict_proba", "latent_mean_and_variance", "predict_proba_interval"):
        np.testing.assert_allclose(getattr(a, method)(new), getattr(b, method)(new), **close)
    rows = new, new[:5]
    np.testing.assert_allclose(a.latent_covariance(*rows), b.latent_covariance(*rows), **close)
    shown = X[:2] + 0.5, y[:2]
    after = [e.condition_on(*shown).predict_proba(new) for e in (a, b)]
    np.testing.assert_allclose(*after, **close)
    kept = pickle.loads(pickle.dumps(b))
    np.testing.assert_array_equal(kept.predict_proba(new), b.predict_proba(new))
    draws = [e.sample_posterior(10_000, random_state=0)[..., :3] for e in (a, b)]
    own, other = (np.cov(w.transpose(1, 0, 2).reshape(10_000, -1).T) for w in draws)
    unit = np.sqrt(np.outer(np.diag(own), np.diag(own)))
    assert np.abs((own - other) / unit).max() < 0.08  # 5.7 deviations


def test_the_cheaper_matrix_is_that_of_fewer_numbers():
    X, y = toy(60, 4, d=70, seed=3)
    assert ConvexVariationalLogistic().fit(X, y).solver_ == "dual"
    assert ConvexVariationalLogistic().fit(X[:, :4], y).solver_ == "primal"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("prior", "weight"),
    [(0.05, 2.0), pytest.param(5.0, 1.0, marks=SLOW), pytest.param(100.0, 3.0, marks=SLOW)],
)
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "diagonals"])
def test_many_draws_give_the_variances_of_the_matrix(monkeypatch, prior, weight, blocks):
    """Given the sites, everything that draws tell is known from the matrix of all classes."""
    if not blocks:
        monkeypatch.setattr("sklearn_ep.convex._joint_sampled._MOST_OF_ROW", 0.0)
    (X, y), K, k, q = toy(60, 3, d=20, seed=8), 3, 1200, 21
    kw = dict(multi_class="joint", variance="calibrated", random_state=0, tol=1e-8)
    est = plain_logistic(prior, n_variance_samples=k, **kw).fit(X, y, np.full(60, weight))
    spread, n_weights = est._posteriors[0].spread, q * K
    system = spread.system
    B, d = system.design.B, system.precision
    T = np.einsum("nc,cj->ncj", d, np.eye(K)) - np.einsum("nc,nj->ncj", d, d / d.sum(1)[:, None])
    A = np.einsum("nq,ncj,np->qcpj", B, T, B, optimize=True).reshape(n_weights, n_weights)
    A[np.diag_indices(n_weights)] += system.diagonal
    cov = np.linalg.inv(A)
    classes = cov.reshape(q, K, q, K)

    own = np.diag(cov).reshape(q, K).T[:, :-1]
    error = 1 / np.sqrt(0.5 * k)
    assert abs(np.mean(est.coef_std_**2 / own) - 1) < 3 * error / np.sqrt(own.size)
    np.testing.assert_allclose(est.coef_std_**2, own, rtol=4.5 * error)
    between = np.einsum("nq,qp,mp->nm", B[:5], classes[:, 0, :, 2], B[5:9])
    # by covariances of the training rows, and by a system for each row
    for most in (0, 1000):
        monkeypatch.setattr("sklearn_ep.convex._joint_sampled._MOST_ROWS", most)
        got = B[:5] @ spread.weights_with(B[5:9], 0, 2)
        np.testing.assert_allclose(got, between, rtol=1e-6, atol=1e-6)
        own = spread.weights_with(sp.csr_matrix(B[5:9]), 1, 1)
        truth = np.einsum("qp,mp->qm", classes[:, 1, :, 1], B[5:9])
        np.testing.assert_allclose(own, truth, rtol=1e-6, atol=1e-6)
    draws = spread.draw(20_000, np.random.default_rng(0)).transpose(1, 2, 0).reshape(20_000, -1)
    unit = np.sqrt(np.outer(np.diag(cov), np.diag(cov)))
    assert np.abs((draws.T @ draws / 20_000 - cov) / unit).max() < 0.035  # 4.9 deviations

    # the level of the variances, that makes rows right in the mean
    rows = np.einsum("nq,qcpj,np->ncj", B, classes, B, optimize=True)
    left = K - 1 - np.einsum("ncj,njc->n", T, rows)
    of_rows = np.random.default_rng(1).standard_normal((60, K, 4000))
    right = system.right(np.random.default_rng(2).standard_normal((n_weights, 4000)), of_rows)
    told = system.unexplained(of_rows, system.predictors(cov @ right))
    assert abs(told.sum() / left.sum() - 1) < 0.01
    copy = d / weight
    link = copy - copy**2 / copy.sum(1, keepdims=True)
    own = np.stack([A.reshape(q, K, q, K)[:, c, :, c] for c in range(K)])
    without = own - np.einsum("nc,nq,np->ncqp", link, B, B)
    without = without if blocks else without * np.eye(q)
    j = np.einsum("nq,ncqp,np->nc", B, np.linalg.inv(without), B)
    inverse = 1 / j
    seen = np.einsum("nc,ncc->n", inverse, rows)
    seen -= np.einsum("nc,nj,ncj->n", inverse, inverse / inverse.sum(1)[:, None], rows)
    level = weight * seen.sum() / ((weight - 1) * (K - 1) * 60 + left.sum())
    assert spread.level == pytest.approx(level, rel=0.02)
    own = np.linalg.inv(own if blocks else own * np.eye(q))
    var = np.einsum("ncc->nc", spread.rows(B))
    np.testing.assert_allclose(var, spread.level * np.einsum("nq,cqp,np->nc", B, own, B))


def correlated(n, n_classes, d, seed):
    """Return rows whose columns have few directions in common, and labels."""
    X, y = toy(n, n_classes, d=d, seed=seed)
    rng = np.random.default_rng(seed + 1)
    X = X @ (np.diag(np.geomspace(3.0, 0.1, d)) @ np.linalg.qr(rng.normal(size=(d, d)))[0])
    W = rng.normal(size=(n_classes, d))
    y[n_classes:] = np.argmax(X @ W.T + rng.gumbel(size=y.shape + (n_classes,)), axis=1)[n_classes:]
    return X, y


@pytest.mark.parametrize(
    ("seed", "ratio", "proba", "left_out"),  # one table where samples do worst, and a common one
    [(0, 0.45, 0.05, 0.18), (2, 0.1, 0.03, 0.09)],
)
def test_sampled_variances_know_how_columns_go_together(seed, ratio, proba, left_out):
    X, y = correlated(200, 4, 16, seed=seed)
    kw = dict(multi_class="joint", random_state=0)
    exact = plain_logistic(10.0, **kw).fit(X, y)
    est = plain_logistic(10.0, variance="calibrated", **kw).fit(X, y)
    new, centre = correlated(300, 4, 16, seed=seed)[0][200:], np.eye(4) - 0.25
    cov = [centre @ e._posteriors[0].latent(new)[1] @ centre for e in (est, exact)]
    apart = np.log(np.divide(*(np.einsum("ncc->nc", each) for each in cov)))
    # variances of single columns would leave .72, .19 and .52, and .44, .11 and .34
    assert np.sqrt(np.mean(apart**2)) < ratio
    np.testing.assert_allclose(est.predict_proba(new), exact.predict_proba(new), atol=proba)
    np.testing.assert_allclose(est.loo_proba_, exact.loo_proba_, atol=left_out)


def system_of(X, y):
    """Return the precision of the weights of a fit by samples."""
    kw = dict(multi_class="joint", variance="calibrated", random_state=0)
    return plain_logistic(10.0, **kw).fit(X, y)._posteriors[0].spread.system


def test_probes_of_the_determinant_see_what_no_class_knows_by_itself(monkeypatch):
    """By diagonals few steps of Lanczos' method do not find the smallest eigenvalues."""
    system = system_of(*correlated(200, 3, 40, seed=2))
    size = len(system.diagonal)
    log_det = np.linalg.slogdet(system.times(np.eye(size)))[1]
    told = system.times, np.sign(np.random.default_rng(4).normal(size=(size, 8)))
    value, error = system.shape.log_determinant(*told)
    assert abs(value - log_det) < 3.0 * error
    monkeypatch.setattr("sklearn_ep.convex._joint_sampled._MOST_OF_ROW", 0.0)
    by_diagonals = type(system)(system.design, system.diagonal[::3], system.precision)
    of_diagonals = by_diagonals.shape.log_determinant(*told)
    assert abs(value - log_det) < 0.3 * abs(of_diagonals[0] - log_det)
    assert error < 0.5 * of_diagonals[1]


def test_many_columns_for_their_rows_are_taken_one_by_one():
    """A matrix of each class takes longer there than all else."""
    for d, kind in ((40, "ClassBlocks"), (600, "ClassDiagonals")):
        assert type(system_of(*toy(50, 3, d=d)).shape).__name__ == kind


def test_sites_of_rows_are_those_of_all_their_copies():
    X, y = toy(40, 3, d=2, seed=2)
    weight = np.random.default_rng(3).integers(1, 4, 40) * 1.0
    est = plain_logistic(tol=1e-8, max_iter=100).fit(X, y, sample_weight=weight)
    d, B = est.site_precision_.T, np.column_stack([X, np.ones(40)])
    T = np.einsum("nc,cj->ncj", d, np.eye(3)) - np.einsum("nc,nj->ncj", d, d / d.sum(1)[:, None])
    A = np.einsum("nq,ncj,np->cqjp", B, T, B, optimize=True).reshape(9, 9) + np.eye(9) / np.tile(
        [1.0, 1.0, est.intercept_prior_variance], 3
    )
    var = np.diag(np.linalg.inv(A)).reshape(3, 3)[:, :2]
    np.testing.assert_allclose(est.coef_std_**2, var, rtol=1e-6)
    repeated = np.repeat(X, weight.astype(int), 0), np.repeat(y, weight.astype(int))
    same = fit(*repeated)
    np.testing.assert_allclose(
        same.site_precision_.sum(axis=1), est.site_precision_.sum(axis=1), rtol=1e-9
    )
    shares = [
        est.diagnose(n_draws=2000, X=X, y=y, sample_weight=weight, random_state=0).ess_share,
        same.diagnose(n_draws=2000, X=repeated[0], y=repeated[1], random_state=0).ess_share,
    ]
    assert shares[0] == pytest.approx(shares[1], rel=1e-6) and shares[0] > 0.3


@pytest.mark.parametrize(
    "kind",
    [pytest.param(np.asarray, marks=SLOW), sp.csr_matrix],
    ids=["dense", "sparse"],
)
def test_many_coefficients_of_all_classes_need_no_matrix(kind, monkeypatch):
    monkeypatch.setattr("sklearn_ep.convex._parameters.Sizes.joint", 1e4)
    rng = np.random.default_rng(9)
    X = np.where(rng.random((40, 150)) < 0.1, rng.exponential(size=(40, 150)), 0.0)
    y = np.argmax(X[:, :120].reshape(40, 4, 30).sum(2) + 0.3 * rng.gumbel(size=(40, 4)), axis=1)
    weight, order = rng.integers(1, 3, 40), rng.permutation(40)
    est = ConvexVariationalLogistic(random_state=0).fit(kind(X), y, sample_weight=weight)
    assert est.multi_class_ == "joint" and est.variance_method_ == "calibrated" and est.converged_
    repeated = kind(np.repeat(X[order], weight[order], 0)), np.repeat(y[order], weight[order])
    same = ConvexVariationalLogistic(random_state=0).fit(*repeated)
    np.testing.assert_array_equal(est.coef_, same.coef_)
    np.testing.assert_array_equal(est.predict_proba(kind(X)), same.predict_proba(kind(X)))
    assert est.loo_proba_.shape == (40,) and est.score(kind(X), y) > 0.8
    draws = est.sample_posterior(3, random_state=0)
    assert draws.shape == (4, 3, 151)
    cov = est.latent_covariance(kind(X[:4]))
    np.testing.assert_allclose(cov, cov.transpose(0, 2, 1), rtol=1e-5, atol=1e-8)
    # a system for each row of the shorter side, whichever that is
    few, all_rows = kind(X[:2]), kind(X)
    first, second = est.latent_covariance(few, all_rows), est.latent_covariance(all_rows, few)
    np.testing.assert_array_equal(first, second.transpose(0, 2, 1))
    np.testing.assert_allclose(first[:, :, :4], cov[:, :2], rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="condition_on"):
        est.condition_on(kind(X[:2]), y[:2])
    assert np.all(np.isfinite(est.coef_interval()))


@pytest.mark.slow
def test_many_sparse_columns_keep_the_prior_variance_where_predictions_are_good():
    rng = np.random.default_rng(0)
    d, n = 1500, 500
    common = 1.0 / np.arange(1, d + 1)
    topics = common * np.exp(0.7 * rng.normal(size=(3, d)))
    y = rng.integers(3, size=n)
    words = np.array([rng.multinomial(40, topics[k] / topics[k].sum()) for k in y])
    X = sp.csr_matrix(words / np.linalg.norm(words, axis=1, keepdims=True))
    y = np.where(rng.random(n) < 0.05, rng.integers(3, size=n), y)
    old, new = slice(200), slice(200, None)

    def loss(prior_variance):
        est = ConvexVariationalLogistic(prior_variance, random_state=0).fit(X[old], y[old])
        return log_loss(y[new], est.predict_proba(X[new])), est.prior_variance_

    learned, prior_variance = loss("learn")
    assert prior_variance < 100.0
    assert learned < min(loss(v)[0] for v in (10.0, 100.0)) + 0.02


def test_the_learned_prior_variance_does_not_depend_on_probes_of_the_evidence():
    """Scales are compared by evidences of their own, whether or not that of the fit is asked."""
    X, y = load_iris(return_X_y=True)
    kw = dict(multi_class="joint", variance="calibrated", random_state=0)
    models = [ConvexVariationalLogistic(n_evidence_probes=k, **kw).fit(X, y) for k in (0, 8)]
    assert models[0].prior_variance_ == models[1].prior_variance_
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)
    assert np.isnan(models[0].log_evidence_)


def test_too_many_rows_and_classes_for_a_joint_fit_are_told(monkeypatch):
    monkeypatch.setattr("sklearn_ep.convex._parameters.MOST_PAIRS", 1000)
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = np.arange(60) % 5
    for asked, got in (("joint", "joint"), ("one_vs_rest", "one_vs_rest")):
        clf = ConvexVariationalLogistic(1.0, calibration=None, multi_class=asked)
        assert clf.fit(X, y).multi_class_ == got
    with pytest.warns(UserWarning, match="5 classes of 60 rows are fitted one against the rest"):
        clf = ConvexVariationalLogistic().fit(X, y)
    assert clf.multi_class_ == "one_vs_rest"


def test_many_classes_take_no_memory_of_rows_times_squared_classes(monkeypatch):
    """As 800 rows of 400 classes do at the limit that holds: 1 GiB for each of several matrices."""
    n, n_classes = 240, 40
    monkeypatch.setattr("sklearn_ep.convex._parameters.MOST_PAIRS", n * n_classes**2 // 4)
    X, y = np.random.default_rng(0).normal(size=(n, 2)), np.arange(n) % n_classes
    clf = ConvexVariationalLogistic(1.0, calibration=None, tol=1.0)
    tracemalloc.start()
    try:
        with pytest.warns(UserWarning, match="40 classes of 240 rows.* one against the rest.*GiB"):
            clf.fit(X, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert clf.multi_class_ == "one_vs_rest" and clf.coef_.shape == (n_classes, 2)
    # a dozen numbers a row and class; jointly the peak is 6.8 such matrices
    assert peak < 0.5 * 8 * n * n_classes**2
