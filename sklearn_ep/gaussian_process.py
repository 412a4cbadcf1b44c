"""Gaussian-process classification by expectation propagation."""

import numpy as np
from sklearn.utils import check_random_state

from ._base import check_choice, check_common, check_number, restore_on_error, validate_training
from ._compat import with_callbacks
from ._engine.factors import LIKELIHOODS, Factor
from ._engine.kernels import self_covariance
from ._engine.learning import random_starts
from ._engine.rules import MomentMatching
from ._gp_base import DenseProblem, GaussianProcessBase, check_kernel, fit_dense

__all__ = ["EPGaussianProcessClassifier"]


class EPGaussianProcessClassifier(GaussianProcessBase):
    """Gaussian-process classifier with the posterior of expectation propagation.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel, default=None
        Prior covariance of the latent function. None is ``ConstantKernel(1) * RBF(l)`` with l three
        times the root of the total variance of the columns, a smooth start on any scale of X.
    method : {"auto", "dense"}, default="auto"
        "dense" keeps a site on every row and the full covariance matrix.
    likelihood : {"probit", "logit"} or Factor, default="probit"
        p(y | f). The probit has the cheapest closed form. Any `Factor` of the engine is accepted.
    optimizer : {"auto", "fmin_l_bfgs_b"} or None, default="auto"
        How the kernel parameters are learned from the evidence; None keeps the kernel.
    n_restarts_optimizer : int, default=0
        Further starts drawn within the bounds of the kernel; the largest evidence is kept.
    damping : float, default=0.7
        Share of an update that is taken, in (0, 1]. With acceleration the mixing of its steps.
    acceleration : {"anderson"} or None, default="anderson"
        Anderson acceleration of the parallel updates. Without it, and with `damping` near one, the
        updates oscillate for kernels of large amplitude.
    max_iter : int, default=150
        Largest number of optimiser steps; with ``optimizer=None`` of sweeps, as `max_sweeps`.
    max_sweeps : int, default=100
        Largest number of sweeps over the sites at fixed kernel parameters.
    tol : float, default=1e-3
        A fit has converged once an undamped sweep changes every site by less than this, measured in
        posterior standard deviations. The error of the evidence is of second order in it.
    jitter : float, default=1e-6
        Relative addition to the diagonal of the covariance of inducing points.
    copy_X_train : bool, default=True
        Keep a copy of X for prediction; False keeps a reference.
    warm_start : bool, default=False
        Start from the sites and kernel of the last fit where the number of rows is the same.
    multi_class : {"one_vs_rest"}, default="one_vs_rest"
        More than two classes are fitted as one binary problem each.
    n_jobs : int or None, default=None
        Workers for the binary problems of more than two classes.
    random_state : int, RandomState instance or None, default=None
        Seed of the restarts.
    verbose : int, default=0
        Print a line an iteration.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    kernel_ : Kernel
        Kernel with the learned parameters; a CompoundKernel for more than two classes.
    log_evidence_ : float
        EP approximation of log p(y), summed over the binary problems.
    log_marginal_likelihood_value_ : float
        The same, under the name of scikit-learn.
    method_ : str
        The method in use.
    site_precision_, site_shift_ : ndarray of shape (n,), or (n_classes, n)
        Natural parameters of the site of each row.
    loo_proba_ : ndarray of shape (n,)
        Probability of each row's own label under its cavity: leave-one-out prediction for free; nan
        for rows of weight zero.
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

    With labels that the kernel can separate the evidence keeps rising with the amplitude, which
    then ends at its bound; EP itself converges there.

    References
    ----------
    .. [1] D. Hernandez-Lobato and J. M. Hernandez-Lobato, "Scalable Gaussian process classification
       via expectation propagation", AISTATS 2016.
    .. [2] C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", MIT
       Press, 2006, section 3.6.

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
        optimizer="auto",
        n_restarts_optimizer=0,
        damping=0.7,
        acceleration="anderson",
        max_iter=150,
        max_sweeps=100,
        tol=1e-3,
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
        self.optimizer = optimizer
        self.n_restarts_optimizer = n_restarts_optimizer
        self.damping = damping
        self.acceleration = acceleration
        self.max_iter = max_iter
        self.max_sweeps = max_sweeps
        self.tol = tol
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
        check_choice("method", self.method, ["auto", "dense"])
        if not isinstance(self.likelihood, Factor):
            check_choice("likelihood", self.likelihood, list(LIKELIHOODS))
        check_choice("optimizer", self.optimizer, ["auto", "fmin_l_bfgs_b", None])
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
        X : array-like of shape (n, d)
            Training rows; standardise the columns first unless they share a unit.
        y : array-like of shape (n,)
            Class labels.
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
        training = validate_training(self, X, y, sample_weight)
        if self.copy_X_train and np.may_share_memory(training.X, X):
            training = training._replace(X=training.X.copy())
        self._link = self._factor()
        self.method_ = "dense"
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
