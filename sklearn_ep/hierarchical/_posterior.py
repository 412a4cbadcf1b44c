"""Posterior of coefficients and group effects: a mixture over nodes in the scales."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_expit

from .._engine.gaussian import Moments, Natural, backward, forward, over, row_blocks
from .._engine.hyper import mixture_moments, mixture_quantiles
from .._engine.likelihoods import Logit
from .._estimator.latents import NodesAtRows
from . import _scales
from ._layout import EffectPlaces

CELLS = 4_000_000  # values of the linear predictor held at once, draws times rows


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

    def beta(self):
        """Return means and sds (D,) of the coefficients."""
        d = self.places.n_dense
        return self.mean[:d], np.linalg.norm(self.root[:, :d], axis=0)

    def effects(self):
        """Return (means, variances), both (L_f, q_f), of the effects of each factor."""
        p, spans, out = self.places, self.places.shared_spans(), []
        means = self.effects_of(self.mean[None], self.local.given(self.mean)[None])
        for f, (n, scale) in enumerate(zip(p.n_named, self.scales, strict=True)):
            if f == p.local:
                lower = self.local.lower
                own = np.sum(forward(lower, np.broadcast_to(scale.T, lower.shape)) ** 2, axis=1)
                across = np.einsum("ab,jbc,ac->ja", scale, self.local.explained(self.root), scale)
                var = (own + across)[p.order]
            else:
                halves = self.root[:, spans[f]].reshape(-1, p.n_levels[f], len(scale))
                var = np.sum((halves @ scale.T) ** 2, axis=0)
            out.append((means[f][0, :n], var[:n]))
        return out

    def _of_groups(self, rows, place):
        """Return what known local groups, numbered by place, add to rows, sorted by group.

        That is which rows, the number of the group of each, their designs of u, and the `LocalPart`
        of these groups.
        """
        at = np.flatnonzero(place >= 0)
        at = at[np.argsort(place[at], kind="stable")]
        groups, number = np.unique(place[at], return_inverse=True)
        f = self.places.local
        return at, number, rows.designs[f][at] @ self.scales[f], self.local.take(groups)

    def at_rows(self, rows):
        """Return means and variances (n,) of the linear predictor."""
        shared, place = self.places.seen(rows, self.scales)
        mean, cov = self.mean, self.root.T @ self.root
        z, var = shared @ mean, shared.variances(cov)
        if self.places.local is not None:
            at, number, c, local = self._of_groups(rows, place)
            z[at], var[at], _ = local.row_moments(shared.take(at), number, c, mean, cov)
        for unseen in rows.unseen(self.places.n_named, self.scales):
            var += np.sum(unseen**2, axis=1)
        return z, var

    def apart(self, rows):
        """Return means, root z (n, S), and for each factor the root of what is its own (n, q)."""
        shared, place = self.places.seen(rows, self.scales)
        dense, own = shared.full(), rows.unseen(self.places.n_named, self.scales)
        mean = np.zeros(len(dense))
        if self.places.local is not None:
            at, number, c, local = self._of_groups(rows, place)
            gain = local.gain.full().reshape(-1, c.shape[1], dense.shape[1])
            for a in range(c.shape[1]):
                dense[at] -= c[:, a, None] * gain[number, a]
            mean[at] = np.einsum("na,na->n", c, local.offset[number])
            own[self.places.local][at] = forward(local.lower[number], c[..., None])[..., 0]
        return mean + dense @ self.mean, dense @ self.root.T, own

    def draw(self, n_samples, rng):
        """Return draws of b (S, .) and u (S, J, q), and their log density."""
        root, local = self.root, self.local
        white = rng.standard_normal((n_samples, len(root)))
        b = self.mean + white @ root
        noise = rng.standard_normal((n_samples, *local.offset.shape))
        u = local.given(b) + backward(local.lower, noise[..., None])[..., 0]
        log_density = np.sum(np.log(np.einsum("jaa->ja", local.lower)))
        log_density = log_density - np.sum(np.log(np.diagonal(root)))
        return b, u, log_density - 0.5 * (np.sum(white**2, 1) + np.sum(noise**2, (1, 2)))

    def between(self, rows, others, same):
        """Return the covariance (n1, n2) of the linear predictor of two sets of rows, and means."""
        (mean1, turned1, own1), (mean2, turned2, own2) = self.apart(rows), self.apart(others)
        terms = (alike * (a @ b.T) for alike, a, b in zip(same, own1, own2, strict=True))
        return sum(terms, start=turned1 @ turned2.T), mean1, mean2

    def draw_effects(self, n_samples, rng):
        """Return draws of the coefficients (S, D), and of the effects (S, L_f, q_f) by factor."""
        b, u, _ = self.draw(n_samples, rng)
        return b[:, : self.places.n_dense], *self.effects_of(b, u)

    def effects_of(self, b, u):
        """Return the effects (S, L_f, q_f) of each factor."""
        p = self.places
        out: list[Any] = [None] * len(p.n_effects)
        for f, span in p.shared_spans().items():
            white = b[:, span].reshape(len(b), p.n_levels[f], p.n_effects[f])
            out[f] = white @ self.scales[f].T
        if p.local is not None:
            out[p.local] = (u @ self.scales[p.local].T)[:, p.order]
        return out


class EffectsMixture:
    """Mixture over nodes in the scales: what is the same for any number of classes.

    average is the `Average` over theta; n_effects are those a level of each factor, n_named the
    numbers of levels with a name, the first ones. Nodes
    have Cholesky factors `scales` of the covariances of effects, `beta()`, `effects()`,
    `at_rows(rows)`, `between(rows, others, same)`, and draws of coefficients and effects. Follows
    the contract of `latents.SeparateLatents`, of several classes that of `latents.JointLatents`:
    rows are `RowsToPredict`.
    """

    n_classes = 1
    factor: Any = Logit()
    # log weights of draws from a node, of a kind of posterior
    _log_weight: Any

    def __init__(self, average, n_effects, n_named, nodes):
        self.average, self.n_effects, self.n_named, self.nodes = average, n_effects, n_named, nodes

    def beta_quantiles(self, levels):
        """Return quantiles (len(levels), D), or (., K, D), of the coefficients."""
        mean, sd = (np.array(a) for a in zip(*(n.beta() for n in self.nodes), strict=True))
        flat = mean.reshape(len(mean), -1), sd.reshape(len(sd), -1)
        found = mixture_quantiles(self.average.weight, *flat, levels)
        return found.reshape(len(levels), *mean.shape[1:])

    def group_effects(self):
        """Return posterior means and sds over factors, each a list of (levels, q_f).

        With a leading axis of the classes where there are several.
        """
        by_factor, pairs = zip(*(node.effects() for node in self.nodes), strict=True), []
        for n, found in zip(self.n_named, by_factor, strict=True):
            sides = (np.array(a)[..., :n, :] for a in zip(*found, strict=True))
            pairs.append(mixture_moments(self.average.weight, *sides))
        return [mean for mean, _ in pairs], [np.sqrt(var) for _, var in pairs]

    def at_nodes(self, link, rows):
        """Return the `NodesAtRows`; levels not known are integrated over the population."""
        mean, var = map(np.stack, zip(*(node.at_rows(rows) for node in self.nodes), strict=True))
        return NodesAtRows(self.average.weight, mean, var, [link] * len(self.nodes))

    def covariance(self, first, second, same):
        """Return covariances (n1, n2), or (K, n1, n2), of the linear predictor of two sets of rows.

        same (F, n1, n2) says of each factor whether two rows share their level. Rows are taken
        apart into columns of the weights, O(n S^2).
        """
        out = left = right = np.zeros(())
        for weight, node in zip(self.average.weight, self.nodes, strict=True):
            cov, a, b = node.between(first, second, same)
            out = out + weight * (cov + a[..., :, None] * b[..., None, :])
            left, right = left + weight * a, right + weight * b
        return out - left[..., :, None] * right[..., None, :]

    def draw_parameters(self, n_samples, rng):
        """Return joint draws: coefficients (S, D), effects of each factor, theta, and scales.

        Those are the Cholesky factors (S, q_f, q_f) that go with them. Of several classes the
        coefficients are (S, K, D), the effects (S, K, L_f, q_f).
        """
        picked, counts = _picked(self.average.weight, n_samples, rng)
        drawn = [self.nodes[m].draw_effects(n, rng) for m, n in counts]
        theta, order = self.average.draw_near(picked, rng), rng.permutation(n_samples)
        beta, *effects = (np.concatenate(a)[order] for a in zip(*drawn, strict=True))
        named = [e[..., :n, :] for e, n in zip(effects, self.n_named, strict=True)]
        scales = zip(*(node.scales for node in self.nodes), strict=True)
        return beta, named, theta[order], [np.array(a)[picked[order]] for a in scales]

    def draw(self, rows, n_samples, rng):
        """Return joint draws (S, n) or (S, n, K) of the linear predictor.

        Rows of one new level share it.
        """
        beta, effects, _, scales = self.draw_parameters(n_samples, rng)
        return np.moveaxis(draws_at_rows(beta, effects, scales, rows, rng), -1, 1)

    def log_weights(self, X, designs, codes, y, weight, n_samples, rng):
        """Return log(exact joint / mixture) (S,) of joint draws, up to no constant, O(S n D).

        X, designs and codes are training rows, all of known levels; y their labels in {-1, +1}, or
        class indices of several, weight their numbers of copies. The prior of theta is the same on
        both sides.
        """
        rows, out = (X, designs, codes), []
        for m, n in _picked(self.average.weight, n_samples, rng)[1]:
            for some in row_blocks(n, len(X) * self.n_classes, CELLS):
                of_block = y, weight, some.stop - some.start, rng
                out.append(self._log_weight(self.nodes[m], rows, *of_block))
        return np.concatenate(out)


def _picked(weight, n_samples, rng):
    """Return nodes for draws, as (sorted numbers (S,), [(number, draws of it)])."""
    picked = np.sort(rng.choice(len(weight), size=n_samples, p=weight))
    return picked, list(zip(*np.unique(picked, return_counts=True), strict=True))


class GroupPosterior(EffectsMixture):
    """Mixture over nodes of Gaussians in b and, given b, in the local effects.

    b are the coefficients and the effects of all factors but the local one. average is
    the `Average` over theta, whose nodes have payloads with `mean`, `root`, `local` and `log_z`, as
    `GivenScales` has; places are the `EffectPlaces`.
    """

    def __init__(self, average, places):
        self.places = places
        scales = [_scales.factors(node.phi, places.n_effects) for node in average.nodes]
        found = zip((node.payload for node in average.nodes), scales, strict=True)
        nodes = [NodePosterior(f.mean, f.root, f.local, f.log_z, L, places) for f, L in found]
        super().__init__(average, places.n_effects, places.n_named, nodes)

    def beta_moments(self):
        """Return mean (D,) and covariance (D, D) of the coefficients."""
        (mean, cov), d = self.phi_moments(), self.places.n_dense
        return Moments(mean[:d], cov[:d, :d])

    def phi_moments(self):
        """Return the `Moments` of (coefficients, theta), at one node by its axes."""
        d, average = self.places.n_dense, self.average
        points = np.hstack([np.array([n.mean[:d] for n in self.nodes]), average.phi])
        mean, cov = between(average.weight, points)
        if len(points) == 1:
            cov[d:, d:] = average.axes.root @ average.axes.root.T
        roots = (n.root[:, :d] for n in self.nodes)
        cov[:d, :d] += sum(w * (r.T @ r) for w, r in zip(average.weight, roots, strict=True))
        return Moments(mean, cov)

    def _log_weight(self, node, rows, sign, weight, n_samples, rng):
        b, u, log_density = node.draw(n_samples, rng)
        (X, designs, codes), prior = rows, self.places.prior
        z = b[:, : X.shape[1]] @ X.T
        for f, effects in enumerate(node.effects_of(b, u)):
            z += np.einsum("snq,nq->sn", effects[:, codes[:, f]], designs[f])
        log_joint = 0.5 * (np.sum(np.log(prior)) - b**2 @ prior - np.sum(u**2, (1, 2)))
        return log_joint + log_expit(sign * z) @ weight - log_density - node.log_z


def between(weight, points):
    """Return mean and covariance of points (M, .) with weights (M,)."""
    mean = weight @ points
    apart = np.sqrt(weight)[:, None] * (points - mean)
    return mean, apart.T @ apart


def moments_by_class(posteriors):
    """Return the `Moments` of the coefficients of the one problem, or of each class."""
    found = [p.beta_moments() for p in posteriors]
    if posteriors[0].n_classes == 1:
        return found
    means, cov = found[0]
    return [Moments(mean, cov[c, :, c]) for c, mean in enumerate(means)]


def shared(total, prior, n_sites):
    """Return equal messages whose product with the prior is the total, with proper cavities."""
    precision, shift = over(total, prior)
    precision = 0.5 * (precision + precision.T)
    return Natural(*(np.repeat(a[None] / n_sites, n_sites, axis=0) for a in (precision, shift)))


def of_sites(messages, phi, n_skipped=0, n_cut=0):
    """Return what an estimator keeps of the messages of sites and the moments they make of phi."""
    sites = dict(site_precision_=messages.precision, site_shift_=messages.shift)
    sites |= dict(phi_mean_=phi.mean, phi_cov_=phi.cov)
    return dict(sites=sites, counts=dict(n_skipped_=n_skipped, n_cut_steps_=n_cut))
