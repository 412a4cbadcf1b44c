"""Recipe of a fit with sites on the rows in memory: learn, converge, predict."""

from typing import Any

from .._engine.loop import SILENT, Trace, worst_reason
from .._estimator.fitting import BinaryFit
from ._evidence import KEPT, climb_from_rows, maximise_by, maximise_evidence
from ._fitted import ending_in
from ._kernels import with_theta

__all__ = ["WithLearned", "fit_dense", "fit_of_sites", "watch_of_sweeps"]


class WithLearned:
    """Monitor that adds what was learned to the payload of the sweeps that follow."""

    def __init__(self, monitor, learned):
        self.monitor, self.learned = monitor, learned

    def begin(self, name="iteration"):
        self.monitor.begin(name)

    def end(self, record, payload):
        return self.monitor.end(record, (self.learned, payload[0]))


def watch_of_sweeps(trace, end, learned, ends=(), wrapper=WithLearned):
    """Return the monitor of the sweeps that lead from what was learned to the sites of a fit.

    They are iterations of the `trace` after a search that nobody was told of, or whose `end` has a
    reason among `ends`. Nobody counts them after another, which was stopped or has used up the
    iterations.
    """
    counted = not trace.n_iter or end.reason in ends
    return wrapper(trace, learned) if counted else SILENT


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
    return BinaryFit(posterior, history, reason, log_evidence, more, end.remark)


def fit_dense(plan, y, monitor, k):
    """Learn the kernel if asked, converge EP, and return the `BinaryFit` of problem k."""
    kernel, x, trace = with_theta(plan.kernel, plan.starts[k]), plan.sites[k], Trace(monitor)
    end, max_sweeps = KEPT, min(plan.max_sweeps, plan.max_iter)
    if plan.optimizer is not None and kernel.n_dims:
        learning_tol = max(plan.tol, plan.model.learning_tol)
        search, rough = (plan.starts[k], kernel.bounds), plan.rough()
        watched: Any = dict(starts=plan.restarts, monitor=trace)
        if callable(plan.optimizer):
            learned = maximise_by(
                plan.optimizer, plan.evidence(y, x, learning_tol), *search, **watched
            )
        else:
            watched |= plan.model.search | dict(max_iter=plan.max_iter)
            rows = plan.rows_to_start_from()
            if rows is None:
                learned = maximise_evidence(rough.evidence(y, x, learning_tol), *search, **watched)
            else:
                small = rough.part(rows).evidence(y[rows], x[:, rows], learning_tol)

                def evidence_from(point):
                    start = plan.sites_from_rows(y, rows, *point.payload)
                    return rough.evidence(y, start, learning_tol)

                learned = climb_from_rows(
                    evidence_from, small, plan.share(rows), len(y), *search, **watched
                )
                last, _, x = learned.point.payload
                x = plan.sites_in_passing(last, y, x)
            if plan.shorter_lengths is not None and plan.ends_flat(y, learned.point.value):
                evaluate = rough.evidence(y, plan.sites[k], learning_tol)
                start = max(plan.shorter_lengths, key=lambda theta: evaluate(theta).value)
                other = maximise_evidence(evaluate, start, kernel.bounds, **watched)
                if other.point.value > learned.point.value:
                    learned, x = other, plan.sites[k]
        # the last run starts from the same sites as a search on all rows, so that the answer
        # depends on the kernel alone and not on the path that led to it; from where a few steps
        # ended it is not worth its time
        kernel, end, max_sweeps = learned.point.payload[0], learned.end, plan.max_sweeps
    # a search that was stopped still ends at converged sites, in sweeps that nobody counts
    watch = watch_of_sweeps(trace, end, kernel, ends=("converged", "stuck", "max_iter"))
    result = plan.solve(plan.ep(kernel, y), x, plan.tol, max_sweeps, watch)
    posterior = plan.posterior((kernel, result.evaluation.payload[0]))
    left_out, points = plan.model.left_out(result), getattr(plan.model, "points", None)
    return fit_of_sites(posterior, trace, end, result, kernel, left_out, points)
