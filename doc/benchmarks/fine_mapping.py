"""Fine mapping: which of many correlated columns have an effect, spike and slab beside SuSiE.

    python doc/benchmarks/fine_mapping.py --data FOLDER      200 replicates on n3finemapping.npz
    python doc/benchmarks/fine_mapping.py --quick            10 replicates on simulated columns
    python doc/benchmarks/fine_mapping.py --data FOLDER --only SpikeSlab SuSiE     others as stored

Columns are those of 574 people and 1,001 genetic variants (susieR's N3finemapping); without data
they are made, each correlated with its neighbours. Effects are 1 to 5, normal, at random columns,
with .02 to .4 of the variance of y. Peers, where installed: SuSiE (pysusie), abess, and knockoffs
(knockpy) on five replicates, one of each number and of each variance; stability selection with the
lasso on every tenth. A set of level .95 is the smallest that holds an effect with this probability,
given one near, and "stated" is the mean of what sets state: what covers so often is calibrated. The
own rule of the spike and slab for sets is an expected share of false ones of .1, that of SuSiE the
level. At this level the methods have different shares of false sets; so "power of sets at .1 false"
is that of the most sets, in order of what they state, of which a tenth has no effect; of SuSiE's
levels, six, that of the best one.
"""

import pathlib
import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from common import arguments, cpu, figure, save, stored_rows, table

import matplotlib
import numpy as np
from sklearn.linear_model import Lasso, LassoCV

from sklearn_ep import SpikeSlabRegressor

matplotlib.use("Agg")

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of the variance of y
LEVELS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
SPARED = 41  # of so many replicates one has knockoffs, which take a minute
CLIP = 1e-6  # SuSiE gives probabilities of exactly zero


def columns(args):
    """Return standardised columns."""
    path = pathlib.Path(args.data or "") / "n3finemapping.npz"
    if args.data and path.exists():
        with np.load(path) as z:
            X = z["X"].astype(float)
    else:
        X = np.random.default_rng(0).standard_normal((300, 200))
        for j in range(1, X.shape[1]):
            near = 0.97 if j % 20 else 0.0
            X[:, j] = near * X[:, j - 1] + np.sqrt(1 - near**2) * X[:, j]
    return (X - X.mean(axis=0)) / X.std(axis=0)


def replicate(X, seed):
    """Return responses and which columns have an effect."""
    rng, d = np.random.default_rng(1000 + seed), X.shape[1]
    k, share = 1 + seed % 5, SHARES[seed // 5 % 5]
    effect = np.zeros(d)
    effect[rng.choice(d, k, replace=False)] = rng.standard_normal(k)
    effect *= np.sqrt(share) / (X @ effect).std()
    return X @ effect + np.sqrt(1 - share) * rng.standard_normal(len(X)), effect != 0


class Found(NamedTuple):
    """What a method finds: inclusion, columns chosen, and sets of a level with what they state."""

    inclusion: Any
    chosen: np.ndarray
    sets: Any = None  # by name, the first ones of level .95: functions, or what they give


def spike_slab(X, y):
    """Find sets, and columns at an expected share of false ones of .1."""
    reg = SpikeSlabRegressor().fit(X, y)

    def sets(fdr):
        found = reg.credible_sets(LEVELS[0], fdr=fdr)
        return list(found), found.probability

    sets(None)
    kinds = {"level": None, "own rule": 0.1, "all": 0.5}
    by_kind = {kind: partial(sets, fdr) for kind, fdr in kinds.items()}
    return Found(reg.inclusion_proba_, reg.get_support(fdr=0.1), by_kind)


def susie(X, y):
    """Find sets, and columns by the same rule."""
    import pysusie

    fit = pysusie.susie(X, y, L=10)
    on = np.asarray(pysusie.susie_get_pip(fit))

    def sets(level):
        found = pysusie.susie_get_cs(fit, X=X, coverage=level)
        if found["cs"] is None:
            return [], []
        return [np.asarray(s) for s in found["cs"]], found["coverage"]

    sets(LEVELS[0])
    order = np.argsort(-on)
    wrong = np.cumsum(1 - on[order]) / np.arange(1, len(on) + 1)
    chosen = np.zeros(len(on), bool)
    chosen[order[: np.count_nonzero(wrong <= 0.1)]] = True
    return Found(on, chosen, {level: partial(sets, level) for level in LEVELS})


def abess(X, y):
    """Columns of the best subset of up to 10."""
    from abess.linear import LinearRegression

    return Found(None, LinearRegression(support_size=range(11)).fit(X, y).coef_ != 0)


def stability(X, y):
    """Columns that the lasso keeps in six of ten halves."""
    rng, alpha, times = np.random.default_rng(0), LassoCV(cv=5).fit(X, y).alpha_, 0
    for _ in range(20):
        half = rng.permutation(len(y))[: len(y) // 2]
        times = times + (Lasso(alpha).fit(X[half], y[half]).coef_ != 0)
    return Found(None, times >= 12)


def knockoffs(X, y):
    """Columns by Gaussian knockoffs and the lasso, at a false discovery rate of .1."""
    from knockpy import KnockoffFilter

    return Found(None, KnockoffFilter("lasso", "gaussian").forward(X, y, fdr=0.1) > 0)


def log_loss(on, truth):
    """Log loss of the inclusion of all columns of a replicate."""
    p = np.clip(np.where(truth, on, 1 - on), CLIP, None)
    return -np.log(p).sum()


def power_at(on, truth, share=0.1):
    """Largest power of a common threshold whose share of false discoveries is at most so."""
    right = truth[np.argsort(-on, kind="stable")]
    found = np.cumsum(right)
    allowed = 1 - found / np.arange(1, len(right) + 1) <= share
    return found[allowed].max(initial=0) / truth.sum()


def calibration(name, on, truth):
    """Expected and true number of effects in each tenth of the inclusion."""
    tenth, rows = np.minimum((10 * on).astype(int), 9), []
    for k in range(10):
        p, seen = on[tenth == k], truth[tenth == k]
        spread = np.sqrt(np.sum(p * (1 - p)))
        gap = (seen.sum() - p.sum()) / spread if spread > 0 else 0.0
        row = dict(method=name, inclusion=f"{k / 10:.1f} to {k / 10 + 0.1:.1f}", columns=len(p))
        rows.append({**row, "expected": p.sum(), "effects": int(seen.sum()), "gap, sd": gap})
    return rows


def tabulated(out, truths, kind):
    """Return what the sets of a kind state, how many effects they hold, and their sizes."""
    rows = [
        (stated, truth[members].sum(), len(members))
        for found, truth in zip(out, truths, strict=True)
        for members, stated in zip(*found.sets[kind], strict=True)
    ]
    return np.reshape(rows, (-1, 3)).T


def power_of_sets(stated, held, n_effects, share=0.1):
    """Largest share of effects in the sets that state most, of which at most a share is false."""
    order = np.argsort(-stated, kind="stable")
    false = np.cumsum(held[order] == 0) / np.arange(1, len(order) + 1)
    return np.cumsum(held[order])[false <= share].max(initial=0.0) / n_effects


def figures_of_sets(out, truths):
    """Figures of the sets of level .95, of those by the own rule of a method, and of all."""
    kinds, n_effects = list(out[0].sets), np.sum(truths)
    own = tabulated(out, truths, "own rule" if "own rule" in kinds else kinds[0])
    stated, held, size = tabulated(out, truths, kinds[0])
    powers = [power_of_sets(*tabulated(out, truths, kind)[:2], n_effects) for kind in kinds]
    return {
        "sets": len(size),
        "coverage": np.mean(held > 0),
        "stated": np.mean(stated),
        "median size": np.median(size),
        "mean size": np.mean(size),
        "power of sets": held.sum() / n_effects,
        "power of sets, own rule": own[1].sum() / n_effects,
        "false sets, own rule": np.mean(own[1] == 0),
        "power of sets at .1 false": max(powers),
    }


def summed(name, out, truths, seconds):
    """One row of a method over its replicates."""
    n_effects = np.sum(truths)
    chosen = np.array([o.chosen for o in out])
    right = np.array(truths) & chosen
    row = dict(method=name, replicates=len(out))
    row["power, own rule"] = right.sum() / n_effects
    row["false, own rule"] = 1 - right.sum() / chosen.sum() if chosen.any() else np.nan
    if out[0].inclusion is not None:
        on = np.array([o.inclusion for o in out])
        losses = [log_loss(p, t) for p, t in zip(on, truths, strict=True)]
        row["log loss"] = np.mean(losses)
        row["expected effects"] = on.sum() / n_effects
        row["power at .1 false"] = power_at(on.ravel(), np.array(truths).ravel())
        row |= figures_of_sets(out, truths)
    row["CPU s, median"], row["CPU s, largest"] = np.median(seconds), np.max(seconds)
    return row


def main():
    """Fit every replicate by every method and tabulate."""
    args = arguments(
        __doc__.splitlines()[0],
        ("--replicates", dict(type=int, default=200)),
        ("--only", dict(nargs="+", help="methods to run; the rows of others stay as stored")),
    )
    methods = dict(SpikeSlab=(spike_slab, 1))
    if find_spec("pysusie"):
        methods["SuSiE"] = (susie, 1)
    if find_spec("abess"):
        methods["abess"] = (abess, 1)
    if find_spec("knockpy"):
        methods["knockoffs"] = (knockoffs, SPARED)
    methods["Lasso, stability"] = (stability, 10)
    stored = []
    if args.only:
        methods = {name: methods[name] for name in args.only}
        stored = [r for r in stored_rows(args, "fine_mapping") if r["method"] not in methods]
    X, found = columns(args), {name: ([], [], []) for name in methods}
    for seed in range(0, 80, 8) if args.quick else range(args.replicates):
        y, truth = replicate(X, seed)
        for name, (method, every) in methods.items():
            if seed % every == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result, seconds = cpu(partial(method, X, y))
                    if result.sets:
                        result = result._replace(sets={k: s() for k, s in result.sets.items()})
                for kept, value in zip(found[name], (result, truth, seconds), strict=True):
                    kept.append(value)
    rows, tenths = [], []
    for name, (out, truths, seconds) in found.items():
        rows.append(summed(name, out, truths, seconds))
        if out[0].inclusion is not None:
            on = np.concatenate([o.inclusion for o in out])
            tenths += calibration(name, on, np.concatenate(truths))
    rows += [r for r in stored if "inclusion" not in r]
    tenths += [r for r in stored if "inclusion" in r]
    peer = "SuSiE" if any(r["method"] == "SuSiE" for r in rows) else "Lasso, stability"
    unit = next(r["CPU s, median"] for r in rows if r["method"] == peer)
    for row in rows:
        row[f"CPU / {peer}"] = row["CPU s, median"] / unit
    table(rows, list(rows[0]))
    table(tenths, list(tenths[0]))
    save(args, "fine_mapping", rows + tenths)
    figure(args, "fine_mapping", draw(tenths))


def draw(tenths):
    """Share of effects against inclusion in each tenth, one line a method."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(4.5, 4), layout="constrained")
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    for name in dict.fromkeys(r["method"] for r in tenths):
        own = [r for r in tenths if r["method"] == name and r["columns"]]
        p = np.array([r["expected"] / r["columns"] for r in own])
        sd = np.sqrt(p * (1 - p) / [r["columns"] for r in own])
        seen = [r["effects"] / r["columns"] for r in own]
        ax.errorbar(p, seen, 1.96 * sd, fmt="o-", markersize=4, capsize=2, label=name)
    ax.set(xlabel="inclusion probability", ylabel="share of columns with an effect")
    ax.legend()
    return fig


if __name__ == "__main__":
    main()
