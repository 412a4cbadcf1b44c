"""Gaussian-process classification: dense or through inducing points."""

# A worker sends a class by value, as another one, where the module that it names is not loaded.
from .. import kernels as kernels
from ._classifier import EPGaussianProcessClassifier
from ._relaxed import RelaxedEPClassifier

__all__ = ["EPGaussianProcessClassifier", "RelaxedEPClassifier"]

# pickles and documentation name a class where users import it from
EPGaussianProcessClassifier.__module__ = "sklearn_ep"
RelaxedEPClassifier.__module__ = "sklearn_ep"
