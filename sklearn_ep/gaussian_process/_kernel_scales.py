"""The two numbers of a kernel that are integrated over, variance and length, and their priors.

A constant times RBF or Matern has one variance and one length scale a column. Averages run over the
logs of the variance and of the geometric mean of the lengths; the ratios of the lengths are kept.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import pdist, squareform
from sklearn.gaussian_process.kernels import Kernel

from .._engine.likelihoods import PROBIT_SLOPE
from ._kernels import constant_and_stationary, n_lengths, with_theta

__all__ = ["KernelScales", "ScalePrior", "learned_coordinates", "scale_prior"]

_NAMES = ("log_variance", "log_length_scale")
# Median of the variance, in units of the noise of the link.
_VARIANCE_MEDIAN = 4.0


class ScalePrior(NamedTuple):
    """Independent normal priors: centres and spreads of the log variance and the log length."""

    centre: np.ndarray
    spread: np.ndarray

    def log_density(self, phi):
        """Return the log density at phi (T,) and its gradient (T,)."""
        z = (phi - self.centre) / self.spread
        value = -0.5 * z @ z - np.log(self.spread * np.sqrt(2.0 * np.pi)).sum()
        return float(value), -z / self.spread


def scale_prior(factor, root_variance, variance_spread, length_spread=1.0):
    """Return the `ScalePrior` for a link and for columns of a root of the total variance.

    Log-normal, and of no data set in particular: a latent function may be flat or sure of itself,
    and is about as smooth as the rows are wide. A link whose noise is not known counts as a probit.
    """
    slope = getattr(factor, "logistic_slope", None) or PROBIT_SLOPE
    centre = np.log([_VARIANCE_MEDIAN * (PROBIT_SLOPE / slope) ** 2, root_variance])
    return ScalePrior(centre, np.array([variance_spread, length_spread]))


@dataclass(frozen=True)
class KernelScales:
    """The log variance and the log geometric mean of the lengths of a kernel, as a vector phi.

    What the kernel keeps fixed is not in phi, whose length T is at most two. `ratios` are the logs
    of the free lengths less their mean.
    """

    kernel: Kernel
    ratios: np.ndarray

    @classmethod
    def at(cls, kernel, theta):
        """Return the scales that keep the ratios of the lengths at kernel parameters (p,)."""
        lengths = theta[_places(kernel)[1]]
        return cls(kernel, lengths - lengths.mean() if len(lengths) else lengths)

    @cached_property
    def variance(self):
        """Where the variance is in theta, at most one place."""
        return _places(self.kernel)[0]

    @cached_property
    def lengths(self):
        """Where the lengths are in theta."""
        return _places(self.kernel)[1]

    @property
    def kept(self):
        """Which of variance and length phi has, as indices."""
        return [i for i, places in enumerate((self.variance, self.lengths)) if len(places)]

    @property
    def names(self):
        """What phi consists of."""
        return tuple(_NAMES[i] for i in self.kept)

    def phi(self, theta):
        """Return the vector (T,) of kernel parameters (p,)."""
        mean = [theta[self.lengths].mean()] if len(self.lengths) else []
        return np.append(theta[self.variance], mean)

    def theta(self, phi):
        """Return the kernel parameters (p,) of a vector."""
        theta = np.empty(len(self.variance) + len(self.lengths))
        theta[self.variance] = phi[: len(self.variance)]
        if len(self.lengths):
            theta[self.lengths] = phi[-1] + self.ratios
        return theta

    def slopes(self, gradient):
        """Return the gradient (T,) in phi of what has a gradient (p,) in theta."""
        total = [gradient[self.lengths].sum()] if len(self.lengths) else []
        return np.append(gradient[self.variance], total)

    def spread_out(self, of_phi):
        """Return the gradient (p,) in theta, alike for all lengths, that is (T,) in phi."""
        gradient = np.empty(len(self.variance) + len(self.lengths))
        gradient[self.variance] = of_phi[: len(self.variance)]
        if len(self.lengths):
            gradient[self.lengths] = of_phi[-1] / len(self.lengths)
        return gradient

    @cached_property
    def bounds(self):
        """Bounds (T, 2) of phi, within which every parameter of the kernel is within its own."""
        bounds = np.reshape(self.kernel.bounds, (-1, 2))
        rows = list(bounds[self.variance])
        if len(self.lengths):
            low, high = (bounds[self.lengths] - self.ratios[:, None]).T
            rows.append(np.array([low.max(), high.min()]))
        return np.reshape(rows, (-1, 2))

    def unit_squares(self, X):
        """Return the squared distances (n, n) of rows where the geometric mean of lengths is one.

        Where lengths are fixed, in these.
        """
        origin = with_theta(self.kernel, self.theta(np.zeros(len(self.kept))))
        return squareform(pdist(X / _parts(origin)[1].length_scale, "sqeuclidean"))

    def squares(self, phi, unit):
        """Return the squared distances in lengths at phi, from those of `unit_squares`."""
        return unit * (np.exp(-2.0 * phi[-1]) if len(self.lengths) else 1.0)

    def prior(self, prior):
        """Return the part of a `ScalePrior` that is of phi."""
        return ScalePrior(prior.centre[self.kept], prior.spread[self.kept])


def learned_coordinates(kernel):
    """Return names, coordinates (T,) and anisotropy of a learned kernel, for one node.

    Variance and mean length where there are these, otherwise all its parameters in logs. Several
    lengths that were learned without a prior have an infinite spread.
    """
    if _parts(kernel) is None:
        free = [h for h in kernel.hyperparameters if not h.fixed]
        names = (f"log_{h.name}" for h in free for _ in range(h.n_elements))
        return tuple(names), kernel.theta, np.nan
    scales = KernelScales.at(kernel, kernel.theta)
    spread = np.inf if len(scales.lengths) > 1 else 0.0
    return scales.names, scales.phi(kernel.theta), spread


def _places(kernel):
    """Return the indices in theta of the variance and of the lengths."""
    constant, part, constant_first = _parts(kernel)
    fixed = constant is None or constant.hyperparameter_constant_value.fixed
    variance, lengths = np.arange(0 if fixed else 1), np.arange(n_lengths(part))
    if constant_first:
        return variance, lengths + len(variance)
    return variance + len(lengths), lengths


def _parts(kernel) -> Any:
    return constant_and_stationary(kernel)
