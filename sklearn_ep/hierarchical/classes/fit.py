"""The fit of several classes jointly with effects of groups."""

import numpy as np

from ..._engine.class_sites import MOST_WEIGHTS
from ..._engine.gaussian import Moments, check_precise, natural
from ..._engine.hyper import Average
from ..._engine.loop import Reason, Trace
from ..._estimator.fitting import BinaryFit, PosteriorMonitor
from .._scales import Exploration, explore
from .model import ClassesModel, lay_out_effects
from .posterior import ClassMixture

_MOST_LATENT = 400_000  # rows times classes: a pass takes some seconds


def why_not_joint(n_classes, X, designs, n_levels, power):
    """Return what keeps rows from a fit of all classes jointly, "" where nothing does.

    Parameters
    ----------
    n_classes : int
    X : ndarray of shape (n, D)
        Shared columns.
    designs : list of ndarray of shape (n, q_f)
        Columns whose coefficients vary by the levels of each factor.
    n_levels : list of int
    power : float
        Share of a row's likelihood that is matched.

    Returns
    -------
    str
        The end of a sentence.
    """
    if power != 1.0:
        return f"power={power:g}; it takes power=1"
    columns = X.shape[1] + sum(w.shape[1] * n for w, n in zip(designs, n_levels, strict=True))
    if n_classes * columns > MOST_WEIGHTS:
        return (
            f"{n_classes} classes have {n_classes * columns} coefficients and effects; the limit "
            f"is {MOST_WEIGHTS}"
        )
    if n_classes * len(X) > _MOST_LATENT:
        return f"{len(X)} rows times {n_classes} classes are more than {_MOST_LATENT}"
    return ""


def class_model(plan):
    """Return the `ClassesModel` of a plan, whose fields are as in `fit_classes`."""
    codes = np.reshape(plan.codes, (len(plan.codes), len(plan.X))).T
    layout = lay_out_effects(plan.X, plan.designs, codes, plan.n_levels)
    return ClassesModel(
        layout=layout,
        y=np.asarray(plan.y, dtype=int),
        weight=np.asarray(plan.weight, dtype=float),
        n_classes=int(getattr(plan, "n_classes", None) or np.max(plan.y) + 1),
        n_effects=[w.shape[1] for w in plan.designs],
        n_levels=list(plan.n_levels),
        beta_precision=plan.beta_sd**-2.0,
        theta_prior=plan.theta_prior,
    )


def fit_classes(plan, monitor, previous=None, save=None):
    """Fit all classes jointly, at nodes that follow the posterior of the scales.

    Parameters
    ----------
    plan : object
        Rows as X (n, D) with the intercept last, class indices y (n,), weight (n,), designs (n,
        q_f) and codes (n,) of each factor, n_levels and levels (the named ones, the first) of each;
        priors beta_sd (D,), theta_prior; `settings` with tol, max_iter, and
        theta, the rule for the scales. `n_classes`, if there is such a field, is the number of
        classes.
    monitor : FitMonitor
        Told of each step towards the mode of theta.
    previous : dict or None, default=None
        State of an earlier fit, "state" of its attributes, to go on from where it suits.
    save : callable or None, default=None
        Called with the state after each step.

    Returns
    -------
    BinaryFit
        Its posterior is a `ClassMixture`.
    """
    model = class_model(plan)
    n_named = [len(known) for known in plan.levels]

    def so_far(node):
        return ClassMixture(model, Average.alone(node), n_named)

    keep = save and (lambda node: save(state_of_classes(node)))
    watch = PosteriorMonitor(monitor, so_far, keep)
    limits = plan.settings.tol, plan.settings.max_iter
    if model.n_effects:
        found = explore(model, _start_of(model, previous), *limits, plan.settings.theta, watch)
    else:
        found = _without_scales(model, _start_of(model, previous), *limits, watch)
    posterior = ClassMixture(model, found.average, n_named)
    _check_precise(posterior.beta_moments())
    attributes = dict(theta_rule=found.rule, state=state_of_classes(found.mode))
    history, evidence = found.trace.history, found.average.log_evidence
    return BinaryFit(posterior, history, found.reason, evidence, attributes, found.remark)


def _without_scales(model, start, tol, max_iter, monitor):
    """Return the `Exploration` of a model without groups: one node."""
    trace = Trace(monitor)
    trace.begin()
    node = model.evaluate(*start, tol, max_iter)
    trace.end({"residual": node.residual, "log_evidence": node.objective}, node)
    reason: Reason = "converged" if node.residual < tol else "max_iter"
    return Exploration(Average.alone(node), node, trace, reason, "", "none")


def _check_precise(beta):
    """Raise an `ImproperPosterior` where rounding hides what is known of the coefficients."""
    size = beta.mean.size
    if size:
        flat = Moments(beta.mean.ravel(), beta.cov.reshape(size, size))
        check_precise(natural(flat).precision)


def state_of_classes(node):
    """Return the arrays from which a fit can go on: theta (T,), and sites (2, n, K) there."""
    return dict(theta=node.phi, class_sites=node.payload.sites)


def _start_of(model, previous):
    """Return (theta, sites) of an earlier fit as far as they suit this one."""
    theta, sites = model.theta_prior.mean, model.first_sites()
    previous = {} if previous is None else previous
    if np.shape(previous.get("theta")) == np.shape(theta):
        theta = previous["theta"]
    if np.shape(previous.get("class_sites")) == np.shape(sites):
        sites = previous["class_sites"]
    return theta, sites
