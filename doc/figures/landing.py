"""Draw the pictures of the landing page, each for a light and a dark theme.

    python doc/figures/landing.py

The large ones compare probabilities on two half moons, and mean ranks of the stored comparison
(doc/benchmarks/results/arena.json); the small ones, a picture for each estimator, are fits too.
"""

import json
import pathlib
import warnings

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba
from sklearn.datasets import make_moons
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss

from sklearn_ep import (
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep.datasets import make_spike_slab_regression
from sklearn_ep.sites import HorseshoeSite

DOC = pathlib.Path(__file__).resolve().parent.parent
STATIC = DOC / "_static"
THEMES = {"light": ("white", "#222832"), "dark": ("#14181e", "#ced6dd")}
FIRST, SECOND, ACCENT = "#2b7bba", "#d9662b", "#8a8f98"
OURS = (
    "BayesianStackingClassifier",
    "EPGaussianProcessClassifier",
    "RelaxedEPClassifier",
    "ConvexVariationalLogistic",
    "additive part of the stack",
)
NAMES = {
    "BayesianStackingClassifier": "stacked classifier",
    "EPGaussianProcessClassifier": "GP, expectation propagation",
    "RelaxedEPClassifier": "GP, labels may be wrong",
    "ConvexVariationalLogistic": "Bayesian logistic regression",
    "GaussianProcessClassifier": "GP of scikit-learn",
    "LogisticRegressionCV": "logistic regression, tuned",
    "calibrated SVC": "support vectors, tuned",
    "random forest": "random forest, tuned",
}


def themed(name, size, draw):
    """Save what `draw(figure, ink)` draws for both themes."""
    for theme, (background, ink) in THEMES.items():
        parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        colours = {"figure.facecolor": background, "axes.facecolor": background}
        with plt.rc_context({"font.size": 10, **colours, **dict.fromkeys(parts, ink)}):
            fig = plt.figure(figsize=size, layout="constrained")
            draw(fig, ink)
            fig.savefig(STATIC / f"{name}_{theme}.png", dpi=120)
            plt.close(fig)


def bare(fig):
    """Return an axis without frame and ticks that fills a figure."""
    ax = fig.add_subplot()
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def surface(ax, clf, X, y, margin=0.9):
    """Draw the probability of the second class, and the rows."""
    low, high = X.min(axis=0) - margin, X.max(axis=0) + margin
    grid = np.meshgrid(*(np.linspace(a, b, 160) for a, b in zip(low, high, strict=True)))
    proba = clf.predict_proba(np.stack([g.ravel() for g in grid], axis=1))[:, 1]
    proba = proba.reshape(grid[0].shape)
    levels = np.linspace(0, 1, 21)
    # opaque, with edges of the same colour: no seams between levels on a dark background
    behind = np.array(to_rgba(ax.figure.get_facecolor()))
    colours = 0.85 * plt.get_cmap("RdBu_r")(np.linspace(0, 1, 20)) + 0.15 * behind
    drawn = ax.contourf(*grid, proba, levels, colors=colours)
    drawn.set_edgecolor("face")
    for label, colour in ((0, "#12508a"), (1, "#9b2c10")):
        ax.scatter(*X[y == label].T, s=11, color=colour, edgecolor="white", linewidth=0.5)
    ax.set(xticks=[], yticks=[], xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    return drawn


def draw_gain(fig, ink):
    """Draw two surfaces of probability: what a user gains."""
    X, y = make_moons(200, noise=0.25, random_state=0)
    X_test, y_test = make_moons(4000, noise=0.25, random_state=1)
    axes = fig.subplots(1, 2)
    for ax, title, clf in (
        (axes[0], "gradient boosting", HistGradientBoostingClassifier(random_state=0)),
        (axes[1], "sklearn-ep", EPGaussianProcessClassifier()),
    ):
        clf.fit(X, y)
        drawn = surface(ax, clf, X, y)
        loss = log_loss(y_test, clf.predict_proba(X_test))
        ax.set_title(title)
        ax.set_xlabel(f"held-out log loss {loss:.3f}")
    bar = fig.colorbar(drawn, ax=axes, ticks=[0, 0.5, 1], shrink=0.75, aspect=22)
    bar.set_label("probability of the red class")


def draw_ranks(fig, ink):
    """Draw the mean rank of each model's log loss over the sets of the stored comparison."""
    stored = json.loads((DOC / "benchmarks" / "results" / "arena.json").read_text())
    rows = [row for row in stored["rows"] if row["set"] == "all"]
    rows.sort(key=lambda row: -row["rank"])
    ax = fig.add_subplot()
    name_of_ours = FIRST if ink == THEMES["light"][1] else "#5fa8e0"  # to be read on dark, too
    for k, row in enumerate(rows):
        ours = row["model"] in OURS
        ax.hlines(k, row["rank, 5 %"], row["rank, 95 %"], color=FIRST if ours else ACCENT)
        ax.plot(row["rank"], k, "o", color=FIRST if ours else ACCENT, markersize=5)
        ax.text(
            row["rank"], k + 0.2, NAMES.get(row["model"], row["model"]),
            color=name_of_ours if ours else ink, ha="center", size=8,
        )  # fmt: skip
    ax.set(yticks=[], ylim=(-0.5, len(rows) - 0.2), xlim=(1, len(rows)))
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.set_xlabel("mean rank of held-out log loss (1 is best)")
    ax.set_title(f"{max(row['sets'] for row in rows)} real data sets; ours at defaults")


def draw_process(fig, ink):
    X, y = make_moons(150, noise=0.2, random_state=0)
    surface(bare(fig), EPGaussianProcessClassifier().fit(X, y), X, y, 0.5)


def draw_wrong_labels(fig, ink):
    rng = np.random.default_rng(1)
    X, y = make_moons(150, noise=0.15, random_state=2)
    wrong = rng.random(150) < 0.1
    y = np.where(wrong, 1 - y, y)
    clf = RelaxedEPClassifier().fit(X, y)
    ax, flagged = bare(fig), clf.noise_proba_ > 0.5
    for label, colour in ((0, FIRST), (1, SECOND)):
        ax.scatter(*X[y == label].T, s=14, color=colour)
    ax.scatter(*X[flagged].T, s=90, facecolor="none", edgecolor=ink, linewidth=1.4)


def draw_inclusion(fig, ink):
    X, y, coef = make_spike_slab_regression(60, 80, n_informative=6, random_state=0)
    share = SpikeSlabRegressor().fit(X, y).inclusion_proba_
    ax, place = bare(fig), np.arange(80)
    ax.vlines(place, 0, share, color=np.where(coef != 0, FIRST, ACCENT), linewidth=2)
    ax.scatter(place[share > 0.5], share[share > 0.5], s=26, color=FIRST)
    ax.axhline(0, color=ink, linewidth=0.8)
    ax.set(ylim=(-0.03, 1.1))


def draw_coefficients(fig, ink):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(250, 10))
    coef = np.linspace(-1.5, 1.5, 10)
    y = (X @ coef + rng.logistic(size=250) > 0).astype(int)
    clf = ConvexVariationalLogistic().fit(X, y)
    low, high = clf.coef_interval(0.9).reshape(-1, 2)[:10].T
    ax, place = bare(fig), np.arange(10)
    ax.hlines(place, low, high, color=FIRST, linewidth=4, alpha=0.6)
    ax.scatter(np.ravel(clf.coef_), place, s=30, color=FIRST, zorder=3)
    ax.axvline(0, color=ink, linewidth=0.8)


def draw_operator(fig, ink):
    rng = np.random.default_rng(0)
    place = np.arange(120)
    signal = np.where((place > 20) & (place < 45), 1.0, 0.0) + np.where(place > 80, -0.7, 0.0)
    steps = np.tril(np.ones((120, 120)))  # the signal is a sum of steps, and few of them
    measured = rng.normal(size=(45, 120)) / np.sqrt(45)
    y = measured @ signal + 0.02 * rng.normal(size=45)
    reg = ConvexVariationalRegressor(HorseshoeSite(0.02), noise_variance=0.02**2)
    reg.fit(measured @ steps, y)
    mean, sd = reg.predict(steps, return_std=True)
    ax = bare(fig)
    ax.fill_between(place, mean - 2 * sd, mean + 2 * sd, color=FIRST, alpha=0.3, linewidth=0)
    ax.plot(place, mean, color=FIRST, linewidth=2)
    ax.plot(place, signal, color=ink, linewidth=0.9, linestyle="--")


def draw_groups(fig, ink):
    rng = np.random.default_rng(4)
    effect, size = rng.normal(size=12), rng.integers(3, 30, size=12)
    groups = np.repeat(np.arange(12), size)
    y = (rng.random(len(groups)) < 1 / (1 + np.exp(-effect[groups]))).astype(int)
    clf = HierarchicalEPLogistic().fit(rng.normal(size=(len(y), 1)), y, groups=groups)
    pooled = clf.intercept_[0] + np.ravel(clf.group_effects_)
    ones = np.bincount(groups, y)
    raw = np.log((ones + 0.5) / (size - ones + 0.5))
    ax, order = bare(fig), np.argsort(raw)
    for k, g in enumerate(order):
        ax.plot([raw[g], pooled[g]], [k, k], color=ACCENT, linewidth=1)
        ax.scatter(raw[g], k, s=14, color=ACCENT)
        ax.scatter(pooled[g], k, s=2 * size[g] + 8, color=FIRST, zorder=3)
    ax.axvline(float(clf.intercept_[0]), color=ink, linewidth=0.8)


CARDS = {
    "card_process": draw_process,
    "card_wrong_labels": draw_wrong_labels,
    "card_inclusion": draw_inclusion,
    "card_coefficients": draw_coefficients,
    "card_operator": draw_operator,
    "card_groups": draw_groups,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    themed("landing", (6.4, 3.8), draw_gain)
    themed("ranks", (4.0, 4.6), draw_ranks)
    for name, draw in CARDS.items():
        themed(name, (2.6, 1.5), draw)
