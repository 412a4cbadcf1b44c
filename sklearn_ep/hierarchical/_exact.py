"""Expectation propagation over all rows, given the covariances of the effects of every factor.

Given these the model is Gaussian but for the likelihood: the shared vector b has a Cholesky factor
of its posterior precision, local effects are eliminated group by group, and sites of rows, or of
small groups, are updated in parallel. The prior of the shared effects needs no sites. As a function
of theta, the coordinates of all covariances, this is what the search for the scales evaluates.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array, vstack

from .._engine import gaussian
from .._engine.hyper import Average, Node
from .._engine.likelihoods import Logit
from .._engine.loop import SILENT, worst_reason
from .._engine.rules import rule_of_power
from .._engine.sites import Sites, part_way
from .._estimator.fitting import BinaryFit, PosteriorMonitor
from . import _group_sites as group_sites
from . import _layout as layouts
from . import _scales
from ._classes import ClassesModel
from ._posterior import GroupPosterior, of_sites, shared

# Steps after which the mismatch is larger are halved to this at most: an oscillation that whole
# steps let grow sevenfold dies out there, and where the way to the fixed point leads over a larger
# mismatch, shorter steps do not get there in any number of passes.
_SHORT_STEP = 0.25
# Share of a step by which the mismatch has to fall for the next step to be doubled. A fixed share
# leaves short steps short. With these two rules no node that has a posterior, of 360 of forty drawn
# sets and 72 of eight tables, remains unsettled, in four fifths and two thirds of the passes.
# Fourteen did when steps were halved to 1/64 and doubled where the mismatch fell by a quarter.
_FALL = 0.25
_LEAST_STEP = 1 / 64  # towards sites that leave no proper posterior


class GivenScales(NamedTuple):
    """Posterior given the scales, at the sites of one pass.

    mean (S,) and root (S, S) are those of b, its covariance root' root; local is the `LocalPart`,
    after a pass what `_joined` makes it of; log_z is the evidence given
    the scales; sites are one update ahead; mismatch is the largest distance of tilted from current
    moments, in sds; local_moment (q, q) the sum over groups with sites of rows of E uu' - I, and
    slope the derivative of log_z in log tau through the small groups.
    """

    mean: np.ndarray
    root: np.ndarray
    local: Any
    log_z: float
    sites: Any = None
    mismatch: float = 0.0
    local_moment: Any = None
    slope: float = 0.0


def first_sites(layout):
    """Return weak sites that lean to the observed labels.

    Those of the plain rows come first, then those of the small groups, one entry a size.
    """
    n = layout.n_plain
    out: list[Any] = [Sites(np.full(n, 0.05), 0.25 * layout.sign[:n])]
    for small in layout.small:
        lean = 0.25 * layout.sign[small.rows].reshape(-1, small.size)
        weak = np.tile(0.05 * np.eye(small.size), (len(lean), 1, 1))
        out.append(Sites(weak, lean))
    return tuple(out)


def solve_given_scales(layout, prior, scale, sites, *, tol, max_passes, power=1.0):
    """Run EP and return `GivenScales`.

    layout is the scaled `Layout`, prior (S,) the precision of b, scale (q, q) the Cholesky factor
    of the covariance of the local effects, sites those to start from, as `first_sites` gives them,
    power the share of a row's likelihood that is matched. One pass costs O(n (D + F)^2 + S times
    the number of pairs + S^3).
    Steps are undamped; one after which the mismatch is larger, or that leaves no proper posterior,
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
        change = 0.0 if kept is None else found.mismatch / kept.mismatch - 1.0
        if change > 0.0 and step > _SHORT_STEP:
            step *= 0.5
        else:
            step = min(1.0, 2.0 * step) if change < -_FALL * step else step
            kept, start, end = found, sites, target
        sites = _towards(start, end, step)
        if kept.mismatch < tol or n_passes >= max_passes:
            return kept._replace(local=_joined(*kept.local), sites=sites)


def _towards(old, new, step):
    if step == 1.0:
        return new
    return tuple(part_way(*kind, step) for kind in zip(old, new, strict=True))


def _one_pass(layout, design, prior, tau, sites, rule):
    """Return the `GivenScales` that sites imply, and their undamped update."""
    n, (of_rows, *of_groups) = layout.n_plain, sites
    weight, group = layout.weight[:n], layout.group[:n]
    precisions = layouts.precisions(weight * of_rows.precision, [s.precision for s in of_groups])
    shift = np.concatenate([weight * of_rows.shift, *(s.shift.ravel() for s in of_groups)])
    c = design[:n]
    lower, half, pulled = _eliminated(layout, c, *(weight * part for part in of_rows))
    precision = layout.rows.weighted_gram(precisions) - half.weighted_gram()
    gaussian.add_to_diagonal(precision, prior)
    pull = layout.rows.rmatvec(shift) - half.rmatvec(pulled.ravel())
    root = gaussian.checked_cholesky(precision)
    log_z = 0.5 * np.sum(np.log(prior)) - np.sum(np.log(np.diagonal(root)))
    log_z += 0.5 * np.sum(pulled**2) - np.sum(np.log(np.einsum("jaa->ja", lower)))
    mean, root = gaussian.cholesky_solve(root, pull), gaussian.triangular_inverse(root)
    log_z, cov = log_z + 0.5 * pull @ mean, root.T @ root

    turned = layouts.block_diagonal(gaussian.backward(lower, np.eye(lower.shape[1])))
    offset = gaussian.backward(lower, pulled[..., None])[..., 0]
    local = layouts.LocalPart(lower, offset, half.weighed(turned))
    row_mean, row_var, within = local.row_moments(layout.plain, group, c, mean, cov)
    moment = local.second_moment(mean, within)
    update = rule(layout.sign[:n], of_rows, row_mean, row_var, weight=weight)
    log_z += update.log_term @ weight
    worst, slope = layouts.row_mismatch(of_rows, update.sites, row_mean, row_var), 0.0
    of_small, groups = [], []
    for small, site in zip(layout.small, of_groups, strict=True):
        rows = small.shared
        m, V = (rows @ mean).reshape(-1, small.size), rows.block_covariances(cov, small.size)
        wide, left = group_sites.cavities(site, m, V)
        tilted = group_sites.tilted_groups(layout.sign[small.rows].reshape(m.shape), wide, tau)
        log_z += np.sum(tilted.log_z - group_sites.log_site_masses(site, wide))
        slope += float(np.sum(tilted.slope))
        groups.append(group_sites.new_sites(tilted, wide))
        worst = max(worst, _group_mismatch(tilted, m, V, wide))
        # Cov(u, b) = weight' Z cov
        weights = (left.swapaxes(1, 2) @ tilted.weight[..., None])[..., 0]
        of_small.append((rows, tilted, weights, m, V))
    found = GivenScales(mean, root, (local, of_small), float(log_z), sites, worst, moment, slope)
    return found, (update.sites, *groups)


def _eliminated(layout, design, tau, nu):
    """Eliminate the local effects for sites (n,) of the plain rows, their copies counted.

    Return the Cholesky factors lower (J_r, q, q) of I + sum tau c c', lower^-1 sum tau c z' as
    `SharedRows`, and lower^-1 sum nu c, (J_r, q).
    """
    j, group = len(layout.ends) - 1, layout.group[: len(design)]
    lower = layouts.group_factors(tau, design, layout.ends[:-1])
    turned = gaussian.forward(lower[group], design[..., None])[..., 0]
    pulled = np.stack([np.bincount(group, nu * c, minlength=j) for c in turned.T], axis=1)
    sums = layouts.sums_by_group(layout.ends[:-1], tau * turned.T)
    if len(turned.T) > 1:  # of each group its lines together
        sums = sums[np.arange(sums.shape[0]).reshape(-1, j).T.ravel()]
    return lower, layout.plain.weighed(sums), pulled


def _group_mismatch(tilted, mean, V, wide):
    """Return the largest distance of tilted from current moments of eta, in its sd."""
    new_mean = wide.mean + (wide.cov @ tilted.gradient[..., None])[..., 0]
    var = np.einsum("gkk->gk", V)
    new_var = np.einsum("gkk->gk", wide.cov + wide.cov @ tilted.hessian @ wide.cov)
    safe = np.where(var > 0, var, 1.0)  # a row of zeros has nothing to differ in
    shifted = np.abs(new_mean - mean) / np.sqrt(safe)
    return float(max(np.max(shifted), np.max(np.abs(new_var - var) / safe)))


def _effects_of_small(rows, tilted, weights, m, V):
    """Return the `LocalPart` of small groups: the regression of their effects on b.

    weights (G, k) are those of Cov(u, b) = weights' Z cov; m and V the marginals of eta.
    """
    explained = np.einsum("gi,gij,gj->g", weights, V, weights)
    # positive at a fixed point; on the way there at least a small share of the variance is left
    rest = np.maximum(tilted.effect_var - explained, 1e-6 * tilted.effect_var)
    if not np.all(rest > 0):
        raise gaussian.ImproperPosterior("rounding errors exceed the variance of a group's effect")
    offset = tilted.effect_mean - np.sum(weights * m, axis=1)
    gain = rows.weighed(layouts.block_diagonal(-weights[:, None]))
    return layouts.LocalPart(1.0 / np.sqrt(rest)[:, None, None], offset[:, None], gain)


def _joined(local, of_small):
    """Return one `LocalPart` of that of plain rows, and what is known of each kind of groups."""
    if not of_small:
        return local
    parts = [local, *(_effects_of_small(*known) for known in of_small)]
    lower, offset, gain = zip(*parts, strict=True)
    beyond = csr_array(vstack([g.beyond for g in gain]))
    gain = layouts.SharedRows(np.concatenate([g.X for g in gain]), beyond)
    return layouts.LocalPart(np.concatenate(lower), np.concatenate(offset), gain)


_ROW_FLOPS = 500  # of the moments of a row, in units of what BLAS does meanwhile


class CrossedModel:
    """Rows as laid out, where the effects are, and the priors.

    theta_prior is that of the scales, factor by factor; power is the share of a row's likelihood
    that is matched.
    """

    def __init__(self, layout, places, theta_prior, power=1.0):
        self.layout, self.places, self.theta_prior = layout, places, theta_prior
        self.n_effects, self.n_levels, self.power = places.n_effects, places.n_levels, power

    def first_sites(self):
        """Return weak sites that lean to the observed labels, as `first_sites` does."""
        return first_sites(self.layout)

    def posterior(self, average):
        """Return the posterior of an average over theta."""
        return GroupPosterior(average, self.places)

    def flops(self):
        """Return about how many operations a pass takes."""
        rows, d = self.layout.rows, self.places.n_dense
        (n, e), s = rows.at.shape, rows.shape[1]
        n_pairs = len(np.unique(self.layout.group[:, None] * s + rows.at))
        return _ROW_FLOPS * n + n * (d + e) ** 2 + 2.0 * n_pairs * s + 3.0 * s**3

    def evaluate(self, theta, sites, tol, max_passes=_scales.MOST_PASSES):
        """Return the `Node` at theta, with `GivenScales`, started at the sites of another."""
        places = self.places
        lowers = _scales.factors(theta, places.n_effects)
        layout = self.layout.scaled(places.shared(lowers))
        given = layout, places.prior, lowers[places.local], sites
        found = solve_given_scales(*given, tol=tol, max_passes=max_passes, power=self.power)
        told = found.log_z, self._slope(theta, found), found.mismatch, found
        return Node.under(self.theta_prior, theta, *told)

    def _slope(self, theta, found):
        """Return the gradient (T,) of the log evidence.

        At a fixed point of the sites it is the explicit one: of the prior of the effects, under
        their posterior.
        """
        places, both = self.places, np.vstack([found.mean, found.root])
        moments = [found.local_moment] * len(places.n_levels)
        for f, own in places.shared_spans().items():
            q, n = places.n_effects[f], places.n_levels[f]
            halves = both[:, own].reshape(-1, q)
            moments[f] = halves.T @ halves - n * np.eye(q)
        out = _scales.slope(theta, places.n_effects, moments)
        out[_scales.spans(places.n_effects)[places.local].start] += found.slope
        return out


def fit_exact(plan, sign=None, monitor=SILENT, previous=None, save=None):
    """Return the `BinaryFit` of a `Plan` with rows in memory.

    sign are their labels in {-1, +1}, None for several classes jointly; previous is the state of an
    earlier fit to go on from, or None; `save`, if not None, is called with the state after each
    iteration.
    """
    model = model_of(plan, sign)
    keep = save and (lambda node: save(state_of_sites(node)))
    fit, mode = fit_model(model, plan.settings, monitor, start_of(model, previous), keep)
    fit.attributes["state"] = state_of_sites(mode)
    return fit if plan.joint or plan.columns.listed else as_messages(fit, plan.prior(), 1)


def model_of(plan, sign=None):
    """Return what a `Plan` is as a function of theta; sign as for `fit_exact`."""
    if plan.joint:
        return ClassesModel(plan)
    rows = plan.X, sign, plan.weight, plan.designs, plan.codes, plan.n_levels
    # with powers of rows no group has a site of its own
    largest = group_sites.LARGEST_GROUP if plan.settings.power == 1.0 else 0
    layout = layouts.lay_out(*rows, plan.local, largest)
    n_named = [len(known) for known in plan.levels]
    sizes = plan.n_effects, plan.n_levels, n_named, plan.local
    places = layouts.EffectPlaces(plan.beta_sd**-2.0, *sizes, layout.order)
    return CrossedModel(layout, places, plan.theta_prior, plan.settings.power)


def fit_model(model, settings, monitor, start, keep=None, cov=None, n_spent=0):
    """Return (`BinaryFit`, `Node` at the mode) of a model that is a function of theta.

    model has what `find_mode` asks of it, and `posterior(average)`; start and cov are as there;
    `keep`, if not None, is called with the node that each iteration led to; n_spent iterations are
    no longer left.
    """
    watch = PosteriorMonitor(monitor, lambda node: model.posterior(Average.alone(node)), keep)
    tol, left = settings.tol, settings.max_iter - n_spent
    mode, curvature, trace, reason = _scales.find_mode(model, start, tol, left, watch, cov)
    average, rule, remark = _scales.average_about(
        model, mode, curvature, tol, settings.theta, watch
    )
    posterior = model.posterior(average)
    mean, cov = posterior.beta_moments()
    if mean.size:
        flat = gaussian.Moments(mean.ravel(), cov.reshape(mean.size, mean.size))
        gaussian.check_precise(gaussian.natural(flat).precision)
    reason = worst_reason([reason, "max_iter"]) if remark else reason
    told = trace.history, reason, average.log_evidence, dict(theta_rule=rule), remark
    return BinaryFit(posterior, *told), mode


def as_messages(fit, prior, n_sites, counts=(0, 0)):
    """Return the `BinaryFit` with the messages of sites that are equal shares of its posterior."""
    phi = fit.posterior.phi_moments()
    more = of_sites(shared(gaussian.natural(phi), prior, n_sites), phi, *counts)
    history = dict(fit.history, n_skipped=np.zeros(len(fit.history["residual"])))
    return fit._replace(history=history, attributes=fit.attributes | more)


def state_of_sites(node):
    """Return the arrays from which a fit can go on: theta, and the sites there, kind by kind."""
    kinds = enumerate(node.payload.sites)
    return dict(theta=node.phi) | {f"{n}_{k}": getattr(s, n) for k, s in kinds for n in s._fields}


def start_of(model, previous):
    """Return (theta, sites) of an earlier fit.

    What does not suit this one is left: sites are then weak ones, theta the prior mean.
    """
    theta, sites = model.theta_prior.mean, model.first_sites()
    if previous is None or np.shape(previous.get("theta")) != np.shape(theta):
        return theta, sites
    known = {f"{n}_{k}": np.shape(getattr(s, n)) for k, s in enumerate(sites) for n in s._fields}
    if all(np.shape(previous.get(name)) == shape for name, shape in known.items()):
        kinds = enumerate(sites)
        sites = tuple(type(s)(*(previous[f"{n}_{k}"] for n in s._fields)) for k, s in kinds)
    return previous["theta"], sites
