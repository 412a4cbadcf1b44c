"""What an average over hyperparameters brings and costs, against the fit at their mode.

    python doc/benchmarks/averages.py [--quick] --data FOLDER

Small training sets of two classes, columns standardised; splits are those of arena.py, of which the
first rows are kept where a number of rows is said. Settings take turns, each after an untimed fit;
"CPU over the mode" is the median over splits. Averages of Gaussian processes are shown with one
length for all columns, too, which is all that the mode of the default kernel has.
"""

import functools
import warnings

import numpy as np
from arena import load, splits
from common import alternate, arguments, save, table
from sklearn.metrics import log_loss

from sklearn_ep import ConvexVariationalLogistic, EPGaussianProcessClassifier, RelaxedEPClassifier

# sets, and training rows to keep, 0 for all
SETS = {
    "heart": 0, "thyroid": 0, "ionosphere": 0, "sonar": 0, "crabs": 0, "haberman": 0, "pima532": 0,
    "titanic": 0, "breast_cancer_ljubljana": 0, "banana": 100, "german": 200, "splice": 200,
    "image": 250,
}  # fmt: skip
QUICK = ("crabs", "banana")
SETTINGS = {
    EPGaussianProcessClassifier: ("mode", "integrate", "auto"),
    RelaxedEPClassifier: ("mode", "auto"),
    ConvexVariationalLogistic: ("mode", "auto"),
}


def named(model, how):
    """Return what a setting is called in the tables."""
    one_length = model is EPGaussianProcessClassifier and how == "integrate"
    return "integrate, one length" if one_length else how


def split_figures(model, part, n_kept):
    """Return {setting: (log loss, error, CPU seconds)} of one split."""
    X, y, X_new, y_new = part
    X, y = (X[:n_kept], y[:n_kept]) if n_kept else (X, y)
    found = {}
    fits = {
        how: functools.partial(model(hyperparameters=how, random_state=0).fit, X, y)
        for how in SETTINGS[model]
    }
    alternate(fits, 1)
    for how, (fit, seconds) in alternate(fits, 3).items():
        proba = fit.predict_proba(X_new)
        loss = log_loss(y_new, proba, labels=fit.classes_)
        found[how] = loss, np.mean(fit.predict(X_new) != y_new), seconds
    return found


def rows_of(name, n_kept, shape, model, figures):
    """Return a row a setting: means over splits."""
    rows = []
    for how in SETTINGS[model]:
        loss, error, seconds = np.array([split[how] for split in figures]).T
        mode = np.array([split["mode"][2] for split in figures])
        rows.append(
            {
                "set": f"{name}, {n_kept} rows" if n_kept else name,
                "columns": shape[1],
                "model": model.__name__,
                "hyperparameters": named(model, how),
                "log loss": loss.mean(),
                "error": error.mean(),
                "CPU over the mode": float(np.median(seconds / mode)),
            }
        )
    return rows


def summary(rows):
    """Return means over sets, a row for each model and setting."""
    pairs = dict.fromkeys((r["model"], r["hyperparameters"]) for r in rows)
    out = []
    for model, how in pairs:
        own = [r for r in rows if (r["model"], r["hyperparameters"]) == (model, how)]
        means = {
            k: np.mean([r[k] for r in own]) for k in ("log loss", "error", "CPU over the mode")
        }
        out.append({"set": "all", "model": model, "hyperparameters": how} | means)
    return out


def main():
    args = arguments(__doc__.splitlines()[0])
    warnings.simplefilter("ignore")
    rows = []
    for name, n_kept in SETS.items():
        data = load(name, args.data)
        if data is None or (args.quick and name not in QUICK):
            continue
        parts = list(splits(*data, name, 2 if args.quick else 5))
        for model in SETTINGS:
            figures = [split_figures(model, part, n_kept) for part in parts]
            rows += rows_of(name, n_kept, data[0].shape, model, figures)
            table(rows[-len(SETTINGS[model]) :], list(rows[-1]))
    rows += summary(rows)
    table(rows[-sum(map(len, SETTINGS.values())) :], list(rows[-1]))
    save(args, "averages", rows)


if __name__ == "__main__":
    main()
