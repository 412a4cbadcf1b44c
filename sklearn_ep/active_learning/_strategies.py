"""The strategies by name: what each needs of an estimator, and its scores in closed form.

Look-ahead scores ask what a label would do to the predictions at reference rows. It moves the
Gaussian posterior by one moment-matched site, so that a reference row r of covariance C with the
candidate gets mean m_r + C a and variance v_r - C^2 b, and its class probabilities follow from the
link. From these come the mutual information of the two labels ("epig", Smith et al. 2023) and the
expected fall of the expected error (Roy and McCallum 2001). Probabilities before the label are
averages of those after it, not predictions: every score is then at least zero whatever the site has
left out.
"""

from functools import reduce

import numpy as np
from scipy.special import entr
from sklearn.base import is_regressor

from .._estimator.checks import check_choice
from .._estimator.pipelines import last_step
from ._links import LogisticLink
from ._posterior import posterior_of
from ._rows import best_first

LOOK_AHEAD = ("epig", "epig_entropy", "expected_error")
# Weight of the squared change of the probabilities, by which rows of expected error 0 differ.
_TIE = 1e-6
# Precision in which the probabilities of more than two classes are found.
_OF_MANY_CLASSES = np.float32


def look_ahead(posterior, name, rows=None):
    """Return look-ahead scores of pool rows.

    Parameters
    ----------
    posterior : Posterior
        With reference rows.
    name : {"epig", "epig_entropy", "expected_error"}
    rows : ndarray of int or None, default=None
        Row numbers; None rates all.

    Returns
    -------
    scores : ndarray of shape (n_rows,)
        In nats for "epig"; n m link evaluations for each label and class.
    """
    rows = np.arange(len(posterior.mean)) if rows is None else rows
    response = posterior.response
    # class 1 is the +1 of the only problem where there are two classes
    sites = [response.sites(sign, posterior.mean[rows], posterior.var[rows]) for sign in (-1, 1)]
    proba = response.label_proba(posterior.mean[rows], posterior.var[rows])
    measure = _expected_error if name == "expected_error" else _information
    out = np.empty(len(rows))
    for block, cross in posterior.cross(rows):
        moved = [
            _moved(posterior, cross, gradient[block].T, curvature[block].T)
            for gradient, curvature in sites
        ]
        out[block] = measure(_Outcomes(moved, proba[block]))
    if name == "epig_entropy":
        out *= _entropy(posterior.proba(rows))
    return out


def _moved(posterior, cross, gradient, curvature):
    """Return probabilities of +1 (K, n, m) at the reference rows once a label is in.

    By single precision for more than two classes, whose probabilities are normalised: of two, one
    is a difference from 1, which would lose its digits. Entropies are of the numbers as they are,
    in full precision: their differences are small, and never negative.
    """
    moments = posterior.reference_mean.T, posterior.reference_var.T
    numbers = (*moments, cross, gradient, curvature)
    if len(cross) > 1:
        numbers = tuple(a.astype(_OF_MANY_CLASSES) for a in numbers)
    out = []
    for mixture, mean, var, C, a, b in zip(posterior.response.mixtures, *numbers, strict=True):
        # rounding never makes a variance negative
        left = np.maximum(var - b[:, None] * C**2, np.finfo(C.dtype).eps * var)
        out.append(mixture.proba(mean + C * a[:, None], left).astype(float, copy=False))
    return out


def _p_log_p(p):
    out = np.maximum(p, 1e-300)
    np.log(out, out=out)
    out *= p
    return out


class _Outcomes:
    """Weights (n,) of the labels and probabilities (n, m) at the reference rows under each.

    A label of class y is +1 for problem y and -1 for all others: of the numbers before
    normalisation, one is exchanged. The one problem of two classes stands for two that are alike.
    `after` has a list over classes for each label, `before` their averages over labels.
    """

    def __init__(self, moved, proba):
        minus, plus = moved
        if len(minus) == 1:
            minus, plus = [1.0 - plus[0], minus[0]], [1.0 - minus[0], plus[0]]
        self.weight, self.after = proba.T, []
        for y in range(len(minus)):
            numbers = [*minus[:y], plus[y], *minus[y + 1 :]]
            norm = sum(numbers)
            self.after.append([number / norm for number in numbers])
        self.before = [self.mean(of_class) for of_class in zip(*self.after, strict=True)]

    def mean(self, values):
        """Return the average of values (n, ...), one a label, over the labels."""
        pairs = zip(self.weight, values, strict=True)
        return sum((weight * value.T).T for weight, value in pairs)


def _mean_of(terms):
    return sum(terms).mean(axis=1)


def _information(labels):
    """Mutual information (n,) of label and reference label, mean over reference rows."""
    known = [_mean_of(map(_p_log_p, after)) for after in labels.after]
    return labels.mean(known) - _mean_of(map(_p_log_p, labels.before))


def _expected_error(labels):
    """Expected fall (n,) of the expected error, mean over reference rows."""

    def sure(after):
        change = sum((a - b) ** 2 for a, b in zip(after, labels.before, strict=True))
        return (np.maximum.reduce(after) + _TIE * change).mean(axis=1)

    fall = labels.mean([sure(after) for after in labels.after])
    return fall - np.maximum.reduce(labels.before).mean(axis=1)


def _margin(proba):
    top = np.partition(proba, -2, axis=1)
    return top[:, -2] - top[:, -1]


def _uncertainty(proba):
    # along the classes NumPy's own maximum takes ten times as long
    return 0.5 - reduce(np.maximum, proba.T)


def _entropy(proba):
    return entr(proba).sum(axis=1)


OF_PROBA = {"margin": _margin, "uncertainty": _uncertainty, "entropy": _entropy}
_OF_LINK = ("bald", "information_gain")
STRATEGIES = ("auto", "random", *OF_PROBA, *_OF_LINK, "variance_reduction", *LOOK_AHEAD)
_OF_REGRESSORS = ("auto", "random", "uncertainty", "variance_reduction")


# ---------------------------------------------------------------------------- what they need


def check_strategy(strategy, estimator=None):
    """Refuse what is neither callable nor the name of a strategy, or not one for a regressor."""
    if not callable(strategy) and strategy not in STRATEGIES:
        raise ValueError(
            f"strategy must be a callable or one of {list(STRATEGIES)}, got {strategy!r}."
        )
    of_both = callable(strategy) or strategy in _OF_REGRESSORS
    if not of_both and estimator is not None and is_regressor(estimator):
        raise ValueError(f"strategy={strategy!r} needs a classifier, not a regressor.")


def check_objective(objective, strategy):
    """Raise a ValueError unless the objective is known, and the default or that of "auto"."""
    check_choice("objective", objective, ["log_loss", "error"])
    if objective == "error" and not (isinstance(strategy, str) and strategy == "auto"):
        raise ValueError(f"objective='error' is for strategy='auto', got strategy={strategy!r}.")


def resolved(strategy, estimator, objective="log_loss"):
    """Return the strategy that "auto" stands for with an estimator; others as they are."""
    if not isinstance(strategy, str) or strategy != "auto":
        return strategy
    estimator = last_step(estimator)
    if objective == "error" and not is_regressor(estimator):
        return "margin"
    if is_regressor(estimator):
        has_covariance = hasattr(estimator, "latent_covariance")
        return "variance_reduction" if has_covariance else "uncertainty"
    for method, name in (
        ("latent_covariance", "epig_entropy"),
        ("latent_mean_and_variance", "bald"),
        ("predict_proba", "entropy"),
        ("decision_function", "margin"),
    ):
        if hasattr(estimator, method):
            return name
    raise TypeError(
        f"strategy='auto' needs predict_proba or decision_function, and {type(estimator).__name__} "
        "has neither."
    )


def needs_reference(strategy):
    """Return whether a strategy counts what happens at reference rows."""
    return not callable(strategy) and (strategy in LOOK_AHEAD or strategy == "variance_reduction")


def is_greedy(strategy, diversify, n_instances):
    """Return whether a batch is built up one row after another."""
    if isinstance(diversify, str) and diversify == "auto":
        return not callable(strategy) and strategy in LOOK_AHEAD and n_instances > 1
    if not isinstance(diversify, bool | np.bool_):
        raise ValueError(f"diversify must be 'auto', True or False, got {diversify!r}.")
    return bool(diversify)


def works_on_posterior(strategy):
    """Return whether the scores follow from a `Posterior`, labels included on the way."""
    return not callable(strategy) and strategy not in ("random", "margin")


def require_method(estimator, strategy, method):
    """Refuse an estimator without a method that a strategy needs."""
    estimator = last_step(estimator)
    if not hasattr(estimator, method):
        raise TypeError(
            f"strategy={strategy!r} needs an estimator with {method}, which "
            f"{type(estimator).__name__} lacks; 'margin', 'uncertainty', 'entropy' and 'random' do "
            "not need it."
        )


def require_covariance(estimator, strategy):
    """Refuse an estimator without covariances, or without the means that go with them."""
    if not is_regressor(estimator):
        require_method(estimator, strategy, "latent_mean_and_variance")
    require_method(estimator, strategy, "latent_covariance")


# ---------------------------------------------------------------------------- scores


def latent_scores(posterior, strategy, rows=slice(None)):
    """Scores (n_rows,) at the present state of a `Posterior`, of all rows or of some."""
    if strategy in LOOK_AHEAD:
        return look_ahead(posterior, strategy, np.arange(len(posterior.mean))[rows])
    if not hasattr(posterior.response, "proba"):
        if strategy == "uncertainty":
            return np.sqrt(posterior.var[rows, 0])
        return (posterior.explained() / posterior.var)[rows, 0]
    if strategy in OF_PROBA:
        return OF_PROBA[strategy](posterior.proba(rows))
    response, var = posterior.response, posterior.var
    if strategy == "variance_reduction":
        # in logistic units, so that problems of several classes add up whatever their links
        scale = response.spread * np.array([link.slope**2 for link in response.links])
        precision = response.of_links("precision", posterior.mean, var)
        values = (scale * precision * posterior.explained() / (1.0 + precision * var))[rows]
    else:
        values = response.of_links(strategy, posterior.mean[rows], var[rows])
    weight = posterior.proba(rows) if values.shape[1] > 1 else 1.0
    return np.sum(weight * values, axis=1)


# Relative difference of variances that counts as none: rows that are alike differ by rounding, by
# 5e-15 at most on ten sets under a linear model and a Gaussian process after four labels. As many
# rows are rated there by 0, 1e-12 and 1e-6.
_ALIKE = 1e-9


def best_rows(posterior, strategy, rows, count):
    """Return the rows (count,) with the best scores among some.

    Of two classes, scores by the row's own moments fall as the latent mean leaves zero, and rise
    with the variance. A row that another beats in both is not rated: of 16,000 rows some 20 are.
    """
    links = getattr(posterior.response, "links", [])
    falls = len(links) == 1 and isinstance(links[0], LogisticLink)
    if count == 1 and falls and strategy in (*OF_PROBA, *_OF_LINK):
        distance, spread = np.abs(posterior.mean[rows, 0]), posterior.var[rows, 0]
        # few rows have more than the 64th that is near zero, the others need no sort: of 16,000
        # rows of a9a a third are left, and a choice takes 1.2 ms for 1.6
        near = distance <= np.partition(distance, len(rows) // 64)[len(rows) // 64]
        kept = np.flatnonzero(near | (spread >= (1.0 - _ALIKE) * spread[near].max()))
        order = kept[np.argsort(distance[kept])]
        largest = np.maximum.accumulate(spread[order])
        rows = np.sort(rows[order[spread[order] >= (1.0 - _ALIKE) * largest]])
    return rows[best_first(latent_scores(posterior, strategy, rows), count)]


def plain_scores(estimator, X, reference, strategy):
    """Scores (n,) of rows by a fitted estimator, whatever it offers."""
    if is_regressor(estimator) and strategy == "uncertainty":
        return np.asarray(estimator.predict(X, return_std=True)[1])
    if strategy in OF_PROBA:
        return _proba_scores(estimator, X, strategy)
    if needs_reference(strategy):
        require_covariance(estimator, strategy)
    else:
        require_method(estimator, strategy, "latent_mean_and_variance")
    return latent_scores(posterior_of(estimator, X, reference), strategy)


def _proba_scores(estimator, X, strategy):
    """Scores of any classifier by its probabilities; a binary margin by its decision function."""
    if strategy == "margin" and hasattr(estimator, "decision_function"):
        if len(estimator.classes_) == 2:
            return -np.abs(estimator.decision_function(X))
        if not hasattr(estimator, "predict_proba"):
            return _margin(estimator.decision_function(X))
    if not hasattr(estimator, "predict_proba"):
        raise TypeError(f"strategy={strategy!r} needs an estimator with predict_proba.")
    return OF_PROBA[strategy](estimator.predict_proba(X))


def greedy(posterior, strategy, allowed, n_instances):
    """Choose rows one after another, each as if the labels of those before were in.

    Parameters
    ----------
    posterior : Posterior
    strategy : str
    allowed : ndarray of bool of shape (n,)
    n_instances : int

    Returns
    -------
    chosen : list of int
    rated : list of ndarray of shape (n,)
        Scores at each choice, minus infinity where a row may not be chosen.
    """
    allowed, chosen, rated = allowed.copy(), [], []
    for _ in range(n_instances):
        values = np.where(allowed, latent_scores(posterior, strategy), -np.inf)
        best = int(best_first(values, 1)[0])
        allowed[best] = False
        chosen.append(best)
        rated.append(values)
        if len(chosen) < n_instances:
            posterior = posterior.including(best)
    return chosen, rated
