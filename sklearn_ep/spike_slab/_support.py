"""Which features are in: those that stand alone, and sets of which one is in."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from .._estimator.annotations import Seed
from .._estimator.base import SavedEstimator
from .._estimator.checks import check_number, checked_draws
from .._estimator.summary import Printed, frame_of, text_table


class FeatureSupport(SavedEstimator):
    """What both estimators do with `_posteriors` and inclusions: select features, draw."""

    inclusion_proba_: np.ndarray
    expected_model_size_: float
    slab_variance_: Any
    prior_inclusion_: Any
    _posteriors: Any
    _remarks: Any

    def get_support(self, threshold: float = 0.5, fdr: float | None = None) -> np.ndarray:
        """Features that are in the model with more than a given probability.

        Parameters
        ----------
        threshold : float, default=0.5
            Probability; one half is the median model. Not looked at with `fdr`.
        fdr : float or None, default=None
            Share in (0, 1) of false ones that may be expected: the most probable features are
            taken, as many as keep the mean of 1 - `inclusion_proba_` at most there. For sets of
            correlated features see ``credible_sets(fdr=fdr)``.

        Returns
        -------
        mask : ndarray of bool of shape (d,)
            True for the features in the model.

        Raises
        ------
        ValueError
            If `threshold` is not in [0, 1], or `fdr` not in (0, 1).
        """
        check_is_fitted(self)
        check_number("threshold", threshold, 0, 1)
        if fdr is None:
            return self.inclusion_proba_ > threshold
        check_number("fdr", fdr, 0, 1, boundaries="neither")
        return expected_false(self.inclusion_proba_, fdr)

    def sample_posterior(
        self, n_samples: int = 1, random_state: Seed = None, exact_zeros: bool = False
    ) -> np.ndarray:
        """Draw coefficients from the approximate posterior, each draw from one of the nodes.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed.
        exact_zeros : bool, default=False
            Whether coefficients are exactly zero as often as they are out of the model, those of a
            group together. By default draws are normal at each node, with the moments that `coef_`,
            `covariance` and predictions state. Take zeros to compare models, and for sums of a few
            coefficients in doubt.

        Returns
        -------
        coef : ndarray of shape (n_samples, d) or (n_samples, d + 1)
            Draws, the intercept in the last column when one was fitted. Each costs O(d^2), for d >
            n O(n d). Exact zeros cost O(n^2 d) one to twenty times more for each node with d > n:
            columns of least inclusion are drawn in blocks of an eighth of the expected model, until
            no more columns than rows are left.

        Raises
        ------
        ValueError
            If `n_samples` is less than one.

        Notes
        -----
        A regression by chains or enumeration has drawn its models: coefficients of a draw are zero
        or normal, with `exact_zeros` or without, and their moments are those of the attributes.

        Otherwise `exact_zeros` draws the coefficients one after another in random order, each from
        its prior times the Gaussian posterior given those before it. The sites of coefficients
        still to be drawn stay those of EP, which is an approximation. With more rows than columns,
        inclusion, means and standard deviations of such draws agreed with the attributes to .02
        standard deviations in examples. With fewer rows they may differ: in one example of 14 rows
        and 25 columns means differed by .14 standard deviations. A group that is in is drawn
        jointly; one of more columns than rows is in as often as its columns together say. Exact
        copies of a column are in too often. Columns of inclusion below 1e-8 are never in.
        """
        rng = checked_draws(self, n_samples, random_state)
        return self._posteriors[0].coefficients(n_samples, rng, exact_zeros)

    def covariance(self, features: ArrayLike) -> np.ndarray:
        """Posterior covariance of some coefficients.

        Parameters
        ----------
        features : array-like of int of shape (k,), or mask of shape (d,)
            Which coefficients.

        Returns
        -------
        covariance : ndarray of shape (k, k)
            On the scale of `coef_`. O(n^2 k) for d > n: no d x d matrix is formed.
        """
        check_is_fitted(self)
        index = np.arange(len(self.inclusion_proba_))[np.asarray(features)]
        return self._posteriors[0].block(index)

    def _log_weights(self, rows, n_draws, rng):
        return None, self._remarks

    def _figures(self):
        noise = getattr(self, "noise_variance_", None)  # a classifier has none
        return {
            "log evidence": self.log_evidence_,
            **({} if noise is None else {"noise sd": float(np.sqrt(noise))}),
            "slab sd": float(np.sqrt(self.slab_variance_)),
            "prior inclusion": self.prior_inclusion_,
            "expected model size": self.expected_model_size_,
        }


@dataclass(frozen=True, repr=False)
class CredibleSets(Printed):
    """Sets of columns that hold an effect; printing shows them.

    Attributes
    ----------
    level : float
        Least probability of an effect near the lead of a set, its most probable column, and of the
        set to hold one given that.
    purity : float
        Least absolute correlation within a set.
    members : list of ndarray
        Numbers of the columns of each set, the most probable one first.
    inclusion : list of ndarray
        Inclusion probability of each member.
    correlation : ndarray of shape (s,)
        Least absolute correlation of two members; 1 for a set of one.
    probability : ndarray of shape (s,)
        Posterior probability that a set holds an effect.
    names : list of ndarray
        Names of the members.
    """

    level: float
    purity: float
    members: list[np.ndarray]
    inclusion: list[np.ndarray]
    correlation: np.ndarray
    probability: np.ndarray
    names: list[np.ndarray]

    def __len__(self):
        return len(self.members)

    def __iter__(self):
        return iter(self.members)

    @property
    def columns(self):
        """Set, name, column, inclusion of each member; correlation and probability of its set."""
        size = [len(m) for m in self.members]
        return {
            "set": np.repeat(np.arange(len(size)), size),
            "name": _joined(self.names, object),
            "column": _joined(self.members, int),
            "inclusion": _joined(self.inclusion, float),
            "correlation": np.repeat(self.correlation, size),
            "probability": np.repeat(self.probability, size),
        }

    def to_frame(self) -> Any:
        """Return the members as a data frame, one row a member, indexed by set.

        Returns
        -------
        frame : pandas.DataFrame
            Columns name, column, inclusion, correlation and probability.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        return frame_of(self.columns)

    def __str__(self):
        title = f"{len(self)} credible sets of level {self.level:g}, purity {self.purity:g}"
        return f"{title}\n\n{text_table(self.columns)}" if len(self) else title


def _joined(parts, kind):
    return np.concatenate([np.zeros(0, kind), *parts])


def find_sets(candidates, inclusion, names, level, purity, fdr=None):
    """Return the `CredibleSets` of a posterior.

    `candidates` are columns (u,), which of them are in what model, bool (S, u), weights (S,) of the
    models, and absolute correlations (u, u). A set begins with the most probable column that is in
    none yet, where enough models have a column correlated with it. It takes, of the columns
    correlated with all its members, the one that is in most of the models that have no member yet,
    until of those models enough have one. O(S u) a member. With `fdr` the other columns make less
    probable sets, and the most probable ones of all stay.
    """
    columns, on, weight, correlation = candidates
    leads = np.argsort(-inclusion[columns], kind="stable")
    every = _every_set(leads, (on, weight, correlation, weight @ on), level, purity, fdr)
    chosen = expected_false(np.array([p for _, p in every]), fdr or 1.0)
    found = [every[k] for k in np.flatnonzero(chosen)]
    order = [np.array(m)[np.argsort(-inclusion[columns[m]], kind="stable")] for m, _ in found]
    members = [columns[m] for m in order]
    least = np.array([correlation[np.ix_(m, m)].min() for m in order])
    probability = np.array([p for _, p in found])
    own, named = [inclusion[m] for m in members], [names[m] for m in members]
    return CredibleSets(level, purity, members, own, least, probability, named)


def _every_set(leads, law, level, purity, fdr):
    """Return members and probability of each set, with `fdr` of less probable ones as well."""
    free, found = np.ones(len(leads), dtype=bool), list[Any]()
    for least in [level] if fdr is None else [level, min(0.5, 1.0 - fdr)]:
        for lead in leads:
            members, probability = _grown(lead, free, law, level, least, purity)
            if members:
                free[members] = False
                found.append((members, probability))
    return found


def _grown(lead, free, law, level, least, purity):
    """Return the places of the members of a set and its probability; none where there is no set.

    Where purity ends a set before the level, it has to be as probable as the least.
    """
    on, weight, correlation, share = law
    allowed = free & (correlation[lead] >= purity)
    allowed[lead] = True
    if not free[lead] or share[allowed].sum() < least:
        return [], 0.0
    near = on[:, allowed].any(axis=1) @ weight
    if near < least:
        return [], 0.0
    members, left = [lead], weight * ~on[:, lead]
    allowed[lead] = False
    while left.sum() > 1.0 - level * near and allowed.any():
        places = np.flatnonzero(allowed)
        gain = left @ on[:, places]
        new = places[np.argmax(gain)]
        if gain.max() <= 0:
            break
        members.append(new)
        left = left * ~on[:, new]
        allowed &= correlation[new] >= purity
        allowed[new] = False
    probability = float(1.0 - left.sum())
    return (members, probability) if probability >= min(level * near, least) else ([], 0.0)


def expected_false(inclusion, share):
    """Return the most columns (d,) of which at most a share is expected to be out of the model."""
    order = np.argsort(-inclusion, kind="stable")
    wrong = np.cumsum(1.0 - inclusion[order]) / np.arange(1, len(order) + 1)
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[: np.count_nonzero(wrong <= share)]] = True
    return chosen
