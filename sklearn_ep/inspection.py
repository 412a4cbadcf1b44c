"""Pictures of fitted estimators; matplotlib is imported when one is drawn."""

import numpy as np
from scipy.special import ndtri
from sklearn.utils.validation import check_is_fitted

__all__ = [
    "CoefficientIntervalDisplay",
    "ConvergenceDisplay",
    "GroupEffectsDisplay",
    "InclusionDisplay",
    "LatentDisplay",
]


def _axes(ax):
    """Return the axes to draw on, new ones if there are none."""
    import matplotlib.pyplot as plt

    return plt.subplots()[1] if ax is None else ax


class ConvergenceDisplay:
    """Residual, and log evidence or objective, against iterations.

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
    estimator_name : str, default=None
        Title.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the residual.
    figure_ : matplotlib Figure
        Figure that holds the axes.
    """

    def __init__(
        self,
        residual,
        *,
        tol,
        objective=None,
        objective_name="log evidence",
        estimator_name=None,
    ):
        self.residual = residual
        self.tol = tol
        self.objective = objective
        self.objective_name = objective_name
        self.estimator_name = estimator_name

    @classmethod
    def from_estimator(cls, estimator, *, ax=None, **kwargs):
        """Draw the history of any fitted estimator of this package.

        Parameters
        ----------
        estimator : estimator
            Fitted; its `history_` is drawn.
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.plot` for the residual.

        Returns
        -------
        display : ConvergenceDisplay
            The drawn display.
        """
        check_is_fitted(estimator)
        history = estimator.history_
        name = next((n for n in ("log_evidence", "objective") if n in history), None)
        display = cls(
            history["residual"],
            tol=estimator.tol,
            objective=None if name is None else history[name],
            objective_name=(name or "").replace("_", " "),
            estimator_name=type(estimator).__name__,
        )
        return display.plot(ax=ax, **kwargs)

    def plot(self, ax=None, **kwargs):
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.plot` for the residual.

        Returns
        -------
        display : ConvergenceDisplay
            The display itself.
        """
        ax = _axes(ax)
        steps = np.arange(1, len(self.residual) + 1)
        style = {"marker": "o", "markersize": 3, "color": "C0", **kwargs}
        lines = ax.plot(steps, self.residual, label="residual", **style)
        lines.append(ax.axhline(self.tol, color="0.5", linestyle="--", label="tolerance"))
        ax.set(xlabel="iteration", ylabel="residual", yscale="log", title=self.estimator_name)
        if self.objective is not None:
            twin = ax.twinx()
            twin.set_ylabel(self.objective_name)
            lines += twin.plot(steps, self.objective, color="C1", label=self.objective_name)
        ax.legend(handles=lines, loc="best")
        self.ax_, self.figure_ = ax, ax.figure
        return self


class LatentDisplay:
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

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the picture.
    figure_ : matplotlib Figure
        Figure that holds the axes.
    """

    def __init__(
        self,
        x0,
        x1,
        proba,
        std,
        *,
        inducing_points=None,
        X=None,
        y=None,
        marked=None,
        feature_names=("feature 0", "feature 1"),
    ):
        self.x0 = x0
        self.x1 = x1
        self.proba = proba
        self.std = std
        self.inducing_points = inducing_points
        self.X = X
        self.y = y
        self.marked = marked
        self.feature_names = feature_names

    @classmethod
    def from_estimator(
        cls, estimator, X, y=None, *, marked=None, grid_resolution=80, margin=0.3, ax=None, **kwargs
    ):
        """Evaluate a fitted two-class estimator on a grid around X and draw it.

        Parameters
        ----------
        estimator : estimator
            Fitted on two features and two classes, with `latent_mean_and_variance`.
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
            If the estimator has not two classes and two features.
        """
        check_is_fitted(estimator)
        rows = np.asarray(X, dtype=float)
        if rows.ndim != 2 or rows.shape[1] != 2 or len(estimator.classes_) != 2:
            raise ValueError("LatentDisplay needs two features and two classes.")
        low, high = rows.min(0), rows.max(0)
        border = margin * (high - low)
        sides = [
            np.linspace(a, b, grid_resolution)
            for a, b in zip(low - border, high + border, strict=True)
        ]
        x0, x1 = np.meshgrid(*sides)
        grid = np.column_stack([x0.ravel(), x1.ravel()])
        names = getattr(estimator, "feature_names_in_", ("feature 0", "feature 1"))
        if hasattr(estimator, "feature_names_in_"):
            grid = type(X)(grid, columns=list(names))
        std = np.sqrt(estimator.latent_mean_and_variance(grid)[1])
        display = cls(
            x0,
            x1,
            estimator.predict_proba(grid)[:, 1].reshape(x0.shape),
            std.reshape(x0.shape),
            inducing_points=getattr(estimator, "inducing_points_", None),
            X=rows,
            y=None if y is None else np.searchsorted(estimator.classes_, y),
            marked=marked,
            feature_names=names,
        )
        return display.plot(ax=ax, **kwargs)

    def plot(self, ax=None, **kwargs):
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.contourf` for the probability.

        Returns
        -------
        display : LatentDisplay
            The display itself.
        """
        ax = _axes(ax)
        style = {"levels": np.linspace(0, 1, 21), "cmap": "RdBu_r", "alpha": 0.75, **kwargs}
        filled = ax.contourf(self.x0, self.x1, self.proba, **style)
        ax.figure.colorbar(filled, ax=ax, label="probability of the second class")
        ax.contour(self.x0, self.x1, self.proba, levels=[0.5], colors="k", linewidths=1.5)
        sd = ax.contour(
            self.x0, self.x1, self.std, levels=5, colors="0.25", linewidths=0.6, linestyles=":"
        )
        ax.clabel(sd, fontsize=7, fmt="sd %.2g")
        if self.y is not None:
            for label, color in ((0, "C0"), (1, "C3")):
                rows = self.X[self.y == label]
                ax.scatter(*rows.T, s=14, color=color, edgecolors="w", linewidths=0.4)
        if self.marked is not None and np.any(self.marked):
            ring = self.X[np.asarray(self.marked, dtype=bool)]
            ax.scatter(*ring.T, s=60, facecolors="none", edgecolors="k", linewidths=1.2)
        if self.inducing_points is not None:
            ax.scatter(*self.inducing_points.T, marker="x", color="k", s=30, label="inducing point")
        ax.set(xlabel=self.feature_names[0], ylabel=self.feature_names[1])
        ax.set_xlim(self.x0.min(), self.x0.max())
        ax.set_ylim(self.x1.min(), self.x1.max())
        self.ax_, self.figure_ = ax, ax.figure
        return self


class GroupEffectsDisplay:
    """Caterpillar plot: posterior mean and interval of each group's effect, in increasing order.

    Parameters
    ----------
    mean, std : ndarray of shape (J,)
        Posterior means and standard deviations of one effect.
    labels : array-like of shape (J,)
        Labels of the groups.
    effect_name : str, default="group effect"
        Label of the value axis.
    estimator_name : str, default=None
        Title.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes with the plot.
    figure_ : matplotlib Figure
        Figure that holds the axes.
    """

    def __init__(self, mean, std, labels, *, effect_name="group effect", estimator_name=None):
        self.mean = mean
        self.std = std
        self.labels = labels
        self.effect_name = effect_name
        self.estimator_name = estimator_name

    @classmethod
    def from_estimator(cls, estimator, *, effect=0, ax=None, **kwargs):
        """Draw the group effects of a fitted hierarchical model.

        Parameters
        ----------
        estimator : HierarchicalEPLogistic
            Fitted with groups.
        effect : int, default=0
            Which effect: 0 the intercept, then the columns of `random_slopes`.
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
            If the model was fitted without groups.
        """
        check_is_fitted(estimator)
        if len(estimator.group_labels_) == 0:
            raise ValueError("the estimator was fitted without groups: there are no effects.")
        display = cls(
            estimator.group_effects_[:, effect],
            estimator.group_effects_std_[:, effect],
            estimator.group_labels_,
            effect_name="effect on the intercept" if effect == 0 else f"effect on slope {effect}",
            estimator_name=type(estimator).__name__,
        )
        return display.plot(ax=ax, **kwargs)

    def plot(self, ax=None, **kwargs):
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed to `Axes.errorbar`.

        Returns
        -------
        display : GroupEffectsDisplay
            The display itself.
        """
        ax = _axes(ax)
        order = np.argsort(self.mean)
        style = {"fmt": "o", "markersize": 3, "elinewidth": 1, "color": "C0", **kwargs}
        rank = np.arange(len(order))
        ax.errorbar(self.mean[order], rank, xerr=1.96 * self.std[order], **style)
        ax.axvline(0.0, color="0.6", linestyle="--")
        if len(order) <= 40:  # more labels than that cannot be read
            ax.set_yticks(rank, [str(self.labels[k]) for k in order])
        else:
            ax.set_yticks([])
        ax.set(
            xlabel=f"{self.effect_name} (mean, 95 % interval)",
            ylabel="group",
            title=self.estimator_name,
        )
        self.ax_, self.figure_ = ax, ax.figure
        return self


class CoefficientIntervalDisplay:
    """Posterior means of coefficients with their intervals.

    Parameters
    ----------
    mean : ndarray of shape (d,)
        Posterior means.
    std : ndarray of shape (d,)
        Posterior standard deviations.
    names : sequence of str
        Labels of the coefficients.
    level : float, default=0.9
        Probability of the drawn intervals under the Gaussian posterior.
    estimator_name : str, default=None
        Title.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the picture.
    figure_ : matplotlib Figure
        Figure that holds the axes.
    """

    def __init__(self, mean, std, names, *, level=0.9, estimator_name=None):
        self.mean = mean
        self.std = std
        self.names = names
        self.level = level
        self.estimator_name = estimator_name

    @classmethod
    def from_estimator(
        cls, estimator, *, feature_names=None, class_index=0, n_largest=30, level=0.9, ax=None, **kw
    ):
        """Draw the coefficients of any fitted linear estimator of this package.

        Parameters
        ----------
        estimator : estimator
            Fitted, with `coef_` and `coef_std_`.
        feature_names : sequence of str, default=None
            Labels; None takes `feature_names_in_`, or numbers.
        class_index : int, default=0
            Row of `coef_` for more than two classes.
        n_largest : int, default=30
            Coefficients drawn, those whose means are largest in units of their standard deviation;
            more do not fit a page.
        level : float, default=0.9
            Probability of the intervals.
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
            If the number of names is not that of the coefficients.
        """
        check_is_fitted(estimator)
        mean = np.atleast_2d(estimator.coef_)[class_index]
        std = np.atleast_2d(estimator.coef_std_)[class_index]
        if feature_names is None:
            known = getattr(estimator, "feature_names_in_", ())
            # a group column is no coefficient: names that do not match would label the wrong ones
            numbered = [f"feature {j}" for j in range(len(mean))]
            feature_names = known if len(known) == len(mean) else numbered
        if len(feature_names) != len(mean):
            raise ValueError(f"{len(feature_names)} feature_names for {len(mean)} coefficients.")
        top = np.sort(np.argsort(-np.abs(mean) / std, kind="stable")[:n_largest])
        names = [str(feature_names[j]) for j in top]
        display = cls(
            mean[top], std[top], names, level=level, estimator_name=type(estimator).__name__
        )
        return display.plot(ax=ax, **kw)

    def plot(self, ax=None, **kw):
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kw : dict
            Passed to `Axes.errorbar`.

        Returns
        -------
        display : CoefficientIntervalDisplay
            The display itself.
        """
        ax = _axes(ax)
        rows = np.arange(len(self.mean))[::-1]
        half = ndtri(0.5 + 0.5 * self.level) * self.std
        style = {"fmt": "o", "color": "C0", "markersize": 4, "capsize": 2, **kw}
        ax.errorbar(self.mean, rows, xerr=half, **style)
        ax.axvline(0.0, color="0.5", linewidth=0.8)
        ax.set_yticks(rows, self.names)
        ax.set(
            xlabel=f"coefficient, {100 * self.level:g} % interval",
            title=self.estimator_name,
        )
        self.ax_, self.figure_ = ax, ax.figure
        return self


class InclusionDisplay:
    """Posterior inclusion probabilities with the coefficients of the features that are in.

    Parameters
    ----------
    inclusion : ndarray of shape (d,)
        Posterior probability that each coefficient is not zero.
    coef, coef_std : ndarray of shape (d,)
        Posterior means and standard deviations.
    threshold : float, default=0.5
        Probability above which a feature is in the model.
    feature_names : sequence of str, default=None
        Names of the features; None numbers them.

    Attributes
    ----------
    ax_ : ndarray of two matplotlib Axes
        Probabilities above, coefficients below; one Axes when one was given.
    figure_ : matplotlib Figure
        Figure that holds the axes.
    """

    def __init__(self, inclusion, coef, coef_std, *, threshold=0.5, feature_names=None):
        self.inclusion = inclusion
        self.coef = coef
        self.coef_std = coef_std
        self.threshold = threshold
        self.feature_names = feature_names

    @classmethod
    def from_estimator(cls, estimator, *, threshold=0.5, ax=None, **kwargs):
        """Draw the inclusion probabilities of a fitted regressor.

        Parameters
        ----------
        estimator : SpikeSlabRegressor
            Fitted.
        threshold : float, default=0.5
            Probability above which a feature is in the model.
        ax : matplotlib Axes, default=None
            Where to draw the probabilities; None makes a figure with the coefficients below.
        **kwargs : dict
            Passed to `Axes.vlines` for the probabilities.

        Returns
        -------
        display : InclusionDisplay
            The drawn display.
        """
        check_is_fitted(estimator)
        display = cls(
            estimator.inclusion_proba_,
            estimator.coef_,
            estimator.coef_std_,
            threshold=threshold,
            feature_names=getattr(estimator, "feature_names_in_", None),
        )
        return display.plot(ax=ax, **kwargs)

    def plot(self, ax=None, **kwargs):
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
        import matplotlib.pyplot as plt

        if ax is None:
            figure, (ax, below) = plt.subplots(2, sharex=True, layout="constrained")
            self._draw_coefficients(below)
            self.ax_, self.figure_ = np.array([ax, below]), figure
        else:
            self.ax_, self.figure_ = ax, ax.figure
            ax.set_xlabel("feature")
        place = np.arange(len(self.inclusion))
        on = self.inclusion > self.threshold
        ax.vlines(place, 0, self.inclusion, **{"color": np.where(on, "C3", "0.6"), **kwargs})
        ax.axhline(self.threshold, color="0.5", linestyle="--", linewidth=0.8)
        ax.set(ylabel="inclusion probability", ylim=(0, 1.02))
        self._name(ax, place[on])
        return self

    def _draw_coefficients(self, ax):
        place = np.flatnonzero(self.inclusion > self.threshold)
        ax.errorbar(place, self.coef[place], 2 * self.coef_std[place], fmt="o", color="C3", ms=4)
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.set(xlabel="feature", ylabel="coefficient (2 sd)")
        self._name(ax, place)

    def _name(self, ax, place):
        """Label the features that are in by their names, if they have any."""
        if self.feature_names is not None:
            names = [self.feature_names[i] for i in place]
            ax.set_xticks(place, labels=names, rotation=45, ha="right")
