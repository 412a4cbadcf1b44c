"""How much too good left-out probabilities are, and what it tells the weights of a stack.

    python doc/benchmarks/left_out.py [--quick] [--data FOLDER] [--splits 3]

Default stacks of the sets of arena.py, and of tables with many columns cut from others: the most
frequent words of two collections, 200 genes, pixels. The sum of the log probabilities of rows left
out less what new rows have is compared with that of the parts that learn no lengths and no bends
(linear model, boosting, forest): "nats" is the difference in nats of all training rows. Beside it
stand the effective lengths of the process, and degrees of freedom of the additive part. The last
columns are log losses of the stack on new rows, with weights that allow for nothing, for a quarter
of a nat a column, and for what the package does.
"""

import warnings

import arena
import numpy as np
from common import arguments, save, table
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedShuffleSplit

from sklearn_ep import BayesianStackingClassifier
from sklearn_ep.stacking._classifier import _posterior_of_weights
from sklearn_ep.stacking._parts import leave_one_out, optimism

PLAIN = "linear", "boosting", "forest"
FIGURES = "columns", "lengths", "nats", "degrees", "nats of additive"
FIGURES += tuple(f"loss, {rule}" for rule in ("nothing", "columns", "lengths"))
QUICK = "heart", "thyroid", "iris"


def most_frequent(name, folder, n_words):
    """Return the most frequent words of a collection as a dense table, and the classes."""
    X, y = arena.load(name, folder)
    top = np.argsort(-np.bincount(X.indices, minlength=X.shape[1]), kind="stable")
    return X[:, top[:n_words]].toarray(), y


def some_genes(name, folder, n_genes):
    """Return that many genes, drawn at random, and the classes."""
    X, y = arena.load(name, folder)
    return X[:, np.random.default_rng(0).permutation(X.shape[1])[:n_genes]], y


def pixels(*digits):
    """Return the 64 pixels of some digits of scikit-learn, and which these are."""
    X, y = load_digits(return_X_y=True)
    own = np.isin(y, digits)
    return X[own], y[own]


def wide(folder):
    """Yield (name, X, y) of tables with many columns."""
    yield "pixels of 3, 8, 9", *pixels(3, 8, 9)
    if folder is not None:
        for name in ("rcv1_small", "rt_polarity"):
            for n_words in (100, 300):
                yield f"{n_words} words of {name}", *most_frequent(name, folder, n_words)
        for name in ("colon", "prostate_singh"):
            yield f"200 genes of {name}", *some_genes(name, folder, 200)


def cases(args):
    """Yield (name, splits) of all sets."""
    for name in QUICK if args.quick else (*arena.FROM_FOLDER, *arena.FROM_SCIKIT_LEARN):
        found = arena.load(name, args.data)
        if found is not None and found[0].shape[1] <= 500:
            categories = arena.CATEGORIES.get(name, ())
            yield name, arena.splits(*found, name, args.splits, categories)
    for name, X, y in [] if args.quick else wide(args.data):
        n_train = min(int(0.7 * len(y)), arena.MOST_TRAINED)
        n_test = min(len(y) - n_train, arena.MOST_TESTED)
        sizes = dict(train_size=n_train, test_size=n_test, random_state=7)
        yield name, splits_of(X, y, StratifiedShuffleSplit(args.splits, **sizes))


def splits_of(X, y, splitter):
    """Yield standardised training and new rows with their classes."""
    for train, test in splitter.split(X, y):
        own, new = arena.standardised(X, train, test, ())
        yield own, y[train], new, y[test]


def log_p_of(part, X, y):
    """Return the log probabilities (n,) of labels."""
    proba = part.predict_proba(X)[np.arange(len(y)), np.searchsorted(part.classes_, y)]
    return np.log(np.clip(proba, 1e-15, 1.0))


def figures(X, y, X_new, y_new):
    """Return what one split tells, by name."""
    model = BayesianStackingClassifier(random_state=0).fit(X, y)
    named, n = list(model.named_estimators_.items()), len(y)
    told = np.log([leave_one_out(name, part, y) for name, part in named])
    new = np.array([log_p_of(part, X_new, y_new) for _, part in named])
    known = np.isfinite(told).all(axis=0)
    gap = dict(zip(dict(named), told[:, known].mean(axis=1) - new.mean(axis=1), strict=True))
    plain = np.mean([gap[name] for name in PLAIN])
    d, K = model.n_features_in_, len(model.classes_)
    column = {"gaussian_process": 0.25, "additive": 0.1}
    by_column = np.array([column.get(name, 0.0) * d * min(K - 1, 2) / n for name, _ in named])
    found = {"columns": d, "lengths": float(np.sum(named[0][1].effective_lengths_))}
    found["nats"] = n * (gap["gaussian_process"] - plain)
    if "additive" in gap:
        found["degrees"] = float(np.sum(dict(named)["additive"][-1].effective_dof_))
        found["nats of additive"] = n * (gap["additive"] - plain)
    rules = {"nothing": 0.0, "columns": by_column[:, None], "lengths": optimism(named, n)}
    for rule, off in rules.items():
        weights, _ = _posterior_of_weights((told - off)[:, known].T, np.ones(known.sum()))
        found[f"loss, {rule}"] = -np.mean(np.log(weights @ np.exp(new)))
    return found


def main():
    """Fit all splits and tabulate means over them."""
    splits = ("--splits", dict(type=int, default=3))
    args, rows = arguments(__doc__.splitlines()[0], splits), []
    for name, each in cases(args):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [figures(*split) for split in each]
        means = {k: float(np.mean([f[k] for f in found])) for k in found[0]}
        rows.append({"set": name} | means)
    rows.append({"set": "mean"} | {k: np.mean([r[k] for r in rows if k in r]) for k in FIGURES})
    table(rows, ["set", *FIGURES])
    save(args, "left_out", rows)


if __name__ == "__main__":
    main()
