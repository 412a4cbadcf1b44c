"""Sparse linear regression with spike-and-slab priors by convergent expectation propagation."""

import numbers

import numpy as np
from scipy.special import expit, logit
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state

from .._estimator.base import VersionedEstimator
from .._estimator.checks import check_choice, check_common, check_number, validate_training
from .._estimator.compat import CallbackSupportMixin, with_callbacks
from .._estimator.fitting import FitMonitor, restore_on_error, warn_not_converged
from ._design import make_design
from ._energy import EPEnergy
from ._learning import Space, learn, with_h
from ._prediction import SpikeSlabPrediction
from ._prior import SpikeSlab
from ._runs import WORTH_RETRYING, RunSettings, Watch, distinct, explore, run, run_start

__all__ = ["SpikeSlabRegressor"]


class SpikeSlabRegressor(
    SpikeSlabPrediction, CallbackSupportMixin, RegressorMixin, VersionedEstimator
):
    """Linear regression in which each coefficient is zero with positive probability.

    y = X w + intercept + noise; w_i is zero with probability 1 - `prior_inclusion` and normal with
    variance `slab_variance` otherwise. The posterior is that of expectation propagation, found by a
    method that always converges; what is not given is learned from the evidence.

    Parameters
    ----------
    noise_variance : float or "auto", default="auto"
        Variance of the noise; "auto" learns it.
    slab_variance : float or "auto", default="auto"
        Variance of a coefficient that is not zero, on the scale of the standardised columns; "auto"
        learns it.
    prior_inclusion : float or "auto", default="auto"
        Prior probability in (0, 1) that a coefficient (a group with `groups`) is not zero; "auto"
        learns it, from the evidence and a uniform prior: (expected model size + 1) / (d + 2).
    fit_intercept : bool, default=True
        Fit an intercept, with a flat prior, by centring.
    standardize : bool, default=True
        Divide columns by their standard deviation, so that one slab variance suits all of them.
        Coefficients are given back on the scale of X.
    algorithm : {"auto", "ep", "convergent", "double_loop"}, default="auto"
        "ep" is damped parallel EP with positive sites. "convergent" descends the EP energy, without
        a rise, by Newton steps. "auto" begins with EP at decreasing noise, which finds good fixed
        points, and ends with the descent where EP does not settle. "double_loop" is the published
        method, slow and kept for reference.
    damping : float, default=0.5
        Share of an EP update that is taken, in (0, 1]; undamped parallel EP oscillates here.
    max_iter : int, default=200
        Largest number of iterations at fixed hyperparameters; well over what "auto" needed on any
        of the published sets.
    tol : float, default=1e-4
        Largest change of a mean or standard deviation under an undamped sweep, in units of the slab
        standard deviation, at which a fit has converged.
    n_init : int, default=1
        Starts at the final hyperparameters; the fixed point of largest evidence is kept and the
        others are used by ``predict(X, mixture=True)``.
    noise_starts : sequence of float, default=(0.3, 0.01, 0.001)
        Shares of the variance of y at which the search for the noise variance begins. The small
        ones find almost noise-free signals, which the large one alone may take for noise.
    copy_X : bool, default=True
        Copy X; otherwise it may be overwritten.
    warm_start : bool, default=False
        Begin with sites and hyperparameters of the last fit if the number of columns is the same.
    n_jobs : int or None, default=None
        Workers for the starts of `n_init`.
    random_state : int, RandomState instance or None, default=None
        Seed of the random starts (the fourth and later ones).
    verbose : int, default=0
        Print a line an iteration.

    Attributes
    ----------
    coef_ : ndarray of shape (d,)
        Posterior means of the coefficients.
    coef_std_ : ndarray of shape (d,)
        Posterior standard deviations.
    intercept_ : float
        Intercept.
    inclusion_proba_ : ndarray of shape (d,)
        Posterior probability that a coefficient is not zero.
    expected_model_size_ : float
        Their sum.
    noise_variance_ : float
        Variance of the noise, given or learned.
    slab_variance_ : float
        Variance of a coefficient that is not zero, given or learned.
    prior_inclusion_ : float
        Prior probability that a coefficient is not zero, given or learned.
    log_evidence_ : float
        EP approximation of log p(y); with an intercept up to the constant of its flat prior.
    fixed_point_log_evidences_ : ndarray of shape (n_fixed_points_,)
        Evidences of the different fixed points that `n_init` starts found, the largest first.
    n_fixed_points_ : int
        Their number.
    algorithm_used_ : str
        "ep", "convergent" or "double_loop": what ended the run.
    site_precision_ : ndarray of shape (d,)
        Precisions of the EP sites, for coefficients of standardised columns; may be negative.
    site_shift_ : ndarray of shape (d,)
        Precisions times means of the same sites.
    n_iter_ : int
        Iterations of the run that was kept, at its final hyperparameters.
    converged_ : bool
        Whether the residual fell below `tol`.
    history_ : dict of str to ndarray of shape (n_iter_,)
        "residual" of an undamped sweep and "objective", the energy, whose value at a fixed point is
        minus the log evidence. It never rises with ``algorithm="convergent"``; with "auto" it
        belongs to the larger noise variances of the start at first.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the columns, where X had any.

    Notes
    -----
    Where few of many columns in doubt are in the model at a time, EP overrates the evidence, and a
    fit would be overconfident. Learning therefore compares the evidence it ends at with that of
    single models, drawn and searched for. What they do not confirm within 3 nats gives way to a
    search from a dense start, half of all columns in, if single models confirm more for that one:
    on wide data of weak effects the answer is then a dense one, close to ridge regression, with all
    inclusion probabilities near `prior_inclusion_`. There is no such comparison with a given
    `prior_inclusion`.

    An iteration costs O(n d^2 + d^3) for d <= n (the n only once) and O(n^2 d) for d > n, with
    memory for X and a block of columns: no d x d matrix is formed. Learning the hyperparameters
    takes some 60 to 150 iterations where signals are clear, some hundreds where they are not.

    For d > n and little noise EP has several fixed points, and its evidence may be off by a few
    nats; `n_init` shows whether that is so. Exact copies of a column share their signal, each with
    too small an inclusion probability.

    References
    ----------
    .. [1] J. M. Hernandez-Lobato and D. Hernandez-Lobato, "Convergent expectation propagation in
       linear models with spike-and-slab priors", arXiv:1112.2289, 2011.
    .. [2] M. Opper and O. Winther, "Expectation consistent approximate inference", JMLR 6, 2005.
    .. [3] A. Bhattacharya, A. Chakraborty and B. Mallick, "Fast sampling with Gaussian scale
       mixture priors in high-dimensional regression", Biometrika 103, 2016.

    Examples
    --------
    >>> from sklearn_ep import SpikeSlabRegressor
    >>> from sklearn_ep.datasets import make_spike_slab_regression
    >>> X, y, coef = make_spike_slab_regression(40, 100, n_informative=4, random_state=0)
    >>> reg = SpikeSlabRegressor().fit(X, y)
    >>> bool((reg.get_support() == (coef != 0)).all())
    True
    >>> mean, std = reg.predict(X, return_std=True)
    """

    def __init__(
        self,
        *,
        noise_variance="auto",
        slab_variance="auto",
        prior_inclusion="auto",
        fit_intercept=True,
        standardize=True,
        algorithm="auto",
        damping=0.5,
        max_iter=200,
        tol=1e-4,
        n_init=1,
        noise_starts=(0.3, 0.01, 0.001),
        copy_X=True,
        warm_start=False,
        n_jobs=None,
        random_state=None,
        verbose=0,
    ):
        self.noise_variance = noise_variance
        self.slab_variance = slab_variance
        self.prior_inclusion = prior_inclusion
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

    # ------------------------------------------------------------------------ fitting

    def _check_parameters(self):
        check_common(self)
        check_choice("algorithm", self.algorithm, ["auto", "ep", "convergent", "double_loop"])
        check_number("n_init", self.n_init, 1, integer=True)
        for name, high in (
            ("noise_variance", None),
            ("slab_variance", None),
            ("prior_inclusion", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, str):
                check_choice(name, value, ["auto"])
            else:
                check_number(name, value, 0, high, boundaries="neither")
                if not np.isfinite(value):
                    raise ValueError(f"{name} must be finite, got {value!r}.")
        if isinstance(self.noise_starts, str | numbers.Number) or len(self.noise_starts) == 0:
            raise ValueError(f"noise_starts must be a sequence, got {self.noise_starts!r}.")
        for fraction in self.noise_starts:
            check_number("noise_starts", fraction, 0, 1, boundaries="neither")

    @restore_on_error
    @with_callbacks
    def fit(self, X, y, sample_weight=None, groups=None):
        """Fit the regression.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Training rows.
        y : array-like of shape (n,)
            Responses.
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
        ValueError
            If a parameter or the data are not usable; the estimator is then as it was before.
        """
        self._check_parameters()
        training = validate_training(self, X, y, sample_weight, ensure_min_samples=2)
        groups = _checked_groups(groups, training.X.shape[1])
        if self.fit_intercept and training.weight.sum() <= 1:
            raise ValueError("sample_weight adds up to at most one row, which the intercept takes.")
        owned = not self.copy_X or not np.may_share_memory(training.X, X)
        design, model = make_design(
            training, fit_intercept=self.fit_intercept, standardize=self.standardize, owned=owned
        )
        warm = self._warm(design, model.X.shape[1], groups)
        return self._fit_design(design, model, groups, warm, X, y)

    def _space(self, design, model):
        """Hyperparameters in working units."""
        unit = design.y_scale**2
        noise, slab, inclusion = (
            None if isinstance(value, str) else value
            for value in (self.noise_variance, self.slab_variance, self.prior_inclusion)
        )
        return Space.of(
            model,
            design.total,
            None if noise is None else noise / unit,
            None if slab is None else slab / unit,
            inclusion,
        )

    def _warm(self, design, d, groups):
        """Sites and hyperparameters of the last fit in the units of this one, or None."""
        if not self.warm_start or getattr(self, "_warm_shape", None) != (d, groups is None):
            return None
        unit = design.y_scale
        h = np.log([self.noise_variance_ / unit**2, self.slab_variance_ / unit**2, 1.0])
        h[2] = logit(self.prior_inclusion_)
        return h, np.stack([self.site_shift_ * unit, self.site_precision_ * unit**2])

    def _fit_design(self, design, model, groups, warm, X, y):
        settings = RunSettings(self.algorithm, self.damping, self.max_iter, self.tol)
        space = self._space(design, model)
        factor = SpikeSlab(np.exp(space.value[1]), space.value[2], groups)
        constant = design.n_rows * np.log(design.y_scale)
        problem = EPEnergy(model, factor, np.exp(space.value[0]), design.n_rows, constant)
        sites = None if warm is None else warm[1]
        if space.free.any():
            place = learn(problem, space, list(self.noise_starts), settings, warm)
            problem, sites = with_h(problem, place.h), place.state.sites
        best, others = self._run(problem, settings, sites, design, X, y)
        for name, value in self._attributes(best.state, design).items():
            setattr(self, name, value)
        self._keep(best, others, groups)
        if not best.converged:
            residual = best.history["residual"][-1]
            warn_not_converged(type(self).__name__, residual, self.tol, self.n_iter_)
        return self

    def _run(self, problem, settings, sites, design, X, y):
        """Run the starts; return the run that is kept, watched by the callbacks, and all runs."""
        runs, start = [], 0
        if self.n_init > 1:
            rng = check_random_state(self.random_state)
            seeds = rng.randint(np.iinfo(np.int32).max, size=self.n_init)
            runs = explore(problem, settings, self.n_init, seeds, sites=sites, n_jobs=self.n_jobs)
            start = max(range(self.n_init), key=lambda k: (runs[k].converged, runs[k].log_evidence))
        monitor = FitMonitor(
            self, X, y, self.max_iter, lambda state: self._attributes(state, design)
        )
        watch = Watch(monitor)
        seed = seeds[start] if runs else 0
        best = run_start(problem, settings, start, seed, sites=sites, watch=watch)
        cut_short = watch.stopped or self.max_iter < WORTH_RETRYING
        if sites is None and not (runs or best.converged or cut_short) and self.algorithm == "auto":
            second = run(problem, settings, start="descent")
            if second.converged or second.log_evidence > best.log_evidence:
                best = second
        monitor.finish()
        return best, runs

    def _attributes(self, state, design):
        """Fitted attributes that a prediction needs."""
        unit, factor = design.y_scale, state.problem.factor
        coef = design.to_coef(state.mean)
        return {
            "coef_": coef,
            "coef_std_": design.to_coef(np.sqrt(state.var)),
            "intercept_": float(design.intercept(coef)),
            "inclusion_proba_": state.matched.inclusion,
            "expected_model_size_": float(state.matched.inclusion.sum()),
            "noise_variance_": float(state.problem.noise * unit**2),
            "slab_variance_": float(factor.slab_variance * unit**2),
            "prior_inclusion_": float(expit(factor.logit)),
            "log_evidence_": -state.energy,
            "site_shift_": state.sites[0] / unit,
            "site_precision_": state.sites[1] / unit**2,
            "_design": design,
            "_posterior": state.marginals,
            "_mixture": [],
        }

    def _keep(self, best, runs, groups):
        """Write what describes the run rather than the posterior."""
        points = distinct(runs, best.state.problem.factor.slab_variance) if runs else [best]
        self.fixed_point_log_evidences_ = np.array([p.log_evidence for p in points])
        self.n_fixed_points_ = len(points)
        self._mixture = [p.state.marginals for p in points] if len(points) > 1 else []
        self.algorithm_used_, self.converged_ = best.used, bool(best.converged)
        self.history_ = best.history
        self.n_iter_ = len(best.history["residual"])
        self._warm_shape = len(self.coef_), groups is None


def _checked_groups(groups, d):
    """Number of the group of each feature, or None; a ValueError names the argument."""
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (d,):
        raise ValueError(f"groups must have one label for each of {d} features: {labels.shape}.")
    return np.unique(labels, return_inverse=True)[1]
