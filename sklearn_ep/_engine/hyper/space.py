"""What a model declares of its hyperparameters phi: coordinates in logs or logits, and their prior.

An evaluation of the model at phi is a `Node`.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = ["HyperPrior", "Node", "NormalPrior"]


class HyperPrior(Protocol):
    """A proper prior density of phi (T,)."""

    def log_density(self, phi: np.ndarray) -> float:
        """Return the log density."""

    def slope(self, phi: np.ndarray) -> np.ndarray:
        """Return its gradient (T,)."""


class NormalPrior(NamedTuple):
    """Independent normal priors with means and standard deviations (T,): log-normal for scales."""

    mean: np.ndarray
    sd: np.ndarray

    def log_density(self, phi: np.ndarray) -> float:
        """Return the log density."""
        z = (phi - self.mean) / self.sd
        return float(-0.5 * z @ z - np.log(self.sd * np.sqrt(2.0 * np.pi)).sum())

    def slope(self, phi: np.ndarray) -> np.ndarray:
        """Return its gradient (T,)."""
        return (self.mean - phi) / self.sd**2


class Node(NamedTuple):
    """A model at hyperparameters phi (T,).

    gradient (T,) is that of log evidence plus log prior; residual that of the sites; payload what
    predicts, and what a neighbour starts from.
    """

    phi: np.ndarray
    log_evidence: float
    log_prior: float
    gradient: np.ndarray
    residual: float
    payload: Any

    @classmethod
    def under(
        cls,
        prior: HyperPrior,
        phi: np.ndarray,
        log_evidence: float,
        slope: np.ndarray,
        residual: float,
        payload: Any,
    ) -> "Node":
        """Return the node of a log evidence with its gradient slope (T,), the prior added."""
        gradient = slope + prior.slope(phi)
        return cls(phi, log_evidence, prior.log_density(phi), gradient, residual, payload)

    @property
    def objective(self) -> float:
        """Log density of phi up to a constant."""
        return self.log_evidence + self.log_prior
