"""What a fitted classifier says of labels of its training rows when their rows are left out."""

import numpy as np

from .pipelines import last_step


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
    if proba.shape[-1] != len(y):
        raise ValueError(f"{name} was fitted to {proba.shape[-1]} rows, y has {len(y)}.")
    if proba.ndim == 1:
        return proba
    # one class against the rest: each problem gives its own label, this class or another
    own = classifier.classes_[:, None] == y
    of_class = np.where(own, proba, 1.0 - proba)
    return of_class.T[own.T] / of_class.sum(axis=0)
