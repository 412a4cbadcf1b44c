"""The public calls: rate rows, choose rows, and adapters for other active-learning packages."""

import numpy as np
import scipy.sparse as sp
from sklearn.base import clone, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from .._estimator.checks import check_number
from . import _strategies
from ._design import design_rows

__all__ = ["SkactivemlQuery", "modal_query_strategy", "query", "scores"]


def scores(
    estimator,
    X,
    *,
    strategy="variance_reduction",
    X_reference=None,
    n_reference=1000,
    random_state=None,
):
    """Rate rows by how much their label would tell.

    Parameters
    ----------
    estimator : estimator
        Fitted. "random", "margin", "uncertainty" and "entropy" take any classifier; the other
        strategies need `latent_mean_and_variance`, "variance_reduction" also `latent_covariance`.
        Regressors with `predict(return_std=True)` have "random", "uncertainty" (the standard
        deviation) and "variance_reduction".
    X : array-like or CSR/CSC matrix of shape (n, d)
        Candidate rows.
    strategy : str or callable, default="variance_reduction"
        "random"; "margin": minus the distance from the decision boundary, or minus the difference
        of the two largest probabilities; "uncertainty": minus the distance of the largest
        probability from 1/2; "entropy" of the predicted label; "bald": mutual information of label
        and posterior [1]_; "information_gain": the published form of it with the local bound
        [2]_; "variance_reduction": expected fall of the mean posterior variance over reference
        rows, near the best on every data set tried. Or a callable `(estimator, X)` -> scores.
    X_reference : array-like or sparse matrix of shape (m, d), default=None
        Rows whose variance "variance_reduction" counts; None draws from X.
    n_reference : int, default=1000
        Rows drawn from X, all if there are fewer. More cost time and change little.
    random_state : int, RandomState instance or None, default=None
        Seed of "random" and of the reference rows; None takes evenly spaced reference rows.

    Returns
    -------
    scores : ndarray of shape (n,)
        Larger means: ask for this label first.

    Raises
    ------
    ValueError
        If the strategy is unknown.
    TypeError
        If the estimator lacks a method that the strategy needs.

    Notes
    -----
    All closed forms, O(n) once means and variances are known; "variance_reduction" needs n m
    covariances. With more than two classes "bald", "information_gain" and "variance_reduction" are
    averaged over the one-versus-rest problems with the class probabilities as weights. A probit
    latent is put on the scale of the logistic one, within 1 % of the probabilities.

    References
    ----------
    .. [1] N. Houlsby et al., "Bayesian active learning for classification and preference learning",
       arXiv:1112.5745, 2011.
    .. [2] H. Nickisch and M. W. Seeger, "Convex variational Bayesian inference for large scale
       generalized linear models", ICML 2009, section 3.

    Examples
    --------
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.active_learning import scores
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, _ = make_sparse_logistic(300, 50, random_state=0)
    >>> clf = ConvexVariationalLogistic().fit(X[:40], y[:40])
    >>> scores(clf, X[40:], strategy="bald").shape
    (260,)
    """
    check_is_fitted(estimator)
    _strategies.check_strategy(strategy)
    X = _strategies.rows_of(X)
    if callable(strategy):
        return np.asarray(strategy(estimator, X))
    if strategy == "random":
        return check_random_state(random_state).random_sample(X.shape[0])
    wants_reference = strategy == "variance_reduction"
    reference = (
        _strategies.reference_rows(X, X_reference, n_reference, random_state)
        if wants_reference
        else None
    )
    if is_regressor(estimator):
        return _strategies.regressor_scores(estimator, X, reference, strategy)
    if strategy in _strategies.OF_PROBA:
        return _strategies.proba_scores(estimator, X, strategy)
    return _strategies.latent_scores(
        _strategies.make_posterior(estimator, X, strategy, reference), strategy
    )


def query(
    estimator,
    X_pool,
    n_instances=1,
    *,
    strategy="variance_reduction",
    candidates=None,
    exclude=None,
    diversify=False,
    return_scores=False,
    random_state=None,
):
    """Choose the rows of a pool to label next.

    Parameters
    ----------
    estimator : estimator
        Fitted; see `scores` for what the strategies need.
    X_pool : array-like or CSR/CSC matrix of shape (n, d)
        Rows to choose from; labelled ones may be in it if they are excluded.
    n_instances : int, default=1
        Rows to choose.
    strategy : str or callable, default="variance_reduction"
        See `scores`. Reference rows of "variance_reduction" come from the whole pool.
    candidates : array-like of int, or mask of shape (n,), default=None
        The rows that may be chosen; None allows all.
    exclude : array-like of int, or mask of shape (n,), default=None
        Rows that may not, such as those labelled already.
    diversify : bool, default=False
        Choose one row after another, each time lowering the variances as the label of the last
        choice will, so that near duplicates are not bought twice. Worth its cost for pools with
        duplicates; without them no gain was measured, hence not the default. Needs
        `latent_covariance`, and a strategy other than "random", "margin" and callables.
    return_scores : bool, default=False
        Also return the scores of the chosen rows at the time of the choice.
    random_state : int, RandomState instance or None, default=None
        See `scores`.

    Returns
    -------
    indices : ndarray of shape (n_instances,)
        Indices into the pool, best first; ties go to the lowest index.
    scores : ndarray of shape (n_instances,)
        Only if `return_scores`.

    Raises
    ------
    ValueError
        If there are fewer candidates than `n_instances`, an index is out of range, or the strategy
        is unknown or cannot be diversified.

    Notes
    -----
    Cost of `scores`; `diversify` adds n covariances a chosen row.

    Examples
    --------
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.active_learning import query
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, _ = make_sparse_logistic(300, 50, random_state=0)
    >>> labelled = list(range(40))
    >>> clf = ConvexVariationalLogistic().fit(X[labelled], y[labelled])
    >>> new = query(clf, X, 5, exclude=labelled)
    >>> len(new), bool((new >= 40).all())
    (5, True)
    """
    check_is_fitted(estimator)
    _strategies.check_strategy(strategy)
    X_pool = _strategies.rows_of(X_pool)
    allowed = _strategies.allowed_rows(X_pool.shape[0], candidates, exclude)
    check_number("n_instances", n_instances, 1, integer=True)
    if n_instances > len(allowed):
        raise ValueError(f"n_instances={n_instances} is more than the {len(allowed)} candidates.")
    X = _strategies.take(X_pool, allowed)
    if diversify:
        chosen, values = _strategies.greedy(
            estimator, X_pool, X, n_instances, strategy, random_state
        )
    else:
        reference = (
            _strategies.reference_rows(X_pool, None, 1000, random_state)
            if (strategy == "variance_reduction")
            else None
        )
        rated = scores(
            estimator, X, strategy=strategy, X_reference=reference, random_state=random_state
        )
        chosen = _strategies.best_first(rated)[:n_instances]
        values = rated[chosen]
    return (allowed[chosen], values) if return_scores else allowed[chosen]


# ---------------------------------------------------------------------------- adapters


def modal_query_strategy(strategy="variance_reduction"):
    """Make a strategy for modAL's `ActiveLearner`.

    Parameters
    ----------
    strategy : str or callable, default="variance_reduction"
        See `scores`.

    Returns
    -------
    query_strategy : callable
        `query_strategy(learner, X_pool, n_instances=1, **kwargs)` returns the indices and the
        scores of the chosen rows, always both: modAL unpacks whatever it is given, and would take
        two bare indices for such a pair. Keywords go to `query`.

    Examples
    --------
    >>> from sklearn_ep.active_learning import modal_query_strategy
    >>> strategy = modal_query_strategy("bald")  # ActiveLearner(..., query_strategy=strategy)
    """

    def query_strategy(learner, X_pool, n_instances=1, **kwargs):
        estimator = _estimator_of(learner)
        return query(
            estimator, X_pool, n_instances, strategy=strategy, return_scores=True, **kwargs
        )

    return query_strategy


def _estimator_of(learner):
    """Return the fitted estimator inside a learner, or the learner itself."""
    inner = getattr(learner, "estimator", None)
    if inner is None:
        return learner
    try:
        check_is_fitted(inner)
    except (NotFittedError, TypeError):
        return learner
    return inner


def SkactivemlQuery(strategy="variance_reduction", *, missing_label=np.nan, random_state=None):
    """Make a query strategy of scikit-activeml, which is imported here and nowhere else.

    Parameters
    ----------
    strategy : str or callable, default="variance_reduction"
        See `scores`.
    missing_label : scalar, str or None, default=np.nan
        Mark of the rows without a label.
    random_state : int, RandomState instance or None, default=None
        See `scores`.

    Returns
    -------
    query_strategy : SingleAnnotatorPoolQueryStrategy
        Its `query(X, y, clf, fit_clf=True, sample_weight=None, candidates=None, batch_size=1,
        return_utilities=False)` follows scikit-activeml: utilities have one row for each choice,
        nan where a row is labelled or chosen already. `clf` is a classifier of this package, or one
        in scikit-activeml's wrapper, and is fitted to the labelled rows alone. While fewer than two
        classes are labelled, the rows of a fixed design have utility 1. The base class does not
        take sparse X: use `query` of this module for those.
    """
    return _skactiveml_class()(strategy, missing_label, random_state)


def _skactiveml_class():
    """Define the strategy class on the base class of scikit-activeml."""
    from skactiveml.base import SingleAnnotatorPoolQueryStrategy, SkactivemlClassifier
    from skactiveml.utils import check_equal_missing_label, check_type, is_labeled, simple_batch

    class PosteriorQuery(SingleAnnotatorPoolQueryStrategy):
        """Query strategy of scikit-activeml that rates rows by `scores`."""

        def __init__(self, strategy, missing_label, random_state):
            super().__init__(missing_label=missing_label, random_state=random_state)
            self.strategy = strategy

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
            if sp.issparse(X):
                raise TypeError(
                    "scikit-activeml takes no sparse X; use sklearn_ep.active_learning.query, "
                    "which does."
                )
            X, y, candidates, batch_size, return_utilities = self._validate_data(
                X, y, candidates, batch_size, return_utilities, reset=True
            )
            check_type(fit_clf, "fit_clf", bool)
            if isinstance(clf, SkactivemlClassifier):
                check_equal_missing_label(clf.missing_label, self.missing_label_)
            elif not hasattr(clf, "latent_mean_and_variance"):  # ours may come without a wrapper
                check_type(clf, "clf", SkactivemlClassifier)
            rows, mapping = self._transform_candidates(candidates, X, y)
            labelled = np.flatnonzero(is_labeled(y, self.missing_label_))
            if fit_clf and len(np.unique(y[labelled])) < 2:
                rated = _cold_utilities(X[labelled], rows, batch_size)
            else:
                if fit_clf:
                    known = slice(None) if isinstance(clf, SkactivemlClassifier) else labelled
                    clf = _fitted_copy(clf, X[known], y[known], sample_weight, known)
                rated = self._rated(getattr(clf, "estimator_", clf), X, rows)
            utilities = np.full(len(rows) if mapping is None else len(X), np.nan)
            utilities[slice(None) if mapping is None else mapping] = rated
            return simple_batch(
                utilities,
                self.random_state_,
                batch_size=batch_size,
                return_utilities=return_utilities,
            )

        def _rated(self, clf, X, rows):
            """Return scores of rows; reference rows come from all of X."""
            reference = _strategies.reference_rows(X, None, 1000, self.random_state_)
            seed = self.random_state_.randint(2**31)
            return scores(
                clf, rows, strategy=self.strategy, X_reference=reference, random_state=seed
            )

    return PosteriorQuery


def _fitted_copy(clf, X, y, sample_weight, known):
    """Return a copy of a classifier that is fitted to rows whose numbers are `known`."""
    weights = {} if sample_weight is None else {"sample_weight": np.asarray(sample_weight)[known]}
    if y.dtype == object:
        y = np.array(y.tolist())  # labels of one kind, as a classifier without wrapper wants them
    return clone(clf).fit(X, y, **weights)


def _cold_utilities(known, rows, n_rows):
    """Return 1 for the rows of the fixed design, earlier ones a trifle more, and 0 for others."""
    n_rows, pool = min(n_rows, len(rows)), np.vstack([known, rows])
    labelled = np.arange(len(known))
    chosen = design_rows(pool, labelled, np.arange(len(known), len(pool)), n_rows) - len(known)
    rated = np.zeros(len(rows))
    rated[chosen] = 1.0 + 1e-9 * np.arange(n_rows, 0, -1)
    return rated
