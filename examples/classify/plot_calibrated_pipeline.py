"""
Calibrated probabilities in a pipeline
======================================

A table of numbers with gaps and a column of strings. A pipeline fills, scales and encodes it, and a
Gaussian-process classifier at its end gives calibrated probabilities without a calibration step.
Three other classifiers are fitted to the same folds.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.calibration import CalibrationDisplay
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from sklearn_ep import EPGaussianProcessClassifier

# %%
# Five hundred patients: risk grows with age, is lowest at a middle value of a marker, and differs
# by clinic.

rng = np.random.default_rng(0)
n = 500
table = pd.DataFrame(
    {
        "age": rng.normal(60, 12, n),
        "marker": rng.normal(2, 1, n),
        "pressure": rng.normal(130, 15, n),
        "clinic": rng.choice(["north", "south", "east"], n),
    }
)
log_odds = (
    (table["age"] - 60) / 12
    + (table["marker"] - 2) ** 2
    - 1.5
    + table["clinic"].map({"north": 0.8, "south": 0.0, "east": -0.8})
)
ill = rng.uniform(size=n) < 1 / (1 + np.exp(-log_odds))
table.loc[rng.uniform(size=n) < 0.05, "marker"] = np.nan


def pipeline(classifier):
    """Impute and scale the numbers, encode the strings, then classify."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = make_column_transformer(
        (numbers, ["age", "marker", "pressure"]), (OneHotEncoder(), ["clinic"])
    )
    return make_pipeline(columns, classifier)


# %%
# Held-out probabilities of every row from five folds.

models = {
    "EP Gaussian process": EPGaussianProcessClassifier(),
    "random forest": RandomForestClassifier(random_state=0),
    "boosting": HistGradientBoostingClassifier(random_state=0),
    "naive Bayes": GaussianNB(),
}
folds = StratifiedKFold(5, shuffle=True, random_state=0)
fig, ax = plt.subplots(figsize=(6.5, 5.5), layout="constrained")
for name, model in models.items():
    proba = cross_val_predict(pipeline(model), table, ill, cv=folds, method="predict_proba")[:, 1]
    loss = log_loss(ill, proba)
    print(f"{name:22} log loss {loss:.3f}")
    CalibrationDisplay.from_predictions(
        ill, proba, n_bins=8, strategy="quantile", name=f"{name} ({loss:.3f})", ax=ax
    )
ax.set_title("Frequency against probability, held out (log loss)")
plt.show()

# %%
# The probabilities of the Gaussian process lie along the diagonal without a calibration step, and
# its log loss is the smallest of the four.
