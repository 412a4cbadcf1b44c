"""Correlated columns: models enumerated and drawn, credible sets, and when EP is left alone."""

import pickle
import warnings

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.inspection import InclusionDisplay
from sklearn_ep.spike_slab import _chains
from sklearn_ep.spike_slab._linear_model import LinearModel
from sklearn_ep.spike_slab._model_law import ModelLaw
from sklearn_ep.spike_slab._plan import make_plan

GIVEN = dict(noise_variance=0.5, slab_variance=1.0, prior_inclusion=0.25)
PLAIN = dict(fit_intercept=False, standardize=False)


def correlated(name, d, n=40, seed=0):
    """Columns that are hard to tell apart, and responses of two of them."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    if name == "copies":
        X[:, d - 4 :] = X[:, :4] * np.array([1, 1, -1, -1])
    elif name == "chain of both signs":
        for j in range(1, d):
            X[:, j] = 0.95 * X[:, j - 1] + np.sqrt(1 - 0.95**2) * X[:, j]
        X *= np.where(np.arange(d) % 2, 1, -1)
    else:
        X = 0.1 * X + np.sqrt(0.99) * rng.normal(size=(n, 1))
    return X, 1.2 * X[:, 0] - 0.8 * X[:, 4] + np.sqrt(0.5) * rng.normal(size=n)


def enumerated(X, y, noise, slab, inclusion):
    """Weights (2^d,) of all models, which columns they have, means of coefficients, evidence."""
    d, gram, Xy = X.shape[1], X.T @ X, X.T @ y
    bits = np.arange(2**d)[:, None] >> np.arange(d) & 1
    A = gram / noise * bits[:, :, None] * bits[:, None, :]
    A[:, np.arange(d), np.arange(d)] += np.where(bits, 1 / slab, 1.0)
    mean = np.linalg.solve(A, (Xy * bits / noise)[:, :, None])[:, :, 0]
    lw = -0.5 * (np.linalg.slogdet(A)[1] + bits.sum(axis=1) * np.log(slab))
    lw += 0.5 * mean @ Xy / noise + bits.sum(axis=1) * np.log(inclusion / (1 - inclusion))
    w, total = np.exp(lw - logsumexp(lw)), logsumexp(lw) + d * np.log1p(-inclusion)
    return w, bits, mean, total - 0.5 * (y @ y / noise + len(y) * np.log(2 * np.pi * noise))


def pairs(reg):
    """Probabilities (d, d) that two columns are in together."""
    columns, on, weight, _ = reg._posteriors[0].candidates()
    out = np.zeros((reg.n_features_in_,) * 2)
    out[np.ix_(columns, columns)] = (on.T * weight) @ on
    return out


# ------------------------------------------------------------------------ against enumeration


@pytest.mark.parametrize(
    ("name", "d", "used"),
    [
        ("copies", 10, "enumeration"),
        ("chain of both signs", 10, "enumeration"),
        ("all at .99", 10, "enumeration"),
        pytest.param("copies", 14, "chains", marks=pytest.mark.slow),
        ("chain of both signs", 9, "chains"),
        pytest.param("all at .99", 14, "chains", marks=pytest.mark.slow),
    ],
)
def test_inclusions_of_singles_and_pairs_are_those_of_all_models(name, d, used, monkeypatch):
    if used == "chains":  # fewer models are as telling, and cost less to enumerate
        monkeypatch.setattr(_chains, "_LENGTHS", _chains._LENGTHS._replace(all_models=0))
    X, y = correlated(name, d)
    w, bits, mean, evidence = enumerated(X, y, *GIVEN.values())
    reg = SpikeSlabRegressor(**GIVEN, **PLAIN).fit(X, y)
    assert reg.algorithm_used_ == used and reg.converged_
    tol = 1e-9 if used == "enumeration" else 0.02
    both = (w * bits.T) @ bits
    np.testing.assert_allclose(reg.inclusion_proba_, w @ bits, atol=tol)
    np.testing.assert_allclose(pairs(reg), both, atol=max(tol, 1e-3))
    np.testing.assert_allclose(reg.coef_, w @ mean, atol=2 * tol)
    assert reg.log_evidence_ == pytest.approx(evidence, abs=20 * tol)
    draws = reg.sample_posterior(20_000, random_state=0, exact_zeros=True) != 0
    np.testing.assert_allclose(draws.T.astype(float) @ draws / len(draws), both, atol=0.02)


def test_noise_ratio_and_inclusion_are_integrated_out():
    """Quadrature over log noise, ratio and expected number of columns for each of 16 models."""
    X, y = correlated("all at .99", 5, n=30)
    X, y = X[:, :4], y - y.mean()
    reg = SpikeSlabRegressor(**PLAIN).fit(X, y)
    assert reg.algorithm_used_ == "enumeration"
    size, d, n = np.mean(X**2), 4, len(y)
    worth = LinearModel(X, y).n_independent(n)
    p = (worth ** ((np.arange(400) + 0.5) / 400)) / d
    log_r, log_s = np.linspace(np.log(1e-6), np.log(1e8), 500), np.linspace(-4, 4, 400)
    total, on, noise = [], [], []
    for i in range(16):
        bits = (i >> np.arange(d)) & 1
        value, left = np.linalg.eigh((X * bits) @ X.T)
        y2 = (left.T @ y) ** 2
        scale = 1 + np.exp(log_r)[:, None] / size * np.maximum(value, 0)
        square, log_det = (y2 / scale).sum(axis=1), np.log(scale).sum(axis=1)
        fit = -0.5 * (
            log_det[:, None] + n * (log_s + np.log(2 * np.pi)) + square[:, None] / np.exp(log_s)
        )
        k = bits.sum()
        prior = log_r - 2 * np.logaddexp(0, log_r) + np.log(np.mean(p**k * (1 - p) ** (d - k)))
        cells = fit + prior[:, None] + np.log((log_r[1] - log_r[0]) * (log_s[1] - log_s[0]))
        total.append(logsumexp(cells))
        on.append(bits)
        noise.append(np.exp(logsumexp(cells, axis=0) - total[-1]) @ log_s)
    w = np.exp(np.array(total) - logsumexp(total))
    np.testing.assert_allclose(reg.inclusion_proba_, w @ np.array(on), atol=2e-3)
    assert reg.log_evidence_ == pytest.approx(logsumexp(total), abs=0.01)
    assert np.log(reg.noise_variance_) == pytest.approx(w @ np.array(noise), abs=0.02)
    assert reg.hyper_nodes_.shape[1] == 3 and reg.hyper_weights_.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"noise_variance": 0.5}, marks=pytest.mark.slow),
        pytest.param({"slab_variance": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_chains_agree_with_all_models_whatever_is_given(given, monkeypatch):
    X, y = correlated("copies", 9, n=50, seed=1)
    exact = SpikeSlabRegressor(**given).fit(X, y)
    monkeypatch.setattr(_chains, "_LENGTHS", _chains._LENGTHS._replace(all_models=0))
    drawn = SpikeSlabRegressor(**given).fit(X, y)
    assert (exact.algorithm_used_, drawn.algorithm_used_) == ("enumeration", "chains")
    np.testing.assert_allclose(drawn.inclusion_proba_, exact.inclusion_proba_, atol=0.02)
    np.testing.assert_allclose(pairs(drawn), pairs(exact), atol=0.02)
    np.testing.assert_allclose(drawn.coef_, exact.coef_, atol=0.05)
    np.testing.assert_allclose(drawn.coef_std_, exact.coef_std_, atol=0.03)
    assert drawn.log_evidence_ == pytest.approx(exact.log_evidence_, abs=0.25)
    for name in ("noise_variance_", "slab_variance_", "prior_inclusion_"):
        assert np.log(getattr(drawn, name)) == pytest.approx(np.log(getattr(exact, name)), abs=0.15)


# ------------------------------------------------------------------------ one distribution


def assert_covariance_of(draws, stated):
    """Coefficients that are rarely in have heavy tails: within five errors of the draws' own."""
    centred = draws - draws.mean(axis=0)
    second = (centred**2).T @ centred**2 / len(draws)
    found = centred.T @ centred / len(draws)
    error = np.sqrt((second - found**2) / len(draws))
    assert np.all(np.abs(stated - found) < 5 * error + 1e-3)


@pytest.mark.parametrize("intercept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_moments_intervals_and_predictions_are_those_of_the_draws(intercept):
    X, y = correlated("chain of both signs", 30, n=25, seed=2)
    reg = SpikeSlabRegressor(fit_intercept=intercept, max_iter=4).fit(X, y + 3)  # rounds
    assert reg.algorithm_used_ == "chains"
    draws = reg.sample_posterior(40_000, random_state=0)
    coef, rest = draws[:, :30], draws[:, 30:].sum(axis=1)
    sd = reg.coef_std_ + 1e-3
    assert np.abs((coef.mean(axis=0) - reg.coef_) / sd).max() < 0.05
    assert_covariance_of(coef, reg.covariance(np.arange(30)))
    np.testing.assert_allclose(np.diagonal(reg.covariance(np.arange(30))), reg.coef_std_**2)
    assert np.abs(np.mean(coef != 0, axis=0) - reg.inclusion_proba_).max() < 0.03
    some = np.argsort(-reg.inclusion_proba_)[:5]
    new = np.random.default_rng(0).normal(size=(6, 30))
    sums = coef @ new.T + rest[:, None]
    assert_covariance_of(sums, reg.latent_covariance(new))
    mean, std = reg.predict(new, return_std=True)
    np.testing.assert_allclose(mean, reg.predict(new), rtol=1e-12)
    np.testing.assert_allclose(mean, new @ reg.coef_ + reg.intercept_, rtol=1e-9)
    noise = np.exp(reg.hyper_nodes_[:, 0]) @ reg.hyper_weights_
    np.testing.assert_allclose(std**2, sums.var(axis=0) + noise, rtol=0.1)
    level = np.quantile(coef, [0.05, 0.95], axis=0).T
    np.testing.assert_allclose(reg.coef_interval(0.9)[some], level[some], atol=0.1)
    low, high = reg.predict_interval(new, 0.9).T
    assert np.all(low < mean) and np.all(mean < high)
    assert "inclusion" in reg.summary().coefficients and "chains" in str(reg.diagnose())


def test_the_same_answer_whatever_the_order_of_columns_and_after_a_pickle():
    X, y = correlated("chain of both signs", 15, n=60, seed=3)
    order = np.random.default_rng(0).permutation(15)
    two = dict(max_iter=2)  # rounds
    a, b = SpikeSlabRegressor(**two).fit(X, y), SpikeSlabRegressor(**two).fit(X[:, order], y)
    np.testing.assert_allclose(b.inclusion_proba_, a.inclusion_proba_[order], atol=1e-9)
    again = SpikeSlabRegressor(**two, n_jobs=2).fit(X, y)
    other = SpikeSlabRegressor(**two, random_state=1).fit(X, y)
    np.testing.assert_array_equal(a.coef_, again.coef_)
    assert 0 < np.abs(a.inclusion_proba_ - other.inclusion_proba_).max() < 0.1
    back = pickle.loads(pickle.dumps(a))
    np.testing.assert_array_equal(back.predict(X, True), a.predict(X, True))


def test_ep_answers_where_columns_are_not_correlated_or_when_asked():
    X, y = correlated("chain of both signs", 14, seed=4)
    new = np.random.default_rng(0).normal(size=X.shape)
    ours = SpikeSlabRegressor().fit(new, new[:, 0] + y)
    assert ours.algorithm_used_ in ("ep", "convergent") and hasattr(ours, "site_precision_")
    assert SpikeSlabRegressor(hyperparameters="mode").fit(X, y).algorithm_used_ != "chains"
    assert SpikeSlabRegressor().fit(X, y, groups=np.arange(14) // 2).algorithm_used_ != "chains"
    ours.set_params(max_iter=2).fit(X, y)  # rounds
    assert ours.algorithm_used_ == "chains" and not hasattr(ours, "site_precision_")


def test_ep_answers_where_most_of_many_columns_are_in(monkeypatch):
    """Fifty by default, and half of them: fewer here, as chains are slow with so many."""
    monkeypatch.setattr(_chains, "_LENGTHS", _chains._LENGTHS._replace(dense=10))
    X, _ = correlated("chain of both signs", 20, n=60, seed=6)
    y = 3 * X.sum(axis=1) + np.random.default_rng(0).normal(size=60)
    given = dict(noise_variance=1.0, slab_variance=9.0, prior_inclusion=0.9)
    reg = SpikeSlabRegressor(**given).fit(X, y)
    assert reg.algorithm_used_ in ("ep", "convergent") and reg.expected_model_size_ > 15


def test_independent_columns_of_few_rows_are_not_taken_for_correlated():
    """Chance correlations of 20 rows reach .8; one data set in a hundred may pass the bound."""
    found = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, d = [(20, 100), (40, 200), (12, 9)][seed % 3]
        model = LinearModel(rng.normal(size=(n, d)), rng.normal(size=n))
        found += model.is_correlated(n)
    assert found <= 2


def test_copies_are_worth_one_column():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(400, 30)), rng.normal(size=400)
    alone = LinearModel(X, y).n_independent(400)
    assert 25 < alone <= 30
    twice = LinearModel(np.c_[X, X], y).n_independent(400)
    assert twice == pytest.approx(alone, rel=0.05)


def test_chains_that_do_not_agree_are_told():
    X, _ = correlated("chain of both signs", 100, n=100, seed=5)
    y = X[:, :40] @ np.random.default_rng(0).normal(size=40)
    with pytest.warns(ConvergenceWarning, match="not mixed"):
        reg = SpikeSlabRegressor(max_iter=1).fit(X, y)
    assert not reg.converged_ and reg.n_iter_ == 1 and np.all(np.isfinite(reg.predict(X)))


@pytest.mark.slow
def test_chains_that_do_not_agree_go_on(monkeypatch):
    """Each round has the least work of a step times 100."""
    law = law_of(*correlated("chain of both signs", 14))
    lengths = _chains._LENGTHS._replace(error=0.0, work=100 * 5 * 4e4, patience=3)
    for agreed, rounds in ((1.0, 6), (0.0, 16)):
        told: list = []
        monkeypatch.setattr(_chains, "_LENGTHS", lengths._replace(agreed=agreed))
        _chains.sample_models(law, 0, 100, told.append)
        assert len(told) == rounds


@pytest.mark.parametrize(
    "y", [pytest.param(np.zeros(30), marks=pytest.mark.slow), np.full(30, 2.0), None]
)
def test_hostile_data_give_finite_answers(y):
    X, given = correlated("copies", 15, n=30)
    X[:, 5] = 0.0
    y = X[:, 0].copy() if y is None else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reg = SpikeSlabRegressor(max_iter=2).fit(X, y)  # rounds
    assert reg.algorithm_used_ == "chains"
    mean, std = reg.predict(X, return_std=True)
    for value in (mean, std, reg.coef_, reg.coef_std_, reg.coef_interval(), reg.log_evidence_):
        assert np.all(np.isfinite(value))


@pytest.mark.parametrize("scale", [30.0, 1e3])
def test_models_that_the_noise_excludes_do_not_count(scale):
    """Their weights underflow, which once warned of a division of zero by zero."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((18, 1)) + 0.3 * rng.standard_normal((18, 6))
    reg = SpikeSlabRegressor(noise_variance=0.1, fit_intercept=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reg.fit(X, scale * rng.standard_normal(18))
    assert reg.algorithm_used_ == "enumeration"
    np.testing.assert_allclose(reg.inclusion_proba_, 1.0)


@pytest.mark.parametrize("unit", [1e-22, pytest.param(1e22, marks=pytest.mark.slow)])
def test_units_out_of_the_range_of_single_precision_change_nothing(unit):
    X, y = correlated("chain of both signs", 20)
    a, b = (
        SpikeSlabRegressor(standardize=False, max_iter=2).fit(scale * X, y) for scale in (1.0, unit)
    )
    assert a.algorithm_used_ == "chains"
    np.testing.assert_allclose(b.inclusion_proba_, a.inclusion_proba_, atol=1e-5)


# ------------------------------------------------------------------------ law of models


def law_of(X, y, **kw):
    plan = make_plan(SpikeSlabRegressor(**kw), X, y, None, None)
    return ModelLaw(plan.problem, plan.space, plan.prior)


@pytest.mark.filterwarnings("ignore:SpikeSlabRegressor. half the range:UserWarning")
@pytest.mark.parametrize(("d", "units"), [(8, 1.0), (30, 1.0), (6, 1e-2)])
def test_what_a_column_adds_is_the_change_of_the_density_of_the_rows(d, units):
    """Models of random columns, those of the last case in units that differ by 1e10."""
    X, y = correlated("copies" if units == 1 else "all at .99", d, n=20, seed=4)
    law, rng = (
        law_of(X * units ** np.arange(d), y, standardize=units == 1),
        np.random.default_rng(0),
    )
    A, target = law.problem.model.X[:, law.order], law.problem.model.y
    log_ratio = np.log(np.array([0.1, 10.0, 1e4])) - np.log(law.space.size)
    models = np.sort([np.r_[rng.choice(d, 3, replace=False), d] for _ in range(3)], axis=1)

    def density(columns, log_ratio):
        part = A[:, columns[columns < d]]
        C = np.eye(len(A)) + np.exp(log_ratio) * part @ part.T
        square = target @ np.linalg.solve(C, target) + law.least
        return -0.5 * np.linalg.slogdet(C)[1] - 0.5 * law.n_rows * np.log(square)

    given = law.given(models, log_ratio)
    gains = law.gains(models, given, log_ratio)
    for model, ratio, fit, gain in zip(
        models, log_ratio, law.log_fit(log_ratio, *given[:2]), gains, strict=True
    ):
        assert fit == pytest.approx(density(model, ratio), abs=1e-6)
        for j in np.setdiff1d(np.arange(d), model):
            more = density(np.r_[model, j], ratio)
            assert gain[j] == pytest.approx(more - density(model, ratio), abs=2e-3)


def test_the_density_at_one_ratio_is_that_of_many():
    law, rng = law_of(*correlated("copies", 30)), np.random.default_rng(0)
    models = np.stack([rng.choice(30, 4, replace=False) for _ in range(5)])
    models[np.arange(4) >= np.arange(5)[:, None]] = 30
    log_ratio = np.array([-6.0, -3.0, 0.0, 2.0, 4.0])
    both = law.log_density(models, log_ratio[:, None])[:, 0]
    np.testing.assert_allclose(law.log_density_at(models, log_ratio), both, atol=1e-9)


def test_chains_start_with_as_many_columns_as_they_come_to_have():
    """From ten columns at most their first hundred steps have too few."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 30))
    law = law_of(X, X[:, :24] @ rng.choice([-1.0, 1.0], 24) + rng.normal(size=100), **GIVEN)
    draws = _chains.sample_models(law, 0, 1, lambda draws: False)
    assert 25.2 < draws.by_chain.sum(axis=1).mean() < 25.8


def test_large_models_of_few_columns_take_more_work():
    law = law_of(*correlated("copies", 100))
    chains = _chains.ModelChains(law, np.random.default_rng(0))
    small, chains.size = chains.work, np.full(len(chains.size), 40)
    assert chains.work > 5 * small


@pytest.mark.parametrize("given", [{}, pytest.param(GIVEN, marks=pytest.mark.slow)])
def test_moves_of_many_columns_keep_the_posterior(given):
    """Alone, from draws of the posterior of five columns: how many are in, and the ratio."""
    law = law_of(*correlated("chain of both signs", 5), **given)
    draws, rng = _chains.all_models(law), np.random.default_rng(0)
    models, log_ratio, weight = draws.models[0], draws.log_ratio[0], draws.weight[0]
    chains, before, after = _chains.ModelChains(law, rng), [], []
    for _ in range(300):
        own = rng.choice(len(weight), len(chains.size), p=weight)
        chains.models, chains.log_ratio = rng.permuted(models[own], axis=1), log_ratio[own]
        chains.models = np.take_along_axis(chains.models, np.argsort(chains.models == 5), axis=1)
        chains.size = np.count_nonzero(chains.models < 5, axis=1)
        before.append(np.stack([chains.size, chains.log_ratio]))
        for _ in range(4):
            chains.move_many()
        assert np.array_equal(np.count_nonzero(chains.models < 5, axis=1), chains.size)
        after.append(np.stack([chains.size, chains.log_ratio]))
    change = np.concatenate(after, axis=1) - np.concatenate(before, axis=1)
    error = change.std(axis=1) / np.sqrt(change.shape[1])
    assert np.all(np.abs(change.mean(axis=1)) <= 4 * error) and error[0] > 0


def test_places_are_drawn_by_their_weights():
    chains = _chains.ModelChains(law_of(*correlated("copies", 30)), np.random.default_rng(0))
    weight = np.random.default_rng(1).random((len(chains.size), 31)).astype(np.float32)
    weight[:, [0, 7, 30]] = 0.0
    weight[::2, 20:] = 0.0
    weight[1::2, 12] = 40.0
    times, n_draws = np.zeros(weight.shape), 2000
    for _ in range(n_draws):
        times[chains._chain, chains._drawn(weight)] += 1
    p = weight / weight.sum(axis=1, keepdims=True)
    assert np.all(times[p == 0] == 0)
    assert np.all(np.abs(times / n_draws - p) < 5 * np.sqrt(p * (1 - p) / n_draws) + 1e-12)


def test_sums_of_a_round_in_single_precision_are_those_of_its_steps(monkeypatch):
    chains = _chains.ModelChains(law_of(*correlated("copies", 30)), np.random.default_rng(0))
    put_in, steps = chains._put_in, []

    def noted(exchange):
        share, inside, size, fit = put_in(exchange)
        own, is_in = share[:, :-1].astype(float), np.zeros((len(size), 30))
        is_in[inside] = 1.0
        steps.append((own + is_in, own * np.maximum(size + 3, 2 * size + 2)[:, None]))
        return share, inside, size, fit

    monkeypatch.setattr(chains, "_put_in", noted)
    draws = chains.round(200)
    seen, drawn = np.mean(steps, axis=0)
    np.testing.assert_allclose(draws.seen, seen, atol=1e-5)
    np.testing.assert_allclose(draws.drawn, drawn, atol=1e-5)


def test_the_search_ends_at_the_best_of_all_models():
    X, y = correlated("chain of both signs", 8, n=12, seed=3)
    law = law_of(X, y)
    columns, log_ratio, log_noise = _chains.best_model(law, 0)
    models = np.arange(2**8)[:, None] >> np.arange(8) & 1
    models = np.where(models == 1, np.arange(8), 8)
    ratios = law.lattice(0.2)
    density = law.log_density(models, np.broadcast_to(ratios, (len(models), len(ratios))))
    top = models[np.unravel_index(np.argmax(density), density.shape)[0]]
    np.testing.assert_array_equal(columns, np.sort(law.order[top[top < 8]]))
    assert np.isfinite(log_ratio) and -5 < log_noise < 1


# ------------------------------------------------------------------------ sets


def test_a_credible_set_holds_the_columns_that_cannot_be_told_apart():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 40))
    X[:, 10:13] = X[:, [0]]
    X[:, 13] = -X[:, 0]
    reg = SpikeSlabRegressor(max_iter=2).fit(X, 2 * X[:, 0] - 2 * X[:, 1] + rng.normal(size=80))
    sets = reg.credible_sets()
    assert len(sets) == 2 and [1] in [m.tolist() for m in sets]
    shared = next(k for k, m in enumerate(sets) if 0 in m)
    assert set(sets.members[shared]) == {0, 10, 11, 12, 13}
    np.testing.assert_allclose(sets.inclusion[shared], 0.21, atol=0.06)
    np.testing.assert_allclose(sets.correlation, 1.0)
    assert np.all(sets.probability >= 0.95)
    assert "2 credible sets" in str(sets) and "x13" in str(sets)
    frame = pytest.importorskip("pandas") and sets.to_frame()
    assert list(frame.columns) == ["name", "column", "inclusion", "correlation", "probability"]
    assert frame.loc[shared].shape[0] == 5
    chosen = reg.get_support(fdr=0.1)
    assert chosen[1] and np.mean(1 - reg.inclusion_proba_[chosen]) <= 0.1
    display = InclusionDisplay.from_estimator(reg, sets=sets)
    assert len(display.ax_[0].get_legend().get_texts()) == 2
    for bad in (dict(level=1.0), dict(purity=1.5), dict(fdr=0)):
        with pytest.raises(ValueError, match="must"):
            reg.credible_sets(**bad)
    with pytest.raises(ValueError, match="fdr"):
        reg.get_support(fdr=0)


def test_sets_of_a_fit_by_ep_and_of_noise():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(80, 20))
    reg = SpikeSlabRegressor().fit(X, 2 * X[:, 0] + rng.normal(size=80))
    assert [m.tolist() for m in reg.credible_sets()] == [[0]]
    none = reg.fit(X, rng.normal(size=80)).credible_sets()
    assert len(none) == 0 and none.columns["set"].size == 0 and "0 credible" in str(none)


def test_the_level_of_a_set_is_that_given_an_effect_near():
    stated = []
    for seed in range(4):
        X, _ = correlated("chain of both signs", 8, n=60, seed=seed)
        y = 0.3 * X[:, 3] + np.sqrt(0.5) * np.random.default_rng(seed).normal(size=60)
        reg = SpikeSlabRegressor(**GIVEN, **PLAIN).fit(X, y)
        sets = reg.credible_sets(level=0.8)
        on = reg.sample_posterior(4000, random_state=0, exact_zeros=True) != 0
        for lead, *others in list(sets)[:1]:
            near = np.abs(np.corrcoef(X.T)[lead]) >= 0.5
            some, less, all_of_it = (
                on[:, k].any(axis=1).mean() for k in (near, [lead, *others[:-1]], [lead, *others])
            )
            assert some > 0.78 and less < 0.82 * some and all_of_it > 0.78 * some
        stated += sets.probability.tolist()
    assert 0.64 <= min(stated) < 0.8


def test_sets_cover_as_often_as_they_say():
    """Effects drawn from the prior, among columns that are hard to tell apart."""
    held, stated, more = [], [], 0
    for seed in range(40):
        X, _ = correlated("chain of both signs", 8, n=60, seed=seed)
        rng = np.random.default_rng(seed)
        on = rng.random(8) < 0.25
        y = X @ np.where(on, rng.normal(size=8), 0.0) + np.sqrt(0.5) * rng.normal(size=60)
        reg = SpikeSlabRegressor(**GIVEN, **PLAIN).fit(X, y)
        sure, sets = reg.credible_sets(level=0.8), reg.credible_sets(level=0.8, fdr=0.4)
        assert np.sum(0.6 - sets.probability) <= 0
        for kind in (sure, sets):
            held.append([on[m].any() for m in kind])
            stated.append(kind.probability.tolist())
        more += len(sets) - len(sure)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        found, told = (np.concatenate(v[part]) for v in (held, stated))
        assert abs(found.mean() - told.mean()) < 3 * np.sqrt(np.mean(told * (1 - told)) / len(told))
    assert more > 0


def test_the_evidence_of_no_column_is_a_t_density():
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    X, y = np.c_[x, x], rng.normal(size=30)
    reg = SpikeSlabRegressor(prior_inclusion=1e-12, **PLAIN).fit(X, y)
    empty = gammaln(15) - 15 * np.log(np.pi * y @ y)
    assert reg.log_evidence_ == pytest.approx(empty, abs=1e-3)
