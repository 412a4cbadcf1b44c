"""
Cross-validation with known groups and with new ones
====================================================

Patients come from hospitals, and rows of one hospital resemble each other. How good a model is
depends on the question: is the next patient from a hospital we know, or from a new one? Because
the group is a column of X, strings included, the two questions are two splitters of scikit-learn,
and nothing else changes.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GroupKFold, KFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from sklearn_ep import HierarchicalEPLogistic

# %%
# Forty hospitals of very different size, each with its own base rate.

rng = np.random.default_rng(1)
n_groups = 40
size = rng.integers(4, 40, n_groups)
name = np.array([f"hospital {j:02d}" for j in range(n_groups)])
group = np.repeat(np.arange(n_groups), size)
effect = 1.3 * rng.normal(size=n_groups)
X = pd.DataFrame({"severity": rng.normal(size=len(group)), "hospital": name[group]})
y = rng.uniform(size=len(group)) < 1 / (1 + np.exp(-X["severity"] - effect[group]))

# %%
# Three ways to treat the hospital: forget it, make it dummy columns, or model it. Rows held out at
# random are from known hospitals; with `GroupKFold` whole hospitals are held out. A pooled model
# does not use the name, and dummy columns are all zero for a new hospital.

dummies = make_column_transformer(
    (OneHotEncoder(handle_unknown="ignore"), ["hospital"]), remainder="passthrough"
)
models = {
    "pooled": (LogisticRegression(), ["severity"]),
    "dummies": (make_pipeline(dummies, LogisticRegression(C=10.0)), ["severity", "hospital"]),
    "hierarchical": (HierarchicalEPLogistic(group_column="hospital"), ["severity", "hospital"]),
}
splits = {
    "known hospitals": list(KFold(5, shuffle=True, random_state=0).split(X)),
    "new hospitals": list(GroupKFold(5).split(X, y, groups=X["hospital"])),
}
loss = {}
for split_name, split in splits.items():
    for model_name, (model, columns) in models.items():
        proba = cross_val_predict(model, X[columns], y, cv=split, method="predict_proba")
        loss[split_name, model_name] = log_loss(y, proba[:, 1])
        print(f"{split_name:16} {model_name:13} log loss {loss[split_name, model_name]:.3f}")

# %%
# Estimated effects shrink to the population mean, most of all those of small hospitals.

clf = HierarchicalEPLogistic(group_column="hospital").fit(X, y)
print(f"sd of the hospitals: {clf.tau_[0]:.2f}, 90 % interval {clf.tau_interval_[0].round(2)}")
estimate = clf.group_effects_[np.argsort(np.asarray(clf.group_labels_)), 0]

fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
places = np.arange(2)
for k, model_name in enumerate(models):
    heights = [loss[split_name, model_name] for split_name in splits]
    axes[0].plot(places + 0.1 * (k - 1), heights, "o", markersize=9, label=model_name)
axes[0].set_xticks(places, splits)
axes[0].set(ylabel="log loss of a held-out row", xlim=(-0.5, 1.5))
axes[0].legend(loc="lower right")
dots = axes[1].scatter(effect, estimate, c=size, cmap="viridis", s=35)
axes[1].axline((0, 0), slope=1, color="0.7")
axes[1].set(xlabel="true effect", ylabel="posterior mean", title="Shrinkage")
fig.colorbar(dots, ax=axes[1], label="rows of the hospital")
plt.show()

# %%
# For known hospitals the hierarchical model beats dummy columns, because estimates of small
# hospitals use those of the others. For new ones it is as good as the pooled model or better,
# because it averages over the effect that a new hospital may have.
