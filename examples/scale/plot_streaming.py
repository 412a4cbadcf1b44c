"""
Streams: rows that are seen once
================================

Rows arrive as data frames of fifty and are not kept. `partial_fit` updates the posterior at the
inducing points with each of them, every row seen once, in memory that does not grow.
"""

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.datasets import make_moons
from sklearn.metrics import log_loss

from sklearn_ep import EPGaussianProcessClassifier

X, y = make_moons(4000, noise=0.3, random_state=0)
X_test, y_test = make_moons(2000, noise=0.3, random_state=1)
X, X_test = (pd.DataFrame(rows, columns=["length", "width"]) for rows in (X, X_test))

# %%
# A kernel and inducing points from the first rows, then a stream of batches of fifty.

first = EPGaussianProcessClassifier(method="sparse", n_inducing=40, random_state=0)
first.fit(X[:300], y[:300])
stream = EPGaussianProcessClassifier(
    first.kernel_,
    inducing_points=first.inducing_points_,
    optimizer=None,
    site_memory="average",  # nothing is kept of a row
)
seen, losses = [], []
for start in range(0, len(X), 50):
    stream.partial_fit(X[start : start + 50], y[start : start + 50], classes=[0, 1])
    seen.append(start + 50)
    losses.append(log_loss(y_test, stream.predict_proba(X_test)))

# %%
# The same model with all rows at hand.

whole = EPGaussianProcessClassifier(
    first.kernel_, inducing_points=first.inducing_points_, optimizer=None, learn_inducing=False
).fit(X, y)
reference = log_loss(y_test, whole.predict_proba(X_test))
print(pd.DataFrame({"rows seen": seen, "held-out log loss": losses}).iloc[[0, 9, 39, 79]].round(3))
print(f"held-out log loss: stream {losses[-1]:.4f}, all rows at once {reference:.4f}")

fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
ax.semilogx(seen, losses, label="stream, each row seen once")
ax.axhline(reference, color="0.5", linestyle="--", label="all rows at once")
ax.set(xlabel="rows seen", ylabel="held-out log loss", title="Learning from a stream")
ax.legend()
plt.show()

# %%
# The stream ends at the log loss of the fit to all rows, and has kept none of them.
