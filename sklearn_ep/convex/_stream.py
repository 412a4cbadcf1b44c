"""Streams of rows: the posterior so far is the prior of the next batch.

With forgetting g the prior of a batch is N(m0, A0^-1), A0 = g A + (1 - g) P and m0 = A0^-1 g A m: a
power prior, so that old rows count less by the factor g a batch. Up to 2,000 columns A is kept as
it is; beyond, or where a rank is asked for, as a diagonal plus a matrix of that rank. The sum of
the bounds of the batches is a prequential evidence: factors g can be compared by it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import checked_cholesky, triangular_inverse
from .._engine.loop import Anderson, Evaluation, iterate
from .._engine.super_gaussian import LogisticSites
from .._estimator.fitting import BinaryFit
from ._natural import NaturalGradient, NaturalStep
from ._parameters import SIZES, CarriedPrior, Limits, given_variance, is_flat, prior_variances
from ._posterior import WeightPosterior
from ._problem import given_node
from ._rows import PartRows
from ._systems import LowRankSystem, PrimalSystem, squared, weighted_inner, with_ones


@dataclass
class BatchPlan:
    """What the estimator decides for a stream.

    `prior` (n,) are the prior precisions, `rank` that of the precision beside its diagonal, None
    for all of it; `limits` are tol, max_iter and damping of the loop.
    """

    prior: np.ndarray
    intercept: bool
    bound: str
    forgetting: float
    rank: int | None
    limits: dict[str, Any]
    variance: str = "exact"

    @property
    def solver(self):
        """How batches are fitted: by a matrix of the columns, or of the rows."""
        return "primal" if len(self.prior) <= SIZES.stream else "dual"

    def start(self):
        """Return the posterior before any row: the prior."""
        n = len(self.prior)
        if self.solver == "dual":
            system: Any = LowRankSystem(self.prior, np.zeros((n, 0)))
        else:
            system = PrimalSystem.of(np.diag(self.prior))
        return WeightPosterior(np.zeros(n), self.intercept, system, system)

    def add_batch(self, last, X, sign, weight):
        """Return the `BinaryFit` after rows of X (q, d) with labels in {-1, +1}.

        `last` is the `WeightPosterior` so far; the evidence is what the batch adds.
        """
        sites = LogisticSites(sign, weight, self.bound)
        B = with_ones(X.tocsr() if hasattr(X, "tocsr") else X, self.intercept)
        before = _carried(self, last)
        system, mean = _forgotten(self, before, last.mean)
        fit = (_primal if self.solver == "primal" else _dual)(B, sites, system, mean, self.limits)
        result, step, after, A = fit
        if self.rank is not None:
            after = _compressed(A, self.prior, self.rank, before)
        posterior = WeightPosterior(step.mean, self.intercept, after, after)
        # coefficients less what the prior explains
        dof = np.sum(1.0 - self.prior * posterior.coefficient_variance())
        nothing = dict.fromkeys(("n_mvm", "n_newton", "n_passes", "evidence_std"), 0)
        attributes = dict(dof=dof, average=given_node(), **nothing)
        return BinaryFit(posterior, result.history, result.reason, step.objective, attributes)


def plan_stream(estimator, d):
    """Return the `BatchPlan` for d features, or raise a ValueError that names a parameter."""
    if is_flat(estimator):
        raise ValueError("partial_fit needs a finite intercept_prior_variance.")
    variance = getattr(estimator, "prior_variance_", given_variance(estimator))
    if np.ndim(variance) > 1:
        raise ValueError("partial_fit cannot go on from prior variances learned for each class.")
    prior = 1.0 / prior_variances(estimator, d, variance)
    if len(prior) > SIZES.stream and estimator.stream_rank is None:
        raise ValueError(
            f"stream_rank must be given for more than {SIZES.stream} coefficients, got "
            f"{len(prior)}: 0 keeps the diagonal of the precision, 30 much of the rest, too."
        )
    of_fit = bool(estimator.fit_intercept), estimator.bound, estimator.forgetting
    limits = Limits.of(estimator, SIZES.visits_a_step).outer
    return BatchPlan(prior, *of_fit, estimator.stream_rank, limits)


def _carried(plan, last):
    """Return the system of a posterior in the form in which streams are kept.

    Where variances were sampled, those of the coefficients are all that is known.
    """
    system = last.system
    if not len(last.rows) and isinstance(
        system, LowRankSystem if plan.solver == "dual" else LowRankSystem | PrimalSystem
    ):
        return system
    if not hasattr(system, "precision"):
        precision = 1.0 / last.coefficient_variance()
        if plan.solver == "dual":
            return LowRankSystem(precision, np.zeros((len(precision), 0)))
        return PrimalSystem.of(np.diag(precision))
    A = system.precision + last.rows.T @ (last.precision[:, None] * last.rows)
    if plan.solver == "primal":
        return PrimalSystem.of(A)
    return _compressed(_Precision.of(A), plan.prior, plan.rank, None)


def _forgotten(plan, system, mean):
    """Return the system of A0 and the mean m0."""
    g = plan.forgetting
    if g == 1.0:
        return system, mean
    if isinstance(system, LowRankSystem):
        old = g * system.times(mean)
        diagonal = g * system.diagonal + (1.0 - g) * plan.prior
        system = LowRankSystem(diagonal, np.sqrt(g) * system.factor)
    else:
        A = g * system.precision
        old = A @ mean
        A[np.diag_indices_from(A)] += (1.0 - g) * plan.prior
        system = PrimalSystem.of(A)
    return system, system.solve(old)


def _primal(B, sites, system, mean, limits):
    """Fit a batch with all columns in a matrix; return result, step, system and what A now is."""
    prior = CarriedPrior(mean, system.precision, system.log_det)
    loop = NaturalGradient(PartRows(B, sites).sums, prior, len(mean))
    result = loop.solve(loop.start(mean), **limits)
    step = result.evaluation.payload
    return result, step, step.system, _Precision.of(step.system.precision)


class _Precision(NamedTuple):
    """A by its diagonal and the map V -> A V."""

    diagonal: np.ndarray
    times: Any

    @classmethod
    def of(cls, A):
        """Return a matrix in this form."""
        return cls(np.diagonal(A).copy(), lambda V: A @ V)


def _dual(B, sites, system, mean, limits):
    """Do the same in the space of the rows, s = B u with prior N(B mean, K); O(q^3) a step.

    The system is None: that of A is yet to be made.
    """
    K = weighted_inner(B, 1.0 / system.diagonal, B)
    product = B @ system.half.T
    K -= product @ product.T
    rows = _RowPosterior(K, B @ mean, sites)
    f = sites.penalty(rows.mean, np.diagonal(K).copy())
    start = np.stack([f.precision, f.precision * rows.mean - f.slope])
    acceleration = Anderson(depth=5, mixing=limits["damping"])
    result = iterate(rows.evaluate, start, acceleration=acceleration, repair=_positive, **limits)
    step = result.evaluation.payload
    moved = mean + system.solve(B.T @ step.mean)
    weight = result.x[0]

    def times(V):
        out = system.diagonal[:, None] * V + system.factor @ (system.factor.T @ V)
        return out + B.T @ (weight[:, None] * (B @ V))

    diagonal = system.diagonal + np.sum(system.factor**2, axis=1) + squared(B).T @ weight
    return result, step._replace(mean=moved), None, _Precision(diagonal, times)


def _positive(proposal, x, target):
    """Take the plain step for rows whose accelerated precision is not positive."""
    return np.where(proposal[0] > 0, proposal, target)


class _RowPosterior:
    """Natural-gradient steps on the precisions and shifts (2, q) of the sites of a batch."""

    def __init__(self, K, mean, sites):
        self.K, self.mean, self.sites = K, mean, sites

    def evaluate(self, x):
        """Map site parameters to their `Evaluation`.

        The payload is a `NaturalStep` whose mean is that of the dual variables, which K maps to the
        change of s.
        """
        precision, shift = x
        root = np.sqrt(precision)
        M = root[:, None] * self.K * root
        M[np.diag_indices_from(M)] += 1.0
        lower = checked_cholesky(M)
        half = triangular_inverse(lower) @ (root[:, None] * self.K)
        z = np.maximum(
            np.diagonal(self.K) - np.einsum("ij,ij->j", half, half),
            np.finfo(float).eps * np.diagonal(self.K),
        )
        right = shift - precision * self.mean
        moved = self.K @ right - half.T @ (half @ right)
        s, alpha = self.mean + moved, right - precision * moved
        f = self.sites.penalty(s, z)
        target = np.stack([f.precision, f.precision * s - f.slope])
        gap = target - x
        residual = max(np.max(np.abs(gap[0]) * z), np.max(np.abs(gap[1] - gap[0] * s) * np.sqrt(z)))
        objective = 0.5 * float(precision @ z - moved @ alpha) - float(np.sum(f.value))
        objective -= float(np.sum(np.log(np.diagonal(lower))))
        step = NaturalStep(alpha, None, 1.0, float(precision @ z), objective)
        metric = np.stack([z, np.sqrt(z)])
        return Evaluation(target, float(residual), metric, {"objective": objective}, step)


def _compressed(A, prior, rank, last):
    """Return the `LowRankSystem` nearest to A: its diagonal, and a low rank of what is beside it.

    Works on q (A - P) q, q = diag(A)^-1/2: the leading eigenvectors of what a diagonal e leaves,
    and e of what they leave, in turns, by power iteration from the last factor on.
    """
    total = A.diagonal
    q = 1.0 / np.sqrt(total)
    own = (total - prior) * q * q
    if rank == 0:
        return LowRankSystem(total, np.zeros((len(total), 0)))
    rank = min(rank, len(total))
    V = np.random.RandomState(0).standard_normal((len(total), rank))
    if isinstance(last, LowRankSystem) and last.factor.shape[1] == rank:
        # directions that were lost before get another chance
        V = q[:, None] * last.factor + 1e-3 * V
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
    return LowRankSystem(prior + e / (q * q), F / q[:, None])
