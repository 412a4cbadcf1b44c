"""The exact Gaussian posterior from visits to the rows: natural gradients with Anderson's steps.

The state is the precision A and the shift h of the posterior N(u, A^-1), u = A^-1 h. Given what the
rows and the prior say at (u, A), an undamped step is

    A+ = P + B' diag(pi) B,   h+ = P m0 + B' diag(pi) B u - B' f',

the natural-gradient step of length one on the bound, whose fixed points are the optima of the
double loop. One visit to the rows a step, and nothing a row has to remember (Khan and Lin 2017 give
the step for conjugate computations).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .._engine.loop import SILENT, Anderson, Evaluation, iterate
from ._parameters import in_log_scales
from ._rows import SiteSums, WholePosterior
from ._systems import PrimalSystem


class NaturalStep(NamedTuple):
    """A state of the loop: mean, the factorised precision, and what follows from a visit."""

    mean: np.ndarray
    system: Any
    scale: Any
    dof: float
    objective: float


@dataclass
class NaturalGradient:
    """The fixed-point map of one binary problem.

    `visit(posterior)` returns the `SiteSums` of all rows at a `WholePosterior`; `prior` is one of
    `_priors`; n is the number of coefficients.
    """

    visit: Any
    prior: Any
    n: int
    n_visits: int = field(default=0, init=False)

    def __post_init__(self):
        self._lower = np.tril_indices(self.n)

    def _visited(self, mean, root) -> SiteSums:
        self.n_visits += 1
        return self.visit(WholePosterior(mean, root))

    def start(self):
        """Return the state to start from, by one visit at zero."""
        scale, diagonal = self.prior.start_scale, np.diag_indices(self.n)
        sums = self._visited(np.zeros(self.n), None)
        # sites are weaker where their predictors have a variance; halved or doubled, the share
        # costs visits on nine sets, from 300 rows of a9a to separable ones; so do numbers below
        A = 0.4 * sums.gram
        A[diagonal] += self.prior.start_precision(scale)
        return self._pack(A, -sums.slope, scale)

    def _pack(self, A, h, scale):
        tail = np.log(np.atleast_1d(scale)) if self.prior.learn else []
        return np.concatenate([A[self._lower], h, tail])

    def _unpack(self, x):
        n, m = self.n, len(self._lower[0])
        A = np.zeros((n, n))
        A[self._lower] = x[:m]
        A += np.tril(A, -1).T
        return A, x[m : m + n], in_log_scales(self.prior, x[m + n :])

    def evaluate(self, x):
        """Map a state to its `Evaluation` by one visit; the payload is a `NaturalStep`."""
        A, h, scale = self._unpack(x)
        system = PrimalSystem.of(A)
        root, mean = system.half, system.solve(h)
        sums = self._visited(mean, root)
        m, variances = self.prior.n_sites, system.coefficient_variance()
        prior = self.prior.penalty(mean, variances[:m], scale)
        target = sums.gram
        target[np.diag_indices(self.n)] += prior.precision
        shift = target @ mean - sums.slope - prior.slope
        new_scale, change = scale, 0.0
        if self.prior.learn:
            new_scale = self.prior.new_scale(mean, prior, scale, system, sums.dof)
            new_scale = self.prior.clipped(new_scale)
            change = self.prior.scale_share * np.max(np.abs(np.log(new_scale / scale)))
        residual = max(
            np.max(np.abs(root @ (target - A) @ root.T)),
            np.max(np.abs(root @ (sums.slope + prior.slope))),
            change,
        )
        loss = sums.value + np.sum(prior.value) + 0.5 * prior.precision[m:] @ variances[m:]
        objective = 0.5 * (self.n - system.log_det) + self.prior.log_normaliser(scale) - loss
        step = NaturalStep(mean, system, scale, sums.dof, float(objective))
        record = {"objective": step.objective}
        metric = self._metric(np.diagonal(A))
        return Evaluation(
            self._pack(target, shift, new_scale), float(residual), metric, record, step
        )

    def _metric(self, diagonal):
        """Weights of Anderson's least squares: entries in posterior units, mirrored ones twice."""
        q = 1.0 / np.sqrt(diagonal)
        rows, columns = self._lower
        matrix = np.where(rows == columns, 1.0, np.sqrt(2.0)) * q[rows] * q[columns]
        n_scales = np.size(self.prior.start_scale) if self.prior.learn else 0
        return np.concatenate([matrix, q, np.full(n_scales, np.sqrt(self.n))])

    def solve(self, x, *, tol, max_iter, damping=1.0, monitor=SILENT):
        """Iterate from state x; see `loop.iterate` for the result."""
        return iterate(
            self.evaluate, x, max_iter=max_iter, tol=tol, damping=damping, monitor=monitor,
            acceleration=Anderson(depth=5, mixing=damping), accept=_no_fall,
        )  # fmt: skip


def _no_fall(current, candidate):
    """Accept an accelerated step unless it leads away.

    That is where it loses a share of the bound and makes the residual several times larger. Other
    falls are let through: plain steps in their place would cost the memory, and several times the
    visits.
    """
    before, after = current.record["objective"], candidate.record["objective"]
    grown = candidate.residual > 3.0 * current.residual
    return not (grown and after < before - 1e-3 * abs(before))
