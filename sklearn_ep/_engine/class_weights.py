"""Linear predictors of all classes with one joint posterior: W classes x columns, Gaussian prior.

The latent values of a row b are W b. With a site T_i, b_i of `classes` on each row the precision of
the weights has the blocks [c = j] diag(prior) + B' diag([c = j] d_c - d_c d_j / sum d) B.

Rows B are dense, CSR, or an operator (n, q) of their own with `weighted_gram(weight)` for
B' diag(weight) B and `quadratic(matrix)` for b' matrix b of each row.
"""

from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils import gen_batches

from .class_sites import star_times
from .gaussian import (
    add_to_diagonal,
    checked_cholesky,
    inverse_from_cholesky,
    triangular_inverse,
    weighted_gram,
)

# Classes times columns up to which the joint precision matrix is factorised.
MOST_WEIGHTS = 4000
# Numbers in one temporary block of rows.
_BLOCK = 2_000_000


def class_covariances(spread: np.ndarray, B: Any) -> np.ndarray:
    """Return the covariances (n, K, K) of the latent values of rows B.

    `spread` (K, q, K, q) is the covariance of the weights.
    """
    C, q = spread.shape[:2]
    cov = np.empty((C, C, B.shape[0]))
    whole = hasattr(B, "quadratic")
    for rows in [slice(None)] if whole else gen_batches(B.shape[0], max(1, _BLOCK // q)):
        block = B if whole else B[rows]
        for c in range(C):
            for j in range(c + 1):
                cov[c, j, rows] = cov[j, c, rows] = _quadratic(block, spread[c, :, j])
    return np.ascontiguousarray(cov.transpose(2, 0, 1))


def _quadratic(B: Any, matrix: np.ndarray) -> np.ndarray:
    """Return b' matrix b (n,) of each row b."""
    if hasattr(B, "quadratic"):
        return B.quadratic(matrix)
    product = B @ matrix
    if sp.issparse(B):
        return np.asarray(B.multiply(product).sum(axis=1)).ravel()
    return np.einsum("iq,iq->i", product, B)


class ClassWeightState:
    """Posterior of the weights of all classes given sites d, b (n, K), copies counted.

    `coef` (K, q) are the means, `spread` (K, q, K, q) the covariance and `lower` the L with L L'
    the precision; `mean` (n, K) and `cov` (n, K, K) are the marginals of the rows,
    `extra_var` (n,) or 0 variances of the latent values given these.
    """

    def __init__(
        self, B: Any, prior: np.ndarray, precision: np.ndarray, shift: np.ndarray, extra_var: Any
    ) -> None:
        C, q = precision.shape[1], B.shape[1]
        self.precision, self.shift, self.extra_var = precision, shift, extra_var
        share = precision / precision.sum(1, keepdims=True)
        A = np.zeros((C, q, C, q))
        for c in range(C):
            for j in range(c + 1):
                own = precision[:, c] if c == j else 0.0
                A[c, :, j] = weighted_gram(B, own - precision[:, c] * share[:, j])
                A[j, :, c] = A[c, :, j].T
        A = A.reshape(C * q, C * q)
        add_to_diagonal(A, np.tile(prior, C))
        self.lower = checked_cholesky(A)
        self.spread = inverse_from_cholesky(self.lower).reshape(C, q, C, q)
        pull = (B.T @ shift).T
        self.coef = (self.spread.reshape(C * q, C * q) @ pull.ravel()).reshape(C, q)
        self.mean = np.asarray(B @ self.coef.T)
        self.cov = class_covariances(self.spread, B)
        self.log_evidence = 0.5 * float(np.sum(pull * self.coef) + C * np.sum(np.log(prior)))
        self.log_evidence -= float(np.sum(np.log(np.diagonal(self.lower))))

    @cached_property
    def inverse(self) -> np.ndarray:
        """Lower L^-1, made when it is needed."""
        return triangular_inverse(self.lower)

    def pull(self) -> np.ndarray:
        """Return what the sites pull the latent values of the rows by at the mean, (n, K)."""
        return self.shift - star_times(self.precision, self.mean)


class ClassWeights:
    """Structure of the weights of all classes over rows B (n, q).

    `prior` (q,) are the prior precisions, the same for each class. A posterior costs
    n q^2 K (K + 1) multiplications and (K q)^3 / 3, memory 2 (K q)^2 numbers.
    """

    def __init__(self, B: Any, prior: np.ndarray, extra_var: Any = 0.0) -> None:
        self.B, self.prior, self.extra_var = B, prior, extra_var

    def posterior(self, precision: np.ndarray, shift: np.ndarray) -> ClassWeightState:
        """Return the `ClassWeightState` for sites (n, K), copies of tied rows counted."""
        return ClassWeightState(self.B, self.prior, precision, shift, self.extra_var)
