"""All classes jointly through inducing points: what a row says of them, and their predictions.

Classes share points and kernel, hence the whitened rows W. The sites of `_engine.class_sites` sit
on the values W e_c of the classes c, and join them in one posterior of K m numbers, whose gram has
the blocks W' diag([c = j] d_c - d_c d_j / sum d) W. These are no linear function of the links d:
every posterior of a sweep is summed from its sites.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ..._engine import class_sites, class_structures, gaussian
from ..._engine.hyper import Accuracy
from ..._engine.sites import Sites
from .._hyperparameters import JOINT_ACCURACY
from .._kernels import cross_covariance
from .ep import PassRows, RowSlopes, Visit
from .rows import read_rows
from .values import InducingPosterior, block_rows, times_rows


class ClassPosterior(InducingPosterior):
    """Posterior of the whitened inducing values of K classes.

    `coef` (K, m) are the means, `spread` (K, m, K, m) is the covariance.
    """

    def __init__(self, gram, shift, n_classes):
        super().__init__(gram, shift)
        self.coef = self.mean.reshape(n_classes, -1)

    @property
    def spread(self):
        """Covariance of classes and points (K, m, K, m)."""
        return self.cov.reshape(*self.coef.shape, *self.coef.shape)

    @cached_property
    def _beside(self):
        """The covariance as (m, K K m): what a row has to do with each pair of classes."""
        return np.ascontiguousarray(self.spread.transpose(1, 0, 2, 3)).reshape(len(self.coef.T), -1)

    @cached_property
    def _single(self):
        return self._beside.astype(np.float32)

    def marginals(self, W, smooth=False):
        """Return means (b, K), covariances (b, K, K) and, if asked for, S_ck w (b, K, K, m).

        The places are in that order: w' S_kc. Of rows in single precision no variance is below what
        rounding leaves of it.
        """
        mean = (W @ self.coef.T.astype(W.dtype, copy=False)).astype(float)
        if not smooth:
            return mean, class_structures.class_covariances(self.spread, W), None
        K, beside = len(self.coef), self._single if W.dtype == np.float32 else self._beside
        smoothed = (W @ beside).reshape(len(W), K, K, -1)
        cov = (smoothed.reshape(len(W), K * K, -1) @ W[:, :, None]).reshape(-1, K, K).astype(float)
        cov = 0.5 * (cov + cov.transpose(0, 2, 1))
        least = np.finfo(W.dtype).eps * np.einsum("ij,ij->i", W, W)
        own = np.einsum("ncc->nc", cov)
        own[:] = np.maximum(own, least[:, None])
        return mean, cov, smoothed


@dataclass(frozen=True)
class JointLabels:
    """Labels of K classes with one posterior: the class with the largest noisy value.

    Sites (K, 2, n) are links and shifts of `_engine.class_sites`; links that are all zero say
    nothing. A sweep takes 3 K^2 m^2 flops a row and 2 (K m)^3, one with the gradient 3 K^2 m^2 a
    row.
    """

    factor: Any
    n_sites: int
    n_posteriors: ClassVar[int] = 1
    copies: ClassVar[float | None] = None
    linear: ClassVar[bool] = False
    accuracy: ClassVar[Accuracy] = JOINT_ACCURACY

    @property
    def n_latents(self):
        """Latent functions of a posterior: one a class."""
        return self.n_sites

    @property
    def exact_gradient(self):
        """Whether the gradient is that of the log evidence, and not without the moves of sites."""
        return self.n_sites == 2

    def own_sites(self, k):
        """Return where the sites of the posterior are: all."""
        return slice(None)

    def rows_at_once(self, m, entries=4_000_000):
        """Return the number of rows of a block for m inducing points.

        No array of a visit, which has K^2 m numbers a row, has more than so many entries.
        """
        return min(block_rows(m), max(16, entries // (self.n_sites**2 * m)))

    def posterior(self, gram, shift):
        """Return the posterior of all classes from sums."""
        return ClassPosterior(gram, shift, self.n_sites)

    def visit(self, k, posterior, rows, form):
        """Return the `Visit` of all classes to a `RowBlock`, with a `form` of the gradient."""
        mean, cov, smoothed = posterior.marginals(rows.W, form is not None)
        old, var = _class_sites(rows.sites, rows.y), np.einsum("ncc->nc", cov)
        moments = mean, cov, rows.extra_var
        update = class_sites.class_update(self.factor, rows.y, old, *moments, rows.weight)
        slopes = None
        if form is not None:
            alpha, coupling = class_sites.class_pull(old, update, mean, cov, form == "fresh")
            w = rows.weight[:, None]
            coupling = (w * coupling.reshape(len(w), -1)).astype(rows.W.dtype, copy=False)
            towards = coupling[:, None] @ smoothed.reshape(*coupling.shape, -1)
            noise = rows.weight * update.noise_slope
            slopes = RowSlopes(towards[:, 0], (w * alpha).T, posterior.coef, noise)
        change = class_sites.class_change(self.factor, rows.y, old, update.sites, var)
        before, after = (np.stack(s).transpose(2, 0, 1) for s in (old, update.sites))
        return Visit(before, after, var.T, update.log_term, change, slopes)

    def add_sums(self, gram, shift, W, weight, sites):
        """Add gram and shift of sites (K, 2, b) with copies to sums (K m, K m) and (K m,).

        Of the grams the blocks below the diagonal, which tell the others: see `completed`.
        """
        K, m = len(sites), W.shape[1]
        links, gram = weight * sites[:, 0], gram.reshape(K, m, K, m)
        total = sites[:, 0].sum(0)
        share = sites[:, 0] / np.where(total > 0, total, 1.0)
        for c in range(K):
            for j in range(c):
                gram[c, :, j] -= gaussian.weighted_gram(W, links[c] * share[j])
        shift += np.concatenate([times_rows(weight * b, W) for b in sites[:, 1]])

    def completed(self, grams):
        """Return grams with the blocks of `add_sums`: they are symmetric, and rows sum to zero."""
        K = self.n_sites
        for gram in grams.reshape(-1, K, grams.shape[-1] // K, K, grams.shape[-1] // K):
            for c in range(K):
                for j in range(c):
                    gram[j, :, c] = gram[c, :, j]
                gram[c, :, c] = 0.0
            for c in range(K):
                gram[c, :, c] = -gram[c].sum(axis=1)
        return grams

    def admissible(self, proposal, x, target):
        """Return sites (K, 2, n) that a posterior may have."""
        new, x, target = (sites.transpose(1, 2, 0) for sites in (proposal, x, target))
        mended = class_sites.admissible(new, x, target, not self.factor.log_concave)
        return mended.transpose(2, 0, 1)

    def log_left_out(self, posteriors, rows):
        """Return log probabilities (b,) of labels under cavities."""
        return self.factor.tilted(rows.y, *_left_out(posteriors[0], rows)).log_z

    def predictors(self, prior, posteriors):
        """Return what predicts all classes."""
        return [JointInducingPosterior(prior, p, self.factor) for p in posteriors]


def cavities_of_part(part, message, model, classes):
    """Return means and variances (n, 2, K) of the cavities of a partition.

    `message` as for `leave_one_out_part`.
    """
    X, y, _ = read_rows(part, classes)
    blocks = model.blocks(PassRows(X, y, *message))
    each = [_left_out(model.posteriors[0], block) for _, block, _ in blocks]
    return np.concatenate(each, axis=1).swapaxes(0, 1)


def _left_out(posterior, rows):
    """Return means and variances (b, K) without the copies of each row."""
    mean, cov, _ = posterior.marginals(rows.W)
    sites = _class_sites(rows.sites, rows.y)
    return class_sites.class_left_out(sites, mean, cov, rows.extra_var, rows.weight)[:2]


def _class_sites(sites, y):
    """Return `Sites` (b, K) of sites (K, 2, b); the winner is linked where nobody is."""
    d, b = np.array(sites.transpose(1, 2, 0), order="C")
    nobody = ~np.any(d, axis=1)
    d[nobody, y[nobody]] = 1.0
    return Sites(d, b)


class JointInducingPosterior:
    """Predictions of all classes from inducing points."""

    def __init__(self, prior, state, factor):
        self.prior, self.factor = prior, factor
        self.coef, self.spread, self.inverse = state.coef, state.spread, state.inverse

    @property
    def n_classes(self):
        """Number of classes."""
        return len(self.coef)

    @property
    def inducing_mean(self):
        """Posterior means of the inducing values (K, m)."""
        return self.coef @ self.prior.lower.T

    @property
    def inducing_cov(self):
        """Posterior covariances of the inducing values of each class (K, m, m)."""
        lower = self.prior.lower
        return np.stack([lower @ S[:, c] @ lower.T for c, S in enumerate(self.spread)])

    def latent(self, X):
        """Return means (n_new, K) and covariances (n_new, K, K) of the classes at new rows."""
        C = self.n_classes
        mean, cov = np.empty((len(X), C)), np.empty((len(X), C, C))
        for rows in gaussian.row_blocks(len(X), most=block_rows(len(self.prior.Z))):
            W, extra_var, _ = self.prior.whiten(X[rows])
            mean[rows] = W @ self.coef.T
            cov[rows] = class_structures.class_covariances(self.spread, W)
            np.einsum("ncc->nc", cov[rows])[:] += extra_var[:, None]
        return mean, cov

    def covariances_with(self, X2, pairs):
        """Return the map from rows X1 to covariances (P, n1, n2) of pairs of classes with X2."""
        W2, cross = self.prior.whiten(X2)[0].T, cross_covariance(self.prior.kernel, X2)
        weights = np.array([self.spread[c, :, j] @ W2 - (c == j) * W2 for c, j in pairs])
        same = np.equal(*np.transpose(pairs))

        def of_rows(X1):
            cov = self.prior.whiten(X1)[0] @ weights
            cov[same] += cross.block(X1)[0]
            return cov

        return of_rows

    def draw(self, X, n_samples, rng):
        """Return joint draws (n_samples, n_new, K): common inducing values, the rest a class."""
        W = self.prior.whiten(X)[0]
        root = gaussian.root_for_draws(self.prior.kernel(X) - W @ W.T)
        e = rng.standard_normal((n_samples, len(self.inverse))) @ self.inverse
        e = e.reshape(n_samples, *self.coef.shape)
        own = rng.standard_normal((n_samples, self.n_classes, len(X))) @ root.T
        return ((self.coef + e) @ W.T + own).transpose(0, 2, 1)
