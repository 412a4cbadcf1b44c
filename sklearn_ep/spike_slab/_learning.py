"""Evidence maximisation for noise, slab variance and inclusion of the spike-and-slab regressor.

A few steps of EM from each noise start, cheap and coarse, tell the starts apart. From the best one
a quasi-Newton search maximises the evidence, the sites being brought to their fixed point at each
evaluation by the monotone descent. Its variables are scaled by the curvature that EM sees, which is
what EM would divide by; the search removes what makes EM slow.

The prior inclusion has a uniform prior and is learned as the mode of its logit, which is the rule
of succession, (sum of inclusions + 1) / (d + 2): the evidence alone is too sure where hardly a
feature is in.

With far more columns than rows a search may end where EP takes a few wide coefficients in doubt for
a Gaussian sum that explains y almost without noise. The evidence of EP is then too large by tens of
nats, and predictions are overconfident. So the evidence where a search ends is checked by single
models. What they do not confirm has to stand up to a search from a dense start, whose sum is
Gaussian. And a search that begins on confirmed ground ends where it would leave it and no longer
finds fixed points.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logit

from .._engine.gaussian import ImproperPosterior
from ._descent import descend
from ._energy import regular_ep
from ._model_evidence import leading_log_evidence, sampled_log_evidence
from ._runs import annealed, prior_sites, proper_state

__all__ = ["LearningPath", "Space", "learn"]

SWEEPS = 3  # of EP in a round, after which there is a step of EM
FIRST_ROUNDS = 3  # before the first step of EM: led by unsettled sites it goes astray
COARSE_ROUNDS = 20  # from each start, at most
SAME_MEAN = 0.1  # in slab standard deviations: the coefficients of two starts are the same
COARSE_TOL = 0.05  # change of a hyperparameter that ends them
MONOTONE_STEPS = 30
REACH = 0.5  # of one quasi-Newton search, in logs
SEARCHES = 6  # at most
EVALUATIONS = 20  # of each, at most
EP_SWEEPS = 3
EP_STEPS = 100  # EM steps where only EP is allowed
EP_TOL = 1e-3  # largest change of a hyperparameter (logs, logit) that ends them
INNER_ITER = 10  # descent steps of one evaluation; it starts next to its fixed point
INNER_TOL = 3e-5
LOST = 10  # evaluations without a fixed point, if nearly all, that end a search
INNER_GAIN = 1e-3  # nats: less is not worth a sweep before the hyperparameters are known
NOISE_FLOOR = 1e-6  # of the variance of y: the evidence of d > n may rise towards interpolation
SLAB_RANGE = (1e-6, 1e3)  # of var(y) / mean square of X
SEARCH_ALL = 20_000  # entries of X up to which a search from every start is cheap
EVIDENCE_ERROR = 3.0  # nats; interpolation with little noise is overrated by as much
DENSE = 0.5  # prior inclusion of the dense start
GRADIENT_TOL = 3e-3  # in standard errors of the hyperparameters


@dataclass
class Space:
    """Which of (log noise, log slab, logit inclusion) are free, their values and bounds."""

    value: np.ndarray
    free: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, model, total, noise=None, slab=None, inclusion=None):
        """Return the space of a problem whose y has variance one; None marks a free parameter."""
        d = model.X.shape[1]
        size = model.mean_square(total) or 1.0
        p = inclusion or min(0.5, max(1.0 / d, min(0.1 * total, 10.0) / d))
        edge = 0.1 / d if d > 1 else 0.01
        given = [noise, slab, None if inclusion is None else inclusion / (1 - inclusion)]
        start = [0.1, 1.0 / (p * d * size), p / (1 - p)]
        value = np.log([b if a is None else a for a, b in zip(given, start, strict=True)])
        low = [np.log(NOISE_FLOOR), np.log(SLAB_RANGE[0] / size), logit(edge)]
        high = [np.log(2.0), np.log(SLAB_RANGE[1] / size), logit(1 - edge)]
        free = np.array([a is None for a in given])
        return cls(value, free, np.array(low), np.array(high))

    def at_noise(self, fraction):
        """Return the start whose noise is this share of the variance of y."""
        h = self.value.copy()
        if self.free[0]:
            h[0] = np.log(fraction)
            if self.free[1]:
                h[1] += np.log1p(-fraction)
        return h

    def dense(self):
        """Return the space whose start expects the same signal from half of all features."""
        h = self.value.copy()
        h[2] = logit(DENSE)
        if self.free[1]:
            h[1] += log_expit(self.value[2]) - np.log(DENSE)
        return replace(self, value=h)

    def moved(self, h, target):
        """Take the free entries of the target, within their bounds."""
        return np.where(self.free, np.clip(target, self.low, self.high), h)


@dataclass
class LearningPath:
    """A place of the search: hyperparameters with the state that belongs to them."""

    h: np.ndarray
    state: Any

    @property
    def energy(self):
        """Energy less the log density of the inclusion's logit under a uniform prior."""
        return self.state.energy - float(log_expit(self.h[2]) + log_expit(-self.h[2]))

    @cached_property
    def sure_energy(self):
        """Energy with the evidence that single models confirm, within `EVIDENCE_ERROR`."""
        evidence = sampled_log_evidence(self.state)
        if evidence < -self.state.energy - EVIDENCE_ERROR:
            evidence = max(evidence, leading_log_evidence(self.state))
        return self.energy - self.state.energy - evidence

    @property
    def confirmed(self):
        """Whether single models confirm the evidence."""
        return self.sure_energy < self.energy + EVIDENCE_ERROR


class _Astray(Exception):
    """A search has left the fixed points and the evidence that is confirmed."""


def with_h(problem, h):
    """Return the problem at hyperparameters (log noise, log slab, logit inclusion)."""
    return problem.with_parameters(np.exp(h[0]), np.exp(h[1]), h[2])


def _statistics(state):
    """Expected squared error, squared slab coefficients, included features and indicators."""
    q, factor, t = state.marginals, state.problem.factor, state.matched_tilted
    # one indicator a group: its members agree, so each counts its share
    share = factor.per_indicator(t.inclusion).sum()
    second = t.inclusion @ (t.slab_var + t.slab_mean**2)
    return q.squared_error + q.trace, second, t.inclusion.sum(), share


def gradient(state, h):
    """Derivative of the energy in (log noise, log slab, logit inclusion) at a fixed point."""
    squares, second, features, indicators = _statistics(state)
    p = state.problem
    return np.array(
        [
            0.5 * (p.n_rows - squares / p.noise),
            0.5 * (features - second / p.factor.slab_variance),
            p.factor.n_indicators(len(state.mean)) * expit(h[2]) - indicators,
        ]
    )


def em_target(state):
    """Maximiser of the expected log density of data and coefficients at a state."""
    squares, second, features, indicators = _statistics(state)
    p = state.problem
    share = (indicators + 1.0) / (p.factor.n_indicators(len(state.mean)) + 2.0)
    tiny = np.finfo(float).tiny
    return np.array(
        [
            np.log(max(squares / max(p.n_rows, tiny), tiny)),
            np.log(max(second, tiny) / max(features, tiny)),
            logit(np.clip(share, tiny, 1 - 1e-16)),
        ]
    )


def _curvature(state, h):
    """What EM divides the gradient by: the information of the completed data."""
    features = state.matched.inclusion.sum()
    p = expit(h[2])
    m = state.problem.factor.n_indicators(len(state.mean))
    return np.array([0.5 * state.problem.n_rows, 0.5 * features, m * p * (1 - p)])


def _em(problem, space, place, settings, limit, known):
    """EM steps, each after a round of EP sweeps; return the place of least energy.

    Ends when the hyperparameters settle, when a round leads uphill (with many correlated columns
    parallel EP diverges), when the energy is above `limit`, or when the means are those of the
    `known` place. Energy and statistics are only had where a round ends: they cost half a sweep.
    """
    h, sites, state = place.h, place.state.sites, place.state
    damping = min(settings.damping, 0.5)
    for turn in range(COARSE_ROUNDS):
        here = with_h(problem, h)
        try:
            for _ in range(SWEEPS - 1):
                sites = sites + damping * (here.at(sites).target - sites)
            state = here.at(sites, state)
            sites = sites + damping * (state.target - sites)
        except ImproperPosterior:
            break
        new = LearningPath(h, state)
        if not new.energy < place.energy:
            break
        place = new
        if turn + 1 < FIRST_ROUNDS:
            continue
        if place.energy > limit or _same_mean(place, known):
            break
        h = space.moved(h, em_target(state))
        if np.abs(h - place.h).max() < COARSE_TOL:
            break
    return place


def _same_mean(place, known):
    """Whether the coefficients are those of a place where an earlier start ended."""
    if known is None:
        return False
    scale = np.exp(0.5 * max(place.h[1], known.h[1]))
    return np.abs(place.state.mean - known.state.mean).max() < SAME_MEAN * scale


def _ep_em(problem, space, place, settings):
    """EM by regular EP alone, a few sweeps a step, until the hyperparameters stand still."""
    h, sites = place.h, np.maximum(place.state.sites, [[-np.inf], [1e-8 / np.exp(place.h[1])]])
    for _ in range(EP_STEPS):
        try:
            out = regular_ep(
                with_h(problem, h), sites, max_iter=EP_SWEEPS, tol=settings.tol,
                damping=min(settings.damping, 0.5),
            )  # fmt: skip
        except ImproperPosterior:
            break
        place, sites = LearningPath(h, out.evaluation.payload), out.x
        h = space.moved(h, em_target(place.state))
        if np.abs(h - place.h).max() < EP_TOL:
            break
    return place


def _coarse(problem, space, fraction, settings, limit=np.inf, known=None):
    """Place reached from one noise start by a few steps of EM."""
    h = space.at_noise(fraction)
    start = with_h(problem, h)
    sites = prior_sites(start)
    if not space.free[0]:

        def sweep(p, x):
            return regular_ep(p, x, max_iter=3, tol=settings.tol, damping=0.5).x

        sites = annealed(start, sites, 0.3, sweep)
    place = LearningPath(h, start.at(sites))
    return _em(problem, space, place, settings, limit, known)


def _monotone_em(problem, space, place):
    """EM steps after descent steps: the energy falls in both. Leads into reach of the search."""
    for _ in range(MONOTONE_STEPS):
        state = descend(place.state, max_iter=2, tol=INNER_TOL).evaluation.payload
        h = space.moved(place.h, em_target(state))
        change = np.abs(h - place.h).max()
        place = LearningPath(h, proper_state(with_h(problem, h), state.sites))
        if change < COARSE_TOL:
            break
    return place


def _search(problem, space, place):
    """Quasi-Newton searches, each within reach of the last one's best; return the best place."""
    best = LearningPath(place.h, _settled(place.state)[0])
    for _ in range(SEARCHES):
        centre = np.clip(best.h, space.low, space.high)
        try:
            best = _search_near(problem, space, best, centre)
        except _Astray:
            break
        if np.abs(best.h - centre).max() < 0.99 * REACH:
            break
    return best


def _search_near(problem, space, place, centre):
    """Quasi-Newton search in a box: a far step may leave the fixed point for a worse one.

    Where the energy falls towards evidence that is not confirmed, sites often do not settle, and
    each evaluation is dear. A search that begins on confirmed ground does not follow it there.
    """
    free = space.free
    scale = np.sqrt(np.maximum(_curvature(place.state, place.h)[free], 1e-2))
    best, settled = [place], []

    def value(x):
        h = place.h.copy()
        h[free] = x / scale
        state, at_rest = _settled(proper_state(with_h(problem, h), best[0].state.sites))
        new = LearningPath(h, state)
        if new.energy < best[0].energy:
            best[0] = new
        settled.append(at_rest)
        lost = len(settled) - sum(settled)
        if lost > max(LOST, 0.75 * len(settled)) and place.confirmed and not best[0].confirmed:
            raise _Astray
        slope = gradient(state, h) + [0.0, 0.0, 2 * expit(h[2]) - 1]
        return new.energy, slope[free] / scale

    low = np.maximum(space.low, centre - REACH)[free] * scale
    high = np.minimum(space.high, centre + REACH)[free] * scale
    try:
        minimize(
            value, centre[free] * scale, jac=True, method="L-BFGS-B",
            bounds=list(zip(low, high, strict=True)),
            options={"gtol": GRADIENT_TOL, "ftol": 1e-11, "maxfun": EVALUATIONS},
        )  # fmt: skip
    except ImproperPosterior:
        # no posterior can be had where the search wants to go: what was reached so far stands
        return best[0]
    return best[0]


def _settled(state):
    """State led to its fixed point as far as a few steps go, and whether they were enough."""
    out = descend(state, max_iter=INNER_ITER, tol=INNER_TOL, least_gain=INNER_GAIN)
    return out.evaluation.payload, out.converged or out.n_iter < INNER_ITER


def _refined(problem, space, place, settings):
    """Maximum of the evidence near the place where coarse steps ended."""
    if settings.algorithm == "ep":
        return _ep_em(problem, space, place, settings)
    return _search(problem, space, _monotone_em(problem, space, place))


def _best_of_all(problem, space, starts, settings):
    """Search from every start; a later one has to win by more than the error of the evidence."""
    best = None
    for fraction in starts:
        new = _refined(problem, space, _coarse(problem, space, fraction, settings), settings)
        if best is None or new.energy < best.energy - EVIDENCE_ERROR:
            best = new
    return best


def _from_starts(problem, space, starts, settings):
    """Maximum reached from the best of the noise starts, all searched where that is cheap."""
    if problem.model.X.size <= SEARCH_ALL and settings.algorithm != "ep":
        return _best_of_all(problem, space, starts, settings)
    place: Any = None
    for fraction in starts:
        limit = np.inf if place is None else place.energy + 20 + 0.2 * problem.n_rows
        new = _coarse(problem, space, fraction, settings, limit, place)
        place = new if place is None or new.energy < place.energy else place
    return _refined(problem, space, place, settings)


def _confirmed(problem, space, place, starts, settings):
    """Return the place if its evidence is confirmed, or a dense one that is surely better."""
    if place.confirmed:
        return place
    dense = _from_starts(problem, space.dense(), starts, settings)
    return dense if dense.sure_energy < place.sure_energy - EVIDENCE_ERROR else place


def learn(problem, space, fractions, settings, warm=None):
    """Maximise the evidence over the free hyperparameters.

    Parameters
    ----------
    problem : EPEnergy
        Any hyperparameters; y has variance one.
    space : Space
        What is free.
    fractions : sequence of float
        Noise starts, as shares of the variance of y; one is enough where the noise is given.
    settings : RunSettings
        With algorithm "ep" the search is by EM alone.
    warm : tuple (h, sites), default=None
        Start from here instead.

    Returns
    -------
    LearningPath
        Hyperparameters and state of the largest evidence found.
    """
    starts = fractions if space.free[0] else fractions[:1]
    if warm is not None:
        h = np.where(space.free, warm[0], space.value)
        place = LearningPath(h, proper_state(with_h(problem, h), warm[1]))
        place = _refined(problem, space, place, settings)
    else:
        place = _from_starts(problem, space, starts, settings)
    if not space.free[2]:
        return place
    return _confirmed(problem, space, place, starts, settings)
