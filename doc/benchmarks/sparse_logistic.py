"""Convex variational logistic regression against point estimates on sparse data.

    python doc/benchmarks/sparse_logistic.py            50000 x 40000
    python doc/benchmarks/sparse_logistic.py --quick    4000 x 2000

The same prior for all; "lbfgs" and "newton-cg" are converged (tol=1e-8), the others have their
default tolerance. Calibration error is the mean gap of 15 bins. A second table compares posterior
means and standard deviations with a long Gibbs run (Polya-Gamma augmentation), on problems small
enough for it. With --data FOLDER, log loss on a9a, rt_polarity and rcv1_small follows.
"""

import importlib.util
import pathlib

from common import alternate, arguments, log_loss, save, table

import numpy as np
import scipy.sparse as sp
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.datasets import make_sparse_logistic


def calibration_error(p, y, bins=15):
    """Mean gap between predicted and observed frequency over equal bins of the probability."""
    which = np.minimum((p * bins).astype(int), bins - 1)
    gaps = [
        abs(p[which == b].mean() - y[which == b].mean()) * np.mean(which == b)
        for b in np.unique(which)
    ]
    return float(np.sum(gaps))


def advi(X, y, prior_variance):
    """Return mean-field ADVI of NumPyro as a callable, or None without NumPyro."""
    if importlib.util.find_spec("numpyro") is None:
        return None
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDiagonalNormal

    dense, labels = jnp.asarray(X.toarray()), jnp.asarray(y)

    def model():
        scale = prior_variance**0.5
        u = numpyro.sample("u", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=dense @ u), obs=labels)

    def fit():
        guide = AutoDiagonalNormal(model)
        svi = SVI(model, guide, numpyro.optim.Adam(0.02), Trace_ELBO())
        result = svi.run(jax.random.PRNGKey(0), 3000, progress_bar=False)
        draws = guide.sample_posterior(jax.random.PRNGKey(1), result.params, sample_shape=(1000,))
        draws = np.asarray(draws["u"])
        return draws.mean(0), draws.std(0)

    return fit


def large(quick):
    """Time, log loss and calibration of all peers on the same rows."""
    q, n = (4000, 2000) if quick else (50_000, 40_000)
    X, y, _ = make_sparse_logistic(
        q + 10_000, n, n_per_row=75, n_informative=n // 30, random_state=0
    )
    X, y, X_new, y_new = X[:q], y[:q], X[q:], y[q:]
    v, intercept = 9.0, dict(fit_intercept=False)

    def ours(**kw):
        return ConvexVariationalLogistic(
            v, variance="calibrated", random_state=0, **intercept, **kw
        ).fit(X, y)

    def peer(**kw):
        return LogisticRegression(C=v, max_iter=2000, **intercept, **kw).fit(X, y)

    calls = {
        "convex KL": lambda: ours(),
        "convex local": lambda: ours(bound="local"),
        "lbfgs": lambda: peer(tol=1e-8),
        "newton-cg": lambda: peer(solver="newton-cg", tol=1e-8),
        "lbfgs, default tol": lambda: peer(),
        "saga, default tol": lambda: peer(solver="saga"),
    }
    mean_field = advi(X, y, v) if quick else None
    if mean_field is not None:
        calls["ADVI (NumPyro)"] = mean_field
    timed = alternate(calls, repeats=3 if quick else 2)
    rows = []
    for name, (model, seconds) in timed.items():
        if name.startswith("ADVI"):
            mean, sd = model
            s, z = X_new @ mean, X_new.multiply(X_new) @ sd**2
            p = expit(s / np.sqrt(1.0 + np.pi * z / 8.0))
            proba = np.column_stack([1 - p, p])
        else:
            proba = model.predict_proba(X_new)
        rows.append(
            {
                "size": f"{q} x {n}",
                "method": name,
                "CPU / lbfgs": seconds / timed["lbfgs"][1],
                "log loss": log_loss(proba, y_new),
                "calibration error": calibration_error(proba[:, 1], y_new),
                "products with X": getattr(model, "n_mvm_", ""),
            }
        )
    return rows


def polya_gamma(c, rng, terms=100):
    """Draw PG(1, c) by its series of gammas, the tail by its mean."""
    k = np.arange(1, terms + 1) - 0.5
    bottom = k**2 + (c[:, None] / (2 * np.pi)) ** 2
    draws = (rng.standard_exponential((len(c), terms)) / bottom).sum(1) / (2 * np.pi**2)
    half = np.maximum(np.abs(c) / 2, 1e-6)
    mean = np.tanh(half) / (4 * half)
    return draws + mean - (1 / bottom).sum(1) / (2 * np.pi**2)


def gibbs(X, y, prior_variance, n_draws, seed=0):
    """Mean and sd of the coefficients by Polya-Gamma Gibbs sampling."""
    rng = np.random.default_rng(seed)
    d = X.shape[1]
    u, kept = np.zeros(d), []
    for draw in range(n_draws + n_draws // 10):
        omega = polya_gamma(X @ u, rng)
        lower = np.linalg.cholesky(np.eye(d) / prior_variance + X.T * omega @ X)
        mean = np.linalg.solve(lower.T, np.linalg.solve(lower, X.T @ (y - 0.5)))
        u = mean + np.linalg.solve(lower.T, rng.standard_normal(d))
        if draw >= n_draws // 10:
            kept.append(u)
    return np.mean(kept, 0), np.std(kept, 0)


def uncertainty(quick):
    """Posterior standard deviations and means against Gibbs sampling."""
    rows = []
    for q, n, v in ((100, 10, 4.0), (400, 20, 1.0)):
        rng = np.random.default_rng(q)
        X = rng.standard_normal((q, n))
        y = (rng.random(q) < expit(X @ rng.standard_normal(n) * v**0.5)).astype(int)
        mean, sd = gibbs(X, y, v, 2000 if quick else 20_000)
        for bound in ("kl", "local"):
            e = ConvexVariationalLogistic(v, bound=bound, fit_intercept=False).fit(X, y)
            rows.append(
                {
                    "size": f"{q} x {n}, prior {v:g}",
                    "method": f"convex {bound}",
                    "sd / Gibbs": float(np.mean(e.coef_std_[0] / sd)),
                    "rms error of the mean, sds": float(
                        np.sqrt(np.mean(((e.coef_[0] - mean) / sd) ** 2))
                    ),
                }
            )
    return rows


def load(folder, name):
    """Return X, y of a sparse set stored as CSR parts, with test parts where it has them."""
    with np.load(pathlib.Path(folder) / f"{name}.npz", allow_pickle=False) as z:
        parts = []
        for prefix in ("", "test_"):
            if prefix + "indptr" in z:
                arrays = [z[prefix + k] for k in ("data", "indices", "indptr")]
                arrays[1] = arrays[1].astype("int32")
                X = sp.csr_matrix(tuple(arrays), shape=tuple(z[prefix + "shape"])).astype(float)
                key = prefix + "y" if prefix + "y" in z else "y_test"
                parts.append((X, z[key].astype(int)))
    return parts


def real(folder, quick):
    """Log loss on real sets at one prior for both, and with the prior learnt."""
    rows = []
    for name, v in (("a9a", 1.0), ("rt_polarity", 30.0), ("rcv1_small", 100.0)):
        if not (pathlib.Path(folder) / f"{name}.npz").exists():
            continue
        parts = load(folder, name)
        X, y = parts[0]
        if name == "rt_polarity":
            X = normalize(X)
        if len(parts) == 1:
            cut = int(0.75 * len(y))  # its rows are in random order
            parts = [(X[:cut], y[:cut]), (X[cut:], y[cut:])]
        (X, y), (X_new, y_new) = parts
        if quick:
            X, y = X[:3000], y[:3000]
        row = {"data": name, "prior variance": v, "rows x columns": f"{X.shape[0]} x {X.shape[1]}"}
        models = {
            "convex KL": ConvexVariationalLogistic(v, random_state=0),
            "convex KL, prior learnt": ConvexVariationalLogistic(
                v, learn_prior=True, random_state=0, max_iter=50
            ),
            "posterior mode": LogisticRegression(C=v, tol=1e-8, max_iter=2000),
        }
        for label, model in models.items():
            row[f"log loss {label}"] = log_loss(model.fit(X, y).predict_proba(X_new), y_new)
        rows.append(row)
    return rows


def main():
    args = arguments(__doc__.splitlines()[0])
    rows = large(args.quick)
    table(rows, list(rows[0]))
    sds = uncertainty(args.quick)
    table(sds, list(sds[0]))
    rows += sds
    if args.data:
        losses = real(args.data, args.quick)
        if losses:
            table(losses, list(losses[0]))
            rows += losses
    save(args, "sparse_logistic", rows)


if __name__ == "__main__":
    main()
