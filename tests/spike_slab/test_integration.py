"""SpikeSlabRegressor averaged over its hyperparameters: exact posteriors, priors, guards."""

import pickle
import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.sparse as sp
from oracles import oracle
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep._engine.gaussian import ImproperPosterior
from sklearn_ep.datasets import make_spike_slab_regression
from sklearn_ep.spike_slab import _fit as integration
from sklearn_ep.spike_slab import _runs
from sklearn_ep.spike_slab._plan import make_plan

EXACT = oracle("spike_slab_integrated")["problems"]
GIVEN = dict(noise_variance=0.3, slab_variance=1.0, prior_inclusion=0.2)


def data(n=40, d=6, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    return X, 1.5 * X[:, 0] - X[:, 1] + 0.5 * rng.normal(size=n) + 1.0


def moments(reg):
    mean = reg.hyper_weights_ @ reg.hyper_nodes_
    return mean, np.sqrt(reg.hyper_weights_ @ (reg.hyper_nodes_ - mean) ** 2)


def runs_of(reg, X, y, groups=None):
    """The plan of a fit, and EP at any hyperparameters of it."""
    plan = make_plan(reg, X, y, None, groups)
    at = plan.problem, plan.space, plan.prior
    return plan, integration.NodeRuns(*at, _runs.settled_near)


# ---------------------------------------------------------------------------- exact posteriors


@pytest.mark.parametrize("k", range(len(EXACT)))
def test_agrees_with_all_models_enumerated_on_a_grid(k):
    p = EXACT[k]
    reg = SpikeSlabRegressor().fit(np.array(p["X"]), np.array(p["y"]))
    sd = np.sqrt(p["variance"])
    assert np.abs(reg.inclusion_proba_ - p["inclusion"]).max() < 0.03
    assert np.abs((reg.coef_ - p["mean"]) / sd).max() < 0.05
    large = sd > 0.02 * sd.max()
    assert np.abs(reg.coef_std_ / sd - 1)[large].max() < 0.05
    reg.hyper_nodes_[:, 1] -= reg.hyper_nodes_[:, 0]  # slab over noise, as the truth has it
    mean, spread = moments(reg)
    assert np.abs((mean - p["hyper_mean"]) / p["hyper_sd"]).max() < 0.15
    assert np.all((0.75 < spread / p["hyper_sd"]) & (spread / p["hyper_sd"] < 1.05))
    assert reg.log_evidence_ == pytest.approx(p["log_z"], abs=0.1)


def test_a_sure_inclusion_is_ridge_regression_with_noise_and_ratio_integrated_out():
    """All columns in: the evidence is known, and by its spectrum cheap on a grid."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(30, 40)) @ (np.eye(40) + 0.3 * rng.normal(size=(40, 40)))
    y = X @ rng.normal(size=40) / 3 + 2.0 * rng.normal(size=30)
    sure = 1 - 1e-9
    reg = SpikeSlabRegressor(prior_inclusion=sure).fit(X, y)
    A, unit = (X - X.mean(0)) / X.std(0), y.std()
    values, vectors = np.linalg.eigh(A @ A.T)
    values, z = values[1:], (vectors.T @ (y - y.mean()))[1:] / unit
    noise = np.linspace(np.log(1e-6), np.log(2.0), 200)
    ratio = np.linspace(-7.0, 18.0, 200)
    scale = np.exp(noise)[:, None, None] * (1 + np.exp(ratio)[:, None] * values)
    log_p = -0.5 * (np.log(2 * np.pi * unit**2 * scale) + z**2 / scale).sum(-1)
    log_p += ratio - 1.5 * np.logaddexp(0.0, ratio) - np.log(2.0)
    total = logsumexp(log_p)
    cell = (noise[1] - noise[0]) * (ratio[1] - ratio[0])
    assert reg.log_evidence_ == pytest.approx(total + np.log(cell), abs=0.1)
    weight = np.exp(log_p - total)
    exact = weight.sum(1) @ noise + 2 * np.log(unit)
    assert abs(np.log(reg.noise_variance_) - exact) < 0.15 * moments(reg)[1][0]


# ---------------------------------------------------------------------------- priors, gradients


def prior_of(**given):
    """The prior of an average over the hyperparameters of 9 columns that are not given."""
    X, y = data(d=9)
    return make_plan(SpikeSlabRegressor(**given), X, y, None, None).prior


def test_priors_are_normalised_and_flat_where_they_should_be():
    prior = prior_of()

    def mass(k, **only):
        def density(x):
            h = np.zeros(3)
            h[k] = x
            return np.exp(prior.log_density(h) - prior.log_density(np.zeros(3)))

        alone = replace(prior, **only).log_density(np.zeros(3))
        return quad(density, -60, 60, limit=200)[0] * np.exp(alone)

    assert mass(1, inclusion=False) == pytest.approx(1.0, abs=1e-6)
    assert mass(2, size=None) == pytest.approx(1.0, abs=1e-6)
    shift = np.array([1.3, 1.3, 0.0])  # of noise and slab together: units of y
    h = np.array([-1.0, 0.4, -2.0])
    assert prior.log_density(h + shift) == pytest.approx(prior.log_density(h), abs=1e-12)
    assert prior.misses == 3.0 and prior_of(slab_variance=1.0).size is None
    assert not prior_of(prior_inclusion=0.2).inclusion


@pytest.mark.parametrize("size", [None, 0.7, 5.0])
def test_slopes_of_priors_are_their_differences(size):
    prior = replace(prior_of(), size=size)
    rng = np.random.default_rng(0)
    for h in rng.normal(size=(5, 3)) * 3:
        steps = 1e-5 * np.eye(3)
        slope = [(prior.log_density(h + e) - prior.log_density(h - e)) / 2e-5 for e in steps]
        np.testing.assert_allclose(prior.slope(h), slope, atol=1e-8)


@pytest.mark.parametrize(
    "given",
    [{}, dict(noise_variance=0.2), dict(slab_variance=1.0), dict(hyperparameters="mode")],
)
@pytest.mark.parametrize("groups", [None, np.array([0, 0, 1, 2, 2, 3])])
def test_gradients_of_nodes_are_differences_of_their_objectives(given, groups, monkeypatch):
    monkeypatch.setattr(_runs, "_NEXT", _runs._NEXT._replace(tol=1e-10, sweeps=300))
    X, y = data()
    reg = SpikeSlabRegressor(**given)
    plan, runs = runs_of(reg, X, y, groups)
    space = runs.space
    h = plan.space.value + np.where(plan.space.free, [0.1, -0.2, 0.3], 0.0)
    phi = space.phi(h)
    np.testing.assert_allclose(space.h(phi), h)
    at = plan.problem.with_parameters(h).at(np.ones((2, 6)) * [[0.0], [5.0]])
    start = runs.node(phi, at)
    node = runs.evaluate(phi, start)
    for k, slope in enumerate(node.gradient):
        e = 1e-3 * (np.arange(len(phi)) == k)
        high, low = runs.evaluate(phi + e, node), runs.evaluate(phi - e, node)
        assert slope == pytest.approx((high.objective - low.objective) / 2e-3, abs=1e-4)


# ---------------------------------------------------------------------------- what is answered


def test_answers_are_those_of_the_mixture():
    X, y = data(24, 2)
    reg = SpikeSlabRegressor().fit(X, y)
    w, parts = reg.hyper_weights_, reg._posteriors[0].posteriors
    assert reg.hyperparameters_used_ == "integrate" and len(w) == len(parts) > 10
    assert reg.hyper_names_ == (
        "log_noise_variance", "log_slab_variance", "logit_prior_inclusion",
    )  # fmt: skip
    assert w.sum() == pytest.approx(1.0, abs=1e-12) and np.all(w > 0)
    nodes = np.exp(w @ reg.hyper_nodes_[:, :2])
    np.testing.assert_allclose([reg.noise_variance_, reg.slab_variance_], nodes, rtol=1e-9)
    odds = 1 / (1 + np.exp(-reg.hyper_nodes_[:, 2]))
    assert reg.prior_inclusion_ == pytest.approx(w @ odds, rel=1e-9)
    given = [
        SpikeSlabRegressor(
            noise_variance=np.exp(h[0]), slab_variance=np.exp(h[1]), prior_inclusion=p, tol=1e-6
        ).fit(X, y)
        for h, p in zip(reg.hyper_nodes_, odds, strict=True)
    ]
    means = np.array([g.coef_ for g in given])
    np.testing.assert_allclose(reg.coef_, w @ means, atol=1e-3)
    var = w @ (np.array([g.coef_std_**2 for g in given]) + (means - reg.coef_) ** 2)
    np.testing.assert_allclose(reg.coef_std_, np.sqrt(var), rtol=1e-2)
    inclusion = w @ np.array([g.inclusion_proba_ for g in given])
    np.testing.assert_allclose(reg.inclusion_proba_, inclusion, atol=2e-3)
    rows, sd = np.column_stack([X, np.ones(len(X))]), np.exp(0.5 * reg.hyper_nodes_[:, 0])
    draws = [g.sample_posterior(2000, 0, exact_zeros=True) @ rows.T for g in given]
    low, high = reg.predict_interval(X, level=0.8).T
    for end, level in ((low, 0.1), (high, 0.9)):
        below = w @ [norm.cdf(end, f, s).mean(axis=0) for f, s in zip(draws, sd, strict=True)]
        np.testing.assert_allclose(below, level, atol=0.01)


def test_units_of_data_do_not_matter():
    X, y = data()
    a, b = SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(X * 100.0 + 3.0, y * 1e-3)
    np.testing.assert_allclose(b.inclusion_proba_, a.inclusion_proba_, atol=1e-9)
    np.testing.assert_allclose(b.hyper_weights_, a.hyper_weights_, atol=1e-9)
    unit = 2 * np.log(1e-3)
    np.testing.assert_allclose(b.hyper_nodes_ - a.hyper_nodes_ - [unit, unit, 0], 0, atol=1e-8)


@pytest.mark.parametrize("how", ["auto", "integrate", "mode"])
def test_nothing_to_integrate_is_one_node(how):
    X, y = data()
    reg = SpikeSlabRegressor(hyperparameters=how, **GIVEN).fit(X, y)
    assert reg.hyper_nodes_.shape == (1, 0) and reg.hyper_names_ == ()
    np.testing.assert_array_equal(reg.hyper_weights_, [1.0])
    assert reg.hyperparameters_used_ == "mode"
    assert (reg.noise_variance_, reg.slab_variance_, reg.prior_inclusion_) == pytest.approx(
        tuple(GIVEN.values()), rel=1e-12
    )


@pytest.mark.parametrize("name", GIVEN)
def test_given_values_are_kept_and_the_others_integrated(name):
    X, y = data()
    reg = SpikeSlabRegressor(**{name: GIVEN[name]}).fit(X, y)
    assert getattr(reg, name + "_") == pytest.approx(GIVEN[name], rel=1e-12)
    assert reg.hyper_nodes_.shape == (len(reg.hyper_weights_), 2)
    assert len(reg.hyper_names_) == 2 and not any(name in word for word in reg.hyper_names_)


def test_the_mode_has_one_node_of_what_was_learned():
    X, y = data()
    reg = SpikeSlabRegressor(hyperparameters="mode").fit(X, y)
    learned = np.log([reg.noise_variance_, reg.slab_variance_])
    np.testing.assert_allclose(reg.hyper_nodes_[0, :2], learned, rtol=1e-12)
    assert reg.hyper_nodes_.shape == (1, 3) and reg.hyperparameters_used_ == "mode"
    assert reg.diagnose().remarks == ()


def test_workers_do_not_matter_and_pickles_are_small():
    X, y = data()
    a, b = (SpikeSlabRegressor(n_jobs=j).fit(X, y) for j in (1, 2))
    np.testing.assert_array_equal(a.hyper_nodes_, b.hyper_nodes_)
    np.testing.assert_array_equal(a.coef_, b.coef_)
    alone = SpikeSlabRegressor(hyperparameters="mode").fit(X, y)
    size, one = (len(pickle.dumps(r)) for r in (a, alone))
    assert size < 1.5 * len(a.hyper_weights_) * one
    back = pickle.loads(pickle.dumps(a))
    for first, second in zip(a.predict(X, True), back.predict(X, True), strict=True):
        np.testing.assert_array_equal(first, second)


def test_warm_start_begins_at_the_last_mode():
    X, y = data()
    reg = SpikeSlabRegressor(warm_start=True).fit(X, y)
    first, cold = reg.inclusion_proba_, reg.log_evidence_
    reg.fit(X, y)
    assert reg.search_used_ == "warm"
    np.testing.assert_allclose(reg.inclusion_proba_, first, atol=5e-3)
    assert reg.log_evidence_ == pytest.approx(cold, abs=0.02)


def test_other_fixed_points_join_the_nodes():
    X, y, _ = make_spike_slab_regression(10, 20, n_informative=4, noise=0.02, random_state=3)
    reg = SpikeSlabRegressor(n_init=3, random_state=0).fit(X, y)
    nodes, whole = reg._posteriors
    assert len(whole.posteriors) == len(nodes.posteriors) + reg.n_fixed_points_ - 1
    share = np.exp(np.diff(reg.fixed_point_log_evidences_[:2]))
    assert reg.n_fixed_points_ > 1
    first = whole.weight[len(nodes.posteriors)] / whole.weight[: len(nodes.posteriors)].sum()
    assert first == pytest.approx(share[0], rel=1e-6)
    mean, std = reg.predict(X, return_std=True, mixture=True)
    assert np.all(np.isfinite(mean)) and np.all(std > 0)


@pytest.mark.parametrize(
    "kind", [sp.csr_matrix, pytest.param(sp.csc_array, marks=pytest.mark.slow)]
)
def test_sparse_rows_and_partitions_give_the_dense_answer(kind):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(14, 16)) * (rng.random((14, 16)) < 0.5)
    y = 2.0 * X[:, 0] - X[:, 1] + 0.5 * rng.normal(size=14)
    dense, sparse = SpikeSlabRegressor().fit(X, y), SpikeSlabRegressor().fit(kind(X), y)
    parts = SpikeSlabRegressor().fit([(X[:8], y[:8]), (X[8:], y[8:])])
    for other in (sparse, parts):
        np.testing.assert_allclose(other.inclusion_proba_, dense.inclusion_proba_, atol=1e-6)
        np.testing.assert_allclose(other.predict(kind(X)), dense.predict(X), atol=1e-6)
        assert other.log_evidence_ == pytest.approx(dense.log_evidence_, abs=1e-6)


# ---------------------------------------------------------------------------- search for models


def test_a_sparse_truth_is_found_where_ep_hesitates_and_the_lasso_fails():
    """40 rows, 200 columns, 12 in: the evidence of the truth is 30 nats above what EP finds."""
    X, y, coef = make_spike_slab_regression(540, 200, n_informative=12, random_state=3)
    reg = SpikeSlabRegressor().fit(X[:40], y[:40])
    np.testing.assert_array_equal(reg.get_support(), coef != 0)
    assert np.mean((reg.predict(X[40:]) - y[40:]) ** 2) < 0.03


# ---------------------------------------------------------------------------- guards


def test_little_noise_and_few_rows_do_not_give_a_node_all_weight():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(220, 60))
    y = X[:, :4] @ (rng.normal(size=4) + 1.0) + 0.05 * rng.normal(size=220)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        ours, mode = (
            SpikeSlabRegressor(hyperparameters=how).fit(X[:20], y[:20])
            for how in ("integrate", "mode")
        )
    assert np.all(np.isfinite(ours.hyper_nodes_)) and np.isfinite(ours.log_evidence_)
    loss = [
        -norm.logpdf(y[20:], *reg.predict(X[20:], return_std=True)).mean() for reg in (ours, mode)
    ]
    assert loss[0] < loss[1] + 0.3


def test_evidence_that_single_models_do_not_confirm_is_taken_back(monkeypatch):
    X, y = data(d=60)  # only more columns than rows leave a doubt
    free = SpikeSlabRegressor().fit(X, y)
    monkeypatch.setattr(integration, "overrated", lambda state, seed: 7.0)
    reg = SpikeSlabRegressor().fit(X, y)
    # without the gradient of the evidence the lattice lies elsewhere
    assert reg.log_evidence_ == pytest.approx(free.log_evidence_ - 7.0, abs=0.5)
    assert any("7.0 nats" in remark for remark in reg.diagnose().remarks)
    assert "effective" in str(free.diagnose())


def test_no_single_models_where_rows_are_more_than_columns(monkeypatch):
    monkeypatch.setattr(integration, "overrated", lambda *_: pytest.fail("asked"))
    assert len(SpikeSlabRegressor().fit(*data()).hyper_weights_) > 1


def test_a_node_begins_where_the_prior_answers_what_the_data_said_to_its_neighbour():
    """At the same hyperparameters that is the fixed point; elsewhere it is nearer than its sites.

    With orthogonal columns and the same noise it is the fixed point of any other prior.
    """
    X, y, _ = make_spike_slab_regression(60, 40, n_informative=6, noise=1.0, random_state=2)
    orthogonal = np.linalg.qr(X - X.mean(0))[0]
    h = np.array([-1.0, -1.0, -1.5])
    for rows, steps, exact in ((X, 0.0, True), (orthogonal, 0.5, True), (X, 0.5, False)):
        plan, _ = runs_of(SpikeSlabRegressor(tol=1e-10, max_iter=5000), rows, y)
        near = _runs.run(plan.problem.with_parameters(h), plan.settings).state
        there = plan.problem.with_parameters(h + steps * np.array([not exact, 1.0, -1.0]))
        first = there.at(_runs.first_sites(there, near)).residual
        scaled = near.sites * (near.problem.factor.slab_variance / there.factor.slab_variance)
        assert first < (1e-8 if exact else 0.2 * there.at(scaled).residual)


def test_a_node_begins_at_weaker_sites_where_those_of_its_neighbour_leave_no_posterior(monkeypatch):
    """Columns in doubt have negative sites, which a wider slab or more noise makes too strong."""

    def scaled(there, near):
        return near.sites * (near.problem.factor.slab_variance / there.factor.slab_variance)

    monkeypatch.setattr(_runs, "first_sites", scaled)
    X, y, _ = make_spike_slab_regression(60, 40, n_informative=6, noise=1.0, random_state=2)
    plan, runs = runs_of(SpikeSlabRegressor(), X, y)
    space = runs.space
    h = np.array([-2.0, -1.0, -1.5])
    state = _runs.run(plan.problem.with_parameters(h), plan.settings).state
    near = runs.node(space.phi(h), state)
    refused = 0
    for step in product((-1.0, 0.0, 1.0), repeat=3):
        phi = near.phi + np.array(step)
        there = plan.problem.with_parameters(space.h(phi))
        try:
            there.at(scaled(there, state))
        except ImproperPosterior:
            refused += 1
        else:
            continue
        with monkeypatch.context() as sweeps_only:  # they are to be enough
            sweeps_only.setattr(_runs, "descend", None)
            node = runs.evaluate(phi, near)
        cold = _runs.run(there, plan.settings)
        assert cold.converged
        assert node.log_evidence == pytest.approx(cold.log_evidence, abs=2e-3)
    assert refused > 3
