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


class PassRows(NamedTuple):
    """Rows of a pass and what is kept of them.

    X (n, d) may be of any float type and in any memory; it is converted block by block. y (n,) are
    class indices, weight (n,) copies, sites (C, 2, n) precisions and shifts (None with an averaged
    site). `memory` (k, n) is what a rule with `resumed` kept of the rows at the last pass, `kept`
    are the `WhitenedRows` of X, for passes in double precision without gradient.
    """

    X: Any
    y: np.ndarray
    weight: np.ndarray
    sites: Any = None
    memory: Any = None
    kept: Any = None


class PassStep(NamedTuple):
    """What a pass is to do.

    `step` is the share of the update that is taken; the sums are those of the sites after it.
    `gradient` is the form of the gradient of the log evidence, "fresh" or "stored", None for none.
    Both are exact at a fixed point; the fresh form is the one that can drive learning while the
    sites still move. With `inputs` it comes with that in the inducing points. `kind` is the float
    type of what is (n, m); with single precision the sums have some four digits, which a step of
    learning needs. `block` is the number of rows of a block, None for that of `block_rows`.
    """

    step: float = 1.0
    gradient: str | None = None
    inputs: bool = False
    kind: Any = np.float64
    block: int | None = None


PASS = PassStep()


def evaluate_rows(model, rows, how=PASS):
    """Update the sites of some rows under the marginals of a model; return their `RowSums`.

    3 m^2 flops a row without gradient, 7 m^2 with it, and O(m d) for the kernel.
    """
    sums = _PassSums(model, rows, how)
    for block in gen_batches(len(rows.X), how.block or block_rows(len(model.prior.Z))):
        sums.add_block(block)
    return sums.told()


class _PassSums:
    """Running sums of a pass over blocks of rows."""

    def __init__(self, model, rows, how):
        self.model, self.rows, self.how = model, rows, how
        C, m, n = len(model.posteriors), len(model.prior.Z), len(rows.X)
        self.averaged = rows.sites is None
        self.moved: Any = None if self.averaged else sites_with_room(C, n, m)
        self.variances: Any = None if self.averaged else np.empty((C, n))
        self.memory: Any = None if rows.memory is None else np.empty_like(rows.memory)
        self.gram, self.shift = np.zeros((C, m, m)), np.zeros((C, m))
        self.log_term, self.residual = 0.0, 0.0
        fresh = how.gradient == "fresh"
        self.slopes = _Gradient(model, fresh, how.inputs, how.kind) if how.gradient else None

    def add_block(self, block):
        """Add a block of rows."""
        prior, rows, slopes, kind = self.model.prior, self.rows, self.slopes, self.how.kind
        if slopes is None:
            W, extra_var = _whitened(prior, rows.X, block, rows.kept, kind)
        else:
            own = np.asarray(rows.X[block], dtype=np.float64)
            W, extra_var, derivatives = prior.whiten(own, True, kind)
            slopes.begin(W, own)
        w = dense_copies(rows.weight[block])
        for c in range(len(self.gram)):
            self._add_problem(c, block, W, extra_var, w)
        if slopes is not None:
            slopes.end(derivatives)

    def _add_problem(self, c, block, W, extra_var, w):
        """Add one binary problem of a block with whitened rows W and copies w."""
        model, posterior, slopes = self.model, self.model.posteriors[c], self.slopes
        smooth = slopes is not None or self.averaged
        mean, var, smoothed = posterior.marginals(W, smooth)
        if self.averaged:
            old = _average_sites(posterior, mean, var, smoothed, model.copies)
        else:
            old = Sites(*self.rows.sites[c][:, block])
        update = self._updated(c, block, old, mean, var, extra_var)
        new = np.stack(old) + self.how.step * (np.stack(update.sites) - np.stack(old))
        self.gram[c] += _weighted_gram(W, w * new[0])
        self.shift[c] += times_rows(w * new[1], W)
        self.log_term += float(w @ update.log_term)
        if self.averaged:
            # where evidence and gradient want the site of the row itself, it is the update
            exponent = model.rule.exponent
            self.log_term += float(w @ _log_mass_ratio(old, update.sites, mean, var, exponent))
            old = update.sites
        else:
            self.moved[c][:, block], self.variances[c, block] = new, var
            self.residual = max(self.residual, site_change(old, update.sites, var))
        if slopes is not None:
            slopes.add(posterior, smoothed, old, mean, var, update, w)

    def _updated(self, c, block, old, mean, var, extra_var):
        """Return the `SiteUpdate` of a block, by a rule that may remember its rows."""
        model, rows, rule = self.model, self.rows, self.model.rule
        if rows.memory is not None:
            rule = rule.resumed(rows.memory[:, block])
        update = rule(model.factor, model.signs(rows.y[block], c), old, mean, var, extra_var)
        if rows.memory is not None:
            self.memory[:, block] = rule.memory
        return update

    def told(self):
        """Return the `RowSums`."""
        slopes: Any = self.slopes
        return RowSums(
            sites=self.moved,
            var=self.variances,
            gram=self.gram,
            shift=self.shift,
            log_term=self.log_term,
            residual=self.residual,
            theta=None if slopes is None else slopes.theta,
            inputs=None if slopes is None else slopes.towards,
            inner=None if slopes is None else slopes.inner,
            memory=self.memory,
        )


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
    """Return gram and shift of given sites (C, 2, n); `kept` is that of `PassRows`."""
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
