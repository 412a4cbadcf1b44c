"""
Inducing points: how many, and where
====================================

The sparse method describes a Gaussian process by its values at m inducing points, which it moves to
where they are needed. On two interlocked crescents a few points suffice; the evidence, which needs
no held-out rows, says how many.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss

from sklearn_ep import EPGaussianProcessClassifier

# %%
# Two crescents that overlap, in the manner of the Banana data of the paper on scalable EP
# (Hernandez-Lobato and Hernandez-Lobato 2016).


def crescents(n, seed):
    X, y = make_moons(n, noise=0.3, random_state=seed)
    return 2.0 * (X - [0.5, 0.25]), y


X, y = crescents(2500, 0)
X_test, y_test = crescents(2000, 1)

# %%
# Each panel starts from k-means and learns amplitude, length scale and the points themselves. Four
# points cannot bend the boundary enough. Eight have nearly the log loss of 128, and the evidence,
# which needs no held-out rows, hardly rises after sixteen. Learning ends early on purpose, here and
# below; the warning about it is switched off.

warnings.simplefilter("ignore", ConvergenceWarning)
sizes = (4, 8, 16, 32, 64, 128)
grid = np.stack(np.meshgrid(np.linspace(-3.2, 3.6, 60), np.linspace(-3.0, 3.2, 60)), axis=-1)
fig, axes = plt.subplots(2, 3, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
for m, ax in zip(sizes, axes.ravel(), strict=True):
    clf = EPGaussianProcessClassifier(
        method="sparse", n_inducing=m, learn_inducing=True, max_iter=60, random_state=0
    ).fit(X, y)
    loss = log_loss(y_test, clf.predict_proba(X_test))
    proba = clf.predict_proba(grid.reshape(-1, 2))[:, 1].reshape(60, 60)
    ax.scatter(*X[:600].T, c=y[:600], s=4, cmap="coolwarm", alpha=0.4)
    ax.contour(grid[..., 0], grid[..., 1], proba, [0.1, 0.5, 0.9], colors="k", linewidths=(1, 2, 1))
    ax.scatter(*clf.inducing_points_.T, c="k", s=14, marker="x")
    ax.set_title(f"m = {m}, log loss {loss:.3f}")
    print(f"m = {m:3d}: evidence {clf.log_evidence_:8.1f}, held-out log loss {loss:.4f}")
plt.show()

# %%
# A smooth boundary needs few inducing points: with more of them only the cost of a pass grows.
#
# Full passes or minibatches? With 40,000 rows the two learn about the same kernel, full passes in
# less time. Minibatches are for rows so many that a single pass over all of them is slow.

X, y = crescents(40_000, 2)
for name, settings in {
    "full passes": dict(max_iter=24),
    "minibatches of 200": dict(max_iter=4, batch_size=200, learning_rate=0.02),
}.items():
    start = time.process_time()
    clf = EPGaussianProcessClassifier(method="sparse", n_inducing=32, random_state=0, **settings)
    loss = log_loss(y_test, clf.fit(X, y).predict_proba(X_test))
    print(f"{name}: held-out log loss {loss:.4f}, {time.process_time() - start:.1f} CPU seconds")
