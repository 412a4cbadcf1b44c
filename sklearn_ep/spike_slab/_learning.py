"""Evidence maximisation for noise, slab variance and inclusion of the spike-and-slab regressor.

A few steps of EM from each noise start, cheap and coarse, tell the starts apart. From the best one
a quasi-Newton search maximises the evidence, the sites being brought to their fixed point at each
evaluation by the monotone descent. Its variables are scaled by the curvature that EM sees, which is
what EM would divide by; the search removes what makes EM slow.

Learning a mode, the prior inclusion has a uniform prior and is learned as the mode of its logit,
which is the rule of succession, (sum of inclusions + 1) / (d + 2): the evidence alone is too sure
where hardly a feature is in. Before integration the mode is that of the integrand.

With far more columns than rows a search may end where EP takes a few wide coefficients in doubt for
a Gaussian sum that explains y almost without noise. The evidence of EP is then too large by tens of
nats, and predictions are overconfident. So the evidence where a search ends is checked by single
models. What they do not confirm has to stand up to a search from a dense start, whose sum is
Gaussian. And a search that begins on confirmed ground ends where it would leave it and no longer
finds fixed points.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior
from .._engine.loop import Told, unheard
from ._chains import best_model
from ._energy import SMALLEST_SITE, descend, regular_ep
from ._hyperparameters import HyperPrior, Space, completed_curvature, em_target, energy_gradient
from ._model_evidence import EVIDENCE_ERROR, confirmed_log_evidence
from ._model_law import ModelLaw
from ._runs import SWEEPS, RunSettings, annealed, prior_sites, proper_state


class _Learning(NamedTuple):
    """Figures of learning.

    Each comes with what half and twice its value change, by doc/benchmarks/spike_slab_constants.py:
    nats of evidence a set, and sweeps as a ratio. Differences below .01 nats are none.
    """

    # Rounds before the first step of EM: led by unsettled sites it goes astray. Halved: none, .90.
    # Doubled: -2.1, one of 8 sets ending elsewhere, 1.2. One round: -.9 on 60 x 100 columns.
    first_rounds: int = 3
    # Coefficients of two starts are the same, in slab standard deviations; the second one then
    # ends. Halved or doubled: none. Never: none, 1.12 at 50 x 500.
    same_mean: float = 0.1
    # Nats a row by which a start may be behind the best so far. Halved or doubled: none, 1.0.
    # Without the limit: none, twice the CPU at 150 x 200 with noise.
    hopeless: float = 0.5
    # Change of a hyperparameter that ends coarse steps. Halved: none, .91. Doubled: none, .99.
    coarse_tol: float = 0.05
    # Largest damping of learning, the default of `damping`: undamped parallel EP oscillates.
    coarse_damping: float = 0.5
    # Reach of one quasi-Newton search, in logs, and searches at most. Halved: none, 1.07 and .86;
    # on twelve other sets -.5 for either one (two of 12, -3 at worst). Doubled: none, .99 and 1.15.
    reach: float = 0.5
    searches: int = 6
    # Evaluations of each at most; a search ends when half of them and three in four of those made
    # find no fixed point. Halved: none, .99. Doubled: none, 1.0.
    evaluations: int = 20
    # Change of a hyperparameter (logs, logit) that ends EM by EP alone. Halved: none, 1.04.
    # Doubled: none, .93.
    ep_tol: float = 1e-3
    # Descent steps of one evaluation, which starts next to its fixed point, and their tolerance.
    # Halved: none, 1.05 and 1.02. Doubled: none, 1.10 and .98.
    inner_iter: int = 10
    inner_tol: float = 3e-5
    # Nats that make a sweep worth while before the hyperparameters are known. Halved: none, 1.01.
    # Doubled: none, .99. Zero: 1.08.
    inner_gain: float = 1e-3
    # Entries of X up to which every start is searched. Halved: none. Doubled: +1.8 but -1.1 nats a
    # held-out row (two of 4 sets), 3.3.
    search_all: int = 20_000
    # Site precision of the columns of a single model, in slab precisions.
    free: float = 0.3
    # Gradient that ends a search, in standard errors of the hyperparameters. Halved: none, 1.02.
    # Doubled: none, .98.
    gradient_tol: float = 3e-3


_LEARNING = _Learning()


@dataclass
class Place:
    """Hyperparameters h with the state that belongs to them; `seed` draws its single models."""

    h: np.ndarray
    state: Any
    prior: HyperPrior
    seed: int

    @property
    def energy(self):
        """Energy less the log prior density of the hyperparameters."""
        return self.state.energy - self.prior.log_density(self.h)

    @cached_property
    def sure_energy(self):
        """Energy with the evidence that single models confirm, within `EVIDENCE_ERROR`."""
        return self.energy - self.state.energy - confirmed_log_evidence(self.state, self.seed)

    @property
    def trusted_energy(self):
        """Energy with no more evidence than single models confirm, and their error."""
        return max(self.energy, self.sure_energy - EVIDENCE_ERROR)

    @property
    def confirmed(self):
        """Whether single models confirm the evidence."""
        return self.sure_energy < self.energy + EVIDENCE_ERROR

    def same_mean(self, other):
        """Whether the coefficients are those of a place where an earlier start ended."""
        scale = np.exp(0.5 * max(self.h[1], other.h[1]))
        return np.abs(self.state.mean - other.state.mean).max() < _LEARNING.same_mean * scale


@dataclass
class FoundPlace:
    """Outcome of learning: the place, which noise starts were searched, whether it is dense."""

    place: Place
    searched: str
    dense: bool = False


class _Astray(Exception):
    """A search has left the fixed points and confirmed evidence, or is asked to end."""


@dataclass
class Climb:
    """Ways from one place to a better one: EM by sweeps of EP, by descents, quasi-Newton searches.

    In the `EPEnergy` y has variance one; its hyperparameters may be any. With algorithm "ep" the
    way is by EM alone. What is maximised is the evidence times `prior`. `seed` draws the single
    models that check the evidence. `told` hears of each step; where it asks to stop, the best place
    so far stands. A `wary` search that begins on confirmed ground ends there.
    """

    problem: Any
    space: Space
    settings: RunSettings
    prior: HyperPrior
    seed: int
    told: Told = unheard
    wary: bool = False
    asked: bool = field(default=False, init=False)

    def tell(self, **figures):
        """Tell of a step by figures that cost nothing."""
        self.asked |= bool(self.told(figures))

    def place(self, h, state):
        """Return the `Place` of a state that belongs to h."""
        return Place(h, state, self.prior, self.seed)

    def proper(self, h, sites):
        """Return the `Place` at sites, lifted where they leave no posterior."""
        return self.place(h, proper_state(self.problem.with_parameters(h), sites))

    def refined(self, place):
        """Maximum of the evidence near the place where coarse steps ended."""
        if self.settings.algorithm == "ep":
            return self._ep_em(place)
        return self._search(self._monotone_em(place))

    def swept(self, problem, sites, sweeps, before=None, tol=0.0):
        """Outcome of a few sweeps of EP, without the energy on the way."""
        return regular_ep(
            problem, sites, max_iter=sweeps, tol=tol, before=before, energies=False,
            damping=min(self.settings.damping, _LEARNING.coarse_damping),
        )  # fmt: skip

    def em(self, place, limit, known):
        """EM steps, each after a round of EP sweeps; return the place of least energy.

        Ends when the hyperparameters settle, when a round leads uphill (with many correlated
        columns parallel EP diverges), when the energy is above `limit`, or when the means are those
        of the `known` place. Energy and statistics are only had where a round ends: they cost half
        a sweep.
        """
        h, sites = place.h, place.state.sites
        damping = min(self.settings.damping, _LEARNING.coarse_damping)
        for turn in range(self.settings.max_iter):
            problem = self.problem.with_parameters(h)
            try:
                out = self.swept(problem, sites, SWEEPS - 1, place.state)
            except ImproperPosterior:
                break
            # the last sweep of a round is not looked at before the next one
            sites = out.x + damping * (out.evaluation.target - out.x)
            new = self.place(h, out.evaluation.payload)
            if not new.energy < place.energy:
                break
            place = new
            self.tell(energy=place.energy)
            if self.asked:
                break
            if turn + 1 < _LEARNING.first_rounds:
                continue
            if place.energy > limit or (known is not None and place.same_mean(known)):
                break
            h = self.space.moved(h, em_target(place.state, place.h, self.prior))
            if np.abs(h - place.h).max() < _LEARNING.coarse_tol:
                break
        return place

    def _ep_em(self, place):
        """EM by regular EP alone, a few sweeps a step, until the hyperparameters stand still."""
        least = SMALLEST_SITE / np.exp(place.h[1])
        h, sites = place.h, np.maximum(place.state.sites, [[-np.inf], [least]])
        for _ in range(self.settings.max_iter):
            problem = self.problem.with_parameters(h)
            try:
                out = self.swept(problem, sites, SWEEPS, tol=self.settings.tol)
            except ImproperPosterior:
                break
            place, sites = self.place(h, out.evaluation.payload), out.x
            self.tell(residual=out.evaluation.residual)
            h = self.space.moved(h, em_target(place.state, place.h, self.prior))
            if self.asked or np.abs(h - place.h).max() < _LEARNING.ep_tol:
                break
        return place

    def _monotone_em(self, place):
        """EM steps after descent steps: the energy falls in both. Leads into reach of a search."""
        for _ in range(self.settings.max_iter):
            state = descend(place.state, max_iter=2, tol=_LEARNING.inner_tol).evaluation.payload
            h = self.space.moved(place.h, em_target(state, place.h, self.prior))
            change = np.abs(h - place.h).max()
            place = self.proper(h, state.sites)
            self.tell(energy=state.energy)
            if self.asked or change < _LEARNING.coarse_tol:
                break
        return place

    def _search(self, place):
        """Quasi-Newton searches, each within reach of the last one's best; return the best."""
        best = self.place(place.h, _settled(place.state)[0])
        for _ in range(_LEARNING.searches):
            centre = np.clip(best.h, self.space.low, self.space.high)
            try:
                best = self._search_near(best, centre)
            except _Astray:
                break
            if np.abs(best.h - centre).max() < 0.99 * _LEARNING.reach:
                break
        return best

    def _search_near(self, place, centre):
        """Quasi-Newton search in a box: a far step may leave the fixed point for a worse one.

        Where the energy falls towards evidence that is not confirmed, sites often do not settle and
        each evaluation is dear: from confirmed ground the search does not follow it there.
        """
        free = self.space.free
        scale = np.sqrt(np.maximum(completed_curvature(place.state, place.h)[free], 1e-2))
        best, settled, path = place, [], [(place.h, place.state.sites)]

        def value(x):
            nonlocal best
            h = place.h.copy()
            h[free] = x / scale
            state, at_rest = _settled(self.proper(h, best.state.sites).state)
            new = self.place(h, state)
            if new.energy < best.energy:
                best = new
                path.append((h, state.sites))
            self.tell(energy=new.energy)
            settled.append(at_rest)
            many_lost = settled.count(False) > max(_LEARNING.evaluations / 2, 0.75 * len(settled))
            if self.asked or (many_lost and place.confirmed and not best.confirmed):
                raise _Astray
            slope = energy_gradient(state, h) - self.prior.slope(h)
            return new.energy, slope[free] / scale

        low = np.maximum(self.space.low, centre - _LEARNING.reach)[free] * scale
        high = np.minimum(self.space.high, centre + _LEARNING.reach)[free] * scale
        # where no posterior can be had on the way the best place so far stands
        with suppress(ImproperPosterior):
            minimize(
                value, centre[free] * scale, jac=True, method="L-BFGS-B",
                bounds=list(zip(low, high, strict=True)),
                options=dict(
                    gtol=_LEARNING.gradient_tol, ftol=1e-11, maxfun=_LEARNING.evaluations
                ),
            )  # fmt: skip
        return self._last_confirmed(path, best) if self.wary and place.confirmed else best

    def _last_confirmed(self, path, best):
        """The last place of a search, of those (h, sites) it passed, that is confirmed."""
        for h, sites in reversed(path[:-1]):
            if best.confirmed:
                break
            best = self.proper(h, sites)
        return best


@dataclass
class EvidenceSearch:
    """Maximisation of the evidence over the free hyperparameters, from several starts.

    `fractions` are the noise starts, as shares of the variance of y; one is enough where the noise
    is given. Where the climb is wary, evidence that single models do not confirm does not count
    between starts either: `doubt` says that some did not.
    """

    climb: Climb
    fractions: Any
    doubt: bool = field(default=False, init=False)

    def learn(self, warm=None):
        """Return a `FoundPlace`; (h, sites) of a warm start take the place of noise starts."""
        needs = ("with_parameters", "per_indicator", "n_indicators", "members")
        require("factor", self.climb.problem.factor, needs, "learning")
        if warm is not None:
            h = np.where(self.climb.space.free, warm[0], self.climb.space.value)
            found = FoundPlace(self.climb.refined(self.climb.proper(h, warm[1])), "warm")
        else:
            found = self._from_starts(self.climb.space)
        if self.climb.wary and warm is None and not self.climb.asked:
            found = self._from_models(found)
        if self.climb.asked or not self.climb.space.free[2] or found.place.confirmed:
            return found
        dense = self._from_starts(self.climb.space.dense())
        dense.dense = True
        # a later place has to win by more than the error of the evidence
        better = dense.place.sure_energy < found.place.sure_energy - EVIDENCE_ERROR
        return dense if better else found

    def _from_models(self, found):
        """Return what was found or, if that is in doubt, what a start at the best model leads to.

        It is in doubt where single models do not confirm it, or did not confirm what would have
        won.
        """
        climb = self.climb
        doubtful = self.doubt or not found.place.confirmed
        if climb.problem.factor.groups is not None or not doubtful:
            return found
        columns, *at = best_model(ModelLaw(climb.problem, climb.space, climb.prior), climb.seed)
        climb.tell(columns=len(columns))
        if climb.asked:
            return found
        place = climb.refined(self._at_model(columns, *at))
        better = place.trusted_energy < found.place.trusted_energy - EVIDENCE_ERROR
        return FoundPlace(place, found.searched) if better else found

    def _at_model(self, columns, log_ratio, log_noise):
        """Place where the columns of a single model are free and the others next to zero."""
        climb, d, size = self.climb, self.climb.problem.model.X.shape[1], len(columns)
        odds = (size + 1.0) / (d - size + climb.prior.misses)
        target = np.array([log_noise, log_noise + log_ratio, np.log(odds)])
        h = climb.space.moved(climb.space.value, target)
        sites = prior_sites(climb.problem.with_parameters(h))
        sites[1, columns] = _LEARNING.free / np.exp(h[1])
        return climb.proper(h, sites)

    def _from_starts(self, space):
        """Maximum reached from the best of the noise starts, all searched where that is cheap."""
        fractions = self.fractions if space.free[0] else self.fractions[:1]
        if (
            self.climb.problem.model.X.size <= _LEARNING.search_all
            and self.climb.settings.algorithm != "ep"
        ):
            return FoundPlace(self._best_of_all(space, fractions), "all")
        place: Any = None
        for fraction in fractions:
            limit = (
                np.inf
                if place is None
                else place.energy + _LEARNING.hopeless * self.climb.problem.n_rows
            )
            new = self._coarse(space, fraction, limit, place)
            place = new if place is None or new.energy < place.energy else place
            if self.climb.asked:
                break
        return FoundPlace(self.climb.refined(place), "best")

    def _best_of_all(self, space, fractions):
        """Search from every start; a later one has to win by the error of the evidence."""
        best: Any = None
        for fraction in fractions:
            new = self.climb.refined(self._coarse(space, fraction))
            best = new if best is None or self._wins(new, best) else best
            if self.climb.asked:
                break
        return best

    def _wins(self, new, best):
        """Whether a later start is better by more than the error of the evidence."""
        if not self.climb.wary:
            return new.energy < best.energy - EVIDENCE_ERROR
        limit = best.trusted_energy - EVIDENCE_ERROR
        wins = new.energy < limit
        self.doubt |= wins and not new.confirmed
        return wins and new.trusted_energy < limit

    def _coarse(self, space, fraction, limit=np.inf, known=None):
        """Place reached from one noise start by a few steps of EM."""
        h = space.at_noise(fraction)
        problem = self.climb.problem.with_parameters(h)
        sites = prior_sites(problem)
        if not space.free[0]:
            tol = self.climb.settings.tol
            sites = annealed(problem, sites, lambda p, s: self.climb.swept(p, s, SWEEPS, tol=tol).x)
        return self.climb.em(self.climb.place(h, problem.at(sites)), limit, known)


def _settled(state):
    """State led to its fixed point as far as a few steps go, and whether they were enough."""
    out = descend(
        state,
        max_iter=_LEARNING.inner_iter,
        tol=_LEARNING.inner_tol,
        least_gain=_LEARNING.inner_gain,
    )
    return out.evaluation.payload, out.reason != "max_iter"
