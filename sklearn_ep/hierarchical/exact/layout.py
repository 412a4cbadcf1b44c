"""Where rows and effects lie: one local factor, eliminated group by group, and what all rows share.

The factor with most effects is the local one. Coefficients and the effects of all other factors
form one shared vector b, in which a row has D dense entries and a few more, one for each effect it
has in each of these factors. Products with the latter are sums over entries; the columns themselves
are never formed.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from ..._engine.row_order import row_keys, spread_bits
from .group_sites import LARGEST_GROUP

_CACHED = 100_000  # doubles of a temporary
_HELD = 4_000_000  # doubles of a block of groups times shared effects
_SPARSE = 0.1  # share of pairs that occur below which sparse products pay


def shared_entries(n_rows, designs, codes, n_levels):
    """Return (columns (n, E), entries (n, E)) of rows in the effects of shared factors.

    designs (n, q_f), codes (n,) and n_levels are of each factor. Columns are numbered factor by
    factor, level by level; a code outside 0 .. n_levels - 1 has entries of zero.
    """
    columns, entries, start = [np.zeros((n_rows, 0), dtype=int)], [np.zeros((n_rows, 0))], 0
    for design, code, n in zip(designs, codes, n_levels, strict=True):
        q = design.shape[1]
        known = (code >= 0) & (code < n)
        columns.append(start + np.where(known, code, 0)[:, None] * q + np.arange(q))
        entries.append(np.where(known[:, None], design, 0.0))
        start += q * n
    return np.hstack(columns), np.hstack(entries)


def _blocks(n_rows, width):
    """Yield slices of rows whose temporaries stay in the cache."""
    step = max(1, _CACHED // max(width, 1))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)


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


class SharedRows(NamedTuple):
    """Rows by the columns of b: X (n, D), and entries value (n, E) in columns D + at (n, E)."""

    X: np.ndarray
    at: np.ndarray
    value: np.ndarray

    def take(self, rows):
        """Return some of the rows."""
        return SharedRows(*(a[rows] for a in self))

    def dot(self, b):
        """Return z' b of each row."""
        d = self.X.shape[1]
        out = self.X @ b[:d]
        for e in range(self.at.shape[1]):
            out += self.value[:, e] * b[d + self.at[:, e]]
        return out

    def full(self, size):
        """Return the rows as a matrix (n, size)."""
        out, d = np.zeros((len(self.X), size)), self.X.shape[1]
        out[:, :d] = self.X
        for e in range(self.at.shape[1]):
            out[np.arange(len(out)), d + self.at[:, e]] += self.value[:, e]
        return out

    def variances(self, cov):
        """Return z' cov z of each row."""
        out = np.empty(len(self.X))
        for rows in _blocks(*self.X.shape):
            out[rows] = self.take(rows).block_covariances(cov, 1)[:, 0, 0]
        return out

    def block_covariances(self, cov, size):
        """Return z' cov z (G, size, size) between the rows of consecutive blocks of rows."""
        (n, d), e = self.X.shape, self.at.shape[1]
        turned, columns, value = self.X @ cov[:d, :d], d + self.at, self.value
        for a in range(e):  # twice, since the product is made symmetric
            turned += 2.0 * value[:, a, None] * cov[columns[:, a], :d]
        X, turned = (a.reshape(n // size, size, d) for a in (self.X, turned))
        out = np.einsum("gkd,gld->gkl", turned, X) if size == 1 else turned @ X.swapaxes(1, 2)
        columns, value = (a.reshape(n // size, size, e) for a in (columns, value))
        for a, b in product(range(e), repeat=2):
            pairs = cov[columns[:, :, None, a], columns[:, None, :, b]]
            out += pairs * value[:, :, None, a] * value[:, None, :, b]
        return 0.5 * (out + out.swapaxes(1, 2))


class SharedPrior(NamedTuple):
    """Prior N(0, B0^-1) of b by the entries `value` of B0 in rows `row` and columns `column`.

    log_det is log|B0|.
    """

    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    log_det: float

    def add_to(self, precision):
        """Add B0 to a matrix, in place."""
        precision[self.row, self.column] += self.value

    def quadratic(self, b):
        """Return b' B0 b for b (m, S)."""
        return (b[:, self.row] * b[:, self.column]) @ self.value


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

    def prior_at(self, lower):
        """Return the `SharedPrior` for the Cholesky factors of all effects' covariances."""
        dense = np.arange(self.n_dense)
        row, column, value = [dense], [dense], [self.beta_precision]
        log_det = np.sum(np.log(self.beta_precision))
        for f, span in self.shared_spans().items():
            at, q = np.arange(span.start, span.stop), self.n_effects[f]
            row.append(np.repeat(at, q))
            column.append(np.repeat(at.reshape(-1, q), q, axis=0).ravel())
            value.append(np.tile(np.linalg.inv(lower[f] @ lower[f].T).ravel(), self.n_levels[f]))
            log_det -= 2.0 * self.n_levels[f] * np.sum(np.log(np.diagonal(lower[f])))
        entries = [np.concatenate(own) for own in (row, column, value)]
        return SharedPrior(entries[0], entries[1], entries[2], float(log_det))

    def seen(self, rows):
        """Return (`SharedRows`, place of the local group or -1, known (n, F)) of rows."""
        codes = rows.codes
        known = (codes >= 0) & (codes < self.n_named)
        shared = [f for f in range(codes.shape[1]) if f != self.local]
        of = [rows.designs[f] for f in shared], [np.where(known, codes, -1)[:, f] for f in shared]
        entries = shared_entries(len(rows.X), *of, [self.n_levels[f] for f in shared])
        place = np.full(len(rows.X), -1)
        if self.local is not None:
            at = known[:, self.local]
            place[at] = self.order[codes[at, self.local]]
        return SharedRows(rows.X, *entries), place, known


class GroupColumns(NamedTuple):
    """Combinations of shared columns, q for each of J groups.

    dense (J, q, D) are their entries in the dense columns; beyond, group pair_group[p] has entries
    values (q, n_pairs) in column pair_column[p] of `width`. Pairs are sorted by group.
    """

    dense: np.ndarray
    values: np.ndarray
    pair_group: np.ndarray
    pair_column: np.ndarray
    width: int

    @classmethod
    def without_pairs(cls, dense):
        """Return combinations (J, q, D) of dense columns alone."""
        return cls(dense, np.zeros((dense.shape[1], 0)), np.zeros(0, int), np.zeros(0, int), 0)

    def beyond(self, a):
        """Return the entries beyond the dense columns as a matrix (J, width)."""
        j = len(self.dense)
        indptr = np.searchsorted(self.pair_group, np.arange(j + 1))
        matrix = csr_array((self.values[a], self.pair_column, indptr), shape=(j, self.width))
        return matrix if len(self.pair_group) < _SPARSE * j * self.width else matrix.toarray()

    def full(self, a):
        """Return the entries as a matrix (J, D + width)."""
        beyond = self.beyond(a)
        beyond = beyond if isinstance(beyond, np.ndarray) else beyond.toarray()
        return np.hstack([self.dense[:, a], beyond])

    def take(self, groups):
        """Return some of the groups, by an increasing array of their numbers."""
        place = np.full(len(self.dense), -1)
        place[groups] = np.arange(len(groups))
        kept = place[self.pair_group] >= 0
        pair_group = place[self.pair_group[kept]]
        columns = self.pair_column[kept]
        return GroupColumns(
            self.dense[groups], self.values[:, kept], pair_group, columns, self.width
        )

    def dot(self, b):
        """Return the combinations of b, (J, q) for b (S,), (m, J, q) for b (m, S)."""
        d = self.dense.shape[2]
        out = np.einsum("jqd,...d->...jq", self.dense, b[..., :d])
        if self.width and len(self.dense):
            for a in range(self.dense.shape[1]):
                out[..., a] += (self.beyond(a) @ b[..., d:].T).T
        return out

    def turned(self, lower, solve):
        """Return the combinations after `solve`, `forward` or `backward`, with lower (J, q, q)."""
        values = solve(lower[self.pair_group], self.values.T[..., None])[..., 0].T
        return self._replace(dense=solve(lower, self.dense), values=values)

    def against(self, cov, rows, ends):
        """Return (h cov z (n, q) of each row with its group, h cov h' (J, q, q)).

        rows are `SharedRows` sorted by group, those of group j from ends[j] to ends[j + 1].
        """
        j, q, d = self.dense.shape
        across, within = np.empty((len(rows.X), q)), np.empty((j, q, q))
        size = max(1, _HELD // (cov.shape[0] * q))
        beyond = [self.beyond(a) for a in range(q)] if self.width and j else []
        for first in range(0, j, size):
            some = slice(first, min(first + size, j))
            for a in range(q):
                held = self.dense[some, a] @ cov[:d]
                if beyond:
                    held += beyond[a][some] @ cov[d:]
                self._within(held, some, within[some, a])
                own = slice(ends[first], ends[some.stop])
                counts = np.diff(ends[first : some.stop + 1])
                group = np.repeat(np.arange(len(counts)), counts)
                across[own, a] = _dots(held, rows.take(own), group)
        return across, within

    def _within(self, held, some, out):
        """Store the products (., q) of held (., S) with the combinations of the same groups."""
        d = self.dense.shape[2]
        out[:] = np.einsum("jd,jbd->jb", held[:, :d], self.dense[some])
        first, last = np.searchsorted(self.pair_group, [some.start, some.stop])
        group, column = self.pair_group[first:last] - some.start, self.pair_column[first:last]
        taken = held[group, d + column]
        for b in range(out.shape[1]):
            terms = taken * self.values[b, first:last]
            out[:, b] += np.bincount(group, terms, minlength=len(held))


def _dots(held, rows, group):
    """Return the product of each row with its group's line of held (., S)."""
    d = rows.X.shape[1]
    out, dense = np.empty(len(rows.X)), held[:, :d]
    for some in _blocks(*rows.X.shape):
        out[some] = np.einsum("nd,nd->n", dense[group[some]], rows.X[some])
    for e in range(rows.at.shape[1]):
        out += held[group, d + rows.at[:, e]] * rows.value[:, e]
    return out


class LocalPart(NamedTuple):
    """Local effects given b: u_j ~ N(offset - gain b, (lower lower')^-1), groups as laid out.

    lower (J, q, q), offset (J, q), gain a `GroupColumns`, or an array.
    """

    lower: np.ndarray
    offset: np.ndarray
    gain: Any


class SmallGroups(NamedTuple):
    """Groups of k rows each that have a site of their own: which rows, and which groups."""

    rows: slice
    groups: slice
    size: int


class Layout(NamedTuple):
    """Rows sorted by local group; groups with sites of rows first, then small ones by size.

    Attributes
    ----------
    rows : SharedRows
    sign, weight : ndarray of shape (n,)
        Labels in {-1, +1}, tied copies (1 in small groups).
    width : int
        Number of effects among the shared ones.
    local : ndarray of shape (n, q)
        Design of the local effects.
    ends : ndarray of shape (J_r + 1,)
        Where groups with sites of rows begin and end: group j has rows ends[j] to ends[j + 1].
    group : ndarray of shape (n,)
        Number of the local group of each row.
    order : ndarray of shape (J,)
        Number of each group here, by its code.
    small : list of SmallGroups
    pair : ndarray of shape (n, E)
        Number of (group, column) among those that occur, sorted by group.
    pair_group, pair_column : ndarray of shape (n_pairs,)
    transposed : csr_array of shape (width, n)
        The entries beyond X by column.
    products : ndarray
        Places in a (width, width) matrix of the products of entries: those of each row with itself,
        then those of rows within each small group.
    product_value : ndarray
        Their values.
    """

    rows: SharedRows
    sign: np.ndarray
    weight: np.ndarray
    width: int
    local: np.ndarray
    ends: np.ndarray
    group: np.ndarray
    order: np.ndarray
    small: list[SmallGroups]
    pair: np.ndarray
    pair_group: np.ndarray
    pair_column: np.ndarray
    transposed: csr_array
    products: np.ndarray
    product_value: np.ndarray

    @property
    def n_plain(self):
        """Rows that have a site of their own, the first ones."""
        return int(self.ends[-1])

    @property
    def n_plain_groups(self):
        """Groups whose rows have sites of their own, the first ones."""
        return len(self.ends) - 1

    @property
    def n_plain_pairs(self):
        """Pairs of these groups, the first ones."""
        return int(np.searchsorted(self.pair_group, self.n_plain_groups))


def lay_out(X, sign, weight, designs, codes, n_levels, local, largest=LARGEST_GROUP):
    """Return the `Layout` of rows.

    X (n, D) are the dense columns; designs, codes and n_levels are of all factors, each design (n,
    q_f) and code (n,); local is the number of the local factor; groups of at most `largest` rows
    have a site of their own.
    """
    code, others = codes[local], [f for f in range(len(designs)) if f != local]
    of_others = ([a[f] for f in others] for a in (designs, codes, n_levels))
    width = sum(designs[f].shape[1] * n_levels[f] for f in others)
    shared = SharedRows(X, *shared_entries(len(X), *of_others))
    own = designs[local], code, n_levels[local]
    order, size, rows = _row_order(shared, sign, weight, *own, largest)
    shared, sign, group = shared.take(rows), sign[rows], order[code[rows]]
    bounds = np.r_[np.flatnonzero(np.r_[True, np.diff(group) > 0]), len(rows)]
    small = _small_groups(size, order, bounds)
    n_plain = small[0].groups.start if small else len(bounds) - 1
    copies = weight[rows]
    copies[bounds[n_plain] :] = 1.0
    pairs, pair = np.unique(group[:, None] * max(width, 1) + shared.at, return_inverse=True)
    pair_group, pair_column = np.divmod(pairs, max(width, 1))
    n, e = shared.at.shape
    entries = shared.value.ravel(), (shared.at.ravel(), np.repeat(np.arange(n), e))
    products, product_value = _entry_products(shared, bounds[n_plain], small, width)
    of_rows = shared, sign, copies, width, designs[local][rows]
    groups = bounds[: n_plain + 1], group, order, small
    pairs_of = pair.reshape(n, e), pair_group, pair_column
    sums = csr_array(entries, shape=(width, n)), products, product_value
    return Layout(*of_rows, *groups, *pairs_of, *sums)


def _row_order(shared, sign, weight, design, code, n_groups, largest):
    """Return (place of each group, its rows, rows in order with copies in small groups repeated).

    Sizes are those of small groups and zero elsewhere. Rows of a small group are sorted by what is
    in them: the filter takes them in by that order, which moves the result by 0.003 sd.
    """
    copies = np.bincount(code, weights=weight, minlength=n_groups)
    whole = np.bincount(code, weights=weight != np.round(weight), minlength=n_groups) == 0
    intercepts = design.shape[1] == 1 and np.all(design == 1.0)
    is_small = whole & (copies <= largest) & intercepts
    size = np.where(is_small, np.round(copies), 0).astype(int)
    order = np.empty(n_groups, dtype=int)
    order[np.argsort(size, kind="stable")] = np.arange(n_groups)
    small = is_small[code]
    content = np.zeros(len(code), dtype=np.uint64)
    if small.any():
        content[small] = _content(shared.take(small), sign[small])
    rows = np.lexsort((content, order[code]))
    repeats = np.where(small, np.round(weight), 1).astype(int)[rows]
    return order, size, np.repeat(rows, repeats)


def _content(shared, sign):
    """Return keys (n,) of rows with labels: of their columns, and of which rows share a level.

    The number of a level is no part of it, so that names of levels change nothing.
    """
    keys = row_keys(shared.X, 0, sign > 0)
    of_level = np.zeros(np.max(shared.at, initial=0) + 1, dtype=np.uint64)
    np.maximum.at(of_level, shared.at, keys[:, None])
    return spread_bits(keys + spread_bits(of_level[shared.at]).sum(axis=1, dtype=np.uint64))


def _small_groups(size, order, bounds):
    """Return the `SmallGroups`, one for each size that occurs."""
    by_place = np.empty(len(size), dtype=int)
    by_place[order] = size
    found = []
    for k in np.unique(by_place[by_place > 0]):
        a, b = np.searchsorted(by_place, [k, k + 1])
        found.append(SmallGroups(slice(bounds[a], bounds[b]), slice(a, b), int(k)))
    return found


def _entry_products(shared, n_plain, small, width):
    """Return places and values of the products of entries; those of plain rows come first."""
    plain = shared.take(slice(0, n_plain))
    blocks = [(plain.at[:, None], plain.value[:, None])]
    for group in small:
        own = shared.take(group.rows)
        n, e = own.at.shape
        blocks.append(tuple(a.reshape(n // group.size, group.size, e) for a in (own.at, own.value)))
    places, values = [], []
    for columns, entries in blocks:
        first, second = columns[:, :, None, :, None], columns[:, None, :, None, :]
        places.append((first * width + second).ravel())
        values.append((entries[:, :, None, :, None] * entries[:, None, :, None, :]).ravel())
    return np.concatenate(places), np.concatenate(values)
