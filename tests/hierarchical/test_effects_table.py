"""The table of group effects has the estimator's own numbers under the names that were given."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtri

from sklearn_ep import HierarchicalEPLogistic


def pupils(n=150):
    rng = np.random.default_rng(3)
    X = pd.DataFrame({"hours": rng.normal(size=n), "age": rng.normal(size=n)})
    X["school"], X["item"] = rng.integers(12, size=n), [f"i{k}" for k in rng.integers(5, size=n)]
    z = X["hours"] + rng.normal(size=12)[X["school"]] + rng.logistic(size=n)
    return X, (z > 0).astype(int)


def fitted(*args, groups=None, take=(), **kw):
    X, y = pupils()
    return HierarchicalEPLogistic(*args, refine=False, tol=1.0, **kw).fit(
        X.drop(columns=list(take)), y, groups=groups
    )


def test_one_factor_with_a_slope():
    est = fitted("school", random_slopes=["age"], take=["item"], n_partitions=1)
    table = dict(est.group_effects_frame(0.8))
    assert {len(values) for values in table.values()} == {24}
    assert set(table["factor"]) == {"school"}
    assert table["effect"].tolist() == ["intercept"] * 12 + ["age"] * 12
    assert table["level"].tolist() == est.group_labels_.tolist() * 2
    np.testing.assert_array_equal(table["mean"], est.group_effects_.T.ravel())
    np.testing.assert_array_equal(table["sd"], est.group_effects_std_.T.ravel())
    half = ndtri(0.9) * table["sd"]
    np.testing.assert_allclose(table["upper"] - table["mean"], half)
    np.testing.assert_allclose(table["mean"] - table["lower"], half)
    with pytest.raises(ValueError, match="level"):
        dict(est.group_effects_frame(1.0))


def test_list_of_factors_with_a_combination():
    kept = dict(random_slopes={"item": "hours"}, hyperparameters="mode")
    est = fitted(["item", ("item", "school")], **kept)
    frame = est.group_effects_frame()
    both = frame[frame["factor"] == "item:school"]
    assert both["level"].tolist() == est.group_labels_[1].tolist()
    assert isinstance(both["level"].iloc[0], tuple)
    np.testing.assert_array_equal(both["mean"], est.group_effects_[1][:, 0])
    slopes = frame[frame["effect"] == "hours"]
    assert slopes["factor"].tolist() == ["item"] * 5
    np.testing.assert_array_equal(slopes["sd"], est.group_effects_std_[0][:, 1])
    assert len(frame) == 10 + len(both)


def test_labels_beside_X_are_groups():
    X, _ = pupils()
    est = fitted(groups=X["school"].to_numpy(), take=["item", "school"])
    table = dict(est.group_effects_frame(0.9))
    assert set(table["factor"]) == {"groups"} and len(table["mean"]) == 12


def test_no_groups_is_an_empty_table():
    table = dict(fitted(take=["item"]).group_effects_frame(0.9))
    assert [len(values) for values in table.values()] == [0] * 8


def test_rows_are_those_of_the_named_levels():
    X, _ = pupils()
    est = fitted("school", take=["item"])
    counts = X["school"].value_counts().sort_index().to_numpy()
    est._level_rows = [np.r_[counts, 1, 1]]  # two rows without label after the named levels
    np.testing.assert_array_equal(dict(est.group_effects_frame(0.9))["rows"], counts)


def test_without_pandas_the_frame_is_the_table(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    est = HierarchicalEPLogistic(1, refine=False)
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=60), rng.integers(6, size=60)])
    table = est.fit(X, rng.integers(2, size=60)).group_effects_frame()
    assert isinstance(table, dict) and set(table["factor"]) == {"1"}
