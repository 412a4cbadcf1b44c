"""
Leave-one-out diagnostics from one fit
======================================

Expectation propagation computes the posterior without each row, the cavity of the row, in every
sweep. So a fit comes with a leave-one-out prediction of each training row, `loo_proba_`. Here it is
compared with fits that leave rows out, and used to find labels that were exchanged.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.metrics import roc_auc_score

from sklearn_ep import EPGaussianProcessClassifier

rng = np.random.default_rng(0)
X, clean = make_moons(150, noise=0.2, random_state=0)
flipped = rng.uniform(size=150) < 0.06
y = np.where(flipped, 1 - clean, clean)

clf = EPGaussianProcessClassifier().fit(X, y)

# %%
# Leaving each row out and fitting again, at the learned kernel: 150 fits.

fixed = clone(clf).set_params(kernel=clf.kernel_, optimizer=None)
refitted = np.empty(len(y))
for i in range(len(y)):
    others = np.arange(len(y)) != i
    refitted[i] = fixed.fit(X[others], y[others]).predict_proba(X[i : i + 1])[0, y[i]]
print(f"largest difference from 150 refits: {np.abs(refitted - clf.loo_proba_).max():.3f}")
print(f"leave-one-out log loss: {-np.log(clf.loo_proba_).mean():.3f}")
print(f"area under the curve for flipped labels: {roc_auc_score(flipped, -clf.loo_proba_):.3f}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
axes[0].plot([0, 1], [0, 1], color="0.7")
axes[0].scatter(refitted, clf.loo_proba_, s=16, c=np.where(flipped, "C3", "C0"))
axes[0].set(xlabel="probability of the own label, refitted", ylabel="the same from the cavity")
shown = axes[1].scatter(*X.T, c=clf.loo_proba_, cmap="viridis", s=30)
axes[1].scatter(*X[flipped].T, s=110, facecolors="none", edgecolors="C3", label="label was flipped")
axes[1].set(xlabel="feature 0", ylabel="feature 1")
axes[1].legend()
fig.colorbar(shown, ax=axes[1], label="leave-one-out probability of the own label")
plt.show()

# %%
# One fit has the predictions of 150 refits. The rows of smallest probability are nearly all those
# whose label was exchanged.
