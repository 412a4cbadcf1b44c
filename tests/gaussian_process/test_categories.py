"""Categories of data frames in the default kernel: levels, missing values, unseen ones."""

import pickle

import numpy as np
import pandas as pd
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from sklearn_ep import (
    BayesianStackingClassifier,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
)
from sklearn_ep.kernels import GroupedRBF

NAMES = np.array(["red", "green", "blue", "grey"])


@pytest.fixture(scope="module")
def shades():
    """Frame of which a number, the colour and whether it is known tell the label."""
    rng = np.random.default_rng(0)
    n = 120
    level, z = rng.integers(0, 4, n), rng.normal(size=(n, 2))
    colour = np.where(rng.uniform(size=n) < 0.2, None, NAMES[level])
    effect = {"red": 2.0, "green": -2.0, "blue": 2.0, "grey": -2.0, None: 3.0}
    f = np.array([effect[c] for c in colour]) + z[:, 0] + rng.normal(size=n)
    frame = pd.DataFrame(
        {"x": z[:, 0], "colour": pd.Categorical(colour), "ok": z[:, 1] > 0, "z": z[:, 1]}
    )
    return frame, np.where(f > 0, "yes", "no")


def test_which_columns_are_categories(shades):
    """They have a length for all their indicators: one a level, and one for levels to come."""
    frame, y = shades

    def sizes(X):
        part = EPGaussianProcessClassifier(optimizer=None).fit(X, y).kernel_.k2
        return np.bincount(part.groups).tolist() if hasattr(part, "groups") else []

    assert sizes(frame) == sizes(pl.from_pandas(frame)) == [1, 1, 6, 3]
    text = frame.assign(
        colour=frame["colour"].astype("string"), z=frame["z"].round().astype(object)
    )
    assert sizes(text) == [1, 6, 3, text["z"].nunique() + 1]
    assert sizes(frame[["x", "z"]]) == sizes(frame[["x", "z"]].to_numpy()) == []


def test_codes_are_a_hamming_distance(shades):
    """The prior is that of indicators by hand, with levels for what is missing or not seen."""
    frame, y = shades
    settled = dict(hyperparameters="mode", tol=1e-9)
    clf = EPGaussianProcessClassifier(**settled).fit(frame, y)
    part = clf.kernel_.k2
    assert isinstance(part, GroupedRBF)
    assert_array_equal(part.groups, [0, 1, *[2] * 6, *[3] * 3])

    def coded(rows):
        colour = rows["colour"].astype(object).where(rows["colour"].notna(), "none")
        levels = [colour == name for name in (*NAMES, "none", "violet")]
        own = [rows["ok"], ~rows["ok"], np.zeros(len(rows))]
        return np.column_stack([rows["x"], rows["z"], *levels, *own]).astype(float)

    new = frame.iloc[:3].assign(colour=["red", "violet", None])
    by_hand = EPGaussianProcessClassifier(clf.kernel_, optimizer=None, **settled)
    by_hand.fit(coded(frame), y)
    for rows in (frame, new):
        assert_allclose(clf.predict_proba(rows), by_hand.predict_proba(coded(rows)), atol=1e-6)
    own = coded(pd.concat([frame, new], ignore_index=True))[:, 2:8]
    apart = np.sum((own[:, None] - own[None]) ** 2, axis=2)
    assert set(np.unique(apart)) == {0.0, 2.0}


def test_frames_of_any_kind_have_one_answer(shades):
    frame, y = shades
    first = EPGaussianProcessClassifier().fit(frame, y)
    own = EPGaussianProcessClassifier(hyperparameters="mode")
    expected, at_mode = (m.predict_proba(frame) for m in (first, own.fit(frame, y)))
    stack, few = BayesianStackingClassifier(random_state=0), slice(28)
    stacked = stack.fit(frame[few], y[few]).predict_proba(frame)
    text = frame.assign(colour=frame["colour"].astype("string"), ok=frame["ok"].astype("boolean"))
    for other in (pl.from_pandas(frame), text):
        assert_allclose(own.fit(other, y).predict_proba(other), at_mode)
        assert_allclose(first.predict_proba(other), expected)
    # parts of a stack tell categories as a process does
    stack.fit(pl.from_pandas(frame)[few], y[few])
    assert_allclose(stack.predict_proba(frame), stacked)
    assert_allclose(pickle.loads(pickle.dumps(stack)).predict_proba(frame), stacked)
    assert first.n_features_in_ == 4
    assert_array_equal(first.feature_names_in_, frame.columns)
    colour, ok = first.kernel_.k2.length_scale[2:]
    assert colour < ok


@pytest.mark.parametrize(
    "model",
    [
        EPGaussianProcessClassifier(),
        EPGaussianProcessClassifier(method="sparse", n_inducing=30, random_state=0),
        RelaxedEPClassifier(label_noise=0.05),
        BayesianStackingClassifier(random_state=0),
    ],
    ids=str,
)
def test_levels_missing_values_and_unseen_ones(model, shades):
    frame, y = shades
    model.fit(frame, y)
    rows = frame.iloc[:5].assign(
        colour=["red", "green", None, "violet", "white"], ok=True, x=0.0, z=0.5
    )
    yes = model.predict_proba(rows)[:, 1]
    assert yes[0] > 0.8 and yes[1] < 0.2 and yes[2] > 0.8
    assert 0.2 < yes[3] < 0.8
    assert_allclose(yes[3], yes[4])
    assert np.mean(np.log(model.loo_proba_)) > -0.5
    assert model.predict_proba_interval(rows).shape == (5, 2)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(rows.rename(columns={"x": "u"}))


@pytest.mark.parametrize("kind", [EPGaussianProcessClassifier, BayesianStackingClassifier])
def test_numbers_that_are_missing_are_refused(kind, shades):
    frame, y = shades
    holed = frame.assign(x=np.where(np.arange(len(y)) == 3, np.nan, frame["x"]))
    with pytest.raises(ValueError, match="(?s)contains NaN.*imputer"):
        kind().fit(holed, y)
    model = kind(random_state=0).fit(frame[:40], y[:40])
    with pytest.raises(ValueError, match="(?s)contains NaN.*imputer"):
        model.predict(holed)


def test_a_later_fit_to_numbers_forgets_the_levels(shades):
    frame, y = shades
    numbers = frame[["x", "z"]]
    model, other = (EPGaussianProcessClassifier(hyperparameters="mode") for _ in range(2))
    model.fit(frame, y).fit(numbers, y)
    assert_allclose(model.predict_proba(numbers), other.fit(numbers, y).predict_proba(numbers))


ONE, TWO = ["colour"], ["colour", "ok"]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (ONE, 2),
        (TWO, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((ONE, 3), (TWO, 2))),
    ],
)
def test_frames_of_categories_alone_and_of_several_classes(names, classes, shades):
    frame, y = (part[:70] for part in shades)
    y = np.where(frame["z"] > 1, "other", y) if classes == 3 else y
    model = EPGaussianProcessClassifier().fit(frame[names], y)
    assert model.predict_proba(frame[names]).shape == (len(y), classes)
    assert model.kernel_.n_dims - 1 == len(names)


def test_checks_name_columns_of_the_frame_behind_its_categories(shades):
    frame, y = shades
    with pytest.warns(UserWarning, match="column 'z' is farthest"):
        EPGaussianProcessClassifier(optimizer=None).fit(frame.assign(z=1e6 * frame.z), y)
