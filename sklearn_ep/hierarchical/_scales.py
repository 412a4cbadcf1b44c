"""Scales of the effects: their coordinates, and the average over a posterior of these.

Covariances are S = L L' with L in log-Cholesky coordinates. theta lists the lower triangle of L row
by row, its diagonal as logarithms, so that every theta is a proper covariance and one varying
coefficient has theta = log tau. Its posterior is averaged over a few nodes about the mode.

For one or two coordinates and cheap nodes they are those of a lattice that is grown along the axes
of the posterior while there is mass, elsewhere a star.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from .._engine import hyper
from .._engine.gaussian import ImproperPosterior, eigen_curvature, learned_curvature
from .._engine.loop import Trace, reason_to_end


def n_coordinates(q):
    """Return the number of coordinates of a q x q covariance."""
    return q * (q + 1) // 2


def diagonal_positions(q):
    """Return where in theta the logarithms of the diagonal are."""
    return np.array([k * (k + 3) // 2 for k in range(q)], dtype=int)


def names(q):
    """Return the names (q (q + 1) / 2,) of the coordinates."""
    if q == 1:
        return ("log_tau",)
    pairs = zip(*np.tril_indices(q), strict=True)
    return tuple(f"{'log_' if i == j else ''}cholesky_{i}{j}" for i, j in pairs)


def factor(theta, q):
    """Return L (..., q, q) for theta (..., q (q + 1) / 2)."""
    theta = np.asarray(theta, dtype=float)
    lower = np.zeros((*theta.shape[:-1], q, q))
    rows, cols = np.tril_indices(q)
    lower[..., rows, cols] = theta
    k = np.arange(q)
    lower[..., k, k] = np.exp(lower[..., k, k])
    return lower


def tangent(theta, q):
    """Return dL / dtheta_t, (T, q, q); second derivatives equal it on the diagonal, else vanish."""
    lower = factor(theta, q)
    rows, cols = np.tril_indices(q)
    out = np.zeros((len(rows), q, q))
    out[np.arange(len(rows)), rows, cols] = np.where(rows == cols, lower[rows, cols], 1.0)
    return out


def spans(n_effects):
    """Return the slice of theta that belongs to each factor, for q_f effects a level of each."""
    ends = np.cumsum([0, *(n_coordinates(q) for q in n_effects)])
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def factors(theta, n_effects):
    """Return L (..., q_f, q_f) of each factor for theta (..., T)."""
    return [factor(theta[..., s], q) for s, q in zip(spans(n_effects), n_effects, strict=True)]


def scales(theta, n_effects):
    """Return the sds (..., Q) of all effects, factor by factor, for theta (..., T)."""
    parts = [np.sqrt(np.sum(lower**2, axis=-1)) for lower in factors(theta, n_effects)]
    return np.concatenate([theta[..., :0], *parts], axis=-1)


def quantiles(average, n_effects, levels):
    """Return quantiles (len(levels), Q) of the sds of effects by an `Average` over theta."""
    return average.smooth.quantiles(levels, partial(scales, n_effects=n_effects))


def slope(theta, n_effects, moments):
    """Return the derivatives (T,) of a log evidence in the coordinates of all factors.

    The moment (q, q) of a factor is the sum over levels of E uu' - I, u being the effects in units
    of L. At a fixed point of the sites there is no other term.
    """
    out = [np.zeros(0)]
    for own, q, moment in zip(spans(n_effects), n_effects, moments, strict=True):
        relative = np.linalg.solve(factor(theta[own], q), tangent(theta[own], q))
        out.append(np.einsum("tab,ba->t", relative, moment))
    return np.concatenate(out)


# Passes over the sites at one theta. Few are taken: with 30 two nodes of 73 tables had not settled,
# which 30 more settle.
MOST_PASSES = 200


class ScaleLimits(NamedTuple):
    """How fine the posterior of the scales is looked at, and at what cost."""

    loose: float = 3.0  # times tol: log evidence is stationary in the sites, its error second order
    rough: float = 0.1  # tolerance of sites far from the mode
    share: float = 0.03  # and as a share of the next step
    counts: float = 1e-3  # weight of a node whose sites have to have settled
    settled: float = 0.01  # residual there up to which its log evidence is as good as exact
    # sd between nodes: the trapezoidal rule of a Gaussian is exact to 6e-6. Ends of intervals of
    # two factors are within .018 sd of those by 300 nodes in the mean of 18 sets. With 1.4 and a
    # depth of 7 that is .023, in .75 of the time, but .46 of the draws are effective, not .70.
    step: float = 1.25
    depth: float = 8.0  # log density below the largest at which the lattice ends
    usual: tuple[int, ...] = (0, 12, 45)  # nodes of a lattice as a rule, by coordinates
    most: tuple[int, ...] = (0, 60, 120)  # and at most
    reach: float = 4.5  # from the prior mean, in sd of the prior: there it has lost 10 nats
    decrement: float = 0.05  # of Newton's method, at which the mode is near enough for the axes
    nearer: float = 0.9  # of the last residual, above which sites at the mode are stuck
    level: float = 0.05  # of log density that a step may lose: what sites within tol may be off
    curvature: float = 0.3  # at least, in units of the prior's, for flat tails
    # Of a lattice, by its usual nodes: a fit of a second. Against Gibbs runs of six models the ends
    # of a star's intervals are within .12 sd, .41 in one of them, and those of the lattice in .05.
    flops: float = 3e8
    a_node: float = 3.0  # passes that a node takes, sites being warm
    # Of checks of a star's surrogate where there are three or more coordinates. Two slopes by 30
    # groups, six coordinates, three sets: the ends of intervals are up to .8 sd off without them.
    rounds: int = 4
    fewest_checked: int = 3
    checks: int = 4  # nodes of a round for each coordinate


_LIMITS = ScaleLimits()


def average_about(model, mode, curvature, tol, rule, monitor):
    """Return (`Average` over theta about the node at its mode, rule, remark).

    curvature (T, T) is about that at the mode; sites elsewhere are brought to a few times tol. rule
    is "grid" for a lattice where it is affordable and a star elsewhere, "star", or "mode" for the
    mode alone; what is returned is the one that was followed, "none" without scales. The remark
    says how far sites are from their fixed point at a node that counts, "" where they are not.
    """
    loose = _LIMITS.loose * tol
    if not len(mode.phi):
        return hyper.Average.alone(mode), "none", ""
    if rule == "mode":
        return hyper.Average.alone(mode, axes_at(model, mode, loose)), rule, ""
    rule = "grid" if rule == "grid" and affords_lattice(model) else "star"
    with monitor.phase("integration over theta") as told:
        if rule == "grid":
            average = lattice_about(model, axes_at(model, mode, loose), mode, loose, told)
        else:
            average = star_at(model, mode, np.linalg.inv(curvature), loose, told)
    share = average.weight / np.max(average.weight)
    pairs = zip(average.nodes, average.weight, np.sqrt(share), strict=True)
    worst = max(root * node.residual for node, weight, root in pairs if weight > _LIMITS.counts)
    settled = worst < max(loose, _LIMITS.settled)
    return average, rule, "" if settled else f"at a node in the scales the residual is {worst:.3g}"


def affords_lattice(model):
    """Say whether a lattice in theta is worth its cost: few coordinates, cheap passes."""
    t = len(model.theta_prior.mean)
    few = t < len(_LIMITS.usual)
    return few and _LIMITS.usual[t] * _LIMITS.a_node * model.flops() <= _LIMITS.flops


def find_mode(model, start, tol, max_iter, monitor, cov=None):
    """Return the `Node` at the mode of theta by BFGS on free gradients, a step an iteration.

    Also the curvature there, the `Trace`, and why the search ended. It is no `hyper.ascend`, which
    takes values as they are told: here they are only as fine as the next step is short. With fine
    ones everywhere that takes 1.4 times as long with one factor, 1.6 with random slopes and 1.7
    with two crossed factors (medians of twelve sets each), to the same mode.

    start is (theta, sites). The first curvature is that of cov, the covariance of theta if that is
    known, or of scales whose effects were known. Far from the mode a pass or two of the sites are
    enough; they are brought to a few times tol on the way to it and to tol at the end.
    """
    trace, share, site_tol, last = Trace(monitor), 1.0, _LIMITS.rough, np.inf
    loose = _LIMITS.loose * tol
    curvature = np.linalg.inv(np.diag(1.0 / _known_curvature(model)) if cov is None else cov)
    node, reason = model.evaluate(*start, _LIMITS.rough), None
    while reason is None:
        trace.begin()
        if _decrement(node, curvature) >= _LIMITS.decrement:
            new = _stepped(model, node, curvature, share, site_tol)
            if new is not None:
                moved, lost = new.phi - node.phi, node.gradient - new.gradient
                curvature = learned_curvature(curvature, moved, lost)
                node, share = new, 1.0
            else:  # where rough sites may have misled, finer ones are asked
                share, site_tol = 0.4 * share, max(loose, 0.3 * site_tol)
                if node.residual > site_tol:
                    node = model.evaluate(node.phi, node.payload.sites, site_tol)
        left = _decrement(node, curvature)
        settled = left < _LIMITS.decrement
        site_tol = float(np.clip(_LIMITS.share * left, loose, site_tol))
        if settled:
            # rough sites may have hidden a slope: the search then goes on, with finer ones
            node = model.evaluate(node.phi, node.payload.sites, tol)
            settled, site_tol = _decrement(node, curvature) < 2.0 * _LIMITS.decrement, tol
        trace.end({"residual": node.residual, "log_evidence": node.objective}, node)
        below = settled and node.residual < tol
        # sites that still come nearer to their fixed point are given another iteration
        stuck = settled and node.residual > _LIMITS.nearer * last
        last = node.residual if settled else np.inf
        reason = reason_to_end(trace, below, True, stuck, max_iter)
    return node, curvature, trace, reason


def _decrement(node, curvature):
    """Return the length of the next step in posterior sd."""
    return float(np.sqrt(node.gradient @ np.linalg.solve(curvature, node.gradient)))


def _stepped(model, node, curvature, share, site_tol):
    """Return the `Node` a share of a step from another, None where that is not taken.

    It is where it leads uphill, or to a smaller slope where values are rough.
    """
    step = np.linalg.solve(curvature, node.gradient)
    theta = node.phi + share * step / max(1.0, np.max(np.abs(step)))
    new = evaluate(model, site_tol, theta, node)
    if new is None or new.objective > node.objective - _LIMITS.level:
        return new
    return new if _decrement(new, curvature) < 0.5 * _decrement(node, curvature) else None


def _known_curvature(model):
    """Return the negative second derivatives (T,) of log density, were the effects known."""
    levels = np.repeat(model.n_levels, [n_coordinates(q) for q in model.n_effects])
    return 0.5 * levels + 1.0 / model.theta_prior.sd**2


def axes_at(model, node, tol):
    """Return the `Axes` by differences of gradients at a node near the mode."""

    def gradient(move):
        return model.evaluate(node.phi + move, node.payload.sites, tol).gradient

    width = 0.5 / np.sqrt(_known_curvature(model))
    moves = zip(np.diag(width), width, strict=True)
    hessian = np.array([(gradient(-m) - gradient(m)) / (2.0 * w) for m, w in moves])
    values, vectors = eigen_curvature(hessian, _least_curvature(model))
    root = vectors / np.sqrt(values)
    newton = root @ (root.T @ node.gradient)
    return hyper.Axes(node.phi + newton / max(1.0, np.max(np.abs(newton))), root)


def _least_curvature(model):
    return _LIMITS.curvature / np.max(model.theta_prior.sd) ** 2


def lattice_about(model, axes, first, tol, told):
    """Return the `Average` over a lattice grown from the centre of axes while there is mass.

    first is a `Node` to start sites from; `told` hears of each node.
    """
    spacing = hyper.Spacing(_LIMITS.step, _LIMITS.depth, _LIMITS.most[len(axes.centre)])
    # The evidence is flat where scales vanish or are huge, so that the prior bounds the posterior.
    # Only where sites cannot settle does it go on, at a cost that grows with the scales.
    mean, near = model.theta_prior
    low = np.minimum(mean - _LIMITS.reach * near, axes.centre - near)
    bounds = np.column_stack([low, np.maximum(mean + _LIMITS.reach * near, axes.centre + near)])
    visits = hyper.Visits(partial(evaluate, model, tol, top=first.objective), bounds, told)
    # a Newton step from the mode may lead to no posterior
    origin = visits.evaluate(axes.centre, first) or first
    lattice = hyper.Lattice(origin, axes.root, spacing)
    lattice.explore(visits)
    average = lattice.smooth_average()._replace(n_without=visits.n_without)
    if len(average.nodes) == 1:
        # sites that cannot settle give each node an evidence of its own, and the lattice no width
        raise ImproperPosterior("the evidence is not continuous in the scales of the groups")
    return average


def star_at(model, mode, cov, tol, told):
    """Return the `Average` over a star about the mode, checked where that is affordable."""
    t, rounds = len(mode.phi), 0
    if t >= _LIMITS.fewest_checked:
        cost = _LIMITS.checks * t * _LIMITS.a_node * model.flops()
        rounds = min(_LIMITS.rounds, int(_LIMITS.flops / max(cost, 1.0)))
    bounds = np.tile([-np.inf, np.inf], (t, 1))
    visits = hyper.Visits(partial(evaluate, model, tol), bounds, told)
    return hyper.star_about(visits, mode, cov, _least_curvature(model), rounds)


def evaluate(model, tol, theta, near, top=-np.inf):
    """Return the `Node` of a model at theta, from the sites of `near`; None without posterior.

    A node's error counts by its weight times the squared residual of its sites: these are brought
    to less the further the log density is foretold to be below that at the `top`.
    """
    below = top - near.objective - max(0.0, near.gradient @ (theta - near.phi))
    tol = min(tol * np.exp(0.5 * max(0.0, below)), max(tol, _LIMITS.rough))
    try:
        return model.evaluate(theta, near.payload.sites, tol)
    except (ImproperPosterior, FloatingPointError):
        return None
