"""What every fit does: fail cleanly, tell of its iterations, split several classes."""

import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.parallel import Parallel, delayed

from .._engine.gaussian import ImproperPosterior

__all__ = [
    "BinaryFit",
    "FitMonitor",
    "combine_fits",
    "fit_problems",
    "fit_one_versus_rest",
    "restore_on_error",
    "warn_not_converged",
]


def restore_on_error(method):
    """Make a method leave the estimator exactly as it was when it raises, whatever it raises.

    A posterior that has no Cholesky factor in double precision, whatever the steps, or numbers
    beyond its range are an error of the data and told as such. Goes outside `with_callbacks`,
    whose clean-up has to see the state of the fit.
    """

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        before = dict(vars(self))
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            vars(self).clear()
            vars(self).update(before)
            if isinstance(error, ImproperPosterior | FloatingPointError):
                raise ValueError(
                    f"{type(self).__name__}: {error}. The scales of the columns of X, the weights "
                    "and the prior differ by more than double precision can carry: standardise the "
                    "columns, or make the prior narrower."
                ) from error
            raise

    return wrapper


def warn_not_converged(name, residual, tol, n_iter, advice="raise max_iter or lower damping"):
    """Raise the one ConvergenceWarning of a fit: value, tolerance and what to do."""
    warnings.warn(
        f"{name} stopped after {n_iter} iterations with a residual of {residual:.3g}, above "
        f"tol={tol:g}; the fitted model is usable but not at its fixed point: {advice}.",
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
    One first-level task an iteration. Follows the `Monitor` protocol of the loop; `finish` closes
    the task of the whole fit.
    """

    def __init__(self, estimator, X, y, max_iter, attributes):
        self.estimator, self._data, self._attributes = estimator, dict(X=X, y=y), attributes
        self._root = estimator._init_callback_context(max_subtasks=max_iter)
        self._root.call_on_fit_task_begin(estimator=estimator, **self._data)
        self._task: Any = None
        self.n_iter = 0

    def begin(self):
        """Open the task of an iteration."""
        self._task = self._root.subcontext(task_name="iteration")
        self._task.call_on_fit_task_begin(estimator=self.estimator, **self._data)

    def end(self, record, payload):
        """Close the task of an iteration; return whether a callback asked to stop."""
        self.n_iter += 1
        if self.estimator.verbose:
            figures = ", ".join(f"{k} {v:.6g}" for k, v in record.items())
            print(f"[{type(self.estimator).__name__}] iteration {self.n_iter}: {figures}")
        return self._task.call_on_fit_task_end(
            estimator=self.estimator,
            reconstruction_attributes=lambda: (
                None if payload is None else self._attributes(payload)
            ),
            **self._data,
        )

    def finish(self):
        """Close the task of the fit."""
        self._root.call_on_fit_task_end(estimator=self.estimator, **self._data)


class BinaryFit(NamedTuple):
    """Outcome of one binary problem, before it becomes attributes.

    `posterior` predicts, `history` maps names to arrays of length n_iter, `attributes` maps names
    to whatever else the estimator makes fitted attributes of.
    """

    posterior: Any
    history: dict[str, np.ndarray]
    converged: bool
    log_evidence: float
    attributes: dict[str, Any]


def fit_one_versus_rest(fit_binary, y, n_classes, n_jobs, monitor):
    """Fit one binary problem, or one a class, and return the list of `BinaryFit`.

    Parameters
    ----------
    fit_binary : callable
        `fit_binary(sign, monitor, k)` with labels in {-1, +1} and k the number of the problem;
        importable when n_jobs asks for processes.
    y : ndarray of shape (n,)
        Class indices.
    n_classes : int
    n_jobs : int or None
    monitor : FitMonitor
        Watches the iterations of a binary fit; of several classes each is one task.
    """
    if n_classes == 2:
        return [fit_binary(np.where(y == 1, 1.0, -1.0), monitor, 0)]
    tasks = (delayed(fit_binary)(np.where(y == k, 1.0, -1.0), None, k) for k in range(n_classes))
    fits = []
    for fit in Parallel(n_jobs=n_jobs)(tasks):
        monitor.begin()
        fits.append(fit)
        monitor.end({"class": len(fits)}, None)
    return fits


def fit_problems(estimator, problem, fit_binary, training, X, y, max_iter, advice):
    """Fit the binary problems of a classifier, store what they give, and warn once if needed.

    Parameters
    ----------
    estimator : PosteriorClassifier
        Its `_store(problem, fits, training)` makes the fitted attributes.
    problem : object
        Sent to workers; its `posterior(payload)` predicts as if the fit stopped there.
    fit_binary : callable
        `fit_binary(problem, sign, monitor, k)` gives a `BinaryFit`.
    training : Training
    X, y : array-like
        As the caller gave them, for callbacks.
    max_iter : int or None
        Bound of the iterations of a binary fit, None if there is none.
    advice : str
        What to do where the fit did not converge.

    Returns
    -------
    estimator
    """
    monitor = FitMonitor(
        estimator, X, y, max_iter, lambda payload: {"_posteriors": [problem.posterior(payload)]}
    )
    fits = fit_one_versus_rest(
        functools.partial(fit_binary, problem),
        training.y,
        len(estimator.classes_),
        estimator.n_jobs,
        monitor,
    )
    estimator._store(problem, fits, training)
    monitor.finish()
    if not estimator.converged_:
        name, residual = type(estimator).__name__, estimator.history_["residual"][-1]
        warn_not_converged(name, residual, estimator.tol, estimator.n_iter_, advice)
    return estimator


def combine_fits(fits):
    """Merge the fits of binary problems: (history, n_iter, converged, log_evidence).

    The history of the whole has at each iteration the largest residual and the sum of the other
    figures over classes; a class that is done keeps its last values.
    """
    n_iter = max(len(f.history["residual"]) for f in fits)
    history = {}
    for name in fits[0].history:
        rows = [np.pad(f.history[name], (0, n_iter - len(f.history[name])), "edge") for f in fits]
        history[name] = np.max(rows, axis=0) if name == "residual" else np.sum(rows, axis=0)
    converged = all(f.converged for f in fits)
    return history, n_iter, converged, float(sum(f.log_evidence for f in fits))
