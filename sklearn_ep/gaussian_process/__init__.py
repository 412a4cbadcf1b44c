"""Gaussian-process classification: dense or through inducing points."""

from ._classifier import EPGaussianProcessClassifier
from ._relaxed import RelaxedEPClassifier

__all__ = ["EPGaussianProcessClassifier", "RelaxedEPClassifier"]

# pickles and documentation name a class where users import it from
EPGaussianProcessClassifier.__module__ = "sklearn_ep"
RelaxedEPClassifier.__module__ = "sklearn_ep"
