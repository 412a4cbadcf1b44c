"""Sparse linear regression with spike-and-slab priors by convergent expectation propagation."""

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from .._estimator.annotations import RowsLike, Seed, TrainingRows
from .._estimator.base import VersionedEstimator
from .._estimator.checks import check_number, in_precision_of_rows, is_single
from .._estimator.compat import CallbackSupportMixin, with_callbacks
from .._estimator.fitting import FitMonitor, fit_method, warn_not_converged
from .._estimator.summary import CoefficientReport, column_names
from ._fit import chain_attributes, ep_attributes, keep, state_attributes, warn_not_mixed
from ._plan import make_plan, statistics_of_products
from ._support import CredibleSets, FeatureSupport, find_sets


class SpikeSlabRegressor(
    FeatureSupport, CoefficientReport, CallbackSupportMixin, RegressorMixin, VersionedEstimator
):
    """Linear regression in which each coefficient is zero with positive probability.

    y = X w + intercept + noise; w_i is zero with probability 1 - `prior_inclusion` and normal with
    variance `slab_variance` otherwise. The posterior is approximated by expectation propagation,
    with a method that always converges. Where columns are correlated, Markov chains draw models
    instead. Hyperparameters that are not given are averaged over, or learned from the evidence.

    **You will set** `noise_variance`, `slab_variance`, `prior_inclusion`, `hyperparameters` and
    `n_init`. Leave the other parameters at their defaults.

    Parameters
    ----------
    noise_variance : float or "auto", default="auto"
        Variance of the noise; "auto" averages over it or learns it.
    slab_variance : float or "auto", default="auto"
        Variance of a coefficient that is not zero, on the scale of the standardised columns; "auto"
        averages over it or learns it.
    prior_inclusion : float or "auto", default="auto"
        Prior probability in (0, 1) that a coefficient (a group with `groups`) is not zero; "auto"
        averages over it or learns it.
    hyperparameters : {"auto", "integrate", "mode"}, default="auto"
        How the three above are treated where they are not given. "integrate" averages over them, by
        a grid of some 20 to 35 fits [3]_. Where columns are more than rows and the posterior of the
        three is near normal, it is a star of about ten. Priors do not depend on units. The log
        noise variance is flat. The ratio r of slab variance (times the mean square of the columns)
        to noise variance is hyper-g/n, (1 + r)^(-3/2) / 2 [4]_. The inclusion is Beta(1, sqrt(d)),
        so that about sqrt(d) columns are expected. "mode" takes the values of largest evidence,
        with a uniform prior for the inclusion. It is faster by a factor of 1 to 3, up to 8 where EP
        hardly finds fixed points, but too sure: a third of the columns that it selects may be
        wrong.
        "auto" is "integrate" up to ten million entries of X, rows beyond d + 1 not counted, and
        "mode" beyond, since some 30 posteriors are held in memory.
    fit_intercept : bool, default=True
        Fit an intercept, with a flat prior, by centring.
    standardize : bool, default=True
        Divide columns by their standard deviation, so that one slab variance suits all of them.
        Coefficients are given back on the scale of X.
    algorithm : {"auto", "ep", "sequential", "convergent", "double_loop"}, default="auto"
        "ep" is damped parallel EP with positive sites. "convergent" lowers the EP energy at every
        step, by Newton's method. "auto" begins with EP at decreasing noise, which finds good fixed
        points, and ends with the descent where EP does not settle; for correlated columns it takes
        chains over models, or enumerates the models, see Notes. Two are published methods, for
        reference. "double_loop" is some twenty times slower. Its sites are kept positive, so that
        it ends beside the fixed points of EP where those have negative sites. "sequential" is "ep"
        that changes one coefficient after another, as in [1]_. On 40 of its sets both converge 25
        times, parallel sweeps in a quarter of the CPU time
        (``python doc/benchmarks/papers.py --paper spike_slab --item "Section 4"``). A sequential
        sweep costs O(n d^2), for d <= n O(d^3), and Python at every coefficient. Not with `groups`.
    damping : float, default=0.5
        Share of an EP update that is taken, in (0, 1]; undamped parallel EP oscillates here. Not
        for the steps of "convergent" and "double_loop".
    max_iter : int, default=200
        Largest number of iterations at fixed hyperparameters; "auto" needed far fewer on all
        published sets.
    tol : float, default=1e-4
        Largest change of a mean or standard deviation under an undamped sweep, in units of the slab
        standard deviation, at which a fit has converged.
    n_init : int, default=1
        Starts at the mode of the hyperparameters. The fixed point of largest evidence is kept. The
        others are used by ``predict(X, mixture=True)``.
    noise_starts : sequence of float, default=(0.3, 0.01, 0.001)
        Shares of the variance of y at which the search for the noise variance begins. The small
        ones find almost noise-free signals, which the large one alone may take for noise.
    copy_X : bool, default=True
        Without effect since 0.3: X is never overwritten, and one working copy is made.
    warm_start : bool, default=False
        Begin with sites and hyperparameters of the last fit if the number of columns is the same.
    n_jobs : int or None, default=None
        Workers for the starts of `n_init`, for the nodes of the integration, and for partitions.
        Answers do not depend on it.
    random_state : int, RandomState instance or None, default=None
        Seed of the random starts of `n_init` (the fourth and later ones), of the single models that
        check the evidence, and of chains. With None models are drawn by the same seed in every fit.
    verbose : int, default=0
        1 prints a line for each iteration, and for each phase of learning or integration before or
        after them, with the seconds since the fit began; 2 for each step of a phase as well.

    Attributes
    ----------
    coef_ : ndarray of shape (d,)
        Posterior means of the coefficients.
    coef_std_ : ndarray of shape (d,)
        Posterior standard deviations.
    intercept_ : float
        Intercept.
    inclusion_proba_ : ndarray of shape (d,)
        Posterior probability that a coefficient is not zero, averaged over hyperparameters.
    expected_model_size_ : float
        Their sum.
    noise_variance_ : float
        Variance of the noise, given, learned or the posterior geometric mean.
    slab_variance_ : float
        Variance of a coefficient that is not zero, given, learned or the posterior geometric mean.
    prior_inclusion_ : float
        Prior probability that a coefficient is not zero, given, learned or the posterior mean.
    hyper_nodes_ : ndarray of shape (M, T)
        Hyperparameters of the M fits that are averaged, those that were not given, in units of y
        and standardised columns: logs and a logit. One row with "mode".
    hyper_weights_ : ndarray of shape (M,)
        Their posterior weights; they sum to one.
    hyper_names_ : tuple of str
        T of "log_noise_variance", "log_slab_variance" and "logit_prior_inclusion".
    hyperparameters_used_ : str
        "integrate" or "mode"; the latter where all is given, and where a callback ended the fit.
    log_evidence_ : float
        EP approximation of log p(y), of the integral over hyperparameters or at their mode; with an
        intercept up to the constant of its flat prior.
    fixed_point_log_evidences_ : ndarray of shape (n_fixed_points_,)
        Evidences of the different fixed points that `n_init` starts found at the mode of the
        hyperparameters, the largest first.
    n_fixed_points_ : int
        Their number.
    algorithm_used_ : str
        "ep", "convergent" or "double_loop": what ended the run; for correlated columns "chains" or
        "enumeration".
    search_used_ : str
        Where the search for the largest evidence began. "all" are all noise starts, up to 20,000
        entries of X. "best" is the best of them after a few coarse steps of EM, for larger X.
        "warm" is the last fit, and "none" means that nothing was to be learned.
    dense_start_used_ : bool
        Whether the fit comes from a dense start, because single models did not confirm the evidence
        of sparse ones; see Notes.
    site_precision_ : ndarray of shape (d,)
        Precisions of the EP sites, for coefficients of standardised columns, at the mode of the
        hyperparameters; may be negative. A fit by chains or enumeration has none.
    site_shift_ : ndarray of shape (d,)
        Precisions times means of the same sites.
    n_iter_ : int
        Iterations of the run that was kept, at the mode of the hyperparameters; integration over
        them is one more.
    converged_ : bool
        Whether the residual fell below `tol`; of chains, whether they agree within .05.
    stop_reason_ : str
        Why the run ended: "converged", "max_iter", "stuck" (the energy cannot be lowered) or
        "asked" (by a callback).
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" of an undamped sweep and "objective", the energy, whose value at a fixed point is
        minus the log evidence. It never rises with ``algorithm="convergent"``; with "auto" it
        belongs to the larger noise variances of the start at first. With "double_loop" residual and
        energy belong to its constrained problem. "fall" is the guaranteed decrease of each outer
        step, and "at_bound" the number of sites at their bounds. "phase" is the kind of each
        iteration. With chains an iteration is a round, and the residual the largest standard error
        of an inclusion.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    Notes
    -----
    With many columns in doubt EP overestimates the evidence, and a fit would be overconfident.
    Learning therefore compares the evidence with the sum over single models, drawn and searched
    for. If that falls short by more than 3 nats, learning starts again with half of all columns in,
    and keeps the fit that single models confirm more. On wide data with weak effects the result is
    then close to ridge regression, with all inclusion probabilities near `prior_inclusion_`. There
    is no such start with a given `prior_inclusion`. A chain over single models also looks for a
    sparse solution before the average is taken. Nodes that would outweigh the mode are checked in
    the same way; `diagnose` says how much evidence was subtracted.

    EP is inaccurate where columns are correlated. Suppose that a column related to the response has
    a correlation above .7 with another one, and above chance for so few rows. Then
    ``algorithm="auto"`` draws models by Markov chains, with coefficients and noise integrated out
    [5]_; up to 12 columns all models are enumerated. All results are then averages over these
    models. Rounds of 100 steps end when the share of models with a column has a standard error
    below .005 for every column, or at a limit of work. The limit is three times as large where an
    inclusion has an error above .01, and two columns then change at once in every step. The first
    third is thrown away. A ConvergenceWarning says when the error is above .05. The prior of r /
    (1 + r) is then uniform. The expected number of columns is log-uniform between one and m, and
    integrated. Given it, columns are in independently of each other. The number m of independent
    columns has the same sum of squared correlations, so that copies of columns change nothing.
    Models of more than 50 columns, if these are more than half of all, use EP, as `groups`,
    ``hyperparameters="mode"`` and other algorithms do. A step costs O(k^2 d) with k columns in,
    whatever n: 574 rows of 1,001 variants take one to two CPU seconds.

    An iteration costs O(d^3) for d <= n, besides O(n d^2) once, and O(n^2 d) for d > n. No d x d
    matrix is formed for d > n. A sparse X of up to 2 d rows is made dense, 8 n d bytes: its columns
    are centred, and every iteration works with all of them. Learning the hyperparameters takes some
    60 to 150 iterations where signals are clear, some hundreds where they are not. Integration
    takes up to 35 fits of 2 to 20 iterations each. Predictions and their memory then cost as much
    as those of `hyper_weights_.size` posteriors.

    Means, standard deviations, covariances and draws come from Gaussian posteriors. Intervals allow
    for coefficients that are zero: they are quantiles of a distribution that is zero with
    probability 1 - `inclusion_proba_` and normal otherwise, with the same mean and standard
    deviation. The interval of a column that is surely out is [0, 0]. `sample_posterior` has such
    draws, too.

    For d > n and little noise EP has several fixed points, and its evidence may be off by a few
    nats; `n_init` shows whether that is so.

    References
    ----------
    .. [1] J. M. Hernandez-Lobato and D. Hernandez-Lobato, "Convergent expectation propagation in
       linear models with spike-and-slab priors", arXiv:1112.2289, 2011.
    .. [2] M. Opper and O. Winther, "Expectation consistent approximate inference", JMLR 6, 2005.
    .. [3] H. Rue, S. Martino and N. Chopin, "Approximate Bayesian inference for latent Gaussian
       models by using integrated nested Laplace approximations", JRSS B 71, 2009, section 6.5.
    .. [4] F. Liang, R. Paulo, G. Molina, M. Clyde and J. Berger, "Mixtures of g priors for Bayesian
       variable selection", JASA 103, 2008.
    .. [5] G. Wang, A. Sarkar, P. Carbonetto and M. Stephens, "A simple new approach to variable
       selection in regression, with application to genetic fine mapping", JRSS B 82, 2020.

    Examples
    --------
    >>> from sklearn_ep import SpikeSlabRegressor
    >>> from sklearn_ep.datasets import make_spike_slab_regression
    >>> X, y, coef = make_spike_slab_regression(40, 100, n_informative=4, random_state=0)
    >>> reg = SpikeSlabRegressor().fit(X, y)
    >>> print(reg.get_support().nonzero()[0], coef.nonzero()[0])
    [14 30 46 77] [14 30 46 77]
    >>> mean, std = reg.predict(X, return_std=True)
    """

    _accept_sparse = "csr"
    noise_variance_: float

    def __init__(
        self,
        *,
        noise_variance: float | str = "auto",
        slab_variance: float | str = "auto",
        prior_inclusion: float | str = "auto",
        hyperparameters: str = "auto",
        fit_intercept: bool = True,
        standardize: bool = True,
        algorithm: str = "auto",
        damping: float = 0.5,
        max_iter: int = 200,
        tol: float = 1e-4,
        n_init: int = 1,
        noise_starts: Sequence[float] = (0.3, 0.01, 0.001),
        copy_X: bool = True,
        warm_start: bool = False,
        n_jobs: int | None = None,
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.noise_variance = noise_variance
        self.slab_variance = slab_variance
        self.prior_inclusion = prior_inclusion
        self.hyperparameters = hyperparameters
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.algorithm = algorithm
        self.damping = damping
        self.max_iter = max_iter
        self.tol = tol
        self.n_init = n_init
        self.noise_starts = noise_starts
        self.copy_X = copy_X
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    @fit_method
    @with_callbacks
    def fit(
        self,
        X: TrainingRows,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit the regression.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, d), or list of partitions
            Training rows. A sparse matrix of more than 2 d rows, of any integer or float type, is
            reduced to its products, 8 d^2 bytes; one of fewer rows is made dense, 8 n d bytes, for
            its centred columns are. A partition is a pair (X, y) of arrays, sparse rows or memory
            maps, a function without arguments that returns one, or a dask future of one; see Notes.
        y : array-like of shape (n,)
            Responses; None for a list of partitions.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row, not necessarily integers: an integer weight equals repeating the
            row, zero leaves it out.
        groups : array-like of shape (d,), default=None
            Labels of groups of columns that are in the model together or not at all.

        Returns
        -------
        self : SpikeSlabRegressor
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter or the data are not usable, or squares of X or y leave double precision;
            the estimator is then as it was before.

        Warns
        -----
        UserWarning
            If `damping` is set for an algorithm without sweeps of EP.

        Notes
        -----
        Rows in partitions are seen once: a part sends a triangular factor of (d + 1)^2 numbers, or
        its rows where they are fewer. The merged factor has min(n, d + 1) (d + 1) numbers. The
        answer equals that of rows in memory, to rounding. It is the same to the last bit for any
        number of workers.
        """
        plan = make_plan(self, X, y, sample_weight, groups)

        def attributes(state):
            return state() if callable(state) else state_attributes(plan.units, state)

        monitor = FitMonitor(self, X, y, self.max_iter, attributes)
        found = chain_attributes(plan, monitor) if plan.by_chains else None
        if found is None:
            found = ep_attributes(plan, monitor)
        keep(self, found, monitor, is_single(X))
        if not self.converged_:
            (warn_not_mixed if self.algorithm_used_ == "chains" else warn_not_converged)(self)
        return self

    def fit_statistics(
        self,
        XtX: ArrayLike,
        Xty: ArrayLike,
        yty: float,
        n_samples: int,
        X_mean: ArrayLike | None = None,
        y_mean: float = 0.0,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit to sums of products of rows that may not be shared.

        Parameters
        ----------
        XtX : array-like of shape (d, d)
            X'X of the rows.
        Xty : array-like of shape (d,)
            X'y.
        yty : float
            y'y.
        n_samples : int
            Number of rows.
        X_mean : array-like of shape (d,), default=None
            Means of the columns; None where columns and y were centred before the sums were taken.
        y_mean : float, default=0.0
            Mean of y.
        groups : array-like of shape (d,), default=None
            Labels of groups of columns that are in the model together or not at all.

        Returns
        -------
        self : SpikeSlabRegressor
            The fitted estimator, that of the rows to rounding: products keep half of the digits of
            columns far from zero, so that such columns are best centred first. O(d^3) besides the
            fit.

        Raises
        ------
        ValueError
            If sizes do not agree, a number is not finite, XtX is not symmetric, or there are no
            rows with these products and means.
        """
        products = statistics_of_products(XtX, Xty, yty, n_samples, X_mean, y_mean)
        return self.fit(products, groups=groups)

    @overload
    def predict(
        self, X: RowsLike, return_std: Literal[False] = ..., mixture: bool = ...
    ) -> np.ndarray: ...

    @overload
    def predict(
        self, X: RowsLike, return_std: Literal[True], mixture: bool = ...
    ) -> tuple[np.ndarray, np.ndarray]: ...

    @in_precision_of_rows
    def predict(self, X: RowsLike, return_std: bool = False, mixture: bool = False) -> Any:
        """Predict responses.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, d)
            Rows; sparse ones are made dense some 16 MB at a time.
        return_std : bool, default=False
            Give the standard deviation of a new response as well, the noise included.
        mixture : bool, default=False
            Average over the fixed points that `n_init` starts found as well, weighted by their
            evidences at the mode of the hyperparameters, instead of taking the one of largest
            evidence.

        Returns
        -------
        mean : ndarray of shape (n,)
            Predictive means.
        std : ndarray of shape (n,)
            Predictive standard deviations, only with `return_std`, by the law of total variance.
            O(n_train d) a row and node for d > n_train, O(d^2) otherwise.
        """
        X = self._check_new(X)
        posterior = self._posteriors[-1 if mixture else 0]
        mean, variance = posterior.predictive(X, return_std)
        return (mean, np.sqrt(variance)) if return_std else mean

    def predict_interval(self, X: RowsLike, level: float = 0.9) -> np.ndarray:
        """Central intervals of new responses, the noise included.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, d)
            Rows.
        level : float, default=0.9
            Probability in (0, 1) that an interval covers its response.

        Returns
        -------
        interval : ndarray of shape (n, 2)
            Lower and upper end in units of y. Mean and standard deviation are those of `predict`.
            The shape, which is not normal where columns are in doubt, comes from 1,000 draws with
            exact zeros, with an error of some percent of a standard deviation. The draws have a
            seed of their own: the same fit gives the same intervals. It costs `predict` with
            `return_std`, and these draws.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        X = self._check_new(X)
        check_number("level", level, 0, 1, boundaries="neither")
        return self._posteriors[0].predictive_interval(X, level)

    def _coefficients(self, level):
        """Return means, standard deviations and intervals, that of an intercept last."""
        posterior = self._posteriors[0]
        mean, std, interval = self.coef_, self.coef_std_, posterior.coef_interval(level)
        if posterior.units.fit_intercept:
            spread, ends = posterior.intercept(level)
            mean, std = np.append(mean, self.intercept_), np.append(std, spread)
            interval = np.vstack([interval, ends])
        return mean, std, interval

    def latent_covariance(self, X1: RowsLike, X2: RowsLike | None = None) -> np.ndarray:
        """Posterior covariance of the noise-free responses at rows.

        Parameters
        ----------
        X1 : array-like or CSR/CSC matrix of shape (n1, d)
            Rows; sparse ones are made dense, 8 n1 d bytes.
        X2 : array-like or CSR/CSC matrix of shape (n2, d), default=None
            Rows; None stands for X1.

        Returns
        -------
        covariance : ndarray of shape (n1, n2)
            The intercept's uncertainty included.
        """
        X1 = self._check_new(X1)
        X2 = X1 if X2 is None else self._check_new(X2)
        return self._posteriors[0].response_covariance(X1, X2)

    def credible_sets(
        self, level: float = 0.95, purity: float = 0.5, fdr: float | None = None
    ) -> CredibleSets:
        """Sets of correlated features of which at least one is in the model.

        Where features are correlated the data may say that one of five is in, and not which one. No
        single inclusion probability is large then, but the probability of the set is.

        Parameters
        ----------
        level : float, default=0.95
            Probability in (0, 1) of an effect near the most probable feature of a set, and of the
            set to hold one given that.
        purity : float, default=0.5
            Least absolute correlation, in [0, 1], of any two members.
        fdr : float or None, default=None
            Share in (0, 1) of sets without an effect that may be expected. The other features then
            make sets where an effect is near with less than `level`, but more probably than not. Of
            all sets the most probable ones are taken, as many as keep the mean of 1 - `probability`
            at most there.

        Returns
        -------
        sets : CredibleSets
            The smallest sets that joint draws of the features allow, each feature in one set at
            most, the set of the most probable feature first. ``len(sets)`` counts them, iterating
            gives the columns of each; `members`, `inclusion`, `correlation`, `probability` and
            `names` tell of them, ``to_frame()`` gives one row a member to pandas.

        Raises
        ------
        ValueError
            If `level`, `purity` or `fdr` are out of range.

        Notes
        -----
        After the sets of Wang et al. (2020), whose effects have one set each. As there the level is
        that of a set given an effect: a set holds a share `level` of the probability that any of
        the features correlated with its most probable one is in. `probability` is that of an effect
        in the set, and may be a little below `level`. It is that of the posterior, as sets are
        built from draws of the model. Where a fit is by EP there are 1,000 draws of its own seed,
        as costly as ``sample_posterior(1000, exact_zeros=True)``.
        """
        check_is_fitted(self)
        check_number("level", level, 0, 1, boundaries="neither")
        check_number("purity", purity, 0, 1)
        check_number("fdr", fdr, 0, 1, boundaries="neither", optional=True)
        names = np.array(column_names(self), dtype=object)
        candidates = self._posteriors[0].candidates()
        return find_sets(candidates, self.inclusion_proba_, names, level, purity, fdr)
