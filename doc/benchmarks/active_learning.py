"""Error and log loss against labels, of our strategies and scikit-activeml's, with one classifier.

    python doc/benchmarks/active_learning.py [--data FOLDER]   all parts, five seeds, to 200 labels
    python doc/benchmarks/active_learning.py --quick           three sets, two seeds, to 40 labels
    python doc/benchmarks/active_learning.py --parts large     of: first, small, large, settings
    python doc/benchmarks/active_learning.py --resume          sets that are stored already are kept
    python doc/benchmarks/active_learning.py --figure          the figure anew, from stored results

Every strategy starts from the same ten labels. Ours choose one row after another in a `Learner`,
with a refit at every fifth label; scikit-activeml's are refitted after every label, which is the
best use of them, and after every fifth from 60 labels on. Areas are those under the curve from 15
labels on, over that of random rows. "first" are the first ten labels of a session that starts from
none, four times as many seeds.

"small" are pools of 400 rows, "large" pools of 16,000 (of 8,000 review sentences: there are no
more), "settings" pools of 400 whose classifier treats its hyperparameters in different ways.
Results are stored after every set.
"""

import importlib.util
import json
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

STRATEGIES = ("random", "epig_entropy", "bald", "variance_reduction", "uncertainty")
MARKS = (15, 20, 30, 40, 60, 80, 100, 150, 200)
BLOCK, START, RANDOM_DRAWS = 5, 10, 2
FIRST = """breast_cancer digits_3_8 heart waveform german twonorm image thyroid ionosphere sonar
    pima532 breast_wisconsin australian spambase banana crabs""".split()
TEXT = ("rt_polarity", "generated_text")
SMALL = {
    "linear": ("breast_cancer", "digits_3_8", "generated_40", "heart", "german", "image",
               "waveform", "spambase"),
    "gp": ("moons", "banana", "image"),
}  # fmt: skip
LARGE = {"a9a": 16_000, "rt_polarity": 8_000, "generated_text": 16_000}
SETTINGS = {
    "linear": ("heart", "german", "digits_3_8", "rt_polarity"),
    "gp": ("heart", "image"),
}
QUICK = ("breast_cancer", "digits_3_8", "moons")


# ---------------------------------------------------------------------------- data


def digits(a, b):
    """Return one pair of digits as a set of two classes."""
    X, y = sets.load_digits(return_X_y=True)
    chosen = np.isin(y, (a, b))
    return X[chosen], (y[chosen] == b).astype(int)


LOADED = {
    "breast_cancer": lambda: sets.load_breast_cancer(return_X_y=True),
    "digits_3_8": lambda: digits(3, 8),
    "moons": lambda: sets.make_moons(900, noise=0.3, random_state=0),
    "generated_40": lambda: sets.make_classification(900, 40, n_informative=8, random_state=1),
    "generated_text": lambda: make_sparse_logistic(20_000, 20_000, n_per_row=30, random_state=0),
}


def loaded(args, name):
    """Return X and y in {0, 1} of a set, or None where its file is not in the folder."""
    if name in LOADED:
        X, y = LOADED[name]()[:2]
    elif not args.data or not (pathlib.Path(args.data) / f"{name}.npz").exists():
        return None
    else:
        with np.load(pathlib.Path(args.data) / f"{name}.npz") as z:
            dense = (z["X"].astype(float), z["y"]) if "X" in z else None
        X, y = dense or load(args.data, name)[0]
    return X, (y == y.max()).astype(int)


def split(name, X, y, seed, n_pool):
    """Return pool and test rows; dense columns in units of their spread in the pool."""
    order = np.random.default_rng(100 + seed).permutation(len(y))
    n_new = 1000 if n_pool < 1000 else 10_000
    n_pool = min(n_pool, int(0.6 * len(y))) if n_pool < 1000 else n_pool
    pool, new = order[:n_pool], order[n_pool : n_pool + n_new]
    P, T = X[pool], X[new]
    if sp.issparse(X):
        P, T = (normalize(P), normalize(T)) if name in TEXT else (P, T)
    else:
        spread = P.std(0)
        spread[spread < 1e-9] = 1.0
        P, T = (P - P.mean(0)) / spread, (T - P.mean(0)) / spread
    return P, y[pool], T, y[new]


# ---------------------------------------------------------------------------- classifiers


def size_of(P):
    """Return the mean square length of the rows."""
    return P.multiply(P).sum() / P.shape[0] if sp.issparse(P) else (P**2).sum(1).mean()


def kernel_of(P, bounded=True):
    """Return a kernel for rows of this size, set before any label is seen."""
    length = np.sqrt(size_of(P))
    variance, lengths = ((0.5, 25.0), (0.3, 6.0)) if bounded else ((1e-3, 1e5), (1e-2, 1e2))
    bounds = tuple(length * b for b in lengths)
    return ConstantKernel(4.0, variance) * RBF(1.5 * length, bounds)


def model_of(kind, P):
    """Return the classifier that all strategies share, its prior set before any label is seen."""
    if kind == "linear":
        return ConvexVariationalLogistic(8.0 / size_of(P), max_iter=50)
    return EPGaussianProcessClassifier(kernel_of(P), hyperparameters="mode")


def settings_of(kind, P):
    """Return classifiers that differ in what becomes of their hyperparameters, by name."""
    if kind == "linear":
        return {
            "variance fixed": ConvexVariationalLogistic(8.0 / size_of(P), calibration=None),
            "variance learned": ConvexVariationalLogistic(hyperparameters="mode", calibration=None),
            "variance averaged": ConvexVariationalLogistic(calibration=None),
            "averaged, calibrated (default)": ConvexVariationalLogistic(),
        }
    return {
        "bounds, learned": model_of("gp", P),
        "free, learned": EPGaussianProcessClassifier(kernel_of(P, False), hyperparameters="mode"),
        "free, averaged": EPGaussianProcessClassifier(
            kernel_of(P, False), hyperparameters="integrate"
        ),
    }


# ---------------------------------------------------------------------------- who chooses


def ours(strategy, seed):
    """Return a function that chooses rows by one of our strategies, with labels fed back.

    In large pools look-ahead scores count at 50 rows in place of 200, for the time that it takes.
    """

    def choose(model, P, y, have, count):
        learner = Learner(model, P, labels_of(y, have), strategy=strategy, refit_every=count + 1,
                          n_reference=50 if len(y) > 1000 and strategy == "epig_entropy" else None,
                          random_state=seed if strategy == "random" else None)  # fmt: skip
        for _ in range(count):
            rows = learner.ask()
            learner.tell(rows, y[rows])
        return learner.labelled_[len(have) :]

    return choose


def labels_of(y, have):
    """Return labels with nan where a row is not labelled."""
    known = np.full(len(y), np.nan)
    known[have] = y[have]
    return known


def theirs(*names):
    """Return functions that choose rows by strategies of scikit-activeml, all without names."""
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
        def choose(model, P, y, have, count):
            chosen, P = [], P.toarray() if sp.issparse(P) else P
            together = 1 if len(have) < 60 else count
            for _ in range(count // together):
                known, settings = labels_of(y, [*have, *chosen]), {}
                if argument is not None:
                    wrapped = Committee(model, classes=[0, 1]).fit(P, known)
                    settings = {argument: wrapped, f"fit_{argument}": False}
                chosen += strategy.query(P, known, batch_size=together, **settings).tolist()
            return chosen

        return choose

    draws = dict(sample_predictions_method_name="sample_proba", sample_predictions_dict={})
    found = {
        "entropy": by(UncertaintySampling("entropy", random_state=0), "clf"),
        "BatchBALD": by(BatchBALD(**draws, random_state=0), "ensemble"),
        "CoreSet": by(CoreSet(random_state=0), None),
    }
    return {f"skactiveml {name}": found[name] for name in names or found}


# ---------------------------------------------------------------------------- curves


def first_rows(y, seed):
    """Return the rows that are labelled at the start, both classes among them."""
    order = np.random.default_rng(200 + seed).permutation(len(y))
    both = [int(order[y[order] == c][0]) for c in (0, 1)]
    return both + [int(i) for i in order if i not in both][: START - 2]


def share_of(model, P, y, T):
    """Return probabilities of rows by a model, or the share of the only class that is labelled."""
    if len(np.unique(y)) > 1:
        return model.fit(P, y).predict_proba(T)
    share = (y.sum() + 0.5) / (len(y) + 1)
    return np.tile([1.0 - share, share], (T.shape[0], 1))


def first_ten(choose, model, data, seed):
    """Return error and log loss (1, 2) at ten labels of a session that starts from none."""
    P, y, T, t = data
    have = choose(model, P, y, [], START)
    proba = share_of(clone(model), P[have], y[have], T)
    return np.array([(np.mean(proba.argmax(1) != t), log_loss(proba, t))])


def curve(choose, model, data, marks, seed):
    """Return error and log loss (marks, 2); a kernel is learned at marks and kept between."""
    if marks == [START]:
        return first_ten(choose, model, data, seed)
    P, y, T, t = data
    have, out, kept = first_rows(y, seed), [], model
    for mark in marks:
        while len(have) < mark:
            chosen = choose(kept, P, y, have, min(BLOCK, mark - len(have)))
            have = have + [int(i) for i in chosen]
        fitted = clone(model).fit(P[have], y[have])
        if getattr(fitted, "hyperparameters", None) == "mode" and hasattr(fitted, "kernel_"):
            kept = clone(model).set_params(kernel=fitted.kernel_, optimizer=None)
        proba = fitted.predict_proba(T)
        out.append((np.mean(proba.argmax(1) != t), log_loss(proba, t)))
    return np.array(out)


def curves(data_of, models_of, choosers_of, seeds, marks):
    """Return the marks reached and {who: curves (seeds, marks, 2)} on one set.

    `data_of(seed)` gives the data, `models_of(P)` classifiers by name, and `choosers_of(seed)`
    functions that choose by name; who is the name of the strategy, before it that of the classifier
    where there are several.
    """
    found = {}
    for seed in range(seeds):
        data = data_of(seed)
        reached = [m for m in marks if m <= int(0.6 * data[0].shape[0])]
        models = models_of(data[0])
        for label, model in models.items():
            for strategy, choose in choosers_of(seed).items():
                who = strategy if len(models) == 1 else f"{label}: {strategy}"
                draws = choose if isinstance(choose, list) else [choose]
                runs = [curve(one, model, data, reached, seed) for one in draws]
                found.setdefault(who, []).append(np.mean(runs, axis=0))
    return reached, {who: np.array(v) for who, v in found.items()}


def choosers(strategies, peers, seed):
    """Return what chooses rows, by name: random rows more than once."""
    own = {s: ours(s, seed) for s in strategies if s != "random"}
    draws = [ours("random", seed + 1000 * draw) for draw in range(RANDOM_DRAWS)]
    return {"random": draws, **own, **peers}


# ---------------------------------------------------------------------------- parts


def small_part(args, add):
    """Pools of 400 rows: all strategies."""
    strategies = STRATEGIES[:2] + STRATEGIES[4:] if args.quick else STRATEGIES
    for kind, names in SMALL.items():
        for name in names:
            if not args.quick or name in QUICK:
                add(
                    f"small, {kind}",
                    name,
                    400,
                    lambda P, kind=kind: {kind: model_of(kind, P)},
                    lambda seed: choosers(strategies, theirs(), seed),
                )


def large_part(args, add):
    """Large sparse pools, the linear model; scikit-activeml takes none with many columns."""
    for name, n_pool in LARGE.items():
        add(
            "large, linear",
            name,
            n_pool if not args.quick else 400,
            lambda P: {"linear": model_of("linear", P)},
            lambda seed, name=name: choosers(
                ("epig_entropy", "uncertainty"),
                {} if name in TEXT else theirs("entropy", "CoreSet"),
                seed,
            ),
        )


def settings_part(args, add):
    """Pools of 400 rows: what becomes of hyperparameters, for random rows and the default."""
    for kind, names in SETTINGS.items():
        for name in names:
            if not args.quick:
                add(
                    f"settings, {kind}",
                    name,
                    800 if name in TEXT else 400,
                    lambda P, kind=kind: settings_of(kind, P),
                    lambda seed: choosers(("epig_entropy",), {}, seed),
                    most=100,
                )


def first_part(args, add):
    """Pools of 300 rows: the first ten of a session, and random ones; models at their defaults."""
    models = {"linear": ConvexVariationalLogistic(), "gp": EPGaussianProcessClassifier()}
    for kind, model in models.items():
        for name in FIRST if not args.quick else QUICK[:2]:
            add(
                f"first, {kind}",
                name,
                300,
                lambda P, kind=kind, model=model: {kind: model},
                lambda seed: choosers(("auto",), {}, seed),
                most=START,
            )


PARTS = {"first": first_part, "settings": settings_part, "large": large_part, "small": small_part}


class Results:
    """Curves of all sets so far, stored after each."""

    def __init__(self, args):
        self.args, self.sets = args, stored_sets(args) if args.resume else []
        self.seeds, self.most = (2, 40) if args.quick else (5, 200)

    def add(self, part, name, n_pool, models_of, choosers_of, most=None):
        """Run one set, if its data are there."""
        found = loaded(self.args, name)
        known = any((part, name) == (record["part"], record["set"]) for record in self.sets)
        if found is None or known or name not in (self.args.sets or [name]):
            return
        marks = [m for m in (START, *MARKS) if m <= min(self.most, most or self.most)]
        marks = marks[:1] if most == START else marks[1:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reached, values = curves(
                lambda seed: split(name, *found, seed, n_pool),
                models_of,
                choosers_of,
                self.seeds * (4 if most == START else 1),
                marks,
            )
        each = {who: curve_record(v) for who, v in values.items()}
        self.sets.append({"part": part, "set": name, "labels": reached, "curves": each})
        table(summary([self.sets[-1]]), ["strategy", "error", "log loss"])
        save(self.args, "active_learning", self.rows())

    def rows(self):
        """Return what is stored: means over the sets of a part, with the curves of each."""
        return summary(self.sets)


def stored_sets(args):
    """Return the curves of the sets that are stored."""
    rows = json.loads((pathlib.Path(args.out) / "active_learning.json").read_text())["rows"]
    records = {}
    for row in rows:
        for name, one in row["curves"].items():
            empty = {"part": row["part"], "set": name, "labels": one["labels"], "curves": {}}
            record = records.setdefault((row["part"], name), empty)
            record["curves"][row["strategy"]] = one
    return sorted(records.values(), key=lambda record: record["part"])


def curve_record(values):
    """Return means over the seeds of curves (seeds, marks, 2), and their standard errors."""
    half = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return {
        "error": values[:, :, 0].mean(axis=0).tolist(),
        "log loss": values[:, :, 1].mean(axis=0).tolist(),
        "se of error": half[:, 0].tolist(),
        "se of log loss": half[:, 1].tolist(),
    }


def area(labels, values):
    """Return the mean of a curve over the number of labels."""
    if len(labels) == 1:
        return values[0]
    return np.trapezoid(values, labels) / (labels[-1] - labels[0])


def ratios(record, who):
    """Return the areas of error and log loss of a strategy over those of random rows.

    Where classifiers differ, random rows are those of the first.
    """
    labels, found = record["labels"], record["curves"]
    base = found[next(other for other in found if other.endswith("random"))]
    both = "error", "log loss"
    return [area(labels, found[who][what]) / area(labels, base[what]) for what in both]


def summary(records):
    """Return a row a part and strategy: geometric means of areas over those of random rows.

    Large pools have a row a set.
    """
    groups = {}
    for record in records:
        part, labels, found = record["part"], record["labels"], record["curves"]
        own = record["set"] if part.startswith("large") else ""
        for who, one in found.items():
            group = groups.setdefault((part, own, who), {"error": [], "log loss": [], "curves": {}})
            group["curves"][record["set"]] = {"labels": labels, **one}
            for what, ratio in zip(("error", "log loss"), ratios(record, who), strict=True):
                group[what].append(ratio)
    rows = []
    for (part, own, who), group in groups.items():
        row = {"part": part, "set": own or f"mean of {len(group['error'])}", "strategy": who}
        for what in ("error", "log loss"):
            of_sets = np.array(group[what])
            row[what] = float(np.exp(np.mean(np.log(of_sets))))
            row[f"{what} below random"] = float(np.mean(of_sets < 1))
        rows.append({**row, "curves": group["curves"]})
    return rows


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--parts", dict(nargs="+", choices=PARTS, default=list(PARTS))),
        ("--sets", dict(nargs="+", default=None, help="names of sets, all without")),
        ("--resume", dict(action="store_true", help="keep the sets that are stored")),
        ("--figure", dict(action="store_true", help="only draw, from stored results")),
    )
    if args.figure:
        return draw(args, stored_sets(args))
    results = Results(args)
    for name in args.parts:
        PARTS[name](args, results.add)
    table(results.rows(), [column for column in results.rows()[0] if column != "curves"])
    draw(args, results.sets)


def draw(args, records):
    """Draw areas under the curves over those of random rows: a dot a set, and geometric means."""
    import matplotlib.pyplot as plt

    shown = {}
    for record in records:
        for who in record["curves"]:
            label = f"{record['part']}: {who.replace('skactiveml', 'scikit-activeml')}"
            shown.setdefault(label, []).append(ratios(record, who))
    fig, axes = plt.subplots(
        1, 2, figsize=(9, 0.2 * len(shown) + 1), sharey=True, layout="constrained"
    )
    for column, (ax, what) in enumerate(zip(axes, ("error", "log loss"), strict=True)):
        for place, values in enumerate(shown.values()):
            values = np.array(values)[:, column]
            ax.plot(values, np.full(len(values), place), "o", color="0.7", ms=4)
            ax.plot(np.exp(np.log(values).mean()), place, "o", color="tab:blue", ms=6)
        ax.axvline(1.0, color="0.6", lw=1, zorder=0)
        ax.set(xlabel=f"mean {what}, random rows = 1", xscale="log")
        ax.set_xticks(*2 * [[0.5, 0.7, 1.0, 1.4]])
        ax.minorticks_off()
    axes[0].set_yticks(range(len(shown)), list(shown), fontsize=8)
    axes[0].set_ylim(len(shown) - 0.5, -0.5)
    figure(args, "active_learning", fig)


if __name__ == "__main__":
    main()
