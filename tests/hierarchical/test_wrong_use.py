"""What a user gets wrong is named: in an error, or in a warning where the model makes sense."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from sklearn_ep import HierarchicalEPLogistic

N = 120
rng = np.random.default_rng(0)
X, DISTRICT = rng.normal(size=(N, 2)), rng.integers(0, 8, N)
OTHER = rng.integers(0, 5, N)
Y = (X[:, 0] + rng.logistic(size=N) > 0).astype(int)

# by which ways rows come in, and which engine they go to
WAYS = {
    "one": ([2], {}),
    "parts": ([2], {"n_partitions": 2}),
    "list": ([2, 3], {}),
    "messages": ([2, 3], {"engine": "messages"}),
    "raw": ([2, 3], {"raw": True}),
}


def table(*labels):
    return np.column_stack([X, *labels])


def warned(rows, way, **settings):
    """All warnings of a fit, as one text."""
    factors, more = WAYS[way]
    more = more | settings
    raw = more.pop("raw", False)
    column = more.pop("group_column", factors if len(factors) > 1 else factors[0])
    est = HierarchicalEPLogistic(column, hyperparameters="mode", tol=1.0, **more)
    half = N // 2
    data = ([(rows[:half], Y[:half]), (rows[half:], Y[half:])],) if raw else (rows, Y)
    with pytest.warns(UserWarning) as said:
        est.fit(*data)
    return " ".join(str(w.message) for w in said), est


@pytest.mark.parametrize(
    ("rows", "column", "slopes", "named"),
    [
        (table(DISTRICT), 2, [7], "random_slopes=7 is not a column of X, which has 3"),
        (table(DISTRICT), 2, 1.5, "random_slopes=1.5 is the name of a column, but X has no"),
        (table(DISTRICT), 2, ["age"], "random_slopes='age' is the name of a column, but X has no"),
        (table(DISTRICT), 2, [2], "names a group column"),
        (table(DISTRICT, OTHER), [2, 3], {2: [9]}, "random_slopes=9 is not a column of X"),
        (table(DISTRICT, OTHER), [2, 3], {4: [0]}, r"random_slopes has \[4\], which is no factor"),
        (
            pd.DataFrame(table(DISTRICT), columns=["hours", "age", "school"]),
            "school",
            ["weight"],
            "random_slopes='weight' is not among the columns of X: .'hours', 'age', 'school'",
        ),
    ],
)
def test_a_slope_that_is_no_column(rows, column, slopes, named):
    with pytest.raises(ValueError, match=named):
        HierarchicalEPLogistic(column, random_slopes=slopes).fit(rows, Y)


@pytest.mark.parametrize("way", ["list", "messages", "raw"])
def test_a_factor_nested_the_wrong_way_round(way):
    """Districts lie in regions: a district and its region are the same groups as the district."""
    rows = table(DISTRICT // 2, DISTRICT)
    said, _ = warned(rows, way, group_column=[3, (3, 2)])
    assert "factor 3 and factor (3, 2) have the same groups of rows" in said
    assert "written from the outside in; if 3 lies in 2, give [2, (3, 2)]" in said
    said, _ = warned(rows, way, group_column=[2, (2, 3)])  # four regions are few
    assert "same groups" not in said


@pytest.mark.parametrize("way", WAYS)
def test_one_level_only(way):
    rows = table(np.zeros(N), OTHER)
    if way == "raw":
        rows = rows[np.argsort(OTHER, kind="stable")]
    said, est = warned(rows, way)
    assert "factor 2 has one level" in said and "its tau is that of the prior" in said
    assert "factor 2 has one level" in str(est.diagnose())


@pytest.mark.parametrize("way", ["one", "list", "messages", "raw"])
def test_a_level_for_each_row(way):
    said, _ = warned(table(np.arange(N), OTHER), way)
    assert "factor 2: every group has one row" in said


def test_a_measured_column_is_no_factor():
    with pytest.raises(ValueError, match="group_column=0 has a number with decimals in every row"):
        HierarchicalEPLogistic(0).fit(table(DISTRICT), Y)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", ["some", "all"])
def test_rows_without_a_label(way, share):
    labels = DISTRICT.astype(float)
    labels[: 5 if share == "some" else N] = np.nan
    said, est = warned(table(labels, OTHER), way)
    assert f"factor 2 has no label in {5 if share == 'some' else N} of {N} rows" in said
    assert np.all(np.isfinite(est.tau_))


@pytest.mark.parametrize("groups", [DISTRICT, np.column_stack([DISTRICT, OTHER])], ids=["1", "2"])
def test_groups_beside_X_are_missed_in_predictions(groups):
    est = HierarchicalEPLogistic(hyperparameters="mode").fit(X, Y, groups=groups)
    with pytest.warns(UserWarning, match="was fitted with groups beside X and predicts without"):
        proba = est.predict_proba(X[:3])
    np.testing.assert_allclose(proba, est.predict_proba(X[:3], kind="population"))
    if groups.ndim == 2:
        with pytest.raises(ValueError, match="groups has 1 columns, the model 2 factors"):
            est.predict_proba(X, groups=DISTRICT)


def test_a_group_column_is_missed_in_predictions():
    rows = pd.DataFrame(table(DISTRICT), columns=["hours", "age", "school"])
    named = HierarchicalEPLogistic("school", hyperparameters="mode").fit(rows, Y)
    plain = HierarchicalEPLogistic(2, hyperparameters="mode").fit(rows.to_numpy(), Y)
    for est, given, column in ((named, rows[["hours", "age"]], "'school'"), (plain, X, "2")):
        with pytest.raises(ValueError, match=f"expecting 3, group_column={column} among them"):
            est.predict(given)


def test_groups_for_a_model_without():
    with pytest.warns(UserWarning, match="no groups were given"):
        est = HierarchicalEPLogistic().fit(X, Y)
    with pytest.raises(ValueError, match="the model was fitted without groups"):
        est.predict(X, groups=DISTRICT)


def test_columns_in_other_units_than_the_prior():
    """Where the default prior outweighs all rows, the fit says so."""
    rows = pd.DataFrame({"school": DISTRICT, "hours": X[:, 0], "age": X[:, 1]})
    small = rows.assign(hours=1e-8 * rows["hours"], age=2e-8 * rows["age"])
    est = HierarchicalEPLogistic("school", hyperparameters="mode")
    there = est.fit(rows, Y).predict_proba(rows)
    with pytest.warns(
        UserWarning, match="2.5 is in units of the columns, and column 'hours' is so"
    ):
        est.fit(small, Y)
    assert np.max(np.abs(est.coef_)) < 1e-3
    est.set_params(prior_scale=[2.5e8, 1.25e8]).fit(small, Y)
    # the order in which rows of a small group are taken in depends on their entries
    np.testing.assert_allclose(est.predict_proba(small), there, atol=5e-3)


def test_a_column_of_one_value_is_not_told_to_be_narrow():
    """Its mean differs from 0.1 by rounding, and no unit would make it vary."""
    weight = np.r_[np.ones(len(Y)), 0.0]
    rows = np.column_stack([X[:, 0], np.full(len(Y), 0.1), DISTRICT])
    rows = np.vstack([rows, [0.0, 5.0, DISTRICT[0]]])
    est = HierarchicalEPLogistic(2, hyperparameters="mode")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        est.fit(rows, np.append(Y, Y[0]), sample_weight=weight)


@pytest.mark.parametrize("by_group", [False, True])
def test_slopes_that_do_not_vary_within_groups_are_told_of(by_group):
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(8), 12)
    frame = pd.DataFrame(dict(x=rng.normal(size=96), c=0.3 * g if by_group else 1.0, g=g))
    y = rng.integers(2, size=96)
    with pytest.warns(UserWarning, match="slope 2 in random_slopes does not vary within groups"):
        HierarchicalEPLogistic("g", random_slopes=["x", "c"], hyperparameters="mode").fit(frame, y)


def test_a_model_of_groups_alone():
    """Intercept and groups without columns, from a data frame and from an array."""
    rng = np.random.default_rng(1)
    g = np.repeat(np.arange(10), 15)
    y = (rng.uniform(size=150) < expit(rng.normal(size=10)[g])).astype(int)
    frame, array = pd.DataFrame(dict(g=g)), g[:, None].astype(float)
    by_name, by_index = (
        HierarchicalEPLogistic("g").fit(frame, y),
        HierarchicalEPLogistic(0).fit(array, y),
    )
    assert by_name.coef_.shape == (1, 0) and by_name.group_effects_.shape == (10, 1)
    np.testing.assert_array_equal(by_name.group_effects_, by_index.group_effects_)
    np.testing.assert_array_equal(by_name.predict_proba(frame), by_index.predict_proba(array))
    assert len(by_name.summary().scales["tau"]) == 1
    crossed = HierarchicalEPLogistic(["g", "h"], hyperparameters="mode")
    crossed.fit(frame.assign(h=np.arange(150) % 6), y)
    assert [e.shape for e in crossed.group_effects_] == [(10, 1), (6, 1)]
    with pytest.raises(ValueError, match="0 feature"):
        HierarchicalEPLogistic("g", fit_intercept=False).fit(frame, y)
