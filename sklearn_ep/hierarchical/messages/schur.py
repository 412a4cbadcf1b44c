"""Linear systems of many effects: conjugate gradients with the largest factor eliminated.

The posterior precision of (coefficients, effects) given Gaussian sites is Q = Z' T Z + B0 for rows
with D dense columns and one entry in each factor. The block of one factor is diagonal, so the
largest is eliminated exactly; a product with what is left costs a pass over the rows, and its own
block diagonal makes it nearly the identity. Iterations do not grow with the number of rows.

Rows are asked for sums alone, by functions of (`SystemRows`, state of the rows, values of levels):
they may be anywhere, in any number of parts.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.gaussian import checked_cholesky, cholesky_solve

__all__ = [
    "Effects",
    "FactorRows",
    "LastProduct",
    "SchurSystem",
    "SystemRows",
    "right_side",
]


class Effects(NamedTuple):
    """A vector over coefficients (D,) and the effects (L_f,) of each factor."""

    beta: np.ndarray
    levels: list[np.ndarray]

    def plus(self, other, scale=1.0):
        """Return self + scale other."""
        pairs = zip(self.levels, other.levels, strict=True)
        return Effects(self.beta + scale * other.beta, [a + scale * b for a, b in pairs])

    def times(self, other):
        """Return the products of entries."""
        pairs = zip(self.levels, other.levels, strict=True)
        return Effects(self.beta * other.beta, [a * b for a, b in pairs])

    def dot(self, other):
        """Return the inner product."""
        pairs = zip(self.levels, other.levels, strict=True)
        return float(self.beta @ other.beta + sum(a @ b for a, b in pairs))


class FactorRows(NamedTuple):
    """Rows with an intercept for a level of each factor.

    X (n, D), sign (n,) in {-1, +1}, weight (n,) tied copies; codes (n,) and n_levels are of each
    factor.
    """

    X: np.ndarray
    sign: np.ndarray
    weight: np.ndarray
    codes: list[np.ndarray]
    n_levels: list[int]

    def sums(self, f, values):
        """Return the sums (L_f,) of values (n,) over the levels of a factor."""
        return np.bincount(self.codes[f], values, minlength=self.n_levels[f])

    def predictor(self, effects):
        """Return z (n,) for `Effects`; a factor without values counts for nothing."""
        out = self.X @ effects.beta
        for code, level in zip(self.codes, effects.levels, strict=True):
            if level is not None:
                out += level[code]
        return out

    def collect(self, values, but=None):
        """Return Z' values as `Effects`, without those of one factor."""
        levels: list[Any] = [None] * len(self.codes)
        for f in range(len(self.codes)):
            if f != but:
                levels[f] = self.sums(f, values)
        return Effects(values @ self.X, levels)


class LastProduct:
    """The rows' values T Z x of the last x, which two questions in turn are about."""

    def __init__(self):
        self.beta = self.precision = self.values = None

    def __reduce__(self):
        return type(self), ()

    def of(self, rows, precision, x):
        """Return T Z x (n,), from memory if x and T are those of the last call."""
        if self.beta is not x.beta or self.precision is not precision:
            values = rows.predictor(x)
            values *= precision
            self.beta, self.precision, self.values = x.beta, precision, values
        return self.values


class SystemRows(NamedTuple):
    """`FactorRows` with the factor `big` that is eliminated, and its pairs with the others.

    pairs has for each factor the number (n,) of each row's pair of levels with those of `big`, and
    the distinct pairs; None where all pairs are of one row, so that a pair is a row.
    """

    rows: FactorRows
    big: int
    pairs: list[Any]
    last: LastProduct

    @classmethod
    def of(cls, rows, big):
        """Return the `SystemRows` of rows."""
        out: list[Any] = []
        for f, code in enumerate(rows.codes):
            if f == big:
                out.append(None)
                continue
            both = code * rows.n_levels[big] + rows.codes[big]
            pairs, number = np.unique(both, return_inverse=True)
            out.append(None if len(pairs) == len(code) else (number, pairs))
        return cls(rows, big, out, LastProduct())


class Diagonals(NamedTuple):
    """Sums over rows: of their precisions by level, X'TX, and T X by level of the big factor."""

    levels: list[np.ndarray]
    dense: np.ndarray
    cross: list[Any]


def diagonals(held, state):
    """Return the `Diagonals` of rows."""
    rows, precision = held.rows, state.precision
    levels = [rows.sums(f, precision) for f in range(len(rows.codes))]
    weighted = precision[:, None] * rows.X
    columns = [rows.sums(held.big, w) for w in weighted.T]
    cross: list[Any] = [None] * len(rows.codes)
    cross[held.big] = np.array(columns).reshape(len(columns), -1)
    return Diagonals(levels, weighted.T @ rows.X, cross)


def taken(held, state, eliminated):
    """Return what eliminating a factor takes from the diagonals of the others.

    eliminated has the diagonal of the big factor, None for others. A pair of levels whose rows are
    in several parts counts as several: the preconditioner is then nearly the diagonal.
    """
    rows, big, precision = held.rows, held.big, state.precision
    out: list[Any] = [None] * len(rows.codes)
    for f, pairs in enumerate(held.pairs):
        if f != big and pairs is None:
            out[f] = rows.sums(f, precision**2 / eliminated[big][rows.codes[big]])
        elif f != big:
            number, levels = pairs
            masses = np.bincount(number, precision, minlength=len(levels))
            code, other = np.divmod(levels, rows.n_levels[big])
            squares = masses**2 / eliminated[big][other]
            out[f] = np.bincount(code, squares, minlength=rows.n_levels[f])
    return out


def right_side(held, state):
    """Return Z' nu for the sites' shifts nu, an `Effects`."""
    return held.rows.collect(held.rows.weight * state.sites.shift)


def across(held, state, x):
    """Return the sums of T Z x over the levels of the big factor, None for others."""
    rows, big = held.rows, held.big
    out: list[Any] = [None] * len(rows.codes)
    out[big] = rows.sums(big, held.last.of(rows, state.precision, x))
    return out


def reduced_product(held, state, x, eliminated):
    """Return Z' T (Z x - what the big factor takes back), without its entries.

    eliminated has the values of the big factor, None for others.
    """
    rows, precision = held.rows, state.precision
    less = precision * eliminated[held.big][rows.codes[held.big]]
    return rows.collect(held.last.of(rows, precision, x) - less, but=held.big)


def big_product(held, state, values):
    """Return Z' T Z_big v, without entries of the big factor; values has its v, else None."""
    rows, big = held.rows, held.big
    return rows.collect(state.precision * values[big][rows.codes[big]], but=big)


def noise(held, state, rng):
    """Return a draw of N(0, Z' T Z) as `Effects`."""
    drawn = rng.standard_normal(len(state.precision))
    return held.rows.collect(np.sqrt(state.precision) * drawn)


class SchurSystem:
    """Solves Q x = r for Q = Z' diag(precision) Z + diag(prior).

    rows have `ask(function, *values)`, which sums over all of them, and are in the state of the
    system; big is the number of the largest factor; prior an `Effects` of precisions. converged
    says whether all solves met their tolerance.
    """

    def __init__(self, rows, big, prior):
        self.rows, self.big, self.prior = rows, big, prior
        self.others = [f for f in range(len(prior.levels)) if f != big]
        self.converged = True
        sums = rows.ask(diagonals)
        diagonal = [a + p for a, p in zip(sums.levels, prior.levels, strict=True)]
        self.eliminated, cross = diagonal[big], sums.cross[big]
        dense = sums.dense - (cross / self.eliminated) @ cross.T
        dense[np.diag_indices_from(dense)] += prior.beta
        self._lower = checked_cholesky(0.5 * (dense + dense.T))
        less = rows.ask(taken, self._of_big(self.eliminated)) if self.others else []
        self._diagonal = {f: diagonal[f] - less[f] for f in self.others}

    def at(self, rows):
        """Return the same system for the same rows in another place."""
        out = object.__new__(SchurSystem)
        out.__dict__.update(self.__dict__, rows=rows)
        return out

    def _of_big(self, values):
        return [values if f == self.big else None for f in range(len(self.prior.levels))]

    def _whole(self, x):
        """Return a vector without the eliminated factor, as `Effects` with None in its place."""
        levels: list[Any] = [None] * len(self.prior.levels)
        for k, f in enumerate(self.others):
            levels[f] = x.levels[k]
        return Effects(x.beta, levels)

    def _reduced(self, x):
        """Return `Effects` without the eliminated factor."""
        return Effects(x.beta, [x.levels[f] for f in self.others])

    def _precondition(self, r):
        levels = [r.levels[k] / self._diagonal[f] for k, f in enumerate(self.others)]
        return Effects(cholesky_solve(self._lower, r.beta), levels)

    def _across(self, x):
        return self.rows.ask(across, self._whole(x))[self.big]

    def _product(self, x):
        """Return the Schur complement times x."""
        sums = self._across(x) / self.eliminated
        found = self.rows.ask(reduced_product, self._whole(x), self._of_big(sums))
        return self._reduced(found).plus(self._reduced(self.prior).times(x))

    def solve(self, right, start=None, tol=1e-6, max_steps=200):
        """Return x with Q x = right, both `Effects`, to a share tol of the preconditioned norm."""
        first = right.levels[self.big] / self.eliminated
        less = self._reduced(self.rows.ask(big_product, self._of_big(first)))
        r = self._reduced(right).plus(less, -1.0)
        goal = tol * np.sqrt(r.dot(self._precondition(r)))
        x = Effects(np.zeros_like(r.beta), [np.zeros_like(a) for a in r.levels])
        if start is not None:
            x = self._reduced(start)
            r = r.plus(self._product(x), -1.0)
        preconditioned = self._precondition(r)
        direction, size = preconditioned, r.dot(preconditioned)
        steps = 0
        while np.sqrt(size) > goal and steps < max_steps:
            product = self._product(direction)
            step = size / direction.dot(product)
            x, r = x.plus(direction, step), r.plus(product, -step)
            preconditioned, last = self._precondition(r), size
            size = r.dot(preconditioned)
            direction = preconditioned.plus(direction, size / last)
            steps += 1
        self.converged &= bool(np.sqrt(size) <= goal)
        levels = self._whole(x).levels
        levels[self.big] = (right.levels[self.big] - self._across(x)) / self.eliminated
        return Effects(x.beta, levels)

    def draw(self, rng, tol=1e-6):
        """Return a draw of N(0, Q^-1): a perturbed right-hand side, and one solve."""
        right = self.rows.ask(noise, rng)
        prior = Effects(
            rng.standard_normal(len(self.prior.beta)) * np.sqrt(self.prior.beta),
            [rng.standard_normal(len(p)) * np.sqrt(p) for p in self.prior.levels],
        )
        return self.solve(right.plus(prior), tol=tol)
