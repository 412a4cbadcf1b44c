"""What an estimator needs to fit sparse Gaussian processes: checks, data, attributes, streams."""

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from ..._engine.partition import PartMap
from ..._engine.rules import MomentMatching
from ..._estimator.checks import check_choice, check_number, spread_rows
from ..._estimator.fitting import FitMonitor, restore_on_error, warn_not_converged
from .._base import (
    DEFAULT_INDUCING,
    DenseProblem,
    GaussianProcessBase,
    check_input_gradient,
    check_kernel,
    smooth_kernel,
)
from .._evidence import random_starts
from .._kernels import has_input_gradient
from .._rows import checked_parts, describe, n_candidate_rows
from .._step_rules import STEP_RULES
from .._stream import StreamSettings, absorb, start_stream, stream_of_fit
from .fit import SparseProblem, fit_sparse, posteriors_of

__all__ = ["SparseGaussianProcessBase"]

# Rows up to which "auto" keeps the full covariance matrix and the inducing points where they are.
FEW_ROWS = 2000

_SPARSE_ONLY = (
    "inducing_points_",
    "inducing_mean_",
    "inducing_cov_",
    "_sparse_state",
    "_stream",
)
_PER_ROW = ("site_precision_", "site_shift_", "loo_proba_")


class SparseGaussianProcessBase(GaussianProcessBase):
    """Gaussian-process classifier that can also go through inducing points."""

    # ------------------------------------------------------------------ parameters

    def _check_sparse_parameters(self):
        check_choice("method", self.method, ["auto", "dense", "sparse"])
        check_number("n_inducing", self.n_inducing, 1, integer=True, optional=True)
        if not isinstance(self.learn_inducing, bool | np.bool_):
            check_choice("learn_inducing", self.learn_inducing, ["auto"])
        check_choice("optimizer", self.optimizer, ["auto", "fmin_l_bfgs_b", *STEP_RULES, None])
        check_number("batch_size", self.batch_size, 1, integer=True, optional=True)
        check_number("learning_rate", self.learning_rate, 0, boundaries="neither")
        check_choice("site_memory", self.site_memory, ["scalars", "average"])
        check_number("n_partitions", self.n_partitions, 1, integer=True, optional=True)
        if self.batch_size is not None and self.optimizer == "fmin_l_bfgs_b":
            raise ValueError(
                "batch_size needs an optimizer that takes steps: one of "
                f"{list(STEP_RULES)} or 'auto', got optimizer='fmin_l_bfgs_b'."
            )
        if self.method == "dense" and self.optimizer in STEP_RULES:
            raise ValueError(
                f"optimizer={self.optimizer!r} belongs to method='sparse'; the dense method "
                "learns by 'fmin_l_bfgs_b'."
            )

    def _is_sparse(self, n_rows):
        """Return whether a fit of so many rows goes through inducing points."""
        if self.method != "auto":
            return self.method == "sparse"
        asked = (
            self.inducing_points is not None
            or self.batch_size is not None
            or self.site_memory == "average"
            or self.optimizer in STEP_RULES
        )
        return asked or n_rows > FEW_ROWS

    def _sparse_optimizer(self):
        """Return the optimizer in use; only log-concave factors stay proper between passes."""
        if self.optimizer == "auto":
            return "adam" if self._link.log_concave else "fmin_l_bfgs_b"
        if self.optimizer in STEP_RULES and not self._link.log_concave:
            raise ValueError(
                f"optimizer={self.optimizer!r} needs a log-concave likelihood; use 'fmin_l_bfgs_b'."
            )
        return self.optimizer

    # ------------------------------------------------------------------ fit

    def _fit_sparse(self, parts, checks, kept, X, y):
        """Fit to partitions and store everything learned.

        `checks` says that the partitions are the user's own: they are checked and their labels
        become `classes_`. `kept` marks the rows of the caller that the partitions hold.
        """
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        with PartMap(parts, self.n_jobs) as run:
            data = describe(run, checks, seed, n_candidate_rows(self.inducing_points))
            if checks:
                self._take_labels(data)
                kept = np.ones(sum(data.sizes), dtype=bool)
            problem, sites = self._warm_sparse(self._sparse_problem(data, seed))
            monitor = FitMonitor(
                self, X, y, None, lambda model: {"_posteriors": posteriors_of(model)}
            )
            fit = fit_sparse(problem, run, sites, monitor)
        self._store_sparse(problem, fit, kept)
        monitor.finish()
        if not self.converged_:
            self._warn_sparse()
        return self

    def _warn_sparse(self):
        warn_not_converged(
            type(self).__name__,
            self.history_["residual"][-1],
            self.tol,
            self.n_iter_,
            "raise max_iter and max_sweeps, lower damping, or bound the kernel amplitude",
        )

    def _fit_part_list(self, parts, sample_weight):
        if sample_weight is not None:
            raise ValueError("sample_weight must be None for a list of partitions.")
        if self.method == "dense":
            raise ValueError("method='dense' does not take a list of partitions as X.")
        return self._fit_sparse(checked_parts(parts), True, None, parts, None)

    def _take_labels(self, data):
        if len(data.labels) < 2:
            raise ValueError(f"y has only one class, {data.labels[0]!r}; a classifier needs two.")
        self.classes_, self.n_features_in_ = data.labels, len(data.mean)
        self.__dict__.pop("feature_names_in_", None)

    def _sparse_problem(self, data, seed):
        kernel = self._kernel_of(float(data.var.sum()))
        Z = self._inducing_start(data.candidates, data.candidate_weight, seed, len(data.mean))
        check_kernel(kernel, kernel(Z, Z))
        optimizer = self._sparse_optimizer()
        return SparseProblem(
            data=data,
            kernel=kernel,
            inducing_points=Z,
            factor=self._link,
            rule=MomentMatching(),
            n_problems=1 if len(self.classes_) == 2 else len(self.classes_),
            optimizer=optimizer,
            learn_inducing=self._moves_inducing(kernel, data.weight),
            restarts=random_starts(
                kernel.bounds,
                self.n_restarts_optimizer if optimizer == "fmin_l_bfgs_b" else 0,
                np.random.RandomState(seed),
            ),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            averaged=self.site_memory == "average",
            damping=self.damping,
            accelerate=self.acceleration is not None,
            max_iter=self.max_iter,
            max_sweeps=self.max_sweeps,
            tol=self.tol,
            jitter=self.jitter,
            seed=seed,
        )

    def _kernel_of(self, total_variance):
        return smooth_kernel(total_variance) if self.kernel is None else self._initial_kernel(None)

    def _moves_inducing(self, kernel, weight):
        if self.learn_inducing == "auto":
            return weight >= FEW_ROWS and has_input_gradient(kernel)
        if self.learn_inducing and self.optimizer is not None:
            check_input_gradient(kernel)
        return bool(self.learn_inducing)

    def _warm_sparse(self, problem):
        """Return (problem, sites) that start from the last fit where it had the same shape."""
        last = getattr(self, "_sparse_state", None) if self.warm_start else None
        if last is None or last.sites is None or problem.averaged:
            return problem, None
        sites, sizes = np.concatenate(last.sites, axis=2), problem.data.sizes
        if sites.shape != (problem.n_problems, 2, sum(sizes)):
            return problem, None
        if last.prior.kernel.n_dims != problem.kernel.n_dims:
            return problem, None
        problem.kernel = problem.kernel.clone_with_theta(last.prior.kernel.theta)
        if last.prior.Z.shape == problem.inducing_points.shape and self.inducing_points is None:
            problem.inducing_points = last.prior.Z
        return problem, np.split(sites, np.cumsum(sizes)[:-1], axis=2)

    # ------------------------------------------------------------------ attributes

    def _forget_sparse(self):
        """Drop what only sparse fits have, before another kind of fit is stored."""
        for name in _SPARSE_ONLY:
            self.__dict__.pop(name, None)

    def _store_sparse(self, problem, fit, kept):
        self._forget_sparse()
        self._problem, self._sparse_state, self._warm_state = problem, fit.state, []
        self._set_posterior(fit.model)
        self._stream = stream_of_fit(problem, fit)
        self.history_, self.n_iter_ = fit.history, len(fit.history["residual"])
        self.n_sweeps_, self.converged_ = fit.n_sweeps, fit.converged
        self.log_evidence_ = self.log_marginal_likelihood_value_ = fit.log_evidence
        for name in _PER_ROW:
            self.__dict__.pop(name, None)
        if fit.loo is not None:
            sites = np.concatenate(fit.state.sites, axis=2)
            precision, shift = sites[:, 0], sites[:, 1]
            single = len(sites) == 1
            self.site_precision_ = spread_rows(precision[0] if single else precision, kept)
            self.site_shift_ = spread_rows(shift[0] if single else shift, kept)
            self.loo_proba_ = spread_rows(np.exp(fit.loo), kept, np.nan)

    def _set_posterior(self, model):
        self._posteriors = posteriors_of(model)
        self.kernel_ = model.prior.kernel
        self._store_inducing(model.prior.Z)

    def _evidence_at(self, theta):
        if self._problem is None:
            raise ValueError("the evidence at other theta needs rows, which partial_fit forgets.")
        if not isinstance(self._problem, SparseProblem):
            return super()._evidence_at(theta)
        return self._problem.value_and_gradient(theta, self._sparse_state, self.n_jobs)

    # ------------------------------------------------------------------ streams

    @restore_on_error
    def partial_fit(self, X, y, classes=None):
        """Take in further rows, each seen once.

        Parameters
        ----------
        X : array-like of shape (n, d)
            New rows. The first call sets the number of columns and, unless they are given, chooses
            the inducing points; later calls add some until there are `n_inducing`.
        y : array-like of shape (n,)
            Labels out of `classes`; a batch may hold one class alone.
        classes : array-like of shape (n_classes,), default=None
            All labels that will ever come. Needed at the first call unless `fit` was called before.

        Returns
        -------
        self : estimator
            The estimator with the rows added to its posterior.

        Raises
        ------
        ValueError
            If the data or a parameter are not usable, if `classes` is missing at the first call
            or if `y` has labels outside `classes`. The estimator is then as it was before.

        Notes
        -----
        The posterior so far is the prior of the new rows, whose sites EP refines until `tol`; the
        sites of older rows stay as they are. Unless ``optimizer=None`` the kernel takes a
        stochastic step for every ten rows; inducing points stay. The sparse method is
        used whatever `method` says; after a dense fit its rows are taken in again, once, before the
        new ones. Cost 3 n m^2 flops a sweep; the memory is m^2 numbers, plus
        two numbers a row with ``site_memory="scalars"``.
        """
        self._check_parameters()
        X, y = self._checked_stream_rows(X, y, classes)
        if getattr(self, "_stream", None) is None:
            X, y = self._start_stream(X, y)
        self._problem, self._sparse_state, self._warm_state = None, None, []
        outcome = absorb(self._stream, X, y, self._stream_settings())
        self._stream = outcome.stream
        self._set_posterior(outcome.model)
        self.method_ = "sparse"
        self.history_, self.n_iter_ = outcome.history, len(outcome.history["residual"])
        self.n_sweeps_, self.converged_ = self.n_iter_, outcome.converged
        self.log_evidence_ = self.log_marginal_likelihood_value_ = outcome.log_evidence
        if self.site_memory == "scalars":
            rows = (*np.moveaxis(outcome.sites, 1, 0), np.exp(outcome.loo))
            for name, new in zip(_PER_ROW, rows, strict=True):
                new = new[0] if new.shape[0] == 1 and new.ndim == 2 else new
                old = getattr(self, name, new[..., :0])
                setattr(self, name, np.concatenate([old, new], axis=-1))
        if not self.converged_:
            self._warn_sparse()
        return self

    def _checked_stream_rows(self, X, y, classes):
        """Return rows and class indices of a call of `partial_fit`."""
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        X, y = validate_data(self, X, y, reset=first, dtype=np.float64)
        check_classification_targets(y)
        known = np.unique(classes) if first else self.classes_
        if len(known) < 2:
            raise ValueError(f"classes has only one class, {known[0]!r}; a classifier needs two.")
        if classes is not None and not np.array_equal(np.unique(classes), known):
            raise ValueError(f"classes={classes!r} differs from those of the first call, {known}.")
        unknown = np.setdiff1d(y, known)
        if len(unknown):
            raise ValueError(f"y has labels that are not in classes: {unknown}.")
        self.classes_ = known
        return X, np.searchsorted(known, y)

    def _start_stream(self, X, y):
        """Start a stream; return its first rows, those of a dense fit before the new ones."""
        if isinstance(getattr(self, "_problem", None), DenseProblem):
            X, y = np.vstack([self._problem.X, X]), np.concatenate([self._labels, y])
            for name in _PER_ROW:
                self.__dict__.pop(name, None)
        self._link = self._factor()
        kernel = self._kernel_of(float(X.var(axis=0).sum()))
        rng = check_random_state(self.random_state)
        seed = int(rng.randint(np.iinfo(np.int32).max))
        Z = self._inducing_start(X, np.ones(len(X)), seed, X.shape[1])
        check_kernel(kernel, kernel(Z, Z))
        n_problems = 1 if len(self.classes_) == 2 else len(self.classes_)
        self._stream = start_stream(kernel, Z, self.jitter, n_problems, seed)
        return X, y

    def _stream_settings(self):
        optimizer = self._sparse_optimizer()
        if optimizer == "fmin_l_bfgs_b":
            optimizer = "adam"
        grows = self.inducing_points is None
        count = DEFAULT_INDUCING if self.n_inducing is None else self.n_inducing
        return StreamSettings(
            factor=self._link,
            rule=MomentMatching(),
            step_rule=None if optimizer is None else STEP_RULES[optimizer],
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            n_inducing=count if grows else 0,
            jitter=self.jitter,
            averaged=self.site_memory == "average",
            solver=dict(
                tol=self.tol,
                max_iter=min(self.max_sweeps, self.max_iter),
                damping=self.damping,
                accelerate=self.acceleration is not None,
            ),
        )
