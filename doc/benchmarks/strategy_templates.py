"""scikit-activeml's own test templates for query strategies, run against our adapter.

    python doc/benchmarks/strategy_templates.py --templates FOLDER

FOLDER holds `skactiveml/tests/template_query_strategy.py`: a checkout of scikit-activeml, or its
wheel of version 0.6.1, the last that has the file, unpacked. The templates test the installed
version. Nothing is installed or changed on disk. A test that fails is listed with its reason.
"""

import pathlib
import unittest

import numpy as np
import skactiveml
from common import arguments, save, table
from skactiveml.classifier import SklearnClassifier

from sklearn_ep import EPGaussianProcessClassifier
from sklearn_ep.active_learning import SkactivemlQuery

STRATEGIES = ("margin", "bald", "epig_entropy", "variance_reduction", "auto")


def template(folder):
    """Return the template of strategies for pools, from the tests of scikit-activeml."""
    skactiveml.__path__.append(str(pathlib.Path(folder).resolve() / "skactiveml"))
    from skactiveml.tests.template_query_strategy import TemplateSingleAnnotatorPoolQueryStrategy

    return TemplateSingleAnnotatorPoolQueryStrategy


def case_of(base, strategy):
    """Return the test case of one strategy: the template, and what it asks of each adapter."""

    class Adapter(base, unittest.TestCase):
        def setUp(self):
            rng = np.random.default_rng(0)
            X = rng.normal(size=(12, 2))
            y = np.full(12, np.nan)
            y[:4] = [0, 1, 1, 0]
            clf = SklearnClassifier(EPGaussianProcessClassifier(optimizer=None), classes=[0, 1])
            super().setUp(
                qs_class=type(SkactivemlQuery()),
                init_default_params=dict(strategy=strategy, n_reference=None),
                query_default_params_clf=dict(X=X, y=y, clf=clf),
            )

        def test_init_param_strategy(self):
            self._test_param("init", "strategy", [("nothing", ValueError), ("margin", None)])

        def test_init_param_n_reference(self):
            self._test_param("init", "n_reference", [("many", (TypeError, ValueError)), (5, None)])

        def test_query_param_clf(self):
            super().test_query_param_clf(test_cases=[])

        def test_query(self):
            query = self.qs_class(**self.init_default_params).query
            chosen = query(**self.query_default_params_clf)
            assert len(chosen) == 1 and chosen[0] >= 4

    Adapter.__qualname__ = f"Adapter[{strategy}]"
    return Adapter


class Listed(unittest.TestResult):
    """Result that keeps a row for each test and for each part of one that fails."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def _row(self, test, outcome, error=None):
        reason = "" if error is None else f"{error[0].__name__}: {error[1]}".splitlines()[0][:120]
        name, _, part = test.id().rpartition("<locals>.")[2].partition(" ")
        self.rows.append(dict(test=name, part=part, outcome=outcome, reason=reason))

    def addSuccess(self, test):
        self._row(test, "passed")

    def addFailure(self, test, error):
        self._row(test, "failed", error)

    addError = addFailure

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self._row(subtest, "failed", error)


def main():
    args = arguments(
        __doc__.splitlines()[0],
        ("--templates", dict(required=True, help="folder with skactiveml/tests")),
    )
    base, result = template(args.templates), Listed()
    for strategy in STRATEGIES:
        unittest.defaultTestLoader.loadTestsFromTestCase(case_of(base, strategy)).run(result)
    failed = [row for row in result.rows if row["outcome"] == "failed"]
    if failed:
        table(failed, list(failed[0]))
    print(f"{result.testsRun} tests of {len(STRATEGIES)} strategies, {len(failed)} failures")
    save(args, "strategy_templates", result.rows)


if __name__ == "__main__":
    main()
