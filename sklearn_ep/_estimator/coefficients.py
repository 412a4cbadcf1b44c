"""What linear estimators tell of their coefficients: intervals, and a table of what was learned."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from .checks import check_number
from .summary import (
    Ranking,
    Summary,
    check_summary,
    coefficient_columns,
    column_names,
    names_by_class,
    title_of,
)


def strength_of(columns, of_column):
    """Return the keys of a `Ranking` of a table of coefficients, of which some are of a column.

    Inclusion where the table has it, to the four digits that are printed: the last bits of several
    that are one depend on the machine. Then |mean| / sd.
    """
    mean, sd = np.abs(columns["mean"]), columns["sd"]
    ratio = np.divide(mean, sd, out=np.zeros(len(mean)), where=sd > 0)
    ratio[~of_column] = np.nan
    return [columns["inclusion"].round(4), ratio] if "inclusion" in columns else [ratio]


class CoefficientReport:
    """Intervals and summary of a linear estimator.

    A subclass offers `_coefficients(level)`: means and standard deviations (.., q) of its
    coefficients, with an intercept last if there is one, and their intervals (.., q, 2), and
    `_figures()`, what a summary shows besides.
    """

    _coefficients: Any
    _figures: Any
    n_features_in_: int

    def coef_interval(self, level: float = 0.9) -> np.ndarray:
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

    def summary(
        self,
        level: float = 0.9,
        top: int | None = 20,
        sort: str = "strength",
        feature_names: ArrayLike | None = None,
    ) -> Summary:
        """Tabulate what was learned: coefficients with intervals, and key figures.

        Parameters
        ----------
        level : float, default=0.9
            Probability in (0, 1) that an interval covers its coefficient.
        top : int or None, default=20
            How many coefficients are printed, the strongest; None for all. The tables have all.
        sort : {"strength", "column"}, default="strength"
            Order in which they are printed: by inclusion where columns may be left out, then by
            abs(mean) / sd; or that of the columns.
        feature_names : array-like of shape (d,), default=None
            Names of the columns, such as ``pipeline[:-1].get_feature_names_out()``. None takes
            those of the rows of the fit, x0, x1, ... where they had none.

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
            If `level` is not between 0 and 1, `top` or `sort` is none of the above, or
            `feature_names` has another length.
        """
        check_summary(self, level, top, sort)
        d, names = self.n_features_in_, column_names(self, feature_names)
        mean, std, interval = self._coefficients(level)
        intercept = ["intercept"] * (mean.shape[-1] > d)
        if hasattr(self, "classes_"):
            names, intercept = names_by_class(self, names), names_by_class(self, intercept)
        mean, std = (np.concatenate([a[..., :d].ravel(), a[..., d:].ravel()]) for a in (mean, std))
        ends = [interval[..., :d, :].reshape(-1, 2), interval[..., d:, :].reshape(-1, 2)]
        more = {}
        if hasattr(self, "inclusion_proba_"):
            more["inclusion"] = np.append(self.inclusion_proba_, [np.nan] * len(intercept))
        columns = coefficient_columns(
            [*names, *intercept], mean, std, level, np.vstack(ends), **more
        )
        ranking = Ranking(strength_of(columns, np.arange(len(mean)) < len(names)), sort, top)
        return Summary(title_of(self), level, ranking, columns, figures=self._figures())
