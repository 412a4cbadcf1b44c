"""Label errors in the engine: step moments, relaxed cost, sites of either sign, double loop."""

import numpy as np
import pytest
from oracles import oracle
from scipy.special import log_ndtr, ndtr
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep._engine.contracts import WholeEP
from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep._engine.hyper import Node
from sklearn_ep._engine.likelihoods import LabelNoise, Probit
from sklearn_ep._engine.loop import Anderson, Evaluation, Result, iterate
from sklearn_ep._engine.rules import MomentMatching, Power
from sklearn_ep._engine.sites import Sites
from sklearn_ep.gaussian_process._dense_gp import DenseGP, DenseGPPosterior
from sklearn_ep.gaussian_process._hyperparameters import Accuracy, find_mode, or_refuse
from sklearn_ep.gaussian_process.label_errors.ladder import MarginalDoubleLoop, Rung, climb
from sklearn_ep.gaussian_process.label_errors.noise import LatentNoise
from sklearn_ep.gaussian_process.label_errors.relaxed_rule import (
    Relaxed,
    relaxed_cost,
    relaxed_gamma,
    steepest_fall,
)
from sklearn_ep.gaussian_process.label_errors.step import LabelErrorStep, step_moments

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


def divergence(z, rate):
    """Divergence from the tilted distribution to its moment match: the cost without relaxation."""
    return relaxed_cost(0.0, z, 0.0, 0.0, rate, "normalised")


@pytest.mark.parametrize("case", ORACLES["kappa"]["cases"])
def test_divergence_oracle(case):
    z, rate = np.array([case["z"]]), case["eps"]
    m = step_moments(z, *LabelErrorStep(rate).log_weights)
    np.testing.assert_allclose(m.log_z, case["logZ"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(z + m.slope, case["mean"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(m.spread, case["var"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(divergence(z, rate), case["kappa"], atol=1e-9)


def test_certain_label_far_out():
    # mean and variance of a normal tail: z^-2 and slope + z = -1/z to leading order
    z = np.array([-1e2, -1e4, -1e6])
    m = step_moments(z, *LabelErrorStep(0.0).log_weights)
    np.testing.assert_allclose(m.spread, 1 / z**2, rtol=1e-3)
    assert np.all(np.isfinite(m.log_z)) and np.all(m.spread > 0)
    assert np.all(m.wrong == 0)
    np.testing.assert_allclose(divergence(z, 0.0), 1 - 0.5 * np.log(np.pi), atol=0.01)
    # continuous where the series takes over
    near = step_moments(np.array([-30 - 1e-9, -30 + 1e-9]), *LabelErrorStep(0.0).log_weights)
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
    grid = np.concatenate([[0.0], np.geomspace(1e-5, 1e3, 8000)])[:, None]
    for cost in ("mass", "normalised"):
        gamma = relaxed_gamma(z0, mubar, 0.05, rate, cost)
        ours = relaxed_cost(gamma, z0, mubar, 0.05, rate, cost)
        assert np.all(ours <= relaxed_cost(grid, z0, mubar, 0.05, rate, cost).min(0) + 1e-7)
        assert np.sum(gamma > 0) > 20
    assert not np.any(relaxed_gamma(z0, mubar, np.inf, rate))


@pytest.mark.parametrize("cost", ["mass", "normalised"])
@pytest.mark.parametrize("rate", [0.0, 1e-300, 1e-12, 1e-4, 0.05, 0.2, 0.45])
def test_divergence_falls_no_faster_than_its_bound(rate, cost):
    """Against differences: rows that are not searched on these grounds do not relax."""
    rng = np.random.RandomState(2)
    z0, mubar = 6 * rng.randn(900), rng.choice([1.0, 5.0, 40.0], 900) * rng.randn(900)
    gamma = np.concatenate([[0.0], np.geomspace(1e-4, 1e2, 400)])[:, None]
    costs = relaxed_cost(gamma, z0, mubar, 0.0, rate, cost)
    steepest = np.max(-np.diff(costs, axis=0) / np.diff(gamma, axis=0), axis=0)
    assert np.all(steepest <= steepest_fall(z0, mubar, rate, cost) + 1e-12)
    skipped = steepest_fall(z0, mubar, rate, cost) <= 0.2
    gamma = relaxed_gamma(z0, mubar, 0.2, rate, cost)
    assert not np.any(gamma[skipped])
    # a site whose centre is near agrees with its cavity
    near = np.abs(mubar - z0) < 2
    assert rate != 0.2 or np.all(skipped[near & (np.abs(mubar) < 2)])


# ---------------------------------------------------------------------------- either sign


@pytest.mark.parametrize("kind", ["mixed", "positive", "all negative", "one"])
def test_sites_of_either_sign(kind):
    X, kernel, precision, shift = problem(negative=0.0 if kind == "positive" else 0.3)
    if kind == "all negative":
        precision = -0.005 * np.abs(precision)
    if kind == "one":
        precision = np.zeros(30)
        precision[4] = -0.1
    K, T = kernel(X), np.diag(precision)
    S = np.linalg.solve(np.eye(30) + K @ T, K)
    explained = T - T @ S @ T
    state = DenseGP(K).posterior(precision, shift)
    np.testing.assert_allclose(state.mean, S @ shift, atol=1e-12)
    np.testing.assert_allclose(state.var, np.diag(S), atol=1e-12)
    np.testing.assert_allclose(K @ state.alpha, state.mean, atol=1e-12)
    log_det = np.linalg.slogdet(np.eye(30) + K @ T)[1]
    assert abs(state.log_evidence - 0.5 * (shift @ S @ shift - log_det)) < 1e-10
    R = np.outer(state.alpha, state.alpha) - explained
    np.testing.assert_allclose(state.evidence_curvature(), R, atol=1e-11)
    X_new = np.random.RandomState(1).randn(6, 2)
    K_new = kernel(X_new, X)
    cov = kernel(X_new) - K_new @ explained @ K_new.T
    predict = DenseGPPosterior(kernel, X, state, Probit())
    np.testing.assert_allclose(predict.latent(X_new)[0], K_new @ state.alpha, atol=1e-12)
    np.testing.assert_allclose(predict.latent(X_new)[1], np.diag(cov), atol=1e-12)
    np.testing.assert_allclose(predict.covariance(X_new, X_new), cov, atol=1e-12)
    np.testing.assert_allclose(predict.covariance(X_new[:2], X_new), cov[:2], atol=1e-12)


def test_improper_sites_raise():
    X, kernel, precision, shift = problem()
    with pytest.raises(ImproperPosterior):
        DenseGP(kernel(X)).posterior(-np.abs(precision), shift)
    with pytest.raises(ImproperPosterior):
        LatentNoise(DenseGP(kernel(X)), 1.0, np.ones(30)).posterior(
            np.where(np.arange(30) == 2, -1.5, precision), shift
        )


def test_latent_noise_of_copies():
    # copies of a row share f and have a noise each: the same as rows written out
    X, kernel, precision, shift = problem(12)
    copies = np.random.RandomState(2).randint(1, 4, 12)
    index = np.repeat(np.arange(12), copies)
    K = kernel(X[index]) + 0.7 * np.eye(len(index))
    written = DenseGP(K).posterior(precision[index], shift[index])
    tied = LatentNoise(DenseGP(kernel(X)), 0.7, copies.astype(float)).posterior(
        copies * precision, copies * shift
    )
    first = np.r_[0, np.cumsum(copies)[:-1]]
    np.testing.assert_allclose(tied.mean, written.mean[first], atol=1e-12)
    np.testing.assert_allclose(tied.var, written.var[first], atol=1e-12)
    assert abs(tied.log_evidence - written.log_evidence) < 1e-11


# ---------------------------------------------------------------------------- rules


def site_inputs(n=40, seed=0):
    rng = np.random.RandomState(seed)
    sites = Sites(0.3 * rng.randn(n), rng.randn(n))
    return np.sign(rng.randn(n)), sites, rng.randn(n), rng.gamma(2, 0.3, n)


def test_relaxed_rule_meets_the_moment_condition():
    # q r is the moment projection of t r q_cavity: checked by brute force on a grid
    y, sites, mean, var = site_inputs()
    update = Relaxed(0.02, "mass", 15)(LabelErrorStep(0.1), y, sites, mean, var)
    i = int(np.argmax(update.relaxation))
    gamma = update.relaxation[i]
    assert gamma > 0.05
    P, V = 1 / var[i] - sites.precision[i], mean[i] / var[i] - sites.shift[i]
    centre = sites.shift[i] / sites.precision[i]
    g = np.linspace(-60, 60, 400001)
    log_base = V * g - 0.5 * P * g**2 - 0.5 * gamma * P * (g - centre) ** 2
    tilted = np.exp(log_base - log_base.max()) * np.where(y[i] * g > 0, 0.9, 0.1)
    tilted /= tilted.sum()
    m = tilted @ g
    v = tilted @ (g - m) ** 2
    assert abs(1 / v - (P * (1 + gamma) + update.sites.precision[i])) < 1e-3
    assert abs(m / v - (V + gamma * P * centre + update.sites.shift[i])) < 1e-3


def test_rules_coincide_where_they_should():
    y, sites, mean, var = site_inputs()
    factor = LabelErrorStep(0.1)
    ep = MomentMatching()(factor, y, sites, mean, var)
    for rule in (Power(1.0), Relaxed(1e9, "mass", 15), Relaxed(60.0, "normalised", 15)):
        other = rule(factor, y, sites, mean, var)
        np.testing.assert_allclose(other.sites.precision, ep.sites.precision, rtol=1e-12)
        np.testing.assert_allclose(other.sites.shift, ep.sites.shift, rtol=1e-12)
        np.testing.assert_allclose(other.log_term, ep.log_term, rtol=1e-12)


def test_frozen_relaxation():
    y, sites, mean, var = site_inputs()
    factor, rule = LabelErrorStep(0.1), Relaxed(0.05, "mass", 2)
    rule(factor, y, sites, mean, var)
    before = rule(factor, y, sites, mean, var).relaxation
    moved = Sites(1.001 * sites.precision, 1.001 * sites.shift)
    after = rule(factor, y, moved, mean, var).relaxation
    assert np.sum(before > 0) > 5
    # b stays, gamma follows the cavity; what does not pay any more is released, nothing is added
    cav_before, cav_after = 1 / (1 / var - sites.precision), 1 / (1 / var - moved.precision)
    kept = after > 0
    np.testing.assert_allclose((after / cav_after)[kept], (before / cav_before)[kept], rtol=1e-10)
    assert np.all(before[kept] > 0) and kept.sum() > 5


# ---------------------------------------------------------------------------- loop and ladder


def noisy_ep(rule=None, rate=0.05, amplitude=6.0, n=40):
    rng = np.random.RandomState(5)
    X = rng.randn(n, 2)
    y = np.where(X[:, 0] + 0.3 * rng.randn(n) > 0, 1.0, -1.0)
    y[:4] *= -1
    structure = LatentNoise(DenseGP(amplitude * RBF(1.0)(X)), 1.0, np.ones(n))
    return WholeEP(structure, LabelErrorStep(rate), y, np.ones(n), rule or MomentMatching())


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_double_loop_reaches_the_fixed_point(exponent):
    ep = noisy_ep(MomentMatching() if exponent == 1.0 else Power(exponent), n=20)
    start = np.zeros((2, 20))
    plain = iterate(ep.evaluate, start, max_iter=500, tol=1e-8, damping=0.5)
    double = iterate(MarginalDoubleLoop(ep, exponent).evaluate, start, max_iter=200, tol=1e-4)
    assert plain.converged and double.converged
    np.testing.assert_allclose(double.x, plain.x, atol=2e-3)
    gap = double.evaluation.record["log_evidence"] - plain.evaluation.record["log_evidence"]
    assert abs(gap) < 1e-5


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_double_loop_gradient(exponent):
    ep = noisy_ep(n=8)
    loop = MarginalDoubleLoop(ep, exponent)
    state = ep.structure.posterior(np.full(8, 0.2), np.zeros(8))
    rng = np.random.RandomState(0)
    x = np.stack([0.1 * rng.rand(8), 0.3 * rng.randn(8)])
    _, gradient = loop._bound(x, state.mean, state.var)
    step = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step[index] = 1e-5
        up = loop._bound(x + step, state.mean, state.var)[0]
        down = loop._bound(x - step, state.mean, state.var)[0]
        step[index] = 0.0
        assert abs((up - down) / 2e-5 - gradient[index]) < 1e-6


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

    def evaluate(x):
        if abs(x[0]) > 10:
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
    assert result.converged and result.n_halved > 0


def test_ladder_merges_and_stops():
    def rung(name, n, reason):
        def run(x, max_iter, monitor):
            for _ in range(n):
                monitor.begin()
                monitor.end({"residual": len(name)})
            return Result(x + 1, None, n, reason, {}, 1)

        return Rung(name, run)

    a, bb, c = rung("a", 3, "max_iter"), rung("bb", 2, "converged"), rung("c", 9, "converged")
    result, names = climb([a, bb, c], 0.0, 50)
    assert names == ["a", "bb"] and result.converged and result.n_iter == 5 and result.x == 2.0
    assert result.n_halved == 2
    np.testing.assert_array_equal(result.history["residual"], [1, 1, 1, 2, 2])
    result, names = climb([rung("a", 3, "asked"), bb], 0.0, 50)
    assert names == ["a"] and result.reason == "asked"
    result, names = climb([rung("a", 3, "stuck"), bb], 0.0, 50)
    assert names == ["a", "bb"] and result.reason == "converged"
    result, names = climb([a, bb], 0.0, 3)
    assert names == ["a"] and result.n_iter == 3 and result.reason == "max_iter"


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
    mode, _ = find_mode(evaluate, start, bounds, max_iter=50, accuracy=short)
    np.testing.assert_allclose(mode.phi, centre, atol=1e-3)
    assert sum(np.array_equal(t, start) for t in seen) == 1
    if np.any(start != centre):
        np.testing.assert_allclose(np.linalg.norm(seen[1] - start), 0.5, rtol=1e-9)


def test_first_step_keeps_the_bounds():
    bounds, seen = np.array([[-3.0, 3.0], [0.7, 3.0]]), []
    evaluate = _quadratic(np.array([0.3, 0.4]), np.array([5.0, 9.0]), seen)
    short = Accuracy(first_step=0.5, max_line_search=5)
    mode, _ = find_mode(evaluate, np.array([2.0, 2.0]), bounds, max_iter=50, accuracy=short)
    np.testing.assert_allclose(mode.phi, [0.3, 0.7], atol=1e-3)
    assert np.all(np.array(seen) >= bounds[:, 0] - 1e-12)


def test_moments_of_tiny_rates_stay_finite():
    """Sums of positive terms: nothing underflows where the factor is almost certain."""
    z = np.array([-50.0, -20.0, -1.0, 0.0, 1.0, 20.0, 50.0])
    m = step_moments(z, *LabelErrorStep(1e-12).log_weights)
    exact = np.logaddexp(np.log1p(-1e-12) + log_ndtr(z), np.log(1e-12) + log_ndtr(-z))
    np.testing.assert_allclose(m.log_z, exact, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(m.wrong, np.exp(np.log(1e-12) + log_ndtr(-z) - exact), rtol=1e-9)


def test_evidence_without_posterior_at_the_start_is_refused():
    bounds = np.array([[-9.0, 9.0], [-9.0, 9.0]])
    with pytest.raises(ValueError, match="not finite at the initial kernel"):
        or_refuse(find_mode(lambda theta, near: None, np.zeros(2), bounds, max_iter=5))
