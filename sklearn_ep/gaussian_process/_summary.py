"""What a Gaussian process has learned, as a table: the parameters of its kernel."""

import numpy as np

from .._estimator import summary


def summarise(est, level, top, sort, feature_names):
    """Return the `Summary` of a fitted Gaussian process."""
    summary.check_ranking(sort, top)
    columns = summary.column_names(est, feature_names)
    kernels = getattr(est.kernel_, "kernels", [est.kernel_])
    nodes = est.hyper_theta_, est.hyper_weights_
    pairs = zip(*nodes, strict=True) if isinstance(nodes[0], list) else [nodes]
    labels = [f"{label}: " for label in est.classes_] if len(kernels) > 1 else [""]
    names, keys, logs, spread, effective = [], [], [], [], []
    for label, kernel, (theta, weight) in zip(labels, kernels, pairs, strict=True):
        own, of_column = _parameters(kernel, columns)
        mean = weight @ theta
        names += [label + name for name in own]
        keys.append(np.where(of_column, -mean, np.nan))
        logs.append(mean)
        spread.append(np.sqrt(weight @ (theta - mean) ** 2))
        effective.append(1.0 / np.sum(weight**2))
    mean, sd = np.concatenate(logs), np.concatenate(spread)
    table = {"name": np.array(names, dtype=object), "value": np.exp(mean)}
    ends = np.exp(summary.interval_of(mean, sd, level))
    averaged = est.hyperparameters_used_ == "integrate"
    table |= dict(lower=ends[:, 0], upper=ends[:, 1]) if averaged else {}
    ranking = summary.Ranking([np.concatenate(keys)], sort, top)
    figures = _figures(est, effective if averaged else None)
    return summary.Summary(
        summary.title_of(est), level, ranking, hyperparameters=table, figures=figures
    )


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


def _figures(est, effective):
    numbers = "" if effective is None else ", ".join(f"{n:.1f}" for n in effective)
    how = f"averaged, effective nodes {numbers}" if numbers else "at their mode"
    figures = {
        "rows": len(est.loo_proba_),
        "log evidence": est.log_evidence_,
        "hyperparameters": how,
    }
    points = getattr(est, "inducing_points_", None)
    return figures | ({} if points is None else {"inducing points": len(points)})
