"""
Text: which words speak for a good review?
==========================================

A data frame of short reviews, a third of them with a label. A pipeline counts words and fits a
Bayesian logistic regression on all of them, some rare. Out come a data frame of predictions with
intervals, and a data frame of words with intervals.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.inspection import ReliabilityDisplay

# %%
# Reviews are made of words about films. Ten of them are more frequent in good reviews, ten in bad
# ones, and hundreds of names say nothing.

rng = np.random.default_rng(0)
good = "moving brilliant warm clever funny superb honest gripping fresh wise".split()
bad = "dull boring flat clumsy tired awful lazy empty stale noisy".split()
neutral = "film plot actor scene music end story camera".split()
names = [f"name{k}" for k in range(600)]


def review(is_good):
    """Return a text of a dozen words."""
    kind = np.where(rng.uniform(size=3) < 0.8, is_good, not is_good)
    opinions = [rng.choice(good if g else bad) for g in kind]
    return " ".join([*opinions, *rng.choice(neutral, 5), *rng.choice(names, 4)])


stars = rng.uniform(size=900) < 0.5
table = pd.DataFrame({"text": [review(s) for s in stars], "good": stars})
train, test = table[:300], table[300:]
print(train.head(3))

# %%
# The prior is learned, and predictions are calibrated by leave-one-out. There is nothing to tune.

model = make_pipeline(CountVectorizer(), ConvexVariationalLogistic(random_state=0))
model.fit(train["text"], train["good"])
words = model[0].get_feature_names_out()
low, high = model[-1].predict_proba_interval(model[0].transform(test["text"])).T
found = test.assign(proba=model.predict_proba(test["text"])[:, 1], low=low, high=high)
print(found[["text", "good", "proba", "low", "high"]].head(5).round(2))

# %%
# Held-out log loss beside a logistic regression at its defaults.

plain = make_pipeline(CountVectorizer(), LogisticRegression()).fit(train["text"], train["good"])
for name, fit in (("Bayesian", model), ("plain", plain)):
    print(f"{name}: log loss {log_loss(test['good'], fit.predict_proba(test['text'])):.3f}")

# %%
# The strongest words with their 90 % intervals, and the reliability of the probabilities.

effects = model[-1].summary(feature_names=words).to_frame().drop(index="intercept")
top = effects.loc[(effects["mean"].abs() / effects["sd"]).nlargest(20).index].sort_values("mean")
print(top.round(2))

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
left.hlines(top.index, top["lower"], top["upper"], linewidth=4, alpha=0.5)
left.plot(top["mean"], top.index, "o")
left.axvline(0, color="0.5", linewidth=0.8)
left.set(xlabel="coefficient: log odds of a good review", title="words with 90 % intervals")
ReliabilityDisplay.from_predictions(found["proba"], test["good"], n_bins=8, ax=right)
plt.show()

# %%
# Words that carry an opinion come first. The log loss is about that of the plain model. The
# posterior adds an interval for each word and for each probability.
