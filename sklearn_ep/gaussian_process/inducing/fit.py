"""Fits through inducing points: what one is made of, and the recipe.

Learn kernel and points, average over the kernel where that is asked for, converge, predict. Points
stay where the mode put them while the kernel is averaged over. Or follow a dense average: its nodes
and sites stay, and the points move towards it.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from ..._engine import hyper
from ..._engine.loop import SILENT, Reason, StepsOfPhase, Trace, worst_reason
from ..._engine.noisy_argmax import CLASS_LIKELIHOODS
from ..._engine.partition import PartMap
from ..._engine.rules import rule_of_power
from ..._estimator.averaged import AveragedPosterior
from ..._estimator.checks import Training, count_problems, same_units
from .. import _base as base
from .. import _hyperparameters as spaces
from .._dense import plan_dense
from .._dense_fit import fit_dense
from .._kernels import has_input_gradient, with_own_lengths, with_theta
from .._limits import LIMITS
from . import learning, rows
from .classes import JointLabels, cavities_of_part
from .ep import BinaryProblems, InducingEP, PassState
from .values import InducingGP, InducingPrior


class SomeRows(NamedTuple):
    """What a dense fit to some of the rows tells: the heaviest kernel, and of all rows all nodes.

    `fit` is the `BinaryFit` of an average to all rows: row i of them is number `place` (n,) of its
    distinct rows, which have `copies`. None where they are not all, or where the kernel is one.
    """

    kernel: Kernel
    fit: Any = None
    place: Any = None
    copies: Any = None


# Correlations between which a first kernel tells points apart, and some from others. Of 30 fits
# from lengths of 1e3, 30, .01 and 1e-5, which it does not, 24 ended at log losses of .69 to .70. Of
# 20 fits to five sets the mean log loss is .256 to .257 with limits of 1e-4, 1e-2, .8, .9 and .99.
_JOINED = (1e-3, 0.95)


@dataclass
class InducingPlan:
    """All of a fit through inducing points that is decided before it starts.

    `labels` are what rows say: binary problems, one for two classes and one a class otherwise,
    which share kernel, inducing points and every pass over the rows, or all classes jointly.
    `passing` are those of the passes that learn.
    `sites` (C, 2, n) are those to start from, None for empty ones. `flat` asks for the kernel of
    the largest evidence, without a prior. `averaging` is the `NormalPrior` of an average over
    variance and length, None for the mode; `known` is what a dense fit to some of the rows tells,
    or to all, None without one. `sweeps` are keywords of `InducingEP.solve`, `tempered` says
    whether rows left out choose a temper. `as_dense` says whether the average is that of a dense
    fit, `begun` whether one has told where the kernel begins; `kind` is the float type of passes.
    """

    data: rows.PartitionedRows
    kernel: Kernel
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
    known: SomeRows | None
    sweeps: dict[str, Any]
    max_iter: int
    jitter: float
    seed: int
    tempered: bool
    as_dense: bool = field(init=False)
    begun: bool = field(init=False)
    kind: Any = field(init=False)

    def __post_init__(self):
        self.as_dense = self.known is not None and self.known.fit is not None
        self.begun = self.known is not None and not self.as_dense
        self.kind = np.float32 if self.data.weight >= LIMITS.single_passes else np.float64

    @property
    def learns_apart(self):
        """Whether passes of each class against the rest learn for all classes jointly."""
        return isinstance(self.labels, JointLabels) and self.passing is not self.labels

    def hyperparameters(self):
        """Return what is learned; a column without spread keeps its inducing coordinates."""
        first = self.kernel, self.inducing_points, np.sqrt(self.data.var), self.jitter
        return learning.Hyperparameters(
            *first,
            learn_kernel=self.optimizer is not None and not self.as_dense,
            learn_inputs=self.learn_inducing,
            decoupled=self.optimizer in learning.STEP_RULES,
            lengths_near=not self.flat,
        )

    def engine(self, run, labels=None):
        """Return EP over the partitions of an open map."""
        return InducingEP(run, self.data.sizes, self.data.classes, labels or self.labels)

    def problem(self, ep, state, points=None, **steps):
        """Return the `InducingProblem` of all that is learned, or of the kernel at given points."""
        space = self.hyperparameters()
        if points is not None:
            alone = dict(learn_kernel=True, learn_inputs=False, decoupled=False, lengths_near=False)
            space = replace(space, Z=points, **alone)
        return learning.InducingProblem(ep, space, state, self.sweeps | steps)

    def value_and_gradient(self, theta, fit, n_jobs, slopes):
        """Return log evidence at theta, EP run from the state of the fit, and its gradient."""
        with PartMap(self.data.parts, n_jobs) as run:
            problem = self.problem(self.engine(run), fit.runs[0].state, fit.inducing_points)
            node = spaces.or_refuse(problem.at(theta, None, slopes))
            if slopes and not self.labels.exact_gradient:
                node = node._replace(slope=problem.differences(node))
        return float(node.log_evidence), node.slope


def checked_optimizer(estimator, factor):
    """Return the optimizer in use; only log-concave factors stay proper between passes."""
    if estimator.optimizer == "auto":
        return "adam" if factor.log_concave else "fmin_l_bfgs_b"
    if estimator.optimizer in learning.STEP_RULES and not factor.log_concave:
        raise ValueError(
            f"optimizer={estimator.optimizer!r} needs a log-concave likelihood; "
            "use 'fmin_l_bfgs_b'."
        )
    return estimator.optimizer


def kernels_of_some_rows(estimator, run, data, monitor, joint):
    """Return the `SomeRows` of the dense fit to some of the rows, or to all where they are few.

    Of some it is the kernel that weighs most in the average, whose sites nobody asks for; None
    where a class has none of these.
    """
    X, y, weight, place = rows.distinct_rows(run, data, LIMITS.first_rows, 0)
    if len(np.unique(y)) < len(data.labels):
        return None
    with monitor.phase("some rows first") as told:
        training = Training(X, y, weight, np.ones(len(y), dtype=bool))
        plan = replace(plan_dense(estimator, training, joint), n_jobs=1)
        labels = y if joint else np.where(y == 1, 1.0, -1.0)
        followed = averages_as_dense(estimator, data)
        fit = fit_dense(plan, labels, SILENT, 0, kernel_only=not followed)
        told({"log_evidence": fit.log_evidence})
    if not followed:
        return SomeRows(with_theta(plan.kernel, fit.theta))
    own = fit.attributes
    heaviest = with_theta(plan.kernel, own["theta"][np.argmax(own["average"].weight)])
    return SomeRows(heaviest, fit, place, weight)


def averages_as_dense(estimator, data):
    """Return whether a fit takes the kernels of the dense average over all rows, which are few.

    Fewer points than that ask for kernels of their own, and passes through them cost less. Points
    that are asked to move do so under the heaviest of these kernels.
    """
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    by_default = estimator.optimizer == "auto"
    by_passes = estimator.batch_size is None and estimator.site_memory == "scalars"
    most, of_a_point = LIMITS.averaged_through_points
    most = LIMITS.first_rows if estimator.learn_inducing not in ("auto", False) else most
    most = min(most, LIMITS.first_rows, of_a_point * base.inducing_count(estimator))
    few = max(data.weight, sum(data.sizes)) <= most
    binary = len(data.labels) == 2 and estimator.multi_class != "joint"
    return default and by_default and by_passes and few and binary


def _has_own_lengths(estimator, data, optimizer, begins):
    """Return whether the default kernel gets a length for each column, as in dense fits."""
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    learned = optimizer in learning.STEP_RULES and data.weight > LIMITS.dense
    return (begins or (default and learned)) and 1 < len(data.var) <= LIMITS.lengths


def _moves_inducing(estimator, kernel, many):
    if estimator.optimizer is None:
        return False
    if estimator.learn_inducing == "auto":
        return many and has_input_gradient(kernel)
    if estimator.learn_inducing:
        base.check_input_gradient(kernel)
    return bool(estimator.learn_inducing)


def labels_of(estimator, joint, copies=None):
    """Return what rows say to passes: all classes jointly or binary problems.

    Where one averaged site stands for all rows it is that of so many `copies`.
    """
    if joint:
        return JointLabels(CLASS_LIKELIHOODS[estimator.likelihood], len(estimator.classes_))
    factor, rule = base.factor_of(estimator), rule_of_power(estimator.power)
    averaged = estimator.site_memory == "average"
    return BinaryProblems(factor, rule, count_problems(estimator), copies if averaged else None)


def _labels_of_passes(estimator, labels, moves):
    """Return what rows say to passes that learn, which may move inducing points.

    Along the evidence of EP these fit noise. It is what the mode and any other power ask for.
    """
    asked = estimator.hyperparameters == "mode" or estimator.power != 1
    batches = estimator.batch_size is not None or labels.copies is not None
    if asked or batches or not moves or isinstance(labels, JointLabels):
        return labels
    return replace(labels, share=learning.LEARNING.share)


def plan_inducing(estimator, data: rows.PartitionedRows, joint, seed, known=None):
    """Return the `InducingPlan` for rows in partitions, from the last fit where that is wanted.

    `joint` says whether all classes share a posterior, `known` is what a dense fit to some of the
    rows tells, or to all.
    """
    labels = labels_of(estimator, joint, data.weight)
    begins = base.begins_with_some_rows(estimator, sum(data.sizes))
    optimizer = checked_optimizer(estimator, labels.factor)
    own_lengths = _has_own_lengths(estimator, data, optimizer, begins)
    kernel, Z = _first_kernel_and_points(estimator, data, seed, known, begins)
    if own_lengths and known is None:
        kernel = with_own_lengths(kernel, len(data.var))
    n_restarts = estimator.n_restarts_optimizer if optimizer == "fmin_l_bfgs_b" else 0
    many = data.weight > LIMITS.prior_of_lengths and not own_lengths
    moves = _moves_inducing(estimator, kernel, begins or data.weight >= LIMITS.dense)
    # apart classes cost a fraction of joint ones, and find about the same kernel and points
    passing = labels_of(estimator, False) if joint and begins else labels
    plan = InducingPlan(
        data=data,
        kernel=kernel,
        inducing_points=Z,
        labels=labels,
        passing=_labels_of_passes(estimator, passing, moves and optimizer in learning.STEP_RULES),
        optimizer=optimizer,
        learn_inducing=moves,
        restarts=spaces.random_starts(kernel.bounds, n_restarts, np.random.RandomState(seed)),
        sites=None,
        batch_size=estimator.batch_size,
        learning_rate=estimator.learning_rate,
        flat=estimator.hyperparameters == "mode" or many,
        averaging=_averaging(estimator, kernel, data, joint),
        known=known,
        sweeps=base.sweeps_of(estimator),
        max_iter=estimator.max_iter,
        jitter=estimator.jitter,
        seed=seed,
        tempered=joint and base.takes_temper(estimator),
    )
    _start_warm(plan, estimator)
    return plan


def _first_kernel_and_points(estimator, data, seed, known, begins):
    """Return the kernel that is given, known or the default, and the first inducing points."""
    kernel = known.kernel if known else base.initial_kernel(estimator, float(data.var.sum()))
    m = base.inducing_count(estimator, sum(data.sizes) if begins else None)
    Z = rows.first_points(estimator, data.candidates, data.candidate_weight, seed, kernel, m=m)
    K = kernel(Z, Z)
    base.check_kernel(kernel, K)
    learns = estimator.kernel is not None and estimator.optimizer is not None
    return _in_sight(kernel, K, data.spread or 1.0) if learns else kernel, Z


def _in_sight(kernel, K, spread):
    """Return a kernel to learn, its lengths about the spread of the rows where K says nothing.

    K (m, m) is that of the inducing points. Where it joins all of them to each other, or none, the
    evidence is level, and steps between passes lead nowhere.
    """
    theta, (lowest, highest) = kernel.theta, _JOINED
    if spaces.n_length_scales(kernel) == 0 or len(K) < 2:
        return kernel
    joined = K[~np.eye(len(K), dtype=bool)] / K[0, 0]  # stationary: the diagonal is one number
    places = spaces.KernelScales.at(kernel, theta).lengths
    if not len(places) or (joined.min() <= highest and joined.max() >= lowest):
        return kernel
    theta[places] += np.log(spread) - np.mean(theta[places])
    return with_theta(kernel, np.clip(theta, *kernel.bounds.T))


def _averaging(estimator, kernel, data, joint):
    """Return the `NormalPrior` of an average over variance and length, None for the mode."""
    settings = {
        "site_memory='average'": estimator.site_memory == "average",
        "optimizer=None": estimator.optimizer is None,
        "inducing points of several classes jointly": joint,
        **spaces.kernel_settings(kernel),
    }
    if not spaces.wants_average(estimator, sum(data.sizes), settings, sharp=True):
        return None
    return spaces.kernel_prior(kernel, base.factor_of(estimator), data.spread or 1.0)


def may_start_warm(estimator, data):
    """Return whether the last fit had passes over as many rows, in the same units."""
    last = estimator._last_fit
    if last is None or last.sites is None or getattr(last.runs[0], "state", None) is None:
        return False
    return last.sites.shape[2] == sum(data.sizes) and same_units(last.spread, data.spread)


def _start_warm(plan, estimator):
    """Let a plan start from the last `GPFit` where that had the same shape and units."""
    last = estimator._last_fit
    if not may_start_warm(estimator, plan.data) or plan.labels.copies is not None:
        return
    sites = np.moveaxis(last.sites[0], -1, 0) if last.joint else last.sites
    shape = plan.labels.n_sites, 2, sum(plan.data.sizes)
    alike = sites.shape == shape and last.kernel.n_dims == plan.kernel.n_dims
    if not alike or last.joint != isinstance(plan.labels, JointLabels):
        return
    plan.sites, plan.kernel = sites, plan.kernel.clone_with_theta(last.kernel.theta)
    Z = last.inducing_points
    if estimator.inducing_points is None and Z.shape == plan.inducing_points.shape:
        plan.inducing_points = Z


@dataclass
class PassRun:
    """Outcome of passes that all problems share, before it becomes attributes.

    `attributes` are what an average adds; state and model are those of its heaviest node. A stream
    has its `StreamPosterior` and no state of all rows.
    """

    state: PassState | None
    model: Any
    history: dict[str, np.ndarray]
    reason: Reason
    n_sweeps: int
    log_evidence: float
    remark: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    stream: Any = None


def posteriors_of(payload):
    """Return what predicts from a model, or from a node that has one: one a posterior."""
    model = getattr(payload, "model", payload)
    return model.labels.predictors(model.prior, model.posteriors)


def attributes_so_far(payload):
    """Return what callbacks predict with in the middle of a fit."""
    return {"_posteriors": posteriors_of(payload)}


def gp_fit(run, sites=None, loo_proba=None, spread=1.0):
    """Return the `GPFit` of a run with `model`, with sites (C, 2, n) of rows or None."""
    joint = isinstance(run.model.labels, JointLabels)
    return base.GPFit(
        runs=[run],
        posteriors=posteriors_of(run.model),
        kernel=run.model.prior.kernel,
        n_sweeps=run.n_sweeps,
        # as dense ones: those of a joint problem have classes last
        sites=np.moveaxis(sites, 0, -1)[None] if joint and sites is not None else sites,
        loo_proba=loo_proba,
        inducing_points=run.model.prior.Z,
        joint=joint,
        spread=spread,
    )


def fit_inducing(plan, run, monitor):
    """Return the `GPFit` of passes over an open map, or of a dense average through points."""
    ep, trace = plan.engine(run), Trace(monitor)
    average, own = (follow_dense if plan.as_dense else _learned_and_converged)(plan, ep, trace)
    if own.state.sites is None:
        return gp_fit(own)
    fit = gp_fit(own, np.concatenate(own.state.sites, axis=2), spread=plan.data.spread)
    if average is None:
        copies = rows.copies_left_out_of_parts(run, plan.data)
        how = own.model, own.state.sites, copies
        if plan.tempered:
            node = ep.leave_one_out(*how, cavities_of_part).swapaxes(0, 1)
            own_rows = *rows.labels_and_copies(run, plan.data), np.concatenate(copies)
            told = base.left_out_classes(plan.labels.factor, [node], np.ones(1), own_rows, True)
            return fit._replace(temper=told["temper"], loo_proba=np.exp(told["loo_log"][0]))
        return fit._replace(loo_proba=np.exp(ep.leave_one_out(*how)))
    own.log_evidence = average.log_evidence
    return fit._replace(**_mixed_nodes(plan, ep, average, own))


def _learned_and_converged(plan, ep, trace):
    """Learn the hyperparameters if asked, converge EP; return the `Average` or None, and the run.

    The `PassRun` is that of the heaviest node of an average.
    """
    space, average = plan.hyperparameters(), None
    state, end = _learned(plan, plan.engine(ep.run, plan.passing), space, trace)
    asked = end.reason == "asked"
    if plan.learns_apart:
        state = ep.zero(state.prior)
    elif end.n_steps and state.sites is not None:
        # between minibatches the posterior runs ahead of the sites, and tells what they would be
        ahead = plan.batch_size is not None and space.learns and not asked
        # no name for the old sites, which would keep them: the memory of a fit is arrays of n
        if ahead:
            state = ep.renew(ep.model(state), state.sites)
        else:
            state = ep.restate(state.prior, state.sites)
    if plan.averaging is not None and not asked:
        average = average_over_kernel(plan, ep, state, trace.monitor)
    if average is not None:
        heaviest = average.heaviest.payload.state
        state = ep.moved(heaviest, heaviest.prior)
    return average, _converged(plan, ep, state, end, trace)


def _converged(plan, ep, state, end, trace):
    """Return the `PassRun` at the fixed point, without what leaving rows out says.

    Learning that was asked to stop leaves the sites as they are.
    """
    if end.reason == "asked" and not plan.learns_apart:
        # figures are those of one more pass
        model = ep.model(state)
        final = model.figures(ep.one_pass(model, state.sites)[0])
        told = base.ending_in(trace.history, final), end.reason, 0
    else:
        most = plan.sweeps["max_iter"]
        watch = SILENT if end.reason == "asked" else trace
        limits = dict(max_iter=most if end.n_steps else min(most, plan.max_iter), monitor=watch)
        result, state, model = ep.solve(state, **plan.sweeps | limits)
        final = result.evaluation.record
        told = trace.history, worst_reason([end.reason, result.reason]), result.n_iter
    return PassRun(state, model, *told, float(final["log_evidence"]), base.remark_of(end))


def _learned(plan, ep, space, trace):
    """Return the state at the learned hyperparameters and the `LearningEnd`."""
    prior, vector = space.prior(space.start), space.start
    state = ep.zero(prior)
    if plan.sites is not None and not plan.learns_apart:
        state = ep.restate(prior, np.split(plan.sites, np.cumsum(ep.sizes)[:-1], axis=2))
    rule = learning.STEP_RULES.get(plan.optimizer, learning.STEP_RULES["adam"])(plan.learning_rate)
    if plan.batch_size is not None:
        return learning.learn_by_minibatches(ep, space, state, rule, plan, trace)
    if not space.learns:
        return state, hyper.KEPT
    if plan.optimizer == "fmin_l_bfgs_b":
        return _learned_at_fixed_points(plan, ep, space, state, trace)
    most, limits = plan.max_iter, dict[str, Any]()
    begun = learning.learn_on_more_and_more_rows(ep, space, rule, plan, trace.monitor)
    if begun is not None:
        vector, state, due = begun[0], begun[1] or state, begun[2]
        most = plan.max_iter if plan.begun else due
        limits = dict(due=due, enough=learning.LEARNING.settled_after)
    own = ep, space, vector, state, rule, plan, trace, most, plan.data.weight
    state, _, end = learning.learn_by_passes(*own, **limits)
    return state, end


def _learned_at_fixed_points(plan, ep, space, state, trace):
    """Search by L-BFGS-B; the final run starts from the first sites, whatever path was taken."""
    free = space.start[space.n_theta :]
    problem = plan.problem(ep, state, tol=max(plan.sweeps["tol"], spaces.LEARNING_TOL))
    how: dict[str, Any] = dict(max_iter=plan.max_iter, monitor=trace)
    how["starts"] = [np.concatenate([t, free]) for t in plan.restarts]
    own = hyper.Nodes(problem, space).evaluate, space.start, space.bounds, plan.labels.accuracy
    mode, end = spaces.or_refuse(hyper.search_mode(*own, **how))
    prior = mode.payload.state.prior
    return ep.zero(prior) if state.sites is None else ep.restate(prior, state.sites), end


def average_over_kernel(plan, ep, state, monitor):
    """Return the `Average` about the kernel of a state, None where EP has no fixed point there.

    The payload of its nodes are `InducingNode`s. The evidence is that of all binary problems.
    """
    theta = state.prior.kernel.theta
    _, _, apart = spaces.learned_coordinates(state.prior.kernel)
    space = spaces.KernelScales.at(plan.kernel, theta, plan.averaging, apart)
    problem = plan.problem(ep, state, state.prior.Z, tol=5e-3, max_iter=40)
    evaluate = hyper.Nodes(problem, space).evaluate
    own = space.phi(theta), space.bounds, hyper.TO_THE_MODE
    with monitor.phase("integration over hyperparameters") as told:
        search: dict[str, Any] = dict(max_iter=plan.max_iter, monitor=StepsOfPhase(told))
        found = hyper.search_mode(evaluate, *own, **search)
    if found is None:
        return None
    mode, end = found
    if end.reason == "asked":
        return hyper.average_of([mode], np.array([mode.objective]))
    # workers have the partitions, whose pool is open: nodes come one after another
    if sum(ep.sizes) <= LIMITS.several:
        return hyper.integrate(evaluate, mode, space.bounds, 1, monitor)
    curvature, _ = hyper.curvature_at(evaluate, mode, space.bounds)
    evaluate = partial(evaluate, slopes=False)
    return hyper.sample_about(evaluate, mode, space.bounds, curvature, 1, monitor)


def follow_dense(plan, ep, trace):
    """Return a dense average of all rows as seen through inducing points, and its `PassRun`.

    At each node the sites are the dense ones: of all posteriors through the points theirs has the
    smallest divergence from the dense one (Titsias 2009). Weights and evidence stay dense.
    """
    known, dense, nodes = plan.known, plan.known.fit, []
    average, theta, spread = (dense.attributes[k] for k in ("average", "theta", "anisotropy"))
    heaviest = int(np.argmax(average.weight))
    with trace.monitor.phase("inducing points") as step:
        Z, end = nearest_points(plan, heaviest, StepsOfPhase(step))
    trace.begin()
    for k, node in enumerate(average.nodes):
        prior = InducingPrior(with_theta(plan.kernel, theta[k]), Z, plan.jitter)
        sites = (dense.posterior.posteriors[k].sites() / known.copies)[None, :, known.place]
        state = ep.restate(prior, np.split(sites, np.cumsum(ep.sizes)[:-1], axis=2))
        told = node.log_evidence, node.residual, None, spread[k]
        payload = learning.InducingNode(theta[k], state, ep.model(state), *told)
        nodes.append(node._replace(payload=payload))
    _, state, model, log_evidence, residual, *_ = nodes[heaviest].payload
    trace.end({"residual": residual, "log_evidence": log_evidence}, model)
    reason, n_sweeps = worst_reason([dense.reason, end.reason]), dense.attributes["n_sweeps"]
    remark = dense.remark or base.remark_of(end)
    run = PassRun(state, model, trace.history, reason, n_sweeps, log_evidence, remark)
    return average._replace(nodes=nodes), run


def nearest_points(plan, node, monitor):
    """Return the points (m, d) through which a posterior is nearest to the dense one at a node.

    They maximise the bound on the log evidence of the dense sites, which is below it by the
    divergence; points that stay are the first ones. Returns them and the `LearningEnd`.
    """
    space, dense = plan.hyperparameters(), plan.known.fit.posterior.posteriors[node]
    precision, shift = dense.sites()

    def at(vector, _):
        latent = InducingGP(dense.kernel, dense.X, space.prior(vector).Z, plan.jitter)
        state, half = latent.posterior(precision, shift), -0.5 * precision
        slope = latent.evidence_gradient(state, half, inputs=plan.learn_inducing)[1]
        bound = state.log_evidence + half @ latent.extra_var
        return hyper.Node(vector, bound, 0.0, np.ravel(slope * space.unit), 0.0, latent.prior)

    how: dict[str, Any] = dict(max_iter=plan.max_iter, monitor=monitor)
    enough = hyper.Accuracy(ftol=learning.LEARNING.near_dense)
    found, end = spaces.or_refuse(hyper.search_mode(at, space.start, space.bounds, enough, **how))
    return found.payload.Z, end


def _mixed_nodes(plan, ep, average, run):
    """Return the fields of a `GPFit` that are of all nodes; the run is of the heaviest, refined."""
    own = [n.payload for n in average.nodes]
    heaviest, weight = int(np.argmax(average.weight)), average.weight
    own[heaviest] = own[heaviest]._replace(state=run.state, model=run.model)
    theta, each = np.array([n.theta for n in own]), [posteriors_of(n) for n in own]
    copies = rows.copies_left_out_of_parts(ep.run, plan.data)
    loo = np.array([ep.leave_one_out(n.model, n.state.sites, copies) for n in own])
    log_weight = hyper.log_weights_without(weight, loo, np.concatenate(copies))
    kernel = with_theta(plan.kernel, weight @ theta)
    run.attributes = base.attributes_of_nodes(average, theta, spaces.learned_coordinates(kernel)[0])
    mixtures = [AveragedPosterior(list(parts), weight) for parts in zip(*each, strict=True)]
    loo_proba = np.exp(np.logaddexp.reduce(log_weight + loo, axis=0))
    return dict(posteriors=mixtures, kernel=kernel, loo_proba=loo_proba)
