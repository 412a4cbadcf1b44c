"""Recipe of a fit that averages over the kernel: find the mode, lay nodes about it, mix them."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import cholesky
from scipy.special import logsumexp

from .._engine.averaging import Spacing, average_of, integrate
from .._engine.loop import SILENT, StepsOfPhase, Trace
from ._anisotropy import SPREADS, expected_curvature, levels, node_at, nodes_about
from ._dense_fit import WithLearned, fit_dense, fit_of_sites
from ._evidence import (
    INEXACT_DIFFERENCE,
    TOWARDS_THE_MODE,
    climb_to_mode,
    curvature_at_node,
    node_at_mode,
)
from ._fitted import mixed_logs
from ._kernel_nodes import EPAtKernels, ScaleNodes
from ._kernel_scales import KernelScales
from ._kernels import with_theta

__all__ = ["alone", "average_about", "fit_averaged", "mode_of_kernels"]

# What the isotropic kernel keeps at least where lengths may differ: on few rows with many columns
# the evidence trusts the model more than it deserves.
_INSURANCE = 0.2
# Rows above which variance and mean length are known well enough: of lengths that differ the mode
# alone counts (on twelve sets of 300 to 400 rows the mean log loss changes by .0003, at most by
# .002), and of an isotropic kernel, too (on five sets of 700 and 1000 rows by .001 at most), or
# where it is kept for insurance only; of more than two classes from the first number on (on five
# splits of six classes with 300 rows the mean log loss changes by .0003).
_SEVERAL_ROWS, _MANY_ROWS = 299, 500
# Spacing of a lattice beside lengths that differ, and of one with several rows or beside wrong
# labels, in the main the neighbours of the mode.
_COARSE, _SHORT = Spacing(2.0, 5.5, 20), Spacing(2.0, 3.5, 9)
# Weight of an anisotropic mode from which it is worth nodes.
_WORTH = 0.02


def fit_averaged(plan, y, monitor, k):
    """Average over the kernel of problem k and return its `BinaryFit`."""
    trace, ep = Trace(monitor), EPAtKernels(plan.rough(), y, plan.sites[k])
    found = mode_of_kernels(ep, plan.starts[k], trace, monitor)
    if found is None:
        return fit_dense(plan, y, monitor, k)
    nodes, mode, end = found
    asked = end.reason == "asked"
    average = alone(mode)
    if not asked:
        # also where lengths alone are compared, without a lattice
        with monitor.phase("integration over hyperparameters"):
            average = average_about(nodes, mode, monitor)
    heaviest = average.heaviest
    kernel = with_theta(plan.kernel, heaviest.payload.theta)
    # the sites of the estimator are those of the heaviest node, refined, in sweeps that nobody
    # counts where a search has been told
    counted = not trace.n_iter
    watch = WithLearned(trace, kernel) if counted else SILENT
    start = plan.ep(kernel, y), heaviest.payload.result.x
    result = plan.solve(*start, plan.tol, plan.max_sweeps, watch)
    results = [result if n is heaviest else n.payload.result for n in average.nodes]
    theta = np.array([n.payload.theta for n in average.nodes])
    posteriors = [
        plan.posterior((with_theta(plan.kernel, t), r.evaluation.payload[0]))
        for t, r in zip(theta, results, strict=True)
    ]
    mixed = mixed_logs(average.weight, [plan.model.left_out(r) for r in results])
    more = dict(
        average=average._replace(nodes=[n._replace(payload=None) for n in average.nodes]),
        anisotropy=np.array([n.payload.anisotropy for n in average.nodes]),
        theta=theta,
        posterior_of_sites=posteriors[int(np.argmax(average.weight))],
        names=KernelScales.at(plan.kernel, heaviest.payload.theta).names,
    )
    mean = with_theta(plan.kernel, average.weight @ theta)
    posterior = plan.model.mixture(posteriors, average.weight)
    fit = fit_of_sites(posterior, trace, end, result, mean, mixed, counted, **more)
    return fit if asked else fit._replace(log_evidence=average.log_evidence)


def alone(mode):
    """Return the `Average` of a mode that is not averaged over."""
    return average_of([mode], np.array([mode.log_evidence]))


def mode_of_kernels(ep, start, trace, monitor=SILENT):
    """Return isotropic `ScaleNodes`, the mode from parameters (p,), and how the search ended.

    With many rows it is first looked for with some of them. None where EP has no fixed point at the
    start.
    """
    plan, exact = ep.plan, ep.plan.model.exact_gradient
    lengths = KernelScales.at(plan.kernel, start).lengths
    scales = KernelScales(plan.kernel, np.zeros(len(lengths)))
    nodes = ScaleNodes(ep, scales, scales.prior(plan.averaging.prior))
    starts = [scales.phi(theta) for theta in plan.restarts]
    limits: dict[str, Any] = dict(max_iter=plan.max_iter, starts=starts)
    phi, rows = scales.phi(start), plan.rows_to_start_from()
    if rows is not None:
        small = replace(nodes, ep=ep.of_rows(rows))
        with monitor.phase("some rows first") as told:
            steps = StepsOfPhase(told)
            search = limits if exact else limits | TOWARDS_THE_MODE
            below = node_at_mode(
                small.evaluate, phi, scales.bounds, ep.told, **search, monitor=steps
            )
            if below is not None and not exact:
                below = _refined(small, *below, plan.max_iter, steps)
        if below is not None:
            phi, limits["starts"] = below[0].phi, ()
            x = plan.sites_from_rows(ep.y, rows, *ep.told(below[0]), below[0].payload.result.x)
            nodes = replace(nodes, ep=replace(ep, x=x))
            found = _climb_from_rows(nodes, small, below[0], plan.share(rows), trace)
            if found is not None:
                return found
    found = node_at_mode(nodes.evaluate, phi, scales.bounds, ep.told, **limits, monitor=trace)
    if found is None:
        return None
    if exact or not len(phi):
        return nodes, *found
    nodes, mode, _ = _with_gradients(nodes, found[0])
    return nodes, mode, found[1]


def _refined(nodes, mode, end, max_iter, monitor):
    """Return mode and end of a search that goes on by gradients which lack little."""
    nodes, mode, curvature = _with_gradients(nodes, mode)
    search = nodes.scales.bounds, curvature, np.zeros(len(mode.phi)), nodes.ep.told, max_iter
    return climb_to_mode(nodes.evaluate, mode.phi, *search, monitor) or (mode, end)


def _climb_from_rows(nodes, small, below, share, trace):
    """Return nodes, mode and end of a search that starts from the mode of a share of the rows.

    None where it finds nothing. What gradients lack is not in proportion to the rows: where they
    are not exact, all rows are asked for the curvature, too.
    """
    plan, bounds, lacking = nodes.ep.plan, nodes.scales.bounds, None
    if plan.model.exact_gradient:
        curvature = curvature_at_node(small.evaluate, below, bounds)[0] / share
    else:
        start = nodes.evaluate(below.phi, None)
        if start is None:
            return None
        nodes, _, curvature = _with_gradients(nodes, start)
        lacking = np.zeros(len(below.phi))
    search = bounds, curvature, lacking, nodes.ep.told, plan.max_iter, trace
    found = climb_to_mode(nodes.evaluate, below.phi, *search)
    return None if found is None else (nodes, *found)


def _with_gradients(nodes, near):
    """Return `ScaleNodes` whose gradients lack little near a node, the node, and the curvature."""
    args = nodes.evaluate, near, nodes.scales.bounds, INEXACT_DIFFERENCE
    curvature, lacking = curvature_at_node(*args)
    ep = replace(nodes.ep, lacking=nodes.scales.spread_out(lacking), x=near.payload.result.x)
    nodes = replace(nodes, ep=ep)
    return nodes, nodes.evaluate(near.phi, near), curvature


def average_about(nodes, mode, monitor, coarse=False):
    """Return the `Average` about an isotropic mode, in whose nodes are `KernelNode`s.

    The lattice is `coarse` where it is a part of a larger average, as it is beside lengths that
    differ. With several rows there is none where these lengths carry most of the mass, nor of more
    than two classes, whose evidence is the sharper.
    """
    workers, scales = nodes.ep.plan.averaging.n_jobs, nodes.scales
    lengths_differ, exact = len(scales.lengths) > 1, nodes.ep.plan.model.exact_gradient
    several, spacing = len(nodes.ep.y) > _SEVERAL_ROWS, None
    if several and not (exact or lengths_differ):
        return _for_its_surroundings(nodes, mode)
    if lengths_differ and several:
        found = levels(nodes.ep, scales, nodes.prior, mode)
        if len(nodes.ep.y) > _MANY_ROWS or _log_shares(found, mode)[0] < np.log(_INSURANCE):
            return _over_levels(_for_its_surroundings(nodes, mode), found, mode)
    if len(mode.phi) == 2:
        short = coarse or several or not exact
        spacing = _SHORT if short else _COARSE if lengths_differ else None
    lattice = integrate(nodes.evaluate, mode, scales.bounds, workers, monitor, spacing)
    if not lengths_differ:
        return lattice
    top = max(lattice.nodes, key=lambda node: node.objective)
    if several:
        return _over_levels(lattice, found, top)
    found = levels(nodes.ep, scales, nodes.prior, top)
    mean = lattice.weight @ lattice.phi
    apart = np.sqrt(lattice.weight)[:, None] * (lattice.phi - mean)
    # of one node, too: a lattice of it alone has no covariance
    root = cholesky(apart.T @ apart + 1e-9 * np.eye(len(mean)), lower=True)
    about = partial(nodes_about, offset=mean - top.phi, root=root, n_jobs=workers)
    return _over_levels(lattice, found, top, about)


def _for_its_surroundings(nodes, mode):
    """Return the `Average` of an isotropic mode with the mass about it (Laplace approximation)."""
    expected = expected_curvature(nodes.ep, mode, together=True)
    curvature = expected + np.diag(nodes.prior.spread**-2.0)
    log_volume = -0.5 * np.linalg.slogdet(curvature / (2.0 * np.pi))[1]
    return average_of([mode], np.array([mode.objective + log_volume]))


def _log_shares(found, top):
    """Return the logs of the shares of the isotropic kernel and of the levels, by their modes."""
    log_mass = np.array([top.objective, *(level.log_mass for level in found)])
    return log_mass - logsumexp(log_mass)


def _over_levels(lattice, found, top, about=node_at):
    """Return the `Average` over the isotropic lattice and the anisotropic levels.

    `top` is the best node of the lattice: levels are compared by their modes. `about` gives the
    nodes of a level, of equal weight.
    """
    log_share = _log_shares(found, top)
    # a level that was not reached has no mass, but its share of the prior
    log_evidence = lattice.log_evidence - log_share[0] - np.log(1 + len(SPREADS))
    share = np.exp(log_share)
    if share[0] < _INSURANCE:
        share = np.append(_INSURANCE, (1.0 - _INSURANCE) * share[1:] / share[1:].sum())
    nodes, masses = list(lattice.nodes), [np.log(share[0] * lattice.weight)]
    for level, weight in zip(found, share[1:], strict=True):
        if weight > _WORTH:
            own = about(level)
            nodes += own
            masses.append(np.full(len(own), np.log(weight / len(own))))
    mixed = average_of(nodes, np.concatenate(masses), lattice.foretold * share[0])
    return mixed._replace(log_evidence=float(log_evidence))
