"""Linear systems of many effects: conjugate gradients with the largest factor eliminated.

The posterior precision of (coefficients, effects) given Gaussian sites is Q = Z' T Z + B0 for rows
with D dense columns and one entry in each factor. The block of one factor is diagonal, so the
largest is eliminated exactly; a product with what is left costs a pass over the rows. Its block of
the columns and of the smaller factors, as many as a Cholesky factor affords, and the diagonal of
the rest make it nearly the identity, or just that. Iterations do not grow with the number of rows.

Rows are asked for sums alone, by functions of (`FactorRows`, state of the rows, values of levels):
they may be anywhere, in any number of parts.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.sparse import csr_array

from ..._engine.gaussian import add_to_diagonal, checked_cholesky, cholesky_solve
from .._layout import SharedRows


class Effects(NamedTuple):
    """A vector over coefficients (D,) and the effects (L_f,) of each factor."""

    beta: np.ndarray
    levels: list[np.ndarray]

    def plus(self, other, scale=1.0):
        """Return self + scale other."""
        pairs = zip(self.levels, other.levels, strict=True)
        return Effects(self.beta + scale * other.beta, [a + scale * b for a, b in pairs])

    def dot(self, other):
        """Return the inner product."""
        pairs = zip(self.levels, other.levels, strict=True)
        return float(self.beta @ other.beta + sum(a @ b for a, b in pairs))


@dataclass
class FactorRows:
    """Rows with an intercept for a level of each factor.

    X (n, D), sign (n,) in {-1, +1}, weight (n,) tied copies; codes (n,) and n_levels are of each
    factor; big is the number of the factor that is eliminated.
    """

    X: np.ndarray
    sign: np.ndarray
    weight: np.ndarray
    codes: list[np.ndarray]
    n_levels: list[int]
    big: int

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
        factors = range(len(self.codes))
        levels: list[Any] = [None if f == but else self.sums(f, values) for f in factors]
        return Effects(values @ self.X, levels)

    def of_big(self, value):
        """Return a list over factors with the value of the big one, None for others."""
        return [value if f == self.big else None for f in range(len(self.codes))]


class SystemSums(NamedTuple):
    """Sums over rows of their precisions T.

    By level; of T X and of the p levels in the dense block, each with the levels of the big factor;
    and among the columns of X and these levels (D + p, D + p).
    """

    levels: list[np.ndarray]
    cross: list[Any]
    across: csr_array
    block: np.ndarray


def system_sums(rows, state, places, n_big, size):
    """Return the `SystemSums` of rows.

    places has the numbers of levels, in the block of this size and of the big factor of n_big
    levels, None for other factors.
    """
    big, t, d = rows.big, state.precision, rows.X.shape[1]
    dense = [f for f, at in enumerate(places) if at is not None and f != big]
    weighted, block = t[:, None] * rows.X, np.zeros((size, size))
    block[:d, :d] = weighted.T @ rows.X
    entries: list[Any] = [np.zeros((3, 0), dtype=np.intp)]  # masses, and places of both kinds
    for k, f in enumerate(dense):
        entries.append((t, places[big][rows.codes[big]], places[f][rows.codes[f]] - d))
        block[:d, places[f]] = np.array([rows.sums(f, w) for w in weighted.T]).reshape(d, -1)
        block[places[f], :d] = block[:d, places[f]].T
        block[places[f], places[f]] = rows.sums(f, t)
        for g in dense[:k]:
            shape = rows.n_levels[f], rows.n_levels[g]
            both = rows.codes[f] * shape[1] + rows.codes[g]
            masses = np.bincount(both, t, minlength=shape[0] * shape[1]).reshape(shape)
            block[np.ix_(places[f], places[g])] = masses
            block[np.ix_(places[g], places[f])] = masses.T
    data, row, column = (np.concatenate(part) for part in zip(*entries, strict=True))
    across = csr_array((data, (row, column)), (n_big, size - d))
    levels = [rows.sums(f, t) for f in range(len(rows.codes))]
    columns = np.array([rows.sums(big, w) for w in weighted.T]).reshape(d, -1)
    return SystemSums(levels, rows.of_big(columns), across, block)


def taken(rows, state, eliminated):
    """Return what eliminating a factor takes from the diagonals of the others.

    eliminated has the diagonal of the big factor, None for others. A pair of levels whose rows are
    in several parts counts as several: the preconditioner is then nearly the diagonal.
    """
    out: list[Any] = [None] * len(rows.codes)
    for f, n in enumerate(rows.n_levels):
        if f != rows.big:
            pairs = rows.codes[f], rows.codes[rows.big]
            masses = csr_array((state.precision, pairs), (n, rows.n_levels[rows.big]))
            out[f] = masses.power(2) @ (1.0 / eliminated[rows.big])
    return out


def right_side(rows, state):
    """Return Z' nu for the sites' shifts nu, an `Effects`."""
    return rows.collect(rows.weight * state.sites.shift)


def across(rows, state, x):
    """Return the sums of T Z x over the levels of the big factor, None for others."""
    return rows.of_big(rows.sums(rows.big, state.precision * rows.predictor(x)))


def reduced_product(rows, state, x, eliminated):
    """Return Z' T (Z x - what the big factor takes back), without its entries.

    eliminated has the values of the big factor, None for others.
    """
    left = rows.predictor(x) - eliminated[rows.big][rows.codes[rows.big]]
    return rows.collect(state.precision * left, but=rows.big)


class PartSeed(NamedTuple):
    """A seed from which each part makes its own random numbers, the same every time."""

    seed: int

    def of_part(self, k):
        """Return the generator of part k."""
        return np.random.default_rng([self.seed, k])


def noise(rows, state, rng):
    """Return a draw of N(0, Z' T Z) as `Effects`."""
    drawn = rng.standard_normal(len(state.precision))
    return rows.collect(np.sqrt(state.precision) * drawn)


class LanczosPath(NamedTuple):
    """What conjugate gradients from zero find of the preconditioned matrix K: a Gauss rule.

    size is the preconditioned square of the right side; steps and ratios are those of the method.
    """

    size: float
    steps: list[float]
    ratios: list[float]

    def trace(self):
        """Return an estimate of the trace of log K.

        It is unbiased for a right side whose covariance is the matrix of the system.
        """
        step, ratio = np.array(self.steps), np.array(self.ratios[:-1])
        diagonal = 1.0 / step
        diagonal[1:] += ratio / step[:-1]
        values, vectors = eigh_tridiagonal(diagonal, np.sqrt(ratio) / step[:-1])
        return self.size * (vectors[0] ** 2 / values) @ np.log(values)


class SchurSystem:
    """Solves Q x = r for Q = Z' diag(precision) Z + diag(prior).

    rows have `ask(function, *values)`, which sums over all of them, and are in the state of the
    system; big is the number of the largest factor; prior an `Effects` of precisions; most of the
    levels of others may be in the dense block. converged says whether all solves met their
    tolerance, direct whether that block is all there is besides the eliminated factor, path is the
    `LanczosPath` of the last solve. Vectors without the eliminated factor are flat: coefficients,
    the factors of the dense block, and the rest.
    """

    def __init__(self, rows, big, prior, most=500):
        self.rows, self.big, self.prior = rows, big, prior
        self.converged, self.path = True, LanczosPath(0.0, [], [])
        sizes = [len(p) for p in prior.levels]
        dense, rest = _chosen(sizes, big, most)
        self.others, self.direct = dense + rest, not rest
        self._ends = len(prior.beta) + np.cumsum([0, *(sizes[f] for f in self.others)])
        self._prior, size = self._reduced(prior), self._ends[len(dense)]
        places = self._of_big(np.arange(sizes[big]))
        for f, start in zip(dense, self._ends, strict=False):
            places[f] = start + np.arange(sizes[f])
        sums = rows.ask(system_sums, places, sizes[big], size)
        diagonal = [a + p for a, p in zip(sums.levels, prior.levels, strict=True)]
        self.eliminated = diagonal[big]
        # what the columns and the dense factors have in the eliminated one
        self._with_big: Any = SharedRows(sums.cross[big].T, sums.across)
        block = sums.block - self._with_big.weighted_gram(1.0 / self.eliminated)
        add_to_diagonal(block, self._prior[:size])
        self._lower = checked_cholesky(0.5 * (block + block.T))
        self._rest = np.zeros(0)
        if rest:
            less = rows.ask(taken, self._of_big(self.eliminated))
            self._rest = np.concatenate([diagonal[f] - less[f] for f in rest])

    def columns(self):
        """Return x with Q x = e_d for each coefficient as `Effects`."""
        none = [0.0 * p for p in self.prior.levels]
        return [self.solve(Effects(unit, none)) for unit in np.eye(len(self.prior.beta))]

    def variance_sums(self):
        """Return the sums (F,) of the variances of effects of a direct system."""
        cov = cholesky_solve(self._lower, np.eye(len(self._lower)))
        variances = self._effects(np.diagonal(cov), 1.0 / self.eliminated)
        out = np.array([np.sum(v) for v in variances.levels])
        out[self.big] += np.sum(cov * self._with_big.weighted_gram(self.eliminated**-2.0))
        return out

    def log_det(self):
        """Return log |Q| without the trace that `path` estimates: that of the preconditioner."""
        rest = np.sum(np.log(self.eliminated)) + np.sum(np.log(self._rest))
        return 2.0 * np.sum(np.log(np.diagonal(self._lower))) + rest

    def at(self, rows):
        """Return the same system, for solves, for the same rows in another place."""
        out = copy(self)
        out.rows, out._with_big = rows, None
        return out

    def _of_big(self, values):
        return [values if f == self.big else None for f in range(len(self.prior.levels))]

    def _effects(self, x, of_big=None):
        """Return a flat vector as `Effects`, with the values of the eliminated factor."""
        beta, *parts = np.split(x, self._ends[:-1])
        levels = self._of_big(of_big)
        for f, own in zip(self.others, parts, strict=True):
            levels[f] = own
        return Effects(beta, levels)

    def _reduced(self, x):
        """Return `Effects` as a flat vector, without the eliminated factor."""
        return np.concatenate([x.beta, *(x.levels[f] for f in self.others)])

    def _product(self, x):
        """Return the Schur complement times x."""
        whole = self._effects(x)
        sums = self.rows.ask(across, whole)[self.big] / self.eliminated
        found = self.rows.ask(reduced_product, whole, self._of_big(sums))
        return self._reduced(found) + self._prior * x

    def solve(self, right, start=None, tol=1e-6, max_steps=200):
        """Return x with Q x = right, both `Effects`, to a share tol of the preconditioned norm."""
        m = len(self._lower)

        def preconditioned_by(r):
            return np.concatenate([cholesky_solve(self._lower, r[:m]), r[m:] / self._rest])

        of_big = right.levels[self.big]
        nothing = self._effects(np.zeros(self._ends[-1]))
        less = self.rows.ask(reduced_product, nothing, self._of_big(of_big / self.eliminated))
        r = self._reduced(right) + self._reduced(less)
        goal, x = tol * np.sqrt(r @ preconditioned_by(r)), np.zeros_like(r)
        if start is not None:
            x = self._reduced(start)
            r = r - self._product(x)
        direction = preconditioned = preconditioned_by(r)
        size = r @ preconditioned
        self.path = LanczosPath(size, [], [])
        while np.sqrt(size) > goal and len(self.path.steps) < max_steps:
            product = self._product(direction)
            step = size / (direction @ product)
            x, r = x + step * direction, r - step * product
            preconditioned, last = preconditioned_by(r), size
            size = r @ preconditioned
            direction = preconditioned + size / last * direction
            self.path.steps.append(step)
            self.path.ratios.append(size / last)
        self.converged &= bool(np.sqrt(size) <= goal)
        sums = self.rows.ask(across, self._effects(x))[self.big]
        return self._effects(x, (of_big - sums) / self.eliminated)

    def draw(self, rng, tol=1e-6):
        """Return a draw of N(0, Q^-1): a perturbed right-hand side, and one solve."""
        right = self.rows.ask(noise, PartSeed(int(rng.integers(2**62))))
        precisions = self.prior.beta, *self.prior.levels
        beta, *levels = (rng.standard_normal(len(p)) * np.sqrt(p) for p in precisions)
        return self.solve(right.plus(Effects(beta, levels)), tol=tol)


def _chosen(n_levels, big, most):
    """Return the factors in the dense block, the smallest as long as they fit, and the rest."""
    order = sorted((f for f in range(len(n_levels)) if f != big), key=lambda f: n_levels[f])
    n_dense = np.searchsorted(np.cumsum([n_levels[f] for f in order]), most, side="right")
    return order[:n_dense], order[n_dense:]
