"""Expectation propagation through inducing points over partitions of the rows.

A sweep is one pass over the rows. The posterior is a linear function of the sites, so its natural
parameters travel in the state of the loop next to the sites: whatever mixture of past states and
updates the loop proposes, its posterior is the same mixture of matrices that the passes have
already summed, and no second pass is needed to build it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from ..._engine.contracts import require_parts
from ..._engine.gaussian import checked_cholesky
from ..._engine.loop import SILENT, Anderson, Evaluation, iterate
from ..._engine.partition import load_part
from .._limits import LIMITS
from .passes import (
    PassModel,
    PassRows,
    PassStep,
    RowSums,
    WhitenedRows,
    collect_rows,
    evaluate_rows,
    leave_one_out,
)
from .values import InducingPosterior, InducingPrior


def read_rows(part, classes):
    """Return X, class indices and weights of a partition.

    A partition of two arrays holds labels, which are looked up in `classes`; one of three holds
    class indices and weights.
    """
    arrays = load_part(part)
    if len(arrays) == 3:
        return arrays
    X, y = np.asarray(arrays[0]), np.asarray(arrays[1])
    return X, np.searchsorted(classes, y), np.ones(len(X))


def evaluate_part(part, message, model, classes, how):
    """Run `evaluate_rows` on a partition and add the root of its weights, one if all are equal.

    `message` are the sites of its rows, what the rule keeps of them, and their `WhitenedRows`, each
    or None.
    """
    X, y, weight = read_rows(part, classes)
    sites, memory, kept = message
    alike = len(weight) and weight.min() == weight.max()
    root = np.sqrt(weight[:1] if alike else weight)
    return evaluate_rows(model, PassRows(X, y, weight, sites, memory, kept), how), root


def collect_part(part, message, prior, classes):
    """Run `collect_rows` on a partition; `message` are its sites and its `WhitenedRows` or None."""
    X, _, weight = read_rows(part, classes)
    sites, kept = message
    return collect_rows(prior, X, weight, sites, kept)


def collect_some(part, message, prior, classes):
    """Run `collect_rows` on some rows of a partition, maybe none; `message` are they and sites."""
    X, _, weight = read_rows(part, classes)
    rows, sites = message
    if not len(rows):
        return 0.0, 0.0
    return collect_rows(prior, X[rows], weight[rows], sites)


def leave_one_out_part(part, message, model, classes):
    """Run `leave_one_out` on a partition; `message` is that of `collect_part`."""
    X, y, _ = read_rows(part, classes)
    sites, kept = message
    return leave_one_out(model, X, y, sites, kept)


def add_sums(results):
    """Add `RowSums` over partitions, in their order; per-row results are left out."""
    total = results[0]._replace(sites=None, var=None, memory=None)
    for r in results[1:]:
        added = [None if a is None else a + b for a, b in zip(total[6:9], r[6:9], strict=True)]
        sums = total.gram + r.gram, total.shift + r.shift, total.log_term + r.log_term
        total = RowSums(None, None, *sums, max(total.residual, r.residual), *added)
    return total


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
        lengths = [2 * n_problems * n for n in self.sizes] if copies is None else []
        self._ends = np.cumsum([0, *lengths])
        self._kept: list[Any] = [None] * len(self.sizes)

    def keep_rows(self, m, n_columns):
        """Keep what passes under one prior of m points have in common, where that is worth it.

        This process has to do them all, and rows to be longer than what is kept of them.
        """
        if self.run.serial and 2 * m <= n_columns and m * sum(self.sizes) <= LIMITS.kept:
            self._kept = [WhitenedRows() for _ in self.sizes]

    def zero(self, prior):
        """Return the state of empty sites."""
        C, m = self.n_problems, len(prior.Z)
        sites = [np.zeros((C, 2, n)) for n in self.sizes] if self.copies is None else None
        gram, shift = np.zeros((C, m, m)) + self.base[0], np.zeros((C, m)) + self.base[1]
        return PassState(prior, gram, shift, sites)

    def restate(self, prior, sites):
        """Return the state of given sites under a prior; one pass over the rows."""
        if not any(np.any(s) for s in sites):
            return self.zero(prior)
        return self.collect(prior, sites)

    def collect(self, prior, sites):
        """Return the state of given sites under a prior, summed afresh."""
        messages = list(zip(sites, self._kept, strict=True))
        sums = self.run(collect_part, messages, prior, self.classes)
        gram, shift = (
            sum(s) + base for s, base in zip(zip(*sums, strict=True), self.base, strict=True)
        )
        return PassState(prior, gram, shift, sites)

    def renew(self, model, sites):
        """Return the state of the sites that a model asks for, from what they were; one pass."""
        sums, each, _ = self.one_pass(model, sites)
        return PassState(model.prior, sums.gram, sums.shift, [r.sites for r in each])

    def leave_one_out(self, model, sites):
        """Return log probabilities (n,) of the rows' own labels under their cavities."""
        messages = list(zip(sites, self._kept, strict=True))
        return np.concatenate(self.run(leave_one_out_part, messages, model, self.classes))

    def model(self, state):
        """Return what a pass needs to know of a state."""
        posteriors = state.posteriors()
        return PassModel(
            state.prior, posteriors, self.factor, self.rule, self.copies, self.positive
        )

    def one_pass(self, model, sites, **options):
        """Return (sums over all rows, list of `RowSums`, list of root weights)."""
        empty = [None] * len(self.sizes)
        of_parts = empty if sites is None else sites, self.memory or empty, self._kept
        messages = list(zip(*of_parts, strict=True))
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

    def pack(self, state):
        """Return a state as one vector: sites part by part, then grams and shifts.

        Sites of one partition that were made with room for the sums stay where they are.
        """
        sums = np.concatenate([state.gram.ravel(), state.shift.ravel()])
        sites = [] if state.sites is None else state.sites
        room = sites[0].base if len(sites) == 1 else None
        if isinstance(room, np.ndarray) and room.shape == (sites[0].size + sums.size,):
            room[sites[0].size :] = sums
            return room
        return np.concatenate([*(s.ravel() for s in sites), sums])

    def _packed_and_released(self, state):
        x = self.pack(state)
        state.sites = None
        return x

    def unpack(self, x, prior):
        """Return the state that `pack` made x of, as views."""
        C, m = self.n_problems, len(prior.Z)
        end = self._ends[-1]
        sites = None
        if self.copies is None:
            cut = zip(self._ends[:-1], self._ends[1:], self.sizes, strict=True)
            sites = [x[a:b].reshape(C, 2, n) for a, b, n in cut]
        gram = x[end : end + C * m * m].reshape(C, m, m)
        return PassState(prior, gram, x[end + C * m * m :].reshape(C, m), sites)

    def _metric(self, n_entries, variances, roots):
        """Return weights that make changes of sites dimensionless; the sums only follow them."""
        if self.copies is not None:
            return 1.0
        metric = np.zeros(n_entries)
        cut = zip(self._ends[:-1], self._ends[1:], variances, roots, strict=True)
        for a, b, var, root in cut:
            view = metric[a:b].reshape(self.n_problems, 2, -1)
            np.multiply(var, root, out=view[:, 0])
            np.sqrt(var, out=view[:, 1])
            view[:, 1] *= root
        return metric

    def _evaluate(self, x, prior):
        state = self.unpack(x, prior)
        model = self.model(state)
        sums, each, roots = self.one_pass(model, state.sites)
        if not np.isfinite(model.log_evidence + sums.log_term):
            raise ValueError(f"kernel {prior.kernel} gives NaN or infinity on these data.")
        figures = self.figures(model, sums)
        sites = None if state.sites is None else [r.sites for r in each]
        variances = [r.var for r in each]
        del each, state
        target = self.pack(PassState(prior, sums.gram, sums.shift, sites))
        del sites  # packed: arrays of this length are what limits the memory of a fit
        metric, residual = self._metric(len(x), variances, roots), figures.pop("residual")
        return Evaluation(target, residual, metric, record=figures, payload=model)

    def _repair(self, proposal, x, target, prior):
        """Keep sites of log-concave factors non-negative, and the sums true to the sites."""
        state = self.unpack(proposal, prior)
        ends = self.unpack(x, prior).sites, self.unpack(target, prior).sites
        bad = [np.flatnonzero(np.any(s[:, 0] < 0, axis=0)) for s in state.sites]
        n_bad = sum(map(len, bad))
        # copies of more rows would be what limits the memory of a fit
        few = n_bad <= 0.1 * sum(self.sizes)
        changes = [_repaired(*each, few) for each in zip(state.sites, *ends, bad, strict=True)]
        if not n_bad:
            return proposal
        del bad
        if few:
            for gram, shift in self.run(collect_some, changes, prior, self.classes):
                state.gram += gram
                state.shift += shift
        else:
            fresh = self.collect(prior, state.sites)
            state.gram[...], state.shift[...] = fresh.gram, fresh.shift
        return proposal

    def solve(self, state, *, tol, max_iter, damping, accelerate, monitor=SILENT):
        """Iterate to the fixed point at the prior of a state, which is used up.

        See `loop.iterate` for the parameters.
        """
        prior = state.prior
        cold = not (np.any(state.shift) if state.sites is None else any(map(np.any, state.sites)))
        repairs = self.factor.log_concave and self.copies is None
        result = iterate(
            lambda x: self._evaluate(x, prior),
            self._packed_and_released(state),
            max_iter=max_iter,
            tol=tol,
            damping=damping,
            acceleration=Anderson(mixing=damping) if accelerate else None,
            repair=(lambda p, x, t: self._repair(p, x, t, prior)) if repairs else None,
            monitor=monitor,
            undamped_start=accelerate and cold,
        )
        return Solution(result, self.unpack(result.x, prior), result.evaluation.payload)


def _repaired(sites, old, new, rows, few):
    """Move negative sites of some rows halfway between two others; return (rows, change) if few."""
    before = sites[:, :, rows] if few else None
    for problem, a, b in zip(sites, old, new, strict=True):
        bad = rows[problem[0, rows] < 0]
        for own, one, other in zip(problem, a, b, strict=True):
            own[bad] = 0.5 * (one[bad] + other[bad])
    return (rows, sites[:, :, rows] - before) if few else None


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
