"""
Several classes: one posterior, or one against the rest
=======================================================

One against the rest fits each class against all others, and divides the probabilities by their sum.
A joint posterior has a latent function for each class, and the class of the largest value wins. The
two differ most where classes enclose each other, as rings do: no single boundary separates a ring
from the rings inside and outside of it.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from sklearn_ep import EPGaussianProcessClassifier

rng = np.random.default_rng(1)
X = 1.5 * rng.normal(size=(450, 2))
y = np.digitize(np.hypot(*X.T) + 0.25 * rng.normal(size=450), [1.0, 1.8, 2.6])
train, test = np.arange(450) < 270, np.arange(450) >= 270

models = {
    "one posterior of all classes": EPGaussianProcessClassifier(random_state=0),
    "one against the rest": EPGaussianProcessClassifier(multi_class="one_vs_rest", random_state=0),
    "LogisticRegression": LogisticRegression(),
}
for name, model in models.items():
    proba = model.fit(X[train], y[train]).predict_proba(X[test])
    error = np.mean(proba.argmax(1) != y[test])
    print(f"{name}: log loss {log_loss(y[test], proba):.3f}, error {error:.3f}")

# %%
# The picture shows the probability of the most probable class. Rows are the training rows.

side = np.linspace(-4, 4, 90)
grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
fig, axes = plt.subplots(1, 2, figsize=(11, 5), layout="compressed", sharey=True)
for ax, name in zip(axes, list(models)[:2], strict=True):
    proba = models[name].predict_proba(grid)
    drawn = ax.pcolormesh(
        side, side, proba.max(1).reshape(90, 90), vmin=0.25, vmax=1.0, cmap="Greys", alpha=0.8
    )
    ax.contour(side, side, proba.argmax(1).reshape(90, 90), levels=[0.5, 1.5, 2.5], colors="k")
    ax.scatter(*X[train].T, c=y[train], cmap="viridis", s=14, edgecolors="w", linewidths=0.3)
    ax.set(title=name, xlabel="feature 0", aspect="equal", xlim=(-4, 4), ylim=(-4, 4))
axes[0].set(ylabel="feature 1")
fig.colorbar(drawn, ax=axes, label="probability of the most probable class")
plt.show()

# %%
# The classifier with a joint posterior has one kernel, `kernel_`, and its probabilities add up to
# one by themselves. Draws from its posterior show how uncertain they are at a point between two
# rings:

draws = models["one posterior of all classes"].sample_proba([[1.0, 1.0]], 2000, random_state=0)
print("probabilities of the four rings at (1, 1), 5 to 95 %:")
print(np.round(np.quantile(draws[:, 0], [0.05, 0.95], axis=0), 2))
