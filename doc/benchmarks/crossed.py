"""Several grouping factors: generated crossed sets from 1e4 to 1e6 rows, and real ones, with peers.

    python doc/benchmarks/crossed.py                 generated sets, two minutes
    python doc/benchmarks/crossed.py --quick         up to 10,000 rows
    python doc/benchmarks/crossed.py --data FOLDER   also held-out log loss on verb_agg.npz (persons
                                                     and items) and gu_prenat.npz (mothers in
                                                     communities), arrays X, y, group and group2

Scales are compared with the standard deviations of the effects that were drawn. Peers run where
they are installed: GPBoost (marginal Laplace, with standard errors) and statsmodels (variational),
one thread each.
"""

from common import alternate, arguments, cpu, log_loss, save, table

import pathlib

import numpy as np
from scipy.sparse import csr_matrix, hstack
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from sklearn_ep import HierarchicalEPLogistic

QUICK = [(10_000, (1000, 100), (1.0, 1.0)), (10_000, (3000, 300), (2.0, 1.0))]
FULL = [*QUICK, (100_000, (10_000, 1000), (1.0, 1.0)), (1_000_000, (100_000, 10_000), (1.0, 0.7))]
MOST_STATSMODELS, MOST_GPBOOST = 10**7, 10**9  # rows times levels; minutes beyond


def simulated(n, levels, taus, seed=1):
    """Rows with three columns, the last of ones, and a level of each factor."""
    rng = np.random.default_rng(seed)
    codes = [np.r_[np.arange(k), rng.integers(k, size=n - k)] for k in levels]
    X = np.column_stack([rng.normal(size=(n, 2)), np.ones(n)])
    effects = [tau * rng.normal(size=k) for tau, k in zip(taus, levels, strict=True)]
    z = X @ [1.0, -1.0, -0.5] + sum(a[c] for a, c in zip(effects, codes, strict=True))
    y = (rng.random(n) < expit(z)).astype(int)
    return X, y, np.column_stack(codes), np.array([np.log(np.std(a)) for a in effects])


def ours(X, y, G, **kw):
    factors = list(range(X.shape[1], X.shape[1] + G.shape[1]))
    return HierarchicalEPLogistic(factors, fit_intercept=False, **kw).fit(
        np.column_stack([X, G]), y
    )


def gpboost_fit(X, y, G):
    """Log scales of GPBoost, or None without it."""
    try:
        import gpboost
    except ImportError:
        return None

    def fit():
        model = gpboost.GPModel(group_data=G, likelihood="bernoulli_logit", num_parallel_threads=1)
        model.fit(y=y.astype(float), X=X)
        model.get_coef(std_err=True)
        return 0.5 * np.log(np.ravel(model.get_cov_pars())[: G.shape[1]])

    return fit


def statsmodels_fit(X, y, G):
    """Log scales of statsmodels' variational fit, or None without it."""
    try:
        from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM
    except ImportError:
        return None
    n = len(y)
    indicators = [csr_matrix((np.ones(n), (np.arange(n), code))) for code in G.T]
    ident = np.repeat(np.arange(G.shape[1]), [m.shape[1] for m in indicators])

    def fit():
        design = hstack(indicators, format="csr")
        return BinomialBayesMixedGLM(y, X, design, ident, vcp_p=1.5, fe_p=2.5).fit_vb().vcp_mean

    return fit


def generated(sizes):
    """CPU seconds and errors of log scales of every method on generated sets."""
    rows = []
    for n, levels, taus in sizes:
        X, y, G, true = simulated(n, levels, taus)
        calls = {"messages": lambda X=X, y=y, G=G: ours(X, y, G, engine="messages")}
        if levels[1] <= 300 and n <= 10_000:
            calls["ep"] = lambda X=X, y=y, G=G: ours(X, y, G, engine="ep")
        peers = {"GPBoost": (gpboost_fit, MOST_GPBOOST)}
        peers["statsmodels"] = statsmodels_fit, MOST_STATSMODELS
        for name, (make, most) in peers.items():
            call = make(X, y, G)
            if call is not None and n * levels[0] <= most:
                calls[name] = call
        for label, (result, seconds) in alternate(calls, 1).items():
            log_tau = result if isinstance(result, np.ndarray) else np.log(result.tau_)
            row = {"rows": n, "levels": " x ".join(map(str, levels)), "method": label}
            row |= {"CPU s": seconds, "CPU us a row": 1e6 * seconds / n}
            for f, gap in enumerate(log_tau - true):
                row[f"log tau {f + 1} - true"] = float(gap)
            rows.append(row)
    return rows


def real(folder):
    """Held-out log loss over five folds with one factor and with both, and the scales."""
    rows = []
    for name in ("verb_agg", "gu_prenat"):
        path = pathlib.Path(folder) / f"{name}.npz"
        if path.exists():
            with np.load(path) as file:
                groups = [np.unique(file[k], return_inverse=True)[1] for k in ("group", "group2")]
                X, y = file["X"].astype(float), file["y"].astype(int)
            X = X[:, X.std(0) > 0]
            rows += held_out(name, (X - X.mean(0)) / X.std(0), y, np.column_stack(groups))
    return rows


def held_out(name, X, y, G):
    """Rows of the table for one set, the factors as columns of X."""
    cv, d, rows = StratifiedKFold(5, shuffle=True, random_state=0), X.shape[1], []
    pooled = cross_val_predict(LogisticRegression(C=6.25), X, y, cv=cv, method="predict_proba")
    for label, k in {"first": 1, "both": 2}.items():
        Z = np.column_stack([X, G[:, :k]])
        model = HierarchicalEPLogistic(list(range(d, d + k)))
        fit, seconds = cpu(lambda m=model, Z=Z: m.fit(Z, y))
        proba = cross_val_predict(model, Z, y, cv=cv, method="predict_proba")
        row = {"set": name, "rows": len(y), "factors": label, "log loss": log_loss(proba, y)}
        row |= {"pooled": log_loss(pooled, y), "tau": ", ".join(f"{t:.2f}" for t in fit.tau_)}
        rows.append(row | {"CPU s of a fit": seconds})
    return rows


if __name__ == "__main__":
    args = arguments(__doc__)
    result = {"generated": generated(QUICK if args.quick else FULL)}
    scales = ["log tau 1 - true", "log tau 2 - true"]
    table(result["generated"], ["rows", "levels", "method", "CPU s", "CPU us a row", *scales])
    if args.data:
        result["held out"] = real(args.data)
        columns = ["set", "rows", "factors", "log loss", "pooled", "tau", "CPU s of a fit"]
        table(result["held out"], columns)
    save(args, "crossed", result)
