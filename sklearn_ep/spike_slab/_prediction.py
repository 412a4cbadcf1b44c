"""What a fitted spike-and-slab regressor predicts, in the units of the user."""

from typing import Any

import numpy as np
from scipy.special import softmax
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from .._estimator.checks import check_number

__all__ = ["SpikeSlabPrediction"]


class SpikeSlabPrediction:
    """Methods that read the posterior kept by `fit`; a mixin of the regressor."""

    _design: Any
    _posterior: Any
    _mixture: Any
    coef_: np.ndarray
    inclusion_proba_: np.ndarray
    fixed_point_log_evidences_: np.ndarray
    noise_variance_: float

    def _rows(self, X):
        check_is_fitted(self)
        return self._design.rows(validate_data(self, X, reset=False, dtype=np.float64))

    def predict(self, X, return_std=False, mixture=False):
        """Predict responses.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows.
        return_std : bool, default=False
            Give the standard deviation of a new response as well, the noise included.
        mixture : bool, default=False
            Average over the fixed points that `n_init` starts found, weighted by their evidences,
            instead of taking the one of largest evidence.

        Returns
        -------
        mean : ndarray of shape (n,)
            Predictive means.
        std : ndarray of shape (n,)
            Predictive standard deviations, only with `return_std`. O(n_train d) a row for d >
            n_train, O(d^2) otherwise.
        """
        rows, design = self._rows(X), self._design
        points = (self._mixture if mixture else []) or [self._posterior]
        means = np.stack([rows @ p.mean for p in points])
        weight = softmax(self.fixed_point_log_evidences_) if len(points) > 1 else np.ones(1)
        mean = weight @ means
        response = design.y_offset + design.y_scale * mean
        if not return_std:
            return response
        spread = np.stack([p.covariance(rows) for p in points]) + (means - mean) ** 2
        noise = self.noise_variance_
        var = design.y_scale**2 * (weight @ spread) + noise + design.intercept_variance(noise)
        return response, np.sqrt(var)

    def latent_covariance(self, X1, X2=None):
        """Posterior covariance of the noise-free responses at rows.

        Parameters
        ----------
        X1 : array-like of shape (n1, d)
            Rows.
        X2 : array-like of shape (n2, d), default=None
            Rows; None stands for X1.

        Returns
        -------
        covariance : ndarray of shape (n1, n2)
            The intercept's uncertainty included.
        """
        first = self._rows(X1)
        second = first if X2 is None else self._rows(X2)
        cov = self._design.y_scale**2 * self._posterior.covariance(first, second)
        return cov + self._design.intercept_variance(self.noise_variance_)

    def covariance(self, features):
        """Posterior covariance of some coefficients.

        Parameters
        ----------
        features : array-like of int of shape (k,), or mask of shape (d,)
            Which coefficients.

        Returns
        -------
        covariance : ndarray of shape (k, k)
            On the scale of `coef_`. O(n^2 k) for d > n: no d x d matrix is formed.
        """
        check_is_fitted(self)
        index = np.arange(len(self.coef_))[np.asarray(features)]
        unit = self._design.to_coef(np.ones(len(self.coef_)))[index]
        return self._posterior.block(index) * np.outer(unit, unit)

    def sample_posterior(self, n_samples=1, random_state=None):
        """Draw coefficients from the Gaussian approximation of the posterior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed.

        Returns
        -------
        coef : ndarray of shape (n_samples, d) or (n_samples, d + 1)
            Draws, the intercept in the last column when one was fitted. O(n d) each for d > n.
        """
        check_is_fitted(self)
        check_number("n_samples", n_samples, 1, integer=True)
        rng, design = check_random_state(random_state), self._design
        coef = design.to_coef(self._posterior.draw(n_samples, rng))
        if not design.fit_intercept:
            return coef
        sd = np.sqrt(design.intercept_variance(self.noise_variance_))
        intercept = design.intercept(coef) + sd * rng.standard_normal(n_samples)
        return np.column_stack([coef, intercept])

    def get_support(self, threshold=0.5):
        """Features that are in the model with more than a given probability.

        Parameters
        ----------
        threshold : float, default=0.5
            Probability; one half is the median model.

        Returns
        -------
        mask : ndarray of bool of shape (d,)
            True for the features in the model.
        """
        check_is_fitted(self)
        check_number("threshold", threshold, 0, 1)
        return self.inclusion_proba_ > threshold
