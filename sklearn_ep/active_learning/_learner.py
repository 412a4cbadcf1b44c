"""A labelling session: ask for rows, tell their labels, from the first label on."""

import copy
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone, is_regressor

from .._estimator.annotations import RowsLike, Seed
from .._estimator.checks import check_number, checked_random
from .._estimator.pipelines import last_step
from .._estimator.posterior_classifier import PosteriorClassifier
from .._estimator.summary import Printed
from .._estimator.tables import is_missing, rows_at
from . import _strategies as strategies
from ._posterior import posterior_of
from ._query import query, reference_of
from ._rows import best_first, design_rows, row_numbers, rows_of

# Labels of a classifier until which rows come from the design, which is made for so many.
_FEW = 10


class _PoolLabels:
    """Labels of some of n rows, in the order of arrival, and which labels may come."""

    def __init__(self, n, classes, missing, y=None):
        self.n, self.missing = n, missing
        self.allowed = None if classes is None else set(np.asarray(classes).tolist())
        self.rows: list[int] = []
        self.values: list[Any] = []
        if y is None:
            return
        y = np.asarray(y, dtype=object)
        if y.shape != (n,):
            raise ValueError(f"y has shape {y.shape}, for a pool of {n} rows.")
        self.rows = [i for i, label in enumerate(y) if not self._lacks(label)]
        self.values = list(y[self.rows])
        self._check(self.values)

    def __len__(self):
        return len(self.rows)

    def _lacks(self, label):
        return is_missing(label) or (type(label) is not bool and bool(label == self.missing))

    def _check(self, labels):
        if self.allowed is not None:
            outside = sorted({str(v) for v in labels if v not in self.allowed})
            if outside:
                raise ValueError(f"labels {outside} are not among classes.")

    def wants_design(self, estimator, model):
        """Return whether the next rows come from the design."""
        told = len(self)
        # no posterior asks for a class that has no label yet
        unseen = self.allowed is not None and not self.allowed.issubset(self.values)
        few = told < _FEW and not is_regressor(estimator)
        return few or model is None or (unseen and told % 2 == 1)

    def enough(self, estimator):
        """Return whether there are two classes, or for a regressor two rows."""
        return len(self.rows if is_regressor(estimator) else np.unique(np.array(self.values))) >= 2

    def free(self):
        """Return which rows (n,) have no label."""
        free = np.ones(self.n, dtype=bool)
        free[self.rows] = False
        return free

    def told(self, indices, labels):
        """Return rows and labels as lists, checked for what does not hang on earlier labels."""
        rows = row_numbers("indices", np.atleast_1d(np.asarray(indices)), self.n).tolist()
        labels = list(np.atleast_1d(np.asarray(labels, dtype=object)))
        if len(rows) != len(labels):
            raise ValueError(f"{len(labels)} labels were told for {len(rows)} indices.")
        if len(set(rows)) < len(rows):
            raise ValueError("indices name a row twice.")
        if any(map(self._lacks, labels)):
            raise ValueError("labels hold a missing label.")
        self._check(labels)
        return rows, labels

    def correct(self, rows, labels):
        """Replace the labels of rows that have one."""
        corrected = dict(zip(rows, labels, strict=True))
        kept = zip(self.rows, self.values, strict=True)
        self.values = [corrected.get(row, label) for row, label in kept]


def _by_proba(strategy, model):
    """Return whether a strategy rates the probabilities of a model."""
    return strategy in strategies.OF_PROBA and hasattr(model, "predict_proba")


def _has_posterior(model):
    model = last_step(model)
    needed = "predict" if is_regressor(model) else "latent_mean_and_variance"
    return hasattr(model, "latent_covariance") and hasattr(model, needed)


def _coded(model, label):
    """Return the class index of a label, of a regressor the response itself.

    None for a class that the last refit does not know, which there is only after one failed.
    """
    if not hasattr(model, "classes_"):
        return float(label)
    found = np.flatnonzero(model.classes_ == label)
    return int(found[0]) if len(found) else None


class Learner(Printed):
    """Ask which rows of a pool to label, tell the labels, and have a model of all of them.

    The first ten rows of a classifier are a fixed design, the ten medoids of the pool, whatever is
    labelled then: rows that are chosen by a model of few labels mislead it more than they tell. All
    rows are those of a design while fewer than two classes have a label, and the first two of a
    regressor. Later the strategy chooses. Labels enter the posterior at once, by rank-one updates.
    After every `refit_every` labels a clone of the estimator is fitted to all of them. A classifier
    of this package with ``warm_start=True`` is fitted from the last refit, if it takes other rows:
    `ConvexVariationalLogistic` does.

    Parameters
    ----------
    estimator : estimator
        Classifier or regressor, fitted or not; it is cloned and never touched. A Gaussian process
        learns its kernel anew at every refit: give it bounds, since with few and selected labels
        the amplitude grows without limit.
    X_pool : array-like, CSR/CSC matrix or table of shape (n, d)
        All rows, labelled or not. Standardise columns first unless they share a unit.
    y : array-like of shape (n,), default=None
        Labels known so far, with a missing mark elsewhere; None is no label. NaN, None and pandas'
        NA are always missing.
    classes : array-like, default=None
        The labels that may come; None takes any. Others are refused. While one of these classes has
        no label every second row comes from the fixed design. A model that has not seen a class is
        sure about its rows, and does not ask for them.
    strategy : str or callable, default="auto"
        See `scores`.
    objective : {"log_loss", "error"}, default="log_loss"
        See `query`.
    refit_every : int, default=5
        Labels between refits. Updates between them keep the hyperparameters and match moments label
        by label. After four labels they were off by 3 to 8 % of what the labels changed.
    n_reference : int or None, default=None
        See `scores`.
    missing_label : scalar, str or None, default=np.nan
        A further mark of missing labels.
    random_state : int, RandomState instance or None, default=None
        See `scores`.

    Attributes
    ----------
    labelled_ : ndarray of int of shape (n_labels,)
        Rows with a label, in the order of arrival.
    y_ : ndarray of shape (n_labels,)
        Their labels.
    estimator_ : estimator or None
        The last refit; None before there is a model.
    classes_ : ndarray or None
        Classes of the last refit; None before it, and for regressors.
    expected_gain_ : float
        Expected fall of the mean log loss of the pool, in nats, by the label of the row asked first
        (its "epig" score). A figure to look at, not a rule of when to stop. NaN for the first rows,
        and with strategies that do not look ahead.
    history_ : list of dict
        One entry a refit: "n_labels", "expected_gain" at that time and "score", which is None
        unless `learn` was given one.

    Raises
    ------
    ValueError
        If the pool is empty, y has another length or a label outside `classes`, or a parameter is
        not usable. What the fit of the estimator raises, it raises here as well.

    Notes
    -----
    A call of `ask` costs the scores of the rows without label; `tell` nothing, and the refit that
    is due. One row of two classes costs O(n log n), and the scores of rows that no other beats in
    mean and variance, unless the strategy looks ahead. The session keeps n m covariances with m
    reference rows. It can be pickled at any time, and goes on from there.

    References
    ----------
    .. [1] H. Nickisch and M. W. Seeger, "Convex variational Bayesian inference for large scale
       generalized linear models", ICML 2009, section 3.

    Examples
    --------
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.active_learning import Learner
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, _ = make_sparse_logistic(300, 50, random_state=0)
    >>> learner = Learner(ConvexVariationalLogistic(), X)
    >>> for _ in range(20):
    ...     rows = learner.ask()
    ...     _ = learner.tell(rows, y[rows])  # in real life: show the rows to a person
    >>> len(learner.labelled_), learner.estimator_.predict_proba(X).shape
    (20, (300, 2))
    """

    def __init__(
        self,
        estimator: Any,
        X_pool: RowsLike,
        y: ArrayLike | None = None,
        *,
        classes: ArrayLike | None = None,
        strategy: str | Callable[..., Any] = "auto",
        objective: str = "log_loss",
        refit_every: int = 5,
        n_reference: int | None = None,
        missing_label: Any = np.nan,
        random_state: Seed = None,
    ) -> None:
        strategies.check_strategy(strategy, estimator)
        strategies.check_objective(objective, strategy)
        check_number("refit_every", refit_every, 1, integer=True)
        check_number("n_reference", n_reference, 1, integer=True, optional=True)
        self._pool = rows_of(X_pool)
        if not self._pool.shape or self._pool.shape[0] == 0:
            raise ValueError("X_pool has no rows.")
        self._estimator = clone(estimator)
        self._strategy, self._objective, self._refit_every = strategy, objective, refit_every
        self._n_reference = n_reference
        # one number for the whole session, so that asking twice gives the same rows
        self._seed = int(checked_random(random_state).randint(2**31 - 2**24))
        self._reference_seed = None if random_state is None else self._seed
        self.estimator_, self.classes_ = None, None
        self.expected_gain_ = np.nan
        self.history_: list[dict[str, Any]] = []
        self._labels = _PoolLabels(self._pool.shape[0], classes, missing_label, y)
        self._posterior: Any = None
        self._n_fitted = self._n_included = 0
        _refit_if_due(self)

    @property
    def labelled_(self):
        """Rows with a label, in the order of arrival."""
        return np.array(self._labels.rows, dtype=np.intp)

    @property
    def y_(self):
        """Labels of the rows in `labelled_`."""
        return np.array(self._labels.values)

    def __str__(self):
        fitted, told, n = self._n_fitted, len(self._labels), self._labels.n
        lines = [
            f"Learner of {type(self._estimator).__name__}: {told} of {n} rows labelled",
            f"strategy {self._strategy!r}, objective {self._objective!r}",
            "no model yet: rows come from a fixed design"
            if self.estimator_ is None
            else f"fitted to {fitted} labels, again at {fitted + self._refit_every}",
        ]
        if told and not is_regressor(self._estimator):
            counts = zip(*np.unique(self.y_, return_counts=True), strict=True)
            lines.insert(1, "labels " + ", ".join(f"{label}: {n}" for label, n in counts))
        if np.isfinite(self.expected_gain_):
            lines.append(f"expected gain of the row asked first {self.expected_gain_:.3g} nats")
        return "\n".join(lines)

    # ------------------------------------------------------------------ asking

    def ask(self, n_instances: int = 1) -> np.ndarray:
        """Choose rows to label next.

        Parameters
        ----------
        n_instances : int, default=1
            Rows to choose, each as if the labels of those before were in.

        Returns
        -------
        indices : ndarray of shape (n_instances,)
            Rows without a label, best first; the same until labels are told.

        Raises
        ------
        ValueError
            If fewer rows are left.
        """
        check_number("n_instances", n_instances, 1, integer=True)
        free, n_told = self._labels.free(), len(self._labels)
        if n_instances > free.sum():
            raise ValueError(f"n_instances={n_instances} is more than the {free.sum()} rows left.")
        rows = np.flatnonzero(free)
        if self._strategy == "random":
            return np.random.RandomState(self._seed + n_told).permutation(rows)[:n_instances]
        if self._labels.wants_design(self._estimator, self.estimator_):
            self.expected_gain_ = np.nan
            count = max(n_instances, min(_FEW - n_told, len(rows)))
            return design_rows(self._pool, self.labelled_, rows, count)[0][:n_instances]
        strategy = strategies.resolved(self._strategy, self.estimator_, self._objective)
        by_posterior = strategies.works_on_posterior(strategy) and _has_posterior(self.estimator_)
        if not (by_posterior or _by_proba(strategy, self.estimator_)):
            options = dict(exclude=self.labelled_, n_reference=self._n_reference)
            options |= dict(strategy=strategy, random_state=self._reference_seed)
            return query(self.estimator_, self._pool, n_instances, **options)
        chosen = self._best(strategy, free, n_instances)
        if strategy in strategies.LOOK_AHEAD:
            self.expected_gain_ = float(
                strategies.look_ahead(self._posterior, "epig", chosen[:1])[0]
            )
        return chosen

    def _best(self, strategy, free, n_instances):
        rows = np.flatnonzero(free)
        # labels told since the last refit are taken in once, as those to come before the next
        kept = self._refit_every > 1 or self._n_fitted < len(self._labels)
        if _by_proba(strategy, self.estimator_) and not (kept and _has_posterior(self.estimator_)):
            rated = strategies.OF_PROBA[strategy](self.predict_proba())[rows]
            return rows[best_first(rated, n_instances)]
        posterior = self._up_to_date()
        if strategies.is_greedy(strategy, "auto", n_instances):
            return np.array(strategies.greedy(posterior, strategy, free, n_instances)[0])
        return strategies.best_rows(posterior, strategy, rows, n_instances)

    def _up_to_date(self):
        """Return the posterior of the pool with all labels in."""
        if self._posterior is None:
            strategy = strategies.resolved(self._strategy, self.estimator_, self._objective)
            kind = strategy if isinstance(strategy, str) else "epig"
            sample = None, self._n_reference, self._reference_seed
            reference = reference_of(kind, self._pool, *sample)
            self._posterior = posterior_of(self.estimator_, self._pool, reference)
            self._n_included = self._n_fitted
        new = slice(self._n_included, None)
        for row, label in zip(self._labels.rows[new], self._labels.values[new], strict=True):
            self._posterior = self._posterior.including(row, _coded(self.estimator_, label))
            self._n_included += 1
        return self._posterior

    # ------------------------------------------------------------------ telling

    def tell(self, indices: ArrayLike, labels: ArrayLike) -> Self:
        """Take labels in, all or none.

        Parameters
        ----------
        indices : array-like of int of shape (k,)
            Rows of the pool.
        labels : array-like of shape (k,)
            Their labels.

        Returns
        -------
        self : Learner
            With the labels, and refitted if that was due: after `refit_every` labels, at the second
            class, and at a class that the last refit did not know.

        Raises
        ------
        ValueError
            If a row has a label already or comes twice, a label is missing or not among `classes`,
            or there are not as many labels as rows. Nothing has changed then. What a refit raises
            leaves the labels told and the last refit in place.
        """
        rows, told = self._labels.told(indices, labels)
        again = sorted(set(rows) & set(self._labels.rows))
        if again:
            raise ValueError(f"rows {again} of indices have a label already: use `correct`.")
        self._labels.rows += rows
        self._labels.values += told
        _refit_if_due(self)
        return self

    def correct(self, indices: ArrayLike, labels: ArrayLike) -> Self:
        """Replace labels that were told wrongly, all or none.

        Parameters
        ----------
        indices : array-like of int of shape (k,)
            Rows of the pool that have a label.
        labels : array-like of shape (k,)
            The right ones.

        Returns
        -------
        self : Learner
            Refitted to all labels, if there was a model. Where less than two classes are left there
            is none until another comes.

        Raises
        ------
        ValueError
            If a row has no label yet or comes twice, a label is missing or not among `classes`,
            there are not as many labels as rows, or the refit raises it. Nothing has changed then.
        """
        rows, told = self._labels.told(indices, labels)
        unknown = sorted(set(rows) - set(self._labels.rows))
        if unknown:
            raise ValueError(f"rows {unknown} of indices have no label yet: use `tell`.")
        before, values = vars(self).copy(), self._labels.values
        self._labels.correct(rows, told)
        try:
            self._start_over()
        except BaseException:  # the last refit knows the labels from before
            vars(self).update(before)
            self._labels.values = values
            raise
        return self

    def _start_over(self):
        """Refit to labels of which some have changed."""
        had_model, self._posterior, self._n_fitted = self.estimator_ is not None, None, 0
        if not self._labels.enough(self._estimator):
            self.estimator_, self.classes_ = None, None
        elif had_model:
            self.refit()
        else:
            _refit_if_due(self)

    def refit(self) -> Self:
        """Fit the estimator to all labels now, unless the last refit had them all.

        Returns
        -------
        self : Learner

        Raises
        ------
        ValueError
            If there are fewer than two classes (of regressors, rows).
        """
        if not self._labels.enough(self._estimator):
            raise ValueError("a refit needs labels of two classes (for a regressor, of two rows).")
        rows, y = self.labelled_, self.y_
        if self.estimator_ is not None and self._n_fitted == len(rows):
            return self
        own = isinstance(self.estimator_, PosteriorClassifier)  # a forest would keep its trees
        # the last refit may be a mere place to start from
        warm = own and getattr(self.estimator_, "warm_start", False)
        start: Any = copy.copy(self.estimator_) if warm else clone(self._estimator)
        model = start.fit(rows_at(self._pool, rows), y)
        self.estimator_, self.classes_ = model, getattr(model, "classes_", None)
        self._n_fitted, self._posterior = len(rows), None
        self.history_.append(
            {"n_labels": len(rows), "expected_gain": self.expected_gain_, "score": None}
        )
        return self

    def predict_proba(self, X: RowsLike | None = None) -> np.ndarray:
        """Class probabilities with all labels so far, those since the last refit included.

        Parameters
        ----------
        X : array-like, CSR/CSC matrix or table of shape (m, d), default=None
            Rows to predict; None is the pool.

        Returns
        -------
        proba : ndarray of shape (m, n_classes)
            Columns in the order of `classes_`. Those of the last refit where the estimator has no
            `latent_covariance`.

        Raises
        ------
        ValueError
            If there is no model yet.
        """
        if self.estimator_ is None:
            raise ValueError("there is no model before labels of two classes are told.")
        X, new = self._pool if X is None else rows_of(X), slice(self._n_fitted, None)
        rows, labels = self.labelled_[new], self._labels.values[new]
        if not labels or self.classes_ is None or not _has_posterior(self.estimator_):
            return self.estimator_.predict_proba(X)
        posterior = posterior_of(self.estimator_, rows_at(self._pool, rows), X)
        for k, label in enumerate(labels):
            posterior = posterior.including(k, _coded(self.estimator_, label))
        return posterior.reference_proba()


def learn(
    estimator: Any,
    X_pool: RowsLike,
    oracle: Callable[..., Any],
    n_queries: int,
    *,
    batch_size: int = 1,
    score: Callable[..., Any] | None = None,
    y: ArrayLike | None = None,
    **learner_keywords: Any,
) -> Learner:
    """Buy labels for a pool: the loop around a `Learner`.

    Parameters
    ----------
    estimator : estimator
        See `Learner`.
    X_pool : array-like, CSR/CSC matrix or table of shape (n, d)
        All rows.
    oracle : callable
        `oracle(indices)` returns the labels of rows of the pool.
    n_queries : int
        Labels to buy.
    batch_size : int, default=1
        Labels that are bought at a time.
    score : callable or None, default=None
        `score(estimator)` of each refit is kept in `history_`.
    y : array-like of shape (n,), default=None
        Labels known before; see `Learner`.
    **learner_keywords
        Further parameters of `Learner`.

    Returns
    -------
    learner : Learner
        Refitted to all labels. What the oracle raises ends the loop; to keep the labels until then,
        make a `Learner` and write these four lines around it.

    Raises
    ------
    ValueError
        If there are fewer rows without label than `n_queries`, or as for `Learner`.

    Examples
    --------
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.active_learning import learn
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, _ = make_sparse_logistic(300, 50, random_state=0)
    >>> learner = learn(ConvexVariationalLogistic(), X, lambda rows: y[rows], 30, batch_size=5)
    >>> learner.history_[-1]["n_labels"]
    30
    """
    check_number("n_queries", n_queries, 1, integer=True)
    check_number("batch_size", batch_size, 1, integer=True)
    learner = Learner(estimator, X_pool, y, **learner_keywords)
    n_free = int(learner._labels.free().sum())
    if n_queries > n_free:
        raise ValueError(f"n_queries={n_queries} is more than the {n_free} rows without label.")
    left = n_queries
    while left:
        rows = learner.ask(min(batch_size, left))
        learner.tell(rows, oracle(rows))
        left -= len(rows)
        _keep_score(learner, score)
    if learner.estimator_ is not None:
        learner.refit()
        _keep_score(learner, score)
    return learner


def _refit_if_due(learner):
    """Refit a learner that has so many new labels, or a new class, or enough for its first fit."""
    if learner.estimator_ is None:
        due = learner._labels.enough(learner._estimator)
    else:
        new, known = learner._labels.values[learner._n_fitted :], learner.classes_
        unknown = known is not None and not np.all(np.isin(new, known))
        due = len(new) >= learner._refit_every or unknown
    if due:
        learner.refit()


def _keep_score(learner, score):
    """Score the last refit unless that has been done."""
    if score is not None and learner.history_ and learner.history_[-1]["score"] is None:
        learner.history_[-1]["score"] = score(learner.estimator_)
