"""Kill what runs a fit over partitions, go on, and end with the same answer.

    python doc/benchmarks/cluster.py            400 000 rows, and 800 groups, in 8 parts
    python doc/benchmarks/cluster.py --quick    40 000 rows, and 80 groups, in 4 parts

Starts two dask workers on the loopback interface, fits sparse EP and the hierarchical model from
functions that load each part on the worker that needs it, and kills one worker during each fit.
Then a process that fits the hierarchical model with a checkpoint is killed by SIGKILL between two
sweeps and the fit is started again. All are compared with one process that nothing happens to.
Needs dask[distributed].
"""

from common import arguments, save, table

import functools
import multiprocessing
import os
import pathlib
import signal
import tempfile
import threading
import time

import joblib
import numpy as np
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from sklearn_ep import EPGaussianProcessClassifier, HierarchicalEPLogistic
from sklearn_ep.datasets import make_hierarchical_logistic


def write_part(folder, k, X, y):
    np.save(f"{folder}/X{k}.npy", X)
    np.save(f"{folder}/y{k}.npy", y)


def write_rows(folder, n, n_parts):
    """Write parts of labelled rows; return a few of them to compare predictions on."""
    rng = np.random.default_rng(0)
    for k in range(n_parts):
        X = rng.standard_normal((n // n_parts, 8))
        noise = rng.standard_normal(len(X))
        write_part(folder, k, X, (np.sin(2 * X[:, 0]) + X[:, 1] + noise > 0).astype(int))
    return X[:1000]


def write_groups(folder, n_groups, n_parts):
    """Write parts of whole groups, their number in the last column; return a few rows."""
    X, y, groups, *_ = make_hierarchical_logistic(n_groups, 30, 10, random_state=0)
    X = np.column_stack([X, groups])
    for k in range(n_parts):
        rows = groups % n_parts == k
        write_part(folder, k, X[rows], y[rows])
    return X[:1000]


def load(folder, k):
    """Return part k, and leave a mark that says which process loaded it."""
    pathlib.Path(folder, f"loaded_{os.getpid()}_{time.time_ns()}").touch()
    return np.load(f"{folder}/X{k}.npy", mmap_mode="r"), np.load(f"{folder}/y{k}.npy")


def loaders(folder, n_parts):
    return [functools.partial(load, str(folder), k) for k in range(n_parts)]


def sparse_model(X):
    """Sparse EP at a fixed kernel: every pass is a round over the parts."""
    return EPGaussianProcessClassifier(
        ConstantKernel(3.0) * RBF(2.0),
        inducing_points=X[:100],
        method="sparse",
        optimizer=None,
        tol=1e-6,
        random_state=0,
    )


def hierarchical_model(X):
    """Hierarchical EP with small steps, so that there is a middle to be killed in."""
    return HierarchicalEPLogistic(X.shape[1] - 1, damping=0.5, tol=1e-6, max_iter=60)


def kill_one(folder, pids, killed, after):
    """Kill the first worker that is seen at work after so many loads."""
    while not killed:
        marks = sorted(pathlib.Path(folder).glob("loaded_*"), key=lambda m: m.name.split("_")[2])
        for mark in marks[after:]:
            pid = int(mark.name.split("_")[1])
            if pid in pids:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                break
        time.sleep(0.01)


def with_lost_worker(folder, model, n_parts, rounds):
    """Fit on a cluster that loses a worker after so many rounds; return (fit, workers killed)."""
    from distributed import Client, LocalCluster

    for mark in folder.glob("loaded_*"):
        mark.unlink()
    cluster = LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
        local_directory=str(folder),
        silence_logs=50,
    )
    with cluster, Client(cluster) as client:
        pids, killed = list(client.run(os.getpid).values()), []
        watch = (folder, pids, killed, rounds * n_parts)
        threading.Thread(target=kill_one, args=watch, daemon=True).start()
        with joblib.parallel_config(backend="dask", retries=5):
            return model.fit(loaders(folder, n_parts)), len(killed)


def fit_with_checkpoint(folder, model, n_parts, path):
    model.fit(loaders(folder, n_parts), checkpoint=path)


def killed_and_resumed(folder, model, n_parts, saves=4):
    """Kill a process after so many checkpoints; return (fit that goes on, processes killed)."""
    path = folder / "state.npz"
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=fit_with_checkpoint, args=(folder, model, n_parts, path))
    process.start()
    seen, last = 0, None
    while process.is_alive() and seen < saves:
        written = path.stat().st_mtime_ns if path.exists() else None
        seen, last = seen + (written != last), written
        time.sleep(0.001)
    process.kill()
    process.join()
    fit = model.fit(loaders(folder, n_parts), checkpoint=path)
    return fit, int(process.exitcode == -signal.SIGKILL)


def compared(event, call, whole, X_new):
    """Run what something happens to; return its row of the table."""
    start = time.perf_counter()
    fit, killed = call()
    seconds = time.perf_counter() - start
    (mean, _), (other, var) = (f.latent_mean_and_variance(X_new) for f in (fit, whole))
    gap = np.abs(fit.predict_proba(X_new) - whole.predict_proba(X_new))
    return {
        "model": type(fit).__name__,
        "event": event,
        "killed": killed,
        "sweeps of this run": fit.n_iter_,
        "sweeps undisturbed": whole.n_iter_,
        "largest difference of means, sd": float(np.max(np.abs(mean - other) / np.sqrt(var))),
        "largest difference of probabilities": float(np.max(gap)),
        "difference of log evidence": abs(float(fit.log_evidence_ - whole.log_evidence_)),
        "seconds": seconds,
    }


def main():
    args = arguments(__doc__.split("\n")[0])
    n, n_groups, n_parts = (40_000, 80, 4) if args.quick else (400_000, 800, 8)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        X_new = write_rows(folder, n, n_parts)
        whole = sparse_model(X_new).fit(loaders(folder, n_parts))
        lost = functools.partial(with_lost_worker, folder, sparse_model(X_new), n_parts, rounds=3)
        rows.append(compared("dask worker killed", lost, whole, X_new))
        X_new = write_groups(folder, n_groups, n_parts)
        model = hierarchical_model(X_new)
        whole = hierarchical_model(X_new).fit(loaders(folder, n_parts))
        # rounds of the search for the start come first
        lost = functools.partial(with_lost_worker, folder, model, n_parts, rounds=10)
        rows.append(compared("dask worker killed", lost, whole, X_new))
        gone = functools.partial(killed_and_resumed, folder, model, n_parts)
        rows.append(compared("process killed, resumed", gone, whole, X_new))
    table(rows, list(rows[0]))
    save(args, "cluster", rows)


if __name__ == "__main__":
    main()
