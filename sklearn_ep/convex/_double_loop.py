"""The exact fit of rows in memory: the double loop, and the average over the scale of the prior.

The double loop is a fixed-point map over marginal variances. Inner loop: at fixed variances z the
bound is a convex penalised loss in the weights, solved by Newton. Outer loop: z becomes the
marginal variances of the Gaussian posterior that the solution implies (Nickisch and Seeger 2009,
algorithm 1). The state of the shared loop is log z, followed by the log variances of the
coefficients where the prior needs them, and by the log scales of the prior where they are learnt.

One loop with natural-gradient steps on mean and precision in place of both, as the visits of
partitions have it, was tried: it factorises half as often, but under wide priors (300 x 50, prior
variance 100, local bound) it had not converged after 600 steps where this has after 6, and the
bound falls on the way.

The average has one coordinate phi, the log of a scale of all features. Its mode is found by the
loop itself; a node is a fit at its scale from the weights and variances of a neighbour. The bound
is stationary at its optimum: at these tolerances it is right to 1e-4 nats, and coefficients to 1e-3
of their standard deviations.
Nodes lie where the bound says, and weigh by the evidence of expectation propagation at its
optimum. The bound is lower by what the bound of each row by itself lacks, which grows with the
scale, so that weights by the bound would shrink coefficients too much.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .._engine.contracts import require
from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Average, Node, Spacing, average_of, integrate
from .._engine.loop import SILENT, Anderson, Evaluation, StepsOfPhase, iterate
from .._engine.quadrature import logistic_mixture, logistic_moments
from .._engine.sites import one_copy
from ._calibration import cavities
from ._parameters import in_log_scales, log_scales
from ._sites import Penalty
from ._systems import TINY

# Limits of a fit near the mode of the scale: no closer than weights of nodes need. Probabilities of
# 16 sets are within .001 of those at limits of 1e-5, and log evidence is within .003. Residuals of
# 3e-2 (.0007 and .0007) take a seventh more time.
_ROUGH = dict(tol=1e-1, inner_tol=1e-2)
# Of the nodes: posteriors of four small sets are as near to quadrature as at steps of 1.1.
_SPACING = Spacing(1.7, 5.5, 13)
# Slope of the log density at which a warm start keeps the place it has: nodes need no more.
_FLAT = 0.2
# Change of a log variance from which on the scale of a site is learned by Newton's steps. Further
# away these lead beyond the optimum, to where all coefficients are zero: of 60 sets 7 end there, of
# 40 others 3, by up to .69 nats. With .05, .1 and .4 evidences of the latter are within .04 nats.
_NEAR = 0.2


def minimise(problem, point, *, unit, scale, tol, max_iter):
    """Minimise a convex function from a point; return where that led, and the steps it took.

    A point has a `value` and its `gradient`. `problem.direction(point, gradient, rtol)` is a tuple
    whose first entry is d with H d = -gradient to a relative residual of `rtol`, H the Hessian, and
    `problem.moved(point, direction, length)` the point along it. Ends once the norm of the gradient
    times `unit` (n,) is below tol * scale.

    Inexact Newton with the forcing term min(0.1, sqrt(|g| / scale)) and Armijo backtracking. When
    the expected decrease is below the resolution of the objective one last full step is taken: it
    is within rounding of the minimum.
    """
    for n_steps in range(max_iter):
        slopes = point.gradient
        # of Python floats: beyond their range the ratio is infinite, and says what it should
        size = float(np.linalg.norm(unit * slopes)) / float(scale)
        if size <= tol:
            return point, n_steps
        d = problem.direction(point, slopes, max(min(0.1, np.sqrt(size)), 0.3 * tol / size))
        slope = float(slopes @ d[0])
        resolution = np.finfo(float).eps * (1.0 + abs(point.value))
        if -slope <= 64.0 * resolution:
            return problem.moved(point, d, 1.0), n_steps + 1
        slack, length = 8.0 * resolution, 1.0
        new = problem.moved(point, d, length)
        while new.value > point.value + 1e-4 * length * slope + slack:  # Armijo's share, as usual
            length *= 0.5
            if length < 1e-12:  # rounding hides any decrease
                return point, n_steps + 1
            new = problem.moved(point, d, length)
        point = new
    return point, max_iter


class Inner(NamedTuple):
    """A point of the inner problem: weights u (n,) and predictors s = B u (q,).

    `prior` and `site` are the penalties of the weights and of the rows, with their derivatives.
    """

    u: np.ndarray
    s: np.ndarray
    prior: Any
    site: Any
    design: Any

    @property
    def value(self):
        """The penalised loss."""
        return float(np.sum(self.prior.value) + np.sum(self.site.value))

    @property
    def gradient(self):
        """Its gradient (n,) in u, one product."""
        return self.prior.slope + self.design.tdot(self.site.slope)


class OuterStep(NamedTuple):
    """One evaluation of the outer map: the solution at z and the posterior it implies.

    `var` are the new variances of the rows, `prior` is the penalty of the prior, and `own` the
    variances of the coefficients with sites, at these.
    """

    inner: Inner
    system: Any
    var: np.ndarray
    scale: Any
    dof: float
    prior: Penalty
    own: np.ndarray
    objective: float

    @property
    def mean(self):
        """Posterior mean of the weights."""
        return self.inner.u

    def last(self):
        """Return the `Last` that a neighbour starts from."""
        return Last(self.inner.u, np.log(self.var), np.log(self.own / self.scale**2))

    def left_out(self, share=1.0):
        """Return the `Cavity` of rows without a share (q,) of their copies."""
        site = self.inner.site
        return cavities(self.inner.s, self.var, site.slope, site.precision, share)


class Last(NamedTuple):
    """Where a later fit can start: weights, and the state of the loop.

    `rows` are log variances of the rows, None before `at_rows`, `tail` is what follows them in the
    state. `phi` is the log scale apart from it, None unless that was averaged over. `system` is
    that of the posterior.
    """

    u: np.ndarray
    rows: Any
    tail: np.ndarray
    phi: float | None = None
    system: Any = None

    def at_rows(self, design):
        """Return the same for any rows, with their variances under the posterior. One product."""
        variances = self.system.row_variance(design.B)
        return self._replace(rows=np.log(np.maximum(variances, TINY)))


@dataclass
class DoubleLoop:
    """The fixed-point map for one binary problem with exact variances.

    `system` is the class of `_systems` that factorises. `inner_tol` is the relative gradient at
    which the inner loop ends, squared: systems are solved exactly, and convergence is quadratic.
    `of_scale` is the prior of the scale where its mode is wanted, not that of the bound alone.
    """

    design: Any
    sites: Any
    prior: Any
    system: Any
    inner_tol: float = 1e-4
    max_inner_iter: int = 50
    of_scale: Any = None
    n_newton: int = field(default=0, init=False)
    _near: bool = field(default=False, init=False)

    def __post_init__(self):
        user = "the double loop"
        require("factor", self.sites, ["penalty", "shift", "weight"], user)
        needed = ("penalty", "start_precision", "log_normaliser", "n_sites", "learn")
        require("prior", self.prior, needed, user)
        self.weight, n = self.sites.weight, self.design.shape[1]
        squares = self.design.squares_tdot(self.weight)
        self.unit = 1.0 / np.sqrt(np.where(squares > 0, squares, 1.0))
        size = float(np.linalg.norm(self.unit * self.design.tdot(self.sites.shift)))
        self.size = max(size, np.finfo(float).tiny)
        self.u = getattr(self.prior, "mean", np.zeros(n))
        self.s = self.design.B @ self.u

    def start(self, last=None):
        """Return the state to start from: that of an earlier fit, or Jacobi variances."""
        if last is not None:
            self.u = last.u.copy()
            self.s = self.design.dot(self.u)
            return np.concatenate([last.rows, last.tail])
        prior = self.prior
        diagonal = prior.start_precision(prior.start_scale)
        rows, coefficients = self.design.start_variances(diagonal, self.weight)
        own = coefficients[: prior.n_sites]
        return self._pack(rows, own, prior.start_scale, prior.start_scale)

    def _pack(self, rows, coefficients, scale, new_scale):
        own = np.log(coefficients / scale**2) if self.prior.n_sites else coefficients
        return np.concatenate([np.log(rows), own, log_scales(self.prior, new_scale)])

    def _unpack(self, x):
        q, m = self.design.shape[0], self.prior.n_sites
        scale = in_log_scales(self.prior, x[q + m :])
        return np.exp(x[:q]), np.exp(x[q : q + m]) * scale**2 if m else x[:0], scale

    def moved(self, point, d, length):
        """Return the `Inner` along a direction (of weights, and of predictors)."""
        u, s = point.u + length * d[0], point.s + length * d[1]
        z, own, scale = self._fixed
        return Inner(u, s, self.prior.penalty(u, own, scale), self.sites.penalty(s, z), self.design)

    def direction(self, point, gradient, rtol):
        """Return the Newton step of weights and predictors; `rtol` is for those that iterate."""
        system = self.system(self.design, point.prior.curvature, point.site.curvature)
        d = system.solve(-gradient)
        return d, self.design.dot(d)

    def evaluate(self, x):
        """Map log variances to their `Evaluation`; the payload is an `OuterStep`."""
        self._fixed = _, own, scale = self._unpack(x)
        limits = dict(unit=self.unit, scale=self.size, tol=self.inner_tol**2)
        start = self.moved(self, (0.0, 0.0), 0.0)
        inner, n_newton = minimise(self, start, max_iter=self.max_inner_iter, **limits)
        self.u, self.s = inner.u, inner.s
        self.n_newton += n_newton
        system = self.system(self.design, inner.prior.precision, inner.site.precision)
        new = np.maximum(system.training_variance(self.design), TINY)
        if self.prior.n_sites:
            own = system.coefficient_variance()[: self.prior.n_sites]
        dof, n_scales = float(inner.site.precision @ new), len(log_scales(self.prior, scale))
        prior, new_scale = self.prior.penalty(inner.u, own, scale), scale
        if self.prior.learn:
            new_scale = self.prior.new_scale(inner.u, prior, scale, system, dof, self.of_scale)
        target = self._pack(new, own, scale, new_scale)
        if not np.all(np.isfinite(target)):
            raise ImproperPosterior("variances are beyond the range of double precision")
        step = OuterStep(inner, system, new, scale, dof, prior, own, np.nan)
        step = step._replace(objective=self._bound(step))
        change = np.abs(target - x)
        residual = float(np.max(change))  # of a scale always the change that MacKay's update asks
        self._near |= not self.prior.n_sites or np.max(change[: len(change) - n_scales]) < _NEAR
        # with a prior of the scale its mode is wanted roughly, and MacKay's steps are as good
        if self.prior.learn and self.of_scale is None and self._near:
            new_scale = self.prior.newton_scale(inner.u, prior, scale, system, dof)
            target = self._pack(new, own, scale, new_scale)
        # in the least squares of the acceleration copies of a row count like rows
        tail = np.full(n_scales, np.sqrt(self.weight.sum()))
        metric = np.concatenate([np.sqrt(self.weight), np.ones(self.prior.n_sites), tail])
        own_density = self.of_scale.log_density(np.log(scale)) if self.of_scale else 0.0
        record = {"objective": step.objective + own_density}
        return Evaluation(target, residual, metric, record, step)

    def _bound(self, step):
        """Return the bound on the log evidence, with the variances of this very posterior."""
        site = self.sites.penalty(step.inner.s, step.var)
        explained = step.dof
        if self.prior.n_sites:
            explained += float(step.inner.prior.precision[: len(step.own)] @ step.own)
        loss = float(np.sum(site.value) + np.sum(step.prior.value))
        normaliser = self.prior.log_normaliser(step.scale)
        return 0.5 * (explained - step.system.log_det) + normaliser - loss


def not_lower(current, candidate):
    """Accept an accelerated step unless it lowers the bound beyond rounding, if there is one."""
    before, after = current.record["objective"], candidate.record["objective"]
    return not after < before - 1e-10 * abs(before)


@dataclass
class ExactFit:
    """The fits of one binary problem to rows in memory at any scale of the prior.

    `limits` are its `Limits`; `first` is the `Last` to start from where there is no neighbour of
    an average over the scale, or None.
    """

    design: Any
    sites: Any
    prior: Any
    system: Any
    limits: Any
    first: Last | None = None

    def averaged(self, last, monitor):
        """Return the same with a scale to average over, a `Last` at its mode, or None for either.

        None and None where there is nothing to average over. `last` is the `Last` of an earlier fit
        or None. The loop itself finds the scale, roughly, its prior taken into account: the mode
        only says where the nodes lie. Scales of groups keep the proportions that learning finds.
        """
        prior = self.prior
        if prior.of_scale is None:
            return None, None
        if prior.groups is not None:
            last, prior = None, prior.in_proportion(self.solved()[1].evaluation.payload.scale)
        fits = replace(self, prior=prior)
        with monitor.phase("search for the scale of the prior") as told:
            watch = StepsOfPhase(told)
            if last is not None and last.phi is not None:
                result = fits.at(last.phi).solved(last, watch, **_ROUGH)[1]
                if abs(fits.node(last.phi, result).gradient[0]) < _FLAT:
                    return replace(fits, first=last), last
                last = last._replace(tail=np.append(last.tail, last.phi))
            result = fits.solved(last, watch, of_scale=prior.of_scale, **_ROUGH)[1]
        step = result.evaluation.payload
        phi = float(np.log(step.scale))
        near = fits.node(phi, result)
        # the loop's own steps are too short where rows are few; this one is Newton's
        move = float(np.clip(near.gradient[0] / fits._curvature(phi, step), -1.0, 1.0))
        last = near.payload.last()
        return replace(fits, first=last), last._replace(phi=phi + move)

    def _curvature(self, phi, step):
        """Return about the curvature of the log density of the log scale phi, at an `OuterStep`.

        Half the sum of squared shrinkage factors: the Fisher information of the log of a variance
        that all coefficients share.
        """
        squares = step.system.squared_shrinkage(step.prior.precision)
        return 2.0 * self.prior.rate**2 * squares + self.prior.of_scale.curvature(phi)

    def at(self, phi):
        """Return the fits at the log scale alone."""
        return replace(self, prior=self.prior.known(float(phi)))

    def solved(self, last=None, monitor=SILENT, of_scale=None, **changes):
        """Return the `DoubleLoop` and its result from a `Last`; `changes` are those of limits."""
        limits = self.limits._replace(**changes)
        inner = limits.inner_tol, limits.max_inner_iter
        about = self.design.counting(), self.sites, self.prior, self.system
        loop = DoubleLoop(*about, *inner, of_scale)
        acceleration = Anderson(depth=5, mixing=limits.damping, max_change=3.0)
        # whole steps go to and fro, further each time, next to separable rows under a wide prior
        steps = dict(acceleration=acceleration, accept=not_lower, backtracks=3, monitor=monitor)
        return loop, iterate(loop.evaluate, loop.start(last), **steps, **limits.outer)

    def __call__(self, phi, near):
        """Return the `Node` at phi (1,) from a neighbour; None where there is none."""
        last = self.first if near is None else near.payload.last()
        damping = self.limits.damping
        # where a start fails there is a careful one
        for start, share in ((last, damping), (None, 0.5 * damping)):
            try:
                result = self.at(phi[0]).solved(start, damping=share, **_ROUGH)[1]
            except ImproperPosterior:
                continue
            if result.residual < _ROUGH["tol"]:
                return self.node(phi[0], result)
        return None

    def node(self, phi, result):
        """Return the `Node` of a result of the double loop at a log scale."""
        step, phi = result.evaluation.payload, float(phi)
        about = step.inner.u, step.prior, float(np.exp(phi)), step.system, step.dof
        slope = self.prior.evidence_slope(*about)
        of_scale = self.prior.of_scale
        gradient = np.array([slope + of_scale.slope(phi)])
        told = of_scale.log_density(phi), gradient, result.residual, step
        return Node(np.array([phi]), step.objective, *told)

    def average(self, phi, result, n_jobs, monitor):
        """Return the `Average` over the log scale about phi, where the result is."""
        average = Average.alone(self.node(phi, result))
        if result.reason == "asked":
            return average
        curvature = np.array([[self._curvature(phi, result.evaluation.payload)]])
        bounds, mode = self.prior.of_scale.bounds()[None], average.heaviest
        return self._weighed(integrate(self, mode, bounds, n_jobs, monitor, _SPACING, curvature))

    def _weighed(self, average):
        """Return the average by the evidence of expectation propagation.

        Its logs are higher by the sum over rows of log Z given the cavity, less the bound on that.
        What the bounds of coefficients with sites of their own lack is not known.
        """
        log_mass = np.log(average.weight) + average.log_evidence
        if self.prior.n_sites:
            return average
        steps, weight = [node.payload for node in average.nodes], self.sites.weight
        each = [step.left_out(one_copy(weight) / weight) for step in steps]
        mean, var = np.array([[step.inner.s, step.var] for step in steps]).swapaxes(0, 1)
        left_mean, left_var = np.array([left[:2] for left in each]).swapaxes(0, 1)
        log_z = logistic_moments(self.sites.sign * left_mean, np.nan_to_num(left_var))[0]
        share = var / left_var
        divergence = 0.5 * (share - 1.0 - np.log(share) + (mean - left_mean) ** 2 / left_var)
        gap = log_z + logistic_mixture(-self.sites.sign * mean, var)[1] + divergence
        # of part of a copy it is about the square of the part
        lacking = np.where(np.isfinite(gap), gap, 0.0) @ (weight * one_copy(weight))
        pairs = zip(average.nodes, lacking, strict=True)
        nodes = [n._replace(log_evidence=n.log_evidence + more) for n, more in pairs]
        return average_of(nodes, log_mass + lacking, average.foretold, average.n_evaluations)

    def mean_scale(self, phi, given):
        """Return exp of the mean log scale phi: a number, or for groups one a feature.

        In units of the prior of the coefficients that was `given`.
        """
        centre = float(np.exp(phi))
        if given.groups is None:
            return centre
        return centre * self.prior.unit_variances() / given.unit_variances()
