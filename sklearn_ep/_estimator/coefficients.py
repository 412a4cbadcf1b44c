"""What linear estimators tell of their coefficients: intervals, and a table of what was learned."""

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from .checks import check_number
from .summary import Summary, coefficient_columns, title_of


class CoefficientReport:
    """Intervals and summary of a linear estimator.

    A subclass offers `_coefficients(level)`: means and standard deviations (.., q) of its
    coefficients, with an intercept last if there is one, and their intervals (.., q, 2);
    `_coefficient_names()`, one for each of them, features of all classes first; `_more_columns()`
    and `_figures()`, what a summary shows besides.
    """

    _coefficients: Any
    _coefficient_names: Any
    _figures: Any
    n_features_in_: int

    def _more_columns(self):
        """Return further columns of the table, arrays of its length, by name."""
        return {}

    def coef_interval(self, level=0.9):
        """Central posterior intervals of the coefficients.

        Parameters
        ----------
        level : float, default=0.9
            Probability in (0, 1) that an interval covers its coefficient.

        Returns
        -------
        interval : ndarray of the shape of `coef_` and a last axis of 2
            Lower and upper end, on the scale of `coef_`: quantiles of the posterior, where
            hyperparameters are averaged over those of the mixture.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        check_is_fitted(self)
        check_number("level", level, 0, 1, boundaries="neither")
        return self._coefficients(level)[2][..., : self.n_features_in_, :]

    def summary(self, level=0.9):
        """Tabulate what was learned: coefficients with intervals, and key figures.

        Parameters
        ----------
        level : float, default=0.9
            Probability in (0, 1) that an interval covers its coefficient.

        Returns
        -------
        summary : Summary
            Printing it shows the table, ``to_frame()`` gives it to pandas. Columns are name, mean,
            sd, lower and upper, and inclusion where columns may be left out (nan for the
            intercept); an intercept is the last row. With more than two classes a name is "class:
            column", and the intercepts of all classes are last. The figures are those that the
            prior and the noise were learned to be.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        check_is_fitted(self)
        check_number("level", level, 0, 1, boundaries="neither")
        d = self.n_features_in_
        mean, std, interval = self._coefficients(level)
        mean, std = (np.concatenate([a[..., :d].ravel(), a[..., d:].ravel()]) for a in (mean, std))
        ends = [interval[..., :d, :].reshape(-1, 2), interval[..., d:, :].reshape(-1, 2)]
        names, more = self._coefficient_names(), self._more_columns()
        columns = coefficient_columns(names, mean, std, level, np.vstack(ends), **more)
        return Summary(title_of(self), level, columns, figures=self._figures())
