"""What the benchmark scripts share: arguments, fair timing, tables and stored results.

Times are CPU seconds of this process, peers alternate within one run, and ratios are what counts.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import time
import warnings

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from sklearn_ep import __version__  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent


def arguments(description, *extra):
    """Parse --quick, --data and --out, and further (flag, settings) pairs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the small size")
    parser.add_argument("--data", default=None, help="folder with data sets as .npz files")
    parser.add_argument("--out", default=None, help="folder for JSON and figures")
    for flag, settings in extra:
        parser.add_argument(flag, **settings)
    args = parser.parse_args()
    # a quick run does not overwrite what the full one has found
    args.out = args.out or str(HERE / "results" / ("quick" if args.quick else ""))
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    return args


def cpu(call):
    """Return (result, CPU seconds)."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def alternate(calls, repeats=3):
    """Time named calls in turns; return {name: (last result, median CPU seconds)}."""
    times, results = {name: [] for name in calls}, {}
    for _ in range(repeats):
        for name, call in calls.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[name], seconds = cpu(call)
            times[name].append(seconds)
    return {name: (results[name], float(np.median(times[name]))) for name in calls}


def log_loss(proba, y):
    """Mean negative log probability of integer labels."""
    return float(-np.mean(np.log(np.maximum(proba[np.arange(len(y)), y], 1e-300))))


def table(rows, columns):
    """Print rows (dicts) as a Markdown table and return its text."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row.get(c, "") for c in columns]
        lines.append(
            "| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    text = "\n".join(lines)
    print(text, flush=True)
    return text


def versions():
    """Return the versions of the packages that decide a result."""
    found = {"sklearn-ep": __version__}
    for package in ("numpy", "scipy", "scikit-learn", "joblib"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def save(args, name, rows):
    """Write rows with versions and hardware to NAME.json in the output folder."""
    about = dict(
        python=platform.python_version(),
        processor=platform.processor() or platform.machine(),
        cores=os.cpu_count(),
        quick=args.quick,
        data=args.data is not None,
        **versions(),
    )
    path = pathlib.Path(args.out) / f"{name}.json"
    path.write_text(json.dumps(dict(about=about, rows=rows), indent=1, default=float))
    print(f"saved {path.name}")


def stored_rows(args, name):
    """Return the rows of NAME.json, none where there is no such file."""
    path = pathlib.Path(args.out) / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def figure(args, name, fig):
    """Save a matplotlib figure as NAME.png in the output folder."""
    path = pathlib.Path(args.out) / f"{name}.png"
    fig.savefig(path, dpi=100)
    print(f"saved {path.name}")
