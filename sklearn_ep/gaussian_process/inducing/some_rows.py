"""Learning by passes that begins with some of the rows.

Where kernel and inducing points are far from the best, some of the rows tell the way as well as
all, at a fraction of the price; what is particular to them goes as their number grows.
"""

import numpy as np

from ..._engine.loop import StepsOfPhase, Trace
from ..._engine.partition import Part, PartMap
from .ep import InducingEP, read_rows
from .learning import learn_by_passes
from .rows import standard_keys

__all__ = ["SETTLED_AFTER", "learn_on_more_and_more_rows"]

# Copies from which on it pays, and the fewest to begin with: inducing points fit fewer too closely.
_MANY, _FEWEST = 10_000, 2000
# Shares of the rows, each with the share of `max_iter` that goes into passes over them; in the end
# all rows. 20,000 rows of 20 columns: log loss .276 in 61 whole passes, .273 in 150.
_RUNGS = ((0.1, 0.4), (0.25, 0.4), (0.5, 0.27))
_LAST_SHARE = 0.135
# Gain of the last passes in nats a row at which learning has converged: twice that of passes over
# all rows, since rows that were not seen before are a part of it.
SETTLED_AFTER = 0.01


def rows_of_part(part, message, classes, units, seed, largest):
    """Return X, class indices and weights of the rows of a partition with keys up to `largest`."""
    X, y, weight = read_rows(part, classes)
    chosen = np.flatnonzero(standard_keys(X, units, seed) <= largest)
    return np.asarray(X[chosen], dtype=np.float64), y[chosen], weight[chosen]


def _rows(ep, data, share, seed):
    """Return a share of the rows of all partitions.

    They are chosen by content alone: not by their order, nor by partitions.
    """
    largest = np.uint64(share * float(np.iinfo(np.uint64).max))
    messages = [None] * len(ep.sizes)
    pieces = ep.run(rows_of_part, messages, ep.classes, data.units, seed, largest)
    return [np.concatenate(p) for p in zip(*pieces, strict=True)]


def _with_sites(ep, model):
    """Return the state of the rows of `ep` with the sites that the posterior of others asks for."""
    return ep.renew(model, [np.zeros((ep.n_problems, 2, n)) for n in ep.sizes])


def learn_on_more_and_more_rows(
    ep, hyper, vector, rule, data, monitor, *, seed, damping, max_iter, kind
):
    """Learn by passes over some of the rows, then over more.

    The rule is told gradients of the scale of all rows, and goes on with them. Returns vector and
    state of all rows to go on from, and how many passes over them are due; None where rows are few.
    """
    if data.weight < _MANY or ep.copies is not None:
        return None
    model, asked = None, False
    for share, of_passes in _RUNGS:
        X, y, weight = _rows(ep, data, max(share, _FEWEST / data.weight), seed)
        if asked or len(np.unique(y)) < len(data.labels):
            continue
        with PartMap([Part(X, y, weight)], None) as run, monitor.phase("some rows first") as told:
            small = InducingEP(run, [len(y)], None, ep.n_problems, ep.factor, ep.rule)
            cold = model is None
            state = small.zero(hyper.prior(vector)) if cold else _with_sites(small, model)
            trace = Trace(StepsOfPhase(told))
            options = dict(weight=weight.sum(), damping=damping, trace=trace, kind=kind)
            options |= dict(max_iter=max(1, round(of_passes * max_iter)))
            options |= dict(scale=data.weight / weight.sum())
            state, vector, _ = learn_by_passes(small, hyper, vector, state, rule, **options)
            model, asked = small.model(state), trace.asked
    if model is None:
        return None
    return vector, _with_sites(ep, model), max(1, round(_LAST_SHARE * max_iter))
