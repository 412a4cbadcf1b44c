"""One factor without partitions: EP over all rows at each node of a grid in the group scale.

Sites and scale are found together, and no Gaussian in the scale is needed on the way. Where groups
are small they have sites of their own.
"""

import numpy as np

from ..._engine.gaussian import Moments, natural
from ..._estimator.fitting import BinaryFit
from .._monitor import PosteriorMonitor
from .._scales import explore, grid_of_one
from ..partitions.arrow import LocalEffects
from ..partitions.messages import check_precise, shared
from ..partitions.mixture import GroupedMixture
from ..partitions.theta_grid import ThetaMarginal, prior_of_beta
from .given_scales import first_sites
from .layout import largest_group, lay_out
from .model import CrossedModel

__all__ = ["fit_whole"]


def fit_whole(plan, sign, monitor, theta=None):
    """Return the `BinaryFit` of rows in memory with labels in {-1, +1}.

    `theta` are its `Moments` at the end of an earlier fit, None to start at the prior mean.
    """
    rows, problem, settings = plan.rows, plan.problem, plan.settings
    n_levels = [int(rows.code.max()) + 1]
    args = rows.shared, sign, rows.weight, [rows.local], [rows.code], n_levels
    beta_precision = np.diagonal(problem.prior.precision)[: problem.d]
    priors = beta_precision, problem.theta_prior[0], problem.theta_prior[1], settings.power
    layout = lay_out(*args, 0, largest_group(settings.power))
    model = CrossedModel(layout, 0, [1], n_levels, *priors)

    def mixture(grid, nodes):
        return mixture_of(grid, nodes, model.layout.order[: problem.n_named], problem)

    watch = PosteriorMonitor(monitor, lambda node: mixture(grid_of_one(node), [node]))
    first = model.theta_mean if theta is None else theta.mean
    start, cov = (first, first_sites(model.layout)), None if theta is None else theta.cov
    found = explore(model, start, settings.tol, settings.max_iter, settings.theta, watch, cov)
    posterior = mixture(found.grid, found.nodes)
    total = moments_of(posterior, problem.d, found.grid if found.rule == "mode" else None)
    check_precise(total.precision)
    messages = shared(total, problem.prior, len(problem.where))
    history = dict(found.trace.history, n_skipped=np.zeros(found.trace.n_iter))
    more = dict(messages=messages, prior=problem.prior, n_skipped=0, n_cut=0)
    more |= dict(exact_groups=settings.power == 1.0)
    evidence = found.grid.log_evidence
    return BinaryFit(posterior, history, found.reason, evidence, more, found.remark)


def mixture_of(grid, nodes, order, problem):
    """Return the `GroupedMixture` of nodes on a grid in one theta, groups in this order."""
    founds = [n.payload for n in nodes]
    arrays = [
        (f.local.lower[order], f.local.gain.dense[order], f.local.offset[order]) for f in founds
    ]
    local = LocalEffects(*(np.stack(a) for a in zip(*arrays, strict=True)))
    mean, root = np.stack([f.mean for f in founds]), np.stack([f.root for f in founds])
    log_z = np.array([f.log_z for f in founds])
    marginal = None if grid.place is None else ThetaMarginal(grid.theta[:, 0], grid.weight)
    more = marginal, log_z, prior_of_beta(problem.prior, problem.d)
    return GroupedMixture(grid.weight, grid.theta, mean, root, local, *more)


def moments_of(posterior, d, alone=None):
    """Return the `Natural` of the normal in (beta, theta) with the moments of a mixture.

    Of a grid that is `alone` a node, theta has the covariance of its axes.
    """
    points = np.hstack([posterior.mean, posterior.theta])
    mean = posterior.weight @ points
    apart = np.sqrt(posterior.weight)[:, None] * (points - mean)
    cov = apart.T @ apart
    if alone is not None:
        cov[d:, d:] = alone.axes.root @ alone.axes.root.T
    cov[:d, :d] = posterior.beta_moments().cov
    return natural(Moments(mean, cov))
