"""Labels of groups of any kind: told apart as Python does, missing ones without a name."""

from decimal import Decimal

import numpy as np
import pytest

from sklearn_ep import HierarchicalEPLogistic

# two levels say little of their scale, and rows without label are groups: the fit tells both
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*rests on its prior:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*has no label:UserWarning"),
]


def rows(n=60):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2))
    return X, (X[:, 0] + rng.logistic(size=n) > 0).astype(int)


def grouped_by(groups, **settings):
    X, y = rows()
    return HierarchicalEPLogistic(hyperparameters="mode", **settings).fit(X, y, groups=groups)


@pytest.mark.parametrize(
    "pair",
    [(2**53 + 1, float(2**53)), ("a", "a\0"), (2**63, -1.5), (1, "1"), (True, "True")],
    ids=repr,
)
@pytest.mark.parametrize("as_array", [False, True])
def test_labels_that_differ_are_two_groups(pair, as_array):
    groups = [pair[i % 2] for i in range(60)]
    if as_array:
        groups, given = np.empty(60, dtype=object), groups
        groups[:] = given
    clf = grouped_by(groups)
    assert set(clf.group_labels_.tolist()) == set(pair)
    X, _ = rows()
    both = [clf.predict_proba(X[:1], groups=[label])[0, 1] for label in pair]
    effects = dict(zip(clf.group_labels_.tolist(), clf.group_effects_[:, 0], strict=True))
    assert np.sign(both[0] - both[1]) == np.sign(effects[pair[0]] - effects[pair[1]])


@pytest.mark.parametrize(
    "missing",
    [None, float("nan"), np.float32("nan"), Decimal("nan"), Decimal("sNaN"), np.datetime64("NaT")],
    ids=repr,
)
def test_a_missing_label_of_any_type_is_no_name(missing):
    groups = np.empty(60, dtype=object)
    groups[:] = [missing if i % 4 == 0 else Decimal(i % 2) for i in range(60)]
    assert grouped_by(groups).group_labels_.tolist() == [0, 1]


@pytest.mark.parametrize("engine", ["ep", "messages"])
def test_a_list_of_lists_is_a_table_of_factors(engine):
    rng = np.random.default_rng(1)
    table = np.column_stack([rng.integers(0, 6, 60), rng.integers(0, 5, 60)])
    X, _ = rows()
    by_array, by_lists = (grouped_by(g, engine=engine) for g in (table, table.tolist()))
    np.testing.assert_array_equal(
        by_lists.predict_proba(X, groups=table.tolist()), by_array.predict_proba(X, groups=table)
    )
    with pytest.raises(ValueError, match="rows of different lengths"):
        grouped_by([[0, 1]] * 59 + [[0]])
    with pytest.raises(ValueError, match="59 rows of labels"):
        grouped_by([[0, 1]] * 59)
