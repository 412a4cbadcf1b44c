"""Posterior of coefficients and group effects: a mixture over nodes in the scales."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_expit

from .._engine.gaussian import Moments, backward, forward
from .._engine.hyper import log_mixture, mixture_moments, mixture_quantiles
from .._engine.likelihoods import Logit
from . import _log_cholesky as log_cholesky
from .exact.given_scales import SharedPrior
from .exact.layout import SharedRows, shared_entries

__all__ = ["EffectPlaces", "GroupPosterior", "RowsToPredict", "is_joint", "moments_by_class"]

_BLOCK = 8192  # rows predicted at once
_CELLS = 4_000_000  # values of the linear predictor held at once, draws times rows
_LINK = Logit()


class EffectPlaces(NamedTuple):
    """Which numbers in the nodes belong to which effects.

    beta_precision (D,) is the prior precision of the coefficients; n_effects, n_levels and n_named
    are of each factor; local is the number of the local one, None without groups; order (J,) is
    where each of its groups is in a `LocalPart`.
    """

    beta_precision: np.ndarray
    n_effects: list[int]
    n_levels: list[int]
    n_named: list[int]
    local: int | None
    order: np.ndarray

    @property
    def n_dense(self):
        """Number of coefficients."""
        return len(self.beta_precision)

    def shared_spans(self):
        """Return {factor: its slice of b} of the shared factors."""
        spans, start = {}, self.n_dense
        for f, (q, n) in enumerate(zip(self.n_effects, self.n_levels, strict=True)):
            if f != self.local:
                spans[f] = slice(start, start + q * n)
                start += q * n
        return spans

    def prior(self, theta):
        """Return the `SharedPrior` at theta."""
        shared, lower = self.shared_spans(), log_cholesky.factors(theta, self.n_effects)
        inverse = [np.linalg.inv(lower[f] @ lower[f].T) for f in shared]
        return SharedPrior(self.beta_precision, inverse, [self.n_levels[f] for f in shared])


class RowsToPredict(NamedTuple):
    """Rows to predict: dense columns X (n, D), designs (n, q_f) and codes (n, F) of the factors.

    A code is the position among the named levels, anything else means a level that is not known.
    """

    X: np.ndarray
    designs: list[np.ndarray]
    codes: np.ndarray

    def take(self, rows):
        """Return some of the rows."""
        return RowsToPredict(self.X[rows], [w[rows] for w in self.designs], self.codes[rows])


class GroupPosterior:
    """Mixture over nodes m of Gaussians in b and, given b, in the local effects.

    b are the coefficients and the effects of all factors but the local one. grid is the
    `ScaleGrid`; founds have `mean`, `root`, `local` and `log_z` of each node, as `GivenScales` has;
    places are the `EffectPlaces`.
    """

    def __init__(self, grid, founds, places):
        self.grid, self.places = grid, places
        self.means = np.array([f.mean for f in founds])
        self.roots = [f.root for f in founds]
        self.locals = [f.local for f in founds]
        self.log_z = np.array([f.log_z for f in founds])
        self.scales_at = [log_cholesky.factors(t, places.n_effects) for t in grid.theta]

    @property
    def theta(self):
        """Nodes (M, T)."""
        return self.grid.theta

    @property
    def weight(self):
        """Weights (M,) of the nodes."""
        return self.grid.weight

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of the coefficients."""
        d, weight = self.places.n_dense, self.weight
        mean = weight @ self.means[:, :d]
        apart = np.sqrt(weight)[:, None] * (self.means[:, :d] - mean)
        cov = apart.T @ apart
        for w, root in zip(weight, self.roots, strict=True):
            cov += w * (root[:, :d].T @ root[:, :d])
        return Moments(mean, cov)

    def phi_moments(self):
        """Return the `Moments` of (coefficients, theta), at one node by its axes."""
        d, weight, axes = self.places.n_dense, self.weight, self.grid.axes
        points = np.hstack([self.means[:, :d], self.theta])
        mean = weight @ points
        apart = np.sqrt(weight)[:, None] * (points - mean)
        cov = apart.T @ apart
        if len(weight) == 1:
            cov[d:, d:] = axes.root @ axes.root.T
        cov[:d, :d] = self.beta_moments().cov
        return Moments(mean, cov)

    def beta_quantiles(self, levels):
        """Return quantiles (len(levels), D) of the coefficients."""
        d = self.places.n_dense
        sd = np.array([np.linalg.norm(root[:, :d], axis=0) for root in self.roots])
        return mixture_quantiles(self.weight, self.means[:, :d], sd, levels)

    def scale_quantiles(self, levels):
        """Return quantiles (len(levels), Q) of the sds of the effects, factor by factor."""
        return self.grid.quantiles(levels, self.scales)

    def scales(self, theta):
        """Return the sds (..., Q) of the effects for coordinates theta."""
        return log_cholesky.scales(theta, self.places.n_effects)

    def group_effects(self):
        """Return posterior means and sds, each a list of arrays (levels, q_f) over factors."""
        sums: list[Any] = [(0.0, 0.0)] * len(self.places.n_effects)
        for m, weight in enumerate(self.weight):
            for f, (mean, var) in enumerate(self._effects_at(m)):
                first, second = sums[f]
                sums[f] = first + weight * mean, second + weight * (var + mean**2)
        named = zip(sums, self.places.n_named, strict=True)
        pairs = [(a[:n], np.sqrt(np.maximum(b - a**2, 0.0))[:n]) for (a, b), n in named]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def _effects_at(self, m):
        """Return (means, variances), both (L_f, q_f), of the effects of each factor at a node."""
        out: list[Any] = [None] * len(self.places.n_effects)
        root, mean = self.roots[m], self.means[m]
        for f, span in self.places.shared_spans().items():
            shape = self.places.n_levels[f], self.places.n_effects[f]
            out[f] = mean[span].reshape(shape), np.sum(root[:, span] ** 2, axis=0).reshape(shape)
        if self.places.local is None:
            return out
        local, scale = self.locals[m], self.scales_at[m][self.places.local]
        u = local.offset - local.gain.dot(mean)
        within = local.gain.against(root.T @ root)[1]
        eye = np.broadcast_to(np.eye(len(scale)), local.lower.shape)
        within += np.einsum("jab,jac->jbc", *[forward(local.lower, eye)] * 2)
        var = np.einsum("ab,jbc,ac->ja", scale, within, scale)
        order = self.places.order
        out[self.places.local] = (u @ scale.T)[order], var[order]
        return out

    def _seen(self, rows):
        """Return (`SharedRows`, place of the local group or -1, known (n, F)) of rows."""
        p, codes = self.places, rows.codes
        known = (codes >= 0) & (codes < p.n_named)
        shared = [f for f in range(codes.shape[1]) if f != p.local]
        of = [rows.designs[f] for f in shared], [np.where(known, codes, -1)[:, f] for f in shared]
        entries = shared_entries(len(rows.X), *of, [p.n_levels[f] for f in shared])
        place = np.full(len(rows.X), -1)
        if p.local is not None:
            at = known[:, p.local]
            place[at] = p.order[codes[at, p.local]]
        return SharedRows(rows.X, *entries), place, known

    def _node_side(self, m, rows):
        """Return means and variances (n,) of the linear predictor at node m."""
        shared, place, known = self._seen(rows)
        mean, cov = self.means[m], self.roots[m].T @ self.roots[m]
        z, var = shared.dot(mean), shared.variances(cov)
        for f, lower in enumerate(self.scales_at[m]):
            var += np.where(known[:, f], 0.0, np.sum((rows.designs[f] @ lower) ** 2, axis=1))
        at = np.flatnonzero(place >= 0)
        at = at[np.argsort(place[at], kind="stable")]
        if len(at):
            groups, number = np.unique(place[at], return_inverse=True)
            local = self.locals[m]
            ends = np.r_[0, np.cumsum(np.bincount(number))]
            gain = local.gain.take(groups)
            across, within = gain.against(cov, shared.take(at), ends)
            c = rows.designs[self.places.local][at] @ self.scales_at[m][self.places.local]
            u = local.offset[groups] - gain.dot(mean)
            z[at] += np.einsum("na,na->n", c, u[number])
            own = forward(local.lower[groups][number], c[..., None])[..., 0]
            var[at] += np.sum(own**2, 1) - 2.0 * np.einsum("na,na->n", c, across)
            var[at] += np.einsum("na,nab,nb->n", c, within[number], c)
        return z, var

    def _blocks(self, rows):
        """Yield (rows, means (M, n), variances (M, n)) over blocks of rows."""
        for start in range(0, len(rows.X), _BLOCK):
            some = slice(start, start + _BLOCK)
            sides = [self._node_side(m, rows.take(some)) for m in range(len(self.weight))]
            means, variances = zip(*sides, strict=True)
            yield some, np.stack(means), np.stack(variances)

    def latent(self, *rows):
        """Return mean and variance (n,) of the linear predictor; rows as in `RowsToPredict`."""
        rows = RowsToPredict(*rows)
        mean, var = np.empty(len(rows.X)), np.empty(len(rows.X))
        for some, means, variances in self._blocks(rows):
            mean[some], var[some] = mixture_moments(self.weight, means, variances)
        return mean, var

    def log_proba(self, *rows):
        """Return log probabilities (n, 2) of the labels -1 and +1."""
        rows = RowsToPredict(*rows)
        out = np.empty((len(rows.X), 2))
        for some, means, variances in self._blocks(rows):
            for k, sign in enumerate((-1.0, 1.0)):
                log_z = _LINK.tilted(sign, means, variances).log_z
                out[some, k] = log_mixture(self.weight, log_z)
        return out

    def covariance(self, first, second, same):
        """Return the covariance (n1, n2) of the linear predictor between two sets of rows.

        same (F, n1, n2) says of each factor whether two rows share their level. Rows are taken
        apart into columns of b, O(n S^2).
        """
        sets = [RowsToPredict(*rows) for rows in (first, second)]
        whole = [self.latent(*rows)[0] for rows in sets]
        out = np.zeros(same.shape[1:])
        for m, weight in enumerate(self.weight):
            (mean1, turned1, own1), (mean2, turned2, own2) = (self._apart(m, r) for r in sets)
            cov = turned1 @ turned2.T + np.outer(mean1 - whole[0], mean2 - whole[1])
            for f, (a, b) in enumerate(zip(own1, own2, strict=True)):
                cov += same[f] * (a @ b.T)
            out += weight * cov
        return out

    def _apart(self, m, rows):
        """Return means, root z (n, S), and for each factor the root of what is its own (n, q)."""
        shared, place, known = self._seen(rows)
        p, local = self.places, self.locals[m]
        dense = np.zeros((len(rows.X), self.means.shape[1]))
        dense[:, : p.n_dense] = rows.X
        at = np.arange(len(dense))
        for e in range(shared.at.shape[1]):
            dense[at, p.n_dense + shared.at[:, e]] += shared.value[:, e]
        own = [
            np.where(known[:, f, None], 0.0, rows.designs[f] @ lower)
            for f, lower in enumerate(self.scales_at[m])
        ]
        mean, seen = np.zeros(len(dense)), np.flatnonzero(place >= 0)
        if len(seen):
            groups, number = np.unique(place[seen], return_inverse=True)
            c = rows.designs[p.local][seen] @ self.scales_at[m][p.local]
            gain = local.gain.take(groups)
            for a in range(c.shape[1]):
                dense[seen, : p.n_dense] -= c[:, a, None] * gain.dense[number, a]
                if p_width := gain.width:
                    lines = np.zeros((len(groups), p_width))
                    lines[gain.pair_group, gain.pair_column] = gain.values[a]
                    dense[seen, p.n_dense :] -= c[:, a, None] * lines[number]
            mean[seen] = np.einsum("na,na->n", c, local.offset[groups][number])
            own[p.local][seen] = forward(local.lower[groups][number], c[..., None])[..., 0]
        return mean + dense @ self.means[m], dense @ self.roots[m].T, own

    def draw(self, n_samples, rng):
        """Return joint draws: coefficients (S, D), effects of each factor, theta, node (S,)."""
        p = self.places
        node = np.sort(rng.choice(len(self.weight), size=n_samples, p=self.weight))
        beta = np.empty((n_samples, p.n_dense))
        shapes = zip(p.n_named, p.n_effects, strict=True)
        effects = [np.empty((n_samples, n, q)) for n, q in shapes]
        for m in np.unique(node):
            at = np.flatnonzero(node == m)
            b, u, _ = self._draw_at(m, len(at), rng)
            beta[at] = b[:, : p.n_dense]
            for out, drawn in zip(effects, self._effects_of(m, b, u), strict=True):
                out[at] = drawn[:, : out.shape[1]]
        theta, order = self.grid.draw(node, rng), rng.permutation(n_samples)
        return beta[order], [e[order] for e in effects], theta[order], node[order]

    def _draw_at(self, m, n_samples, rng):
        """Return draws of b (S, .) and u (S, J, q) at a node, and their log density."""
        root, local = self.roots[m], self.locals[m]
        white = rng.standard_normal((n_samples, len(root)))
        b = self.means[m] + white @ root
        noise = rng.standard_normal((n_samples, *local.offset.shape))
        u = local.offset - local.gain.dot(b) + backward(local.lower, noise[..., None])[..., 0]
        log_density = np.sum(np.log(np.einsum("jaa->ja", local.lower)))
        log_density = log_density - np.sum(np.log(np.diagonal(root)))
        return b, u, log_density - 0.5 * (np.sum(white**2, 1) + np.sum(noise**2, (1, 2)))

    def _effects_of(self, m, b, u):
        """Return the effects (S, L_f, q_f) of each factor."""
        p = self.places
        out: list[Any] = [None] * len(p.n_effects)
        for f, span in p.shared_spans().items():
            out[f] = b[:, span].reshape(len(b), p.n_levels[f], p.n_effects[f])
        if p.local is not None:
            out[p.local] = (u @ self.scales_at[m][p.local].T)[:, p.order]
        return out

    def draw_latent(self, X, designs, codes, n_samples, rng):
        """Return joint draws (S, n) of the linear predictor; rows of one new level share it."""
        rows = RowsToPredict(X, designs, codes)
        beta, effects, _, node = self.draw(n_samples, rng)
        out = beta @ rows.X.T
        for f, (design, n) in enumerate(zip(rows.designs, self.places.n_named, strict=True)):
            code = rows.codes[:, f]
            known = (code >= 0) & (code < n)
            own = np.where(code < 0, -1 - np.arange(len(code)), code)[~known]
            _, group = np.unique(own, return_inverse=True)
            size = n_samples, group.max(initial=-1) + 1, design.shape[1]
            scale = np.array([self.scales_at[m][f] for m in node])
            fresh = np.einsum("sjq,srq->sjr", rng.standard_normal(size), scale)
            drawn = effects[f][:, code[known]]
            out[:, known] += np.einsum("snq,nq->sn", drawn, design[known])
            out[:, ~known] += np.einsum("snq,nq->sn", fresh[:, group], design[~known])
        return out

    def log_weights(self, X, designs, codes, sign, weight, n_samples, rng):
        """Return log(exact joint / mixture) (S,) of joint draws, up to no constant, O(S n D).

        X, designs and codes are training rows, all of known levels; sign their labels in {-1, +1},
        weight their numbers of copies. The prior of theta is the same on both sides.
        """
        out = np.empty(n_samples)
        node = np.sort(rng.choice(len(self.weight), size=n_samples, p=self.weight))
        for m in np.unique(node):
            at = np.flatnonzero(node == m)
            block = max(1, _CELLS // len(X))
            for some in np.split(at, np.arange(block, len(at), block)):
                b, u, log_density = self._draw_at(m, len(some), rng)
                z = b[:, : X.shape[1]] @ X.T
                for f, effects in enumerate(self._effects_of(m, b, u)):
                    z += np.einsum("snq,nq->sn", effects[:, codes[:, f]], designs[f])
                of_b = self.places.prior(self.theta[m])
                target = (
                    0.5 * (of_b.log_det() - of_b.quadratic(b))
                    - 0.5 * np.sum(u**2, (1, 2))
                    + log_expit(sign * z) @ weight
                )
                out[some] = target - log_density - self.log_z[m]
        return out


def is_joint(posteriors):
    """Say whether there is one posterior of all classes."""
    return hasattr(posteriors[0], "n_classes")


def moments_by_class(posteriors):
    """Return the `Moments` of the coefficients of the one problem, or of each class."""
    found = [p.beta_moments() for p in posteriors]
    if not is_joint(posteriors):
        return found
    means, cov = found[0]
    return [Moments(mean, cov[c, :, c]) for c, mean in enumerate(means)]
