"""What a table or figure of a paper is made of here: an item that runs, and its rows."""

import dataclasses
import pathlib
import re
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Setting:
    """How large a run is, where data sets lie, and where pictures go."""

    quick: bool
    data: pathlib.Path | None
    out: pathlib.Path

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
    ``ours`` what was measured, ``error`` its standard error over repeats, ``peers`` what other
    packages give under the same protocol.
    """

    quantity: str
    paper: float | str | None
    ours: float | str
    error: float | None = None
    peers: dict = dataclasses.field(default_factory=dict)

    def as_dict(self):
        return dataclasses.asdict(self)


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

    @property
    def slug(self):
        return slug_of(self.name)


def slug_of(name):
    """Return the part of a file name that stands for an item."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def mean_and_error(values):
    """Return the mean over repeats and its standard error (None for a single repeat)."""
    values = np.asarray(values, dtype=float)
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), None if error is None else float(error)
