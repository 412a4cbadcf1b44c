"""Kernel parameters as a vector: kernels at a theta, and coordinates that know each other less."""

from copy import copy

import numpy as np

from ._kernels import constant_and_stationary, n_lengths

__all__ = ["SlopeCoordinates", "slope_coordinates", "with_theta"]


def with_theta(kernel, theta):
    """Return a copy of a kernel with other log parameters, as `kernel.clone_with_theta` does.

    scikit-learn looks all parameters up by name, which costs as much as half a sweep over 100 rows;
    a constant times RBF or Matern is put together from its parts instead.
    """
    split = constant_and_stationary(kernel)
    if split is None:
        return kernel.clone_with_theta(theta)
    constant, part, constant_first = split
    n = n_lengths(part)
    values = np.exp(theta)
    of_lengths = values[-n:] if constant_first else values[:n]
    part = copy(part)
    if n:
        part.length_scale = of_lengths if n > 1 else of_lengths[0]
    if constant is None:
        return part
    constant = copy(constant)
    if len(values) > n:
        constant.constant_value = values[0] if constant_first else values[-1]
    return type(kernel)(*((constant, part) if constant_first else (part, constant)))


class SlopeCoordinates:
    """Log standard deviation and log slopes in place of theta = (log variance, log lengths l).

    The log variance is twice entry `first` and log l_k is that entry minus entry k, so that
    l_k = sd / slope_k. Both ways cost O(p).

    Parameters
    ----------
    first : int
        Place of the log variance in theta.
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
