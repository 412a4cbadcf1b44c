"""Run every benchmark script of this folder and write the page "Benchmarks".

    python doc/benchmarks/run_all.py            both sizes of each script
    python doc/benchmarks/run_all.py --quick    the small size only
    python doc/benchmarks/run_all.py --full     the full size only, some four hours
    python doc/benchmarks/run_all.py --only memory fuzz    these scripts only
    python doc/benchmarks/run_all.py --page     no runs, only the page from stored results

Each script is a process of its own with one thread. Results are JSON files and figures in
results/quick/ (small size) and results/; the page shows those of the larger size that is there,
ratios and errors, not seconds.
"""

import argparse
import itertools
import json
import math
import pathlib
import subprocess
import sys

from sections import PARTS

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "benchmarks.rst"
MOST_ROWS = 60  # longer results are for a reader with a question, not for a page
SIZES = {"small": (RESULTS / "quick", ["--quick"]), "full": (RESULTS, [])}


def scripts():
    """Return the benchmark scripts, in alphabetical order."""
    named = [section.script for sections in PARTS.values() for section in sections]
    return [HERE / f"{name}.py" for name in sorted([*named, "costs"])]  # has a page of its own


def run(path, folder, flags, data):
    """Run one script; a failure is reported and does not stop the others."""
    command = [sys.executable, str(path), *flags, "--out", str(folder)]
    if data:
        command += ["--data", data]
    print("$", "python", f"doc/benchmarks/{path.name}", *flags, flush=True)
    return subprocess.run(command).returncode == 0


def cell(value):
    """Format a cell; numbers to three digits, nothing for what a method does not give."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}"
    return str(value)


def to_itself(column):
    """Say whether a column is a ratio of something to itself."""
    above, _, below = column.partition(" / ")
    return bool(below) and above.split()[-1] == below


def shown_columns(rows):
    """Return the columns of a table: numbers and words, but no seconds."""
    columns = dict.fromkeys(key for row in rows for key in row)
    plain = [c for c in columns if not any(isinstance(row.get(c), list | dict) for row in rows)]
    return [c for c in plain if "CPU s" not in c and "seconds" not in c and not to_itself(c)]


def list_tables(rows, stored):
    """Return the lines of the tables, one for each run of rows with the same columns."""
    if isinstance(rows, dict):  # several named tables
        rows = [row for part in rows.values() for row in part]
    if len(rows) > MOST_ROWS:
        where = f"``{stored.relative_to(HERE.parents[1]).as_posix()}``"
        return [f"{len(rows)} rows in {where}.", ""]
    lines = []
    for _, group in itertools.groupby(rows, key=lambda row: tuple(sorted(row))):
        part = list(group)
        shown = shown_columns(part)
        lines += [".. list-table::", "   :header-rows: 1", ""]
        for cells in [shown, *([cell(row.get(c, "")) for c in shown] for row in part)]:
            marks = ["   * -", *["     -"] * (len(cells) - 1)]
            lines += [f"{m} {text}".rstrip() for m, text in zip(marks, cells, strict=True)]
        lines.append("")
    return lines


def about_run(path, stored, about):
    """Return the line that says how a result was had."""
    size, flags = ("Small size", ["--quick"]) if about["quick"] else ("Full size", [])
    if about.get("data") and "args.data" in path.read_text():
        flags = [*flags, "--data FOLDER"]
    packages = ("numpy", "scipy", "scikit-learn", "joblib", "sklearn-ep")
    versions = ", ".join(
        f"{p} {about[p]}" for p in packages if about.get(p, "not installed") != "not installed"
    )
    command = " ".join(["python", f"doc/benchmarks/{path.name}", *flags])
    return (
        f"*{size}.* ``{command}`` on {about['processor']}, {about['cores']} cores, one thread; "
        f"Python {about['python']}, {versions}; stored in "
        f"``{stored.relative_to(HERE.parents[1]).as_posix()}``."
    )


def fold(lines, summary):
    """Return lines of the page that a click unfolds."""
    opening = [".. raw:: html", "", f"   <details><summary>{summary}</summary>", ""]
    return [*opening, *lines, ".. raw:: html", "", "   </details>", ""]


def section_lines(section):
    """Return the lines about one script, or none if it has no results.

    What was found and the picture come first. Tables and picture are those of the larger size.
    """
    path = HERE / f"{section.script}.py"
    stored = [folder / f"{path.stem}.json" for folder, _ in reversed(SIZES.values())]
    stored = next((file for file in stored if file.exists()), None)
    if stored is None:
        return []
    result = json.loads(stored.read_text())
    lines = [section.title, "~" * len(section.title), "", section.found, ""]
    picture = stored.with_suffix(".png")
    if picture.exists():
        lines += [f".. image:: {picture.relative_to(PAGE.parent).as_posix()}", ""]
    data = [f"*Data.* {section.data}", ""]
    tables = [*list_tables(result["rows"], stored), about_run(path, stored, result["about"]), ""]
    return [*lines, *fold([*data, *tables], "Data, tables, and how to run it again")]


def write_page():
    """Write the page from whatever results are stored."""
    lines = [
        ".. Written by doc/benchmarks/run_all.py: change the scripts, not this page.",
        "",
        "Benchmarks",
        "==========",
        "",
        "**How to read this page.** Each section says first what was found, where others lead",
        "too, then shows it. Log loss is the mean negative log probability of held-out labels:",
        "lower is better, and a sure mistake costs most. Times are ratios of CPU seconds of fits",
        "that alternate in one process on one thread; below one means faster than the peer.",
        "The command under a table measures it again; all of them are measured by",
        "``python doc/benchmarks/run_all.py``; FOLDER holds data sets as .npz files.",
        "",
    ]
    for part, sections in PARTS.items():
        lines += [part, "-" * len(part), ""]
        for section in sections:
            lines += section_lines(section)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the small size only")
    size.add_argument("--full", action="store_true", help="the full size only")
    names = [path.stem for path in scripts()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these scripts")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--data", default=None, help="folder with data sets as .npz files")
    args = parser.parse_args()
    failed = []
    if not args.page:
        left_out = "full" if args.quick else "small" if args.full else None
        for name, (folder, flags) in SIZES.items():
            if name != left_out:
                chosen = [p for p in scripts() if p.stem in args.only]
                failed += [p.name for p in chosen if not run(p, folder, flags, args.data)]
    write_page()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
