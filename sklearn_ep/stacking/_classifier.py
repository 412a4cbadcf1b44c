"""Bayesian stacking: a mixture of classifiers by what they say of rows left out.

Part k gives row i the probability p_ik when the row is left out. The weights w have the posterior

    p(w | y)  proportional to  Dirichlet(w; 1/2, ..., 1/2) prod_i (sum_k w_k p_ik)^c_i

with counts c_i. Predictions are linear in w, so that its mean is all they need (Yao, Vehtari,
Simpson and Gelman 2018 maximise the product instead, which leaves out any part that is second).
"""

import numbers
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike
from scipy.special import gammaincinv, gammaln, logsumexp, softmax
from scipy.stats import qmc
from sklearn.base import ClassifierMixin, is_classifier
from sklearn.model_selection import check_cv
from sklearn.utils import Bunch, check_array, column_or_1d, get_tags
from sklearn.utils.metaestimators import _BaseComposition
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from .._engine.hyper import log_mixture, mixture_moments
from .._engine.partition import Workers
from .._estimator.annotations import RowsLike, Seed
from .._estimator.base import SavedEstimator
from .._estimator.categories import CategoryCoder, category_columns
from .._estimator.checks import (
    FewCopiesWarning,
    SpreadWarning,
    check_number,
    check_running,
    check_sequence,
    checked_weights,
    validated_coded,
    warn_of_few_copies,
    warn_of_spreads,
)
from .._estimator.fitting import fit_method
from .._estimator.summary import Table
from ._parts import default_parts, fit_part, optimism, proba_intervals

_CONCENTRATION = 0.5  # of the Dirichlet prior: Jeffreys' of a share


class WeightDraws(NamedTuple):
    """How many draws find the weights: rows times draws, and the least and most of the draws.

    On twelve sets of 60 to 900 rows and five parts means are within .021, on ten within .005, of
    those by thirty times as many draws. A quarter of the draws is within .054, and four times as
    many within .004, at 3.5 times the CPU time (`python doc/benchmarks/stack_weights.py`).
    """

    entries: float = 1e6
    least: int = 300
    most: int = 1500


_DRAWS = WeightDraws()


def _posterior_of_weights(log_p, count):
    """Return mean and sd (K,) of weights, from log probabilities (n, K) of rows seen count times.

    By importance sampling: draws are from Dirichlet distributions about the mode, wide ones and
    narrow ones, and then twice from those about the mean by the draws before. They are smooth in
    the probabilities: rounding errors of a part move weights by as little.
    """
    tells = np.isfinite(log_p).any(axis=1)  # a row that no part expects says nothing of weights
    log_p, count = log_p[tells], count[tells]
    p = np.exp(log_p - log_p.max(axis=1, keepdims=True))
    total, k = count.sum(), log_p.shape[1]
    mean = np.full(k, 1.0 / k)
    for _ in range(30):  # EM to the mode of the log ratios
        share = p * mean
        share /= share.sum(axis=1, keepdims=True)
        mean = (count @ share + _CONCENTRATION) / (total + k * _CONCENTRATION)
    alpha = _CONCENTRATION + np.multiply.outer(total * 0.25 ** np.arange(6), mean)
    n = int(np.clip(_DRAWS.entries / max(total, len(p), 1), _DRAWS.least, _DRAWS.most))
    for n_draws in (n // 4, n // 4, n):
        mean, variance = _moments(p, count, alpha, n_draws)
        size = np.median(mean * np.maximum(1.0 - mean, 0.0) / np.maximum(variance, 1e-300))
        wide = np.multiply.outer([0.5, 1.0, 2.0], np.minimum(size, total + 1.0) * mean)
        alpha = np.vstack([np.full(k, _CONCENTRATION), wide + 0.2])
    return mean / mean.sum(), np.sqrt(variance)


@lru_cache(maxsize=64)
def _uniforms(n_columns, log_size, seed):
    """Return 2^log_size points (.., n_columns) that fill the unit cube evenly, none on a face."""
    return np.clip(qmc.Sobol(n_columns, rng=seed).random_base2(log_size), 1e-12, 1.0 - 1e-12)


def _moments(p, count, alpha, n_draws):
    """Return mean and variance (K,) of weights by about so many draws from Dirichlet(alpha).

    p (n, K) are probabilities in units of the largest of each row, alpha (J, K).
    """
    log_size = round(np.log2(n_draws / len(alpha)))
    points = [_uniforms(alpha.shape[1], log_size, seed) for seed in range(len(alpha))]
    weights = np.concatenate([gammaincinv(*pair) for pair in zip(alpha, points, strict=True)])
    weights = np.maximum(weights / weights.sum(axis=1, keepdims=True), 1e-100)
    log_w = np.log(weights)
    scale = gammaln(alpha.sum(axis=1)) - gammaln(alpha).sum(axis=1)
    log_drawn = logsumexp(log_w @ alpha.T + scale, axis=1)  # densities of log ratios
    # in single precision, a third of the time: sums are good to some 1e-5
    log_p = np.log(p.astype(np.float32) @ weights.T.astype(np.float32))
    log_mass = count.astype(np.float32) @ log_p + _CONCENTRATION * log_w.sum(axis=1) - log_drawn
    return mixture_moments(softmax(log_mass), weights, np.zeros(weights.shape))


def _pairs_of(estimators):
    """Return those entries of a list that are pairs; none of what is no list."""
    listed = estimators if isinstance(estimators, tuple | list) else []
    return [own for own in listed if isinstance(own, tuple | list) and len(own) == 2]


def _is_fold(fold):
    """Return whether a fold is a pair of row numbers (or masks), training rows and others."""
    sized = hasattr(fold, "__len__") and not isinstance(fold, str)
    return sized and len(fold) == 2 and all(np.ndim(rows) == 1 for rows in fold)


def _folds(cv, X, y, seen):
    """Return the folds of `cv` as pairs, or None: a splitter may draw others when asked again.

    Only rows that are `seen` train: a class whose rows in a fold have weight zero is not in it.
    """
    if cv is None:
        return None
    if isinstance(cv, numbers.Real):
        check_number("cv", cv, 2, integer=True)
    elif np.iterable(cv) and not isinstance(cv, str):
        cv = list(cv)
        if not cv or not all(map(_is_fold, cv)):
            raise ValueError(
                "cv must be None, a number of folds, a splitter, or pairs (train, test) of row "
                f"numbers, got {cv!r}."
            )
    rows, folds = np.arange(len(y)), check_cv(cv, y, classifier=True).split(X, y)
    return [(rows[train][seen[train]], test) for train, test in folds]


def _has_tags(part):
    return hasattr(part, "__sklearn_tags__") and not isinstance(part, type)


class BayesianStackingClassifier(ClassifierMixin, SavedEstimator, _BaseComposition):
    """Mixture of classifiers, weighed by the probabilities they give to rows left out.

    p(y | x) = sum_k w_k p_k(y | x). Every part is fitted to all rows. The weights have a
    Dirichlet(1/2) prior and the leave-one-out probabilities of the training rows as likelihood;
    predictions use their posterior mean.

    **You will set** `estimators`, `cv` and `n_jobs`. Leave the other parameters at their defaults.

    Parameters
    ----------
    estimators : list of (str, classifier), default=None
        Parts with their names. Without `cv` each needs `loo_proba_` after `fit`, which all
        classifiers of this package but `HierarchicalEPLogistic` have; a pipeline uses its last
        step. None is `EPGaussianProcessClassifier`, `ConvexVariationalLogistic`, and a forest of
        randomised trees with out-of-bag probabilities. Up to 500 columns there are two more: an
        additive model, which is the linear one of cubic splines of the columns, and boosted trees,
        three ensembles that lack a third of the rows each. The Gaussian process has an intercept
        here, and a linear term beyond 500 columns of fewer than 500 rows. On most data one of the
        five is near the best. Where X is sparse it is the linear model alone, and where it is a
        frame of categories there is no additive one.
    cv : int, splitter, iterable of splits or None, default=None
        Folds by which all parts are weighed, as in scikit-learn. They serve for parts without
        `loo_proba_` and take one more fit for each fold. None is leave-one-out, which costs
        nothing.
    n_jobs : int or None, default=None
        Workers for the parts. Answers do not depend on it.
    random_state : int, RandomState instance or None, default=None
        Seed of the default parts; parts that are given have their own. Trees have the seed zero
        where this is None, so that fits to the same rows agree.
    verbose : int, default=0
        1 prints the `summary` at the end of a fit.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Labels, sorted.
    estimators_ : list of classifier
        The fitted parts.
    named_estimators_ : Bunch
        The same by name.
    weights_ : ndarray of shape (n_parts,)
        Posterior mean of the weights; they sum to one.
    weights_std_ : ndarray of shape (n_parts,)
        Posterior standard deviation of the weights.
    loo_proba_ : ndarray of shape (n,)
        Probability that the mixture gives to the label of each row when the row is left out, with
        the weights kept; nan for rows of weight zero, where a part has none, and where a class is
        in no row that a fold of `cv` is predicted from.
    log_score_ : float
        Mean log of `loo_proba_` where it is known, weighted: an estimate of minus the log loss on
        new rows.
    part_log_scores_ : ndarray of shape (n_parts,)
        The same of each part.
    n_features_in_ : int
        Columns of X.
    feature_names_in_ : ndarray of str of shape (d,)
        Names of the columns, where X had them and the first part keeps them.

    See Also
    --------
    EPGaussianProcessClassifier : Non-linear part.
    ConvexVariationalLogistic : Linear and additive part.

    Notes
    -----
    Cost: the fits of the parts, and O(n K) for the weights of K parts. Leave-one-out probabilities
    of a part keep its hyperparameters. They are a little optimistic where few rows decide many
    hyperparameters. The weights of the default parts allow for that. From the sum of log
    probabilities of the Gaussian process 1 is taken for each effective length
    (`effective_lengths_`), or d / 100 where there are more than 100 columns. From that of the
    additive model 1/10 is taken for each effective degree of freedom (`effective_dof_`).

    A tree of the forest sees 63 % of the rows, at most 4000, and of each all copies or none; a
    boosted tree sees two thirds. Trees predict the rows that they lack. From these predictions the
    slope of their log probabilities is learned, whose log is standard normal a priori, and boosting
    ends where it gets no better. The dense Gaussian process of two classes (up to 1000 rows) has a
    slope as well, from rows that are seen once, whose log is N(0, 0.35^2) a priori.

    References
    ----------
    Y. Yao, A. Vehtari, D. Simpson and A. Gelman (2018). Using stacking to average Bayesian
    predictive distributions. Bayesian Analysis 13(3). The weights there are the maximum of the same
    product; the mean has no part at exactly zero.

    J. H. Friedman (2001). Greedy function approximation: a gradient boosting machine. Annals of
    Statistics 29(5).

    P. Geurts, D. Ernst and L. Wehenkel (2006). Extremely randomized trees. Machine Learning 63(1).

    L. Breiman (1996). Out-of-bag estimation. University of California.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn_ep import BayesianStackingClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = BayesianStackingClassifier(random_state=0).fit(X, y)
    >>> model.predict(X[:2])
    array([0, 0])
    """

    def __init__(
        self,
        estimators: Sequence[tuple[str, Any]] | None = None,
        *,
        cv: Any = None,
        n_jobs: int | None = None,
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.estimators = estimators
        self.cv = cv
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters, and with `deep` the parts by name with theirs.

        Parameters
        ----------
        deep : bool, default=True
            Whether to list the parts and their parameters, too.

        Returns
        -------
        params : dict of str to object
            Names and values.
        """
        return self._get_params("estimators", deep=deep)

    def set_params(self, **params: Any) -> Self:
        """Set parameters, those of parts as ``name__parameter``, or a whole part by its name.

        Parameters
        ----------
        **params : object
            New values by name.

        Returns
        -------
        self : BayesianStackingClassifier
            The estimator.
        """
        self._set_params("estimators", **params)
        return self

    @fit_method
    def fit(self, X: RowsLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit all parts, and weigh them.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n, d)
            Rows; handed to the parts as they are. The default parts take columns of a data frame
            that hold text, categories or bools as categories, see `EPGaussianProcessClassifier`.
        y : array-like of shape (n,)
            Labels.
        sample_weight : array-like of shape (n,), default=None
            How often each row was seen; every part has to take weights, and steps before it get
            them where they take any.

        Returns
        -------
        self : BayesianStackingClassifier
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If `estimators` is empty, two parts share a name, or one is no classifier or has no
            `predict_proba`. If a part has no `loo_proba_` and `cv` is None, or no row has one of
            every part. If a part takes no `sample_weight` and there are some, or refuses the data.
        """
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )
        y = column_or_1d(check_array(y, ensure_2d=False, dtype=None, input_name="y"), warn=True)
        check_classification_targets(y)
        check_consistent_length(X, y)
        weight = checked_weights(sample_weight, y)
        seen = weight > 0
        warn_of_few_copies(self, weight[seen])
        n_rows = max(weight.sum(), np.count_nonzero(seen))
        named = self._checked_parts(X, n_rows)
        warned: list[type[UserWarning]] = [FewCopiesWarning]
        self._default, self._coder = self.estimators is None, None
        if self._default:
            self._coder = CategoryCoder().fit(X) if category_columns(X) else None
            warn_of_spreads(self, self._checked_rows(X, reset=True)[seen])
            warned.append(SpreadWarning)
        if self.estimators is None and not sp.issparse(X):
            # knots of splines without weights are elsewhere than with weights of one
            sample_weight = weight
        cv = _folds(self.cv, X, y, seen)
        tasks = [(fit_part, name, part, X, y, sample_weight, cv, warned) for name, part in named]
        parts, each = zip(*Workers(self.n_jobs)(tasks), strict=True)
        proba = np.array(each)
        # sampled variances leave some rows of a part no cavity, and folds some rows without others
        # of their class: they weigh no part
        seen &= ~np.any(np.isnan(proba), axis=0)
        if not np.any(seen):
            raise ValueError("no row has a leave-one-out probability of every part: set cv=5.")
        with np.errstate(divide="ignore"):  # a part may be certain, and wrong
            log_p = np.log(proba)
        told = log_p[:, seen]
        if self.estimators is None and self.cv is None:
            told = told - optimism(zip(dict(named), parts, strict=True), n_rows)
        self.weights_, self.weights_std_ = _posterior_of_weights(told.T, weight[seen])
        self.classes_ = np.unique(y)
        self.loo_proba_ = np.where(weight > 0, self.weights_ @ proba, np.nan)
        log_mean = log_mixture(self.weights_, log_p[:, seen])
        self.log_score_ = np.average(log_mean, weights=weight[seen])
        self.part_log_scores_ = np.average(log_p[:, seen], weights=weight[seen], axis=1)
        self._names, self.estimators_ = list(dict(named)), list(parts)
        for name in ("n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)
            if hasattr(parts[0], name):
                setattr(self, name, getattr(parts[0], name))
        if self.verbose:
            print(self.summary())
        return self

    def _checked_parts(self, X, n_rows):
        """Return [(name, part)] for so many rows, copies counted, after a look at parameters."""
        check_running(self)
        given = self.estimators
        if given is None:
            return default_parts(X, n_rows, self.random_state)
        check_sequence("estimators", given, "[(name, classifier), ...] or None")
        named = _pairs_of(given)
        if not named or len(named) < len(given):
            what = "has other entries" if len(given) else "is empty"
            raise ValueError(f"estimators {what}: give [(name, classifier), ...] or None.")
        self._validate_names([name for name, _ in named])
        for name, part in named:
            if not (_has_tags(part) and is_classifier(part)):
                raise ValueError(f"the part {name!r} is no classifier: {part!r}.")
        return named

    def _checked_rows(self, X, reset=False):
        """Return rows as numbers, checked for default parts: their errors would name a part."""
        if not self._default:
            return X
        return validated_coded(self, X, self._coder, reset=reset, accept_sparse=("csr", "csc"))

    @property
    def named_estimators_(self):
        """The fitted parts by name."""
        return Bunch(**dict(zip(self._names, self.estimators_, strict=True)))

    def predict_proba(self, X: RowsLike) -> np.ndarray:
        """Probabilities of the classes: the weighted mean of those of the parts.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n, d)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; rows sum to one.
        """
        check_is_fitted(self)
        self._checked_rows(X)
        return np.tensordot(self.weights_, [part.predict_proba(X) for part in self.estimators_], 1)

    def predict_log_proba(self, X: RowsLike) -> np.ndarray:
        """Log probabilities of the classes, mixed in logs.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n, d)
            Rows to predict.

        Returns
        -------
        log_proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`.
        """
        check_is_fitted(self)
        self._checked_rows(X)
        log_p = np.array([part.predict_log_proba(X) for part in self.estimators_])
        return log_mixture(self.weights_, log_p)

    def predict_proba_interval(self, X: RowsLike, level: float = 0.9) -> np.ndarray:
        """Intervals of the class probabilities: the weighted mean of those of the parts.

        This is exact where the probabilities of the parts rise and fall together, and usually too
        wide elsewhere. A part that states no interval, as trees do, is taken to be as sure as the
        others: its ends are as far from its probability, in log odds, as theirs are in the weighted
        mean.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n, d)
            Rows to predict.
        level : float, default=0.9
            Probability in (0, 1) that an interval covers the probability of its class.

        Returns
        -------
        interval : ndarray of shape (n, 2), or (n, n_classes, 2) for more than two classes
            Lower and upper end, of two classes for the second one.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1, or no part has a `predict_proba_interval`.
        """
        check_is_fitted(self)
        self._checked_rows(X)
        found = proba_intervals(self._names, self.estimators_, self.weights_, X, level)
        return np.minimum(np.tensordot(self.weights_, found, 1), 1.0)  # weights add up to rounding

    def predict(self, X: RowsLike) -> np.ndarray:
        """Most probable class.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n, d)
            Rows to predict.

        Returns
        -------
        y : ndarray of shape (n,)
            Labels out of `classes_`.
        """
        proba = self.predict_proba(X)
        return self.classes_[np.argmax(proba, axis=1)]

    def summary(self) -> Table:
        """Return the parts with their weights and leave-one-out scores, as a table that prints.

        Returns
        -------
        summary : Table
            One row a part, the heaviest first.
        """
        check_is_fitted(self)
        order = np.argsort(-self.weights_, kind="stable")
        names = np.array(self._names, dtype=object)
        columns = dict(part=names, weight=self.weights_, sd=self.weights_std_)
        columns |= {"log score": self.part_log_scores_}
        title = f"{type(self).__name__}: log score {self.log_score_:.4f} on rows left out"
        return Table(title, {heading: values[order] for heading, values in columns.items()})

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        # asked before a fit can refuse what is no part
        parts = [part for _, part in _pairs_of(self.estimators) if _has_tags(part)]
        tags.input_tags.sparse = all(get_tags(part).input_tags.sparse for part in parts)
        return tags
