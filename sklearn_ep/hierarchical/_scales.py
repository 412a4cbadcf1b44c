"""Posterior of the scales: its mode, a few nodes about it, and a smooth distribution through them.

For one or two coordinates and cheap nodes an even lattice is grown along the axes of the posterior
while there is mass. Elsewhere a star of two nodes an axis tells values and gradients of the log
density; the surrogate through them is skew where the posterior is. Quantiles and draws
are of one smooth distribution, never of the nodes themselves.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicHermiteSpline, CubicSpline
from scipy.ndimage import map_coordinates
from scipy.special import logsumexp
from scipy.stats import norm, qmc

from .._engine.gaussian import ImproperPosterior, eigen_curvature
from .._engine.hyper import Lattice, Node, Spacing, Visits
from .._engine.loop import Reason, Trace, reason_to_end, worst_reason

__all__ = ["ScaleGrid", "SmoothScales", "explore", "grid_of_one", "normal_scales"]

_LOOSE = 3.0  # times tol: log evidence is stationary in the sites, its error of second order
_ROUGH, _SHARE = 0.1, 0.03  # tolerance of sites far from the mode, and as a share of the next step
_COUNTS = 1e-3  # weight of a node whose sites have to have settled
_SETTLED = 0.01  # residual at such a node up to which its log evidence is as good as exact
_STEP = 1.25  # sd between nodes: the trapezoidal rule of a Gaussian is then exact to 6e-6
_DEPTH = 8.0  # log density below the largest at which the lattice ends
_USUAL, _MOST = {1: 12, 2: 45}, {1: 60, 2: 120}  # nodes of a lattice: as a rule, and at most
_REACH = 4.5  # of the lattice from the prior mean, in sd of the prior: there it has lost 10 nats
_LEAST_REACH = 1.0  # of the lattice from its centre
_DECREMENT = 0.05  # of Newton's method, at which the mode is near enough for the axes
_MOST_PASSES = 200  # at the mode; 30 elsewhere
_NEARER = 0.9  # of the last residual, above which sites at the mode are stuck
_LEVEL = 0.05  # of log density that a step may lose: what sites within tol may be off
_LEAST_CURVATURE = 0.3  # in units of the prior's, for flat tails
# Of a lattice, by its usual nodes: a fit of a second. Against Gibbs runs of six models the ends of
# a star's intervals are within .12 sd, .41 in one of them, and those of the lattice within .05.
_LATTICE_FLOPS = 3e8
_PASSES = 3.0  # that a node takes, sites being warm
# Of a star's surrogate, by as many nodes of its own and of its tails, 2 for each of three or more
# coordinates in up to four rounds. Two slopes by 30 groups, six coordinates, three sets: the ends
# of intervals are up to .8 sd off without them.
_CHECKS, _ROUNDS, _FEWEST_CHECKED = 2, 4, 3
_TEMPERED = 0.4  # power of the surrogate from which those of its tails are
_AGREES = 0.9  # effective share of these nodes from which the surrogate is right
_AXES_FIT = 0.6, 1.7  # variances along the axes of a star within which it need not be laid anew
_WIDER = 0.7  # power of the axes' densities that points are drawn from: none is then heavy
_LOG2_POINTS = 13  # of the smooth distribution: quantiles are then within .002 sd
_DIFFERENCE = 1e-3  # sd, of slopes of the surrogate
_MOST_OFF, _FADE = 6.0, 0.05  # nats that one check may correct; weight at which corrections fade
_BALANCED, _MOST_BALANCING = 1e-4, 500  # change of the masses that ends the balancing of both
_MESH = 400  # points of a density along an axis
_BEYOND = 4.0  # sd to which a star's surrogate goes on beyond its nodes
_PAD = 3  # places around a lattice, so that a spline does not feel its border
_TAIL = 0.8  # of the slope of a Gaussian: a slope below it at the end of an axis is a long tail
_TAIL_DEPTH = 4.0  # log density below the mode at which a long tail is not followed further
_MOST_OUT = 4  # nodes on a side of an axis


class Exploration(NamedTuple):
    """`ScaleGrid` with its nodes, the node at the mode, history of the search, why it ended.

    remark says what besides the residual of the mode is not as it should be; rule how theta was
    treated: "grid", "star" or "mode".
    """

    grid: "ScaleGrid"
    nodes: list[Node]
    mode: Node
    trace: Trace
    reason: Reason
    remark: str
    rule: str


def explore(model, start, tol, max_iter, rule, monitor, cov=None):
    """Return the `Exploration` of the posterior of theta: mode, axes there, nodes along these.

    start is (theta, sites), cov the covariance of theta if that is known; the sites at the mode are
    brought to tol, those elsewhere to a few times of it. rule is "grid" for a lattice where it is
    affordable and a star elsewhere, "star", or "mode" for the mode alone.
    """
    loose = _LOOSE * tol
    search = find_mode(model, start, loose, tol, max_iter, monitor, cov)
    mode = search.node
    if rule == "mode":
        grid = grid_of_one(mode, axes_at(model, mode, loose))
        grid = grid._replace(log_evidence=mode.log_evidence)
        return Exploration(grid, [mode], mode, search.trace, search.reason, "", rule)
    by_lattice = rule == "grid" and affords_lattice(model)
    with monitor.phase("integration over theta") as told:
        if by_lattice:
            grid, nodes = grow_grid(model, axes_at(model, mode, loose), mode, loose, told)
        else:
            grid, nodes = lay_star(model, mode, search.inverse, loose, told)
    worst = max(
        n.residual for n, weight in zip(nodes, grid.weight, strict=True) if weight > _COUNTS
    )
    reason, remark = search.reason, ""
    if worst >= max(loose, _SETTLED):
        reason = worst_reason([reason, "max_iter"])
        remark = f"at a node in the scales the residual is {worst:.3g}"
    rule = "grid" if by_lattice else "star"
    return Exploration(grid, nodes, mode, search.trace, reason, remark, rule)


def affords_lattice(model):
    """Say whether a lattice in theta is worth its cost: few coordinates, cheap passes."""
    t = len(model.theta_mean)
    return t in _USUAL and _USUAL[t] * _PASSES * model.flops() <= _LATTICE_FLOPS


class ModeSearch(NamedTuple):
    """Node at the mode, inverse Hessian there, history of the search, and why it ended."""

    node: Node
    inverse: np.ndarray
    trace: Trace
    reason: Reason


def find_mode(model, start, tol, final_tol, max_iter, monitor, cov=None):
    """Return the `ModeSearch` for theta by BFGS on free gradients, a step an iteration.

    start is (theta, sites). The first inverse Hessian is cov, or that of scales whose effects were
    known. Far from the mode a pass or two of the sites are enough; they are brought to `tol` on the
    way to it and to `final_tol` at the end.
    """
    trace, share, site_tol, last = Trace(monitor), 1.0, _ROUGH, np.inf
    inverse = np.diag(1.0 / _known_curvature(model)) if cov is None else cov
    trace.begin()
    node = model.evaluate(*start, _ROUGH)
    while True:
        if not _settled(node, inverse):
            step = inverse @ node.gradient
            theta = node.phi + share * step / max(1.0, np.max(np.abs(step)))
            new = evaluate(model, site_tol, theta, node)
            if new is not None and _no_worse(new, node, inverse):
                inverse = _bfgs(inverse, new.phi - node.phi, node.gradient - new.gradient)
                node, share = new, 1.0
            else:  # where rough sites may have misled, finer ones are asked
                share, site_tol = 0.4 * share, max(tol, 0.3 * site_tol)
                if node.residual > site_tol:
                    node = model.evaluate(node.phi, node.payload.sites, site_tol)
        settled = _settled(node, inverse)
        site_tol = float(np.clip(_SHARE * _decrement(node, inverse), tol, site_tol))
        if settled:
            # rough sites may have hidden a slope: the search then goes on, with finer ones
            node = model.evaluate(node.phi, node.payload.sites, final_tol, _MOST_PASSES)
            settled, site_tol = _decrement(node, inverse) < 2.0 * _DECREMENT, final_tol
        trace.end({"residual": node.residual, "log_evidence": node.objective}, node)
        below = settled and node.residual < final_tol
        # sites that still come nearer to their fixed point are given another iteration
        stuck = settled and not below and node.residual > _NEARER * last
        last = node.residual if settled else np.inf
        reason = reason_to_end(trace, below, True, stuck, max_iter)
        if reason is not None:
            return ModeSearch(node, inverse, trace, reason)
        trace.begin()


def _decrement(node, inverse):
    """Return the length of the next step in posterior sd."""
    return float(np.sqrt(max(node.gradient @ inverse @ node.gradient, 0.0)))


def _settled(node, inverse):
    """Return whether a step would gain next to nothing."""
    return _decrement(node, inverse) < _DECREMENT


def _no_worse(new, node, inverse):
    """Return whether a step is taken: uphill, or to a smaller slope where values are rough."""
    uphill = new.objective > node.objective - _LEVEL
    return uphill or _decrement(new, inverse) < 0.5 * _decrement(node, inverse)


def _known_curvature(model):
    """Return the negative second derivatives (T,) of log density, were the effects known."""
    spans = zip(model.spans(), model.n_levels, strict=True)
    levels = np.concatenate([np.full(s.stop - s.start, n) for s, n in spans])
    return 0.5 * levels + 1.0 / model.theta_sd**2


def _bfgs(inverse, moved, lost):
    """Return the inverse Hessian updated by a step and the change of the negative gradient."""
    curvature = moved @ lost
    if curvature <= 1e-8 * np.linalg.norm(moved) * np.linalg.norm(lost):
        return inverse
    left = np.eye(len(moved)) - np.outer(moved, lost) / curvature
    return left @ inverse @ left.T + np.outer(moved, moved) / curvature


class Axes(NamedTuple):
    """Coordinates theta = centre + root zeta in which the posterior is near N(0, I)."""

    centre: np.ndarray
    root: np.ndarray


def axes_at(model, node, tol):
    """Return the `Axes` by differences of gradients at a node near the mode."""
    t = len(node.phi)
    width = 0.5 / np.sqrt(_known_curvature(model))
    hessian = np.empty((t, t))
    for k in range(t):
        ends = [
            model.evaluate(node.phi + s * width[k] * np.eye(t)[k], node.payload.sites, tol).gradient
            for s in (1.0, -1.0)
        ]
        hessian[k] = (ends[1] - ends[0]) / (2.0 * width[k])
    values, vectors = eigen_curvature(hessian, _least_curvature(model))
    root = vectors / np.sqrt(values)
    newton = root @ (root.T @ node.gradient)
    return Axes(node.phi + newton / max(1.0, np.max(np.abs(newton))), root)


def _least_curvature(model):
    return _LEAST_CURVATURE / np.max(model.theta_sd) ** 2


@lru_cache
def _even_points(t):
    """Return evenly spread points (N, T) of the unit cube."""
    points = qmc.Sobol(t, scramble=False).random_base2(_LOG2_POINTS)
    return points + 0.5 / len(points)


class SmoothScales:
    """Smooth distribution of theta: points (N, T) with masses (N,) that sum to one."""

    def __init__(self, points, mass):
        self.points, self.mass = points, mass

    def quantiles(self, levels, values_of):
        """Return quantiles (len(levels), Q) of functions of theta.

        `values_of` maps theta (m, T) to the functions (m, Q).
        """
        values = values_of(self.points)
        out = np.empty((len(levels), values.shape[1]))
        for k, column in enumerate(values.T):
            order = np.argsort(column)
            middle = np.cumsum(self.mass[order]) - 0.5 * self.mass[order]
            out[:, k] = np.interp(levels, middle, column[order])
        return out

    def coupling(self, nodes, weight):
        """Return probabilities (N, M) of points given each of nodes (M, T), near ones first.

        Weighed by the nodes they give the distribution back: the entropic coupling of both, by
        Sinkhorn's iteration.
        """
        mean = self.mass @ self.points
        apart = np.sqrt(self.mass)[:, None] * (self.points - mean)
        lower = np.linalg.cholesky(apart.T @ apart + 1e-12 * np.eye(len(mean)))
        white, places = (np.linalg.solve(lower, (a - mean).T).T for a in (self.points, nodes))
        gap = np.sum(white**2, 1)[:, None] - 2.0 * white @ places.T + np.sum(places**2, 1)
        kernel = np.exp(-0.5 * (gap - gap.min(1, keepdims=True)))
        scale = np.ones(len(weight))
        for _ in range(_MOST_BALANCING):
            rows = self.mass / (kernel @ scale)
            last, scale = scale, weight / (rows @ kernel)
            if np.max(np.abs(scale / last - 1.0)) < _BALANCED:
                break
        return rows[:, None] * kernel * scale / weight


def normal_scales(mean, cov):
    """Return the `SmoothScales` of a normal distribution of theta."""
    t = len(mean)
    if t == 0:
        return SmoothScales(np.zeros((1, 0)), np.ones(1))
    values, vectors = np.linalg.eigh(cov)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    points = mean + norm.ppf(_even_points(t)) @ root.T
    return SmoothScales(points, np.full(len(points), 1.0 / len(points)))


def _smoothed(axes, log_density, meshes, along):
    """Return (`SmoothScales`, log of the integral of the density in zeta, moments of zeta).

    `log_density` maps zeta (N, T) to its log density; along are log densities on the `meshes` of
    each axis, from whose product the points are drawn that are then weighed.
    """
    u, log_proposal = _even_points(len(meshes)), 0.0
    zeta = np.empty_like(u)
    for k, (mesh, values) in enumerate(zip(meshes, along, strict=True)):
        power = _WIDER if len(meshes) > 1 else 1.0
        cell, density = mesh[1] - mesh[0], np.exp(power * (values - values.max()))
        cdf = np.cumsum(0.5 * (density[1:] + density[:-1])) * cell
        zeta[:, k] = np.interp(u[:, k] * cdf[-1], np.r_[0.0, cdf], mesh)
        log_proposal = log_proposal + np.log(np.interp(zeta[:, k], mesh, density) / cdf[-1])
    log_mass = log_density(zeta) - log_proposal - np.log(len(zeta))
    total = logsumexp(log_mass)
    mass = np.exp(log_mass - total)
    smooth = SmoothScales(axes.centre + zeta @ axes.root.T, mass)
    return smooth, float(total), (mass @ zeta, (mass[:, None] * zeta).T @ zeta)


class ScaleGrid(NamedTuple):
    """Nodes theta (M, T) with weights (M,) that sum to one, and the distribution between them.

    log_density (M,) is that of the posterior of theta at the nodes, up to a constant; smooth is a
    `SmoothScales`; agreement is the effective share of points drawn from a star's surrogate when
    the model weighs them, None where that was not looked at.
    """

    theta: np.ndarray
    weight: np.ndarray
    log_density: np.ndarray
    axes: Axes
    smooth: SmoothScales
    log_evidence: float
    agreement: float | None = None

    def quantiles(self, levels, values_of):
        """Return quantiles (len(levels), Q) of functions of theta, as `SmoothScales` does."""
        return self.smooth.quantiles(levels, values_of)

    def draw(self, node, rng):
        """Return draws of theta (S, T) in phase with nodes (S,) already drawn."""
        if len(self.theta) == 1:
            mass = np.cumsum(self.smooth.mass)
            return self.smooth.points[_picked(mass, rng.uniform(size=len(node)))]
        out, given = np.empty((len(node), self.theta.shape[1])), self.coupling()
        for m in np.unique(node):
            at = np.flatnonzero(node == m)
            cdf = np.cumsum(given[:, m])
            out[at] = self.smooth.points[_picked(cdf, rng.uniform(size=len(at)))]
        return out

    def coupling(self):
        """Return what `SmoothScales.coupling` says of the nodes."""
        return self.smooth.coupling(self.theta, self.weight)


def _picked(cdf, u):
    return np.minimum(np.searchsorted(cdf, u * cdf[-1]), len(cdf) - 1)


def grow_grid(model, axes, first, tol, told):
    """Return (`ScaleGrid`, its nodes) of a lattice grown from the centre while there is mass.

    first is a `Node` to start sites from; `told` hears of each node.
    """
    t = len(axes.centre)
    spacing = Spacing(_STEP, _DEPTH, _MOST[t])
    visits = Visits(partial(evaluate, model, tol), _bounds(model, axes.centre), 1, told)
    origin = evaluate(model, tol, axes.centre, first)
    if origin is None:  # a Newton step from the mode that leads to no posterior
        origin, axes = first, axes._replace(centre=first.phi)
    lattice = Lattice(origin, axes.root, spacing)
    lattice.explore(visits)
    floor = lattice.floor()
    kept = [
        (p, n) for p, n in sorted(lattice.nodes.items()) if n is not None and n.objective > floor
    ]
    if len(kept) == 1:
        # sites that cannot settle give each node an evidence of its own, and the grid no width
        raise ImproperPosterior("the evidence leaps between neighbouring scales of the groups")
    nodes = [node for _, node in kept]
    log_density, place = np.array([n.objective for n in nodes]), np.array([p for p, _ in kept])
    total = logsumexp(log_density)
    smooth = _between(axes, nodes, place.reshape(len(nodes), t), log_density)
    theta, weight = np.array([n.phi for n in nodes]), np.exp(log_density - total)
    evidence = float(total + lattice.log_cell)
    return ScaleGrid(theta, weight, log_density, axes, smooth, evidence), nodes


def _between(axes, nodes, place, log_density):
    """Return the `SmoothScales` of nodes at whole places (M, T) of a lattice, by cubic splines."""
    low, shape = place.min(0) - _PAD, np.ptp(place, axis=0) + 1 + 2 * _PAD
    box = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1) + low
    slope = np.array([n.gradient for n in nodes]) @ axes.root
    values = _filled(box, place, log_density, slope)
    values -= values.max()

    def log_density_at(zeta):
        return map_coordinates(values, (zeta / _STEP - low).T, order=3, mode="nearest")

    meshes, along = [], []
    for k, n in enumerate(shape):
        knots = _STEP * (low[k] + np.arange(n))
        meshes.append(np.linspace(knots[_PAD - 1], knots[-_PAD], _MESH))
        marginal = logsumexp(values, axis=tuple(j for j in range(len(shape)) if j != k))
        along.append(CubicSpline(knots, marginal)(meshes[-1]))
    return _smoothed(axes, log_density_at, meshes, along)[0]


def _filled(box, place, log_density, slope):
    """Return log densities at places (..., T), those without a node from the nearest one.

    By its tangent and the curvature of a Gaussian.
    """
    gap = box.reshape(-1, 1, box.shape[-1]) - place
    nearest = np.argmin(np.sum(gap**2, 2), axis=1)
    moved = _STEP * gap[np.arange(len(gap)), nearest]
    guess = log_density[nearest] + np.sum((slope[nearest] - 0.5 * moved) * moved, 1)
    return guess.reshape(box.shape[:-1])


def _bounds(model, centre):
    """Return the box (T, 2) in which a lattice stays.

    The evidence is flat where scales vanish or are huge, so that the prior bounds the posterior;
    only where sites cannot settle does it go on, at a cost that grows with the scales.
    """
    far, near = _REACH * model.theta_sd, _LEAST_REACH * model.theta_sd
    low = np.minimum(model.theta_mean - far, centre - near)
    return np.column_stack([low, np.maximum(model.theta_mean + far, centre + near)])


def evaluate(model, tol, theta, near):
    """Return the `Node` of a model at theta, from the sites of `near`; None without posterior."""
    try:
        return model.evaluate(theta, near.payload.sites, tol)
    except (ImproperPosterior, FloatingPointError):
        return None


def lay_star(model, mode, inverse, tol, told):
    """Return (`ScaleGrid`, its nodes) of the mode and two nodes along each axis.

    inverse (T, T) is about the covariance of theta. Where the surrogate's variances along the axes
    are far from one the star is laid anew, by what the first one tells.
    """
    values, vectors = eigen_curvature(np.linalg.inv(inverse), _least_curvature(model))
    # symmetric, so that the order of factors does not matter, and near the coordinates themselves
    root = (vectors / np.sqrt(values)) @ vectors.T
    for again in (True, False):
        star = Star(model, mode, root, tol, told)
        spread = np.linalg.eigvalsh(star.cov)
        if not again or (_AXES_FIT[0] < spread[0] and spread[-1] < _AXES_FIT[1]):
            break
        spread, vectors = np.linalg.eigh(root @ star.cov @ root.T)
        root = (vectors * np.sqrt(spread)) @ vectors.T
    star.check(model, tol, told)
    return star.grid(), star.nodes


class Star:
    """Mode and two nodes along each of T axes, with a surrogate of the log density through them.

    root (T, T) has the axes in columns. Along an axis the surrogate interpolates values and slopes
    (cubic Hermite); across axes the slopes at the nodes give what is quadratic, z_j z_k, and what
    is skew, z_k^2 z_j.
    """

    def __init__(self, model, mode, root, tol, told):
        t = len(mode.phi)
        self.axes, self.reach = Axes(mode.phi, root), np.sqrt(max(t + 0.5, 2.0))
        self.top, self.slope = mode.objective, mode.gradient @ root
        self.checked: list[tuple[np.ndarray, float, np.ndarray]] = []
        self.agreement: float | None = None
        step_to = partial(self._step_out, partial(evaluate, model, tol), told)
        sides = [[step_to(mode, sign * axis) for axis in root.T] for sign in (1.0, -1.0)]
        self.nodes = [mode, *(out[0][1] for side in sides for out in side if out)]
        self.far = np.array([[out[0][0] if out else 0.0 for out in side] for side in sides])
        self.lines = [self._line(*line) for line in zip(*sides, root.T, self.slope, strict=True)]
        up, down = (
            np.array([out[0][1].gradient @ root if out else self.slope for out in side])
            for side in sides
        )
        width = np.maximum(self.far.sum(0), self.reach)[:, None]
        twist = (up - down) / width
        self.twist = np.triu(0.5 * (twist + twist.T), 1)
        self.skew = 4.0 * (up + down - 2.0 * self.slope) / width**2
        np.fill_diagonal(self.skew, 0.0)
        self.smooth, self.log_total, (self.mean, self.second) = self._surrogate()

    def _step_out(self, evaluate_at, told, mode, axis):
        """Return (place, node) on one side of an axis: one, or more where the tail is long.

        Nearer than the reach where there is no posterior there, and none where there is none at an
        eighth of it.
        """
        found: list[tuple[float, Node]] = []
        near, far = mode, self.reach
        while len(found) < _MOST_OUT:
            node = evaluate_at(mode.phi + far * axis, near)
            if node is None and not found and far > 0.2 * self.reach:
                far *= 0.5
                continue
            if node is None:
                break
            found.append((far, node))
            told({"log_density": node.objective})
            deep = node.objective < self.top - _TAIL_DEPTH
            if deep or far < self.reach or node.gradient @ axis < -_TAIL * far:
                break
            near, far = node, far + self.reach
        return found

    def _line(self, up, down, axis, slope):
        """Return places, values and slopes of the nodes along an axis, the mode among them."""
        beside = [(-place, node) for place, node in reversed(down)], up
        before, after = (
            [(p, n.objective - self.top, n.gradient @ axis) for p, n in side] for side in beside
        )
        return [np.array(a) for a in zip(*before, (0.0, 0.0, slope), *after, strict=True)]

    @property
    def cov(self):
        """Covariance (T, T) of the surrogate along the axes."""
        return self.second - np.outer(self.mean, self.mean)

    def check(self, model, tol, told):
        """Evaluate the model at points of the surrogate, and correct that, until they agree."""
        t = len(self.slope)
        cost = 2 * _CHECKS * t * _PASSES * model.flops()
        if t < _FEWEST_CHECKED or cost > _LATTICE_FLOPS:
            return
        for _ in range(min(_ROUNDS, int(_LATTICE_FLOPS / max(cost, 1.0)))):
            typical = self._typical(_CHECKS * t)
            before = self.log_density(typical) + self.top
            found = [self._check_at(model, tol, told, z) for z in typical]
            for z in self._typical(_CHECKS * t, _TEMPERED):
                self._check_at(model, tol, told, z)
            self.smooth, self.log_total, (self.mean, self.second) = self._surrogate()
            log_ratio = np.array(found) - before
            ratio = np.exp(log_ratio - np.max(log_ratio))
            self.agreement = float(np.sum(ratio) ** 2 / (len(ratio) * np.sum(ratio**2)))
            if self.agreement > _AGREES:
                break

    def _typical(self, n, power=1.0):
        """Return n points zeta of equal masses of the surrogate to a power, new ones each time."""
        shift = (0.5 + 0.31 * len(self.checked)) % 1.0
        at = _picked(np.cumsum(self.smooth.mass**power), (np.arange(n) + shift) / n)
        return np.linalg.solve(self.axes.root, (self.smooth.points[at] - self.axes.centre).T).T

    def _check_at(self, model, tol, told, zeta):
        """Return the log density at zeta (T,); keep what the interpolation misses there."""
        theta = self.axes.centre + self.axes.root @ zeta
        near = min(self.nodes, key=lambda n: float(np.sum((n.phi - theta) ** 2)))
        node = evaluate(model, tol, theta, near)
        if node is None:
            return -np.inf
        told({"log_density": node.objective})
        steps = zeta + _DIFFERENCE * np.vstack([np.eye(len(zeta)), -np.eye(len(zeta))])
        around = self._interpolated(np.vstack([zeta, steps])) + self.top
        slope = (around[1 : len(zeta) + 1] - around[len(zeta) + 1 :]) / (2.0 * _DIFFERENCE)
        more = node.objective - around[0], node.gradient @ self.axes.root - slope
        self.checked.append((zeta, *more))
        return node.objective

    def _surrogate(self):
        ends = [(places[0] - _BEYOND, places[-1] + _BEYOND) for places, _, _ in self.lines]
        meshes = [np.linspace(*end, _MESH) for end in ends]
        along = [self._along(k, mesh) for k, mesh in enumerate(meshes)]
        return _smoothed(self.axes, self.log_density, meshes, along)

    def _along(self, k, z):
        """Return the log density along axis k; beyond the nodes by tangent and unit curvature."""
        places, values, slopes = self.lines[k]
        inside = np.clip(z, places[0], places[-1])
        out, beyond = np.zeros_like(z), z - inside
        if len(places) > 1:
            out = CubicHermiteSpline(places, values, slopes)(inside)
        return out + np.where(z > 0, slopes[-1], slopes[0]) * beyond - 0.5 * beyond**2

    def log_density(self, zeta):
        """Return the surrogate at zeta (N, T): what interpolates the star, corrected by checks.

        The corrections are tangents at the points that were checked, blended by how near they are;
        where none is near they fade out.
        """
        out = self._interpolated(zeta)
        if not self.checked:
            return out
        places, values, slopes = (np.array(a) for a in zip(*self.checked, strict=True))
        gap = zeta[:, None] - places
        near = np.exp(-0.5 * np.sum(gap**2, axis=2) / self.blur**2)
        tangent = np.clip(values + np.einsum("nmt,mt->nm", gap, slopes), -_MOST_OFF, _MOST_OFF)
        return out + np.sum(near * tangent, 1) / (np.sum(near, 1) + _FADE)

    @property
    def blur(self):
        """Distance in sd over which a correction holds: that of neighbours among the points."""
        return np.sqrt(len(self.slope) / 2.0)

    def _interpolated(self, zeta):
        """Return what interpolates the star, its cross terms bounded by those at the nodes."""
        out = sum(self._along(k, z) for k, z in enumerate(zeta.T))
        held = np.clip(zeta, -self.reach, self.reach)
        out += np.einsum("nj,jk,nk->n", held, self.twist, held)
        return out + 0.5 * np.einsum("nk,kj,nj->n", held**2, self.skew, held)

    def grid(self):
        """Return the `ScaleGrid`, its weights with the surrogate's moments along each axis."""
        square, (up, down) = np.diagonal(self.second), self.far
        known = np.r_[up, down] > 0
        width = np.maximum(up + down, 1e-300)
        with np.errstate(divide="ignore", invalid="ignore"):
            sides = np.r_[
                (square + self.mean * down) / (up * width),
                (square - self.mean * up) / (down * width),
            ]
        weight = np.maximum(np.r_[0.0, sides[known]], 0.0)
        weight[0] = max(1.0 - weight.sum(), 0.0)
        weight /= weight.sum()
        kept = weight > 0
        self.nodes = [node for node, keep in zip(self.nodes, kept, strict=True) if keep]
        theta = np.array([n.phi for n in self.nodes])
        log_density = np.array([n.objective for n in self.nodes])
        evidence = self.top + self.log_total + np.linalg.slogdet(self.axes.root)[1]
        more = self.axes, self.smooth, float(evidence), self.agreement
        return ScaleGrid(theta, weight[kept], log_density, *more)


def grid_of_one(node, axes=None):
    """Return the `ScaleGrid` of a single node, as if theta were known."""
    axes = Axes(node.phi, np.eye(len(node.phi))) if axes is None else axes
    smooth = SmoothScales(node.phi[None], np.ones(1))
    return ScaleGrid(
        node.phi[None], np.ones(1), np.zeros(1), axes, smooth, float(node.log_evidence)
    )
