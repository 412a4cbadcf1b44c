"""HierarchicalEPLogistic against NUTS, importance sampling, whole EP and itself."""

import functools
import pickle
import sys
import types
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from oracles import arrays, oracle
from scipy.special import logsumexp
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import ConvergenceWarning, FitFailedWarning, NotFittedError
from sklearn.feature_selection import RFE, RFECV, SelectKBest, SequentialFeatureSelector
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.datasets import make_hierarchical_logistic
from sklearn_ep.hierarchical.partitions import part
from sklearn_ep.inspection import GroupEffectsDisplay

ORACLE = oracle("hierarchical")["sets"]


def stored(name):
    file = arrays("hierarchical")
    return file[f"{name}_X"], file[f"{name}_y"].astype(int), file[f"{name}_g"].astype(int)


@functools.cache
def grouped(n_groups=24, rows=10, d=3, tau=1.5, seed=0):
    X, y, g, _, _ = make_hierarchical_logistic(n_groups, rows, d, tau=tau, random_state=seed)
    return X, y, g


@functools.cache
def fitted(**given):
    X, y, g = grouped()
    return HierarchicalEPLogistic(n_partitions=3, **given).fit(X, y, groups=g)


@functools.cache
def fitted_to_stored(name):
    X, y, g = stored(name)
    return HierarchicalEPLogistic(fit_intercept=False).fit(X, y, groups=g)


# one node, where the average over scales is not the question
MODE = dict(hyperparameters="mode")


@pytest.fixture
def few_draws(monkeypatch):
    """Have sites draw 150 times, where the accuracy of their draws is not the question."""
    fit = sys.modules["sklearn_ep.hierarchical.partitions.fit"]
    settings = fit.ImportanceSettings
    monkeypatch.setattr(fit, "ImportanceSettings", lambda n, *others: settings(150, *others))


def apart(a, b):
    """Largest distance of two fits in posterior sd, and of their sds, relative."""
    return (
        np.max(np.abs(a.coef_ - b.coef_) / b.coef_std_),
        np.max(np.abs(a.coef_std_ / b.coef_std_ - 1)),
    )


# ---------------------------------------------------------------------------- truth


@pytest.mark.filterwarnings("ignore:HierarchicalEPLogistic. groups have")
@pytest.mark.parametrize("name", ["sparse", "contraception"])
def test_posterior_against_stored_truth(name):
    clf, oracle = fitted_to_stored(name), ORACLE[name]
    truth, tau_truth = oracle.get("is", oracle["nuts"]), oracle["nuts"]
    mean, sd = np.array(truth["mean"][:-1]), np.array(truth["sd"][:-1])
    noise = 3 * np.array(truth["mean_mcse"][:-1])
    assert np.max((np.abs(clf.coef_[0] - mean) - noise) / sd) < 0.03
    assert 0.96 < np.mean(clf.coef_std_[0] / sd) < 1.02
    levels = dict(
        zip(tau_truth["quantile_levels"], np.array(tau_truth["quantiles"])[:, -1], strict=True)
    )
    width, error = tau_truth["sd"][-1], tau_truth["mean_mcse"][-1]
    found = np.log([clf.tau_interval_[0, 0], clf.tau_[0], clf.tau_interval_[0, 1]])
    for value, level, times in zip(found, (0.05, 0.5, 0.95), (6, 4, 6), strict=True):
        assert abs(value - levels[level]) < 0.05 * width + times * error
    effects, spread = np.array(tau_truth["alpha_mean"]), np.array(tau_truth["alpha_sd"])
    assert np.max(np.abs(clf.group_effects_[:, 0] - effects) / spread) < 0.12
    assert np.all(np.abs(clf.group_effects_std_[:, 0] / spread - 1) < 0.08)
    if "is" in oracle:
        assert clf.log_evidence_ == pytest.approx(oracle["is"]["log_evidence"], abs=0.12)
    assert clf.converged_ and clf.n_iter_ <= 8 and clf.n_skipped_ == 0


@pytest.mark.slow
def test_laplace_is_less_accurate_unless_refined():
    X, y, g = stored("sparse")
    truth = ORACLE["sparse"]["is"]
    mean, sd = np.array(truth["mean"][:-1]), np.array(truth["sd"][:-1])
    off = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for kw in (
            dict(engine="laplace", refine=False),
            dict(engine="laplace"),
            dict(refine=False),
        ):
            clf = HierarchicalEPLogistic(fit_intercept=False, **kw).fit(X, y, groups=g)
            off.append(np.max(np.abs(clf.coef_[0] - mean) / sd))
    assert off[0] > 0.2 and off[1] < 0.05 and off[2] < 0.05


def by_laplace(seed, n_groups, d, scale, most, **options):
    """Fit to groups of four rows whose labels mostly agree, with whole weights below `most`."""
    rng = np.random.default_rng(seed)
    g = np.repeat(np.arange(n_groups), 4)
    X = rng.normal(size=(len(g), d))
    uniform, log_odds = rng.uniform(size=len(g)), X[:, 0] + scale * rng.normal(size=n_groups)[g]
    y, weight = uniform < 1 / (1 + np.exp(-log_odds)), rng.integers(1, most, size=len(g))
    clf = HierarchicalEPLogistic(engine="laplace", n_partitions=3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of few rows a group
        return clf.fit(X, y, groups=g, sample_weight=weight)


def test_laplace_settles_where_scales_are_large():
    # the gradient of a coarse quadrature was not that of its value: 50 steps without a gain
    clf = by_laplace(10, 30, 2, 2.5, 4, **MODE)
    assert clf.converged_ and clf.n_iter_ <= 10 and clf.tau_ > 2.5


def test_laplace_without_cavities_has_a_posterior():
    # the messages at the mode left a part without a proper cavity: an error from the fit at a node
    clf = by_laplace(4, 14, 1, 3.0, 9, random_slopes=[0], max_iter=8, **MODE)
    assert np.all(np.isfinite(clf.coef_std_)) and np.all(clf.tau_ > 0.0)


@pytest.mark.parametrize("weight", [6.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_laplace_agrees_with_ep_where_weights_make_groups_sharp(weight):
    # at weight 6 it ended stuck, with a residual of 4.7, at 40 with a scale of 7.6 in place of 19
    rng = np.random.default_rng(0)
    g, X = np.repeat(np.arange(30), 10), rng.normal(size=(300, 2))
    effects = rng.normal(size=(30, 2)) * (1.5, 1.0)
    z = 0.3 + X @ (0.8, -0.5) + effects[g, 0] + effects[g, 1] * X[:, 0]
    data = dict(y=rng.uniform(size=300) < 1 / (1 + np.exp(-z)), sample_weight=np.full(300, weight))
    ep, laplace = (
        HierarchicalEPLogistic(random_slopes=[0], engine=engine, **MODE).fit(X, groups=g, **data)
        for engine in ("ep", "laplace")
    )
    assert laplace.converged_
    np.testing.assert_allclose(laplace.tau_, ep.tau_, rtol=0.15)
    np.testing.assert_allclose(laplace.coef_, ep.coef_, rtol=0.1)
    np.testing.assert_allclose(laplace.coef_std_, ep.coef_std_, rtol=0.1)
    assert laplace.log_evidence_ == pytest.approx(ep.log_evidence_, abs=0.2)


def test_lists_of_partitions_tell_of_small_groups_as_rows_do():
    X, y, g = make_hierarchical_logistic(30, 3, 1, tau=3.0, random_state=0)[:3]
    table, half = np.column_stack([X, g]), len(y) // 2
    parts = [(table[:half], y[:half]), (table[half:], y[half:])]
    told = []
    for n_partitions, data in ((2, (table, y)), ("auto", (parts,))):
        clf = HierarchicalEPLogistic(1, n_partitions=n_partitions, **MODE)
        with pytest.warns(UserWarning, match="of them of one class") as found:
            clf.fit(*data)
        told += [str(w.message) for w in found]
    assert told[0] == told[1]


def test_importance_agrees_with_ep():
    X, y, g = grouped()
    a = HierarchicalEPLogistic(engine="importance", random_state=0).fit(X, y, groups=g)
    b = fitted()
    assert apart(a, b)[0] < 0.1 and apart(a, b)[1] < 0.06
    # -143.814 +- 0.009 by importance sampling over all parameters; groups of one class cost EP 0.16
    assert a.log_evidence_ == pytest.approx(-143.814, abs=0.04)
    assert b.log_evidence_ == pytest.approx(-143.814, abs=0.2)


def test_importance_draws_the_same_with_the_same_seed(few_draws):
    X, y, g = (v[:60] for v in grouped())
    one, again = (
        HierarchicalEPLogistic(engine="importance", random_state=0, tol=1.0).fit(X, y, groups=g)
        for _ in range(2)
    )
    assert np.array_equal(one.coef_, again.coef_)


def test_nuts_is_an_engine(few_draws):
    """A short chain: scores make its moments ten times as close as the bounds ask."""
    pytest.importorskip("nutpie")
    X, y, g = (a[:80] for a in grouped())
    a, b = (HierarchicalEPLogistic(engine=e, random_state=0) for e in ("nuts", "ep"))
    a, b = (e.set_params(n_partitions=1).fit(X, y, groups=g) for e in (a, b))
    assert a.engine_ == "nuts" and a.converged_ and apart(a, b)[0] < 0.2 and apart(a, b)[1] < 0.15


@pytest.mark.slow
def test_nuts_agrees_with_ep():
    pytest.importorskip("nutpie")
    X, y, g = grouped()
    a = HierarchicalEPLogistic(engine="nuts", random_state=0).fit(X, y, groups=g)
    b = fitted()
    # 800 draws: standard errors of about 0.04 sd of a mean, 0.03 of an sd; more for two sites
    assert apart(a, b)[0] < 0.15 and apart(a, b)[1] < 0.12
    assert a.converged_ and a.log_evidence_ == pytest.approx(-143.814, abs=0.1)
    assert abs(np.log(a.tau_[0] / b.tau_[0])) < 0.08
    two = HierarchicalEPLogistic(engine="nuts", n_partitions=2, random_state=0)
    two.fit(X, y, groups=g)
    assert two.converged_ and apart(two, b)[0] < 0.25 and apart(two, b)[1] < 0.18
    again = clone(two).set_params(n_jobs=2).fit(X, y, groups=g)
    assert np.array_equal(two.coef_, again.coef_)


def test_nuts_says_which_package_it_needs(monkeypatch):
    X, y, g = grouped()
    monkeypatch.setitem(sys.modules, "nutpie", None)
    clf = HierarchicalEPLogistic(engine="nuts")
    with pytest.raises(ImportError, match=r"engine='nuts' needs .* 'sklearn-ep\[nuts\]'"):
        clf.fit(X, y, groups=g)
    assert not hasattr(clf, "classes_")


def again(X, y, groups, sample_weight=None):
    return types.SimpleNamespace(X=X, y=y, groups=groups, sample_weight=sample_weight)


def test_diagnose_weights_lead_to_the_exact_evidence():
    X, y, g = stored("sparse")
    clf = fitted_to_stored("sparse")
    log_w, _ = clf._log_weights(again(X, y, g), 10_000, np.random.RandomState(0))
    correction = logsumexp(log_w) - np.log(len(log_w))
    exact = ORACLE["sparse"]["is"]["log_evidence"]  # 0.04 from the uncorrected
    assert clf.log_evidence_ + correction == pytest.approx(exact, abs=0.025)
    # copies by weights and by repetition, and rows that do not count
    n = len(y)
    weight = np.r_[np.full(n, 2.0), np.zeros(5)]
    more = np.r_[X, X[:5]], np.r_[y, y[:5]], np.r_[g, g[:5]], weight
    twice = np.r_[X, X], np.r_[y, y], np.r_[g, g]
    a, b = (
        clf._log_weights(again(*rows), 50, np.random.RandomState(1))[0] for rows in (more, twice)
    )
    np.testing.assert_allclose(a, b)


def test_diagnose_of_grouped_fits():
    X, y, g = grouped()
    clf = fitted()
    found = clf.diagnose(300, X=X, y=y, groups=g)
    assert found.pareto_k < 0.7 and found.ess_share > 0.2 and len(found.remarks) == 1
    assert "nodes of a grid" in found.remarks[0]
    assert clf.diagnose(25, X=X, y=y, groups=g) == clf.diagnose(25, 0, X=X, y=y, groups=g)
    assert clf.diagnose().pareto_k is None and "training rows" in str(clf.diagnose())
    few = dict(X=X[:60], y=y[:60], groups=g[:60])
    slopes = HierarchicalEPLogistic(random_slopes=[0], max_iter=10, tol=1.0).fit(**few)
    assert slopes.diagnose(1000, **few).ess_share > 0.1
    plain = HierarchicalEPLogistic(refine=False).fit(**few)
    assert plain.diagnose(1000, **few).ess_share > 0.2
    assert HierarchicalEPLogistic().fit(X, y).diagnose(1000, X=X, y=y).ess_share > 0.9
    unnamed = clf.diagnose(X=X, y=y, groups=np.r_[[None], g[1:].astype(object)])
    assert unnamed.pareto_k is None and "no named group" in str(unnamed)
    many = HierarchicalEPLogistic().fit(X, g % 3)
    assert many.diagnose(X=X, y=g % 3).pareto_k is None
    with pytest.raises(ValueError, match="n_draws"):
        clf.diagnose(3)
    with pytest.raises(ValueError, match=r"not seen in fit: \[5 6\]"):
        clf.diagnose(X=X, y=y + 5, groups=g)


@pytest.mark.parametrize("k", [1, 4, pytest.param(11, marks=pytest.mark.slow)])
def test_blocks_of_rows_equal_whole_ep(k):
    X, y, _ = grouped()
    tight = dict(tol=1e-9, max_iter=200)
    whole = HierarchicalEPLogistic(n_partitions=1, **tight).fit(X, y)
    parts = HierarchicalEPLogistic(n_partitions=k, **tight).fit(X, y)
    assert max(apart(parts, whole)) < 1e-7
    np.testing.assert_allclose(parts.coef_cov_, whole.coef_cov_, rtol=1e-6, atol=1e-9)
    assert parts.log_evidence_ == pytest.approx(whole.log_evidence_, abs=1e-6)
    assert parts.group_effects_.shape == (0, 0) and parts.tau_.size == 0


@pytest.mark.parametrize(
    "kw",
    [
        dict(n_partitions=1),
        pytest.param(dict(n_partitions=24), marks=pytest.mark.slow),
        dict(schedule="serial", **MODE),
        pytest.param(dict(schedule="asynchronous"), marks=pytest.mark.slow),
        dict(schedule="asynchronous", n_jobs=2, **MODE),
        pytest.param(dict(schedule="asynchronous", n_jobs=2), marks=pytest.mark.slow),
    ],
)
def test_partitions_and_schedules_agree(kw):
    X, y, g = grouped()
    with joblib.parallel_config(backend="threading"):
        clf = HierarchicalEPLogistic(**{"n_partitions": 3, **kw}).fit(X, y, groups=g)
    same = fitted(**MODE) if "hyperparameters" in kw else fitted()
    assert max(apart(clf, same)) < 2e-3
    assert len(clf.site_precision_) == kw.get("n_partitions", 3)


def logistic_groups(n_groups, rows, scale, seed):
    """Groups whose intercept, and with two scales the first slope, vary."""
    rng = np.random.default_rng(seed)
    g = np.repeat(np.arange(n_groups), rows)
    X = rng.normal(size=(len(g), 2))
    effects = np.atleast_1d(scale) * rng.normal(size=(n_groups, np.size(scale)))
    z = X @ [1.0, -0.5] + effects[g, 0] + (effects[g, 1] * X[:, 0] if np.size(scale) > 1 else 0)
    return X, (rng.uniform(size=len(g)) < 1 / (1 + np.exp(-z))).astype(int), g


@pytest.mark.parametrize("seeds", [(9,), pytest.param(range(30), marks=pytest.mark.slow)])
def test_two_halves_of_few_groups_converge(seeds):
    # with the seeds 9 and 14 no pair of messages has proper cavities at its fixed point
    for seed in seeds:
        rng = np.random.default_rng(seed)
        g, x = np.repeat(np.arange(10), 20), rng.normal(size=200)
        y = rng.uniform(size=200) < 1 / (1 + np.exp(-x - rng.normal(size=10)[g]))
        clf = HierarchicalEPLogistic(n_partitions=2, refine=seed in (9, 14))
        clf.fit(x[:, None], y, groups=g)
        assert clf.converged_ and clf.n_iter_ <= 15, seed
        assert clf.n_iter_ == len(clf.history_["log_evidence"])
        if clf.refine:
            one = clone(clf).set_params(n_partitions=1).fit(x[:, None], y, groups=g)
            assert max(apart(clf, one)) < 2e-3 and clf.n_cut_steps_ > 0
            assert clf.log_evidence_ == pytest.approx(one.log_evidence_, abs=1e-3)
            np.testing.assert_allclose(clf.site_shift_[0], clf.site_shift_[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ((30, 20), 0.3),
        ((30, 4), 0.3),
        pytest.param((8, 6), (1, 1), marks=pytest.mark.slow),
        pytest.param((24, 10), (1.0, 0.7), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sites_that_know_little_converge(shape, scale, seed):
    X, y, g = logistic_groups(*shape, scale, seed)
    slopes = [0] if np.size(scale) > 1 else None
    clf = HierarchicalEPLogistic(n_partitions=5, refine=False, random_slopes=slopes)
    clf.fit(X, y, groups=g)
    assert clf.converged_ and clf.n_iter_ <= 25, clf.n_iter_


def test_random_slopes_find_the_truth():
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(60), 25)
    X = rng.standard_normal((1500, 3))
    effects = rng.standard_normal((60, 2)) * [1.0, 0.7]
    z = X @ [0.5, -1.0, 0.3] + effects[g, 0] + effects[g, 1] * X[:, 1]
    y = (rng.uniform(size=1500) < 1 / (1 + np.exp(-z))).astype(int)
    clf = HierarchicalEPLogistic(random_slopes=[1]).fit(X, y, groups=g)
    assert np.all(np.abs(clf.coef_[0] - [0.5, -1.0, 0.3]) < 3.5 * clf.coef_std_[0])
    low, high = clf.tau_interval_.T
    assert np.all((0.8 * low < [1.0, 0.7]) & (1.25 * high > [1.0, 0.7]))
    off = (clf.group_effects_ - effects) / clf.group_effects_std_
    assert np.all(np.abs(np.mean(off**2, axis=0) - 1) < 0.5)
    draws = clf.sample_posterior(4000, random_state=0)
    np.testing.assert_allclose(np.median(draws.tau, 0), clf.tau_, rtol=0.05)
    np.testing.assert_allclose(draws.group_effects.std(0), clf.group_effects_std_, rtol=0.1)


# ---------------------------------------------------------------------------- prediction


def test_prior_and_site_messages_make_the_gaussian_posterior():
    clf = fitted()
    prior = np.diag(1.0 / np.array([2.5, 2.5, 2.5, 2.5, 1.5]) ** 2)
    cov = np.linalg.inv(prior + clf.site_precision_.sum(0))
    np.testing.assert_allclose(clf.phi_cov_, cov, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(clf.phi_mean_, cov @ clf.site_shift_.sum(0), rtol=1e-9)


def test_draws_are_in_phase():
    X, y, g = grouped()
    clf, n = fitted(), 20_000
    d = clf.sample_posterior(n, random_state=0)
    theta = np.column_stack([d.coef, d.intercept])
    np.testing.assert_allclose(np.cov(theta.T), clf.coef_cov_, atol=0.06 * clf.coef_std_.max() ** 2)
    np.testing.assert_allclose(
        np.quantile(d.tau[:, 0], [0.05, 0.5, 0.95]),
        [clf.tau_interval_[0, 0], clf.tau_[0], clf.tau_interval_[0, 1]],
        rtol=0.04,
    )
    log_tau = np.log(d.tau[:, 0])
    assert abs(np.sum(clf.hyper_weights_) - 1) < 1e-12
    assert abs(clf.hyper_weights_ @ clf.hyper_nodes_[:, 0] - log_tau.mean()) < 0.04 * log_tau.std()
    ratio = d.group_effects[..., 0].std(0) / clf.group_effects_std_[:, 0]
    assert np.max(np.abs(ratio - 1)) < 0.025 and abs(np.mean(ratio) - 1) < 0.005
    z = d.coef @ X.T + d.intercept[:, None] + d.group_effects[:, g, 0]
    mean, var = clf.latent_mean_and_variance(X, groups=g)
    assert np.max(np.abs(z.mean(0) - mean) / np.sqrt(var)) < 0.05
    assert np.max(np.abs(z.var(0) / var - 1)) < 0.07
    cov = clf.latent_covariance(X[:30], X[5:20], groups1=g[:30], groups2=g[5:20])
    np.testing.assert_allclose(cov, np.cov(z[:, :30].T)[:, 5:20], atol=0.05 * var.max())
    X, g = X[::5], g[::5]
    p = clf.sample_proba(X, n_samples=4000, random_state=0, groups=g)
    assert np.max(np.abs(p.mean(0) - clf.predict_proba(X, groups=g))) < 0.03


@pytest.mark.parametrize(
    "level", [0.9, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.5, 0.99))]
)
def test_intervals_are_quantiles_of_the_draws(level):
    X, y, g = grouped(5, 12, 3, 1.5, 3)  # few groups: the intercept is far from normal
    clf = HierarchicalEPLogistic(random_slopes=[2]).fit(X, y, groups=g)
    draws, n = clf.sample_posterior(200_000, random_state=0), 200_000
    table = clf.summary(level)
    beta = np.column_stack([draws.coef, draws.intercept])
    low, high = table.coefficients["lower"], table.coefficients["upper"]
    noise = 4 * np.sqrt((1 - level) / 2 / n)
    for found, values in (((low, high), beta), (table.scales, draws.tau)):
        ends = found if isinstance(found, tuple) else (found["lower"], found["upper"])
        for k in range(values.shape[1]):
            # the marginal of the scales is that of evenly spread points
            slack = noise if values is beta else noise + 0.01 * (1 - level)
            assert abs(np.mean(values[:, k] < ends[0][k]) - (1 - level) / 2) < slack
            assert abs(np.mean(values[:, k] > ends[1][k]) - (1 - level) / 2) < slack
    interval = clf.coef_interval(level)
    assert interval.shape == (*clf.coef_.shape, 2)
    np.testing.assert_array_equal(interval[0], np.column_stack([low, high])[:3])
    np.testing.assert_allclose(table.coefficients["mean"][:3], clf.coef_[0])
    np.testing.assert_allclose(table.coefficients["sd"][:3], clf.coef_std_[0])
    assert table.coefficients["mean"][3] == pytest.approx(clf.intercept_[0])
    assert table.scales["n_levels"].tolist() == [5, 5]


def test_tables_of_a_fit_have_names_and_figures():
    X, y, g = (v[:80] for v in grouped())
    table = pd.DataFrame({"a": X[:, 0], "site": g, "b": X[:, 1], "c": X[:, 2]})
    clf = HierarchicalEPLogistic("site", random_slopes=["b"], tol=1.0).fit(table, y)
    found = clf.summary()
    assert list(found.to_frame().index) == ["a", "b", "c", "intercept"]
    assert found.scales["name"].tolist() == ["intercept", "b"] and found.level == 0.9
    ends = np.column_stack([found.scales["lower"], found.scales["upper"]])
    np.testing.assert_allclose(ends, clf.tau_interval_)
    np.testing.assert_array_equal(found.scales["tau"], clf.tau_)
    assert found.figures == {
        "rows": 80,
        "groups": 8,
        "log evidence": clf.log_evidence_,
        "engine": "ep",
        "scales": found.figures["scales"],
    }
    assert "nodes of a" in found.figures["scales"]
    assert "HierarchicalEPLogistic: converged" in str(found) and "intervals of 90%" in str(found)
    by_index = HierarchicalEPLogistic(1, fit_intercept=False, tol=1.0).fit(table.to_numpy(), y)
    assert by_index.summary().coefficients["name"].tolist() == ["x0", "x2", "x3"]
    assert by_index.coef_interval().shape == (1, 3, 2)
    parts = HierarchicalEPLogistic(tol=1.0).fit([(X[:39], y[:39]), (X[39:], y[39:])]).summary()
    assert parts.scales == {} and parts.figures["rows"] == 80 and parts.figures["groups"] == 0
    several = HierarchicalEPLogistic(tol=1.0).fit(X, np.array(["u", "v", "w"])[g % 3])
    names, interval = several.summary().coefficients["name"], several.coef_interval(0.5)
    assert names[[0, 3, 11]].tolist() == ["u: x0", "v: x0", "w: intercept"]
    assert interval.shape == (3, 3, 2)
    assert np.all((interval[..., 0] < several.coef_) & (several.coef_ < interval[..., 1]))
    for level in (0.0, 1.0, np.nan):
        with pytest.raises(ValueError, match="level"):
            clf.summary(level)
        with pytest.raises(ValueError, match="level"):
            clf.coef_interval(level)
    with pytest.raises(NotFittedError):
        HierarchicalEPLogistic().summary()


def test_new_groups_are_integrated_over_the_population():
    X, y, g = grouped()
    clf = fitted()
    population = clf.predict_proba(X, groups=g, kind="population")
    for labels in (np.full(len(y), 999), np.full(len(y), np.nan), [None] * len(y)):
        np.testing.assert_array_equal(clf.predict_proba(X, groups=labels), population)
    assert np.max(np.abs(population - clf.predict_proba(X, groups=g))) > 0.1
    draws = clf.sample_posterior(40_000, random_state=1)
    rng = np.random.default_rng(0)
    z = draws.coef @ X[:5].T + draws.intercept[:, None]
    z = z + draws.tau * rng.standard_normal((40_000, 5))
    p = 1 / (1 + np.exp(-z))
    np.testing.assert_allclose(population[:5, 1], p.mean(0), atol=4 * p.std() / 200)


def test_covariance_between_new_groups():
    X, _, _ = grouped()
    clf = fitted()
    rows = X[:4]
    cov = clf.latent_covariance(rows, groups1=["new", "new", "other", None])
    _, var = clf.latent_mean_and_variance(rows, kind="population")
    np.testing.assert_allclose(np.diag(cov), var)
    alone = clf.latent_covariance(rows, groups1=[None] * 4)
    between = cov - alone
    population_var = between[0, 1]
    assert population_var > 0.5 and between[0, 2] == 0 and between[0, 3] == 0
    two = clf.latent_covariance(rows, rows, ["new", "a", None, 3], ["new", "b", None, 3])
    np.testing.assert_allclose(
        np.diag(two)[[0, 3]],
        np.diag(clf.latent_covariance(rows, groups1=["new", "a", None, 3]))[[0, 3]],
    )
    assert two[1, 1] < var[1] and two[2, 2] < var[2]


def test_log_probabilities_far_out():
    clf = fitted()
    far = np.array([[1e5, 1e5, -1e5], [-1e5, -1e5, 1e5]])
    log_p = clf.predict_log_proba(far, groups=[0, 999])
    assert np.all(np.isfinite(log_p))
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1.0, atol=1e-9)


# ---------------------------------------------------------------------------- groups


def test_the_ways_to_hand_over_groups_agree():
    X, y, g = grouped()
    names = np.array([f"site {k:02d}" for k in range(24)])[g]
    G = np.column_stack([X[:, :1], g, X[:, 1:]])
    kw = dict(n_partitions=3, tol=1.0, **MODE)
    base = HierarchicalEPLogistic(**kw).fit(X, y, groups=g)
    by_index = HierarchicalEPLogistic(1, **kw).fit(G, y)
    np.testing.assert_allclose(by_index.coef_, base.coef_, atol=1e-10)
    assert by_index.n_features_in_ == 4 and by_index.coef_.shape == (1, 3)
    for lib in (pl, pd):  # the last one stays
        table = lib.DataFrame({"a": X[:, 0], "site": names, "b": X[:, 1], "c": X[:, 2]})
        clf = HierarchicalEPLogistic("site", **kw).fit(table, y)
        np.testing.assert_allclose(
            clf.predict_proba(table), base.predict_proba(X, groups=g), atol=1e-9
        )
        assert clf.feature_names_in_.tolist() == ["a", "site", "b", "c"]
        assert clf.group_labels_[0] == "site 00"
    lost = table.assign(site=None)
    np.testing.assert_allclose(
        clf.predict_proba(
            pl.DataFrame(
                {
                    "a": X[:, 0],
                    "site": pl.Series([None] * len(y), dtype=pl.String),
                    "b": X[:, 1],
                    "c": X[:, 2],
                }
            )
        ),
        base.predict_proba(X, kind="population"),
        atol=1e-9,
    )
    np.testing.assert_array_equal(
        clf.predict_proba(lost), clf.predict_proba(table, kind="population")
    )


def test_dask_collections_are_computed():
    frames = pytest.importorskip("dask.dataframe")
    X, y, g = (v[:60] for v in grouped())
    names = np.array([f"site {k:02d}" for k in range(24)])[g]
    table = pd.DataFrame({"a": X[:, 0], "site": names, "b": X[:, 1], "c": X[:, 2]})
    lazy = frames.from_pandas(table, npartitions=2)
    y_lazy = frames.from_pandas(pd.Series(y), npartitions=2)
    kw = dict(tol=1.0, n_partitions=2, hyperparameters="mode")
    for column, slopes in (("site", ["b"]), (1, None)):
        whole = HierarchicalEPLogistic(column, random_slopes=slopes, **kw).fit(table, y)
        clf = HierarchicalEPLogistic(column, random_slopes=slopes, **kw).fit(lazy, y_lazy)
        np.testing.assert_array_equal(clf.coef_, whole.coef_)
        np.testing.assert_array_equal(clf.predict_proba(lazy), whole.predict_proba(table))
        np.testing.assert_array_equal(clf.feature_names_in_, whole.feature_names_in_)
    some = table[:9]
    np.testing.assert_array_equal(
        clf.latent_covariance(frames.from_pandas(some, npartitions=2), lazy),
        clf.latent_covariance(some, table),
    )
    beside = HierarchicalEPLogistic(**kw).fit(lazy[["a", "b", "c"]], y, groups=lazy["site"])
    np.testing.assert_array_equal(beside.coef_, whole.coef_)
    assert beside.score(lazy[["a", "b", "c"]], y_lazy, groups=lazy["site"]) > 0.6


def test_weights_repeat_rows_and_zero_drops_a_group():
    X, y, g = (v[:80] for v in grouped())
    w = np.random.default_rng(0).integers(0, 4, len(y)).astype(float)
    w[g == 5] = 0
    i = np.repeat(np.arange(len(y)), w.astype(int))
    kw = dict(n_partitions=1, tol=1e-4, **MODE)  # both take the same steps
    a = HierarchicalEPLogistic(**kw).fit(X, y, groups=g, sample_weight=w)
    b = HierarchicalEPLogistic(**kw).fit(X[i], y[i], groups=g[i])
    assert max(apart(a, b)) < 1e-6
    assert 5 not in a.group_labels_
    np.testing.assert_allclose(
        a.predict_proba(X, groups=g), b.predict_proba(X, groups=g), atol=1e-6
    )


def test_rows_without_label_are_groups_without_name():
    X, y, g = (v[:120] for v in grouped())
    labels = [None if k % 20 == 0 else int(v) for k, v in enumerate(g)]
    with pytest.warns(UserWarning, match="no label in 6 of 120 rows"):
        clf = HierarchicalEPLogistic().fit(X, y, groups=labels)
    own = [1000 + k if v is None else v for k, v in enumerate(labels)]
    named = HierarchicalEPLogistic().fit(X, y, groups=own)
    assert len(clf.group_labels_) == 12 and clf.group_effects_.shape == (12, 1)
    assert max(apart(clf, named)) < 2e-3


def test_groups_survive_searches():
    X, y, g = grouped(6, 30, tau=3.0)
    G = np.column_stack([X, g])
    cv = StratifiedKFold(2, shuffle=True, random_state=0)
    model = HierarchicalEPLogistic(3, tol=1.0, **MODE)
    search = GridSearchCV(model, {"prior_scale": [1.0, 2.5]}, scoring="accuracy", cv=cv).fit(G, y)
    blind = cross_val_predict(HierarchicalEPLogistic(), X, y, cv=cv)
    assert search.best_score_ > np.mean(blind == y) + 0.03
    several = OneVsRestClassifier(model).fit(G, np.digitize(X[:, 0], [-0.5, 0.5]))
    assert several.predict_proba(G).shape == (len(y), 3)


def test_a_group_column_lost_to_a_selector_is_named():
    X, y, g = grouped()
    table = pd.DataFrame(X, columns=["a", "b", "c"]).assign(site=g)
    kw = dict(tol=1.0)
    remedy = r"ColumnTransformer.*set_output.*set_fit_request\(groups=True\)"
    by_name = HierarchicalEPLogistic("site", **kw)
    for selector in (
        RFECV(by_name, min_features_to_select=2, cv=3),
        RFE(by_name, n_features_to_select=2),
        SequentialFeatureSelector(by_name, n_features_to_select=2, cv=3),
    ):
        with (
            warnings.catch_warnings(),
            pytest.raises(ValueError, match=f"(?s)no column names.*{remedy}"),
        ):
            warnings.simplefilter("ignore", FitFailedWarning)
            selector.fit(table, y)
    k_best = make_pipeline(SelectKBest(k=2), by_name)
    with pytest.raises(ValueError, match=f"no column names.*{remedy}"):
        k_best.fit(table, y)
    with pytest.raises(ValueError, match=f"not among the columns.*selector may have.*{remedy}"):
        k_best.set_output(transform="pandas").fit(table, y)
    with pytest.raises(ValueError, match=f"group_column=3 is not a column of X.*{remedy}"):
        RFE(HierarchicalEPLogistic(3, **kw), n_features_to_select=2).fit(table, y)
    # the first column is gone, and a measured one is at its index
    first = table[["site", "a", "b", "c"]]
    with pytest.raises(ValueError, match=f"group_column=0 has a number with decimals.*{remedy}"):
        HierarchicalEPLogistic(0, **kw).fit(first.to_numpy()[:, 1:], y)


def test_selection_that_keeps_the_group_column():
    X, y, g = grouped(12, 15)
    names = np.array([f"site {k:02d}" for k in range(12)])[g]
    table = pd.DataFrame(X, columns=["a", "b", "c"]).assign(site=names)
    kw = dict(tol=1.0, hyperparameters="mode")
    columns = ColumnTransformer(
        [("select", SelectKBest(k=2), ["a", "b", "c"])],
        remainder="passthrough",
        verbose_feature_names_out=False,
    ).set_output(transform="pandas")
    clf = make_pipeline(columns, HierarchicalEPLogistic("site", **kw)).fit(table, y)
    kept = clf[-1].feature_names_in_.tolist()
    assert len(kept) == 3 and kept[-1] == "site"
    alone = HierarchicalEPLogistic("site", **kw).fit(table[kept], y)
    np.testing.assert_array_equal(clf.predict_proba(table), alone.predict_proba(table[kept]))
    with config_context(enable_metadata_routing=True):
        routed = HierarchicalEPLogistic(**kw).set_fit_request(groups=True)
        found = RFE(routed, n_features_to_select=2).fit(X, y, groups=g)
        beside = HierarchicalEPLogistic(**kw).fit(X[:, found.support_], y, groups=g)
        np.testing.assert_array_equal(found.estimator_.coef_, beside.coef_)
        routed.set_score_request(groups=True)
        one = SequentialFeatureSelector(routed, n_features_to_select=1, cv=2)
        one.fit(X[:, :2], y, groups=g)


def test_columns_beyond_double_precision_are_one_error():
    X, y, g = (v[:120] for v in grouped())
    fit = HierarchicalEPLogistic(tol=1e-6, max_iter=200, hyperparameters="mode").fit
    base = fit(X * 1e10, y, groups=g).coef_
    np.testing.assert_allclose(fit(X * 1e100, y, groups=g).coef_ * 1e90, base, rtol=1e-6)
    one = [1.0, 0.0, 0.0]  # an offset that no other column cancels loses nothing
    base, far = (fit(X + offset * np.array(one), y, groups=g) for offset in (1e4, 1e8))
    np.testing.assert_allclose(
        far.coef_[0, 1:], base.coef_[0, 1:], atol=1e-3 * base.coef_std_[0, 1]
    )
    X, y, g = (v[:40] for v in (X, y, g))
    for bad in (X * 1e160, X + 1e7, X + 1e12):
        parts = [(bad[:20], y[:20]), (bad[20:], y[20:])]
        for given in ((bad, y, g), (bad, y), (parts,)):
            for engine in ("ep", "laplace"):
                clf = HierarchicalEPLogistic(engine=engine)
                with pytest.raises(ValueError, match="columns of X.*standardise the columns"):
                    clf.fit(*given)
                assert not hasattr(clf, "classes_")


def test_more_than_two_classes():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((150, 2))
    y = np.digitize(X[:, 0] + 0.3 * rng.standard_normal(150), [-0.5, 0.5])
    clf = HierarchicalEPLogistic().fit(X, y)
    assert clf.coef_.shape == (3, 2) and clf.intercept_.shape == (3,)
    assert clf.coef_cov_.shape == (3, 3, 3) and clf.score(X, y) > 0.7
    assert clf.sample_posterior(5, random_state=0).coef.shape == (5, 3, 2)
    with pytest.raises(ValueError, match="binary"):
        clf.set_params(multi_class="one_vs_rest").fit(X, y, groups=np.arange(150) % 5)
    with pytest.raises(ValueError, match="multi_class='joint' is not possible"):
        joint = HierarchicalEPLogistic(multi_class="joint", n_partitions=2)
        joint.fit(X, y, groups=np.arange(150) % 5)


def test_more_than_two_classes_in_partitions():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 2))
    y = np.array(["a", "b", "c"])[np.digitize(X[:, 0] + 0.3 * rng.standard_normal(60), [-0.5, 0.5])]
    tight = dict(tol=1e-8, max_iter=200)
    whole = HierarchicalEPLogistic(**tight).fit(X, y)
    order = np.argsort(y)  # so that no part has all classes
    parts = [(X[rows], y[rows]) for rows in np.split(order, 2)]
    clf = HierarchicalEPLogistic(**tight).fit(parts)
    assert clf.classes_.tolist() == ["a", "b", "c"] and clf.converged_
    np.testing.assert_allclose(clf.coef_, whole.coef_, atol=1e-6)
    np.testing.assert_allclose(clf.predict_proba(X), whole.predict_proba(X), atol=1e-6)
    with pytest.raises(ValueError, match="checkpoint"):
        clf.fit(parts, checkpoint="nowhere.npz")
    grouped_parts = [(np.round(A), b) for A, b in parts]
    with pytest.raises(ValueError, match="binary"):
        HierarchicalEPLogistic(0).fit(grouped_parts)
    with pytest.raises(ValueError, match="1 class"):
        clf.fit([(X, np.zeros(60))])


# ---------------------------------------------------------------------------- states and partitions


def test_state_goes_on(tmp_path):
    X, y, g = grouped()
    clf = fitted(**MODE)
    np.savez(tmp_path / "state.npz", **clf.get_state())
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        state = dict(file)
    new = HierarchicalEPLogistic(n_partitions=3, warm_start=True, **MODE).set_state(state)
    with pytest.raises(NotFittedError):
        new.predict(X)
    new.fit(X, y, groups=g)
    assert new.n_iter_ <= 2 and apart(new, clf)[0] < 1e-3
    with pytest.raises(ValueError, match="lacks"):
        new.set_state({"site_shift": 0})


def test_new_groups_become_a_site_of_their_own():
    X, y, g = grouped()
    old = g < 20
    clf = HierarchicalEPLogistic(n_partitions=2, warm_start=True, tol=1.0, **MODE)
    clf.fit(X[old], y[old], groups=g[old])
    partition, k = clf.partition_.copy(), len(clf.site_shift_)
    clf.set_params(tol=1e-3, hyperparameters="auto").fit(X, y, groups=g)
    np.testing.assert_array_equal(clf.partition_[:20], partition)
    assert np.all(clf.partition_[20:] == k) and len(clf.site_shift_) == k + 1
    assert max(apart(clf, HierarchicalEPLogistic().fit(X, y, groups=g))) < 3e-3


def test_a_site_whose_groups_are_gone_leaves_no_gap():
    X, y, g = grouped()
    clf = HierarchicalEPLogistic(n_partitions=4, warm_start=True, tol=1.0, **MODE)
    left = clf.fit(X, y, groups=g).partition_[g] != 1
    clf.set_params(tol=1e-3, hyperparameters="auto").fit(X[left], y[left], groups=g[left])
    assert len(clf.site_shift_) == 3
    assert np.unique(clf.partition_).tolist() == [0, 1, 2]
    parts = clf.diagnose(25, X=X[left], y=y[left], groups=g[left]).parts
    assert sum(part.n_rows for part in parts) == left.sum()
    fresh = HierarchicalEPLogistic().fit(X[left], y[left], groups=g[left])
    assert max(apart(clf, fresh)) < 3e-3


def test_checkpoint_resumes_and_refuses_other_data(tmp_path):
    X, y, g = (v[:100] for v in grouped())
    path = tmp_path / "run.npz"
    kw = dict(n_partitions=2, damping=0.5, tol=1e-5, hyperparameters="mode")
    whole = HierarchicalEPLogistic(**kw).fit(X, y, groups=g)
    with pytest.warns(ConvergenceWarning):
        HierarchicalEPLogistic(**{**kw, "max_iter": 3}).fit(X, y, groups=g, checkpoint=path)
    resumed = HierarchicalEPLogistic(**kw).fit(X, y, groups=g, checkpoint=path)
    assert resumed.n_iter_ <= whole.n_iter_ - 2 and apart(resumed, whole)[0] < 1e-4
    with pytest.raises(ValueError, match="other data"):
        HierarchicalEPLogistic(**kw).fit(X[::-1], y, groups=g, checkpoint=path)


def test_lists_of_partitions(tmp_path):
    X, y, g = (v[:120] for v in grouped())
    G = np.column_stack([X, g])
    masks = [g % 3 == k for k in range(3)]
    for k, m in enumerate(masks):
        np.save(tmp_path / f"X{k}.npy", G[m])
        np.save(tmp_path / f"y{k}.npy", y[m])

    def load(k, mode=None):
        return tuple(np.load(tmp_path / f"{c}{k}.npy", mmap_mode=mode) for c in "Xy")

    base = HierarchicalEPLogistic(3, n_partitions=3, **MODE).fit(G, y)
    parts = [(G[m], y[m]) for m in masks]
    clf = HierarchicalEPLogistic(3, **MODE).fit(parts)
    assert max(apart(clf, base)) < 2e-3
    np.testing.assert_allclose(clf.predict_proba(G), base.predict_proba(G), atol=1e-3)
    assert clf.partition_.tolist() == (np.arange(12) % 3).tolist()
    quick = HierarchicalEPLogistic(3, tol=1.0, **MODE)
    first = clone(quick).fit(parts)
    for same in (
        [load(k, "r") for k in range(3)],
        [functools.partial(load, k) for k in range(3)],
        [(G[m], y[m], np.ones(m.sum())) for m in masks],
    ):
        other = clone(quick).fit(same)
        np.testing.assert_array_equal(other.predict_proba(G), first.predict_proba(G))
        assert other.partition_.tolist() == clf.partition_.tolist()
    with pytest.raises(ValueError, match="more than one partition"):
        HierarchicalEPLogistic(3).fit([(G[:95], y[:95]), (G[95:], y[95:])])
    with pytest.raises(ValueError, match="features"):
        HierarchicalEPLogistic(2).fit([(G[:90], y[:90]), (G[90:, 1:], y[90:])])
    with pytest.raises(ValueError, match="empty"):
        HierarchicalEPLogistic(3).fit([])


@pytest.mark.slow
def test_processes_give_the_same_bits():
    X, y, g = grouped()
    clf = HierarchicalEPLogistic(n_partitions=3, n_jobs=2).fit(X, y, groups=g)
    np.testing.assert_allclose(clf.coef_, fitted().coef_, rtol=0, atol=1e-12)


class PickleEach:
    """A callback that keeps the estimator itself at each task, and the models of iterations."""

    def setup(self, estimator, context):
        self.copies, self.models = [], []

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        self.copies.append(pickle.dumps(estimator))

    def on_fit_task_end(self, estimator, context, *, fitted_estimator):
        if context.parent is not None and context.parent.parent is None:
            self.models.append(fitted_estimator)
        return False


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ep", pytest.param("laplace", marks=pytest.mark.slow)])
def test_a_copy_from_the_middle_of_a_fit_is_not_fitted_but_the_model_so_far_is(engine):
    pytest.importorskip("sklearn.callback")
    X, y, g = grouped()
    watch, old = PickleEach(), fitted()
    clf = clone(old).set_params(engine=engine).fit(X[:, :2], y, groups=g // 2)
    clf.set_callbacks(watch).fit(X, y, groups=g)
    assert len(watch.models) == clf.n_iter_ > 1 and len(watch.copies) > clf.n_iter_ + 1
    for copy in map(pickle.loads, watch.copies):
        with pytest.raises(NotFittedError):
            copy.predict(X, groups=g)
    first, last = (m.predict_proba(X, groups=g) for m in (watch.models[0], watch.models[-1]))
    np.testing.assert_array_equal(last, clf.predict_proba(X, groups=g))
    assert 0 < np.max(np.abs(first - last)) < 0.5


def test_what_ran_is_told():
    X, y, g = grouped()
    quick = dict(max_iter=20, tol=1.0)
    assert (fitted().engine_, fitted().theta_rule_, fitted().stop_reason_) == (
        "ep",
        "grid",
        "converged",
    )
    X, y, g = (v[:60] for v in (X, y, g))
    plain = HierarchicalEPLogistic(engine="laplace", **quick).fit(X, y)
    assert (plain.engine_, plain.theta_rule_) == ("laplace", "none")
    three = HierarchicalEPLogistic(random_slopes=[0, 1], **quick).fit(X, y, groups=g)
    rough = HierarchicalEPLogistic(refine=False, **quick).fit(X, y, groups=g)
    assert three.theta_rule_ == rough.theta_rule_ == "star"
    with pytest.warns(ConvergenceWarning, match="iterations ran out"):
        short = HierarchicalEPLogistic(max_iter=1, tol=1e-9, **MODE).fit(X, y, groups=g)
    assert short.stop_reason_ == "max_iter" and short.n_iter_ == 1


# ---------------------------------------------------------------------------- hostile data


def hostile():
    X, y, g = grouped(12, 6, 3, 1.0, 5)
    rng = np.random.default_rng(0)
    one_class = y.copy()
    one_class[g < 5] = 1
    separable = X.copy()
    separable[:, 2] = np.where(y == 1, 1, -1) * (1 + rng.uniform(size=len(y)))
    pure = (rng.uniform(size=len(y)) < 1 / (1 + np.exp(-X[:, 0]))).astype(int)
    return {
        "one class in many groups": (X, one_class, g),
        "separable": (X, separable[:, 2] > 0, g),
        "no group effect": (X, pure, g),
        "every row a group": (X, y, np.arange(len(y))),
        "one group": (X, y, np.zeros(len(y), int)),
        "scales": (X * [1, 1e4, 1e-4], y, g),
        "duplicated column": (X[:, [0, 1, 1]], y, g),
        "more columns than rows": (rng.standard_normal((20, 30)), y[:20], g[:20]),
        "two rows": (X[:2], [0, 1], [0, 1]),
    }


ALIKE = ("every row a group", "scales", "duplicated column")  # others enter the same code


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in hostile()],
)
def test_hostile_data_stay_finite(name):
    X, y, g = hostile()[name]
    clf = HierarchicalEPLogistic(max_iter=15).fit(X, y, groups=g)
    p = clf.predict_proba(X, groups=g)
    for value in (clf.coef_, clf.coef_std_, clf.tau_, clf.tau_interval_, clf.log_evidence_, p):
        assert np.all(np.isfinite(value))
    assert np.all(clf.coef_std_ > 0) and np.allclose(p.sum(1), 1)
    if name == "one class in many groups":
        assert np.mean(clf.group_effects_[:5]) > 0
    if name == "no group effect":
        assert clf.tau_[0] < 0.6


def test_warnings_name_the_regime():
    X, y, g = grouped()
    with pytest.warns(UserWarning, match="one group"):
        HierarchicalEPLogistic(hyperparameters="mode").fit(X, y, groups=np.zeros(len(y)))
    with pytest.warns(UserWarning, match="every group has one row"):
        HierarchicalEPLogistic(hyperparameters="mode").fit(X[:60], y[:60], groups=np.arange(60))


@pytest.mark.slow
def test_groups_of_one_class_in_partitions_are_told_of():
    rng = np.random.default_rng(8)
    g = np.repeat(np.arange(50), 2)
    X = rng.standard_normal((100, 1))
    y = (10 * rng.standard_normal(50)[g] + X[:, 0] > 0).astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pytest.warns(UserWarning, match="importance"):
            clf = HierarchicalEPLogistic(n_partitions=2, max_iter=10).fit(X, y, groups=g)
    found = clf.diagnose(X=X, y=y, groups=g)
    assert found.pareto_k > 0.7 and found.ess_share < 0.1
    assert "of one class" in str(found) and "tau is underestimated" in str(found)
    # without partitions small groups are integrated exactly, and nothing is to be said
    assert HierarchicalEPLogistic().fit(X, y, groups=g).diagnose().remarks[1:] == (
        "Give X, y and groups of the training rows for importance weights.",
    )


def test_a_message_that_is_no_gaussian_is_skipped(monkeypatch):
    X, y, g = grouped()
    real, calls = part.tilted_by_nodes, []

    def broken(rows, cavity, state, **kwargs):
        site = real(rows, cavity, state, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            site = site._replace(moments=site.moments._replace(cov=-site.moments.cov))
        return site

    monkeypatch.setattr("sklearn_ep.hierarchical.partitions.part.tilted_by_nodes", broken)
    clf = HierarchicalEPLogistic(n_partitions=3, **MODE).fit(X, y, groups=g)
    assert clf.n_skipped_ == 1 and clf.converged_ and apart(clf, fitted(**MODE))[0] < 2e-3


@pytest.mark.parametrize(
    "kw, match",
    [
        (dict(group_column=17), "17"),
        (dict(group_column="site"), "site"),
        (dict(random_slopes=[17]), "17"),
        (dict(random_slopes=[0, 0]), "repeats"),
        (dict(engine="magic"), "engine"),
        (dict(schedule="magic"), "schedule"),
        (dict(prior_scale=-1.0), "prior_scale"),
        (dict(prior_scale=[1.0, 2.0]), "prior_scale"),
        (dict(tau_prior=1.0), "tau_prior"),
        (dict(tau_prior=(0.0, 0.0)), "tau_prior"),
        (dict(n_partitions=0), "n_partitions"),
        (dict(n_partitions="few"), "n_partitions"),
        (dict(multi_class="all"), "multi_class"),
        (dict(power=0.0), "power"),
        (dict(power=1.5), "power"),
        (dict(power=0.5, engine="laplace"), "power.*laplace"),
        (dict(power=0.5, engine="importance"), "power.*importance"),
    ],
)
def test_bad_parameters_are_named(kw, match):
    X, y, g = grouped()
    groups = None if "group_column" in kw else g
    clf = clone(fitted()).set_params(**kw)
    with pytest.raises((ValueError, TypeError), match=match):
        clf.fit(X, y, groups=groups)
    assert not hasattr(clf, "coef_")


def test_bad_groups_are_named():
    X, y, g = grouped()
    clf = fitted()
    with pytest.raises(ValueError, match="groups"):
        HierarchicalEPLogistic().fit(X, y, groups=g[:-1])
    with pytest.raises(ValueError, match="groups"):
        clf.predict(X, groups=g[:-1])
    with pytest.raises(ValueError, match="not both"):
        HierarchicalEPLogistic(0).fit(X, y, groups=g)
    with pytest.raises(ValueError, match="kind"):
        clf.predict_proba(X, kind="other")
    with pytest.raises(ValueError, match="random_slopes needs groups"):
        HierarchicalEPLogistic(random_slopes=[0]).fit(X, y)
    with pytest.raises(ValueError, match="without groups"):
        HierarchicalEPLogistic().fit(X, y).predict(X, groups=g)
    with pytest.raises(ValueError, match="group_column"):
        HierarchicalEPLogistic(0, **MODE).fit(np.column_stack([g, X]), y).predict(
            np.column_stack([g, X]), g
        )


def test_groups_forgotten_at_prediction_are_told_once_a_fit():
    X, y, g = grouped()
    clf = HierarchicalEPLogistic(tol=1.0).fit(X, y, groups=g)
    before, pickled = dict(vars(clf)), pickle.dumps(clf)
    with pytest.warns(UserWarning, match="group_column.*kind='population'") as told:
        p = clf.predict_proba(X)
        clf.score(X, y)
        clf.sample_proba(X, random_state=0)
        clf.latent_covariance(X[:2])
    assert len(told) == 1
    np.testing.assert_array_equal(p, clf.predict_proba(X, kind="population"))
    assert all(vars(clf)[name] is value for name, value in before.items())
    assert len(vars(clf)) == len(before) and pickle.dumps(clf) == pickled
    clf.fit(X, y, groups=g)
    clf.predict(X, groups=[None] * len(y))
    with pytest.warns(UserWarning, match="group_column"):
        clf.predict(X)


def test_parameters_that_do_nothing_are_named(few_draws):
    X, y, g = (v[:60] for v in grouped())
    quick = dict(max_iter=20, tol=1.0, random_state=0)
    for kw, match in (
        (dict(engine="laplace", schedule="serial"), "schedule='serial' does nothing"),
        (dict(engine="importance", refine=False), "refine=False does nothing"),
    ):
        with pytest.warns(UserWarning, match=match) as told:
            HierarchicalEPLogistic(**quick, **kw).fit(X, y, groups=g)
        assert len(told) == 1
    with pytest.warns(UserWarning, match="no groups were given.*group_column") as told:
        HierarchicalEPLogistic(**quick).fit(X, y)
    assert len(told) == 1
    for kw in (dict(tau_prior=[0.0, 1.5]), dict(engine="importance")):
        HierarchicalEPLogistic(**quick, **kw).fit(X, y, groups=g)  # warnings are errors


def test_display_of_group_effects():
    clf = fitted()
    display = GroupEffectsDisplay.from_estimator(clf)
    assert len(display.ax_.get_yticklabels()) == 24 and display.figure_ is display.ax_.figure
    with pytest.raises(NotFittedError):
        GroupEffectsDisplay.from_estimator(HierarchicalEPLogistic())
    with pytest.raises(ValueError, match="without groups"):
        X, y, _ = grouped()
        GroupEffectsDisplay.from_estimator(HierarchicalEPLogistic().fit(X, y))


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"n_partitions": 3}, {"random_slopes": [0]}],
)
def test_scales_at_their_mode_are_one_node(settings):
    """Known scales shift little and leave out a part of every variance."""
    rng = np.random.default_rng(3)
    group = rng.integers(8, size=160)
    X = np.column_stack([rng.normal(size=(160, 2)), group])
    y = X[:, 0] + rng.normal(size=8)[group] + rng.logistic(size=160) > 0
    whole, mode = (
        HierarchicalEPLogistic(2, hyperparameters=how, **settings).fit(X, y)
        for how in ("integrate", "mode")
    )
    assert (whole.hyperparameters_used_, mode.hyperparameters_used_) == ("integrate", "mode")
    t = len(whole.hyper_names_)
    assert mode.theta_rule_ == "mode" and whole.theta_rule_ == ("grid" if t < 3 else "star")
    assert mode.hyper_nodes_.shape == (1, t) and whole.hyper_nodes_.shape[1] == t
    assert whole.hyper_weights_.sum() == pytest.approx(1.0, abs=1e-12)
    # the evidence of the grid pays for what it did not know
    assert whole.log_evidence_ < mode.log_evidence_
    assert np.all(mode.tau_interval_[:, 0] == mode.tau_interval_[:, 1])
    mean, var = whole.latent_mean_and_variance(X)
    mode_mean, mode_var = mode.latent_mean_and_variance(X)
    assert np.max(np.abs(mean - mode_mean) / np.sqrt(var)) < 0.5
    assert np.mean(var) > np.mean(mode_var)
    lower, upper = whole.coef_interval(0.9)[0].T
    assert np.all(lower < mode.coef_[0]) and np.all(mode.coef_[0] < upper)


def test_hyperparameters_are_one_of_three_words():
    X = np.column_stack([np.arange(8.0), np.arange(8) % 4])
    with pytest.raises(ValueError, match="hyperparameters"):
        HierarchicalEPLogistic(1, hyperparameters="average").fit(X, np.arange(8) % 2)


def test_partitions_of_groups_alone_are_those_of_rows_in_memory():
    """No column besides the label of the group: the intercept and the groups are the model."""
    group = np.repeat(np.arange(8.0), 15)[:, None]
    y = (np.random.default_rng(0).random(120) < 0.3 + 0.4 * (group[:, 0] % 2)).astype(int)
    memory = HierarchicalEPLogistic(0, n_partitions=2).fit(group, y)
    parts = HierarchicalEPLogistic(0).fit([(group[:60], y[:60]), (group[60:], y[60:])])
    np.testing.assert_allclose(
        parts.predict_proba(group), memory.predict_proba(group), rtol=0, atol=1e-3
    )
