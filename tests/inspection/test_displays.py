"""Displays hold what they draw, draw where they are told, and label their axes."""

import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from sklearn_ep import (
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep.inspection import (
    CoefficientIntervalDisplay,
    ConvergenceDisplay,
    GroupEffectsDisplay,
    HyperparameterDisplay,
    InclusionDisplay,
    LatentDisplay,
    ReliabilityDisplay,
)

matplotlib.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def moons():
    X, y = make_moons(60, noise=0.2, random_state=0)
    return X, y, EPGaussianProcessClassifier(4.0 * RBF(0.7), optimizer=None).fit(X, y)


@pytest.mark.parametrize(
    "display, wrong, right",
    [
        (
            InclusionDisplay,
            ConvexVariationalLogistic(),
            "SpikeSlabRegressor or SpikeSlabClassifier",
        ),
        (GroupEffectsDisplay, ConvexVariationalLogistic(), "HierarchicalEPLogistic"),
        (CoefficientIntervalDisplay, EPGaussianProcessClassifier(), "linear model"),
        (HyperparameterDisplay, ConvexVariationalRegressor(), "averages over hyperparameters"),
        (ReliabilityDisplay, ConvexVariationalRegressor(), "classifier"),
        (LatentDisplay, ConvexVariationalRegressor(), "classifier"),
        (ConvergenceDisplay, LogisticRegression(), "estimator of this package"),
    ],
)
def test_a_display_of_the_wrong_model_names_the_right_one(display, wrong, right, moons):
    X, y, _ = moons
    rows = (X, y) if display is ReliabilityDisplay else (X,) if display is LatentDisplay else ()
    with pytest.raises(TypeError, match=right):
        display.from_estimator(wrong.fit(X, y), *rows)


def test_convergence_display(moons):
    *_, est = moons
    display = ConvergenceDisplay.from_estimator(est, color="C3")
    line = display.ax_.lines[0]
    np.testing.assert_array_equal(line.get_ydata(), est.history_["residual"])
    assert line.get_color() == "C3" and display.ax_.get_yscale() == "log"
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("iteration", "residual")
    twin = next(a for a in display.figure_.axes if a is not display.ax_)
    np.testing.assert_array_equal(twin.lines[0].get_ydata(), est.history_["log_evidence"])
    ax = plt.subplots()[1]
    assert display.plot(ax=ax) is display and display.ax_ is ax
    assert not display.ax_.texts  # sweeps only: no phases to tell apart


def test_convergence_display_marks_the_phases_of_a_fit():
    X, y = make_moons(60, noise=0.2, random_state=0)
    est = EPGaussianProcessClassifier(RBF(), hyperparameters="mode").fit(X, y)
    n_learning = np.sum(est.history_["phase"] == "learning step")
    display = ConvergenceDisplay.from_estimator(est)
    ax = display.ax_
    display.figure_.canvas.draw()
    assert not any(a.yaxis.get_offset_text().get_text() for a in display.figure_.axes)
    assert [text.get_text() for text in ax.texts] == ["learning step", "iteration"]
    assert [text.xy[0] for text in ax.texts] == [0.5, est.n_iter_ + 0.5]
    spans = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
    edges = [(span.x0, span.x1) for span in spans]
    np.testing.assert_allclose(
        edges, [(0.5, n_learning + 0.5), (n_learning + 0.5, est.n_iter_ + 0.5)]
    )


def test_latent_display(moons):
    X, y, est = moons
    display = LatentDisplay.from_estimator(est, X, y, grid_resolution=15, marked=y == 1)
    corner = [[display.x0[0, 0], display.x1[0, 0]]]
    np.testing.assert_allclose(display.proba[0, 0], est.predict_proba(corner)[0, 1])
    np.testing.assert_allclose(display.std[0, 0] ** 2, est.latent_mean_and_variance(corner)[1][0])
    low, high = display.ax_.get_xlim()
    assert low < X[:, 0].min() and high > X[:, 0].max()
    assert display.ax_.get_xlabel() == "feature 0"


def test_latent_display_takes_names_from_a_table():
    pd = pytest.importorskip("pandas")
    X, y = make_moons(40, noise=0.2, random_state=0)
    table = pd.DataFrame(X, columns=["width", "height"])
    est = EPGaussianProcessClassifier(4.0 * RBF(0.7), optimizer=None).fit(table, y)
    display = LatentDisplay.from_estimator(est, table, grid_resolution=8)
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("width", "height")


def test_latent_display_refuses_what_it_cannot_draw(moons):
    X, y, _ = moons
    wide = EPGaussianProcessClassifier(optimizer=None).fit(np.column_stack([X, X[:, 0]]), y)
    with pytest.raises(ValueError, match="two features"):
        LatentDisplay.from_estimator(wide, np.column_stack([X, X[:, 0]]))
    with pytest.raises(ValueError, match="two features"):
        LatentDisplay.from_estimator(wide, [["red", 1.0, 2.0]])


def test_coefficient_intervals():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 4))
    est = ConvexVariationalLogistic(1.0).fit(X, X[:, 2] > 0)
    display = CoefficientIntervalDisplay.from_estimator(est, top=2, level=0.8)
    ratio = np.abs(np.ravel(est.coef_)) / np.ravel(est.coef_std_)
    top = np.argsort(-ratio)[:2]
    assert display.names == [f"feature {j}" for j in top] and top[0] == 2
    np.testing.assert_array_equal(display.mean, np.ravel(est.coef_)[top])
    bars = display.ax_.collections[0].get_segments()
    np.testing.assert_allclose([bar[:, 0] for bar in bars], est.coef_interval(0.8)[0, top])
    assert [t.get_text() for t in display.ax_.get_yticklabels()] == display.names
    assert display.ax_.get_xlabel() == "coefficient for class True, 80 % interval"
    assert display.ax_.get_title() == "ConvexVariationalLogistic\n2 of 4 shown"
    by_column = CoefficientIntervalDisplay.from_estimator(est, top=2, sort="column")
    assert by_column.names == [f"feature {j}" for j in np.sort(top)]
    ax = plt.subplots()[1]
    assert display.plot(ax=ax) is display and display.ax_ is ax
    with pytest.raises(ValueError, match="3 feature_names for 4 coefficients"):
        CoefficientIntervalDisplay.from_estimator(est, feature_names=["a", "b", "c"])


@pytest.mark.parametrize("n", [5, 40, 400])
def test_labels_of_groups_neither_overlap_nor_leave_the_figure(n):
    mean = np.linspace(-2, 2, n)
    labels = [f"a rather long name of group {k}" for k in range(n)]
    display = GroupEffectsDisplay(mean, np.full(n, 0.5), labels, level=0.5).plot()
    display.figure_.canvas.draw()
    boxes = [t.get_window_extent() for t in display.ax_.get_yticklabels() if t.get_text()]
    assert len(boxes) == (n if n <= 40 else 0)
    assert all(below.y1 <= above.y0 + 1 for below, above in zip(boxes, boxes[1:], strict=False))
    assert all(box.x0 >= 0 for box in boxes)
    bar = display.ax_.collections[0].get_segments()[0]
    np.testing.assert_allclose(bar[:, 0], -2 + 0.5 * np.array([-1, 1]) * 0.6744897501960817)
    assert display.ax_.get_xlabel() == "group effect, 50 % interval"
    assert display.ax_.get_ylabel() == ("group" if n <= 40 else "400 groups")


def test_inclusion_display_draws_the_intervals_of_the_mixture():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(60, 8))
    fixed = dict(slab_variance=1.0)
    reg = SpikeSlabRegressor(**fixed).fit(X, X[:, 2] - X[:, 5] + 0.3 * rng.normal(size=60))
    display = InclusionDisplay.from_estimator(reg, level=0.7)
    lines = display.ax_[1].collections[0].get_segments()
    np.testing.assert_allclose([line[:, 1] for line in lines], reg.coef_interval(0.7)[[2, 5]])
    assert display.ax_[1].get_ylabel() == "coefficient, 70 % interval"
    clf = SpikeSlabClassifier(**fixed).fit(X, X[:, 2] + 0.5 * rng.normal(size=60) > 0)
    display = InclusionDisplay.from_estimator(clf)
    np.testing.assert_array_equal(display.inclusion, clf.inclusion_proba_)
    assert display.coef.shape == (8,)


def test_hyperparameter_display_of_one_coordinate():
    nodes, weights = np.log([[0.5], [1.0], [2.0]]), np.array([0.2, 0.5, 0.3])
    display = HyperparameterDisplay(nodes, weights, ("log_tau",)).plot()
    ends = [path.vertices for path in display.ax_.collections[0].get_paths()]
    np.testing.assert_allclose([e[0, 0] for e in ends], [0.5, 1.0, 2.0])
    np.testing.assert_allclose([e[1, 1] for e in ends], weights)
    assert display.ax_.get_xscale() == "log" and display.ax_.get_xlabel() == "tau"


def test_hyperparameter_display_of_several_coordinates():
    rng = np.random.default_rng(0)
    nodes, weights = rng.normal(size=(6, 3)) * [2.0, 0.1, 1.0], rng.dirichlet(np.ones(6))
    names = "log_variance", "log_length_scale", "logit_label_noise"
    display = HyperparameterDisplay(nodes, weights, names).plot()
    offsets = display.ax_.collections[0].get_offsets()
    np.testing.assert_allclose(offsets[:, 0], np.exp(nodes[:, 0]))  # the two known least
    np.testing.assert_allclose(offsets[:, 1], 1 / (1 + np.exp(-nodes[:, 2])))
    sizes = display.ax_.collections[0].get_sizes()
    np.testing.assert_allclose(sizes / sizes.sum(), weights)
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("variance", "label noise")
    assert display.ax_.get_yscale() == "logit"
    ax = plt.subplots()[1]
    display.parameters = "log_length_scale", "log_variance"
    assert display.plot(ax=ax) is display and display.ax_ is ax
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 1], np.exp(nodes[:, 0]))
    display.parameters = "log_tau", "log_variance"
    with pytest.raises(ValueError, match="parameters must be 2 of"):
        display.plot()
    with pytest.raises(ValueError, match="nothing to draw"):
        HyperparameterDisplay(np.empty((1, 0)), np.ones(1), ()).plot()


def test_hyperparameter_display_of_a_fit():
    rng = np.random.default_rng(1)
    group = rng.integers(10, size=120)
    X = np.column_stack([rng.normal(size=120), group])
    est = HierarchicalEPLogistic(1).fit(X, X[:, 0] + rng.normal(size=120) > 0)
    display = HyperparameterDisplay.from_estimator(est)
    np.testing.assert_array_equal(display.nodes, est.hyper_nodes_)
    assert display.ax_.get_title() == "HierarchicalEPLogistic"


def test_reliability_display_against_counts_by_hand(moons):
    stated = np.array([0.05, 0.15, 0.15, 0.95, 1.0])
    true = np.array([0, 1, 0, 1, 1])
    display = ReliabilityDisplay.from_predictions(stated, true, n_bins=10, level=0.5)
    np.testing.assert_allclose(display.stated, [0.05, 0.15, 0.975])
    np.testing.assert_allclose(display.observed, [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(display.counts, [1, 2, 2])
    np.testing.assert_allclose(display.band[1], 0.6744898 * np.sqrt(0.15 * 0.85 / 2), rtol=1e-6)
    drawn = display.ax_.lines[1].get_xydata()
    np.testing.assert_allclose(drawn, np.column_stack([display.stated, display.observed]))
    X, y, est = moons
    display = ReliabilityDisplay.from_estimator(est, X, y)
    assert display.counts.sum() == 60 and display.ax_.get_xlabel() == "stated probability"


@pytest.mark.parametrize("n_tables", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_bands_hold_calibrated_shares_as_often_as_they_say(n_tables, monkeypatch):
    monkeypatch.setattr(ReliabilityDisplay, "plot", lambda display, **_: display)
    rng = np.random.default_rng(2)
    inside = []
    for _ in range(n_tables):
        stated = rng.uniform(size=800)
        display = ReliabilityDisplay.from_predictions(stated, rng.uniform(size=800) < stated)
        inside.append(np.abs(display.observed - display.stated) < display.band)
    assert abs(np.mean(inside) - 0.9) < 0.03


def test_groups_of_a_float_column_are_named_without_a_point():
    labels = np.array([3.0, 1.5, 1200000.0])
    display = GroupEffectsDisplay(np.arange(3.0), np.full(3, 0.5), labels, level=0.5).plot()
    assert [t.get_text() for t in display.ax_.get_yticklabels()] == ["3", "1.5", "1200000"]


def pupils(n=1200, n_schools=100):
    """A table of pupils in schools in regions, and their answers."""
    rng = np.random.default_rng(5)
    school = rng.integers(n_schools, size=n)
    X = pd.DataFrame({"hours": rng.normal(size=n), "region": school // 10})
    X["school"] = [f"s{k:02d}" for k in school]
    z = rng.normal(size=n_schools)[school] + X["hours"] * (1 + rng.normal(size=n_schools)[school])
    return X, (z + rng.logistic(size=n) > 0).astype(int)


def test_group_effects_furthest_from_zero_are_drawn_under_their_names():
    X, y = pupils()
    kept = dict(hyperparameters="mode", n_partitions=1)
    est = HierarchicalEPLogistic("school", random_slopes=["hours"], **kept)
    est.fit(X.drop(columns="region"), y)
    display = GroupEffectsDisplay.from_estimator(est, effect=1, top=12)
    mean, sd = est.group_effects_[:, 1], est.group_effects_std_[:, 1]
    top = np.argsort(-np.abs(mean / sd))[:12]
    top = top[np.argsort(mean[top])]
    drawn = [t.get_text() for t in display.ax_.get_yticklabels()]
    assert drawn == list(est.group_labels_[top])
    np.testing.assert_allclose(display.ax_.lines[0].get_xdata(), mean[top])
    assert display.ax_.get_title() == "HierarchicalEPLogistic: school\n12 of 100 shown"
    assert display.ax_.get_xlabel() == "effect on the slope of hours, 90 % interval"
    assert display.ax_.get_ylabel() == "school"
    display = GroupEffectsDisplay.from_estimator(est, X.drop(columns="region"), y)
    assert len(display.raw) == 30 and np.corrcoef(display.raw, display.mean)[0, 1] > 0.9
    display = GroupEffectsDisplay.from_estimator(est, top=None)
    assert len(display.mean) == 100 and display.ax_.get_ylabel() == "100 groups"
    assert display.ax_.get_title() == "HierarchicalEPLogistic: school"


def test_group_effects_of_a_list_are_those_of_the_factor_that_was_asked_for():
    X, y = pupils()
    factors = ["region", ("region", "school")]
    slopes = {"region": ["hours"]}
    est = HierarchicalEPLogistic(factors, random_slopes=slopes, hyperparameters="mode").fit(X, y)
    display = GroupEffectsDisplay.from_estimator(est, factor=1, top=5)
    assert display.ax_.get_title() == "HierarchicalEPLogistic: region:school\n5 of 100 shown"
    label = display.ax_.get_yticklabels()[0].get_text()
    assert label.split(":s") == [str(int(label[-2:]) // 10), label[-2:]]
    display = GroupEffectsDisplay.from_estimator(est, factor=-2, effect=-1)
    assert display.ax_.get_xlabel() == "effect on the slope of hours, 90 % interval"
    assert len(display.mean) == 10 and display.factor_name == "region"


@pytest.mark.parametrize("group_column, name", [(None, "groups"), (1, "column 1")])
def test_group_effects_of_factors_without_a_name(group_column, name):
    rng = np.random.default_rng(0)
    group = rng.integers(6, size=90)
    X, y = np.column_stack([rng.normal(size=90), group]), rng.integers(2, size=90)
    beside = group if group_column is None else None
    est = HierarchicalEPLogistic(group_column, refine=False, hyperparameters="mode")
    est.fit(X, y, groups=beside)
    assert GroupEffectsDisplay.from_estimator(est).ax_.get_ylabel() == name


@pytest.mark.parametrize(
    "label",
    [lambda g: ("a", g), lambda g: "s" if g == 0 else g, lambda g: [g]],
    ids=["tuples", "kinds", "rows"],
)
def test_raw_effects_are_of_labels_of_any_kind(label):
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(5), 8)
    X, y = rng.normal(size=(40, 1)), rng.integers(2, size=40)
    groups = [label(g) for g in group.tolist()]
    raw = []
    for own in (group, groups):
        clf = HierarchicalEPLogistic(hyperparameters="mode").fit(X, y, groups=own)
        raw.append(GroupEffectsDisplay.from_estimator(clf, X, y, groups=own).raw)
    assert np.all(np.isfinite(raw[0]))
    np.testing.assert_allclose(np.sort(raw[1]), np.sort(raw[0]), atol=1e-8)


def test_thousands_of_levels_are_drawn_by_the_furthest():
    rng = np.random.default_rng(0)
    G = np.column_stack([rng.integers(2000, size=6000), rng.integers(5, size=6000)])
    z = rng.normal(size=2000)[G[:, 0]] + rng.logistic(size=6000)
    est = HierarchicalEPLogistic(engine="messages", hyperparameters="mode")
    est.fit(np.zeros((6000, 1)), z > 0, groups=G)
    display = GroupEffectsDisplay.from_estimator(est)
    assert len(display.mean) == 30 and display.ax_.get_ylabel() == "factor 0"
    least = np.min(np.abs(display.mean) / display.std)
    ratio = np.abs(est.group_effects_[0] / est.group_effects_std_[0])[:, 0]
    assert np.sum(ratio > least) == 29
    boxes = [t.get_window_extent() for t in display.ax_.get_yticklabels()]
    assert all(low.y1 <= up.y0 + 1 for low, up in zip(boxes, boxes[1:], strict=False))


def test_group_effects_of_one_class_among_three():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=90), rng.integers(8, size=90)])
    est = HierarchicalEPLogistic(1, hyperparameters="mode")
    est.fit(X, rng.choice(["a", "b", "c"], size=90))
    display = GroupEffectsDisplay.from_estimator(est, class_index=2)
    np.testing.assert_array_equal(display.mean, est.group_effects_[2, :, 0])
    assert display.ax_.get_xlabel() == "effect on the intercept, class c, 90 % interval"
    with pytest.raises(ValueError, match="two classes"):
        GroupEffectsDisplay.from_estimator(est, X, np.zeros(90))


def test_reliability_of_several_models_on_one_axes(moons):
    X, y, est = moons
    names = np.array(["no", "yes"])
    plain = LogisticRegression().fit(X, names[y])
    first = ReliabilityDisplay.from_estimator(est, X, y)
    second = ReliabilityDisplay.from_estimator(
        plain, X, names[y], pos_label="no", name="plain", ax=first.ax_
    )
    assert second.ax_ is first.ax_
    labels = [text.get_text() for text in first.ax_.get_legend().get_texts()]
    assert labels == ["90 % band", "EPGaussianProcessClassifier", "plain"]
    colors = [drawn.lines[0].get_color() for drawn in first.ax_.containers]
    assert colors == ["C0", "C1"]
    counts = {text.get_position()[1] for text in first.ax_.texts}
    assert len(counts) == 2 and first.ax_.get_ylim()[0] < min(counts)
    proba = plain.predict_proba(X)[:, 0]
    again = ReliabilityDisplay.from_predictions(proba, names[y], pos_label="no")
    np.testing.assert_array_equal(again.stated, second.stated)
    np.testing.assert_array_equal(again.observed, second.observed)
    with pytest.raises(ValueError, match="pos_label must be one of .*'yes'"):
        ReliabilityDisplay.from_estimator(plain, X, names[y], pos_label="maybe")


def test_reliability_of_one_class_among_three():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(90, 2)), rng.integers(3, size=90)
    est = LogisticRegression().fit(X, y)
    display = ReliabilityDisplay.from_estimator(est, X, y, pos_label=2, n_bins=1)
    np.testing.assert_allclose(display.stated, est.predict_proba(X)[:, 2].mean())
    np.testing.assert_allclose(display.observed, np.mean(y == 2))


def test_numbers_and_not_powers_stand_at_ticks():
    nodes = np.column_stack([np.log([0.3, 0.7, 2.5]), np.array([-3.0, -2.0, -1.0])])
    names = "log_length_scale", "logit_label_noise"
    display = HyperparameterDisplay(nodes, np.full(3, 1 / 3), names).plot()
    display.figure_.canvas.draw()
    for axis in (display.ax_.xaxis, display.ax_.yaxis):
        words = [t.get_text() for t in axis.get_ticklabels(which="both") if t.get_text()]
        assert len(words) >= 2 and all(float(word) >= 0 for word in words)


def steps_before(table):
    """A scaler that keeps names, or not, before the last step."""
    return StandardScaler().set_output(transform="pandas" if table else "default")


@pytest.mark.parametrize("table", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_displays_look_through_pipelines(table):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"])
    y = X["b"] - X["c"] + 0.3 * rng.normal(size=60)
    reg = SpikeSlabRegressor(prior_inclusion=0.5, slab_variance=1.0)
    reg = make_pipeline(steps_before(table), reg).fit(X, y)
    assert list(InclusionDisplay.from_estimator(reg).feature_names) == ["a", "b", "c"]
    names = CoefficientIntervalDisplay.from_estimator(reg, sort="column").names
    assert names == ["a", "b", "c"]
    assert ConvergenceDisplay.from_estimator(reg).ax_.get_title() == "SpikeSlabRegressor"
    nodes = HyperparameterDisplay.from_estimator(reg).nodes
    np.testing.assert_array_equal(nodes, reg[-1].hyper_nodes_)
    nameless = make_pipeline(FunctionTransformer(np.asarray), reg[-1]).fit(X, y)
    names = CoefficientIntervalDisplay.from_estimator(nameless, sort="column").names
    assert names == ["feature 0", "feature 1", "feature 2"]


def test_the_latent_function_of_a_pipeline_is_drawn_over_the_columns_that_go_in(moons):
    X, y, est = moons
    model = make_pipeline(StandardScaler(), est).fit(10 * X, y)
    display = LatentDisplay.from_estimator(model, 10 * X, y, grid_resolution=6)
    corner = [[display.x0[0, 0], display.x1[0, 0]]]
    np.testing.assert_allclose(display.proba[0, 0], model.predict_proba(corner)[0, 1])
    scaled = model[:-1].transform(corner)
    variance = est.latent_mean_and_variance(scaled)[1]
    np.testing.assert_allclose(display.std[0, 0] ** 2, variance)
    assert [t.get_text() for t in display.ax_.get_legend().get_texts()] == ["class 0", "class 1"]
    labels = [ax.get_ylabel() for ax in display.figure_.axes]
    assert "probability of class 1" in labels
    assert ReliabilityDisplay.from_estimator(model, 10 * X, y).estimator_name == type(est).__name__


def test_groups_and_columns_of_a_pipeline_have_their_names():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"hours": rng.normal(size=120), "school": rng.integers(8, size=120)})
    y = rng.integers(2, size=120)
    last = HierarchicalEPLogistic(1, random_slopes=[0], hyperparameters="mode")
    keep = FunctionTransformer(np.asarray, feature_names_out="one-to-one")
    model = make_pipeline(keep, last).fit(X, y)
    display = GroupEffectsDisplay.from_estimator(model, effect=1)
    assert display.ax_.get_ylabel() == "school"
    assert display.ax_.get_xlabel() == "effect on the slope of hours, 90 % interval"
    assert CoefficientIntervalDisplay.from_estimator(model).names == ["hours"]
    raw = GroupEffectsDisplay.from_estimator(model, X, y).raw
    np.testing.assert_allclose(raw, GroupEffectsDisplay.from_estimator(last, X.values, y).raw)


def test_coefficients_of_one_class_among_three_beside_groups():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"school": rng.integers(8, size=90), "hours": rng.normal(size=90)})
    est = HierarchicalEPLogistic("school", hyperparameters="mode")
    est.fit(X, rng.choice(["a", "b", "c"], size=90))
    display = CoefficientIntervalDisplay.from_estimator(est, class_index=1)
    assert display.names == ["hours"]
    assert display.ax_.get_xlabel() == "coefficient for class b, 90 % interval"
    np.testing.assert_array_equal(display.mean, est.coef_[1])


def test_without_matplotlib_the_error_says_what_to_install(moons, monkeypatch):
    *_, est = moons
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "sklearn-ep\[plot\]"'):
        ConvergenceDisplay.from_estimator(est)
    inclusion = InclusionDisplay(np.ones(2), np.ones(2), np.ones((2, 2)))
    with pytest.raises(ImportError, match=r"sklearn-ep\[plot\]"):
        inclusion.plot()


@pytest.mark.parametrize(
    "stated, true, message",
    [
        ([True, False], [0.3, 0.8], "True or False"),  # the two exchanged
        ([0.3, 0.8], [1, 2], "pos_label"),
        ([0.3, 0.8], ["no", "yes"], "pos_label"),
        ([0.3, np.nan], [0, 1], "between 0 and 1"),
        ([0.3, 1.5], [0, 1], "between 0 and 1"),
        ([], [], "one for each row"),
    ],
)
def test_reliability_refuses_what_is_no_probability_and_no_answer(stated, true, message):
    with pytest.raises(ValueError, match=message):
        ReliabilityDisplay.from_predictions(stated, true)


def test_displays_refuse_labels_that_were_not_in_the_fit(moons):
    X, y, est = moons
    for display in (ReliabilityDisplay, LatentDisplay):
        with pytest.raises(ValueError, match="not seen in fit"):
            display.from_estimator(est, X, y + 5)


def test_the_legend_of_a_latent_function_names_rings_and_inducing_points():
    X, y = make_moons(60, noise=0.2, random_state=0)
    est = EPGaussianProcessClassifier(
        4.0 * RBF(0.7), optimizer=None, method="sparse", n_inducing=6, random_state=0
    ).fit(X, y)
    display = LatentDisplay.from_estimator(est, X, y, marked=y == 1, grid_resolution=8)
    words = [text.get_text() for text in display.ax_.get_legend().get_texts()]
    assert words == ["class 0", "class 1", "marked", "inducing point"]
    alone = LatentDisplay.from_estimator(est, X, grid_resolution=8)
    assert [t.get_text() for t in alone.ax_.get_legend().get_texts()] == ["inducing point"]


def test_what_a_display_is_asked_to_draw_must_be_there(moons):
    X, y, _ = moons
    linear = ConvexVariationalLogistic().fit(X, y)
    groups = np.arange(60) % 6
    est = HierarchicalEPLogistic(refine=False).fit(X, y, groups=groups)
    for display, model, wrong in (
        (CoefficientIntervalDisplay, linear, dict(class_index=1)),
        (CoefficientIntervalDisplay, linear, dict(top=0)),
        (GroupEffectsDisplay, est, dict(factor=1)),
        (GroupEffectsDisplay, est, dict(effect=1)),
        (GroupEffectsDisplay, est, dict(class_index=1)),
        (GroupEffectsDisplay, est, dict(top=-1)),
        (GroupEffectsDisplay, est, dict(level=90)),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            display.from_estimator(model, **wrong)
    for half in (dict(X=X), dict(y=y)):
        with pytest.raises(ValueError, match="both X and y"):
            GroupEffectsDisplay.from_estimator(est, **half)


def test_a_search_is_told_to_give_its_best_estimator(moons):
    X, y, est = moons
    search = GridSearchCV(est, {"damping": [0.7]}, cv=2).fit(X, y)
    with pytest.raises(TypeError, match="such as its best_estimator_"):
        ConvergenceDisplay.from_estimator(search)
    best = ConvergenceDisplay.from_estimator(search.best_estimator_)
    assert best.ax_.get_title() == "EPGaussianProcessClassifier"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param([80, 83], marks=pytest.mark.slow),
        [0, 1, 2],
        np.arange(164, 200),
        [5, 60, 61, 62, 199],
    ],
)
def test_names_of_neighbouring_features_do_not_overlap(place):
    inclusion = np.zeros(200)
    inclusion[place] = 0.9
    names = [f"gene {k}" for k in range(200)]
    display = InclusionDisplay(inclusion, inclusion, np.zeros((200, 2)), feature_names=names).plot()
    display.figure_.canvas.draw()
    for ax in display.ax_[1:]:
        shown = ax.get_xticklabels()
        assert [text.get_text() for text in shown] == [names[k] for k in place]
        boxes = [text.get_window_extent() for text in shown]
        assert all(a.x1 <= b.x0 + 1 for a, b in zip(boxes, boxes[1:], strict=False))
        np.testing.assert_array_equal(ax.get_xticks(minor=True), place)
        low, high = ax.get_xlim()
        assert low <= 0 and high >= 199


def test_groups_alone_have_no_coefficients_to_draw():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"group": rng.choice(list("abcdef"), 60)})
    clf = HierarchicalEPLogistic("group", hyperparameters="mode").fit(X, rng.random(60) < 0.5)
    with pytest.raises(ValueError, match="nothing to draw: the model has no column"):
        CoefficientIntervalDisplay.from_estimator(clf)
