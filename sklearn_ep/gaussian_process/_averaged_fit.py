"""Recipe of a fit that averages over the kernel: find the mode, lay nodes about it, mix them."""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import logsumexp

from .._engine.hyper import Average, Spacing, average_of, integrate
from .._engine.loop import SILENT, StepsOfPhase, Trace
from ._anisotropy import SPREADS, isotropic_level, levels
from ._averaging_plan import SEVERAL_ROWS
from ._dense_fit import fit_dense, fit_of_sites, watch_of_sweeps
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
# Rows below which variance and mean length are so open that equal lengths have a lattice; of more
# than two classes up to the number below (without it, iris has a log loss .003 higher, wine .002
# lower).
_FEW_ROWS = 100
# Spacing of a lattice beside lengths that differ, and of one of several classes or beside wrong
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
    # the sites of the estimator are those of the heaviest node, refined
    watch = watch_of_sweeps(trace, end, kernel)
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
    fit = fit_of_sites(posterior, trace, end, result, mean, mixed, **more)
    return fit if asked else fit._replace(log_evidence=average.log_evidence)


def alone(mode):
    """Return the `Average` of a mode that is not averaged over."""
    return average_of([mode], np.array([mode.log_evidence]))


def mode_of_kernels(ep, start, trace, monitor=SILENT):
    """Return isotropic `ScaleNodes`, the mode from parameters (p,), and how the search ended.

    A search that ends flat is made again from shorter lengths: the posterior may have a mode with
    and one without structure, far apart. None where EP has no fixed point at the start.
    """
    plan = ep.plan
    found = _mode_from(ep, start, trace, monitor, plan.restarts)
    if found is None or plan.shorter_lengths is None or found[2].reason == "asked":
        return found
    if not plan.ends_flat(ep.y, found[1].log_evidence):
        return found
    with monitor.phase("integration over hyperparameters") as told:
        scales, evaluate = found[0].scales, found[0].evaluate
        nodes = [evaluate(scales.phi(theta), None, slopes=False) for theta in plan.shorter_lengths]
        best = max(filter(None, nodes), key=lambda node: node.objective, default=None)
        if best is None:
            return found
        other = _mode_from(ep, best.payload.theta, StepsOfPhase(told))
    if other is None or other[1].objective < found[1].objective:
        return found
    return *other[:2], found[2]


def _mode_from(ep, start, trace, monitor=SILENT, restarts=()):
    """Return the same without a second search; many rows begin with some of them."""
    plan, exact = ep.plan, ep.plan.model.exact_gradient
    lengths = KernelScales.at(plan.kernel, start).lengths
    scales = KernelScales(plan.kernel, np.zeros(len(lengths)))
    nodes = ScaleNodes(ep, scales, scales.prior(plan.averaging.prior))
    starts = [scales.phi(theta) for theta in restarts]
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

    The lattice is `coarse` where it is a part of a larger average. With several rows four nodes do,
    unless they tell hardly anything, and of more than two classes, whose evidence is the sharper,
    the mode.
    """
    n_rows, exact = len(nodes.ep.y), nodes.ep.plan.model.exact_gradient
    flat = exact and nodes.ep.plan.ends_flat(nodes.ep.y, mode.log_evidence)
    if len(nodes.scales.lengths) > 1:
        return _average_over_spreads(nodes, mode, monitor, flat)
    if n_rows > SEVERAL_ROWS and not (coarse or flat):
        level = isotropic_level(nodes, mode)
        return level.average_about(monitor, weighed=True) if exact else level.alone()
    short = len(mode.phi) == 2 and (coarse or not exact)
    return _lattice(nodes, mode, monitor, _SHORT if short else None)


def _lattice(nodes, mode, monitor, spacing):
    """Return the `Average` over a lattice in variance and length."""
    workers = nodes.ep.plan.averaging.n_jobs
    return integrate(nodes.evaluate, mode, nodes.scales.bounds, workers, monitor, spacing)


def _average_over_spreads(nodes, mode, monitor, flat):
    """Return the `Average` over how far the lengths differ.

    The spreads are compared by their modes: variance and mean length have about the same volume at
    each, which is that of the heaviest, or of the lattice of few rows or of a `flat` mode.
    """
    found = [isotropic_level(nodes, mode), *levels(nodes.ep, nodes.scales, nodes.prior, mode)]
    log_mass = np.array([level.log_mass for level in found])
    share = np.exp(log_mass - logsumexp(log_mass))
    n_rows, exact = len(nodes.ep.y), nodes.ep.plan.model.exact_gradient
    several = n_rows > SEVERAL_ROWS
    few = flat or n_rows < _FEW_ROWS or not (exact or several)
    known, insured = 0 if few else int(np.argmax(share)), share[0] < _INSURANCE
    if insured:
        share = np.append(_INSURANCE, (1.0 - _INSURANCE) * share[1:] / share[1:].sum())
    parts: dict[int, Average] = {}
    for k in map(int, np.flatnonzero(share > _WORTH)):
        if few and k == 0:
            spacing = _COARSE if exact else _SHORT
            parts[0] = _lattice(nodes, mode, monitor, spacing if len(mode.phi) == 2 else None)
            found = [level.with_spread_of(parts[0]) for level in found]
        elif several or (insured and k == 0):
            parts[k] = found[k].alone()
        else:
            parts[k] = found[k].average_about(monitor, weighed=not few)
    every = [node for part in parts.values() for node in part.nodes]
    masses = [np.log(share[k] * part.weight) for k, part in parts.items()]
    mixed = average_of(every, np.concatenate(masses))
    # a level that was not reached has no mass, but its share of the prior
    volume = parts[known].log_evidence - found[known].mode.objective
    log_evidence = logsumexp(log_mass) + volume - np.log(1 + len(SPREADS))
    return mixed._replace(log_evidence=float(log_evidence))
