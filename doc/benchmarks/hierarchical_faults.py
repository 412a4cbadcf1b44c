"""Kill what runs a hierarchical fit, go on, and end with the same posterior.

    python doc/benchmarks/hierarchical_faults.py            800 groups in 8 parts
    python doc/benchmarks/hierarchical_faults.py --quick    80 groups in 4 parts

First a process that fits with a checkpoint is killed by SIGKILL between two sweeps and the fit is
started again. Then a worker of a dask cluster of two processes is killed during the fit (needs
dask[distributed]; left out without). Both are compared with a fit that nothing happened to.
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

from sklearn_ep import HierarchicalEPLogistic
from sklearn_ep.datasets import make_hierarchical_logistic

SETTING = dict(group_column=10, damping=0.5, tol=1e-6, max_iter=60)


def write_parts(folder, n_groups, n_parts):
    """Write X, with the group in its last column, and y of every part."""
    X, y, groups, *_ = make_hierarchical_logistic(n_groups, 30, 10, random_state=0)
    for k in range(n_parts):
        rows = groups % n_parts == k
        np.save(folder / f"X{k}.npy", np.column_stack([X, groups])[rows])
        np.save(folder / f"y{k}.npy", y[rows])


def load(folder, k):
    """Return part k, and leave a mark that says which process loaded it."""
    pathlib.Path(folder, f"loaded_{os.getpid()}_{time.time_ns()}").touch()
    return np.load(f"{folder}/X{k}.npy"), np.load(f"{folder}/y{k}.npy")


def fit_with_checkpoint(folder, n_parts, path):
    parts = [functools.partial(load, folder, k) for k in range(n_parts)]
    HierarchicalEPLogistic(**SETTING).fit(parts, checkpoint=path)


def killed_and_resumed(folder, n_parts, saves=4):
    """Kill a fit after so many checkpoints; return the fit that goes on from the file."""
    path = pathlib.Path(folder, "state.npz")
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=fit_with_checkpoint, args=(folder, n_parts, str(path)))
    process.start()
    seen, last = 0, None
    while process.is_alive() and seen < saves:
        written = path.stat().st_mtime_ns if path.exists() else None
        seen, last = seen + (written != last), written
        time.sleep(0.001)
    process.kill()
    process.join()
    parts = [functools.partial(load, folder, k) for k in range(n_parts)]
    return HierarchicalEPLogistic(**SETTING).fit(parts, checkpoint=path), process.exitcode


def kill_one(folder, pids, killed, after):
    """Kill the first worker that is seen at work after so many loads."""
    while not killed:
        for mark in sorted(pathlib.Path(folder).glob("loaded_*"))[after:]:
            pid = int(mark.name.split("_")[1])
            if pid in pids:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                break
        time.sleep(0.01)


def with_lost_worker(folder, n_parts):
    """Fit on a cluster that loses a worker; None without dask."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        return None, 0
    for mark in pathlib.Path(folder).glob("loaded_*"):
        mark.unlink()
    cluster = LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
        local_directory=folder,
        silence_logs=50,
    )
    parts = [functools.partial(load, folder, k) for k in range(n_parts)]
    with cluster, Client(cluster) as client:
        pids, killed = list(client.run(os.getpid).values()), []
        watch = (folder, pids, killed, 5 * n_parts)
        threading.Thread(target=kill_one, args=watch, daemon=True).start()
        with joblib.parallel_config(backend="dask", retries=5):
            return HierarchicalEPLogistic(**SETTING).fit(parts), len(killed)


def compared(event, fit, count, whole):
    gap = np.max(np.abs(fit.coef_ - whole.coef_) / whole.coef_std_)
    return {
        "event": event,
        "killed": count,
        "sweeps of this run": fit.n_iter_,
        "sweeps undisturbed": whole.n_iter_,
        "largest difference of means, sd": float(gap),
        "difference of log evidence": float(abs(fit.log_evidence_ - whole.log_evidence_)),
    }


def main():
    args = arguments(__doc__.split("\n")[0])
    n_groups, n_parts = (80, 4) if args.quick else (800, 8)
    with tempfile.TemporaryDirectory() as folder:
        write_parts(pathlib.Path(folder), n_groups, n_parts)
        parts = [functools.partial(load, folder, k) for k in range(n_parts)]
        whole = HierarchicalEPLogistic(**SETTING).fit(parts)
        fit, code = killed_and_resumed(folder, n_parts)
        rows = [compared("process killed, resumed", fit, int(code == -signal.SIGKILL), whole)]
        fit, count = with_lost_worker(folder, n_parts)
        if fit is not None:
            rows.append(compared("dask worker killed", fit, count, whole))
    table(rows, list(rows[0]))
    save(args, "hierarchical_faults", rows)


if __name__ == "__main__":
    main()
