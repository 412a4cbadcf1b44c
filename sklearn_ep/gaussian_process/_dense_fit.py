"""Recipe of a fit with sites on the rows in memory: find the mode, average, converge, predict."""

from functools import partial
from typing import Any

import numpy as np

from .._engine.loop import StepsOfPhase, Trace
from .._estimator.fitting import BinaryFit
from ._averages import alone, average_about
from ._evidence import KEPT, TO_THE_MODE, find_mode, find_mode_from_rows, or_refuse
from ._fitted import attributes_of_nodes, fit_of_sites, mixed_logs, watch_of_sweeps
from ._kernels import with_theta
from ._spaces import KernelScales, Nodes

__all__ = ["fit_dense"]


def fit_dense(plan, y, monitor, k):
    """Learn the kernel or average over it if asked, converge EP; return the `BinaryFit`.

    y are the labels of problem k.
    """
    if isinstance(plan.space, KernelScales):
        fit = _fit_average(plan, y, monitor, k)
        if fit is not None:
            return fit
    x, trace, end = plan.sites[k], Trace(monitor), KEPT
    kernel, most = (
        with_theta(plan.kernel, plan.starts[k]),
        min(plan.sweeps.most, plan.search.max_iter),
    )
    if plan.space is not None:
        nodes, mode, end = or_refuse(_mode(plan, y, k, trace, monitor))
        kernel, most = mode.payload.kernel, plan.sweeps.most
        # the first sites, so that the answer depends on the kernel alone and not on the path that
        # led to it; from where a few steps of many rows ended that is not worth its time
        if nodes.problem.x is not x:
            x = mode.payload.result.onwards
    # a search that was stopped still ends at converged sites, in sweeps that nobody counts
    watch = watch_of_sweeps(trace, end, kernel, ends=("converged", "stuck", "max_iter"))
    result = plan.solve(plan.ep(kernel, y), x, plan.sweeps.tol, most, watch)
    posterior = plan.posterior((kernel, result.evaluation.payload[0]))
    left_out, points = plan.model.left_out(result), getattr(plan.model, "points", None)
    return fit_of_sites(posterior, trace, end, result, kernel, left_out, points)


def _mode(plan, y, k, trace, monitor):
    """Return the `Nodes` of problem k, the one at the mode and how the search ended, or None.

    A search that ends flat is made again from shorter lengths: the evidence may have a mode with
    and one without structure, far apart.
    """
    space, search, nodes = (
        plan.space,
        plan.search,
        Nodes(plan.passing(y, plan.sites[k]), plan.space),
    )
    starts = [space.phi(theta) for theta in search.restarts]
    found = _mode_from(nodes, space.phi(plan.starts[k]), starts, trace)
    if found is None or search.shorter is None or found[2].reason == "asked":
        return found
    if not plan.ends_flat(y, found[1].log_evidence):
        return found
    with monitor.phase("search from shorter lengths") as told:
        evaluate = partial(found[0].evaluate, near=None, slopes=False)
        tried = [evaluate(space.phi(theta)) for theta in search.shorter]
        best = max(filter(None, tried), key=lambda node: node.objective, default=None)
        if best is None:
            return found
        other = _mode_from(nodes, best.phi, (), StepsOfPhase(told))
    if other is None or other[1].objective < found[1].objective:
        return found
    return *other[:2], found[2]


def _mode_from(nodes, phi, starts, monitor):
    """Return the same from phi (T,); with many rows a search begins with some of them.

    What their sites tell those of the others to be is where the `Nodes` start.
    """
    plan, bounds = nodes.problem.plan, nodes.space.bounds
    averages = isinstance(plan.space, KernelScales)
    accuracy = TO_THE_MODE if averages else plan.model.accuracy
    options: dict[str, Any] = dict(max_iter=plan.search.max_iter, starts=starts, monitor=monitor)
    optimizer, rows = plan.search.optimizer, plan.some_rows()
    if optimizer is not None or rows is None:
        options |= dict(accuracy=accuracy, optimizer=optimizer)
        found = find_mode(nodes.evaluate, phi, bounds, **options)
        return found and (nodes, *found)
    of_rows, own = Nodes(nodes.problem.of_rows(rows), plan.space), nodes

    def evaluate_from(node):
        nonlocal own
        own = Nodes(nodes.problem.from_rows(rows, node), plan.space)
        return own.evaluate

    args = evaluate_from, of_rows.evaluate, plan.share(rows), phi, bounds
    exact = plan.model.exact_gradient
    found = find_mode_from_rows(*args, accuracy=accuracy, exact_gradient=exact, **options)
    return found and (own, *found)


def _fit_average(plan, y, monitor, k):
    """Average over the kernel of problem k and return its `BinaryFit`.

    None where EP has no fixed point at the first kernel.
    """
    trace = Trace(monitor)
    found = _mode(plan, y, k, trace, monitor)
    if found is None:
        return None
    nodes, mode, end = found
    asked = end.reason == "asked"
    average = alone(mode)
    if not asked:
        # also where lengths alone are compared, without a lattice
        with monitor.phase("integration over hyperparameters"):
            average = average_about(nodes, mode, monitor)
    heaviest = average.heaviest
    kept = heaviest.payload
    # the sites of the estimator are those of the heaviest node, refined
    watch = watch_of_sweeps(trace, end, kept.kernel)
    start = plan.ep(kept.kernel, y), kept.result.x
    result = plan.solve(*start, plan.sweeps.tol, plan.sweeps.most, watch)
    results = [result if n is heaviest else n.payload.result for n in average.nodes]
    pairs = [
        (n.payload.kernel, r.evaluation.payload[0])
        for n, r in zip(average.nodes, results, strict=True)
    ]
    posteriors = [plan.posterior(pair) for pair in pairs]
    mixed = mixed_logs(average.weight, [plan.model.left_out(r) for r in results])
    more = attributes_of_nodes(average, [n.payload.theta for n in average.nodes], plan.space.names)
    more |= dict(posterior_of_sites=posteriors[int(np.argmax(average.weight))])
    mean = with_theta(plan.kernel, average.weight @ more["theta"])
    posterior = plan.model.mixture(posteriors, average.weight)
    fit: BinaryFit = fit_of_sites(posterior, trace, end, result, mean, mixed, **more)
    return fit if asked else fit._replace(log_evidence=average.log_evidence)
