"""The softmax with more coefficients of all classes than a matrix can have.

A cavity is taken as independent normals over the classes, whose variances are a level times those
that the precision of each class by itself, or its diagonal, gives without the row. Draws of the
posterior, which need no more than products with the rows, tell the level: of contrasts, for labels
see nothing else. Given these variances the sites are those of EP, and the means are right.

Matrices of the classes know how columns go together, which matters in tables: at a prior variance
of 10 the mean log loss of eight is .351 by them, .419 by diagonals and .353 by exact variances. On
documents both are .003 apart at most.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

from .._engine.class_sites import JointEP, contrast_variances, empty_sites, stars
from .._engine.gaussian import ImproperPosterior, row_blocks, star_times
from .._engine.noisy_argmax import QUICK_SOFTMAX
from . import _systems
from ._joint_exact import SpreadByRows


class _JointTolerances(NamedTuple):
    """Where iterations of sites and solves end."""

    first_sites: float = 0.1  # at the first variances and at another scale
    sites: float = 1e-2
    sweeps: int = 40
    mean: float = 1e-4  # relative residual of the solves for means, ...
    samples: float = 1e-2  # ... and for samples


_TOL = _JointTolerances()
# Share of a step that the acceleration mixes: on iris under wide priors 13 to 18 sweeps in place of
# 30 to more than 60 with whole steps.
MIXING = 0.7
# Rows for each column from which on EP's evidence compares scales. In ten tables with more the log
# loss is .006 lower in the mean than by the bound, .011 higher at most. Of 1000 documents with two
# rows a column it is .005 higher.
_ROWS_OF_EVIDENCE = 10.0
# Multiplications for each row and class up to which blocks are formed: they take as long then as
# the integrals of the sites between two of them.
_MOST_OF_ROW = 1e6
# Training rows up to which covariances go by matrices of these: of 700, 1000 and 1500 rows of four
# classes with 100 others that takes .1, .2 and .8 CPU s, and a system for each of the 100 1.2, 1.6
# and 2.4.
_MOST_ROWS = 1000


def own_precisions(precision):
    """Return the precision (n, K) that sites (n, K) give each class where the others are known."""
    return precision - precision**2 / precision.sum(1, keepdims=True)


class ClassDiagonals:
    """Variances of classes by the diagonal of the precision; `weights` (q, K) of the weights."""

    def __init__(self, design, diagonal, own):
        self.B, self.data = design.B, np.asarray(design.squares_tdot(own))
        self.weights = 1.0 / (diagonal[:, None] + self.data)

    def rows(self, B):
        """Return the variances (m, K) of the predictors of rows."""
        return np.asarray(_systems.squared(B) @ self.weights)

    def left_out(self, own):
        """Return those of the training rows without their own precisions (n, K)."""
        columns = zip(self.weights.T, own.T, strict=True)
        return np.column_stack([_systems.leave_one_out(self.B, *each) for each in columns])

    def log_determinant(self, times, probes):
        """Return that of the precision, whose product is `times`, and its standard error."""
        return _systems.log_determinant(times, 1.0 / self.weights.ravel(), probes)


class ClassBlocks:
    """Those by a matrix (q, q) of each class. O(K (n q^2 + q^3))."""

    def __init__(self, design, diagonal, own):
        self.B, self.prior = design.B, diagonal
        self.classes = [_systems.primal_system(design, diagonal, each) for each in own.T]
        self.weights = np.column_stack([each.coefficient_variance() for each in self.classes])
        # what the rows add to the prior precision of a weight whose class has no others
        told = np.asarray(design.squares_tdot(own)) > 0
        self.data = np.where(told, 1.0 / self.weights - diagonal[:, None], 0.0)

    def rows(self, B):
        """Return the variances (m, K) of the predictors of rows."""
        return np.column_stack([each.row_variance(B) for each in self.classes])

    def left_out(self, own):
        """Return those of the training rows without their own precisions (n, K)."""
        var = self.rows(self.B)
        return var / (1.0 - own * var)

    def log_determinant(self, times, probes):
        """Return that of the precision, whose product is `times`, and its standard error.

        In coordinates in which each block is the unit matrix little is left to probes. Of a weight
        that is common to all classes only the prior knows, which would leave an eigenvalue near
        zero: in its place is the mean M of the blocks, whose determinant is known.
        """
        halves: Any = np.array([each.half for each in self.classes])
        common = np.mean([each.precision for each in self.classes], axis=0)
        more = common - np.diag(self.prior)

        def along(V, of_class):
            columns = V.reshape(halves.shape[1], len(halves), -1)
            return np.einsum(of_class, halves, columns, optimize=True).reshape(V.shape)

        def unit(V):
            U = along(V, "cij,icm->jcm")
            mean = U.reshape(halves.shape[1], len(halves), -1).mean(axis=1)
            return along(times(U) + np.repeat(more @ mean, len(halves), axis=0), "cij,jcm->icm")

        rest, error = _systems.log_determinant(unit, np.ones(len(probes)), probes)
        known = sum(each.log_det for each in self.classes) + np.sum(np.log(self.prior))
        return rest + known - _systems.PrimalSystem(common).log_det, error


class StarSystem:
    """A = D + sum_i T_i (x) b_i b_i' of the weights of all classes, known by its products.

    diagonal D (q,) is that of the prior, the same for each class; precision d (n, K) are those of
    the sites, copies counted. Vectors hold K numbers a column after another. O(K nnz) a product.
    """

    def __init__(self, design, diagonal, precision):
        self.design, self.precision = design, precision
        self.data = np.asarray(design.squares_tdot(own_precisions(precision)))
        self.diagonal = np.repeat(diagonal, precision.shape[1])
        self.preconditioner = self.diagonal + self.data.ravel()

    solve = _systems.solve_by_products

    @cached_property
    def shape(self):
        """The variances of each class by itself, formed at first use."""
        (n, q), K = self.design.shape, self.precision.shape[1]
        kind = ClassBlocks if q**2 * (1.0 + q / n) <= _MOST_OF_ROW else ClassDiagonals
        return kind(self.design, self.diagonal[::K], own_precisions(self.precision))

    def predictors(self, V):
        """Return the predictors (n, K, k) of weights V (q K, k)."""
        K = self.precision.shape[1]
        return self.design.dot(V.reshape(-1, K * V.shape[1])).reshape(-1, K, V.shape[1])

    def pull(self, F):
        """Return what predictors F (n, K, k) add up to in the weights (q K, k)."""
        n, K, k = F.shape
        return self.design.tdot(F.reshape(n, K * k)).reshape(-1, k)

    def times(self, V):
        """Return A V for columns (q K, k)."""
        out = self.pull(star_times(self.precision, self.predictors(V)))
        return self.diagonal[:, None] * V + out

    def right(self, of_weights, of_rows):
        """Return columns of N(0, A) from standard normals (q K, k) and (n, K, k)."""
        noise = self._root * self._contrasts(of_rows)
        return np.sqrt(self.diagonal)[:, None] * of_weights + self.pull(noise)

    def unexplained(self, of_rows, F):
        """Return K - 1 less the degrees of freedom of each row (n,), as its draws tell them.

        Mean squares of what predictors F (n, K, k) of draws leave of their own noise, so that
        nothing is taken from K - 1, which a row that is nearly interpolated has no more of.
        """
        left = self._contrasts(of_rows - self._root * F)
        return np.einsum("nck,nck->n", left, left) / F.shape[2]

    @property
    def _root(self):
        return np.sqrt(self.precision)[:, :, None]

    def _contrasts(self, noise):
        """Take out of noise (n, K, k) what the sites, which say nothing of all classes, lack."""
        s = self._root / np.sqrt(self.precision.sum(1))[:, None, None]
        return noise - s * np.sum(s * noise, axis=1, keepdims=True)


class _GivenSites(NamedTuple):
    """Means and marginals of the rows, as a structure of the engine gives them."""

    coef: np.ndarray
    system: StarSystem
    mean: np.ndarray
    cov: np.ndarray
    extra_var: float
    log_evidence: float


class SampledClassSpread:
    """What stands for the covariance of the weights of all classes.

    Variances of rows are those of the classes by themselves times a level, which makes them right
    in the mean, of_weights (K, q) those of the weights; draws and covariances of rows are solved
    for.
    """

    def __init__(self, system, level, of_weights):
        self.system, self.level, self.of_weights = system, level, of_weights

    def variance(self):
        """Return the variances (K, q) of the weights."""
        return self.of_weights

    def rows(self, B):
        """Return the covariances (n, K, K) of the predictors of rows, independent over classes."""
        var = np.maximum(self.level * self.system.shape.rows(B), 1e-8)
        return var[:, :, None] * np.eye(var.shape[1])

    def weights_with(self, B, c, j):
        """Return the covariance (q, n) of the weights of class c with class j at rows.

        By covariances of the training rows while these are few, else by a system for each row.
        """
        (n, K), prior = self.system.precision.shape, self.system.diagonal
        if n <= _MOST_ROWS:
            known = self.system.design.B, 1.0 / prior[::K], self.system.precision
            return SpreadByRows(*known).weights_with(B, c, j)
        out = np.empty((B.shape[1], B.shape[0]))
        for rows in row_blocks(B.shape[0], K * B.shape[1]):
            block = B[rows].toarray() if hasattr(B, "toarray") else B[rows]
            right = np.zeros((block.shape[1], K, len(block)))
            right[:, j] = block.T
            solved = self.system.solve(right.reshape(-1, len(block)))
            out[:, rows] = solved.reshape(right.shape)[:, c]
        return out

    def draw(self, n_samples, rng):
        """Return draws (K, n_samples, q) of the weights about their means."""
        n, K = self.system.precision.shape
        noise = rng.standard_normal((len(self.system.diagonal), n_samples))
        right = self.system.right(noise, rng.standard_normal((n, K, n_samples)))
        draws = self.system.solve(right, _TOL.mean).reshape(-1, K, n_samples)
        return draws.transpose(1, 2, 0)


class _Spread(NamedTuple):
    """Calibrated variances: of cavities (n, K), their level, and the rest."""

    cavities: np.ndarray
    level: float
    of_weights: np.ndarray
    dof: float


class SampledJoint:
    """The iteration: variances of the cavities, scale of the prior, sites given these.

    It is itself the structure of the engine, where cavities have given variances (n, K).
    """

    def __init__(self, problem, y):
        self.problem, self.y, self.scale = problem, y, problem.prior.start_scale
        self.weight, self.K = problem.rows.weight, problem.n_classes
        self.x = empty_sites(y, self.K)
        self.coef: Any = None
        self.draws: Any = None
        self.n_sweeps = 0
        prior = problem.prior.precision(self.scale)
        data = problem.rows.design.squares_tdot(_systems.START_PRECISION * self.weight)
        start = _systems.START_INFLATION * (problem.rows.design.squares @ (1.0 / (prior + data)))
        self.variances = np.maximum(np.repeat(np.asarray(start)[:, None], self.K, 1), 1e-8)
        self.result = self.sites(_TOL.first_sites)

    def sites(self, tol):
        """Run EP given the variances of the cavities, from the last sites."""
        ep = JointEP(self, QUICK_SOFTMAX, self.y, self.weight)
        damping = self.problem.limits.damping
        limits = dict(tol=tol, max_iter=_TOL.sweeps, damping=damping, mixing=MIXING)
        result = ep.solve(self.x, accelerate=True, **limits)
        self.x, self.n_sweeps = result.x, self.n_sweeps + result.n_iter
        return result

    def posterior(self, precision, shift):
        """Return the `_GivenSites` for sites (n, K), copies counted; means by iteration."""
        prior = self.problem.prior.precision(self.scale)
        system = StarSystem(self.problem.rows.design, prior, precision)
        right = system.pull(shift[:, :, None])
        self.coef = system.solve(right, _TOL.mean, self.coef)
        mean = system.predictors(self.coef)[:, :, 0]
        A = stars(precision / self.weight[:, None])
        np.einsum("ncc->nc", A)[:] += 1.0 / self.variances
        half = 0.5 * float(right[:, 0] @ self.coef[:, 0])
        return _GivenSites(self.coef, system, mean, np.linalg.inv(A), 0.0, half)

    @property
    def state(self):
        """The `_GivenSites` of the present sites."""
        return self.result.evaluation.payload[0]

    def spread(self):
        """Return the `_Spread` at the present sites, from draws that go on from the last ones."""
        of_weights, of_rows = self.problem.noise
        system, k = self.state.system, of_weights.shape[1]
        right = system.right(of_weights, of_rows)
        self.draws = system.solve(right, _TOL.samples, self.draws)
        energy = np.einsum("ij,ij->j", self.draws, system.times(self.draws))
        scale = np.sqrt(len(right) / np.maximum(energy, 1e-8))
        U, F = self.draws * scale, system.predictors(self.draws)
        copies = np.maximum(self.weight, 1.0)  # of a weight below one all is taken out
        left = (self.K - 1.0) * np.sum(copies - 1.0) + np.sum(system.unexplained(of_rows, F))
        F, copy = F * scale, system.precision / copies[:, None]
        j = np.maximum(system.shape.left_out(own_precisions(copy)), 1e-8)
        seen = np.einsum("nck,nck->n", F, star_times(1.0 / j, F)) / k
        explained = np.einsum("nck,nck->n", F, star_times(system.precision, F)) / k
        level = float(copies @ seen) / left
        known = np.mean(U**2, axis=1), k, system.diagonal, system.shape.data.ravel()
        of_weights = _systems.coefficient_variances(*known)
        of_weights = of_weights.reshape(-1, self.K).T
        return _Spread(level * j, level, of_weights, float(explained.sum()))

    def advance(self):
        """Renew variances and scale, and the sites; return the `_Spread` and the residual."""
        spread = self.spread()
        change = np.log(spread.cavities / self.variances)
        share = self.problem.limits.damping
        self.variances = self.variances * np.exp(share * change)
        residual = float(self.weight @ np.mean(change**2, axis=1)) / self.weight.sum()
        if not np.isfinite(residual):
            raise ImproperPosterior("variances are beyond the range of double precision")
        self.result = self.sites(_TOL.sites)
        return spread, residual

    def move_to(self, scale):
        """Change the scale of the prior: the state has to be of it before draws are.

        Variances of cavities move as those do that the diagonal of the precision gives.
        """
        if scale != self.scale:
            data, design = self.state.system.data, self.problem.rows.design
            before, after = (
                design.squares @ (1.0 / (self.problem.prior.precision(s)[:, None] + data))
                for s in (self.scale, scale)
            )
            self.variances = self.variances * np.asarray(after) / np.maximum(before, 1e-300)
            self.scale = scale
            self.result = self.sites(_TOL.first_sites)

    def near(self, scale, rough):
        """Go to a scale, near enough to its fixed point to compare.

        Returns the `_Spread`, the prior precisions and the coefficients (q, K) there.
        """
        again = self.draws is not None and rough
        self.move_to(scale)
        for _ in range(1 if again else 2):
            spread, _ = self.advance()
        return spread, self.problem.prior.precision(scale), self.coef.reshape(-1, self.K)

    def evidence(self):
        """Return EP's log evidence and its standard error by the probes of a log determinant."""
        log_ratio, error = self._log_ratio(self.problem.evidence_probes)
        return self.result.evaluation.record["log_evidence"] + log_ratio, error

    def value(self, spread):
        """Return what scales are compared by: EP's log evidence, or a bound on it.

        Where columns are more than rows EP's evidence rises with the scale without an end, and the
        predictions get worse: on 4000 documents of 19,000 words and four classes it asks for prior
        variances beyond 1000, log loss .805, where the bound asks for 7, log loss .772. Where rows
        are many the bound asks for less than is best: of 1000 image segments of 18 columns for 11,
        log loss .171, where the evidence asks for 28, log loss .156.
        """
        known = self.result.evaluation.record["log_evidence"]
        (n, q), shape = self.problem.rows.design.shape, self.state.system.shape
        if n < _ROWS_OF_EVIDENCE * q or not isinstance(shape, ClassBlocks):
            known = self._terms_of_bound(spread)
        return known + self._log_ratio(self.problem.scale_probes)[0]

    def _terms_of_bound(self, spread):
        """Return the variational bound at EP's posterior but for determinants, by draws of rows."""
        state, noise = self.state, self.problem.noise[1]
        deviation, rows = np.sqrt(contrast_variances(state.cov)), np.arange(len(self.y))
        log_proba = np.zeros(len(rows))
        for k in range(noise.shape[2]):
            for sign in (-1.0, 1.0):
                latent = state.mean + sign * deviation * noise[:, :, k]
                log_proba += log_softmax(latent, axis=1)[rows, self.y] / (2.0 * noise.shape[2])
        squares = float(state.system.diagonal @ state.coef[:, 0] ** 2)
        return float(self.weight @ log_proba) + 0.5 * (spread.dof - squares)

    def _log_ratio(self, probes):
        """Return half the log of prior over posterior determinants, and its standard error."""
        if probes is None:
            return np.nan, 0.0
        system = self.state.system
        log_det, error = system.shape.log_determinant(system.times, probes)
        return 0.5 * (float(np.sum(np.log(system.diagonal))) - log_det), 0.5 * error
