"""The linear response of EP is the derivative of the means in a push on the latent values."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep._engine.contracts import WholeEP
from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep._engine.likelihoods import LabelNoise, Logit, Probit
from sklearn_ep._engine.rules import MomentMatching, Power
from sklearn_ep._engine.sites import Sites, cavity
from sklearn_ep.gaussian_process._dense_gp import DenseGP
from sklearn_ep.gaussian_process._response import response, tilted_shape


class Pushed(DenseGP):
    """A Gaussian process prior times exp(push' f)."""

    def __init__(self, K, push):
        super().__init__(K)
        self.push = push

    def posterior(self, precision, shift):
        return super().posterior(precision, shift + self.push)


def settled(K, push, factor, y, weight, rule, x=None):
    ep = WholeEP(Pushed(K, push), factor, y, weight, rule)
    x = np.zeros((2, len(y))) if x is None else x
    result = ep.solve(x, tol=1e-12, max_iter=500, damping=0.5, accelerate=False)
    assert result.converged
    return result.x, result.evaluation.payload[0]


@pytest.mark.parametrize("factor", [Probit(), Logit(), LabelNoise(0.15)])
@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("copies", [False, True])
def test_response_is_the_derivative_of_the_fixed_point(factor, power, copies):
    rng, n, eps = np.random.default_rng(0), 9, 1e-4
    X = rng.normal(size=(n, 1))
    K = (4.0 * RBF(1.0))(X) + 1e-8 * np.eye(n)
    y = np.where(rng.normal(size=n) + X[:, 0] > 0, 1.0, -1.0)
    weight = rng.uniform(0.5, 3.0, n) if copies else np.ones(n)
    args = factor, y, weight, MomentMatching() if power == 1 else Power(power)
    x, state = settled(K, np.zeros(n), *args)
    cov = np.linalg.inv(np.linalg.inv(K) + np.diag(weight * x[0]))
    cav = cavity(Sites(*x), state.mean, state.var, power)
    N = response(cov, weight / power, *tilted_shape(factor.powered(power), y, cav))
    push = rng.normal(size=n)
    ends = [settled(K, sign * eps * push, *args, x)[1].mean for sign in (1.0, -1.0)]
    moved = (ends[0] - ends[1]) / (2.0 * eps)
    assert np.abs(moved - cov @ push).max() > 0.01
    np.testing.assert_allclose(moved, (cov + cov @ N @ cov) @ push, atol=2e-4)


def test_gaussian_factors_leave_nothing_to_correct():
    cov = RBF(1.0)(np.arange(4.0)[:, None])
    assert not np.any(response(cov, np.ones(4), np.zeros(4), np.zeros(4)))


def test_a_response_without_bound_is_no_covariance():
    with pytest.raises(ImproperPosterior):
        response(np.array([[1.0, 0.9], [0.9, 1.0]]), np.ones(2), np.full(2, 1.5), np.full(2, 2.25))
