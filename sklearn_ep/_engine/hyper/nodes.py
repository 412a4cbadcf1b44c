"""Average over hyperparameters: nodes about the mode of their posterior, weights, mixtures.

The posterior of hyperparameters phi in logs or logits is evidence times prior. A lattice along the
axes of its Hessian at the mode, explored as far as it carries mass, turns every question q to the
model into a sum (Rue, Martino and Chopin 2009, section 6.5)

    p(q | y) = sum_m w_m p(q | y, phi_m),    w_m proportional to Z(phi_m) p(phi_m).

A model declares its coordinates, their priors and bounds, and one function

    evaluate(phi, near) -> Node, or None where there is no posterior,

which runs EP at phi from what the `Node` near holds (from nothing where near is None), and raises
no error for want of convergence. Nothing here is random. `Nodes` make one of a *space*, which has
coordinates phi (T,) with `names`, `bounds` (T, 2) and a `log_prior` and maps them to the `point`
where a *problem* is evaluated, and gradients there back to phi.

A lattice, since the trapezoidal rule of a Gaussian errs by 2 exp(-2 pi^2 / h^2) in the step h:
.001 at 1.6; and an explored one, since these posteriors have ridges and one-sided tails.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..gaussian import eigen_curvature
from ..loop import SILENT, FitWatch, Told
from ..partition import Workers
from ..sites import one_copy
from .search import find_mode
from .smooth import Axes, SmoothDistribution, Star, between_nodes

Place = tuple[int, ...]

_WIDEST = 10.0  # length of an axis along which a given curvature is flat
_LOWER = 1.0  # nats by which a node may be below the normal distribution about the mode


class _Lattices(NamedTuple):
    """How a lattice is laid about a mode: probabilities are then within .01 of exact ones."""

    difference: float = 0.3  # step of the differences that give the Hessian, in each coordinate
    longest: float = 1.5  # length of an axis along which the Hessian is flat or not definite
    # range of the drop at the neighbours of the mode, over a Gaussian's, that needs no stretch
    fitting: tuple = (0.35, 2.5)
    stretch: tuple = (0.4, 2.0)  # range of the factor by which an axis is stretched at once
    stretches: int = 2  # how often axes are stretched
    better: float = 1.0  # nats above the mode from which a node starts a new search
    modes: int = 3  # how many modes a lattice is laid about, each better than the last


class _Stars(NamedTuple):
    """How a star is laid about a mode, and its surrogate checked."""

    fit: tuple = (0.6, 1.7)  # range of the variances along the axes that needs no second star
    tail: float = 0.8  # share of a Gaussian's slope at the end of an axis: below it, a long tail
    depth: float = 4.0  # nats below the mode at which a long tail is followed no further
    most: int = 4  # nodes on a side of an axis
    checks: int = 2  # points of the surrogate, and of its tails, for each coordinate in a round
    tempered: float = 0.4  # power of the surrogate from which points of its tails are drawn
    agrees: float = 0.9  # effective share of the points from which the surrogate counts as right


_LATTICE, _STAR = _Lattices(), _Stars()


class Spacing(NamedTuple):
    """Step of a lattice in sd, log density below the top at which it ends, and most nodes."""

    step: float
    depth: float
    most: int


# Probabilities are then within .01 of exact ones, by enumeration and importance sampling.
_SPACINGS = {1: Spacing(1.1, 5.0, 13), 2: Spacing(1.6, 5.5, 30), 3: Spacing(1.6, 4.2, 40)}


class PriorDensity(Protocol):
    """A proper prior density of phi (T,)."""

    def log_density(self, phi: np.ndarray) -> float:
        """Return the log density."""

    def slope(self, phi: np.ndarray) -> np.ndarray:
        """Return its gradient (T,)."""


class Node(NamedTuple):
    """A model at hyperparameters phi (T,).

    gradient (T,) is that of log evidence plus log prior; residual that of the sites; payload what
    predicts, and what a neighbour starts from.
    """

    phi: np.ndarray
    log_evidence: float
    log_prior: float
    gradient: np.ndarray
    residual: float
    payload: Any

    @classmethod
    def under(
        cls,
        prior: PriorDensity,
        phi: np.ndarray,
        log_evidence: float,
        slope: np.ndarray,
        residual: float,
        payload: Any,
    ) -> "Node":
        """Return the node of a log evidence with its gradient slope (T,), the prior added."""
        gradient = slope + prior.slope(phi)
        return cls(phi, log_evidence, prior.log_density(phi), gradient, residual, payload)

    @property
    def objective(self) -> float:
        """Log density of phi up to a constant."""
        return self.log_evidence + self.log_prior


Evaluate = Callable[[np.ndarray, "Node | None"], "Node | None"]


@dataclass(frozen=True)
class Nodes:
    """Nodes of a problem in a space of its hyperparameters.

    `problem.at(point, near, slopes)` gives from what a neighbour keeps what a node keeps, or None.
    This, the payload, has `log_evidence` and `residual` of EP, the gradient `slope` of the log
    evidence at the point, None where nobody asked, and `s`, the spread of the log lengths.
    """

    problem: Any
    space: Any

    def evaluate(self, phi: np.ndarray, near: Node | None, slopes: bool = True) -> Node | None:
        """Return the `Node` at phi (T,), or None where EP has no fixed point.

        Without `slopes` it has no gradient.
        """
        space, kept = self.space, None if near is None else near.payload
        found = self.problem.at(space.point(phi), kept, slopes)
        if found is None:
            return None
        log_prior, of_prior = space.log_prior(phi)
        gradient = np.full(len(phi), np.nan)
        if slopes:
            gradient = space.slopes(found.slope) + of_prior
        figures = found.log_evidence, log_prior, gradient, found.residual
        return Node(phi, *figures, found._replace(s=space.s))

    def of_rows(self, rows: np.ndarray) -> "Nodes":
        """Return those of some of the rows."""
        return Nodes(self.problem.of_rows(rows), self.space)

    def from_rows(self, rows: np.ndarray, node: Node) -> "Nodes":
        """Return those that start from what a `Node` of some rows tells of all."""
        return Nodes(self.problem.from_rows(rows, node), self.space)


class Average(NamedTuple):
    """Nodes with weights (M,) that sum to one, and the evidence they add up to.

    foretold is the share of the mass that is predicted for places next to the nodes, which were not
    visited; n_evaluations counts those of the model. Where quantiles of phi were asked for, smooth
    is the distribution between the nodes, and the nodes lie along axes. agreement is the effective
    share of points drawn from a star's surrogate when the model weighs them, None where none were
    drawn. n_without counts places within bounds without a posterior. n_inner is the effective
    number of hyperparameters beyond phi, which are at their mode at each node.
    """

    nodes: list[Node]
    weight: np.ndarray
    log_evidence: float
    foretold: float = 0.0
    n_evaluations: int = 1
    smooth: SmoothDistribution | None = None
    axes: Axes | None = None
    agreement: float | None = None
    n_without: int = 0
    n_inner: float = 0.0

    @classmethod
    def alone(cls, node: Node, axes: Axes | None = None) -> "Average":
        """Return the average over one node, as if phi were known."""
        axes = Axes(node.phi, np.eye(len(node.phi))) if axes is None else axes
        smooth = SmoothDistribution(node.phi[None], np.ones(1))
        return cls([node], np.ones(1), float(node.log_evidence), smooth=smooth, axes=axes)

    @property
    def phi(self) -> np.ndarray:
        """Coordinates of the nodes (M, T)."""
        return np.array([node.phi for node in self.nodes])

    def draw_near(self, which: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Return draws of phi (S, T) in phase with numbers (S,) of nodes already drawn."""
        assert self.smooth is not None
        return self.smooth.draw_near(self.phi, self.weight, which, rng)

    @property
    def heaviest(self) -> Node:
        """The node with the largest weight."""
        return self.nodes[int(np.argmax(self.weight))]

    def heavy(self, least: float = 1e-3) -> "Average":
        """Return the average without the nodes that weigh less, for questions that are dear."""
        kept = self.weight >= min(least, self.weight.max())
        nodes = [node for node, keep in zip(self.nodes, kept, strict=True) if keep]
        return self._replace(nodes=nodes, weight=self.weight[kept] / self.weight[kept].sum())

    @property
    def effective_number(self) -> float:
        """Number of equally heavy nodes that would be as concentrated."""
        return float(1.0 / np.sum(self.weight**2))


def log_weights_without(weight: np.ndarray, log_own: np.ndarray, copies: Any) -> np.ndarray:
    """Return log weights (M, n) of nodes with weight (M,) when each row is left out.

    The label of a row has its part in the weights: p(phi_k | the others) is proportional to
    weight_k / p(y_i | the others, phi_k), whose logs are log_own (M, n). One factor is taken for
    all copies (n,) of a row, since the first predicts the others; for less than one copy it has
    that power.
    """
    log_weight = np.log(weight)[:, None] - one_copy(copies) * log_own
    return log_weight - np.logaddexp.reduce(log_weight, axis=0)


def average_of(
    nodes: Sequence[Node],
    log_mass: np.ndarray,
    foretold: float = 0.0,
    n_evaluations: int = 1,
    least: float = 1e-3,
) -> Average:
    """Return the `Average` of nodes with log masses (M,), without those that weigh less."""
    log_evidence = float(np.logaddexp.reduce(log_mass))
    weight = np.exp(log_mass - log_evidence)
    return Average(list(nodes), weight, log_evidence, foretold, n_evaluations).heavy(least)


def integrate(
    evaluate: Evaluate,
    mode: Node,
    bounds: np.ndarray,
    n_jobs: int | None = None,
    monitor: FitWatch = SILENT,
    spacing: Spacing | None = None,
    curvature: np.ndarray | None = None,
) -> Average:
    """Return the `Average` over hyperparameters about their mode.

    Parameters
    ----------
    evaluate : callable
        See above; a function that joblib can send where there are several workers.
    mode : Node
        Where the search for the mode of evidence times prior ended; one without coordinates is
        the whole answer.
    bounds : ndarray of shape (T, 2)
        Outside there is no node.
    n_jobs : int or None, default=None
        Nodes of one shell are evaluated in parallel; answers do not depend on it.
    monitor : FitWatch, default=SILENT
        Told of each node, in a phase of its own.
    spacing : Spacing or None, default=None
        Of the lattice, for one to three coordinates; None takes the one measured for their number.
    curvature : ndarray of shape (T, T) or None, default=None
        Minus the Hessian of the log density at the mode, or about that; None takes it from
        differences of gradients, T evaluations.

    Notes
    -----
    9 to 45 evaluations for one to three coordinates, each from the state of a neighbour; beyond
    three, about 3 T: the star of `star_about`.
    """
    if len(mode.phi) == 0:
        return Average([mode], np.ones(1), mode.objective)
    with monitor.phase("integration over hyperparameters") as told:
        visits = Visits(evaluate, np.asarray(bounds), told, n_jobs)
        for modes_left in reversed(range(_LATTICE.modes)):
            axes = _axes_of(_curvature_at(visits, mode) if curvature is None else curvature)
            curvature = None
            if len(mode.phi) not in _SPACINGS:
                return star_about(visits, mode, axes @ axes.T, _LATTICE.longest**-2)
            used = _SPACINGS[len(mode.phi)] if spacing is None else spacing
            axes, known = _fitted_axes(visits, mode, axes, used.step)
            lattice = Lattice(mode, axes, used, known)
            lattice.explore(visits)
            best = max(lattice.visited(), key=lambda node: node.objective)
            if best.objective < mode.objective + _LATTICE.better or modes_left == 0:
                break
            mode = visits.better_mode(best)
    return lattice.average(visits)


class Visits:
    """Evaluations of the model at points within bounds, those of one call by `n_jobs` workers."""

    def __init__(
        self, evaluate: Evaluate, bounds: np.ndarray, told: Told, n_jobs: int | None = 1
    ) -> None:
        self.evaluate, self.bounds, self.told = evaluate, bounds, told
        self.workers = None if n_jobs == 1 else Workers(n_jobs)
        self.n_evaluations, self.n_without, self.asked = 0, 0, False

    def inside(self, phi: np.ndarray) -> bool:
        """Return whether phi (T,) is within the bounds, but for rounding.

        That may leave a mode beside the bound it is on, and all nodes along the bound with it.
        """
        low, high = (self.bounds + 1e-12 * np.abs(self.bounds) * [-1.0, 1.0]).T
        return bool(np.all((phi >= low) & (phi <= high)))

    def __call__(self, points: Iterable[np.ndarray], near: Sequence[Node]) -> list[Node | None]:
        """Return the nodes at points, each from its neighbour; None outside of the bounds."""
        points = list(points)
        inside = [self.inside(phi) for phi in points]
        pairs = zip(points, near, inside, strict=True)
        tasks = [(phi, node) for phi, node, here in pairs if here]
        if self.workers is None:
            found = list(starmap(self.evaluate, tasks))
        else:
            found = self.workers([(self.evaluate, *task) for task in tasks])
        self.n_evaluations += len(tasks)
        for node in found:
            self.n_without += node is None
            if node is not None:
                self.asked |= self.told({"log_density": node.objective})
        answers = iter(found)
        return [next(answers) if here else None for here in inside]

    def better_mode(self, node: Node) -> Node:
        """Return the mode that a search from a node finds."""

        def counted(phi: np.ndarray, near: Node | None) -> Node | None:
            self.n_evaluations += 1
            return self.evaluate(phi, near)

        return find_mode(counted, node.phi, self.bounds, node) or node


def sample_about(
    evaluate: Evaluate,
    mode: Node,
    bounds: np.ndarray,
    curvature: np.ndarray,
    n_jobs: int | None = None,
    monitor: FitWatch = SILENT,
    weighed: bool = True,
) -> Average:
    """Return the `Average` over two nodes along each of T axes about a mode.

    The nodes have the mean and the covariance of the normal distribution with this curvature (T,
    T). Their weights are those of importance sampling from it; unless `weighed` they are equal,
    which is right where the posterior is that distribution. A node that is more than one nat below
    it moves towards the mode, and a place out of bounds moves to the bound. Other parameters are as
    for `integrate`; 2 T evaluations, which need no gradients.
    """
    t = len(mode.phi)
    values, vectors = eigen_curvature(curvature, _WIDEST**-2)
    # eigenvectors would turn far where the curvature changes little, this root does not
    axes = np.linalg.inv(np.linalg.cholesky((vectors * values) @ vectors.T)).T
    with monitor.phase("integration over hyperparameters") as told:
        visits = Visits(evaluate, np.asarray(bounds), told, n_jobs)
        steps = np.sqrt(t) * np.concatenate([axes.T, -axes.T])
        nodes = _drawn_in(visits, mode, steps, 0.5 * t)
    log_volume = float(np.linalg.slogdet(axes)[1]) + 0.5 * t * np.log(2.0 * np.pi)
    if not nodes:
        return average_of([mode], np.array([mode.objective + log_volume]))
    away = np.linalg.solve(axes, np.array([node.phi - mode.phi for node in nodes]).T)
    log_mass = np.array([node.objective for node in nodes]) + 0.5 * np.sum(away**2, axis=0)
    log_mass += log_volume - np.log(len(nodes))
    if not weighed:
        log_mass[:] = np.logaddexp.reduce(log_mass) - np.log(len(nodes))
    return average_of(nodes, log_mass, n_evaluations=visits.n_evaluations)


def _drawn_in(visits: Visits, mode: Node, steps: np.ndarray, gaussian_drop: float) -> list[Node]:
    """Return the nodes that steps (k, T) from the mode lead to, or nearer to it."""
    low, high = visits.bounds.T
    found = visits(np.clip(mode.phi + steps, low, high), [mode] * len(steps))
    drop = np.array([np.inf if n is None else mode.objective - n.objective for n in found])
    far = np.flatnonzero(drop > gaussian_drop + _LOWER)
    nearer = np.where(np.isfinite(drop[far]), np.sqrt(gaussian_drop / drop[far]), 0.5)
    places = np.clip(mode.phi + nearer[:, None] * steps[far], low, high)
    for k, node in zip(far, visits(places, [mode] * len(far)), strict=True):
        found[k] = node
    return [node for node in found if node is not None]


def _axes_of(curvature: np.ndarray) -> np.ndarray:
    """Return axes (T, T), in columns, in which the posterior near the mode is about N(0, I)."""
    values, vectors = eigen_curvature(curvature, _LATTICE.longest**-2)
    return vectors / np.sqrt(values)


def _curvature_at(visits: Visits, mode: Node) -> np.ndarray:
    """Return minus the Hessian (T, T) of the log density at the mode.

    By forward differences of the gradient, backward ones at an upper bound; a coordinate whose
    neighbour has no posterior counts as known to one unit.
    """
    t = len(mode.phi)
    step = _LATTICE.difference
    steps = np.where(mode.phi + step <= visits.bounds[:, 1], step, -step)
    nodes = visits(mode.phi + np.diag(steps), [mode] * t)
    hessian = np.eye(t)
    for k, node in enumerate(nodes):
        if node is not None:
            hessian[k] = (mode.gradient - node.gradient) / steps[k]
    return hessian


def _fitted_axes(
    visits: Visits, mode: Node, axes: np.ndarray, step: float
) -> tuple[np.ndarray, dict[Place, Node | None]]:
    """Return axes whose lengths fit the drops at the neighbours of the mode, and these nodes.

    The Hessian at the mode may say little of a posterior that is not Gaussian.
    """
    t = len(mode.phi)
    axes, stale = axes.copy(), list(range(t))
    known: dict[Place, Node | None] = {}
    for stretches_left in reversed(range(_LATTICE.stretches + 1)):
        places = [_beside((0,) * t, k, sign) for k in stale for sign in (1, -1)]
        nodes = visits([mode.phi + step * (axes @ p) for p in places], [mode] * len(places))
        known.update(zip(places, nodes, strict=True))
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        factors = np.array([_stretch(mode, pair, 0.5 * step**2) for pair in pairs])
        if np.all(factors == 1.0) or not stretches_left:
            break
        axes[:, stale] *= factors
        stale = [k for k, factor in zip(stale, factors, strict=True) if factor != 1.0]
    return axes, known


def _stretch(mode: Node, pair: Iterable[Node | None], gaussian_drop: float) -> float:
    """Return the factor by which an axis is too short, 1 if it fits its pair of neighbours."""
    drops = [mode.objective - node.objective for node in pair if node is not None]
    if not drops:
        return _LATTICE.stretch[0]
    drop = sum(drops) / len(drops) / gaussian_drop
    if _LATTICE.fitting[0] <= drop <= _LATTICE.fitting[1]:
        return 1.0
    return float(np.clip(max(drop, 1e-300) ** -0.5, *_LATTICE.stretch))


def _beside(place: Place, k: int, sign: int) -> Place:
    """Return the neighbour of a place on the lattice along axis k."""
    return (*place[:k], place[k] + sign, *place[k + 1 :])


class Lattice:
    """Places z, whole numbers, of nodes at origin + step * axes @ z, as far as there is mass.

    Parameters
    ----------
    origin : Node
        The node at z = 0.
    axes : ndarray of shape (T, T)
        In columns.
    spacing : Spacing
        How far the nodes are apart, and where they end.
    known : dict, default={}
        Nodes that were visited before, by their places.
    """

    def __init__(
        self,
        origin: Node,
        axes: np.ndarray,
        spacing: Spacing,
        known: Mapping[Place, Node | None] = {},
    ) -> None:
        self.origin, self.axes, self.spacing = origin, axes, spacing
        self.nodes: dict[Place, Any] = {(0,) * len(origin.phi): origin, **known}

    @property
    def log_cell(self) -> float:
        """Log volume of a cell."""
        log_det = float(np.linalg.slogdet(self.axes)[1])
        return len(self.axes) * float(np.log(self.spacing.step)) + log_det

    def visited(self) -> list[Node]:
        """Return the nodes so far, in the order of visits."""
        return [node for node in self.nodes.values() if node is not None]

    def explore(self, visits: Visits) -> None:
        """Visit shell by shell the neighbours that are foretold to have mass."""
        while not visits.asked:
            floor = self.floor()
            told = [(p, teller) for p, (value, teller) in self._foretold().items() if value > floor]
            shell = dict(told[: self.spacing.most - len(self.nodes)])
            if not shell:
                break
            points = [self.origin.phi + self.spacing.step * (self.axes @ p) for p in shell]
            nodes = visits(points, [self.nodes[teller] for teller in shell.values()])
            self.nodes.update(zip(shell, nodes, strict=True))

    def floor(self) -> float:
        """Return the log density below which a node has no mass."""
        return max(node.objective for node in self.visited()) - self.spacing.depth

    def _foretold(self) -> dict[Place, tuple[float, Place]]:
        """Return log densities foretold for unvisited places, each with the node that tells it.

        By the tangent at the neighbour and the curvature of a Gaussian; the largest first.
        """
        floor, step = self.floor(), self.spacing.step
        told: dict[Place, tuple[float, Place]] = {}
        for place, node in self.nodes.items():
            if node is None or node.objective < floor:
                continue
            slope = node.gradient @ self.axes
            for k, sign in product(range(len(place)), (1, -1)):
                beside = _beside(place, k, sign)
                value = node.objective + sign * step * slope[k] - 0.5 * step**2
                if beside not in self.nodes and value > told.get(beside, (-np.inf,))[0]:
                    told[beside] = (value, place)
        return dict(sorted(told.items(), key=lambda item: (-item[1][0], item[0])))

    def smooth_average(self) -> Average:
        """Return the `Average` over all nodes above the floor, with the distribution between them.

        Importance weights need its tails: no node is left out for weighing little. The distribution
        keeps those below the floor as well: where the posterior is bent, tangents say of their
        places that they are the highest of all.
        """
        floor = self.floor()
        known = sorted((place, node) for place, node in self.nodes.items() if node is not None)
        places, nodes = map(list, zip(*known, strict=True))
        log_density = np.array([node.objective for node in nodes])
        kept = np.flatnonzero(log_density >= floor)
        average = average_of([nodes[k] for k in kept], self.log_cell + log_density[kept], least=0.0)
        axes = Axes(self.origin.phi, self.axes)
        if len(kept) == 1:
            return average._replace(axes=axes)
        # a spline through values far below the others would swing between those
        told = np.maximum(log_density, floor - self.spacing.depth), [n.gradient for n in nodes]
        smooth = between_nodes(axes, self.spacing.step, np.array(places), *map(np.array, told))
        return average._replace(smooth=smooth, axes=axes)

    def average(self, visits: Visits) -> Average:
        """Return the `Average`: cells are equal, what is beyond an edge counts with its node."""
        step, cell = self.spacing.step, self.log_cell
        mass = {place: [node.objective] for place, node in self.nodes.items() if node is not None}
        beyond = [-np.inf]
        for place, (value, teller) in self._foretold().items():
            if visits.inside(self.origin.phi + step * (self.axes @ place)):
                mass[teller].append(value)
                beyond.append(value)
        log_mass = cell + np.array([np.logaddexp.reduce(values) for values in mass.values()])
        foretold = float(np.exp(cell + np.logaddexp.reduce(beyond) - np.logaddexp.reduce(log_mass)))
        return average_of(self.visited(), log_mass, foretold, visits.n_evaluations)


def star_about(
    visits: Visits, mode: Node, cov: np.ndarray, flattest: float, rounds: int = 0
) -> Average:
    """Return the `Average` over a mode and nodes on both sides of it along each axis.

    cov (T, T) is about the covariance of phi, flattest the least curvature that counts. Where the
    surrogate's variances along the axes are far from one, a second star takes the covariance of the
    first. In each of the `rounds` the model is then evaluated at points of the surrogate and of its
    tails, which corrects the surrogate, until both agree.
    """
    values, vectors = eigen_curvature(np.linalg.inv(cov), flattest)
    # symmetric, so that the order of coordinates does not matter, and near the coordinates
    root = (vectors / np.sqrt(values)) @ vectors.T
    for again in (True, False):
        star = _laid(visits, mode, root)
        spread = np.linalg.eigvalsh(star.cov)
        if not again or (_STAR.fit[0] < spread[0] and spread[-1] < _STAR.fit[1]):
            break
        spread, vectors = np.linalg.eigh(root @ star.cov @ root.T)
        root = (vectors * np.sqrt(spread)) @ vectors.T
    agreement = None
    for _ in range(rounds):
        agreement = _corrected(visits, star)
        if agreement > _STAR.agrees:
            break
    weight = star.weights()
    nodes = [node for node, w in zip(star.nodes, weight, strict=True) if w > 0]
    log_evidence = mode.objective + star.found.log_total + float(np.linalg.slogdet(root)[1])
    smooth = star.found.distribution
    told = visits.n_evaluations, smooth, star.axes, agreement, visits.n_without
    return Average(nodes, weight[weight > 0], log_evidence, 0.0, *told)


def _laid(visits: Visits, mode: Node, root: np.ndarray) -> Star:
    """Return the `Star` about a mode along axes in the columns of root (T, T)."""
    reach = float(np.sqrt(max(len(mode.phi) + 0.5, 2.0)))
    up, down = (
        [_step_out(visits, mode, sign * axis, reach) for axis in root.T] for sign in (1.0, -1.0)
    )
    return Star(mode, Axes(mode.phi, root), reach, up, down)


def _step_out(
    visits: Visits, mode: Node, axis: np.ndarray, reach: float
) -> list[tuple[float, Node]]:
    """Return (place, node) on one side of an axis: one, or more where the tail is long.

    Nearer than the reach where there is no posterior there, and none where there is none at an
    eighth of it.
    """
    found: list[tuple[float, Node]] = []
    near, far = mode, reach
    while len(found) < _STAR.most:
        node = visits([mode.phi + far * axis], [near])[0]
        if node is None and not found and far > 0.2 * reach:
            far *= 0.5
            continue
        if node is None:
            break
        found.append((far, node))
        deep = node.objective < mode.objective - _STAR.depth
        if deep or far < reach or node.gradient @ axis < -_STAR.tail * far:
            break
        near, far = node, far + reach
    return found


def _corrected(visits: Visits, star: Star) -> float:
    """Evaluate the model at points of a surrogate and of its tails; return how near it was.

    This is the effective share of the points of the surrogate when the model weighs them.
    """
    n = _STAR.checks * len(star.slope)
    typical = star.typical(n)
    before = star.log_density(typical) + star.mode.objective
    found = [_asked_at(visits, star, zeta) for zeta in typical]
    for zeta in star.typical(n, _STAR.tempered):
        _asked_at(visits, star, zeta)
    star.smooth()
    log_ratio = np.array(found) - before
    ratio = np.exp(log_ratio - np.max(log_ratio))
    return float(np.sum(ratio) ** 2 / (len(ratio) * np.sum(ratio**2)))


def _asked_at(visits: Visits, star: Star, zeta: np.ndarray) -> float:
    """Return the model's log density at zeta (T,), by which the star is corrected."""
    phi = star.axes.centre + star.axes.root @ zeta
    near = min(star.nodes, key=lambda n: float(np.sum((n.phi - phi) ** 2)))
    node = visits([phi], [near])[0]
    if node is None:
        return -np.inf
    star.correct(zeta, node)
    return node.objective
