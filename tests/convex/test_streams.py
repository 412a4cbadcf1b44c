"""partial_fit: against the exact posterior, the whole fit, and the ways to keep a posterior."""

import types

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from oracles import oracle
from plain_logistic import plain_logistic
from scipy.special import expit

from sklearn_ep import ConvexVariationalLogistic

STREAM = oracle("linear_scale")["stream"]
B, Y = np.array(STREAM["B"]), np.array(STREAM["y"])


def stream(X, y, size, *args, **kw):
    est = plain_logistic(*args, **kw)
    for a in range(0, len(y), size):
        est.partial_fit(X[a : a + size], y[a : a + size], classes=[0, 1])
    return est


def far(a, b):
    return np.max(np.abs((a.coef_ - b.coef_) / b.coef_std_))


def test_a_stream_is_near_the_exact_posterior_and_its_evidence():
    est = stream(B, Y, 50, STREAM["prior_variance"], fit_intercept=False, tol=1e-6)
    assert np.max(np.abs((est.coef_[0] - STREAM["mean"]) / STREAM["sd"])) < 0.1
    assert np.max(np.abs(np.log(est.coef_std_[0] / STREAM["sd"]))) < 0.06
    # every batch adds the gap of its own bound
    assert STREAM["log_evidence"] - 0.5 < est.log_evidence_ < STREAM["log_evidence"]


def test_one_batch_is_a_fit_and_a_fit_can_be_gone_on_from():
    kw = dict(tol=1e-8, inner_tol=1e-10, max_iter=100)
    one = plain_logistic(**kw).partial_fit(B, Y)
    full = plain_logistic(**kw).fit(B, Y)
    assert far(one, full) < 1e-6 and abs(one.log_evidence_ - full.log_evidence_) < 1e-6
    assert one.effective_dof_ == pytest.approx(full.effective_dof_, abs=1e-5)
    after = plain_logistic(**kw).fit(B[:300], Y[:300]).partial_fit(B[300:], Y[300:])
    two = stream(B, Y, 300, **kw)
    assert far(after, two) < 1e-6
    joined = plain_logistic(**kw).partial_fit(B[:300], Y[:300]).condition_on(B[300:302], Y[300:302])
    assert far(joined.partial_fit(B[302:], Y[302:]), two) < 0.05
    refit = two.fit(B, Y)
    assert far(refit, full) == 0.0


@pytest.mark.parametrize(
    ("forgetting", "sparse"),
    [
        (1.0, False),
        (0.8, True),
        pytest.param(1.0, True, marks=pytest.mark.slow),
        pytest.param(0.8, False, marks=pytest.mark.slow),
    ],
)
def test_full_rank_and_the_space_of_the_rows_give_the_exact_stream(monkeypatch, sparse, forgetting):
    kw = dict(forgetting=forgetting, tol=1e-9, max_iter=100)
    X = sp.csr_matrix(B) if sparse else B
    exact = stream(X, Y, 60, **kw)
    small = types.SimpleNamespace(stream=3)
    monkeypatch.setattr("sklearn_ep.convex._stream.SIZES", small)
    d = B.shape[1] + 1
    rows = stream(X, Y, 60, stream_rank=d, **kw)
    assert rows.solver_ == "dual"
    assert far(rows, exact) < 1e-4
    np.testing.assert_allclose(rows.coef_std_, exact.coef_std_, rtol=1e-4)
    assert rows.log_evidence_ == pytest.approx(exact.log_evidence_, abs=1e-3)
    cov = exact.latent_covariance(B[:5])
    np.testing.assert_allclose(rows.latent_covariance(B[:5]), cov, atol=1e-4 * cov.max())
    draws = rows.sample_posterior(4000, random_state=0)
    np.testing.assert_allclose(draws[:, :-1].std(axis=0), rows.coef_std_[0], rtol=0.1)


def test_a_low_rank_keeps_more_than_a_diagonal():
    rng = np.random.default_rng(1)
    X = rng.standard_normal((1000, 30)) @ rng.standard_normal((30, 30)) / 5
    y = (rng.random(1000) < expit(X @ rng.standard_normal(30))).astype(int)
    full = plain_logistic().fit(X, y)
    gaps = [far(stream(X, y, 200, stream_rank=r), full) for r in (0, 15, 30)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert far(stream(X, y, 200, stream_rank=31), stream(X, y, 200)) < 1e-6


def test_weights_are_copies_and_forgetting_widens():
    kw = dict(tol=1e-9, max_iter=100)
    twice = plain_logistic(**kw).partial_fit(B, Y, sample_weight=np.full(len(Y), 2.0))
    rows = plain_logistic(**kw).partial_fit(np.repeat(B, 2, 0), np.repeat(Y, 2))
    assert far(twice, rows) < 1e-7
    kept, forgot = (stream(B, Y, 100, forgetting=g) for g in (1.0, 0.5))
    assert np.all(forgot.coef_std_ > 1.2 * kept.coef_std_)


def test_three_classes_and_batches_of_one():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 3))
    y = np.argmax(X + 0.3 * rng.standard_normal((300, 3)), axis=1)
    est = plain_logistic()
    for a in range(0, 300, 50):
        order = np.argsort(y[a : a + 50])  # some batches begin with one class only
        est.partial_fit(X[a : a + 50][order], y[a : a + 50][order], classes=[0, 1, 2])
    assert est.coef_.shape == (3, 3) and est.score(X, y) > 0.85


def test_what_a_stream_refuses():
    est = plain_logistic().partial_fit(B, Y)
    before = est.coef_
    with pytest.raises(ValueError, match="label"):
        est.partial_fit(B, Y + 5)
    with pytest.raises(ValueError, match="feature"):
        est.partial_fit(B[:, :2], Y)
    with pytest.raises(ValueError, match="forgetting"):
        est.set_params(forgetting=0.0).partial_fit(B, Y)
    assert est.coef_ is before
    with pytest.raises(ValueError, match="classes"):
        plain_logistic().partial_fit(B[:3], np.ones(3))
    with pytest.raises(ValueError, match="stream_rank"):
        wide = sp.random_array((20, 2500), density=0.01, format="csr", rng=0)
        plain_logistic().partial_fit(wide, np.arange(20) % 2)
    with pytest.raises(AttributeError, match="partial_fit"):
        plain_logistic(prior="laplace").partial_fit(B, Y)


def test_a_sampled_fit_is_gone_on_from_by_its_means_and_variances():
    sampled = plain_logistic(variance="calibrated", random_state=0)
    sampled.fit(B[:300], Y[:300]).partial_fit(B[300:], Y[300:])
    full = plain_logistic().fit(B, Y)
    assert far(sampled, full) < 1.0 and np.all(sampled.coef_std_ < 1.5 * full.coef_std_)


@pytest.mark.parametrize(("n_classes", "after_fit"), [(2, False), (2, True), (3, False)])
def test_every_batch_is_scored_before_it_is_learned(n_classes, after_fit):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((160, 3))
    y = np.argmax(X[:, :n_classes] + rng.gumbel(size=(160, n_classes)), axis=1)
    weight = rng.integers(1, 4, 160).astype(float)
    est = ConvexVariationalLogistic(multi_class="one_vs_rest")
    expected, start = [-np.log(n_classes)], 40
    est = est.fit(X[:40], y[:40]) if after_fit else est.partial_fit(X[:40], y[:40])
    assert hasattr(est, "stream_log_score_") != after_fit
    expected = [] if after_fit else expected
    for rows in (slice(a, a + 40) for a in range(start, 160, 40)):
        own = est.predict_log_proba(X[rows])[np.arange(40), y[rows]]
        expected.append(np.average(own, weights=weight[rows]))
        est.partial_fit(X[rows], y[rows], sample_weight=weight[rows])
    np.testing.assert_allclose(est.stream_log_score_, expected, rtol=1e-12)
    assert not hasattr(est.fit(X, y), "stream_log_score_")


def test_batches_of_a_data_frame_keep_their_names():
    frame = pd.DataFrame(B).add_prefix("column ")
    est = stream(frame, Y, 50)
    assert list(est.feature_names_in_) == list(frame) and np.all(np.isfinite(est.stream_log_score_))


def three_classes():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((120, 3))
    return X, np.argmax(X + 0.5 * rng.standard_normal(X.shape), axis=1)


def test_streams_refuse_a_flat_prior():
    flat = ConvexVariationalLogistic(intercept_prior_variance=np.inf)
    with pytest.raises(ValueError, match="finite intercept_prior_variance"):
        flat.partial_fit(*three_classes())


@pytest.mark.parametrize("groups", [None, [0, 0, 1]])
def test_each_class_of_a_stream_goes_on_from_its_own_prior_variance(groups):
    """Also where classes are as many as columns."""
    X, y = three_classes()
    how = dict(prior_groups=groups, hyperparameters="mode", variance="exact", forgetting=0.9)

    def begun(y, **kwargs):
        est = ConvexVariationalLogistic(**how, **kwargs).fit(X[:80], y[:80])
        return est.partial_fit(X[80:], y[80:])

    each = begun(y, multi_class="one_vs_rest")
    assert len(each.prior_variance_) == 3
    for k in range(3):
        alone = begun((y == k).astype(int))
        np.testing.assert_allclose(each.coef_[k], alone.coef_[0], rtol=1e-6)
        np.testing.assert_allclose(each.prior_variance_[k], alone.prior_variance_, rtol=1e-6)
