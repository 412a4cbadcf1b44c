"""Displays hold what they draw, draw where they are told, and label their axes."""

import matplotlib
import numpy as np
import pytest
from sklearn.datasets import make_moons
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier
from sklearn_ep.inspection import CoefficientIntervalDisplay, ConvergenceDisplay, LatentDisplay

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


def test_coefficient_intervals():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 4))
    est = ConvexVariationalLogistic(1.0).fit(X, X[:, 2] > 0)
    display = CoefficientIntervalDisplay.from_estimator(est, n_largest=2, level=0.8)
    ratio = np.abs(np.ravel(est.coef_)) / np.ravel(est.coef_std_)
    top = np.sort(np.argsort(-ratio)[:2])
    assert display.names == [f"feature {j}" for j in top] and 2 in top
    np.testing.assert_array_equal(display.mean, np.ravel(est.coef_)[top])
    bars = display.ax_.collections[0].get_segments()
    half = 1.2815515655446004 * np.ravel(est.coef_std_)[top]
    np.testing.assert_allclose([bar[1, 0] - bar[0, 0] for bar in bars], 2 * half)
    assert [t.get_text() for t in display.ax_.get_yticklabels()] == display.names
    assert display.ax_.get_xlabel() == "coefficient, 80 % interval"
    ax = plt.subplots()[1]
    assert display.plot(ax=ax) is display and display.ax_ is ax
    with pytest.raises(ValueError, match="3 feature_names for 4 coefficients"):
        CoefficientIntervalDisplay.from_estimator(est, feature_names=["a", "b", "c"])
