"""Scalar factors: log Z against quadrature, derivatives against differences, tails finite."""

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, log_expit, log_ndtr, ndtr

from sklearn_ep._engine.likelihoods import Factor, LabelNoise, Logit, Probit
from sklearn_ep._engine.quadrature import logistic_mixture, logistic_moments, quick_ndtr
from sklearn_ep._engine.rules import MomentMatching, Power
from sklearn_ep._engine.sites import Sites, copy_cavity

FACTORS = [Probit(), Logit(), LabelNoise(0.1), LabelNoise(0.0), LabelNoise(0.4)]
ids = [f"{type(f).__name__}{getattr(f, 'rate', '')}" for f in FACTORS]
every_factor = pytest.mark.parametrize("factor", FACTORS, ids=ids)


class ByQuadrature(Factor):
    """A factor that knows its log probability only."""

    def __init__(self, factor):
        self.log_prob = factor.log_prob


def random_cavities(n=300, seed=0):
    rng = np.random.default_rng(seed)
    var = np.exp(rng.uniform(-6, 6, n))
    return rng.choice([-1.0, 1.0], n), rng.normal(size=n) * np.sqrt(1 + var) * 2, var


@every_factor
def test_log_z_is_the_integral(factor):
    for y, m, v in zip(*random_cavities(12), strict=True):
        sd = np.sqrt(v)
        points = [x for x in (-1.0, 0.0, 1.0) if abs(x - m) < 12 * sd]
        integral = quad(
            lambda f, y=y, m=m, v=v: np.exp(factor.log_prob(y, f) - (f - m) ** 2 / (2 * v)),
            m - 12 * sd,
            m + 12 * sd,
            points=sorted({m, *points}),
            epsabs=0,
            epsrel=1e-11,
            limit=500,
        )[0] / np.sqrt(2 * np.pi * v)
        np.testing.assert_allclose(factor.tilted(y, m, v).log_z, np.log(integral), atol=1e-8)


@every_factor
def test_closed_form_equals_the_default_by_quadrature(factor):
    y, m, v = random_cavities()
    closed, default = factor.tilted(y, m, v), ByQuadrature(factor).tilted(y, m, v)
    np.testing.assert_allclose(closed.log_z, default.log_z, atol=2e-8, rtol=1e-8)
    np.testing.assert_allclose(closed.gradient, default.gradient, atol=1e-8, rtol=2e-6)
    np.testing.assert_allclose(closed.curvature, default.curvature, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("exponent", [0.02, 0.3, 0.9])
def test_powers_of_the_logistic_function_by_many_nodes(exponent):
    factor, (y, m, v) = Logit().powered(exponent), random_cavities(600)
    x = np.linspace(-14.0, 14.0, 4001)[:, None]
    f = y * (m + np.sqrt(v) * x)
    log_weight = exponent * log_expit(f) - 0.5 * x**2 + np.log(x[1] - x[0])
    weight = np.exp(log_weight - log_weight.max(axis=0))
    total, rest = weight.sum(axis=0), exponent * expit(-f)
    log_z = log_weight.max(axis=0) + np.log(total) - 0.5 * np.log(2.0 * np.pi)
    mean = (weight * rest).sum(axis=0) / total
    curvature = (weight * (rest * expit(f) - (rest - mean) ** 2)).sum(axis=0) / total
    told = factor.tilted(y, m, v)
    np.testing.assert_allclose(told.log_z, log_z, atol=2e-7)
    np.testing.assert_allclose(told.gradient, y * mean, rtol=1e-6, atol=1e-12)
    # nodes are one unit apart where the sd is almost 16
    np.testing.assert_allclose(told.curvature, curvature, rtol=2e-5, atol=1e-12)
    # rows are their own problems, whatever block they are in
    for one, all_rows in zip(factor.tilted(y[::50], m[::50], v[::50]), told, strict=True):
        np.testing.assert_allclose(one, all_rows[::50], rtol=1e-10)


@every_factor
@pytest.mark.parametrize("var", [1e-4, 1.0, 1e4])
def test_derivatives_against_differences(factor, var):
    m = np.linspace(-8, 8, 41) * np.sqrt(1 + var)
    y, v, h = np.ones_like(m), np.full_like(m, var), 1e-4 * np.sqrt(1 + var)
    up, at, down = (factor.tilted(y, m + s * h, v) for s in (1, 0, -1))
    np.testing.assert_allclose(at.gradient, (up.log_z - down.log_z) / (2 * h), rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(
        at.curvature, -(up.gradient - down.gradient) / (2 * h), rtol=2e-6, atol=1e-8
    )


@every_factor
@pytest.mark.parametrize("var", [1e-10, 1e-3, 1.0, 1e6])
def test_tails_are_finite_and_signed(factor, var):
    m = np.r_[-np.logspace(6, 0, 25), 0, np.logspace(0, 6, 25)]
    y = np.ones_like(m)
    t = factor.tilted(y, m, np.full_like(m, var))
    for a in t:
        assert np.all(np.isfinite(a))
    assert np.all(t.log_z <= 1e-12) and np.all(np.diff(t.log_z) >= -1e-9)
    assert np.all(t.gradient >= 0)
    if factor.log_concave:
        assert np.all(t.curvature >= 0)
        assert np.all(t.curvature * var < 1)
    mirrored = factor.tilted(-y, -m, np.full_like(m, var))
    np.testing.assert_array_equal(mirrored.log_z, t.log_z)
    np.testing.assert_array_equal(mirrored.gradient, -t.gradient)


def test_probit_tail_keeps_its_digits():
    mpmath.mp.dps = 40
    for z in (-1e6, -1e3, -60.0, -49.9, -20.0, -3.0, 0.0, 5.0):
        cdf = mpmath.erfc(-mpmath.mpf(z) / mpmath.sqrt(2)) / 2
        exact = mpmath.exp(-(mpmath.mpf(z) ** 2) / 2) / mpmath.sqrt(2 * mpmath.pi) / cdf
        tilted = Probit().tilted(1.0, np.array([z]), np.zeros(1))
        np.testing.assert_allclose(tilted.gradient[0], float(exact), rtol=1e-13)
        np.testing.assert_allclose(tilted.curvature[0], float(exact * (exact + z)), rtol=1e-11)
    np.testing.assert_array_equal(
        Probit().tilted(1.0, np.array([-1e6]), np.array([3.0])).log_z, log_ndtr([-5e5])
    )


def test_logistic_moments_against_high_precision():
    mpmath.mp.dps = 25
    ordinary = [(2.0, 1e-3), (0.3, 2.0), (-1.0, 2.1), (-5.0, 10.0), (1.0, 10.5)]
    for m, v in [(-40.0, 0.5), *ordinary, (4.0, 100.0), (-300.0, 1e3)]:
        sd = mpmath.sqrt(v)
        ends = sorted(
            {m - 14 * sd, m, m + 14 * sd, -60, 0, 60, m + v - 14 * sd, m + v, m + v + 14 * sd}
        )

        def density(f, m=m, v=v):
            return mpmath.exp(-((f - m) ** 2) / (2 * v)) / (1 + mpmath.exp(-f))

        z = mpmath.quad(density, ends)
        g = mpmath.quad(lambda f: density(f) / (1 + mpmath.exp(f)), ends) / z
        h = mpmath.quad(lambda f: density(f) * mpmath.tanh(f / 2) / (1 + mpmath.exp(f)), ends) / z
        log_z, gradient, curvature = logistic_moments(np.array([m]), np.array([v]))
        want = mpmath.log(z / mpmath.sqrt(2 * mpmath.pi * v))
        np.testing.assert_allclose(log_z[0], float(want), rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(gradient[0], float(g), rtol=1e-8)
        np.testing.assert_allclose(curvature[0], float(g**2 + h), rtol=1e-7)


@pytest.mark.parametrize("var", [1e-3, 0.7, 1.5, 4.0, 10.0, 80.0])
def test_rough_logistic_moments_within_their_stated_errors(var):
    mean = np.linspace(-60.0, 30.0, 181)
    exact, rough = (logistic_moments(mean, np.full(181, var), rough) for rough in (False, True))
    for a, b in zip(exact, rough, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert np.array_equal(exact, rough) == (var <= 1.0)


def test_five_term_mixture_within_its_stated_errors():
    x, w = np.polynomial.hermite_e.hermegauss(120)
    w = w / w.sum()
    mean = np.linspace(-8, 8, 33)
    for var in (1e-3, 0.3, 2.0):
        f = mean[:, None] + np.sqrt(var) * x
        sigma, softplus, slope = logistic_mixture(mean, var)
        np.testing.assert_allclose(sigma, expit(f) @ w, atol=7e-7)
        np.testing.assert_allclose(softplus, -log_expit(-f) @ w, atol=2.1e-6)
        np.testing.assert_allclose(slope, (expit(f) * expit(-f)) @ w, atol=2.7e-6)


def test_cavity_times_site_is_the_posterior():
    rng = np.random.default_rng(0)
    cm, cv = rng.normal(size=50), rng.exponential(size=50)
    sites = Sites(rng.exponential(size=50), rng.normal(size=50))
    var = 1 / (1 / cv + sites.precision)
    mean = var * (cm / cv + sites.shift)
    back = copy_cavity(sites, mean, var)
    np.testing.assert_allclose(back.mean, cm, atol=1e-10)
    np.testing.assert_allclose(back.var, cv, rtol=1e-10)
    assert np.all(back.removed == 1)
    i = 7
    mass = quad(
        lambda f: (
            np.exp(sites.shift[i] * f - sites.precision[i] * f * f / 2)
            * np.exp(-((f - cm[i]) ** 2) / (2 * cv[i]))
            / np.sqrt(2 * np.pi * cv[i])
        ),
        -40,
        40,
        points=[cm[i]],
    )[0]
    y = np.ones(50)
    update = MomentMatching()(Probit(), y, sites, mean, var)
    found = Probit().tilted(y, cm, cv).log_z - update.log_term
    np.testing.assert_allclose(found[i], np.log(mass), atol=1e-8)


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_a_cavity_lacks_a_copy_or_what_leaves_enough_of_a_row_of_weight_below_one(exponent):
    """What is removed does not jump where sites change little."""
    precision, weight = np.linspace(0.01, 6.0, 121), 0.2
    sites, var = Sites(precision, np.ones(121)), 1.0 / (1.0 + weight * precision)
    found = copy_cavity(sites, np.zeros(121), var, weight, exponent)
    copies = found.removed
    np.testing.assert_allclose(1.0 / found.var, 1.0 / var - copies * precision)
    assert np.all(1.0 / found.var >= 0.3 - 1e-9)
    assert copies[0] == exponent and weight < copies[-1] < 0.8
    assert np.max(np.abs(np.diff(copies))) < 0.05
    whole = copy_cavity(sites, np.zeros(121), 1.0 / (1.0 + precision), 1.0, exponent)
    np.testing.assert_array_equal(whole.removed, exponent)


def test_improper_cavities_are_reported_and_stay_finite():
    sites = Sites(np.array([2.0, 0.1]), np.array([1.0, 1.0]))
    cav = copy_cavity(sites, np.zeros(2), np.ones(2))
    np.testing.assert_array_equal(cav.removed, [0, 1])
    assert (cav.mean[0], cav.var[0]) == (0.0, 1.0)
    update = MomentMatching()(Probit(), np.ones(2), sites, np.zeros(2), np.ones(2))
    assert update.removed.sum() == 1 and all(np.isfinite(a).all() for a in update.sites)


@every_factor
def test_moment_matching_matches_moments(factor):
    y, m, v = random_cavities(100)
    zero = Sites.zero(100)
    update = MomentMatching()(factor, y, zero, m, v)
    precision = 1 / v + update.sites.precision
    mean = (m / v + update.sites.shift) / precision
    t = factor.tilted(y, m, v)
    np.testing.assert_allclose(mean, m + v * t.gradient, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(1 / precision, v - v**2 * t.curvature, rtol=1e-6)


@every_factor
def test_power_one_is_moment_matching(factor):
    y, m, v = random_cavities(60)
    sites = Sites(np.full(60, 0.05) / v, np.full(60, 0.02))
    a = MomentMatching()(factor, y, sites, m, v)
    b = Power(1.0)(factor, y, sites, m, v)
    np.testing.assert_allclose(b.sites.precision * v, a.sites.precision * v, atol=1e-7)
    np.testing.assert_allclose(b.log_term, a.log_term, atol=1e-7)


@pytest.mark.parametrize("exponent", [6, 30, 150, 250])
def test_logistic_moments_at_huge_variances_are_those_of_a_step(exponent):
    """E sigma(f) goes to Phi(m / sd), with an error of the order of 1 / var."""
    sd = 10.0 ** (exponent / 2)
    z = np.array([-30.0, -3.0, -0.5, 0.0, 2.0])
    with np.errstate(all="raise", under="ignore"):
        log_z, gradient, curvature = logistic_moments(z * sd, np.full(5, sd**2))
    mills = np.exp(-0.5 * z**2 - log_ndtr(z)) / np.sqrt(2 * np.pi)
    small = 1e3 * 10.0**-exponent + 1e-11
    np.testing.assert_allclose(log_z, log_ndtr(z), rtol=small)
    np.testing.assert_allclose(gradient * sd, mills, rtol=small)
    assert np.all(np.isfinite(curvature))


@pytest.mark.parametrize("exponent", [6, 30, 150, 250])
def test_logistic_moments_where_density_and_tail_balance(exponent):
    """At m = -a v the integrand is exp(-a f) sigma(f), whose integral is pi / sin(pi a)."""
    a, var = np.array([0.1, 0.25, 0.4]), 10.0**exponent
    with np.errstate(all="raise", under="ignore"):
        log_z, gradient, _ = logistic_moments(-a * var, np.full(3, var))
    shape = np.log(np.pi / np.sin(np.pi * a)) - 0.5 * np.log(2 * np.pi * var)
    np.testing.assert_allclose(log_z, shape - 0.5 * a**2 * var, rtol=1e-14, atol=1e-4)
    np.testing.assert_allclose(gradient, a, rtol=1e-4)


def test_logistic_moments_without_variance_are_those_of_the_point():
    mean = np.array([-800.0, -3.0, 0.0, 2.0, 40.0])
    log_z, gradient, curvature = logistic_moments(mean, np.zeros(5))
    wrong = expit(-mean)
    np.testing.assert_allclose(log_z, log_expit(mean), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(gradient, wrong, rtol=1e-12)
    np.testing.assert_allclose(curvature, wrong * (1 - wrong), rtol=1e-12, atol=1e-17)


def test_the_quick_normal_distribution_function_is_right_and_rises():
    z = np.linspace(-40.0, 40.0, 100_001).astype(np.float32)
    got = quick_ndtr(z)
    assert got.dtype == np.float32 and got.min() >= 0.0 and got.max() == 1.0
    np.testing.assert_allclose(got, ndtr(z.astype(float)), atol=5e-7)
    far = np.array([-np.inf, -1e30, 1e30, np.inf], dtype=np.float32)
    np.testing.assert_allclose(quick_ndtr(far), [0.0, 0.0, 1.0, 1.0], atol=1e-30)
