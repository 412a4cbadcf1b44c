"""
Group effects, known groups and new ones
========================================

Patients of forty clinics respond to a treatment or not. Clinics differ, some have few patients, and
next year ten more clinics join. Three models: one that ignores the clinics, one with a column for
each clinic, and one whose clinics are draws from a population.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import OneHotEncoder

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.inspection import GroupEffectsDisplay

rng = np.random.default_rng(0)
sizes = rng.integers(3, 30, 50)
clinic = np.repeat(np.arange(50), sizes)
X = rng.normal(size=(len(clinic), 3))
effect = 1.3 * rng.normal(size=50)
log_odds = X @ [0.8, -0.5, 0.0] + effect[clinic]
y = (rng.uniform(size=len(clinic)) < 1 / (1 + np.exp(-log_odds))).astype(int)

# clinics 40 to 49 are the new ones; of the others every third patient is held out
new = clinic >= 40
held = ~new & (np.arange(len(y)) % 3 == 0)
train = ~new & ~held

# %%
# The label of the clinic is a column of X, so the model works in pipelines and searches as it is.
# A label that was not seen in training is a new clinic: its effect is integrated over the
# population, not set to zero.

table = np.column_stack([X, clinic])
model = HierarchicalEPLogistic(group_column=3).fit(table[train], y[train])
pooled = LogisticRegression().fit(X[train], y[train])
one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(clinic[train, None])


def with_columns(rows):
    return np.column_stack([X[rows], one_hot.transform(clinic[rows, None])])


separate = LogisticRegression(C=10.0).fit(with_columns(train), y[train])
print(f"{'log loss':24}{'known clinics':>15}{'new clinics':>15}")
for name, predict in {
    "ignoring clinics": lambda rows: pooled.predict_proba(X[rows]),
    "a column for each": lambda rows: separate.predict_proba(with_columns(rows)),
    "population of clinics": lambda rows: model.predict_proba(table[rows]),
}.items():
    losses = [log_loss(y[rows], predict(rows)) for rows in (held, new)]
    print(f"{name:24}{losses[0]:15.4f}{losses[1]:15.4f}")
low, high = model.tau_interval_[0]
print(f"sd between clinics: {model.tau_[0]:.2f}, 90 % between {low:.2f} and {high:.2f}; true 1.3")

# %%
# Crosses are estimates from the patients of one clinic alone, dots those of the model. Effects of
# small clinics shrink most towards the population. Joint draws answer questions about ranks that
# intervals of single effects cannot: how certain is it which clinic is best?

draws = model.sample_posterior(4000, random_state=0)
best = np.bincount(draws.group_effects[:, :, 0].argmax(1), minlength=40) / 4000

fig, axes = plt.subplots(1, 2, figsize=(11, 6), layout="constrained")
GroupEffectsDisplay.from_estimator(model, table[train], y[train], labels=clinic[train], ax=axes[0])
axes[0].tick_params(axis="y", labelsize=6)
axes[0].set(ylabel="clinic", title="Effects of clinics, 30 of 40")
top = np.argsort(best)[::-1][:8]
axes[1].bar([str(int(model.group_labels_[k])) for k in top], best[top])
axes[1].set(xlabel="clinic", ylabel="probability", title="Which clinic has the largest effect?")
fig.savefig("sklearn_ep_hierarchical.png", dpi=110)
print("figure saved as sklearn_ep_hierarchical.png")
