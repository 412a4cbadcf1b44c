"""Bayesian stacking: the posterior of its weights, and a classifier as others are."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from scipy import optimize, special
from sklearn.base import clone, is_classifier
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
)
from sklearn_ep.active_learning import query


class Told(LogisticRegression):
    """Classifier whose leave-one-out probabilities are told to it beforehand."""

    def __init__(self, told=()):
        super().__init__()
        self.told = told

    def fit(self, X, y, sample_weight=None):
        super().fit(X, y, sample_weight)
        self.loo_proba_ = np.resize(np.array(self.told), len(y))
        return self


def stacked(proba, **fit):
    """Return a stack of parts with these leave-one-out probabilities (K, n)."""
    n = len(proba[0])
    X, y = np.arange(n, dtype=float)[:, None], np.arange(n) % 2
    parts = [(f"p{k}", Told(p)) for k, p in enumerate(proba)]
    return BayesianStackingClassifier(parts).fit(X, y, **fit)


def test_rows_of_weight_zero_train_no_fold():
    """A class has one row of weight, so that no fold without that row knows it."""
    rng = np.random.default_rng(0)
    X, weight = rng.normal(size=(60, 2)), np.repeat([1.0, 0.0, 1.0], [1, 3, 56])
    y = np.where(np.arange(60) < 4, 2, X[:, 0] > 0)
    parts = [("linear", ConvexVariationalLogistic()), ("plain", LogisticRegression())]
    splits = [(np.arange(60) % 3 != k, np.flatnonzero(np.arange(60) % 3 == k)) for k in range(3)]
    loo = BayesianStackingClassifier(parts, cv=splits).fit(X, y, weight).loo_proba_
    assert_array_equal(np.isnan(loo), np.arange(60) < 4)


def exact_weights(proba, count, n_angles):
    """Return mean and sd of two or three weights, whose roots are uniform on the sphere."""
    angle = (np.arange(n_angles) + 0.5) / n_angles * np.pi / 2
    first, area = np.sin(angle) ** 2, np.ones(n_angles)
    w = np.array([first, 1.0 - first])
    if len(proba) == 3:
        w = np.array([(1.0 - w[1][:, None]) * w[0], (1.0 - w[1][:, None]) * w[1]])
        last = np.broadcast_to(1.0 - first[:, None], (n_angles, n_angles))
        w = np.array([w[0].ravel(), w[1].ravel(), last.ravel()])
        area = np.repeat(np.sin(angle), n_angles)
    log_mass = count @ np.log(np.transpose(proba) @ w) + np.log(area)
    mass = np.exp(log_mass - log_mass.max())
    mean = w @ mass / mass.sum()
    return mean, np.sqrt((w - mean[:, None]) ** 2 @ mass / mass.sum())


@pytest.mark.parametrize("n_parts", [2, 3])
@pytest.mark.parametrize("n", [4, 60, 600])
@pytest.mark.parametrize("better", [0.0, 1.0])
def test_weights_are_the_posterior_mean_by_quadrature(n_parts, n, better):
    rng = np.random.default_rng(n)
    logit = rng.normal(1.0, 1.0, (n_parts, n))
    logit[0] += better
    proba, count = 1.0 / (1.0 + np.exp(-logit)), rng.integers(1, 4, n).astype(float)
    mean, sd = exact_weights(proba, count, 1000 if n_parts == 2 else 80)
    found = stacked(proba, sample_weight=count)
    assert_allclose(found.weights_, mean, atol=0.004)
    assert_allclose(found.weights_std_, sd, atol=0.004)
    assert_allclose(found.loo_proba_, mean @ proba, atol=0.004)
    assert_allclose(found.log_score_, np.average(np.log(found.loo_proba_), weights=count))


@pytest.mark.parametrize("n_moves", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_weights_move_no_more_than_the_probabilities(n_moves):
    rng = np.random.default_rng(3)
    proba = 1.0 / (1.0 + np.exp(-rng.normal(1.0, 1.0, (5, 120))))
    weights, size = stacked(proba).weights_, 1e-4
    for _ in range(n_moves):
        moved = stacked(proba * (1.0 + size * rng.uniform(-1.0, 1.0, proba.shape))).weights_
        assert np.abs(moved - weights).max() < 10.0 * size


@pytest.mark.parametrize(
    ("n_classes", "d"), [(2, 40), pytest.param(4, 40, marks=pytest.mark.slow), (2, 150)]
)
def test_parts_lose_nats_for_what_all_labels_have_chosen(n_classes, d):
    """The weights by many draws from their prior: nats 5 % lower move one of them by .025."""
    sizes = dict(n_informative=4, n_classes=n_classes, random_state=2)
    X, y = make_classification(100, d, **sizes)
    found = BayesianStackingClassifier(random_state=0).fit(X, y)
    parts = found.named_estimators_
    lasts = [p[-1] if isinstance(p, Pipeline) else p for p in parts.values()]
    log_p = np.log([own.loo_proba_ for own in lasts])
    lengths = max(1, d / 100) * parts["gaussian_process"].effective_lengths_
    nats = {"gaussian_process": lengths, "additive": 0.1 * np.sum(lasts[2].effective_dof_)}
    log_p -= np.array([nats.get(name, 0.0) for name in parts])[:, None] / 100
    draws = np.random.default_rng(1).dirichlet(np.full(len(parts), 0.5), 50_000)
    mass = special.softmax(np.log(draws @ np.exp(log_p)).sum(axis=1))
    assert_allclose(found.weights_, mass @ draws, atol=0.01)


def test_one_part_has_all_the_weight_and_equal_parts_share_it():
    p = np.linspace(0.1, 0.9, 12)
    assert_array_equal(stacked([p]).weights_, [1.0])
    four = stacked([p] * 4)
    assert_allclose(four.weights_, 0.25, atol=0.01)


def test_a_part_that_is_certain_and_wrong_gets_no_weight():
    p = np.full(40, 0.7)
    sure = np.where(np.arange(40) == 3, 0.0, 0.9)
    found = stacked([p, sure])
    assert np.all(np.isfinite(found.loo_proba_)) and np.isfinite(found.log_score_)
    assert found.part_log_scores_[1] == -np.inf
    both = stacked([sure, sure])  # the row on which all are wrong says nothing of weights
    assert_allclose(both.weights_, 0.5, atol=0.01)


def test_rows_that_one_part_cannot_leave_out_weigh_none():
    rng = np.random.default_rng(0)
    told, unknown = rng.uniform(0.1, 0.9, (2, 40)), [3, 8, 21]
    told[1, unknown] = np.nan
    found = stacked(told)
    others = stacked(told, sample_weight=np.isfinite(told[1]).astype(float))
    assert_array_equal(found.weights_, others.weights_)
    assert found.log_score_ == others.log_score_
    assert_array_equal(np.flatnonzero(np.isnan(found.loo_proba_)), unknown)
    with pytest.raises(ValueError, match="no row has a leave-one-out probability of every part"):
        stacked([told[0], np.full(40, np.nan)])


@pytest.fixture(scope="module")
def data():
    return make_classification(150, 6, n_informative=4, random_state=3)


@pytest.fixture(scope="module")
def default(data):
    return BayesianStackingClassifier(random_state=0).fit(*data)


def test_the_mixture_of_the_parts(data, default):
    X, _ = data
    parts = list(default.named_estimators_.values())
    names = ["gaussian_process", "linear", "additive", "boosting", "forest"]
    assert list(default.named_estimators_) == names
    proba = sum(w * p.predict_proba(X) for w, p in zip(default.weights_, parts, strict=True))
    assert_allclose(default.predict_proba(X), proba, rtol=1e-12)
    assert_allclose(np.exp(default.predict_log_proba(X)), proba, rtol=1e-9)
    assert_array_equal(default.predict(X), default.classes_[proba.argmax(axis=1)])
    assert_allclose(default.weights_.sum(), 1.0)


@pytest.mark.slow
def test_leave_one_out_weights_are_near_those_of_folds(data, default):
    folds = clone(default).set_params(cv=10).fit(*data)
    assert_allclose(folds.weights_, default.weights_, atol=0.2)
    assert abs(folds.log_score_ - default.log_score_) < 0.03


def test_all_parts_are_weighed_by_the_same_folds(data):
    X, y = data
    logistic = make_pipeline(StandardScaler(), LogisticRegression())
    pair = [("one", logistic), ("two", logistic)]
    drawn = KFold(5, shuffle=True)  # other folds at every call
    for cv in (drawn, drawn.split(X)):
        scores = BayesianStackingClassifier(pair, cv=cv).fit(X, y).part_log_scores_
        assert scores[0] == scores[1]
    weight = np.r_[0.0, np.ones(len(y) - 1)]
    found = BayesianStackingClassifier(pair, cv=5).fit(X, y, sample_weight=weight).loo_proba_
    assert np.isnan(found[0]) and np.isfinite(found[1:]).all()


@pytest.mark.filterwarnings("ignore:The least populated class")
def test_a_class_that_is_in_one_fold_alone_weighs_no_part():
    """Its rows had probability zero, and the scores of all parts were minus infinity."""
    X, y = make_classification(60, random_state=0)
    y[7] = 2
    parts = [("few", LogisticRegression()), ("many", LogisticRegression(C=100.0))]
    stack = BayesianStackingClassifier(parts, cv=3).fit(X, y)
    assert_array_equal(np.flatnonzero(np.isnan(stack.loo_proba_)), [7])
    assert np.all(np.isfinite(stack.part_log_scores_)) and stack.weights_[0] > 0.6
    assert_allclose(stack.log_score_, np.nanmean(np.log(stack.loo_proba_)))
    assert stack.predict_proba(X).shape == (60, 3)


def test_several_classes_one_against_the_rest():
    X, y = load_iris(return_X_y=True)
    linear = ConvexVariationalLogistic(multi_class="one_vs_rest", random_state=0)
    found = BayesianStackingClassifier([("linear", linear)]).fit(X, y)
    each = found.named_estimators_["linear"].loo_proba_
    own = np.arange(3)[:, None] == y
    proba = np.where(own, each, 1.0 - each)
    assert_allclose(found.loo_proba_, (proba / proba.sum(axis=0))[y, np.arange(len(y))])


def test_weights_are_repeated_rows(data):
    X, y = data
    count = np.random.default_rng(0).integers(0, 3, len(y))
    parts = [("linear", ConvexVariationalLogistic()), ("flat", ConvexVariationalLogistic(0.01))]
    weighed = BayesianStackingClassifier(parts).fit(X, y, sample_weight=count)
    again = BayesianStackingClassifier(parts).fit(np.repeat(X, count, 0), np.repeat(y, count))
    assert_allclose(weighed.predict_proba(X), again.predict_proba(X), rtol=1e-5)
    assert_array_equal(np.isnan(weighed.loo_proba_), count == 0)
    assert_allclose(weighed.log_score_, again.log_score_, rtol=1e-6)


def test_the_same_with_workers_and_after_pickling(data, default):
    X, _ = data
    parallel = clone(default).set_params(n_jobs=2).fit(*data)
    assert_array_equal(parallel.predict_proba(X), default.predict_proba(X))
    for fitted in (default, parallel):
        assert_array_equal(pickle.loads(pickle.dumps(fitted)).weights_, default.weights_)


def test_sparse_rows_are_for_the_linear_part(data):
    X, y = data
    found = BayesianStackingClassifier(random_state=0).fit(sp.csr_array(X), y)
    assert list(found.named_estimators_) == ["linear"]
    assert_array_equal(found.weights_, [1.0])


def test_an_additive_part_bends_columns(default):
    X = np.random.default_rng(0).normal(size=(300, 3))
    y = (np.abs(X[:, 0]) + np.abs(X[:, 1]) > 1.5).astype(int)
    additive, linear = (
        clone(default.named_estimators_[name]).fit(X[:150], y[:150])
        for name in ("additive", "linear")
    )
    assert additive.score(X[150:], y[150:]) > 0.9 > linear.score(X, y)
    wide = np.random.default_rng(1).normal(size=(20, 501))
    found = BayesianStackingClassifier(random_state=0).fit(wide, np.arange(20) % 2)
    assert list(found.named_estimators_) == ["gaussian_process", "linear", "forest"]


def test_fewer_rows_than_columns_have_a_process_with_a_linear_term(default):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(260, 6))
    X = hidden @ rng.normal(size=(6, 600)) + rng.normal(size=(260, 600))
    y = (hidden[:, 0] - hidden[:, 1] + 0.3 * rng.normal(size=260) > 0).astype(int)
    count = np.append(2, np.ones(59, int))

    def process_of(X, y, count=None):
        stack = BayesianStackingClassifier(random_state=0).fit(X, y, count)
        return stack.named_estimators_["gaussian_process"]

    def log_loss(model):
        return -np.mean(np.log(model.predict_proba(X[60:])[np.arange(200), y[60:]]))

    found = process_of(X[:60], y[:60], count)
    alone = EPGaussianProcessClassifier(random_state=0).fit(X[:60], y[:60], count)
    assert log_loss(found) < log_loss(alone) - 0.02
    # neither place nor units of the columns matter, and weights are repeated rows
    expected = found.predict_proba(X[60:])
    moved = process_of(1e-3 * X[:60] + 5.0, y[:60], count)
    assert_allclose(moved.predict_proba(1e-3 * X[60:] + 5.0), expected, atol=1e-4)
    repeated = process_of(np.repeat(X[:60], count, axis=0), np.repeat(y[:60], count))
    assert_allclose(repeated.predict_proba(X[60:]), expected, atol=2e-3)
    again = pickle.loads(pickle.dumps(found))
    assert_allclose(again.predict_proba(X[60:]), expected, rtol=1e-12)
    kernel = default.named_estimators_["gaussian_process"].kernel_
    assert "DotProduct" in str(found[-1].kernel_) and "DotProduct" not in str(kernel)


def test_splines_are_those_of_scikit_learn(default):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=50), rng.integers(0, 2, 50), rng.integers(0, 4, 50)])
    new = np.vstack([X, 2.0 * X])
    bent = SplineTransformer(knots="quantile").fit(X[:, [0, 2]], sample_weight=np.ones(50))
    # a column of two values comes first as it is
    expected = np.column_stack([new[:, 1], bent.transform(new[:, [0, 2]])])

    def splines_of(X, new):
        own = clone(default.named_estimators_["additive"][0])
        return own.fit(X, None, np.ones(len(X))).transform(new)

    assert_allclose(splines_of(X, new), expected, atol=1e-12)
    found = splines_of(np.insert(X, 1, 3.0, axis=1), np.insert(new, 1, 3.0, axis=1))
    assert_allclose(found[:, 1:], expected, atol=1e-12)
    assert splines_of(np.ones((10, 2)), np.ones((9, 2))).shape == (9, 2)


def test_weights_are_repeated_rows_in_the_default_parts(data):
    X, y = (a[:50] for a in data)
    X = np.column_stack([X, X[:, 0] > 0])
    count = np.random.default_rng(0).integers(0, 3, len(y))
    weighed = BayesianStackingClassifier(random_state=0).fit(X, y, count)
    repeated = BayesianStackingClassifier(random_state=0)
    repeated.fit(np.repeat(X, count, axis=0), np.repeat(y, count))
    assert_allclose(weighed.predict_proba(X), repeated.predict_proba(X), atol=2e-3)


def test_copies_of_rows_are_counted_where_columns_are_many(monkeypatch):
    """Twenty rows are fewer than many columns, their forty copies more."""
    monkeypatch.setattr("sklearn_ep.stacking._parts._MOST_COLUMNS", 30)
    rng = np.random.default_rng(0)
    X, count = rng.standard_normal((20, 31)), np.full(20, 2)
    y = (X[:, :20].sum(axis=1) > 0).astype(int)
    weighed = BayesianStackingClassifier(random_state=0).fit(X, y, count)
    repeated = BayesianStackingClassifier(random_state=0)
    repeated.fit(np.repeat(X, count, axis=0), np.repeat(y, count))
    kinds = [type(s.named_estimators_["gaussian_process"]) for s in (weighed, repeated)]
    assert kinds[0] is kinds[1]
    assert_allclose(weighed.predict_proba(X), repeated.predict_proba(X), atol=2e-3)


def test_names_reach_the_parts(data):
    linear = ConvexVariationalLogistic(1.0)
    parts = [("scaled", make_pipeline(StandardScaler(), linear)), ("linear", clone(linear))]
    stack = BayesianStackingClassifier(parts)
    grid = {"linear__prior_variance": [0.01, 1.0]}
    found = GridSearchCV(stack, grid, scoring="neg_log_loss", cv=2).fit(*data)
    assert found.best_params_ in ({"linear__prior_variance": v} for v in (0.01, 1.0))
    stack.set_params(linear=EPGaussianProcessClassifier())
    assert isinstance(stack.get_params()["linear"], EPGaussianProcessClassifier)
    weighed = found.best_estimator_
    weighed.fit(*data, sample_weight=np.ones(len(data[1])))
    assert list(weighed.named_estimators_) == ["scaled", "linear"]


def test_queries_by_its_probabilities(data, default):
    X, _ = data
    chosen = query(default, X, n_instances=3, strategy="margin")
    proba = np.sort(default.predict_proba(X), axis=1)
    assert set(chosen) == set(np.argsort(proba[:, -1] - proba[:, -2], kind="stable")[:3])


def test_the_summary_names_parts_by_weight(default):
    table = default.summary()
    assert list(table.columns["weight"]) == sorted(default.weights_, reverse=True)
    assert "gaussian_process" in str(table) and "log score" in str(table)
    frame = pytest.importorskip("pandas") and table.to_frame()
    assert frame.loc["linear", "weight"] == default.weights_[1]


def test_verbose_prints_the_summary(data, capsys):
    parts = [("linear", ConvexVariationalLogistic())]
    model = BayesianStackingClassifier(parts, verbose=1).fit(*data)
    assert capsys.readouterr().out == f"{model.summary()}\n"


def test_wrong_parts_are_refused_by_name(data):
    logistic = LogisticRegression()
    with pytest.raises(ValueError, match="'plain' has no loo_proba_.*cv=5"):
        BayesianStackingClassifier([("plain", logistic)]).fit(*data)
    found = BayesianStackingClassifier([("plain", logistic)], cv=5).fit(*data)
    assert_array_equal(found.weights_, [1.0])
    with pytest.raises(ValueError, match="empty"):
        BayesianStackingClassifier([]).fit(*data)
    with pytest.raises(ValueError, match="'scaler' is no classifier"):
        BayesianStackingClassifier([("scaler", StandardScaler())]).fit(*data)
    hard = [("hard", RidgeClassifier())]
    with pytest.raises(ValueError, match="'hard' has no predict_proba.*CalibratedClassifierCV"):
        BayesianStackingClassifier(hard, cv=5).fit(*data)
    for wrong in ("drop", None, ConvexVariationalLogistic):  # searches ask for tags before a fit
        named = BayesianStackingClassifier([("odd", wrong)])
        assert is_classifier(named)
        with pytest.raises(ValueError, match="'odd' is no classifier"):
            named.fit(*data)
    with pytest.raises(ValueError, match=r"other entries.*\(name, classifier\)"):
        BayesianStackingClassifier([ConvexVariationalLogistic()]).fit(*data)
    twice = [("same", ConvexVariationalLogistic()), ("same", ConvexVariationalLogistic())]
    with pytest.raises(ValueError, match="unique"):
        BayesianStackingClassifier(twice).fit(*data)


def test_a_failed_fit_leaves_the_stack_as_it_was(data, default):
    X, y = data
    before = default.weights_
    with pytest.raises(ValueError, match="NaN"):
        default.fit(np.full_like(X, np.nan), y)
    assert default.weights_ is before


@pytest.mark.slow
def test_rows_far_from_all_others_are_not_a_coin_toss():
    rng = np.random.default_rng(0)
    scattered, narrow = 4.0 * rng.normal(size=(60, 4)), 0.5 * rng.normal(size=(40, 4))
    X, y = np.vstack([scattered, narrow]), np.repeat([0, 1], [60, 40])
    process = (
        BayesianStackingClassifier(random_state=0).fit(X, y).named_estimators_["gaussian_process"]
    )
    far = process.predict_proba(np.full((1, 4), 1e3))[0, 0]
    alone = EPGaussianProcessClassifier(random_state=0).fit(X, y)
    assert_allclose(alone.predict_proba(np.full((1, 4), 1e3))[0, 0], 0.5, atol=1e-6)
    assert far > 0.75


def rings(n_rows):
    """Return rows of a wide and a narrow class in many columns, which distances tell apart."""
    rng = np.random.default_rng(4)
    y = np.arange(n_rows) % 2
    return rng.normal(size=(n_rows, 20)) * np.where(y, 1.0, 2.0)[:, None] + 0.45 * y[:, None], y


@pytest.fixture(scope="module")
def stack_of_rings():
    return BayesianStackingClassifier(random_state=0).fit(*rings(300))


@pytest.mark.parametrize(
    ("name", "slope", "spread"),
    [
        ("gaussian_process", "odds_slope_", 0.35),
        ("forest", "slope_", 1.0),
        ("boosting", "slope_", 1.0),
    ],
)
def test_slopes_predict_rows_that_are_left_out_best(stack_of_rings, name, slope, spread):
    """The posterior mode, by another search from the left-out probabilities alone."""
    part = stack_of_rings.named_estimators_[name]
    found = getattr(part, slope)
    odds = special.logit(part.loo_proba_) / found  # of the row's own label, before the slope

    def loss(log_slope):
        return 0.5 * (log_slope / spread) ** 2 - special.log_expit(np.exp(log_slope) * odds).sum()

    best = optimize.minimize_scalar(loss, bounds=(-2.0, 2.0), method="bounded")
    assert abs(np.log(found)) > 0.05
    assert_allclose(np.log(found), best.x, atol=1e-3)


def test_a_process_that_is_too_unsure_of_two_classes_has_a_slope(default):
    X, y = rings(900)
    count = np.append([0, 2], np.ones(298, int))
    own, new = clone(default.named_estimators_["gaussian_process"]), X[300:]
    own.fit(X[:300], y[:300], count)
    assert own.odds_slope_ > 1.2
    log_p = own.predict_log_proba(new)
    assert_allclose(np.exp(log_p), own.predict_proba(new), rtol=1e-9)
    latent = own.latent_mean_and_variance(new)[0]
    assert_array_equal(np.sign(log_p[:, 1] - log_p[:, 0]), np.sign(latent))
    slope, own.odds_slope_ = own.odds_slope_, 1.0
    without, own.odds_slope_ = own.predict_log_proba(new), slope
    assert_allclose(np.diff(log_p), slope * np.diff(without), rtol=1e-6, atol=1e-9)
    rows = np.arange(600), y[300:]
    assert -log_p[rows].mean() < -without[rows].mean() - 0.01
    plain = EPGaussianProcessClassifier.predict_proba_interval(own, new)
    expected = special.expit(own.odds_slope_ * special.logit(np.clip(plain, 1e-9, 1.0 - 1e-9)))
    assert_allclose(own.predict_proba_interval(new), expected, atol=1e-8)
    again = clone(own).fit(np.repeat(X[:300], count, axis=0), np.repeat(y[:300], count))
    assert_allclose(own.odds_slope_, again.odds_slope_, rtol=1e-3)
    assert np.isnan(own.loo_proba_[0])
    assert_allclose(own.loo_proba_[1:], again.loo_proba_[1:], atol=2e-3)


def test_several_classes_inducing_points_and_rows_seen_again_have_none(default):
    process = clone(default.named_estimators_["gaussian_process"])
    process.set_params(hyperparameters="mode")
    X, y = rings(30)
    assert process.fit(X, y).odds_slope_ > 1.1
    assert_allclose(process.fit(X, y, np.full(30, 2.0)).odds_slope_, 1.0, atol=1e-4)
    assert_allclose(process.fit(np.repeat(X, 2, 0), np.repeat(y, 2)).odds_slope_, 1.0, atol=1e-4)
    for more, labels in (
        ({}, np.arange(30) % 3),
        (dict(method="sparse", n_inducing=12), y),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            other = clone(process).set_params(max_iter=2, **more).fit(X, labels)
        assert other.odds_slope_ == 1.0
        plain = EPGaussianProcessClassifier.predict_proba_interval(other, X)
        assert_array_equal(other.predict_proba_interval(X), plain)


def test_default_parts_leave_errors_and_warnings_of_rows_to_the_stack():
    X, y = make_classification(60, 4, random_state=0)
    model, bad = BayesianStackingClassifier(random_state=0), X.copy()
    bad[3, 2] = np.nan
    with pytest.raises(ValueError, match="BayesianStackingClassifier does not accept missing"):
        model.fit(bad, y)
    with pytest.warns(UserWarning, match="farthest") as told:
        model.fit(X * [1.0, 1.0, 1e5, 1.0], y)
    assert [str(w.message).split(":")[0] for w in told] == ["BayesianStackingClassifier"]
    with pytest.raises(ValueError, match="BayesianStackingClassifier does not accept missing"):
        model.predict_proba(bad)
    with pytest.raises(ValueError, match="BayesianStackingClassifier is expecting 4"):
        model.predict_log_proba(X[:, :3])


def test_rows_and_labels_of_different_numbers_are_an_error_that_says_so():
    X = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        BayesianStackingClassifier().fit(X, np.arange(39) % 2)
