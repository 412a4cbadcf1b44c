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

import numpy as np
from sklearn.utils import check_random_state

from ._trees import Grower, TreeEnsemble, Trees

# With 100 the log loss of the stack is .0004 lower on 26 sets, in 1.03 of its time.
_TREES = 90
_IN_BAG = 0.632  # share of the rows that a tree sees: that of distinct ones in a bootstrap sample
# Rows, which bounds the time and the memory of a tree: 10,000 rows of 20 columns take .3, .5 and
# .7 CPU s with 1000, 2000 and 4000, and have a log loss of .507, .510 and .488.
_MOST_IN_BAG = 4000
# Columns tried at a split: half of them, at most these. Of prostate tumours, with 6033 genes of 71
# rows, the log loss of the stack is .351 with 500 and .325 with 3000 (five splits, three seeds).
_MOST_TRIED = 3000


class OutOfBagForest(TreeEnsemble):
    """Forest with `loo_proba_`, the probability of each label by the trees that lack its row.

    Columns are measured in their ranges. Trees are kept as arrays: a saved stack has no objects of
    other packages.
    """

    _block = 2000

    def _scaled(self, X):
        return np.clip((X - self.low_) / self.span_, 0.0, 1.0).astype(np.float32)

    def _grow(self, data):
        """Grow the trees; return out-of-bag log probabilities (m, K) of `DistinctRows`."""
        self.prior_, self.low_, high = data.prior, data.rows.min(axis=0), data.rows.max(axis=0)
        self.span_ = np.where(high > self.low_, high - self.low_, 1.0)
        rows, n_distinct = np.ascontiguousarray(self._scaled(data.rows)), data.number[-1] + 1
        rng, share = check_random_state(self.random_state), min(_IN_BAG, _MOST_IN_BAG / n_distinct)
        grown, votes, absent = list[Trees](), np.zeros((len(rows), len(data.prior))), 0
        while len(grown) < _TREES:
            seen = (rng.uniform(size=n_distinct) < share)[data.number]
            if np.any(seen):
                tree, leaf = _grown(rows, data, seen * data.times, rng)
                grown.append(tree)
                votes[~seen] += tree.value[leaf[~seen]]
                absent = absent + ~seen
        self.trees_ = Trees.joined(grown)
        return self._smoothed(votes, absent)

    def _smoothed(self, votes, n_trees):
        """Return log probabilities (n, K): the mean of trees (n,), and of the prior as one more."""
        return np.log((votes + self.prior_) / (np.reshape(n_trees, (-1, 1)) + 1.0))

    def _votes(self, rows):
        leaves = self.trees_.leaves(self._scaled(rows))
        return self._smoothed(self.trees_.value[leaves].sum(axis=1), _TREES)


def _grown(rows, data, bag, rng):
    """Return the `Trees` of one tree for a bag (m,), and the leaves (m,) of all rows."""
    n_classes, tried = len(data.prior), min((rows.shape[1] + 1) // 2, _MOST_TRIED)
    # squared errors of indicators rank splits as Gini's impurity does, without checks of labels
    grower = Grower(max_features=tried, random_state=rng)
    target, seen = np.eye(n_classes)[data.own, int(n_classes == 2) :], bag > 0
    # checks of weights are half of the time of a tree of 170 rows: rows seen once go without
    weight = None if np.all(bag[seen] == 1.0) else bag[seen]
    tree = grower.fit(rows[seen], target[seen], sample_weight=weight, check_input=False).tree_
    leaf = tree.apply(rows)
    held = np.bincount(leaf * n_classes + data.own, bag, tree.node_count * n_classes)
    held = held.reshape(-1, n_classes)
    inner = tree.children_left[:, None] >= 0
    return Trees.of(tree, held / (held.sum(axis=1, keepdims=True) + inner)), leaf
