"""What one part says: given the covariance of the group effects, over nodes in it, or marginally.

Rows are z_i = x_i' beta + w_i' L u_g(i) with u_j ~ N(0, I). Given L, the posterior precision of
(beta, u_1, ..., u_J) is an arrow: eliminating the J blocks of u costs O(J q D^2), never
(D + J q)^3. Everything carries a leading axis over nodes, the values of L at hand, because the
integral over the covariance of the group effects needs the same rows at several of them.

The tilted distribution of a part integrates theta, the coordinates of L, by quadrature, whose nodes
each part places by its own last tilted distribution. The marginal likelihood has value, gradient
and Hessian by quadrature over each effect: the joint mode of scales and effects is meaningless
(unbounded in one parametrisation, 5 to 130 sd off in the other).
"""

from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import expit, log_expit, logsumexp

from ..._engine import gaussian
from ..._engine.likelihoods import Logit
from ..._engine.quadrature import hermite_product, star_rule
from ..._engine.rules import rule_of_power
from ..._engine.sites import Sites, part_way
from .. import _scales
from .._exact import GivenScales
from .._layout import LocalPart, group_factors, row_mismatch, sums_by_group
from .._parts import read_rows
from .._posterior import between


class ArrowRows(NamedTuple):
    """Rows of one partition, sorted by group.

    X (n, D) is the shared design, sign (n,) the label in {-1, +1}, weight (n,) the number of tied
    copies, local (n, q) the design of the group effects, starts (J,) the first row of each group;
    without groups all rows are one, with q = 0.
    """

    X: np.ndarray
    sign: np.ndarray
    weight: np.ndarray
    local: np.ndarray
    starts: np.ndarray

    @property
    def group(self):
        """Number of the group of each row, (n,)."""
        ends = np.r_[self.starts[1:], len(self.sign)]
        return np.repeat(np.arange(len(self.starts)), ends - self.starts)

    def of_groups(self, kept):
        """Return the rows of the groups that are kept (J,), and which rows (n,) those are."""
        sizes, mine = np.diff(np.r_[self.starts, len(self.sign)])[kept], kept[self.group]
        X, sign, weight, local = (a[mine] for a in (self.X, self.sign, self.weight, self.local))
        return ArrowRows(X, sign, weight, local, np.cumsum(sizes) - sizes), mine


def of_one_factor(n, designs, codes):
    """Return design (n, q) and codes (n,) of the one factor, or of rows without groups."""
    if not len(designs):
        return np.empty((n, 0)), np.zeros(n, dtype=int)
    return designs[0], codes[0]


def arrow_rows(X, sign, weight, local, group):
    """Return the `ArrowRows` of rows whose groups are numbered from 0 by group (n,)."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) > 0])
    return ArrowRows(X[order], sign[order], weight[order], local[order], starts)


def segment_products(rows, coefficient):
    """Return sum over the rows of each group of coefficient_mi x_i, (M, J, D)."""
    m, j = len(coefficient), len(rows.starts)
    if j == 1:  # small parts spend a tenth of a fit in making the sparse matrix
        return (coefficient @ rows.X)[:, None]
    return (sums_by_group(rows.starts, coefficient) @ rows.X).reshape(m, j, -1)


def _eliminate(rows, design, precision, shift):
    """Factorise the local blocks for row sites (M, n) and local designs c = L' w, (M, n, q).

    Return (lower, lower^-1 Pub, lower^-1 hu).
    """
    m, q = design.shape[0], design.shape[2]
    j, d = len(rows.starts), rows.X.shape[1]
    cross, pull = np.empty((m, j, q, d)), np.empty((m, j, q, 1))
    for a in range(q):
        cross[:, :, a] = segment_products(rows, precision * design[:, :, a])
        pull[:, :, a, 0] = np.add.reduceat(shift * design[:, :, a], rows.starts, axis=1)
    lower = group_factors(precision, design, rows.starts)
    return lower, gaussian.forward(lower, cross), gaussian.forward(lower, pull)[..., 0]


def _row_quadratic(rows, design, group, gain, root):
    """Return |R (x_i - gain' c_i)|^2 for each node and row, (M, n)."""
    out = np.empty(design.shape[:2])
    for m, (c, lines, turn) in enumerate(zip(design, gain, root, strict=True)):
        reduced = rows.X - np.einsum("nq,nqd->nd", c, lines[group])
        turned = reduced @ turn.T
        out[m] = np.einsum("nd,nd->n", turned, turned)
    return out


def half_partition(precision, shift):
    """Return (R, mean, h'P^-1 h / 2 - log|P| / 2) of Gaussians with precisions P (M, D, D)."""
    lower = list(map(gaussian.checked_cholesky, precision))
    root = np.stack(list(map(gaussian.triangular_inverse, lower)))
    half = (root @ shift[..., None])[..., 0]
    mean = (half[..., None, :] @ root)[..., 0, :]
    log_det = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(1)
    return root, mean, 0.5 * np.einsum("mi,mi->m", half, half) - log_det


def _marginals(rows, design, group, sites, precision, shift):
    """Return what the row sites and the cavity of beta imply at each node.

    That is the posterior, whose log_z is the log mass of sites and cavity, and the means and
    variances (M, n) of the rows.
    """
    tau, nu = rows.weight * sites.precision, rows.weight * sites.shift
    lower, cross, pulled = _eliminate(rows, design, tau, nu)
    (m, j, q, d), k = cross.shape, np.arange(design.shape[2])
    half = cross.reshape(m, j * q, d)
    grams = np.stack([gaussian.weighted_gram(rows.X, own) for own in tau])
    total = precision + grams - half.swapaxes(1, 2) @ half
    pull = shift + nu @ rows.X - np.einsum("mkd,mk->md", half, pulled.reshape(m, j * q))
    log_mass = 0.5 * np.sum(pulled**2, (1, 2)) - np.sum(np.log(lower[..., k, k]), (1, 2))
    offset = gaussian.backward(lower, pulled[..., None])[..., 0]
    local = LocalPart(lower, offset, gaussian.backward(lower, cross))
    total = 0.5 * (total + total.swapaxes(1, 2))
    root, mean, log_beta = half_partition(total, pull)
    effect = local.offset - np.einsum("mjqd,md->mjq", local.gain, mean)
    row_mean = mean @ rows.X.T + np.einsum("mnq,mnq->mn", design, effect[:, group])
    spread = gaussian.forward(local.lower[:, group], design[..., None])[..., 0]
    row_var = _row_quadratic(rows, design, group, local.gain, root)
    row_var += np.einsum("mnq,mnq->mn", spread, spread)
    found = GivenScales(mean, root, local, log_mass + log_beta)
    return found, row_mean, row_var


def conditional_ep(rows, scale, precision, shift, sites, *, tol, max_passes=20, power=1.0):
    """Run EP over the rows of one partition at each node, local effects integrated out.

    Returns `GivenScales` with a leading axis over the nodes: mean (M, D) with the cavity included,
    gain of local an array (M, J, q, D), sites (M, n) those of rows, log_z (M,) the log of the mass
    of the rows under the normalised cavity. scale (M, q, q) is L at each node; precision, (M, D, D)
    or (1, D, D), and shift (M, D) are the cavity of beta; sites (M, n) are those of the rows to
    start from, None for weak ones; power the share of a row's likelihood that is matched. Stops
    once no row's mean moves by more than tol sd and no variance by a share of tol.

    One pass costs O(M n D^2 + M J q D^2 + M D^3). Parallel updates of log-concave factors settle
    undamped; should the mismatch grow, the step is halved.
    """
    design = np.einsum("nq,mqp->mnp", rows.local, scale)
    step, change, n_passes = 1.0, np.inf, 0
    rule = partial(rule_of_power(power), Logit())
    if sites is None:  # weak ones, that lean to the observed labels
        size = len(shift), len(rows.sign)
        sites = Sites(np.full(size, 0.05), np.broadcast_to(0.25 * rows.sign, size))
    cavity_mass = half_partition(precision, shift)[2]
    # Written out, not by `iterate`: for loops of two or three passes of a millisecond its
    # book-keeping makes whole fits 1.04 to 1.07 times as long (60 groups of 20 rows, 4 columns).
    while n_passes < max_passes and change >= tol:
        posterior, mean, var = _marginals(rows, design, rows.group, sites, precision, shift)
        update = rule(rows.sign, sites, mean, var, weight=rows.weight)
        last, change = change, row_mismatch(sites, update.sites, mean, var)
        if change > 1.2 * last:
            step = max(0.25, 0.5 * step)
        sites, n_passes = part_way(sites, update.sites, step), n_passes + 1
    log_z = update.log_term @ rows.weight + posterior.log_z - cavity_mass
    return posterior._replace(sites=sites, log_z=log_z)


def rows_of(part, reader=None):
    """Return the `ArrowRows` of a part, prepared by the driver or raw."""
    X, sign, weight, designs, codes = read_rows(part, reader)
    return arrow_rows(X, sign, weight, *of_one_factor(len(X), designs, codes))


def part_worker(part, message, reader, function, options):
    """Return function(rows, *message, **options) of a partition."""
    return function(rows_of(part, reader), *message, **options)


# sd of a log scale below which the posterior given it is nearly linear in it: fewer nodes do
_NARROW = 0.1
_MOST_MOVES = 12  # new placements of the nodes of a part in one sweep


class SiteState(NamedTuple):
    """What a partition keeps between sweeps.

    A warm start of EP, never part of the answer: sites are the row sites (M, n), None before the
    first sweep; place, moments of theta, places the nodes.

    Where a site is drawn from, these say where: number is that of the partition and n_fresh how
    often it has drawn, which with a seed make its random stream; proposal is the Gaussian that was
    drawn from. Draws phi (S, P), None where they are due, weigh exp(log cavity - base) under a
    cavity, base (S,): importance sampling has the likelihood in it, a chain the cavity it was made
    for. log_z is what the log of their mean weight lacks of log Z. score (S, P) of a chain are the
    slopes of its log density without the cavity.
    """

    sites: Sites | None
    place: gaussian.Moments
    number: int
    n_fresh: int = 0
    proposal: gaussian.Moments | None = None
    phi: np.ndarray | None = None
    base: np.ndarray | None = None
    log_z: float = 0.0
    score: np.ndarray | None = None


def log_factor(cavity, points):
    """Return the log of the normalised cavity at points (S, P), without its constant (2 pi)."""
    square = np.einsum("sp,pr,sr->s", points, cavity.precision, points)
    return points @ cavity.shift - 0.5 * square - gaussian.log_partition(cavity)


class TiltedSite(NamedTuple):
    """log Z, moments of (beta, theta), or of beta, and the state for the next sweep."""

    log_z: float
    moments: gaussian.Moments
    state: Any


@lru_cache
def node_rule(t, narrow=False):
    """Return nodes (M, t) and log weights of a rule for N(0, I_t).

    Product Gauss-Hermite up to three dimensions; above, the 2 t + 1 points of a rule that is exact
    for mean and covariance. The last coordinate is the log scale that is known least: it has a long
    left tail and gets five nodes where it is not `narrow`, the others three.
    """
    if t > 3:
        return star_rule(t)
    return hermite_product((3,) * (t - 1) + (3 if narrow else 5,) * (t > 0))


def rule_of_effects(cov):
    """Return nodes (M, T) and log weights for the effects given theta, of covariance cov (T, T).

    Where all of theta is known well they are nearly linear in it, and a star is enough.
    """
    narrow = np.all(np.diagonal(cov) < _NARROW**2)
    return star_rule(len(cov)) if narrow else node_rule(len(cov))


def cavity_of_theta(cavity, d):
    """Return the Natural of theta with beta integrated out, and the precision of beta given it."""
    block = cavity.precision[:d, :d]
    lower = gaussian.checked_cholesky(block)
    cross = solve_triangular(lower, cavity.precision[:d, d:], lower=True)
    half = solve_triangular(lower, cavity.shift[:d], lower=True)
    precision = cavity.precision[d:, d:] - cross.T @ cross
    return gaussian.Natural(precision, cavity.shift[d:] - cross.T @ half), block


def _relocated(placement, moments):
    """Return the new placement and whether the old one missed the tilted distribution of theta.

    Three nodes in a direction see little of a skewed distribution, and where they see it moves with
    them: several coordinates keep a placement that is near enough, and go half-way otherwise.
    """
    lower, _ = gaussian.jittered_cholesky(placement.cov, 0.0)
    shift = solve_triangular(lower, moments.mean - placement.mean, lower=True)
    turned = solve_triangular(lower, solve_triangular(lower, moments.cov, lower=True).T, lower=True)
    values, vectors = np.linalg.eigh(0.5 * (turned + turned.T))
    axes, far = lower @ vectors, np.max(np.abs(shift))
    missed = far > 1.0 or values[0] < 0.2 or values[-1] > 4.0
    if missed or len(shift) == 1:
        return gaussian.Moments(moments.mean, (axes * np.clip(values, 0.1, 4.0)) @ axes.T), missed
    if far < 0.25 and values[0] > 0.7 and values[-1] < 1.4:
        return placement, False
    middle = 0.5 * (placement.mean + moments.mean)
    return gaussian.Moments(middle, (axes * np.sqrt(values)) @ axes.T), False


def _mixture(log_weight, theta, posterior):
    """Return log Z and moments of (beta, theta) for log weights (M,) of the nodes."""
    log_z = logsumexp(log_weight)
    weight = np.exp(log_weight - log_z)
    mean, cov = between(weight, np.hstack([posterior.mean, theta]))
    d = posterior.mean.shape[1]
    roots = (np.sqrt(weight)[:, None, None] * posterior.root).reshape(-1, d)
    cov[:d, :d] += roots.T @ roots
    return float(log_z), gaussian.Moments(mean, cov)


def tilted_by_nodes(rows, cavity, state, *, q, tol, max_passes=20, power=1.0):
    """Return the `TiltedSite` of one partition under a cavity, a proper factor of (beta, theta).

    state is its `SiteState`, q the number of varying coefficients; tol, max_passes and power are
    those of the inner EP. log Z has to be converged at each node: its exponential weighs them.
    """
    options = dict(tol=tol, max_passes=max_passes, power=power)
    placement, sites = state.place, state.sites
    t = len(placement.mean)
    d = len(cavity.shift) - t
    marginal, block = cavity_of_theta(cavity, d)
    x, log_rule = node_rule(t, bool(np.all(placement.cov[-1:, -1:] < _NARROW**2)))
    for _ in range(_MOST_MOVES):
        lower, _ = gaussian.jittered_cholesky(placement.cov, 0.0)
        theta = placement.mean + x @ lower.T
        shift = cavity.shift[:d] - theta @ cavity.precision[d:, :d]
        if sites is not None and len(sites.precision) != len(theta):
            sites = middle_sites(sites, len(theta))
        scale = _scales.factor(theta, q)
        posterior = conditional_ep(rows, scale, block[None], shift, sites, **options)
        sites = posterior.sites
        log_proposal = -0.5 * np.sum(x**2, 1) - np.sum(np.log(np.diagonal(lower)))
        log_weight = log_rule + log_factor(marginal, theta) - log_proposal + posterior.log_z
        log_z, moments = _mixture(log_weight, theta, posterior)
        if t == 0:
            break
        of_theta = gaussian.Moments(moments.mean[d:], moments.cov[d:, d:])
        placement, missed = _relocated(placement, of_theta)
        if not missed:
            break
    return TiltedSite(log_z, moments, state._replace(sites=sites, place=placement))


def middle_sites(sites, m):
    """Give row sites of other nodes to m nodes: those in the middle, which mattered most."""
    middle = len(sites.precision) // 2
    return Sites(*(np.repeat(part[middle][None], m, axis=0) for part in sites))


class SiteTerms(NamedTuple):
    """Marginal log likelihood of a partition with gradient (P,) and Hessian (P, P)."""

    value: float
    gradient: np.ndarray
    hessian: np.ndarray


class _Rules(NamedTuple):
    """Quadrature over the effects of groups."""

    one: tuple = (29, 57)  # nodes of each effect, from coarse to fine, where a group has one
    two: tuple = (5, 9, 17, 33, 65)
    more: tuple = (3, 5, 9, 17)
    agreed: float = 1e-3  # log likelihoods of a group that differ by less need no finer rule
    held: int = 1_000_000  # row values at nodes held at once


_RULES = _Rules()


def effect_rules(q):
    """Return rules for N(0, I_q), from coarse to fine: nodes (k, q) and log weights of each.

    They are products of Gauss-Hermite rules. Derivatives have to be those of the value where a
    large scale or large weights make a group skewed: with nine nodes of one effect, or five of each
    of two, searches went on without a gain. Of one effect in groups of up to 15 rows 29 nodes leave
    a mean off by 2e-5 prior sd at most at a scale of 4, and by 2e-4 at 6.
    """
    numbers = {0: (1,), 1: _RULES.one, 2: _RULES.two}.get(q, _RULES.more)
    return [hermite_product((n,) * q) for n in numbers]


def effect_modes(rows, offset, design, modes, tol=1e-6):
    """Return modes (..., J, q) of the effects, and Cholesky factors (..., J, q, q) there.

    offset (..., n) is X beta, design (..., n, q) that of the effects; the search starts at `modes`
    and ends once the longest next step is below tol prior sd. Newton for a log-concave factor: the
    steps are of at most two prior sd, and one is halved where the slope at its end points back by
    more than half of what it began with. Large weights and scales make a factor so steep that whole
    steps went to and fro.
    """
    slope, lower = _slopes_of_effects(rows, offset, design, modes)
    step = _step_of_effects(slope, lower)
    for _ in range(100):
        if np.max(np.abs(step), initial=0.0) < tol:
            break
        new_slope, new_lower = _slopes_of_effects(rows, offset, design, modes + step)
        held = np.sum((new_slope + 0.5 * slope) * step, axis=-1) >= 0.0
        modes = modes + np.where(held[..., None], step, 0.0)
        slope = np.where(held[..., None], new_slope, slope)
        lower = np.where(held[..., None, None], new_lower, lower)
        step = np.where(held[..., None], _step_of_effects(slope, lower), 0.5 * step)
    return modes, lower


def _slopes_of_effects(rows, offset, design, effects):
    """Return slopes (..., J, q) of the log density of effects, and Cholesky factors of minus H."""
    z = offset + np.sum(design * effects[..., rows.group, :], -1)
    residual, curvature = _derivatives(rows, z)
    slope = np.add.reduceat(residual[..., None] * design, rows.starts, axis=-2) - effects
    return slope, group_factors(curvature, design, rows.starts)


def _step_of_effects(slope, lower):
    """Return Newton's steps (..., J, q), of at most two prior sd."""
    step = gaussian.backward(lower, gaussian.forward(lower, slope[..., None]))[..., 0]
    longest = np.max(np.abs(step), axis=-1, keepdims=True, initial=0.0)
    return step * np.minimum(1.0, 2.0 / np.maximum(longest, 1e-300))


def _derivatives(rows, z):
    """Return slope and negative curvature (..., n) of the log likelihood in predictors z."""
    p = expit(z)
    return rows.weight * (0.5 * (1.0 + rows.sign) - p), rows.weight * p * (1.0 - p)


def _louis(score, share):
    """Return gradient and the covariance part of Louis' identity for node scores (k, J, P)."""
    root = np.sqrt(share)[..., None]
    mean = np.einsum("kj,kjp->jp", share, score)
    spread = (root * (score - mean)).reshape(-1, score.shape[-1])
    return mean.sum(0), spread.T @ spread


def marginal_terms(rows, phi, q):
    """Return the `SiteTerms` of the rows at phi = (beta, theta) with q varying coefficients.

    Adaptive Gauss-Hermite quadrature about the modes of the effects, by the coarsest rule for each
    group that agrees with the next; gradient and Hessian by Louis' identity over the same nodes.
    O(n D^2) and a product with X for each of at least 29 nodes (5^2 for q = 2).
    """
    d = rows.X.shape[1]
    offset, design = rows.X @ phi[:d], rows.local @ _scales.factor(phi[d:], q)
    start = np.zeros((len(rows.starts), q))
    about = _AboutModes(rows, offset, design, *effect_modes(rows, offset, design, start))
    tangent = _scales.tangent(phi[d:], q)
    value, gradient, hessian = 0.0, np.zeros(len(phi)), np.zeros((len(phi), len(phi)))
    for some, rule in _ruled(about, effect_rules(q)):
        found = _terms_by_rule(some, rule, tangent)
        value, gradient, hessian = value + found[0], gradient + found[1], hessian + found[2]
    bent = d + _scales.diagonal_positions(q)
    hessian[bent, bent] += gradient[bent]
    return SiteTerms(float(value), gradient, hessian)


class _AboutModes(NamedTuple):
    """Rows with offset (n,) and design (n, q) of the effects, and the `effect_modes` of groups."""

    rows: ArrowRows
    offset: np.ndarray
    design: np.ndarray
    modes: np.ndarray
    lower: np.ndarray

    def take(self, kept):
        """Return some of the groups, which are kept (J,)."""
        rows, mine = self.rows.of_groups(kept)
        found = self.offset[mine], self.design[mine], self.modes[kept], self.lower[kept]
        return _AboutModes(rows, *found)

    def at_nodes(self, rule):
        """Return effects (k, J, q), predictors (k, n), log likelihoods (J,), shares (k, J)."""
        (x, log_weight), rows, k = rule, self.rows, np.arange(self.design.shape[1])
        u = self.modes + gaussian.backward(self.lower, x[:, None, :, None])[..., 0]
        z = self.offset + np.einsum("nq,knq->kn", self.design, u[:, rows.group])
        density = np.add.reduceat(rows.weight * log_expit(rows.sign * z), rows.starts, axis=1)
        density += (log_weight + 0.5 * np.sum(x**2, 1))[:, None]
        density -= 0.5 * np.sum(u**2, 2) + np.log(self.lower[:, k, k]).sum(1)
        total = logsumexp(density, axis=0)
        return u, z, total, np.exp(density - total)


def _ruled(about, rules):
    """Yield blocks of groups and the rule of each: the coarsest that agrees with the next."""
    for coarse, fine in pairwise(rules):
        agreed = np.abs(_values(about, fine) - _values(about, coarse)) < _RULES.agreed
        yield from ((some, coarse) for some in _blocks(about.take(agreed), coarse))
        about = about.take(~agreed)
    yield from ((some, rules[-1]) for some in _blocks(about, rules[-1]))


def _values(about, rule):
    """Return the log likelihoods (J,) of groups by a rule."""
    blocks = [some.at_nodes(rule)[2] for some in _blocks(about, rule)]
    return np.concatenate([np.empty(0), *blocks])


def _blocks(about, rule):
    """Return blocks of groups whose predictors at the nodes of a rule fit in memory."""
    n_groups, number = len(about.modes), np.arange(len(about.modes))
    width = len(rule[0]) * len(about.offset) // max(n_groups, 1)
    blocks = gaussian.row_blocks(n_groups, width, _RULES.held)
    if len(blocks) == 1:
        return [about]
    return [about.take((number >= b.start) & (number < b.stop)) for b in blocks]


def _terms_by_rule(about, rule, tangent):
    """Return value, gradient (P,) and Hessian (P, P) in beta and, for dL / dtheta, in theta."""
    rows = about.rows
    u, z, total, share = about.at_nodes(rule)
    residual, curvature = _derivatives(rows, z)
    curvature *= share[:, rows.group]
    slope = np.einsum("tnq,knq->tkn", rows.local @ tangent, u[:, rows.group])
    of_theta = np.moveaxis(np.add.reduceat(residual * slope, rows.starts, axis=2), 0, -1)
    score = np.concatenate([segment_products(rows, residual), of_theta], axis=2)
    gradient, spread = _louis(score, share)
    cross = np.einsum("kn,tkn->tn", curvature, slope) @ rows.X
    gram = gaussian.weighted_gram(rows.X, curvature.sum(0))
    bent = np.einsum("kn,skn,tkn->st", curvature, slope, slope, optimize=True)
    return total.sum(), gradient, spread - np.block([[gram, cross.T], [cross, bent]])
