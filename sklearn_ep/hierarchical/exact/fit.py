"""Expectation propagation over all rows, given the covariances of the effects of every factor.

Given these the model is Gaussian but for the likelihood: the shared vector b has a Cholesky factor
of its posterior precision, local effects are eliminated group by group, and sites of rows, or of
small groups, are updated in parallel. The prior of the shared effects needs no sites. As a function
of theta, the coordinates of all covariances, this is what the search for the scales evaluates.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from ..._engine import gaussian
from ..._engine.hyper import Average, Node
from ..._engine.likelihoods import Logit
from ..._engine.rules import rule_of_power
from ..._engine.sites import Sites
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .. import _scales
from .._posterior import GroupPosterior, of_sites, shared
from .._scales import explore
from . import group_sites
from . import layout as layouts

_GROWTH, _FALL = 1.2, 0.75  # of the mismatch, at which steps are halved and doubled again
_LEAST_STEP = 1 / 64  # which is not taken back


class GivenScales(NamedTuple):
    """Posterior given the scales, at the sites of one pass.

    mean (S,) and root (S, S) are those of b, its covariance root' root; log_z is the evidence given
    the scales; local_moment (q, q) the sum over groups with sites of rows of E uu' - I, and slope
    the derivative of log_z in log tau through the small groups; sites are one update ahead;
    mismatch is the largest distance of tilted from current moments, in sds.
    """

    mean: np.ndarray
    root: np.ndarray
    local: layouts.LocalPart
    log_z: float
    local_moment: np.ndarray
    slope: float
    sites: tuple[Any, ...]
    mismatch: float
    n_passes: int


def first_sites(layout):
    """Return weak sites that lean to the observed labels.

    Those of the plain rows come first, then those of the small groups, one entry a size.
    """
    n = layout.n_plain
    out: list[Any] = [Sites(np.full(n, 0.05), 0.25 * layout.sign[:n])]
    for small in layout.small:
        lean = 0.25 * layout.sign[small.rows].reshape(-1, small.size)
        weak = np.tile(0.05 * np.eye(small.size), (len(lean), 1, 1))
        out.append(group_sites.GroupSites(weak, lean))
    return tuple(out)


def solve_given_scales(layout, prior, scale, sites, *, tol, max_passes=30, power=1.0):
    """Run EP and return `GivenScales`.

    layout is the `Layout`, prior the `SharedPrior`, scale (q, q) the Cholesky factor of the
    covariance of the local effects, sites those to start from, as `first_sites` gives them, power
    the share of a row's likelihood that is matched. One pass costs O(n (D + F)^2 + S times the
    number of pairs + S^3).
    Steps are undamped; one after which the mismatch has grown, or that leaves no proper posterior,
    is taken back and halved, and steps are doubled again where it falls: with levels of one class
    only and scales of ten and more undamped steps run away from the fixed point. Sites of a
    neighbour that leave no proper posterior here give way to weak ones.
    """
    design, rule = layout.local @ scale, partial(rule_of_power(power), Logit())
    kept: Any = None
    step, n_passes, start, end = 1.0, 0, sites, sites
    while True:
        n_passes += 1
        try:
            found, target = _one_pass(layout, design, prior, float(scale[0, 0]), sites, rule)
        except (gaussian.ImproperPosterior, FloatingPointError):
            if n_passes > max_passes or step <= _LEAST_STEP:
                raise
            step *= 0.5
            sites = first_sites(layout) if kept is None else _towards(start, end, step)
            continue
        longer = _step_after(found, kept, step)
        if longer is None:
            step *= 0.5
        else:
            kept, start, end, step = found, sites, target, longer
        sites = _towards(start, end, step)
        if kept.mismatch < tol or n_passes >= max_passes:
            return kept._replace(sites=sites, n_passes=n_passes)


def _step_after(found, kept, step):
    """Return the step after a pass, None where that is to be taken back."""
    if kept is None:
        return step
    if found.mismatch > _GROWTH * kept.mismatch and step > _LEAST_STEP:
        return None
    return min(1.0, 2.0 * step) if found.mismatch < _FALL * kept.mismatch else step


def _towards(old, new, step):
    if step == 1.0:
        return new
    pairs = zip(old, new, strict=True)
    return tuple(
        type(x)(*(a + step * (b - a) for a, b in zip(x, y, strict=True))) for x, y in pairs
    )


def _one_pass(layout, design, prior, tau, sites, rule):
    """Return the `GivenScales` that sites imply, and their undamped update."""
    n, (of_rows, *of_groups) = layout.n_plain, sites
    weight = layout.weight[:n]
    precision, pull = _shared_system(layout, prior, of_rows, of_groups)
    local = _eliminated(layout, design, *(weight * part for part in of_rows))
    _take_out(local, precision, pull)
    lower = gaussian.checked_cholesky(precision)
    root, mean = gaussian.triangular_inverse(lower), gaussian.cholesky_solve(lower, pull)
    cov = root.T @ root
    log_z = 0.5 * (pull @ mean + prior.log_det) - np.sum(np.log(np.diagonal(lower)))
    log_z += 0.5 * np.sum(local.pulled**2) - np.sum(np.log(np.einsum("jaa->ja", local.lower)))

    row_mean, row_var, moment = _plain_rows(layout, design, local, mean, cov)
    update = rule(layout.sign[:n], of_rows, row_mean, row_var)
    log_z += update.log_term @ weight
    worst, slope = layouts.row_mismatch(of_rows, update.sites, row_mean, row_var), 0.0
    part, groups = _local_part(layout, local), []
    for small, site in zip(layout.small, of_groups, strict=True):
        rows = layout.rows.take(small.rows)
        m, V = rows.dot(mean).reshape(-1, small.size), rows.block_covariances(cov, small.size)
        wide, left = group_sites.cavities(site, m, V)
        tilted = group_sites.tilted_groups(layout.sign[small.rows].reshape(m.shape), wide, tau)
        log_z += np.sum(tilted.log_z - group_sites.log_site_masses(site, wide))
        slope += float(np.sum(tilted.slope))
        groups.append(group_sites.new_sites(tilted, wide))
        worst = max(worst, _group_mismatch(tilted, m, V, wide))
        # Cov(u, b) = weight' Z cov
        weights = (left.swapaxes(1, 2) @ tilted.weight[..., None])[..., 0]
        _store_small(layout, small, part, tilted, weights, m, V)
    found = GivenScales(mean, root, part, float(log_z), moment, slope, sites, worst, 0)
    return found, (update.sites, *groups)


def _shared_system(layout, prior, of_rows, of_groups):
    """Return precision and pull of b before the local effects are eliminated."""
    n, (X, at, _), width = layout.n_plain, layout.rows, layout.width
    d = X.shape[1]
    tau = layout.weight[:n] * of_rows.precision
    shift, masses = np.empty(len(X)), [tau]
    shift[:n] = layout.weight[:n] * of_rows.shift
    gram, weighted = X[:n].T @ (tau[:, None] * X[:n]), []
    for small, site in zip(layout.small, of_groups, strict=True):
        block = X[small.rows].reshape(-1, small.size, d)
        weighted.append((site.precision @ block).reshape(-1, d))
        gram += X[small.rows].T @ weighted[-1]
        shift[small.rows] = site.shift.ravel()
        masses.append(site.precision.ravel())
    precision = np.zeros((d + width, d + width))
    precision[:d, :d] = 0.5 * (gram + gram.T)
    if width:
        precision[d:, :d] = layout.transposed @ np.vstack([tau[:, None] * X[:n], *weighted])
        precision[:d, d:] = precision[d:, :d].T
        mass = np.repeat(np.concatenate(masses), at.shape[1] ** 2) * layout.product_value
        counted = np.bincount(layout.products, mass, minlength=width * width)
        precision[d:, d:] = counted.reshape(width, width)
    prior.add_to(precision)
    return precision, np.r_[shift @ X, layout.transposed @ shift]


class Eliminated(NamedTuple):
    """What is left of the local effects of groups with sites of rows.

    lower (J_r, q, q) is the Cholesky factor of I + sum tau c c'; half is lower^-1 sum tau c z', a
    `GroupColumns`; pulled (J_r, q) is lower^-1 sum nu c.
    """

    lower: np.ndarray
    half: layouts.GroupColumns
    pulled: np.ndarray


def _eliminated(layout, design, tau, nu):
    """Eliminate the local effects for sites (n,) of the plain rows, their copies counted."""
    n, j, q = layout.n_plain, layout.n_plain_groups, design.shape[1]
    c, rows, group = design[:n], layout.rows.take(slice(0, n)), layout.group[:n]
    pull = np.empty((j, q, 1))
    dense, values = np.empty((j, q, rows.X.shape[1])), np.empty((q, layout.n_plain_pairs))
    for a in range(q):
        weighted = tau * c[:, a]
        dense[:, a] = csr_array((weighted, np.arange(n), layout.ends), shape=(j, n)) @ rows.X
        pull[:, a, 0] = np.bincount(group, nu * c[:, a], minlength=j)
        spread = (weighted[:, None] * rows.value).ravel()
        values[a] = np.bincount(layout.pair[:n].ravel(), spread, minlength=values.shape[1])
    lower = layouts.group_factors(tau, c, layout.ends[:-1])
    pair_group, pair_column = (
        a[: values.shape[1]] for a in (layout.pair_group, layout.pair_column)
    )
    sums = layouts.GroupColumns(dense, values, pair_group, pair_column, layout.width)
    return Eliminated(
        lower, sums.turned(lower, gaussian.forward), gaussian.forward(lower, pull)[..., 0]
    )


def _take_out(local, precision, pull):
    """Subtract from precision and pull of b what the local effects take, in place."""
    d = local.half.dense.shape[2]
    for a in range(local.half.dense.shape[1]):
        dense, pulled = local.half.dense[:, a], local.pulled[:, a]
        precision[:d, :d] -= dense.T @ dense
        pull[:d] -= pulled @ dense
        if local.half.width and len(dense):
            beyond = local.half.beyond(a)
            cross, gram = beyond.T @ dense, beyond.T @ beyond
            precision[d:, :d] -= cross
            precision[:d, d:] -= cross.T
            precision[d:, d:] -= gram if isinstance(gram, np.ndarray) else gram.toarray()
            pull[d:] -= beyond.T @ pulled


def _plain_rows(layout, design, local, mean, cov):
    """Return means and variances of the plain rows, and the sum over groups of E uu' - I."""
    n, (j, q) = layout.n_plain, local.pulled.shape
    rows, group, c = layout.rows.take(slice(0, n)), layout.group[:n], design[:n]
    spread = gaussian.forward(local.lower[group], c[:, :, None])[..., 0]
    across, within = local.half.against(cov, rows, layout.ends)
    var = rows.variances(cov) + np.einsum("na,na->n", spread, spread - 2.0 * across)
    var += np.einsum("na,nab,nb->n", spread, within[group], spread)
    half = local.pulled - local.half.dot(mean)
    row_mean = rows.dot(mean) + np.einsum("na,na->n", spread, half[group])
    effect = gaussian.backward(local.lower, half[..., None])[..., 0]
    outer = gaussian.backward(
        local.lower, gaussian.backward(local.lower, np.eye(q) + within).swapaxes(1, 2)
    )
    return row_mean, var, effect.T @ effect + outer.sum(0) - j * np.eye(q)


def _group_mismatch(tilted, mean, V, wide):
    """Return the largest distance of tilted from current moments of eta, in its sd."""
    new_mean = wide.mean + (wide.cov @ tilted.gradient[..., None])[..., 0]
    var = np.einsum("gkk->gk", V)
    new_var = np.einsum("gkk->gk", wide.cov + wide.cov @ tilted.hessian @ wide.cov)
    safe = np.where(var > 0, var, 1.0)  # a row of zeros has nothing to differ in
    shifted = np.abs(new_mean - mean) / np.sqrt(safe)
    return float(max(np.max(shifted), np.max(np.abs(new_var - var) / safe)))


def _local_part(layout, local):
    """Return the `LocalPart` with groups that have sites of rows filled in."""
    (j, q), n_groups, n_pairs = local.pulled.shape, len(layout.order), len(layout.pair_group)
    lower, offset = np.empty((n_groups, q, q)), np.empty((n_groups, q))
    dense, values = np.zeros((n_groups, q, layout.rows.X.shape[1])), np.zeros((q, n_pairs))
    gain = local.half.turned(local.lower, gaussian.backward)
    lower[:j], dense[:j], values[:, : gain.values.shape[1]] = local.lower, gain.dense, gain.values
    offset[:j] = gaussian.backward(local.lower, local.pulled[..., None])[..., 0]
    gain = layouts.GroupColumns(dense, values, layout.pair_group, layout.pair_column, layout.width)
    return layouts.LocalPart(lower, offset, gain)


def _store_small(layout, small, part, tilted, weights, m, V):
    """Put the regression of the effects of small groups on b into a `LocalPart`, in place.

    weights (G, k) are those of Cov(u, b) = weights' Z cov; m and V the marginals of eta.
    """
    explained = np.einsum("gi,gij,gj->g", weights, V, weights)
    # positive at a fixed point; on the way there at least a small share of the variance is left
    rest = np.maximum(tilted.effect_var - explained, 1e-6 * tilted.effect_var)
    if not np.all(rest > 0):
        raise gaussian.ImproperPosterior("the variance of a group's effect is lost to rounding")
    part.lower[small.groups, 0, 0] = 1.0 / np.sqrt(rest)
    part.offset[small.groups, 0] = tilted.effect_mean - np.sum(weights * m, axis=1)
    rows = layout.rows.take(small.rows)
    block = rows.X.reshape(-1, small.size, rows.X.shape[1])
    part.gain.dense[small.groups, 0] = -np.einsum("gk,gkd->gd", weights, block)
    terms = -(weights.reshape(-1, 1) * rows.value).ravel()
    np.add.at(part.gain.values[0], layout.pair[small.rows].ravel(), terms)


_ROW_FLOPS = 500  # of the moments of a row, in units of what BLAS does meanwhile


class CrossedModel:
    """Rows as laid out, where the effects are, and the priors.

    theta_prior is that of the scales, factor by factor; power is the share of a row's likelihood
    that is matched.
    """

    def __init__(self, layout, places, theta_prior, power=1.0):
        self.layout, self.places, self.theta_prior = layout, places, theta_prior
        self.n_effects, self.n_levels, self.power = places.n_effects, places.n_levels, power

    def flops(self):
        """Return about how many operations a pass takes."""
        layout, d = self.layout, self.places.n_dense
        s, (n, e) = d + layout.width, layout.pair.shape
        return _ROW_FLOPS * n + n * (d + e) ** 2 + 2.0 * len(layout.pair_group) * s + 3.0 * s**3

    def evaluate(self, theta, sites, tol, max_passes=30):
        """Return the `Node` at theta, with `GivenScales`, started at the sites of another."""
        places = self.places
        lowers = _scales.factors(theta, places.n_effects)
        scale, prior = lowers[places.local], places.prior_at(lowers)
        options = dict(tol=tol, max_passes=max_passes, power=self.power)
        found = solve_given_scales(self.layout, prior, scale, sites, **options)
        told = found.log_z, self._slope(theta, found), found.mismatch, found
        return Node.under(self.theta_prior, theta, *told)

    def _slope(self, theta, found):
        """Return the gradient (T,) of the log evidence.

        At a fixed point of the sites it is the explicit one: of the prior of the effects, under
        their posterior.
        """
        out, places = np.zeros_like(theta), self.places
        shared, lowers = places.shared_spans(), _scales.factors(theta, places.n_effects)
        spans = _scales.spans(places.n_effects)
        for f, (span, lower) in enumerate(zip(spans, lowers, strict=True)):
            q, n = len(lower), places.n_levels[f]
            if f == places.local:
                moment = found.local_moment
                out[span.start] += found.slope
            else:
                mean, halves = found.mean[shared[f]].reshape(n, q), found.root[:, shared[f]]
                halves = halves.reshape(-1, n, q)
                second = mean.T @ mean + np.einsum("snq,snp->qp", halves, halves, optimize=True)
                inner = np.linalg.solve(lower, second)
                moment = np.linalg.solve(lower, inner.T) - n * np.eye(q)
            out[span] += _scales.slope(theta[span], q, moment)
        return out


def fit_exact(plan, sign, monitor, previous, save):
    """Return the `BinaryFit` of a `Plan` with rows in memory and labels in {-1, +1}.

    previous is the state of an earlier fit to go on from, or None; `save`, if not None, is called
    with the state after each iteration.
    """
    rows = plan.X, sign, plan.weight, plan.designs, plan.codes, plan.n_levels
    # with powers of rows no group has a site of its own
    largest = group_sites.LARGEST_GROUP if plan.settings.power == 1.0 else 0
    layout = layouts.lay_out(*rows, plan.local, largest)
    n_named = [len(known) for known in plan.levels]
    sizes = plan.n_effects, plan.n_levels, n_named, plan.local
    places = layouts.EffectPlaces(plan.beta_sd**-2.0, *sizes, layout.order)
    model = CrossedModel(layout, places, plan.theta_prior, plan.settings.power)
    keep = save and (lambda node: save(state_of_sites(node)))
    watch = PosteriorMonitor(
        monitor, lambda node: GroupPosterior(Average.alone(node), places), keep
    )
    start, limits = start_of(model, previous), (plan.settings.tol, plan.settings.max_iter)
    found = explore(model, start, *limits, plan.settings.theta, watch)
    posterior = GroupPosterior(found.average, places)
    if places.n_dense:
        gaussian.check_precise(gaussian.natural(posterior.beta_moments()).precision)
    history, evidence = found.trace.history, found.average.log_evidence
    more = dict(theta_rule=found.rule, state=state_of_sites(found.mode))
    if not plan.columns.listed:
        history = dict(history, n_skipped=np.zeros(found.trace.n_iter))
        phi = posterior.phi_moments()
        more |= of_sites(shared(gaussian.natural(phi), plan.prior(), 1), phi)
    return BinaryFit(posterior, history, found.reason, evidence, more, found.remark)


def state_of_sites(node):
    """Return the arrays from which a fit can go on: theta, and the sites there, kind by kind."""
    kinds = enumerate(node.payload.sites)
    return dict(theta=node.phi) | {f"{n}_{k}": getattr(s, n) for k, s in kinds for n in s._fields}


def start_of(model, previous):
    """Return (theta, sites) of an earlier fit.

    What does not suit this one is left: sites are then weak ones, theta the prior mean.
    """
    theta, sites = model.theta_prior.mean, first_sites(model.layout)
    if previous is None or np.shape(previous.get("theta")) != np.shape(theta):
        return theta, sites
    known = {f"{n}_{k}": np.shape(getattr(s, n)) for k, s in enumerate(sites) for n in s._fields}
    if all(np.shape(previous.get(name)) == shape for name, shape in known.items()):
        kinds = enumerate(sites)
        sites = tuple(type(s)(*(previous[f"{n}_{k}"] for n in s._fields)) for k, s in kinds)
    return previous["theta"], sites
