"""One classifier out of several: Bayesian stacking by leave-one-out probabilities."""

from ._classifier import BayesianStackingClassifier

__all__ = ["BayesianStackingClassifier"]

# pickles and documentation name a class where users import it from
BayesianStackingClassifier.__module__ = "sklearn_ep"
