"""Where rows and effects lie: one local factor, eliminated group by group, and what all rows share.

The factor with most effects is the local one. Coefficients and the effects of all other factors
form one shared vector b, in which a row has D dense entries and a few more, one for each effect it
has in each of these factors.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from ..._engine.row_order import row_keys
from .columns import SharedRows, shared_entries
from .group_sites import LARGEST_GROUP

__all__ = ["Layout", "SmallGroups", "largest_group", "lay_out", "local_factor"]


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


def local_factor(n_effects, n_levels):
    """Return the number of the local factor: that with most effects, the first of equals."""
    return int(np.argmax(np.array(n_effects) * n_levels))


def largest_group(power):
    """Return the most rows of a group with a site of its own: none for powers of rows."""
    return LARGEST_GROUP if power == 1.0 else 0


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
    return Layout(
        shared,
        sign,
        copies,
        width,
        designs[local][rows],
        bounds[: n_plain + 1],
        group,
        order,
        small,
        pair.reshape(n, e),
        pair_group,
        pair_column,
        csr_array(entries, shape=(width, n)),
        products,
        product_value,
    )


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
        seen = np.column_stack([shared.X[small], shared.at[small]])
        content[small] = row_keys(seen, 0, sign[small] > 0)
    rows = np.lexsort((content, order[code]))
    repeats = np.where(small, np.round(weight), 1).astype(int)[rows]
    return order, size, np.repeat(rows, repeats)


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
