"""Hierarchical logistic regression: the simulated experiments of Gelman et al. (2014), and peers.

    python doc/benchmarks/hierarchical.py                 Figures 4 and 5, growth, about a minute
    python doc/benchmarks/hierarchical.py --quick         Figure 4 and small sizes
    python doc/benchmarks/hierarchical.py --data FOLDER   also held-out log loss on NAME.npz files
                                                          with arrays X, y and group

Figure 4: 50 groups of 50 rows, 50 columns; Figure 5: 1000 groups. The truth is known, so coverage
and error are counted. Peers run where they are installed: GPBoost (Laplace), statsmodels
(variational), and the sampler of nutpie (NUTS) as the engine of a single partition, which is then a
chain over the whole posterior.
"""

from common import alternate, arguments, cpu, figure, log_loss, save, table

import importlib.util
import pathlib

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.datasets import make_hierarchical_logistic


def ours(**kw):
    return HierarchicalEPLogistic(fit_intercept=False, **kw)


def gpboost_fit(X, y, groups):
    """Coefficients and standard errors of GPBoost, or None without it."""
    try:
        import gpboost
    except ImportError:
        return None

    def fit():
        model = gpboost.GPModel(
            group_data=groups, likelihood="bernoulli_logit", num_parallel_threads=1
        )
        model.fit(y=y.astype(float), X=X)
        return np.asarray(model.get_coef(std_err=True))

    return fit


def statsmodels_fit(X, y, groups):
    """Means and standard deviations of statsmodels' variational fit, or None without it."""
    try:
        from scipy.sparse import csr_matrix
        from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM
    except ImportError:
        return None
    indicator = csr_matrix((np.ones(len(y)), (np.arange(len(y)), groups)))

    def fit():
        ident = np.zeros(indicator.shape[1], dtype=int)
        model = BinomialBayesMixedGLM(y, X, indicator, ident, vcp_p=1.5, fe_p=2.5).fit_vb()
        return np.stack([model.fe_mean, model.fe_sd])

    return fit


def coefficients(result):
    """Means and standard deviations out of any peer's result."""
    if isinstance(result, np.ndarray):
        return result[0], result[1]
    return result.coef_[0], result.coef_std_[0]


def experiment(name, n_groups, repeats, engines):
    """Fit every engine and peer on one simulated set; rows of the table, and the fits."""
    X, y, groups, coef, _ = make_hierarchical_logistic(n_groups, random_state=1)
    calls = {
        label: lambda kw=kw: ours(**kw).fit(X, y, groups=groups) for label, kw in engines.items()
    }
    peers = {"GPBoost": gpboost_fit}
    if n_groups <= 100:  # minutes beyond
        peers["statsmodels"] = statsmodels_fit
    calls.update({k: f(X, y, groups) for k, f in peers.items() if f(X, y, groups) is not None})
    timed, rows = alternate(calls, repeats), []
    if n_groups <= 100 and importlib.util.find_spec("nutpie"):
        chain = ours(engine="nuts", n_partitions=1, random_state=0)
        timed |= alternate({"NUTS (nutpie)": lambda: chain.fit(X, y, groups=groups)}, 1)
    for label, (result, seconds) in timed.items():
        mean, sd = coefficients(result)
        off = np.abs(mean - coef) / sd
        row = {"set": name, "method": label, "CPU s": seconds}
        row["rms error"] = float(np.sqrt(np.mean((mean - coef) ** 2)))
        row["within 1 sd"], row["within 2 sd"] = float(np.mean(off < 1)), float(np.mean(off < 2))
        if not isinstance(result, np.ndarray):
            low, high = result.tau_interval_[0]
            row["tau (90 %)"] = f"{result.tau_[0]:.2f} ({low:.2f} to {high:.2f})"
            row["sweeps"] = result.n_iter_
        rows.append(row)
    return rows, coef, {k: r for k, (r, _) in timed.items() if not isinstance(r, np.ndarray)}


def growth(sizes):
    """Seconds of a fit against rows and groups."""
    rows = []
    for n_groups, n_per_group in sizes:
        X, y, groups, *_ = make_hierarchical_logistic(n_groups, n_per_group, 10, random_state=0)
        fit, seconds = cpu(lambda X=X, y=y, g=groups: ours(refine=False).fit(X, y, groups=g))
        rows.append({"rows": len(y), "groups": n_groups, "CPU s": seconds, "sweeps": fit.n_iter_})
    return rows


def real(folder):
    """Held-out log loss over five folds on every binary set with groups in a folder."""
    rows = []
    for path in sorted(pathlib.Path(folder).glob("*.npz")):
        with np.load(path) as file:
            if "group" in file.files and len(np.unique(file["y"])) == 2:
                sizes = {"set": path.stem, "rows": len(file["y"])}
                rows.append(sizes | held_out(file["X"], file["y"], file["group"]))
    return rows


def held_out(X, y, group):
    """Log loss over five folds, the group a column of X, against pooled regression."""
    X, y, cv = X.astype(float), y.astype(int), StratifiedKFold(5, shuffle=True, random_state=0)
    X = X[:, X.std(0) > 0]
    X = np.column_stack([(X - X.mean(0)) / X.std(0), group.astype(float)])
    model = HierarchicalEPLogistic(group_column=X.shape[1] - 1)
    proba, seconds = cpu(lambda: cross_val_predict(model, X, y, cv=cv, method="predict_proba"))
    pooled = LogisticRegression(C=6.25)
    pooled = cross_val_predict(pooled, X[:, :-1], y, cv=cv, method="predict_proba")
    return {
        "groups": len(np.unique(group)),
        "log loss": log_loss(proba, y),
        "pooled": log_loss(pooled, y),
        "CPU s": seconds,
    }


def draw(args, outcomes):
    """Convergence of the sweeps, and estimates against truth, one column a set."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        2, len(outcomes), figsize=(5 * len(outcomes), 8), layout="constrained", squeeze=False
    )
    for k, (name, (coef, fits)) in enumerate(outcomes.items()):
        for label in ("EP", "Laplace"):  # the grid comes after the sweeps
            residual = fits[label].history_["residual"]
            axes[0, k].semilogy(np.arange(1, len(residual) + 1), residual, "o-", label=label)
        axes[0, k].axhline(1e-3, color="0.5", linestyle="--", label="tolerance")
        axes[0, k].set(title=name, xlabel="sweep", ylabel="undamped change, posterior sd")
        axes[0, k].legend()
        fit = fits["EP"]
        mean, sd = coefficients(fit)
        axes[1, k].errorbar(coef, mean, yerr=2 * sd, fmt="o", markersize=3, elinewidth=1)
        ends = [coef.min(), coef.max()]
        axes[1, k].plot(ends, ends, color="0.5", linestyle="--")
        axes[1, k].set(xlabel="true coefficient", ylabel="EP mean and 2 sd")
    figure(args, "hierarchical", fig)


def main():
    args = arguments(__doc__.splitlines()[0])
    engines = {"EP": {}, "EP, no grid": {"refine": False}, "Laplace": {"engine": "laplace"}}
    engines["Laplace"]["refine"] = False
    sets = {"Figure 4": (50, 3)} if args.quick else {"Figure 4": (50, 3), "Figure 5": (1000, 1)}
    rows, outcomes = [], {}
    for name, (n_groups, repeats) in sets.items():
        found, coef, fits = experiment(name, n_groups, repeats, engines)
        rows += found
        outcomes[name] = coef, fits
    columns = ["set", "method", "CPU s", "rms error", "within 1 sd", "within 2 sd", "tau (90 %)"]
    table(rows, [*columns, "sweeps"])
    sizes = [(100, 10), (400, 10), (1600, 10), (100, 40), (100, 160)]
    grown = growth(sizes[:2] if args.quick else [*sizes, (6400, 10), (100, 640)])
    table(grown, ["rows", "groups", "CPU s", "sweeps"])
    real_sets = real(args.data) if args.data else []
    if real_sets:
        table(real_sets, ["set", "rows", "groups", "log loss", "pooled", "CPU s"])
    save(args, "hierarchical", {"experiments": rows, "growth": grown, "real": real_sets})
    draw(args, outcomes)


if __name__ == "__main__":
    main()
