"""Trees that know what they say of rows left out: a forest with out-of-bag probabilities.

Extremely randomised trees (Geurts, Ernst and Wehenkel 2006), each of a random share of the rows.
The trees that lack a row say what the forest would of it as a new one (Breiman 1996), without
folds. By these probabilities one slope of the log probabilities is learned: averages over trees are
too shy where classes are wide apart.

A tree sees all copies of a row or none: rows that are written several times, as by oversampling,
would else tell of themselves (with each row of pima three times the forest took .98 of the weight,
and the log loss of the stack rose from .571 to .695). Distinct rows have an order of their own, so
that a fit depends neither on theirs nor on whether weights are written out as repeated rows.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.tree import ExtraTreeClassifier
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.validation import validate_data

from .._estimator.checks import checked_weights

_TREES = 100
_IN_BAG = 0.632  # share of the rows that a tree sees: that of distinct ones in a bootstrap sample
# Rows, which bounds the time and the memory of a tree: 10,000 rows of 20 columns take .3, .5 and
# .7 CPU s with 1000, 2000 and 4000, and have a log loss of .507, .510 and .488.
_MOST_IN_BAG = 4000
# Columns tried at a split: half of them, at most these. Of prostate tumours, with 6033 genes of 71
# rows, the log loss of the stack is .351 with 500 and .325 with 3000 (five splits, three seeds).
_MOST_TRIED = 3000
_BLOCK = 2000  # rows that go through all trees at a time
_LOG_SLOPES = (-3.0, 3.0)


class _Trees(NamedTuple):
    """Nodes of all trees: where each sends a row, and the classes of the rows that it holds.

    feature (N,) is -1 in leaves, child (N, 2) has the nodes of values up to the threshold (N,) and
    beyond it; share (N, K) is that of the classes in leaves.
    """

    root: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    child: np.ndarray
    share: np.ndarray

    def leaves(self, rows):
        """Return the leaves (n, T) of rows (n, d) in single precision."""
        at = np.tile(self.root, len(rows))
        which = np.repeat(np.arange(len(rows)), len(self.root))
        on_way = np.flatnonzero(self.feature[at] >= 0)
        while len(on_way):
            node = at[on_way]
            beyond = rows[which[on_way], self.feature[node]] > self.threshold[node]
            at[on_way] = node = self.child[node, beyond.astype(int)]
            on_way = on_way[self.feature[node] >= 0]
        return at.reshape(len(rows), -1)


class OutOfBagForest(ClassifierMixin, BaseEstimator):
    """Forest with `loo_proba_`, the probability of each label by the trees that lack its row.

    Columns are measured in their ranges. Trees are kept as arrays: a saved stack has no objects of
    other packages.
    """

    def __init__(self, random_state=None):
        self.random_state = random_state

    def fit(self, X, y, sample_weight=None):
        """Grow trees for rows X (n, d) with labels (n,), and learn the slope."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        weight = checked_weights(sample_weight, y)
        self.classes_, label = np.unique(y, return_inverse=True)
        seen = weight > 0
        self.low_, high = X[seen].min(axis=0), X[seen].max(axis=0)
        self.span_ = np.where(high > self.low_, high - self.low_, 1.0)
        both = np.column_stack([self._scaled(X[seen]), label[seen]])
        both, place = np.unique(both, axis=0, return_inverse=True)
        rows, own, count = both[:, :-1], both[:, -1].astype(int), np.bincount(place, weight[seen])
        mass = np.bincount(own, count, len(self.classes_)) + 0.5
        self.prior_ = mass / mass.sum()
        log_p = self._grow(np.ascontiguousarray(rows, np.float32), own, count)
        self.slope_ = _slope(log_p, own, count)
        proba = np.exp(log_softmax(self.slope_ * log_p, axis=1))[np.arange(len(own)), own]
        self.loo_proba_ = np.full(len(y), np.nan)
        self.loo_proba_[seen] = proba[place]
        return self

    def _scaled(self, X):
        return np.clip((X - self.low_) / self.span_, 0.0, 1.0).astype(np.float32)

    def _grow(self, rows, own, count):
        """Grow the trees; return out-of-bag log probabilities (m, K) of distinct rows (m, d)."""
        rng, k = check_random_state(self.random_state), len(self.classes_)
        # rows that differ in the label alone are one; they are sorted
        number = np.append(0, np.cumsum(np.any(np.diff(rows, axis=0) != 0, axis=1)))
        share, grown = min(_IN_BAG, _MOST_IN_BAG / (number[-1] + 1)), list[_Trees]()
        votes, absent = np.zeros((len(own), k)), np.zeros(len(own))
        while len(grown) < _TREES:
            seen = (rng.uniform(size=number[-1] + 1) < share)[number]
            if np.any(seen):
                tree, leaf = _grown(rows, own, k, seen * count, rng)
                grown.append(tree)
                votes[~seen] += tree.share[leaf[~seen]]
                absent += ~seen
        self.trees_ = _joined(grown)
        return self._smoothed(votes, absent)

    def _smoothed(self, votes, n_trees):
        """Return log probabilities (n, K): the mean of trees (n,), and of the prior as one more."""
        return np.log((votes + self.prior_) / (np.reshape(n_trees, (-1, 1)) + 1.0))

    def predict_log_proba(self, X):
        """Return log probabilities (n, K) of classes."""
        rows = self._scaled(validate_data(self, X, reset=False, dtype=np.float64))
        trees, blocks = self.trees_, gen_batches(len(rows), _BLOCK)
        votes = [trees.share[trees.leaves(rows[block])].sum(axis=1) for block in blocks]
        return log_softmax(self.slope_ * self._smoothed(np.concatenate(votes), _TREES), axis=1)

    def predict_proba(self, X):
        """Return probabilities (n, K) of classes."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X):
        """Return labels (n,)."""
        return self.classes_[self.predict_log_proba(X).argmax(axis=1)]


def _grown(rows, own, n_classes, bag, rng):
    """Return the `_Trees` of one tree for a bag (m,), and the leaves (m,) of all rows."""
    tried = min((rows.shape[1] + 1) // 2, _MOST_TRIED)
    grower = ExtraTreeClassifier(max_features=tried, random_state=rng.randint(2**31 - 1))
    tree = grower.fit(rows, own, sample_weight=bag, check_input=False).tree_
    leaf = tree.apply(rows)
    held = np.bincount(leaf * n_classes + own, bag, tree.node_count * n_classes)
    held = held.reshape(-1, n_classes)
    child = np.column_stack([tree.children_left, tree.children_right])
    inner = child[:, 0] >= 0
    share = held / (held.sum(axis=1, keepdims=True) + inner[:, None])
    feature = np.where(inner, tree.feature, -1)
    return _Trees(np.zeros(1, int), feature, tree.threshold, child, share), leaf


def _joined(grown):
    """Return the `_Trees` of several."""
    start = np.cumsum([0] + [len(tree.feature) for tree in grown[:-1]])
    child = [tree.child + first for tree, first in zip(grown, start, strict=True)]
    feature, threshold, share = (np.concatenate([tree[i] for tree in grown]) for i in (1, 2, 4))
    return _Trees(start, feature, threshold, np.concatenate(child), share)


def _slope(log_p, own, count):
    """Return the posterior mode of the slope of log probabilities (m, K) of labels (m,).

    The prior of its log is standard normal.
    """

    def loss(log_slope):
        log_own = log_softmax(np.exp(log_slope) * log_p, axis=1)[np.arange(len(own)), own]
        return 0.5 * log_slope**2 - count @ log_own

    return float(np.exp(minimize_scalar(loss, bounds=_LOG_SLOPES, method="bounded").x))
