"""Conventions of scikit-learn: sparse arrays, routed metadata, views, tables of all kinds."""

import datetime
import re

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from sklearn import config_context, get_config
from sklearn.base import clone, is_regressor
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import sklearn_ep
from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    HierarchicalEPLogistic,
    SpikeSlabRegressor,
)
from sklearn_ep.active_learning import Learner, query
from sklearn_ep.inspection import GroupEffectsDisplay, LatentDisplay, review_list

NAMES = [name for name in sklearn_ep.__all__ if name[0].isupper()]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
Z = X[:, 0] - X[:, 1] + 0.5 * RNG.normal(size=60)
GROUP = np.array(list("abcdef"))[RNG.integers(6, size=60)]
WORDS = np.array("we like this film very much but not that plain long one".split())
TEXTS = [" ".join(RNG.choice(WORDS, size=6)) for _ in range(50)]
LIKED = np.array(["like" in text for text in TEXTS])
PROCESS = "EPGaussianProcessClassifier"
LINEAR = ConvexVariationalLogistic(hyperparameters="mode")


def quick(name):
    """Return an estimator by its name, without an average: what is asked comes before the fit."""
    estimator = getattr(sklearn_ep, name)()
    if "hyperparameters" in estimator.get_params():
        estimator.set_params(hyperparameters="mode")
    if "estimators" in estimator.get_params(deep=False):
        estimator.set_params(estimators=[("linear", LINEAR), ("process", quick(PROCESS))])
    return estimator


def response_of(estimator):
    return Z if is_regressor(estimator) else (Z > 0).astype(int)


def told_by(estimator, X):
    """What an estimator says of rows: probabilities, of a regressor the mean."""
    return estimator.predict(X) if is_regressor(estimator) else estimator.predict_proba(X)


# ------------------------------------------------------------------ sparse arrays and matrices


@pytest.mark.skipif("sparse_interface" not in get_config(), reason="scikit-learn before 1.9")
@pytest.mark.parametrize("interface", ["spmatrix", "sparray"])
@pytest.mark.parametrize(
    "model",
    [
        LINEAR,
        ConvexVariationalLogistic(solver="cg", variance="monte_carlo", random_state=0),
        ConvexVariationalRegressor(),
        BayesianStackingClassifier(),
    ],
    ids=["exact", "sampled", "regressor", "stack"],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_text_by_sparse_arrays_and_matrices(model, interface):
    y = LIKED.astype(float) if is_regressor(model) else LIKED
    with config_context(sparse_interface=interface):
        pipe = make_pipeline(CountVectorizer(), clone(model)).fit(TEXTS, y)
        rows = pipe[:-1].transform(TEXTS)
        assert isinstance(rows, sp.sparray) == (interface == "sparray")
        told = told_by(pipe, TEXTS)
    assert_allclose(told, told_by(clone(model).fit(sp.csr_matrix(rows), y), rows.toarray()))


@pytest.mark.parametrize("kind", [sp.csr_array, sp.csc_array])
def test_a_pool_and_a_review_of_sparse_rows(kind):
    rows = sp.csr_matrix(CountVectorizer().fit_transform(TEXTS))
    clf = clone(LINEAR).fit(rows, LIKED)
    pool = kind(rows)
    assert_array_equal(query(clf, pool, 3, n_reference=20), query(clf, rows, 3, n_reference=20))
    assert_array_equal(review_list(clf, pool, LIKED).index, review_list(clf, rows, LIKED).index)
    learner = Learner(LINEAR, pool)
    learner.tell(np.arange(20), LIKED[:20])
    assert len(learner.ask(2)) == 2


# ------------------------------------------------------------------ metadata


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        *((name, True) for name in NAMES),
        *(pytest.param(n, False, marks=[pytest.mark.slow] * ("Convex" not in n)) for n in NAMES),
    ],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_weights_reach_the_last_step_with_and_without_routing(name, routing):
    estimator = quick(name)
    rows, y, weight = X[:30], response_of(estimator)[:30], np.arange(30) % 3
    bare = clone(estimator).fit(rows, y, sample_weight=weight)
    with config_context(enable_metadata_routing=routing):
        pipe = make_pipeline(StandardScaler(with_mean=False, with_std=False), estimator)
        if routing:
            pipe[:-1][0].set_fit_request(sample_weight=False)
            estimator.set_fit_request(sample_weight=True)
            pipe.fit(rows, y, sample_weight=weight)
        else:
            pipe.fit(rows, y, **{f"{pipe.steps[-1][0]}__sample_weight": weight})
        assert_allclose(told_by(pipe, rows), told_by(bare, rows))


@pytest.mark.parametrize("routing", [True, False])
def test_groups_are_a_column_or_are_routed(routing):
    y = (Z > 0).astype(int)[:36]
    rows = np.column_stack([X, np.unique(GROUP, return_inverse=True)[1]])[:36]
    with config_context(enable_metadata_routing=routing):
        model = HierarchicalEPLogistic(3, hyperparameters="mode")
        scores = cross_val_score(model, rows, y, cv=2)
        if routing:
            est = HierarchicalEPLogistic(hyperparameters="mode")
            est.set_fit_request(groups=True).set_score_request(groups=True)
            routed = cross_val_score(est, X[:36], y, cv=2, params={"groups": rows[:, 3]})
            assert_allclose(routed, scores)
    assert scores.mean() > 0.6


# ------------------------------------------------------------------ views in a notebook


@pytest.mark.parametrize("name", NAMES)
def test_a_fitted_estimator_shows_itself_in_a_notebook(name):
    estimator = quick(name)
    rows, y = pd.DataFrame(X[:24], columns=["<q>", "b", "c"]), response_of(estimator)[:24]
    html = estimator.fit(rows, y)._repr_html_()
    assert name in html and "<q>" not in html
    addresses = set(re.findall(r'href="(http[^"]*)"', html))
    own = "https://github.com/sklearn-ep/sklearn-ep/blob/main/sklearn_ep/"
    assert all(address.startswith(("https://scikit-learn.org/", own)) for address in addresses)
    if hasattr(estimator, "set_callbacks"):  # scikit-learn 1.9, whose view shows what they mean
        assert all(f"--doc-link-{k};" in html for k in estimator.get_params(deep=False))
    last = make_pipeline(StandardScaler().fit(rows), estimator)  # both are fitted
    assert name in last._repr_html_()


# ------------------------------------------------------------------ tables


def table_of(kind, columns):
    """A table of a library, of a dict of arrays."""
    library = pytest.importorskip(kind)
    if kind == "pyarrow":
        return library.table(columns)
    return library.DataFrame(columns)


KINDS = ["pandas", "polars", "pyarrow"]
NIGHTLY = pytest.mark.slow
EACH = [
    # of one kind all estimators, of one estimator all kinds
    pytest.param(name, kind, marks=[NIGHTLY] * (kind != "polars" and "Convex" not in name))
    for name in NAMES
    for kind in KINDS
]
COLUMNS = {"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]}


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_tables_of_all_kinds_are_fitted_as_arrays(name, kind):
    # the parts of a stack by default choose columns of their own
    stacked = name == "BayesianStackingClassifier"
    rows, estimator = X[:30], BayesianStackingClassifier() if stacked else quick(name)
    table = table_of(kind, dict(zip("abc", rows.T, strict=True)))
    y = response_of(estimator)[:30]
    given = table_of(kind, {"y": y})
    given = given["y"] if kind != "pyarrow" else given.column("y")
    fitted = clone(estimator).fit(table, given)
    assert_array_equal(fitted.feature_names_in_, ["a", "b", "c"])
    # the order in memory differs, and with it the last bits of sums
    assert_allclose(told_by(fitted, table), told_by(clone(estimator).fit(rows, y), rows), rtol=1e-6)


DATES = [datetime.date(2020, 1, 1 + day) for day in range(30)]
STRANGE = {
    "dates": pd.Series(pd.to_datetime(DATES)),
    "objects": pd.Series(DATES, dtype=object),
    "months": pd.Series(pd.period_range("2020", periods=30, freq="M")),
    "lists": pd.Series([[1, 2]] * 30),
    "mixed": pd.Series(["low", *range(29)], dtype=object),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", NAMES)
def test_a_column_that_holds_no_numbers_is_named(name, kind):
    stacked = name == "BayesianStackingClassifier"
    estimator = BayesianStackingClassifier() if stacked else quick(name)
    y = response_of(estimator)[:30]
    known = pd.DataFrame({"a": X[:30, 0], "odd": X[:30, 1]})
    with pytest.raises(ValueError, match="column 'odd' of X has values"):
        clone(estimator).fit(known.assign(odd=STRANGE[kind]), y)
    with pytest.raises(ValueError, match="column 'odd' of X has values"):
        told_by(estimator.fit(known, y), known.assign(odd=STRANGE[kind]))


def test_dates_of_polars_and_of_partitions_are_named():
    """They became days or microseconds since 1970 there."""
    polars = pytest.importorskip("polars")
    frame, y = polars.DataFrame({"a": X[:30, 0], "odd": DATES}), Z[:30] > 0
    with pytest.raises(ValueError, match="column 'odd' of X has values"):
        LINEAR.fit(frame, y)
    with pytest.raises(ValueError, match="partition 0: column 'odd' of X has values"):
        LINEAR.fit([(frame, y)])


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        *(("school", kind) for kind in KINDS),
        (1, "polars"),
        (["school"], "pyarrow"),
        *(pytest.param(1, kind, marks=NIGHTLY) for kind in ("pandas", "pyarrow")),
        *(pytest.param(["school"], kind, marks=NIGHTLY) for kind in ("pandas", "polars")),
    ],
)
def test_groups_are_a_column_of_a_table_of_any_kind(column, kind):
    columns = {"a": X[:, 0], "school": GROUP.tolist(), "c": X[:, 2]}
    table, y = table_of(kind, columns), (Z > 0).astype(int)
    model = HierarchicalEPLogistic(column, hyperparameters="mode")
    plain = pd.DataFrame(columns)
    est, same = clone(model).fit(table, y), clone(model).fit(plain, y)
    assert_allclose(est.predict_proba(table), same.predict_proba(plain), rtol=1e-6)
    if not isinstance(column, list):
        raw = GroupEffectsDisplay.from_estimator(est, table, y).raw
        assert_allclose(raw, GroupEffectsDisplay.from_estimator(same, plain, y).raw)
    parts = [(table, y)]
    if column == "school":
        parted = HierarchicalEPLogistic(column, refine=False, hyperparameters="mode").fit(parts)
        assert_array_equal(parted.feature_names_in_, ["a", "school", "c"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_may_be_a_table_of_any_kind(kind):
    table, y = table_of(kind, COLUMNS), (Z > 0).astype(int)
    clf = clone(LINEAR).fit(table, y)
    same = clone(LINEAR).fit(X, y)
    assert_array_equal(query(clf, table, 3, n_reference=30), query(same, X, 3, n_reference=30))
    learner, plain = (Learner(LINEAR, pool) for pool in (table, X))
    for _ in range(7):
        rows = plain.ask()
        assert_array_equal(learner.ask(), rows)
        learner.tell(rows, y[rows])
        plain.tell(rows, y[rows])
    assert_allclose(learner.predict_proba(), plain.predict_proba())


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_and_selections_of_tables_of_any_kind(kind):
    pytest.importorskip("matplotlib").use("agg")
    table, y = table_of(kind, {"a": X[:, 0], "b": X[:, 1]}), (Z > 0).astype(int)
    clf = clone(LINEAR).fit(table, y)
    display = LatentDisplay.from_estimator(clf, table, y, grid_resolution=5)
    assert display.ax_.get_xlabel() == "a"
    selector = SelectFromModel(
        SpikeSlabRegressor(prior_inclusion=0.5, slab_variance=1.0),
        importance_getter="inclusion_proba_",
        threshold=0.9,
    ).fit(table_of(kind, COLUMNS), Z)
    assert_array_equal(selector.get_feature_names_out(), ["a", "b"])
