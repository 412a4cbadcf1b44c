"""
Watching a fit and stopping it early
====================================

The estimators take the callbacks of scikit-learn 1.9, which hear of each iteration. scikit-learn
has a progress bar and a monitor of scores. Your own rule is a class with four methods. Here one
stops a fit when the probabilities of held-out rows no longer change, long before its tight
tolerance.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import train_test_split

from sklearn_ep import EPGaussianProcessClassifier

X, y = make_moons(600, noise=0.3, random_state=0)
X_train, X_held, y_train, y_held = train_test_split(X, y, test_size=0.5, random_state=0)

# %%
# A progress bar needs one line, ``est.set_callbacks(sklearn.callback.ProgressBar())``, and the
# package rich. Your own rule sees the model as it would be if the fit ended now:


class StopWhenSettled:
    """Stop when no held-out probability has changed by more than `tol` since the last iteration."""

    def __init__(self, X, tol):
        self.X, self.tol = X, tol

    def setup(self, estimator, context):
        self.changes, self.last = [], None

    def teardown(self, estimator, context):
        self.last = None

    def on_fit_task_begin(self, estimator, context, **data):
        pass

    def on_fit_task_end(self, estimator, context, *, fitted_estimator=None, **data):
        if fitted_estimator is None:
            return False
        proba = fitted_estimator.predict_proba(self.X)
        self.changes.append(1.0 if self.last is None else float(np.abs(proba - self.last).max()))
        self.last = proba
        return self.changes[-1] < self.tol


# %%
# Two fits of the same model: one runs to its tolerance, one is stopped.

model = EPGaussianProcessClassifier(20.0 * RBF(0.8), optimizer=None, tol=1e-8)
watch = StopWhenSettled(X_held, tol=0)
model.set_callbacks(watch).fit(X_train, y_train)
full, changes = model.predict_proba(X_held), watch.changes

stop = StopWhenSettled(X_held, tol=1e-3)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)  # stopping early is what was asked for
    early = model.set_callbacks(stop).fit(X_train, y_train)
difference = np.abs(early.predict_proba(X_held) - full).max()
print(f"{len(changes)} sweeps to the tolerance, {early.n_iter_} until the probabilities settled")
print(f"largest difference of a held-out probability: {difference:.1e}")

fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
sweeps = np.arange(1, len(changes) + 1)
ax.semilogy(sweeps[1:], changes[1:], "o-", label="largest change of a held-out probability")
ax.axhline(stop.tol, color="0.5", linestyle="--", label="rule of the callback")
ax.axvline(early.n_iter_, color="C1", label="stopped here")
ax.set(xlabel="sweep", ylabel="change in one sweep", title="A callback that stops a fit")
ax.locator_params(axis="x", integer=True)
ax.legend()
plt.show()

# %%
# The stopped fit saves more than half of the sweeps. Its probabilities are those of the full fit to
# the accuracy that was asked for.
