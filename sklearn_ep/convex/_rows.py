"""What a worker does with the rows of one partition.

Nothing per row leaves a worker: the site of a row is a function of its mean and variance, and these
are functions of what comes with the message. With exact variances that is the posterior. With
sampled ones it is a chain of `Anchor` objects, numbers per column each of which refers to the one
before. A worker that has lost what it kept goes along that chain again; what it answers does not
depend on that. Rows in memory are one partition.

For a calibration a worker removes the sites of its rows from the posterior once, and keeps the
result. After that two numbers go to a partition in a visit and seven come back. A worker that
has nothing, or has lost it, says so and is sent the posterior.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from .._engine.gaussian import row_blocks, weighted_gram, with_data
from .._engine.left_out import LeftOut, ScoreSums, best_scales
from .._engine.partition import KEPT, add_up
from .._engine.rows import spread_bits
from .._estimator.row_parts import read_part
from . import _systems
from ._calibration import SCALES, cavities, rows_left_out
from ._sites import LogisticSites


class RowSpec(NamedTuple):
    """How a worker reads rows: as classes (K,) with weights, in this fit, for this bound.

    `positive` is the index of the class that is set against all others. For sampled variances
    besides: the number of the first row of each part, the seed of the noise that belongs to rows,
    and whether products with many columns are in single precision.
    """

    classes: Any
    class_weight: Any
    intercept: bool
    bound: str
    firsts: Any = (0,)
    seed: int | None = None
    single: bool = False
    positive: int = 1
    token: str = ""


class Candidate(NamedTuple):
    """Numbers per column from which variances of rows are formed.

    variances (n,) are 1 / diag(A), 0 for an intercept; samples (n, m), or None, are vectors whose
    squares add up to n_draws times A^-1 given the intercept; column (n,), or None, is that of A^-1
    that belongs to the intercept.
    """

    tag: int
    variances: np.ndarray
    samples: np.ndarray | None
    column: np.ndarray | None
    n_draws: int = 1


class Anchor(NamedTuple):
    """A `Candidate` with its calibration: level c, the share of samples, at the coefficients u.

    `damping` is the share of the step in log z that is taken.
    """

    candidate: Candidate
    point: np.ndarray
    level: float
    shrink: float
    damping: float = 1.0


class Point(NamedTuple):
    """Coefficients u (n,) with the number by which workers know them."""

    tag: int
    u: np.ndarray


class LineSums(NamedTuple):
    """Expected loss, its gradient in u, and pi' z, summed over rows.

    After a new anchor the sum of squared changes of log z besides, and pi' z of the sites before.
    With exact variances B' diag(pi) B, else None.
    """

    value: float
    slope: np.ndarray
    dof: float
    change: float = 0.0
    dof_before: float = 0.0
    gram: Any = None


class Calibration(NamedTuple):
    """Sums over rows with variance that the level and the share of samples follow from.

    `dof` are the degrees of freedom at the last level, `own` the squares of those of each row;
    `told`, `told_a` and `told_b` are what signs of rows tell of them, `squared` what these tell of
    the squares of eigenvalues, and `of_columns` the sum of pi r for what the columns give. With a =
    r / j and b = r pi of sampled variances r: weight, and weighted a, b, a^2, ab, b^2, the squares
    of r of each draw and of their mean.
    """

    dof: float
    own: float
    told: float
    told_a: float
    told_b: float
    squared: float
    of_columns: float
    weight: float
    a: float
    b: float
    each: np.ndarray
    mean: np.ndarray


class VectorSum(NamedTuple):
    """A sum over rows of numbers per column, and a second one if asked for."""

    total: np.ndarray
    right: Any = None


def row_signs(first, n_rows, columns, seed):
    """Return random signs (n_rows, k) that belong to rows by their number in all rows.

    So they do not depend on how rows are cut into parts. `columns` is a slice of samples.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        rows = np.arange(first, first + n_rows, dtype=np.uint64)[:, None] << np.uint64(20)
        number = rows + np.arange(columns.start, columns.stop, dtype=np.uint64)
        bits = spread_bits(number * golden + spread_bits(np.array([seed], dtype=np.uint64)))
    return np.where(bits >> np.uint64(63), 1.0, -1.0)


class PartRows:
    """Rows of a part: B with ones for an intercept, and their logistic sites.

    With sampled variances they have a state that follows from the messages, kept between visits.
    `first` is the number of the first row among all and `seed` that of the signs which belong to
    rows; with `single` products with many columns are in single precision.
    """

    def __init__(self, B, sites, first, seed, single):
        self.B, self.sites = B, sites
        self.first, self.seed, self.single = first, seed, single
        self.n_anchors, self.z = 0, None
        self._memo: dict[str, Any] = {}

    @cached_property
    def fast(self):
        """B in the precision of products."""
        kind = np.float32 if self.single else np.float64
        if sp.issparse(self.B):  # whose own `astype` would copy its structure too
            return with_data(self.B, self.B.data.astype(kind, copy=False))
        return self.B.astype(kind, copy=False)

    @cached_property
    def squares(self):
        """Squares of the entries, in the same precision."""
        return _systems.squared(self.fast)

    def _kept(self, name, key, make):
        """Return what was made for this key, or make it in the place of that for another one."""
        if self._memo.get(name, (None, None))[0] != key:
            self._memo[name] = key, make()
        return self._memo[name][1]

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

    def formed(self, candidate, u, precision=None):
        """Return what a `Candidate` says at coefficients u, with the variances kept.

        These are precisions p of one copy of each row, leave-one-out sums j, products with samples
        and products with the column, None where there are none. `precision` (q,) is that of the
        sites where it is known.
        """

        def make():
            weight, product, x = self.sites.weight, None, None
            if precision is not None:
                p = precision / weight
            elif self.z is None:
                p = np.full(len(weight), _systems.START_PRECISION)
            else:
                p = self.sites.penalty(self.B @ u, self.z).precision / weight
            if candidate.samples is None:
                # without calibration the row's own share is left in: it matters less than the level
                variances = candidate.variances.astype(self.squares.dtype)
                j = (self.squares @ variances).astype(float)
            else:
                j = _systems.leave_one_out(self.fast, candidate.variances, p)
                product = self.fast @ candidate.samples.astype(self.fast.dtype)
            if candidate.column is not None:
                x = self.B @ candidate.column
            return p, j, product, x

        return self._kept("formed", candidate.tag, make)

    def _next(self, anchor):
        """Return the variances of an anchor, from those of the one before."""
        candidate = anchor.candidate
        p, j, product, x = self.formed(candidate, anchor.point)
        del self._memo["formed"]
        z = anchor.level * j / (1.0 + p * anchor.level * j)
        if product is not None and anchor.shrink > 0:
            sampled = np.einsum("ij,ij->i", product, product) / candidate.n_draws
            z += anchor.shrink * (sampled - z)
        if x is not None:
            z += x**2 / candidate.column[-1]
        z = np.maximum(z, _systems.TINY)
        if anchor.damping < 1.0 and self.z is not None:
            z = self.z ** (1.0 - anchor.damping) * z**anchor.damping
        return z


def site_sums(rows, mean, root):
    """Return the `LineSums` of rows at a posterior, with their matrix, in blocks of rows."""
    q, n = rows.B.shape
    value, slope, gram, dof = 0.0, np.zeros(n), np.zeros((n, n)), 0.0
    for block in row_blocks(q, n):
        B = rows.B if q <= block.stop - block.start else rows.B[block]
        z = np.zeros(B.shape[0]) if root is None else _systems.HalfCovariance(root).row_variance(B)
        f = rows.sites.of_rows(block).penalty(B @ mean, z)
        value += float(np.sum(f.value))
        slope += B.T @ f.slope
        gram += weighted_gram(B, f.precision)
        dof += float(f.precision @ z)
    return LineSums(value, slope, dof, gram=gram)


def left_out(rows, mean, root, share=1.0):
    """Return the `CavityRows` of rows, a share (n,) of copies taken out, and which are proper."""
    z = _systems.HalfCovariance(root).row_variance(rows.B)
    return _without_sites(rows.sites, rows.B @ mean, z, share)


def left_out_of_anchors(rows, point, anchors, share=1.0):
    """Return the same of a sampled posterior."""
    return _without_sites(rows.sites, rows.predictors(point), rows.variances(anchors), share)


def _without_sites(sites, s, z, share):
    """Return the same of rows with predictors of mean s and variance z."""
    f = sites.penalty(s, z)
    left = cavities(s, z, f.slope, f.precision, share)
    return rows_left_out(sites.sign, sites.weight, np.ones(1), [left])


def _read(part, k, spec):
    """Return the `PartRows` of partition k."""
    X, y, weight = read_part(part, k, classifier=True)
    index = np.searchsorted(spec.classes, y)
    sign = np.where(index == spec.positive, 1.0, -1.0)
    sites = LogisticSites(sign, weight * spec.class_weight[index], spec.bound)
    B = _systems.with_ones(X, spec.intercept)
    return PartRows(B, sites, spec.firsts[k], spec.seed, spec.single)


def _rows_of(part, k, spec):
    """Return the same, from memory if this process has kept them; those in memory as they are."""
    if isinstance(part, PartRows):
        return part
    rows = KEPT.find(spec.token, k)
    if rows is None:
        rows = _read(part, k, spec)
        n_copies, sparse = 1 if spec.seed is None else 3, sp.issparse(rows.B)
        size = (n_copies + 1) * rows.B.nnz if sparse else n_copies * rows.B.size
        if spec.token:  # before a fit nothing is kept
            KEPT.keep(spec.token, k, rows, size)
    return rows


def _answered(part, k, spec, what, *message):
    """Return what a function of `PartRows` says of the rows of partition k."""
    return what(_rows_of(part, k, spec), *message)


def column_sums(rows):
    """Return the `ColumnSums`."""
    return _systems.ColumnSums.of(rows.B, rows.sites.weight)


def score_sums(part, k, spec, theta, form, *state):
    """Return the `ScoreSums` of partition k at theta.

    None where nothing is kept and no state is given from which `form` gives the `CavityRows`.
    """
    place = spec.token, (k, "left out")
    left: Any = KEPT.find(*place)
    if left is None:
        if not state:
            return None
        left, _ = form(_rows_of(part, k, spec), *state)
        KEPT.keep(*place, left, 8 * left.mean.size)
    return ScoreSums.of(theta, left)


@dataclass
class PartedRows:
    """The rows of a binary problem, wherever they are.

    `run(worker, numbers, *message)` returns the answers of all parts, of which there are `n_parts`
    whose rows have a total `weight` and columns of a `size`; `spec` says how workers read them.
    """

    run: Any
    n_parts: int
    spec: RowSpec
    weight: float
    size: float
    n_visits: int = field(default=0, init=False)

    def visit(self, what, *message):
        """Return what a function of `PartRows` says of all parts, added up."""
        self.n_visits += 1
        return add_up(self.run(_answered, range(self.n_parts), self.spec, what, *message))

    def left_out(self, form, *state):
        """Return the `LeftOut` of the rows.

        `form` gives the `CavityRows` of `PartRows`, `state` is the posterior it takes.
        """
        begun = self.n_visits

        def sums(theta):
            ask = score_sums, range(self.n_parts), self.spec, theta, form
            answers = self.run(*ask, *(state if self.n_visits == begun else ()))
            if None in answers:
                answers = self.run(*ask, *state)
            self.n_visits += 1
            return add_up(answers)

        return LeftOut(np.exp(best_scales(SCALES, self.weight, sums)))


def _diagonal(rows, precision):
    """Return the diagonal of B' diag(precision) B."""
    return (rows.squares.T @ precision.astype(rows.squares.dtype)).astype(float)


def diagonal_sums(rows, point, _, *anchors):
    """Return (B.^2)' pi, with the start's precision before any anchor."""
    start = _systems.START_PRECISION * rows.sites.weight
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
    (V, curvature), f = columns, rows.penalty(point, anchors)
    weight = (f.curvature if curvature else f.precision).astype(rows.fast.dtype)
    product = rows.fast @ V
    product *= weight if V.ndim == 1 else weight[:, None]
    return VectorSum(rows.fast.T @ product)


def right_sums(rows, point, columns, *anchors):
    """Return the diagonal of B' Pi B, and B' pi^1/2 E2 for signs E2 of a slice of samples."""
    precision = rows.penalty(point, anchors).precision
    signs = row_signs(rows.first, rows.B.shape[0], columns, rows.seed)
    right = rows.B.T @ (np.sqrt(precision)[:, None] * signs)
    return VectorSum(_diagonal(rows, precision), right)


def calibration_sums(rows, point, extra, *anchors):
    """Return the `Calibration`; `extra` are a `Candidate` and the last level.

    Its samples are, in turns, what the signs of rows give and what those of columns do. Signs e of
    rows and what they give, w, tell the degrees of freedom, e' Pi^1/2 B w. Rows weigh by their
    shares of these at the last level.
    """
    candidate, level = extra
    weight, precision = rows.sites.weight, rows.penalty(point, anchors).precision
    p, j, product, _ = rows.formed(candidate, point.u, precision)
    n_draws = candidate.n_draws
    signs = row_signs(rows.first, len(p), slice(0, n_draws), rows.seed)
    told = np.sqrt(precision) * np.einsum("ij,ij->i", signs, product[:, ::2]) / n_draws
    left = 1.0 + p * level * j
    share = p * level * j / left
    halves = np.einsum("i,ij,ij->j", precision, product, product)
    each = halves[::2].sum() / n_draws, halves[1::2].sum() / n_draws
    of_signs = told.sum(), told @ (level / left), told @ share, *each
    seen = j > 0
    w, j, p = weight[seen], j[seen], p[seen]
    draws = product[seen, ::2] ** 2 + product[seen, 1::2] ** 2
    r, squares = np.mean(draws, axis=1), np.mean(draws**2, axis=1)
    a, b, forms = r / j, r * p, np.stack([w / j**2, w * p / j, w * p**2])
    totals = w.sum(), w @ a, w @ b
    dof = weight * share
    return Calibration(dof.sum(), dof @ dof, *of_signs, *totals, forms @ squares, forms @ r**2)
