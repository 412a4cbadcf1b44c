"""Gaussian-process classification when labels may be wrong."""

import warnings
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from joblib import effective_n_jobs
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.utils import check_random_state

from .._engine.likelihoods import LabelNoise
from .._engine.partition import PartMap
from .._engine.rules import MomentMatching, Power
from .._estimator import checks
from .._estimator.annotations import Seed, TrainingRows
from .._estimator.compat import with_callbacks
from .._estimator.fitting import fit_method, fit_problems, one_or_stack
from .._estimator.latents import JointLatents, is_joint
from .._estimator.row_parts import array_parts
from . import _base as base
from ._hyperparameters import kernel_settings, random_starts, scale_prior, wants_average
from ._kernels import span_coordinates, with_theta
from ._limits import LIMITS
from .inducing.rows import check_part_list, described, first_points, labels_and_copies
from .label_errors.classes import ClassLabels
from .label_errors.fit import fit_label_errors
from .label_errors.parted import PartedErrors, fit_parted_errors
from .label_errors.problem import RATE_COUNTS, BinaryLabels, ErrorAveraging, LabelErrorPlan, Setting


class ErrorDefaults(NamedTuple):
    """The default kernel and priors of `RelaxedEPClassifier`."""

    # rate at which learning starts: from small ones it may end in a poor local optimum that
    # explains wrong labels by a wiggly function
    rate: float = 0.25
    # variance of the kernel in units of the latent noise, where learning starts and of a kernel
    # that is kept; beyond the upper bound the likelihood is nearly a bare step, for which parallel
    # EP cycles
    variance: float = 5.0
    kept_variance: float = 1.0
    bounds: tuple[float, float] = (1e-2, 20.0)
    # the same without errors, where nothing is unreliable about large ones
    plain_bounds: tuple[float, float] = (1e-3, 1e3)
    # length in units of the root of the total variance, where learning starts and where it is
    # expected: from the shorter one learning is faster, a kernel that is kept has to be smooth
    length: float = 1.25
    smooth: float = 3.0
    # standard deviations of the logs of variance and length under the priors of an average: wiggly
    # functions explain wrong labels, so the length is held a little closer than without them
    spreads: tuple[float, float] = (1.5, 0.7)
    plain_spreads: tuple[float, float] = (1.5, 1.0)
    # Beta prior of the rate that expects a tenth of wrong labels, of hyperparameters="integrate"
    few_errors: tuple[float, float] = (1.0, 9.0)


DEFAULTS = ErrorDefaults()


class RelaxedEPClassifier(base.GaussianProcessBase):
    """Gaussian-process classifier for labels that may be wrong.

    The observed label is the sign of a noisy latent function, exchanged with a probability that is
    learned. Sites may then have negative precision: a row can count against its own label.

    **You will set** `hyperparameters`, `label_noise`, `no_errors`, `predict_clean` and
    `n_inducing`. Leave the other parameters at their defaults.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel, default=None
        Prior covariance of the latent function f. None is ``ConstantKernel * RBF(l)``. The length l
        starts at 1.25 times the root of the total variance of the columns, the amplitude at 5 times
        the latent noise (3 and 1 with ``optimizer=None``). The amplitude is at most 20, since EP is
        unreliable beyond. Where few of the columns count, give a length for each, as by ``5.0 *
        RBF(np.ones(d))``: their ratios have a prior that keeps them from explaining wrong labels.
        With a fifth of the labels wrong the mean log loss of 34 tables of 100 to 300 rows is .282
        (.291 with one length). With none wrong it is .215 (.217). Either takes 1.7 times the time.
        A kernel that does not require vectors (strings, graphs) takes the rows of X as they are,
        with the dense method. Where `kernel_` is at a bound of a given kernel a ConvergenceWarning
        says so; the mean of an average seldom is.
    method : {"auto", "dense", "sequential", "sparse"}, default="auto"
        "dense" keeps the full covariance matrix, "sparse" goes through inducing points. "auto" is
        sparse beyond 1000 rows, beyond 2000 with the mode or ``optimizer=None``, and where
        `n_inducing` or `inducing_points` are given. Equal rows of one label count as one, here and
        in the cost of a dense fit. "sequential" is "dense" whose sweeps after learning change one
        row after another as in [1]_, where all others change all rows at once, accelerated. With
        the rules "ep" and "power" both have the same fixed points. A sequential sweep costs O(n^3),
        as a parallel one, and a call of the rule in Python at every row. It takes one latent
        function: "auto" of `multi_class` is then one_vs_rest.
    n_inducing : int or None, default=None
        Number of inducing points, chosen by k-means in units of the spread of each column. None
        stands for 400 up to 2000 rows and ever fewer for more, so that the cost does not fall: 100
        from 32,000 rows on.
    inducing_points : array-like of shape (m, d) or None, default=None
        Inducing points, instead of chosen ones.
    n_partitions : int or None, default=None
        Pieces of the rows in a fit through inducing points, for `n_jobs` workers. The answer does
        not depend on it beyond rounding. None keeps the covariances of all rows with the inducing
        points in memory, where for up to 2000 rows the convergent double loop is the last resort.
    learn_inducing : bool, default=False
        Move the inducing points along the gradient of the evidence while the kernel is learned.
        False, because with wrong labels moving them tends to overfit.
    rule : {"relaxed", "power", "ep"}, default="relaxed"
        How the moments of a row are matched: "ep" exactly, "power" with a fraction of the factor,
        "relaxed" where the divergence saved is worth `relaxation`. Several classes jointly are
        matched exactly with "relaxed", too.
    relaxation : float, default=0.2
        Penalty of the relaxation of a row, dimensionless. Near .2 a few rows relax, at .05 many;
        ``np.inf`` is EP. Measured on several sets no value is better than EP by more than two
        standard errors, and .2 costs nothing.
    cost : {"mass", "normalised"}, default="mass"
        Divergence that relaxation weighs: of the unnormalised pair of distributions, which
        converges more often, or of the normalised one.
    power : float, default=0.5
        Share of the factor that ``rule="power"`` matches, in (0, 1].
    label_noise : float or "learn", default="learn"
        Probability of a wrong label, in [0, 0.5); of several classes each other one is then as
        probable. "learn" averages over its posterior, or with the mode maximises the evidence,
        under a Beta(3, 9) prior that matters with few rows only.
    no_errors : float, default=0.05
        Prior probability in [0, 1) that no label is wrong, used where the rate is averaged over. It
        limits the loss where labels are right but ambiguous; set 0 where some are known to be
        wrong.
    latent_noise : float, default=1.0
        Variance of the white noise between f and the sign; only the ratio of the kernel to it
        matters. Values near zero give the plain step likelihood. The default kernel scales with it,
        so that another value has no effect without a kernel; a UserWarning says so.
    optimizer : {"fmin_l_bfgs_b"} or None, default="fmin_l_bfgs_b"
        How the kernel is learned from the evidence; None keeps it.
    n_restarts_optimizer : int, default=0
        Further starts drawn within the bounds of the kernel.
    freeze_after : int, default=15
        Sweeps after which the relaxation of each row is kept, since it may alternate without end.
    predict_clean : bool, default=True
        Predict the true class; False predicts the label as it would be observed. Score against
        labels that may be wrong, such as in a grid search, with ``predict_clean=False``.
    damping : float, default=0.5
        Share of an update that is taken, in (0, 1]: the mixing of Anderson acceleration.
    max_iter : int, default=200
        Largest number of optimiser steps, and of sweeps after them.
    tol : float, default=1e-3
        A fit has converged once an undamped sweep changes every site by less than this, measured in
        posterior standard deviations.
    jitter : float, default=1e-6
        Relative addition to the diagonal of the covariance of inducing points.
    warm_start : bool, default=False
        Start from the sites and hyperparameters of the last fit where the number of rows is the
        same, and their spread is within a factor of ten.
    multi_class : {"auto", "joint", "one_vs_rest"}, default="auto"
        How more than two classes are fitted. "joint" has one latent function for each class under
        one kernel and one rate of wrong labels: the true class is the one with the largest noisy
        value, and a wrong label is any other with equal probability. "one_vs_rest" fits one binary
        problem a class, each with a kernel and a rate of its own. "auto" is joint for the dense
        method unless ``rule="power"`` or ``method="sequential"``. On 300 rows with .15 of the
        labels wrong, four classes have a log loss of .20 jointly and of .23 one against the rest.
        Ten classes have .60 and .68. On iris, wine and three generated classes both are alike. A
        joint fit takes 1 to 3 times as long. Through inducing points, where "auto" is one_vs_rest,
        "joint" takes 100 of them and the mode. More than 4000 classes times inducing points, and
        ``rule="power"``, are a ValueError.
    class_weight : dict, "balanced" or None, default=None
        Weight of each class, positive, by which the copies of its rows are multiplied as by
        `sample_weight`; 1 for a class that a dict leaves out. "balanced" makes the copies of all
        classes equal, their sum kept.
    hyperparameters : {"auto", "integrate", "mode"}, default="auto"
        "mode" predicts with the kernel and the rate of the largest posterior. The others average
        over variance and length of the kernel and the rate of wrong labels, and over there being no
        errors, for any number of rows in memory. "auto" expects about a quarter of wrong labels by
        a Beta(3, 9) prior of the rate, "integrate" a tenth by a Beta(1, 9) prior. `noise_proba_` is
        calibrated where that share is wrong. Take rows whose `noise_proba_` is .5 to .65. With a
        fifth of all labels wrong, .57 of these rows are wrong with "auto". With a tenth wrong it is
        .60 with "integrate", but .37 with "auto". With the mode under half of the rows at .8 are
        wrong. The mean log loss of six sets without wrong labels is .349 with the mode, .322 with
        "auto" and .311 with "integrate". With a fifth of the labels wrong it is .451, .441 and
        .458. Averages need a constant times RBF or Matern; a UserWarning names settings that allow
        the mode only.
    n_jobs : int or None, default=None
        Workers for the binary problems of more than two classes, for the nodes of an average of
        two, or for the partitions of the rows.
    random_state : int, RandomState instance or None, default=None
        Seed of the restarts.
    verbose : int, default=0
        1 prints a line for each iteration, and for each phase of learning or integration before or
        after them, with the seconds since the fit began; 2 for each step of a phase as well.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    kernel_ : Kernel
        Kernel with the learned parameters, after an average the weighted means of their logs; a
        CompoundKernel for one class against the rest.
    label_noise_ : float, or ndarray of shape (n_classes,)
        Probability of a wrong label, the posterior mean of an average; one of each one-versus-rest
        problem, as in all arrays below with an entry a class.
    no_errors_proba_ : float, or ndarray of shape (n_classes,)
        Posterior probability that no label is wrong, 0 with the mode.
    hyperparameters_used_ : {"integrate", "mode"}
        What was done with the hyperparameters.
    hyper_nodes_ : ndarray of shape (M, T), or list of them
        Nodes of the average at rates above zero: logs of the variance and of the geometric mean of
        the lengths, and the logit of the rate, as far as they are learned. One node with the mode,
        and where these rates have less than two per cent of the probability. For one class against
        the rest this is a list with an entry a class, as are the weights, `hyper_theta_` and
        `hyper_anisotropy_`.
    hyper_weights_ : ndarray of shape (M,), or list of them
        Their weights, positive, of sum one.
    hyper_names_ : tuple of str
        What `hyper_nodes_` holds: "log_variance", "log_length_scale", "logit_label_noise".
    hyper_theta_ : ndarray of shape (M, p), or list of them
        All kernel parameters of the nodes, as in ``kernel_.theta``.
    hyper_anisotropy_ : ndarray of shape (M,), or list of them
        0, or infinite where a kernel has several lengths, whose ratios are those of the mode.
    noise_proba_ : ndarray of shape (n,)
        Posterior probability that the label of the row is wrong, given all other rows. For one
        class against the rest it is from the problem of the row's own; nan for rows of weight zero.
    relaxation_ : ndarray of shape (n,), or (n_classes, n)
        Relaxation of each row, 0 for exact moment matching. A diagnostic of the algorithm: rows
        with right labels relax as well. For an average it is from the heaviest node, as
        `solver_path_` and the sites; at the others moments are matched exactly, or by a power.
    solver_path_ : list of str
        The rules and fallbacks that ran, in order; one list a class for one against the rest.
    log_evidence_ : float
        Approximation of log p(y) by the rule in use, summed over the binary problems; of an average
        that of the integral over kernel and rate under their priors.
    log_marginal_likelihood_value_ : float
        The same, under the name of scikit-learn.
    multi_class_ : str
        "joint" if all classes share a posterior, else "one_vs_rest", as for two classes.
    method_ : str
        The method in use.
    site_precision_ : ndarray of shape (n,), or (n_classes, n)
        Precision of the site of each row on f plus latent noise; of all classes jointly that of the
        links of the latent value of each to the utility of the label, negative where that is
        suspect.
    site_shift_ : ndarray of shape (n,), or (n_classes, n)
        Precision times mean of the same site, of all classes jointly its shifts.
    inducing_points_ : ndarray of shape (m, d), or (n_classes, m, d)
        Inducing points; this and the next two with the sparse method only. Each of several classes
        has its own where they are learned.
    inducing_mean_ : ndarray of shape (m,), or (n_classes, m)
        Posterior mean of the inducing values.
    inducing_cov_ : ndarray of shape (m, m), or (n_classes, m, m)
        Posterior covariance of the inducing values.
    loo_proba_ : ndarray of shape (n,)
        Probability of each row's own observed label without the row and its copies; nan for rows of
        weight zero.
    n_sweeps_ : int
        Sweeps after learning.
    n_iter_ : int
        Optimiser steps plus sweeps of the run that was kept, or one entry for the average.
    stop_reason_ : {"converged", "max_iter", "asked", "stuck"}
        Why the fit ended, the worst of learning and sweeps: both converged, one used up its
        iterations, a callback asked to stop, or no better step was found.
    converged_ : bool
        Whether learning ended by the rules of L-BFGS-B, and the residual of an undamped sweep fell
        below `tol`. Learning ends at relative changes of the evidence below 3e-4 with the mode, and
        below 1e-4 for an average.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and "log_evidence" at each iteration. "phase" is its kind: "learning step",
        "pass", "epoch", "iteration" (a sweep), or "integration over hyperparameters", with the
        residual of the heaviest node and the evidence of all.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    Notes
    -----
    Memory and time are those of EP for a Gaussian process: n^2 numbers, at most 2 n^3 / 3 flops a
    sweep and 4 n^2 k more for k sites of negative precision; with m inducing points n m numbers
    and 3 n m^2 flops. With inducing points the noise of a site includes the variance of f given
    the inducing values. Over partitions memory beyond X is a few numbers a row and m^2.

    An average weighs nodes by evidence times prior. The variance has a log-normal prior with median
    4 times the latent noise, and standard deviation 1.5 of its log. The length has one about the
    root of the total variance of the columns, with 0.7. The rate is at most 0.45. Nodes for labels
    without errors, with a common length of the columns, are added. The more probable of the two
    models has a grid about its mode [4]_, some 10 nodes of three coordinates, and fewer from 300
    rows on. The other one, and both from 601 rows on, have two nodes along each axis, weighed by
    importance sampling. A model with a share below .02 has its mode alone. Of more than two classes
    jointly, whose gradient is not exact, nodes are always two along each axis, and one without
    errors. From 150 rows on the mode is found on a third of the rows first; with inducing points
    from 1001 rows on, on 800 rows at most and without the points.

    With the mode, kernel and rate are learned by EP (or power EP), whose evidence is stationary in
    the sites; relaxed EP then runs at these values. Learning adds weak log priors to the evidence:
    amplitude over latent noise log-normal around 4, rate Beta(3, 9), and for the default kernel a
    length scale log-Cauchy around three times the root of the total variance.

    A run that does not converge in its share of the sweeps is continued with less damping, and then
    by a double loop [3]_ with Newton steps. It is EP, or power EP with that rule, and it always
    converges: its log evidence never falls. A step costs 20 to 40 sweeps, and takes memory of
    32 n^2 numbers.
    With more than 2000 rows, and over partitions, the last resort is power EP, which may not
    converge. Of several classes jointly it is less damping. `solver_path_` lists what ran.

    The joint likelihood is that of [5]_, with the sites of the multinomial probit. The gradient
    that learns them leaves out how sites move, as that of `EPGaussianProcessClassifier` does. Each
    class costs 2 n^3 flops a sweep and n^2 m more for m negative links.

    References
    ----------
    .. [1] Y. Qi and Y. Guo, "Message passing with relaxed moment matching", arXiv:1204.4166, 2012.
    .. [2] T. P. Minka, "Power EP", Microsoft Research MSR-TR-2004-149, 2004.
    .. [3] T. Heskes and O. Zoeter, "Expectation propagation for approximate inference in dynamic
       Bayesian networks", UAI 2002.
    .. [4] H. Rue, S. Martino and N. Chopin, "Approximate Bayesian inference for latent Gaussian
       models by using integrated nested Laplace approximations", JRSS B 71, 2009, section 6.5.
    .. [5] D. Hernandez-Lobato, J. M. Hernandez-Lobato and P. Dupont, "Robust multi-class Gaussian
       process classification", NIPS 2011.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import RelaxedEPClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(60, 2))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> y[np.argmax(X[:, 0])] = 0
    >>> clf = RelaxedEPClassifier().fit(X, y)
    >>> print(f"most suspect: row {np.argmax(clf.noise_proba_)}, wrong: row {np.argmax(X[:, 0])}")
    most suspect: row 37, wrong: row 37
    """

    noise_proba_: np.ndarray
    label_noise_: Any
    no_errors_proba_: Any

    def __init__(
        self,
        kernel: Any = None,
        *,
        method: str = "auto",
        n_inducing: int | None = None,
        inducing_points: ArrayLike | None = None,
        n_partitions: int | None = None,
        learn_inducing: bool = False,
        rule: str = "relaxed",
        relaxation: float = 0.2,
        cost: str = "mass",
        power: float = 0.5,
        label_noise: float | str = "learn",
        no_errors: float = 0.05,
        latent_noise: float = 1.0,
        optimizer: str | None = "fmin_l_bfgs_b",
        n_restarts_optimizer: int = 0,
        freeze_after: int = 15,
        predict_clean: bool = True,
        damping: float = 0.5,
        max_iter: int = 200,
        tol: float = 1e-3,
        jitter: float = 1e-6,
        warm_start: bool = False,
        multi_class: str = "auto",
        class_weight: dict[Any, float] | str | None = None,
        hyperparameters: str = "auto",
        n_jobs: int | None = None,
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.kernel = kernel
        self.method = method
        self.n_inducing = n_inducing
        self.inducing_points = inducing_points
        self.n_partitions = n_partitions
        self.learn_inducing = learn_inducing
        self.rule = rule
        self.relaxation = relaxation
        self.cost = cost
        self.power = power
        self.label_noise = label_noise
        self.no_errors = no_errors
        self.latent_noise = latent_noise
        self.optimizer = optimizer
        self.n_restarts_optimizer = n_restarts_optimizer
        self.freeze_after = freeze_after
        self.predict_clean = predict_clean
        self.damping = damping
        self.max_iter = max_iter
        self.tol = tol
        self.jitter = jitter
        self.warm_start = warm_start
        self.multi_class = multi_class
        self.class_weight = class_weight
        self.hyperparameters = hyperparameters
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    _methods = ("auto", "dense", "sequential", "sparse")

    def _check_parameters(self):
        checks.check_common(self)
        self._check_gp_parameters()
        checks.check_choice("rule", self.rule, ["relaxed", "power", "ep"])
        checks.check_number("relaxation", self.relaxation, 0, boundaries="neither")
        checks.check_choice("cost", self.cost, ["mass", "normalised"])
        checks.check_number("power", self.power, 0, 1, boundaries="right")
        if isinstance(self.label_noise, str):
            checks.check_choice("label_noise", self.label_noise, ["learn"], "a number below .5")
        else:
            checks.check_number("label_noise", self.label_noise, 0, 0.5, boundaries="left")
        checks.check_number("no_errors", self.no_errors, 0, 1, boundaries="left")
        checks.check_positive("latent_noise", self.latent_noise, finite=True)
        checks.check_choice("optimizer", self.optimizer, ["fmin_l_bfgs_b", None])
        checks.check_choice("multi_class", self.multi_class, ["auto", "joint", "one_vs_rest"])
        checks.check_number("freeze_after", self.freeze_after, 0, integer=True)
        checks.check_number("n_partitions", self.n_partitions, 1, integer=True, optional=True)
        for name in ("predict_clean", "learn_inducing"):
            checks.check_flag(name, getattr(self, name))

    @fit_method
    @with_callbacks
    def fit(
        self, X: TrainingRows, y: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Fit the classifier.

        Parameters
        ----------
        X : array-like of shape (n, d), list of objects, or list of partitions
            Training rows; standardise the columns first unless they share a unit. For inducing
            points also a list of partitions, with `y` None: each a tuple (X, y) of arrays or memory
            maps, a function without arguments that returns one, or a dask future of one.
        y : array-like of shape (n,), default=None
            Observed class labels, some of which may be wrong; None only for a list of partitions.
        sample_weight : array-like of shape (n,), default=None
            Copies of each row, not necessarily integers: an integer weight equals repeating the
            row, zero leaves it out. It says nothing of how far a label is to be trusted.

        Returns
        -------
        self : RelaxedEPClassifier
            The fitted estimator.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter, the data or the weights are not usable, or if the kernel is not positive
            definite on the data. The estimator is then as it was before.
        """
        self._check_parameters()
        if checks.is_unweighted_part_list(X, y, sample_weight):
            check_part_list(self)
            wants_average(self, 0, {"a list of partitions": True})
            self._coder = None
            return self._fit_parts(X, None, X, y)
        training = self._training(X, y, sample_weight)
        distinct, copies = base.without_copies(training, self.kernel)
        through = self._through_points(len(distinct.y))
        joint = self._takes_joint(through)
        if through and (joint or self.n_partitions is not None):
            parted = "inducing points of several classes jointly"
            setting = parted if joint else f"n_partitions={self.n_partitions}"
            wants_average(self, len(training.y), {setting: True})
            return self._fit_parts(array_parts(training, self.n_partitions), training.kept, X, y)
        training = distinct
        if np.may_share_memory(training.X, X):
            training = training._replace(X=training.X.copy())
        plan = self._plan_of(training, joint)
        fits = fit_problems(self, plan, fit_label_errors, training.y, None, (X, y), joint)
        spread, own_points = base.spread_of(self, training), plan.unit is not None
        fit = base.joined_fits(fits, training.y, spread, joint, own_points, copies)
        more = self._label_attributes(fit, training.y, training.kept)
        return self._store(plan, fit, training.kept, **more)

    def _fit_parts(self, parts, kept, X, y):
        """Fit to partitions; `kept` marks the rows of the caller, None for the user's own."""
        rng = check_random_state(self.random_state)
        with PartMap(parts, self.n_jobs) as run:
            seed = checks.draw_seed(rng)
            data, kept = described(self, run, kept, seed)
            joint, spread = self._takes_joint(True), data.spread or 1.0
            m = base.inducing_count(self) if joint else self._inducing_count(data.weight)
            Z = first_points(self, data.candidates, data.candidate_weight, seed, m=m)
            nobody = np.zeros(sum(data.sizes), dtype=int)
            plan = self._plan_with(nobody, joint, rng, spread, Z, data.units.spread)
            problem, fit_one = PartedErrors(plan, data), partial(fit_parted_errors, run)
            fits = fit_problems(self, problem, fit_one, None, None, (X, y), joint)
            y = labels_and_copies(run, data)[0]
        fit = base.joined_fits(fits, y, spread, joint, own_points=plan.unit is not None)
        return self._store(problem, fit, kept, **self._label_attributes(fit, y, kept))

    @property
    def _asks_for_inducing(self):
        return self.n_inducing is not None or self.inducing_points is not None

    def _through_points(self, n_rows):
        # an average through points is as dear as a dense one where it takes over, a mode cheaper
        averages = self.hyperparameters != "mode" and self.optimizer is not None
        many = averages and self.method == "auto" and n_rows > LIMITS.averaged
        return (many and not self._takes_objects) or super()._through_points(n_rows)

    def _inducing_count(self, weight):
        return base.inducing_count(self, weight, LIMITS.points_errors, LIMITS.few_points_errors)

    def _initial_kernel(self, spread):
        if self.kernel is not None:
            return clone(self.kernel)
        if self.latent_noise != 1.0:
            message = (
                f"latent_noise={self.latent_noise} does nothing with kernel=None, which scales "
                "with it: give a kernel, or leave latent_noise at 1."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        low, high = (self.latent_noise * b for b in DEFAULTS.bounds)
        kept = self.optimizer is None
        size = (DEFAULTS.kept_variance if kept else DEFAULTS.variance) * self.latent_noise
        amplitude = ConstantKernel(size, (low, high))
        length = (DEFAULTS.smooth if kept else DEFAULTS.length) * spread
        return amplitude * RBF(length, (0.03 * spread, 3e3 * spread))

    def _first_settings(self, empty, kernel, Z, spread):
        """Return the `Setting`s and sites at which the problems start, else from `empty` ones."""
        starts, sites = base.last_sites(self._last_fit, kernel, empty, spread)
        rate = DEFAULTS.rate if self.label_noise == "learn" else float(self.label_noise)
        settings = [Setting(with_theta(kernel, theta), rate, Z) for theta in starts]
        if np.any(sites[0][1]):
            pairs = zip(settings, self._fitted.runs, strict=True)
            settings = [self._going_on(s, f.attributes["setting"]) for s, f in pairs]
        return settings, sites

    def _going_on(self, first, last):
        """Return a first `Setting` with what was learned last time."""
        if self.label_noise == "learn":
            first = first._replace(rate=last.rate)
        free = self.learn_inducing and first.points is not None and self.inducing_points is None
        if free and last.points is not None and last.points.shape == first.points.shape:
            first = first._replace(points=last.points)
        return first

    def _plan_of(self, training, joint=False):
        """Return the `LabelErrorPlan` of rows in memory."""
        X, spread = training.X, base.spread_of(self, training)
        rng = check_random_state(self.random_state)
        seed, Z, unit = checks.draw_seed(rng), None, None
        if self._through_points(len(X)):
            m = self._inducing_count(training.weight.sum())
            Z = first_points(self, X, training.weight, seed, m=m)
            unit = base.column_spread(X, training.weight)
        return self._plan_with(training.y, joint, rng, spread, Z, unit, training)

    def _takes_joint(self, through_points):
        """Return whether all classes get one joint posterior; refuse settings that exclude it."""
        several = len(self.classes_) > 2 and self.multi_class == "auto" and not through_points
        if not several and self.multi_class != "joint":
            return False
        excludes = {
            "rule='power'": self.rule == "power",
            "method='sequential'": self.method == "sequential",
        }
        return base.allows_joint(self, through_points, excludes)

    def _plan_with(self, y, joint, rng, spread, Z, unit, training=None):
        """Return the `LabelErrorPlan` of inducing points or None; rows may be elsewhere.

        `unit` (d,) is the spread of the columns, y are labels, or anything where the rows are not.
        """
        kernel, rows = self._initial_kernel(spread), {}
        base.check_kernel(kernel, kernel(training.X) if Z is None else kernel(Z, Z))
        labels: Any = ClassLabels(len(self.classes_)) if joint else BinaryLabels()
        empty = np.stack([labels.empty_sites(y)] * checks.count_problems(self, joint))
        if training is None:
            empty = np.zeros_like(empty)
        else:
            averaging = self._averaging(training, kernel, len(empty) == 1)
            rows = dict(X=training.X, y=y, weight=training.weight, averaging=averaging)
            rows["coordinates"] = span_coordinates(kernel, training.X)
        settings, sites = self._first_settings(empty, kernel, Z, spread)
        learn = self.optimizer is not None
        move_points = learn and bool(self.learn_inducing) and Z is not None
        if move_points:
            base.check_input_gradient(kernel)
        n_restarts = self.n_restarts_optimizer if learn else 0
        relaxes = self.rule == "relaxed" and np.isfinite(self.relaxation)
        return LabelErrorPlan(
            kernel=kernel,
            labels=labels,
            rule=Power(self.power) if self.rule == "power" else MomentMatching(),
            learn=learn,
            restarts=random_starts(kernel.bounds, n_restarts, rng),
            settings=settings,
            sites=sites,
            tol=self.tol,
            max_iter=self.max_iter,
            damping=self.damping,
            noise=float(self.latent_noise),
            learn_rate=self.label_noise == "learn",
            relaxed=(self.relaxation, self.cost, self.freeze_after) if relaxes else None,
            length_centre=DEFAULTS.smooth * spread if self.kernel is None else None,
            unit=unit if move_points else None,
            jitter=float(self.jitter),
            in_turn=self.method == "sequential",
            **rows,
        )

    def _averaging(self, training, kernel, one_problem):
        """Return how to average over hyperparameters, None for the mode."""
        learn, learn_rate = self.optimizer is not None, self.label_noise == "learn"
        settings = {"nothing to learn": not (learn or learn_rate)}
        settings |= kernel_settings(kernel) if learn else {}
        if not wants_average(self, 0, settings):
            return None
        noise, spread, plain = float(self.latent_noise), base.spread_of(self, training), None
        link = LabelNoise(0.0, noise)
        if learn and self.kernel is None:
            low, high = (noise * b for b in DEFAULTS.plain_bounds)
            plain = ConstantKernel(kernel.k1.constant_value, (low, high)) * kernel.k2
        return ErrorAveraging(
            prior=scale_prior(link, spread, *DEFAULTS.spreads),
            rate_counts=RATE_COUNTS if self.hyperparameters == "auto" else DEFAULTS.few_errors,
            no_errors=float(self.no_errors),
            plain_kernel=plain,
            plain_prior=scale_prior(link, spread, *DEFAULTS.plain_spreads),
            n_jobs=effective_n_jobs(self.n_jobs) if one_problem else 1,
        )

    def _label_attributes(self, fit, labels, kept):
        """Return the attributes that only label errors bring, for `_store`."""
        names = "label_noise", "no_errors_proba", "relaxation", "wrong_proba", "path"
        own = {name: [f.attributes[name] for f in fit.runs] for name in names}
        wrong = np.stack(own["wrong_proba"])
        k = np.zeros(len(labels), dtype=int) if len(wrong) == 1 else labels
        wrong_labels = fit.of_rows(wrong[k, np.arange(len(labels))])
        return dict(
            label_noise_=one_or_stack(own["label_noise"]),
            no_errors_proba_=one_or_stack(own["no_errors_proba"]),
            relaxation_=checks.spread_rows(fit.of_rows(one_or_stack(own["relaxation"])), kept),
            noise_proba_=checks.spread_rows(wrong_labels, kept, np.nan),
            solver_path_=own["path"][0] if len(wrong) == 1 else own["path"],
        )

    def _figures(self):
        return {"label noise": self.label_noise_, **super()._figures()}

    def _links(self):
        links = super()._links()
        return [LabelNoise(0.0, f.noise) for f in links] if self.predict_clean else links

    def _latents(self):
        if self.predict_clean and is_joint(self._posteriors):
            return JointLatents(self._posteriors[0], self._posteriors[0].factor.winner)
        return super()._latents()
