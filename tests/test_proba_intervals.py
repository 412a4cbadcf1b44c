"""Intervals of class probabilities: those of joint draws, exact where they can be, calibrated."""

import numpy as np
import pytest
from scipy.special import expit, logit, ndtr, ndtri
from sklearn.datasets import load_iris
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
)

RNG = np.random.RandomState(0)
X = RNG.randn(90, 3)
TWO = (X[:, 0] + 0.5 * RNG.randn(90) > 0).astype(int)
THREE = TWO + (X[:, 1] > 0.3)
GROUPS = RNG.randint(0, 9, 90)
FIXED = dict(kernel=2.0 * RBF(1.5), optimizer=None)
NEW = 1.5 * RNG.randn(12, 3)
CASES = {
    "average of a Gaussian process": (EPGaussianProcessClassifier(), TWO),
    "classes of a Gaussian process": (EPGaussianProcessClassifier(**FIXED), THREE),
    "each class against the rest": (
        EPGaussianProcessClassifier(multi_class="one_vs_rest", **FIXED),
        THREE,
    ),
    "labels that may be wrong": (RelaxedEPClassifier(), TWO),
    "observed labels": (RelaxedEPClassifier(predict_clean=False), TWO),
    "linear": (ConvexVariationalLogistic(), TWO),
    "linear, classes": (ConvexVariationalLogistic(), THREE),
    "few columns": (SpikeSlabClassifier(), TWO),
    "groups": (HierarchicalEPLogistic(), TWO),
    "groups, classes": (HierarchicalEPLogistic(), THREE),
}


def fitted(name):
    est, y = CASES[name]
    own = [GROUPS] if name.startswith("groups") else []
    rows = [np.r_[GROUPS[:8], [99] * 4]] if own else []
    est.fit(X, y, **dict(zip(["groups"], own, strict=False)))
    return est, dict(zip(["groups"], rows, strict=False))


@pytest.mark.parametrize("name", CASES)
def test_draws_fall_within_as_often_as_promised(name):
    est, groups = fitted(name)
    interval = est.predict_proba_interval(NEW, level=0.8, **groups)
    draws = est.sample_proba(NEW, n_samples=8000, random_state=1, **groups)
    if len(est.classes_) == 2:
        interval, draws = interval[:, None], draws[:, :, 1:]
    assert interval.shape == (12, draws.shape[2], 2)
    assert np.all(interval[..., 0] <= interval[..., 1])
    assert interval.min() >= 0.0 and interval.max() <= 1.0
    below = (draws < interval[..., 0]).mean(axis=0)
    above = (draws > interval[..., 1]).mean(axis=0)
    # draws of few columns have the spike and slab itself, probabilities and intervals its moments
    each, together = (0.05, 0.015) if name == "few columns" else (0.02, 0.005)
    for tail in (below, above):
        np.testing.assert_allclose(tail, 0.1, atol=each)
        np.testing.assert_allclose(tail.mean(), 0.1, atol=together)


@pytest.mark.parametrize("likelihood, link", [("probit", ndtr), ("logit", expit)])
def test_ends_are_the_link_at_quantiles_of_one_normal(likelihood, link):
    est = EPGaussianProcessClassifier(likelihood=likelihood, **FIXED).fit(X, TWO)
    mean, std = est.latent_mean_and_variance(NEW)[0], np.sqrt(est.latent_mean_and_variance(NEW)[1])
    expected = link(np.column_stack([mean - ndtri(0.95) * std, mean + ndtri(0.95) * std]))
    np.testing.assert_allclose(est.predict_proba_interval(NEW), expected, rtol=1e-8)


@pytest.mark.parametrize("likelihood", ["probit", "logit"])
def test_points_at_which_no_class_has_a_probability_are_counted(likelihood):
    """Far from all rows each of many classes may be ruled out, one against the rest."""
    kernel = 1e6 * RBF(0.1)
    model = EPGaussianProcessClassifier(
        kernel, optimizer=None, likelihood=likelihood, multi_class="one_vs_rest"
    )
    model.fit(X, THREE)
    interval = model.predict_proba_interval([[9.0, 9.0, 9.0]])[0]
    draws = model.sample_proba([[9.0, 9.0, 9.0]], 2000, random_state=0)[:, 0]
    shares = np.mean((draws >= interval[:, 0]) & (draws <= interval[:, 1]), axis=0)
    assert np.all(shares > 0.9)


def test_ends_are_quantiles_of_the_average():
    """The nodes fitted one by one: the mixture of their normals has the levels at the ends.

    The sites of the lighter nodes of an average are found less exactly than those of a fit.
    """
    average = EPGaussianProcessClassifier(hyperparameters="integrate", tol=1e-8).fit(X, TWO)
    ends = ndtri(average.predict_proba_interval(NEW))
    below = np.zeros((12, 2))
    for theta, weight in zip(average.hyper_theta_, average.hyper_weights_, strict=True):
        kernel = average.kernel_.clone_with_theta(theta)
        node = EPGaussianProcessClassifier(kernel, optimizer=None, tol=1e-8).fit(X, TWO)
        mean, var = node.latent_mean_and_variance(NEW)
        below += weight * ndtr((ends - mean[:, None]) / np.sqrt(var)[:, None])
    assert len(average.hyper_weights_) > 3
    np.testing.assert_allclose(below, np.tile([0.05, 0.95], (12, 1)), atol=2.5e-3)


@pytest.mark.slow
def test_the_true_probability_is_covered():
    rng, inside = np.random.RandomState(3), []
    for _ in range(300):
        rows, coef = rng.randn(60, 4), rng.randn(4)
        y = rng.rand(40) < expit(rows[:40] @ coef)
        est = ConvexVariationalLogistic(prior_variance=1.0, fit_intercept=False)
        lower, upper = est.fit(rows[:40], y).predict_proba_interval(rows[40:], level=0.8).T
        truth = expit(rows[40:] @ coef)
        inside.append(np.mean((lower <= truth) & (truth <= upper)))
    error = np.std(inside) / np.sqrt(len(inside))
    assert error < 0.012
    assert abs(np.mean(inside) - 0.8) < 3.0 * error


def test_a_new_group_is_known_least():
    est = HierarchicalEPLogistic().fit(X, TWO, groups=GROUPS)
    seen, new, population = (
        np.diff(est.predict_proba_interval(np.zeros((1, 3)), **more))[0, 0]
        for more in (
            dict(groups=[GROUPS[0]]),
            dict(groups=[99]),
            dict(groups=[GROUPS[0]], kind="population"),
        )
    )
    assert seen < new == population


def test_a_stack_weighs_the_intervals_of_its_parts():
    rows, y = load_iris(return_X_y=True)
    rows, y = rows[y > 0][::2, :2], y[y > 0][::2]
    gp = make_pipeline(StandardScaler(), EPGaussianProcessClassifier(**FIXED))
    parts = [("gp", gp), ("linear", ConvexVariationalLogistic())]
    stack = BayesianStackingClassifier(parts).fit(rows, y)
    first, second = stack.estimators_
    scaled = first[0].transform(rows)
    expected = stack.weights_[0] * first[-1].predict_proba_interval(scaled, 0.5)
    expected = expected + stack.weights_[1] * second.predict_proba_interval(rows, 0.5)
    np.testing.assert_allclose(stack.predict_proba_interval(rows, 0.5), expected)


@pytest.mark.parametrize("y", [TWO, THREE])
def test_a_part_without_intervals_is_as_sure_as_the_others(y):
    parts = [(str(a), EPGaussianProcessClassifier(a * RBF(2.0), optimizer=None)) for a in (1, 4)]
    parts += [("plain", LogisticRegression())]
    stack = BayesianStackingClassifier(parts, cv=3).fit(X[:45], y[:45])
    plain = stack.estimators_.pop().predict_proba(NEW)
    proba = [part.predict_proba(NEW) for part in stack.estimators_]
    ends = [part.predict_proba_interval(NEW, 0.6) for part in stack.estimators_]
    if len(stack.classes_) == 2:
        plain, proba = plain[:, 1], [p[:, 1] for p in proba]
    first, second, third = stack.weights_
    apart = [logit(e) - logit(p)[..., None] for e, p in zip(ends, proba, strict=True)]
    mean = (first * apart[0] + second * apart[1]) / (first + second)
    expected = third * expit(logit(plain)[..., None] + mean)
    stack.estimators_.append(parts[-1][1].fit(X[:45], y[:45]))
    expected += first * ends[0] + second * ends[1]
    np.testing.assert_allclose(stack.predict_proba_interval(NEW, 0.6), expected)


def test_parts_that_all_lack_intervals_are_named():
    stack = BayesianStackingClassifier([("plain", LogisticRegression())], cv=3).fit(X, TWO)
    with pytest.raises(
        ValueError, match=r"none of the parts \['plain'\] has a predict_proba_inter"
    ):
        stack.predict_proba_interval(NEW)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, np.nan])
def test_levels_are_checked(level):
    for est in (ConvexVariationalLogistic(), HierarchicalEPLogistic()):
        with pytest.raises(ValueError, match="level"):
            est.fit(X, TWO).predict_proba_interval(NEW, level=level)
