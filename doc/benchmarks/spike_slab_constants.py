"""Constants of spike and slab: each halved and doubled, evidence and CPU time.

    python doc/benchmarks/spike_slab_constants.py            all sets
    python doc/benchmarks/spike_slab_constants.py --quick    half of them
    python doc/benchmarks/spike_slab_constants.py --only INNER_TOL TAIL    these constants only

The rows of constants that did not run stay as they are stored.

One row a constant, on the kind of sets where it has a part. Differences of the log evidence are in
nats a set, those of the log density of held-out rows in nats a row; larger is better. "changed"
counts the sets whose evidence moves by more than .05, "unsettled" the fits that end with a warning,
"nodes" the mean number of nodes of an average. CPU is the ratio to the values in use, "sweeps" the
same ratio for evaluated posteriors, which no other process disturbs.

"learned" sets have unknown hyperparameters. "known" ones are those of the published protocol:
d = 25, n = 10, unit rows, noise .005, true hyperparameters given. "wide" ones have many columns for
few rows, where the evidence of EP has to be checked. "labels" have two classes: tables of
`make_classification` with collinear columns, columns with correlations, and separable ones.
"""

import importlib
import warnings
from typing import NamedTuple

from common import arguments, cpu, save, stored_rows, table

import numpy as np
from scipy.stats import norm
from sklearn.datasets import make_classification
from sklearn.preprocessing import StandardScaler

from sklearn_ep import SpikeSlabClassifier, SpikeSlabRegressor
from sklearn_ep.datasets import make_spike_slab_regression

CONSTANTS = {
    "learning": {
        "FIRST_ROUNDS": "learned",
        "SAME_MEAN": "wide",
        "HOPELESS": "wide",
        "COARSE_TOL": "learned",
        "REACH": "learned",
        "SEARCHES": "learned",
        "EVALUATIONS": "learned",
        "INNER_ITER": "learned",
        "INNER_TOL": "learned",
        "INNER_GAIN": "learned",
        "SEARCH_ALL": "wide",
        "GRADIENT_TOL": "learned",
        "EVIDENCE_ERROR": "wide",
        "N_DOUBTFUL": "wide",
        "N_MODELS": "wide",
        "N_LEADING": "wide",
    },
    "hyperparameters": {"NOISE_FLOOR": "wide", "DENSE": "wide"},
    "runs": {"FIRST_NOISE": "known", "LEVELS": "known", "SWEEPS": "known", "TAIL": "known"},
    "energy": {
        "SMALLEST_SITE": "known",
        "LOW_SITE": "known",
        "UNDECIDED": "known",
        "LARGEST_ALPHA": "known",
        "ROUNDING": "known",
    },
    "probit": {
        "LACK": "labels",
        "FIRST": "labels",
        "DESCENTS": "labels",
        "SLOWER": "labels",
        "MOST": "labels",
        "TOL": "labels",
        "SETTLED": "labels",
        "SEARCH": "labels",
    },
}
# rows, columns, columns in, noise, correlation of neighbours, seed
LEARNED = [
    (40, 100, 4, 0.1, 0.0, 0),
    (60, 40, 5, 0.1, 0.0, 1),
    (60, 40, 8, 2.0, 0.8, 2),
    (80, 30, 8, 2.0, 0.0, 3),
    (50, 200, 8, 0.01, 0.0, 4),
    (30, 30, 6, 1.0, 0.9, 7),
    (20, 60, 4, 0.05, 0.5, 8),
    (60, 100, 6, 1.5, 0.9, 7),
]
# seed, rows, columns, noise
WIDE = [(11, 50, 500, 0.5), (3, 50, 600, 0.5), (4, 150, 200, 2.0), (5, 12, 40, 0.1)]
# rows and columns of two classes; the hyperparameters given
SHAPES = [(60, 20), (90, 5), (200, 10), (62, 200)]
GIVEN = [{}, dict(slab_variance=1.0, prior_inclusion=0.3)]
HELD_OUT = 200
MODULES = {
    name: importlib.import_module(f"sklearn_ep.spike_slab._{name}")
    for name in [*CONSTANTS, "linear_model"]
}


def learned_sets():
    """Yield (estimator, X, y) with everything to be learned, the last rows held out."""
    for n, d, inside, noise, correlation, seed in LEARNED:
        X, y, _ = make_spike_slab_regression(
            n + HELD_OUT, d, n_informative=inside, noise=noise, correlation=correlation,
            random_state=seed,
        )  # fmt: skip
        yield SpikeSlabRegressor(), X, y


def known_sets():
    """Yield (estimator, X, y) of the published protocol."""
    known = dict(noise_variance=0.005**2, slab_variance=1.0, prior_inclusion=0.2)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        w = rng.normal(size=25) * (rng.random(25) < 0.2)
        X = rng.normal(size=(10 + HELD_OUT, 25))
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        y = X @ w + 0.005 * rng.normal(size=len(X))
        yield SpikeSlabRegressor(**known, fit_intercept=False, standardize=False), X, y


def wide_sets():
    """Yield (estimator, X, y) with more than 20,000 entries of X or few rows, 4 columns in."""
    for seed, n, d, noise in WIDE:
        X, y, _ = make_spike_slab_regression(
            n + HELD_OUT, d, n_informative=4, noise=noise, random_state=seed
        )
        yield SpikeSlabRegressor(), X, y


def label_sets():
    """Yield (estimator, X, y) of two classes: collinear, correlated and separable columns."""
    for seed, (n, d) in enumerate(SHAPES * 3):
        X, y = make_classification(
            n + HELD_OUT, d, n_informative=min(3, d - 2), flip_y=0.1, random_state=seed
        )
        yield from labelled(X, y)
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(n + HELD_OUT, d))
        for j in range(1, d):
            X[:, j] = 0.9 * X[:, j - 1] + np.sqrt(0.19) * X[:, j]
        signal = X[:, 0] + X[:, -1]
        yield from labelled(X, (signal + rng.normal(size=len(X)) > 0).astype(int))
        yield from labelled(X, (signal > 0).astype(int))


def labelled(X, y):
    """Yield a table with hyperparameters that are learned, and given."""
    X = StandardScaler().fit(X[:-HELD_OUT]).transform(X)
    yield from ((SpikeSlabClassifier(**given), X, y) for given in GIVEN)


KINDS = {
    "learned": learned_sets,
    "known": known_sets,
    "wide": wide_sets,
    "labels": label_sets,
}


class Outcome(NamedTuple):
    """Evidences, held-out log densities, posteriors evaluated, unsettled fits, nodes of a fit."""

    evidence: np.ndarray
    density: np.ndarray
    count: int
    unsettled: int
    nodes: float


def held_out(estimator, X, y):
    """Return the mean log density, or log probability, of held-out rows."""
    if hasattr(estimator, "classes_"):
        return np.log(estimator.predict_proba(X)[np.arange(len(y)), y]).mean()
    mean, std = estimator.predict(X, return_std=True)
    return norm.logpdf(y, mean, std).mean()


def outcome(sets):
    """Return the `Outcome` of fits to sets."""
    model = MODULES["linear_model"].LinearModel
    evaluate, count, evidence, density, nodes, settled = model.marginals, 0, [], [], [], []

    def counted(*args):
        nonlocal count
        count += 1
        return evaluate(*args)

    model.marginals = counted
    try:
        for estimator, X, y in sets:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                estimator.fit(X[:-HELD_OUT], y[:-HELD_OUT])
            density.append(held_out(estimator, X[-HELD_OUT:], y[-HELD_OUT:]))
            evidence.append(estimator.log_evidence_)
            nodes.append(len(getattr(estimator, "hyper_weights_", [1.0])))
            settled.append(estimator.converged_)
    finally:
        model.marginals = evaluate
    unsettled = settled.count(False)
    return Outcome(np.array(evidence), np.array(density), count, unsettled, np.mean(nodes))


def holders_of(name):
    """Return (module, attribute) wherever a constant is: by itself, or a table with its field."""
    home = vars(MODULES[next(own for own, kinds in CONSTANTS.items() if name in kinds)])
    if name in home:
        return [(module, name) for module in MODULES.values() if hasattr(module, name)]
    tables = [v for v in home.values() if name.lower() in getattr(type(v), "_fields", ())]
    return [
        (module, attribute)
        for module in MODULES.values()
        for attribute, value in vars(module).items()
        if any(value is table for table in tables)
    ]


def with_value(name, value, call):
    """Call with a constant set to another value wherever it was imported."""
    held = [
        (module, attribute, getattr(module, attribute)) for module, attribute in holders_of(name)
    ]
    try:
        for module, attribute, before in held:
            table = hasattr(before, "_fields")
            setattr(module, attribute, before._replace(**{name.lower(): value}) if table else value)
        return cpu(call)
    finally:
        for module, attribute, before in held:
            setattr(module, attribute, before)


def row_of(name, kind, sets, reference):
    """Return the row of one constant, against what the values in use give."""
    place, attribute = holders_of(name)[0]
    value = getattr(place, attribute)
    value = getattr(value, name.lower(), value)
    before, seconds = reference
    row = dict(constant=name, value=value, sets=f"{len(sets)} {kind}")
    row |= {"unsettled": before.unsettled, "nodes": before.nodes}
    for label, factor in (("halved", 0.5), ("doubled", 2.0)):
        other = max(1, round(value * factor)) if isinstance(value, int) else value * factor
        other = min(other, 0.9) if name in ("DENSE", "LACK", "SLOWER") else other  # below one
        found, time = with_value(name, other, lambda: outcome(sets))
        gain = found.evidence - before.evidence
        row |= {
            f"{label}: evidence": float(gain.mean()),
            f"{label}: changed": int(np.sum(np.abs(gain) > 0.05)),
            f"{label}: held out": float(np.mean(found.density - before.density)),
            f"{label}: unsettled": found.unsettled,
            f"{label}: nodes": found.nodes,
            f"{label}: CPU": time / seconds,
            f"{label}: sweeps": found.count / before.count,
        }
    return row


def main():
    """Measure all constants."""
    args = arguments(__doc__, ("--only", dict(nargs="*", help="names of constants")))
    kind_of = {name: kind for kinds in CONSTANTS.values() for name, kind in kinds.items()}
    asked, rows = args.only or list(kind_of), []
    for kind, make in KINDS.items():
        names = [name for name in asked if kind_of[name] == kind]
        if not names:
            continue
        sets = list(make())[:: 2 if args.quick else 1]
        outcome(sets[:1])  # the first fit pays for imports
        reference = cpu(lambda sets=sets: outcome(sets))
        rows += [row_of(name, kind, sets, reference) for name in names]
    if args.only:
        stored = stored_rows(args, "spike_slab_constants")
        rows = [r for r in stored if r["constant"] not in asked] + rows
    table(rows, list(rows[-1]))
    save(args, "spike_slab_constants", rows)


if __name__ == "__main__":
    main()
