"""Spike-and-slab regression on real wide data against its own posterior, by a long chain.

    python doc/benchmarks/spike_slab_posterior.py --data FOLDER           all folds, 4000 steps
    python doc/benchmarks/spike_slab_posterior.py --data FOLDER --quick   one fold, 1000 steps

Does EP fall short of the lasso because it approximates, or because the model does? Chains are
exact: models and the ratio of slab variance to noise are drawn, with noise, inclusion and
coefficients integrated out and the priors that fits to correlated columns have. Two sets of chains,
of different seeds, say whether they have mixed.
"""

import pathlib

from common import arguments, cpu, save, table

import numpy as np
from scipy.stats import norm
from sklearn.linear_model import LassoCV
from sklearn.model_selection import KFold

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.spike_slab._chains import ModelChains
from sklearn_ep.spike_slab._hyperparameters import HyperPrior
from sklearn_ep.spike_slab._model_law import ModelLaw
from sklearn_ep.spike_slab._plan import make_plan
from sklearn_ep.spike_slab._posterior import mixture_of_draws


def long_chain(X, y, X_new, y_new, seed, n_steps):
    """Predictive mean, negative log density of y_new and inclusion, by chains side by side."""
    plan = make_plan(SpikeSlabRegressor(), X, y, None, None)
    worth = plan.problem.model.n_independent(plan.n_different)
    law = ModelLaw(
        plan.problem, plan.space, HyperPrior.of_correlated(plan.space, X.shape[1], worth)
    )
    chains = ModelChains(law, np.random.default_rng(seed))
    chains.round(n_steps // 4)
    draws = chains.round(n_steps)
    mixture = mixture_of_draws(plan.units, law, draws, seed)
    mean, var = mixture.predictive(X_new, True)
    return mean, -norm.logpdf(y_new, mean, np.sqrt(var)).mean(), mixture.inclusion


def fold_rows(X, y, train, test, n_steps):
    """Rows of figures of one fold: ours, at the mode, the chains and the lasso."""
    known = (X[train], y[train])
    rows = []

    def add(method, mean, loss, seconds, size=np.nan):
        mse = float(np.mean((y[test] - mean) ** 2))
        rows.append(dict(method=method, mse=mse, neg_log_density=loss, size=size, cpu=seconds))

    for how in ("integrate", "mode"):
        reg, seconds = cpu(lambda how=how: SpikeSlabRegressor(hyperparameters=how).fit(*known))
        mean, std = reg.predict(X[test], return_std=True)
        loss = -norm.logpdf(y[test], mean, std).mean()
        add(f"SpikeSlab, {how}", mean, loss, seconds, reg.expected_model_size_)
    for seed in (0, 1):
        (mean, loss, on), seconds = cpu(
            lambda seed=seed: long_chain(*known, X[test], y[test], seed, n_steps)
        )
        add(f"chain {seed + 1}", mean, loss, seconds, float(on.sum()))
    lasso, seconds = cpu(lambda: LassoCV(cv=5).fit(*known))
    add("LassoCV", lasso.predict(X[test]), np.nan, seconds)
    return rows


def main():
    """Compare on eyedata and riboflavin, whose columns and response are standardised."""
    args = arguments(__doc__.splitlines()[0])
    out = []
    for name, n_folds in (("eyedata", 5), ("riboflavin", 2)):
        path = pathlib.Path(args.data or ".") / f"{name}.npz"
        if not path.exists():
            continue
        with np.load(path) as z:
            X, y = z["X"].astype(float), z["y"].astype(float)
        y = (y - y.mean()) / y.std()
        folds = list(KFold(n_folds, shuffle=True, random_state=0).split(X))
        folds, n_steps = (folds[:1], 1000) if args.quick else (folds, 4000)
        found = [fold_rows(X, y, *fold, n_steps) for fold in folds]
        for same in zip(*found, strict=True):
            keys = [k for k in same[0] if k != "method"]
            figures = {k: float(np.mean([row[k] for row in same])) for k in keys}
            out.append(dict(set=name, method=same[0]["method"], **figures))
    if out:
        table(out, list(out[0]))
    save(args, "spike_slab_posterior", out)


if __name__ == "__main__":
    main()
