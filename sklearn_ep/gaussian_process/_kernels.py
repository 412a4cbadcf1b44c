"""Derivatives of scikit-learn kernels, contracted on the spot.

Learning needs sum_ij G_ij dK_ij/dtheta for a given matrix G, never the derivatives themselves.
`contract` walks the kernel expression backwards: sums pass G on, products multiply it by the other
factor, and leaves answer with a few matrix products. The (n, n, p) array of `eval_gradient` is only
built for leaves without a rule of their own.
"""

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Exponentiation,
    Matern,
    Product,
    Sum,
    WhiteKernel,
)

__all__ = [
    "StationaryCross",
    "constant_and_stationary",
    "contract",
    "contract_diagonal",
    "cross",
    "cross_covariance",
    "has_input_gradient",
    "n_lengths",
    "self_covariance",
]


def cross(kernel, X, Z):
    """Return the covariance (n, m) of latent values at X and at Z, without white noise."""
    return kernel(X, Z)


def self_covariance(kernel, X):
    """Return the covariance (n, n) of latent values at X; white noise adds to the diagonal."""
    return kernel(X)


def contract(kernel, X, G, Z=None, inputs=False):
    """Contract a matrix with the derivatives of a kernel matrix.

    Parameters
    ----------
    kernel : sklearn kernel
    X : ndarray of shape (n, d)
    G : ndarray of shape (n, n) or (n, m)
        Derivative of a scalar in the entries of the kernel matrix.
    Z : ndarray of shape (m, d), default=None
        Columns of the matrix; None stands for X itself (white noise included).
    inputs : bool, default=False
        Also return the derivative in Z (in both arguments if Z is None).

    Returns
    -------
    gradient : ndarray of shape (p,)
        In the order of `kernel.theta`: sum(G * dK/dtheta_j), fixed parameters left out.
    input_gradient : ndarray of shape (m, d)
        Only with `inputs`, which needs a kernel of constants, RBF and Matern.

    Notes
    -----
    Cost O(n m d) for constants, RBF and Matern kernels; n m p memory for other leaves with
    Z None, (n + m)^2 p otherwise.
    """
    gradient, input_gradient = _walk(kernel, X, G, Z, inputs)
    return (gradient, input_gradient) if inputs else gradient


def _walk(kernel, X, G, Z, inputs):
    if isinstance(kernel, Sum | Product):
        first, second = G, G
        if isinstance(kernel, Product):
            first, second = G * kernel.k2(X, Z), G * kernel.k1(X, Z)
        g1, z1 = _walk(kernel.k1, X, first, Z, inputs)
        g2, z2 = _walk(kernel.k2, X, second, Z, inputs)
        return np.concatenate([g1, g2]), z1 + z2
    if isinstance(kernel, Exponentiation):
        power = kernel.exponent
        return _walk(kernel.kernel, X, G * power * kernel.kernel(X, Z) ** (power - 1), Z, inputs)
    if isinstance(kernel, ConstantKernel):
        value = np.array([kernel.constant_value * G.sum()])
        return (value[:0] if kernel.hyperparameter_constant_value.fixed else value), 0.0
    if isinstance(kernel, WhiteKernel):
        value = np.array([kernel.noise_level * np.trace(G) if Z is None else 0.0])
        return (value[:0] if kernel.hyperparameter_noise_level.fixed else value), 0.0
    if type(kernel) is RBF or (type(kernel) is Matern and kernel.nu in (0.5, 1.5, 2.5, np.inf)):
        return _stationary(kernel, X, G, Z, inputs)
    if inputs:
        raise TypeError(f"no derivative in the inputs for the kernel {kernel}")
    return _by_tensor(kernel, X, G, Z), 0.0


def has_input_gradient(kernel):
    """Return whether `contract(..., inputs=True)` knows every leaf of the kernel."""
    if isinstance(kernel, Sum | Product):
        return has_input_gradient(kernel.k1) and has_input_gradient(kernel.k2)
    if isinstance(kernel, Exponentiation):
        return has_input_gradient(kernel.kernel)
    if isinstance(kernel, ConstantKernel | WhiteKernel) or type(kernel) is RBF:
        return True
    return type(kernel) is Matern and kernel.nu in (0.5, 1.5, 2.5, np.inf)


def _slope(kernel, X, Z):
    """Return -2 dk/d(r^2) for scaled inputs, r the distance in length scales."""
    if type(kernel) is RBF or kernel.nu == np.inf:
        return np.exp(-0.5 * cdist(X, Z, "sqeuclidean"))
    r = cdist(X, Z)
    if kernel.nu == 0.5:
        # k = exp(-r) has a kink at r = 0, where equal inputs stay equal whatever the length scale
        return np.exp(-r) / np.where(r > 0, r, np.inf)
    if kernel.nu == 1.5:
        return 3.0 * np.exp(-np.sqrt(3.0) * r)
    return 5.0 / 3.0 * (1.0 + np.sqrt(5.0) * r) * np.exp(-np.sqrt(5.0) * r)


def _stationary(kernel, X, G, Z, inputs):
    """Contract for k(r^2), r^2 = sum_k (x_k - z_k)^2 / l_k^2: P = G * slope carries everything."""
    scale = np.broadcast_to(kernel.length_scale, (X.shape[1],))
    A = X / scale
    B = A if Z is None else Z / scale
    P = G * _slope(kernel, A, B)
    rows, cols = P.sum(1), P.sum(0)
    PB = P @ B
    # sum_ij P_ij (a_ik - b_jk)^2 = d/dlog l_k
    per_column = rows @ A**2 + cols @ B**2 - 2.0 * np.sum(A * PB, axis=0)
    if kernel.hyperparameter_length_scale.fixed:
        gradient = np.empty(0)
    else:
        gradient = per_column if kernel.anisotropic else np.array([per_column.sum()])
    if not inputs:
        return gradient, 0.0
    towards_z = (P.T @ A - cols[:, None] * B) / scale
    if Z is None:
        towards_z += (PB - rows[:, None] * A) / scale
    return gradient, towards_z


def _by_tensor(kernel, X, G, Z):
    """Contract through `eval_gradient`, which scikit-learn offers for one set of inputs only."""
    if Z is None:
        return np.tensordot(G, kernel(X, eval_gradient=True)[1], 2)
    n = len(X)
    block = kernel(np.vstack([X, Z]), eval_gradient=True)[1][:n, n:]
    return np.tensordot(G, block, 2)


def n_lengths(kernel):
    """Return the number of free length scales, at a fraction of the price of `n_dims`."""
    length = kernel.hyperparameter_length_scale
    return 0 if length.fixed else length.n_elements


def contract_diagonal(kernel, X, g):
    """Return sum_i g_i d k(x_i, x_i) / dtheta_j, shape (p,), in blocks of rows.

    Stationary kernels have a constant diagonal; others go through single rows in blocks.
    """
    if isinstance(kernel, Sum):
        return np.concatenate(
            [contract_diagonal(kernel.k1, X, g), contract_diagonal(kernel.k2, X, g)]
        )
    if isinstance(kernel, Product):
        return np.concatenate(
            [
                contract_diagonal(kernel.k1, X, g * kernel.k2.diag(X)),
                contract_diagonal(kernel.k2, X, g * kernel.k1.diag(X)),
            ]
        )
    if isinstance(kernel, Exponentiation):
        power = kernel.exponent
        inner = kernel.kernel
        return contract_diagonal(inner, X, g * power * inner.diag(X) ** (power - 1))
    if isinstance(kernel, RBF | Matern):
        return np.zeros(n_lengths(kernel))
    if isinstance(kernel, ConstantKernel):
        fixed = kernel.hyperparameter_constant_value.fixed
        return np.full(0 if fixed else 1, kernel.constant_value * g.sum())
    if isinstance(kernel, WhiteKernel):
        fixed = kernel.hyperparameter_noise_level.fixed
        return np.full(0 if fixed else 1, kernel.noise_level * g.sum())
    total = np.zeros(kernel.n_dims)
    step = 256
    for start in range(0, len(X), step):
        rows = slice(start, start + step)
        tensor = kernel(X[rows], eval_gradient=True)[1]
        total += np.einsum("i,iij->j", g[rows], tensor)
    return total


# ---------------------------------------------------------------------------- blocks of rows

# From this many columns distances are cheaper by one matrix product than by differences.
_MANY_COLUMNS = 24
# Squared norms beyond which the product form would lose the digits of short distances.
_LARGE_NORM = 1e6


def _squared_distances(A, B, B_norms):
    """Return squared distances (n, m) of rows, by differences unless the product form is safe."""
    if A.shape[1] < _MANY_COLUMNS:
        return cdist(A, B, "sqeuclidean")
    norms = np.einsum("ij,ij->i", A, A)
    if max(norms.max(initial=0.0), B_norms.max()) > _LARGE_NORM:
        return cdist(A, B, "sqeuclidean")
    D = A @ (-2.0 * B.T)
    D += norms[:, None]
    D += B_norms
    return np.maximum(D, 0.0, out=D)


class GeneralCross:
    """Covariances between blocks of rows and fixed points Z, for any scikit-learn kernel."""

    def __init__(self, kernel, Z):
        self.kernel, self.Z = kernel, Z

    def diagonal(self, X):
        """Return the prior variances (n,) at rows, white noise included."""
        return self.kernel.diag(X)

    def block(self, X):
        """Return the covariances (n, m) with Z and what `contract` wants back."""
        return np.ascontiguousarray(cross(self.kernel, X, self.Z)), X

    def contract(self, kept, G, inputs):
        """Return sum(G * dK/dtheta) (p,) and its like for Z (m, d), 0.0 unless `inputs`."""
        result = contract(self.kernel, kept, G, self.Z, inputs)
        return result if inputs else (result, 0.0)

    def contract_diagonal(self, X, g):
        """Return sum_i g_i d k(x_i, x_i) / dtheta (p,)."""
        return contract_diagonal(self.kernel, X, g)


class StationaryCross(GeneralCross):
    """The same for a constant times RBF or Matern, or one of these alone.

    Keeps the block and its derivative in the squared distance, so that a contraction costs one
    product (m, n) x (n, d) and no second evaluation of the kernel.
    """

    def __init__(self, kernel, Z):
        super().__init__(kernel, Z)
        constant, part, self.constant_first = constant_and_stationary(kernel)
        self.part = part
        self.amplitude = 1.0 if constant is None else constant.constant_value
        fixed = constant is None or constant.hyperparameter_constant_value.fixed
        self.n_constant = 0 if fixed else 1
        self.scale = np.broadcast_to(part.length_scale, (Z.shape[1],))
        self.B = Z / self.scale
        self.B_norms = np.einsum("ij,ij->i", self.B, self.B)
        self.is_rbf = type(part) is RBF or part.nu == np.inf

    def diagonal(self, X):
        """Return the constant prior variances (n,)."""
        return np.full(len(X), self.amplitude)

    def block(self, X):
        """Return the covariances (n, m) with Z and what `contract` wants back."""
        A = X / self.scale
        D = _squared_distances(A, self.B, self.B_norms)
        if self.is_rbf:
            D *= -0.5
            D += np.log(self.amplitude)
            K = np.exp(D, out=D)
            return K, (A, K, K)
        K, slope = _matern(self.part.nu, np.sqrt(D, out=D), self.amplitude)
        return K, (A, K, slope)

    def contract(self, kept, G, inputs):
        """Return sum(G * dK/dtheta) (p,) and its like for Z (m, d), 0.0 unless `inputs`."""
        A, K, slope = kept
        P = G * slope
        total = P.sum() if self.is_rbf else np.sum(G * K)
        rows, cols = P.sum(axis=1), P.sum(axis=0)
        towards = P.T @ A
        constant = np.full(self.n_constant, total)
        pieces = [constant, self._length_gradient(A, rows, cols, towards)]
        gradient = np.concatenate(pieces if self.constant_first else pieces[::-1])
        if not inputs:
            return gradient, 0.0
        towards -= cols[:, None] * self.B
        return gradient, towards / self.scale

    def _length_gradient(self, A, rows, cols, towards):
        if self.part.hyperparameter_length_scale.fixed:
            return np.empty(0)
        each = rows @ A**2 + cols @ self.B**2 - 2.0 * np.sum(self.B * towards, axis=0)
        return each if self.part.anisotropic else np.array([each.sum()])

    def contract_diagonal(self, X, g):
        """Return sum_i g_i d k(x_i, x_i) / dtheta (p,): only the constant moves the diagonal."""
        pieces = [
            np.full(self.n_constant, self.amplitude * g.sum()),
            np.zeros(n_lengths(self.part)),
        ]
        return np.concatenate(pieces if self.constant_first else pieces[::-1])


def _matern(nu, r, amplitude):
    """Return Matern covariances and -2 times their derivative in the squared distance."""
    if nu == 0.5:
        K = amplitude * np.exp(-r)
        # the kink at r = 0: equal inputs stay equal whatever the length scale
        return K, K / np.where(r > 0, r, np.inf)
    r *= np.sqrt(2.0 * nu)
    decay = amplitude * np.exp(-r)
    if nu == 1.5:
        return (1.0 + r) * decay, 3.0 * decay
    return (1.0 + r + r**2 / 3.0) * decay, 5.0 / 3.0 * (1.0 + r) * decay


def constant_and_stationary(kernel):
    """Split a kernel into (constant or None, RBF or Matern, constant first), or return None."""
    constant, part, first = None, kernel, True
    if isinstance(kernel, Product):
        first = isinstance(kernel.k1, ConstantKernel)
        constant, part = (kernel.k1, kernel.k2) if first else (kernel.k2, kernel.k1)
        if not isinstance(constant, ConstantKernel):
            return None
    if type(part) is RBF or (type(part) is Matern and part.nu in (0.5, 1.5, 2.5, np.inf)):
        return constant, part, first
    return None


def cross_covariance(kernel, Z):
    """Return the cross covariances with Z in the fastest form that the kernel has."""
    split = constant_and_stationary(kernel)
    return (GeneralCross if split is None else StationaryCross)(kernel, Z)
