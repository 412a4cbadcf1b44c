"""Algebra of natural parameters, checked by its laws on random Gaussians."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sklearn_ep._engine.gaussian import (
    ImproperPosterior,
    Natural,
    inverse_factor,
    jittered_cholesky,
    log_partition,
    moments,
    natural,
    over,
    times,
    weighted_gram,
)

seeds = st.integers(0, 2**32 - 1)


def random_factor(seed, d):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(d, d + 2))
    return Natural(A @ A.T + 0.1 * np.eye(d), rng.normal(size=d))


@settings(max_examples=50, deadline=None)
@given(seeds, seeds, st.integers(1, 6))
def test_product_then_quotient_gives_the_message_back(a, b, d):
    p, q = random_factor(a, d), random_factor(b, d)
    back = over(times(p, q), q)
    np.testing.assert_allclose(
        back.precision, p.precision, atol=1e-12 * (1 + abs(q.precision).max())
    )
    np.testing.assert_allclose(back.shift, p.shift, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(1, 6))
def test_moments_and_natural_parameters_are_inverse(seed, d):
    p = random_factor(seed, d)
    m = moments(p)
    np.testing.assert_allclose(m.cov @ p.precision, np.eye(d), atol=1e-9)
    np.testing.assert_allclose(p.precision @ m.mean, p.shift, atol=1e-9)
    q = natural(m)
    np.testing.assert_allclose(q.precision, p.precision, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(q.shift, p.shift, rtol=1e-7, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 4))
def test_log_partition_against_its_definition(seed, d):
    p = random_factor(seed, d)
    mean = np.linalg.solve(p.precision, p.shift)
    want = 0.5 * p.shift @ mean - 0.5 * np.linalg.slogdet(p.precision)[1]
    np.testing.assert_allclose(log_partition(p), want, rtol=1e-10, atol=1e-10)


def test_log_partition_in_one_dimension_against_quadrature():
    from scipy.integrate import quad

    p = Natural(np.array([[2.5]]), np.array([0.7]))
    integral = quad(lambda x: np.exp(0.7 * x - 1.25 * x * x), -np.inf, np.inf)[0]
    np.testing.assert_allclose(log_partition(p) + 0.5 * np.log(2 * np.pi), np.log(integral))


def test_improper_factors_are_refused():
    with pytest.raises(ImproperPosterior):
        moments(Natural(np.diag([1.0, -1e-3]), np.zeros(2)))
    with pytest.raises(ImproperPosterior):
        inverse_factor(np.zeros((2, 2)))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 128, 129, 300])
def test_the_inverse_of_a_factor_in_place(n, kind):
    A = np.random.default_rng(0).normal(size=(n, n))
    matrix = (np.eye(n) + A @ A.T / n).astype(kind)
    want = np.linalg.inv(np.linalg.cholesky(matrix.astype(float)))
    given = matrix.copy().T
    found = inverse_factor(given)
    assert found is given
    np.testing.assert_allclose(found, want, atol=20 * np.finfo(kind).eps)
    matrix[-1, -1] = -1.0
    with pytest.raises(ImproperPosterior):
        inverse_factor(matrix.T)


def test_jitter_is_reported_and_bounded():
    rng = np.random.default_rng(0)
    singular = rng.normal(size=(5, 2))
    lower, used = jittered_cholesky(singular @ singular.T, 1e-12)
    assert 1e-12 <= used <= 1e-3
    np.testing.assert_allclose(lower @ lower.T, singular @ singular.T, atol=10 * used)
    with pytest.raises(ImproperPosterior):
        jittered_cholesky(np.diag([1.0, -1.0]), 1e-12)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int8])
@pytest.mark.parametrize("least", [-2.0, -0.5, 0.1])
def test_grams_of_weights_of_both_signs_are_symmetric_products(least, kind):
    """To rounding that of a general product, in single precision if the rows are."""
    rng = np.random.default_rng(0)
    B, weight = 3.0 * rng.standard_normal((300, 40)), least + rng.random(300)
    rows, single = B.astype(kind), kind == np.float32
    gram, B = weighted_gram(rows, weight), rows.astype(float)
    assert gram.dtype == (kind if single else float) and np.array_equal(gram, gram.T)
    np.testing.assert_allclose(gram, B.T @ (weight[:, None] * B), atol=1e-2 if single else 1e-10)
