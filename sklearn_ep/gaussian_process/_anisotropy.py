"""How far the lengths of a kernel differ from column to column, averaged over.

The deviations of the log lengths from their mean are N(0, s^2) each; s = 0 is the isotropic kernel.
For each of a few spreads s the mode of evidence times prior is found, and the volume of the
posterior of the deviations follows from the expected curvature of the evidence there (the Laplace
approximation). The volume is what keeps many free lengths from winning by their number. Mean length
and variance have about the same volume at every s, which cancels.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import helmert

from .._engine.hyper import Node, ascend, average_of, sample_about
from ._kernel_nodes import EPAtKernels, ScaleNodes
from ._kernel_scales import KernelScales, ScalePrior

__all__ = [
    "SPREADS",
    "LengthNodes",
    "Level",
    "expected_curvature",
    "isotropic_level",
    "levels",
]

# Standard deviations of the log lengths about their mean, as probable a priori as 0 is.
SPREADS = (0.5, 1.0, 2.0)
# The path of increasing s ends this many nats below its best.
_PATH_DEPTH = 3.0
# Gain of log posterior that a mode may leave, and steps to it. Where twice as much is promised far
# more may be had: on image segments ten nats.
_SMALL_GAIN, _MOST_STEPS = 0.1, 12
# Root mean square of the moves of log lengths beyond which their curvature is computed anew.
_SHORT_MOVE = 0.3
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

    def level(self, mode, expected):
        """Return the `Level` of a mode, where the expected curvature of the log evidence is this.

        The deviations stay what they are, and so does their prior.
        """
        scales = KernelScales.at(self.ep.plan.kernel, mode.phi)
        nodes, phi = ScaleNodes(self.ep, scales, self.prior, self.s), scales.phi(mode.phi)
        curvature, own = self.curvature(expected), slice(0, len(phi))
        log_mass = self.log_mass(mode, curvature, _SMALL_GAIN)
        centre = mode._replace(phi=phi, log_prior=self.prior.log_density(phi)[0])
        return Level(nodes, centre, curvature[own, own], log_mass)

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
    """One spread of the deviations: its mode, and what is about it in variance and mean length.

    `nodes` keep the ratios that the lengths have at the mode, `curvature` (T, T) is that of minus
    the log posterior there, `log_mass` that of all deviations, at the best variance and length.
    """

    nodes: ScaleNodes
    mode: Node
    curvature: np.ndarray
    log_mass: float

    def alone(self):
        """Return the `Average` of the mode alone, with its surroundings by the curvature."""
        log_volume = -0.5 * np.linalg.slogdet(self.curvature / (2.0 * np.pi))[1]
        return average_of([self.mode], np.array([self.mode.objective + log_volume]))

    def with_spread_of(self, average):
        """Return the `Level` with the curvature of a normal distribution like an `Average`."""
        away = average.phi - average.weight @ average.phi
        # of one node, too: it alone has no covariance
        cov = (average.weight * away.T) @ away + 1e-9 * np.eye(len(self.curvature))
        return self._replace(curvature=np.linalg.inv(cov))

    def average_about(self, monitor, weighed):
        """Return the `Average` over nodes about the mode, see `sample_about`."""
        evaluate, bounds = partial(self.nodes.evaluate, slopes=False), self.nodes.scales.bounds
        workers = self.nodes.ep.plan.averaging.n_jobs
        return sample_about(evaluate, self.mode, bounds, self.curvature, workers, monitor, weighed)


def isotropic_level(nodes, mode):
    """Return the `Level` of spread zero from its `ScaleNodes` and its mode."""
    expected = expected_curvature(nodes.ep, mode, together=True)
    return Level(nodes, mode, expected + np.diag(nodes.prior.spread**-2.0), mode.objective)


def expected_curvature(ep, mode, together=False):
    """Return the expected curvature (p, p) of the log evidence at a node, in kernel parameters.

    That of `together` is in the phi of `KernelScales` (T, T).
    """
    theta, result = mode.payload[:2]
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
    known = _Curvature(isotropic.payload.theta, expected)
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
            expected, known = known.at(nodes, mode)
        else:
            expected = ladder.curvature_at(nodes, mode)
        found.append(nodes.level(mode, expected))
        log_mass = found[-1].log_mass
        if log_mass < floor:
            break
        near, best = mode, max(best, log_mass)
    return found


class _Curvature(NamedTuple):
    """The expected curvature (p, p) of the log evidence at kernel parameters theta (p,)."""

    theta: np.ndarray
    value: np.ndarray

    def at(self, nodes, mode):
        """Return the expected curvature at a `Node`, about, and where it was last computed anew.

        Over short moves the part of a log length goes about as one over the length, which spares a
        product of n^3 for each.
        """
        lengths, theta = nodes.scales.lengths, mode.payload.theta
        moved = (theta - self.theta)[lengths]
        if moved @ moved > _SHORT_MOVE**2 * len(moved):
            own = expected_curvature(nodes.ep, mode)
            return own, _Curvature(theta, own)
        shrinks = np.ones(len(theta))
        shrinks[lengths] = np.exp(-moved)
        return _with_sum_at(nodes, mode, shrinks[:, None] * self.value * shrinks), self


def _with_sum_at(nodes, mode, curvature):
    """Return a curvature in proportion, and right at a `Node` for all lengths together.

    Volumes come out within some tenths of a nat, without a product of n^3 for each column.
    """
    lengths = nodes.scales.lengths
    about = curvature[np.ix_(lengths, lengths)].sum()
    right = expected_curvature(nodes.ep, mode, together=True)[-1, -1]
    return curvature * (right / about) if about > 0 else curvature


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

        It is in proportion to that of some of the rows where `mode_of` left them.
        """
        return _with_sum_at(nodes, mode, self.curvature)

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
