"""The double loop of convex variational inference as a fixed-point map over marginal variances.

Inner loop: at fixed variances z the bound is a convex penalised loss in the weights, solved by
Newton. Outer loop: z becomes the marginal variances of the Gaussian posterior that the solution
implies (Nickisch and Seeger 2009, algorithm 1). The state of the shared loop is log z, followed by
the log variances of the coefficients where the prior needs them, and by the log scales of the prior
where they are learnt.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior
from .._engine.loop import SILENT, Anderson, Evaluation, iterate
from .._engine.super_gaussian import Penalty
from ._newton import Inner, minimise
from ._priors import SCALE_RANGE
from ._systems import IterativeSystem
from ._variances import VarianceEstimate, start_variances

__all__ = ["OuterLoop", "Step"]

# What the outer loop calls of a prior.
PRIOR_NEEDS = ("penalty", "start_precision", "log_normaliser", "new_scale", "n_sites", "learn")
# A step may lower the bound by this share of it, the level of rounding.
_FALL = 1e-10


class Step(NamedTuple):
    """One evaluation of the outer map: the solution at z and the posterior it implies.

    `prior` is the penalty of the prior, and `own` the variances of the coefficients with sites, at
    the new variances.
    """

    inner: Inner
    system: Any
    estimate: VarianceEstimate
    scale: Any
    dof: float
    prior: Penalty
    own: np.ndarray
    objective: float


@dataclass
class OuterLoop:
    """The fixed-point map for one binary problem.

    `newton_system` and `posterior_system` are the classes of `_systems` for the inner loop and for
    the posterior with its variances. `inner_tol` is the relative gradient at which the inner loop
    ends, squared where systems are solved exactly.
    """

    design: Any
    sites: Any
    weight: np.ndarray
    prior: Any
    newton_system: Any
    posterior_system: Any
    variances: Any
    inner_tol: float
    max_inner_iter: int

    def __post_init__(self):
        user = "the outer loop"
        require("factor", self.sites, ["penalty", "shift"], user)
        require("prior", self.prior, PRIOR_NEEDS, user)
        require("variance estimator", self.variances, ["estimate", "exact"], user)
        size = float(np.linalg.norm(self.design.tdot(self.sites.shift)))
        self.scale = max(size, np.finfo(float).tiny)
        self.n_newton = 0
        q, n = self.design.shape
        self.u, self.s = np.zeros(n), np.zeros(q)
        self._first, self._data = True, None

    def start(self, last=None):
        """Return the state to start from: that of an earlier fit, or Jacobi variances."""
        if last is not None:
            self.u = last[0].copy()
            self.s = self.design.dot(self.u)
            self._first = False
            return last[1].copy()
        prior = self.prior
        diagonal = prior.start_precision(prior.start_scale)
        rows, coefficients = start_variances(self.design, diagonal, self.weight)
        return self._pack(rows, coefficients[: prior.n_sites], prior.start_scale)

    def _pack(self, rows, coefficients, scale):
        tail = np.log(np.atleast_1d(scale)) if self.prior.learn else []
        return np.concatenate([np.log(rows), np.log(coefficients), tail])

    def _unpack(self, x):
        q, m = self.design.shape[0], self.prior.n_sites
        scale: Any = self.prior.start_scale
        if self.prior.learn:
            scale = float(np.exp(x[-1])) if np.ndim(scale) == 0 else np.exp(x[q + m :])
        return np.exp(x[:q]), np.exp(x[q : q + m]), scale

    def _solve_inner(self, z, coefficients, scale):
        """Minimise the penalised loss at fixed variances, from the last solution."""

        def penalties(u, s):
            return self.prior.penalty(u, coefficients, scale), self.sites.penalty(s, z)

        def direction(point, gradient, rtol):
            system = self._newton(point.prior.curvature, point.site.curvature)
            return system.solve_with_product(self.design, -gradient, rtol=rtol)

        tol = self.inner_tol**2 if self.variances.exact else self.inner_tol
        if self._first and not self.variances.exact:
            tol = max(tol, 1e-2)
        limits = dict(scale=self.scale, tol=tol, max_iter=self.max_inner_iter)
        inner = minimise(penalties, self.design.tdot, direction, self.u, self.s, **limits)
        self.u, self.s, self._first = inner.u, inner.s, False
        self.n_newton += inner.n_newton
        return inner

    def _newton(self, diagonal, curvature):
        """Return the system of a Newton step; one that iterates keeps its preconditioner."""
        if self.newton_system is not IterativeSystem:
            return self.newton_system(self.design, diagonal, curvature)
        if self._data is None:
            self._data = self.design.squares_tdot(curvature)
        return IterativeSystem(self.design, diagonal, curvature, self._data)

    def evaluate(self, x):
        """Map log variances to their `Evaluation`; the payload is a `Step`."""
        z, coefficients, scale = self._unpack(x)
        inner = self._solve_inner(z, coefficients, scale)
        diagonal, precision = inner.prior.precision, inner.site.precision
        system = self.posterior_system(self.design, diagonal, precision)
        self._data = getattr(system, "data", self._data)
        estimate = self.variances.estimate(self.design, system, diagonal, precision)
        new, own = estimate.training, coefficients
        if self.prior.n_sites:
            own = estimate.predictor.coefficient_variance()[: self.prior.n_sites]
        dof = float(precision @ new)
        prior = self.prior.penalty(inner.u, own, scale)
        target_scale = scale
        if self.prior.learn:
            target_scale = self.prior.new_scale(inner.u, prior, scale, estimate.predictor, dof)
            target_scale = np.clip(target_scale, *SCALE_RANGE)
        target = self._pack(new, own, target_scale)
        if not np.all(np.isfinite(target)):
            raise ImproperPosterior("variances are beyond the range of double precision")
        step = Step(inner, system, estimate, scale, dof, prior, own, np.nan)
        record = {}
        if self.variances.exact:
            step = step._replace(objective=self.bound(step, system.log_det))
            record["objective"] = step.objective
        return Evaluation(target, self._residual(target - x), self._metric(), record, step)

    def bound(self, step, log_det):
        """Return the bound on the log evidence, with the variances of this very posterior."""
        site = self.sites.penalty(step.inner.s, step.estimate.training)
        explained = step.dof + float(step.inner.prior.precision[: len(step.own)] @ step.own)
        loss = float(np.sum(site.value) + np.sum(step.prior.value))
        normaliser = self.prior.log_normaliser(step.scale)
        return 0.5 * (explained - log_det) + normaliser - loss

    def _residual(self, change):
        """Largest change of a log variance; of sampled ones the mean square, their own scale."""
        n_scales = np.size(self.prior.start_scale) if self.prior.learn else 0
        change = change.copy()
        change[len(change) - n_scales :] *= self.prior.scale_share
        if self.variances.exact:
            return float(np.max(np.abs(change)))
        q, m = self.design.shape[0], self.prior.n_sites
        parts = [self.weight @ change[:q] ** 2 / self.weight.sum()]
        if m:
            parts.append(np.mean(change[q : q + m] ** 2))
        if self.prior.learn:
            parts.append(np.max(change[q + m :] ** 2))
        return float(max(parts))

    def _metric(self):
        """Weights of Anderson's least squares: copies of a row count like rows."""
        n_scales = np.size(self.prior.start_scale) if self.prior.learn else 0
        tail = np.full(n_scales, np.sqrt(self.weight.sum()))
        return np.concatenate([np.sqrt(self.weight), np.ones(self.prior.n_sites), tail])

    def solve(self, x, *, tol, max_iter, damping, monitor=SILENT):
        """Iterate from state x; see `loop.iterate` for the result."""
        limits = dict(max_iter=max_iter, tol=tol, damping=damping, monitor=monitor)
        acceleration = Anderson(depth=5, mixing=damping, max_change=3.0)
        accept = _not_lower if self.variances.exact else None
        return iterate(self.evaluate, x, acceleration=acceleration, accept=accept, **limits)


def _not_lower(current, candidate):
    """Accept an accelerated step unless it lowers the bound."""
    before, after = current.record["objective"], candidate.record["objective"]
    return after >= before - _FALL * abs(before)
