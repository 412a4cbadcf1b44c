"""Five hundred fits on hostile but finite data end in finite numbers or a named error."""

import pytest
from hostile import attempt


@pytest.mark.parametrize("block", range(20))
def test_finite_or_a_named_error(block):
    faults = [f for f in map(attempt, range(25 * block, 25 * (block + 1))) if f]
    assert not faults, "\n".join(faults)
