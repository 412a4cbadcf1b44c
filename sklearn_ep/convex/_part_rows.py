"""What a worker does with the rows of one partition when all columns fit into a matrix.

Nothing per row leaves a worker: the site of a row is a function of its mean and variance, and these
are functions of the posterior that comes with the message.
"""

import secrets
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from .._engine.partition import PartMemory
from .._engine.super_gaussian import LogisticSites
from .._estimator.row_parts import read_part
from ._systems import row_blocks, weighted_gram, with_ones

__all__ = ["MEMORY", "RowSpec", "SiteSums", "WholePosterior", "part_rows", "site_sums"]

# Numbers of prepared rows that a process keeps, 2 GB.
MEMORY = PartMemory(2**28)


class RowSpec(NamedTuple):
    """How a worker reads rows: as classes (K,) with weights, in this fit, for this bound.

    `positive` is the index of the class that is told from all others. For sampled variances
    besides: the number of the first row of each part, the seed of the noise that belongs to rows,
    and whether products with many columns are in single precision.
    """

    token: str
    classes: np.ndarray
    class_weight: np.ndarray
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
