"""What posteriors of both sparse models say of features: which are in, and how they covary."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from .._estimator.checks import check_number
from ._credible_sets import expected_false


class FeatureSupport:
    """Selection of features by the `inclusion_proba_` of a fitted estimator, and covariances."""

    inclusion_proba_: np.ndarray
    expected_model_size_: float
    slab_variance_: Any
    prior_inclusion_: Any
    _posteriors: Any

    def get_support(self, threshold: float = 0.5, fdr: float | None = None) -> np.ndarray:
        """Features that are in the model with more than a given probability.

        Parameters
        ----------
        threshold : float, default=0.5
            Probability; one half is the median model. Not looked at with `fdr`.
        fdr : float or None, default=None
            Share in (0, 1) of false ones that may be expected: the most probable features are
            taken, as many as keep the mean of 1 - `inclusion_proba_` at most there. Of the sets of
            ``credible_sets(level=1 - fdr)``, where the estimator has such sets, no more are
            expected to be without an effect either.

        Returns
        -------
        mask : ndarray of bool of shape (d,)
            True for the features in the model.
        """
        check_is_fitted(self)
        check_number("threshold", threshold, 0, 1)
        if fdr is None:
            return self.inclusion_proba_ > threshold
        check_number("fdr", fdr, 0, 1, boundaries="neither")
        return expected_false(self.inclusion_proba_, fdr)

    def covariance(self, features: ArrayLike) -> np.ndarray:
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
        index = np.arange(len(self.inclusion_proba_))[np.asarray(features)]
        return self._posteriors[0].block(index)
