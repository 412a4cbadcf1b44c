"""Parts of a stacked classifier: the default ones, and how each predicts rows it has not seen."""

import numpy as np
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.utils import check_random_state
from sklearn.utils.validation import has_fit_parameter

from .._estimator.left_out import leave_one_out
from .._estimator.pipelines import last_step, rows_at_last_step
from ..convex import ConvexVariationalLogistic
from ..gaussian_process import EPGaussianProcessClassifier


def default_parts(X, random_state):
    """Return [(name, classifier)]: a linear model, and beside it a Gaussian process for dense X."""
    seed = check_random_state(random_state).randint(np.iinfo(np.int32).max)
    linear = ("linear", ConvexVariationalLogistic(random_state=seed))
    if sp.issparse(X):
        return [linear]
    return [("gaussian_process", EPGaussianProcessClassifier(random_state=seed)), linear]


def fit_part(name, part, X, y, sample_weight, cv):
    """Return a fitted copy of a part and the probabilities (n,) of labels that are left out.

    One row is left out at a time, or a fold of `cv`; rows of weight zero are nan.
    """
    weights = _weight_arguments(name, part, sample_weight)
    fitted = clone(part).fit(X, y, **weights)
    if cv is None:
        return fitted, leave_one_out(f"the part {name!r}", fitted, y)
    proba = cross_val_predict(part, X, y, cv=cv, params=weights, method="predict_proba")
    return fitted, proba[np.arange(len(y)), np.searchsorted(fitted.classes_, y)]


def proba_interval(name, part, X, level):
    """Return the intervals of class probabilities of a fitted part."""
    last = last_step(part)
    if not hasattr(last, "predict_proba_interval"):
        raise ValueError(f"the part {name!r} has no predict_proba_interval.")
    return last.predict_proba_interval(rows_at_last_step(part, X), level)


def _weight_arguments(name, part, sample_weight):
    """Return the keywords by which `part.fit` takes sample_weight."""
    if sample_weight is None:
        return {}
    if not has_fit_parameter(last_step(part), "sample_weight"):
        raise ValueError(f"the part {name!r} takes no sample_weight: leave out one of the two.")
    step = f"{part.steps[-1][0]}__" if isinstance(part, Pipeline) else ""
    return {f"{step}sample_weight": sample_weight}
