"""Inducing points with sites of either sign, all rows of the covariance with them in memory.

The algebra of `passes` as one object with a `posterior`, like `DenseGP`: for rules that see all
rows at once, and for factors whose sites may be negative, where every step has to be tested.
"""

import numpy as np

from .values import InducingPosterior, InducingPrior

__all__ = ["InducingGP", "InducingState"]


class InducingState:
    """Posterior of the conditional means t = E[f | u] given sites on them, copies counted.

    `mean` and `var` (n,) are the marginals of t, `posterior` is the `InducingPosterior`, and
    `log_evidence` the log of the integral of prior times sites.
    """

    def __init__(self, W, precision, shift):
        self.precision, self.shift = precision, shift
        # the product is general: precisions have both signs
        self.posterior = InducingPosterior(W.T @ (precision[:, None] * W), shift @ W)
        root = self.posterior.root(W)
        self.mean, self.var = W @ self.posterior.mean, np.einsum("ij,ij->i", root, root)
        self.log_evidence = self.posterior.log_evidence


class InducingGP:
    """Structure of a Gaussian process at rows X seen through inducing points Z (FITC).

    `jitter` is the relative addition to the diagonal of the covariance of the inducing values;
    `extra_var` (n,) are the variances of f given u, independent for each copy of a row. A posterior
    costs 3 n m^2 flops, memory n m numbers.
    """

    def __init__(self, kernel, X, Z, jitter):
        self.X, self.prior = X, InducingPrior(kernel, Z, jitter)
        self.W, self.extra_var, self._kept = self.prior.whiten(X, keep=True)

    def posterior(self, precision, shift):
        """Return the `InducingState` for site parameters (n,), copies of tied rows counted."""
        return InducingState(self.W, precision, shift)

    def evidence_gradient(self, state, noise_slope, inputs=False):
        """Return d log evidence / d theta (p,) and / d Z (m, d) at a fixed point of the sites.

        `noise_slope` (n,) are the derivatives of the log evidence in the extra variances. Without
        `inputs` the derivative in Z is 0.0; with it the kernel has to know its own.
        """
        posterior, W = state.posterior, self.W
        scaled = noise_slope[:, None] * W
        towards_w = -state.precision[:, None] * (W @ posterior.cov)
        towards_w += np.outer(state.shift - state.precision * state.mean, posterior.mean)
        G = (towards_w - 2.0 * scaled) @ self.prior.inverse
        theta, towards = self.prior.cross.contract(self._kept, G, inputs)
        M = W.T @ scaled - 0.5 * (posterior.cov + np.outer(posterior.mean, posterior.mean))
        M[np.diag_indices_from(M)] += 0.5
        diagonal = self.prior.cross.contract_diagonal(self.X, noise_slope)
        of_prior, towards_prior = self.prior.contract(M, inputs)
        return theta + diagonal + of_prior, towards + towards_prior
