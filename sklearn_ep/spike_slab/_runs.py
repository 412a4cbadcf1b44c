"""Runs of the spike-and-slab regressor at given hyperparameters: phases, starts, fixed points."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from .._engine.gaussian import ImproperPosterior
from .._engine.loop import SILENT, Reason, Trace
from .._engine.partition import Workers
from ._double_loop import double_loop
from ._energy import descend, regular_ep, signed_sites, tilted_at

# Halved and doubled by doc/benchmarks/spike_slab_constants.py on 20 sets of the published protocol:
# mean nats of evidence, and sweeps as a ratio.

# Share of the variance of y where annealing begins. No change where the signal is clear.
FIRST_NOISE = 0.3
# Noise levels of the annealed start. Halved: none, .70. Doubled: -.56 (one set), 1.6.
LEVELS = 8
# Sweeps of EP at each, and in a round of learning. Halved: none, .92. Doubled: -.57 (one), 1.4.
SWEEPS = 3
SHORT = 4 * LEVELS  # iterations: a run of no more was cut short by the user, and is not annealed
# Sweeps of EP at the noise level itself before the descent takes over. Halved: none, .90. Doubled:
# -.37 (one set), 1.1.
TAIL = 20
LEAST_SITE = 1e-3  # in slab precisions: next to flat, warm sites are lifted to it to be positive


class RunSettings(NamedTuple):
    """Parameters of the estimator that say how runs go, by their names."""

    algorithm: str
    damping: float
    max_iter: int
    tol: float
    noise_starts: Any
    n_jobs: int


@dataclass
class Run:
    """Outcome of a run; `state` is where it ended, `used` the algorithm that ended it."""

    state: Any
    history: dict[str, np.ndarray]
    reason: Reason
    used: str

    @property
    def converged(self):
        """Whether the residual fell below the tolerance."""
        return self.reason == "converged"

    @property
    def log_evidence(self):
        """EP approximation of log p(y)."""
        return -self.state.energy


def ep_sweeps(settings):
    """Return how a sweep of EP goes, as arguments of `regular_ep`."""
    return dict(damping=settings.damping, in_turn=settings.algorithm == "sequential")


def prior_sites(problem):
    """Sites that turn the likelihood into EP's first guess: the prior's own moments."""
    d = problem.model.X.shape[1]
    return np.stack([np.zeros(d), np.full(d, problem.factor.precision)])


def annealed(problem, sites, level, highest=FIRST_NOISE, trace=None, most=np.inf):
    """Lead sites from the noise variance `highest` down to that of the problem, geometrically.

    `level(problem, sites)` returns the sites of the next level. With a trace it ends early: once
    that was asked, or where the next level might take more iterations than `most`.
    """
    if problem.noise >= highest:
        return sites
    for noise in np.geomspace(highest, problem.noise, LEVELS + 1)[:-1]:
        if trace is not None and (trace.asked or trace.n_iter + SWEEPS > most):
            break
        sites = level(replace(problem, noise=noise), sites)
    return sites


def _lifted(problem, sites):
    """Sites whose precisions are positive, the lowest ones raised."""
    return np.maximum(sites, [[-np.inf], [LEAST_SITE / problem.factor.slab_variance]])


def proper_state(problem, sites):
    """State at the sites, or with negative ones lifted where they leave no posterior."""
    try:
        return problem.at(sites)
    except ImproperPosterior:
        return problem.at(_lifted(problem, sites))


def run(problem, settings, *, sites=None, start="annealed", monitor=SILENT):
    """Run one algorithm at fixed hyperparameters and return the `Run`.

    Warm `sites` are not annealed; None starts at the prior. `start` is "annealed" (by EP),
    "descent" (annealed by descent) or "plain"; only the algorithm "auto" anneals.
    """
    trace, cold = Trace(monitor), sites is None
    sites = prior_sites(problem) if cold else sites
    limits = dict(max_iter=settings.max_iter, tol=settings.tol, monitor=trace)
    if settings.algorithm == "double_loop":
        return _outcome(double_loop(proper_state(problem, sites), **limits), trace, "double_loop")
    if settings.algorithm in ("ep", "sequential"):
        out = regular_ep(problem, _lifted(problem, sites), **ep_sweeps(settings), **limits)
        return _outcome(out, trace, settings.algorithm)
    if settings.algorithm == "auto" and cold:
        sites = _anneal(problem, settings, sites, start, trace)
        if trace.asked:
            return Run(proper_state(problem, sites), trace.history, "asked", "ep")
        if start != "descent":
            left = settings.max_iter - trace.n_iter
            limits["max_iter"] = min(left, TAIL)
            out = regular_ep(problem, sites, **ep_sweeps(settings), **limits)
            if out.converged or trace.asked or left <= TAIL:
                return _outcome(out, trace, "ep")
            sites = out.x
        limits["max_iter"] = settings.max_iter - trace.n_iter
    return _outcome(descend(proper_state(problem, sites), **limits), trace, "convergent")


def _outcome(result, trace, used):
    return Run(result.evaluation.payload, trace.history, result.reason, used)


def _anneal(problem, settings, sites, start, trace):
    """Lead sites down the noise levels by EP or by descent."""
    if start == "annealed":
        # the annealing spends at most a quarter of the iterations
        limits = dict(trace=trace, most=settings.max_iter // 4)
        return annealed(problem, sites, ep_level(settings, trace), **limits)
    if start == "descent" and settings.max_iter > SHORT:
        few = dict(max_iter=2, tol=0.0, monitor=trace)  # steps at each level
        return annealed(problem, sites, lambda p, s: descend(p.at(s), **few).x, trace=trace)
    return sites


def ep_level(settings, trace=None):
    """Level of the annealing by a few sweeps of EP."""
    watch = dict(monitor=SILENT if trace is None else trace, energies=trace is not None)
    limits = dict(max_iter=SWEEPS, tol=settings.tol, **watch, **ep_sweeps(settings))
    return lambda problem, sites: regular_ep(problem, sites, **limits).x


def _other_sites(problem, settings, k, seed):
    """Sites of the k-th further start: in turn EP from a guess, annealed EP, a guess alone.

    A guess is random and sparse: some coefficients are nearly free, the others near zero.
    """
    rng, factor, d = np.random.default_rng(seed), problem.factor, problem.model.X.shape[1]
    on = expit(factor.logit)
    free = rng.random(d) < max(on, 1.0 / d)
    precision = np.where(free, 0.3, rng.uniform(1.0, 60.0) / on) / factor.slab_variance
    sites = np.stack([rng.standard_normal(d) * np.sqrt(precision) * free, precision])
    if k % 3 == 2:
        return sites
    if k % 3 == 1:
        highest = np.exp(rng.uniform(np.log(0.05), np.log(2.0)))
        sites = annealed(problem, prior_sites(problem), ep_level(settings), highest)
    limits = dict(max_iter=TAIL, tol=settings.tol, energies=False)
    return regular_ep(problem, sites, **limits, **ep_sweeps(settings)).x


def run_start(problem, settings, k, seed, *, sites=None, monitor=SILENT):
    """Run the k-th start: warm sites if any, the annealed ones, the plain one, random sites."""
    if sites is not None:
        if k == 0:
            return run(problem, settings, sites=sites, monitor=monitor)
        k -= 1
    kinds = ["annealed", "descent", "plain"] if settings.algorithm == "auto" else ["plain"]
    if k < len(kinds):
        return run(problem, settings, start=kinds[k], monitor=monitor)
    sites = _other_sites(problem, settings, k - len(kinds), seed)
    return run(problem, settings, sites=sites, monitor=monitor)


def explore(problem, settings, seeds, *, sites=None):
    """Run one start a seed, each a task for joblib; return the runs in the order of the starts."""
    begin = partial(run_start, sites=sites)
    tasks = [(begin, problem, settings, k, seed) for k, seed in enumerate(seeds)]
    return Workers(settings.n_jobs)(tasks)


def distinct(runs, slab_variance):
    """Return the runs that ended at different fixed points, the largest evidence first.

    They differ in evidence by a hundredth of a nat or in a mean by as much of a slab deviation.
    """
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


# ------------------------------------------------------------------------- next to a neighbour


class _NextTo(NamedTuple):
    """How the fixed point is found from the sites at other hyperparameters: first by sweeps.

    The descent goes on where the least residual of these is above `settled`. It begins at the
    neighbour's sites where they never came nearer than `lost`, and ends at a residual of
    `descent_tol`, or where three steps in a row gain less than `gain` nats of evidence. A node that
    gains more to the end does not count. Without the descent: -.35 nats a set of 32, .84 of the
    CPU. Without weaker sites: as good on 28, worse on 4, 1.25.
    """

    sweeps: int = 12
    tol: float = 1e-3  # at 5e-4 a tenth more posteriors, and the nodes err as much
    away: float = 3.0  # times the least residual: sweeps that lead there end
    settled: float = 5e-3
    damping: float = 0.8
    weaker: tuple = (1.0, 0.6, 0.3)  # shares tried of negative sites, which may leave no posterior
    lost: float = 0.3
    descent_tol: float = 1e-3
    gain: float = 0.01
    steps: int = 20
    block: int = 20


_NEXT = _NextTo()


class Nearest(Trace):
    """The book-keeping of runs that may leave a state again: keeps the one of least residual.

    It stops a run whose residual is more than `away` times that.
    """

    def __init__(self, monitor=SILENT, away=np.inf):
        super().__init__(monitor)
        self.residual, self.state, self.away = np.inf, None, away

    def end(self, record, payload=None):
        """Keep the figures, and the state where it is nearer to rest than those before."""
        if record["residual"] < self.residual:
            self.residual, self.state = record["residual"], payload
        return super().end(record, payload) or record["residual"] > self.away * self.residual


def settled_near(problem, near):
    """Return the state at rest next to a neighbour's, None where there is none.

    By sweeps of EP or, where they lead away, by the descent.
    """
    sites, nearest = first_sites(problem, near), Nearest(away=_NEXT.away)
    sweeps = dict(max_iter=_NEXT.sweeps, tol=_NEXT.tol, damping=_NEXT.damping, monitor=nearest)
    for share in _NEXT.weaker:
        start = np.where(sites[1] < 0, share * sites, sites)
        with suppress(ImproperPosterior):
            regular_ep(problem, start, energies=False, signed=True, **sweeps)
        if nearest.state is not None:
            break
    if nearest.residual < _NEXT.settled:
        return nearest.state
    state = proper_state(problem, start) if nearest.residual > _NEXT.lost else nearest.state
    limits = dict(tol=_NEXT.descent_tol, max_block=_NEXT.block, least_gain=_NEXT.gain)
    out = descend(state, max_iter=_NEXT.steps, **limits)
    return None if out.reason == "max_iter" else out.evaluation.payload


def first_sites(problem, near):
    """Sites by which the prior of a problem answers the cavities of a neighbour.

    Cavities are what the data say, and follow the noise; the prior, which changes most from one
    node to the next, needs no posterior to be taken into account.
    """
    there = near.problem
    cavity = near.cavity * (there.noise / problem.noise)
    # in slab variances sites change least from one node to the next
    sites = near.sites * (there.factor.slab_variance / problem.factor.slab_variance)
    return signed_sites(problem.factor, tilted_at(problem.factor, cavity), cavity, sites)
