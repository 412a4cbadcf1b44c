"""Smooth distributions of hyperparameters through what a few nodes tell of their log density.

Between the nodes of a lattice cubic splines interpolate log densities. A star, which is the mode
with two nodes or more along each axis, gives values and gradients: its surrogate goes through both
and is skew where the posterior is. Quantiles and draws are of these distributions, never of the
nodes themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import CubicHermiteSpline, CubicSpline
from scipy.ndimage import map_coordinates
from scipy.special import logsumexp
from scipy.stats import norm, qmc

from ..gaussian import covariance_root


class _Resolution(NamedTuple):
    """How finely distributions are resolved: their quantiles are then within .002 sd."""

    log2_points: int = 13  # of a distribution
    wider: float = 0.7  # power of the axes' densities from which points are drawn: none is heavy
    mesh: int = 400  # points of a density along an axis
    beyond: float = 4.0  # sd to which a star's surrogate goes on beyond its nodes
    pad: int = 3  # places around a lattice, so that a spline does not feel its border
    difference: float = 1e-3  # sd, of slopes of the surrogate
    balanced: float = 1e-4  # change of the masses that ends the balancing of points and nodes
    most_balancing: int = 500
    farthest: float = 400.0  # squared gap in sd: a node far from all points has draws nevertheless


_FINE = _Resolution()
_MOST_OFF, _FADE = 6.0, 0.05  # nats that one check may correct; weight at which corrections fade


class Axes(NamedTuple):
    """Coordinates phi = centre + root zeta in which the posterior is near N(0, I)."""

    centre: np.ndarray
    root: np.ndarray


@lru_cache
def even_points(t: int, log2_points: int) -> np.ndarray:
    """Return 2 ** log2_points evenly spread points (N, T) of the open unit cube."""
    points = qmc.Sobol(t, scramble=False).random_base2(log2_points)
    return points + 0.5 / len(points)


@dataclass
class SmoothDistribution:
    """Distribution of phi by points (N, T) with masses (N,) that sum to one."""

    points: np.ndarray
    mass: np.ndarray

    def quantiles(
        self, levels: Sequence[float], values_of: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return quantiles (len(levels), Q) of functions of phi.

        `values_of` maps phi (m, T) to the functions (m, Q).
        """
        values = values_of(self.points)
        out = np.empty((len(levels), values.shape[1]))
        for k, column in enumerate(values.T):
            order = np.argsort(column)
            middle = np.cumsum(self.mass[order]) - 0.5 * self.mass[order]
            out[:, k] = np.interp(levels, middle, column[order])
        return out

    def draw_near(
        self, nodes: np.ndarray, weight: np.ndarray, which: np.ndarray, rng: np.random.RandomState
    ) -> np.ndarray:
        """Return draws (S, T) in phase with `which` (S,) of the nodes (M, T) was drawn."""
        out = np.empty((len(which), nodes.shape[1]))
        given = self.coupling(nodes, weight) if len(nodes) > 1 else self.mass[:, None]
        for m in np.unique(which):
            at = np.flatnonzero(which == m)
            out[at] = self.points[picked(given[:, m], rng.uniform(size=len(at)))]
        return out

    def coupling(self, nodes: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return probabilities (N, M) of points given each of nodes (M, T), near ones first.

        Weighed by the nodes they give the distribution back: the entropic coupling of both, by
        Sinkhorn's iteration.
        """
        mean = self.mass @ self.points
        apart = np.sqrt(self.mass)[:, None] * (self.points - mean)
        lower = np.linalg.cholesky(apart.T @ apart + 1e-12 * np.eye(len(mean)))
        white, places = (np.linalg.solve(lower, (a - mean).T).T for a in (self.points, nodes))
        gap = np.sum(white**2, 1)[:, None] - 2.0 * white @ places.T + np.sum(places**2, 1)
        gap -= gap.min(1, keepdims=True)
        kernel = np.exp(-0.5 * np.minimum(gap, _FINE.farthest))
        scale = np.ones(len(weight))
        for _ in range(_FINE.most_balancing):
            rows = self.mass / (kernel @ scale)
            last, scale = scale, weight / (rows @ kernel)
            if np.max(np.abs(scale / last - 1.0)) < _FINE.balanced:
                break
        return rows[:, None] * kernel * scale / weight


def picked(mass: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the points (len(u),) of masses (N,) at shares u of their sum."""
    cdf = np.cumsum(mass)
    return np.minimum(np.searchsorted(cdf, u * cdf[-1]), len(cdf) - 1)


def normal_distribution(mean: np.ndarray, cov: np.ndarray) -> SmoothDistribution:
    """Return the `SmoothDistribution` of N(mean, cov)."""
    t = len(mean)
    if t == 0:
        return SmoothDistribution(np.zeros((1, 0)), np.ones(1))
    points = mean + norm.ppf(even_points(t, _FINE.log2_points)) @ covariance_root(cov).T
    return SmoothDistribution(points, np.full(len(points), 1.0 / len(points)))


class _Smoothed(NamedTuple):
    """Distribution of phi, log of the integral of its density in zeta, and two moments of zeta."""

    distribution: SmoothDistribution
    log_total: float
    mean: np.ndarray
    second: np.ndarray


def _smoothed(
    axes: Axes,
    log_density: Callable[[np.ndarray], np.ndarray],
    meshes: list[np.ndarray],
    along: list[np.ndarray],
) -> _Smoothed:
    """Return what a log density of zeta comes to.

    `log_density` maps zeta (N, T) to its log density; along are log densities on the `meshes` of
    each axis, from whose product the points are drawn that are then weighed.
    """
    u, log_proposal = even_points(len(meshes), _FINE.log2_points), np.zeros(1)
    zeta = np.empty_like(u)
    for k, (mesh, values) in enumerate(zip(meshes, along, strict=True)):
        power = _FINE.wider if len(meshes) > 1 else 1.0
        cell, density = mesh[1] - mesh[0], np.exp(power * (values - values.max()))
        cdf = np.cumsum(0.5 * (density[1:] + density[:-1])) * cell
        zeta[:, k] = np.interp(u[:, k] * cdf[-1], np.r_[0.0, cdf], mesh)
        log_proposal = log_proposal + np.log(np.interp(zeta[:, k], mesh, density) / cdf[-1])
    log_mass = log_density(zeta) - log_proposal - np.log(len(zeta))
    total = logsumexp(log_mass)
    mass = np.exp(log_mass - total)
    smooth = SmoothDistribution(axes.centre + zeta @ axes.root.T, mass)
    return _Smoothed(smooth, float(total), mass @ zeta, (mass[:, None] * zeta).T @ zeta)


def between_nodes(
    axes: Axes, step: float, place: np.ndarray, log_density: np.ndarray, gradient: np.ndarray
) -> SmoothDistribution:
    """Return the distribution through log densities (M,) and their gradients (M, T) in phi.

    They are at whole places (M, T) of a lattice of this `step` in zeta; cubic splines interpolate.
    """
    low, shape = place.min(0) - _FINE.pad, np.ptp(place, axis=0) + 1 + 2 * _FINE.pad
    box = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1) + low
    values = _filled(box, step, place, log_density, gradient @ axes.root)
    values -= values.max()

    def log_density_at(zeta: np.ndarray) -> np.ndarray:
        return map_coordinates(values, (zeta / step - low).T, order=3, mode="nearest")

    meshes, along = [], []
    for k, n in enumerate(shape):
        knots = step * (low[k] + np.arange(n))
        meshes.append(np.linspace(knots[_FINE.pad - 1], knots[-_FINE.pad], _FINE.mesh))
        marginal = logsumexp(values, axis=tuple(j for j in range(len(shape)) if j != k))
        along.append(CubicSpline(knots, marginal)(meshes[-1]))
    return _smoothed(axes, log_density_at, meshes, along).distribution


def _filled(
    box: np.ndarray, step: float, place: np.ndarray, log_density: np.ndarray, slope: np.ndarray
) -> np.ndarray:
    """Return log densities at places (..., T), those without a node from the nearest one.

    By its tangent and the curvature of a Gaussian.
    """
    gap = box.reshape(-1, 1, box.shape[-1]) - place
    nearest = np.argmin(np.sum(gap**2, 2), axis=1)
    moved = step * gap[np.arange(len(gap)), nearest]
    change = np.sum((slope[nearest] - 0.5 * moved) * moved, 1)
    # nobody looked where the change is upwards, and tangents to a bent ridge lead off it
    return (log_density[nearest] + np.minimum(change, 0.0)).reshape(box.shape[:-1])


class Star:
    """Surrogate of a log density through a mode and nodes on both sides of it along each axis.

    `axes` are centred at the mode; `up` and `down` hold, axis by axis, (place, node) of the nodes
    on either side, the nearest first, none where there is no posterior. Along an axis the surrogate
    interpolates values and slopes (cubic Hermite); across axes the slopes at the nearest nodes give
    what is quadratic, z_j z_k, and what is skew, z_k^2 z_j. `reach` is the place of a node of a
    Gaussian.
    """

    def __init__(self, mode: Any, axes: Axes, reach: float, up: list, down: list) -> None:
        self.mode, self.axes, self.reach = mode, axes, reach
        self.slope = mode.gradient @ axes.root
        self.checked: list[tuple[np.ndarray, float, np.ndarray]] = []
        self.nodes = [mode, *(side[0][1] for side in (*up, *down) if side)]
        self.far = np.array([[s[0][0] if s else 0.0 for s in side] for side in (up, down)])
        lines = zip(up, down, axes.root.T, self.slope, strict=True)
        self.lines = [self._line(*line) for line in lines]
        above, below = (
            np.array([s[0][1].gradient @ axes.root if s else self.slope for s in side])
            for side in (up, down)
        )
        width = np.maximum(self.far.sum(0), reach)[:, None]
        twist = (above - below) / width
        self.twist = np.triu(0.5 * (twist + twist.T), 1)
        self.skew = 4.0 * (above + below - 2.0 * self.slope) / width**2
        np.fill_diagonal(self.skew, 0.0)
        self.smooth()

    def smooth(self) -> None:
        """Find the distribution of the surrogate as it is now."""
        more = _FINE.beyond
        ends = [(places[0] - more, places[-1] + more) for places, _, _ in self.lines]
        meshes = [np.linspace(*end, _FINE.mesh) for end in ends]
        along = [self._along(k, mesh) for k, mesh in enumerate(meshes)]
        self.found = _smoothed(self.axes, self.log_density, meshes, along)

    def _line(self, up: list, down: list, axis: np.ndarray, slope: float) -> list[np.ndarray]:
        """Return places, values and slopes of the nodes along an axis, the mode among them."""
        beside = [(-place, node) for place, node in reversed(down)], up
        top = self.mode.objective
        before, after = (
            [(p, n.objective - top, n.gradient @ axis) for p, n in side] for side in beside
        )
        return [np.array(a) for a in zip(*before, (0.0, 0.0, slope), *after, strict=True)]

    @property
    def cov(self) -> np.ndarray:
        """Covariance (T, T) of the surrogate along the axes."""
        return self.found.second - np.outer(self.found.mean, self.found.mean)

    def typical(self, n: int, power: float = 1.0) -> np.ndarray:
        """Return n points zeta of equal masses of the surrogate to a power, new ones each time."""
        shift = (0.5 + 0.31 * len(self.checked)) % 1.0
        smooth = self.found.distribution
        at = picked(smooth.mass**power, (np.arange(n) + shift) / n)
        return np.linalg.solve(self.axes.root, (smooth.points[at] - self.axes.centre).T).T

    def correct(self, zeta: np.ndarray, node: Any) -> None:
        """Keep what the interpolation misses at zeta (T,), where the model gave a node."""
        steps = zeta + _FINE.difference * np.vstack([np.eye(len(zeta)), -np.eye(len(zeta))])
        around = self._interpolated(np.vstack([zeta, steps])) + self.mode.objective
        slope = (around[1 : len(zeta) + 1] - around[len(zeta) + 1 :]) / (2.0 * _FINE.difference)
        more = node.objective - around[0], node.gradient @ self.axes.root - slope
        self.checked.append((zeta, *more))

    def _along(self, k: int, z: np.ndarray) -> np.ndarray:
        """Return the log density along axis k; beyond the nodes by tangent and unit curvature."""
        places, values, slopes = self.lines[k]
        inside = np.clip(z, places[0], places[-1])
        out, beyond = np.zeros_like(z), z - inside
        if len(places) > 1:
            out = CubicHermiteSpline(places, values, slopes)(inside)
        return out + np.where(z > 0, slopes[-1], slopes[0]) * beyond - 0.5 * beyond**2

    def log_density(self, zeta: np.ndarray) -> np.ndarray:
        """Return the surrogate at zeta (N, T): what interpolates the star, corrected by checks.

        The corrections are tangents at the points that were checked, blended by how near they are;
        where none is near they fade out.
        """
        out = self._interpolated(zeta)
        if not self.checked:
            return out
        places, values, slopes = (np.array(a) for a in zip(*self.checked, strict=True))
        gap, blur = zeta[:, None] - places, 0.5 * len(self.slope)  # squared gap of neighbours
        near = np.exp(-0.5 * np.sum(gap**2, axis=2) / blur)
        tangent = np.clip(values + np.einsum("nmt,mt->nm", gap, slopes), -_MOST_OFF, _MOST_OFF)
        return out + np.sum(near * tangent, 1) / (np.sum(near, 1) + _FADE)

    def _interpolated(self, zeta: np.ndarray) -> np.ndarray:
        """Return what interpolates the star, its cross terms bounded by those at the nodes."""
        out = sum(self._along(k, z) for k, z in enumerate(zeta.T))
        held = np.clip(zeta, -self.reach, self.reach)
        out += np.einsum("nj,jk,nk->n", held, self.twist, held)
        return out + 0.5 * np.einsum("nk,kj,nj->n", held**2, self.skew, held)

    def weights(self) -> np.ndarray:
        """Return weights (M,) of the nodes that have the surrogate's moments along each axis."""
        square, mean, (up, down) = np.diagonal(self.found.second), self.found.mean, self.far
        known = np.r_[up, down] > 0
        width = np.maximum(up + down, 1e-300)
        with np.errstate(divide="ignore", invalid="ignore"):
            above = (square + mean * down) / (up * width)
            below = (square - mean * up) / (down * width)
        weight = np.maximum(np.r_[0.0, np.r_[above, below][known]], 0.0)
        weight[0] = max(1.0 - weight.sum(), 0.0)
        return weight / weight.sum()
