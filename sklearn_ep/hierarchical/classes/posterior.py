"""Posterior of coefficients and effects of several classes: a mixture over nodes in the scales."""

from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax

from ..._engine.class_sites import class_covariances, contrast_variances
from ..._engine.gaussian import Moments, checked_cholesky
from ..._engine.hyper import log_mixture
from ..._engine.noisy_argmax import SOFTMAX
from .. import _scales
from .._posterior import EffectsMixture
from .model import lay_out_effects, level_covariances


class WeightsAt(NamedTuple):
    """Posterior of the weights at a node.

    coef (K, q) are the means and spread (K, q, K, q) the covariance; scales are the Cholesky
    factors (q_f, q_f) of the covariances of the effects; log_z is the log evidence given theta.
    n_dense are the coefficients of a class, spans the slices of its weights of each factor.
    """

    coef: np.ndarray
    spread: np.ndarray
    scales: list[np.ndarray]
    log_z: float
    n_dense: int
    spans: list[slice]

    def draw(self, n_samples, rng):
        """Return draws (S, K, q) of the weights and their log densities, up to a constant."""
        size = self.coef.size
        lower = checked_cholesky(self.spread.reshape(size, size))
        white = rng.standard_normal((n_samples, size))
        weights = self.coef + (white @ lower.T).reshape(n_samples, *self.coef.shape)
        log_density = -0.5 * np.sum(white**2, axis=1) - np.sum(np.log(np.diagonal(lower)))
        return weights, log_density

    def beta(self):
        """Return means and sds (K, D) of the coefficients."""
        d = self.n_dense
        return self.coef[:, :d], np.sqrt(np.einsum("cqcq->cq", self.spread)[:, :d])

    def effects(self):
        """Return (means, variances), both (K, L_f, q_f), of the effects of each factor."""
        out = []
        for own, lower in zip(self.spans, self.scales, strict=True):
            cov = level_covariances(self.spread, own, len(lower))
            mean = self.coef[:, own].reshape(*cov.shape[:3]) @ lower.T
            out.append((mean, np.einsum("ab,kjbc,ac->kja", lower, cov, lower)))
        return out

    def draw_effects(self, n_samples, rng):
        """Return draws of coefficients (S, K, D), and of effects (S, K, L_f, q_f) by factor."""
        weights, out = self.draw(n_samples, rng)[0], []
        for own, lower in zip(self.spans, self.scales, strict=True):
            white = weights[..., own]
            out.append(white.reshape(*white.shape[:2], -1, len(lower)) @ lower.T)
        return weights[..., : self.n_dense], *out

    def at_rows(self, layout):
        """Return means (n, K) and covariances (n, K, K) of the linear predictors."""
        rows = layout.whitened(self.scales)
        mean, cov = rows @ self.coef.T, class_covariances(self.spread, rows)
        for unseen in layout.unseen(self.scales):
            np.einsum("ncc->nc", cov)[:] += np.sum(unseen**2, axis=1, keepdims=True)
        return mean, cov

    def between(self, one, two, same):
        """Return covariances (K, n1, n2), and the means (K, n) of both sets of rows."""
        rows, others = one.whitened(self.scales), two.whitened(self.scales)
        spreads = (self.spread[c, :, c] for c in range(len(self.coef)))
        cov = np.array([(others @ (rows @ spread).T).T for spread in spreads])
        for alike, a, b in zip(same, one.unseen(self.scales), two.unseen(self.scales), strict=True):
            cov += alike * (a @ b.T)
        return cov, (rows @ self.coef.T).T, (others @ self.coef.T).T


class ClassMixture(EffectsMixture):
    """Mixture over nodes of normal distributions of the weights of all classes.

    Weights of a class are its D coefficients, then the whitened effects of all levels. Nodes that
    weigh next to nothing are left out.

    Parameters
    ----------
    model : ClassesModel
    average : Average
        Over theta; the payloads of its nodes are `ClassNode`.
    n_named : list of int
        Levels of each factor that have a name, the first ones.
    """

    def __init__(self, model, average, n_named):
        average = average.heavy()  # a node has (K q)^2 numbers
        self.model, self.n_classes, self.prior = model, model.n_classes, model.prior()
        spans, d, nodes = model.effect_spans(), len(model.beta_precision), []
        for node in average.nodes:
            coef, spread = model.posterior(node.phi, node.payload.sites)
            scales = _scales.factors(node.phi, model.n_effects)
            nodes.append(WeightsAt(coef, spread, scales, node.payload.log_z, d, spans))
        super().__init__(average, model.n_effects, n_named, nodes)

    factor = SOFTMAX

    def laid_out(self, rows):
        """Return the `EffectLayout` of rows to predict."""
        sizes = self.model.n_levels, self.n_named
        return lay_out_effects(rows.X, rows.designs, rows.codes, *sizes)

    def _mixed(self, values):
        """Return the average over the nodes of one array for each of them."""
        return sum(w * value for w, value in zip(self.average.weight, values, strict=True))

    def beta_moments(self):
        """Return means (K, D) and covariance (K, D, K, D) of the coefficients."""
        d = len(self.model.beta_precision)
        mean = self._mixed(node.coef[:, :d] for node in self.nodes)
        apart = [node.coef[:, :d] - mean for node in self.nodes]
        pairs = zip(self.nodes, apart, strict=True)
        return Moments(
            mean, self._mixed(n.spread[:, :d, :, :d] + np.multiply.outer(a, a) for n, a in pairs)
        )

    def _moments(self, means, covs):
        mean = self._mixed(means)
        apart = means - mean
        return mean, self._mixed(covs + apart[..., :, None] * apart[..., None, :])

    def latent(self, rows):
        """Return means (n, K) and covariances (n, K, K) of the linear predictors."""
        return self._over_blocks(rows, self._moments)

    def latent_and_log_proba(self, rows, factor):
        """Return the moments of `latent`, and log probabilities (n, K) by a factor."""

        def moments_and_chances(means, covs):
            pairs = zip(means, covs, strict=True)
            log_p = np.array([factor.log_proba(m, contrast_variances(S)) for m, S in pairs])
            return *self._moments(means, covs), log_mixture(self.average.weight, log_p)

        return self._over_blocks(rows, moments_and_chances)

    def _log_weight(self, node, rows, y, weight, n_samples, rng):
        X, designs, codes = rows
        layout = lay_out_effects(X, designs, codes, self.model.n_levels)
        weights, log_density = node.draw(n_samples, rng)
        eta = layout.whitened(node.scales) @ weights.reshape(-1, weights.shape[2]).T
        log_p = log_softmax(eta.reshape(len(y), n_samples, -1), axis=2)
        log_joint = weight @ log_p[np.arange(len(y)), :, y]
        log_joint -= 0.5 * np.sum(weights**2, axis=1) @ self.prior
        log_joint += 0.5 * self.n_classes * np.sum(np.log(self.prior))
        return log_joint - log_density - node.log_z
