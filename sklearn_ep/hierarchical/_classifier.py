"""Hierarchical logistic regression by expectation propagation over data partitions."""

import warnings
from contextlib import nullcontext

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import Bunch, check_random_state
from sklearn.utils.validation import check_is_fitted

from .._engine.likelihoods import Logit
from .._engine.partition import PartMap
from .._estimator.base import VersionedEstimator
from .._estimator.checks import check_number
from .._estimator.compat import CallbackSupportMixin, with_callbacks
from .._estimator.fitting import (
    one_or_stack,
    remarks_of,
    restore_on_error,
    run_attributes,
    warn_not_converged,
)
from .._estimator.latents import committee, log_normalise
from .._estimator.posterior_classifier import probabilities
from ._checkpoint import STATE, state_of
from ._fit import fit_plan, theta_rule
from ._messages import Messages, posterior_moments
from ._plan import (
    check_parameters,
    check_parts,
    plan_parts,
    plan_rows,
    remarks_on_groups,
    remarks_on_parameters,
)
from ._prediction import GroupsForgotten, new_rows, row_pairs, rows_again, split_intercept
from ._summary import intervals, summarise
from ._theta_grid import prior_of_beta

__all__ = ["HierarchicalEPLogistic"]


class HierarchicalEPLogistic(CallbackSupportMixin, ClassifierMixin, VersionedEstimator):
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
        Replace the Gaussian in theta (log tau) by a grid at the end, with EP for the rest at each
        node. It keeps the long left tail of tau that few or small groups leave, and makes "laplace"
        as accurate as "ep". "importance" and "nuts" go without, and so do more than three
        coordinates of theta (three varying coefficients): `theta_rule_` says which ran. Costs about
        as much again as the fit.
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
        1 prints a line for each iteration, and for each step of learning or integration that goes
        before or after them, with the seconds since the fit began.

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
    engine_ : {"ep", "laplace", "importance", "nuts"}
        The engine that ran.
    theta_rule_ : {"grid", "gaussian", "none"}
        How theta was integrated at the end: by a grid of EP fits, by nodes for its Gaussian
        posterior, or not at all for want of groups.
    theta_grid_ : ndarray of shape (M, T)
        Nodes in theta of the posterior in use.
    theta_weights_ : ndarray of shape (M,)
        Weights of the nodes.
    n_skipped_ : int
        Messages that were left as they were because the tilted moments were no Gaussian, over all
        sweeps, that of the start included.
    n_cut_steps_ : int
        Sweeps whose step was shortened to keep the cavities proper.
    n_iter_ : int
        Number of iterations: an update of the messages and a sweep by the new ones.
    converged_ : bool
        Whether the residual fell below `tol`.
    stop_reason_ : {"converged", "max_iter", "stuck", "asked"}
        Why the fit ended: converged, out of iterations, no step left that keeps the cavities proper
        (that gains, for "laplace"), or asked to by a callback.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and "log_evidence", and "n_skipped" unless the engine is "laplace", of the state
        each iteration led to.
    n_features_in_ : int
        Number of columns of X, the group column included.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    See Also
    --------
    ConvexVariationalLogistic : Logistic regression without groups, for many columns.

    Notes
    -----
    A pass over n rows costs O(M n D^2 + M J q D^2) for M nodes in theta: 5 for one varying
    coefficient, 45 for two (3 and 27 where the last log scale is known within 0.1), 2 T + 1 for
    more. Local effects are eliminated group by group. A message has P (P + 3) / 2 numbers.

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
            in two partitions. A dask data frame or array is computed; what does not fit into memory
            is a list of partitions.
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
        check_parameters(self)
        raw = y is None and isinstance(X, list | tuple)
        if raw and (groups is not None or sample_weight is not None):
            raise ValueError("groups and sample_weight belong into the partitions of a list.")
        has_groups = self.group_column is not None or groups is not None
        for remark in remarks_on_parameters(self, has_groups):
            warnings.warn(f"{type(self).__name__}: {remark}", UserWarning, stacklevel=2)
        previous = getattr(self, "_state", None) if self.warm_start else None
        with_digest = checkpoint is not None
        with np.errstate(over="raise", invalid="raise"), self._pool(X, raw) as run:
            if raw:
                plan, data = plan_parts(self, run, with_digest), (None, None)
            else:
                plan = plan_rows(self, X, y, groups, sample_weight, previous, with_digest)
                data = X, y
            fits = fit_plan(self, plan, run, data, previous, checkpoint)
        self._store(plan, fits)
        if not self.converged_:
            warn_not_converged(self, remarks=remarks_of(fits))
        for remark in self._remarks:
            warnings.warn(f"{type(self).__name__}: {remark}", UserWarning, stacklevel=2)
        return self

    def _pool(self, X, raw):
        """Return the pool over a list of raw partitions, None for rows in memory."""
        if not raw:
            return nullcontext()
        check_parts(self, X)
        return PartMap(list(X), self.n_jobs, self.schedule == "asynchronous")

    def _store(self, plan, fits):
        """Turn the outcome of a fit into fitted attributes."""
        posteriors = [f.posterior for f in fits]
        messages, priors = ([f.attributes[name] for f in fits] for name in ("messages", "prior"))
        phi = [posterior_moments(*pair) for pair in zip(priors, messages, strict=True)]
        beta = [p.beta_moments() for p in posteriors]
        sd = np.stack([np.sqrt(np.diagonal(m.cov)) for m in beta])
        mean = np.stack([m.mean for m in beta])
        self.coef_, self.intercept_ = split_intercept(mean, plan.columns)
        self.coef_std_ = split_intercept(sd, plan.columns)[0]
        self.coef_cov_ = one_or_stack([m.cov for m in beta])
        self.site_precision_ = one_or_stack([m.precision for m in messages])
        self.site_shift_ = one_or_stack([m.shift for m in messages])
        self.phi_mean_ = one_or_stack([m.mean for m in phi])
        self.phi_cov_ = one_or_stack([m.cov for m in phi])
        first, levels = posteriors[0], (0.05, 0.5, 0.95)
        has_groups = plan.columns.has_groups
        quantiles = first.scale_quantiles(levels) if has_groups else np.empty((3, 0))
        self.tau_, self.tau_interval_ = quantiles[1], quantiles[[0, 2]].T
        self.group_labels_, self.partition_ = plan.labels, plan.site
        self.group_effects_, self.group_effects_std_ = first.group_effects()
        self.theta_grid_, self.theta_weights_ = first.theta, first.weight
        self.theta_rule_ = theta_rule(plan.problem, plan.settings)
        self.engine_ = plan.settings.engine
        self.n_skipped_ = sum(f.attributes["n_skipped"] for f in fits)
        self.n_cut_steps_ = sum(f.attributes["n_cut"] for f in fits)
        self.__dict__.update(run_attributes(fits))
        self._remarks: tuple[str, ...] = ()
        if has_groups:
            self._remarks = remarks_on_groups(plan, float(np.max(self.tau_)), self.engine_)
        found = Messages(self.site_precision_, self.site_shift_)
        self._state = state_of(found, priors[0], plan.site, plan.labels)
        self._prior_of_beta = prior_of_beta(priors[0], plan.problem.d)
        self._forgotten, self._n_rows = GroupsForgotten(), plan.problem.n_rows
        self._columns, self._posteriors = plan.columns, posteriors

    def latent_mean_and_variance(self, X, groups=None, kind="conditional"):
        """Posterior mean and variance of the linear predictor at new rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X. Unseen and missing labels are new
            groups, whose effect is integrated over the population.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        mean, variance : ndarray of shape (n,), or (n, n_classes) for more than two classes
            On the scale of log odds.
        """
        rows = new_rows(self, X, groups, kind)
        pairs = [p.latent(*rows) for p in self._posteriors]
        means, variances = zip(*pairs, strict=True)
        return one_or_stack(means, axis=1), one_or_stack(variances, axis=1)

    def latent_covariance(self, X1, X2=None, groups1=None, groups2=None):
        """Posterior covariance of the linear predictor between new rows.

        Parameters
        ----------
        X1 : array-like of shape (n1, d)
            Rows.
        X2 : array-like of shape (n2, d), default=None
            Rows; None stands for X1.
        groups1, groups2 : array-like of shape (n1,) and (n2,), default=None
            Group labels, where they are not a column of X. Rows with one unseen label share its
            effect; rows without label do not.

        Returns
        -------
        covariance : ndarray of shape (n1, n2), or (n_classes, n1, n2)
            One matrix a one-versus-rest problem for more than two classes.
        """
        pairs = row_pairs(self, X1, X2, groups1, groups2)
        return one_or_stack([p.covariance(*pairs) for p in self._posteriors])

    def decision_function(self, X, groups=None, kind="conditional"):
        """Posterior mean of the linear predictor.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        mean : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Log odds; positive where the second class is favoured.
        """
        return self.latent_mean_and_variance(X, groups, kind)[0]

    def latent_links(self, observed=False):
        """Link between latent function and label, as the predictions use it.

        Parameters
        ----------
        observed : bool, default=False
            The link to the labels that `fit` receives: here the same.

        Returns
        -------
        links : list of Factor
            The logit, for two classes once, otherwise once a class. ``log_prob(1, f)`` is the log
            probability of the second class (of this class) at a latent value f, and
            ``tilted(1, mean, variance)`` its logarithm averaged over a normal latent value.
        """
        check_is_fitted(self)
        return [Logit()] * len(self._posteriors)

    def predict_log_proba(self, X, groups=None, kind="conditional"):
        """Log probabilities of the classes, computed in logs throughout.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        log_proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`.
        """
        rows = new_rows(self, X, groups, kind)
        pairs = [p.log_proba(*rows) for p in self._posteriors]
        if len(pairs) == 1:
            return pairs[0]
        return log_normalise(np.column_stack([p[:, 1] for p in pairs]))

    def predict_proba(self, X, groups=None, kind="conditional"):
        """Probabilities of the classes, averaged over the posterior of coefficients and effects.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X. Unseen and missing labels are new
            groups, whose effect is integrated over the population.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`; rows sum to one.
        """
        return probabilities(self.predict_log_proba(X, groups, kind))

    def predict(self, X, groups=None, kind="conditional"):
        """Most probable class.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        y : ndarray of shape (n,)
            Labels out of `classes_`.
        """
        log_proba = self.predict_log_proba(X, groups, kind)
        return self.classes_[np.argmax(log_proba, axis=1)]

    def score(self, X, y, sample_weight=None, groups=None):
        """Accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        y : array-like of shape (n,)
            True classes.
        sample_weight : array-like of shape (n,), default=None
            Weights of the rows.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.

        Returns
        -------
        score : float
            Share of rows, by weight, whose class is predicted.
        """
        return accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight)

    def sample_proba(self, X, n_samples=10, random_state=None, groups=None):
        """Draw class probabilities from the posterior: a committee of models.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        n_samples : int, default=10
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.
        groups : array-like of shape (n,), default=None
            Group labels, where they are not a column of X.

        Returns
        -------
        proba : ndarray of shape (n_samples, n, n_classes)
            Coefficients and group effects of one draw are the same for all rows.
        """
        rows = new_rows(self, X, groups)
        check_number("n_samples", n_samples, 1, integer=True)
        rng = _generator(check_random_state(random_state))
        draws = [p.draw_latent(*rows, n_samples, rng) for p in self._posteriors]
        return committee(self.latent_links(), draws)

    def sample_posterior(self, n_samples=1, random_state=None):
        """Draw all parameters jointly from the posterior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        draws : Bunch
            coef (n_samples, D), intercept (n_samples,), tau (n_samples, q) and group_effects
            (n_samples, J, q), in phase: entry s of each is one draw of the whole posterior. With
            more than two classes each array has the class as its second axis.
        """
        check_is_fitted(self)
        check_number("n_samples", n_samples, 1, integer=True)
        rng = _generator(check_random_state(random_state))
        draws = []
        for posterior in self._posteriors:
            beta, effects, theta, _ = posterior.draw(n_samples, rng)
            coef, intercept = split_intercept(beta, self._columns)
            draws.append((coef, intercept, posterior.scales(theta), effects))
        arrays = [one_or_stack(a, axis=1) for a in zip(*draws, strict=True)]
        names = "coef", "intercept", "tau", "group_effects"
        return Bunch(**dict(zip(names, arrays, strict=True)))

    def coef_interval(self, level=0.9):
        """Posterior intervals of the shared coefficients.

        Parameters
        ----------
        level : float, default=0.9
            Posterior probability between the ends, in (0, 1); half of the rest is on either side.
            0.9 is that of `tau_interval_`.

        Returns
        -------
        interval : ndarray of shape (1, D, 2), or (n_classes, D, 2) one-versus-rest
            Lower and upper end of each entry of `coef_`: quantiles of the posterior, a mixture of
            normal distributions over the nodes in theta. Costs O(M D^2).

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        check_is_fitted(self)
        return intervals(self._posteriors, level)[:, : self.coef_.shape[1]]

    def summary(self, level=0.9):
        """Tables of what was learned, for reading.

        Parameters
        ----------
        level : float, default=0.9
            Posterior probability of the intervals, in (0, 1). 0.9 is that of `tau_interval_`.

        Returns
        -------
        summary : Summary
            Its `coefficients` have the shared coefficients under the names of the columns of X (x0,
            x1, ... by position where it had none), the intercept last; with more than two classes
            as "class: column". Its `scales` have the standard deviations of the group effects:
            posterior median tau, its interval, and n_levels, the number of named groups. Its
            `figures` are rows, groups, log evidence and engine. All on the scale of log odds;
            intervals are quantiles of the posterior. ``print`` shows it, `to_frame` gives the
            coefficients as a data frame.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        check_is_fitted(self)
        return summarise(self, level)

    def _log_weights(self, rows, n_draws, rng):
        """Weigh joint draws of coefficients and all group effects, both given theta, O(S n d)."""
        remarks = [f"Note: {remark}" for remark in self._remarks]
        if self.n_skipped_:
            remarks.append(
                f"{self.n_skipped_} messages were left as they were, because the tilted moments "
                "were no Gaussian."
            )
        if rows is None:
            remarks.append("Give X, y and groups of the training rows for importance weights.")
            return None, remarks
        again = rows_again(self, rows)
        if len(self._posteriors) > 1:
            return None, remarks
        code = again[2]
        if self._columns.has_groups and not np.all((code >= 0) & (code < len(self.group_labels_))):
            remarks.append("Some rows are of no named group of the fit: no importance weights.")
            return None, remarks
        prior, rng = self._prior_of_beta, _generator(rng)
        return self._posteriors[0].log_weights(*again, prior, n_draws, rng), remarks

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
        missing = [name for name in STATE if name not in state]
        if missing:
            raise ValueError(f"state lacks {missing}.")
        self._state = {name: np.array(state[name]) for name in STATE}
        return self


def _generator(rng):
    """Return a Generator seeded by a RandomState."""
    return np.random.default_rng(rng.randint(2**31))
