"""Fit rows of a memory map that is larger than the memory the fit may take.

    python doc/benchmarks/out_of_core.py            2 GB of rows, 1 GB of memory
    python doc/benchmarks/out_of_core.py --quick    200 MB of rows, 150 MB of memory

The rows are written to a temporary file and fitted in a process of its own whose private memory the
system limits to what it has before the fit plus the allowance (RLIMIT_DATA, Linux): a fit that
copied the rows would end in a MemoryError. Pages of the file that the system keeps in its cache
count in the resident size that other tools show, but are free to be dropped.
"""

from common import arguments, save, table

import pathlib
import subprocess
import sys
import tempfile
import textwrap

import numpy as np

CHILD = """
    import resource, sys, threading, time, warnings
    import numpy as np
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel
    from sklearn_ep import EPGaussianProcessClassifier

    def status(name):
        with open("/proc/self/status") as lines:
            return next(int(l.split()[1]) for l in lines if l.startswith(name)) / 1024

    def fit(X, y):
        kernel = ConstantKernel(1.0) * RBF(20.0)
        EPGaussianProcessClassifier(
            kernel, method="sparse", n_inducing=50, max_iter=2, max_sweeps=3, random_state=0,
            learn_inducing=False,
        ).fit(X, y)

    warnings.simplefilter("ignore")
    X, y = (np.load(f"{sys.argv[1]}/{k}.npy", mmap_mode="r") for k in "Xy")
    fit(X[:5000], y[:5000])                     # libraries are loaded, buffers are made
    before, peak, done = status("RssAnon"), [0.0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], status("RssAnon"))
            time.sleep(0.01)

    limit = int((status("VmData") + float(sys.argv[2])) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    thread = threading.Thread(target=watch)
    thread.start()
    start = time.process_time()
    fit(X, y)
    seconds = time.process_time() - start
    done.set()
    thread.join()
    print(peak[0] - before, seconds)
"""


def write_rows(folder, n, d):
    """Write X (n, d) and y (n,) in blocks."""
    rng = np.random.default_rng(0)
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float64, (n, d))
    y = np.empty(n, dtype=np.int8)
    for start in range(0, n, 50_000):
        block = rng.standard_normal((min(50_000, n - start), d))
        X[start : start + len(block)] = block
        y[start : start + len(block)] = block[:, 0] + block[:, 1] > 0
    X.flush()
    np.save(folder / "y.npy", y)


def main():
    args = arguments(__doc__.split("\n")[0])
    n, allowed = (100_000, 150) if args.quick else (1_050_000, 1000)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_rows(folder, n, 256)
        command = [sys.executable, "-c", textwrap.dedent(CHILD), name, str(allowed)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        size = (folder / "X.npy").stat().st_size / 2**20
    rows = [
        {
            "rows": n,
            "file MB": size,
            "allowed MB": allowed,
            "peak extra MB": float(out[0]),
            "CPU s": float(out[1]),
        }
    ]
    table(rows, list(rows[0]))
    save(args, "out_of_core", rows)


if __name__ == "__main__":
    main()
