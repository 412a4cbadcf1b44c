"""The items of the papers' experiments: each has words, and each stored result an item."""

import json
import pathlib
import sys

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
@pytest.mark.parametrize("name", NAMES)
def test_items_without_data_run(driver, name, tmp_path):
    from paper_items.item import Setting

    setting = Setting(quick=True, data=None, out=tmp_path)
    for item in driver.paper_of(name).ITEMS:
        if not item.needs_data:
            result = driver.run_item(item, setting, "")
            assert result["rows"], item.name
            json.dumps(result, default=float)
