"""Spike-and-slab factor, linear posterior, EP energy, its descents: quadrature, algebra, slopes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_expit, logit, logsumexp
from scipy.stats import multivariate_normal

from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep.spike_slab import _linear_model
from sklearn_ep.spike_slab._double_loop import double_loop
from sklearn_ep.spike_slab._energy import EPEnergy, descend, regular_ep
from sklearn_ep.spike_slab._learning import leading_log_evidence, sampled_log_evidence
from sklearn_ep.spike_slab._linear_model import LinearModel
from sklearn_ep.spike_slab._prior import SpikeSlab

P, V = 0.2, 1.3


def draw_cavities(rng, n, v=V):
    """Cavities of all sizes, a third of them of negative precision."""
    negative = -rng.random(n) / v * 0.999
    precision = np.where(rng.random(n) < 0.3, negative, np.exp(4 * rng.normal(size=n)))
    return rng.normal(size=n) * np.exp(2 * rng.normal(size=n)), precision


@pytest.mark.parametrize(
    ("shift", "precision"), [(0.7, 2.0), (-3.0, 0.0), (0.4, -0.6), (12.0, 5.0), (0.0, 1e-9)]
)
def test_tilted_moments_equal_quadrature(shift, precision):
    t = SpikeSlab(V, logit(P)).tilted(np.array([shift]), np.array([precision]))

    span = 14 * np.sqrt(t.slab_var[0])
    w = t.slab_mean[0] + np.linspace(-span, span, 20_001)
    slab = np.exp(shift * w - precision * w**2 / 2 - w**2 / (2 * V))
    m0, m1, m2 = (P * np.trapezoid(w**k * slab, w) / np.sqrt(2 * np.pi * V) for k in range(3))
    z = m0 + 1 - P
    assert t.log_z[0] == pytest.approx(np.log(z), rel=1e-10, abs=1e-10)
    assert t.inclusion[0] == pytest.approx(m0 / z, rel=1e-10)
    assert t.mean[0] == pytest.approx(m1 / z, rel=1e-9, abs=1e-12)
    assert t.var[0] == pytest.approx(m2 / z - (m1 / z) ** 2, rel=1e-9)


@pytest.mark.parametrize("about", ["nothing", "near", "anything"])
@pytest.mark.parametrize("logit_p", [-9.0, -2.0, 0.0, 3.0])
def test_inverse_map_round_trip(logit_p, about):
    rng = np.random.default_rng(0)
    factor = SpikeSlab(V, logit_p)
    t = factor.tilted(*draw_cavities(rng, 100_000))
    told = dict(nothing=np.nan, near=t.inclusion * 0.999, anything=rng.random(100_000))
    c = factor.matched(t.mean, t.var, told[about])
    back = factor.tilted(c.shift, c.precision)
    assert np.all(factor.proper(c.precision))
    np.testing.assert_allclose(back.mean, t.mean, rtol=2e-12, atol=0)
    np.testing.assert_allclose(back.var, t.var, rtol=2e-12, atol=0)
    assert c.kl.min() > -1e-12


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(-6, 4))
def test_inverse_map_of_groups(seed, n_groups, logit_p):
    rng = np.random.default_rng(seed)
    groups = np.concatenate([np.arange(n_groups), rng.integers(0, n_groups, 15)])
    factor = SpikeSlab(V, logit_p, groups)
    shift, precision = draw_cavities(rng, len(groups))
    t = factor.tilted(shift / 4, np.minimum(precision, 100.0))
    c = factor.matched(t.mean, t.var)
    back = factor.tilted(c.shift, c.precision)
    np.testing.assert_allclose(back.mean, t.mean, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(back.var, t.var, rtol=1e-9)
    assert all(np.ptp(c.inclusion[groups == g]) == 0 for g in range(n_groups))


def test_groups_of_one_are_no_groups():
    rng = np.random.default_rng(1)
    plain, grouped = SpikeSlab(V, -1.0), SpikeSlab(V, -1.0, np.arange(200))
    cavity = draw_cavities(rng, 200)
    for a, b in zip(plain.tilted(*cavity), grouped.tilted(*cavity), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)
    t = plain.tilted(*cavity)
    a, b = plain.matched(t.mean, t.var), grouped.matched(t.mean, t.var)
    np.testing.assert_allclose(a.kl, b.kl, rtol=1e-8, atol=1e-10)


def test_extreme_moments_are_finite():
    mean = np.array([0.0, 1e-60, 1e3, 1.0, -1e-8])
    var = np.array([1e-100, 1e-80, 1.0, 1e-12, 1e6])
    c = SpikeSlab(V, -3.0).matched(mean, var)
    for part in c:
        assert np.all(np.isfinite(part))


@pytest.mark.parametrize("groups", [None, np.array([0, 0, 1, 1, 1, 2])])
def test_fisher_block_is_the_covariance_of_the_statistics(groups):
    """Derivative of the tilted moments in the cavity, by finite differences."""
    rng = np.random.default_rng(2)
    factor = SpikeSlab(V, -0.5, groups)
    x = np.concatenate([rng.normal(size=6), rng.gamma(2.0, size=6)])

    def moments(x):
        t = factor.tilted(x[:6], x[6:])
        return np.concatenate([t.mean, -0.5 * (t.var + t.mean**2)])

    index = np.arange(6)
    got = factor.fisher_block(factor.tilted(x[:6], x[6:]), index)
    h = 1e-6
    slopes = [(moments(x + h * e) - moments(x - h * e)) / (2 * h) for e in np.eye(12)]
    np.testing.assert_allclose(got, np.array(slopes).T, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------- linear posterior


def sites_of_all_signs(rng, d):
    precision = rng.gamma(1.0, size=d) + 0.3
    precision[1:4] = [-0.02, 0.0, 1e-14]
    return precision, rng.normal(size=d)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (8, 8), (7, 6)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("block_bytes", [2**24, 8 * 8 * 3])
def test_linear_posterior_equals_dense_algebra(shape, order, block_bytes, monkeypatch):
    monkeypatch.setattr(_linear_model, "BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(3)
    n, d = shape
    X, y = np.asarray(rng.normal(size=shape), order=order), rng.normal(size=n)
    precision, shift = sites_of_all_signs(rng, d)
    q = LinearModel(X, y).marginals(precision, shift, 0.3, 0.01)
    A = X.T @ X / 0.3 + np.diag(precision)
    S = np.linalg.inv(A)
    m = S @ (shift + X.T @ y / 0.3)
    T, keep = rng.normal(size=(5, d)), np.array([0, 1, 3, d - 1])
    close = dict(rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(q.mean, m, **close)
    np.testing.assert_allclose(q.var, np.diag(S), **close)
    np.testing.assert_allclose(q.log_det, np.linalg.slogdet(A)[1], **close)
    np.testing.assert_allclose(q.squared_error, np.sum((y - X @ m) ** 2), **close)
    np.testing.assert_allclose(q.data_term, y @ (y - X @ m), **close)
    np.testing.assert_allclose(q.trace, np.trace(X @ S @ X.T), **close)
    np.testing.assert_allclose(q.block(keep), S[np.ix_(keep, keep)], **close)
    np.testing.assert_allclose(q.covariance(T), np.diag(T @ S @ T.T), **close)
    np.testing.assert_allclose(q.covariance(T, T[:2]), T @ S @ T[:2].T, **close)
    np.testing.assert_allclose(q.times(T), T @ S, **close)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_draws_have_the_moments_of_the_posterior(shape):
    rng = np.random.default_rng(4)
    X, y = rng.normal(size=shape), rng.normal(size=shape[0])
    precision, shift = sites_of_all_signs(rng, shape[1])
    q = LinearModel(X, y).marginals(precision, shift, 0.3, 0.01)
    w = q.draw(60_000, rng)
    S = q.block(np.arange(shape[1]))
    assert np.abs((w.mean(0) - q.mean) / np.sqrt(q.var)).max() < 0.02
    assert np.abs(np.cov(w.T) - S).max() < 0.02 * np.abs(S).max()


@pytest.mark.parametrize("shape", [(6, 15), (15, 6)])
def test_improper_sites_are_refused(shape):
    rng = np.random.default_rng(5)
    model = LinearModel(rng.normal(size=shape), rng.normal(size=shape[0]))
    with pytest.raises(ImproperPosterior):
        model.marginals(np.full(shape[1], -5.0), np.zeros(shape[1]), 10.0, 0.01)


def test_the_second_step_is_no_larger_than_the_rows():
    """Many weak sites are a matrix of rows squared and nothing larger, and the answer the same."""
    rng = np.random.default_rng(8)
    n, d = 6, 2000
    X, y = rng.normal(size=(n, d)), rng.normal(size=n)
    precision, shift = 10.0 ** rng.uniform(-4, -1, size=d), rng.normal(size=d)
    precision[:2] = -1e-7, 1e-9
    model = LinearModel(X, y)
    tracemalloc.start()
    q = model.marginals(precision, shift, 0.3, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * X.nbytes < d**2
    # from a posterior that needs no second step by rank-two algebra: the first two sites change
    base = np.maximum(precision, 1e-4)
    S = np.diag(1 / base) - (X / base).T @ np.linalg.solve(
        0.3 * np.eye(n) + (X / base) @ X.T, X / base
    )
    lack, two = np.diag(1 / (base - precision)[:2]), S[:, :2]
    S += two @ np.linalg.solve(lack - two[:2], two.T)
    np.testing.assert_allclose(q.var, np.diag(S), rtol=1e-7)
    np.testing.assert_allclose(q.mean, S @ (shift + X.T @ y / 0.3), rtol=1e-6, atol=1e-6)
    precision[: n + 1] = 1e-12
    with pytest.raises(
        ImproperPosterior, match="more coefficients without a proper prior than rows"
    ):
        model.marginals(precision, shift, 0.3, 1.0)


# ---------------------------------------------------------------------------- energy and descent


def problem(seed, n, d, noise=0.1, groups=None):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    y = X @ (rng.normal(size=d) * (rng.random(d) < 0.3)) + 0.3 * rng.normal(size=n)
    return EPEnergy(LinearModel(X, y), SpikeSlab(1.0, logit(0.3), groups), noise, float(n))


def start(p, seed=0):
    d = p.model.X.shape[1]
    rng = np.random.default_rng(seed)
    return np.stack([rng.normal(size=d), 3.0 + rng.random(d)])


@pytest.mark.parametrize("shape", [(20, 8), (8, 20)])
@pytest.mark.parametrize("groups", [None, "threes"])
def test_energy_gradient_by_finite_differences(shape, groups):
    d = shape[1]
    groups = None if groups is None else np.arange(d) // 3
    p = problem(6, *shape, groups=groups)
    sites = start(p)
    sites[1, :2] = [-0.05, 1e-6]
    s = p.at(sites)
    S, m = s.marginals.block(np.arange(d)), s.mean
    cross = -S * m
    F = np.block([[S, cross], [cross.T, S * (0.5 * S + np.outer(m, m))]])
    slope = (F @ np.concatenate(s.gradient)).reshape(2, d)
    h = 1e-5
    for i in range(2):
        for j in range(d):
            step = np.zeros((2, d))
            step[i, j] = h
            numeric = (p.at(sites + step).energy - p.at(sites - step).energy) / (2 * h)
            assert numeric == pytest.approx(slope[i, j], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("shape", [(40, 10), (10, 25)])
@pytest.mark.parametrize("groups", [None, "threes"])
def test_descent_never_climbs_and_ends_at_a_fixed_point(shape, groups):
    groups = None if groups is None else np.arange(shape[1]) // 3
    for seed in range(5):
        p = problem(seed, *shape, groups=groups)
        out = descend(p.at(start(p, seed)), max_iter=300, tol=1e-8)
        assert out.converged
        energy = out.history["objective"]
        assert np.diff(energy).max() <= 1e-10 * (1 + np.abs(energy).max())
        s = out.evaluation.payload
        assert np.abs(s.matched.precision - s.cavity[1]).max() < 1e-4 * np.abs(s.cavity[1]).max()


@pytest.mark.parametrize("groups", [None, np.arange(12) // 4])
def test_small_blocks_and_none_reach_the_same_point(groups):
    """Separate steps solve their system exactly: a wrong one would not lead down to it."""
    p = problem(7, 40, 12, groups=groups)
    runs = [descend(p.at(start(p)), max_iter=500, tol=1e-9, max_block=k) for k in (0, 3, 50)]
    for run in runs:
        assert run.converged and run.n_iter <= 2 * runs[2].n_iter
        np.testing.assert_allclose(
            run.evaluation.payload.mean, runs[2].evaluation.payload.mean, atol=1e-7
        )


def test_regular_ep_ends_at_the_fixed_point_of_the_descent():
    p = problem(8, 60, 8)
    a = regular_ep(p, start(p), max_iter=300, tol=1e-10, damping=0.5)
    b = descend(p.at(start(p)), max_iter=100, tol=1e-10)
    assert a.converged
    assert b.converged
    np.testing.assert_allclose(a.evaluation.payload.mean, b.evaluation.payload.mean, atol=1e-8)
    assert a.history["objective"][-1] == pytest.approx(b.history["objective"][-1], abs=1e-9)


def test_double_loop_falls_as_far_as_it_guarantees_and_agrees():
    p = problem(8, 60, 4, noise=0.5)
    a = double_loop(p.at(start(p)), max_iter=100, tol=1e-6)
    b = descend(p.at(start(p)), max_iter=100, tol=1e-10)
    energy = a.history["objective"]
    assert np.all(np.diff(energy) <= 1e-9 * (1 + np.abs(energy).max()) - a.history["fall"][:-1])
    # no site is at its bound, so that it is a fixed point of EP as well
    assert a.converged and a.history["at_bound"][-1] == 0
    assert a.evaluation.payload.residual < 1e-4
    assert energy[-1] == pytest.approx(b.evaluation.payload.energy, abs=1e-6)


def published(seed):
    """Problem of a set with ten rows of unit length, 25 columns and next to no noise."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=25) * (rng.random(25) < 0.2)
    X = rng.normal(size=(10, 25))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = X @ w + 0.005 * rng.normal(size=10)
    return EPEnergy(LinearModel(X, y), SpikeSlab(1.0, logit(0.2)), 0.005**2, 10)


@pytest.mark.parametrize("seed", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_double_loop_comes_to_rest_with_sites_on_their_bounds(seed):
    p = published(seed)
    prior = np.stack([np.zeros(25), np.full(25, 1.0 / 0.2)])  # the moments of the factor
    a = double_loop(p.at(prior), max_iter=150, tol=1e-4)
    energy, d = a.history["objective"], len(a.x[0])
    assert a.converged and a.history["at_bound"][-1] > 0
    assert np.all(np.diff(energy) <= 1e-9 - a.history["fall"][:-1])
    # the bound of the paper, and what follows for the smallest guaranteed fall
    low = 0.5 * p.n_rows * np.log(2 * np.pi * p.noise) - 0.5 * d * np.log(2)
    assert energy.min() > low
    assert a.history["fall"].min() <= (energy[0] - low) / a.n_iter


@pytest.mark.parametrize("shape", [(30, 8), (8, 20)])
def test_evidence_gradient_by_finite_differences(shape):
    p = problem(10, *shape)
    h = np.array([np.log(0.1), np.log(0.8), logit(0.25)])

    def solved(h):
        q = p.with_parameters(h)
        return descend(q.at(start(p)), max_iter=300, tol=1e-10).evaluation.payload

    got = -solved(h).evidence_gradient
    for i in range(3):
        e = 1e-5 * np.eye(3)[i]
        numeric = (solved(h + e).energy - solved(h - e).energy) / 2e-5
        assert got[i] == pytest.approx(numeric, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------------------- single models


def _exact_log_evidence(problem, groups):
    """Sum over all models of the log density of y, every one by the covariance of y."""
    X, y, factor = problem.model.X, problem.model.y, problem.factor
    parts = []
    for i in range(2 ** (groups.max() + 1)):
        bits = (i >> np.arange(groups.max() + 1)) & 1
        B = X[:, bits[groups] == 1]
        cov = factor.slab_variance * B @ B.T + problem.noise * np.eye(len(y))
        log_prior = np.where(bits, log_expit(factor.logit), log_expit(-factor.logit)).sum()
        parts.append(log_prior + multivariate_normal.logpdf(y, cov=cov))
    return logsumexp(parts)


@pytest.mark.parametrize(("n", "grouped"), [(5, False), (9, False), (5, True), (9, True)])
def test_evidence_of_single_models_is_near_enumeration(n, grouped):
    rng = np.random.default_rng(n)
    X = rng.normal(size=(n, 8))
    y = X[:, 0] - X[:, 1] + 0.5 * rng.normal(size=n)
    groups = np.array([0, 0, 1, 2, 2, 3, 4, 4]) if grouped else np.arange(8)
    factor = SpikeSlab(V, logit(P), groups if grouped else None)
    problem = EPEnergy(LinearModel(X, y), factor, 0.3, n)
    state = descend(problem.at(np.stack([np.zeros(8), np.ones(8)])), max_iter=100, tol=1e-8)
    exact = _exact_log_evidence(problem, groups)
    sampled = sampled_log_evidence(state.evaluation.payload, 0, 4000)
    assert sampled == pytest.approx(exact, abs=0.1)
    assert exact - 0.5 < leading_log_evidence(state.evaluation.payload, 20) < exact + 1e-9
    every = leading_log_evidence(state.evaluation.payload, n_rounds=1000)
    assert every == pytest.approx(exact, abs=1e-9)


def test_evidence_of_single_models_knows_weights_and_no_order_of_columns():
    rng = np.random.default_rng(0)
    X, y, w = rng.normal(size=(12, 20)), rng.normal(size=12), rng.integers(1, 4, 12)
    order = rng.permutation(20)
    rows = [
        (X * np.sqrt(w)[:, None], y * np.sqrt(w)),
        (np.repeat(X, w, 0), np.repeat(y, w)),
        ((X * np.sqrt(w)[:, None])[:, order], y * np.sqrt(w)),
    ]
    values = []
    for A, b in rows:
        problem = EPEnergy(LinearModel(A, b), SpikeSlab(V, logit(P)), 0.3, w.sum())
        state = descend(problem.at(np.stack([np.zeros(20), np.ones(20)])), max_iter=100, tol=1e-10)
        payload = state.evaluation.payload
        values.append([sampled_log_evidence(payload, 0, 64), leading_log_evidence(payload, 20)])
    np.testing.assert_allclose(values[1:], [values[0]] * 2, rtol=1e-6)


# ---------------------------------------------------------------------------- how runs end


def test_the_history_ends_with_the_figures_of_the_state_that_is_returned():
    p = problem(2, 20, 12)
    runs = [
        descend(p.at(start(p)), max_iter=k, tol=t) for k, t in ((3, 1e-8), (300, 1e-8), (300, 0.0))
    ]
    assert [r.reason for r in runs] == ["max_iter", "converged", "stuck"]
    for r in runs:
        assert r.n_iter == len(r.history["residual"]) == len(r.history["objective"])
        assert r.history["residual"][-1] == r.residual == r.evaluation.payload.residual
    again = descend(runs[1].evaluation.payload, max_iter=5, tol=1e-8)
    assert again.reason == "converged" and again.n_iter == 1
    np.testing.assert_array_equal(again.x, runs[1].x)


def test_sweeps_without_energies_are_the_same_sweeps():
    p = problem(4, 30, 10)
    kw = dict(max_iter=6, tol=1e-12, damping=0.5)
    with_them, without = (regular_ep(p, start(p), **kw, energies=e) for e in (True, False))
    np.testing.assert_array_equal(with_them.x, without.x)
    assert set(with_them.history) == {"residual", "objective", "phase"}
    assert set(without.history) == {"residual", "phase"}


class TiltedOnly:
    """A prior that EP can use and the descent cannot."""

    def __init__(self, factor):
        self.tilted, self.proper = factor.tilted, factor.proper
        self.slab_variance = factor.slab_variance


def test_a_prior_that_lacks_a_method_is_refused_by_name():
    p = problem(5, 20, 6)
    p.factor = TiltedOnly(p.factor)
    out = regular_ep(p, start(p), max_iter=3, tol=1e-6, damping=0.5, energies=False)
    assert np.all(np.isfinite(out.evaluation.payload.mean))
    with pytest.raises(TypeError, match="TiltedOnly has no `matched`.*the descent needs"):
        descend(p.at(start(p)), max_iter=3, tol=1e-6)
    with pytest.raises(TypeError, match="TiltedOnly has no `fisher_block`.*the double loop needs"):
        double_loop(p.at(start(p)), max_iter=3, tol=1e-6)


def test_a_variance_without_digits_is_no_posterior():
    """The cavity that matched it lay on the edge of those with a slab, and a division was by 0."""
    X = np.array([[1.0, 1.0], [2.0, 2.0]])  # which leave the difference to the sites
    problem = EPEnergy(LinearModel(X, X[:, 0]), SpikeSlab(1.0, 0.0), 1.0, 2)
    assert np.all(problem.at(np.array([[0.0, 0.0], [1e-6, 1e-6]])).var < 1e6)
    for tiny in (1e-14, 1e-17):
        with pytest.raises(ImproperPosterior):
            problem.at(np.array([[0.0, 0.0], [tiny, tiny]]))
