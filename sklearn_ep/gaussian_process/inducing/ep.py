"""Expectation propagation through inducing points over partitions of the rows.

Row i carries a site on t_i = w_i' e, e the whitened inducing values. A sweep is one pass over the
rows, which come in blocks, and what leaves a pass are sums. Whitened rows are an (n, m) matrix:
they are held only where that takes no more than the rows do.

What a row says is a part that is plugged in, the *labels*: `BinaryProblems` here, all classes
jointly in `classes`. They have `n_posteriors` posteriors of `n_latents` functions each and arrays
(C, 2, n) of sites, `visit` a block of rows and `add_sums` of its sites.

Where the posterior is a `linear` function of the sites, its natural parameters travel in the state
of the loop next to the sites: whatever mixture of past states and updates the loop proposes, its
posterior is the same mixture of matrices that the passes have already summed, and no second pass is
needed to build it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.linalg import blas, solve_triangular
from scipy.special import log_softmax

from ..._engine.gaussian import (
    add_to_diagonal,
    checked_cholesky,
    lower_times,
    row_blocks,
    weighted_gram,
)
from ..._engine.hyper import Accuracy
from ..._engine.loop import SILENT, Anderson, Evaluation, iterate
from ..._engine.partition import add_up
from ..._engine.sites import Sites, cavity, log_site_mass, site_change
from . import values
from .rows import dense_copies, read_rows


class RowBlock(NamedTuple):
    """Rows of a visit: whitened W (b, m), extra variances (b,), class indices, copies (b,).

    `sites` (C, 2, b) are None with an averaged site, `memory` (k, b) where a rule keeps nothing.
    """

    W: np.ndarray
    extra_var: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    sites: Any
    memory: Any = None


class RowSlopes(NamedTuple):
    """The derivative of the log evidence in whitened rows, without that of the extra variances.

    It is towards (b, m), which may be overwritten, plus alpha (k, b) times the means (k, m) of k
    latent functions; noise (b,) are the derivatives in the extra variances.
    """

    towards: np.ndarray
    alpha: np.ndarray
    mean: np.ndarray
    noise: np.ndarray


class Visit(NamedTuple):
    """What a visit to a block gives, for the sites (c, 2, b) of one posterior.

    `old` and `target` are sites before and after a whole update, var (c, b) marginal variances,
    log_term (b,) what rows add to the log evidence, `slopes` the `RowSlopes` if asked for.
    """

    old: np.ndarray
    target: np.ndarray
    var: np.ndarray
    log_term: np.ndarray
    residual: float
    slopes: RowSlopes | None
    memory: Any = None


@dataclass(frozen=True)
class BinaryProblems:
    """Labels of binary problems with a posterior each: one of two classes, or one a class.

    `copies` is None with one site a row; otherwise every row carries the average of `copies` sites
    (Li et al. 2015), which needs no memory that grows with the rows. `positive` is the class index
    of label +1 where there is one problem only.

    With a `share` u < 1 sites and evidence are those of power EP (Bui, Yan and Turner 2017), to
    first order in the variance v that the points leave open: labels see u v of it, and half of
    (1 - u) v times the site precision is taken off the log evidence. One is EP, zero the
    variational bound, which points cannot overfit.
    """

    factor: Any
    rule: Any
    n_posteriors: int = 1
    copies: float | None = None
    positive: int = 1
    share: float = 1.0
    n_latents: ClassVar[int] = 1
    linear: ClassVar[bool] = True
    accuracy: ClassVar[Accuracy] = Accuracy()

    @property
    def n_sites(self):
        """Number of sites that a row has."""
        return self.n_posteriors

    @property
    def exact_gradient(self):
        """Whether the gradient is that of the log evidence: averaged sites move with the kernel."""
        return self.copies is None

    def own_sites(self, k):
        """Return where the sites of posterior k are."""
        return slice(k, k + 1)

    def signs(self, y, k):
        """Return labels in {-1, +1} of problem k from class indices."""
        return np.where(y == (self.positive if self.n_posteriors == 1 else k), 1.0, -1.0)

    def rows_at_once(self, m):
        """Return the number of rows of a block for m inducing points."""
        return values.block_rows(m)

    def posterior(self, gram, shift):
        """Return the posterior of a problem from sums."""
        return values.InducingPosterior(gram, shift)

    def visit(self, k, posterior, rows, form):
        """Return the `Visit` of problem k to a `RowBlock`, with a `form` of the gradient or None.

        Where evidence and gradient want the site of the row itself, and it has the average of all,
        that is the update.
        """
        averaged = rows.sites is None
        mean, var, smoothed = posterior.marginals(rows.W, form is not None or averaged)
        if averaged:
            old = _average_sites(posterior, mean, var, smoothed, self.copies)
        else:
            old = Sites(*rows.sites[k])
        rule = self.rule if rows.memory is None else self.rule.resumed(rows.memory)
        sign, extra_var = self.signs(rows.y, k), self.share * rows.extra_var
        update = rule(self.factor, sign, old, mean, var, extra_var, rows.weight)
        log_term, stale = update.log_term, old
        if averaged:
            stale = update.sites
            log_term = log_term + _log_mass_ratio(old, stale, mean, var, rule.exponent)
        trace_term = 0.5 * (1.0 - self.share) * stale.precision
        log_term = log_term - trace_term * rows.extra_var
        slopes = None
        if form is not None:
            fresh = form == "fresh"
            kappa, alpha, noise = _row_gradient(stale, mean, var, update, rows.weight, fresh)
            smoothed *= kappa.astype(smoothed.dtype, copy=False)[:, None]
            noise = self.share * noise - rows.weight * trace_term
            slopes = RowSlopes(smoothed, alpha[None], posterior.mean[None], noise)
        pairs = np.stack(old)[None], np.stack(update.sites)[None]
        memory = None if rows.memory is None else rule.memory
        change = 0.0 if averaged else site_change(old, update.sites, var)
        return Visit(*pairs, var[None], log_term, change, slopes, memory)

    def add_sums(self, gram, shift, W, weight, sites):
        """Add gram and shift of sites (1, 2, b) with copies to sums (m, m) and (m,)."""
        gram += weighted_gram(W, weight * sites[0, 0])
        shift += values.times_rows(weight * sites[0, 1], W)

    def completed(self, gram):
        """Return grams that were added up, as a posterior wants them."""
        return gram

    def log_left_out(self, posteriors, rows):
        """Return log probabilities (b,) of labels under cavities, normalised over the classes."""
        columns = []
        for k, posterior in enumerate(posteriors):
            mean, var, _ = posterior.marginals(rows.W)
            cav = cavity(Sites(*rows.sites[k]), mean, var, rows.weight)
            sign = self.signs(rows.y, 0) if self.n_posteriors == 1 else 1.0
            columns.append(self.factor.tilted(sign, cav.mean, cav.var + rows.extra_var).log_z)
        if len(columns) == 1:
            return columns[0]
        return log_softmax(columns, axis=0)[rows.y, np.arange(len(rows.y))]

    def predictors(self, prior, posteriors):
        """Return what predicts, one a problem."""
        return [values.InducingGPPosterior(prior, p, self.factor) for p in posteriors]


@dataclass
class PassModel:
    """Prior, posteriors, and the labels, which update the sites of rows."""

    prior: values.InducingPrior
    posteriors: list[values.InducingPosterior]
    labels: Any

    @property
    def log_evidence(self):
        """Log evidence without the terms of the rows."""
        return sum(p.log_evidence for p in self.posteriors)

    def figures(self, sums):
        """Return log evidence and undamped residual of the `RowSums` of a whole step."""
        residual = sums.residual
        if self.labels.copies is not None:
            residual = largest_change(self.posteriors, sums.gram, sums.shift)
        return {"residual": residual, "log_evidence": self.log_evidence + sums.log_term}

    def blocks(self, rows, kind=np.float64, keep=False):
        """Yield slices of `PassRows`, each with its `RowBlock` and what a contraction needs."""
        blocks = row_blocks(len(rows.X), most=self.labels.rows_at_once(len(self.prior.Z)))
        each = values.whitened(self.prior, rows.X, blocks, rows.part, kind, keep)
        for block, (W, extra_var, kept) in zip(blocks, each, strict=True):
            own = (None if a is None else a[..., block] for a in (rows.sites, rows.memory))
            weight = dense_copies(rows.weight[block])
            yield block, RowBlock(W, extra_var, rows.y[block], weight, *own), kept


class RowSums(NamedTuple):
    """What a set of rows says about one model; sums add over sets of rows.

    sites (C, 2, n) after the step and var (C, n) of the marginals are per row (None with an
    averaged site); gram (P, q, q), shift (P, q) of P posteriors of q = m n_latents numbers and
    log_term are sums over rows; residual is the largest change of an undamped update. theta (p,),
    inputs (m, d) and inner (m, m) are the sums of the gradient, or None; memory (k, n) is what the
    rule keeps of each row, or None.
    """

    sites: Any
    var: Any
    gram: Any
    shift: Any
    log_term: float
    residual: float
    theta: Any = None
    inputs: Any = None
    inner: Any = None
    memory: Any = None

    def scaled(self, scale):
        """Return the same with the sums of the gradient times a number."""
        return self._replace(
            theta=scale * self.theta, inputs=scale * self.inputs, inner=scale * self.inner
        )


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


def _row_gradient(sites, mean, var, update, weight, fresh):
    """Return (kappa, alpha, gs): the derivative of log Z in w_i is kappa A^-1 w_i + alpha e."""
    gs = weight * update.noise_slope
    if not fresh:
        return -weight * sites.precision, weight * (sites.shift - sites.precision * mean), gs
    precision, shift = update.removed * np.array(sites)
    g = weight * update.gradient
    kappa = (g * (precision * mean - shift) + 2.0 * gs) / (1.0 - precision * var)
    return kappa, g, gs


class _Gradient:
    """Running sums of the gradient of log Z over blocks of rows."""

    def __init__(self, model, how):
        self.fresh, self.with_inputs = how.gradient == "fresh", how.inputs
        self.cross, self.inverse = model.prior.parts(how.kind)
        self.theta: Any = 0.0
        self.towards: Any = 0.0
        self.inner = np.zeros_like(model.prior.lower)
        # of a block, whose contraction posteriors of several classes share
        self.G: Any = None
        self.noise: Any = 0.0

    def add(self, W, slopes):
        """Add the `RowSlopes` of one posterior at whitened rows W of a block."""
        towards_w, scaled = slopes.towards, slopes.noise.astype(W.dtype, copy=False)[:, None] * W
        towards_w -= scaled
        if self.fresh:
            self.inner -= W.T @ towards_w
        else:
            self.inner += W.T @ scaled
        towards_w -= scaled
        # what every row has of the same vector is added in place: blocks are what takes time
        ger = blas.dger if towards_w.dtype == np.float64 else blas.sger
        for alpha, mean in zip(slopes.alpha, slopes.mean, strict=True):
            if self.fresh:
                self.inner -= np.outer(values.times_rows(alpha, W), mean)
            towards_w = ger(1.0, mean, alpha, a=towards_w.T, overwrite_a=1).T
        self.G = towards_w if self.G is None else self.G + towards_w
        self.noise = self.noise + slopes.noise

    def end(self, X, kept):
        """Contract the block of rows X with the derivatives of the kernel."""
        G = lower_times(self.inverse, self.G.T, trans=True).T
        theta, towards = self.cross.contract(kept, G, self.with_inputs)
        self.theta = self.theta + theta + self.cross.contract_diagonal(X, self.noise)
        self.towards = self.towards + towards
        self.G, self.noise = None, 0.0


class PassRows(NamedTuple):
    """Rows of a pass and what is kept of them.

    X (n, d) may be of any float type and in any memory; it is converted block by block. y (n,) are
    class indices, weight (n,) copies, sites (C, 2, n) precisions and shifts (None with an averaged
    site). `memory` (k, n) is what a rule with `resumed` kept of the rows at the last pass. `part`
    are token and number of a partition in `KEPT`, None for rows that come once.
    """

    X: Any
    y: np.ndarray
    weight: np.ndarray
    sites: Any = None
    memory: Any = None
    part: Any = None


class PassStep(NamedTuple):
    """What a pass is to do.

    `step` is the share of the update that is taken; the sums are those of the sites after it.
    `gradient` is the form of the gradient of the log evidence, "fresh" or "stored", None for none.
    Both are exact at a fixed point; the fresh form is the one that can drive learning while the
    sites still move. With `inputs` it comes with that in the inducing points. `kind` is the float
    type of what is (n, m); with single precision the sums have some four digits, which a step of
    learning needs. `sums` says whether gram and shift are wanted.
    """

    step: float = 1.0
    gradient: str | None = None
    inputs: bool = False
    kind: Any = np.float64
    sums: bool = True


def evaluate_rows(model, rows, how):
    """Update the sites of some rows under the marginals of a model; return their `RowSums`.

    Of a binary problem 3 m^2 flops a row without gradient, 7 m^2 with it, and O(m d) for the
    kernel.
    """
    sums, slopes = _PassSums(model, rows, how), _Gradient(model, how) if how.gradient else None
    for block, own, kept in model.blocks(rows, how.kind, slopes is not None):
        for k, posterior in enumerate(model.posteriors):
            visit = model.labels.visit(k, posterior, own, how.gradient)
            sums.add(k, block, own, visit)
            if slopes is not None:
                slopes.add(own.W, visit.slopes)
        if slopes is not None:
            slopes.end(*kept)
    return sums.told(slopes)


class _PassSums:
    """Running sums of a pass over blocks of rows."""

    def __init__(self, model, rows, how):
        self.labels, self.how, n = model.labels, how, len(rows.X)
        C, P, q = self.labels.n_sites, len(model.posteriors), len(model.posteriors[0].mean)
        each = rows.sites is not None  # of an averaged site nothing is kept row by row
        self.moved: Any = np.empty((C, 2, n)) if each else None
        self.variances: Any = np.empty((C, n)) if each else None
        self.memory: Any = None if rows.memory is None else np.empty_like(rows.memory)
        self.gram: Any = np.zeros((P, q, q)) if how.sums else 0.0
        self.shift: Any = np.zeros((P, q)) if how.sums else 0.0
        self.log_term, self.residual = 0.0, 0.0

    def add(self, k, block, rows, visit):
        """Add the `Visit` of posterior k to a block of rows."""
        new = visit.old + self.how.step * (visit.target - visit.old)
        if self.how.sums:
            self.labels.add_sums(self.gram[k], self.shift[k], rows.W, rows.weight, new)
        self.log_term += float(rows.weight @ visit.log_term)
        self.residual = max(self.residual, visit.residual)
        if self.moved is not None:
            own = self.labels.own_sites(k)
            self.moved[own, :, block], self.variances[own, block] = new, visit.var
        if self.memory is not None:
            self.memory[:, block] = visit.memory

    def told(self, slopes):
        """Return the `RowSums`, with those of a gradient or None."""
        gram = self.labels.completed(self.gram) if self.how.sums else 0.0
        told = RowSums(self.moved, self.variances, gram, self.shift, self.log_term, self.residual)
        told = told._replace(memory=self.memory)
        if slopes is None:
            return told
        return told._replace(theta=slopes.theta, inputs=slopes.towards, inner=slopes.inner)


def evidence_gradient(model, sums, fresh, inputs, kind=np.float64):
    """Return d log Z / d theta (p,) and in the inducing points (m, d) from the sums of all rows.

    `kind` is the float type in which those were made.
    """
    M = sums.inner + sums.inner.T if fresh else 2.0 * sums.inner
    sign, m, n_latents = -1.0 if fresh else 1.0, len(model.prior.Z), model.labels.n_latents
    for posterior in model.posteriors:
        mean = posterior.mean.reshape(n_latents, m)
        own = np.einsum("kakb->ab", posterior.cov.reshape(n_latents, m, n_latents, m))
        prior_part = -own - mean.T @ mean
        add_to_diagonal(prior_part, n_latents)
        M += sign * prior_part
    theta, towards = model.prior.contract(0.5 * M, inputs, kind)
    return sums.theta + theta, sums.inputs + towards


def evaluate_part(part, message, model, classes, how):
    """Run `evaluate_rows` on a partition and add the root of its weights, one if all are equal.

    `message` are the sites of its rows, what the rule keeps of them, and their place in `KEPT`.
    """
    X, y, weight = read_rows(part, classes)
    alike = len(weight) and weight.min() == weight.max()
    root = np.sqrt(weight[:1] if alike else weight)
    return evaluate_rows(model, PassRows(X, y, weight, *message), how), root


def batch_of_part(part, message, model, classes, how):
    """Return the `RowSums` of a batch of a partition and its copies, None where there is none.

    `message` is (row numbers, their sites or None), or None.
    """
    if message is None:
        return None
    X, y, weight = read_rows(part, classes)
    rows, sites = message
    if sites is None or not np.any(sites):
        how = how._replace(step=1.0)
    own = PassRows(np.asarray(X[rows], dtype=np.float64), y[rows], weight[rows], sites)
    return evaluate_rows(model, own, how), weight[rows].sum()


def collect_part(part, message, model, classes):
    """Return gram and shift of the sites (C, 2, n) of a partition; `message` as for a pass."""
    rows, labels = PassRows(*read_rows(part, classes), *message), model.labels
    q = labels.n_latents * len(model.prior.Z)
    gram, shift = np.zeros((labels.n_posteriors, q, q)), np.zeros((labels.n_posteriors, q))
    for _, own, _ in model.blocks(rows):
        for k in range(len(gram)):
            labels.add_sums(gram[k], shift[k], own.W, own.weight, own.sites[labels.own_sites(k)])
    return labels.completed(gram), shift


def leave_one_out_part(part, message, model, classes):
    """Return log probabilities (n,) of the own labels of a partition under cavities of the model.

    They are normalised over the classes. `message` are the copies (n,) of each row that are taken
    out, and what a pass is told.
    """
    X, y, _ = read_rows(part, classes)
    blocks = model.blocks(PassRows(X, y, *message))
    return np.concatenate([model.labels.log_left_out(model.posteriors, b) for _, b, _ in blocks])


def add_sums(results):
    """Add `RowSums` over partitions, in their order; per-row results are left out."""
    total = add_up([r._replace(sites=None, var=None, memory=None) for r in results])
    return total._replace(residual=max(r.residual for r in results))


@dataclass
class PassState:
    """Sites of all rows, a list of (C, 2, n_k), and the sums (P, q, q) and (P, q) that they make.

    The sums are under a prior, those of base rows among them. With an averaged site `sites` is None
    and the posterior is all there is.
    """

    prior: values.InducingPrior
    gram: np.ndarray
    shift: np.ndarray
    sites: Any


class InducingEP:
    """Passes and fixed points of EP through inducing points for one data set.

    `run` is an open `PartMap`, `sizes` are the rows of its partitions, `classes` the labels where
    partitions hold labels. `labels` are the part that knows what a row says, such as
    `BinaryProblems`. `base` is gram (P, q, q) and shift (P, q) of rows that were seen before and
    stay as they are. `memory`, a list of (k, n_k), is what a rule with `resumed` keeps of the rows
    from one pass to the next.
    """

    def __init__(self, run, sizes, classes, labels, base=None, memory=None):
        self.run, self.sizes, self.classes, self.labels = run, list(sizes), classes, labels
        self.base = (0.0, 0.0) if base is None else base
        self.memory, self.ends = memory, np.zeros(1, dtype=int)
        if labels.copies is None:
            self.ends = np.cumsum([2 * labels.n_sites * n for n in sizes])

    def empty_sites(self):
        """Return sites that say nothing, None with an averaged site."""
        C = self.labels.n_sites
        return [np.zeros((C, 2, n)) for n in self.sizes] if self.labels.copies is None else None

    def zero(self, prior):
        """Return the state of empty sites."""
        P, q = self.labels.n_posteriors, self.labels.n_latents * len(prior.Z)
        gram, shift = np.zeros((P, q, q)) + self.base[0], np.zeros((P, q)) + self.base[1]
        return PassState(prior, gram, shift, self.empty_sites())

    def restate(self, prior, sites):
        """Return the state of given sites under a prior, summed afresh in a pass over the rows."""
        if not any(np.any(s) for s in sites):
            return self.zero(prior)
        model = PassModel(prior, [], self.labels)
        sums = self.run(collect_part, self.messages(sites), model, self.classes)
        gram, shift = (sum(s) for s in zip(*sums, strict=True))
        return PassState(prior, gram + self.base[0], shift + self.base[1], sites)

    def moved(self, state, prior):
        """Return a state under another prior, with copies of its sites."""
        if state.sites is not None:
            return self.restate(prior, [s.copy() for s in state.sites])
        gram, shift = values.rebase(state.gram, state.shift, state.prior, prior)
        return PassState(prior, gram, shift, None)

    def renew(self, model, sites):
        """Return the state of the sites that a model asks for, from what they were; one pass."""
        sums, each, _ = self.one_pass(model, sites)
        return PassState(model.prior, sums.gram, sums.shift, [r.sites for r in each])

    def leave_one_out(self, model, sites, copies, of_part=leave_one_out_part):
        """Return log probabilities (n,) of the rows' own labels under their cavities.

        Of each row so many `copies`, a list of (n_k,), are taken out; `of_part` may ask otherwise.
        """
        pairs = zip(copies, self.messages(sites), strict=True)
        messages = [(taken, *message) for taken, message in pairs]
        return np.concatenate(self.run(of_part, messages, model, self.classes))

    def messages(self, sites):
        """Return for each part its sites, what the rule keeps of its rows, and its place."""
        n_parts = len(self.sizes)
        empty, places = [None] * n_parts, [(self.run.token, k) for k in range(n_parts)]
        return list(zip(sites or empty, self.memory or empty, places, strict=True))

    def model(self, state):
        """Return what a pass needs to know of a state."""
        pairs = zip(state.gram, state.shift, strict=True)
        return PassModel(state.prior, [self.labels.posterior(*p) for p in pairs], self.labels)

    def one_pass(self, model, sites, **options):
        """Return (sums over all rows, list of `RowSums`, list of root weights)."""
        how = PassStep(**options)
        results = self.run(evaluate_part, self.messages(sites), model, self.classes, how)
        each = [r[0] for r in results]
        if self.memory is not None:
            self.memory = [r.memory for r in each]
            self.labels.rule.advance()
        sums = add_sums(each)
        sums = sums._replace(gram=sums.gram + self.base[0], shift=sums.shift + self.base[1])
        return sums, each, [r[1] for r in results]

    def state_of(self, result):
        """Return the state in which a `Result` of `solve` ends."""
        model = result.evaluation.payload
        gram = np.stack([p.gram for p in model.posteriors])
        shift = np.stack([p.shift for p in model.posteriors])
        return PassState(model.prior, gram, shift, _FixedPoint(self, model.prior).sites(result.x))

    def solve(self, state, *, max_iter, tol, damping, accelerate, monitor=SILENT):
        """Iterate to the fixed point at the prior of a state, which is used up.

        Returns the `Result` of the loop, and state and model at its end. See `loop.iterate` for
        the limits. Acceleration mixes whole steps where sums are made afresh, as that of dense
        sites of several classes does.
        """
        sweeps, acceleration, empty = _FixedPoint(self, state.prior), None, False
        if accelerate:
            empty = not any(map(np.any, state.sites or [state.shift]))
            acceleration = Anderson(mixing=damping) if self.labels.linear else Anderson(depth=4)
        # keywords one by one: a call with ** keeps the start, which is as long as the rows
        result = iterate(
            sweeps.evaluate,
            sweeps.packed(state),
            max_iter=max_iter,
            tol=tol,
            damping=damping,
            acceleration=acceleration,
            repair=sweeps.admissible,
            monitor=monitor,
            undamped_start=empty,
        )
        return result, self.state_of(result), result.evaluation.payload


class _FixedPoint:
    """The fixed-point map under a prior, of vectors: the sites and, if linear, their sums."""

    def __init__(self, ep, prior):
        self.ep, self.prior, self.labels = ep, prior, ep.labels

    def packed(self, state):
        """Return a state, which is used up, as a vector."""
        sums = [state.gram, state.shift] if self.labels.linear else []
        x = np.concatenate([a.ravel() for a in (*(state.sites or []), *sums)])
        state.sites = None
        return x

    def sites(self, x):
        """Return the sites in a vector, part by part, as views; None with an averaged site."""
        if self.labels.copies is not None:
            return None
        return [s.reshape(self.labels.n_sites, 2, -1) for s in np.split(x, self.ep.ends)[:-1]]

    def state(self, x):
        """Return the state of a vector, as views; sums that it lacks are made afresh."""
        sites = self.sites(x)
        if not self.labels.linear:
            return self.ep.restate(self.prior, sites)
        P, m = self.labels.n_posteriors, len(self.prior.Z)
        gram, shift = np.split(x[self.ep.ends[-1] :], [P * m * m])
        return PassState(self.prior, gram.reshape(P, m, m), shift.reshape(P, m), sites)

    def evaluate(self, x):
        """Return the `Evaluation` of a vector; the payload is the `PassModel`."""
        state, ep = self.state(x), self.ep
        model = ep.model(state)
        sums, each, roots = ep.one_pass(model, state.sites, sums=self.labels.linear)
        if not np.isfinite(model.log_evidence + sums.log_term):
            raise ValueError(f"kernel {self.prior.kernel} gives NaN or infinity on these data.")
        figures, sites = model.figures(sums), None
        metric: Any = 1.0
        if state.sites is not None:
            metric, sites = np.zeros(len(x)), [r.sites for r in each]  # sums follow the sites
            for view, result, root in zip(self.sites(metric), each, roots, strict=True):
                np.multiply(result.var, root, out=view[:, 0])
                np.sqrt(result.var, out=view[:, 1])
                view[:, 1] *= root
        del each, state  # arrays as long as the rows are what limits the memory of a fit
        target = self.packed(PassState(self.prior, sums.gram, sums.shift, sites))
        return Evaluation(target, figures.pop("residual"), metric, record=figures, payload=model)

    def admissible(self, proposal, x, target):
        """Return a proposal with sites that a posterior may have.

        Acceleration may lead through sites of negative precision: to mend them where sums travel
        with the sites, in a pass of its own, saved no sweep on eight sets.
        """
        if self.labels.linear:  # the loop then holds no target
            return proposal
        parts = zip(*(self.sites(v) for v in (proposal, x, target)), strict=True)
        return np.concatenate([self.labels.admissible(*p).ravel() for p in parts])


def largest_change(posteriors, gram, shift):
    """Return by how much new sums (C, m, m) and (C, m) move the posteriors of all problems."""
    return max(posterior_change(*each) for each in zip(posteriors, gram, shift, strict=True))


def posterior_change(posterior, gram, shift):
    """Return by how much new sums move a posterior, in its own standard deviations.

    The larger of the norms of the change of the precision and of the pull on the mean.
    """
    lower = checked_cholesky(posterior.gram + np.eye(len(gram)))
    change = solve_triangular(lower, gram - posterior.gram, lower=True)
    change = solve_triangular(lower, change.T, lower=True)
    pull = shift - gram @ posterior.mean - posterior.mean
    pull = solve_triangular(lower, pull, lower=True)
    return float(max(np.linalg.norm(change, 2), np.linalg.norm(pull)))
