"""Exact answers to small problems, stored in `tests/data`, for all tests."""

import json
import pathlib

import numpy as np

__all__ = ["DATA", "arrays", "oracle"]

DATA = pathlib.Path(__file__).parent / "data"


def oracle(name):
    """Return the stored answers `data/name.json`."""
    return json.loads((DATA / f"{name}.json").read_text())


def arrays(name):
    """Return the stored arrays `data/name.npz` as a dict."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)
