"""What the GP classifiers share: kernels, learning by evidence, one binary problem."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, CompoundKernel, ConstantKernel, Kernel
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted

from .._engine.diagnostics import importance_check, site_log_weights
from .._engine.gaussian import ImproperPosterior, jittered_cholesky
from .._engine.sites import Sites, cavity
from .._engine.whole import WholeEP
from .._estimator.base import PosteriorClassifier, diagnose_fit, draw_latent, log_normalise
from .._estimator.checks import check_choice, check_number, spread_rows
from .._estimator.fitting import BinaryFit, combine_fits, fit_problems
from ._dense_gp import DenseGPPosterior, KernelGP
from ._evidence import EvidencePoint, maximise_evidence
from ._kernel_parameters import with_theta
from ._kernels import has_input_gradient
from ._rows import choose_inducing_points

__all__ = [
    "DEFAULT_INDUCING",
    "DenseProblem",
    "GaussianProcessBase",
    "WithLearned",
    "check_input_gradient",
    "check_kernel",
    "column_spread",
    "fit_dense",
    "fit_of_sites",
]

# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3
DEFAULT_INDUCING = 100


def column_spread(X, weight):
    """Return the standard deviations (d,) of the columns."""
    mean = weight @ X / weight.sum()
    return np.sqrt(weight @ (X - mean) ** 2 / weight.sum())


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


def default_kernel(X, weight):
    """Return the kernel that `kernel=None` stands for; see `smooth_kernel`."""
    return smooth_kernel(root_variance(X, weight) ** 2)


def smooth_kernel(total_variance):
    """Return ConstantKernel(1) * RBF(l) with l three times the root of the total variance.

    The total variance of the columns measures distances without drawing pairs (l / 3 is about the
    median distance over sqrt(2)) and does not change when weights are written out as repeated rows.
    Three of them make a smooth start: learning goes from nearly linear functions to wigglier ones,
    and an unlearned kernel does not fall back to the prior between the rows.
    """
    scale = 3.0 * float(np.sqrt(total_variance))
    if scale <= 0:
        scale = 1.0
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


def loo_log_proba(factor, labels, sites, state):
    """Log probability of each label under the cavity of its row: leave-one-out prediction."""
    cav = cavity(sites, state.mean, state.var)
    return factor.tilted(labels, cav.mean, cav.var + state.extra_var).log_z


@dataclass
class DenseProblem:
    """Everything a binary dense problem needs besides its labels; sent to workers as it is.

    `starts` and `sites` hold one entry a binary problem: the initial theta and the initial sites.
    """

    X: np.ndarray
    weight: np.ndarray
    kernel: Kernel
    factor: Any
    rule: Any
    learn: bool
    restarts: np.ndarray
    starts: list
    sites: list
    tol: float
    max_iter: int
    max_sweeps: int
    damping: float
    accelerate: bool

    @property
    def sites_on_rows(self):
        """Whether prior times sites is the posterior of the latent values of the rows."""
        return True

    def ep(self, kernel, sign):
        """Return the fixed-point map of EP at a kernel."""
        structure = KernelGP(kernel, self.X)
        return WholeEP(structure, self.factor, sign, self.weight, self.rule)

    def solve(self, ep, x, tol, max_sweeps, monitor=None):
        """Run EP from sites x (2, n)."""
        return ep.solve(
            x,
            tol=tol,
            max_iter=max_sweeps,
            damping=self.damping,
            accelerate=self.accelerate,
            monitor=monitor,
        )

    def evidence(self, sign, x, tol):
        """Return theta -> `EvidencePoint`; sites are warm-started from the last point."""
        warm = [x]

        def evaluate(theta):
            kernel = with_theta(self.kernel, theta)
            ep = self.ep(kernel, sign)
            result = self.solve(ep, warm[0], tol, self.max_sweeps)
            warm[0] = result.x
            state, _ = result.evaluation.payload
            return EvidencePoint(
                result.evaluation.record["log_evidence"],
                ep.structure.evidence_gradient(state),
                result.evaluation.residual,
                (kernel, state),
            )

        return evaluate

    def posterior(self, payload):
        """Return the predicting posterior that belongs to the payload of an iteration."""
        kernel, state = payload[:2]
        return DenseGPPosterior(kernel, self.X, state)


class WithLearned:
    """Monitor that adds what was learned to the payload of the sweeps that follow."""

    def __init__(self, monitor, learned):
        self.monitor, self.learned = monitor, learned

    def begin(self):
        self.monitor.begin()

    def end(self, record, payload):
        return self.monitor.end(record, (self.learned, payload[0]))


def fit_of_sites(posterior, history, result, kernel, factor, **more):
    """Return the `BinaryFit` of sites on the rows, whatever structure and rule they come from.

    `result` is that of the final run of EP, `history` that of the whole fit; `more` are further
    attributes.
    """
    state, _ = result.evaluation.payload
    sites = Sites(*result.x)
    return BinaryFit(
        posterior,
        history,
        result.converged,
        float(result.evaluation.record["log_evidence"]),
        dict(
            kernel_=kernel,
            site_precision_=sites.precision,
            site_shift_=sites.shift,
            n_sweeps_=result.n_iter,
            loo_log_plus=loo_log_proba(factor, 1.0, sites, state),
            loo_log_minus=loo_log_proba(factor, -1.0, sites, state),
            **more,
        ),
    )


def fit_dense(problem, sign, monitor, k):
    """Learn the kernel if asked, converge EP, and return the `BinaryFit` of problem k."""
    kernel, x = with_theta(problem.kernel, problem.starts[k]), problem.sites[k]
    history, stopped, max_sweeps = {}, False, min(problem.max_sweeps, problem.max_iter)
    if problem.learn and kernel.n_dims:
        learned = maximise_evidence(
            problem.evidence(sign, x, max(problem.tol, LEARNING_TOL)),
            problem.starts[k],
            kernel.bounds,
            max_iter=problem.max_iter,
            starts=problem.restarts,
            monitor=monitor,
        )
        history, max_sweeps = learned.history, problem.max_sweeps
        # the last run starts from the same sites as the search, so that the answer depends on the
        # kernel alone and not on the path that led to it
        kernel, stopped = learned.point.payload[0], learned.stopped
    # a search that was stopped still ends at converged sites, in sweeps that nobody counts
    watch = None if monitor is None or stopped else WithLearned(monitor, kernel)
    result = problem.solve(problem.ep(kernel, sign), x, problem.tol, max_sweeps, watch)
    if not stopped:
        history = {n: np.concatenate([history.get(n, []), v]) for n, v in result.history.items()}
    posterior = problem.posterior((kernel, result.evaluation.payload[0]))
    return fit_of_sites(posterior, history, result, kernel, problem.factor)


class GaussianProcessBase(PosteriorClassifier):
    """Kernel handling, attributes and evidence at given hyperparameters of the GP classifiers."""

    def _check_gp_parameters(self):
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise TypeError(f"kernel must be a scikit-learn kernel or None, got {self.kernel!r}.")
        check_number("n_restarts_optimizer", self.n_restarts_optimizer, 0, integer=True)
        check_number("jitter", self.jitter, 0)
        check_choice("multi_class", self.multi_class, ["one_vs_rest"])

    def _initial_kernel(self, training):
        if self.kernel is None:
            return default_kernel(training.X, training.weight)
        return clone(self.kernel)

    def _inducing_start(self, rows, weight, seed, n_features):
        """Return the inducing points (m, d) that were given, or chosen from the rows."""
        if self.inducing_points is None:
            count = DEFAULT_INDUCING if self.n_inducing is None else self.n_inducing
            return choose_inducing_points(rows, weight, count, seed)
        Z = check_array(self.inducing_points, dtype=np.float64, input_name="inducing_points")
        if Z.shape[1] != n_features:
            raise ValueError(
                f"inducing_points has {Z.shape[1]} columns, but X has {n_features} features."
            )
        return Z.copy()

    def _store_inducing(self, Z):
        """Make attributes of inducing points and of what the posteriors say there."""
        one = len(self._posteriors) == 1
        mean = [p.inducing_mean for p in self._posteriors]
        cov = [p.inducing_cov for p in self._posteriors]
        self.inducing_points_ = Z
        self.inducing_mean_ = mean[0] if one else np.stack(mean)
        self.inducing_cov_ = cov[0] if one else np.stack(cov)

    def _warm(self, n_problems, n_rows, kernel):
        """Return (theta, sites) to start each binary problem from: the last ones if they fit."""
        last = getattr(self, "_warm_state", []) if self.warm_start else []
        if len(last) == n_problems and last[0][1].shape[1] == n_rows:
            if len(last[0][0]) == kernel.n_dims:
                return [theta for theta, _ in last], [x for _, x in last]
        return [kernel.theta] * n_problems, [np.zeros((2, n_rows))] * n_problems

    def _fit_problem(self, problem, fit_binary, training, X, y):
        """Fit the binary problems, store everything learned, and warn once if needed."""
        return fit_problems(
            self,
            problem,
            fit_binary,
            training,
            X,
            y,
            None,
            "raise max_iter and max_sweeps, lower damping, or bound the kernel amplitude",
        )

    def _store(self, problem, fits, training):
        self._problem, self._labels = problem, training.y
        self._posteriors = [f.posterior for f in fits]
        own = [f.attributes for f in fits]
        self._warm_state = [
            (a["kernel_"].theta, np.stack([a["site_precision_"], a["site_shift_"]])) for a in own
        ]
        self.kernel_ = (
            own[0]["kernel_"] if len(own) == 1 else CompoundKernel([a["kernel_"] for a in own])
        )
        rows = {n: [a[n] for a in own] for n in ("site_precision_", "site_shift_")}
        for name, values in rows.items():
            value = values[0] if len(own) == 1 else np.stack(values)
            setattr(self, name, spread_rows(value, training.kept))
        self.n_sweeps_ = max(a["n_sweeps_"] for a in own)
        self.loo_proba_ = spread_rows(own_label_proba(own, training.y), training.kept, np.nan)
        self.history_, self.n_iter_, self.converged_, self.log_evidence_ = combine_fits(fits)
        self.log_marginal_likelihood_value_ = self.log_evidence_

    def _evidence(self, k, sign, x):
        """Return theta -> `EvidencePoint` of binary problem k, from sites x."""
        return self._problem.evidence(sign, x, self._problem.tol)

    def log_marginal_likelihood(self, theta=None, eval_gradient=False, clone_kernel=True):
        """Log evidence of the training data at given kernel parameters.

        Parameters
        ----------
        theta : array-like of shape (p,), default=None
            Log-transformed kernel parameters as in `kernel_.theta`; None returns the value of the
            fit. With more than two classes the parameters of all binary kernels one after another.
        eval_gradient : bool, default=False
            Also return the gradient in theta.
        clone_kernel : bool, default=True
            Kept for compatibility with scikit-learn; the fitted kernel is never modified.

        Returns
        -------
        log_likelihood : float
            Sum over the one-versus-rest problems, with EP run to `tol` from the fitted sites.
        gradient : ndarray of shape (p,)
            Only if `eval_gradient`.

        Raises
        ------
        ValueError
            If theta has the wrong length.
        """
        check_is_fitted(self)
        if theta is None and not eval_gradient:
            return self.log_marginal_likelihood_value_
        theta = self.kernel_.theta if theta is None else np.asarray(theta, dtype=float)
        if theta.shape != self.kernel_.theta.shape:
            raise ValueError(f"theta has shape {theta.shape}, not {self.kernel_.theta.shape}.")
        value, gradient = self._evidence_at(theta)
        return (value, gradient) if eval_gradient else value

    def _evidence_at(self, theta):
        """Return (log evidence, gradient) at theta, with EP run from the fitted sites."""
        value, gradient = 0.0, []
        for k, part in enumerate(np.split(theta, len(self._posteriors))):
            positive = self._labels == (1 if len(self._posteriors) == 1 else k)
            sign, x = np.where(positive, 1.0, -1.0), self._warm_state[k][1]
            point = self._evidence(k, sign, x)(part)
            value += float(point.value)
            gradient.append(point.gradient)
        return value, np.concatenate(gradient)

    def _latent_sites(self):
        """Return factor and sites (precision, shift) on the latent values of the first problem."""
        return (self._problem.factor, *self._warm_state[0][1])

    def diagnose(self, n_draws=1000, random_state=0):
        """Say how far to trust the fit.

        Parameters
        ----------
        n_draws : int, default=1000
            Joint draws of the latent values of all training rows, weighted by the true posterior
            over the approximate one.
        random_state : int, RandomState instance or None, default=0
            Seed of the draws.

        Returns
        -------
        diagnosis : Diagnosis
            Residual, convergence and, for two classes with all rows in the posterior, effective
            share of the draws and tail shape of their weights. Printing it gives a summary.
        """
        check_is_fitted(self)
        check_number("n_draws", n_draws, 25, integer=True)
        problem = self._problem
        on_rows = isinstance(problem, DenseProblem) and problem.sites_on_rows
        if len(self._posteriors) > 1 or not on_rows:
            return diagnose_fit(self)
        rng = check_random_state(random_state)
        latent = draw_latent(self._posteriors[0], problem.X, n_draws, rng)
        sign = np.where(self._labels == 1, 1.0, -1.0)
        factor, precision, shift = self._latent_sites()
        log_w = site_log_weights(factor, sign, problem.weight, precision, shift, latent)
        return diagnose_fit(self, importance_check(log_w))


def own_label_proba(attributes, labels):
    """Leave-one-out probability (n,) of each row's own label, normalised over the classes."""
    if len(attributes) == 1:
        log_p = np.column_stack([attributes[0]["loo_log_minus"], attributes[0]["loo_log_plus"]])
    else:
        log_p = log_normalise(np.column_stack([a["loo_log_plus"] for a in attributes]))
    return np.exp(log_p[np.arange(len(labels)), labels])
