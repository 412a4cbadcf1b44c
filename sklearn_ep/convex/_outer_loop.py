"""The double loop of convex variational inference as a fixed-point map over marginal variances.

Inner loop: at fixed variances z the bound is a convex penalised loss in the weights, solved by
Newton. Outer loop: z becomes the marginal variances of the Gaussian posterior that the solution
implies (Nickisch and Seeger 2009, algorithm 1). The state of the shared loop is log z, followed by
the log variances of the coefficients where the prior needs them, and by the log scale of the prior
where it is learnt.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior
from .._engine.loop import SILENT, Anderson, Evaluation, iterate
from .._engine.super_gaussian import LaplaceSites, Penalty
from ._newton import Inner, minimise
from ._systems import IterativeSystem
from ._variances import VarianceEstimate, start_variances

__all__ = ["OuterLoop", "GaussianPrior", "LaplacePrior", "Step"]

# Largest and smallest prior variance, or squared Laplace scale, that learning may reach.
_SCALE_RANGE = (1e-6, 1e6)
# What the outer loop calls of a prior.
PRIOR_NEEDS = ("penalty", "start_precision", "log_normaliser", "new_scale", "n_sites", "learn")
# A step may lower the bound by this share of it, the level of rounding.
_FALL = 1e-10


class GaussianPrior:
    """Independent N(0, scale * variance_j) coefficients; an infinite variance is a flat prior.

    The scale, learnt by evidence with `learn`, applies to the first `n_features` coefficients: an
    intercept, the last one, keeps its own prior.
    """

    n_sites, start_scale = 0, 1.0

    def __init__(self, variance, n_features, learn):
        self.variance, self.n_features, self.learn = variance, n_features, learn

    def precision(self, scale):
        """Return the prior precisions."""
        precision = 1.0 / self.variance
        precision[: self.n_features] /= scale
        return precision

    start_precision = precision

    def penalty(self, u, variances, scale):
        """Return the `Penalty` of weights u."""
        precision = self.precision(scale)
        slope = precision * u
        return Penalty(0.5 * slope * u, slope, precision, precision)

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty; flat priors add nothing."""
        precision = self.precision(scale)
        return 0.5 * float(np.sum(np.log(precision[precision > 0])))

    def new_scale(self, u, penalty, scale, predictor, dof):
        """Return MacKay's update of the scale: |u|^2 over the effective number of parameters."""
        d = self.n_features
        if len(u) > d:
            dof -= 1.0 - penalty.precision[d] * predictor.coefficient_variance()[d]
        return float(np.sum(u[:d] ** 2 / self.variance[:d])) / max(dof, np.finfo(float).tiny)


class LaplacePrior:
    """Independent Laplace coefficients of one scale, and a Gaussian intercept.

    Of `variance` (n,) only that of an intercept is used; learning by evidence starts at `scale`.
    """

    def __init__(self, variance, n_features, learn, scale, bound):
        self.variance, self.n_features, self.learn = variance, n_features, learn
        self.start_scale, self.n_sites, self.bound = scale, n_features, bound

    def start_precision(self, scale):
        """Return the precisions of a Gaussian prior with the same variances."""
        precision = 1.0 / self.variance
        precision[: self.n_features] = 0.5 / scale**2
        return precision

    def penalty(self, u, variances, scale):
        """Return the `Penalty` of weights u whose own variances are given."""
        d = self.n_features
        sites = LaplaceSites(1.0 / scale, self.bound).penalty(u[:d], variances)
        precision = 1.0 / self.variance[d:]
        slope = precision * u[d:]
        rest = Penalty(0.5 * slope * u[d:], slope, precision, precision)
        return Penalty(*(np.concatenate(pair) for pair in zip(sites, rest, strict=True)))

    def log_normaliser(self, scale):
        """Return what the prior adds to the bound besides its penalty."""
        precision = 1.0 / self.variance[self.n_features :]
        gaussian = 0.5 * float(np.sum(np.log(precision[precision > 0])))
        return gaussian + self.n_features * (0.5 * np.log(2.0 * np.pi) - np.log(2.0 * scale))

    def new_scale(self, u, penalty, scale, predictor, dof):
        """Return the scale that maximises the bound: the mean of the expected |u_j|."""
        return float(np.mean(penalty.value[: self.n_features])) * scale


class Step(NamedTuple):
    """One evaluation of the outer map: the solution at z and the posterior it implies."""

    inner: Inner
    system: Any
    estimate: VarianceEstimate
    scale: float
    dof: float
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
        tail = [np.log(scale)] if self.prior.learn else []
        return np.concatenate([np.log(rows), np.log(coefficients), tail])

    def _unpack(self, x):
        q, m = self.design.shape[0], self.prior.n_sites
        scale = float(np.exp(x[-1])) if self.prior.learn else self.prior.start_scale
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
            target_scale = min(max(target_scale, _SCALE_RANGE[0]), _SCALE_RANGE[1])
        target = self._pack(new, own, target_scale)
        if not np.all(np.isfinite(target)):
            raise ImproperPosterior("variances are beyond the range of double precision")
        step = Step(inner, system, estimate, scale, dof, np.nan)
        record = {}
        if self.variances.exact:
            step = step._replace(objective=self._bound(step, prior, own))
            record["objective"] = step.objective
        return Evaluation(target, self._residual(target - x), self._metric(), record, step)

    def _bound(self, step, prior, own):
        """Return the bound on the log evidence, with the variances of this very posterior."""
        site = self.sites.penalty(step.inner.s, step.estimate.training)
        explained = step.dof + float(step.inner.prior.precision[: len(own)] @ own)
        loss = float(np.sum(site.value) + np.sum(prior.value))
        normaliser = self.prior.log_normaliser(step.scale)
        return 0.5 * (explained - step.system.log_det) + normaliser - loss

    def _residual(self, change):
        """Largest change of a log variance; of sampled ones the mean square, their own scale."""
        if self.variances.exact:
            return float(np.max(np.abs(change)))
        q, m = self.design.shape[0], self.prior.n_sites
        parts = [self.weight @ change[:q] ** 2 / self.weight.sum()]
        if m:
            parts.append(np.mean(change[q : q + m] ** 2))
        if self.prior.learn:
            parts.append(change[-1] ** 2)
        return float(max(parts))

    def _metric(self):
        """Weights of Anderson's least squares: copies of a row count like rows."""
        tail = np.full(int(self.prior.learn), np.sqrt(self.weight.sum()))
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
