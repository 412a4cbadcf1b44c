"""Workers killed at random times: each fit ends with the undisturbed answer or one clear error.

    python doc/benchmarks/kills.py                  200 kills over all kinds of fits
    python doc/benchmarks/kills.py --quick          one kill a kind, three minutes
    python doc/benchmarks/kills.py --kills 20 --first 7

Each fit runs on two processes of joblib, of which a thread kills one by SIGKILL at a random time of
the fit. A fault is an answer that differs in a bit from the undisturbed one, or any error other
than joblib's TerminatedWorkerError with the advice to use fewer jobs.
"""

import contextlib
import os
import pathlib
import signal
import threading
import time
import warnings

import joblib
import numpy as np
from common import arguments, save
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabClassifier,
    SpikeSlabRegressor,
)


def data(n_classes=2, n=240, d=4):
    """Return rows, labels, a response and groups."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d))
    z = X[:, 0] - 0.5 * X[:, 1] ** 2 + 0.7 * rng.normal(size=n)
    y = np.searchsorted(np.quantile(z, np.arange(1, n_classes) / n_classes), z)
    return X, y, z, rng.integers(0, 9, size=n)


def parts(X, y):
    """Return three partitions."""
    return [(X[i::3], y[i::3]) for i in range(3)]


def kinds():
    """Yield (name, function that fits and returns the numbers of the answer)."""
    X, y, z, groups = data()
    y3, jobs = data(3)[1], dict(n_jobs=2)
    GP, Linear, Groups = (
        EPGaussianProcessClassifier, ConvexVariationalLogistic, HierarchicalEPLogistic,
    )  # fmt: skip
    sparse = dict(method="sparse", n_inducing=12, random_state=0, optimizer=None)
    fits = {
        "GP average": lambda: GP(**jobs).fit(X, y),
        "GP one against the rest": lambda: GP(multi_class="one_vs_rest", **jobs).fit(X, y3),
        "GP partitions": lambda: GP(**sparse, **jobs).fit(parts(X, y)),
        "wrong labels": lambda: RelaxedEPClassifier(**jobs).fit(X[:120], y[:120]),
        "wrong labels, partitions": lambda: RelaxedEPClassifier(
            label_noise=0.1, **sparse, **jobs
        ).fit(parts(X, y)),
        "spike and slab": lambda: SpikeSlabRegressor(**jobs).fit(X, z),
        "spike and slab, partitions": lambda: SpikeSlabRegressor(**jobs).fit(parts(X, z)),
        "sparse classifier": lambda: SpikeSlabClassifier(**jobs).fit(X, y),
        "linear one against the rest": lambda: Linear(multi_class="one_vs_rest", **jobs).fit(X, y3),
        "linear partitions": lambda: Linear(n_partitions=3, hyperparameters="mode", **jobs).fit(
            X, y
        ),
        "linear sampled": lambda: Linear(
            variance="calibrated", n_partitions=3, hyperparameters="mode", random_state=0, **jobs
        ).fit(X, y),
        "regression partitions": lambda: ConvexVariationalRegressor().fit(parts(X, z)),
        "groups, partitions": lambda: Groups(n_partitions=3, **jobs).fit(X, y, groups),
        "groups, messages": lambda: Groups(
            engine="messages", n_partitions=3, hyperparameters="mode", **jobs
        ).fit(X, y, groups),
        "stack": lambda: BayesianStackingClassifier(**jobs).fit(X, y),
    }
    for name, fit in fits.items():
        with_groups = name.startswith("groups")

        def answer(fit=fit, with_groups=with_groups):
            extra = {"groups": groups[:40]} if with_groups else {}
            model = fit()
            return getattr(model, "predict_proba", model.predict)(X[:40], **extra)

        yield name, answer


def workers():
    """Return the processes of joblib's pool that this one has started."""
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"popen_loky_posix" in command:
                    found.append(int(pid))
    return sorted(found)


def kill_one(after, rng, done, killed):
    """Kill a worker after some seconds, or as soon as there is one, unless the fit is done."""
    if done.wait(after):
        return
    while not done.is_set():
        alive = workers()
        if alive:
            pid = alive[rng.integers(len(alive))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
        time.sleep(0.01)


def attempt(answer, truth, seconds, rng):
    """Return ("same", "error", "not killed" or what was wrong) of a fit that loses a worker."""
    done, killed = threading.Event(), []
    thread = threading.Thread(target=kill_one, args=(rng.uniform(0, seconds), rng, done, killed))
    thread.start()
    try:
        found = answer()
    except TerminatedWorkerError as error:
        return "error" if "fewer jobs" in str(error) else repr(error)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    finally:
        done.set()
        thread.join()
    if not killed:
        return "not killed"
    return "same" if np.array_equal(found, truth) else f"off by {np.abs(found - truth).max():.2g}"


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--kills", dict(type=int, default=200, help="number of kills")),
        ("--first", dict(type=int, default=0, help="seed")),
        ("--only", dict(nargs="+", default=[], help="kinds of fits, all if none is named")),
    )
    warnings.simplefilter("ignore")
    rng, rows = np.random.default_rng(args.first), []
    every = [(name, answer) for name, answer in kinds() if name in args.only or not args.only]
    n_kills = len(every) if args.quick else args.kills
    with joblib.parallel_config(backend="loky", n_jobs=2):
        for name, answer in every:
            truth = answer()
            start = time.perf_counter()
            again = answer()
            seconds = time.perf_counter() - start
            counts = {} if np.array_equal(truth, again) else {"differs undisturbed": 1}
            left = -(-n_kills // len(every))
            while left > 0:
                outcome = attempt(answer, truth, seconds, rng)
                counts[outcome] = counts.get(outcome, 0) + 1
                left -= 1 if outcome != "not killed" else 0.5
            rows.append(dict(kind=name, seconds=seconds, **counts))
            print(name, f"{seconds:.2f} s", counts, flush=True)
    save(args, "kills", rows)


if __name__ == "__main__":
    main()
