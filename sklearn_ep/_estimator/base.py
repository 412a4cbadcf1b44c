"""What the estimators share once they are fitted: prediction, diagnosis, pickles."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cholesky
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from .._engine.likelihoods import Probit
from .checks import check_number
from .compat import CallbackSupportMixin

__all__ = [
    "Diagnosis",
    "PosteriorClassifier",
    "VersionedEstimator",
    "diagnose_fit",
    "draw_latent",
    "log_normalise",
]


def log_normalise(log_p):
    """Return log probabilities (n, K) of one-versus-rest problems divided by their sum."""
    return log_p - logsumexp(log_p, axis=1, keepdims=True)


@dataclass(frozen=True)
class Diagnosis:
    """How far to trust a fit; printing it gives a summary in words.

    Attributes
    ----------
    estimator_name : str
        Class of the estimator.
    converged : bool
        Whether the fixed point was reached.
    residual, tol : float
        Residual of an undamped sweep and the tolerance it was held against.
    n_iter : int
        Iterations of the fit.
    ess_share : float or None
        Effective share of draws from the approximate posterior when they are weighted to the true
        one; None where that is not cheap.
    pareto_k : float or None
        Tail shape of those weights: below 0.5 good, above 0.7 not to be trusted.
    remarks : tuple of str
        Further findings in words.
    """

    estimator_name: str
    converged: bool
    residual: float
    tol: float
    n_iter: int
    ess_share: float | None = None
    pareto_k: float | None = None
    remarks: tuple[str, ...] = ()

    def __str__(self):
        reached = "reached" if self.converged else "did NOT reach"
        lines = [
            f"{self.estimator_name} {reached} its fixed point in {self.n_iter} iterations "
            f"(residual {self.residual:.2g}, tolerance {self.tol:g})."
        ]
        if self.pareto_k is not None:
            verdict = (
                "close to the true posterior"
                if self.pareto_k < 0.5
                else "usable, with errors in the tails"
                if self.pareto_k < 0.7
                else "not a reliable stand-in for the true posterior in all directions at once"
            )
            lines.append(
                f"The approximate posterior is {verdict} (Pareto k {self.pareto_k:.2f}, "
                f"effective share of draws {self.ess_share:.2f})."
            )
        return "\n".join([*lines, *self.remarks])


def diagnose_fit(estimator, check=None, remarks=()):
    """Return the `Diagnosis` of a fitted estimator, with its `ImportanceCheck` if there is one."""
    check_is_fitted(estimator)
    return Diagnosis(
        type(estimator).__name__,
        bool(estimator.converged_),
        float(estimator.history_["residual"][-1]),
        float(estimator.tol),
        int(estimator.n_iter_),
        None if check is None else check.ess_share,
        None if check is None else check.pareto_k,
        remarks=tuple(remarks),
    )


class VersionedEstimator(BaseEstimator):
    """Estimator whose pickles know the version that wrote them, and say so when it differs.

    The HTML view of scikit-learn links to our pages and shows our docstrings.
    """

    _doc_link_module = "sklearn_ep"
    _doc_link_template = (
        "https://sklearn-ep.readthedocs.io/en/stable/generated/sklearn_ep.{estimator_name}.html"
    )

    def diagnose(self):
        """Say how far to trust the fit.

        Returns
        -------
        diagnosis : Diagnosis
            Convergence, residual and iterations; printing it gives a summary in words.
        """
        return diagnose_fit(self)

    def __getstate__(self):
        from .. import __version__

        return {**super().__getstate__(), "_sklearn_ep_version": __version__}

    def __setstate__(self, state):
        from .. import __version__

        state = dict(state)
        written = state.pop("_sklearn_ep_version", "an unknown version")
        if written != __version__:
            warnings.warn(
                f"{type(self).__name__} was saved by sklearn-ep {written} and is read by "
                f"{__version__}; fit it again if results matter.",
                UserWarning,
                stacklevel=2,
            )
        super().__setstate__(state)


class PosteriorClassifier(CallbackSupportMixin, ClassifierMixin, VersionedEstimator):
    """Classifier that predicts from Gaussian posteriors of a latent function.

    A subclass fills in `fit` `classes_` and `_posteriors`, a list with one item for two classes and
    one a class otherwise. An item offers `latent(X)` -> mean and variance (n,), `covariance(X1,
    X2)` -> (n1, n2), and may offer `draw(X, n_samples, rng)` -> joint draws (n_samples, n).
    `_link` is the factor whose log Z is the log probability of a label.
    """

    _link: Any = Probit()
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
        return matrices[0] if len(matrices) == 1 else np.stack(matrices)

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

    def _log_proba(self, X):
        """Log probabilities (n, K) of checked rows."""
        pairs = [p.latent(X) for p in self._posteriors]
        return self._log_proba_from_latent(pairs)

    def _log_proba_from_latent(self, pairs):
        if len(pairs) == 1:
            mean, var = pairs[0]
            return np.column_stack([self._link.tilted(s, mean, var).log_z for s in (-1.0, 1.0)])
        columns = [k.tilted(1.0, *p).log_z for k, p in zip(self._links(), pairs, strict=True)]
        return log_normalise(np.column_stack(columns))

    def _links(self):
        """Return the factor of each binary problem whose log Z is the log probability of +1."""
        return [self._link] * len(self._posteriors)

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
        return self._log_proba(self._check_new(X))

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
        proba = np.exp(self.predict_log_proba(X))
        return proba / proba.sum(axis=1, keepdims=True)

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
        links = self._links()
        pairs = [(1.0, link, f) for link, f in zip(links, draws, strict=True)]
        if len(draws) == 1:
            pairs = [(-1.0, links[0], draws[0]), *pairs]
        log_p = np.stack([link.log_prob(label, f) for label, link, f in pairs], axis=-1)
        return np.exp(log_p - logsumexp(log_p, axis=-1, keepdims=True))


def draw_latent(posterior, X, n_samples, rng):
    """Joint draws (n_samples, n) of the latent function, by the posterior's own way or Cholesky."""
    if hasattr(posterior, "draw"):
        return posterior.draw(X, n_samples, rng)
    mean, _ = posterior.latent(X)
    cov = posterior.covariance(X, X)
    # rows may repeat, so the matrix may be singular: a relative jitter changes nothing visible
    cov[np.diag_indices_from(cov)] += 1e-10 * (1.0 + np.diagonal(cov).max())
    return mean + rng.standard_normal((n_samples, len(mean))) @ cholesky(cov, lower=True).T
