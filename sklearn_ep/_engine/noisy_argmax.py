"""The factor of several classes: the chance that one class has the largest noisy latent value.

A row has a latent value f_c for each class, and its label is the class with the largest utility
f_c + noise. All that expectation propagation asks of such a label comes from integrals over one
number, the utility of the winner; `class_sites` has the sites that these integrals give.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_ndtr, log_softmax, ndtr, softmax

from .gaussian import ImproperPosterior, normal_hazard
from .likelihoods import Factor, LabelNoise, Logit, Probit

_NEWTON_STEPS = 25
# Probabilities below which double precision loses digits.
_TINY = 1e-280
# Utilities of the winner, in sd of the noise from the largest latent value, that chances which are
# not asked in logs are summed over: to 1e-6 up to a hundred classes, to 2 % of a chance of 1e-20.
_UTILITIES = np.arange(-9.0, 7.0, 0.4)
# Entries (rows x nodes x classes) that are held at once: temporary arrays stay in the caches.
_ENTRIES = 1 << 15
# Log probability of a class below which nodes that all classes share may miss it.
_LEAST_LOG = -500.0
# Factor on the number of shared nodes. Nodes of one class have it by rounding up to `counts`.
_SPARE = 1.25
# Mean variance of latent values from which on `_matched` leaves the slopes of a softmax as they
# are. They are right to 2 % at 10, and to less beyond, where rounding hides the factor that
# corrects.
_WIDE, _BISECTIONS = 10.0, 12
# Least variance of the noise that such a site stands for; .65 is the least without rounding.
_LEAST_NOISE = 0.5


class Trapezoid(NamedTuple):
    """Where integrals are cut off, and how many nodes they get.

    `depth` is the log height below the mode at which the integrand ends, `spacing` that of the
    nodes in widths of its narrowest part; numbers of nodes are rounded up to one of `counts`, so
    that rows can be taken together.
    """

    depth: float
    spacing: float
    counts: np.ndarray


# Errors of the first are 1e-12. Those of the second are 1e-6 as a rule and 5e-4 at worst, less than
# a tolerance of 1e-3.
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

    log_concave = True

    def __init__(
        self, noise: Noise, against_rest: Factor, nodes: Trapezoid = _FINE, matched: bool = False
    ) -> None:
        self.noise, self.against_rest, self.nodes = noise, against_rest, nodes
        self.matched = matched and not self.fixed_winner

    @property
    def fixed_winner(self) -> bool:
        """Whether the winner's precision is known beforehand: 1, for normal noise."""
        return len(self.noise.weight) == 1

    def rough(self) -> "NoisyArgmax":
        """Return the same with fewer nodes, for sites that a search for something else passes."""
        return NoisyArgmax(self.noise, self.against_rest, _COARSE, self.matched)

    def log_prob(self, y: np.ndarray, f: np.ndarray) -> np.ndarray:
        """Return log p(y | f) (..., n) of labels (n,) at latent values f (..., n, K)."""
        labels = np.broadcast_to(y, f.shape[:-1])
        if not self.fixed_winner:
            return np.take_along_axis(log_softmax(f, axis=-1), labels[..., None], axis=-1)[..., 0]
        flat = f.reshape(-1, f.shape[-1])
        return self.tilted(labels.ravel(), flat, np.zeros_like(flat)).log_z.reshape(labels.shape)

    def proba(self, f: np.ndarray) -> np.ndarray:
        """Return p(y = c | f) (..., K) of all classes at latent values f (..., K), to 1e-6.

        All rows take the same few nodes, in a tenth to a hundredth of the time of `log_proba`.
        """
        if not self.fixed_winner:
            return softmax(f, axis=-1)
        behind = (f.max(axis=-1, keepdims=True) - f) / np.sqrt(self.noise.var[0])
        total = np.zeros_like(behind)
        for utility in _UTILITIES:
            z = behind + utility
            below = ndtr(z)
            total += np.exp(-0.5 * z * z) * (below.prod(axis=-1, keepdims=True) / below)
        return total / total.sum(axis=-1, keepdims=True)

    def log_proba(self, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        """Return log probabilities (n, K) of all classes, normalised, for f ~ N(mean, diag var).

        All classes take the same nodes, but for rows that would want more of these than the classes
        want on their own, or where a chance is too small for them.
        """
        n, K = mean.shape
        races = [self._race(np.full(n, c), mean, var)[1] for c in range(K)]
        ranges = [race.range() for race in races]
        left, right, counts = (np.array(ends) for ends in zip(*ranges, strict=True))
        density = np.max(counts / (right - left), axis=0)
        left, right = left.min(axis=0), right.max(axis=0)
        wanted = density * (right - left)
        together = wanted <= np.minimum(counts.sum(axis=0), self.nodes.counts[-1])
        shared = np.flatnonzero(together)
        log_z = np.full((n, K), -np.inf)
        all_run = _Race(self.noise, self.nodes, False, None, None, mean[shared], var[shared])
        log_z[shared] = all_run.log_chances(left[shared], right[shared], wanted[shared])
        lone = np.flatnonzero(~(log_z.min(axis=1) >= _LEAST_LOG))
        for c in range(K) if len(lone) else ():
            log_z[lone, c] = self.tilted(np.full(len(lone), c), mean[lone], var[lone]).log_z
        return log_softmax(log_z, axis=1)

    def tilted(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> ClassTilted:
        """Return log p(y) of each row for f ~ N(mean, diag var), with derivatives.

        Parameters
        ----------
        y : ndarray of shape (n,)
            Class indices.
        mean, var : ndarray of shape (n, K)
        """
        rows, race, joined = self._race(y, mean, var)
        log_z, hazard, slope, own_slope = race.integrals(race.linked, race.range())
        gradient, slopes = joined(-hazard, hazard.sum(1)), joined(slope, own_slope)
        if self.fixed_winner:
            slopes[rows, y] = 1.0 / (var[rows, y] + self.noise.var[0])
        return ClassTilted(log_z, gradient, slopes)

    def log_z_slopes(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> Any:
        """Return log p(y) (n,) as `tilted` does, and its slopes (n, K) in means and variances."""
        _, race, joined = self._race(y, mean, var)
        log_z, hazard, bends, own_bend = race.integrals(race.bent, race.range(), bent=True)
        return log_z, joined(-hazard, hazard.sum(1)), 0.5 * joined(bends, own_bend)

    def _race(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> Any:
        """Tell winner from losers in each row.

        Returns `arange(n)`, the `_Race` of the rows, and the way back, which puts numbers of the
        losers, in the order of the classes, and of the winner in their places. With y = [2, 0]::

            mean (n, K)      own (n,)   others (n, K - 1)      joined(others, own) (n, K)
            a  b  c             c           a  b                   a  b  c
            d  e  f     ->      d           e  f           ->      d  e  f
        """
        n, K = mean.shape
        rows, losers = np.arange(n), np.arange(K) != y[:, None]
        race = _Race(self.noise, self.nodes, self.matched, mean[rows, y], var[rows, y],
                     mean[losers].reshape(n, K - 1), var[losers].reshape(n, K - 1))  # fmt: skip

        def joined(others: np.ndarray, own: Any) -> np.ndarray:
            out = np.empty((n, K))
            out[losers], out[rows, y] = others.ravel(), own
            return out

        return rows, race, joined


class ErringArgmax:
    """The label of a probit `NoisyArgmax` that is wrong with probability `rate`.

    Every other class is then as probable: p(y | f) = (1 - e) p_y + e (1 - p_y) / (K - 1) for the
    probability p_y that class y wins. It rises with p_y, with slope 1 - e K / (K - 1), so that all
    follows from what the winner alone says. `noise` is the variance of the normal noise. Slopes of
    losers may be negative: the label counts as suspect. That of the winner is as without errors;
    the others have the negative curvature of log Z in each loser. With those in the winner and each
    loser, as without errors, sites of random labels do not settle, and the evidence of 48 rows is
    ten nats lower.
    """

    log_concave, fixed_winner = False, True

    def __init__(self, rate: float, n_classes: int, noise: float = 1.0, fine: bool = True) -> None:
        self.rate, self.n_classes, self.variance = rate, n_classes, noise
        normal = Noise(np.ones(1), np.zeros(1), np.array([noise]))
        self.floor = rate / (n_classes - 1)
        self.against_rest = LabelNoise(0.5 * n_classes * self.floor, noise)
        self.winner = NoisyArgmax(normal, LabelNoise(0.0, noise), _FINE if fine else _COARSE)

    def rough(self) -> "ErringArgmax":
        """Return the same with fewer nodes, see `NoisyArgmax`."""
        return ErringArgmax(self.rate, self.n_classes, self.variance, fine=False)

    def _mixed(self, log_p: np.ndarray) -> np.ndarray:
        """Return the log probability of a label whose class wins with a log probability."""
        with np.errstate(divide="ignore"):
            log_floor = np.log(self.floor)
        return np.logaddexp(log_floor, np.log1p(-self.n_classes * self.floor) + log_p)

    def log_prob(self, y: np.ndarray, f: np.ndarray) -> np.ndarray:
        """Return log p(y | f) (..., n) of labels (n,) at latent values f (..., n, K)."""
        return self._mixed(self.winner.log_prob(y, f))

    def proba(self, f: np.ndarray) -> np.ndarray:
        """Return p(y = c | f) (..., K) of all classes at latent values f (..., K), to 1e-6."""
        return self.floor + (1.0 - self.n_classes * self.floor) * self.winner.proba(f)

    def log_proba(self, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        """Return log probabilities (n, K) of all labels for f ~ N(mean, diag var)."""
        return self._mixed(self.winner.log_proba(mean, var))

    def tilted(self, y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> ClassTilted:
        """Return log p(y) of each row and derivatives, as `NoisyArgmax` does."""
        log_p, gradient, slope = self.winner.tilted(y, mean, var)
        if self.rate == 0:
            return ClassTilted(log_p, gradient, slope)
        log_z, rows = self._mixed(log_p), np.arange(len(y))
        share = np.exp(np.log1p(-self.n_classes * self.floor) + log_p - log_z)[:, None]
        own, new, total = slope[rows, y], slope, slope.sum(1, keepdims=True)
        bent = share * (slope * (1.0 - slope / total) - (1.0 - share) * gradient**2)
        for _ in range(2):  # of two classes one is exact, of more a third moves nothing by 1e-3
            rest = new.sum(1, keepdims=True) - new
            # nothing is left of the losers of a label that is surely wrong
            new = np.divide(bent * rest, rest - bent, out=np.zeros_like(rest), where=rest != 0)
            new[rows, y] = own
        return ClassTilted(log_z, share * gradient, new)

    def wrong_proba(self, log_z: np.ndarray) -> np.ndarray:
        """Return the probability (n,) that a label of log probability log Z is wrong."""
        lost = self.floor * -np.expm1(log_z - np.log1p(-self.rate))
        shares = (1.0 - self.rate) / (1.0 - self.n_classes * self.floor)
        return np.clip(lost * shares * np.exp(-log_z), 0.0, 1.0)


class _Race(NamedTuple):
    r"""Integrals over the winner's utility t of p(t) times the chance that all others stay below.

    `own` and `own_var` (n,) are mean and variance of the winner, `others` and `others_var`
    (n, K - 1) those of the losers::

                      prod_j F_j(t)  _______
                                   /            p(t)  density of the winner's utility
                 p(t)  .-.       /              F_j(t)  chance that loser j stays below t
                     /     \   /                Z = integral of p(t) prod_j F_j(t)
          __________/       \/__________  t
            |  left |  |  |  |  right |         nodes t (rows, nodes), a `step` (rows,) apart

    Rows come in blocks i of one number of nodes. `_own_at` and `_others_at` give the two curves at
    the nodes, in logs; `linked` and `bent` sum their product and what it averages.
    """

    noise: Noise
    nodes: Trapezoid
    matched: bool
    own: Any
    own_var: Any
    others: np.ndarray
    others_var: np.ndarray

    def log_chances(self, left: Any, right: Any, wanted: Any) -> np.ndarray:
        """Return the log chance (n, K) of each runner to win, where nobody else runs.

        It is the integral of d log F_c / dt times the chance that all are below, over nodes that
        all runners share: no fewer than `wanted` (n,) between `left` and `right`. NaN where no
        number of double precision says it.
        """
        out, counts = np.empty(self.others.shape), 8 * np.ceil(_SPARE * wanted / 8.0).astype(int)
        for i, t, step in self._blocks(left, right, counts):
            log_F, rate, _ = self._below(i, t, bent=False)
            with np.errstate(divide="ignore", invalid="ignore"):
                log_density = np.log(rate) + log_F.sum(0)
                out[i] = np.array([_normalised(own, step)[0] for own in log_density]).T
        return out

    def integrals(self, of_curves: Any, ends: Any, bent: bool = False) -> tuple[np.ndarray, ...]:
        """Return log Z and E hazard of all rows, and of losers (n, K - 1) and winner what is asked.

        That is `linked` or `bent`, the latter of curves that are so; `ends` are those of `range`.
        By the trapezoid rule: the integrand is analytic and falls off at both ends, so that equally
        spaced nodes converge exponentially; their number follows from the width of its narrowest
        part.
        """
        n, K = len(self.own), self.others.shape[1] + 1
        out = np.empty(n), np.empty((n, K - 1)), np.empty((n, K - 1)), np.empty(n)
        left, right, wanted = ends
        if not np.all(np.isfinite(wanted)):
            raise ImproperPosterior("latent values of classes are beyond double precision")
        few = self.nodes.counts
        counts = few[np.searchsorted(few, np.minimum(wanted, few[-1]))]
        for i, t, step in self._blocks(left, right, counts):
            curves = self._others_at(i, t, bent), self._own_at(i, t, bent)
            for values, some in zip(out, of_curves(i, t, step, *curves), strict=True):
                values[i] = some
        # that of a certain label comes out above zero by the error of the quadrature
        return np.minimum(out[0], 0.0), *out[1:]

    def _blocks(self, left: Any, right: Any, counts: Any) -> Any:
        """Yield rows with their nodes and steps, as many at a time as are cheap."""
        for count in np.unique(counts):
            chosen = np.flatnonzero(counts == count)
            size = max(1, _ENTRIES // (count * self.others.shape[1]))
            for start in range(0, len(chosen), size):
                i = chosen[start : start + size]
                step = (right[i] - left[i]) / (count - 1)
                yield i, left[i, None] + step[:, None] * np.arange(count), step

    def linked(self, i: Any, t: Any, step: Any, below: Any, own: Any) -> tuple[Any, Any, Any, Any]:
        """Return log Z, E hazard, and the slopes of losers and winner."""
        (log_below, rate, _), (log_own, score, _) = below, own
        log_z, rho = _normalised(log_own + log_below, step)
        centred = t - np.sum(rho * t, axis=1, keepdims=True)
        spread = np.sum(rho * centred**2, axis=1)
        hazard = np.einsum("it,itj->ij", rho, rate)
        slope = -np.einsum("it,itj->ij", rho * centred, rate) / spread[:, None]
        slope = np.maximum(slope, 0.0)
        # not what the losers leave of 1 / spread: in a wide cavity the site follows from the last
        # digits of 1 - variance times slope, which are right here whatever the nodes
        own_slope = np.maximum(-np.sum(rho * centred * score, axis=1) / spread, 1e-10)
        if self.matched:
            away = score - np.sum(rho * score, axis=1, keepdims=True)
            links = np.maximum(np.einsum("it,itj->ij", rho * away, rate), 0.0)
            var = self.others_var[i], self.own_var[i]
            slope, own_slope = _matched(slope, own_slope, *var, links.sum(1))
        return log_z, hazard, slope, own_slope

    def bent(self, i: Any, t: Any, step: Any, below: Any, own: Any) -> tuple[Any, Any, Any, Any]:
        """Return log Z, E hazard, and second derivatives over Z in the means of losers and winner.

        Half of the latter are the slopes of log Z in the variances.
        """
        (log_below, rate, bend), (log_own, _, own_bend) = below, own
        log_z, rho = _normalised(log_own + log_below, step)
        others = (np.einsum("it,itj->ij", rho, values) for values in (rate, bend))
        return log_z, *others, np.sum(rho * own_bend, axis=1)

    def _own_at(self, i: np.ndarray, t: np.ndarray, bent: bool) -> tuple[Any, Any, Any]:
        """Log density of the winner's utility, its slope, and its second derivative over it.

        The latter if `bent`. One normal of the noise at a time, each (rows, nodes).
        """
        apart, own_var = t - self.own[i, None], self.own_var[i, None]
        logs, aways, bends = [], [], []
        for share, mean, extra in zip(*self.noise, strict=True):
            var = own_var + extra
            away = (apart - mean) / var
            z2 = away**2 * var
            logs.append(-0.5 * (z2 + np.log(2 * np.pi * var)) + np.log(share))
            aways.append(away)
            bends.append((z2 - 1.0) / var if bent else 0.0)
        top = functools.reduce(np.maximum, logs)
        shares = [np.exp(each - top) for each in logs]
        total = sum(shares)
        score = sum(p * away for p, away in zip(shares, aways, strict=True)) / -total
        bend = sum(p * each for p, each in zip(shares, bends, strict=True)) / total
        return top + np.log(total), score, bend

    def _others_at(
        self, i: np.ndarray, t: np.ndarray, bent: bool
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """Log chance that all losers are below t, and how it grows.

        Parameters
        ----------
        i : ndarray of shape (rows,)
            The rows of a block.
        t : ndarray of shape (rows, nodes)

        Returns
        -------
        log_below : ndarray of shape (rows, nodes)
            sum_j log F_j(t), where F_j is the distribution function of loser j's utility.
        rate, bend : ndarray of shape (rows, nodes, K - 1)
            F_j' / F_j and, if `bent`, F_j'' / F_j.
        """
        log_F, rate, bend = self._below(i, t, bent)
        if bent:
            bend = np.moveaxis(bend, 0, 2)
        return np.moveaxis(log_F, 0, 2).copy().sum(2), np.moveaxis(rate, 0, 2).copy(), bend

    def _below(self, i: np.ndarray, t: np.ndarray, bent: bool) -> tuple[Any, Any, Any]:
        """Return log F_j, F_j' / F_j and, if `bent`, F_j'' / F_j at t, each (losers, rows, nodes).

        Nodes come last since there are more of them than of losers: what runs over an array then
        runs far without a stop. Sums over the normals of the noise grow one normal at a time, which
        takes a fifth of the memory of all at once.
        """
        mean, var = self.others[i].T[:, :, None], self.others_var[i].T[:, :, None]
        root = np.sqrt(var[..., None] + self.noise.var)
        centre = mean[..., None] + self.noise.mean
        below, density, bend = (np.zeros(()),) * 3
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
        # far out the sums of the mixture leave double precision: there they are taken in logs
        far = np.flatnonzero(below.min(axis=(0, 2)) < _TINY)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_F, rate, bend = np.log(below), density / below, bend / below
        if len(far):
            z = (t[far, :, None] - centre[:, far]) / root[:, far]
            log_F[:, far], rate[:, far], bends = _mixed_in_logs(self.noise.weight, z, root[:, far])
            if bent:
                bend[:, far] = bends
        return log_F, rate, bend

    def range(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ends of the integral and nodes wanted (n,), located with one matched normal noise."""
        (shift, matched), depth = self.noise.moments, self.nodes.depth
        own, V = self.own + shift, self.own_var + matched
        centre, var = self.others + shift, self.others_var + matched
        mode, curvature, height = _mode(own, V, centre, var)
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
        return left, right, counts * (matched / self.noise.var.min()) ** 0.25


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


def _mixed_in_logs(weight: np.ndarray, z: np.ndarray, root: np.ndarray) -> tuple[Any, Any, Any]:
    """Log chance below, density over chance, and the slope of the density over chance."""
    log_w = np.log(weight)
    log_F = np.logaddexp.reduce(log_ndtr(z) + log_w, axis=-1)
    log_each = -0.5 * (z**2 + np.log(2 * np.pi)) - np.log(root) + log_w
    each = np.exp(log_each - log_F[..., None])
    return log_F, each.sum(-1), -np.sum(each * z / root, axis=-1)


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
QUICK_SOFTMAX = SOFTMAX.rough()
