"""What a model has learned, as tables: for reading, and as data frames where pandas is."""

from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from sklearn.utils.validation import check_is_fitted

from .checks import check_choice, check_number

_WIDTH = 98  # characters of the widest line of figures above a table


class Printed:
    """What shows its text in a console and in a notebook."""

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        return f"<pre>{escape(str(self))}</pre>"


def column_names(estimator, given=None):
    """Return the names of the columns of X: those given, else its own, else x0 and so on.

    Raises
    ------
    ValueError
        If the names given are not one for each column.
    """
    d = getattr(estimator, "n_features_in_", 0)  # rows that are objects have no columns
    names = getattr(estimator, "feature_names_in_", None) if given is None else given
    if names is None:
        return [f"x{j}" for j in range(d)]
    if len(names) != d:
        raise ValueError(f"feature_names has {len(names)} names, X has {d} columns.")
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


def ends_of(level):
    """Return the two probabilities between which a central interval of some level lies."""
    return 0.5 - 0.5 * level, 0.5 + 0.5 * level


class Ranking:
    """In which order a table is printed, and which of its rows are.

    Parameters
    ----------
    keys : sequence of ndarray of shape (q,)
        Strength of each row, the first key first; nan for a row that is of no column of X, such as
        an intercept. Those are always shown.
    sort : {"strength", "column"}
        Whether the strongest rows come first, those of no column last, or the order is kept.
    top : int or None
        How many rows of columns are shown, the strongest; None for all.
    """

    def __init__(self, keys, sort, top):
        column = np.flatnonzero(~np.isnan(keys[0]))
        strongest = column[np.lexsort([-key[column] for key in reversed(keys)])]
        self.order = np.arange(len(keys[0]))
        if sort == "strength":
            self.order = np.concatenate([strongest, np.setdiff1d(self.order, column)])
        self.shown = np.ones(len(self.order), dtype=bool)
        self.shown[strongest[len(column) if top is None else top :]] = False
        self.n_columns = len(column)

    def printed(self, columns):
        """Return the columns of a table as they are printed."""
        places = self.order[self.shown[self.order]]
        return {name: np.asarray(values)[places] for name, values in columns.items()}

    def remark(self):
        """Return in words how many rows are not shown, empty if all are."""
        hidden = int(np.sum(~self.shown))
        return f"{hidden} weaker ones of {self.n_columns} are not shown" if hidden else ""


@dataclass(frozen=True, repr=False)
class Table(Printed):
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

    def to_frame(self) -> Any:
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

    def framed(self) -> Any:
        """Return the data frame, or the table itself where pandas is not installed."""
        try:
            return self.to_frame()
        except ImportError:
            return self

    def __str__(self):
        return f"{self.title}\n\n{text_table(self.columns)}"


@dataclass(frozen=True, repr=False)
class Summary(Printed):
    """Tables of what was learned; printing it shows them.

    Attributes
    ----------
    title : str
        Estimator and how its fit ended.
    level : float
        Level of the intervals.
    ranking : Ranking
        Order in which the rows of the first table are printed, and which are.
    coefficients : dict of str to ndarray
        Columns name, mean, sd, lower, upper and what the model adds, all rows in the order of the
        columns of X; the intercept is last. Empty for a Gaussian process.
    hyperparameters : dict of str to ndarray
        Parameters of the kernel of a Gaussian process: name, value, and lower and upper where they
        are averaged over.
    scales : dict of str to ndarray
        Standard deviations of the effects of groups with their intervals; empty without groups.
    figures : dict of str to object
        Single figures such as the number of rows and the log evidence.
    """

    title: str
    level: float
    ranking: Ranking
    coefficients: dict[str, np.ndarray] = field(default_factory=dict)
    hyperparameters: dict[str, np.ndarray] = field(default_factory=dict)
    scales: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, object] = field(default_factory=dict)

    def to_frame(self) -> Any:
        """Return the coefficients, or the parameters of the kernel, as a data frame.

        Returns
        -------
        frame : pandas.DataFrame
            One row for each, in the order of the columns, indexed by name. None is left out.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        return frame_of(self._first)

    @property
    def _first(self):
        return self.coefficients or self.hyperparameters

    def _heading(self):
        figures = [f"{name} {_cell(value)}" for name, value in self.figures.items()]
        lines = [self.title, *_in_lines(figures)]
        has_intervals = any("lower" in table for table in self._printed())
        return [*lines, f"intervals of {self.level:.0%}"] if has_intervals else lines

    def _printed(self):
        return [t for t in (self.ranking.printed(self._first), self.scales) if t]

    def __str__(self):
        first, *rest = map(text_table, self._printed())
        remark = [line for line in [self.ranking.remark()] if line]
        return "\n".join([*self._heading(), "", first, *remark, *rest])

    def _repr_html_(self):
        first, *rest = map(_html_table, self._printed())
        lines = "<br>".join(map(escape, self._heading()))
        return "".join([f"<p>{lines}</p>", first, escape(self.ranking.remark()), *rest])


def _in_lines(words):
    """Return lines of words with commas between them, no line longer than the widest that fits."""
    whole = ", ".join(word.replace(" ", "\xa0") for word in words)  # a word has no break inside
    lines = wrap(whole, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _cell(value):
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _entry(value):
    """Return a value of a table as text; nan stands for what the row does not have."""
    return "-" if isinstance(value, float | np.floating) and np.isnan(value) else _cell(value)


def frame_of(columns):
    """Return columns as a data frame, indexed by the first."""
    import pandas as pd

    return pd.DataFrame(columns).set_index(next(iter(columns)))


def _html_table(columns):
    """Return columns as a table of HTML."""
    cells = [[_entry(v) for v in values] for values in columns.values()]
    lines = [("th", columns), *(("td", row) for row in zip(*cells, strict=True))]
    rows = ("".join(f"<{tag}>{escape(c)}</{tag}>" for c in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def text_table(columns):
    """Return columns as text, numbers aligned to the right."""
    cells = [[name, *(_entry(v) for v in values)] for name, values in columns.items()]
    widths = [max(map(len, column)) for column in cells]
    rows = zip(*cells, strict=True)
    pad = (str.ljust, *[str.rjust] * (len(cells) - 1))
    lines = ["  ".join(p(c, w) for p, c, w in zip(pad, row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def strength_of(columns, of_column):
    """Return the keys of a `Ranking` of a table of coefficients, of which some are of a column.

    Inclusion where the table has it, to the four digits that are printed: the last bits of several
    that are one depend on the machine. Then |mean| / sd.
    """
    mean, sd = np.abs(columns["mean"]), columns["sd"]
    ratio = np.divide(mean, sd, out=np.zeros(len(mean)), where=sd > 0)
    ratio[~of_column] = np.nan
    return [columns["inclusion"].round(4), ratio] if "inclusion" in columns else [ratio]


class Summarised:
    """Estimator that shows what it has learned.

    A subclass offers `_summarise(level, top, sort, feature_names)`, called once these are checked.
    """

    _summarise: Any

    def summary(
        self,
        level: float = 0.9,
        top: int | None = 20,
        sort: str = "strength",
        feature_names: ArrayLike | None = None,
    ) -> Summary:
        """Tabulate what was learned, with intervals, and key figures.

        Parameters
        ----------
        level : float, default=0.9
            Probability in (0, 1) that an interval covers what it is of.
        top : int or None, default=20
            How many rows that belong to columns are printed, the strongest; None for all. The
            tables have all.
        sort : {"strength", "column"}, default="strength"
            Order in which they are printed: by inclusion where columns may be left out, then by
            abs(mean) / sd, length scales from the shortest on; or that of the columns.
        feature_names : array-like of shape (d,), default=None
            Names of the columns, such as ``pipeline[:-1].get_feature_names_out()``. None takes
            those of the rows of the fit, x0, x1, ... where they had none.

        Returns
        -------
        summary : Summary
            Printing it shows the tables; ``to_frame()`` gives the first to pandas. Linear models
            have coefficients, under columns name, mean, sd, lower and upper, and inclusion where
            columns may be left out (nan for the intercept, printed as -). An intercept is the last
            row. With more than two classes a name is "class: column", and the intercepts of all
            classes are last.

            Gaussian processes have the parameters of their kernel: name, value (the exponential of
            the mean log) and, where they are averaged over, lower and upper of a log-normal
            distribution with the same moments. A class with a kernel of its own comes under its
            label.

            With groups there are also the standard deviations of their effects: factor, effect
            (intercept or column), posterior median tau, its interval, and n_levels, the number of
            named groups.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1, `top` or `sort` is none of the above, or
            `feature_names` has another length.
        """
        check_is_fitted(self)
        check_number("level", level, 0, 1, boundaries="neither")
        check_choice("sort", sort, ["strength", "column"])
        check_number("top", top, 1, integer=True, optional=True)
        return self._summarise(level, top, sort, feature_names)


class CoefficientReport(Summarised):
    """Intervals and summary of a linear estimator.

    A subclass offers `_coefficients(level)`: means and standard deviations (.., q) of its
    coefficients, with an intercept last if there is one, and their intervals (.., q, 2), and
    `_figures()`, what a summary shows besides.
    """

    _coefficients: Any
    _figures: Any
    coef_: np.ndarray
    coef_std_: np.ndarray
    intercept_: Any

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
        return self._coefficients(level)[2][..., : self.coef_.shape[-1], :]

    def _names(self, given):
        """Return the names of the columns that have coefficients."""
        return column_names(self, given)

    def _summarise(self, level, top, sort, feature_names):
        d, names = self.coef_.shape[-1], self._names(feature_names)
        mean, std, interval = self._coefficients(level)
        intercept = ["intercept"] * (mean.shape[-1] > d)
        if hasattr(self, "classes_"):
            names, intercept = names_by_class(self, names), names_by_class(self, intercept)
        mean, std = (np.concatenate([a[..., :d].ravel(), a[..., d:].ravel()]) for a in (mean, std))
        ends = [interval[..., :d, :].reshape(-1, 2), interval[..., d:, :].reshape(-1, 2)]
        lower, upper = np.vstack(ends).T
        name = np.array([*names, *intercept], dtype=object)
        columns = dict(name=name, mean=mean, sd=std, lower=lower, upper=upper)
        if hasattr(self, "inclusion_proba_"):
            columns["inclusion"] = np.append(self.inclusion_proba_, [np.nan] * len(intercept))
        ranking = Ranking(strength_of(columns, np.arange(len(mean)) < len(names)), sort, top)
        return Summary(title_of(self), level, ranking, columns, figures=self._figures())
