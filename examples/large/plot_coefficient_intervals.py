"""
Coefficients with intervals
===========================

The point estimate of a logistic regression does not say which coefficients are certain. The breast
cancer data have ten measurements, and of each the mean, the standard error and the worst value. So
columns are strongly correlated, and most coefficients are uncertain one by one.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.inspection import CoefficientIntervalDisplay

data = load_breast_cancer(as_frame=True)
X = StandardScaler().set_output(transform="pandas").fit_transform(data.data)
clf = ConvexVariationalLogistic(learn_prior=True, max_iter=50).fit(X, data.target)
print(f"prior variance {clf.prior_variance_:.2f}, log evidence {clf.log_evidence_:.2f}")

# %%
# Intervals hold 90 % of the posterior of each coefficient.

fig, ax = plt.subplots(figsize=(8, 8), layout="constrained")
CoefficientIntervalDisplay.from_estimator(clf, ax=ax)
plt.show()

# %%
# Draws show what intervals cannot: of two columns that measure the same, the sum of the
# coefficients is known better than each of them. The pair with the strongest correlation:

draws = clf.sample_posterior(2000, random_state=0)[:, : X.shape[1]]
correlation = np.corrcoef(draws.T) - np.eye(X.shape[1])
a, b = np.unravel_index(np.argmax(np.abs(correlation)), correlation.shape)
print(f"{X.columns[a]} and {X.columns[b]}: correlation {correlation[a, b]:.2f}")
