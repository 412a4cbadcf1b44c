"""Slope and temper of a fit on partitions: what is known of a row left out stays where the row is.

A worker takes the sites of its rows out of the posterior once, and keeps what that leaves. After
that two numbers go to a partition in a visit and seven come back. A worker that has nothing, or has
lost it, says so and is sent the posterior.
"""

from typing import Any, NamedTuple

import numpy as np

from .._engine.partition import add_up
from ._calibration import LeftOut, ScoreSums, best_of_sums, cavities, one_node
from ._part_rows import MEMORY, part_rows
from ._sampled_rows import sampled_rows

__all__ = ["calibrated_parts", "left_out_of_anchors", "left_out_of_posterior"]


class Question(NamedTuple):
    """What is asked of rows left out: their `ScoreSums` at theta, rough or not.

    `token` is what workers keep them under.
    """

    token: str
    theta: np.ndarray
    rough: bool


def left_out_of_posterior(part, k, spec, posterior):
    """Return the `RowsLeftOut` of partition k without their sites in a `WholePosterior`."""
    rows = part_rows(part, k, spec)
    return _left_out(rows.sites, *rows.marginals(posterior))


def left_out_of_anchors(part, k, spec, point, anchors):
    """Return the same for a posterior with sampled variances."""
    rows = sampled_rows(part, k, spec)
    return _left_out(rows.sites, rows.predictors(point), rows.variances(anchors))


def _left_out(sites, s, z):
    f = sites.penalty(s, z)
    left = cavities(s, z, f.slope, f.precision, sites.weight)
    return one_node(sites.sign, sites.weight, left)[0]


def score_sums(part, k, question, source):
    """Return the `ScoreSums` of partition k, or None where it keeps nothing and has no `source`.

    That is one of the two functions above, and what it takes besides partition and k.
    """
    rows: Any = MEMORY.find(question.token, k)
    if rows is None:
        if source is None:
            return None
        form, *args = source
        rows = form(part, k, *args)
        MEMORY.keep(question.token, k, rows, sum(values.size for values in rows))
    return ScoreSums.of(question.theta, rows, question.rough)


def calibrated_parts(run, n_rows, spec, form, *state):
    """Return the `LeftOut` of rows in the partitions of a `PartMap`, and the number of visits.

    `form` is one of the two functions above and `state` the posterior it takes; `spec` is that of
    the rows, of which there are n_rows.
    """
    own, n_visits = spec.renamed(), 0

    def sums(theta, rough):
        nonlocal n_visits
        question = Question(own.token, theta, rough)
        full = form, spec, *state
        answers = run(score_sums, range(len(run.parts)), question, None if n_visits else full)
        n_visits += 1
        for k, answer in enumerate(answers):
            if answer is None:
                answers[k] = run.one(k, score_sums, k, question, full)
        return add_up(answers)

    try:
        slope, temper = np.exp(best_of_sums(n_rows, sums))
    finally:
        own.forget()
    return LeftOut(float(slope), float(temper)), n_visits
