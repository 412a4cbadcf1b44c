"""The published convergent EP: a double loop on the saddle of the EP energy, for reference.

Hernandez-Lobato and Hernandez-Lobato (2011). The inner loop maximises a concave function of the
sites at fixed marginals, the outer one moves the marginals to the moments of the maximum. The
energy falls from one outer step to the next as long as the inner problem is solved tightly, which
takes some seventy factorisations an outer step.
"""

import numpy as np
from scipy.optimize import minimize

from .._engine.loop import Evaluation, Result

__all__ = ["double_loop"]

SMALLEST = 1e-8  # least precision of a site or cavity, in slab precisions


class _Saddle:
    """Energy as a function of the sites at fixed natural parameters of the marginals."""

    def __init__(self, problem):
        self.problem = problem
        self.least = SMALLEST / problem.factor.slab_variance

    def value(self, sites, marginal):
        """Return (energy, gradient in the sites, state); the cavity is `marginal` less `sites`."""
        p = self.problem
        state = p.at(sites)
        q, t = state.marginals, p.factor.tilted(*(marginal - sites))
        data = 0.5 * p.n_rows * np.log(2 * np.pi * p.noise) + 0.5 * q.data_term / p.noise
        own = 0.5 * np.sum(marginal[0] ** 2 / marginal[1] - np.log(marginal[1]))
        energy = p.constant + data - 0.5 * sites[0] @ q.mean + 0.5 * q.log_det - t.log_z.sum() + own
        gap = q.var + q.mean**2 - t.var - t.mean**2
        return energy, np.stack([t.mean - q.mean, 0.5 * gap]), state

    def maximise(self, sites, marginal, max_iter):
        """Solve the inner problem from `sites`; site precisions are scaled to those of Q."""
        d, scale = sites.shape[1], marginal[1]
        low = np.full(d, self.least) / scale
        high = (scale - self.least) / scale
        start = np.concatenate([sites[0], np.clip(sites[1] / scale, low, high)])

        def negative(x):
            value, gradient, _ = self.value(np.stack([x[:d], x[d:] * scale]), marginal)
            return -value, -np.concatenate([gradient[0], gradient[1] * scale])

        found = minimize(
            negative,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(None, None)] * d + list(zip(low, high, strict=True)),
            options={"gtol": 1e-9, "ftol": 1e-15, "maxiter": max_iter, "maxcor": 20},
        )
        best = found.x if found.fun <= negative(start)[0] else start
        return np.stack([best[:d], best[d:] * scale])


def double_loop(state, *, max_iter, tol, monitor=None, inner_iter=400):
    """Run the double loop from a state with positive sites; return the loop's kind of Result.

    `max_iter` counts outer steps. The sites are kept positive as published, so that the residual,
    which knows no such bound, may come to rest above `tol`. A state that is a fixed point already
    is returned: the inner solves would only add their own error.
    """
    if state.residual < tol:
        return _as_it_is(state, monitor)
    saddle = _Saddle(state.problem)
    sites = np.maximum(state.sites, [[-np.inf], [saddle.least]])
    marginal = np.stack([state.mean, np.ones_like(state.mean)]) / state.var
    marginal[1] = np.maximum(marginal[1], 3 * saddle.least)
    history: dict[str, list[float]] = {"residual": [], "objective": []}
    converged = stopped = False
    n_iter = 0
    while not (converged or stopped) and n_iter < max_iter:
        if monitor is not None:
            monitor.begin()
        sites = saddle.maximise(sites, marginal, inner_iter)
        energy, _, state = saddle.value(sites, marginal)
        record = {"residual": state.residual, "objective": energy}
        for name, value in record.items():
            history[name].append(float(value))
        n_iter += 1
        converged = state.residual < tol
        marginal = _moved(state, saddle, marginal)
        if monitor is not None:
            stopped = monitor.end(record, state)
    return Result(
        sites,
        Evaluation(state.target, state.residual, payload=state),
        n_iter,
        converged,
        {k: np.array(v) for k, v in history.items()},
    )


def _as_it_is(state, monitor):
    """Return the Result of one iteration that finds nothing to do."""
    if monitor is not None:
        monitor.begin()
        monitor.end(state.record, state)
    history = {name: np.array([float(value)]) for name, value in state.record.items()}
    evaluation = Evaluation(state.target, state.residual, payload=state)
    return Result(state.sites, evaluation, 1, True, history)


def _moved(state, saddle, marginal):
    """Natural parameters of the marginals with the larger of the two second moments."""
    tilted = saddle.problem.factor.tilted(*(marginal - state.sites))
    second = np.maximum(state.var + state.mean**2, tilted.var + tilted.mean**2)
    precision = np.maximum(1.0 / (second - state.mean**2), 3 * saddle.least)
    return np.stack([state.mean * precision, precision])
