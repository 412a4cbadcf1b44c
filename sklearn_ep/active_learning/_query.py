"""The public calls: rate rows, choose rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from .._engine.gaussian import one_blas_thread
from .._estimator.annotations import RowsLike, Seed
from .._estimator.checks import check_number, checked_random
from .._estimator.tables import rows_at
from . import _strategies as strategies
from ._posterior import posterior_of
from ._rows import allowed_rows, best_first, design_rows, rows_of


def _check_fitted(estimator):
    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        raise NotFittedError(
            f"{error} Before there is a model, query(None, X_pool) chooses rows, and Learner "
            "starts from no labels."
        ) from error


def reference_of(strategy, X, X_reference, n_reference, random_state):
    """Return the reference rows of a strategy, given or a sample of X; None if it needs none."""
    if not strategies.needs_reference(strategy):
        return None
    if X_reference is not None:
        X_reference = rows_of(X_reference)
        if X_reference.shape[1:] != X.shape[1:]:
            raise ValueError(
                f"X_reference has rows of shape {X_reference.shape[1:]}, the pool of {X.shape[1:]}."
            )
        return X_reference
    if n_reference is None:
        n_reference = 1000 if strategy == "variance_reduction" else 200
    check_number("n_reference", n_reference, 1, integer=True)
    n = X.shape[0]
    if n <= n_reference:
        return X
    if random_state is None:
        return rows_at(X, np.linspace(0, n - 1, n_reference).round().astype(int))
    rng = checked_random(random_state)
    return rows_at(X, np.sort(rng.choice(n, n_reference, replace=False)))


@one_blas_thread()
def scores(
    estimator: Any,
    X: RowsLike,
    *,
    strategy: str | Callable[..., Any] = "auto",
    X_reference: RowsLike | None = None,
    n_reference: int | None = None,
    random_state: Seed = None,
) -> np.ndarray:
    """Rate rows by the information expected from their label.

    Parameters
    ----------
    estimator : estimator
        Fitted, or a pipeline whose last step has what the strategy needs. "random", "margin",
        "uncertainty" and "entropy" take any classifier; "bald" and "information_gain" need
        `latent_mean_and_variance`, the others `latent_covariance` as well. Regressors with
        `predict(return_std=True)` have "random", "uncertainty" (the standard deviation) and, with
        `latent_covariance`, "variance_reduction".
    X : array-like, CSR/CSC matrix or table of shape (n, d)
        Candidate rows.
    strategy : str or callable, default="auto"
        "random"; "margin": minus the distance from the decision boundary, or minus the difference
        of the two largest probabilities; "uncertainty": minus the distance of the largest
        probability from 1/2; "entropy" of the predicted label; "bald": mutual information of label
        and posterior [1]_; "information_gain": the published form of it with the local bound
        [2]_; "variance_reduction": expected fall of the mean posterior variance over reference
        rows; "epig": mutual information of the label and the label of a reference row [3]_, which
        is the expected fall of the log loss there; "epig_entropy": the same times the entropy of
        the row's own label; "expected_error": expected fall of the expected error at reference
        rows [4]_. Or a callable `(estimator, X)` -> scores.

        "auto" takes the first that the estimator can give of "epig_entropy", "bald", "entropy" and
        "margin", of a regressor "variance_reduction" and "uncertainty". Where columns far outnumber
        labels, as in text, "uncertainty" did as well, at a fraction of the cost.
    X_reference : array-like or sparse matrix of shape (m, d), default=None
        Rows at which "variance_reduction" and the look-ahead scores count; None draws from X.
    n_reference : int or None, default=None
        Rows drawn from X, all if there are fewer. None is 200 for the look-ahead scores and 1000
        for "variance_reduction"; more cost time and change little.
    random_state : int, RandomState instance or None, default=None
        Seed of "random" and of the reference rows; None takes evenly spaced reference rows.

    Returns
    -------
    scores : ndarray of shape (n,)
        Larger means: ask for this label first.

    Raises
    ------
    ValueError
        If the strategy is unknown, or `X_reference` has other columns than X.
    TypeError
        If the estimator lacks a method that the strategy needs, or no link explains its
        probabilities.

    Notes
    -----
    All scores have closed forms, O(n) once means and variances are known. With m reference rows
    there are n m covariances. Look-ahead scores take two (probit) or four (logistic) normal
    distribution functions for each. With more than two classes "bald", "information_gain" and
    "variance_reduction" are averaged over the one-versus-rest problems with the class probabilities
    as weights. Look-ahead scores use the normalised probabilities, in single precision: to about
    5e-6 of the largest score. With a joint posterior of several classes each class is set against
    the mean of the others. For "bald" and the two after it a probit latent is put on the scale of
    the logistic one, within 1 % of the probabilities.

    References
    ----------
    .. [1] N. Houlsby et al., "Bayesian active learning for classification and preference learning",
       arXiv:1112.5745, 2011.
    .. [2] H. Nickisch and M. W. Seeger, "Convex variational Bayesian inference for large scale
       generalized linear models", ICML 2009, section 3.
    .. [3] F. Bickford Smith et al., "Prediction-oriented Bayesian active learning", AISTATS 2023.
    .. [4] N. Roy and A. McCallum, "Toward optimal active learning through sampling estimation of
       error reduction", ICML 2001.

    Examples
    --------
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.active_learning import scores
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, _ = make_sparse_logistic(300, 50, random_state=0)
    >>> clf = ConvexVariationalLogistic().fit(X[:40], y[:40])
    >>> print(scores(clf, X[40:43], strategy="bald").round(1))
    [0.4 0.5 0.5]
    """
    _check_fitted(estimator)
    strategies.check_strategy(strategy, estimator)
    strategy, X = strategies.resolved(strategy, estimator), rows_of(X)
    if callable(strategy):
        return np.asarray(strategy(estimator, X))
    if strategy == "random":
        return checked_random(random_state).random_sample(X.shape[0])
    reference = reference_of(strategy, X, X_reference, n_reference, random_state)
    return strategies.plain_scores(estimator, X, reference, strategy)


@one_blas_thread()
def query(
    estimator: Any,
    X_pool: RowsLike,
    n_instances: int = 1,
    *,
    strategy: str | Callable[..., Any] = "auto",
    candidates: ArrayLike | None = None,
    exclude: ArrayLike | None = None,
    objective: str = "log_loss",
    diversify: bool | str = "auto",
    X_reference: RowsLike | None = None,
    n_reference: int | None = None,
    return_scores: bool = False,
    random_state: Seed = None,
) -> Any:
    """Choose the rows of a pool to label next.

    Parameters
    ----------
    estimator : estimator or None
        Fitted; see `scores` for what the strategies need. None, while there is no model: rows then
        are a fixed design, the medoids of the pool, to which those of `exclude` belong already.
        Columns of larger scale count for more in it: standardise them first.
    X_pool : array-like, CSR/CSC matrix or table of shape (n, d)
        Rows to choose from; labelled ones may be in it if they are excluded.
    n_instances : int, default=1
        Rows to choose.
    strategy : str or callable, default="auto"
        See `scores`. Reference rows come from the whole pool.
    objective : {"log_loss", "error"}, default="log_loss"
        What ``strategy="auto"`` buys labels for. "log_loss" looks ahead to probabilities; "error"
        takes "margin", which had the fewest errors on the sets of the benchmark.
    candidates : array-like of int, or mask of shape (n,), default=None
        The rows that may be chosen; None allows all.
    exclude : array-like of int, or mask of shape (n,), default=None
        Rows that may not, such as those labelled already.
    diversify : "auto" or bool, default="auto"
        True chooses one row after another. Each time it lowers the variances as the label of the
        last choice will, so that near duplicates are not bought twice. "auto" is True for the
        look-ahead scores, where it pays, and False for all others, where it did not. Needs
        `latent_covariance`, and a strategy other than "random", "margin" and callables.
    X_reference : array-like or sparse matrix of shape (m, d), default=None
        See `scores`; None draws from the whole pool.
    n_reference : int or None, default=None
        See `scores`.
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
        If there are fewer candidates than `n_instances`, an index is out of range, a mask has not
        the length of the pool, or the strategy is unknown or cannot be diversified.
    TypeError
        If the estimator lacks a method that the strategy needs.

    Notes
    -----
    Cost of `scores`, for each row of a diversified batch. Without a model at most 2000 rows of the
    pool are looked at: 2000^2 numbers, and as many operations a chosen row.

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
    >>> len(query(None, X, 3))
    3
    """
    if estimator is not None:
        _check_fitted(estimator)
    strategies.check_strategy(strategy, estimator)
    strategies.check_objective(objective, strategy)
    X_pool = rows_of(X_pool)
    n = X_pool.shape[0]
    allowed = allowed_rows(n, candidates, exclude)
    check_number("n_instances", n_instances, 1, integer=True)
    if n_instances > len(allowed):
        raise ValueError(f"n_instances={n_instances} is more than the {len(allowed)} candidates.")
    if estimator is None:
        labelled = np.setdiff1d(np.arange(n), allowed_rows(n, None, exclude))
        chosen, values = design_rows(X_pool, labelled, allowed, n_instances)
        return (chosen, values) if return_scores else chosen
    strategy, X = strategies.resolved(strategy, estimator, objective), rows_at(X_pool, allowed)
    reference = reference_of(strategy, X_pool, X_reference, n_reference, random_state)
    if strategies.is_greedy(strategy, diversify, n_instances):
        if not strategies.works_on_posterior(strategy):
            raise ValueError(
                f"diversify=True lowers variances, which strategy={strategy!r} does not use."
            )
        strategies.require_covariance(estimator, strategy)
        free = np.ones(len(allowed), dtype=bool)
        posterior = posterior_of(estimator, X, reference)
        chosen, rated = strategies.greedy(posterior, strategy, free, n_instances)
        values = np.array([v[i] for v, i in zip(rated, chosen, strict=True)])
    else:
        how: Any = dict(strategy=strategy, X_reference=reference, random_state=random_state)
        rated = scores(estimator, X, **how)
        chosen = best_first(rated, n_instances)
        values = rated[chosen]
    return (allowed[chosen], values) if return_scores else allowed[chosen]
