"""What the GP classifiers share: checks, what fits leave, attributes, evidence and diagnosis."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike
from scipy.special import log_softmax, logit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, CompoundKernel, ConstantKernel, DotProduct, Kernel
from sklearn.utils.validation import check_is_fitted, validate_data

from .._engine.class_sites import class_left_out, class_log_weights
from .._engine.class_structures import MOST_WEIGHTS
from .._engine.diagnostics import site_log_weights
from .._engine.gaussian import ImproperPosterior, jittered_cholesky
from .._engine.hyper import average_of, log_weights_without, mixture_covariance
from .._engine.left_out import CavityRows, LogPrior, calibrated, class_moments
from .._engine.likelihoods import LIKELIHOODS
from .._engine.loop import SILENT, worst_reason
from .._engine.rows import find_copies, minibatches, row_keys, taken_copies
from .._engine.sites import Sites
from .._estimator import checks, fitting
from .._estimator.annotations import RowsLike
from .._estimator.averaged import average_remarks
from .._estimator.categories import CategoryCoder, category_columns
from .._estimator.latents import draw_latent
from .._estimator.posterior_classifier import PosteriorClassifier
from ._hyperparameters import central_differences, learned_coordinates
from ._kernels import has_input_gradient
from ._limits import LIMITS
from ._response import added_variance, check_responds, corrections, site_problems
from ._structured import GroupedRBF
from ._summary import KernelReport

# Rows predict themselves too well when left out if the kernel was learned from them. So what a
# temper gains in their log probabilities counts less so many standard errors. Over 150 fits of 18
# kinds of sets (3 to 10 classes, 75 to 300 rows) the log loss is .016 +- .008 below that without a
# temper. One error gives .015, three .016, and none with Cauchy's prior of linear models .008
# (`python doc/benchmarks/tempers.py`).
_TEMPER_ERRORS = 2.0


def check_scale(total_variance, varies):
    """Raise a ValueError unless double precision carries the variance of rows.

    It is zero where they do not vary, and by underflow.
    """
    low, high = 1e-280, 1e280  # leaves room for the squares that are made of them
    if low <= total_variance <= high or (total_variance == 0 and not varies):
        return
    raise ValueError(
        f"X: the columns vary so {'little' if total_variance < low else 'much'} that double "
        "precision cannot carry their squares; scale the columns."
    )


def weighted_mean(X, weight):
    """Return the means (d,) of columns, from the first row on.

    So the mean of a constant column is its value to the last digit, and its variance zero.
    """
    return X[0] + weight @ (X - X[0]) / weight.sum()


def column_spread(X, weight):
    """Return the standard deviations (d,) of the columns, or raise a ValueError that names X."""
    with np.errstate(over="ignore", invalid="ignore"):
        var = weight @ (X - weighted_mean(X, weight)) ** 2 / weight.sum()
    check_scale(float(np.sum(var)), varies=np.any(X != X[0]))
    return np.sqrt(var)


def third_of_rows(X, y, weight, least, most=np.inf):
    """Return a third of the rows, by their numbers; None unless they have all labels.

    None as well of fewer copies than the `least` and of objects; of many rows they are `most`
    copies. The choice depends on their ranks in each column alone: not on their order, nor on
    units, and equal rows stay together.
    """
    if weight.sum() < least or not np.issubdtype(X.dtype, np.number):
        return None
    ranks = [np.unique(column, return_inverse=True)[1] for column in X.T]
    keys = row_keys(np.column_stack(ranks).astype(float), 0)
    rows = next(minibatches(keys, weight, min(weight.sum() / 3.0, most)))
    return rows if len(np.unique(y[rows])) == len(np.unique(y)) else None


def places_of_rows(X, weight):
    """Return a number (n,) of each row that equal rows share; each object has its own."""
    if not np.issubdtype(X.dtype, np.number):
        return np.arange(len(weight))
    return find_copies(X, weight).group


def without_copies(training, kernel):
    """Return the `Training` data with equal rows of one label as one, and their `Copies`.

    None for these where all rows count as different: objects, and rows under a kernel that tells
    copies apart, as a `WhiteKernel` does.
    """
    X, y, weight, kept = training
    number = np.issubdtype(X.dtype, np.number)
    if not number or (kernel is not None and kernel(X[:1]) != kernel(X[:1], X[:1])):
        return training, None
    copies = find_copies(X, weight, y).as_seen()
    if len(copies.first) == len(y):
        return training, None
    return training._replace(X=X[copies.first], y=y[copies.first], weight=copies.weight), copies


def copies_left_out(X, y, weight):
    """Return how many copies (n,) go with a row that is left out."""
    return taken_copies(places_of_rows(X, weight), y, weight)


def single_holds(weight):
    """Return whether single precision holds on the way to a kernel, and pays.

    Errors of means add up over the copies, weight (n,), of few rows: of 100,000 copies of 96 rows
    the log evidence is off by up to 90 nats.
    """
    return LIMITS.thirds <= weight.sum() <= max(LIMITS.dense, len(weight))


def part_of(plan, rows):
    """Return a plan of rows in memory for some of them."""
    names = "X", "coordinates", "y", "weight"
    return replace(plan, **{name: getattr(plan, name)[rows] for name in names})


def share_of_copies(weight, rows):
    """Return the share of all copies, weight (n,), that some of the rows have."""
    return float(weight[rows].sum() / weight.sum())


def check_input_gradient(kernel):
    """Raise a ValueError unless inducing points can be moved along the gradient of the kernel."""
    if not has_input_gradient(kernel):
        raise ValueError(
            f"learn_inducing=True needs derivatives in the inputs, which {kernel} lacks: use "
            "constants, RBF and Matern, or learn_inducing=False."
        )


def smooth_kernel(total_variance, coder=None, intercept=0.0, linear=False):
    """Return ConstantKernel(1) * RBF(l) with l three times the root of the total variance.

    The indicators of a `CategoryCoder` have lengths by category. The variance of an intercept is in
    units of that of the function. `linear` adds ConstantKernel(v) * DotProduct(l / 3) for centred
    columns: linear functions with an intercept, of variance one each at the start.

    The total variance of the columns measures distances without drawing pairs (l / 3 is about the
    median distance over sqrt(2)) and does not change when weights are written out as repeated rows.
    Three of them make a smooth start: learning goes from nearly linear functions to wigglier ones,
    and an unlearned kernel does not fall back to the prior between the rows.
    """
    scale = 3.0 * float(np.sqrt(total_variance)) or 1.0
    bounds = (1e-2 * scale, 1e3 * scale)
    rbf = RBF(scale, bounds)
    if coder is not None or intercept or linear:  # whose distances are products
        rbf = GroupedRBF(scale, bounds, getattr(coder, "groups_", None), intercept)
    smooth = ConstantKernel(1.0, (1e-3, 1e3)) * rbf
    if not linear:
        return smooth
    total = (scale / 3.0) ** 2
    variance = ConstantKernel(1.0 / total, (1e-5 / total, 1e5 / total))
    return smooth + variance * DotProduct(scale / 3.0, "fixed")


def initial_kernel(estimator, total_variance):
    """Return the kernel that was given, or the default one."""
    if estimator.kernel is not None:
        return clone(estimator.kernel)
    given = estimator._coder, estimator._intercept, estimator._linear
    return smooth_kernel(total_variance, *given)


def factor_of(estimator):
    """Return the factor of a likelihood that was given by name or as it is."""
    likelihood = estimator.likelihood
    return LIKELIHOODS[likelihood]() if isinstance(likelihood, str) else likelihood


def begins_with_some_rows(estimator, n_rows):
    """Return whether `fit` learns the default kernel of so many rows with some of them first."""
    by_passes = estimator.batch_size is None and estimator.site_memory == "scalars"
    # several classes that are few enough for joint sites after passes of each
    n_classes, m = len(estimator.classes_), inducing_count(estimator, 1)
    joint = n_classes > 2 and estimator.multi_class != "one_vs_rest"
    plain = isinstance(estimator.likelihood, str) and estimator.power == 1
    several = joint and plain and n_classes * m <= LIMITS.joint_points
    return by_passes and takes_some_rows(estimator, n_rows, several)


def inducing_count(estimator, n_rows=None, points=LIMITS.points, many=LIMITS.few_points):
    """Return the number of inducing points that an estimator gives or asks for.

    Of so many rows, None for any number, the default has such a number that rows times its square
    never fall, nor the cost of a pass: between those of `points`, the fewer of `many` rows.
    """
    if estimator.inducing_points is not None:
        return len(estimator.inducing_points)
    if estimator.n_inducing is not None:
        return estimator.n_inducing
    few, most = points
    share = 1.0 if n_rows is None else (many / n_rows) ** 0.5
    return round(np.clip(few * share, few, most))


def allows_joint(estimator, through_points, settings):
    """Return whether all classes may have one joint posterior; refuse it where it was asked for.

    `settings` of the estimator -> whether they exclude it, as too many inducing points do.
    """
    m, K = inducing_count(estimator), len(estimator.classes_)
    most = f"more than {MOST_WEIGHTS} classes times inducing points"
    excludes = settings | {most: through_points and m * K > MOST_WEIGHTS}
    for setting in (name for name, excluding in excludes.items() if excluding):
        checks.refuse_joint(estimator, setting)
    return not any(excludes.values())


def takes_some_rows(estimator, n_rows, several=False):
    """Return whether some of so many rows tell the default kernel, whatever goes over the rest.

    Of `several` classes, too, where they may.
    """
    default = estimator.kernel is None and estimator.hyperparameters == "auto"
    binary = len(estimator.classes_) == 2 and estimator.multi_class != "joint"
    by_steps = estimator.optimizer not in ("fmin_l_bfgs_b", None)
    wanted = default and (binary or several) and by_steps and n_rows > LIMITS.averaged
    return wanted and factor_of(estimator).log_concave


def check_kernel(kernel, K):
    """Raise a ValueError unless a kernel matrix is finite and positive semidefinite."""
    if not np.all(np.isfinite(K)):
        raise ValueError(f"kernel {kernel} gives NaN or infinity on these data; scale the columns.")
    if not np.any(K):  # as a WhiteKernel alone is between inducing points and rows
        raise ValueError(f"kernel {kernel} is zero between all rows: add a kernel that is not.")
    try:
        jittered_cholesky(K, 1e-10, largest=1e-6)
    except ImproperPosterior as error:
        raise ValueError(
            f"kernel {kernel} is not positive definite on these data; use a positive definite "
            "kernel, or add a WhiteKernel to it."
        ) from error


def object_rows(X):
    """Return rows of whatever kind as an array of which a kernel can be given a part."""
    if hasattr(X, "__array__"):
        return np.asarray(X)
    if sp.issparse(X) or not hasattr(X, "__len__"):
        raise ValueError(f"X must be a sequence of rows that the kernel takes, got {type(X)}.")
    rows = np.empty(len(X), dtype=object)
    for i, row in enumerate(X):  # one by one: numpy would look into rows that are sequences
        rows[i] = row
    return rows


def _refuse_strings(X):
    """Raise a ValueError where rows are strings, of which inducing points cannot be chosen."""
    rows = object_rows(X)
    if rows.ndim == 1 and len(rows) and isinstance(rows[0], str | bytes):
        raise ValueError(
            f"inducing points take rows of numbers, and a row of X is {rows[0]!r:.60}: the kernel "
            "compares such rows in a dense fit."
        )


def warn_at_bounds(kernel):
    """Warn of each parameter that learning left at a bound which the user gave."""
    kernels = kernel.kernels if isinstance(kernel, CompoundKernel) else [kernel]
    free = [(k, h) for k in kernels for h in k.hyperparameters if not h.fixed]
    told = dict.fromkeys(m for k, h in free for m in _ends_at_bounds(k, h))
    for message in told:
        warnings.warn(message, ConvergenceWarning, stacklevel=3)


def _ends_at_bounds(kernel, parameter):
    """Yield what to tell of each dimension of a parameter that is at a bound."""
    for j, value in enumerate(np.atleast_1d(kernel.get_params()[parameter.name])):
        low, high = parameter.bounds[j if len(parameter.bounds) > 1 else 0]
        for side, bound, change in (("lower", low, "Decreas"), ("upper", high, "Increas")):
            if bound > 0 and np.isclose(np.log(value), np.log(bound), atol=1e-5):
                yield (
                    f"The optimal value found for dimension {j} of parameter {parameter.name} is "
                    f"close to the specified {side} bound {bound}. {change}ing the bound and "
                    "calling fit again may find a better value."
                )


def whole_theta(kernel, theta):
    """Return theta (p,) of all classes from that of all or of each, and how many are equal."""
    theta = np.asarray(theta, dtype=float)
    n_equal = len(kernel.kernels) if isinstance(kernel, CompoundKernel) else 1
    n_equal = n_equal if n_equal * theta.size == kernel.n_dims else 1
    whole = np.tile(theta, n_equal)
    if whole.shape != kernel.theta.shape:
        raise ValueError(f"theta has shape {theta.shape}, not {kernel.theta.shape}.")
    return whole, n_equal


def spread_of(estimator, training):
    """Return the root of the total variance of the rows, 1 for rows that have none."""
    if estimator._takes_objects:
        return 1.0
    return float(np.linalg.norm(column_spread(training.X, training.weight))) or 1.0


def sweeps_of(estimator):
    """Return how EP runs at a kernel, as keywords of `solve`."""
    limits = dict(tol=estimator.tol, max_iter=estimator.max_sweeps)
    return limits | dict(damping=estimator.damping, accelerate=estimator.acceleration is not None)


def check_same_rows(estimator, rows):
    """Raise a ValueError unless rows given once more are those of the fit."""
    X = estimator._check_new(rows.X)
    weight = checks.checked_weights(rows.sample_weight, X)
    y, kept = np.searchsorted(estimator.classes_, rows.y), weight > 0
    plan, same = estimator._plan, len(y) == len(X)
    if same:
        weight = estimator._class_weighted(y[kept], weight[kept])
        given = without_copies(checks.Training(X[kept], y[kept], weight, kept), estimator.kernel)[0]
        pairs = (given.X, plan.X), (given.y, plan.y), (given.weight, plan.weight)
        same = all(np.array_equal(a, b) for a, b in pairs)
    if not same:
        raise ValueError(
            "X, y and sample_weight are not those of the fit, which keeps its rows: leave them "
            "out, or give them as they were."
        )


class GPFit(NamedTuple):
    """A fit of one binary problem, or of one a class, by whatever method.

    `runs` are what ran on its own, each with history, reason, log evidence and remark: a
    `BinaryFit` a problem, or one run whose passes all problems share. `sites` (C, 2, n) and
    `loo_proba` (n,) are None where rows have no sites of their own, `inducing_points` where there
    are none. `temper` is what variances of classes that are joint count, None for one. `spread` is
    that of the rows, which tells the units of their columns. `copies` are those of the rows where
    a fit counts equal ones as one, else None.
    """

    runs: list[Any]
    posteriors: list[Any]
    kernel: Kernel
    n_sweeps: int
    sites: Any
    loo_proba: Any
    inducing_points: Any = None
    joint: bool = False
    temper: float | None = None
    spread: float = 1.0
    copies: Any = None

    def of_rows(self, values):
        """Return values (.., m) of rows of the fit for all rows (.., n), those of their copies."""
        return values if self.copies is None else self.copies.of_rows(values)

    def shared(self, values):
        """Return the same where values are of all copies together, of which each has its share."""
        return values if self.copies is None else self.copies.shared(values)


def takes_temper(estimator):
    """Return whether rows left out choose how sure predictions of classes that are joint are."""
    several = len(estimator.classes_) > 2
    return several and estimator.multi_class == "auto" and estimator.optimizer is not None


def joined_fits(fits, y, spread, joint=False, own_points=False, copies=None):
    """Return the `GPFit` of `BinaryFit`s with sites on the rows, whose class indices are y.

    `spread` is that of the rows. `joint` says that the one problem has all classes, `own_points`
    that each of several has inducing points of its own, `copies` are those of the rows.
    """
    own = [f.attributes for f in fits]
    kernels, points = [a["kernel"] for a in own], [a["points"] for a in own]
    return GPFit(
        runs=fits,
        posteriors=[f.posterior for f in fits],
        kernel=kernels[0] if len(own) == 1 else CompoundKernel(kernels),
        n_sweeps=max(a["n_sweeps"] for a in own),
        sites=np.stack([a["sites"] for a in own]),
        loo_proba=_own_label_proba(own, y),
        inducing_points=np.stack(points) if own_points and len(own) > 1 else points[0],
        joint=joint,
        temper=own[0].get("temper"),
        spread=spread,
        copies=copies,
    )


def _own_label_proba(attributes, labels):
    """Leave-one-out probability (n,) of each row's own label; of separate problems, normalised."""
    logs = attributes[0]["loo_log"]
    if len(attributes) > 1:
        logs = log_softmax([a["loo_log"][1] for a in attributes], axis=0)
    return np.exp(logs[labels if len(logs) > 1 else 0, np.arange(len(labels))])


def last_sites(last, kernel, empty, spread):
    """Return (theta, sites) to start each problem from: those of the last fit if they fit.

    `last` is the `GPFit` before, or None; `empty` (n_problems, 2, n, ...) are sites to start from
    otherwise, `spread` is that of the rows.
    """
    dense = last is not None and isinstance(last.runs[0], fitting.BinaryFit)
    if dense and last.sites.shape == empty.shape and checks.same_units(last.spread, spread):
        thetas = [f.attributes["kernel"].theta for f in last.runs]
        if len(thetas[0]) == kernel.n_dims:
            return thetas, list(last.sites)
    return [kernel.theta] * len(empty), list(empty)


def _inducing_moments(posterior):
    """Return mean and covariance of the inducing values, those of a mixture by total covariance."""
    if not hasattr(posterior, "posteriors"):
        return posterior.inducing_mean, posterior.inducing_cov
    pairs = map(_inducing_moments, posterior.posteriors)
    mean, cov = (np.array(each) for each in zip(*pairs, strict=True))
    return posterior.weight @ mean, mixture_covariance(posterior.weight, cov, mean, mean)


def attributes_of_points(fit):
    """Return the attributes that tell of the inducing points of a `GPFit`."""
    if fit.inducing_points is None:
        return dict(method_="dense")
    pairs = zip(*map(_inducing_moments, fit.posteriors), strict=True)
    mean, cov = map(fitting.one_or_stack, pairs)
    told = dict(method_="sparse", inducing_points_=fit.inducing_points)
    return told | dict(inducing_mean_=mean, inducing_cov_=cov)


def attributes_of_sites(fit, kept):
    """Return the attributes that tell of the sites of the rows, which `kept` marks."""
    if fit.sites is None:
        return {}
    precision, shift = fitting.one_or_stack(fit.sites[:, 0]), fitting.one_or_stack(fit.sites[:, 1])
    if fit.joint:  # sites have an entry a class, last
        precision, shift = precision.T, shift.T
    return dict(
        site_precision_=checks.spread_rows(fit.shared(precision), kept),
        site_shift_=checks.spread_rows(fit.shared(shift), kept),
        loo_proba_=checks.spread_rows(fit.of_rows(fit.loo_proba), kept, np.nan),
    )


def attributes_of_averages(fit, learned, learned_rate):
    """Return the attributes that tell of the average over hyperparameters of a `GPFit`.

    Without an average what was learned is the one node: parameters of the kernel if `learned`, the
    rate of wrong labels of its setting if `learned_rate`.
    """
    own = [run.attributes for run in fit.runs]
    used, each = "mode", _modes(fit, own, learned, learned_rate)
    if "average" in own[0]:
        used, told = "integrate", ("names", "theta", "anisotropy")
        each = ((a["average"].phi, a["average"].weight, *(a[n] for n in told)) for a in own)
    nodes, weights, names, *rest = map(list, zip(*each, strict=True))
    thetas, spreads = (values[0] if len(nodes) == 1 else values for values in rest)
    attributes = fitting.hyper_attributes(nodes, weights, names[0], used)
    return attributes | dict(hyper_theta_=thetas, hyper_anisotropy_=spreads)


def attributes_of_lengths(fit):
    """Return how many ratios of lengths the rows of a `GPFit` tell, of averages over kernels."""
    own = [run.attributes["average"] for run in fit.runs if "average" in run.attributes]
    return {"effective_lengths_": fitting.one_or_stack([a.n_inner for a in own])} if own else {}


def _modes(fit, own, learned, learned_rate):
    """Yield nodes, weight, names, thetas and spreads of the mode of each kernel of a `GPFit`."""
    for k, kernel in enumerate(getattr(fit.kernel, "kernels", [fit.kernel])):
        names, phi, spread = learned_coordinates(kernel) if learned else ((), np.empty(0), 0.0)
        if learned_rate:
            names = (*names, "logit_label_noise")
            phi = np.append(phi, logit(own[k % len(own)]["setting"].rate))
        yield phi[None], np.ones(1), names, kernel.theta[None], np.array([spread])


def ending_in(history, record):
    """Return a history that ends in other figures: of the final state, where nobody counted it."""
    last = {name: np.append(history[name][:-1], float(value)) for name, value in record.items()}
    return history | last


class WithLearned:
    """Monitor that adds what was learned to the state of the sweeps that follow.

    Of their payload that is the first part, or the whole of it where passes make a model.
    """

    def __init__(self, monitor, learned):
        self.monitor, self.learned, self.begin = monitor, learned, monitor.begin

    def end(self, record, payload):
        state = payload[0] if isinstance(payload, tuple) else payload
        return self.monitor.end(record, (self.learned, state))


def watch_of_sweeps(trace, end, learned, ends=()):
    """Return the monitor of the sweeps that lead from what was learned to the sites of a fit.

    They are iterations of the `trace` after a search that nobody was told of, or whose `end` has a
    reason among `ends`. Nobody counts them after another, which was stopped or has used up the
    iterations.
    """
    counted = not trace.n_iter or end.reason in ends
    return WithLearned(trace, learned) if counted else SILENT


def remark_of(end):
    """Return what is not as it should be at a `LearningEnd`, in words."""
    if end.reason not in ("max_iter", "stuck"):
        return ""
    return (
        f"learning ended after {end.n_steps} steps ({end.reason}), with a gradient of the "
        f"log evidence of {end.gradient:.3g}"
    )


def fit_of_sites(posterior, trace, end, result, kernel, left_out, points=None, **more):
    """Return the `BinaryFit` of sites on the rows, whatever structure and rule they come from.

    `trace` is that of the whole fit, `end` the `LearningEnd`, `result` the final run of EP, in
    whose figures the history ends whether its sweeps are counted or not; `left_out` says how likely
    labels are from the other rows, `more` are further attributes.
    """
    record = result.evaluation.record
    history = ending_in(trace.history, {"residual": result.residual, **record})
    more |= dict(kernel=kernel, points=points, sites=result.x, n_sweeps=result.n_iter, **left_out)
    reason, log_evidence = worst_reason([end.reason, result.reason]), float(record["log_evidence"])
    return fitting.BinaryFit(posterior, history, reason, log_evidence, more, remark_of(end))


def attributes_of_nodes(average, theta, names):
    """Return what an `Average` leaves in the attributes of a fit, with theta (p,) of its nodes."""
    spreads = np.array([n.payload.s for n in average.nodes])
    bare = average._replace(nodes=[n._replace(payload=None) for n in average.nodes])
    return dict(average=bare, anisotropy=spreads, theta=np.array(theta), names=names)


def evidence_at(at, y, theta, fit, slopes, exact):
    """Return log evidence at theta of all problems of a fit, and its gradient if `slopes`.

    `at(k, labels, x, theta, slopes, residual)` returns both of problem k from sites x, with EP run
    to a residual of at most that. Unless gradients are `exact`, that of the one problem is found by
    differences.
    """
    C = len(fit.posteriors)
    labels = [y] if fit.joint else [fitting.signs_of(y, k, C) for k in range(C)]
    problems = list(zip(range(C), labels, fit.sites, strict=True))
    parts = np.split(theta, C)
    found = [at(*p, part, slopes and exact) for p, part in zip(problems, parts, strict=True)]
    values, gradients = zip(*found, strict=True)
    if not slopes:
        return float(sum(values)), None
    if exact:
        return float(sum(values)), np.concatenate(gradients)
    return values[0], central_differences(lambda t: at(*problems[0], t, False, 1e-6)[0], theta)


def average_alone(mode, curvature):
    """Return the `Average` of a mode alone, with the volume of a normal distribution about it."""
    log_volume = -0.5 * np.linalg.slogdet(curvature / (2.0 * np.pi))[1]
    return average_of([mode], np.array([mode.objective + log_volume]))


def log_sides(factor, mean, var):
    """Return log probabilities (2, n) of labels -1 and 1 of latent values N(mean, var)."""
    return np.array([factor.tilted(sign, mean, var).log_z for sign in (-1.0, 1.0)])


def mixed_logs(weight, logs, rows):
    """Return mixtures (S, n) of what M nodes of weight (M,) say of rows left out.

    logs (M, S, n) are those of labels -1 and 1, or of the label itself alone; `rows` are the labels
    of the problem and the copies that go with each row.
    """
    y, copies = rows
    own = logs[:, np.where(y > 0, -1, 0), np.arange(len(y))]
    log_weight = log_weights_without(weight, own, copies)
    return np.logaddexp.reduce(log_weight[:, None] + logs, axis=0)


def class_cavity(result, copies):
    """Return the `Cavity` (n, K) without so many copies of each row in a joint problem."""
    state = result.evaluation.payload[0]
    return class_left_out(Sites(*result.x), state.mean, state.cov, state.extra_var, copies)


def left_out_classes(factor, nodes, weight, rows, tempered):
    """Return the log probabilities of classes of rows left out, and the temper that these ask for.

    `nodes` are means and variances (n, K) that nodes of weight (M,) leave, `rows` class indices,
    copies, and those that go with each row. Without a temper it is None.
    """
    y, *copies = rows
    moments = partial(class_moments, factor.rough() if tempered else factor, y)
    # a scale of the mean beside it ends at 1.00, within .05, on 19 sets of 3 to 12 classes
    priors = (LogPrior(1.0),) if tempered else None
    found = calibrated(priors, CavityRows.of(moments, nodes, weight, *copies), _TEMPER_ERRORS)
    return dict(loo_log=found.log_proba[None], temper=float(found.scale[0]) if tempered else None)


class GaussianProcessBase(KernelReport, PosteriorClassifier):
    """Attributes, evidence at given hyperparameters and diagnosis of the GP classifiers.

    A fit leaves two private attributes besides what predicts: `_plan`, all that was decided before
    it, with the rows that are kept (None after `partial_fit`, which keeps none), and `_fitted`, the
    `GPFit`.
    """

    classes_: Any
    method_: str
    inducing_points_: Any
    site_precision_: Any
    site_shift_: Any
    _coder: Any = None
    _intercept = 0.0  # prior variance of an intercept in the default kernel
    _linear = False  # whether the default kernel has a term of linear functions
    _methods: tuple[str, ...] = ("auto", "dense", "sparse")

    def _check_gp_parameters(self):
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise TypeError(f"kernel must be a scikit-learn kernel or None, got {self.kernel!r}.")
        if isinstance(self.kernel, CompoundKernel):
            raise ValueError(
                "kernel cannot be a CompoundKernel: give the kernel of one class, from which each "
                "of several classes starts."
            )
        checks.check_choice("method", self.method, self._methods)
        checks.check_number("n_inducing", self.n_inducing, 1, integer=True, optional=True)
        checks.check_number("n_restarts_optimizer", self.n_restarts_optimizer, 0, integer=True)
        if self.inducing_points is not None:
            what = "None, or an array or table of shape (m, d)"
            checks.check_sequence("inducing_points", self.inducing_points, what)
        checks.check_number("jitter", self.jitter, 0, np.inf, boundaries="left")
        checks.check_hyperparameters(self.hyperparameters)

    def _class_weighted(self, y, weight):
        """Return the copies (n,) of rows with class indices y times the weights of the classes."""
        return weight * checks.checked_class_weights(self, self.classes_[y], weight)[y]

    @property
    def _takes_objects(self):
        """Whether the kernel compares objects, and rows are therefore taken as they are."""
        if self.method == "sparse" or (self.method == "auto" and self._asks_for_inducing):
            return False
        return self.kernel is not None and not self.kernel.requires_vector_input

    def _through_points(self, n_rows):
        """Return whether a fit to so many rows goes through inducing points."""
        if self.method != "auto":
            return self.method == "sparse"
        return self._asks_for_inducing or (n_rows > LIMITS.dense and not self._takes_objects)

    def _check_new(self, X):
        check_is_fitted(self)
        posterior = self._posteriors[0]
        if hasattr(posterior, "posteriors"):
            posterior = posterior.posteriors[0]
        kernel = getattr(posterior, "kernel", None)  # with inducing points it takes vectors
        if kernel is not None and not kernel.requires_vector_input:
            return object_rows(X)
        return checks.validated_coded(self, X, self._coder, reset=False)

    def _training(self, X, y, sample_weight, dtype=np.float64):
        """Return the checked `Training` with weights of rows times those of classes."""
        self._coder = None
        if self._takes_objects:
            free = dict(ensure_2d=False, allow_nd=True, ensure_all_finite=False, dtype=None)
            training = checks.validate_training(self, object_rows(X), y, sample_weight, **free)
        else:
            if self.kernel is not None and not self.kernel.requires_vector_input:
                _refuse_strings(X)
            coded = X
            # categories become indicators
            if self.kernel is None and hasattr(X, "dtypes") and category_columns(X):
                self._coder = CategoryCoder()
                coded = self._coder.fit_transform(X)
            training = checks.validate_training(self, coded, y, sample_weight, dtype)
            if coded is not X:  # names and number of columns are those of the caller
                validate_data(self, X, skip_check_array=True)
            if self.kernel is None:
                checks.warn_of_spreads(self, training.X)
        return training._replace(weight=self._class_weighted(training.y, training.weight))

    @property
    def _last_fit(self):
        """The `GPFit` to start from, None where there is none or it is not wanted."""
        return getattr(self, "_fitted", None) if self.warm_start else None

    def _store(self, plan, fit, kept, **more):
        """Set all fitted attributes but those of the data, and warn once if needed.

        `kept` marks the rows of the caller that the fit has sites of; `more` are attributes of one
        estimator.
        """
        self._plan, self._fitted = plan, fit
        attributes = fitting.run_attributes(fit.runs) | attributes_of_points(fit)
        attributes |= attributes_of_sites(fit, kept) | more
        learned_rate = getattr(self, "label_noise", None) == "learn"
        attributes |= attributes_of_averages(fit, self.optimizer is not None, learned_rate)
        fitting.replace_fitted(self, attributes)
        self.kernel_, self.n_sweeps_ = fit.kernel, fit.n_sweeps
        self.multi_class_ = "joint" if fit.joint else "one_vs_rest"
        self.log_marginal_likelihood_value_ = self.log_evidence_
        self._posteriors = fit.posteriors
        if not self.converged_:
            advice = "raise max_iter and max_sweeps, lower damping, or bound the kernel amplitude"
            fitting.warn_not_converged(self, advice, fitting.remarks_of(fit.runs))
        if plan is not None and self.kernel is not None and self.optimizer is not None:
            warn_at_bounds(fit.kernel)
        return self

    def latent_mean_and_variance(
        self, X: RowsLike, corrected: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and variance of the latent function at new rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows, taken as new ones even if they were seen in training.
        corrected : bool, default=False
            Correct the variances by the linear response of expectation propagation: by how much the
            means move where the prior is pushed [1]_. Where labels may be wrong at a known rate,
            intervals are then right; elsewhere they hardly change, and predictions never do. It
            takes O(n^3) for each node of an average over hyperparameters, with n training rows.

        Returns
        -------
        mean, variance : ndarray of shape (n,), or (n, n_classes) for more than two classes
            In units of the latent function.

        Raises
        ------
        ValueError
            If `corrected` is True for inducing points, several classes jointly, or label errors by
            another rule than "ep".

        References
        ----------
        .. [1] M. Opper and O. Winther, "Variational linear response", NIPS 2003.
        """
        mean, var = super().latent_mean_and_variance(X)
        checks.check_flag("corrected", corrected)
        if not corrected:
            return mean, var
        check_responds(self, "corrected")
        X = self._check_new(X)
        each = [added_variance(p, X, *args) for p, args in site_problems(self)]
        return mean, var + fitting.one_or_stack(each, axis=1)

    def log_marginal_likelihood(
        self, theta: ArrayLike | None = None, eval_gradient: bool = False, clone_kernel: bool = True
    ) -> Any:
        """Log evidence of the training data at given kernel parameters.

        Parameters
        ----------
        theta : array-like of shape (p,), default=None
            Log-transformed kernel parameters as in `kernel_.theta`; None returns the value of the
            fit. With more than two classes the parameters of all binary kernels one after another,
            or those of one for all.
        eval_gradient : bool, default=False
            Also return the gradient in theta.
        clone_kernel : bool, default=True
            False leaves theta in `kernel_`; predictions stay those of the fit.

        Returns
        -------
        log_likelihood : float
            That of all classes jointly, or the sum over the one-versus-rest problems, with EP run
            to `tol` from the fitted sites. Where labels may be wrong this is the evidence that
            kernels are learned by; `log_evidence_` is that of the `rule` of the fit.
        gradient : ndarray of shape (p,)
            Only if `eval_gradient`; in the parameters as they were given. Of more than two classes
            jointly, and where rows share an averaged site, it is found by central differences, in
            2 p further runs of EP.

        Raises
        ------
        ValueError
            If theta has the wrong length, or after `partial_fit`, which keeps no rows.
        """
        check_is_fitted(self)
        if theta is None and not eval_gradient:
            return self.log_marginal_likelihood_value_
        fitted = self._fitted.kernel
        whole, n_equal = whole_theta(fitted, fitted.theta if theta is None else theta)
        if self._plan is None:
            raise ValueError("the evidence at other theta needs rows, which partial_fit forgets.")
        args = whole, self._fitted, self.n_jobs, eval_gradient
        value, gradient = self._plan.value_and_gradient(*args)
        if not clone_kernel:
            self.kernel_ = fitted.clone_with_theta(whole)
        if not eval_gradient:
            return value
        return value, gradient.reshape(n_equal, -1).sum(axis=0)

    _corrections = corrections

    def _log_weights(self, rows, n_draws, rng):
        """Return log weights of draws of the latent values of the rows, which a dense fit keeps.

        Of an average they are those of its heaviest node.
        """
        plan, fit = self._plan, self._fitted
        nodes = [run.attributes["average"] for run in fit.runs if "average" in run.attributes]
        told = average_remarks(nodes)
        left_out = "Importance weights are left out: "
        if fit.inducing_points is not None:
            points = "inducing points do not keep what the rows say of each other."
            return None, (*told, left_out + points)
        if rows is not None:
            check_same_rows(self, rows)
        if len(fit.posteriors) > 1:
            own = "they are those of one problem, and each class has its own."
            return None, (*told, left_out + own)
        posterior, sign = fit.posteriors[0], fitting.signs_of(plan.y, 0, 1)
        posterior = fit.runs[0].attributes.get("posterior_of_sites", posterior)
        latent = draw_latent(posterior, plan.X, n_draws, rng)
        if latent.ndim == 3:
            sites = Sites(*fit.sites[0])
            return class_log_weights(posterior.factor, plan.y, plan.weight, sites, latent), told
        args = posterior.factor, sign, plan.weight, *plan.latent_sites(fit), latent
        return site_log_weights(*args), told
