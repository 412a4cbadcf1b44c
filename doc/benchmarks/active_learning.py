"""Error and log loss against labels for query strategies: figure 2 of Nickisch and Seeger (2009).

    python doc/benchmarks/active_learning.py --data FOLDER            a9a and rt_polarity, ten seeds
    python doc/benchmarks/active_learning.py --quick [--data FOLDER]  fewer labels, two seeds

Without --data one generated pool stands in. Every strategy starts from the same 100 labels and
buys blocks; "margin, LogisticRegression" is scikit-activeml's `UncertaintySampling` where that is
installed and the same rule by `query` otherwise.
"""

import importlib.util
import pathlib
import warnings

from common import arguments, figure, log_loss, save, table
from sparse_logistic import load

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

from sklearn_ep import ConvexVariationalLogistic
from sklearn_ep.active_learning import query
from sklearn_ep.datasets import make_sparse_logistic

STRATEGIES = ("random", "uncertainty", "information_gain", "variance_reduction")
PEER = "margin, LogisticRegression"


def pools(args):
    """Yield name, X, y, number of pool rows, prior variance and block size."""
    found = False
    for name, prior, block in (("a9a", 1.0, 3), ("rt_polarity", 10.0, 5)):
        if args.data and (pathlib.Path(args.data) / f"{name}.npz").exists():
            found = True
            X, y = load(args.data, name)[0]
            yield name, normalize(X) if name == "rt_polarity" else X, y, prior, block
    if not found:
        X, y, _ = make_sparse_logistic(6000, 400, n_per_row=30, random_state=0)
        yield "generated", X, y, 4.0, 5


def peer_query(model, P, labels, have, block):
    """Rows that scikit-activeml's margin sampling asks for, or the same rule without it."""
    if importlib.util.find_spec("skactiveml") is None or P.shape[1] > 1000:
        return query(model, P, block, strategy="margin", exclude=have)
    from skactiveml.classifier import SklearnClassifier
    from skactiveml.pool import UncertaintySampling

    known = np.full(len(labels), np.nan)
    known[have] = labels[have]
    clf = SklearnClassifier(LogisticRegression(max_iter=500), classes=[0, 1])
    strategy = UncertaintySampling(method="margin_sampling", random_state=0)
    return strategy.query(P.toarray(), known, clf, batch_size=block)


def curve(strategy, P, y, X_new, y_new, prior, block, marks, seed):
    """Error and log loss at the numbers of labels in `marks`."""
    have, out = list(range(marks[0])), []
    while True:
        if strategy == PEER:
            model = LogisticRegression(C=prior, max_iter=500)
        else:
            model = ConvexVariationalLogistic(prior, max_iter=50)
        model.fit(P[have], y[have])
        if len(have) in marks:
            proba = model.predict_proba(X_new)
            out.append((np.mean(proba.argmax(1) != y_new), log_loss(proba, y_new)))
        if len(have) >= marks[-1]:
            return out
        step = min(block, next(m for m in marks if m > len(have)) - len(have))
        if strategy == PEER:
            new = peer_query(model, P, y, have, step)
        else:
            new = query(
                model, P, step, strategy=strategy, exclude=have, random_state=seed + len(have)
            )
        have += [int(i) for i in new]


def main():
    args = arguments(__doc__.splitlines()[0])
    marks = [100, 150, 200] if args.quick else [100, 200, 300, 400, 600, 850]
    seeds, n_pool = (2, 1000) if args.quick else (10, 6000)
    rows, curves = [], {}
    for name, X, y, prior, block in pools(args):
        order = np.random.default_rng(0).permutation(len(y))
        n_new = min(len(y) // 2, 16_000)
        X_new, y_new = X[order[-n_new:]], y[order[-n_new:]]
        for strategy in (*STRATEGIES, PEER):
            values = []
            for seed in range(seeds):
                rng = np.random.default_rng(10 + seed)
                rows_of_pool = rng.choice(order[:-n_new], min(n_pool, len(y) - n_new), False)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    values.append(
                        curve(
                            strategy, X[rows_of_pool], y[rows_of_pool], X_new, y_new, prior,
                            10 * block if args.quick else block, marks, 1000 * seed,
                        )
                    )  # fmt: skip
            mean = np.mean(values, axis=0)
            curves[name, strategy] = mean
            spread = np.std(np.array(values)[:, -1, 0])
            for mark, (error, loss) in zip(marks, mean, strict=True):
                rows.append(
                    {
                        "pool": name,
                        "strategy": strategy,
                        "labels": mark,
                        "error": float(error),
                        "log loss": float(loss),
                        "sd of the last error": float(spread),
                    }
                )
    table([r for r in rows if r["labels"] == marks[-1]], list(rows[0]))
    draw(args, curves, marks)
    save(args, "active_learning", rows)


def draw(args, curves, marks):
    """Draw error and log loss against labels for each pool."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    fig, axes = plt.subplots(
        len(names), 2, figsize=(9, 3.4 * len(names)), squeeze=False, layout="constrained"
    )
    for (name, strategy), mean in curves.items():
        for k, label in enumerate(("error", "log loss")):
            ax = axes[names.index(name), k]
            ax.plot(marks, mean[:, k], marker="o", markersize=3, label=strategy)
            ax.set(xlabel="labels", ylabel=label, title=name)
    axes[0, 0].legend(fontsize=7)
    figure(args, "active_learning", fig)


if __name__ == "__main__":
    main()
