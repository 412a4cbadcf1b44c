"""The last step of a pipeline holds what was learned, in the columns that earlier steps made."""

import numpy as np
from sklearn.pipeline import Pipeline


def last_step(estimator):
    """Return the last step of a pipeline, and any other estimator as it is."""
    while isinstance(estimator, Pipeline):
        estimator = estimator[-1]
    return estimator


def rows_at_last_step(estimator, X):
    """Return rows as the last step of a fitted pipeline receives them."""
    while isinstance(estimator, Pipeline):
        X = estimator[:-1].transform(X) if len(estimator) > 1 else X
        estimator = estimator[-1]
    return X


def names_at_last_step(estimator):
    """Return the names (d,) of the columns that the last step has seen, None if there are none."""
    known = getattr(last_step(estimator), "feature_names_in_", None)
    if known is not None or not isinstance(estimator, Pipeline) or len(estimator) == 1:
        return known
    try:
        return estimator[:-1].get_feature_names_out()
    except AttributeError:  # a step cannot say what it makes
        return None


def check_rows_of_fit(name, n, y):
    """Raise a ValueError unless y has as many labels as the fit, here called `name`, had rows."""
    if len(y) != n:
        raise ValueError(f"{name} was fitted to {n} rows, y has {len(y)}.")


def leave_one_out(name, classifier, y):
    """Return the probability (n,) that a fitted classifier gives each label, its row left out.

    Raises
    ------
    ValueError
        If the classifier, here called `name`, has no `loo_proba_`, or that is of other rows.
    """
    proba = getattr(last_step(classifier), "loo_proba_", None)
    if proba is None:
        raise ValueError(
            f"{name} has no loo_proba_, leave-one-out probabilities of its training rows: set cv=5 "
            "to leave out folds."
        )
    check_rows_of_fit(name, proba.shape[-1], y)
    if proba.ndim == 1:
        return proba
    # one class against the rest: each problem gives its own label, this class or another
    own = classifier.classes_[:, None] == y
    of_class = np.where(own, proba, 1.0 - proba)
    return of_class.T[own.T] / of_class.sum(axis=0)
