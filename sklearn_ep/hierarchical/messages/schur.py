"""Linear systems of many effects: conjugate gradients with the largest factor eliminated.

The posterior precision of (coefficients, effects) given Gaussian sites is Q = Z' T Z + B0 for rows
with D dense columns and one entry in each factor. The block of one factor is diagonal, so the
largest is eliminated exactly; a product with what is left costs a pass over the rows. Its block of
the columns and of the smaller factors, as many as a Cholesky factor affords, and the diagonal of
the rest make it nearly the identity, or just that. Iterations do not grow with the number of rows.

Rows are asked for sums alone, by functions of (`SystemRows`, state of the rows, values of levels):
they may be anywhere, in any number of parts.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.sparse import csr_array

from ..._engine.gaussian import checked_cholesky, cholesky_solve

__all__ = ["Effects", "FactorRows", "LastProduct", "SchurSystem", "SystemRows", "right_side"]


_FULL = 0.1  # share of pairs that occur from which products by BLAS are faster than sparse ones


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


class DenseSums(NamedTuple):
    """Sums over rows for p levels in the dense block: with the big factor, among them, with X."""

    across: csr_array
    within: np.ndarray
    along: np.ndarray


def dense_sums(held, state, places, size):
    """Return the `DenseSums` of rows.

    places has the numbers of levels, in the block and of the big factor, None for other factors;
    size is the number of all of either kind, the big factor's first.
    """
    rows, big, t = held.rows, held.big, state.precision
    dense = [f for f, at in enumerate(places) if at is not None and f != big]
    entries = [_pair_sums(held, t, f, places) for f in dense]
    data, row, column = (np.concatenate(part) for part in zip(*entries, strict=True))
    across = csr_array((data, (row, column)), size)
    within, along = np.zeros((size[1], size[1])), np.zeros((rows.X.shape[1], size[1]))
    weighted = t * rows.X.T
    for k, f in enumerate(dense):
        along[:, places[f]] = [rows.sums(f, w) for w in weighted]
        within[places[f], places[f]] = rows.sums(f, t)
        for g in dense[:k]:
            shape = rows.n_levels[f], rows.n_levels[g]
            both = rows.codes[f] * shape[1] + rows.codes[g]
            masses = np.bincount(both, t, minlength=shape[0] * shape[1]).reshape(shape)
            within[np.ix_(places[f], places[g])] = masses
            within[np.ix_(places[g], places[f])] = masses.T
    return DenseSums(across, within, along)


def _pair_sums(held, precision, f, places):
    """Return (sums, levels of the big factor, levels of f) of the pairs of levels that occur."""
    rows, big = held.rows, held.big
    if held.pairs[f] is None:
        return precision, places[big][rows.codes[big]], places[f][rows.codes[f]]
    number, levels = held.pairs[f]
    code, other = np.divmod(levels, rows.n_levels[big])
    masses = np.bincount(number, precision, minlength=len(levels))
    return masses, places[big][other], places[f][code]


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


class PartSeed(NamedTuple):
    """A seed from which each part makes its own random numbers, the same every time."""

    seed: int

    def of_part(self, k):
        """Return the generator of part k."""
        return np.random.default_rng([self.seed, k])


def noise(held, state, rng):
    """Return a draw of N(0, Z' T Z) as `Effects`."""
    drawn = rng.standard_normal(len(state.precision))
    return held.rows.collect(np.sqrt(state.precision) * drawn)


class LanczosPath(NamedTuple):
    """What conjugate gradients from zero find of the preconditioned matrix K: a Gauss rule.

    size is the preconditioned square of the right side; steps and ratios are those of the method.
    """

    size: float
    steps: list[float]
    ratios: list[float]

    def traces(self):
        """Return estimates of the traces of log K and of its square.

        They are unbiased for a right side whose covariance is the matrix of the system.
        """
        if not self.steps:
            return np.zeros(2)
        step, ratio = np.array(self.steps), np.array(self.ratios[:-1])
        diagonal = 1.0 / step
        diagonal[1:] += ratio / step[:-1]
        values, vectors = eigh_tridiagonal(diagonal, np.sqrt(ratio) / step[:-1])
        logs = np.log(values)
        return self.size * (vectors[0] ** 2 / values) @ np.column_stack([logs, logs**2])


class SchurSystem:
    """Solves Q x = r for Q = Z' diag(precision) Z + diag(prior).

    rows have `ask(function, *values)`, which sums over all of them, and are in the state of the
    system; big is the number of the largest factor; prior an `Effects` of precisions; most of the
    levels of others may be in the dense block. converged says whether all solves met their
    tolerance, path is the `LanczosPath` of the last one.
    """

    def __init__(self, rows, big, prior, most=500):
        self.rows, self.big, self.prior = rows, big, prior
        self.others = [f for f in range(len(prior.levels)) if f != big]
        self.converged, self.path = True, LanczosPath(0.0, [], [])
        sums = rows.ask(diagonals)
        diagonal = [a + p for a, p in zip(sums.levels, prior.levels, strict=True)]
        self.eliminated = diagonal[big]
        self.dense = self._chosen(most)
        block = self._dense_block(sums)
        self._lower = checked_cholesky(0.5 * (block + block.T))
        rest = len(self.dense) < len(self.others)
        less = rows.ask(taken, self._of_big(self.eliminated)) if rest else []
        self._diagonal, own = {}, self._parts(np.diagonal(block))[1]
        for f in self.others:
            self._diagonal[f] = own[f] if f in self.dense else diagonal[f] - less[f]

    def _chosen(self, most):
        """Return the factors in the dense block: the smallest, as long as they fit."""
        out, total = [], 0
        for f in sorted(self.others, key=lambda f: len(self.prior.levels[f])):
            total += len(self.prior.levels[f])
            if total <= most:
                out.append(f)
        return out

    def _dense_block(self, sums):
        """Return the Schur complement of the columns and the dense factors."""
        d, cross = len(self.prior.beta), sums.cross[self.big]
        scaled = cross / self.eliminated
        columns = sums.dense - scaled @ cross.T + np.diag(self.prior.beta)
        self._with_big = cross, csr_array((len(self.eliminated), 0))
        if not self.dense:
            return columns
        places = self._of_big(np.arange(len(self.eliminated)))
        p = 0
        for f in self.dense:
            places[f] = p + np.arange(len(self.prior.levels[f]))
            p += len(places[f])
        found = self.rows.ask(dense_sums, places, (len(self.eliminated), p))
        self._with_big = cross, found.across
        block = np.empty((d + p, d + p))
        block[:d, :d] = columns
        block[:d, d:] = found.along - scaled @ found.across
        block[d:, :d] = block[:d, d:].T
        prior = np.concatenate([self.prior.levels[f] for f in self.dense])
        found.within[np.diag_indices(p)] += prior
        np.subtract(found.within, _gram(found.across, self.eliminated), out=block[d:, d:])
        return block

    def _parts(self, values):
        """Return (coefficients, {factor: levels}) of values of the dense block."""
        d = len(self.prior.beta)
        ends = d + np.cumsum([0, *(len(self.prior.levels[f]) for f in self.dense)])
        own = {f: values[a:b] for f, a, b in zip(self.dense, ends[:-1], ends[1:], strict=True)}
        return values[:d], own

    @property
    def direct(self):
        """Whether the dense block is all there is besides the eliminated factor."""
        return len(self.dense) == len(self.others)

    def columns(self):
        """Return x with Q x = e_d for each coefficient as `Effects`."""
        d = len(self.prior.beta)
        if not self.direct:
            none = [0.0 * p for p in self.prior.levels]
            return [self.solve(Effects(unit, none)) for unit in np.eye(d)]
        cross, across = self._with_big
        units = np.eye(len(self._lower), d)
        out = []
        for column in cholesky_solve(self._lower, units).T:
            beta, levels = self._parts(column)
            levels[self.big] = -(beta @ cross + across @ column[d:]) / self.eliminated
            out.append(Effects(beta, [levels[f] for f in range(len(self.prior.levels))]))
        return out

    def variance_sums(self):
        """Return the sums (F,) of the variances of effects of a direct system."""
        d, (cross, across) = len(self.prior.beta), self._with_big
        cov = cholesky_solve(self._lower, np.eye(len(self._lower)))
        out, squared = np.empty(len(self.prior.levels)), self.eliminated**2
        for f, own in self._parts(np.diagonal(cov))[1].items():
            out[f] = np.sum(own)
        taken = np.sum(cov[:d, :d] * ((cross / squared) @ cross.T))
        taken += 2.0 * np.sum(cov[:d, d:] * ((cross / squared) @ across))
        taken += np.sum(cov[d:, d:] * _gram(across, squared))
        out[self.big] = np.sum(1.0 / self.eliminated) + taken
        return out

    def log_det(self):
        """Return log |Q| without the trace that `path` estimates: that of the preconditioner."""
        rest = [self.eliminated, *(self._diagonal[f] for f in self.others if f not in self.dense)]
        half = np.sum(np.log(np.diagonal(self._lower)))
        return 2.0 * half + sum(np.sum(np.log(a)) for a in rest)

    def at(self, rows):
        """Return the same system, for solves, for the same rows in another place."""
        out = object.__new__(SchurSystem)
        out.__dict__.update(self.__dict__, rows=rows, _with_big=None)
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
        own = dict(zip(self.others, r.levels, strict=True))
        joined = np.concatenate([r.beta, *(own[f] for f in self.dense)])
        beta, solved = self._parts(cholesky_solve(self._lower, joined))
        levels = [solved[f] if f in solved else own[f] / self._diagonal[f] for f in self.others]
        return Effects(beta, levels)

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
        self.path = LanczosPath(size, [], [])
        while np.sqrt(size) > goal and len(self.path.steps) < max_steps:
            product = self._product(direction)
            step = size / direction.dot(product)
            x, r = x.plus(direction, step), r.plus(product, -step)
            preconditioned, last = self._precondition(r), size
            size = r.dot(preconditioned)
            direction = preconditioned.plus(direction, size / last)
            self.path.steps.append(step)
            self.path.ratios.append(size / last)
        self.converged &= bool(np.sqrt(size) <= goal)
        levels = self._whole(x).levels
        levels[self.big] = (right.levels[self.big] - self._across(x)) / self.eliminated
        return Effects(x.beta, levels)

    def draw(self, rng, tol=1e-6):
        """Return a draw of N(0, Q^-1): a perturbed right-hand side, and one solve."""
        right = self.rows.ask(noise, PartSeed(int(rng.integers(2**62))))
        prior = Effects(
            rng.standard_normal(len(self.prior.beta)) * np.sqrt(self.prior.beta),
            [rng.standard_normal(len(p)) * np.sqrt(p) for p in self.prior.levels],
        )
        return self.solve(right.plus(prior), tol=tol)


def _gram(across, divisor):
    """Return the dense B' diag(1 / divisor) B of a sparse B (L, p)."""
    if across.nnz > _FULL * np.prod(across.shape):
        full = across.toarray()
        return full.T @ (full / divisor[:, None])
    scaled = across.copy()
    scaled.data /= np.repeat(divisor, np.diff(across.indptr))
    return (across.T @ scaled).toarray()
