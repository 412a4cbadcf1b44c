"""The strategies in the forms that modAL and scikit-activeml ask for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from .._estimator.annotations import Seed
from .._estimator.checks import check_number, checked_weights
from .._estimator.pipelines import last_step
from ._posterior import posterior_of
from ._query import query, reference_of, scores
from ._rows import design_rows
from ._strategies import LOOK_AHEAD, greedy, resolved


def modal_query_strategy(strategy: str | Callable[..., Any] = "auto") -> Callable[..., Any]:
    """Make a strategy for modAL's `ActiveLearner`.

    Parameters
    ----------
    strategy : str or callable, default="auto"
        See `scores`.

    Returns
    -------
    query_strategy : callable
        `query_strategy(learner, X_pool, n_instances=1, **kwargs)` returns the indices and the
        scores of the chosen rows, always both, since modAL unpacks a pair. Keywords go to `query`.
        A learner that is not fitted yet gets the rows of a fixed design.

    Examples
    --------
    >>> from sklearn_ep.active_learning import modal_query_strategy
    >>> strategy = modal_query_strategy("bald")  # ActiveLearner(..., query_strategy=strategy)
    """

    def query_strategy(learner, X_pool, n_instances=1, **kwargs):
        estimator = _fitted_estimator_of(learner)
        how = dict(strategy=strategy, return_scores=True, **kwargs)
        return query(estimator, X_pool, n_instances, **how)

    return query_strategy


def _fitted_estimator_of(learner):
    """Return the fitted estimator inside a learner, or the learner itself, or None."""
    for found in (getattr(learner, "estimator", None), learner):
        try:
            check_is_fitted(found)
        except (NotFittedError, TypeError):
            continue
        return found
    return None


def SkactivemlQuery(
    strategy: str | Callable[..., Any] = "auto",
    *,
    missing_label: Any = np.nan,
    n_reference: int | None = None,
    random_state: Seed = None,
) -> Any:
    """Make a query strategy of scikit-activeml, which is imported here and nowhere else.

    Parameters
    ----------
    strategy : str or callable, default="auto"
        See `scores`.
    missing_label : scalar, str or None, default=np.nan
        Mark of the rows without a label.
    n_reference : int or None, default=None
        See `scores`.
    random_state : int, RandomState instance or None, default=None
        See `scores`.

    Returns
    -------
    query_strategy : SingleAnnotatorPoolQueryStrategy
        Its `query(X, y, clf, fit_clf=True, sample_weight=None, candidates=None, batch_size=1,
        return_utilities=False)` follows scikit-activeml: utilities have one row for each choice,
        nan where a row is labelled or chosen already; look-ahead scores are rated anew after each
        choice. `clf` is a classifier of this package, or one in scikit-activeml's wrapper, and is
        fitted to the labelled rows alone. While fewer than two classes are labelled, the rows of a
        fixed design have utility 1. The base class does not take sparse X: use `query` of this
        module for those.
    """
    return _skactiveml_class()(strategy, missing_label, n_reference, random_state)


def _skactiveml_class():
    """Define the strategy class on the base class of scikit-activeml."""
    from skactiveml.base import SingleAnnotatorPoolQueryStrategy
    from skactiveml.utils import is_labeled, simple_batch

    class PosteriorQuery(SingleAnnotatorPoolQueryStrategy):
        """Query strategy of scikit-activeml that rates rows by `scores`."""

        def __init__(self, strategy, missing_label, n_reference, random_state):
            super().__init__(missing_label=missing_label, random_state=random_state)
            self.strategy, self.n_reference = strategy, n_reference

        def query(
            self,
            X,
            y,
            clf,
            fit_clf=True,
            sample_weight=None,
            candidates=None,
            batch_size=1,
            return_utilities=False,
        ):
            """Choose rows to label, in scikit-activeml's terms."""
            _check_query(X, clf, fit_clf, self.n_reference)
            X, y, candidates, batch_size, return_utilities = self._validate_data(
                X, y, candidates, batch_size, return_utilities, reset=True
            )
            weight = None if sample_weight is None else checked_weights(sample_weight, X)
            clf = _without_wrapper(clf, fit_clf, self.missing_label_)
            rows, mapping = self._transform_candidates(candidates, X, y)
            labelled = np.flatnonzero(is_labeled(y, self.missing_label_))
            if fit_clf and len(np.unique(y[labelled])) < 2:
                rated = _cold_utilities(X[labelled], rows, batch_size)
            else:
                clf = _fitted_copy(clf, X, y, weight, labelled) if fit_clf else clf
                rated = self._rated(clf, X, rows, batch_size)
            utilities = np.full((len(rated), len(rows) if mapping is None else len(X)), np.nan)
            utilities[:, slice(None) if mapping is None else mapping] = rated
            if len(utilities) > 1:
                chosen = np.nanargmax(utilities, axis=1)
                return (chosen, utilities) if return_utilities else chosen
            asked = dict(batch_size=batch_size, return_utilities=return_utilities)
            return simple_batch(utilities[0], self.random_state_, **asked)

        def _rated(self, clf, X, rows, batch_size):
            """Return scores of rows, once or for each choice; reference rows come from all of X."""
            strategy = resolved(self.strategy, clf)
            reference = reference_of(strategy, X, None, self.n_reference, self.random_state_)
            if not callable(strategy) and strategy in LOOK_AHEAD and batch_size > 1:
                posterior = posterior_of(clf, rows, reference)
                free = np.ones(len(rows), dtype=bool)
                rated = greedy(posterior, strategy, free, min(batch_size, len(rows)))[1]
                return np.where(np.isneginf(rated), np.nan, rated)
            seed = self.random_state_.randint(2**31)
            return [scores(clf, rows, strategy=strategy, X_reference=reference, random_state=seed)]

    return PosteriorQuery


def _check_query(X, clf, fit_clf, n_reference):
    """Raise an error that names the argument of a query of scikit-activeml that is not usable."""
    from skactiveml.base import SkactivemlClassifier
    from skactiveml.utils import check_type

    if sp.issparse(X):
        raise TypeError(
            "scikit-activeml takes no sparse X; use sklearn_ep.active_learning.query, which does."
        )
    check_type(fit_clf, "fit_clf", bool)
    if not hasattr(last_step(clf), "latent_mean_and_variance"):  # ours may come without a wrapper
        check_type(clf, "clf", SkactivemlClassifier)
    check_number("n_reference", n_reference, 1, integer=True, optional=True)


def _without_wrapper(clf, fit_clf, missing_label):
    """Return the estimator inside scikit-activeml's wrapper, fitted unless it will be.

    The wrapper hands on labels of any kind as objects, which a classifier does not take.
    """
    from skactiveml.classifier import SklearnClassifier
    from skactiveml.utils import check_equal_missing_label

    if hasattr(clf, "missing_label"):
        check_equal_missing_label(clf.missing_label, missing_label)
    if not isinstance(clf, SklearnClassifier):
        return clf
    return clf.estimator if fit_clf else getattr(clf, "estimator_", clf)


def _fitted_copy(clf, X, y, weight, labelled):
    """Return a copy of a classifier that is fitted to the labelled rows.

    A classifier of scikit-activeml is given all rows, and finds the labelled ones itself.
    """
    known = slice(None) if hasattr(clf, "missing_label") else labelled
    weights = {} if weight is None else {"sample_weight": weight[known]}
    labels = y[known]
    if labels.dtype == object and known is labelled:
        labels = np.array(labels.tolist())  # of one kind, as a classifier wants them
    return clone(clf).fit(X[known], labels, **weights)


def _cold_utilities(known, rows, n_rows):
    """Return 1 for the rows of the fixed design, earlier ones a trifle more, and 0 for others."""
    n_rows, pool = min(n_rows, len(rows)), np.vstack([known, rows])
    labelled, free = np.arange(len(known)), np.arange(len(known), len(pool))
    chosen = design_rows(pool, labelled, free, n_rows)[0] - len(known)
    rated = np.zeros((1, len(rows)))
    rated[0, chosen] = 1.0 + 1e-9 * np.arange(n_rows, 0, -1)
    return rated
