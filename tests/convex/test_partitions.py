"""ConvexVariationalLogistic from partitions: optima, equality over cuts, workers and caches."""

import functools
import importlib
import os
import pathlib
import pickle
import signal
import warnings

import joblib
import numpy as np
import pytest
import scipy.sparse as sp
from oracles import oracle
from plain_logistic import plain_logistic
from scipy.special import expit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep._engine.partition import KEPT, PartMap
from sklearn_ep.datasets import make_sparse_logistic
from sklearn_ep.sites import LaplaceSite, StudentTSite

KL = oracle("linear_scale")["kl"]
TIGHT = dict(tol=1e-8, inner_tol=1e-10, max_iter=300)


def cut(X, y, k):
    ends = np.linspace(0, X.shape[0], k + 1).round().astype(int)
    return [(X[a:b], y[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def make(q=300, d=8, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((q, d))
    return X, (rng.random(q) < expit(X @ rng.standard_normal(d))).astype(int)


def far(a, b):
    return np.max(np.abs((a.coef_ - b.coef_) / b.coef_std_))


@pytest.mark.parametrize("p", KL, ids=range(len(KL)))
def test_the_optimum_of_the_bound(p):
    B, y = np.array(p["B"]), np.array(p["y"])
    est = plain_logistic(p["prior_variance"], fit_intercept=False, **TIGHT)
    est.fit(cut(B, y, 3))
    sd = np.sqrt(np.diag(p["cov"]))
    assert est.converged_
    assert np.max(np.abs(est.coef_[0] - p["mean"]) / sd) < 1e-4
    assert np.max(np.abs(np.log(est.coef_std_[0] / sd))) < 1e-4
    assert est.log_evidence_ == pytest.approx(p["bound"], abs=2e-4)
    assert est.log_evidence_ < p["exact_log_evidence"]


SETTINGS = [
    dict(),
    dict(bound="local"),
    dict(learn_prior=True),
    dict(learn_prior=True, prior_groups=[0, 0, 0, 0, 1, 1, 1, 1]),
    dict(prior="laplace", laplace_scale=0.5),
    dict(prior="laplace", laplace_scale="learn"),
    dict(prior=StudentTSite(3.0, 0.5)),
    dict(class_weight="balanced", fit_intercept=False),
    dict(prior_variance=np.linspace(0.5, 2, 8)),
]


@pytest.mark.parametrize("kw", SETTINGS, ids=str)
def test_parts_are_the_rows_in_memory(kw):
    X, y = make()
    a = plain_logistic(**kw, **TIGHT).fit(X, y)
    b = plain_logistic(**kw, **TIGHT).fit(cut(X, y, 4))
    assert a.converged_ and b.converged_
    assert far(b, a) < 1e-5
    np.testing.assert_allclose(b.coef_std_, a.coef_std_, rtol=1e-5)
    np.testing.assert_allclose(b.prior_variance_, a.prior_variance_, rtol=1e-4)
    assert b.log_evidence_ == pytest.approx(a.log_evidence_, abs=1e-5)
    assert b.effective_dof_ == pytest.approx(a.effective_dof_, abs=1e-3)
    np.testing.assert_allclose(b.predict_proba(X), a.predict_proba(X), atol=1e-6)
    assert not hasattr(b, "site_precision_") and b.n_passes_ > 3
    b.fit(X, y)
    assert b.site_precision_.shape == y.shape and b.n_passes_ == 0


LEARNED = [
    dict(prior_variance="learn"),
    dict(prior_variance="learn", prior_groups=[0, 1, 2]),
    dict(prior="laplace", laplace_scale="learn"),
]


@pytest.mark.parametrize("kw", LEARNED, ids=str)
@pytest.mark.parametrize("seed", [5, 6])
def test_scales_of_columns_that_tell_nothing_converge_in_parts_as_in_memory(kw, seed):
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((60, 3)), (rng.random(60) < 0.57).astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        a = plain_logistic(**kw).fit(X, y)
        b = plain_logistic(**kw).fit(cut(X, y, 3))
    best = plain_logistic(**kw, tol=1e-6, max_iter=1000).fit(X, y)
    for est in (a, b):
        assert est.log_evidence_ == pytest.approx(best.log_evidence_, abs=0.01)
        np.testing.assert_allclose(est.predict_proba(X), best.predict_proba(X), atol=0.01)


VARIANCES = pytest.mark.parametrize("variance", ["exact", "calibrated"])


@VARIANCES
def test_the_same_bits_for_loaders_workers_arrays_and_without_memory(variance, monkeypatch):
    X, y, _ = make_sparse_logistic(100, 50, random_state=0)
    kw = dict(variance=variance, random_state=0, calibration="loo")
    parts = cut(X, y, 3)
    a = plain_logistic(4.0, **kw).fit(parts)
    # processes are asked for the same by night, below
    with joblib.parallel_config("threading"):
        others = [clone(a).set_params(n_jobs=2).fit(parts)]
    others += [
        clone(a).fit([lambda p=p: p for p in parts]),
        clone(a).set_params(n_partitions=3).fit(X, y),
    ]
    assert KEPT.is_empty
    monkeypatch.setattr(KEPT, "most", 0)
    others.append(clone(a).fit(parts))
    for b in others:
        np.testing.assert_array_equal(a.coef_, b.coef_)
        np.testing.assert_array_equal(a.coef_std_, b.coef_std_)
        assert a.log_evidence_ == b.log_evidence_
        assert a.slope_ == b.slope_ != 1.0 and a.temper_ == b.temper_
    dense = clone(a).fit([(A.toarray(), t) for A, t in parts])
    assert far(dense, a) < 1e-4


def test_calibrated_parts_are_near_the_exact_fit_whatever_the_cut():
    X, y, _ = make_sparse_logistic(900, 500, random_state=1)
    X, new, y = X[:700], X[700:], y[:700]
    kw = dict(random_state=0, variance="calibrated")
    exact = plain_logistic(4.0, variance="exact", **TIGHT).fit(X, y)
    five = plain_logistic(4.0, **kw).fit(cut(X, y, 5))
    two = plain_logistic(4.0, **kw).fit(cut(X, y, 2))
    # the random signs that variances are sampled by belong to rows, and to the seed
    assert (
        far(two, five)
        < 1e-4
        < 10 * far(two, plain_logistic(4.0, **kw | dict(random_state=1)).fit(cut(X, y, 2)))
    )
    (m, v), (me, ve) = (e.latent_mean_and_variance(new) for e in (five, exact))
    assert np.sqrt(np.mean((v / ve - 1) ** 2)) < 0.08
    assert np.linalg.norm(m - me) < 0.02 * np.linalg.norm(me)
    assert abs(five.log_evidence_ - exact.log_evidence_) < 4 * five.log_evidence_std_
    assert 0 < five.log_evidence_std_ < 0.02 * abs(exact.log_evidence_)
    # without the rows the posterior is that of independent features
    cov = five.latent_covariance(new[:5])
    np.testing.assert_allclose(np.diag(cov), v[:5], rtol=1e-10)
    draws = five.sample_posterior(3000, random_state=0)
    B = sp.hstack([new[:5], np.ones((5, 1))]).toarray()
    np.testing.assert_allclose((draws @ B.T).var(axis=0), v[:5], rtol=0.15)
    more = five.condition_on(new[:1], [1])
    assert more.latent_mean_and_variance(new[:1])[1] < v[0]


def test_two_samples_tell_the_level_of_sparse_and_dense_rows():
    X, y, _ = make_sparse_logistic(900, 500, random_state=1)
    X, new, y = X[:700], X[700:], y[:700]
    kw = dict(variance="calibrated", n_variance_samples=2, random_state=0)
    sparse = plain_logistic(4.0, **kw).fit(cut(X, y, 2))
    assert far(plain_logistic(4.0, **kw).fit(cut(X.toarray(), y, 2)), sparse) < 1e-4
    exact = plain_logistic(4.0, variance="exact").fit(X, y)
    v, ve = (e.latent_mean_and_variance(new)[1] for e in (sparse, exact))
    assert abs(np.mean(v / ve) - 1) < 0.1


def test_calibrated_parts_learn_priors_and_start_warm():
    X, y, _ = make_sparse_logistic(600, 300, random_state=2)
    kw = dict(variance="calibrated", random_state=0, n_evidence_probes=0)
    learned = plain_logistic(learn_prior=True, max_iter=60, **kw).fit(cut(X, y, 2))
    exact = plain_logistic(learn_prior=True, max_iter=60).fit(X, y)
    assert abs(np.log(learned.prior_variance_ / exact.prior_variance_)) < 0.2
    laplace = plain_logistic(prior=LaplaceSite(0.5, "kl"), **kw).fit(cut(X, y, 2))
    truth = plain_logistic(prior=LaplaceSite(0.5, "kl")).fit(X, y)
    assert np.linalg.norm(laplace.coef_ - truth.coef_) < 0.1 * np.linalg.norm(truth.coef_)
    warm = plain_logistic(4.0, warm_start=True, **kw).fit(cut(X, y, 2))
    first = warm.n_passes_
    assert warm.fit(cut(X, y, 2)).n_passes_ < first


def test_memory_of_parts(monkeypatch):
    monkeypatch.setattr(KEPT, "most", 10)
    memory = KEPT
    memory.keep("old", 0, "x", 6)
    memory.keep("new", 0, "y", 6)  # what another fit has left gives way
    memory.keep("new", 1, "z", 6)  # what this fit keeps does not
    assert memory.find("old", 0) is None and memory.find("new", 1) is None
    assert memory.find("new", 0) == "y"
    memory.keep("new", 0, "z", 9)  # what it has kept in the same place does
    assert memory.find("new", 0) == "z" and not memory.is_empty
    memory.forget("new")
    assert memory.find("new", 0) is None and memory.is_empty


@pytest.mark.slow
def test_processes_of_a_pool_keep_little():
    """A pool takes a process that grows by 300 MB for one that leaks, and starts another."""
    name = KEPT.__module__  # the lambda travels by value, and a memory has a lock
    room = joblib.delayed(lambda: importlib.import_module(name).KEPT.most)
    assert 8 * max(joblib.Parallel(2, backend="loky")(room() for _ in range(2))) <= 2e8
    assert KEPT.most == 2**28


def test_what_is_refused_and_what_is_not():
    X, y = make(40, 4)
    fitted = plain_logistic().fit(X, y)
    before = dict(vars(fitted))
    for parts, words in (
        ([(X, y), (X[:, :3], y)], "partition 1 has 3 features"),
        ([(X, y * 0), (X, y * 0)], "one class"),
        ([(X, y, y, y)], "partition 0: it must be a pair"),
        ([(X, y, y)], "partition 0: it must be a pair"),
        ([(X, y), (X * np.nan, y)], "partition 1: Input X contains NaN"),
        ([(X, y[:-1])], "X has 40 rows"),
        ([(X * 1e150, y)], "scale the columns"),
    ):
        with pytest.raises(ValueError, match=words):
            fitted.fit(parts)
        assert vars(fitted) == before
    with pytest.raises(ValueError, match="sample_weight"):
        fitted.fit([(X, y)], sample_weight=np.ones(40))
    for kw in (dict(variance="lanczos"), dict(variance="monte_carlo"), dict(solver="dual")):
        with pytest.raises(ValueError, match=next(iter(kw))):
            plain_logistic(**kw).fit([(X, y)])
    order = np.argsort(y)
    apart = plain_logistic(**TIGHT).fit(cut(X[order], y[order], 2))
    assert far(apart, plain_logistic(**TIGHT).fit(X, y)) < 1e-5
    with pytest.warns(ConvergenceWarning, match="iterations ran out"):
        plain_logistic(max_iter=1, tol=1e-9).fit([(X, y)])


@pytest.mark.parametrize("kw", [dict(), dict(class_weight="balanced", learn_prior=True)], ids=str)
def test_several_classes_are_told_one_from_the_rest(kw):
    X, _ = make(240, 5, seed=3)
    y = np.argmax(X[:, :3] + np.random.default_rng(4).standard_normal((240, 3)), axis=1)
    labels = np.array(["ash", "elm", "oak"])[y]
    whole = plain_logistic(multi_class="one_vs_rest", **kw, **TIGHT).fit(X, labels)
    parts = plain_logistic(**kw, **TIGHT).fit(cut(X, labels, 3))
    assert parts.converged_ and list(parts.classes_) == ["ash", "elm", "oak"]
    assert parts.coef_.shape == (3, 5) and far(parts, whole) < 1e-5
    np.testing.assert_allclose(parts.predict_proba(X), whole.predict_proba(X), atol=1e-6)
    with joblib.parallel_config("threading"):
        again = plain_logistic(n_jobs=2, **kw, **TIGHT).fit(cut(X, labels, 3))
    np.testing.assert_array_equal(again.coef_, parts.coef_)
    with pytest.raises(ValueError, match="multi_class='joint' cannot be combined with partitions"):
        plain_logistic(multi_class="joint").fit(cut(X, labels, 3))


def test_several_classes_with_sampled_variances_start_from_the_last_fit():
    X, _ = make(240, 5, seed=3)
    y = np.argmax(X[:, :3] + np.random.default_rng(4).standard_normal((240, 3)), axis=1)
    est = plain_logistic(variance="calibrated", random_state=0, warm_start=True)
    est.fit(cut(X, y, 3))
    # the same random numbers for the first class as in a binary fit of its own
    alone = plain_logistic(variance="calibrated", random_state=0).fit(cut(X, y == 0, 3))
    np.testing.assert_array_equal(est.coef_[0], alone.coef_[0])
    products, coef = est.n_mvm_, est.coef_
    est.fit(cut(X, y, 3))
    assert est.n_mvm_ < products and np.max(np.abs(est.coef_ - coef) / est.coef_std_) < 0.02


def test_words_are_labels_and_weights_are_copies_with_n_partitions():
    X, y = make(60, 3)
    weight = np.arange(60) % 3
    a = plain_logistic(n_partitions=4, **TIGHT)
    a.fit(X, np.array(["no", "yes"])[y], sample_weight=weight)
    b = plain_logistic(**TIGHT).fit(cut(np.repeat(X, weight, 0), np.repeat(y, weight), 2))
    assert list(a.classes_) == ["no", "yes"] and far(a, b) < 1e-5


@pytest.mark.parametrize(
    "kw", [dict(), dict(bound="local"), dict(class_weight="balanced")], ids=str
)
def test_slope_and_temper_of_parts_are_those_of_the_rows_in_memory(kw):
    X, y = make()
    kw = dict(hyperparameters="mode", **kw, **TIGHT)
    a = ConvexVariationalLogistic(1.0, **kw).fit(X, y)
    b = ConvexVariationalLogistic(1.0, **kw).fit(cut(X, y, 4))
    assert a.slope_ != 1.0 and a.temper_ != 1.0
    np.testing.assert_allclose([b.slope_, b.temper_], [a.slope_, a.temper_], rtol=2e-3)
    for got, expected in zip(
        b.latent_mean_and_variance(X), a.latent_mean_and_variance(X), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-3)
    np.testing.assert_allclose(b.predict_proba(X), a.predict_proba(X), atol=1e-4)
    assert (
        not hasattr(b, "loo_proba_")
        and b.set_params(calibration=None).fit(cut(X, y, 4)).slope_ == 1
    )


def test_slope_and_temper_of_sampled_parts():
    X, y, _ = make_sparse_logistic(400, 250, random_state=0)
    est = ConvexVariationalLogistic(4.0, variance="calibrated")
    exact = clone(est).set_params(variance="exact").fit(X, y)
    logs = []
    for seed in range(12):  # one fit's temper is .06 off by its samples, in memory and in parts
        est.set_params(random_state=seed)
        parts, memory = clone(est).fit(cut(X, y, 3)), clone(est).fit(X, y)
        logs.append([[np.log(e.slope_), np.log(e.temper_)] for e in (parts, memory)])
    parts_gap, memory_gap = np.mean(logs, axis=0) - np.log([exact.slope_, exact.temper_])
    for gap in (parts_gap, memory_gap, parts_gap - memory_gap):
        assert abs(gap[0]) < 0.02 and abs(gap[1]) < 0.05
    more = parts.condition_on(X[:1], y[:1])
    assert (more.slope_, more.temper_) == (parts.slope_, parts.temper_)
    assert more.latent_mean_and_variance(X[:1])[1] < parts.latent_mean_and_variance(X[:1])[1]
    assert (
        pickle.loads(pickle.dumps(parts)).predict_proba(X).tobytes()
        == parts.predict_proba(X).tobytes()
    )


def test_each_class_on_parts_has_a_slope_and_a_temper_of_its_own():
    X, _ = make(240, 5, seed=3)
    y = np.argmax(X[:, :3] + np.random.default_rng(4).standard_normal((240, 3)), axis=1)
    kw = dict(hyperparameters="mode", **TIGHT)
    whole = ConvexVariationalLogistic(1.0, multi_class="one_vs_rest", **kw).fit(X, y)
    parts = ConvexVariationalLogistic(1.0, **kw).fit(cut(X, y, 3))
    assert parts.slope_.shape == (3,)
    np.testing.assert_allclose(parts.slope_, whole.slope_, rtol=2e-3)
    np.testing.assert_allclose(parts.temper_, whole.temper_, rtol=2e-3)


@VARIANCES
def test_few_numbers_travel_for_slope_and_temper(variance, monkeypatch):
    X, y, _ = make_sparse_logistic(300, 200, random_state=0)
    sent, came = [], []

    visit = PartMap.__call__

    def counting(self, worker, messages, *shared):
        answers = visit(self, worker, messages, *shared)
        if worker.__name__ == "score_sums":
            sent.append(len(pickle.dumps(shared)))
            came.append(max(len(pickle.dumps(answer)) for answer in answers))
        return answers

    monkeypatch.setattr(PartMap, "__call__", counting)
    ConvexVariationalLogistic(4.0, variance=variance, random_state=0).fit(cut(X, y, 3))
    assert 3 <= len(sent) <= 12 and max(sent[1:]) < 600 < 8 * 200 < sent[0]
    assert max(came) < 600


def load_or_die(X, y, main, mark):
    """Load a part; kill the first other process that does."""
    if os.getpid() != main and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return X, y


@pytest.mark.slow
@VARIANCES
# joblib's own resource tracker may warn of the files that the dead worker held
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_killed_worker_changes_nothing(variance, tmp_path: pathlib.Path):
    X, y, _ = make_sparse_logistic(200, 60, random_state=0)
    est = plain_logistic(variance=variance, random_state=0, calibration="loo")
    expected = clone(est).fit(cut(X, y, 4)).predict_proba(X)
    parts = [
        functools.partial(load_or_die, A, t, os.getpid(), tmp_path / "killed")
        for A, t in cut(X, y, 4)
    ]
    with joblib.parallel_config(backend="loky", n_jobs=2):
        got = clone(est).fit(parts).predict_proba(X)
    assert (tmp_path / "killed").exists()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@VARIANCES
@pytest.mark.parametrize("backend", ["loky", "dask"])
def test_processes_and_clusters_give_the_bits_of_one_process(variance, backend, dask_workers):
    X, y, _ = make_sparse_logistic(200, 60, random_state=0)
    est = plain_logistic(variance=variance, random_state=0, calibration="loo")
    expected = clone(est).fit(cut(X, y, 3)).predict_proba(X)
    with joblib.parallel_config(backend=backend, n_jobs=2):
        np.testing.assert_array_equal(clone(est).fit(cut(X, y, 3)).predict_proba(X), expected)


def test_scales_of_groups_on_ordinary_rows_without_a_numpy_warning():
    rng = np.random.default_rng(29)
    for _ in range(6):  # a state before convergence may leave a group no degree of freedom
        X = rng.standard_normal((180, 2))
        y = (X @ [1.0, 0.2] + 3.0 * rng.standard_normal(180) > 0).astype(int)
        est = ConvexVariationalLogistic(prior_groups=[0, 1], n_partitions=2)
        est.fit(X, y)
        assert est.converged_ and np.all(np.isfinite(est.coef_std_))
