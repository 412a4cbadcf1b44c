"""Averages over the kernel of several classes: mixtures, equivalences, what answers from them."""

import pickle
import warnings

import joblib
import numpy as np
import pytest
from oracles import written_out
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep._engine.noisy_argmax import NoisyArgmax
from sklearn_ep.active_learning import scores
from sklearn_ep.gaussian_process._dense import JointModel
from sklearn_ep.gaussian_process._dense_gp import JointGP
from sklearn_ep.gaussian_process._limits import LIMITS

KERNEL = ConstantKernel(2.0, (1e-2, 1e2)) * RBF(1.5)


def rows(n, d=2, n_classes=3, seed=0):
    """Classes that follow the first columns, with noise."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    angle = np.arctan2(X[:, 1], X[:, 0]) + 0.4 * rng.normal(size=n)
    y = np.floor(n_classes * (angle / (2.0 * np.pi) + 0.5)).astype(int) % n_classes
    y[:n_classes] = np.arange(n_classes)
    return X, y


def averaged(X, y, kernel=KERNEL, **settings):
    """Fit an average: the default with lengths of its own, else asked for."""
    settings = {"hyperparameters": "auto" if kernel is None else "integrate"} | settings
    return EPGaussianProcessClassifier(kernel, random_state=0, **settings).fit(X, y)


@pytest.fixture
def exact_nodes(monkeypatch):
    monkeypatch.setattr(JointModel, "node_tol", 1e-7)
    monkeypatch.setattr(NoisyArgmax, "rough", lambda self: self)


@pytest.mark.parametrize(
    ("kernel", "likelihood"),
    [
        pytest.param(None, "probit", marks=pytest.mark.slow),
        (KERNEL, "logit"),
        pytest.param(None, "logit", marks=pytest.mark.slow),
        pytest.param(KERNEL, "probit", marks=pytest.mark.slow),
    ],
)
def test_the_average_is_the_mixture_of_fits_at_its_kernels(kernel, likelihood, exact_nodes):
    X, y = rows(10)
    new = 1.5 * rows(12, seed=1)[0]
    est = averaged(X, y, kernel, tol=1e-7, likelihood=likelihood, multi_class="joint")
    assert est.hyperparameters_used_ == "integrate" and est.multi_class_ == "joint"
    assert len(est.hyper_weights_) > 3 and est.hyper_theta_.shape[1] == est.kernel_.n_dims
    parts = []
    for theta in est.hyper_theta_:
        given = dict(kernel=est.kernel_.clone_with_theta(theta), optimizer=None, max_iter=500)
        one = clone(est).set_params(hyperparameters="auto", **given)
        parts.append(one.fit(X, y))
    w = est.hyper_weights_

    def mixed(of_part):
        return np.tensordot(w, np.array([of_part(part) for part in parts]), 1)

    np.testing.assert_allclose(
        est.predict_proba(new), mixed(lambda e: e.predict_proba(new)), atol=1e-6
    )
    # of one over the probability, averaged over the posterior of the kernel
    without = 1.0 / mixed(lambda e: 1.0 / e.loo_proba_)
    np.testing.assert_allclose(est.loo_proba_, without, atol=1e-6)
    mean, var = est.latent_mean_and_variance(new)
    expected = mixed(lambda e: e.decision_function(new))
    np.testing.assert_allclose(mean, expected, atol=1e-5)
    squares = mixed(lambda e: e.latent_mean_and_variance(new)[1] + e.decision_function(new) ** 2)
    np.testing.assert_allclose(var, squares - expected**2, rtol=1e-4, atol=1e-6)
    cov = est.latent_covariance(new[:5], new)
    np.testing.assert_allclose(np.einsum("cii->ic", cov[:, :, :5]), var[:5], rtol=1e-6)
    np.testing.assert_allclose(est.kernel_.theta, w @ est.hyper_theta_)


def test_by_default_one_length_of_all_classes_is_at_its_mode():
    X, y = rows(15)
    default, mode = (averaged(X, y, hyperparameters=how) for how in ("auto", "mode"))
    assert default.hyperparameters_used_ == "mode"
    assert default.log_evidence_ == mode.log_evidence_
    own = averaged(X, y, ConstantKernel(2.0) * RBF([1.5, 1.5]), hyperparameters="auto")
    assert own.hyperparameters_used_ == "integrate"
    one_column = averaged(X[:, :1], y, None)
    assert one_column.hyperparameters_used_ == "mode"


@pytest.mark.parametrize("kernel", [pytest.param(None, marks=pytest.mark.slow), KERNEL])
def test_names_of_classes_order_of_rows_and_weights(kernel):
    X, y = rows(15)
    new = rows(20, seed=1)[0]
    proba, names = averaged(X, y, kernel).predict_proba(new), np.array([2, 0, 1])
    renamed = averaged(X, names[y], kernel)
    np.testing.assert_allclose(renamed.predict_proba(new)[:, names], proba, atol=1e-6)
    order = np.random.default_rng(0).permutation(15)
    moved = averaged(X[order], y[order], kernel)
    np.testing.assert_allclose(moved.predict_proba(new), proba, atol=1e-6)
    weight = np.random.default_rng(1).integers(1, 3, 15)
    make = EPGaussianProcessClassifier(kernel, multi_class="joint")  # no row is left out
    weighted = make.fit(X, y, sample_weight=weight).predict_proba(new)
    again = make.fit(written_out(X, weight), np.repeat(y, weight)).predict_proba(new)
    np.testing.assert_allclose(weighted, again, atol=1e-5)


def test_the_same_bits_for_any_number_of_workers_and_after_a_pickle():
    X, y = rows(12)
    with joblib.parallel_config(backend="threading"):
        fits = [averaged(X, y, n_jobs=n) for n in (None, 2)]
    assert np.array_equal(fits[0].hyper_nodes_, fits[1].hyper_nodes_)
    proba = fits[0].predict_proba(X)
    assert np.array_equal(proba, fits[1].predict_proba(X))
    text = pickle.dumps(fits[0])
    assert np.array_equal(pickle.loads(text).predict_proba(X), proba)
    # no n x n matrix a class and node
    assert len(text) < len(fits[0].hyper_weights_) * 8 * (12 * (6 + 2 * 3) + 1000) + 1e5


@pytest.fixture(scope="module")
def mixture():
    """Return an average that several tests ask, and none changes."""
    return averaged(*rows(40))


def test_draws_average_to_the_prediction_and_diagnosis_tells_of_the_nodes(mixture):
    est, new = mixture, rows(8, seed=1)[0]
    draws = est.sample_proba(new, n_samples=2000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), est.predict_proba(new), atol=0.03)
    told = est.diagnose(n_draws=50)
    assert f"averaged over nodes: {len(est.hyper_weights_)} (effective" in str(told)
    assert told.pareto_k is not None


@pytest.mark.parametrize("strategy", ["auto", "bald", "variance_reduction"])
def test_scores_know_the_mixture(strategy, mixture):
    pool = rows(30, seed=1)[0]
    rated = scores(mixture, pool, strategy=strategy)
    assert rated.shape == (30,) and np.all(np.isfinite(rated))


def test_a_column_that_says_nothing_gets_a_length_of_its_own():
    X, y = rows(90, d=6, n_classes=4)
    new, truth = rows(300, d=6, n_classes=4, seed=1)
    loss = {}
    for how in ("mode", "auto"):
        est = averaged(X, y, None, hyperparameters=how)
        loss[how] = -np.mean(np.log(est.predict_proba(new)[np.arange(300), truth]))
        assert est.converged_
    assert loss["auto"] < loss["mode"] - 0.05
    assert set(est.hyper_anisotropy_) <= {0.0, 0.5, 1.0, 2.0}


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(1.5) * ConstantKernel(2.0),
        pytest.param(ConstantKernel(2.0, "fixed") * RBF(1.5), marks=pytest.mark.slow),
        pytest.param(ConstantKernel(2.0) * RBF(1.5, "fixed"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_mode_alone_stands_for_a_common_length_of_many_rows(kernel, monkeypatch):
    monkeypatch.setattr(LIMITS, "several", 149)
    X, y = rows(155)
    est = averaged(X, y, kernel)
    assert est.converged_ and est.hyperparameters_used_ == "integrate"
    assert len(est.hyper_weights_) == 1
    value, theta = est.log_marginal_likelihood, est.kernel_.theta
    top = value(theta)
    for e in 0.3 * np.eye(len(theta)):
        # what the parabola through three values gains is below what a search leaves
        up, down = value(theta + e) - top, value(theta - e) - top
        assert up + down < 0 and (up - down) ** 2 / (-8.0 * (up + down)) < 0.05


def test_a_warm_start_goes_on_from_the_heaviest_node():
    X, y = rows(36)
    est = averaged(X, y, warm_start=True)
    cold, before = est.n_iter_, est.predict_proba(X)
    assert est.fit(X, y).n_iter_ < cold
    np.testing.assert_allclose(est.predict_proba(X), before, atol=0.015)


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_the_expected_curvature_is_that_of_all_classes(n_classes):
    """Blocks between classes, which are left out, are 1 / (K - 1) of each class on average."""
    X, y = rows(60, n_classes=n_classes)
    kernel = ConstantKernel(3.0) * RBF([1.0, 2.0])
    est = EPGaussianProcessClassifier(kernel, optimizer=None, multi_class="joint", tol=1e-8)
    d, b = est.fit(X, y)._fitted.sites[0]
    if n_classes > 2:  # it is exact where classes are alike
        d = np.repeat(d.mean(1, keepdims=True), n_classes, axis=1)
    n, step = len(X), 1e-5
    T = np.zeros((n_classes, n, n_classes, n))
    i = np.arange(n)
    for c in range(n_classes):
        for j in range(n_classes):
            T[c, i, j, i] = (d[:, c] if c == j else 0.0) - d[:, c] * d[:, j] / d.sum(1)
    T = T.reshape(n_classes * n, -1)
    K = np.kron(np.eye(n_classes), kernel(X))
    B = T @ np.linalg.inv(np.eye(len(K)) + K @ T)
    moves = [step * e for e in np.eye(3)]
    slopes = [
        (
            kernel.clone_with_theta(kernel.theta + m)(X)
            - kernel.clone_with_theta(kernel.theta - m)(X)
        )
        / 2e-5
        for m in moves
    ]
    products = [B @ np.kron(np.eye(n_classes), D) for D in slopes]
    truth = np.array([[0.5 * np.sum(a * b.T) for a in products] for b in products])
    structure = JointGP(kernel, X)
    found = structure.expected_curvature(structure.posterior(d, b))
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6 * np.abs(truth).max())


HOSTILE = {
    "six rows": lambda X, y: (X[:6], y[:6]),
    "no spread": lambda X, y: (np.ones((9, 2)), np.arange(9) % 3),
    "separable": lambda X, y: (X, np.digitize(X[:, 0], [-0.5, 0.5])),
    "one column": lambda X, y: (X[:, :1], y),
    "repeated rows": lambda X, y: (np.repeat(X[:4], 9, axis=0), np.tile([0, 1, 2], 12)),
    "wide": lambda X, y: (np.tile(X[:12], (1, 15)), y[:12]),
    "one row of a class": lambda X, y: (X, (np.arange(len(X)) == 3) + 2 * (X[:, 0] > 0)),
}


LONG = "separable", "one row of a class"


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=pytest.mark.slow) if w in LONG else w for w in HOSTILE]
)
def test_hostile_data(what):
    X, y = HOSTILE[what](*rows(40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        p = averaged(X, y, None).predict_proba(X)
    assert np.all(np.isfinite(p)) and np.all(p >= 0)
    np.testing.assert_allclose(p.sum(axis=1), 1.0)


def test_the_common_level_of_the_classes_keeps_its_prior(mixture):
    """Of the mean over classes labels say nothing: its variance is k / K at every node."""
    est, new = mixture, rows(30, seed=1)[0]
    mean, cov = est._posteriors[0].latent(new)
    prior = est.hyper_weights_ @ [np.exp(theta[0]) for theta in est.hyper_theta_]
    np.testing.assert_allclose(cov.sum((1, 2)) / 9.0, prior / 3.0, rtol=1e-6)
