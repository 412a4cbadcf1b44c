"""Pictures of coefficients: intervals, inclusion probabilities, group effects."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit
from sklearn.isotonic import isotonic_regression

from .._estimator.annotations import RowsLike
from .._estimator.checks import check_number
from .._estimator.pipelines import last_step, names_at_last_step, rows_at_last_step
from .._estimator.summary import interval_of
from .._estimator.tables import label_table, names_of, values_at
from . import _drawing as drawing

_MOST_NAMES = 36  # of features that stand upright below an axis and can be read


@dataclass(eq=False, repr=False)
class InclusionDisplay(drawing.Display):
    """Posterior inclusion probabilities with the coefficients of the features that are in.

    Parameters
    ----------
    inclusion : ndarray of shape (d,)
        Posterior probability that each coefficient is not zero.
    coef : ndarray of shape (d,)
        Posterior means.
    interval : ndarray of shape (d, 2)
        Ends of their intervals.
    level : float, default=0.9
        Probability of the intervals.
    threshold : float, default=0.5
        Probability above which a feature is in the model.
    feature_names : sequence of str, default=None
        Names of the features; None numbers them.
    sets : CredibleSets, default=None
        Sets of features, drawn in colours of their own.

    Attributes
    ----------
    ax_ : ndarray of two matplotlib Axes
        Probabilities above, coefficients below; one Axes when one was given.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> from sklearn_ep import SpikeSlabRegressor
    >>> from sklearn_ep.datasets import make_spike_slab_regression
    >>> from sklearn_ep.inspection import InclusionDisplay
    >>> X, y, coef = make_spike_slab_regression(40, 30, n_informative=3, random_state=0)
    >>> display = InclusionDisplay.from_estimator(SpikeSlabRegressor().fit(X, y))
    >>> print((display.inclusion > display.threshold).sum(), "features are in")
    3 features are in
    """

    inclusion: np.ndarray
    coef: np.ndarray
    interval: np.ndarray
    _: KW_ONLY
    level: float = 0.9
    threshold: float = 0.5
    feature_names: Sequence[str] | None = None
    sets: Any = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        threshold: float = 0.5,
        level: float = 0.9,
        sets: Any = None,
        ax: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the inclusion probabilities of a fitted sparse model.

        Parameters
        ----------
        estimator : SpikeSlabRegressor or SpikeSlabClassifier
            Fitted, or a pipeline that ends in one.
        threshold : float, default=0.5
            Probability above which a feature is in the model.
        level : float, default=0.9
            Probability of the intervals of coefficients.
        sets : CredibleSets, default=None
            What `credible_sets` of the estimator gives, to be drawn in colours.
        ax : matplotlib Axes, default=None
            Where to draw the probabilities; None makes a figure with the coefficients below.
        **kwargs : dict
            Passed to `Axes.vlines` for the probabilities.

        Returns
        -------
        display : InclusionDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If `threshold` is not in [0, 1], or `level` not in (0, 1).
        """
        check_number("threshold", threshold, 0, 1)
        models = "SpikeSlabRegressor or SpikeSlabClassifier"
        model = drawing.step_with(estimator, "inclusion_proba_", models)
        return cls(
            model.inclusion_proba_,
            np.ravel(model.coef_),
            model.coef_interval(level).reshape(-1, 2),
            level=level,
            threshold=threshold,
            feature_names=names_at_last_step(estimator),
            sets=sets,
        ).plot(ax=ax, **kwargs)

    def plot(self, ax: Any = None, **kwargs: Any) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw the probabilities; None makes a figure with the coefficients below.
        **kwargs : dict
            Passed to `Axes.vlines` for the probabilities.

        Returns
        -------
        display : InclusionDisplay
            The display itself.
        """
        if ax is not None:
            ax.set_xlabel("feature")
            return super().plot(ax, **kwargs)
        axes = drawing.pyplot().subplots(2, sharex=True, layout="constrained")[1]
        self._draw_coefficients(axes[1])
        super().plot(axes[0], **kwargs)
        self.ax_ = axes
        return self

    def _draw(self, ax, **kwargs):
        place = np.arange(len(self.inclusion))
        on = self.inclusion > self.threshold
        ax.vlines(place, 0, self.inclusion, **{"color": np.where(on, "C3", "0.6"), **kwargs})
        ax.axhline(self.threshold, color="0.5", linestyle="--", linewidth=0.8)
        ax.set(ylabel="inclusion probability", ylim=(0, 1.02))
        self._draw_sets(ax)
        self._name(ax, place[on])

    def _draw_sets(self, ax):
        """Mark the members of each set, which the legend gives with its size and probability."""
        if self.sets is None or not len(self.sets):
            return
        for k, (members, share) in enumerate(zip(self.sets, self.sets.probability, strict=True)):
            label = f"set {k}: {len(members)} features, {drawing.percent(share)}"
            ax.plot(members, self.inclusion[members], "o", color=f"C{k % 10}", label=label)
        ax.legend(fontsize="small")

    def _draw_coefficients(self, ax):
        place = np.flatnonzero(self.inclusion > self.threshold)
        ax.vlines(place, *self.interval[place].T, color="C3", linewidth=1.5)
        ax.plot(place, self.coef[place], "o", color="C3", markersize=4)
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.set(xlabel="feature", ylabel=f"coefficient, {drawing.percent(self.level)} interval")
        self._name(ax, place)

    def _name(self, ax, place):
        """Mark the places of features that are in, and name them if they have names."""
        if self.feature_names is None or not 0 < len(place) <= _MOST_NAMES:
            return
        beside = _apart(place, len(self.inclusion))
        names = [str(self.feature_names[i]) for i in place]
        ax.set_xticks(beside, labels=names, rotation=90, fontsize="small")
        ax.tick_params(axis="x", which="major", length=0, pad=5)
        ax.xaxis.remove_overlapping_locs = False
        ax.set_xticks(place, minor=True)


@dataclass(eq=False, repr=False)
class CoefficientIntervalDisplay(drawing.Display):
    """Posterior means of coefficients with their intervals.

    Parameters
    ----------
    mean : ndarray of shape (k,)
        Posterior means.
    interval : ndarray of shape (k, 2)
        Ends of the intervals.
    names : sequence of str
        Labels of the coefficients.
    level : float, default=0.9
        Probability of the intervals.
    n_coefficients : int, default=None
        How many coefficients the model has, where it has more than are drawn: the title says so.
    estimator_name : str, default=None
        Title.
    class_name : str, default=None
        Class whose probability the coefficients raise, for the axis.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the picture.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.preprocessing import StandardScaler
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.inspection import CoefficientIntervalDisplay
    >>> X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    >>> X = StandardScaler().set_output(transform="pandas").fit_transform(X)
    >>> clf = ConvexVariationalLogistic().fit(X, y)
    >>> display = CoefficientIntervalDisplay.from_estimator(clf, top=2)
    >>> print(*display.names, sep=", ")
    worst texture, worst symmetry
    """

    mean: np.ndarray
    interval: np.ndarray
    names: Sequence[str]
    _: KW_ONLY
    level: float = 0.9
    n_coefficients: int | None = None
    estimator_name: str | None = None
    class_name: str | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        feature_names: Sequence[str] | None = None,
        class_index: int = 0,
        top: int | None = 30,
        level: float = 0.9,
        sort: str = "strength",
        ax: Any = None,
        **kw: Any,
    ) -> Self:
        """Draw the coefficients of any fitted linear estimator of this package.

        Parameters
        ----------
        estimator : estimator
            Fitted, with `coef_`, `coef_std_` and `coef_interval`; or a pipeline that ends in one.
        feature_names : sequence of str, default=None
            Labels; None takes the names of the columns of the fit, or numbers.
        class_index : int, default=0
            Row of `coef_` for more than two classes.
        top : int or None, default=30
            Coefficients drawn, those whose means are largest in units of their standard deviation;
            more do not fit a page. None draws all.
        level : float, default=0.9
            Probability of the intervals.
        sort : {"strength", "column"}, default="strength"
            Order from top to bottom: by the same measure, or that of the columns.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kw : dict
            Passed to `Axes.errorbar`.

        Returns
        -------
        display : CoefficientIntervalDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If the number of names is not that of the coefficients, or `sort`, `top` or
            `class_index` is none of the above. If there are no coefficients but those of groups.
        """
        model = drawing.step_with(estimator, "coef_std_", "linear model of this package")
        drawing.check_index("class_index", class_index, len(np.atleast_2d(model.coef_)))
        mean = np.atleast_2d(model.coef_)[class_index]
        std = np.atleast_2d(model.coef_std_)[class_index]
        if not len(mean):
            raise ValueError("there is nothing to draw: the model has no column besides groups.")
        names = _names_of_coefficients(estimator, len(mean), class_index, feature_names)
        interval = model.coef_interval(level).reshape(-1, len(mean), 2)[class_index]
        drawn = drawing.strongest(dict(mean=mean, sd=std, interval=interval, name=names), top, sort)
        return cls(
            drawn["mean"],
            drawn["interval"],
            [str(name) for name in drawn["name"]],
            level=level,
            n_coefficients=len(mean),
            estimator_name=type(model).__name__,
            class_name=_class_of(model, class_index),
        ).plot(ax=ax, **kw)

    def _n_labelled(self):
        return len(self.mean)

    def _draw(self, ax, **kw):
        rows = np.arange(len(self.mean))[::-1]
        style = {"fmt": "o", "color": "C0", "markersize": 4, "capsize": 2, **kw}
        ax.errorbar(self.mean, rows, xerr=_arms(self.mean, self.interval), **style)
        ax.axvline(0.0, color="0.5", linewidth=0.8)
        ax.set_yticks(rows, self.names)
        of_class = "" if self.class_name is None else f" for class {self.class_name}"
        ax.set(
            xlabel=f"coefficient{of_class}, {drawing.percent(self.level)} interval",
            title=drawing.some_of(self.estimator_name, len(rows), self.n_coefficients),
        )


@dataclass(eq=False, repr=False)
class GroupEffectsDisplay(drawing.Display):
    """Caterpillar plot: posterior mean and interval of each group's effect, in increasing order.

    Parameters
    ----------
    mean, std : ndarray of shape (J,)
        Posterior means and standard deviations of one effect, of the groups to be drawn.
    labels : array-like of shape (J,)
        Labels of the groups.
    raw : ndarray of shape (J,), default=None
        What each group alone says of its effect, drawn besides; nan where it says nothing.
    effect_name : str, default="group effect"
        Label of the value axis.
    level : float, default=0.9
        Probability of the drawn intervals under the Gaussian posterior of each effect.
    estimator_name : str, default=None
        Title.
    factor_name : str, default=None
        Name of the factor, for the title and the axis of groups.
    n_groups : int, default=None
        How many groups the factor has, where it has more than are drawn: the title says so.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import HierarchicalEPLogistic
    >>> from sklearn_ep.datasets import make_hierarchical_logistic
    >>> from sklearn_ep.inspection import GroupEffectsDisplay
    >>> X, y, groups, _, _ = make_hierarchical_logistic(8, 20, 2, random_state=0)
    >>> clf = HierarchicalEPLogistic().fit(X, y, groups=groups)
    >>> display = GroupEffectsDisplay.from_estimator(clf, top=3)
    >>> print("furthest from zero are groups", np.sort(display.labels))
    furthest from zero are groups [2 5 6]
    """

    mean: np.ndarray
    std: np.ndarray
    labels: Any
    _: KW_ONLY
    raw: np.ndarray | None = None
    effect_name: str = "group effect"
    level: float = 0.9
    estimator_name: str | None = None
    factor_name: str | None = None
    n_groups: int | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: RowsLike | None = None,
        y: ArrayLike | None = None,
        *,
        labels: Any = None,
        groups: ArrayLike | None = None,
        factor: int = 0,
        effect: int = 0,
        class_index: int = 0,
        level: float = 0.9,
        top: int | None = 30,
        ax: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the group effects of a fitted hierarchical model.

        Parameters
        ----------
        estimator : HierarchicalEPLogistic
            Fitted with groups, or a pipeline that ends in one.
        X, y : array-like of shape (n, d) and (n,), default=None
            The training rows and labels. With them the plot shows the raw effects too, those that
            the rows of a group alone would give: how far the model pools them. Two classes.
        labels : array-like of shape (n,), default=None
            The groups of these rows in the factor that is drawn, as in `group_labels_`; None takes
            them from `X` or `groups`, where the factor is one column there.
        groups : array-like, default=None
            What `predict` takes by that name, where labels are not columns of X.
        factor : int, default=0
            Which factor, where the model has a list of them.
        effect : int, default=0
            Which effect: 0 the intercept, then the columns of `random_slopes`.
        class_index : int, default=0
            Whose effects, where each of more than two classes has its own.
        level : float, default=0.9
            Probability of the intervals.
        top : int or None, default=30
            Groups drawn, those whose means are furthest from zero in units of their standard
            deviation; None draws all, without labels where there are too many to be read.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.errorbar`.

        Returns
        -------
        display : GroupEffectsDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If the model was fitted without groups, if `factor`, `effect` or `class_index` counts
            beyond what it has, or if raw effects are asked for a slope or without labels.

        Notes
        -----
        A raw effect is one step of maximum likelihood from the posterior mean of the effect: the
        sum of residuals over the sum of p (1 - p), p being the probabilities of the group's rows.
        """
        model = drawing.step_with(estimator, "group_labels_", "HierarchicalEPLogistic")
        known, means, stds = _effects_of(model, factor, class_index)
        if len(known) == 0:
            raise ValueError("the estimator was fitted without groups: there are no effects.")
        drawing.check_index("effect", effect, means.shape[1])
        mean, std, raw = means[:, effect], stds[:, effect], None
        if X is not None or y is not None:
            if X is None or y is None:
                raise ValueError("raw effects need both X and y, the training rows and labels.")
            rows = rows_at_last_step(estimator, X)
            labels = _labels_of(model, rows, groups, factor) if labels is None else labels
            labels = None if effect else labels  # rows alone say nothing of a slope
            raw = mean + _steps(model, known, labels, rows, groups, y)
        columns = dict(mean=mean, sd=std, label=known) | ({} if raw is None else {"raw": raw})
        drawn = drawing.strongest(columns, top, "column")
        names = names_at_last_step(estimator)
        factor_name, effect_name = _names_of(model, factor, effect, names)
        if len(model.classes_) > 2:
            effect_name += f", class {model.classes_[class_index]}"
        return cls(
            drawn["mean"],
            drawn["sd"],
            drawn["label"],
            raw=drawn.get("raw"),
            effect_name=effect_name,
            level=level,
            estimator_name=type(model).__name__,
            factor_name=factor_name,
            n_groups=len(known),
        ).plot(ax=ax, **kwargs)

    def _n_labelled(self):
        return len(self.mean) if len(self.mean) <= drawing.MOST_LABELS else 0

    def _draw(self, ax, **kwargs):
        order = np.argsort(self.mean)
        labelled = self._n_labelled() > 0
        mean = self.mean[order]
        arms = _arms(mean, interval_of(mean, self.std[order], self.level))
        style = {"fmt": "o", "markersize": 3, "elinewidth": 1, "color": "C0", "label": "pooled"}
        rank = np.arange(len(order))
        ax.errorbar(mean, rank, xerr=arms, **{**style, **kwargs})
        if self.raw is not None:
            ax.plot(self.raw[order], rank, "x", color="C1", markersize=4, label="raw")
            ax.legend(loc="lower right")  # effects increase: there is nothing
        ax.axvline(0.0, color="0.6", linestyle="--")
        if labelled:
            ax.set_yticks(rank, [_name_of(self.labels[k]) for k in order])
        else:
            ax.set_yticks([])
        name = "group" if self.factor_name is None else self.factor_name
        title = ": ".join(n for n in (self.estimator_name, self.factor_name) if n is not None)
        ax.set(
            xlabel=f"{self.effect_name}, {drawing.percent(self.level)} interval",
            ylabel=name if labelled else f"{len(order)} groups",
            title=drawing.some_of(title, len(order), self.n_groups),
        )
        ax.set_ylim(-1, len(order))  # no empty rows where there are many


def _names_of_coefficients(estimator, d, class_index, given):
    """Return the names (d,) of coefficients: those given, of the columns, or numbers."""
    if given is not None:
        if len(given) != d:
            raise ValueError(f"{len(given)} feature_names for {d} coefficients.")
        return given
    names = names_at_last_step(estimator)
    if names is None:
        return [f"feature {j}" for j in range(d)]
    if len(names) == d:
        return names
    # a group column is no coefficient; the summary knows which columns have one
    model = last_step(estimator)
    table = model.summary(feature_names=names).coefficients["name"]
    several = len(model.classes_) > 2
    prefix = f"{model.classes_[class_index]}: " if several else ""
    own = table[class_index * d :][:d]  # intercepts come last
    return [name.removeprefix(prefix) for name in own]


def _class_of(model, index):
    """Return the class whose probability a row of coefficients raises; None of a regressor."""
    classes = getattr(model, "classes_", None)
    if classes is None:
        return None
    return str(classes[1] if len(classes) == 2 else classes[index])


def _arms(mean, interval):
    """Return the lengths (2, k) of the arms of error bars."""
    return np.abs(interval.T - mean)


def _apart(place, n):
    """Return places in 0 to n - 1, in order, moved as little as names need to be read."""
    steps = (n - 1) / _MOST_NAMES * np.arange(len(place))
    return isotonic_regression(place - steps, y_min=0.0, y_max=n - 1 - steps[-1]) + steps


def _name_of(label):
    """Return a label as text, whole numbers of a column of floats without a point."""
    if isinstance(label, tuple):  # of a combination of columns
        return ":".join(_name_of(part) for part in label)
    whole = isinstance(label, float) and label.is_integer()
    return str(int(label)) if whole else str(label)


def _effects_of(estimator, factor, class_index):
    """Return labels (J,), posterior means and sds (J, q) of the groups of a factor."""
    tables = [estimator.group_labels_, estimator.group_effects_, estimator.group_effects_std_]
    if not isinstance(tables[0], list):
        tables = [[table] for table in tables]
    drawing.check_index("factor", factor, len(tables[0]))
    known, means, stds = (table[factor] for table in tables)
    by_class = np.ndim(means) == 3
    drawing.check_index("class_index", class_index, len(means) if by_class else 1)
    return known, *(v[class_index] if by_class else v for v in (means, stds))


def _names_of(estimator, factor, effect, names):
    """Return the name of a factor, and what its effect is on, in words.

    `names` are those of the columns of X, None if they have none.
    """
    scales = estimator.summary(feature_names=names).scales
    name = list(dict.fromkeys(scales["factor"]))[factor]
    effects = scales["effect"][scales["factor"] == name]
    column = range(len(effects))[effect]  # numbers may count from the end
    on = f"the slope of {effects[column]}" if column else "the intercept"
    words = [_in_words(part, estimator.group_column, names) for part in name.split(":")]
    return ":".join(words), f"effect on {on}"


def _in_words(part, group_column, names):
    """Return the name of a group column; of one that has a number alone a name for an axis."""
    known = () if names is None else list(names)
    if part in known or not part.lstrip("-").isdigit():
        return part
    if group_column is None:
        return f"factor {part}"
    return str(names[int(part)]) if known else f"column {part}"


def _labels_of(estimator, X, groups, factor):
    """Return the labels of rows in a factor where X or groups have them as they are, else None."""
    column = estimator.group_column
    if column is None:
        return None if groups is None else values_at(label_table(groups, len(X)), factor)
    column = column[factor] if isinstance(column, list) else column
    if isinstance(column, tuple):
        return None
    return values_at(X, names_of(X).index(column) if isinstance(column, str) else column)


def _steps(model, known, labels, rows, groups, y):
    """Return the Newton step of each group's intercept by its own rows (J,), nan without any."""
    if labels is None or len(model.classes_) > 2:
        raise ValueError("raw effects need labels of the rows, effect=0 and two classes.")
    p = expit(model.decision_function(rows, groups=groups))
    positive = np.asarray(y) == model.classes_[1]
    place = {label: k for k, label in enumerate(np.asarray(known).tolist())}
    labels = labels.tolist() if hasattr(labels, "tolist") else labels
    code = np.array([place.get(label, len(place)) for label in labels])
    gap, slope = (
        np.bincount(code, v, minlength=len(place) + 1)[:-1] for v in (positive - p, p * (1.0 - p))
    )
    return np.divide(gap, slope, out=np.full(len(place), np.nan), where=slope > 0)
