"""Runs of the spike-and-slab regressor at given hyperparameters: phases, starts, fixed points."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils.parallel import Parallel, delayed

from .._engine.gaussian import ImproperPosterior
from ._descent import Descent, descend
from ._double_loop import double_loop
from ._energy import regular_ep

__all__ = [
    "WORTH_RETRYING",
    "Run",
    "RunSettings",
    "Watch",
    "annealed",
    "distinct",
    "explore",
    "prior_sites",
    "proper_state",
    "run",
    "run_start",
]

LEVELS = 8  # noise levels of the annealed start
SWEEPS = 3  # sweeps of EP at each
TAIL = 20  # sweeps of EP at the noise level itself before the descent takes over
WORTH_RETRYING = 50  # runs with fewer iterations were cut short, not stuck


@dataclass
class RunSettings:
    """What a run is told by the user."""

    algorithm: str
    damping: float
    max_iter: int
    tol: float


@dataclass
class Run:
    """Outcome of a run; `state` is where it ended, `used` the algorithm that ended it."""

    state: Any
    history: dict[str, np.ndarray]
    converged: bool
    used: str

    @property
    def log_evidence(self):
        """EP approximation of log p(y)."""
        return -self.state.energy


class Watch:
    """Monitor of several phases: keeps one history and remembers a request to stop."""

    def __init__(self, monitor=None):
        self.monitor = monitor
        self.stopped = False
        self.records: list[dict[str, float]] = []

    def begin(self):
        """Tell that an iteration starts."""
        if self.monitor is not None:
            self.monitor.begin()

    def end(self, record, payload):
        """Tell that an iteration ended."""
        self.records.append(record)
        if self.monitor is not None:
            self.stopped = bool(self.monitor.end(record, payload))
        return self.stopped

    def history(self):
        """Return the history of all phases."""
        return {k: np.array([r[k] for r in self.records]) for k in ("residual", "objective")}


def prior_sites(problem):
    """Sites that turn the likelihood into EP's first guess: the prior's own moments."""
    factor, d = problem.factor, problem.model.X.shape[1]
    on = 1.0 / (1.0 + np.exp(-factor.logit))
    return np.stack([np.zeros(d), np.full(d, 1.0 / (on * factor.slab_variance))])


def annealed(problem, sites, highest, sweep):
    """Lead sites from the noise variance `highest` down to that of the problem, geometrically.

    `sweep(problem, sites)` returns the sites of the next level, or None to stop early.
    """
    if problem.noise >= highest:
        return sites
    for noise in np.geomspace(highest, problem.noise, LEVELS + 1)[:-1]:
        new = sweep(replace(problem, noise=noise), sites)
        if new is None:
            break
        sites = new
    return sites


def _ep_sweeps(settings, watch, budget):
    """Level of the annealing by EP; spends at most a quarter of the iterations."""

    def sweep(problem, sites):
        if watch.stopped or len(watch.records) + SWEEPS > budget:
            return None
        return regular_ep(
            problem, sites, max_iter=SWEEPS, tol=settings.tol, damping=settings.damping,
            monitor=watch,
        ).x  # fmt: skip

    return sweep


def _descent_steps(watch):
    """Level of the annealing by two steps down the energy of each level."""

    def sweep(problem, sites):
        state, descent = problem.at(sites), Descent()
        for _ in range(2):
            if watch.stopped:
                return None
            watch.begin()
            record = state.record
            state, _ = descent.step(state)
            watch.end(record, state)
        return state.sites

    return sweep


def proper_state(problem, sites):
    """State at the sites, or with negative ones lifted where they leave no posterior."""
    try:
        return problem.at(sites)
    except ImproperPosterior:
        least = 1e-3 / problem.factor.slab_variance
        return problem.at(np.stack([sites[0], np.maximum(sites[1], least)]))


def run(problem, settings, *, sites=None, highest=0.3, start="annealed", watch=None):
    """Run one algorithm at fixed hyperparameters.

    Parameters
    ----------
    problem : EPEnergy
    settings : RunSettings
    sites : ndarray of shape (2, d), default=None
        Warm start; it is not annealed. None starts at the prior.
    highest : float, default=0.3
        Noise variance at which the annealing begins.
    start : {"annealed", "descent", "plain"}
        Annealing by EP, by descent, or none; only "auto" anneals.
    watch : Watch, default=None

    Returns
    -------
    Run
    """
    watch = Watch() if watch is None else watch
    cold = sites is None
    sites = prior_sites(problem) if cold else sites
    budget = settings.max_iter
    if settings.algorithm == "ep":
        sites = np.maximum(sites, [[-np.inf], [1e-3 / problem.factor.slab_variance]])
        out = regular_ep(
            problem, sites, max_iter=budget, tol=settings.tol, damping=settings.damping,
            monitor=watch,
        )  # fmt: skip
        return Run(out.evaluation.payload, watch.history(), out.converged, "ep")
    if settings.algorithm == "double_loop":
        state = proper_state(problem, sites)
        out = double_loop(state, max_iter=budget, tol=settings.tol, monitor=watch)
        return Run(out.evaluation.payload, watch.history(), out.converged, "double_loop")
    if settings.algorithm == "auto" and cold:
        sites, done = _approach(problem, settings, sites, highest, start, watch)
        if done is not None:
            return done
    left = budget - len(watch.records)
    out = descend(proper_state(problem, sites), max_iter=left, tol=settings.tol, monitor=watch)
    return Run(out.evaluation.payload, watch.history(), out.converged, "convergent")


def _approach(problem, settings, sites, highest, start, watch):
    """Annealing and a few sweeps of EP; return (sites, Run or None)."""
    if start == "annealed":
        budget = settings.max_iter // 4
        sites = annealed(problem, sites, highest, _ep_sweeps(settings, watch, budget))
    elif start == "descent" and 4 * LEVELS < settings.max_iter:
        sites = annealed(problem, sites, highest, _descent_steps(watch))
    left = settings.max_iter - len(watch.records)
    if start == "descent" or watch.stopped:
        if not watch.stopped:
            return sites, None
        return sites, Run(proper_state(problem, sites), watch.history(), False, "ep")
    tail = left if left < TAIL else TAIL
    out = regular_ep(
        problem, sites, max_iter=tail, tol=settings.tol, damping=settings.damping, monitor=watch
    )
    if out.converged or watch.stopped or tail == left:
        return out.x, Run(out.evaluation.payload, watch.history(), out.converged, "ep")
    return out.x, None


def _sparse_guess(problem, rng):
    """Sites of a random sparse guess: some coefficients nearly free, the others near zero."""
    factor, d = problem.factor, problem.model.X.shape[1]
    on = 1.0 / (1.0 + np.exp(-factor.logit))
    free = rng.random(d) < max(on, 1.0 / d)
    precision = np.where(free, 0.3, rng.uniform(1.0, 60.0) / on) / factor.slab_variance
    return np.stack([rng.standard_normal(d) * np.sqrt(precision) * free, precision])


def _other_sites(problem, settings, k, seed):
    """Sites of the k-th further start: in turn EP from a guess, annealed EP, a guess alone."""
    rng = np.random.default_rng(seed)
    sites = _sparse_guess(problem, rng)
    if k % 3 == 2:
        return sites
    if k % 3 == 1:
        highest = np.exp(rng.uniform(np.log(0.05), np.log(2.0)))
        sweep = _ep_sweeps(settings, Watch(), np.inf)
        sites = annealed(problem, prior_sites(problem), highest, sweep)
    return regular_ep(problem, sites, max_iter=30, tol=settings.tol, damping=settings.damping).x


def run_start(problem, settings, k, seed, *, sites=None, watch=None):
    """Run the k-th start: warm sites if any, the annealed ones, the plain one, random sites."""
    if sites is not None:
        if k == 0:
            return run(problem, settings, sites=sites, watch=watch)
        k -= 1
    kinds = ["annealed", "descent", "plain"] if settings.algorithm == "auto" else ["plain"]
    if k < len(kinds):
        return run(problem, settings, start=kinds[k], watch=watch)
    sites = _other_sites(problem, settings, k - len(kinds), seed)
    return run(problem, settings, sites=sites, watch=watch)


def explore(problem, settings, n_init, seeds, *, sites=None, n_jobs=None):
    """Run several starts; return the list of runs, in the order of the starts.

    Warm `sites` make up the first start. Each start is a task for joblib.
    """
    return Parallel(n_jobs=n_jobs)(
        delayed(run_start)(problem, settings, k, seeds[k], sites=sites) for k in range(n_init)
    )


def distinct(runs, slab_variance):
    """Return the runs that ended at different fixed points, the largest evidence first."""
    kept: list[Run] = []
    for r in sorted(runs, key=lambda r: (not r.converged, -r.log_evidence)):
        far = [
            np.abs(r.state.mean - o.state.mean).max() > 1e-2 * np.sqrt(slab_variance)
            or abs(r.log_evidence - o.log_evidence) > 1e-2
            for o in kept
        ]
        if all(far):
            kept.append(r)
    return kept
