"""Numbers do not change by accident: fits on fixed data against stored results, to 1e-6."""

import json

import numpy as np
import pytest
from golden import CASES, FILE, compute

STORED = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    now = compute(name)
    assert now.keys() == STORED[name].keys()
    for key, values in now.items():
        np.testing.assert_allclose(values, STORED[name][key], rtol=1e-6, atol=1e-6, err_msg=key)
