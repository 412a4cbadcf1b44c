"""What learning moves, as one vector: kernel parameters and inducing points."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .._hyperparameters import KernelScales
from .._kernels import constant_and_stationary, with_theta
from .ep import evidence_gradient
from .values import InducingPrior


class LengthsApart:
    """Prior of the ratios of several lengths: their logs deviate from their mean by N(0, s^2).

    The spread s is not known, which makes it a multivariate t distribution: few rows leave the
    lengths near each other, and where the evidence wants some of them apart, all of them are free.
    `places` are those of the lengths in theta; `scale` and `freedom`, the degrees of it, are those
    of the deviations.
    """

    def __init__(self, places, scale=0.75, freedom=4.0):
        self.places, self.scale, self.freedom = places, scale, freedom

    def log_density(self, theta):
        """Return the log density at theta (p,), but for a constant, and its gradient (p,)."""
        apart = theta[self.places] - theta[self.places].mean()
        total, n = self.freedom * self.scale**2 + apart @ apart, self.freedom + len(apart)
        gradient = np.zeros(len(theta))
        gradient[self.places] = -n / total * apart
        return -0.5 * n * float(np.log(total)), gradient


def prior_of_lengths(kernel):
    """Return the `LengthsApart` of a constant times RBF or Matern, None for one length or none."""
    if constant_and_stationary(kernel) is None:
        return None
    places = KernelScales.at(kernel, kernel.theta).lengths
    return LengthsApart(places) if len(places) > 1 else None


@dataclass
class Hyperparameters:
    """What is learned, as one vector: kernel parameters, then inducing points in units of `unit`.

    The kernel parameters are theta itself, within its box of bounds, or for the rules that step in
    every coordinate alike (`decoupled`) the logs of standard deviation and slopes. The evidence of
    smooth functions knows the slopes well and has a long flat ridge in theta, which such rules
    would cross many times. Z (m, d) are the first inducing points, `unit` (d,) is the length of a
    step of size one in each column. `density` is the prior of the kernel parameters, None for a
    flat one.
    """

    kernel: Any
    Z: np.ndarray
    unit: np.ndarray
    jitter: float
    learn_kernel: bool
    learn_inputs: bool
    decoupled: bool = False
    density: LengthsApart | None = None

    @cached_property
    def n_theta(self):
        """Number of learned kernel parameters."""
        return self.kernel.n_dims if self.learn_kernel else 0

    @cached_property
    def _box(self):
        """Bounds (2, p) of theta; scikit-learn looks them up by name, which takes long."""
        return self.kernel.bounds.T

    @property
    def learns(self):
        """Whether there is anything to learn."""
        return self.n_theta > 0 or self.learn_inputs

    @cached_property
    def _maps(self):
        """Matrix (p, p) from the kernel part of a vector to theta, and its inverse.

        Decoupled, the log variance is twice the entry `first` of the vector, and log l_k is that
        entry minus entry k, so that l_k = sd / slope_k.
        """
        to_theta, split = np.eye(self.n_theta), constant_and_stationary(self.kernel)
        if (
            self.decoupled
            and self.n_theta
            and split
            and split[0]
            and split[0].n_dims
            and split[1].n_dims
        ):
            first = 0 if split[2] else self.n_theta - 1
            to_theta *= -1.0
            to_theta[:, first] = 1.0
            to_theta[first, first] = 2.0
        return to_theta, np.linalg.inv(to_theta)

    def theta(self, vector):
        """Return the kernel parameters of a vector."""
        return self._maps[0] @ vector[: self.n_theta]

    @property
    def start(self):
        """Vector of the first kernel and inducing points."""
        moved = np.zeros(self.Z.size if self.learn_inputs else 0)
        return self._joined(self.kernel.theta, moved)

    def _joined(self, theta, moved):
        if not self.n_theta:
            return moved
        return np.concatenate([self._maps[1] @ np.clip(theta, *self._box), moved])

    @property
    def bounds(self):
        """Bounds (p, 2) of a vector that is not decoupled; none for inducing points."""
        free = np.full((self.Z.size if self.learn_inputs else 0, 2), [-np.inf, np.inf])
        theta = self.kernel.bounds if self.n_theta else np.empty((0, 2))
        return np.vstack([theta, free])

    def clip(self, vector):
        """Return the vector with its theta moved into the bounds."""
        if not self.n_theta:
            return vector
        return self._joined(self.theta(vector), vector[self.n_theta :])

    def prior(self, vector):
        """Return the `InducingPrior` of a vector."""
        kernel, Z = self.kernel, self.Z
        if self.n_theta:
            kernel = with_theta(kernel, self.theta(vector))
        if self.learn_inputs:
            Z = Z + vector[self.n_theta :].reshape(Z.shape) * self.unit
        return InducingPrior(kernel, Z, self.jitter)

    s = 0.0

    def point(self, vector):
        """Return the vector itself, where a problem is evaluated."""
        return vector

    slopes = point

    def log_prior(self, vector):
        """Return the log density of the prior at a vector and its gradient (p,); 0 if flat."""
        if self.density is None or not self.n_theta:
            return 0.0, 0.0
        gradient = np.zeros(len(vector))
        value, theta = self.density.log_density(self.theta(vector))
        gradient[: self.n_theta] = self._maps[0].T @ theta
        return value, gradient

    def gradient(self, model, sums, fresh, kind=np.float64):
        """Return the gradient of the log evidence in the vector, from sums of a float type."""
        theta, towards = evidence_gradient(model, sums, fresh, self.learn_inputs, kind)
        pieces = [self._maps[0].T @ theta] if self.n_theta else []
        if self.learn_inputs:
            pieces.append((towards * self.unit).ravel())
        return np.concatenate(pieces)
