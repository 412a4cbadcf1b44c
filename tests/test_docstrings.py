"""Every public name has a docstring that numpydoc accepts, with every parameter in it."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
from sklearn.base import is_regressor

import sklearn_ep

validate = pytest.importorskip("numpydoc.validate").validate

# no docstring, sections out of order, parameters missing, unknown or undescribed, no summary,
# summary over several lines, no Returns
FAULTS = {"GL07", "GL08", "PR01", "PR02", "PR07", "SS01", "SS06", "RT01"}


def public_modules():
    """Import the package and its public modules."""
    names = [m.name for m in pkgutil.iter_modules(sklearn_ep.__path__) if m.name[0] != "_"]
    return [sklearn_ep, *(importlib.import_module(f"sklearn_ep.{name}") for name in names)]


def public_names():
    """Yield the dotted names of all public classes, their own methods, and functions."""
    for module in public_modules():
        for name in getattr(module, "__all__", []):
            item = getattr(module, name)
            if not callable(item):
                continue
            yield f"{module.__name__}.{name}"
            for method, function in inspect.getmembers(item, inspect.isroutine):
                ours = (getattr(function, "__module__", None) or "").startswith("sklearn_ep")
                if inspect.isclass(item) and method[0] != "_" and ours:
                    yield f"{module.__name__}.{name}.{method}"


@pytest.mark.parametrize("module", public_modules(), ids=lambda m: m.__name__)
def test_modules_have_a_docstring_and_say_what_is_public(module):
    assert module.__doc__ and len(module.__doc__) > 40
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("name", sorted(set(public_names())))
def test_docstring(name):
    errors = [f"{code}: {text}" for code, text in validate(name)["errors"] if code in FAULTS]
    assert not errors


@pytest.mark.parametrize("name", [n for n in sklearn_ep.__all__ if n[0].isupper()])
def test_estimators_describe_what_they_learn(name):
    """Every fitted attribute has an entry of its own, where the HTML view looks for it."""
    estimator = getattr(sklearn_ep, name)()
    doc = importlib.import_module("numpydoc.docscrape").NumpyDocString(inspect.getdoc(estimator))
    described = {item.name for item in doc["Attributes"] if item.desc}
    X = np.random.default_rng(0).normal(size=(16, 2))
    y = X[:, 0] + X[:, 1]
    fitted = vars(estimator.fit(X, y if is_regressor(estimator) else y > 0))
    learned = {n for n in fitted if n.endswith("_") and not n.startswith("_")}
    if "estimators_" not in learned:  # a mixture leaves its iterations to its parts
        assert {"n_iter_", "converged_", "history_", "log_evidence_", "n_features_in_"} <= learned
    assert learned <= described
    assert ">>>" in "".join(doc["Examples"]) and doc["References"]


@pytest.mark.parametrize("name", [n for n in sklearn_ep.__all__ if n[0].isupper()])
def test_estimators_name_the_few_parameters_that_users_set(name):
    estimator = getattr(sklearn_ep, name)()
    sentence = re.search(r"\*\*You will set\*\* ([^.]*)\.", inspect.getdoc(estimator)).group(1)
    named = re.findall(r"`(\w+)`", sentence)
    assert 3 <= len(named) <= 5 and set(named) <= set(estimator.get_params())


@pytest.mark.parametrize("name", [n for n in sklearn_ep.__all__ if n[0].isupper()])
def test_fits_list_the_error_of_a_parameter_of_another_type(name):
    estimator = getattr(sklearn_ep, name)()
    number = "tol" if "tol" in estimator.get_params() else "n_jobs"
    X = np.random.default_rng(0).normal(size=(16, 2))
    for method in {"fit", "partial_fit"} & set(dir(estimator)):
        doc = inspect.getdoc(getattr(estimator, method))
        assert "TypeError" in doc[doc.index("Raises") :]
        with pytest.raises(TypeError, match=number):
            getattr(estimator.set_params(**{number: "small"}), method)(X, X[:, 0] > 0)
