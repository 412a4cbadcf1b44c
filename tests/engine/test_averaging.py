"""The average over hyperparameters: against densities whose integrals are known."""

import joblib
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit, log_expit, ndtr
from scipy.stats import multivariate_normal, norm

from sklearn_ep._engine import hyper

OPEN = np.array([-np.inf, np.inf])


class Gaussian:
    """N(mean, cov) times a constant, as a model whose payload is phi itself."""

    def __init__(self, mean, cov, log_mass=0.0):
        self.mean, self.cov, self.log_mass = np.asarray(mean), np.asarray(cov), log_mass

    def __call__(self, phi, near):
        apart = np.linalg.solve(self.cov, phi - self.mean)
        value = self.log_mass + multivariate_normal(self.mean, self.cov).logpdf(phi)
        return hyper.Node(phi, value, 0.0, -apart, 0.0, None)


def skewed(phi, near):
    """Independent coordinates with log densities of logits of Beta(2, 5)."""
    value = np.sum(2.0 * log_expit(phi) + 5.0 * log_expit(-phi) + np.log(30.0))
    return hyper.Node(phi, 0.4 * value, 0.6 * value, 2.0 - 7.0 * expit(phi), 0.0, None)


def moments(average):
    return hyper.mixture_moments(average.weight, average.phi, np.zeros(average.phi.shape))


def found(evaluate, start, bounds=None):
    bounds = np.tile(OPEN, (len(start), 1)) if bounds is None else bounds
    return hyper.integrate(
        evaluate, hyper.find_mode(evaluate, np.asarray(start, float), bounds), bounds
    )


@pytest.mark.parametrize("t, share", [(1, 0.95), (2, 0.94), (3, 0.85), (5, 0.999)])
def test_gaussians_of_any_shape_are_integrated(t, share):
    """Mass to a few per cent of what a lattice of this depth holds, mean exactly by symmetry."""
    root = np.random.default_rng(t).normal(size=(t, t)) + np.eye(t)
    model = Gaussian(np.arange(t) - 1.0, 0.2 * root @ root.T + 0.05 * np.eye(t), log_mass=-7.0)
    average = found(model, np.zeros(t))
    assert abs(average.log_evidence + 7.0) < 0.02
    mean, var = moments(average)
    sd = np.sqrt(np.diagonal(model.cov))
    assert_allclose((mean - model.mean) / sd, 0.0, atol=0.03)
    assert np.all(var < 1.02 * sd**2) and np.all(var > share**2 * 0.9 * sd**2)
    assert average.weight.sum() == pytest.approx(1.0, abs=1e-12)
    assert average.n_evaluations <= {1: 14, 2: 33, 3: 46}.get(t, 4 * t + 1)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_skewed_posterior_is_followed_into_its_tails(t):
    """Logit of Beta(2, 5): mean psi(2) - psi(5), variance psi'(2) + psi'(5)."""
    average = found(skewed, np.zeros(t))
    mean, var = moments(average)
    assert_allclose(mean, -13.0 / 12.0, atol=0.06)
    assert_allclose(var, 0.6449341 + 0.2213230, rtol=0.12)
    assert abs(average.log_evidence) < 0.03 * t


# processes import all that this file does, and are asked by night
@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_workers(backend):
    mode = hyper.find_mode(skewed, np.zeros(2), np.tile(OPEN, (2, 1)))
    with joblib.parallel_config(backend):
        one, two = (
            hyper.integrate(skewed, mode, np.tile(OPEN, (2, 1)), n_jobs) for n_jobs in (1, 2)
        )
    assert np.array_equal(one.phi, two.phi) and np.array_equal(one.weight, two.weight)
    assert one.log_evidence == two.log_evidence


def test_no_node_beyond_bounds_or_without_posterior():
    """A Gaussian cut at its mean keeps half of its mass, by bounds and by refusals alike."""

    def refusing(phi, near):
        return None if phi[0] < 0.0 else Gaussian([0.0], [[1.0]])(phi, near)

    bounds = np.array([[0.0, np.inf]])
    kept = found(Gaussian([0.0], [[1.0]]), [0.5], bounds)
    assert np.all(kept.phi >= 0.0)
    refused = found(refusing, [0.5])
    assert np.all(refused.phi >= 0.0)
    assert hyper.find_mode(refusing, np.array([-1.0]), np.array([OPEN])) is None


def test_mode_that_rounding_leaves_beside_its_bound_has_the_nodes_of_one_on_it():
    model, bounds = Gaussian([-1.0, 0.0], [[1.0, 0.6], [0.6, 1.0]]), np.array([[0.3, 9.0], OPEN])
    on, beside = (
        hyper.integrate(model, model(np.array([edge, 0.78]), None), bounds)
        for edge in (0.3, np.nextafter(0.3, 0.0))
    )
    assert_allclose(beside.phi, on.phi, atol=1e-9)
    assert_allclose(beside.weight, on.weight, atol=1e-9)


def test_lattice_starts_again_at_a_better_mode():
    """Two modes on one ridge: that with nearly all of the mass is found from the other."""

    def two_modes(phi, near):
        far, close = norm.logpdf(phi[0], 3.0, 0.7), norm.logpdf(phi[0], 0.0, 1.0) - 4.0
        value = np.logaddexp(far, close)
        shares = np.exp([far - value, close - value])
        return hyper.Node(phi, value, 0.0, shares @ [[(3.0 - phi[0]) / 0.49], [-phi[0]]], 0.0, None)

    start = two_modes(np.zeros(1), None)
    average = hyper.integrate(two_modes, start, np.array([OPEN]))
    assert abs(moments(average)[0][0] - 3.0) < 0.15
    assert abs(average.log_evidence - np.log1p(np.exp(-4.0))) < 0.05


def test_samples_about_a_gaussian_mode_are_exact():
    """Mass, mean and covariance, from nodes of equal weight."""
    cov = np.array([[0.5, 0.2, 0.0], [0.2, 0.3, 0.1], [0.0, 0.1, 0.4]])
    model = Gaussian([0.5, -0.2, 1.0], cov, log_mass=-3.0)
    mode, bounds = model(model.mean, None), np.tile(OPEN, (3, 1))
    average = hyper.sample_about(model, mode, bounds, np.linalg.inv(cov))
    assert average.log_evidence == pytest.approx(-3.0) and average.n_evaluations == 6
    assert_allclose(average.weight, 1.0 / 6.0)
    assert_allclose(average.phi.mean(axis=0), model.mean)
    assert_allclose(np.cov(average.phi.T, ddof=0), cov, atol=1e-12)


def test_samples_of_another_shape_are_weighed():
    """Skewness moves the mean the right way, and the mass is better than that of Laplace."""
    mode = hyper.find_mode(skewed, np.zeros(1), np.array([OPEN]))
    curvature = np.array([[7.0 * expit(mode.phi[0]) * expit(-mode.phi[0])]])
    average = hyper.sample_about(skewed, mode, np.array([OPEN]), curvature)
    laplace = mode.objective + 0.5 * np.log(2.0 * np.pi / curvature[0, 0])
    assert abs(average.log_evidence) < abs(laplace)
    assert -13.0 / 12.0 - 0.2 < moments(average)[0][0] < mode.phi[0]
    even = hyper.sample_about(skewed, mode, np.array([OPEN]), curvature, weighed=False)
    assert_allclose(even.weight, 0.5)
    assert even.log_evidence == pytest.approx(average.log_evidence)


def test_samples_far_too_low_are_drawn_in_and_none_is_out_of_bounds():
    model, bounds = Gaussian([0.0, 0.0], np.eye(2)), np.array([[-0.5, 9.0], [-9.0, 9.0]])
    mode = model(np.zeros(2), None)
    average = hyper.sample_about(model, mode, bounds, 0.1 * np.eye(2))
    drop = mode.objective - np.array([node.objective for node in average.nodes])
    assert np.all(drop < 1.0 + 1e-9) and average.phi[:, 0].min() == -0.5

    def nowhere(phi, near):
        return None

    alone = hyper.sample_about(nowhere, mode, bounds, np.eye(2))
    assert alone.nodes == [mode] and alone.log_evidence == pytest.approx(0.0)


def test_known_hyperparameters_are_one_node():
    node = hyper.Node(np.empty(0), -3.0, 0.0, np.empty(0), 0.0, None)
    average = hyper.integrate(skewed, node, np.empty((0, 2)))
    assert average.nodes == [node] and average.log_evidence == -3.0
    assert average.phi.shape == (1, 0) and average.effective_number == 1.0


def test_light_nodes_are_dropped_and_the_evidence_keeps_them():
    nodes = [hyper.Node(np.array([float(m)]), 0.0, 0.0, np.zeros(1), 0.0, m) for m in range(3)]
    average = hyper.average_of(nodes, np.log([0.6, 0.3995, 0.0005]))
    assert [n.payload for n in average.nodes] == [0, 1] and average.heaviest.payload == 0
    assert average.log_evidence == pytest.approx(0.0, abs=1e-12)
    assert_allclose(average.weight, np.array([0.6, 0.3995]) / 0.9995)


def test_mixtures_against_draws():
    rng = np.random.RandomState(0)
    weight, mean = np.array([0.2, 0.5, 0.3]), rng.normal(size=(3, 2))
    roots = rng.normal(size=(3, 2, 2))
    cov = roots @ roots.transpose(0, 2, 1)
    var = np.einsum("mii->mi", cov)
    draws = hyper.draw_mixture(
        weight, lambda m, n: rng.multivariate_normal(mean[m], cov[m], n), 400_000, rng
    )
    centre, spread = hyper.mixture_moments(weight, mean, var)
    assert_allclose(draws.mean(0), centre, atol=0.015)
    assert_allclose(draws.var(0), spread, rtol=0.01)
    assert_allclose(hyper.mixture_covariance(weight, cov, mean, mean), np.cov(draws.T), atol=0.03)
    levels = [0.05, 0.5, 0.99]
    quantiles = hyper.mixture_quantiles(weight, mean, np.sqrt(var), levels)
    below = np.einsum(
        "m,mqd->qd", weight, ndtr((quantiles - mean[:, None]) / np.sqrt(var)[:, None])
    )
    assert_allclose(below, np.repeat(np.array(levels)[:, None], 2, axis=1), atol=1e-12)
    # the order says nothing of the node: correlation of neighbours is noise
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.006
    log_p = np.log(rng.uniform(size=(3, 4, 2)))
    assert_allclose(
        np.exp(hyper.log_mixture(weight, log_p)), np.tensordot(weight, np.exp(log_p), 1)
    )


def _quantiles_on_a_mesh(log_density, levels):
    """Return quantiles (len(levels), 2) of two coordinates, by sums over a fine mesh."""
    mesh = np.linspace(-9.0, 9.0, 1200)
    value = log_density(np.stack(np.meshgrid(mesh, mesh, indexing="ij"), -1))
    mass = np.exp(value - value.max())
    shares = (mass.sum(1 - k) / mass.sum() for k in (0, 1))
    return np.stack([np.interp(levels, np.cumsum(share), mesh) for share in shares], 1)


@pytest.mark.parametrize("width, most, close", [(0.5, 60, 0.15), (0.3, 60, 0.2), (0.2, 45, 2.0)])
def test_bent_posteriors_are_interpolated_and_drawn_from(width, most, close):
    """Only the sum of two variances is known, so that the posterior is a ridge with a corner.

    It is that of two grouping factors with about the same groups. A lattice that is too coarse for
    the ridge, or that ends for want of nodes, still has draws near the quantiles.
    """

    def log_density(phi):
        both = 0.5 * np.log(np.sum(np.exp(2.0 * phi), -1))
        return -0.5 * ((both - 2.0) / width) ** 2 - 0.5 * np.sum((phi / 1.5) ** 2, -1)

    def evaluate(phi, near):
        moves = 1e-5 * np.vstack([np.eye(2), -np.eye(2)])
        slope = np.subtract(*log_density(phi + moves).reshape(2, 2)) / 2e-5
        return hyper.Node(phi, float(log_density(phi)), 0.0, slope, 0.0, None)

    bounds, moves = np.tile(OPEN, (2, 1)), 0.1 * np.eye(2)
    mode = hyper.find_mode(evaluate, np.array([1.5, -0.2]), bounds)
    ahead, behind = (
        np.array([evaluate(mode.phi + sign * m, mode).gradient for m in moves]) for sign in (1, -1)
    )
    values, vectors = np.linalg.eigh((behind - ahead) / 0.2)
    lattice = hyper.Lattice(mode, vectors / np.sqrt(values), hyper.Spacing(1.2, 5.5, most))
    lattice.explore(hyper.Visits(evaluate, bounds, told=lambda figures: False))
    average, levels = lattice.smooth_average(), [0.25, 0.5, 0.75]
    quantiles = average.smooth.quantiles(levels, lambda phi: phi)
    assert_allclose(quantiles, _quantiles_on_a_mesh(log_density, levels), atol=close)
    rng = np.random.RandomState(0)
    drawn = average.draw_near(rng.choice(len(average.nodes), 4000, p=average.weight), rng)
    assert_allclose(np.quantile(drawn, levels, axis=0), quantiles, atol=0.2)
