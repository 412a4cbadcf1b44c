"""Gaussian-process classification by expectation propagation."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.multiclass import check_classification_targets

from .._engine.contracts import FACTOR_NEEDS, require
from .._engine.likelihoods import LIKELIHOODS
from .._engine.partition import PartMap
from .._engine.rules import Power
from .._estimator import checks
from .._estimator.annotations import RowsLike, Seed, TrainingRows
from .._estimator.compat import with_callbacks
from .._estimator.fitting import FitMonitor, fit_method, fit_problems
from .._estimator.row_parts import array_parts
from . import _base as base
from ._dense import plan_dense
from ._dense_fit import fit_dense
from ._hyperparameters import wants_average
from .inducing import fit as inducing
from .inducing.learning import STEP_RULES
from .inducing.rows import check_part_list, described
from .inducing.stream import check_stream, fit_stream, plan_stream


def _check_inducing_parameters(estimator):
    """Check the parameters that only matter with inducing points."""
    if not isinstance(estimator.learn_inducing, bool | np.bool_):
        checks.check_choice("learn_inducing", estimator.learn_inducing, ["auto"], "a bool")
    if not callable(estimator.optimizer):
        rules = ["auto", "fmin_l_bfgs_b", *STEP_RULES, None]
        checks.check_choice("optimizer", estimator.optimizer, rules, "a function")
    elif estimator.method == "sparse" or estimator._asks_for_inducing:
        raise ValueError("a callable optimizer belongs to method='dense'.")
    checks.check_number("batch_size", estimator.batch_size, 1, integer=True, optional=True)
    checks.check_positive("learning_rate", estimator.learning_rate, finite=True)
    checks.check_choice("site_memory", estimator.site_memory, ["scalars", "average"])
    checks.check_number("n_partitions", estimator.n_partitions, 1, integer=True, optional=True)
    if estimator.batch_size is not None and estimator.optimizer == "fmin_l_bfgs_b":
        raise ValueError(
            "batch_size needs an optimizer that takes steps: one of "
            f"{list(STEP_RULES)} or 'auto', got optimizer='fmin_l_bfgs_b'."
        )
    if estimator.method == "dense" and estimator.optimizer in STEP_RULES:
        raise ValueError(
            f"optimizer={estimator.optimizer!r} belongs to method='sparse'; the dense method "
            "learns by 'fmin_l_bfgs_b'."
        )


def _takes_joint(estimator, through_points, begins=False):
    """Return whether all classes get one joint posterior; refuse settings that exclude it.

    Sites of a fit that `begins` with some rows are the cheaper for it.
    """
    average = through_points and estimator.site_memory == "average"
    settings = {
        f"likelihood={estimator.likelihood!r}": not isinstance(estimator.likelihood, str),
        f"power={estimator.power!r}": estimator.power < 1,
        "site_memory='average'": average,
    }
    allowed = base.allows_joint(estimator, through_points, settings)
    asked, several = estimator.multi_class == "joint", len(estimator.classes_) > 2
    wanted = asked or (several and estimator.multi_class == "auto")
    # with a kernel to learn, passes of one class against the rest are the cheaper default
    affordable = asked or not through_points or estimator.optimizer is None or begins
    return wanted and affordable and allowed


class EPGaussianProcessClassifier(base.GaussianProcessBase):
    """Gaussian-process classifier with the posterior of expectation propagation.

    **You will set** `kernel`, `hyperparameters`, `n_inducing`, `multi_class` and `class_weight`.
    Leave the other parameters at their defaults.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel, default=None
        Prior covariance of the latent function. None is ``ConstantKernel(1) * RBF(l)`` with l three
        times the root of the total variance of the columns, a smooth start on any scale of X.
        Columns of a pandas or polars data frame that hold text, categories or bools are coded as
        indicators, which share a length by column (`kernels.GroupedRBF`): a missing value is a
        level, and unseen levels are as far from each level as two levels are from each other. A
        kernel that does not require vectors (strings, graphs) takes the rows of X as they are, with
        the dense method. Where `kernel_` is at a bound of a given kernel a ConvergenceWarning says
        so; the mean of an average seldom is. Learning through inducing points starts with lengths
        about the spread of the rows where those of a given kernel join all points to each other, or
        none.
    method : {"auto", "dense", "sparse"}, default="auto"
        "dense" keeps the full covariance matrix of the rows; "sparse" goes through inducing points
        (FITC), with cost linear in the rows. "auto" is dense up to 2000 rows; up to 1000 for at
        most eight classes (1600 classes times points) with ``kernel=None`` and
        ``hyperparameters="auto"``. It is sparse beyond, and where `inducing_points`, `batch_size`,
        an averaged site or an optimizer of the sparse method are given. Equal rows of one label
        count as one, here and in the cost of a dense fit.
    likelihood : {"probit", "logit"} or Factor, default="probit"
        p(y | f). The probit has the cheapest closed form. Any `Factor` of the engine is accepted.
    power : float, default=1.0
        Share of each factor whose moments are matched, in (0, 1]. 1 is expectation propagation;
        towards 0 it becomes variational inference, which minimises the reverse divergence [5]_.
        Below 1 classes are fitted one against the rest, and each row costs a quadrature of some
        1000 nodes a sweep. Compare powers by held-out scores: each has another approximation of the
        evidence.
    n_inducing : int, default=None
        Number of inducing points m of the sparse method. None is 100, or all distinct rows where
        those are fewer; with 100 a pass costs about as much in the kernel as in the algebra. Where
        ``kernel=None`` is learned on some rows first (see Notes) it is 200 up to 4000 rows, and
        falls to 100 at 16,000. A UserWarning says so where there are fewer distinct rows than asked
        for.
    inducing_points : array-like of shape (m, d), default=None
        Inducing points to start from; None chooses them by a few steps of k-means from random rows.
        Distances are in units of the length scales where an RBF or Matern kernel has one for each
        column, otherwise of the spread of each column.
    learn_inducing : bool or "auto", default="auto"
        Move the inducing points along the gradient of the evidence. "auto" does so from 2000 rows
        on, where the evidence no longer overfits them, for kernels of constants, RBF and Matern; of
        up to eight classes with ``kernel=None`` above 1000. True asks for it with fewer rows, under
        the heaviest kernel of the dense average where that is averaged over (see Notes).
    optimizer : {"auto", "fmin_l_bfgs_b", "adam", "adadelta", "sign_rate"}, callable or None, \
            default="auto"
        How the kernel parameters (and inducing points) are learned from the evidence; None keeps
        them. L-BFGS-B evaluates the evidence at fixed points of EP. The others are of the sparse
        method and take a step after each pass: "sign_rate" is the rule of [1]_, "adadelta" takes
        steps in the units of past ones. "auto" is L-BFGS-B for dense and Adam for sparse, which
        needs half the time. A callable belongs to the dense
        method and is that of scikit-learn: ``optimizer(obj_func, initial_theta, bounds)`` returns
        theta and the value there, ``obj_func(theta, eval_gradient=True)`` the negative evidence and
        its gradient.
    n_restarts_optimizer : int, default=0
        Further starts of L-BFGS-B drawn within the bounds of the kernel; the largest evidence is
        kept.
    batch_size : int, default=None
        Learn in minibatches of so many rows, spread over the partitions; the full passes that
        follow remove their noise.
    learning_rate : float, default=0.05
        Rate of the step rules: for Adam the size of a step in log parameters and in standard
        deviations of the columns. 0.01 suits minibatches.
    damping : float, default=0.7
        Share of an update that is taken, in (0, 1]. With acceleration the mixing of its steps.
        Minibatches take the first update of a row whole; there [1]_ uses 0.99. An averaged site is
        damped by its average instead, until the full passes.
    acceleration : {"anderson"} or None, default="anderson"
        Anderson acceleration of the parallel updates. Without it, and with `damping` near one, the
        updates oscillate for kernels of large amplitude.
    max_iter : int, default=150
        Largest number of optimiser steps, or of epochs with `batch_size`; with ``optimizer=None``
        of sweeps, as `max_sweeps`. From 10,000 rows on the sparse method shares out 1.2 times as
        many steps, see the notes.
    max_sweeps : int, default=100
        Largest number of sweeps over the sites at fixed kernel parameters.
    tol : float, default=1e-3
        A fit has converged once an undamped sweep changes every site by less than this, measured in
        posterior standard deviations. The error of the evidence is of second order in it.
    site_memory : {"scalars", "average"}, default="scalars"
        "scalars" keeps two numbers a row. "average" gives every row the average of all sites (Li et
        al. 2015): m^2 numbers whatever n, and nearly the same posterior once n is many times m.
        Kernels are learned by the gradient at sites that stay, which then only nears that of the
        log evidence as rows grow in number.
    n_partitions : int, default=None
        Pieces of the rows in passes of the sparse method, for `n_jobs` workers; None is one piece.
        The answer does not depend on it beyond rounding, except that every piece has its share of
        the rows of a minibatch.
    jitter : float, default=1e-6
        Relative addition to the diagonal of the covariance of inducing points.
    copy_X_train : bool, default=True
        Dense: keep a copy of X for prediction; False keeps a reference. The sparse method predicts
        without the rows and only ever keeps a reference, for `log_marginal_likelihood`.
    warm_start : bool, default=False
        Start from the sites and kernel of the last fit where the number of rows is the same, and
        their spread is within a factor of ten.
    multi_class : {"auto", "joint", "one_vs_rest"}, default="auto"
        How more than two classes are fitted. "joint" has one latent function for each class under
        one kernel, and the label is the class with the largest noisy value (multinomial probit, or
        softmax with likelihood="logit"): better where classes overlap or enclose each other.
        "one_vs_rest" fits one binary problem a class, each with a kernel of its own if dense.
        "auto" is joint for the dense method, and for the sparse one with ``optimizer=None`` or
        where the kernel is learned on some rows first (see Notes). It is one_vs_rest otherwise,
        which is cheaper for many rows. An averaged site, a likelihood that is an object and a
        `power` below 1 are one_vs_rest, as are more than 4000 classes times inducing points: with
        "joint" a ValueError says so. Two classes are one binary problem in either case. Where
        "auto" is joint and a kernel is learned, predictions have the variances that rows left out
        ask for (`variance_temper_`); with "joint" they are those of the posterior.
    class_weight : dict, "balanced" or None, default=None
        Weight of each class, positive, by which the copies of its rows are multiplied as by
        `sample_weight`; 1 for a class that a dict leaves out. "balanced" makes the copies of all
        classes equal, their sum kept. Lists of partitions take None, `partial_fit` a dict or None.
    hyperparameters : {"auto", "integrate", "mode"}, default="auto"
        Whether predictions allow for a kernel that is not known. "mode" predicts with the kernel of
        the largest evidence. "integrate" averages over variance and length of the kernel by their
        posterior, and over the ratios of the lengths where it has several. Through inducing points
        it averages over the kernel with the points where the mode put them. Averages need a
        constant times RBF or Matern; a UserWarning names settings that allow the mode only.

        "auto" averages for dense fits to at most 1000 rows, and then gives ``kernel=None`` a length
        scale for each of 2 to 500 columns, as free to differ as the evidence says. It is "mode"
        with more rows, where the evidence is sharp, for several classes jointly under one length,
        and through inducing points. There fits of up to 1000 rows have a prior of the lengths, and
        two rules hold with ``kernel=None``. Two classes of up to 500 rows, at most seven a point,
        have the dense average; up to 800 rows if points are told to move (see Notes). With more
        than 1000 rows (of more than eight classes above 2000), where a step rule learns, each of 2
        to 500 columns has a length under that prior. With up to eight classes learning then starts
        from the average over 800 of the rows.

        Of latent values at 40 rows, 90 % intervals cover .65 with the mode and .90 with the
        average. At 60 rows through 30 points the average covers .92. Lengths for each column lower
        the log loss on 200 rows of splice from .422 to .297, and on 250 rows of image segments from
        .208 to .130. With six classes jointly (300 rows) it falls from .695 to .573. Through
        inducing points that of 1200 rows falls from .269 to .141 on splice, and from .089 to .060
        on image segments.
    n_jobs : int or None, default=None
        Workers: if dense for the nodes of an average, or for one-versus-rest problems; if sparse
        for the partitions of the rows.
    random_state : int, RandomState instance or None, default=None
        Seed of the restarts, of the choice of inducing points and of the order of minibatches.
    verbose : int, default=0
        1 prints a line for each iteration, and for each phase of learning or integration before or
        after them, with the seconds since the fit began; 2 for each step of a phase as well.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    kernel_ : Kernel
        Kernel with the learned parameters, after an average the weighted means of their logs. A
        CompoundKernel for the dense method with one class against the rest; otherwise all classes
        share one kernel.
    hyperparameters_used_ : {"integrate", "mode"}
        What was done with the hyperparameters.
    hyper_nodes_ : ndarray of shape (M, T), or list of them
        Nodes of the average: logs of the variance and of the geometric mean of the lengths, as far
        as they are learned; one node with the mode. Of kernels that are not averaged over it has
        all parameters. Where each class has a kernel of its own this is a list with an entry a
        class, as are the weights, `hyper_theta_` and `hyper_anisotropy_`.
    hyper_weights_ : ndarray of shape (M,), or list of them
        Their weights, positive, of sum one.
    hyper_names_ : tuple of str
        What `hyper_nodes_` holds: "log_variance" and "log_length_scale", or of other kernels names
        such as "log_k2__alpha".
    hyper_theta_ : ndarray of shape (M, p), or list of them
        All kernel parameters of the nodes, as in ``kernel_.theta``.
    hyper_anisotropy_ : ndarray of shape (M,), or list of them
        Prior standard deviation of the log lengths about their mean at each node: 0 where they are
        equal, infinite for several lengths at the mode, nan for other kernels.
    effective_lengths_ : float or ndarray of shape (n_classes,)
        How many ratios of lengths the rows tell, at most d - 1 and 0 where lengths are equal: the
        trace of H (H + I / s^2)^-1 for the expected curvature H of the log evidence in the log
        lengths less their mean, in the mean over s. The labels of all rows have chosen them, so
        that the sum of the logs of `loo_proba_` is too good by about two nats each. Absent with the
        mode.
    log_evidence_ : float
        EP approximation of log p(y), summed over the binary problems; of an average that of the
        integral over the hyperparameters under their priors.
    log_marginal_likelihood_value_ : float
        The same, under the name of scikit-learn.
    multi_class_ : str
        "joint" if all classes share a posterior, else "one_vs_rest", as for two classes.
    variance_temper_ : float or None
        Factor of the posterior variances that predictions of several classes count with (see
        Notes); None where they count as they are.
    method_ : str
        The method in use.
    inducing_points_ : ndarray of shape (m, d)
        Sparse: the inducing points.
    inducing_mean_ : ndarray of shape (m,), or (n_classes, m)
        Sparse: posterior mean of the latent function at them.
    inducing_cov_ : ndarray of shape (m, m), or (n_classes, m, m)
        Sparse: posterior covariance of the latent function at them.
    learn_inducing_ : bool
        Sparse: whether they were moved, which ``learn_inducing="auto"`` leaves to the data.
    site_precision_ : ndarray of shape (n,), or (n_classes, n)
        Precision of the site of each row; of an average at its heaviest node; absent with an
        averaged site.
    site_shift_ : ndarray of shape (n,), or (n_classes, n)
        Precision times mean of the site of each row; absent with an averaged site.
    loo_proba_ : ndarray of shape (n,)
        Probability of each row's own label given the other rows, of which copies of it are none;
        nan for rows of weight zero, absent with an averaged site. Kernels are kept, and nodes of an
        average that predicted the label weigh less without the row. Streams know the copies of one
        call.
    stream_log_score_ : ndarray of shape (n_calls,)
        Mean log probability of the labels of each call of `partial_fit` before they were learned;
        nan where there was no model before. A fall is a sign of drift. Only for streams.
    n_sweeps_ : int
        Sweeps of the last run at fixed kernel parameters.
    n_iter_ : int
        Optimiser steps plus sweeps of the run that was kept, or one entry for the average.
    stop_reason_ : {"converged", "max_iter", "asked", "stuck"}
        Why the fit ended, the worst of learning and sweeps: both converged, one used up its
        iterations, a callback asked to stop, or no better step was found.
    converged_ : bool
        Whether learning ended by its own rule and the residual of an undamped sweep fell below
        `tol`; see the notes.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" and "log_evidence" at each iteration; of an average those of the search for its
        mode, then the residual at the heaviest node and the evidence of all. "phase" says what kind
        of iteration each was: "learning step", "pass", "epoch", "iteration", a sweep, or
        "integration over hyperparameters".
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    Notes
    -----
    A dense sweep costs 2 n^3 / 3 flops and the fit n^2 numbers of memory; an evaluation of the
    evidence with its gradient four to six sweeps. Prediction costs O(n^2) a row.

    An average weighs its nodes by evidence times prior. The prior of the variance is log-normal
    with median 4, in units of the noise of the link. The standard deviation of its log is 1.5, or 2
    where columns have lengths of their own. The prior of the length is log-normal about the root of
    the total variance of the columns, with standard deviation 1. With more than two classes jointly
    the standard deviations are 6 and 2, nearly flat: where classes are separable variances in the
    hundreds predict best. Under one length nodes are a grid about the mode [4]_, some 20 of them,
    each two or three sweeps from the next; from 300 rows on they are four.

    Where there are several lengths, the deviations of their logs from the mean are N(0, s^2), with
    s of 0, 0.5, 1 and 2 equally probable. Each s has four nodes about its mode, weighed by
    importance sampling. Together they weigh the evidence of s times the volume of the deviations.
    An s of little weight has its mode alone: below a weight of 0.02 with 100 rows, below one of
    0.5 with 200, and any with 300. Equal lengths (s = 0) weigh 0.2 at least; where they weigh no
    more, their mode is their only node. Below 100 rows equal lengths have a grid, and the nodes of
    the others take its covariance and equal weights. From 300 rows on modes are found on a third
    of the rows first. With all rows only equal lengths and the s that is predicted to be best are
    evaluated. With more than two classes jointly the grid is short. From 100 rows on there are
    modes only, found on a third of the rows from 150 on.

    `decision_function` is the mean over all nodes, and `predict` takes the class of the largest
    mixed probability, so that at the boundary the two may differ. An average under one length takes
    1 to 2 times as long as the mode. With lengths for each column it takes 1.3 to 4 times as long,
    more with more columns. Memory and predictions grow with the nodes.

    A sparse sweep costs 3 n m^2 flops, one with the gradient 7 n m^2, besides O(n m d) for the
    kernel. Rows are taken in blocks: memory beyond X is a few numbers a row and m^2, so that X may
    be a memory map. With no more points than columns a fit keeps n m numbers as well, up to 2 GB.
    From 10,000 rows on learning begins with some of them, of which up to 1/8 GB is copied.
    Classes share kernel, inducing points and passes. An additive noise variance would only rescale
    the kernel and is no parameter.

    Of K classes jointly a sparse sweep costs some 3 K^2 m^2 flops a row, with or without the
    gradient, and (K m)^3 for the posterior. One against the rest takes 3 K m^2 a row, 7 K m^2 with
    the gradient. Memory is (K m)^2 numbers and 2 K a row. Partitions, minibatches and streams work
    as with two classes [6]_. The gradient leaves out how the sites of more than two classes move,
    as that of the dense method does. The kernel is not averaged over.

    From 10,000 rows on the step rules begin with passes over a tenth, a quarter and half of the
    rows, but not fewer than 2000. They take 40, 40 and 27 % of `max_iter` steps, which `history_`
    leaves out. The last 13.5 % are over all rows. This is 2.5 times as fast as with all rows
    throughout. With up to eight classes and ``kernel=None`` above 1000 rows learning starts from
    the heaviest node of the dense average over about 800 distinct rows. The passes over shares of
    the rows are then fewer, by the share of the rows that they see. Above 2000 rows passes are in
    single precision; sweeps at the learned kernel are in double. Of several classes the passes fit
    each against the rest, and the sweeps all jointly.

    Points that move along the evidence of EP fit noise. By default the passes of the step rules
    therefore follow that of power EP with exponent .8, to first order in the variance that the
    points leave open [5]_. The sweeps that follow are those of EP, and so is `log_evidence_`.
    Minibatches, an averaged site, another `power`, all classes jointly and
    ``hyperparameters="mode"`` learn by their own evidence.

    Two classes with up to 500 rows, at most seven a point, follow the dense average where the
    optimizer is "auto". There the rows say more of the kernel than the points do. The nodes of the
    dense average keep their weights, their sites and `log_evidence_`. Of all posteriors through the
    points theirs is the nearest to the dense one [8]_, and the same where all rows are points. Over
    64 sets of up to 500 rows the log loss is .007 above the dense one with 15 % of the rows as
    points, and .0007 with 40 %. It is .0016 below that of EP through the same points at the same
    kernels.

    With ``learn_inducing=True`` this holds up to 800 rows. Points then move towards the dense
    posterior of the heaviest node, until a step gains less than .0003 of the bound on its evidence
    or `max_iter` steps are taken. On the same sets the log loss is .0017 and .0002 above the dense
    one. With sonar's 187 rows it is .316, .307 and .302 at 15, 25 and 50 % (dense .301). Along the
    gradient of EP's evidence points ended at .337, .330 and .320.

    Through inducing points many lengths overfit the evidence of few rows. Up to 1000 rows, and
    where ``kernel=None`` has a length for each column, learning therefore adds a log prior: a
    multivariate t distribution of the log lengths about their mean (scale .75, 4 degrees of
    freedom). ``hyperparameters="mode"`` learns by the evidence alone. `log_evidence_` is without
    the prior.

    Where several classes are clean, their joint posterior is often wider than it should be. By
    default predictions therefore multiply its variances by a factor, `variance_temper_`, at which
    rows are well predicted from the others: a tempered posterior [7]_. The factor maximises the
    gain in leave-one-out log probability over a factor of one. Two standard errors over the rows
    are taken from this gain, since the kernel was learned from the same rows. The log of the factor
    has a standard normal prior. The factor holds for probabilities, their intervals and draws, and
    `loo_proba_`.
    `latent_mean_and_variance` and `latent_covariance` are those of the posterior, and so are
    predictions of two classes.

    L-BFGS-B ends by its own rules, at relative changes of the evidence below 1e-6. Several classes
    jointly end at 2e-6, and a search that only says where the nodes of an average lie ends at 1e-4.
    The step rules end once 15 passes raise the evidence by less than 1e-5 of its value. At
    `max_iter` they count as converged if the last 15 raised it by less than .005 nats a row, beyond
    which further passes hardly change predictions. After passes over shares of the rows .01 nats
    are enough, from 13.5 % of `max_iter` on. Epochs of minibatches are a budget, and using it up is
    their end.

    Where the kernel can separate the labels the evidence keeps rising with the amplitude, which
    then ends at its bound; EP itself converges there.

    References
    ----------
    .. [1] D. Hernandez-Lobato and J. M. Hernandez-Lobato, "Scalable Gaussian process classification
       via expectation propagation", AISTATS 2016.
    .. [2] C. E. Rasmussen and C. K. I. Williams, "Gaussian Processes for Machine Learning", MIT
       Press, 2006, section 3.6.
    .. [3] Y. Li, J. M. Hernandez-Lobato and R. E. Turner, "Stochastic expectation propagation",
       NeurIPS 2015.
    .. [4] H. Rue, S. Martino and N. Chopin, "Approximate Bayesian inference for latent Gaussian
       models by using integrated nested Laplace approximations", JRSS B 71, 2009, section 6.5.
    .. [5] T. D. Bui, J. Yan and R. E. Turner, "A unifying framework for Gaussian process
       pseudo-point approximations using power expectation propagation", JMLR 18, 2017.
    .. [6] C. Villacampa-Calvo and D. Hernandez-Lobato, "Scalable multi-class Gaussian process
       classification using expectation propagation", ICML 2017. Their sites keep classes apart.
    .. [7] P. Gruenwald, "The safe Bayesian: learning the learning rate via the mixability gap",
       ALT 2012.
    .. [8] M. K. Titsias, "Variational learning of inducing variables in sparse Gaussian processes",
       AISTATS 2009.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklearn_ep import EPGaussianProcessClassifier
    >>> X, y = make_moons(80, noise=0.2, random_state=0)
    >>> clf = EPGaussianProcessClassifier().fit(X, y)
    >>> clf.predict_proba([[0.5, 0.25], [9.0, 9.0]]).round(1)  # far from all rows nothing is known
    array([[0.4, 0.6],
           [0.5, 0.5]])
    """

    def __init__(
        self,
        kernel: Any = None,
        *,
        method: str = "auto",
        likelihood: str = "probit",
        power: float = 1.0,
        n_inducing: int | None = None,
        inducing_points: ArrayLike | None = None,
        learn_inducing: bool | str = "auto",
        optimizer: str | Callable[..., Any] | None = "auto",
        n_restarts_optimizer: int = 0,
        batch_size: int | None = None,
        learning_rate: float = 0.05,
        damping: float = 0.7,
        acceleration: str | None = "anderson",
        max_iter: int = 150,
        max_sweeps: int = 100,
        tol: float = 1e-3,
        site_memory: str = "scalars",
        n_partitions: int | None = None,
        jitter: float = 1e-6,
        copy_X_train: bool = True,
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
        self.likelihood = likelihood
        self.power = power
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
        self.class_weight = class_weight
        self.hyperparameters = hyperparameters
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self):
        checks.check_common(self)
        self._check_gp_parameters()
        _check_inducing_parameters(self)
        if any(hasattr(self.likelihood, name) for name in ("tilted", "log_prob")):
            require("factor", self.likelihood, (*FACTOR_NEEDS, "log_prob"), "likelihood")
        else:
            other = "an object with log_prob"
            checks.check_choice("likelihood", self.likelihood, list(LIKELIHOODS), other)
        checks.check_number("power", self.power, 0, 1, boundaries="right")
        if self.power < 1:
            require("factor", base.factor_of(self), Power.factor_needs, f"power={self.power}")
        checks.check_choice("multi_class", self.multi_class, ["auto", "joint", "one_vs_rest"])
        checks.check_choice("acceleration", self.acceleration, ["anderson", None])
        checks.check_number("max_sweeps", self.max_sweeps, 1, integer=True)

    @property
    def _asks_for_inducing(self):
        given = self.inducing_points is not None or self.batch_size is not None
        return given or self.site_memory == "average" or self.optimizer in STEP_RULES

    @property
    def _needs_all_rows(self):
        """Whether parameters other than `method` ask for the dense method."""
        return callable(self.optimizer) or self._takes_objects

    def _through_points(self, n_rows):
        """Return whether a fit to so many rows goes through inducing points."""
        free = self.method == "auto" and not self._asks_for_inducing
        if free and self._needs_all_rows:
            return False
        some_first = free and base.begins_with_some_rows(self, n_rows)
        return some_first or super()._through_points(n_rows)

    @fit_method
    @with_callbacks
    def fit(
        self, X: TrainingRows, y: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Fit the classifier.

        Parameters
        ----------
        X : array-like of shape (n, d), list of objects, or list of partitions
            Training rows, objects for a kernel that takes them; standardise the columns first
            unless they share a unit. For the sparse method also a list of partitions, with `y`
            None: each a tuple (X, y) of arrays or memory maps, a function without arguments that
            returns one, or a dask future of one. Partitions are sent to the workers once, loaders
            run there at every pass, with `batch_size` at every step.
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
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If a parameter, the data or the weights are not usable, or if the kernel is not positive
            definite on the data. The estimator is then as it was before.
        """
        self._check_parameters()
        if checks.is_unweighted_part_list(X, y, sample_weight):
            check_part_list(self)
            self._coder = None
            return self._fit_inducing(X, None, X, y)
        training = self._training(X, y, sample_weight, dtype=(np.float64, np.float32))
        distinct, copies = base.without_copies(training, self.kernel)
        if self._through_points(len(distinct.y)):
            parts, kept = array_parts(training, self.n_partitions), training.kept
            del training, distinct
            return self._fit_inducing(parts, kept, X, y)
        training = distinct
        if not self._takes_objects:
            training = training._replace(X=training.X.astype(np.float64, copy=False))
        if self.copy_X_train and np.may_share_memory(training.X, X):
            training = training._replace(X=training.X.copy())
        joint = _takes_joint(self, False)
        plan = plan_dense(self, training, joint)
        fits = fit_problems(self, plan, fit_dense, training.y, None, (X, y), joint)
        spread = base.spread_of(self, training)
        fit = base.joined_fits(fits, training.y, spread, joint, copies=copies)
        told = dict(variance_temper_=fit.temper) | base.attributes_of_lengths(fit)
        return self._store(plan, fit, training.kept, **told)

    def _fit_inducing(self, parts, kept, X, y):
        """Fit to partitions; `kept` marks the rows of the caller, None for the user's own."""
        seed = checks.draw_seed(self.random_state)
        with PartMap(parts, self.n_jobs) as run:
            data, kept = described(self, run, kept, seed)
            begins = base.begins_with_some_rows(self, sum(data.sizes))
            joint = _takes_joint(self, True, begins)
            monitor, known = FitMonitor(self, X, y, None, inducing.attributes_so_far), None
            anew = begins and not inducing.may_start_warm(self, data)
            if anew or inducing.averages_as_dense(self, data):
                known = inducing.kernels_of_some_rows(self, run, data, monitor, joint)
            plan = inducing.plan_inducing(self, data, joint, seed, known)
            fit = inducing.fit_inducing(plan, run, monitor)
            monitor.finish()
        told = dict(learn_inducing_=plan.learn_inducing, variance_temper_=fit.temper)
        told |= base.attributes_of_lengths(fit)
        return self._store(plan, fit, kept, **told)

    @fit_method
    def partial_fit(
        self,
        X: RowsLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        *,
        forgetting: float = 1.0,
    ) -> Self:
        """Take in further rows, each seen once.

        Parameters
        ----------
        X : array-like of shape (n, d)
            New rows. The first call sets the number of columns and, unless they are given, chooses
            the inducing points; later calls add some until there are `n_inducing`.
        y : array-like of shape (n,)
            Labels out of `classes`; a batch may hold one class alone.
        classes : array-like of shape (n_classes,), default=None
            All labels that will ever come. Needed at the first call unless `fit` was called before.
        forgetting : float, default=1.0
            Share in (0, 1] that the rows of earlier calls still count for, so that those of k calls
            ago count as ``forgetting**k`` of a row; below one the posterior follows a stream that
            drifts. One forgets nothing.

        Returns
        -------
        self : EPGaussianProcessClassifier
            The estimator with the rows added to its posterior.

        Raises
        ------
        TypeError
            If a parameter is of another type than stated, such as a string in place of a number.
        ValueError
            If the data or a parameter are not usable, if `classes` is missing at the first call,
            if `y` has labels outside `classes`, or with ``class_weight="balanced"``, which would
            need all rows. The estimator is then as it was before.

        Notes
        -----
        The posterior so far is the prior of the new rows, whose sites EP refines until `tol`; the
        sites of older rows stay as they are. Unless ``optimizer=None`` the kernel first takes a
        stochastic step for every ten rows, block by block of some 200. Steps are the rarer the more
        than 1000 rows were seen, or than 100 where the kernel comes from a dense average; inducing
        points stay. It waits until rows of two classes have come. The sparse method is used
        whatever `method` says; after a dense fit its rows are taken in again, once, before the new
        ones. So are, at the default kernel and two classes, the first rows of a stream once there
        are more than 1000: like `fit` it then learns a length for each column from 800 of them.

        Cost is linear in the rows of a call. A sweep takes 3 n m^2 flops, and there are at most
        `max_sweeps`. Learning takes 20 to 40 passes of 7 n m^2. It takes two once 10,000 rows were
        seen, or 1000 where the kernel comes from a dense average. Memory is m^2 numbers, and with
        ``site_memory="scalars"`` two numbers for every row that was ever seen; "average" keeps none
        of them. Up to 1000 rows wait for the lengths.
        """
        self._check_parameters()
        checks.check_number("forgetting", forgetting, 0, 1, boundaries="right")
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' needs all rows, which partial_fit does not see: give "
                "a dict."
            )
        wants_average(self, 0, {"partial_fit": True})
        check_stream(self)
        X, y = self._checked_stream_rows(X, y, classes)
        last, joint = getattr(self, "_fitted", None), _takes_joint(self, True)
        if last is not None and last.inducing_points is not None:
            joint = last.joint  # the posterior so far
        plan = plan_stream(self, joint)
        told = dict(variance_temper_=None, learn_inducing_=False)
        told["stream_log_score_"] = self._score_before(X, y)
        fit, kept = fit_stream(self, plan, X, y, forgetting), np.ones(len(X), dtype=bool)
        return self._store(None, fit, kept, **told)

    def _score_before(self, X, y):
        """Return the log scores of the stream, with that of rows and class indices to come."""
        scores, new = getattr(self, "stream_log_score_", np.empty(0)), np.nan
        if hasattr(self, "_fitted"):
            self._posteriors = self._fitted.posteriors  # hidden while rows are taken in
            new = np.mean(self._latents().log_proba(X)[np.arange(len(y)), y])  # X was checked
            del self._posteriors
        return np.append(scores, new)

    def _checked_stream_rows(self, X, y, classes):
        """Return rows and class indices of a call of `partial_fit`."""
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        X, y = checks.validated(self, X, y, reset=first, dtype=np.float64)
        if first and self.kernel is None:
            checks.warn_of_spreads(self, X)
        check_classification_targets(y)
        known = np.unique(classes) if first else self.classes_
        if len(known) < 2:
            raise ValueError(f"classes has only one class, {known[0]!r}; a classifier needs two.")
        if classes is not None and not np.array_equal(np.unique(classes), known):
            raise ValueError(f"classes={classes!r} differs from those of the first call, {known}.")
        unknown = np.setdiff1d(y, known)
        if len(unknown):
            raise ValueError(f"y has labels that are not in classes: {unknown}.")
        self.classes_ = known
        return X, np.searchsorted(known, y)
