"""Sparse classification with spike-and-slab priors by expectation propagation."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from .._engine.hyper import mixture_moments, mixture_quantiles
from .._estimator.annotations import RowsLike
from .._estimator.checks import check_common, check_hyperparameters, check_number_or_auto, is_single
from .._estimator.compat import with_callbacks
from .._estimator.fitting import FitMonitor, fit_method, warn_not_converged
from .._estimator.posterior_classifier import PosteriorClassifier
from .._estimator.summary import CoefficientReport, ends_of
from ._fit import keep
from ._probit import fitted_attributes, make_plan, state_attributes
from ._support import FeatureSupport


class SpikeSlabClassifier(FeatureSupport, CoefficientReport, PosteriorClassifier):
    """Probit classification of two classes in which each coefficient may be exactly zero.

    p(second class) = Phi(X w + intercept); w_j is zero with probability 1 - `prior_inclusion` and
    normal with variance `slab_variance` otherwise. The posterior is approximated by expectation
    propagation, with a site on each row and on each coefficient. Slab variance and inclusion are
    averaged over unless given.

    **You will set** `slab_variance`, `prior_inclusion` and `hyperparameters`. Leave the other
    parameters at their defaults.

    Parameters
    ----------
    slab_variance : float or "auto", default="auto"
        Variance of a coefficient that is not zero, on the scale of the standardised columns; "auto"
        averages over it or learns it.
    prior_inclusion : float or "auto", default="auto"
        Prior probability in (0, 1) that a coefficient is not zero; "auto" averages over it or
        learns it.
    hyperparameters : {"auto", "integrate", "mode"}, default="auto"
        How the two above are treated where they are not given. "integrate" averages over them, by a
        grid of some 10 to 24 fits. Their priors are those of `SpikeSlabRegressor` with a noise
        variance of one: r = slab variance times the mean square of the columns has the density (1 +
        r)^(-3/2) / 2, the inclusion Beta(1, sqrt(d)). "mode" takes those of largest evidence times
        prior, in a third of the time. "auto" is "integrate" up to two million entries of X, since
        each fit keeps a copy of them, and "mode" beyond.
    fit_intercept : bool, default=True
        Fit an intercept, with a normal prior of standard deviation 10 at the mean of the columns.
    standardize : bool, default=True
        Divide columns by their standard deviation, so that one slab variance suits all of them.
        Coefficients are given back on the scale of X.
    damping : float, default=0.7
        Share of an update of the sites that is taken, in (0, 1]; undamped sweeps oscillate where
        columns are correlated.
    max_iter : int, default=100
        Largest number of sweeps at the mode of the hyperparameters; some 10 to 40 are usual.
    tol : float, default=1e-4
        Largest change under an undamped sweep at which a fit has converged: of a site of a row in
        units of its latent value, of a coefficient's mean or standard deviation in units of the
        slab's.
    n_jobs : int or None, default=None
        Workers for the nodes of the integration. Answers do not depend on it.
    verbose : int, default=0
        1 prints a line for each iteration, and for each phase of learning or integration before or
        after them, with the seconds since the fit began; 2 for each step of a phase as well.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
        Labels of the two classes.
    coef_ : ndarray of shape (1, d)
        Posterior means of the coefficients.
    coef_std_ : ndarray of shape (1, d)
        Posterior standard deviations.
    intercept_ : ndarray of shape (1,)
        Posterior mean of the intercept, 0 without one.
    inclusion_proba_ : ndarray of shape (d,)
        Posterior probability that a coefficient is not zero, averaged over hyperparameters.
    expected_model_size_ : float
        Their sum.
    slab_variance_ : float
        Variance of a coefficient that is not zero, given, learned or the posterior geometric mean.
    prior_inclusion_ : float
        Prior probability that a coefficient is not zero, given, learned or the posterior mean.
    loo_proba_ : ndarray of shape (n,)
        Probability of each training row's own label given the labels of the others, from the
        cavities of the rows; nan for rows of weight zero. A row with a leverage above .85 is left
        out by a run without it.
    hyper_nodes_ : ndarray of shape (M, T)
        Hyperparameters of the M fits that are averaged, those that were not given: a log and a
        logit. One row with "mode".
    hyper_weights_ : ndarray of shape (M,)
        Their posterior weights; they sum to one.
    hyper_names_ : tuple of str
        T of "log_slab_variance" and "logit_prior_inclusion".
    hyperparameters_used_ : str
        "integrate" or "mode"; the latter where all is given, and where a callback ended the fit.
    log_evidence_ : float
        EP approximation of log p(y), of the integral over hyperparameters or at their mode.
    n_iter_ : int
        Sweeps at the mode of the hyperparameters; integration over them is one more.
    converged_ : bool
        Whether the residual fell below `tol`.
    stop_reason_ : str
        Why the run ended: "converged", "max_iter", "stuck" (no shorter step leaves a posterior) or
        "asked" (by a callback).
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" of an undamped sweep, "log_evidence", and "phase", the kind of each iteration.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    Notes
    -----
    A sweep costs O(n^2 d) for d > n, with memory for two copies of X and no d x d matrix, and
    O(n d^2 + d^3) otherwise; a default fit takes some 200 sweeps. A sparse X is made dense.

    Parallel sweeps may find no fixed point where hardly any of many correlated columns stands out
    and few are expected to be in. Such nodes are left out of the average. At the mode a
    ``ConvergenceWarning`` says so.

    `coef_std_`, `covariance`, draws without zeros and predictions come from Gaussian posteriors.
    Intervals allow for coefficients that are zero. Where columns are correlated, EP's inclusions
    are off by up to .2; `inclusion_proba_` then comes from 4,000 draws of the nodes, weighted by
    likelihood times prior over their density, with a fixed seed. ``diagnose()`` tells how many of
    them count. Below one in forty, as with very many columns, EP's inclusions stay.

    References
    ----------
    .. [1] J. M. Hernandez-Lobato, D. Hernandez-Lobato and A. Suarez, "Expectation propagation in
       linear regression models with spike-and-slab priors", Machine Learning 99, 2015.
    .. [2] D. Hernandez-Lobato, J. M. Hernandez-Lobato and P. Dupont, "Generalized spike-and-slab
       priors for Bayesian group feature selection using expectation propagation", JMLR 14, 2013.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import SpikeSlabClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(120, 200))
    >>> y = X[:, 3] - X[:, 7] + 0.3 * rng.normal(size=120) > 0
    >>> clf = SpikeSlabClassifier().fit(X, y)
    >>> np.flatnonzero(clf.get_support()).tolist()
    [3, 7]
    """

    _accept_sparse = "csr"

    def __init__(
        self,
        *,
        slab_variance: float | str = "auto",
        prior_inclusion: float | str = "auto",
        hyperparameters: str = "auto",
        fit_intercept: bool = True,
        standardize: bool = True,
        damping: float = 0.7,
        max_iter: int = 100,
        tol: float = 1e-4,
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.slab_variance = slab_variance
        self.prior_inclusion = prior_inclusion
        self.hyperparameters = hyperparameters
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.damping = damping
        self.max_iter = max_iter
        self.tol = tol
        self.n_jobs = n_jobs
        self.verbose = verbose

    @fit_method
    @with_callbacks
    def fit(self, X: RowsLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the classifier.

        Parameters
        ----------
        X : array-like or CSR/CSC matrix of shape (n, d)
            Training rows. A sparse matrix is made dense, 8 n d bytes, for its centred columns are.
        y : array-like of shape (n,)
            Labels of two classes.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row, not necessarily integers: an integer weight equals repeating the
            row, zero leaves it out.

        Returns
        -------
        self : SpikeSlabClassifier
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter or the data are not usable, or y has other than two classes; the
            estimator is then as it was before.
        """
        check_common(self)
        check_hyperparameters(self.hyperparameters)
        check_number_or_auto("slab_variance", self.slab_variance, 0)
        check_number_or_auto("prior_inclusion", self.prior_inclusion, 0, 1)
        plan = make_plan(self, X, y, sample_weight)
        monitor = FitMonitor(self, X, y, self.max_iter, lambda state: state_attributes(plan, state))
        found = fitted_attributes(plan, self, monitor)
        keep(self, found, monitor, is_single(X))
        if not self.converged_:
            warn_not_converged(self)
        return self

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _coefficients(self, level):
        """Return means, deviations (1, q) and intervals (1, q, 2), those of an intercept last."""
        mixture, mean, std = self._posteriors[0], self.coef_, self.coef_std_
        interval = mixture.coef_interval(level)
        if mixture.units.fit_intercept:
            centre, var = mixture.moments(np.zeros((1, self.n_features_in_)))
            ends = mixture_quantiles(mixture.weight, centre, np.sqrt(var), ends_of(level))
            spread = np.sqrt(mixture_moments(mixture.weight, centre, var)[1])
            mean, std = np.append(mean, self.intercept_)[None], np.append(std, spread)[None]
            interval = np.vstack([interval, ends.T])
        return mean, std, interval[None]
