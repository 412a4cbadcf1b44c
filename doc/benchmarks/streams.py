"""A stream of sparse rows with many columns, in bounded memory, beside stochastic gradients.

    python doc/benchmarks/streams.py [--quick]

Rows are made batch by batch and never kept. Both models see each row once; log loss is that of the
next batch before it is learned from, over the last half of the stream. Peak memory is that of a
process of its own, less what it needs to make the rows.
"""

import multiprocessing
import resource

import numpy as np
import scipy.sparse as sp
from common import arguments, cpu, save, table
from scipy.special import expit
from sklearn.linear_model import SGDClassifier

from sklearn_ep import ConvexVariationalLogistic


def batches(n_batches, size, d, per_row=50, seed=0):
    """Yield (X, y): rows of ones in columns drawn by a power law, 1 / sqrt(per_row) each."""
    rng = np.random.default_rng(seed)
    coef = rng.standard_normal(d) * np.sqrt(6.0)
    weight = 1.0 / np.arange(1, d + 1) ** 0.7
    edges = np.cumsum(weight) / weight.sum()
    for _ in range(n_batches):
        columns = np.minimum(np.searchsorted(edges, rng.random(size * per_row)), d - 1)
        data = np.full(size * per_row, 1.0 / np.sqrt(per_row))
        X = sp.csr_matrix((data, columns, np.arange(0, size * per_row + 1, per_row)), (size, d))
        X.sum_duplicates()
        yield X, (rng.random(size) < expit(X @ coef)).astype(int)


def loss(model, X, y):
    """Mean log loss of a batch that the model has not seen yet."""
    p = np.clip(model.predict_proba(X)[np.arange(len(y)), y], 1e-12, 1.0)
    return -float(np.mean(np.log(p)))


def follow(model, n_batches, size, d):
    """Learn a stream; return mean log loss, CPU seconds of learning, and peak memory in MB."""
    losses, seconds = [], 0.0
    for i, (X, y) in enumerate(batches(n_batches, size, d)):
        if 2 * i >= n_batches:
            losses.append(loss(model, X, y))
        seconds += cpu(lambda X=X, y=y: model.partial_fit(X, y, classes=[0, 1]))[1]
    return float(np.mean(losses)), seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


class Nothing:
    """The model that learns nothing: what is left is the price of the rows."""

    def predict_proba(self, X):
        return np.full((X.shape[0], 2), 0.5)

    def partial_fit(self, X, y, classes):
        return self


def sgd(rate):
    """Averaged stochastic gradients at a constant rate."""
    return SGDClassifier(
        loss="log_loss", learning_rate="constant", eta0=rate, alpha=1e-7, average=True,
        random_state=0,
    )  # fmt: skip


MODELS = {
    "nothing": Nothing(),
    "rank 0": ConvexVariationalLogistic(6.0, stream_rank=0, fit_intercept=False),
    "rank 5": ConvexVariationalLogistic(6.0, stream_rank=5, fit_intercept=False),
    "SGD, rate 0.1": sgd(0.1),
    "SGD, rate 1": sgd(1.0),
    "SGD, rate 10": sgd(10.0),
}


def in_own_process(name, *args):
    """Follow the stream in a new process, whose peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(follow, (MODELS[name], *args))


def main():
    args = arguments(__doc__.split("\n")[0])
    n_batches, size, d = (100, 200, 20_000) if args.quick else (5_000, 200, 100_000)
    rows, empty = [], 0.0
    # a rank costs some ten products of columns by it a batch, which the small size shows as well
    for name in [m for m in MODELS if args.quick or m != "rank 5"]:
        value, seconds, memory = in_own_process(name, n_batches, size, d)
        if name == "nothing":
            empty = memory
            continue
        tenth = in_own_process(name, n_batches // 10, size, d)[2]
        rows.append(
            {
                "model": name,
                "rows": n_batches * size,
                "columns": d,
                "log loss": value,
                "CPU seconds": seconds,
                "memory of the model, MB": memory - empty,
                "memory / that of a tenth of the rows": memory / tenth,
            }
        )
    best = min(r["log loss"] for r in rows if r["model"].startswith("SGD"))
    for r in rows:
        r["log loss - best SGD"] = r["log loss"] - best
    table(rows, list(rows[0]))
    save(args, "streams", rows)


if __name__ == "__main__":
    main()
