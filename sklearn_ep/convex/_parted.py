"""A convex variational fit of rows in partitions: the problem, and its solution by visits."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils import check_random_state, compute_class_weight

from .._engine.partition import PartMap, add_up
from .._estimator.checks import LARGEST_IN_UNITS, refuse_joint
from .._estimator.fitting import BinaryFit
from .._estimator.row_parts import check_facts, class_counts, facts_of_part
from ._calibration import LeftOut
from ._lanczos import rademacher
from ._natural import VISITS_A_STEP, NaturalGradient
from ._nodes import single_node
from ._parameters import LARGEST_EXACT, LONGER_LEARNING, make_prior, prior_mode, refuse_integration
from ._part_calibration import calibrated_parts, left_out_of_anchors, left_out_of_posterior
from ._part_rows import RowSpec, WholePosterior, site_sums
from ._posterior import WeightPosterior, mixed_weights
from ._sampled import SAMPLED_TOL, SampledLoop, is_large, summed

__all__ = ["PartedProblem", "fit_parted", "make_parted"]


@dataclass
class PartedProblem:
    """Everything a fit on partitions needs; `run` is the open `PartMap`.

    `spec` is that of the first of `n_problems` binary problems, one of two classes or one a class.
    `sizes` are the rows of each part, `weight` all of them with repetition; `limits` are those of
    the sampled loop, `noise` and `evidence_probes` its random numbers, None with exact variances.
    `calibration` is "loo" or None. `lasts` are the states of an earlier fit of the same `shape`,
    None without one.
    """

    run: PartMap
    spec: RowSpec
    sizes: list
    prior: Any
    variance: str
    tol: float
    max_iter: int
    damping: float
    n_problems: int
    lasts: list
    shape: tuple
    weight: float
    limits: tuple
    calibration: str | None
    noise: Any = None
    evidence_probes: Any = None

    @property
    def solver(self):
        """What solves for the coefficients."""
        return "primal" if self.variance == "exact" else "cg"

    def of_class(self, k):
        """Return the problem of class k against the rest, or of the second of two classes."""
        if self.n_problems == 1:
            return self
        return replace(self, spec=self.spec.of_class(k), lasts=self.lasts[k:])

    @property
    def last(self):
        """State that the fit starts from, or None."""
        return self.lasts[0]

    def posterior(self, step):
        """Return what predicts as if the loop ended with this step."""
        if self.variance == "calibrated":
            predictor = step.predictor
            return WeightPosterior(step.u, self.spec.intercept, predictor, predictor)
        return WeightPosterior(step.mean, self.spec.intercept, step.system, step.system)

    def visit(self, posterior):
        """Return the `SiteSums` of all rows at a posterior."""
        return add_up(self.run(site_sums, range(len(self.sizes)), self.spec, posterior))

    def left_out(self, form, *state):
        """Return the `LeftOut` of all rows, and the visits it took; see `calibrated_parts`."""
        if self.calibration is None:
            return LeftOut(1.0, 1.0), 0
        return calibrated_parts(self.run, sum(self.sizes), self.spec, form, *state)


def make_parted(estimator, run, from_user):
    """Look at the rows once, set what follows from them, and return the `PartedProblem`.

    `from_user` says that the parts hold labels, not yet class indices.
    """
    facts = run(facts_of_part, range(len(run.parts)), True)
    labels, counts = class_counts(facts)
    if from_user:
        check_facts(estimator, facts, LARGEST_IN_UNITS)
        if len(labels) < 2:
            raise ValueError(f"all partitions together have one class, {labels.tolist()[0]!r}.")
        estimator.classes_ = labels
    classes = estimator.classes_
    refuse_integration(estimator, "partitions")
    d = estimator.n_features_in_
    n = d + bool(estimator.fit_intercept)
    variance = _variance_on_parts(estimator, n)
    weights = compute_class_weight(
        estimator.class_weight, classes=classes, y=classes, sample_weight=counts
    )
    if not np.all(weights > 0):
        raise ValueError(f"class_weight must be positive, got {estimator.class_weight!r}.")
    n_problems = 1 if len(classes) == 2 else len(classes)
    if n_problems > 1:
        refuse_joint(estimator, "partitions")
    shape = ("partitions", d, estimator.fit_intercept, variance, prior_mode(estimator), n_problems)
    lasts, last_shape = getattr(estimator, "_warm_state", ([None], None))
    sizes, sampled = [f.n_rows for f in facts], variance == "calibrated"
    rng = check_random_state(estimator.random_state)
    spec = RowSpec.of(
        labels, weights, bool(estimator.fit_intercept), estimator.bound,
        tuple(np.cumsum([0, *sizes[:-1]]).tolist()),
        int(rng.randint(np.iinfo(np.int32).max)),
        is_large(sum(f.n_entries for f in facts)),
    )  # fmt: skip
    probes = estimator.n_evidence_probes if sampled else 0
    prior = make_prior(estimator, d)
    longer = (LONGER_LEARNING if prior.learn else 1) if sampled else VISITS_A_STEP
    return PartedProblem(
        run=run,
        spec=spec,
        sizes=sizes,
        prior=prior,
        variance=variance,
        tol=estimator.tol,
        max_iter=longer * estimator.max_iter,
        damping=estimator.damping,
        n_problems=n_problems,
        lasts=lasts if estimator.warm_start and last_shape == shape else [None] * n_problems,
        shape=shape,
        weight=float(counts @ weights),
        limits=(SAMPLED_TOL * estimator.inner_tol, estimator.max_inner_iter),
        calibration=estimator.calibration,
        noise=rng.standard_normal((n, estimator.n_variance_samples)) if sampled else None,
        evidence_probes=rademacher(n, probes, rng) if probes else None,
    )


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
        return "exact" if n <= LARGEST_EXACT else "calibrated"
    if variance == "exact" and n > LARGEST_EXACT:
        raise ValueError(
            f"variance='exact' on partitions is for up to {LARGEST_EXACT} coefficients, got {n}: "
            "take 'calibrated'."
        )
    return variance


def fit_parted(problem, monitor, k):
    """Fit binary problem k of a `PartedProblem` and return its `BinaryFit`."""
    own = problem.of_class(k)
    try:
        return (_exact if own.variance == "exact" else _calibrated)(own, monitor)
    finally:
        own.spec.forget()


def _calibrated(problem, monitor):
    """Fit with sampled variances."""
    spec = problem.spec
    inner_tol, max_inner_iter = problem.limits
    loop = SampledLoop(
        summed(problem.run, spec), problem.prior, problem.weight, problem.noise, spec.intercept,
        inner_tol, max_inner_iter, spec.single,
    )  # fmt: skip
    limits = dict(tol=problem.tol, max_iter=problem.max_iter, damping=problem.damping)
    result = loop.solve(monitor=monitor, last=problem.last, **limits)
    step = result.evaluation.payload
    log_evidence, error, dof = loop.finish(step, problem.evidence_probes)
    left_out, n_visits = problem.left_out(left_out_of_anchors, loop.point, loop.anchors)
    attributes = dict(
        scale=problem.prior.spread(step.scale),
        dof=dof,
        n_products=loop.n_products,
        n_newton=loop.n_newton,
        n_passes=loop.n_visits + n_visits,
        last=loop.state(),
        evidence_std=error,
        average=single_node(problem.prior, step.scale, log_evidence),
        left_out=left_out,
    )
    posterior = _tempered(problem.posterior(step), left_out)
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def _exact(problem, monitor):
    """Fit with exact variances."""
    n = len(problem.prior.variance)
    loop = NaturalGradient(problem.visit, problem.prior, n)
    state = loop.start() if problem.last is None else problem.last
    limits = dict(tol=problem.tol, max_iter=problem.max_iter, damping=problem.damping)
    result = loop.solve(state, monitor=monitor, **limits)
    step = result.evaluation.payload
    whole = WholePosterior(step.mean, step.system.half)
    left_out, n_visits = problem.left_out(left_out_of_posterior, whole)
    flat = np.any(np.isinf(problem.prior.variance))
    log_evidence = np.nan if flat else step.objective
    attributes = dict(
        scale=problem.prior.spread(step.scale),
        dof=step.dof,
        n_products=2 * loop.n_visits,
        n_newton=0,
        n_passes=loop.n_visits + n_visits,
        last=result.x,
        evidence_std=0.0,
        average=single_node(problem.prior, step.scale, log_evidence),
        left_out=left_out,
    )
    posterior = _tempered(problem.posterior(step), left_out)
    return BinaryFit(posterior, result.history, result.reason, log_evidence, attributes)


def _tempered(posterior, left_out):
    """Return what predicts with slope and temper."""
    return mixed_weights([posterior], np.ones(1), left_out.slope, left_out.temper)
