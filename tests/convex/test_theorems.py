"""Both theorems of Nickisch and Seeger (2009) on convexity, and the ascent of the outer loop."""

import numpy as np
import pytest
from plain_logistic import NormalPrior
from scipy.optimize import brentq

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.convex._double_loop import DoubleLoop
from sklearn_ep.convex._sites import LogisticSites
from sklearn_ep.convex._systems import Design, primal_system
from sklearn_ep.sites import LaplaceSite, StudentTSite


class Relaxation:
    """The criterion phi of the paper in the widths gamma of all sites, by its definition."""

    def __init__(self, B, sign, prior_variance):
        self.B, self.P = B, np.full(B.shape[1], 1.0 / prior_variance)
        self.sites = LogisticSites(sign, np.ones(len(B)), "local")
        self.one = LogisticSites(np.ones(1), np.ones(1), "local")

    def height(self, gamma):
        """Return h(gamma) = -min over x of x / gamma + 2 g(x); its minimum touches at gamma."""
        return heights(lambda x: self.one.penalty(np.zeros(1), np.array([x])), gamma)

    def __call__(self, gamma):
        A = np.diag(self.P) + self.B.T @ (self.B / gamma[:, None])
        right = self.B.T @ self.sites.shift
        return np.linalg.slogdet(A)[1] + self.height(gamma) - right @ np.linalg.solve(A, right)


def heights(penalty, gamma):
    """Return the sum of h over sites whose loss and precision at s = 0 are those of `penalty`."""
    total = 0.0
    for g in np.atleast_1d(gamma):

        def gap(log_x, g=g):
            return np.log(penalty(np.exp(log_x)).precision[0] * g)

        x = np.exp(brentq(gap, -60, 60, xtol=1e-13))
        total += 2.0 * penalty(x).value[0] - x / g
    return total


def problem(seed, q, n):
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((q, n)) * np.exp(rng.normal(size=n))
    return B, np.where(rng.random(q) < 0.4, 1.0, -1.0)


def widths(rng, q):
    """Widths that a logistic site can have: from 4 on."""
    return 4.0 + np.exp(rng.uniform(-3, 5, q))


@pytest.mark.parametrize(("q", "n"), [(6, 3), (4, 9), (12, 2)])
def test_theorem_1_the_relaxation_is_convex_in_the_widths(q, n):
    rng = np.random.default_rng(q)
    for seed in range(3):
        B, sign = problem(seed, q, n)
        phi = Relaxation(B, sign, np.exp(rng.normal()))
        a, b = widths(rng, q), widths(rng, q)
        t = np.linspace(0, 1, 9)
        values = np.array([phi((1 - s) * a + s * b) for s in t])
        assert np.all(np.diff(values, 2) >= -1e-9 * np.abs(values).max())


@pytest.mark.parametrize("power", [1.0, 0.5, 3.0])
def test_theorem_1_log_determinants_are_convex_for_log_convex_functions(power):
    rng = np.random.default_rng(1)
    for seed in range(20):
        B, _ = problem(seed, 7, 4)
        base = B[:2].T @ B[:2]  # any positive semi-definite matrix
        a, b = rng.uniform(0.1, 5.0, size=(2, 7))
        for f in (lambda g: g**-power, np.exp):  # log-convex; precisions of widths are the first
            values = [
                np.linalg.slogdet(base + B.T @ (f((1 - s) * a + s * b)[:, None] * B))[1]
                for s in np.linspace(0, 1, 9)
            ]
            assert np.all(np.diff(values, 2) >= -1e-9 * np.abs(values).max())


def test_theorem_2_log_concave_sites_and_no_others_have_convex_heights():
    logistic = LogisticSites(np.ones(1), np.ones(1), "local")
    laplace, student = LaplaceSite(0.7), StudentTSite(3.0, 1.0)
    gamma = np.linspace(4.2, 60.0, 40)
    for site in (logistic, laplace):
        h = [heights(lambda x, s=site: s.penalty(np.zeros(1), np.array([x])), g) for g in gamma]
        assert np.all(np.diff(h, 2) >= -1e-9)
    gamma = np.linspace(1.0, 30.0, 40)  # the least width of this site is 3 / 4
    h = [heights(lambda x: student.penalty(np.zeros(1), np.array([x])), g) for g in gamma]
    assert np.diff(h, 2).min() < -1e-3


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bound", ["local", "kl"])
@pytest.mark.parametrize(("q", "n"), [(30, 5), (12, 20)])
def test_every_outer_step_raises_the_bound(q, n, bound, seed):
    B, sign = problem(seed, q, n)
    prior = NormalPrior(3.0, n)
    sites = LogisticSites(sign, np.ones(q), bound)
    loop = DoubleLoop(Design(B, False), sites, prior, primal_system, 1e-8, 100)
    x, values = loop.start(), []
    for _ in range(25):  # published steps: no acceleration, no guard
        evaluation = loop.evaluate(x)
        values.append(evaluation.record["objective"])
        x = evaluation.target
    assert np.all(np.diff(values) >= -1e-9 * np.abs(values[-1]))
    if bound == "kl":
        return
    # the end is the minimum of the convex criterion, whose value gives the bound
    phi = Relaxation(B, sign, 3.0)
    best = phi(1.0 / evaluation.payload.inner.site.precision)
    assert values[-1] == pytest.approx(0.5 * (n * np.log(1 / 3.0) - best), abs=1e-6)
    rng = np.random.default_rng(seed)
    assert all(phi(widths(rng, q)) > best for _ in range(10))


@pytest.mark.parametrize(("seed", "n_parts"), [(22, 0), (27, 0), (54, 0), (11, 2), (52, 2)])
def test_whole_steps_that_lead_away_are_halved(seed, n_parts):
    # rows next to separable ones under a wide prior: whole steps went to and fro, further each time
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(100, 3))
    y = (X[:, 0] > 0).astype(int)
    flipped = np.argsort(np.abs(X[:, 0]))[: rng.integers(1, 4)]
    y[flipped] = 1 - y[flipped]
    parts = [(X[k::n_parts], y[k::n_parts]) for k in range(n_parts)]
    found = ConvexVariationalLogistic(prior_variance=3000.0).fit(*([parts] if parts else [X, y]))
    assert found.converged_ and (parts or found.n_iter_ <= 10)
    slow = ConvexVariationalLogistic(prior_variance=3000.0, damping=0.3, max_iter=200, tol=1e-6)
    slow.fit(X, y)
    np.testing.assert_allclose(found.coef_, slow.coef_, atol=1e-2 * slow.coef_std_.max())
    assert found.log_evidence_ == pytest.approx(slow.log_evidence_, abs=1e-4)


def test_diagnosis_says_what_the_local_bound_of_heavy_tails_costs():
    X, y = np.random.default_rng(0).standard_normal((60, 2)), np.arange(60) % 2
    told = [
        str(ConvexVariationalLogistic(prior=prior).fit(X, y).diagnose().remarks)
        for prior in (StudentTSite(3.0), LaplaceSite(1.0, "kl"), "gaussian")
    ]
    assert "local bound" in told[0] and "local bound" not in told[1] + told[2]
