"""What a linear model has learned, as a table: for reading, and as data frames where pandas is."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtri

from .checks import check_number


def column_names(estimator):
    """Return the names of the columns of X, x0 and so on where it had none."""
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return [f"x{j}" for j in range(estimator.n_features_in_)]
    return [str(name) for name in names]


def names_by_class(estimator, names):
    """Return names, with that of the class in front for each of more than two classes."""
    if len(estimator.classes_) == 2:
        return names
    return [f"{label}: {name}" for label in estimator.classes_ for name in names]


def title_of(estimator):
    """Return in words how the fit ended."""
    end = "converged" if estimator.converged_ else f"did not converge ({estimator.stop_reason_})"
    return f"{type(estimator).__name__}: {end} after {estimator.n_iter_} iterations"


def interval_of(mean, std, level):
    """Return (..., 2): the central interval of that level of normal distributions."""
    check_number("level", level, 0, 1, boundaries="neither")
    half = ndtri(0.5 + 0.5 * level) * np.asarray(std)
    return np.stack([mean - half, mean + half], axis=-1)


def coefficient_columns(names, mean, std, level, interval=None, **more):
    """Return the columns of a table of coefficients with their intervals (d, 2).

    Those of normal distributions unless others are given.
    """
    if interval is None:
        interval = interval_of(np.asarray(mean), std, level)
    columns = dict(name=np.asarray(names, dtype=object), mean=np.asarray(mean), sd=np.asarray(std))
    return columns | dict(lower=interval[:, 0], upper=interval[:, 1]) | more


@dataclass(frozen=True)
class Table:
    """Columns of equal length under a title, the first of them names; printing shows them.

    Attributes
    ----------
    title : str
        What the table is of.
    columns : dict of str to sequence
        The columns by their headings.
    """

    title: str
    columns: dict[str, Any]

    def to_frame(self):
        """Return the columns as a data frame, indexed by the first.

        Returns
        -------
        frame : pandas.DataFrame
            One row an entry.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        return frame_of(self.columns)

    def __str__(self):
        return f"{self.title}\n\n{text_table(self.columns)}"


@dataclass(frozen=True)
class Summary:
    """Tables of what was learned; printing it shows them.

    Attributes
    ----------
    title : str
        Estimator and how its fit ended.
    level : float
        Level of the intervals.
    coefficients : dict of str to ndarray
        Columns name, mean, sd, lower, upper and what the model adds; the intercept is last.
    scales : dict of str to ndarray
        Standard deviations of the effects of groups with their intervals; empty without groups.
    figures : dict of str to object
        Single figures such as the number of rows and the log evidence.
    """

    title: str
    level: float
    coefficients: dict[str, np.ndarray]
    scales: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, object] = field(default_factory=dict)

    def to_frame(self):
        """Return the coefficients as a data frame, indexed by name.

        Returns
        -------
        frame : pandas.DataFrame
            One row a coefficient.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        return frame_of(self.coefficients)

    def __str__(self):
        figures = ", ".join(f"{name} {_cell(value)}" for name, value in self.figures.items())
        tables = [text_table(t) for t in (self.coefficients, self.scales) if t]
        return "\n".join([self.title, figures, f"intervals of {self.level:.0%}", "", *tables])


def _cell(value):
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def frame_of(columns):
    """Return columns as a data frame, indexed by the first."""
    import pandas as pd

    return pd.DataFrame(columns).set_index(next(iter(columns)))


def text_table(columns):
    """Return columns as text, numbers aligned to the right."""
    cells = [[name, *(_cell(v) for v in values)] for name, values in columns.items()]
    widths = [max(map(len, column)) for column in cells]
    rows = zip(*cells, strict=True)
    pad = (str.ljust, *[str.rjust] * (len(cells) - 1))
    lines = ["  ".join(p(c, w) for p, c, w in zip(pad, row, widths, strict=True)) for row in rows]
    return "\n".join(lines)
