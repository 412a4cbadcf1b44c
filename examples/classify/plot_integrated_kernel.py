"""
Few rows leave the kernel uncertain
===================================

Forty labels say little about how quickly a function varies. The kernel with the largest evidence is
one of many that explain them, and a fit that uses it alone is too sure of itself. By default the
fit averages over amplitude and length scale: it keeps a grid of kernels, each weighted by evidence
times prior.
"""

# %%
# One function, forty labels
# --------------------------
# The truth is a draw from a Gaussian process; labels follow its sign plus noise. The band holds
# 90 % of the posterior of the class probability.

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep.inspection import HyperparameterDisplay

true_kernel = 4.0 * RBF(0.7)


def simulate(seed, n=40, n_grid=100):
    """Return training rows, labels, a grid, and the true probability on the grid."""
    rng = np.random.default_rng(seed)
    X = np.concatenate([rng.uniform(-2, 2, n), np.linspace(-2.5, 2.5, n_grid)])[:, None]
    K = true_kernel(X) + 1e-8 * np.eye(len(X))
    f = np.linalg.cholesky(K) @ rng.normal(size=len(X))
    y = f[:n] + rng.normal(size=n) > 0
    return X[:n], y, X[n:], norm.cdf(f[n:])


def band(fit, grid, level):
    """Return the central interval of the class probability on a grid."""
    draws = fit.sample_proba(grid, 1000, random_state=0)[:, :, 1]
    return np.quantile(draws, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0)


X, y, grid, truth = simulate(seed=18)
fits = {
    "the best kernel": EPGaussianProcessClassifier(hyperparameters="mode").fit(X, y),
    "averaged over kernels": EPGaussianProcessClassifier().fit(X, y),
}

fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for ax, (name, fit) in zip(axes, fits.items(), strict=True):
    low, high = band(fit, grid, 0.9)
    ax.fill_between(grid[:, 0], low, high, alpha=0.25, label="90 % of the posterior")
    ax.plot(grid[:, 0], fit.predict_proba(grid)[:, 1], label="prediction")
    ax.plot(grid[:, 0], truth, "k--", label="truth")
    ax.plot(X[:, 0], 1.1 * y - 0.05, "|", color="0.4")
    ax.set(title=f"{name}: {np.mean((truth >= low) & (truth <= high)):.0%} in the band", xlabel="x")
axes[0].set_ylabel("probability of class 1")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %%
# These forty labels look much like coin tosses. A kernel of small amplitude explains them best, and
# the fit on the left uses that kernel alone.
#
# The kernels behind the average
# ------------------------------
# Each point is a kernel, its area the weight. Variances and length scales from .1 to 10 are all
# possible.

HyperparameterDisplay.from_estimator(fits["averaged over kernels"])
plt.show()

# %%
# Not one unlucky set
# -------------------
# How often do bands hold the truth, over thirty functions and all levels? On the diagonal a band
# holds the truth as often as its level says.

levels = np.array([0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
coverage = {name: [] for name in fits}
for seed in range(30):
    X, y, grid, truth = simulate(seed)
    if len(set(y)) < 2:
        continue
    for name, how in zip(fits, ("mode", "integrate"), strict=True):
        fit = EPGaussianProcessClassifier(hyperparameters=how).fit(X, y)
        bands = [band(fit, grid, level) for level in levels]
        coverage[name].append([np.mean((truth >= low) & (truth <= high)) for low, high in bands])

fig, ax = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
ax.plot([0, 1], [0, 1], color="0.7", lw=1)
for name, found in coverage.items():
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(len(found))
    ax.errorbar(levels, mean, 2 * error, marker="o", ms=4, capsize=2, label=name)
    print(f"{name}: 90 % bands hold {mean[3]:.0%} of the truth")
ax.set(xlabel="level of the band", ylabel="share of the truth inside")
ax.legend(loc="upper left", frameon=False)
plt.show()
