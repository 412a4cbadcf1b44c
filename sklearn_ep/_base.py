"""What the estimators share: checks, fits that fail cleanly, history, callbacks, prediction."""

import functools
import numbers
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cholesky
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted, validate_data

from ._compat import CallbackSupportMixin
from ._engine.factors import Probit

__all__ = [
    "BinaryFit",
    "Diagnosis",
    "FitMonitor",
    "PosteriorClassifier",
    "Training",
    "VersionedEstimator",
    "check_choice",
    "check_common",
    "check_number",
    "checked_weights",
    "combine_fits",
    "diagnose_fit",
    "fit_one_versus_rest",
    "log_normalise",
    "restore_on_error",
    "spread_rows",
    "validate_training",
    "warn_not_converged",
]


# ---------------------------------------------------------------------------- parameters


def check_number(
    name, value, low=None, high=None, *, integer=False, boundaries="both", optional=False
):
    """Raise a ValueError or TypeError that names the parameter unless it is a number in range.

    `boundaries` says which ends belong to the range, as in `sklearn.utils.check_scalar`; None is
    let through where `optional`.
    """
    if value is None and optional:
        return
    kind = numbers.Integral if integer else numbers.Real
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    check_scalar(value, name, kind, min_val=low, max_val=high, include_boundaries=boundaries)
    if not integer and np.isnan(value):
        raise ValueError(f"{name} must be a number, got nan.")


def check_choice(name, value, choices):
    """Raise a ValueError that names the parameter unless the value is one of the choices."""
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")


def check_common(estimator):
    """Check the parameters that mean the same in every estimator."""
    check_number("damping", estimator.damping, 0, 1, boundaries="right")
    check_number("max_iter", estimator.max_iter, 1, integer=True)
    check_number("tol", estimator.tol, 0, boundaries="neither")
    check_number("n_jobs", estimator.n_jobs, integer=True, optional=True)
    if estimator.n_jobs == 0:
        raise ValueError("n_jobs must not be 0; use None or 1 for one process.")
    check_random_state(estimator.random_state)


# ---------------------------------------------------------------------------- fitting


def restore_on_error(method):
    """Make a method leave the estimator exactly as it was when it raises, whatever it raises.

    Goes outside `with_callbacks`, whose clean-up has to see the state of the fit.
    """

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        before = dict(vars(self))
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return wrapper


class Training(NamedTuple):
    """Checked training data with the rows of weight zero left out.

    `y` is the response, or the class index for classifiers; `kept` marks the rows of the input that
    are used, so that per-row results can be given back in the caller's shape.
    """

    X: Any
    y: np.ndarray
    weight: np.ndarray
    kept: np.ndarray


def checked_weights(sample_weight, X):
    """Return non-negative weights (n,), or raise a ValueError that names them."""
    n = X.shape[0]
    if sample_weight is None:
        return np.ones(n)
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.ndim == 0:
        weight = np.full(n, float(weight))
    if weight.shape != (n,):
        raise ValueError(f"sample_weight.shape == {weight.shape}, expected {(n,)}!")
    if not np.all(np.isfinite(weight)):
        raise ValueError("sample_weight contains NaN or infinity.")
    if np.any(weight < 0):
        raise ValueError("Negative values in data passed to `sample_weight`.")
    if not np.any(weight > 0):
        raise ValueError("sample_weight is zero for every row: there is nothing to fit.")
    return weight


def validate_training(estimator, X, y, sample_weight=None, dtype=np.float64, **kwargs):
    """Check X, y and weights together; set `classes_` of a classifier; return a `Training`.

    Extra keywords go to `sklearn.utils.validation.validate_data`.
    """
    is_classifier = isinstance(estimator, ClassifierMixin)
    X, y = validate_data(estimator, X, y, dtype=dtype, y_numeric=not is_classifier, **kwargs)
    if is_classifier:
        check_classification_targets(y)
        classes, y = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y has only one class, {classes[0]!r}; a classifier needs two.")
    weight = checked_weights(sample_weight, X)
    kept = weight > 0
    if is_classifier:
        if len(np.unique(y[kept])) < len(classes):
            raise ValueError("y has a class whose rows all have sample_weight 0; leave it out.")
        estimator.classes_ = classes
    if not kept.all():
        X, y = X[kept], y[kept]
    return Training(X, y, weight[kept], kept)


def spread_rows(values, kept, fill=0.0):
    """Give per-row results (..., n_kept) the shape of the caller's rows (..., n)."""
    if kept.all():
        return values
    out = np.full(values.shape[:-1] + kept.shape, fill)
    out[..., kept] = values
    return out


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


# ---------------------------------------------------------------------------- several classes


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


def log_normalise(log_p):
    """Return log probabilities (n, K) of one-versus-rest problems divided by their sum."""
    return log_p - logsumexp(log_p, axis=1, keepdims=True)


# ---------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class Diagnosis:
    """How far to trust a fit; printing it gives a summary in words.

    Attributes
    ----------
    estimator_name : str
        Class of the estimator.
    converged : bool
        Whether the fixed point was reached.
    residual, tol : float
        Residual of an undamped sweep and the tolerance it was held against.
    n_iter : int
        Iterations of the fit.
    ess_share : float or None
        Effective share of draws from the approximate posterior when they are weighted to the true
        one; None where that is not cheap.
    pareto_k : float or None
        Tail shape of those weights: below 0.5 good, above 0.7 not to be trusted.
    remarks : tuple of str
        Further findings in words.
    """

    estimator_name: str
    converged: bool
    residual: float
    tol: float
    n_iter: int
    ess_share: float | None = None
    pareto_k: float | None = None
    remarks: tuple[str, ...] = ()

    def __str__(self):
        reached = "reached" if self.converged else "did NOT reach"
        lines = [
            f"{self.estimator_name} {reached} its fixed point in {self.n_iter} iterations "
            f"(residual {self.residual:.2g}, tolerance {self.tol:g})."
        ]
        if self.pareto_k is not None:
            verdict = (
                "close to the true posterior"
                if self.pareto_k < 0.5
                else "usable, with errors in the tails"
                if self.pareto_k < 0.7
                else "not a reliable stand-in for the true posterior in all directions at once"
            )
            lines.append(
                f"The approximate posterior is {verdict} (Pareto k {self.pareto_k:.2f}, "
                f"effective share of draws {self.ess_share:.2f})."
            )
        return "\n".join([*lines, *self.remarks])


def diagnose_fit(estimator, check=None, remarks=()):
    """Return the `Diagnosis` of a fitted estimator, with its `ImportanceCheck` if there is one."""
    check_is_fitted(estimator)
    return Diagnosis(
        type(estimator).__name__,
        bool(estimator.converged_),
        float(estimator.history_["residual"][-1]),
        float(estimator.tol),
        int(estimator.n_iter_),
        None if check is None else check.ess_share,
        None if check is None else check.pareto_k,
        remarks=tuple(remarks),
    )


class VersionedEstimator(BaseEstimator):
    """Estimator whose pickles know the version that wrote them, and say so when it differs.

    The HTML view of scikit-learn links to our pages and shows our docstrings.
    """

    _doc_link_module = "sklearn_ep"
    _doc_link_template = (
        "https://sklearn-ep.readthedocs.io/en/stable/generated/sklearn_ep.{estimator_name}.html"
    )

    def __getstate__(self):
        from . import __version__

        return {**super().__getstate__(), "_sklearn_ep_version": __version__}

    def __setstate__(self, state):
        from . import __version__

        state = dict(state)
        written = state.pop("_sklearn_ep_version", "an unknown version")
        if written != __version__:
            warnings.warn(
                f"{type(self).__name__} was saved by sklearn-ep {written} and is read by "
                f"{__version__}; fit it again if results matter.",
                UserWarning,
                stacklevel=2,
            )
        super().__setstate__(state)


class PosteriorClassifier(CallbackSupportMixin, ClassifierMixin, VersionedEstimator):
    """Classifier that predicts from Gaussian posteriors of a latent function.

    A subclass fills in `fit` `classes_` and `_posteriors`, a list with one item for two classes and
    one a class otherwise. An item offers `latent(X)` -> mean and variance (n,), `covariance(X1,
    X2)` -> (n1, n2), and may offer `draw(X, n_samples, rng)` -> joint draws (n_samples, n).
    `_link` is the factor whose log Z is the log probability of a label.
    """

    _link: Any = Probit()
    _accept_sparse: Any = False

    def _check_new(self, X):
        """Check rows to predict; `check_is_fitted` comes first everywhere."""
        check_is_fitted(self)
        return validate_data(
            self, X, reset=False, dtype=np.float64, accept_sparse=self._accept_sparse
        )

    def latent_mean_and_variance(self, X):
        """Posterior mean and variance of the latent function at new rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows, taken as new ones even if they were seen in training.

        Returns
        -------
        mean, variance : ndarray of shape (n,), or (n, n_classes) for more than two classes
            In units of the latent function.
        """
        X = self._check_new(X)
        pairs = [p.latent(X) for p in self._posteriors]
        if len(pairs) == 1:
            return pairs[0]
        return np.column_stack([m for m, _ in pairs]), np.column_stack([v for _, v in pairs])

    def latent_covariance(self, X1, X2=None):
        """Posterior covariance of the latent function between new rows.

        Parameters
        ----------
        X1 : array-like of shape (n1, d)
            Rows.
        X2 : array-like of shape (n2, d), default=None
            Rows; None stands for X1.

        Returns
        -------
        covariance : ndarray of shape (n1, n2), or (n_classes, n1, n2)
            One matrix a one-versus-rest problem for more than two classes.
        """
        X1 = self._check_new(X1)
        X2 = X1 if X2 is None else self._check_new(X2)
        matrices = [p.covariance(X1, X2) for p in self._posteriors]
        return matrices[0] if len(matrices) == 1 else np.stack(matrices)

    def decision_function(self, X):
        """Posterior mean of the latent function.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        mean : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Positive where the second class is the more probable one.
        """
        return self.latent_mean_and_variance(X)[0]

    def _log_proba(self, X):
        """Log probabilities (n, K) of checked rows."""
        pairs = [p.latent(X) for p in self._posteriors]
        return self._log_proba_from_latent(pairs)

    def _log_proba_from_latent(self, pairs):
        if len(pairs) == 1:
            mean, var = pairs[0]
            return np.column_stack([self._link.tilted(s, mean, var).log_z for s in (-1.0, 1.0)])
        columns = [k.tilted(1.0, *p).log_z for k, p in zip(self._links(), pairs, strict=True)]
        return log_normalise(np.column_stack(columns))

    def _links(self):
        """Return the factor of each binary problem whose log Z is the log probability of +1."""
        return [self._link] * len(self._posteriors)

    def predict_log_proba(self, X):
        """Log probabilities of the classes, computed in logs throughout.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        log_proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; finite however far out a row is.
        """
        return self._log_proba(self._check_new(X))

    def predict_proba(self, X):
        """Probabilities of the classes, averaged over the posterior of the latent function.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; rows sum to one.
        """
        proba = np.exp(self.predict_log_proba(X))
        return proba / proba.sum(axis=1, keepdims=True)

    def predict(self, X):
        """Most probable class.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.

        Returns
        -------
        y : ndarray of shape (n,)
            Labels out of `classes_`.
        """
        log_proba = self.predict_log_proba(X)
        return self.classes_[np.argmax(log_proba, axis=1)]

    def sample_proba(self, X, n_samples=10, random_state=None):
        """Draw class probabilities from the posterior: a committee of functions.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        n_samples : int, default=10
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        proba : ndarray of shape (n_samples, n, n_classes)
            One latent function a draw, jointly over all rows.
        """
        X = self._check_new(X)
        check_number("n_samples", n_samples, 1, integer=True)
        rng = check_random_state(random_state)
        draws = [draw_latent(p, X, n_samples, rng) for p in self._posteriors]
        links = self._links()
        pairs = [(1.0, link, f) for link, f in zip(links, draws, strict=True)]
        if len(draws) == 1:
            pairs = [(-1.0, links[0], draws[0]), *pairs]
        log_p = np.stack([link.log_prob(label, f) for label, link, f in pairs], axis=-1)
        return np.exp(log_p - logsumexp(log_p, axis=-1, keepdims=True))


def draw_latent(posterior, X, n_samples, rng):
    """Joint draws (n_samples, n) of the latent function, by the posterior's own way or Cholesky."""
    if hasattr(posterior, "draw"):
        return posterior.draw(X, n_samples, rng)
    mean, _ = posterior.latent(X)
    cov = posterior.covariance(X, X)
    # rows may repeat, so the matrix may be singular: a relative jitter changes nothing visible
    cov[np.diag_indices_from(cov)] += 1e-10 * (1.0 + np.diagonal(cov).max())
    return mean + rng.standard_normal((n_samples, len(mean))) @ cholesky(cov, lower=True).T
