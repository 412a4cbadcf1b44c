"""Dependencies point one way: model -> _estimator -> _engine, and nothing optional at import."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

import sklearn_ep

ROOT = pathlib.Path(sklearn_ep.__file__).parent
# threadpoolctl comes with scikit-learn, which depends on it
CORE = {"numpy", "scipy", "sklearn", "joblib", "threadpoolctl", "sklearn_ep"}
CORE |= sys.stdlib_module_names
# what each room may import from besides itself
SHARED = {"_estimator", "_engine"}
ROOMS = {
    "_engine": set(),
    "_estimator": {"_engine"},
    "gaussian_process": SHARED,
    "spike_slab": SHARED,
    "convex": SHARED,
    "hierarchical": SHARED,
    "active_learning": SHARED,
    "inspection": SHARED,
    "datasets": SHARED,
    # a mixture of fitted estimators: by their public names alone
    "stacking": SHARED | {"convex", "gaussian_process"},
}


@functools.cache
def modules_imported(path):
    """(module, top level of the file?) for every import, relative ones made absolute."""
    tree = ast.parse(path.read_text())
    package, found = ("sklearn_ep", *path.relative_to(ROOT).parts[:-1]), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in tree.body) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((module, node in tree.body))
    return found


def rooms_imported(path):
    """Rooms of the package that a file imports from."""
    for module, _ in modules_imported(path):
        parts = module.split(".")
        if parts[0] == "sklearn_ep" and len(parts) > 1:
            yield parts[1]


def test_every_module_is_in_a_room():
    assert {p.stem for p in ROOT.glob("*.py")} == {"__init__", "kernels", "sites"}
    assert {p.name for p in ROOT.iterdir() if p.is_dir()} - {"__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_from_models_to_estimator_to_engine(room):
    for path in (ROOT / room).rglob("*.py"):
        others = set(rooms_imported(path)) - {room}
        assert others <= ROOMS[room], f"{path.relative_to(ROOT)} imports {others - ROOMS[room]}"


def test_optional_packages_are_imported_where_they_are_used():
    for path in ROOT.rglob("*.py"):
        for module, at_top in modules_imported(path):
            if at_top:
                assert module.split(".")[0] in CORE, f"{path.name} imports {module}"


def test_only_compat_imports_private_parts_of_sklearn():
    for path in ROOT.rglob("*.py"):
        if path.name == "compat.py":
            continue
        for module, _ in modules_imported(path):
            parts = module.split(".")
            assert parts[0] != "sklearn" or not any(p.startswith("_") for p in parts[1:]), path


@pytest.fixture(scope="module")
def alone():
    """What a fresh interpreter prints of its imports, line by line, and its complaints.

    Optional packages that scikit-learn has imported are forgotten first: who asks again is seen.
    """
    optional = "{'matplotlib', 'pandas', 'dask', 'distributed', 'rich', 'polars'}"
    code = (
        "import sys, sklearn.gaussian_process, sklearn.linear_model\n"
        f"seen = [m for m in sys.modules if m.split('.')[0] in {optional}]\n"
        "for m in seen: del sys.modules[m]\n"
        "import sklearn_ep; loaded = {m for m in sys.modules if m.startswith('sklearn_ep')}\n"
        "a = sklearn_ep.SpikeSlabRegressor; b = sklearn_ep.SpikeSlabRegressor\n"
        "print(sorted(loaded), a is b, a.__module__, 'sklearn_ep.convex' in sys.modules)\n"
        "import sklearn_ep.stacking; own = [m for m in sys.modules if m.startswith('sklearn_ep')]\n"
        "named = {c.__module__ for m in own for c in vars(sys.modules[m]).values()\n"
        "    if isinstance(c, type) and c.__module__.startswith('sklearn_ep')}\n"
        "print(sorted(named - set(sys.modules)))\n"
        "from sklearn_ep import *\n"
        "import sklearn_ep.active_learning, sklearn_ep.datasets, sklearn_ep.inspection\n"
        "loaded = {m.split('.')[0] for m in sys.modules}\n"
        f"print(sorted(loaded & {optional}))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr


def test_import_is_silent_and_light(alone):
    lines, complaints = alone
    assert (lines[-1], complaints) == ("[]", "")


def test_an_estimator_is_loaded_at_its_first_use(alone):
    assert alone[0][0] == "['sklearn_ep'] True sklearn_ep False"


def test_classes_name_modules_that_are_loaded(alone):
    # else a worker sends them by value, and what it fitted cannot be pickled
    assert alone[0][1] == "[]"


def test_the_top_level_names_what_it_has():
    assert set(sklearn_ep.__all__) <= set(dir(sklearn_ep))
    for name in sklearn_ep.__all__:
        value = getattr(sklearn_ep, name)
        assert not isinstance(value, type) or value.__module__ == "sklearn_ep"
    with pytest.raises(AttributeError, match="no attribute 'NoSuchModel'"):
        sklearn_ep.NoSuchModel  # noqa: B018
