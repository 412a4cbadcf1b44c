"""Fixed-point iterations in order of cost: the next one takes over where one does not converge.

The last resort is the convergent double loop for scalar sites: slow, but its bound only falls. The
outer loop holds the marginals that cavities are taken from; the inner one minimises what is then a
convex function of the sites (Heskes and Zoeter 2002; Opper and Winther 2005).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..._engine.gaussian import ImproperPosterior
from ..._engine.hyper import minimise_where_finite
from ..._engine.loop import SILENT, Evaluation, Result, Trace


class Rung(NamedTuple):
    """One way to the fixed point: name, `run(x, max_iter, monitor) -> Result`, share of max_iter.

    The last rung takes whatever is left.
    """

    name: str
    run: Callable
    share: float = 0.3


def climb(rungs, x, max_iter, monitor=SILENT):
    """Run the rungs from sites x until one converges or max_iter iterations are used up.

    The rungs are in order of cost; each starts where the last one stopped and gets its share of the
    iterations, at least 60. Returns the `Result` of the last rung, with its reason and the
    iterations and the history of all, and the names of the rungs that ran.
    """
    trace, names, n_halved = Trace(monitor), [], 0
    for k, rung in enumerate(rungs):
        left, quota = max_iter - trace.n_iter, max(60, int(rung.share * max_iter))
        result = rung.run(x, left if k == len(rungs) - 1 else min(quota, left), trace)
        names.append(rung.name)
        x, n_halved = result.x, n_halved + result.n_halved
        if result.reason in ("converged", "asked") or trace.n_iter >= max_iter:
            break
    merged = Result(x, result.evaluation, trace.n_iter, result.reason, trace.history, n_halved)
    return merged, names


class MarginalDoubleLoop:
    """The map of one outer step, for `loop.iterate` without damping.

    `exponent` is the power of the rule of the `WholeEP` ep, 1 for moment matching; `inner_steps`
    are those of L-BFGS-B on the sites: the outer loop makes up for what they leave. A step costs
    about 20 posteriors. Its fixed points are those of `ep`.
    """

    def __init__(self, ep, exponent=1.0, inner_steps=15):
        self.ep, self.exponent, self.inner_steps = ep, exponent, inner_steps
        self.factor = ep.factor if exponent == 1.0 else ep.factor.powered(exponent)

    def evaluate(self, x):
        """Map sites (2, n) to an `Evaluation` whose target ends the inner minimisation."""
        plain = self.ep.evaluate(x)
        state = plain.payload[0]
        target = self._minimise(x, state.mean, state.var)
        return Evaluation(target, plain.residual, plain.metric, plain.record, plain.payload)

    def _minimise(self, x, mean, var):
        """Return the sites that minimise the bound while the outer marginals stay."""
        scale = np.stack([1.0 / var, 1.0 / np.sqrt(var)])

        def objective(scaled):
            try:
                value, gradient = self._bound(scaled.reshape(x.shape) * scale, mean, var)
            except ImproperPosterior:
                return np.inf, np.zeros(scaled.size), None
            return value, (gradient * scale).ravel(), None

        free = np.tile([-np.inf, np.inf], (x.size, 1))
        start = (x / scale).ravel()
        found = minimise_where_finite(objective, start, free, max_iter=self.inner_steps)
        return x if found is None else found.x.reshape(x.shape) * scale

    def _bound(self, x, mean, var):
        """Return the inner function and its gradient (2, n) in precisions and shifts."""
        ep, u = self.ep, self.exponent
        precision = 1.0 / var - u * x[0]
        if np.any(precision <= 0):
            raise ImproperPosterior("a cavity of the outer marginals is improper")
        shift = mean / var - u * x[1]
        cavity_mean, cavity_var = shift / precision, 1.0 / precision
        state = ep.structure.posterior(ep.weight * x[0], ep.weight * x[1])
        log_z, g, h = self.factor.tilted(ep.y, cavity_mean, cavity_var)
        left = self.factor.contraction(ep.y, cavity_mean, cavity_var, 0.0, h)
        tilted_mean, tilted_var = cavity_mean + cavity_var * g, cavity_var * left
        partition = 0.5 * (shift * cavity_mean - np.log(precision))
        value = state.log_evidence + ep.weight @ (log_z + partition) / u
        second = state.var + state.mean**2 - tilted_var - tilted_mean**2
        gradient = ep.weight * np.stack([-0.5 * second, state.mean - tilted_mean])
        return value, gradient
