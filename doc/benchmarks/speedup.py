"""Time against workers: measured on two processes and on two dask workers, computed beyond.

    python doc/benchmarks/speedup.py            200,000 to 400,000 rows in four parts
    python doc/benchmarks/speedup.py --quick    20,000 rows

Three models over parts whose messages differ: inducing points, one grouping factor, and a logistic
model of few columns.
Parts are functions that read memory-mapped files where they run. Wall times mean something on an
idle machine only. Dask starts its workers so that freed memory goes back to the system at once,
which makes each temporary array cost page faults; they are timed so, and with that taken out. The
curve is for 10^9 rows on W workers that are linked to the driver at 1 GB/s:

    seconds a visit = rows / W * CPU seconds a row + parts * (message + answer) / 1 GB/s,

with a part a worker, the CPU time of one process, and bytes that are a number a part and a number a
row, told apart by a fit to half of the rows.
"""

import contextlib
import functools
import os
import pickle
import pathlib
import tempfile
import time
from unittest import mock

from common import arguments, figure, save, table

import joblib
import numpy as np
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import (
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
)
from sklearn_ep._engine.partition import PartMap
from sklearn_ep.datasets import make_hierarchical_logistic

N_PARTS, BANDWIDTH, ROWS = 4, 1e9, 1e9
WORKERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def load(folder, k):
    """Read part k."""
    return np.load(f"{folder}/X{k}.npy", mmap_mode="r"), np.load(f"{folder}/y{k}.npy")


def written(folder, X, y, edges):
    """Write rows in parts and return the functions that read them."""
    for k, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        np.save(f"{folder}/X{k}.npy", X[a:b])
        np.save(f"{folder}/y{k}.npy", y[a:b])
    return [functools.partial(load, str(folder), k) for k in range(len(edges) - 1)]


def plain_rows(n, d):
    """Rows, labels and even edges of parts."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    y = (X[:, 0] + np.sin(2 * X[:, 1]) + 0.5 * rng.normal(size=n) > 0).astype(int)
    return X, y, np.linspace(0, n, N_PARTS + 1).astype(int)


def inducing(n):
    """A Gaussian process at a fixed kernel through 100 points."""
    X, y, edges = plain_rows(n, 5)
    given = dict(inducing_points=X[:100], method="sparse", optimizer=None, random_state=0)
    return EPGaussianProcessClassifier(ConstantKernel(3.0) * RBF(2.0), **given), X, y, edges


def grouped(n):
    """One factor with 100 rows a level, ten columns."""
    X, y, groups, *_ = make_hierarchical_logistic(n // 100, 100, 10, random_state=0)
    edges = np.linspace(0, n // 100, N_PARTS + 1).astype(int) * 100
    return HierarchicalEPLogistic(10), np.column_stack([X, groups]), y, edges


def linear(n):
    """Logistic regression of 100 columns with exact variances."""
    X, y, edges = plain_rows(n, 100)
    return ConvexVariationalLogistic(1.0, variance="exact"), X, y, edges


MODELS = {
    "inducing points, m = 100": (inducing, 200_000),
    "one grouping factor, 10 columns": (grouped, 200_000),
    "logistic regression, 100 columns": (linear, 400_000),
}


@contextlib.contextmanager
def two_dask_workers(folder, keep_memory):
    """Let joblib run on two dask workers on the loopback interface."""
    import dask
    from distributed import Client, LocalCluster

    place = dict(host="127.0.0.1", dashboard_address=None, local_directory=str(folder))
    key = "distributed.nanny.pre-spawn-environ"
    environment = dask.config.get(key)
    if keep_memory:
        environment = {k: v for k, v in environment.items() if not k.startswith("MALLOC_TRIM")}
    with (
        mock.patch.dict(os.environ),  # a cluster leaves its variables to those that follow
        dask.config.set({key: environment}),
        LocalCluster(n_workers=2, threads_per_worker=1, silence_logs=50, **place) as cluster,
        Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        yield


def timed(fit):
    """Return wall and CPU seconds of the second of two fits: processes are started by then."""
    fit()
    wall, cpu = time.perf_counter(), time.process_time()
    fit()
    return time.perf_counter() - wall, time.process_time() - cpu


def traffic(model, parts):
    """Fit and return for each part and visit the bytes of message and answer."""
    call, found = PartMap.__call__, []

    def counted(self, worker, messages, *shared):
        answers = call(self, worker, messages, *shared)
        for message, answer in zip(messages, answers, strict=True):
            found.append((len(pickle.dumps((message, shared))), len(pickle.dumps(answer))))
        return answers

    PartMap.__call__ = counted
    try:
        model.fit(parts)
    finally:
        PartMap.__call__ = call
    return found


def measured(name, make, n, folder):
    """Return the row of one model, and its seconds a visit on each number of workers."""
    half = traffic(*halved(make, n, folder))
    model, X, y, edges = make(n)
    parts = written(folder, X, y, edges)
    wall, cpu = timed(lambda: model.set_params(n_jobs=1).fit(parts))
    sizes = traffic(model, parts)
    with joblib.parallel_config(backend="loky"):
        two, _ = timed(lambda: model.set_params(n_jobs=2).fit(parts))
    dask = []
    for keep_memory in (False, True):
        with two_dask_workers(folder, keep_memory):
            dask.append(timed(lambda: model.set_params(n_jobs=None).fit(parts))[0])
    n_visits, per_part = len(sizes) / N_PARTS, np.mean(sizes, axis=0)
    a_row = (per_part - np.mean(half, axis=0)).sum() / (n / N_PARTS / 2)
    row = {
        "model": name,
        "rows": n,
        "visits": n_visits,
        "kB to a part": per_part[0] / 1e3,
        "kB back": per_part[1] / 1e3,
        "bytes a row, both ways": a_row,
        "seconds, one process": wall,
        "two processes": two,
        "two dask workers": dask[0],
        "two dask workers that keep memory": dask[1],
        "speed-up, two processes": wall / two,
        "speed-up, two dask workers that keep memory": wall / dask[1],
    }
    return row, curve(cpu / n_visits / n, per_part.sum() - a_row * n / N_PARTS, a_row)


def halved(make, n, folder):
    """Return the model and parts of half as many rows."""
    model, X, y, edges = make(n // 2)
    return model, written(folder, X, y, edges)


def curve(seconds_a_row, bytes_a_part, bytes_a_row):
    """Return seconds a visit to 10^9 rows on each number of workers."""
    sent = [(W * bytes_a_part + ROWS * bytes_a_row) / BANDWIDTH for W in WORKERS]
    return [ROWS * seconds_a_row / W + s for W, s in zip(WORKERS, sent, strict=True)]


def draw(args, rows, curves):
    """Draw speed-up against workers: computed lines, measured points at two."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    ax.plot(WORKERS, WORKERS, color="0.7", lw=1, label="ideal")
    for k, (row, seconds) in enumerate(zip(rows, curves, strict=True)):
        ax.plot(WORKERS, seconds[0] / np.array(seconds), color=f"C{k}", label=row["model"])
        ax.plot(2, row["speed-up, two processes"], "o", color=f"C{k}")
        ax.plot(
            2, row["speed-up, two dask workers that keep memory"], "s", color=f"C{k}", mfc="none"
        )
    ax.set(xscale="log", yscale="log", xlabel="workers", ylabel="speed-up, 10⁹ rows")
    ax.set_title("lines computed; measured: dots two processes, squares two dask workers", size=10)
    ax.legend()
    figure(args, "speedup", fig)


def main():
    args = arguments(__doc__.splitlines()[0])
    rows, curves = [], []
    for name, (make, n) in MODELS.items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            row, seconds = measured(name, make, 20_000 if args.quick else n, pathlib.Path(folder))
        rows.append(row)
        curves.append(seconds)
    table(rows, list(rows[0]))
    computed = [
        {"workers": W} | {r["model"]: c[k] for r, c in zip(rows, curves, strict=True)}
        for k, W in enumerate(WORKERS)
    ]
    table(computed, list(computed[0]))
    save(args, "speedup", rows + computed)
    draw(args, rows, curves)


if __name__ == "__main__":
    main()
