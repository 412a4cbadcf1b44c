"""Fits of binary problems: what is decided for them, and the ways from rows to a posterior.

Rows in memory have exact variances by the double loop, or sampled ones; rows in partitions exact
ones by natural gradients, or sampled ones by the same loop as in memory, whose rows are one part.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from joblib import effective_n_jobs
from sklearn.utils import check_random_state

from .._engine.hyper import Average, Node, mixture_moments
from .._engine.left_out import LeftOut, Priors
from .._engine.partition import fit_token
from .._engine.rows import find_copies, taken_copies
from .._estimator import checks
from .._estimator.fitting import BinaryFit
from .._estimator.row_parts import check_facts, class_counts, facts_of_part
from ._calibration import SCALES, calibrated_labels, rows_at_scales
from ._double_loop import ExactFit, Last
from ._parameters import SIZES, Limits, is_flat, learns_scale, make_prior, refuse_integration
from ._posterior import AveragedWeights, WeightPosterior
from ._rows import PartedRows, PartRows, RowSpec, column_sums, left_out, left_out_of_anchors
from ._sites import LogisticSites
from ._systems import SYSTEMS, Design, IterativeSystem, rademacher, weighted_variances
from ._visits import NaturalGradient, SampledLoop


@dataclass
class RowsInMemory:
    """Rows of all binary problems, sent to workers as they are.

    `copies` are those among the rows that were given, `taken` (m,) is their share that goes with a
    row that is left out; `averaged` tells whether the scale of the prior is averaged over, `seed`
    is that of the normals of the rows, and `size` that of the columns.
    """

    design: Design
    weight: np.ndarray
    bound: str
    copies: Any
    taken: np.ndarray
    size: float
    averaged: bool = False
    seed: int = 0

    def sites(self, sign):
        """Return the sites for labels in {-1, +1} of the rows."""
        return LogisticSites(sign, self.weight, self.bound)

    def one_part(self, sign):
        """Return the `PartRows`, and the same as `PartedRows`."""
        B, single = self.design.B, self.design.B.size > SIZES.double_precision
        rows = PartRows(B, self.sites(sign), 0, self.seed, single)
        spec = RowSpec(None, None, self.design.intercept, self.bound, single=single)

        def run(worker, numbers, *message):
            return [worker(rows, 0, *message)]

        return rows, PartedRows(run, 1, spec, float(self.weight.sum()), self.size)


@dataclass
class Problem:
    """What the fits of the binary problems of a classifier need besides labels.

    `rows` are `RowsInMemory` or `PartedRows`, those of the first of the problems. `noise` are the
    random numbers of the columns and `evidence_probes` those of the log determinant, None with
    exact variances. `lasts` holds for each problem the state of an earlier fit, or None; only a fit
    of the same `shape` and units may begin there, with exact variances one to any rows. `n_rows`
    are all rows that were given, `n_jobs` the nodes of one problem to work on at once.
    """

    rows: Any
    prior: Any
    variance: str
    solver: str
    limits: Limits
    scales: Priors | None
    intercept: bool
    n_rows: int
    lasts: Any
    shape: tuple
    n_jobs: int
    noise: Any = None
    evidence_probes: Any = None

    @classmethod
    def of(cls, estimator, rows, prior, how, n_rows, shape, n_problems=1):
        """Return that of an estimator; `how` are variance, solver and limits."""
        lasts, last_shape, size = getattr(estimator, "_warm_state", (None, None, None))
        warm = estimator.warm_start and shape == last_shape
        if not warm or not checks.same_units(size, rows.size):
            lasts = [None] * n_problems
        n_jobs = effective_n_jobs(estimator.n_jobs) if n_problems == 1 else 1
        variance, solver, limits = how
        scales = None if estimator.calibration is None else SCALES
        given = rows, prior, variance, solver, limits, scales, bool(estimator.fit_intercept)
        return cls(*given, n_rows, lasts, shape, n_jobs)

    def posterior(self, step):
        """Return what predicts as if a loop ended with this step."""
        return WeightPosterior(step.mean, self.intercept, step.system)


def fit_exact(problem, sign, monitor, k):
    """Fit binary problem k to rows in memory by the double loop; return its `BinaryFit`.

    At one scale of the prior or averaged over it.
    """
    rows, last, averaged = problem.rows, problem.lasts[k], None
    last = None if last is None else last.at_rows(rows.design)
    sign = sign[rows.copies.first]
    system = SYSTEMS[problem.solver]
    fits = ExactFit(rows.design, rows.sites(sign), problem.prior, system, problem.limits)
    if rows.averaged:
        averaged, last = fits.averaged(last, monitor)
    at = fits if averaged is None else averaged.at(last.phi)
    loop, result = at.solved(last, monitor)
    step = result.evaluation.payload
    log_evidence = np.nan if np.any(np.isinf(at.prior.variance)) else step.objective
    phi = None if averaged is None else last.phi
    last = Last(step.mean, None, result.x[len(step.var) :], phi, step.system)
    if averaged is None:
        scale = at.prior.spread(step.scale)
        average, steps = single_node(at.prior, step.scale, log_evidence), [step]
    else:
        average = averaged.average(phi, result, problem.n_jobs, monitor)
        steps = [node.payload for node in average.nodes]
        scale = averaged.mean_scale(average.weight @ average.phi[:, 0], problem.prior)
        average = _kept(average, averaged.prior)
        log_evidence = average.log_evidence if np.isfinite(log_evidence) else log_evidence
    weight, of_rows = average.weight, rows.weight
    left = [each.left_out(rows.taken) for each in steps]
    left_out = calibrated_labels(sign, of_rows, weight, left, problem.scales)
    moments = np.array([each.inner.s for each in steps]), np.array([each.var for each in steps])
    attributes = dict(
        site_precision=steps[int(np.argmax(weight))].inner.site.precision,
        marginal_variance=mixture_moments(weight, *moments)[1],
        dof=float(weight @ np.array([each.dof for each in steps])),
        left_out=left_out,
        scale=scale,
        n_mvm=loop.design.n_products,
        n_newton=loop.n_newton,
        last=last,
        average=average,
    )
    posteriors = [problem.posterior(each) for each in steps]
    posterior = AveragedWeights(posteriors, weight, *left_out.scale)
    attributes = of_all_rows(rows.copies, attributes)
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def fit_sampled(problem, sign, monitor, k):
    """Fit binary problem k by visits to the rows, which are all in one part."""
    memory = problem.rows
    own, rows = memory.one_part(sign[memory.copies.first])
    fit, step, (form, *at) = _visited(problem, rows, monitor, k)
    precision = own.penalty(*at).precision
    precisions = step.prior.precision, precision
    fit.posterior.system = IterativeSystem(memory.design, *precisions, step.data)
    of_rows = dict(
        site_precision=precision,
        marginal_variance=own.variances(at[1]),
        left_out=rows_at_scales(problem.scales, *form(own, *at, memory.taken)),
    )
    return _calibrated(fit, of_all_rows(memory.copies, of_rows))


def fit_parted(problem, _, monitor, k):
    """Fit binary problem k to rows in partitions and return its `BinaryFit`."""
    # class k against the rest, else the second of two classes
    positive = k if len(problem.lasts) > 1 else 1
    with fit_token() as token:
        spec = problem.rows.spec._replace(positive=positive, token=token)
        rows = replace(problem.rows, spec=spec)
        fit, _, how = _visited(problem, rows, monitor, k)
        left_out = LeftOut(np.ones(2)) if problem.scales is None else rows.left_out(*how)
    return _calibrated(fit, dict(left_out=left_out, n_passes=rows.n_visits))


def _visited(problem, rows, monitor, k):
    """Run the loop of binary problem k on `PartedRows`.

    Returns the `BinaryFit` as it is not calibrated yet, the last step, and how rows are left out.
    """
    prior, limits, last = problem.prior, problem.limits, problem.lasts[k]
    if problem.variance == "exact":
        loop: Any = NaturalGradient(rows, prior)
        state = loop.start() if last is None else last
        result = loop.solve(state, monitor=monitor, **limits.outer)
        step = result.evaluation.payload
        log_evidence, error = np.nan if np.any(np.isinf(prior.variance)) else step.objective, 0.0
        last, counts = result.x, dict(n_mvm=2 * rows.n_visits)
        how = left_out, step.mean, step.system.half
    else:
        inner = limits.inner_tol, limits.max_inner_iter
        loop = SampledLoop(rows, prior, problem.noise, *inner, problem.variance)
        result = loop.solve(monitor=monitor, last=last, **limits.outer)
        step, place = result.evaluation.payload, loop.place
        log_evidence, error = loop.finish(step, problem.evidence_probes)
        last = place.point.u, place.scale, loop.size
        counts = dict(n_mvm=place.n_products, n_newton=loop.n_newton)
        how = left_out_of_anchors, place.point, place.anchors
    scale, average = prior.spread(step.scale), single_node(prior, step.scale, log_evidence)
    attributes = dict(scale=scale, dof=step.dof, average=average, evidence_std=error, **counts)
    attributes["last"] = last
    run = problem.posterior(step), result.history, result.reason, log_evidence
    return BinaryFit(*run, attributes), step, how


def _calibrated(fit, more):
    """Return a `BinaryFit` with further attributes, of which those of rows calibrate it."""
    posterior = AveragedWeights([fit.posterior], np.ones(1), *more["left_out"].scale)
    return fit._replace(posterior=posterior, attributes=fit.attributes | more)


_OF_SITES = {"site_precision", "site_shift"}


def of_all_rows(copies, attributes):
    """Return the attributes of a `BinaryFit` to merged rows for all rows.

    Sites are those of all copies together.

    A row is left out with all its copies. Where variances are sampled, solves end at a tolerance,
    and learning turns differences at the level of rounding into visible ones; so do the sites of
    several classes. With rows merged and sorted, weights and repeated rows, in any order, are one
    problem to the last bit.
    """
    scale, *each = attributes["left_out"]
    new = {name: copies.shared(attributes[name]) for name in _OF_SITES & attributes.keys()}
    new["marginal_variance"] = copies.of_rows(attributes["marginal_variance"])
    return attributes | new | dict(left_out=LeftOut(scale, *map(copies.of_rows, each)))


def rows_and_prior(estimator, training):
    """Return `RowsInMemory` of checked training data, copies as one, and the prior."""
    size = checks.check_column_scales(estimator, training.X, checks.LARGEST_IN_UNITS)
    y = estimator.classes_[training.y]
    weight = checks.checked_class_weights(estimator, y, training.weight)
    weight = training.weight * weight[training.y]
    copies = find_copies(training.X, weight, training.y)
    X, y, weight = training.X[copies.first], training.y[copies.first], copies.weight
    place = find_copies(X, weight).group
    taken = taken_copies(place, y, weight) / weight
    design = Design(X, bool(estimator.fit_intercept))
    prior = make_prior(estimator, X.shape[1], lambda: weighted_variances(X, weight))
    return RowsInMemory(design, weight, estimator.bound, copies, taken, size), prior


def make_problem(estimator, training):
    """Return the `Problem` of checked training data: matrices, prior, solver and variances."""
    variance, solver = _methods(estimator, training.X)
    sampled, rng = variance != "exact", check_random_state(estimator.random_state)
    rows, prior = rows_and_prior(estimator, training)
    averaged = prior.learn and estimator.hyperparameters != "mode"
    if averaged and sampled:
        refuse_integration(estimator, f"variance={variance!r}, whose evidence is sampled")
    rows.averaged, rows.seed = averaged and not sampled, checks.draw_seed(rng)
    longer = SIZES.longer_learning if prior.learn and sampled else 1
    how = variance, solver, Limits.of(estimator, longer)
    # sites of the same rows are where sampled fits start, a posterior of any rows where exact do
    state = rows.design.shape[0] if sampled else None, rows.averaged
    return _problem(estimator, rows, prior, how, len(training.y), state, rng)


def _problem(estimator, rows, prior, how, n_rows, state, rng):
    """Return a `Problem`.

    `how` are variance, solver and limits; `state` is what the shape of its state depends on besides
    them.
    """
    variance, n = how[0], len(prior.variance)
    n_problems = checks.count_problems(estimator)
    of_prior = repr((estimator.prior, learns_scale(estimator), estimator.laplace_scale))
    shape = (*state, n, n_problems, variance, of_prior)
    problem = Problem.of(estimator, rows, prior, how, n_rows, shape, n_problems)
    if variance != "exact":
        problem.noise = rademacher(n, estimator.n_variance_samples, rng)
        problem.evidence_probes = evidence_probes(estimator, n, rng)
    return problem


def make_parted(estimator, run, from_user):
    """Look at the rows of a `PartMap` once, set what follows, and return the `Problem`.

    `from_user` says that the parts hold labels, not yet class indices.
    """
    facts = run(facts_of_part, range(len(run.parts)), True)
    labels, counts = class_counts(facts)
    size = check_facts(estimator, facts, checks.LARGEST_IN_UNITS, from_user)
    if from_user:
        if len(labels) < 2:
            raise ValueError(f"all partitions together have one class, {labels.tolist()[0]!r}.")
        estimator.classes_ = labels
    refuse_integration(estimator, "partitions")
    classes, d = estimator.classes_, estimator.n_features_in_
    intercept = bool(estimator.fit_intercept)
    variance = _variance_on_parts(estimator, d + intercept)
    weights = checks.checked_class_weights(estimator, classes, counts)
    if len(classes) > 2:
        checks.refuse_joint(estimator, "partitions")
    sizes, sampled = [f.n_rows for f in facts], variance == "calibrated"
    rng, firsts = check_random_state(estimator.random_state), np.cumsum([0, *sizes[:-1]])
    seed, single = checks.draw_seed(rng), sum(f.n_entries for f in facts) > SIZES.double_precision
    spec = RowSpec(labels, weights, intercept, estimator.bound, firsts, seed if sampled else None)
    spec = spec._replace(single=single)
    rows = PartedRows(run, len(facts), spec, float(counts @ weights), size)
    prior = make_prior(estimator, d, lambda: rows.visit(column_sums).variances[:d])
    longer = (SIZES.longer_learning if prior.learn else 1) if sampled else SIZES.visits_a_step
    how = variance, "cg" if sampled else "primal", Limits.of(estimator, longer)
    return _problem(estimator, rows, prior, how, sum(sizes), ("partitions",), rng)


def evidence_probes(estimator, n, rng):
    """Return the probes of the log determinant, or None where none are wanted."""
    return rademacher(n, estimator.n_evidence_probes, rng) if estimator.n_evidence_probes else None


class _Rates(NamedTuple):
    """Seconds of one core for each unit of work; only the order of two ways counts.

    Measured with 33 parts of texts, reviews, news and a census, of 100 to 10,000 rows by 100 to
    47,000 columns: both ways take about half of what is foretold, within a factor of two from .2 s
    on. At a given scale of the prior sampled ones take a fifth, so that exact ones stay for longer.
    """

    factorised: float = 0.7e-9  # a cubed side of the matrix that is factorised
    explained: float = 1e-8  # an entry of X times that side
    # As much where the scale of the prior is averaged over. By the choice parts take 8.7 s, with
    # 1.0 11.6 s and at best 8.2 s. Log losses of those that go over are .0007 lower in the mean and
    # .003 higher at most.
    averaged: float = 5.0
    entry: float = 6e-6  # an entry of X, in 2000 products of a sampled fit
    column: float = 2e-5  # a column of X there
    begun: float = 0.1  # of a sampled fit, besides
    # Columns over rows from which the dual form of dense rows is cheaper, measured with 400 and
    # with 1000 rows: the primal one multiplies all rows at each step.
    dual: float = 0.7


_RATES = _Rates()


def _sampling_pays(estimator, X, side):
    """Return whether sampled variances cost less than exact ones for sparse X (q, d).

    Exact ones factorise a matrix of `side` rows, several times for an average over the scale of the
    prior. Products with dense rows cost more than they are worth there: of those False, and where
    sampled ones could not be averaged as asked.
    """
    if not sp.issparse(X) or estimator.hyperparameters == "integrate":
        return False
    exact = _RATES.factorised * side**3 + _RATES.explained * X.nnz * side
    if learns_scale(estimator) and estimator.hyperparameters != "mode":
        exact *= _RATES.averaged
    return _RATES.begun + _RATES.entry * X.nnz + _RATES.column * X.shape[1] < exact


def _dual_pays(X, most):
    """Return whether a matrix of the rows of X (q, d) is cheaper than one of the columns.

    Where it has more rows than columns only up to `most` of them.
    """
    q, d = X.shape
    return d > q or (not sp.issparse(X) and d > _RATES.dual * q and q <= most)


def _methods(estimator, X):
    """Return the way to variances and the solver for rows X (q, d) in memory."""
    # far from zero a heavy-tailed prior has next to no precision, and the dual form divides by it
    primal = is_flat(estimator) or estimator.prior != "gaussian" or not _dual_pays(X, SIZES.exact)
    variance, solver, side = estimator.variance, estimator.solver, X.shape[1 if primal else 0]
    if variance == "auto":
        sampled = side > SIZES.exact or _sampling_pays(estimator, X, side)
        variance = "calibrated" if sampled else "exact"
    if variance != "exact":
        return variance, "cg"
    return variance, solver if solver in SYSTEMS else "primal" if primal else "dual"


def _variance_on_parts(estimator, n):
    """Return "exact" or "calibrated" for n coefficients, or raise a ValueError."""
    variance = estimator.variance
    if variance not in ("auto", "exact", "calibrated"):
        raise ValueError(
            f"variance={variance!r} needs the rows in memory; on partitions there are 'exact' and "
            "'calibrated'."
        )
    if estimator.solver == "dual":
        raise ValueError("solver='dual' needs the rows in memory; leave it 'auto' on partitions.")
    if variance == "auto":
        return "exact" if n <= SIZES.exact else "calibrated"
    if variance == "exact" and n > SIZES.exact:
        raise ValueError(
            f"variance='exact' on partitions is for up to {SIZES.exact} coefficients, got {n}: "
            "take 'calibrated'."
        )
    return variance


def _kept(average, prior):
    """Return an `Average` over a prior's scale as it is kept: in units of the user, no payloads."""
    nodes = [n._replace(phi=prior.in_units(n.phi), payload=None) for n in average.nodes]
    return average._replace(nodes=nodes)


def single_node(prior, scale, log_evidence):
    """Return the `Average` of the one node of a fit whose scale is given or at its mode."""
    phi = np.atleast_1d(prior.in_units(np.log(prior.spread(scale)))) if prior.learn else np.empty(0)
    return Average.alone(Node(phi, log_evidence, 0.0, np.empty(0), 0.0, None))
