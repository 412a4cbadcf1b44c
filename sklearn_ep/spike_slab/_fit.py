"""From the plan of a spike-and-slab fit to the run that is kept, other fixed points, and nodes."""

from typing import NamedTuple

import numpy as np

from .._engine.hyper import Average
from .._engine.loop import Trace
from ._integration import NodeCoordinates, NodeRuns, integrated
from ._learning import EvidenceSearch
from ._runs import SHORT, Run, distinct, explore, run, run_start

__all__ = ["SpikeSlabFit", "fit_plan"]


class SpikeSlabFit(NamedTuple):
    """Runs at the mode h of the hyperparameters, and the average over them about the first run.

    The runs ended at different fixed points, the one that is kept first; `searched` and `dense` say
    how h was learned. `average` has one node where nothing is integrated; `taken_back` are the nats
    of its evidence that single models did not confirm; `used` is "integrate" or "mode".
    """

    points: list[Run]
    h: np.ndarray
    searched: str
    dense: bool
    average: Average
    taken_back: float
    used: str


def fit_plan(plan, monitor):
    """Learn what is free, run the starts, then integrate; the monitor watches the run kept."""
    problem, settings, h = plan.problem, plan.settings, plan.space.value
    rough = problem.rough()
    sites = None if plan.warm is None else plan.warm[1]
    searched, dense, asked = "none", False, False
    if plan.space.free.any():
        starts, seed = plan.noise_starts, plan.evidence_seed
        with monitor.phase("learning") as told:
            search = EvidenceSearch(
                rough,
                plan.space,
                starts,
                settings,
                plan.prior,
                seed,
                told,
                plan.integrates,
            )
            learned = search.learn(plan.warm)
        place, searched, dense = learned.place, learned.searched, learned.dense
        h, sites, asked = place.h, place.state.sites, search.asked
        problem = problem.with_parameters(h)
    points = _points(plan, problem, sites, monitor)
    runs = NodeRuns(
        rough,
        plan.units,
        NodeCoordinates(plan.space),
        plan.prior,
        settings,
        plan.evidence_seed,
    )
    if not plan.integrates or asked or points[0].reason == "asked":
        mode = runs.node(h, points[0].state)
        alone = Average([mode], np.ones(1), mode.log_evidence)
        return SpikeSlabFit(points, h, searched, dense, alone, 0.0, "mode")
    average, taken_back = integrated(runs, h, points[0].state, plan.n_jobs, monitor)
    return SpikeSlabFit(points, h, searched, dense, average, taken_back, "integrate")


def _points(plan, problem, sites, monitor):
    """Runs of the starts at final hyperparameters, the best one again for the monitor."""
    settings, seeds, trace = plan.settings, plan.start_seeds, Trace(monitor)
    if len(seeds) > 1:
        runs = explore(problem, settings, seeds, sites=sites, n_jobs=plan.n_jobs)
        k = max(range(len(runs)), key=lambda k: (runs[k].converged, runs[k].log_evidence))
        best = run_start(problem, settings, k, seeds[k], sites=sites, monitor=trace)
        return [best, *distinct(runs, problem.factor.slab_variance)[1:]]
    best = run_start(problem, settings, 0, seeds[0], sites=sites, monitor=trace)
    cut_short = trace.asked or settings.max_iter <= SHORT
    if sites is None and not (best.converged or cut_short) and settings.algorithm == "auto":
        second = run(problem, settings, start="descent")
        if second.converged or second.log_evidence > best.log_evidence:
            best = second
    return [best]
