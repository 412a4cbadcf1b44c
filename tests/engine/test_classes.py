"""Sites and factor of several classes: against quadrature, differences and the binary case."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_softmax, logsumexp
from scipy.stats import multivariate_normal, norm

from sklearn_ep._engine.class_sites import (
    JointEP,
    class_cavities,
    class_log_weights,
    class_update,
    contrast_variances,
)
from sklearn_ep._engine.gaussian import star_times
from sklearn_ep._engine.likelihoods import Probit
from sklearn_ep._engine.noisy_argmax import (
    CLASS_LIKELIHOODS,
    QUICK_SOFTMAX,
    SOFTMAX,
    ErringArgmax,
    NoisyArgmax,
)
from sklearn_ep._engine.sites import Sites

PROBIT, LOGIT = CLASS_LIKELIHOODS["probit"], CLASS_LIKELIHOODS["logit"]


def cavities(n, K, spread, seed=0):
    rng = np.random.default_rng(seed)
    var = rng.uniform(0.05, 5.0, (n, K))
    return rng.integers(0, K, n), spread * rng.normal(size=(n, K)), var


@pytest.mark.parametrize("K", [2, 3, 6])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_the_probability_of_a_label_is_the_integral(K, spread):
    y, mean, var = cavities(3, K, spread)
    log_z = PROBIT.tilted(y, mean, var).log_z
    for i in range(3):
        own, others = mean[i, y[i]], np.delete(mean[i], y[i])
        sd, scale = np.sqrt(1 + var[i, y[i]]), np.sqrt(1 + np.delete(var[i], y[i]))

        def below(t, own=own, others=others, sd=sd, scale=scale):
            return norm.pdf(t, own, sd) * np.prod(norm.cdf((t - others) / scale))

        exact = quad(below, own - 40, own + 40, points=[own], limit=400, epsabs=1e-13)[0]
        if exact > 1e-10:
            assert log_z[i] == pytest.approx(np.log(exact), abs=1e-9)


@pytest.mark.parametrize("factor", [PROBIT, LOGIT, SOFTMAX], ids=["probit", "logit", "softmax"])
def test_the_probability_of_a_certain_label_is_not_above_one(factor):
    y, mean, var = cavities(200, 3, 1.0)
    mean[np.arange(200), y] += np.linspace(5.0, 60.0, 200)
    assert factor.tilted(y, mean, var).log_z.max() <= 0.0
    assert factor.log_z_slopes(y, mean, var)[0].max() <= 0.0


@pytest.mark.parametrize("factor", [PROBIT, LOGIT, SOFTMAX], ids=["probit", "logit", "softmax"])
def test_slopes_in_variances_are_those_of_differences(factor):
    y, mean, var = cavities(30, 4, 4.0)
    mean[0], y[0] = [0.0, 100.0, 0.0, 0.0], 2
    log_z, in_mean, in_var = factor.log_z_slopes(y, mean, var)
    tilted = factor.tilted(y, mean, var)
    np.testing.assert_array_equal(log_z, tilted.log_z)
    np.testing.assert_array_equal(in_mean, tilted.gradient)
    for c in range(4):
        h = np.zeros((30, 4))
        h[:, c] = 1e-4 * var[:, c]
        ends = [factor.tilted(y, mean, var + s * h).log_z for s in (1, -1)]
        np.testing.assert_allclose(in_var[:, c], (ends[0] - ends[1]) / (2 * h[:, c]), 1e-5, 1e-6)


def test_the_quick_softmax_is_close():
    for spread in (1.0, 5.0, 30.0):
        _, mean, var = cavities(200, 5, spread)
        y = np.argmax(mean + np.random.default_rng(1).gumbel(size=mean.shape), axis=1)
        for scale in (0.01, 1.0, 100.0):
            quick, exact = (f.tilted(y, mean, scale * var) for f in (QUICK_SOFTMAX, SOFTMAX))
            np.testing.assert_allclose(quick.log_z, exact.log_z, atol=1e-3)
            np.testing.assert_allclose(quick.gradient, exact.gradient, atol=1e-3)
            stars = (star_times(t.slope, mean) for t in (quick, exact))
            np.testing.assert_allclose(*stars, atol=2e-3)


def test_the_winner_s_link_is_not_lost_where_its_latent_value_is_hardly_known():
    """At a variance of 3400 an error of 4e-4 in the slope makes a link four times as large."""
    y, mean = np.zeros(1, int), np.array([[-268.0, 27.7, 18.7, 221.6]])
    var = np.array([[3433.0, 1e-8, 1e-8, 1376.0]])
    slopes = [factor.tilted(y, mean, var).slope for factor in (QUICK_SOFTMAX, SOFTMAX)]
    quick, fine = (slope[0, [0, 3]] / (1.0 - var[0, [0, 3]] * slope[0, [0, 3]]) for slope in slopes)
    np.testing.assert_allclose(quick, fine, rtol=1e-3)


@pytest.mark.parametrize("K", [2, 3, 5])
def test_slopes_of_the_softmax_have_the_curvature_of_the_winner(K):
    for scale, close in ((0.01, 2e-3), (1.0, 3e-2), (30.0, 6e-2)):
        _, mean, var = cavities(40, K, 1.5)
        y, var = np.argmax(mean, axis=1), scale * var
        e, rows = SOFTMAX.tilted(y, mean, var).slope, np.arange(40)
        step = np.zeros((40, K))
        step[rows, y] = 1e-4
        up, down = (SOFTMAX.tilted(y, mean + s * step, var).gradient[rows, y] for s in (1, -1))
        own = e[rows, y] * (1.0 - e[rows, y] / e.sum(1))
        np.testing.assert_allclose(own, (down - up) / 2e-4, rtol=close, atol=1e-4)
        assert np.all((e > 0) & (var * e < 1))
    # known latent values: the softmax itself
    e = SOFTMAX.tilted(y, mean, np.full((40, K), 1e-6)).slope
    p = np.exp(log_softmax(mean, axis=1))
    np.testing.assert_allclose(e, p, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("factor", [PROBIT, LOGIT], ids=["probit", "logit"])
def test_probabilities_of_all_classes_sum_to_one_before_they_are_normalised(factor):
    for v, tolerance in ((1.0, 1e-10), (10.0, 1e-10), (100.0, 1e-6), (1000.0, 1e-3)):
        _, mean, _ = cavities(40, 4, np.sqrt(v))
        var = np.full((40, 4), v)
        total = logsumexp(
            [factor.tilted(np.full(40, c), mean, var).log_z for c in range(4)], axis=0
        )
        # the mixture stands for the Gumbel noise, but is a distribution itself
        np.testing.assert_allclose(total, 0.0, atol=tolerance)


@pytest.mark.parametrize("factor", [PROBIT, LOGIT], ids=["probit", "logit"])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_gradient_is_that_of_the_log_probability(factor, K):
    y, mean, var = cavities(15, K, 2.0, seed=1)
    gradient, step = factor.tilted(y, mean, var).gradient, 1e-4
    for c in range(K):
        shift = step * np.eye(K)[c]
        ends = [factor.tilted(y, mean + s * shift, var).log_z for s in (1, -1)]
        np.testing.assert_allclose(gradient[:, c], (ends[0] - ends[1]) / (2 * step), atol=1e-6)
    np.testing.assert_allclose(gradient.sum(1), 0.0, atol=1e-12)


def test_the_winner_s_row_of_the_curvature_is_matched():
    y, mean, var = cavities(15, 4, 1.0, seed=2)
    tilted, step = PROBIT.tilted(y, mean, var), 1e-4
    e = tilted.slope
    star = (
        np.einsum("nc,cj->ncj", e, np.eye(4))
        - e[:, :, None] * e[:, None, :] / e.sum(1)[:, None, None]
    )
    rows = np.arange(15)
    for c in range(4):
        shift = step * np.eye(4)[c]
        ends = [PROBIT.tilted(y, mean + s * shift, var).gradient[rows, y] for s in (1, -1)]
        np.testing.assert_allclose(-star[rows, y, c], (ends[0] - ends[1]) / (2 * step), atol=1e-6)


def test_softmax_probabilities_are_those_of_its_five_normals():
    f = np.random.default_rng(3).normal(size=(50, 5)) * 2
    mixture = LOGIT.log_proba(f, np.zeros_like(f))
    assert np.max(np.abs(np.exp(mixture) - np.exp(log_softmax(f, axis=1)))) < 2e-3
    own = LOGIT.log_prob(np.full(50, 2), f)
    np.testing.assert_array_equal(own, log_softmax(f, axis=-1)[:, 2])


def test_two_classes_are_the_binary_factor():
    y, mean, var = cavities(30, 2, 3.0, seed=4)
    tilted = PROBIT.tilted(y, mean, var)
    contrast = (mean[:, 1] - mean[:, 0]) / np.sqrt(2)
    binary = Probit().tilted(np.where(y == 1, 1.0, -1.0), contrast, var.mean(1))
    np.testing.assert_allclose(tilted.log_z, binary.log_z, atol=1e-10)
    np.testing.assert_allclose(tilted.gradient[:, 1] * np.sqrt(2), binary.gradient, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_links_are_never_negative_and_leave_a_proper_site(scale):
    y, mean, _ = cavities(200, 5, scale, seed=5)
    var = 10.0 ** np.random.default_rng(6).uniform(-6, 4, (200, 5))
    tilted = PROBIT.tilted(y, mean, var)
    assert all(np.all(np.isfinite(a)) for a in tilted)
    assert np.all(tilted.slope >= 0) and np.all(var * tilted.slope < 1)


def test_contrast_variances_are_exact_for_three_classes():
    A = np.random.default_rng(7).normal(size=(10, 3, 3))
    cov = 0.05 * A @ A.transpose(0, 2, 1) + np.eye(3)
    v = contrast_variances(cov)
    for c in range(3):
        for j in range(c):
            exact = cov[:, c, c] + cov[:, j, j] - 2 * cov[:, c, j]
            np.testing.assert_allclose(v[:, c] + v[:, j], exact)


def test_contrast_variances_are_never_negative():
    # f_1 lies between f_0 and f_2: least squares would give it less than nothing
    f = np.array([-1.0, 0.1, 1.0])
    v = contrast_variances(np.outer(f, f)[None])
    assert np.all(v > 0) and v[0, 1] < 1e-6


def test_the_cavity_times_the_site_is_the_posterior():
    rng = np.random.default_rng(8)
    A = rng.normal(size=(6, 4, 4))
    cov, mean = A @ A.transpose(0, 2, 1), rng.normal(size=(6, 4))
    d, b = rng.uniform(0.001, 0.03, (6, 4)), rng.normal(size=(6, 4))
    b -= b.mean(1, keepdims=True)
    m, V, removed = class_cavities(Sites(d, b), mean, cov, np.ones(6))
    assert np.all(removed == 1)
    for i in range(6):
        T = np.diag(d[i]) - np.outer(d[i], d[i]) / d[i].sum()
        np.testing.assert_allclose(star_times(d[i : i + 1], mean[i : i + 1])[0], T @ mean[i])
        precision = np.linalg.inv(V[i]) + T
        np.testing.assert_allclose(np.linalg.inv(precision), cov[i], rtol=1e-8, atol=1e-10)
        again = cov[i] @ (np.linalg.solve(V[i], m[i]) + b[i])
        np.testing.assert_allclose(again, mean[i], rtol=1e-8, atol=1e-10)


def test_an_improper_cavity_is_the_marginal_and_told():
    cov, mean = np.eye(3)[None], np.array([[0.3, 0.0, -0.3]])
    sites = Sites(np.array([[3.0, 2.0, 0.1]]), np.array([[1.0, -1.0, 0.0]]))
    m, V, removed = class_cavities(sites, mean, cov, np.ones(1))
    assert not removed[0]
    np.testing.assert_array_equal(m, mean)
    np.testing.assert_array_equal(V, cov)
    assert class_update(PROBIT, np.array([0]), sites, mean, cov, 0.0).removed.sum() == 0


def test_a_cavity_lacks_a_copy_or_what_leaves_enough_of_a_row_of_weight_below_one():
    """What is removed does not jump where sites change little."""
    mean, y, weight = np.array([[0.3, 0.0, -0.3]]), np.array([0]), np.array([0.2])
    removed = []
    for scale in np.linspace(0.01, 6.0, 121):
        sites = Sites(scale * np.array([[0.5, 0.3, 0.2]]), np.zeros((1, 3)))
        T = np.diag(sites.precision[0]) - sites.precision.T @ sites.precision / scale
        cov = np.linalg.inv(np.eye(3) + weight * T)[None]
        update = class_update(PROBIT, y, sites, mean, cov, 0.0, weight)
        left = np.eye(3) + (weight - update.removed) * T
        assert np.linalg.eigvalsh(left).min() >= 0.3 - 1e-9
        removed.append(update.removed[0])
    assert removed[0] == 1.0 and 0.2 < removed[-1] < 0.8
    assert np.max(np.abs(np.diff(removed))) < 0.05


def test_log_term_is_that_of_the_evidence():
    """log Z less the log mass of the site, the mass by sampling."""
    rng = np.random.default_rng(9)
    y, mean, var = cavities(5, 3, 1.0, seed=10)
    cov = np.einsum("nc,cj->ncj", var, np.eye(3))
    d, b = np.full((5, 3), 0.05), np.array([[0.5, -0.3, -0.2]] * 5)
    update = class_update(PROBIT, y, Sites(d, b), mean, cov, 0.0)
    m, V, _ = class_cavities(Sites(d, b), mean, cov, np.ones(5))
    for i in range(5):
        T = np.diag(d[i]) - np.outer(d[i], d[i]) / d[i].sum()
        v = contrast_variances(V[i : i + 1])[0]
        f = multivariate_normal(m[i], np.diag(v), seed=rng).rvs(400_000)
        mass = np.mean(np.exp(-0.5 * np.einsum("sc,cj,sj->s", f, T, f) + f @ b[i]))
        assert update.log_term[i] == pytest.approx(update.tilted.log_z[i] - np.log(mass), abs=2e-2)


def test_log_weights_are_zero_where_sites_are_the_likelihood_up_to_a_constant():
    rng = np.random.default_rng(11)
    latent = rng.normal(size=(7, 3, 4))
    y, weight = np.array([0, 1, 2]), np.array([1.0, 2.0, 0.5])
    d, b = rng.uniform(0.1, 1.0, (3, 4)), rng.normal(size=(3, 4))
    sites = Sites(d, b)
    own = log_softmax(latent, axis=-1)[:, np.arange(3), y]
    expected = np.zeros(7)
    for i in range(3):
        T = np.diag(d[i]) - np.outer(d[i], d[i]) / d[i].sum()
        site = latent[:, i] @ b[i] - 0.5 * np.einsum("sc,cj,sj->s", latent[:, i], T, latent[:, i])
        expected += weight[i] * (own[:, i] - site)
    got = class_log_weights(LOGIT, y, weight, sites, latent)
    np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_a_part_that_lacks_something_is_refused_by_name():
    with pytest.raises(TypeError, match="posterior"):
        JointEP(object(), PROBIT, np.zeros(2, int), np.ones(2))
    with pytest.raises(TypeError, match="log_proba"):
        JointEP(type("S", (), {"posterior": None}), Probit(), np.zeros(2, int), np.ones(2))


@pytest.mark.parametrize("factor", [PROBIT, LOGIT], ids=["probit", "logit"])
@pytest.mark.parametrize("K", [2, 3, 6])
def test_probabilities_of_all_classes_are_those_of_many_nodes(factor, K):
    rng = np.random.default_rng(7)
    mean = rng.standard_normal((60, K)) * 10.0 ** rng.uniform(-1, 3, (60, 1))
    var = 10.0 ** rng.uniform(-1, 1, (60, K))
    many = factor.nodes._replace(depth=40.0, spacing=0.2, counts=np.array([400, 2000]))
    each = NoisyArgmax(factor.noise, factor.against_rest, many)
    truth = [each.tilted(np.full(60, c), mean, var).log_z for c in range(K)]
    truth = np.column_stack(truth) - logsumexp(truth, axis=0)[:, None]
    got = factor.log_proba(mean, var)
    # chances that double precision has no number for are among them, and rows where all are alike
    assert truth.min() < -5000.0 and np.sum(truth.min(axis=1) > -50.0) > 15
    assert np.all(np.isfinite(got))
    within = truth.min(axis=1) > -300.0
    np.testing.assert_allclose(got[within], truth[within], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(logsumexp(got, axis=1), 0.0, atol=1e-12)


@pytest.mark.parametrize("kind", ["probit", "logit", "wrong labels"])
@pytest.mark.parametrize("K", [2, 9, 30])
def test_probabilities_at_latent_values_are_those_of_their_logs(kind, K):
    """Of few nodes that all rows share: to 1e-6, and small ones to 2 %."""
    factor = ErringArgmax(0.1, K, 2.0) if kind == "wrong labels" else CLASS_LIKELIHOODS[kind]
    rng = np.random.default_rng(K)
    f = rng.standard_normal((4, 50, K)) * 10.0 ** rng.uniform(-1, 2, (4, 50, 1))
    each = [factor.log_prob(np.full(50, c), f) for c in range(K)]
    exact, got = np.exp(np.stack(each, axis=-1)), factor.proba(f)
    assert exact.min() < 1e-20 or kind == "wrong labels"
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6)
    seen = exact > 1e-20
    np.testing.assert_allclose(got[seen], exact[seen], rtol=0.02)
    np.testing.assert_allclose(got.sum(axis=-1), 1.0, atol=1e-12)
