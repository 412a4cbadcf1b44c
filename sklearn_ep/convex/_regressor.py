"""Linear regression with super-Gaussian priors, on matrices and linear operators."""

from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse.linalg import LinearOperator
from sklearn.base import RegressorMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, column_or_1d

from .._engine.loop import SILENT
from .._estimator import checks, fitting
from .._estimator.annotations import RowsLike, Seed, TrainingRows
from .._estimator.base import VersionedEstimator
from .._estimator.compat import CallbackSupportMixin, with_callbacks
from .._estimator.row_parts import merged, statistics_of_rows
from .._estimator.summary import CoefficientReport, interval_of
from ._regression import Rows, plan_regression, rows_of_parts, takes_exact
from ._regression_loop import solve
from ._sites import SITES, SuperGaussianSite


class ConvexVariationalRegressor(
    CoefficientReport, CallbackSupportMixin, RegressorMixin, VersionedEstimator
):
    """Linear regression y = X u + noise with a super-Gaussian prior, in matrix-vector products.

    The posterior is approximated by a Gaussian that maximises a lower bound of the log evidence.
    Every coefficient has a mean and a variance, from products with X and its transpose alone. X may
    be a `scipy.sparse.linalg.LinearOperator`, and the prior may be on linear images C u, such as
    wavelet coefficients and differences of neighbouring pixels.

    **You will set** `prior`, `noise_variance`, `prior_operator` and `learn_prior`. Leave the other
    parameters at their defaults.

    Parameters
    ----------
    prior : SuperGaussianSite or None, default=None
        Prior of each entry of C u, see `sklearn_ep.sites`; None is ``LaplaceSite(1.0, "kl")``, by
        default with its scale learned. It is in units of y over those of a column: scale the
        columns where they differ by orders of magnitude.
    prior_operator : array-like, sparse matrix or LinearOperator of shape (m, d), default=None
        C; None is the identity.
    noise_variance : float or "auto", default="auto"
        Variance of the noise; "auto" learns it by the bound. With measurements it may be known.
    fit_intercept : bool or "auto", default="auto"
        Whether to add an intercept with a flat prior. "auto" is True for arrays and sparse
        matrices, unless `noise_variance` is a number or there is a `prior_operator`: then y = X u +
        noise is taken to be the measurement in full, as it is for operators.
    variance : {"auto", "exact", "monte_carlo"}, default="auto"
        "exact" factorises a matrix of columns, or of fewer rows, at every step, "monte_carlo"
        estimates variances by samples, drawn with products alone. "auto" is "exact" for matrices of
        up to 2000 columns. Without a `prior_operator` it is so for more columns, too, where n^2 d
        is at most 1e9 and n at most d / 2.
    n_variance_samples : int, default=16
        Samples of "monte_carlo"; their relative error is sqrt(2 / n_variance_samples).
    learn_prior : bool or "auto", default="auto"
        Learn a factor of the scale of the prior. "auto" does so where `prior` is None: a prior
        that is given stays as it is. True is refused unless `prior_operator` is None or square,
        and "auto" is False then: the normaliser of any other prior is not known.
    max_iter : int, default=50
        Largest number of outer steps; five to twenty are usual.
    tol : float, default=1e-3
        Outer steps stop when no log variance changes by more. With sampled variances the mean
        square change is compared.
    random_state : int, RandomState instance or None, default=None
        Seed of the samples, drawn once a fit.

    Attributes
    ----------
    coef_ : ndarray of shape (d,)
        Posterior means.
    coef_std_ : ndarray of shape (d,)
        Posterior standard deviations.
    intercept_ : float
        Posterior mean of the intercept, 0 if there is none.
    noise_variance_ : float
        Variance of the noise, given or learned.
    temper_ : float
        Scale of the noise variance in predictions, learned by leaving rows out where columns vary
        in one row alone. Otherwise 1, as with a given noise, sampled variances, a `prior_operator`,
        more than 2**25 entries of X, and after `partial_fit`.
    prior_ : SuperGaussianSite
        The prior used.
    prior_scale_ : float
        Learned factor of its scale, 1 where it was given.
    log_evidence_ : float
        Lower bound on log p(y); with an intercept, of y minus its mean, n - 1 numbers. nan where
        `prior_operator` is not square, since the normaliser of the prior is not known.
    log_evidence_std_ : float
        Its standard error by the random numbers of the fit; 0 with exact variances.
    variance_method_ : str
        "exact" or "monte_carlo".
    n_mvm_ : int
        Products of a vector with X or its transpose.
    n_iter_ : int
        Outer steps.
    converged_ : bool
        Whether `tol` was reached.
    stop_reason_ : str
        Why the fit ended: "converged", "max_iter", "stuck" or "asked" (by a callback).
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and, with exact variances, "objective", the bound; "phase" says what kind of
        iteration each was.
    n_features_in_ : int
        Number of columns.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, if X had string names.

    Notes
    -----
    At the defaults noise and scale of the prior are learned, so that for ``c * y`` all answers are
    c times as large. With more columns than rows the bound may rise until there is no noise at all;
    a prior that counts as a hundredth of a row then keeps the noise variance at about a millionth
    of the mean square of y.

    Cost with exact variances O(n d^2) once and O(d^3) a weighted least-squares step, of which there
    are one to thirty an outer step. With no `prior_operator` and up to half as many rows as columns
    a step is O(n^2 d). Otherwise some hundreds to thousands of products with X and C, most of them
    in blocks of `n_variance_samples` columns, and memory for 4 (n + m + d) k numbers.

    The local bound, which every prior has, understates standard deviations by 2 to 36 %;
    ``LaplaceSite(bound="kl")`` by a few per cent at most. Priors that are not log-concave
    (Student's t, horseshoe) may have several optima; the one nearest to a wide start is found.

    References
    ----------
    .. [1] M. W. Seeger and H. Nickisch, "Large scale Bayesian inference and experimental design for
       sparse linear models", SIAM Journal on Imaging Sciences 4, 2011.
    .. [2] G. Papandreou and A. Yuille, "Efficient variational inference in large-scale Bayesian
       compressed sensing", ICCV workshops, 2011.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import ConvexVariationalRegressor
    >>> from sklearn_ep.sites import StudentTSite
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((60, 30))
    >>> y = X @ np.r_[3.0, -2.0, np.zeros(28)] + 0.5 * rng.standard_normal(60)
    >>> reg = ConvexVariationalRegressor(StudentTSite(3, 0.1), noise_variance="auto").fit(X, y)
    >>> reg.coef_[:2].round()
    array([ 3., -2.])
    >>> mean, std = reg.predict(X[:2], return_std=True)
    """

    _accept_sparse = "csr"
    noise_variance_: float
    prior_: Any

    def __init__(
        self,
        prior: Any = None,
        *,
        prior_operator: Any = None,
        noise_variance: float | str = "auto",
        fit_intercept: bool | str = "auto",
        variance: str = "auto",
        n_variance_samples: int = 16,
        learn_prior: bool | str = "auto",
        max_iter: int = 50,
        tol: float = 1e-3,
        random_state: Seed = None,
    ) -> None:
        self.prior = prior
        self.prior_operator = prior_operator
        self.noise_variance = noise_variance
        self.fit_intercept = fit_intercept
        self.variance = variance
        self.n_variance_samples = n_variance_samples
        self.learn_prior = learn_prior
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    @fitting.fit_method
    @with_callbacks
    def fit(
        self, X: TrainingRows, y: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Fit the regression.

        Parameters
        ----------
        X : array-like, CSR/CSC matrix or LinearOperator of shape (n, d), or list of partitions
            Design. Of an operator only the shape is checked. A partition is a pair (X, y) of
            arrays, sparse rows or memory maps, a function without arguments that returns one, or a
            dask future of one; see Notes.
        y : array-like of shape (n,)
            Responses; None for a list of partitions.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row, not necessarily integers: an integer weight equals repeating the
            row, zero leaves it out.

        Returns
        -------
        self : ConvexVariationalRegressor
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter or the data are not usable; the estimator is then as it was before.

        Notes
        -----
        Rows in partitions are seen once, by as many workers as `joblib.parallel_config` says. With
        exact variances a part sends a triangular factor of (d + 1)^2 numbers, or its rows where
        they are fewer. Up to 2**25 entries of X all rows are brought together where single rows are
        asked for: for sampled variances, and for `temper_`. Beyond, variances are exact, and
        `temper_` is 1. The answer is that for rows in memory, to rounding, and the same to the last
        bit for any number of workers.
        """
        self._check_parameters()
        rows, statistics = self._checked_data(X, y, sample_weight)
        plan = plan_regression(self, rows, statistics)
        monitor = fitting.FitMonitor(
            self, X, y, self.max_iter, lambda step: {"_posteriors": [plan.posterior(step)]}
        )
        fitted = solve(plan.loop, self.max_iter, monitor)
        monitor.finish()
        return self._stored(plan, fitted, X)

    @fitting.fit_method
    def partial_fit(
        self, X: RowsLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Go on with further rows: the answer is that of a fit to all rows so far.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, d)
            Rows of the batch, any number of them.
        y : array-like of shape (n,)
            Their responses.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row.

        Returns
        -------
        self : ConvexVariationalRegressor
            The estimator after the batch. Rows are not kept, so that `temper_` is 1.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter or the batch is not usable, or variances are, or were, sampled; the
            estimator is then as it was before.

        Notes
        -----
        Goes on from the last `fit` too, which forgets all that was before. What is kept of the rows
        are their weight, means and a triangular root of their scatter, (d + 1)^2 numbers. A batch
        costs O(n d^2) and a fit to min(n, d + 1) rows.
        """
        self._check_parameters()
        known = getattr(self, "_statistics", None)
        first = not hasattr(self, "n_features_in_")
        if known is None and not first:
            raise ValueError("partial_fit cannot go on from a fit with sampled variances.")
        rows = self._checked_rows(X, y, sample_weight, reset=first)
        n, d = rows.X.shape
        if not takes_exact(self, n + (0 if known is None else len(known.root)), d):
            raise ValueError(
                "partial_fit needs exact variances: up to 2000 columns, few rows, or "
                "variance='exact'."
            )
        batch = statistics_of_rows(*rows)
        plan = plan_regression(self, None, batch if known is None else merged(known, batch))
        return self._stored(plan, solve(plan.loop, self.max_iter, SILENT), X)

    def _stored(self, plan, fitted, X):
        """Set the fitted attributes by a plan and what its loop led to; return the estimator."""
        result, log_evidence, error = fitted
        step = result.evaluation.payload
        posterior = plan.posterior(step, calibrated=True)
        run = fitting.BinaryFit(posterior, result.history, result.reason, log_evidence, {})
        self.__dict__.update(
            fitting.run_attributes([run]),
            coef_=step.u,
            coef_std_=np.sqrt(step.variances.coefficient_variance()),
            intercept_=posterior.intercept,
            noise_variance_=step.noise,
            temper_=posterior.temper,
            prior_=plan.loop.prior.site,
            prior_scale_=step.scale,
            log_evidence_std_=error,
            variance_method_="exact" if posterior.exact else "monte_carlo",
            n_mvm_=plan.loop.design.n_products,
            _posteriors=[posterior],
            _statistics=plan.statistics,
            _fitted_single=checks.is_single(X),
        )
        if not self.converged_:
            fitting.warn_not_converged(self, "raise max_iter, or scale the columns")
        return self

    def _check_parameters(self):
        """Raise an error that names the parameter unless all of them are usable."""
        if self.prior is not None and not isinstance(self.prior, SuperGaussianSite):
            raise TypeError(f"prior must be None or {SITES}, got {self.prior!r}.")
        checks.check_number_or_auto("noise_variance", self.noise_variance, 0)
        checks.check_choice("variance", self.variance, ["auto", "exact", "monte_carlo"])
        checks.check_number("n_variance_samples", self.n_variance_samples, 1, integer=True)
        checks.check_choice("fit_intercept", self.fit_intercept, [True, False, "auto"])
        checks.check_choice("learn_prior", self.learn_prior, [True, False, "auto"])
        checks.check_number("max_iter", self.max_iter, 1, integer=True)
        checks.check_number("tol", self.tol, 0, boundaries="neither")
        checks.checked_random(self.random_state)

    def _checked_data(self, X, y, sample_weight):
        """Return `Rows` or None, and the `RowStatistics` of partitions that stay apart or None."""
        if checks.is_unweighted_part_list(X, y, sample_weight):
            return rows_of_parts(self, X)
        if not isinstance(X, LinearOperator):
            return self._checked_rows(X, y, sample_weight), None
        y = check_array(column_or_1d(y), ensure_2d=False, dtype=np.float64, input_name="y")
        if len(y) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} rows, and y has {len(y)} of them.")
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        self.n_features_in_ = X.shape[1]
        return Rows(X, y, checks.checked_weights(sample_weight, X)), None

    def _checked_rows(self, X, y, sample_weight, reset=True):
        """Return the `Rows` of a matrix X, dense or CSR."""
        rows, labels = (getattr(a, "shape", None) for a in (X, y))
        if rows and labels and len(labels) == 1 and rows[0] != labels[0]:
            raise ValueError(f"X has {rows[0]} rows, and y has {labels[0]} of them.")
        training = checks.validate_training(
            self, X, y, sample_weight, accept_sparse=self._accept_sparse, reset=reset
        )
        checks.check_column_scales(self, training.X, checks.LARGEST_IN_UNITS)
        return Rows(training.X, training.y, training.weight)

    @overload
    def predict(self, X: RowsLike, return_std: Literal[False] = ...) -> np.ndarray: ...

    @overload
    def predict(self, X: RowsLike, return_std: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...

    @checks.in_precision_of_rows
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict responses.

        Parameters
        ----------
        X : array-like, CSR/CSC matrix of shape (n, d)
            Rows.
        return_std : bool, default=False
            Give the standard deviation of a new response as well, the noise included.

        Returns
        -------
        mean : ndarray of shape (n,)
            Predictive means.
        std : ndarray of shape (n,)
            Predictive standard deviations, only with `return_std`.
        """
        X, posterior = self._check_new(X), self._posteriors[0]
        if not return_std:
            return posterior.latent_mean(X)
        mean, variance = posterior.predict(X)
        return mean, np.sqrt(variance + posterior.temper * posterior.noise)

    def latent_covariance(self, X1: Any, X2: Any = None) -> np.ndarray:
        """Posterior covariance of the noise-free responses at rows.

        Parameters
        ----------
        X1 : array-like, CSR/CSC matrix or LinearOperator of shape (n1, d)
            Rows.
        X2 : array-like, CSR/CSC matrix or LinearOperator of shape (n2, d), default=None
            Rows; None stands for X1.

        Returns
        -------
        covariance : ndarray of shape (n1, n2)
            The intercept's uncertainty included. With sampled variances its rank is
            `n_variance_samples`.
        """
        check_is_fitted(self)
        X1 = self._matrix_or_operator(X1)
        X2 = X1 if X2 is None else self._matrix_or_operator(X2)
        return self._posteriors[0].latent_covariance(X1, X2)

    def information_gain(self, X: Any) -> float:
        """Information about the coefficients that responses to rows would give together.

        Parameters
        ----------
        X : array-like, CSR/CSC matrix or LinearOperator of shape (n, d)
            Rows to be measured as one block, such as a line of Fourier coefficients.

        Returns
        -------
        gain : float
            Fall of the entropy of the Gaussian posterior in nats, 1/2 log det(I + C / s2), with the
            `latent_covariance` C of the rows and the noise variance s2. Measure the block of the
            largest gain next, and fit again (Seeger and Nickisch 2011). O(n^3), and a product with
            X for each of the d columns of the posterior's factor, or of `n_variance_samples`.
        """
        C = self.latent_covariance(X) / self.noise_variance_
        return float(0.5 * np.linalg.slogdet(np.eye(len(C)) + C)[1])

    def _matrix_or_operator(self, X):
        """Return new rows, which may be an operator."""
        if not isinstance(X, LinearOperator):
            return self._check_new(X)
        if X.shape[1] != self.n_features_in_:
            raise ValueError(f"X has {X.shape[1]} columns, expected {self.n_features_in_}.")
        return X

    def predict_interval(self, X: RowsLike, level: float = 0.9) -> np.ndarray:
        """Central intervals of new responses, the noise included.

        Parameters
        ----------
        X : array-like, CSR/CSC matrix of shape (n, d)
            Rows.
        level : float, default=0.9
            Probability in (0, 1) that an interval covers its response.

        Returns
        -------
        interval : ndarray of shape (n, 2)
            Lower and upper end, in units of y. A learned noise variance makes them Student's t,
            with the degrees of freedom that rows leave to the noise.

        Raises
        ------
        ValueError
            If `level` is not between 0 and 1.
        """
        X = self._check_new(X)
        checks.check_number("level", level, 0, 1, boundaries="neither")
        return self._posteriors[0].interval(X, level)

    def _coefficients(self, level):
        """Return means, standard deviations and intervals, that of an intercept last."""
        mean, std, posterior = self.coef_, self.coef_std_, self._posteriors[0]
        if posterior.centre.flat:
            variance = posterior.predict(np.zeros((1, len(mean))))[1]
            mean, std = np.append(mean, self.intercept_), np.append(std, np.sqrt(variance))
        return mean, std, interval_of(mean, std, level)

    def _figures(self):
        noise = float(np.sqrt(self.noise_variance_))
        return {"log evidence": self.log_evidence_, "noise sd": noise}

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
        coef : ndarray of shape (n_samples, d)
            O(d^2) a draw, or O(n d) of few rows.

        Raises
        ------
        ValueError
            If variances were sampled: the factor that draws is then not there.
        """
        rng, posterior = checks.checked_draws(self, n_samples, random_state), self._posteriors[0]
        if not posterior.exact:
            raise ValueError("draws need variance='exact'.")
        return posterior.mean + posterior.spread.draw(n_samples, rng)
