"""How far the lengths of a kernel differ from column to column, averaged over.

The deviations of the log lengths from their mean are N(0, s^2) each; s = 0 is the isotropic kernel.
For each of a few spreads s the mode of evidence times prior is found, and the volume of the
posterior of the deviations follows from the expected curvature of the evidence there (the Laplace
approximation). The volume is what keeps many free lengths from winning by their number. Mean length
and variance have about the same volume at every s, which cancels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import helmert
from sklearn.utils.parallel import Parallel, delayed

from .._engine.averaging import Node
from ._dense_gp import KernelGP
from ._kernel_nodes import EPAtKernels, ScaleNodes
from ._kernel_scales import KernelScales, ScalePrior
from ._kernels import with_theta

__all__ = ["SPREADS", "LengthNodes", "Level", "levels", "nodes_about"]

# Standard deviations of the log lengths about their mean, as probable a priori as 0 is.
SPREADS = (0.5, 1.0, 2.0)
# The path of increasing s ends this many nats below its best.
_PATH_DEPTH = 3.0
# Gain of log posterior that a mode may leave, steps that it may take, and the share of a step below
# which it is where it can be.
_SMALL_GAIN, _MOST_STEPS, _LEAST_SHARE = 0.05, 12, 0.02


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

    def curvature(self, expected):
        """Return the curvature of minus the log posterior along `directions` (p, p).

        `expected` is that of the log evidence in theta.
        """
        basis, precision = self.directions()
        return basis @ expected @ basis.T + np.diag(precision)

    def log_mass(self, mode, curvature):
        """Return the log posterior mass of the mode: its objective and the volume of deviations."""
        own = slice(len(self.prior.spread), None)
        scaled = curvature[own, own] * self.s**2
        return mode.objective - 0.5 * np.linalg.slogdet(scaled)[1]

    def mode_from(self, near, expected):
        """Return the `Node` at the mode, by Fisher scoring from a neighbour, or None.

        `expected` is the expected curvature of the log evidence near by, which serves all steps.
        """
        basis = self.directions()[0]
        curvature = self.curvature(expected)
        low, high = self.ep.plan.kernel.bounds.T
        best, share = self.evaluate(near.payload.theta, near), 1.0
        for _ in range(_MOST_STEPS):
            if best is None or share < _LEAST_SHARE:
                break
            slope = basis @ best.gradient
            step = np.linalg.solve(curvature, slope)
            if 0.5 * step @ slope < _SMALL_GAIN:
                break
            move = np.clip(best.phi + share * step @ basis, low, high)
            trial = self.evaluate(move, best)
            if trial is None or trial.objective < best.objective:
                share *= 0.3
            else:
                gain, best = trial.objective - best.objective, trial
                if gain < _SMALL_GAIN:
                    break
        return best


class Level(NamedTuple):
    """One spread of the deviations: its nodes, the mode, the curvature there, and its log mass."""

    nodes: LengthNodes
    mode: Node
    curvature: np.ndarray
    log_mass: float


def expected_curvature(ep, mode):
    """Return the expected curvature (p, p) of the log evidence at a node, in kernel parameters."""
    theta, result, _ = mode.payload
    structure = KernelGP(with_theta(ep.plan.kernel, theta), ep.plan.X)
    return structure.expected_curvature(result.evaluation.payload[0])


def levels(ep, scales, prior, isotropic):
    """Return the `Level` of each spread above zero, as far as the path is worth going.

    `isotropic` is the mode of spread zero; log masses are on the scale of its objective.
    """
    found: list[Level] = []
    near, best = isotropic, isotropic.objective
    expected = expected_curvature(ep, isotropic)
    for s in SPREADS:
        nodes = LengthNodes(ep, scales, prior, s)
        mode = nodes.mode_from(near, expected)
        if mode is None:
            break
        expected = expected_curvature(ep, mode)
        curvature = nodes.curvature(expected)
        found.append(Level(nodes, mode, curvature, nodes.log_mass(mode, curvature)))
        if found[-1].log_mass < best - _PATH_DEPTH:
            break
        near, best = mode, max(best, found[-1].log_mass)
    return found


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
    centre = level.mode._replace(phi=scales.phi(level.mode.phi))
    tasks = (delayed(_drawn_in)(nodes, centre, offset + root @ each) for each in z)
    found = Parallel(n_jobs=n_jobs)(tasks)
    return [node for node in found if node is not None] or [centre]


def _drawn_in(nodes, mode, step):
    """Return the `Node` a step (T,) from the mode, or nearer to it."""
    low, high = nodes.scales.bounds.T
    node = nodes.evaluate(np.clip(mode.phi + step, low, high), mode)
    gaussian = 0.5 * len(step)
    drop = np.inf if node is None else mode.objective - node.objective
    if drop <= gaussian + 1.0:
        return node
    nearer = np.sqrt(gaussian / drop) if np.isfinite(drop) else 0.5
    return nodes.evaluate(np.clip(mode.phi + nearer * step, low, high), mode)
