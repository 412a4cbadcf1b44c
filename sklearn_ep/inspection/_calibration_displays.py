"""Pictures of what a fit does not know: nodes of hyperparameters, and whether chances are right."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit
from scipy.stats import norm
from sklearn.utils.validation import check_consistent_length, column_or_1d

from .._estimator.annotations import RowsLike
from .._estimator.checks import check_number, check_seen
from ._drawing import Display, check_index, percent, step_with

# how a coordinate is shown: its prefix, the map to the value itself, and the scale of the axis
_SCALES = (("log_", np.exp, "log"), ("logit_", expit, "logit"))
# heights of the numbers of cases, below all shares: of the first model, and between two models
_COUNTS_AT, _COUNTS_APART = -0.1, 0.05


def _shown(name, values):
    """Return (label, values, scale of the axis) of a coordinate in logs or logits."""
    for prefix, back, scale in _SCALES:
        if name.startswith(prefix):
            return name.removeprefix(prefix).replace("_", " "), back(values), scale
    return name.replace("_", " "), values, "linear"


def _plain_ticks(axis):
    """Label an axis in logs or logits by the numbers themselves, not by powers of ten."""
    if axis.get_scale() == "linear":
        return
    if axis.get_scale() == "log":
        axis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


@dataclass(eq=False, repr=False)
class HyperparameterDisplay(Display):
    """Nodes over which hyperparameters were averaged, with their weights.

    One coordinate is drawn as weights against values; of several, two as points whose area is the
    weight.

    Parameters
    ----------
    nodes : ndarray of shape (M, T)
        Coordinates, logarithms or logits.
    weights : ndarray of shape (M,)
        Weights, which sum to one.
    names : sequence of str
        Names of the coordinates; a prefix "log" or "logit" says on which scale they are.
    parameters : tuple of two str, default=None
        Which coordinates to draw; None takes the two that are known least.
    estimator_name : str, default=None
        Title.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the nodes.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklearn_ep import EPGaussianProcessClassifier
    >>> from sklearn_ep.inspection import HyperparameterDisplay
    >>> X, y = make_moons(60, noise=0.2, random_state=0)
    >>> clf = EPGaussianProcessClassifier().fit(X, y)
    >>> display = HyperparameterDisplay.from_estimator(clf)
    >>> print(display.ax_.get_xlabel(), "and", display.ax_.get_ylabel())
    variance and length scale
    """

    nodes: np.ndarray
    weights: np.ndarray
    names: Sequence[str]
    _: KW_ONLY
    parameters: tuple[str, ...] | None = None
    estimator_name: str | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        parameters: tuple[str, ...] | None = None,
        problem: int = 0,
        ax: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the nodes of a fitted estimator of this package.

        Parameters
        ----------
        estimator : estimator
            Fitted, or a pipeline that ends in one; `hyper_nodes_` and `hyper_weights_` are drawn.
        parameters : tuple of two str, default=None
            Two of `hyper_names_`; None takes the two that are known least.
        problem : int, default=0
            Which of several one-versus-rest problems.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.scatter`, or to `Axes.vlines` for a single coordinate.

        Returns
        -------
        display : HyperparameterDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If the fit has no hyperparameters that were learned, or `parameters` are none of them.
        """
        models = "estimator that averages over hyperparameters"
        model = step_with(estimator, "hyper_nodes_", models)
        nodes, weights = model.hyper_nodes_, model.hyper_weights_
        if isinstance(nodes, list):
            check_index("problem", problem, len(nodes))
            nodes, weights = nodes[problem], weights[problem]
        name = type(model).__name__
        return cls(
            nodes, weights, model.hyper_names_, parameters=parameters, estimator_name=name
        ).plot(ax=ax, **kwargs)

    def _places(self):
        """Return which coordinates to draw."""
        names = list(self.names)
        if not names:
            raise ValueError("there is nothing to draw: no hyperparameter was learned.")
        if self.parameters is None:
            mean = self.weights @ self.nodes
            spread = self.weights @ (self.nodes - mean) ** 2
            return sorted(np.argsort(-spread, kind="stable")[:2])
        unknown = [p for p in self.parameters if p not in names]
        n_drawn = min(2, len(names))
        if unknown or len(set(self.parameters)) != n_drawn:
            raise ValueError(f"parameters must be {n_drawn} of {names}, got {self.parameters!r}.")
        return [names.index(p) for p in self.parameters]

    def _draw(self, ax, **kwargs):
        places = self._places()
        shown = [_shown(self.names[k], self.nodes[:, k]) for k in places]
        (label, values, scale), *more = shown
        ax.set(xscale=scale, xlabel=label, title=self.estimator_name)
        if more:
            (other, others, other_scale), style = more[0], {"color": "C0", "alpha": 0.6, **kwargs}
            ax.set(yscale=other_scale, ylabel=other)
            # a node that has all the weight is of 600 square points
            ax.scatter(values, others, s=600.0 * self.weights, **style)
        else:
            ax.vlines(values, 0.0, self.weights, **{"color": "C0", "lw": 2, **kwargs})
            ax.set(ylabel="weight", ylim=(0.0, None))
        for axis in (ax.xaxis, ax.yaxis):
            _plain_ticks(axis)


@dataclass(eq=False, repr=False)
class ReliabilityDisplay(Display):
    """Observed share against stated probability, with the band in which chance leaves it.

    Unlike a calibration curve alone it says how many cases are behind each point, and how far off
    the diagonal a calibrated model may lie with so many.

    Parameters
    ----------
    stated : ndarray of shape (b,)
        Mean stated probability of each bin with cases.
    observed : ndarray of shape (b,)
        Share of cases in which it came true.
    band : ndarray of shape (b,)
        Half width about `stated` in which a calibrated share lies with probability `level`.
    counts : ndarray of shape (b,)
        Numbers of cases.
    level : float, default=0.9
        Probability of the band.
    estimator_name : str, default=None
        Label of the points.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the points.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklearn_ep import EPGaussianProcessClassifier
    >>> from sklearn_ep.inspection import ReliabilityDisplay
    >>> X, y = make_moons(600, noise=0.3, random_state=0)
    >>> clf = EPGaussianProcessClassifier(hyperparameters="mode").fit(X[:100], y[:100])
    >>> display = ReliabilityDisplay.from_estimator(clf, X[100:], y[100:], n_bins=2)
    >>> print("stated", display.stated.round(1), "observed", display.observed.round(1))
    stated [0.1 0.9] observed [0.1 0.9]
    """

    stated: np.ndarray
    observed: np.ndarray
    band: np.ndarray
    counts: np.ndarray
    _: KW_ONLY
    level: float = 0.9
    estimator_name: str | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: RowsLike,
        y: ArrayLike,
        *,
        n_bins: int = 10,
        level: float = 0.9,
        pos_label: Any = None,
        name: str | None = None,
        ax: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the reliability of a fitted classifier of any package on held-out rows.

        Parameters
        ----------
        estimator : classifier
            Fitted, with `predict_proba`.
        X : array-like of shape (n, d)
            Rows that the fit has not seen.
        y : array-like of shape (n,)
            Their labels.
        n_bins : int, default=10
            Bins of equal width.
        level : float, default=0.9
            Probability of the band.
        pos_label : int, float, bool or str, default=None
            Class whose probability is drawn; None takes the second of two, and the most probable
            one of a row where there are more.
        name : str, default=None
            Label of the points; None takes the class of the estimator, or of the last step.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure. Axes with other models get one more, in the next
            colour.
        **kwargs : dict
            Passed to `Axes.errorbar`.

        Returns
        -------
        display : ReliabilityDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If `pos_label` is no class of the fit, or y has labels that were not in the fit.
        """
        model = step_with(estimator, "predict_proba", "classifier")
        check_seen(estimator.classes_, y)
        proba, classes = estimator.predict_proba(X), estimator.classes_
        if pos_label is None and len(classes) > 2:
            place = proba.argmax(axis=1)
        else:
            found = [1] if pos_label is None else np.flatnonzero(classes == pos_label)
            if len(found) == 0:
                known = classes.tolist()
                raise ValueError(f"pos_label must be one of {known}, got {pos_label!r}.")
            place = np.full(len(proba), found[0])
        stated, true = proba[np.arange(len(proba)), place], np.asarray(y) == classes[place]
        name = name or type(model).__name__
        told: Any = dict(n_bins=n_bins, level=level, name=name)
        return cls.from_predictions(stated, true, ax=ax, **told, **kwargs)

    @classmethod
    def from_predictions(
        cls,
        stated: ArrayLike,
        true: ArrayLike,
        *,
        n_bins: int = 10,
        level: float = 0.9,
        pos_label: Any = None,
        name: str | None = None,
        ax: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the reliability of any stated probabilities, such as inclusion or flags.

        Parameters
        ----------
        stated : array-like of shape (n,)
            Probabilities.
        true : array-like of shape (n,)
            Whether they came true.
        n_bins : int, default=10
            Bins of equal width.
        level : float, default=0.9
            Probability of the band.
        pos_label : int, float, bool or str, default=None
            Label that `true` has where they came true; None where `true` says so itself.
        name : str, default=None
            Label of the points.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure. Axes with other models get one more, in the next
            colour.
        **kwargs : dict
            Passed to `Axes.errorbar`.

        Returns
        -------
        display : ReliabilityDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If `stated` holds other numbers than probabilities, or `true` other values than True,
            False, 1 and 0 without a `pos_label`.

        Examples
        --------
        >>> from sklearn_ep.inspection import ReliabilityDisplay
        >>> stated = [0.1, 0.2, 0.2, 0.7, 0.9, 0.9]
        >>> came = ["no", "no", "yes", "yes", "yes", "yes"]
        >>> display = ReliabilityDisplay.from_predictions(stated, came, pos_label="yes", n_bins=2)
        >>> print(display.counts, display.observed.round(2))
        [3 3] [0.33 1.  ]
        """
        check_number("n_bins", n_bins, 1, integer=True)
        check_number("level", level, 0, 1, boundaries="neither")
        check_consistent_length(stated, true)
        p, true = np.asarray(column_or_1d(stated), dtype=float), column_or_1d(true)
        if not (len(p) and np.all((p >= 0.0) & (p <= 1.0))):
            raise ValueError("stated must hold probabilities between 0 and 1, one for each row.")
        came = np.asarray(true if pos_label is None else true == pos_label)
        if not np.isin(came, [0, 1]).all():
            raise ValueError(
                "true must hold True or False, or 1 or 0, for each row; where it holds other "
                "labels, give the one that was predicted as pos_label."
            )
        place = np.minimum((p * n_bins).astype(int), n_bins - 1)
        counts = np.bincount(place, minlength=n_bins)
        kept = counts > 0
        sums = (np.bincount(place, v, n_bins)[kept] for v in (p, came.astype(float), p * (1 - p)))
        mean, share, variance = (total / counts[kept] for total in sums)
        band = norm.ppf(0.5 + 0.5 * level) * np.sqrt(variance / counts[kept])
        display = cls(mean, share, band, counts[kept], level=level, estimator_name=name)
        return display.plot(ax=ax, **kwargs)

    def _draw(self, ax, **kwargs):
        before = len(ax.containers)  # models that are there already
        style = {"fmt": "o-", "ms": 4, "color": f"C{before}", "label": self.estimator_name}
        style |= kwargs
        low, high = np.clip([self.stated - self.band, self.stated + self.band], 0.0, 1.0)
        band = None if before else f"{percent(self.level)} band"
        color, counts_at = style["color"], _COUNTS_AT - before * _COUNTS_APART
        ax.plot([0, 1], [0, 1], color="0.7", lw=1, zorder=0)
        ax.vlines(self.stated, low, high, color=color, alpha=0.25, lw=5, label=band)
        ax.errorbar(self.stated, self.observed, **style)
        for x, count in zip(self.stated, self.counts, strict=True):
            ax.text(x, counts_at, str(count), ha="center", va="center", fontsize=7, color=color)
        ax.set(xlim=(-0.03, 1.03), ylim=(counts_at - _COUNTS_APART, 1.06))
        ax.set(xlabel="stated probability", ylabel="observed share", yticks=np.linspace(0, 1, 6))
        # below the axes, since a curve may run anywhere
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize="small")
