"""
Genes: which of two hundred matter?
===================================

Forty patients, the activity of two hundred genes, and a response that depends on eight of them. The
spike-and-slab regressor gives every gene the probability that it matters, and every coefficient an
interval. A lasso, tuned by cross-validation, keeps nearly twice as many genes.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import LassoCV

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.datasets import make_spike_slab_regression
from sklearn_ep.inspection import InclusionDisplay

X, y, coef = make_spike_slab_regression(540, 200, n_informative=8, random_state=1)
genes = pd.DataFrame(X).add_prefix("gene ")
X, X_new, y, y_new = genes[:40], genes[40:], y[:40], y[40:]
reg = SpikeSlabRegressor().fit(X, y)
lasso = LassoCV(cv=5).fit(X, y)

# %%
# The strongest genes, as a data frame.

table = reg.summary().to_frame().drop(index="intercept")
print(table.sort_values("inclusion", ascending=False).head(10).round(2))

# %%
# Inclusion probabilities are close to zero or one. Crosses are the true coefficients.

display = InclusionDisplay.from_estimator(reg)
display.ax_[1].plot(np.flatnonzero(coef), coef[coef != 0], "kx", label="truth")
display.ax_[1].legend()
plt.show()

# %%
# The error on new patients, and how many genes each model uses.

mean, std = reg.predict(X_new, return_std=True)
print(f"spike and slab: {reg.get_support().sum()} genes, MSE {np.mean((mean - y_new) ** 2):.4f}")
used = np.sum(lasso.coef_ != 0)
print(f"lasso: {used} genes, MSE {np.mean((lasso.predict(X_new) - y_new) ** 2):.4f}")
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

# %%
# Spike and slab finds the eight genes. The lasso keeps fifteen, and its error is far larger.
