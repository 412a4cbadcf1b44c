"""scikit-learn's own checks on several settings of every estimator; none is expected to fail."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier

GP = EPGaussianProcessClassifier
CVL = ConvexVariationalLogistic
SETTINGS = [
    GP(),
    GP(optimizer=None, likelihood="logit"),
    GP(optimizer=None, damping=0.3),
    GP(optimizer=None, damping=1.0, acceleration=None),
    GP(method="dense", damping=1.0, n_restarts_optimizer=1, random_state=0),
    CVL(),
    CVL(bound="local", damping=0.5),
    CVL(prior="laplace"),
    CVL(solver="cg", variance="monte_carlo", random_state=0),
    CVL(solver="dual", variance="exact"),
    CVL(learn_prior=True, class_weight="balanced"),
    CVL(variance="calibrated", random_state=0),
    CVL(variance="lanczos", random_state=0),
]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(SETTINGS)
def test_common(estimator, check):
    check(estimator)
