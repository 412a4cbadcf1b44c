"""Hierarchical logistic regression by expectation propagation: one factor, or several."""

import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import Bunch
from sklearn.utils.validation import check_is_fitted

from .._engine.partition import PartMap
from .._estimator import fitting
from .._estimator.annotations import Labels, RowsLike, Seed, TrainingRows
from .._estimator.base import VersionedEstimator
from .._estimator.checks import check_number, check_parts, checked_draws
from .._estimator.compat import CallbackSupportMixin, with_callbacks
from .._estimator.latents import latents_of, links_of, probabilities
from .._estimator.summary import CoefficientReport
from . import _plan, _prediction, _scales, _tables
from ._factors import split_intercept
from ._fit import fit_plan, store_fit
from ._parts import check_checkpoint, checked_state
from .messages.posterior import remarks_on_agreement
from .partitions.trust import trust_in_parts


class HierarchicalEPLogistic(
    CoefficientReport, CallbackSupportMixin, ClassifierMixin, VersionedEstimator
):
    """Multilevel logistic regression: shared coefficients and effects of groups.

    The log odds of a row are x' beta + w' a_g, where a_g ~ N(0, S) is the effect of its group g and
    w is one and the `random_slopes` columns. With several grouping factors, nested or crossed, each
    adds such a term. beta and S have a posterior, not a point estimate.

    **You will set** `group_column`, `random_slopes`, `tau_prior` and `prior_scale`. Leave the other
    parameters at their defaults.

    Parameters
    ----------
    group_column : int, str or list, default=None
        Index or name of the column of X that holds the group label; it is taken out of the design.
        The way that works in pipelines, searches and cross-validation. A list has several factors,
        each a column or, as a tuple of columns, their combinations: ``["person", "item"]`` is
        crossed, ``["region", ("region", "district")]`` nested; attributes of groups are then lists,
        even of one factor. None, and no `groups` in `fit`: logistic regression without groups.
    random_slopes : list of int or str, or dict, default=None
        Columns of X whose coefficients vary by group, besides the intercept. With several factors a
        dict from a factor, as written in `group_column`, to such a list.
    fit_intercept : bool, default=True
        Add a shared intercept. The intercept varies by group in either case.
    prior_scale : float or array-like of shape (n_columns,), default=2.5
        Prior standard deviation of each shared coefficient, in log odds for one unit of its column.
        That of the intercept is the same number, and 2.5 where an array is given. 2.5 is weakly
        informative for columns of unit scale. It is the one prior of this package that depends on
        the units of X: columns of standard deviation .001 have to be standardised, or given a scale
        of 2500. A fit at the default warns of a column for which the prior outweighs all rows.
    tau_prior : tuple of float, or dict, default=(0.0, 1.5)
        Mean and standard deviation of the normal prior of log tau, tau being the standard deviation
        of the group effects. The default is within a factor of 20 of one. With `random_slopes` the
        same for each, and the standard deviation also of the off-diagonal entries of the Cholesky
        factor of S. With a list of factors a dict may give some of them a prior of their own.
    n_partitions : int, "auto" or "adaptive", default="auto"
        Number of sites of partitioned EP, for one factor. "auto" fits all rows at once with
        ``engine="ep"``, `schedule` and `damping` at their defaults, no checkpoint, and rows in
        memory. Otherwise it is one for every 100 rows with groups (1000 without), at most eight:
        few large partitions are as accurate as many small ones and faster. With the engines that
        draw it is one for every 5000 rows, because their noise adds up over sites. It does not
        depend on `n_jobs`, so neither does the result. "adaptive" begins with at most 50 parts and
        carries out the advice of `diagnose`: parts whose tilted distribution is far from the
        posterior are merged, and the fit goes on, until no merger helps [1]_. It is for two classes
        and rows in memory, without checkpoint. All rounds share `max_iter` and the history.
        With a list of factors a number asks for ``engine="messages"`` on that many parts of the
        rows, whose answer is that of all rows at once.
    engine : {"auto", "ep", "messages", "laplace", "importance", "nuts"}, default="auto"
        "auto" is "ep", or "messages" for a list of factors with very many levels. The limit is 500
        effects of all factors but the largest. It is 4000 where levels of one factor are nested in
        another for nine rows of ten.

        "ep" is expectation propagation over all rows at once, given the scales. Where only the
        intercept varies in the largest factor, its groups of at most eight rows are integrated
        exactly. All factors but the largest may have 4000 effects together.

        "messages" takes factors of any size, a million rows in seconds. Variances come from
        messages along the rows and along chains of nested levels, scales from the gradient of the
        evidence; their logarithms have a normal posterior. It takes no `random_slopes`. It finds
        log tau up to 0.03 too small where tau is above two and levels have three rows. It compares
        its variances with exact ones at the end, and warns where they differ by more than 10 %. In
        partitions sums over levels travel, never rows.

        The other engines are for partitions of one factor. "laplace" stops at the mode of the
        marginal posterior. It is faster and less accurate: means are up to 1.2 posterior standard
        deviations off on 50 groups of 50 rows with 50 columns. "importance" corrects "ep" by
        weighted draws, with group effects integrated by quadrature. It is slower and noisy, without
        the Gaussian approximation within a group. "nuts" takes the moments of a Hamiltonian chain
        in each partition, and is slower still. It needs the optional package nutpie, ``pip install
        'sklearn-ep[nuts]'``. Both draw 800 times a partition. "importance" replaces draws
        whose weights have become uneven by twice as many.
    refine : bool, default=True
        Whether nodes in theta, the coordinates of the scales, are weighted by the evidence at each.
        In partitions False keeps the normal distribution of theta that the messages give: cheaper,
        without the long left tail of tau that few or small groups leave. Elsewhere False takes the
        star also where a grid would be affordable. It has no effect for "importance", "nuts" and
        "messages".
    hyperparameters : {"auto", "integrate", "mode"}, default="auto"
        Whether the scales are averaged over or kept at their mode (in partitions at the posterior
        mean of theta). The average is over a grid for one or two scales where passes are cheap,
        and else over a star: the mode and two nodes along each axis, with a smooth density through
        their values and gradients. Quantiles and draws of tau come from this density. "auto"
        averages, since a mode makes intervals too short where groups are few. "mode" has no
        effect for the engines that draw.
    schedule : {"parallel", "serial", "asynchronous"}, default="parallel"
        Update all sites of a sweep from the same state, or one after the other, or use each message
        as it arrives. "asynchronous" has the same fixed point, but with several workers the path to
        it, and so the last digits, depend on their timing. For one factor, not in a list.
    multi_class : {"auto", "joint", "one_vs_rest"}, default="auto"
        How more than two classes are fitted. "joint" is one softmax model. Every level of every
        factor has an effect for each class, with one scale for all classes. It takes
        ``engine="ep"`` and no partitions, 4000 coefficients and effects of all classes together,
        and rows times classes of 400,000. "one_vs_rest" is for models without groups. "auto" is
        joint with groups, and one against the rest without. For one against the rest with groups
        wrap the estimator in ``sklearn.multiclass.OneVsRestClassifier``.
    power : float, default=1.0
        Share u of each row's likelihood that is matched at a time, in (0, 1]: cavities leave out u
        times the site, tilted distributions have the likelihood to the power u. 1 is EP; towards 0
        it becomes variational Bayes, with smaller standard deviations of group effects and scales.
        With powers below one no group is integrated exactly. For the engines "ep" and "messages"; a
        search may choose it by `log_evidence_` or held-out log loss.
    damping : float, default=1.0
        Share of an update that is taken, in (0, 1]. Steps are shortened on their own where a cavity
        would become improper, and parallel sweeps are mixed by Anderson acceleration.
    max_iter : int, default=50
        Largest number of sweeps; of Newton steps for ``engine="laplace"``; of steps in the scales
        with several factors.
    tol : float, default=1e-3
        Converged once an undamped sweep moves no posterior mean by more than this many posterior
        standard deviations and no log standard deviation by more than this. The inner iterations
        use a tenth of it.
    warm_start : bool, default=False
        Start from the last fit. With partitions it goes on from the last messages, and new groups
        share one site. Without partitions it starts from the last scales, and from the last sites
        of the rows where their number is the same; with ``engine="messages"`` from the last values
        of levels. Fits of one class against the rest start anew.
    n_jobs : int or None, default=None
        Workers for the partitions, threads for ``engine="messages"`` unless a backend is asked for.
        Worth while where a sweep over one takes well above 50 ms.
    random_state : int, RandomState instance or None, default=None
        Seed of ``engine="importance"`` and "nuts"; the other engines are deterministic.
    verbose : int, default=0
        1 prints a line for each iteration, and for each phase of learning or integration before or
        after them, with the seconds since the fit began; 2 for each step of a phase as well.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    coef_ : ndarray of shape (1, D), or (n_classes, D)
        Posterior means of the shared coefficients.
    coef_std_ : ndarray of shape (1, D), or (n_classes, D)
        Their posterior standard deviations.
    intercept_ : ndarray of shape (1,) or (n_classes,)
        Posterior mean of the shared intercept, 0 without one.
    coef_cov_ : ndarray of shape (D + 1, D + 1)
        Posterior covariance of the coefficients, the intercept last; (D, D) without one. One matrix
        a class with more than two.
    tau_ : ndarray of shape (q,)
        Posterior medians of the standard deviations of the group effects: intercept, then
        `random_slopes`; factor by factor. Empty without groups.
    tau_interval_ : ndarray of shape (q, 2)
        Their 90 % intervals.
    group_labels_ : ndarray of shape (J,), or list of them
        Labels of the groups; with a list of factors, here and below, one array for each in the
        order of `group_column`. Labels of combinations are tuples.
    group_effects_ : ndarray of shape (J, q), or list of them
        Posterior means of the group effects; of several classes jointly (n_classes, J, q).
    group_effects_std_ : ndarray of shape (J, q), or list of them
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
        Posterior mean of the same parameters, before `refine` where there are partitions.
    phi_cov_ : ndarray of shape (P, P)
        Their Gaussian posterior covariance.
    engine_ : {"ep", "messages", "laplace", "importance", "nuts"}
        The engine that ran.
    theta_rule_ : {"grid", "star", "gaussian", "mode", "none"}
        How theta was treated at the end: by a grid of EP fits, by a star of them, by a normal
        distribution, by its mode alone, or not at all without groups.
    hyperparameters_used_ : {"integrate", "mode"}
        Whether theta was integrated over.
    hyper_nodes_ : ndarray of shape (M, T), or list of them
        Nodes in theta of the posterior in use. For one class against the rest this and the weights
        are lists, with an entry a class.
    hyper_weights_ : ndarray of shape (M,), or list of them
        Weights of the nodes, positive, with sum one.
    hyper_names_ : tuple of str
        Names of the T coordinates: "log_tau", or the log-Cholesky coordinates "log_cholesky_00",
        "cholesky_10" and so on; with a list of factors the number of the factor follows.
    n_skipped_ : int
        Messages that were left as they were because the tilted moments were no Gaussian, over all
        sweeps, that of the start included.
    n_cut_steps_ : int
        Sweeps whose step was shortened to keep the cavities proper.
    n_iter_ : int
        Number of iterations: an update of the messages and a sweep by the new ones; with several
        factors a step in the scales and the fit there. Integration over scales is one more.
    converged_ : bool
        Whether the residual fell below `tol`.
    stop_reason_ : {"converged", "max_iter", "stuck", "asked"}
        Why the fit ended: converged, out of iterations, no step left that keeps the cavities proper
        (that gains, for "laplace"), or asked to by a callback.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and "log_evidence", and "n_skipped" unless the engine is "laplace", of the state
        each iteration led to. With a list of factors "residual" is that of the rows at the scales
        of the iteration, and of the step in the scales for ``engine="messages"``. "phase" says what
        kind of iteration each was; "integration over theta" has the evidence of all nodes.
    n_features_in_ : int
        Number of columns of X, the group column included.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    See Also
    --------
    ConvexVariationalLogistic : Logistic regression without groups, for many columns.

    Notes
    -----
    A pass over n rows costs O(M n D^2 + M J q D^2) for M nodes in theta. These are 5 for one
    varying coefficient, 45 for two, and 2 T + 1 for more. Where the last log scale is known within
    0.1 they are 3 and 27. Local effects are eliminated group by group. A message has P (P + 3) / 2
    numbers.

    Few partitions of few groups may have no fixed point with proper cavities, so that steps shrink
    to nothing. After three such steps the group scales are found by nodes in theta for all
    partitions together, and `site_precision_` and `site_shift_` are equal shares.

    Where groups have a handful of rows and tau is above 4 or so, sites of single rows are wrong,
    and a fit over partitions warns. Without partitions groups of at most eight rows are integrated
    exactly, where only the intercept varies. All rows are then one site, whose message is that of
    the normal distribution with the moments of the posterior.

    The factor with most effects is eliminated group by group; coefficients and the effects of all
    others are one vector of S entries. A pass costs O(n (D + F)^2 + S p + S^3) for F factors and p
    pairs of a group with another level. A fit has 10 to 20 passes with a star, and some 100 with
    the grid of two scales. "messages" costs O(n (D + F)) a pass, 12 + D doubles a row, and a few
    linear systems that conjugate gradients solve in 5 to 20 steps whatever n. In partitions a step
    is two messages each way with a number for each level that has rows in the part, and a fit has
    500 to 800 messages. The state of rows stays with the part; a worker that has lost it is sent
    the steps so far again. Draws then make the same approximation as `latent_covariance`.

    `partition_`, `site_precision_`, `site_shift_`, `phi_mean_`, `phi_cov_`, `n_skipped_` and
    `n_cut_steps_` are of partitions: a fit to a list of factors, by messages or of several classes
    jointly has none. For one class against the rest those between have the class as first axis.

    References
    ----------
    .. [1] A. Gelman, A. Vehtari, P. Jylanki, C. Robert, N. Chopin and J. P. Cunningham,
       "Expectation propagation as a way of life", arXiv:1412.4869, first version, 2014,
       algorithm A.1 and sections 4 and 6.
    .. [2] A. Smola, S. V. N. Vishwanathan and E. Eskin, "Laplace propagation", NIPS 2004.
    .. [3] H. Rue, S. Martino and N. Chopin, "Approximate Bayesian inference for latent Gaussian
       models by using integrated nested Laplace approximations", JRSS B, 2009: grids in few scales
       along the axes of their posterior.

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
    >>> print(f"sd of the groups {clf.tau_[0]:.1f}, in truth 1.5")
    sd of the groups 1.9, in truth 1.5
    >>> clf.predict_proba([[0.5, 3], [0.5, 99]])[:, 1].round(1)  # a known and a new group
    array([0.4, 0.6])

    Persons who answer items, two crossed factors:

    >>> item = rng.integers(8, size=240)
    >>> rows = np.column_stack([X, item])
    >>> both = HierarchicalEPLogistic(group_column=[1, 2]).fit(rows, y)
    >>> print("sds of the effects:", both.tau_.round(1))
    sds of the effects: [1.9 0.2]
    """

    classes_: np.ndarray
    tau_: np.ndarray
    tau_interval_: np.ndarray
    group_labels_: Any
    group_effects_: Any
    group_effects_std_: Any

    def __init__(
        self,
        group_column: Any = None,
        *,
        random_slopes: Any = None,
        fit_intercept: bool = True,
        prior_scale: ArrayLike = 2.5,
        tau_prior: Any = (0.0, 1.5),
        n_partitions: int | str = "auto",
        engine: str = "auto",
        refine: bool = True,
        hyperparameters: str = "auto",
        schedule: str = "parallel",
        multi_class: str = "auto",
        power: float = 1.0,
        damping: float = 1.0,
        max_iter: int = 50,
        tol: float = 1e-3,
        warm_start: bool = False,
        n_jobs: int | None = None,
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.group_column = group_column
        self.random_slopes = random_slopes
        self.fit_intercept = fit_intercept
        self.prior_scale = prior_scale
        self.tau_prior = tau_prior
        self.n_partitions = n_partitions
        self.engine = engine
        self.refine = refine
        self.hyperparameters = hyperparameters
        self.schedule = schedule
        self.multi_class = multi_class
        self.power = power
        self.damping = damping
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    @fitting.fit_method
    @with_callbacks
    def fit(
        self,
        X: TrainingRows,
        y: ArrayLike | None = None,
        groups: Labels = None,
        sample_weight: ArrayLike | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fit the classifier.

        Parameters
        ----------
        X : array-like of shape (n, d), or list of partitions
            Training rows. A list of partitions has for each the pair (X, y), with sample weights as
            a third entry if any, as arrays or memory maps; or a function without arguments that
            returns it; or a dask future of it. Groups are then a column of X, and no group may be
            in two partitions; with a list of factors, which are fitted by ``engine="messages"``,
            any level may be. A dask data frame or array is computed; what does not fit into memory
            is a list of partitions.
        y : array-like of shape (n,), default=None
            Class labels; None only for a list of partitions.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X. Any hashable values; a row whose label
            is missing is a group of its own, without a name. An array or data frame of several
            columns has a factor in each, as a list in `group_column` has.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row: an integer weight equals repeating the row, zero leaves it out.
        checkpoint : str or path, default=None
            File to which the messages are written after each sweep, and from which the fit goes on
            if the file exists. It has to belong to the same data and model. With a list of factors
            it has the scales, and sites or values of levels, after each step in the scales.

        Returns
        -------
        self : HierarchicalEPLogistic
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number, or
            if labels of groups are not hashable.
        ValueError
            If a parameter, the data, the groups, the weights or the checkpoint are not usable: of
            engines that draw, for instance, with a list of factors. The estimator is then as it was
            before.
        ImportError
            If ``engine="nuts"`` and nutpie is not installed.
        """
        _plan.check_parameters(self)
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        raw = y is None and isinstance(X, list | tuple)
        if raw and (groups is not None or sample_weight is not None):
            raise ValueError("give groups and sample_weight inside the partitions of a list.")
        has_groups = self.group_column is not None or groups is not None
        self._warn(_plan.remarks_on_parameters(self, has_groups))
        previous = getattr(self, "_state", None) if self.warm_start else None
        data: Any
        with np.errstate(over="raise", invalid="raise"), self._pool(X, raw) as run:
            if raw:
                plan, data = _plan.plan_parts(self, run, checkpoint is not None), (None, None)
            else:
                given = X, y, groups, sample_weight, previous, checkpoint is not None
                plan, data = _plan.plan_rows(self, *given), (X, y)
            fits = fit_plan(self, plan, run, data, previous, checkpoint)
            store_fit(self, plan, fits)
        if not self.converged_:
            fitting.warn_not_converged(self, remarks=fitting.remarks_of(fits))
        self._warn(self._remarks)
        return self

    def _warn(self, remarks):
        """Warn of each remark, in the name of whoever called `fit`."""
        for remark in remarks:
            warnings.warn(f"{type(self).__name__}: {remark}", UserWarning, stacklevel=3)

    def _pool(self, X, raw):
        """Return the pool over a list of raw partitions, None for rows in memory."""
        if not raw:
            return nullcontext()
        check_parts(X)
        # a step of messages takes too little time for processes; sites of parts take enough
        by_messages = self.engine == "messages" or isinstance(self.group_column, list)
        prefer = "threads" if by_messages else None
        return PartMap(list(X), self.n_jobs, self.schedule == "asynchronous", prefer)

    @property
    def _latents(self):
        """What predicts from the posteriors."""
        return latents_of(self._posteriors, links_of(self._posteriors))

    def latent_mean_and_variance(
        self, X: RowsLike, groups: Labels = None, kind: str = "conditional"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and variance of the linear predictor at new rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X. Unseen and missing labels are new
            groups, whose effect is integrated over the population.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        mean, variance : ndarray of shape (n,), or (n, n_classes) for more than two classes
            On the scale of log odds.
        """
        rows = _prediction.new_rows(self, X, groups, kind)
        return _prediction.in_blocks(self._latents.mean_and_variance, rows)

    def latent_covariance(
        self,
        X1: RowsLike,
        X2: RowsLike | None = None,
        groups1: Labels = None,
        groups2: Labels = None,
    ) -> np.ndarray:
        """Posterior covariance of the linear predictor between new rows.

        Parameters
        ----------
        X1 : array-like of shape (n1, d)
            Rows.
        X2 : array-like of shape (n2, d), default=None
            Rows; None stands for X1.
        groups1, groups2 : array-like of shape (n1,) and (n2,), or (n1, F) and (n2, F), default=None
            Group labels, where they are not a column of X. Rows with one unseen label share its
            effect; rows without label do not.

        Returns
        -------
        covariance : ndarray of shape (n1, n2), or (n_classes, n1, n2)
            One matrix a class for more than two classes.
        """
        pairs = _prediction.row_pairs(self, X1, X2, groups1, groups2)
        return fitting.one_or_stack([p.covariance(*pairs) for p in self._posteriors])

    def decision_function(
        self, X: RowsLike, groups: Labels = None, kind: str = "conditional"
    ) -> np.ndarray:
        """Posterior mean of the linear predictor.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        mean : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Log odds; positive where the second class is favoured.
        """
        return self.latent_mean_and_variance(X, groups, kind)[0]

    def latent_links(self, observed: bool = False) -> list[Any]:
        """Link between latent function and label, as the predictions use it.

        Parameters
        ----------
        observed : bool, default=False
            The link to the labels that `fit` receives: here the same.

        Returns
        -------
        links : list of Factor
            The logit, for two classes once, otherwise once a class. ``log_prob(1, f)`` is the log
            probability of the second class (of this class) at a latent value f.
            ``tilted(1, mean, variance)`` has the log of its average over a normal latent value. For
            several classes jointly these are binary approximations of the softmax; probabilities do
            not come from them.
        """
        check_is_fitted(self)
        return links_of(self._posteriors)

    def predict_log_proba(
        self, X: RowsLike, groups: Labels = None, kind: str = "conditional"
    ) -> np.ndarray:
        """Log probabilities of the classes, computed in logs throughout.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        log_proba : ndarray of shape (n, n_classes)
            Columns in the order of `classes_`.
        """
        rows = _prediction.new_rows(self, X, groups, kind)
        return _prediction.in_blocks(self._latents.log_proba, rows)

    def predict_proba(
        self, X: RowsLike, groups: Labels = None, kind: str = "conditional"
    ) -> np.ndarray:
        """Probabilities of the classes, averaged over the posterior of coefficients and effects.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,) or (n, F), default=None
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

    def predict_proba_interval(
        self, X: RowsLike, level: float = 0.9, groups: Labels = None, kind: str = "conditional"
    ) -> np.ndarray:
        """Intervals of the class probabilities: what coefficients and effects leave open of them.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        level : float, default=0.9
            Probability in (0, 1) that an interval covers the probability of its class.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X. The interval of an unseen label is as
            wide as the population of groups.
        kind : {"conditional", "population"}, default="conditional"
            "population" takes every row as one of a new group.

        Returns
        -------
        interval : ndarray of shape (n, 2), or (n, n_classes, 2) for more than two classes
            Lower and upper end, of two classes for the second one: quantiles of the posterior.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        check_number("level", level, 0, 1, boundaries="neither")
        rows = _prediction.new_rows(self, X, groups, kind)
        return _prediction.in_blocks(self._latents.proba_interval, rows, level)

    def predict(self, X: RowsLike, groups: Labels = None, kind: str = "conditional") -> np.ndarray:
        """Most probable class.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        groups : array-like of shape (n,) or (n, F), default=None
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

    def score(
        self,
        X: RowsLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        groups: Labels = None,
    ) -> float:
        """Accuracy of `predict`.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        y : array-like of shape (n,)
            True classes.
        sample_weight : array-like of shape (n,), default=None
            Weights of the rows.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X.

        Returns
        -------
        score : float
            Share of rows, by weight, whose class is predicted.
        """
        return accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight)

    def sample_proba(
        self, X: RowsLike, n_samples: int = 10, random_state: Seed = None, groups: Labels = None
    ) -> np.ndarray:
        """Draw class probabilities from the posterior: a committee of models.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Rows to predict.
        n_samples : int, default=10
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.
        groups : array-like of shape (n,) or (n, F), default=None
            Group labels, where they are not a column of X.

        Returns
        -------
        proba : ndarray of shape (n_samples, n, n_classes)
            Coefficients and group effects of one draw are the same for all rows.

        Raises
        ------
        ValueError
            If `n_samples` is less than one.
        """
        rows = _prediction.new_rows(self, X, groups)
        rng = _generator(checked_draws(self, n_samples, random_state))
        return self._latents.committee(rows, n_samples, rng)

    def sample_posterior(self, n_samples: int = 1, random_state: Seed = None) -> Bunch:
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
            (n_samples, J, q): entry s of each is part of one draw of the whole posterior. With a
            list of factors group_effects is a list. With more than two classes each array has the
            class as its second axis, but for tau of a joint model, whose classes share it.
            ``engine="messages"`` solves a linear system a draw.

        Raises
        ------
        ValueError
            If `n_samples` is less than one.
        """
        rng = _generator(checked_draws(self, n_samples, random_state))
        draws = []
        for posterior in self._posteriors:
            beta, effects, theta, _ = posterior.draw_parameters(n_samples, rng)
            effects = effects or [np.empty((n_samples, 0, 0))]
            coef, intercept = split_intercept(beta, self._columns)
            draws.append((coef, intercept, _scales.scales(theta, posterior.n_effects), effects))
        arrays = (fitting.one_or_stack(a, axis=1) for a in zip(*draws, strict=True))
        coef, intercept, tau, effects = arrays
        effects = effects if self._columns.listed else effects[0]
        return Bunch(coef=coef, intercept=intercept, tau=tau, group_effects=effects)

    _coefficients = _tables.coefficients
    _figures = _tables.figures_of
    _names = _tables.names_of_shared

    def _summarise(self, level, top, sort, feature_names):
        found = super()._summarise(level, top, sort, feature_names)
        return replace(found, scales=_tables.scales_of(self, self._names(feature_names), level))

    def group_effects_frame(self, level: float = 0.9) -> Any:
        """Effects of all groups as a table, one row an effect.

        Parameters
        ----------
        level : float, default=0.9
            Posterior probability of the intervals, in (0, 1).

        Returns
        -------
        frame : pandas.DataFrame, or dict of str to ndarray without pandas
            Columns factor, level, effect, mean, sd, lower, upper and rows. effect is "intercept" or
            the column whose slope varies; rows counts the training rows of the level.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        return _tables.effects_frame(self, level)

    def _log_weights(self, rows, n_draws, rng):
        """Weigh joint draws of coefficients and all group effects, both given theta, O(S n d)."""
        remarks = [f"Note: {remark}" for remark in self._remarks]
        if self.tau_.size:
            remarks.append(f"Scales: {_tables.what_was_averaged(self)}.")
        if getattr(self, "n_skipped_", 0):  # partitions exchange messages that may be skipped
            remarks.append(
                f"{self.n_skipped_} messages were left as they were, because the tilted moments "
                "were no Gaussian."
            )
        if self.engine_ == "messages":
            names = [f.name for f in self._columns.factors]
            return None, remarks + remarks_on_agreement(self._posteriors[0].check, names)
        again, missing = _prediction.rows_again(self, rows)
        if missing or len(self._posteriors) > 1:
            return None, [*remarks, missing] if missing else remarks
        return self._posteriors[0].log_weights(*again, n_draws, _generator(rng)), remarks

    def _parts_of(self, rows, n_draws, rng):
        """Hold the tilted distribution of each part against the global Gaussian, O(200 S n)."""
        again, _ = _prediction.rows_again(self, rows)
        if again is None or len(self._posteriors) > 1 or "site_precision" not in self._state:
            return ()
        return trust_in_parts(self, again, n_draws, _generator(rng))

    def get_state(self) -> dict[str, Any]:
        """Return all that is needed to go on after a crash.

        Returns
        -------
        state : dict of str to ndarray
            Messages of the sites, prior and partition, or without partitions the scales and the
            sites there; plain arrays for `numpy.savez`, which load without pickle.
        """
        check_is_fitted(self)
        return {name: np.array(value) for name, value in self._state.items()}

    def set_state(self, state: Any) -> Self:
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
        self._state = checked_state(state)
        return self


def _generator(rng):
    """Return a Generator seeded by a RandomState."""
    return np.random.default_rng(rng.randint(2**31))
