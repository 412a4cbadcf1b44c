"""Sphinx configuration; see README.md beside this file for the build command."""

import os
import re
import sys
import urllib.error
import urllib.request

os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices of the examples are small
sys.path.insert(0, os.path.abspath(".."))

from sphinx_gallery.sorting import ExplicitOrder  # noqa: E402

import sklearn_ep  # noqa: E402

project = "sklearn-ep"
author = "The sklearn-ep developers"
copyright = "2026, the sklearn-ep developers"
version = release = sklearn_ep.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "README.md", "benchmarks"]
default_role = "code"

autosummary_generate = True
autodoc_typehints = "none"
toc_object_entries_show_parents = "hide"
numpydoc_show_class_members = False  # the class template lists them
# numpydoc links attributes that are properties to pages of their own, which they do not have
nitpick_ignore = [("py:obj", name) for name in ("labelled_", "y_", "named_estimators_")]


def reachable(inventories):
    """Return the inventories that answer: without a network the site builds with fewer links."""
    found = {}
    for name, address in inventories.items():
        try:
            urllib.request.urlopen(address + "objects.inv", timeout=5).close()
        except (urllib.error.URLError, TimeoutError):
            print(f"no links to {name}: {address} does not answer")
        else:
            found[name] = (address, None)
    return found


intersphinx_mapping = reachable({"sklearn": "https://scikit-learn.org/stable/"})

# A copy of MathJax may be named for readers without a network.
mathjax_path = os.environ.get(
    "MATHJAX_PATH", "https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-chtml.js"
)

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"/plot_",
    "subsection_order": ExplicitOrder(
        [
            f"../examples/{section}"
            for section in ("classify", "wrong_labels", "select", "large", "groups", "ask", "scale")
        ]
    ),
    "within_subsection_order": "FileNameSortKey",
    "plot_gallery": "True",  # -D plot_gallery=0 builds without running the examples
    "doc_module": ("sklearn_ep",),
    "backreferences_dir": "generated/backreferences",
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 10_000,
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = f"sklearn-ep {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_sidebars = {
    page: [] for page in ("start", "which_estimator", "active_learning", "scaling_out")
}
html_theme_options = {
    "show_nav_level": 1,
    "show_toc_level": 2,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],  # a field would leave no room for all links
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}
# Where several versions are published beside each other: the address of the list of them.
if "DOC_VERSIONS" in os.environ:
    html_theme_options |= {
        "switcher": {"json_url": os.environ["DOC_VERSIONS"], "version_match": version},
        "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
        "show_version_warning_banner": True,
    }


def escape_markup(app, what, name, obj, options, lines):
    """Keep (x_,) in a shape and |u| in a formula from being read as a link and a substitution."""
    for i, line in enumerate(lines):
        if " : " in line:
            line = re.sub(r"(?<=[(, ])(\w+)_(?=[,)])", r"\1\\_", line)
        if "``" not in line and ">>>" not in line:
            line = re.sub(r"\|([\w -]+)\|", r"\|\1\|", line)
        lines[i] = line


def setup(app):
    """Run before numpydoc, which turns the docstring into reStructuredText."""
    app.connect("autodoc-process-docstring", escape_markup, priority=100)
