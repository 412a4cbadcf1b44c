"""Linear systems of many effects: conjugate gradients with the largest factor eliminated.

The posterior precision of (coefficients, effects) given Gaussian sites is Q = Z' T Z + B0 for rows
with D dense columns and one entry in each factor. The block of one factor is diagonal, so the
largest is eliminated exactly; a product with what is left costs a pass over the rows, and its own
block diagonal makes it nearly the identity. Iterations do not grow with the number of rows.
"""

from typing import Any, NamedTuple

import numpy as np

from ..._engine.gaussian import checked_cholesky, cholesky_solve

__all__ = ["Effects", "FactorRows", "SchurSystem", "pair_numbers"]


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
        """Return z (n,) for `Effects`."""
        out = self.X @ effects.beta
        for code, level in zip(self.codes, effects.levels, strict=True):
            out += level[code]
        return out

    def collect(self, values):
        """Return Z' values as `Effects`."""
        return Effects(values @ self.X, [self.sums(f, values) for f in range(len(self.codes))])


def pair_numbers(rows, big):
    """Return for each factor the number (n,) of each row's pair of levels with those of `big`.

    None where all pairs are of one row, so that a pair is a row.
    """
    out: list[Any] = []
    for f, code in enumerate(rows.codes):
        if f == big:
            out.append(None)
            continue
        pairs, number = np.unique(code * rows.n_levels[big] + rows.codes[big], return_inverse=True)
        out.append(None if len(pairs) == len(code) else (number, pairs))
    return out


class SchurSystem:
    """Solves Q x = r for Q = Z' diag(precision) Z + diag(prior).

    rows are `FactorRows`, pairs what `pair_numbers` gave for the largest factor `big`; precision
    (n,) of the rows, copies counted; prior an `Effects` of precisions. converged says whether all
    solves met their tolerance.
    """

    def __init__(self, rows, big, pairs, precision, prior):
        self.rows, self.big, self.precision, self.prior = rows, big, precision, prior
        self.others = [f for f in range(len(rows.codes)) if f != big]
        self.converged = True
        diagonal = [rows.sums(f, precision) + p for f, p in enumerate(prior.levels)]
        self.eliminated = diagonal[big]
        weighted = precision[:, None] * rows.X
        columns = [rows.sums(big, w) for w in weighted.T]
        cross = np.array(columns).reshape(len(columns), -1)
        dense = weighted.T @ rows.X - (cross / self.eliminated) @ cross.T
        dense[np.diag_indices_from(dense)] += prior.beta
        self._lower = checked_cholesky(0.5 * (dense + dense.T))
        self._diagonal = {f: diagonal[f] - self._taken(f, pairs[f]) for f in self.others}

    def _taken(self, f, pairs):
        """Return what eliminating takes from the diagonal of a factor."""
        if pairs is None:
            squares = self.precision**2 / self.eliminated[self.rows.codes[self.big]]
            return self.rows.sums(f, squares)
        number, levels = pairs
        masses = np.bincount(number, self.precision, minlength=len(levels))
        code, other = np.divmod(levels, self.rows.n_levels[self.big])
        squares = masses**2 / self.eliminated[other]
        return np.bincount(code, squares, minlength=self.rows.n_levels[f])

    def _precondition(self, r):
        levels = [r.levels[k] / self._diagonal[f] for k, f in enumerate(self.others)]
        return Effects(cholesky_solve(self._lower, r.beta), levels)

    def _across(self, x):
        """Return (row values of x, their weighted sums over the eliminated factor)."""
        z = self.rows.X @ x.beta
        for k, f in enumerate(self.others):
            z += x.levels[k][self.rows.codes[f]]
        z *= self.precision
        return z, self.rows.sums(self.big, z)

    def _collect(self, values):
        return Effects(values @ self.rows.X, [self.rows.sums(f, values) for f in self.others])

    def _product(self, x):
        """Return the Schur complement times x."""
        z, sums = self._across(x)
        sums /= self.eliminated
        z -= self.precision * sums[self.rows.codes[self.big]]
        prior = Effects(self.prior.beta, [self.prior.levels[f] for f in self.others])
        return self._collect(z).plus(prior.times(x))

    def solve(self, right, start=None, tol=1e-6, max_steps=200):
        """Return x with Q x = right, both `Effects`, to a share tol of the preconditioned norm."""
        first = right.levels[self.big] / self.eliminated
        taken = self._collect(self.precision * first[self.rows.codes[self.big]])
        r = Effects(right.beta, [right.levels[f] for f in self.others]).plus(taken, -1.0)
        goal = tol * np.sqrt(r.dot(self._precondition(r)))
        x = Effects(np.zeros_like(r.beta), [np.zeros_like(a) for a in r.levels])
        if start is not None:
            x = Effects(start.beta, [start.levels[f] for f in self.others])
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
        levels: list[Any] = [None] * len(self.rows.codes)
        for k, f in enumerate(self.others):
            levels[f] = x.levels[k]
        levels[self.big] = (right.levels[self.big] - self._across(x)[1]) / self.eliminated
        return Effects(x.beta, levels)

    def draw(self, rng, tol=1e-6):
        """Return a draw of N(0, Q^-1): a perturbed right-hand side, and one solve."""
        noise = np.sqrt(self.precision) * rng.standard_normal(len(self.precision))
        right = self.rows.collect(noise)
        prior = Effects(
            rng.standard_normal(len(self.prior.beta)) * np.sqrt(self.prior.beta),
            [rng.standard_normal(len(p)) * np.sqrt(p) for p in self.prior.levels],
        )
        return self.solve(right.plus(prior), tol=tol)
