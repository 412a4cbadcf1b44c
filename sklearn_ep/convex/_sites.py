"""Super-Gaussian sites and their two variational bounds: of rows, and of priors of coefficients.

Both bounds are one function of the mean s and the variance z of a linear predictor, or coefficient:
a penalty f that is convex in s, its two derivatives, and the precision of the Gaussian site that is
tangent there. What minimises sum f and what iterates over z does not know which bound it serves.

local
    f(s, z) = -g(z + s^2) - shift s, precision -2 g'(z + s^2), of t(s) = exp(shift s + g(s^2)): the
    quadratic lower bound of t that touches at s^2 + z (Jaakkola and Jordan 2000; Nickisch and
    Seeger 2009, whose implicit h* has this closed form for every super-Gaussian site).
kl
    f(s, z) = -E log t(S), S ~ N(s, z), precision f'': the Kullback-Leibler bound of a Gaussian
    posterior (Opper and Archambeau 2009).
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaln, erf

from .._engine.quadrature import local_precision, local_site_precision, logistic_mixture
from .._estimator.checks import check_choice, check_positive
from ._systems import TINY

BOUNDS = ("local", "kl")
# A Laplace site far from zero has no curvature left; this share of its squared rate keeps the
# precision matrix of the coefficients invertible and changes the posterior by as little.
_LAPLACE_FLOOR = 1e-6


class Penalty(NamedTuple):
    """Penalty f of each site, its slope and curvature in s, and its tangent precision."""

    value: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray
    precision: np.ndarray


class LogisticSites:
    """Sites 1 / (1 + exp(-y s)) raised to the power of their weights.

    Parameters
    ----------
    sign : ndarray of shape (q,)
        Labels in {-1, +1}.
    weight : ndarray of shape (q,)
        Copies of each row.
    bound : {"kl", "local"}
    """

    def __init__(self, sign: np.ndarray, weight: np.ndarray, bound: str) -> None:
        self.sign, self.weight, self.bound = sign, weight, bound
        self.shift = 0.5 * weight * sign

    def of_rows(self, rows: slice) -> "LogisticSites":
        """Return the sites of some rows."""
        return LogisticSites(self.sign[rows], self.weight[rows], self.bound)

    def penalty(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        """Return the `Penalty` at means s and variances z, both (q,)."""
        if self.bound == "local":
            return self._local(s, z)
        wrong, loss, slope = logistic_mixture(-self.sign * s, z)
        curvature = self.weight * slope
        return Penalty(self.weight * loss, -self.sign * self.weight * wrong, curvature, curvature)

    def _local(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        x = np.maximum(z + s * s, TINY)
        v = 0.5 * np.sqrt(x)
        precision, odds = self.weight * local_precision(x), np.exp(-2.0 * v)
        value = self.weight * (v + np.log1p(odds)) - self.shift * s
        share = np.where(z + s * s > 0, z / x, 1.0)
        curvature = share * precision + (1.0 - share) * self.weight * odds / (1.0 + odds) ** 2
        return Penalty(value, precision * s - self.shift, curvature, precision)

    def joined(self, mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Precision and shift of the Gaussian sites that join the marginals N(mean, var).

        Each row is its own problem with one copy of its site: the bound is maximised over that site
        alone, everything else about the predictor being summarised by its marginal.
        """
        if self.bound == "local":
            shift = 0.5 * self.sign
            return local_site_precision(mean, var, shift), shift
        one = LogisticSites(self.sign, np.ones(len(self.sign)), self.bound)
        s, z = np.array(mean, dtype=float), np.array(var, dtype=float)
        for _ in range(500):
            f = one.penalty(s, z)
            ds = -(var * f.slope + s - mean) / (1.0 + var * f.curvature)
            new = var / (1.0 + var * f.precision)
            settled = np.abs(ds) <= 1e-12 * (1.0 + np.abs(s))
            settled &= np.abs(new - z) <= 1e-12 * new
            s, z = s + ds, new
            if np.all(settled):
                break
        f = one.penalty(s, z)
        return f.precision, f.precision * s - f.slope


class SuperGaussianSite:
    """An even prior density proportional to t(s) = exp(-loss(s^2)).

    A subclass defines `loss` and `precision`; nothing else is needed. The loss has to be increasing
    and concave in s^2, so that t is a mixture of Gaussians: then a Gaussian supports it from below
    at every point.

    Attributes
    ----------
    growth : float
        The loss grows about as |s|^growth for large s. It only sets the step with which a scale is
        learned; 2 is the careful choice.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep.sites import SuperGaussianSite
    >>> class Logistic(SuperGaussianSite):
    ...     growth = 1.0
    ...
    ...     def loss(self, x):
    ...         return 2.0 * np.log(np.cosh(0.5 * np.sqrt(x)))
    ...
    ...     def precision(self, x):
    ...         return np.tanh(0.5 * np.sqrt(x)) / np.sqrt(x)
    >>> print(f"density at zero {np.exp(Logistic().log_normaliser()):.2f}")
    density at zero 0.25
    """

    growth = 2.0

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return the loss at squares of the coefficient.

        Parameters
        ----------
        x : ndarray
            Squares s^2, positive.

        Returns
        -------
        loss : ndarray
            -log t(s), of the shape of x.
        """
        raise TypeError(f"{type(self).__name__} must define loss(x).")

    def precision(self, x: np.ndarray) -> np.ndarray:
        """Return the precision of the Gaussian that supports the density.

        Parameters
        ----------
        x : ndarray
            Squares s^2 of the points of contact, positive.

        Returns
        -------
        precision : ndarray
            Twice the derivative of the loss, of the shape of x.
        """
        raise TypeError(f"{type(self).__name__} must define precision(x).")

    def log_normaliser(self) -> float:
        """Return the logarithm of the factor that makes t a density.

        Returns
        -------
        log_normaliser : float
            By quadrature over log |s| unless a subclass knows better; nan where t has no integral,
            and evidences with it.
        """
        width = -0.5 * np.log(self.start_precision())
        u, step = np.linspace(width - 60.0, width + 60.0, 24001, retstep=True)
        with np.errstate(over="ignore"):  # far out any loss may
            log_terms = u - self.loss(np.exp(2.0 * u))
        top = np.max(log_terms)
        if not np.isfinite(top) or log_terms[-1] > top - 20.0:
            return float("nan")
        return -float(top + np.log(2.0 * step * np.sum(np.exp(log_terms - top))))

    def start_precision(self) -> float:
        """Return the precision of a Gaussian as wide as the bulk of the density.

        Returns
        -------
        precision : float
            That of the point of contact x with x precision(x) = 1.
        """

        def slope(log_x):
            x = np.exp(np.array([log_x]))
            return float(np.log(x * self.precision(x))[0])

        return float(np.exp(-brentq(slope, -200.0, 200.0, xtol=1e-13)))

    def penalty(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        """Return the variational penalty of coefficients.

        Parameters
        ----------
        s, z : ndarray of shape (n,)
            Posterior means and variances.

        Returns
        -------
        penalty : tuple of four ndarray of shape (n,)
            Value, slope and curvature in s, and the precision of the tangent Gaussian: the local
            bound, with the precision in place of the curvature. It is never smaller, so that steps
            with it go downhill where the density is not log-concave.
        """
        x = np.maximum(z + s * s, TINY)
        precision = self.precision(x)
        return Penalty(self.loss(x), precision * s, precision, precision)

    def __repr__(self) -> str:
        own = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({own})"


class LaplaceSite(SuperGaussianSite):
    """Laplace prior exp(-|s| / scale) / (2 scale).

    Parameters
    ----------
    scale : float, default=1.0
        Mean of |s|, in units of a coefficient.
    bound : {"local", "kl"}, default="local"
        "kl" averages the loss over the Gaussian posterior, which this prior allows in closed form;
        standard deviations come out 2 to 36 % larger than those of the local bound, which are too
        small.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import ConvexVariationalRegressor
    >>> from sklearn_ep.sites import LaplaceSite
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(50, 4))
    >>> y = 2 * X[:, 0] + 0.5 * rng.normal(size=50)
    >>> reg = ConvexVariationalRegressor(LaplaceSite(0.1, bound="kl")).fit(X, y)
    >>> print(reg.coef_.round(1) + 0.0)
    [1.9 0.  0.  0.1]
    """

    growth = 1.0

    def __init__(self, scale: float = 1.0, bound: str = "local") -> None:
        check_positive("scale", scale, finite=True)
        check_choice("bound", bound, BOUNDS)
        self.scale, self.bound = scale, bound

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return the loss at squares of the coefficient.

        Parameters
        ----------
        x : ndarray
            Squares s^2, positive.

        Returns
        -------
        loss : ndarray
            |s| / scale.
        """
        return np.sqrt(x) / self.scale

    def precision(self, x: np.ndarray) -> np.ndarray:
        """Return the precision of the Gaussian that supports the density.

        Parameters
        ----------
        x : ndarray
            Squares s^2 of the points of contact, positive.

        Returns
        -------
        precision : ndarray
            1 / (scale |s|).
        """
        return 1.0 / (self.scale * np.sqrt(x))

    def log_normaliser(self) -> float:
        """Return the logarithm of the factor that makes t a density.

        Returns
        -------
        log_normaliser : float
            -log(2 scale).
        """
        return -float(np.log(2.0 * self.scale))

    def start_precision(self) -> float:
        """Return the precision of the Gaussian with the same variance.

        Returns
        -------
        precision : float
            1 / (2 scale^2).
        """
        return 0.5 / self.scale**2

    def penalty(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        """Return the variational penalty of coefficients.

        Parameters
        ----------
        s, z : ndarray of shape (n,)
            Posterior means and variances.

        Returns
        -------
        penalty : tuple of four ndarray of shape (n,)
            Value, slope and curvature in s, and the precision of the tangent Gaussian. Curvature
            and precision are at least 1e-6 / scale^2, which keeps posterior precisions invertible
            and changes the posterior by as little.
        """
        if self.bound == "kl":
            f = self._averaged(s, z)
        else:
            f = super().penalty(s, z)
            f = f._replace(curvature=f.precision * z / np.maximum(z + s * s, TINY))
        floor = _LAPLACE_FLOOR / self.scale**2
        return Penalty(*f[:2], np.maximum(f.curvature, floor), np.maximum(f.precision, floor))

    def _averaged(self, s: np.ndarray, z: np.ndarray) -> Penalty:
        """Return the loss averaged over N(s, z), with its derivatives."""
        rate, d = 1.0 / self.scale, np.sqrt(z)
        a = s / d
        density = np.exp(-0.5 * a * a) / np.sqrt(2.0 * np.pi)
        odd = erf(a / np.sqrt(2.0))
        curvature = 2.0 * rate * density / d
        return Penalty(rate * (2.0 * d * density + s * odd), rate * odd, curvature, curvature)


class StudentTSite(SuperGaussianSite):
    """Student's t prior: heavy tails, so that large coefficients are hardly shrunk.

    Parameters
    ----------
    df : float, default=3.0
        Degrees of freedom; 1 is the Cauchy distribution, infinity the normal one.
    scale : float, default=1.0
        Scale, in units of a coefficient.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import ConvexVariationalRegressor
    >>> from sklearn_ep.sites import StudentTSite
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(50, 4))
    >>> y = 2 * X[:, 0] + 0.5 * rng.normal(size=50)
    >>> reg = ConvexVariationalRegressor(StudentTSite(3.0, 0.1)).fit(X, y)
    >>> print(reg.coef_.round(1) + 0.0)
    [2.  0.  0.  0.1]
    """

    def __init__(self, df: float = 3.0, scale: float = 1.0) -> None:
        check_positive("df", df, finite=True)
        check_positive("scale", scale, finite=True)
        self.df, self.scale = df, scale

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return the loss at squares of the coefficient.

        Parameters
        ----------
        x : ndarray
            Squares s^2, positive.

        Returns
        -------
        loss : ndarray
            (df + 1) / 2 log(1 + x / (df scale^2)).
        """
        return 0.5 * (self.df + 1.0) * np.log1p(x / (self.df * self.scale**2))

    def precision(self, x: np.ndarray) -> np.ndarray:
        """Return the precision of the Gaussian that supports the density.

        Parameters
        ----------
        x : ndarray
            Squares s^2 of the points of contact, positive.

        Returns
        -------
        precision : ndarray
            (df + 1) / (df scale^2 + x).
        """
        return (self.df + 1.0) / (self.df * self.scale**2 + x)

    def log_normaliser(self) -> float:
        """Return the logarithm of the factor that makes t a density.

        Returns
        -------
        log_normaliser : float
            In closed form.
        """
        return -float(betaln(0.5 * self.df, 0.5) + 0.5 * np.log(self.df) + np.log(self.scale))


class HorseshoeSite(SuperGaussianSite):
    """Horseshoe-like prior log(1 + 4 scale^2 / s^2), peaked at zero and with Cauchy's tails.

    Small coefficients shrink to zero much more than large ones; it is a continuous relative of
    spike and slab. There may be several local optima.

    Parameters
    ----------
    scale : float, default=1.0
        Scale, in units of a coefficient; small for few large coefficients among many.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_ep import ConvexVariationalRegressor
    >>> from sklearn_ep.sites import HorseshoeSite
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(50, 4))
    >>> y = 2 * X[:, 0] + 0.5 * rng.normal(size=50)
    >>> reg = ConvexVariationalRegressor(HorseshoeSite(0.1)).fit(X, y)
    >>> print(reg.coef_.round(1) + 0.0)
    [2.  0.  0.  0.1]
    """

    def __init__(self, scale: float = 1.0) -> None:
        check_positive("scale", scale, finite=True)
        self.scale = scale

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return the loss at squares of the coefficient.

        Parameters
        ----------
        x : ndarray
            Squares s^2, positive.

        Returns
        -------
        loss : ndarray
            -log log(1 + 4 scale^2 / x).
        """
        return -np.log(np.log1p(4.0 * self.scale**2 / x))

    def precision(self, x: np.ndarray) -> np.ndarray:
        """Return the precision of the Gaussian that supports the density.

        Parameters
        ----------
        x : ndarray
            Squares s^2 of the points of contact, positive.

        Returns
        -------
        precision : ndarray
            With v = 4 scale^2: 2 v / (x (x + v) log(1 + v / x)).
        """
        v = 4.0 * self.scale**2
        share = v / x
        return 2.0 * share / ((x + v) * np.log1p(share))

    def log_normaliser(self) -> float:
        """Return the logarithm of the factor that makes t a density.

        Returns
        -------
        log_normaliser : float
            -log(4 pi scale).
        """
        return -float(np.log(4.0 * np.pi * self.scale))


# What a prior may be, for messages of errors.
SITES = "an instance of LaplaceSite, StudentTSite or HorseshoeSite of sklearn_ep.sites"
