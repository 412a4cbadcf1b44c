"""What an addition costs, counted in the documentation, whose code blocks are run as tests."""

import pathlib
import re

import pytest

DOC = pathlib.Path(__file__).resolve().parent.parent / "doc"
# page, first line of the block, most lines
COSTS = {
    "likelihood": ("add_a_likelihood.rst", "class ComplementaryLogLog", 8),
    "prior": ("user_guide/engine.rst", "class StudentPrior", 8),
    "prior of coefficients": ("user_guide/priors.rst", "class Logistic", 14),
    "rule": ("user_guide/engine.rst", "def laplace_of_logit", 12),
    "strategy": ("active_learning.rst", "def far_from_the_boundary", 3),
    "estimator": ("add_an_estimator.rst", "class StudentRegressor", 50),
}


@pytest.mark.parametrize("what", COSTS)
def test_cost_of_an_addition(what):
    page, first, most = COSTS[what]
    block = re.search(rf">>> {first}.*\n(\.\.\..*\n)*", (DOC / page).read_text())
    code = [line for line in block.group().splitlines() if line.strip("> .")]
    assert len(code) <= most
