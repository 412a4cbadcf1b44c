"""What the GP classifiers share: kernels, attributes, evidence and diagnosis of a fit."""

import warnings

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, CompoundKernel, ConstantKernel, Kernel
from sklearn.utils import check_array, check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_is_fitted

from .._engine.class_sites import ClassSites, class_log_weights
from .._engine.diagnostics import site_log_weights
from .._engine.gaussian import ImproperPosterior, jittered_cholesky
from .._estimator.averaged import average_remarks, check_hyperparameters
from .._estimator.checks import (
    check_choice,
    check_number,
    checked_weights,
    spread_rows,
    validate_training,
)
from .._estimator.fitting import one_or_stack, remarks_of, run_attributes, warn_not_converged
from .._estimator.latents import draw_latent
from .._estimator.posterior_classifier import PosteriorClassifier
from ._dense_gp import DenseGPPosterior
from ._fitted import attributes_of_averages, averages_of, signs_of
from ._joint_gp import JointGPPosterior
from ._kernels import has_input_gradient, with_theta
from .inducing.rows import (
    check_scale,
    choose_inducing_points,
    describe,
    n_candidate_rows,
    weighted_mean,
)

__all__ = [
    "DEFAULT_INDUCING",
    "FEW_ROWS",
    "GaussianProcessBase",
    "check_input_gradient",
    "check_kernel",
    "column_spread",
    "draw_seed",
    "root_variance",
    "smooth_kernel",
    "warn_fewer_inducing",
]

DEFAULT_INDUCING = 100
# Distance in logs at which a parameter counts as being at its bound.
_AT_BOUND = 1e-5
# Rows up to which "auto" keeps the full covariance matrix and the inducing points where they are.
FEW_ROWS = 2000
# Attributes that not every fit has.
_OPTIONAL = ["inducing_points_", "inducing_mean_", "inducing_cov_", "learn_inducing_"]
_OPTIONAL += ["site_precision_", "site_shift_", "loo_proba_"]


def column_spread(X, weight):
    """Return the standard deviations (d,) of the columns, or raise a ValueError that names X."""
    with np.errstate(over="ignore", invalid="ignore"):
        var = weight @ (X - weighted_mean(X, weight)) ** 2 / weight.sum()
    check_scale(float(np.sum(var)), varies=np.any(X != X[0]))
    return np.sqrt(var)


def root_variance(X, weight):
    """Return the root of the total variance of the columns, 1 where that is 0."""
    return float(np.linalg.norm(column_spread(X, weight))) or 1.0


def check_input_gradient(kernel):
    """Raise a ValueError unless inducing points can be moved along the gradient of the kernel."""
    if not has_input_gradient(kernel):
        raise ValueError(
            f"learn_inducing=True needs derivatives in the inputs, which {kernel} lacks: use "
            "constants, RBF and Matern, or learn_inducing=False."
        )


def smooth_kernel(total_variance):
    """Return ConstantKernel(1) * RBF(l) with l three times the root of the total variance.

    The total variance of the columns measures distances without drawing pairs (l / 3 is about the
    median distance over sqrt(2)) and does not change when weights are written out as repeated rows.
    Three of them make a smooth start: learning goes from nearly linear functions to wigglier ones,
    and an unlearned kernel does not fall back to the prior between the rows.
    """
    scale = 3.0 * float(np.sqrt(total_variance)) or 1.0
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF(scale, (1e-2 * scale, 1e3 * scale))


def check_kernel(kernel, K):
    """Raise a ValueError unless a kernel matrix is finite and positive semidefinite."""
    if not np.all(np.isfinite(K)):
        raise ValueError(f"kernel {kernel} gives NaN or infinity on these data; scale the columns.")
    try:
        jittered_cholesky(K, 1e-10, largest=1e-6)
    except ImproperPosterior as error:
        raise ValueError(
            f"kernel {kernel} is not positive definite on these data; use a positive definite "
            "kernel, or add a WhiteKernel to it."
        ) from error


def warn_fewer_inducing(estimator, Z):
    """Warn where `n_inducing` asks for other inducing points than the ones (m, d) in use."""
    asked, given = estimator.n_inducing, estimator.inducing_points is not None
    if asked is None or (len(Z) == asked if given else len(Z) >= asked):
        return
    why = (
        "inducing_points are given" if given else f"there are {len(Z)} distinct rows to choose from"
    )
    message = f"n_inducing={asked} does nothing, because {why}: all {len(Z)} of them are used; "
    message += f"leave n_inducing out, or set it to {'their number' if given else 'fewer'}."
    warnings.warn(message, UserWarning, stacklevel=2)


def draw_seed(random_state):
    """Return a seed out of a random state: workers and later calls draw from it alike."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def object_rows(X):
    """Return rows of whatever kind as an array of which a kernel can be given a part."""
    if hasattr(X, "__array__"):
        return np.asarray(X)
    if sp.issparse(X) or not hasattr(X, "__len__"):
        raise ValueError(f"X must be a sequence of rows that the kernel takes, got {type(X)}.")
    rows = np.empty(len(X), dtype=object)
    for i, row in enumerate(X):  # one by one: numpy would look into rows that are sequences
        rows[i] = row
    return rows


def warn_at_bounds(kernel):
    """Warn of each parameter that learning left at a bound which the user gave."""
    kernels = kernel.kernels if isinstance(kernel, CompoundKernel) else [kernel]
    free = [(k, h) for k in kernels for h in k.hyperparameters if not h.fixed]
    told = {}
    for k, parameter in free:
        values = np.atleast_1d(k.get_params()[parameter.name])
        for j, value in enumerate(values):
            low, high = parameter.bounds[j if len(parameter.bounds) > 1 else 0]
            for side, bound, change in (("lower", low, "Decreas"), ("upper", high, "Increas")):
                if bound > 0 and np.isclose(np.log(value), np.log(bound), atol=_AT_BOUND):
                    told[parameter.name, j, side] = (
                        f"The optimal value found for dimension {j} of parameter {parameter.name} "
                        f"is close to the specified {side} bound {bound}. {change}ing the bound "
                        "and calling fit again may find a better value."
                    )
    for message in told.values():
        warnings.warn(message, ConvergenceWarning, stacklevel=3)


class GaussianProcessBase(PosteriorClassifier):
    """Attributes, evidence at given hyperparameters and diagnosis of the GP classifiers.

    A fit leaves two private attributes besides what predicts: `_plan`, all that was decided before
    it, with the rows that are kept (None after `partial_fit`, which keeps none), and `_fitted`, the
    `GPFit`.
    """

    def _check_gp_parameters(self):
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise TypeError(f"kernel must be a scikit-learn kernel or None, got {self.kernel!r}.")
        if isinstance(self.kernel, CompoundKernel):
            raise ValueError(
                "kernel cannot be a CompoundKernel: give the kernel of one class, from which each "
                "of several classes starts."
            )
        check_choice("method", self.method, ["auto", "dense", "sparse"])
        check_number("n_inducing", self.n_inducing, 1, integer=True, optional=True)
        check_number("n_restarts_optimizer", self.n_restarts_optimizer, 0, integer=True)
        check_number("jitter", self.jitter, 0)
        check_hyperparameters(self.hyperparameters)
        if not isinstance(self.class_weight, dict):
            check_choice("class_weight", self.class_weight, ["balanced", None])

    def _class_weighted(self, y, weight):
        """Return the copies (n,) of rows with class indices y, times the weights of their classes.

        "balanced" counts copies, so that weights still equal repetition.
        """
        if self.class_weight is None:
            return weight
        if isinstance(self.class_weight, dict):
            args = dict(classes=self.classes_, y=self.classes_)
            of_class = compute_class_weight(self.class_weight, **args)
            if not np.all(np.isfinite(of_class) & (of_class > 0)):
                raise ValueError(
                    f"class_weight must be positive and finite, got {self.class_weight}; leave out "
                    "the rows of a class that should not count."
                )
        else:
            copies = np.bincount(y, weight, len(self.classes_))
            of_class = weight.sum() / (len(copies) * copies)
        return weight * of_class[y]

    @property
    def _takes_objects(self):
        """Whether the kernel compares objects, and rows are therefore taken as they are."""
        if self.method == "sparse" or (self.method == "auto" and self._asks_for_inducing):
            return False
        return self.kernel is not None and not self.kernel.requires_vector_input

    def _spread(self, training):
        """Return the root of the total variance of the rows, 1 for rows that have none."""
        return 1.0 if self._takes_objects else root_variance(training.X, training.weight)

    def _check_new(self, X):
        check_is_fitted(self)
        posterior = self._posteriors[0]
        if hasattr(posterior, "posteriors"):
            posterior = posterior.posteriors[0]
        of_rows = isinstance(posterior, DenseGPPosterior | JointGPPosterior)
        if of_rows and not posterior.kernel.requires_vector_input:
            return object_rows(X)
        return super()._check_new(X)

    def _training(self, X, y, sample_weight, dtype=np.float64):
        """Return the checked `Training` with weights of rows times those of classes."""
        if self._takes_objects:
            free = dict(ensure_2d=False, allow_nd=True, ensure_all_finite=False)
            training = validate_training(self, object_rows(X), y, sample_weight, None, **free)
        else:
            training = validate_training(self, X, y, sample_weight, dtype)
        return training._replace(weight=self._class_weighted(training.y, training.weight))

    @property
    def _n_problems(self):
        """Number of binary problems."""
        return 1 if len(self.classes_) == 2 else len(self.classes_)

    @property
    def _last_fit(self):
        """The `GPFit` to start from, None where there is none or it is not wanted."""
        return getattr(self, "_fitted", None) if self.warm_start else None

    @property
    def _inducing_count(self):
        return DEFAULT_INDUCING if self.n_inducing is None else self.n_inducing

    def _described(self, run, kept, seed):
        """Return the `PartitionedRows` of an open map and the rows that they keep of the caller's.

        `kept` is None for partitions of the user, from which labels and columns are learned.
        """
        data = describe(run, kept is None, seed, n_candidate_rows(self.inducing_points))
        if kept is not None:
            return data, kept
        if len(data.labels) < 2:
            raise ValueError(f"y has only one class, {data.labels[0]!r}; a classifier needs two.")
        self.classes_, self.n_features_in_ = data.labels, len(data.var)
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return data, np.ones(sum(data.sizes), dtype=bool)

    def _check_part_list(self, sample_weight):
        """Raise a ValueError where parameters do not go with a list of partitions."""
        if sample_weight is not None:
            raise ValueError("sample_weight must be None for a list of partitions.")
        if self.method == "dense":
            raise ValueError("method='dense' does not take a list of partitions as X.")
        if self.class_weight is not None:
            raise ValueError("class_weight must be None for a list of partitions.")

    def _inducing_start(self, rows, weight, seed, n_features):
        """Return the inducing points (m, d) that were given, or chosen from the rows."""
        if self.inducing_points is None:
            return choose_inducing_points(rows, weight, self._inducing_count, seed)
        Z = check_array(self.inducing_points, dtype=np.float64, input_name="inducing_points")
        if Z.shape[1] != n_features:
            raise ValueError(
                f"inducing_points has {Z.shape[1]} columns, but X has {n_features} features."
            )
        return Z.copy()

    def _store(self, plan, fit, kept, **more):
        """Set all fitted attributes but those of the data, and warn once if needed.

        `kept` marks the rows of the caller that the fit has sites of; `more` are attributes of one
        estimator.
        """
        for name in _OPTIONAL:
            if name in vars(self):
                delattr(self, name)
        self._plan, self._fitted = plan, fit
        self.method_ = "dense" if fit.inducing_points is None else "sparse"
        self.kernel_, self.n_sweeps_ = fit.kernel, fit.n_sweeps
        joint = fit.sites is not None and fit.sites.ndim == 4
        self.multi_class_ = "joint" if joint else "one_vs_rest"
        for name, value in run_attributes(fit.runs).items():
            setattr(self, name, value)
        self.log_marginal_likelihood_value_ = self.log_evidence_

        if fit.inducing_points is not None:
            self.inducing_points_ = fit.inducing_points
            self.inducing_mean_ = one_or_stack([p.inducing_mean for p in fit.posteriors])
            self.inducing_cov_ = one_or_stack([p.inducing_cov for p in fit.posteriors])
        if fit.sites is not None:
            # of a joint fit sites have an entry a class, last
            precision, shift = one_or_stack(fit.sites[:, 0]), one_or_stack(fit.sites[:, 1])
            self.site_precision_ = spread_rows(precision.T if joint else precision, kept)
            self.site_shift_ = spread_rows(shift.T if joint else shift, kept)
            self.loo_proba_ = spread_rows(fit.loo_proba, kept, np.nan)
        learned = plan is not None and self.optimizer is not None
        more |= attributes_of_averages(fit, learned, getattr(plan, "learn_rate", False))
        for name, value in more.items():
            setattr(self, name, value)
        self._posteriors = fit.posteriors
        if not self.converged_:
            advice = "raise max_iter and max_sweeps, lower damping, or bound the kernel amplitude"
            warn_not_converged(self, advice, remarks_of(fit.runs))
        if plan is not None and self.kernel is not None and self.optimizer is not None:
            warn_at_bounds(fit.kernel)
        return self

    def log_marginal_likelihood(self, theta=None, eval_gradient=False, clone_kernel=True):
        """Log evidence of the training data at given kernel parameters.

        Parameters
        ----------
        theta : array-like of shape (p,), default=None
            Log-transformed kernel parameters as in `kernel_.theta`; None returns the value of the
            fit. With more than two classes the parameters of all binary kernels one after another,
            or those of one for all.
        eval_gradient : bool, default=False
            Also return the gradient in theta.
        clone_kernel : bool, default=True
            False leaves theta in `kernel_`; predictions stay those of the fit.

        Returns
        -------
        log_likelihood : float
            That of all classes jointly, or the sum over the one-versus-rest problems, with EP run
            to `tol` from the fitted sites.
        gradient : ndarray of shape (p,)
            Only if `eval_gradient`; in the parameters as they were given. Of more than two classes
            jointly it is found by central differences, in 2 p further runs of EP.

        Raises
        ------
        ValueError
            If theta has the wrong length, or after `partial_fit`, which keeps no rows.
        """
        check_is_fitted(self)
        if theta is None and not eval_gradient:
            return self.log_marginal_likelihood_value_
        fitted = self._fitted.kernel
        theta = fitted.theta if theta is None else np.asarray(theta, dtype=float)
        n_equal = len(fitted.kernels) if isinstance(fitted, CompoundKernel) else 1
        n_equal = n_equal if n_equal * theta.size == fitted.n_dims else 1
        whole = np.tile(theta, n_equal)
        if whole.shape != fitted.theta.shape:
            raise ValueError(f"theta has shape {theta.shape}, not {fitted.theta.shape}.")
        if self._plan is None:
            raise ValueError("the evidence at other theta needs rows, which partial_fit forgets.")
        args, gradient = (whole, self._fitted, self.n_jobs), None
        if eval_gradient:
            value, gradient = self._plan.value_and_gradient(*args)
        else:
            value = self._plan.log_evidence(*args)
        if not clone_kernel:
            self.kernel_ = with_theta(fitted, whole)
        if gradient is None:
            return value
        return value, gradient.reshape(n_equal, theta.size).sum(axis=0)

    def _log_weights(self, rows, n_draws, rng):
        """Return log weights of draws of the latent values of the rows, which a dense fit keeps.

        Of an average they are those of its heaviest node.
        """
        plan, fit = self._plan, self._fitted
        told = average_remarks(averages_of(fit))
        left_out = "Importance weights are left out: "
        if fit.inducing_points is not None:
            points = "inducing points do not keep what the rows say of each other."
            return None, (*told, left_out + points)
        if rows is not None:
            self._check_same_rows(rows)
        if len(fit.posteriors) > 1:
            own = "they are those of one problem, and each class has its own."
            return None, (*told, left_out + own)
        posterior, sign = fit.posteriors[0], signs_of(plan.y, 0, 1)
        posterior = fit.runs[0].attributes.get("posterior_of_sites", posterior)
        latent = draw_latent(posterior, plan.X, n_draws, rng)
        if latent.ndim == 3:
            sites = ClassSites(*fit.sites[0])
            return class_log_weights(posterior.factor, plan.y, plan.weight, sites, latent), told
        args = posterior.factor, sign, plan.weight, *plan.latent_sites(fit), latent
        return site_log_weights(*args), told

    def _check_same_rows(self, rows):
        """Raise a ValueError unless rows given once more are those of the fit."""
        X = self._check_new(rows.X)
        weight = checked_weights(rows.sample_weight, X)
        y, kept = np.searchsorted(self.classes_, rows.y), weight > 0
        plan, same = self._plan, len(y) == len(X)
        if same:
            X, y, weight = X[kept], y[kept], self._class_weighted(y[kept], weight[kept])
            pairs = (X, plan.X), (y, plan.y), (weight, plan.weight)
            same = all(np.array_equal(a, b) for a, b in pairs)
        if not same:
            raise ValueError(
                "X, y and sample_weight are not those of the fit, which keeps its rows: leave them "
                "out, or give them as they were."
            )
