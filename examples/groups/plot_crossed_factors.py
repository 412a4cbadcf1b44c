"""
Persons and items: crossed factors
==================================

Two hundred persons each answer some of thirty items. An answer depends on the person and on the
item, and neither is nested in the other. How much do persons differ, how much do items, and how
certain is that? What will a new person answer?
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.metrics import log_loss

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.inspection import GroupEffectsDisplay

rng = np.random.default_rng(0)
n_persons, n_items, n_rows = 200, 30, 2000
answers = pd.DataFrame(
    {"person": rng.integers(n_persons, size=n_rows), "item": rng.integers(n_items, size=n_rows)}
)
answers["practice"] = rng.normal(size=n_rows)
ability, ease = 1.2 * rng.normal(size=n_persons), 0.7 * rng.normal(size=n_items)
log_odds = 0.5 * answers["practice"] + ability[answers["person"]] + ease[answers["item"]]
right = (rng.uniform(size=n_rows) < 1 / (1 + np.exp(-log_odds))).astype(int)
held = np.arange(n_rows) % 5 == 0
train, test = answers[~held], answers[held]

# %%
# The list names the factors; a tuple of columns would be their combinations. The summary has the
# standard deviations of both with intervals, and joint draws say how sure it is that persons differ
# more than items.

model = HierarchicalEPLogistic(["person", "item"]).fit(train, right[~held])
print(model.summary())
draws = model.sample_posterior(4000, random_state=0)
print(f"persons differ more: probability {np.mean(draws.tau[:, 0] > draws.tau[:, 1]):.3f}")

# %%
# For a new label the effect is averaged over the population of its factor: a new person with known
# items, a new item for known persons, or both.

for name, rows in {
    "known persons, known items": test,
    "new persons, known items": test.assign(person=-1),
    "known persons, new items": test.assign(item=-1),
    "all new": test.assign(person=-1, item=-1),
}.items():
    print(f"{name:28}log loss {log_loss(right[held], model.predict_proba(rows)):.4f}")

# %%
# Crosses are estimates from the answers of one person or item alone, dots those of the model.
# Effects of persons, who have few answers, shrink towards zero; those of items, which have many,
# hardly do.

fig, axes = plt.subplots(1, 2, figsize=(11, 6), layout="constrained")
for ax, factor, name in zip(axes, (0, 1), ("person", "item"), strict=True):
    GroupEffectsDisplay.from_estimator(
        model, train, right[~held], labels=train[name], factor=factor, ax=ax
    )
    ax.set(ylabel=name, title=f"{name}s")
fig.savefig("sklearn_ep_crossed_factors.png", dpi=110)
print("figure saved as sklearn_ep_crossed_factors.png")
