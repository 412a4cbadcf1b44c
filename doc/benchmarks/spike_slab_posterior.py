"""Spike-and-slab regression on real wide data against its own posterior, by a long chain.

    python doc/benchmarks/spike_slab_posterior.py --data FOLDER           all folds, 1500 sweeps
    python doc/benchmarks/spike_slab_posterior.py --data FOLDER --quick   one fold, 500 sweeps

Does EP fall short of the lasso because it approximates, or because the model does? The chain is
exact: Metropolis over the columns that are in, random walk on the ratio of slab variance to noise,
with noise, inclusion and coefficients integrated out and the priors of the integration. Two chains,
one from the empty model and one from half as many columns as rows, say whether it has mixed.
"""

import pathlib

from common import arguments, cpu, save, table

import numpy as np
from scipy.special import logsumexp
from scipy.stats import norm, t
from sklearn.linear_model import LassoCV
from sklearn.model_selection import KFold

from sklearn_ep import SpikeSlabRegressor
from sklearn_ep.spike_slab._model_evidence import _Chain
from sklearn_ep.spike_slab._plan import make_plan


def log_prior(log_ratio):
    """Log density of the log ratio of slab variance to noise."""
    return log_ratio - 1.5 * np.logaddexp(0.0, log_ratio)


def sweep(chain, rng):
    """As many Metropolis steps as there are columns; those that are refused cost nothing."""
    left = len(chain.on)
    while True:
        gain, share, pivot = chain.gains()
        rate = np.cumsum(np.exp(np.minimum(gain, 0.0)))
        left -= rng.geometric(min(rate[-1] / len(rate), 1.0))
        if left < 0:
            return
        j = int(np.searchsorted(rate, rng.random() * rate[-1]))
        chain.move(j, share[j], pivot[j])


def move_ratio(chain, rng):
    """One random-walk step of the log ratio; makes the matrices of the chain anew."""
    old, before = chain.ratio, chain.log_evidence + log_prior(np.log(chain.ratio))
    chain.ratio = old * np.exp(rng.normal())
    chain.refresh()
    after = chain.log_evidence + log_prior(np.log(chain.ratio))
    if np.log(rng.random()) > after - before:
        chain.ratio = old
        chain.refresh()


def predictive(chain, rows, total):
    """Mean and scale of the Student t of new responses, given model and ratio."""
    part, new, n = chain.X[:, chain.on], rows[:, chain.on], chain.n_rows
    C = np.eye(len(part)) + chain.ratio * (part @ part.T)
    cross = chain.ratio * (new @ part.T)
    mean = cross @ np.linalg.solve(C, chain.y)
    spread = chain.ratio * (new**2).sum(1) - np.einsum(
        "ij,ji->i", cross, np.linalg.solve(C, cross.T)
    )
    return mean, np.sqrt(chain.square / n * (1 + 1 / total + spread))


def long_chain(X, y, X_new, y_new, seed, n_sweeps):
    """Predictive mean, negative log density of y_new, mean size and inclusion, by one chain."""
    plan = make_plan(SpikeSlabRegressor(), X, y, None, None)
    units, rng = plan.units, np.random.default_rng(seed)
    chain = _Chain(plan.problem, 1.0, plan.prior.misses)
    if seed % 2:
        chain.start_at(rng.choice(X.shape[1], len(X) // 2, replace=False))
    rows, target = units.rows(X_new), (y_new - units.y_offset) / units.y_scale
    means, densities, on = [], [], np.zeros(X.shape[1])
    for k in range(n_sweeps):
        sweep(chain, rng)
        move_ratio(chain, rng)
        if k < n_sweeps // 5:
            continue
        on += chain.on
        if k % 10 == 0:
            mean, scale = predictive(chain, rows, units.total)
            means.append(mean)
            densities.append(t.logpdf(target, chain.n_rows, mean, scale) - np.log(units.y_scale))
    density = logsumexp(densities, axis=0) - np.log(len(densities))
    mean = units.y_offset + units.y_scale * np.mean(means, axis=0)
    return mean, -density.mean(), on / (n_sweeps - n_sweeps // 5)


def fold_rows(X, y, train, test, n_sweeps):
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
            lambda seed=seed: long_chain(*known, X[test], y[test], seed, n_sweeps)
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
        folds, n_sweeps = (folds[:1], 500) if args.quick else (folds, 1500)
        found = [fold_rows(X, y, *fold, n_sweeps) for fold in folds]
        for same in zip(*found, strict=True):
            keys = [k for k in same[0] if k != "method"]
            figures = {k: float(np.mean([row[k] for row in same])) for k in keys}
            out.append(dict(set=name, method=same[0]["method"], **figures))
    if out:
        table(out, list(out[0]))
    save(args, "spike_slab_posterior", out)


if __name__ == "__main__":
    main()
