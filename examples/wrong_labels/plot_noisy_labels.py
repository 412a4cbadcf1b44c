"""
Learning from labels that are wrong
===================================

:class:`~sklearn_ep.RelaxedEPClassifier` gives every label a probability of being wrong and learns
it. This example begins with a list of labels to review and a decision boundary with 20 % wrong
labels. It then shows how error and flags change with the share of wrong labels, and the posterior
of a tiny problem beside the exact one.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import cross_val_predict

from sklearn_ep import RelaxedEPClassifier
from sklearn_ep.datasets import make_noisy_labels_classification
from sklearn_ep.inspection import review_list

# %%
# Four hundred points, 20 % of the labels exchanged. The list begins with the labels that are most
# probably wrong.

X, y, clean, flipped = make_noisy_labels_classification(400, return_flipped=True, random_state=3)
X_new, _, y_new = make_noisy_labels_classification(4000, flip=0.0, random_state=10)
robust = RelaxedEPClassifier().fit(X, y)
trusting = GaussianProcessClassifier(ConstantKernel(1.0) * RBF(1.0)).fit(X, y)

print(review_list(robust, X, y).head(6).round(2).to_string())

# %%
# Circles mark labels that are wrong with a probability above one half.

grid = np.stack(np.meshgrid(np.linspace(-4.5, 4.5, 90), np.linspace(-3.5, 3.5, 70)), axis=-1)
fig, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharey=True)
for ax, clf in zip(axes, [robust, trusting], strict=True):
    p = clf.predict_proba(grid.reshape(-1, 2))[:, 1].reshape(grid.shape[:2])
    ax.contourf(
        grid[..., 0], grid[..., 1], p, levels=np.linspace(0, 1, 11), cmap="RdBu_r", alpha=0.6
    )
    ax.contour(grid[..., 0], grid[..., 1], p, levels=[0.5], colors="k")
    ax.scatter(*X.T, c=y, cmap="RdBu_r", s=10)
    loss = log_loss(y_new, clf.predict_proba(X_new))
    ax.set(title=f"{type(clf).__name__}\nlog loss on clean labels {loss:.3f}")
suspect = robust.noise_proba_ > 0.5
axes[0].scatter(
    *X[suspect].T, s=60, facecolors="none", edgecolors="k", label="probably wrong label"
)
axes[0].legend()
plt.show()
print(f"learned share of wrong labels {robust.label_noise_:.3f}, true {flipped.mean():.3f}")
print(f"of {suspect.sum()} suspects {flipped[suspect].sum()} are wrong labels")

# %%
# Against the share of wrong labels: error, log loss, and how well each ranks the labels that are
# wrong. The classifier without a model of wrong labels flags them by cross-validation. cleanlab, if
# it is installed, leaves the flagged rows out and fits again.

try:
    from cleanlab.classification import CleanLearning
except ImportError:
    CleanLearning = None

shares = [0.0, 0.1, 0.2, 0.3]
names = ["RelaxedEPClassifier", "GaussianProcessClassifier"]
names += [] if CleanLearning is None else ["cleanlab"]
errors, losses, areas = np.full((3, len(shares), len(names)), np.nan)
for k, flip in enumerate(shares):
    X, y, _, flipped = make_noisy_labels_classification(
        200, flip=flip, return_flipped=True, random_state=1
    )
    robust = RelaxedEPClassifier().fit(X, y)
    trusting = GaussianProcessClassifier(ConstantKernel(1.0) * RBF(1.0)).fit(X, y)
    held_out = cross_val_predict(clone(trusting), X, y, method="predict_proba")
    fits, suspicion = [robust, trusting], [robust.noise_proba_, held_out[np.arange(len(y)), 1 - y]]
    if CleanLearning is not None:
        fits.append(CleanLearning(clone(trusting)).fit(X, y))
        suspicion.append(-fits[-1].get_label_issues()["label_quality"])
    errors[k] = [np.mean(c.predict(X_new) != y_new) for c in fits]
    losses[k] = [log_loss(y_new, c.predict_proba(X_new)) for c in fits]
    if flip:
        areas[k] = [roc_auc_score(flipped, s) for s in suspicion]

fig, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
figures = {"error on clean labels": errors, "log loss on clean labels": losses}
figures["area under the curve of the flags"] = areas
for ax, (what, values) in zip(axes, figures.items(), strict=True):
    ax.plot(shares, values, "o-", label=names)
    ax.set(xlabel="share of wrong labels", ylabel=what)
axes[1].legend(loc="upper left")
plt.show()

# %%
# Five points, one of them with a wrong label. With a linear kernel the latent function is w'x. The
# exact posterior of w has a factor 0.8 for each point on the right side of the plane, and 0.2 for
# each on the wrong side. Expectation propagation and its variants approximate it by one Gaussian.

points = np.array([[1.2, 0.3], [0.8, 1.0], [-1.0, 0.2], [-0.6, -0.9], [1.0, -0.2]])
labels = np.array([1, 1, -1, -1, -1])
axis = np.linspace(-3, 3, 201)
w = np.stack(np.meshgrid(axis, axis), axis=-1)
right = np.sign(w @ points.T) == labels
density = np.exp(np.log(np.where(right, 0.8, 0.2)).sum(-1) - 0.5 * (w**2).sum(-1))

rules = {
    "EP": dict(rule="ep"),
    "power EP, 0.5": dict(rule="power"),
    "relaxed, 0.2": dict(relaxation=0.2),
    "relaxed, 0.05": dict(relaxation=0.05),
}
kept = dict(optimizer=None, label_noise=0.2, latent_noise=1e-6, tol=1e-6, max_iter=1000)
circle = np.stack([np.cos(np.linspace(0, 2 * np.pi, 100)), np.sin(np.linspace(0, 2 * np.pi, 100))])

fig, ax = plt.subplots(figsize=(6, 5.2), layout="constrained")
ax.contourf(axis, axis, density, levels=20, cmap="Greys")
exact = (density[..., None] * w).sum((0, 1)) / density.sum()
ax.plot(*exact, "k+", markersize=14, label="exact mean")
for color, (name, rule) in zip(["C0", "C1", "C2", "C3"], rules.items(), strict=True):
    clf = RelaxedEPClassifier(DotProduct(0.0, "fixed"), **rule, **kept).fit(points, labels)
    mean, _ = clf.latent_mean_and_variance(np.eye(2))
    root = np.linalg.cholesky(clf.latent_covariance(np.eye(2)))
    ax.plot(*(mean[:, None] + root @ circle), color=color, label=name)
    ax.plot(*mean, "o", color=color)
    print(f"{name:14s} distance of the mean from the exact one {np.linalg.norm(mean - exact):.4f}")
ax.set(xlabel="first weight", ylabel="second weight", title="Posterior of the weights")
ax.legend()
plt.show()

# %%
# The gain in log loss comes from the probability of a wrong label in the likelihood: labels that
# contradict their neighbours count less. The flags come with the fit. They rank wrong labels
# nearly as well as cross-validation of a classifier without them, which takes five more fits.
# Relaxing the matching of moments changes little: on the five points the ellipses nearly coincide.
