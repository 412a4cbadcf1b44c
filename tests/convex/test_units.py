"""Learned priors do not depend on the units of the columns, whatever learns them."""

import itertools
import warnings

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import ConvexVariationalLogistic, ConvexVariationalRegressor

X, Y = load_iris(return_X_y=True)
SAMPLED = dict(variance="calibrated", random_state=0)
LAPLACE = dict(prior="laplace", laplace_scale="learn")
GROUPS = dict(prior_groups=[0, 0, 1, 1])
SETTINGS = {
    "joint": dict(classes=3),
    "joint, sampled": dict(classes=3, multi_class="joint", **SAMPLED),
    "one against the rest": dict(classes=3, multi_class="one_vs_rest"),
    "one against the rest, sampled": dict(classes=3, **SAMPLED),
    "one against the rest, partitions": dict(classes=3, multi_class="one_vs_rest", n_partitions=2),
    "default": {},
    "mode": dict(hyperparameters="mode"),
    "sampled": SAMPLED,
    "monte carlo": dict(variance="monte_carlo", random_state=0),
    "lanczos": dict(variance="lanczos", random_state=0),
    "partitions": dict(n_partitions=2),
    "partitions, sampled": dict(n_partitions=2, **SAMPLED),
    "laplace": LAPLACE,
    "laplace, mode": dict(hyperparameters="mode", **LAPLACE),
    "laplace, sampled": LAPLACE | SAMPLED,
    "groups": GROUPS,
    "groups, sampled": GROUPS | SAMPLED,
    "given proportions": dict(prior_variance=[1.0, 2.0, 3.0, 4.0], learn_prior=True, **SAMPLED),
}


REST = "one against the rest"
LONG = "joint, sampled", f"{REST}, partitions", f"{REST}, sampled"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SETTINGS]
)
def test_predictions_are_the_same_in_any_unit(name):
    setting = dict(SETTINGS[name])
    rows = np.flatnonzero(Y >= 3 - setting.pop("classes", 2))
    rows = rows[::4] if name in ("joint", "one against the rest") else rows

    def proba(unit):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            est = ConvexVariationalLogistic(**setting).fit(unit * X[rows], Y[rows])
        return est.predict_proba(unit * X[rows])

    one = proba(1.0)
    # the evidence is flat for sampled classes: rounding decides where on it the search ends
    tolerance = 0.06 if name == "joint, sampled" else 1e-4
    for unit in (1e-8, 1e8):
        np.testing.assert_allclose(proba(unit), one, atol=tolerance)


@pytest.mark.parametrize(
    "rows, variance",
    [*itertools.product(["whole", "partitions"], ["exact", "monte_carlo"]), ("batches", "exact")],
)
def test_regressions_are_the_same_in_any_unit(rows, variance):
    target = X[:, 0] + X[:, 1] * X[:, 2]
    est = ConvexVariationalRegressor(variance=variance, random_state=0)

    def predicted(unit, of_target):
        A, t = unit * X, of_target * target
        if rows == "whole":
            est.fit(A, t)
        elif rows == "partitions":
            est.fit([(A[:40], t[:40]), (A[40:], t[40:])])
        else:
            est.fit(A[:40], t[:40]).partial_fit(A[40:], t[40:])
        return est.predict(A, return_std=True)

    mean, std = predicted(1.0, 1.0)
    for unit, of_target in ((1e-8, 1.0), (1e8, 1e8), (1e3, 1e-8)):
        other = predicted(unit, of_target)
        np.testing.assert_allclose(other[0] / of_target, mean, atol=1e-3 * std.mean())
        np.testing.assert_allclose(other[1] / of_target, std, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.*StandardScaler:UserWarning")
def test_a_column_of_seconds_gives_a_finite_fit():
    seconds = 1.7e9 + 1e7 * np.random.default_rng(0).random(len(X))
    est = ConvexVariationalLogistic().fit(np.column_stack([X, seconds]), Y)
    assert np.all(np.isfinite(est.predict_proba(np.column_stack([X, seconds]))))


@pytest.mark.parametrize("unit", [1e7, 1e8])
def test_variances_that_leave_double_precision_are_an_error_that_says_so(unit):
    with pytest.raises(ValueError, match="columns of X"):
        ConvexVariationalLogistic(1.0).fit(unit * X, Y)


def test_columns_beyond_double_precision_are_named_in_partitions_too():
    for unit, parts in ((1e200, None), (1e200, 2), (1e35, 2)):
        with pytest.raises(ValueError, match="X has a largest absolute value .* in column 0"):
            ConvexVariationalLogistic(n_partitions=parts).fit(unit * X[50:], Y[50:])
