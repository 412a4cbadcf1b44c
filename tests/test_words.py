"""Pages, docstrings and messages are plain: doc/check_words.py finds nothing to rewrite."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).resolve().parent.parent / "doc" / "check_words.py"


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.spec_from_file_location("check_words", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_left_to_rewrite(words, capsys):
    assert words.main() == 0, capsys.readouterr().out


def test_long_sentences_and_private_words_are_found(words):
    long = " ".join(["word"] * 33)
    found = words.in_prose("page", f"Short. {long}.\n\nOne ruler for all.\n\n``ruler`` is code.")
    assert len(found) == 2 and "33 words" in found[0] and "'ruler'" in found[1]


def test_blocks_that_show_nothing_are_found(words):
    page = ">>> bool(1)\nTrue\n\n>>> 1 > 0\nTrue\n>>> 1 + 1\n2\n\n>>> (2, 3)\n(2, 3)\n"
    assert [line.split(":")[1] for line in words.in_blocks("page", page)] == ["1", "9"]
