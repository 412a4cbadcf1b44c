"""Intervals of class probabilities: what the posterior of latent values leaves open of them.

A posterior at rows is a mixture over nodes of hyperparameters of normal distributions. One that
has several nodes offers `at_nodes(*rows)`; of others `latent(*rows)` is asked.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from .._engine.hyper import mixture_quantiles

_LOG2_POINTS = 9  # 512 points: ends of a 90 % interval are those of 89.6 to 90.4 %
_NUMBERS = 2**22  # most numbers of a block of rows, 32 MB


class NodesAtRows(NamedTuple):
    """Latent values of rows at the M nodes.

    weight (M,) sums to one; mean is (M, n) and var (M, n), or (M, n, K) and covariances (M, n, K,
    K); factors are those of the nodes, one for all where there is only one.
    """

    weight: np.ndarray
    mean: Any
    var: Any
    factors: list[Any]

    def take(self, rows):
        """Return the same of some rows."""
        return self._replace(mean=self.mean[:, rows], var=self.var[:, rows])


def nodes_at(posterior, link, *rows):
    """Return the `NodesAtRows` of a posterior.

    A link that is the factor of the posterior stands for the factor of each node.
    """
    if not hasattr(posterior, "at_nodes"):
        mean, var = posterior.latent(*rows)
        return NodesAtRows(np.ones(1), mean[None], var[None], [link])
    found = posterior.at_nodes(*rows)
    same = link is not getattr(posterior, "factor", link) or all(f is link for f in found.factors)
    return found._replace(factors=[link]) if same else found


def _ends(level):
    return [0.5 - 0.5 * level, 0.5 + 0.5 * level]


def interval_of_two(nodes, level):
    """Return central intervals (n, 2) of the probability of the second class.

    A quantile of a probability is the link at that of the latent value, since links rise.
    """
    if len(nodes.factors) > 1:
        return _interval_of_points([nodes], level, lambda log_p: np.exp(log_p))[:, 0]
    ends = mixture_quantiles(nodes.weight, nodes.mean, np.sqrt(nodes.var), _ends(level))
    return np.exp(nodes.factors[0].log_prob(1.0, ends)).T


def interval_of_rest(problems, level):
    """Return central intervals (n, K, 2) from the `NodesAtRows` of each class against the rest."""
    return _interval_of_points(problems, level, _shares)


def interval_of_joint(nodes, level):
    """Return central intervals (n, K, 2) from the nodes of a joint posterior of all classes."""
    return _interval_of_points([nodes], level, lambda log_p: np.exp(log_p))


def _shares(log_p):
    proba = np.exp(log_p)
    return proba / proba.sum(axis=2, keepdims=True)


def _interval_of_points(problems, level, proba_of):
    """Return quantiles (n, K, 2) over points that cover the posterior evenly.

    The points are those of Sobol's sequence, the same for each row: a node and normal values for
    each problem. `proba_of` maps log probabilities (n, S, K) to probabilities.
    """
    widths = [1 if p.mean.ndim == 2 else p.mean.shape[2] for p in problems]
    points, out = _sobol(sum(widths) + len(widths)), []
    block = max(1, _NUMBERS // (len(points) * sum(widths)))
    for start in range(0, problems[0].mean.shape[1], block):
        some, log_p, used = slice(start, start + block), [], 0
        for nodes, width in zip(problems, widths, strict=True):
            own = points[:, used : used + width + 1]
            log_p.append(_log_proba_at(nodes.take(some), own))
            used += width + 1
        out.append(np.quantile(proba_of(np.concatenate(log_p, axis=2)), _ends(level), axis=1))
    return np.moveaxis(np.concatenate(out, axis=1), 0, -1)


def _sobol(dimension):
    """Return points (S, dimension) in the open unit cube."""
    from scipy.stats import qmc

    corners = qmc.Sobol(dimension, scramble=False).random_base2(_LOG2_POINTS)
    return corners + 0.5 / len(corners)


def _log_proba_at(nodes, points):
    """Return log probabilities (n, S, 1) or (n, S, K) at points (S, 1 + K) of the unit cube.

    The first coordinate chooses the node, by its weight.
    """
    chosen = np.searchsorted(np.cumsum(nodes.weight)[:-1], points[:, 0], side="right")
    normal, joint = ndtri(points[:, 1:]), nodes.mean.ndim == 3
    out = np.empty((nodes.mean.shape[1], *normal.shape))
    for m in np.unique(chosen):
        own, factor = chosen == m, nodes.factors[m if len(nodes.factors) > 1 else 0]
        if joint:
            away = np.einsum("nij,sj->nsi", _roots(nodes.var[m]), normal[own])
            out[:, own] = factor.log_prob(nodes.mean[m][:, None] + away)
        else:
            away = np.sqrt(nodes.var[m])[:, None] * normal[own, 0]
            out[:, own, 0] = factor.log_prob(1.0, nodes.mean[m][:, None] + away)
    return out


def _roots(cov):
    """Return roots R (n, K, K) with R R' = cov, which may be singular."""
    values, vectors = np.linalg.eigh(cov)
    # eigenvalues of a singular matrix are zero but for rounding
    return vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
