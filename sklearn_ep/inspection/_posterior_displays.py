"""Pictures of any fit and of Gaussian processes: convergence and the latent function."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from .._estimator.checks import check_number, check_seen
from .._estimator.pipelines import rows_at_last_step
from .._estimator.tables import table_like
from ._drawing import Display, step_with


@dataclass(eq=False, repr=False)
class ConvergenceDisplay(Display):
    """Residual, and log evidence or objective, against iterations, phases of the fit marked.

    Parameters
    ----------
    residual : ndarray of shape (n_iter,)
        Residual of an undamped sweep at each iteration.
    tol : float
        Tolerance of the fit.
    objective : ndarray of shape (n_iter,), default=None
        Log evidence or objective; None leaves the second axis out.
    objective_name : str, default="log evidence"
        Label of the second axis.
    phase : ndarray of str of shape (n_iter,), default=None
        What kind of iteration each was. Where there are several, each run of one kind is shaded in
        turn and named above the axes.
    estimator_name : str, default=None
        Title.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the residual.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklearn_ep import EPGaussianProcessClassifier
    >>> from sklearn_ep.inspection import ConvergenceDisplay
    >>> X, y = make_moons(60, noise=0.2, random_state=0)
    >>> clf = EPGaussianProcessClassifier().fit(X, y)
    >>> display = ConvergenceDisplay.from_estimator(clf)
    >>> print(display.ax_.get_ylabel(), "against", display.ax_.get_xlabel())
    residual against iteration
    """

    residual: np.ndarray
    _: KW_ONLY
    tol: float
    objective: np.ndarray | None = None
    objective_name: str = "log evidence"
    phase: np.ndarray | None = None
    estimator_name: str | None = None

    @classmethod
    def from_estimator(cls, estimator: Any, *, ax: Any = None, **kwargs: Any) -> Self:
        """Draw the history of any fitted estimator of this package.

        Parameters
        ----------
        estimator : estimator
            Fitted, or a pipeline that ends in one; its `history_` is drawn.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.plot` for the residual.

        Returns
        -------
        display : ConvergenceDisplay
            The drawn display.
        """
        model = step_with(estimator, "history_", "estimator of this package")
        history = model.history_
        name = next((n for n in ("log_evidence", "objective") if n in history), None)
        return cls(
            history["residual"],
            tol=model.tol,
            objective=None if name is None else history[name],
            objective_name=(name or "").replace("_", " "),
            phase=history["phase"],
            estimator_name=type(model).__name__,
        ).plot(ax=ax, **kwargs)

    def _draw(self, ax, **kwargs):
        steps = np.arange(1, len(self.residual) + 1)
        style = {"marker": "o", "markersize": 3, "color": "C0", **kwargs}
        lines = ax.plot(steps, self.residual, label="residual", **style)
        lines.append(ax.axhline(self.tol, color="0.5", linestyle="--", label="tolerance"))
        ax.set(xlabel="iteration", ylabel="residual", yscale="log", title=self.estimator_name)
        ax.xaxis.get_major_locator().set_params(integer=True)
        self._mark_phases(ax)
        if self.objective is not None:
            twin = ax.twinx()
            twin.set_ylabel(self.objective_name)
            # an offset would stand where the last phase is named
            twin.ticklabel_format(axis="y", useOffset=False)
            lines += twin.plot(steps, self.objective, color="C1", label=self.objective_name)
        # below the axes, since lines may run anywhere
        ax.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)

    def _mark_phases(self, ax):
        """Shade every second run of iterations of one kind, and name each at its outer end."""
        if self.phase is None or len(set(self.phase)) < 2:
            return
        first = np.flatnonzero(np.r_[True, self.phase[1:] != self.phase[:-1]])
        ends = np.r_[first[1:], len(self.phase)]
        for k, (a, b) in enumerate(zip(first, ends, strict=True)):
            ax.axvspan(a + 0.5, b + 0.5, color="0.5", alpha=0.15 * (k % 2), linewidth=0)
            # the last run may be narrower than its name
            x, side = (b, "right") if b == ends[-1] else (a, "left")
            ax.annotate(
                self.phase[a], (x + 0.5, 1.0), xycoords=ax.get_xaxis_transform(), ha=side,
                xytext=(0, 3), textcoords="offset points", va="bottom", fontsize="small",
            )  # fmt: skip
        ax.set_xlim(0.5, len(self.phase) + 0.5)
        ax.set_title(ax.get_title(), pad=18)


@dataclass(eq=False, repr=False)
class LatentDisplay(Display):
    """Class probability and standard deviation of the latent function over two features.

    Parameters
    ----------
    x0, x1 : ndarray of shape (g, g)
        Grid of the two features.
    proba : ndarray of shape (g, g)
        Probability of the second class.
    std : ndarray of shape (g, g)
        Posterior standard deviation of the latent function.
    inducing_points : ndarray of shape (m, 2), default=None
        Drawn as crosses.
    X, y : ndarray of shape (n, 2) and (n,), default=None
        Training rows to draw, coloured by class.
    marked : ndarray of shape (n,), default=None
        Rows to ring, for instance relaxed or doubtful ones.
    feature_names : sequence of str, default=("feature 0", "feature 1")
        Labels of the axes.
    class_names : sequence of two, default=None
        Labels of the classes, for the legend.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the picture.
    figure_ : matplotlib Figure
        Figure that holds the axes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklearn_ep import EPGaussianProcessClassifier
    >>> from sklearn_ep.inspection import LatentDisplay
    >>> X, y = make_moons(60, noise=0.2, random_state=0)
    >>> clf = EPGaussianProcessClassifier().fit(X, y)
    >>> display = LatentDisplay.from_estimator(clf, X, y, grid_resolution=20)
    >>> print(display.figure_.axes[-1].get_ylabel())
    probability of class 1
    """

    x0: np.ndarray
    x1: np.ndarray
    proba: np.ndarray
    std: np.ndarray
    _: KW_ONLY
    inducing_points: np.ndarray | None = None
    X: np.ndarray | None = None
    y: np.ndarray | None = None
    marked: ArrayLike | None = None
    feature_names: Sequence[str] = ("feature 0", "feature 1")
    class_names: Sequence[Any] | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        marked: ArrayLike | None = None,
        grid_resolution: int = 80,
        margin: float = 0.3,
        ax: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Evaluate a fitted two-class estimator on a grid around X and draw it.

        Parameters
        ----------
        estimator : estimator
            Fitted on two features and two classes, with `latent_mean_and_variance`; or a pipeline
            that ends in one. Inducing points are then left out, which are in other columns.
        X : array-like of shape (n, 2)
            Rows that fix the range of the picture.
        y : array-like of shape (n,), default=None
            Labels; with them the rows are drawn.
        marked : array-like of shape (n,), default=None
            Mask of rows to ring.
        grid_resolution : int, default=80
            Grid points a side; the cost is that of so many squared predictions.
        margin : float, default=0.3
            Border around the rows, in shares of their range.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.contourf` for the probability.

        Returns
        -------
        display : LatentDisplay
            The drawn display.

        Raises
        ------
        ValueError
            If the estimator has not two classes and two features, or y has labels that were not in
            the fit.
        """
        model = step_with(estimator, "latent_mean_and_variance", "classifier of this package")
        check_is_fitted(model)
        if np.shape(X)[1:] != (2,) or len(estimator.classes_) != 2:
            raise ValueError("LatentDisplay needs two features and two classes.")
        rows = np.asarray(X, dtype=float)
        if y is not None:
            check_seen(estimator.classes_, y)
        check_number("grid_resolution", grid_resolution, 2, integer=True)
        low, high = rows.min(0), rows.max(0)
        border = margin * np.where(high > low, high - low, 1.0)
        sides = np.linspace(low - border, high + border, grid_resolution)
        x0, x1 = np.meshgrid(*sides.T)
        grid = np.column_stack([x0.ravel(), x1.ravel()])
        names = getattr(estimator, "feature_names_in_", ("feature 0", "feature 1"))
        grid = table_like(X, grid)
        std = np.sqrt(model.latent_mean_and_variance(rows_at_last_step(estimator, grid))[1])
        return cls(
            x0,
            x1,
            estimator.predict_proba(grid)[:, 1].reshape(x0.shape),
            std.reshape(x0.shape),
            inducing_points=getattr(estimator, "inducing_points_", None),
            X=rows,
            y=None if y is None else np.searchsorted(estimator.classes_, y),
            marked=marked,
            feature_names=names,
            class_names=estimator.classes_,
        ).plot(ax=ax, **kwargs)

    def _draw(self, ax, **kwargs):
        style = {"levels": np.linspace(0, 1, 21), "cmap": "RdBu_r", "alpha": 0.75, **kwargs}
        filled = ax.contourf(self.x0, self.x1, self.proba, **style)
        names = ("0", "1") if self.class_names is None else self.class_names
        ax.figure.colorbar(filled, ax=ax, label=f"probability of class {names[1]}")
        ax.contour(self.x0, self.x1, self.proba, levels=[0.5], colors="k", linewidths=1.5)
        sd = ax.contour(
            self.x0, self.x1, self.std, levels=5, colors="0.25", linewidths=0.6, linestyles=":"
        )
        ax.clabel(sd, fontsize=7, fmt="sd %.2g")
        if self.y is not None and self.X is not None:
            for label, color in ((0, "C0"), (1, "C3")):
                style = dict(color=color, edgecolors="w", linewidths=0.4)
                rows = self.X[self.y == label]
                ax.scatter(*rows.T, s=14, label=f"class {names[label]}", **style)
        if self.marked is not None and self.X is not None and np.any(self.marked):
            ring = self.X[np.asarray(self.marked, dtype=bool)]
            style = dict(facecolors="none", edgecolors="k", linewidths=1.2)
            ax.scatter(*ring.T, s=60, label="marked", **style)
        if self.inducing_points is not None:
            ax.scatter(*self.inducing_points.T, marker="x", color="k", s=30, label="inducing point")
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize="small")
        ax.set(xlabel=self.feature_names[0], ylabel=self.feature_names[1])
        ax.set_xlim(self.x0.min(), self.x0.max())
        ax.set_ylim(self.x1.min(), self.x1.max())
