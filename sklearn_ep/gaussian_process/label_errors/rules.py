"""The step likelihood of a label that may be wrong, its relaxed rule, and sites under noise.

With the white noise of the latent function counted as part of the variable, g = f + noise, the
probit with label errors is a step, and everything about it is a function of one number: the mean of
g over its standard deviation. A relaxation factor exp(-b (g - m)^2 / 2) around the centre m of the
old site multiplies the cavity before moments are matched. In units of the cavity, gamma = b times
its variance, all that it does is to move that number.

Sites on g = f + noise become sites on f, so that any structure of f serves, and copies of a row
share f while each has a noise of its own. Where f is seen through inducing points, passes over rows
keep sites on t, the mean of f given the inducing values: with e the noise plus the variance of f
given them, a site (tau, nu) on g is the site (tau, nu) / (1 + e tau) on t.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

from ..._engine.contracts import WholeEP
from ..._engine.gaussian import ImproperPosterior, normal_hazard
from ..._engine.likelihoods import Factor, Tilted
from ..._engine.rules import match_moments
from ..._engine.schedule import JointMarginals, towards
from ..._engine.sites import Sites, cavity, copy_cavity

_PEAK = 1.0 / math.sqrt(2.0 * math.pi)


class StepMoments(NamedTuple):
    """Moments of right [x > 0] + wrong [x < 0] under x ~ N(z, 1).

    log_z is the log mass, slope its derivative in z, beta = slope (slope + z) one minus the
    variance, spread the variance itself, wrong the probability of x < 0.
    """

    log_z: np.ndarray
    slope: np.ndarray
    beta: np.ndarray
    spread: np.ndarray
    wrong: np.ndarray


def _sure_spread(z, slope, above):
    """Return the variance of labels without errors, free of cancellation.

    slope and above = slope + z are those of `normal_hazard`.
    """
    far = np.minimum(z, -30.0) ** -2.0
    series = far * (1.0 - far * (6.0 - far * (50.0 - far * (518.0 - far * 6354.0))))
    # for z below -6 the sum slope + z is known to more digits than slope^2 + slope z needs
    return np.where(z < -30.0, series, 1.0 - slope * above)


def step_moments(z, log_right, log_wrong):
    """Return the `StepMoments` at z, of any shape.

    z is mean over standard deviation, positive where the cavity agrees with the label; the other
    arguments are logs of the weights of the two sides, -inf for a label that cannot be wrong.
    """
    z = np.asarray(z, dtype=float)
    if log_wrong == -math.inf:
        slope, above = normal_hazard(z)
        log_z, spread = log_right + log_ndtr(z), _sure_spread(z, slope, above)
        return StepMoments(log_z, slope, slope * above, spread, np.zeros_like(z))
    right, wrong = math.exp(log_right), math.exp(log_wrong)
    # a sum of positive terms, never below the smaller weight: no need of logs
    of_wrong = wrong * ndtr(-z)
    mass = right * ndtr(z) + of_wrong
    slope = (right - wrong) * _PEAK * np.exp(-0.5 * z**2) / mass
    beta = slope * (slope + z)
    return StepMoments(np.log(mass), slope, beta, 1.0 - beta, of_wrong / mass)


class LabelErrorStep(Factor):
    """p(y | g)^u for p = 1 - e where the sign of g is y, and e where it is not.

    e in [0, 0.5) is the rate of wrong labels, u the exponent; `log_weights` are the logs of
    (1 - e)^u and e^u, the weights of the right and of the wrong side.

    A site on g = f + noise for noise of variance s; with s added to the variance of f the factor is
    `LabelNoise` (and `Probit` for e = 0). Where label and cavity disagree beta, hence the site
    precision, is negative: that is how a label counts as suspect.
    """

    def __init__(self, rate, exponent=1.0):
        self.rate, self.exponent = rate, exponent
        self.log_concave = rate == 0
        log_wrong = math.log(rate) if rate > 0 else -math.inf
        self.log_weights = exponent * math.log1p(-rate), exponent * log_wrong

    def powered(self, exponent):
        """Return the factor to the power, which is again a step."""
        return LabelErrorStep(self.rate, self.exponent * exponent)

    def log_prob(self, y, f):
        """Return the log weight of the side that f is on."""
        return np.where(np.asarray(y) * f > 0, *self.log_weights)

    def moments(self, y, mean, var):
        """Return the `StepMoments` of the rows."""
        return step_moments(y * mean / np.sqrt(var), *self.log_weights)

    def tilted(self, y, mean, var):
        """Return log Z and derivatives in closed form."""
        root = np.sqrt(var)
        m = step_moments(y * mean / root, *self.log_weights)
        return Tilted(m.log_z, y * m.slope / root, m.beta / var)

    def contraction(self, y, mean, var, extra_var, curvature):
        """Return 1 - var * curvature; a certain label far out needs its own formula for it."""
        total = var + extra_var
        left = 1.0 - var * curvature
        if self.rate > 0:
            return left
        z = y * mean / np.sqrt(total)
        far = (extra_var + var * _sure_spread(z, *normal_hazard(z))) / total
        # further out on the wrong side the difference loses its digits
        return np.where(z < -6.0, far, left)

    def cumulants(self, y, mean, var):
        """Return log Z and the first four cumulants (4, n) of factor times N(mean, var)."""
        root, m = np.sqrt(var), self.moments(y, mean, var)
        z = y * mean / root
        bend = 2.0 * m.slope + z
        third = m.beta * bend - m.slope
        fourth = 2.0 * m.beta * m.spread - third * bend
        scale = np.stack([y * root, var, y * root**3, var**2])
        return m.log_z, scale * np.stack([m.slope + z, m.spread, third, fourth])

    def wrong_proba(self, y, mean, var):
        """Return the probability (n,) that the label is wrong, for g ~ N(mean, var)."""
        return self.moments(y, mean, var).wrong


# Shares of the largest gamma that can win where the cost is looked at first; denser at the small
# end, because z moves by gamma times the distance of the centre, which is not bounded.
_SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.03, 1.0, 36)])
# Where the divergence is looked at for bounds that hold everywhere: beyond it has settled, and what
# is between two points is within the margin, also for rates of 1e-300.
_Z = np.linspace(-40.0, 10.0, 4001)


def _divergence(z, rate):
    """Return the `StepMoments` at z, and the divergence to their normal distribution.

    Of Kullback and Leibler, from the tilted distribution to its moment match.
    """
    log_right, log_wrong = LabelErrorStep(rate).log_weights
    m = step_moments(z, log_right, log_wrong)
    if rate == 0:
        # - log Phi(z) and slope z / 2 both grow like z^2 / 2 on the wrong side; without it:
        below = np.minimum(z, 0.0)
        far = 0.5 * below * (m.slope + below) - np.log(0.5 * erfcx(-below / np.sqrt(2.0)))
        near = np.where(z < 0, far, 0.5 * m.slope * z - m.log_z)
        return m, 0.5 * np.log(m.spread) + near
    entropy = log_right + m.wrong * (log_wrong - log_right) - m.log_z
    return m, entropy + 0.5 * (np.log(m.spread) + m.slope * z)


def relaxed_cost(gamma, z0, mubar, c, rate, cost="mass"):
    """Return the cost Q(gamma) that a row minimises over its relaxation gamma >= 0.

    `gamma`, in units of the cavity precision, broadcasts against `z0` and `mubar`, the signed mean
    of the cavity and the signed centre of the relaxation over the standard deviation of the cavity.
    `c` is the penalty of a unit of gamma, `rate` that of wrong labels; `cost` says whether the
    divergence is of the unnormalised pair ("mass") or of the normalised one ("normalised").
    """
    widened, away = 1.0 + gamma, (mubar - z0) ** 2
    m, value = _divergence((z0 + gamma * mubar) / np.sqrt(widened), rate)
    if cost == "mass":
        value = np.exp(m.log_z - 0.5 * away * (gamma / widened)) / np.sqrt(widened) * value
    return value + c * gamma


def relaxed_gamma(z0, mubar, c, rate, cost="mass"):
    """Return the relaxation gamma (n,) >= 0 that minimises the cost, row by row.

    Parameters as for `relaxed_cost`, c one or one a row; c = np.inf relaxes nothing. Zero where
    exact moment matching is best. The divergence is non-negative, so that no gamma beyond Q(0) / c
    can win: the search is over a bounded interval, by a grid and by finer ones about its best
    point. Negative values are not searched: their limit -1 makes every divergence vanish and the
    posterior meaningless.
    """
    z0, mubar = np.atleast_1d(np.asarray(z0, float)), np.atleast_1d(np.asarray(mubar, float))
    gamma, c = np.zeros(len(z0)), np.broadcast_to(c, z0.shape)
    rows = np.flatnonzero(_steepest_fall(z0, mubar, rate, cost) > c)
    if not len(rows):
        return gamma
    args = z0[rows], mubar[rows], c[rows], rate, cost
    # more leaves nothing of the cavity: needed only for penalties near zero
    most = np.clip(relaxed_cost(0.0, *args) / c[rows], 0.0, 1e3)
    best = np.argmin(relaxed_cost(_SHARES[:, None] * most, *args), axis=0)
    rows, most, best = (a[best > 0] for a in (rows, most, best))
    args = z0[rows], mubar[rows], c[rows], rate, cost
    ends = best - 1, np.minimum(best + 1, len(_SHARES) - 1)
    low, high = (_SHARES[k] * most for k in ends)
    for _ in range(4):  # there may be two minima: nearer to the best one
        grid = low + np.linspace(0.0, 1.0, 17)[:, None] * (high - low)
        costs, columns = relaxed_cost(grid, *args), np.arange(len(rows))
        best = np.clip(np.argmin(costs, axis=0), 1, 15)
        low, middle, high = (grid[best + k, columns] for k in (-1, 0, 1))
    # a minimum is flat, and its place only known to half of the digits from the cost: by a parabola
    before, own, after = (costs[best + k, columns] for k in (-1, 0, 1))
    bend, fall = before - 2.0 * own + after, 0.5 * (before - after)
    step = np.divide(fall, bend, out=np.zeros(len(rows)), where=bend > 0)
    gamma[rows] = middle + np.clip(step, -1.0, 1.0) * (high - middle)
    return gamma


def _steepest_fall(z0, mubar, rate, cost):
    """Return for each row a bound (n,) of how fast its divergence can fall anywhere in gamma.

    A row whose penalty is larger does not relax: most rows.
    """
    height, slope = _divergence_bounds(rate, cost)
    away = np.abs(mubar - z0)
    fall = 0.5 * slope * (away + np.abs(mubar))
    return fall + 0.5 * height * (1.0 + away**2) if cost == "mass" else fall


@lru_cache
def _divergence_bounds(rate, cost):
    """Return the largest divergence and the largest slope of it in z, of a mass of one or as is."""
    m, value = _divergence(_Z, rate)
    if cost == "mass":
        value = np.exp(m.log_z) * value
    margin = 1.05
    return margin * value.max(), margin * np.abs(np.gradient(value, _Z)).max()


class Relaxed:
    """Relaxed moment matching (Qi and Guo 2012) for a `LabelErrorStep`; one object serves one run.

    Each row may multiply its cavity by a factor exp(-b (g - m)^2 / 2) around the centre m of its
    old site before moments are matched, where that lowers the divergence by more than the penalty,
    the price of a unit of gamma = b times the variance of the cavity. The factor is no part of the
    posterior. `cost` is that of `relaxed_cost`. The penalty is one, or one a row.

    `memory` holds b and b m of the rows. After `freeze_after` sweeps they stay as they are, or are
    released for good where they no longer pay. Which rows relax may flip for ever, since m jumps
    where a site precision changes sign.

    A site without precision has no centre: rows below one per cent of the precision of their cavity
    do not relax. That bounds the centres, so that penalties from about 50 on are moment matching.
    """

    factor_needs = ("rate",)
    exponent = 1.0

    def __init__(self, penalty, cost, freeze_after):
        self.penalty, self.cost, self.freeze_after = penalty, cost, freeze_after
        self.n_sweeps = 0
        self.memory: tuple[np.ndarray, np.ndarray] | None = None

    def resumed(self, memory):
        """Return the rule for some of the rows, of which b and b m are given as (2, n)."""
        rule = Relaxed(self.penalty, self.cost, self.freeze_after)
        rule.n_sweeps = self.n_sweeps
        rule.memory = (memory[0], memory[1]) if self.n_sweeps else None
        return rule

    def advance(self):
        """Count a sweep whose rows were all visited by resumed rules."""
        self.n_sweeps += 1

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0, weight=1.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`."""
        cav = copy_cavity(sites, mean, var, weight)
        gamma, pull = self._relax(factor, y, sites, cav)
        self.advance()
        mean = (cav.mean + pull * cav.var) / (1.0 + gamma)
        relaxed = cav._replace(mean=mean, var=cav.var / (1.0 + gamma))
        return match_moments(factor, y, sites, relaxed, extra_var, relaxation=gamma)

    def _relax(self, factor, y, sites, cav):
        """Return gamma and b m of each row."""
        told = np.abs(sites.precision) * cav.var > 1e-2
        centre = np.divide(sites.shift, sites.precision, out=np.zeros_like(cav.mean), where=told)
        root = np.sqrt(cav.var)
        scalars = y * cav.mean / root, y * centre / root, self.penalty, factor.rate, self.cost
        if self.n_sweeps < self.freeze_after or self.memory is None:
            gamma = np.where(told, relaxed_gamma(*scalars), 0.0)
            self.memory = gamma / cav.var, gamma * centre / cav.var
            return gamma, self.memory[1]
        gamma = self.memory[0] * cav.var
        pays = relaxed_cost(gamma, *scalars) <= relaxed_cost(0.0, *scalars)
        self.memory = np.where(pays, self.memory[0], 0.0), np.where(pays, self.memory[1], 0.0)
        return np.where(pays, gamma, 0.0), self.memory[1]


def noisy_marginals(sites, noise, mean, var):
    """Return mean and variance of g = f + noise given f ~ N(mean, var) and sites on g.

    And the log masses that the sites add, which have to leave the noise a variance.
    """
    precision, shift = sites
    left = 1.0 + noise * precision
    log_mass = 0.5 * (noise * shift**2 / left - np.log1p(noise * precision))
    return (mean + noise * shift) / left, noise / left + var / left**2, log_mass


def noisy_cavity(sites, mean, var, copies, noise):
    """Return the `Cavity` of g = f + noise without so many copies of sites on t.

    mean and var (n,) are the marginals of f; the noise of a copy goes with it.
    """
    found = cavity(sites, mean, var, copies)
    return found._replace(var=found.var + noise)


@dataclass
class LatentNoiseState:
    """Posterior of g = f + noise given all sites.

    `mean` and `var` (n,) are the marginals of g, of one copy of each row, `latent` is the state of
    the structure of f, `log_evidence` the log of the integral of prior times sites, and `extra_var`
    0: the sites are on g itself. `weight`, `precision`, `shift` and `noise` (n,) are copies, sites
    and variances of the noise.
    """

    latent: Any
    mean: np.ndarray
    var: np.ndarray
    log_evidence: float
    weight: np.ndarray
    precision: np.ndarray
    shift: np.ndarray
    noise: Any
    extra_var: ClassVar[float] = 0.0

    @property
    def noise_slope(self):
        """Derivative of the log evidence in the noise of each row, at a fixed point, (n,)."""
        tau, alpha = self.precision, self.shift - self.precision * self.mean
        return 0.5 * self.weight * (alpha**2 - tau + tau**2 * self.var)

    def left_out(self, copies):
        """Return the `Cavity` of g without so many copies (n,) of each row."""
        sites = through_noise(Sites(self.precision, self.shift), self.noise)
        return noisy_cavity(sites, self.latent.mean, self.latent.var, copies, self.noise)


class LatentNoise:
    """Structure of g = f + noise: of one variance for all rows, with `weight` (n,) copies of each.

    An attribute `extra_var` (n,) of the structure of f, the variance of f given what it keeps,
    counts as noise.
    """

    def __init__(self, structure, noise, weight):
        self.structure, self.weight = structure, weight
        self.noise = noise + getattr(structure, "extra_var", 0.0)

    def posterior(self, precision, shift):
        """Return the state for site parameters (n,), copies of tied rows counted."""
        weight, noise = self.weight, self.noise
        own = Sites(precision / weight, shift / weight)
        inner = self.structure.posterior(*(weight * site for site in through_noise(own, noise)))
        mean, var, log_mass = noisy_marginals(own, noise, inner.mean, inner.var)
        log_evidence = inner.log_evidence + weight @ log_mass
        return LatentNoiseState(inner, mean, var, log_evidence, weight, *own, noise)

    def shared_covariance(self, state):
        """Return the posterior covariance (n, n) of g between rows, and between copies of a row."""
        left = 1.0 + self.noise * state.precision
        return self.structure.covariance(state.latent) / left / left[:, None]


def through_noise(sites, noise):
    """Return sites on t from sites on g, or for minus the noise sites on g from sites on t.

    Raises an `ImproperPosterior` where a site leaves the noise without a proper distribution.
    """
    left = 1.0 + noise * sites.precision
    if np.any(left <= 0):
        raise ImproperPosterior("the noise of a row has no variance left")
    return Sites(sites.precision / left, sites.shift / left)


def proper_step(old, new, noise):
    """Return new sites on g, at most half the way to improper noise."""
    bad = 1.0 + noise * new.precision <= 0
    fall = np.where(bad, old.precision - new.precision, 1.0)
    share = np.where(bad, 0.5 * (old.precision + 1.0 / noise) / fall, 1.0)
    pairs = zip(old, new, strict=True)
    return Sites(*((1.0 - share) * a + share * b for a, b in pairs))


class OfNoise:
    """A rule for sites on g, asked and answered in sites on t.

    `noise` is the variance of the white noise; the extra variances of the rows are added to it.
    """

    def __init__(self, rule, noise):
        self.rule, self.noise = rule, noise
        self.exponent = rule.exponent
        self.factor_needs = getattr(rule, "factor_needs", ())

    @property
    def memory(self):
        """What the rule keeps of the rows it has just seen."""
        return self.rule.memory

    def resumed(self, memory):
        """Return the rule for some of the rows, of which the memory (k, n) is given."""
        return OfNoise(self.rule.resumed(memory), self.noise)

    def advance(self):
        """Count a sweep."""
        self.rule.advance()

    def __call__(self, factor, y, sites, mean, var, extra_var=0.0, weight=1.0):
        """Return the `SiteUpdate` of the rows; parameters as for `MomentMatching`.

        Its derivatives are those of the evidence at given sites: exact at a fixed point.
        """
        noise = self.noise + extra_var
        own = through_noise(sites, -noise)
        g_mean, g_var, log_mass = noisy_marginals(own, noise, mean, var)
        update = self.rule(factor, y, own, g_mean, g_var, weight=weight)
        new = proper_step(own, update.sites, noise)
        alpha = sites.shift - sites.precision * mean
        slope = 0.5 * (alpha**2 - sites.precision + sites.precision**2 * var)
        told = dict(sites=through_noise(new, noise), log_term=update.log_term + log_mass)
        return update._replace(gradient=alpha, noise_slope=slope, **told)


class SequentialEP(WholeEP):
    """The map of an EP under `LatentNoise` whose sites change in turn, by a share of each update.

    So Qi and Guo (2012) sweep over labels that may be wrong, one row after another.
    A sweep costs O(n^3) and calls the rule for each row. The residual is that of an undamped
    parallel sweep.
    """

    def __init__(self, ep, rule, share):
        super().__init__(ep.structure, ep.factor, ep.y, ep.weight, rule)
        self.share = share

    def evaluate(self, x):
        """Map sites (2, n) to their `Evaluation`; the damped step to its target is the sweep."""
        found = super().evaluate(x)
        state, noise = found.payload[0], self.structure.noise
        cov = self.structure.structure.covariance(state.latent)
        joint = JointMarginals(state.latent.mean, cov)

        def natural(i, site):
            return self.weight[i] * np.array(through_noise(Sites(*site), noise))

        swept = joint.swept(x, self._updated, natural, self.share)
        found.target = towards(x, swept, self.share)
        return found

    def _updated(self, i, site, mean, var):
        """Return the undamped site (2,) of one row at its marginal of f."""
        row, noise, own = slice(i, i + 1), self.structure.noise, Sites(*site[:, None])
        g_mean, g_var, _ = noisy_marginals(own, noise, mean, var)
        rule: Any = self.rule
        if getattr(rule, "memory", None) is not None:
            rule = rule.resumed([part[row] for part in rule.memory])
        new = rule(self.factor, self.y[row], own, g_mean, g_var, weight=self.weight[row]).sites
        return np.concatenate(proper_step(own, new, noise))
