"""Fit rows in files that are larger than the memory the fit may take.

    python doc/benchmarks/out_of_core.py            2 GB of rows, 1 GB of memory
    python doc/benchmarks/out_of_core.py --quick    300 MB of rows, 250 MB of memory

The rows are written to a temporary file and fitted twice, each time in a process of its own: as
one memory map, and from functions that read a part at a time. The system limits the private memory
of the process to what it has before the fit plus the allowance (RLIMIT_DATA, Linux): a fit that
copied the rows would end in a MemoryError. Pages of a mapped file count in the resident size,
which GNU time -v shows as well, but the system may drop them at any time; parts that are read are
given back.
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
    from functools import partial
    import numpy as np
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel
    from sklearn_ep import EPGaussianProcessClassifier

    def status(name):
        with open("/proc/self/status") as lines:
            return next(int(l.split()[1]) for l in lines if l.startswith(name)) / 1024

    def read(part, n_parts=10):
        X, y = (np.load(f"{sys.argv[1]}/{k}.npy", mmap_mode="r") for k in "Xy")
        rows = slice(part * len(y) // n_parts, (part + 1) * len(y) // n_parts)
        return np.array(X[rows]), np.array(y[rows])

    def fit(X, y=None):
        kernel = ConstantKernel(1.0) * RBF(20.0)
        EPGaussianProcessClassifier(
            kernel, method="sparse", n_inducing=50, max_iter=2, max_sweeps=3, random_state=0,
            learn_inducing=False,
        ).fit(X, y)

    warnings.simplefilter("ignore")
    X, y = (np.load(f"{sys.argv[1]}/{k}.npy", mmap_mode="r") for k in "Xy")
    fit(X[:5000], y[:5000])                     # libraries are loaded, buffers are made
    rows = (X, y) if sys.argv[3] == "map" else ([partial(read, k) for k in range(10)],)
    del X, y
    open("/proc/self/clear_refs", "w").write("5")                   # resets the peak of RSS
    before, peak, done = status("RssAnon"), [0.0], threading.Event()
    resident = status("VmRSS")

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], status("RssAnon"))
            time.sleep(0.01)

    limit = int((status("VmData") + float(sys.argv[2])) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    start = time.process_time()
    fit(*rows)
    seconds = time.process_time() - start
    done.set()
    thread.join()
    print(peak[0] - before, status("VmHWM") - resident, seconds)
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
    n, allowed = (300_000, 500) if args.quick else (1_050_000, 1000)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_rows(folder, n, 256)
        size, rows = (folder / "X.npy").stat().st_size / 2**20, []
        for form in ("map", "read"):
            command = [sys.executable, "-c", textwrap.dedent(CHILD), name, str(allowed), form]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            private, resident, seconds = map(float, out.split())
            rows.append(
                {
                    "rows": n,
                    "file MB": size,
                    "given as": "one memory map" if form == "map" else "ten functions that read",
                    "allowed MB": allowed,
                    "peak extra private MB": private,
                    "peak extra resident MB": resident,
                    "CPU s": seconds,
                }
            )
    table(rows, list(rows[0]))
    save(args, "out_of_core", rows)


if __name__ == "__main__":
    main()
