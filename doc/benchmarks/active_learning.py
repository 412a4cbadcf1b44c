"""Error and log loss against labels, of our strategies and scikit-activeml's, with one classifier.

    python doc/benchmarks/active_learning.py [--data FOLDER]   all sets, five seeds, to 200 labels
    python doc/benchmarks/active_learning.py --quick           three sets, two seeds, to 40 labels

The sets are those of scikit-learn and generated ones, and those of the folder. Every strategy
starts from the same ten labels. Ours choose one row after another in a `Learner` that refits at
every fifth label; scikit-activeml's are refitted after every label, which is the best use of them.
Areas are those under the curve from 15 labels on, over that of random rows.
"""

import importlib.util
import pathlib
import warnings

from common import arguments, figure, log_loss, save, table
from sparse_logistic import load

import numpy as np
import scipy.sparse as sp
import sklearn.datasets as sets
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.preprocessing import normalize

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier
from sklearn_ep.active_learning import Learner
from sklearn_ep.datasets import make_sparse_logistic

STRATEGIES = ("random", "epig_entropy", "epig", "expected_error", "bald", "variance_reduction",
              "uncertainty")  # fmt: skip
FOLDER = ("heart", "german", "image", "banana", "waveform", "twonorm", "ionosphere", "sonar",
          "spambase", "splice", "pima532", "a9a", "rt_polarity", "rcv1_small")  # fmt: skip
QUICK = ("breast_cancer", "digits_3_8", "moons")
TEXT = ("rt_polarity", "rcv1_small", "sparse_logistic")
BLOCK, START, RANDOM_DRAWS = 5, 10, 2


def digits(a, b):
    """Return one pair of digits as a set of two classes."""
    X, y = sets.load_digits(return_X_y=True)
    chosen = np.isin(y, (a, b))
    return X[chosen], (y[chosen] == b).astype(int)


def one_class(loader, c):
    """Return a set of several classes as one of them against the rest."""
    X, y = loader(return_X_y=True)
    return X, (y == c).astype(int)


LOADED = {
    "breast_cancer": lambda: sets.load_breast_cancer(return_X_y=True),
    "digits_3_8": lambda: digits(3, 8),
    "digits_4_9": lambda: digits(4, 9),
    "digits_1_7": lambda: digits(1, 7),
    "wine_1": lambda: one_class(sets.load_wine, 1),
    "iris_1": lambda: one_class(sets.load_iris, 1),
    "moons": lambda: sets.make_moons(900, noise=0.3, random_state=0),
    "circles": lambda: sets.make_circles(900, noise=0.15, factor=0.5, random_state=0),
    "generated_10": lambda: sets.make_classification(900, 10, random_state=0),
    "generated_40": lambda: sets.make_classification(900, 40, n_informative=8, random_state=1),
    "sparse_logistic": lambda: make_sparse_logistic(1500, 3000, n_per_row=30, random_state=0)[:2],
}


def all_sets(args):
    """Yield name, X and y in {0, 1}."""
    for name, loader in LOADED.items():
        if not args.quick or name in QUICK:
            yield name, *loader()
    for name in FOLDER if args.data and not args.quick else ():
        if (pathlib.Path(args.data) / f"{name}.npz").exists():
            X, y = loaded(args.data, name)
            yield name, X, (y == y.max()).astype(int)


def loaded(folder, name):
    """Return X and y of a set in the folder, dense or sparse."""
    with np.load(pathlib.Path(folder) / f"{name}.npz") as z:
        if "X" in z:
            return z["X"].astype(float), z["y"]
    return load(folder, name)[0]


def split(name, X, y, seed, n_pool=400, n_new=1000):
    """Return pool and test rows; dense columns in units of their spread in the pool."""
    order = np.random.default_rng(100 + seed).permutation(len(y))
    n_pool = min(n_pool if name not in TEXT else 2 * n_pool, int(0.6 * len(y)))
    pool, new = order[:n_pool], order[n_pool : n_pool + n_new]
    P, T = X[pool], X[new]
    if sp.issparse(X):
        P, T = normalize(P), normalize(T)
    else:
        spread = P.std(0)
        spread[spread < 1e-9] = 1.0
        P, T = (P - P.mean(0)) / spread, (T - P.mean(0)) / spread
    return P, y[pool], T, y[new]


def model_of(kind, P):
    """Return the classifier with a prior for the size of the rows, set before any label is seen."""
    square = P.multiply(P).sum() / P.shape[0] if sp.issparse(P) else (P**2).sum(1).mean()
    if kind == "linear":
        return ConvexVariationalLogistic(8.0 / square, max_iter=50)
    length = np.sqrt(square)
    return EPGaussianProcessClassifier(
        ConstantKernel(4.0, (0.5, 25.0)) * RBF(1.5 * length, (0.3 * length, 6.0 * length))
    )


def peers():
    """Return the strategies of scikit-activeml that take a fitted classifier, by name."""
    if importlib.util.find_spec("skactiveml") is None:
        return {}
    from skactiveml.classifier import SklearnClassifier
    from skactiveml.pool import BatchBALD, CoreSet, UncertaintySampling

    class Committee(SklearnClassifier):
        """Wrapper that passes posterior draws on."""

        def sample_proba(self, X, n_samples=50):
            """Draws of the estimator inside, of one seed."""
            return self.estimator_.sample_proba(X, n_samples=n_samples, random_state=0)

    def by(strategy, argument):
        def choose(model, P, known):
            settings = {}
            if argument is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    wrapped = Committee(model, classes=[0, 1]).fit(P, known)
                settings = {argument: wrapped, f"fit_{argument}": False}
            return strategy.query(P, known, **settings)

        return choose

    draws = dict(sample_predictions_method_name="sample_proba", sample_predictions_dict={})
    return {
        "skactiveml entropy": by(UncertaintySampling("entropy", random_state=0), "clf"),
        "skactiveml BatchBALD": by(BatchBALD(**draws, random_state=0), "ensemble"),
        "skactiveml CoreSet": by(CoreSet(random_state=0), None),
    }


def first_rows(y, seed):
    """Return the rows that are labelled at the start, both classes among them."""
    order = np.random.default_rng(200 + seed).permutation(len(y))
    both = [int(order[y[order] == c][0]) for c in (0, 1)]
    return both + [int(i) for i in order if i not in both][: START - 2]


def curve(strategy, choose, model, P, y, T, t, marks, seed):
    """Error and log loss at the numbers of labels in `marks`; the kernel is learned at marks."""
    have, out, kept = first_rows(y, seed), [], model
    for mark in marks:
        while len(have) < mark:
            known = np.full(len(y), np.nan)
            known[have] = y[have]
            if choose is not None:
                have += [int(i) for i in choose(kept, P, known)]
                continue
            learner = Learner(kept, P, known, strategy=strategy, refit_every=BLOCK,
                              random_state=None if strategy != "random" else seed)  # fmt: skip
            for _ in range(min(BLOCK, mark - len(have))):
                rows = learner.ask()
                learner.tell(rows, y[rows])
                have += [int(i) for i in rows]
        fitted = clone(model).fit(P[have], y[have])
        if hasattr(fitted, "kernel_"):
            kept = clone(model).set_params(kernel=fitted.kernel_, optimizer=None)
        proba = fitted.predict_proba(T)
        out.append((np.mean(proba.argmax(1) != t), log_loss(proba, t)))
    return out


def curves_of(kind, name, X, y, strategies, others, seeds, most):
    """Return the marks and {strategy: (seeds, marks, 2)} on one set."""
    found = {}
    for seed in range(seeds):
        P, own, T, t = split(name, X, y, seed)
        top = min(most, int(0.6 * P.shape[0]))
        marks = [m for m in (15, 20, 30, 40, 60, 80, 100, 150, 200) if m <= top]
        model = model_of(kind, P)
        for strategy in (*strategies, *others):
            draws = RANDOM_DRAWS if strategy == "random" else 1
            runs = [
                curve(strategy, others.get(strategy), model, P, own, T, t, marks,
                      seed + 1000 * draw if strategy == "random" and draw else seed)
                for draw in range(draws)
            ]  # fmt: skip
            found.setdefault(strategy, []).append(np.mean(runs, axis=0))
    return marks, {strategy: np.array(v) for strategy, v in found.items()}


def area(marks, values):
    """Return the mean over the number of labels of curves (seeds, marks, 2), as (2,)."""
    mean = values.mean(axis=0)
    return np.trapezoid(mean, marks, axis=0) / (marks[-1] - marks[0])


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--model", dict(nargs="+", choices=("gp", "linear"), default=["linear", "gp"])),
        ("--sets", dict(nargs="+", default=None, help="names of sets, all without")),
    )
    seeds, most = (2, 40) if args.quick else (5, 200)
    strategies = STRATEGIES[:2] + STRATEGIES[5:] if args.quick else STRATEGIES
    rows, results = [], {}
    for name, X, y in all_sets(args):
        if args.sets is not None and name not in args.sets:
            continue
        for kind in args.model:
            if kind == "gp" and (sp.issparse(X) or X.shape[1] > 200):
                continue
            others = {} if sp.issparse(X) else peers()  # which take no sparse X
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                marks, found = curves_of(kind, name, X, y, strategies, others, seeds, most)
            results[kind, name] = marks, found
            base = area(marks, found["random"])
            for strategy, values in found.items():
                error, loss = area(marks, values) / base
                rows.append(
                    {
                        "model": kind,
                        "set": name,
                        "strategy": strategy,
                        "error": float(error),
                        "log loss": float(loss),
                        "last error": float(values[:, -1, 0].mean()),
                        "last log loss": float(values[:, -1, 1].mean()),
                    }
                )
            table([r for r in rows if (r["model"], r["set"]) == (kind, name)], list(rows[0]))
    summary = means(rows)
    table(summary, list(summary[0]))
    draw(args, results)
    save(args, "active_learning", rows + summary)


def means(rows):
    """Return the geometric means over sets of the areas over random rows', and shares below 1."""
    out = []
    for kind, strategy in dict.fromkeys((r["model"], r["strategy"]) for r in rows):
        own = [r for r in rows if (r["model"], r["strategy"]) == (kind, strategy)]
        row = {"model": kind, "set": f"mean of {len(own)}", "strategy": strategy}
        for what in ("error", "log loss"):
            values = np.array([r[what] for r in own])
            row[what] = float(np.exp(np.mean(np.log(np.maximum(values, 1e-3)))))
            row[f"{what} below random"] = float(np.mean(values < 1.0))
        out.append(row)
    return out


def draw(args, results):
    """Draw the curves of each set, with bands of two standard errors over the seeds."""
    import matplotlib.pyplot as plt

    shape = (2 * len(results) + 3) // 4, 4
    fig, axes = plt.subplots(
        *shape, figsize=(15, 3 * shape[0]), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[2 * len(results) :]:
        ax.set_visible(False)
    for k, ((kind, name), (marks, found)) in enumerate(results.items()):
        for column, label in enumerate(("error", "log loss")):
            ax = axes.flat[2 * k + column]
            for strategy, values in found.items():
                mean = values[:, :, column].mean(0)
                half = 2.0 * values[:, :, column].std(0) / np.sqrt(len(values))
                style = "--" if strategy.startswith("skactiveml") else "-"
                ax.plot(marks, mean, style, label=strategy, linewidth=1.2)
                if strategy in ("random", "epig_entropy"):
                    ax.fill_between(marks, mean - half, mean + half, alpha=0.15)
            ax.set(xlabel="labels", ylabel=label, title=f"{name}, {kind}")
    axes.flat[0].legend(fontsize=6)
    figure(args, "active_learning", fig)


if __name__ == "__main__":
    main()
