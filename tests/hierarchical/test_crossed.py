"""HierarchicalEPLogistic with several factors: against Gibbs sampling and against itself."""

import functools
import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from oracles import arrays, oracle
from scipy.special import expit, logit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, cross_val_predict, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.hierarchical.messages import parts as rows_in_parts
from sklearn_ep.inspection import GroupEffectsDisplay

ORACLE, ARRAYS = oracle("crossed"), arrays("crossed")


# a star of nodes, where accuracy is not the question; messages have none
LIGHT: dict = {"ep": {"refine": False}, "messages": {}}
MODE = dict(hyperparameters="mode")  # one node


def quiet(est, *args, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return est.fit(*args, **kw)


@functools.cache
def people_and_items(n=300, levels=(25, 8), taus=(1.0, 0.7), seed=3):
    rng = np.random.default_rng(seed)
    G = np.column_stack([np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in levels])
    X = rng.normal(size=(n, 2))
    z = X @ [1.0, -1.0] - 0.5
    for f, (k, tau) in enumerate(zip(levels, taus, strict=True)):
        z = z + tau * rng.normal(size=k)[G[:, f]]
    return X, (rng.random(n) < expit(z)).astype(int), G


@functools.cache
def fitted(engine):
    X, y, G = people_and_items()
    est = HierarchicalEPLogistic(group_column=[2, 3], engine=engine)
    return est.fit(np.column_stack([X, G]), y)


@functools.cache
def fitted_to_parts():
    return HierarchicalEPLogistic([2, 3]).fit(spread())


def apart(a, b):
    """Largest distance of two fits in posterior sd, and of their sds, relative."""
    coef, sd = np.max(np.abs(a.coef_ - b.coef_) / b.coef_std_), a.coef_std_ / b.coef_std_
    return max(coef, np.max(np.abs(sd - 1)))


# ---------------------------------------------------------------------------- truth


@pytest.mark.parametrize("name", [pytest.param("crossed2", marks=pytest.mark.slow), "small"])
def test_against_gibbs_sampling(name):
    X, y, G = (ARRAYS[f"{name}_{k}"] for k in ("X", "y", "G"))
    d, truth = X.shape[1], ORACLE[name]
    est = HierarchicalEPLogistic([d, d + 1], fit_intercept=False).fit(np.column_stack([X, G]), y)
    assert est.converged_ and est.engine_ == "ep" and est.theta_rule_ == "grid"
    sd = np.array(truth["coef_sd"])
    assert np.max(np.abs(est.coef_[0] - truth["coef"]) / sd) < 0.04
    np.testing.assert_allclose(est.coef_std_[0], sd, rtol=0.03)
    quantiles = np.log(
        np.column_stack([est.tau_interval_[:, 0], est.tau_, est.tau_interval_[:, 1]])
    )
    gap = np.abs(quantiles - truth["log_tau_q"]) / np.array(truth["log_tau_sd"])[:, None]
    assert np.max(gap) < 0.08
    for f in range(2):
        order = np.argsort(est.group_labels_[f])
        mean, spread = est.group_effects_[f][order, 0], est.group_effects_std_[f][order, 0]
        exact = np.array(truth["effects_sd"][f])
        assert np.max(np.abs(mean - truth["effects"][f]) / exact) < 0.06
        np.testing.assert_allclose(spread, exact, rtol=0.05)
    new = np.column_stack([ARRAYS[f"{name}_Xp"], ARRAYS[f"{name}_Gp"]])  # unseen levels are -1
    assert np.max(np.abs(est.predict_proba(new)[:, 1] - truth["proba"])) < 0.012


def test_messages_against_gibbs_sampling():
    X, y, G = (ARRAYS[f"large_{k}"] for k in ("X", "y", "G"))
    truth = ORACLE["large"]
    est = HierarchicalEPLogistic([3, 4], fit_intercept=False, engine="messages")
    est.fit(np.column_stack([X, G]), y)
    assert est.converged_ and np.isfinite(est.log_evidence_)
    np.testing.assert_allclose(np.log(est.tau_), truth["log_tau"], atol=0.02)
    width = np.log(est.tau_interval_[:, 1] / est.tau_interval_[:, 0]) / 3.29
    np.testing.assert_allclose(width, truth["log_tau_sd"], rtol=0.1)
    assert np.max(np.abs(est.coef_[0] - truth["coef"]) / truth["coef_sd"]) < 0.1
    np.testing.assert_allclose(est.coef_std_[0], truth["coef_sd"], rtol=0.04)


@pytest.mark.parametrize("mean", [pytest.param(-2.0, marks=pytest.mark.slow), 1.5])
def test_scales_are_found_from_afar(mean):
    """A secant gone wrong takes short steps, which once looked like the end of the search."""
    X, y, G = people_and_items()
    Z, kw = np.column_stack([X, G]), dict(group_column=[2, 3], tau_prior=(mean, 1.5))
    far = HierarchicalEPLogistic(**kw, engine="messages").fit(Z, y)
    near = HierarchicalEPLogistic(**kw, engine="messages", warm_start=True)
    near.set_state(fitted("messages").get_state()).fit(Z, y)  # starts next to the answer
    assert far.converged_ and near.n_iter_ < far.n_iter_
    np.testing.assert_allclose(np.log(far.tau_), np.log(near.tau_), atol=2e-3)
    ep = HierarchicalEPLogistic(**kw, engine="ep", refine=False).fit(Z, y)
    assert np.max(np.abs(np.log(far.tau_[0] / ep.tau_[0]))) < 0.03


@pytest.mark.slow
def test_the_engines_agree_where_groups_have_rows():
    X, y, G = people_and_items(3000, (40, 30), (1.0, 0.7), 0)
    Z = np.column_stack([X, G])
    ep, messages = (HierarchicalEPLogistic([2, 3], engine=e).fit(Z, y) for e in ("ep", "messages"))
    assert np.max(np.abs(ep.coef_ - messages.coef_) / ep.coef_std_) < 0.1
    np.testing.assert_allclose(messages.coef_std_, ep.coef_std_, rtol=0.04)
    np.testing.assert_allclose(np.log(messages.tau_), np.log(ep.tau_), atol=0.05)
    np.testing.assert_allclose(messages.predict_proba(Z), ep.predict_proba(Z), atol=0.03)
    np.testing.assert_allclose(
        messages.predict_proba(Z, kind="population"),
        ep.predict_proba(Z, kind="population"),
        atol=0.01,
    )


@pytest.mark.slow
def test_slopes_that_vary_by_a_shared_and_by_the_local_factor():
    rng = np.random.default_rng(0)
    g, h = np.repeat(np.arange(30), 25), np.tile(np.arange(10), 75)
    X = rng.normal(size=(750, 2))
    slope_g, slope_h = rng.normal(size=30), 0.8 * rng.normal(size=10)
    z = X[:, 0] * (1 + slope_g[g]) + X[:, 1] * (slope_h[h] - 1) + rng.normal(size=30)[g]
    y = (rng.random(750) < expit(z)).astype(int)
    est = HierarchicalEPLogistic([2, 3], random_slopes={2: [0], 3: [1]})
    quiet(est, np.column_stack([X, g, h]), y)
    assert est.tau_.shape == (4,) and est.hyper_nodes_.shape[1] == 6
    assert [e.shape for e in est.group_effects_] == [(30, 2), (10, 2)]
    assert np.corrcoef(est.group_effects_[0][:, 1], slope_g)[0, 1] > 0.75
    assert np.corrcoef(est.group_effects_[1][:, 1], slope_h)[0, 1] > 0.85
    table = est.summary().scales
    assert list(table["effect"]) == ["intercept", "x0", "intercept", "x1"]
    rows = np.column_stack([X, g, h])[:40]
    mean, var = est.latent_mean_and_variance(rows)
    np.testing.assert_allclose(np.diagonal(est.latent_covariance(rows)), var, rtol=1e-8)


# ---------------------------------------------------------------------------- what must not matter


def test_rounding_errors_of_columns_move_small_groups_no_more_than_that():
    """A small group takes in its rows one after the other, in an order that they decide."""
    X, y, G = people_and_items(100, (20, 5))
    model = functools.partial(HierarchicalEPLogistic, **MODE)
    base = model().fit(X, y, groups=G[:, 0])
    noise = np.random.default_rng(0).standard_normal(X.shape)
    assert apart(base, model().fit(X * (1.0 + 1e-9 * noise), y, groups=G[:, 0])) < 1e-6


def test_small_groups_without_columns_lean_to_no_label():
    """Their rows differ by the label alone; taken in by it they moved the intercept by .3 sd."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(12), rng.integers(3, 9, 12))[:, None]
    p = expit(2.5 * rng.standard_normal(12)[groups[:, 0]] - 1.0)
    y = (rng.random(len(p)) < p).astype(int)
    fits = [HierarchicalEPLogistic(0, **MODE).fit(groups, labels) for labels in (y, 1 - y)]
    exact = HierarchicalEPLogistic(0, engine="importance", random_state=0).fit(groups, y)
    sd = np.sqrt(exact.coef_cov_[0, 0])
    np.testing.assert_allclose(fits[0].intercept_, exact.intercept_, atol=0.1 * sd)
    np.testing.assert_allclose(fits[0].intercept_, -fits[1].intercept_, atol=0.1 * sd)
    swapped = fits[1].predict_proba(groups)[:, ::-1]
    np.testing.assert_allclose(fits[0].predict_proba(groups), swapped, atol=5e-3)


def test_order_of_factors_and_rows_and_the_kind_of_labels_do_not_matter():
    X, y, G = people_and_items(100, (7, 5))
    model = functools.partial(HierarchicalEPLogistic, **MODE)  # one node is as telling
    base = model([2, 3]).fit(np.column_stack([X, G]), y)
    back = model([2, 3]).fit(np.column_stack([X, G[:, ::-1]]), y)
    assert apart(base, back) < 1e-3
    np.testing.assert_allclose(np.log(back.tau_[::-1]), np.log(base.tau_), atol=1e-3)
    order = np.random.default_rng(0).permutation(len(y))
    moved = model([2, 3]).fit(np.column_stack([X, G])[order], y[order])
    assert apart(base, moved) < 1e-8
    table = pd.DataFrame(X, columns=["a", "b"])
    table["person"], table["item"] = [f"p{k:02}" for k in G[:, 0]], G[:, 1]
    for frame in (pl.from_pandas(table), table):
        named = model(["person", "item"]).fit(frame, y)
        assert apart(base, named) < 1e-8
        assert named.group_labels_[0][0] == "p00" and named.group_labels_[1].dtype.kind in "iu"
        new = named.predict_proba(frame)
        np.testing.assert_allclose(new, base.predict_proba(np.column_stack([X, G])), atol=1e-8)
    for beside in (G, pd.DataFrame(G, columns=["person", "item"])):
        outside = model().fit(X, y, groups=beside)
        assert apart(base, outside) < 1e-8
        np.testing.assert_allclose(outside.predict_proba(X, groups=beside), new, atol=1e-8)
    with pytest.warns(UserWarning, match="every row"):
        outside.predict_proba(X)


def test_names_of_levels_do_not_matter():
    rng = np.random.default_rng(2)
    X, G = rng.normal(size=(40, 2)), np.column_stack([rng.integers(n, size=40) for n in (14, 5)])
    effects = rng.normal(size=14)[G[:, 0]] + rng.normal(size=5)[G[:, 1]]
    y = X[:, 0] + effects + rng.logistic(size=40) > 0
    renamed = np.column_stack([rng.permutation(n)[g] for n, g in zip((14, 5), G.T, strict=True)])
    model = HierarchicalEPLogistic(hyperparameters="mode")
    base, other = (clone(model).fit(X, y, groups=g) for g in (G, renamed))
    proba = other.predict_proba(X, groups=renamed)
    np.testing.assert_allclose(proba, base.predict_proba(X, groups=G), atol=1e-9)


def test_nested_levels_by_combination_or_by_labels_of_their_own():
    X, y, G = people_and_items(300, (25, 5))
    district, region = G[:, 0], G[:, 0] // 5
    rows = np.column_stack([X, region, district, district % 5])
    own = HierarchicalEPLogistic([2, 3], **MODE).fit(rows[:, :4], y)
    pairs = HierarchicalEPLogistic([2, (2, 3)], **MODE)
    pairs.fit(np.delete(rows, 3, axis=1), y)
    assert apart(own, pairs) < 1e-8 and pairs.group_labels_[1][7] == (1.0, 2.0)
    np.testing.assert_allclose(pairs.group_effects_[1], own.group_effects_[1], atol=1e-8)
    assert list(pairs.summary().scales["factor"]) == ["2", "2:3"]
    # a new district of a known region, and the same number in a region that is new
    new = pairs.latent_mean_and_variance([[0, 0, 1, 99], [0, 0, 99, 1]])
    by_label = own.latent_mean_and_variance([[0, 0, 1, 99], [0, 0, 99, 99]])
    np.testing.assert_allclose(new, by_label, rtol=1e-8)


@pytest.mark.parametrize("engine", [pytest.param("ep", marks=pytest.mark.slow), "messages"])
def test_integer_weights_are_copies(engine):
    X, y, G = people_and_items(100, (20, 5))
    w = np.random.default_rng(0).integers(0, 4, 100)
    Z = np.column_stack([X, G])
    est = HierarchicalEPLogistic([2, 3], engine=engine, **LIGHT[engine])
    a, b = quiet(clone(est), Z, y, sample_weight=w), quiet(clone(est), Z.repeat(w, 0), y.repeat(w))
    assert apart(a, b) < 1e-6
    np.testing.assert_allclose(a.tau_, b.tau_, rtol=1e-6)
    np.testing.assert_allclose(a.predict_proba(Z[w > 0]), b.predict_proba(Z[w > 0]), atol=1e-8)


def test_one_factor_in_a_list_is_that_factor():
    X, y, G = people_and_items(600, (20, 5))
    Z = np.column_stack([X, G[:, 0]])
    alone, listed = HierarchicalEPLogistic(2).fit(Z, y), HierarchicalEPLogistic([2]).fit(Z, y)
    assert apart(alone, listed) < 0.02
    np.testing.assert_allclose(np.log(listed.tau_), np.log(alone.tau_), atol=0.01)
    assert isinstance(listed.group_effects_, list) and isinstance(alone.group_effects_, np.ndarray)
    np.testing.assert_allclose(listed.group_effects_[0], alone.group_effects_, atol=0.01)
    assert listed.log_evidence_ == pytest.approx(alone.log_evidence_, abs=0.05)
    large = HierarchicalEPLogistic(2, engine="messages").fit(Z, y)
    assert large.group_effects_.shape == (20, 1) and large.group_labels_.shape == (20,)
    assert large.sample_posterior(3, 0).group_effects.shape == (3, 20, 1)
    assert large.summary().scales["n_levels"].tolist() == [20]
    # attributes of one kind of fit do not outlive it
    again = alone.set_params(group_column=[2]).fit(Z, y)
    assert not hasattr(again, "site_precision_") and not hasattr(again, "partition_")


def test_small_groups_where_one_factor_alone_is_wrong():
    """Groups of two and three rows with a large scale: sites of rows find tau far too small."""
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(70), 2 + np.arange(70) % 2)
    x = rng.normal(size=len(g))
    y = (rng.random(len(g)) < expit(x + 4.0 * rng.normal(size=70)[g])).astype(int)
    est = HierarchicalEPLogistic([1]).fit(np.column_stack([x, g]), y)
    # the likelihood of each group by a fine rule in u, on a grid over all parameters
    u = np.linspace(-8, 8, 201)
    weight = np.exp(-0.5 * u**2)
    weight /= weight.sum()
    sign = np.where(y == 1, 1.0, -1.0)
    starts = np.flatnonzero(np.r_[True, np.diff(g) > 0])
    theta = np.linspace(0.2, 2.8, 13)
    coef = est.coef_[0, 0] + est.coef_std_[0, 0] * np.linspace(-3.5, 3.5, 5)
    intercept = est.intercept_[0] + np.sqrt(est.coef_cov_[1, 1]) * np.linspace(-3.5, 3.5, 5)
    log_p = np.empty((13, 5, 5))
    for i, t in enumerate(theta):
        for j, b in enumerate(coef):
            for k, c in enumerate(intercept):
                z = (x * b + c)[:, None] + np.exp(t) * u
                groups = np.add.reduceat(-np.logaddexp(0, -sign[:, None] * z), starts)
                prior = -0.5 * (t / 1.5) ** 2 - 0.5 * (b**2 + c**2) / 2.5**2
                log_p[i, j, k] = np.log(np.exp(groups) @ weight).sum() + prior
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p.sum((1, 2)) @ theta
    sd = np.sqrt(p.sum((1, 2)) @ (theta - mean) ** 2)
    assert abs(np.log(est.tau_[0]) - mean) < 0.1 * sd
    assert abs(est.coef_[0, 0] - p.sum((0, 2)) @ coef) < 0.1 * est.coef_std_[0, 0]


# ---------------------------------------------------------------------------- prediction and draws


@pytest.mark.parametrize("engine", ["ep", "messages"])
def test_unseen_levels_are_integrated_factor_by_factor(engine):
    X, y, G = people_and_items()
    est, n = fitted(engine), len(y)
    Z = np.column_stack([X, G]).astype(float)
    mean, var = est.latent_mean_and_variance(Z)
    new_person, new_item = Z.copy(), Z.copy()
    new_person[:, 2], new_item[::2, 3], new_item[1::2, 3] = 99, 77, np.nan
    for rows, f in ((new_person, 0), (new_item, 1)):
        m, v = est.latent_mean_and_variance(rows)
        effect = est.group_effects_[f][G[:, f], 0]
        assert np.corrcoef(mean - m, effect)[0, 1] > 0.99
        assert np.mean(v) > np.mean(var) + 0.5 * est.tau_[f] ** 2
    nobody = np.column_stack([X, np.full((n, 2), -7)])
    population = est.predict_proba(Z, kind="population")
    np.testing.assert_array_equal(population, est.predict_proba(nobody))
    assert est.score(Z, y) > est.score(nobody, y) and est.predict(Z).shape == (n,)


@pytest.mark.parametrize(
    ("engine", "n_samples"),
    [("ep", 3000), pytest.param("messages", 1500, marks=pytest.mark.slow)],
)
def test_draws_are_those_of_the_latent_moments(engine, n_samples):
    X, y, G = people_and_items()
    est = fitted(engine)
    draws = est.sample_posterior(n_samples, random_state=0)
    assert draws.coef.shape == (n_samples, 2) and draws.tau.shape == (n_samples, 2)
    assert [e.shape for e in draws.group_effects] == [(n_samples, 25, 1), (n_samples, 8, 1)]
    z = draws.coef @ X.T + draws.intercept[:, None]
    z += sum(draws.group_effects[f][:, G[:, f], 0] for f in range(2))
    mean, var = est.latent_mean_and_variance(np.column_stack([X, G]))
    error = np.sqrt(var / n_samples)
    assert np.max(np.abs(z.mean(0) - mean) / error) < 6
    np.testing.assert_allclose(z.var(0), var, rtol=0.2)
    # messages leave out what effects of different factors have in common
    assert abs(np.mean(z.var(0) / var) - 1) < (0.04 if engine == "ep" else 0.08)
    np.testing.assert_allclose(np.median(draws.tau, 0), est.tau_, rtol=0.1)
    for f in range(2):
        np.testing.assert_allclose(
            draws.group_effects[f].std(0), est.group_effects_std_[f], rtol=0.12
        )
    again = est.sample_posterior(5, random_state=0)
    np.testing.assert_array_equal(again.coef, est.sample_posterior(5, random_state=0).coef)
    p = est.sample_proba(np.column_stack([X, G]), 400, random_state=0)
    known = est.predict_proba(np.column_stack([X, G]))
    assert np.max(np.abs(p.mean(0) - known)) < 0.06


@pytest.mark.parametrize("engine", ["ep", "messages"])
def test_covariance_between_rows(engine):
    X, _, G = people_and_items()
    est = fitted(engine)
    rows = np.column_stack([X, G]).astype(float)[:14]
    rows[8:10, 2], rows[10:12, 3], rows[12:, 2:] = 99, 55, np.nan
    cov, (_, var) = est.latent_covariance(rows), est.latent_mean_and_variance(rows)
    np.testing.assert_allclose(np.diagonal(cov), var, rtol=1e-8)
    np.testing.assert_allclose(cov, cov.T, atol=1e-12)
    assert np.linalg.eigvalsh(cov)[0] > -1e-8
    np.testing.assert_allclose(est.latent_covariance(rows[:10], rows[8:])[:, :2], cov[:10, 8:10])
    alone = est.latent_covariance(rows[8:9], np.array([[*rows[9, :2], 98, rows[9, 3]]]))[0, 0]
    assert cov[8, 9] - alone == pytest.approx(est.tau_[0] ** 2, rel=0.25)
    if engine == "ep":
        draws, sd = logit(est.sample_proba(rows, 20_000, random_state=0)[..., 1]), np.sqrt(var)
        np.testing.assert_allclose(
            np.cov(draws.T) / np.outer(sd, sd), cov / np.outer(sd, sd), atol=0.05
        )


# ---------------------------------------------------------------------------- as an estimator


@pytest.mark.slow
def test_pipelines_and_cross_validation_keep_the_columns():
    X, y, G = people_and_items(600, (20, 8))
    table = pd.DataFrame(X, columns=["a", "b"])
    table["person"], table["item"] = [f"p{k}" for k in G[:, 0]], [f"i{k}" for k in G[:, 1]]
    model = make_pipeline(HierarchicalEPLogistic(["person", "item"], refine=False))
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    score = cross_val_score(model, table, y, cv=folds, scoring="neg_log_loss").mean()
    shuffled = table.assign(person=table["person"].sample(frac=1, random_state=0).to_numpy())
    worse = cross_val_score(model, shuffled, y, cv=folds, scoring="neg_log_loss").mean()
    assert score > worse + 0.02
    p = cross_val_predict(model, table, y, cv=folds, method="predict_proba")
    assert p.shape == (600, 2)
    several = OneVsRestClassifier(HierarchicalEPLogistic(["person", "item"], refine=False))
    three = np.where(X[:, 1] > 0.8, 2, y)
    assert quiet(several, table, three).predict_proba(table).shape == (600, 3)
    with pytest.raises(ValueError, match="OneVsRestClassifier"):
        HierarchicalEPLogistic(["person", "item"], multi_class="one_vs_rest").fit(table, three)


def test_summary_display_diagnosis_and_pickles():
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    for engine in ("ep", "messages"):
        est = fitted(engine)
        found = est.summary()
        assert found.coefficients["name"].tolist() == ["x0", "x1", "intercept"]
        assert found.scales["n_levels"].tolist() == [25, 8]
        assert found.scales["name"].tolist() == ["2: intercept", "3: intercept"]
        np.testing.assert_allclose(found.scales["lower"], est.tau_interval_[:, 0], rtol=1e-6)
        assert "evidence" in str(found) and found.to_frame().shape[0] == 3
        wide = est.coef_interval(0.99)
        assert np.all(wide[..., 0] < est.coef_interval(0.5)[..., 0])
        copy = pickle.loads(pickle.dumps(est))
        np.testing.assert_array_equal(copy.predict_proba(Z), est.predict_proba(Z))
        says = est.diagnose(200, X=Z, y=y)
        if engine == "ep":
            assert says.ess_share > 0.2 and says.pareto_k < 0.7
        else:
            assert says.ess_share is None and sum("variances" in r for r in says.remarks) == 2
        given = dict(X=Z, y=y, labels=G[:, 1])
        display = GroupEffectsDisplay.from_estimator(est, factor=1, **given)
        assert len(display.mean) == 8
        np.testing.assert_array_equal(display.labels, est.group_labels_[1])
        # a group alone is further from the others than the model lets it be
        assert np.std(display.raw) > np.std(display.mean)
        assert np.corrcoef(display.raw, display.mean)[0, 1] > 0.95
        # labels that are a column of X need not be given
        again = GroupEffectsDisplay.from_estimator(est, factor=1, X=Z, y=y)
        np.testing.assert_array_equal(again.raw, display.raw)
        with pytest.raises(ValueError, match="y"):
            GroupEffectsDisplay.from_estimator(est, X=Z)
    assert "Give X, y" in fitted("ep").diagnose().remarks[-1]
    unseen = fitted("ep").diagnose(X=np.column_stack([X, G + 50]), y=y)
    assert "no named group" in unseen.remarks[-1]


@pytest.mark.parametrize("engine", [pytest.param("ep", marks=pytest.mark.slow), "messages"])
def test_warm_start_goes_on_from_the_mode(engine):
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    first = fitted(engine)
    est = HierarchicalEPLogistic([2, 3], engine=engine, warm_start=True)
    est.set_state(first.get_state()).fit(Z, y)
    assert est.n_iter_ < first.n_iter_ and apart(first, est) < 5e-3
    more = np.column_stack([np.r_[X, X[:5]], np.r_[G, G[:5] + 50]])
    assert quiet(est, more, np.r_[y, y[:5]]).converged_  # other rows: the scales alone are kept
    alone = clone(est).set_params(group_column=2, engine="auto", warm_start=True)
    alone.set_state(first.get_state()).fit(np.delete(Z, 3, axis=1), y)
    assert alone.converged_


def test_what_stops_early_says_so_and_still_predicts():
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    for engine in ("ep", "messages"):
        with pytest.warns(ConvergenceWarning, match="iterations ran out"):
            est = HierarchicalEPLogistic([2, 3], engine=engine, max_iter=1, **LIGHT[engine])
            est.fit(Z, y)
        assert est.n_iter_ == 1 and not est.converged_
        assert np.all(np.isfinite(est.predict_proba(Z)))


# ---------------------------------------------------------------------------- partitions


def spread(n_parts=3):
    """Rows in parts at random: levels of both factors are in several of them."""
    X, y, G = people_and_items()
    own, Z = np.random.default_rng(0).integers(n_parts, size=len(y)), np.column_stack([X, G])
    return [(Z[own == k], y[own == k]) for k in range(n_parts)]


def test_partitions_are_the_fit_of_all_rows():
    X, y, G = people_and_items()
    Z, whole = np.column_stack([X, G]), fitted("messages")
    kw = dict(group_column=[2, 3], engine="messages")
    fits = [fitted_to_parts()]
    fits.append(HierarchicalEPLogistic(**kw).fit([functools.partial(tuple, p) for p in spread()]))
    fits.append(HierarchicalEPLogistic([2, 3], n_partitions=4).fit(Z, y))
    for est in fits:
        assert est.converged_ and est.engine_ == "messages" and est.n_iter_ == whole.n_iter_
        np.testing.assert_allclose(est.coef_cov_, whole.coef_cov_, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(est.tau_interval_, whole.tau_interval_, rtol=1e-4)
        for name in ("group_labels_", "group_effects_", "group_effects_std_"):
            for own, other in zip(getattr(est, name), getattr(whole, name), strict=True):
                np.testing.assert_allclose(own, other, atol=1e-5)
        np.testing.assert_allclose(est.predict_proba(Z), whole.predict_proba(Z), atol=1e-5)


def test_draws_without_rows_have_the_moments_of_predictions():
    est, Z = fitted_to_parts(), spread()[0][0][:20]
    draws = logit(est.sample_proba(Z, 4000, random_state=0)[..., 1])
    mean, var = est.latent_mean_and_variance(Z)
    assert np.max(np.abs(draws.mean(0) - mean) / np.sqrt(var)) < 0.08
    np.testing.assert_allclose(draws.var(0), var, rtol=0.15)
    scales, *factors = est.diagnose().remarks
    assert scales.startswith("Scales") and len(factors) == 2  # what the fit's own check found
    assert b"FactorRows" not in pickle.dumps(est)  # none of them is kept


@pytest.mark.parametrize(
    ("backend", "n_jobs"),
    [
        ("threading", 2),
        pytest.param("loky", 2, marks=pytest.mark.slow),
        pytest.param("dask", None, marks=pytest.mark.slow),
    ],
)
def test_backends_give_the_same_bits(backend, n_jobs, request):
    if backend == "dask":
        request.getfixturevalue("dask_workers")
    est = HierarchicalEPLogistic([2, 3], max_iter=1, hyperparameters="mode")
    alone = quiet(clone(est), spread(2))
    with joblib.parallel_config(backend):
        other = quiet(clone(est).set_params(n_jobs=n_jobs), spread(2))
    assert np.array_equal(alone.coef_cov_, other.coef_cov_)
    assert np.array_equal(alone.tau_interval_, other.tau_interval_)


def test_a_worker_that_lost_its_rows_goes_through_their_steps_again(monkeypatch):
    est = HierarchicalEPLogistic([2, 3], max_iter=2, **MODE)
    kept = quiet(clone(est), spread())
    monkeypatch.setattr(rows_in_parts.KEPT, "most", 5000)  # room for two of three parts
    lost = quiet(clone(est), spread())
    assert np.array_equal(kept.coef_cov_, lost.coef_cov_)
    assert np.array_equal(kept.group_effects_[0], lost.group_effects_[0])


def test_rows_without_label_in_partitions_are_levels_without_name():
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    Z[::7, 3] = np.nan
    est = HierarchicalEPLogistic([2, 3], engine="messages")
    whole, parts = quiet(clone(est), Z, y), quiet(clone(est), [(Z[:90], y[:90]), (Z[90:], y[90:])])
    assert [len(known) for known in parts.group_labels_] == [25, 8]
    np.testing.assert_allclose(parts.coef_, whole.coef_, atol=1e-5)
    np.testing.assert_allclose(parts.tau_, whole.tau_, rtol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("ep", marks=pytest.mark.slow), "messages", "parts"])
def test_checkpoints_resume_and_refuse_other_data(kind, tmp_path):
    X, y, G = people_and_items()
    engine = "messages" if kind == "parts" else kind
    data = (spread(2),) if kind == "parts" else (np.column_stack([X, G]), y)
    far = (2.5, 1.5)  # a prior mean from which the scales have some way to go
    est = HierarchicalEPLogistic([2, 3], engine=engine, tau_prior=far)
    whole, path = clone(est).fit(*data), tmp_path / "fit.npz"
    with pytest.warns(ConvergenceWarning):
        clone(est).set_params(max_iter=2 if kind == "ep" else 3).fit(*data, checkpoint=path)
    resumed = clone(est).fit(*data, checkpoint=path)
    assert resumed.n_iter_ < whole.n_iter_ and apart(resumed, whole) < 2e-3
    again = clone(est).fit(*data, checkpoint=path)
    assert again.n_iter_ <= 3 and apart(again, whole) < 2e-3
    with pytest.raises(ValueError, match="other data"):
        clone(est).set_params(tau_prior=(0.0, 1.0)).fit(*data, checkpoint=path)


def test_a_state_of_parts_warms_another_fit():
    first = fitted_to_parts()
    est = HierarchicalEPLogistic([2, 3], warm_start=True).set_state(first.get_state())
    again = est.fit(spread(2))
    assert again.n_iter_ < first.n_iter_ and apart(again, first) < 5e-3


# ---------------------------------------------------------------------------- hard and bad data


def test_hard_cases_are_fitted_with_a_remark():
    X, y, G = people_and_items(100, (7, 5))
    n = len(y)
    cases = {
        "one level": np.zeros(n),
        "rests on its prior": np.arange(n) % 3,
        "one row": np.arange(n),
        "same groups": G[:, 0] + 100,
    }
    for words, column in cases.items():
        with pytest.warns(UserWarning, match=words):
            # the scales of one of them are averaged over
            est = HierarchicalEPLogistic([2, 3], **(LIGHT["ep"] if words == "one row" else MODE))
            est.fit(np.column_stack([X, G[:, 0], column]), y)
        assert np.all(np.isfinite(est.coef_)) and np.all(np.isfinite(est.tau_interval_))
        assert est.converged_ and any(words in r for r in est.diagnose().remarks)


@pytest.mark.parametrize("engine", ["ep", "messages"])
def test_rows_without_label_are_levels_without_name(engine):
    X, y, G = people_and_items()
    labels = G.astype(float)
    labels[[0, 5, 9], [0, 1, 0]] = np.nan
    model = HierarchicalEPLogistic([2, 3], engine=engine, **LIGHT[engine])
    est = quiet(clone(model), np.column_stack([X, labels]), y)
    assert any("factor 2 has no label in 2 of" in r for r in est.diagnose().remarks)
    own = labels.copy()
    own[[0, 5, 9], [0, 1, 0]] = 900 + np.arange(3)
    named = model.fit(np.column_stack([X, own]), y)
    assert apart(est, named) < 1e-6
    assert len(est.group_labels_[0]) == 25 - (0 not in labels[:, 0]) - (9 not in labels[:, 0])
    assert len(est.group_effects_[0]) == len(est.group_labels_[0])
    new = est.latent_mean_and_variance([[0.0, 0.0, np.nan, 3.0]])
    np.testing.assert_allclose(new, est.latent_mean_and_variance([[0.0, 0.0, 12345.0, 3.0]]))


def test_tau_prior_of_each_factor():
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    est = HierarchicalEPLogistic([2, 3], tau_prior={3: (-3.0, 0.01)}, refine=False).fit(Z, y)
    assert est.tau_[1] == pytest.approx(np.exp(-3.0), rel=0.02)
    with pytest.raises(ValueError, match="tau_prior"):
        HierarchicalEPLogistic([2, 3], tau_prior={7: (0.0, 1.0)}).fit(Z, y)
    with pytest.raises(ValueError, match="tau_prior"):
        HierarchicalEPLogistic(2, tau_prior={2: (0.0, 1.0)}).fit(Z, y)


@pytest.mark.parametrize(
    ("words", "params"),
    [
        ("group_column", dict(group_column=[])),
        ("group_column", dict(group_column=[2, 2])),
        ("group_column", dict(group_column=[2, -2])),
        ("group_column", dict(group_column=[2, 9])),
        ("group_column", dict(group_column=[2, (3, 3)])),
        ("group_column", dict(group_column=[(2, 3), (3, 2)])),
        ("tuple", dict(group_column=[[2, 3]])),
        ("group_column.*no column names", dict(group_column=["a", 3])),
        ("random_slopes.*dict", dict(random_slopes=[0])),
        ("random_slopes", dict(random_slopes={4: [0]})),
        ("random_slopes", dict(random_slopes={2: [3]})),
        ("random_slopes", dict(random_slopes={2: [0, 0]})),
        ("random_slopes may be a dict", dict(group_column=2, random_slopes={2: [0]})),
        ("messages.*random_slopes", dict(engine="messages", random_slopes={2: [0]})),
        ("needs groups", dict(group_column=None, engine="messages")),
        ("engine", dict(engine="laplace")),
        ("engine", dict(engine="nothing")),
        ("n_partitions.*messages", dict(n_partitions=2, engine="ep")),
        ("n_partitions.*random_slopes", dict(n_partitions=2, random_slopes={2: [0]})),
        ("schedule", dict(schedule="serial")),
        ("measured", dict(group_column=[0, 3])),
    ],
)
def test_bad_parameters_are_named_before_any_work(words, params):
    X, y, G = people_and_items()
    est = HierarchicalEPLogistic(**{"group_column": [2, 3], **params})
    with pytest.raises(ValueError, match=words):
        quiet(est, np.column_stack([X, G]), y)
    assert not hasattr(est, "coef_") and not hasattr(est, "n_features_in_")


def test_bad_data_are_named_before_any_work():
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    est = HierarchicalEPLogistic([2, 3])
    for words, args, kw in (
        ("groups", (X, y), dict(groups=G)),
        ("inside the partitions", ([(Z, y)],), dict(groups=G)),
        ("2D", ([(Z, y), (y, y)],), {}),
        ("features", ([(Z, y), (Z[:, :3], y)],), {}),
        ("measured", ([(Z[:, [2, 3, 0, 1]], y)],), {}),
        ("two classes", ([(Z[y == 1], y[y == 1])],), {}),
        ("empty", ([],), {}),
    ):
        with pytest.raises(ValueError, match=words):
            est.fit(*args, **kw)
    parts = [(Z, y)]
    with pytest.raises(ValueError, match="no column names"):
        HierarchicalEPLogistic(["a", 3]).fit(parts)
    with pytest.raises(ValueError, match="takes engine='messages'"):
        HierarchicalEPLogistic([2, 3], engine="ep").fit(parts)
    with pytest.raises(ValueError, match="groups has 10"):
        HierarchicalEPLogistic().fit(X, y, groups=G[:10])
    rng = np.random.default_rng(0)
    many = np.column_stack([X.repeat(20, 0), rng.integers(1000, size=6000)])
    many = np.column_stack([many, rng.integers(700, size=6000)])
    auto = quiet(HierarchicalEPLogistic([2, 3], max_iter=1), many, y.repeat(20))
    assert auto.engine_ == "messages"
    wide = [np.arange(9000), np.arange(9000) % 4500]
    long = np.column_stack([np.random.default_rng(0).normal(size=9000), *wide])
    with pytest.raises(ValueError, match="engine='messages'"):
        HierarchicalEPLogistic([1, 2], engine="ep").fit(long, np.arange(9000) % 2)
    fit = fitted("ep")
    with pytest.raises(ValueError, match="features"):
        fit.predict_proba(Z[:, :3])
    with pytest.raises(ValueError, match="groups= was given"):
        fit.predict_proba(Z, groups=G)
    beside = HierarchicalEPLogistic(**MODE, tol=1.0).fit(X, y, groups=G)
    with pytest.raises(ValueError, match="groups has 3 columns"):
        beside.predict_proba(X, groups=np.column_stack([G, G[:, 0]]))


@pytest.mark.slow
def test_levels_of_one_class_and_a_large_scale_converge():
    """Undamped sweeps run away here: the search ended at scale .8 where the posterior is at 20.

    Gibbs sampling (3000 sweeps) has 5, 50 and 95 % quantiles of 12.7, 22.4 and 37.2 for the second
    scale.
    """
    rng = np.random.default_rng(30)
    X = np.column_stack([rng.normal(size=(600, 2)), *(rng.integers(k, size=600) for k in (30, 12))])
    tau, beta = np.exp(1.5 * rng.normal(size=2)), 2.5 * rng.normal(size=3)
    effects = [t * rng.normal(size=k) for t, k in zip(tau, (30, 12), strict=True)]
    z = X[:, :2] @ beta[:2] + beta[2]
    z = z + sum(e[X[:, 2 + f].astype(int)] for f, e in enumerate(effects))
    y = rng.uniform(size=600) < expit(z)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        est = HierarchicalEPLogistic([2, 3]).fit(X, y)
    scales = est.summary(level=0.9).scales
    assert scales["lower"][1] == pytest.approx(12.7, rel=0.1)
    assert 22 < est.tau_[1] < 45 and est.log_evidence_ > -20


@pytest.mark.parametrize(
    ("n_groups", "n_columns", "scale", "seed"), [(12, 1, 15.0, 0), (12, 3, 20.0, 2)]
)
def test_sites_settle_at_all_scales_where_they_oscillate(n_groups, n_columns, scale, seed):
    # whole steps of the sites end in a cycle of two at a node in the scales
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(n_groups), 9)
    X = 3.0 * rng.normal(size=(len(group), n_columns))
    log_odds = 2.0 * X.sum(axis=1) + scale * rng.normal(size=n_groups)[group]
    y = rng.random(len(group)) < 1.0 / (1.0 + np.exp(-log_odds))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        clf = HierarchicalEPLogistic(0).fit(np.column_stack([group, X]), y)
    assert clf.converged_


# ---------------------------------------------------------------------------- many scales


def pupils(seed, regions, schools, pupils, answers, taus, items=0, slope=0.0):
    """Pupils in schools in regions, hours of each; crossed with items, a slope by school."""
    rng = np.random.default_rng(seed)
    n_pupils = regions * schools * pupils
    p = np.repeat(np.arange(n_pupils), answers)
    columns = [p // (schools * pupils), p // pupils, p] if regions > 1 else [p // pupils, p]
    if items:
        chosen = [rng.choice(items, answers, replace=False) for _ in range(n_pupils)]
        columns.append(np.concatenate(chosen))
    h = rng.normal(size=n_pupils)[p]
    z = 0.3 + 0.5 * h
    added = sum((t * rng.normal(size=c.max() + 1))[c] for t, c in zip(taus, columns, strict=True))
    z = z + added
    if slope:
        z = z + (slope * rng.normal(size=regions * schools))[columns[1]] * h
    y = (rng.random(len(z)) < expit(z)).astype(int)
    return np.column_stack([h, np.ones(len(h)), *columns]), y


def held_against(est, stored, order=None, tau=0.25, end=0.4, width=1.25):
    """Compare the scales of a fit with quantiles (5, 50 and 95 %) of long Gibbs runs."""
    low, high = est.tau_interval_.T
    found = np.log(np.column_stack([low, est.tau_, high]))
    found = found if order is None else found[order]
    d = est.coef_.size
    q, sd, error = (np.array(stored[name][d:]) for name in ("q", "sd", "mcse"))
    beyond = np.maximum(np.abs(found - q) - 2 * error[:, None], 0) / sd[:, None]
    assert beyond[:, 1].max() < tau and beyond[:, [0, 2]].max() < end
    ratio = (found[:, 2] - found[:, 0]) / (q[:, 2] - q[:, 0])
    assert np.maximum(ratio, 1 / ratio).max() < width
    gap = np.abs(est.coef_[0] - stored["mean"][:d]) / stored["sd"][:d]
    assert gap.max() < 0.1


@pytest.mark.slow
def test_nested_factors_against_gibbs_sampling():
    Z, y = pupils(2, 1, 520, 5, 5, (0.7, 0.6))
    stored = oracle("groups")["two"]
    exact = HierarchicalEPLogistic([2, 3], fit_intercept=False).fit(Z, y)
    assert exact.engine_ == "ep" and exact.theta_rule_ == "star"  # 520 dense effects, nested
    held_against(exact, stored)
    messages = HierarchicalEPLogistic([2, 3], engine="messages", fit_intercept=False).fit(Z, y)
    held_against(messages, stored, tau=0.5, end=0.6)
    assert messages.log_evidence_ == pytest.approx(exact.log_evidence_, abs=1.0)


def test_four_factors_and_a_slope_against_gibbs_sampling():
    Z, y = pupils(0, 8, 6, 12, 10, (0.4, 0.7, 0.6, 1.0), 25, 0.5)
    est = HierarchicalEPLogistic([2, 3, 4, 5], random_slopes={3: [0]}, fit_intercept=False)
    est.fit(Z, y)
    assert est.converged_ and est.theta_rule_ == "star" and est.hyper_nodes_.shape[1] == 6
    held_against(est, oracle("groups")["scales"], [0, 1, 3, 4, 2])
    draws = est.sample_posterior(4000, random_state=0).tau
    for k, tau in enumerate(est.tau_):  # draws and quantiles are of one distribution
        assert np.mean(draws[:, k] < tau) == pytest.approx(0.5, abs=0.03)


def test_star_and_lattice_agree_and_checks_mend_a_star():
    X, y, G = people_and_items()
    Z = np.column_stack([X, G])
    lattice, star = fitted("ep"), HierarchicalEPLogistic([2, 3], refine=False).fit(Z, y)
    assert (lattice.theta_rule_, star.theta_rule_) == ("grid", "star")
    assert apart(lattice, star) < 0.05
    assert star.log_evidence_ == pytest.approx(lattice.log_evidence_, abs=0.1)
    np.testing.assert_allclose(np.log(star.tau_), np.log(lattice.tau_), atol=0.1)


def test_factors_nested_the_wrong_way_round_are_told_how():
    Z, y = pupils(1, 1, 6, 4, 5, (0.7, 0.6))
    with pytest.warns(UserWarning, match="from the outside in.*give .*2, "):
        HierarchicalEPLogistic([3, (3, 2)], fit_intercept=False, hyperparameters="mode").fit(Z, y)


def test_partitions_of_data_frames_keep_their_names():
    Z, y = pupils(1, 1, 12, 6, 8, (0.7, 0.6))
    table = pd.DataFrame(Z[:, [0, 2, 3]], columns=["hours", "school", "pupil"])
    table["school"] = [f"s{k:.0f}" for k in table["school"]]
    half = Z[:, 2] < 6
    parts = [(table[own].drop(columns="pupil"), y[own]) for own in (half, ~half)]
    est = HierarchicalEPLogistic("school", **MODE).fit(parts)
    whole = HierarchicalEPLogistic("school", **MODE).fit(table.drop(columns="pupil"), y)
    assert est.feature_names_in_.tolist() == ["hours", "school"]
    assert est.group_labels_.tolist() == whole.group_labels_.tolist()
    np.testing.assert_allclose(est.tau_, whole.tau_, rtol=0.02)
    both = HierarchicalEPLogistic(["school", "pupil"]).fit(
        [(table[half], y[half]), (table[~half], y[~half])]
    )
    assert both.engine_ == "messages" and both.predict_proba(table).shape == (len(y), 2)
    with pytest.raises(ValueError, match="names or the order"):
        HierarchicalEPLogistic("school").fit(
            [parts[0], (parts[1][0][["school", "hours"]], parts[1][1])]
        )


@pytest.mark.slow
def test_several_slopes_in_partitions_are_the_whole():
    rng = np.random.default_rng(7)
    g, X = rng.integers(0, 30, 600), rng.normal(size=(600, 2))
    a = 0.8 * rng.normal(size=(30, 3))
    z = X @ [0.5, -0.5] + a[g, 0] + np.sum(a[g, 1:] * X, axis=1)
    y = (rng.random(600) < expit(z)).astype(int)
    Z = np.column_stack([X, g])
    whole, parts = (
        HierarchicalEPLogistic(2, random_slopes=[0, 1], n_partitions=k).fit(Z, y)
        for k in ("auto", 4)
    )
    assert parts.converged_ and parts.log_evidence_ == pytest.approx(whole.log_evidence_, abs=0.3)
    np.testing.assert_allclose(parts.tau_, whole.tau_, rtol=0.05)
    assert parts.site_precision_.shape == (4, 9, 9)
