"""Dependencies point one way: estimators -> _base -> _engine, and nothing optional at import."""

import ast
import pathlib
import subprocess
import sys

import sklearn_ep

ROOT = pathlib.Path(sklearn_ep.__file__).parent
# threadpoolctl comes with scikit-learn, which depends on it
CORE = {"numpy", "scipy", "sklearn", "joblib", "threadpoolctl", "sklearn_ep"}
CORE |= sys.stdlib_module_names


def modules_imported(path):
    """(module, top level of the file?) for every import, relative ones made absolute."""
    tree = ast.parse(path.read_text())
    package = ("sklearn_ep", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        inside = not any(node is n for n in tree.body)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, not inside
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *([node.module] if node.module else [])]), not inside


def test_engine_knows_no_estimator():
    for path in (ROOT / "_engine").rglob("*.py"):
        for module, _ in modules_imported(path):
            if module.startswith("sklearn_ep"):
                assert module.startswith("sklearn_ep._engine"), f"{path.name} imports {module}"


def test_base_knows_no_estimator():
    for path in ROOT.glob("_*.py"):
        if path.name == "__init__.py":
            continue
        for module, _ in modules_imported(path):
            public = module.startswith("sklearn_ep.") and not module.split(".")[1].startswith("_")
            assert not public, f"{path.name} imports {module}"


def test_estimators_do_not_know_each_other():
    allowed = {"sklearn_ep.datasets"}
    for path in ROOT.glob("[a-z]*.py"):
        for module, _ in modules_imported(path):
            public = module.startswith("sklearn_ep.") and not module.split(".")[1].startswith("_")
            assert not public or module in allowed, f"{path.name} imports {module}"


def test_optional_packages_are_imported_where_they_are_used():
    for path in ROOT.rglob("*.py"):
        for module, at_top in modules_imported(path):
            if at_top:
                assert module.split(".")[0] in CORE, f"{path.name} imports {module}"


def test_only_compat_imports_private_parts_of_sklearn():
    for path in ROOT.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for module, _ in modules_imported(path):
            parts = module.split(".")
            assert parts[0] != "sklearn" or not any(p.startswith("_") for p in parts[1:]), path


def test_import_is_silent_and_light():
    optional = "{'matplotlib', 'pandas', 'dask', 'distributed', 'rich', 'polars'}"
    code = (
        "import sys, sklearn.gaussian_process, sklearn.linear_model; before = set(sys.modules);"
        "import sklearn_ep; new = {m.split('.')[0] for m in set(sys.modules) - before};"
        f"print(sorted(new & {optional}))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
