"""What fits with sites on the rows in memory are made of.

A problem is binary, or has all classes jointly.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from joblib import effective_n_jobs
from scipy.special import gammaln
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state

from .._engine.class_sites import JointEP, class_update, empty_sites
from .._engine.contracts import WholeEP
from .._engine.hyper import Accuracy
from .._engine.noisy_argmax import CLASS_LIKELIHOODS
from .._engine.rules import rule_of_power
from .._engine.sites import Sites, cavity
from .._estimator.checks import count_problems
from . import _base as base
from . import _hyperparameters as spaces
from ._dense_gp import DenseGPPosterior, JointGP, JointGPPosterior, KernelGP
from ._kernels import span_coordinates, with_own_lengths, with_theta
from ._limits import LIMITS

# Residual to which sites are refined at the nodes of an average: the error of the evidence is of
# second order in it. Of several classes it is below a hundredth of a nat as a rule.
_NODE_TOL, _JOINT_NODE_TOL = 1e-2, 3e-2
# Residual of sites of several classes while the kernel moves: the gradient is itself off by tenths
# of a nat and more.
_JOINT_TOL = 2e-2


@dataclass(frozen=True)
class BinaryModel:
    """One latent function, and labels in {-1, +1}.

    `searching` says that sites are only passed, on the way to others.
    """

    factor: Any
    rule: Any
    searching: bool = field(default=False, kw_only=True)
    learning_tol: ClassVar[float] = spaces.LEARNING_TOL
    accuracy: ClassVar[Accuracy] = Accuracy()
    exact_gradient: ClassVar[bool] = True
    node_tol: ClassVar[float] = _NODE_TOL

    def ep(self, kernel, X, sign, weight):
        """Return the fixed-point map of EP."""
        latent = KernelGP(kernel, X, self.searching and base.single_holds(weight))
        return WholeEP(latent, self.factor, sign, weight, self.rule)

    def rough(self, averages):
        """Return the model for sites that a search passes, to nodes of an average or to a mode.

        Its factor costs next to nothing, and a mode asks for more digits.
        """
        return replace(self, searching=averages)

    def quick(self, weight):
        """Return None: sweeps are cheap beside the search."""
        return None

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

    def left_out(self, results, weight, sign, _, copies):
        """Return attributes that say how likely labels with so many copies are from other rows.

        By the `results` of nodes with weight (M,).
        """
        each = []
        for result in results:
            state = result.evaluation.payload[0]
            cav = cavity(Sites(*result.x), state.mean, state.var, copies)
            each.append(base.log_sides(self.factor, cav.mean, cav.var + state.extra_var))
        return dict(loo_log=base.mixed_logs(weight, np.array(each), (sign, copies)))


@dataclass(frozen=True)
class JointModel:
    """One latent function a class under one kernel, and class indices as labels.

    `searching` says that sites are only passed, on the way to others, `tempered` that rows left out
    choose how sure predictions are.
    """

    factor: Any
    n_classes: int
    tempered: bool = False
    searching: bool = field(default=False, kw_only=True)
    learning_tol: ClassVar[float] = _JOINT_TOL
    accuracy: ClassVar[Accuracy] = spaces.JOINT_ACCURACY
    node_tol: ClassVar[float] = _JOINT_NODE_TOL

    @property
    def exact_gradient(self):
        """Whether the gradient is that of the log evidence, and not without the moves of sites."""
        return self.n_classes == 2

    def ep(self, kernel, X, y, weight):
        """Return the fixed-point map of EP."""
        structure = JointGP(kernel, X, self.searching and base.single_holds(weight))
        return JointEP(structure, self.factor, y, weight)

    def rough(self, averages):
        """Return the model for sites that a search passes."""
        return replace(self, factor=self.factor.rough(), searching=True)

    def quick(self, weight):
        """Return the model in single precision, None where that saves nothing or does not hold."""
        return replace(self, searching=True) if base.single_holds(weight) else None

    def no_sites(self, y):
        """Return sites (2, n, K) that say nothing."""
        return empty_sites(y, self.n_classes)

    def posterior(self, kernel, X, state):
        """Return what predicts."""
        return JointGPPosterior(kernel, X, state, self.factor)

    def foretold_sites(self, posterior, X, y):
        """Return sites (2, n, K) of rows that a posterior of others asks for."""
        mean, cov = posterior.latent(X)
        empty = Sites(*empty_sites(y, mean.shape[1]))
        return np.array(class_update(self.factor, y, empty, mean, cov, 0.0).sites)

    def left_out(self, results, weight, *rows):
        """Return attributes that say how likely classes are from other rows.

        `rows` are class indices, copies, and those that go with each row.
        """
        nodes = [base.class_cavity(result, rows[-1])[:2] for result in results]
        return base.left_out_classes(self.factor, nodes, weight, rows, self.tempered)


class KernelSearch(NamedTuple):
    """How learning searches.

    `optimizer` is a function of the user, None for L-BFGS-B; `restarts` and `shorter` (k, p) are
    theta of further starts: of random ones, and of those for a search that ends flat, the best of
    which starts another. None for the one mode that a kernel of the caller's leads to.
    """

    optimizer: Any
    restarts: np.ndarray
    shorter: np.ndarray | None
    max_iter: int


@dataclass
class DensePlan:
    """What a fit with sites on the rows is made of; sent to workers as it is.

    `X` are rows of numbers, or whatever objects the kernel compares; `coordinates` are the same, or
    rows of fewer columns with the same covariances. `y` holds class indices.
    `model` has factor, rule and structure of a problem, `space` the parameters of the kernel that
    are learned with their prior: a `ThetaSpace` for the mode, `KernelScales` that are averaged
    over, None for a kernel that is kept. `sweeps` are keywords of `WholeEP.solve`. `starts` and
    `sites` have one entry a problem: the initial theta and the initial sites, which are `fresh` if
    of no earlier fit. `n_jobs` are workers for the nodes of an average.
    """

    X: np.ndarray
    coordinates: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    kernel: Kernel
    model: BinaryModel | JointModel
    space: spaces.ThetaSpace | spaces.KernelScales | None
    search: KernelSearch
    sweeps: dict[str, Any]
    starts: list
    sites: list
    fresh: bool = True
    n_jobs: int = 1

    def ends_flat(self, y, log_evidence):
        """Return whether a kernel tells hardly more of labels y than how frequent they are.

        Or than a kernel that joins no two rows, under which copies of a row tell of each other
        alone. By two nats, of frequencies and a twentieth of theirs: on 100 rows of banana two
        searches of five end flat, and on 400 rows of two wiggly functions thirty nats below another
        mode.
        """
        labels, code = np.unique(y, return_inverse=True)
        count = np.bincount(code, self.weight)
        of_frequencies = count @ np.log(count / count.sum())
        told = np.zeros((len(code), len(labels)))
        np.add.at(told, (base.places_of_rows(self.X, self.weight), code), self.weight)
        of_rows = _evidence_of_rows_alone(told)
        return log_evidence < max(of_rows + 2.0, of_frequencies + max(2.0, -0.05 * of_frequencies))

    def left_out(self, results, weight, y):
        """Return attributes that say how likely labels y are from other rows.

        By the `results` of nodes with weight (M,).
        """
        rows = y, self.weight, base.copies_left_out(self.X, y, self.weight)
        return self.model.left_out(results, weight, *rows)

    def some_rows(self):
        """Return a third of the rows, to begin with; None for few rows and warm starts."""
        if not self.fresh:
            return None
        return base.third_of_rows(self.X, self.y, self.weight, LIMITS.thirds)

    @property
    def n_copies(self):
        """Copies of all rows: weights are to choose as repeated rows do."""
        return self.weight.sum()

    @property
    def averages(self):
        """Whether the kernel is averaged over."""
        return isinstance(self.space, spaces.KernelScales)

    @property
    def response_share(self):
        """Share of a factor that its site matches, None for several classes jointly."""
        return self.model.rule.exponent if isinstance(self.model, BinaryModel) else None

    def ep(self, kernel, y):
        """Return the fixed-point map of EP at a kernel for the labels of a problem."""
        return self.model.ep(kernel, self.coordinates, y, self.weight)

    def converged(self, kernel, y, x, max_iter, monitor):
        """Return the `Result` of EP to `tol` at a kernel that was found, from sites x.

        Sweeps of a model that does them in less time come first, after which one in full is enough
        as a rule: with ten classes of 1257 rows three of four sweeps take .6 s for 1.1.
        """
        steps: dict[str, Any] = self.sweeps | dict(max_iter=max_iter, monitor=monitor)
        quick, n_before = self.model.quick(self.weight), 0
        if quick is not None:
            ep = quick.ep(kernel, self.coordinates, y, self.weight)
            # a smaller residual may be beyond single precision
            result = ep.solve(x, **steps | dict(tol=max(steps["tol"], 1e-3)))
            if result.reason in ("max_iter", "asked"):
                return result
            n_before, x = result.n_iter, result.onwards
            steps["max_iter"] = max(1, max_iter - n_before)
        result = self.ep(kernel, y).solve(x, **steps)
        return replace(result, n_iter=n_before + result.n_iter)

    def value_and_gradient(self, theta, fit, n_jobs, slopes):
        """Return log evidence at theta, EP run from the sites of the fit, and its gradient.

        That is dear for several classes, which have it only if `slopes` are asked for.
        """

        def at(k, y, x, part, slopes, residual=np.inf):
            ep = self.ep(with_theta(self.kernel, part), y)
            result = ep.solve(x, **self.sweeps | dict(tol=min(residual, self.sweeps["tol"])))
            state = result.evaluation.payload[0]
            gradient = ep.evidence_gradient(state) if slopes else None
            return result.evaluation.record["log_evidence"], gradient

        return base.evidence_at(at, self.y, theta, fit, slopes, self.model.exact_gradient)

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        theta, state = payload[:2]
        return self.model.posterior(with_theta(self.kernel, theta), self.X, state)

    def latent_sites(self, fit):
        """Return the sites (precision, shift) on the latent values of the rows, problem 0."""
        return fit.sites[0]


def _evidence_of_rows_alone(told):
    """Return about the log evidence of a kernel that joins no two rows.

    told (m, K) are the copies of each distinct row by label. One label is certain of its copies; of
    several each share is as probable as any other, under a uniform prior of the probabilities.
    """
    copies, K = told.sum(axis=1), told.shape[1]
    of_one = -np.log(K) * np.minimum(copies, 1.0)
    of_several = gammaln(K) + gammaln(told + 1.0).sum(axis=1) - gammaln(copies + K)
    return np.where(told.max(axis=1) == copies, of_one, of_several).sum()


@dataclass
class DenseProblem:
    """EP of the labels y of one problem of a plan at any kernel parameters.

    `x` are sites to start from where there is no neighbour.
    """

    plan: DensePlan
    y: np.ndarray
    x: np.ndarray

    def at(self, theta, near, slopes=True):
        """Return the `EPNode` at kernel parameters (p,), None where EP has no fixed point.

        From what a neighbour keeps.
        """
        plan, model, found = self.plan, self.plan.model, near
        known = near is not None and np.array_equal(theta, near.point)
        if known and not (slopes and near.slope is None):
            return near
        ep = plan.ep(with_theta(plan.kernel, theta), self.y)
        if not known:
            x = self.x if near is None else near.result.x
            if plan.averages:  # sites have to settle; near neighbours need two to six sweeps
                tol = spaces.tol_of_nodes(model.node_tol, plan.n_copies)
                steps = plan.sweeps | dict(tol=tol, max_iter=40)
                solve, damping = partial(ep.solve, **steps), steps["damping"]
                result = spaces.settled(solve, x, model.no_sites(self.y), damping)
            else:
                tol = max(plan.sweeps["tol"], model.learning_tol)
                result = ep.solve(x, **plan.sweeps | dict(tol=tol))
            if result is None:
                return None
            found = spaces.EPNode(theta, result.evaluation.payload[0], result)
        if slopes:
            found = found._replace(slope=ep.evidence_gradient(found.state))
        return found

    def of_rows(self, rows):
        """Return the problem of some of the rows."""
        return DenseProblem(base.part_of(self.plan, rows), self.y[rows], self.x[:, rows])

    def from_rows(self, rows, node):
        """Return the problem whose sites start at those of a `Node` of some rows.

        Of the others they are what these foretell.
        """
        posterior = base.part_of(self.plan, rows).posterior(node.payload)
        foretold = self.plan.model.foretold_sites(posterior, self.plan.X, self.y)
        foretold[:, rows] = node.payload.result.onwards
        return replace(self, x=foretold)


def plan_dense(estimator, training, joint):
    """Return the `DensePlan` of an `EPGaussianProcessClassifier`."""
    spread = base.spread_of(estimator, training)
    kernel = base.initial_kernel(estimator, spread**2)
    kernel, space = _space(estimator, training, kernel, joint)
    rng = check_random_state(estimator.random_state)
    if estimator.kernel is not None:  # the default one is positive definite
        base.check_kernel(kernel, kernel(training.X))
    model: BinaryModel | JointModel
    if joint:
        K, tempered = len(estimator.classes_), base.takes_temper(estimator)
        model = JointModel(CLASS_LIKELIHOODS[estimator.likelihood], K, tempered)
        empty = empty_sites(training.y, K)[None]
    else:
        model = BinaryModel(base.factor_of(estimator), rule_of_power(estimator.power))
        empty = np.zeros((count_problems(estimator), 2, len(training.y)))
    starts, sites = base.last_sites(estimator._last_fit, kernel, empty, spread)
    pairs = zip(sites, empty, strict=True)
    return DensePlan(
        X=training.X,
        coordinates=span_coordinates(kernel, training.X),
        y=training.y,
        weight=training.weight,
        kernel=kernel,
        model=model,
        space=space,
        search=_search(estimator, kernel, space, rng),
        sweeps=base.sweeps_of(estimator),
        starts=starts,
        sites=sites,
        fresh=all(np.array_equal(*pair) for pair in pairs),
        n_jobs=effective_n_jobs(estimator.n_jobs) if count_problems(estimator, joint) == 1 else 1,
    )


def _space(estimator, training, kernel, joint):
    """Return the kernel of a fit, and the space of what is learned of it, None if nothing is."""
    own_lengths = estimator.kernel is None and estimator.hyperparameters == "auto"
    own_lengths = own_lengths and 1 < training.X.shape[1] <= LIMITS.lengths
    several = joint and len(estimator.classes_) > 2
    # one length that all of several classes share is known well, however few the rows: averages
    # over it move the log loss by .002 or less on four sets of five (iris, .011 lower), for up to
    # half of the time again
    sharp = several and not own_lengths and spaces.n_length_scales(kernel) == 1
    settings = {
        "optimizer=None": estimator.optimizer is None,
        "an optimizer of your own": callable(estimator.optimizer),
        **spaces.kernel_settings(kernel),
    }
    if spaces.wants_average(estimator, len(training.y), settings, sharp):
        if own_lengths:
            kernel = with_own_lengths(kernel, training.X.shape[1])
        spread = base.spread_of(estimator, training)
        prior = spaces.kernel_prior(kernel, base.factor_of(estimator), spread, several)
        return kernel, spaces.KernelScales(kernel, np.zeros(kernel.n_dims), prior)
    learns = estimator.optimizer is not None and kernel.n_dims > 0
    return kernel, spaces.ThetaSpace(kernel) if learns else None


def _search(estimator, kernel, space, rng):
    """Return the `KernelSearch`, with ever shorter lengths for one that ends flat."""
    optimizer = estimator.optimizer if callable(estimator.optimizer) else None
    shorter = None
    default = estimator.kernel is None and optimizer is None and spaces.n_length_scales(kernel) > 0
    if isinstance(space, spaces.KernelScales) or default:
        shorter = np.tile(kernel.theta, (4, 1))
        places = spaces.KernelScales.at(kernel, kernel.theta).lengths
        shorter[:, places] -= np.log([3.0, 9.0, 27.0, 81.0])[:, None]
        shorter = np.clip(shorter, *kernel.bounds.T)
    n_restarts = estimator.n_restarts_optimizer if estimator.optimizer is not None else 0
    restarts = spaces.random_starts(kernel.bounds, n_restarts, rng)
    return KernelSearch(optimizer, restarts, shorter, estimator.max_iter)
