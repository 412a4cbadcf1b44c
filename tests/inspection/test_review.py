"""The review list: order, suggestions, expected false flags, and what it refuses."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn import config_context
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_ep import ConvexVariationalLogistic, RelaxedEPClassifier
from sklearn_ep.datasets import make_noisy_labels_classification
from sklearn_ep.inspection import review_list

X, Y, CLEAN = make_noisy_labels_classification(120, random_state=0)


@pytest.fixture(scope="module")
def clf():
    return RelaxedEPClassifier(hyperparameters="mode").fit(X, Y)


def test_the_most_suspect_label_comes_first(clf):
    table = review_list(clf, X, Y)
    assert table.index.name == "row" and sorted(table.index) == list(range(120))
    assert_array_equal(table["wrong"], np.sort(clf.noise_proba_)[::-1])
    assert_array_equal(table["given"], Y[table.index])
    assert_array_equal(table["suggested"], 1 - Y[table.index])
    assert_array_equal(table["given_proba"], clf.loo_proba_[table.index])
    assert_allclose(table["given_proba"] + table["suggested_proba"], 1.0)
    wrong = (Y != CLEAN)[table.index]
    assert wrong[:10].mean() > 0.8 > 0.1 > wrong[-60:].mean()


@pytest.mark.parametrize("n_seeds", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_expected_false_flags_are_about_those_that_there_are(n_seeds):
    expected, found = [], []
    for seed in range(n_seeds):
        X, y, clean = make_noisy_labels_classification(120, random_state=seed)
        table = review_list(RelaxedEPClassifier().fit(X, y), X, y)
        right = (y == clean)[table.index[:20]]
        expected.append(table["false_flags"].iloc[19])
        found.append(right.sum())
        assert_allclose(table["false_flags"].iloc[:3], np.cumsum(1 - table["wrong"].iloc[:3]))
    assert abs(np.mean(expected) - np.mean(found)) < 3.0


def test_a_pipeline_with_names_for_labels_and_rows_of_weight_zero():
    names = np.array(["no", "yes"])[Y]
    model = make_pipeline(StandardScaler(), RelaxedEPClassifier(hyperparameters="mode"))
    weight = np.ones(len(Y))
    weight[:4] = 0.0
    model.fit(X, names, relaxedepclassifier__sample_weight=weight)
    table = review_list(model, pd.DataFrame(X).to_numpy(), pd.Series(names))
    assert set(table["suggested"]) == {"no", "yes"}
    assert set(range(4)).isdisjoint(table.index) and len(table) == 116


def test_the_best_of_the_other_classes_is_suggested():
    rng = np.random.default_rng(0)
    centre = np.array([[0, 3], [3, 0], [-3, -3]])
    true = rng.integers(3, size=90)
    X, y = centre[true] + rng.normal(size=(90, 2)), true.copy()
    y[:6] = (true[:6] + 1) % 3
    clf = RelaxedEPClassifier(hyperparameters="mode").fit(X, y)
    table = review_list(clf, X, y)
    assert set(table.index[:6]) == set(range(6))
    assert_array_equal(table["suggested"].iloc[:6], true[table.index[:6]])
    assert np.all(table["given"] != table["suggested"])
    assert np.all(table["given_proba"] + table["suggested_proba"] <= 1.0 + 1e-12)


def test_a_classifier_without_wrong_labels_orders_by_rows_left_out():
    clf = ConvexVariationalLogistic().fit(X, Y)
    table = review_list(clf, X, Y)
    assert "false_flags" not in table
    assert_allclose(table["wrong"], 1.0 - clf.loo_proba_[table.index])
    plain = LogisticRegression().fit(X, Y)
    with pytest.raises(ValueError, match="LogisticRegression has no loo_proba_.*cv=5"):
        review_list(plain, X, Y)
    folds = cross_val_predict(plain, X, Y, cv=4, method="predict_proba")
    table = review_list(plain, X, Y, cv=4)
    assert_allclose(table["given_proba"], folds[table.index, Y[table.index]])


def test_without_pandas_the_list_prints(clf, monkeypatch):
    def no_pandas(*args, **kwargs):
        raise ImportError

    # only here: scikit-learn of old asks for pandas, too
    monkeypatch.setattr(pd.DataFrame, "set_index", no_pandas)
    table = review_list(clf, X, Y)
    lines = str(table).splitlines()
    assert lines[0] == "RelaxedEPClassifier: labels to look at again"
    assert lines[2].split()[:4] == ["row", "given", "suggested", "wrong"]
    assert lines[3].split()[0] == str(np.argmax(clf.noise_proba_))


def test_rows_that_are_not_those_of_the_fit_are_refused(clf):
    for cv in (None, 3):
        with pytest.raises(ValueError, match="fitted to 120 rows, y has 119"):
            review_list(clf, X[1:], Y[1:], cv=cv)
    with pytest.raises(ValueError, match="not seen in fit"):
        review_list(clf, X, Y + 1)
    with pytest.raises(TypeError, match="StandardScaler has no predict_proba"):
        review_list(StandardScaler().fit(X), X, Y)


@pytest.mark.parametrize("routing", [False, True])
def test_folds_may_keep_groups_together(routing):
    groups, splitter = np.arange(len(Y)) % 7, GroupKFold(4)
    plain = LogisticRegression().fit(X, Y)
    with config_context(enable_metadata_routing=routing):
        table = review_list(plain, X, Y, cv=splitter, groups=groups)
        review_list(plain, X, Y, cv=4)  # which needs no groups
    splits = list(splitter.split(X, Y, groups))
    proba = cross_val_predict(plain, X, Y, cv=splits, method="predict_proba")
    assert_allclose(table["given_proba"], proba[table.index, Y[table.index]])
    with pytest.raises(ValueError, match="groups is for a splitter"):
        review_list(plain, X, Y, groups=groups)
