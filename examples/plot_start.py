"""
Honest probabilities in one call
================================

The stacked classifier, and a Gaussian-process classifier with the posterior of expectation
propagation (EP), on the breast cancer data that ship with scikit-learn. Beside them are three peers
on the same split: scikit-learn's own Gaussian process, which uses the Laplace approximation, with
the same kernel and start; logistic regression; and gradient boosting.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_ep import BayesianStackingClassifier, EPGaussianProcessClassifier
from sklearn_ep.inspection import ConvergenceDisplay, LatentDisplay, ReliabilityDisplay

X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.4, random_state=0, stratify=y)
kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(5.0, (5e-2, 5e3))


def calibration_error(y, proba, n_bins=10):
    """Mean gap between probability and frequency over bins of equal width, weighted by size."""
    bins = np.minimum((proba * n_bins).astype(int), n_bins - 1)
    gaps = np.bincount(bins, y - proba, n_bins)
    return np.abs(gaps).sum() / len(y)


models = {
    "stacked": BayesianStackingClassifier(random_state=0),
    "EP": EPGaussianProcessClassifier(kernel),
    "Laplace": GaussianProcessClassifier(kernel),
    "logistic": LogisticRegression(),
    "boosting": HistGradientBoostingClassifier(random_state=0),
}
print(f"{'':10}{'log loss':>10}{'error':>10}{'calibration error':>20}")
for name, classifier in models.items():
    model = make_pipeline(StandardScaler(), classifier).fit(X_train, y_train)
    proba = model.predict_proba(X_test)
    error = np.mean(model.predict(X_test) != y_test)
    gap = calibration_error(y_test, proba[:, 1])
    print(f"{name:10}{log_loss(y_test, proba):10.4f}{error:10.4f}{gap:20.4f}")

# %%
# The picture: reliability on held-out rows, with the number of rows behind each point and the band
# in which chance leaves a calibrated model; then a fit to two features of 250 rows: how it
# converged, first to the best kernel, then to the average over kernels, whose evidence is lower
# since it counts that the kernel is not known; and its latent function, whose standard deviation
# grows where there are no rows.

scaler = StandardScaler().fit(X_train)
names = ["mean radius", "mean texture"]
pair, labels = scaler.transform(X_train)[:250, :2], y_train[:250]
small = EPGaussianProcessClassifier().fit(pair, labels)

fig, axes = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
ReliabilityDisplay.from_estimator(
    models["EP"], scaler.transform(X_test), y_test, n_bins=5, ax=axes[0]
)
ConvergenceDisplay.from_estimator(small, ax=axes[1])
display = LatentDisplay.from_estimator(small, pair, labels, ax=axes[2])
display.ax_.set(
    title="Probability and latent sd", xlabel=f"{names[0]} (scaled)", ylabel=f"{names[1]} (scaled)"
)
fig.savefig("sklearn_ep_start.png", dpi=110)
print("figure saved as sklearn_ep_start.png")
# %%
# EP has a lower log loss than the Laplace approximation of the same model and than boosting, and
# the mixture of a Gaussian process, a linear and an additive model is a little better. The boundary
# between these classes is nearly linear, and logistic regression is better still: where a simpler
# model holds, it is hard to beat.
