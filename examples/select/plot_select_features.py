"""
Selecting features by their inclusion probability
=================================================

`inclusion_proba_` is the posterior probability that the coefficient of a column is not zero.
scikit-learn's `SelectFromModel` takes it, and the threshold is a probability: it needs no tuning.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import LassoCV, LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

from sklearn_ep import SpikeSlabRegressor

# %%
# Sixty rows, 150 columns in correlated blocks, five of them active.

rng = np.random.default_rng(0)
n, d = 60, 150
blocks = np.repeat(rng.normal(size=(n, d // 5)), 5, axis=1)
X = np.sqrt(0.5) * blocks + np.sqrt(0.5) * rng.normal(size=(n, d))
coef = np.zeros(d)
active = np.array([3, 40, 77, 101, 142])
coef[active] = [2.0, -1.5, 1.0, -2.0, 1.5]
y = X @ coef + rng.normal(size=n)

selectors = {
    "inclusion probability > 0.5": SelectFromModel(
        SpikeSlabRegressor(), importance_getter="inclusion_proba_", threshold=0.5
    ),
    "lasso, cross-validated": SelectFromModel(LassoCV(cv=5, random_state=0), threshold=1e-10),
}
for name, selector in selectors.items():
    chosen = np.flatnonzero(selector.fit(X, y).get_support())
    model = make_pipeline(selector, LinearRegression())
    error = -cross_val_score(model, X, y, cv=5, scoring="neg_mean_squared_error").mean()
    print(
        f"{name:28} {len(chosen):3} columns, {np.isin(active, chosen).sum()} of the 5 active ones, "
        f"held-out squared error {error:.2f}"
    )

# %%
reg = selectors["inclusion probability > 0.5"].estimator_
lasso = selectors["lasso, cross-validated"].estimator_
fig, axes = plt.subplots(2, 1, figsize=(9, 5.5), layout="constrained", sharex=True)
axes[0].vlines(np.arange(d), 0, reg.inclusion_proba_, color="C0")
axes[0].plot(active, reg.inclusion_proba_[active], "o", color="C3", label="active columns")
axes[0].axhline(0.5, color="0.5", linestyle="--")
axes[0].set(ylabel="inclusion probability", ylim=(0, 1.05))
axes[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0))
axes[1].vlines(np.arange(d), 0, np.abs(lasso.coef_), color="C1")
axes[1].plot(active, np.abs(lasso.coef_[active]), "o", color="C3")
axes[1].set(xlabel="column", ylabel="|lasso coefficient|")
plt.show()

# %%
# The lasso keeps the active columns and many others with them. Inclusion probabilities of active
# columns and of the others are far apart, and the threshold needs no search.
