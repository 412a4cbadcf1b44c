"""Trees that know what they say of rows left out: a forest with out-of-bag probabilities.

Extremely randomised trees (Geurts, Ernst and Wehenkel 2006), each of a random share of the rows.
The trees that lack a row say what the forest would of it as a new one (Breiman 1996), without
folds. By these probabilities one slope of the log probabilities is learned: averages over trees are
too shy where classes are wide apart.

Trees see the distinct rows in an order of their own, and bags are drawn by copies: a fit depends
neither on the order of the rows nor on whether weights are written out as repeated rows.
"""

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, logit
from scipy.stats import beta
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.tree import ExtraTreeClassifier
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.validation import validate_data

from .._estimator.checks import check_number, checked_weights

_TREES = 100
_IN_BAG = 0.632  # share of the copies that a tree sees: that of distinct rows in a bootstrap sample
_MOST_IN_BAG = 2000  # copies, which bounds the time of a tree and the memory that it keeps
_MOST_TRIED = 500  # columns at a split, of which there are half: on two sets of genes as good as it
_BLOCK = 2000  # rows that go through all trees at a time
_LOG_SLOPES = (-3.0, 3.0)


class _Trees(NamedTuple):
    """Nodes of all trees: where each sends a row, and the share that leaves have of the rows.

    feature (N,) is -1 in leaves, child (N, 2) has the nodes of values up to the threshold (N,) and
    beyond it; share (N, m) is sparse, and its rows sum to one in leaves.
    """

    root: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    child: np.ndarray
    share: sp.csr_array

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
        rng, label = check_random_state(self.random_state), np.eye(len(self.classes_))[own]
        grown: list[Any] = []
        votes, absent = np.zeros(label.shape), np.zeros(len(own))
        while len(grown) < _TREES:
            bag = _bag(count, rng)
            if np.any(bag):
                tree, leaf = _grown(rows, own, bag, rng)
                grown.append(tree)
                out = 1.0 - bag / count
                votes += out[:, None] * (tree.share @ label)[leaf]
                absent += out
        self.trees_ = _joined(grown)
        self.of_class_ = self.trees_.share @ label
        return self._smoothed(votes, absent)

    def _smoothed(self, votes, n_trees):
        """Return log probabilities (n, K): the mean of trees (n,), and of the prior as one more."""
        return np.log((votes + self.prior_) / (np.reshape(n_trees, (-1, 1)) + 1.0))

    def _in_blocks(self, X, of_leaves):
        """Return what `of_leaves` makes of the leaves (n, T) of rows, block by block."""
        rows = self._scaled(validate_data(self, X, reset=False, dtype=np.float64))
        blocks = gen_batches(len(rows), _BLOCK)
        return np.concatenate([of_leaves(self.trees_.leaves(rows[block])) for block in blocks])

    def _log_means(self, leaves):
        """Return the log probabilities (n, K) before the slope."""
        return self._smoothed(self.of_class_[leaves].sum(axis=1), leaves.shape[1])

    def predict_log_proba(self, X):
        """Return log probabilities (n, K) of classes."""
        return log_softmax(self.slope_ * self._in_blocks(X, self._log_means), axis=1)

    def predict_proba(self, X):
        """Return probabilities (n, K) of classes."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X):
        """Return labels (n,)."""
        return self.classes_[self.predict_log_proba(X).argmax(axis=1)]

    def predict_proba_interval(self, X, level=0.9):
        """Return intervals of class probabilities, of as many rows as the leaves effectively hold.

        A forest is a mean of labels, with a weight for each training row. The probability of a
        class has a Beta distribution about it, with the effective number of these rows as count;
        the slope is applied to the log odds of its quantiles.
        """
        check_number("level", level, 0, 1, boundaries="neither")
        found = self._in_blocks(X, lambda leaves: self._quantiles(leaves, level))
        return found[:, 1] if len(self.classes_) == 2 else found

    def _quantiles(self, leaves, level):
        """Return intervals (n, K, 2)."""
        n, n_trees = leaves.shape
        start = np.arange(n + 1) * n_trees
        sent = sp.csr_array(
            (np.full(leaves.size, 1.0 / n_trees), leaves.ravel(), start),
            shape=(n, len(self.of_class_)),
        )
        size = 1.0 / (sent @ self.trees_.share).power(2).sum(axis=1)[:, None, None]
        log_p = self._log_means(leaves)
        p, moved = np.exp(log_p)[:, :, None], log_softmax(self.slope_ * log_p, axis=1)
        ends = beta.ppf(
            [0.5 - 0.5 * level, 0.5 + 0.5 * level], (size + 1) * p, (size + 1) * (1 - p)
        )
        return expit(logit(np.exp(moved))[:, :, None] + self.slope_ * (logit(ends) - logit(p)))


def _bag(count, rng):
    """Return the copies (m,) that a tree sees of rows with count (m,) of them."""
    share, whole = min(_IN_BAG, _MOST_IN_BAG / count.sum()), np.floor(count)
    rest = (count - whole) * (rng.uniform(size=len(count)) < share)
    return rng.binomial(whole.astype(np.int64), share) + rest


def _grown(rows, own, bag, rng):
    """Return the `_Trees` of one tree for a bag (m,), and the leaves (m,) of all rows."""
    tried = min((rows.shape[1] + 1) // 2, _MOST_TRIED)
    grower = ExtraTreeClassifier(max_features=tried, random_state=rng.randint(2**31 - 1))
    tree = grower.fit(rows, own, sample_weight=bag, check_input=False).tree_
    leaf, here = tree.apply(rows), np.flatnonzero(bag)
    held = np.bincount(leaf, bag, tree.node_count)
    share = (bag[here] / held[leaf[here]], (leaf[here], here))
    share = sp.csr_array(share, shape=(tree.node_count, len(rows)))
    child = np.column_stack([tree.children_left, tree.children_right])
    feature = np.where(child[:, 0] < 0, -1, tree.feature)
    return _Trees(np.zeros(1, int), feature, tree.threshold, child, share), leaf


def _joined(grown):
    """Return the `_Trees` of several."""
    start = np.cumsum([0] + [len(tree.feature) for tree in grown[:-1]])
    child = [tree.child + first for tree, first in zip(grown, start, strict=True)]
    feature, threshold = (np.concatenate([t[i] for t in grown]) for i in (1, 2))
    share = sp.vstack([tree.share for tree in grown], format="csr")
    return _Trees(start, feature, threshold, np.concatenate(child), share)


def _slope(log_p, own, count):
    """Return the slope of log probabilities (m, K) whose log has a standard normal posterior mode.

    The prior of the log slope is standard normal.
    """

    def loss(log_slope):
        log_own = log_softmax(np.exp(log_slope) * log_p, axis=1)[np.arange(len(own)), own]
        return 0.5 * log_slope**2 - count @ log_own

    return float(np.exp(minimize_scalar(loss, bounds=_LOG_SLOPES, method="bounded").x))
