"""
Schools: pupils in classes in schools
=====================================

A data frame of pupils: hours of work, school, class, and whether they passed. Classes are numbered
anew in every school. How much do schools differ, how much do classes within them, and with which
probability will a pupil of a new class pass? Input and output are data frames.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.inspection import GroupEffectsDisplay

rng = np.random.default_rng(1)
school, room = np.repeat(np.arange(12), 60), np.tile(np.repeat(np.arange(4), 15), 12)
of_school, of_class = 0.9 * rng.normal(size=12), 0.5 * rng.normal(size=48)
pupils = pd.DataFrame({"hours": rng.normal(size=720).round(2)})
pupils["school"], pupils["class"] = [f"school {k}" for k in school], room
log_odds = 0.8 * pupils["hours"] + of_school[school] + of_class[4 * school + room]
passed = pd.Series(rng.uniform(size=720) < 1 / (1 + np.exp(-log_odds)), name="passed")
print(pupils.assign(passed=passed).sample(4, random_state=0))

# %%
# The factors are written from the outside in. A class is the pair of both columns.

model = HierarchicalEPLogistic(["school", ("school", "class")]).fit(pupils, passed)
print(model.summary())

# %%
# Effects of schools and classes, one row each.

effects = model.group_effects_frame()
schools = effects[effects["factor"] == "school"].sort_values("mean", ascending=False)
print(schools[["level", "mean", "lower", "upper", "rows"]].round(2).to_string(index=False))
GroupEffectsDisplay.from_estimator(model, factor=0)
plt.show()

# %%
# A pupil of average work: in a class that we know, in a new class of the same school, and in a new
# school.

best = schools["level"].iloc[0]
new = pd.DataFrame({"hours": 0.0, "school": [best, best, "new"], "class": [0, 99, 99]})
low, high = model.predict_proba_interval(new).T
print(new.assign(passes=model.predict_proba(new)[:, 1], low=low, high=high).round(2))

# %%
# With twelve schools the interval of their standard deviation is wide, and so is that of classes.
# The less is known about the class and the school of a pupil, the wider is the interval of the
# probability.
