"""What a strategy asks of the link between latent value and label, for every kind of link.

Estimators of this package tell their links by `latent_links`; of others the likeliest is found.
Those that a logistic function of some slope stands for have closed forms in its units; any other
goes by quadrature of its own probabilities. Look-ahead scores ask for probabilities of all pairs of
rows, hence for links as mixtures of normal distribution functions. Means and variances are those of
the latent value in the estimator's own units.
"""

from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.special import entr, expit, ndtr

from .._engine import quadrature
from .._engine.likelihoods import LabelNoise, Logit, Probit

# Probability below which it is found to relative accuracy: those of several classes are divided by
# their sum. Above, five normal terms are off by 7e-7 at most, in a fifth of the time.
_TAIL = 1e-3


class FactorLink:
    """Any likelihood, by its own probabilities.

    Parameters
    ----------
    factor : Factor
    """

    def __init__(self, factor):
        self.factor, self.slope = factor, factor.logistic_slope or 1.0

    def _labels(self, mean, var):
        """Return (probability, `Tilted`) of the labels +1 and -1."""
        tilted = [self.factor.tilted(y, mean, var) for y in (1.0, -1.0)]
        return [(np.exp(t.log_z), t) for t in tilted]

    def proba(self, mean, var):
        """Return the probability (n,) of the label +1."""
        return np.exp(self.factor.tilted(1.0, mean, var).log_z)

    def precision(self, mean, var):
        """Return the precision (n,) that takes from the variance what a label does on average."""
        fall = var * sum(p * t.curvature for p, t in self._labels(mean, var))
        return np.maximum(fall, 0.0) / (var * np.maximum(1.0 - fall, np.finfo(float).tiny))

    def bald(self, mean, var):
        """Return the mutual information (n,) of label and latent value, by quadrature."""

        def log_entropy(f):
            found = sum(entr(np.exp(self.factor.log_prob(y, f))) for y in (1.0, -1.0))
            return np.log(np.maximum(found, np.finfo(float).tiny))

        p = self.proba(mean, var)
        known = np.exp(quadrature.tilted_by_panels(log_entropy, mean, var)[0])
        return np.maximum(entr(p) + entr(1.0 - p) - known, 0.0)

    def information_gain(self, mean, var):
        """Return the expected Kullback-Leibler divergence (n,) after a label, moments matched."""
        total = 0.0
        for p, t in self._labels(mean, var):
            left = 1.0 - var * t.curvature
            total = total + p * 0.5 * (left - 1.0 - np.log(left) + var * t.gradient**2)
        return total


class LogisticLink(FactorLink):
    """A link that a logistic function of slope times latent value stands for, or is.

    Parameters
    ----------
    factor : Factor
        The link itself, with a `logistic_slope`.
    """

    def _logistic(self, mean, var):
        return self.slope * mean, self.slope**2 * var

    def proba(self, mean, var):
        """Return the probability (n,) of the label +1, of the logistic function itself to 1e-6."""
        if not isinstance(self.factor, Logit):
            return super().proba(mean, var)
        p = quadrature.logistic_mean(mean, var, quick=True)
        tail = p < _TAIL
        p[tail] = np.exp(quadrature.logistic_moments(mean[tail], var[tail], rough=True)[0])
        return p

    def precision(self, mean, var):
        """Return the precision (n,) that a label of unknown value adds on average."""
        p = quadrature.logistic_mean(*self._logistic(mean, var))
        return self.slope**2 * p * (1.0 - p)

    def bald(self, mean, var):
        """Return the mutual information (n,) of label and latent value (Houlsby et al. 2011).

        H(p) - E H(sigma(s)), with E H(sigma(s)) = E softplus(s) - mean p - var E sigma'(s) by
        Stein's identity. Both are even in the mean; on the negative side nothing cancels.
        """
        mean, var = self._logistic(-np.abs(mean), var)
        p, softplus, rise = quadrature.logistic_mixture(mean, var)
        expected = softplus - mean * p - var * rise
        return np.maximum(entr(p) + entr(1.0 - p) - expected, 0.0)

    def information_gain(self, mean, var):
        """Return the expected Kullback-Leibler divergence (n,) of the posterior after the label.

        Each label joins by the site that the local bound gives it (Nickisch and Seeger 2009).
        """
        mean, var = self._logistic(mean, var)
        p = quadrature.logistic_mean(mean, var, quick=True)
        shift = np.array([[0.5], [-0.5]])
        mean, var, shift = np.broadcast_arrays(mean, var, shift)
        # few rows are asked at a time: both labels in one search take half of the time
        flat = quadrature.local_site_precision(mean.ravel(), var.ravel(), shift.ravel())
        precision = flat.reshape(mean.shape)
        kappa = 1.0 + var * precision
        moved = (shift - mean * precision) ** 2 / kappa - precision
        gain = 0.5 * (np.log(kappa) + var / kappa * moved)
        return p * gain[0] + (1.0 - p) * gain[1]


class LinkMixture:
    """A link as e + (1 - 2 e) sum_k w_k Phi((f - t_k) / s_k), whose normal averages are the same.

    Parameters
    ----------
    weights, centres, scales : sequence of float
        w, t and s of the terms.
    low, high : float, default=0 and 1
        Limits of the link: e and 1 - e.
    temper : float, default=1.0
        Scale of the variances.
    """

    def __init__(self, weights, centres, scales, low=0.0, high=1.0, temper=1.0):
        self.weights, self.centres, self.scales = weights, centres, np.asarray(scales)
        # numbers of Python leave arrays in the precision that they have
        self.low, self.high, self.temper = float(low), float(high), float(temper)
        squares = np.square(self.scales).tolist()
        self.terms = list(zip(map(float, weights), map(float, centres), squares, strict=True))

    def calibrated(self, slope, temper):
        """Return the same link of `slope` times a value whose variance is scaled by `temper`."""
        centres = np.asarray(self.centres) / slope
        return LinkMixture(self.weights, centres, self.scales / slope, self.low, self.high, temper)

    def proba(self, mean, var):
        """Return the probability of +1 for normal latent values, arrays of any shape.

        Of single precision to 5e-7, at a sixth of the cost.
        """
        total: Any = 0.0
        cdf = quadrature.quick_ndtr if mean.dtype == np.float32 else ndtr
        for weight, centre, square in self.terms:
            total = total + weight * cdf((mean - centre) / np.sqrt(square + self.temper * var))
        return self.low + (self.high - self.low) * total


# Two terms for the logistic function, largest error 5e-4: one term, 1e-2, puts look-ahead scores
# off by a tenth of their largest.
_LOGISTIC = LinkMixture(
    (0.564435306788094, 0.4355646932119059),
    (0.0, 0.0),
    (1.3010498695491055, 2.2974979348390105),
)
# Largest misfit of a link, in probabilities, at which its look-ahead scores still mean something.
_MISFIT = 0.03


def mixture_of(factor):
    """Return the `LinkMixture` that a likelihood is, or that stands in for it."""
    if isinstance(factor, Probit):
        return LinkMixture([1.0], [0.0], [1.0])
    if isinstance(factor, Logit):
        return _LOGISTIC
    if isinstance(factor, LabelNoise):
        return LinkMixture([1.0], [0.0], [np.sqrt(factor.noise)], factor.rate, 1.0 - factor.rate)
    return _fitted_mixture(factor)


def _fitted_mixture(factor):
    """Fit two terms with limits of their own to the link of any factor."""
    mean, var = np.linspace(-6.0, 6.0, 121), np.full(121, 0.5)
    wanted = np.exp(factor.tilted(1.0, mean, var).log_z)

    def built(x):
        share = expit(x[4])
        return LinkMixture([share, 1.0 - share], x[:2], np.exp(x[2:4]), x[5], x[6])

    starts = [[t, t + 1.0, 0.0, 0.5, 0.0, wanted[0], wanted[-1]] for t in (-2.0, -0.5, 1.0)]
    fits = [least_squares(lambda x: built(x).proba(mean, var) - wanted, x0) for x0 in starts]
    best = min(fits, key=lambda fit: fit.cost).x
    misfit = np.max(np.abs(built(best).proba(mean, var) - wanted))
    if misfit > _MISFIT:
        raise TypeError(
            f"the link of {type(factor).__name__} is not a mixture of normal distribution "
            f"functions (misfit {misfit:.2g}), which look-ahead scores need; use strategy='bald'."
        )
    return built(best)


# ---------------------------------------------------------------------------- what labels say


class ClassResponse:
    """What a class label says of the latent values of all binary problems.

    Parameters
    ----------
    clean, observed : list of Factor
        Links of the predictions, and of the labels that are received: they differ where labels may
        be wrong.
    slope, temper : ndarray of shape (K,), default=1.0
        Scales of mean and variance of a calibration: predictions are at `slope` times the latent
        mean and slope^2 `temper` times its variance. Labels act on latent values without it.
    """

    def __init__(self, clean, observed, slope=1.0, temper=1.0):
        self.slope, self.temper = (np.broadcast_to(a, len(clean)) for a in (slope, temper))
        self.links, self.observed = [_link_of(f) for f in clean], observed
        self._observed_links = [_link_of(f) for f in observed]

    @cached_property
    def mixtures(self):
        """One `LinkMixture` a problem, of the predictions."""
        each = zip(self.links, self.slope, self.temper, strict=True)
        return [mixture_of(link.factor).calibrated(a, t) for link, a, t in each]

    @property
    def spread(self):
        """What the variances of predictions are of those of latent values (K,)."""
        return self.slope**2 * self.temper

    def _predictors(self, mean, var):
        return self.slope * mean, self.spread * var

    def of_links(self, name, mean, var):
        """Return what the links of predictions say at latent moments (n, K), column by column."""
        return _columns(self.links, name, *self._predictors(mean, var))

    def proba(self, mean, var):
        """Return class probabilities (n, n_classes)."""
        return _normalised(self.of_links("proba", mean, var))

    def label_proba(self, mean, var):
        """Return probabilities (n, n_classes) of the labels that would be received."""
        return _normalised(_columns(self._observed_links, "proba", *self._predictors(mean, var)))

    def sites(self, sign, mean, var):
        """Return gradients and curvatures (n, K) of labels of one sign, or of one a problem."""
        signs = np.broadcast_to(sign, len(self.observed)).tolist()
        columns = zip(self.observed, signs, mean.T, var.T, strict=True)
        tilted = [factor.tilted(s, m, v) for factor, s, m, v in columns]
        return tuple(np.column_stack([t[k] for t in tilted]) for k in (1, 2))

    def site(self, label, mean, var):
        """Return gradient and curvature (1, K) of a class index, or of a label not known yet."""
        if label is None:
            precision = _columns(self._observed_links, "precision", mean, var)
            return np.zeros_like(mean), precision / (1.0 + precision * var)
        own = np.arange(mean.shape[1]) == label if mean.shape[1] > 1 else np.array([label == 1])
        return self.sites(np.where(own, 1.0, -1.0), mean, var)


def _columns(links, name, mean, var):
    columns = zip(links, mean.T, var.T, strict=True)
    return np.column_stack([getattr(link, name)(m, v) for link, m, v in columns])


def _normalised(p):
    if p.shape[1] == 1:
        return np.column_stack([1.0 - p, p])
    return p / p.sum(axis=1, keepdims=True)


class NormalResponse:
    """What the response of a row says of its value; variances are those of responses."""

    def site(self, label, mean, var):
        """Return gradient and curvature (1, 1) of a response, or of one not known yet."""
        return np.zeros_like(mean) if label is None else (label - mean) / var, 1.0 / var


# ---------------------------------------------------------------------------- whose link it is


def response_of(estimator, X, source):
    """Return the `ClassResponse` of a classifier: the links that it tells, or the likeliest."""
    if hasattr(estimator, "latent_links"):
        links = estimator.latent_links(), estimator.latent_links(observed=True)
        return ClassResponse(*links, *calibration_of(estimator))
    mean, var = source.moments(X)
    factors = _foreign_links(estimator, mean, var, estimator.predict_proba(X))
    return ClassResponse(factors, factors)


def calibration_of(estimator):
    """Return the scales of mean and variance of a calibrated estimator, one for each problem.

    Its latent means and variances have them.
    """
    return tuple(np.ravel(getattr(estimator, name, 1.0)) for name in ("slope_", "temper_"))


def _foreign_links(estimator, mean, var, proba):
    """Return the likelihoods that explain the probabilities of an estimator that tells none.

    One that has no covariances is taken for logistic or probit, whichever is nearer.
    """
    proba = proba[:, 1:] if mean.shape[1] == 1 else proba
    tried = [Logit(), Probit()]
    worst = [np.max(np.abs(_misfit(factor, mean, var, proba)), initial=0.0) for factor in tried]
    best = int(np.argmin(worst))
    factor, error = tried[best], worst[best]
    if hasattr(estimator, "latent_covariance"):
        if error > 1e-3 and mean.shape[1] == 1:
            factor = _fitted_probit(mean, var, proba)
            error = np.max(np.abs(_misfit(factor, mean, var, proba)))
        if error > (_MISFIT if mean.shape[1] == 1 else 1e-3):
            raise TypeError(
                f"no link explains the probabilities of {type(estimator).__name__} by its latent "
                f"means and variances (misfit {error:.2g}); define its method latent_links."
            )
    return [factor] * mean.shape[1]


def _misfit(factor, mean, var, proba):
    p = _columns([_link_of(factor)] * mean.shape[1], "proba", mean, var)
    return _normalised(p)[:, -mean.shape[1] :] - proba


def _fitted_probit(mean, var, proba):
    """Return the probit with a scale and a rate of wrong labels that misfits least."""
    size = np.max(np.abs(mean)) + np.sqrt(np.max(var)) + np.finfo(float).tiny
    some = np.linspace(0, len(mean) - 1, min(len(mean), 500)).round().astype(int)

    def built(x):
        return LabelNoise(0.5 * expit(x[1]), np.exp(2.0 * x[0]))

    def error(x):
        return _misfit(built(x), mean[some], var[some], proba[some]).ravel()

    starts = [[np.log(share * size), -7.0] for share in (0.01, 0.1, 1.0)]
    return built(min((least_squares(error, x0) for x0 in starts), key=lambda fit: fit.cost).x)


def _link_of(factor):
    return FactorLink(factor) if factor.logistic_slope is None else LogisticLink(factor)
