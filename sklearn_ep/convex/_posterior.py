"""Predictions from posteriors of weights, and new rows by rank-one updates.

A posterior is a Gaussian, or a mixture of them over nodes of hyperparameters. Mean and variance of
predictors may be scaled by a calibration, those of weights never are.
"""

import copy
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import logsumexp

from .._engine.gaussian import row_blocks
from .._engine.hyper import draw_mixture, mixture_covariance, mixture_moments, mixture_quantiles
from .._engine.likelihoods import Logit
from .._engine.quadrature import logistic_moments
from .._estimator.averaged import AveragedPosterior
from .._estimator.latents import label_log_prob
from .._estimator.summary import ends_of, interval_of
from ._systems import with_ones

# Sampled variances are only estimates: included rows may take away at most this share of them.
_LARGEST_SHARE = 0.95


class LinearPosterior:
    """Intervals of weights, and covariances of predictors by those of the weights with some.

    A subclass offers the `mean` of the weights, their `coefficient_variance()`, and
    `weight_covariance(B, *classes)`, (n, n_new) for rows B, of several classes jointly for the
    weights of the first with the predictors of the second.
    """

    intercept: bool
    mean: np.ndarray
    coefficient_variance: Any
    weight_covariance: Any

    def coefficient_interval(self, level):
        """Return central intervals (.., 2) of the weights."""
        return interval_of(self.mean, np.sqrt(self.coefficient_variance()), level)

    def covariance(self, X1, X2):
        """Return the covariance (n1, n2) of the predictors of new rows."""
        if X1.shape[0] < X2.shape[0]:  # the matrix of weights and rows is the smaller one
            return self.covariance(X2, X1).T
        return self.covariance_with(X2)(X1)

    def covariance_with(self, X2, *classes):
        """Return the map from rows X1 to covariances (n1, n2); n n2 numbers are kept."""
        B = with_ones(X2, self.intercept)
        blocks = [self.weight_covariance(B[rows], *classes) for rows in row_blocks(*B.shape)]
        joint = np.hstack(blocks)
        slopes, level = (joint[:-1], joint[-1]) if self.intercept else (joint, 0.0)
        return lambda X1: np.asarray(X1 @ slopes) + level  # no copy of X1 with ones


class WeightPosterior(LinearPosterior):
    """Posterior N(mean, A^-1) of the weights of a linear predictor, the intercept last if any.

    The `system` gives covariances, draws and solves, the `predictor` the variances of rows and
    coefficients; it is the system itself where they are exact.

    Rows that are included later are kept as the directions g_k of the downdates A^-1 - sum g_k g_k'
    and not worked into the factorisation, which works for every system and leaves the original
    alone. m included rows add O(n m) memory and O(n m) flops a predicted row.
    """

    factor = Logit()  # link of the predictor to the label

    def __init__(self, mean, intercept, system):
        self.mean, self.intercept = mean, intercept
        self.system = self.predictor = system
        self.directions = np.empty((0, len(mean)))
        self.rows = np.empty((0, len(mean)))
        self.precision, self.roots = np.empty(0), np.empty(0)

    def _lessened(self, var, product):
        """Return variances less what the included rows explain, `product` (.., m) with them."""
        explained = np.einsum("ij,ij->i", product, product)
        exact = self.predictor is self.system
        least = np.finfo(float).eps if exact else 1.0 - _LARGEST_SHARE
        return np.maximum(var - explained, least * var)

    def latent_mean(self, X):
        """Return the mean (n_new,) of the predictor."""
        return with_ones(X, self.intercept) @ self.mean

    def latent(self, X):
        """Return mean and variance (n_new,) of the predictor at new rows."""
        B = with_ones(X, self.intercept)
        var = self._lessened(self.predictor.row_variance(B), B @ self.directions.T)
        return B @ self.mean, var

    def coefficient_variance(self):
        """Return the variances (n,) of the weights."""
        return self._lessened(self.predictor.coefficient_variance(), self.directions.T)

    def weight_covariance(self, B):
        """Return the covariances (n, n_new) of the weights with the predictor at rows B."""
        B = B.toarray() if sp.issparse(B) else B
        included = self.directions.T @ (self.directions @ B.T)
        return self.system.solve(np.ascontiguousarray(B.T)) - included

    def sample(self, n_samples, rng):
        """Return draws (n_samples, n) of the weights.

        Included rows enter by Matheron's rule: a draw is corrected by its own noisy observation.
        """
        draws = self.system.draw(n_samples, rng)
        for row, direction, precision, root in zip(
            self.rows, self.directions, self.precision, self.roots, strict=True
        ):
            noise = rng.standard_normal(n_samples) / np.sqrt(precision)
            draws += np.outer(noise - draws @ row, root * direction)
        return self.mean + draws

    def predictors(self, X):
        """Return the map from weights (s, n) to linear predictors (s, rows of X)."""
        B = with_ones(X, self.intercept)
        return lambda weights: np.asarray((B @ weights.T).T)

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new) of the predictor at new rows."""
        return self.predictors(X)(self.sample(n_samples, rng))

    def joined(self, X, sites):
        """Return a new posterior with rows included one after another, and log p of their labels.

        `sites` are the `LogisticSites` of the rows; the probability of each label is that given the
        rows before it.
        """
        new, log_prob = copy.copy(self), 0.0
        B = with_ones(X, self.intercept)
        B = B.toarray() if sp.issparse(B) else B
        for i, row in enumerate(B):
            site = sites.of_rows(slice(i, i + 1))
            d = self.system.solve(row) - new.directions.T @ (new.directions @ row)
            mean, rho = np.array([row @ new.mean]), np.array([row @ d])
            precision, shift = site.joined(mean, rho)
            log_prob += float(logistic_moments(site.sign * mean, rho)[0][0])
            kappa = 1.0 + rho * precision
            root = np.sqrt(precision / kappa)
            new.mean = new.mean + d * ((shift - mean * precision) / kappa)
            new.directions = np.vstack([new.directions, root * d])
            new.rows = np.vstack([new.rows, row])
            new.precision = np.append(new.precision, precision)
            new.roots = np.append(new.roots, root)
        return new, log_prob


class AveragedWeights(LinearPosterior, AveragedPosterior):
    """Mixture with weight (M,) of the posteriors of the weights at several hyperparameters.

    Predictors are scaled about the mean of the mixture: their mean is that of the mixture times
    `slope`, their variance times slope^2 `temper`.
    """

    def __init__(self, nodes, weight, slope=1.0, temper=1.0):
        super().__init__(nodes, weight)
        self.nodes, self.slope, self.temper = nodes, slope, temper
        self.intercept = nodes[0].intercept
        self.mean = weight @ np.array([node.mean for node in nodes])

    def _scaled(self, X, values):
        """Return predictors at new rows, scaled about their mean."""
        centre = with_ones(X, self.intercept) @ self.mean
        return self.slope * (centre + np.sqrt(self.temper) * (values - centre))

    def moments(self, X):
        """Return means and variances (M, n_new) of the nodes."""
        means, variances = super().moments(X)
        return self._scaled(X, means), self.slope**2 * self.temper * variances

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new) of the predictor, each from one node."""
        return self._scaled(X, super().draw(X, n_samples, rng))

    def draw_log_prob(self, link, X, n_samples, rng):
        """Return label log probabilities (n_samples, n_new, 2) of such draws."""
        return label_log_prob(link, self.draw(X, n_samples, rng))

    @property
    def heaviest(self):
        """The `WeightPosterior` with the largest weight."""
        return self.nodes[int(np.argmax(self.weight))]

    def latent_mean(self, X):
        """Return the mean (n_new,) of the predictor."""
        return self.slope * (with_ones(X, self.intercept) @ self.mean)

    def weight_covariance(self, B):
        """Return the covariances (n, n_new) of the weights with the predictor, slopes included."""
        each = (node.weight_covariance(B) for node in self.nodes)
        means = np.array([node.mean for node in self.nodes])
        joint = mixture_covariance(self.weight, each, means, (B @ means.T).T)
        return self.slope**2 * self.temper * joint

    def coefficient_variance(self):
        """Return the variances (n,) of the weights."""
        return mixture_moments(self.weight, *_weight_moments(self.nodes))[1]

    def coefficient_interval(self, level):
        """Return central intervals (n, 2) of the weights, by quantiles of the mixture."""
        if len(self.nodes) == 1:
            return self.nodes[0].coefficient_interval(level)
        means, variances = _weight_moments(self.nodes)
        return mixture_quantiles(self.weight, means, np.sqrt(variances), ends_of(level)).T

    def sample(self, n_samples, rng):
        """Return draws (n_samples, n) of the weights."""
        return draw_mixture(self.weight, lambda m, n: self.nodes[m].sample(n, rng), n_samples, rng)

    def joined(self, X, sites):
        """Return the mixture with rows included in every node, and log p of their labels.

        Nodes that predicted the labels better gain weight.
        """
        pairs = [node.joined(X, sites) for node in self.nodes]
        log_mass = np.log(self.weight) + np.array([log_prob for _, log_prob in pairs])
        log_prob = float(logsumexp(log_mass))
        nodes, weight = [node for node, _ in pairs], np.exp(log_mass - log_prob)
        return AveragedWeights(nodes, weight, self.slope, self.temper), log_prob


def _weight_moments(nodes):
    """Return means and variances (M, n) of the weights under posteriors."""
    means = np.array([node.mean for node in nodes])
    return means, np.array([node.coefficient_variance() for node in nodes])
