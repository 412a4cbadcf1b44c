"""How far the lengths of a kernel differ from column to column, averaged over.

The deviations of the log lengths from their mean are N(0, s^2) each; s = 0 is the isotropic kernel.
For each of a few spreads s the mode of evidence times prior is found, and the volume of the
posterior of the deviations follows from the expected curvature of the evidence there (the Laplace
approximation). The volume is what keeps many free lengths from winning by their number. Mean length
and variance have about the same volume at every s, which cancels.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import helmert
from sklearn.utils.parallel import Parallel, delayed

from .._engine.averaging import Node
from .._engine.search import ascend
from ._kernel_nodes import EPAtKernels, ScaleNodes
from ._kernel_scales import KernelScales, ScalePrior

__all__ = [
    "SPREADS",
    "LengthNodes",
    "Level",
    "expected_curvature",
    "levels",
    "node_at",
    "nodes_about",
]

# Standard deviations of the log lengths about their mean, as probable a priori as 0 is.
SPREADS = (0.5, 1.0, 2.0)
# The path of increasing s ends this many nats below its best.
_PATH_DEPTH = 3.0
# Gain of log posterior that a mode may leave, and steps to it. Where twice as much is promised far
# more may be had: on image segments ten nats.
_SMALL_GAIN, _MOST_STEPS = 0.1, 12
# Evaluations in turn without a gain after which a search by inexact gradients ends.
_INEXACT_PATIENCE = 3


@dataclass
class LengthNodes:
    """Nodes in all parameters theta (p,) of a kernel with free lengths, their deviations N(0, s^2).

    `prior` is that of the phi of `scales`.
    """

    ep: EPAtKernels
    scales: KernelScales
    prior: ScalePrior
    s: float

    def evaluate(self, theta, near):
        """Return the `Node` at theta, or None where EP has no fixed point."""
        prior = self.log_prior(theta)
        return self.ep.node(theta, near, theta, prior, lambda slope: slope, None, self.s)

    def log_prior(self, theta):
        """Return the log prior of theta, less its constant for the deviations, and its slope."""
        scales, lengths = self.scales, self.scales.lengths
        away = theta[lengths] - theta[lengths].mean()
        value, of_phi = self.prior.log_density(scales.phi(theta))
        slope = np.empty(len(theta))
        slope[scales.variance] = of_phi[:-1]
        slope[lengths] = of_phi[-1] / len(lengths) - away / self.s**2
        return value - 0.5 * away @ away / self.s**2, slope

    def directions(self):
        """Return directions (p, p) in theta, one a row, and the prior precision along each.

        The variance where it is free, all lengths together, and an orthonormal basis of the
        deviations.
        """
        scales, p = self.scales, self.ep.plan.kernel.n_dims
        variance, lengths = scales.variance, scales.lengths
        basis = np.zeros((p, p))
        basis[range(len(variance)), variance] = 1.0
        basis[len(variance), lengths] = 1.0
        basis[len(variance) + 1 :, lengths] = helmert(len(lengths))
        of_phi = self.prior.spread**-2.0
        return basis, np.append(of_phi, np.full(len(lengths) - 1, self.s**-2.0))

    def prior_precision(self):
        """Return the prior precision (p, p) of theta."""
        basis, precision = self.directions()
        dual = basis.T / np.sum(basis**2, axis=1)  # its inverse, since its rows are orthogonal
        return (dual * precision) @ dual.T

    def curvature(self, expected):
        """Return the curvature of minus the log posterior along `directions` (p, p).

        `expected` is that of the log evidence in theta.
        """
        basis = self.directions()[0]
        return basis @ (expected + self.prior_precision()) @ basis.T

    def log_mass(self, node, curvature, most=np.inf):
        """Return the log posterior mass about the mode: objective there, volume of deviations.

        `node` is near the mode, which by its gradient and the curvature is higher, at `most` by so
        much.
        """
        own = slice(len(self.prior.spread), None)
        scaled = curvature[own, own] * self.s**2
        slope = self.directions()[0] @ node.gradient
        gain = min(0.5 * slope @ np.linalg.solve(curvature, slope), most)
        return node.objective + gain - 0.5 * np.linalg.slogdet(scaled)[1]

    def mode_from(self, near, expected, theta=None):
        """Return the `Node` at the mode, from theta (p,) or that of a neighbour, or None.

        `expected` is the expected curvature of the log evidence near by; the search corrects it,
        and ends where it expects no more than a small gain.
        """
        best = near

        def objective(theta):
            nonlocal best
            node = self.evaluate(theta, best)
            if node is None:
                return -np.inf, np.full(len(theta), np.nan), None
            if best is near or node.objective > best.objective:
                best = node
            return node.objective, node.gradient, node

        start = near.payload.theta if theta is None else theta
        bounds, curvature = self.ep.plan.kernel.bounds, expected + self.prior_precision()
        limits: dict[str, Any] = dict(gain=_SMALL_GAIN, max_iter=_MOST_STEPS)
        if not self.ep.plan.model.exact_gradient:
            # how the evidence rises corrects them
            limits |= dict(lacking=np.zeros(len(start)), patience=_INEXACT_PATIENCE)
        found = ascend(objective, start, bounds, curvature, **limits)
        return None if found is None else found.payload


class Level(NamedTuple):
    """One spread of the deviations: its nodes, the mode, the curvature there, and its log mass."""

    nodes: LengthNodes
    mode: Node
    curvature: np.ndarray
    log_mass: float


def expected_curvature(ep, mode, together=False):
    """Return the expected curvature (p, p) of the log evidence at a node, in kernel parameters.

    That of `together` is in the phi of `KernelScales` (T, T).
    """
    theta, result, _ = mode.payload
    curvature = ep.structure(theta).expected_curvature(result.evaluation.payload[0], together)
    if together and np.array_equal(KernelScales.at(ep.plan.kernel, theta).lengths[:1], [0]):
        return curvature[::-1, ::-1]
    return curvature


def levels(ep, scales, prior, isotropic):
    """Return the `Level` of each spread above zero, as far as the path is worth going.

    `isotropic` is the mode of spread zero; log masses are on the scale of its objective. With many
    rows each mode is first looked for with some of them.
    """
    found: list[Level] = []
    near, best = isotropic, isotropic.objective
    rows = ep.plan.rows_to_start_from()
    ladder = None if rows is None else _Ladder.of(ep, rows, isotropic)
    expected = expected_curvature(ep, isotropic) if ladder is None else ladder.curvature
    for s in SPREADS:
        nodes = LengthNodes(ep, scales, prior, s)
        start = nodes.evaluate(near.payload.theta, near)
        # where the last curvature foretells no mass the search is not worth its time
        floor = best - _PATH_DEPTH
        if start is None or nodes.log_mass(start, nodes.curvature(expected)) < floor:
            break
        if ladder is None:
            mode = nodes.mode_from(start, expected)
        else:
            mode = ladder.mode_of(nodes, start)
        if mode is None:
            break
        if ladder is None:
            expected = expected_curvature(ep, mode)
        else:
            expected = ladder.curvature_at(nodes, mode)
        curvature = nodes.curvature(expected)
        log_mass = nodes.log_mass(mode, curvature, _SMALL_GAIN)
        found.append(Level(nodes, mode, curvature, log_mass))
        if log_mass < floor:
            break
        near, best = mode, max(best, log_mass)
    return found


@dataclass
class _Ladder:
    """Modes with some of the rows, one spread after another, from which those of all rows start.

    The expected curvature of these rows over their share stands for that of all; the search
    corrects it.
    """

    ep: EPAtKernels
    share: float
    near: Node
    expected: np.ndarray

    @classmethod
    def of(cls, ep, rows, isotropic):
        """Return the ladder that starts at an isotropic `Node` of all rows, None without a node."""
        small = ep.of_rows(rows)
        near = small.only_node(isotropic.payload.theta)
        if near is None:
            return None
        return cls(small, ep.plan.share(rows), near, expected_curvature(small, near))

    @property
    def curvature(self):
        """The expected curvature of the log evidence of all rows, about."""
        return self.expected / self.share

    def curvature_at(self, nodes, mode):
        """Return the expected curvature at a `Node` of all rows, about.

        It is in proportion to that of some of the rows where `mode_of` left them, and right for all
        lengths together: volumes come out within some tenths of a nat, without a product of n^3 for
        each column.
        """
        lengths = nodes.scales.lengths
        of_some = self.expected[np.ix_(lengths, lengths)].sum()
        of_all = expected_curvature(nodes.ep, mode, together=True)[-1, -1]
        return self.expected * (of_all / of_some) if of_some > 0 else self.curvature

    def mode_of(self, nodes, near):
        """Return the `Node` at the mode of `LengthNodes` of all rows, or None.

        The ratios of the lengths start where those of `near` are, and move as with some of the
        rows.
        """
        below = replace(nodes, ep=self.ep).mode_from(self.near, self.expected)
        if below is None:
            return None
        moved = (below.payload.theta - self.near.payload.theta)[nodes.scales.lengths]
        self.near, self.expected = below, expected_curvature(self.ep, below)
        theta = near.payload.theta.copy()
        theta[nodes.scales.lengths] += moved - moved.mean()
        bounds = self.ep.plan.kernel.bounds
        return nodes.mode_from(near, self.curvature, np.clip(theta, *bounds.T))


def node_at(level):
    """Return the mode of a `Level` as the only `Node` in variance and length."""
    scales = KernelScales.at(level.nodes.ep.plan.kernel, level.mode.phi)
    return [level.mode._replace(phi=scales.phi(level.mode.phi))]


def nodes_about(level, offset, root, n_jobs=None):
    """Return `Node`s in variance and length about the mode of a `Level`, of equal weight.

    They have the mean and the covariance that variance and length have at isotropic kernels: the
    mean less the mode there is `offset` (T,), and `root` (T, T) a root of the covariance. The
    ratios of the lengths are those of the mode. A node that is more than one nat lower than the
    normal distribution would be is drawn in towards the mode.
    """
    ep, t = level.nodes.ep, len(offset)
    scales = KernelScales.at(ep.plan.kernel, level.mode.phi)
    nodes = ScaleNodes(ep, scales, level.nodes.prior, level.nodes.s)
    z = np.sqrt(t) * np.concatenate([np.eye(t), -np.eye(t)])
    (centre,) = node_at(level)
    tasks = (delayed(_drawn_in)(nodes, centre, offset + root @ each) for each in z)
    found = Parallel(n_jobs=n_jobs)(tasks)
    return [node for node in found if node is not None] or [centre]


def _drawn_in(nodes, mode, step):
    """Return the `Node` a step (T,) from the mode, or nearer to it."""
    low, high = nodes.scales.bounds.T
    node = nodes.evaluate(np.clip(mode.phi + step, low, high), mode, slopes=False)
    gaussian = 0.5 * len(step)
    drop = np.inf if node is None else mode.objective - node.objective
    if drop <= gaussian + 1.0:
        return node
    nearer = np.sqrt(gaussian / drop) if np.isfinite(drop) else 0.5
    return nodes.evaluate(np.clip(mode.phi + nearer * step, low, high), mode, slopes=False)
