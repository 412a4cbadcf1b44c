"""What all displays share: which estimators they take, where they draw, and words on axes."""

from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from .._estimator.checks import check_choice, check_number
from .._estimator.pipelines import last_step
from .._estimator.summary import Ranking, strength_of

# What a page can hold: inches a labelled row takes, and rows whose labels can be read.
_ROW_HEIGHT, MOST_LABELS = 0.22, 40


def step_with(estimator, name, model):
    """Return the fitted estimator, or last step of a pipeline, that has what a display draws.

    Raises
    ------
    TypeError
        If it has no attribute of that name; `model` says what has.
    NotFittedError
        If that is because it is not fitted.
    """
    step = last_step(estimator)
    if not hasattr(step, name):
        check_is_fitted(step)
        inside = ", such as its best_estimator_" if hasattr(step, "best_estimator_") else ""
        raise TypeError(f"{type(step).__name__} has no {name}: give a fitted {model}{inside}.")
    return step


def check_index(name, index, n):
    """Raise an error that names the parameter unless it is the place of one of n things."""
    check_number(name, index, -n, n - 1, integer=True)


def strongest(columns, top, sort="strength"):
    """Return the `top` rows (None: all) of columns "mean" and "sd" and others of equal length.

    They are those with the largest |mean| / sd, in this order or ("column") in that of the rows.
    """
    check_choice("sort", sort, ["strength", "column"])
    check_number("top", top, 1, integer=True, optional=True)
    every = np.full(len(columns["mean"]), True)
    return Ranking(strength_of(columns, every), sort, top).printed(columns)


def pyplot():
    """Return `matplotlib.pyplot`; an ImportError says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Displays are drawn by matplotlib: pip install "sklearn-ep[plot]"'
        ) from error
    return plt


class Display:
    """Picture of what it holds. A subclass offers `_draw(ax, **kwargs)`."""

    _draw: Any

    def plot(self, ax: Any = None, **kwargs: Any) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; None makes a figure.
        **kwargs : dict
            Passed on as `from_estimator` says.

        Returns
        -------
        display : Display
            The display itself.
        """
        if ax is None:
            size = 6.4, max(4.8, 1.2 + _ROW_HEIGHT * self._n_labelled())
            ax = pyplot().subplots(figsize=size, layout="constrained")[1]
        self._draw(ax, **kwargs)
        self.ax_, self.figure_ = ax, ax.figure
        return self

    def _n_labelled(self):
        """Return how many rows with a label are drawn on top of each other."""
        return 0


def percent(level):
    """Return a level in words."""
    return f"{100 * level:g} %"


def some_of(title, n_drawn, n):
    """Return a title with a second line where fewer than n (None: not known) are drawn."""
    if n is None or n <= n_drawn:
        return title or None
    return f"{title or ''}\n{n_drawn} of {n} shown".lstrip()
