"""Tables and figures of the five papers, the paper's figure beside ours, and the pages "Papers".

    python doc/benchmarks/papers.py                        every item at the paper's protocol
    python doc/benchmarks/papers.py --quick                fewer sets, rows and repeats
    python doc/benchmarks/papers.py --paper spike_slab     one paper
    python doc/benchmarks/papers.py --paper spike_slab --item "Figure 1"    one item
    python doc/benchmarks/papers.py --page                 no runs, the pages from stored results

    python doc/benchmarks/papers.py --again                repeats that are stored are run anew

Each module of paper_items/ is one paper: a list of items, each of which runs one table or figure
and returns its rows. Results are stored item by item in results/papers/, so that a run of one
item leaves the others as they are, and long items keep each repeat in results/papers/repeats/.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import shutil
import sys
import time
import warnings

from common import HERE, versions  # first: it sets one thread for numerical libraries
from paper_items.item import Setting

PAPERS = ("hierarchical", "spike_slab", "scalable_gpc", "relaxed", "convex")
PAGES = HERE.parent / "papers"
RESULTS = HERE / "results" / "papers"


def paper_of(name):
    """Return the module about one paper."""
    return importlib.import_module(f"paper_items.{name}")


def stored(folder, name):
    """Return the stored results of one paper, {item: result}, empty before the first run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_item(item, setting, command):
    """Run one item and return what is stored of it."""
    digest, package = item.digest, item.package  # of the code before anyone edits it
    start, day = time.process_time(), datetime.date.today().isoformat()
    setting = dataclasses.replace(setting, seconds_before=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = item.run(setting)
    return dict(
        rows=[row.as_dict() for row in rows],
        cpu_minutes=round((setting.seconds_before + time.process_time() - start) / 60, 2),
        quick=setting.quick,
        command=command,
        digest=digest,
        package=package,
        day=day,
        cores=os.cpu_count(),
        versions=versions(),
    )


def run_paper(name, only, setting):
    """Run the items of one paper that are asked for, and store each as it ends."""
    paper = paper_of(name)
    results = stored(setting.out, name)
    size = " --quick" if setting.quick else ""
    for item in paper.ITEMS:
        if only and item.name not in only:
            continue
        if item.needs_data and setting.data is None:
            print(f"{name}, {item.name}: needs --data FOLDER", flush=True)
            continue
        data = " --data FOLDER" if item.needs_data else ""
        command = f'python doc/benchmarks/papers.py --paper {name} --item "{item.name}"{data}{size}'
        results[item.name] = run_item(item, setting, command)
        path = setting.out / f"{name}.json"
        path.write_text(json.dumps(results, indent=1, default=float) + "\n")
        print(f"{name}, {item.name}: {results[item.name]['cpu_minutes']} CPU minutes", flush=True)
        for row in results[item.name]["rows"]:
            print("   ", row, flush=True)


def number(value, error=None):
    """Format a figure of the paper or ours; words stay words, nothing where there is none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if error is None else f"{value:.3g} ± {error:.1g}"


def counted(row):
    """Format our figure: a mean with its error, or a count of repeats."""
    if row["of"] and row["error"] is None and not isinstance(row["ours"], str):
        return f"{row['ours']:g} of {row['of']}" if row["of"] > 1 else number(row["ours"])
    return number(row["ours"], row["error"])


def who_ran(peers):
    """Say who ran the peers of a row: names of figures that are copied end in "(paper)"."""
    copied = {peer.endswith("(paper)") for peer in peers}
    return " and ".join({True: "the paper", False: "us"}[c] for c in sorted(copied))


def table(item, rows):
    """Return the lines of one table; a column a peer, and one that says who ran them."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    lines = [".. list-table::", "   :header-rows: 1", ""]
    head = ["Quantity", "Paper", "Ours", "Verdict", *peers, *(["Peers run by"] if peers else [])]
    for cells in [
        head,
        *(
            [
                row["quantity"].replace("|", "\\|"),  # no substitution
                number(row["paper"]),
                counted(row),
                item.verdict(row),
                *(number(row["peers"].get(peer)) for peer in peers),
                *([who_ran(row["peers"])] if peers else []),
            ]
            for row in rows
        ),
    ]:
        marks = ["   * -", *["     -"] * (len(cells) - 1)]
        lines += [f"{m} {text}".rstrip() for m, text in zip(marks, cells, strict=True)]
    return [*lines, ""]


def raw(html):
    """Return the lines that put HTML into the page."""
    return [".. raw:: html", "", f"   {html}", ""]


def item_lines(name, item, result):
    """Return the lines about one table or figure: what reproduces first, then its numbers."""
    title = f"{item.name}: {item.title}"
    lines = [title, "-" * len(title), "", *item.words.strip().splitlines(), ""]
    if result is None:
        return [*lines, "*Not run.*", ""]
    picture = RESULTS / f"{name}_{item.slug}.png"
    if picture.exists():
        lines += [f".. image:: /{picture.relative_to(HERE.parent).as_posix()}", ""]
    size = "Small size" if result["quick"] else "Full size"
    folded = table(item, result["rows"])
    if len(result["rows"]) > 12:
        folded = [*raw(f"<details><summary>{len(result['rows'])} rows</summary>"), *folded]
        folded += raw("</details>")
    made = f"{result['cpu_minutes']:.3g} CPU minutes on {result['day']}, version "
    made += result["versions"]["sklearn-ep"]
    made += "" if result["package"] == item.package else ", whose code has changed since"
    return [*lines, *folded, f"*{size}, {made}.* ``{result['command']}``", ""]


def write_page(path, title, lines):
    """Write a page with a title."""
    head = ".. Written by doc/benchmarks/papers.py: change the scripts, not this page."
    text = "\n".join([head, "", title, "=" * len(title), "", *lines])
    path.write_text(text.rstrip() + "\n")


def times_of_items():
    """Return the lines that say what the items take, paper by paper and in all."""
    lines, total = [".. list-table::", "   :header-rows: 1", ""], 0.0
    rows = [("Paper", "CPU minutes", "of them the dearest item")]
    for name in PAPERS:
        minutes = {item: found["cpu_minutes"] for item, found in stored(RESULTS, name).items()}
        dearest, own = max(minutes, key=minutes.get), sum(minutes.values())
        rows.append((paper_of(name).TITLE, f"{own:.1f}", f"{dearest}, {minutes[dearest]:.1f}"))
        total += own
    for first, *others in [*rows, ("All", f"{total:.0f}", "")]:
        lines += [f"   * - {first}", *(f"     - {text}".rstrip() for text in others)]
    return [*lines, ""]


def write_pages():
    """Write the page of each paper, and the one that leads to them, from stored results."""
    PAGES.mkdir(exist_ok=True)
    for name in PAPERS:
        paper, results = paper_of(name), stored(RESULTS, name)
        lines = [*paper.ABOUT.strip().splitlines(), ""]
        for item in paper.ITEMS:
            lines += item_lines(name, item, results.get(item.name))
        write_page(PAGES / f"{name}.rst", paper.TITLE, lines)
    lines = [
        "Each method here comes from a paper. These pages repeat the experiments of the five and",
        "put the papers' figures beside ours: what reproduces, what does not, and why. A figure",
        "of the paper is as printed or, from a picture, as read off it; where our protocol",
        "differs from the paper's the text says how. The number after ± is a standard error over",
        "repeats. A verdict is on what the paper says of a row, by the 95 % interval over draws or",
        "splits: it *holds* where all of the interval lies where the paper has it, *does not*",
        "where none of it does, and otherwise we *cannot tell*, as from a single draw. The bounds",
        "of a claim stand with its item in ``doc/benchmarks/paper_items``. FOLDER holds the data",
        "sets as .npz files.",
        "",
        "Below each table stands the day of the run, and whether the code of the package that it",
        "uses has changed by the day these pages were written, comments and documentation aside.",
        "",
        "What the stored runs took on one thread, two cores being shared with other work:",
        "",
        *times_of_items(),
        ".. toctree::",
        "   :maxdepth: 2",
        "",
        *(f"   {PAGES.name}/{name}" for name in PAPERS),
    ]
    write_page(PAGES.with_suffix(".rst"), "The five papers", lines)
    print(f"wrote {PAGES.name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", nargs="*", choices=PAPERS, default=PAPERS, help="these only")
    parser.add_argument("--item", nargs="*", default=(), help="these tables and figures only")
    parser.add_argument("--quick", action="store_true", help="the small size")
    parser.add_argument("--data", type=pathlib.Path, help="folder with data sets as .npz files")
    parser.add_argument("--again", action="store_true", help="run stored repeats anew")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for results")
    parser.add_argument("--page", action="store_true", help="write the pages, run nothing")
    args = parser.parse_args()
    out = args.out or (RESULTS / "quick" if args.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    if not args.page:
        if args.again:
            shutil.rmtree(out / "repeats", ignore_errors=True)
        for name in args.paper:
            run_paper(name, args.item, Setting(args.quick, args.data, out))
    if args.page or out == RESULTS:
        write_pages()


if __name__ == "__main__":
    sys.exit(main())
