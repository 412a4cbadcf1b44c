"""Exact answers to small problems, stored in `tests/data`, and written-out rows, for all tests."""

import json
import pathlib

import numpy as np

__all__ = ["DATA", "arrays", "oracle", "written_out"]

DATA = pathlib.Path(__file__).parent / "data"


def oracle(name):
    """Return the stored answers `data/name.json`."""
    return json.loads((DATA / f"{name}.json").read_text())


def arrays(name):
    """Return the stored arrays `data/name.npz` as a dict."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def written_out(X, weight):
    """Return rows as often as their weights say, so little apart that none counts as a copy."""
    rows = np.repeat(X, weight, axis=0)
    return rows + 1e-11 * np.random.RandomState(0).standard_normal(rows.shape)
