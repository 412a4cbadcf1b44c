"""Draw the rooms of the package and what imports what, from the imports themselves.

python doc/figures/architecture.py
"""

import ast
import collections
import pathlib

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

STATIC = pathlib.Path(__file__).resolve().parent.parent / "_static"
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "sklearn_ep"
# centre, width and height of each room; models stand on what they share
PLACES = {
    "gaussian_process": (1.7, 5.7, 3.3, 2.2),
    "spike_slab": (4.95, 5.7, 2.9, 2.2),
    "convex": (7.8, 5.7, 2.5, 2.2),
    "hierarchical": (10.65, 5.7, 2.9, 2.2),
    "_estimator": (6.2, 2.6, 2.9, 1.7),
    "_engine": (7.55, 0.65, 15.0, 1.3),
    "active_learning": (13.8, 4.55, 2.5, 1.5),
    "inspection": (13.8, 6.08, 2.5, 1.44),
}
# where the arrow from a room to the engine goes down, beside the room of the estimators' base
DOWN = {"spike_slab": 4.2, "convex": 8.2, "_estimator": 6.2}
# corners of arrows that would go behind other rooms, the first on the border of the room
CORNERS = {"inspection": [(12.55, 6.08), (12.33, 6.08), (12.33, 3.65)]}


def modules(room):
    """Return {name in the room: path} of the modules that hold code."""
    folder = PACKAGE / room
    paths = [p for p in sorted(folder.rglob("*.py")) if p.name != "__init__.py"]
    return {".".join(p.relative_to(folder).with_suffix("").parts): p for p in paths}


def rooms_imported(path):
    """Yield the room of every module of the package that a file imports."""
    package = ("sklearn_ep", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            if len(base) > 1 and base[1] in PLACES:
                yield base[1]


def arrows():
    """Return {(room, other): number of import statements}."""
    found = collections.Counter()
    for room in PLACES:
        for path in modules(room).values():
            found.update((room, other) for other in rooms_imported(path) if other != room)
    return found


def shown(found):
    """Return the names to write: modules of the room, and folders with their number of modules."""
    folders = collections.Counter(name.split(".")[0] for name in found if "." in name)
    return [n for n in found if "." not in n] + [f"{f}/ ({k})" for f, k in folders.items()]


def columns(names, n_columns):
    """Split names into so many columns of text."""
    rows = -(-len(names) // n_columns)
    return ["\n".join(names[k * rows : (k + 1) * rows]) for k in range(n_columns)]


def draw_room(ax, room, ink, fill):
    """Draw a box with the name of the room, its size and its modules."""
    x, y, width, height = PLACES[room]
    found = modules(room)
    lines = sum(len(p.read_text().splitlines()) for p in found.values())
    corner = x - width / 2, y - height / 2
    style = "round,pad=0,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, ec=ink, fc=fill, lw=1.2))
    top = y + height / 2
    ax.text(x, top - 0.2, room, ha="center", va="center", weight="bold", size=11, color=ink)
    ax.text(x, top - 0.45, f"{lines} lines", ha="center", va="center", size=8, color=ink)
    names = shown(found)
    n_columns = 5 if width > 5 else 2 if len(names) > 5 else 1
    for k, text in enumerate(columns(names, n_columns)):
        place = corner[0] + 0.12 + k * (width - 0.1) / n_columns
        ax.text(place, top - 0.6, text, va="top", size=7.6, color=ink, linespacing=1.25)


def draw_arrow(ax, start, end, count, ink):
    """Draw an arrow from room to room, as wide as there are imports."""
    (x0, y0, _, h0), (x1, y1, w1, h1) = PLACES[start], PLACES[end]
    if end == "_engine":
        x0 = DOWN.get(start, x0)
        ends = (x0, y0 - h0 / 2), (x0, y1 + h1 / 2)
    else:
        reach = x1 + np.clip(0.3 * (x0 - x1), -0.4 * w1, 0.4 * w1)
        ends = (x0 + 0.2 * np.sign(x1 - x0), y0 - h0 / 2), (reach, y1 + h1 / 2)
    width = 0.6 + 0.08 * count
    style = "-|>,head_length=5,head_width=2.6"
    path = Path([*CORNERS.get(start, ends[:1]), ends[1]])
    ax.add_patch(FancyArrowPatch(path=path, arrowstyle=style, lw=width, color=ink, alpha=0.6))


def draw(background, ink, fill, path):
    """Draw the picture for one theme."""
    fig, ax = plt.subplots(figsize=(13.4, 6.4), facecolor=background, layout="constrained")
    for (start, end), count in sorted(arrows().items()):
        draw_arrow(ax, start, end, count, ink)
    for room in PLACES:
        draw_room(ax, room, ink, fill)
    ax.set(xlim=(-0.05, 15.15), ylim=(-0.1, 6.95))
    ax.axis("off")
    fig.savefig(path, dpi=110)
    plt.close(fig)


if __name__ == "__main__":
    draw("white", "#1b2733", "#eef3f8", STATIC / "architecture_light.png")
    draw("#14181e", "#ced6dd", "#202833", STATIC / "architecture_dark.png")
