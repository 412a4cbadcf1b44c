"""Fixed-point iterations in order of cost: the next one takes over where one does not converge."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..._engine.loop import Result

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


def climb(rungs, x, max_iter, monitor=None):
    """Run the rungs from sites x until one converges or max_iter iterations are used up.

    Parameters
    ----------
    rungs : sequence of Rung
        In order of cost. Each starts where the last one stopped.
    x : ndarray
    max_iter : int
        Iterations of all rungs together; a rung gets its share of them, at least 60.
    monitor : Monitor or None, default=None

    Returns
    -------
    result : Result
        That of the last rung, with the iterations and the history of all.
    names : list of str
        The rungs that ran.
    """
    histories, names, used = [], [], 0
    for k, rung in enumerate(rungs):
        left, quota = max_iter - used, max(_LEAST, int(rung.share * max_iter))
        result = rung.run(x, left if k == len(rungs) - 1 else min(quota, left), monitor)
        names.append(rung.name)
        histories.append(result.history)
        used += result.n_iter
        x = result.x
        if result.converged or result.asked_to_stop or used >= max_iter:
            break
    history = {n: np.concatenate([h[n] for h in histories]) for n in histories[0]}
    merged = Result(x, result.evaluation, used, result.converged, history, result.n_halved)
    return merged, names
