"""Fixed-point iterations in order of cost: the next one takes over where one does not converge."""

from collections.abc import Callable
from typing import NamedTuple

from ..._engine.loop import SILENT, Result, Trace

__all__ = ["Rung", "climb"]

# Iterations that a rung may take at least.
_LEAST = 60


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
        left, quota = max_iter - trace.n_iter, max(_LEAST, int(rung.share * max_iter))
        result = rung.run(x, left if k == len(rungs) - 1 else min(quota, left), trace)
        names.append(rung.name)
        x, n_halved = result.x, n_halved + result.n_halved
        if result.reason in ("converged", "asked") or trace.n_iter >= max_iter:
            break
    merged = Result(x, result.evaluation, trace.n_iter, result.reason, trace.history, n_halved)
    return merged, names
