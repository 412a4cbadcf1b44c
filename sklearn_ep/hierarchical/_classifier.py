"""Hierarchical logistic regression by expectation propagation over data partitions."""

import numbers
import warnings

import numpy as np
from sklearn.utils import check_random_state

from .._estimator.checks import check_choice, check_common, check_number
from .._estimator.compat import with_callbacks
from .._estimator.fitting import restore_on_error, warn_not_converged
from . import _log_cholesky as log_cholesky
from ._fit import Problem, Settings, normal_prior
from ._groups import column_position
from ._nuts import load_sampler
from ._plan import remarks_on_groups
from ._training import GroupedTraining

__all__ = ["HierarchicalEPLogistic"]


class HierarchicalEPLogistic(GroupedTraining):
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
        intercept (2.5 where an array is given). 2.5 is weakly informative for columns of unit
        scale.
    tau_prior : tuple of float, default=(0.0, 1.5)
        Mean and standard deviation of the normal prior of log tau, tau being the standard deviation
        of the group effects: within a factor of 20 of one. With `random_slopes` the same for each,
        and the standard deviation also of the off-diagonal entries of the Cholesky factor of S.
    n_partitions : int or "auto", default="auto"
        Number of sites. "auto" is one for every 100 rows with groups (1000 without), at most eight:
        few large partitions are as accurate as many small ones and faster. One for every 5000 rows
        with the engines that draw, whose noise adds up over sites. It does not depend on `n_jobs`,
        so neither does the result.
    engine : {"auto", "ep", "laplace", "importance", "nuts"}, default="auto"
        How a partition answers. "auto" is "ep". "laplace" stops at the mode of the marginal
        posterior: faster and less accurate, means up to 1.2 posterior standard deviations off on
        50 groups of 50 rows with 50 columns. "importance" corrects the answers of "ep" by weighted
        draws over which group effects are integrated by quadrature: slower, noisy, and free of the
        Gaussian approximation within a group. "nuts" takes the moments of a Hamiltonian chain in
        each partition instead, and so needs no proposal near the answer: slower still, with draws
        that depend on each other (give it more `n_draws` for intercept and tau). It needs the
        optional package nutpie, ``pip install 'sklearn-ep[nuts]'``.
    refine : bool, default=True
        Replace the Gaussian in log tau by a grid at the end, with EP for the rest at each node. It
        keeps the long left tail of tau that few or small groups leave, and makes "laplace" as
        accurate as "ep"; "importance" and "nuts" go without. Costs about as much again as the fit.
    schedule : {"parallel", "serial", "asynchronous"}, default="parallel"
        Update all sites of a sweep from the same state, or one after the other, or use each message
        as it arrives. "asynchronous" has the same fixed point, but with several workers the path to
        it, and so the last digits, depend on their timing.
    n_draws : int, default=800
        Draws in a partition, for ``engine="importance"`` and "nuts".
    damping : float, default=1.0
        Share of an update that is taken, in (0, 1]. Steps are shortened on their own where a cavity
        would become improper, and parallel sweeps are mixed by Anderson acceleration.
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
        Seed of ``engine="importance"`` and "nuts"; the other engines are deterministic.
    verbose : int, default=0
        Print a line a sweep.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    coef_ : ndarray of shape (1, D), or (n_classes, D) one-versus-rest
        Posterior means of the shared coefficients.
    coef_std_ : ndarray of shape (1, D), or (n_classes, D) one-versus-rest
        Their posterior standard deviations.
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
    group_effects_ : ndarray of shape (J, q)
        Posterior means of the group effects.
    group_effects_std_ : ndarray of shape (J, q)
        Their posterior standard deviations.
    partition_ : ndarray of shape (J,)
        Site of each group; of each row, shape (n,), without groups.
    log_evidence_ : float
        Approximation of log p(y).
    site_precision_ : ndarray of shape (K, P, P)
        Messages of the sites about (coefficients, intercept, theta): precisions. theta is log tau,
        or the log-Cholesky coordinates of S.
    site_shift_ : ndarray of shape (K, P)
        Messages of the sites: precision times mean.
    phi_mean_ : ndarray of shape (P,)
        Posterior mean of the same parameters before `refine`.
    phi_cov_ : ndarray of shape (P, P)
        Their Gaussian posterior covariance before `refine`.
    theta_grid_ : ndarray of shape (M, T)
        Nodes in theta of the posterior in use.
    theta_weights_ : ndarray of shape (M,)
        Weights of the nodes.
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

    Few partitions of few groups may have no fixed point with proper cavities. The steps then shrink
    to nothing at the border; after three of those the partitions answer as one for the group
    scales, by way of the nodes in theta, and `site_precision_` and `site_shift_` are equal shares.

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
        check_choice("engine", self.engine, ["auto", "ep", "laplace", "importance", "nuts"])
        if self.engine == "nuts":
            load_sampler()
        check_choice("schedule", self.schedule, ["parallel", "serial", "asynchronous"])
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
        seed = 0
        if engine in ("importance", "nuts"):
            seed = check_random_state(self.random_state).randint(2**31)
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
            returns it; or a dask future of it. Groups are then a column of X, and no group may be
            in two partitions.
        y : array-like of shape (n,), default=None
            Class labels; None only for a list of partitions.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X. Any hashable values; a row whose label
            is missing is a group of its own, without a name.
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
        ImportError
            If ``engine="nuts"`` and nutpie is not installed.
        """
        self._check_parameters()
        previous = getattr(self, "_state", None) if self.warm_start else None
        raw = y is None and isinstance(X, list | tuple)
        if raw and (groups is not None or sample_weight is not None):
            raise ValueError("groups and sample_weight belong into the partitions of a list.")
        with np.errstate(over="raise", invalid="raise"):
            if raw:
                fits, plan = self._fit_parts(list(X), previous, checkpoint)
            else:
                fits, plan = self._fit_rows(X, y, groups, sample_weight, previous, checkpoint)
        self._store(fits, plan)
        name = type(self).__name__
        if not self.converged_:
            residual = self.history_["residual"][-1]
            warn_not_converged(name, residual, self.tol, self.n_iter_)
        self._remarks: tuple[str, ...] = ()
        if self._has_groups:
            self._remarks = remarks_on_groups(plan, float(np.max(self.tau_)), self.engine)
        for remark in self._remarks:
            warnings.warn(f"{name}: {remark}", UserWarning, stacklevel=2)
        return self
