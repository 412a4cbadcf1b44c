"""Fit partitions on a dask cluster, lose a worker half-way, and end with the same answer.

    python doc/benchmarks/cluster.py            400 000 rows in 8 parts
    python doc/benchmarks/cluster.py --quick    40 000 rows in 4 parts

Starts two worker processes on the loopback interface, fits from functions that load each part on
the worker that needs it, kills one worker during the fit and compares with one process without
dask. Needs dask[distributed].
"""

from common import arguments, save, table

import functools
import os
import pathlib
import signal
import tempfile
import threading
import time

import joblib
import numpy as np
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier


def write_parts(folder, n, n_parts):
    """Write X and y of every part; return a few rows to compare predictions on."""
    rng = np.random.default_rng(0)
    for k in range(n_parts):
        X = rng.standard_normal((n // n_parts, 8))
        noise = rng.standard_normal(len(X))
        np.save(folder / f"X{k}.npy", X)
        np.save(folder / f"y{k}.npy", (np.sin(2 * X[:, 0]) + X[:, 1] + noise > 0).astype(int))
    return X[:1000]


def load(folder, k):
    """Return part k, and leave a mark that says which process loaded it."""
    pathlib.Path(folder, f"loaded_{os.getpid()}_{time.time_ns()}").touch()
    return np.load(f"{folder}/X{k}.npy", mmap_mode="r"), np.load(f"{folder}/y{k}.npy")


def model(X):
    """Sparse EP at a fixed kernel: every pass is a round over the parts."""
    return EPGaussianProcessClassifier(
        ConstantKernel(3.0) * RBF(2.0),
        inducing_points=X[:100],
        method="sparse",
        optimizer=None,
        tol=1e-6,
        random_state=0,
    )


def kill_one(folder, pids, killed, after):
    """Kill the first worker that is seen at work after so many loads."""
    while not killed:
        marks = sorted(pathlib.Path(folder).glob("loaded_*"))
        at_work = [int(m.name.split("_")[1]) for m in marks[after:]]
        for pid in at_work:
            if pid in pids and not killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(0.01)


def main():
    from distributed import Client, LocalCluster

    args = arguments(__doc__.split("\n")[0])
    n, n_parts = (40_000, 4) if args.quick else (400_000, 8)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        X_new = write_parts(folder, n, n_parts)
        parts = [functools.partial(load, name, k) for k in range(n_parts)]
        start = time.perf_counter()
        alone = model(X_new).fit(parts)
        alone_seconds = time.perf_counter() - start
        for mark in folder.glob("loaded_*"):
            mark.unlink()
        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            local_directory=name,
            silence_logs=50,
        )
        with cluster, Client(cluster) as client:
            pids, killed = list(client.run(os.getpid).values()), []
            killer = threading.Thread(
                target=kill_one, args=(name, pids, killed, 3 * n_parts), daemon=True
            )
            killer.start()
            start = time.perf_counter()
            with joblib.parallel_config(backend="dask", retries=5):
                spread = model(X_new).fit(parts)
            seconds = time.perf_counter() - start
    gap = np.max(np.abs(spread.predict_proba(X_new) - alone.predict_proba(X_new)))
    rows = [
        {
            "rows": n,
            "parts": n_parts,
            "workers killed": len(killed),
            "sweeps": spread.n_sweeps_,
            "largest difference of probabilities": float(gap),
            "seconds alone": alone_seconds,
            "seconds on the cluster": seconds,
        }
    ]
    table(rows, list(rows[0]))
    save(args, "cluster", rows)


if __name__ == "__main__":
    main()
