"""Strategies of `active_learning` in closed form, and the posterior view they work on."""

import numpy as np
import scipy.sparse as sp
from scipy.special import entr
from sklearn.base import is_regressor
from sklearn.utils import check_random_state, gen_batches

from .._engine.gaussian import positive_variance
from .._estimator.checks import check_number
from ._links import links_of

__all__ = [
    "OF_PROBA",
    "STRATEGIES",
    "allowed_rows",
    "best_first",
    "check_strategy",
    "greedy",
    "latent_scores",
    "make_posterior",
    "proba_scores",
    "reference_rows",
    "regressor_scores",
    "rows_of",
    "take",
]

# Entries of one temporary block of covariances.
_BLOCK = 20_000_000


# ---------------------------------------------------------------------------- the posterior


class _Posterior:
    """Latent means and variances of pool rows, one column a binary problem, and their links.

    A batch is built up by `include`, which lowers the variances as a label of unknown value would.
    """

    def __init__(self, estimator, X, strategy):
        if not hasattr(estimator, "latent_mean_and_variance"):
            raise TypeError(
                f"strategy={strategy!r} needs an estimator with latent_mean_and_variance, which "
                f"{type(estimator).__name__} has not; margin, uncertainty, entropy and random do "
                "without."
            )
        self.estimator, self.X = estimator, X
        mean, var = (np.asarray(a, dtype=float) for a in estimator.latent_mean_and_variance(X))
        self.mean, self.var = mean.reshape(len(mean), -1), var.reshape(len(var), -1)
        proba = estimator.predict_proba(X)
        self.links = links_of(estimator, self.mean, self.var, proba)
        self.weight = proba if self.mean.shape[1] > 1 else np.ones((len(mean), 1))
        self.reference = None
        self._directions, self._of_reference = [], []

    def of_links(self, name, rows=slice(None)):
        """Return what the links say of rows at the present variances, (n, n_problems)."""
        columns = zip(self.links, self.mean[rows].T, self.var[rows].T, strict=True)
        return np.column_stack([getattr(link, name)(m, v) for link, m, v in columns])

    def proba(self):
        """Return class probabilities (n, n_classes) at the present variances."""
        p = self.of_links("proba")
        if p.shape[1] == 1:
            return np.column_stack([1.0 - p, p])
        return p / p.sum(axis=1, keepdims=True)

    def covariance(self, X1, X2):
        """Return prior-to-batch covariances (n_problems, n1, n2)."""
        C = np.asarray(self.estimator.latent_covariance(X1, X2), dtype=float)
        return C.reshape((-1, *C.shape[-2:]))

    def refer_to(self, X_reference):
        """Keep the squared covariances with reference rows, summed, and what updates them."""
        self.reference = X_reference
        step = max(1, _BLOCK // X_reference.shape[0])
        self._cross = [self.covariance(take(self.X, r), X_reference) for r in self._blocks(step)]

    def _blocks(self, step):
        return gen_batches(self.X.shape[0], step)

    def explained(self):
        """Return the mean squared covariance with the reference rows, (n, n_problems)."""
        return np.concatenate([np.mean(c**2, axis=2).T for c in self._cross])

    def include(self, i):
        """Lower variances and covariances as the label of row i would, means unchanged."""
        row = take(self.X, [i])
        to_pool = np.concatenate(
            [self.covariance(take(self.X, r), row)[:, :, 0].T for r in self._blocks(_BLOCK)]
        )
        to_pool -= sum(g * g[i] for g in self._directions)
        precision = self.of_links("precision", [i])[0]
        root = np.sqrt(precision / (1.0 + precision * self.var[i]))
        direction = to_pool * root
        if self.reference is not None:
            to_reference = self.covariance(row, self.reference)[:, 0, :]
            for g, h in zip(self._directions, self._of_reference, strict=True):
                to_reference -= g[i][:, None] * h
            to_reference *= root[:, None]
            start = 0
            for block in self._cross:
                stop = start + block.shape[1]
                block -= direction[start:stop].T[:, :, None] * to_reference[:, None, :]
                start = stop
            self._of_reference.append(to_reference)
        self._directions.append(direction)
        # exact algebra leaves var / (1 + precision var) at the row itself, never less than zero
        self.var = positive_variance(self.var - direction**2, self.var)


# ---------------------------------------------------------------------------- the strategies


def _margin(proba):
    top = np.partition(proba, -2, axis=1)
    return top[:, -2] - top[:, -1]


def _uncertainty(proba):
    return 0.5 - proba.max(axis=1)


def _entropy(proba):
    return entr(proba).sum(axis=1)


def _variance_reduction(posterior):
    """Return the expected fall of the mean variance of reference rows, for each problem.

    In logistic units, so that problems of several classes add up whatever their links.
    """
    precision = posterior.of_links("precision")
    scale = np.array([link.slope**2 for link in posterior.links])
    return scale * precision * posterior.explained() / (1.0 + precision * posterior.var)


OF_PROBA = {"margin": _margin, "uncertainty": _uncertainty, "entropy": _entropy}
_OF_LINK = ("bald", "information_gain")
STRATEGIES = ("random", *OF_PROBA, *_OF_LINK, "variance_reduction")


def latent_scores(posterior, strategy):
    """Scores (n,) at the present state of a `_Posterior`."""
    if strategy in OF_PROBA:
        return OF_PROBA[strategy](posterior.proba())
    if strategy == "variance_reduction":
        values = _variance_reduction(posterior)
    else:
        values = posterior.of_links(strategy)
    return np.sum(posterior.weight * values, axis=1)


def proba_scores(estimator, X, strategy):
    """Scores of any classifier by its probabilities; a binary margin by its decision function."""
    if strategy == "margin" and hasattr(estimator, "decision_function"):
        if len(estimator.classes_) == 2:
            return -np.abs(estimator.decision_function(X))
        if not hasattr(estimator, "predict_proba"):
            return _margin(estimator.decision_function(X))
    if not hasattr(estimator, "predict_proba"):
        raise TypeError(f"strategy={strategy!r} needs an estimator with predict_proba.")
    return OF_PROBA[strategy](estimator.predict_proba(X))


def regressor_scores(estimator, X, X_reference, strategy):
    """Scores of a regressor with predict(return_std=True)."""
    std = estimator.predict(X, return_std=True)[1]
    if strategy == "uncertainty":
        return std
    if strategy != "variance_reduction":
        raise ValueError(f"strategy={strategy!r} needs a classifier, not a regressor.")
    _need_covariance(estimator, strategy)
    return np.mean(estimator.latent_covariance(X, X_reference) ** 2, axis=1) / std**2


def _need_covariance(estimator, what):
    if not hasattr(estimator, "latent_covariance"):
        raise TypeError(
            f"strategy={what!r} needs an estimator with latent_covariance, which "
            f"{type(estimator).__name__} has not."
        )


# ---------------------------------------------------------------------------- checks


def check_strategy(strategy):
    if not callable(strategy) and strategy not in STRATEGIES:
        raise ValueError(
            f"strategy must be a callable or one of {list(STRATEGIES)}, got {strategy!r}."
        )


def rows_of(X):
    """Return X so that rows can be taken by index: CSR if sparse, tables and arrays as they are."""
    if sp.issparse(X):
        return X.tocsr()
    return X if hasattr(X, "shape") else np.asarray(X)


def take(X, index):
    """Return the rows of an array, CSR matrix or table."""
    if hasattr(X, "iloc"):
        return X.iloc[index]
    return X[index]


def reference_rows(X, X_reference, n_reference, random_state):
    """Return the reference rows: given ones, or a sample of the pool."""
    if X_reference is not None:
        return rows_of(X_reference)
    check_number("n_reference", n_reference, 1, integer=True)
    n = X.shape[0]
    if n <= n_reference:
        return X
    if random_state is None:
        return take(X, np.linspace(0, n - 1, n_reference).round().astype(int))
    rng = check_random_state(random_state)
    return take(X, np.sort(rng.choice(n, n_reference, replace=False)))


def make_posterior(estimator, X, strategy, reference):
    posterior = _Posterior(estimator, X, strategy)
    if reference is not None:
        _need_covariance(estimator, strategy)
        posterior.refer_to(reference)
    return posterior


def allowed_rows(n, candidates, exclude):
    """Return the sorted indices that may be chosen."""
    allowed = np.ones(n, dtype=bool)
    if candidates is not None:
        allowed[:] = False
        allowed[_indices("candidates", candidates, n)] = True
    if exclude is not None:
        allowed[_indices("exclude", exclude, n)] = False
    return np.flatnonzero(allowed)


def _indices(name, values, n):
    index = np.asarray(values)
    if index.dtype == bool:
        if index.shape != (n,):
            raise ValueError(f"{name} is a mask of shape {index.shape}, for a pool of {n} rows.")
        return np.flatnonzero(index)
    if index.size and (index.ndim != 1 or index.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a one-dimensional array of row numbers.")
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"{name} has row numbers outside 0 to {n - 1}.")
    return index.astype(np.intp)


def best_first(values):
    """Return the order of scores, largest first; differences at rounding level are ties."""
    scale = np.max(np.abs(values), initial=0.0)
    rounded = np.round(values / scale, 14) if 0 < scale < np.inf else values
    return np.argsort(-rounded, kind="stable")


def greedy(estimator, X_pool, X, n_instances, strategy, random_state):
    """Choose rows one after another, lowering the variances after each."""
    if callable(strategy) or strategy in ("random", "margin"):
        raise ValueError(
            f"diversify=True works through the variances, which strategy={strategy!r} does not use."
        )
    if is_regressor(estimator):
        raise ValueError("diversify=True needs a classifier.")
    _need_covariance(estimator, f"{strategy}, diversified")
    reference = None
    if strategy == "variance_reduction":
        reference = reference_rows(X_pool, None, 1000, random_state)
    posterior = make_posterior(estimator, X, strategy, reference)
    chosen: list[int] = []
    values = []
    for _ in range(n_instances):
        rated = latent_scores(posterior, strategy)
        rated[chosen] = -np.inf
        best = int(best_first(np.where(np.isfinite(rated), rated, -np.inf))[0])
        chosen.append(best)
        values.append(rated[best])
        if len(chosen) < n_instances:
            posterior.include(best)
    return np.array(chosen), np.array(values)
