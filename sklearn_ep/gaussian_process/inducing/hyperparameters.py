"""What learning moves, as one vector: kernel parameters and inducing points."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .._hyperparameters import KernelScales
from .._kernels import constant_and_stationary, with_theta
from .passes import evidence_gradient
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


class SlopeCoordinates:
    """Log standard deviation and log slopes in place of theta = (log variance, log lengths l).

    The log variance, whose place in theta is `first`, is twice entry `first`, and log l_k is that
    entry minus entry k, so that l_k = sd / slope_k. Both ways cost O(p).
    """

    def __init__(self, first):
        self.first = first

    def theta(self, vector):
        """Return theta (p,) of a vector."""
        theta = vector[self.first] - vector
        theta[self.first] = 2.0 * vector[self.first]
        return theta

    def vector(self, theta):
        """Return the vector (p,) of theta."""
        vector = 0.5 * theta[self.first] - theta
        vector[self.first] = 0.5 * theta[self.first]
        return vector

    def gradient(self, gradient):
        """Return the gradient in the vector (p,) from that in theta."""
        moved = -gradient
        moved[self.first] = gradient.sum() + gradient[self.first]
        return moved


def slope_coordinates(kernel):
    """Return the `SlopeCoordinates` of a learned constant times RBF or Matern with learned lengths.

    None for other kernels.
    """
    split = constant_and_stationary(kernel)
    if split is None or split[0] is None or not (split[0].n_dims and split[1].n_dims):
        return None
    return SlopeCoordinates(0 if split[2] else kernel.n_dims - 1)


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
    def _slopes(self):
        """Coordinates of the kernel part of the vector, None where it is theta itself."""
        return slope_coordinates(self.kernel) if self.decoupled else None

    def theta(self, vector):
        """Return the kernel parameters of a vector."""
        part = vector[: self.n_theta]
        return part if self._slopes is None else self._slopes.theta(part)

    @property
    def start(self):
        """Vector of the first kernel and inducing points."""
        moved = np.zeros(self.Z.size if self.learn_inputs else 0)
        return self._joined(self.kernel.theta, moved)

    def _joined(self, theta, moved):
        if not self.n_theta:
            return moved
        theta = np.clip(theta, *self._box)
        part = theta if self._slopes is None else self._slopes.vector(theta)
        return np.concatenate([part, moved])

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

    def log_density(self, vector):
        """Return the log density of the prior at a vector and its gradient (p,); 0 if flat."""
        if self.density is None or not self.n_theta:
            return 0.0, 0.0
        gradient = np.zeros(len(vector))
        value, theta = self.density.log_density(self.theta(vector))
        gradient[: self.n_theta] = theta if self._slopes is None else self._slopes.gradient(theta)
        return value, gradient

    def gradient(self, model, sums, fresh, kind=np.float64):
        """Return the gradient of the log evidence in the vector, from sums of a float type."""
        theta, towards = evidence_gradient(model, sums, fresh, self.learn_inputs, kind)
        if self._slopes is not None:
            theta = self._slopes.gradient(theta)
        pieces = [theta] if self.n_theta else []
        if self.learn_inputs:
            pieces.append((towards * self.unit).ravel())
        return np.concatenate(pieces)
