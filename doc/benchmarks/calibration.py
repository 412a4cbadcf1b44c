"""Calibration by simulation: are probabilities and intervals what they say on own data?

    python doc/benchmarks/calibration.py [--quick] [--only MODEL ...]

Parameters are drawn, data are simulated from them, and the rank of each true parameter among draws
from the posterior is kept. "known": the hyperparameters are given to the fit; "learned": drawn from
their priors and learned; "fixed": one value, learned, from the middle of its prior. No prior is
calibrated at every fixed truth: rates of wrong labels are .2, near the mode of the prior of "auto",
and .1, which nine tenths of that prior are above, and which is the mean of that of "integrate".
Coverage is that of central intervals, its band 2.6 standard errors over data sets; stated
probabilities (inclusion, wrong labels) are held against observed shares in bins, with 2.6 binomial
standard deviations. At a fixed truth, where no exact posterior is nominal, the band is .05 at
least. A run of some models keeps the stored rows of the others, and saves after each setting.
"""

import functools
import warnings

import numpy as np
from common import arguments, figure, save, stored_rows, table
from joblib import Parallel, delayed
from scipy import special
from scipy.stats import beta, norm
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)

LEVELS = (0.5, 0.9, 0.99)
EDGES = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0])
LEAST_CASES = 40  # of a bin that is shown
Z = 2.6
LEAST_AT_FIXED = 0.05  # band of coverage and of stated probabilities at a fixed truth
N_DRAWS = 999


def ranks(draws, truth, rng):
    """Return the shares (...) of draws (S, ...) below the truth, ties shared at random."""
    below, equal = np.mean(draws < truth, axis=0), np.mean(draws == truth, axis=0)
    return below + rng.uniform(size=np.shape(truth)) * equal


def sparse_truth(how, rng, n, d):
    """Return rows, new rows, which columns are in, their coefficients, and what a fit is given."""
    p, v = (0.2, 1.0) if how != "learned" else (rng.beta(1, np.sqrt(d)), slab_ratio(rng))
    X, new = rng.normal(size=(n, d)), rng.normal(size=(20, d))
    on = rng.uniform(size=d) < p
    w = np.where(on, rng.normal(size=d) * np.sqrt(v), 0.0)
    given = dict(slab_variance=v, prior_inclusion=p) if how == "known" else {}
    return X, new, on, w, given


def spike_slab(how, seed, n=60, d=15):
    """Predictor at new rows, and which features are in; noise variance one."""
    rng = np.random.default_rng(seed)
    X, new, on, w, given = sparse_truth(how, rng, n, d)
    y = X @ w + rng.normal(size=n)
    given = {"noise_variance": 1.0, **given} if given else given
    model = SpikeSlabRegressor(standardize=False, fit_intercept=False, **given).fit(X, y)
    draws = model.sample_posterior(N_DRAWS, random_state=seed, exact_zeros=True) @ new.T
    probability = model.inclusion_proba_, on
    return {"predictor": ranks(draws, new @ w, rng)}, {"inclusion": probability}


def sparse_classes(how, seed, n=100, d=15):
    """Predictor at new rows, which features are in, and labels of new rows."""
    rng = np.random.default_rng(seed)
    X, new, on, w, given = sparse_truth(how, rng, n, d)
    y, label = (rows @ w + rng.normal(size=len(rows)) > 0 for rows in (X, new))
    model = SpikeSlabClassifier(standardize=False, fit_intercept=False, **given).fit(X, y)
    draws = model.sample_posterior(N_DRAWS, random_state=seed, exact_zeros=True) @ new.T
    stated = {"inclusion": (model.inclusion_proba_, on)}
    stated["label"] = model.predict_proba(new)[:, 1], label
    return {"predictor": ranks(draws, new @ w, rng)}, stated


def slab_ratio(rng):
    """Draw slab over noise variance from its prior, the largest cut off."""
    return min((1.0 - rng.uniform()) ** -2.0 - 1.0, 1e4)


def process_data(how, rng, n, n_new, length_spread=1.0):
    """Return rows, latent values, clean labels and the kernel they come from."""
    variance, length = 4.0, 1.5
    if how == "learned":
        variance = np.exp(np.log(4.0) + 1.5 * rng.normal())
        length = np.sqrt(8.0 / 3.0) * np.exp(length_spread * rng.normal())
    X = rng.uniform(-2, 2, (n + n_new, 2))
    kernel = ConstantKernel(variance) * RBF(length)
    K = kernel(X) + 1e-8 * variance * np.eye(len(X))
    f = np.linalg.cholesky(K) @ rng.normal(size=len(X))
    return X, f, f + rng.normal(size=len(X)) > 0, kernel


def process(how, seed, n=60, n_new=20, **settings):
    """Latent values at new rows; settings are those of the classifier."""
    rng = np.random.default_rng(seed)
    X, f, y, kernel = process_data(how, rng, n, n_new)
    given = dict(kernel=kernel, optimizer=None) if how == "known" else dict(kernel=start(X[:n]))
    model = EPGaussianProcessClassifier(random_state=seed, **given, **settings).fit(X[:n], y[:n])
    draws = model.sample_proba(X[n:], N_DRAWS, random_state=seed)[:, :, 1]
    return {"latent": ranks(draws, norm.cdf(f[n:]), rng)}, {}


def start(X):
    """An isotropic kernel: the data have one length."""
    scale = 3.0 * np.sqrt(X.var(0).sum())
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF(scale, (1e-2 * scale, 1e3 * scale))


def wrong_labels(how, seed, n=80, n_new=20):
    """Latent values of clean labels, and which labels are wrong."""
    rng = np.random.default_rng(seed)
    X, f, clean, kernel = process_data(how, rng, n, n_new, length_spread=0.7)
    rate = 0.2 if how.startswith("rate .2") else 0.1
    if how == "learned":
        prior = beta(3, 9)  # up to the largest rate that is learned
        drawn = prior.ppf(rng.uniform() * prior.cdf(0.45))
        rate = 0.0 if rng.uniform() < 0.05 else drawn
    flip = rng.uniform(size=n) < rate
    y = np.where(flip, ~clean[:n], clean[:n])
    known, corrected = how.startswith("known"), how.endswith("corrected")
    given = dict(kernel=kernel, optimizer=None, label_noise=rate) if known else {}
    average = "integrate" if how.endswith("integrate") else "auto"
    given = given or dict(kernel=start(X[:n]), hyperparameters=average)
    model = RelaxedEPClassifier(rule="ep", **given).fit(X[:n], y)
    if corrected:
        mean, var = model.latent_mean_and_variance(X[n:], corrected=True)
        return {"latent": norm.cdf(f[n:], mean, np.sqrt(var))}, {}
    draws = model.sample_proba(X[n:], N_DRAWS, random_state=seed)[:, :, 1]
    return {"latent": ranks(draws, norm.cdf(f[n:]), rng)}, {"flags": (model.noise_proba_, flip)}


def linear(how, seed, n=100, d=10):
    """Coefficients of logistic regression."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    v = 1.0
    if how == "learned":  # half-Cauchy(2.5) prior sd of the linear predictor
        v = (2.5 * np.abs(rng.standard_cauchy())) ** 2 / d
    w = rng.normal(size=d) * np.sqrt(v)
    y = rng.uniform(size=n) < special.expit(X @ w)
    prior = dict(prior_variance=v) if how == "known" else dict(learn_prior=True)
    model = ConvexVariationalLogistic(fit_intercept=False, **prior).fit(X, y)
    draws = model.sample_posterior(N_DRAWS, random_state=seed)
    return {"coefficients": ranks(draws, w, rng)}, {}


def grouped(how, seed, n=600, n_factors=1):
    """Coefficients, effects of groups and scales, with one grouping factor."""
    return factors(how, seed, (30,), n)


def crossed(how, seed, n=600):
    """The same with two crossed factors."""
    return factors(how, seed, (30, 12), n)


def simulated_factors(how, rng, sizes, n):
    """Draw rows with a column for each factor of these sizes, labels, and what they come from."""
    X = np.column_stack([rng.normal(size=(n, 2)), *(rng.integers(k, size=n) for k in sizes)])
    tau = np.full(len(sizes), float(how) if how in ("0.5", "1", "2.5") else 1.0)
    if how == "learned":
        tau = np.exp(1.5 * rng.normal(size=len(sizes)))
    beta = 2.5 * rng.normal(size=3) if how == "learned" else np.array([1.0, -0.5, 0.3])
    effects = [t * rng.normal(size=k) for t, k in zip(tau, sizes, strict=True)]
    z = X[:, :2] @ beta[:2] + beta[2]
    z = z + sum(e[X[:, 2 + f].astype(int)] for f, e in enumerate(effects))
    return X, rng.uniform(size=n) < special.expit(z), beta, tau, effects


def factors(how, seed, sizes, n):
    """Simulate and fit grouping factors of these sizes."""
    rng = np.random.default_rng(seed)
    X, y, beta, tau, effects = simulated_factors(how, rng, sizes, n)
    given = dict(tau_prior=(np.log(1.0), 0.01)) if how == "known" else {}
    model = HierarchicalEPLogistic(list(range(2, 2 + len(sizes))), **given).fit(X, y)
    draws = model.sample_posterior(N_DRAWS, random_state=seed)
    own = {"coefficients": ranks(draws.coef, beta[:2], rng)}
    if how != "known":
        own["scales"] = ranks(draws.tau, tau, rng)
    both = zip(draws.group_effects, effects, model.group_labels_, strict=True)
    parts = [ranks(d[:, :, 0], e[labels.astype(int)], rng) for d, e, labels in both]
    return own | {"effects": np.concatenate(parts)}, {}


def nested(how, seed, regions=12, schools=5, pupils=4, rows=5):
    """Coefficients, effects and scales of pupils in schools in regions."""
    rng = np.random.default_rng(seed)
    pupil = np.repeat(np.arange(regions * schools * pupils), rows)
    codes = [pupil // (schools * pupils), pupil // pupils, pupil]
    X = rng.normal(size=(len(pupil), 2))
    beta, tau = truths(how, rng, 3)
    effects = [t * rng.normal(size=c.max() + 1) for t, c in zip(tau, codes, strict=True)]
    z = X @ beta[:2] + beta[2] + sum(e[c] for e, c in zip(effects, codes, strict=True))
    y = rng.uniform(size=len(z)) < special.expit(z)
    model = HierarchicalEPLogistic([2, 3, 4]).fit(np.column_stack([X, *codes]), y)
    draws = model.sample_posterior(N_DRAWS, random_state=seed)
    parts = [ranks(d[:, :, 0], e, rng) for d, e in zip(draws.group_effects, effects, strict=True)]
    own = {"coefficients": ranks(draws.coef, beta[:2], rng), "scales": ranks(draws.tau, tau, rng)}
    return own | {"effects": np.concatenate(parts)}, {}


def slopes(how, seed, n=900, n_groups=30):
    """The same with one factor, an intercept and two slopes; its covariance is not diagonal."""
    rng = np.random.default_rng(seed)
    X, group = rng.normal(size=(n, 2)), rng.integers(n_groups, size=n)
    beta, tau = truths(how, rng, 3)
    lower = np.diag(tau)
    lower[np.tril_indices(3, -1)] = 1.5 * rng.normal(size=3) if how == "learned" else 0.3
    effects = rng.normal(size=(n_groups, 3)) @ lower.T
    local = np.column_stack([np.ones(n), X])
    z = X @ beta[:2] + beta[2] + np.sum(local * effects[group], axis=1)
    y = rng.uniform(size=n) < special.expit(z)
    model = HierarchicalEPLogistic(2, random_slopes=[0, 1]).fit(np.column_stack([X, group]), y)
    draws = model.sample_posterior(N_DRAWS, random_state=seed)
    scales = np.linalg.norm(lower, axis=1)
    own = {
        "coefficients": ranks(draws.coef, beta[:2], rng),
        "scales": ranks(draws.tau, scales, rng),
    }
    return own | {"effects": ranks(draws.group_effects, effects, rng).ravel()}, {}


def truths(how, rng, n_scales):
    """Return coefficients, the intercept last, and scales: drawn from their priors, or fixed."""
    if how == "learned":
        return 2.5 * rng.normal(size=3), np.exp(1.5 * rng.normal(size=n_scales))
    return np.array([1.0, -0.5, 0.3]), np.full(n_scales, float(how))


THROUGH_POINTS = dict(method="sparse", n_inducing=30, hyperparameters="integrate")
MODELS = {
    "SpikeSlabRegressor": (spike_slab, ("known", "learned", "fixed"), 600),
    "SpikeSlabClassifier": (sparse_classes, ("known", "learned", "fixed"), 600),
    "EPGaussianProcessClassifier": (process, ("known", "learned", "fixed"), 200),
    "EPGaussianProcessClassifier, 400 rows": (
        functools.partial(process, n=400),
        ("known", "learned", "fixed"),
        200,
    ),
    "EPGaussianProcessClassifier, inducing points": (
        functools.partial(process, **THROUGH_POINTS),
        ("known", "learned", "fixed"),
        200,
    ),
    "RelaxedEPClassifier": (
        wrong_labels,
        (
            "known",
            "known, corrected",
            "learned",
            "rate .2",
            "rate .1",
            "rate .1, integrate",
        ),
        200,
    ),
    "ConvexVariationalLogistic": (linear, ("known", "learned", "fixed"), 400),
    "HierarchicalEPLogistic": (grouped, ("known", "learned", "0.5", "1", "2.5"), 120),
    "HierarchicalEPLogistic, crossed": (crossed, ("known", "learned", "0.5", "1", "2.5"), 120),
    "HierarchicalEPLogistic, nested": (nested, ("learned", "0.5", "1"), 100),
    "HierarchicalEPLogistic, slopes": (slopes, ("learned", "0.5", "1"), 100),
}


def one(simulate, how, seed):
    """Return ranks and stated probabilities of one data set; None where a class is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return simulate(how, seed)
        except ValueError as error:
            if "class" in str(error):
                return None
            raise


def least_band(place):
    """Return the least band of a setting: truths from the prior have none."""
    return 0.0 if place["setting"] in ("known", "known, corrected", "learned") else LEAST_AT_FIXED


def coverage_rows(place, found):
    """Return a row for each quantity and level."""
    rows = []
    for name in found[0][0]:
        values = [f[0][name] for f in found]
        for level in LEVELS:
            share = np.array([np.mean(np.abs(u - 0.5) < 0.5 * level) for u in values])
            band = Z * share.std(ddof=1) / np.sqrt(len(share))
            # no interval missed leaves no spread to tell the band from
            band = max(band, Z * np.sqrt(level * (1 - level) / (len(share) * len(values[0]))))
            band = max(band, least_band(place))
            inside = bool(abs(share.mean() - level) <= band)
            row = dict(quantity=name, level=level, coverage=share.mean(), band=band)
            rows.append(place | row | dict(inside=inside, sets=len(share)))
    return rows


def reliability_rows(place, found):
    """Return a row for each bin of stated probabilities with enough cases.

    Cases of one data set have in common what is not known of it, as the rate of wrong labels, and
    err together: the band is the wider one of independent cases and of independent sets.
    """
    rows = []
    for name in found[0][1]:
        stated = np.concatenate([f[1][name][0] for f in found])
        true = np.concatenate([f[1][name][1] for f in found])
        of_set = np.repeat(np.arange(len(found)), [len(f[1][name][0]) for f in found])
        bins = np.clip(np.digitize(stated, EDGES) - 1, 0, len(EDGES) - 2)
        for b in range(len(EDGES) - 1):
            own = bins == b
            if own.sum() < LEAST_CASES:
                continue
            p = stated[own]
            of_sets = np.sum(np.bincount(of_set[own], true[own] - p) ** 2)
            band = Z * np.sqrt(max(np.sum(p * (1 - p)), of_sets)) / own.sum()
            band = max(band, least_band(place))
            gap = float(true[own].mean() - p.mean())
            row = dict(stated=p.mean(), observed=true[own].mean(), band=band)
            rows.append(
                place
                | dict(quantity=name)
                | row
                | dict(inside=bool(abs(gap) <= band), cases=int(own.sum()))
            )
    return rows


def draw(args, rows):
    """Draw coverage less level with its band, a row for each model, setting and quantity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [r for r in rows if "level" in r]
    labels = list(dict.fromkeys((r["model"], r["setting"], r["quantity"]) for r in shown))
    size = (9, 0.16 * len(labels) + 1.0)
    fig, axes = plt.subplots(1, len(LEVELS), figsize=size, sharey=True, layout="constrained")
    for ax, level in zip(axes, LEVELS, strict=True):
        for i, label in enumerate(labels):
            r = next(
                r for r in shown
                if (r["model"], r["setting"], r["quantity"]) == label and r["level"] == level
            )  # fmt: skip
            colour = "tab:blue" if r["inside"] else "tab:red"
            ax.errorbar(r["coverage"] - level, i, xerr=r["band"], fmt="o", ms=3, color=colour)
        ax.axvline(0.0, color="0.6", lw=1, zorder=0)
        ax.set_title(f"{level:.0%} intervals", fontsize=10)
        ax.set_xlabel("coverage less level")
    axes[0].set_yticks(range(len(labels)), [", ".join(label) for label in labels], fontsize=7)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    figure(args, "calibration", fig)


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--only", dict(nargs="*", default=list(MODELS), help="names of models")),
        ("--jobs", dict(type=int, default=1, help="data sets in parallel")),
    )
    rows = [r for r in stored_rows(args, "calibration") if r["model"] not in args.only]
    for model in args.only:
        simulate, settings, n_sets = MODELS[model]
        for how in settings:
            seeds = range(n_sets // 10 if args.quick else n_sets)
            run = functools.partial(one, simulate, how)
            found = [f for f in Parallel(args.jobs)(delayed(run)(s) for s in seeds) if f]
            place = dict(model=model, setting=how if how[0] not in "012" else f"scale {how}")
            new = coverage_rows(place, found)
            table(new, list(new[0]))
            reliable = reliability_rows(place, found)
            if reliable:
                table(reliable, list(reliable[0]))
            rows = sorted(rows + new + reliable, key=lambda r: list(MODELS).index(r["model"]))
            save(args, "calibration", rows)
    inside = [bool(r["inside"]) for r in rows]
    print(f"{sum(inside)} of {len(inside)} figures within their bands")
    draw(args, rows)


if __name__ == "__main__":
    main()
