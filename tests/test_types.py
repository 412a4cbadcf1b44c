"""Types of what users call: all of it annotated, and a type checker sees arrays come out."""

import inspect
import pathlib

import pytest
from test_docstrings import public_modules

import sklearn_ep


def public_callables():
    """Yield label and function of all public functions, constructors and own methods."""
    for module in public_modules():
        for name in module.__all__:
            item = getattr(module, name)
            if not inspect.isclass(item):
                if callable(item):
                    yield f"{module.__name__}.{name}", item
                continue
            for method, function in inspect.getmembers(item, inspect.isroutine):
                ours = (getattr(function, "__module__", None) or "").startswith("sklearn_ep")
                if ours and (method[0] != "_" or method == "__init__"):
                    yield f"{module.__name__}.{name}.{method}", function


# each once, however many modules export it
CALLABLES = {label: f for f, label in {f: label for label, f in public_callables()}.items()}


@pytest.mark.parametrize("label", CALLABLES)
def test_parameters_and_answers_are_annotated(label):
    signature = inspect.signature(CALLABLES[label])
    bare = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is parameter.empty and name not in ("self", "cls")
    ]
    assert not bare
    assert signature.return_annotation is not signature.empty


USER = """
import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    ConvexVariationalRegressor,
    EPGaussianProcessClassifier,
    HierarchicalEPLogistic,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep.active_learning import Learner, scores
from sklearn_ep.inspection import ReliabilityDisplay

X, y = np.zeros((20, 3)), [0, 1] * 10
reveal_type(EPGaussianProcessClassifier().fit(X, y).predict_proba([[0.0, 1.0, 2.0]]))
reveal_type(RelaxedEPClassifier(random_state=0).fit(X, y).summary())
reveal_type(ConvexVariationalLogistic("learn").fit(sp.csr_array(X), y).coef_interval(0.8))
reveal_type(ConvexVariationalLogistic().fit([(X, y), lambda: (X, y)]))
reveal_type(HierarchicalEPLogistic("a").fit(pd.DataFrame(X), y).predict(X, groups=y))
reveal_type(SpikeSlabRegressor().fit(X, y).get_support(fdr=0.1))
reveal_type(SpikeSlabRegressor().fit(X, y).predict(X))
mean, sd = ConvexVariationalRegressor().fit(X, y).predict(X, return_std=True)
reveal_type(sd)
reveal_type(BayesianStackingClassifier().fit(X, y).predict_proba_interval(X))
reveal_type(scores(EPGaussianProcessClassifier(), X))
reveal_type(Learner(ConvexVariationalLogistic(), X).ask(2))
reveal_type(ReliabilityDisplay.from_predictions([0.2, 0.9], [0, 1]))
reveal_type(ConvexVariationalLogistic().fit(X, y).coef_)
reveal_type(HierarchicalEPLogistic("a").fit(X, y).tau_interval_)
EPGaussianProcessClassifier(max_iter="many")
EPGaussianProcessClassifier().predict_proba_interval(X, level="high")
"""
SEEN = "ndarray Summary ndarray ConvexVariationalLogistic ndarray ndarray ndarray".split()
SEEN += "ndarray ndarray ndarray ndarray ReliabilityDisplay ndarray ndarray".split()


@pytest.mark.slow
def test_a_type_checker_sees_arrays_and_wrong_arguments(tmp_path):
    api = pytest.importorskip("mypy.api")
    script = tmp_path / "user.py"
    script.write_text(USER)
    root = str(pathlib.Path(sklearn_ep.__file__).parents[1])
    options = ["--ignore-missing-imports", f"--cache-dir={tmp_path}", "--no-error-summary"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", root)
        told, complaint, _ = api.run([str(script), *options])
    lines = [line for line in told.splitlines() if "user.py" in line]
    revealed = [line for line in lines if "Revealed type" in line]
    assert not complaint and len(revealed) == len(SEEN)
    for line, kind in zip(revealed, SEEN, strict=True):
        assert f".{kind}" in line, line
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == 2 and "max_iter" in errors[0] and "level" in errors[1], errors
