"""Evidence of a linear model with spike-and-slab factors from single models.

EP treats the sum of all coefficients that are in doubt as Gaussian. Where few of them are in the
model at a time and hardly one stands out it is not, and the evidence of EP may be too large by tens
of nats. Given which coefficients are in, the model, everything is Gaussian, and the evidence is the
sum of p(y, model) over all models. Two estimates err on the low side: what neither of them confirms
is in doubt. Draws serve where many models count, a search where few do.
"""

import numpy as np
from scipy.special import log_expit, logsumexp

from .._engine.gaussian import checked_cholesky, triangular_solve

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
