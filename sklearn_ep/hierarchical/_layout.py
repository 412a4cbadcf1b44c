"""Where rows and effects lie: one local factor, eliminated group by group, and what all rows share.

The factor with most effects is the local one. Coefficients and the effects of all other factors
form one shared vector b, in which a row has D dense entries and a few more, one for each effect it
has in each of these factors. Products with the latter are sums over entries; the columns themselves
are never formed.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from scipy.sparse import block_diag, csr_array
from scipy.sparse.linalg import LinearOperator

from .._engine.gaussian import forward, row_blocks, weighted_gram, with_data
from ._group_sites import LARGEST_GROUP

# Doubles of a temporary: a tenth takes 1.06 to 1.10 of the time of a fit, a hundred times as many
# .96 to 1.02 (two factors, 3000 and 20,000 rows), and that much memory.
_CACHED = 100_000
_HELD = 4_000_000  # doubles of a block of groups times shared effects
_SPARSE = 0.1  # share of pairs that occur below which sparse products pay


class RowsToPredict(NamedTuple):
    """Rows: dense columns X (n, D), designs (n, q_f) and codes (n, F) of the factors.

    A code is the position among the named levels, anything else means a level that is not known.
    """

    X: np.ndarray
    designs: list[np.ndarray]
    codes: np.ndarray

    def take(self, rows):
        """Return some of the rows."""
        return RowsToPredict(self.X[rows], [w[rows] for w in self.designs], self.codes[rows])

    def known(self, n_named):
        """Return whether (n, F) a row's level is among the first `n_named` of each factor."""
        return (self.codes >= 0) & (self.codes < np.array(n_named, dtype=int))

    def unseen(self, n_named, scales):
        """Return for each factor the designs (n, q) of whitened effects of levels not known."""
        triples = zip(self.known(n_named).T, self.designs, scales, strict=True)
        return [np.where(known[:, None], 0.0, w @ lower) for known, w, lower in triples]


def effect_columns(n_rows, designs, codes, n_levels, but=None):
    """Return the columns (n, width) of effects of factors as a sparse matrix.

    designs (n, q_f), codes (n,) and n_levels are of each factor; that with the number `but` is left
    out. Columns are numbered factor by factor, level by level; a code outside 0 .. n_levels - 1 has
    entries of zero, which are stored: each row has as many.
    """
    columns, entries, start = [np.zeros((n_rows, 0), dtype=int)], [np.zeros((n_rows, 0))], 0
    for f, (design, code, n) in enumerate(zip(designs, codes, n_levels, strict=True)):
        if f == but:
            continue
        q = design.shape[1]
        known = (code >= 0) & (code < n)
        columns.append(start + np.where(known, code, 0)[:, None] * q + np.arange(q))
        entries.append(np.where(known[:, None], design, 0.0))
        start += q * n
    at = np.hstack(columns)
    return even_rows(np.hstack(entries), at, start)


def even_rows(entries, at, width):
    """Return the sparse matrix (n, width) with entries (n, E) in columns `at` (n, E)."""
    ends = np.arange(len(at) + 1, dtype=np.int32) * at.shape[1]
    return csr_array((entries.ravel(), at.ravel().astype(np.int32), ends), shape=(len(at), width))


def sums_by_group(starts, entries):
    """Return the matrix (q J, n) of sums over the rows of each group, by entries (q, n) of rows.

    Rows are sorted by group, of which each begins at starts (J,); the lines of all groups come for
    one of the q after the other.
    """
    (q, n), j = entries.shape, len(starts)
    ends = np.append(np.add.outer(n * np.arange(q), starts), n * q)
    return csr_array((entries.ravel(), np.tile(np.arange(n), q), ends), shape=(q * j, n))


def row_mismatch(old, new, mean, var):
    """Return the largest distance of tilted from current moments of a row, in its sd."""
    step = new.precision - old.precision
    left = 1.0 + step * var
    if not np.all(left > 0):
        return np.inf  # a tilted variance beyond double precision: nothing has settled
    shifted = np.sqrt(var) * (new.shift - old.shift - step * mean) / left
    worst = np.maximum(np.abs(shifted), np.abs(1.0 / left - 1.0))
    return float(np.max(worst, initial=0.0))


def group_factors(weight, design, starts):
    """Return Cholesky factors (..., J, q, q) of I + sum over rows of each group of weight c c'.

    weight (..., n) and the lines c of design (..., n, q) are of rows sorted by group, of which each
    begins at starts (J,).
    """
    q = design.shape[-1]
    block = np.empty((*weight.shape[:-1], len(starts), q, q))
    for a, b in product(range(q), repeat=2):
        terms = weight * design[..., a] * design[..., b]
        block[..., a, b] = np.add.reduceat(terms, starts, axis=-1) + (a == b)
    return np.sqrt(block) if q == 1 else np.linalg.cholesky(block)


def block_diagonal(blocks):
    """Return the sparse matrix with blocks (G, k, l) on its diagonal."""
    g, k, width = blocks.shape
    at = np.arange(g * width).reshape(g, width)
    return even_rows(blocks.reshape(g * k, width), np.repeat(at, k, axis=0), g * width)


def precisions(of_rows, of_groups):
    """Return the precisions of all sites, of rows (n,) and of groups (G, k, k), for a gram."""
    if not of_groups:
        return of_rows
    blocks = of_rows[:, None, None], *of_groups
    return block_diag(list(map(block_diagonal, blocks)), format="csr")


class SharedRows(LinearOperator):
    """Rows (n, D + width) by the columns of b: dense X (n, D), and beyond them a sparse matrix.

    Rows of data have the same number of entries beyond X; lines that are sums of rows have any.
    """

    def __init__(self, X, beyond):
        if isinstance(beyond, tuple):
            beyond = csr_array(beyond[:3], shape=beyond[3])
        super().__init__(np.float64, (len(X), X.shape[1] + beyond.shape[1]))
        self.X, self.beyond = X, beyond

    def __reduce__(self):
        own = self.beyond
        # arrays: sparse matrices of scipy are none of the types that skops trusts
        return type(self), (self.X, (own.data, own.indices, own.indptr, own.shape))

    @property
    def at(self):
        """Columns (n, E) beyond X of the entries of rows of data."""
        n = len(self.X)
        return self.beyond.indices.reshape(n, self.beyond.nnz // max(n, 1))

    def take(self, rows):
        """Return some of the rows."""
        if isinstance(rows, slice) and len(range(len(self.X))[rows]) == len(self.X):
            return self  # a copy of the sparse part would be a tenth of a pass over small data
        return SharedRows(self.X[rows], self.beyond[rows])

    def weighed(self, left):
        """Return the lines left Z for a sparse matrix (m, n)."""
        none = self.beyond.shape[1] == 0  # whose product would cost as much as any
        beyond = csr_array((left.shape[0], 0)) if none else left @ self.beyond
        return SharedRows(left @ self.X, beyond)

    def full(self):
        """Return the rows as a matrix."""
        return np.hstack([self.X, self.beyond.toarray()])

    def _matmat(self, b):
        d = self.X.shape[1]
        out = self.X @ b[:d]
        return out + self.beyond @ b[d:] if len(b) > d else out

    def _rmatmat(self, pull):
        out = self.X.T @ pull
        return np.concatenate([out, self.beyond.T @ pull]) if self.beyond.shape[1] else out

    _rmatvec = _rmatmat  # scipy finds the one by the other from 1.16 on only

    def weighted_gram(self, weight=None):
        """Return Z' weight Z for weights (n,), a sparse symmetric (n, n), or None for ones."""
        (X, beyond), d = (self.X, self.beyond), self.X.shape[1]
        out = np.empty((self.shape[1], self.shape[1]))
        weight = np.ones(len(X)) if weight is None else weight
        heavy = weight @ X if weight.ndim > 1 else weight[:, None] * X
        out[:d, :d] = X.T @ heavy
        if len(out) > d:
            if beyond.nnz > _SPARSE * np.prod(beyond.shape):
                beyond = beyond.toarray()
            out[d:, :d] = beyond.T @ heavy
            out[:d, d:] = out[d:, :d].T
            out[d:, d:] = _gram(beyond, weight)
        return 0.5 * (out + out.T)

    def quadratic(self, matrix):
        """Return z' matrix z (n,) of each row of data for any matrix."""
        return self.variances(0.5 * (matrix + matrix.T))

    def variances(self, cov):
        """Return z' cov z of each row of data."""
        out = np.empty(len(self.X))
        for rows in row_blocks(len(self.X), self.X.shape[1], _CACHED):
            out[rows] = self.take(rows).block_covariances(cov, 1)[:, 0, 0]
        return out

    def block_covariances(self, cov, size):
        """Return z' cov z (G, size, size) between the rows of consecutive blocks of data."""
        (n, d), columns = self.X.shape, self.X.shape[1] + self.at
        e, value = columns.shape[1], self.beyond.data.reshape(columns.shape)
        turned = self.X @ cov[:d, :d]
        for a in range(e):  # twice, since the product is made symmetric
            turned += 2.0 * value[:, a, None] * cov[columns[:, a], :d]
        X, turned = (a.reshape(n // size, size, d) for a in (self.X, turned))
        out = np.einsum("gkd,gld->gkl", turned, X) if size == 1 else turned @ X.swapaxes(1, 2)
        columns, value = (a.reshape(n // size, size, e) for a in (columns, value))
        for a, b in product(range(e), repeat=2):
            pairs = cov[columns[:, :, None, a], columns[:, None, :, b]]
            out += pairs * value[:, :, None, a] * value[:, None, :, b]
        return 0.5 * (out + out.swapaxes(1, 2))


def in_scales(rows, lowers):
    """Return `SharedRows` of effects in units of their scales, by a Cholesky factor a factor."""
    if not lowers:
        return rows
    turn = scipy.linalg.block_diag(*lowers)
    turned = rows.beyond.data.reshape(-1, len(turn)) @ turn
    return SharedRows(rows.X, with_data(rows.beyond, turned.ravel()))


class EffectPlaces(NamedTuple):
    """Which numbers in the nodes belong to which effects.

    beta_precision (D,) is the prior precision of the coefficients; n_effects, n_levels and n_named
    are of each factor; local is the number of the local one, None without groups; order (J,) is
    where each of its groups is in a `LocalPart`.
    """

    beta_precision: np.ndarray
    n_effects: list[int]
    n_levels: list[int]
    n_named: list[int]
    local: Any
    order: np.ndarray

    @property
    def n_dense(self):
        """Number of coefficients."""
        return len(self.beta_precision)

    def shared_spans(self):
        """Return {factor: its slice of b} of the shared factors."""
        spans, start = {}, self.n_dense
        for f, (q, n) in enumerate(zip(self.n_effects, self.n_levels, strict=True)):
            if f != self.local:
                spans[f] = slice(start, start + q * n)
                start += q * n
        return spans

    def shared(self, values):
        """Return those values, one of each factor, that are of shared factors."""
        return [value for f, value in enumerate(values) if f != self.local]

    @property
    def prior(self):
        """Prior precision (S,) of b, whose effects are in units of their scales."""
        sizes = np.multiply(self.n_effects, self.n_levels).tolist()
        return np.r_[self.beta_precision, np.ones(sum(self.shared(sizes)))]

    def seen(self, rows, scales):
        """Return the `SharedRows` of `RowsToPredict`, and the place of the local group or -1.

        scales are the Cholesky factors of the covariances of all effects.
        """
        known = rows.known(self.n_named)
        of = rows.designs, np.where(known, rows.codes, -1).T, self.n_levels
        beyond = effect_columns(len(rows.X), *of, self.local)
        place = np.full(len(rows.X), -1)
        if self.local is not None:
            at = known[:, self.local]
            place[at] = self.order[rows.codes[at, self.local]]
        return in_scales(SharedRows(rows.X, beyond), self.shared(scales)), place


class LocalPart(NamedTuple):
    """Local effects given b: u_j ~ N(offset - gain b, (lower lower')^-1), groups as laid out.

    lower (J, q, q), offset (J, q); gain are `SharedRows`, q lines a group, or an array.
    """

    lower: np.ndarray
    offset: np.ndarray
    gain: Any

    @classmethod
    def of_columns(cls, lower, offset, gain):
        """Return the part whose gains (J, q, D) are of dense columns alone."""
        lines = gain.reshape(-1, gain.shape[2])
        return cls(lower, offset, SharedRows(lines, effect_columns(len(lines), [], [], [])))

    def take(self, groups):
        """Return some of the groups, by their numbers."""
        lines = groups[:, None] * self.offset.shape[1] + np.arange(self.offset.shape[1])
        return LocalPart(self.lower[groups], self.offset[groups], self.gain.take(lines.ravel()))

    def given(self, b):
        """Return the means (..., J, q) of the effects given b (..., S)."""
        return self.offset - (self.gain @ b.T).T.reshape(*b.shape[:-1], *self.offset.shape)

    def row_moments(self, rows, group, c, mean, cov):
        """Return means and variances (n,) of rows with effects, and `of_groups`.

        rows are `SharedRows` sorted by their groups (n,), c (n, q) the designs of the effects; mean
        and cov are those of b.
        """
        across, within = self.along(cov, rows, group)
        own = forward(self.lower[group], c[..., None])[..., 0]
        var = rows.variances(cov) + np.einsum("na,na->n", own, own)
        var += np.einsum("na,nab,nb->n", c, within[group], c)
        var -= 2.0 * np.einsum("na,na->n", c, across)
        return rows @ mean + np.einsum("na,na->n", c, self.given(mean)[group]), var, within

    def along(self, cov, rows, group):
        """Return (gain cov z (n, q) of each row z with its group, gain cov gain' (J, q, q)).

        rows are `SharedRows` sorted by their groups (n,).
        """
        (j, q), s = self.offset.shape, len(cov)
        across, within = np.empty((len(group), q)), np.empty((j, q, q))
        for some, lines, held in self._products(cov):
            within[some] = held @ lines.full().reshape(-1, q, s).swapaxes(1, 2)
            own = slice(*np.searchsorted(group, [some.start, some.stop]))
            across[own] = _dots(held, rows.take(own), group[own] - some.start)
        return across, within

    def explained(self, root):
        """Return gain cov gain' (J, q, q) for the covariance root' root of b."""
        j, q = self.offset.shape
        out = np.empty((j, q, q))
        for some, _, held in self._products(root.T):
            out[some] = held @ held.swapaxes(1, 2)
        return out

    def _products(self, matrix):
        """Yield (groups, lines of their gains, these times a matrix (S, S)) in blocks of groups."""
        (j, q), s = self.offset.shape, len(matrix)
        for some in row_blocks(j, s * q, _HELD):
            lines = self.gain.take(slice(some.start * q, some.stop * q))
            yield some, lines, (lines @ matrix).reshape(-1, q, s)

    def second_moment(self, mean, within):
        """Return the sum over groups of E uu' - I, given the mean of b and gain cov gain'."""
        effect, inverse = self.given(mean), forward(self.lower, np.eye(self.lower.shape[1]))
        inner = np.einsum("jab,jac->bc", inverse, inverse)
        return effect.T @ effect + inner + within.sum(0) - len(effect) * np.eye(len(inner))


def _gram(columns, weight):
    """Return the dense columns' weight columns, for weights as in `weighted_gram`, not None."""
    if weight.ndim == 1:
        return weighted_gram(columns, weight)
    within = columns.T @ (weight @ columns)
    return within if isinstance(within, np.ndarray) else within.toarray()


def _dots(held, rows, group):
    """Return the products (n, q) of each row of data with its group's lines of held (., q, S)."""
    (n, d), at = rows.X.shape, rows.at
    out, value = np.empty((n, held.shape[1])), rows.beyond.data.reshape(at.shape)
    for some in row_blocks(n, d * held.shape[1], _CACHED):
        out[some] = np.einsum("nqd,nd->nq", held[group[some], :, :d], rows.X[some])
    for e in range(at.shape[1]):
        out += held[group, :, d + at[:, e]] * value[:, e, None]
    return out


class SmallGroups(NamedTuple):
    """Groups of k rows each that have a site of their own: which rows, k, and the rows."""

    rows: slice
    size: int
    shared: Any


class Layout(NamedTuple):
    """Rows sorted by local group; groups with sites of rows first, then small ones by size.

    Attributes
    ----------
    rows : SharedRows
    sign, weight : ndarray of shape (n,)
        Labels in {-1, +1}, tied copies (1 in small groups).
    local : ndarray of shape (n, q)
        Design of the local effects.
    ends : ndarray of shape (J_r + 1,)
        Where groups with sites of rows begin and end: group j has rows ends[j] to ends[j + 1].
    group : ndarray of shape (n,)
        Number of the local group of each row.
    order : ndarray of shape (J,)
        Number of each group here, by its code.
    small : list of SmallGroups
    plain : SharedRows
        Those that have a site of their own.
    """

    rows: SharedRows
    sign: np.ndarray
    weight: np.ndarray
    local: np.ndarray
    ends: np.ndarray
    group: np.ndarray
    order: np.ndarray
    small: list[SmallGroups]
    plain: SharedRows

    def scaled(self, lowers):
        """Return the layout of shared effects in units of their scales, as `in_scales` has it."""
        small = [own._replace(shared=in_scales(own.shared, lowers)) for own in self.small]
        rows, plain = in_scales(self.rows, lowers), in_scales(self.plain, lowers)
        return self._replace(rows=rows, plain=plain, small=small)

    @property
    def n_plain(self):
        """Rows that have a site of their own, the first ones."""
        return int(self.ends[-1])


def lay_out(X, sign, weight, designs, codes, n_levels, local, largest=LARGEST_GROUP):
    """Return the `Layout` of rows.

    X (n, D) are the dense columns; designs, codes and n_levels are of all factors, each design (n,
    q_f) and code (n,); local is the number of the local factor; groups of at most `largest` rows
    have a site of their own.
    """
    code, beyond = codes[local], effect_columns(len(X), designs, codes, n_levels, local)
    shared, own = SharedRows(X, beyond), (designs[local], code, n_levels[local])
    order, size, rows = _row_order(shared, sign, weight, *own, largest)
    group = order[code[rows]]
    bounds = np.r_[np.flatnonzero(np.r_[True, np.diff(group) > 0]), len(rows)]
    shared = shared.take(rows)
    small, n_plain = _small_groups(size, bounds, shared), np.count_nonzero(size == 0)
    copies = weight[rows]
    copies[bounds[n_plain] :] = 1.0
    of_rows = shared, sign[rows], copies, designs[local][rows]
    plain = shared.take(slice(0, bounds[n_plain]))
    return Layout(*of_rows, bounds[: n_plain + 1], group, order, small, plain)


def _row_order(shared, sign, weight, design, code, n_groups, largest):
    """Return (place of each group, its rows, rows in order with copies in small groups repeated).

    Sizes are those of small groups and zero elsewhere. Rows of a small group are sorted by what is
    in them: the filter takes them in by that order, which moves coefficients by .01 to .1 sd.
    """
    copies = np.bincount(code, weights=weight, minlength=n_groups)
    whole = np.bincount(code, weights=weight != np.round(weight), minlength=n_groups) == 0
    intercepts = design.shape[1] == 1 and np.all(design == 1.0)
    is_small = whole & (copies <= largest) & intercepts
    size = np.where(is_small, np.round(copies), 0).astype(int)
    order = np.empty(n_groups, dtype=int)
    order[np.argsort(size, kind="stable")] = np.arange(n_groups)
    repeats = np.where(is_small[code], np.round(weight), 1).astype(int)
    rows = np.repeat(np.arange(len(code)), repeats)
    small, content = np.flatnonzero(is_small[code[rows]]), np.zeros(len(rows))
    if len(small):
        own = rows[small]
        content[small] = _content(shared.take(own), sign[own], code[own])
    return order, size, rows[np.lexsort((content, order[code[rows]]))]


def _content(shared, sign, code):
    """Return numbers (n,) of rows with labels, by their columns and levels: a random order.

    Of a level only the largest number of its rows counts, so that names of levels change nothing.
    Numbers are smooth functions of the columns: rounding errors move no row past another that
    differs from it. They turn often, since an order by label or column would have errors of one
    sign. Copies would be sorted by their labels alone, so that each has a number of its own.
    """
    own = np.random.default_rng(0).standard_normal(shared.X.shape[1] + 3)
    number = (shared.X * own[2:-1]).sum(axis=1) + own[0] * sign
    of_level = np.full(np.max(shared.at, initial=0) + 1, -np.inf)
    np.maximum.at(of_level, shared.at, number[:, None])
    number += own[1] * of_level[shared.at].sum(axis=1)
    return np.sin(100.0 * (number + own[-1] * _copies_before(number, code)))


def _copies_before(number, code):
    """Return how many rows (n,) of the same group and number come before each."""
    order = np.lexsort((number, code))
    pairs = np.column_stack([code, number])[order]
    first = np.r_[True, np.any(pairs[1:] != pairs[:-1], axis=1)]
    place = np.arange(len(order))
    out = np.empty(len(order), dtype=int)
    out[order] = place - np.maximum.accumulate(np.where(first, place, 0))
    return out


def _small_groups(size, bounds, shared):
    """Return the `SmallGroups`, one for each size that occurs; shared are all rows in order."""
    by_place, found = np.sort(size), []  # groups are in the order of their sizes
    for k in np.unique(by_place[by_place > 0]):
        own = slice(*bounds[np.searchsorted(by_place, [k, k + 1])])
        found.append(SmallGroups(own, int(k), shared.take(own)))
    return found
