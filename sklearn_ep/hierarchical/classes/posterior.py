"""Posterior of coefficients and effects of several classes: a mixture over nodes in the scales."""

from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax

from ..._engine.class_sites import contrast_variances
from ..._engine.class_weights import class_covariances
from ..._engine.gaussian import Moments, checked_cholesky
from ..._engine.hyper import log_mixture, mixture_quantiles
from ..._engine.noisy_argmax import SOFTMAX
from .._posterior import BLOCK, CELLS, GroupScales, RowsToPredict, draws_at_rows
from .model import lay_out_effects, level_covariances


class WeightsAt(NamedTuple):
    """Posterior of the weights at a node.

    coef (K, q) are the means and spread (K, q, K, q) the covariance; lowers are the Cholesky
    factors (q_f, q_f) of the covariances of the effects; log_z is the log evidence given theta.
    """

    coef: np.ndarray
    spread: np.ndarray
    lowers: list[np.ndarray]
    log_z: float

    def draw(self, n_samples, rng):
        """Return draws (S, K, q) of the weights and their log densities, up to a constant."""
        size = self.coef.size
        lower = checked_cholesky(self.spread.reshape(size, size))
        white = rng.standard_normal((n_samples, size))
        weights = self.coef + (white @ lower.T).reshape(n_samples, *self.coef.shape)
        log_density = -0.5 * np.sum(white**2, axis=1) - np.sum(np.log(np.diagonal(lower)))
        return weights, log_density

    def effects(self, own, lower):
        """Return means and variances (K, L_f, q_f) of the effects of a factor, weights `own`."""
        q, K = len(lower), len(self.coef)
        mean = self.coef[:, own].reshape(K, -1, q) @ lower.T
        cov = level_covariances(self.spread, own, q)
        return mean, np.einsum("ab,kjbc,ac->kja", lower, cov, lower)

    def at_rows(self, layout):
        """Return means (n, K) and covariances (n, K, K) of the linear predictors."""
        rows = layout.whitened(self.lowers)
        mean, cov = rows @ self.coef.T, class_covariances(self.spread, rows)
        unseen = layout.unseen_variance(self.lowers)
        np.einsum("ncc->nc", cov)[:] += unseen[:, None]
        return mean, cov

    def between(self, layouts, same):
        """Return covariances (K, n1, n2), and the means (n, K) of both sets of rows."""
        one, two = (layout.whitened(self.lowers) for layout in layouts)
        spreads = (self.spread[c, :, c] for c in range(len(self.coef)))
        cov = np.array([(two @ (one @ spread).T).T for spread in spreads])
        sides = [
            [np.where(known[:, None], 0.0, w) for known, w in zip(x.known.T, own, strict=True)]
            for x in layouts
            for own in [x.own(self.lowers)]
        ]
        for alike, a, b in zip(same, *sides, strict=True):
            cov += alike * (a @ b.T)
        return cov, one @ self.coef.T, two @ self.coef.T


class ClassMixture:
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

    factor = SOFTMAX

    def __init__(self, model, average, n_named):
        average = average.heavy()  # a node has (K q)^2 numbers
        self.scales, self.n_named = GroupScales(average, model.n_effects), list(n_named)
        self.n_dense, self.n_classes = len(model.beta_precision), model.n_classes
        self.n_levels, self.effect_spans = model.n_levels, model.effect_spans()
        self.prior = model.prior()
        self.nodes = []
        for node in average.nodes:
            coef, spread = model.posterior(node.phi, node.payload.sites)
            lowers = model.factors_of(node.phi)
            self.nodes.append(WeightsAt(coef, spread, lowers, node.payload.log_z))

    def _mixed(self, values):
        """Return the average over the nodes of one array for each of them."""
        return sum(w * value for w, value in zip(self.scales.weight, values, strict=True))

    def beta_moments(self):
        """Return means (K, D) and covariance (K, D, K, D) of the coefficients."""
        d = self.n_dense
        mean = self._mixed(node.coef[:, :d] for node in self.nodes)
        apart = [node.coef[:, :d] - mean for node in self.nodes]
        pairs = zip(self.nodes, apart, strict=True)
        return Moments(
            mean, self._mixed(n.spread[:, :d, :, :d] + np.multiply.outer(a, a) for n, a in pairs)
        )

    def beta_quantiles(self, levels):
        """Return quantiles (len(levels), K, D) of the coefficients."""
        mean = np.array([node.coef[:, : self.n_dense].ravel() for node in self.nodes])
        var = [np.einsum("cqcq->cq", node.spread)[:, : self.n_dense].ravel() for node in self.nodes]
        found = mixture_quantiles(self.scales.weight, mean, np.sqrt(var), levels)
        return found.reshape(len(levels), self.n_classes, self.n_dense)

    def group_effects(self):
        """Return posterior means and sds, each a list of arrays (K, levels, q_f) over factors."""
        means, sds = [], []
        for f, n in enumerate(self.n_named):
            found = [node.effects(self.effect_spans[f], node.lowers[f]) for node in self.nodes]
            mean = self._mixed(mean for mean, _ in found)
            var = self._mixed(var + (own - mean) ** 2 for own, var in found)
            means.append(mean[:, :n])
            sds.append(np.sqrt(var[:, :n]))
        return means, sds

    def _blocks(self, X, designs, codes):
        """Yield (rows, means (M, n, K), covariances (M, n, K, K)) over blocks of rows."""
        layout = lay_out_effects(X, designs, codes, self.n_levels, self.n_named)
        for start in range(0, len(X), BLOCK):
            some = slice(start, start + BLOCK)
            sides = [node.at_rows(layout.take(some)) for node in self.nodes]
            means, covs = zip(*sides, strict=True)
            yield some, np.stack(means), np.stack(covs)

    def latent(self, X, designs, codes):
        """Return means (n, K) and covariances (n, K, K) of the linear predictors.

        Parameters
        ----------
        X : ndarray of shape (n, D)
            Columns of the coefficients, the intercept last.
        designs : list of ndarray of shape (n, q_f)
        codes : ndarray of shape (n, F)
            Positions among the named levels; anything else means a level that is not known, whose
            effects are integrated over the population.
        """
        K = self.n_classes
        mean, cov = np.empty((len(X), K)), np.empty((len(X), K, K))
        for some, means, covs in self._blocks(X, designs, codes):
            mean[some] = self._mixed(means)
            apart = means - mean[some]
            cov[some] = self._mixed(covs + apart[..., :, None] * apart[..., None, :])
        return mean, cov

    def log_proba(self, X, designs, codes):
        """Return log probabilities (n, K) of the classes; parameters as in `latent`."""
        out = np.empty((len(X), self.n_classes))
        for some, means, covs in self._blocks(X, designs, codes):
            pairs = zip(means, covs, strict=True)
            chances = [self.factor.log_proba(m, contrast_variances(S)) for m, S in pairs]
            out[some] = log_mixture(self.scales.weight, np.array(chances))
        return out

    def covariance(self, first, second, same):
        """Return the covariances (K, n1, n2) of each class with itself between two sets of rows.

        first and second are (X, designs, codes) as in `latent`; same (F, n1, n2) says of each
        factor whether two rows share their level.
        """
        sizes = dict(n_levels=self.n_levels, n_named=self.n_named)
        layouts = [lay_out_effects(*rows, **sizes) for rows in (first, second)]
        found = [node.between(layouts, same) for node in self.nodes]
        left, right = (self._mixed(f[k] for f in found) for k in (1, 2))
        return self._mixed(
            cov + np.einsum("nk,mk->knm", a - left, b - right) for cov, a, b in found
        )

    def draw(self, n_samples, rng):
        """Return joint draws.

        Returns
        -------
        beta : ndarray of shape (S, K, D)
        effects : list of ndarray of shape (S, K, L_f, q_f)
            Of the named levels.
        theta : ndarray of shape (S, T)
        node : ndarray of shape (S,)
            Numbers of the nodes.
        """
        K, d = self.n_classes, self.n_dense
        picked = np.sort(rng.choice(len(self.nodes), size=n_samples, p=self.scales.weight))
        shapes = zip(self.n_named, self.scales.n_effects, strict=True)
        beta, effects = np.empty((n_samples, K, d)), []
        effects = [np.empty((n_samples, K, n, q)) for n, q in shapes]
        for m in np.unique(picked):
            at, node = np.flatnonzero(picked == m), self.nodes[m]
            weights, _ = node.draw(len(at), rng)
            beta[at] = weights[..., :d]
            for f, out in enumerate(effects):
                white = weights[..., self.effect_spans[f]]
                white = white.reshape(len(at), K, -1, self.scales.n_effects[f])
                out[at] = white[:, :, : out.shape[2]] @ node.lowers[f].T
        theta, order = self.scales.average.draw_near(picked, rng), rng.permutation(n_samples)
        return beta[order], [e[order] for e in effects], theta[order], picked[order]

    def draw_latent(self, X, designs, codes, n_samples, rng):
        """Return joint draws (S, n, K) of the linear predictors; rows of a new level share it."""
        beta, effects, _, number = self.draw(n_samples, rng)
        scales = [np.array(a)[number] for a in zip(*(n.lowers for n in self.nodes), strict=True)]
        rows = RowsToPredict(X, designs, codes)
        return np.swapaxes(draws_at_rows(beta, effects, scales, rows, rng), 1, 2)

    def log_weights(self, X, designs, codes, y, weight, n_samples, rng):
        """Return log(exact joint / mixture) (S,) of joint draws, up to no constant.

        X, designs and codes are training rows, all of known levels; y their class indices, weight
        their numbers of copies. The prior of theta is the same on both sides.
        """
        picked = np.sort(rng.choice(len(self.nodes), size=n_samples, p=self.scales.weight))
        layout, out = lay_out_effects(X, designs, codes, self.n_levels), np.empty(n_samples)
        for m in np.unique(picked):
            node, at = self.nodes[m], np.flatnonzero(picked == m)
            rows, block = layout.whitened(node.lowers), max(1, CELLS // (len(X) * self.n_classes))
            for some in np.split(at, np.arange(block, len(at), block)):
                weights, log_density = node.draw(len(some), rng)
                eta = rows @ weights.reshape(-1, weights.shape[2]).T
                log_p = log_softmax(eta.reshape(len(X), len(some), -1), axis=2)
                log_joint = weight @ log_p[np.arange(len(X)), :, y]
                log_joint -= 0.5 * np.sum(weights**2, axis=1) @ self.prior
                log_joint += 0.5 * self.n_classes * np.sum(np.log(self.prior))
                out[some] = log_joint - log_density - node.log_z
        return out
