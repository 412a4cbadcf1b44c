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
models, given which everything is Gaussian. The evidence is the sum of p(y, model) over all models.
Two estimates err on the low side: draws serve where many models count, a search where few do. What
neither of them confirms has to stand up to a search from the best single model, and to one from a
dense start, whose sum is Gaussian.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_expit, logsumexp

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior
from ._chains import best_model
from ._energy import descend, regular_ep
from ._hyperparameters import completed_curvature, em_target
from ._linear_model import BLOCK_BYTES
from ._model_law import ModelLaw
from ._runs import SWEEPS, annealed, ep_level, ep_sweeps, prior_sites, proper_state


class _Learning(NamedTuple):
    """Figures of learning.

    Each comes with what half and twice its value change, by doc/benchmarks/spike_slab_constants.py:
    nats of evidence a set, and sweeps as a ratio. Differences below .01 nats are none.
    """

    # Rounds before the first step of EM: led by unsettled sites it goes astray. Halved: none, .90.
    # Doubled: -2.1, one of 8 sets ending elsewhere, 1.2. One round: -.9 on 60 x 100 columns.
    first_rounds: int = 3
    # Coefficients of two starts are the same, in slab standard deviations; the second one then
    # ends. Halved or doubled: none. Never, and no limit below: none, 1.16 on 32 sets.
    same_mean: float = 0.1
    # Nats a row by which a start may be behind the best so far. Halved or doubled: none, 1.0.
    # Without the limit: none, twice the CPU at 150 x 200 with noise.
    hopeless: float = 0.5
    # The same once monotone steps have led a start as far as they go. On 120 sets of 30 to 100
    # rows half the CPU of no limit; three end elsewhere, each with a smaller held-out error. At .03
    # a third of the CPU, and a fourth one has a larger error.
    behind: float = 0.1
    # Change of a hyperparameter that ends coarse steps. Halved: none, .91. Doubled: none, .99.
    coarse_tol: float = 0.05
    # Largest damping of learning, the default of `damping`: undamped parallel EP oscillates.
    coarse_damping: float = 0.5
    # Reach of one quasi-Newton search, in logs, and searches at most. Halved: none, 1.07 and .86;
    # on twelve other sets -.5 for either one (two of 12, -3 at worst). Doubled: none, .99 and 1.15.
    reach: float = 0.5
    searches: int = 6
    # Evaluations of each at most. Halved: none, .99. Doubled: none, 1.0.
    evaluations: int = 20
    # Descent steps of one evaluation, which starts next to its fixed point, and their tolerance.
    # Halved: none, 1.05 and 1.02. Doubled: none, 1.10 and .98.
    inner_iter: int = 10
    inner_tol: float = 3e-5
    # Nats that make a sweep worth while before the hyperparameters are known. Halved: none, 1.01.
    # Doubled: none, .99. Zero: 1.08.
    inner_gain: float = 1e-3
    # Entries of X up to which every start is searched. Halved: none. Doubled: +1.8 but -1.1 nats a
    # held-out row (two of 4 sets), 3.3. Zero: none on 32 sets, but on 40 of the published protocol
    # -1.0 nats at the mode, and a mean squared error of .052 after .034.
    search_all: int = 20_000
    # Site precision of the columns of a single model, in slab precisions.
    free: float = 0.3
    # Gradient that ends a search, in standard errors of the hyperparameters. Halved: none, 1.02.
    # Doubled: none, .98.
    gradient_tol: float = 3e-3


_LEARNING = _Learning()

# Nats that single models may be short of the evidence of EP, which overrates interpolation with
# little noise by as much. Halved: none, 1.0. Doubled: none, .80.
EVIDENCE_ERROR = 3.0
# Models drawn, and visited by the search, to check the evidence. Halved or doubled: none, 1.0; on
# six other wide sets N_LEADING doubled: +4.2, all of it on one.
N_MODELS, N_LEADING = 64, 20
# Indicators whose exchange the search tries. Halved or doubled: no change of the fits of
# doc/benchmarks/spike_slab_constants.py.
N_DOUBTFUL = 50
SURE = 1e-12  # distance of the proposal's probabilities from 0 and 1: logs stay finite


@dataclass
class Place:
    """Hyperparameters h with the state that belongs to them, in an `EvidenceSearch`."""

    h: np.ndarray
    state: Any
    search: Any

    @property
    def energy(self):
        """Energy less the log prior density of the hyperparameters."""
        return self.state.energy - self.search.prior.log_density(self.h)

    @cached_property
    def sure_energy(self):
        """Energy with the evidence that single models confirm, within `EVIDENCE_ERROR`."""
        confirmed = confirmed_log_evidence(self.state, self.search.seed)
        return self.energy - self.state.energy - confirmed

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


class EvidenceSearch:
    """Maximisation of evidence times `prior` over what is free in `space`, from several starts.

    In the `EPEnergy` y has variance one; its hyperparameters may be any. `fractions` are the noise
    starts, as shares of the variance of y; one is enough where the noise is given. `seed` draws the
    single models that check the evidence. `told` hears of each step; where it asks to stop, the
    best place so far stands. A `wary` search that begins on confirmed ground ends there, and the
    best single model is a start as well where there is `doubt`: where single models did not confirm
    what would have won.
    """

    def __init__(self, plan, told):
        self.problem, self.space, self.prior = plan.problem, plan.space, plan.prior
        self.settings, self.seed, self.wary = plan.settings, plan.evidence_seed, plan.integrates
        self.fractions, self.told = list(plan.settings.noise_starts), told
        self.asked = self.doubt = False
        # every start is searched where that is cheap
        self._all = self.problem.model.X.size <= _LEARNING.search_all
        damping = min(self.settings.damping, _LEARNING.coarse_damping)
        self._coarsely = self.settings._replace(damping=damping)

    def learn(self, warm):
        """Return the `Place`, where the search for it began, and whether it is a dense one.

        (h, sites) of a warm start take the place of noise starts.
        """
        needs = ("with_parameters", "per_indicator", "n_indicators", "members", "slopes")
        require("factor", self.problem.factor, needs, "learning")
        if warm is not None:
            h = np.where(self.space.free, warm[0], self.space.value)
            place, searched = self._refined(self._proper(h, warm[1])), "warm"
        else:
            place, searched = self._from_starts(self.space), "all" if self._all else "best"
            place = self._from_models(place) if self.wary and not self.asked else place
        if self.asked or not self.space.free[2] or place.confirmed:
            return place, searched, False
        dense = self._from_starts(self.space.dense())
        # a later place has to win by more than the error of the evidence
        better = dense.sure_energy < place.sure_energy - EVIDENCE_ERROR
        return dense if better else place, searched, better

    def _tell(self, **figures):
        """Tell of a step by figures that cost nothing."""
        self.asked |= bool(self.told(figures))

    def _proper(self, h, sites):
        """Return the `Place` at sites, lifted where they leave no posterior."""
        return Place(h, proper_state(self.problem.with_parameters(h), sites), self)

    # ------------------------------------------------------------------------------ starts

    def _from_starts(self, space):
        """Maximum reached from the best of the noise starts, or the best one reached from all."""
        place: Any = None
        for fraction in self.fractions if space.free[0] else self.fractions[:1]:
            new = self._from_start(space, fraction, place)
            # two starts that end at one place leave little for a third one to find
            settled = self._all and place is not None and new.same_mean(place)
            place = new if place is None or self._wins(new, place) else place
            if self.asked or settled:
                break
        return place if self._all else self._refined(place)

    def _from_start(self, space, fraction, best):
        """Place reached from one noise start, searched if all are and it differs from the best."""
        new = self._coarse(space, fraction, None if self._all else best)
        known = not self._all or (best is not None and new.same_mean(best))
        return new if known else self._refined(new, best)

    def _wins(self, new, best):
        """Whether a later start is better, if searched by more than the error of the evidence."""
        if not self._all:
            return new.energy < best.energy
        if not self.wary:
            return new.energy < best.energy - EVIDENCE_ERROR
        limit = best.trusted_energy - EVIDENCE_ERROR
        wins = new.energy < limit
        self.doubt |= wins and not new.confirmed
        return wins and new.trusted_energy < limit

    def _coarse(self, space, fraction, known):
        """Place reached from one noise start by a few steps of EM."""
        h = space.at_noise(fraction)
        problem = self.problem.with_parameters(h)
        sites = prior_sites(problem)
        if not space.free[0]:
            sites = annealed(problem, sites, ep_level(self._coarsely))
        return self._em(Place(h, problem.at(sites), self), known)

    def _from_models(self, place):
        """Return a confirmed place or, if better, what a start at the best model leads to."""
        if self.problem.factor.groups is not None or (place.confirmed and not self.doubt):
            return place
        columns, *at = best_model(ModelLaw(self.problem, self.space, self.prior), self.seed)
        self._tell(columns=len(columns))
        if self.asked:
            return place
        new = self._refined(self._at_model(columns, *at))
        return new if new.trusted_energy < place.trusted_energy - EVIDENCE_ERROR else place

    def _at_model(self, columns, log_ratio, log_noise):
        """Place where the columns of a single model are free and the others next to zero."""
        d, size = self.problem.model.X.shape[1], len(columns)
        odds = (size + 1.0) / (d - size + self.prior.misses)
        target = np.array([log_noise, log_noise + log_ratio, np.log(odds)])
        h = self.space.moved(self.space.value, target)
        sites = prior_sites(self.problem.with_parameters(h))
        sites[1, columns] = _LEARNING.free / np.exp(h[1])
        return self._proper(h, sites)

    # ------------------------------------------------------------------- from a place to a better

    def _em(self, place, known):
        """EM steps, each after a round of EP sweeps; return the place of least energy.

        Ends when the hyperparameters settle, when a round leads uphill (with many correlated
        columns parallel EP diverges), when the energy is hopelessly above that of the `known`
        place, or when the means are the same. Energy and statistics are only had where a round
        ends: they cost half a sweep.
        """
        h, sites = place.h, place.state.sites
        margin = _LEARNING.hopeless * self.problem.n_rows
        few = dict(max_iter=SWEEPS - 1, tol=0.0, energies=False, **ep_sweeps(self._coarsely))
        for turn in range(self.settings.max_iter):
            problem = self.problem.with_parameters(h)
            try:
                out = regular_ep(problem, sites, **few)
            except ImproperPosterior:
                break
            # the last sweep of a round is not looked at before the next one
            sites = out.x + self._coarsely.damping * (out.evaluation.target - out.x)
            new = Place(h, out.evaluation.payload, self)
            if not new.energy < place.energy:
                break
            place = new
            self._tell(energy=place.energy)
            if self.asked:
                break
            if turn + 1 < _LEARNING.first_rounds:
                continue
            if known and (place.energy > known.energy + margin or place.same_mean(known)):
                break
            h = self.space.moved(h, em_target(place.state, place.h, self.prior))
            if np.abs(h - place.h).max() < _LEARNING.coarse_tol:
                break
        return place

    def _refined(self, place, known=None):
        """Maximum of the evidence near the place where coarse steps ended.

        Ends on the way where the energy is hopelessly above that of the `known` place.
        """
        place = self._monotone_em(place)
        most = np.inf if known is None else known.energy + _LEARNING.behind * self.problem.n_rows
        for _ in range(_LEARNING.searches):
            if place.energy > most:
                break
            centre = np.clip(place.h, self.space.low, self.space.high)
            place = self._search(place, centre)
            if self.asked or np.abs(place.h - centre).max() < 0.99 * _LEARNING.reach:
                break
        return place

    def _monotone_em(self, place):
        """EM steps after descent steps: the energy falls in both. Leads into reach of a search."""
        for _ in range(self.settings.max_iter):
            state = descend(place.state, max_iter=2, tol=_LEARNING.inner_tol).evaluation.payload
            h = self.space.moved(place.h, em_target(state, place.h, self.prior))
            change = np.abs(h - place.h).max()
            place = self._proper(h, state.sites)
            self._tell(energy=state.energy)
            if self.asked or change < _LEARNING.coarse_tol:
                break
        return place

    def _search(self, place, centre):
        """Quasi-Newton search in a box: a far step may leave the fixed point for a worse one."""
        free, best = self.space.free, Place(place.h, _settled(place.state), self)
        scale = np.sqrt(np.maximum(completed_curvature(best.state, best.h)[free], 1e-2))
        first, path = best, [(best.h, best.state.sites)]

        def value(x):
            nonlocal best
            h = place.h.copy()
            h[free] = x / scale
            new = Place(h, _settled(self._proper(h, best.state.sites).state), self)
            if new.energy < best.energy:
                best = new
                path.append((h, new.state.sites))
            self._tell(energy=new.energy)
            if self.asked:
                raise StopIteration
            slope = -new.state.evidence_gradient - self.prior.slope(h)
            return new.energy, slope[free] / scale

        low = np.maximum(self.space.low, centre - _LEARNING.reach)[free] * scale
        high = np.minimum(self.space.high, centre + _LEARNING.reach)[free] * scale
        bounds, start = np.column_stack([low, high]), centre[free] * scale
        options = dict(gtol=_LEARNING.gradient_tol, ftol=1e-11, maxfun=_LEARNING.evaluations)
        # where no posterior can be had on the way the best place so far stands
        with suppress(ImproperPosterior, StopIteration):
            minimize(value, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        if self.wary and first.confirmed:
            while len(path) > 1 and not best.confirmed:
                path.pop()
                best = self._proper(*path[-1])
        return best


def _settled(state):
    """State led to its fixed point as far as a few steps go."""
    limits = dict(tol=_LEARNING.inner_tol, least_gain=_LEARNING.inner_gain)
    return descend(state, max_iter=_LEARNING.inner_iter, **limits).evaluation.payload


# ------------------------------------------------------------- evidence by single models


def sampled_log_evidence(state, seed, n_models):
    """Estimate the log evidence by models drawn from the matched inclusion probabilities.

    The mean of p(y, model) / q(model) is unbiased for the evidence. It falls short where the
    probabilities describe the posterior badly, and by Markov's inequality its logarithm is above
    the truth by t with probability exp(-t) at most. The random numbers are dealt out in the order
    of the probabilities: the order of the columns does not matter. A model of k columns costs
    O(d + n k min(n, k)).
    """
    factor = state.problem.factor
    on = np.clip(factor.per_indicator(state.matched.inclusion), SURE, 1 - SURE)
    order = np.argsort(on)
    on = on[order]
    gain_in, gain_out = factor.logit - np.log(on), -np.log1p(-on)
    drawn = np.random.default_rng(seed).random((n_models, len(on))) < on
    inside = _log_likelihoods(state.problem, [factor.members(order[one]) for one in drawn])
    weights = gain_out.sum() + drawn @ (gain_in - gain_out) + inside
    prior = len(on) * log_expit(-factor.logit)
    return float(prior + logsumexp(weights) - np.log(n_models))


def leading_log_evidence(state, n_rounds):
    """Bound the log evidence from below by the sum of p(y, model) over models that a search finds.

    Begins at the indicators with more than half a (matched) probability. Each round visits the best
    model that is known and not visited yet, and evaluates all that differ from it in one of the 50
    indicators most in doubt, O(n k min(n, k)) each.
    """
    factor = state.problem.factor
    on = factor.per_indicator(state.matched.inclusion)
    doubtful = np.argsort(-on * (1 - on))[:N_DOUBTFUL].tolist()
    found: dict[frozenset[int], float] = {}
    visited = set()

    def evaluate(models):
        columns = [factor.members(np.array(sorted(model), dtype=int)) for model in models]
        size = np.array([len(model) for model in models])
        inside = _log_likelihoods(state.problem, columns) + factor.logit * size
        found.update(zip(models, inside.tolist(), strict=True))

    here = frozenset(np.flatnonzero(on > 0.5).tolist())
    evaluate([here])
    for _ in range(n_rounds):
        visited.add(here)
        near = [model for model in (here ^ {j} for j in doubtful) if model not in found]
        if near:
            evaluate(near)
        left = found.keys() - visited
        if not left:
            break
        here = max(left, key=found.__getitem__)
    prior = len(on) * log_expit(-factor.logit)
    return float(prior + logsumexp(list(found.values())))


def _log_likelihoods(problem, models):
    """Log densities (len(models),) of y, the columns of each model from the slab, others zero."""
    most = max(map(len, models))
    step = max(1, BLOCK_BYTES // (8 * len(problem.model.y) * (most + 1)))
    parts = [models[k : k + step] for k in range(0, len(models), step)]
    return np.concatenate([_together(problem, part, most) for part in parts])


def _together(problem, models, most):
    """Log densities of y under a few models of at most so many columns each."""
    model, noise = problem.model, problem.noise
    y, ratio = model.y, problem.factor.slab_variance / noise
    X = np.zeros((len(models), len(y), most))  # columns of zeros change nothing
    for part, columns in zip(X, models, strict=True):
        part[:, : len(columns)] = model.X[:, columns]
    few, turned = most < len(y), X.transpose(0, 2, 1)
    system = ratio * (turned @ X if few else X @ turned)
    np.einsum("bii->bi", system)[...] += 1.0
    image = turned @ y if few else np.broadcast_to(y, X.shape[:2])
    square = np.einsum("bi,bi->b", image, np.linalg.solve(system, image[..., None])[..., 0])
    square = y @ y - ratio * square if few else square
    log_det = np.linalg.slogdet(system)[1]
    total = problem.n_rows * np.log(2 * np.pi * noise) + log_det + (square + model.rest) / noise
    return -0.5 * total - problem.constant


def confirmed_log_evidence(state, seed):
    """Log evidence at a state by single models, searched for where drawn ones fall short."""
    evidence = sampled_log_evidence(state, seed, N_MODELS)
    if evidence < -state.energy - EVIDENCE_ERROR:
        evidence = max(evidence, leading_log_evidence(state, N_LEADING))
    return evidence


def overrated(state, seed):
    """Nats by which the evidence at a state exceeds what single models confirm and their error."""
    return max(0.0, -state.energy - EVIDENCE_ERROR - confirmed_log_evidence(state, seed))
