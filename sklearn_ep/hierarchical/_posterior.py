"""Posterior of coefficients and group effects: a mixture over nodes in the scales."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_expit

from .._engine.gaussian import Moments, backward, forward
from .._engine.hyper import log_mixture, mixture_moments, mixture_quantiles
from .._engine.likelihoods import Logit
from . import _scales
from .exact.layout import EffectPlaces

BLOCK = 8192  # rows predicted at once
CELLS = 4_000_000  # values of the linear predictor held at once, draws times rows
_LINK = Logit()


class GroupScales(NamedTuple):
    """Posterior of the sds of effects: `Average` over theta, n_effects a level of each factor."""

    average: Any
    n_effects: list[int]

    @property
    def theta(self):
        """Nodes (M, T)."""
        return self.average.phi

    @property
    def weight(self):
        """Weights (M,) of the nodes."""
        return self.average.weight

    def sds(self, theta):
        """Return the sds (..., Q) of the effects, factor by factor, for coordinates theta."""
        return _scales.scales(theta, self.n_effects)

    def quantiles(self, levels):
        """Return quantiles (len(levels), Q) of the sds."""
        return self.average.smooth.quantiles(levels, self.sds)


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


def draws_at_rows(beta, effects, scales, rows, rng):
    """Return joint draws (S, ..., n) of the linear predictor; rows of one new level share it.

    beta (S, ..., D) and effects (S, ..., L_f, q_f) are draws, scales (S, q_f, q_f) the Cholesky
    factors of the covariances of effects that go with them, rows as in `RowsToPredict`.
    """
    X, designs, codes = rows
    out = beta @ X.T
    for f, (design, drawn, scale) in enumerate(zip(designs, effects, scales, strict=True)):
        code = np.asarray(codes)[:, f]
        known = (code >= 0) & (code < drawn.shape[-2])
        # a row without label has a level of its own
        own = np.where(code < 0, -1 - np.arange(len(code)), code)[~known]
        _, group = np.unique(own, return_inverse=True)
        size = *beta.shape[:-1], group.max(initial=-1) + 1, design.shape[1]
        fresh = np.einsum("s...jq,srq->s...jr", rng.standard_normal(size), scale)
        for some, values, level in ((known, drawn, code[known]), (~known, fresh, group)):
            out[..., some] += np.einsum("...nq,nq->...n", values[..., level, :], design[some])
    return out


class NodePosterior(NamedTuple):
    """Posterior at a node in theta: Gaussian in b and, given b, in the local effects.

    mean (S,) and root (S, S) are those of b, as in `GivenScales`, with the `LocalPart` and the log
    evidence given theta; scales are the Cholesky factors (q_f, q_f) of the covariances of effects.
    """

    mean: np.ndarray
    root: np.ndarray
    local: Any
    log_z: float
    scales: list[np.ndarray]
    places: EffectPlaces

    def effects(self):
        """Return (means, variances), both (L_f, q_f), of the effects of each factor."""
        out: list[Any] = [None] * len(self.places.n_effects)
        root, mean, local = self.root, self.mean, self.local
        for f, span in self.places.shared_spans().items():
            shape = self.places.n_levels[f], self.places.n_effects[f]
            out[f] = mean[span].reshape(shape), np.sum(root[:, span] ** 2, axis=0).reshape(shape)
        if self.places.local is None:
            return out
        scale = self.scales[self.places.local]
        u = local.offset - local.gain.dot(mean)
        within = local.gain.against(root.T @ root)[1]
        eye = np.broadcast_to(np.eye(len(scale)), local.lower.shape)
        within += np.einsum("jab,jac->jbc", *[forward(local.lower, eye)] * 2)
        var = np.einsum("ab,jbc,ac->ja", scale, within, scale)
        order = self.places.order
        out[self.places.local] = (u @ scale.T)[order], var[order]
        return out

    def at_rows(self, rows):
        """Return means and variances (n,) of the linear predictor."""
        shared, place, known = self.places.seen(rows)
        mean, cov = self.mean, self.root.T @ self.root
        z, var = shared.dot(mean), shared.variances(cov)
        for f, lower in enumerate(self.scales):
            var += np.where(known[:, f], 0.0, np.sum((rows.designs[f] @ lower) ** 2, axis=1))
        at = np.flatnonzero(place >= 0)
        at = at[np.argsort(place[at], kind="stable")]
        if len(at):
            groups, number = np.unique(place[at], return_inverse=True)
            local = self.local
            ends = np.r_[0, np.cumsum(np.bincount(number))]
            gain = local.gain.take(groups)
            across, within = gain.against(cov, shared.take(at), ends)
            c = rows.designs[self.places.local][at] @ self.scales[self.places.local]
            u = local.offset[groups] - gain.dot(mean)
            z[at] += np.einsum("na,na->n", c, u[number])
            own = forward(local.lower[groups][number], c[..., None])[..., 0]
            var[at] += np.sum(own**2, 1) - 2.0 * np.einsum("na,na->n", c, across)
            var[at] += np.einsum("na,nab,nb->n", c, within[number], c)
        return z, var

    def apart(self, rows):
        """Return means, root z (n, S), and for each factor the root of what is its own (n, q)."""
        shared, place, known = self.places.seen(rows)
        p, local = self.places, self.local
        dense = np.zeros((len(rows.X), len(self.mean)))
        dense[:, : p.n_dense] = rows.X
        at = np.arange(len(dense))
        for e in range(shared.at.shape[1]):
            dense[at, p.n_dense + shared.at[:, e]] += shared.value[:, e]
        own = [
            np.where(known[:, f, None], 0.0, rows.designs[f] @ lower)
            for f, lower in enumerate(self.scales)
        ]
        mean, seen = np.zeros(len(dense)), np.flatnonzero(place >= 0)
        if len(seen):
            groups, number = np.unique(place[seen], return_inverse=True)
            c = rows.designs[p.local][seen] @ self.scales[p.local]
            gain = local.gain.take(groups)
            for a in range(c.shape[1]):
                dense[seen, : p.n_dense] -= c[:, a, None] * gain.dense[number, a]
                if p_width := gain.width:
                    lines = np.zeros((len(groups), p_width))
                    lines[gain.pair_group, gain.pair_column] = gain.values[a]
                    dense[seen, p.n_dense :] -= c[:, a, None] * lines[number]
            mean[seen] = np.einsum("na,na->n", c, local.offset[groups][number])
            own[p.local][seen] = forward(local.lower[groups][number], c[..., None])[..., 0]
        return mean + dense @ self.mean, dense @ self.root.T, own

    def draw(self, n_samples, rng):
        """Return draws of b (S, .) and u (S, J, q), and their log density."""
        root, local = self.root, self.local
        white = rng.standard_normal((n_samples, len(root)))
        b = self.mean + white @ root
        noise = rng.standard_normal((n_samples, *local.offset.shape))
        u = local.offset - local.gain.dot(b) + backward(local.lower, noise[..., None])[..., 0]
        log_density = np.sum(np.log(np.einsum("jaa->ja", local.lower)))
        log_density = log_density - np.sum(np.log(np.diagonal(root)))
        return b, u, log_density - 0.5 * (np.sum(white**2, 1) + np.sum(noise**2, (1, 2)))

    def effects_of(self, b, u):
        """Return the effects (S, L_f, q_f) of each factor."""
        p = self.places
        out: list[Any] = [None] * len(p.n_effects)
        for f, span in p.shared_spans().items():
            out[f] = b[:, span].reshape(len(b), p.n_levels[f], p.n_effects[f])
        if p.local is not None:
            out[p.local] = (u @ self.scales[p.local].T)[:, p.order]
        return out


class GroupPosterior:
    """Mixture over nodes of Gaussians in b and, given b, in the local effects.

    b are the coefficients and the effects of all factors but the local one. average is
    the `Average` over theta, whose nodes have payloads with `mean`, `root`, `local` and `log_z`, as
    `GivenScales` has; places are the `EffectPlaces`.
    """

    def __init__(self, average, places):
        self.scales, self.places = GroupScales(average, places.n_effects), places
        self.nodes = [
            NodePosterior(f.mean, f.root, f.local, f.log_z, places.factors(node.phi), places)
            for node in average.nodes
            for f in [node.payload]
        ]

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of the coefficients."""
        weight, (means, roots) = self.scales.weight, _of_beta(self.nodes)
        mean, cov = _between(weight, means)
        return Moments(mean, cov + sum(w * (r.T @ r) for w, r in zip(weight, roots, strict=True)))

    def phi_moments(self):
        """Return the `Moments` of (coefficients, theta), at one node by its axes."""
        d, average = self.places.n_dense, self.scales.average
        mean, cov = _between(average.weight, np.hstack([_of_beta(self.nodes)[0], average.phi]))
        if len(average.weight) == 1:
            cov[d:, d:] = average.axes.root @ average.axes.root.T
        cov[:d, :d] = self.beta_moments().cov
        return Moments(mean, cov)

    def beta_quantiles(self, levels):
        """Return quantiles (len(levels), D) of the coefficients."""
        means, roots = _of_beta(self.nodes)
        sd = np.array([np.linalg.norm(root, axis=0) for root in roots])
        return mixture_quantiles(self.scales.weight, means, sd, levels)

    def group_effects(self):
        """Return posterior means and sds, each a list of arrays (levels, q_f) over factors."""
        sums: list[Any] = [(0.0, 0.0)] * len(self.places.n_effects)
        for weight, node in zip(self.scales.weight, self.nodes, strict=True):
            for f, (mean, var) in enumerate(node.effects()):
                first, second = sums[f]
                sums[f] = first + weight * mean, second + weight * (var + mean**2)
        named = zip(sums, self.places.n_named, strict=True)
        pairs = [(a[:n], np.sqrt(np.maximum(b - a**2, 0.0))[:n]) for (a, b), n in named]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def _blocks(self, rows):
        """Yield (rows, means (M, n), variances (M, n)) over blocks of rows."""
        for start in range(0, len(rows.X), BLOCK):
            some = slice(start, start + BLOCK)
            sides = [node.at_rows(rows.take(some)) for node in self.nodes]
            means, variances = zip(*sides, strict=True)
            yield some, np.stack(means), np.stack(variances)

    def latent(self, *rows):
        """Return mean and variance (n,) of the linear predictor; rows as in `RowsToPredict`."""
        rows = RowsToPredict(*rows)
        mean, var = np.empty(len(rows.X)), np.empty(len(rows.X))
        for some, means, variances in self._blocks(rows):
            mean[some], var[some] = mixture_moments(self.scales.weight, means, variances)
        return mean, var

    def log_proba(self, *rows):
        """Return log probabilities (n, 2) of the labels -1 and +1."""
        rows = RowsToPredict(*rows)
        out = np.empty((len(rows.X), 2))
        for some, means, variances in self._blocks(rows):
            for k, sign in enumerate((-1.0, 1.0)):
                log_z = _LINK.tilted(sign, means, variances).log_z
                out[some, k] = log_mixture(self.scales.weight, log_z)
        return out

    def covariance(self, first, second, same):
        """Return the covariance (n1, n2) of the linear predictor between two sets of rows.

        same (F, n1, n2) says of each factor whether two rows share their level. Rows are taken
        apart into columns of b, O(n S^2).
        """
        sets = [RowsToPredict(*rows) for rows in (first, second)]
        whole = [self.latent(*rows)[0] for rows in sets]
        out = np.zeros(same.shape[1:])
        for weight, node in zip(self.scales.weight, self.nodes, strict=True):
            (mean1, turned1, own1), (mean2, turned2, own2) = (node.apart(r) for r in sets)
            cov = turned1 @ turned2.T + np.outer(mean1 - whole[0], mean2 - whole[1])
            for f, (a, b) in enumerate(zip(own1, own2, strict=True)):
                cov += same[f] * (a @ b.T)
            out += weight * cov
        return out

    def draw(self, n_samples, rng):
        """Return joint draws: coefficients (S, D), effects of each factor, theta, node (S,)."""
        p = self.places
        weight = self.scales.weight
        node = np.sort(rng.choice(len(weight), size=n_samples, p=weight))
        beta = np.empty((n_samples, p.n_dense))
        shapes = zip(p.n_named, p.n_effects, strict=True)
        effects = [np.empty((n_samples, n, q)) for n, q in shapes]
        for m in np.unique(node):
            at = np.flatnonzero(node == m)
            b, u, _ = self.nodes[m].draw(len(at), rng)
            beta[at] = b[:, : p.n_dense]
            for out, drawn in zip(effects, self.nodes[m].effects_of(b, u), strict=True):
                out[at] = drawn[:, : out.shape[1]]
        theta, order = self.scales.average.draw_near(node, rng), rng.permutation(n_samples)
        return beta[order], [e[order] for e in effects], theta[order], node[order]

    def draw_latent(self, X, designs, codes, n_samples, rng):
        """Return joint draws (S, n) of the linear predictor; rows of one new level share it."""
        beta, effects, _, number = self.draw(n_samples, rng)
        scales = [np.array(a)[number] for a in zip(*(n.scales for n in self.nodes), strict=True)]
        return draws_at_rows(beta, effects, scales, RowsToPredict(X, designs, codes), rng)

    def log_weights(self, X, designs, codes, sign, weight, n_samples, rng):
        """Return log(exact joint / mixture) (S,) of joint draws, up to no constant, O(S n D).

        X, designs and codes are training rows, all of known levels; sign their labels in {-1, +1},
        weight their numbers of copies. The prior of theta is the same on both sides.
        """
        out = np.empty(n_samples)
        weights = self.scales.weight
        picked = np.sort(rng.choice(len(weights), size=n_samples, p=weights))
        for m in np.unique(picked):
            at, node = np.flatnonzero(picked == m), self.nodes[m]
            of_b, block = self.places.prior(self.scales.theta[m]), max(1, CELLS // len(X))
            for some in np.split(at, np.arange(block, len(at), block)):
                b, u, log_density = node.draw(len(some), rng)
                z = b[:, : X.shape[1]] @ X.T
                for f, effects in enumerate(node.effects_of(b, u)):
                    z += np.einsum("snq,nq->sn", effects[:, codes[:, f]], designs[f])
                target = (
                    0.5 * (of_b.log_det() - of_b.quadratic(b))
                    - 0.5 * np.sum(u**2, (1, 2))
                    + log_expit(sign * z) @ weight
                )
                out[some] = target - log_density - node.log_z
        return out


def _of_beta(nodes):
    """Return means (M, D) and roots (S, D) of the coefficients at nodes."""
    d = nodes[0].places.n_dense
    return np.array([n.mean[:d] for n in nodes]), [n.root[:, :d] for n in nodes]


def _between(weight, points):
    """Return mean and covariance of points (M, .) with weights (M,)."""
    mean = weight @ points
    apart = np.sqrt(weight)[:, None] * (points - mean)
    return mean, apart.T @ apart


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


def of_sites(messages, phi, n_skipped=0, n_cut=0):
    """Return what an estimator keeps of the messages of sites and the moments they make of phi."""
    sites = dict(site_precision_=messages.precision, site_shift_=messages.shift)
    sites |= dict(phi_mean_=phi.mean, phi_cov_=phi.cov)
    return dict(sites=sites, counts=dict(n_skipped_=n_skipped, n_cut_steps_=n_cut))
