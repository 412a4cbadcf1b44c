"""Mode and curvature of the posterior of shared parameters, local effects integrated out.

The local effects have to be integrated before a mode in the group scales is sought: the joint mode
of scales and effects is meaningless (unbounded in one parametrisation, 5 to 130 sd off in the
other). Each partition answers with value, gradient and Hessian of its marginal likelihood, and the
centre makes the Newton steps. What the partitions say at the mode are the site messages of Laplace
propagation, which is where expectation propagation starts from.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import expit, log_expit, logsumexp

from ..._engine import gaussian
from ..._engine.gaussian import backward, forward
from ..._engine.loop import SILENT, Trace, reason_to_end
from ..._engine.quadrature import hermite_product
from .. import _scales
from .._layout import group_factors
from .arrow import segment_products
from .messages import is_proper


class SiteTerms(NamedTuple):
    """Marginal log likelihood of a partition with gradient (P,), Hessian (P, P), effect modes."""

    value: float
    gradient: np.ndarray
    hessian: np.ndarray
    modes: np.ndarray


def effect_rule(q):
    """Return nodes (k, q) and log weights of a product Gauss-Hermite rule for N(0, I_q)."""
    return hermite_product(({1: 9, 2: 5}.get(q, 3),) * q)


def effect_modes(rows, offset, design, modes, tol=1e-6):
    """Return modes (..., J, q) of the effects, and Cholesky factors (..., J, q, q) there.

    offset (..., n) is X beta, design (..., n, q) that of the effects; the search starts at `modes`
    and ends once the longest last step is below tol prior sd. Newton with steps of at most two
    prior sd: the factor is log-concave, and the bound keeps the first steps of a large scale from
    overshooting.
    """
    group = rows.group
    for _ in range(50):
        z = offset + np.sum(design * modes[..., group, :], -1)
        residual, curvature = _derivatives(rows, z)
        slope = np.add.reduceat(residual[..., None] * design, rows.starts, axis=-2) - modes
        lower = group_factors(curvature, design, rows.starts)
        step = backward(lower, forward(lower, slope[..., None]))[..., 0]
        longest = np.abs(step).max(-1, keepdims=True)
        modes = modes + step * np.minimum(1.0, 2.0 / np.maximum(longest, 1e-300))
        if longest.max() < tol:
            break
    return modes, lower


def _derivatives(rows, z):
    """Return slope and negative curvature (..., n) of the log likelihood in predictors z."""
    p = expit(z)
    return rows.weight * (0.5 * (1.0 + rows.sign) - p), rows.weight * p * (1.0 - p)


def _louis(score, share):
    """Return gradient and the covariance part of Louis' identity for node scores (k, J, P)."""
    root = np.sqrt(share)[..., None]
    mean = np.einsum("kj,kjp->jp", share, score)
    spread = (root * (score - mean)).reshape(-1, score.shape[-1])
    return mean.sum(0), spread.T @ spread


def marginal_terms(rows, phi, q, modes=None):
    """Return the `SiteTerms` of the rows at phi = (beta, theta) with q varying coefficients.

    Adaptive Gauss-Hermite quadrature about the modes of the effects, whose search starts at modes
    (J, q), None for zero; gradient and Hessian by Louis' identity over the same nodes. O(n D^2) and
    a product with X for each of the 9 nodes (5^2 for q = 2).
    """
    d = rows.X.shape[1]
    offset, modes = rows.X @ phi[:d], np.zeros((len(rows.starts), q)) if modes is None else modes
    if q == 0:
        residual, curvature = _derivatives(rows, offset)
        value = rows.weight @ log_expit(rows.sign * offset)
        return SiteTerms(
            value, residual @ rows.X, -gaussian.weighted_gram(rows.X, curvature), modes
        )
    design = rows.local @ _scales.factor(phi[d:], q)
    modes, lower = effect_modes(rows, offset, design, modes)
    x, log_weight = effect_rule(q)
    u, group = modes + backward(lower, x[:, None, :, None])[..., 0], rows.group
    z = offset + np.einsum("nq,knq->kn", design, u[:, group])
    density = np.add.reduceat(rows.weight * log_expit(rows.sign * z), rows.starts, axis=1)
    k = np.arange(q)
    density += (log_weight + 0.5 * np.sum(x**2, 1))[:, None]
    density -= 0.5 * np.sum(u**2, 2) + np.log(lower[:, k, k]).sum(1)
    total = logsumexp(density, axis=0)
    share = np.exp(density - total)
    residual, curvature = _derivatives(rows, z)
    curvature *= share[:, group]
    slope = np.einsum("tnq,knq->tkn", rows.local @ _scales.tangent(phi[d:], q), u[:, group])
    of_theta = np.moveaxis(np.add.reduceat(residual * slope, rows.starts, axis=2), 0, -1)
    score = np.concatenate([segment_products(rows, residual), of_theta], axis=2)
    gradient, hessian = _louis(score, share)
    cross = np.einsum("kn,tkn->tn", curvature, slope) @ rows.X
    hessian[:d, :d] -= gaussian.weighted_gram(rows.X, curvature.sum(0))
    hessian[d:, :d] -= cross
    hessian[:d, d:] -= cross.T
    hessian[d:, d:] -= np.einsum("kn,skn,tkn->st", curvature, slope, slope, optimize=True)
    bent = d + _scales.diagonal_positions(q)
    hessian[bent, bent] += gradient[bent]
    return SiteTerms(float(total.sum()), gradient, hessian, modes)


class Ascent(NamedTuple):
    """A point of the climb, and the Newton step from it.

    value is the objective, terms what the partitions say, step the next Newton step, gain the
    slope along it, length its length in posterior sd.
    """

    phi: np.ndarray
    terms: list[SiteTerms]
    value: float
    step: np.ndarray
    gain: float
    length: float


def _ascent(evaluate, prior, phi, d):
    """Return the `Ascent` at phi: a Newton step made uphill by flipping negative curvatures.

    Curvatures are compared in coordinates scaled by their diagonal, so that units of columns do not
    matter. The whole step is shortened where a log scale would move by more than one.
    """
    terms = evaluate(phi)
    value = sum(t.value for t in terms) - 0.5 * phi @ prior.precision @ phi + prior.shift @ phi
    hessian = prior.precision - sum(t.hessian for t in terms)
    gradient = prior.shift - prior.precision @ phi + sum(t.gradient for t in terms)
    scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(hessian)), 1e-300))
    values, vectors = np.linalg.eigh(hessian * scale * scale[:, None])
    turned = vectors.T @ (scale * gradient)
    step = turned / np.maximum(np.abs(values), 1e-8)
    length = float(np.sqrt(step @ turned))
    step = scale * (vectors @ step)
    step /= max(1.0, np.max(np.abs(step[d:]), initial=0.0))
    return Ascent(phi, terms, float(value), step, step @ gradient, length)


def find_mode(evaluate, prior, phi, d, *, tol, max_iter, damping=1.0, monitor=SILENT):
    """Climb to the mode of the marginal posterior by Newton steps with a line search.

    evaluate maps phi, whose first d entries are coefficients and the rest coordinates of the group
    scales, to a list of `SiteTerms`. It stops once the Newton step is shorter than tol posterior
    sd; damping is the first trial of the line search. The monitor is told of each iteration, with
    the `Ascent` at the point it led to. Returns the last one, and the `Trace`, the `Reason` and the
    log evidence.
    """
    trace, reason, evidence = Trace(monitor), None, 0.0
    here = _ascent(evaluate, prior, phi, d)
    while reason is None:
        trace.begin()
        settled, stuck = here.length < tol, False
        if not settled:
            there = _climbed(evaluate, prior, here, damping, d)
            stuck = there is None
            here = here if there is None else there
        evidence = _laplace_evidence(here.value, here.terms, prior)
        trace.end({"residual": here.length, "log_evidence": evidence}, here)
        reason = reason_to_end(trace, here.length < tol, settled, stuck, max_iter)
    return here, trace, reason, evidence


def _climbed(evaluate, prior, here, damping, d):
    """Return where a line search along the Newton step leads, or None if nothing is gained.

    A point without a value is infinitely low. Where no step gains, quadrature and derivatives
    disagree: nothing is left to gain.
    """
    share = damping
    for _ in range(12):
        try:
            there = _ascent(evaluate, prior, here.phi + share * here.step, d)
            if there.value >= here.value + 1e-4 * share * here.gain - 1e-9 * abs(here.value):
                return there
        except (FloatingPointError, np.linalg.LinAlgError):
            pass
        share *= 0.4
    return None


def _site_precisions(terms):
    return np.stack([-0.5 * (t.hessian + t.hessian.T) for t in terms])


def _proper_share(prior, precision, with_cavities):
    """Return the largest of 1, 0.7, 0.49, ... by which the sites have to be weakened to be proper.

    A share small enough always exists, because the prior is proper.
    """
    share = 1.0
    while not is_proper(prior, share * precision, with_cavities):
        share *= 0.7
    return share


def _laplace_evidence(value, terms, prior):
    """Return log of the Laplace integral of the posterior; the prior is normalised here.

    Before the mode is reached the posterior may bend the wrong way; the Gaussian is then that of
    `laplace_messages`.
    """
    precision = _site_precisions(terms)
    share = _proper_share(prior, precision, with_cavities=False)
    lower = gaussian.checked_cholesky(prior.precision + share * precision.sum(0))
    return float(value - np.sum(np.log(np.diagonal(lower))) - gaussian.log_partition(prior))


def laplace_messages(mode, prior, *, with_cavities=True):
    """Return the messages of the sites at an `Ascent`, that at the mode or one on the way.

    Their product with the prior is the Laplace approximation. Where that is improper, or leaves a
    cavity improper and `with_cavities` asks for those, all messages are weakened by the same share,
    which keeps the mode.
    """
    precision = _site_precisions(mode.terms)
    shift = np.stack([t.gradient for t in mode.terms]) + precision @ mode.phi
    share = _proper_share(prior, precision, with_cavities)
    return gaussian.Natural(share * precision, share * shift)
