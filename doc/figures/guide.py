"""Draw the pictures of the user guide, each for a light and a dark theme: the data of the pages.

python doc/figures/guide.py [NAME ...]
"""

import sys
import warnings

import numpy as np
from landing import ACCENT, FIRST, SECOND, surface, themed
from scipy.stats import norm
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_digits, make_moons
from sklearn.metrics import log_loss

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep.active_learning import learn
from sklearn_ep.sites import HorseshoeSite, LaplaceSite, StudentTSite


def plain(ax, **settings):
    """Set labels, and leave out the frame above and on the right."""
    ax.spines[["right", "top"]].set_visible(False)
    ax.set(**settings)


def bars(ax, mean, low, high, truth, names, ink):
    """Draw estimates with intervals, one below another, and the truth as crosses."""
    place = np.arange(len(mean))[::-1]
    ax.axvline(0, color=ACCENT, linewidth=0.8)
    ax.hlines(place, low, high, color=FIRST, linewidth=4, alpha=0.5)
    ax.scatter(mean, place, s=22, color=FIRST, zorder=3, label="estimate")
    ax.scatter(truth, place, s=28, marker="x", color=SECOND, zorder=4, label="truth")
    ax.set_yticks(place, names)
    ax.tick_params(labelsize=8)


def reliability(ax, y, proba, ink):
    """Draw the share of the second class against its stated probability."""
    share, stated = calibration_curve(y, proba, n_bins=8, strategy="quantile")
    ax.plot([0, 1], [0, 1], color=ACCENT, linewidth=0.8)
    ax.plot(stated, share, "o-", color=FIRST, markersize=5)
    plain(ax, xlabel="stated probability, held-out rows", ylabel="share that came true")


def draw_process(fig, ink):
    X, y = make_moons(120, noise=0.25, random_state=0)
    clf = EPGaussianProcessClassifier().fit(X, y)
    axes = fig.subplots(1, 2)
    drawn = surface(axes[0], clf, X, y, 1.5)
    axes[0].set_title("probability of the red class")
    fig.colorbar(drawn, ax=axes[0], ticks=[0, 0.5, 1], shrink=0.8)
    low, high = X.min(axis=0) - 1.5, X.max(axis=0) + 1.5
    grid = np.meshgrid(*(np.linspace(a, b, 60) for a, b in zip(low, high, strict=True)))
    ends = clf.predict_proba_interval(np.stack([g.ravel() for g in grid], axis=1))
    width = (ends[:, 1] - ends[:, 0]).reshape(grid[0].shape)
    drawn = axes[1].contourf(*grid, width, np.linspace(0, 1, 11), cmap="Greys")
    for label, colour in ((0, "#12508a"), (1, "#9b2c10")):
        axes[1].scatter(*X[y == label].T, s=11, color=colour, edgecolor="white", linewidth=0.5)
    axes[1].set(xticks=[], yticks=[], title="width of its 90 % interval")
    fig.colorbar(drawn, ax=axes[1], ticks=[0, 0.5, 1], shrink=0.8)


def draw_relaxed(fig, ink):
    X, clean = make_moons(120, noise=0.15, random_state=0)
    wrong = np.random.default_rng(0).uniform(size=120) < 0.1
    y = np.where(wrong, 1 - clean, clean)
    clf = RelaxedEPClassifier().fit(X, y)
    axes, flagged = fig.subplots(1, 2), clf.noise_proba_ > 0.5
    for label, colour in ((0, FIRST), (1, SECOND)):
        axes[0].scatter(*X[y == label].T, s=14, color=colour)
    axes[0].scatter(*X[flagged].T, s=90, facecolor="none", edgecolor=ink, linewidth=1.3)
    axes[0].set(xticks=[], yticks=[], title="circles: probably wrong")
    order = np.argsort(-clf.noise_proba_)[:30]
    seen = np.arange(1, 31)
    axes[1].plot(seen, seen, color=ACCENT, linewidth=0.8, label="if every row were wrong")
    axes[1].plot(seen, np.cumsum(wrong[order]), color=SECOND, label="found")
    expected = np.cumsum(clf.noise_proba_[order])
    axes[1].plot(seen, expected, "--", color=FIRST, label="expected by the list")
    axes[1].axhline(wrong.sum(), color=ACCENT, linewidth=0.8, linestyle=":", label="all of them")
    plain(axes[1], xlabel="rows reviewed, in the order of the list", ylabel="wrong labels")
    axes[1].set(ylim=(0, 20), yticks=range(0, 21, 5))
    axes[1].legend(frameon=False, fontsize=8, loc="lower right")


def draw_spike_slab(fig, ink):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 100))
    coef = np.r_[3.0, -2.0, 1.0, np.zeros(97)]
    y = X @ coef + 0.3 * rng.normal(size=40)
    reg = SpikeSlabRegressor().fit(X, y)
    axes, place = fig.subplots(1, 2), np.arange(100)
    axes[0].vlines(place, 0, reg.inclusion_proba_, color=FIRST, linewidth=2)
    plain(axes[0], xlabel="column", ylabel="inclusion probability", ylim=(0, 1.05))
    top = np.argsort(-reg.inclusion_proba_)[:8]
    low, high = reg.coef_interval(0.9).reshape(-1, 2)[top].T
    bars(axes[1], reg.coef_[top], low, high, coef[top], [f"x{k}" for k in top], ink)
    plain(axes[1], xlabel="coefficient, 90 % interval")
    axes[1].legend(frameon=False, fontsize=8)


def draw_convex(fig, ink):
    rng = np.random.default_rng(0)
    X, u, coef = rng.normal(size=(300, 20)), rng.uniform(size=300), rng.normal(size=20)
    y = u < 1 / (1 + np.exp(-X @ coef))
    X_new = np.random.default_rng(1).normal(size=(4000, 20))
    clf = ConvexVariationalLogistic().fit(X, y)
    axes = fig.subplots(1, 2)
    low, high = clf.coef_interval(0.9).reshape(-1, 2)[:20].T
    bars(axes[0], clf.coef_[0], low, high, coef, [f"test {k}" for k in range(20)], ink)
    plain(axes[0], xlabel="coefficient, 90 % interval")
    axes[0].legend(frameon=False, fontsize=8)
    y_new = np.random.default_rng(2).uniform(size=4000) < 1 / (1 + np.exp(-X_new @ coef))
    reliability(axes[1], y_new, clf.predict_proba(X_new)[:, 1], ink)


def draw_hierarchical(fig, ink):
    rng = np.random.default_rng(0)
    number, effect = np.repeat(np.arange(15), 20), 1.2 * rng.normal(size=15)
    age = rng.normal(size=300)
    y = rng.uniform(size=300) < 1 / (1 + np.exp(-age - effect[number]))
    clf = HierarchicalEPLogistic().fit(age[:, None], y, groups=number)
    mean, sd = np.ravel(clf.group_effects_), np.ravel(clf.group_effects_std_)
    ones = np.bincount(number, y)
    alone = np.log((ones + 0.5) / (20.5 - ones)) - clf.intercept_[0]
    ax, order = fig.add_subplot(), np.argsort(mean)
    names = [f"H{k}" for k in order]
    ends = (mean - 1.645 * sd)[order], (mean + 1.645 * sd)[order]
    ax.scatter(alone[order], np.arange(15)[::-1], s=18, color=ACCENT, label="its rows alone")
    bars(ax, mean[order], *ends, (effect - np.mean(clf.intercept_))[order], names, ink)
    plain(ax, xlabel="effect of a hospital in log odds, 90 % interval")
    ax.legend(frameon=False, fontsize=8)


def draw_stacking(fig, ink):
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, 90)
    y = rng.uniform(size=90) < 1 / (1 + np.exp(-2 * np.sin(1.3 * x) - 0.8 * x))
    model = BayesianStackingClassifier(random_state=0).fit(x[:, None], y)
    line = np.linspace(-6, 6, 200)[:, None]
    ax = fig.add_subplot()
    names = ("Gaussian process", "linear", "additive", "boosting", "forest")
    colours = (FIRST, SECOND, ACCENT, "#a05fb4", "#3f9c5f")
    for name, part, colour in zip(names, model.estimators_, colours, strict=True):
        ax.plot(line, part.predict_proba(line)[:, 1], color=colour, linewidth=1.2, label=name)
    ax.plot(line, model.predict_proba(line)[:, 1], color=ink, linewidth=2.2, label="mixture")
    ax.scatter(x, y * 1.1 - 0.05, s=12, marker="|", color=ACCENT)
    plain(ax, xlabel="column", ylabel="probability of the second class")
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def draw_priors(fig, ink):
    axes = fig.subplots(1, 2)
    ends = np.linspace(0, 4, 41)
    axes[0].plot(ends, ends, color=ACCENT, linewidth=0.8, label="no shrinkage")
    sites = {
        "Laplace": LaplaceSite(0.5, "kl"),
        "Student's t": StudentTSite(2.0, 0.3),
        "horseshoe": HorseshoeSite(0.2),
    }
    for (name, site), colour in zip(sites.items(), (FIRST, SECOND, ink), strict=True):
        kept = []
        for end in ends:
            reg = ConvexVariationalRegressor(site, noise_variance=0.25, max_iter=500)
            kept.append(reg.fit(np.ones((1, 1)), [end]).coef_[0])
        axes[0].plot(ends, kept, color=colour, label=name)
    plain(axes[0], xlabel="least-squares estimate (noise sd .5)", ylabel="posterior mean")
    axes[0].legend(frameon=False, fontsize=8)
    rng = np.random.default_rng(0)
    signal = np.repeat([0.0, 2.0, 1.0], 20)
    seen = signal + 0.3 * rng.normal(size=60)
    steps = np.diff(np.eye(60), axis=0)
    reg = ConvexVariationalRegressor(
        LaplaceSite(0.1, "kl"), prior_operator=steps, noise_variance=0.09
    ).fit(np.eye(60), seen)
    place, sd = np.arange(60), reg.coef_std_
    axes[1].fill_between(
        place, reg.coef_ - 2 * sd, reg.coef_ + 2 * sd, color=FIRST, alpha=0.3, linewidth=0
    )
    axes[1].plot(place, reg.coef_, color=FIRST, label="estimate")
    axes[1].plot(place, signal, "--", color=ink, linewidth=0.9, label="truth")
    axes[1].scatter(place, seen, s=8, color=ACCENT, label="measured")
    plain(axes[1], xlabel="place", ylabel="signal")
    axes[1].legend(frameon=False, fontsize=8)


def draw_diagnostics(fig, ink):
    X, y = make_moons(120, noise=0.25, random_state=0)
    X_new, y_new = make_moons(4000, noise=0.25, random_state=1)
    clf = EPGaussianProcessClassifier().fit(X, y)
    axes, residual = fig.subplots(1, 2), clf.history_["residual"]
    axes[0].plot(np.arange(1, len(residual) + 1), residual, "o-", color=FIRST, markersize=4)
    axes[0].axhline(clf.tol, color=ink, linewidth=0.8, linestyle="--", label="tolerance")
    plain(axes[0], yscale="log", xlabel="iteration", ylabel="residual", ylim=(2e-4, 2e-2))
    axes[0].yaxis.set_minor_formatter("")
    axes[0].legend(frameon=False, fontsize=8)
    reliability(axes[1], y_new, clf.predict_proba(X_new)[:, 1], ink)


def draw_engine(fig, ink):
    f = np.linspace(-5, 5, 2001)
    cavity, factor = norm.pdf(f, -0.8, 1.4), norm.cdf(3 * f)
    tilted = cavity * factor
    tilted /= np.trapezoid(tilted, f)
    mean = np.trapezoid(f * tilted, f)
    sd = np.sqrt(np.trapezoid((f - mean) ** 2 * tilted, f))
    ax = fig.add_subplot()
    ax.plot(f, 0.5 * factor, color=ACCENT, linestyle=":", label="factor (scaled)")
    ax.plot(f, cavity, color=SECOND, label="cavity")
    ax.fill_between(f, tilted, color=ACCENT, alpha=0.35, linewidth=0, label="tilted")
    ax.plot(f, norm.pdf(f, mean, sd), color=FIRST, label="same mean and variance")
    plain(ax, xlabel="latent value", yticks=[])
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def draw_active(fig, ink):
    images, digit = load_digits(return_X_y=True)
    kept = np.isin(digit, [3, 8])
    X, y = images[kept] / 16.0, digit[kept]
    ax, labels = fig.add_subplot(), np.arange(6, 61)
    kinds = ("random", ACCENT, "random rows"), ("auto", FIRST, "rows that the learner asks for")
    for strategy, colour, label in kinds:
        curves = []
        for seed in range(8):
            order = np.random.default_rng(seed).permutation(len(y))
            pool, rest = order[:200], order[200:]
            learner = learn(
                ConvexVariationalLogistic(),
                X[pool],
                lambda rows, pool=pool: y[pool][rows],
                60,
                score=lambda clf, rest=rest: log_loss(y[rest], clf.predict_proba(X[rest])),
                strategy=strategy,
                classes=[3, 8],
                random_state=seed,
            )
            found = [(entry["n_labels"], entry["score"]) for entry in learner.history_]
            curves.append(np.interp(labels, *np.transpose(found)))
        ax.plot(labels, np.mean(curves, axis=0), color=colour, label=label)
    plain(ax, xlabel="labels", ylabel="held-out log loss, mean of 8 splits", ylim=(0, None))
    ax.legend(frameon=False, fontsize=8)


PICTURES = {
    "process": (7.2, 2.9),
    "relaxed": (7.2, 3.0),
    "spike_slab": (7.2, 3.0),
    "convex": (7.2, 3.6),
    "hierarchical": (6.0, 3.6),
    "stacking": (6.0, 3.0),
    "priors": (7.2, 3.0),
    "diagnostics": (7.2, 2.9),
    "engine": (6.0, 3.0),
    "active": (6.0, 3.0),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or PICTURES:
        themed(f"guide_{name}", PICTURES[name], globals()[f"draw_{name}"])
