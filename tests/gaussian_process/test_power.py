"""Power EP: an independent slow fixed point, gradients, and the variational limit."""

import numpy as np
import pytest
from oracles import oracle
from scipy.optimize import minimize
from scipy.special import log_ndtr
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.hyper import Nodes
from sklearn_ep._engine.partition import PartMap
from sklearn_ep.gaussian_process.label_errors.rules import LabelErrorStep

KERNEL = ConstantKernel(3.0) * RBF(1.2)
POWER_ORACLES = [
    c for c in oracle("relaxed_ep")["linear_2d"]["cases"] if c["power_ep_0.5"]["converged"]
]
GRID = np.linspace(-9.0, 9.0, 801)


def fixed(kernel=KERNEL, **kw):
    settled = dict(optimizer=None, tol=1e-11, max_iter=1000, max_sweeps=1000, jitter=1e-10)
    return EPGaussianProcessClassifier(kernel, random_state=0, **settled, **kw)


def toy(n=12, seed=0):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, 2)
    return X, (np.sin(2 * X[:, 0]) + 0.5 * rng.randn(n) > 0).astype(int)


def slow_power_ep(K, extra_var, sign, u):
    """One row after another, with sites as whole Gaussians and moments by a fine grid.

    Returns mean and covariance of what the sites are on, and the log evidence.
    """
    n = len(K)
    tau, nu = np.zeros(n), np.zeros(n)
    for _ in range(150):
        for i in range(n):
            cov = np.linalg.inv(np.linalg.inv(K) + np.diag(tau))
            mean = cov @ nu
            precision = 1.0 / cov[i, i] - u * tau[i]
            c = 1.0 / precision
            a = c * (mean[i] / cov[i, i] - u * nu[i])
            log_z, centre, spread = moments_by_grid(a, c, extra_var[i], sign[i], u)
            tau[i], nu[i] = (1 / spread - 1 / c) / u, (centre / spread - a / c) / u
    cov = np.linalg.inv(np.linalg.inv(K) + np.diag(tau))
    mean = cov @ nu
    value = log_normaliser(np.linalg.inv(cov), nu) - log_normaliser(np.linalg.inv(K), 0 * nu)
    for i in range(n):
        own = 1.0 / cov[i, i], mean[i] / cov[i, i]
        left = own[0] - u * tau[i], own[1] - u * nu[i]
        z = moments_by_grid(left[1] / left[0], 1.0 / left[0], extra_var[i], sign[i], u)[0]
        value += (z + scalar_normaliser(*left) - scalar_normaliser(*own)) / u
    return mean, cov, value


def log_normaliser(precision, shift):
    half = 0.5 * shift @ np.linalg.solve(precision, shift)
    return half - 0.5 * np.linalg.slogdet(precision / (2 * np.pi))[1]


def scalar_normaliser(precision, shift):
    return 0.5 * shift**2 / precision - 0.5 * np.log(precision / (2 * np.pi))


def moments_by_grid(a, c, extra, sign, u):
    """Return log Z, mean and variance of t ~ N(a, c) given Phi(sign f)^u, f = t + N(0, extra)."""
    total = c + extra
    f = a + np.sqrt(total) * GRID
    log_p = u * log_ndtr(sign * f) - 0.5 * GRID**2
    p = np.exp(log_p - log_p.max())
    z, p = p.sum(), p / p.sum()
    centre = p @ f
    spread = p @ (f - centre) ** 2
    gain = c / total
    log_z = log_p.max() + np.log(z * (GRID[1] - GRID[0])) - 0.5 * np.log(2 * np.pi)
    return log_z, a + gain * (centre - a), c - gain**2 * (total - spread)


@pytest.mark.parametrize("u", [0.9, pytest.param(0.5, marks=pytest.mark.slow), 0.1])
def test_dense_agrees_with_a_slow_fixed_point(u):
    X, y = toy()
    est = fixed(power=u).fit(X, y)
    K = KERNEL(X) + 1e-10 * np.eye(len(X))
    mean, cov, value = slow_power_ep(K, np.zeros(len(X)), 2 * y - 1, u)
    np.testing.assert_allclose(est.log_evidence_, value, atol=1e-6)
    found = est.latent_mean_and_variance(X)
    np.testing.assert_allclose(found, (mean, np.diagonal(cov)), atol=2e-6)


def test_all_rows_inducing_is_the_dense_method():
    X, y = toy(25)
    dense = fixed(power=0.5, method="dense").fit(X, y)
    sparse = fixed(power=0.5, inducing_points=X, method="sparse").fit(X, y)
    np.testing.assert_allclose(sparse.log_evidence_, dense.log_evidence_, atol=1e-6)
    np.testing.assert_allclose(
        sparse.latent_mean_and_variance(X), dense.latent_mean_and_variance(X), atol=1e-5
    )


@pytest.mark.parametrize("u", [0.7, 0.3])
def test_inducing_points_agree_with_a_slow_fixed_point(u):
    # as many rows as points that differ from them: the conditional means of the rows are full rank
    X, y = toy(6)
    Z = X + 0.3 * np.random.RandomState(1).randn(*X.shape)
    est = fixed(power=u, inducing_points=Z).fit(X, y)
    A = np.linalg.solve(KERNEL(Z), KERNEL(Z, X))
    Q = A.T @ KERNEL(Z) @ A
    extra = KERNEL.diag(X) - np.diagonal(Q)
    mean, cov, value = slow_power_ep(Q, extra, 2 * y - 1, u)
    np.testing.assert_allclose(est.log_evidence_, value, atol=1e-6)
    found = est.latent_mean_and_variance(X)
    np.testing.assert_allclose(found, (mean, np.diagonal(cov) + extra), atol=1e-5)


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
@pytest.mark.parametrize("method", ["dense", "sparse"])
def test_gradient_of_the_evidence(method, likelihood):
    X, y = toy(30)
    kw = dict(inducing_points=X[:7] + 0.1) if method == "sparse" else {}
    est = fixed(power=0.5, method=method, likelihood=likelihood, **kw).fit(X, y)
    theta, h = est.kernel_.theta + 0.1, 1e-4
    gradient = est.log_marginal_likelihood(theta, eval_gradient=True)[1]
    values = [
        [est.log_marginal_likelihood(theta + s * row) for s in (h, -h)]
        for row in np.eye(len(theta))
    ]
    np.testing.assert_allclose(gradient, np.diff(values)[:, 0] / (-2 * h), atol=2e-6)


def test_both_forms_of_the_gradient_in_kernel_and_inducing_points():
    X, y = toy(30)
    est = fixed(power=0.5, inducing_points=X[:5] + 0.1).fit(X, y)
    plan, h = est._plan, 1e-4
    plan.optimizer, plan.learn_inducing = "fmin_l_bfgs_b", True
    hyper = plan.hyperparameters()
    with PartMap(plan.data.parts) as run:
        ep = plan.engine(run)
        at = Nodes(plan.problem(ep, est._fitted.runs[0].state), hyper).evaluate
        gradient = at(hyper.start, None).gradient
        moves = h * np.eye(len(hyper.start))[::2]
        values = [[at(hyper.start + s * m, None).log_evidence for s in (1, -1)] for m in moves]
        model = ep.model(est._fitted.runs[0].state)
        sums = ep.one_pass(model, est._fitted.runs[0].state.sites, gradient="fresh", inputs=True)[0]
        fresh = hyper.gradient(model, sums, fresh=True)
    np.testing.assert_allclose(gradient[::2], np.diff(values)[:, 0] / (-2 * h), atol=1e-5)
    np.testing.assert_allclose(fresh, gradient, atol=1e-5)


@pytest.mark.parametrize("case", POWER_ORACLES, ids=[c["name"] for c in POWER_ORACLES])
def test_oracles(case):
    # linear functions of two columns, labels that are wrong at a known rate
    X, y, known = np.array(case["X"]), np.array(case["y"]), case["power_ep_0.5"]
    est = fixed(
        DotProduct(0.0, "fixed"), power=0.5, likelihood=LabelErrorStep(case["eps"]), damping=0.5
    ).fit(X, y)
    np.testing.assert_allclose(
        est.latent_mean_and_variance(np.eye(2))[0], known["w_mean"], atol=1e-5
    )
    np.testing.assert_allclose(est.latent_covariance(np.eye(2)), known["w_cov"], atol=1e-5)
    np.testing.assert_allclose(est.log_evidence_, known["log_evidence"], atol=1e-5)


def test_one_rule_serves_the_robust_classifier():
    # the same sites on f plus noise, however the model is written
    X, y = toy(40)
    noise, rate = 0.5, 0.1
    robust = RelaxedEPClassifier(
        KERNEL, rule="power", power=0.5, label_noise=rate, latent_noise=noise, optimizer=None,
        tol=1e-11, max_iter=1000,
    ).fit(X, y)  # fmt: skip
    kernel = KERNEL + WhiteKernel(noise)
    own = fixed(kernel, power=0.5, likelihood=LabelErrorStep(rate), damping=0.5).fit(X, y)
    np.testing.assert_allclose(own.log_evidence_, robust.log_evidence_, atol=1e-8)
    np.testing.assert_allclose(own.site_precision_, robust.site_precision_, atol=1e-6)
    np.testing.assert_allclose(own.site_shift_, robust.site_shift_, atol=1e-6)


def limit(fit):
    """Return the limit of arrays at power 0 from three small powers."""
    a, b, c = (np.asarray(fit(u)) for u in (0.01, 0.005, 0.0025))
    return (8.0 * c - 6.0 * b + a) / 3.0


def test_small_powers_become_the_variational_posterior():
    rng = np.random.RandomState(0)
    X = rng.randn(60, 3)
    y = (X[:, 0] + rng.randn(60) > 0).astype(int)
    kl = ConvexVariationalLogistic(
        1.0, bound="kl", fit_intercept=False, variance="exact", calibration=None, tol=1e-10,
        inner_tol=1e-10, max_iter=500,
    ).fit(X, y)  # fmt: skip

    def fit(u):
        est = fixed(DotProduct(0.0, "fixed"), power=u, likelihood="logit").fit(X, y)
        return np.r_[est.decision_function(np.eye(3)), est.log_evidence_]

    found = limit(fit)
    np.testing.assert_allclose(found[:3], kl.coef_[0], atol=1e-4)
    np.testing.assert_allclose(found[3], kl.log_evidence_, atol=1e-3)


def test_small_powers_become_the_variational_bound_of_inducing_points():
    X, y = toy(20)
    Z, sign = X[:4] + 0.1, 2 * y - 1
    lower = np.linalg.cholesky(KERNEL(Z))
    W = np.linalg.solve(lower, KERNEL(Z, X)).T
    extra = KERNEL.diag(X) - np.sum(W**2, axis=1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    rows = np.tril_indices(4)

    def bound(v):
        L = np.zeros((4, 4))
        L[rows] = v[4:]
        mean, var = W @ v[:4], np.sum((W @ L) ** 2, axis=1) + extra
        told = log_ndtr(sign[:, None] * (mean[:, None] + np.sqrt(var)[:, None] * nodes)) @ weights
        trace = np.sum(L**2) + v[:4] @ v[:4] - 4
        return 0.5 * trace - np.sum(np.log(np.abs(np.diagonal(L)))) - told.sum()

    best = minimize(
        bound, np.r_[np.zeros(4), np.eye(4)[rows]], method="BFGS", options=dict(gtol=1e-8)
    )

    def fit(u):
        est = fixed(power=u, inducing_points=Z).fit(X, y)
        return np.r_[est.log_evidence_, est.inducing_mean_]

    found = limit(fit)
    np.testing.assert_allclose(found[0], -best.fun, atol=2e-5)
    np.testing.assert_allclose(found[1:], lower @ best.x[:4], atol=2e-4)


# learning is cut short on purpose
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    "kw",
    [
        dict(max_iter=4),
        dict(n_inducing=6, method="sparse", max_iter=4),
        dict(n_inducing=6, batch_size=10, max_iter=10),  # nine noisy steps would be few
        dict(n_inducing=6, method="sparse", site_memory="average", max_iter=4),
    ],
    ids=["dense", "passes", "minibatches", "averaged"],
)
def test_learning_and_weights(kw):
    X, y = toy(30)
    w = np.random.RandomState(1).randint(0, 3, 30)
    start = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e3))
    est = EPGaussianProcessClassifier(start, power=0.5, random_state=0, tol=1e-8, **kw)
    est.set_params(hyperparameters="mode", max_sweeps=300)
    weighted = clone(est).fit(X, y, sample_weight=w)
    repeated = clone(est).fit(np.repeat(X, w, 0), np.repeat(y, w))
    assert weighted.log_evidence_ > clone(est).set_params(optimizer=None).fit(X, y, w).log_evidence_
    np.testing.assert_allclose(
        weighted.latent_mean_and_variance(X), repeated.latent_mean_and_variance(X), atol=1e-5
    )


def test_a_stream_takes_powers():
    X, y = toy(40)
    est = fixed(power=0.5, inducing_points=X[:5]).set_params(max_sweeps=500)
    streamed = clone(est).partial_fit(X, y, classes=[0, 1])
    whole = clone(est).fit(X, y)
    np.testing.assert_allclose(streamed.log_evidence_, whole.log_evidence_, atol=1e-7)
    np.testing.assert_allclose(streamed.predict_proba(X), whole.predict_proba(X), atol=1e-7)


def test_several_classes_and_what_is_refused():
    X, _ = toy(30)
    y = np.digitize(X[:, 0], [-0.4, 0.4])
    est = EPGaussianProcessClassifier(KERNEL, optimizer=None, power=0.5).fit(X, y)
    assert est.multi_class_ == "one_vs_rest"
    with pytest.raises(ValueError, match="power=0.5"):
        clone(est).set_params(multi_class="joint").fit(X, y)
    for wrong in (0.0, 1.5, np.nan):
        with pytest.raises(ValueError, match="power"):
            clone(est).set_params(power=wrong).fit(X, y)

    class NoPowers:
        log_concave = True
        log_prob = tilted = contraction = None

    with pytest.raises(TypeError, match="powered"):
        clone(est).set_params(likelihood=NoPowers()).fit(X, y)


def test_power_one_is_expectation_propagation_to_the_last_bit():
    X, y = toy(40)
    for kw in (dict(), dict(inducing_points=X[:5])):
        a = EPGaussianProcessClassifier(KERNEL, optimizer=None, **kw).fit(X, y)
        b = clone(a).set_params(power=1).fit(X, y)
        np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))
        assert a.log_evidence_ == b.log_evidence_
