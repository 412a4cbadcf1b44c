"""Spaces of the parameters of kernels, and what fits learn or average over.

Besides what a search asks for, see `_engine.hyper`, a space has the spread `s` that the log lengths
have about their mean.

Of a constant times RBF or Matern, which has one variance and one length scale a column, averages
run over the logs of the variance and of the geometric mean of the lengths.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from .._engine.gaussian import ImproperPosterior
from .._engine.hyper import Accuracy, LearningEnd, NegativeDensity, NormalPrior, told
from .._engine.likelihoods import PROBIT_SLOPE
from ._kernels import constant_and_stationary, n_lengths
from ._limits import LIMITS

_NAMES = ("log_variance", "log_length_scale")
# Scale of log lengths about their mean, and its degrees of freedom. Modes of ten sets whose labels
# may be wrong have log losses -.0017 +- .0014 higher with a scale of .4, +.0036 +- .0021 with 1.5,
# and -.0003 and +.0008 with two and eight degrees.
_RATIOS = (0.75, 4.0)


def scale_prior(factor, root_variance, variance_spread, length_spread=1.0):
    """Return the `NormalPrior` for a link and for columns of a root of the total variance.

    Log-normal, and of no data set in particular: a latent function may be flat or sure of itself,
    and is about as smooth as the rows are wide. The median of the variance is four times the noise
    of the link; a link whose noise is not known counts as a probit.
    """
    slope = getattr(factor, "logistic_slope", None) or PROBIT_SLOPE
    centre = np.log([4.0 * (PROBIT_SLOPE / slope) ** 2, root_variance])
    return NormalPrior(centre, np.array([variance_spread, length_spread]))


def kernel_prior(kernel, factor, root_variance, joint=False):
    """Return the `NormalPrior` of variance and length for a kernel, a link and the columns.

    With a length for each column the variance is as free again, where wide classes that a few
    columns separate are common (log loss of crabs .099 after .110, of thyroid .070 after .073).
    Of classes that are fitted jointly both are nearly flat: the evidence knows them, and near the
    modes of separable classes variances are in the hundreds.
    """
    if joint:
        return scale_prior(factor, root_variance, 6.0, 2.0)
    several = len(KernelScales.at(kernel, kernel.theta).lengths) > 1
    return scale_prior(factor, root_variance, 2.0 if several else 1.5)


def wants_average(estimator, n_rows, settings, sharp=False):
    """Return whether a fit averages over hyperparameters.

    `settings` of the estimator -> whether they leave only the mode; a UserWarning names those that
    do where the average was asked for. Where the evidence is `sharp`, it has to be.
    """
    excluding = [setting for setting, excludes in settings.items() if excludes]
    if estimator.hyperparameters == "mode":
        return False
    if excluding and estimator.hyperparameters == "integrate":
        warnings.warn(
            "hyperparameters='integrate' does nothing with " + " and ".join(excluding) + ": the "
            "mode is used.",
            UserWarning,
            stacklevel=4,
        )
    if excluding or estimator.hyperparameters == "integrate":
        return not excluding
    return n_rows <= LIMITS.averaged and not sharp


def n_length_scales(kernel):
    """Return the number of lengths of a constant times a stationary kernel, 0 of others."""
    split = constant_and_stationary(kernel)
    return 0 if split is None else len(np.atleast_1d(split[1].length_scale))


def kernel_settings(kernel):
    """Return settings of a kernel -> whether they leave only the mode."""
    lengths = n_length_scales(kernel)
    return {
        f"kernel={kernel}": lengths == 0,
        "a kernel without free parameters": kernel.n_dims == 0,
        f"more than {LIMITS.lengths} length scales": lengths > LIMITS.lengths,
    }


@dataclass(frozen=True)
class ThetaSpace:
    """All parameters of a kernel, as in ``kernel.theta``, under a flat prior."""

    kernel: Kernel
    s = 0.0

    @property
    def bounds(self):
        """Bounds (p, 2)."""
        return np.reshape(self.kernel.bounds, (-1, 2))

    def point(self, theta):
        """Return theta itself, as coordinates and as kernel parameters."""
        return theta

    phi = slopes = point

    def log_prior(self, theta):
        """Return a flat log density and its gradient."""
        return 0.0, 0.0


@dataclass(frozen=True)
class KernelScales:
    """The log variance and the log geometric mean of the lengths of a kernel, as a vector phi.

    What the kernel keeps fixed is not in phi, whose length T is at most two. theta is `moved` plus
    phi times the `groups` of places that each coordinate moves, so that ratios of lengths are kept;
    `s` is the spread of their prior; `both` is the `NormalPrior` of variance and length, None for a
    flat one.
    """

    kernel: Kernel
    moved: np.ndarray
    both: NormalPrior | None = None
    s: float = 0.0

    @classmethod
    def at(cls, kernel, theta, *more):
        """Return the scales that keep the ratios of the lengths at kernel parameters (p,)."""
        even = cls(kernel, np.zeros(len(theta)), *more)
        return replace(even, moved=theta - even.point(even.phi(theta)))

    @property
    def lengths(self):
        """Where the lengths are in theta."""
        return _places(self.kernel)[1]

    @property
    def kept(self):
        """Which of variance and length phi has, as indices."""
        return [i for i, own in enumerate(_places(self.kernel)) if len(own)]

    @property
    def names(self):
        """What phi consists of."""
        return tuple(_NAMES[i] for i in self.kept)

    @cached_property
    def groups(self):
        """Which places of theta each coordinate moves, ones and zeros (T, p)."""
        places = np.arange(len(self.moved))
        each = [np.isin(places, own) for own in _places(self.kernel) if len(own)]
        return np.reshape(each, (len(each), len(places))).astype(float)

    @property
    def shares(self):
        """Weights (T, p) of the parameters in the coordinates, which are means of theirs."""
        return self.groups / self.groups.sum(axis=1, keepdims=True)

    def phi(self, theta):
        """Return the vector (T,) of kernel parameters (p,)."""
        return self.shares @ theta

    def point(self, phi):
        """Return the kernel parameters (p,) of a vector."""
        return phi @ self.groups + self.moved

    def slopes(self, gradient):
        """Return the gradient (T,) in phi of what has a gradient (p,) in theta."""
        return self.groups @ gradient

    @cached_property
    def bounds(self):
        """Bounds (T, 2) of phi, within which every parameter of the kernel is within its own."""
        low, high = (np.reshape(self.kernel.bounds, (-1, 2)) - self.moved[:, None]).T
        each = [(low[own].max(), high[own].min()) for own in self.groups > 0]
        return np.reshape(each, (-1, 2))

    @cached_property
    def prior(self):
        """The part of the `NormalPrior` that is of phi."""
        both: Any = self.both
        return NormalPrior(both.mean[self.kept], both.sd[self.kept])

    def log_prior(self, phi):
        """Return the log prior density of phi and its gradient."""
        return self.prior.log_density(phi), self.prior.slope(phi)


@dataclass(frozen=True)
class LengthSpace(ThetaSpace):
    """All parameters theta (p,) of a kernel with free lengths, their deviations N(0, s^2).

    Variance and mean length have the prior of `scales`.
    """

    scales: KernelScales
    s: float = 0.0

    def log_prior(self, theta):
        """Return the log prior of theta, less its constant for the deviations, and its slope."""
        scales, lengths = self.scales, self.scales.lengths
        away = theta[lengths] - theta[lengths].mean()
        value, of_phi = scales.log_prior(scales.phi(theta))
        slope = of_phi @ scales.shares
        slope[lengths] -= away / self.s**2
        return value - 0.5 * away @ away / self.s**2, slope

    def prior_precision(self):
        """Return the prior precision (p, p) of theta."""
        shares, own, n = self.scales.shares, self.scales.lengths, len(self.scales.lengths)
        total = (shares.T * self.scales.prior.sd**-2.0) @ shares
        total[np.ix_(own, own)] += (np.eye(n) - 1.0 / n) / self.s**2
        return total


def density_of_ratios(kernel, theta):
    """Return a log prior of the ratios of lengths at theta (p,), but for a constant, and its slope.

    The logs of several lengths of a constant times RBF or Matern are about their mean N(0, s^2) of
    unknown spread s. That is a multivariate t distribution: few rows leave the lengths near each
    other, and where the evidence wants some of them apart, all of them are free. Flat for others.
    """
    split, slope = constant_and_stationary(kernel), np.zeros(len(theta))
    own = () if split is None else _places(kernel)[1]
    if len(own) < 2:
        return 0.0, slope
    apart, (scale, freedom) = theta[own] - theta[own].mean(), _RATIOS
    n, total = freedom + len(own), freedom * scale**2 + apart @ apart
    slope[own] = -n / total * apart
    return -0.5 * n * float(np.log(total)), slope


def learned_coordinates(kernel):
    """Return names, coordinates (T,) and anisotropy of a learned kernel, for one node.

    Variance and mean length where there are these, otherwise all its parameters in logs. Several
    lengths that were learned without a prior have an infinite spread.
    """
    if constant_and_stationary(kernel) is None:
        free = [h for h in kernel.hyperparameters if not h.fixed]
        names = (f"log_{h.name}" for h in free for _ in range(h.n_elements))
        return tuple(names), kernel.theta, np.nan
    scales = KernelScales.at(kernel, kernel.theta)
    spread = np.inf if len(scales.lengths) > 1 else 0.0
    return scales.names, scales.phi(kernel.theta), spread


def _places(kernel):
    """Return the indices in theta of the variance and of the lengths."""
    split: Any = constant_and_stationary(kernel)
    constant, part, constant_first = split
    fixed = constant is None or constant.hyperparameter_constant_value.fixed
    variance, lengths = np.arange(0 if fixed else 1), np.arange(n_lengths(part))
    if constant_first:
        return variance, lengths + len(variance)
    return variance + len(lengths), lengths


class EPNode(NamedTuple):
    """What a node keeps; the first two are the payload of an iteration.

    Where it is, as its problem takes it, state of the posterior, the `Result` of EP; for the others
    see `Nodes`.
    """

    point: Any
    state: Any
    result: Any
    slope: Any = None
    s: float = 0.0

    @property
    def log_evidence(self):
        """Log evidence of the sites, that have settled or not."""
        return float(self.result.evaluation.record["log_evidence"])

    @property
    def residual(self):
        """Residual of the sites."""
        return self.result.residual


def central_differences(value, theta, step=0.01):
    """Return the gradient (p,) of a function at theta, whose values are good to some 1e-6."""
    moves = step * np.eye(len(theta))
    return np.array([value(theta + m) - value(theta - m) for m in moves]) / (2.0 * step)


def tol_of_nodes(tol, n_copies):
    """Return the residual at which sites of a node of an average end, of rows of so many copies.

    The residual is that of a site, which the posterior of many copies of one row counts as often.
    """
    return tol * min(1.0, LIMITS.dense / n_copies)


def settled(solve, x, empty, damping=1.0):
    """Return the `Result` of EP from sites x, or None where sites do not settle on a posterior.

    `solve(x, damping=damping)` runs EP. Where that fails, another run starts from `empty` sites,
    which say nothing, with half the damping and no acceleration: with 400 rows of seven classes
    that are separable it takes 20 sweeps, an accelerated one 88.
    """
    for start, more in ((x, {}), (empty, dict(accelerate=False))):
        try:
            result = solve(start, damping=(0.5 if more else 1.0) * damping, **more)
        except ImproperPosterior:
            continue
        # the evidence of sites that have not settled means nothing and may be thousands of nats
        # off; labels are discrete: a log probability of them above zero is none
        if result.residual < 5e-2 and result.evaluation.record["log_evidence"] <= 0:
            return result
    return None


# Sites are only refined to this residual while the kernel moves: the error of the evidence is of
# second order in it.
LEARNING_TOL = 1e-3


# Of several classes, where the gradient is itself off by tenths of a nat and more.
JOINT_ACCURACY = Accuracy(2e-6, 1e-2, 1.0, 6, 0.4, False)


def random_starts(bounds, n_starts, rng):
    """Return starts (n_starts, p) drawn uniformly within finite log bounds."""
    # a kernel without free parameters has bounds of shape (0,)
    bounds = np.reshape(bounds, (-1, 2))
    if n_starts and not np.all(np.isfinite(bounds)):
        raise ValueError("n_restarts_optimizer needs finite bounds of all kernel parameters.")
    return rng.uniform(bounds[:, 0], bounds[:, 1], size=(n_starts, len(bounds)))


def or_refuse(found):
    """Return what a search found, or raise a ValueError where it had nowhere to start from."""
    if found is None:
        raise ValueError(
            "the evidence of X is not finite at the initial kernel, or EP does not settle there: "
            "change the parameters of the kernel, or lower damping."
        )
    return found


def search_by_function(optimizer, evaluate, starts, bounds, monitor):
    """Let a function of the user search from phi (T,) and further starts; return as `search_mode`.

    It is called as scikit-learn calls it, `optimizer(obj_func, initial_theta, bounds)`, with
    ``obj_func(theta, eval_gradient=True)`` the negative evidence and its gradient, and returns the
    best theta with the value there. What it returns counts as converged, in one iteration.
    """
    descent = NegativeDensity(evaluate)

    def obj_func(theta, eval_gradient=True):
        value, gradient, _ = descent(np.array(theta, dtype=np.float64, ndmin=1))
        return (value, gradient) if eval_gradient else value

    found = []
    for start in starts:
        end = optimizer(obj_func, start.copy(), bounds)
        try:
            best, value = np.array(end[0], dtype=np.float64, ndmin=1), float(end[1])
        except (TypeError, ValueError, IndexError):
            best, value = np.empty(0), np.nan
        if best.shape != start.shape or not (np.isfinite(value) and np.all(np.isfinite(best))):
            raise ValueError(
                f"optimizer must return finite theta of shape {start.shape} and the value there, "
                f"got {end!r}."
            )
        found.append((value, best))
    node = or_refuse(descent(min(found, key=lambda pair: pair[0])[1])[2])
    told(monitor, node)
    return node, LearningEnd("converged", 1, 0.0)
