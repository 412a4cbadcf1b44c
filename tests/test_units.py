"""What is learned does not depend on the units of the columns, from 1e-8 to 1e8, in any setting.

`tests/convex/test_units.py` asks the linear models.
"""

import warnings

import numpy as np
import pytest
from sklearn.base import clone, is_regressor
from sklearn.exceptions import ConvergenceWarning

from sklearn_ep import (
    BayesianStackingClassifier,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)) + [0.0, 1.0, -3.0]
Z = X[:, 0] - X[:, 1] ** 2 / 2 + 0.5 * RNG.logistic(size=60)
FACTORS = np.column_stack([np.arange(60) % 6, RNG.integers(4, size=60)])


def gp(**settings):
    return EPGaussianProcessClassifier(random_state=0, **settings)


def relaxed(**settings):
    return RelaxedEPClassifier(random_state=0, **settings)


def classes(n):
    """Return labels of n classes of about the same size."""
    return np.digitize(Z, np.quantile(Z, np.arange(1, n) / n))


def rows(est, A, y):
    return est.fit(A, y)


def parts(est, A, y):
    return est.fit([(A[::2], y[::2]), (A[1::2], y[1::2])])


def stream(est, A, y):
    return est.partial_fit(A[:30], y[:30], classes=np.unique(y)).partial_fit(A[30:], y[30:])


POINTS = dict(method="sparse", n_inducing=8)
# estimator, number of classes, and how it is given the rows
SETTINGS = {
    "process": (gp(), 2, rows),
    "process, mode": (gp(hyperparameters="mode"), 2, rows),
    "process, logit, power": (gp(likelihood="logit", power=0.5, hyperparameters="mode"), 2, rows),
    "process, three classes": (gp(), 3, rows),
    "process, one against the rest": (gp(multi_class="one_vs_rest"), 3, rows),
    "process, points": (gp(**POINTS), 2, rows),
    "process, points, mode": (gp(**POINTS, hyperparameters="mode"), 2, rows),
    "process, points, classes": (gp(**POINTS, multi_class="one_vs_rest"), 3, rows),
    "process, minibatches": (gp(**POINTS, batch_size=20, max_iter=5), 2, rows),
    "process, partitions": (gp(**POINTS), 2, parts),
    "process, stream": (gp(n_inducing=8), 2, stream),
    "wrong labels": (relaxed(), 2, rows),
    "wrong labels, mode": (relaxed(hyperparameters="mode"), 2, rows),
    "wrong labels, power": (relaxed(rule="power", hyperparameters="mode"), 2, rows),
    "wrong labels, classes": (relaxed(hyperparameters="mode"), 3, rows),
    "wrong labels, partitions": (relaxed(**POINTS), 2, parts),
    "sparse": (SpikeSlabRegressor(random_state=0), 0, rows),
    "sparse, mode": (SpikeSlabRegressor(hyperparameters="mode"), 0, rows),
    "sparse, double loop": (SpikeSlabRegressor(algorithm="double_loop"), 0, rows),
    "sparse, partitions": (SpikeSlabRegressor(random_state=0), 0, parts),
    "sparse classes": (SpikeSlabClassifier(), 2, rows),
    "stack": (BayesianStackingClassifier(random_state=0), 2, rows),
    "stack, classes": (BayesianStackingClassifier(random_state=0), 3, rows),
}


QUICK = "process", "process, points", "process, stream", "wrong labels, mode"
QUICK += "sparse", "sparse classes", "one factor", "power"


def mostly_nightly(names):
    """Return the names, those that are not quick for the nightly job."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def predicted(est, A):
    """Return what a fit says of rows, in standard deviations of the response or as it is."""
    if not is_regressor(est):
        return est.predict_proba(A)
    return np.column_stack(est.predict(A, return_std=True)) / Z.std()


def in_unit(name, unit, first=None, **settings):
    """Return predictions of a fit to columns in a unit, after a first one in another if given."""
    est, n_classes, give = SETTINGS[name]
    est = clone(est).set_params(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)
        y = classes(n_classes) if n_classes else Z
        if first is not None:
            give(est, first * X, y)
        return predicted(give(est, unit * X, y), unit * X)


@pytest.mark.parametrize("name", mostly_nightly(SETTINGS))
def test_predictions_are_the_same_in_any_unit(name):
    one = in_unit(name, 1.0)
    for unit in (1e-8, 1e8):
        np.testing.assert_allclose(in_unit(name, unit), one, atol=1e-4)


WARM = "process, mode", "process, points", "wrong labels"
# an average begins at the mode as well, and partitions go through the same points
WARM_NIGHTLY = "process, points, mode", "process, partitions"
WARM_NIGHTLY += "wrong labels, mode", "wrong labels, partitions"


@pytest.mark.parametrize(
    "name", [*WARM, *(pytest.param(n, marks=pytest.mark.slow) for n in WARM_NIGHTLY)]
)
def test_a_warm_start_in_another_unit_ends_where_a_cold_one_does(name):
    cold = in_unit(name, 1.0)
    for first in (1e-3, 1e3):
        warm = in_unit(name, 1.0, first, warm_start=True)
        np.testing.assert_allclose(warm, cold, atol=1e-3)


GROUPED = {
    "one factor": (HierarchicalEPLogistic([0]), 2),
    "no factor": (HierarchicalEPLogistic(), 2),
    "partitions": (HierarchicalEPLogistic(0, n_partitions=2), 2),
    "laplace": (HierarchicalEPLogistic(0, engine="laplace"), 2),
    "power": (HierarchicalEPLogistic(0, power=0.5), 2),
    "two factors": (HierarchicalEPLogistic([0, 1]), 2),
    "messages": (HierarchicalEPLogistic([0, 1], engine="messages"), 2),
    "three classes": (HierarchicalEPLogistic(0), 3),
}


@pytest.mark.parametrize("name", mostly_nightly(GROUPED))
def test_groups_are_the_same_in_any_unit_that_the_prior_is_told(name):
    est, n_classes = GROUPED[name]

    def proba(unit):
        taken = np.size(est.group_column) if est.group_column is not None else 0
        table = np.column_stack([FACTORS[:, :taken], unit * X])
        est.set_params(prior_scale=np.full(3, 2.5 / unit))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", UserWarning)
            return est.fit(table, classes(n_classes)).predict_proba(table)

    one = proba(1.0)
    for unit in (1e-8, 1e8):
        np.testing.assert_allclose(proba(unit), one, atol=1e-4)
