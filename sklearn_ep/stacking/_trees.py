"""Trees as arrays, the rows that they grow on, and the slope of their log probabilities."""

from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax
from sklearn import config_context
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.tree import ExtraTreeRegressor
from sklearn.utils import get_tags
from sklearn.utils.validation import validate_data

from .._engine.gaussian import row_blocks
from .._engine.left_out import ClassRows, LogPrior, calibrated
from .._estimator.checks import checked_weights


class Trees(NamedTuple):
    """Nodes of all trees: where each sends a row, and what it says of the classes.

    feature (N,) is -1 in leaves, child (N, 2) has the nodes of values up to the threshold (N,) and
    beyond it; value (N, K) is that of the classes in leaves.
    """

    root: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    child: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, tree, value):
        """Return one tree of scikit-learn with a value (N, K) of each node."""
        child = np.column_stack([tree.children_left, tree.children_right])
        feature = np.where(child[:, 0] >= 0, tree.feature, -1)
        return cls(np.zeros(1, int), feature, tree.threshold, child, value)

    @classmethod
    def joined(cls, grown):
        """Return several as one."""
        start = np.cumsum([0] + [len(tree.feature) for tree in grown[:-1]])
        child = [tree.child + first for tree, first in zip(grown, start, strict=True)]
        columns = (np.concatenate([tree[i] for tree in grown]) for i in (1, 2, 4))
        feature, threshold, value = columns
        return cls(start, feature, threshold, np.concatenate(child), value)

    def leaves(self, rows):
        """Return the leaves (n, T) of rows (n, d)."""
        at = np.tile(self.root, len(rows))
        which = np.repeat(np.arange(len(rows)), len(self.root))
        on_way = np.flatnonzero(self.feature[at] >= 0)
        while len(on_way):
            node = at[on_way]
            beyond = rows[which[on_way], self.feature[node]] > self.threshold[node]
            at[on_way] = node = self.child[node, beyond.astype(int)]
            on_way = on_way[self.feature[node] >= 0]
        return at.reshape(len(rows), -1)


class Grower(ExtraTreeRegressor):
    """Randomised tree that is not asked anew what kind of model it is, a seventh of its time."""

    def __sklearn_tags__(self):
        return _TAGS


_TAGS = get_tags(ExtraTreeRegressor())


class DistinctRows(NamedTuple):
    """Sorted distinct rows (m, d) with their labels (m,), seen `times` (m,).

    number (m,) is the same for rows that differ in the label alone; prior (K,) are the shares of
    the classes.
    """

    rows: np.ndarray
    own: np.ndarray
    times: np.ndarray
    number: np.ndarray
    prior: np.ndarray

    @classmethod
    def of(cls, X, label, weight, n_classes):
        """Return those of rows (n, d) with labels and weights (n,), and the place (n,) of each."""
        both = np.column_stack([X, label])
        both, place = np.unique(both, axis=0, return_inverse=True)
        rows, own, times = both[:, :-1], both[:, -1].astype(int), np.bincount(place, weight)
        number = np.append(0, np.cumsum(np.any(np.diff(rows, axis=0) != 0, axis=1)))
        mass = np.bincount(own, times, n_classes) + 0.5
        return cls(rows, own, times, number, mass / mass.sum()), place


class TreeEnsemble(ClassifierMixin, BaseEstimator):
    """Ensemble of trees with `loo_proba_`, the probability of each label without its row.

    `_grow` takes `DistinctRows` and returns left-out log probabilities (m, K); `_votes` gives log
    probabilities (n, K) of rows, that their slope multiplies, of which blocks of `_block` go
    through all trees at a time.
    """

    def __init__(self, random_state=None):
        self.random_state = random_state

    def fit(self, X, y, sample_weight=None):
        """Grow trees for rows X (n, d) with labels (n,), and learn the slope."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        weight = checked_weights(sample_weight, y)
        self.classes_, label = np.unique(y, return_inverse=True)
        seen = weight > 0
        data, place = DistinctRows.of(X[seen], label[seen], weight[seen], len(self.classes_))
        # a quarter of the time of a small tree goes into checks
        with config_context(skip_parameter_validation=True, assume_finite=True):
            log_p = self._grow(data)
        found = calibrated((LogPrior(1.0),), ClassRows(log_p, data.own, data.times))
        self.slope_, self.loo_proba_ = float(found.scale[0]), np.full(len(y), np.nan)
        self.loo_proba_[seen] = np.exp(found.log_proba)[place]
        return self

    def predict_log_proba(self, X):
        """Return log probabilities (n, K) of classes."""
        rows = validate_data(self, X, reset=False, dtype=np.float64)
        votes = [self._votes(rows[block]) for block in row_blocks(len(rows), most=self._block)]
        return log_softmax(self.slope_ * np.concatenate(votes), axis=1)

    def predict_proba(self, X):
        """Return probabilities (n, K) of classes."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X):
        """Return labels (n,)."""
        return self.classes_[self.predict_log_proba(X).argmax(axis=1)]
