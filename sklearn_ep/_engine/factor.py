"""What a scalar factor has to answer, with a default by quadrature from log p alone."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from .quadrature import tilted_by_panels


class Tilted(NamedTuple):
    """log Z of a factor under N(mean, var), its gradient and its negative curvature in the mean."""

    log_z: np.ndarray
    gradient: np.ndarray
    curvature: np.ndarray


class Factor(Protocol):
    """A scalar factor t(y, f) of one latent value: a likelihood, or a prior that ignores y.

    A subclass defines `log_prob`; everything that expectation propagation and prediction need
    follows from it by quadrature. `tilted` may be replaced by a closed form.

    Attributes
    ----------
    log_concave : bool
        True promises that site precisions are never negative, which saves half of the algebra.
    logistic_slope : float or None
        Slope of the logistic function that stands for a likelihood where closed forms are wanted,
        to one per cent of the probabilities; None where there is none.
    """

    log_concave: bool = False
    logistic_slope: float | None = None

    def log_prob(self, y: Any, f: Any) -> Any:
        """Return log t(y, f); arrays that broadcast against each other."""
        raise TypeError(f"{type(self).__name__} must define log_prob(y, f) or tilted(y, mean, var)")

    def tilted(self, y: Any, mean: Any, var: Any) -> Tilted:
        """Return log E[t(y, f)] for f ~ N(mean, var) with its first two derivatives in the mean.

        Parameters
        ----------
        y, mean, var : ndarray of shape (n,)

        Returns
        -------
        Tilted
            Three arrays of shape (n,).
        """
        y, mean, var = np.broadcast_arrays(*(np.asarray(a, dtype=float) for a in (y, mean, var)))
        log_z, centre, spread = tilted_by_panels(lambda f: self.log_prob(y[:, None], f), mean, var)
        return Tilted(log_z, (centre - mean) / var, (var - spread) / var**2)

    def contraction(self, y: Any, mean: Any, var: Any, extra_var: Any, curvature: Any) -> Any:
        """Return 1 - var * curvature (n,), the variance of the tilted distribution over var.

        `curvature` is that of `tilted(y, mean, var + extra_var)`. A factor for which the difference
        cancels replaces this by a formula of its own.
        """
        return 1.0 - var * curvature

    def powered(self, exponent: float) -> "Factor":
        """Return the factor t(y, f)^exponent, as power EP needs it."""
        return _Powered(self, exponent)


class _Powered(Factor):
    """t^exponent of any factor, by quadrature."""

    def __init__(self, factor: Factor, exponent: float) -> None:
        self.factor, self.exponent = factor, exponent
        self.log_concave = factor.log_concave

    def log_prob(self, y: Any, f: Any) -> Any:
        return self.exponent * self.factor.log_prob(y, f)
