"""The published convergent EP: a double loop on the saddle of the EP energy, for reference.

Hernandez-Lobato and Hernandez-Lobato (2011). The inner loop maximises a concave function of the
sites at fixed marginals, the outer one moves the marginals to the moments of the maximum. The
energy falls from one outer step to the next as long as the inner problem is solved tightly, which
takes some seventy factorisations an outer step.
"""

import numpy as np
from scipy.optimize import minimize

from .._engine.contracts import require
from .._engine.loop import SILENT, Evaluation, Result, Trace, reason_to_end
from ._energy import SMALLEST_SITE

__all__ = ["double_loop"]

# Quasi-Newton steps of one inner solve at most, which takes some seventy: half or twice as many
# change no energy of the published sets.
INNER_STEPS = 400


class _Saddle:
    """Energy as a function of the sites at fixed natural parameters of the marginals."""

    def __init__(self, problem):
        self.problem = problem
        self.least = SMALLEST_SITE / problem.factor.slab_variance

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

    def maximise(self, sites, marginal):
        """Solve the inner problem from `sites`; site precisions are scaled to those of Q."""
        d, scale = sites.shape[1], marginal[1]
        low, high = self.least / scale, (scale - self.least) / scale
        start = np.concatenate([sites[0], np.clip(sites[1] / scale, low, high)])

        def negative(x):
            value, gradient, _ = self.value(np.stack([x[:d], x[d:] * scale]), marginal)
            return -value, -np.concatenate([gradient[0], gradient[1] * scale])

        bounds = [(None, None)] * d + list(zip(low, high, strict=True))
        options = {"gtol": 1e-9, "ftol": 1e-15, "maxiter": INNER_STEPS, "maxcor": 20}
        found = minimize(
            negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
        best = found.x if found.fun <= negative(start)[0] else start
        return np.stack([best[:d], best[d:] * scale])


def double_loop(state, *, max_iter, tol, monitor=SILENT):
    """Run the double loop from a state with positive sites; return the loop's kind of Result.

    `max_iter` counts outer steps. The sites are kept positive as published, so that the residual,
    which knows no such bound, may come to rest above `tol`. A state that is a fixed point already
    is returned: the inner solves would only add their own error.
    """
    require("factor", state.problem.factor, ["tilted", "matched"], "the double loop")
    trace, reason = Trace(monitor), None
    saddle = _Saddle(state.problem)
    sites = np.maximum(state.sites, [[-np.inf], [saddle.least]])
    marginal = np.stack([state.mean, np.ones_like(state.mean)]) / state.var
    marginal[1] = np.maximum(marginal[1], 3 * saddle.least)
    while reason is None:
        trace.begin()
        record = state.record
        settled = state.residual < tol
        if not settled:
            sites = saddle.maximise(sites, marginal)
            energy, _, state = saddle.value(sites, marginal)
            marginal = _moved(state, saddle, marginal)
            record = {"residual": state.residual, "objective": energy}
        trace.end(record, state)
        reason = reason_to_end(trace, state.residual < tol, settled, False, max_iter)
    evaluation = Evaluation(state.target, state.residual, record=record, payload=state)
    return Result(state.sites, evaluation, trace.n_iter, reason, trace.history)


def _moved(state, saddle, marginal):
    """Natural parameters of the marginals with the larger of the two second moments."""
    tilted = saddle.problem.factor.tilted(*(marginal - state.sites))
    second = np.maximum(state.var + state.mean**2, tilted.var + tilted.mean**2)
    precision = np.maximum(1.0 / (second - state.mean**2), 3 * saddle.least)
    return np.stack([state.mean * precision, precision])
