"""Linear models from partitions: visits to the rows, what travels, and one against two workers.

    python doc/benchmarks/partitions.py [--quick]

Workers are threads. Wall times mean something on an idle machine only, so that CPU times of both
stand beside them. What travels is the size of the pickles of messages and answers, which
threads do not make; a fit of its own counts it.
"""

import pickle
import time

import numpy as np
import scipy.sparse as sp
from common import arguments, cpu, save, table
from scipy.special import expit

from sklearn_ep import ConvexVariationalLogistic, SpikeSlabRegressor
from sklearn_ep._engine.partition import PartMap


def text(n, d, per_row=75, seed=0):
    """Sparse rows of d columns with labels."""
    rng = np.random.default_rng(seed)
    columns = np.minimum((d * rng.random(n * per_row) ** 3).astype(int), d - 1)
    data = np.full(n * per_row, 1.0 / np.sqrt(per_row))
    X = sp.csr_matrix((data, columns, np.arange(0, n * per_row + 1, per_row)), (n, d))
    X.sum_duplicates()
    return X, (rng.random(n) < expit(X @ rng.standard_normal(d) * 3)).astype(int)


def dense(n, d, seed=0):
    """Dense rows with labels."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    return X, (rng.random(n) < expit(X @ rng.standard_normal(d) / np.sqrt(d) * 2)).astype(int)


def cut(X, y, k):
    """Return k partitions of consecutive rows."""
    ends = np.linspace(0, X.shape[0], k + 1).round().astype(int)
    return [(X[a:b], y[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def timed(make, parts, n_jobs):
    """Return (fit, CPU seconds, wall seconds)."""
    start = time.perf_counter()
    fit, seconds = cpu(lambda: make(n_jobs).fit(parts))
    return fit, seconds, time.perf_counter() - start


def traffic(make, parts):
    """Return visits to all parts, and the mean bytes to and from a part in one of them."""
    sizes, call = [], PartMap.__call__

    def counted(self, worker, messages, *shared):
        answers = call(self, worker, messages, *shared)
        for message, answer in zip(messages, answers, strict=True):
            sizes.append([len(pickle.dumps(a)) for a in ((message, shared), answer)])
        return answers

    PartMap.__call__ = counted
    try:
        make(1).fit(parts)
    finally:
        PartMap.__call__ = call
    return len(sizes) // len(parts), *np.mean(sizes, axis=0)


def compare(name, make, X, y, n_parts=4):
    """Fit with one and two workers; return a row of the table."""
    parts = cut(X, y, n_parts)
    for jobs in (1, 2):  # the second fit finds memory touched and processes started
        timed(make, parts, jobs)
    one, cpu_one, wall_one = timed(make, parts, 1)
    two, cpu_two, wall_two = timed(make, parts, 2)
    visits, sent, back = traffic(make, parts)
    return {
        "model": name,
        "rows": X.shape[0],
        "columns": X.shape[1],
        "visits": visits,
        "parts": n_parts,
        "kB to a part and visit": sent / 1e3,
        "kB back": back / 1e3,
        "equal bits": bool(np.array_equal(one.coef_, two.coef_)),
        "CPU of two workers / one": cpu_two / cpu_one,
        "CPU seconds": cpu_one,
        "wall seconds, one worker": wall_one,
        "wall seconds, two workers": wall_two,
    }


def main():
    args = arguments(__doc__.split("\n")[0])
    n = 20_000 if args.quick else 200_000
    logistic = ConvexVariationalLogistic

    def sampled(jobs):
        given = dict(fit_intercept=False, random_state=0, n_evidence_probes=0, n_jobs=jobs)
        return logistic(9.0, variance="calibrated", **given)

    rows = [
        compare(
            "exact variances",
            lambda jobs: logistic(fit_intercept=False, n_jobs=jobs),
            *dense(n, 100),
        ),
        compare("calibrated variances", sampled, *text(n, 20_000)),
    ]
    if not args.quick:
        rows.append(compare("calibrated variances", sampled, *text(300_000, 40_000), n_parts=2))
    X, _ = dense(n, 100)
    y = X[:, :5].sum(axis=1) + np.random.default_rng(1).standard_normal(n)
    rows.append(compare("spike and slab", lambda jobs: SpikeSlabRegressor(n_jobs=jobs), X, y))
    table(rows, list(rows[0]))
    save(args, "partitions", rows)


if __name__ == "__main__":
    main()
