"""From checked data of a regression to its fit: intercept, prior, random numbers, posterior."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import LinearOperator
from sklearn.utils import check_array, check_random_state

from ._regression import RegressionLoop, StackedDesign
from ._sites import LaplaceSite
from ._systems import row_blocks
from ._variances import rademacher

__all__ = ["RegressionFit", "RegressionPosterior", "fit_regression", "plan_regression"]

MOST_EXACT = 2000  # coefficients for which "auto" factorises a matrix at every step
_EVIDENCE_PROBES, _DIAGONAL_PROBES = 8, 8


class Centre(NamedTuple):
    """Means of the columns (d,) and of y over n rows: a flat intercept makes the line go there."""

    columns: np.ndarray
    response: float
    n_rows: int


@dataclass
class RegressionPosterior:
    """Coefficients N(mean, F F') with the factor F (d, r), and an intercept if there is a centre.

    Given the coefficients u the intercept is that of the centre less columns' u, with variance
    noise / n_rows. `exact` tells a factor of the precision matrix from sampled ones.
    """

    mean: np.ndarray
    factor: np.ndarray
    noise: float
    exact: bool
    centre: Centre | None

    @property
    def intercept(self):
        """Mean of the intercept, 0 if there is none."""
        c = self.centre
        return 0.0 if c is None else float(c.response - c.columns @ self.mean)

    def intercept_std(self):
        """Return the standard deviation of the intercept, 0 if there is none."""
        c = self.centre
        if c is None:
            return 0.0
        at = c.columns @ self.factor
        return float(np.sqrt(self.noise / c.n_rows + at @ at))

    def latent_mean(self, X):
        """Return means (n,) of noise-free responses."""
        return X @ self.mean + self.intercept

    def predict(self, X):
        """Return mean and variance (n,) of noise-free responses."""
        out, c = np.empty(X.shape[0]), self.centre
        for rows in row_blocks(X.shape[0], self.factor.shape[1]):
            block = X[rows]
            if c is not None and not sp.issparse(block):
                block = block - c.columns  # before the product, which would cancel digits
            product = block @ self.factor
            if c is not None and sp.issparse(block):
                product -= c.columns @ self.factor
            out[rows] = np.einsum("ij,ij->i", product, product)
        return self.latent_mean(X), out if c is None else out + self.noise / c.n_rows


@dataclass
class RegressionPlan:
    """Everything that a fit needs: the fixed-point map, and what draws further random numbers."""

    loop: RegressionLoop
    centre: Centre | None
    site: Any
    rng: Any
    max_iter: int

    def posterior(self, step):
        """Return what predicts from a `RegressionStep`."""
        exact = self.loop.exact
        factor = step.variances.half.T if exact else step.variances.factor
        return RegressionPosterior(step.u, factor, step.noise, exact, self.centre)


class RegressionFit(NamedTuple):
    """The end of the loop, its last step and posterior, and the bound with its standard error."""

    result: Any
    step: Any
    posterior: RegressionPosterior
    log_evidence: float
    evidence_std: float


def plan_regression(estimator, X, y):
    """Return the `RegressionPlan` of checked parameters and data."""
    C, log_det_C = _prior_operator(estimator.prior_operator, X.shape[1], estimator.learn_prior)
    square, known = C is None or C.shape[0] == X.shape[1], estimator.prior is not None
    learn = estimator.learn_prior
    learn = square and not known if isinstance(learn, str) else bool(learn)
    noise = estimator.noise_variance
    noise = None if isinstance(noise, str) else float(noise)
    intercept = estimator.fit_intercept
    if isinstance(intercept, str):
        intercept = noise is None and C is None and not isinstance(X, LinearOperator)
    centre, offset = None, None
    if intercept:
        ones = np.ones(X.shape[0])
        centre = Centre(np.asarray(X.T @ ones) / len(y), float(np.mean(y)), len(y))
        y = y - centre.response
        if isinstance(X, np.ndarray):
            X = X - centre.columns
        else:
            offset = centre.columns
    design = StackedDesign(X, C, offset)
    exact = _is_exact(estimator.variance, design)
    rng = check_random_state(estimator.random_state)
    site = estimator.prior if known else LaplaceSite(1.0, bound="kl")
    loop = RegressionLoop(
        design, y, site, noise, learn, estimator.tol, log_det_C=log_det_C,
        n_free=len(y) - bool(intercept),
    )  # fmt: skip
    if not exact:
        (n, d), k = X.shape, estimator.n_variance_samples
        loop.signs = rademacher(d, _DIAGONAL_PROBES, rng)
        loop.noise_rows = rng.standard_normal((n, k))
        loop.noise_sites = rng.standard_normal((design.n_sites, k))
    if learn and not known:
        loop.scale_from_data()
    return RegressionPlan(loop, centre, site, rng, estimator.max_iter)


def _prior_operator(C, d, learn):
    """Return C, dense, CSR or an operator, or None, and the log determinant of a square one."""
    if C is None:
        return None, 0.0
    if not isinstance(C, LinearOperator):
        C = check_array(C, dtype=np.float64, accept_sparse="csr", input_name="prior_operator")
    if C.shape[1] != d:
        raise ValueError(f"prior_operator has {C.shape[1]} columns, X has {d}.")
    square = C.shape[0] == d
    if learn is True and not square:
        raise ValueError(
            "learn_prior=True needs a prior_operator that is None or square: the normaliser of "
            "the prior is not known otherwise."
        )
    if not square or isinstance(C, LinearOperator) or d > MOST_EXACT:
        return C, np.nan if square else 0.0
    return C, float(np.linalg.slogdet(C.toarray() if sp.issparse(C) else C)[1])


def _is_exact(variance, design):
    """Return whether a matrix is factorised at every step."""
    if variance == "exact" and not design.matrices:
        raise ValueError(
            "variance='exact' needs X and prior_operator as matrices; take 'monte_carlo'."
        )
    if variance == "auto":
        return design.matrices and design.shape[1] <= MOST_EXACT
    return variance == "exact"


def fit_regression(plan, monitor):
    """Run the loop of a plan, watched by the monitor; return the `RegressionFit`."""
    loop = plan.loop
    result = loop.solve(loop.start(), max_iter=plan.max_iter, monitor=monitor)
    step, evidence, error = result.evaluation.payload, float("nan"), 0.0
    if loop.exact:
        evidence = step.objective
    elif loop.design.n_sites == loop.design.shape[1]:
        probes = rademacher(loop.design.shape[1], _EVIDENCE_PROBES, plan.rng)
        evidence, error = loop.sampled_bound(step, probes)
    return RegressionFit(result, step, plan.posterior(step), evidence, error)
