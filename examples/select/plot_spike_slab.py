"""
Which of two hundred features matter?
=====================================

Forty rows, two hundred features, eight of them with an effect: compressed sensing. The
spike-and-slab regressor learns noise, slab and sparsity from the evidence and says of every feature
with what probability it belongs to the model. The lasso, tuned by
cross-validation, keeps many more.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LassoCV

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.datasets import make_spike_slab_regression
from sklearn_ep.inspection import InclusionDisplay

X, y, coef = make_spike_slab_regression(540, 200, n_informative=8, random_state=1)
X, X_new, y, y_new = X[:40], X[40:], y[:40], y[40:]
reg = SpikeSlabRegressor().fit(X, y)
lasso = LassoCV(cv=5).fit(X, y)

# %%
# Inclusion probabilities are close to zero or one; the coefficients come with their uncertainty.

display = InclusionDisplay.from_estimator(reg)
display.ax_[1].plot(np.flatnonzero(coef), coef[coef != 0], "kx", label="truth")
display.ax_[1].legend()
plt.show()

# %%
# The error on new rows against that of the lasso, and how many features each uses.

mean, std = reg.predict(X_new, return_std=True)
print(f"spike and slab: {reg.get_support().sum()} features, MSE {np.mean((mean - y_new) ** 2):.4f}")
used = np.sum(lasso.coef_ != 0)
print(f"lasso: {used} features, MSE {np.mean((lasso.predict(X_new) - y_new) ** 2):.4f}")
print(f"share of new responses within two sd: {np.mean(np.abs(y_new - mean) < 2 * std):.2f}")

# %%
# Both fits against the truth.

fig, ax = plt.subplots(layout="constrained")
ax.plot(coef, lasso.coef_, "o", color="0.6", label="lasso")
ax.errorbar(coef, reg.coef_, 2 * reg.coef_std_, fmt="o", color="C3", label="spike and slab, 2 sd")
ax.axline((0, 0), slope=1, color="k", linewidth=0.8)
ax.set(xlabel="true coefficient", ylabel="estimate")
ax.legend()
plt.show()
