"""From the data of a sparse classifier to its nodes of hyperparameters and fitted attributes."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.special import logsumexp

from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Average, Node, find_mode, integrate
from .._engine.loop import Told, Trace, unheard
from .._estimator.averaged import average_remarks, hyper_attributes
from .._estimator.checks import (
    LARGEST_IN_UNITS,
    check_column_scales,
    check_column_sizes,
    column_sizes,
    spread_rows,
    validate_training,
)
from ._fit import HYPER_NAMES, of_mixture
from ._hyperparameters import HyperPrior, NodeCoordinates, Space
from ._linear_model import LinearModel
from ._plan import ACCEPT_SPARSE
from ._prior import SpikeSlab
from ._probit import ProbitRegression, ProbitState
from ._probit_posterior import ProbitMixture, ProbitPosterior
from ._units import scaled_columns

# Entries of X up to which hyperparameters="auto" integrates: each node keeps scaled rows.
LARGEST_INTEGRATED = 2_000_000


class _ProbitSweeps(NamedTuple):
    """How EP is run at a node, from a neighbour's sites.

    Of the log loss of colon tumours (62 x 2000, ten splits) twice the sweeps change nothing.
    """

    most: int = 24
    tol: float = 2e-3
    settled: float = 0.2  # residual above which a node is left out: its evidence is off by a nat
    search: int = 12  # evaluations that find the mode, which only says where the nodes lie


_SWEEPS = _ProbitSweeps()


class SettledProbit(NamedTuple):
    """Payload of a node: what predicts, and what its neighbours start from."""

    posterior: ProbitPosterior
    log_loo: np.ndarray
    x: np.ndarray
    cavity: np.ndarray


@dataclass
class ProbitPlan:
    """Checked data of a fit: the problem where learning starts, what is free, and its prior."""

    problem: ProbitRegression
    offset: np.ndarray
    scale: np.ndarray
    kept: np.ndarray
    space: Space
    prior: HyperPrior
    integrates: bool

    def posterior(self, state):
        """Return what predicts at a state."""
        return ProbitPosterior.of(self.offset, self.scale, state)


def make_plan(estimator, X, y, sample_weight):
    """Check the data of a fit and return its `ProbitPlan`."""
    training = validate_training(
        estimator, X, y, sample_weight, ensure_min_samples=2, accept_sparse=ACCEPT_SPARSE
    )
    if len(estimator.classes_) > 2:
        raise ValueError(
            "Only binary classification is supported. The type of the target is multiclass: y has "
            f"{len(estimator.classes_)} classes."
        )
    check_column_scales(estimator, training.X)
    intercept = estimator.fit_intercept
    # what is made dense is nobody else's
    owned = sp.issparse(training.X)
    columns, offset, scale = scaled_columns(training, intercept, estimator.standardize, owned)
    check_column_sizes(estimator, column_sizes(columns), LARGEST_IN_UNITS, 1.0 / LARGEST_IN_UNITS)
    labels, weight = np.where(training.y == 1, 1.0, -1.0), training.weight
    given = estimator.slab_variance, estimator.prior_inclusion
    model = LinearModel.of_rows(np.sqrt(weight)[:, None] * columns, labels)
    space = Space.of(model, weight.sum(), 1.0, *(None if v == "auto" else v for v in given))
    factor = SpikeSlab(np.exp(space.value[1]), space.value[2])
    how, small = estimator.hyperparameters, columns.size <= LARGEST_INTEGRATED
    return ProbitPlan(
        problem=ProbitRegression(columns, labels, weight, factor, bool(intercept)),
        offset=offset,
        scale=scale,
        kept=training.kept,
        space=space,
        prior=HyperPrior.of_integral(space, columns.shape[1]),
        integrates=bool(space.free.any()) and (how == "integrate" or (how == "auto" and small)),
    )


@dataclass
class ProbitRuns:
    """EP at any hyperparameters, started from the sites of a neighbour.

    `left` evaluations are made, and none after somebody asked to stop.
    """

    plan: ProbitPlan
    damping: float
    told: Told = unheard
    left: float = np.inf
    asked: bool = False

    @property
    def coordinates(self):
        """The way between hyperparameters and those of the nodes."""
        return NodeCoordinates(self.plan.space)

    def node(self, state):
        """Return the `Node` of a state."""
        factor, prior = state.problem.factor, self.plan.prior
        h = np.array([0.0, np.log(factor.slab_variance), factor.logit])
        slope = self.coordinates.slope(state.evidence_gradient() + prior.slope(h))
        payload = SettledProbit(self.plan.posterior(state), state.log_loo, state.x, state.cavity)
        phi, evidence = self.coordinates.of(h), state.log_evidence
        return Node(phi, evidence, prior.log_density(h), slope, state.residual, payload)

    def evaluate(self, phi, near):
        """Return the `Node` at phi, or None where the sites do not settle next to a neighbour's."""
        if self.asked or self.left == 0:
            return None
        self.left -= 1
        problem = self.plan.problem.with_parameters(self.coordinates.h(phi))
        x = problem.start() if near is None else self._near(problem, near.payload)
        limits = dict(tol=_SWEEPS.tol, max_iter=_SWEEPS.most, damping=self.damping)
        try:
            state = problem.solve(x, **limits).evaluation.payload
        except ImproperPosterior:
            return None
        if near is not None and state.residual > _SWEEPS.settled:
            return None
        node = self.node(state)
        self.asked |= bool(self.told({"log_density": node.objective}))
        return node

    def _near(self, problem, settled):
        return problem.near(settled.x, settled.cavity)


class ProbitFit(NamedTuple):
    """The run at the mode, its history and reason, and the average about it."""

    state: ProbitState
    history: dict[str, np.ndarray]
    reason: Any
    average: Average
    used: str


def fit_plan(plan, estimator, monitor):
    """Learn what is free, run EP at the mode, then integrate; the monitor watches the run."""
    problem, x, runs = plan.problem, plan.problem.start(), ProbitRuns(plan, estimator.damping)
    bounds = runs.coordinates.bounds(problem.X.shape[1])
    asked = False
    if plan.space.free.any():
        with monitor.phase("learning") as told:
            search = ProbitRuns(plan, estimator.damping, told, _SWEEPS.search)
            phi = runs.coordinates.of(plan.space.value)
            mode = find_mode(search.evaluate, phi, bounds)
        asked = search.asked
        if mode is not None:
            problem, x = problem.with_parameters(runs.coordinates.h(mode.phi)), mode.payload.x
    trace = Trace(monitor)
    out = _run(problem, x, estimator, trace)
    node, used = runs.node(out.evaluation.payload), "mode"
    average = Average.alone(node)
    if plan.integrates and not asked and out.reason != "asked":
        average = integrate(runs.evaluate, node, bounds, estimator.n_jobs, monitor)
        used = "integrate"
    return ProbitFit(out.evaluation.payload, trace.history, out.reason, average, used)


def _run(problem, x, estimator, trace):
    """Run EP at the mode; where no step is left, again with sites of columns not below zero."""
    limits = dict(tol=estimator.tol, damping=estimator.damping, monitor=trace)
    out = problem.solve(x, max_iter=estimator.max_iter, **limits)
    if out.reason != "stuck" or trace.n_iter >= estimator.max_iter:
        return out
    safe = replace(problem, largest_lack=0.0)
    return safe.solve(safe.start(), max_iter=estimator.max_iter - trace.n_iter, **limits)


def state_attributes(plan, state):
    """Return what predictions need where a callback asks for a state on the way."""
    mixture = ProbitMixture([plan.posterior(state)], np.ones(1))
    return _of_mixture(mixture) | {"log_evidence_": state.log_evidence, "_posteriors": [mixture]}


def _of_mixture(mixture):
    """Return the attributes that are moments of the posterior of all nodes."""
    found = of_mixture(mixture.coefficients)
    fitted = mixture.coefficients.units.fit_intercept
    del found["noise_variance_"]  # that of the row sites
    intercept = np.array([mixture.intercept()[0] if fitted else 0.0])
    single = {name: found[name][None] for name in ("coef_", "coef_std_")}
    return found | single | {"intercept_": intercept}


def fitted_attributes(plan, fit):
    """Return all fitted attributes, what predicts last."""
    average, free = fit.average, plan.space.free
    nodes = [node.payload for node in average.nodes]
    mixture = ProbitMixture([p.posterior for p in nodes], average.weight)
    coordinates = NodeCoordinates(plan.space)
    inverse = [-p.log_loo for p in nodes]
    loo = np.exp(-logsumexp(inverse, axis=0, b=average.weight[:, None]))
    return {
        **_of_mixture(mixture),
        "loo_proba_": spread_rows(loo, plan.kept, np.nan),
        "log_evidence_": average.log_evidence,
        "stop_reason_": fit.reason,
        "converged_": fit.reason == "converged",
        **hyper_attributes([average], HYPER_NAMES[free].tolist(), fit.used),
        "hyper_nodes_": np.array([coordinates.h(phi)[free] for phi in average.phi]),
        "_remarks": average_remarks([average]),
        "_posteriors": [mixture],
    }
