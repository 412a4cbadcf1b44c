"""Which labels to look at again: rows by the probability that their label is wrong."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn import get_config
from sklearn.model_selection import cross_val_predict
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from .._estimator.annotations import RowsLike
from .._estimator.checks import check_seen
from .._estimator.pipelines import check_rows_of_fit, leave_one_out
from .._estimator.summary import Table
from ._drawing import step_with


def review_list(
    estimator: Any,
    X: RowsLike,
    y: ArrayLike,
    *,
    cv: Any = None,
    groups: ArrayLike | None = None,
) -> Any:
    """List the training rows by the probability that their label is wrong.

    Parameters
    ----------
    estimator : classifier
        Fitted to these rows, or a pipeline that ends in one. `RelaxedEPClassifier` models wrong
        labels. With any other classifier "wrong" is the probability of another label for such a
        row, which is large for ambiguous rows, too.
    X : array-like of shape (n, d)
        The rows of the fit.
    y : array-like of shape (n,)
        Their labels as given.
    cv : int, splitter or None, default=None
        Folds for the probabilities of the given labels, with one more fit for each fold. None takes
        `loo_proba_` of the fit, which costs nothing.
    groups : array-like of shape (n,), default=None
        Group labels for a splitter that keeps groups together, such as `GroupKFold`; only with
        `cv`.

    Returns
    -------
    table : pandas.DataFrame, or Table where pandas is not installed
        One row a training row, the most suspect first; those of weight zero are left out. It has
        "row", the place in X (the index of the frame); the label "given" and the most probable
        other one, "suggested"; "wrong", the probability that the given label is wrong; and
        "given_proba" and "suggested_proba", the probabilities of both labels given the other rows.
        With `RelaxedEPClassifier` also "false_flags": how many right labels are expected among this
        row and those above it, if all of them are flagged.

    Raises
    ------
    TypeError
        If the estimator has no `predict_proba`.
    ValueError
        If the classifier has no `loo_proba_` and `cv` is None, if it was fitted to another number
        of rows, or if y has labels that were not in the fit. If groups come without `cv`.

    Notes
    -----
    A review of the first k rows costs k looks, of which "false_flags" are expected to find a right
    label. The expectation tends to be too high. On twelve sets of
    `make_noisy_labels_classification` (200 rows, a fifth of the labels wrong) 9.8 of the first 30
    were expected to be right, and 7.6 were.

    Examples
    --------
    >>> from sklearn_ep import RelaxedEPClassifier
    >>> from sklearn_ep.datasets import make_noisy_labels_classification
    >>> from sklearn_ep.inspection import review_list
    >>> X, y, y_clean = make_noisy_labels_classification(100, random_state=0)
    >>> clf = RelaxedEPClassifier(hyperparameters="mode").fit(X, y)
    >>> review_list(clf, X, y)[["given", "suggested", "wrong", "false_flags"]].head(3).round(2)
         given  suggested  wrong  false_flags
    row
    65       1          0   0.89         0.11
    51       1          0   0.88         0.22
    69       1          0   0.87         0.36
    """
    model = step_with(estimator, "predict_proba", "classifier")
    check_is_fitted(model)
    check_consistent_length(X, y)
    y = np.asarray(y)
    check_seen(estimator.classes_, y)
    name, place = type(model).__name__, np.searchsorted(estimator.classes_, y)
    if cv is None and groups is not None:
        raise ValueError("groups is for a splitter: give cv, such as GroupKFold(5).")
    if cv is None:
        given, proba = leave_one_out(name, estimator, y), estimator.predict_proba(X)
    else:
        told: Any = {"groups": groups}
        if get_config()["enable_metadata_routing"]:
            told = {"params": {} if groups is None else told}
        proba = cross_val_predict(estimator, X, y, cv=cv, method="predict_proba", **told)
        given = proba[np.arange(len(y)), place]
    wrong = getattr(model, "noise_proba_", 1.0 - given)
    check_rows_of_fit(name, len(wrong), y)
    order = np.argsort(-wrong, kind="stable")
    order = order[~np.isnan(wrong[order])]
    others, rows = proba.copy(), np.arange(len(y))
    others[rows, place] = 0.0
    total = others.sum(axis=1)  # of which the most probable other label has a share
    share = np.divide(others.max(axis=1), total, out=np.ones(len(y)), where=total > 0)
    others[rows, place] = -1.0  # the given label not even where the others have no chance
    other = np.argmax(others, axis=1)
    columns = {"given": y, "suggested": estimator.classes_[other], "wrong": wrong}
    columns |= {"given_proba": given, "suggested_proba": (1.0 - given) * share}
    columns = {"row": order} | {key: values[order] for key, values in columns.items()}
    if hasattr(model, "noise_proba_"):
        columns["false_flags"] = np.cumsum(1.0 - wrong[order])
    return Table(f"{name}: labels to look at again", columns).framed()
