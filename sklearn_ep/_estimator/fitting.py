"""What every fit does: fail cleanly, tell of its iterations, split several classes."""

import functools
import inspect
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from .._engine.gaussian import ImproperPosterior
from .._engine.loop import REASONS, SILENT, Reason
from .._engine.partition import Workers
from .annotations import Method
from .checks import count_problems, numerical_cause


def fit_method(method: Method) -> Method:
    """Make a method a fit: one that leaves the estimator as it was when it raises.

    Three failures become a ValueError that names their cause in the data: a posterior without a
    Cholesky factor in double precision, other failures of linear algebra, and numbers beyond the
    range of double precision. This decorator goes outside `with_callbacks`, whose clean-up has to
    see the state of the fit.
    """

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        before = dict(vars(self))
        # whoever copies the estimator in the middle finds it not fitted, rather than half
        vars(self).pop("_posteriors", None)
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            vars(self).clear()
            vars(self).update(before)
            if isinstance(error, ImproperPosterior | FloatingPointError | np.linalg.LinAlgError):
                given = inspect.signature(method).bind(self, *args, **kwargs).arguments
                cause = numerical_cause(given.get("X"), given.get("sample_weight"))
                raise ValueError(f"{type(self).__name__}: {error}. {cause}") from error
            raise

    return cast(Method, wrapper)


# Why a run ended, and what to do unless iterations ran out.
_WHY = {
    "max_iter": "iterations ran out",
    "stuck": "no further step was possible",
    "asked": "a callback asked to stop",
}
_ADVICE = {
    "stuck": "scale the columns of X, lower damping, or make the prior narrower",
    "asked": "fit without that callback, within max_iter",
}


def warn_not_converged(estimator, advice="raise max_iter or lower damping", remarks=()):
    """Raise the one ConvergenceWarning of a fit: value, tolerance, reason and what to do.

    Parameters
    ----------
    estimator : estimator
        With the attributes of `run_attributes`.
    advice : str
        What to do where iterations ran out.
    remarks : sequence of str
        What besides the residual is not as it should be.
    """
    residual, reason = estimator.history_["residual"][-1], estimator.stop_reason_
    above = residual >= estimator.tol
    short = "the fitted model is usable but not at its fixed point"
    if not above and not remarks:
        short = "no iteration was left to confirm that"
    warnings.warn(
        f"{type(estimator).__name__} stopped after {estimator.n_iter_} iterations, because "
        f"{_WHY[reason]}, with a residual of {residual:.3g}, {'above' if above else 'below'} "
        f"tol={estimator.tol:g}; "
        + "".join(f"{remark}; " for remark in remarks)
        + f"{short}: {_ADVICE.get(reason, advice)}.",
        ConvergenceWarning,
        stacklevel=3,
    )


class FitMonitor:
    """Tells scikit-learn's callbacks, and the user if verbose, of each iteration of a fit.

    Parameters
    ----------
    estimator : estimator
        Must inherit `CallbackSupportMixin`.
    X, y : array-like
        Handed to the callbacks.
    max_iter : int or None
        Upper bound of the number of iterations, None if unknown.
    attributes : callable
        Maps the payload of an iteration to the dict of fitted attributes that a prediction needs;
        called only if a callback asks for the model so far.

    Notes
    -----
    One first-level task an iteration, which carries its kind as name. Steps of a phase of other
    work are tasks below the iteration that comes of them: the next one, or after the last a closing
    one for the average they lead to (`completed`). Where no iteration is left nobody is told.
    Follows the `Monitor` protocol of the loop; `finish` closes the task of the whole fit.
    """

    def __init__(self, estimator, X, y, max_iter, attributes):
        self.estimator, self._data, self._attributes = estimator, dict(X=X, y=y), attributes
        self._root = estimator._init_callback_context(max_subtasks=max_iter)
        self._root.call_on_fit_task_begin(estimator=estimator, **self._data)
        self._task: Any = None
        self._name, self._began = "", time.perf_counter()
        self.max_iter, self.n_iter, self.asked = max_iter, 0, False

    def begin(self, name="iteration"):
        """Open the task of an iteration."""
        self._name = name
        if self._task is None:
            self._task = self._opened(self._root, name)

    def end(self, record, payload):
        """Close the task of an iteration; return whether a callback asked to stop."""
        if self._loud:
            self._tell(f"{self._name} {self.n_iter + 1}", record)
        return self._end(lambda: None if payload is None else self._attributes(payload))

    def _end(self, reconstruction):
        self.n_iter += 1
        task, self._task = self._task, None
        self.asked = task.call_on_fit_task_end(
            estimator=self.estimator, reconstruction_attributes=reconstruction, **self._data
        )
        return self.asked

    @contextmanager
    def phase(self, name):
        """Begin an iteration with other work; yield what is told of its steps by their figures."""
        if self.asked or self.n_iter == self.max_iter:
            yield lambda figures: self.asked
            return
        if self._task is None:
            self._name = name
            self._task = self._opened(self._root, name, max_subtasks=None)
        n_told, last = 0, {}

        def told(figures):
            nonlocal n_told, last
            n_told, last = n_told + 1, figures
            if self._loud > 1:
                self._tell(f"{name}, step {n_told}", figures)
            step = self._opened(self._task, "step")
            return step.call_on_fit_task_end(estimator=self.estimator, **self._data)

        yield told
        if self._loud and n_told:
            self._tell(f"{name}, {n_told} steps", last)

    def completed(self, history, log_evidence, attributes):
        """End the iteration that a phase after the last one began, if there was such a phase.

        Returns the history with its entry: figures of the last state, evidence of the average.
        `attributes` are those that a prediction needs.
        """
        if self._task is None:
            return history
        record = {name: values[-1] for name, values in history.items() if name != "phase"}
        if "log_evidence" in record:
            record["log_evidence"] = log_evidence
        self._end(lambda: attributes)
        entry = record | {"phase": self._name}
        return {name: np.append(values, entry[name]) for name, values in history.items()}

    @property
    def _loud(self):
        return int(getattr(self.estimator, "verbose", 0))

    def _opened(self, parent, name, **kwargs):
        """Return a new task below another, after the callbacks heard of it."""
        task = parent.subcontext(task_name=name, **kwargs)
        task.call_on_fit_task_begin(estimator=self.estimator, **self._data)
        return task

    def _tell(self, what, figures):
        """Print a line of figures after the seconds since the fit began."""
        seconds = time.perf_counter() - self._began
        figures = ", ".join(f"{k} {v:.6g}" for k, v in figures.items())
        print(f"[{type(self.estimator).__name__}] {seconds:7.2f} s  {what}: {figures}")

    def finish(self):
        """Close the task of the fit."""
        self._root.call_on_fit_task_end(estimator=self.estimator, **self._data)


class PosteriorMonitor:
    """Monitor that tells another, of each state, what predicts as if the fit stopped there.

    `posterior` maps the payload of an iteration to that; `save`, if not None, is called with each.
    """

    def __init__(self, monitor, posterior, save=None):
        self.monitor, self.posterior, self.save = monitor, posterior, save
        self.begin, self.phase = monitor.begin, monitor.phase

    def end(self, record, payload):
        """Tell that an iteration ended; return whether to stop."""
        if self.save is not None:
            self.save(payload)
        return self.monitor.end(record, lambda: self.posterior(payload))


class BinaryFit(NamedTuple):
    """Outcome of one binary problem, before it becomes attributes.

    `posterior` predicts. `history` maps names to arrays of length n_iter; their last entries are
    those of the final state. `reason` says why the fit ended, and `remark` what is wrong besides
    the residual. `attributes` maps names to further fitted attributes.
    """

    posterior: Any
    history: dict[str, np.ndarray]
    reason: Reason
    log_evidence: float
    attributes: dict[str, Any]
    remark: str = ""


def signs_of(y, k, n_problems):
    """Return labels in {-1, +1} of binary problem k from class indices."""
    return np.where(y == (1 if n_problems == 1 else k), 1.0, -1.0)


def fit_problems(estimator, problem, fit_binary, y, max_iter, data, joint=False):
    """Fit the binary problems of a classifier, or the joint one, watched by its callbacks.

    Parameters
    ----------
    estimator : PosteriorClassifier
    problem : object
        Sent to workers; its `posterior(payload)` predicts as if the fit stopped there.
    fit_binary : callable
        `fit_binary(problem, sign, monitor, k)` gives the `BinaryFit` of problem k for labels in
        {-1, +1}, of a joint problem for class indices; importable when n_jobs asks for processes.
    y : ndarray of shape (n,) or None
        Class indices; None where rows are spread over workers already, so that problems are fitted
        one after another.
    max_iter : int or None
        Bound of the iterations of a fit, None if there is none; of one class against the rest each
        class is one for callbacks.
    data : tuple
        X and y as the caller gave them, for callbacks.
    joint : bool, default=False
        Whether one problem has all classes.

    Returns
    -------
    list of BinaryFit
    """
    fit_one, (X, y_given) = functools.partial(fit_binary, problem), data
    n_problems = count_problems(estimator, joint)
    most = max_iter if n_problems == 1 else n_problems

    def attributes_of(payload):
        return {"_posteriors": [problem.posterior(payload)]}

    def labels(k):
        return y if y is None or joint else signs_of(y, k, n_problems)

    monitor = FitMonitor(estimator, X, y_given, most, attributes_of)
    if n_problems == 1:
        fit = fit_one(labels(0), monitor, 0)
        attributes = {"_posteriors": [fit.posterior]}
        history = monitor.completed(fit.history, fit.log_evidence, attributes)
        fits = [fit._replace(history=history)]
    else:
        # generators, so that the monitor hears of each class when it is done
        answers: Iterator[Any] = ((k, fit_one(None, SILENT, k)) for k in range(n_problems))
        if y is not None:
            answers = Workers(estimator.n_jobs, return_as="generator").completed(
                lambda k: (fit_one, labels(k), SILENT, k), n_problems
            )
        fits = []
        for _ in range(n_problems):
            monitor.begin("class")  # a task of the whole fit
            fits.append(next(answers)[1])
            monitor.end({"residual": fits[-1].history["residual"][-1]}, None)
    monitor.finish()
    return fits


def run_attributes(fits):
    """Return the fitted attributes that say how the fits of binary problems went.

    The history of the whole has at each iteration the largest residual and the sum of the other
    figures over classes; a class that is done keeps its last values. Phases are those of the class
    with most iterations. The reason is the worst one.
    """
    longest = max((f.history for f in fits), key=lambda history: len(history["residual"]))
    n_iter = len(longest["residual"])

    def joined(name):
        if name == "phase":
            return longest[name]
        rows = [np.pad(f.history[name], (0, n_iter - len(f.history[name])), "edge") for f in fits]
        return np.max(rows, axis=0) if name == "residual" else np.sum(rows, axis=0)

    reason = min((f.reason for f in fits), key=REASONS.index)
    return {
        "history_": {name: joined(name) for name in longest},
        "n_iter_": n_iter,
        "stop_reason_": reason,
        "converged_": reason == "converged",
        "log_evidence_": float(sum(f.log_evidence for f in fits)),
    }


def replace_fitted(estimator, attributes):
    """Set fitted attributes; what another kind of fit has left goes."""
    for name in set(getattr(estimator, "_of_last_fit", ())) & set(vars(estimator)):
        delattr(estimator, name)
    vars(estimator).update(attributes, _of_last_fit=list(attributes))


def hyper_attributes(nodes, weights, names, used):
    """Return the attributes that tell of averages by nodes (M, T) and weights (M,), one a problem.

    names (T,) are those of the coordinates, `used` is "integrate" or "mode".
    """
    nodes, weights = (v[0] if len(v) == 1 else v for v in (nodes, weights))
    told = dict(hyper_nodes_=nodes, hyper_weights_=weights, hyper_names_=tuple(names))
    return told | dict(hyperparameters_used_=used)


def remarks_of(fits):
    """Return the remarks of the fits of binary problems, each once."""
    return list(dict.fromkeys(f.remark for f in fits if f.remark))


def one_or_stack(values, axis=0):
    """Return the value of the one binary problem, or those of all classes stacked."""
    return values[0] if len(values) == 1 else np.stack(values, axis=axis)
