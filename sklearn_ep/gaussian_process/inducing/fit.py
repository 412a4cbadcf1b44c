"""Recipe of a fit through inducing points: learn, converge, predict."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state

from ..._engine.loop import Reason, Trace, worst_reason
from ..._engine.partition import PartMap
from .._base import GPFit, ending_in
from .._hyperparameters import KEPT, LEARNING_TOL, ValueWithGradient, find_mode, or_refuse
from .._limits import LIMITS
from .averaged import average_over_kernel, mixed_nodes
from .ep import InducingEP, PassState
from .hyperparameters import Hyperparameters, prior_of_lengths
from .learning import (
    LEARNING,
    STEP_RULES,
    evidence_at,
    learn_by_minibatches,
    learn_by_passes,
    learn_on_more_and_more_rows,
)
from .rows import PartitionedRows
from .values import InducingGPPosterior


@dataclass
class InducingPlan(ValueWithGradient):
    """All of a fit through inducing points that is decided before it starts.

    `n_problems` binary problems, one for two classes and one a class otherwise, share kernel,
    inducing points and every pass over the rows. `sites` (C, 2, n) are those to start from, None
    for empty ones. `flat` asks for the kernel of the largest evidence, without a prior. `averaging`
    is the `NormalPrior` of an average over variance and length, None for the mode.
    """

    data: PartitionedRows
    kernel: Kernel
    begun: bool
    inducing_points: np.ndarray
    factor: Any
    rule: Any
    n_problems: int
    optimizer: str | None
    learn_inducing: bool
    restarts: np.ndarray
    sites: Any
    batch_size: int | None
    learning_rate: float
    averaged: bool
    flat: bool
    averaging: Any
    damping: float
    accelerate: bool
    max_iter: int
    max_sweeps: int
    tol: float
    jitter: float
    seed: int

    def hyperparameters(self):
        """Return what is learned; a column without spread keeps its inducing coordinates."""
        return Hyperparameters(
            self.kernel,
            self.inducing_points,
            np.sqrt(self.data.var),
            self.jitter,
            learn_kernel=self.optimizer is not None,
            learn_inputs=self.learn_inducing,
            decoupled=self.optimizer in STEP_RULES,
            density=None if self.flat else prior_of_lengths(self.kernel),
        )

    def kernel_alone(self, Z):
        """Return the parameters of the kernel as what is learned, with inducing points Z (m, d)."""
        alone = dict(learn_kernel=True, learn_inputs=False, decoupled=False, density=None)
        return replace(self.hyperparameters(), Z=Z, **alone)

    def engine(self, run):
        """Return EP over the partitions of an open map."""
        data = self.data
        copies = data.weight if self.averaged else None
        return InducingEP(
            run, data.sizes, data.classes, self.n_problems, self.factor, self.rule, copies
        )

    def solver(self, tol, max_iter):
        """Return the keywords of `InducingEP.solve`."""
        return dict(tol=tol, max_iter=max_iter, damping=self.damping, accelerate=self.accelerate)

    def value_and_gradient(self, theta, fit, n_jobs):
        """Return log evidence at theta, EP run from the state of the fit, and its gradient."""
        hyper = self.kernel_alone(fit.inducing_points)
        with PartMap(self.data.parts, n_jobs) as run:
            ep, solver = self.engine(run), self.solver(self.tol, self.max_sweeps)
            node = or_refuse(evidence_at(ep, hyper, fit.runs[0].state, **solver)(theta))
        return float(node.log_evidence), node.gradient


@dataclass
class InducingRun:
    """Outcome of passes that all binary problems share, before it becomes attributes.

    `loo` is (n,), the leave-one-out log probability of each row's label, or None. `attributes` are
    what an average adds; state and model are those of its heaviest node.
    """

    state: PassState
    model: Any
    history: dict[str, np.ndarray]
    reason: Reason
    n_sweeps: int
    log_evidence: float
    loo: Any
    remark: str
    attributes: dict[str, Any] = field(default_factory=dict)


def posteriors_of(model):
    """Return one `InducingGPPosterior` a binary problem."""
    return [InducingGPPosterior(model.prior, p, model.factor) for p in model.posteriors]


def gp_fit(run, sites, loo_proba):
    """Return the `GPFit` of a run with `model`, with sites (C, 2, n) of rows or None."""
    return GPFit(
        runs=[run],
        posteriors=posteriors_of(run.model),
        kernel=run.model.prior.kernel,
        n_sweeps=run.n_sweeps,
        sites=sites,
        loo_proba=loo_proba,
        inducing_points=run.model.prior.Z,
    )


def fit_inducing(plan, run, monitor):
    """Learn the hyperparameters if asked, converge EP on an open map, and return the `GPFit`."""
    ep, hyper, trace = plan.engine(run), plan.hyperparameters(), Trace(monitor)
    prior = hyper.prior(hyper.start)
    if plan.sites is None:
        state = ep.zero(prior)
    else:
        state = ep.restate(prior, np.split(plan.sites, np.cumsum(ep.sizes)[:-1], axis=2))
    state, end = _learned(plan, ep, hyper, state, trace)
    asked = end.reason == "asked"
    ep.keep_rows(len(state.prior.Z), len(plan.data.var))
    if end.n_steps and state.sites is not None:
        state = _renewed(ep, state, plan.batch_size is not None and hyper.learns and not asked)
    if plan.averaging is not None and not asked:
        average = average_over_kernel(plan, ep, state, monitor)
        if average is not None:
            return _averaged(plan, ep, average, end, trace)
    own = _converged(plan, ep, state, end, trace)
    if own.state.sites is None:
        return gp_fit(own, None, None)
    own = replace(own, loo=ep.leave_one_out(own.model, own.state.sites))
    return gp_fit(own, np.concatenate(own.state.sites, axis=2), np.exp(own.loo))


def _renewed(ep, state, ahead):
    """Return the state with its sums made afresh from its sites.

    Between minibatches the posterior runs `ahead` of the sites; it tells what they would be.
    """
    if ahead:
        return ep.renew(ep.model(state), state.sites)
    return ep.collect(state.prior, state.sites)


def _averaged(plan, ep, average, end, trace):
    """Return the `GPFit` of an `Average`, whose run is that of the heaviest node."""
    heaviest = average.heaviest.payload
    state = ep.collect(heaviest.model.prior, [s.copy() for s in heaviest.sites])
    own = _converged(plan, ep, state, end, trace)
    mixed, loo, more = mixed_nodes(plan, ep, average, own.state, own.model)
    own = replace(own, log_evidence=average.log_evidence, loo=loo, attributes=more)
    return gp_fit(own, np.concatenate(own.state.sites, axis=2), np.exp(loo))._replace(**mixed)


def _converged(plan, ep, state, end, trace):
    """Return the `InducingRun` at the fixed point, without what leaving rows out says.

    Learning that was asked to stop leaves the sites as they are.
    """
    if end.reason == "asked":
        # figures are those of one more pass
        model = ep.model(state)
        final = ep.figures(model, ep.one_pass(model, state.sites)[0])
        told = ending_in(trace.history, final), end.reason, 0
    else:
        n_left = plan.max_sweeps if end.n_steps else min(plan.max_sweeps, plan.max_iter)
        solution = ep.solve(state, monitor=trace, **plan.solver(plan.tol, n_left))
        state, model, result = solution.state, solution.model, solution.result
        final = result.evaluation.record
        told = trace.history, worst_reason([end.reason, result.reason]), result.n_iter
    value = float(final["log_evidence"])
    return InducingRun(_without_views(state), model, *told, value, None, end.remark)


def _without_views(state):
    """Return the state with arrays of its own: the vector of the loop is not kept alive."""
    sites = None if state.sites is None else [s.copy() for s in state.sites]
    return PassState(state.prior, state.gram.copy(), state.shift.copy(), sites)


def _learned(plan, ep, hyper, state, trace):
    """Return the state at the learned hyperparameters and the `LearningEnd`."""
    weight = plan.data.weight
    kind = np.float32 if plan.begun or weight >= LIMITS.single_passes else np.float64
    start = ep, hyper, hyper.start, state
    shared = dict(max_iter=plan.max_iter, trace=trace, kind=kind)
    if plan.batch_size is not None:
        rule = STEP_RULES.get(plan.optimizer, STEP_RULES["adam"])(plan.learning_rate)
        rng, size = check_random_state(plan.seed), plan.batch_size
        shared |= dict(total=weight, size=size, units=plan.data.units, damping=plan.damping)
        if not hyper.learns:  # the sites of the epochs are the answer
            shared["kind"] = np.float64
        return learn_by_minibatches(*start, rule, rng=rng, tol=plan.tol, **shared)
    if not hyper.learns:
        return state, KEPT
    if plan.optimizer == "fmin_l_bfgs_b":
        return _learned_at_fixed_points(plan, ep, hyper, state, trace)
    rule = STEP_RULES[plan.optimizer](plan.learning_rate)
    shared |= dict(damping=plan.damping)
    if plan.sites is None:
        steps = dict(seed=plan.seed, damping=plan.damping, max_iter=plan.max_iter, kind=kind)
        first = ep, hyper, hyper.start, rule, plan.data, trace.monitor
        begun = learn_on_more_and_more_rows(*first, known=plan.begun, **steps)
        if begun is not None:
            start, due = (ep, hyper, begun[0], begun[1] or state), begun[2]
            shared |= dict(settled=LEARNING.settled_after, due=due)
            shared["max_iter"] = plan.max_iter if plan.begun else due
    state, _, end = learn_by_passes(*start, rule, weight=weight, **shared)
    return state, end


def _learned_at_fixed_points(plan, ep, hyper, state, trace):
    """Search by L-BFGS-B; the final run starts from the first sites, whatever path was taken."""
    free = hyper.start[hyper.n_theta :]
    solver = plan.solver(max(plan.tol, LEARNING_TOL), plan.max_sweeps)
    found = find_mode(
        evidence_at(ep, hyper, state, **solver),
        hyper.start,
        hyper.bounds,
        max_iter=plan.max_iter,
        starts=[np.concatenate([t, free]) for t in plan.restarts],
        monitor=trace,
    )
    mode, end = or_refuse(found)
    prior = mode.payload.prior
    start = ep.zero(prior) if state.sites is None else ep.restate(prior, state.sites)
    return start, end
