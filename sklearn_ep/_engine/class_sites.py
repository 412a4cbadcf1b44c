"""Expectation propagation for more than two classes with one joint posterior.

A label of several classes (`noisy_argmax`) says who won. Its site is exp(-f'T f / 2 + b'f) with
T = diag(d) - d d' / sum d and sum b = 0: K numbers d that link each class to the winner's utility
and leave the common level of the latent values, of which labels say nothing, alone. The links form
a star with that utility at its centre::

    f_1 --d_1-- u --d_3-- f_3        d (n, K) >= 0, b (n, K) with rows that sum to 0
                |
               d_2                   T f = d (f - u),  u = sum_c d_c f_c / sum_c d_c
                |
               f_2

Such a site comes in closed form from one integral over the utility, has no negative curvature for
normal noise, and is the binary site at K = 2. Where the label may be wrong links of losers may be
negative, as the precisions of binary sites; that of the winner and their sum never are.
`class_update` is one pass over the rows, `JointEP` the fixed-point map whose structure says what a
posterior with such sites is, as those of `class_structures`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import gaussian
from .contracts import require
from .loop import Anderson, Evaluation, Result, iterate
from .noisy_argmax import ClassTilted
from .sites import Cavity, Sites, removable

# Smallest variance that `contrast_variances` returns.
_LEAST_VARIANCE = 1e-8


class ClassUpdate(NamedTuple):
    """What one pass over the rows gives.

    sites are the undamped targets; log_term (n,) is the contribution of each row to the log
    evidence; tilted is that of the factor under the cavities. removed (n,) are the copies of the
    old site that the cavities lack: one as a rule, see `removable`, and none where the marginal
    replaces a cavity that is not proper.
    """

    sites: Sites
    log_term: np.ndarray
    tilted: ClassTilted
    removed: np.ndarray

    @property
    def noise_slope(self) -> np.ndarray:
        """Derivative (n,) of the log evidence in a variance added to all classes of a row."""
        _, g, e = self.tilted
        return 0.5 * np.sum(g**2 - e + e**2 / e.sum(1, keepdims=True), axis=1)


def contrast_variances(cov: np.ndarray) -> np.ndarray:
    """Return variances (n, K) of independent values whose contrasts are closest to those of cov.

    Labels see differences f_c - f_j only. Least squares over all pairs, exact for K of 2 and 3; a
    class whose contrasts share less than the others do among each other would get a negative
    variance, and gets `_LEAST_VARIANCE`.
    """
    K = cov.shape[-1]
    own = np.einsum("ncc->nc", cov)
    if K == 2:
        half = 0.5 * (own.sum(1) - 2 * cov[:, 0, 1])
        v = np.column_stack([half, half])
    else:
        R = K * own + own.sum(1)[:, None] - 2 * cov.sum(2)
        total = R.sum(1) / (2 * (K - 1))
        v = (R - total[:, None]) / (K - 2)
    return np.maximum(v, _LEAST_VARIANCE)


def stars(d: np.ndarray) -> np.ndarray:
    """Return T = diag(d) - d d' / sum d of each row, (n, K, K)."""
    T = -d[:, :, None] * (d / d.sum(1, keepdims=True))[:, None, :]
    np.einsum("ncc->nc", T)[:] += d
    return T


def class_cavities(sites: Sites, mean: np.ndarray, cov: np.ndarray, copies: np.ndarray) -> Cavity:
    """Return the `Cavity` of all classes, with covariances (n, K, K), without so many copies (n,).

    One that is left with no variance is not proper: where hyperparameters changed since, or links
    of other rows are negative.
    """
    sites = Sites(*(copies[:, None] * x for x in sites))
    A = np.eye(mean.shape[1]) - cov @ stars(sites.precision)
    proper = np.linalg.det(A) > 0
    A[~proper] = np.eye(mean.shape[1])
    shift = np.where(proper[:, None], sites.shift, 0.0)
    shifted = mean - np.einsum("ncj,nj->nc", cov, shift)
    solved = np.linalg.solve(A, np.concatenate([shifted[:, :, None], cov], axis=2))
    m, without = solved[:, :, 0], solved[:, :, 1:]
    without = 0.5 * (without + without.transpose(0, 2, 1))
    own = np.einsum("ncc->nc", without)
    contrasts = own[:, :, None] + own[:, None, :] - 2.0 * without
    lost = proper & np.any(contrasts < 0, axis=(1, 2))
    m[lost], without[lost] = mean[lost], cov[lost]
    return Cavity(m, without, np.where(proper & ~lost, copies, 0.0))


def _removable(sites: Sites, cov: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the copies (n,) that can go, by the direction of which a site has the most."""
    share, light = np.zeros(len(weight)), weight < 1.0
    of_all = cov[light] @ stars(sites.precision[light])
    share[light] = np.einsum("ncc->n", of_all)  # no direction has more than the sum
    near = removable(share, weight) < 1.0
    share[near] = np.linalg.eigvals(of_all[near[light]]).real.max(axis=1, initial=0.0)
    return removable(share, weight)


def class_update(
    factor: Any,
    y: np.ndarray,
    sites: Sites,
    mean: np.ndarray,
    cov: np.ndarray,
    extra_var: Any,
    weight: np.ndarray | None = None,
) -> ClassUpdate:
    """Match moments row by row: cavities, the factor, new sites.

    `extra_var` (n,) or 0 is the variance of the latent values of all classes given the values that
    carry the sites, `weight` (n,) the copies of the sites in the posterior, ones by default.
    """
    removed = np.ones(len(y))
    if weight is not None and np.any(weight < 1.0):
        removed = _removable(sites, cov, weight)
    m, without, removed = class_cavities(sites, mean, cov, removed)
    v = contrast_variances(without)
    tilted = factor.tilted(y, m, v + np.reshape(extra_var, (-1, 1)))
    left = 1.0 - v * tilted.slope
    if not np.all(left > 0):
        raise gaussian.ImproperPosterior("latent values of classes are beyond double precision")
    d = tilted.slope / left
    if not np.all(d.sum(1) > 0):
        raise gaussian.ImproperPosterior("a row takes more of its classes' precision than it has")
    new = Sites(d, gaussian.star_times(d, m + v * tilted.gradient) + tilted.gradient)
    log_term = tilted.log_z - _log_mass(sites, m, v)
    return ClassUpdate(new, log_term, tilted, removed)


def class_left_out(
    sites: Sites, mean: np.ndarray, cov: np.ndarray, extra_var: Any, copies: np.ndarray
) -> Cavity:
    """Return the `Cavity` (n, K) without so many copies (n,) of each row."""
    found = class_cavities(sites, mean, cov, copies)
    return found._replace(var=contrast_variances(found.var) + np.reshape(extra_var, (-1, 1)))


def class_change(factor: Any, y: np.ndarray, old: Sites, new: Sites, var: np.ndarray) -> float:
    """Return the largest dimensionless change of a site that says something.

    `var` (n, K) are the variances of the marginals.
    """
    links = np.abs(new.precision - old.precision) * var / (1.0 + var * np.abs(old.precision))
    if factor.fixed_winner:
        links[np.arange(len(y)), y] = 0.0
    shifts = np.abs(new.shift - old.shift) * np.sqrt(var)
    return float(max(links.max(initial=0.0), shifts.max(initial=0.0)))


def class_pull(
    sites: Sites, update: ClassUpdate, mean: np.ndarray, cov: np.ndarray, fresh: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return pulls a (n, K) and couplings Q (n, K, K): how log Z moves with the rows.

    The latent values of a row b are W b, for weights with means M (K, q) and covariances S_kc (q,
    q) of classes k and c; the derivative of the log evidence in b is a'M + sum_kc Q_kc S_ck b. With
    `fresh` it is that of log Z under the cavities, which the curvature of the star stands for, else
    that of prior times sites; at a fixed point of up to three classes they are the same.
    """
    T = stars(sites.precision)
    lack = sites.shift - np.einsum("ncj,nj->nc", T, mean)
    if not fresh:
        return lack, -T
    T, lack = update.removed[:, None, None] * T, update.removed[:, None] * lack
    _, g, e = update.tilted
    right = (g - lack)[:, :, None] * g[:, None, :] - stars(e)
    left = np.eye(mean.shape[1]) - T @ cov
    return g, np.linalg.solve(left, right)


def _log_mass(sites: Sites, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return log of the integral of each site over N(m, diag v), shape (n,)."""
    d, b = sites
    spread = 1.0 + d * v
    e, x = d / spread, (m + v * b) / spread
    if not (np.all(spread > 0) and np.all(e.sum(1) > 0)):
        raise gaussian.ImproperPosterior("links of negative precision leave a row no distribution")
    level = np.sum(d * x, axis=1) / e.sum(1)
    tilted = x + v * e * level[:, None]
    log_det = np.sum(np.log(spread), axis=1) + np.log(e.sum(1)) - np.log(d.sum(1))
    quad = np.sum((tilted - m) ** 2 / v + tilted * gaussian.star_times(d, tilted), axis=1)
    return -0.5 * (log_det + quad) + np.sum(b * tilted, axis=1)


def class_log_weights(
    factor: Any, y: np.ndarray, weight: np.ndarray, sites: Sites, latent: np.ndarray
) -> np.ndarray:
    """Return log(likelihood / sites) of draws (S, n, K) of the latent values, up to a constant."""
    own, (d, b) = factor.log_prob(y, latent), sites
    quad = np.einsum("snc,nc->sn", latent**2, d)
    quad -= np.einsum("snc,nc->sn", latent, d) ** 2 / d.sum(1)
    return (own + 0.5 * quad - np.einsum("snc,nc->sn", latent, b)) @ weight


def empty_sites(y: np.ndarray, n_classes: int) -> np.ndarray:
    """Return sites (2, n, K) that say nothing: a winner's link alone, which has no contrast."""
    x = np.zeros((2, len(y), n_classes))
    x[0, np.arange(len(y)), y] = 1.0
    return x


class JointEP:
    """The fixed-point map of EP for classes: a structure, a factor and rows meet.

    Parameters
    ----------
    structure : object
        `posterior(precision, shift)` maps sites (n, K), copies counted, to a state with `mean`
        (n, K), `cov` (n, K, K), `extra_var` and `log_evidence`.
    factor : NoisyArgmax
    y : ndarray of shape (n,)
        Class indices.
    weight : ndarray of shape (n,)
        Copies of each row; the posterior counts a site that often, the cavity lacks one copy, or
        less where that would leave too little.
    """

    def __init__(self, structure: Any, factor: Any, y: np.ndarray, weight: np.ndarray) -> None:
        purpose = "expectation propagation for classes"
        require("structure", structure, ["posterior"], purpose)
        needs = ["tilted", "log_proba", "fixed_winner", "log_concave"]
        require("factor", factor, needs, purpose)
        self.structure, self.factor, self.y = structure, factor, y
        self.weight, self._copies = weight, weight[:, None]

    def evaluate(self, x: np.ndarray) -> Evaluation:
        """Map sites, as an array (2, n, K), to their `Evaluation`.

        The payload is (state of the structure, `ClassUpdate`).
        """
        sites = Sites(x[0], x[1])
        state = self.structure.posterior(self._copies * x[0], self._copies * x[1])
        marginals = state.mean, state.cov, state.extra_var
        update = class_update(self.factor, self.y, sites, *marginals, self.weight)
        var = np.einsum("ncc->nc", state.cov)
        log_evidence = float(state.log_evidence + self.weight @ update.log_term)
        residual = class_change(self.factor, self.y, sites, update.sites, var)
        metric = np.array([var, np.sqrt(var)]) * np.sqrt(self._copies)
        record = {"log_evidence": log_evidence}
        return Evaluation(np.array(update.sites), residual, metric, record, (state, update))

    def solve(
        self, x: np.ndarray, *, accelerate: bool, mixing: float = 0.7, **limits: Any
    ) -> Result:
        """Iterate to the fixed point from sites x (2, n, K) within limits.

        These are `tol`, `max_iter`, `damping` and maybe a `monitor`; see `loop.iterate` for them
        and the result.

        Acceleration takes the share `mixing` of a step, the plain iteration the share `damping`. To
        1e-3 at 32 fixed kernels and links of Gaussian processes (eight sets of 200 rows) .7 takes
        267 sweeps, whole steps 277 and half ones 289. On the way between kernels of separable
        classes whole steps take up to four times as many (segment, 968 rows).
        `ahead` of an accelerated result that converged is the next state that it would propose.
        """
        repair = partial(admissible, signed=not self.factor.log_concave)
        if not accelerate:
            return iterate(self.evaluate, x, repair=repair, **limits)
        acceleration = Anderson(depth=4, mixing=mixing, growth=2.0)
        steps: Any = dict(acceleration=acceleration, undamped_start=not np.any(x[1]))
        result = iterate(self.evaluate, x, repair=repair, **steps, **limits)
        if not result.converged:
            return result
        x, target = result.x, result.evaluation.target
        return replace(result, ahead=repair(acceleration(x, result.evaluation), x, target))

    def evidence_gradient(self, state: Any) -> np.ndarray:
        """Return the gradient (p,) of the log evidence in the hyperparameters of the structure."""
        return self.structure.evidence_gradient(state)


def admissible(
    proposal: np.ndarray, x: np.ndarray, target: np.ndarray, signed: bool = False
) -> np.ndarray:
    """Replace extrapolated negative links by half the plain step; centre the shifts.

    All are sites (2, n, K). Of links that may be negative, `signed`, all of a row that leave it no
    precision.
    """
    bad = proposal[0] < 0
    if signed:
        bad[:] = proposal[0].sum(1, keepdims=True) <= 0
    new = proposal.copy()
    new[0][bad] = 0.5 * (x + target)[0][bad]
    new[1] -= new[1].mean(1, keepdims=True)
    return new
