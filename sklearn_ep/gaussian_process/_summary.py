"""What a Gaussian process has learned, as a table: the parameters of its kernel."""

from typing import Any

import numpy as np

from .._estimator.summary import Ranking, Summarised, Summary, column_names, interval_of, title_of


class KernelReport(Summarised):
    """Summary of a Gaussian process."""

    hyperparameters_used_: str
    log_evidence_: float
    hyper_weights_: Any

    def _summarise(self, level, top, sort, feature_names):
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
        told = "at one value"
        if self.hyperparameters_used_ == "integrate":
            weights = _of_each(self.hyper_weights_)
            each = [f"{len(w)} nodes ({1.0 / np.sum(w**2):.1f} effective)" for w in weights]
            told = f"averaged over {', '.join(each)}"
        figures = {"hyperparameters": told}
        points = getattr(self, "inducing_points_", None)
        return figures | ({} if points is None else {"inducing points": len(points)})


def _of_each(values):
    """Return a list over the averages."""
    return values if isinstance(values, list) else [values]


def _problems(est):
    """Return label, kernel, theta (M, p) and weight (M,) of its nodes, of each kernel."""
    kernels = getattr(est.kernel_, "kernels", [est.kernel_])
    thetas, weights = _of_each(est.hyper_theta_), _of_each(est.hyper_weights_)
    labels = [f"{label}: " for label in est.classes_] if len(kernels) > 1 else [""]
    return zip(labels, kernels, thetas, weights, strict=True)


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
