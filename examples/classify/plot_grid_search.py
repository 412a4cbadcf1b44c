"""
Searching over kernels and damping
==================================

Kernels are parameters like any other. With ``optimizer=None`` a fit keeps the kernel it is given,
which makes it cheap enough for a grid; the evidence of the fit chooses without held-out rows.
Damping, on the other hand, changes the path and not the answer.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import GridSearchCV

from sklearn_ep import EPGaussianProcessClassifier

X, y = make_moons(200, noise=0.3, random_state=0)

# %%
# A grid over the length scale of the kernel, inside the kernel object, scored by cross-validated
# log loss.

scales = np.geomspace(0.1, 10, 9)
search = GridSearchCV(
    EPGaussianProcessClassifier(4.0 * RBF(1.0), optimizer=None),
    {"kernel__k2__length_scale": scales},
    scoring="neg_log_loss",
    cv=5,
).fit(X, y)
held_out = -search.cv_results_["mean_test_score"]
evidence = [
    EPGaussianProcessClassifier(4.0 * RBF(scale), optimizer=None).fit(X, y).log_evidence_
    for scale in scales
]
learned = EPGaussianProcessClassifier(4.0 * RBF(1.0)).fit(X, y)
print(f"best of the grid: length scale {search.best_params_['kernel__k2__length_scale']:.2f}")
print(f"learned from the evidence: {learned.kernel_}")

# %%
# Damping and acceleration at a kernel of large amplitude, where undamped parallel updates
# oscillate.

hard = 400.0 * RBF(1.0)
settings = {
    "damping 1, no acceleration": dict(damping=1.0, acceleration=None),
    "damping 0.5, no acceleration": dict(damping=0.5, acceleration=None),
    "default: Anderson, damping 0.7": {},
}
paths = {}
for name, setting in settings.items():
    model = EPGaussianProcessClassifier(hard, optimizer=None, tol=1e-6, **setting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what the picture is about
        paths[name] = model.fit(X, y).history_["residual"]

fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
axes[0].semilogx(scales, held_out, "o-", label="cross-validated log loss")
axes[0].set(xlabel="length scale", ylabel="log loss of a held-out row")
twin = axes[0].twinx()
twin.semilogx(scales, np.array(evidence) / len(y), "s--", color="C1", label="log evidence a row")
twin.set_ylabel("log evidence a row")
axes[0].axvline(learned.kernel_.k2.length_scale, color="0.5", linestyle=":", label="learned")
handles = axes[0].get_legend_handles_labels()[0] + twin.get_legend_handles_labels()[0]
axes[0].legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)
for name, residual in paths.items():
    axes[1].semilogy(np.arange(1, len(residual) + 1), residual, label=name)
axes[1].set(
    xlabel="sweep", ylabel="residual of an undamped sweep", title="The path, not the answer"
)
axes[1].legend()
plt.show()

# %%
# Evidence and held-out log loss choose about the same length scale, and the evidence needs one fit
# for each kernel instead of five. Anderson acceleration reaches the fixed point. Updates without it
# and without damping oscillate for ever.
