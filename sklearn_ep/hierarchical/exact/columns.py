"""Rows and groups as they see the shared effects: dense columns, and a few entries beyond them.

The shared vector b has D dense columns and one column for each effect of each level of the shared
factors. A row has E entries in the latter, a group those of its rows. Products with these columns
are sums over entries; the columns themselves are never formed.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

__all__ = ["GroupColumns", "SharedRows", "shared_entries"]

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

    def turned(self, cov):
        """Return (X cov_DD, value cov_sD), each (n, D); of no entries the latter is 0."""
        d = self.X.shape[1]
        beyond: Any = np.zeros_like(self.X) if self.at.shape[1] else 0.0
        for e in range(self.at.shape[1]):
            beyond += self.value[:, e, None] * cov[d + self.at[:, e], :d]
        return self.X @ cov[:d, :d], beyond

    def variances(self, cov):
        """Return z' cov z of each row."""
        out = np.empty(len(self.X))
        for rows in _blocks(*self.X.shape):
            some = self.take(rows)
            turned, beyond = some.turned(cov)
            out[rows] = np.einsum("nd,nd->n", turned + 2.0 * beyond, some.X)
        if self.at.shape[1]:
            columns = self.X.shape[1] + self.at
            pairs = cov[columns[:, :, None], columns[:, None, :]]
            out += np.einsum("nef,ne,nf->n", pairs, self.value, self.value)
        return out

    def block_covariances(self, cov, size):
        """Return z' cov z (G, size, size) between the rows of consecutive blocks of rows."""
        (n, d), e = self.X.shape, self.at.shape[1]
        turned, beyond = self.turned(cov)
        X = self.X.reshape(-1, size, d)
        out = X @ turned.reshape(X.shape).swapaxes(1, 2)
        if not e:
            return 0.5 * (out + out.swapaxes(1, 2))
        cross = beyond.reshape(X.shape) @ X.swapaxes(1, 2)
        out += cross + cross.swapaxes(1, 2)
        columns, value = (a.reshape(n // size, size, e) for a in (d + self.at, self.value))
        pairs = cov[columns[:, :, None, :, None], columns[:, None, :, None, :]]
        out += np.einsum("gklef,gke,glf->gkl", pairs, value, value)
        return 0.5 * (out + out.swapaxes(1, 2))


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

    def beyond(self, a):
        """Return the entries beyond the dense columns as a matrix (J, width)."""
        j = len(self.dense)
        indptr = np.searchsorted(self.pair_group, np.arange(j + 1))
        matrix = csr_array((self.values[a], self.pair_column, indptr), shape=(j, self.width))
        return matrix if len(self.pair_group) < _SPARSE * j * self.width else matrix.toarray()

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

    def against(self, cov, rows=None, ends=None):
        """Return (h cov z (n, q) of each row with its group, h cov h' (J, q, q)).

        rows are `SharedRows` sorted by group, those of group j from ends[j] to ends[j + 1].
        """
        (j, q, d), n = self.dense.shape, 0 if rows is None else len(rows.X)
        across, within = np.empty((n, q)), np.empty((j, q, q))
        size = max(1, _HELD // (cov.shape[0] * q))
        beyond = [self.beyond(a) for a in range(q)] if self.width and j else []
        for first in range(0, j, size):
            some = slice(first, min(first + size, j))
            for a in range(q):
                held = self.dense[some, a] @ cov[:d]
                if beyond:
                    held += beyond[a][some] @ cov[d:]
                self._within(held, some, within[some, a])
                if rows is not None:
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
