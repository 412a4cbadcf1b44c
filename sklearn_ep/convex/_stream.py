"""Streams of rows: the posterior so far is the prior of the next batch.

With forgetting g the prior of a batch is N(m0, A0^-1), A0 = g A + (1 - g) P and m0 = A0^-1 g A m: a
power prior, so that old rows count less by the factor g a batch. Up to 2,000 columns A is kept as
it is; beyond, or where a rank is asked for, as a diagonal plus a matrix of that rank. The sum of
the bounds of the batches is a prequential evidence: factors g can be compared by it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._estimator.fitting import BinaryFit
from ._double_loop import ExactFit
from ._parameters import SIZES, CarriedPrior, Limits, is_flat, prior_variances
from ._posterior import WeightPosterior
from ._problem import single_node
from ._sites import LogisticSites
from ._systems import SYSTEMS, Design, DualSystem, PrimalSystem, low_rank_system


@dataclass
class BatchPlan:
    """What the estimator decides for a stream.

    `prior` (n,) are the prior precisions.
    """

    estimator: Any
    prior: np.ndarray
    variance = "exact"

    @property
    def solver(self):
        """How batches are fitted: by a matrix of the columns, or of the rows."""
        return "primal" if len(self.prior) <= SIZES.stream else "dual"

    def start(self):
        """Return the posterior before any row: the prior."""
        system = self._added(self.prior, np.zeros((1, len(self.prior))), np.zeros(1))
        mean, intercept = np.zeros(len(self.prior)), bool(self.estimator.fit_intercept)
        return WeightPosterior(mean, intercept, system)

    def _added(self, prior, rows, weight):
        """Return the system of a prior and rows, in the form in which batches are fitted."""
        return SYSTEMS[self.solver](Design(rows, False), prior, weight)

    def add_batch(self, last, X, sign, weight):
        """Return the `BinaryFit` after rows of X (q, d) with labels in {-1, +1}.

        `last` is the `WeightPosterior` so far; the evidence is what the batch adds.
        """
        estimator, before, mean = self.estimator, last.system, last.mean
        g, rank = estimator.forgetting, estimator.stream_rank
        # where variances were sampled, those of the coefficients are all that is known
        if not isinstance(before, PrimalSystem | DualSystem):
            before = low_rank_system(1.0 / last.coefficient_variance(), 0.0 * self.prior[:, None])
        if len(last.rows):  # that were included in the posterior
            before = self._added(before, last.rows, last.precision)
        if g < 1.0:
            old = g * before.times(mean)
            before = before.weakened(g, (1.0 - g) * self.prior)
            mean = before.solve(old)
        design, sites = Design(X, last.intercept), LogisticSites(sign, weight, estimator.bound)
        prior = CarriedPrior(mean, before)
        fits = ExactFit(design, sites, prior, SYSTEMS[self.solver], Limits.of(estimator))
        result = fits.solved()[1]
        step = result.evaluation.payload
        after = step.system
        if rank is not None:
            after = _compressed(after, self.prior, rank, before)
        posterior = WeightPosterior(step.mean, last.intercept, after)
        # coefficients less what the prior explains
        dof = np.sum(1.0 - self.prior * posterior.coefficient_variance())
        attributes = dict(dof=dof, average=single_node(prior, 1.0, np.nan))
        return BinaryFit(posterior, result.history, result.reason, step.objective, attributes)


def plan_stream(estimator, d, variances):
    """Return the `BatchPlan` of each problem with d features and these prior variances.

    Raises a ValueError that names a parameter.
    """
    if is_flat(estimator):
        raise ValueError("partial_fit needs a finite intercept_prior_variance.")
    priors = [1.0 / prior_variances(estimator, d, variance) for variance in variances]
    n = len(priors[0])
    if n > SIZES.stream and estimator.stream_rank is None:
        raise ValueError(
            f"stream_rank must be given for more than {SIZES.stream} coefficients, got "
            f"{n}: 0 keeps the diagonal of the precision, 30 much of the rest, too."
        )
    return [BatchPlan(estimator, prior) for prior in priors]


def _compressed(A, prior, rank, last):
    """Return the system nearest to A: its diagonal, and a low rank of what is beside it.

    Works on q (A - P) q, q = diag(A)^-1/2: the leading eigenvectors of what a diagonal e leaves,
    and e of what they leave, in turns, by power iteration from the last factor on.
    """
    total = A.diagonal()
    q = 1.0 / np.sqrt(total)
    own = (total - prior) * q * q
    if rank == 0:
        return low_rank_system(total, np.zeros((len(total), 1)))
    rank = min(rank, len(total))
    V = np.random.RandomState(0).standard_normal((len(total), rank))
    if isinstance(last, DualSystem) and len(last.weight) == rank:
        # directions that were lost before get another chance
        V = q[:, None] * last.design.B.T + 1e-3 * V
    V = np.linalg.qr(V)[0]
    e = np.zeros(len(total))  # so that a full rank loses nothing
    for _ in range(10):  # each also renews the diagonal
        image = q[:, None] * A.times(q[:, None] * V) - (prior * q * q + e)[:, None] * V
        inner = V.T @ image
        values, vectors = np.linalg.eigh(0.5 * (inner + inner.T))
        F = (V @ vectors) * np.sqrt(np.maximum(values, 0.0))
        # nothing is below -1 here: shifted, the largest eigenvalues are the leading ones
        V = np.linalg.qr(image + V)[0]
        e = np.maximum(own - np.einsum("ij,ij->i", F, F), 0.0)
    return low_rank_system(prior + e / (q * q), F / q[:, None])
