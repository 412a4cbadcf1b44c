"""Weights of the stacked classifier beside those of thirty times as many draws.

    python doc/benchmarks/stack_weights.py [--quick]

Twelve sets, generated ones and three of scikit-learn. Largest error of a weight over the parts of a
fit, and CPU seconds, for a quarter, the default number and four times as many draws.
"""

import time
import warnings

import numpy as np
from common import arguments, save, table
from sklearn.datasets import load_breast_cancer, load_iris, load_wine, make_classification
from sklearn.preprocessing import StandardScaler

from sklearn_ep import BayesianStackingClassifier
from sklearn_ep.stacking import _classifier as stack

SHAPES = (
    (60, 4),
    (100, 20),
    (150, 6),
    (150, 40),
    (250, 8),
    (400, 10),
    (400, 60),
    (600, 5),
    (900, 20),
)
DEFAULT = stack.WeightDraws()


def sets():
    """Yield (name, X, y)."""
    for k, (n, d) in enumerate(SHAPES):
        shape = dict(n_informative=max(d // 3, 3), n_redundant=0, flip_y=0.02 * k)
        yield f"{n} x {d}", *make_classification(n, d, **shape, random_state=k)
    for load in (load_iris, load_wine, load_breast_cancer):
        yield load.__name__, *load(return_X_y=True)


def told(X, y):
    """Return what a fit asks weights of: log probabilities (n, K), and counts of rows."""
    seen, find = [], stack._posterior_of_weights

    def kept(log_p, count):
        seen.append((log_p, count))
        return find(log_p, count)

    stack._posterior_of_weights = kept
    try:
        BayesianStackingClassifier(random_state=0).fit(StandardScaler().fit_transform(X), y)
    finally:
        stack._posterior_of_weights = find
    return seen[0]


def weights_by(times, log_p, count):
    """Return weights by so many times the draws, and CPU seconds."""
    stack._DRAWS = stack.WeightDraws(*(times * np.array(DEFAULT)).astype(int).tolist())
    try:
        stack._posterior_of_weights(log_p, count)  # points are made once
        start = time.process_time()
        return stack._posterior_of_weights(log_p, count)[0], time.process_time() - start
    finally:
        stack._DRAWS = DEFAULT


def main():
    """Find weights of all sets and tabulate errors."""
    args, rows = arguments(__doc__.splitlines()[0]), []
    for name, X, y in list(sets())[:: 4 if args.quick else 1]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables = told(X, y)
        exact, row = weights_by(30, *tables)[0], {"set": name}
        for times in (0.25, 1, 4):
            found, seconds = weights_by(times, *tables)
            row |= {f"{times:g}: error": np.abs(found - exact).max(), f"{times:g}: s": seconds}
        rows.append(row)
    table(rows, list(rows[0]))
    save(args, "stack_weights", rows)


if __name__ == "__main__":
    main()
