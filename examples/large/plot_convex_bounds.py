"""
Two bounds against the exact posterior
======================================

Both bounds fit a Gaussian to the posterior of two coefficients. The published quadratic bound
("local") is too narrow, however much data there is. The Kullback-Leibler bound ("kl", the default)
is right but for the skewness of the posterior. The exact posterior is evaluated on a grid.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.special import log_expit

from sklearn_ep import ConvexVariationalLogistic

rng = np.random.default_rng(1)
truth, prior_variance = np.array([2.0, -1.0]), 4.0


def exact_log_posterior(X, y, points):
    """Log posterior at points (m, 2), up to a constant."""
    sign = 2 * y - 1
    return log_expit((points @ X.T) * sign).sum(1) - 0.5 * (points**2).sum(1) / prior_variance


fig, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
for ax, n in zip(axes, (30, 300), strict=True):
    X = rng.normal(size=(n, 2))
    y = (X @ truth + rng.logistic(size=n) > 0).astype(int)
    fits = {
        bound: ConvexVariationalLogistic(prior_variance, bound=bound, fit_intercept=False).fit(X, y)
        for bound in ("kl", "local")
    }
    centre, width = fits["kl"].coef_[0], 4 * fits["kl"].coef_std_[0]
    grid = np.meshgrid(*np.linspace(centre - width, centre + width, 201).T)
    points = np.stack(grid, -1).reshape(-1, 2)
    log_p = exact_log_posterior(X, y, points)
    p = np.exp(log_p - log_p.max())
    mean = p @ points / p.sum()
    sd = np.sqrt(p @ (points - mean) ** 2 / p.sum())

    # levels that enclose 50 and 95 per cent of a two-dimensional Gaussian
    drops = np.exp([-3.0, -0.693])
    ax.contourf(*grid, p.reshape(grid[0].shape), levels=[*drops, 1.0], cmap="Greys", alpha=0.6)
    for color, (bound, fit) in zip(("C0", "C3"), fits.items(), strict=True):
        cov = fit.latent_covariance(np.eye(2))
        d = points - fit.coef_[0]
        q = np.exp(-0.5 * np.einsum("ij,jk,ik->i", d, np.linalg.inv(cov), d))
        ax.contour(*grid, q.reshape(grid[0].shape), levels=drops, colors=color)
        ratio = np.mean(fit.coef_std_[0] / sd)
        ax.plot([], [], color=color, label=f"{bound}: sd {ratio:.2f} of exact")
        print(f"{n} rows, {bound}: sd / exact {ratio:.3f}, log evidence {fit.log_evidence_:.3f}")
    ax.set(title=f"{n} rows (grey: exact)", xlabel="coefficient 0", ylabel="coefficient 1")
    ax.legend()
plt.show()

# %%
# The Kullback-Leibler bound follows the exact posterior, and more closely with more rows. The local
# bound is still too narrow with ten times as many rows.
