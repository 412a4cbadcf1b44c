"""Posterior of coefficients and group effects as a mixture over nodes in the group scales."""

import numpy as np
from scipy.special import log_expit, logsumexp

from ..._engine.averaging import mixture_moments, mixture_quantiles
from ..._engine.gaussian import Moments, log_partition
from ..._engine.likelihoods import Logit
from .. import _log_cholesky as log_cholesky
from .arrow import backward, forward
from .theta_grid import smoothed_quantiles, smoothed_theta

__all__ = ["NEW_GROUP", "GroupedMixture"]

NEW_GROUP = -1  # code of a row without label: a group of its own
_BLOCK = 8192  # rows predicted at once
_CELLS = 4_000_000  # values of the linear predictor held at once, draws times rows
_LINK = Logit()


class GroupedMixture:
    """Mixture over nodes m of Gaussians in beta and, given beta, in the effects u_j.

    weight (M,) sums to one; theta (M, T) are coordinates of the covariance of the group effects;
    beta ~ N(mean, root' root) at each node, with mean (M, D) and root (M, D, D); local are the
    `LocalEffects` of the J groups that can be named; marginal is the `ThetaMarginal` of a single
    theta between the nodes, or None; log_mass (M,) is the log evidence of each node that the
    weights stand for, up to a constant; prior is that of beta.
    """

    def __init__(self, weight, theta, mean, root, local, marginal, log_mass, prior):
        self.prior = prior
        self.weight, self.theta, self.mean, self.root = weight, theta, mean, root
        self.log_mass = log_mass
        self.lower, self.gain, self.offset = local
        self.marginal = marginal
        self.scale = log_cholesky.factor(theta, self.lower.shape[2])

    @property
    def n_groups(self):
        """Number of groups that can be named."""
        return self.lower.shape[1]

    @property
    def n_effects(self):
        """Number of varying coefficients."""
        return self.lower.shape[2]

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of beta."""
        mean = self.weight @ self.mean
        roots = (np.sqrt(self.weight)[:, None, None] * self.root).reshape(-1, len(mean))
        apart = np.sqrt(self.weight)[:, None] * (self.mean - mean)
        return Moments(mean, roots.T @ roots + apart.T @ apart)

    def beta_quantiles(self, levels):
        """Return quantiles (len(levels), D) of each entry of beta."""
        sd = np.linalg.norm(self.root, axis=1)
        return mixture_quantiles(self.weight, self.mean, sd, levels)

    def group_effects(self):
        """Return posterior means and sds (J, q) of the effects a_j = L u_j."""
        means, variances = [], []
        for m in range(len(self.weight)):
            u = self.offset[m] - self.gain[m] @ self.mean[m]
            turned = self.scale[m] @ self.gain[m] @ self.root[m].T
            spread = forward(self.lower[m], np.broadcast_to(self.scale[m].T, self.lower[m].shape))
            means.append(u @ self.scale[m].T)
            variances.append(np.sum(turned**2, 2) + np.sum(spread**2, 1))
        mean, var = mixture_moments(self.weight, np.stack(means), np.stack(variances))
        return mean, np.sqrt(var)

    def _node_side(self, m, X, local, code):
        """Return mean, R (x - G'c) and lower^-1 c of rows at node m."""
        c = local @ self.scale[m]
        known = (code >= 0) & (code < self.n_groups)
        mean, reduced, spread = X @ self.mean[m], X.copy(), c.copy()
        if known.any():
            at = code[known]
            gain = self.gain[m][at]
            reduced[known] -= np.einsum("nq,nqd->nd", c[known], gain)
            mean[known] += np.sum(c[known] * (self.offset[m][at] - gain @ self.mean[m]), 1)
            spread[known] = forward(self.lower[m][at], c[known][..., None])[..., 0]
        return mean, reduced @ self.root[m].T, spread

    def _blocks(self, X, local, code):
        """Yield (rows, means (M, n), variances (M, n)) over blocks of rows."""
        for start in range(0, len(X), _BLOCK):
            rows = slice(start, start + _BLOCK)
            means, variances = [], []
            for m in range(len(self.weight)):
                mean, turned, spread = self._node_side(m, X[rows], local[rows], code[rows])
                means.append(mean)
                variances.append(np.sum(turned**2, 1) + np.sum(spread**2, 1))
            yield rows, np.stack(means), np.stack(variances)

    def latent(self, X, local, code):
        """Return mean and variance (n,) of the linear predictor of rows X (n, D).

        local (n, q) is the design of the group effects, code (n,) numbers the groups; anything but
        0 .. J - 1 is a new group.
        """
        mean, var = np.empty(len(X)), np.empty(len(X))
        for rows, means, variances in self._blocks(X, local, code):
            mean[rows], var[rows] = mixture_moments(self.weight, means, variances)
        return mean, var

    def log_proba(self, X, local, code):
        """Return log probabilities (n, 2) of the labels -1 and +1."""
        out = np.empty((len(X), 2))
        with np.errstate(divide="ignore"):
            log_weight = np.log(self.weight)[:, None]
        for rows, means, variances in self._blocks(X, local, code):
            for k, sign in enumerate((-1.0, 1.0)):
                log_z = _LINK.tilted(sign, means, variances).log_z
                out[rows, k] = logsumexp(log_weight + log_z, axis=0)
        return out

    def covariance(self, first, second, same):
        """Return the covariance (n1, n2) of the linear predictor between two sets of rows.

        Each is (X, local, code); same (n1, n2) says whether two rows share their group.
        """
        whole = [self.latent(*rows)[0] for rows in (first, second)]
        out = np.zeros(same.shape)
        for m, weight in enumerate(self.weight):
            sides = [self._node_side(m, *rows) for rows in (first, second)]
            (mean1, turned1, spread1), (mean2, turned2, spread2) = sides
            cov = turned1 @ turned2.T + same * (spread1 @ spread2.T)
            cov += np.outer(mean1 - whole[0], mean2 - whole[1])
            out += weight * cov
        return out

    def draw(self, n_samples, rng):
        """Return joint draws: beta (S, D), effects (S, J, q), theta (S, T), node (S,)."""
        node = self._draw_nodes(n_samples, rng)
        beta = np.empty((n_samples, self.mean.shape[1]))
        effects = np.empty((n_samples, self.n_groups, self.n_effects))
        for m, at, b, u, _ in self._draws(node, rng):
            beta[at], effects[at] = b, u @ self.scale[m].T
        theta = self.draw_theta(node, rng)
        order = rng.permutation(n_samples)
        return beta[order], effects[order], theta[order], node[order]

    def _draw_nodes(self, n_samples, rng):
        return np.sort(rng.choice(len(self.weight), size=n_samples, p=self.weight))

    def _draws(self, node, rng):
        """Yield (m, places of its draws, beta, u, their log density) for sorted nodes (S,)."""
        d, q = self.mean.shape[1], self.n_effects
        k = np.arange(q)
        for m in np.unique(node):
            at = np.flatnonzero(node == m)
            white = rng.standard_normal((len(at), d))
            beta = self.mean[m] + white @ self.root[m]
            noise = rng.standard_normal((len(at), self.n_groups, q))
            u = self.offset[m] - np.einsum("jqd,sd->sjq", self.gain[m], beta)
            u += backward(self.lower[m], noise[..., None])[..., 0]
            log_density = np.log(self.lower[m][:, k, k]).sum() - np.linalg.slogdet(self.root[m])[1]
            log_density -= 0.5 * (np.sum(white**2, 1) + np.sum(noise**2, (1, 2)))
            yield m, at, beta, u, log_density

    def log_weights(self, X, local, code, sign, weight, n_samples, rng):
        """Return log(exact joint / mixture) (S,) of joint draws of node, beta, effects, O(S n D).

        X, local and code are training rows, all of known groups; sign their labels in {-1, +1},
        weight their numbers of copies. The prior of theta is in `log_mass`. Weights are
        up to the constant of that; for a grid there is none, and the mean weight is then the exact
        evidence over that of the grid.
        """
        out, prior = np.empty(n_samples), self.prior
        block = max(1, _CELLS // len(X))
        for m, at, beta, u, log_density in self._draws(self._draw_nodes(n_samples, rng), rng):
            target = beta @ prior.shift - 0.5 * np.sum((beta @ prior.precision) * beta, 1)
            target -= 0.5 * np.sum(u**2, (1, 2)) + log_partition(prior)
            effects = u @ self.scale[m].T
            for start in range(0, len(at), block):
                some = slice(start, start + block)
                z = beta[some] @ X.T
                if self.n_effects:
                    z += np.einsum("snq,nq->sn", effects[some][:, code], local)
                target[some] += log_expit(sign * z) @ weight
            out[at] = target - log_density - self.log_mass[m]
        return out

    def draw_theta(self, node, rng):
        """Return draws of theta in phase with nodes already drawn."""
        if self.marginal is not None:
            return self.marginal.draw(node, rng)[:, None]
        if self.theta.shape[1] == 0:
            return self.theta[node]
        white = rng.standard_normal((len(node), self.theta.shape[1]))
        return smoothed_theta(self.theta, self.weight, node, white)

    def draw_latent(self, X, local, code, n_samples, rng):
        """Return joint draws (S, n) of the linear predictor; rows of one new group share it."""
        beta, effects, _, node = self.draw(n_samples, rng)
        out = beta @ X.T
        new = (code < 0) | (code >= self.n_groups)
        if self.n_effects:
            known = np.flatnonzero(~new)
            out[:, known] += np.einsum("snq,nq->sn", effects[:, code[known]], local[known])
            own = np.where(code < 0, -1 - np.arange(len(code)), code)[new]
            _, group = np.unique(own, return_inverse=True)
            size = (n_samples, group.max(initial=-1) + 1, self.n_effects)
            fresh = np.einsum("sjq,srq->sjr", rng.standard_normal(size), self.scale[node])
            out[:, new] += np.einsum("snq,nq->sn", fresh[:, group], local[new])
        return out

    def scales(self, theta):
        """Return the sds (..., q) of the group effects for coordinates theta."""
        return np.sqrt(np.sum(log_cholesky.factor(theta, self.n_effects) ** 2, axis=-1))

    def scale_quantiles(self, levels):
        """Return quantiles (len(levels), q) of the sds of the group effects."""
        if self.marginal is not None:
            return np.exp(self.marginal.quantile(np.asarray(levels)))[:, None]
        return smoothed_quantiles(self.theta, self.weight, levels, self.scales)
