"""Intervals of class probabilities: what the posterior of latent values leaves open of them.

A posterior at rows is a mixture of normal distributions, one a node of hyperparameters.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri
from sklearn.utils import gen_batches

from .._engine.gaussian import covariance_root
from .._engine.hyper import even_points, mixture_quantiles
from .row_statistics import BLOCK

# 1024 points: 90 % intervals of 360 rows of generated posteriors, 3 to 10 classes at 1 or 8 nodes,
# hold .88 to .92 of draws, .90 in the mean; half as many points .86 to .93
_LOG2_POINTS = 10


class NodesAtRows(NamedTuple):
    """Latent values of rows at the M nodes.

    weight (M,) sums to one; mean is (M, n) and var (M, n), or (M, n, K) and covariances (M, n, K,
    K); links (M,) give the probability of a label at a latent value.
    """

    weight: np.ndarray
    mean: np.ndarray
    var: np.ndarray
    links: list

    def take(self, rows):
        """Return the same of some rows."""
        return self._replace(mean=self.mean[:, rows], var=self.var[:, rows])


def nodes_at(posterior, link, *rows):
    """Return the `NodesAtRows` of a posterior, by its `at_nodes` where it has several nodes."""
    if hasattr(posterior, "at_nodes"):
        return posterior.at_nodes(link, *rows)
    mean, var = posterior.latent(*rows)
    return NodesAtRows(np.ones(1), mean[None], var[None], [link])


def interval_of_separate(problems, level):
    """Return central intervals (n, 2) of one problem, or (n, K, 2) of one a class.

    `problems` are their `NodesAtRows`. The quantile of one probability is the link at the quantile
    of the latent value, since links rise.
    """
    first = problems[0]
    if len(problems) > 1:
        return _interval_of_points(problems, level, _shares)
    if any(link is not first.links[0] for link in first.links):
        return _interval_of_points(problems, level, np.exp)[:, 0]
    ends = mixture_quantiles(first.weight, first.mean, np.sqrt(first.var), _ends(level))
    return np.exp(first.links[0].log_prob(1.0, ends)).T


def interval_of_joint(nodes, level):
    """Return central intervals (n, 2) or (n, K, 2) from the nodes of a joint posterior."""
    found = _interval_of_points([nodes], level, np.exp)
    return found[:, 1] if found.shape[1] == 2 else found


def _ends(level):
    return [0.5 - 0.5 * level, 0.5 + 0.5 * level]


def _shares(log_p):
    proba = np.exp(log_p)
    return proba / proba.sum(axis=2, keepdims=True)


def _interval_of_points(problems, level, proba_of):
    """Return quantiles (n, K, 2) over points that cover the posterior evenly.

    The points are those of Sobol's sequence, the same for each row: a node and normal values for
    each problem. `proba_of` maps log probabilities (n, S, K) to probabilities.
    """
    widths = [1 if p.mean.ndim == 2 else p.mean.shape[2] for p in problems]
    points = even_points(sum(widths) + len(widths), _LOG2_POINTS)
    own = np.split(points, np.cumsum(widths[:-1]) + np.arange(1, len(widths)), axis=1)
    out = []
    for rows in gen_batches(problems[0].mean.shape[1], max(1, BLOCK // points.size)):
        log_p = [_log_proba_at(p.take(rows), u) for p, u in zip(problems, own, strict=True)]
        out.append(np.quantile(proba_of(np.concatenate(log_p, axis=2)), _ends(level), axis=1))
    return np.moveaxis(np.concatenate(out, axis=1), 0, -1)


def _log_proba_at(nodes, points):
    """Return log probabilities (n, S, 1) or (n, S, K) at points (S, 1 + K) of the unit cube.

    The first coordinate chooses the node, by its weight.
    """
    chosen = np.searchsorted(np.cumsum(nodes.weight)[:-1], points[:, 0], side="right")
    normal, joint = ndtri(points[:, 1:]), nodes.mean.ndim == 3
    out = np.empty((nodes.mean.shape[1], *normal.shape))
    for m in np.unique(chosen):
        own, link = chosen == m, nodes.links[m]
        if joint:
            away = np.einsum("nij,sj->nsi", covariance_root(nodes.var[m]), normal[own])
            out[:, own] = link.log_prob(nodes.mean[m][:, None] + away)
        else:
            away = np.sqrt(nodes.var[m])[:, None] * normal[own, 0]
            out[:, own, 0] = link.log_prob(1.0, nodes.mean[m][:, None] + away)
    return out
