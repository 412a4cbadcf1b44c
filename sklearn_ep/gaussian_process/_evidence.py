"""Maximise an evidence in its hyperparameters with scipy's L-BFGS-B."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

__all__ = ["EvidencePoint", "Learned", "maximise_evidence", "random_starts"]

# Relative difference of evidences below which two points count as equal.
TIE = 1e-10


class EvidencePoint(NamedTuple):
    """Log evidence at hyperparameters theta, its gradient, the EP residual and a payload.

    With a prior on theta, `log_prior` is its log density and `gradient` that of the sum.
    """

    value: float
    gradient: np.ndarray
    residual: float
    payload: Any
    log_prior: float = 0.0

    @property
    def objective(self):
        """What the search maximises."""
        return self.value + self.log_prior


class Learned(NamedTuple):
    """Best hyperparameters found, their point, and the history of the accepted steps.

    `stopped` tells that the monitor ended the search.
    """

    theta: np.ndarray
    point: EvidencePoint
    history: dict[str, np.ndarray]
    stopped: bool


def random_starts(bounds, n_starts, rng):
    """Return starts (n_starts, p) drawn uniformly within finite log bounds."""
    # a kernel without free parameters has bounds of shape (0,)
    bounds = np.reshape(bounds, (-1, 2))
    if n_starts and not np.all(np.isfinite(bounds)):
        raise ValueError("n_restarts_optimizer needs finite bounds of all kernel parameters.")
    return rng.uniform(bounds[:, 0], bounds[:, 1], size=(n_starts, len(bounds)))


def maximise_evidence(
    evaluate: Callable[[np.ndarray], EvidencePoint],
    theta,
    bounds,
    *,
    max_iter,
    starts=(),
    monitor=None,
    ftol=1e-6,
    gtol=1e-3,
    first_step=None,
    max_line_search=20,
) -> Learned:
    """Maximise the evidence from `theta`, or from the best of several starts.

    Parameters
    ----------
    evaluate : callable
        theta (p,) -> `EvidencePoint`; points whose value or gradient is not finite are rejected.
    theta : ndarray of shape (p,)
    bounds : ndarray of shape (p, 2)
    max_iter : int
        Accepted steps of the monitored run.
    starts : sequence of ndarray, default=()
        Further starts; each is run unwatched, then the best is polished as the monitored run.
    monitor : Monitor or None, default=None
        One iteration a step; it may stop the search.
    ftol, gtol : float
        Stopping rules of L-BFGS-B. Relative changes of the evidence below 1e-6 are within the
        error of EP run to a residual of 1e-3.
    first_step : float or None, default=None
        Length of the first step. L-BFGS-B itself takes the whole gradient where all parameters are
        bounded, which may be far too long, and an evaluation wasted.
    max_line_search : int, default=20
        Evaluations of one line search; where they are noisy, more cannot help.

    Returns
    -------
    Learned
    """
    options = dict(maxiter=max_iter, ftol=ftol, gtol=gtol, maxls=max_line_search)
    if len(starts):
        runs = [_one_run(evaluate, t, bounds, None, first_step, options) for t in (theta, *starts)]
        theta = max(runs, key=lambda r: r.point.objective).theta
    return _one_run(evaluate, theta, bounds, monitor, first_step, options)


def _with_first_step(objective, theta, length):
    """Return (unit, objective in theta / unit) that make the gradient step as long as asked.

    The evaluation at the start, which sets the unit, is kept for the search.
    """
    value, gradient = objective(theta)
    norm = np.linalg.norm(gradient)
    unit = np.sqrt(min(1.0, length / norm)) if norm > 0 else 1.0
    first = theta / unit

    def scaled(t):
        v, g = (value, gradient) if np.array_equal(t, first) else objective(t * unit)
        return v, g * unit

    return unit, scaled


def _one_run(evaluate, theta, bounds, monitor, first_step, options):
    best: list[Any] = [None, None]
    history: dict[str, list[float]] = {"residual": [], "log_evidence": []}
    stopped: list[bool] = []

    def objective(t):
        point = evaluate(t)
        value = point.objective
        if not (np.isfinite(value) and np.all(np.isfinite(point.gradient))):
            return 1e25, np.zeros_like(t)
        # the margin keeps the choice among equal points from hanging on rounding errors
        if best[1] is None or value > best[1].objective + TIE * (1.0 + abs(value)):
            best[:] = t.copy(), point
        return -value, -point.gradient

    def step(intermediate_result):
        record = {"residual": best[1].residual, "log_evidence": best[1].value}
        for name, value in record.items():
            history[name].append(float(value))
        if monitor is not None:
            monitor.begin()
            if monitor.end(record, best[1].payload):
                stopped.append(True)
                raise StopIteration

    theta, unit, scaled = np.clip(theta, bounds[:, 0], bounds[:, 1]), 1.0, objective
    if first_step is not None:
        unit, scaled = _with_first_step(objective, theta, first_step)
    minimize(
        scaled,
        theta / unit,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds / unit,
        callback=step,
        options={**options, "gtol": options["gtol"] * unit},
    )
    if best[1] is None:
        raise ValueError("the evidence is not finite at the initial kernel: change its parameters.")
    arrays = {k: np.array(v) for k, v in history.items()}
    return Learned(best[0], best[1], arrays, bool(stopped))
