"""EPGaussianProcessClassifier, dense: oracles, equivalences, gradients, hostile data."""

import pickle
import re
import warnings

import joblib
import numpy as np
import pytest
from oracles import oracle, written_out
from scipy.special import log_ndtr, ndtr
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    PairwiseKernel,
    RationalQuadratic,
    WhiteKernel,
)
from sklearn.model_selection import KFold, cross_val_score
from sklearn.preprocessing import StandardScaler

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.likelihoods import Factor, Probit
from sklearn_ep._engine.rules import MomentMatching
from sklearn_ep._engine.sites import Sites
from sklearn_ep.gaussian_process._dense_gp import DenseGP
from sklearn_ep.gaussian_process._kernels import contract, contract_diagonal

ORACLES = oracle("gp_classification")
DENSE = [p for p in ORACLES["problems"] if "Z" not in p and not p["label_noise"]]


def fixed(kernel, tol=1e-10, **kw):
    kw = dict(dict(method="dense", optimizer=None, max_iter=500, max_sweeps=500), **kw)
    return EPGaussianProcessClassifier(kernel, tol=tol, **kw)


def toy(n=60, d=2, seed=0, noise=0.5):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, d)
    f = np.sin(2 * X[:, 0]) + X[:, 1 % d]
    return X, (f + noise * rng.randn(n) > 0).astype(int)


def kernel_of(problem):
    k = problem["kernel"]
    base = RBF(k["lengthscale"]) if k["type"] == "rbf" else Matern(k["lengthscale"], nu=1.5)
    return ConstantKernel(k["variance"]) * base


@pytest.mark.parametrize("problem", DENSE, ids=[p["name"] for p in DENSE])
def test_oracles(problem):
    large, ep = "large" in problem["name"], problem["ep"]
    likelihood = "logit" if problem["likelihood"] == "logistic" else "probit"
    X, y = np.array(problem["X"]), np.array(problem["y"])
    est = fixed(kernel_of(problem), likelihood=likelihood).fit(X, y)
    mean, var = est.latent_mean_and_variance(X)
    np.testing.assert_allclose(est.log_evidence_, ep["logZ"], atol=1e-6 if large else 1e-7)
    np.testing.assert_allclose(mean, ep["mean"], atol=1e-3 if large else 1e-5)
    np.testing.assert_allclose(var, ep["var"], atol=1e-2 if large else 1e-5)
    if not large:
        np.testing.assert_allclose(est.site_precision_, ep["site_precision"], atol=1e-5)
        np.testing.assert_allclose(est.site_shift_, ep["site_shift"], atol=1e-5)
    gradient = est.log_marginal_likelihood(eval_gradient=True)[1]
    np.testing.assert_allclose(gradient, ep["grad_log_theta"], atol=1e-4)
    if "exact" in problem:
        error = abs(est.log_evidence_ - problem["exact"]["logZ"] - problem["ep_error"]["logZ"])
        assert error < 1e-5 + problem["exact"]["slack"]


def test_two_rows_against_the_exact_posterior():
    """EP is not exact, but its means are within a hundredth of the quadrature answer here."""
    X, y = np.array([[0.0], [0.7]]), np.array([1, 0])
    est = fixed(ConstantKernel(2.0) * RBF(1.0)).fit(X, y)
    K = ConstantKernel(2.0)(X) * RBF(1.0)(X)
    axis = np.linspace(-9, 9, 721)
    f0, f1 = np.meshgrid(axis, axis, indexing="ij")
    P = np.linalg.inv(K)
    log_p = log_ndtr(f0) + log_ndtr(-f1)
    log_p -= 0.5 * (P[0, 0] * f0**2 + 2 * P[0, 1] * f0 * f1 + P[1, 1] * f1**2)
    w = np.exp(log_p)
    z = w.sum() * (axis[1] - axis[0]) ** 2 / (2 * np.pi * np.sqrt(np.linalg.det(K)))
    exact = np.array([(w * f0).sum(), (w * f1).sum()]) / w.sum()
    np.testing.assert_allclose(est.log_evidence_, np.log(z), atol=2e-3)
    np.testing.assert_allclose(est.decision_function(X), exact, atol=1e-2)


KERNELS = [
    ConstantKernel(3.0) * RBF(1.3),
    ConstantKernel(3.0) * RBF([0.9, 1.7, 3.0]),
    ConstantKernel(2.0) * Matern([0.9, 1.7, 3.0], nu=0.5),
    ConstantKernel(2.0) * Matern(1.1, nu=1.5),
    ConstantKernel(2.0) * Matern([0.9, 1.7, 3.0], nu=2.5),
    ConstantKernel(2.0, "fixed") * RBF(1.3) + 0.5 * DotProduct(1.0),
    (ConstantKernel(1.5) * RBF(1.0)) ** 2 + WhiteKernel(0.3),
    ConstantKernel(2.0) * RationalQuadratic(1.2, 0.8) * RBF(4.0, "fixed"),
    ConstantKernel(1.0) * Matern(1.4, nu=0.8),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_kernel_contractions_equal_the_tensor(kernel):
    rng = np.random.default_rng(0)
    X, Z, G = rng.normal(size=(12, 3)), rng.normal(size=(5, 3)), rng.normal(size=(12, 12))
    K, dK = kernel(X, eval_gradient=True)
    np.testing.assert_allclose(
        contract(kernel, X, G)[0], np.tensordot(G, dK, 2), rtol=1e-8, atol=1e-9
    )
    both = kernel(np.vstack([X, Z]), eval_gradient=True)[1][:12, 12:]
    H = rng.normal(size=(12, 5))
    np.testing.assert_allclose(
        contract(kernel, X, H, Z)[0], np.tensordot(H, both, 2), rtol=1e-8, atol=1e-9
    )
    g = rng.normal(size=12)
    np.testing.assert_allclose(
        contract_diagonal(kernel, X, g), np.einsum("i,iij->j", g, dK), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("kernel", [k for k in KERNELS[:5]], ids=str)
def test_inducing_input_gradients_against_differences(kernel):
    rng = np.random.default_rng(1)
    X, Z, G = rng.normal(size=(9, 3)), rng.normal(size=(4, 3)), rng.normal(size=(9, 4))
    analytic = contract(kernel, X, G, Z, inputs=True)[1]
    numeric = np.empty_like(Z)
    for index in np.ndindex(Z.shape):
        h = np.zeros_like(Z)
        h[index] = 1e-6
        numeric[index] = np.sum(G * (kernel(X, Z + h) - kernel(X, Z - h))) / 2e-6
    np.testing.assert_allclose(analytic, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[3], KERNELS[5]], ids=str)
def test_evidence_gradient_against_differences(kernel, likelihood):
    X, y = toy(40, 3, 1)
    est = fixed(kernel, likelihood=likelihood).fit(X, y)
    theta = est.kernel_.theta
    gradient = est.log_marginal_likelihood(theta, eval_gradient=True)[1]
    for i in range(len(theta)):
        h = np.zeros_like(theta)
        h[i] = 1e-4
        up, down = (est.log_marginal_likelihood(theta + s * h) for s in (1, -1))
        np.testing.assert_allclose(gradient[i], (up - down) / 2e-4, atol=1e-6)


def sequential_sweep(K, factor, y, sites, rule):
    """One sweep of the sequential schedule of the papers: each site is refreshed in turn."""
    precision, shift = sites.precision.copy(), sites.shift.copy()
    solved = np.linalg.solve(np.eye(len(K)) + K * precision, K)
    for i in range(len(K)):
        mean = solved[i] @ shift
        update = rule(
            factor,
            y[i : i + 1],
            type(sites)(precision[i : i + 1], shift[i : i + 1]),
            np.array([mean]),
            solved[i, i : i + 1],
        )
        change = update.sites.precision[0] - precision[i]
        precision[i], shift[i] = update.sites.precision[0], update.sites.shift[0]
        column = solved[:, i].copy()
        solved -= np.outer(column, column) * (change / (1.0 + change * column[i]))
    return type(sites)(precision, shift)


def test_parallel_and_sequential_schedules_share_the_fixed_point():
    X, y = toy(30)
    kernel = ConstantKernel(4.0) * RBF(1.0)
    est = fixed(kernel).fit(X, y)
    sites = Sites.zero(30)
    for _ in range(40):
        sites = sequential_sweep(kernel(X), Probit(), 2.0 * y - 1, sites, MomentMatching())
    np.testing.assert_allclose(sites.precision, est.site_precision_, atol=1e-9)
    np.testing.assert_allclose(sites.shift, est.site_shift_, atol=1e-9)


def test_one_more_undamped_sweep_changes_nothing():
    X, y = toy(50)
    kernel = ConstantKernel(4.0) * RBF(1.0)
    est = fixed(kernel, tol=1e-9).fit(X, y)
    sites = Sites(est.site_precision_, est.site_shift_)
    state = DenseGP(kernel(X)).posterior(*sites)
    new = MomentMatching()(Probit(), 2.0 * y - 1, sites, state.mean, state.var).sites
    assert np.max(np.abs(new.precision - sites.precision) * state.var) < 1e-9
    assert np.max(np.abs(new.shift - sites.shift) * np.sqrt(state.var)) < 1e-9


def test_sites_that_say_nothing_stay_in_the_range_of_single_precision():
    # processors take up to a hundred times as long for products of numbers below it
    rng = np.random.default_rng(0)
    X, precision = rng.normal(size=(150, 3)), rng.uniform(0.1, 1.0, 150)
    precision[::3], precision[1::3] = 0.0, 10.0 ** rng.uniform(-45, -6, 50)
    shift, K = precision * rng.normal(size=150), (ConstantKernel(9.0) * RBF(1.5))(X)
    double, single = (
        DenseGP(K.astype(kind)).posterior(precision, shift) for kind in (np.float64, np.float32)
    )
    size = np.abs(single.inverse[single.inverse != 0])
    assert single.inverse.dtype == np.float32 and size.min() > np.finfo(np.float32).tiny
    for name in ("mean", "var", "alpha", "log_evidence"):
        np.testing.assert_allclose(getattr(single, name), getattr(double, name), atol=1e-5)


def test_a_gaussian_likelihood_is_exact_in_one_sweep():
    class Gaussian(Factor):
        log_concave = True

        def log_prob(self, y, f):
            return -0.5 * (y - f) ** 2 / 0.3 - 0.5 * np.log(2 * np.pi * 0.3)

    X, y = toy(25)
    kernel = ConstantKernel(2.0) * RBF(1.0)
    est = fixed(kernel, likelihood=Gaussian(), tol=1e-6).fit(X, y)
    K, target = kernel(X), 2.0 * y - 1
    noisy = K + 0.3 * np.eye(25)
    exact = -0.5 * target @ np.linalg.solve(noisy, target) - 0.5 * np.linalg.slogdet(noisy)[1]
    exact -= 12.5 * np.log(2 * np.pi)
    assert est.n_sweeps_ == 1
    np.testing.assert_allclose(
        est.decision_function(X), K @ np.linalg.solve(noisy, target), atol=1e-8
    )
    np.testing.assert_allclose(est.log_evidence_, exact, atol=1e-8)


def test_equivalences():
    X, y = toy(60, seed=3)
    Xs = np.random.RandomState(4).randn(50, 2) * 1.5
    kernel = ConstantKernel(3.0) * RBF([1.0, 1.4])
    est = fixed(kernel).fit(X, y)
    mean, var = est.latent_mean_and_variance(Xs)
    plain = fixed(kernel, acceleration=None, damping=0.5, tol=1e-9).fit(X, y)
    np.testing.assert_allclose(plain.log_evidence_, est.log_evidence_, atol=1e-8)
    order = np.random.RandomState(5).permutation(60)
    np.testing.assert_allclose(
        fixed(kernel).fit(X[order], y[order]).decision_function(Xs), mean, atol=1e-9
    )
    np.testing.assert_allclose(fixed(kernel).fit(X, 1 - y).decision_function(Xs), -mean, atol=1e-9)
    np.testing.assert_allclose(
        est.predict_proba(Xs)[:, 1], ndtr(mean / np.sqrt(1 + var)), atol=1e-13
    )
    flipped = fixed(ConstantKernel(3.0) * RBF([1.4, 1.0])).fit(X[:, ::-1], y)
    np.testing.assert_allclose(flipped.decision_function(Xs[:, ::-1]), mean, atol=1e-9)
    np.testing.assert_allclose(np.diag(est.latent_covariance(Xs)), var, atol=1e-10)
    np.testing.assert_allclose(
        est.latent_covariance(Xs[:7], Xs), est.latent_covariance(Xs)[:7], atol=1e-10
    )
    draws = est.sample_proba(Xs, n_samples=4000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), est.predict_proba(Xs), atol=0.03)


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
def test_weights_are_repetitions(likelihood):
    X, y = toy(40, seed=3)
    w = np.random.RandomState(6).randint(0, 4, 40)
    kernel = ConstantKernel(3.0) * RBF(1.0)
    a = fixed(kernel, likelihood=likelihood).fit(X, y, sample_weight=w)
    b = fixed(kernel, likelihood=likelihood).fit(written_out(X, w), np.repeat(y, w))
    np.testing.assert_allclose(a.log_evidence_, b.log_evidence_, atol=1e-9)
    for p, q in zip(a.latent_mean_and_variance(X), b.latent_mean_and_variance(X), strict=True):
        np.testing.assert_allclose(p, q, atol=1e-9)
    np.testing.assert_array_equal(a.site_precision_[w == 0], 0)
    assert np.array_equal(np.isnan(a.loo_proba_), w == 0)


@pytest.mark.parametrize("variance", [1.0, 3.0])
def test_weights_below_one_against_integrals(variance):
    """A row of weight w has the factor p(y | f)^w; four rows are integrated on a grid."""
    X, sign = np.array([[0.0], [0.7], [2.0], [2.6]]), np.array([-1.0, 1.0, 1.0, -1.0])
    weight, kernel = np.array([0.2, 0.5, 0.8, 0.3]), variance * RBF(1.0)
    nodes, share = np.polynomial.hermite_e.hermegauss(30)
    grid = np.stack(np.meshgrid(*[nodes] * 4, indexing="ij")).reshape(4, -1)
    f = np.linalg.cholesky(kernel(X)) @ grid
    each = np.einsum("i,j,k,l", *[share / share.sum()] * 4).ravel()
    mass = each * np.exp(weight @ log_ndtr(sign[:, None] * f))
    mean = f @ mass / mass.sum()
    sd = np.sqrt(f**2 @ mass / mass.sum() - mean**2)
    est = fixed(kernel).fit(X, sign, sample_weight=weight)
    found = est.latent_mean_and_variance(X)
    assert est.converged_
    np.testing.assert_allclose(est.log_evidence_, np.log(mass.sum()), atol=0.02)
    np.testing.assert_allclose(found[0], mean, atol=0.02)
    np.testing.assert_allclose(np.sqrt(found[1]), sd, atol=0.04)


def test_leave_one_out_probabilities_against_refits():
    X, y = toy(30, seed=1, noise=0.4)
    kernel = ConstantKernel(4.0) * RBF([1.0, 1.5])
    est = fixed(kernel).fit(X, y)
    refit = [
        fixed(kernel).fit(np.delete(X, i, 0), np.delete(y, i)).predict_proba(X[i : i + 1])[0, y[i]]
        for i in range(0, 30, 2)
    ]
    np.testing.assert_allclose(est.loo_proba_[::2], refit, atol=0.03)
    assert np.abs(est.loo_proba_[::2] - refit).mean() < 0.006


@pytest.mark.parametrize("amplitude", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_converges_at_any_amplitude(amplitude, noise):
    X, y = toy(120, seed=1, noise=noise)
    est = fixed(ConstantKernel(amplitude) * RBF(1.0), tol=1e-8, max_sweeps=60).fit(X, y)
    assert est.converged_ and np.isfinite(est.log_evidence_)
    assert np.all(np.isfinite(est.predict_log_proba(1e3 * X)))


def test_learning_raises_the_evidence_to_a_stationary_point():
    X, y = toy(120, seed=2)
    start = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(0.3, (1e-2, 1e2))
    before = fixed(start).fit(X, y).log_evidence_
    est = EPGaussianProcessClassifier(start, hyperparameters="mode").fit(X, y)
    assert est.log_evidence_ > before + 5
    tight = fixed(est.kernel_).fit(X, y)
    gradient = tight.log_marginal_likelihood(eval_gradient=True)[1]
    assert np.max(np.abs(gradient)) < 0.05
    more = dict(n_restarts_optimizer=3, random_state=0, hyperparameters="mode")
    best = EPGaussianProcessClassifier(start, **more).fit(X, y)
    assert best.log_evidence_ > est.log_evidence_ - 1e-3


# the peer warns that it ended at a bound of its kernel
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_held_out_log_loss_on_real_data_is_no_worse_than_laplace():
    X, y = load_breast_cancer(return_X_y=True)
    X, kernel = StandardScaler().fit_transform(X), ConstantKernel(1.0, (1e-3, 1e3)) * RBF(5.0)
    cv = KFold(4, shuffle=True, random_state=0)
    ours, peer = (
        cross_val_score(est, X, y, cv=cv, scoring="neg_log_loss").mean()
        for est in (EPGaussianProcessClassifier(kernel), GaussianProcessClassifier(kernel))
    )
    assert ours >= peer - 0.003


def test_warm_start_and_stale_sites():
    X, y = toy(80)
    est = fixed(ConstantKernel(4.0) * RBF(1.0), tol=1e-6, warm_start=True).fit(X, y)
    cold, evidence = est.n_sweeps_, est.log_evidence_
    est.fit(X, y)
    assert cold > 4 and est.n_sweeps_ == 1
    np.testing.assert_allclose(est.log_evidence_, evidence, atol=1e-9)
    est.fit(X[:60], y[:60])
    fresh = fixed(ConstantKernel(4.0) * RBF(1.0), tol=1e-6).fit(X[:60], y[:60])
    np.testing.assert_allclose(est.log_evidence_, fresh.log_evidence_, atol=1e-6)


def test_one_warning_with_value_tolerance_and_remedy():
    X, y = toy(60)
    est = fixed(ConstantKernel(1e4) * RBF(1.0), tol=1e-9, max_sweeps=2)
    with pytest.warns(ConvergenceWarning, match=r"1e-09.*max_iter") as caught:
        est.fit(X, y)
    assert len(caught) == 1 and f"{est.history_['residual'][-1]:.3g}" in str(caught[0].message)
    assert not est.converged_ and est.n_iter_ == 2
    assert np.all(np.isfinite(est.predict_log_proba(X)))


@pytest.mark.parametrize(("multi_class", "n_theta"), [("auto", 2), ("one_vs_rest", 6)])
def test_several_classes(multi_class, n_theta):
    rng = np.random.RandomState(0)
    y = np.repeat(["a", "b", "c"], 25)
    X = rng.randn(75, 2) + np.array([[0, 2], [2, -1], [-2, -1]])[np.repeat([0, 1, 2], 25)]
    settings = dict(optimizer=None, multi_class=multi_class)
    est = EPGaussianProcessClassifier(ConstantKernel(2.0) * RBF(1.0), **settings).fit(X, y)
    two = EPGaussianProcessClassifier(ConstantKernel(2.0) * RBF(1.0), n_jobs=2, **settings)
    with joblib.parallel_config(backend="threading"):
        two.fit(X, y)
    np.testing.assert_array_equal(two.predict_proba(X), est.predict_proba(X))
    assert est.score(X, y) > 0.9 and est.site_precision_.shape == (3, 75)
    np.testing.assert_allclose(est.predict_proba(X).sum(1), 1, atol=1e-14)
    mean, var = est.latent_mean_and_variance(X[:5])
    assert mean.shape == var.shape == (5, 3) and est.latent_covariance(X[:5]).shape == (3, 5, 5)
    assert np.all((est.loo_proba_ > 0) & (est.loo_proba_ < 1))
    value, gradient = est.log_marginal_likelihood(est.kernel_.theta, eval_gradient=True)
    assert gradient.shape == (n_theta,)
    np.testing.assert_allclose(value, est.log_evidence_, atol=1e-5)


BAD = [
    (dict(damping=0.0), "damping"),
    (dict(damping=1.5), "damping"),
    (dict(max_iter=0), "max_iter"),
    (dict(tol=-1.0), "tol"),
    (dict(tol=np.nan), "tol"),
    (dict(method="full"), "method"),
    (dict(likelihood="cloglog"), "likelihood"),
    (dict(optimizer="newton"), "optimizer"),
    (dict(acceleration="aitken"), "acceleration"),
    (dict(multi_class="nested"), "multi_class"),
    (dict(n_jobs="two"), "n_jobs"),
    (dict(jitter=-1.0), "jitter"),
    (dict(kernel="rbf"), "kernel"),
    (dict(kernel=PairwiseKernel(2.0, metric="sigmoid")), "kernel"),
    (dict(n_restarts_optimizer=-1), "n_restarts_optimizer"),
]


@pytest.mark.parametrize(("params", "word"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_parameters_leave_the_fit_as_it_was(params, word):
    X, y = toy(40)
    est = fixed(ConstantKernel(1.0) * RBF(1.0)).fit(X, y)
    before = {k: v for k, v in vars(est).items() if k.endswith("_")}
    est.set_params(**params)
    with warnings.catch_warnings(), pytest.raises((ValueError, TypeError), match=word):
        warnings.simplefilter("ignore", RuntimeWarning)
        est.fit(X[:30], y[:30])
    assert {k: v for k, v in vars(est).items() if k.endswith("_")} == before


def test_bad_data():
    X, y = toy(40)
    est = fixed(ConstantKernel(1.0) * RBF(1.0))
    for bad, match in ((np.nan, "NaN"), (np.inf, "infinity")):
        Z = X.copy()
        Z[3, 1] = bad
        with pytest.raises(ValueError, match=match):
            est.fit(Z, y)
    with pytest.raises(ValueError, match="class"):
        est.fit(X, np.ones(40))
    with pytest.raises(ValueError, match="weight"):
        est.fit(X, y, sample_weight=-np.ones(40))
    with pytest.raises(ValueError, match="weight"):
        est.fit(X, y, sample_weight=np.zeros(40))
    with pytest.raises(ValueError, match="class"):
        est.fit(X, y, sample_weight=y)
    assert not [k for k in vars(est) if k.endswith("_")]


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
def test_hostile_data_stay_finite(likelihood):
    X, y = toy(40)
    cases = [
        (ConstantKernel(1e4) * RBF(1.0), np.repeat(X, 3, 0), np.tile([0, 1, 1], 40)),
        (ConstantKernel(1.0) * RBF(1.0), np.ones((20, 2)), np.arange(20) % 2),
        (ConstantKernel(1e3) * RBF(1e4), X, y),
        (ConstantKernel(1.0) * RBF(1.0), np.vstack([X, [[1e8, -1e8]]]), np.r_[y, 0]),
        (ConstantKernel(1.0) * RBF(1.0), X[:2], [0, 1]),
        (ConstantKernel(1e5) * RBF(5.0), X, y),
    ]
    for kernel, A, b in cases:
        est = fixed(kernel, likelihood=likelihood, tol=1e-6).fit(A, b)
        mean, var = est.latent_mean_and_variance(X)
        assert np.isfinite(est.log_evidence_) and np.all(np.isfinite(mean)) and np.all(var > 0)
        assert np.all(np.isfinite(est.predict_log_proba(X)))


def test_far_rows_revert_to_the_prior_and_pickle_keeps_predictions():
    X, y = toy(40)
    est = fixed(ConstantKernel(5.0) * RBF(1.0)).fit(X, y)
    mean, var = est.latent_mean_and_variance(np.full((1, 2), 1e6))
    np.testing.assert_allclose([mean[0], var[0]], [0.0, 5.0], atol=1e-12)
    again = pickle.loads(pickle.dumps(est))
    np.testing.assert_array_equal(again.predict_proba(X), est.predict_proba(X))


def test_a_pickle_of_another_version_warns():
    X, y = toy(30)
    est = fixed(ConstantKernel(5.0) * RBF(1.0)).fit(X, y)
    state = est.__getstate__()
    state["_sklearn_ep_version"] = "0.0.1"
    with pytest.warns(UserWarning, match=r"saved by sklearn-ep 0\.0\.1"):
        EPGaussianProcessClassifier().__setstate__(state)
    assert "_sklearn_ep_version" not in vars(pickle.loads(pickle.dumps(est)))


def test_diagnose_knows_good_from_bad():
    X, y = toy(40)
    kernel = ConstantKernel(2.0) * RBF(1.0)
    good = fixed(kernel).fit(X, y)
    found = good.diagnose()
    assert found.pareto_k < 0.7 and found.ess_share > 0.2 and "close" in str(found)
    with pytest.warns(ConvergenceWarning):
        bad = fixed(ConstantKernel(1e4) * RBF(1.0), max_sweeps=1).fit(X, y)
    assert bad.diagnose().ess_share < 0.1 and "NOT" in str(bad.diagnose())


class Observed(Probit):
    """A Gaussian likelihood of precision 4, whose moments are those of another precision."""

    def __init__(self, taken_for):
        self.taken_for = taken_for

    def log_prob(self, y, f):
        return -2.0 * (y - f) ** 2

    def tilted(self, y, mean, var):
        wide = var + 1.0 / self.taken_for
        apart = (y - mean) / wide
        log_z = -0.5 * (np.log(2.0 * np.pi * wide) + (y - mean) * apart)
        own = super().tilted(y, mean, var)
        return own._replace(log_z=log_z, gradient=apart, curvature=1.0 / wide)


def test_importance_check_of_known_weights():
    """Of one latent value with variance s under q and p under the truth: the tail has 1 - s / p."""
    X, y, kernel = np.zeros((2, 1)), np.array([0, 1]), ConstantKernel(1.0) * RBF(1.0)
    for taken_for, shape in ((4.0, -np.inf), (22.0, 1.0 - 9.0 / 45.0)):
        clf = fixed(kernel, likelihood=Observed(taken_for)).fit(X, y)
        found = clf.diagnose(n_draws=20_000, random_state=0)
        assert found.pareto_k == pytest.approx(shape, abs=0.15)
        assert (found.ess_share == pytest.approx(1.0)) == (taken_for == 4.0)


class StopAt:
    """A callback that asks for a stop after some tasks below the fit."""

    def __init__(self, at):
        self.at, self.ended = at, 0

    def setup(self, estimator, context):
        self.ended = 0

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context):
        self.ended += context.parent is not None
        return self.ended >= self.at


def test_learning_stopped_by_a_callback_ends_at_converged_sites():
    pytest.importorskip("sklearn.callback")
    X, y = toy(80)
    watch = StopAt(3)
    with pytest.warns(ConvergenceWarning, match="a callback asked to stop"):
        est = EPGaussianProcessClassifier(1.0 * RBF(0.3)).set_callbacks(watch).fit(X, y)
    assert est.n_iter_ == watch.ended == 3
    assert est.stop_reason_ == "asked" and not est.converged_
    assert est.history_["residual"][-1] < est.tol
    assert est.history_["log_evidence"][-1] == est.log_evidence_
    same = fixed(est.kernel_).fit(X, y)
    np.testing.assert_allclose(est.predict_proba(X), same.predict_proba(X), atol=1e-3)


@pytest.mark.parametrize("max_iter", [1, 3])
def test_learning_cut_short_is_not_convergence(max_iter):
    X, y = toy(80)
    with pytest.warns(ConvergenceWarning) as told:
        mode = dict(max_iter=max_iter, hyperparameters="mode")
        est = EPGaussianProcessClassifier(1.0 * RBF(0.3), **mode).fit(X, y)
    assert est.stop_reason_ == "max_iter" and not est.converged_
    assert est.history_["residual"][-1] < est.tol
    [warning] = told
    said = str(warning.message)
    assert f"learning ended after {max_iter} steps" in said and "raise max_iter" in said
    gradient = float(re.search("gradient of the log evidence of ([0-9.e+-]+)", said)[1])
    own = est.log_marginal_likelihood(eval_gradient=True)[1]
    assert abs(gradient - np.max(np.abs(own))) < 0.05 * gradient
    assert EPGaussianProcessClassifier(1.0 * RBF(0.3)).fit(X, y).stop_reason_ == "converged"


def test_diagnosis_takes_the_rows_of_the_fit_only():
    X, y = toy(60)
    weight = np.where(np.arange(60) < 5, 0.0, 2.0)
    est = fixed(ConstantKernel(2.0) * RBF(1.0)).fit(X, y, sample_weight=weight)
    own = est.diagnose()
    assert own.pareto_k < 0.7
    assert est.diagnose(X=X, y=y, sample_weight=weight) == own
    others = (X + 1.0, y, weight), (X, 1 - y, weight), (X, y, None), (X[:50], y[:50], weight[:50])
    for rows, labels, w in others:
        with pytest.raises(ValueError, match="not those of the fit"):
            est.diagnose(X=rows, y=labels, sample_weight=w)
    with pytest.raises(ValueError, match="not seen in fit"):
        est.diagnose(X=X, y=y + 1, sample_weight=weight)
    through = fixed(ConstantKernel(2.0) * RBF(1.0), method="sparse", n_inducing=10).fit(X, y)
    assert through.diagnose().pareto_k is None and "inducing" in str(through.diagnose())


def test_a_likelihood_is_what_it_does():
    class Plain:
        """The probit without a base class."""

        log_concave = True
        log_prob = staticmethod(lambda y, f: log_ndtr(y * f))
        tilted = Probit().tilted
        contraction = Probit().contraction

    X, y = toy(40)
    kernel = ConstantKernel(2.0) * RBF(1.0)
    for kw in (dict(), dict(method="sparse", n_inducing=10, random_state=0)):
        own = fixed(kernel, likelihood=Plain(), **kw).fit(X, y)
        np.testing.assert_array_equal(
            own.predict_proba(X), fixed(kernel, **kw).fit(X, y).predict_proba(X)
        )
    link = own.latent_links()[0]
    np.testing.assert_array_equal(link.log_prob(1, X[:, 0]), log_ndtr(X[:, 0]))

    class Half:
        log_prob = Plain.log_prob

    with pytest.raises(TypeError, match="no `tilted`.* which likelihood needs"):
        fixed(kernel, likelihood=Half()).fit(X, y)
    for wrong in (None, 3):
        with pytest.raises(ValueError, match="likelihood must be 'probit', 'logit' or an object"):
            fixed(kernel, likelihood=wrong).fit(X, y)


BOTH = [EPGaussianProcessClassifier, RelaxedEPClassifier]


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_scales_beyond_double_precision_are_refused_by_name(make, method):
    rng = np.random.RandomState(0)
    X = rng.randn(30, 2)
    y = (X[:, 0] > 0).astype(int)
    est = make(method=method, optimizer=None, random_state=0)
    proba = est.fit(X, y).predict_proba(X)
    for scale in (1e308, 1e160, 1e-160, 1e-170):
        with pytest.raises(ValueError, match="X: .* scale the columns"):
            est.fit(X / np.abs(X).max() * scale, y)
    np.testing.assert_array_equal(est.predict_proba(X), proba)
    for scale in (2.0**400, 2.0**-400):
        scaled = est.fit(scale * X, y).predict_proba(scale * X)
        np.testing.assert_allclose(scaled, proba, atol=1e-12)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("columns", [2, 30])
def test_learning_does_not_depend_on_the_origin(make, columns):
    rng = np.random.RandomState(0)
    X = np.round(rng.randn(24, columns) * 2.0**20) / 2.0**20  # the shift is exact
    y = (X[:, 0] + rng.randn(24) > 0).astype(int)
    a, b = make(max_iter=10).fit(X, y), make(max_iter=10).fit(X + 1e8, y)
    np.testing.assert_allclose(b.predict_proba(X + 1e8), a.predict_proba(X), atol=1e-6)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_rows_that_a_kernel_cannot_reach_are_named(make, method):
    X = np.random.RandomState(0).randn(30, 2)
    y = (X[:, 0] > 0).astype(int)
    for kernel in (1.0 * Matern(1.0, nu=1.5), 1.0 * DotProduct()):
        est = make(kernel, method=method, optimizer=None, random_state=0).fit(X, y)
        for predict in (est.predict_proba, est.latent_covariance, est.sample_proba):
            with pytest.raises(ValueError, match="X has rows so far out"):
                predict(np.full((2, 2), 1e200))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_covariances_beyond_the_digits_are_an_error_of_X():
    X = np.random.RandomState(0).randn(40, 3)
    est = EPGaussianProcessClassifier(1.0 * DotProduct(), max_iter=5)
    with pytest.raises(ValueError, match="columns of X"):
        est.fit(X + 1e12, (X[:, 0] > 0).astype(int))


def test_length_gradient_of_rows_many_lengths_apart():
    X = np.random.RandomState(0).randn(20, 3)
    G = np.ones((20, 20))
    for part in (RBF([1.0, 1.0, 1.0]), Matern(1.0, nu=1.5)):
        for scale in (1e8, 1e100):
            rows = np.round(scale * np.vstack([X[:10], X[:10]]))
            rows[10:, 0] += 1.0
            exact = np.tensordot(G, part(rows, eval_gradient=True)[1], 2)
            np.testing.assert_allclose(contract(1.0 * part, rows, G)[0][1:], exact, rtol=1e-9)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize(
    ("method", "n_classes"),
    [
        ("dense", 2),
        ("sparse", 3),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("dense", 3), ("sparse", 2))),
    ],
)
def test_class_weight_is_sample_weight(make, method, n_classes):
    rng = np.random.RandomState(0)
    X = rng.randn(40, 2)
    y = np.array(["a", "b", "c"])[np.digitize(X[:, 0], [0.5, 1.0][: n_classes - 1])]
    own = rng.choice([0.0, 1.0, 2.0], size=40)
    each = {"a": 0.5, "b": 3.0}
    factor = np.vectorize(lambda label: each.get(label, 1.0))(y)
    copies = np.array([own[y == label].sum() for label in np.unique(y)])
    share = (own.sum() / (n_classes * copies))[np.searchsorted(np.unique(y), y)]
    est = make(method=method, n_inducing=10, optimizer=None, random_state=0)
    pairs = ((each, factor), ("balanced", share))
    # of more classes one: the other is of two
    for class_weight, weight in pairs if n_classes == 2 else pairs[1:]:
        a = clone(est).set_params(class_weight=class_weight).fit(X, y, sample_weight=own)
        b = clone(est).fit(X, y, sample_weight=own * weight)
        np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-12)
        if method == "dense":
            assert a.diagnose(X=X, y=y, sample_weight=own).converged == a.converged_


def test_class_weight_of_a_stream_and_what_is_refused():
    rng = np.random.RandomState(0)
    X = rng.randn(40, 2)
    y = (X[:, 0] > 0.5).astype(int)
    est = EPGaussianProcessClassifier(RBF(1.0), inducing_points=X[:10], optimizer=None, tol=1e-8)
    whole = clone(est).set_params(class_weight={1: 3.0}).fit(X, y)
    part = clone(whole).partial_fit(X, y, classes=[0, 1])
    np.testing.assert_allclose(part.predict_proba(X), whole.predict_proba(X), atol=1e-6)
    for value in ("even", {0: 0.0}, {0: np.inf}, {0: -1.0}, {7: 2.0}, [1.0, 2.0]):
        for make in BOTH:
            with pytest.raises(ValueError, match="class_weight|classes"):
                make(class_weight=value).fit(X, y)
    balanced = clone(est).set_params(class_weight="balanced")
    with pytest.raises(ValueError, match="class_weight='balanced'"):
        balanced.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match="class_weight"):
        balanced.fit([(X, y)])


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_a_constant_column_has_no_spread_to_the_last_digit(make, method):
    rng = np.random.RandomState(0)
    X = rng.randn(13, 2)
    y = (X[:, 0] > 0).astype(int)
    weight = np.where(rng.rand(13) < 0.3, 1e6, 0.3)
    est = make(method=method, optimizer=None, tol=1e-9, random_state=0).fit(
        X, y, sample_weight=weight
    )
    tiny = np.column_stack([np.full(13, 8641096.26), 2.0**-90 * X, np.full(13, 0.1)])
    with_constants = clone(est).fit(tiny, y, sample_weight=weight)
    np.testing.assert_allclose(with_constants.predict_proba(tiny), est.predict_proba(X), atol=1e-6)


def test_inputs_gradient_of_rows_many_lengths_apart():
    X, G = np.random.RandomState(0).randn(6, 2), np.ones((6, 3))
    rows, Z = np.round(1e90 * X), np.round(1e90 * X[:3])
    theta, towards = contract(1.0 * RBF(1.0), rows, G, Z, inputs=True)
    np.testing.assert_array_equal(towards, 0.0)  # distances are zero or have no weight
    np.testing.assert_array_equal(theta, [3.0, 0.0])


@pytest.mark.parametrize("n, frequency, seed", [(60, 2.0, 0), (100, 2.5, 1), (150, 2.0, 2)])
def test_learning_that_ends_flat_looks_among_shorter_lengths(n, frequency, seed):
    """From a smooth start a checkerboard looks like noise, and the amplitude goes to zero."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    y = np.sin(frequency * X[:, 0]) * np.sin(frequency * X[:, 1]) > 0
    est = EPGaussianProcessClassifier(hyperparameters="mode").fit(X, y)
    assert est.log_evidence_ > -n * np.log(2.0) + 4.0
    # where the caller chose the start, learning goes on from there alone
    flat = EPGaussianProcessClassifier(1.0 * RBF(5.0), hyperparameters="mode").fit(X, y)
    assert flat.log_evidence_ < -n * np.log(2.0) + 1.0


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_copies_that_agree_do_not_end_the_search_where_no_rows_are_joined(seed):
    """There the second copy of a label is foretold by the first, and nothing else is."""
    X, y = make_classification(
        150, 8, n_informative=5, n_redundant=0, flip_y=0.1, random_state=seed
    )
    copies = np.full(150, 2.0)
    alone = EPGaussianProcessClassifier(1e3 * RBF(0.01), optimizer=None).fit(X, y, copies)
    model = EPGaussianProcessClassifier(hyperparameters="mode").fit(X, y, copies)
    assert model.log_evidence_ > alone.log_evidence_ + 10.0
    assert model.kernel_.k2.length_scale > 1.0


def test_labels_that_are_noise_leave_a_flat_kernel():
    rng = np.random.default_rng(0)
    est = EPGaussianProcessClassifier(hyperparameters="mode")
    est.fit(rng.normal(size=(80, 3)), rng.integers(0, 2, 80))
    assert est.converged_ and -80 * np.log(2.0) - 0.5 < est.log_evidence_ < -80 * np.log(2.0) + 2.0
