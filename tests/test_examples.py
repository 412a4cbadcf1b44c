"""Every gallery example runs to its end without a warning and leaves a figure.

Marked slow, and left out of a plain run of the suite: ``pytest -m slow tests/test_examples.py``.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("plot_*.py"))
NEEDS = {"plot_dask": "distributed", "plot_callbacks": "sklearn.callback"}

# A process of its own for each: examples may start clusters, and must not see each other's state.
RUN = """
import runpy, sys, warnings
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
runpy.run_path(sys.argv[1], run_name="__main__")
assert plt.get_fignums(), "no figure"
for number in plt.get_fignums():
    plt.figure(number).canvas.draw()
"""


def test_there_are_examples():
    assert (ROOT / "examples" / "GALLERY_HEADER.rst").exists() and EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_tells_a_story(path):
    """A title, text between the steps, and a sentence at the end."""
    text = path.read_text()
    title, underline = text.split('"""')[1].strip().splitlines()[:2]
    assert set(underline) == {"="} and len(underline) == len(title)
    blocks = text.rstrip().split("# %%")
    assert len(blocks) > 1
    assert blocks[-1].strip().startswith("#"), "the last block begins with a conclusion"


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    command = [sys.executable, "-c", RUN, str(path)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
