"""The linear response of EP is the derivative of the means in a push on the latent values."""

import itertools

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep._engine.likelihoods import Factor, LabelNoise, Logit, Probit

KERNEL = 4.0 * RBF(1.0)


class Pushed(Factor):
    """A factor of each row times exp(push_i f_i); of other rows the factor itself."""

    def __init__(self, factor, push):
        self.factor, self.push, self.log_concave = factor, push, factor.log_concave

    def log_prob(self, y, f):
        return self.factor.log_prob(y, f)

    def powered(self, exponent):
        return Pushed(self.factor.powered(exponent), exponent * self.push)

    def tilted(self, y, mean, var):
        if np.shape(y) != self.push.shape:
            return self.factor.tilted(y, mean, var)
        found = self.factor.tilted(y, mean + var * self.push, var)
        log_z = found.log_z + self.push * mean + 0.5 * self.push**2 * var
        return found._replace(log_z=log_z, gradient=found.gradient + self.push)


def rows(n=9, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 1))
    return X, (rng.normal(size=n) + X[:, 0] > 0).astype(int), rng.uniform(0.5, 3.0, n)


def fitted(factor, X, y, weight, **kw):
    settled = dict(optimizer=None, acceleration=None, tol=1e-11, max_iter=900, max_sweeps=900)
    clf = EPGaussianProcessClassifier(**(dict(kernel=KERNEL, likelihood=factor) | settled | kw))
    return clf.fit(X, y, sample_weight=weight)


FACTORS = {"probit": Probit(), "logit": Logit(), "wrong labels": LabelNoise(0.15)}
QUICK = ("probit", 1.0, False), ("logit", 0.5, True), ("wrong labels", 1.0, True)


@pytest.mark.parametrize(
    ("name", "power", "copies"),
    [
        pytest.param(*setting, marks=[pytest.mark.slow] * (setting not in QUICK))
        for setting in itertools.product(FACTORS, [1.0, 0.5], [False, True])
    ],
)
def test_corrected_variances_are_derivatives_of_the_fixed_point(name, power, copies):
    (X, y, weight), factor = rows(), FACTORS[name]
    weight, eps = weight if copies else np.ones(9), 1e-4
    clf = fitted(factor, X, y, weight, power=power)
    plain, corrected = (clf.latent_mean_and_variance(X, corrected=c)[1] for c in (False, True))
    some, moved = [0, 3, 5, 8], []
    for i in some:
        push = eps * (np.arange(9) == i) / weight
        ends = [fitted(Pushed(factor, s * push), X, y, weight, power=power) for s in (1.0, -1.0)]
        high, low = (end.decision_function(X[[i]])[0] for end in ends)
        moved.append((high - low) / (2.0 * eps))
    assert np.abs(moved - plain[some]).max() > 0.01
    np.testing.assert_allclose(corrected[some], moved, atol=2e-4)


class Gaussian(Factor):
    """A Gaussian of precision 2 about the label."""

    log_concave = True

    def log_prob(self, y, f):
        return -((y - f) ** 2)

    def tilted(self, y, mean, var):
        wide, apart = var + 0.5, (y - mean) / (var + 0.5)
        log_z = -0.5 * (np.log(2.0 * wide) + (y - mean) * apart)
        return (
            Probit()
            .tilted(y, mean, var)
            ._replace(log_z=log_z, gradient=apart, curvature=1.0 / wide)
        )


def test_gaussian_factors_leave_nothing_to_correct():
    X, y, weight = rows()
    clf = fitted(Gaussian(), X, y, weight)
    plain, corrected = (clf.latent_mean_and_variance(X, corrected=c)[1] for c in (False, True))
    np.testing.assert_allclose(corrected, plain, rtol=1e-9)


def test_a_response_without_bound_is_no_covariance():
    """Sites that are far from a fixed point answer some pushes without end."""
    X, y, weight = rows(20)
    with pytest.warns(ConvergenceWarning):
        clf = fitted(LabelNoise(0.01), X, 1 - y, weight, max_iter=2, kernel=400.0 * RBF(1.0))
    with pytest.warns(UserWarning, match="no stable fixed point"):
        corrected = clf.latent_mean_and_variance(X, corrected=True)[1]
    np.testing.assert_array_equal(corrected, clf.latent_mean_and_variance(X)[1])
