"""What the fits of all binary problems leave together, before it becomes attributes."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import logit
from sklearn.gaussian_process.kernels import CompoundKernel, Kernel

from .._engine.hyper import Node, average_of, log_mixture
from .._engine.loop import SILENT, worst_reason
from .._engine.sites import Sites, cavity
from .._estimator.averaged import hyper_attributes
from .._estimator.fitting import BinaryFit
from .._estimator.latents import log_normalise
from ._spaces import learned_coordinates

__all__ = [
    "GPFit",
    "attributes_of_averages",
    "attributes_of_nodes",
    "averages_of",
    "WithLearned",
    "ending_in",
    "evidence_of_problems",
    "fit_of_sites",
    "joined_fits",
    "left_out_labels",
    "left_out_signs",
    "mixed_logs",
    "signs_of",
    "watch_of_sweeps",
]


class GPFit(NamedTuple):
    """A fit of one binary problem, or of one a class, by whatever method.

    `runs` are what ran on its own, each with history, reason, log evidence and remark: a
    `BinaryFit` a problem, or one run whose passes all problems share. `sites` (C, 2, n) and
    `loo_proba` (n,) are None where rows have no sites of their own, `inducing_points` where there
    are none.
    """

    runs: list[Any]
    posteriors: list[Any]
    kernel: Kernel
    n_sweeps: int
    sites: Any
    loo_proba: Any
    inducing_points: Any = None


def signs_of(y, k, n_problems):
    """Return labels in {-1, +1} of problem k from class indices."""
    return np.where(y == (1 if n_problems == 1 else k), 1.0, -1.0)


def joined_fits(fits, y, own_points=False):
    """Return the `GPFit` of `BinaryFit`s with sites on the rows, whose class indices are y.

    `own_points` says that each of several problems has inducing points of its own.
    """
    own = [f.attributes for f in fits]
    kernels, points = [a["kernel"] for a in own], [a["points"] for a in own]
    return GPFit(
        runs=fits,
        posteriors=[f.posterior for f in fits],
        kernel=kernels[0] if len(own) == 1 else CompoundKernel(kernels),
        n_sweeps=max(a["n_sweeps"] for a in own),
        sites=np.stack([a["sites"] for a in own]),
        loo_proba=_own_label_proba(own, y),
        inducing_points=np.stack(points) if own_points and len(own) > 1 else points[0],
    )


def _own_label_proba(attributes, labels):
    """Leave-one-out probability (n,) of each row's own label; of separate problems, normalised."""
    if "loo_log" in attributes[0]:
        return np.exp(attributes[0]["loo_log"])
    if len(attributes) == 1:
        log_p = np.column_stack([attributes[0]["loo_log_minus"], attributes[0]["loo_log_plus"]])
    else:
        log_p = log_normalise(np.column_stack([a["loo_log_plus"] for a in attributes]))
    return np.exp(log_p[np.arange(len(labels)), labels])


def averages_of(fit):
    """Return the `Average` of each problem of a `GPFit`, none where the mode was used."""
    own = [getattr(run, "attributes", {}) for run in fit.runs]
    return [a["average"] for a in own if "average" in a]


def attributes_of_averages(fit, learned, learned_rate):
    """Return the attributes that tell of the average over hyperparameters of a `GPFit`.

    Without an average what was learned is the one node: parameters of the kernel if `learned`, the
    rate of wrong labels of its setting if `learned_rate`.
    """
    own = [getattr(run, "attributes", {}) for run in fit.runs]
    if "average" in own[0]:
        averages, names, used = [a["average"] for a in own], own[0]["names"], "integrate"
        thetas, spreads = [a["theta"] for a in own], [a["anisotropy"] for a in own]
    else:
        kernels = getattr(fit.kernel, "kernels", [fit.kernel])
        found = [learned_coordinates(k) if learned else ((), np.empty(0), 0.0) for k in kernels]
        rates = [[logit(a["setting"].rate)] if learned_rate else [] for a in own]
        rates *= len(kernels) // len(rates)
        phi = [np.append(f[1], rate) for f, rate in zip(found, rates, strict=True)]
        averages = [_single(x, fit.runs[0].log_evidence) for x in phi]
        names, used = (*found[0][0], *["logit_label_noise"] * int(learned_rate)), "mode"
        thetas, spreads = [k.theta[None] for k in kernels], [np.array([s]) for *_, s in found]
    one = len(averages) == 1
    return dict(
        **hyper_attributes(averages, names, used),
        hyper_theta_=thetas[0] if one else thetas,
        hyper_anisotropy_=spreads[0] if one else spreads,
    )


def _single(phi, log_evidence):
    """Return the `Average` of one node at phi (T,)."""
    node = Node(phi, log_evidence, 0.0, np.zeros(len(phi)), 0.0, None)
    return average_of([node], np.array([log_evidence]))


def ending_in(history, record):
    """Return a history that ends in other figures: of the final state, where nobody counted it."""
    last = {name: np.append(history[name][:-1], float(value)) for name, value in record.items()}
    return history | last


class WithLearned:
    """Monitor that adds what was learned to the payload of the sweeps that follow."""

    def __init__(self, monitor, learned):
        self.monitor, self.learned = monitor, learned

    def begin(self, name="iteration"):
        self.monitor.begin(name)

    def end(self, record, payload):
        return self.monitor.end(record, (self.learned, payload[0]))


def watch_of_sweeps(trace, end, learned, ends=(), wrapper=WithLearned):
    """Return the monitor of the sweeps that lead from what was learned to the sites of a fit.

    They are iterations of the `trace` after a search that nobody was told of, or whose `end` has a
    reason among `ends`. Nobody counts them after another, which was stopped or has used up the
    iterations.
    """
    counted = not trace.n_iter or end.reason in ends
    return wrapper(trace, learned) if counted else SILENT


def fit_of_sites(posterior, trace, end, result, kernel, left_out, points=None, **more):
    """Return the `BinaryFit` of sites on the rows, whatever structure and rule they come from.

    `trace` is that of the whole fit, `end` the `LearningEnd`, `result` the final run of EP, in
    whose figures the history ends whether its sweeps are counted or not; `left_out` says how likely
    labels are from the other rows, `more` are further attributes.
    """
    record = result.evaluation.record
    history = ending_in(trace.history, {"residual": result.residual, **record})
    more |= dict(kernel=kernel, points=points, sites=result.x, n_sweeps=result.n_iter, **left_out)
    reason, log_evidence = worst_reason([end.reason, result.reason]), float(record["log_evidence"])
    return BinaryFit(posterior, history, reason, log_evidence, more, end.remark)


def attributes_of_nodes(average, theta, names):
    """Return what an `Average` leaves in the attributes of a fit, with theta (p,) of its nodes."""
    return dict(
        average=average._replace(nodes=[n._replace(payload=None) for n in average.nodes]),
        anisotropy=np.array([n.payload.s for n in average.nodes]),
        theta=np.array(theta),
        names=names,
    )


def evidence_of_problems(at, y, theta, fit):
    """Return log evidence and its gradient at theta, one part of it a binary problem.

    `at(k, sign, x, theta)` returns those of problem k from sites x.
    """
    C = len(fit.posteriors)
    parts = enumerate(np.split(theta, C))
    found = [at(k, signs_of(y, k, C), fit.sites[k], part) for k, part in parts]
    values, slopes = zip(*found, strict=True)
    return float(sum(values)), np.concatenate(slopes)


def left_out_signs(factor, result):
    """Return the log probabilities of both labels under the cavity of each row."""
    state = result.evaluation.payload[0]
    cav = cavity(Sites(*result.x), state.mean, state.var)
    plus, minus = (factor.tilted(s, cav.mean, cav.var + state.extra_var).log_z for s in (1.0, -1.0))
    return {"loo_log_plus": plus, "loo_log_minus": minus}


def mixed_logs(weight, parts):
    """Return the mixtures of the logs in dicts of arrays (n,), with weight (M,)."""
    return {name: log_mixture(weight, np.array([p[name] for p in parts])) for name in parts[0]}


def left_out_labels(result):
    """Return the log probability of each row's own class under its cavity, of a joint problem."""
    return {"loo_log": result.evaluation.payload[1].tilted.log_z}
