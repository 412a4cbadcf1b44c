"""Searches: a few Newton steps from near the maximum, in a box, over points without a value."""

from types import SimpleNamespace

import numpy as np
import pytest

from sklearn_ep._engine.hyper import Accuracy, Node, ascend, minimise_where_finite

CURVATURE = np.array([[4.0, 1.0], [1.0, 0.5]])
TOP = np.array([1.0, -2.0])
OPEN = np.tile([-np.inf, np.inf], (2, 1))


def quadratic(x):
    apart = CURVATURE @ (x - TOP)
    return -0.5 * (x - TOP) @ apart, -apart, x.copy()


def run(objective=quadratic, start=(0.0, 0.0), bounds=OPEN, curvature=CURVATURE, **options):
    options = dict(gain=1e-10, max_iter=30) | options

    def evaluate(x, near):
        value, gradient, payload = objective(x)
        return Node(x, value, 0.0, gradient, 0.0, payload)

    found = ascend(evaluate, np.array(start), bounds, curvature, **options)
    return found and SimpleNamespace(node=found[0], **found[1]._asdict())


def test_known_curvature_takes_one_step():
    found = run(start=(0.3, -1.0))
    np.testing.assert_allclose(found.node.phi, TOP, atol=1e-12)
    assert (found.reason, found.n_steps) == ("converged", 1)
    np.testing.assert_array_equal(found.node.payload, found.node.phi)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_curvature_is_corrected_on_the_way(scale):
    found = run(curvature=scale * np.eye(2))
    assert found.reason == "converged" and quadratic(found.node.phi)[0] > -1e-10
    np.testing.assert_allclose(found.node.phi, TOP, atol=1e-4)


def test_bounds_hold_and_the_rest_is_maximised():
    """With the first coordinate at .4 the second is at -2 + .6 * 1 / .5."""
    bounds = np.array([[-1.0, 0.4], [-5.0, 5.0]])
    found = run(bounds=bounds, curvature=np.eye(2))
    np.testing.assert_allclose(found.node.phi, [0.4, -0.8], atol=1e-4)
    assert found.reason == "converged" and found.gradient < 1e-4


@pytest.mark.parametrize("foretold", [0.0, 0.5, 1.0, 2.0])
def test_what_gradients_lack_along_the_steps_is_learned_from_the_values(foretold):
    """Taken for exact, gradients that lack 6 lead to 0 instead of 3."""

    def objective(x):
        return -float((x[0] - 3.0) ** 2), -2.0 * x, x.copy()

    rest = dict(start=[1.0], bounds=OPEN[:1], curvature=np.array([[2.0]]))
    found = run(objective, lacking=np.array([6.0 * foretold]), **rest)
    np.testing.assert_allclose(found.node.phi, 3.0, atol=1e-6)
    assert found.reason == "converged" and found.n_steps <= 3
    assert run(objective, **rest).node.phi[0] < 1.1


def test_what_gradients_lack_may_be_known_beforehand():
    lacking = np.array([3.0, -1.0])

    def objective(x):
        value, gradient, payload = quadratic(x)
        return value, gradient - lacking, payload

    found = run(objective, start=(0.3, -1.0), lacking=lacking)
    np.testing.assert_allclose(found.node.phi, TOP, atol=1e-12)
    assert (found.reason, found.n_steps) == ("converged", 1)


def test_points_without_value_shorten_the_step():
    def beyond(x):
        value, gradient, payload = quadratic(x)
        return (np.nan if x[1] < -1.2 else value), gradient, payload

    found = run(beyond, start=(0.0, -1.0))
    assert found.node.phi[1] >= -1.2 and found.reason == "stuck"
    assert beyond(found.node.phi)[0] > beyond(np.array([0.0, -1.0]))[0]
    assert run(beyond, start=(0.0, -3.0)) is None


def test_it_ends_where_it_is_asked_to():
    seen = []
    found = run(curvature=20.0 * np.eye(2), ended=lambda x: seen.append(x) or len(seen) == 2)
    assert found.reason == "asked" and found.n_steps == 2
    np.testing.assert_array_equal(seen[-1].phi, found.node.phi)
    assert run(curvature=20.0 * np.eye(2), max_iter=3).reason == "max_iter"


# with a first step of the whole gradient
FINE = Accuracy(ftol=2.2e-9, gtol=1e-5, first_step=np.inf, tie=0.0)
WALLS = {"box": np.array([[-9.0, 9.0], [-9.0, 9.0]]), "none": np.array([[-np.inf, np.inf]] * 2)}


@pytest.mark.parametrize("nothing", [np.inf, np.nan])
@pytest.mark.parametrize("bounds", WALLS)
def test_search_turns_back_at_a_wall(bounds, nothing):
    """Beyond the wall the function is infinite or no number; inside the minimum is found."""
    centre, curvature = np.array([0.45, 0.5]), np.array([50.0, 1.0])
    beyond = []

    def objective(x):
        if x.sum() > 1.0:
            beyond.append(x.copy())
            return nothing, np.zeros(2), None
        away = x - centre
        return 0.5 * curvature @ away**2, curvature * away, len(beyond)

    ends = FINE._replace(ftol=1e-12)
    found = minimise_where_finite(
        objective, np.array([0.3, 0.3]), WALLS[bounds], ends, max_iter=100
    )
    assert found.reason == "converged" and found.n_steps < 100
    assert found.n_cut == len(beyond) > 0
    np.testing.assert_allclose(found.x, centre, atol=1e-4)


def test_search_says_that_a_wall_keeps_it_from_the_minimum():
    def objective(x):
        return (np.inf if x[0] > 1.0 else (x[0] - 3.0) ** 2), 2.0 * (x - 3.0), None

    bounds = np.array([[-9.0, 9.0]])
    found = minimise_where_finite(objective, np.zeros(1), bounds, FINE, max_iter=200)
    assert found.reason == "stuck" and found.gradient > 3.0
    np.testing.assert_allclose(found.x, 1.0, atol=1e-3)
    assert minimise_where_finite(objective, np.full(1, 2.0), bounds, FINE, max_iter=9) is None


def test_search_without_a_better_step_says_how_much_is_left():
    """Coarse values end a line search: convergence if what is left is within their accuracy."""

    def objective(x):
        return np.round(100.0 + np.sum(x**4), 3), 4.0 * x**3, None

    start, bounds = np.array([2.0, -1.0]), WALLS["box"]
    fine, rough = (
        minimise_where_finite(
            objective, start, bounds, FINE._replace(ftol=ftol, max_line_search=5), max_iter=100
        )
        for ftol in (1e-12, 1e-4)
    )
    assert (fine.reason, rough.reason) == ("stuck", "converged")


def test_steps_grow_from_the_first_as_long_as_they_lead_up():
    seen = []

    def told(x):
        seen.append(x.copy())
        return quadratic(x)

    found = run(told, start=(9.0, -2.0), lacking=np.zeros(2), longest=0.5)
    lengths = np.abs(np.diff(seen, axis=0)).max(axis=1)
    np.testing.assert_allclose(lengths[:4], [0.5, 1.0, 2.0, 2.0])
    np.testing.assert_allclose(found.node.phi, TOP, atol=1e-4)


@pytest.mark.parametrize("fall, reason", [(1e-4, "converged"), (1.0, "stuck")])
def test_search_from_a_maximum_with_gradients_that_are_off_has_converged_where_all_is_flat(
    fall, reason
):
    def misleading(x):
        return fall * np.tanh(np.sum(x**2)), np.array([0.2, -0.1]), None

    ends = FINE._replace(exact_gradient=False, first_step=1.0, max_line_search=6)
    found = minimise_where_finite(
        misleading, np.zeros(2), WALLS["box"], ends, max_iter=9, negligible=0.01
    )
    assert (found.reason, found.n_steps) == (reason, 0)


@pytest.mark.parametrize("seed", range(3))
def test_where_gradients_are_off_a_step_after_one_that_led_down_is_half_as_long(seed):
    rng, tried = np.random.default_rng(seed), []

    def misleading(x):
        tried.append(x.copy())
        return -float(np.any(x)), rng.normal(size=2) * [3.0, 1.0], None

    run(misleading, lacking=np.zeros(2))
    lengths = np.abs(tried[1:]).max(1)
    assert len(lengths) > 4 and np.all(lengths[1:] <= 0.5 * lengths[:-1] * (1 + 1e-12))
