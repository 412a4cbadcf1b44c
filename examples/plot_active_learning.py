"""
Active learning: which rows to label next
=========================================

A posterior knows what it does not know. The loop below starts with 20 labels, buys ten more at a
time where they reduce the posterior variance over the pool most, and is compared with random
choices. Copy the body of the inner loop: two lines, ``fit`` and ``query``.
"""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.active_learning import query
from sklearn_ep.datasets import make_sparse_logistic

X, y, _ = make_sparse_logistic(4000, 300, n_per_row=30, n_informative=40, random_state=0)
X_test, y_test = X[2000:], y[2000:]


def learning_curve(strategy, seed):
    """Error and log loss on held-out rows after each purchase of ten labels."""
    rng = np.random.default_rng(seed)
    pool = rng.permutation(2000)[:1000]
    X_pool, y_pool = X[pool], y[pool]
    labelled, curve = list(range(20)), []
    while len(labelled) <= 200:
        clf = ConvexVariationalLogistic(prior_variance=4.0, max_iter=50)
        clf.fit(X_pool[labelled], y_pool[labelled])
        proba = clf.predict_proba(X_test)[:, 1]
        truth = np.where(y_test == 1, proba, 1 - proba)
        curve.append((len(labelled), np.mean(truth < 0.5), -np.mean(np.log(truth))))
        labelled += list(
            query(clf, X_pool, 10, strategy=strategy, exclude=labelled, random_state=seed)
        )
    return np.array(curve)


curves = {
    strategy: np.mean([learning_curve(strategy, seed) for seed in range(5)], axis=0)
    for strategy in ("random", "uncertainty", "variance_reduction")
}

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for strategy, curve in curves.items():
    axes[0].plot(curve[:, 0], curve[:, 1], label=strategy)
    axes[1].plot(curve[:, 0], curve[:, 2], label=strategy)
    print(f"{strategy:20s} error {curve[-1, 1]:.3f}, log loss {curve[-1, 2]:.3f}")
axes[0].set(xlabel="labels", ylabel="error")
axes[1].set(xlabel="labels", ylabel="log loss")
axes[0].legend()
plt.show()

# %%
# The right panel is a warning as well: chosen rows are not drawn like the population, and a lower
# error need not come with a lower log loss.
