"""The items of the papers' experiments: each has words, and each stored result an item."""

import json
import pathlib
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "doc" / "benchmarks"
NAMES = ("hierarchical", "spike_slab", "scalable_gpc", "relaxed", "convex")


@pytest.fixture
def driver(monkeypatch):
    """The driver of the experiments, as a script that runs in its folder imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import papers

    yield papers
    # its neighbours have names that others may want
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_driver_knows_the_five_papers(driver):
    assert driver.PAPERS == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_items_have_words_and_results_have_items(driver, name):
    paper = driver.paper_of(name)
    assert paper.TITLE and isinstance(paper.ABOUT, str)
    items = {item.name: item for item in paper.ITEMS}
    assert len(items) == len(paper.ITEMS) == len({item.slug for item in paper.ITEMS})
    for item in paper.ITEMS:
        assert callable(item.run) and item.title
        assert len(item.words.split()) >= 20, f"{item.name} is not explained"
    stored = driver.stored(driver.RESULTS, name)
    assert set(stored) <= set(items)
    for result in stored.values():
        assert result["rows"] and not result["quick"]
        assert all(set(row) >= {"quantity", "paper", "ours"} for row in result["rows"])


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_made_of_items_with_and_without_results(driver, name):
    results = driver.stored(driver.RESULTS, name)
    for item in driver.paper_of(name).ITEMS:
        assert "*Not run.*" in driver.item_lines(name, item, None)
        if item.name in results:
            lines = driver.item_lines(name, item, json.loads(json.dumps(results[item.name])))
            assert any("CPU minutes" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "scalable_gpc"])
def test_items_without_data_run(driver, name, tmp_path):
    from paper_items.item import Setting

    items = [item for item in driver.paper_of(name).ITEMS if not item.needs_data]
    assert items or name == "convex"
    for item in items:
        assert_has_rows(driver.run_item(item, Setting(True, None, tmp_path), ""))


def assert_has_rows(result):
    assert result["rows"]
    for row in result["rows"]:
        assert isinstance(row["ours"], str) or np.isfinite(row["ours"]), row


def stand_ins(folder):
    """Write generated sets with the names and shapes that the items of scalable_gpc read."""
    rng = np.random.default_rng(0)

    def made(n, d):
        X = rng.standard_normal((n, d))
        return X, (X[:, 0] * X[:, 1] + 0.3 * rng.standard_normal(n) > 0).astype(np.uint8)

    for name, n, d in (("pima532", 200, 7), ("image", 300, 18), ("flights_nyc2013", 11_000, 8)):
        X, y = made(n, d)
        np.savez(folder / f"{name}.npz", X=X, y=y)
    X, y = made(300, 2)
    np.savez(folder / "banana.npz", X=X, y=y, train_idx=np.arange(200)[None])
    X, y = made(2200, 30)
    pixels = np.clip(40.0 * X + 128.0, 0, 255).astype(np.uint8)
    parts = {"train": slice(2100), "test": slice(2100, None)}
    arrays = {
        f"{kind}_{k}": a[p] for k, p in parts.items() for kind, a in (("X", pixels), ("y", y))
    }
    np.savez(folder / "mnist.npz", **arrays)


@pytest.mark.parametrize(
    "name", ["Figure 1", "Figure 2", "Figure 3", pytest.param("Figure 4", marks=pytest.mark.slow)]
)
def test_items_that_need_data_run_on_generated_sets(driver, name, tmp_path):
    from paper_items.item import Setting

    stand_ins(tmp_path)
    (item,) = (i for i in driver.paper_of("scalable_gpc").ITEMS if i.name == name)
    assert_has_rows(driver.run_item(item, Setting(True, tmp_path, tmp_path), ""))
