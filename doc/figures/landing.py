"""Draw the picture of the landing page for a light and a dark theme.

python doc/figures/landing.py
"""

import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from sklearn.datasets import make_moons

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep.inspection import LatentDisplay

STATIC = pathlib.Path(__file__).resolve().parent.parent / "_static"

X, y = make_moons(200, noise=0.2, random_state=0)
clf = EPGaussianProcessClassifier().fit(X, y)
for theme, background, ink in (("light", "white", "black"), ("dark", "#14181e", "#ced6dd")):
    around = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with plt.rc_context({"figure.facecolor": background, **dict.fromkeys(around, ink)}):
        fig, ax = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
        LatentDisplay.from_estimator(clf, X, y, margin=0.35, ax=ax)
        fig.savefig(STATIC / f"landing_{theme}.png", dpi=110)
        plt.close(fig)
