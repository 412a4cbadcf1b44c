"""What a worker does with the rows of one partition when columns are too many for a matrix.

The variance of a row is a function of `Anchor` objects, numbers per column that come with the
message, each of which refers to the one before. A worker that has lost what it kept goes along that
chain again; what it answers does not depend on that.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .._engine.row_order import spread_bits
from ._rows import MEMORY, part_rows, rows_left_out
from ._systems import START_PRECISION, TINY, leave_one_out, squared, with_data


@dataclass(frozen=True, eq=False)
class Candidate:
    """Numbers per column from which variances of rows are formed.

    variances (n,) are 1 / diag(A), 0 for an intercept; samples (n, k), or None, are draws of N(0,
    A^-1) given the intercept; column (n,), or None, is that of A^-1 that belongs to the intercept.
    """

    tag: int
    variances: np.ndarray
    samples: np.ndarray | None
    column: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Anchor:
    """A `Candidate` with its calibration: level c, the share of samples, at the coefficients u.

    `damping` is the share of the step in log z that is taken.
    """

    candidate: Candidate
    point: np.ndarray
    level: float
    shrink: float
    damping: float = 1.0


@dataclass(frozen=True, eq=False)
class Point:
    """Coefficients u (n,) with the number by which workers know them."""

    tag: int
    u: np.ndarray


class LineSums(NamedTuple):
    """Expected loss, its gradient in u, and pi' z, summed over rows.

    After a new anchor the sum of squared changes of log z besides, and pi' z of the sites before.
    """

    value: float
    slope: np.ndarray
    dof: float
    change: float = 0.0
    dof_before: float = 0.0


class Calibration(NamedTuple):
    """Sums over rows with variance that the level and the share of samples follow from.

    With a = r / j and b = r pi of sampled variances r: weight, and weighted a, b, a^2, ab, b^2.
    """

    weight: float
    a: float
    b: float
    aa: float
    ab: float
    bb: float


class RightSums(NamedTuple):
    """Diagonal of B' Pi B, and B' pi^1/2 E2 for some samples."""

    diagonal: np.ndarray
    right: np.ndarray


class VectorSum(NamedTuple):
    """A sum over rows of numbers per column."""

    total: np.ndarray


def row_normals(first, n_rows, columns, seed):
    """Return standard normals (n_rows, k) that belong to rows by their number in all rows.

    So they do not depend on how rows are cut into parts. `columns` is a slice of samples.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        rows = np.arange(first, first + n_rows, dtype=np.uint64)[:, None] << np.uint64(20)
        number = rows + np.arange(columns.start, columns.stop, dtype=np.uint64)
        x = spread_bits(number * golden + spread_bits(np.array([seed], dtype=np.uint64)))
        y = spread_bits(x + golden)
    u, angle = ((a >> np.uint64(11)).astype(float) * 2.0**-53 for a in (x, y))
    return np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * angle)


class SampledRows:
    """Rows of a part with the state that follows from the messages, kept between visits.

    `first` is the number of the first row among all and `seed` that of the normals which belong to
    rows; with `single` products with many columns are in single precision.
    """

    def __init__(self, B, sites, first, seed, single):
        self.B, self.sites, self.first, self.seed = B, sites, first, seed
        kind = np.float32 if single else np.float64
        self.fast = B
        if B.dtype != kind:  # `astype` of a sparse matrix would copy its structure too
            self.fast = with_data(B, B.data.astype(kind)) if sp.issparse(B) else B.astype(kind)
        self.squares = squared(self.fast)
        self.n_anchors, self.z = 0, None
        self._memo: dict[str, Any] = {}

    def _kept(self, name, key, make):
        """Return what was made for this key, or make it in the place of that for another one."""
        if self._memo.get(name, (None, None))[0] != key:
            self._memo[name] = key, make()
        return self._memo[name][1]

    def noise(self, columns):
        """Return the normals (q, k) of the rows for a slice of samples, times root weights."""
        normals = row_normals(self.first, self.B.shape[0], columns, self.seed)
        return np.sqrt(self.sites.weight)[:, None] * normals

    def variances(self, anchors):
        """Return the variances z (q,) of the last anchor, or None without any."""
        if self.n_anchors > len(anchors):
            self.n_anchors, self.z = 0, None
        for anchor in anchors[self.n_anchors :]:
            self.z = self._next(anchor)
            self.n_anchors += 1
        return self.z

    def predictors(self, point):
        """Return s = B u (q,) at a `Point`."""
        return self._kept("predictors", point.tag, lambda: self.B @ point.u)

    def penalty(self, point, anchors):
        """Return the `Penalty` of the rows."""
        z, s = self.variances(anchors), self.predictors(point)
        return self._kept("penalty", (point.tag, len(anchors)), lambda: self.sites.penalty(s, z))

    def weight(self, point, anchors, curvature):
        """Return the weights of rows in products: curvatures, or precisions of their sites."""

        def make():
            f = self.penalty(point, anchors)
            return (f.curvature if curvature else f.precision).astype(self.fast.dtype)

        return self._kept("weight", (point.tag, len(anchors), curvature), make)

    def _copy_precision(self, u):
        """Return the precision of one copy of each row at coefficients u and the variances kept."""
        if self.z is None:
            return np.full(len(self.sites.weight), START_PRECISION)
        return self.sites.penalty(self.B @ u, self.z).precision / self.sites.weight

    def formed(self, candidate, u, precision=None):
        """Return what a `Candidate` says at coefficients u, with the variances kept.

        These are precisions p of one copy of each row, leave-one-out sums j, sampled variances r
        and products with the column, None where there are none. `precision` (q,) is that of the
        sites where it is known.
        """

        def make():
            p = self._copy_precision(u) if precision is None else precision / self.sites.weight
            r = x = None
            if candidate.samples is None:
                # without calibration the row's own share is left in: it matters less than the level
                j = self.squares @ candidate.variances.astype(self.squares.dtype)
                j = j.astype(float)
            else:
                j = leave_one_out(self.fast, candidate.variances, p)
                product = self.fast @ candidate.samples.astype(self.fast.dtype)
                r = np.einsum("ij,ij->i", product, product).astype(float) / product.shape[1]
            if candidate.column is not None:
                x = self.B @ candidate.column
            return p, j, r, x

        return self._kept("formed", candidate.tag, make)

    def _next(self, anchor):
        """Return the variances of an anchor, from those of the one before."""
        candidate = anchor.candidate
        p, j, r, x = self.formed(candidate, anchor.point)
        del self._memo["formed"]
        z = anchor.level * j / (1.0 + p * anchor.level * j)
        if r is not None and anchor.shrink > 0:
            z += anchor.shrink * (r - z)
        if x is not None:
            z += x**2 / candidate.column[-1]
        z = np.maximum(z, TINY)
        if anchor.damping < 1.0 and self.z is not None:
            z = self.z ** (1.0 - anchor.damping) * z**anchor.damping
        return z


def sampled_rows(part, k, spec):
    """Return the `SampledRows` of partition k, those in memory as they are."""
    if isinstance(part, SampledRows):
        return part
    rows = MEMORY.find(spec.token, k)
    if rows is None:
        B, sites = part_rows(part, k, spec, keep=False)
        rows = SampledRows(B, sites, spec.firsts[k], spec.seed, spec.single)
        MEMORY.keep(spec.token, k, rows, 4 * B.nnz if sp.issparse(B) else 3 * B.size)
    return rows


def left_out_of_anchors(part, k, spec, point, anchors):
    """Return the `RowsLeftOut` of partition k without their sites in a sampled posterior."""
    rows = sampled_rows(part, k, spec)
    return rows_left_out(rows.sites, rows.predictors(point), rows.variances(anchors))


def answered(part, k, spec, what, *message):
    """Return what one of the functions below says of the rows of partition k."""
    return what(sampled_rows(part, k, spec), *message)


def _diagonal(rows, precision):
    """Return the diagonal of B' diag(precision) B."""
    return (rows.squares.T @ precision.astype(rows.squares.dtype)).astype(float)


def diagonal_sums(rows, point, _, *anchors):
    """Return (B.^2)' pi, with the start's precision before any anchor."""
    start = START_PRECISION * rows.sites.weight
    return VectorSum(_diagonal(rows, rows.penalty(point, anchors).precision if anchors else start))


def line_sums(rows, point, _, *anchors):
    """Return the `LineSums`, in double precision."""
    f = rows.penalty(point, anchors)
    dof = float(f.precision @ rows.variances(anchors))
    return LineSums(float(np.sum(f.value)), rows.B.T @ f.slope, dof)


def advance_sums(rows, point, _, *anchors):
    """Return the `LineSums` where variances go on to the last anchor."""
    before, old = rows.penalty(point, anchors[:-1]).precision, rows.variances(anchors[:-1])
    z = rows.variances(anchors)
    change = float(rows.sites.weight @ np.log(z / old) ** 2)
    sums = line_sums(rows, point, _, *anchors)
    return sums._replace(change=change, dof_before=float(before @ z))


def product_sums(rows, point, columns, *anchors):
    """Return B' diag(weight) B V; `columns` are V and whether curvatures weigh."""
    V, curvature = columns
    weight = rows.weight(point, anchors, curvature)
    if V.ndim == 2 and V.shape[1] == 2 and sp.issparse(rows.fast):
        # scipy takes longer for two columns at once than for one after the other
        each = [rows.fast.T @ (weight * (rows.fast @ v)) for v in V.T.copy()]
        return VectorSum(np.column_stack(each))
    product = rows.fast @ V
    product *= weight if V.ndim == 1 else weight[:, None]
    return VectorSum(rows.fast.T @ product)


def right_sums(rows, point, columns, *anchors):
    """Return the `RightSums` for a slice of samples."""
    precision = rows.penalty(point, anchors).precision
    root = np.sqrt(precision / rows.sites.weight)
    right = rows.B.T @ (root[:, None] * rows.noise(columns))
    return RightSums(_diagonal(rows, precision), right)


def calibration_sums(rows, point, candidate, *anchors):
    """Return the `Calibration` for a `Candidate`."""
    pi, j, r, _ = rows.formed(candidate, point.u, rows.penalty(point, anchors).precision)
    seen = j > 0
    w, a, b = rows.sites.weight[seen], r[seen] / j[seen], r[seen] * pi[seen]
    wa, wb = w * a, w * b
    sums = (w.sum(), wa.sum(), wb.sum(), wa @ a, wa @ b, wb @ b)
    return Calibration(*map(float, sums))
