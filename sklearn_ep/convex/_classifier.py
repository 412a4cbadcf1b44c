"""Bayesian logistic regression by convex variational inference."""

import copy
import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.metaestimators import available_if

from .._engine.class_sites import class_log_weights
from .._engine.diagnostics import weight_space_log_weights
from .._engine.partition import PartMap
from .._engine.sites import Sites
from .._estimator import checks, fitting
from .._estimator.annotations import RowsLike, Seed, TrainingRows
from .._estimator.averaged import average_remarks
from .._estimator.compat import with_callbacks
from .._estimator.posterior_classifier import PosteriorClassifier
from .._estimator.row_parts import array_parts
from .._estimator.summary import CoefficientReport
from . import _parameters
from ._joint import JointWeightPosterior, fit_joint, joint_problem
from ._problem import fit_exact, fit_parted, fit_sampled, make_parted, make_problem
from ._sites import LogisticSites
from ._stream import plan_stream


def _may_stream(self):
    """Whether the prior can be carried from batch to batch: it has to be Gaussian."""
    if self.prior != "gaussian":
        raise AttributeError("partial_fit needs prior='gaussian'.")
    return True


class ConvexVariationalLogistic(CoefficientReport, PosteriorClassifier):
    """Bayesian logistic regression with posterior variances, at the scale of point estimates.

    The posterior of the coefficients is approximated by a Gaussian that maximises a convex lower
    bound of the log evidence. An outer loop updates the marginal variances of the rows; inside,
    Newton's method solves a penalised logistic regression.

    **You will set** `prior_variance`, `prior`, `calibration`, `multi_class` and `class_weight`.
    Leave the other parameters at their defaults.

    Parameters
    ----------
    prior_variance : "learn", float or array-like of shape (n_features,), default="learn"
        Variance of the Gaussian prior of each coefficient, as `C` in `LogisticRegression`. "learn"
        learns one variance for all columns from the evidence. Numbers are kept. With bound="local",
        and in a stream without a `fit` before it, "learn" is a variance of 1.
    calibration : {"loo", None}, default="loo"
        "loo" scales mean and variance of the linear predictor by `slope_` and `temper_`, chosen so
        that rows are predicted best from the others (see Notes). It matters where one prior
        variance for all columns is wrong: on text it lowers the log loss by a third. Coefficients
        are not scaled. None leaves predictions as the posterior has them. Not available for
        streams.
    hyperparameters : {"auto", "integrate", "mode"}, default="auto"
        How a learned scale of the prior is treated. "integrate" averages over it (see Notes).
        Intervals of coefficients then have their level; at the mode they are too narrow with few
        rows. "mode" takes the value with the largest evidence, times its prior for several classes
        jointly and with sampled variances (see Notes). "auto" integrates where variances are exact.
        It takes the mode with sampled variances, for several classes jointly, for partitions and
        for streams.
        `hyperparameters_used_` says which it was.
    bound : {"kl", "local"}, default="kl"
        "kl" is the Kullback-Leibler bound of a Gaussian posterior. "local" is the published
        quadratic bound [1]_: it understates posterior standard deviations by 5 to 50 %, also with
        much data.
    prior : {"gaussian", "laplace"} or SuperGaussianSite, default="gaussian"
        Prior of the coefficients, a name or an instance of a class of `sklearn_ep.sites`, which has
        its own bound. The intercept always has a Gaussian prior.
    laplace_scale : float or "learn", default=1.0
        b of the Laplace prior exp(-|u| / b) / (2 b), used with prior="laplace"; "learn" maximises
        the bound.
    learn_prior : bool, default=False
        Learn a common factor of the numbers in `prior_variance`, or the scale of a `prior` from
        `sklearn_ep.sites`. Not needed with prior_variance="learn". Refused with bound="local",
        which shrinks far too much.
    prior_groups : array-like of shape (n_features,), default=None
        Labels of groups of columns. Each group learns a factor of its own, which maximises the
        bound. Averages are over a common factor of all groups, with proportions at the mode.
        `log_evidence_` takes the proportions as known. Integrated under a half-Cauchy prior for
        each of two groups it would be .5 nats lower where both matter, and 1.4 to 1.7 lower where
        one does not. Gaussian prior only.
    fit_intercept : bool, default=True
        Add an intercept.
    intercept_prior_variance : float, default=100.0
        Variance of the Gaussian prior of the intercept: wide, but finite, so that separable data
        keep finite estimates. `np.inf` makes it flat; the evidence is then nan.
    variance : {"auto", "exact", "calibrated", "monte_carlo", "lanczos"}, default="auto"
        Marginal variances of the rows. "exact" factorises a matrix of the smaller side of X at
        every step. "calibrated" takes the shape of the variances from the diagonal of the posterior
        precision and their level from a few samples. On six sets of 600 rows and 3000 sparse
        columns variances of new rows are within 8 % of exact ones. A training row that is predicted
        counts as a new one, and its variance is 1.5 to 6 times too large; `latent_covariance`,
        which solves for its rows, is right for both (``pytest tests -k variances_are_those``).
        "monte_carlo" is the mean square of the samples alone, with a relative error of
        sqrt(2 / n_variance_samples). "lanczos" is the
        published choice, kept for comparison. It finds the directions of least variance first. On
        text and other data with many columns it keeps a few per cent of the variance, so that the
        fit becomes the posterior mode. "auto" takes "exact" for dense X up to 4000 rows or columns
        (columns for a Laplace prior), "calibrated" beyond. For sparse X it takes the cheaper of the
        two by a formula of rows, columns and entries. Texts of 20,000 words have "exact" up to some
        400 rows, or with a given scale of the prior up to some 800. Log losses of both are .0016
        apart in the mean of 24 fits.
    n_variance_samples : int, default=8
        Samples of "monte_carlo", and systems solved for "calibrated", which takes two a draw; 16 if
        columns are strongly correlated. "lanczos" takes 16 steps for each.
    n_evidence_probes : int, default=8
        Random probes of the log determinant in `log_evidence_` where variances are sampled, at
        least 2 for its standard error; each costs some 24 products with X. 0 saves them, and the
        evidence is nan. Whatever is learned does not depend on them.
    solver : {"auto", "primal", "dual", "cg"}, default="auto"
        How systems are solved with exact variances: by a Cholesky factor of a matrix of the columns
        or of the rows. "auto" and "cg" take the cheaper one: that of the rows where columns
        are more than rows, for dense X from .7 of them on (for a Laplace prior that of the
        columns). Sampled variances always go with conjugate gradients. With an infinite
        `intercept_prior_variance` there is no "dual".
    damping : float, default=1.0
        Share of an outer step that is taken, in (0, 1]. 1 is undamped. A step that lowers the bound
        and leads away from the fixed point is halved.
    max_iter : int, default=20
        Largest number of outer steps; three to ten are usual. The cheaper steps of exact fits on
        partitions may be three times as many, and so may those that learn a scale from sampled
        variances.
    tol : float, default=1e-3
        Outer steps stop when no log variance changes by more, which moves probabilities by less
        than 1e-3. With sampled variances the mean square change is compared, the scale of their
        own errors.
    inner_tol : float, default=1e-4
        Relative gradient at which Newton's method stops. With calibrated variances, whose errors
        are larger, ten times this is used. With exact variances convergence is quadratic, and the
        square is used.
    max_inner_iter : int, default=50
        Largest number of Newton steps in one outer step; one to five are usual.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, as in `LogisticRegression`. Not used by `partial_fit`.
    multi_class : {"auto", "joint", "one_vs_rest"}, default="auto"
        How more than two classes are fitted. "joint" is the softmax with one posterior of the
        coefficients of all classes, by expectation propagation, for a Gaussian prior. All variances
        are exact. By a matrix of the coefficients a sweep costs O(n d^2 K^2 + (K d)^3), by matrices
        of the rows O(K n^3); the cheaper is taken. Beyond 1e10 multiplications a sweep means come
        from conjugate gradients, O(K nnz) a product. Variances are then those of each class by
        itself, O(K (n d^2 + d^3)) up to some 900 columns and beyond by a diagonal, and samples
        calibrate them. So it is for sparse X beyond 4000 coefficients, and with
        variance="calibrated". Of ten classes up to some 650 rows are exact whatever the columns, of
        three some 900. `condition_on` takes exact variances of at most 4000 coefficients.
        "one_vs_rest" fits one problem for each class and normalises. "auto" is joint without
        partitions and without another `variance` or `solver`, up to 2**25 rows times squared
        classes (256 MB a matrix). Beyond it warns and is one_vs_rest.
    forgetting : float, default=1.0
        Share in (0, 1] that the rows of earlier batches keep at each call of `partial_fit`, for
        streams that drift; 1 forgets nothing. Compare values by `log_evidence_`.
    stream_rank : int or None, default=None
        How `partial_fit` keeps the posterior precision: as a matrix (None, up to 2000
        coefficients), or as a diagonal and a matrix of this rank. A diagonal, 0, loses little log
        loss, but two thirds of a coefficient's standard deviation where columns are correlated.
    n_partitions : int or None, default=None
        Fit arrays in so many blocks of consecutive rows, as if they were given as a list of
        partitions; None fits them as they are.
    warm_start : bool, default=False
        Start from the last fit: with exact variances and rows in memory if the columns are as many,
        so that rows may come or go, otherwise if the shapes agree. Where the sizes of the columns
        differ by more than a factor of ten the fit starts anew.
    n_jobs : int or None, default=None
        One-versus-rest problems, or partitions, fitted at a time; None is one. Partitions are
        worked on by threads unless a `joblib.parallel_config` says otherwise. Never changes the
        result.
    random_state : int, RandomState instance or None, default=None
        Seed of the samples behind sampled variances, drawn once a fit.
    verbose : int, default=0
        1 prints a line for each iteration, and for each phase of learning or integration before or
        after them, with the seconds since the fit began; 2 for each step of a phase as well.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    coef_ : ndarray of shape (1, n_features) or (n_classes, n_features)
        Posterior means of the coefficients.
    intercept_ : ndarray of shape (1,) or (n_classes,)
        Posterior mean of the intercept, 0 without one.
    coef_std_ : ndarray of the shape of `coef_`
        Posterior standard deviations of the coefficients.
    prior_variance_ : float, ndarray of shape (n_features,) or (n_classes, ...)
        Prior variances used: given or learned, for an average exp of the mean of their logs; 2 b^2
        for a Laplace prior.
    laplace_scale_ : float or ndarray of shape (n_classes,)
        Scale b, only with prior="laplace".
    slope_ : float or ndarray of shape (n_classes,)
        Scale of the mean of the linear predictor, by the calibration; 1 without one. Not for
        streams.
    temper_ : float or ndarray of shape (n_classes,)
        Scale of its variance: a posterior N(m, v) predicts as N(`slope_` m, `slope_`^2 `temper_`
        v). Not for streams.
    loo_mean_ : ndarray of shape (n,) or (n_classes, n)
        Mean of the predictor of each training row given the labels of the others, before the
        calibration. nan for rows of weight zero, and where a sampled variance leaves no proper one.
        For rows in memory only; so are the two that follow.
    loo_variance_ : ndarray of shape (n,) or (n_classes, n)
        Variance of the same.
    loo_proba_ : ndarray of shape (n,) or (n_classes, n)
        Probability of each training row's own label given the others, after the calibration, to
        1e-6 from 10,000 rows on; (n,) for several classes jointly. Copies of a row in memory go
        with it.
    hyper_nodes_ : ndarray of shape (M, T), or list of such
        The log prior variance at each node of the average (of several variances the mean log), or
        the log scale of another prior; one node at the mode, without a column where nothing was
        learned (T = 0). A list for several one-versus-rest problems.
    hyper_weights_ : ndarray of shape (M,), or list of such
        Weights of the nodes; they sum to one.
    hyper_names_ : tuple of str
        ("log_prior_variance",), or "log_laplace_scale" or "log_prior_scale"; empty for T = 0.
    hyperparameters_used_ : str
        "integrate" if there are several nodes, else "mode".
    log_evidence_ : float
        Lower bound on log p(y), summed over one-versus-rest problems, and over the batches of a
        stream, each given those before it. Where a Gaussian prior variance is averaged over it is
        no bound, but the integral of the evidence of expectation propagation (see Notes). nan where
        the intercept is flat, or on request (n_evidence_probes=0).
    stream_log_score_ : ndarray of shape (n_batches,)
        Mean log probability of the labels of each batch of a stream, predicted before the batch was
        learned. A fall is a sign of drift, see `forgetting`. `fit` removes it.
    log_evidence_std_ : float
        Standard error of `log_evidence_` by the random probes of a log determinant, 0 with exact
        variances. The same `random_state` makes differences between priors surer than this.
    effective_dof_ : float or ndarray of shape (n_classes,)
        Effective number of parameters, the sum of site precisions times marginal variances.
    site_precision_ : ndarray of shape (n,) or (n_classes, n)
        Precision that each training row adds along its predictor, all copies together, at the
        heaviest node. In a joint posterior precisions p of the classes add diag(p) - p p' / sum(p).
        For rows in memory only.
    marginal_variance_ : ndarray of shape (n,) or (n_classes, n)
        Posterior variance of the predictor of each training row, nan for rows of weight zero. For
        rows in memory only.
    multi_class_ : str
        "joint" if all classes share a posterior, else "one_vs_rest", as for two classes.
    variance_method_ : str
        What ran: "exact", "calibrated", "monte_carlo" or "lanczos".
    solver_ : str
        What solved Newton's systems: "primal", "dual" or "cg".
    n_mvm_ : int
        Products of a vector with X, its transpose, or the matrix of its squares.
    n_newton_iter_ : int
        Newton steps over all outer steps.
    n_passes_ : int
        Visits to the partitions, 0 for rows in memory, visits of the calibration included.
    n_iter_ : int
        Outer steps, and one for an integration over the scale of the prior; of several classes the
        largest number.
    converged_ : bool
        Whether the outer loop reached `tol`.
    stop_reason_ : str
        Why the fit ended: "converged", "max_iter", "stuck" (no shorter step leads to a proper
        posterior) or "asked" (by a callback); of several classes the worst one.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and, with exact variances, "objective", the bound on the log evidence. They are
        those of the search for the mode of the scale. Where no scale is learned the bound does not
        fall, up to rounding. "phase" is the kind of each iteration; an integration has the figures
        of the run at the mode.
    n_features_in_ : int
        Number of columns seen in fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, if X had string names.

    Notes
    -----
    Cost for n rows, d columns, k samples: exact variances O(n d^2) or O(n^2 d) an outer step, with
    memory for the smaller square matrix. Sampled ones take O(nnz k) an outer step and memory
    O(nnz + (n + d) k): some 150 to 600 products with X a fit, 600 to 2500 where a scale is learned.

    Rows in partitions: nothing per row is sent or kept by the process that calls `fit`. With exact
    variances, up to 4000 coefficients, a visit costs O(n d^2) and sends O(d^2) numbers a partition
    each way. A fit has 6 to 15 visits, or 7 to 50 where a scale is learned. With sampled ones a
    visit sends O(d) numbers, O(d k) in some. There are 40 to 130 visits, or 130 to 450 where a
    scale is learned. Draws and covariances then take features as independent given the intercept.
    The calibration adds 2 to 14 visits, in which two numbers go to a partition and seven come back.

    The average over hyperparameters is a grid of 4 to 8 fits in the log of the prior variance v
    [5]_. Their weights are evidence times a half-Cauchy prior (median 2.5) of the prior standard
    deviation of the predictor, sqrt(v sum_j var x_j), so that units do not matter. The evidence is
    that of expectation propagation at the optimum of the bound, since weights by the bound would
    favour small variances. For other priors it is the bound. The average takes 1.1 to 2.5 times the
    factorisations of the mode; memory and predictions cost as many times more as there are nodes.

    The calibration removes each row's site from the posterior, which leaves N(m_i, v_i) for its
    predictor [6]_. The scales a of the mean (`slope_`) and t of the variance (`temper_`) maximise
    sum_i log E sigma(y_i a s), s ~ N(m_i, t v_i), minus two penalties. These are (log a / .3)^2 /
    2, and (log t)^2 / 2 where t is above one. Below one, where predictions become surer than the
    posterior, the second is log(1 + (log t / .4)^2), Cauchy's prior. For an average the predictor
    without the row is a mixture with mean m, and a (m + sqrt(t) (s - m)) predicts. The calibration
    takes O(n) and some six integrals for each row and node.

    Averaging over the posterior gains most where rows are more than, or comparable to, columns.
    With many more columns than rows and one prior variance for all, it can cost log loss against
    the posterior mode; compare on held-out data. The Gaussian posterior understates standard
    deviations by up to 18 % where the posterior is skew (few rows, wide prior), and is rough for a
    Laplace prior. Student's t and other heavy-tailed sites have the local bound alone. Standard
    deviations may then be two thirds of the true ones and less, and means .2 standard deviations
    off: `diagnose` says so.

    References
    ----------
    .. [1] H. Nickisch and M. W. Seeger, "Convex variational Bayesian inference for large scale
       generalized linear models", ICML 2009, algorithm 1.
    .. [2] M. Opper and C. Archambeau, "The variational Gaussian approximation revisited", Neural
       Computation 21, 2009, equations 7 to 10.
    .. [3] G. Papandreou and A. Yuille, "Efficient variational inference in large-scale Bayesian
       compressed sensing", ICCV workshops, 2011.
    .. [4] D. J. C. MacKay, "Bayesian interpolation", Neural Computation 4, 1992.
    .. [5] H. Rue, S. Martino and N. Chopin, "Approximate Bayesian inference for latent Gaussian
       models", JRSS B 71, 2009, section 6.5.
    .. [6] M. Opper and O. Winther, "Gaussian processes for classification: mean-field algorithms",
       Neural Computation 12, 2000 (leave-one-out from cavities).

    Examples
    --------
    >>> from sklearn_ep import ConvexVariationalLogistic
    >>> from sklearn_ep.datasets import make_sparse_logistic
    >>> X, y, coef = make_sparse_logistic(200, 30, random_state=0)
    >>> clf = ConvexVariationalLogistic(prior_variance=4.0).fit(X, y)
    >>> print(clf.predict_proba(X[:2])[:, 1].round(1))
    [0.7 0.5]
    >>> print(clf.predict_proba_interval(X[:2]).round(1))
    [[0.3 0.9]
     [0.2 0.8]]
    """

    _accept_sparse = "csr"
    prior_variance_: Any
    slope_: float
    temper_: float

    def __init__(
        self,
        prior_variance: ArrayLike = "learn",
        *,
        calibration: str | None = "loo",
        hyperparameters: str = "auto",
        bound: str = "kl",
        prior: Any = "gaussian",
        laplace_scale: float | str = 1.0,
        learn_prior: bool = False,
        prior_groups: ArrayLike | None = None,
        fit_intercept: bool = True,
        intercept_prior_variance: float = 100.0,
        variance: str = "auto",
        n_variance_samples: int = 8,
        n_evidence_probes: int = 8,
        solver: str = "auto",
        damping: float = 1.0,
        max_iter: int = 20,
        tol: float = 1e-3,
        inner_tol: float = 1e-4,
        max_inner_iter: int = 50,
        class_weight: dict[Any, float] | str | None = None,
        multi_class: str = "auto",
        forgetting: float = 1.0,
        stream_rank: int | None = None,
        n_partitions: int | None = None,
        warm_start: bool = False,
        n_jobs: int | None = None,
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.prior_variance = prior_variance
        self.calibration = calibration
        self.hyperparameters = hyperparameters
        self.bound = bound
        self.prior = prior
        self.laplace_scale = laplace_scale
        self.learn_prior = learn_prior
        self.prior_groups = prior_groups
        self.fit_intercept = fit_intercept
        self.intercept_prior_variance = intercept_prior_variance
        self.variance = variance
        self.n_variance_samples = n_variance_samples
        self.n_evidence_probes = n_evidence_probes
        self.solver = solver
        self.damping = damping
        self.max_iter = max_iter
        self.tol = tol
        self.inner_tol = inner_tol
        self.max_inner_iter = max_inner_iter
        self.class_weight = class_weight
        self.multi_class = multi_class
        self.forgetting = forgetting
        self.stream_rank = stream_rank
        self.n_partitions = n_partitions
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    @fitting.fit_method
    @with_callbacks
    def fit(
        self, X: TrainingRows, y: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Fit the classifier.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, n_features), or list of partitions
            Training rows; one prior variance for all suits columns of one scale. A partition is a
            pair (X, y) of arrays, sparse rows or memory maps, a function without arguments that
            returns one, or a dask future of one.
        y : array-like of shape (n,)
            Class labels; None for a list of partitions, in which more than two classes are fitted
            one against the rest.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row, not necessarily integers: an integer weight equals repeating the
            row, zero leaves it out.

        Returns
        -------
        self : ConvexVariationalLogistic
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter, the data or the weights are not usable, squares of X leave double
            precision, or parameters exclude each other. The estimator is then as it was before.
        """
        _parameters.check_parameters(self)
        if checks.is_unweighted_part_list(X, y, sample_weight):
            self._fit_parts(X, True, X, y)
        else:
            training = checks.validate_training(
                self, X, y, sample_weight, accept_sparse=self._accept_sparse
            )
            if self.n_partitions is not None:
                checks.refuse_joint(self, f"n_partitions={self.n_partitions}")
                self._fit_parts(array_parts(training, self.n_partitions), False, X, y)
            else:
                solver = _parameters.takes_joint(self, training.X, training.y)
                if solver:
                    problem, fit_one = joint_problem(self, training, solver), fit_joint
                else:
                    problem = make_problem(self, training)
                    fit_one = fit_exact if problem.variance == "exact" else fit_sampled
                data = training.y, problem.limits.max_iter, (X, y), bool(solver)
                fits = fitting.fit_problems(self, problem, fit_one, *data)
                _store_fit(self, problem, fits, training.kept)
        self._fitted_single = checks.is_single(X)
        if not self.converged_:
            fitting.warn_not_converged(
                self, "raise max_iter, lower prior_variance, or scale the columns"
            )
        return self

    def _fit_parts(self, parts, from_user, X, y):
        """Fit rows in partitions; callbacks are told X and y as the caller gave them."""
        with PartMap(parts, self.n_jobs, prefer="threads") as run:
            problem = make_parted(self, run, from_user)
            data = None, problem.limits.max_iter, (X, y)
            fits = fitting.fit_problems(self, problem, fit_parted, *data)
        _store_fit(self, problem, fits, None)

    @available_if(_may_stream)
    @fitting.fit_method
    def partial_fit(
        self,
        X: RowsLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Go on with further rows: the posterior so far is their prior.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, n_features)
            Rows of the batch, any number of them.
        y : array-like of shape (n,)
            Their labels; a batch may have one class only.
        classes : array-like of shape (n_classes,), default=None
            All labels of the stream, in the first call; None takes those of the first batch.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row.

        Returns
        -------
        self : ConvexVariationalLogistic
            The estimator after the batch. `log_evidence_` is the sum of the bounds of all batches,
            each given those before it.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter or the batch is not usable, a label is new, or there are more than 2,000
            coefficients and no `stream_rank`; the estimator is then as it was before.
        AttributeError
            If `prior` is not "gaussian": the method is then not there.

        Notes
        -----
        Goes on from the last `fit` too, of which, where variances were sampled, it takes means and
        variances of the coefficients alone; `fit` forgets all that was before. O(n d^2 + d^3) for
        up to 2,000 coefficients, of which the precision matrix is kept; O(n^3 + (nnz + d r) r)
        beyond, with a diagonal and a matrix of rank r = `stream_rank` of it.
        """
        _parameters.check_parameters(self)
        checks.refuse_joint(self, "partial_fit")
        _parameters.refuse_integration(self, "partial_fit")
        last: Any = getattr(self, "_last", None)
        joint = last is not None and isinstance(last[0], JointWeightPosterior)
        if joint:
            warnings.warn(
                "partial_fit fits one class against the rest, which a joint fit of several classes "
                "cannot begin: its rows are forgotten. To go on, take multi_class='one_vs_rest'.",
                UserWarning,
                stacklevel=2,
            )
        how: Any = dict(dtype=np.float64, accept_sparse=self._accept_sparse)
        X, y = checks.validated(self, X, y, reset=last is None, **how)
        if last is None:
            self.classes_ = np.unique(y if classes is None else classes)
            if len(self.classes_) < 2:
                raise ValueError("y has only one class: name all of them in classes.")
        begins = joint or last is None
        variances = self._variances_of_stream(begins)
        plans = plan_stream(self, X.shape[1], variances)
        last = [plan.start() for plan in plans] if begins else last
        signs = self._signs(y, len(last))
        checks.check_column_scales(self, X, checks.LARGEST_IN_UNITS)
        weight = checks.checked_weights(sample_weight, X)
        log_score = self._log_score(X, y, weight)
        each = zip(plans, last, signs, strict=True)
        fits = [plan.add_batch(before, X, sign, weight) for plan, before, sign in each]
        attributes = _of_any_fit(self, plans[0], fits)
        attributes["prior_variance_"] = fitting.one_or_stack(variances)
        attributes["log_evidence_"] += getattr(self, "log_evidence_", 0.0)
        attributes["_n_rows"] = np.size(y) + getattr(self, "_n_rows", 0)
        before = getattr(self, "stream_log_score_", np.empty(0))
        attributes["stream_log_score_"] = np.append(before, log_score)
        fitting.replace_fitted(self, attributes)
        if not self.converged_:
            fitting.warn_not_converged(self, "raise max_iter, or take smaller batches")
        return self

    def _variances_of_stream(self, begins):
        """Return the prior variances of each binary problem: those of the last fit, or given ones.

        A stream that `begins` has the same for all classes.
        """
        variances = getattr(self, "prior_variance_", _parameters.given_variance(self))
        of_each = checks.count_problems(self) > 1 and not begins
        return list(variances) if of_each else [variances] * checks.count_problems(self)

    def _log_score(self, X, y, weight):
        """Return the mean log probability of labels by what was learned before, or by the prior."""
        if not hasattr(self, "_predictors"):
            return -np.log(len(self.classes_))
        before = copy.copy(self)
        before._posteriors = self._predictors
        log_proba = before._latents().log_proba(X)  # X was checked, and has no names any more
        own = log_proba[np.arange(len(y)), np.searchsorted(self.classes_, y)]
        return float(weight @ own) / max(float(weight.sum()), np.finfo(float).tiny)

    def _signs(self, y, n_problems):
        """Return the labels in {-1, +1} of each binary problem, or raise for a label not seen."""
        self._check_seen(y)
        index = np.searchsorted(self.classes_, y)
        return [fitting.signs_of(index, k, n_problems) for k in range(n_problems)]

    @checks.in_precision_of_rows
    def decision_function(self, X: RowsLike) -> np.ndarray:
        """Posterior mean of the linear predictor, or log odds of one class against the rest.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, n_features)
            Rows to predict.

        Returns
        -------
        decision : ndarray of shape (n,), or (n, n_classes) for more than two classes
            Of two classes the mean, positive where the second class is the more probable one; of
            several classes jointly the means. Of one class against the rest the log odds of each
            averaged over its posterior, which rank as `predict_proba` does.
        """
        X, latents = self._check_new(X), self._latents()
        return latents.log_odds(X) if len(self._posteriors) > 1 else latents.mean(X)

    def sample_posterior(self, n_samples: int = 1, random_state: Seed = None) -> np.ndarray:
        """Draw coefficients from the posterior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        coef : ndarray of shape (n_samples, n_features [+ 1])
            With the intercept last if there is one; (n_classes, n_samples, ...) for more than two
            classes. O(d^2) a draw with exact variances, one solve by conjugate gradients otherwise.

        Raises
        ------
        ValueError
            If `n_samples` is less than one.
        """
        rng = checks.checked_draws(self, n_samples, random_state)
        return fitting.one_or_stack([p.sample(n_samples, rng) for p in self._posteriors])

    def _coefficients(self, level):
        """Return means and deviations (K, q) of coefficients and intercept, and intervals."""
        means, variances = _by_class(self._posteriors)
        each = [p.coefficient_interval(level) for p in self._posteriors]
        return means, np.sqrt(variances), np.reshape(each, (*means.shape, 2))

    def _figures(self):
        return {
            "rows": self._n_rows,
            "log evidence": self.log_evidence_,
            "effective degrees of freedom": float(np.sum(self.effective_dof_)),
        }

    def _log_weights(self, rows, n_draws, rng):
        """Weights of two classes with a Gaussian prior and no class weights: others have none.

        Of several nodes those of the heaviest one, given its prior variance.
        """
        remarks = (*average_remarks(self._averages), *self._bound_remarks())
        gaussian = self.prior == "gaussian"
        known = gaussian and self.class_weight is None and "site_precision_" in vars(self)
        if rows is None or not known or len(self._posteriors) > 1:
            return None, remarks
        X, posterior = self._check_new(rows.X), self._last[0]
        weight = checks.checked_weights(rows.sample_weight, X)
        if isinstance(posterior, JointWeightPosterior):
            kept = weight > 0
            sites = self.site_precision_.T[kept], self._site_shift.T
            sites = Sites(*(site / weight[kept][:, None] for site in sites))
            latent = posterior.predictors(X[kept], posterior.sample(n_draws, rng))
            of_rows = np.searchsorted(self.classes_, rows.y)[kept], weight[kept], sites, latent
            return class_log_weights(posterior.factor, *of_rows), remarks
        told = self._signs(rows.y, 1)[0], weight, self.site_precision_
        of_weights = self._heaviest_prior(X.shape[1]), posterior.mean
        draws = posterior.sample(n_draws, rng), posterior.predictors(X)
        own = weight_space_log_weights(posterior.factor, *told, *of_weights, *draws)
        return own, remarks

    def _bound_remarks(self):
        """Return what is to be said of a prior that has the local bound alone."""
        if isinstance(self.prior, str) or getattr(self.prior, "bound", "local") == "kl":
            return ()
        return (
            f"The posterior under {self.prior!r} is that of its local bound, not of moments: "
            "standard deviations of coefficients may be two thirds of the true ones and less, and "
            "means a fifth of a standard deviation off.",
        )

    def _heaviest_prior(self, d):
        """Return the prior precisions of d coefficients and the intercept at the heaviest node."""
        centre, given = self._averages[0].heaviest.phi, self.prior_variance_
        if len(centre):
            given = given * np.exp(centre[0] - np.mean(np.log(given)))
        return 1.0 / _parameters.prior_variances(self, d, given)

    def condition_on(self, X: RowsLike, y: ArrayLike) -> Self:
        """Include labelled rows by rank-one updates, without a refit.

        Each row gets the Gaussian site that is best given the posterior so far; the sites of
        earlier rows stay as they are, so that after many rows a refit is more accurate. The
        features of this estimator do not change.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (m, n_features)
            Rows to include.
        y : array-like of shape (m,)
            Their labels, out of `classes_`.

        Returns
        -------
        estimator : ConvexVariationalLogistic
            A new fitted estimator; it predicts, draws and conditions like any other. Its
            attributes about rows and iterations are those of the last fit, and to `log_evidence_`
            the log probability of the new labels is added.

        Raises
        ------
        ValueError
            If a label was not seen in fit, or several classes jointly have sampled variances.

        Notes
        -----
        O(d^2) a row with exact variances, one solve by conjugate gradients otherwise; the result
        costs O(d) more a predicted row for each included one.
        """
        X, y = self._check_new(X, y)
        new, n_problems = copy.copy(self), len(self._posteriors)
        if isinstance(self._posteriors[0], JointWeightPosterior):
            self._check_seen(y)
            pairs = [self._posteriors[0].joined(X, np.searchsorted(self.classes_, y))]
        else:
            pairs = [
                p.joined(X, LogisticSites(sign, np.ones(len(sign)), self.bound))
                for p, sign in zip(self._posteriors, self._signs(y, n_problems), strict=True)
            ]
        joined = [posterior for posterior, _ in pairs]
        averages = [
            a._replace(weight=getattr(p, "weight", a.weight))
            for a, p in zip(self._averages, joined, strict=True)
        ]
        attributes = _coefficient_attributes(joined, self.n_features_in_)
        attributes["log_evidence_"] = self.log_evidence_ + sum(log_prob for _, log_prob in pairs)
        new.__dict__.update(attributes | _averages_told(self, averages))
        return new


def _of_any_fit(estimator, problem, fits):
    """Return the fitted attributes that every fit has, of a batch of a stream too."""
    own = [f.attributes for f in fits]
    names = {"n_mvm": "n_mvm_", "n_passes": "n_passes_", "n_newton": "n_newton_iter_"}
    return {
        **fitting.run_attributes(fits),
        **_coefficient_attributes([f.posterior for f in fits], estimator.n_features_in_),
        **_averages_told(estimator, [a["average"] for a in own]),
        **{full: int(sum(a.get(name, 0) for a in own)) for name, full in names.items()},
        "effective_dof_": fitting.one_or_stack([a["dof"] for a in own]),
        "variance_method_": problem.variance,
        "solver_": problem.solver,
        "log_evidence_std_": float(np.hypot.reduce([a.get("evidence_std", 0.0) for a in own])),
    }


def _store_fit(estimator, problem, fits, kept):
    """Set all fitted attributes; `kept` marks the rows of the input that were used.

    It is None where nothing is known of single rows.
    """
    own, given = [f.attributes for f in fits], _parameters.given_variance(estimator)
    left_out = [a["left_out"] for a in own]
    attributes = _of_any_fit(estimator, problem, fits) | {
        "prior_variance_": fitting.one_or_stack([np.multiply(a["scale"], given) for a in own]),
        "slope_": fitting.one_or_stack([float(left.scale[0]) for left in left_out]),
        "temper_": fitting.one_or_stack([float(left.scale[1]) for left in left_out]),
        "_n_rows": problem.n_rows,
        "_warm_state": ([a["last"] for a in own], problem.shape, problem.rows.size),
    }
    if kept is not None:
        attributes |= _of_rows(own, left_out, kept)
    if isinstance(problem.prior, _parameters.SitePrior):
        scale, site = fitting.one_or_stack([a["scale"] for a in own]), problem.prior.site
        attributes["prior_variance_"] = scale**2 / site.start_precision()
        if isinstance(estimator.prior, str):
            attributes["laplace_scale_"] = scale * site.scale
    fitting.replace_fitted(estimator, attributes)


def _of_rows(own, left_out, kept):
    """Return the attributes that tell of rows, in the shape of the caller's rows."""

    def each(values, missing=np.nan):
        return checks.spread_rows(fitting.one_or_stack(values), kept, missing)

    return {
        "site_precision_": each([a["site_precision"] for a in own], 0.0),
        "marginal_variance_": each([a["marginal_variance"] for a in own]),
        "_site_shift": own[0].get("site_shift"),
        "loo_mean_": each([one.mean for one in left_out]),
        "loo_variance_": each([one.var for one in left_out]),
        "loo_proba_": each([np.exp(one.log_proba) for one in left_out]),
    }


def _averages_told(estimator, averages):
    """Return the attributes that tell of the averages over the scale of the prior."""
    names = (_parameters.scale_name(estimator),) if averages[0].phi.shape[1] else ()
    used = "integrate" if any(len(a.nodes) > 1 for a in averages) else "mode"
    nodes, weights = [a.phi for a in averages], [a.weight for a in averages]
    return fitting.hyper_attributes(nodes, weights, names, used) | {"_averages": averages}


def _by_class(posteriors):
    """Return means and variances (K, q) of the weights, of one posterior a class or of all."""
    means = np.concatenate([np.atleast_2d(p.mean) for p in posteriors])
    return means, np.concatenate([np.atleast_2d(p.coefficient_variance()) for p in posteriors])


def _coefficient_attributes(posteriors, d):
    """Return the fitted attributes that summarise posteriors of d coefficients."""
    means, variances = _by_class(posteriors)
    joint = isinstance(posteriors[0], JointWeightPosterior)
    return {
        "coef_": means[:, :d],
        "coef_std_": np.sqrt(variances[:, :d]),
        "intercept_": means[:, d] if means.shape[1] > d else np.zeros(len(means)),
        "multi_class_": "joint" if joint else "one_vs_rest",
        "_posteriors": posteriors,
        "_predictors": posteriors,
        "_last": [getattr(p, "heaviest", p) for p in posteriors],
    }
