"""Two BLAS threads in a method against one: how long, and whether answers stay.

    python doc/benchmarks/threads.py [--quick]

Methods take one thread whatever BLAS is set to. Here that is undone for every other call, which
then has two. Seconds are those of the clock, medians of three in turns; run it with two cores free.
"""

import contextlib
import time
import types
import warnings
from functools import partial

import numpy as np
from common import arguments, save, table
from sklearn.datasets import make_classification, make_regression
from threadpoolctl import threadpool_limits

from sklearn_ep import (
    BayesianStackingClassifier,
    ConvexVariationalLogistic,
    EPGaussianProcessClassifier,
    RelaxedEPClassifier,
    SpikeSlabRegressor,
)
from sklearn_ep._engine import gaussian


def classes(n, d, n_classes=2):
    """Return generated rows and labels."""
    return make_classification(
        n, d, n_informative=6, n_redundant=0, n_classes=n_classes, random_state=1
    )


def fits(quick):
    """Yield (name, model, X, y)."""
    dense = EPGaussianProcessClassifier(method="dense", random_state=0)
    yield "stack, 600 x 10", BayesianStackingClassifier(random_state=0), *classes(600, 10)
    yield "Gaussian process, dense, 600 x 10", dense, *classes(600, 10)
    yield "label errors, 700 x 8", RelaxedEPClassifier(random_state=0), *classes(700, 8)
    yield "linear, 3000 x 300", ConvexVariationalLogistic(random_state=0), *classes(3000, 300)
    wide = make_regression(100, 1000, n_informative=5, noise=5.0, random_state=0)
    yield "sparse regression, 100 x 1000", SpikeSlabRegressor(random_state=0), *wide
    if quick:
        return
    gp = EPGaussianProcessClassifier(random_state=0)
    yield "Gaussian process, 600 x 10, four classes", gp, *classes(600, 10, 4)
    yield "Gaussian process, 2000 x 20", gp, *classes(2000, 20)
    points = EPGaussianProcessClassifier(n_inducing=200, random_state=0)
    yield "Gaussian process, 20,000 x 10, 200 points", points, *classes(20_000, 10)
    mode = EPGaussianProcessClassifier(method="dense", optimizer=None, random_state=0)
    yield "Gaussian process, dense, hyperparameters fixed, 6000 x 10", mode, *classes(6000, 10)


def questions():
    """Yield (name, function without arguments) of what fitted models are asked."""
    X, y = classes(500, 10)
    gp = EPGaussianProcessClassifier(random_state=0).fit(X, y)
    yield "probabilities of 500 rows", partial(gp.predict_proba, X)
    yield "probabilities of 200 rows, 500 draws", partial(gp.sample_proba, X[:200], 500, 0)
    yield "`diagnose` of a Gaussian process", lambda: gp.diagnose().ess_share
    wide = make_regression(150, 400, n_informative=5, noise=5.0, random_state=0)
    reg = SpikeSlabRegressor(random_state=0).fit(*wide)
    yield "sparse coefficients, 500 draws", partial(reg.sample_posterior, 500, 0, exact_zeros=True)
    yield "intervals of a sparse regression", partial(reg.predict_interval, wide[0])


def timed(ask, as_set):
    """Return (answer, seconds), with two threads where they are left `as_set`."""
    found = gaussian.libraries
    if as_set:
        free = types.SimpleNamespace(limit=lambda **_: contextlib.nullcontext())
        gaussian.libraries = lambda: free
    try:
        with threadpool_limits(2, user_api="blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            answer = ask()
            return answer, time.perf_counter() - start
    finally:
        gaussian.libraries = found


def compared(name, ask, read=np.asarray):
    """Return a row of what is asked; `read` makes an array of the answer."""
    runs = [[timed(ask, as_set) for as_set in (False, True)] for _ in range(3)]
    one, two = np.median([[seconds for _, seconds in pair] for pair in runs], axis=0)
    row = {"method": name, "one thread, s": one, "two threads, s": two, "two / one": two / one}
    answers = [read(timed(ask, as_set)[0]) for as_set in (False, True)]
    return row | {"largest difference": float(np.max(np.abs(answers[0] - answers[1])))}


def main():
    args = arguments(__doc__)
    rows = []
    for name, model, X, y in fits(args.quick):
        read = partial(predicted, X=X)
        rows.append(compared(f"fit: {name}", partial(model.fit, X, y), read))
    rows += [compared(name, ask) for name, ask in questions()]
    table(rows, list(rows[0]))
    save(args, "threads", rows)


def predicted(model, X):
    """Return probabilities of rows, or their predictions."""
    return getattr(model, "predict_proba", model.predict)(X)


if __name__ == "__main__":
    main()
