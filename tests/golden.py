"""Golden results of every estimator on fixed data: run as a script, it writes them anew.

    python tests/golden.py

Do that when a change of numbers is wanted, and say why in the commit.
"""

import json
import pathlib

import numpy as np
from sklearn.base import is_classifier
from sklearn.gaussian_process.kernels import RBF

from sklearn_ep import (
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep.sites import StudentTSite

FILE = pathlib.Path(__file__).parent / "data" / "golden.json"
KERNEL = 2.0 * RBF(1.5)
INDUCING = np.linspace(-2, 2, 24).reshape(8, 3)
TIGHT = dict(tol=1e-9, max_iter=300)
CASES = {
    "dense probit": EPGaussianProcessClassifier(KERNEL, method="dense", optimizer=None, **TIGHT),
    "dense logit": EPGaussianProcessClassifier(
        KERNEL, method="dense", likelihood="logit", optimizer=None, **TIGHT
    ),
    "sparse probit": EPGaussianProcessClassifier(
        KERNEL, method="sparse", inducing_points=INDUCING, optimizer=None, **TIGHT
    ),
    "label noise, EP": RelaxedEPClassifier(
        KERNEL, rule="ep", label_noise=0.1, optimizer=None, **TIGHT
    ),
    "label noise, power": RelaxedEPClassifier(
        KERNEL, rule="power", label_noise=0.1, optimizer=None, **TIGHT
    ),
    "spike and slab": SpikeSlabRegressor(
        noise_variance=0.3, slab_variance=1.0, prior_inclusion=0.4, **TIGHT
    ),
    "sparse classes": SpikeSlabClassifier(slab_variance=1.0, prior_inclusion=0.4, **TIGHT),
    "convex, KL": ConvexVariationalLogistic(1.0, calibration=None, inner_tol=1e-11, **TIGHT),
    "convex, local": ConvexVariationalLogistic(
        1.0, calibration=None, bound="local", inner_tol=1e-11, **TIGHT
    ),
    "linear, Student's t": ConvexVariationalRegressor(
        StudentTSite(3.0, 0.5), noise_variance=0.3, **TIGHT
    ),
    "hierarchical": HierarchicalEPLogistic(group_column=3, n_partitions=2, tol=1e-8, max_iter=100),
}


def compute(name):
    """Fit one case and return its numbers as a dict of lists."""
    rng = np.random.default_rng(7)
    X = rng.normal(size=(48, 3))
    groups = np.repeat(np.arange(8), 6)
    z = X @ [1.0, -1.0, 0.0] + 0.8 * rng.normal(size=8)[groups]
    est = CASES[name]
    if name == "hierarchical":
        X = np.column_stack([X, groups])
    y = (z + rng.logistic(size=48) > 0).astype(int) if is_classifier(est) else z
    est.fit(X, y)
    out = {"log_evidence": [est.log_evidence_]}
    if is_classifier(est):
        mean, var = est.latent_mean_and_variance(X[:6])
        out |= {"mean": mean, "var": var, "proba": est.predict_proba(X[:6])[:, 1]}
    else:
        mean, std = est.predict(X[:6], return_std=True)
        out |= {"mean": mean, "std": std}
        if hasattr(est, "inclusion_proba_"):
            out["inclusion"] = est.inclusion_proba_
    return {k: np.asarray(v, dtype=float).tolist() for k, v in out.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: compute(name) for name in CASES}, indent=1) + "\n")
