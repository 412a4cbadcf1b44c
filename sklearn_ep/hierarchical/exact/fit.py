"""The fit of a plan with factors: one posterior, by a grid in the scales or by messages."""

from functools import partial

import numpy as np

from ..._engine.gaussian import natural
from ..._engine.sites import Sites
from ..._estimator.fitting import BinaryFit, FitMonitor
from .._checkpoint import load_checkpoint, save_checkpoint
from .._monitor import PosteriorMonitor
from .._posterior import CrossedMixture
from .._scales import explore, grid_of_one
from ..messages.fit import fit_by_messages
from ..partitions.messages import check_precise
from .given_scales import AllSites, first_sites
from .group_sites import GroupSites
from .layout import largest_group, lay_out
from .model import CrossedModel

__all__ = ["fit_factors"]


def fit_factors(estimator, plan, run, data, previous, checkpoint):
    """Return the `BinaryFit` of a `CrossedPlan`, watched by the estimator's callbacks.

    run is the `PartMap` over raw parts, None for rows in memory; data are X and y as the caller
    gave them, for callbacks; previous is the state of an earlier fit to go on from, or None;
    checkpoint the file for the state after each iteration, or None.
    """
    so_far = {"_columns": plan.columns, "_levels": plan.levels}

    def attributes(posterior):
        return {"_posteriors": [posterior()], **so_far}

    X, y = data
    monitor = FitMonitor(estimator, X, y, plan.max_iter, attributes)
    sign = None if plan.y is None else np.where(plan.y == 1, 1.0, -1.0)
    if plan.engine == "messages":
        found = fit_by_messages(plan, sign, monitor, previous, run, checkpoint)
    else:
        found = fit_on_grid(plan, sign, monitor, previous, checkpoint)
    found = monitor.completed_fit(found, **so_far)
    monitor.finish()
    return found


def fit_on_grid(plan, sign, monitor, previous, checkpoint):
    """Fit by EP given the scales, at nodes that follow their posterior."""
    save = None
    if checkpoint is not None:
        saved = load_checkpoint(checkpoint, plan.parts.fingerprint)
        previous = previous if saved is None else saved
        save = partial(_save, checkpoint, plan.parts.fingerprint)
    rows = plan.X, sign, plan.weight, plan.designs, plan.codes, plan.n_levels
    priors = plan.beta_sd**-2.0, plan.theta_mean, plan.theta_sd
    layout = lay_out(*rows, plan.local, largest_group(plan.power))
    model = CrossedModel(layout, plan.local, plan.n_effects, plan.n_levels, *priors, plan.power)
    n_named = [len(known) for known in plan.levels]

    def so_far(node):
        return CrossedMixture(model, grid_of_one(node), [node.payload], n_named)

    watch, start = PosteriorMonitor(monitor, so_far, save), start_of(model, previous)
    found = explore(model, start, plan.tol, plan.max_iter, plan.theta, watch)
    grid = found.grid
    posterior = CrossedMixture(model, grid, [n.payload for n in found.nodes], n_named)
    more = dict(theta_rule=found.rule)
    more |= dict(state=state_of_sites(found.mode), complete=grid.complete)
    if len(model.beta_precision):
        check_precise(natural(posterior.beta_moments()).precision)
    history, evidence = found.trace.history, grid.log_evidence
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


def start_of(model, previous):
    """Return (theta, `AllSites`) of an earlier fit where they suit this one, else weak sites."""
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
