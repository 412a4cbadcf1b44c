"""
Labelling: a session from the first label on
============================================

A data frame with two hundred images of the digits 3 and 8, and no labels. The session below asks
for one label at a time, is saved in the middle and resumed, and ends when one more label is
expected to gain little. Copy it, and let ``oracle`` show the rows to a person. The result is a data
frame of the pool with labels and probabilities.
"""

import pathlib
import tempfile

import joblib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.active_learning import Learner, learn

X, y = load_digits(return_X_y=True)
keep = np.isin(y, (3, 8))
X, X_test, y, y_test = train_test_split(X[keep] / 16.0, y[keep], test_size=0.4, random_state=0)
center = X.mean(axis=0)
X, X_test = (pd.DataFrame(rows - center).add_prefix("pixel ") for rows in (X, X_test))


def oracle(rows):
    """Return the labels of rows of the pool: ask a person here."""
    return y[rows]


# a prior for rows of this size, set before any label is there
model = ConvexVariationalLogistic(8.0 / np.mean(np.sum(X**2, axis=1)))
learner = Learner(model, X, classes=[3, 8])

# %%
# The first rows come from a fixed design: there is no model yet.
while len(learner.labelled_) < 20:
    rows = learner.ask()
    learner.tell(rows, oracle(rows))
print(f"{len(learner.labelled_)} labels, accuracy {learner.estimator_.score(X_test, y_test):.3f}")

# %%
# Saved for the night, and resumed.
path = pathlib.Path(tempfile.mkdtemp()) / "session.joblib"
joblib.dump(learner, path)
learner = joblib.load(path)

# %%
# Go on while a label is expected to lower the mean log loss by more than a little. Look at the
# figures before stopping: this is an expectation under the model, not a promise.
while len(learner.labelled_) < 80:
    rows = learner.ask()
    if learner.expected_gain_ < 5e-4:
        break
    learner.tell(rows, oracle(rows))
learner.refit()
print(pd.DataFrame(learner.history_)[["n_labels", "expected_gain"]].round(5).to_string(index=False))
print(f"{len(learner.labelled_)} labels, accuracy {learner.estimator_.score(X_test, y_test):.3f}")

# %%
# The pool with what is known of each image: its label, or the probability of an 8.
pool = pd.DataFrame({"label": pd.Series(learner.y_, index=learner.labelled_)}, index=X.index)
pool["proba of 8"] = learner.predict_proba()[:, 1].round(2)
print(pool.head(6))

# %%
# What is gained: the same number of random rows, five times. ``learn`` is the loop in one call.


def error(estimator):
    """Return the share of wrong predictions on held-out rows."""
    return 1.0 - estimator.score(X_test, y_test)


fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for strategy, color in (("random", "C7"), ("auto", "C0")):
    for seed in range(5 if strategy == "random" else 1):
        session = learn(model, X, oracle, 80, score=error, strategy=strategy, random_state=seed)
        n_labels, errors = zip(
            *((e["n_labels"], e["score"]) for e in session.history_), strict=True
        )
        ax.plot(n_labels, errors, color=color, label=strategy if seed == 0 else None)
ax.set(xlabel="labels", ylabel="error")
ax.legend()
plt.show()
