"""Prediction from Gaussian posteriors of a latent function, for the classifiers that have one."""

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from .annotations import RowsLike, Seed
from .base import VersionedEstimator
from .checks import check_number, checked_draws, in_precision_of_rows
from .compat import CallbackSupportMixin
from .latents import latents_of, links_of, probabilities


class PosteriorClassifier(CallbackSupportMixin, ClassifierMixin, VersionedEstimator):
    """Classifier that predicts from Gaussian posteriors of a latent function.

    A subclass fills in `fit` `classes_` and `_posteriors`: one item for two classes or for several
    jointly, otherwise one a class. `latents.SeparateLatents` and `latents.JointLatents` say what an
    item offers.
    """

    classes_: np.ndarray
    loo_proba_: np.ndarray

    def latent_mean_and_variance(self, X: RowsLike) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and variance of the latent function at new rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows, taken as new ones even if they were seen in training.

        Returns
        -------
        mean, variance : ndarray of shape (n,), or (n, n_classes) for more than two classes
            In units of the latent function.
        """
        X = self._check_new(X)
        return self._latents().mean_and_variance(X)

    def latent_covariance(self, X1: RowsLike, X2: RowsLike | None = None) -> np.ndarray:
        """Posterior covariance of the latent function between new rows.

        Parameters
        ----------
        X1 : array-like of shape (n1, d)
            Rows.
        X2 : array-like of shape (n2, d), default=None
            Rows; None stands for X1.

        Returns
        -------
        covariance : ndarray of shape (n1, n2), or (n_classes, n1, n2)
            One matrix a class for more than two classes.
        """
        X1 = self._check_new(X1)
        X2 = X1 if X2 is None else self._check_new(X2)
        return self._latents().covariance(X1, X2)

    @in_precision_of_rows
    def decision_function(self, X: RowsLike) -> np.ndarray:
        """Posterior mean of the latent function.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        mean : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Positive where the second class is the more probable one. After an average over
            hyperparameters the two may differ on a row whose probability is close to one half.
        """
        X = self._check_new(X)
        return self._latents().mean(X)

    def latent_links(self, observed: bool = False) -> list[Any]:
        """Link between latent function and label, as the predictions use it.

        Parameters
        ----------
        observed : bool, default=False
            The link to the labels that `fit` receives, which differs where they may be wrong.

        Returns
        -------
        links : list of Factor
            One for two classes, otherwise one a class. ``log_prob(1, f)`` of a link is the log
            probability of the second class (of this class) at a latent value f. ``tilted(1, mean,
            variance)`` is the log of its average over a normal latent value, with two derivatives
            in the mean. For several classes with a joint posterior these are binary approximations
            of the joint link; probabilities do not come from them.
        """
        check_is_fitted(self)
        return links_of(self._posteriors) if observed else self._links()

    def _links(self):
        return links_of(self._posteriors)

    def _latents(self):
        return latents_of(self._posteriors, self._links(), getattr(self, "variance_temper_", None))

    @in_precision_of_rows
    def predict_log_proba(self, X: RowsLike) -> np.ndarray:
        """Log probabilities of the classes, computed in logs throughout.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        log_proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; finite however far out a row is.
        """
        return self._log_proba(X)

    def _log_proba(self, X):
        X = self._check_new(X)
        return self._latents().log_proba(X)

    @in_precision_of_rows
    def predict_proba(self, X: RowsLike) -> np.ndarray:
        """Probabilities of the classes, averaged over the posterior of the latent function.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; rows sum to one.
        """
        return probabilities(self._log_proba(X))

    @in_precision_of_rows
    def predict_proba_interval(self, X: RowsLike, level: float = 0.9) -> np.ndarray:
        """Intervals of the class probabilities under the posterior of the latent function.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        level : float, default=0.9
            Probability in (0, 1) that an interval covers the probability of its class, over the
            posterior of the latent function.

        Returns
        -------
        interval : ndarray of shape (n, 2), or (n, n_classes, 2) for more than two classes
            Lower and upper end, with two classes for the second one. They are quantiles with equal
            probabilities beyond both ends. With more than two classes they are quantiles over 1024
            evenly spread points of the posterior, with O(n K) memory for each point.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        check_number("level", level, 0, 1, boundaries="neither")
        X = self._check_new(X)
        return self._latents().proba_interval(X, level)

    def predict(self, X: RowsLike) -> np.ndarray:
        """Most probable class.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        y : ndarray of shape (n,)
            Labels out of `classes_`.
        """
        log_proba = self._log_proba(X)
        return self.classes_[np.argmax(log_proba, axis=1)]

    def sample_proba(
        self, X: RowsLike, n_samples: int = 10, random_state: Seed = None
    ) -> np.ndarray:
        """Draw class probabilities from the posterior: a committee of functions.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        n_samples : int, default=10
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        proba : ndarray of shape (n_samples, n, n_classes)
            One latent function a draw, jointly over all rows.

        Raises
        ------
        ValueError
            If `n_samples` is less than one.
        """
        X = self._check_new(X)
        rng = checked_draws(self, n_samples, random_state)
        return self._latents().committee(X, n_samples, rng)
