"""Hierarchical logistic regression by expectation propagation over data partitions."""

import numbers
from functools import partial

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ._base import (
    FitMonitor,
    check_choice,
    check_common,
    check_number,
    combine_fits,
    fit_one_versus_rest,
    restore_on_error,
    validate_training,
    warn_not_converged,
)
from ._checkpoint import digest, load_checkpoint, save_checkpoint
from ._compat import with_callbacks
from ._engine import log_cholesky
from ._engine.marginal_laplace import is_proper, laplace_messages
from ._engine.message_passing import Messages, posterior_moments
from ._engine.partition import PartMap
from ._grouped_base import GroupedClassifier, separated
from ._grouped_parts import describe
from ._grouped_plan import plan_parts, plan_rows, warn_of_hard_groups
from ._groups import column_position, group_keys, label_list
from ._hierarchical_fit import GroupedFit, Problem, Settings, normal_prior

__all__ = ["HierarchicalEPLogistic"]

_STATE = ("site_precision", "site_shift", "prior_precision", "prior_shift", "partition")


class HierarchicalEPLogistic(GroupedClassifier):
    """Multilevel logistic regression: shared coefficients and effects of groups.

    The log odds of a row are x' beta + w' a_g, where a_g ~ N(0, S) is the effect of its group g and
    w is one and the `random_slopes` columns. beta and S have a posterior, not a point estimate:
    partitions of whole groups exchange Gaussian messages about them by expectation propagation.

    Parameters
    ----------
    group_column : int or str, default=None
        Index or name of the column of X that holds the group label; it is taken out of the design.
        The way that works in pipelines, searches and cross-validation. None, and no `groups` in
        `fit`: logistic regression without groups.
    random_slopes : list of int or str, default=None
        Columns of X whose coefficients vary by group, besides the intercept.
    fit_intercept : bool, default=True
        Add a shared intercept. The intercept varies by group in either case.
    prior_scale : float or array-like of shape (n_columns,), default=2.5
        Prior standard deviation of each shared coefficient on the scale of the data, and of the
        intercept (2.5 where an array is given). 2.5 is weakly informative for columns of unit scale.
    tau_prior : tuple of float, default=(0.0, 1.5)
        Mean and standard deviation of the normal prior of log tau, tau being the standard deviation
        of the group effects. With `random_slopes` the same for each, and the standard deviation also
        of the off-diagonal entries of the Cholesky factor of S.
    n_partitions : int or "auto", default="auto"
        Number of sites. "auto" is one for every 100 rows with groups (1000 without), at most eight:
        few large partitions are as accurate as many small ones and faster. One for every 5000 rows
        with ``engine="importance"``, whose noise adds up over sites. It does not depend on `n_jobs`,
        so neither does the result.
    engine : {"auto", "ep", "laplace", "importance"}, default="auto"
        How a partition answers. "auto" is "ep". "laplace" stops at the mode of the marginal
        posterior: faster and less accurate, means up to 1.2 posterior standard deviations off on
        50 groups of 50 rows with 50 columns. "importance" corrects the answers of "ep" by weighted
        draws over which group effects are integrated by quadrature: slower, noisy, and free of the
        Gaussian approximation within a group.
    refine : bool, default=True
        Replace the Gaussian in log tau by a grid at the end, with EP for the rest at each node. It
        keeps the long left tail of tau that few or small groups leave, whatever the engine. Costs
        about as much again as the fit.
    schedule : {"parallel", "serial"}, default="parallel"
        Update all sites of a sweep from the same state, or one after the other.
    n_draws : int, default=800
        Draws in a partition, for ``engine="importance"``.
    damping : float, default=1.0
        Share of an update that is taken, in (0, 1]. Steps are shortened on their own where a cavity
        would become improper.
    max_iter : int, default=50
        Largest number of sweeps; of Newton steps for ``engine="laplace"``.
    tol : float, default=1e-3
        Converged once an undamped sweep moves no posterior mean by more than this many posterior
        standard deviations and no log standard deviation by more than this. The inner iterations
        use a tenth of it.
    warm_start : bool, default=False
        Go on from the messages of the last fit. New groups become a site of their own.
    n_jobs : int or None, default=None
        Workers for the partitions. Worth while where a sweep over one takes well above 50 ms.
    random_state : int, RandomState instance or None, default=None
        Seed of ``engine="importance"``; the other engines are deterministic.
    verbose : int, default=0
        Print a line a sweep.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    coef_, coef_std_ : ndarray of shape (1, D), or (n_classes, D) one-versus-rest
        Posterior means and standard deviations of the shared coefficients.
    intercept_ : ndarray of shape (1,) or (n_classes,)
        Posterior mean of the shared intercept, 0 without one.
    coef_cov_ : ndarray of shape (D + 1, D + 1)
        Posterior covariance of the coefficients, the intercept last; (D, D) without one.
    tau_ : ndarray of shape (q,)
        Posterior medians of the standard deviations of the group effects: intercept, then
        `random_slopes`. Empty without groups.
    tau_interval_ : ndarray of shape (q, 2)
        Their 90 % intervals.
    group_labels_ : ndarray of shape (J,)
        Labels of the groups.
    group_effects_, group_effects_std_ : ndarray of shape (J, q)
        Posterior means and standard deviations of the group effects.
    partition_ : ndarray of shape (J,)
        Site of each group; of each row, shape (n,), without groups.
    log_evidence_ : float
        Approximation of log p(y).
    site_precision_, site_shift_ : ndarray of shape (K, P, P) and (K, P)
        Messages of the sites in natural parameters of (coefficients, intercept, theta); theta is
        log tau, or the log-Cholesky coordinates of S.
    phi_mean_, phi_cov_ : ndarray of shape (P,) and (P, P)
        Gaussian posterior of the same parameters before `refine`.
    theta_grid_, theta_weights_ : ndarray of shape (M, T) and (M,)
        Nodes in theta of the posterior in use, and their weights.
    n_skipped_ : int
        Messages that were left as they were because the tilted moments were no Gaussian.
    n_cut_steps_ : int
        Sweeps whose step was shortened to keep the cavities proper.
    n_iter_ : int
        Number of sweeps.
    converged_ : bool
        Whether the residual fell below `tol`.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual", "log_evidence" and "n_skipped" of each sweep.
    n_features_in_ : int
        Number of columns of X, the group column included.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    See Also
    --------
    ConvexVariationalLogistic : Logistic regression without groups, for many columns.

    Notes
    -----
    A pass over n rows costs O(M n D^2 + M J q D^2) for M nodes in theta (5 for one varying
    coefficient); local effects are eliminated group by group. A message has P (P + 3) / 2 numbers.

    Where groups have a handful of rows and tau is above 4 or so, EP itself is wrong, and the fit
    says so in a warning.

    References
    ----------
    .. [1] A. Gelman, A. Vehtari, P. Jylanki, C. Robert, N. Chopin and J. P. Cunningham,
       "Expectation propagation as a way of life", arXiv:1412.4869, first version, 2014,
       algorithm A.1 and sections 4 and 6.
    .. [2] A. Smola, S. V. N. Vishwanathan and E. Eskin, "Laplace propagation", NIPS 2004.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import HierarchicalEPLogistic
    >>> rng = np.random.default_rng(0)
    >>> site = np.repeat(np.arange(12), 20)
    >>> X = np.column_stack([rng.normal(size=240), site])
    >>> log_odds = X[:, 0] + 1.5 * rng.normal(size=12)[site]
    >>> y = rng.uniform(size=240) < 1 / (1 + np.exp(-log_odds))
    >>> clf = HierarchicalEPLogistic(group_column=1).fit(X, y)
    >>> clf.converged_, clf.group_effects_.shape
    (True, (12, 1))
    >>> clf.predict_proba([[0.5, 3], [0.5, 99]]).shape  # a known and a new group
    (2, 2)
    """

    def __init__(
        self,
        group_column=None,
        *,
        random_slopes=None,
        fit_intercept=True,
        prior_scale=2.5,
        tau_prior=(0.0, 1.5),
        n_partitions="auto",
        engine="auto",
        refine=True,
        schedule="parallel",
        n_draws=800,
        damping=1.0,
        max_iter=50,
        tol=1e-3,
        warm_start=False,
        n_jobs=None,
        random_state=None,
        verbose=0,
    ):
        self.group_column = group_column
        self.random_slopes = random_slopes
        self.fit_intercept = fit_intercept
        self.prior_scale = prior_scale
        self.tau_prior = tau_prior
        self.n_partitions = n_partitions
        self.engine = engine
        self.refine = refine
        self.schedule = schedule
        self.n_draws = n_draws
        self.damping = damping
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ checks

    def _check_parameters(self):
        check_common(self)
        check_choice("engine", self.engine, ["auto", "ep", "laplace", "importance"])
        check_choice("schedule", self.schedule, ["parallel", "serial"])
        check_number("n_draws", self.n_draws, 10, integer=True)
        if isinstance(self.n_partitions, str):
            check_choice("n_partitions", self.n_partitions, ["auto"])
        else:
            check_number("n_partitions", self.n_partitions, 1, integer=True)
        if isinstance(self.prior_scale, numbers.Real):
            check_number("prior_scale", self.prior_scale, 0, boundaries="neither")
        if np.ndim(self.tau_prior) != 1 or len(self.tau_prior) != 2:
            raise ValueError(f"tau_prior must be (mean, sd) of log tau, got {self.tau_prior!r}.")
        check_number("mean of tau_prior", self.tau_prior[0])
        check_number("sd of tau_prior", self.tau_prior[1], 0, boundaries="neither")

    def _prior_sd(self, width):
        """Return the prior sds of the shared coefficients, the intercept last."""
        scale = np.asarray(self.prior_scale, dtype=float)
        if scale.ndim == 0:
            return np.full(width + self.fit_intercept, float(scale))
        if scale.shape != (width,) or not np.all(scale > 0) or not np.all(np.isfinite(scale)):
            raise ValueError(
                f"prior_scale must be a positive number or {width} of them, got {scale!r}."
            )
        return np.r_[scale, 2.5] if self.fit_intercept else scale

    def _slope_positions(self, X, has_groups):
        """Return the positions of `random_slopes` in X and in the design without group column."""
        if self.random_slopes is None or len(self.random_slopes) == 0:
            return (), ()
        if not has_groups:
            raise ValueError("random_slopes needs groups: give group_column or groups.")
        names = [self.random_slopes] if isinstance(self.random_slopes, str) else self.random_slopes
        found = [column_position(c, X, self.n_features_in_, "random_slopes") for c in names]
        group = self._group_position
        if len(set(found)) < len(found) or group in found:
            raise ValueError(
                f"random_slopes={self.random_slopes!r} repeats a column or names the group column."
            )
        return tuple(found), tuple(c - (group is not None and c > group) for c in found)

    def _problem(self, plan, n_coef):
        q = 1 + len(self._slopes) if self._has_groups else 0
        mean = np.zeros(log_cholesky.n_coordinates(q))
        mean[log_cholesky.diagonal_positions(q)] = self.tau_prior[0]
        sd = np.full(len(mean), float(self.tau_prior[1]))
        beta_sd = self._prior_sd(n_coef)
        prior = normal_prior(np.r_[np.zeros(len(beta_sd)), mean], np.r_[beta_sd, sd])
        return Problem(
            plan.spec, plan.where, len(plan.labels), plan.n_rows, len(beta_sd), q, prior, (mean, sd)
        )

    def _settings(self):
        engine = "ep" if self.engine == "auto" else self.engine
        seed = check_random_state(self.random_state).randint(2**31) if engine == "importance" else 0
        return Settings(
            engine,
            bool(self.refine),
            self.schedule,
            float(self.damping),
            int(self.max_iter),
            float(self.tol),
            int(self.n_draws),
            seed,
        )

    # ------------------------------------------------------------------ fit

    @restore_on_error
    @with_callbacks
    def fit(self, X, y=None, groups=None, sample_weight=None, checkpoint=None):
        """Fit the classifier.

        Parameters
        ----------
        X : array-like of shape (n, d), or list of partitions
            Training rows. A list of partitions has for each the pair (X, y), with sample weights as
            a third entry if any, as arrays or memory maps; or a function without arguments that
            returns it; or a dask future of it. Groups are then a column of X, and no group may be in
            two partitions.
        y : array-like of shape (n,), default=None
            Class labels; None only for a list of partitions.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X. Any hashable values; a row whose label is
            missing is a group of its own, without a name.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row: an integer weight equals repeating the row, zero leaves it out.
        checkpoint : str or path, default=None
            File to which the messages are written after each sweep, and from which the fit goes on
            if the file exists. It has to belong to the same data and model.

        Returns
        -------
        self : HierarchicalEPLogistic
            The fitted estimator.

        Raises
        ------
        ValueError
            If a parameter, the data, the groups, the weights or the checkpoint are not usable. The
            estimator is then as it was before.
        """
        self._check_parameters()
        previous = self._previous_state() if self.warm_start else None
        raw = y is None and isinstance(X, list | tuple)
        if raw:
            if groups is not None or sample_weight is not None:
                raise ValueError("groups and sample_weight belong into the partitions of a list.")
            fits, plan = self._fit_parts(list(X), previous, checkpoint)
        else:
            fits, plan = self._fit_rows(X, y, groups, sample_weight, previous, checkpoint)
        self._store(fits, plan)
        name = type(self).__name__
        if not self.converged_:
            residual = self.history_["residual"][-1]
            warn_not_converged(name, residual, self.tol, self.n_iter_)
        if self._has_groups:
            warn_of_hard_groups(name, plan, float(np.max(self.tau_)))
        return self

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
            with PartMap(plan.make_parts(sign), self.n_jobs if n_classes == 2 else None) as run:
                fit = GroupedFit(run, problem, settings)
                if monitor is not None:
                    running.append(fit)
                return self._run(fit, plan, previous, k, monitor, checkpoint)

        jobs = 1 if n_classes == 2 else self.n_jobs
        fits = fit_one_versus_rest(fit_binary, training.y, n_classes, jobs, monitor)
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
        with PartMap(parts, self.n_jobs) as run:
            nothing = [None] * len(parts)
            told = run(describe, nothing, self.group_column, checkpoint is not None)
            self._check_descriptions(told)
            _, self._slopes = self._slope_positions(None, self._has_groups)
            plan = plan_parts(
                run.parts,
                told,
                self._group_position,
                self._slopes,
                self.fit_intercept,
                self.classes_,
            )
            fit = GroupedFit(run, self._problem(plan, plan.width), self._settings())
            report = partial(self._attributes_so_far, [fit])
            monitor = FitMonitor(self, None, None, self.max_iter, report)
            fits = [self._run(fit, plan, previous, 0, monitor, checkpoint)]
            monitor.finish()
        return fits, plan

    def _check_descriptions(self, told):
        """Check what partitions say against each other; set the attributes that follow from it."""
        widths = [t.width for t in told]
        if len(set(widths)) > 1:
            raise ValueError(f"partitions differ in their number of features: {widths}.")
        self.classes_ = np.unique(np.concatenate([t.classes for t in told]))
        if len(self.classes_) != 2:
            raise ValueError(
                f"a list of partitions needs two classes, got {len(self.classes_)} class(es)."
            )
        self.n_features_in_ = widths[0]
        self.__dict__.pop("feature_names_in_", None)
        self._has_groups = self.group_column is not None
        self._group_position = None
        if self._has_groups:
            self._group_position = self._position_of(self.group_column, None, "group_column")

    def _training(self, X, y, groups, sample_weight):
        """Check the data; return (Training, group labels of the rows in use or None)."""
        if self.group_column is not None and groups is not None:
            raise ValueError("give group_column or groups, not both.")
        self._group_position, labels = None, None
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
        if self._has_groups:
            if len(self.classes_) > 2:
                raise ValueError(
                    f"group effects need a binary target, y has {len(self.classes_)} classes; wrap "
                    "the estimator in sklearn.multiclass.OneVsRestClassifier with group_column."
                )
            labels = [g for g, kept in zip(labels, training.kept, strict=True) if kept]
        self._slopes = self._slope_positions(X, self._has_groups)[1]
        return training, labels

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
        mean = np.stack([m.mean for m in beta])
        sd = np.stack([np.sqrt(np.diagonal(m.cov)) for m in beta])
        self.coef_, self.intercept_ = self._split_intercept(mean)
        self.coef_std_ = self._split_intercept(sd)[0]
        self.coef_cov_ = _merged([m.cov for m in beta])
        first = self._posteriors[0]
        quantiles = first.scale_quantiles([0.05, 0.5, 0.95]) if self._has_groups else None
        self.tau_ = quantiles[1] if self._has_groups else np.empty(0)
        self.tau_interval_ = quantiles[[0, 2]].T if self._has_groups else np.empty((0, 2))
        self.group_labels_ = plan.labels
        self.group_effects_, self.group_effects_std_ = first.group_effects()
        self.theta_grid_, self.theta_weights_ = first.theta, first.weight
        self.partition_ = plan.site
        self._state = self._state_of(
            Messages(self.site_precision_, self.site_shift_), fits[0].attributes["prior"], plan
        )

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

    def _previous_state(self):
        return getattr(self, "_state", None)

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
        missing = [name for name in (*_STATE, "group_keys") if name not in state]
        if missing:
            raise ValueError(f"state lacks {missing}.")
        self._state = {name: np.array(state[name]) for name in (*_STATE, "group_keys")}
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
