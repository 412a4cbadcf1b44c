"""Evidence of a linear model with spike-and-slab factors from single models.

EP treats the sum of all coefficients that are in doubt as Gaussian. Where few of them are in the
model at a time and hardly one stands out it is not, and the evidence of EP may be too large by tens
of nats. Given which coefficients are in, the model, everything is Gaussian, and the evidence is the
sum of p(y, model) over all models. Two estimates err on the low side: what neither of them confirms
is in doubt. Draws serve where many models count, a search where few do.

The search for the single model with most of the posterior: given the ratio of slab variance to
noise and with a flat prior of the log noise, which integrates out, the evidence of a model is
known, and the change of it by any one column costs one product: all d of them are had for O(n d),
and the matrices are led from a model to the next by rank-one updates. So a Metropolis chain over
models can skip the proposals that it would reject and go to one of the neighbours at once, with the
probability of being the next that is accepted. A column that was changed may not change back for a
few moves, or the chain would go to and fro at the foot of every hill, and it starts again at random
models: what is looked for is the top, not a sample. It finds sparse models that EP, which hesitates
between many, does not.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import betaln, log_expit, logsumexp

from .._engine.gaussian import checked_cholesky, triangular_solve
from ._hyperparameters import NOISE_FLOOR


class _Walk(NamedTuple):
    """How the chain over models goes.

    On a set of 40 rows and 200 columns, 12 in, that the lasso and EP get wrong, four of eight
    chains of 8000 moves find the truth, three without restarts, none where columns are free to
    change back.
    """

    work: float = 2e8  # products n d of all moves
    least: int = 1000  # moves
    most: int = 25_000
    restart: int = 500  # moves, after which it is at a random model of half as many columns as rows
    least_stay: int = 1  # moves for which a column stays as it is
    longest_stay: int = 3
    pivot: float = 1e-10  # least one whose evidence is known in double precision
    accurate: tuple = (1e-6, 1e10)  # pivots of accurate rank-one updates
    refresh: int = 200  # moves after which the matrices are made anew: updates gather rounding


_WALK = _Walk()


class FoundModel(NamedTuple):
    """Columns that are in, log p(y, model) up to a constant, and the model's noise variance."""

    columns: np.ndarray
    log_evidence: float
    noise: float


class _Chain:
    """Where the chain is: C = I + ratio X_on X_on', C^-1 X, C^-1 y and what follows from them."""

    def __init__(self, problem, ratio, misses):
        model = problem.model
        self.X, self.y, self.n_rows = model.X, model.y, problem.n_rows
        self.rest = model.rest + NOISE_FLOOR * self.n_rows  # a perfect fit is no better than that
        self.ratio = ratio
        d = self.X.shape[1]
        size = np.arange(-1, d + 2)
        log_prior = betaln(1.0 + size[1:-1], misses + d - size[1:-1]) - betaln(1.0, misses)
        self.log_prior = np.r_[-np.inf, log_prior, -np.inf][1:]
        self.start_at(np.zeros(0, dtype=int))

    def start_at(self, columns):
        """Go to the model of some columns."""
        self.on = np.zeros(self.X.shape[1], dtype=bool)
        self.on[columns] = True
        self.refresh()

    def refresh(self):
        """Make all that is updated by moves anew, O(n d k) with k columns in.

        By singular values, not by solving with C: columns in units that differ by 1e14 leave sums
        of squares here, and y' C^-1 y stays positive.
        """
        left, singular, _ = np.linalg.svd(self.X[:, self.on], full_matrices=False)
        scale = 1.0 + self.ratio * singular**2  # eigenvalues of C
        within, y_within = left.T @ self.X, left.T @ self.y
        beyond, y_beyond = self.X - left @ within, self.y - left @ y_within
        shrunk = within / scale[:, None]
        self.image = beyond + left @ shrunk
        self.log_det = float(np.sum(np.log(scale)))
        self.square = float(y_beyond @ y_beyond + y_within @ (y_within / scale)) + self.rest
        # x_j' C^-1 x_j and x_j' C^-1 y
        self.norm = np.einsum("ij,ij->j", beyond, beyond) + np.einsum("ij,ij->j", within, shrunk)
        self.pull = beyond.T @ y_beyond + shrunk.T @ y_within

    @property
    def log_evidence(self):
        """Log p(y, model), a constant left out."""
        size = np.count_nonzero(self.on)
        fit = -0.5 * self.log_det - 0.5 * self.n_rows * np.log(self.square)
        return float(fit + self.log_prior[size])

    def gains(self):
        """Return what the change of each column adds to the log evidence, and its pivots.

        A column whose removal is lost to rounding has to stay.
        """
        size = np.count_nonzero(self.on)
        sign = np.where(self.on, -self.ratio, self.ratio)
        pivot = 1.0 + sign * self.norm
        lost = pivot < _WALK.pivot
        pivot[lost] = 1.0
        left = np.maximum(1.0 - sign * self.pull**2 / pivot / self.square, np.finfo(float).tiny)
        gain = -0.5 * np.log(pivot) - 0.5 * self.n_rows * np.log(left)
        gain += np.where(self.on, self.log_prior[size - 1], self.log_prior[size + 1])
        gain[lost] = -np.inf
        return gain - self.log_prior[size], sign / pivot, pivot

    def move(self, j, share, pivot):
        """Change column j by the rank-one update of the inverse, O(n d), where it is accurate."""
        if not _WALK.accurate[0] < pivot < _WALK.accurate[1]:
            self.on[j] = not self.on[j]
            self.refresh()
            return
        along = self.image[:, j].copy()
        cross = self.X.T @ along
        pull = self.pull[j]
        self.log_det += np.log(pivot)
        self.square -= share * pull**2
        self.norm -= share * cross**2
        self.pull -= share * pull * cross
        self.image -= np.outer(share * along, cross)
        self.on[j] = not self.on[j]


def search_models(problem, ratio, misses, seed):
    """Return the `FoundModel` of most evidence that a chain visits, the empty model first.

    `ratio` is that of slab variance to noise; the inclusion has the prior Beta(1, `misses`).
    O(n d) a move.
    """
    chain, rng, best = _Chain(problem, ratio, misses), np.random.default_rng(seed), None
    fixed_until = np.zeros(len(chain.on), dtype=int)
    n, d = chain.X.shape
    for k in range(int(np.clip(_WALK.work / (n * d), _WALK.least, _WALK.most))):
        if k % _WALK.restart == _WALK.restart - 1:
            chain.start_at(rng.choice(d, min(n, d) // 2, replace=False))
        elif k % _WALK.refresh == _WALK.refresh - 1:
            chain.refresh()
        value = chain.log_evidence
        if best is None or value > best.log_evidence:
            noise = float(chain.square / chain.n_rows)
            best = FoundModel(np.flatnonzero(chain.on), value, noise)
        gain, share, pivot = chain.gains()
        gain[fixed_until > k] = -np.inf
        if not np.any(gain > -np.inf):
            continue
        rate = np.cumsum(np.exp(np.minimum(gain, 0.0) - min(gain.max(), 0.0)))
        j = min(int(np.searchsorted(rate, rng.random() * rate[-1])), len(rate) - 1)
        fixed_until[j] = k + 1 + rng.integers(_WALK.least_stay, _WALK.longest_stay + 1)
        chain.move(j, share[j], pivot[j])
    return best


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
    nothing, gain = gain_out.sum(), gain_in - gain_out
    rng = np.random.default_rng(seed)
    weights = []
    for _ in range(n_models):
        drawn = np.flatnonzero(rng.random(len(on)) < on)
        inside = _log_likelihood(state.problem, factor.members(order[drawn]))
        weights.append(nothing + gain[drawn].sum() + inside)
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

    def evaluate(model):
        columns = factor.members(np.array(sorted(model), dtype=int))
        found[model] = _log_likelihood(state.problem, columns) + factor.logit * len(model)

    here = frozenset(np.flatnonzero(on > 0.5).tolist())
    evaluate(here)
    for _ in range(n_rounds):
        visited.add(here)
        for model in (here ^ {j} for j in doubtful):
            if model not in found:
                evaluate(model)
        left = found.keys() - visited
        if not left:
            break
        here = max(left, key=found.__getitem__)
    prior = len(on) * log_expit(-factor.logit)
    return float(prior + logsumexp(list(found.values())))


def _log_likelihood(problem, columns):
    """Log density of y with the coefficients of some columns from the slab, the others zero."""
    model, noise = problem.model, problem.noise
    X, y = model.X[:, columns], model.y
    ratio = problem.factor.slab_variance / noise
    few = X.shape[1] < X.shape[0]
    side = X.T if few else X
    root = checked_cholesky(np.eye(len(side)) + ratio * (side @ side.T))
    image = triangular_solve(root, X.T @ y if few else y)
    square = y @ y - ratio * (image @ image) if few else image @ image
    log_det = 2 * np.log(np.diagonal(root)).sum()
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
