"""Expectation propagation through inducing points over partitions of the rows.

Row i carries a site on t_i = w_i' e, e the whitened inducing values. A sweep is one pass over the
rows, which come in blocks: nothing holds an (n, m) matrix, and what leaves a pass are sums.

The posterior is a linear function of the sites, so its natural parameters travel in the state of
the loop next to the sites: whatever mixture of past states and updates the loop proposes, its
posterior is the same mixture of matrices that the passes have already summed, and no second pass is
needed to build it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import blas, solve_triangular
from scipy.special import logsumexp
from sklearn.utils import gen_batches

from ..._engine.contracts import require_parts
from ..._engine.gaussian import checked_cholesky, lower_times
from ..._engine.loop import SILENT, Anderson, Evaluation, iterate
from ..._engine.partition import add_up
from ..._engine.sites import Sites, cavity, log_site_mass, site_change
from .rows import dense_copies, read_rows
from .values import (
    InducingPosterior,
    InducingPrior,
    block_rows,
    rebase,
    rows_times,
    times_rows,
)


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
    site). `memory` (k, n) is what a rule with `resumed` kept of the rows at the last pass.
    """

    X: Any
    y: np.ndarray
    weight: np.ndarray
    sites: Any = None
    memory: Any = None


class PassStep(NamedTuple):
    """What a pass is to do.

    `step` is the share of the update that is taken; the sums are those of the sites after it.
    `gradient` is the form of the gradient of the log evidence, "fresh" or "stored", None for none.
    Both are exact at a fixed point; the fresh form is the one that can drive learning while the
    sites still move. With `inputs` it comes with that in the inducing points. `kind` is the float
    type of what is (n, m); with single precision the sums have some four digits, which a step of
    learning needs.
    """

    step: float = 1.0
    gradient: str | None = None
    inputs: bool = False
    kind: Any = np.float64


PASS = PassStep()


def evaluate_rows(model, rows, how=PASS):
    """Update the sites of some rows under the marginals of a model; return their `RowSums`.

    3 m^2 flops a row without gradient, 7 m^2 with it, and O(m d) for the kernel.
    """
    sums = _PassSums(model, rows, how)
    for block in gen_batches(len(rows.X), block_rows(len(model.prior.Z))):
        sums.add_block(block)
    return sums.told()


class _PassSums:
    """Running sums of a pass over blocks of rows."""

    def __init__(self, model, rows, how):
        self.model, self.rows, self.how = model, rows, how
        C, m, n = len(model.posteriors), len(model.prior.Z), len(rows.X)
        self.averaged = rows.sites is None
        # the head of a vector with room for gram and shift, see `PassState.packed`
        room = C * (2 * n + m * m + m)
        self.moved: Any = None if self.averaged else np.empty(room)[: 2 * C * n].reshape(C, 2, n)
        self.variances: Any = None if self.averaged else np.empty((C, n))
        self.memory: Any = None if rows.memory is None else np.empty_like(rows.memory)
        self.gram, self.shift = np.zeros((C, m, m)), np.zeros((C, m))
        self.log_term, self.residual = 0.0, 0.0
        fresh = how.gradient == "fresh"
        self.slopes = _Gradient(model, fresh, how.inputs, how.kind) if how.gradient else None

    def add_block(self, block):
        """Add a block of rows."""
        rows, slopes = self.rows, self.slopes
        X, w = np.asarray(rows.X[block], dtype=np.float64), dense_copies(rows.weight[block])
        W, extra_var, derivatives = self.model.prior.whiten(X, slopes is not None, self.how.kind)
        if slopes is not None:
            slopes.begin(W, X)
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


def evaluate_part(part, message, model, classes, how):
    """Run `evaluate_rows` on a partition and add the root of its weights, one if all are equal.

    `message` are the sites of its rows and what the rule keeps of them, or None.
    """
    X, y, weight = read_rows(part, classes)
    alike = len(weight) and weight.min() == weight.max()
    root = np.sqrt(weight[:1] if alike else weight)
    return evaluate_rows(model, PassRows(X, y, weight, *message), how), root


def collect_part(part, sites, prior, classes):
    """Return gram and shift of given sites (C, 2, n) of a partition."""
    X, _, weight = read_rows(part, classes)
    C, m = len(sites), len(prior.Z)
    gram, shift = np.zeros((C, m, m)), np.zeros((C, m))
    for rows in gen_batches(len(X), block_rows(m)):
        W, _, _ = prior.whiten(np.asarray(X[rows], dtype=np.float64))
        w = weight[rows]
        for c in range(C):
            gram[c] += _weighted_gram(W, w * sites[c, 0, rows])
            shift[c] += times_rows(w * sites[c, 1, rows], W)
    return gram, shift


def leave_one_out_part(part, sites, model, classes):
    """Return log probabilities (n,) of the own labels of a partition under cavities of the model.

    They are normalised over the classes.
    """
    X, y, _ = read_rows(part, classes)
    loo = np.empty(len(X))
    for rows in gen_batches(len(X), block_rows(len(model.prior.Z))):
        W, extra_var, _ = model.prior.whiten(np.asarray(X[rows], dtype=np.float64))
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


def add_sums(results):
    """Add `RowSums` over partitions, in their order; per-row results are left out."""
    total = add_up([r._replace(sites=None, var=None, memory=None) for r in results])
    return total._replace(residual=max(r.residual for r in results))


@dataclass
class PassState:
    """Sites of all rows, a list of (C, 2, n_k), and the posterior they make under a prior.

    With an averaged site `sites` is None and the posterior is all there is.
    """

    prior: InducingPrior
    gram: np.ndarray
    shift: np.ndarray
    sites: Any

    def posteriors(self):
        """Return one `InducingPosterior` a binary problem."""
        return [InducingPosterior(g, s) for g, s in zip(self.gram, self.shift, strict=True)]

    def packed(self):
        """Return the state as one vector: sites part by part, then grams and shifts.

        Sites that a pass over one partition made stay where they are.
        """
        sites, sums = self.sites or [], np.concatenate([self.gram.ravel(), self.shift.ravel()])
        room = sites[0].base if len(sites) == 1 else None
        if isinstance(room, np.ndarray) and room.shape == (sites[0].size + sums.size,):
            room[sites[0].size :] = sums
            return room
        return np.concatenate([*(a.ravel() for a in sites), sums])

    def used_up(self):
        """Return the same, the only one to hold the sites from now on."""
        x, self.sites = self.packed(), None
        return x


def _fill_metric(views, each, roots):
    """Write what makes changes of sites (C, 2, n) dimensionless into views of that shape."""
    for view, result, root in zip(views, each, roots, strict=True):
        np.multiply(result.var, root, out=view[:, 0])
        np.sqrt(result.var, out=view[:, 1])
        view[:, 1] *= root


class Solution(NamedTuple):
    """Result of the loop, the state and the model at its end."""

    result: Any
    state: PassState
    model: PassModel


class InducingEP:
    """Passes and fixed points of EP through inducing points for one data set.

    `run` is an open `PartMap`, `sizes` are the rows of its partitions, `classes` the labels where
    partitions hold labels. `n_problems` C binary problems share prior, blocks and passes. `copies`
    is the weight of all rows if one averaged site stands for all, None for a site a row. `base` is
    gram (C, m, m) and shift (C, m) of rows that were seen before and stay as they are. `positive`
    is the class index of label +1 of a single problem. `memory`, a list of (k, n_k), is what a rule
    with `resumed` keeps of the rows from one pass to the next.
    """

    def __init__(
        self,
        run,
        sizes,
        classes,
        n_problems,
        factor,
        rule,
        copies=None,
        base=None,
        positive=1,
        memory=None,
    ):
        self.run, self.sizes, self.classes = run, list(sizes), classes
        require_parts(factor, rule)
        self.base = (0.0, 0.0) if base is None else base
        self.positive, self.memory = positive, memory
        self.n_problems, self.factor, self.rule, self.copies = n_problems, factor, rule, copies
        self._ends = np.cumsum([2 * n_problems * n for n in sizes]) if copies is None else [0]

    def zero(self, prior):
        """Return the state of empty sites."""
        C, m = self.n_problems, len(prior.Z)
        sites = [np.zeros((C, 2, n)) for n in self.sizes] if self.copies is None else None
        gram, shift = np.zeros((C, m, m)) + self.base[0], np.zeros((C, m)) + self.base[1]
        return PassState(prior, gram, shift, sites)

    def restate(self, prior, sites):
        """Return the state of given sites under a prior, summed afresh in a pass over the rows."""
        if not any(np.any(s) for s in sites):
            return self.zero(prior)
        sums = zip(*self.run(collect_part, sites, prior, self.classes), strict=True)
        gram, shift = (sum(s) + base for s, base in zip(sums, self.base, strict=True))
        return PassState(prior, gram, shift, sites)

    def moved(self, state, prior):
        """Return a state under another prior, with copies of its sites."""
        if state.sites is not None:
            return self.restate(prior, [s.copy() for s in state.sites])
        gram, shift = rebase(state.gram, state.shift, state.prior, prior)
        return PassState(prior, gram, shift, None)

    def renew(self, model, sites):
        """Return the state of the sites that a model asks for, from what they were; one pass."""
        sums, each, _ = self.one_pass(model, sites)
        return PassState(model.prior, sums.gram, sums.shift, [r.sites for r in each])

    def leave_one_out(self, model, sites):
        """Return log probabilities (n,) of the rows' own labels under their cavities."""
        return np.concatenate(self.run(leave_one_out_part, sites, model, self.classes))

    def model(self, state):
        """Return what a pass needs to know of a state."""
        posteriors = state.posteriors()
        return PassModel(
            state.prior, posteriors, self.factor, self.rule, self.copies, self.positive
        )

    def one_pass(self, model, sites, **options):
        """Return (sums over all rows, list of `RowSums`, list of root weights)."""
        empty = [None] * len(self.sizes)
        messages = list(zip(empty if sites is None else sites, self.memory or empty, strict=True))
        results = self.run(evaluate_part, messages, model, self.classes, PassStep(**options))
        each = [r[0] for r in results]
        if self.memory is not None:
            self.memory = [r.memory for r in each]
            self.rule.advance()
        sums = add_sums(each)
        sums = sums._replace(gram=sums.gram + self.base[0], shift=sums.shift + self.base[1])
        return sums, each, [r[1] for r in results]

    def figures(self, model, sums):
        """Return log evidence of a model and undamped residual of a pass that took a whole step."""
        residual = sums.residual
        if self.copies is not None:
            residual = largest_change(model.posteriors, sums.gram, sums.shift)
        return {"residual": residual, "log_evidence": model.log_evidence + sums.log_term}

    def unpack(self, x, prior):
        """Return the state that is packed in x, as views."""
        C, m = self.n_problems, len(prior.Z)
        *sites, gram, shift = np.split(x, np.append(self._ends, self._ends[-1] + C * m * m))
        own = [s.reshape(C, 2, -1) for s in sites] if self.copies is None else None
        return PassState(prior, gram.reshape(C, m, m), shift.reshape(C, m), own)

    def _evaluate(self, x, prior):
        state = self.unpack(x, prior)
        model = self.model(state)
        sums, each, roots = self.one_pass(model, state.sites)
        if not np.isfinite(model.log_evidence + sums.log_term):
            raise ValueError(f"kernel {prior.kernel} gives NaN or infinity on these data.")
        figures, sites = self.figures(model, sums), None
        metric: Any = 1.0
        if state.sites is not None:
            metric, sites = np.zeros(len(x)), [r.sites for r in each]  # sums follow the sites
            _fill_metric(self.unpack(metric, prior).sites, each, roots)
        del each, state  # arrays as long as the rows are what limits the memory of a fit
        target = PassState(prior, sums.gram, sums.shift, sites).packed()
        return Evaluation(target, figures.pop("residual"), metric, record=figures, payload=model)

    def solve(self, state, *, tol, max_iter, damping, accelerate, monitor=SILENT):
        """Iterate to the fixed point at the prior of a state, which is used up.

        See `loop.iterate` for the parameters. Acceleration may lead through sites of negative
        precision: to mend them, in a pass of its own, saved no sweep on eight sets.
        """
        prior = state.prior
        cold = not (np.any(state.shift) if state.sites is None else any(map(np.any, state.sites)))
        result = iterate(
            lambda x: self._evaluate(x, prior),
            state.used_up(),
            max_iter=max_iter,
            tol=tol,
            damping=damping,
            acceleration=Anderson(mixing=damping) if accelerate else None,
            repair=lambda proposal, x, target: proposal,  # the loop then holds no target
            monitor=monitor,
            undamped_start=accelerate and cold,
        )
        return Solution(result, self.unpack(result.x, prior), result.evaluation.payload)


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
