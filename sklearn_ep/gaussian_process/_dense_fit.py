"""One binary problem of Gaussian-process classification with the full covariance of the rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from .._engine.loop import SILENT, Trace, worst_reason
from .._engine.sites import Sites, cavity
from .._engine.whole import WholeEP
from .._estimator.fitting import BinaryFit
from ._dense_gp import DenseGPPosterior, KernelGP
from ._evidence import KEPT, EvidencePoint, maximise_by, maximise_evidence
from ._fitted import ending_in, signs_of
from ._kernels import with_theta

__all__ = [
    "LEARNING_TOL",
    "DensePlan",
    "WithLearned",
    "evidence_of_problems",
    "fit_dense",
    "fit_of_sites",
    "last_sites",
]

# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3


@dataclass
class DensePlan:
    """Everything the binary dense problems need besides their signs; sent to workers as it is.

    `X` are rows of numbers, or whatever objects the kernel compares; `y` holds class indices.
    `optimizer` is None, a function of the user, or anything else for L-BFGS-B. `starts` and `sites`
    have one entry a binary problem: the initial theta and the initial sites.
    """

    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    kernel: Kernel
    factor: Any
    rule: Any
    optimizer: Any
    restarts: np.ndarray
    starts: list
    sites: list
    tol: float
    max_iter: int
    max_sweeps: int
    damping: float
    accelerate: bool

    def ep(self, kernel, sign):
        """Return the fixed-point map of EP at a kernel."""
        return WholeEP(KernelGP(kernel, self.X), self.factor, sign, self.weight, self.rule)

    def solve(self, ep, x, tol, max_sweeps, monitor=SILENT):
        """Run EP from sites x (2, n)."""
        steps = dict(damping=self.damping, accelerate=self.accelerate, monitor=monitor)
        return ep.solve(x, tol=tol, max_iter=max_sweeps, **steps)

    def evidence(self, sign, x, tol):
        """Return theta -> `EvidencePoint`; sites are warm-started from the last point."""
        warm = [x]

        def evaluate(theta):
            kernel = with_theta(self.kernel, theta)
            ep = self.ep(kernel, sign)
            result = self.solve(ep, warm[0], tol, self.max_sweeps)
            warm[0], (state, _) = result.x, result.evaluation.payload
            value, gradient = result.evaluation.record["log_evidence"], ep.evidence_gradient(state)
            return EvidencePoint(value, gradient, result.residual, (kernel, state))

        return evaluate

    def value_and_gradient(self, theta, fit, n_jobs):
        """Return log evidence at theta, EP run from the sites of the fit, and its gradient."""
        return evidence_of_problems(
            lambda k, sign, x: self.evidence(sign, x, self.tol), self.y, theta, fit
        )

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        kernel, state = payload
        return DenseGPPosterior(kernel, self.X, state, self.factor)

    def latent_sites(self, fit):
        """Return the sites (precision, shift) on the latent values of the rows, problem 0."""
        return fit.sites[0]


def evidence_of_problems(evidence, y, theta, fit):
    """Return log evidence and its gradient at theta, one part of it a binary problem.

    `evidence(k, sign, x)` returns theta -> `EvidencePoint` of problem k from sites x.
    """
    C = len(fit.posteriors)
    parts = enumerate(np.split(theta, C))
    points = [evidence(k, signs_of(y, k, C), fit.sites[k])(part) for k, part in parts]
    return float(sum(p.value for p in points)), np.concatenate([p.gradient for p in points])


class WithLearned:
    """Monitor that adds what was learned to the payload of the sweeps that follow."""

    def __init__(self, monitor, learned):
        self.monitor, self.learned = monitor, learned

    def begin(self, name="iteration"):
        self.monitor.begin(name)

    def end(self, record, payload):
        return self.monitor.end(record, (self.learned, payload[0]))


def last_sites(last, n_problems, n_rows, kernel):
    """Return (theta, sites) to start each binary problem from: those of the last fit if they fit.

    `last` is the `GPFit` before, or None.
    """
    if last is not None and isinstance(last.runs[0], BinaryFit):
        if last.sites.shape == (n_problems, 2, n_rows):
            thetas = [f.attributes["kernel"].theta for f in last.runs]
            if len(thetas[0]) == kernel.n_dims:
                return thetas, list(last.sites)
    return [kernel.theta] * n_problems, [np.zeros((2, n_rows))] * n_problems


def fit_of_sites(posterior, trace, end, result, kernel, factor, counted, points=None, **more):
    """Return the `BinaryFit` of sites on the rows, whatever structure and rule they come from.

    `trace` is that of the whole fit, `end` the `LearningEnd`, `result` the final run of EP, whose
    sweeps are in the trace if `counted`; `more` are further attributes.
    """
    state, record = result.evaluation.payload[0], result.evaluation.record
    final = {"residual": result.residual, **record}
    history = trace.history if counted else ending_in(trace.history, final)
    cav = cavity(Sites(*result.x), state.mean, state.var)
    # labels under the cavity of each row: leave-one-out prediction
    plus, minus = (factor.tilted(s, cav.mean, cav.var + state.extra_var).log_z for s in (1.0, -1.0))
    more |= dict(kernel=kernel, points=points, sites=result.x, n_sweeps=result.n_iter)
    more |= dict(loo_log_plus=plus, loo_log_minus=minus)
    reason, log_evidence = worst_reason([end.reason, result.reason]), float(record["log_evidence"])
    return BinaryFit(posterior, history, reason, log_evidence, more, end.remark)


def fit_dense(plan, sign, monitor, k):
    """Learn the kernel if asked, converge EP, and return the `BinaryFit` of problem k."""
    kernel, x, trace = with_theta(plan.kernel, plan.starts[k]), plan.sites[k], Trace(monitor)
    end, max_sweeps = KEPT, min(plan.max_sweeps, plan.max_iter)
    if plan.optimizer is not None and kernel.n_dims:
        evidence = plan.evidence(sign, x, max(plan.tol, LEARNING_TOL))
        search = evidence, plan.starts[k], kernel.bounds
        watched: Any = dict(starts=plan.restarts, monitor=trace)
        if callable(plan.optimizer):
            learned = maximise_by(plan.optimizer, *search, **watched)
        else:
            learned = maximise_evidence(*search, max_iter=plan.max_iter, **watched)
        # the last run starts from the same sites as the search, so that the answer depends on the
        # kernel alone and not on the path that led to it
        kernel, end, max_sweeps = learned.point.payload[0], learned.end, plan.max_sweeps
    # a search that was stopped still ends at converged sites, in sweeps that nobody counts
    counted = end.reason != "asked"
    watch = WithLearned(trace, kernel) if counted else SILENT
    result = plan.solve(plan.ep(kernel, sign), x, plan.tol, max_sweeps, watch)
    posterior = plan.posterior((kernel, result.evaluation.payload[0]))
    return fit_of_sites(posterior, trace, end, result, kernel, plan.factor, counted)
