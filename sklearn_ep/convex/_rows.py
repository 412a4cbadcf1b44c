"""What a worker does with the rows of one partition when all columns fit into a matrix.

Nothing per row leaves a worker: the site of a row is a function of its mean and variance, and these
are functions of the posterior that comes with the message. Rows in memory are one partition.

For a calibration a worker removes the sites of its rows from the posterior once, and keeps the
result. After that two numbers go to a partition in a visit and seven come back. A worker that
has nothing, or has lost it, says so and is sent the posterior.
"""

import secrets
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .._engine.partition import PartMemory, add_up
from .._engine.super_gaussian import LogisticSites
from .._estimator.row_parts import read_part
from ._calibration import LeftOut, ScoreSums, best_of_sums, cavities, one_node
from ._systems import row_blocks, squared, weighted_gram, with_ones

MEMORY = PartMemory(2**28)  # numbers of prepared rows that a process keeps, 2 GB


class RowSpec(NamedTuple):
    """How a worker reads rows: as classes (K,) with weights, in this fit, for this bound.

    `positive` is the index of the class that is set against all others. For sampled variances
    besides: the number of the first row of each part, the seed of the noise that belongs to rows,
    and whether products with many columns are in single precision.
    """

    token: str
    classes: Any
    class_weight: Any
    intercept: bool
    bound: str
    firsts: tuple = ()
    seed: int = 0
    single: bool = False
    positive: int = 1

    @classmethod
    def of(cls, *args):
        """Return the `RowSpec` of a new fit; arguments are the fields after the token."""
        return cls(secrets.token_hex(8), *args)

    def of_class(self, k):
        """Return the `RowSpec` of class k against the rest, a fit of its own to workers."""
        return self.renamed()._replace(positive=k)

    def renamed(self):
        """Return the same under which workers have kept nothing."""
        return self._replace(token=secrets.token_hex(8))

    def forget(self):
        """Drop what this process keeps for the fit."""
        MEMORY.forget(self.token)


class WholePosterior(NamedTuple):
    """A posterior of all coefficients: mean u (n,), and R (n, n) with covariance R'R, or None."""

    mean: np.ndarray
    root: np.ndarray | None


class SiteSums(NamedTuple):
    """Sums over rows at a posterior: expected loss, its gradient in u, B' diag(pi) B, pi' z."""

    value: float
    slope: np.ndarray
    gram: np.ndarray
    dof: float


class PartRows(NamedTuple):
    """Rows of a partition: B with ones for an intercept, and their logistic sites."""

    B: np.ndarray
    sites: LogisticSites

    def sums(self, posterior):
        """Return the `SiteSums` of the rows at a `WholePosterior`, in blocks of rows."""
        q, n = self.B.shape
        value, slope, gram, dof = 0.0, np.zeros(n), np.zeros((n, n)), 0.0
        for block in row_blocks(q, n):
            B = self.B if q <= block.stop - block.start else self.B[block]
            s, z = _marginals(B, posterior)
            f = self.sites.of_rows(block).penalty(s, z)
            value += float(np.sum(f.value))
            slope += B.T @ f.slope
            gram += weighted_gram(B, f.precision)
            dof += float(f.precision @ z)
        return SiteSums(value, slope, gram, dof)

    def marginals(self, posterior):
        """Return means and variances (q,) of the predictors under a `WholePosterior`."""
        each = [_marginals(self.B[block], posterior) for block in row_blocks(*self.B.shape)]
        return tuple(np.concatenate(values) for values in zip(*each, strict=True))


def _marginals(B, posterior):
    s, z = B @ posterior.mean, np.zeros(B.shape[0])
    if posterior.root is not None:
        half = B @ posterior.root.T
        z = np.einsum("ij,ij->i", half, half)
    return s, z


def part_rows(part, k, spec, keep=True):
    """Return the `PartRows` of partition k, from memory if this process has kept them."""
    rows = MEMORY.find(spec.token, k)
    if rows is None:
        X, y, weight = read_part(part, k, classifier=True)
        index = np.searchsorted(spec.classes, y)
        B = with_ones(X, spec.intercept)
        weight = weight * spec.class_weight[index]
        sign = np.where(index == spec.positive, 1.0, -1.0)
        rows = PartRows(B, LogisticSites(sign, weight, spec.bound))
        if keep:
            MEMORY.keep(spec.token, k, rows, 2 * B.nnz if sp.issparse(B) else B.size)
    return rows


def site_sums(part, k, spec, posterior):
    """Return the `SiteSums` of partition k; O(n d^2) flops for n rows, O(d^2) numbers."""
    return part_rows(part, k, spec).sums(posterior)


class ColumnSums(NamedTuple):
    """Total weight of rows, and weighted sums (n,) of the entries of columns and their squares."""

    weight: float
    total: np.ndarray
    squares: np.ndarray

    @property
    def variances(self):
        """Variances (n,) of the columns, as far as these sums have digits."""
        squares = self.squares / self.weight
        return surely_positive(squares - (self.total / self.weight) ** 2, squares)


def surely_positive(variances, squares):
    """Return variances, those zero that are rounding errors of columns of some mean squares."""
    return np.where(variances > 64.0 * np.finfo(float).eps * squares, variances, 0.0)


def column_sums(part, k, spec):
    """Return the `ColumnSums` of partition k, before anything is kept of it."""
    B, sites = part_rows(part, k, spec, keep=False)
    return ColumnSums(float(sites.weight.sum()), B.T @ sites.weight, squared(B).T @ sites.weight)


class Question(NamedTuple):
    """What is asked of rows left out: their `ScoreSums` at theta, rough or not.

    `token` is what workers keep them under.
    """

    token: str
    theta: np.ndarray
    rough: bool


def left_out_of_posterior(part, k, spec, posterior):
    """Return the `RowsLeftOut` of partition k without their sites in a `WholePosterior`."""
    rows = part_rows(part, k, spec)
    return rows_left_out(rows.sites, *rows.marginals(posterior))


def rows_left_out(sites, s, z):
    """Return the `RowsLeftOut` of rows with predictors of mean s and variance z."""
    f = sites.penalty(s, z)
    left = cavities(s, z, f.slope, f.precision, sites.weight)
    return one_node(sites.sign, sites.weight, left)[0]


def score_sums(part, k, question, source):
    """Return the `ScoreSums` of partition k, or None where it keeps nothing and has no `source`.

    That is a function that gives the `RowsLeftOut`, and what it takes besides partition and k.
    """
    rows: Any = MEMORY.find(question.token, k)
    if rows is None:
        if source is None:
            return None
        form, *args = source
        rows = form(part, k, *args)
        MEMORY.keep(question.token, k, rows, sum(values.size for values in rows))
    return ScoreSums.of(question.theta, rows, question.rough)


@dataclass
class PartedRows:
    """The rows of a binary problem, wherever they are.

    `run(worker, numbers, *message)` returns the answers of all parts, of which there are `n_parts`
    and which have `n_rows` rows of total `weight`; `spec` says how workers read them.
    """

    run: Any
    n_parts: int
    spec: RowSpec
    n_rows: int
    weight: float

    def of_class(self, k):
        """Return the same for class k against the rest."""
        return replace(self, spec=self.spec.of_class(k))

    def visit(self, worker, *message):
        """Return what all parts answer, added up."""
        return add_up(self.run(worker, range(self.n_parts), self.spec, *message))

    def left_out(self, form, *state):
        """Return the `LeftOut` of the rows, and the number of visits.

        `form` gives the `RowsLeftOut` of a partition, `state` is the posterior it takes.
        """
        own, n_visits = self.spec.renamed(), 0
        full = form, self.spec, *state

        def sums(theta, rough):
            nonlocal n_visits
            question = Question(own.token, theta, rough)
            answers = self.run(
                score_sums, range(self.n_parts), question, None if n_visits else full
            )
            n_visits += 1
            for k, answer in enumerate(answers):
                if answer is None:
                    answers[k] = self.run.one(k, score_sums, k, question, full)
            return add_up(answers)

        try:
            slope, temper = np.exp(best_of_sums(self.n_rows, sums))
        finally:
            own.forget()
        return LeftOut(float(slope), float(temper)), n_visits
