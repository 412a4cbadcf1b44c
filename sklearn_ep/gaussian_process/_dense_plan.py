"""What a fit with sites on the rows in memory is: its problem, its start, its settings.

A problem is binary, or has all classes jointly, with the full covariance of the rows or seen
through inducing points; the recipe in `_dense_fit` is one for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state

from .._engine.class_sites import (
    ClassSites,
    JointEP,
    class_update,
    empty_sites,
)
from .._engine.class_weights import MOST_WEIGHTS
from .._engine.loop import SILENT
from .._engine.noisy_argmax import CLASS_LIKELIHOODS
from .._engine.row_order import minibatches, row_keys
from .._engine.rules import rule_of_power
from .._engine.sites import Sites
from .._engine.whole import WholeEP
from .._estimator.averaged import AveragedClasses, AveragedPosterior
from .._estimator.checks import refuse_joint
from .._estimator.fitting import BinaryFit
from ._averaging_plan import (
    MOST_COLUMNS,
    Averaging,
    kernel_prior,
    kernel_settings,
    n_lengths,
    wants_average,
)
from ._base import check_kernel, warn_fewer_inducing
from ._dense_gp import DenseGPPosterior, KernelGP
from ._evidence import LEARNING_TOL, EvidencePoint, GivesUp, random_starts
from ._fitted import evidence_of_problems, left_out_labels, left_out_signs
from ._joint_gp import JointGP, JointGPPosterior
from ._kernel_scales import KernelScales
from ._kernels import with_own_lengths, with_theta
from .inducing.joint import JointInducingGP, JointInducingPosterior
from .inducing.plan import draw_seed
from .inducing.step_rules import STEP_RULES
from .inducing.values import InducingPrior

__all__ = [
    "BinaryModel",
    "DensePlan",
    "JointInducingModel",
    "JointModel",
    "last_sites",
    "plan_dense",
    "takes_joint",
]

# Residual to which sites are refined at the nodes of an average: the error of the evidence is of
# second order in it. Of several classes it is below a hundredth of a nat as a rule.
_NODE_TOL, _JOINT_NODE_TOL = 1e-2, 3e-2
# Residual of sites of several classes while the kernel moves, and what ends learning there: the
# gradient of the evidence is itself off by tenths of a nat and more.
_JOINT_TOL = 2e-2
# Before the last run single precision goes to so many times the tolerance, which the next step
# makes up for, if that is not below the digits it holds, and in so many sweeps at most.
_TIMES_TOL, _LEAST_SINGLE_TOL, _SINGLE_SWEEPS = 2.0, 2e-4, 8
# Nats, and share of theirs, by which a kernel has to beat the frequencies of labels, and how much
# shorter its length is at the next starts where it does not: on 100 rows of banana two searches of
# five end flat, and on 400 rows of two wiggly functions thirty nats below another mode.
_WORTH_A_KERNEL, _SHARE_WORTH = 2.0, 0.05
_SHORTER = 3.0, 9.0, 27.0, 81.0
# Of differences that give the gradient of several classes: step, residual of sites, most sweeps.
_SLOPE_STEP, _SLOPE_TOL, _SLOPE_SWEEPS = 0.01, 1e-6, 300
_FEW_ROWS, _JOINT_FEW_ROWS = 300, 150  # up to which learning starts on all rows
_SHARE = 1.0 / 3.0  # of the rows to start from else: their evidence costs a thirtieth
_JOINT_SEARCH: Mapping[str, Any] = dict(
    ftol=2e-6, gtol=1e-2, first_step=1.0, max_line_search=6, exact_gradient=False
)


@dataclass(frozen=True)
class BinaryModel:
    """One latent function, and labels in {-1, +1}."""

    factor: Any
    rule: Any
    learning_tol: ClassVar[float] = LEARNING_TOL
    search: ClassVar[Mapping[str, Any]] = {}
    exact_gradient: ClassVar[bool] = True
    node_tol: ClassVar[float] = _NODE_TOL
    mixture: ClassVar[type] = AveragedPosterior

    def ep(self, kernel, X, sign, weight, squares=None):
        """Return the fixed-point map of EP."""
        return WholeEP(KernelGP(kernel, X, squares), self.factor, sign, weight, self.rule)

    def gradient(self, ep, payload):
        """Return the gradient of the log evidence in theta at a fixed point."""
        return ep.evidence_gradient(payload[0])

    def rough(self):
        """Return the model for sites that a search passes: its factor costs next to nothing."""
        return self

    def no_sites(self, sign):
        """Return sites (2, n) that say nothing."""
        return np.zeros((2, len(sign)))

    def posterior(self, kernel, X, state):
        """Return what predicts."""
        return DenseGPPosterior(kernel, X, state, self.factor)

    def foretold_sites(self, posterior, X, sign):
        """Return sites (2, n) of rows that a posterior of others asks for."""
        empty = Sites.zero(len(X))
        return np.array(self.rule(self.factor, sign, empty, *posterior.latent(X)).sites)

    def left_out(self, result):
        """Return attributes that say how likely labels are from the other rows."""
        return left_out_signs(self.factor, result)


@dataclass(frozen=True)
class ClassModel:
    """One latent function a class under one kernel, and class indices as labels.

    `searching` says that sites are only passed, on the way to others.
    """

    factor: Any
    n_classes: int
    searching: bool = field(default=False, kw_only=True)
    learning_tol: ClassVar[float] = _JOINT_TOL
    search: ClassVar[Mapping[str, Any]] = _JOINT_SEARCH

    @property
    def exact_gradient(self):
        """Whether `gradient` is that of the log evidence, and not without the moves of sites."""
        return self.n_classes == 2

    def rough(self):
        """Return the model for sites that a search passes."""
        return replace(self, factor=self.factor.rough(), searching=True)

    def foretold_sites(self, posterior, X, y):
        """Return sites (2, n, K) of rows that a posterior of others asks for."""
        mean, cov = posterior.latent(X)
        empty = ClassSites(*empty_sites(y, mean.shape[1]))
        return np.array(class_update(self.factor, y, empty, mean, cov, 0.0).sites)

    def left_out(self, result):
        """Return attributes that say how likely labels are from the other rows."""
        return left_out_labels(result)


@dataclass(frozen=True)
class JointModel(ClassModel):
    """Classes with the full covariance of the rows."""

    node_tol: ClassVar[float] = _JOINT_NODE_TOL
    mixture: ClassVar[type] = AveragedClasses

    def ep(self, kernel, X, y, weight, squares=None):
        """Return the fixed-point map of EP."""
        return JointEP(JointGP(kernel, X, squares, self.searching), self.factor, y, weight)

    def gradient(self, ep, payload):
        """Return the gradient of the log evidence in theta at a fixed point."""
        return ep.structure.evidence_gradient(payload[0])

    def no_sites(self, y):
        """Return sites (2, n, K) that say nothing."""
        return empty_sites(y, self.n_classes)

    def posterior(self, kernel, X, state):
        """Return what predicts."""
        return JointGPPosterior(kernel, X, state, self.factor)


@dataclass(frozen=True)
class JointInducingModel(ClassModel):
    """Classes seen through inducing points, which stay where they are."""

    points: np.ndarray
    jitter: float

    def ep(self, kernel, X, y, weight, squares=None):
        """Return the fixed-point map of EP."""
        structure = JointInducingGP(kernel, X, self.points, self.jitter)
        return JointEP(structure, self.factor, y, weight)

    def gradient(self, ep, payload):
        """Return the gradient of the log evidence in theta at a fixed point."""
        state, update = payload
        return ep.structure.evidence_gradient(state, ep.weight * update.noise_slope)

    def posterior(self, kernel, X, state):
        """Return what predicts."""
        prior = InducingPrior(kernel, self.points, self.jitter)
        return JointInducingPosterior(prior, state, self.factor)


@dataclass
class DensePlan:
    """Everything the dense problems need besides their labels; sent to workers as it is.

    `X` are rows of numbers, or whatever objects the kernel compares; `y` holds class indices.
    `model` says what a problem is. `optimizer` is None, a function of the user, or anything else
    for L-BFGS-B; `averaging` says how to average over the kernel, and is None where one is learned.
    `starts` and `sites` have one entry a problem: the initial theta and the initial sites. `fresh`
    says that these are of no earlier fit; `shorter_lengths` (k, p) are theta for a search that ends
    flat, the best of which starts another, None for the one mode that a kernel of the caller's
    leads to.
    """

    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    kernel: Kernel
    model: BinaryModel | JointModel | JointInducingModel
    optimizer: Any
    restarts: np.ndarray
    starts: list
    sites: list
    tol: float
    max_iter: int
    max_sweeps: int
    damping: float
    accelerate: bool
    averaging: Averaging | None = None
    fresh: bool = True
    shorter_lengths: np.ndarray | None = None

    def ends_flat(self, y, log_evidence):
        """Return whether a kernel tells hardly more of labels y than how frequent they are."""
        count = np.bincount(np.unique(y, return_inverse=True)[1], self.weight)
        of_frequencies = count @ np.log(count / count.sum())
        return log_evidence < of_frequencies + max(_WORTH_A_KERNEL, -_SHARE_WORTH * of_frequencies)

    def rows_to_start_from(self):
        """Return some of the rows, where that saves time; None for few rows and warm starts.

        The choice depends on their ranks in each column alone: not on their order, nor on units,
        and equal rows stay together.
        """
        vectors = np.issubdtype(self.X.dtype, np.number)
        few = _FEW_ROWS if isinstance(self.model, BinaryModel) else _JOINT_FEW_ROWS
        if len(self.y) < few or not self.fresh or not vectors:
            return None
        ranks = [np.unique(column, return_inverse=True)[1] for column in self.X.T]
        keys = row_keys(np.column_stack(ranks).astype(float), 0)
        rows = next(minibatches(keys, self.weight, _SHARE * self.weight.sum()))
        return rows if len(np.unique(self.y[rows])) == len(np.unique(self.y)) else None

    def share(self, rows):
        """Return the share of the copies that some of the rows have."""
        return float(self.weight[rows].sum() / self.weight.sum())

    def part(self, rows):
        """Return the plan of some of the rows."""
        return replace(self, X=self.X[rows], y=self.y[rows], weight=self.weight[rows])

    def rough(self):
        """Return the plan for sites that a search passes."""
        return replace(self, model=self.model.rough())

    def sites_from_rows(self, y, rows, kernel, state, x):
        """Return sites of all rows to start from: those x of some, what these foretell of others.

        `state` is that of the posterior of these rows under the kernel.
        """
        posterior = self.model.posterior(kernel, self.X[rows], state)
        foretold = self.model.foretold_sites(posterior, self.X, y)
        foretold[:, rows] = x
        return foretold

    def ep(self, kernel, y, squares=None):
        """Return the fixed-point map of EP at a kernel for the labels of a problem.

        `squares` are the squared distances (n, n) of the rows in lengths, where they are known.
        """
        return self.model.ep(kernel, self.X, y, self.weight, squares)

    def solve(self, ep, x, tol, max_sweeps, monitor=SILENT, share=1.0):
        """Run EP from sites x (2, n) or (2, n, K), with a share of the damping."""
        steps = dict(damping=share * self.damping, accelerate=self.accelerate, monitor=monitor)
        return ep.solve(x, tol=tol, max_iter=max_sweeps, **steps)

    def sites_in_passing(self, kernel, y, x):
        """Return sites from which a run has little left: those of single precision, or x itself."""
        if not isinstance(self.model, JointModel):
            return x
        passing = replace(self, model=replace(self.model, searching=True))
        tol = max(_TIMES_TOL * self.tol, _LEAST_SINGLE_TOL)
        return passing.solve(passing.ep(kernel, y), x, tol, _SINGLE_SWEEPS).onwards

    def evidence(self, y, x, tol):
        """Return theta -> `EvidencePoint`; sites are warm-started from the best point so far.

        Of several classes EP gives up where the evidence stays below that of the best point, unless
        the `whole` of it is asked for, other starts follow, or the search is the user's.
        """
        warm, best = [x], [-np.inf]
        to_the_end = self.model.exact_gradient or len(self.restarts) or callable(self.optimizer)

        def evaluate(theta, whole=False):
            kernel = with_theta(self.kernel, theta)
            ep = self.ep(kernel, y)
            watch = SILENT if whole or to_the_end else GivesUp(best[0])
            result = self.solve(ep, warm[0], tol, self.max_sweeps, watch)
            payload, value = result.evaluation.payload, result.evaluation.record["log_evidence"]
            if value >= best[0]:
                warm[0], best[0] = result.x, value
            gradient = self.model.gradient(ep, payload)
            last = kernel, payload[0], result.onwards
            return EvidencePoint(value, gradient, result.residual, last)

        return evaluate

    def log_evidence(self, theta, fit, n_jobs):
        """Return log evidence at theta, EP run from the sites of the fit."""
        if isinstance(self.model, BinaryModel):
            return self.value_and_gradient(theta, fit, n_jobs)[0]
        return self.evidence(self.y, fit.sites[0], self.tol)(theta).value

    def value_and_gradient(self, theta, fit, n_jobs):
        """Return the same and its gradient, which is dear for several classes."""
        if isinstance(self.model, BinaryModel):
            return evidence_of_problems(
                lambda k, sign, x: self.evidence(sign, x, self.tol), self.y, theta, fit
            )
        point = self.evidence(self.y, fit.sites[0], self.tol)(theta)
        exact = self.model.exact_gradient
        return point.value, point.gradient if exact else self._slopes(theta, point.payload[2])

    def _slopes(self, theta, x):
        """Return the gradient (p,) of the log evidence at theta by central differences.

        Of evidences at fixed points, which are run from sites x near by to a small residual.
        """
        tol = min(self.tol, _SLOPE_TOL)

        def evidence(at):
            result = self.solve(self.ep(with_theta(self.kernel, at), self.y), x, tol, _SLOPE_SWEEPS)
            return result.evaluation.record["log_evidence"]

        moves = _SLOPE_STEP * np.eye(len(theta))
        rises = [evidence(theta + move) - evidence(theta - move) for move in moves]
        return np.array(rises) / (2.0 * _SLOPE_STEP)

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        kernel, state = payload[:2]
        return self.model.posterior(kernel, self.X, state)

    def latent_sites(self, fit):
        """Return the sites (precision, shift) on the latent values of the rows, problem 0."""
        return fit.sites[0]


def last_sites(last, kernel, empty):
    """Return (theta, sites) to start each problem from: those of the last fit if they fit.

    `last` is the `GPFit` before, or None; `empty` (n_problems, 2, n, ...) are sites to start from
    otherwise.
    """
    if last is not None and isinstance(last.runs[0], BinaryFit) and last.sites.shape == empty.shape:
        thetas = [f.attributes["kernel"].theta for f in last.runs]
        if len(thetas[0]) == kernel.n_dims:
            return thetas, list(last.sites)
    return [kernel.theta] * len(empty), list(empty)


def takes_joint(estimator, through_points):
    """Return whether all classes get one joint posterior; refuse settings that exclude it."""
    named, several = isinstance(estimator.likelihood, str), len(estimator.classes_) > 2
    if not named:
        refuse_joint(estimator, f"likelihood={estimator.likelihood!r}")
    if estimator.power < 1:
        refuse_joint(estimator, f"power={estimator.power}")
        return False
    asked = estimator.multi_class == "joint"
    wanted = asked or (several and named and estimator.multi_class == "auto")
    if not (wanted and through_points):
        return wanted
    excluding = _without_all_rows(estimator)
    for setting in excluding:
        refuse_joint(estimator, setting)
    # with a kernel to learn, passes of one class against the rest are the cheaper default
    return asked or (not excluding and estimator.optimizer is None)


def _without_all_rows(estimator):
    """Return the settings of a fit through inducing points that a joint posterior cannot have."""
    given = estimator.inducing_points
    m = estimator._inducing_count if given is None else len(given)
    checks = {
        f"batch_size={estimator.batch_size}": estimator.batch_size is not None,
        "site_memory='average'": estimator.site_memory == "average",
        f"n_partitions={estimator.n_partitions}": estimator.n_partitions is not None,
        f"optimizer={estimator.optimizer!r}": estimator.optimizer in STEP_RULES,
        "learn_inducing=True": estimator.learn_inducing is True,
        f"more than {MOST_WEIGHTS} classes times inducing points": m * len(estimator.classes_)
        > MOST_WEIGHTS,
    }
    return [setting for setting, excludes in checks.items() if excludes]


def plan_dense(estimator, training, joint, through_points):
    """Return the `DensePlan` of an `EPGaussianProcessClassifier`."""
    kernel = estimator._initial_kernel(estimator._spread(training) ** 2)
    averaging, several = None, joint and len(estimator.classes_) > 2
    own_lengths = _may_own_lengths(estimator, training.X)
    # one length that all of several classes share is known well, however few the rows: averages
    # over it move the log loss by .002 or less on four sets of five (iris, .011 lower), for up to
    # half of the time again
    sharp = several and not own_lengths and n_lengths(kernel) == 1
    excluding = _only_the_mode(estimator, kernel, through_points)
    if wants_average(estimator, len(training.y), excluding, sharp):
        if own_lengths:
            kernel = with_own_lengths(kernel, training.X.shape[1])
        n_jobs = estimator.n_jobs if joint or estimator._n_problems == 1 else None
        prior = kernel_prior(kernel, estimator._factor(), estimator._spread(training), several)
        averaging = Averaging(prior, n_jobs)
    shorter_lengths = None
    if averaging or (estimator.kernel is None and not callable(estimator.optimizer)):
        shorter_lengths = np.tile(kernel.theta, (len(_SHORTER), 1))
        shorter_lengths[:, KernelScales.at(kernel, kernel.theta).lengths] -= np.log(_SHORTER)[
            :, None
        ]
        shorter_lengths = np.clip(shorter_lengths, *kernel.bounds.T)
    n_restarts = estimator.n_restarts_optimizer if estimator.optimizer is not None else 0
    rng = check_random_state(estimator.random_state)
    if joint:
        factor: Any = CLASS_LIKELIHOODS[estimator.likelihood]
        empty = empty_sites(training.y, len(estimator.classes_))[None]
        if through_points:
            rows = training.X, training.weight, draw_seed(rng), training.X.shape[1]
            Z = estimator._inducing_start(*rows)
            warn_fewer_inducing(estimator, Z)
            check_kernel(kernel, kernel(Z, Z))
            model: Any = JointInducingModel(factor, len(estimator.classes_), Z, estimator.jitter)
        else:
            model = JointModel(factor, len(estimator.classes_))
    else:
        model = BinaryModel(estimator._factor(), rule_of_power(estimator.power))
        empty = np.zeros((estimator._n_problems, 2, len(training.y)))
    if not through_points:
        check_kernel(kernel, kernel(training.X))
    starts, sites = last_sites(estimator._last_fit, kernel, empty)
    pairs = zip(sites, empty, strict=True)
    return DensePlan(
        X=training.X,
        y=training.y,
        weight=training.weight,
        kernel=kernel,
        model=model,
        optimizer=estimator.optimizer,
        restarts=random_starts(kernel.bounds, n_restarts, rng),
        starts=starts,
        sites=sites,
        tol=estimator.tol,
        max_iter=estimator.max_iter,
        max_sweeps=estimator.max_sweeps,
        damping=estimator.damping,
        accelerate=estimator.acceleration is not None,
        fresh=all(np.array_equal(*pair) for pair in pairs),
        averaging=averaging,
        shorter_lengths=shorter_lengths,
    )


def _may_own_lengths(estimator, X):
    """Return whether an average gives each column a length of its own."""
    free = estimator.kernel is None and estimator.hyperparameters == "auto"
    return free and 1 < X.shape[1] <= MOST_COLUMNS


def _only_the_mode(estimator, kernel, through_points):
    """Return the settings of a fit with sites on the rows that leave no average over kernels."""
    checks = {
        "optimizer=None": estimator.optimizer is None,
        "an optimizer of your own": callable(estimator.optimizer),
        "inducing points": through_points,
        **kernel_settings(kernel),
    }
    return [setting for setting, excludes in checks.items() if excludes]
