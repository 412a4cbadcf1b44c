"""Passes over rows through inducing points: sites, sums and gradients in blocks of rows.

Row i carries a site on t_i = w_i' e, e the whitened inducing values. Nothing here holds an (n, m)
matrix: rows come in blocks, and what leaves a pass are sums over rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import blas
from scipy.special import logsumexp
from sklearn.utils import gen_batches

from ..._engine.gaussian import lower_times
from ..._engine.sites import Sites, cavity, log_site_mass, site_change
from .rows import dense_copies
from .values import InducingPosterior, InducingPrior, block_rows, rows_times, times_rows

__all__ = [
    "RowSums",
    "PassModel",
    "WhitenedRows",
    "collect_rows",
    "evaluate_rows",
    "evidence_gradient",
    "leave_one_out",
    "sites_with_room",
]


def _weighted_gram(W, v):
    """Return W' diag(v) W; where v has one sign as a symmetric product, half of the flops."""
    if v.size == 0 or v.min() >= 0:
        half = rows_times(W, np.sqrt(v))
        return half.T @ half
    return W.T @ rows_times(W, v)


@dataclass
class PassModel:
    """Prior, one posterior a binary problem, and what updates the sites of rows.

    `copies` is None with one site a row; otherwise every row carries the average of `copies` sites
    (Li et al. 2015), which needs no memory that grows with the rows. `positive` is the class index
    of label +1 where there is one problem only.
    """

    prior: InducingPrior
    posteriors: list[InducingPosterior]
    factor: Any
    rule: Any
    copies: float | None = None
    positive: int = 1

    @property
    def log_evidence(self):
        """Log evidence without the terms of the rows."""
        return sum(p.log_evidence for p in self.posteriors)

    def signs(self, y, c):
        """Return labels in {-1, +1} of problem c from class indices."""
        return np.where(y == (self.positive if len(self.posteriors) == 1 else c), 1.0, -1.0)


class RowSums(NamedTuple):
    """What a set of rows says about one model; sums add over sets of rows.

    sites (C, 2, n) after the step and var (C, n) of the marginals are per row (None with an
    averaged site); gram (C, m, m), shift (C, m) and log_term are sums over rows; residual is the
    largest change of an undamped update. theta (p,), inputs (m, d) and inner (m, m) are the sums of
    the gradient, or None; memory (k, n) is what the rule keeps of each row, or None.
    """

    sites: Any
    var: Any
    gram: np.ndarray
    shift: np.ndarray
    log_term: float
    residual: float
    theta: Any = None
    inputs: Any = None
    inner: Any = None
    memory: Any = None


class WhitenedRows:
    """Whitened rows of a partition under one prior, block by block, for all passes after the first.

    They are n m numbers: worth it where the rows themselves are longer.
    """

    def __init__(self):
        self.prior: Any = None
        self.blocks: dict[int, Any] = {}

    def block(self, prior, X, rows):
        """Return what `_whitened` makes of some rows of X."""
        if prior is not self.prior:
            self.prior, self.blocks = prior, {}
        if rows.start not in self.blocks:
            self.blocks[rows.start] = _whitened(prior, X, rows)
        return self.blocks[rows.start]


def _whitened(prior, X, rows, kept=None, kind=np.float64):
    """Return W of some rows of X and their variances given the inducing values."""
    if kept is not None:
        return kept.block(prior, X, rows)
    return prior.whiten(np.asarray(X[rows], dtype=np.float64), kind=kind)[:2]


def sites_with_room(C, n, m):
    """Return an array (C, 2, n) for sites, the head of a vector with room for gram and shift.

    So a state of the loop can be made of it without a copy of what is as long as the data.
    """
    return np.empty(C * (2 * n + m * m + m))[: 2 * C * n].reshape(C, 2, n)


def _average_sites(posterior, mean, var, smoothed, copies):
    """Return the sites that removing one averaged site amounts to, to first order in 1 / n.

    A row that no inducing point reaches has no variance to explain, and a site that says nothing.
    """
    reached = var > np.finfo(float).tiny
    safe = np.where(reached, var, 1.0)
    widened = safe + np.where(reached, var - np.einsum("ij,ij->i", smoothed, smoothed), 0) / copies
    cav_mean = mean - np.where(reached, smoothed @ posterior.mean, 0.0) / copies
    precision, shift = 1.0 / safe - 1.0 / widened, mean / safe - cav_mean / widened
    return Sites(np.where(reached, precision, 0.0), np.where(reached, shift, 0.0))


def _log_mass_ratio(old, new, mean, var, exponent):
    """Return log of the integrals of two sites under the cavities that the old one leaves.

    Of a share of them, over that share, as `SiteUpdate.log_term` counts them.
    """
    cav = cavity(old, mean, var, exponent)
    masses = [log_site_mass(s, cav.mean, cav.var, exponent) for s in (old, new)]
    return (masses[0] - masses[1]) / exponent


def _row_gradient(sites, mean, var, update, weight, exponent, fresh):
    """Return (kappa, alpha, gs): the derivative of log Z in w_i is kappa A^-1 w_i + alpha e.

    `exponent` is the share of a site that its cavity lacks.
    """
    gs = weight * update.noise_slope
    if not fresh:
        return -weight * sites.precision, weight * (sites.shift - sites.precision * mean), gs
    proper = cavity(sites, mean, var, exponent).proper
    precision, shift = exponent * np.where(proper, sites, 0.0)
    g = weight * update.gradient
    kappa = (g * (precision * mean - shift) + 2.0 * gs) / (1.0 - precision * var)
    return kappa, g, gs


class _Gradient:
    """Running sums of the gradient of log Z over blocks of rows."""

    def __init__(self, model, fresh, inputs, kind):
        self.exponent = model.rule.exponent
        self.fresh, self.with_inputs = fresh, inputs
        self.cross, self.inverse = model.prior.parts(kind)
        self.theta: Any = 0.0
        self.towards: Any = 0.0
        self.inner = np.zeros_like(model.prior.lower)
        self.G: Any = None
        self.begin(None, None)

    def begin(self, W, X):
        """Start a block; problems of several classes share its contraction."""
        self.W, self.X, self.G, self.gs = W, X, None, 0.0

    def add(self, posterior, smoothed, sites, mean, var, update, weight):
        """Add one binary problem of the block; `smoothed` is W A^-1 and is overwritten."""
        kappa, alpha, gs = _row_gradient(
            sites, mean, var, update, weight, self.exponent, self.fresh
        )
        towards_w, scaled = smoothed, rows_times(self.W, gs)
        towards_w *= kappa.astype(self.W.dtype, copy=False)[:, None]
        towards_w -= scaled
        if self.fresh:
            self.inner -= self.W.T @ towards_w
            self.inner -= np.outer(times_rows(alpha, self.W), posterior.mean)
        else:
            self.inner += self.W.T @ scaled
        towards_w -= scaled
        # what every row has of the same vector is added in place: blocks are what takes time
        ger = blas.dger if towards_w.dtype == np.float64 else blas.sger
        towards_w = ger(1.0, posterior.mean, alpha, a=towards_w.T, overwrite_a=1).T
        self.G = towards_w if self.G is None else self.G + towards_w
        self.gs = self.gs + gs

    def end(self, kept):
        """Contract the block with the derivatives of the kernel."""
        G = lower_times(self.inverse, self.G.T, trans=True).T
        theta, towards = self.cross.contract(kept, G, self.with_inputs)
        self.theta = self.theta + theta + self.cross.contract_diagonal(self.X, self.gs)
        self.towards = self.towards + towards


def evaluate_rows(
    model,
    X,
    y,
    weight,
    sites,
    step=1.0,
    gradient=None,
    inputs=False,
    memory=None,
    kind=np.float64,
    kept=None,
    block=None,
):
    """Update the sites of some rows under the marginals of a model; return their `RowSums`.

    X (n, d) may be of any float type and in any memory; it is converted block by block. y (n,) are
    class indices, weight (n,) copies, sites (C, 2, n) precisions and shifts (None with an averaged
    site). `step` is the share of the update that is taken; the sums are those of the sites after
    it.

    `gradient` is the form of the gradient of the log evidence, "fresh" or "stored", None for none.
    Both are exact at a fixed point; the fresh form is the one that can drive learning while the
    sites still move. With `inputs` it comes with that in the inducing points. `memory` (k, n) is
    what a rule with `resumed` kept of the rows at the last pass. `kind` is the float type of what
    is (n, m); with single precision the sums have some four digits, which a step of learning needs.
    `kept` are the `WhitenedRows` of X, for passes in double precision without gradient; `block`
    is the number of rows of a block, None for that of `block_rows`.

    3 m^2 flops a row without gradient, 7 m^2 with it, and O(m d) for the kernel.
    """
    C, m, n = len(model.posteriors), len(model.prior.Z), len(X)
    moved: Any = None if sites is None else sites_with_room(C, n, m)
    variances: Any = None if sites is None else np.empty((C, n))
    gram, shift = np.zeros((C, m, m)), np.zeros((C, m))
    log_term, residual = 0.0, 0.0
    sums = _Gradient(model, gradient == "fresh", inputs, kind) if gradient else None
    kept_memory: Any = None if memory is None else np.empty_like(memory)
    for rows in gen_batches(n, block or block_rows(m)):
        w = dense_copies(weight[rows])
        if sums is None:
            W, extra_var = _whitened(model.prior, X, rows, kept, kind)
        else:
            own = np.asarray(X[rows], dtype=np.float64)
            W, extra_var, derivatives = model.prior.whiten(own, True, kind)
            sums.begin(W, own)
        for c, posterior in enumerate(model.posteriors):
            mean, var, smoothed = posterior.marginals(W, sums is not None or sites is None)
            if sites is None:
                old = _average_sites(posterior, mean, var, smoothed, model.copies)
            else:
                old = Sites(*sites[c][:, rows])
            rule = model.rule if memory is None else model.rule.resumed(memory[:, rows])
            update = rule(model.factor, model.signs(y[rows], c), old, mean, var, extra_var)
            if memory is not None:
                kept_memory[:, rows] = rule.memory
            new = np.stack(old) + step * (np.stack(update.sites) - np.stack(old))
            gram[c] += _weighted_gram(W, w * new[0])
            shift[c] += times_rows(w * new[1], W)
            log_term += float(w @ update.log_term)
            if sites is None:
                # where evidence and gradient want the site of the row itself, it is the update
                exponent = model.rule.exponent
                log_term += float(w @ _log_mass_ratio(old, update.sites, mean, var, exponent))
                old = update.sites
            else:
                moved[c][:, rows], variances[c, rows] = new, var
                residual = max(residual, site_change(old, update.sites, var))
            if sums is not None:
                sums.add(posterior, smoothed, old, mean, var, update, w)
        if sums is not None:
            sums.end(derivatives)
    told = RowSums(moved, variances, gram, shift, log_term, residual, memory=kept_memory)
    if sums is None:
        return told
    return told._replace(theta=sums.theta, inputs=sums.towards, inner=sums.inner)


def evidence_gradient(model, sums, fresh, inputs, kind=np.float64):
    """Return d log Z / d theta (p,) and in the inducing points (m, d) from the sums of all rows.

    `kind` is the float type in which those were made.
    """
    M = sums.inner + sums.inner.T if fresh else 2.0 * sums.inner
    sign = -1.0 if fresh else 1.0
    for posterior in model.posteriors:
        prior_part = -posterior.cov - np.outer(posterior.mean, posterior.mean)
        prior_part[np.diag_indices_from(prior_part)] += 1.0
        M += sign * prior_part
    theta, towards = model.prior.contract(0.5 * M, inputs, kind)
    return sums.theta + theta, sums.inputs + towards


def collect_rows(prior, X, weight, sites, kept=None):
    """Return gram and shift of given sites (C, 2, n); `kept` is that of `evaluate_rows`."""
    C, m = len(sites), len(prior.Z)
    gram, shift = np.zeros((C, m, m)), np.zeros((C, m))
    for rows in gen_batches(len(X), block_rows(m)):
        W, _ = _whitened(prior, X, rows, kept)
        w = weight[rows]
        for c in range(C):
            gram[c] += _weighted_gram(W, w * sites[c, 0, rows])
            shift[c] += times_rows(w * sites[c, 1, rows], W)
    return gram, shift


def leave_one_out(model, X, y, sites, kept=None):
    """Return log probabilities (n,) of each row's own label under the cavities of the model.

    They are normalised over the classes; y (n,) are class indices.
    """
    loo = np.empty(len(X))
    for rows in gen_batches(len(X), block_rows(len(model.prior.Z))):
        W, extra_var = _whitened(model.prior, X, rows, kept)
        loo[rows] = _own_label_log_proba(model, W, extra_var, y[rows], sites[:, :, rows])
    return loo


def _own_label_log_proba(model, W, extra_var, y, sites):
    """Return log probabilities (b,) of class indices under the cavities of their rows."""
    columns, C = [], len(sites)
    for c, posterior in enumerate(model.posteriors):
        mean, var, _ = posterior.marginals(W)
        cav = cavity(Sites(*sites[c]), mean, var)
        sign = model.signs(y, 0) if C == 1 else 1.0
        columns.append(model.factor.tilted(sign, cav.mean, cav.var + extra_var).log_z)
    if C == 1:
        return columns[0]
    return np.stack(columns)[y, np.arange(len(y))] - logsumexp(columns, axis=0)
