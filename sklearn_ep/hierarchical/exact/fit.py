"""The fit by one set of sites over all rows: EP given the scales, at nodes of their posterior."""

from functools import partial

import numpy as np

from ..._engine.gaussian import check_precise, natural
from ..._engine.sites import Sites
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .._checkpoint import load_checkpoint, save_checkpoint
from .._posterior import EffectPlaces, GroupPosterior
from .._scales import explore, grid_of_one
from ..partitions.messages import Messages, posterior_moments, shared
from .given_scales import AllSites, CrossedModel, first_sites
from .group_sites import GroupSites
from .layout import largest_group, lay_out

__all__ = ["fit_exact"]


def fit_exact(plan, sign, monitor, previous, checkpoint):
    """Return the `BinaryFit` of a `Plan` with rows in memory and labels in {-1, +1}.

    previous is the state of an earlier fit to go on from, or None; checkpoint the file for the
    state after each iteration, or None.
    """
    save = None
    if checkpoint is not None:
        saved = load_checkpoint(checkpoint, plan.fingerprint)
        previous = previous if saved is None else saved
        save = partial(_save, checkpoint, plan.fingerprint)
    rows = plan.X, sign, plan.weight, plan.designs, plan.codes, plan.n_levels
    layout = lay_out(*rows, plan.local, largest_group(plan.settings.power))
    precision, of_theta = plan.beta_sd**-2.0, (plan.theta_mean, plan.theta_sd)
    model = CrossedModel(
        layout, plan.local, plan.n_effects, plan.n_levels, precision, *of_theta, plan.settings.power
    )
    n_named = [len(known) for known in plan.levels]
    places = EffectPlaces(
        precision, plan.n_effects, plan.n_levels, n_named, plan.local, layout.order
    )
    watch = PosteriorMonitor(
        monitor, lambda node: GroupPosterior(grid_of_one(node), [node.payload], places), save
    )
    start, cov = start_of(plan, model, previous)
    found = explore(
        model, start, plan.settings.tol, plan.settings.max_iter, plan.settings.theta, watch, cov
    )
    posterior = GroupPosterior(found.grid, [n.payload for n in found.nodes], places)
    more = dict(theta_rule=found.rule, state=state_of_sites(found.mode))
    if len(precision):
        check_precise(natural(posterior.beta_moments()).precision)
    history, evidence = found.trace.history, found.grid.log_evidence
    if plan.placement is not None:
        history = dict(history, n_skipped=np.zeros(found.trace.n_iter))
        total, prior = natural(posterior.phi_moments()), plan.prior()
        messages = shared(total, prior, len(plan.placement.where))
        more |= dict(messages=messages, prior=prior, n_skipped=0, n_cut=0)
    return BinaryFit(posterior, history, found.reason, evidence, more, found.remark)


def _save(path, fingerprint, node):
    save_checkpoint(path, state_of_sites(node), fingerprint)


def state_of_sites(node):
    """Return the arrays from which a fit can go on: theta, and the sites there."""
    rows, groups = node.payload.sites
    flat = {
        f"group_{name}": np.concatenate([getattr(g, name).ravel() for g in groups] or [np.empty(0)])
        for name in ("precision", "shift")
    }
    return dict(theta=node.phi, row_precision=rows.precision, row_shift=rows.shift, **flat)


def start_of(plan, model, previous):
    """Return ((theta, `AllSites`), covariance of theta or None) of an earlier fit.

    What does not suit this one is left: sites are then weak ones, theta the prior mean.
    """
    if previous is not None and "site_shift" in previous:
        return _start_of_parts(plan, model, previous)
    return _start_of_sites(model, previous), None


def _start_of_parts(plan, model, previous):
    """Return what `start_of` does of messages between sites of parts."""
    prior, (precision, shift) = plan.prior(), (previous[f"site_{n}"] for n in Messages._fields)
    if precision.ndim != 3 or shift.shape[1:] != prior.shift.shape:
        return (model.theta_mean, first_sites(model.layout)), None
    phi, d = posterior_moments(prior, Messages(precision, shift)), len(plan.beta_sd)
    return (phi.mean[d:], first_sites(model.layout)), phi.cov[d:, d:]


def _start_of_sites(model, previous):
    """Return (theta, `AllSites`) of sites of rows and groups where they suit this fit."""
    theta, sites = model.theta_mean, first_sites(model.layout)
    if previous is None or np.shape(previous.get("theta")) != np.shape(theta):
        return theta, sites
    sizes = {
        "row_precision": sites.rows.precision.size,
        "group_precision": sum(g.precision.size for g in sites.groups),
    }
    if any(np.size(previous.get(name)) != size for name, size in sizes.items()):
        return previous["theta"], sites
    ends = {"precision": 0, "shift": 0}
    groups = []
    for g in sites.groups:
        parts = []
        for name, like in zip(ends, g, strict=True):
            part = previous[f"group_{name}"][ends[name] : ends[name] + like.size]
            parts.append(part.reshape(like.shape))
            ends[name] += like.size
        groups.append(GroupSites(*parts))
    rows = Sites(previous["row_precision"], previous["row_shift"])
    return previous["theta"], AllSites(rows, groups)
