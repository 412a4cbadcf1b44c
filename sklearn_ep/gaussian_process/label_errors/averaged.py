"""Average over the kernel and the rate of wrong labels, and over there being none."""

import numpy as np
from scipy.special import expit

from ..._engine.hyper import Spacing, integrate
from ..._engine.loop import SILENT, Trace
from ..._estimator.averaged import AveragedPosterior
from .._averaged_fit import alone
from .._dense_fit import fit_of_sites, watch_of_sweeps
from .._evidence import node_at_mode
from .._fitted import left_out_signs, mixed_logs
from .._kernel_scales import KernelScales, learned_coordinates
from .._kernels import with_theta
from ..inducing.averaged import AveragedInducing
from .ladder import climb
from .nodes import ErrorNodes
from .problem import fit_label_errors, learn_hyperparameters, wrong_proba
from .step import LabelErrorStep
from .without_errors import without_errors

__all__ = ["fit_averaged_errors"]

# Step, depth and most nodes of the lattice in kernel and rate, in the main the neighbours of the
# mode: on ten splits with and without wrong labels the log loss is that of a finer one within .001.
_SPACING = Spacing(2.0, 3.5, 20)


def fit_averaged_errors(plan, sign, monitor, k):
    """Average over the kernel and the rate of problem k, and return its `BinaryFit`."""
    trace, first = Trace(monitor), plan.first_setting(k)
    scales = KernelScales.at(first.kernel, first.kernel.theta) if plan.learn else None
    if plan.move_points or (scales is not None and len(scales.lengths) > 1):
        # ratios of lengths, and places of inducing points, are those that learning finds
        first = learn_hyperparameters(plan, sign, Trace(), k)[0]
        scales = KernelScales.at(first.kernel, first.kernel.theta) if plan.learn else None
    prior = None if scales is None else scales.prior(plan.averaging.prior)
    nodes = ErrorNodes(plan, sign, plan.sites[k], first, scales, prior)
    limits = dict(max_iter=plan.max_iter, monitor=trace)
    found = node_at_mode(nodes.evaluate, nodes.start(), nodes.bounds, nodes.told, **limits)
    if found is None:
        return fit_label_errors(plan, sign, monitor, k)
    mode, end = found
    if end.reason == "asked":
        lattice = alone(mode)
        clean, log_odds = None, -np.inf
    else:
        # of iterations that ran out none is left that a phase could lead to
        watch = SILENT if end.reason == "max_iter" else monitor
        workers, spacing = plan.averaging.n_jobs, _SPACING if len(mode.phi) == 3 else None
        lattice = integrate(nodes.evaluate, mode, nodes.bounds, workers, watch, spacing)
        clean, log_odds = without_errors(nodes, lattice, watch)
    return _mixed(nodes, lattice, clean, log_odds, trace, end)


def _mixed(nodes, lattice, clean, log_odds, trace, end):
    """Return the `BinaryFit` of nodes with label errors, and of nodes without them."""
    plan, sign, heaviest = nodes.plan, nodes.sign, lattice.heaviest
    share = float(expit(log_odds))
    setting = heaviest.payload.setting
    watch = watch_of_sweeps(trace, end, setting)
    # sites and relaxation of the estimator are those of the heaviest node, refined by its own rule
    rungs = plan.rungs(setting, sign, plan.tol)
    result, path = climb(rungs, heaviest.payload.result.x, plan.max_iter, watch)
    results = [result if n is heaviest else n.payload.result for n in lattice.nodes]
    settings = [n.payload.setting for n in lattice.nodes]
    payloads = [r.evaluation.payload[0] for r in results]
    posteriors = [plan.posterior(pair) for pair in zip(settings, payloads, strict=True)]
    own, weight = posteriors[int(np.argmax(lattice.weight))], lattice.weight
    pairs = [(LabelErrorStep(s.rate), r) for s, r in zip(settings, results, strict=True)]
    wrong = np.array([wrong_proba(factor, sign, r) for factor, r in pairs])
    if clean is not None:
        weight = np.concatenate([(1.0 - share) * weight, share * clean.average.weight])
        posteriors, pairs = posteriors + clean.posteriors, pairs + clean.left_out
    theta = np.array([s.kernel.theta for s in settings])
    update = result.evaluation.payload[1]
    more = dict(
        average=lattice._replace(nodes=[n._replace(payload=None) for n in lattice.nodes]),
        anisotropy=np.full(len(theta), learned_coordinates(setting.kernel)[2]),
        theta=theta,
        names=nodes.names,
        no_errors_proba=share,
        label_noise=(1.0 - share) * float(lattice.weight @ [s.rate for s in settings]),
        relaxation=np.zeros(len(sign)) if update.relaxation is None else update.relaxation,
        wrong_proba=(1.0 - share) * (lattice.weight @ wrong),
        setting=setting,
        path=path,
        posterior_of_sites=own,
    )
    # of labels that a kernel separates one side may take all weight, to the last digit
    heavy = np.flatnonzero(weight > 0)
    left_out = mixed_logs(weight[heavy], [left_out_signs(*pairs[i]) for i in heavy])
    mean = with_theta(plan.kernel, lattice.weight @ theta)
    mixture = AveragedPosterior if setting.points is None else AveragedInducing
    posterior = mixture([posteriors[i] for i in heavy], weight[heavy])
    run = trace, end, result, mean, left_out, setting.points
    fit = fit_of_sites(posterior, *run, **more)
    if end.reason == "asked":
        return fit
    return fit._replace(log_evidence=_log_evidence(nodes, lattice, log_odds))


def _log_evidence(nodes, lattice, log_odds):
    """Return the log evidence of both parts of the mixture."""
    if not nodes.plan.learn_rate:
        return lattice.log_evidence
    prior = nodes.plan.averaging.no_errors
    return float(lattice.log_evidence + np.log1p(-prior) + np.logaddexp(0.0, log_odds))
