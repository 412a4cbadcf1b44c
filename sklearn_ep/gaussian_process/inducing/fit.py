"""Fits through inducing points: what one is made of, and the recipe.

Learn kernel and points, average over the kernel where that is asked for, converge, predict. Points
stay where the mode put them while the kernel is averaged over.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from ..._engine.hyper import (
    KEPT,
    TO_THE_MODE,
    Node,
    Nodes,
    average_of,
    curvature_at,
    integrate,
    sample_about,
    search_mode,
)
from ..._engine.left_out import log_weights_without
from ..._engine.loop import SILENT, Reason, StepsOfPhase, Trace, worst_reason
from ..._engine.noisy_argmax import CLASS_LIKELIHOODS
from ..._engine.partition import PartMap
from ..._engine.rules import rule_of_power
from ..._estimator.checks import Training
from .._base import (
    GPFit,
    attributes_of_nodes,
    begins_with_some_rows,
    check_input_gradient,
    check_kernel,
    ending_in,
    factor_of,
    inducing_count,
    initial_kernel,
    left_out_classes,
    remark_of,
    sweeps_of,
    takes_temper,
)
from .._dense import plan_dense
from .._dense_fit import fit_dense
from .._hyperparameters import (
    LEARNING_TOL,
    KernelScales,
    kernel_prior,
    kernel_settings,
    learned_coordinates,
    or_refuse,
    random_starts,
    wants_average,
)
from .._kernels import column_lengths, has_input_gradient, with_own_lengths, with_theta
from .._limits import LIMITS
from .classes import JointLabels, cavities_of_part
from .ep import BinaryProblems, InducingEP, PassState, copies_of_part
from .learning import (
    LEARNING,
    STEP_RULES,
    Hyperparameters,
    InducingProblem,
    learn_by_minibatches,
    learn_by_passes,
    learn_on_more_and_more_rows,
)
from .rows import (
    PartitionedRows,
    distinct_rows,
    first_points,
)
from .values import AveragedInducing


class KernelNodes(NamedTuple):
    """What a dense fit to some of the rows tells of the kernel: the heaviest, of all also others.

    `average` is over nodes with kernel parameters `theta` (M, p) and spreads `anisotropy` (M,) of
    the log lengths; None where the kernel is one to begin with.
    """

    kernel: Kernel
    average: Any = None
    theta: np.ndarray = np.empty(0)
    anisotropy: np.ndarray = np.empty(0)


@dataclass
class InducingPlan:
    """All of a fit through inducing points that is decided before it starts.

    `labels` are what rows say: binary problems, one for two classes and one a class otherwise,
    which share kernel, inducing points and every pass over the rows, or all classes jointly.
    `passing` are those of the passes that learn.
    `sites` (C, 2, n) are those to start from, None for empty ones. `flat` asks for the kernel of
    the largest evidence, without a prior. `averaging` is the `NormalPrior` of an average over
    variance and length, None for the mode; `nodes` are those of a dense average, which are averaged
    over instead. `sweeps` are keywords of `InducingEP.solve`, `kind` is the float type of the
    passes of learning, `tempered` says whether rows left out choose a temper.
    """

    data: PartitionedRows
    kernel: Kernel
    begun: bool
    inducing_points: np.ndarray
    labels: Any
    passing: Any
    optimizer: str | None
    learn_inducing: bool
    restarts: np.ndarray
    sites: Any
    batch_size: int | None
    learning_rate: float
    flat: bool
    averaging: Any
    nodes: KernelNodes | None
    sweeps: dict[str, Any]
    max_iter: int
    jitter: float
    seed: int
    kind: Any
    tempered: bool

    def hyperparameters(self):
        """Return what is learned; a column without spread keeps its inducing coordinates."""
        return Hyperparameters(
            self.kernel,
            self.inducing_points,
            np.sqrt(self.data.var),
            self.jitter,
            learn_kernel=self.optimizer is not None and self.nodes is None,
            learn_inputs=self.learn_inducing,
            decoupled=self.optimizer in STEP_RULES,
            lengths_near=not self.flat,
        )

    def engine(self, run, labels=None):
        """Return EP over the partitions of an open map."""
        return InducingEP(run, self.data.sizes, self.data.classes, labels or self.labels)

    def problem(self, ep, state, points=None, **steps):
        """Return the `InducingProblem` of all that is learned, or of the kernel at given points."""
        hyper = self.hyperparameters()
        if points is not None:
            alone = dict(learn_kernel=True, learn_inputs=False, decoupled=False, lengths_near=False)
            hyper = replace(hyper, Z=points, **alone)
        return InducingProblem(ep, hyper, state, self.sweeps | steps)

    def value_and_gradient(self, theta, fit, n_jobs, slopes):
        """Return log evidence at theta, EP run from the state of the fit, and its gradient."""
        with PartMap(self.data.parts, n_jobs) as run:
            problem = self.problem(self.engine(run), fit.runs[0].state, fit.inducing_points)
            node = or_refuse(problem.at(theta, None, slopes))
            if slopes and not self.labels.exact_gradient:
                node = node._replace(slope=problem.differences(node))
        return float(node.log_evidence), node.slope


def checked_optimizer(estimator, factor):
    """Return the optimizer in use; only log-concave factors stay proper between passes."""
    if estimator.optimizer == "auto":
        return "adam" if factor.log_concave else "fmin_l_bfgs_b"
    if estimator.optimizer in STEP_RULES and not factor.log_concave:
        raise ValueError(
            f"optimizer={estimator.optimizer!r} needs a log-concave likelihood; "
            "use 'fmin_l_bfgs_b'."
        )
    return estimator.optimizer


def kernels_of_some_rows(estimator, run, data, monitor, joint):
    """Return the `KernelNodes` of the dense fit to some of the rows, or to all where they are few.

    Of some it is the kernel that weighs most in the average; None where a class has none of these.
    """
    X, y, weight = distinct_rows(run, data, LIMITS.first_rows, 0)
    if len(np.unique(y)) < len(data.labels):
        return None
    with monitor.phase("some rows first") as told:
        training = Training(X, y, weight, np.ones(len(y), dtype=bool))
        plan = replace(plan_dense(estimator, training, joint), n_jobs=1)
        fit = fit_dense(plan, y if joint else np.where(y == 1, 1.0, -1.0), SILENT, 0)
        told({"log_evidence": fit.log_evidence})
    own = fit.attributes
    if "average" not in own:
        return KernelNodes(own["kernel"])
    heaviest = with_theta(plan.kernel, own["theta"][np.argmax(own["average"].weight)])
    if not averages_as_dense(estimator, data):
        return KernelNodes(heaviest)
    return KernelNodes(heaviest, own["average"], own["theta"], own["anisotropy"])


def averages_as_dense(estimator, data):
    """Return whether a fit takes the kernels of the dense average over all rows, which are few.

    Fewer points than that ask for kernels of their own, and passes through them cost less. Points
    that are asked to move do so under the heaviest of these kernels.
    """
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    by_default = estimator.optimizer == "auto"
    by_passes = estimator.batch_size is None and estimator.site_memory == "scalars"
    given, (most, of_a_point) = estimator.inducing_points, LIMITS.averaged_through_points
    m = inducing_count(estimator) if given is None else len(given)
    most = LIMITS.first_rows if estimator.learn_inducing not in ("auto", False) else most
    few = max(data.weight, sum(data.sizes)) <= min(most, LIMITS.first_rows, of_a_point * m)
    binary = len(data.labels) == 2 and estimator.multi_class != "joint"
    return default and by_default and by_passes and few and binary


def _has_own_lengths(estimator, data, optimizer, begins):
    """Return whether the default kernel gets a length for each column, as in dense fits."""
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    learned = optimizer in STEP_RULES and data.weight > LIMITS.dense
    return (begins or (default and learned)) and 1 < len(data.var) <= LIMITS.lengths


def _moves_inducing(estimator, kernel, many):
    if estimator.optimizer is None:
        return False
    if estimator.learn_inducing == "auto":
        return many and has_input_gradient(kernel)
    if estimator.learn_inducing:
        check_input_gradient(kernel)
    return bool(estimator.learn_inducing)


def labels_of(estimator, joint, copies=None):
    """Return what rows say to passes: all classes jointly or binary problems, of so many `copies`.

    These are None unless one averaged site stands for all.
    """
    if joint:
        return JointLabels(CLASS_LIKELIHOODS[estimator.likelihood], len(estimator.classes_))
    factor, rule = factor_of(estimator), rule_of_power(estimator.power)
    return BinaryProblems(factor, rule, estimator._n_problems, copies)


def plan_inducing(estimator, data: PartitionedRows, joint, seed, known=None):
    """Return the `InducingPlan` for rows in partitions, from the last fit where that is wanted.

    `joint` says whether all classes share a posterior; `known` are the `KernelNodes` of some of the
    rows, None where they are not known. With an average they are those of the fit.
    """
    averaged = estimator.site_memory == "average"
    labels = labels_of(estimator, joint, data.weight if averaged else None)
    nodes = known if known is not None and known.average is not None else None
    begun, n_rows = known is not nodes, sum(data.sizes)
    begins = begins_with_some_rows(estimator, n_rows)
    kernel = known.kernel if known else initial_kernel(estimator, float(data.var.sum()))
    lengths = column_lengths(kernel, len(data.var))
    m = inducing_count(estimator, n_rows if begins else None)
    Z = first_points(estimator, data.candidates, data.candidate_weight, seed, lengths, m=m)
    check_kernel(kernel, kernel(Z, Z))
    optimizer = checked_optimizer(estimator, labels.factor)
    own_lengths = _has_own_lengths(estimator, data, optimizer, begins)
    if own_lengths and not begun:
        kernel = with_own_lengths(kernel, len(data.var))
    n_restarts = estimator.n_restarts_optimizer if optimizer == "fmin_l_bfgs_b" else 0
    plan = InducingPlan(
        data=data,
        kernel=kernel,
        begun=begun,
        inducing_points=Z,
        labels=labels,
        # apart classes cost a fraction of joint ones, and find about the same kernel and points
        passing=labels_of(estimator, False) if joint and begins else labels,
        optimizer=optimizer,
        learn_inducing=_moves_inducing(estimator, kernel, begins or data.weight >= LIMITS.dense),
        restarts=random_starts(kernel.bounds, n_restarts, np.random.RandomState(seed)),
        sites=None,
        batch_size=estimator.batch_size,
        learning_rate=estimator.learning_rate,
        flat=estimator.hyperparameters == "mode"
        or (data.weight > LIMITS.prior_of_lengths and not own_lengths),
        averaging=_averaging(estimator, kernel, data, joint),
        nodes=nodes,
        sweeps=sweeps_of(estimator),
        max_iter=estimator.max_iter,
        jitter=estimator.jitter,
        seed=seed,
        kind=np.float32 if begun or data.weight >= LIMITS.single_passes else np.float64,
        tempered=joint and takes_temper(estimator),
    )
    _start_from(plan, estimator._last_fit, estimator.inducing_points is None)
    return plan


def _averaging(estimator, kernel, data, joint):
    """Return the `NormalPrior` of an average over variance and length, None for the mode."""
    settings = {
        "site_memory='average'": estimator.site_memory == "average",
        "optimizer=None": estimator.optimizer is None,
        "inducing points of several classes jointly": joint,
        **kernel_settings(kernel),
    }
    if not wants_average(estimator, sum(data.sizes), settings, sharp=True):
        return None
    return kernel_prior(kernel, factor_of(estimator), float(np.sqrt(data.var.sum())) or 1.0)


def _start_from(plan, last, move_points):
    """Let a plan start from the last `GPFit` where that had the same shape."""
    if last is None or last.sites is None or plan.labels.copies is not None:
        return
    if not isinstance(last.runs[0], InducingRun) or last.kernel.n_dims != plan.kernel.n_dims:
        return
    sites = np.moveaxis(last.sites[0], -1, 0) if last.joint else last.sites
    if last.joint != isinstance(plan.labels, JointLabels) or sites.shape != (
        plan.labels.n_sites,
        2,
        sum(plan.data.sizes),
    ):
        return
    plan.sites, plan.kernel = sites, plan.kernel.clone_with_theta(last.kernel.theta)
    if last.inducing_points.shape == plan.inducing_points.shape and move_points:
        plan.inducing_points = last.inducing_points


@dataclass
class InducingRun:
    """Outcome of passes that all problems share, before it becomes attributes.

    `attributes` are what an average adds; state and model are those of its heaviest node.
    """

    state: PassState
    model: Any
    history: dict[str, np.ndarray]
    reason: Reason
    n_sweeps: int
    log_evidence: float
    remark: str
    attributes: dict[str, Any] = field(default_factory=dict)


def posteriors_of(payload):
    """Return what predicts from a model, or from a node that has one: one a posterior."""
    model = getattr(payload, "model", payload)
    return model.labels.predictors(model.prior, model.posteriors)


def gp_fit(run, sites=None, loo_proba=None):
    """Return the `GPFit` of a run with `model`, with sites (C, 2, n) of rows or None."""
    joint = isinstance(run.model.labels, JointLabels)
    return GPFit(
        runs=[run],
        posteriors=posteriors_of(run.model),
        kernel=run.model.prior.kernel,
        n_sweeps=run.n_sweeps,
        # as dense ones: those of a joint problem have classes last
        sites=np.moveaxis(sites, 0, -1)[None] if joint and sites is not None else sites,
        loo_proba=loo_proba,
        inducing_points=run.model.prior.Z,
        joint=joint,
    )


def fit_inducing(plan, run, monitor):
    """Learn the hyperparameters if asked, converge EP on an open map, and return the `GPFit`."""
    ep, hyper, trace, average = plan.engine(run), plan.hyperparameters(), Trace(monitor), None
    passes = plan.engine(run, plan.passing)
    state, end = _learned(plan, passes, hyper, trace)
    asked = end.reason == "asked"
    if plan.passing is not plan.labels:
        state = ep.zero(state.prior)
    elif end.n_steps and state.sites is not None:
        state = _renewed(ep, state, plan.batch_size is not None and hyper.learns and not asked)
    if plan.averaging is not None and not asked:
        average = average_over_kernel(plan, ep, state, monitor)
    elif plan.nodes is not None:
        average = average_at_nodes(plan, ep, state, monitor)
    if average is not None:
        heaviest = average.heaviest.payload.state
        state = ep.moved(heaviest, heaviest.prior)
    own = _converged(plan, ep, state, end, trace)
    if own.state.sites is None:
        return gp_fit(own)
    fit = gp_fit(own, np.concatenate(own.state.sites, axis=2))
    if average is None:
        if plan.tempered:
            each = ep.run(cavities_of_part, own.state.sites, own.model, ep.classes)
            *node, y, copies = (np.concatenate(values) for values in zip(*each, strict=True))
            told = left_out_classes(plan.labels.factor, [node], np.ones(1), (y, copies), True)
            return fit._replace(temper=told["temper"], loo_proba=np.exp(told["loo_log"][0]))
        loo = ep.leave_one_out(own.model, own.state.sites)
        return fit._replace(loo_proba=np.exp(loo))
    own.log_evidence = average.log_evidence
    return fit._replace(**_mixed_nodes(plan, ep, average, own))


def _renewed(ep, state, ahead):
    """Return the state with its sums made afresh from its sites.

    Between minibatches the posterior runs `ahead` of the sites; it tells what they would be.
    """
    if ahead:
        return ep.renew(ep.model(state), state.sites)
    return ep.restate(state.prior, state.sites)


def _converged(plan, ep, state, end, trace):
    """Return the `InducingRun` at the fixed point, without what leaving rows out says.

    Learning that was asked to stop leaves the sites as they are.
    """
    if end.reason == "asked" and plan.passing is plan.labels:
        # figures are those of one more pass
        model = ep.model(state)
        final = ep.figures(model, ep.one_pass(model, state.sites)[0])
        told = ending_in(trace.history, final), end.reason, 0
    else:
        most = plan.sweeps["max_iter"]
        watch = SILENT if end.reason == "asked" else trace
        limits = dict(max_iter=most if end.n_steps else min(most, plan.max_iter), monitor=watch)
        result, state, model = ep.solve(state, **plan.sweeps | limits)
        final = result.evaluation.record
        told = trace.history, worst_reason([end.reason, result.reason]), result.n_iter
    return InducingRun(state, model, *told, float(final["log_evidence"]), remark_of(end))


def _learned(plan, ep, hyper, trace):
    """Return the state at the learned hyperparameters and the `LearningEnd`."""
    prior, vector = hyper.prior(hyper.start), hyper.start
    state = ep.zero(prior)
    if plan.sites is not None and plan.passing is plan.labels:
        state = ep.restate(prior, np.split(plan.sites, np.cumsum(ep.sizes)[:-1], axis=2))
    rule = STEP_RULES.get(plan.optimizer, STEP_RULES["adam"])(plan.learning_rate)
    if plan.batch_size is not None:
        return learn_by_minibatches(ep, hyper, state, rule, plan, trace)
    if not hyper.learns:
        return state, KEPT
    if plan.optimizer == "fmin_l_bfgs_b":
        return _learned_at_fixed_points(plan, ep, hyper, state, trace)
    limits: dict[str, Any] = dict(max_iter=plan.max_iter)
    begun = learn_on_more_and_more_rows(ep, hyper, rule, plan, trace.monitor)
    if begun is not None:
        vector, state, due = begun[0], begun[1] or state, begun[2]
        most = plan.max_iter if plan.begun else due
        limits = dict(max_iter=most, due=due, enough=LEARNING.settled_after)
    limits |= dict(weight=plan.data.weight, damping=plan.sweeps["damping"], kind=plan.kind)
    state, _, end = learn_by_passes(ep, hyper, vector, state, rule, trace=trace, **limits)
    return state, end


def _learned_at_fixed_points(plan, ep, hyper, state, trace):
    """Search by L-BFGS-B; the final run starts from the first sites, whatever path was taken."""
    free = hyper.start[hyper.n_theta :]
    problem = plan.problem(ep, state, tol=max(plan.sweeps["tol"], LEARNING_TOL))
    found = search_mode(
        Nodes(problem, hyper).evaluate,
        hyper.start,
        hyper.bounds,
        plan.labels.accuracy,
        max_iter=plan.max_iter,
        starts=[np.concatenate([t, free]) for t in plan.restarts],
        monitor=trace,
    )
    mode, end = or_refuse(found)
    prior = mode.payload.state.prior
    return ep.zero(prior) if state.sites is None else ep.restate(prior, state.sites), end


def average_over_kernel(plan, ep, state, monitor):
    """Return the `Average` about the kernel of a state, None where EP has no fixed point there.

    The payload of its nodes are `InducingNode`s. The evidence is that of all binary problems.
    """
    theta = state.prior.kernel.theta
    _, _, apart = learned_coordinates(state.prior.kernel)
    space = KernelScales.at(plan.kernel, theta, plan.averaging, apart)
    evaluate = Nodes(plan.problem(ep, state, state.prior.Z, tol=1e-2, max_iter=40), space).evaluate
    with monitor.phase("integration over hyperparameters") as told:
        search: dict[str, Any] = dict(max_iter=plan.max_iter, monitor=StepsOfPhase(told))
        found = search_mode(evaluate, space.phi(theta), space.bounds, TO_THE_MODE, **search)
    if found is None:
        return None
    mode, end = found
    if end.reason == "asked":
        return average_of([mode], np.array([mode.objective]))
    # workers have the partitions, whose pool is open: nodes come one after another
    if sum(ep.sizes) <= LIMITS.several:
        return integrate(evaluate, mode, space.bounds, 1, monitor)
    curvature, _ = curvature_at(evaluate, mode, space.bounds)
    return sample_about(partial(evaluate, slopes=False), mode, space.bounds, curvature, 1, monitor)


def average_at_nodes(plan, ep, state, monitor):
    """Return the `Average` over the nodes of a dense one, None where EP has no fixed point at any.

    They have the weights of importance sampling: those of the dense average, times how far the
    evidence through the points is above the dense one. Points that were moved favour the kernel
    under which they were: the weights, and the evidence, are then the dense ones.
    """
    problem = plan.problem(ep, state, state.prior.Z, tol=1e-2, max_iter=40)
    _, dense, theta, spread = plan.nodes
    nodes: list[Node] = []
    log_mass = []
    with monitor.phase("integration over hyperparameters") as told:
        for own, s, weight, whole in zip(theta, spread, dense.weight, dense.nodes, strict=True):
            space = KernelScales.at(plan.kernel, own, None, s)
            near = nodes[-1] if nodes else None
            node = Nodes(problem, space).evaluate(space.phi(own), near, slopes=False)
            if node is None:
                continue
            nodes.append(node._replace(log_prior=whole.log_prior))
            ratio = 0.0 if plan.learn_inducing else node.log_evidence - whole.log_evidence
            log_mass.append(np.log(weight) + ratio)
            if told({"log_density": node.objective}):
                break
    if not nodes:
        return None
    return average_of(nodes, np.array(log_mass) + dense.log_evidence)


def _mixed_nodes(plan, ep, average, run):
    """Return the fields of a `GPFit` that are of all nodes; the run is of the heaviest, refined."""
    own = [n.payload for n in average.nodes]
    heaviest, weight = int(np.argmax(average.weight)), average.weight
    own[heaviest] = own[heaviest]._replace(state=run.state, model=run.model)
    theta, each = np.array([n.theta for n in own]), [posteriors_of(n) for n in own]
    loo = np.array([ep.leave_one_out(n.model, n.state.sites) for n in own])
    copies = ep.run(copies_of_part, run.state.sites, run.model, ep.classes)
    log_weight = log_weights_without(weight, loo, np.concatenate(copies))
    kernel = with_theta(plan.kernel, weight @ theta)
    run.attributes = attributes_of_nodes(average, theta, learned_coordinates(kernel)[0])
    mixtures = [AveragedInducing(list(parts), weight) for parts in zip(*each, strict=True)]
    loo_proba = np.exp(np.logaddexp.reduce(log_weight + loo, axis=0))
    return dict(posteriors=mixtures, kernel=kernel, loo_proba=loo_proba)
