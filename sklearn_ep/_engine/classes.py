"""Expectation propagation for more than two classes with one joint posterior.

A row has a latent value for each class, and its label is the class with the largest noisy one. The
site of a row is exp(-f'T f / 2 + b'f) with T = diag(d) - d d' / sum d and sum b = 0: K numbers d
that link each class to the winner's utility and leave the common level of the latent values, of
which labels say nothing, alone. Such a site comes in closed form from one integral over that
utility, has no negative curvature for normal noise, and is the binary site at K = 2.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_ndtr, log_softmax, logsumexp, ndtr

from .contracts import require
from .factor import Factor
from .likelihoods import Logit, Probit, normal_hazard
from .loop import SILENT, Anderson, Evaluation, Monitor, Result, iterate

__all__ = [
    "CLASS_LIKELIHOODS",
    "ClassSites",
    "ClassTilted",
    "ClassUpdate",
    "QUICK_SOFTMAX",
    "SOFTMAX",
    "JointEP",
    "NoisyArgmax",
    "class_cavities",
    "class_log_weights",
    "class_update",
    "contrast_variances",
    "empty_sites",
    "star_times",
]

_NEWTON_STEPS = 25
# Chances below which digits are lost.
_TINY = 1e-280
# Entries (rows x nodes x classes) that are held at once: temporary arrays stay in the caches.
_ENTRIES = 1 << 15
# Mean variance of latent values from which on sites of a softmax are left as the regressions have
# them: they are right to 2 % at 10 and to less beyond, where the factor is lost in rounding.
_WIDE, _BISECTIONS = 10.0, 12
# Least variance of the noise that such a site stands for; .65 is the least without rounding.
_LEAST_NOISE = 0.5
# Least of the variances that stand for a covariance matrix.
_LEAST_VARIANCE = 1e-8


class Trapezoid(NamedTuple):
    """Where integrals are cut off, and how many nodes they get.

    `depth` is the log height below the mode at which the integrand ends, `spacing` that of the
    nodes in widths of its narrowest part; numbers of nodes are rounded up to one of `counts`, so
    that rows can be taken together.
    """

    depth: float
    spacing: float
    counts: np.ndarray


# Right to 1e-12, and to 1e-6 as a rule, 5e-4 at worst: what a tolerance of 1e-3 leaves open.
_FINE = Trapezoid(28.0, 0.9, np.array([24, 36, 54, 80, 160, 400, 1200]))
_COARSE = Trapezoid(20.0, 1.5, np.array([10, 13, 16, 20, 25, 32, 42, 54, 80, 160, 400, 1200]))


class Noise(NamedTuple):
    """Mixture of normals: what is added to each latent value before the largest one wins."""

    weight: np.ndarray
    mean: np.ndarray
    var: np.ndarray

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and variance of the mixture."""
        centre = self.weight @ self.mean
        return float(centre), float(self.weight @ (self.var + (self.mean - centre) ** 2))


_NORMAL = Noise(np.ones(1), np.zeros(1), np.ones(1))
# Fitted to the Gumbel distribution, for which the largest utility is the softmax: distribution
# function to 5e-4, density to 2e-3.
_GUMBEL = Noise(
    np.array([0.11169463, 0.3109208, 0.34433441, 0.19089112, 0.04215904]),
    np.array([-0.79681029, -0.13086098, 0.67825479, 1.74770439, 3.29035192]),
    np.array([0.21423325, 0.34988278, 0.61163509, 1.1995357, 2.90273157]),
)


class ClassTilted(NamedTuple):
    """What the label of a row does to independent normal latent values of the classes.

    `log_z` (n,), its gradient (n, K) in the means, and the precisions `slope` (n, K) that link each
    class to the utility of the winner: the negative curvature of log Z is close to
    diag(slope) - slope slope' / sum(slope), and equal to it in the row of the winner.
    """

    log_z: np.ndarray
    gradient: np.ndarray
    slope: np.ndarray


class NoisyArgmax:
    """p(y | f): the chance that class y has the largest of the values f_c + noise.

    Normal noise makes it the multinomial probit (Girolami and Rogers 2006), Gumbel noise the
    softmax, taken as a mixture of five normals. `against_rest` is the binary factor that stands in
    for it where one class is looked at; at two classes it is the same. `nodes` says how its
    integrals are taken. With `matched` slopes have the curvature of log Z in the winner where the
    noise is mixed, as they always have where it is normal: without, that of a softmax is up to .39
    too small where latent values are known to less than the noise.
    """

    def __init__(
        self, noise: Noise, against_rest: Factor, nodes: Trapezoid = _FINE, matched: bool = False
    ) -> None:
        self.noise, self.against_rest, self.nodes = noise, against_rest, nodes
        self.matched = matched and not self.fixed_winner

    @property
    def fixed_winner(self) -> bool:
        """Whether the winner's precision is known beforehand: 1, for normal noise."""
        return len(self.noise.weight) == 1

    def log_prob(self, f: Any) -> np.ndarray:
        """Return log p(y = c | f) (..., K) of all classes at latent values f (..., K)."""
        if not self.fixed_winner:
            return log_softmax(f, axis=-1)
        flat = np.reshape(f, (-1, np.shape(f)[-1]))
        return self.log_proba(flat, np.zeros_like(flat)).reshape(np.shape(f))

    def log_proba(self, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        """Return log probabilities (n, K) of all classes, normalised, for f ~ N(mean, diag var)."""
        n, K = mean.shape
        log_z = [self.tilted(np.full(n, c), mean, var).log_z for c in range(K)]
        return np.column_stack(log_z) - logsumexp(log_z, axis=0)[:, None]

    def tilted(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> ClassTilted:
        """Return log p(y) of each row for f ~ N(mean, diag var), with derivatives.

        Parameters
        ----------
        y : ndarray of shape (n,)
            Class indices.
        mean, var : ndarray of shape (n, K)
        """
        rows, race, joined = self._race(y, mean, var)
        log_z, hazard, slope, own_slope = race.integrals()
        gradient, slopes = joined(-hazard, hazard.sum(1)), joined(slope, own_slope)
        if self.fixed_winner:
            slopes[rows, y] = 1.0 / (var[rows, y] + self.noise.var[0])
        return ClassTilted(log_z, gradient, slopes)

    def log_z_slopes(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> Any:
        """Return log p(y) (n,) as `tilted` does, and its slopes (n, K) in means and variances."""
        _, race, joined = self._race(y, mean, var)
        log_z, hazard, bends, own_bend = race.slopes()
        return log_z, joined(-hazard, hazard.sum(1)), 0.5 * joined(bends, own_bend)

    def _race(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> Any:
        """Return rows, the `_Race` of each, and what joins numbers of losers and winner (n, K)."""
        n, K = mean.shape
        rows, losers = np.arange(n), np.arange(K) != y[:, None]
        race = _Race(self.noise, self.nodes, self.matched, mean[rows, y], var[rows, y],
                     mean[losers].reshape(n, K - 1), var[losers].reshape(n, K - 1))  # fmt: skip

        def joined(others: np.ndarray, own: Any) -> np.ndarray:
            out = np.empty((n, K))
            out[losers], out[rows, y] = others.ravel(), own
            return out

        return rows, race, joined


class _Race:
    """Integrals over the winner's utility t of p(t) times the chance that all others stay below.

    `own` and `own_var` (n,) are mean and variance of the winner, `others` and `others_var`
    (n, K - 1) those of the losers.
    """

    def __init__(
        self,
        noise: Noise,
        nodes: Trapezoid,
        matched: bool,
        own: Any,
        own_var: Any,
        others: np.ndarray,
        others_var: np.ndarray,
    ) -> None:
        self.noise, self.nodes, self.matched = noise, nodes, matched
        self.own, self.own_var, self.others, self.others_var = own, own_var, others, others_var

    def integrals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return log Z, E hazard, slopes of losers (n, K - 1) and winner, by the trapezoid rule.

        The integrand is analytic and falls off at both ends, so that equally spaced nodes converge
        exponentially; their number follows from the width of its narrowest part.
        """
        return self._over_blocks(self._linked)

    def slopes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return log Z, E hazard, and second derivatives over Z in the means of losers and winner.

        Half of the latter are the slopes of log Z in the variances.
        """
        return self._over_blocks(self._bent)

    def _over_blocks(self, integrals: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return what `integrals(i, t, step)` says of all rows, as many at a time as are cheap."""
        left, right, counts = self._range()
        n, K = len(self.own), self.others.shape[1] + 1
        out = np.empty(n), np.empty((n, K - 1)), np.empty((n, K - 1)), np.empty(n)
        for count in np.unique(counts):
            chosen = np.flatnonzero(counts == count)
            size = max(1, _ENTRIES // (count * (K - 1)))
            for start in range(0, len(chosen), size):
                i = chosen[start : start + size]
                step = (right[i] - left[i]) / (count - 1)
                t = left[i, None] + step[:, None] * np.arange(count)
                for values, some in zip(out, integrals(i, t, step), strict=True):
                    values[i] = some
        return out

    def _linked(self, i: Any, t: Any, step: Any) -> tuple[Any, Any, Any, Any]:
        log_below, rate, _ = self._others_at(i, t)
        log_own, score, _ = self._own_at(i, t)
        log_z, rho = _normalised(log_own + log_below, step)
        centred = t - np.sum(rho * t, axis=1, keepdims=True)
        spread = np.sum(rho * centred**2, axis=1)
        hazard = np.einsum("it,itj->ij", rho, rate)
        slope = -np.einsum("it,itj->ij", rho * centred, rate) / spread[:, None]
        slope = np.maximum(slope, 0.0)
        # floored: with mixed noise the difference may come out below zero by rounding
        own_slope = np.maximum(1.0 / spread - slope.sum(1), 1e-10)
        if self.matched:
            away = score - np.sum(rho * score, axis=1, keepdims=True)
            links = np.maximum(np.einsum("it,itj->ij", rho * away, rate), 0.0)
            var = self.others_var[i], self.own_var[i]
            slope, own_slope = _matched(slope, own_slope, *var, links.sum(1))
        return log_z, hazard, slope, own_slope

    def _bent(self, i: Any, t: Any, step: Any) -> tuple[Any, Any, Any, Any]:
        log_below, rate, bend = self._others_at(i, t, bent=True)
        log_own, _, own_bend = self._own_at(i, t)
        log_z, rho = _normalised(log_own + log_below, step)
        others = (np.einsum("it,itj->ij", rho, values) for values in (rate, bend))
        return log_z, *others, np.sum(rho * own_bend, axis=1)

    def _own_at(self, i: np.ndarray, t: np.ndarray) -> tuple[Any, Any, Any]:
        """Log density of the winner's utility, its slope, and its second derivative over it."""
        var = self.own_var[i, None, None] + self.noise.var
        away = (t[:, :, None] - self.own[i, None, None] - self.noise.mean) / var
        z2 = away**2 * var
        each = -0.5 * (z2 + np.log(2 * np.pi * var)) + np.log(self.noise.weight)
        if len(self.noise.weight) == 1:
            return each[:, :, 0], -away[:, :, 0], ((z2 - 1.0) / var)[:, :, 0]
        top = each.max(axis=2)
        shares = np.exp(each - top[:, :, None])
        total = shares.sum(axis=2)
        shares /= total[:, :, None]
        bend = np.sum(shares * (z2 - 1.0) / var, axis=2)
        return top + np.log(total), -np.sum(shares * away, axis=2), bend

    def _others_at(
        self, i: np.ndarray, t: np.ndarray, bent: bool = False
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """Log chance that all losers are below t, and the rate of each, d log F_j / dt.

        If asked, the second derivative of each F_j over F_j as well.
        """
        if len(self.noise.weight) == 1:
            root = np.sqrt(self.others_var[i] + self.noise.var[0])[:, None, :]
            z = (t[:, :, None] - self.others[i][:, None, :]) / root
            rate = normal_hazard(z)[0] / root
            return log_ndtr(z).sum(2), rate, -z * rate / root if bent else None
        root = np.sqrt(self.others_var[i][:, None, :, None] + self.noise.var)
        centre = self.others[i][:, None, :, None] + self.noise.mean
        below, density, bend = self._mixed(t[:, :, None], centre, root, bent)
        # far out the sums of the mixture leave double precision: there they are taken in logs
        far = np.flatnonzero(below.min(axis=(1, 2)) < _TINY)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_F, rate, bend = np.log(below), density / below, bend / below
        if len(far):
            z = (t[far, :, None, None] - centre[far]) / root[far]
            log_F[far], rate[far], bends = self._mixed_in_logs(z, root[far])
            if bent:
                bend[far] = bends
        return log_F.sum(2), rate, bend

    def _mixed(self, t: Any, centre: Any, root: Any, bent: bool) -> tuple[Any, Any, Any]:
        """Chance below t, density and its slope there, of the noise mixture about each loser.

        The slope only if asked.
        """
        below, density, bend = 0.0, 0.0, 0.0
        for c, share in enumerate(self.noise.weight):
            z = (t - centre[..., c]) * (1.0 / root[..., c])
            below = below + share * ndtr(z)
            own = z * z
            own *= -0.5
            np.exp(own, out=own)
            own *= (share / np.sqrt(2 * np.pi)) / root[..., c]
            density = density + own
            if bent:
                bend = bend - own * z / root[..., c]
        return below, density, bend

    def _mixed_in_logs(self, z: np.ndarray, root: np.ndarray) -> tuple[Any, Any, Any]:
        """Log chance below, density over chance, and the slope of the density over chance."""
        log_w = np.log(self.noise.weight)
        log_F = logsumexp(log_ndtr(z) + log_w, axis=-1)
        log_each = -0.5 * (z**2 + np.log(2 * np.pi)) - np.log(root) + log_w
        each = np.exp(log_each - log_F[..., None])
        return log_F, each.sum(-1), -np.sum(each * z / root, axis=-1)

    def _range(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ends of the integral and number of nodes (n,), located with one matched normal noise."""
        (shift, matched), depth = self.noise.moments, self.nodes.depth
        own, V = self.own + shift, self.own_var + matched
        centre, var = self.others + shift, self.others_var + matched
        mode, curvature, height = self._mode(own, V, centre, var)
        widest = self.own_var + self.noise.var.max()
        beyond = float(self.noise.mean.max()) if len(self.noise.weight) > 1 else 0.0
        left = mode - np.sqrt(2 * depth / curvature)
        right = np.minimum(
            mode + np.sqrt(2 * depth * widest), own + np.sqrt(2 * widest * (depth - height))
        )
        right = beyond + np.maximum(right, mode + 0.2 * np.sqrt(2 * depth / curvature))
        if len(self.noise.weight) > 1:
            left += min(0.0, float(self.noise.mean.min()) - shift)
        # where latent values are known hardly at all the steps of the losers may be far narrower
        # than the integrand
        cap = np.where(np.maximum(self.own_var, self.others_var.max(1)) > 100.0, 256.0, 16.0)
        fine = np.minimum(1 / V + np.sum(1 / var, axis=1), cap * curvature)
        counts = (right - left) * np.sqrt(fine) / self.nodes.spacing
        counts = counts * (matched / self.noise.var.min()) ** 0.25
        place = np.searchsorted(self.nodes.counts, np.minimum(counts, self.nodes.counts[-1]))
        return left, right, self.nodes.counts[place]

    @staticmethod
    def _mode(
        own: Any, V: Any, centre: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mode, negative curvature and log height of the integrand over its prior part.

        The slope is convex and decreasing, so Newton from the prior mean climbs without overshoot.
        """
        root, t = np.sqrt(var), own.copy()
        for _ in range(_NEWTON_STEPS):
            r, r_plus_z = normal_hazard((t[:, None] - centre) / root)
            slope = -(t - own) / V + np.sum(r / root, axis=1)
            curvature = 1 / V + np.sum(r * r_plus_z / var, axis=1)
            move = slope / curvature
            t += move
            if np.all(np.abs(move) * np.sqrt(curvature) < 1e-3):
                break
        z = (t[:, None] - centre) / root
        r, r_plus_z = normal_hazard(z)
        curvature = 1 / V + np.sum(r * r_plus_z / var, axis=1)
        return t, curvature, -((t - own) ** 2) / (2 * V) + log_ndtr(z).sum(1)


def _matched(
    slope: np.ndarray, own: np.ndarray, var: np.ndarray, own_var: np.ndarray, curvature: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return slopes of losers and winner at which the winner's curvature is that of log Z (n,).

    With normal noise the slopes of the regressions on t have it already; a Gumbel utility says
    nothing of who wins, and the site that belongs to them lacks a factor of up to pi^2 / 6.
    """
    e = np.column_stack([slope, own])
    v = np.column_stack([var, own_var])
    d = 1.0 / np.maximum(1.0 / np.maximum(e, _TINY) - v, _LEAST_NOISE)
    known = 1.0 / (1.0 + (v.mean(1) / _WIDE) ** 2)
    low, high = np.ones(len(d)), np.full(len(d), _GUMBEL.moments[1])
    for _ in range(_BISECTIONS):
        factor = 0.5 * (low + high)
        e = factor[:, None] * d / (1.0 + factor[:, None] * v * d)
        less = e[:, -1] * e[:, :-1].sum(1) < curvature * e.sum(1)
        low, high = np.where(less, factor, low), np.where(less, high, factor)
    factor = (1.0 + known * (0.5 * (low + high) - 1.0))[:, None]
    e = factor * d / (1.0 + factor * v * d)
    return e[:, :-1], e[:, -1]


def _normalised(log_density: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the log integral of densities (n, nodes) at nodes a step apart, and their shares."""
    top = log_density.max(1, keepdims=True)
    rho = np.exp(log_density - top)
    mass = rho.sum(1)
    rho /= mass[:, None]
    return top[:, 0] + np.log(mass * step), rho


CLASS_LIKELIHOODS = {
    "probit": NoisyArgmax(_NORMAL, Probit()),
    "logit": NoisyArgmax(_GUMBEL, Logit()),
}
SOFTMAX = NoisyArgmax(_GUMBEL, Logit(), matched=True)
# The same where a fit asks for it hundreds of times to a tolerance.
QUICK_SOFTMAX = NoisyArgmax(_GUMBEL, Logit(), _COARSE, matched=True)


class ClassSites(NamedTuple):
    """Sites of all rows: precisions d >= 0 of the links to the winner, shifts b that sum to 0."""

    precision: np.ndarray
    shift: np.ndarray


class ClassUpdate(NamedTuple):
    """What one pass over the rows gives.

    sites are the undamped targets; log_term (n,) is the contribution of each row to the log
    evidence; tilted is that of the factor under the cavities; n_improper counts rows whose cavity
    was improper and was replaced by the marginal.
    """

    sites: ClassSites
    log_term: np.ndarray
    tilted: ClassTilted
    n_improper: int

    @property
    def noise_slope(self) -> np.ndarray:
        """Derivative (n,) of the log evidence in a variance added to all classes of a row."""
        _, g, e = self.tilted
        return 0.5 * np.sum(g**2 - e + e**2 / e.sum(1, keepdims=True), axis=1)


def star_times(d: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return (diag(d) - d d' / sum d) x for d (n, K) and x (n, K) or columns (n, K, k) of them."""
    columns = x.reshape(*d.shape, -1)
    dx = d[:, :, None] * columns
    out = dx - d[:, :, None] * (dx.sum(1) / d.sum(1)[:, None])[:, None]
    return out.reshape(x.shape)


def contrast_variances(cov: np.ndarray) -> np.ndarray:
    """Return variances (n, K) of independent values whose contrasts are closest to those of cov.

    Labels see differences f_c - f_j only. Least squares over all pairs, exact for K of 2 and 3; a
    class whose contrasts share less than the others do among each other would get a negative
    variance, and gets `_LEAST_VARIANCE`.
    """
    K = cov.shape[-1]
    own = np.einsum("ncc->nc", cov)
    if K == 2:
        half = 0.5 * (own.sum(1) - 2 * cov[:, 0, 1])
        v = np.column_stack([half, half])
    else:
        R = K * own + own.sum(1)[:, None] - 2 * cov.sum(2)
        total = R.sum(1) / (2 * (K - 1))
        v = (R - total[:, None]) / (K - 2)
    return np.maximum(v, _LEAST_VARIANCE)


def _stars(d: np.ndarray) -> np.ndarray:
    """Return T = diag(d) - d d' / sum d of each row, (n, K, K)."""
    T = -d[:, :, None] * (d / d.sum(1, keepdims=True))[:, None, :]
    np.einsum("ncc->nc", T)[:] += d
    return T


class ClassCavities(NamedTuple):
    """Mean (n, K) and covariance (n, K, K) without one copy of the site, and where that was proper.

    Rows with an improper cavity carry the posterior itself instead; `proper` (n,) marks them.
    """

    mean: np.ndarray
    cov: np.ndarray
    proper: np.ndarray


def class_cavities(sites: ClassSites, mean: np.ndarray, cov: np.ndarray) -> ClassCavities:
    """Remove one copy of each site from its marginal.

    A row of weight below one has less of its site in the posterior than is removed, and may be left
    with no variance; so may stale sites after a change of hyperparameters.
    """
    A = np.eye(mean.shape[1]) - cov @ _stars(sites.precision)
    proper = np.linalg.det(A) > 0
    A[~proper] = np.eye(mean.shape[1])
    shift = np.where(proper[:, None], sites.shift, 0.0)
    shifted = mean - np.einsum("ncj,nj->nc", cov, shift)
    solved = np.linalg.solve(A, np.concatenate([shifted[:, :, None], cov], axis=2))
    m, without = solved[:, :, 0], solved[:, :, 1:]
    without = 0.5 * (without + without.transpose(0, 2, 1))
    own = np.einsum("ncc->nc", without)
    contrasts = own[:, :, None] + own[:, None, :] - 2.0 * without
    lost = proper & np.any(contrasts < 0, axis=(1, 2))
    m[lost], without[lost] = mean[lost], cov[lost]
    return ClassCavities(m, without, proper & ~lost)


def class_update(
    factor: Any, y: np.ndarray, sites: ClassSites, mean: np.ndarray, cov: np.ndarray, extra_var: Any
) -> ClassUpdate:
    """Match moments row by row: cavities, the factor, new sites.

    `extra_var` (n,) or 0 is the variance of the latent values of all classes given the values that
    carry the sites.
    """
    m, without, proper = class_cavities(sites, mean, cov)
    v = contrast_variances(without)
    tilted = factor.tilted(y, m, v + np.reshape(extra_var, (-1, 1)))
    d = tilted.slope / (1.0 - v * tilted.slope)
    new = ClassSites(d, star_times(d, m + v * tilted.gradient) + tilted.gradient)
    log_term = tilted.log_z - _log_mass(sites, m, v)
    return ClassUpdate(new, log_term, tilted, int(np.sum(~proper)))


def _log_mass(sites: ClassSites, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return log of the integral of each site over N(m, diag v), shape (n,)."""
    d, b = sites
    spread = 1.0 + d * v
    e, x = d / spread, (m + v * b) / spread
    level = np.sum(d * x, axis=1) / e.sum(1)
    tilted = x + v * e * level[:, None]
    log_det = np.sum(np.log(spread), axis=1) + np.log(e.sum(1)) - np.log(d.sum(1))
    quad = np.sum((tilted - m) ** 2 / v + tilted * star_times(d, tilted), axis=1)
    return -0.5 * (log_det + quad) + np.sum(b * tilted, axis=1)


def class_log_weights(
    factor: Any, y: np.ndarray, weight: np.ndarray, sites: ClassSites, latent: np.ndarray
) -> np.ndarray:
    """Return log(likelihood / sites) of draws (S, n, K) of the latent values, up to a constant."""
    own = factor.log_prob(latent)[:, np.arange(len(y)), y]
    d, b = sites
    quad = np.einsum("snc,nc->sn", latent**2, d)
    quad -= np.einsum("snc,nc->sn", latent, d) ** 2 / d.sum(1)
    return (own + 0.5 * quad - np.einsum("snc,nc->sn", latent, b)) @ weight


def empty_sites(y: np.ndarray, n_classes: int) -> np.ndarray:
    """Return sites (2, n, K) that say nothing: a winner's link alone, which has no contrast."""
    x = np.zeros((2, len(y), n_classes))
    x[0, np.arange(len(y)), y] = 1.0
    return x


class JointEP:
    """The fixed-point map of EP for classes: a structure, a factor and rows meet.

    Parameters
    ----------
    structure : object
        `posterior(precision, shift)` maps sites (n, K), copies counted, to a state with `mean`
        (n, K), `cov` (n, K, K), `extra_var` and `log_evidence`.
    factor : NoisyArgmax
    y : ndarray of shape (n,)
        Class indices.
    weight : ndarray of shape (n,)
        Copies of each row; the posterior counts a site that often, the cavity lacks one copy.
    """

    def __init__(self, structure: Any, factor: Any, y: np.ndarray, weight: np.ndarray) -> None:
        purpose = "expectation propagation for classes"
        require("structure", structure, ["posterior"], purpose)
        require("factor", factor, ["tilted", "log_proba", "fixed_winner"], purpose)
        self.structure, self.factor, self.y = structure, factor, y
        self.weight, self._copies = weight, weight[:, None]

    def evaluate(self, x: np.ndarray) -> Evaluation:
        """Map sites, as an array (2, n, K), to their `Evaluation`.

        The payload is (state of the structure, `ClassUpdate`).
        """
        sites = ClassSites(x[0], x[1])
        state = self.structure.posterior(self._copies * x[0], self._copies * x[1])
        marginals = state.mean, state.cov, state.extra_var
        update = class_update(self.factor, self.y, sites, *marginals)
        var = np.einsum("ncc->nc", state.cov)
        log_evidence = state.log_evidence + self.weight @ update.log_term
        return Evaluation(
            target=np.array(update.sites),
            residual=self._change(sites, update.sites, var),
            metric=np.array([var, np.sqrt(var)]) * np.sqrt(self._copies),
            record={"log_evidence": float(log_evidence)},
            payload=(state, update),
        )

    def _change(self, old: ClassSites, new: ClassSites, var: np.ndarray) -> float:
        """Return the largest dimensionless change of a site that says something."""
        links = np.abs(new.precision - old.precision) * var / (1.0 + var * old.precision)
        if self.factor.fixed_winner:
            links[np.arange(len(self.y)), self.y] = 0.0
        shifts = np.abs(new.shift - old.shift) * np.sqrt(var)
        return float(max(links.max(), shifts.max()))

    def solve(
        self,
        x: np.ndarray,
        *,
        tol: float,
        max_iter: int,
        damping: float,
        accelerate: bool,
        mixing: float = 1.0,
        monitor: Monitor = SILENT,
    ) -> Result:
        """Iterate to the fixed point from sites x (2, n, K); see `loop.iterate` for the result.

        The acceleration mixes whole steps: for normal noise that takes fewer sweeps than a share
        (39 for 129 at .7 on iris, elsewhere alike), so `damping` is that of the plain iteration.
        `mixing` is another share.
        """
        return iterate(
            self.evaluate,
            x,
            max_iter=max_iter,
            tol=tol,
            damping=damping,
            acceleration=Anderson(depth=4, mixing=mixing) if accelerate else None,
            repair=_admissible,
            monitor=monitor,
            undamped_start=accelerate and not np.any(x[1]),
        )


def _admissible(proposal: np.ndarray, x: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Replace extrapolated negative links by half the plain step; centre the shifts."""
    bad = proposal[0] < 0
    new = proposal.copy()
    new[0][bad] = 0.5 * (x + target)[0][bad]
    new[1] -= new[1].mean(1, keepdims=True)
    return new
