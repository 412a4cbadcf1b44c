"""What latent values say of labels: of one problem, of one a class, or of all classes jointly.

The interval of a class probability has the quantiles that the link gives to the posterior of the
latent values. This posterior is a mixture of normal distributions, one for each node of
hyperparameters.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax, ndtri, softmax

from .._engine.class_sites import contrast_variances
from .._engine.gaussian import covariance_root, root_for_draws, row_blocks
from .._engine.hyper import even_points, log_mixture, mixture_moments, mixture_quantiles
from .._engine.left_out import scaled
from .._engine.noisy_argmax import QUICK_SOFTMAX, SOFTMAX
from .fitting import one_or_stack
from .row_parts import BLOCK
from .summary import ends_of

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

    def moments(self):
        """Return means and variances (n,), or means (n, K) and covariances (n, K, K).

        By the law of total variance.
        """
        if self.mean.ndim == 2:
            return mixture_moments(self.weight, self.mean, self.var)
        centre = np.tensordot(self.weight, self.mean, 1)
        apart = self.mean - centre
        between = np.einsum("m,mnc,mnj->ncj", self.weight, apart, apart)
        return centre, np.tensordot(self.weight, self.var, 1) + between

    def tempered(self, temper):
        """Return the same about the same mean, all variances times `temper`."""
        centre = np.tensordot(self.weight, self.mean, 1)
        mean, var = scaled(centre, self.mean, self.var, 1.0, temper)
        return self._replace(mean=mean, var=var)

    def log_proba(self, labels=()):
        """Return log probabilities (n, len(labels)), or (n, K) of all classes."""
        sides = zip(self.links, self.mean, self.var, strict=True)
        if self.mean.ndim == 2:
            each = [np.column_stack([k.tilted(s, *of).log_z for s in labels]) for k, *of in sides]
        else:
            each = [link.log_proba(m, contrast_variances(cov)) for link, m, cov in sides]
        return log_mixture(self.weight, np.array(each))


def nodes_at(posterior, link, rows):
    """Return the `NodesAtRows` of a posterior, by its `at_nodes` where it has several nodes."""
    if hasattr(posterior, "at_nodes"):
        return posterior.at_nodes(link, rows)
    mean, var = posterior.latent(rows)
    return NodesAtRows(np.ones(1), mean[None], var[None], [link])


def latent_mean(posterior, X):
    """Return means (n,) or (n, K) of the latent values, without their variances where it may."""
    return posterior.latent_mean(X) if hasattr(posterior, "latent_mean") else posterior.latent(X)[0]


def probabilities(log_proba):
    """Return probabilities (.., K) of classes from their logs, with sum one to the last digit."""
    proba = np.exp(log_proba)
    return proba / proba.sum(axis=-1, keepdims=True)


def _interval_of_points(problems, level, proba_of):
    """Return quantiles (n, K, 2) over points that cover the posterior evenly.

    The points are those of Sobol's sequence, the same for each row: a node and normal values for
    each problem. `proba_of` maps what these say there (n, S, K) to probabilities.
    """
    widths = [1 if p.mean.ndim == 2 else p.mean.shape[2] for p in problems]
    points = even_points(sum(widths) + len(widths), _LOG2_POINTS)
    own = np.split(points, np.cumsum(widths[:-1]) + np.arange(1, len(widths)), axis=1)
    out = []
    for rows in row_blocks(problems[0].mean.shape[1], points.size, BLOCK):
        told = [_told_at(p.take(rows), u) for p, u in zip(problems, own, strict=True)]
        out.append(np.quantile(proba_of(np.concatenate(told, axis=2)), ends_of(level), axis=1))
    return np.moveaxis(np.concatenate(out, axis=1), 0, -1)


def _told_at(nodes, points):
    """Return log probabilities (n, S, 1), or probabilities (n, S, K) of joint classes.

    Points (S, 1 + K) are of the unit cube: the first coordinate chooses the node, by its weight.
    """
    chosen = np.searchsorted(np.cumsum(nodes.weight)[:-1], points[:, 0], side="right")
    normal, joint = ndtri(points[:, 1:]), nodes.mean.ndim == 3
    out = np.empty((nodes.mean.shape[1], *normal.shape))
    for m in np.unique(chosen):
        own, link = chosen == m, nodes.links[m]
        if joint:
            away = np.einsum("nij,sj->nsi", covariance_root(nodes.var[m]), normal[own])
            out[:, own] = link.proba(nodes.mean[m][:, None] + away)
        else:
            away = np.sqrt(nodes.var[m])[:, None] * normal[own, 0]
            out[:, own, 0] = link.log_prob(1.0, nodes.mean[m][:, None] + away)
    return out


def label_log_prob(link, draws):
    """Return log probabilities (..., 2) of the labels -1 and 1 at latent values."""
    return np.stack([link.log_prob(label, draws) for label in (-1.0, 1.0)], axis=-1)


def draw_latent(posterior, X, n_samples, rng):
    """Joint draws (n_samples, n) of the latent function, by the posterior's own way or a root."""
    if hasattr(posterior, "draw"):
        return posterior.draw(X, n_samples, rng)
    mean, _ = posterior.latent(X)
    root = root_for_draws(posterior.covariance(X, X))
    return mean + rng.standard_normal((n_samples, len(mean))) @ root.T


def draw_log_prob(posterior, link, X, n_samples, rng):
    """Return label log probabilities (n_samples, n, 2) of joint draws of the latent function."""
    if hasattr(posterior, "draw_log_prob"):
        return posterior.draw_log_prob(link, X, n_samples, rng)
    return label_log_prob(link, draw_latent(posterior, X, n_samples, rng))


def covariance_with(posterior, X2):
    """Return the map from rows X1 to `posterior.covariance(X1, X2)`."""
    if hasattr(posterior, "covariance_with"):
        return posterior.covariance_with(X2)
    return lambda X1: posterior.covariance(X1, X2)


class SeparateLatents:
    """One latent function for two classes, or one a class, each of a problem of its own.

    A posterior offers `latent(X)` -> mean and variance (n,), or `at_nodes(link, X)` where it is not
    Gaussian, and `covariance(X1, X2)` -> (n1, n2). It may offer `latent_mean(X)` -> mean alone,
    `draw(X, n_samples, rng)` -> joint draws (n_samples, n), and `covariance_with(X2)` -> map from
    X1 to covariances. Log Z of its `factor` is the log probability of a label. One whose nodes
    differ in their factors offers `draw_log_prob(link, X, n_samples, rng)`.
    """

    def __init__(self, posteriors, links):
        self.posteriors, self.links = posteriors, links

    def mean_and_variance(self, X):
        """Return means and variances, (n,) or (n, K)."""
        pairs = [nodes.moments() for nodes in self._at(X)]
        return one_or_stack([m for m, _ in pairs], axis=1), one_or_stack([v for _, v in pairs], 1)

    def mean(self, X):
        """Return means (n,) or (n, K)."""
        return one_or_stack([latent_mean(p, X) for p in self.posteriors], axis=1)

    def _at(self, X):
        """Return the `NodesAtRows` of each problem."""
        pairs = zip(self.posteriors, self.links, strict=True)
        return [nodes_at(posterior, link, X) for posterior, link in pairs]

    def covariance(self, X1, X2):
        """Return the covariances (n1, n2) or (K, n1, n2) between rows."""
        return one_or_stack([p.covariance(X1, X2) for p in self.posteriors])

    def covariance_with(self, X2):
        """Return the map from rows X1 to `covariance(X1, X2)`."""
        each = [covariance_with(p, X2) for p in self.posteriors]
        return lambda X1: one_or_stack([of_rows(X1) for of_rows in each])

    def log_proba(self, X):
        """Return log probabilities of the classes (n, K)."""
        nodes = self._at(X)
        if len(nodes) == 1:
            return nodes[0].log_proba((-1.0, 1.0))
        return log_softmax(np.hstack([own.log_proba((1.0,)) for own in nodes]), axis=1)

    def proba_interval(self, X, level):
        """Return central intervals (n, 2) or (n, K, 2) of the probabilities of `log_proba`.

        The quantile of one probability is the link at the quantile of the latent value, since links
        rise.
        """
        problems = self._at(X)
        first = problems[0]
        if len(problems) > 1:
            return _interval_of_points(problems, level, partial(softmax, axis=-1))
        if any(link is not first.links[0] for link in first.links):
            return _interval_of_points(problems, level, np.exp)[:, 0]
        ends = mixture_quantiles(first.weight, first.mean, np.sqrt(first.var), ends_of(level))
        return np.exp(first.links[0].log_prob(1.0, ends)).T

    def log_odds(self, X):
        """Return log odds (n, K) of each class against the rest: they rank as probabilities do.

        Means do not where the problems differ in posterior variance.
        """
        both = [nodes.log_proba((-1.0, 1.0)) for nodes in self._at(X)]
        return np.column_stack([log_p[:, 1] - log_p[:, 0] for log_p in both])

    def committee(self, X, n_samples, rng):
        """Return class probabilities (S, n, K) of joint draws."""
        pairs = zip(self.posteriors, self.links, strict=True)
        log_p = [draw_log_prob(p, link, X, n_samples, rng) for p, link in pairs]
        both = log_p[0] if len(log_p) == 1 else np.stack([p[..., 1] for p in log_p], axis=-1)
        return softmax(both, axis=-1)


class JointLatents:
    """One latent function a class with a joint posterior.

    The posterior offers `n_classes`, `latent(X)` -> means (n, K) and covariances (n, K, K),
    `covariances_with(X2, pairs)` -> map from rows X1 to (P, n1, n2) between pairs of classes, and
    `draw(X, n_samples, rng)` -> (S, n, K). It has the `factor` of all classes. One that is not
    Gaussian offers `at_nodes(factor, X)`. Of two classes only the contrast
    (f_1 - f_0) / sqrt(2) matters, which is the latent function of the binary model. Labels are
    predicted by another `factor` where one is given, and from variances times a `temper`.
    """

    def __init__(self, posterior, factor=None, temper=None):
        self.posterior, self.temper = posterior, temper
        self.factor = posterior.factor if factor is None else factor

    def _at(self, X):
        """Return the `NodesAtRows` that labels are predicted from."""
        return self._tempered(nodes_at(self.posterior, self.factor, X))

    def _tempered(self, nodes):
        return nodes if self.temper is None else nodes.tempered(self.temper)

    def mean_and_variance(self, X):
        """Return means and variances (n, K), of two classes (n,)."""
        mean, cov = nodes_at(self.posterior, self.factor, X).moments()
        if mean.shape[1] == 2:
            return (mean[:, 1] - mean[:, 0]) / np.sqrt(2.0), contrast_variances(cov)[:, 0]
        return mean, np.einsum("ncc->nc", cov).copy()

    def mean(self, X):
        """Return means (n, K), of two classes (n,)."""
        mean = latent_mean(self.posterior, X)
        return (mean[:, 1] - mean[:, 0]) / np.sqrt(2.0) if mean.shape[1] == 2 else mean

    def covariance(self, X1, X2):
        """Return the covariances (K, n1, n2) of each class, of two classes (n1, n2)."""
        if X1.shape[0] < X2.shape[0]:  # what is kept of the rows of the map is the smaller part
            return np.swapaxes(self.covariance(X2, X1), -1, -2)
        return self.covariance_with(X2)(X1)

    def covariance_with(self, X2):
        """Return the map from rows X1 to `covariance(X1, X2)`."""
        K = self.posterior.n_classes
        if K > 2:
            return self.posterior.covariances_with(X2, [(c, c) for c in range(K)])
        of_rows = self.posterior.covariances_with(X2, [(0, 0), (1, 1), (0, 1), (1, 0)])
        return lambda X1: np.tensordot([0.5, 0.5, -0.5, -0.5], of_rows(X1), 1)

    def variance_and_log_proba(self, X):
        """Return variances and log probabilities (n, K) for scores, from one pass.

        Variances of each class less the mean of all; probabilities of a softmax to 1e-6 as a rule,
        for half of the nodes.
        """
        factor = QUICK_SOFTMAX if self.factor is SOFTMAX else self.factor
        nodes = nodes_at(self.posterior, factor, X)
        cov = nodes.moments()[1]
        log_proba = self._tempered(nodes).log_proba()
        return np.einsum("ncc->nc", cov) - cov.mean((1, 2))[:, None], log_proba

    def log_proba(self, X):
        """Return log probabilities of the classes (n, K)."""
        return self._at(X).log_proba()

    def proba_interval(self, X, level):
        """Return central intervals (n, 2) or (n, K, 2) of the probabilities of `log_proba`."""
        found = _interval_of_points([self._at(X)], level, np.asarray)
        return found[:, 1] if found.shape[1] == 2 else found

    def committee(self, X, n_samples, rng):
        """Return class probabilities (S, n, K) of joint draws."""
        latent = self.posterior.draw(X, n_samples, rng)
        if self.temper is not None:
            centre = nodes_at(self.posterior, self.factor, X).moments()[0]
            latent = centre + np.sqrt(self.temper) * (latent - centre)
        return self.factor.proba(latent)


def is_joint(posteriors):
    """Say whether there is one posterior of all classes."""
    return getattr(posteriors[0], "n_classes", 1) > 1


def links_of(posteriors):
    """Return the binary links of the posteriors, or what stands in for them: one a latent value."""
    if not is_joint(posteriors):
        return [p.factor for p in posteriors]
    n_classes = posteriors[0].n_classes
    return [posteriors[0].factor.against_rest] * (1 if n_classes == 2 else n_classes)


def latents_of(posteriors, links, temper=None):
    """Return what predicts from the posteriors of an estimator."""
    if is_joint(posteriors):
        return JointLatents(posteriors[0], temper=temper)
    return SeparateLatents(posteriors, links)
