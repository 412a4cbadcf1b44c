"""Recipe of a fit to labels that may be wrong: learn or average, converge the sites, tell of rows.

An average is over the kernel and the rate of wrong labels, and over there being none: the problem
is then the same at a rate of zero, under a prior of its own.

Where an iteration does not converge a dearer one takes over, at last the convergent double loop.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from ..._engine import hyper
from ..._engine.loop import SILENT, Trace
from ..._estimator.averaged import AveragedPosterior
from .. import _base as base
from .._kernels import with_theta
from .._limits import LIMITS
from .problem import ErrorProblem, ErrorSpace, Setting

# Of a search for what predicts: relative changes of the evidence below that, or what a line search
# still finds after five evaluations, are within the error of sites in passing.
_LEARNING = hyper.Accuracy(ftol=3e-4, first_step=1.0, max_line_search=5)
# Step, depth and most nodes of the lattice in kernel and rate, and in two of these alone, in the
# main the neighbours of the mode: on ten splits with and without wrong labels the log loss is that
# of a finer one within .001. With many rows they are ever fewer, to a depth of neighbours alone.
_SPACINGS, _ENDS = {2: hyper.Spacing(2.0, 3.5, 9), 3: hyper.Spacing(2.0, 3.5, 20)}, 0.5
# Rate of a second start: from .005, .02 and .08 log losses of six splits of raw iris are the same.
_FEW_ERRORS = 0.02


def fit_label_errors(plan, y, monitor, k):
    """Learn or average, converge the sites, and return the `BinaryFit` of problem k.

    y are its labels: signs, or class indices of all classes jointly.
    """
    problem, first = ErrorProblem(plan, y, plan.sites[k]), plan.settings[k]
    rows, trace = _some_rows(problem, first), Trace(monitor)
    if plan.averaging is None:
        return fit_of_mode(problem, first, rows, trace)
    nodes = hyper.Nodes(problem, _space_of_average(problem, first, rows))
    how = rows, hyper.TO_THE_MODE, trace
    found = _with_few_errors(_mode(nodes, *how), nodes, *how)
    if found is None:
        return fit_of_mode(problem, first, rows, trace)
    mode, end = found
    if end.reason == "asked":
        average = hyper.average_of([mode], np.array([mode.log_evidence]))
        return _mixed(nodes, average, None, -np.inf, trace, end)
    # of iterations that ran out none is left that a phase could lead to
    watch = SILENT if end.reason == "max_iter" else monitor
    models, log_odds = [_Hypothesis(nodes, mode, _curvature(nodes, mode, end))], -np.inf
    if plan.learn_rate and plan.averaging.no_errors:
        plain = _nodes_without_errors(nodes, mode)
        found = _mode(plain, rows, hyper.TO_THE_MODE)
        if found is not None:
            models.append(_Hypothesis(plain, found[0], _curvature(plain, *found)))
            log_odds = logit(plan.averaging.no_errors)
    average, without, log_odds = _averages(models, log_odds, watch)
    fit = _mixed(nodes, average, without, log_odds, trace, end)
    log_evidence = average.log_evidence
    if plan.learn_rate:
        log_evidence += np.log1p(-plan.averaging.no_errors) + np.logaddexp(0.0, log_odds)
    return fit._replace(log_evidence=float(log_evidence))


def fit_of_mode(problem, first, rows, trace):
    """Return the `BinaryFit` of the setting of the largest evidence."""
    setting, sites, end = learned(problem, first, rows, trace)
    # other ends leave no iterations for sweeps: both share one budget
    watch = base.watch_of_sweeps(trace, end, setting, ends=("converged", "stuck"))
    result, path = climb(problem, setting, sites, watch)
    posterior, result, told = problem.told(setting, result)
    told |= _attributes_of_setting(setting, path)
    run = posterior, trace, end, result, setting.kernel
    return base.fit_of_sites(*run, told, setting.points)


def learned(problem, first, rows, trace):
    """Return (setting, sites of EP there, `LearningEnd`) of a problem from a first `Setting`.

    The search begins with some `rows`, None for all.
    """
    plan = problem.plan
    nodes = hyper.Nodes(problem, plan.space_of_mode(first))
    if not len(nodes.space.start(first.kernel.theta)):
        return first, problem.x, hyper.KEPT
    how = rows, _LEARNING, trace
    found = _with_few_errors(_mode(nodes, *how, plan.restarts), nodes, *how)
    if found is None:
        return first, problem.x, hyper.LearningEnd("stuck", 0, np.nan)
    mode, end = found
    return mode.payload.point, mode.payload.result.x, end


def _space_of_average(problem, first, rows):
    """Return the `ErrorSpace` that is averaged over.

    Ratios of lengths, and places of inducing points, are those that learning finds.
    """
    plan, space = problem.plan, problem.plan.space_of_average(first)
    if plan.unit is not None or (plan.learn and len(space.kernel.lengths) > 1):
        space = plan.space_of_average(learned(problem, first, rows, Trace())[0])
    return space


def _some_rows(problem, first):
    """Return a third of the rows, to begin with; None for few rows, warm starts and objects.

    Through inducing points these are none that are moved.
    """
    plan = problem.plan
    if np.any(problem.x[1]) or plan.unit is not None:
        return None
    least = LIMITS.thirds if first.points is None else LIMITS.averaged + 1
    return base.third_of_rows(plan.X, problem.y, plan.weight, least, LIMITS.first_rows)


def _with_few_errors(found, nodes, rows, accuracy, monitor):
    """Return what `_mode` found, or the same from few errors if that is higher.

    Where a large amplitude and the first rate meet, sites may have no fixed point, or one at which
    all rows of a class are errors. Then the second search has its say, of rows in memory.
    """
    problem, space = nodes.problem, nodes.space
    in_memory = isinstance(problem, ErrorProblem) and problem.plan.labels.exact_gradient
    if not in_memory or space.rate_counts is None:
        return found
    if found is not None and (found[1].reason == "asked" or not _one_sided(found[0])):
        return found
    few = replace(space, first=space.first._replace(rate=_FEW_ERRORS))
    empty = problem.plan.labels.empty_sites(problem.y)
    nodes = hyper.Nodes(replace(problem, x=empty), few)
    each = [f for f in (found, _mode(nodes, rows, accuracy, monitor)) if f is not None]
    return max(each, key=lambda f: f[0].objective, default=None)


def _one_sided(mode):
    """Return whether the mean function of a mode has the same sign at all rows."""
    mean = mode.payload.result.evaluation.payload[0].mean
    return bool(np.all(mean > 0) or np.all(mean < 0))


def _mode(nodes, rows, accuracy, monitor=SILENT, restarts=()):
    """Return the mode and how its search ended, or None; it begins with some `rows`, or None."""
    space, plan = nodes.space, nodes.problem.plan
    exact = plan.labels.exact_gradient
    starts = [space.start(theta) for theta in (space.first.kernel.theta, *restarts)]
    search: dict[str, Any] = dict(max_iter=plan.max_iter, starts=starts[1:], monitor=monitor)
    found: Any
    if rows is None or not len(starts[0]):
        accuracy = accuracy._replace(exact_gradient=accuracy.exact_gradient and exact)
        found = hyper.search_mode(nodes.evaluate, starts[0], space.bounds, accuracy, **search)
    else:
        if accuracy is hyper.TO_THE_MODE:
            # nodes about it are weighed: half a posterior sd away it does as well
            accuracy = hyper.TO_THE_MODE._replace(gain=0.1)
        search |= dict(exact_gradient=exact, patient=LIMITS.patient / plan.weight.sum())
        share = base.share_of_copies(plan.weight, rows)
        found = hyper.search_from_rows(nodes, rows, share, starts[0], accuracy, **search)
    if found is None:
        return None
    mode, end = found[-2:]
    # a gradient that is not exact promises what no step finds
    over = not exact and end.reason == "stuck"
    return mode, end._replace(reason="converged") if over else end


class _Hypothesis(NamedTuple):
    """A model with label errors or without: nodes, their mode, minus the Hessian (T, T) there."""

    nodes: hyper.Nodes
    mode: hyper.Node
    curvature: np.ndarray

    def about(self, share, monitor):
        """Return the `Average` about the mode, of a model with a share of the mass.

        Over a lattice where that is most of it and rows are few, else over two nodes along each
        axis; of one coordinate a lattice is as cheap. A small share has the mode alone.
        """
        nodes, mode, curvature = self
        if share < 0.02 or not len(mode.phi):
            return base.average_alone(mode, curvature)
        about, plan = (mode, nodes.space.bounds), nodes.problem.plan
        n_copies, ends = plan.weight.sum(), LIMITS.lattice_errors
        n_jobs, few = plan.averaging.n_jobs, plan.labels.exact_gradient and n_copies <= ends[1]
        if few and n_copies >= LIMITS.thirds:
            # that of some rows may be twice too large
            curvature = hyper.curvature_at(nodes.evaluate, *about, 0.3)[0]
        if len(mode.phi) < 2 or (few and share >= 0.5):
            spacing = _SPACINGS.get(len(mode.phi))
            if spacing is not None:
                depth = float(np.interp(n_copies, ends, (spacing.depth, _ENDS)))
                spacing = spacing._replace(depth=depth)
            return hyper.integrate(nodes.evaluate, *about, n_jobs, monitor, spacing, curvature)
        evaluate = partial(nodes.evaluate, slopes=False)
        return hyper.sample_about(evaluate, *about, curvature, n_jobs, monitor)


def _curvature(nodes, mode, end):
    """Return minus the Hessian (T, T) at the mode, as its search has learned it or at a price."""
    if not len(mode.phi):
        return np.empty((0, 0))
    if end.curvature is not None:
        return end.curvature
    return hyper.curvature_at(nodes.evaluate, mode, nodes.space.bounds, 0.3)[0]


def _averages(models, log_odds, monitor):
    """Return the `Average` with errors, that without or None, and the log odds of there being none.

    `models` are the model with errors and maybe that without, of prior `log_odds`. Either is its
    mode alone where its share is small, and of several classes jointly that without always.
    """
    if len(models) == 1:
        return models[0].about(1.0, monitor), None, log_odds
    alone = [base.average_alone(model.mode, model.curvature) for model in models]
    exact = models[0].nodes.problem.plan.labels.exact_gradient
    share = expit(log_odds + alone[1].log_evidence - alone[0].log_evidence)
    average = models[0].about(1.0 - share, monitor)
    without = models[1].about(share, monitor) if exact else alone[1]
    return average, without, log_odds + without.log_evidence - average.log_evidence


def _nodes_without_errors(nodes, mode):
    """Return the `Nodes` of a model without label errors; `mode` is that of `nodes` with errors."""
    averaging, space = nodes.problem.plan.averaging, nodes.space
    theta, scales = mode.payload.point.kernel.theta, space.kernel
    kernel = averaging.plain_kernel or space.first.kernel
    if scales is not None:
        scales = replace(scales, kernel=kernel, both=averaging.plain_prior)
    first = Setting(with_theta(kernel, theta), 0.0, space.first.points)
    problem = nodes.problem
    problem = replace(problem, x=problem.plan.labels.empty_sites(problem.y))
    return hyper.Nodes(problem, ErrorSpace(first, scales, None))


def climb(problem, setting, x, monitor):
    """Run the rungs of a setting from sites x until one converges or iterations are used up.

    They are in order of cost; each starts where the last one stopped and gets three tenths of the
    iterations, at least 60, the last one whatever is left. Returns the `Result` of the last rung,
    with its reason and the iterations and the history of all, and the names of the rungs that ran.
    """
    plan, trace, names = problem.plan, Trace(monitor), list[str]()
    rungs, quota = plan.labels.rungs(plan), max(60, int(0.3 * plan.max_iter))
    for rung in rungs:
        left = plan.max_iter - trace.n_iter
        most = left if rung is rungs[-1] else min(quota, left)
        result = problem.by_rung(setting, rung, x, tol=plan.tol, max_iter=most, monitor=trace)
        names.append(rung.name)
        x = result.x
        if result.reason in ("converged", "asked") or trace.n_iter >= plan.max_iter:
            break
    return replace(result, n_iter=trace.n_iter, history=trace.history), names


def _attributes_of_setting(setting, path):
    """Return what one `Setting` and the rungs that ran leave in the attributes of a fit."""
    return dict(label_noise=setting.rate, no_errors_proba=0.0, setting=setting, path=path)


def _mixed(nodes, average, without, log_odds, trace, end):
    """Return the `BinaryFit` of nodes with label errors, and of nodes without them.

    Sites and relaxation of the estimator are those of the heaviest node, refined by its own rule.
    """
    problem, heaviest = nodes.problem, average.heaviest
    setting = heaviest.payload.point
    watch = base.watch_of_sweeps(trace, end, setting)
    result, path = climb(problem, setting, heaviest.payload.result.x, watch)
    own = [node.payload for node in average.nodes]
    pairs = [(p.point, result if p is heaviest.payload else p.result) for p in own]
    share, weight = float(expit(log_odds)), average.weight
    theta, rates = np.array([s.kernel.theta for s, _ in pairs]), [s.rate for s, _ in pairs]
    more = base.attributes_of_nodes(average, theta, nodes.space.names)
    more |= _attributes_of_setting(setting, path)
    more |= dict(label_noise=(1.0 - share) * float(weight @ rates), no_errors_proba=share)
    if without is not None:
        pairs += [(n.payload.point, n.payload.result) for n in without.nodes]
        weight = np.concatenate([(1.0 - share) * weight, share * without.weight])
    posteriors, weight, told = problem.parts(pairs, weight)
    state = setting, result.evaluation.payload[0]
    more |= told | dict(posterior_of_sites=problem.plan.posterior(state))
    more["relaxation"] = problem.relaxation(result)
    mean = with_theta(problem.plan.kernel, average.weight @ theta)
    run = AveragedPosterior(posteriors, weight), trace, end, result, mean
    return base.fit_of_sites(*run, more, setting.points)
