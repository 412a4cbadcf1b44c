"""Gaussian-process classification by expectation propagation."""

import numpy as np
from sklearn.utils import check_random_state

from .._engine.factor import Factor
from .._engine.likelihoods import LIKELIHOODS
from .._engine.rules import MomentMatching
from .._estimator.checks import check_choice, check_common, check_number, validate_training
from .._estimator.compat import with_callbacks
from .._estimator.fitting import restore_on_error
from ._base import DenseProblem, check_kernel, fit_dense
from ._evidence import random_starts
from ._kernels import self_covariance
from ._rows import array_parts, is_part_list
from .inducing.base import SparseGaussianProcessBase

__all__ = ["EPGaussianProcessClassifier"]


class EPGaussianProcessClassifier(SparseGaussianProcessBase):
    """Gaussian-process classifier with the posterior of expectation propagation.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel, default=None
        Prior covariance of the latent function. None is ``ConstantKernel(1) * RBF(l)`` with l three
        times the root of the total variance of the columns, a smooth start on any scale of X.
    method : {"auto", "dense", "sparse"}, default="auto"
        "dense" keeps the full covariance matrix of the rows; "sparse" goes through inducing points
        (FITC), with cost linear in the rows. "auto" is dense up to 2000 rows, where it is both
        faster to tune and more accurate, unless `inducing_points`, `batch_size`, an averaged site
        or an optimizer of the sparse method are asked for.
    likelihood : {"probit", "logit"} or Factor, default="probit"
        p(y | f). The probit has the cheapest closed form. Any `Factor` of the engine is accepted.
    n_inducing : int, default=None
        Number of inducing points m of the sparse method, at most the number of distinct rows. None
        is 100, where a pass costs about as much in the kernel as in the algebra.
    inducing_points : array-like of shape (m, d), default=None
        Inducing points to start from; None chooses them by a few steps of k-means from random rows.
    learn_inducing : bool or "auto", default="auto"
        Move the inducing points along the gradient of the evidence. "auto" does so from 2000 rows
        on, where the evidence no longer overfits them, for kernels of constants, RBF and Matern.
    optimizer : {"auto", "fmin_l_bfgs_b", "adam", "adadelta", "sign_rate"} or None, default="auto"
        How the kernel parameters (and inducing points) are learned from the evidence; None keeps
        them. L-BFGS-B evaluates the evidence at fixed points of EP. The others are of the sparse
        method and take a step after each pass: "sign_rate" is the rule of [1]_. "auto" is L-BFGS-B
        for dense and Adam for sparse, which needs half the time.
    n_restarts_optimizer : int, default=0
        Further starts of L-BFGS-B drawn within the bounds of the kernel; the largest evidence is
        kept.
    batch_size : int, default=None
        Learn in minibatches of so many rows; the full passes that follow remove their noise.
    learning_rate : float, default=0.05
        Rate of the step rules: for Adam the size of a step in log parameters and in standard
        deviations of the columns. 0.01 suits minibatches.
    damping : float, default=0.7
        Share of an update that is taken, in (0, 1]. With acceleration the mixing of its steps.
    acceleration : {"anderson"} or None, default="anderson"
        Anderson acceleration of the parallel updates. Without it, and with `damping` near one, the
        updates oscillate for kernels of large amplitude.
    max_iter : int, default=150
        Largest number of optimiser steps, or of epochs with `batch_size`; with ``optimizer=None``
        of sweeps, as `max_sweeps`.
    max_sweeps : int, default=100
        Largest number of sweeps over the sites at fixed kernel parameters.
    tol : float, default=1e-3
        A fit has converged once an undamped sweep changes every site by less than this, measured in
        posterior standard deviations. The error of the evidence is of second order in it.
    site_memory : {"scalars", "average"}, default="scalars"
        "scalars" keeps two numbers a row. "average" gives every row the average of all sites (Li et
        al. 2015): m^2 numbers whatever n, and nearly the same posterior once n is many times m.
    n_partitions : int, default=None
        Pieces in which passes of the sparse method go over the rows, for `n_jobs` workers; None is
        one piece. The answer does not depend on it beyond rounding, except with `batch_size`, where
        partitions take turns.
    jitter : float, default=1e-6
        Relative addition to the diagonal of the covariance of inducing points.
    copy_X_train : bool, default=True
        Dense: keep a copy of X for prediction; False keeps a reference. The sparse method predicts
        without the rows and only ever keeps a reference, for `log_marginal_likelihood`.
    warm_start : bool, default=False
        Start from the sites and kernel of the last fit where the number of rows is the same.
    multi_class : {"one_vs_rest"}, default="one_vs_rest"
        More than two classes are fitted as one binary problem each.
    n_jobs : int or None, default=None
        Workers: for the binary problems of more than two classes if dense, for the partitions of
        the rows if sparse.
    random_state : int, RandomState instance or None, default=None
        Seed of the restarts, of the choice of inducing points and of the order of minibatches.
    verbose : int, default=0
        Print a line an iteration.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    kernel_ : Kernel
        Kernel with the learned parameters. For more than two classes a CompoundKernel if dense; the
        sparse method learns one kernel for all classes.
    log_evidence_ : float
        EP approximation of log p(y), summed over the binary problems.
    log_marginal_likelihood_value_ : float
        The same, under the name of scikit-learn.
    method_ : str
        The method in use.
    inducing_points_ : ndarray of shape (m, d)
        Sparse: the inducing points.
    inducing_mean_ : ndarray of shape (m,), or (n_classes, m)
        Sparse: posterior mean of the latent function at them.
    inducing_cov_ : ndarray of shape (m, m), or (n_classes, m, m)
        Sparse: posterior covariance of the latent function at them.
    site_precision_ : ndarray of shape (n,), or (n_classes, n)
        Precision of the site of each row; absent with an averaged site.
    site_shift_ : ndarray of shape (n,), or (n_classes, n)
        Precision times mean of the site of each row; absent with an averaged site.
    loo_proba_ : ndarray of shape (n,)
        Probability of each row's own label under its cavity: leave-one-out prediction for free; nan
        for rows of weight zero, absent with an averaged site.
    n_sweeps_ : int
        Sweeps of the last run at fixed kernel parameters.
    n_iter_ : int
        Optimiser steps plus sweeps of the run that was kept.
    converged_ : bool
        Whether the residual of an undamped sweep fell below `tol`.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and "log_evidence" at each iteration.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    Notes
    -----
    A dense sweep costs 2 n^3 / 3 flops and the fit n^2 numbers of memory; an evaluation of the
    evidence with its gradient four to six sweeps. Prediction costs O(n^2) a row.

    A sparse sweep costs 3 n m^2 flops, one with the gradient 7 n m^2, besides O(n m d) for the
    kernel. Rows are taken in blocks: memory beyond X is a few numbers a row and m^2, so that X may
    be a memory map. Classes share kernel, inducing points and passes. An additive noise variance
    would only rescale the kernel and is no parameter.

    With labels that the kernel can separate the evidence keeps rising with the amplitude, which
    then ends at its bound; EP itself converges there.

    References
    ----------
    .. [1] D. Hernandez-Lobato and J. M. Hernandez-Lobato, "Scalable Gaussian process classification
       via expectation propagation", AISTATS 2016.
    .. [2] C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", MIT
       Press, 2006, section 3.6.
    .. [3] Y. Li, J. M. Hernandez-Lobato and R. E. Turner, "Stochastic expectation propagation",
       NeurIPS 2015.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklearn_ep import EPGaussianProcessClassifier
    >>> X, y = make_moons(80, noise=0.2, random_state=0)
    >>> clf = EPGaussianProcessClassifier().fit(X, y)
    >>> clf.converged_
    True
    >>> clf.predict_proba([[0.5, 0.25]]).shape
    (1, 2)
    """

    def __init__(
        self,
        kernel=None,
        *,
        method="auto",
        likelihood="probit",
        n_inducing=None,
        inducing_points=None,
        learn_inducing="auto",
        optimizer="auto",
        n_restarts_optimizer=0,
        batch_size=None,
        learning_rate=0.05,
        damping=0.7,
        acceleration="anderson",
        max_iter=150,
        max_sweeps=100,
        tol=1e-3,
        site_memory="scalars",
        n_partitions=None,
        jitter=1e-6,
        copy_X_train=True,
        warm_start=False,
        multi_class="one_vs_rest",
        n_jobs=None,
        random_state=None,
        verbose=0,
    ):
        self.kernel = kernel
        self.method = method
        self.likelihood = likelihood
        self.n_inducing = n_inducing
        self.inducing_points = inducing_points
        self.learn_inducing = learn_inducing
        self.optimizer = optimizer
        self.n_restarts_optimizer = n_restarts_optimizer
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.damping = damping
        self.acceleration = acceleration
        self.max_iter = max_iter
        self.max_sweeps = max_sweeps
        self.tol = tol
        self.site_memory = site_memory
        self.n_partitions = n_partitions
        self.jitter = jitter
        self.copy_X_train = copy_X_train
        self.warm_start = warm_start
        self.multi_class = multi_class
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self):
        check_common(self)
        self._check_gp_parameters()
        self._check_sparse_parameters()
        if not isinstance(self.likelihood, Factor):
            check_choice("likelihood", self.likelihood, list(LIKELIHOODS))
        check_choice("acceleration", self.acceleration, ["anderson", None])
        check_number("max_sweeps", self.max_sweeps, 1, integer=True)

    def _factor(self):
        if isinstance(self.likelihood, Factor):
            return self.likelihood
        return LIKELIHOODS[self.likelihood]()

    @restore_on_error
    @with_callbacks
    def fit(self, X, y=None, sample_weight=None):
        """Fit the classifier.

        Parameters
        ----------
        X : array-like of shape (n, d), or list of partitions
            Training rows; standardise the columns first unless they share a unit. For the sparse
            method also a list of partitions, with `y` None: each a tuple (X, y) of arrays or memory
            maps, a function without arguments that returns one, or a dask future of one.
            Partitions are sent to the workers once, loaders run there at every pass.
        y : array-like of shape (n,), default=None
            Class labels; None only for a list of partitions.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row, not necessarily integers: an integer weight equals repeating the
            row, zero leaves it out.

        Returns
        -------
        self : EPGaussianProcessClassifier
            The fitted estimator.

        Raises
        ------
        ValueError
            If a parameter, the data or the weights are not usable, or if the kernel is not positive
            definite on the data. The estimator is then as it was before.
        """
        self._check_parameters()
        self._link = self._factor()
        if is_part_list(X, y):
            self.method_ = "sparse"
            return self._fit_part_list(X, sample_weight)
        training = validate_training(self, X, y, sample_weight, dtype=(np.float64, np.float32))
        if self._is_sparse(len(training.y)):
            self.method_ = "sparse"
            parts, kept = array_parts(training, self.n_partitions), training.kept
            del training
            return self._fit_sparse(parts, False, kept, X, y)
        self.method_ = "dense"
        training = training._replace(X=training.X.astype(np.float64, copy=False))
        if self.copy_X_train and np.may_share_memory(training.X, X):
            training = training._replace(X=training.X.copy())
        self._forget_sparse()
        return self._fit_problem(self._dense_problem(training), fit_dense, training, X, y)

    def _dense_problem(self, training):
        kernel = self._initial_kernel(training)
        check_kernel(kernel, self_covariance(kernel, training.X))
        n_problems = 1 if len(self.classes_) == 2 else len(self.classes_)
        starts, sites = self._warm(n_problems, len(training.y), kernel)
        learn = self.optimizer is not None
        restarts = random_starts(
            kernel.bounds,
            self.n_restarts_optimizer if learn else 0,
            check_random_state(self.random_state),
        )
        return DenseProblem(
            X=training.X,
            weight=training.weight,
            kernel=kernel,
            factor=self._link,
            rule=MomentMatching(),
            learn=learn,
            restarts=restarts,
            starts=starts,
            sites=sites,
            tol=self.tol,
            max_iter=self.max_iter,
            max_sweeps=self.max_sweeps,
            damping=self.damping,
            accelerate=self.acceleration is not None,
        )
