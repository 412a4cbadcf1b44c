"""Label errors row by row: step moments, relaxed cost, sites of either sign, double loop."""

import numpy as np
import pytest
from oracles import oracle
from scipy.special import log_ndtr, ndtr
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier, RelaxedEPClassifier
from sklearn_ep._engine.contracts import WholeEP
from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep._engine.hyper import Accuracy, Node, search_mode
from sklearn_ep._engine.likelihoods import LabelNoise, Probit
from sklearn_ep._engine.loop import Anderson, Evaluation, Trace, iterate
from sklearn_ep._engine.rules import MomentMatching, Power
from sklearn_ep.datasets import make_noisy_labels_classification
from sklearn_ep.gaussian_process._dense_gp import DenseGP
from sklearn_ep.gaussian_process._limits import LIMITS
from sklearn_ep.gaussian_process.label_errors.double_loop import MarginalDoubleLoop
from sklearn_ep.gaussian_process.label_errors.rules import (
    LabelErrorStep,
    LatentNoise,
    relaxed_cost,
    relaxed_gamma,
)

ORACLES = oracle("relaxed_ep")


def problem(n=30, seed=0, negative=0.3):
    """A kernel matrix with sites of either sign that leave a proper posterior."""
    rng = np.random.RandomState(seed)
    X = rng.randn(n, 2)
    precision = rng.gamma(1.0, 1.0, n)
    precision[rng.rand(n) < negative] *= -0.02
    precision[3] = 1e-9
    return X, 2.0 * RBF(1.0), precision, rng.randn(n)


# ---------------------------------------------------------------------------- step factor


def moments(z, rate):
    """Moments under a cavity with mean z and variance one that agrees with the label."""
    return LabelErrorStep(rate).moments(1.0, z, 1.0)


def divergence(z, rate):
    """Divergence from the tilted distribution to its moment match: the cost without relaxation."""
    return relaxed_cost(0.0, z, 0.0, 0.0, rate, "normalised")


@pytest.mark.parametrize("case", ORACLES["kappa"]["cases"])
def test_divergence_oracle(case):
    z, rate = np.array([case["z"]]), case["eps"]
    m = moments(z, rate)
    np.testing.assert_allclose(m.log_z, case["logZ"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(z + m.slope, case["mean"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(m.spread, case["var"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(divergence(z, rate), case["kappa"], atol=1e-9)


def test_certain_label_far_out():
    # mean and variance of a normal tail: z^-2 and slope + z = -1/z to leading order
    z = np.array([-1e2, -1e4, -1e6])
    m = moments(z, 0.0)
    np.testing.assert_allclose(m.spread, 1 / z**2, rtol=1e-3)
    assert np.all(np.isfinite(m.log_z)) and np.all(m.spread > 0)
    assert np.all(m.wrong == 0)
    np.testing.assert_allclose(divergence(z, 0.0), 1 - 0.5 * np.log(np.pi), atol=0.01)
    # continuous where the series takes over
    near = moments(np.array([-30 - 1e-9, -30 + 1e-9]), 0.0)
    np.testing.assert_allclose(near.spread[0], near.spread[1], rtol=1e-8)


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.2])
def test_step_is_noisy_probit(rate):
    rng = np.random.RandomState(0)
    y, mean, var = np.sign(rng.randn(50)), 3 * rng.randn(50), rng.gamma(1, 1, 50)
    step = LabelErrorStep(rate).tilted(y, mean, var + 2.5)
    for ours, theirs in zip(step, LabelNoise(rate, 2.5).tilted(y, mean, var), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    if rate == 0:
        np.testing.assert_allclose(
            LabelErrorStep(0.0).tilted(y, mean, var + 1.0).curvature,
            Probit().tilted(y, mean, var).curvature,
            rtol=1e-9,
        )


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_step_derivatives_and_weights(exponent):
    factor = LabelErrorStep(0.1).powered(exponent)
    assert factor.exponent == exponent
    y, mean, var, h = 1.0, np.linspace(-3, 3, 13), np.full(13, 1.7), 1e-4
    up, down = factor.tilted(y, mean + h, var), factor.tilted(y, mean - h, var)
    t = factor.tilted(y, mean, var)
    np.testing.assert_allclose((up.log_z - down.log_z) / (2 * h), t.gradient, atol=1e-7)
    np.testing.assert_allclose(-(up.gradient - down.gradient) / (2 * h), t.curvature, atol=1e-7)
    z = mean / np.sqrt(var)
    mass = 0.9**exponent * ndtr(z) + 0.1**exponent * ndtr(-z)
    np.testing.assert_allclose(np.exp(t.log_z), mass, rtol=1e-12)
    wrong = 0.1**exponent * ndtr(-z) / mass
    np.testing.assert_allclose(factor.wrong_proba(y, mean, var), wrong, rtol=1e-12)
    np.testing.assert_allclose(
        np.exp(factor.log_prob(1.0, np.array([-1.0, 2.0]))), [0.1**exponent, 0.9**exponent]
    )


# ---------------------------------------------------------------------------- relaxed cost


@pytest.mark.parametrize("cost", ["mass", "normalised"])
def test_cost_against_quadrature(cost):
    name = "kl_mass" if cost == "mass" else "kl_normalised"
    for case in ORACLES["relaxed_kl"]["cases"]:
        root = np.sqrt(case["lam"])
        z0, mubar = case["y"] * case["h"] / root, case["y"] * case["m"] / root
        value = relaxed_cost(case["b"] * case["lam"], z0, mubar, 0.0, case["eps"], cost)
        assert abs(value - case[name]) < 1e-9


@pytest.mark.parametrize("cost", ["mass", "normalised"])
def test_minimiser_oracle(cost):
    for case in ORACLES["relaxation_minimiser"]["cases"]:
        z0, mubar, c, rate = (
            np.array([case["z0"]]),
            np.array([case["mu"]]),
            case["c"],
            case["eps"],
        )
        gamma = relaxed_gamma(z0, mubar, c, rate, cost)
        assert gamma[0] >= 0
        value = relaxed_cost(gamma, z0, mubar, c, rate, cost)[0]
        assert abs(value - case[f"Q_{cost}"]) < 1e-7


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.2])
def test_minimiser_beats_a_fine_grid(rate):
    rng = np.random.RandomState(1)
    z0, mubar = 3 * rng.randn(200), 8 * rng.randn(200)
    grid = np.concatenate([[0.0], np.geomspace(1e-5, 1e3, 4000)])[:, None]
    for cost in ("mass", "normalised"):
        gamma = relaxed_gamma(z0, mubar, 0.05, rate, cost)
        ours = relaxed_cost(gamma, z0, mubar, 0.05, rate, cost)
        assert np.all(ours <= relaxed_cost(grid, z0, mubar, 0.05, rate, cost).min(0) + 1e-7)
        assert np.sum(gamma > 0) > 20
    assert not np.any(relaxed_gamma(z0, mubar, np.inf, rate))


def test_rows_may_have_penalties_of_their_own():
    rng = np.random.RandomState(1)
    z0, mubar = 3 * rng.randn(100), 8 * rng.randn(100)
    each = [relaxed_gamma(z0, mubar, c, 0.1) for c in (0.05, 0.2)]
    own = relaxed_gamma(np.tile(z0, 2), np.tile(mubar, 2), np.repeat([0.05, 0.2], 100), 0.1)
    np.testing.assert_array_equal(own, np.concatenate(each))


@pytest.mark.parametrize("cost", ["mass", "normalised"])
@pytest.mark.parametrize("rate", [0.0, 1e-300, 1e-12, 1e-4, 0.05, 0.2, 0.45])
def test_rows_that_are_not_searched_do_not_relax(rate, cost):
    """A bound of how fast the divergence falls spares most rows: against the cost on a grid."""
    rng = np.random.RandomState(2)
    z0, mubar = 6 * rng.randn(900), rng.choice([1.0, 5.0, 40.0], 900) * rng.randn(900)
    grid = np.concatenate([[0.0], np.geomspace(1e-4, 1e2, 400)])[:, None]
    gamma = relaxed_gamma(z0, mubar, 0.2, rate, cost)
    found = relaxed_cost(gamma, z0, mubar, 0.2, rate, cost)
    assert np.all(found <= relaxed_cost(grid, z0, mubar, 0.2, rate, cost).min(0) + 1e-9)
    # a site whose centre is near agrees with its cavity
    near = (np.abs(mubar - z0) < 2) & (np.abs(mubar) < 2)
    assert rate != 0.2 or not np.any(gamma[near])


# ---------------------------------------------------------------------------- either sign


class Given(Probit):
    """Factors of the training rows that are Gaussian sites of any sign."""

    log_concave = False

    def __init__(self, precision, shift):
        self.precision, self.shift = precision, shift

    def tilted(self, y, mean, var):
        found = super().tilted(y, mean, var)
        if np.shape(y) != self.shift.shape:
            return found
        own = 1.0 / (1.0 / var + self.precision)
        centre = own * (mean / var + self.shift)
        log_z = 0.5 * (np.log(own / var) + centre**2 / own - mean**2 / var)
        return found._replace(
            log_z=log_z, gradient=(centre - mean) / var, curvature=(1.0 - own / var) / var
        )


@pytest.mark.parametrize("kind", ["mixed", "positive", "all negative", "one"])
def test_sites_of_either_sign(kind):
    X, kernel, precision, shift = problem(negative=0.0 if kind == "positive" else 0.3)
    if kind == "all negative":
        precision = -0.005 * np.abs(precision)
    if kind == "one":
        precision = np.zeros(30)
        precision[4] = -0.1
    kept = dict(optimizer=None, method="dense", tol=1e-12, jitter=1e-12)
    clf = EPGaussianProcessClassifier(kernel, likelihood=Given(precision, shift), **kept)
    clf.fit(X, np.arange(30) % 2)
    np.testing.assert_allclose(clf.site_precision_, precision, atol=1e-9)
    K, T = kernel(X), np.diag(precision)
    S = np.linalg.solve(np.eye(30) + K @ T, K)
    mean, var = clf.latent_mean_and_variance(X)
    np.testing.assert_allclose(mean, S @ shift, atol=1e-9)
    np.testing.assert_allclose(var, np.diag(S), atol=1e-9)
    log_det = np.linalg.slogdet(np.eye(30) + K @ T)[1]
    assert clf.log_evidence_ == pytest.approx(0.5 * (shift @ S @ shift - log_det), abs=1e-9)
    explained, alpha = T - T @ S @ T, shift - precision * (S @ shift)
    R = np.outer(alpha, alpha) - explained
    slopes = clf.log_marginal_likelihood(kernel.theta, eval_gradient=True)[1]
    of_kernel = kernel(X, eval_gradient=True)[1]
    np.testing.assert_allclose(slopes, 0.5 * np.tensordot(R, of_kernel, 2), atol=1e-8)
    X_new = np.random.RandomState(1).randn(6, 2)
    K_new = kernel(X_new, X)
    cov = kernel(X_new) - K_new @ explained @ K_new.T
    mean, var = clf.latent_mean_and_variance(X_new)
    np.testing.assert_allclose(mean, K_new @ alpha, atol=1e-9)
    np.testing.assert_allclose(var, np.diag(cov), atol=1e-9)
    np.testing.assert_allclose(clf.latent_covariance(X_new), cov, atol=1e-9)
    np.testing.assert_allclose(clf.latent_covariance(X_new[:2], X_new), cov[:2], atol=1e-9)


def test_improper_sites_raise():
    X, kernel, precision, shift = problem()
    with pytest.raises(ImproperPosterior):
        DenseGP(kernel(X)).posterior(-np.abs(precision), shift)


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.2])
def test_cumulants_of_a_step(rate):
    y, mean, var = np.array([1.0, -1.0, 1.0, -1.0]), np.array([0.3, 1.5, -2.5, -4.0]), 1.7
    log_z, found = LabelErrorStep(rate, 0.7).cumulants(y, mean, np.full(4, var))
    g = np.linspace(-20.0, 20.0, 400_001)
    for k in range(4):
        side = np.where(y[k] * g > 0, (1.0 - rate) ** 0.7, rate**0.7)
        density = side * np.exp(-0.5 * (g - mean[k]) ** 2 / var) / np.sqrt(2.0 * np.pi * var)
        total = np.trapezoid(density, g)
        first = np.trapezoid(g * density, g) / total
        central = [np.trapezoid((g - first) ** j * density, g) / total for j in (2, 3, 4)]
        exact = [first, central[0], central[1], central[2] - 3.0 * central[0] ** 2]
        np.testing.assert_allclose(log_z[k], np.log(total), atol=2e-4)
        np.testing.assert_allclose(found[:, k], exact, atol=2e-4)


# ---------------------------------------------------------------------------- loop and ladder


def noisy_fit(rule, n, **kw):
    """A fit of 5 % wrong labels at a given kernel."""
    rng = np.random.RandomState(5)
    X = rng.randn(n, 2)
    y = np.where(X[:, 0] + 0.3 * rng.randn(n) > 0, 1.0, -1.0)
    y[:4] *= -1
    setting = dict(optimizer=None, label_noise=0.05, tol=1e-8, max_iter=500, **kw)
    clf = RelaxedEPClassifier(ConstantKernel(6.0) * RBF(1.0), rule=rule, **setting)
    return clf.fit(X, y), y


def double_loop(clf, y):
    plan, setting = clf._plan, clf._fitted.runs[0].attributes["setting"]
    return MarginalDoubleLoop(plan.labels.ep(plan, setting, y), plan.rule.exponent)


@pytest.mark.parametrize("rule", ["ep", "power"])
def test_double_loop_reaches_the_fixed_point(rule):
    clf, y = noisy_fit(rule, 20)
    watch, limits = Trace(), dict(max_iter=200, tol=1e-6)
    double = double_loop(clf, y).solve(np.zeros((2, 20)), monitor=watch, **limits)
    assert clf.converged_ and double.converged
    # the certificate: what is recorded never falls
    assert np.diff(watch.history["log_evidence"]).min() > -1e-9
    np.testing.assert_allclose(double.x[0], clf.site_precision_, atol=1e-5)
    np.testing.assert_allclose(double.x[1], clf.site_shift_, atol=1e-5)
    assert abs(double.evaluation.record["log_evidence"] - clf.log_evidence_) < 1e-9


# the last with copies of rows, which share f but have a noise each, and through inducing points
@pytest.mark.parametrize(
    ("rule", "more"),
    [("ep", {}), ("power", {}), ("power", dict(inducing_points=[[0.0, 0.0], [1.0, 1.0]]))],
)
def test_double_loop_derivatives(rule, more):
    clf, y = noisy_fit(rule, 8, **more)
    loop, rng = double_loop(clf, y), np.random.RandomState(0)
    weight = rng.uniform(1.0, 3.0, 8) if more else np.ones(8)
    loop.ep.weight = loop.ep.structure.weight = weight
    state = loop.ep.structure.posterior(np.full(8, 0.2), np.zeros(8))
    m = np.stack([1.0 / state.var, state.mean / state.var])
    x = np.stack([0.1 * rng.rand(8), 0.3 * rng.randn(8)])
    saddle, step = loop.at(x, m), np.zeros_like(x)
    curvature = loop.curvature(saddle)
    for k, index in enumerate(np.ndindex(*x.shape)):
        step[index] = 1e-5
        up, down = loop.at(x + step, m), loop.at(x - step, m)
        assert abs((up.value - down.value) / 2e-5 - saddle.of_sites[index]) < 1e-6
        bent = (up.of_sites - down.of_sites) / 2e-5
        np.testing.assert_allclose(bent.ravel(), curvature[k], atol=1e-6)
        moved = [loop.at(x, m + way * step).value for way in (1, -1)]
        assert abs((moved[0] - moved[1]) / 2e-5 - saddle.of_marginals[index]) < 1e-6
        step[index] = 0.0


def test_the_double_loop_begins_at_sites_without_a_cavity():
    clf, y = noisy_fit("ep", 20)
    loop = double_loop(clf, y)
    sharp = np.stack([np.where(np.arange(20) < 10, 5.0, -0.05), np.zeros(20)])
    result = loop.solve(sharp, max_iter=200, tol=1e-4)
    assert result.converged
    assert abs(result.evaluation.record["log_evidence"] - clf.log_evidence_) < 1e-5


@pytest.mark.parametrize(
    "rule",
    [
        dict(rule="ep"),
        *(pytest.param(r, marks=pytest.mark.slow) for r in (dict(rule="power", power=0.8), {})),
    ],
)
def test_a_bare_step_comes_to_rest_where_sweeps_do_not(rule):
    X, y, _ = make_noisy_labels_classification(200, flip=0.1, random_state=2)
    kept = dict(optimizer=None, label_noise=0.1, latent_noise=1e-6, max_iter=200)
    clf = RelaxedEPClassifier(RBF(1.0), **rule, **kept).fit(X, y)
    assert clf.converged_ and clf.solver_path_[-1] == "double loop"
    assert np.diff(clf.history_["log_evidence"][-8:]).min() > -1e-9


@pytest.mark.parametrize("seed", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_the_double_loop_ends_on_random_problems(seed):
    rng = np.random.default_rng(seed)
    for k in range(8):
        n = int(rng.integers(5, 40))
        X, y = rng.standard_normal((n, 2)), np.where(rng.random(n) < 0.5, 1.0, -1.0)
        kernel = ConstantKernel(10 ** rng.uniform(-2, 4)) * RBF(10 ** rng.uniform(-1, 1))
        weight = np.ones(n) if k % 2 else rng.uniform(0.5, 4.0, n)
        structure = LatentNoise(DenseGP(kernel(X)), 10 ** rng.uniform(-6, 0), weight)
        factor, u = LabelErrorStep(10 ** rng.uniform(-4, -0.4)), rng.choice([1.0, 0.5, 0.1])
        ep = WholeEP(structure, factor, y, weight, MomentMatching() if u == 1 else Power(u))
        watch = Trace()
        found = MarginalDoubleLoop(ep, u).solve(
            np.zeros((2, n)), max_iter=200, tol=1e-4, monitor=watch
        )
        assert found.converged and ep.evaluate(found.x).residual < 1e-4
        assert np.diff(watch.history["log_evidence"]).min(initial=0.0) > -1e-9


def test_many_rows_have_power_ep_in_its_place(monkeypatch):
    monkeypatch.setattr(LIMITS, "double_loop", 199)
    X, y, _ = make_noisy_labels_classification(200, flip=0.1, random_state=2)
    kept = dict(optimizer=None, label_noise=0.1, latent_noise=1e-6, max_iter=150)
    with pytest.warns(ConvergenceWarning, match="max_iter|no better step"):
        clf = RelaxedEPClassifier(RBF(1.0), rule="ep", **kept).fit(X, y)
    assert clf.solver_path_ == ["ep", "ep, damping 0.25", "power 0.5"]


def test_loop_stops_where_no_step_is_proper():
    def evaluate(x):
        if x[0] > 0:
            raise ImproperPosterior("no")
        return Evaluation(x + 1.0, 1.0)

    result = iterate(evaluate, np.zeros(1), max_iter=10, tol=1e-3)
    assert not result.converged and result.n_iter == 1 and result.x[0] == 0


def test_improper_extrapolation_gives_way_to_the_plain_step():
    class Wild(Anderson):
        def __call__(self, x, evaluation):
            return x + 100.0

    refused = []

    def evaluate(x):
        if abs(x[0]) > 10:
            refused.append(x)
            raise ImproperPosterior("no")
        return Evaluation(0.5 * x, abs(float(x[0])))

    result = iterate(
        evaluate,
        np.ones(1),
        max_iter=50,
        tol=1e-6,
        damping=1.0,
        acceleration=Wild(),
        give_up_after=60,
    )
    assert result.converged and len(refused) > 0


def test_label_noise_units():
    f = np.array([-2.0, 0.5])
    expected = np.log(0.1 + 0.8 * np.exp(log_ndtr(f / 2.0)))
    np.testing.assert_allclose(LabelNoise(0.1, 4.0).log_prob(1.0, f), expected, rtol=1e-12)


def _quadratic(centre, curvature, seen):
    """Evidence -|sqrt(curvature) (theta - centre)|^2 / 2 that notes where it is evaluated."""

    def evaluate(theta, near):
        seen.append(theta.copy())
        away = theta - centre
        return Node(theta, -0.5 * curvature @ away**2, 0.0, -curvature * away, 0.0, None)

    return evaluate


@pytest.mark.parametrize("start", [np.array([2.0, -1.0]), np.array([0.3, 0.4])])
def test_first_step_of_the_search_is_as_long_as_asked(start):
    """And the optimum is that of a search without the bound, from one evaluation at the start."""
    centre, curvature = np.array([0.3, 0.4]), np.array([5.0, 9.0])
    bounds = np.array([[-3.0, 3.0], [-3.0, 3.0]])
    seen: list = []
    evaluate, short = _quadratic(centre, curvature, seen), Accuracy(first_step=0.5)
    mode, _ = search_mode(evaluate, start, bounds, short, max_iter=50)
    np.testing.assert_allclose(mode.phi, centre, atol=1e-3)
    assert sum(np.array_equal(t, start) for t in seen) == 1
    if np.any(start != centre):
        np.testing.assert_allclose(np.linalg.norm(seen[1] - start), 0.5, rtol=1e-9)


def test_first_step_keeps_the_bounds():
    bounds, seen = np.array([[-3.0, 3.0], [0.7, 3.0]]), []
    evaluate = _quadratic(np.array([0.3, 0.4]), np.array([5.0, 9.0]), seen)
    short = Accuracy(first_step=0.5, max_line_search=5)
    mode, _ = search_mode(evaluate, np.array([2.0, 2.0]), bounds, short, max_iter=50)
    np.testing.assert_allclose(mode.phi, [0.3, 0.7], atol=1e-3)
    assert np.all(np.array(seen) >= bounds[:, 0] - 1e-12)


def test_moments_of_tiny_rates_stay_finite():
    """Sums of positive terms: nothing underflows where the factor is almost certain."""
    z = np.array([-50.0, -20.0, -1.0, 0.0, 1.0, 20.0, 50.0])
    m = moments(z, 1e-12)
    exact = np.logaddexp(np.log1p(-1e-12) + log_ndtr(z), np.log(1e-12) + log_ndtr(-z))
    np.testing.assert_allclose(m.log_z, exact, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(m.wrong, np.exp(np.log(1e-12) + log_ndtr(-z) - exact), rtol=1e-9)


@pytest.mark.parametrize("hyperparameters", ["integrate", "mode"])
def test_evidence_without_posterior_at_the_start_is_refused(hyperparameters):
    class Unknown(Probit):
        def tilted(self, y, mean, var):
            return np.full((3, len(mean)), np.nan)

    X, y = np.arange(8.0)[:, None], np.arange(8) % 2
    options = dict(hyperparameters=hyperparameters, acceleration=None)
    clf = EPGaussianProcessClassifier(likelihood=Unknown(), **options)
    with pytest.raises(ValueError, match="not finite at the initial kernel"):
        clf.fit(X, y)
