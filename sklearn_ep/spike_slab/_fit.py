"""From the plan of a spike-and-slab fit to the run that is kept and the other fixed points."""

from typing import NamedTuple

from .._engine.loop import Trace
from ._learning import EvidenceSearch
from ._runs import SHORT, Run, distinct, explore, run, run_start

__all__ = ["SpikeSlabFit", "fit_plan"]


class SpikeSlabFit(NamedTuple):
    """Runs that ended at different fixed points, the one that is kept first.

    `searched` and `dense` say how the hyperparameters were learned.
    """

    points: list[Run]
    searched: str
    dense: bool


def fit_plan(plan, monitor):
    """Learn what is free, then run the starts; the monitor watches the run that is kept."""
    problem, settings = plan.problem, plan.settings
    sites, searched, dense = None if plan.warm is None else plan.warm[1], "none", False
    if plan.space.free.any():
        starts, seed = plan.noise_starts, plan.evidence_seed
        with monitor.phase("learning") as told:
            search = EvidenceSearch(problem, plan.space, starts, settings, seed, told)
            learned = search.learn(plan.warm)
        place, searched, dense = learned.place, learned.searched, learned.dense
        problem, sites = problem.with_parameters(place.h), place.state.sites
    return SpikeSlabFit(_points(plan, problem, sites, monitor), searched, dense)


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
