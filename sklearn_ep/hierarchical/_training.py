"""Fitting with groups: data or partitions in, fitted attributes and a resumable state out."""

from functools import partial

import numpy as np
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from .._engine.diagnostics import importance_check
from .._engine.partition import PartMap
from .._estimator.base import diagnose_fit
from .._estimator.checks import check_number, checked_weights, validate_training
from .._estimator.fitting import FitMonitor, combine_fits, fit_one_versus_rest
from ._checkpoint import digest, load_checkpoint, save_checkpoint
from ._fit import GroupedFit
from ._groups import group_keys, label_list
from ._messages import Messages, posterior_moments
from ._mode import is_proper, laplace_messages
from ._parts import PartSpec, describe
from ._plan import plan_parts, plan_rows
from ._prediction import GroupedClassifier, separated
from ._theta_grid import prior_of_beta

__all__ = ["GroupedTraining"]

_STATE = "site_precision", "site_shift", "prior_precision", "prior_shift", "partition", "group_keys"


class GroupedTraining(GroupedClassifier):
    """What lies between the data handed to `fit` and the fitted attributes.

    A subclass offers `_problem(plan, n_coef)`, `_settings()` and `_slope_positions(X, has_groups)`.
    """

    def _fit_rows(self, X, y, groups, sample_weight, previous, checkpoint):
        training, labels = self._training(X, y, groups, sample_weight)
        plan = plan_rows(
            training,
            labels,
            self._slopes,
            self.fit_intercept,
            (self.n_partitions, self.engine),
            previous,
            checkpoint is not None,
        )
        problem, settings = self._problem(plan, plan.width), self._settings()
        n_classes = len(self.classes_)
        if n_classes > 2 and checkpoint is not None:
            raise ValueError("checkpoint needs two classes; y has more.")
        running: list[GroupedFit] = []
        most = self.max_iter if n_classes == 2 else n_classes
        monitor = FitMonitor(self, X, y, most, partial(self._attributes_so_far, running))

        def fit_binary(sign, monitor, k):
            jobs = self.n_jobs if n_classes == 2 else None
            with PartMap(plan.make_parts(sign), jobs, self.schedule == "asynchronous") as run:
                fit = GroupedFit(run, problem, settings)
                if monitor is not None:
                    running.append(fit)
                return self._run(fit, plan, previous, k, monitor, checkpoint)

        fits = fit_one_versus_rest(fit_binary, training.y, n_classes, self.n_jobs, monitor)
        monitor.finish()
        return fits, plan

    def _fit_parts(self, parts, previous, checkpoint):
        if len(parts) == 0:
            raise ValueError("the list of partitions is empty: X has 0 samples and there is no y.")
        if any(isinstance(p, list | np.ndarray) or np.isscalar(p) for p in parts):
            raise ValueError("y is None, but X is no list of partitions such as (X, y) pairs.")
        if isinstance(self.group_column, str):
            raise ValueError(
                f"group_column={self.group_column!r}: give the index of the column for partitions."
            )
        with PartMap(parts, self.n_jobs, self.schedule == "asynchronous") as run:
            nothing = [None] * len(parts)
            told = run(describe, nothing, self.group_column, checkpoint is not None)
            self._check_descriptions(told)
            _, self._slopes = self._slope_positions(None, self._has_groups)
            spec = PartSpec(
                self.n_features_in_,
                self._group_position,
                self._slopes,
                self.fit_intercept,
                self.classes_[1],
            )
            plan = plan_parts(run.parts, told, spec)
            if len(self.classes_) == 2:
                fit = GroupedFit(run, self._problem(plan, plan.width), self._settings())
                report = partial(self._attributes_so_far, [fit])
                monitor = FitMonitor(self, None, None, self.max_iter, report)
                fits = [self._run(fit, plan, previous, 0, monitor, checkpoint)]
                monitor.finish()
            else:
                fits = self._fit_classes(run, plan, previous, checkpoint)
        return fits, plan

    def _fit_classes(self, run, plan, previous, checkpoint):
        """Fit one class after the other to raw parts; what runs in parallel is the parts."""
        if checkpoint is not None:
            raise ValueError("checkpoint needs two classes; y has more.")
        monitor = FitMonitor(self, None, None, len(self.classes_), lambda payload: {})
        fits = []
        for k, label in enumerate(self.classes_):
            own = plan._replace(spec=plan.spec._replace(positive=label))
            monitor.begin()
            fit = GroupedFit(run, self._problem(own, plan.width), self._settings())
            fits.append(self._run(fit, own, previous, k, None, None))
            monitor.end({"class": k + 1}, None)
        monitor.finish()
        return fits

    def _check_descriptions(self, told):
        """Check what partitions say against each other; set the attributes that follow from it."""
        widths = [t.width for t in told]
        if len(set(widths)) > 1:
            raise ValueError(f"partitions differ in their number of features: {widths}.")
        self.classes_ = np.unique(np.concatenate([t.classes for t in told]))
        if len(self.classes_) < 2:
            raise ValueError("a list of partitions needs at least two classes, got 1 class.")
        self.n_features_in_ = widths[0]
        self.__dict__.pop("feature_names_in_", None)
        self._has_groups = self.group_column is not None
        self._group_position = None
        if self._has_groups:
            self._check_binary()
            self._group_position = self._position_of(self.group_column, None, "group_column")

    def _training(self, X, y, groups, sample_weight):
        """Check the data; return (Training, group labels of the rows in use or None)."""
        if self.group_column is not None and groups is not None:
            raise ValueError("give group_column or groups, not both.")
        labels: list | None = None
        self._group_position = None
        if self.group_column is None:
            training = validate_training(self, X, y, sample_weight)
            if groups is not None:
                labels = label_list(groups, len(training.kept))
        else:
            validate_data(self, X, skip_check_array=True)
            position = self._position_of(self.group_column, X, "group_column")
            design, labels = separated(X, position)
            fewest = 0 if self.fit_intercept else 1
            training = validate_training(self, design, y, sample_weight, ensure_min_features=fewest)
            validate_data(self, X, skip_check_array=True)
            self._group_position = position
        self._has_groups = labels is not None
        if labels is not None:
            self._check_binary()
            labels = [g for g, kept in zip(labels, training.kept, strict=True) if kept]
        self._slopes = self._slope_positions(X, self._has_groups)[1]
        return training, labels

    def _check_binary(self):
        if len(self.classes_) > 2:
            raise ValueError(
                f"group effects need a binary target, y has {len(self.classes_)} classes; wrap "
                "the estimator in sklearn.multiclass.OneVsRestClassifier with group_column."
            )

    def _run(self, fit, plan, previous, k, monitor, checkpoint):
        """Run one binary fit from where it can start, saving on the way where asked to."""
        start = self._start(fit.problem, plan, previous, k)
        if checkpoint is not None:
            model = digest(
                fit.problem.prior.precision, fit.problem.prior.shift, plan.site, self._slopes
            )
            saved = load_checkpoint(checkpoint, plan.fingerprint + model)
            if saved is not None:
                start = Messages(saved["site_precision"], saved["site_shift"])

            def save(payload):
                messages = self._messages(payload, fit.problem.prior)
                state = self._state_of(messages, fit.problem.prior, plan)
                save_checkpoint(checkpoint, state, plan.fingerprint + model)

            monitor = _Saving(monitor, save)
        return fit.fit(start, monitor)

    def _start(self, problem, plan, previous, k):
        """Return the messages of an earlier fit where they suit this one, else None."""
        if previous is None:
            return None
        precision, shift = previous["site_precision"], previous["site_shift"]
        if precision.ndim == 4:
            if k >= len(precision):
                return None
            precision, shift = precision[k], shift[k]
        n_sites, size = len(plan.where), len(problem.prior.shift)
        if shift.shape[1] != size or n_sites < len(shift) or n_sites > len(shift) + 1:
            return None
        if n_sites > len(shift):
            precision = np.concatenate([precision, np.zeros((1, size, size))])
            shift = np.concatenate([shift, np.zeros((1, size))])
        return Messages(precision, shift) if is_proper(problem.prior, precision) else None

    @staticmethod
    def _messages(payload, prior):
        """Return the messages in the payload of an iteration, of sweeps or of Newton steps."""
        if hasattr(payload, "messages"):
            return payload.messages
        return Messages(*laplace_messages(payload, prior, with_cavities=False))

    def _attributes_so_far(self, running, payload):
        """Return what a prediction needs if the fit stopped now."""
        if payload is None:  # between the problems of several classes
            return {}
        fit = running[0]
        return {"_posteriors": [fit.posterior(self._messages(payload, fit.problem.prior))[0]]}

    def _store(self, fits, plan):
        """Turn the outcome into fitted attributes."""
        self._posteriors = [f.posterior for f in fits]
        self.history_, self.n_iter_, self.converged_, self.log_evidence_ = combine_fits(fits)
        self.n_skipped_ = sum(f.attributes["n_skipped"] for f in fits)
        self.n_cut_steps_ = sum(f.attributes["n_cut"] for f in fits)
        messages = [f.attributes["messages"] for f in fits]
        phi = [
            posterior_moments(f.attributes["prior"], m) for f, m in zip(fits, messages, strict=True)
        ]
        self.site_precision_ = _merged([m.precision for m in messages])
        self.site_shift_ = _merged([m.shift for m in messages])
        self.phi_mean_ = _merged([m.mean for m in phi])
        self.phi_cov_ = _merged([m.cov for m in phi])
        beta = [p.beta_moments() for p in self._posteriors]
        self._prior_of_beta = prior_of_beta(fits[0].attributes["prior"], len(beta[0].mean))
        mean = np.stack([m.mean for m in beta])
        sd = np.stack([np.sqrt(np.diagonal(m.cov)) for m in beta])
        self.coef_, self.intercept_ = self._split_intercept(mean)
        self.coef_std_ = self._split_intercept(sd)[0]
        self.coef_cov_ = _merged([m.cov for m in beta])
        first = self._posteriors[0]
        levels = [0.05, 0.5, 0.95]
        quantiles = first.scale_quantiles(levels) if self._has_groups else np.empty((3, 0))
        self.tau_, self.tau_interval_ = quantiles[1], quantiles[[0, 2]].T
        self.group_labels_ = plan.labels
        self.group_effects_, self.group_effects_std_ = first.group_effects()
        self.theta_grid_, self.theta_weights_ = first.theta, first.weight
        self.partition_ = plan.site
        self._state = self._state_of(
            Messages(self.site_precision_, self.site_shift_), fits[0].attributes["prior"], plan
        )

    # ------------------------------------------------------------------ diagnosis

    def diagnose(
        self, n_draws=1000, random_state=0, *, X=None, y=None, groups=None, sample_weight=None
    ):
        """Say how far to trust the fit.

        The model keeps no training rows; given again, they show by importance weights how far the
        approximate posterior is from the exact one.

        Parameters
        ----------
        n_draws : int, default=1000
            Joint draws of coefficients, group scales and all group effects, weighted by the exact
            joint density over the approximate one, both at the nodes in the group scales. Cost
            O(n_draws n d).
        random_state : int, RandomState instance or None, default=0
            Seed of the draws.
        X : array-like of shape (n, d), default=None
            The training rows; None for no weights.
        y : array-like of shape (n,), default=None
            Their class labels.
        groups : array-like of shape (n,), default=None
            Their group labels, where they are not a column of X.
        sample_weight : array-like of shape (n,), default=None
            Their weights.

        Returns
        -------
        diagnosis : Diagnosis
            Residual, convergence, remarks where groups are of a kind that the model or the method
            handles badly and, for two classes and rows of named groups, effective share of the
            draws and tail shape of their weights. Printing it gives a summary.

        Raises
        ------
        ValueError
            If `n_draws` or the rows are not usable.
        """
        check_is_fitted(self)
        check_number("n_draws", n_draws, 25, integer=True)
        remarks = [f"Note: {remark}" for remark in self._remarks]
        if self.n_skipped_:
            remarks.append(
                f"{self.n_skipped_} messages were left as they were, because the tilted moments "
                "were no Gaussian."
            )
        if X is None:
            remarks.append("Give X, y and groups of the training rows for importance weights.")
            return diagnose_fit(self, remarks=remarks)
        rows = self._rows_again(X, y, groups, sample_weight)
        if len(self._posteriors) > 1:
            return diagnose_fit(self, remarks=remarks)
        code = rows[2]
        if self._has_groups and not np.all((code >= 0) & (code < len(self.group_labels_))):
            remarks.append("Some rows are of no named group of the fit: no importance weights.")
            return diagnose_fit(self, remarks=remarks)
        rng = self._generator(random_state)
        log_w = self._posteriors[0].log_weights(*rows, self._prior_of_beta, n_draws, rng)
        return diagnose_fit(self, importance_check(log_w), remarks)

    def _rows_again(self, X, y, groups, sample_weight):
        """Return (design, local, code, sign, weight) of training rows that are given again."""
        design, local, code = self._check_grouped(X, groups)
        y, weight = column_or_1d(y), checked_weights(sample_weight, design)
        check_consistent_length(design, y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has classes that the model was not fitted with: {unknown}.")
        sign = np.where(y == self.classes_[1], 1.0, -1.0)
        kept = weight > 0
        return tuple(a[kept] for a in (design, local, code, sign, weight))

    # ------------------------------------------------------------------ state

    def _state_of(self, messages, prior, plan):
        return {
            "site_precision": messages.precision,
            "site_shift": messages.shift,
            "prior_precision": prior.precision,
            "prior_shift": prior.shift,
            "partition": np.asarray(plan.site),
            "group_keys": group_keys(plan.labels),
        }

    def get_state(self):
        """Return all that is needed to go on after a crash.

        Returns
        -------
        state : dict of str to ndarray
            Messages of the sites, prior and partition; plain arrays for `numpy.savez`, which load
            without pickle.
        """
        check_is_fitted(self)
        return {name: np.array(value) for name, value in self._state.items()}

    def set_state(self, state):
        """Take over a state; with ``warm_start=True`` the next fit goes on from it.

        Parameters
        ----------
        state : dict of str to ndarray
            What `get_state` returned.

        Returns
        -------
        self : HierarchicalEPLogistic
            The estimator, not fitted by this.
        """
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise ValueError(f"state lacks {missing}.")
        self._state = {name: np.array(state[name]) for name in _STATE}
        return self


def _merged(arrays):
    """Return the array of a single binary problem, or those of several stacked."""
    return arrays[0] if len(arrays) == 1 else np.stack(arrays)


class _Saving:
    """Monitor that saves after each iteration, then tells the one it wraps."""

    def __init__(self, monitor, save):
        self.monitor, self.save = monitor, save

    def begin(self):
        self.monitor.begin()

    def end(self, record, payload):
        self.save(payload)
        return self.monitor.end(record, payload)
