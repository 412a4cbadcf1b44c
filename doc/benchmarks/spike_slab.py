"""Spike-and-slab regression: compressed sensing, real data.

    python doc/benchmarks/spike_slab.py                 full grid
    python doc/benchmarks/spike_slab.py --quick         two cells
    python doc/benchmarks/spike_slab.py --data FOLDER   also five folds of eyedata and riboflavin

Learned fits beside LassoCV and ARDRegression, and abess and SuSiE (pysusie) where installed. The
experiment of the paper, with its variants of EP, is an item of papers.py.
"""

import pathlib
import time
import warnings
from importlib.util import find_spec

from common import arguments, figure, save, table

import matplotlib
import numpy as np
from scipy.stats import norm
from sklearn.linear_model import ARDRegression, BayesianRidge, LassoCV
from sklearn.model_selection import KFold

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.datasets import make_spike_slab_regression

matplotlib.use("Agg")


def against(rows, name, peer):
    """Replace CPU seconds by their ratios to those of a peer in the same rows."""
    unit = next(r["cpu"] for r in rows if r[name] == peer)
    return [
        {**{k: v for k, v in r.items() if k != "cpu"}, f"CPU / {peer}": r["cpu"] / unit}
        for r in rows
    ]


class Susie:
    """SuSiE behind the methods that this script uses; 30 effects, as many as any cell has."""

    def fit(self, X, y):
        """Fit by iterative Bayesian stepwise selection."""
        import pysusie

        self.result = pysusie.susie(X, y, L=30)
        self.coef_ = pysusie.coef_susie(self.result)[1:]
        self.on = pysusie.susie_get_pip(self.result) > 0.5
        return self

    def predict(self, X):
        """Return posterior mean responses."""
        import pysusie

        return pysusie.predict_susie(self.result, X)

    def get_support(self):
        """Return the columns with a posterior inclusion probability above one half."""
        return self.on


def peers(n):
    """Fresh regressors by name, for n rows; best subsets have at most half as many columns."""
    out = dict(SpikeSlab=SpikeSlabRegressor(), LassoCV=LassoCV(cv=5), ARDRegression=ARDRegression())
    if find_spec("abess"):
        from abess.linear import LinearRegression

        out["abess"] = LinearRegression(support_size=range(n // 2 + 1))
    if find_spec("pysusie"):
        out["SuSiE"] = Susie()
    return out


def support_score(reg, coef):
    """F1 of the support: columns more likely in than out, or with a coefficient that matters."""
    w = np.abs(np.ravel(reg.coef_))
    on = reg.get_support() if hasattr(reg, "get_support") else w > 1e-3 * w.max()
    return 2 * np.sum(on & (coef != 0)) / max(on.sum() + np.sum(coef != 0), 1)


def scores(reg, X, y, X_new, y_new):
    """Test error, negative log predictive density (nan without one) and CPU seconds."""
    start = time.process_time()
    reg.fit(X, y)
    seconds = time.process_time() - start
    density = np.nan
    if isinstance(reg, SpikeSlabRegressor | ARDRegression | BayesianRidge):
        mean, std = reg.predict(X_new, return_std=True)
        density = -norm.logpdf(y_new, mean, std).mean()
    return np.mean((y_new - np.ravel(reg.predict(X_new))) ** 2), density, seconds


def compressed_sensing(quick):
    """Errors over a grid of features, rows and nonzero coefficients."""
    grid = [(200, 40, 4), (200, 40, 8), (200, 40, 12), (200, 80, 8), (200, 80, 16), (200, 80, 24)]
    grid += [(500, 100, 10), (500, 100, 20), (500, 100, 30)]
    rows = []
    for d, n, k in [grid[1], grid[4]] if quick else grid:
        cell = []
        for name in peers(n):
            out = []
            for seed in range(2 if quick else 4):
                X, y, coef = make_spike_slab_regression(
                    n + 500, d, n_informative=k, random_state=seed
                )
                reg = peers(n)[name]
                found = scores(reg, X[:n], y[:n], X[n:], y[n:])
                out.append((*found, support_score(reg, coef)))
            mse, density, seconds, f1 = np.mean(out, axis=0)
            row = dict(d=d, n=n, k=k, method=name, mse=mse, f1=f1)
            cell.append({**row, "neg_log_density": density, "cpu": seconds})
        rows += against(cell, "method", "LassoCV")
    return rows


def real(folder):
    """Folds of real sets whose columns and response are standardised."""
    rows = []
    for name, folds in (("eyedata", 5), ("riboflavin", 2)):
        path = pathlib.Path(folder) / f"{name}.npz"
        if not path.exists():
            continue
        with np.load(path) as z:
            X, y = z["X"].astype(float), z["y"].astype(float)
        y = (y - y.mean()) / y.std()
        split = list(KFold(folds, shuffle=True, random_state=0).split(X))
        own = []
        for method, make in (
            ("SpikeSlab", SpikeSlabRegressor),
            ("LassoCV", lambda: LassoCV(cv=5)),
            ("BayesianRidge", BayesianRidge),
        ):
            out = [scores(make(), X[a], y[a], X[b], y[b]) for a, b in split]
            mse, density, seconds = np.mean(out, axis=0)
            own.append(dict(set=name, method=method, mse=mse, neg_log_density=density, cpu=seconds))
        rows += against(own, "method", "LassoCV")
    return rows


def draw(rows):
    """Test errors of the grid, one group of bars a cell."""
    import matplotlib.pyplot as plt

    cells = list(dict.fromkeys((r["d"], r["n"], r["k"]) for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    width = 0.75 / len(methods)
    fig, ax = plt.subplots(figsize=(8, 3.5), layout="constrained")
    for i, method in enumerate(methods):
        mse = [r["mse"] for r in rows if r["method"] == method]
        ax.bar(np.arange(len(cells)) + i * width, mse, 0.9 * width, label=method)
    ax.axhline(0.01, color="0.5", linestyle="--", linewidth=0.8, label="noise")
    ax.set_xticks(
        np.arange(len(cells)) + 0.375 - 0.5 * width, [f"{n} x {d}\n{k}" for d, n, k in cells]
    )
    ax.set(
        yscale="log",
        ylabel="test mean squared error",
        xlabel="rows x features, nonzero coefficients",
    )
    fig.legend(loc="outside upper center", ncols=len(methods) + 1)
    return fig


def main():
    """Run all tables."""
    args = arguments(__doc__.splitlines()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grid = compressed_sensing(args.quick)
        table(grid, list(grid[0]))
        sets = real(args.data) if args.data else []
    if sets:
        table(sets, list(sets[0]))
    save(args, "spike_slab", [*grid, *sets])
    figure(args, "spike_slab", draw(grid))


if __name__ == "__main__":
    main()
