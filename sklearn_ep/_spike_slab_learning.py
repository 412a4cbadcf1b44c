"""Evidence maximisation for noise, slab variance and inclusion of the spike-and-slab regressor.

A few steps of EM from each noise start, cheap and coarse, tell the starts apart. From the best one
a quasi-Newton search maximises the evidence, the sites being brought to their fixed point at each
evaluation by the monotone descent. Its variables are scaled by the curvature that EM sees, which is
what EM would divide by; the search removes what makes EM slow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from ._engine.descent import descend
from ._engine.energy import regular_ep
from ._engine.gaussian import ImproperPosterior
from ._spike_slab_runs import annealed, prior_sites, proper_state

__all__ = ["LearningPath", "Space", "learn"]

FIRST_SWEEPS = 8  # of EP before the first step of EM: led by unsettled sites it goes astray
COARSE_SWEEPS = 60  # of EP from each start, at most
EM_EVERY = 3  # sweeps
PATIENCE = 3  # sweeps without a lower energy that end them
COARSE_TOL = 0.05  # change of a hyperparameter that ends them
MONOTONE_STEPS = 30
REACH = 1.5  # of the quasi-Newton search, in logs
EP_SWEEPS = 3
EP_STEPS = 100  # EM steps where only EP is allowed
EP_TOL = 1e-3  # largest change of a hyperparameter (logs, logit) that ends them
INNER_ITER = 30  # descent steps of one evaluation; it starts next to its fixed point
INNER_TOL = 1e-5
INNER_GAIN = 2e-4  # nats: less is not worth a sweep before the hyperparameters are known
NOISE_FLOOR = 1e-6  # of the variance of y: the evidence of d > n may rise towards interpolation
SLAB_RANGE = (1e-6, 1e3)  # of var(y) / mean square of X
SEARCH_ALL = 20_000  # entries of X up to which a search from every start is cheap
EVIDENCE_ERROR = 3.0  # nats; interpolation with little noise is overrated by as much
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
        p = min(0.5, max(1.0 / d, min(0.1 * total, 10.0) / d))
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
        """Energy at this place."""
        return self.state.energy


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
    share = indicators / p.factor.n_indicators(len(state.mean))
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


def _em(problem, space, place, settings, limit):
    """EM steps, each after a sweep of EP; return the place of least energy.

    Ends when the hyperparameters settle, when EP leads uphill for `PATIENCE` sweeps (with many
    correlated columns parallel EP diverges), or when the energy is above `limit`.
    """
    h, sites, state = place.h, place.state.sites, None
    damping = min(settings.damping, 0.5)
    worse = 0
    for sweep in range(COARSE_SWEEPS):
        try:
            state = with_h(problem, h).at(sites, state)
        except ImproperPosterior:
            break
        worse = 0 if state.energy < place.energy else worse + 1
        if worse == 0:
            place = LearningPath(h, state)
        settling = sweep + 1 < FIRST_SWEEPS
        if worse >= PATIENCE or not (settling or place.energy < limit):
            break
        sites = sites + damping * (state.target - sites)
        if not settling and sweep % EM_EVERY == 0:
            new = space.moved(h, em_target(state))
            if np.abs(new - h).max() < COARSE_TOL and sweep > FIRST_SWEEPS:
                break
            h = new
    return place


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


def _coarse(problem, space, fraction, settings, limit):
    """Place reached from one noise start by a few steps of EM."""
    h = space.at_noise(fraction)
    start = with_h(problem, h)
    sites = prior_sites(start)
    if not space.free[0]:

        def sweep(p, x):
            return regular_ep(p, x, max_iter=3, tol=settings.tol, damping=0.5).x

        sites = annealed(start, sites, 0.3, sweep)
    place = LearningPath(h, start.at(sites))
    return _em(problem, space, place, settings, limit)


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
    """Quasi-Newton search from a place; return the best place seen."""
    free = space.free
    place = LearningPath(place.h, _settled(place.state))
    scale = np.sqrt(np.maximum(_curvature(place.state, place.h)[free], 1e-2))
    best = [place]

    def value(x):
        h = best[0].h.copy()
        h[free] = x / scale
        state = _settled(proper_state(with_h(problem, h), best[0].state.sites))
        if state.energy < best[0].energy:
            best[0] = LearningPath(h, state)
        return state.energy, gradient(state, h)[free] / scale

    start = np.clip(place.h, space.low, space.high)[free]
    # the fixed point is followed from near by: a far step may leave it for a worse one
    low = np.maximum(space.low[free], start - REACH) * scale
    high = np.minimum(space.high[free], start + REACH) * scale
    try:
        minimize(
            value, start * scale, jac=True, method="L-BFGS-B",
            bounds=list(zip(low, high, strict=True)),
            options={"gtol": GRADIENT_TOL, "ftol": 1e-11, "maxiter": 60, "maxfun": 120},
        )  # fmt: skip
    except ImproperPosterior:
        # no posterior can be had where the search wants to go: what was reached so far stands
        return best[0]
    return best[0]


def _settled(state):
    """State brought to its fixed point, as far as a few steps go."""
    out = descend(state, max_iter=INNER_ITER, tol=INNER_TOL, least_gain=INNER_GAIN)
    return out.evaluation.payload


def _best_of_all(problem, space, starts, settings):
    """Search from every start; a later one has to win by more than the error of the evidence."""
    best = None
    for fraction in starts:
        place = _coarse(problem, space, fraction, settings, np.inf)
        new = _search(problem, space, _monotone_em(problem, space, place))
        if best is None or new.energy < best.energy - EVIDENCE_ERROR:
            best = new
    return best


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
    place: Any = None
    if warm is not None:
        h = np.where(space.free, warm[0], space.value)
        place = LearningPath(h, proper_state(with_h(problem, h), warm[1]))
    else:
        starts = fractions if space.free[0] else fractions[:1]
        if problem.model.X.size <= SEARCH_ALL and settings.algorithm != "ep":
            return _best_of_all(problem, space, starts, settings)
        place = None
        for fraction in starts:
            limit = np.inf if place is None else place.energy + 20 + 0.2 * problem.n_rows
            new = _coarse(problem, space, fraction, settings, limit)
            place = new if place is None or new.energy < place.energy else place
    if settings.algorithm == "ep":
        return _ep_em(problem, space, place, settings)
    return _search(problem, space, _monotone_em(problem, space, place))
