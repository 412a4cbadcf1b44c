"""EPGaussianProcessClassifier, sparse: oracles, equivalences, learning, partitions, streams."""

import functools
import itertools
import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
from oracles import oracle
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.likelihoods import LabelNoise, Probit
from sklearn_ep.gaussian_process._limits import LIMITS
from sklearn_ep.gaussian_process.inducing import values

ORACLES = oracle("gp_classification")
SPARSE = [p for p in ORACLES["problems"] if "Z" in p and not p["label_noise"]]
KERNEL = ConstantKernel(3.0) * RBF([1.0, 1.4])


def fixed(kernel=KERNEL, tol=1e-10, **kw):
    kw = dict(dict(method="sparse", optimizer=None, max_iter=500, max_sweeps=500), **kw)
    return EPGaussianProcessClassifier(kernel, tol=tol, random_state=0, **kw)


def toy(n=80, d=2, seed=0, noise=0.5):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, d)
    return X, (np.sin(2 * X[:, 0]) + X[:, 1 % d] + noise * rng.randn(n) > 0).astype(int)


def log_loss(est, X, y):
    return -est.predict_log_proba(X)[np.arange(len(y)), y].mean()


@pytest.mark.parametrize("problem", SPARSE, ids=[p["name"] for p in SPARSE])
def test_oracles(problem):
    k, Z = problem["kernel"], np.array(problem["Z"])
    kernel = ConstantKernel(k["variance"]) * RBF(k["lengthscale"])
    X, y, ep = np.array(problem["X"]), np.array(problem["y"]), problem["ep"]
    est = fixed(kernel, inducing_points=Z, jitter=1e-10).fit(X, y)
    np.testing.assert_allclose(est.log_evidence_, ep["logZ"], atol=1e-7)
    np.testing.assert_allclose(est.inducing_mean_, ep["sparse"]["posterior_u_mean"], atol=1e-5)
    np.testing.assert_allclose(est.inducing_cov_, est.latent_covariance(Z), atol=1e-6)
    mean, var = est.latent_mean_and_variance(X)
    np.testing.assert_allclose(mean, ep["sparse"]["t_mean"], atol=1e-5)
    solved = np.linalg.solve(kernel(Z), kernel(Z, X))
    own = kernel.diag(X) - np.einsum("ij,ij->j", kernel(Z, X), solved)
    np.testing.assert_allclose(var, ep["sparse"]["t_var"] + own, atol=1e-5)
    gradient = est.log_marginal_likelihood(est.kernel_.theta, eval_gradient=True)[1]
    np.testing.assert_allclose(gradient, ep["grad_log_theta"], atol=1e-4)


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
@pytest.mark.parametrize("kernel", [KERNEL, KERNEL + RationalQuadratic()], ids=["rbf", "sum"])
def test_all_rows_inducing_is_the_dense_method(kernel, likelihood):
    X, y = toy(50)
    kw = dict(likelihood=likelihood)
    dense = fixed(kernel, method="dense", **kw).fit(X, y)
    sparse = fixed(kernel, inducing_points=X, jitter=1e-10, **kw).fit(X, y)
    Xs = 1.5 * np.random.RandomState(1).randn(30, 2)
    assert abs(sparse.log_evidence_ - dense.log_evidence_) < 1e-6
    for a, b in zip(
        sparse.latent_mean_and_variance(Xs), dense.latent_mean_and_variance(Xs), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(sparse.latent_covariance(Xs), dense.latent_covariance(Xs), atol=2e-5)
    np.testing.assert_allclose(sparse.loo_proba_, dense.loo_proba_, atol=1e-5)


# learning is cut short on purpose
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_weights_are_repetition_for_every_scheme():
    X, y = toy(60)
    w = np.random.RandomState(1).randint(0, 4, 60)
    Xr, yr = np.repeat(X, w, 0), np.repeat(y, w)
    order = np.random.RandomState(2).permutation(len(yr))
    Xr, yr = Xr[order], yr[order]
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e3))
    schemes = [
        dict(),
        dict(optimizer="adam", max_iter=10),
        dict(optimizer="adam", learn_inducing=True, batch_size=20, max_iter=3, max_sweeps=200),
        dict(optimizer="adam", batch_size=20, max_iter=3, site_memory="average"),
    ]
    for kw in schemes:
        est = fixed(kernel, n_inducing=10, tol=1e-8, **kw)
        a = clone(est).fit(X, y, sample_weight=w).latent_mean_and_variance(X)
        b = clone(est).fit(Xr, yr).latent_mean_and_variance(X)
        np.testing.assert_allclose(a, b, atol=1e-6)


# learning is cut short on purpose
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_partitions_in_every_form_give_the_same():
    X, y = toy(120)
    names = np.array(["no", "yes"])[y]
    kw = dict(inducing_points=X[::10].copy())
    whole = fixed(**kw).fit(X, names)
    cut = [slice(0, 11), slice(11, 80), slice(80, 120)]
    pairs = [(X[c], names[c]) for c in cut]
    loaders = [functools.partial(tuple, pair) for pair in pairs]
    one_class = [(X[y == k], names[y == k]) for k in (0, 1)]
    fits = [fixed(**kw).fit(parts) for parts in (pairs, loaders, one_class)]
    fits += [fixed(n_partitions=k, **kw).fit(X, names) for k in (1, 2, 17)]
    expected = whole.log_marginal_likelihood(KERNEL.theta, eval_gradient=True)
    for est in fits:
        np.testing.assert_array_equal(est.classes_, whole.classes_)
        np.testing.assert_allclose(est.predict_proba(X), whole.predict_proba(X), atol=1e-10)
        value, gradient = est.log_marginal_likelihood(KERNEL.theta, eval_gradient=True)
        np.testing.assert_allclose(value, expected[0], atol=1e-9)
        np.testing.assert_allclose(gradient, expected[1], atol=1e-9)
    np.testing.assert_allclose(fits[0].loo_proba_, whole.loo_proba_, atol=1e-9)
    # without given points and kernel, too: what is chosen from the rows depends on content alone
    free = EPGaussianProcessClassifier(
        method="sparse", n_inducing=12, max_iter=4, random_state=0, optimizer="adam", tol=1e-8
    )
    a, b = clone(free).fit(X, names), clone(free).fit(pairs)
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-8)


@pytest.mark.slow
def test_futures_of_a_cluster_are_partitions():
    """Data that wait on workers are used there, or fetched where no cluster is asked for."""
    distributed = pytest.importorskip("distributed")
    X, y = toy(300)
    cut = [slice(0, 120), slice(120, 150), slice(150, 300)]
    pairs = [(X[c], y[c]) for c in cut]
    est = fixed(inducing_points=X[:15])
    expected = clone(est).fit(pairs).predict_proba(X)
    in_batches = clone(est).set_params(
        optimizer="adam", batch_size=50, max_iter=2, max_sweeps=200, tol=1e-6
    )
    learned = clone(in_batches).fit(pairs).predict_proba(X)
    with distributed.Client(processes=False, n_workers=2, dashboard_address=":0") as client:
        futures = client.scatter(pairs)
        made = [client.submit(tuple, pair, pure=False) for pair in pairs]
        np.testing.assert_array_equal(clone(est).fit(futures).predict_proba(X), expected)
        with joblib.parallel_config(backend="dask"):
            for parts in (futures, made):
                np.testing.assert_array_equal(clone(est).fit(parts).predict_proba(X), expected)
            np.testing.assert_array_equal(in_batches.fit(futures).predict_proba(X), learned)


# learning is cut short on purpose
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("d", [2, 20], ids=["passes look at rows", "passes keep whitened rows"])
def test_n_jobs_changes_no_bit(d):
    X, y = toy(120, d)
    kw = dict(
        kernel=ConstantKernel(3.0) * RBF(1.2 * np.ones(d)),
        n_inducing=10,
        n_partitions=3,
        optimizer="adam",
        max_iter=3,
        max_sweeps=3,
        tol=0.5,
    )
    # processes of their own look at rows in the next test
    with joblib.parallel_config(backend="threading" if d == 2 else "loky"):
        for size in (None, 40):
            one, two = (fixed(**kw, batch_size=size, n_jobs=j).fit(X, y) for j in (1, 2))
            np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


# learning is cut short on purpose
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.slow), 1500])
def test_n_jobs_changes_no_bit_of_many_rows(batch_size):
    X, y = toy(6_000, 8)
    kw = dict(n_inducing=20, n_partitions=3, max_iter=2, max_sweeps=2, random_state=0)
    one, two = (
        EPGaussianProcessClassifier(batch_size=batch_size, n_jobs=j, **kw).fit(X, y) for j in (1, 2)
    )
    assert one.log_evidence_ == two.log_evidence_
    np.testing.assert_array_equal(one.kernel_.theta, two.kernel_.theta)
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


@pytest.mark.parametrize(
    "kw", [{}, dict(batch_size=40, max_iter=5), dict(multi_class="joint")], ids=str
)
def test_rows_are_whitened_once_where_points_are_no_more_than_columns(kw, monkeypatch):
    X, y = toy(120, 12)
    y = y + (X[:, 2] > 0.5) if kw.get("multi_class") else y
    whiten, find, n_rows, places = values.InducingPrior.whiten, values.KEPT.find, [], []

    def seen(*place):
        places.append(place)
        return find(*place)

    def counted(prior, X, *args, **kwargs):
        n_rows.append(len(X))
        return whiten(prior, X, *args, **kwargs)

    def fit(most):
        monkeypatch.setattr(values.KEPT, "most", most)
        monkeypatch.setattr(values.KEPT, "find", seen)
        n_rows.clear()
        est = fixed(ConstantKernel(3.0) * RBF(3.0), n_inducing=10, n_partitions=2, **kw).fit(X, y)
        assert values.KEPT.find(*places[-1]) is None  # nothing outlives the fit
        return est.predict_proba(X), est.loo_proba_, est.n_sweeps_, sum(n_rows)

    monkeypatch.setattr(values.InducingPrior, "whiten", counted)
    (*told, kept), (*same, anew) = fit(2**20), fit(0)
    for one, other in zip(told, same, strict=True):
        np.testing.assert_array_equal(one, other)
    assert kept < anew - 120 * (told[-1] - 2)


def test_memory_maps_and_float32(tmp_path):
    X, y = toy(300)
    np.save(tmp_path / "X.npy", X.astype(np.float32))
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    kw = dict(inducing_points=X[:20])
    est, plain = fixed(**kw).fit(mapped, y), fixed(**kw).fit(np.array(mapped, dtype=float), y)
    np.testing.assert_allclose(est.predict_proba(X), plain.predict_proba(X), atol=1e-12)
    assert np.shares_memory(est._plan.data.parts[0].arrays[0], mapped)


def test_bad_partitions_are_named():
    X, y = toy(40)
    with pytest.raises(ValueError, match="partition 1 has 1 features"):
        fixed().fit([(X, y), (X[:, :1], y)])
    with pytest.raises(ValueError, match="sample_weight"):
        fixed().fit([(X, y)], sample_weight=[np.ones(40)])
    with pytest.raises(ValueError, match="pair"):
        fixed().fit([(X, y, y, y)])
    with pytest.raises(ValueError, match="one class"):
        fixed().fit([(X, np.zeros(40, int))])
    with pytest.raises(ValueError, match="dense"):
        fixed(method="dense").fit([(X, y)])
    with pytest.raises(ValueError, match="NaN"):
        fixed().fit([(np.where(X > 2, np.nan, X), y)])


def test_parameters_are_checked():
    X, y = toy(40)
    for kw, word in [
        (dict(batch_size=10, optimizer="fmin_l_bfgs_b"), "batch_size"),
        (dict(method="dense", optimizer="adam"), "optimizer"),
        (dict(learn_inducing="never"), "learn_inducing"),
        (dict(optimizer="adam", likelihood=LabelNoise(0.1)), "log-concave"),
        (dict(inducing_points=np.zeros((3, 5))), "inducing_points"),
        (dict(n_partitions=0), "n_partitions"),
    ]:
        with pytest.raises(ValueError, match=word):
            fixed(**kw).fit(X, y)
    with pytest.raises(ValueError, match="learn_inducing"):
        fixed(RationalQuadratic(), optimizer="adam", learn_inducing=True).fit(X, y)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("optimizer", ["adam", "adadelta", "sign_rate", "fmin_l_bfgs_b"])
def test_learning_raises_the_evidence(optimizer):
    X, y = make_classification(150, 4, n_informative=3, n_redundant=0, flip_y=0.05, random_state=1)
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(np.full(4, 3.0), (1e-2, 1e3))
    kw = dict(n_inducing=15, tol=1e-3)
    start = fixed(kernel, **kw).fit(X, y)
    kw |= dict(optimizer=optimizer, max_iter=30)
    kept = fixed(kernel, learn_inducing=False, **kw).fit(X, y)
    moved = fixed(kernel, learn_inducing=True, **kw).fit(X, y)
    assert kept.log_evidence_ > start.log_evidence_ + 5.0
    assert moved.log_evidence_ > start.log_evidence_ + 5.0
    np.testing.assert_array_equal(kept.inducing_points_, start.inducing_points_)
    assert np.any(moved.inducing_points_ != start.inducing_points_)
    assert kept.n_iter_ == len(kept.history_["log_evidence"]) > kept.n_sweeps_


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_many_rows_give_the_default_kernel_a_length_for_each_column(monkeypatch):
    monkeypatch.setattr(LIMITS, "first_rows", 300)
    X, y = make_classification(2700, 8, n_informative=3, n_redundant=0, random_state=0)
    steps = dict(n_inducing=25, max_iter=15, random_state=0)
    own = EPGaussianProcessClassifier(**steps).fit(X[:2001], y[:2001])
    one = EPGaussianProcessClassifier(hyperparameters="mode", **steps).fit(X[:2001], y[:2001])
    assert own.method_ == one.method_ == "sparse"
    assert own.kernel_.k2.length_scale.shape == (8,) and np.ndim(one.kernel_.k2.length_scale) == 0
    assert log_loss(own, X[2001:], y[2001:]) < log_loss(one, X[2001:], y[2001:]) - 0.02


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("fmin_l_bfgs_b", marks=pytest.mark.slow)]
)
def test_lengths_of_few_rows_stay_nearer_each_other_than_the_evidence_alone_says(optimizer):
    X, y = toy(60, 8, noise=1.0)
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(np.full(8, 3.0), (1e-2, 1e3))
    kw = dict(inducing_points=X[::4], optimizer=optimizer, max_iter=80, tol=1e-4)
    auto, mode = (fixed(kernel, hyperparameters=h, **kw).fit(X, y) for h in ("auto", "mode"))
    spreads = [np.std(np.log(est.kernel_.k2.length_scale)) for est in (auto, mode)]
    assert spreads[0] < 0.5 * spreads[1]
    assert auto.log_evidence_ < mode.log_evidence_
    # the evidence that is told, and its gradient, are without the prior
    value, gradient = auto.log_marginal_likelihood(auto.kernel_.theta, eval_gradient=True)
    assert value == pytest.approx(auto.log_evidence_, abs=1e-3)
    assert np.abs(gradient).max() > 0.1
    # many copies are many rows, of which nothing but the evidence counts
    copies, kw["max_iter"] = np.full(60, 20.0), 5
    pair = [
        fixed(kernel, hyperparameters=h, **kw).fit(X, y, sample_weight=copies).kernel_.theta
        for h in ("auto", "mode")
    ]
    np.testing.assert_array_equal(*pair)


def test_adam_and_quasi_newton_agree():
    X, y = toy(200)
    kw = dict(n_inducing=15, tol=1e-3, max_iter=150)
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * Matern(1.0, (1e-2, 1e3), nu=2.5)
    adam, newton = (fixed(kernel, optimizer=o, **kw).fit(X, y) for o in ("adam", "fmin_l_bfgs_b"))
    assert abs(adam.log_evidence_ - newton.log_evidence_) < 0.2


@pytest.mark.parametrize("site_memory", ["scalars", "average"])
def test_minibatches_then_full_passes_reach_the_fixed_point(site_memory):
    """With the kernel kept, all that minibatches leave is noise, which full passes remove."""
    X, y = toy(400)
    kw = dict(inducing_points=X[:15], tol=1e-8, site_memory=site_memory)
    full = fixed(**kw).fit(X, y)
    batches = fixed(batch_size=50, **{**kw, "max_iter": 2}).fit(X, y)
    assert batches.converged_ and batches.n_iter_ == 2 + batches.n_sweeps_
    np.testing.assert_allclose(batches.predict_proba(X), full.predict_proba(X), atol=1e-6)


def test_average_site_keeps_nothing_per_row():
    X, y = toy(1200)
    kw = dict(inducing_points=X[:15], tol=1e-7)
    each, average = (fixed(site_memory=s, **kw).fit(X, y) for s in ("scalars", "average"))
    mean, var = each.latent_mean_and_variance(X)
    assert np.max(np.abs(average.decision_function(X) - mean) / np.sqrt(var)) < 0.02
    for name in ("site_precision_", "site_shift_", "loo_proba_"):
        assert hasattr(each, name) and not hasattr(average, name)
    average.set_params(method="dense", optimizer=None).fit(X[:50], y[:50])
    assert not hasattr(average, "inducing_points_") and len(average.site_shift_) == 50


def test_averaged_sites_move_with_the_kernel_and_the_gradient_of_the_evidence_knows_it():
    X, y = toy(60)
    est = fixed(inducing_points=X[:15], tol=1e-8, site_memory="average").fit(X, y)
    theta, step = est.kernel_.theta, 0.01 * np.eye(3)
    gradient = est.log_marginal_likelihood(theta, eval_gradient=True)[1]
    higher, lower = (
        np.array([est.log_marginal_likelihood(t) for t in theta + e]) for e in (step, -step)
    )
    np.testing.assert_allclose(gradient, (higher - lower) / 0.02, atol=2e-3)


def test_classes_share_one_kernel():
    X, y = load_iris(return_X_y=True)
    X, y = ((X - X.mean(0)) / X.std(0))[::3], y[::3]
    est = EPGaussianProcessClassifier(method="sparse", n_inducing=12, random_state=0).fit(X, y)
    assert est.score(X, y) > 0.95 and est.inducing_mean_.shape == (3, 12)
    assert est.kernel_.n_dims == 2 and est.site_precision_.shape == (3, 50)
    theta = est.kernel_.theta
    value, gradient = est.log_marginal_likelihood(theta, eval_gradient=True)
    step = np.array([1e-4, 0.0])
    est.set_params(tol=1e-8)
    above, below = (est.log_marginal_likelihood(theta + s) for s in (step, -step))
    assert abs(value - est.log_evidence_) < 1e-2
    np.testing.assert_allclose(gradient[0], (above - below) / 2e-4, atol=1e-2)


def test_warm_start():
    X, y = toy(100)
    est = fixed(n_inducing=15, tol=1e-6, warm_start=True).fit(X, y)
    cold, evidence = est.n_sweeps_, est.log_evidence_
    est.fit(X, y)
    assert est.n_sweeps_ <= 2 < cold and abs(est.log_evidence_ - evidence) < 1e-6
    other = est.fit(X[:70], y[:70]).log_evidence_
    assert abs(other - fixed(n_inducing=15, tol=1e-6).fit(X[:70], y[:70]).log_evidence_) < 1e-5


def test_stream_ends_near_the_batch_fit():
    X, y = toy(1500, 3, 8, noise=1.0)
    Xs, ys, X, y = X[1000:], y[1000:], X[:1000], y[:1000]
    kernel = ConstantKernel(3.0) * RBF([0.8, 1.5, 3.0])
    kw = dict(inducing_points=X[:40], tol=1e-4)
    batch = fixed(kernel, **kw).fit(X, y)
    stream = fixed(kernel, **kw)
    for i in range(0, 1000, 100):
        stream.partial_fit(X[i : i + 100], y[i : i + 100], classes=[0, 1])
    mean, var = batch.latent_mean_and_variance(Xs)
    away = (stream.decision_function(Xs) - mean) / np.sqrt(var)
    assert np.sqrt(np.mean(away**2)) < 0.1
    assert log_loss(stream, Xs, ys) < log_loss(batch, Xs, ys) + 0.002
    assert len(stream.site_precision_) == len(stream.loo_proba_) == 1000
    assert abs(stream.log_evidence_ - batch.log_evidence_) < 5.0


def test_a_stream_forgets_by_powers_of_its_rows():
    X, y = toy(300, 2, 4, noise=0.5)
    kw = dict(inducing_points=X[:20], tol=1e-8)
    first, second = (X[:150], y[:150]), (X[150:], y[150:])
    begun = [fixed(**kw).partial_fit(*first, classes=[0, 1]) for _ in range(3)]
    plain, none, little = (
        est.partial_fit(*second, forgetting=share)
        for est, share in zip(begun, (1.0, 1e-12, 0.5), strict=True)
    )
    fresh = fixed(**kw).partial_fit(*second, classes=[0, 1])
    np.testing.assert_allclose(none.predict_proba(X), fresh.predict_proba(X), atol=1e-8)
    sites = little.site_precision_[:150], little.site_shift_[:150]
    for half, whole in zip(sites, (plain.site_precision_, plain.site_shift_), strict=True):
        np.testing.assert_allclose(half, 0.5 * whole[:150], rtol=1e-12)
    # of a fit to all rows it takes powers as weights do
    dense = EPGaussianProcessClassifier(KERNEL, method="dense", optimizer=None).fit(*first)
    weighted = fixed(**kw).fit(X, y, np.r_[np.full(150, 0.5), np.ones(150)])
    dense.set_params(**kw).partial_fit(*second, forgetting=0.5)
    np.testing.assert_allclose(dense.predict_proba(X), weighted.predict_proba(X), atol=1e-5)
    for share in (0.0, 1.5, "much"):
        with pytest.raises((ValueError, TypeError), match="forgetting"):
            plain.partial_fit(*second, forgetting=share)


def test_a_stream_tells_its_log_score_and_follows_a_drift():
    X, y = toy(600, 2, 4, noise=0.5)
    y = np.where(np.arange(600) < 300, y, 1 - y)  # all labels change sides
    steady, agile = (fixed(inducing_points=X[:20], tol=1e-4) for _ in range(2))
    by_hand = [np.nan]
    for i in range(0, 600, 60):
        rows, labels = X[i : i + 60], y[i : i + 60]
        if i:
            proba = steady.predict_proba(rows)
            by_hand.append(np.mean(np.log(proba[np.arange(60), labels])))
        steady.partial_fit(rows, labels, classes=[0, 1])
        agile.partial_fit(rows, labels, classes=[0, 1], forgetting=0.5)
    np.testing.assert_allclose(steady.stream_log_score_, by_hand, rtol=1e-12)
    score = agile.stream_log_score_
    assert score[5] < score[1:5].min() - 0.3  # the drift is seen where it comes
    assert score[7:].mean() > steady.stream_log_score_[7:].mean() + 0.3
    assert not hasattr(steady.fit(X, y), "stream_log_score_")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_stream_learns_kernel_and_inducing_points():
    X, y = toy(3000, 2, 3, noise=0.5)
    Xs, ys, X, y = X[2400:], y[2400:], X[:2400], y[:2400]
    est = EPGaussianProcessClassifier(n_inducing=30, random_state=0)
    batch = EPGaussianProcessClassifier(
        method="sparse", n_inducing=30, learn_inducing=False, random_state=0
    ).fit(X, y)
    for i in range(0, 2400, 60):
        est.partial_fit(X[i : i + 60], y[i : i + 60], classes=[0, 1])
    assert len(est.inducing_points_) == 30
    assert log_loss(est, Xs, ys) < log_loss(batch, Xs, ys) + 0.01


@pytest.mark.slow
def test_a_stream_learns_lengths_by_column_from_its_first_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 8))
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + 0.5 * rng.normal(size=3000) > 0).astype(int)
    Xs, ys, X, y = X[2000:], y[2000:], X[:2000], y[:2000]
    kw = dict(n_inducing=50, random_state=0)
    batch = EPGaussianProcessClassifier(method="sparse", **kw).fit(X, y)
    streams = []
    for cuts in ([600, 1200, 1600, 2000], [1200, 1600, 2000]):
        streams.append(EPGaussianProcessClassifier(**kw))
        for a, b in itertools.pairwise([0, *cuts]):
            streams[-1].partial_fit(X[a:b], y[a:b], classes=[0, 1])
    parted, whole = streams
    # the first rows are taken in again when they are enough, so that their cut leaves no trace
    np.testing.assert_array_equal(parted.predict_proba(Xs), whole.predict_proba(Xs))
    np.testing.assert_array_equal(parted.loo_proba_, whole.loo_proba_)
    lengths = whole.kernel_.k2.length_scale
    assert np.min(lengths[2:]) > 2 * np.max(lengths[:2])
    assert log_loss(whole, Xs, ys) < log_loss(batch, Xs, ys) + 0.01


def test_a_stream_that_comes_class_by_class_learns_its_kernel_from_both(monkeypatch):
    monkeypatch.setattr(LIMITS, "averaged", 200)  # a fifth of what it is
    X, y = toy(800, 2, 3, noise=0.5)
    order = np.append(np.argsort(y[:600], kind="stable"), np.arange(600, 800))
    X, y = X[order], y[order]
    stream = EPGaussianProcessClassifier(n_inducing=20, random_state=0)
    fixed = clone(stream).set_params(optimizer=None)
    for i in range(0, 600, 60):
        for est in (stream, fixed):
            est.partial_fit(X[i : i + 60], y[i : i + 60], classes=[0, 1])
        # the evidence of one class is the highest where the function is infinite
        assert (stream.kernel_ == fixed.kernel_) == (y[i + 59] == 0)
    assert log_loss(stream, X[600:], y[600:]) < log_loss(fixed, X[600:], y[600:])


def test_a_stream_keeps_rows_only_until_they_are_enough(monkeypatch):
    monkeypatch.setattr(LIMITS, "averaged", 500)  # half of what it is
    X, y = toy(800, 2, 3, noise=0.5)
    stream = EPGaussianProcessClassifier(n_inducing=10, site_memory="scalars", random_state=0)
    sizes = []
    for i in range(0, 800, 200):
        stream.partial_fit(X[i : i + 200], y[i : i + 200], classes=[0, 1])
        sizes.append(len(pickle.dumps(stream)) - 3 * 8 * (i + 200))  # sites and left-out values
    assert sizes[1] - sizes[0] > 200 * 2 * 8 > abs(sizes[3] - sizes[2])
    assert sizes[3] < sizes[1]


class Counting(Probit):
    """A factor that counts the rows whose moments are asked for."""

    n_rows = 0

    def tilted(self, y, mean, var):
        self.n_rows += len(y) if np.ndim(y) else 0
        return super().tilted(y, mean, var)


def streamed(X, y, **kw):
    """One call of `partial_fit`, and how many moments of rows it took."""
    factor = Counting()
    kw = dict(n_inducing=10, tol=1e-2, random_state=0, likelihood=factor) | kw
    est = EPGaussianProcessClassifier(**kw).partial_fit(X, y, classes=[0, 1])
    return est, factor.n_rows


def test_passes_over_a_row_of_a_stream_are_bounded():
    """Those that learn: the passes of the same stream with a kernel that is kept are left out."""
    X, y = toy(1500)
    for n in (150, 1500):
        est, n_rows = streamed(X[:n], y[:n])
        kept = streamed(X[:n], y[:n], kernel=est.kernel_, optimizer=None)[1]
        assert 10 * n < n_rows - kept <= 30 * n


def test_sites_of_a_large_batch_are_a_fixed_point():
    """Learning goes block by block; the posterior is that of EP on all rows at the last kernel."""
    X, y = toy(900)
    est, _ = streamed(X, y, tol=1e-7)
    assert est.converged_
    exact = fixed(est.kernel_, inducing_points=est.inducing_points_).fit(X, y)
    mean, var = exact.latent_mean_and_variance(X)
    assert np.max(np.abs(est.decision_function(X) - mean) / np.sqrt(var)) < 1e-5
    assert abs(est.log_evidence_ - exact.log_evidence_) < 1e-5


def test_many_copies_of_a_row_take_a_bounded_number_of_passes():
    X, y = toy(30)
    how = dict(method="dense", optimizer=None, n_inducing=10, random_state=0)
    est = EPGaussianProcessClassifier(**how)
    est.fit(X, y, sample_weight=np.r_[1e7, np.ones(29)]).set_params(optimizer="auto")
    assert np.all(np.isfinite(est.partial_fit(X, y).predict_log_proba(X)))


def test_stream_after_fits_of_both_methods():
    X, y = toy(300)
    whole = fixed(n_inducing=20, tol=1e-6).fit(X, y)
    for method in ("sparse", "dense"):
        est = fixed(n_inducing=20, tol=1e-6, method=method).fit(X[:200], y[:200])
        est.partial_fit(X[200:], y[200:])
        assert est.method_ == "sparse" and len(est.site_shift_) == 300
        assert abs(log_loss(est, X, y) - log_loss(whole, X, y)) < 0.05


def test_stream_refuses_what_does_not_fit():
    X, y = toy(60)
    with pytest.raises(ValueError, match="classes"):
        fixed().partial_fit(X, y)
    est = fixed(n_inducing=10).partial_fit(X[:20], np.zeros(20, int), classes=[0, 1])
    assert np.all(np.isfinite(est.predict_proba(X)))
    before = est.predict_proba(X)
    with pytest.raises(ValueError, match="classes"):
        est.partial_fit(X, y + 1)
    with pytest.raises(ValueError, match="classes"):
        est.partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="features"):
        est.partial_fit(X[:, :1], y)
    np.testing.assert_array_equal(est.predict_proba(X), before)
    assert log_loss(est.partial_fit(X, y), X, y) < 0.6
    with pytest.raises(ValueError, match="partial_fit"):
        est.log_marginal_likelihood(KERNEL.theta)


HOSTILE = {
    "one column": lambda X, y: (X[:, :1], y),
    "two rows": lambda X, y: (X[:2], np.array([0, 1])),
    "equal rows": lambda X, y: (np.ones((20, 2)), np.arange(20) % 2),
    "conflicting copies": lambda X, y: (np.repeat(X, 2, 0), np.tile([0, 1], len(X))),
    "far rows": lambda X, y: (np.vstack([X, [[1e8, -1e8]]]), np.r_[y, 1]),
    "separable": lambda X, y: (X, (X[:, 0] > 0).astype(int)),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:n_inducing=8 does nothing")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_data_stay_finite(case):
    X, y = HOSTILE[case](*toy(40))
    for kw in (
        dict(optimizer=None, max_iter=100),
        dict(max_iter=10),
        dict(batch_size=7, max_iter=3, site_memory="average"),
        dict(likelihood="logit", max_iter=5),
    ):
        est = EPGaussianProcessClassifier(
            ConstantKernel(1e3) * RBF(2.0), method="sparse", n_inducing=8, random_state=0, **kw
        ).fit(X, y)
        mean, var = est.latent_mean_and_variance(X)
        assert np.isfinite(est.log_evidence_) and np.all(np.isfinite(est.predict_log_proba(X)))
        assert np.all(np.isfinite(mean)) and np.all(var > 0)


def test_label_noise_through_inducing_points():
    X, y = toy(60)
    y[np.argmax(X[:, 1])] ^= 1
    est = fixed(likelihood=LabelNoise(0.05), inducing_points=X, jitter=1e-10, tol=1e-7)
    est.set_params(damping=0.5)
    assert est.fit(X, y).site_precision_.min() < 0 and est.converged_


def test_duplicated_inducing_points():
    X, y = toy(60)
    once = fixed(inducing_points=X[:10], tol=1e-8).fit(X, y)
    thrice = fixed(inducing_points=np.repeat(X[:10], 3, 0), tol=1e-8).fit(X, y)
    np.testing.assert_allclose(thrice.predict_proba(X), once.predict_proba(X), atol=1e-4)


@pytest.mark.parametrize("d", [1, 2])
def test_more_inducing_points_than_rows(d):
    """With every row among them, further inducing points add nothing to the dense posterior."""
    X, y = toy(25, d)
    kernel = ConstantKernel(3.0) * RBF(1.2)
    Z = np.vstack([X[::-1], 2.0 * np.random.RandomState(1).randn(15, d)])
    dense = fixed(kernel, method="dense").fit(X, y)
    sparse = fixed(kernel, inducing_points=Z, jitter=1e-10).fit(X, y)
    Xs = 1.5 * np.random.RandomState(2).randn(20, d)
    assert len(sparse.inducing_points_) > len(X)
    assert abs(sparse.log_evidence_ - dense.log_evidence_) < 1e-5
    for a, b in zip(
        sparse.latent_mean_and_variance(Xs), dense.latent_mean_and_variance(Xs), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-4)
    learned = EPGaussianProcessClassifier(
        method="sparse", inducing_points=Z, learn_inducing=True, random_state=0
    ).fit(X, y)
    assert learned.log_evidence_ > dense.log_evidence_ - 5.0
    assert np.all(np.isfinite(learned.predict_log_proba(Xs)))


def test_minibatches_of_one_class():
    """Parts that hold one class each make batches of one class; full passes forget their order."""
    X, y = toy(200)
    parts = [(X[y == k], y[y == k]) for k in (0, 1)]
    kw = dict(inducing_points=X[:15], tol=1e-8)
    whole = fixed(**kw).fit(X, y)
    batches = fixed(batch_size=30, **{**kw, "max_iter": 2}).fit(parts)
    np.testing.assert_allclose(batches.predict_proba(X), whole.predict_proba(X), atol=1e-6)
    # the kernel takes more epochs to learn than with mixed batches, and ends near the same
    learner = EPGaussianProcessClassifier(
        n_inducing=15, batch_size=30, learning_rate=0.03, max_iter=12, random_state=0
    )
    apart, mixed = clone(learner).fit(parts), clone(learner).fit(X, y)
    assert log_loss(apart, X, y) < log_loss(mixed, X, y) + 0.02


def chosen_points(X, m):
    """Return the inducing points of a fit that moves nothing."""
    est = EPGaussianProcessClassifier(
        method="sparse", n_inducing=m, optimizer=None, random_state=0, max_sweeps=500
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns of other scales, and of fewer distinct rows
        return est.fit(X, np.arange(len(X)) % 2).inducing_points_


@pytest.mark.parametrize("optimizer", ["adam", "fmin_l_bfgs_b"])
@pytest.mark.parametrize("length", [1e-5, 1e3])
def test_first_lengths_from_which_nothing_is_seen(length, optimizer):
    X, y = toy()
    how = dict(method="sparse", optimizer=optimizer, n_inducing=20, random_state=0)
    near, far = (
        EPGaussianProcessClassifier(ConstantKernel() * RBF(first), **how).fit(X, y)
        for first in (1.0, length)
    )
    assert far.log_evidence_ == pytest.approx(near.log_evidence_, abs=0.5)
    assert log_loss(far, X, y) == pytest.approx(log_loss(near, X, y), abs=0.02)


@pytest.mark.parametrize("model", [EPGaussianProcessClassifier, RelaxedEPClassifier])
def test_given_inducing_points_of_a_frame_go_by_name(model):
    X, y = toy(40)
    frame = pd.DataFrame(X).rename(columns=str).assign(part=np.where(X[:, 0] > 0, "high", "low"))
    fitted = model(inducing_points=frame[:10], optimizer=None).fit(frame, y)
    assert fitted.inducing_points_.shape == (10, X.shape[1] + 3)
    with pytest.raises(ValueError, match="inducing_points has columns"):
        model(inducing_points=frame.iloc[:10, ::-1]).fit(frame, y)


@pytest.mark.parametrize(
    ("model", "through_points"),
    [
        (EPGaussianProcessClassifier, dict(method="sparse")),
        (RelaxedEPClassifier, dict(n_inducing=10)),
    ],
)
def test_kernels_that_inducing_points_cannot_carry(model, through_points):
    X, y = toy(40)
    with pytest.raises(ValueError, match="zero between all rows"):
        model(WhiteKernel(), inducing_points=X[:10]).fit(X, y)
    with pytest.raises(ValueError, match="a row of X is 'ab'"):
        model(ConstantKernel(), **through_points).fit(["ab", "c"] * 20, y)


def test_choice_of_inducing_points():
    rng = np.random.RandomState(0)
    rows = np.vstack([c + 0.1 * rng.randn(50, 2) for c in ([0, 0], [5, 0], [0, 5])])
    Z = chosen_points(rows, 3)
    np.testing.assert_allclose(chosen_points(rows[rng.permutation(150)], 3), Z)
    assert len(chosen_points(rows, 500)) == 150
    assert len(chosen_points(np.ones((30, 2)), 5)) == 1


OF_COLUMNS = np.array([1e-7, 1.0, 254.0])


@pytest.mark.parametrize(
    ("n", "factor"),
    [
        *((150, f) for f in (2.0, 2.0**-30, 3.0, OF_COLUMNS)),
        (21_000, OF_COLUMNS),  # more rows than candidates
        *(pytest.param(21_000, f, marks=pytest.mark.slow) for f in (2.0, 2.0**-30, 3.0)),
    ],
)
def test_choice_of_inducing_points_does_not_depend_on_units(n, factor):
    X, y = toy(n, 3)
    X[:, 2] += 5.0
    factor = np.broadcast_to(factor, 3)
    kernel = ConstantKernel(3.0) * RBF([1.0, 1.4, 2.0])
    scaled = ConstantKernel(3.0) * RBF(kernel.k2.length_scale * factor)
    kw = dict(n_inducing=8, tol=1e-3, max_sweeps=30)
    a, b = fixed(kernel, **kw).fit(X, y), fixed(scaled, **kw).fit(X * factor, y)
    np.testing.assert_allclose(b.inducing_points_ / factor, a.inducing_points_, rtol=1e-9)
    np.testing.assert_allclose(b.predict_proba(X * factor), a.predict_proba(X), atol=1e-9)
    if factor[0] in (2.0, 2.0**-30):
        np.testing.assert_array_equal(b.inducing_points_ / factor, a.inducing_points_)


def test_choice_of_inducing_points_measures_in_lengths_of_the_kernel():
    """A column of great length does not tell rows apart, however it spreads."""
    rng = np.random.RandomState(0)
    X = np.column_stack([np.repeat([-1.0, 0.0, 1.0], 50), rng.randn(150)])
    kernel = ConstantKernel(3.0) * RBF([0.1, 100.0])
    Z = fixed(kernel, n_inducing=3, tol=1e-3).fit(X, np.arange(150) % 2).inducing_points_
    np.testing.assert_allclose(np.sort(Z[:, 0]), [-1.0, 0.0, 1.0], atol=1e-12)
    assert np.all(np.abs(Z[:, 1]) < 0.5)


def test_choice_of_inducing_points_far_from_zero():
    """Differences of rows are exact there, their mean is not: eight digits of it are lost."""
    X, y = toy(200, 3)
    X = 1e8 + X  # what is left of X after that
    kw = dict(n_inducing=8, tol=1e-3, max_sweeps=30, learn_inducing=False)
    kernel = ConstantKernel(3.0) * RBF(1.0)
    far, near = fixed(kernel, **kw).fit(X, y), fixed(kernel, **kw).fit(X - 1e8, y)
    np.testing.assert_allclose(far.inducing_points_ - 1e8, near.inducing_points_, atol=1e-7)


@pytest.mark.parametrize("how", ["minibatches", "stream"])
def test_learning_does_not_depend_on_units(how):
    X, y = toy(200)
    kw = dict(n_inducing=10, batch_size=40, max_iter=5, tol=1e-3, optimizer="adam")
    a, b = (fixed(ConstantKernel(2.0) * RBF(s), **kw) for s in (1.0, 2.0))
    for est, rows in ((a, X), (b, 2.0 * X)):
        est.fit(rows, y) if how == "minibatches" else est.partial_fit(rows, y, classes=[0, 1])
    np.testing.assert_allclose(b.predict_proba(2.0 * X), a.predict_proba(X), atol=1e-9)


def test_choice_of_inducing_points_with_a_far_row_and_a_constant_column():
    """All rows within one step of the grid are still told apart, and 0.1 has no exact mean."""
    X = np.column_stack([np.r_[np.random.RandomState(0).randn(60), 1e12], np.full(61, 0.1)])
    Z = chosen_points(X, 100)
    np.testing.assert_array_equal(np.sort(Z[:, 0]), np.sort(X[:, 0]))
    Z = chosen_points(X[:60], 5)
    assert len(np.unique(Z[:, 0])) == 5
    np.testing.assert_allclose(Z[:, 1], 0.1, rtol=1e-15)
    np.testing.assert_allclose(chosen_points(3 * X[:60], 5), 3 * Z)


def test_auto_takes_the_method_that_fits():
    X, y = toy(60)
    assert EPGaussianProcessClassifier(optimizer=None).fit(X, y).method_ == "dense"
    for kw in (dict(inducing_points=X[:5]), dict(batch_size=20), dict(site_memory="average")):
        most = 3 if "batch_size" in kw else 300
        est = EPGaussianProcessClassifier(optimizer=None, max_sweeps=300, max_iter=most, **kw)
        assert est.fit(X, y).method_ == "sparse"
    X, y = toy(2100)
    est = EPGaussianProcessClassifier(optimizer=None, n_inducing=10).fit(X, y)
    assert est.method_ == "sparse" and est.inducing_points_.shape == (10, 2)


def test_pickle_and_unconverged_fit():
    X, y = toy(60)
    with pytest.warns(ConvergenceWarning, match="residual"):
        est = fixed(n_inducing=10, max_iter=1).fit(X, y)
    assert est.n_iter_ == 1 and not est.converged_
    again = pickle.loads(pickle.dumps(est))
    np.testing.assert_array_equal(again.predict_proba(X), est.predict_proba(X))
    draws = est.sample_proba(X[:5], n_samples=4000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), est.predict_proba(X[:5]), atol=0.03)


def test_learning_by_passes_cut_short_is_not_convergence():
    X, y = toy(100)
    kw = dict(method="sparse", n_inducing=10, random_state=0)
    with pytest.warns(ConvergenceWarning, match="learning ended after 4 steps") as told:
        est = EPGaussianProcessClassifier(max_iter=4, **kw).fit(X, y)
    assert len(told) == 1 and est.stop_reason_ == "max_iter" and not est.converged_
    assert est.history_["residual"][-1] < est.tol
    assert EPGaussianProcessClassifier(**kw).fit(X, y).stop_reason_ == "converged"
    # epochs of minibatches are a budget, and to use it up is the end of their schedule
    assert EPGaussianProcessClassifier(batch_size=50, max_iter=2, **kw).fit(X, y).converged_


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_fit_says_whether_inducing_points_moved():
    X, y = toy(80)
    kw = dict(method="sparse", n_inducing=8, max_iter=2, random_state=0)
    for asked in (True, False):
        est = EPGaussianProcessClassifier(learn_inducing=asked, **kw).fit(X, y)
        assert est.learn_inducing_ is asked
    assert not EPGaussianProcessClassifier(**kw).fit(X, y).learn_inducing_
    assert not hasattr(est.set_params(method="dense").fit(X, y), "learn_inducing_")
    X, y = toy(2000)
    kw.update(hyperparameters="mode", max_sweeps=1, tol=10.0)
    with pytest.warns(ConvergenceWarning):
        assert EPGaussianProcessClassifier(**kw).fit(X, y).learn_inducing_


def test_evidence_of_a_fit_is_at_its_learned_inducing_points():
    X, y = toy(150)
    est = EPGaussianProcessClassifier(
        method="sparse", n_inducing=6, learn_inducing=True, random_state=0, tol=1e-8
    ).fit(X, y)
    start = chosen_points(X, 6)
    assert np.max(np.abs(est.inducing_points_ - start)) > 0.05
    value = est.log_marginal_likelihood(est.kernel_.theta, eval_gradient=True)[0]
    assert abs(value - est.log_evidence_) < 1e-7


def test_stream_after_a_weighted_dense_fit_keeps_the_weights():
    X, y = toy(80)
    w = np.random.RandomState(1).randint(1, 4, 60)
    kw = dict(n_inducing=10, tol=1e-8, method="dense", kernel=None, random_state=0)
    a, b = (EPGaussianProcessClassifier(optimizer=None, **kw) for _ in range(2))
    a.fit(X[:60], y[:60], sample_weight=w).partial_fit(X[60:], y[60:])
    b.fit(np.repeat(X[:60], w, 0), np.repeat(y[:60], w)).partial_fit(X[60:], y[60:])
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-6)


def test_damping_enters_minibatches():
    X, y = toy(200)
    kw = dict(n_inducing=8, batch_size=50, max_iter=3, optimizer="adam", tol=1e-2, max_sweeps=50)
    a, b = (fixed(damping=d, **kw).fit(X, y) for d in (0.99, 0.3))
    first = [est.history_["log_evidence"] for est in (a, b)]
    assert first[0][0] == first[1][0]  # first updates are whole
    assert abs(first[0][1] - first[1][1]) > 1e-3


def test_more_inducing_points_than_distinct_rows_are_told():
    X, y = toy(30)
    X, y = np.vstack([X, X]), np.r_[y, y]
    for make in (fixed, RelaxedEPClassifier):
        est = make(method="sparse", n_inducing=31, optimizer=None, tol=1e-3)
        with pytest.warns(UserWarning, match="n_inducing=31 .* 30 distinct rows") as told:
            assert len(est.fit(X, y).inducing_points_) == 30 and len(told) == 1
        est.set_params(n_inducing=30).fit(X, y)
        assert len(est.set_params(n_inducing=None).fit(X, y).inducing_points_) == 30
        with pytest.warns(UserWarning, match="n_inducing=20 .* inducing_points are given"):
            est.set_params(n_inducing=20, inducing_points=X[:5]).fit(X, y)


def test_batches_of_a_data_frame_keep_their_names():
    X, y = make_classification(120, 3, n_redundant=0, random_state=0)
    frame = pd.DataFrame(X).add_prefix("column ")
    stream = EPGaussianProcessClassifier(n_inducing=10, optimizer=None, random_state=0)
    for i in range(0, 120, 40):
        stream.partial_fit(frame[i : i + 40], y[i : i + 40], classes=[0, 1])
    assert list(stream.feature_names_in_) == list(frame)
    assert np.isfinite(stream.stream_log_score_[1:]).all()
