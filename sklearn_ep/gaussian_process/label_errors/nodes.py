"""Nodes of an average over the kernel and the rate of wrong labels."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betainc, betaln, expit, log_expit, logit

from ..._engine.hyper import Node
from ..._engine.sites import Sites
from .._kernel_nodes import settled
from .._kernel_scales import KernelScales
from .._kernels import with_theta
from .problem import RATE_BOUNDS, Setting

__all__ = ["ErrorNode", "ErrorNodes", "log_rate_density"]

_RATE_NAME = "logit_label_noise"
# Residual, mixing and sweeps of sites at nodes, which start close to their fixed points.
_NODE_TOL, _DAMPING, _NODE_SWEEPS = 2e-2, 1.0, 40


class ErrorNode(NamedTuple):
    """What a node keeps: kernel and rate of wrong labels, and the `Result` of EP there."""

    setting: Setting
    result: Any


def log_rate_density(x, counts):
    """Return the log density of the logit of a rate that is Beta of these counts, and its slope.

    The rate is within the bounds of learning.
    """
    a, b = counts
    total = betaln(a, b) + np.log(betainc(a, b, RATE_BOUNDS[1]))
    return a * x + (a + b) * log_expit(-x) - total, a - (a + b) * expit(x)


@dataclass
class ErrorNodes:
    """Nodes in the phi of a kernel and the logit of the rate of wrong labels, as far as learned.

    `plan` is a `LabelErrorPlan`, `x` are sites to start from where there is no neighbour; `scales`
    is None for a kernel that is kept. Inducing points are those of the `first` setting.
    """

    plan: Any
    sign: np.ndarray
    x: np.ndarray
    first: Setting
    scales: KernelScales | None
    prior: Any

    @cached_property
    def _unit_squares(self):
        return None if self.scales is None else self.scales.unit_squares(self.plan.X)

    @property
    def names(self):
        """What phi consists of."""
        names = () if self.scales is None else self.scales.names
        return (*names, _RATE_NAME) if self.plan.learn_rate else names

    @property
    def bounds(self):
        """Bounds (T, 2) of phi."""
        rate = np.tile(logit(RATE_BOUNDS), (int(self.plan.learn_rate), 1))
        return rate if self.scales is None else np.vstack([self.scales.bounds, rate])

    def start(self):
        """Return phi (T,) of the first setting."""
        rate = [logit(self.first.rate)] if self.plan.learn_rate else []
        if self.scales is None:
            return np.array(rate)
        return np.append(self.scales.phi(self.first.kernel.theta), rate)

    def setting(self, phi):
        """Return the `Setting` at phi."""
        kernel, rate, points = self.first
        if self.scales is not None:
            kernel = with_theta(kernel, self.scales.theta(phi[: len(self.scales.names)]))
        if self.plan.learn_rate:
            rate = float(expit(phi[-1]))
        return Setting(kernel, rate, points)

    def evaluate(self, phi, near):
        """Return the `Node` at phi (T,), or None where EP has no fixed point."""
        plan, setting = self.plan, self.setting(phi)
        own = slice(0, len(phi) - int(plan.learn_rate))
        squares = None
        if self.scales is not None and setting.points is None:
            squares = self.scales.squares(phi[own], self._unit_squares)
        ep = plan.ep(setting, self.sign, squares)

        def solve(start, share):
            steps = dict(damping=share * _DAMPING, accelerate=True)
            return ep.solve(start, tol=_NODE_TOL, max_iter=_NODE_SWEEPS, **steps)

        result = settled(solve, self.x if near is None else near.payload.result.x)
        if result is None:
            return None
        state, log_prior, gradient = result.evaluation.payload[0], 0.0, []
        if self.scales is not None:
            log_prior, slope = self.prior.log_density(phi[own])
            of_kernel = self.scales.slopes(plan.slopes(ep.structure.structure, state)[0])
            gradient.append(of_kernel + slope)
        if plan.learn_rate:
            more, slope = log_rate_density(phi[-1], plan.averaging.rate_counts)
            log_prior += more
            gradient.append([plan.rate_slope(ep, Sites(*result.x), state) + slope])
        value, found = result.evaluation.record["log_evidence"], ErrorNode(setting, result)
        return Node(phi, value, log_prior, np.concatenate(gradient), result.residual, found)

    def told(self, node):
        """Return the payload of an iteration: setting, and state of the posterior."""
        return node.payload.setting, node.payload.result.evaluation.payload[0]
