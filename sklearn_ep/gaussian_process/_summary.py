"""What a Gaussian process has learned, as a table: the parameters of its kernel."""

import numpy as np
from numpy.typing import ArrayLike

from .._estimator.summary import (
    Ranking,
    Summary,
    check_summary,
    column_names,
    interval_of,
    title_of,
)


class KernelReport:
    """Summary of a Gaussian process."""

    hyperparameters_used_: str
    log_evidence_: float

    def summary(
        self,
        level: float = 0.9,
        top: int | None = 20,
        sort: str = "strength",
        feature_names: ArrayLike | None = None,
    ) -> Summary:
        """Tabulate what was learned: parameters of the kernel, and key figures.

        Parameters
        ----------
        level : float, default=0.9
            Probability in (0, 1) that an interval covers its parameter. Intervals are those of a
            log-normal distribution with the moments of the average; the mode has none.
        top : int or None, default=20
            How many parameters that belong to one column each are printed, the shortest length
            scales first; None for all. The table has all.
        sort : {"strength", "column"}, default="strength"
            Order in which they are printed: from the shortest length scale to the longest, or that
            of the columns.
        feature_names : array-like of shape (d,), default=None
            Names of the columns; None takes those of the rows of the fit, x0, x1, ... where they
            had none.

        Returns
        -------
        summary : Summary
            Its `hyperparameters` are the free parameters of the kernel: name, value (the
            exponential of the mean log), and lower and upper if they were averaged over. Each class
            with a kernel of its own comes under its label. ``print`` shows it, ``to_frame()`` gives
            it to pandas.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1, `top` or `sort` is none of the above, or
            `feature_names` has another length.
        """
        check_summary(self, level, top, sort)
        columns = column_names(self, feature_names)
        each = [_table_of_kernel(columns, *problem) for problem in _problems(self)]
        names, logs, sd, keys = (np.concatenate(parts) for parts in zip(*each, strict=True))
        table = {"name": names, "value": np.exp(logs)}
        if self.hyperparameters_used_ == "integrate":
            lower, upper = np.exp(interval_of(logs, sd, level)).T
            table |= dict(lower=lower, upper=upper)
        ranking = Ranking([keys], sort, top)
        figures = {"log evidence": self.log_evidence_, **self._figures()}
        return Summary(title_of(self), level, ranking, hyperparameters=table, figures=figures)

    def _figures(self):
        """Return what a summary shows besides the kernel and the evidence."""
        used = self.hyperparameters_used_ == "integrate"
        figures = {"hyperparameters": _how_averaged(self) if used else "at one value"}
        points = getattr(self, "inducing_points_", None)
        return figures | ({} if points is None else {"inducing points": len(points)})


def _weights(est):
    """Return the weights (M,) of the nodes, a list over the averages."""
    weights = est.hyper_weights_
    return weights if isinstance(weights, list) else [weights]


def _how_averaged(est):
    each = [f"{len(w)} nodes ({1.0 / np.sum(w**2):.1f} effective)" for w in _weights(est)]
    return f"averaged over {', '.join(each)}"


def _problems(est):
    """Return label, kernel, theta (M, p) and weight (M,) of its nodes, of each kernel."""
    kernels = getattr(est.kernel_, "kernels", [est.kernel_])
    thetas = est.hyper_theta_ if isinstance(est.hyper_theta_, list) else [est.hyper_theta_]
    labels = [f"{label}: " for label in est.classes_] if len(kernels) > 1 else [""]
    return zip(labels, kernels, thetas, _weights(est), strict=True)


def _table_of_kernel(columns, label, kernel, theta, weight):
    """Return names, means and sds of the logs, and strengths, nan but for those of one column."""
    names, of_column = _parameters(kernel, columns)
    mean = weight @ theta
    sd = np.sqrt(weight @ (theta - mean) ** 2)
    own = np.array([label + name for name in names], dtype=object)
    return own, mean, sd, np.where(of_column, -mean, np.nan)


def _parameters(kernel, columns):
    """Return names of the free parameters of a kernel, and which of them are of one column."""
    free = [h for h in kernel.hyperparameters if not h.fixed]
    short = [h.name.split("__")[-1].replace("constant_value", "variance") for h in free]
    names, of_column = [], []
    for h, word in zip(free, short, strict=True):
        word = word.replace("_", " ") if short.count(word) == 1 else h.name
        own = h.n_elements == len(columns) > 1
        each = columns if own else range(h.n_elements)
        names += [f"{word} of {c}" for c in each] if h.n_elements > 1 else [word]
        of_column += [own] * h.n_elements
    return names, np.array(of_column, dtype=bool)
