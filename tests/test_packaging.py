"""What others see of the package: one version, one address, the same requirements everywhere."""

import pathlib
import re
import tomllib

import pytest

import sklearn_ep

ROOT = pathlib.Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/sklearn-ep/sklearn-ep"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# addresses of the project itself besides those of its repository
OURS = (
    REPOSITORY,
    "https://raw.githubusercontent.com/sklearn-ep/sklearn-ep/main/",
    "https://pypi.org/project/sklearn-ep/",
)


def texts():
    """Path and text of what a reader or a tool may follow links from."""
    names = ["*.md", "*.cff", "*.toml", ".*.yaml", ".github/**/*.*", "sklearn_ep/**/*.py"]
    names += ["doc/*.rst", "doc/*.py", "doc/user_guide/*.rst", "doc/README.md", "examples/**/*.*"]
    for path in sorted({p for name in names for p in ROOT.glob(name)}):
        if path.suffix in {".md", ".cff", ".toml", ".yaml", ".yml", ".py", ".rst"}:
            yield path, path.read_text()


def test_the_version_is_the_same_everywhere():
    version = sklearn_ep.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version: "{version}"' in (ROOT / ".github/conda/recipe.yaml").read_text()
    assert f"\n## {version.removesuffix('.0')} (" in (ROOT / "CHANGELOG.md").read_text()


def test_all_addresses_of_the_project_are_under_one_name():
    found = set()
    for path, text in texts():
        for address in re.findall(r"https?://[^\s\"'`<>)\]]*sklearn[-_]ep[^\s\"'`<>)\]]*", text):
            assert address.startswith(OURS), f"{path.name}: {address}"
            found.add(address)
    assert REPOSITORY in found and set(PROJECT["urls"].values()) <= found


def test_links_of_the_front_page_are_absolute_and_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert link.startswith(OURS), link
        inside = re.sub(r"^.*?/(blob/main|tree/main|sklearn-ep/main)/", "", link)
        assert (ROOT / inside).exists(), link


def test_the_recipe_asks_for_what_the_package_asks_for():
    recipe = (ROOT / ".github/conda/recipe.yaml").read_text()
    run = recipe.split("  run:\n")[1].split("\n\n")[0]
    asked = {line.strip(" -").replace(" ", "") for line in run.splitlines()}
    python = {f"python{PROJECT['requires-python']}"}
    assert asked == {need.replace(" ", "") for need in PROJECT["dependencies"]} | python


def test_workflows_run_on_what_the_classifiers_name():
    named = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if " :: Python :: 3." in c]
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    assert f"python: {named}".replace("'", '"') in workflow
    assert named[0] == PROJECT["requires-python"].removeprefix(">=")


def test_files_of_github_are_yaml():
    yaml = pytest.importorskip("yaml")
    for path, text in texts():
        if path.suffix in {".yml", ".yaml", ".cff"}:
            assert isinstance(yaml.safe_load(text), dict), path


@pytest.mark.parametrize("name", [n for n in sklearn_ep.__all__ if n[0].isupper()])
def test_the_html_view_links_to_the_source_of_the_class(name):
    estimator = getattr(sklearn_ep, name)()
    link = estimator._get_doc_link()
    assert link.startswith(f"{REPOSITORY}/blob/main/")
    source = (ROOT / link.removeprefix(f"{REPOSITORY}/blob/main/")).read_text()
    assert f"\nclass {name}(" in source

    class Own(type(estimator)):
        __module__ = "elsewhere"

    assert Own()._get_doc_link() == ""
