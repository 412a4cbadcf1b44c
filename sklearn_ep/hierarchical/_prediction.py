"""Prediction with group labels: what `HierarchicalEPLogistic` adds to `PosteriorClassifier`."""

from types import MethodType

import numpy as np
from scipy.sparse import issparse
from scipy.special import log_expit, logsumexp
from sklearn.metrics import accuracy_score
from sklearn.utils import Bunch, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from .._estimator.base import PosteriorClassifier, log_normalise
from .._estimator.checks import check_choice, check_number
from ._groups import column_position, label_list, look_up, split_column
from ._mixture import NEW_GROUP
from ._parts import design_of

__all__ = ["GroupedClassifier", "separated"]

_KINDS = ("conditional", "population")


def separated(X, position):
    """Return (X without the column of the groups, labels) of any two-dimensional input."""
    if issparse(X):
        raise TypeError(
            "Sparse data was passed, but dense data is required; use .toarray() to convert."
        )
    if not hasattr(X, "columns") and not isinstance(X, np.ndarray):
        kinds = {type(value) for row in X for value in row}
        X = np.array(X, dtype=object if str in kinds or type(None) in kinds else None)
    return split_column(X, position)


class _OnceFitted:
    """Method that only a fitted estimator has; before, looking it up raises NotFittedError."""

    def __init__(self, method):
        self.method = method

    def __get__(self, instance, owner=None):
        if instance is None:
            return self.method
        check_is_fitted(instance)
        return MethodType(self.method, instance)


class GroupedClassifier(PosteriorClassifier):
    """Classifier whose linear predictor has effects of groups, known or new.

    A subclass sets `_posteriors` (list of `GroupedMixture`), `group_labels_`, `_group_position`
    (position of the group column or None), `_slopes` (columns of the design with varying
    coefficients) and `_has_groups`.
    """

    def _check_grouped(self, X, groups=None, kind="conditional"):
        """Return checked (shared design, local design, codes) of rows to predict."""
        check_is_fitted(self)
        check_choice("kind", kind, _KINDS)
        position, labels = self._group_position, None
        if position is None:
            X = validate_data(self, X, reset=False, dtype=np.float64)
            labels = None if groups is None else label_list(groups, len(X))
            if labels is not None and not self._has_groups:
                raise ValueError("groups were given, but the model was fitted without groups.")
        else:
            if groups is not None:
                raise ValueError("groups= was given although group_column names a column of X.")
            validate_data(self, X, reset=False, skip_check_array=True)
            X, labels = separated(X, position)
            X = check_array(X, dtype=np.float64, ensure_min_features=0)
        if labels is None or kind == "population" or not self._has_groups:
            code = np.full(len(X), NEW_GROUP)
        else:
            code = look_up(labels, self.group_labels_)
        return (*design_of(X, self._slopes, self.fit_intercept, self._has_groups), code)

    def _position_of(self, column, X, parameter):
        return column_position(column, X, self.n_features_in_, parameter)

    def latent_mean_and_variance(self, X, groups=None, kind="conditional"):
        """Posterior mean and variance of the linear predictor at new rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X. Unseen and missing labels are new
            groups, whose effect is integrated over the population.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        mean, variance : ndarray of shape (n,), or (n, n_classes) for more than two classes
            On the scale of log odds.
        """
        rows = self._check_grouped(X, groups, kind)
        pairs = [p.latent(*rows) for p in self._posteriors]
        if len(pairs) == 1:
            return pairs[0]
        return np.column_stack([m for m, _ in pairs]), np.column_stack([v for _, v in pairs])

    def latent_covariance(self, X1, X2=None, groups1=None, groups2=None):
        """Posterior covariance of the linear predictor between new rows.

        Parameters
        ----------
        X1 : array-like of shape (n1, d)
            Rows.
        X2 : array-like of shape (n2, d), default=None
            Rows; None stands for X1.
        groups1, groups2 : array-like of shape (n1,) and (n2,), default=None
            Group labels, where they are not a column of X. Rows with one unseen label share its
            effect; rows without label do not.

        Returns
        -------
        covariance : ndarray of shape (n1, n2), or (n_classes, n1, n2)
            One matrix a one-versus-rest problem for more than two classes.
        """
        first = self._check_grouped(X1, groups1)
        if X2 is None:
            second, same = first, np.equal.outer(first[2], first[2])
            missing = first[2] == NEW_GROUP
            same[np.ix_(missing, missing)] = np.eye(missing.sum(), dtype=bool)
        else:
            second = self._check_grouped(X2, groups2)
            same = self._shared_group(first[2], second[2], X1, X2, groups1, groups2)
        matrices = [p.covariance(first, second, same) for p in self._posteriors]
        return matrices[0] if len(matrices) == 1 else np.stack(matrices)

    def _shared_group(self, code1, code2, X1, X2, groups1, groups2):
        """Say which rows of two sets share a group; each set numbers unseen labels on its own."""
        n_groups = len(self.group_labels_)
        same = np.equal.outer(code1, code2) & (code1 >= 0)[:, None]
        unseen1, unseen2 = code1 >= n_groups, code2 >= n_groups
        if unseen1.any() and unseen2.any():
            labels1, labels2 = self._labels_of(X1, groups1), self._labels_of(X2, groups2)
            for i in np.flatnonzero(unseen1):
                same[i, unseen2] = [labels1[i] == labels2[j] for j in np.flatnonzero(unseen2)]
        return same

    def _labels_of(self, X, groups):
        if self._group_position is None:
            return label_list(groups, len(X))
        return separated(X, self._group_position)[1]

    # The posterior mean and the averaged probability need not rank rows alike, since rows differ in
    # posterior variance; tools that assume equal ranks look at the unfitted estimator, and shall
    # find predict_proba only.
    @_OnceFitted
    def decision_function(self, X, groups=None, kind="conditional"):
        """Posterior mean of the linear predictor.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        mean : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Log odds; positive where the second class is favoured.
        """
        return self.latent_mean_and_variance(X, groups, kind)[0]

    def predict_log_proba(self, X, groups=None, kind="conditional"):
        """Log probabilities of the classes, computed in logs throughout.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        log_proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`.
        """
        rows = self._check_grouped(X, groups, kind)
        pairs = [p.log_proba(*rows) for p in self._posteriors]
        if len(pairs) == 1:
            return pairs[0]
        return log_normalise(np.column_stack([p[:, 1] for p in pairs]))

    def predict_proba(self, X, groups=None, kind="conditional"):
        """Probabilities of the classes, averaged over the posterior of coefficients and effects.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X. Unseen and missing labels are new
            groups, whose effect is integrated over the population.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; rows sum to one.
        """
        proba = np.exp(self.predict_log_proba(X, groups, kind))
        return proba / proba.sum(axis=1, keepdims=True)

    def predict(self, X, groups=None, kind="conditional"):
        """Most probable class.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        y : ndarray of shape (n,)
            Labels out of `classes_`.
        """
        log_proba = self.predict_log_proba(X, groups, kind)
        return self.classes_[np.argmax(log_proba, axis=1)]

    def score(self, X, y, sample_weight=None, groups=None):
        """Accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        y : array-like of shape (n,)
            True classes.
        sample_weight : array-like of shape (n,), default=None
            Weights of the rows.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.

        Returns
        -------
        score : float
            Share of rows, by weight, whose class is predicted.
        """
        return accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight)

    def sample_proba(self, X, n_samples=10, random_state=None, groups=None):
        """Draw class probabilities from the posterior: a committee of models.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        n_samples : int, default=10
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.

        Returns
        -------
        proba : ndarray of shape (n_samples, n, n_classes)
            Coefficients and group effects of one draw are the same for all rows.
        """
        rows = self._check_grouped(X, groups)
        check_number("n_samples", n_samples, 1, integer=True)
        rng = self._generator(random_state)
        draws = [p.draw_latent(*rows, n_samples, rng) for p in self._posteriors]
        signed = [-draws[0], draws[0]] if len(draws) == 1 else draws
        log_p = np.stack([log_expit(z) for z in signed], axis=-1)
        return np.exp(log_p - logsumexp(log_p, axis=-1, keepdims=True))

    def sample_posterior(self, n_samples=1, random_state=None):
        """Draw all parameters jointly from the posterior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        draws : Bunch
            coef (n_samples, D), intercept (n_samples,), tau (n_samples, q) and group_effects
            (n_samples, J, q), in phase: entry s of each is one draw of the whole posterior. With
            more than two classes each array has the class as its second axis.
        """
        check_is_fitted(self)
        check_number("n_samples", n_samples, 1, integer=True)
        rng = self._generator(random_state)
        draws = []
        for posterior in self._posteriors:
            beta, effects, theta, _ = posterior.draw(n_samples, rng)
            coef, intercept = self._split_intercept(beta)
            draws.append((coef, intercept, posterior.scales(theta), effects))
        arrays = draws[0] if len(draws) == 1 else [np.stack(a, 1) for a in zip(*draws, strict=True)]
        return Bunch(
            **dict(zip(("coef", "intercept", "tau", "group_effects"), arrays, strict=True))
        )

    def _split_intercept(self, beta):
        """Return (coefficients, intercept) of vectors (..., D)."""
        if self.fit_intercept:
            return beta[..., :-1], beta[..., -1]
        return beta, np.zeros(beta.shape[:-1])

    def _generator(self, random_state):
        """Return a Generator seeded as scikit-learn's random_state demands."""
        return np.random.default_rng(check_random_state(random_state).randint(2**31))
