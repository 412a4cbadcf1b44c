"""scikit-learn's own checks on several settings of every estimator; none is expected to fail."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_ep import EPGaussianProcessClassifier, HierarchicalEPLogistic

GP = EPGaussianProcessClassifier
SETTINGS = [
    GP(),
    GP(optimizer=None, likelihood="logit"),
    GP(optimizer=None, damping=0.3),
    GP(optimizer=None, damping=1.0, acceleration=None),
    GP(method="dense", damping=1.0, n_restarts_optimizer=1, random_state=0),
    HierarchicalEPLogistic(),
    HierarchicalEPLogistic(n_partitions=3, damping=0.5),
    HierarchicalEPLogistic(engine="laplace"),
    HierarchicalEPLogistic(engine="importance", max_iter=10, random_state=0),
    HierarchicalEPLogistic(refine=False, fit_intercept=False, prior_scale=1.0),
]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(SETTINGS)
def test_common(estimator, check):
    check(estimator)
