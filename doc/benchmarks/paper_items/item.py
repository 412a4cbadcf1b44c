"""What a table or figure of a paper is made of here: an item that runs, and its rows."""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import pathlib
import re
import time
from collections.abc import Callable

import numpy as np
from common import versions
from scipy.stats import beta, t

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass
class Setting:
    """How large a run is, where data sets lie, and where pictures and repeats go.

    ``seconds_before`` counts the CPU seconds of repeats that were stored before the run.
    """

    quick: bool
    data: pathlib.Path | None
    out: pathlib.Path
    seconds_before: float = 0.0

    def repeats(self, one, n):
        """Return ``one(setting, seed)``, which JSON can store, for seeds below n.

        Each is stored as it ends, by its seed. Those that the same code stored, under the same
        versions, are not run again: a run may stop and go on, and repeats may be added.
        """
        path = self.out / "repeats" / f"{one.__module__.split('.')[-1]}_{one.__name__}.json"
        made_by = dict(digest=digest_of(one), versions=versions())
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("made_by") != made_by:
            kept = dict(made_by=made_by, repeats={})
        done = kept["repeats"]
        for seed in map(str, range(n)):
            if seed in done:
                self.seconds_before += done[seed]["cpu_seconds"]
                continue
            start = time.process_time()
            values = one(self, int(seed))
            done[seed] = dict(cpu_seconds=time.process_time() - start, values=values)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(kept, default=float) + "\n")
        # all as JSON gives them back, those of this run as well
        return [json.loads(json.dumps(done[str(k)]["values"], default=float)) for k in range(n)]

    def load(self, name):
        """Return the arrays of one data set of the data folder as a dict."""
        with np.load(self.data / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    def save(self, fig, paper, item):
        """Save the picture of an item of a paper."""
        fig.savefig(self.out / f"{paper}_{slug_of(item)}.png", dpi=110, bbox_inches="tight")


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry of a table or point of a figure.

    ``paper`` is the paper's figure (None where it prints none, words where it has no number),
    ``ours`` what was measured, ``error`` its standard error over ``of`` repeats; without an error
    ``ours`` may be a count of so many repeats. ``peers`` are what other packages give under the
    same protocol.
    """

    quantity: str
    paper: float | str | None
    ours: float | str
    error: float | None = None
    of: int | None = None
    peers: dict = dataclasses.field(default_factory=dict)

    def as_dict(self):
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of some rows: they lie between ``low`` and ``high``.

    ``rows`` is a pattern that the quantity contains. With ``beside_paper`` the bounds are those of
    ours minus the paper's number. Bounds of a count of repeats are shares. With ``no_chance`` the
    row would be the same in any other draw, a size for instance, and is its own interval.
    """

    rows: str
    low: float = -np.inf
    high: float = np.inf
    beside_paper: bool = False
    no_chance: bool = False

    def verdict(self, row):
        """Return "holds", "does not" or "cannot tell" by the 95 % interval of a stored row."""
        paper, paper_error = number_of(row["paper"]) if self.beside_paper else (0.0, 0.0)
        found = interval(row, paper, paper_error)
        low, high = (row["ours"] - paper,) * 2 if self.no_chance else found
        if self.low <= low and high <= self.high:
            return "holds"
        return "does not" if high < self.low or low > self.high else "cannot tell"


def number_of(text):
    """Return the number and the standard error of a figure of a paper, "0.24 ± 0.09"."""
    parts = [float(part) for part in str(text).split("±")]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


def interval(row, paper=0.0, paper_error=0.0):
    """Return the 95 % interval of a stored row, less the number of the paper.

    By the t distribution of the repeats, of a count that of Clopper and Pearson; one draw has none.
    """
    ours, error, of = row["ours"], row["error"], row["of"]
    if isinstance(ours, str) or not of:
        return -np.inf, np.inf
    if error is not None:
        reach = t.ppf(0.975, of - 1) * np.hypot(error, paper_error)
        return ours - paper - reach, ours - paper + reach
    low = beta.ppf(0.025, ours, of - ours + 1) if ours else 0.0
    high = beta.ppf(0.975, ours + 1, of - ours) if ours < of else 1.0
    return low - paper / of, high - paper / of


@dataclasses.dataclass(frozen=True)
class Item:
    """One table or figure: its name in the paper, what it shows, how it is run, what we find.

    ``words`` is reStructuredText for the page: what reproduces, what does not and why, and every
    difference between the paper's protocol and ours.
    """

    name: str
    title: str
    run: Callable[[Setting], list[Row]]
    words: str
    needs_data: bool = False
    claims: tuple[Claim, ...] = ()

    @property
    def slug(self):
        return slug_of(self.name)

    def claim_on(self, row):
        """Return the first claim about a stored row, None where there is none."""
        return next((c for c in self.claims if re.search(c.rows, row["quantity"])), None)

    def verdict(self, row):
        """Return the verdict on a stored row, nothing where the paper says nothing."""
        claim = self.claim_on(row)
        if claim is None:
            return "" if row["paper"] is None else "cannot tell"
        return claim.verdict(row)

    @property
    def digest(self):
        """Digest of the item's function."""
        return digest_of(self.run)

    @property
    def package(self):
        """Digest of the code of the package that the paper's items use."""
        return package_digest(inspect.getmodule(self.run))


def digest_of(function):
    """Return the digest of a function and of all that it uses of its module, but for layout."""
    source = inspect.getsource(inspect.getmodule(function))
    parts = {name: node for node in ast.parse(source).body for name in names_of(node)}
    todo, used = [function.__name__], {}
    while todo:
        name = todo.pop()
        if name in parts and name not in used:
            used[name] = "".join(ast.get_source_segment(source, parts[name]).split())
            todo += [n.id for n in ast.walk(parts[name]) if isinstance(n, ast.Name)]
    return hashlib.sha256("\n".join(map(used.get, sorted(used))).encode()).hexdigest()[:12]


@functools.cache
def package_digest(module):
    """Return the digest of all code of the package that a module leads to, but for its words.

    Neither comments, docstrings and layout count, nor what other estimators are made of.
    """
    todo, used = [module.__name__], {}
    while todo:
        name = todo.pop()
        if name not in used:
            tree = tree_of(name)
            todo += {home for base, asked in imports_of(name, tree) for home in homes(base, asked)}
            used[name] = without_words(tree) if name.startswith("sklearn_ep") else ""
    return hashlib.sha256("\n".join(map(used.get, sorted(used))).encode()).hexdigest()[:12]


@functools.cache
def tree_of(name):
    """Return the syntax tree of a module."""
    return ast.parse(pathlib.Path(importlib.util.find_spec(name).origin).read_text())


@functools.cache
def imports_of(name, tree):
    """Return (module, name) of all that a module imports from the package or from our scripts."""
    spec, found = importlib.util.find_spec(name), []
    package = name if spec.submodule_search_locations else spec.parent
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        if base.split(".")[0] in ("sklearn_ep", "paper_items") or (SCRIPTS / f"{base}.py").exists():
            found += [(base, alias.name) for alias in node.names]
    return found


def homes(base, name):
    """Return the modules in which a name is made that a module has, maybe from others."""
    package = importlib.util.find_spec(base).submodule_search_locations
    if not package:
        return [base]
    if any((pathlib.Path(package[0]) / part).exists() for part in (name, f"{name}.py")):
        return [f"{base}.{name}"]
    passed_on = {other for other, asked in imports_of(base, tree_of(base)) if asked == name}
    return [home for other in passed_on for home in homes(other, name)]


@functools.cache
def without_words(tree):
    """Return the code of a syntax tree without docstrings and layout."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [n for n in node.body if not is_text(n)] or [ast.Pass()]
    return "".join(ast.unparse(tree).split())


def is_text(node):
    """Return whether a statement is nothing but a text."""
    value = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(getattr(value, "value", None), str)


def names_of(node):
    """Return the names that a statement of a module defines, but for imports."""
    if isinstance(node, ast.Assign):
        return [
            n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)
        ]
    return [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []


def slug_of(name):
    """Return the part of a file name that stands for an item."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def mean_and_error(values):
    """Return the mean over repeats, its standard error (None for one repeat) and their number."""
    values = np.asarray(values, dtype=float)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), None if error is None else float(error), len(values)
