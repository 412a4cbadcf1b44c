"""Nodes of an average over kernels: EP at kernel parameters, from the sites of a neighbour.

What is averaged over is the evidence times a prior.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Node
from ._kernel_scales import KernelScales, ScalePrior
from ._kernels import with_theta

__all__ = ["EPAtKernels", "KernelNode", "ScaleNodes", "settled"]

# Largest residual that lets a node count: the evidence of sites that have not settled means nothing
# and may be thousands of nats off.
_WORST_RESIDUAL = 5e-2
# Sweeps that a node may take: near neighbours need two to six.
_NODE_SWEEPS = 40


class KernelNode(NamedTuple):
    """What a node keeps: kernel parameters (p,), the `Result` of EP there, and its anisotropy.

    That is the spread of the prior of the log lengths about their mean, 0 for an isotropic kernel.
    `slope` (p,) is the gradient of the log evidence in the parameters, None where nobody asked.
    """

    theta: np.ndarray
    result: Any
    anisotropy: float
    slope: np.ndarray | None = None


def settled(solve, x, empty=None):
    """Return the `Result` of EP from sites x, or None where sites do not settle on a posterior.

    `solve(x, share)` runs EP with a share of the damping. Where that fails, another run starts from
    sites that say nothing, zeros unless they are given, with half the damping.
    """
    for start, share in ((x, 1.0), (np.zeros_like(x) if empty is None else empty, 0.5)):
        try:
            result = solve(start, share)
        except ImproperPosterior:
            continue
        # labels are discrete: a log probability of them above zero is none
        if result.residual < _WORST_RESIDUAL and result.evaluation.record["log_evidence"] <= 0:
            return result
    return None


@dataclass
class EPAtKernels:
    """EP of the labels of one problem at any kernel parameters.

    `plan` is a `DensePlan`, `x` are sites to start from where there is no neighbour. `lacking` (p,)
    is added to gradients in theta: what those of several classes lack changes slowly.
    """

    plan: Any
    y: np.ndarray
    x: np.ndarray
    lacking: Any = 0.0

    def node(self, phi, near, theta, prior, slopes, squares, anisotropy):
        """Return the `Node` at phi, which is the kernel parameters theta (p,), or None.

        `prior` is the log prior and its gradient in phi, `slopes` turns a gradient in theta into
        one in phi and is None for a node without one, `squares` are those of `KernelGP`,
        `anisotropy` is that of `KernelNode`.
        """
        found = None
        if near is not None and np.array_equal(theta, near.payload.theta):
            found = near.payload._replace(anisotropy=anisotropy)
        if found is None or (slopes is not None and found.slope is None):
            ep = self._ep(theta, squares)
            if found is None:
                result = self._settled(ep, self.x if near is None else near.payload.result.x)
                if result is None:
                    return None
                found = KernelNode(theta, result, anisotropy)
            if slopes is not None:
                slope = self.plan.model.gradient(ep, found.result.evaluation.payload)
                found = found._replace(slope=slope)
        gradient, (log_prior, of_prior) = np.full(len(phi), np.nan), prior
        if slopes is not None:
            gradient = slopes(found.slope + self.lacking) + of_prior
        result = found.result
        value = result.evaluation.record["log_evidence"]
        return Node(phi, value, log_prior, gradient, result.residual, found)

    def only_node(self, theta):
        """Return the `Node` without coordinates of a kernel that is kept, or None."""
        result = self._settled(self._ep(theta), self.x)
        if result is None:
            return None
        value, found = result.evaluation.record["log_evidence"], KernelNode(theta, result, 0.0)
        return Node(np.empty(0), value, 0.0, np.empty(0), result.residual, found)

    def of_rows(self, rows):
        """Return the same for some of the rows."""
        lacking = self.lacking * self.plan.share(rows)
        return EPAtKernels(self.plan.part(rows), self.y[rows], self.x[:, rows], lacking)

    def structure(self, theta):
        """Return the structure of the posteriors under the kernel parameters theta (p,)."""
        return self._ep(theta).structure

    def _ep(self, theta, squares=None):
        return self.plan.ep(with_theta(self.plan.kernel, theta), self.y, squares)

    def _settled(self, ep, x):
        tol = self.plan.model.node_tol

        def solve(start, share):
            return self.plan.solve(ep, start, tol, _NODE_SWEEPS, share=share)

        return settled(solve, x, self.plan.model.no_sites(self.y))

    def told(self, node):
        """Return the payload of an iteration: kernel, and state of the posterior."""
        theta, result = node.payload[:2]
        return with_theta(self.plan.kernel, theta), result.evaluation.payload[0]


@dataclass
class ScaleNodes:
    """Nodes in variance and length, the phi of `scales`; the ratios of the lengths are kept.

    `s` is their anisotropy, see `KernelNode`.
    """

    ep: EPAtKernels
    scales: KernelScales
    prior: ScalePrior
    s: float = 0.0

    @cached_property
    def _unit_squares(self):
        return self.scales.unit_squares(self.ep.plan.X)

    def evaluate(self, phi, near, slopes=True):
        """Return the `Node` at phi (T,), or None where EP has no fixed point.

        Without `slopes` it has no gradient.
        """
        scales, squares = self.scales, self.scales.squares(phi, self._unit_squares)
        prior = self.prior.log_density(phi)
        place = phi, near, scales.theta(phi)
        return self.ep.node(*place, prior, scales.slopes if slopes else None, squares, self.s)
