"""
A million rows, each seen once, and a coefficient that changes
==============================================================

Rows arrive in batches of two thousand and are not kept. `partial_fit` takes the posterior of the
rows so far as the prior of the next batch. With ``forgetting`` below one old rows count less and
less, so that coefficients can follow a change. After half of the rows one of twenty coefficients
jumps.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.special import expit
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from sklearn_ep import ConvexVariationalLogistic

rng = np.random.default_rng(0)
n_columns, size, n_batches = 20, 2000, 500
coef = rng.normal(scale=0.5, size=n_columns)


def batch(k):
    """Return the rows and labels of batch k."""
    now = coef.copy()
    if k >= n_batches // 2:
        now[0] += 1.5
    X = rng.normal(size=(size, n_columns))
    return X, (rng.random(size) < expit(X @ now)).astype(int)


# %%
# Each model is scored on a batch before it learns from it.

models = {
    "remembers all": ConvexVariationalLogistic(forgetting=1.0),
    "forgets 10 % a batch": ConvexVariationalLogistic(forgetting=0.9),
    "SGDClassifier": SGDClassifier(loss="log_loss", random_state=0),
}
losses = {name: [] for name in models}
course = []
for k in range(n_batches):
    X, y = batch(k)
    for name, model in models.items():
        if k > 0:
            losses[name].append(log_loss(y, model.predict_proba(X)))
        model.partial_fit(X, y, classes=[0, 1])
    follower = models["forgets 10 % a batch"]
    course.append((follower.coef_[0, 0], follower.coef_std_[0, 0]))
print(f"{n_batches * size:,} rows")
for name, values in losses.items():
    print(f"{name:20} mean log loss {np.mean(values):.4f}")

# %%
# Above: log loss of the next batch, a moving average over twenty. Below: the coefficient that
# jumps, in the model that forgets. Its standard deviation does not shrink to zero, since old rows
# count less and less.

fig, (above, below) = plt.subplots(2, figsize=(7, 6), sharex=True, layout="constrained")
rows = size * np.arange(1, n_batches) / 1e6
for (name, values), color in zip(losses.items(), ("C0", "C2", "C7"), strict=True):
    smooth = np.convolve(values, np.full(20, 1 / 20), "valid")
    above.plot(rows[19:], smooth, color=color, label=name)
above.set(ylabel="log loss of the next batch", ylim=(0.38, 0.65))
above.legend(loc="upper right")
mean, std = np.array(course).T
rows = size * np.arange(1, n_batches + 1) / 1e6
below.fill_between(rows, mean - 1.64 * std, mean + 1.64 * std, color="C2", alpha=0.3, lw=0)
below.plot(rows, mean, color="C2", label="mean and 90 % interval")
truth = np.where(rows <= 0.5, coef[0], coef[0] + 1.5)
below.plot(rows, truth, "k--", lw=1, label="truth")
below.set(xlabel="rows seen, millions", ylabel="coefficient")
below.legend(loc="upper left")
plt.show()

# %%
# Forgetting costs little while nothing changes, and gains much once something does. The first
# batches of `SGDClassifier` have losses above the range of the picture.
