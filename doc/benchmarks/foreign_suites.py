"""scikit-learn's own tests of its Gaussian-process classifier, run on ours.

    python doc/benchmarks/foreign_suites.py

The module `sklearn.gaussian_process.tests.test_gpc` is collected as installed, its name
`GaussianProcessClassifier` is made to mean our class with the dense method, and each outcome is
printed with the last line of what went wrong. Nothing is installed or changed on disk.
"""

import collections
import functools

import pytest
from common import arguments, save, table

from sklearn_ep import EPGaussianProcessClassifier

SUITES = {
    "sklearn.gaussian_process.tests.test_gpc": (
        "GaussianProcessClassifier",
        functools.partial(EPGaussianProcessClassifier, method="dense"),
    )
}


class Replacement:
    """Plugin of pytest that replaces a name in the collected module and keeps the outcomes."""

    def __init__(self, name, ours):
        self.name, self.ours, self.rows = name, ours, []

    def pytest_collection_finish(self, session):
        for module in {item.module for item in session.items}:
            setattr(module, self.name, self.ours)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        reason = ""
        if report.failed:
            reason = getattr(report.longrepr, "reprcrash", report.longrepr)
            reason = str(getattr(reason, "message", reason)).strip().splitlines()[0][:120]
        test = report.nodeid.rpartition("::")[2]
        self.rows.append({"test": test, "outcome": report.outcome, "reason": reason})


def main():
    args = arguments(__doc__)
    rows = []
    for suite, (name, ours) in SUITES.items():
        plugin = Replacement(name, ours)
        options = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-W", "default"]
        options += ["-o", "xfail_strict=false"]  # where theirs is known to fail, ours may pass
        pytest.main([*options, "--pyargs", suite], plugins=[plugin])
        rows += [{"suite": suite, **row} for row in plugin.rows]
    table([row for row in rows if row["outcome"] == "failed"], ["test", "reason"])
    counts = collections.Counter(row["outcome"] for row in rows)
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    save(args, "foreign_suites", rows)


if __name__ == "__main__":
    main()
