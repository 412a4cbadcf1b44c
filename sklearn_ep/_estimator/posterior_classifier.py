"""Prediction from Gaussian posteriors of a latent function, for the classifiers that have one."""

from typing import Any

import numpy as np
from scipy.linalg import cholesky
from scipy.special import logsumexp
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from .base import VersionedEstimator
from .checks import check_number
from .compat import CallbackSupportMixin
from .fitting import one_or_stack

__all__ = ["PosteriorClassifier", "committee", "draw_latent", "log_normalise", "probabilities"]


def log_normalise(log_p):
    """Return log probabilities (n, K) of one-versus-rest problems divided by their sum."""
    return log_p - logsumexp(log_p, axis=1, keepdims=True)


def probabilities(log_proba):
    """Return probabilities (n, K) whose rows sum to one to the last digit."""
    proba = np.exp(log_proba)
    return proba / proba.sum(axis=1, keepdims=True)


def committee(links, draws):
    """Return class probabilities (S, n, K) for latent draws (S, n) of each binary problem."""
    pairs = [(1.0, link, f) for link, f in zip(links, draws, strict=True)]
    if len(draws) == 1:
        pairs = [(-1.0, links[0], draws[0]), *pairs]
    log_p = np.stack([link.log_prob(label, f) for label, link, f in pairs], axis=-1)
    return np.exp(log_p - logsumexp(log_p, axis=-1, keepdims=True))


class PosteriorClassifier(CallbackSupportMixin, ClassifierMixin, VersionedEstimator):
    """Classifier that predicts from Gaussian posteriors of a latent function.

    A subclass fills in `fit` `classes_` and `_posteriors`, a list with one item for two classes and
    one a class otherwise. An item offers `latent(X)` -> mean and variance (n,), `covariance(X1,
    X2)` -> (n1, n2), may offer `draw(X, n_samples, rng)` -> joint draws (n_samples, n), and has the
    `factor` whose log Z is the log probability of a label.
    """

    _accept_sparse: Any = False

    def _check_new(self, X):
        """Check rows to predict; `check_is_fitted` comes first everywhere."""
        check_is_fitted(self)
        return validate_data(
            self, X, reset=False, dtype=np.float64, accept_sparse=self._accept_sparse
        )

    def latent_mean_and_variance(self, X):
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
        pairs = [p.latent(X) for p in self._posteriors]
        if len(pairs) == 1:
            return pairs[0]
        return np.column_stack([m for m, _ in pairs]), np.column_stack([v for _, v in pairs])

    def latent_covariance(self, X1, X2=None):
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
            One matrix a one-versus-rest problem for more than two classes.
        """
        X1 = self._check_new(X1)
        X2 = X1 if X2 is None else self._check_new(X2)
        matrices = [p.covariance(X1, X2) for p in self._posteriors]
        return one_or_stack(matrices)

    def decision_function(self, X):
        """Posterior mean of the latent function.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        mean : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Positive where the second class is the more probable one.
        """
        return self.latent_mean_and_variance(X)[0]

    def latent_links(self):
        """Link between latent function and label, as the predictions use it.

        Returns
        -------
        links : list of Factor
            One for two classes, otherwise one a class. ``log_prob(1, f)`` of a link is the log
            probability of the second class (of this class) at a latent value f, and
            ``tilted(1, mean, variance)`` its logarithm averaged over a normal latent value, with
            two derivatives in the mean.
        """
        check_is_fitted(self)
        return self._links()

    def _links(self):
        return [p.factor for p in self._posteriors]

    def predict_log_proba(self, X):
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
        X = self._check_new(X)
        pairs = [p.latent(X) for p in self._posteriors]
        links = self._links()
        if len(pairs) == 1:
            return np.column_stack([links[0].tilted(s, *pairs[0]).log_z for s in (-1.0, 1.0)])
        columns = [link.tilted(1.0, *p).log_z for link, p in zip(links, pairs, strict=True)]
        return log_normalise(np.column_stack(columns))

    def predict_proba(self, X):
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
        return probabilities(self.predict_log_proba(X))

    def predict(self, X):
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
        log_proba = self.predict_log_proba(X)
        return self.classes_[np.argmax(log_proba, axis=1)]

    def sample_proba(self, X, n_samples=10, random_state=None):
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
        """
        X = self._check_new(X)
        check_number("n_samples", n_samples, 1, integer=True)
        rng = check_random_state(random_state)
        draws = [draw_latent(p, X, n_samples, rng) for p in self._posteriors]
        return committee(self._links(), draws)


def draw_latent(posterior, X, n_samples, rng):
    """Joint draws (n_samples, n) of the latent function, by the posterior's own way or Cholesky."""
    if hasattr(posterior, "draw"):
        return posterior.draw(X, n_samples, rng)
    mean, _ = posterior.latent(X)
    cov = posterior.covariance(X, X)
    # rows may repeat, so the matrix may be singular: a relative jitter changes nothing visible
    cov[np.diag_indices_from(cov)] += 1e-10 * (1.0 + np.diagonal(cov).max())
    return mean + rng.standard_normal((n_samples, len(mean))) @ cholesky(cov, lower=True).T
