"""Posterior of the scales of several factors: mode, axes, and an even grid grown along them."""

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import logsumexp, ndtr
from scipy.stats import norm

from .._engine.averaging import Lattice, Node, Spacing, Visits
from .._engine.gaussian import ImproperPosterior
from .._engine.loop import Reason, Trace, reason_to_end, worst_reason
from .._engine.search import eigen_curvature
from .partitions.theta_grid import smoothed_quantiles, smoothed_theta
from .partitions.theta_nodes import node_rule

__all__ = ["ScaleGrid", "explore", "grid_of_one"]

_LOOSE = 3.0  # times tol: log evidence is stationary in the sites, its error of second order
_COUNTS = 1e-3  # weight of a node whose sites have to have settled
_SETTLED = 0.01  # residual at such a node up to which its log evidence is as good as exact
_STEP = 1.25  # sd between nodes: the trapezoidal rule of a Gaussian is then exact to 6e-6
_WIDE_STEP = 1.5  # from four coordinates on: exact to 3e-4
_DEPTH = 8.0  # log density below the largest at which the grid ends
_MOST = 400  # nodes
_MOST_ALONG_ONE = 60  # nodes of a single scale, where 7 to 20 are usual
_REACH = 4.5  # of the lattice from the prior mean, in sd of the prior: there it has lost 10 nats
_LEAST_REACH = 1.0  # of the lattice from its centre
_DECREMENT = 0.1  # of Newton's method, at which the mode is near enough for the axes
_LEVEL = 0.05  # of log density that a step may lose: what sites within tol may be off
_LEAST_CURVATURE = 0.3  # in units of the prior's, for flat tails
_FINE = {1: 24, 2: 6, 3: 4}  # cells a step of the interpolated density


class Exploration(NamedTuple):
    """`ScaleGrid` with its nodes, the node at the mode, history of the search, why it ended.

    remark says what besides the residual of the mode is not as it should be; rule how theta was
    treated.
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

    start is (theta, `AllSites`), cov the covariance of theta if that is known; the sites at the
    mode are brought to tol, those elsewhere to a few times of it. rule is "grid", "gaussian" for
    the nodes of a quadrature rule, or "mode" for the mode alone.
    """
    loose = _LOOSE * tol
    search = find_mode(model, start, loose, tol, max_iter, monitor, cov)
    if rule == "mode":
        mode, axes = search.node, axes_at(model, search.node, loose)
        grid = grid_of_one(mode)._replace(log_evidence=mode.log_evidence, axes=axes)
        return Exploration(grid, [mode], mode, search.trace, search.reason, "", rule)
    place = grow_grid if rule == "grid" else few_nodes
    with monitor.phase("integration over theta") as told:
        grid, nodes = place(model, axes_at(model, search.node, loose), search.node, loose, told)
    rule = "gaussian" if grid.place is None else "grid"
    pairs = zip(nodes, grid.weight, strict=True)
    worst = max(n.residual for n, weight in pairs if weight > _COUNTS)
    reason, remark = search.reason, ""
    if worst >= max(loose, _SETTLED):
        reason = worst_reason([reason, "max_iter"])
        remark = f"at a node of the grid in the scales the residual is {worst:.3g}"
    return Exploration(grid, nodes, search.node, search.trace, reason, remark, rule)


class ModeSearch(NamedTuple):
    """ScaleNode at the mode, history of the search, and why it ended."""

    node: Node
    trace: Trace
    reason: Reason


def find_mode(model, start, tol, final_tol, max_iter, monitor, cov=None):
    """Return the `ModeSearch` for theta by BFGS on free gradients, a step an iteration.

    start is (theta, `AllSites`). The first inverse Hessian is cov, or that of scales whose effects
    were known. Sites are brought to `tol` on the way and to `final_tol` at the end.
    """
    trace, share = Trace(monitor), 1.0
    inverse = np.diag(1.0 / _known_curvature(model)) if cov is None else cov
    trace.begin()
    node = model.evaluate(*start, tol)
    while True:
        if not _settled(node, inverse):
            step = inverse @ node.gradient
            theta = node.phi + share * step / max(1.0, np.max(np.abs(step)))
            new = model.evaluate(theta, node.payload.sites, tol)
            if new.objective > node.objective - _LEVEL:
                inverse = _bfgs(inverse, new.phi - node.phi, node.gradient - new.gradient)
                node, share = new, 1.0
            else:
                share *= 0.4
        settled = _settled(node, inverse)
        if settled:
            node = model.evaluate(node.phi, node.payload.sites, final_tol)
        record = {"residual": node.residual, "log_evidence": node.objective}
        trace.end(record, node)
        below = settled and node.residual < final_tol
        reason = reason_to_end(trace, below, True, settled and not below, max_iter)
        if reason is not None:
            return ModeSearch(node, trace, reason)
        trace.begin()


def _settled(node, inverse):
    """Return whether a step would gain next to nothing."""
    return node.gradient @ inverse @ node.gradient < _DECREMENT**2


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
    least = _LEAST_CURVATURE / np.max(model.theta_sd) ** 2
    values, vectors = eigen_curvature(hessian, least)
    root = vectors / np.sqrt(values)
    newton = root @ (root.T @ node.gradient)
    return Axes(node.phi + newton / max(1.0, np.max(np.abs(newton))), root)


class ScaleGrid(NamedTuple):
    """Nodes theta (M, T) with weights (M,) that sum to one, and what is between them.

    log_density (M,) and gradient (M, T) are those of the posterior of theta at the nodes, up to a
    constant; place (M, T) is where they are on a lattice of `step` along the axes, None for nodes
    that are on no lattice; complete says whether the grid ended by itself.
    """

    theta: np.ndarray
    weight: np.ndarray
    log_density: np.ndarray
    gradient: np.ndarray
    axes: Axes
    place: np.ndarray | None
    step: float
    log_evidence: float
    complete: bool

    def quantiles(self, levels, values_of):
        """Return quantiles (len(levels), Q) of functions of theta.

        `values_of` maps theta (m, T) to the functions (m, Q). The log density on a lattice is
        interpolated by cubic splines along each axis; cells without a node take what the nearest
        node's tangent and unit curvature say.
        """
        if self.place is None or self.theta.shape[1] not in _FINE:
            return smoothed_quantiles(self.theta, self.weight, levels, values_of)
        zeta, weight, cell = self._fine()
        theta = self.axes.centre + zeta @ self.axes.root.T
        values = values_of(theta)
        # the spread within a cell, to first order
        shifted = [values_of(theta + 0.5 * cell * column) - values for column in self.axes.root.T]
        spread = np.sqrt(sum(s**2 for s in shifted) / 3.0)
        return _smooth_quantiles(values, spread, weight, np.asarray(levels))

    def draw(self, node, rng):
        """Return draws of theta (S, T) in phase with nodes already drawn."""
        white = rng.standard_normal((len(node), self.theta.shape[1]))
        return smoothed_theta(self.theta, self.weight, node, white)

    def _fine(self):
        """Return the points of a finer lattice (m, T), their weights and its step."""
        assert self.place is not None
        low, high = self.place.min(0), self.place.max(0)
        axes = [np.arange(a, b + 1.0) for a, b in zip(low, high, strict=True)]
        density = self._filled(np.stack(np.meshgrid(*axes, indexing="ij"), -1))
        fine = _FINE[len(low)]
        for k, axis in enumerate(axes):
            if len(axis) > 2:
                axes[k] = np.linspace(axis[0], axis[-1], fine * (len(axis) - 1) + 1)
                density = CubicSpline(axis, density, axis=k)(axes[k])
        zeta = self.step * np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(low))
        weight = np.exp(density.ravel() - density.max())
        kept = weight > 1e-9
        return zeta[kept], weight[kept] / weight[kept].sum(), self.step / fine

    def _filled(self, box):
        """Return log densities at places (..., T), those without a node from the nearest one."""
        slope = self.gradient @ self.axes.root
        gap = box.reshape(-1, 1, box.shape[-1]) - self.place
        nearest = np.argmin(np.sum(gap**2, 2), axis=1)
        moved = self.step * gap[np.arange(len(gap)), nearest]
        guess = self.log_density[nearest] + np.sum((slope[nearest] - 0.5 * moved) * moved, 1)
        return guess.reshape(box.shape[:-1])


def _smooth_quantiles(values, spread, weight, levels, halvings=50):
    """Return quantiles (L, Q) of mixtures of narrow normals, by bisection."""
    low = np.repeat(values.min(0)[None] - spread.max(0), len(levels), axis=0)
    high = np.repeat(values.max(0)[None] + spread.max(0), len(levels), axis=0)
    safe = np.maximum(spread, 1e-300)
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        mass = np.tensordot(ndtr((middle[:, None] - values) / safe), weight, (1, 0))
        below = mass < levels[:, None]
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return 0.5 * (low + high)


def grow_grid(model, axes, first, tol, told):
    """Return (`ScaleGrid`, its nodes) of a lattice grown from the centre while there is mass.

    first is a `Node` to start sites from; `told` hears of each node. From four coordinates on the
    step is wider, and a lattice that would have more than 400 nodes gives way to `few_nodes`.
    """
    t = len(axes.centre)
    most = _MOST if t > 1 else _MOST_ALONG_ONE
    spacing = Spacing(_STEP if t < 4 else _WIDE_STEP, _DEPTH, most)
    visits = Visits(partial(evaluate, model, tol), _bounds(model, axes.centre), 1, told)
    lattice = Lattice(evaluate(model, tol, axes.centre, first), axes.root, spacing)
    lattice.explore(visits)
    if not lattice.complete and t > 3:
        grid, nodes = few_nodes(model, axes, first, tol, told)
        return grid._replace(complete=False), nodes
    floor = lattice.floor()
    kept = [
        (p, n) for p, n in sorted(lattice.nodes.items()) if n is not None and n.objective > floor
    ]
    if len(kept) == 1:
        # sites that cannot settle give each node an evidence of its own, and the grid no width
        raise ImproperPosterior("the evidence leaps between neighbouring scales of the groups")
    nodes = [node for _, node in kept]
    place, none = np.array([p for p, _ in kept]).reshape(len(kept), t), np.zeros(len(nodes))
    more = place, spacing.step, lattice.log_cell, lattice.complete
    return _grid_of(nodes, none, axes, *more), nodes


def _bounds(model, centre):
    """Return the box (T, 2) in which a lattice stays.

    The evidence is flat where scales vanish or are huge, so that the prior bounds the posterior;
    only where sites cannot settle does it go on, at a cost that grows with the scales.
    """
    far, near = _REACH * model.theta_sd, _LEAST_REACH * model.theta_sd
    low = np.minimum(model.theta_mean - far, centre - near)
    return np.column_stack([low, np.maximum(model.theta_mean + far, centre + near)])


def evaluate(model, tol, theta, near):
    """Return the `Node` of a model at theta, from the sites of the node `near`."""
    return model.evaluate(theta, near.payload.sites, tol)


def few_nodes(model, axes, first, tol, told):
    """Return (`ScaleGrid`, its nodes) by the quadrature rule of a normal posterior of theta."""
    (zeta, log_rule), nodes = node_rule(len(axes.centre)), []
    for z in zeta:
        nodes.append(model.evaluate(axes.centre + axes.root @ z, first.payload.sites, tol))
        told({"log_density": nodes[-1].objective})
    base = log_rule - norm.logpdf(zeta).sum(1)
    cell = np.linalg.slogdet(axes.root)[1]
    return _grid_of(nodes, base, axes, None, 0.0, cell, True), nodes


def grid_of_one(node):
    """Return the `ScaleGrid` of a single node, as if theta were known."""
    axes = Axes(node.phi, np.eye(len(node.phi)))
    return _grid_of([node], np.zeros(1), axes, None, 0.0, 0.0, True)


def _grid_of(nodes, base, axes, place, step, log_cell, complete):
    """Return the `ScaleGrid` of nodes whose volumes have logarithms base (M,) + log_cell."""
    log_density = np.array([n.objective for n in nodes])
    total = logsumexp(log_density + base)
    weight = np.exp(log_density + base - total)
    theta, gradient = (np.array([getattr(n, a) for n in nodes]) for a in ("phi", "gradient"))
    evidence = float(total + log_cell)
    return ScaleGrid(theta, weight, log_density, gradient, axes, place, step, evidence, complete)
